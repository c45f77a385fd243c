"""Safetensors files: those of a Hugging Face folder, memory-mapped, and those that many processes write together.

One process lays the files out (`create`), every process fills its slices (`Writer.put`), and when all are done one
process renames the folder (`put_in_place`). Until then the folder has another name, so that no reader finds half a
file. Only readers that follow the writers (`folders.py`) learn the name before.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as MappingABC
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families.values import SCALED_BLOCK
from megatron_rl.shared.weights.fingerprint import DTYPES, compute_fingerprint, digest
from megatron_rl.shared.weights.folders import DIGESTS_FILE
from megatron_rl.shared.weights.folders import create as create
from megatron_rl.shared.weights.folders import put_in_place as put_in_place
from megatron_rl.shared.weights.mapping import HEAD, Mapping, TensorSpec
from megatron_rl.shared.weights.stored_forms import (
    BLOCKS,
    SCALE_SUFFIX,
    SCALED_CODE,
    SCALED_DTYPE,
    SCALES,
    StackedPlace,
    describe_mxfp4,
    find_place,
    shape_factors,
    stack_specs,
    unpack_scaled,
)

_CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# A file takes one write at a time: with several files, ranks that begin at different ones do not wait for each other.
_MAX_FILE_BYTES = 10**9
# Contiguous slices below this size are copied through the mapping; the larger ones are cheaper to write.
_MIN_WRITE_BYTES = 1 << 16
_WRITE_BYTES = 1 << 24


class FilePlan:
    """The file and the first byte of each tensor; the same on every process."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        metadata: dict[str, str] | None = None,
        stacks_experts: bool = False,
        file: str | None = None,
    ):
        """Lay out tensors with these specs; with `stacks_experts`, as files of such families store them.

        All of them go into `file`, if it is given.
        """
        self.specs = {spec.name: spec for spec in specs}
        stored = stack_specs(specs) if stacks_experts else specs
        self.stored = {spec.name: spec for spec in stored}
        self.stacks_experts = stacks_experts
        groups = (split_specs(stored, _MAX_FILE_BYTES) if file is None else [list(stored)]) or [[]]
        names = [file or "model.safetensors"]
        if len(groups) > 1:
            names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
        self.headers: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self.offsets: dict[str, tuple[str, int]] = {}
        for file, group in zip(names, groups, strict=True):
            header, starts, size = _header(group, {"format": "pt", **(metadata or {})})
            self.headers[file], self.sizes[file] = header, size
            self.offsets |= {name: (file, start) for name, start in starts.items()}

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all files together."""
        return sum(self.sizes.values())

    def index(self) -> dict[str, Any] | None:
        """Return the index that several files need; None for one file."""
        if len(self.sizes) == 1:
            return None
        data_bytes = self.num_bytes - sum(len(header) for header in self.headers.values())
        weight_map = {name: file for name, (file, _) in self.offsets.items()}
        return {"metadata": {"total_size": data_bytes}, "weight_map": weight_map}


def write_digests(folder: Path, digests: MappingABC[str, Sequence[int]]) -> None:
    """Write the tensors' digests beside them, for a program that loads the tensors and checks what it then holds."""
    path = folder / DIGESTS_FILE
    path.touch(mode=0o600)
    path.write_text(json.dumps(digests))


def read_digests(folder: Path) -> dict[str, list[int]]:
    """Read the digests beside a folder's tensors."""
    try:
        return json.loads((folder / DIGESTS_FILE).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / DIGESTS_FILE} cannot be read: {error}") from None


class Writer(contextlib.AbstractContextManager["Writer"]):
    """One process's access to the files that `create` laid out."""

    def __init__(self, folder: Path, plan: FilePlan):
        self._plan = plan
        self._descriptors = {file: os.open(folder / file, os.O_RDWR) for file in plan.sizes}
        self._mapped = {file: map_bytes(folder / file, size) for file, size in plan.sizes.items()}

    def __exit__(self, *_: object) -> None:
        self._mapped.clear()
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def put(self, name: str, first_row: int, first_column: int, block: torch.Tensor) -> None:
        """Write a block of a tensor, in the tensor's dtype, at (first_row, first_column)."""
        block = block.cpu()
        if self._plan.stacks_experts and (place := find_place(name)) is not None:
            self._put_expert(place, first_row, first_column, block)
            return
        spec = self._plan.specs[name]
        file, offset = self._plan.offsets[name]
        num_columns = math.prod(spec.shape[1:])
        block_RC = block.reshape(block.shape[0], -1)
        is_whole_rows = block_RC.shape[1] == num_columns and block_RC.is_contiguous()
        if is_whole_rows and block_RC.nbytes >= _MIN_WRITE_BYTES:
            row_bytes = num_columns * block.element_size()
            self._write(self._descriptors[file], offset + first_row * row_bytes, block_RC)
            return
        whole = self._mapped[file][offset : offset + spec.num_elements * block.element_size()]
        whole_RC = whole.view(block.dtype).view(-1, num_columns)
        num_rows = block_RC.shape[0]
        whole_RC[first_row : first_row + num_rows, first_column : first_column + block_RC.shape[1]].copy_(block_RC)

    def put_whole(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write whole tensors, in their own dtypes; those that follow each other in a file are written in one pass."""
        if self._plan.stacks_experts:
            for name, tensor in tensors:
                self.put(name, 0, 0, tensor)
            return
        runs: list[list[torch.Tensor]] = []
        begins: list[tuple[str, int]] = []
        end = ("", 0)
        for (file, offset), tensor in sorted(
            ((self._plan.offsets[name], tensor) for name, tensor in tensors), key=lambda placed: placed[0]
        ):
            if (file, offset) != end or tensor.dtype != runs[-1][0].dtype:
                runs.append([])
                begins.append((file, offset))
            runs[-1].append(tensor.detach().reshape(-1))
            end = (file, offset + tensor.nbytes)
        for (file, offset), run in zip(begins, runs, strict=True):
            self._write(self._descriptors[file], offset, torch.cat(run).cpu())

    def _put_expert(self, place: StackedPlace, first_row: int, first_column: int, block: torch.Tensor) -> None:
        spec = self._plan.stored[place.stored]
        file, offset = self._plan.offsets[place.stored]
        whole = self._mapped[file][offset : offset + spec.num_elements * block.element_size()]
        own = place.view(whole.view(block.dtype).view(spec.shape)).narrow(0, first_row, block.shape[0])
        (own if place.is_bias else own.narrow(1, first_column, block.shape[1])).copy_(block)

    @staticmethod
    def _write(descriptor: int, offset: int, value: torch.Tensor) -> None:
        data = memoryview(value.detach().view(torch.uint8).reshape(-1).numpy())  # type: ignore[arg-type]
        while data:
            written = os.pwrite(descriptor, data[:_WRITE_BYTES], offset)
            data, offset = data[written:], offset + written


def map_bytes(path: Path, size: int) -> torch.Tensor:
    """Map the first `size` bytes of a file; all processes that map it see each other's writes."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def split_specs(specs: Iterable[TensorSpec], most_bytes: int, by_dtype: bool = False) -> list[list[TensorSpec]]:
    """Divide tensors, in their order, into groups of at most `most_bytes`, or of one larger tensor.

    With `by_dtype`, all tensors of a group have the same dtype.
    """
    groups: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        num_bytes = spec.num_elements * DTYPES[spec.dtype].itemsize
        is_full = size + num_bytes > most_bytes
        if not groups or is_full or (by_dtype and spec.dtype != groups[-1][-1].dtype):
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += num_bytes
    return groups


def _header(specs: Iterable[TensorSpec], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Return the header's bytes, the absolute offset of each tensor, and the size of the file."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for spec in specs:
        end = position + spec.num_elements * DTYPES[spec.dtype].itemsize
        entries[spec.name] = {
            "dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [position, end]
        }  # fmt: skip
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The format wants data to start at a multiple of 8; 64 lets tensors of whole cache lines start on a cache line.
    text += b" " * (-(len(text) + 8) % 64)
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items() if name != "__metadata__"}
    return header, starts, len(header) + position


STORED_DTYPES = {code: name for name, code in _CODES.items()}
"""The names of the dtypes that files may hold, by the format's codes."""
# Tensors of old checkpoints that models do not read, because they follow from config.json.
_DERIVED = (".rotary_emb.inv_freq", ".self_attn.masked_bias")
_NAMED_IN_A_MESSAGE = 3
# A parameter of queries, keys and values reads small pieces of its three tensors in turns.
_MAX_UNPACKED = 3


class Checkpoint(contextlib.AbstractContextManager["Checkpoint"]):
    """The safetensors files of a folder. A tensor's pages are read when they are used.

    Weights in scaled blocks (`stored_forms.py`) are read as their products.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.left_out: list[str] = []
        """The tensors that are not read, once the folder is checked."""
        self._files = contextlib.ExitStack()
        self._file_of: dict[str, safe_open] = {}
        self._stacks_experts = False
        self._unpacked: dict[str, torch.Tensor] = {}
        for path in self._paths():
            try:
                handle = self._files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise InputError(
                    f"{path} cannot be read ({error}): it may be truncated or in another format; copy it again"
                ) from None
            names = handle.keys()
            if twice := sorted(self._file_of.keys() & names):
                raise InputError(
                    f"{_some(twice)} in more than one file of {self.folder}: keep the files of one checkpoint only"
                )
            self._file_of |= dict.fromkeys(names, handle)

    def __exit__(self, *_: object) -> None:
        self._file_of.clear()
        self._unpacked.clear()
        self._files.close()

    def names(self) -> list[str]:
        """Return the names of the tensors that models read."""
        return sorted(name for name in self._file_of if not name.endswith(_DERIVED) and not self._are_factors(name))

    def tensor(self, name: str) -> torch.Tensor:
        """Return the whole tensor, as a view of the file unless it is in scaled blocks or in MXFP4."""
        place = find_place(name) if self._stacks_experts else None
        if place is not None:
            if place.stored in self._file_of:
                return place.view(self._file_of[place.stored].get_tensor(place.stored))
            packed = [f"{place.stored}{ending}" for ending in (BLOCKS, SCALES)]
            return place.unpack(*(self._file_of[one].get_tensor(one) for one in packed))
        if not self._is_scaled(name):
            return self._file_of[name].get_tensor(name)
        if name not in self._unpacked:
            while len(self._unpacked) >= _MAX_UNPACKED:
                del self._unpacked[next(iter(self._unpacked))]
            factors = name + SCALE_SUFFIX
            self._unpacked[name] = unpack_scaled(
                self._file_of[name].get_tensor(name), self._file_of[factors].get_tensor(factors)
            )
        return self._unpacked[name]

    def _is_scaled(self, name: str) -> bool:
        is_small = self._file_of[name].get_slice(name).get_dtype() == SCALED_CODE
        return is_small and name + SCALE_SUFFIX in self._file_of

    def _are_factors(self, name: str) -> bool:
        scaled = name.removesuffix(SCALE_SUFFIX)
        return scaled != name and scaled in self._file_of and self._is_scaled(scaled)

    def spec(self, name: str) -> TensorSpec:
        """Read the shape and dtype of a tensor from the file's header."""
        piece = self._file_of[name].get_slice(name)
        if self._is_scaled(name):
            self._check_factors(name, tuple(piece.get_shape()))
            return TensorSpec(name, tuple(piece.get_shape()), SCALED_DTYPE)
        dtype = STORED_DTYPES.get(piece.get_dtype())
        if dtype is None:
            raise InputError(
                f"{name} in {self.folder} is stored as {piece.get_dtype()}, and quantized checkpoints cannot be "
                f"trained: use one in {', '.join(STORED_DTYPES.values())}, or in {SCALED_CODE} with "
                f"{name}{SCALE_SUFFIX}"
            )
        return TensorSpec(name, tuple(piece.get_shape()), dtype)

    def list_left_out(self, mapping: Mapping) -> list[TensorSpec]:
        """List the tensors that are not trained."""
        return [self.spec(name) for name in self.names() if mapping.is_left_out(name)]

    def _check_factors(self, name: str, shape: tuple[int, ...]) -> None:
        factors = name + SCALE_SUFFIX
        found = self._file_of[factors].get_slice(factors)
        wanted = shape_factors(shape)
        if len(shape) != 2 or tuple(found.get_shape()) != wanted or found.get_dtype() != _CODES["float32"]:
            raise InputError(
                f"{factors} in {self.folder} has shape {found.get_shape()} in {found.get_dtype()}, and must have "
                f"{list(wanted)} in F32, a factor for each {SCALED_BLOCK} x {SCALED_BLOCK} numbers of "
                f"{name}: copy the folder again"
            )

    def check(self, mapping: Mapping) -> None:
        """Raise unless the folder holds exactly the architecture's tensors, with their shapes and dtype."""
        self._stacks_experts = mapping.stacks_experts
        specs = stack_specs(mapping.manifest()) if mapping.stacks_experts else mapping.manifest()
        found = set(self.names())
        if mapping.stacks_experts:
            specs = [spec for spec in specs if not self._check_packed(spec, found)]
        wanted = {spec.name: (spec.shape, spec.dtype) for spec in specs}
        has_head = mapping.architecture.tied_embeddings and HEAD in found and not mapping.is_left_out(HEAD)
        if has_head:
            found.discard(HEAD)
        where = f"{self.folder} does not hold what its config.json describes"
        if missing := [name for name in wanted if name not in found]:
            raise InputError(f"{where}: {_some(missing)} missing; use the config.json that belongs to these weights")
        self.left_out = [spec.name for spec in self.list_left_out(mapping)]
        if extra := sorted(found - wanted.keys() - {*self.left_out}):
            raise InputError(
                f"{where}: {_some(extra)} not part of a {mapping.architecture.family} model with these settings; "
                f"use the config.json that belongs to these weights"
            )
        for name, (shape, dtype) in wanted.items():
            spec = self.spec(name)
            # A tensor with a dtype of its own may also be stored in the model's.
            if spec.dtype not in (dtype, mapping.architecture.dtype):
                raise InputError(
                    f"{where}: {name} is stored as {spec.dtype}, and config.json says {mapping.architecture.dtype}; "
                    f"write the dtype of the weights into config.json, or weights of that dtype into the folder"
                )
            if (actual := spec.shape) != shape:
                raise InputError(
                    f"{where}: {name} has shape {list(actual)}, and must have {list(shape)}; "
                    f"use the config.json that belongs to these weights"
                )
        # A copy of the embedding is harmless; tying would drop any other head.
        if has_head and not self._are_equal(HEAD, mapping.embedding):
            raise InputError(
                f"{where}: tie_word_embeddings is true, but {HEAD} differs from {mapping.embedding}; "
                f"set it to false, or remove the tensor"
            )

    def _check_packed(self, spec: TensorSpec, found: set[str]) -> bool:
        """Check whether a tensor is stored in MXFP4; if so, check its parts, and take their names out of `found`."""
        if spec.name in found or f"{spec.name}{BLOCKS}" not in found or len(spec.shape) != 3:
            return False
        for name, shape in describe_mxfp4(spec).items():
            piece = self._file_of[name].get_slice(name) if name in found else None
            if piece is None or (piece.get_dtype(), tuple(piece.get_shape())) != ("U8", shape):
                what = "missing" if piece is None else f"{piece.get_dtype()} {piece.get_shape()}"
                raise InputError(
                    f"{self.folder} does not hold what its config.json describes: {name} is {what}, and must be U8 "
                    f"{list(shape)}; use the config.json that belongs to these weights"
                )
            found.discard(name)
        return True

    def _are_equal(self, name: str, other: str) -> bool:
        spec = self.spec(name)
        same_kind = (spec.shape, spec.dtype) == (self.spec(other).shape, self.spec(other).dtype)
        return same_kind and torch.equal(self.tensor(name), self.tensor(other))

    def _paths(self) -> list[Path]:
        whole, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        if not index.exists():
            # A folder may also hold other weights: adapters, or another release's format.
            paths = [whole] if whole.exists() else sorted(self.folder.glob("*.safetensors"))
            if not paths:
                raise InputError(f"{self.folder} must hold *.safetensors: convert the weights to that format first")
            return paths
        try:
            files = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index} must be an index of safetensors files: {error!r}") from None
        if whole.exists() and whole.name not in files:
            raise InputError(f"{self.folder} holds {whole.name} and an index of other files: remove one")
        if missing := [name for name in files if not (self.folder / name).exists()]:
            raise InputError(f"{self.folder} lacks files that its index names: {_some(missing)} missing; copy it again")
        return [self.folder / name for name in files]


def read_fingerprint(folder: Path | str, mapping: Mapping, dtype: str | None = None) -> str:
    """Compute the fingerprint that the weights in a folder would be published with, in `dtype` if it is given."""
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(mapping)
        specs = mapping.manifest(dtype)
        digests = {spec.name: digest(checkpoint.tensor(spec.name).to(DTYPES[spec.dtype])).tolist() for spec in specs}
        return compute_fingerprint(specs, digests)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED_IN_A_MESSAGE])
    more = len(names) - _NAMED_IN_A_MESSAGE
    verb = "is" if len(names) == 1 else "are"
    return f"{shown} and {more} more are" if more > 0 else f"{shown} {verb}"
