"""Auxiliary losses of routers: the weight of each micro-batch's losses in its update, and their values.

Megatron adds their gradients in the backward pass, times a factor that all routers share. An update's auxiliary
gradient is the mean over its micro-batches, each weighted by its share of the denominator that divides the update's
gradients at the end.
"""

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


def weigh_losses(output: torch.Tensor, share: float, config: TransformerConfig) -> None:
    """Multiply the auxiliary losses of one micro-batch by its share; `output` is a chunk's output for it.

    The factor is set where the backward pass of a micro-batch through a chunk begins: at the chunk's output. That pass
    is never interleaved with another one, even with recomputation. The schedule sets its own factor in the forward
    pass, the same for all micro-batches.
    """
    if not (config.moe_aux_loss_coeff or config.moe_z_loss_coeff) or not output.requires_grad:
        return
    # The gradient buffers divide by this number.
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    factor = torch.full((1,), float(share * replicas), device=output.device)
    if config.grad_scale_func is not None:
        factor = config.grad_scale_func(factor)
    output.register_hook(lambda _: MoEAuxLossAutoScaler.set_loss_scale(factor))


def take_losses(num_layers: int) -> dict[str, float]:
    """Return and clear this rank's part of each auxiliary loss, without its coefficient.

    A part is a sum over micro-batches of means over the layers with experts, of which the model has `num_layers`. All
    ranks' parts add up to the sum over all replicas.
    """
    recorded = _take_recorded()
    # A rank holds its own tokens' part of the first loss, and the mean over its tokens of the second.
    num_means = {"load_balancing_loss": 1, "z_loss": parallel_state.get_tensor_and_context_parallel_world_size()}
    return {
        f"moe_{name}": sum(recorded[name]) / num_layers / count for name, count in num_means.items() if name in recorded
    }


def _take_recorded() -> dict[str, list[float]]:
    """Return and clear the losses that Megatron's routers have recorded, one value per layer."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        entries = moe_utils.get_moe_metrics_tracker().metrics
        recorded = {name: entry.values.tolist() for name, entry in entries.items()}
    else:
        # megatron-core 0.16
        entries = moe_utils.get_moe_layer_wise_logging_tracker()
        recorded = {name: entry["values"].tolist() for name, entry in entries.items()}
    entries.clear()
    return recorded
