"""torch's cuDNN operators on batches, as their signatures have them, computed by the definition.

Letters: B sequences, R rows of queries of each, M rows of keys, H query heads, G key-value heads, D head dimension.
"""

from typing import Any

import torch


class CudnnOperators:
    """A stand-in for torch.ops.aten. Memory lies as on CUDA, and logarithms have a last dimension in some versions."""

    def __init__(self, has_last_dimension: bool = True) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._has_last_dimension = has_last_dimension

    def _scaled_dot_product_cudnn_attention(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        given = _bind(torch.ops.aten._scaled_dot_product_cudnn_attention.default, arguments, keywords)
        assert given["compute_log_sumexp"]
        assert not given["return_debug_mask"]
        q_BHRD, k_BGMD = given["query"], given["key"]
        self.calls.append((q_BHRD.shape[0], q_BHRD.shape[2], k_BGMD.shape[2]))
        scores_BHRM = _compute_scores(given)
        out_BHRD = _lay_out(scores_BHRM.softmax(-1) @ _repeat_heads(given["value"], given), q_BHRD)
        lse = scores_BHRM.logsumexp(-1)
        lse = lse.unsqueeze(-1) if self._has_last_dimension else lse
        seed, offset = torch.tensor(3), torch.tensor(4)
        return out_BHRD, lse, None, None, q_BHRD.shape[2], k_BGMD.shape[2], seed, offset, torch.empty(0)

    def _scaled_dot_product_cudnn_attention_backward(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        given = _bind(torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default, arguments, keywords)
        assert (int(given["philox_seed"]), int(given["philox_offset"])) == (3, 4)
        assert (given["max_q"], given["max_k"]) == (given["query"].shape[2], given["key"].shape[2])
        assert given["grad_out"].stride() == given["out"].stride()
        lse = given["logsumexp"]
        assert lse.dim() == 3 + self._has_last_dimension
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        weights_BHRM = torch.exp(_compute_scores(given) - lse.reshape(*lse.shape[:3], 1))
        grad_BHRD, out_BHRD, q_BHRD = (given[name].float() for name in ("grad_out", "out", "query"))
        k_BHMD, v_BHMD = (_repeat_heads(given[name], given) for name in ("key", "value"))
        delta_BHR1 = (grad_BHRD * out_BHRD).sum(-1, keepdim=True)
        grad_scores_BHRM = weights_BHRM * (grad_BHRD @ v_BHMD.mT - delta_BHR1) * given["scale"]
        num_groups = given["key"].shape[1]
        of_keys = (grad_scores_BHRM.mT @ q_BHRD, weights_BHRM.mT @ grad_BHRD)
        parts = (grad_scores_BHRM @ k_BHMD, *(part.unflatten(1, (num_groups, -1)).sum(2) for part in of_keys))
        return tuple(_lay_out(part, given[name]) for part, name in zip(parts, ("query", "key", "value"), strict=True))


def _bind(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of the operator's schema, with defaults for missing ones."""
    schema = operator._schema
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert len(arguments) == len(positional)
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.kwarg_only}
    assert keywords.keys() <= defaults.keys()
    given = defaults | keywords | dict(zip(positional, arguments, strict=True))
    for name in ("query", "key", "value", *(("grad_out", "out") if "grad_out" in given else ())):
        assert given[name].dim() == 4
        assert given[name].stride(-1) == 1
        assert given[name].shape[2] > 1
    assert given["attn_bias"] is None
    assert given["dropout_p"] == 0.0
    assert not given["is_causal"] or given["query"].shape[2] == given["key"].shape[2]
    return given


def _compute_scores(given: dict[str, Any]) -> torch.Tensor:
    scores_BHRM = given["query"].float() @ _repeat_heads(given["key"], given).mT * given["scale"]
    if not given["is_causal"]:
        return scores_BHRM
    return scores_BHRM.masked_fill(~torch.ones(scores_BHRM.shape[2:], dtype=torch.bool).tril(), float("-inf"))


def _repeat_heads(rows_BGMD: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    return rows_BGMD.float().repeat_interleave(given["query"].shape[1] // rows_BGMD.shape[1], 1)


def _lay_out(part_BHRD: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the numbers in the precision of an input, the heads of a row side by side."""
    return part_BHRD.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)
