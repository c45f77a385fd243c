"""A CUDA device without values: the platform on which a training step is counted.

Its tensors lie on torch's device "meta". For megatron that is "cuda", as the emulated device of the rehearsal is. What
one kernel of a GPU computes is one launch: torch's norm, functions that megatron compiles, and our Triton kernels.
"""

import dataclasses
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from benchmarks.ledger.counting import ATTENTION, Call, Entry, Kind, active, answer_read, count_bytes
from benchmarks.ledger.regions import as_one_launch, as_part
from megatron_rl import platforms
from megatron_rl.ops import log_probs
from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt.backends import gather
from megatron_rl.ops.shared_prompt.layout import Layout, find_strands
from megatron_rl.ops.shared_prompt.tables import find_tables
from megatron_rl.ops.triton_support import refuse_triton
from megatron_rl.platforms import cpu_torch, host
from megatron_rl.platforms.cpu import CpuPlatform
from megatron_rl.platforms.cpu_torch import Replacement
from megatron_rl.platforms.cuda import CudaPlatform
from megatron_rl.platforms.megatron_patches import Patch, replace_import

DEVICE = torch.device("meta")
# The passes of kernels over tensors that they neither read once nor write once: of the logits, the one takes a number a
# row, and the other replaces them.
_PASSES = {("join_kernel", "logits_NC"): 0, ("gradient_kernel", "logits_NC"): 2}
# The registration of a kernel lasts as long as these objects.
_libraries: list[torch.library.Library] = []


class CountedPlatform(CpuPlatform):
    """A CUDA device whose tensors have no values."""

    name = "cuda"
    device_type = "cuda"
    is_host = False

    @property
    def unsupported_fusions(self) -> Mapping[str, bool]:
        return CudaPlatform().unsupported_fusions

    def _prepare(self) -> None:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        host.share_gloo_device()
        dist.Backend.backend_capability["gloo"].append("meta")
        _replace_methods()
        _register_kernels()
        replace_import(cpu_torch.build_import_function((Replacement("torch", device_literals), *_REPLACEMENTS)))

    def _megatron_patches(self) -> tuple[Patch, ...]:
        return (Patch("jit fuser", "megatron.core.jit", compile_as_one_launch), cpu_torch.PATCHES[1])

    def device(self) -> torch.device:
        return DEVICE

    def place(self, num_threads: int) -> None:
        """Do nothing: nothing is computed."""


def compile_as_one_launch(module: Any) -> None:
    """Count a function that megatron compiles as one launch: here nothing is compiled."""
    module.jit_fuser = as_one_launch


def device_literals() -> dict[str, Any]:
    """Return factories for which "cuda" is the device."""
    return {name: _with_device(getattr(torch, name)) for name in cpu_torch.FACTORIES}


def the_device() -> dict[str, Any]:
    """Return the device's functions under CUDA's names."""
    return {**cpu_torch.the_device(), "current_device": lambda: DEVICE, "is_available": lambda: True}


_REPLACEMENTS = tuple(
    Replacement(one.module, the_device) if one.names is cpu_torch.the_device else one
    for one in cpu_torch.REPLACEMENTS
    if one.names is not cpu_torch.device_literals
)


def _with_device(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*arguments: Any, **keywords: Any) -> torch.Tensor:
        where = keywords.get("device")
        if where is not None and torch.device(where).type == "cuda":
            keywords["device"] = DEVICE
        keywords.pop("pin_memory", None)
        return factory(*arguments, **keywords)

    return make


def _replace_methods() -> None:
    """Replace the methods by which megatron moves and sorts tensors, and those that a stream of CUDA needs."""
    answer = cpu_torch.answer_megatron
    answer(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor.to(DEVICE))
    answer(torch.nn.Module, "cuda", lambda module, *_, **__: module.to(DEVICE))
    original = torch.Tensor.type

    def name_type(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        found = original(tensor, *arguments, **keywords)
        return found.replace("torch.meta.", "torch.cuda.") if isinstance(found, str) else found

    answer(torch.Tensor, "type", name_type)


def _register_kernels() -> None:
    """Let one rank reduce with itself, which moves nothing, and let the host read numbers."""
    collectives, operators = torch.library.Library("c10d", "IMPL"), torch.library.Library("aten", "IMPL")
    collectives.impl("allreduce_", lambda tensors, *_: (tensors, FakeWork().boxed()), "Meta")
    collectives.impl("allreduce_coalesced_", lambda tensors, *_: FakeWork().boxed(), "Meta")
    with warnings.catch_warnings():
        # It replaces torch's own kernel, which raises.
        warnings.simplefilter("ignore")
        operators.impl("_local_scalar_dense", _read_number, "Meta")
    _libraries.extend((collectives, operators))


def _read_number(source: torch.Tensor) -> Any:
    """Read a number where no mode sees it, as torch.tensor does with tensors."""
    if counter := active():
        counter.add(Entry("_local_scalar_dense", Kind.READ, "", 1, source.itemsize))
    return answer_read(source)


@contextmanager
def counted_device() -> Iterator[None]:
    """Make this process's CUDA device the counted one, and have its kernels counted."""
    platform = CountedPlatform()
    original = platforms._platform
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(platforms, "_platform", lambda name: platform if name == "cuda" else original(name)))
        platform.install()
        enter(mock.patch.object(torch.Tensor, "record_stream", return_value=None))
        norm = as_one_launch(torch.nn.functional.rms_norm, (Kind.NORM_FORWARD, Kind.NORM_BACKWARD), Call.OPERATOR)
        enter(mock.patch.object(torch.nn.functional, "rms_norm", norm))
        # torch's Adam takes one call for all parameters on CUDA.
        optimizers = importlib.import_module("torch.optim.optimizer")
        enter(mock.patch.object(optimizers, "_get_foreach_kernels_supported_devices", return_value=["meta"]))
        enter(mock.patch.object(importlib.import_module("triton.runtime.jit").JITFunction, "run", count_kernel))
        for owner, name, replacement in _parts_of_a_step():
            enter(mock.patch.object(owner, name, replacement))
        enter(mock.patch.object(gather, "attention", _gather_in_one_call))
        enter(mock.patch.object(log_probs.BACKENDS["triton"], "refusal", _refuse_as_on_a_gpu))
        yield


def _parts_of_a_step() -> list[tuple[Any, str, Any]]:
    """Return functions of a step with replacements that count them as parts of their own."""
    from megatron_rl.trainer.mcore.model import attention, gpt, weights
    from megatron_rl.trainer.mcore.step import policy
    from megatron_rl.trainer.mcore.step.forward_step import PolicyStep

    update, forward_step = policy.apply_update, PolicyStep.forward_step

    def counted_update(*args: Any, **kwargs: Any) -> Any:
        counter = active()
        with counter.within("optimizer") if counter else nullcontext():
            return update(*args, **kwargs)

    def counted_forward_step(*args: Any) -> Any:
        if counter := active():
            counter.begin_micro_batch()
        return forward_step(*args)

    return [
        (PolicyStep, "forward_step", counted_forward_step),
        (attention, "shared_prompt_attention", as_part(attention.shared_prompt_attention, ATTENTION, _needed_work)),
        (gpt, "output_log_probs", as_part(gpt.output_log_probs, "output layer")),
        (policy, "apply_update", counted_update),
        # Its tensors have no values to load.
        (weights.ModelWeights, "load_hf", lambda *_: None),
    ]


def _needed_work(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
    backend_name: str,
    sinks_H: torch.Tensor | None,
) -> tuple[Entry, Entry]:
    """Return the work of pairs that see each other: two products forward, five backward."""
    assert window is None
    assert sinks_H is None
    _, num_heads, head_dim = q_THD.shape
    strands = find_strands(layout)
    num_pairs = sum(
        strand.rows.length * sum(rows.length for rows in strand.above) + strand.rows.length**2 / 2 for strand in strands
    )
    forward = Entry(
        backend_name, Kind.ATTENTION, "", flops=4 * num_pairs * num_heads * head_dim,
        num_keys=num_pairs / layout.num_tokens,
    )  # fmt: skip
    return forward, dataclasses.replace(forward, name=f"{backend_name}, backward", flops=2.5 * forward.flops)


def _gather_in_one_call(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `gather.attention` does on a GPU, where it has no sinks; it asks whether tensors are CUDA's."""
    gathered = find_tables(layout, q_THD.device, gather.Gathered.of)
    k_NGD, v_NGD = (tensor_TGD.index_select(0, gathered.rows_N) for tensor_TGD in (k_TGD, v_TGD))
    return gather._attend_in_one_call(q_THD, k_NGD, v_NGD, gathered, scale, window)


def _refuse_as_on_a_gpu(conditions: Conditions) -> str | None:
    return refuse_triton("cuda" if conditions.device == DEVICE.type else conditions.device, conditions.dtype)


def count_kernel(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Count a launch of a Triton kernel, which reads or writes most tensors that it is given once."""
    counter = active()
    if counter is not None:
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        num_bytes = sum(
            _PASSES.get((kernel.__name__, name), 1) * count_bytes(value)
            for name, value in given.items()
            if isinstance(value, torch.Tensor)
        )
        counter.add(Entry(kernel.__name__, Kind.ELEMENTWISE, "", 1, num_bytes, call=Call.TRITON))
