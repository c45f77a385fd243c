"""torch_npu's fused attention as its documentation has it, computed by the definition: only the TND layout.

Letters: N rows of queries, M rows of keys, H query heads, D head dimension.
"""

import itertools

import torch

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
        greatest, total = [], []
        for queries, keys in sequences:
            scores_HNM = _scores(query[queries], key[keys], scale, is_causal)
            greatest_HN = scores_HNM.amax(-1)
            weights_HNM = torch.exp(scores_HNM - greatest_HN.unsqueeze(-1))
            total_HN = weights_HNM.sum(-1)
            v_HMD = _per_query_head(value[keys], head_num)
            out_NHD[queries] = ((weights_HNM / total_HN.unsqueeze(-1)) @ v_HMD).transpose(0, 1).to(out_NHD.dtype)
            greatest.append(greatest_HN.reshape(-1))
            total.append(total_HN.reshape(-1))
        statistics = [
            torch.cat(parts).view(len(query), head_num, 1).repeat(1, 1, 8) for parts in (greatest, total)
        ]  # fmt: skip
        return out_NHD, statistics[0], statistics[1], torch.empty(0), 0, 0, 0

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
            greatest_HN1, total_HN1 = (
                statistic.view(-1, 8)[part, :1].view(head_num, -1, 1) for statistic in (softmax_max, softmax_sum)
            )
            weights_HNM = torch.exp(_scores(query[queries], key[keys], scale_value, is_causal) - greatest_HN1)
            weights_HNM = weights_HNM / total_HN1
            dy_HND, out_HND, q_HND = (
                tensor[queries].transpose(0, 1).float() for tensor in (dy, attention_in, query)
            )  # fmt: skip
            k_HMD, v_HMD = (_per_query_head(tensor[keys], head_num) for tensor in (key, value))
            delta_HN1 = (dy_HND * out_HND).sum(-1, keepdim=True)
            grad_scores_HNM = weights_HNM * (dy_HND @ v_HMD.mT - delta_HN1) * scale_value
            gradients[0][queries] = (grad_scores_HNM @ k_HMD).transpose(0, 1).to(query.dtype)
            parts = (grad_scores_HNM.mT @ q_HND, weights_HNM.mT @ dy_HND)
            for gradient, part_HMD in zip(gradients[1:], parts, strict=True):
                part_GMD = part_HMD.unflatten(0, (key.shape[1], -1)).sum(1)
                gradient[keys] = part_GMD.transpose(0, 1).to(gradient.dtype)
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


def _scores(q_NHD: torch.Tensor, k_MGD: torch.Tensor, scale: float, is_causal: bool) -> torch.Tensor:
    scores_HNM = q_NHD.transpose(0, 1).float() @ _per_query_head(k_MGD, q_NHD.shape[1]).mT * scale
    if is_causal:
        num_rows, num_keys = scores_HNM.shape[1:]
        visible_NM = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
        scores_HNM = scores_HNM.masked_fill(~visible_NM, float("-inf"))
    return scores_HNM


def _per_query_head(rows_MGD: torch.Tensor, num_heads: int) -> torch.Tensor:
    return rows_MGD.repeat_interleave(num_heads // rows_MGD.shape[1], 1).transpose(0, 1).float()
