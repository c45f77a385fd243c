"""The patch for experts packs updated weights, once, and leaves alone those that it does not know."""

from types import SimpleNamespace

from megatron_rl.sidecar.vllm import patches as vllm_moe_patch


class Experts:
    """vLLM's method for experts, with the parts that the patch reads."""

    def __init__(self) -> None:
        self.moe_kernel = None
        self.packed = []

    def process_weights_after_loading(self, layer):
        self._setup_kernel(layer)

    def _setup_kernel(self, layer):
        is_weight_update = self.moe_kernel is not None
        if not is_weight_update:
            self.moe_kernel = SimpleNamespace(
                fused_experts=SimpleNamespace(process_weights_after_loading=self.packed.append)
            )
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


def test_weights_of_experts_are_packed_once_each_time_they_are_loaded():
    method = type("Method", (Experts,), {})
    assert vllm_moe_patch.patch_method(method) == "applied"
    assert vllm_moe_patch.patch_method(method) == "applied before"
    experts = method()
    for load in range(3):
        experts.process_weights_after_loading(load)
    assert experts.packed == [0, 1, 2]


def test_a_method_that_packs_updates_itself_is_left_alone():
    class Mended(Experts):
        def _setup_kernel(self, layer):
            self.packed.append(layer)

    process = Mended.process_weights_after_loading
    assert vllm_moe_patch.patch_method(Mended).startswith(vllm_moe_patch.NOT_APPLIED)
    assert Mended.process_weights_after_loading is process


def test_the_method_of_the_vllm_that_is_installed_is_known():
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    copy = type("Copy", (UnquantizedFusedMoEMethod,), {})
    assert vllm_moe_patch.patch_method(copy) == "applied"
