"""A publish in which every rank sends its own parts: what receivers get, and the errors when one side fails.

Stand-ins have the places of the sidecar and of the groups that devices would be in.
"""

import datetime
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.shared.protocol.client import RolloutError, WorkersChanged
from megatron_rl.shared.protocol.stage_group import StageGroup
from megatron_rl.shared.protocol.wire import PublishAnswer, Weights
from megatron_rl.shared.weights.fingerprint import DTYPES, compute_fingerprint, digest
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.trainer.mcore.publish.stages import StageModel, StagePublisher
from tests import hf_models
from tests.distributed.layouts import CASES, build, start_session
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change

# Experts on other ranks, and a vocabulary of 131 that is padded, are gathered.
LAYOUTS = {2: {"qwen3": ("TP2", "DP2+distopt"), "qwen3_moe": ("EP2", "TP2+SP,EP2,ETP1")}, 4: {"qwen3": ("TP2xPP2",)}}


class Sidecar:
    """Two engines of one worker, of which a third one starts after they were counted."""

    def find_engine_hosts(self) -> list[str]:
        return ["127.0.0.1"]

    def __init__(self, error: Exception | None = None):
        self.error = error
        self.told: list[Weights] = []
        self.is_over = threading.Event()

    def count_engines(self) -> tuple[int, int]:
        return (3, 3) if self.told else (2, 2)

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        self.told.append(weights)
        if weights.world_size != weights.num_senders + 3:
            raise WorkersChanged("three engines")
        if self.error is not None:
            raise self.error
        self.is_over.wait(30)
        return PublishAnswer()


class Group:
    """A group that keeps the parts instead of sending them."""

    def __init__(self, group: StageGroup, model: StageModel, kept: dict[str, torch.Tensor], sidecar: Sidecar | None):
        if group.num_engines != 3:
            # No worker joins a group that was opened for the wrong number.
            threading.Event().wait()
        self.rank, self._model, self._kept, self._sidecar = group.rank, model, kept, sidecar

    def send_weights(self) -> None:
        self._kept.update({name: part.clone() for name, part in self._model})

    def shutdown(self) -> None: ...


def publish(session: Any, weights: Any, dtype: str | None) -> dict[str, Any]:
    """Publish version 7 to a stand-in; return the message, and on rank 0 the parts of all ranks."""
    sidecar = Sidecar() if session.rank == 0 else None
    kept: dict[str, torch.Tensor] = {}
    publisher = StagePublisher(
        weights, session, sidecar, "run", lambda group, model: Group(group, model, kept, sidecar), dtype
    )
    if sidecar is not None:
        sidecar.is_over.set()
    fingerprint = publisher.publish(7)
    return {"fingerprint": fingerprint, "told": sidecar and sidecar.told, "parts": session.gather(kept)}


def publishes(world_size: int, folders: dict[str, Path]) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    torch.distributed.init_process_group("gloo")
    results = {}
    for model, layouts in LAYOUTS[world_size].items():
        for layout in layouts:
            with start_session(CASES[layout]) as session:
                built = build(session, CASES[layout], folders[model])
                for dtype in (None, "bfloat16"):
                    results[layout, model, dtype] = publish(session, built.weights, dtype)
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: hf_models.draw(name, root / name) for name in ("qwen3", "qwen3_moe")}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_the_parts_of_all_ranks_are_the_announced_tensors(world_size, folders):
    for (layout, model, dtype), found in run_ranks(publishes, world_size, world_size, folders)[0].items():
        given = load_file(folders[model] / "model.safetensors")
        assert [message.world_size - message.num_senders for message in found["told"]] == [2, 3]
        message = found["told"][-1]
        sizes = CASES[layout].sizes
        assert (message.version, message.transport, message.num_senders) == (7, "nccl_m2n", sizes.tensor)
        assert len({stage.location for stage in message.stages}) == len(message.stages) == sizes.pipeline
        assert sorted(name for name, _, _ in message.manifest) == sorted(given), (layout, model)
        specs, digests = [], {}
        manifest, lanes = iter(message.manifest), iter(message.digests)
        for stage_number, stage in enumerate(message.stages):
            # The senders of a stage are the first of its ranks.
            first = stage_number * world_size // sizes.pipeline
            senders = found["parts"][first : first + sizes.tensor]
            for dim in stage.dims:
                name, named_dtype, shape = next(manifest)
                parts = [own[name] for own in senders]
                assert all(part.dtype == DTYPES[named_dtype] for part in parts)
                tensors = parts if dim is None else [torch.cat(parts, dim)]
                assert dim is None or len({part.shape for part in parts}) == 1
                for tensor in tensors:
                    assert list(tensor.shape) == shape
                    assert torch.equal(tensor, given[name].to(tensor.dtype)), (layout, model, dtype, name)
                assert digest(tensors[0]).tolist() == next(lanes)
                specs.append(TensorSpec(name, tuple(shape), named_dtype))
                digests[name] = digest(tensors[0]).tolist()
        assert compute_fingerprint(specs, digests) == found["fingerprint"]
        # Ranks of other replicas send nothing.
        num_sending = sum(bool(own) for own in found["parts"])
        assert num_sending == sizes.tensor * sizes.pipeline


def faults(folder: Path) -> dict[str, str]:
    """Return the error of this rank if one rank or the sidecar fails, or if no engine answers."""
    torch.distributed.init_process_group("gloo")
    said = {}
    with start_session(CASES["TP2"]) as session:
        weights = build(session, CASES["TP2"], folder).weights

        def attempt(name: str, make: Any, sidecar: Sidecar, seconds: float = 20) -> None:
            deadline, receiver = datetime.timedelta(seconds=seconds), sidecar if session.rank == 0 else None
            publisher = StagePublisher(weights, session, receiver, "run", make, None, deadline)
            with pytest.raises(Exception) as error:  # noqa: PT011 # each message is compared
                publisher.publish(3)
            said[name] = f"{error.type.__name__}: {error.value}"

        class Sender(Group):
            """A sender of which the second rank fails, or which waits for ever."""

            def send_weights(self) -> None:
                if self.rank == 1:
                    raise OSError("the wire broke")
                threading.Event().wait()

        def never(*_: object) -> Group:
            threading.Event().wait()
            raise AssertionError

        def fails(group: StageGroup, model: StageModel) -> Group:
            return never() if group.num_engines != 3 or group.rank == 0 else 1 / 0

        attempt("rank at opening", fails, Sidecar())
        attempt("rank at sending", lambda group, model: Sender(group, model, {}, None), Sidecar())
        attempt("sidecar", never, Sidecar(RolloutError("engine e1 is gone")))
        attempt("silence", never, Sidecar(), 2)
    return said


def test_a_failure_on_one_rank_or_of_the_sidecar_is_raised_on_all_within_the_deadline(folders):
    first, second = run_ranks(faults, 2, folders["qwen3"])
    assert "division by zero" in first["rank at opening"]
    assert "rank 1 failed: ZeroDivisionError" in first["rank at opening"]
    assert second["rank at opening"] == "ZeroDivisionError: division by zero"
    assert "rank 1 failed: OSError: the wire broke" in first["rank at sending"]
    assert second["rank at sending"] == "OSError: the wire broke"
    assert first["sidecar"] == "RolloutError: engine e1 is gone"
    assert second["sidecar"] == "RolloutError: engine e1 is gone (on rank 0)"
    for said in (first, second):
        assert "version 3 was not published: after 2 s the group of stage 0 was not complete" in said["silence"]
