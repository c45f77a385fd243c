"""The adapters of a model in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

The file's metadata name the base that the adapters were trained on by its fingerprint, which a load checks.
"""

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_rl.errors import InputError, room_checked
from megatron_rl.shared.weights import files
from megatron_rl.shared.weights.adapters import CONFIG_FILE, WEIGHTS_FILE, check_config, describe_for_peft
from megatron_rl.shared.weights.shards import export
from megatron_rl.trainer.mcore.model.lora import Adapters
from megatron_rl.trainer.mcore.session import Session

_BASE = "base_fingerprint"


def save_adapters(adapters: Adapters, session: Session, folder: Path, dtype: str, base: Path, fingerprint: str) -> None:
    """Write the adapters of the model in the folder `base`, which has this fingerprint; every rank calls it.

    All ranks that write must write to the same file system. The folder gets its name when it is complete.
    """
    staged = folder.with_name(f".{folder.name}.partial")
    specs = adapters.mapping.manifest(dtype)
    plan = files.FilePlan(specs, {_BASE: fingerprint}, file=WEIGHTS_FILE)
    config = describe_for_peft(adapters.mapping, adapters.alpha, str(base))

    def begin() -> None:
        shutil.rmtree(staged, ignore_errors=True)
        with room_checked(staged):
            files.create(staged, plan)
            (staged / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")

    def write() -> None:
        shards = adapters.shards
        if any(shard.map.owned for shard in shards):
            with files.Writer(staged, plan) as writer:
                export(shards, specs, [writer.put])

    session.run_on_first(begin)
    session.run_or_raise_everywhere(write)
    session.run_on_first(lambda: files.put_in_place(staged, folder))


def load_adapters(adapters: Adapters, session: Session, folder: Path, fingerprint: str) -> None:
    """Fill the adapters from a folder of PEFT's; raise unless it has all of them, for a base of this fingerprint."""
    session.run_or_raise_everywhere(lambda: _load(adapters, folder, fingerprint))


def _load(adapters: Adapters, folder: Path, fingerprint: str) -> None:
    check_config(folder, adapters.mapping.rank, adapters.alpha)
    path = folder / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            base = (file.metadata() or {}).get(_BASE, fingerprint)
            if base != fingerprint:
                raise InputError(
                    f"{path} was trained on the base {base[:12]}, and --hf-model is {fingerprint[:12]}: name the "
                    f"folder of that base"
                )
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            wanted = {spec.name: spec.shape for spec in adapters.mapping.manifest("float32")}
            if different := sorted(name for name, _ in shapes.items() ^ wanted.items()):
                name = different[0]
                raise InputError(
                    f"{path} has {name} with the shape {shapes.get(name)}, and this model {wanted.get(name)}: "
                    f"--hf-model, --lora-rank and --lora-targets must be those of the adapters"
                )
            for shard in adapters.shards:
                (piece,) = shard.map.pieces
                values = file.get_tensor(piece.name).narrow(piece.dim, piece.source, piece.length)
                shard.parameter.detach().copy_(values)
    except (OSError, SafetensorError) as error:
        raise InputError(f"--load-lora {folder}: {path} cannot be read ({error})") from None
