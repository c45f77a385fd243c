"""Micro-batches through Megatron's own schedules, whatever the pipeline's shape."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_rl.data.batch import Batch
from megatron_rl.data.packing import Pack

M = TypeVar("M", Pack, Batch)
M_co = TypeVar("M_co", Pack, Batch, covariant=True)

Loss = Callable[[torch.Tensor, M], torch.Tensor]
"""The sum of a micro-batch's losses, of its targets' log-probs."""


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
    return _run(chunks, micro_batches, None, temperature)


def forward_backward(
    chunks: Sequence[torch.nn.Module], micro_batches: MicroBatches[M], loss: Loss[M], temperature: float = 1.0
) -> list[torch.Tensor]:
    """As `forward`; and every `main_grad` receives the gradient of the sum of losses, over all replicas."""
    return _run(chunks, micro_batches, loss, temperature)


def _run(
    chunks: Sequence[torch.nn.Module], micro_batches: MicroBatches[M], loss: Loss[M] | None, temperature: float
) -> list[torch.Tensor]:
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads if loss is not None else None
    # Without it an overlapped reduction starts after as many micro-batches as the first call had, and what the later
    # ones add is lost.
    config.no_sync_func = _no_sync(chunks)
    # The schedule divides by the micro-batches and the gradient buffers by the replicas: undo both.
    scale = len(micro_batches) * parallel_state.get_data_parallel_world_size()

    def step(iterator: Iterator[M], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        micro_batch = next(iterator)

        def finish(log_probs_N: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            total = loss(log_probs_N, micro_batch) * scale if loss is not None else log_probs_N.new_zeros(())
            return total, {"log_probs": log_probs_N.detach()}

        return chunk(_pack_of(micro_batch), temperature), finish

    iterators = [iter(micro_batches) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        # Stages tell each other the length of what they send; this one is only divided by the parallel sizes.
        seq_length=config.tensor_model_parallel_size * config.context_parallel_size,
        micro_batch_size=1,
        forward_only=loss is None,
    )
    return [result["log_probs"] for result in results]


def _pack_of(micro_batch: Pack | Batch) -> Pack:
    return micro_batch.pack if isinstance(micro_batch, Batch) else micro_batch


def _no_sync(chunks: Sequence[torch.nn.Module]) -> Any:
    """What keeps gradients from being reduced before the last micro-batch, in the form that the schedules want."""
    functions = [chunk.no_sync for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    if not functions:
        return None
    return functions if len(chunks) > 1 else functions[0]
