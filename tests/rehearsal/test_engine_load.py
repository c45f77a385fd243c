"""An engine's worker takes weights on an emulated device: what moves, how, and how often the host waits."""

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron_rl.platforms.platform import MemoryHandle
from megatron_rl.shared.weights.files import write_digests
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.offer import write_offer
from megatron_rl.sidecar.vllm.in_place import Places
from megatron_rl.sidecar.vllm.parts import encode_places
from megatron_rl.sidecar.vllm.received import Maps
from megatron_rl.sidecar.vllm.worker import WorkerExtension
from tests.offers import HostSharing, Ranks
from tests.rehearsal import device
from tests.rehearsal.device import DEVICE, is_there
from tests.rehearsal.kernels import kernels_run
from tests.rehearsal.rehearsed import rehearsed
from tests.rehearsal.streams import DeviceFault, Stream, state
from tests.rehearsal.syncs import describe, log

pytestmark = pytest.mark.each_change

HIDDEN, WIDTH, VOCABULARY = 64, 96, 512
# Operations on this many numbers of the host are a pass over the weights.
_PASS = 256


class Model(torch.nn.Module):
    """A model as vLLM has it: a rank's rows of some tensors, and its columns of others, joined in parameters."""

    def __init__(self, num_layers: int, dtype: torch.dtype, rank: int, size: int) -> None:
        super().__init__()
        self.share = (rank, size)
        self.joined: dict[str, list[str]] = {"embed": ["embed"]}
        shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, HIDDEN)}
        for layer in range(num_layers):
            self.joined[f"up-{layer}"] = [f"{layer}.gate", f"{layer}.up"]
            self.joined[f"down-{layer}"] = [f"{layer}.down"]
            self.joined[f"norm-{layer}"] = [f"{layer}.norm"]
            shapes[f"up-{layer}"] = (2 * WIDTH // size, HIDDEN)
            shapes[f"down-{layer}"] = (HIDDEN, WIDTH // size)
            shapes[f"norm-{layer}"] = (HIDDEN,)
        for name, shape in shapes.items():
            made = torch.empty(shape, dtype=dtype, device=DEVICE)
            self.register_parameter(name, torch.nn.Parameter(made, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy each tensor to its place, one by one."""
        places = {tensor: name for name, tensors in self.joined.items() for tensor in tensors}
        rank, size = self.share
        loaded = set()
        for tensor, given in weights:
            name = places[tensor]
            dim = {"up": 0, "down": 1}.get(name.split("-")[0])
            part = given if dim is None else given.chunk(size, dim)[rank].contiguous()
            rows = self.get_parameter(name).data
            first = self.joined[name].index(tensor) * part.shape[0]
            rows[first : first + part.shape[0]].copy_(part)
            loaded.add(name)
        return loaded


def draw(num_layers: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, HIDDEN)}
    for layer in range(num_layers):
        shapes |= {f"{layer}.gate": (WIDTH, HIDDEN), f"{layer}.up": (WIDTH, HIDDEN)}
        shapes |= {f"{layer}.down": (HIDDEN, WIDTH), f"{layer}.norm": (HIDDEN,)}
    numbers = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=numbers).to(dtype) for name, shape in shapes.items()}


@contextlib.contextmanager
def published(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[Path, str, dict[str, list[int]]]]:
    """Write tensors as a trainer leaves them."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-test-", dir="/dev/shm"))
    try:
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "made_up"}')
        for file in folder.iterdir():
            file.chmod(0o600)
        digests = {name: digest(tensor).tolist() for name, tensor in tensors.items()}
        write_digests(folder, digests)
        specs = [TensorSpec(name, tuple(one.shape), str(one.dtype)[6:]) for name, one in tensors.items()]
        yield folder, compute_fingerprint(specs, digests), digests
    finally:
        shutil.rmtree(folder)


def make_worker(model: Model, folder: Path) -> Any:
    """Build a worker around a model that vLLM would load one tensor after the other."""
    rank, size = model.share

    worker = WorkerExtension()
    worker.megatron_rl_held.in_place_on = ("npu",)
    worker.rank = rank
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), quantization=None, dtype=model.embed.dtype),
        parallel_config=SimpleNamespace(world_size=size),
    )
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.reload_weights = lambda weights_iterator: model.load_weights(weights_iterator)
    return worker


class Pages:
    """The part of a platform that locks pages."""

    def page_lock(self, mapped: torch.Tensor) -> None:
        device.pinned[mapped.data_ptr()] = mapped.data_ptr() + mapped.nbytes

    def page_unlock(self, mapped: torch.Tensor) -> None:
        del device.pinned[mapped.data_ptr()]


@dataclasses.dataclass
class Counts:
    """Measures of a load."""

    sent: int = 0
    """The bytes that were copied to the device."""
    waiting: int = 0
    """The copies to the device for which the host waited."""
    pageable: int = 0
    """The copies to the device from pages that are not locked."""
    host_passes: list[str] = dataclasses.field(default_factory=list)
    """Operations on numbers of the host; a copy to the device that changes its dtype is one too."""
    syncs: list[Any] = dataclasses.field(default_factory=list)


class Runtime:
    """The functions of the device's module in torch that wait, each noted."""

    @staticmethod
    def install() -> None:
        torch.npu.current_stream, torch.npu.synchronize = Runtime, Runtime().synchronize

    def synchronize(self) -> None:
        # Copies that land now are the device's work.
        with _disable_current_modes():
            log.add("synchronize")
            state.wait_for_all()


class _HostPasses(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_view = any(returned.alias_info is not None for returned in function._schema.returns)
        on_host = leaves and not any(map(is_there, leaves)) and not is_view
        name = function._schema.name
        if on_host and max(leaf.numel() for leaf in leaves) >= _PASS and "to_copy" not in name and "empty" not in name:
            self._counts.host_passes.append(name)
        return function(*args, **kwargs or {})


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    counts, send = Counts(), device._send

    def note(to: Any, source: torch.Tensor, non_blocking: bool) -> None:
        counts.sent += source.nbytes
        counts.waiting += not non_blocking
        counts.pageable += not device.is_pinned(source)
        if source.dtype != to.dtype or not source.is_contiguous() or not to.is_contiguous():
            counts.host_passes.append(f"copy of {tuple(source.shape)} to the device")
        send(to, source, non_blocking)

    device._send = note
    try:
        with log.during() as counts.syncs, _HostPasses(counts):
            yield counts
    finally:
        device._send = send


def load(worker: Any, folder: Path, fingerprint: str) -> dict[str, Any]:
    return worker.megatron_rl_load(encode_places([(str(folder), os.getuid())]), fingerprint)


def take(num_layers: int, dtype: torch.dtype, share: tuple[int, int], given: torch.dtype, is_in_place: bool = True):
    """Have a worker learn its order, and then take three publishes; return the counts of the last one."""
    model = Model(num_layers, dtype, *share)
    Runtime.install()
    with published(draw(num_layers, given, 0)) as (start, *_):
        worker = make_worker(model, start)
        worker.megatron_rl_held.maps = Maps(Pages())  # type: ignore[arg-type]
        if not is_in_place:
            worker.megatron_rl_held.in_place_on = ()
        learned = worker.megatron_rl_learn_order()
        assert learned["unknown"] == []
        assert learned["obstacles"] == ([] if is_in_place else ["its device type is npu"])
        places = {name: one.data_ptr() for name, one in model.named_parameters()}
        with published(draw(num_layers, given, 1)) as one, published(draw(num_layers, given, 2)) as other:
            load(worker, *one[:2])
            load(worker, *other[:2])
            with counted() as counts:
                answer = load(worker, *one[:2])
    assert answer.get("compared") == len(places), answer
    assert places == {name: one.data_ptr() for name, one in model.named_parameters()}
    reference = Model(num_layers, dtype, *share)
    reference.load_weights(draw(num_layers, given, 1).items())
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter.cpu(), model.get_parameter(name).cpu()), name
    return counts, answer


class OnTheDevice(HostSharing):
    """Memory of the trainer's device: to open it moves nothing, which is not counted here."""

    def open(self, handle: MemoryHandle) -> torch.Tensor:
        return super().open(handle).to(DEVICE)


@rehearsed
def test_a_load_from_offered_memory_takes_nothing_from_the_host_and_few_launches_and_waits_twice_at_most() -> None:
    launched = []
    for num_layers in (2, 12):
        model = Model(num_layers, torch.bfloat16, 0, 1)
        Runtime.install()
        tensors = draw(num_layers, torch.bfloat16, 1)
        with published(draw(num_layers, torch.bfloat16, 0)) as (start, *_), published(tensors) as (folder, name, _):
            worker = make_worker(model, start)
            worker.megatron_rl_held.find_sharing = OnTheDevice
            worker.megatron_rl_learn_order()
            (folder / "model.safetensors").unlink()
            ranks = Ranks(tensors, frozenset(f"{layer}.down" for layer in range(num_layers)))
            write_offer(folder, ranks.offer(name))
            load(worker, folder, name)
            with counted() as counts:
                answer = load(worker, folder, name)
            with kernels_run() as names:
                worker.megatron_rl_held.memory = None
                load(worker, folder, name)
            launched.append(names.count("move"))
        assert (answer["through"], answer["compared"]) == ("ipc", answer["parameters"]), answer
        assert (counts.sent, counts.host_passes) == (0, [])
        assert len(counts.syncs) <= 2, describe(counts.syncs)
        assert 1 <= launched[0] == launched[-1] <= 2
        for parameter, given in ((model.embed, tensors["embed"]), (model.get_parameter("down-1"), tensors["1.down"])):
            assert torch.equal(parameter.cpu(), given)
    assert not state.faults


def num_bytes(num_layers: int, dtype: torch.dtype) -> int:
    return sum(tensor.nbytes for tensor in draw(num_layers, dtype, 0).values())


@rehearsed
def test_a_load_in_place_moves_each_byte_once_and_waits_twice_at_most_however_many_tensors_there_are() -> None:
    for num_layers in (2, 12):
        counts, answer = take(num_layers, torch.bfloat16, (0, 1), torch.bfloat16)
        assert (answer["obstacles"], answer["shares"]) == ([], {})
        assert counts.sent <= 1.05 * num_bytes(num_layers, torch.bfloat16)
        assert (counts.waiting, counts.pageable, counts.host_passes) == (0, 0, [])
        assert len(counts.syncs) <= 2, describe(counts.syncs)
    assert not state.faults


@rehearsed
def test_parameters_are_digested_in_launches_that_do_not_grow_with_their_number() -> None:
    launched = []
    for num_layers in (2, 12):
        with kernels_run() as names:
            counts, _ = take(num_layers, torch.bfloat16, (0, 1), torch.bfloat16)
        # Three loads of one engine.
        assert names.count("digest") == len(names)
        assert len(names) % 3 == 0
        launched.append(len(names) // 3)
        assert len(counts.syncs) <= 2, describe(counts.syncs)
        assert (counts.waiting, counts.pageable, counts.host_passes) == (0, 0, [])
    assert launched[0] == launched[1] <= 4
    assert not state.faults


@rehearsed
def test_the_hosts_memory_may_change_once_the_copies_were_waited_for() -> None:
    Runtime.install()
    model = Model(2, torch.bfloat16, 0, 1)
    tensors = draw(2, torch.bfloat16, 0)
    with published(tensors) as (folder, *_):
        worker = make_worker(model, folder)
        worker.megatron_rl_learn_order()
    places = Places(model, worker.megatron_rl_held.order)
    first, wanted = device.pin(tensors["embed"].clone()), device.pin(tensors["embed"].clone())
    places.put("embed", first)
    places.wait()
    first.zero_()
    assert torch.equal(model.embed.cpu(), wanted)
    # Nothing else keeps it from changing too early.
    places.put("embed", wanted)
    wanted.zero_()
    with pytest.raises(DeviceFault, match="changed while it was still being copied"):
        model.embed.cpu()


@rehearsed
def test_columns_and_narrower_numbers_are_gathered_and_converted_on_the_device() -> None:
    for dtype, given in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)):
        for rank in range(2):
            counts, _ = take(3, dtype, (rank, 2), given)
            assert (counts.waiting, counts.pageable, counts.host_passes) == (0, 0, [])
            assert len(counts.syncs) <= 2, describe(counts.syncs)
            # A worker gets its rows, but all columns.
            assert counts.sent < num_bytes(3, given)
    assert not state.faults


@rehearsed
def test_without_the_copy_in_place_the_same_load_waits_for_each_tensor_and_converts_on_the_host() -> None:
    counts, _ = take(3, torch.float32, (0, 1), torch.bfloat16, is_in_place=False)
    assert counts.waiting >= 13
    assert len(counts.host_passes) >= 13


@rehearsed
def test_a_stream_of_tensors_is_digested_with_one_read_however_many_there_are() -> None:
    Runtime.install()
    streams = (Stream(), Stream())
    for num_layers in (2, 12):
        tensors = draw(num_layers, torch.bfloat16, 1)
        there = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
        model = Model(num_layers, torch.bfloat16, 0, 1)
        with published(tensors) as (folder, fingerprint, _):
            worker = make_worker(model, folder)
            # The factors of digests are copied to the device once a process.
            for tensor in there.values():
                digest(tensor)
            state.wait_for_all()
            assert worker.megatron_rl_begin_stream() == {}
            with log.during() as syncs:
                # vLLM's transfer engine takes turns between streams, and waits for them at its end.
                for name, tensor in there.items():
                    with state.on(streams[name[0] in "13579"]):
                        model.load_weights([(name, tensor)])
            assert syncs == [], describe(syncs)
            for stream in streams:
                stream.synchronize()
            with log.during() as syncs:
                answer = worker.megatron_rl_end_stream(fingerprint)
        assert answer["fingerprint"] == fingerprint, answer
        assert len(syncs) <= 2, describe(syncs)
    assert not state.faults
