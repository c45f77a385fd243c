"""A script over the megatron.training of megatron-core's own wheel, run as a recipe."""

from pathlib import Path

import pytest

from tests.e2e import loop
from tests.e2e.recipe_runs import ALONE, WRAPPED, run

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


# What Megatron's timers measure besides in this layout.
MEASURED = {"tensor": "optimizer-inner-step", "pipeline": "forward-send"}


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_script_of_megatron_training_trains_as_the_stand_alone_script_and_is_timed(
    tmp_path: Path, layout: str
) -> None:
    world = loop.make_world(tmp_path)
    script = tmp_path / "pretrain.py"
    script.write_text(SCRIPT)
    changes = {f"{layout}_model_parallel_size": 2}
    expected = run(world, "alone", ALONE, 2, own=(), **changes)
    timed = ("--timing-log-level", "2", "--log-interval", "1")
    assert run(world, "wrapped", [*WRAPPED, str(script)], 2, own=timed, **changes) == expected
    outputs = [path.read_text() for path in (world.folder / "outputs" / "wrapped").iterdir()]
    for name in ("forward-backward", MEASURED[layout]):
        # Once an iteration, by one rank.
        assert sum(output.count(f"    {name} ") for output in outputs) == 2, name
