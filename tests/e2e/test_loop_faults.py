"""A fault that ends a run ends all of its ranks, soon, and with one reason."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_rl.shared.records.audit_chain import BreachName
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop
from tests.ranks import ROOT

PATCH_LOSS = """
    from megatron_rl.algorithm.objective import Objective
    loss = Objective.loss
    calls = []
    def faulty(self, *arguments, **keywords):
        calls.append(1)
        total, statistics = loss(self, *arguments, **keywords)
        if len(calls) == 6:
            {fault}
        return total, statistics
    Objective.loss = faulty
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("faults"))


def reasons(ranks: loop.Ranks) -> list[str]:
    """Return each rank's reason for the end of the run."""
    return [re.findall(r"the run ended: (.*)", path.read_text())[-1] for path in ranks.outputs]


def ended(world: loop.World, name: str, expected: str, code: int, faults=None, **changes) -> None:
    """Check that all ranks end by themselves, with this exit code, for this reason."""
    folder = world.folder / name
    words = world.words(name, rollout_folder=folder / name, **changes)
    with loop.running(folder, 2, words, faults) as ranks:
        codes = ranks.wait()
    assert codes == [code, code], ranks.text()
    found = set(reasons(ranks))
    assert len(found) == 1, ranks.text()
    assert re.search(expected, found.pop()), ranks.text()
    assert not processes_of(folder)


@pytest.mark.each_change
def test_an_exception_on_the_last_stage_ends_the_first_one_too(world):
    fault = PATCH_LOSS.format(fault="raise ZeroDivisionError('planted')")
    ended(world, "last", r"ZeroDivisionError: planted \(rank 1\)", 1, {1: fault}, pipeline_model_parallel_size=2)


def test_an_exception_on_one_replica_ends_the_other_too(world):
    ended(
        world, "replica", r"planted \(rank 0\)", 1, {0: PATCH_LOSS.format(fault="raise ZeroDivisionError('planted')")}
    )


PATCH_SLOTS = """
    from megatron_rl.trainer.data.slots import IterationSlots
    batch = IterationSlots.batch
    def faulty(self, index):
        if index == 2:
            {fault}
        return batch(self, index)
    IterationSlots.batch = faulty
"""


@pytest.mark.each_change
def test_an_exception_on_the_rank_that_fetches_slots_is_what_ends_the_ranks_that_wait_for_them(world):
    fault = PATCH_SLOTS.format(fault="raise ZeroDivisionError('planted')")
    ended(world, "fetching", r"ZeroDivisionError: planted \(rank 0\)", 1, {0: fault}, pipeline_model_parallel_size=2)


def test_a_loss_of_nan_ends_the_run_before_the_update(world):
    fault = PATCH_LOSS.format(fault="statistics.sums['loss'] = total.detach() * float('nan')")
    ended(world, "nan", r"the loss of micro-batch \d is nan", 5, {1: fault})


def test_tokens_of_another_policy_end_the_run_before_the_update(world):
    """Let scripted engines sample by chance, so that their tokens are far off by the trainer's log-probs."""
    fault = """
        from megatron_rl.trainer.loop.mismatch import MismatchBounds
        MismatchBounds.error = lambda self, kind: 0.125
    """
    reason = (
        r"iteration 0: the trainer's log-probs differ .*, beyond 0.125 \(--rollout-mismatch-error\)\. The update was"
    )
    ended(world, "mismatch", reason, 5, {0: fault, 1: fault})
    run = world.folder / "mismatch" / "mismatch"
    assert not (run / "metrics.jsonl").read_text()
    ends = [json.loads(line)["event"] for line in (run / "audit.jsonl").open()][-2:]
    assert ends == ["mismatch", "fail"]
    assert verify(run).breaches[0].name is BreachName.MISMATCH


# From a call on, files may not become larger than this: real writes fail then, as on a full disk.
PATCH_LIMIT = """
    import resource
    from megatron_rl import platforms
    platforms.select("cpu").install()
    from {module} import {owner}
    inner = {owner}.{name}
    def limited(*arguments, **keywords):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return inner(*arguments, **keywords)
    {owner}.{name} = limited
"""
PATCH_FULL = """
    import errno, os
    open_file = os.open
    def full(path, *rest, **others):
        if str(path).endswith("/.config.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_file(path, *rest, **others)
    os.open = full
"""


@pytest.mark.each_change
@pytest.mark.parametrize("what", ["save", "save_hf"])
def test_a_checkpoint_or_a_weights_file_that_finds_no_room_ends_the_run_by_its_path(world, what):
    fault = PATCH_LIMIT.format(module="megatron_rl.trainer.loop.saver", owner="Saver", name="save_if_due")
    place = world.folder / f"full-{what}" / what
    reason = rf"^{place}\S* cannot be written: File too large \(\d+ bytes are free\); raise the limit"
    ended(world, f"full-{what}", reason, 5, {0: fault, 1: fault}, train_iters=1, **{what: place})


@pytest.mark.each_change
def test_a_disk_that_is_full_where_a_run_begins_ends_it_by_name_and_without_a_traceback(world):
    path = world.folder / "full" / "full" / "config.json"
    reason = rf"^{path} cannot be written: No space left on device \(\d+ bytes are free\); make room there"
    ended(world, "full", reason, 5, {0: PATCH_FULL})
    assert "Traceback" not in (world.folder / "full" / "rank-0.output").read_text()


# The place where a rank stays until it is killed.
MOMENTS = {
    "before megatron is imported": """
        from megatron_rl.trainer.loop.watch import Watch
        make = Watch.of_environment
        def stay_here():
            watch = make()
            watch._lines.wait_until_told(600)
            stay()
        Watch.of_environment = stay_here
    """,
    "before the ranks meet": """
        import megatron_rl.command_line.run as settings
        settings.resolve_sizes = stay
    """,
    "while weights are loaded": """
        from megatron_rl import platforms
        platforms.select("cpu").install()
        from megatron_rl.trainer.mcore.model.weights import ModelWeights
        ModelWeights.load_hf = stay
    """,
    "while engines start": """
        from megatron_rl.sidecar.child import OwnSidecar
        OwnSidecar.address = stay
    """,
    "while the lease is taken": """
        from megatron_rl.shared.protocol.client import RolloutClient
        RolloutClient.take_lease = stay
    """,
    "while it waits for a slot": """
        from megatron_rl.trainer.data.slots import IterationSlots
        batch = IterationSlots.batch
        def telling(self, index):
            tell()
            return batch(self, index)
        IterationSlots.batch = telling
    """,
}
STAY = """
    import pathlib, time
    def tell():
        pathlib.Path({marker!r}).touch()
    def stay(*arguments):
        tell()
        time.sleep(600)
"""
_OF_RANK_0 = ("while engines start", "while the lease is taken")
_FAST = {(0, "before megatron is imported"), (1, "before megatron is imported"), (0, "while weights are loaded"),
         (1, "while engines start"), (0, "while it waits for a slot"), (1, "while it waits for a slot")}  # fmt: skip


@pytest.mark.each_change
@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        pytest.param(victim, moment, marks=pytest.mark.each_change if (victim, moment) in _FAST else pytest.mark.slow)
        for moment in MOMENTS
        for victim in (0, 1)
    ],
)
def test_a_rank_that_is_killed_ends_the_other_by_name(world, victim, moment):
    folder = world.folder / f"{moment} {victim}".replace(" ", "-")
    folder.mkdir()
    marker = folder / "there"
    fault = textwrap.dedent(STAY.format(marker=str(marker))) + textwrap.dedent(MOMENTS[moment])
    # Rank 0 alone waits for the sidecar; the other waits for rank 0 then.
    staying = 0 if moment in _OF_RANK_0 else victim
    slow = {"rollout_script": write_delay(world, 30.0), "tensor_model_parallel_size": 2}
    changes = slow if moment == "while it waits for a slot" else {}
    words = world.words("start", rollout_folder=folder / "r", **changes)
    with loop.running(folder, 2, words, {staying: fault}) as ranks:
        until(marker.exists, ranks)
        ranks.processes[victim].kill()
        killed = time.monotonic()
        assert ranks.processes[1 - victim].wait(60) == 5, ranks.text()
        print(f"{moment}: the other rank ended {time.monotonic() - killed:.2f} s after rank {victim}")
    (said,) = re.findall(r"the run ended: (.*)", ranks.outputs[1 - victim].read_text())
    assert said == f"its process ended without a message: it was killed, or its host cannot be reached (rank {victim})"


@pytest.mark.each_change
def test_a_reward_that_raises_ends_all_ranks_by_its_name(world, tmp_path):
    """Run two stages, of which the first alone speaks to the sidecar; the next test has two replicas, which both do."""
    reward = tmp_path / "bad.py"
    reward.write_text("def bad(prompts, completions, completion_ids, **columns):\n    raise KeyError('solution')\n")
    reason = r"iteration 0 failed: .*bad.*KeyError.*solution"
    ended(world, "reward", reason, 5, reward=f"{reward}:bad", pipeline_model_parallel_size=2)


@pytest.mark.each_change
def test_a_sidecar_that_is_gone_ends_all_ranks_by_name(world):
    folder = world.folder / "gone"
    words = world.words(
        "gone", rollout_folder=folder / "gone", rollout_script=write_delay(world, 2.0), rollout_patience_seconds=600,
        train_iters=50,
    )  # fmt: skip
    with loop.running(folder, 2, words) as ranks:
        until_line(ranks, folder / "gone", 1)
        (sidecar,) = [
            child for child in psutil.Process(ranks.processes[0].pid).children()
            if "megatron_rl.sidecar" in child.cmdline()
        ]  # fmt: skip
        sidecar.kill()
        killed = time.monotonic()
        codes = ranks.wait(60)
        print(f"all ranks ended {time.monotonic() - killed:.1f} s after the sidecar")
    assert codes == [5, 5], ranks.text()
    log = folder / "gone" / "sidecar.log"
    assert set(reasons(ranks)) == {f"the sidecar ended by SIGKILL; the end of its log, {log}:"}
    assert "serving run gone at" in ranks.text()


@pytest.mark.each_change
def test_an_interrupt_says_which_checkpoint_is_the_newest_what_is_lost_and_how_to_resume(world):
    folder = world.folder / "interrupted"
    # The interrupt comes from within, once an iteration after a checkpoint is done.
    fault = """
        import os, signal
        from megatron_rl import platforms
        platforms.select("cpu").install()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from megatron_rl.trainer.loop.saver import Saver
        inner = Saver.save_if_due
        def interrupting(self, version, *arguments):
            inner(self, version, *arguments)
            if version == 3:
                os.kill(os.getpid(), signal.SIGINT)
        Saver.save_if_due = interrupting
    """
    changes = {"save": folder / "save", "load": folder / "save", "save_interval": 2, "train_iters": 50}
    reason = (
        rf"^interrupted: the newest checkpoint is {folder / 'save' / 'iter_0000002'}, of iteration 2; 1 finished "
        r"iteration after it is lost, and the same command resumes from it \(rank 0\)$"
    )
    ended(world, "interrupted", reason, 130, {0: fault}, **changes)


@pytest.mark.each_change
def test_a_run_that_is_asked_to_stop_finishes_its_iteration_and_saves_it(world):
    folder = world.folder / "stop"
    words = world.words("stop", rollout_folder=folder / "stop", save=folder / "save", train_iters=500)
    with loop.running(folder, 2, words) as ranks:
        until_line(ranks, folder / "stop", 1)
        ranks.signal(signal.SIGTERM)
        assert ranks.wait() == [0, 0], ranks.text()
    written = len((folder / "stop" / "metrics.jsonl").read_text().splitlines())
    assert 1 <= written < 500
    assert (folder / "save" / "latest_checkpointed_iteration.txt").read_text() == str(written)


@pytest.mark.each_change
def test_a_run_that_is_asked_to_stop_while_engines_start_ends_at_once_and_leaves_nothing(world):
    folder = world.folder / "early"
    folder.mkdir()
    marker, shared = folder / "there", folder / "shared"
    fault = textwrap.dedent(STAY.format(marker=str(marker))) + textwrap.dedent(MOMENTS["while engines start"])
    # A grace longer than the test would wait.
    words = world.words("early", rollout_folder=folder / "r", exit_grace_seconds=3600, publish_folder=shared)
    with loop.running(folder, 2, words, {0: fault}) as ranks:
        until(marker.exists, ranks)
        ranks.signal(signal.SIGTERM)
        assert ranks.wait() == [143, 143], ranks.text()
    assert "asked to stop before the first iteration began: it ends now" in ranks.text()
    assert "the iteration is finished" not in ranks.text()
    assert not shared.exists() or not list(shared.iterdir())
    until(lambda: not processes_of(folder), ranks, is_over=True)


@pytest.mark.each_change
def test_a_run_that_cannot_stop_in_time_leaves_its_checkpoint_as_it_is_and_no_weights(world):
    folder = world.folder / "grace"
    shared = folder / "shared"
    words = world.words(
        "grace", rollout_folder=folder / "grace", rollout_script=write_delay(world, 30.0), save=folder / "save",
        exit_grace_seconds=1, publish_folder=shared,
    )  # fmt: skip
    with loop.running(folder, 2, words) as ranks:
        until(lambda: bool(list(shared.glob("*/version-0/*"))), ranks)
        time.sleep(1)
        ranks.signal(signal.SIGTERM)
        assert ranks.wait() == [143, 143], ranks.text()
    assert "grace are over" in ranks.text()
    assert list(shared.iterdir()) == []
    assert not (folder / "save" / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.each_change
def test_a_sidecar_that_ends_while_weights_are_loaded_ends_the_run_with_what_it_said(world, tmp_path):
    reward = tmp_path / "broken.py"
    reward.write_text("import nothing_of_this_name\ndef f(completions): ...\n")
    folder = world.folder / "loading"
    stay = textwrap.dedent(STAY.format(marker=str(tmp_path / "there")))
    fault = stay + textwrap.dedent(MOMENTS["while weights are loaded"])
    words = world.words("loading", reward=f"{reward}:f", rollout_folder=folder / "r")
    ranks = loop.run(folder, 2, words, {0: fault, 1: fault}, code=2, seconds=60)
    assert len(set(reasons(ranks))) == 1
    assert re.search(r"the run ended: --reward: .*broken.py:1 does not import: ModuleNotFoundError", ranks.text())
    assert re.search(r"\(the sidecar ended with exit code 2; its log is .*sidecar.log\) \(rank 0\)", ranks.text())
    assert "serving" not in (folder / "r" / "sidecar.log").read_text()
    assert not processes_of(folder)


@pytest.mark.each_change
def test_flags_that_the_sidecar_would_refuse_are_refused_together_before_a_process_is_started(world, tmp_path):
    folder = world.folder / "flags"
    words = world.words("flags", reward=f"{tmp_path}/none.py:f", rollout_folder=folder / "r")
    words += ["--rollout-num-threads", "0", "--reward-on-error", "perhaps", "--rollout-script", "none.json"]
    ranks = loop.run(folder, 2, words, code=2)
    said = ranks.outputs[0].read_text()
    for message in (
        f"--reward {tmp_path}/none.py cannot be read",
        "--rollout-script none.json cannot be read",
        "--rollout-num-threads 0 must be at least 1",
        "--reward-on-error perhaps must be stop or a finite number",
    ):
        assert f"pretrain_grpo.py: {message}" in said
    assert "Traceback" not in ranks.text()
    assert not (folder / "r").exists()


@pytest.mark.each_change
def test_a_reward_that_asks_for_a_column_that_is_not_there_is_said_and_nothing_is_served(world, tmp_path):
    reward = tmp_path / "target.py"
    reward.write_text("def f(completions, target): return [0.0] * len(completions)\n")
    folder = world.folder / "column"
    ranks = loop.run(folder, 1, world.words("column", reward=f"{reward}:f", rollout_folder=folder / "r"), code=2)
    said = "it asks for target, and the row has no such column (it has answer, teacher): add it"
    said = f"--reward f: prompts.jsonl:1: {said}"
    assert said in ranks.text()
    assert "--reward-on-error" not in ranks.text()
    assert "serving" not in (folder / "r" / "sidecar.log").read_text()
    assert not (folder / "r" / "trials").exists()
    assert not processes_of(folder)


@pytest.mark.each_change
def test_a_prompt_that_only_the_tokenizer_finds_too_long_ends_the_sidecar_that_is_starting(world, tmp_path):
    prompts, run = tmp_path / "prompts.jsonl", world.folder / "long" / "r"
    prompts.write_text(json.dumps({"prompt": "1 " * 50, "answer": "0"}))
    # The sidecar has its engines and reward workers by then, and waits for rows.
    fault = f"""
        import pathlib, time
        from megatron_rl import platforms
        platforms.select("cpu").install()
        from megatron_rl.trainer.loop import inputs
        tokenize = inputs.tokenize_prompts
        def late(*arguments, **keywords):
            while not pathlib.Path({str(tmp_path / "seen")!r}).exists():
                time.sleep(0.05)
            return tokenize(*arguments, **keywords)
        inputs.tokenize_prompts = late
    """
    words = world.words("long", prompts=prompts, rollout_folder=run)
    with loop.running(run.parent, 1, words, {0: fault}) as ranks:
        until(lambda: is_done(run / "starting.json", "engines") and (run / "rewards.log").exists(), ranks)
        (sidecar,) = processes_of(run)
        started = [sidecar, *sidecar.children(recursive=True)]
        assert len(started) > 1, "it has a reward worker"
        (tmp_path / "seen").touch()
        assert ranks.wait() == [4], ranks.text()
        until(lambda: not any(map(is_alive, started)), ranks, is_over=True)
    assert "has a prompt of 50 tokens, and more than 40 leave no room for a response" in ranks.text()
    assert "the run ended" not in ranks.text()


@pytest.mark.each_change
def test_under_torchrun_a_wrong_row_is_said_once_and_again_at_the_very_end_before_an_engine_is_started(world, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "4 5 6"}\n')
    # With this grace, ranks that wait for rank 0 would use up all of torchrun's own patience.
    words = world.words("torchrun", prompts=prompts, rollout_folder=tmp_path / "r", exit_grace_seconds=3600)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "pretrain_grpo.py", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    message = f"{prompts}:1 has no column prompt (it has question); name the prompt's with --prompt-key"
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count(f"pretrain_grpo.py: {message}") == 1
    *_, last, _ = ended.stderr.rstrip().splitlines()
    assert last.strip() == f"traceback : {message}", ended.stderr
    assert "exitcode  : 4" in ended.stderr
    # The text of torchrun about ranks that it had to kill after its 30 seconds.
    assert "forcefully exiting" not in ended.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.each_change
def test_weights_that_are_not_there_are_said_before_an_engine_is_started(world, tmp_path):
    folder = world.folder / "weights"
    words = world.words("weights", rollout_folder=folder / "r", grpo_kl_beta=0.1, grpo_ref_model=tmp_path)
    ranks = loop.run(folder, 1, words, code=4)
    assert f"{tmp_path} must hold *.safetensors" in ranks.text()
    assert not (folder / "r").exists()


def is_done(progress: Path, part: str) -> bool:
    """Check whether a starting sidecar has written that this part is done."""
    return progress.exists() and json.loads(progress.read_text())["parts"].get(part) is not None


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def write_delay(world: loop.World, seconds: float) -> Path:
    """Write engines whose every group takes this long."""
    path = world.folder / f"delay-{seconds:g}.json"
    path.write_text(json.dumps({"delay": [seconds, seconds], "delay_seed": 1}))
    return path


def processes_of(folder: Path) -> list[psutil.Process]:
    """List the processes whose command lines name the folder."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


def until(is_so: Callable[[], bool], ranks: loop.Ranks, is_over: bool = False) -> None:
    """Wait until it is true, while the ranks run; if they are over, without them."""
    deadline = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < deadline, ranks.text()
        assert is_over or all(process.poll() is None for process in ranks.processes), ranks.text()
        time.sleep(0.05)


def until_line(ranks: loop.Ranks, run: Path, count: int) -> None:
    """Wait until `count` iterations are written down."""
    path = run / "metrics.jsonl"
    until(lambda: path.exists() and len(path.read_text().splitlines()) >= count, ranks)
