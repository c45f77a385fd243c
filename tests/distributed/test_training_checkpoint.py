"""Training that is saved and resumed: in the same layout bit for bit, in others with all of Adam's state."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_rl.errors import MegatronRLError
from megatron_rl.trainer.loop.saver import RunState, Saver
from megatron_rl.trainer.mcore.checkpoint import checkpointer as checkpointing
from megatron_rl.trainer.mcore.checkpoint import state_dict
from megatron_rl.trainer.mcore.checkpoint.checkpointer import Loaded
from megatron_rl.trainer.mcore.checkpoint.folders import TRACKER
from megatron_rl.trainer.mcore.model.gpt import named_shards
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from tests import hf_models
from tests.distributed.parity import Expected, expected_at
from tests.distributed.training import LAYOUTS, Training, checkpointer, training
from tests.ranks import RanksError, run_ranks

pytestmark = pytest.mark.each_change

ADAM = "--lr 0.01 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1"
EXTRA = {"version": 3, "run": "a-run", "position": [1, 2], "reference": None}


def remembered(trained: Training) -> dict[str, dict[str, torch.Tensor]]:
    """Gather Adam's state of each whole parameter, under the checkpoint's names, on rank 0."""
    of_parameter = {
        parameter: values for one in trained.optimizer.chained_optimizers for parameter, values in _kept(one, trained)
    }
    names = dict(named_shards(trained.chunks))
    return {
        what: trained.whole({name: of_parameter[parameter][what] for name, parameter in names.items()})
        for what in ("master", "exp_avg", "exp_avg_sq", "step")
    }


def _kept(one: Any, trained: Training) -> list[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    if isinstance(one, DistributedOptimizer):
        return _gathered(one)
    kept = []
    for _, parameter in named_shards(trained.chunks):
        main = getattr(parameter, "main_param", parameter)
        if main in one.optimizer.state:
            kept.append((parameter, _values(one.optimizer.state[main], main)))
    return kept


def _gathered(one: DistributedOptimizer) -> list[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """Lay each rank's slices into zeros, and sum them over the replicas."""
    slices = {
        parameter: (ranges["param"], one._get_main_param_and_optimizer_states(parameter))
        for buffer in one.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    }
    kept = []
    for buffer in one.buffers:
        for parameter in buffer.param_index_map:
            whole = {what: torch.zeros(parameter.numel()) for what in ("master", "exp_avg", "exp_avg_sq", "step")}
            if parameter in slices:
                place, tensors = slices[parameter]
                for what, values in _values(tensors, tensors["param"]).items():
                    whole[what][place.start : place.end] = values
            for values in whole.values():
                torch.distributed.all_reduce(values, group=one.data_parallel_group)
            kept.append((parameter, {what: values.view(parameter.shape) for what, values in whole.items()}))
    return kept


def _values(state: dict[str, torch.Tensor], main: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "master": main.detach().float(),
        "exp_avg": state["exp_avg"],
        "exp_avg_sq": state["exp_avg_sq"],
        "step": torch.full_like(state["exp_avg"], float(state["step"])),
    }


def draw() -> list[float]:
    with tensor_parallel.get_cuda_rng_tracker().fork():
        tracked = torch.rand(2)
    return [random.random(), float(np.random.rand()), *torch.rand(2).tolist(), *tracked.tolist()]


def go_on(trained: Training) -> dict[str, Any]:
    """Return the state that two more updates depend on, and their results."""
    drawn, weights, memory = draw(), trained.parameters(), remembered(trained)
    trained.accumulate()
    gradients = trained.gradients()
    for chunk in trained.wrapped:
        chunk.zero_grad_buffer()
    reports = [trained.update() for _ in range(2)]
    trained.policy.synchronize()
    return {
        "drawn": drawn, "weights": weights, "remembered": memory, "gradients": gradients, "reports": reports,
        "after": trained.parameters(),
    }  # fmt: skip


def write(folder: Path, out: Path, words: dict[str, str]) -> dict[str, Any]:
    """Train three updates in each layout, write a checkpoint, and return the updates that follow."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for name, layout in words.items():
        with training(folder, f"{ADAM} {layout}") as trained:
            for _ in range(3):
                trained.update()
            random.seed(trained.session.rank)
            np.random.seed(7)
            checkpointer(trained, save=out / name).save(3, EXTRA)
            results[name] = go_on(trained)
    return results


def resume(folder: Path, out: Path, words: dict[str, str], pairs: list[tuple[str, str]]) -> dict:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    results = {}
    for writer, reader in pairs:
        with training(folder, f"{ADAM} {words[reader]}") as trained:
            with torch.no_grad():
                for _, parameter in named_shards(trained.chunks):
                    parameter.fill_(float("nan"))
            loaded = checkpointer(trained, load=out / writer).load()
            results[writer, reader] = (loaded, go_on(trained))
    return results


def write_and_resume(folder: Path, out: Path, words: dict[str, str], pairs: list[tuple[str, str]]) -> tuple:
    written = write(folder, out, {name: words[name] for name in dict.fromkeys(writer for writer, _ in pairs)})
    return written, resume(folder, out, words, pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.draw("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


def compare(name: str, written: dict[str, Any], resumed: tuple[Loaded, dict[str, Any]], expected: Expected) -> None:
    """Compare; `expected` is at the weights that were written."""
    writer, reader = name.split(" to ")
    is_same = writer == reader
    # Log-probs of context-parallel ranks, and of replicas, are the same; gradients are summed in another order.
    has_rng = is_same or {writer, reader} <= {"DP1+distopt", "DP2+distopt", "CP2+distopt"}
    loaded, continued = resumed
    assert (loaded.version, loaded.extra) == (3, EXTRA), name
    assert bool(loaded.notes) != has_rng, name
    assert (continued["drawn"] == written["drawn"]) == has_rng, name
    exact = [("weights", written["weights"], continued["weights"])]
    exact += [(what, written["remembered"][what], continued["remembered"][what]) for what in written["remembered"]]
    if is_same:
        exact += [(what, written[what], continued[what]) for what in ("gradients", "after")]
        assert continued["reports"] == written["reports"], name
    for what, ours, theirs in exact:
        for tensor, values in ours.items():
            assert torch.equal(values, theirs[tensor]), f"{name}: {what} of {tensor}"
    assert {float(values.max()) for values in continued["remembered"]["step"].values()} == {3.0}
    if not is_same:
        for gradients in (written["gradients"], continued["gradients"]):
            error, tensor = expected.worst_gradient(gradients)
            print(f"{name}: error / bound: {error:.2f}, gradient of {tensor}")
            assert error <= 1, f"{name}: gradient of {tensor}"
    rates = [[report.learning_rate for report in reports] for reports in (written["reports"], continued["reports"])]
    assert rates[0] == rates[1], name


def test_a_resumed_run_equals_one_that_never_stopped_and_another_layout_keeps_adams_state(
    folder: Path, tmp_path: Path
) -> None:
    words = LAYOUTS | {"DP1+distopt": "--use-distributed-optimizer"}
    written = run_ranks(write, 1, folder, tmp_path, {name: words[name] for name in ("TP1", "DP1+distopt")})[0]
    pairs = [
        ("TP2", "PP2"), ("PP2xVPP2", "PP2xVPP2"), ("DP2+overlap", "DP2+overlap"), ("DP2+overlap", "TP2+distopt"),
        ("CP2+distopt", "CP2+distopt"), ("CP2+distopt", "DP2+distopt"),
    ]  # fmt: skip
    more, resumed = run_ranks(write_and_resume, 2, folder, tmp_path, words, pairs)[0]
    written |= more
    from_one = [("TP1", "TP2"), ("DP1+distopt", "DP2+distopt"), ("DP1+distopt", "CP2+distopt")]
    resumed |= run_ranks(resume, 2, folder, tmp_path, words, from_one)[0]
    assert resumed.keys() == {*pairs, *from_one}
    expected = {name: expected_at(of_writer["weights"], folder) for name, of_writer in written.items()}
    for (writer, reader), result in resumed.items():
        compare(f"{writer} to {reader}", written[writer], result, expected[writer])


def write_late(gate: Path | None, pattern: Callable[[int], bool] = lambda rank: True, then: Any = None) -> Any:
    """Let the processes that write a rank's files wait for a file first, and then fail if that is asked for."""
    original = FileSystemWriterAsync.write_preloaded_data

    def late(*arguments: Any, **keywords: Any) -> Any:
        while gate is not None and not gate.exists():
            time.sleep(0.01)
        if then is not None and pattern(torch.distributed.get_rank()):
            then()
        return original(*arguments, **keywords)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(late)
    return original


def no_space() -> None:
    raise OSError(28, "No space left on device")


def crash(*_: Any) -> None:
    raise ValueError("a crash")


def latest(out: Path) -> str | None:
    return (out / TRACKER).read_text() if (out / TRACKER).exists() else None


def save_beside_training(folder: Path, out: Path) -> dict[str, Any]:
    """Change weights while they are written; then fail to write on one rank, then to do something else."""
    torch.distributed.init_process_group("gloo")
    results: dict[str, Any] = {"seen": []}
    with training(folder, f"{ADAM} {LAYOUTS['DP2+overlap']} --async-save") as trained:
        saver = checkpointer(trained, save=out, keep_last=1)
        trained.update()
        trained.policy.synchronize()
        results["weights"], results["remembered"] = trained.parameters(), remembered(trained)
        gate = folder.parent / "write"
        original = write_late(gate)
        saver.save(1, {"version": 1})
        for _ in range(2):
            trained.update()
            saver.poll()
            results["seen"].append(latest(out))
        with torch.no_grad():
            for _, parameter in named_shards(trained.chunks):
                parameter.fill_(float("nan"))
        saver.poll()
        results["seen"].append(latest(out))
        gate.touch()
        saver.finish()
        results["seen"].append(latest(out))

        FileSystemWriterAsync.write_preloaded_data = original
        write_late(None, lambda rank: rank == 1, no_space)
        saver.save(2, {"version": 2})
        results["no space"] = error_of(saver.finish)
        FileSystemWriterAsync.write_preloaded_data = original
        if trained.session.rank == 1:
            state_dict.get_rng_state = crash
        results["crash"] = error_of(lambda: saver.save(2, {"version": 2}))
        results["seen"].append(latest(out))
        results["left"] = sorted(path.name for path in out.iterdir())
    return results


def load_again(folder: Path, out: Path, kill: bool) -> tuple[Any, ...]:
    """Load the newest; save another beside it, or be killed while that is written."""
    torch.distributed.init_process_group("gloo")
    with training(folder, f"{ADAM} {LAYOUTS['DP2+overlap']} --async-save") as trained:
        saver = checkpointer(trained, save=out, load=out, keep_last=1)
        loaded = saver.load()
        state = (loaded, trained.parameters(), remembered(trained))
        if kill:
            write_late(out / "never")
        saver.save(2, {"version": 2})
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        saver.finish()
        return (*state, sorted(path.name for path in out.iterdir()))


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (MegatronRLError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_checkpoint_written_while_training_continues_is_whole_and_its_failures_reach_every_rank(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "saved"
    results = run_ranks(save_beside_training, 2, folder, out, num_threads=2)
    for result in results:
        # No folder is the newest while it is written, and polling does not wait for it.
        assert result["seen"] == [None, None, None, "1", "1"]
        assert result["no space"].startswith(f"NoRoom: {out} cannot be written: No space left on device (")
        assert "a crash" in result["crash"]
        assert result["left"] == ["iter_0000001", TRACKER]
    assert results[0]["no space"] == results[1]["no space"]
    assert results[1]["crash"] == "ValueError: a crash"
    assert results[0]["crash"].startswith("MegatronRLError: rank 1 failed")

    with pytest.raises(RanksError):
        run_ranks(load_again, 2, folder, out, True)
    assert latest(out) == "1"
    assert any(path.name.endswith(".partial") for path in out.iterdir())
    loaded, weights, memory, left = run_ranks(load_again, 2, folder, out, False)[0]
    assert (loaded.version, loaded.extra) == (1, {"version": 1})
    for what, saved, found in [
        ("weights", results[0]["weights"], weights),
        *((what, results[0]["remembered"][what], memory[what]) for what in memory),
    ]:
        for tensor, values in saved.items():
            assert torch.equal(values, found[tensor]), f"{what} of {tensor} changed while it was written"
    assert left == ["iter_0000002", TRACKER]


def roll_back(trained: Training, out: Path) -> str:
    """Resume from the first of two checkpoints; return the newest, and whether the resumed run wrote it."""
    checkpointer(trained, save=out).save(1, EXTRA)
    checkpointer(trained, save=out).save(2, EXTRA)
    saver = checkpointer(trained, save=out, load=out, ckpt_step=1)
    saver.load()
    trained.update()
    updated = trained.weights.fingerprint()
    saver.save(2, EXTRA)
    trained.update()
    loaded = checkpointer(trained, load=out).load()
    return f"{loaded.version} {trained.weights.fingerprint() == updated}"


def run_bad_input(folder: Path, other: Path, out: Path) -> dict[str, str]:
    """Return the error of each checkpoint that cannot be loaded, and the effect of the flags."""
    torch.distributed.init_process_group("gloo")
    told: dict[str, str] = {}
    rank = int(os.environ["RANK"])
    with training(folder, f"{ADAM} {LAYOUTS['TP2']}") as trained:
        saver = checkpointer(trained, save=out / "whole", save_interval=1)
        trained.update()
        saver.save(1, EXTRA)
        checkpointer(trained, save=out / "weights", no_save_optim=True, no_save_rng=True).save(1, EXTRA)
        # As Megatron's own training script writes one: without our additions.
        with mock.patch.object(checkpointing, "EXTRA", "args"):
            checkpointer(trained, save=out / "pretrained", save_interval=1).save(1, EXTRA)
        told["pretrained"] = error_of(checkpointer(trained, load=out / "pretrained").load)
        updated = trained.weights.fingerprint()
        told["other folder"] = error_of(checkpointer(trained, save=out / "whole", load=out / "weights").load)
        told["nothing"] = str(checkpointer(trained, load=out / "nothing").load())
        told["missing"] = error_of(checkpointer(trained, load=out / "nothing", exit_on_missing_checkpoint=True).load)
        told["rolled back"] = roll_back(trained, out / "rolled back")
        told["step"] = error_of(checkpointer(trained, load=out / "whole", ckpt_step=7).load)
    with training(folder, f"{ADAM} {LAYOUTS['TP2']}") as trained:
        before = trained.weights.fingerprint()
        told["no optimizer"] = error_of(checkpointer(trained, load=out / "weights").load)
        assert before == trained.weights.fingerprint()
        loaded = checkpointer(trained, load=out / "weights", no_load_optim=True, no_load_rng=True).load()
        told["weights only"] = (
            f"{loaded.version} {loaded.extra['run']} {len(loaded.notes)} {trained.scheduler.num_steps}"
        )
        loaded = checkpointer(trained, load=out / "whole", finetune=True).load()
        told["own folder"] = error_of(checkpointer(trained, load=out / "whole", save=out / "whole", finetune=True).load)
        told["finetune"] = f"{loaded.version} {loaded.extra} {trained.weights.fingerprint() == updated}"
        # From megatron-core 0.19 on, values that are not tensors lie in a shard.
        common = "common.pt" if (out / "whole" / "iter_0000001" / "common.pt").exists() else "__0_0.distcp"
        trained.session.barrier()
        for name, victim in (("shard", "__0_0.distcp"), ("common", common), ("metadata", ".metadata")):
            broken = out / name
            if rank == 0:
                shutil.copytree(out / "whole", broken)
                (broken / "iter_0000001" / victim).unlink()
            trained.session.barrier()
            told[name] = error_of(checkpointer(trained, load=broken).load)
    with training(folder, f"{ADAM.replace('0.01', '0.02')} {LAYOUTS['TP2']}") as trained:
        told["schedule"] = error_of(checkpointer(trained, load=out / "whole").load)
    with training(folder, f"{ADAM} {LAYOUTS['DP2+distopt']}") as trained:
        told["distopt"] = error_of(checkpointer(trained, load=out / "whole").load)
    with training(other, f"{ADAM} {LAYOUTS['TP2']}") as trained:
        told["other model"] = error_of(checkpointer(trained, load=out / "whole").load)
    words = ADAM.replace("0.01", "0.02") + " --override-opt-param-scheduler"
    with training(folder, f"{words} {LAYOUTS['TP2']}") as trained:
        checkpointer(trained, load=out / "whole").load()
        told["overridden"] = str(trained.update().learning_rate > 0.015)
    return told


class Killed(BaseException):
    """A stand-in for a signal that no code sees."""


def lose_hf_folder(folder: Path, out: Path) -> dict[str, Any]:
    """Kill a run between its last checkpoint and the Hugging Face folder of it, and start it again twice."""
    places = f"--save {out}/saved --load {out}/saved --save-hf {out}/hf"
    words = f"{ADAM} {LAYOUTS['DP2+overlap']} {places} --save-interval 1 --train-iters 2"
    results: dict[str, Any] = {"said": []}

    def killed(*_: Any) -> None:
        raise Killed

    with training(folder, words) as trained:
        saver = build_saver(trained)
        saver.load(results["said"].append)
        trained.update()
        saver.save_if_due(1, False, RunState())
        if trained.session.rank == 0:
            # Files that an earlier try left there do not belong to this checkpoint.
            shutil.copytree(out / "hf" / "iter_0000001", out / "hf" / "iter_0000002")
        trained.update()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelWeights, "save_hf", killed)
            with pytest.raises(Killed):
                saver.save_if_due(2, True, RunState())
        results["killed"] = sorted(path.name for path in (out / "hf").iterdir())
        trained.policy.synchronize()
        results["trained"] = trained.weights.fingerprint()
        trained.session.barrier()
    with training(folder, words) as trained:
        results["versions"] = [build_saver(trained).load(results["said"].append).version for _ in range(2)]
        trained.weights.load_hf(out / "hf" / "iter_0000002")
        results["written"] = trained.weights.fingerprint()
    return results


def build_saver(trained: Training) -> Saver:
    return Saver(trained.settings, trained.session, trained.policy, "run", None, {})


def run_on_two_ranks(folder: Path, other: Path, out: Path) -> tuple[dict[str, str], dict[str, Any]]:
    return run_bad_input(folder, other, out), lose_hf_folder(folder, out / "lost")


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, str], dict[str, Any]]]:
    out = tmp_path_factory.mktemp("two-ranks")
    return run_ranks(run_on_two_ranks, 2, folder, hf_models.draw("qwen2", out / "qwen2"), out)


def test_an_hf_folder_that_a_kill_left_out_is_written_when_its_checkpoint_is_loaded(on_two_ranks: list) -> None:
    for _, result in on_two_ranks:
        assert result["killed"] == ["iter_0000001"]
        assert result["versions"] == [2, 2]
        assert result["written"] == result["trained"]
        (missing,) = (text for text in result["said"] if "is missing" in text)
        assert "hf/iter_0000002 is missing: it is written from" in missing


def test_a_checkpoint_that_cannot_be_loaded_is_an_error_that_says_what_to_do(on_two_ranks: list) -> None:
    expected = {
        "other folder": "holds checkpoints already: add --load",
        "nothing": "None",
        "missing": "holds no checkpoint",
        "step": "iter_0000007 must be a distributed checkpoint",
        "no optimizer": "holds no optimizer: write --no-load-optim to start with a new optimizer, or --finetune",
        "pretrained": "was not written by megatron_rl: write --finetune to begin at version 0",
        "weights only": "1 a-run 1 0",
        "finetune": "0 {} True",
        "own folder": "whole holds checkpoints up to iteration 1, and this run begins at iteration 0",
        "rolled back": "2 True",
        "shard": "it is incomplete, copy it again",
        "common": "it is incomplete, copy it again",
        "metadata": "it is incomplete, copy it again",
        "schedule": "another schedule than the flags give: --lr 0.02 (the checkpoint's is 0.01), counted in updates",
        "distopt": "was written without --use-distributed-optimizer: drop it, or write --no-load-optim",
        "other model": "the flags must describe the saved model",
        "overridden": "True",
    }
    for told, _ in on_two_ranks:
        for name, part in expected.items():
            assert part in told[name], f"{name}: {told[name]}"
