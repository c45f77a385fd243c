"""Micro-batches through Megatron's own schedules, whatever the pipeline's shape."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_rl.data.batch import Batch
from megatron_rl.data.packing import Pack
from megatron_rl.mcore.step import auxiliary

M = TypeVar("M", Pack, Batch)
M_co = TypeVar("M_co", Pack, Batch, covariant=True)

Loss = Callable[[torch.Tensor, M], torch.Tensor]
"""The sum of a micro-batch's losses, of its targets' log-probs."""

Share = Callable[[M], float]
"""A micro-batch's share of the update's denominator: how often its auxiliary losses count."""

LossOfLogProbs = Callable[[torch.Tensor], torch.Tensor]
"""The same of one micro-batch."""

Compute = Callable[[torch.nn.Module, M], tuple[torch.Tensor, LossOfLogProbs]]
"""What a chunk makes of a micro-batch, for the next stage; on the last one log-probs, and then the loss of them."""

# What the schedules and the finalization of gradients use, as they would look it up themselves.
_GROUPS = ["tp", "pp", "cp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp"]


def _once(_: object) -> float:
    """The share where there is no update to share."""
    return 1.0


class MicroBatches(Protocol[M_co]):
    """What a run of the schedule consumes. Each of a rank's chunks goes through it once, from its start.

    The next one may not be there yet: iterating waits for it, inside the schedule.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[M_co]: ...


def forward(
    chunks: Sequence[torch.nn.Module], micro_batches: MicroBatches[M], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Log-probs of each micro-batch's targets, without gradients; on the last pipeline stage, elsewhere nothing."""

    def compute(chunk: torch.nn.Module, micro_batch: M) -> tuple[torch.Tensor, LossOfLogProbs]:
        return chunk(_pack_of(micro_batch), temperature), lambda log_probs_N: log_probs_N.new_zeros(())

    # The schedules leave that to their caller.
    with torch.no_grad(), _last_message_awaited(get_model_config(chunks[0])):
        return _run(chunks, micro_batches, compute, is_training=False, communicator=None)


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    micro_batches: MicroBatches[M],
    loss: Loss[M],
    temperature: float = 1.0,
    share: Share[M] = _once,
) -> list[torch.Tensor]:
    """As `forward`; and every `main_grad` receives the gradient of the sum of losses, over all replicas.

    The auxiliary losses of routers are among them, each as often as `share` says.
    """

    def compute(chunk: torch.nn.Module, micro_batch: M) -> tuple[torch.Tensor, LossOfLogProbs]:
        return chunk(_pack_of(micro_batch), temperature), lambda log_probs_N: loss(log_probs_N, micro_batch)

    return train(chunks, micro_batches, compute, share)


def train(
    chunks: Sequence[torch.nn.Module],
    micro_batches: MicroBatches[M],
    compute: Compute[M],
    share: Share[M] = _once,
    communicator: P2PCommunicator | None = None,
) -> list[torch.Tensor]:
    """As `forward_backward`, for what `compute` makes of a chunk and a micro-batch.

    `communicator` takes the place of what Megatron sends and receives between pipeline stages with.
    """
    config = get_model_config(chunks[0])

    def weighed(chunk: torch.nn.Module, micro_batch: M) -> tuple[torch.Tensor, LossOfLogProbs]:
        output, loss = compute(chunk, micro_batch)
        auxiliary.weigh(output, share(micro_batch), config)
        return output, loss

    return _run(chunks, micro_batches, weighed, is_training=True, communicator=communicator)


def _run(
    chunks: Sequence[torch.nn.Module],
    micro_batches: MicroBatches[M],
    compute: Compute[M],
    is_training: bool,
    communicator: P2PCommunicator | None,
) -> list[torch.Tensor]:
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads if is_training else None
    # Without it an overlapped reduction starts after as many micro-batches as the first call had, and what the later
    # ones add is lost.
    config.no_sync_func = _no_sync(chunks)
    # The schedule divides by the micro-batches and the gradient buffers by the replicas: undo both. Context-parallel
    # ranks need no undoing: the schedule multiplies by them what the buffers divide by them.
    scale = len(micro_batches) * parallel_state.get_data_parallel_world_size()

    def step(iterator: Iterator[M], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        output, loss = compute(chunk, next(iterator))

        def finish(log_probs_N: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return loss(log_probs_N) * scale, {"log_probs": log_probs_N.detach()}

        return output, finish

    iterators = [iter(micro_batches) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        # Stages tell each other the length of what they send; this one is only divided by the parallel sizes.
        seq_length=config.tensor_model_parallel_size * config.context_parallel_size,
        micro_batch_size=1,
        forward_only=not is_training,
        p2p_communicator=communicator,
        # The schedules take both from outside, or neither.
        pg_collection=None if communicator is None else ProcessGroupCollection.use_mpu_process_groups(_GROUPS),
    )
    return [result["log_probs"] for result in results]


@contextlib.contextmanager
def _last_message_awaited(config: ModelParallelConfig) -> Iterator[None]:
    """An interleaved pass that overlaps its messages from the start waits for its last one while gradients go back.

    Where none do it ends without, and the message may be lost: then the next stage waits for good.
    """
    is_overlapped, config.overlap_p2p_comm_warmup_flush = config.overlap_p2p_comm_warmup_flush, False
    try:
        yield
    finally:
        config.overlap_p2p_comm_warmup_flush = is_overlapped


def _pack_of(micro_batch: Pack | Batch) -> Pack:
    return micro_batch.pack if isinstance(micro_batch, Batch) else micro_batch


def _no_sync(chunks: Sequence[torch.nn.Module]) -> Any:
    """What keeps gradients from being reduced before the last micro-batch, in the form that the schedules want."""
    functions = [chunk.no_sync for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    if not functions:
        return None
    return functions if len(chunks) > 1 else functions[0]
