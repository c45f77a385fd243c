"""A script over the megatron.training of megatron-core's own wheel, run as a recipe."""

import dataclasses

import pytest

from tests.e2e import loop
from tests.e2e.recipe_runs import ALONE, DEEPER, EXPERTS, MODEL, WRAPPED, run

SCRIPT = """
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def never(*_):
    raise AssertionError("of pretraining")


if __name__ == "__main__":
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, never, ModelType.encoder_or_decoder, never)
"""


# The recipe's flags, and what Megatron's timers measure besides in that layout.
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


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[str, loop.World]:
    """By the flags of their models."""
    world = loop.make_world(tmp_path_factory.mktemp("recipes"))
    deeper = loop.draw_model(world.folder / "deeper", num_hidden_layers=4)
    experts = loop.draw_model(world.folder / "experts", family="qwen3_moe")
    return {
        MODEL: world,
        DEEPER: dataclasses.replace(world, model=deeper),
        EXPERTS: dataclasses.replace(world, model=experts),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_script_of_megatron_training_trains_as_the_stand_alone_script_and_is_timed(
    worlds: dict[str, loop.World], layout: str
) -> None:
    changes, measured = LAYOUTS[layout]
    world = worlds[changes.get("model", MODEL)]
    script = world.folder / "pretrain.py"
    script.write_text(SCRIPT)
    place = layout.replace(" ", "-")
    expected = run(world, f"alone/{place}", ALONE, 2, own=(), **changes)
    timed = ("--timing-log-level", "2", "--log-interval", "1")
    assert run(world, f"wrapped/{place}", [*WRAPPED, str(script)], 2, own=timed, **changes) == expected
    outputs = [path.read_text() for path in (world.folder / "outputs" / "wrapped" / place).iterdir()]
    for name in ("forward-backward", measured):
        # Once an iteration, by one rank.
        assert sum(output.count(f"    {name} ") for output in outputs) == 2, name
