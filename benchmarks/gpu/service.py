"""Publish, generate and train with one engine that is started once.

Generation is measured without training: groups go from their submission to the last slot. vLLM's own `LLM.generate`,
in another process on the same GPU, is given the same prompts with the same sampling. Both take turns. It ends before
iterations of a run are measured, each with a trainer of its own for each load.
"""

import contextlib
import dataclasses
import os
import random
import statistics
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks import vllm_offline
from benchmarks.gpu import engine, publish, schedules, turns
from benchmarks.gpu.work import Work
from benchmarks.publish import Publishing, publishing
from megatron_rl import platforms
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.vllm.answers import Limits, build_call
from tests.sidecar.sidecar_process import sidecar

GROUP_SIZE = 8
NUM_ROUNDS = 2
# Seconds that a round of generation, and a run at a load, may take.
SECONDS_OF_A_ROUND, SECONDS_OF_A_LOAD = 15.0, 25.0


@dataclasses.dataclass(frozen=True)
class Request:
    """The groups of a measurement, whose responses are all in flight at once and equally long."""

    num_groups: int
    num_tokens: int
    num_prompt_tokens: int
    vocab_size: int

    def draw_prompts(self, version: int) -> list[list[int]]:
        """Draw the prompts of a version, so that no keys and values of an earlier one serve it."""
        draw = random.Random(version)
        return [
            [draw.randrange(2, self.vocab_size) for _ in range(self.num_prompt_tokens)] for _ in range(self.num_groups)
        ]

    @property
    def num_responses(self) -> int:
        return self.num_groups * GROUP_SIZE

    @property
    def sampling(self) -> wire.Sampling:
        return wire.Sampling(max_tokens=self.num_tokens, temperature=1.0, ignore_eos=True)

    def __str__(self) -> str:
        return f"{self.num_responses} x {self.num_tokens}"


def measure(work: Work) -> None:
    """Add the rows of all three tables, as long as there is time."""
    platform = platforms.select(work.device)
    platform.install()
    name = "tiny" if work.is_tiny else work.size
    model = work.make_model()
    if lack := publish.find_lack(work):
        work.leave_out("publish", name, lack)
        return
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        run, reward = Path(temporary) / f"service-{os.getpid()}", Path(temporary) / "reward.py"
        reward.write_text(schedules.REWARD)
        words = [*engine.list_words_of_sidecar(work, model), "--reward", f"{reward}:parity"]
        # It starts while the sidecar starts.
        of_alone = stack.enter_context(contextlib.ExitStack())
        alone = of_alone.enter_context(_start_alone(work, model))
        stack.enter_context(sidecar(run, *words))
        with publishing(model, run, work.device) as trainer:
            moments = publish.publish_rounds(trainer, work)
            _measure_generation(work, trainer, run, alone, moments[-1].version + 1)
            # The sidecar's trace has a line for each iteration, with the publishes before it.
            publish.add_row(work, name, run, moments, trainer)
        of_alone.close()
        turns.release(platform)
        _measure_schedules(work, run)


def _start_alone(work: Work, model: Path) -> AbstractContextManager[vllm_offline.Generate]:
    """Start vLLM without a service."""
    if work.is_tiny:
        core = max(os.sched_getaffinity(0))
        return vllm_offline.start(
            model, core, engine.TINY_LEN, engine.TINY_AT_ONCE, in_one_process=True, is_awaited=False
        )
    gpu = vllm_offline.OnGpu(work.architecture.dtype, engine.FREE_SHARE, engine.CACHE_BYTES)
    return vllm_offline.start(model, 0, engine.MAX_MODEL_LEN, engine.NUM_AT_ONCE, gpu=gpu, is_awaited=False)


def _measure_generation(work: Work, trainer: Publishing, run: Path, alone: vllm_offline.Generate, version: int) -> None:
    """Measure rounds in turns, each with prompts of its own; the first warms up."""
    vocab_size = work.architecture.vocab_size
    request = Request(4, 16, 8, vocab_size) if work.is_tiny else Request(32, 512, 32, vocab_size)
    rates: list[tuple[float, float]] = []
    for number in range(version, version + 1 + (1 if work.is_tiny else NUM_ROUNDS)):
        if len(rates) > 1 and work.seconds_left < SECONDS_OF_A_ROUND:
            break
        rates.append((_ask_service(trainer, run.name, request, number), _ask_alone(alone, request, number)))
    of_service, of_alone = zip(*rates[1:], strict=True)
    work.add(
        "generation", str(request),
        service=statistics.median(of_service),
        alone=statistics.median(of_alone),
        service_vs_alone=statistics.median(ours / theirs for ours, theirs in rates[1:]),
    )  # fmt: skip


def _ask_service(trainer: Publishing, run: str, request: Request, version: int) -> float:
    """Return tokens a second from submission to the last slot; the weights are published before."""
    fingerprint = trainer.publisher.publish(version)
    prompts = [
        wire.Prompt(index=index, row=str(index), tokens=wire.encode_tokens(tokens))
        for index, tokens in enumerate(request.draw_prompts(version))
    ]
    plan = wire.Plan(num_prompts=request.num_groups, group_size=GROUP_SIZE, num_replicas=1, micro_batch_size=GROUP_SIZE)
    submission = wire.Submission(
        run=run, version=version, fingerprint=fingerprint, plan=plan, prompts=prompts, sampling=request.sampling,
        deadline_seconds=300,
    )  # fmt: skip
    begun = time.perf_counter()
    trainer.client.submit(submission)
    slots = [trainer.client.slot(version, 0, index, 300) for index in range(request.num_groups)]
    seconds = time.perf_counter() - begun
    trainer.client.complete(version)
    num_bytes = sum(len(response.tokens) for slot in slots for part in slot.parts for response in part.responses)
    assert num_bytes == 4 * request.num_responses * request.num_tokens
    return num_bytes / 4 / seconds


def _ask_alone(generate: vllm_offline.Generate, request: Request, version: int) -> float:
    """Return tokens a second for the calls that the service makes."""
    limits = Limits(request.num_prompt_tokens + request.num_tokens, request.num_responses, request.vocab_size)
    prompts = request.draw_prompts(version)
    calls = [
        build_call(
            GroupRequest(f"alone-{version}-{index}", tuple(tokens), GROUP_SIZE, seed, request.sampling), limits, ""
        )
        for index, tokens in enumerate(prompts)
        for seed in [1 + GROUP_SIZE * (index + request.num_groups * version)]
    ]
    return generate(prompts, [call.sampling for call in calls])


def _measure_schedules(work: Work, run: Path) -> None:
    """Run a trainer for each load that is left."""
    for number, load in enumerate((schedules.TINY,) if work.is_tiny else schedules.OTHERS):
        if number and not work.has_time("schedules", str(load), SECONDS_OF_A_LOAD):
            continue
        words = ["--rollout-endpoint", (run / "address").read_text().strip()]
        try:
            schedules.add_row(work, load, schedules.run_trainer(work, load, run, words, is_own=False))
        except TimeoutError as error:
            work.leave_out("schedules", str(load), str(error))
