"""The auxiliary losses of routers: how much a micro-batch's count in its update.

Megatron adds their gradients on the way back, times a factor that all of its routers share. An update's auxiliary
gradient is the mean over its micro-batches, each weighed by its share of the denominator that divides the update's
gradients at the end.
"""

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


def weigh(output: torch.Tensor, share: float, config: TransformerConfig) -> None:
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
