"""A worker of vLLM whose model is watched: what its parts compute is recorded, for `megatron-rl drift`."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.records.model_parts import LayerPart, ModelPart, join_rows
from megatron_rl.sidecar.vllm.worker import RpcAnswer, WorkerExtension, answered

EXTENSION = "megatron_rl.sidecar.vllm.watching.WatchingExtension"

Tensors = dict[str, torch.Tensor]
# A function from the inputs and the output of a module to the tensors that are kept.
_Read = Callable[[tuple[Any, ...], Any], Tensors]


class CannotWatch(MegatronRLError):
    """A model whose parts are not those that are known here."""


class WatchingExtension(WorkerExtension):
    """Mixed into vLLM's worker in place of `WorkerExtension`."""

    megatron_rl_watch_of: "ModelWatch | None" = None

    @answered
    def megatron_rl_watch(self) -> RpcAnswer:
        """Begin to record, from nothing."""
        if self.megatron_rl_watch_of is None:
            self.megatron_rl_watch_of = ModelWatch(self.model_runner.get_model())
        self.megatron_rl_watch_of.calls.clear()
        return {}

    @answered
    def megatron_rl_write_recording(self, folder: str) -> RpcAnswer:
        """Write what was recorded to a file of this rank's."""
        assert self.megatron_rl_watch_of is not None
        join_rows(self.megatron_rl_watch_of.calls).save(Path(folder) / f"rank-{self.rank}.safetensors")
        return {}


class ModelWatch:
    """Hooks in a vLLM model of layers with attention and an MLP or experts."""

    def __init__(self, model: Any) -> None:
        self.calls: list[tuple[LayerPart, Tensors]] = []
        base: Any = getattr(model, "model", None)
        if base is None or not hasattr(base, "layers") or not hasattr(model, "logits_processor"):
            raise CannotWatch(f"{type(model).__name__} has no layers that drift knows")
        self._watch(base.embed_tokens, ModelPart.EMBEDDING, -1, lambda given, out: {"tokens": given[0], "out": out})
        rotations: dict[torch.nn.Module, list[int]] = {}
        for number, layer in enumerate(base.layers):
            if not hasattr(getattr(layer, "self_attn", None), "qkv_proj") or not hasattr(layer, "mlp"):
                raise CannotWatch(f"layer {number} of {type(model).__name__} has no parts that drift knows")
            self._watch(layer.input_layernorm, ModelPart.ATTENTION_NORM, number, _read_norm)
            self._watch(layer.post_attention_layernorm, ModelPart.MLP_NORM, number, _read_norm)
            self._watch_attention(layer.self_attn, number)
            rotations.setdefault(layer.self_attn.rotary_emb, []).append(number)
            if hasattr(layer.mlp, "experts"):
                self._watch(layer.mlp, ModelPart.EXPERTS, number, lambda given, out: {"in": given[0], "out": out})
            else:
                self._watch_mlp(layer.mlp, number)
        for rotation, layers in rotations.items():
            self._watch_rotation(rotation, layers, base)
        self._watch(base.norm, ModelPart.LAST_NORM, -1, _read_norm)
        self._watch(model.logits_processor, ModelPart.LOGITS, -1, lambda given, out: {"in": given[1], "out": out})

    def _watch_attention(self, attention: Any, number: int) -> None:
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]

        def read_products(given: tuple[Any, ...], out: Any) -> Tensors:
            queries, keys, values = out[0].split(sizes, dim=-1)
            return {"in": given[0], "queries": queries, "keys": keys, "values": values}

        def read_attention(given: tuple[Any, ...], out: Any) -> Tensors:
            return {"queries": given[0], "keys": given[1], "values": given[2], "out": out}

        def read_heads(given: tuple[Any, ...], out: Any) -> Tensors:
            return {"in": given[0].flatten(1), "out": out.flatten(1)}

        self._watch(attention.qkv_proj, ModelPart.QKV, number, read_products)
        for name, part in (("q_norm", ModelPart.QUERY_NORM), ("k_norm", ModelPart.KEY_NORM)):
            if hasattr(attention, name):
                self._watch(getattr(attention, name), part, number, read_heads)
        self._watch(attention.attn, ModelPart.ATTENTION, number, read_attention)
        self._watch(attention.o_proj, ModelPart.ATTENTION_OUTPUT, number, _read_product)

    def _watch_mlp(self, mlp: Any, number: int) -> None:
        def read_products(given: tuple[Any, ...], out: Any) -> Tensors:
            gate, up = out[0].chunk(2, dim=-1)
            return {"in": given[0], "gate": gate, "up": up}

        def read_activation(given: tuple[Any, ...], out: Any) -> Tensors:
            gate, up = given[0].chunk(2, dim=-1)
            return {"gate": gate, "up": up, "out": out}

        self._watch(mlp.gate_up_proj, ModelPart.GATE_UP, number, read_products)
        self._watch(mlp.act_fn, ModelPart.ACTIVATION, number, read_activation)
        self._watch(mlp.down_proj, ModelPart.DOWN, number, _read_product)

    def _watch_rotation(self, rotation: torch.nn.Module, layers: list[int], base: Any) -> None:
        """ModelWatch a rotation that several layers share: its calls come in their order, in each pass of the model."""
        passed = [0]

        def read(given: tuple[Any, ...], out: Any) -> Tensors:
            passed[0] += 1
            return {
                "positions": given[0], "queries": given[1], "keys": given[2], "rotated queries": out[0],
                "rotated keys": out[1],
            }  # fmt: skip

        # vLLM calls the whole model in a way that passes hooks by, and its embedding once in each pass.
        base.embed_tokens.register_forward_pre_hook(lambda *_: passed.__setitem__(0, 0))
        self._watch(rotation, ModelPart.ROTATION, lambda: layers[passed[0] - 1], read)

    def _watch(self, module: torch.nn.Module, part: ModelPart, layer: int | Callable[[], int], read: _Read) -> None:
        given_to: list[tuple[Any, ...]] = []

        def before(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            # Some modules write over their inputs.
            given_to.append(tuple(_copy(one) for one in (*arguments, *named.values())))

        def after(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
            tensors = read(given_to.pop(), out)
            number = layer if isinstance(layer, int) else layer()
            self.calls.append(
                (LayerPart(part, number), {name: _copy(tensor).cpu() for name, tensor in tensors.items()})
            )

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _read_norm(given: tuple[Any, ...], out: Any) -> Tensors:
    """Read a norm, which may add a residual to its input first; the sum is kept exactly."""
    added = [one.double() for one in given if isinstance(one, torch.Tensor)]
    return {"in": functools.reduce(torch.add, added), "out": out[0] if isinstance(out, tuple) else out}


def _read_product(given: tuple[Any, ...], out: Any) -> Tensors:
    return {"in": given[0], "out": out[0] if isinstance(out, tuple) else out}
