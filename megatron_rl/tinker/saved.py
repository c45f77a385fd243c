"""The checkpoints of a service, `tinker://MODEL/KIND/NAME`, each a folder below `models` of the service's folder.

A checkpoint gets its name when it is complete. Beside the state that the ranks wrote, its folder has `tinker.json`.
"""

import datetime
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.shared.records.append_file import make_private_folder, write_private

TRAINING, SAMPLER = "weights", "sampler_weights"
KINDS = {TRAINING: "training", SAMPLER: "sampler"}
SCHEME, STATE, _META = "tinker://", "state", "tinker.json"


class NotFound(MegatronRLError):
    """Something that is not there, or that another key made."""


class SavedModel(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    model: str
    owner: str
    kind: str
    base_model: str
    lora_rank: int
    num_steps: int
    loads: list[int]
    number: int
    """The number of the request that asked for it."""
    time: float
    expires: float | None = None
    metadata: Any = None
    kept: str = ""
    """The name under which ranks keep the weights of a sampler, as long as they do."""


class SavedModels:
    """The folder of all checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_private_folder(folder)

    def stage(self, path: str) -> Path:
        """Return a new folder for a checkpoint until it is complete; what was left or has expired is removed."""
        self._read_all()
        whole = self.find_folder(path)
        staged = _stage(whole)
        for one in (staged, *([] if (whole / _META).exists() else [whole])):
            shutil.rmtree(one, ignore_errors=True)
        make_private_folder(staged)
        return staged

    def finish(self, checkpoint: SavedModel) -> None:
        """Give a staged checkpoint its name, in place of an earlier one."""
        whole = self.find_folder(checkpoint.path)
        write_private(_stage(whole) / _META, msgspec.json.encode(checkpoint))
        shutil.rmtree(whole, ignore_errors=True)
        _stage(whole).rename(whole)

    def list_of(self, owner: str, model: str | None = None) -> list[SavedModel]:
        found = [one for one in self._read_all() if one.owner == owner and model in (None, one.model)]
        return sorted(found, key=lambda one: one.time)

    def find(self, path: str, owner: str) -> SavedModel:
        checkpoint = self.read(path)
        if checkpoint is None or checkpoint.owner != owner:
            raise NotFound(f"the checkpoint {path} does not exist, or has expired")
        return checkpoint

    def read(self, path: str) -> SavedModel | None:
        meta = self.find_folder(path) / _META
        return _read(meta) if meta.exists() else None

    def _read_all(self) -> list[SavedModel]:
        return [one for meta in self._folder.glob(f"*/*/[!.]*/{_META}") if (one := _read(meta)) is not None]

    def set_expiry(self, checkpoint: SavedModel, ttl: int | None) -> None:
        expires = None if ttl is None else time.time() + ttl
        changed = msgspec.structs.replace(checkpoint, expires=expires)
        write_private(self.find_folder(checkpoint.path) / _META, msgspec.json.encode(changed))

    def find_folder(self, path: str) -> Path:
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise InputError(f"{path!r} must be {SCHEME}MODEL/{' or '.join(KINDS)}/NAME")
        model, kind, name = parts
        return self._folder / _check_name(model.replace(":", "-")) / kind / _check_name(name)


def _read(meta: Path) -> SavedModel | None:
    """Read a checkpoint, or remove it if it has expired."""
    checkpoint = msgspec.json.decode(meta.read_bytes(), type=SavedModel)
    if checkpoint.expires is None or checkpoint.expires >= time.time():
        return checkpoint
    shutil.rmtree(meta.parent, ignore_errors=True)
    return None


def _stage(whole: Path) -> Path:
    return whole.with_name(f".{whole.name}")


def describe_saved(one: SavedModel) -> dict[str, Any]:
    """Describe a checkpoint as the interface does."""
    kind, name = one.path.removeprefix(SCHEME).split("/")[1:]
    described = {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": KINDS[kind],
        "time": format_time(one.time),
        "tinker_path": one.path,
        "public": False,
        "user_metadata": one.metadata,
        "expires_at": None if one.expires is None else format_time(one.expires),
    }
    return {name: value for name, value in described.items() if value is not None}


def _check_name(name: str) -> str:
    is_plain = name and name[0] != "." and all(one.isalnum() or one in "-_.:+=" for one in name)
    if not is_plain or len(name) > 200:
        raise InputError(f"{name!r} must be a name of letters, digits and -_.:+=")
    return name


def format_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
