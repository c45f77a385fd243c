"""A run that is killed and started again equals the run that was never killed."""

import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl import cli
from megatron_rl.observe.metrics import read_metrics, without_times
from megatron_rl.shared.records.append_file import read_lines
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.weights.files import Checkpoint
from tests.e2e import loop

ITERATIONS = 4
# Code that a rank runs before it begins: `now()` is called at the moment, and kills in the second iteration.
AT = {
    "publish": """
        from megatron_rl.trainer.mcore.model.weights import FilesBegun as Owner
        name = "write"
    """,
    "generation": """
        from megatron_rl.trainer.data.slots import IterationSlots as Owner
        name = "batch"
    """,
    "backward": """
        from megatron_rl.algorithm.objective import Objective as Owner
        name = "loss"
    """,
    "optimizer": """
        from megatron_rl.trainer.mcore.step.policy import Policy as Owner
        name = "update"
    """,
    "save": """
        from megatron_rl.trainer.mcore.checkpoint import serialization as Owner
        name = "_plan"
    """,
    "latest": """
        from megatron_rl.trainer.mcore.checkpoint import folders as Owner
        name = "put_in_place"
    """,
}
KILL = {
    "rank": "os.kill(os.getpid(), signal.SIGKILL)",
    "sidecar": """
        for child in psutil.Process().children():
            if "megatron_rl.sidecar" in child.cmdline():
                child.kill()
    """,
}
FAULT = """
import os, signal, psutil
from megatron_rl import platforms
platforms.select("cpu").install()
{at}
inner, calls = getattr(Owner, name), []
def faulty(*arguments, **keywords):
    result = inner(*arguments, **keywords)
    calls.append(1)
    if len(calls) == {call}:
        {kill}
    return result
setattr(Owner, name, faulty)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("resume"))


def indented(text: str, width: int) -> str:
    import textwrap

    return textwrap.indent(textwrap.dedent(text).strip(), " " * width).lstrip()


def fault(moment: str, kill: str, call: int = 2) -> str:
    return FAULT.format(at=indented(AT[moment], 0), kill=indented(KILL[kill], 8), call=call)


def words(world: loop.World, folder: Path, **changes) -> list[str]:
    flags = {
        "rollout_folder": folder / "run", "save": folder / "save", "load": folder / "save", "save_interval": 1,
        "save_hf": folder / "hf", "prompts_held_out": 4, "eval_interval": 2, "rollout_patience_seconds": 5,
        "train_iters": ITERATIONS,
    }  # fmt: skip
    return world.words("run", **{**flags, **changes})


def killed(
    world: loop.World, name: str, world_size: int, faults: dict[int, str], seconds: float = 120, **changes
) -> Path:
    """Run, and check that the run was killed before its end."""
    folder = world.folder / name
    with loop.running(folder, world_size, words(world, folder, **changes), faults) as ranks:
        codes = ranks.wait(seconds)
    assert all(codes), f"{codes}\n{ranks.text()}"
    return folder


def resumed(world: loop.World, folder: Path, world_size: int, **changes) -> None:
    loop.run(folder, world_size, words(world, folder, **changes))


def uninterrupted(world: loop.World, name: str, world_size: int, **changes) -> Path:
    folder = world.folder / name
    loop.run(folder, world_size, words(world, folder, **changes))
    return folder


@pytest.fixture(scope="module")
def finished(world: loop.World) -> Path:
    """Run on one rank to the end."""
    return uninterrupted(world, "finished", 1)


def copy(finished: Path, name: str) -> Path:
    """Copy a run with its checkpoints and weights."""
    return Path(shutil.copytree(finished, finished.with_name(name)))


def assert_same(folder: Path, whole: Path) -> None:
    """Compare bit for bit: metrics, samples (with their prompts), and the weights."""
    assert without_times(read_metrics(folder / "run")) == without_times(read_metrics(whole / "run"))
    assert read_lines(folder / "run" / "samples.jsonl") == read_lines(whole / "run" / "samples.jsonl")
    ours, theirs = (load_file(f / "hf" / f"iter_{ITERATIONS:07d}" / "model.safetensors") for f in (folder, whole))
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.each_change
@pytest.mark.timeout(600)
def test_a_run_that_ends_at_a_limit_resumes_as_if_it_had_not_ended(world):
    """Let advantages take the mean reward of the iteration before."""
    whole = uninterrupted(world, "unlimited", 1, grpo_advantage="global")
    folder = uninterrupted(world, "limited", 1, exit_interval=3, grpo_advantage="global")
    assert [row["version"] for row in read_metrics(folder / "run") if "fingerprint" in row] == [0, 1, 2]
    assert (folder / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    # It continues beyond the limit that it ended at.
    resumed(world, folder, 1, exit_interval=3, grpo_advantage="global")
    assert_same(folder, whole)


def test_a_run_killed_in_mid_backward_resumes_as_if_it_had_not_been(world):
    whole = uninterrupted(world, "whole", 2, use_distributed_optimizer=True)
    folder = killed(world, "backward", 2, {1: fault("backward", "rank", call=6)}, use_distributed_optimizer=True)
    resumed(world, folder, 2, use_distributed_optimizer=True)
    assert_same(folder, whole)


@pytest.mark.each_change
@pytest.mark.timeout(600)
def test_resuming_with_more_iterations_is_refused_until_a_flag_chooses_the_schedule(world, finished):
    folder = copy(finished, "longer")
    (folder / "run" / "sidecar.log").unlink()
    longer = {"train_iters": ITERATIONS + 1}
    ranks = loop.run(folder, 1, words(world, folder, **longer), code=4)
    source = folder / "save" / f"iter_{ITERATIONS:07d}"
    assert (
        f"{source} was saved with another schedule than the flags give: --train-iters {ITERATIONS + 1} (the "
        f"checkpoint's is {ITERATIONS}), counted in updates. Write --override-opt-param-scheduler to continue with "
        "the flags' schedule from the checkpoint's update. Or write --use-checkpoint-opt-param-scheduler to continue "
        "with the checkpoint's, which keeps its last value after its end"
    ) in ranks.text()
    assert not (folder / "run" / "sidecar.log").exists()
    resumed(world, folder, 1, override_opt_param_scheduler=True, **longer)
    assert [line["version"] for line in read_metrics(folder / "run")] == [*range(ITERATIONS + 1), ITERATIONS + 1]


@pytest.mark.each_change
@pytest.mark.timeout(600)
def test_an_objective_that_changes_at_a_resume_is_listed_at_the_start_and_in_the_audit(world, tmp_path, capsys):
    folder = tmp_path / "run of one objective"
    reward = Path(shutil.copy(world.reward.rpartition(":")[0], tmp_path))
    objective = {"reward": f"{reward}:parity", "grpo_kl_beta": 0.05, "grpo_group_size": 4, "global_batch_size": 32}
    loop.run(folder, 1, words(world, folder, exit_interval=1, **objective))
    unchanged = loop.run(folder, 1, words(world, folder, exit_interval=1, **objective))
    assert "another objective" not in unchanged.text()
    reward.write_text(f"{reward.read_text()}\n# Edited.\n")
    objective |= {"reward": f"{reward}:parity=2", "grpo_kl_beta": 0.5, "grpo_group_size": 8, "global_batch_size": 64}
    ranks = loop.run(folder, 1, words(world, folder, micro_batch_size=8, exit_interval=1, **objective))
    changes = "--grpo-group-size 4 -> 8, --grpo-kl-beta 0.05 -> 0.5, "
    (note,) = (line for line in ranks.text().splitlines() if "another objective" in line)
    assert changes in note
    assert f"--reward {reward}:parity -> {reward}:parity=2" in note
    assert f"{reward} sha256 " in note
    assert cli.main(["audit", str(folder / "run")]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "another objective" in line)
    assert line.startswith("       2 was trained with another objective: --grpo-group-size 4 -> 8")
    assert changes in line


@pytest.mark.each_change
@pytest.mark.timeout(600)
def test_a_run_with_nothing_left_to_do_says_so_and_starts_no_sidecar_until_something_is_missing(world):
    folder = uninterrupted(world, "finished-on-two", 2)
    run, log = folder / "run", folder / "run" / "sidecar.log"
    before = (run / "metrics.jsonl").read_text()

    def start_again(code: int = 0, **changes) -> tuple[str, bool]:
        """Return the output of the ranks, and whether a sidecar was started."""
        for path in run.parent.glob("*/sidecar.log*"):
            path.unlink()
        ranks = loop.run(folder, 2, words(world, folder, **changes), code=code)
        return ranks.text(), log.exists()

    source = folder / "save" / f"iter_{ITERATIONS:07d}"
    said = f"{source} already holds iteration {ITERATIONS} of --train-iters {ITERATIONS}: nothing is left to do"
    for changes in ({}, {"train_iters": ITERATIONS - 1, "override_opt_param_scheduler": True}):
        text, has_started = start_again(**changes)
        held = said.replace(f"--train-iters {ITERATIONS}", f"--train-iters {changes.get('train_iters', ITERATIONS)}")
        assert (text.count(held), has_started) == (1, False), text
        assert "Write a larger --train-iters to train on" in text
        assert "model: built" not in text
        assert (run / "metrics.jsonl").read_text() == before

    hf_folder = folder / "hf" / source.name
    shutil.rmtree(hf_folder)
    text, has_started = start_again()
    assert (said in text, has_started, hf_folder.exists()) == (False, True, True), text

    iterations = before.splitlines(keepends=True)[:ITERATIONS]
    (run / "metrics.jsonl").write_text("".join(iterations))
    text, has_started = start_again()
    assert (said in text, has_started) == (False, True), text
    assert without_times(read_metrics(run))[-1]["evaluation"], "the last evaluation is made up for"
    assert start_again()[1] is False

    text, _ = start_again(4, rollout_folder=folder / "another")
    assert f"{source} belongs to the run 'run', and --rollout-folder names 'another'" in text


@pytest.mark.each_change
@pytest.mark.timeout(600)
def test_a_folder_of_another_run_is_refused_and_a_run_that_begins_again_keeps_the_old_files(world, finished):
    folder = copy(finished, "earlier")
    metrics = folder / "run" / "metrics.jsonl"
    before = metrics.read_text()
    metrics.write_text("".join(before.splitlines(keepends=True)[:2]))
    more = {"train_iters": ITERATIONS + 1, "override_opt_param_scheduler": True}
    ranks = loop.run(folder, 1, words(world, folder, **more), code=4)
    source = folder / "save" / f"iter_{ITERATIONS:07d}"
    said = f"{folder / 'run'} holds a run up to version 1, and {source} continues from version {ITERATIONS}: name the"
    assert said in ranks.text()
    metrics.write_text(before)
    (folder / "run" / "drift.json").write_text("{}")
    ranks = loop.run(folder, 1, words(world, folder, load=None, save=None, save_interval=None, save_hf=None))
    assert f"what an earlier run wrote into {metrics} is now metrics.jsonl.1" in ranks.text()
    assert (folder / "run" / "metrics.jsonl.1").read_text() == before
    assert not (folder / "run" / "drift.json").exists()
    assert len(read_metrics(folder / "run")) == len(before.splitlines())


@pytest.mark.each_change
@pytest.mark.timeout(600)
def test_a_moved_reference_is_restored_after_a_kill_in_the_same_and_in_another_layout(world):
    changes = {
        "grpo_kl_beta": 0.05, "grpo_ref_interval": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }  # fmt: skip
    whole = uninterrupted(world, "moved-whole", 2, **changes)
    divergences = [line["kl"] for line in read_metrics(whole / "run")[:ITERATIONS]]
    assert divergences[0] == divergences[2] == 0.0, "the reference is the policy that the iteration starts from"
    assert min(divergences[1], divergences[3]) > 0
    saved = [tensors_of(whole / "save" / f"iter_{version:07d}") for version in (1, 2, 3)]
    of_reference = [{name for name in names if name.startswith("reference.")} for names in saved]
    assert of_reference[:2] == [set(), set()]
    assert {name.removeprefix("reference.") for name in of_reference[2]} <= saved[1]
    assert "reference.embedding.word_embeddings.weight" in of_reference[2]

    folder = killed(world, "moved", 2, {0: fault("optimizer", "rank", call=ITERATIONS)}, **changes)
    other = world.folder / "moved-other"
    shutil.copytree(folder, other)
    resumed(world, folder, 2, **changes)
    assert_same(folder, whole)
    resumed(world, other, 2, pipeline_model_parallel_size=2, **changes)
    for key in ("loss", "kl", "gradient_norm"):
        ours, theirs = (read_metrics(run / "run")[ITERATIONS - 1][key] for run in (other, whole))
        assert abs(ours - theirs) < 1e-5 * abs(theirs), key


@pytest.mark.each_change
@pytest.mark.timeout(600)
def test_a_run_with_a_teacher_that_was_killed_resumes_in_the_same_and_in_another_layout(world):
    changes = {"teacher": loop.draw_teacher(world), "opd_divergence": "reverse", "opd_top_k": 8}
    whole = uninterrupted(world, "taught-whole", 2, tensor_model_parallel_size=2, **changes)
    folder = killed(
        world, "taught", 2, {0: fault("optimizer", "rank", call=3)}, tensor_model_parallel_size=2, **changes
    )
    other = world.folder / "taught-other"
    shutil.copytree(folder, other)
    resumed(world, folder, 2, tensor_model_parallel_size=2, **changes)
    assert_same(folder, whole)
    resumed(world, other, 2, pipeline_model_parallel_size=2, **changes)
    for key in ("loss", "teacher_kl", "gradient_norm"):
        ours, theirs = (read_metrics(run / "run")[2][key] for run in (other, whole))
        assert abs(ours - theirs) < 1e-5 * abs(theirs), key
    assert not any(name.startswith("teacher") for name in tensors_of(whole / "save" / "iter_0000001"))
    loop.draw_model(world.folder / "teacher", 6, "llama", hidden_size=80, num_hidden_layers=3)
    more = {"train_iters": ITERATIONS + 1, "use_checkpoint_opt_param_scheduler": True}
    with loop.running(whole, 2, words(world, whole, tensor_model_parallel_size=2, **changes, **more)) as ranks:
        assert all(ranks.wait(120))
    assert "was trained with other weights of the teacher: write the folder that was meant" in ranks.text()


@pytest.mark.each_change
@pytest.mark.timeout(600)
def test_a_run_with_a_critic_that_was_killed_resumes_in_the_same_and_in_another_layout(world):
    critic = loop.draw_model(world.folder / "critic", 7, "llama", hidden_size=48, num_hidden_layers=3)
    changes = {"algorithm": "vapo", "critic": critic, "critic_lr": 1e-2, "use_distributed_optimizer": True}
    whole = uninterrupted(world, "judged-whole", 2, **changes)
    folder = killed(world, "judged", 2, {0: fault("optimizer", "rank", call=3)}, **changes)
    other = world.folder / "judged-other"
    shutil.copytree(folder, other)
    resumed(world, folder, 2, **changes)
    assert_same(folder, whole)
    resumed(world, other, 2, pipeline_model_parallel_size=2, **changes)
    # Other bits make other samples, an iteration later.
    lines = [read_metrics(run / "run")[1] for run in (other, whole)]
    for of_run in ("loss", "gradient_norm"):
        assert abs(lines[0][of_run] - lines[1][of_run]) < 1e-5 * abs(lines[1][of_run]), of_run
    for of_critic in ("loss", "value", "gradient_norm"):
        ours, theirs = (line["critic"][of_critic] for line in lines)
        assert abs(ours - theirs) < 1e-5 * abs(theirs), of_critic
    # A run of its own begins with the critic of its flag.
    other_critic = loop.draw_model(world.folder / "other_critic", 8, "llama", hidden_size=32, num_hidden_layers=2)
    source = {"load": whole / "save", "finetune": True, "train_iters": 1}
    begun = uninterrupted(world, "judged-anew", 2, **{**changes, "critic": other_critic, **source})
    assert read_metrics(begun / "run")[0]["critic"]["value"] == 0
    saved = tensors_of(whole / "save" / "iter_0000001")
    assert {"critic.output_layer.weight", "optimizer.state.exp_avg.critic.output_layer.weight"} <= saved


@pytest.mark.each_change
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_with_a_head_that_was_killed_resumes_in_the_same_and_in_another_layout(world, rank):
    changes = {"algorithm": "vapo", "critic": "head", "critic_lr": 1e-2, "use_distributed_optimizer": True}
    pipeline = {**changes, "lora_rank": rank, "pipeline_model_parallel_size": 2}
    whole = uninterrupted(world, f"headed-whole-{rank}", 2, **pipeline)
    folder = killed(world, f"headed-{rank}", 2, {0: fault("optimizer", "rank", call=3)}, **pipeline)
    other = world.folder / f"headed-other-{rank}"
    shutil.copytree(folder, other)
    resumed(world, folder, 2, **pipeline)
    assert_same(folder, whole)
    resumed(world, other, 2, tensor_model_parallel_size=2, sequence_parallel=True, lora_rank=rank, **changes)
    # Other bits make other samples, an iteration later.
    lines = [read_metrics(run / "run")[1] for run in (other, whole)]
    pairs = [[line[name] for line in lines] for name in ("loss", "gradient_norm")]
    pairs += [[line["critic"][name] for line in lines] for name in ("loss", "value", "gradient_norm")]
    for ours, theirs in pairs:
        assert abs(ours - theirs) < 1e-5 * abs(theirs), pairs
    saved = tensors_of(whole / "save" / "iter_0000001")
    assert {"critic.head.weight", "optimizer.state.exp_avg.critic.head.weight"} <= saved
    exported = [Checkpoint(one).names() for one in (world.model, whole / "hf" / "iter_0000001")]
    assert set(exported[0]) == set(exported[1]), "engines and folders do not get the head"
    # A critic that is a whole model cannot begin with a head.
    last = {"train_iters": ITERATIONS + 1, "use_checkpoint_opt_param_scheduler": True}
    with loop.running(whole, 2, words(world, whole, **{**pipeline, **last, "critic": "policy"})) as ranks:
        assert all(ranks.wait(120))
    assert re.search(r"does not hold critic\.\S+, which the model has", ranks.text())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "layout"), [(2, {}), (4, {"pipeline_model_parallel_size": 4})])
def test_a_head_resumes_where_replicas_divide_optimizers_and_where_stages_lie_between(world, world_size, layout):
    model = loop.draw_model(world.folder / f"deep-{world_size}", num_hidden_layers=4)
    changes = {
        "algorithm": "vapo",
        "critic": "head",
        "critic_lr": 1e-2,
        "use_distributed_optimizer": True,
        "bf16": True,
    }
    changes |= {"hf_model": model, **layout}
    whole = uninterrupted(world, f"far-whole-{world_size}", world_size, **changes)
    folder = killed(world, f"far-{world_size}", world_size, {0: fault("optimizer", "rank", call=3)}, **changes)
    resumed(world, folder, world_size, **changes)
    assert_same(folder, whole)
    plain = uninterrupted(
        world, f"far-plain-{world_size}", world_size, **{**changes, "use_distributed_optimizer": False}
    )
    values = [
        [line["critic"]["value"] for line in read_metrics(run / "run") if "critic" in line] for run in (whole, plain)
    ]
    assert values[0] == values[1]
    assert values[0][0] != values[0][-1]


def tensors_of(checkpoint: Path) -> set[str]:
    return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_killed_at_any_moment_resumes_as_if_it_had_not_been(world):
    whole = uninterrupted(world, "whole-pp", 2, pipeline_model_parallel_size=2)
    calls = {"generation": 11, "backward": 11}
    cases = [(moment, "rank") for moment in AT] + [(m, "sidecar") for m in ("publish", "generation", "optimizer")]
    for moment, kill in cases:
        # The loss belongs to the last stage; the sidecar to rank 0.
        rank = 1 if moment == "backward" else 0
        folder = killed(
            world, f"pp-{moment}-{kill}", 2, {rank: fault(moment, kill, calls.get(moment, 2))},
            pipeline_model_parallel_size=2,
        )  # fmt: skip
        at = len(read_metrics(folder / "run")) if (folder / "run" / "metrics.jsonl").stat().st_size else 0
        resumed(world, folder, 2, pipeline_model_parallel_size=2)
        assert_same(folder, whole)
        print(f"{kill} killed at {moment}, {at} iterations written: the same")


# Half of the groups have no signal.
FILTERED = {"grpo_filter_groups_with_same_reward": True, "grpo_group_size": 2, "micro_batch_size": 2}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("changes", [{}, FILTERED], ids=["every group", "groups with a signal"])
def test_a_run_killed_at_random_moments_resumes_as_if_it_had_not_been(world, changes):
    whole = uninterrupted(world, f"whole-random-{len(changes)}", 2, **changes)
    draw = random.Random(20)
    for number in range(5):
        folder = world.folder / f"random-{len(changes)}-{number}"
        victim = draw.choice([0, 1])
        delay = draw.uniform(0.0, 6.0)
        # This is the time that a rank which is killed before the ranks have met is waited for.
        with loop.running(folder, 2, words(world, folder, distributed_timeout_minutes=1, **changes)) as ranks:
            started = time.monotonic()
            while not (folder / "run" / "address").exists() and time.monotonic() < started + 600:
                time.sleep(0.05)
            time.sleep(delay)
            ranks.processes[victim].kill()
            ranks.wait()
        resumed(world, folder, 2, **changes)
        assert_same(folder, whole)
        assert verify(folder / "run").breaches == []
        print(f"rank {victim} killed {delay:.1f} s after the sidecar served: the same")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_resumes_in_another_layout(world):
    """Check that the first iteration there has the metrics that it would have had, to rounding."""
    for name, world_size, before, other_size, after in (
        ("tp2-pp2", 2, {"tensor_model_parallel_size": 2}, 2, {"pipeline_model_parallel_size": 2}),
        ("dp1-dp2", 1, {"use_distributed_optimizer": True}, 2, {"use_distributed_optimizer": True}),
        ("cp2-tp2", 2, {"context_parallel_size": 2}, 2, {"tensor_model_parallel_size": 2}),
    ):
        whole = uninterrupted(world, f"{name}-whole", world_size, **before)
        folder = killed(world, name, world_size, {0: fault("optimizer", "rank", call=3)}, **before)
        resumed(world, folder, other_size, **after)
        ours, theirs = read_metrics(folder / "run"), read_metrics(whole / "run")
        assert [line["version"] for line in ours] == [line["version"] for line in theirs]
        for key in ("loss", "gradient_norm"):
            difference = abs(ours[2][key] - theirs[2][key]) / abs(theirs[2][key])
            print(f"{name}: {key} differs by {difference:.1e}")
            assert difference < 1e-5
        assert ours[2]["reward"] == theirs[2]["reward"]
