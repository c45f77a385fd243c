"""The batch-invariant attention of a vLLM worker, on stand-ins for what it reads of vLLM."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.errors import PlatformError
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.sidecar.vllm import invariant
from tests.kernels.shared_prompt_cases import Case


@dataclasses.dataclass
class Request:
    """A sequence of an engine: the blocks of its cache, its rows in the whole, and the tokens that were read so far."""

    blocks: list[int]
    first_row: int
    length: int
    num_read: int = 0


def test_an_engine_that_reads_in_parts_has_the_bits_of_the_trainers_pack() -> None:
    block_size, dtype = 64, torch.float32
    layout = Layout.of_groups([(130, []), (9, []), (65, [])])
    case = Case.draw(layout, (4, 2), 32, dtype)
    whole = BACKENDS.find("invariant").attention(case.q_THD, case.k_TGD, case.v_TGD, layout, case.scale)
    # Memory that nothing was written to.
    cache = torch.full((9, 2, block_size, 64), float("nan"))
    requests = [Request([7, 2, 4], 0, 130), Request([5], 130, 9), Request([0, 8], 139, 65)]
    module = SimpleNamespace(impl=make_impl(case.scale))
    invariant._change_attention("attention", module)
    for counts in ([100, 5, 0], [29, 3, 64], [1, 1, 1]):
        chosen = [(one, count) for one, count in zip(requests, counts, strict=True) if count]
        places = torch.cat([torch.arange(count) + one.first_row + one.num_read for one, count in chosen])
        slots = [
            one.blocks[position // block_size] * block_size + position % block_size
            for one, count in chosen
            for position in range(one.num_read, one.num_read + count)
        ]
        for one, count in chosen:
            one.num_read += count
        tables = torch.zeros(len(chosen), 3, dtype=torch.int32)
        for table, (one, _) in zip(tables, chosen, strict=True):
            table[: len(one.blocks)] = torch.tensor(one.blocks)
        step = SimpleNamespace(
            causal=True,
            query_start_loc=torch.tensor([0, *(count for _, count in chosen)], dtype=torch.int32).cumsum(0),
            seq_lens=torch.tensor([one.num_read for one, _ in chosen], dtype=torch.int32),
            block_table=tables,
        )
        module.impl.do_kv_cache_update(None, case.k_TGD[places], case.v_TGD[places], cache, torch.tensor(slots))
        out = torch.zeros(len(places) + 3, 4, 32)
        padded = torch.cat((case.q_THD[places], torch.full((3, 4, 32), float("nan"))))
        module.impl.forward(None, padded, None, None, cache, step, out)
        assert torch.equal(out[: len(places)], whole[places])
    assert [one.num_read for one in requests] == [one.length for one in requests]


def make_impl(scale: float) -> SimpleNamespace:
    """Make what is read of vLLM's attention."""
    names = ("alibi_slopes", "sinks", "logits_soft_cap", "kv_sharing_target_layer_name", "is_fp8_kv_cache")
    kind = type("CPUAttentionBackendImpl", (SimpleNamespace,), {})
    return kind(scale=scale, attn_type="decoder", sliding_window=-1, **dict.fromkeys(names))


@pytest.mark.parametrize(
    ("module", "is_given", "said"),
    [
        ("vllm.model_executor.layers.quantization.online.fp8", False, "layer quantizes its weights"),
        ("vllm.model_executor.layers.linear", True, "--block-size 16 must be a multiple of 64"),
        # vLLM chooses the size later.
        ("vllm.model_executor.layers.linear", False, "the model is a Module"),
    ],
)
def test_an_engine_whose_numbers_would_be_others_is_refused(module: str, is_given: bool, said: str) -> None:
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.quant_method = type(
        "Fp8Method" if "fp8" in module else "UnquantizedLinearMethod", (), {"__module__": module}
    )()
    config = SimpleNamespace(
        speculative_config=None,
        model_config=SimpleNamespace(enforce_eager=True),
        cache_config=SimpleNamespace(block_size=16, user_specified_block_size=is_given),
    )
    with pytest.raises(PlatformError, match=f"--batch-invariant: .*{said}"):
        invariant.make_invariant(SimpleNamespace(vllm_config=config, get_model=lambda: model))
