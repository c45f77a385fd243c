"""Operators of attention on CUDA, as their signatures have them, computed by the definition.

They refuse what the operators would refuse. Letters: N rows of queries, M rows of keys, B sequences of a batch, R rows
of each, H query heads, G key-value heads, D head dimension.
"""

import itertools
from typing import Any

import torch

from tests.kernels.called_attention import attend, differentiate

_ATEN = torch.ops.aten


class VarlenFlashOperators:
    """A stand-in for torch's flash operators for sequences of varying length, in torch.ops.aten."""

    def __init__(self) -> None:
        self.num_calls = 0

    def _flash_attention_forward(self, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        given = _bind_varlen(_ATEN._flash_attention_forward, arguments, keywords)
        self.num_calls += 1
        out_NHD = torch.zeros_like(given["query"])
        lse_HN = torch.full(given["query"].shape[:2][::-1], float("nan"), dtype=torch.float32)
        for queries, keys in _list_sequences(given):
            out_HND, greatest_HN, total_HN = attend(*_list_rows(given, queries, keys), *_list_options(given))
            out_NHD[queries] = out_HND.transpose(0, 1).to(out_NHD.dtype)
            lse_HN[:, queries] = greatest_HN + total_HN.log()
        return out_NHD, lse_HN, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def _flash_attention_backward(self, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        given = _bind_varlen(_ATEN._flash_attention_backward, arguments, keywords)
        assert given["logsumexp"].dtype == torch.float32
        gradients = [torch.zeros_like(given[name]) for name in ("query", "key", "value")]
        for queries, keys in _list_sequences(given):
            grad_HND, out_HND = (given[name][queries].transpose(0, 1) for name in ("grad_out", "out"))
            parts = differentiate(
                grad_HND, *_list_rows(given, queries, keys), out_HND, given["logsumexp"][:, queries],
                *_list_options(given),
            )  # fmt: skip
            for gradient, part, rows in zip(gradients, parts, (queries, keys, keys), strict=True):
                gradient[rows] = part.transpose(0, 1).to(gradient.dtype)
        return tuple(gradients)


class FlashAttentionInterface:
    """A stand-in for flash_attn.flash_attn_interface of flash-attn 2.8, with its signatures."""

    _operators = VarlenFlashOperators()

    def _flash_attn_varlen_forward(
        self, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        assert (window_size_left, window_size_right) == (-1, -1)
        return self._operators._flash_attention_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, False,
            scale=softmax_scale,
        )  # fmt: skip

    def _flash_attn_varlen_backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
        cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
        softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
        alibi_slopes: Any, deterministic: bool, rng_state: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        assert (window_size_left, window_size_right, softcap) == (-1, -1, 0.0)
        assert alibi_slopes is None
        assert rng_state is None
        assert deterministic
        assert all(tensor.is_contiguous() for tensor in (dq, dk, dv))
        gradients = self._operators._flash_attention_backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal,
            torch.zeros(2, dtype=torch.uint64), torch.empty(0), scale=softmax_scale,
        )  # fmt: skip
        for place, gradient in zip((dq, dk, dv), gradients, strict=True):
            place.copy_(gradient)
        return torch.empty(0)


class CudnnOperators:
    """A stand-in for torch's cuDNN operators on batches, in torch.ops.aten.

    Memory lies as on CUDA, and logarithms have a last dimension in some versions.
    """

    def __init__(self, has_last_dimension: bool = True) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._has_last_dimension = has_last_dimension

    def _scaled_dot_product_cudnn_attention(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        given = _bind_batch(_ATEN._scaled_dot_product_cudnn_attention, arguments, keywords)
        assert given["compute_log_sumexp"]
        assert not given["return_debug_mask"]
        q_BHRD, k_BGMD = given["query"], given["key"]
        self.calls.append((q_BHRD.shape[0], q_BHRD.shape[2], k_BGMD.shape[2]))
        out_BHRD, greatest_BHR, total_BHR = attend(q_BHRD, k_BGMD, given["value"], *_list_options(given))
        lse = greatest_BHR + total_BHR.log()
        lse = lse.unsqueeze(-1) if self._has_last_dimension else lse
        seed, offset = torch.tensor(3), torch.tensor(4)
        lengths = q_BHRD.shape[2], k_BGMD.shape[2]
        return _lay_out(out_BHRD, q_BHRD), lse, None, None, *lengths, seed, offset, torch.empty(0)

    def _scaled_dot_product_cudnn_attention_backward(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        given = _bind_batch(_ATEN._scaled_dot_product_cudnn_attention_backward, arguments, keywords)
        assert (int(given["philox_seed"]), int(given["philox_offset"])) == (3, 4)
        assert (given["max_q"], given["max_k"]) == (given["query"].shape[2], given["key"].shape[2])
        assert given["grad_out"].stride() == given["out"].stride()
        lse = given["logsumexp"]
        assert lse.dim() == 3 + self._has_last_dimension
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        inputs = [given[name] for name in ("query", "key", "value")]
        parts = differentiate(
            given["grad_out"], *inputs, given["out"], lse.reshape(lse.shape[:3]), *_list_options(given)
        )
        return tuple(map(_lay_out, parts, inputs))


def _bind(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of the operator's schema, with defaults for missing ones."""
    schema = operator.default._schema
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert len(arguments) == len(positional)
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.kwarg_only}
    assert keywords.keys() <= defaults.keys()
    given = defaults | keywords | dict(zip(positional, arguments, strict=True))
    assert all(tensor.stride(-1) == 1 for tensor in _list_tensors(given))
    assert given["dropout_p"] == 0.0
    return given


def _bind_varlen(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    given = _bind(operator, arguments, keywords)
    assert all(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in _list_tensors(given))
    for offsets, longest, rows in (("cum_seq_q", "max_q", "query"), ("cum_seq_k", "max_k", "key")):
        assert given[offsets].dtype == torch.int32
        assert given[offsets][-1] == len(given[rows])
        assert given[longest] == int(given[offsets].diff().max())
    return given


def _bind_batch(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    given = _bind(operator, arguments, keywords)
    assert all(tensor.dim() == 4 and tensor.shape[2] > 1 for tensor in _list_tensors(given))
    assert given["attn_bias"] is None
    assert not given["is_causal"] or given["query"].shape[2] == given["key"].shape[2]
    return given


def _list_tensors(given: dict[str, Any]) -> list[torch.Tensor]:
    return [given[name] for name in ("query", "key", "value", "grad_out", "out") if name in given]


def _list_sequences(given: dict[str, Any]) -> list[tuple[slice, slice]]:
    offsets = (given["cum_seq_q"].tolist(), given["cum_seq_k"].tolist())
    queries, keys = ([slice(*pair) for pair in itertools.pairwise(bounds)] for bounds in offsets)
    return list(zip(queries, keys, strict=True))


def _list_rows(given: dict[str, Any], queries: slice, keys: slice) -> list[torch.Tensor]:
    """Return the queries [H, N, D], keys and values [G, M, D] of a sequence."""
    rows = (given["query"][queries], given["key"][keys], given["value"][keys])
    return [tensor.transpose(0, 1) for tensor in rows]


def _list_options(given: dict[str, Any]) -> tuple[bool, float]:
    return given["is_causal"], given["scale"]


def _lay_out(part_BHRD: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the numbers in the precision of an input, the heads of a row side by side."""
    return part_BHRD.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)
