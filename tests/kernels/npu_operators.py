"""torch_npu's fused attention as its documentation has it, computed by the definition: only the TND layout.

Letters: N rows of queries, H query heads, D head dimension.
"""

import itertools

import torch

from tests.kernels.called_attention import attend, differentiate

NO_LIMIT = 2147483647


class NpuOperators:
    """A stand-in for the module torch_npu; it refuses what the operators would refuse or silently misread."""

    def __init__(self) -> None:
        self.num_calls = 0

    def npu_fusion_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_num: int,
        input_layout: str,
        *,
        pse: None = None,
        padding_mask: None = None,
        atten_mask: torch.Tensor | None = None,
        scale: float = 1.0,
        keep_prob: float = 1.0,
        pre_tockens: int = NO_LIMIT,
        next_tockens: int = NO_LIMIT,
        inner_precise: int = 0,
        prefix: None = None,
        actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None,
        sparse_mode: int = 0,
        gen_mask_parallel: bool = True,
        sync: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
        sequences = _checked(query, key, value, head_num, input_layout, actual_seq_qlen, actual_seq_kvlen)
        is_causal = _is_causal(atten_mask, sparse_mode)
        self.num_calls += 1
        out_NHD = torch.zeros_like(query)
        statistics: tuple[list[torch.Tensor], ...] = ([], [])
        for queries, keys in sequences:
            inputs = (query[queries], key[keys], value[keys])
            out_HND, *parts = attend(*(tensor.transpose(0, 1) for tensor in inputs), is_causal, scale)
            out_NHD[queries] = out_HND.transpose(0, 1).to(out_NHD.dtype)
            for numbers, part_HN in zip(statistics, parts, strict=True):
                numbers.append(part_HN.reshape(-1))
        greatest, total = (torch.cat(parts).view(len(query), head_num, 1).repeat(1, 1, 8) for parts in statistics)
        return out_NHD, greatest, total, torch.empty(0), 0, 0, 0

    def npu_fusion_attention_grad(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dy: torch.Tensor,
        head_num: int,
        input_layout: str,
        *,
        pse: None = None,
        padding_mask: None = None,
        atten_mask: torch.Tensor | None = None,
        softmax_max: torch.Tensor,
        softmax_sum: torch.Tensor,
        softmax_in: None = None,
        attention_in: torch.Tensor,
        scale_value: float = 1.0,
        keep_prob: float = 1.0,
        pre_tockens: int = NO_LIMIT,
        next_tockens: int = NO_LIMIT,
        inner_precise: int = 0,
        seed: int = 0,
        offset: int = 0,
        numels: int = 0,
        prefix: None = None,
        actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None,
        sparse_mode: int = 0,
        gen_mask_parallel: bool = True,
        sync: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        sequences = _checked(query, key, value, head_num, input_layout, actual_seq_qlen, actual_seq_kvlen)
        is_causal = _is_causal(atten_mask, sparse_mode)
        for statistic in (softmax_max, softmax_sum):
            assert statistic.shape == (len(query), head_num, 8)
            assert statistic.dtype == torch.float32
            assert statistic.is_contiguous()
        gradients = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for queries, keys in sequences:
            part = slice(queries.start * head_num, queries.stop * head_num)
            greatest_HN, total_HN = (one.view(-1, 8)[part, 0].view(head_num, -1) for one in (softmax_max, softmax_sum))
            inputs = (dy[queries], query[queries], key[keys], value[keys], attention_in[queries])
            rows = (tensor.transpose(0, 1) for tensor in inputs)
            parts = differentiate(*rows, greatest_HN + total_HN.log(), is_causal, scale_value)
            for gradient, of_call, place in zip(gradients, parts, (queries, keys, keys), strict=True):
                gradient[place] = of_call.transpose(0, 1).to(gradient.dtype)
        return (*gradients, torch.empty(0))


def _checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    query_ends: list[int] | None,
    key_ends: list[int] | None,
) -> list[tuple[slice, slice]]:
    assert input_layout == "TND"
    assert head_num == query.shape[1]
    assert key.shape == value.shape
    ranges = []
    for ends, tensor in ((query_ends, query), (key_ends, key)):
        # Ends, without a zero before them; a tensor would be read from the device.
        assert isinstance(ends, list)
        assert all(type(end) is int for end in ends)
        assert ends[-1] == len(tensor)
        bounds = [0, *ends]
        assert all(start < end for start, end in itertools.pairwise(bounds)), "an empty sequence"
        ranges.append([slice(*pair) for pair in itertools.pairwise(bounds)])
    return list(zip(*ranges, strict=True))


def _is_causal(atten_mask: torch.Tensor | None, sparse_mode: int) -> bool:
    if atten_mask is None:
        assert sparse_mode == 0
        return False
    # Of modes 2 (from the top left) and 3 (from the bottom right) only the latter fits ranges of two lengths.
    assert sparse_mode == 3
    assert atten_mask.dtype == torch.bool
    assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    return True
