"""Runs in which engines and ranks use their devices by turns (--rollout-colocate sleep), rehearsed on a CPU.

There a worker overwrites its weights and cache when it falls asleep, and a rank its state while it is away.
"""

import re
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics, without_times
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop, stale_vllm
from tests.e2e.test_resume import assert_same, fault, killed, resumed, uninterrupted, words

TURNS = {"rollout_colocate": "sleep"}
SYNC = {"schedule": "sync"}
# The optimizer's state divided over replicas, a reference, a critic, and an old policy in the second update.
WHOLE = {
    "grpo_kl_beta": 0.1,
    "grpo_ref_interval": 2,
    "critic": "policy",
    "grpo_advantage": "gae",
    "global_batch_size": 16,
    "use_distributed_optimizer": True,
    "consume_order": "prompt",
}

# Code that a rank runs before it begins: what is still in a rank's memory once it has left ends the run, by its shape.
LOOK = """
import gc, torch
from megatron_rl import platforms
platforms.select("cpu").install()
from megatron_rl.trainer.mcore.device_turns import DeviceTurns
leave = DeviceTurns.leave
def look(self):
    leave(self)
    known = {copy.untyped_storage().data_ptr() for _, _, copy in self._away if copy is not None}
    left = [
        list(one.shape) for one in gc.get_objects()
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel() >= 128
        and one.untyped_storage().data_ptr() not in known and not one.isnan().all()
    ]
    if left:
        raise AssertionError(f"left on the device: {left}")
DeviceTurns.leave = look
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("turns"))


@pytest.fixture(scope="module")
def by_turns(world: loop.World) -> Path:
    """Run by turns; what models and optimizers leave on a device ends the run."""
    folder = world.folder / "turns"
    loop.run(folder, 2, words(world, folder, **WHOLE, **TURNS), {0: LOOK, 1: LOOK})
    return folder


@pytest.mark.each_change
@pytest.mark.timeout(600)
def test_a_run_by_turns_has_the_bits_of_one_whose_engines_stay_awake(world: loop.World, by_turns: Path) -> None:
    assert_same(by_turns, uninterrupted(world, "sync", 2, **WHOLE, **SYNC))
    assert not verify(by_turns / "run").breaches


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("moment", "kill"), [("backward", "rank"), ("backward", "sidecar"), ("publish", "rank")])
def test_a_killed_run_by_turns_resumes_as_if_it_had_not_been(
    world: loop.World, by_turns: Path, moment: str, kill: str
) -> None:
    name = f"killed-{moment}-{kill}"
    folder = killed(world, name, 2, {0: fault(moment, kill, call=3)}, **WHOLE, **TURNS)
    resumed(world, folder, 2, **WHOLE, **TURNS)
    assert_same(folder, by_turns)


def run_with_vllm(world: loop.World, name: str, code: int = 0, plant: dict | None = None, **changes) -> Path:
    """Run on one rank with one engine; the run's name, from which seeds follow, is always the same."""
    folder = world.folder / name
    folder.mkdir()
    if plant is not None:
        changes["rollout_python"] = stale_vllm.write(folder, plant)
    of_run = world.words(
        "run", rollout_engine="vllm", rollout_num_engines=1, rollout_folder=folder / "run", train_iters=3,
        consume_order="prompt", **changes,
    )  # fmt: skip
    ranks = loop.run(folder, 1, of_run, code=code)
    (folder / "said").write_text(ranks.text())
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("wide"), head_dim=32)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4, "publish_lora": "adapter"}], ids=["weights", "adapters"])
def test_engines_that_slept_sample_the_same_tokens_and_everything_is_compared(wide: loop.World, changes: dict) -> None:
    name = "-".join(["vllm", *changes])
    slept, awake = (
        run_with_vllm(wide, f"{name}-{kind}", **changes, **ways) for kind, ways in (("sleep", TURNS), ("sync", SYNC))
    )
    assert without_times(read_metrics(slept / "run")) == without_times(read_metrics(awake / "run"))
    report = verify(slept / "run")
    assert not report.breaches
    assert all(count == whole > 0 for count, whole in (item.compared for item in report.iterations))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "changes", "expected"),
    [
        (
            {"where": "load", "names": "layers.1.mlp.up_proj", "from_version": 1}, {},
            "engine engine-0, .* do not hold the numbers .*layers.1.mlp.up_proj",
        ),
        ({"where": "sleep", "lost": "layers.1.input_layernorm"}, {}, "engine engine-0: its log-probs of the probe"),
        ({"where": "sleep", "lost": "rotary_emb"}, {}, "engine engine-0: its log-probs of the probe"),
        (
            {"where": "sleep", "lost": "base"}, {"lora_rank": 4, "publish_lora": "adapter"},
            "engine engine-0: its log-probs of the probe",
        ),
    ],
    ids=["weight that is not loaded", "weight lost after its load", "table of rotations", "base of adapters"],
)  # fmt: skip
def test_what_a_sleep_loses_ends_the_run_before_a_token_is_sampled(
    wide: loop.World, plant: dict, changes: dict, expected: str
) -> None:
    name = f"lost-{plant.get('lost', 'load')}"
    folder = run_with_vllm(wide, name, 5, plant, **changes, **TURNS)
    (reason,) = re.findall(r"the run ended: (.*)", (folder / "said").read_text())
    assert re.search(f"version 1 was not published: {expected}", reason), reason
    assert [line["version"] for line in read_metrics(folder / "run")] == [0]
