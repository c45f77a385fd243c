"""Run on npu:0 without an NPU: shapes, dtypes and devices of every operation, and no numbers.

    python -m tests.npu.passes attention            # our attention, each backend, forward and backward
    python -m tests.npu.passes log_probs
    python -m tests.npu.passes faults               # must be found: an operand on the host, a number read
    python -m tests.npu.passes models FOLDER        # the models there, with all kinds of layers; needs MindSpeed

    python -m tests.npu.passes configuration FLAG...  # the fields of Megatron's configuration

In torch's FakeTensorMode an operation on tensors of two devices is an error, and so is a host that reads a number of
the device. The operators are torch_npu's own. The script prints a line of JSON: the outcome of each case.
"""

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.ops.log_probs import VocabularyShard, output_log_probs
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.platforms import Platform
from megatron_rl.trainer.data.packing import Pack, pack_groups
from megatron_rl.types import Architecture
from tests.kernels.shared_prompt_cases import BRANCHED, RAGGED
from tests.npu import cann

GROUPS = [([5, 6, 7, 8], [[1, 2, 3], [9, 10]]), ([11, 12], [[13, 14, 15, 16]])]
ON_NPU = ("naive", "merge", "gather")


def attention() -> "Passes":
    for backend, (name, layout) in itertools.product(ON_NPU, {"ragged": RAGGED, "branched": BRANCHED}.items()):

        def run(backend: str = backend, layout: Any = layout) -> str:
            inputs = [_leaf(layout.num_tokens, num_heads, 64) for num_heads in (4, 2, 2)]
            out = BACKENDS[backend].attention(*inputs, layout, 0.125, None)
            out.sum().backward()
            return _describe(out, *[tensor.grad for tensor in inputs])

        yield f"{backend} {name}", run


def log_probs() -> "Passes":
    def run() -> str:
        hidden, weight = _leaf(7, 32), _leaf(128, 32)
        targets = torch.empty(7, dtype=torch.long, device="npu")
        found = output_log_probs(hidden, weight, targets, VocabularyShard(0, 120), block_columns=32)
        found.sum().backward()
        return _describe(found, hidden.grad, weight.grad)

    yield "log_probs", run


def faults() -> "Passes":
    def leave_on_host() -> str:
        hidden, weight = _leaf(7, 32), _leaf(128, 32)
        targets = torch.empty(7, dtype=torch.long)
        return _describe(output_log_probs(hidden, weight, targets, VocabularyShard(0, 120), block_columns=32))

    def read() -> str:
        return f"{_leaf(3).sum().item()}"

    yield "a tensor on the host", leave_on_host
    yield "a number that is read", read


def models(folder: str) -> "Passes":
    platform = _install()
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    # The generator of a missing device has no state.
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()

    from megatron_rl.command_line.resolve import build_transformer_config
    from megatron_rl.shared.weights.families import read_architecture
    from megatron_rl.trainer.mcore.model.gpt import build_chunks

    for model, implementation, backend in itertools.product(
        sorted(Path(folder).iterdir()), ("local", "transformer_engine"), ON_NPU
    ):
        architecture = read_architecture(model)
        if backend == "merge" and architecture.sliding_window is not None:
            continue
        if backend == "gather" and architecture.has_sinks:
            continue

        def run(
            architecture: Architecture = architecture, implementation: str = implementation, backend: str = backend
        ) -> str:
            overrides = {"bf16": True, "transformer_impl": implementation, "gradient_accumulation_fusion": False}
            config = build_transformer_config(architecture, overrides, platform)
            (chunk,) = build_chunks(config, architecture, attention_backend=backend, device=torch.device("npu"))
            found = chunk(_on_npu(pack_groups(GROUPS)))
            found.sum().backward()
            return _describe(found, *[parameter.grad for parameter in chunk.parameters()])

        yield f"{model.name} {implementation} {backend}", run


def _install() -> Platform:
    from megatron_rl import platforms

    cann.stand_in_for_packages()
    platform = platforms.select("npu")
    platform.install()
    return platform


def configuration(*words: str) -> dict[str, str]:
    _install()
    from megatron_rl.command_line.parse import parse

    return describe(parse([*words, "--platform", "npu"]).transformer)


def describe(config: Any) -> dict[str, str]:
    """Return the fields of a configuration, except functions."""
    return {name: repr(value) for name, value in vars(config).items() if not callable(value)}


Passes = Iterator[tuple[str, Callable[[], str]]]
PASSES: dict[str, Callable[..., Passes]] = {
    "attention": attention, "log_probs": log_probs, "faults": faults, "models": models
}  # fmt: skip


def main(name: str, *arguments: str) -> None:
    """Print the outcomes as JSON."""
    found = configuration(*arguments) if name == "configuration" else _run(name, *arguments)
    print(json.dumps(found))


def _run(name: str, *arguments: str) -> dict[str, str]:
    found = {}
    passes = list(PASSES[name](*arguments))
    with FakeTensorMode():
        for title, run in passes:
            try:
                found[title] = run()
            except Exception as error:
                found[title] = f"{type(error).__name__}: {error}"
    return found


def _leaf(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="npu", requires_grad=True)


def _on_npu(pack: Pack) -> Pack:
    tensors = {
        field.name: torch.empty_like(value, device="npu")
        for field in dataclasses.fields(pack)
        if isinstance(value := getattr(pack, field.name), torch.Tensor)
    }
    return dataclasses.replace(pack, **tensors)


def _describe(*tensors: torch.Tensor | None) -> str:
    """Return the devices of the results, and the number of missing gradients."""
    there = [tensor for tensor in tensors if tensor is not None]
    assert all(tensor.isfinite().dtype == torch.bool for tensor in there)
    devices = sorted({str(tensor.device) for tensor in there})
    return ", ".join([*devices, *([f"{len(tensors) - len(there)} missing"] if len(there) < len(tensors) else [])])


if __name__ == "__main__":
    main(*sys.argv[1:])
