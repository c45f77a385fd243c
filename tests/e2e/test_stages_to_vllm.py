"""Weights of which every rank sends its own parts into real vLLM engines, through vLLM's own engines at both ends.

A stand-in has the place of the module `nccl.m2n` (tests/sidecar/gloo_m2n.py).
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.sidecar import stage_streams
from megatron_rl.trainer.mcore.model.gpt import unwrap
from megatron_rl.trainer.mcore.publish.probe import Probe
from megatron_rl.trainer.mcore.publish.stages import StagePublisher
from tests.distributed.layouts import CASES, build, start_session
from tests.e2e.test_stream_to_vllm import NUM_PROMPTS, NUM_TOKENS, engines_of
from tests.ranks import run_ranks
from tests.sidecar import vllm_models

EXTENSION = "tests.sidecar.gloo_m2n.Extension"


def train_ranks(
    model: Path, out: Path, layouts: Sequence[str], num_engines: int, tensor_size: int
) -> dict[tuple[str, int], Any]:
    """Publish weights of each layout's own, twice; count the greedy tokens that transformers would have chosen too.

    Also count the parameters that each worker was sent where they lie, and the bytes that each rank sent.
    """
    from tests.sidecar.gloo_m2n import Group, Handle

    torch.distributed.init_process_group("gloo")
    found: dict[tuple[str, int], Any] = {}
    is_first = torch.distributed.get_rank() == 0
    engines_here = engines_of(model, "nccl_m2n", EXTENSION, num_engines, tensor_size)
    with engines_here if is_first else contextlib.nullcontext() as engines:
        for number, layout in enumerate(layouts):
            with start_session(CASES[layout]) as session:
                built = build(session, CASES[layout], model)
                probe = Probe([unwrap(chunk) for chunk in built.wrapped], session, "run", 64, 2)
                make = stage_streams.open_sender
                publisher = StagePublisher(built.weights, session, engines, "run", make, probe=probe)
                for attempt in range(2):
                    version = 2 * number + attempt
                    with torch.no_grad():
                        for shard in built.weights.shards:
                            shard.parameter.mul_(1 + 0.05 * (version + 1))
                    Group.num_sent.clear()
                    fingerprint = publisher.publish(version)
                    assert Handle.num_alive == 0
                    assert built.weights.save_hf(out / str(version), source=model) == fingerprint
                    num_sent = session.gather(sum(Group.num_sent.values()))
                    if is_first:
                        reference = vllm_models.Reference(out / str(version))
                        num_right = sum(reference.num_greedy(*pair) for pair in engines.greedy())
                        counts = engines.run(engines._engines[0]._workers("count", "megatron_rl_count_direct"))
                        found[layout, attempt] = (num_right, counts, num_sent)
                    session.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "layouts", "num_engines", "tensor_size"),
    [(2, ("TP2", "PP2", "DP2+distopt"), 2, 1), (2, ("TP2", "PP2"), 1, 2), (4, ("TP2xPP2",), 1, 2)],
)
def test_engines_sample_from_the_parts_that_every_rank_sent_them(
    tmp_path, world_size, layouts, num_engines, tensor_size
):
    model = vllm_models.draw("qwen3", tmp_path / "models").first
    found, *_ = run_ranks(train_ranks, world_size, model, tmp_path, layouts, num_engines, tensor_size)
    for (layout, attempt), (num_right, counts, num_sent) in found.items():
        print(layout, attempt, num_right, counts, num_sent)
        assert num_right == num_engines * NUM_PROMPTS * NUM_TOKENS
        # The two row-parallel matrices of both layers were written where they lie.
        assert counts == [{"direct": 4, "handles": 0}] * tensor_size
        # Without copies of the replica every rank sends; of two replicas the second sends nothing.
        assert [count > 0 for count in num_sent] == [True, not layout.startswith("DP2")] + [True] * (world_size - 2)
