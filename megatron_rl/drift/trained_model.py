"""Hooks in the trainer's model, which record what its parts compute for one sequence, for `megatron-rl drift`.

A rank records the heads and columns that it has. Letters: R rows, C columns of the product, G key-value heads of this
rank, H heads with one of them, D dimensions of a head, E hidden size, M targets.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_rl.errors import InputError
from megatron_rl.shared.records.model_parts import LayerPart, ModelPart, Recording, join_rows
from megatron_rl.trainer.mcore.model.attention import PackParams
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel

Tensors = dict[str, torch.Tensor]


class TrainedModelWatch:
    """Hooks in a whole model of layers with attention and an MLP or experts."""

    def __init__(self, model: PackedGPTModel) -> None:
        self._calls: list[tuple[LayerPart, Tensors]] = []
        self._positions_R = torch.empty(0)
        config = model.config
        assert config.num_query_groups is not None
        if config.num_query_groups < config.tensor_model_parallel_size:
            raise InputError(
                f"tensor-parallel ranks share key heads: {config.num_query_groups} heads, and "
                f"{config.tensor_model_parallel_size} ranks, whose parts drift cannot tell apart"
            )
        model.register_forward_pre_hook(self._begin)
        self._watch(model.embedding.word_embeddings, self._read_embedding)
        for layer in model.decoder.layers:
            # Megatron counts layers from one.
            self._watch_layer(layer, layer.layer_number - 1)
        self._watch(model.decoder.final_layernorm, self._read_norm(ModelPart.LAST_NORM, -1))
        compute = model._log_probs
        model._log_probs = self._read_log_probs(compute)  # type: ignore[method-assign]

    def take(self, num_tokens: int) -> Recording:
        """Return what was recorded since the last call, without rows beyond the tokens."""
        calls, self._calls = self._calls, []
        return join_rows(
            (point, {name: tensor[:num_tokens] for name, tensor in tensors.items()}) for point, tensors in calls
        )

    def _begin(self, _: torch.nn.Module, given: tuple[Any, ...]) -> None:
        self._positions_R = given[0].positions_T

    def _keep(self, part: ModelPart, layer: int, **tensors: torch.Tensor) -> None:
        self._calls.append((LayerPart(part, layer), {name: tensor.cpu() for name, tensor in tensors.items()}))

    def _watch(self, module: torch.nn.Module, read: Callable[[tuple[Any, ...], Any], None]) -> None:
        module.register_forward_hook(lambda _, given, out: read(given, out))

    def _watch_layer(self, layer: Any, number: int) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        if not hasattr(attention, "linear_qkv") or hasattr(attention, "q_norm"):
            raise InputError(f"layer {number} has a {type(attention).__name__}, whose parts drift does not know")
        if has_norm := _has_weights(layer.input_layernorm):
            self._watch(layer.input_layernorm, self._read_norm(ModelPart.ATTENTION_NORM, number))
        self._watch_attention(attention, number, ModelPart.QKV if has_norm else ModelPart.NORMED_QKV)
        if has_norm := _has_weights(layer.pre_mlp_layernorm):
            self._watch(layer.pre_mlp_layernorm, self._read_norm(ModelPart.MLP_NORM, number))
        if hasattr(mlp, "linear_fc1"):
            self._watch_mlp(mlp, number, ModelPart.GATE_UP if has_norm else ModelPart.NORMED_GATE_UP)
        else:
            self._watch(
                mlp,
                lambda given, out: self._keep(
                    ModelPart.EXPERTS, number, **{"in": _rows(given[0]), "out": _rows(_add_bias(out))}
                ),
            )

    def _watch_attention(self, attention: Any, number: int, part: ModelPart) -> None:
        # The heads as they are before the rotation.
        heads: Tensors = {}
        have_norms = _has_weights(attention.q_layernorm)
        are_normed: set[str] = set()

        def read_products(given: tuple[Any, ...], out: Any) -> None:
            queries, keys, values = split_products(
                _rows(_add_bias(out)),
                attention.num_query_groups_per_partition,
                attention.hidden_size_per_attention_head,
            )
            are_normed.clear()
            heads.update(queries=queries, keys=keys)
            self._keep(part, number, **{"in": _rows(given[0])}, queries=queries, keys=keys, values=values)

        def read_norm(name: str, of_heads: ModelPart) -> Callable[[tuple[Any, ...], Any], None]:
            def read(given: tuple[Any, ...], out: Any) -> None:
                self._keep(of_heads, number, **{"in": _rows(given[0]), "out": _rows(out)})
                heads[name] = _rows(out)
                are_normed.add(name)

            return read

        def read_attention(given: tuple[Any, ...], out: Any) -> None:
            queries, keys, values = (_rows(one) for one in given[:3])
            # A kernel that normalizes and rotates heads calls no norm.
            is_joined = have_norms and not are_normed
            self._keep(
                ModelPart.NORMED_ROTATION if is_joined else ModelPart.ROTATION, number,
                positions=self._positions_R, **heads, **{"rotated queries": queries, "rotated keys": keys},
            )  # fmt: skip
            self._keep(ModelPart.ATTENTION, number, queries=queries, keys=keys, values=values, out=_rows(out))

        self._watch(attention.linear_qkv, read_products)
        if have_norms:
            self._watch(attention.q_layernorm, read_norm("queries", ModelPart.QUERY_NORM))
            self._watch(attention.k_layernorm, read_norm("keys", ModelPart.KEY_NORM))
        self._watch(attention.core_attention, read_attention)
        self._watch(attention.linear_proj, self._read_product(ModelPart.ATTENTION_OUTPUT, number))

    def _watch_mlp(self, mlp: Any, number: int, part: ModelPart) -> None:
        widened: Tensors = {}

        def read_products(given: tuple[Any, ...], out: Any) -> None:
            gate, up = _rows(_add_bias(out)).chunk(2, dim=-1)
            widened.update(gate=gate, up=up)
            self._keep(part, number, **{"in": _rows(given[0])}, **widened)

        def read_down(given: tuple[Any, ...], out: Any) -> None:
            self._keep(ModelPart.ACTIVATION, number, **widened, out=_rows(given[0]))
            self._read_product(ModelPart.DOWN, number)(given, out)

        self._watch(mlp.linear_fc1, read_products)
        self._watch(mlp.linear_fc2, read_down)

    def _read_embedding(self, given: tuple[Any, ...], out: Any) -> None:
        tokens_R = given[0].flatten()
        self._keep(ModelPart.EMBEDDING, -1, tokens=tokens_R, out=out.reshape(len(tokens_R), -1))

    def _read_norm(self, part: ModelPart, number: int) -> Callable[[tuple[Any, ...], Any], None]:
        def read(given: tuple[Any, ...], out: Any) -> None:
            # With a residual, a norm of ours is called to add, and its own call follows.
            if len(given) == 1:
                self._keep(part, number, **{"in": _rows(given[0]), "out": _rows(out)})

        return read

    def _read_product(self, part: ModelPart, number: int) -> Callable[[tuple[Any, ...], Any], None]:
        return lambda given, out: self._keep(part, number, **{"in": _rows(given[0]), "out": _rows(_add_bias(out))})

    def _read_log_probs(self, compute: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def read(
            hidden_RE: torch.Tensor, rows_M: torch.Tensor, tokens_M: torch.Tensor, params: PackParams
        ) -> torch.Tensor:
            out_M = compute(hidden_RE, rows_M, tokens_M, params)
            hidden_ME = hidden_RE.index_select(0, rows_M)
            self._keep(ModelPart.LOG_PROBS, -1, **{"in": hidden_ME}, tokens=tokens_M, out=out_M)
            return out_M

        return read


def split_products(mixed_RC: torch.Tensor, num_groups: int, head_dim: int) -> Iterator[torch.Tensor]:
    """Yield queries, keys and values, of rows in which each key head follows the queries that share it."""
    mixed_RGHD = mixed_RC.unflatten(1, (num_groups, -1, head_dim))
    sizes = [mixed_RGHD.shape[2] - 2, 1, 1]
    return (part_RGHD.flatten(1) for part_RGHD in mixed_RGHD.split(sizes, dim=2))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of [R, 1, ...] or [R, ...] as [R, ...], its last dimensions joined."""
    return tensor.detach().flatten(1).clone()


def _add_bias(out: Any) -> torch.Tensor:
    """Return the output of a module that may leave its bias to the caller."""
    if isinstance(out, torch.Tensor):
        return out
    whole, bias = out
    return whole if bias is None else whole + bias


def _has_weights(norm: Any) -> bool:
    """Check that this is a norm, and not what stands for one where another module normalizes."""
    return isinstance(norm, torch.nn.Module) and next(norm.parameters(), None) is not None
