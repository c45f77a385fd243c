"""Patches of vLLM on CPUs, each applied only if the installed version has the fault.

- Experts that are updated in place compute nonsense, because the CPU kernel needs their weights in a layout of its own.
  When the model is loaded, vLLM 0.32 packs them. It copies later updates unpacked into memory that is read as packed.
  With `patch_experts_updated_in_place` they are packed each time.
- An output layer that is tied to the embedding keeps its old weights. When the model is loaded, vLLM 0.32 packs each
  layer into a copy of its own; later it packs only the layers that receive tensors. A tied output layer receives none.
  With `pack_tied_layers` it is packed after each load.
- A request with a seed and a split prefill ends the engine. After each step but the last of such a prefill, vLLM takes
  back the random number that it drew, by resetting the offset of the request's generator. A CPU's generator has no
  offset ("CPU Generator does not use offset"). `patch_seeded_partial_prefill` saves the generator's state and restores
  it after the step, so that the discarded draw does not advance it, as vLLM intends.
"""

import inspect
from typing import Any

from megatron_rl.errors import PlatformError

_MOE_MARK = "megatron_rl_moe_patch"
NOT_APPLIED = "not applied"


def patch_experts_updated_in_place(model: Any) -> str:
    """Patch vLLM if the model needs it; return a report of the patch."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "not needed: not a CPU"
    if not has_experts(model):
        return "not needed: no experts"
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


def patch_method(method: Any) -> str:
    """Patch vLLM's method for experts; return a report of the patch.

    An unknown vLLM is not changed: it may not have the fault.
    """
    if getattr(method, _MOE_MARK, False):
        return "applied before"
    process = method.process_weights_after_loading
    setup = inspect.getsource(getattr(method, "_setup_kernel", method))
    guarded = setup.partition("if not is_weight_update:")[2]
    is_known = "fused_experts.process_weights_after_loading(layer)" in guarded
    if not is_known or tuple(inspect.signature(process).parameters) != ("self", "layer"):
        return f"{NOT_APPLIED}: this vLLM sets its experts up in another way"

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        is_update = self.moe_kernel is not None
        process(self, layer)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method.process_weights_after_loading = process_weights_after_loading
    setattr(method, _MOE_MARK, True)
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


_SEED_MARK = "megatron_rl_seed_patch"
# Parameters as in vLLM 0.32. Another vLLM may have fixed the fault, or moved the patched functions.
_SAMPLE = ("self", "logits", "spec_decode_metadata")
_BOOKKEEP = ("self", "scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens")


def patch_seeded_partial_prefill() -> str:
    """Patch vLLM if needed; return a report of the patch."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "not needed: not a CPU"
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return patch_runner(GPUModelRunner)


def patch_runner(runner: Any) -> str:
    """Patch vLLM's runner of models; return a report of the patch."""
    if getattr(runner, _SEED_MARK, False):
        return "applied before"
    bookkeep, sample = runner._bookkeeping_sync, runner._sample
    if "set_offset" not in inspect.getsource(bookkeep):
        return "not needed: vLLM takes no offset back"
    for function, parameters in ((sample, _SAMPLE), (bookkeep, _BOOKKEEP)):
        found = tuple(inspect.signature(function).parameters)
        if found != parameters:
            raise PlatformError(
                f"vLLM's {function.__name__} takes {found}, but the patch for seeded requests on CPUs expects "
                f"{parameters}: use vLLM 0.32, or check whether this version still needs {__name__}"
            )
    runner._sample, runner._bookkeeping_sync = _keeping_discarded(sample), _without_generators(bookkeep)
    setattr(runner, _SEED_MARK, True)
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
