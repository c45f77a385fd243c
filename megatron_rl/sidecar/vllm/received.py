"""The tensors that a worker receives in one update: their record, and the checks before and after a load."""

import contextlib
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.weights.arrival import Arrival
from megatron_rl.shared.weights.fingerprint import DTYPES, compute_fingerprint, digest
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm.held import Readings

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


def wait_for_each(
    tensors: Mapping[str, torch.Tensor], arrival: Arrival, missing: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor once it is written.

    A tensor that will never be written is yielded too, and named in `missing`: vLLM cannot resume a load that failed
    half-way.
    """
    for name, tensor in tensors.items():
        if missing or not arrival.wait_for(name):
            missing.append(name)
        yield name, tensor


@contextlib.contextmanager
def arriving(
    folder: Path, tensors: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield an iterator over the tensors of a folder, each once it is written; raise NotWritten if some never are."""
    missing: list[str] = []
    with Arrival(folder, specs) as arrival:
        if not arrival.is_coming():
            raise NotWritten(f"{folder} lacks weights, and no trainer is writing them any more")
        yield wait_for_each(tensors, arrival, missing)
    if missing:
        raise NotWritten(f"the trainer ended before it had written {len(missing)} tensors: {', '.join(missing[:5])}")


def list_specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [describe_tensor(name, tensor) for name, tensor in tensors.items()]


def describe_tensor(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), _NAMES[tensor.dtype])
