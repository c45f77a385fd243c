"""Patches of vLLM, each applied only if the installed version has the fault, and trials of what has no patch.

On CPUs:

- Experts that are updated in place compute nonsense, because the CPU kernel needs their weights in a layout of its own.
  When the model is loaded, vLLM 0.32 packs them. It copies later updates unpacked into memory that is read as packed.
  With `patch_method` they are packed each time.
- An output layer that is tied to the embedding keeps its old weights. When the model is loaded, vLLM 0.32 packs each
  layer into a copy of its own; later it packs only the layers that receive tensors. A tied output layer receives none.
  With `pack_tied_layers` it is packed after each load.
- A request with a seed and a split prefill ends the engine. After each step but the last of such a prefill, vLLM takes
  back the random number that it drew, by resetting the offset of the request's generator. A CPU's generator has no
  offset ("CPU Generator does not use offset"). `patch_runner` saves the generator's state and restores it after the
  step, so that the discarded draw does not advance it, as vLLM intends.
- Drafted tokens are sampled at a temperature that is read from memory never written. vLLM 0.32 gives each drafted token
  the temperature of its request, but on a CPU writes them to a copy. With `patch_expansion` they are given by plain
  operations of torch.
- The products of adapters copy both factors once for each token, since each token may name others. An engine of ours
  holds the adapters of one version, so two plain products of matrices give the same. With `patch_wrapper` only a step
  whose tokens name several adapters, or none, is left to vLLM.
- Multi-latent attention gives the rotation for CPUs [tokens, heads, columns], and each head is read as a token. It
  rotates heads by the positions of other tokens, and reads and writes past the ends of tensors. `server.PLAIN_ROTATION`
  makes vLLM rotate in torch, and `find_wrong_rotations` tries the result.

On every device GPT-OSS is taught to load the tensors of each expert, and its sinks, in a model that computes already
(`patch_stacked_experts`). Its files store the experts of a layer in one tensor (`shared/weights/stored_forms.py`). A
trainer publishes the tensors of each expert. vLLM 0.32 can load one expert at a time, under names of its own: gates and
ups in one tensor, and the down projection, both transposed. These are made here, so that no more than an expert is
copied. When vLLM loads sinks at its start, it copies them into the parameter. In a later update the parameter is a
placeholder without memory, so that the copy has no effect and the old sinks stay, without an error. Here its loader is
called, as for any other parameter.

A worker on a CPU also closes files and sockets that other processes could open, once they have been used.

Letters: T tokens, I inputs, K the slot's rank, O outputs. R rows of an expert's projection, C its columns.
"""

import functools
import importlib
import inspect
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import PlatformError
from megatron_rl.shared.weights.stored_forms import parse_part

NOT_APPLIED = "not applied"
Patch = Callable[..., str]
"""A function that changes its first argument, and returns a report."""


def once(patch: Patch) -> Patch:
    """Mark what a patch has changed, so that it is not changed again."""
    mark = f"megatron_rl_{patch.__name__}"

    @functools.wraps(patch)
    def call(target: Any, *arguments: Any) -> str:
        if getattr(target, mark, False):
            return "applied before"
        report = patch(target, *arguments)
        if report == "applied":
            setattr(target, mark, True)
        return report

    return call


def name_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def patch_on_cpu(model: Any, config: Any) -> Mapping[str, str]:
    """Apply the patches that a worker on a CPU needs for a model, in vLLM's configuration; return their reports."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return dict.fromkeys(("moe_patch", "seed_patch", "draft_patch", "products_patch"), "not needed: not a CPU")
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    reports = {
        "moe_patch": "not needed: no experts",
        "seed_patch": patch_runner(GPUModelRunner),
        "draft_patch": "not needed: no drafts",
        "products_patch": "not needed: no adapters",
    }
    if has_experts(model):
        reports["moe_patch"] = patch_experts()
    if config.speculative_config is not None:
        reports["draft_patch"] = patch_expansion(importlib.import_module("vllm.v1.sample.rejection_sampler"))
    if config.lora_config is not None:
        wrappers = importlib.import_module("vllm.lora.punica_wrapper.punica_cpu")
        reports["products_patch"] = patch_wrapper(wrappers.PunicaWrapperCPU)
    return reports


def patch_experts() -> str:
    try:
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    except ImportError:
        return f"{NOT_APPLIED}: this vLLM keeps its experts elsewhere"
    return patch_method(UnquantizedFusedMoEMethod)


def has_experts(model: Any) -> bool:
    return any(name.endswith(".experts") for name, _ in model.named_modules())


def returns_experts(vllm_config: Any) -> bool:
    """Check whether an engine returns the experts of each token in the way of vLLM 0.32."""
    config = getattr(vllm_config, "aux_output_config", None)
    return bool(getattr(config, "enable_return_routed_experts", False))


@once
def patch_method(method: Any) -> str:
    """Patch vLLM's method for experts. An unknown vLLM is not changed: it may not have the fault."""
    process = method.process_weights_after_loading
    setup = inspect.getsource(getattr(method, "_setup_kernel", method))
    guarded = setup.partition("if not is_weight_update:")[2]
    is_known = "fused_experts.process_weights_after_loading(layer)" in guarded
    if not is_known or name_parameters(process) != ("self", "layer"):
        return f"{NOT_APPLIED}: this vLLM sets its experts up in another way"

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        is_update = self.moe_kernel is not None
        process(self, layer)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method.process_weights_after_loading = process_weights_after_loading
    return "applied"


def pack_tied_layers(model: Any) -> list[str]:
    """Pack each layer that shares another's parameter, as vLLM did when it loaded the model; return their names."""
    owners: dict[int, str] = {}
    packed = []
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        is_shared = owners.setdefault(weight.data_ptr(), name) != name
        # vLLM has packed a layer with this attribute.
        if is_shared and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
            packed.append(name)
    return packed


# Parameters as in vLLM 0.32. Another vLLM may have fixed the fault, or moved the patched functions.
_SAMPLE = ("self", "logits", "spec_decode_metadata")
_BOOKKEEP = ("self", "scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens")


@once
def patch_runner(runner: Any) -> str:
    """Have vLLM's runner of models keep the states of generators whose draws it discards."""
    bookkeep, sample = runner._bookkeeping_sync, runner._sample
    if "set_offset" not in inspect.getsource(bookkeep):
        return "not needed: vLLM takes no offset back"
    for function, parameters in ((sample, _SAMPLE), (bookkeep, _BOOKKEEP)):
        if (found := name_parameters(function)) != parameters:
            raise PlatformError(
                f"vLLM's {function.__name__} takes {found}, but the patch for seeded requests on CPUs expects "
                f"{parameters}: use vLLM 0.32, or check whether this version still needs {__name__}"
            )
    runner._sample, runner._bookkeeping_sync = _keeping_discarded(sample), _without_generators(bookkeep)
    return "applied"


def _keeping_discarded(sample: Any) -> Any:
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        generators = [generator for i in discarded if (generator := batch.generators.get(int(i))) is not None]
        states = [generator.get_state() for generator in generators]
        output = sample(self, *args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    return _sample


def _without_generators(bookkeep: Any) -> Any:
    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return bookkeep(self, *args, **kwargs)
        finally:
            batch.generators = generators

    return _bookkeeping_sync


# As in vLLM 0.32.
_EXPAND = ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")


def patch_expansion(sampler: Any) -> str:
    """Replace the function that gives each token its request's value, if it gives another; return a report."""
    expand = sampler.expand_batch_to_tokens
    if (found := name_parameters(expand)) != _EXPAND:
        raise PlatformError(
            f"vLLM's expand_batch_to_tokens takes {found}, but the patch for drafts on CPUs expects {_EXPAND}: use "
            "vLLM 0.32, or drop --rollout-speculative"
        )
    # Memory that is read without having been written may hold the values of one trial, but not those of both.
    if all(_is_right(expand, torch.tensor(values)) for values in ([0.5, 1.0, 0.0], [0.25, 0.0, 2.0])):
        return "not needed: vLLM expands values"
    sampler.expand_batch_to_tokens = expand_values
    return "applied"


def expand_values(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for its tokens, whose ends are given; one value is replaced by another."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts.long(), output_size=num_tokens)


def _is_right(expand: Any, values: torch.Tensor) -> bool:
    ends = torch.tensor([2, 3, 6], dtype=torch.int32)
    found = expand(values, ends, 6, replace_from=0, replace_to=1)
    expected = [values[index] if values[index] != 0 else torch.tensor(1.0) for index in (0, 0, 1, 2, 2, 2)]
    return bool(found.equal(torch.stack(expected)))


_NUM_TOKENS, _NUM_HEADS = 3, 2
# A wrong rotation differs by about 1, and bfloat16 rounds by less.
_TOLERANCE = 0.05


def find_wrong_rotations(model: torch.nn.Module) -> list[str]:
    """Find the layers of multi-latent attention that rotate queries or keys unlike vLLM's definition in torch.

    Layers that share a rope are tried once, and named by the first of them.
    """
    tried = set()
    wrong = []
    for name, layer in model.named_modules():
        rotary = getattr(layer, "rotary_emb", None)
        if rotary is None or not hasattr(layer, "mla_attn") or id(rotary) in tried:
            continue
        tried.add(id(rotary))
        if not _rotates_rightly(layer):
            wrong.append(name)
    return wrong


def _rotates_rightly(layer: Any) -> bool:
    """Rotate parts of wider rows, as the layer does, and compare them with vLLM's definition."""
    rotary, width, plain = layer.rotary_emb, layer.qk_rope_head_dim, layer.qk_nope_head_dim
    # Quantized models have their norms in the dtype that they compute in.
    like = layer.kv_a_layernorm.weight
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(like)

    # The operation reads past the positions that it is given.
    positions = torch.arange(1, 1 + _NUM_TOKENS * _NUM_HEADS, device=like.device)[:_NUM_TOKENS]
    queries = draw(_NUM_TOKENS, _NUM_HEADS, plain + width)[..., plain:]
    keys = draw(_NUM_TOKENS, layer.kv_lora_rank + width)[:, layer.kv_lora_rank :].unsqueeze(1)
    wanted = rotary.forward_native(positions, queries.clone(), keys.clone())
    found = rotary(positions, queries, keys)
    return all(torch.allclose(a, b, rtol=0, atol=_TOLERANCE) for a, b in zip(found, wanted, strict=True))


_SLOT = "megatron_rl_slot_of_step"
# As in vLLM 0.32.
_ADD = ("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices", "buffer", "kwargs")
_UPDATE = ("self", "mapping", "lora_index_to_id", "max_loras", "vocab_size", "kwargs")


@once
def patch_wrapper(wrapper: Any) -> str:
    """Have vLLM's class compute the products of adapters plainly."""
    add, update = wrapper.add_lora_linear, wrapper.update_metadata
    if [name_parameters(function) for function in (add, update)] != [_ADD, _UPDATE]:
        return f"{NOT_APPLIED}: this vLLM computes adapters in another way"
    wrapper.add_lora_linear, wrapper.update_metadata = _adding_plainly(add), _noting_slot(update)
    return "applied"


def add_products(
    y: torch.Tensor,
    x: torch.Tensor,
    a_factors: Sequence[torch.Tensor],
    b_factors: Sequence[torch.Tensor],
    scale: float,
    widths: Sequence[int],
) -> None:
    """Add to columns of `y`, of these widths, the products of `x` with A (K, I) and B (O, K) of each module.

    As in vLLM, the first product is in float32 and the second in the dtype of `y`.
    """
    x_TI, y_TO = x.reshape(-1, x.shape[-1]).float(), y.view(-1, y.shape[-1])
    for part_TO, a_KI, b_OK in zip(y_TO.split(list(widths), 1), a_factors, b_factors, strict=True):
        inner_TK = x_TI @ a_KI.float().T
        part_TO.addmm_(inner_TK.to(y.dtype), b_OK.to(y.dtype).T, alpha=scale)


def _noting_slot(update: Any) -> Any:
    def update_metadata(self: Any, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        slots = set(self.token_lora_indices.tolist())
        # A token without adapters has the slot -1.
        setattr(self, _SLOT, slots.pop() if len(slots) == 1 and min(slots) >= 0 else None)

    return update_metadata


def _adding_plainly(add: Any) -> Any:
    def add_lora_linear(
        self: Any, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        slot = getattr(self, _SLOT, None)
        if slot is None or kwargs:
            return add(self, y, x, lora_a_stacked, lora_b_stacked, *rest, **kwargs)
        a_factors, b_factors = ([stack[slot, 0] for stack in stacks] for stacks in (lora_a_stacked, lora_b_stacked))
        return add_products(y, x, a_factors, b_factors, *rest)

    return add_lora_linear


_WAITING = "megatron_rl_waiting"
_SINKS = ".self_attn.sinks"

Weights = Iterable[tuple[str, torch.Tensor]]
LoadWeights = Callable[[Any, Weights], set[str]]
Waiting = dict[str, dict[str, torch.Tensor]]
"""Under vLLM's name for a gate and an up projection together: the one of them that has come."""


def patch_stacked_experts(model: Any, tensor_rank: int) -> str:
    """Patch the model's class if it needs it; `tensor_rank` is this worker's rank among those that divide heads."""
    inner = getattr(model, "model", None)
    if not hasattr(inner, "_load_weights_other"):
        return "not needed: its files store each expert"
    if not hasattr(inner, "_try_load_streamed_expert"):
        return f"{NOT_APPLIED}: this vLLM cannot load one expert at a time"
    return _patch_loading(type(model), tensor_rank)


@once
def _patch_loading(kind: Any, tensor_rank: int) -> str:
    original: LoadWeights = kind.load_weights
    if name_parameters(original) != ("self", "weights"):
        return f"{NOT_APPLIED}: this vLLM loads weights in another way"

    def load_weights(self: Any, weights: Weights) -> set[str]:
        waiting: Waiting = self.__dict__.setdefault(_WAITING, {})
        loaded: set[str] = set()
        return original(self, _without_sinks(self, join_projections(weights, waiting), loaded, tensor_rank)) | loaded

    kind.load_weights = load_weights
    return "applied"


def _without_sinks(
    model: Any, weights: Weights, loaded: set[str], tensor_rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Load the sinks of the model's own heads, and yield all other weights."""
    for name, tensor in weights:
        if not name.endswith(_SINKS):
            yield name, tensor
            continue
        own_name = name.replace(".self_attn.", ".attn.")
        try:
            parameter = model.get_parameter(own_name)
        except AttributeError:
            # Another pipeline stage has the layer.
            continue
        num_heads = len(parameter)
        own = tensor.narrow(0, tensor_rank * num_heads, num_heads)
        getattr(parameter, "weight_loader", _copy)(parameter, own)
        loaded.add(own_name)


def _copy(parameter: torch.Tensor, given: torch.Tensor) -> None:
    parameter.data.copy_(given)


def join_projections(weights: Weights, waiting: Waiting) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield an expert's tensors under vLLM's names for them, and all others as they are.

    The gate or the up projection that comes first waits for the other one, which may come in a later call.
    """
    for name, tensor in weights:
        part = parse_part(name)
        if part is None:
            yield name, tensor
            continue
        stem = f"{part.block}.{part.expert}"
        if part.projection == "down":
            yield f"{stem}.w2_{part.kind}", tensor.T if tensor.dim() > 1 else tensor
            continue
        name = f"{stem}.w13_{part.kind}"
        parts = waiting.setdefault(name, {})
        parts[part.projection] = tensor
        if len(parts) == 2:
            del waiting[name]
            # In turn: gate, up, gate, up.
            joined_RC = torch.stack((parts["gate"], parts["up"]), dim=1).flatten(0, 1)
            yield name, joined_RC.T if joined_RC.dim() > 1 else joined_RC
    for parts in waiting.values():
        # The memory of a tensor that came in a stream is used again.
        parts |= {projection: tensor.clone() for projection, tensor in parts.items()}


_FOLDER = Path("/dev/shm")
# The prefix of files that vLLM's kernels make. Python's own tracker process removes the files that Python makes.
_PREFIX = "vllm_dist_"


def take_names_off(folder: Path = _FOLDER) -> int:
    """Unlink the kernels' shared-memory files that this process maps; return their number."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    # Another worker may have unlinked a file already.
    found = [path for path in mapped if path.parent == folder and path.name.startswith(_PREFIX) and path.exists()]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def close_listeners() -> int:
    """Close every listening TCP socket of this process; return their number.

    An unconnected socket takes over each file descriptor, because gloo still uses the number as its own.
    """
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    listening = [number for number in numbers if _listens(number)]
    for number in listening:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            os.dup2(ours.fileno(), number, inheritable=False)
    return len(listening)


def _listens(number: int) -> bool:
    try:
        copy = socket.socket(fileno=os.dup(number))
    except OSError:
        return False
    with copy:
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def describe_draft_model(runner: Any) -> dict[str, Any] | None:
    """Describe the model that drafts in a worker, by its parameters; None if there is none, or vLLM hides it.

    A publish writes the policy's parameters. A draft that shares some of them follows the policy there.
    """
    find = getattr(runner, "get_draft_model", None)
    model = None if find is None else find()
    if model is None:
        return None
    own = {id(parameter) for parameter in runner.get_model().parameters()}
    shared = [name for name, parameter in model.named_parameters() if id(parameter) in own]
    return {"num_parameters": sum(1 for _ in model.parameters()), "shared": shared}
