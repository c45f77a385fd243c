"""Calls of our extension's methods in all workers of one engine (`worker.WorkerExtension`)."""

from typing import Any

from megatron_rl.sidecar.engines import EngineRefused, RefusalCode, WeightsNotWritten, WrongWeights
from megatron_rl.sidecar.vllm.connection import Connection

_REFUSALS: dict[str, type[EngineRefused]] = {
    RefusalCode.REFUSED: EngineRefused,
    RefusalCode.NOT_WRITTEN: WeightsNotWritten,
    RefusalCode.WRONG_WEIGHTS: WrongWeights,
}
"""The error to raise for each code of a worker's refusal."""

Answer = dict[str, Any]


class Workers:
    """The workers of the engine `name`, called through its server."""

    def __init__(self, name: str, connection: Connection) -> None:
        self._name = name
        self._connection = connection

    async def __call__(self, step: str, method: str, *arguments: str) -> list[Answer]:
        """Call a method in every worker, for a step; raise a worker's refusal as the error that its code stands for."""
        content = {"method": method, "args": list(arguments)}
        answers: list[Answer] = (await self._connection.post(step, "/collective_rpc", content))["results"]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                code, text = answer.get("code"), f"engine {self._name}, worker {rank}, {step}: {answer['error']}"
                if code not in _REFUSALS:
                    raise EngineRefused(f"{text} (code {code!r} is unknown: run the same megatron_rl on both sides)")
                raise _REFUSALS[code](text)
        return answers

    def get_common(self, step: str, answers: list[Answer], key: str) -> str:
        """Return the value that all answers have."""
        values = {str(answer[key]) for answer in answers}
        if len(values) != 1:
            raise EngineRefused(f"engine {self._name}, {step}: its workers differ in their {key}: {sorted(values)}")
        return values.pop()
