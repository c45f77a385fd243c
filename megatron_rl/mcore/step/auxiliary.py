"""The auxiliary losses of routers: how much a micro-batch's count in its update, and what they came to.

Megatron adds their gradients on the way back, times a factor that all of its routers share. An update's auxiliary
gradient is the mean over its micro-batches, each weighed by its share of the denominator that divides the update's
gradients at the end.
"""

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


def weigh_losses(output: torch.Tensor, share: float, config: TransformerConfig) -> None:
    """Multiply the auxiliary losses of the micro-batch that a chunk made `output` of by its share.

    A micro-batch goes back through a chunk in one piece, from its output on, whatever is computed anew on the way: the
    factor is set there. The schedule's own, set when a micro-batch goes forward, is the same for all of them.
    """
    if not (config.moe_aux_loss_coeff or config.moe_z_loss_coeff):
        return
    # The gradient buffers divide by as many.
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    factor = torch.full((1,), float(share * replicas), device=output.device)
    if config.grad_scale_func is not None:
        factor = config.grad_scale_func(factor)
    output.register_hook(lambda _: MoEAuxLossAutoScaler.set_loss_scale(factor))


def take_losses() -> dict[str, float]:
    """This rank's part of each auxiliary loss since it was last taken, without its coefficient.

    Sums over micro-batches of means over layers; the parts of all ranks add up to the sums over all replicas.
    """
    recorded = _take_recorded()
    # Each rank has its own tokens' part of the one, and their mean of the other.
    num_means = {"load_balancing_loss": 1, "z_loss": parallel_state.get_tensor_and_context_parallel_world_size()}
    return {
        f"moe_{name}": sum(recorded[name]) / len(recorded[name]) / count
        for name, count in num_means.items()
        if name in recorded
    }


def _take_recorded() -> dict[str, list[float]]:
    """What Megatron's routers have recorded, a value a layer; from then on they start anew."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        entries = moe_utils.get_moe_metrics_tracker().metrics
        recorded = {name: entry.values.tolist() for name, entry in entries.items()}
    else:
        # megatron-core 0.16
        entries = moe_utils.get_moe_layer_wise_logging_tracker()
        recorded = {name: entry["values"].tolist() for name, entry in entries.items()}
    entries.clear()
    return recorded
