"""A model that megatron-core's own parts make, adopted: our numbers, and refusals of what would be lost."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.config.settings import Settings
from megatron_rl.errors import UsageError
from megatron_rl.ops import qkv
from megatron_rl.trainer.mcore.model.adopt import adopt
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel, padded_vocab_size
from megatron_rl.trainer.mcore.session import Session, start_session
from tests import hf_models
from tests.distributed.layouts import divisor
from tests.distributed.parity import shared_packs
from tests.distributed.training import LAYOUTS, Training, settings_of, training_in
from tests.ranks import run_ranks

FLAGS = "--lr 1e-3 --lr-decay-style constant --clip-grad 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.draw("qwen3", tmp_path_factory.mktemp("adopted") / "model")


def provide(settings: Settings, kind: type = GPTModel, layer: type | None = None, **changes: Any) -> GPTModel:
    """Build a model as a recipe's provider does."""
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    if layer is not None:
        spec = ModuleSpec(module=layer, submodules=spec.submodules)
    architecture = settings.architecture
    options = {
        "vocab_size": padded_vocab_size(architecture.vocab_size, settings.parallel_sizes.tensor),
        "max_sequence_length": architecture.max_position_embeddings,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": architecture.tied_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": int(architecture.rope.base),
    }
    return kind(copy.copy(settings.transformer), spec, **(options | changes))


def build(settings: Settings, **changes: Any) -> list[PackedGPTModel]:
    return [adopt(provide(settings, **changes), settings.architecture, settings.attention.backend, "torch")]


def results(trained: Training) -> dict[str, torch.Tensor]:
    """Return log-probs and the gradients of an accumulation, and the weights after its update."""
    packs = shared_packs(divisor(trained.session.sizes))
    found = {f"log-probs {index}": values for index, values in enumerate(trained.forward(packs))}
    trained.accumulate()
    parameters = dict(trained.chunks[0].named_parameters())
    found |= {f"gradient of {name}": parameter.main_grad.clone() for name, parameter in parameters.items()}
    result = trained.policy.update(0.01)
    found["norm"] = torch.tensor(result.gradient_norm)
    return found | {name: parameter.detach().clone() for name, parameter in parameters.items()}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def compare(folder: Path, layout: str) -> list[str]:
    settings = settings_of(folder, f"{FLAGS} {LAYOUTS[layout]}")
    with start_session(settings) as session:
        return differences(
            results(training_in(session, settings)), results(training_in(session, settings, build_model=build))
        )


@pytest.mark.each_change
@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_an_adopted_model_computes_and_trains_as_ours_bit_for_bit(folder: Path, layout: str) -> None:
    assert run_ranks(compare, 2, folder, layout) == [[], []]


class DampedLayer(TransformerLayer):
    """A layer that only this recipe has."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, context = super().forward(*args, **kwargs)
        return 0.75 * hidden, context


class RenamedModel(GPTModel):
    """A recipe's own class, which changes what goes in."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        return super().forward(*args, **kwargs)


class OwnSelfAttention(SelfAttention):
    """A recipe's own class between the product of queries, keys and values and attention."""


class OwnPostprocess(GPTModel):
    """A recipe's own class, which changes what comes out."""

    def _postprocess(self, *args: Any, **kwargs: Any) -> Any:
        return super()._postprocess(*args, **kwargs)


class OwnAttention(DotProductAttention):
    """A recipe's own core attention."""


def try_changes(folder: Path) -> None:
    settings = settings_of(folder, FLAGS)
    with start_session(settings) as session:
        plain = results(training_in(session, settings))
        damped = training_in(session, settings, build_model=lambda _: build(settings, layer=DampedLayer))
        before = {name: parameter.detach().clone() for name, parameter in damped.chunks[0].named_parameters()}
        changed = results(damped)
        # Every log-prob, gradient and weight is another one, and all of them move.
        assert plain.keys() == set(differences(plain, changed))
        assert not any(torch.equal(values, changed[name]) for name, values in before.items())
        renamed = build(settings, kind=RenamedModel)[0]
        assert differences(plain, results(training_in(session, settings, build_model=lambda _: [renamed]))) == []
        assert renamed.was_called
        kinds, log_probs = fuse_heads(session, settings)
        assert kinds[:2] == ["FusedSelfAttention", "OwnSelfAttention"]
        assert all(torch.allclose(one, plain[f"log-probs {i}"], atol=1e-4) for i, one in enumerate(log_probs))
        for text, chunk in refusable(settings):
            with pytest.raises(UsageError, match=re.escape(text)):
                adopt(chunk, settings.architecture, "naive", "torch")


def fuse_heads(session: Session, settings: Settings) -> tuple[list[str], list[torch.Tensor]]:
    """Adopt a model for the kernel that splits heads; return the classes of attention, and the model's log-probs."""
    chunk = provide(settings)
    attention: Any = chunk.decoder.layers[1].self_attention
    attention.__class__ = OwnSelfAttention
    fused = adopt(chunk, settings.architecture, "naive", "torch", qkv_backend="triton")
    trained = training_in(session, settings, build_model=lambda _: [fused])
    # The kernel runs on GPUs; its definition takes its place.
    with mock.patch.dict(qkv.BACKENDS, triton=qkv.naive):
        log_probs = trained.forward(shared_packs(1))
    return [type(layer.self_attention).__name__ for layer in fused.decoder.layers], log_probs


def refusable(settings: Settings) -> Iterator[tuple[str, torch.nn.Module]]:
    """Build models of which something would be lost; yield each with the reason that names it."""
    with_parameters, with_own, without, biased = (provide(settings) for _ in range(4))
    attention: Any = with_parameters.decoder.layers[1].self_attention
    attention.core_attention.register_parameter("offset", torch.nn.Parameter(torch.zeros(4)))
    yield "the core attention of layer 2 must not have parameters (offset)", with_parameters
    attention = with_own.decoder.layers[0].self_attention
    attention.core_attention.__class__ = OwnAttention
    yield "the core attention of layer 1, OwnAttention, is the recipe's own and would not be called", with_own
    del without.decoder.layers[0].self_attention.core_attention
    yield "layer 1, a TransformerLayer, must have a self_attention.core_attention to replace", without
    biased.output_layer.bias = torch.nn.Parameter(torch.zeros(2))
    yield "without a bias, not an output layer with a bias", biased
    postprocess = provide(settings, kind=OwnPostprocess)
    yield "OwnPostprocess._postprocess is the recipe's own and would not be called", postprocess
    yield "rotary frequencies differ from config.json's", provide(settings, rotary_base=500_000)
    yield "rotary frequencies differ from config.json's", provide(settings, rotary_percent=0.5)
    yield (
        "position embeddings must be rotary, not of type 'none'", provide(settings, position_embedding_type="none")
    )  # fmt: skip
    yield "the recipe's vocabulary of 128 must have the 131 tokens", provide(settings, vocab_size=128)
    yield "the recipe builds a Linear", torch.nn.Linear(2, 2)


@pytest.mark.each_change
def test_a_recipes_own_layer_trains_and_what_would_be_lost_is_refused_by_name(folder: Path) -> None:
    run_ranks(try_changes, 1, folder)
