"""Run the scripts of recipes, on a tiny model and scripted engines, and read their results."""

import dataclasses
import json
from pathlib import Path
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
# The recipe's flags, and the intervals that Megatron's timers measure besides in that layout.
LAYOUTS = {
    "TP2": ({"tensor_model_parallel_size": 2}, "optimizer-inner-step"),
    "PP2": ({"pipeline_model_parallel_size": 2}, "forward-send"),
    "PP2xVPP2": (
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1, "model": DEEPER},
        "forward-backward",
    ),
    "CP2": ({"context_parallel_size": 2}, "optimizer-inner-step"),
    "EP2": ({"expert_model_parallel_size": 2, "model": EXPERTS}, "optimizer-inner-step"),
    "DP2 bf16": (
        {"bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
        "optimizer-copy-to-main-grad",
    ),
}
ALONE = ["pretrain_grpo.py"]
WRAPPED = ["-m", "megatron_rl.recipe"]


def words_of(world: loop.World, place: str, model: str = MODEL, **changes: Any) -> list[str]:
    # The samples of engines follow from the run's name.
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
    """Return the results of each iteration, to the last bit; `own` are flags of the recipe, `model` its model's."""
    words = [*words_of(world, place, model, **changes), *own]
    ranks = loop.start(world.folder / "outputs" / place, num_ranks, words, program=program)
    assert ranks.wait() == [0] * num_ranks, ranks.text()
    lines = (world.folder / "runs" / place / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["version"] for row in rows] == list(range(changes.get("train_iters", 2)))
    return [(row["fingerprint"], row["loss"], row["gradient_norm"]) for row in rows]


def make_worlds(folder: Path) -> dict[str, loop.World]:
    """Make the files that runs share, by the flags of their models."""
    world = loop.make_world(folder)
    deeper = loop.draw_model(folder / "deeper", num_hidden_layers=4)
    experts = loop.draw_model(folder / "experts", family="qwen3_moe")
    return {
        MODEL: world,
        DEEPER: dataclasses.replace(world, model=deeper),
        EXPERTS: dataclasses.replace(world, model=experts),
    }


def find_world(worlds: dict[str, loop.World], layout: str) -> loop.World:
    """Return the world of a layout's model."""
    changes, _ = LAYOUTS[layout]
    return worlds[changes.get("model", MODEL)]


def check_layout(world: loop.World, layout: str, script: Path) -> None:
    """Check that a script on two ranks trains as the stand-alone one, bit for bit, and is timed by Megatron."""
    changes, measured = LAYOUTS[layout]
    place = f"{script.parent.name}/{layout.replace(' ', '-')}"
    expected = run(world, f"{place}/alone", ALONE, 2, own=(), **changes)
    timed = ("--timing-log-level", "2", "--log-interval", "1")
    assert run(world, f"{place}/wrapped", [*WRAPPED, str(script)], 2, own=timed, **changes) == expected
    outputs = [path.read_text() for path in (world.folder / "outputs" / place / "wrapped").iterdir()]
    for name in ("forward-backward", measured):
        # One rank does this once an iteration.
        assert sum(output.count(f"    {name} ") for output in outputs) == 2, name
