"""A script over the megatron.training of megatron-core's own wheel, run as a recipe."""

import pytest

from tests.e2e import loop
from tests.e2e.recipe_runs import LAYOUTS, check_layout, find_world, make_worlds

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


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[str, loop.World]:
    return make_worlds(tmp_path_factory.mktemp("recipes"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_script_of_megatron_training_trains_as_the_stand_alone_script_and_is_timed(
    worlds: dict[str, loop.World], layout: str
) -> None:
    world = find_world(worlds, layout)
    script = world.folder / "pretrain.py"
    script.write_text(SCRIPT)
    check_layout(world, layout, script)
