"""A model that is trained with --batch-invariant: right, and with the same log-probs in every pack."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl.ops.invariant.rows import multiply
from megatron_rl.trainer.data.packing import Pack, pack_groups
from tests import hf_models
from tests.distributed.parity import Computed, expected, micro_batches
from tests.distributed.training import training
from tests.ranks import run_ranks

WORDS = "--lr 1e-3 --batch-invariant --rollout-engine vllm"


def compute(folder: Path) -> tuple[Computed, list[list[torch.Tensor]], bool]:
    """Return log-probs and gradients of shared packs, and the log-probs of other packs of the same responses."""
    torch.distributed.init_process_group("gloo")
    batches = micro_batches()
    with training(folder, WORDS) as trained:
        trained.accumulate()
        (chunk,) = trained.chunks

        def score(pack: Pack) -> torch.Tensor:
            with torch.no_grad():
                log_probs_N: torch.Tensor = chunk(pack)
                return log_probs_N

        def score_each(groups: Sequence) -> torch.Tensor:
            return torch.cat([score(pack_groups([one])) for one in groups])

        whole = [score(pack_groups(groups)) for groups in batches]
        padded = [score(pack_groups(groups, multiple_of=64)) for groups in batches]
        by_group = [score_each(groups) for groups in batches]
        alone = [
            score_each([(prompt, [one]) for prompt, responses in groups for one in responses]) for groups in batches
        ]
        product, hidden = chunk.decoder.layers[0].mlp.linear_fc2, torch.randn(5, 1, 1024)
        is_ours = torch.equal(product(hidden)[0].squeeze(1), multiply(hidden.squeeze(1), product.weight.detach()))
        torch.set_num_threads(2)
        threaded = [score(pack_groups(groups)) for groups in batches]
        return Computed(whole, trained.gradients()), [padded, by_group, alone, threaded], is_ours


def test_a_response_has_the_same_bits_in_every_pack_and_all_is_as_near_to_the_truth_as_transformers(
    tmp_path: Path,
) -> None:
    # Sums of 1024 numbers show in which order they are added.
    folder = hf_models.draw("qwen3", tmp_path / "model", intermediate_size=1024)
    ((computed, others, is_ours),) = run_ranks(compute, 1, folder)
    assert is_ours
    for other in others:
        for ours, theirs in zip(computed.log_probs, other, strict=True):
            assert torch.equal(ours, theirs)
    for what, (error, place) in expected(folder).worst(computed).items():
        assert error <= 1, f"{what} {place}: {error:.3g}"
