"""Runs that a recipe's script starts, on a tiny model and scripted engines, and what they come to."""

import json
from typing import Any

from tests.e2e import loop

_SHAPE = (
    "--hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --max-position-embeddings 1024 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 10000 "
    "--norm-epsilon 1e-6 --qk-layernorm"
)
MODEL = f"{_SHAPE} --num-layers 2 --kv-channels 32"
DEEPER = f"{_SHAPE} --num-layers 4 --kv-channels 32"
EXPERTS = (
    f"{_SHAPE} --num-layers 2 --kv-channels 16 --num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall"
)
ALONE = ["pretrain_grpo.py"]
WRAPPED = ["-m", "megatron_rl.recipe"]


def words_of(world: loop.World, place: str, model: str = MODEL, **changes: Any) -> list[str]:
    # What engines sample follows from the run's name.
    return [*world.words(f"{place}/run", **{"train_iters": 2, **changes}), "--platform", "cpu", *model.split()]


def run(
    world: loop.World,
    place: str,
    program: list[str],
    num_ranks: int,
    own: tuple[str, ...] = ("--of-the-recipe", "3"),
    model: str = MODEL,
    **changes: Any,
) -> list[tuple]:
    """What each iteration came to, to the last bit; `own` are flags of the recipe, `model` its model's."""
    words = [*words_of(world, place, model, **changes), *own]
    ranks = loop.start(world.folder / "outputs" / place, num_ranks, words, program=program)
    assert ranks.wait() == [0] * num_ranks, ranks.text()
    lines = (world.folder / "runs" / place / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["version"] for row in rows] == list(range(changes.get("train_iters", 2)))
    return [(row["fingerprint"], row["loss"], row["gradient_norm"]) for row in rows]
