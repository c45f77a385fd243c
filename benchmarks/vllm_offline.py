"""Run vLLM alone: `LLM.generate` in a process of its own, on one core or a GPU; the service is measured against it."""

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from megatron_rl.sidecar.vllm.server import EXTENSION, LARGE_PAGES

Prompts = Sequence[Sequence[int]]
Sampling = Sequence[dict[str, Any]]
Generate = Callable[[Prompts, Sampling], float]


@dataclasses.dataclass(frozen=True)
class OnGpu:
    """The settings of vLLM on the visible GPU, beside other processes."""

    dtype: str
    free_share: float
    """The share of the GPU's memory that must be free."""
    cache_bytes: int
    """Bytes of memory for keys and values."""


@contextmanager
def start(
    model: Path,
    core: int,
    max_model_len: int,
    max_num_seqs: int,
    in_one_process: bool = False,
    gpu: OnGpu | None = None,
    is_awaited: bool = True,
) -> Iterator[Generate]:
    """Return a function that samples a group for each prompt and returns its tokens a second.

    In one process vLLM starts in a third of the time, but is not the rival that a user would choose. On a GPU it may
    use all cores. If the start is not awaited, the first call waits for its end.
    """
    ours, theirs = multiprocessing.Pipe()
    arguments = (str(model), core, max_model_len, max_num_seqs, in_one_process, gpu, theirs)
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments)
    # Read when a process starts, or when it imports torch; glibc's is the allocator that engines have.
    on_cpu = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", LARGE_PAGES)}
    with _environment(on_cpu if gpu is None else {}):
        process.start()
    # So that the end of the process is noticed.
    theirs.close()
    is_ready = False

    def await_ready() -> None:
        nonlocal is_ready
        if not is_ready:
            assert ours.recv() == "ready"
            is_ready = True

    def generate(prompts: Prompts, sampling: Sampling) -> float:
        await_ready()
        ours.send((prompts, sampling))
        return float(ours.recv())

    try:
        if is_awaited:
            await_ready()
        yield generate
    finally:
        with suppress(BrokenPipeError):
            ours.send(None)
        process.join(30)
        process.kill()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set the environment that processes started meanwhile inherit."""
    before = dict(os.environ)
    os.environ |= values
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def _serve(
    model: str,
    core: int,
    max_model_len: int,
    max_num_seqs: int,
    in_one_process: bool,
    gpu: OnGpu | None,
    pipe: Pipe,
) -> None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_one_process)),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if gpu is None:
        os.sched_setaffinity(0, {core})
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1",
        }  # fmt: skip
        device: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
    else:
        device = {
            "dtype": gpu.dtype, "gpu_memory_utilization": gpu.free_share, "kv_cache_memory_bytes": gpu.cache_bytes,
        }  # fmt: skip
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, max_model_len=max_model_len, max_num_seqs=max_num_seqs, skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs", generation_config="vllm", worker_extension_cls=EXTENSION, **device,
    )  # fmt: skip
    # The patches that engines have too.
    llm.collective_rpc("megatron_rl_prepare")
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        prompts, sampling = work
        begun = time.perf_counter()
        results = llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [SamplingParams(**params) for params in sampling],
            use_tqdm=False,
        )
        seconds = time.perf_counter() - begun
        pipe.send(sum(len(output.token_ids) for result in results for output in result.outputs) / seconds)
    # At the end of this process, which waits for the engine's end first, it would never come.
    llm.llm_engine.engine_core.shutdown()
