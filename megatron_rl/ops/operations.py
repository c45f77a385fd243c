"""All operations that have backends, by the setting that names the backend, in the order of their trials."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.ops import elementwise, gated_delta, log_probs, qkv, shared_prompt
from megatron_rl.ops.backends import Backends

OPERATIONS: Mapping[str, Backends[Any]] = {
    "attention.backend": shared_prompt.BACKENDS,
    "model.linear_attention_backend": gated_delta.BACKENDS,
    "model.output_layer_backend": log_probs.BACKENDS,
    "model.elementwise_backend": elementwise.BACKENDS,
    "model.qkv_backend": qkv.BACKENDS,
}
