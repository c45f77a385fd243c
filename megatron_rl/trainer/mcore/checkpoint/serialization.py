"""State dicts written and read with Megatron's dist_checkpointing: every layout reads the files of any layout."""

import concurrent.futures
import dataclasses
import functools
import os
import queue
import shutil
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl import versions
from megatron_rl.errors import InputError, MegatronRLError, NoRoom, find_no_room
from megatron_rl.platforms.megatron_patches import unknown_megatron
from megatron_rl.trainer.mcore.checkpoint import folders
from megatron_rl.trainer.mcore.checkpoint.folders import find, iteration_folder
from megatron_rl.trainer.mcore.checkpoint.state_dict import CONTENT, apply_model, build_model_state
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel
from megatron_rl.trainer.mcore.session import Session

__all__ = ["find", "load_model", "save_model"]

T = TypeVar("T")
# Errors that Megatron and torch raise about files. Any other error is a bug.
_OF_FILES = (CheckpointingException, CheckpointException, OSError, RuntimeError)
# The names of the function that writes a rank's files: from 0.17 on, and in 0.16.
_WRITERS = ("write_preloaded_data_multithread", "write_preloaded_data_multiproc")
# Everything but tensors has a file of its own up to 0.18, and a key among the shards from 0.19 on.
_COMMON_FILE, _COMMON_KEY = "common.pt", "common_state/"
# Seconds that a failed rank waits for the others, which may still write.
_TIMEOUT_SECONDS = 60.0
# Torch's CheckpointException is not an Exception.
_ANY = (Exception, CheckpointException)


def save_model(chunks: list[PackedGPTModel], folder: Path, iteration: int, session: Session) -> Path:
    """Write the weights to the folder that Megatron expects for the iteration, and return that folder."""
    state = session.run_or_raise_everywhere(lambda: build_model_state(chunks, CONTENT))
    prepared = prepare(lambda: state, folder, iteration, session)
    finish(session, prepared, prepared.write_now)
    return iteration_folder(folder, iteration)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A planned checkpoint, and the folder that it is written to until it is complete."""

    request: AsyncRequest
    staged: Path

    def write_now(self) -> None:
        """Write in this process, with one tensor for each file in host memory at a time; every rank calls it."""
        self.request._replace(preload_fn=None).execute_sync()


def load_model(chunks: list[PackedGPTModel], folder: Path, session: Session, iteration: int | None = None) -> int:
    """Fill the model from a checkpoint of Megatron's, by default the newest, and return its iteration."""
    number, source = session.run_or_raise_everywhere(lambda: find(folder, iteration))
    found, content = session.run_or_raise_everywhere(lambda: (read_metadata(source), get_content(read_common(source))))
    session.run_or_raise_everywhere(lambda: check(build_model_state(chunks, content), found, source))
    state = read(session.run_or_raise_everywhere(lambda: build_model_state(chunks, content)), found, source, session)
    apply_model(chunks, state)
    return number


def prepare(
    build: Callable[[], dict[str, Any]],
    folder: Path,
    iteration: int,
    session: Session,
    fully_parallel: bool = False,
    loaded: int | None = None,
) -> Prepared:
    """Plan a checkpoint of the state that `build` returns. The request writes it, and then makes it the newest.

    `loaded` is the iteration in `folder` that the run resumed from. `build` must not wait for other ranks. All parts of
    the request except the writing itself do wait. Every rank raises if one rank does.
    """
    state = session.run_or_raise_everywhere(build)
    staged = session.run_on_first(lambda: folders.stage(folder, iteration, loaded))
    try:
        sizes = session.gather(_count_bytes(state))
        session.run_or_raise_everywhere(lambda: _check_room(staged, sum(sizes)))
        request = run_together(session, lambda: _plan(state, staged, fully_parallel), unwritable(staged))
    except BaseException:
        if session.rank == 0:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    request = _in_one_process(request)
    put_in_place = functools.partial(folders.put_in_place, staged, folder, iteration, loaded)
    request.add_finalize_fn(lambda: session.run_on_first(put_in_place))
    return Prepared(request, staged)


def finish(session: Session, prepared: Prepared, action: Callable[[], T]) -> T:
    """Run `action`, which writes or ends writing; if it fails, remove the files, which may fill the disk."""
    try:
        return run_together(session, action, unwritable(prepared.staged.parent))
    except BaseException:
        if session.rank == 0:
            shutil.rmtree(prepared.staged, ignore_errors=True)
        raise


def run_together(session: Session, action: Callable[[], T], explain: Callable[[BaseException], MegatronRLError]) -> T:
    """Run an action that itself waits for other ranks; if it raises on one, raise on every rank with the same text.

    `explain` turns an error about files into one for users. Other ranks may wait for a failed rank in a collective of
    `action`, until it times out. So the failed rank waits for them for a limited time, and then ends, which ends them
    too.
    """
    result: T | None = None
    failure: BaseException | None = None
    is_told = False
    try:
        result = action()
    except _ANY as caught:
        failure = explain(caught) if isinstance(caught, _OF_FILES) else caught
        # Torch gives the reason only to its first rank. The others learn only that something failed.
        is_told = not (isinstance(caught, CheckpointException) and not caught.failures)
    all_arrived = session.all_arrive(0.0 if failure is None else _TIMEOUT_SECONDS)
    if failure is not None and not all_arrived:
        raise failure
    reports = [
        report
        for report in session.gather(None if failure is None else _describe_failure(failure, is_told))
        if report is not None
    ]
    if not reports:
        return result  # type: ignore[return-value] # no failure, so action returned
    if failure is not None and is_told:
        raise failure
    kind, text, _ = next((report for report in reports if report[2]), reports[0])
    raise kind(text)


def unwritable(place: Path) -> Callable[[BaseException], MegatronRLError]:
    """Return the explanation of an error of a save."""

    def explain(error: BaseException) -> MegatronRLError:
        cause = _find_cause(error)
        no_room = find_no_room(error, place) or find_no_room(cause, place)
        return no_room or InputError(f"{place} cannot be written ({cause}): make room there, or choose another --save")

    return explain


def unreadable(source: Path) -> Callable[[BaseException], InputError]:
    """Return the explanation of an error of a load."""
    return lambda error: InputError(f"{source} cannot be read ({_find_cause(error)}): it is incomplete, copy it again")


def read_common(source: Path) -> dict[str, Any]:
    """Read everything in the checkpoint but its tensors."""
    try:
        return dist_checkpointing.load_common_state_dict(str(source))
    except _ANY as error:
        missing = error.__context__
        is_file = isinstance(missing, FileNotFoundError) and Path(missing.filename).name == _COMMON_FILE
        if is_file and any(key.startswith(_COMMON_KEY) for key in read_metadata(source)):
            raise InputError(
                f"{source} was written by megatron-core 0.19 or newer, which megatron-core "
                f"{versions.describe_megatron()} cannot read: use 0.19"
            ) from None
        raise unreadable(source)(error) from None


def read_metadata(source: Path) -> dict[str, Any]:
    """Read the checkpoint's entries by name: shapes of tensors, and objects."""
    try:
        return load_sharded_metadata(str(source))
    except _ANY as error:
        raise unreadable(source)(error) from None


def get_content(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of the checkpoint's parts, as Megatron recorded it, or else its defaults."""
    return dict(dist_checkpointing.load_content_metadata(preloaded_state_dict=dict(common)) or {})


def check(state: dict[str, Any], found: Mapping[str, Any], source: Path) -> None:
    """Compare names and shapes before a load, which would write into the model before it finds a missing name."""
    apply_factories(state)
    for tensor in nested_values(state):
        if not isinstance(tensor, ShardedTensor):
            continue
        if tensor.key not in found:
            raise InputError(
                f"{source} does not hold {tensor.key}, which the model has: the flags must describe the saved model"
            )
        shape = tuple(found[tensor.key].global_shape)
        # Only the padding of a vocabulary may make shapes differ.
        if shape != tuple(tensor.global_shape) and not tensor.allow_shape_mismatch:
            raise InputError(
                f"{tensor.key} has shape {list(shape)} in {source} and {list(tensor.global_shape)} in the model: "
                f"the flags must describe the saved model"
            )


def read(
    state: dict[str, Any],
    found: Mapping[str, Any],
    source: Path,
    session: Session,
    strictness: str = "assume_ok_unexpected",
    fully_parallel: bool = False,
) -> dict[str, Any]:
    """Load the checkpoint's values for the shards in `state`; `found` is its metadata."""

    def load() -> dict[str, Any]:
        _keep_own_states(state, found)
        strategy = None
        if fully_parallel:
            strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), _replicas_group())
        loaded = dist_checkpointing.load(state, str(source), strategy, strict=strictness)
        # With some settings of strictness, Megatron also returns the names that differ.
        return loaded[0] if isinstance(loaded, tuple) else loaded

    return run_together(session, load, unreadable(source))


def _keep_own_states(state: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Let modules keep their extra state, which scales of fp8 would be, if the checkpoint does not hold it.

    TransformerEngine's norms have such a state, which is empty without fp8, and Megatron's own norms do not.
    """

    def keep(part: Any) -> Any:
        is_missing = isinstance(part, ShardedObject) and part.unique_key not in found
        return LocalNonpersistentObject(part.data) if is_missing and part.key.endswith("_extra_state") else part

    dict_list_map_inplace(keep, state)


def _plan(state: dict[str, Any], staged: Path, fully_parallel: bool) -> AsyncRequest:
    _share_memory(state)
    strategy = None
    if fully_parallel:
        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), _replicas_group())
    # From 0.17 on, an asynchronous save uses nvidia-resiliency-ext by default.
    said = {"async_strategy": "mcore"} if "async_strategy" in signature(dist_checkpointing.save).parameters else {}
    return dist_checkpointing.save(
        state, str(staged), strategy, async_sharded_save=True, content_metadata=dict(CONTENT), **said
    )


def _share_memory(state: dict[str, Any]) -> None:
    """Keep the writer from copying tensors in the host's memory, which it does if a tensor is a part of a larger one.

    A writer in the background is a fork, which sees the memory as it was. Pinned memory is the exception: it is shared.
    """
    apply_factories(state)
    for part in nested_values(state):
        if not isinstance(part, ShardedTensor) or part.data is None or part.data.device.type != "cpu":
            continue
        data = part.data.detach()
        if data.is_pinned():
            part.data = data.clone()
        elif data.is_contiguous():
            # As bytes, because numpy does not have every dtype.
            own = torch.from_numpy(data.reshape(-1).view(torch.uint8).numpy())
            part.data = own.view(data.dtype).view(data.shape)


def _in_one_process(request: AsyncRequest) -> AsyncRequest:
    """Replace Megatron's writer by one that starts no processes and reports errors.

    The writer of 0.16 starts more processes, and waits forever if one is killed. Later writers start threads, and lose
    their errors.
    """
    write = request.async_fn
    if write is None:
        return request
    writers = [getattr(FileSystemWriterAsync, name, None) for name in _WRITERS]
    if not isinstance(write, functools.partial) or write.func not in writers:
        raise unknown_megatron(
            f"checkpoints are written by {write}, and must be written by one of {', '.join(_WRITERS)}"
        )
    transforms = write.args[0]
    return request._replace(async_fn=functools.partial(_write, transforms))


def _write(transforms: list[Any], rank: int, buckets: list[Any], results: Any) -> None:
    """Write a rank's files, one thread per file; return an error as a result, so that all ranks learn of it."""

    def write_one(index: int) -> Any:
        written: queue.Queue[tuple[int, Any]] = queue.Queue()
        counted: queue.Queue[int] = queue.Queue()
        counted.put(index)
        name, key, (objects, tensors) = buckets[index]
        # A tensor is copied to the host when it is written.
        bucket = name, key, (objects, ((item, tensor.cpu()) for item, tensor in tensors))
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, written, counted, use_fsync=True)
        return written.get_nowait()[1]

    try:
        with concurrent.futures.ThreadPoolExecutor(len(buckets)) as pool:
            of_files = list(pool.map(write_one, range(len(buckets))))
        # Torch's own error follows that of the disk, and only the text of one of them reaches the other ranks.
        failures = [find_no_room(answer) or answer for answer in of_files if isinstance(answer, Exception)]
        results.put(failures[0] if failures else dict(enumerate(of_files)))
    except Exception as error:
        results.put(RuntimeError(f"{type(error).__name__}: {error}"))


def _replicas_group() -> torch.distributed.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _count_bytes(state: dict[str, Any]) -> int:
    """Count the bytes of this rank's shards; each shard is counted on one rank only."""
    return sum(
        value.data.nbytes
        for value in nested_values(state)
        if isinstance(value, ShardedTensor | ShardedTensorFactory)
        and isinstance(value.data, torch.Tensor)
        and is_main_replica(value.replica_id)
    )


def _check_room(staged: Path, num_bytes: int) -> None:
    """Check that this rank can write, before any rank writes: the others would wait for one that cannot."""
    if not os.access(staged, os.W_OK):
        raise InputError(
            f"{staged} cannot be written from this host: every rank that writes must reach the same folder"
        )
    free = shutil.disk_usage(staged).free
    if free < num_bytes:
        raise NoRoom(
            f"{staged} cannot be written: the checkpoint takes {num_bytes} bytes, {free} are free; make room there, "
            f"or choose another --save"
        )


def _describe_failure(failure: BaseException, is_told: bool) -> tuple[type[MegatronRLError], str, bool]:
    if isinstance(failure, MegatronRLError):
        return type(failure), str(failure), is_told
    return MegatronRLError, f"another rank failed: {type(failure).__name__}: {failure}", is_told


def _find_cause(error: BaseException) -> str:
    """Return the reason of the first rank that failed, if this rank knows it."""
    if not isinstance(error, CheckpointException):
        return str(error) or type(error).__name__
    text = str(next(iter(error.failures.values()))[0]) if error.failures else ""
    return "the process that wrote was killed" if text == "results_queue should not be empty" else text
