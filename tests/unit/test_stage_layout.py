"""Layouts of a stage's tensors: the parts of all senders, put together by the layout alone, are the whole tensors."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.errors import InputError
from megatron_rl.shared.weights import stage_layout
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import Coordinates, Mapping, TensorSpec
from megatron_rl.shared.weights.shards import Shard, StageRank
from megatron_rl.shared.weights.stage_layout import LaidOutTensor, StageLayout, lay_out_stage, list_sent_parts
from megatron_rl.types import Architecture
from tests import hf_models

# What is not sent from where it lies: experts on one of two ranks, and tensors with several kinds of rows.
GATHERED = (".experts.", ".conv1d.", ".in_proj_qkv.")


def read(model: str, folder: Path, **changes: object) -> Architecture:
    make, settings = hf_models.CONFIGS[model]
    make(**{**hf_models._SIZES, **settings, **changes}).save_pretrained(folder)
    return read_architecture(folder)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks of a model: stages of replicas of tensor-parallel ranks."""

    architecture: Architecture
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    padding: int = 0

    @property
    def padded_vocab_size(self) -> int:
        return self.architecture.vocab_size + self.padding

    def peers(self, stage: int) -> list[StageRank]:
        """List the ranks of a stage: experts are divided over replicas, and not over tensor-parallel ranks."""
        mapping, size = Mapping(self.architecture), self.tensor * self.data
        peers = []
        for place in range(size):
            coordinates = Coordinates(
                tensor_rank=place % self.tensor,
                tensor_size=self.tensor,
                pipeline_rank=stage,
                data_rank=place // self.tensor,
                expert_rank=place % self.expert,
                expert_size=self.expert,
                expert_data_rank=place // self.expert,
            )
            names = tuple(self._list_names(mapping, stage, coordinates.expert_rank))
            peers.append(StageRank(stage * size + place, coordinates, names))
        return peers

    def _list_names(self, mapping: Mapping, stage: int, expert_rank: int) -> Iterator[str]:
        of_stage, of_rank = self.architecture.num_layers // self.pipeline, 0
        if self.architecture.experts is not None:
            of_rank = self.architecture.experts.num_experts // self.expert
        for name, layer, expert in mapping._instances():
            if expert is not None and expert // of_rank != expert_rank:
                continue
            # With tied embeddings the last stage has a copy, its output layer.
            outer = 0 if name.parameters[0].startswith("embedding") else self.pipeline - 1
            if stage == (outer if layer is None else layer // of_stage):
                yield name.parameters[0].format(layer=layer, expert=expert)

    def draw(self) -> dict[str, torch.Tensor]:
        """Make every tensor of the checkpoint, with a number for each of all elements."""
        mapping = Mapping(self.architecture)
        specs = mapping.manifest()
        starts = torch.tensor([0, *(spec.num_elements for spec in specs)]).cumsum(0).tolist()
        return {
            spec.name: torch.arange(start, start + spec.num_elements, dtype=torch.float64).reshape(spec.shape)
            for spec, start in zip(specs, starts[:-1], strict=True)
        }

    def hold(self, peer: StageRank, whole: dict[str, torch.Tensor]) -> list[Shard]:
        """Fill the parameters of a rank from the whole tensors."""
        shards = []
        for name in peer.parameter_names:
            found = Mapping(self.architecture).shard(name, peer.coordinates, self.padded_vocab_size)
            parameter = torch.full(found.shape, math.nan, dtype=torch.float64)
            for piece in found.pieces:
                source = whole[piece.name].narrow(piece.dim, piece.source, piece.length)
                parameter.narrow(piece.dim, piece.target, piece.length).copy_(source)
            shards.append(Shard(name, parameter, found))
        return shards


def put_together(ranks: Ranks, stage: int, layout: StageLayout, whole: dict[str, torch.Tensor]) -> set[str]:
    """Compare what senders have with the whole tensors; return the names of what is sent from where it lies."""
    tensors = [
        dataclasses.replace(tensor, spec=dataclasses.replace(tensor.spec, dtype="float64")) for tensor in layout.tensors
    ]
    peers = {peer.rank: peer for peer in ranks.peers(stage)}
    parts = [dict(list_sent_parts(ranks.hold(peers[rank], whole), tensors)) for rank in layout.senders]
    direct = [tensor for tensor in tensors if not tensor.is_gathered]
    for tensor in direct:
        name, of_tensor = tensor.spec.name, [own[tensor.spec.name] for own in parts]
        assert all(part.is_contiguous() for part in of_tensor)
        if tensor.dim is None:
            assert all(torch.equal(part, whole[name]) for part in of_tensor), name
        else:
            # As the receivers of NCCL M2N do: equal parts in the order of the ranks.
            assert len({part.shape for part in of_tensor}) == 1, name
            assert torch.equal(torch.cat(of_tensor, tensor.dim), whole[name]), name
    assert [list(own) for own in parts] == [[tensor.spec.name for tensor in direct]] * len(parts)
    return {tensor.spec.name for tensor in direct}


# Tied embeddings, biases, sinks, latent attention, linear layers, shared experts and experts with biases.
MODELS = ("qwen2", "qwen3", "gpt_oss", "glm4_moe", "deepseek_v3", "qwen3_next", "llama_biased", "qwen2_moe")
LAYOUTS = {
    "TP1": {},
    "TP2": {"tensor": 2},
    "TP2xPP2": {"tensor": 2, "pipeline": 2},
    "TP2xDP2": {"tensor": 2, "data": 2},
}


@pytest.mark.parametrize("model", MODELS)
def test_parts_put_together_by_their_layout_are_the_whole_tensors(model, tmp_path):
    architecture = read(model, tmp_path, vocab_size=132, num_hidden_layers=4)
    experts = 2 if architecture.experts else 1
    for name, sizes in LAYOUTS.items():
        ranks = Ranks(architecture, **sizes, expert=experts if sizes.get("data", 1) * sizes.get("tensor", 1) > 1 else 1)
        whole, sent = ranks.draw(), []
        for stage in range(ranks.pipeline):
            peers = ranks.peers(stage)
            layout = lay_out_stage(Mapping(architecture), peers, ranks.padded_vocab_size)
            assert layout.senders == tuple(peer.rank for peer in peers[: ranks.tensor])
            direct = put_together(ranks, stage, layout, whole)
            gathered = layout.gathered
            assert all(any(part in tensor for part in GATHERED) for tensor in gathered), (name, sorted(gathered)[:3])
            assert any(GATHERED[0] in tensor for tensor in gathered) == (ranks.expert > 1)
            sent += [*direct, *gathered]
        # Every tensor is sent by one stage, and tied tensors once.
        assert sorted(sent) == sorted(whole), name


def test_a_dense_model_is_divided_as_megatron_divides_it(tmp_path):
    architecture = read("qwen3", tmp_path, vocab_size=132)
    layout = lay_out_stage(Mapping(architecture), Ranks(architecture, tensor=2).peers(0), 132)
    dims = {tensor.spec.name.removeprefix("model.").replace("layers.0.", ""): tensor.dim for tensor in layout.tensors}
    assert {name: dim for name, dim in dims.items() if "layers" not in name} == {
        "embed_tokens.weight": 0, "lm_head.weight": 0, "norm.weight": None,
        "input_layernorm.weight": None, "post_attention_layernorm.weight": None,
        "self_attn.q_proj.weight": 0, "self_attn.k_proj.weight": 0, "self_attn.v_proj.weight": 0,
        "self_attn.q_norm.weight": None, "self_attn.k_norm.weight": None, "self_attn.o_proj.weight": 1,
        "mlp.gate_proj.weight": 0, "mlp.up_proj.weight": 0, "mlp.down_proj.weight": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("vocab_size", "padding"), [(131, 1), (132, 4)])
def test_a_vocabulary_whose_padding_moves_the_ranks_borders_is_gathered(vocab_size, padding, tmp_path):
    architecture = read("qwen3", tmp_path, vocab_size=vocab_size)
    ranks = Ranks(architecture, tensor=2, padding=padding)
    layout = lay_out_stage(Mapping(architecture), ranks.peers(0), ranks.padded_vocab_size)
    assert layout.gathered == {"model.embed_tokens.weight", "lm_head.weight"}
    assert [tensor.is_gathered for tensor in layout.tensors[-3:]] == [False, True, True]
    put_together(ranks, 0, layout, ranks.draw())


def test_parts_have_the_dtype_of_the_export(tmp_path):
    architecture = read("glm4_moe", tmp_path)
    ranks = Ranks(architecture)
    layout = lay_out_stage(Mapping(architecture), ranks.peers(0), ranks.padded_vocab_size, "bfloat16")
    parts = dict(list_sent_parts(ranks.hold(ranks.peers(0)[0], ranks.draw()), layout.tensors))
    assert {tensor.spec.dtype for tensor in layout.tensors} == {"bfloat16", "float32"}
    assert all(parts[tensor.spec.name].dtype == DTYPES[tensor.spec.dtype] for tensor in layout.tensors)


def test_more_senders_than_a_receiver_takes_are_refused(tmp_path):
    architecture = dataclasses.replace(read("qwen3", tmp_path), num_attention_heads=32, num_query_groups=32)
    with pytest.raises(InputError, match="32 tensor-parallel ranks are more than the 16"):
        lay_out_stage(Mapping(architecture), Ranks(architecture, tensor=32).peers(0), 160)


def test_a_tensor_of_too_many_dimensions_is_refused_by_name(monkeypatch, tmp_path):
    architecture = read("qwen3", tmp_path)
    monkeypatch.setattr(stage_layout, "MOST_DIMENSIONS", 1)
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight has 2 dimensions.*--rollout-transport nccl"):
        lay_out_stage(Mapping(architecture), Ranks(architecture).peers(0), architecture.vocab_size)


def test_pieces_with_a_gap_or_out_of_order_over_the_ranks_are_gathered():
    spec = TensorSpec("t", (8, 2), "float32")
    piece = stage_layout.Piece
    first, second = [piece("t", 0, 0, 0, 4)], [piece("t", 0, 4, 0, 4)]
    assert stage_layout._lay_out(spec, "p", [first, second]) == LaidOutTensor(spec, "p", 0)
    with_gap = [piece("t", 0, 0, 0, 2), piece("t", 0, 3, 2, 1)]
    uneven = [[piece("t", 0, 0, 0, 5)], [piece("t", 0, 5, 0, 3)]]
    of_two_dims = [first, [piece("t", 1, 0, 0, 2)]]
    for held in ([second, first], [first, first], [first, []], [with_gap, second], uneven, of_two_dims):
        assert stage_layout._lay_out(spec, "p", held).is_gathered
