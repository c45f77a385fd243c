"""Extensions of vLLM's workers with faults that tests plan, or that read what drafts come from."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron_rl.shared.weights.fingerprint import digest
from megatron_rl.sidecar.vllm.adapters import AdapterSlot
from megatron_rl.sidecar.vllm.patches import describe_draft_model
from megatron_rl.sidecar.vllm.worker import WorkerExtension, answered


class StaleTensors(WorkerExtension):
    """A worker whose loads differ from what it reports."""

    megatron_rl_stale = ""
    megatron_rl_before: dict[str, torch.Tensor] | None = None

    @answered
    def megatron_rl_load_otherwise(self, names: str) -> dict[str, str]:
        """Keep the tensors that a later load brings for names that hold this text; empty ends it."""
        model = type(self.model_runner.get_model())
        if self.megatron_rl_before is None:
            self.megatron_rl_before = {}
            load_weights = model.load_weights

            def load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
                return load_weights(model, self._kept(weights))

            model.load_weights = load
        self.megatron_rl_stale = names
        return {}

    def _kept(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            known = self.megatron_rl_before
            if not self.megatron_rl_stale or self.megatron_rl_stale not in name:
                known[name] = tensor.clone()
            yield name, known[name]


class OtherFactors(WorkerExtension):
    """A worker that holds other adapters than it is given, or scales them."""

    @answered
    def megatron_rl_change_adapters(self, fault: str) -> dict[str, str]:
        """Keep the adapters of the next load, or change one number, in all loads from now on; empty ends this."""
        first: dict[str, torch.Tensor] = {}
        put = AdapterSlot.put

        def put_others(number: int, tensors: Mapping[str, torch.Tensor]) -> None:
            if fault == "stale" and not first:
                first.update({name: tensor.clone() for name, tensor in tensors.items()})
            given = first if fault == "stale" else dict(tensors)
            if fault == "one number":
                name = sorted(given)[-1]
                given[name] = given[name].clone()
                given[name][-1, -1] += 1e-6
            put(slot, number, given)

        slot = self.megatron_rl_held.slot
        assert slot is not None
        slot.__dict__.pop("put", None)
        if fault:
            slot.put = put_others  # type: ignore[method-assign]
        return {}

    @answered
    def megatron_rl_scale_adapters(self, factor: str) -> dict[str, str]:
        """Compute with all adapters times a factor from now on, with the numbers in the slot as they are."""
        slot = self.megatron_rl_held.slot
        assert slot is not None
        wrappers = {id(layer.punica_wrapper): layer.punica_wrapper for layer in slot._manager.modules.values()}
        for wrapper in wrappers.values():

            def add_scaled(y: Any, x: Any, a: Any, b: Any, scale: float, *rest: Any, own: Any = wrapper) -> Any:
                return type(own).add_lora_linear(own, y, x, a, b, scale * float(factor), *rest)

            wrapper.add_lora_linear = add_scaled
        return {}


class DraftReader(WorkerExtension):
    """A worker that says what its drafts come from: parameters of a model, or earlier responses."""

    @answered
    def megatron_rl_digest_draft(self) -> dict[str, Any]:
        """Digest each parameter of the draft that has numbers: layers on a CPU keep some in a layout of their own."""
        model, described = self.model_runner.get_draft_model(), describe_draft_model(self.model_runner)
        if model is None or described is None:
            return {"own": {}, "shared": {}}
        found: dict[str, dict[str, list[int]]] = {"own": {}, "shared": {}}
        for name, parameter in model.named_parameters():
            if parameter.numel():
                kind = "shared" if name in described["shared"] else "own"
                found[kind][name] = digest(parameter.detach().cpu()).tolist()
        return found

    @answered
    def megatron_rl_draft_after(self, text: str) -> dict[str, Any]:
        """Draft by suffixes after these tokens, for a request whose own prompt matches none of them."""
        tokens, cache = json.loads(text), self.model_runner.drafter.suffix_cache
        cache.start_request(text, [])
        try:
            return {"tokens": cache.speculate(text, tokens, max_spec_tokens=len(tokens)).token_ids}
        finally:
            cache.stop_request(text)
            cache.evict_cached_response(text)
