"""A worker extension that reads what drafts come from: parameters of a model, or earlier responses."""

import json
from typing import Any

from megatron_rl.shared.weights.fingerprint import digest
from megatron_rl.sidecar.vllm.patches import describe_draft_model
from megatron_rl.sidecar.vllm.worker import WorkerExtension, answered


class Extension(WorkerExtension):
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
