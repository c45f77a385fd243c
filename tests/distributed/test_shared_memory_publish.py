"""A publish through files from several hosts: a host is a folder that only its ranks see."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import PlatformError
from megatron_rl.mcore.publish.shared_memory import SharedMemoryPublisher
from megatron_rl.protocol.wire import EngineKind, Weights
from megatron_rl.weights import files
from megatron_rl.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.weights.mapping import TensorSpec
from tests import hf_models
from tests.distributed.layouts import CASES, build, start_session
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change


class Sidecar:
    """Reads what it is told of, as an engine on rank 0's host does."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []

    def publish(self, weights: Weights, deadline_seconds: float) -> EngineKind:
        self.names.append(set(load_file(Path(weights.location) / "model.safetensors")))
        return EngineKind()

    def probed(self, answer: Any) -> None:
        raise AssertionError("no probe was given")


def publish(case: str, model: Path, hosts: list[Path], num_publishes: int) -> tuple[list[str], list[set[str]], str]:
    """The fingerprints, what the sidecar read, and what was raised at the start."""
    sidecar = Sidecar()
    with start_session(CASES[case]) as session:
        weights = build(session, CASES[case], model).weights
        receiver = sidecar if session.rank == 0 else None
        try:
            publisher = SharedMemoryPublisher(weights, session, receiver, "run", hosts[session.rank] / "shared" / "run")
        except PlatformError as error:
            return [], [], str(error)
        fingerprints = [publisher.publish(version) for version in range(num_publishes)]
        publisher.close()
    return fingerprints, sidecar.names, ""


def hosts_of(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).mkdir(exist_ok=True)
    return [folder / name for name in names]


def test_a_host_that_holds_copies_of_the_weights_alone_needs_no_folder(tmp_path: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    hosts = hosts_of(tmp_path, "first", "second")
    # The third publish overwrites the files of the first.
    (first, names, _), (second, *_) = run_ranks(publish, 2, "DP2+distopt", model, hosts, 3)
    assert first == second
    assert len(set(first)) == 1
    assert names == [set(load_file(model / "model.safetensors"))] * 3
    assert list(hosts[1].iterdir()) == []


def test_hosts_that_hold_parts_of_the_weights_end_the_run_at_the_start_with_a_remedy(tmp_path: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    hosts = hosts_of(tmp_path, "first", "second")
    # The other host may hold what an earlier run left there.
    (hosts[1] / "shared" / "run").mkdir(parents=True)
    for _, _, message in run_ranks(publish, 2, "TP2", model, hosts, 1):
        assert message.startswith("rank 1 on ")
        assert f"does not find {hosts[1]}/shared/run" in message
        assert "--rollout-transport nccl or hccl" in message
    # One host, and nothing of the search stays.
    (_, names, message), _ = run_ranks(publish, 2, "TP2", model, hosts_of(tmp_path, "first", "first"), 1)
    assert (names, message) == ([set(load_file(model / "model.safetensors"))], "")


class Digester:
    """Holds what it reads against what it is told."""

    def publish(self, weights: Weights, deadline_seconds: float) -> EngineKind:
        read = load_file(Path(weights.location) / "model.safetensors")
        specs = [TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in read.items()]
        assert compute_fingerprint(specs, {name: digest(tensor).tolist() for name, tensor in read.items()}) == (
            weights.fingerprint
        )
        return EngineKind()

    def probed(self, answer: Any) -> None:
        raise AssertionError("no probe was given")


def publish_changing(model: Path, folder: Path) -> tuple[list[int], list[str], list[str]]:
    """How many files were mapped at each publish, and which of the run's were so before and after the end."""
    counts, sees = [], re.compile(rf"{folder}/run/.*")
    with start_session(CASES["TP2"]) as session, mock.patch.object(files, "_map", wraps=files._map) as mapped:
        weights = build(session, CASES["TP2"], model).weights
        receiver = Digester() if session.rank == 0 else None
        publisher = SharedMemoryPublisher(weights, session, receiver, "run", folder / "run")
        for version in range(7):
            mapped.reset_mock()
            publisher.publish(version)
            counts.append(mapped.call_count)
            with torch.no_grad():
                for shard in weights.shards:
                    shard.parameter.mul_(1.5)
        before = sees.findall(Path("/proc/self/maps").read_text())
        publisher.close()
        return counts, before, sees.findall(Path("/proc/self/maps").read_text())


def test_files_that_are_written_again_are_mapped_once_and_let_go_at_the_end(tmp_path: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    for counts, before, after in run_ranks(publish_changing, 2, model, tmp_path / "shared"):
        # Two folders take turns, new at first, and are mapped when they are first written again.
        assert counts == [1, 1, 1, 1, 0, 0, 0]
        assert len(before) == 2
        assert after == []
