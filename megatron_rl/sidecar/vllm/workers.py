"""Calls of our extension's methods in all workers of one engine (`worker.WorkerExtension`)."""

from typing import Any

import msgspec

from megatron_rl.sidecar.engines import EngineRefused, RefusalCode, WeightsNotWritten, WrongWeights
from megatron_rl.sidecar.vllm.connection import Connection
from megatron_rl.sidecar.vllm.routes import WORKERS, WorkersCall

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
        call = msgspec.msgpack.encode(WorkersCall(method, list(arguments)))
        return self.check(step, msgspec.msgpack.decode(await self._connection.send(step, WORKERS, call)))

    def check(self, step: str, answers: list[Answer]) -> list[Answer]:
        """Return the workers' answers to a call for a step; raise a refusal among them."""
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
