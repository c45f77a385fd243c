"""torch's flash operators for sequences of varying length, as their signatures have them, computed by the definition.

Letters: N rows of queries, M rows of keys, H query heads, G key-value heads, D head dimension.
"""

import itertools
from typing import Any

import torch


class VarlenFlashOperators:
    """A stand-in for torch.ops.aten; it refuses what the operators on CUDA would refuse."""

    def __init__(self) -> None:
        self.num_calls = 0

    def _flash_attention_forward(self, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        given = _bound(torch.ops.aten._flash_attention_forward.default, arguments, keywords)
        self.num_calls += 1
        out_NHD = torch.zeros_like(given["query"])
        lse_HN = torch.full(given["query"].shape[:2][::-1], float("nan"), dtype=torch.float32)
        for queries, keys in _sequences(given):
            scores_HNM = _scores(given, queries, keys)
            lse_HN[:, queries] = scores_HNM.logsumexp(-1)
            v_HMD = _per_query_head(given["value"][keys], given)
            out_NHD[queries] = (scores_HNM.softmax(-1) @ v_HMD).transpose(0, 1).to(out_NHD.dtype)
        return out_NHD, lse_HN, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def _flash_attention_backward(self, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        given = _bound(torch.ops.aten._flash_attention_backward.default, arguments, keywords)
        assert given["logsumexp"].dtype == torch.float32
        gradients = [torch.zeros_like(given[name]) for name in ("query", "key", "value")]
        num_groups = given["key"].shape[1]
        for queries, keys in _sequences(given):
            weights_HNM = torch.exp(_scores(given, queries, keys) - given["logsumexp"][:, queries, None])
            grad_HND, out_HND, q_HND = (
                given[name][queries].transpose(0, 1).float() for name in ("grad_out", "out", "query")
            )
            k_HMD, v_HMD = (_per_query_head(given[name][keys], given) for name in ("key", "value"))
            delta_HN1 = (grad_HND * out_HND).sum(-1, keepdim=True)
            grad_scores_HNM = weights_HNM * (grad_HND @ v_HMD.mT - delta_HN1) * given["scale"]
            gradients[0][queries] = (grad_scores_HNM @ k_HMD).transpose(0, 1).to(gradients[0].dtype)
            parts = (grad_scores_HNM.mT @ q_HND, weights_HNM.mT @ grad_HND)
            for gradient, part_HMD in zip(gradients[1:], parts, strict=True):
                part_GMD = part_HMD.unflatten(0, (num_groups, -1)).sum(1)
                gradient[keys] = part_GMD.transpose(0, 1).to(gradient.dtype)
        return tuple(gradients)


def _bound(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of the operator's schema, with defaults for missing ones."""
    schema = operator._schema
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert len(arguments) == len(positional)
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.kwarg_only}
    assert keywords.keys() <= defaults.keys()
    given = defaults | keywords | dict(zip(positional, arguments, strict=True))
    for name in ("query", "key", "value", *(("grad_out", "out") if "grad_out" in given else ())):
        assert given[name].stride(-1) == 1
        assert given[name].dtype in (torch.float16, torch.bfloat16)
    for offsets, longest, rows in (("cum_seq_q", "max_q", "query"), ("cum_seq_k", "max_k", "key")):
        assert given[offsets].dtype == torch.int32
        assert given[offsets][-1] == len(given[rows])
        assert given[longest] == int(given[offsets].diff().max())
    assert given["dropout_p"] == 0.0
    return given


def _sequences(given: dict[str, Any]) -> list[tuple[slice, slice]]:
    offsets = (given["cum_seq_q"].tolist(), given["cum_seq_k"].tolist())
    queries, keys = ([slice(*pair) for pair in itertools.pairwise(bounds)] for bounds in offsets)
    return list(zip(queries, keys, strict=True))


def _scores(given: dict[str, Any], queries: slice, keys: slice) -> torch.Tensor:
    q_HND = given["query"][queries].transpose(0, 1).float()
    scores_HNM = q_HND @ _per_query_head(given["key"][keys], given).mT * given["scale"]
    if given["is_causal"]:
        num_rows, num_keys = scores_HNM.shape[1:]
        visible_NM = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
        scores_HNM = scores_HNM.masked_fill(~visible_NM, float("-inf"))
    return scores_HNM


def _per_query_head(rows_MGD: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    repeat = given["query"].shape[1] // rows_MGD.shape[1]
    return rows_MGD.repeat_interleave(repeat, 1).transpose(0, 1).float()
