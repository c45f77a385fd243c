"""The distributed optimizer's state, saved where it lies: the memory of a save, and reading Megatron's own form."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl.trainer.mcore.checkpoint import state_dict
from tests import hf_models
from tests.distributed.test_training_checkpoint import ADAM, EXTRA, remembered
from tests.distributed.training import LAYOUTS, Training, checkpointer, training
from tests.live_memory import LiveMemory
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change

DISTRIBUTED = "--use-distributed-optimizer"
EXPERTS = f"--expert-model-parallel-size 2 {DISTRIBUTED}"
SAVES = {
    "one bucket": DISTRIBUTED,
    "buckets": LAYOUTS["DP2+overlap"],
    "tensor parallel": LAYOUTS["TP2+distopt"],
    "context parallel": LAYOUTS["CP2+distopt"],
    "half precision": f"{DISTRIBUTED} --bf16",
    "weights divided": f"{DISTRIBUTED} --bf16 --ckpt-fully-parallel-save",
    "in the background": f"{DISTRIBUTED} --bf16 --async-save",
    "experts": EXPERTS,
}
# The memory that a rank may hold during a save, in units of its own state: its weights and its part of the optimizer's
# state.
PEAK = 1.3


def state_of(trained: Training) -> list[torch.Tensor]:
    """Return the weights and the optimizer's state of this rank."""
    tensors = [parameter for chunk in trained.chunks for parameter in chunk.parameters()]
    for one in trained.optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            tensors += group["params"]
        for values in one.optimizer.state.values():
            tensors += [value for value in values.values() if torch.is_tensor(value)]
    return tensors


def num_bytes(tensors: list[torch.Tensor]) -> int:
    """Count memory that is shared, as by weights in single precision and their master copies, once."""
    places = {address: tensor for tensor in tensors for address in [tensor.data_ptr()]}
    inside = {
        address
        for address in places
        if any(other.data_ptr() < address < other.data_ptr() + other.nbytes for other in places.values())
    }
    return sum(tensor.nbytes for address, tensor in places.items() if address not in inside)


def save_and_count(folders: dict[str, Path], out: Path, names: list[str]) -> dict[str, list[float]]:
    """Measure the most memory that two saves hold, in units of the rank's own state."""
    torch.distributed.init_process_group("gloo")
    peaks = {}
    for name in names:
        with training(folders["mixtral" if "expert" in SAVES[name] else "qwen3"], f"{ADAM} {SAVES[name]}") as trained:
            trained.update()
            saver = checkpointer(trained, save=out / name)
            held = state_of(trained)
            peaks[name] = []
            for version in (1, 2):
                with LiveMemory(held) as memory:
                    saver.save(version, EXTRA)
                    saver.finish()
                peaks[name].append(1 + memory.peak / num_bytes(held))
    return peaks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: hf_models.draw(name, root / name) for name in ("qwen3", "qwen2", "mixtral")}


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_saves_holds_little_beside_its_own_state(
    folders: dict[str, Path], tmp_path: Path, world_size: int
) -> None:
    names = list(SAVES) if world_size == 2 else ["buckets", "experts"]
    for rank, peaks in enumerate(run_ranks(save_and_count, world_size, folders, tmp_path, names)):
        print(f"rank {rank} of {world_size}: " + ", ".join(f"{name} {max(peaks[name]):.2f}" for name in peaks))
        assert {name: peak for name, peak in peaks.items() if max(peak) > PEAK} == {}


def crash(*_: Any, **__: Any) -> None:
    raise ValueError("a crash")


def fail_on_the_second(folder: Path, out: Path) -> str:
    with training(folder, f"{ADAM} {DISTRIBUTED}") as trained, contextlib.ExitStack() as patches:
        if trained.session.rank == 1:
            patches.enter_context(mock.patch.object(state_dict, "build_optimizer_state", crash))
        try:
            checkpointer(trained, save=out).save(1, EXTRA)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@contextlib.contextmanager
def megatrons_own_form() -> Iterator[None]:
    """Run without slices: a save gathers each bucket on every rank, and a load holds each tensor whole."""
    with mock.patch.object(state_dict, "in_slices", return_value=contextlib.nullcontext()):
        yield


def exchange(folder: Path, out: Path, layouts: list[str]) -> dict[str, Any]:
    """Save in both forms; load Megatron's own with ours, and ours with Megatron's own, in several layouts."""
    results = {}
    with training(folder, f"{ADAM} {layouts[0]}") as trained:
        for _ in range(2):
            trained.update()
        checkpointer(trained, save=out / "slices").save(2, EXTRA)
        with megatrons_own_form():
            checkpointer(trained, save=out / "whole").save(2, EXTRA)
        results["saved"] = remembered(trained)
    for layout in layouts:
        for form in ("slices", "whole"):
            with training(folder, f"{ADAM} {layout}") as trained:
                with megatrons_own_form() if form == "slices" else contextlib.nullcontext():
                    checkpointer(trained, load=out / form).load()
                results[f"{form} with {layout}"] = remembered(trained)
    return results


EXCHANGED = {
    "qwen3": [DISTRIBUTED, LAYOUTS["TP2+distopt"], f"{DISTRIBUTED} {LAYOUTS['PP2']}"],
    # Its embeddings are tied: both stages have them.
    "qwen2": [f"{DISTRIBUTED} {LAYOUTS['PP2']}", DISTRIBUTED],
    "mixtral": [EXPERTS, f"{EXPERTS} --bf16"],
}


def fail_and_exchange(folders: dict[str, Path], out: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    torch.distributed.init_process_group("gloo")
    error = fail_on_the_second(folders["qwen3"], out / "failed")
    return error, {name: exchange(folders[name], out / name, layouts) for name, layouts in EXCHANGED.items()}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path], out: Path) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    return run_ranks(fail_and_exchange, 2, folders, out)


def test_a_rank_that_cannot_describe_its_optimizer_is_named_to_the_others_which_do_not_wait_for_it(
    ranks: list[tuple[str, Any]], out: Path
) -> None:
    assert [error for error, _ in ranks] == [
        "MegatronRLError: rank 1 failed: ValueError: a crash",
        "ValueError: a crash",
    ]
    assert not (out / "failed").exists() or list((out / "failed").iterdir()) == []


@pytest.mark.parametrize("model", EXCHANGED)
def test_megatrons_own_form_is_read_and_megatron_reads_ours(ranks: list[tuple[str, Any]], model: str) -> None:
    results = dict(ranks[0][1][model])
    saved = results.pop("saved")
    assert len(results) == 2 * len(EXCHANGED[model])
    for name, found in results.items():
        for what, tensors in saved.items():
            for tensor, values in tensors.items():
                assert torch.equal(values, found[what][tensor]), f"{name}: {what} of {tensor}"
