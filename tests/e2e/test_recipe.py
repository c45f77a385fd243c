"""Megatron's scripts, run as they are in stand-ins for its trees: the runs equal those of pretrain_grpo.py."""

import os
from pathlib import Path

import pytest

from tests import stand_in_tree
from tests.e2e import loop
from tests.e2e.recipe_runs import (
    ALONE,
    LAYOUTS,
    MODEL,
    WRAPPED,
    check_layout,
    find_world,
    make_worlds,
    run,
    words_of,
)

# Source trees of Megatron-LM, with colons between them; the tests of each are skipped without.
TREES = [Path(tree) for tree in os.environ.get("MEGATRON_LM_TREES", "").split(os.pathsep) if tree]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("recipe"))


@pytest.mark.each_change
def test_recipes_of_every_shape_train_as_the_stand_alone_script(world: loop.World) -> None:
    expected = run(world, "alone", ALONE, 1, own=())
    for shape in stand_in_tree.SHAPES:
        script = stand_in_tree.make_tree(world.folder / "trees" / shape, shape)
        assert run(world, shape, [*WRAPPED, str(script)], 1) == expected


@pytest.mark.each_change
def test_a_provider_of_ones_own_trains_and_its_writers_and_timers_are_used(
    world: loop.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = stand_in_tree.make_tree(world.folder / "trees" / "own", "0.16").parent
    monkeypatch.setenv("PYTHONPATH", f"{tree}:{os.environ.get('PYTHONPATH', '')}")
    script = Path("examples") / "recipes" / "own_provider.py"
    scalars = world.folder / "own"
    timed = {"timing_log_level": 2, "log_timers_to_tensorboard": True}
    rows = run(world, "own", [*WRAPPED, str(script)], 1, own=(), tensorboard_dir=scalars, **timed)
    stock = run(world, "stock", [*WRAPPED, str(tree / "pretrain_gpt.py")], 1)
    # The same weights, and then other gradients.
    assert rows[0][0] == stock[0][0]
    assert rows[0][2] != stock[0][2]
    assert rows[1][0] != rows[0][0]
    written = scalars.with_suffix(".scalars").read_text()
    assert f"1 loss {rows[1][1]}\n" in written
    printed = (world.folder / "outputs" / "own" / "rank-0.output").read_text()
    for timer in ("forward-backward", "forward-compute", "backward-compute", "optimizer-inner-step"):
        assert f"1 {timer}-time " in written
        assert printed.count(f"\n    {timer} .") == len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
@pytest.mark.parametrize("shape", ["0.16", "0.19"])
def test_recipes_on_two_ranks_train_as_the_stand_alone_script(world: loop.World, layout: str, shape: str) -> None:
    place = f"{layout}-{shape}"
    changes = {f"{layout}_model_parallel_size": 2}
    script = stand_in_tree.make_tree(world.folder / "trees" / place, shape)
    expected = run(world, f"{place}-alone", ALONE, 2, own=(), **changes)
    assert run(world, place, [*WRAPPED, str(script)], 2, **changes) == expected


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, loop.World]:
    return make_worlds(tmp_path_factory.mktemp("layouts"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_the_script_of_a_tree_trains_as_the_stand_alone_script_and_is_timed(
    worlds: dict[str, loop.World], tree: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tree}:{os.environ.get('PYTHONPATH', '')}")
    check_layout(find_world(worlds, layout), layout, tree / "pretrain_gpt.py")


@pytest.mark.slow
def test_a_recipe_trains_with_vllm_as_the_stand_alone_script(world: loop.World) -> None:
    engines = {"rollout_engine": "vllm", "rollout_num_engines": 1, "train_iters": 5}
    expected = run(world, "vllm-alone", ALONE, 1, own=(), **engines)
    script = stand_in_tree.make_tree(world.folder / "trees" / "vllm", "0.19")
    for (_, loss, norm), (_, expected_loss, expected_norm) in zip(
        run(world, "vllm", [*WRAPPED, str(script)], 1, **engines), expected, strict=True
    ):
        # Time decides which requests vLLM samples together, and that changes the last bits of its log-probs.
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)


@pytest.mark.each_change
def test_a_patched_script_trains_where_prompts_are_given_and_pretrains_where_not(world: loop.World) -> None:
    script = stand_in_tree.make_tree(world.folder / "trees" / "patched", "0.16")
    first, rest = script.read_text().split("\n\n", 1)
    line = "from megatron_rl.recipe import start; start(__name__)"
    script.write_text(f"{first}\n\n{line}\n{rest}")
    assert len(run(world, "patched", [str(script)], 1)) == 2
    ranks = loop.start(world.folder / "outputs" / "pretrained", 1, MODEL.split(), program=[str(script)])
    assert ranks.wait() == [1]
    assert "AssertionError: pretraining" in ranks.text()


def said(world: loop.World, name: str, program: list[str], words: list[str], code: int) -> str:
    ranks = loop.start(world.folder / "outputs" / name, 1, words, program=program)
    assert ranks.wait() == [code], ranks.text()
    return ranks.text()


@pytest.mark.each_change
def test_a_mistake_in_a_recipe_is_named_with_an_exit_code(world: loop.World, tmp_path: Path) -> None:
    script = stand_in_tree.make_tree(world.folder / "trees" / "wrong", "0.16")
    program, words = [*WRAPPED, str(script)], words_of(world, "wrong")
    text = said(world, "unknown", program, [*words, "--of-the-recipe", "3", "--no-such-flag"], 2)
    assert "recipe: unknown flag --no-such-flag" in text
    text = said(world, "theirs", program, [*words, "--of-the-recipe", "x"], 2)
    assert "recipe: Megatron's parser: argument --of-the-recipe: invalid int value: 'x'" in text
    text = said(world, "script", [*WRAPPED, "nowhere.py"], words, 2)
    assert "recipe: nowhere.py must be a file" in text
    source = script.read_text()
    script.write_text(source.replace("import types", "import no_such_package"))
    text = said(world, "module", program, [*words, "--of-the-recipe", "3"], 3)
    assert "needs the module no_such_package, which is not installed" in text
    script.write_text(source)
    # The wheel's core, and megatron.training of a tree that has no core.
    (script.parent / "megatron" / "core").unlink()
    text = said(world, "two", program, [*words, "--of-the-recipe", "3"], 3)
    assert "recipe: two copies of Megatron are on the path: megatron.core belongs to" in text
    training = script.parent / "megatron" / "training"
    (script.parent / "megatron" / "core").symlink_to(stand_in_tree.find_core())
    module = training / "training.py"
    module.write_text(module.read_text().replace("model_provider, model_type", "builder, model_type"))
    text = said(world, "signature", program, [*words, "--of-the-recipe", "3"], 3)
    assert "megatron.training.pretrain takes (train_valid_test_dataset_provider, builder, model_type" in text
