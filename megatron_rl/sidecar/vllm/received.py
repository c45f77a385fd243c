"""The weights that a worker receives in one update: mapped files, their checks, and a record of the load.

The trainer writes to two folders in turn. After a new map a process must find the file page by page, which takes longer
than reading it. So the maps of both folders are kept for as long as the files exist. Where a device copies from them,
their pages stay locked as long: locking takes about as long as a copy from pages that are not.
"""

import contextlib
import dataclasses
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.platforms import Platform
from megatron_rl.shared.weights.families import find_left_out
from megatron_rl.shared.weights.files import STORED_DTYPES, Checkpoint, map_bytes
from megatron_rl.shared.weights.fingerprint import DTYPES, compute_fingerprint, digest
from megatron_rl.shared.weights.folders import Arrival, is_in_memory
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.stored_forms import BLOCKS, split_stored
from megatron_rl.sidecar.vllm.derived import Sources
from megatron_rl.sidecar.vllm.held import TIED, Order, Readings, digesting

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Refusal(MegatronRLError):
    """A request that cannot be served; it changed nothing."""


class NotWritten(Refusal):
    """The end of the trainer before it had written all weights."""


class Record:
    """A record of the tensors that were loaded into a model in one update."""

    def __init__(self, parameters: set[str]) -> None:
        self.parameters = parameters
        self.loaded: set[str] = set()
        self.specs: list[TensorSpec] = []
        self.dtypes: dict[str, str] = {}
        self._digests: dict[str, torch.Tensor] = {}
        self.readings: Readings[torch.Tensor | None] | None = None
        self.is_in_place = False
        self.sources: Mapping[str, torch.Tensor] = {}
        """Copies of the tensors that derived parameters must follow from."""

    def noted(
        self, weights: Iterable[tuple[str, torch.Tensor]], with_digests: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.note(describe_tensor(name, tensor))
            if with_digests:
                self._digests[name] = digest(tensor)
            yield name, tensor

    def note(self, spec: TensorSpec) -> None:
        self.specs.append(spec)
        self.dtypes[spec.name] = spec.dtype

    def read_digests(self) -> dict[str, list[int]]:
        """Read the digests of all tensors that came, in one copy from the device."""
        if not self._digests:
            return {}
        lines = list(self._digests.values())
        if lines[0].device.type != "cpu":
            # vLLM's transfer engine takes turns between streams of its own.
            torch.get_device_module(lines[0].device).synchronize()
        return dict(zip(self._digests, torch.stack(lines).tolist(), strict=True))

    def check_all_loaded(self) -> None:
        # vLLM only logs this.
        if missing := sorted(self.parameters - self.loaded):
            raise Refusal(f"{len(missing)} parameters were not loaded: {', '.join(missing[:5])}")


@contextlib.contextmanager
def recording(
    model: Any, order: Order | None, parameters: Iterable[str], with_digests: bool = False
) -> Iterator[Record]:
    """Record the tensors that the model's `load_weights` gets, and the names that it reports as loaded.

    `parameters` are those that tensors are loaded into.
    """
    sources = Sources(model)
    # vLLM reports a layer that adapters wrap by the name that it has without them.
    record = Record({_name_plainly(name) for name in parameters} - sources.derived)
    record.sources = sources.kept
    original = model.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        noted = record.noted(weights, with_digests)
        loaded = original(sources.keep(noted), *args, **kwargs)
        record.loaded |= {_name_plainly(name) for name in loaded or ()}
        return loaded

    model.load_weights = load_weights
    try:
        if order is None:
            yield record
        else:
            with digesting(model, order, record.dtypes) as record.readings:
                yield record
    finally:
        del model.load_weights


def _name_plainly(parameter: str) -> str:
    return parameter.replace(".base_layer.", ".")


def must_be_those_of(
    received: Mapping[str, torch.Tensor], digests: Mapping[str, list[int]], names: Iterable[str]
) -> None:
    """Raise a Refusal unless these tensors, as they came, match the digests that came with them."""
    if wrong := [name for name in names if digest(received[name]).tolist() != digests[name]]:
        raise Refusal(f"{len(wrong)} tensors do not match the digests sent with them: {', '.join(wrong[:5])}")


def must_be_announced(
    specs: Sequence[TensorSpec], digests: Mapping[str, list[int]], expected: str, base: str = ""
) -> None:
    """Raise a Refusal unless every tensor came with a digest, and together they have the announced fingerprint.

    That of adapters covers their base's.
    """
    if nameless := sorted({spec.name for spec in specs} - digests.keys()):
        raise Refusal(f"{len(nameless)} tensors came without a digest: {', '.join(nameless[:5])}")
    found = compute_fingerprint(specs, digests, base)
    if found != expected:
        raise Refusal(f"the weights received have fingerprint {found}, and {expected} was announced")


def must_be_complete(specs: Sequence[TensorSpec], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a Refusal unless tensors have the wanted names and shapes, if any are known."""
    given = {spec.name: spec.shape for spec in specs}
    if not wanted:
        return
    missing = sorted(wanted.keys() - given.keys() - {TIED})
    unknown = sorted(given.keys() - wanted.keys() - {TIED})
    other = sorted(name for name in wanted.keys() & given.keys() if wanted[name] != given[name])
    for names, what in ((missing, "missing"), (unknown, "not in this model"), (other, "of another shape")):
        if names:
            raise Refusal(f"{len(names)} tensors are {what}: {', '.join(names[:5])}")


def must_be_private(folder: Path, user: int) -> None:
    for path in (folder, *folder.iterdir()) if folder.is_dir() else ():
        try:
            found = path.lstat()
        except FileNotFoundError:
            # An offer may be withdrawn at any time.
            continue
        if found.st_uid != user or found.st_mode & 0o077 or stat.S_ISLNK(found.st_mode):
            raise Refusal(
                f"{path} must be private to user {user} (owner {found.st_uid}, mode {stat.filemode(found.st_mode)})"
            )


@contextlib.contextmanager
def arriving(
    folder: Path, tensors: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield an iterator over the tensors of a folder, each once it is written; raise NotWritten if some never are.

    The iterator has these too: vLLM cannot resume a load that failed half-way.
    """
    missing: list[str] = []

    def wait_for_each() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            if missing or not arrival.wait_for(name):
                missing.append(name)
            yield name, tensor

    with Arrival(folder, specs) as arrival:
        if not arrival.is_coming():
            raise NotWritten(f"{folder} lacks weights, and no trainer is writing them any more")
        yield wait_for_each()
    if missing:
        raise NotWritten(f"the trainer ended before it had written {len(missing)} tensors: {', '.join(missing[:5])}")


def list_specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [describe_tensor(name, tensor) for name, tensor in tensors.items()]


def describe_tensor(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), _NAMES[tensor.dtype])


_log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
Identity = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Folder:
    """The maps of a folder's files, and an open descriptor of each file.

    While the descriptor is open, no other file gets the same inode number.
    """

    files: tuple[Identity, ...]
    descriptors: tuple[int, ...]
    tensors: Tensors
    unlock: Callable[[], None]
    """A function that unlocks the pages which are locked."""

    def exists(self) -> bool:
        return all(os.fstat(descriptor).st_nlink for descriptor in self.descriptors)

    def close(self) -> None:
        self.unlock()
        self.tensors.clear()
        for descriptor in self.descriptors:
            os.close(descriptor)


class Maps:
    """The maps of the last two folders that were loaded from this host's memory."""

    def __init__(self, platform: Platform | None = None) -> None:
        """Keep maps; with the platform of a device that copies from them, lock their pages."""
        self._platform = platform
        self._is_refused = False
        self._folders: list[_Folder] = []

    def find(self, folder: Path) -> Tensors:
        """Return the tensors in a folder's files, as `map_file_tensors` does, but map no file a second time."""
        paths = _list_files(folder)
        self._keep([known for known in self._folders if known.exists()])
        files = tuple(_identify(path.stat()) for path in paths)
        for known in self._folders:
            if known.files == files:
                return known.tensors
        tensors = map_file_tensors(folder)
        if is_in_memory(folder):
            descriptors = tuple(os.open(path, os.O_RDONLY) for path in paths)
            identities = tuple(_identify(os.fstat(one)) for one in descriptors)
            new = _Folder(identities, descriptors, tensors, self._lock(tensors))
            self._keep([*self._folders[-1:], new])
        return tensors

    def _lock(self, tensors: Tensors) -> Callable[[], None]:
        """Lock the pages of all files; return a function that unlocks them."""
        platform = self._platform
        if platform is None:
            return lambda: None
        storages = {storage.data_ptr(): storage for storage in (one.untyped_storage() for one in tensors.values())}
        files = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]
        refusals = [platform.page_lock(file) for file in files]
        locked = [file for file, refusal in zip(files, refusals, strict=True) if refusal is None]
        if (refused := next(filter(None, refusals), None)) and not self._is_refused:
            self._is_refused = True
            _log.warning(
                "weights are copied from pages that are not locked, which takes longer: %s (see the limit of locked "
                "memory, `ulimit -l`)", refused,
            )  # fmt: skip

        def unlock() -> None:
            for file in locked:
                platform.page_unlock(file)
            locked.clear()

        return unlock

    def _keep(self, folders: list[_Folder]) -> None:
        for known in self._folders:
            if known not in folders:
                known.close()
        self._folders = folders


def map_file_tensors(folder: Path) -> Tensors:
    """Return the tensors in a folder's files, in the files' order, without copying them."""
    tensors: Tensors = {}
    for path in _list_files(folder):
        tensors |= _map(path)
    return tensors


def _list_files(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not paths:
        raise InputError(f"{folder} must hold a safetensors file")
    return paths


def _identify(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size


def _map(path: Path) -> Tensors:
    """Map a file's tensors."""
    tensors: Tensors = {}
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file, path.open("rb") as start:
            end = 8 + int.from_bytes(start.read(8), "little")
            whole = map_bytes(path, path.stat().st_size)
            # In this format, tensors follow each other without gaps.
            for name in file.offset_keys():
                piece = file.get_slice(name)
                dtype, shape = DTYPES[STORED_DTYPES[piece.get_dtype()]], piece.get_shape()
                begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
                tensors[name] = whole[begin:end].view(dtype).view(shape)
    except Exception as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return tensors


_REACH_SECONDS = 20.0
_PAUSE_SECONDS = 0.1


def must_be_reached(host: str, port: int, seconds: float = _REACH_SECONDS) -> None:
    """Raise a Refusal unless this host connects to a stream's sender, which may be about to listen, within `seconds`.

    A worker that cannot connect would leave all others waiting in the group until the deadline, without a name.
    The sender's store takes no notice of a connection that says nothing.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host, port), max(_PAUSE_SECONDS, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise Refusal(
                    f"host {socket.gethostname()} does not reach rank 0 of the trainer at {host}:{port} within "
                    f"{seconds:g} s ({error}): open all ports between the hosts of ranks and of engines, or write "
                    "--rollout-transport shm"
                ) from None
        time.sleep(_PAUSE_SECONDS)


def read_started_from(folder: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of the checkpoint that an engine started from; return none if it is in another format.

    Tensors that are not trained are left out, because none is published: they stay as vLLM loaded them, if it did.
    Experts that are stored together have their own tensors, as a trainer publishes them.
    """
    if not any(folder.glob("*.safetensors")):
        return {}
    with Checkpoint(folder) as checkpoint:
        names = checkpoint.names()
        if any(name.endswith(BLOCKS) for name in names):
            raise InputError(
                f"{folder} holds experts in MXFP4, and engines get weights in the dtype that is trained: "
                "start them from a folder of the model in bfloat16, as --stage sft saves one with --save-hf"
            )
        left_out = find_left_out(folder, names)
        stored = ((name, checkpoint.tensor(name)) for name in names if name not in left_out)
        return dict(part for one in stored for part in split_stored(*one))
