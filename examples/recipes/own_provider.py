"""A pretraining script with a model provider of its own: the branches of its layers are scaled down with depth.

    torchrun --standalone -m megatron_rl.recipe examples/recipes/own_provider.py FLAGS    trains it with GRPO
    torchrun --standalone examples/recipes/own_provider.py FLAGS                          pretrains as without us

It is written for trees of core 0.16 and 0.17, which must be on PYTHONPATH. Engines must compute the same: see
docs/recipes.md.
"""

import math

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args


class ScaledLayer(TransformerLayer):
    """A layer that divides its part of the sum by the root of its number."""

    def forward(self, hidden_states, *args, **kwargs):
        output, context = super().forward(hidden_states, *args, **kwargs)
        return hidden_states + (output - hidden_states) / math.sqrt(self.layer_number), context


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """Build one stage of the model."""
    args = get_args()
    stock = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=ModuleSpec(module=ScaledLayer, submodules=stock.submodules),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def train_valid_test_datasets_provider(train_val_test_num_samples):
    """Build the pretraining data, which GRPO does not ask for."""
    raise NotImplementedError("put in the data set of the pretraining run")


def forward_step(data_iterator, model):
    """Compute the pretraining loss, which GRPO does not ask for."""
    raise NotImplementedError("put in the forward step of the pretraining run")


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
