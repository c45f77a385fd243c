"""The critic: a model of its own, or a linear layer on the policy.

The layer reads the policy's last hidden states, in the policy's pass.

Letters: M targets that this rank's rows predict, E hidden size.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from megatron_rl.algorithm.declaration import HEAD
from megatron_rl.config.settings import Settings
from megatron_rl.errors import InputError
from megatron_rl.platforms import select
from megatron_rl.shared.weights.files import Checkpoint
from megatron_rl.shared.weights.mapping import BIAS, SCORE
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel, build_model
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.policy import Policy, Trainable, prepare_training


def build_critic(settings: Settings, session: Session, num_updates: int) -> Trainable:
    """Build the critic with its first weights and a fresh optimizer; the settings are its own."""
    if settings.algorithm.critic == HEAD:
        head = build_critic_chunks(settings)
        return Trainable(head, *prepare_training(settings, head, num_updates), start=HEAD)
    chunks, folder = build_model(settings), settings.model.hf_model
    assert folder is not None
    weights = ModelWeights(chunks, session)
    weights.load_hf(folder)
    session.run_or_raise_everywhere(lambda: _load_values(chunks[-1], folder))
    trained = prepare_training(settings, chunks, num_updates)
    return Policy(chunks, *trained, weights, start=weights.fingerprint())


def build_critic_chunks(settings: Settings) -> Sequence[MegatronModule]:
    """Build the chunks of a critic, a model or a head on the policy; a model's weights are not filled yet."""
    if settings.algorithm.critic != HEAD:
        return build_model(settings)
    with select(settings.platform).device():
        return [PolicyHead(settings.transformer)]


def _load_values(chunk: PackedGPTModel, folder: Path) -> None:
    """Load the output layer of a critic, if the folder has that of a classifier with one number."""
    with Checkpoint(folder) as checkpoint:
        if not chunk.post_process or SCORE not in checkpoint.names():
            return
        if BIAS in checkpoint.names():
            raise InputError(f"--critic {folder}: a critic's output layer has no {BIAS}: write a folder without it")
        place, values = chunk.output_weight(), checkpoint.tensor(SCORE)
        if place.shape != values.shape:
            raise InputError(
                f"--critic {folder}: {SCORE} has shape {list(values.shape)}, and a critic's has {list(place.shape)}: "
                f"write a classifier with one number, or a language model"
            )
        place.data.copy_(values)


class PolicyHead(MegatronModule):
    """The layer, whole on each rank; its values are 0 until it learns.

    The last stage computes with it. Other stages have a copy, because a checkpoint has from rank 0 what ranks have in
    common, such as an optimizer's steps, and cannot be read into a stage that has nothing.
    """

    # By these names Megatron asks for a tied embedding.
    pre_process, share_embeddings_and_output_weights = True, False

    def __init__(self, config: TransformerConfig) -> None:
        # A copy, because Megatron stores the functions of an optimizer in it. A head has no routers to update.
        config = copy.copy(config)
        config.moe_router_enable_expert_bias = False
        # By this name, and the weight's attribute, Megatron adds up the gradients of all stages' copies.
        config.has_cond_embedder = True
        super().__init__(config)
        self.post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.pipeline_parallel = True  # type: ignore[attr-defined]
        # The norm of gradients counts it once.
        self.weight.shared = not self.post_process  # type: ignore[attr-defined]
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(self.weight)

    def forward(self, hidden_ME: torch.Tensor) -> torch.Tensor:
        """Compute values [M]."""
        return (hidden_ME.float() @ self.weight.float().t()).squeeze(1)

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> dict[str, ShardedTensor]:
        """Describe the weight, which one rank writes."""
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        stage = 0 if self.post_process else 1 + parallel_state.get_pipeline_model_parallel_rank()
        replica_id = (stage, tensor_rank, replica)
        return {
            name: ShardedTensor.from_rank_offsets(f"{prefix}head.{name}", parameter, replica_id=replica_id)
            for name, parameter in self.named_parameters()
        }
