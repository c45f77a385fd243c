"""The definition of each part of a model, from its checkpoint, by transformers.

A part is computed alone, from the inputs that an engine's part had. So its error is its own, and not that of the parts
before it. The same is computed in float64, for the truth, and in the engine's precision, for what rounding does.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import InputError
from megatron_rl.shared.records.model_parts import TEMPERATURE, LayerPart, ModelPart, Tensors

FP8 = torch.float8_e4m3fn


class Definition:
    """The parts of a checkpoint's model, in one precision."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        weights_dtype: torch.dtype | None = None,
        quantizes: bool = False,
        cuts: bool = False,
    ) -> None:
        """Load it; with `weights_dtype`, its weights are first rounded to this precision.

        If it quantizes, numbers that the layers' products and attention multiply are first rounded to 8-bit floats; if
        it cuts, those of attention are cut off, as vLLM does on CPUs.
        """
        # Imported here: it takes a second.
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.folder = folder
        self.dtype = dtype
        # The faster way for experts has no float64.
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=weights_dtype or dtype, attn_implementation="eager", experts_implementation="eager"
        )
        self.model = self.model.to(dtype).eval()
        self.base = self.model.model
        if not all(_is_known(layer) for layer in getattr(self.base, "layers", ())):
            raise InputError(
                f"{folder}: {type(self.model).__name__} has other parts than attention and an MLP or experts with the "
                "names of Llama and Qwen, which alone are known here"
            )
        self._family = importlib.import_module(type(self.model).__module__)
        self.quantizes, self.cuts = quantizes, cuts
        if quantizes:
            for module in self.base.layers.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.data = round_rows(module.weight.data)
                    module.register_forward_pre_hook(lambda _, given: (round_rows(given[0]),))

    def compute(self, point: LayerPart, given: Tensors) -> dict[str, torch.Tensor]:
        """Compute the outputs of a point from its inputs."""
        inputs = {
            name: tensor.to(self.dtype) if tensor.is_floating_point() and name != TEMPERATURE else tensor
            for name, tensor in given.items()
        }
        layer = self.base.layers[point.layer] if point.layer >= 0 else None
        with torch.no_grad():
            return _COMPUTE[point.part](self, layer, inputs)

    def rotate(self, queries: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> tuple[Any, Any]:
        """Rotate queries and keys of B x H x T x D, for positions of B x T."""
        cos, sin = self.base.rotary_emb(queries, positions)
        if self.dtype == torch.float64:
            cos, sin = self._angles(positions)
        return self._family.apply_rotary_pos_emb(queries, keys, cos, sin)

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the angles in float64, which transformers computes in float32."""
        rotary = self.base.rotary_emb
        angles = positions[..., None].double() * rotary.inv_freq.double()
        both = torch.cat([angles, angles], dim=-1)
        return both.cos() * rotary.attention_scaling, both.sin() * rotary.attention_scaling

    def norm(self, module: Any, given: torch.Tensor) -> torch.Tensor:
        """Compute a norm; in float64 throughout, where transformers computes in float32."""
        if self.dtype != torch.float64:
            return module(given)
        epsilon = getattr(module, "variance_epsilon", None) or module.eps
        return module.weight * given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + epsilon)


def round_rows(values: torch.Tensor) -> torch.Tensor:
    """Round to 8-bit floats, with a scale for each row that uses their range whole."""
    scales = values.abs().amax(dim=-1, keepdim=True) / torch.finfo(FP8).max
    scales = scales.where(scales > 0, 1)
    return (values / scales).to(FP8).to(values.dtype) * scales


def round_numbers(values: torch.Tensor, cuts: bool) -> torch.Tensor:
    """Round to 8-bit floats without a scale, to the nearest or, if it cuts, towards zero."""
    rounded = values.to(FP8)
    if cuts:
        # The bits below the sign are ordered as the numbers are.
        is_over = rounded.to(values.dtype).abs() > values.abs()
        rounded = (rounded.view(torch.uint8) - is_over.to(torch.uint8)).view(FP8)
    return rounded.to(values.dtype)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Attend over B x H x T x D, each head of keys and values for as many of queries as there are; softmax as given."""
    repeats, length = queries.shape[1] // keys.shape[1], queries.shape[2]
    keys, values = (one.repeat_interleave(repeats, dim=1) for one in (keys, values))
    rows = torch.arange(length)
    unseen = rows[:, None] < rows[None, :]
    if window is not None:
        unseen |= rows[:, None] - rows[None, :] >= window
    scores = (queries @ keys.transpose(2, 3) * scaling).masked_fill(unseen, -torch.inf)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(scores.dtype) @ values


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-prob of each token under its row of logits, in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def _is_known(layer: Any) -> bool:
    attention = getattr(layer, "self_attn", None)
    if hasattr(layer, "pre_feedforward_layernorm"):
        return False
    has_mlp = hasattr(layer, "mlp") and (hasattr(layer.mlp, "experts") or hasattr(layer.mlp, "gate_proj"))
    return has_mlp and all(hasattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "scaling"))


Outputs = dict[str, torch.Tensor]
_Compute = Callable[[Definition, Any, Outputs], Outputs]


def _heads(definition: Definition, tensor: torch.Tensor) -> torch.Tensor:
    """Return T x H*D as 1 x H x T x D."""
    dim = definition.base.layers[0].self_attn.head_dim
    return tensor.unflatten(1, (-1, dim)).transpose(0, 1)[None]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return 1 x H x T x D as T x H*D."""
    return tensor[0].transpose(0, 1).flatten(1)


def _of_norm(name: str) -> _Compute:
    return lambda definition, layer, given: {"out": definition.norm(getattr(layer, name), given["in"])}


def _after_norm(name: str, compute: _Compute) -> _Compute:
    def compute_after(definition: Definition, layer: Any, given: Outputs) -> Outputs:
        return compute(definition, layer, {"in": definition.norm(getattr(layer, name), given["in"])})

    return compute_after


def _of_head_norm(name: str) -> _Compute:
    def compute(definition: Definition, layer: Any, given: Outputs) -> Outputs:
        heads = _heads(definition, given["in"])
        return {"out": _flat(definition.norm(getattr(layer.self_attn, name), heads))}

    return compute


def _products(definition: Definition, layer: Any, given: Outputs) -> Outputs:
    one = layer.self_attn
    names = (("queries", one.q_proj), ("keys", one.k_proj), ("values", one.v_proj))
    return {name: module(given["in"]) for name, module in names}


def _rotation(definition: Definition, layer: Any, given: Outputs) -> Outputs:
    queries, keys = (_heads(definition, given[name]) for name in ("queries", "keys"))
    queries, keys = definition.rotate(queries, keys, given["positions"][None])
    return {"rotated queries": _flat(queries), "rotated keys": _flat(keys)}


def _normed_rotation(definition: Definition, layer: Any, given: Outputs) -> Outputs:
    normed = {
        name: _of_head_norm(norm)(definition, layer, {"in": given[name]})["out"]
        for name, norm in (("queries", "q_norm"), ("keys", "k_norm"))
        if hasattr(layer.self_attn, norm)
    }
    return _rotation(definition, layer, {**given, **normed})


def _widen(_: Definition, layer: Any, given: Outputs) -> Outputs:
    return {"gate": layer.mlp.gate_proj(given["in"]), "up": layer.mlp.up_proj(given["in"])}


def _log_probs(definition: Definition, _: Any, given: Outputs) -> Outputs:
    logits = definition.model.lm_head(given["in"])
    return {"out": score_tokens(logits, given["tokens"], float(given[TEMPERATURE]))}


def _attention(definition: Definition, layer: Any, given: Outputs) -> Outputs:
    one = layer.self_attn
    queries, keys, values = (_heads(definition, given[name]) for name in ("queries", "keys", "values"))
    if definition.quantizes:
        keys, values = (round_numbers(one, definition.cuts) for one in (keys, values))
    return {"out": _flat(attend(queries, keys, values, one.scaling, getattr(one, "sliding_window", None)))}


def _experts(definition: Definition, layer: Any, given: Outputs) -> Outputs:
    out = layer.mlp(given["in"][None])
    return {"out": (out[0] if isinstance(out, tuple) else out)[0]}


_COMPUTE: dict[ModelPart, _Compute] = {
    ModelPart.EMBEDDING: lambda definition, layer, given: {"out": definition.base.embed_tokens(given["tokens"])},
    ModelPart.ATTENTION_NORM: _of_norm("input_layernorm"),
    ModelPart.QKV: _products,
    ModelPart.NORMED_QKV: _after_norm("input_layernorm", _products),
    ModelPart.QUERY_NORM: _of_head_norm("q_norm"),
    ModelPart.KEY_NORM: _of_head_norm("k_norm"),
    ModelPart.ROTATION: _rotation,
    ModelPart.NORMED_ROTATION: _normed_rotation,
    ModelPart.ATTENTION: _attention,
    ModelPart.ATTENTION_OUTPUT: lambda definition, layer, given: {"out": layer.self_attn.o_proj(given["in"])},
    ModelPart.MLP_NORM: _of_norm("post_attention_layernorm"),
    ModelPart.GATE_UP: _widen,
    ModelPart.NORMED_GATE_UP: _after_norm("post_attention_layernorm", _widen),
    ModelPart.ACTIVATION: lambda definition, layer, given: {"out": layer.mlp.act_fn(given["gate"]) * given["up"]},
    ModelPart.DOWN: lambda definition, layer, given: {"out": layer.mlp.down_proj(given["in"])},
    ModelPart.EXPERTS: _experts,
    ModelPart.LAST_NORM: lambda definition, layer, given: {"out": definition.norm(definition.base.norm, given["in"])},
    ModelPart.LOGITS: lambda definition, layer, given: {"out": definition.model.lm_head(given["in"])},
    ModelPart.LOG_PROBS: _log_probs,
}  # fmt: skip
