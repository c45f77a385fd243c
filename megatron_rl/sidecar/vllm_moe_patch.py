"""Mends vLLM on CPUs: experts that are updated in place compute nonsense.

A CPU's kernel wants the weights of experts in a layout of its own. vLLM 0.32 packs them so when the model is loaded;
when they are loaded again it copies them as they are into what is read as packed. The patch packs them each time.
"""

import inspect
from typing import Any

_MOE_MARK = "megatron_rl_moe_patch"
NOT_APPLIED = "not applied"


def patch_experts_updated_in_place(model: Any) -> str:
    """Patch it where the model needs it; says what was done."""
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


def patch_method(method: Any) -> str:
    """Patch vLLM's method for experts; says what was done.

    Another vLLM than the one that is known is left as it is: it may be right without.
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
