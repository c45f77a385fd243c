"""Packs through Megatron's own schedules, whatever the pipeline's shape."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_rl.data.packing import Pack

Loss = Callable[[torch.Tensor, Pack], torch.Tensor]
"""The sum of a pack's losses, of its targets' log-probs."""


def forward(chunks: Sequence[torch.nn.Module], packs: Sequence[Pack], temperature: float = 1.0) -> list[torch.Tensor]:
    """Log-probs of each pack's targets, without gradients; on the last pipeline stage, elsewhere nothing."""
    return _run(chunks, packs, None, temperature)


def forward_backward(
    chunks: Sequence[torch.nn.Module], packs: Sequence[Pack], loss: Loss, temperature: float = 1.0
) -> list[torch.Tensor]:
    """As `forward`; and every `main_grad` receives the gradient of the losses' sum, over all packs of all replicas."""
    return _run(chunks, packs, loss, temperature)


def _run(
    chunks: Sequence[torch.nn.Module], packs: Sequence[Pack], loss: Loss | None, temperature: float
) -> list[torch.Tensor]:
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads if loss is not None else None
    # Without it an overlapped reduction starts after as many micro-batches as the first call had, and what the later
    # ones add is lost.
    config.no_sync_func = _no_sync(chunks)
    # The schedule divides by the micro-batches and the gradient buffers by the replicas: undo both.
    scale = len(packs) * parallel_state.get_data_parallel_world_size()

    def step(iterator: Iterator[Pack], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        pack = next(iterator)

        def finish(log_probs_N: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            total = loss(log_probs_N, pack) * scale if loss is not None else log_probs_N.new_zeros(())
            return total, {"log_probs": log_probs_N.detach()}

        return chunk(pack, temperature), finish

    iterators = [iter(packs) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(packs),
        seq_length=max(pack.num_tokens for pack in packs),
        micro_batch_size=1,
        forward_only=loss is None,
    )
    return [result["log_probs"] for result in results]


def _no_sync(chunks: Sequence[torch.nn.Module]) -> Any:
    """What keeps gradients from being reduced before the last micro-batch, in the form that the schedules want."""
    functions = [chunk.no_sync for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    if not functions:
        return None
    return functions if len(chunks) > 1 else functions[0]
