"""The process groups of a run, started once and ended once, and a rank's place in them, which determines its shards."""

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_rl.config.settings import Settings
from megatron_rl.errors import MegatronRLError, PlatformError, UsageError
from megatron_rl.platforms import Platform, select
from megatron_rl.shared.weights.mapping import Coordinates
from megatron_rl.types import ParallelSizes

T = TypeVar("T")
U = TypeVar("U")
# A function that meets the other ranks in a store, within the given time.
Meet = Callable[[datetime.timedelta], dist.Store]
_ARRIVALS = "megatron_rl/arrivals"
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class ReplicaGroup:
    """The ranks of one replica, connected over the host; only the thread that takes slots uses the group."""

    first: int
    """The rank with the first place in every dimension, and so in the first pipeline stage."""
    group: dist.ProcessGroup


def make_groups(sizes: ParallelSizes, **options: Any) -> None:
    """Make Megatron's process groups; `options` are Megatron's own."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        **options,
    )


class Session(contextlib.AbstractContextManager["Session"]):
    """torch.distributed and Megatron's groups between `start` and `close`; use it as a context manager.

    The ranks meet within `timeout`, in the store that `meet` returns. A collective may take `timeout` plus `waiting`.
    """

    def __init__(
        self,
        sizes: ParallelSizes,
        platform: Platform,
        seed: int,
        timeout: datetime.timedelta,
        waiting: datetime.timedelta = datetime.timedelta(),
        meet: Meet | None = None,
    ):
        self.sizes = sizes
        self.platform = platform
        self._started_distributed = _start_distributed(
            platform, timeout, waiting, meet or (lambda timeout: next(dist.rendezvous("env://", timeout=timeout))[0])
        )
        timeout += waiting
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()
        self._num_arrivals = 0
        if self.world_size % sizes.model:
            raise UsageError(
                f"{self.world_size} ranks cannot be divided into replicas of {sizes.model} (tensor {sizes.tensor} x "
                f"pipeline {sizes.pipeline} x context {sizes.context}): start a multiple of {sizes.model}"
            )
        make_groups(
            sizes,
            distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
            create_gloo_process_groups=True,
        )
        # Everything but tensors (errors, digests, agreement) travels over the host, on every platform.
        self.control_group = dist.new_group(backend="gloo", timeout=timeout)
        self.replica_group = self._new_replica_group(timeout)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.coordinates = find_coordinates()
        self.all_coordinates: list[Coordinates] = [self.coordinates] * self.world_size
        dist.all_gather_object(self.all_coordinates, self.coordinates, group=self.control_group)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End Megatron's groups, and torch.distributed if this session started it."""
        parallel_state.destroy_model_parallel()
        if self._started_distributed:
            dist.destroy_process_group()

    @property
    def device(self) -> torch.device:
        return self.platform.device()

    @property
    def num_replicas(self) -> int:
        """The number of data-parallel copies of the model."""
        return parallel_state.get_data_parallel_world_size()

    @property
    def replica(self) -> int:
        """The number of the copy that this rank belongs to."""
        return parallel_state.get_data_parallel_rank()

    @property
    def replicas_group(self) -> dist.ProcessGroup:
        """The ranks with this rank's place in every replica."""
        return parallel_state.get_data_parallel_group()

    def gather(self, item: T) -> list[T]:
        """Return every rank's item, on every rank."""
        items: list[T] = [item] * self.world_size
        if self.world_size == 1:
            return items
        dist.all_gather_object(items, item, group=self.control_group)
        return items

    def broadcast(self, item: T) -> T:
        """Return rank 0's item, on every rank."""
        if self.world_size == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self.control_group)
        return box[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(group=self.control_group)

    def all_arrive(self, seconds: float = 0.0) -> bool:
        """Note that this rank has arrived here, and return whether every rank arrives within `seconds`.

        Every rank calls it. It uses no collective, because a failed rank would wait there for the ranks that wait for
        it.
        """
        self._num_arrivals += 1
        key = f"{_ARRIVALS}/{self._num_arrivals}"
        deadline = time.monotonic() + seconds
        num_there = self._store.add(key, 1)
        while num_there < self.world_size and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            num_there = self._store.add(key, 0)
        return num_there >= self.world_size

    def run_or_raise_everywhere(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if it fails on one, raise the same error on all, so that none waits for another.

        `action` must not wait for other ranks itself.
        """
        result, _ = self._run_or_raise(action, lambda _: None)
        return result

    def gather_or_raise_everywhere(self, action: Callable[[], T]) -> list[T]:
        """Do as `run_or_raise_everywhere`, and return the results of all ranks, on every rank."""
        _, results = self._run_or_raise(action, lambda result: result)
        return results

    def run_on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0, and return its result on every rank; if it fails, raise the same error on all."""
        first, *_ = self.gather_or_raise_everywhere(lambda: action() if self.rank == 0 else None)
        return first  # type: ignore[return-value] # rank 0 has run it

    def _run_or_raise(self, action: Callable[[], T], share: Callable[[T], U]) -> tuple[T, list[U]]:
        result: Any = None
        error: Exception | None = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        outcome = (_describe_failure(error, self.rank), None if error is not None else share(result))
        outcomes: list[tuple[tuple[type[MegatronRLError], str] | None, Any]] = self.gather(outcome)
        if error is not None:
            raise error
        for failure, _ in outcomes:
            if failure is not None:
                kind, text = failure
                raise kind(text)
        return result, [shared for _, shared in outcomes]

    def _new_replica_group(self, timeout: datetime.timedelta) -> ReplicaGroup | None:
        """Make the group of this rank's replica; return None if the rank is alone in it."""
        if self.sizes.model == 1:
            return None
        replicas = self.gather(self.replica)
        own = None
        for replica in range(self.num_replicas):
            ranks = [rank for rank, of_rank in enumerate(replicas) if of_rank == replica]
            group = dist.new_group(ranks, timeout=timeout, backend="gloo")
            if replica == self.replica:
                own = ReplicaGroup(ranks[0], group)
        assert own is not None
        return own


def _describe_failure(error: Exception | None, rank: int) -> tuple[type[MegatronRLError], str] | None:
    """Return the error that the other ranks raise for this rank's error."""
    if error is None:
        return None
    if isinstance(error, MegatronRLError):
        return type(error), f"{error} (on rank {rank})"
    return MegatronRLError, f"rank {rank} failed: {type(error).__name__}: {error}"


def _start_distributed(
    platform: Platform, timeout: datetime.timedelta, waiting: datetime.timedelta, meet: Meet
) -> bool:
    """Join the ranks that the environment names, or be alone; return False if torch.distributed has started before."""
    if dist.is_initialized():
        return False
    platform.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store: dist.Store = dist.HashStore()
    rank, world_size = 0, 1
    if "RANK" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
        try:
            store = meet(timeout)
        except (dist.DistError, TimeoutError) as error:
            raise PlatformError(
                f"rank {rank} has not met the others within {timeout.total_seconds():g} s ({error}): check that all "
                f"{world_size} ranks were started, and that they reach MASTER_ADDR"
            ) from None
    store.set_timeout(timeout + waiting)
    dist.init_process_group(
        platform.collective_backend, store=store, rank=rank, world_size=world_size, timeout=timeout + waiting
    )
    return True


def find_coordinates() -> Coordinates:
    return Coordinates(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
        expert_data_rank=parallel_state.get_expert_data_parallel_rank(),
    )


def start_session(
    settings: Settings, waiting: datetime.timedelta = datetime.timedelta(), meet: Meet | None = None
) -> Session:
    """Start the process groups that the settings describe; a rank may wait `waiting` longer for other processes."""
    timeout = datetime.timedelta(minutes=settings.distributed.distributed_timeout_minutes)
    platform = select(settings.platform)
    if settings.transformer.deterministic_mode:
        platform.choose_fixed_order()
    if getattr(settings.transformer, "batch_invariant_mode", False):
        choose_invariant_order()
    return Session(settings.parallel_sizes, platform, settings.training.seed, timeout, waiting, meet)


def choose_invariant_order() -> None:
    """Replace torch's and TransformerEngine's products and norms by Megatron's, whose rows do not depend on the batch.

    Triton would round the factors of products in float32 to TF32. A user's own choice is kept.
    """
    from megatron.core.transformer.custom_layers import batch_invariant_kernels

    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    batch_invariant_kernels.enable_batch_invariant_mode()
