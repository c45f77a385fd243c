"""A Hugging Face folder's tensors: memory-mapped, checked against what the architecture expects before any is used."""

import contextlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import InputError
from megatron_rl.weights.mapping import Mapping, TensorSpec

_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Tensors that old checkpoints carry and no model reads: they follow from config.json.
_DERIVED = (".rotary_emb.inv_freq", ".self_attn.masked_bias")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NAMED_IN_A_MESSAGE = 3


class Checkpoint:
    """The safetensors files of a folder. Reading a tensor reads nothing: its pages come as they are used."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self._files = contextlib.ExitStack()
        self._file_of: dict[str, safe_open] = {}
        for path in self._paths():
            try:
                handle = self._files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise InputError(
                    f"{path} cannot be read ({error}): it is truncated or no safetensors file, copy it again"
                ) from None
            names = handle.keys()
            if twice := sorted(self._file_of.keys() & names):
                raise InputError(
                    f"{_some(twice)} in more than one file of {self.folder}: keep the files of one checkpoint only"
                )
            self._file_of |= dict.fromkeys(names, handle)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._file_of.clear()
        self._files.close()

    def names(self) -> list[str]:
        """Of the tensors that models read."""
        return sorted(name for name in self._file_of if not name.endswith(_DERIVED))

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, as a view of the file."""
        return self._file_of[name].get_tensor(name)

    def spec(self, name: str) -> TensorSpec:
        """What the file says of a tensor."""
        piece = self._file_of[name].get_slice(name)
        dtype = _DTYPES.get(piece.get_dtype())
        if dtype is None:
            raise InputError(
                f"{name} in {self.folder} is stored as {piece.get_dtype()}: "
                f"quantized checkpoints cannot be trained, use one in {', '.join(_DTYPES.values())}"
            )
        return TensorSpec(name, tuple(piece.get_shape()), dtype)

    def check(self, mapping: Mapping) -> None:
        """Raise unless the folder holds exactly the architecture's tensors, in their shapes."""
        wanted = {spec.name: spec.shape for spec in mapping.manifest()}
        found = set(self.names())
        has_head = mapping.architecture.tied_embeddings and _HEAD in found
        if has_head:
            found.discard(_HEAD)
        where = f"{self.folder} does not hold what its config.json describes"
        if missing := [name for name in wanted if name not in found]:
            raise InputError(f"{where}: {_some(missing)} missing; use the config.json that belongs to these weights")
        if extra := sorted(found - wanted.keys()):
            raise InputError(
                f"{where}: {_some(extra)} not part of a {mapping.architecture.family} model with these settings; "
                f"use the config.json that belongs to these weights"
            )
        for name, shape in wanted.items():
            spec = self.spec(name)
            if spec.dtype != mapping.architecture.dtype:
                raise InputError(
                    f"{where}: {name} is stored as {spec.dtype} and config.json says {mapping.architecture.dtype}; "
                    f"write the dtype of the weights into config.json, or weights of that dtype into the folder"
                )
            if (actual := spec.shape) != shape:
                raise InputError(
                    f"{where}: {name} has shape {list(actual)} and should have {list(shape)}; "
                    f"use the config.json that belongs to these weights"
                )
        # A copy of the embedding is harmless; anything else is a head of its own, which tying would drop.
        if has_head and not self._are_equal(_HEAD, _EMBEDDING):
            raise InputError(
                f"{where}: tie_word_embeddings is true and {_HEAD} is another tensor than {_EMBEDDING}; "
                f"set it to false, or remove the tensor"
            )

    def _are_equal(self, name: str, other: str) -> bool:
        spec = self.spec(name)
        same_kind = (spec.shape, spec.dtype) == (self.spec(other).shape, self.spec(other).dtype)
        return same_kind and torch.equal(self.tensor(name), self.tensor(other))

    def _paths(self) -> list[Path]:
        whole, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        if not index.exists():
            # Beside the weights there may be others: adapters, or another release's format.
            paths = [whole] if whole.exists() else sorted(self.folder.glob("*.safetensors"))
            if not paths:
                raise InputError(f"{self.folder} holds no *.safetensors: convert the weights to that format first")
            return paths
        try:
            files = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index} is not an index of safetensors files: {error!r}") from None
        if whole.exists() and whole.name not in files:
            raise InputError(f"{self.folder} holds {whole.name} and an index of other files: remove one of the two")
        if missing := [name for name in files if not (self.folder / name).exists()]:
            raise InputError(f"{self.folder} lacks files that its index names: {_some(missing)} missing; copy it again")
        return [self.folder / name for name in files]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED_IN_A_MESSAGE])
    more = len(names) - _NAMED_IN_A_MESSAGE
    verb = "is" if len(names) == 1 else "are"
    return f"{shown} and {more} more are" if more > 0 else f"{shown} {verb}"
