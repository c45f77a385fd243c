"""A model's weights in Megatron's own distributed checkpoints: any layout writes them, any layout reads them."""

import shutil
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.errors import InputError
from megatron_rl.mcore.model import PackedGPTModel
from megatron_rl.mcore.session import Session

_TRACKER = "latest_checkpointed_iteration.txt"


def save_model(chunks: list[PackedGPTModel], folder: Path, iteration: int, session: Session) -> Path:
    """Write the weights where Megatron looks for those of that iteration, and return that folder."""
    target = iteration_folder(folder, iteration)
    staged = target.with_name(f".{target.name}.partial")
    session.agree(lambda: _create(staged, target) if session.rank == 0 else None)
    # Saving waits for other ranks itself and tells all of them when one fails; agreeing on it gives it one name.
    failure = _save(chunks, staged)
    try:
        session.agree(lambda: _raise(failure))
        session.agree(lambda: _publish(staged, target, folder, iteration) if session.rank == 0 else None)
    except BaseException:
        if session.rank == 0:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    return target


def load_model(chunks: list[PackedGPTModel], folder: Path, session: Session, iteration: int | None = None) -> int:
    """Fill the model from a checkpoint of Megatron's, by default the newest, and return its iteration."""
    number, source = session.agree(lambda: find(folder, iteration))
    session.agree(lambda: _check(chunks, source))
    state = session.agree(lambda: _read(chunks, source))
    for name, chunk in _named(chunks):
        chunk.load_state_dict(state[name])
    return number


def find(folder: Path, iteration: int | None = None) -> tuple[int, Path]:
    """The iteration, and the folder with its shards: of the newest checkpoint, or of the one that is asked for."""
    if (folder / "metadata.json").exists():
        return 0, folder
    tracker = folder / _TRACKER
    if iteration is None:
        if not tracker.exists():
            raise InputError(f"{folder} holds no checkpoint: there is neither {_TRACKER} nor metadata.json in it")
        text = tracker.read_text().strip()
        if text == "release":
            return 0, _existing(folder / "release")
        if not text.isdigit():
            raise InputError(f"{tracker} says {text!r}, which is no iteration: name one with --ckpt-step")
        iteration = int(text)
    return iteration, _existing(iteration_folder(folder, iteration))


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Megatron's name for the folder of an iteration."""
    return folder / f"iter_{iteration:07d}"


def _existing(folder: Path) -> Path:
    if not (folder / "metadata.json").exists():
        raise InputError(
            f"{folder} is no distributed checkpoint (metadata.json is missing): "
            f"convert it to Megatron's torch_dist format, or name another with --ckpt-step"
        )
    return folder


def _create(staged: Path, target: Path) -> None:
    if target.exists():
        raise InputError(f"{target} exists already: choose another --save, or remove it")
    # Left behind by a run that was killed while it wrote.
    shutil.rmtree(staged, ignore_errors=True)
    try:
        staged.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{staged} cannot be created: {error}") from None


def _save(chunks: list[PackedGPTModel], staged: Path) -> InputError | None:
    try:
        dist_checkpointing.save(_state(chunks), str(staged))
    except (CheckpointingException, CheckpointException, OSError, RuntimeError) as error:
        return InputError(f"{staged} cannot be written ({_cause(error)}): make room there, or choose another --save")
    return None


def _raise(failure: InputError | None) -> None:
    if failure is not None:
        raise failure


def _publish(staged: Path, target: Path, folder: Path, iteration: int) -> None:
    """Last, and in two steps that are each whole: until then the newest checkpoint is the one before."""
    staged.rename(target)
    unfinished = folder / f".{_TRACKER}"
    unfinished.write_text(str(iteration))
    unfinished.replace(folder / _TRACKER)


def _check(chunks: list[PackedGPTModel], source: Path) -> None:
    """Compare names and shapes: loading itself writes into the model before it finds that something is missing."""
    try:
        found = dist_checkpointing.load_tensors_metadata(str(source))
    except (CheckpointingException, OSError, ValueError) as error:
        raise InputError(f"{source} cannot be read ({error}): it is incomplete, copy it again") from None
    state = _state(chunks)
    apply_factories(state)
    for tensor in nested_values(state):
        if not isinstance(tensor, ShardedTensor):
            continue
        if tensor.key not in found:
            raise InputError(
                f"{source} does not hold {tensor.key}, which the model has: the flags must describe the model that "
                f"was saved"
            )
        shape = tuple(found[tensor.key].global_shape)
        # Only the padding of a vocabulary may differ.
        if shape != tuple(tensor.global_shape) and not tensor.allow_shape_mismatch:
            raise InputError(
                f"{tensor.key} has shape {list(shape)} in {source} and {list(tensor.global_shape)} in the model: "
                f"the flags must describe the model that was saved"
            )


def _read(chunks: list[PackedGPTModel], source: Path) -> dict[str, Any]:
    try:
        return dist_checkpointing.load(_state(chunks), str(source))
    except (CheckpointingException, CheckpointException, OSError) as error:
        raise InputError(f"{source} cannot be read ({_cause(error)}): it is incomplete, copy it again") from None


def _cause(error: BaseException) -> BaseException:
    """What happened on the first rank that failed."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _state(chunks: list[PackedGPTModel]) -> dict[str, Any]:
    return {name: chunk.sharded_state_dict() for name, chunk in _named(chunks)}


def _named(chunks: list[PackedGPTModel]) -> list[tuple[str, PackedGPTModel]]:
    """The names that Megatron's own checkpoints give the stages."""
    return [("model" if len(chunks) == 1 else f"model{index}", chunk) for index, chunk in enumerate(chunks)]
