"""The check of a model whose family is user-defined (--weights-bridge), before anything is trained.

transformers loads the same folder on rank 0's host. Its log-probs of a sequence are computed in the precision of the
run, and in a finer one: the truth. The model on the ranks, laid out as it will be trained, must be as near to the truth
as transformers in the same precision, but for a factor. What a publish or an export would write must be the folder's
tensors, bit for bit.

Letters: T tokens, V vocabulary.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from megatron_rl.config.hardware import read_free_memory
from megatron_rl.errors import InputError, PlatformError
from megatron_rl.shared.protocol import probe
from megatron_rl.shared.weights.families import BRIDGE
from megatron_rl.shared.weights.files import read_fingerprint
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import measure_model
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.forward_step import SequencePass
from megatron_rl.types import Architecture

# The precision of the truth, by that of the run.
_FINER = {"float32": "float64", "bfloat16": "float32", "float16": "float32"}
# In these, a layer at a time is widened for the truth. In float64 frequencies of ropes differ too: all is loaded again.
_WIDENED = ("bfloat16", "float16")
_FACTOR = 2.0
# In half precision, rounding may route a token to other experts, which moves the mean of 64 tokens.
_FACTOR_OF_ROUTED = 8.0
_FLOOR_UNITS = 4
# An accelerator may multiply float32 numbers with as few bits as this.
_UNIT_OF_DEVICE = 2.0**-10
_SEED = 0
_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Nearness:
    """The mean distances of log-probs from the truth."""

    ours: float
    theirs: float
    bound: float


def check_bridge(
    chunks: Sequence[PackedGPTModel], weights: ModelWeights, session: Session, folder: Path, multiple_of: int
) -> str:
    """Compare the filled model with transformers' of the same folder; raise an InputError on every rank if they differ.

    Return a line for people. `chunks` are not wrapped, and sequences have a multiple of `multiple_of` tokens.
    """
    architecture = weights.architecture
    experts = architecture.experts
    count = probe.count_tokens(experts.num_experts, experts.num_active) if experts else probe.count_tokens()
    tokens = probe.draw_tokens(_SEED, architecture.vocab_size, min(count, architecture.max_position_embeddings))
    by_replica = SequencePass(chunks, session, multiple_of).compute(tokens)
    published = probe.find_narrower(weights.dtype, architecture.dtype)
    fingerprint = weights.fingerprint(published)

    def compare() -> str:
        check_fingerprint(folder, weights, published, fingerprint)
        is_device = session.device.type != "cpu"
        return check_log_probs(folder, architecture, weights.dtype, tokens, by_replica, is_device)

    return session.run_on_first(compare)


def check_fingerprint(folder: Path, weights: ModelWeights, dtype: str, fingerprint: str) -> None:
    """Raise unless the model would be published as the folder's tensors."""
    expected = read_fingerprint(folder, weights.mapping, dtype)
    if fingerprint != expected:
        raise InputError(
            f"{BRIDGE} {weights.architecture.family}: the model would be published with fingerprint "
            f"{fingerprint[:12]}, and the tensors of {folder} have {expected[:12]}: a Name of the family takes other "
            "parts of the tensors than it gives back; correct names"
        )


def check_log_probs(
    folder: Path,
    architecture: Architecture,
    dtype: str,
    tokens: Sequence[int],
    by_replica: Sequence[Sequence[float]],
    is_device: bool,
) -> str:
    """Raise unless each replica's log-probs of the tokens are transformers'; return a line for people."""
    place = f"{BRIDGE} {architecture.family}"
    _check_memory(architecture, dtype, place)
    with _loaded(folder, dtype, place) as model:
        _check_windows(model.config, architecture, place)
        theirs_T = _compute_log_probs(model, tokens)
        if dtype in _WIDENED:
            with _widened(model, DTYPES[_FINER[dtype]]):
                truth_T = _compute_log_probs(model, tokens)
    # The host may lack room for two.
    del model
    if dtype not in _WIDENED:
        with _loaded(folder, _FINER[dtype], place) as model:
            truth_T = _compute_log_probs(model, tokens)
    # Softmaxes are in float32 in any precision.
    unit = _UNIT_OF_DEVICE if is_device and dtype == "float32" else torch.finfo(torch.float32).eps
    factor = _FACTOR_OF_ROUTED if architecture.experts is not None and dtype in _WIDENED else _FACTOR
    worst = find_worst(
        measure(torch.tensor(ours, dtype=torch.float64), theirs_T, truth_T, unit, factor) for ours in by_replica
    )
    if not worst.ours <= worst.bound:
        raise InputError(
            f"{place}: the model is not transformers' model of {folder}: log-probs of the same {len(tokens)} tokens "
            f"are {worst.ours:.3g} off on average, and {worst.bound:.3g} is the limit (transformers in {dtype} is "
            f"{worst.theirs:.3g} off). Nothing was trained: compare the family with the model's code in transformers, "
            "key by key (docs/families.md)"
        )
    seen = len(tokens)
    unseen = sorted(window for window in architecture.windows if window is not None and window >= seen)
    remark = f"; no token reached beyond windows of {', '.join(map(str, unseen))} tokens" if unseen else ""
    return (
        f"{place}: log-probs of {seen} tokens are {worst.ours:.2g} off on average, within {worst.bound:.2g} "
        f"(transformers in {dtype}: {worst.theirs:.2g}){remark}"
    )


def measure(
    ours_T: torch.Tensor, theirs_T: torch.Tensor, truth_T: torch.Tensor, unit: float, factor: float = _FACTOR
) -> Nearness:
    """Compare both with the truth; `unit` is the last place of 1, `factor` the largest ratio of the distances."""
    ours, theirs = ((one_T - truth_T).abs().mean().item() for one_T in (ours_T, theirs_T))
    return Nearness(ours, theirs, factor * theirs + _FLOOR_UNITS * unit * truth_T.abs().max().item())


def find_worst(replicas: Iterable[Nearness]) -> Nearness:
    """Return the replica that is farthest off; one that is not a number is the farthest."""
    return max(replicas, key=lambda one: math.inf if math.isnan(one.ours) else one.ours)


def _compute_log_probs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Compute transformers' log-probs of every token but the first."""
    ids_T = torch.tensor(tokens)
    with torch.no_grad():
        logits_TV = model(ids_T[None], use_cache=False).logits[0, :-1]
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        return logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0].double()


def _check_memory(architecture: Architecture, dtype: str, place: str) -> None:
    """Raise unless transformers' model fits into the memory that this host has left."""
    num_bytes = measure_model(architecture).num_parameters * (2 if dtype in _WIDENED else 8)
    free = read_free_memory()
    if free is not None and num_bytes > free:
        raise InputError(
            f"{place}: transformers' model, with which this one is compared, needs {num_bytes / _GIB:.1f} GiB of "
            f"rank 0's host, and {free / _GIB:.1f} GiB are free: run rank 0 on a host with more"
        )


@contextlib.contextmanager
def _widened(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Have the parameters of a layer in `dtype` while it computes, so that there is one such layer at a time."""
    kept: dict[int, torch.Tensor] = {}

    def widen(module: torch.nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            kept[id(parameter)] = parameter.data
            parameter.data = parameter.data.to(dtype)

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data = kept.pop(id(parameter))

    with contextlib.ExitStack() as hooks:
        for module in _list_layers(model):
            hooks.enter_context(module.register_forward_pre_hook(widen))
            hooks.enter_context(module.register_forward_hook(restore))
        yield


def _list_layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the layers of a model, and the modules with parameters around them."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child
        elif next(child.parameters(recurse=False), None) is not None:
            yield child
        else:
            yield from _list_layers(child)


@contextlib.contextmanager
def _loaded(folder: Path, dtype: str, place: str) -> Iterator[Any]:
    """Load transformers' model of a folder, without using the network or running code of the folder."""
    try:
        # Imported here: it takes seconds, and only such runs need it.
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise PlatformError(f"{place} is compared with transformers: {error}; install transformers") from None
    is_finest = dtype == "float64"
    with _Float64InPlaceOfFloat32() if is_finest else contextlib.nullcontext():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                attn_implementation="eager",
                # transformers' default for experts is a product that float64 does not have.
                experts_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
            )
        # Many libraries take part, and any of them may raise its own exceptions.
        except Exception as error:
            raise InputError(
                f"{place}: transformers cannot load {folder}: {str(error).splitlines()[0]}; the model can only be "
                "compared with transformers' own: install a transformers that has it"
            ) from None
        yield model.eval()


def _check_windows(config: Any, architecture: Architecture, place: str) -> None:
    """Raise unless the windows are those that transformers reads: a short sequence does not reach long ones."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return
    window = getattr(config, "sliding_window", None)
    known = {"sliding_attention": window, "full_attention": None, "linear_attention": None}
    theirs = [known.get(kind, kind) for kind in kinds]
    ours = [architecture.find_window(layer) for layer in range(architecture.num_layers)]
    for layer, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own != other:
            raise InputError(
                f"{place}: layer {layer} has {_describe_window(own)}, and in transformers {_describe_window(other)}: "
                "correct the family's has_window, window_key, default_window or full_every"
            )


def _describe_window(window: int | str | None) -> str:
    if isinstance(window, str):
        return f"attention of the kind {window!r}, which this package does not have"
    return "no window" if window is None else f"a window of {window} tokens"


class _Float64InPlaceOfFloat32(TorchFunctionMode):
    """Computes in float64 where code asks for float32: models have norms, softmaxes and angles in float32."""

    def __torch_function__(self, function: Callable, types: Any, args: Sequence = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args, kwargs = tree_map(lambda one: torch.float64 if one is torch.float32 else one, (args, kwargs or {}))
        return function(*args, **kwargs)
