"""Whole runs over scripted engines: the schedule and the arrival change no result, and a fault ends all ranks."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.algorithm.library import PRESETS
from megatron_rl.observe import run_folder
from megatron_rl.observe.metrics import read_metrics, seconds_by_span, without_times
from megatron_rl.shared.records.append_file import read_lines
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop
from tests.processes import ROOT

ITERATIONS = 5


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("loop"))


def script(world: loop.World, seed: int | None) -> Path:
    """Write two engines whose groups come back in an order that the seed draws; without a seed, at once."""
    path = world.folder / f"script-{seed}.json"
    values = (
        {"lengths": [1, 24], "delay": [0.0, 0.15], "delay_seed": seed} if seed is not None else {"lengths": [1, 24]}
    )
    path.write_text(json.dumps(values))
    return path


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "hf" / f"iter_{ITERATIONS:07d}" / "model.safetensors")


def words_of(world: loop.World, folder: Path, **changes) -> list[str]:
    """Return the words of a run called `run`, in a folder of its own: seeds of responses follow from a run's name."""
    return world.words(
        "run",
        **{"rollout_folder": folder / "run", "save_hf": folder / "hf", "train_iters": ITERATIONS, **changes},
    )


def run_to_its_end(
    world: loop.World, name: str, world_size: int, seed: int | None, num_threads: int = 2, **changes
) -> Path:
    """Run over scripted engines, whose order the seed draws.

    With two threads, results that depend on the number of threads show.
    """
    folder = world.folder / name
    words = words_of(world, folder, rollout_script=script(world, seed), **changes)
    loop.run(folder, world_size, words, OMP_NUM_THREADS=str(num_threads))
    assert_the_start_is_told(folder, world_size)
    assert run_folder.read_saved_config(folder / "run" / run_folder.CONFIG_FILE).num_devices == world_size
    return folder


def assert_the_start_is_told(folder: Path, world_size: int) -> None:
    """Check that rank 0 alone logs the start, first of all, with the seconds that the first line of metrics has too."""
    said = (folder / "rank-0.output").read_text()
    starts = re.findall(r"^start +([0-9.]+) s  (.*)", said, re.MULTILINE)
    for part in (
        "prompts: 40 to train on, 0 held out, 0 left out",
        "engines: engine-0, engine-1 ready after ",
        f"in float32, on {world_size} rank",
        "sidecar: its parts, side by side: rewards ",
        # A wait for engines shorter than 0.05 s is not among them.
        "rank 0: ",
        "all is ready",
    ):
        assert any(part in text for _, text in starts), (part, said)
    assert said.rindex("all is ready") < said.index("iteration 1/")
    times = [line["time"] for line in read_metrics(folder / "run") if "time" in line]
    assert times[0]["start"] == pytest.approx(float(starts[-1][0]), abs=0.1)
    assert not any("start" in later for later in times[1:])
    assert not any("\nstart " in path.read_text() for path in folder.glob("rank-[1-9].output"))


def share_out_of_order(run: Path) -> float:
    """Return the share of groups that finished after one whose prompt comes later."""
    events = loop.read_events(run)
    order = [event["prompt"] for event in events if event["event"] == "group"]
    assert order
    latest, late = -1, 0
    for position, prompt in enumerate(order):
        latest = -1 if position % 8 == 0 else latest
        late += prompt < latest
        latest = max(latest, prompt)
    return late / len(order)


def assert_same_runs(one: Path, other: Path) -> None:
    """Compare the weights at the end, bit for bit, and every metric that does not measure time."""
    ours, theirs = final_weights(one), final_weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    left, right = (without_times(read_metrics(folder / "run")) for folder in (one, other))
    assert left == right


def compare_schedules(world: loop.World, name: str, world_size: int, seeds: list[int], **changes) -> None:
    sync = run_to_its_end(world, f"{name}-sync", world_size, None, schedule="sync", **changes)
    before = load_file(world.model / "model.safetensors")
    for key, tensor in final_weights(sync).items():
        assert (tensor - before[key]).norm() > 1e-3 * before[key].norm(), key
    for seed in seeds:
        periodic = run_to_its_end(world, f"{name}-{seed}", world_size, seed, **changes)
        share = share_out_of_order(periodic / "run")
        print(f"{name}, seed {seed}: {share:.0%} of the groups finished out of order")
        # Delays draw the order, and a machine that is busy itself adds to it.
        assert share >= 1 / 4
        assert_same_runs(periodic, sync)


def test_periodic_and_sync_end_in_the_same_weights_whatever_the_arrival(world):
    compare_schedules(world, "dp2", 2, [0], use_distributed_optimizer=True, log_num_zeros_in_grad=True)
    for line in read_metrics(world.folder / "dp2-0" / "run"):
        parts = seconds_by_span(line)
        assert parts.keys() >= {"publish", "wait", "train", "update", "other"}
        assert parts["update"] > 0
        assert sum(parts.values()) == pytest.approx(line["time"]["iteration"])
        assert line["gradient_zeros"] > 0


@pytest.mark.each_change
def test_periodic_and_sync_end_in_the_same_weights_over_context_parallel_ranks(world):
    changes = {"context_parallel_size": 2, "micro_batch_size": 8, "log_samples": 32, "log_sample_tokens": True}
    compare_schedules(world, "cp2", 2, [21], num_threads=1, **changes)
    samples = read_lines(world.folder / "cp2-21" / "run" / "samples.jsonl")
    for line in read_metrics(world.folder / "cp2-sync" / "run"):
        tokens = [
            response["tokens"]
            for sample in samples
            if sample["version"] == line["version"]
            for response in sample["responses"]
        ]
        engine, trainer = ([value for one in tokens for value in one[whose]] for whose in ("engine", "trainer"))
        assert len(engine) == line["tokens"]["response"]
        apart = sum(abs(a - b) for a, b in zip(engine, trainer, strict=True)) / len(engine)
        assert apart == pytest.approx(line["mismatch"]["mean"], abs=2e-5)
        tokens = line["tokens"]
        # Each of four micro-batches is padded by a token at most; tokens that ranks share are counted once.
        assert 0 <= tokens["computed"] - tokens["prompt"] - tokens["response"] <= 4
        assert (line["groups"], line["responses"]["count"]) == (8, 32)
        assert tokens["utilisation"] <= 1


@pytest.mark.each_change
def test_periodic_and_sync_end_in_the_same_weights_where_groups_without_a_signal_are_replaced(world):
    changes = {
        "grpo_filter_groups_with_same_reward": True, "grpo_group_size": 2, "micro_batch_size": 2,
        "global_batch_size": 8, "grpo_prompts_per_step": 8,
    }  # fmt: skip
    compare_schedules(world, "filtered", 2, [41], **changes)
    folders = [world.folder / name / "run" for name in ("filtered-sync", "filtered-41")]
    for line in read_metrics(folders[0]):
        prompts = line["prompts"]
        assert line["reward"]["all_equal_groups"] == 0
        assert prompts["considered"] == 8 + prompts["without_signal"]
    considered = [line["prompts"]["considered"] for line in read_metrics(folders[0])]
    assert 8 < sum(considered) / len(considered) < 24
    # The groups that the next iteration trains on begin where the one before ended.
    rows = sorted({sample["row"] for sample in read_lines(folders[0] / "samples.jsonl")})
    assert len(rows) > 8
    for folder in folders:
        assert verify(folder).breaches == []


@pytest.mark.slow
def test_periodic_and_sync_let_the_same_prompts_rest(world):
    """Run two epochs, with the mean rewards of the first one."""
    changes = {"grpo_prompts_per_step": 16, "prompts_rest_below": 0.9, "prompts_rest_above": 1.1}
    compare_schedules(world, "resting", 2, [51], **changes)
    resting = [line["prompts"]["resting"] for line in read_metrics(world.folder / "resting-51" / "run")]
    assert 0 < max(resting) < 40


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_periodic_and_sync_end_in_the_same_weights_by_every_algorithm_with_a_name(world, name):
    """Take two updates an iteration, so that ratios are not 1."""
    changes = {"algorithm": name, "grpo_prompts_per_step": 8, "global_batch_size": 16, "grpo_kl_beta": 0.05}
    if name == "gdpo":
        changes["grpo_kl_in"] = "reward"
    if name == "opd":
        changes["teacher"] = loop.draw_teacher(world)
    if name in ("ppo", "vapo"):
        changes["critic"] = "policy"
    compare_schedules(world, name, 2, [61], **changes)
    assert any(line["ratio"] != 1 for line in read_metrics(world.folder / f"{name}-sync" / "run"))


@pytest.mark.slow
def test_periodic_and_sync_end_in_the_same_weights_with_two_teachers_of_other_shapes(world):
    teachers = {
        "even": loop.draw_teacher(world),
        "odd": loop.draw_model(world.folder / "odd", 6, "qwen3", hidden_size=48),
    }
    words = [f"{name}={folder}" for name, folder in teachers.items()]
    changes = {"algorithm": "opd", "teacher": words, "opd_divergence": "jsd", "grpo_kl_beta": 0.05}
    # Learning from a teacher needs no rewards.
    changes["reward"] = None
    changes["grpo_role"] = f"{ROOT}/examples/algorithms/fluency.py:FLUENCY={teachers['odd']}"
    compare_schedules(world, "taught", 2, [71], pipeline_model_parallel_size=2, frozen_offload=True, **changes)
    lines = read_metrics(world.folder / "taught-71" / "run")[:ITERATIONS]
    assert all(line["teacher_kl"] > 0 and line["teachers"].keys() == teachers.keys() for line in lines)
    assert all(math.isfinite(line["metric"]["fluency"]) for line in lines)
    [hashes] = {(line["teacher.even"], line["teacher.odd"]) for line in lines}
    assert len({*hashes, *(line["fingerprint"] for line in lines)}) == 2 + ITERATIONS
    assert verify(world.folder / "taught-71" / "run").breaches == []
    stated = next(
        event for event in loop.read_events(world.folder / "taught-71" / "run") if event["event"] == "objective"
    )
    assert tuple(stated["values"][f"weights of the teacher.{name}"] for name in teachers) == hashes


@pytest.mark.each_change
def test_periodic_and_sync_end_in_the_same_weights_with_a_critic_of_another_shape(world):
    """Take two updates an iteration, so that the old critic is another one; and let the critic learn first."""
    sizes = {"grpo_prompts_per_step": 8, "global_batch_size": 16, "pipeline_model_parallel_size": 2}
    critic = loop.draw_model(world.folder / "critic", 7, "llama", hidden_size=48, num_hidden_layers=3)
    changes = {"algorithm": "ppo", "critic": critic, "critic_lr": 1e-2, "critic_warmup_iters": 1, **sizes}
    compare_schedules(world, "judged", 2, [91], frozen_offload=True, **changes)
    lines = read_metrics(world.folder / "judged-91" / "run")[:ITERATIONS]
    assert [line["gradient_norm"] > 0 for line in lines] == [False, *[True] * (ITERATIONS - 1)]
    assert all(line["critic"]["gradient_norm"] > 0 for line in lines)
    # The policy did not move in the first iteration.
    assert len({line["fingerprint"] for line in lines}) == ITERATIONS - 1
    assert verify(world.folder / "judged-91" / "run").breaches == []


@pytest.mark.slow
def test_periodic_and_sync_end_in_the_same_weights_with_a_critic_that_is_a_head(world):
    """Take two updates an iteration, so that the old critic is another one; and let the head learn alone first."""
    sizes = {"grpo_prompts_per_step": 8, "global_batch_size": 16, "pipeline_model_parallel_size": 2}
    changes = {"algorithm": "ppo", "critic": "head", "critic_lr": 1e-2, "critic_warmup_iters": 1, **sizes}
    compare_schedules(world, "headed", 2, [92], **changes)
    lines = read_metrics(world.folder / "headed-92" / "run")[:ITERATIONS]
    assert [line["gradient_norm"] > 0 for line in lines] == [False, *[True] * (ITERATIONS - 1)]
    assert all(line["critic"]["gradient_norm"] > 0 for line in lines)
    assert lines[0]["critic"]["learning_rate"] == 1e-2
    # The policy did not move in the first iteration.
    assert len({line["fingerprint"] for line in lines}) == ITERATIONS - 1
    assert verify(world.folder / "headed-92" / "run").breaches == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_periodic_and_sync_end_in_the_same_weights_for_twenty_arrivals(world):
    compare_schedules(world, "one", 1, list(range(1, 15)))
    compare_schedules(world, "pp2", 2, [15, 16, 17], pipeline_model_parallel_size=2, grpo_kl_beta=0.05)
    compare_schedules(
        world, "tp2", 2, [18, 19, 20], tensor_model_parallel_size=2, sequence_parallel=True, global_batch_size=16
    )
    changes = {"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "global_batch_size": 16}
    compare_schedules(world, "cp2-pp2", 4, [22], num_threads=1, grpo_kl_beta=0.05, **changes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_synchronous_run_of_a_periodic_runs_journal_ends_in_the_same_weights(world):
    """Serve the second run by scripted engines: a group that was not in the journal would be another group."""
    changes = {"pipeline_model_parallel_size": 2, "rollout_retain_journals": ITERATIONS + 1, "lr": 1e-4}
    periodic, sync = (world.folder / name for name in ("vllm-periodic", "vllm-sync"))
    words = words_of(world, periodic, rollout_engine="vllm", rollout_num_engines=1, rollout_max_num_seqs=8, **changes)
    loop.run(periodic, 2, words, OMP_NUM_THREADS="1")
    print(f"vLLM: {share_out_of_order(periodic / 'run'):.0%} of the groups finished out of order")
    shutil.copytree(periodic / "run" / "journal", sync / "run" / "journal")
    (sync / "run").chmod(0o700)
    loop.run(sync, 2, words_of(world, sync, schedule="sync", **changes), OMP_NUM_THREADS="1")
    assert_same_runs(periodic, sync)


# A rank runs this before it begins: it keeps the gradients that the first update uses.
KEEP_GRADIENTS = """
import torch
from megatron_rl import platforms
platforms.select("cpu").install()
from megatron_rl.trainer.mcore.step.policy import Policy
inner = Policy.update
def update(self, scale):
    gradients = {{name: p.main_grad * scale for chunk in self.chunks for name, p in chunk.named_parameters()}}
    torch.save(gradients, {path!r})
    return inner(self, scale)
Policy.update = update
"""


@pytest.mark.each_change
def test_in_completion_order_the_gradients_are_the_same_to_rounding(world):
    """Train the same weights on six micro-batches of groups, which arrival composes differently each time."""
    gradients, orders = [], []
    for seed in (31, 32):
        folder = world.folder / f"completion-{seed}"
        folder.mkdir()
        words = words_of(
            world, folder, train_iters=1, consume_order="completion", rollout_script=script(world, seed),
            micro_batch_size=8, grpo_prompts_per_step=12, grpo_kl_beta=0.05, save_hf=None,
        )  # fmt: skip
        keep = KEEP_GRADIENTS.format(path=str(folder / "gradients.pt"))
        loop.run(folder, 1, words, {0: keep})
        gradients.append(torch.load(folder / "gradients.pt"))
        events = loop.read_events(folder / "run")
        orders.append([event["prompt"] for event in events if event["event"] == "group"])
    assert orders[0] != orders[1]
    worst = 0.0
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        worst = max(worst, float((gradient - gradients[1][name]).abs().max() / gradient.abs().max()))
    print(f"two arrivals: gradients differ by at most {worst:.1e} of their largest element")
    assert 0 < worst < 1e-5
