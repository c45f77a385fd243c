"""A worker of vLLM on a CPU whose model computes each part by `ops.invariant` (`--batch-invariant`).

vLLM loads `InvariantWorker` by its flag --worker-cls. Linear layers keep their weights as they are loaded, where vLLM
would pack them. The cache of keys and values has its own order, a row a token. What is not known here is refused
by an error, so no part of a model computes in another way in silence.

Letters: R rows of a step, H heads, G key-value heads, D dimensions of a head, S requests, L positions, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_rl.errors import PlatformError
from megatron_rl.ops.invariant import rows
from megatron_rl.ops.invariant.attention import NUM_KEYS, Tiles, attend, pad_keys
from megatron_rl.ops.invariant.bit_equality import check_operations
from megatron_rl.ops.log_probs.invariant import list_widths, log_softmax, multiply_in_blocks
from megatron_rl.sidecar.vllm.derived import find_quantizing

_TILES = "megatron_rl_tiles"
# Modules that only call others, as in vLLM 0.32.
_PLAIN = (
    "Qwen3ForCausalLM", "Qwen3Model", "Qwen3DecoderLayer", "Qwen3Attention", "Qwen2MLP", "ModuleList",
    "LogitsProcessor", "ApplyRotaryEmb",
)  # fmt: skip
_LINEAR = ("QKVParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear")
# The second one is the output layer where it is tied.
_OUTPUT_LAYERS = ("ParallelLMHead", "VocabParallelEmbedding")


def __getattr__(name: str) -> Any:
    """Build the worker's class once it is asked for, because this module is also imported without vLLM."""
    if name == "InvariantWorker":
        return _build_worker()
    raise AttributeError(f"module {__name__} has no attribute {name}")


@functools.cache
def _build_worker() -> type:
    from vllm.v1.worker.cpu_worker import CPUWorker

    class InvariantWorker(CPUWorker):  # type: ignore[misc]
        """vLLM's worker, whose model is changed while it is loaded."""

        def load_model(self, **options: Any) -> None:
            keep_weights()
            super().load_model(**options)
            make_invariant(self.model_runner)

    return InvariantWorker


def keep_weights() -> None:
    """Have linear layers keep their weights, and multiply by ours."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for method, choose in (
        (UnquantizedLinearMethod, lambda _: rows.multiply),
        (UnquantizedEmbeddingMethod, _choose_logits),
    ):

        def process_weights_after_loading(_: Any, layer: Any, choose: Any = choose) -> None:
            layer.cpu_linear = choose(layer)

        method.process_weights_after_loading = process_weights_after_loading


def _choose_logits(layer: Any) -> Callable[..., torch.Tensor]:
    """Return the product of an output layer, without columns of padding."""

    def multiply(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert bias is None
        return multiply_in_blocks(hidden, weight[: layer.org_vocab_size])

    return multiply


def make_invariant(runner: Any) -> None:
    """Change all parts of the runner's model, and its sampler; refuse a model with parts that are not known."""
    config = runner.vllm_config
    if config.speculative_config is not None or not config.model_config.enforce_eager:
        raise PlatformError("--batch-invariant is for engines without drafts and compilation: drop these, or the flag")
    model = runner.get_model()
    if quantizing := sorted(find_quantizing(model)):
        raise PlatformError(
            f"--batch-invariant: {quantizing[0]} quantizes its weights, which has no batch-invariant form here: drop "
            "vLLM's --quantization, or the flag"
        )
    # Where no flag gives it, vLLM chooses it after this load, and by what its backend prefers.
    cache = config.cache_config
    if cache.user_specified_block_size and (size := cache.block_size) % NUM_KEYS:
        raise PlatformError(
            f"--batch-invariant: vLLM's --block-size {size} must be a multiple of {NUM_KEYS}: write one, or drop it"
        )
    shapes, heads = [], set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "RMSNorm":
            module._forward_method = functools.partial(_normalize, module)
        elif kind == "SiluAndMul":
            module._forward_method = rows.swiglu
        elif kind == "RotaryEmbedding":
            module._forward_method = _choose_rotation(module)
        elif kind == "Attention":
            _change_attention(name, module)
            heads.add((module.num_heads // module.num_kv_heads, module.head_size))
        elif kind in _LINEAR:
            shapes.append((module.weight.shape[1], module.weight.shape[0]))
        elif kind in _OUTPUT_LAYERS:
            shapes += [(module.weight.shape[1], width) for width in list_widths(module.org_vocab_size)]
        elif kind not in _PLAIN:
            raise PlatformError(
                f"--batch-invariant: {name or 'the model'} is a {kind} in this vLLM, which has no batch-invariant form "
                "here: choose a dense Qwen3, or drop the flag"
            )
    _change_sampler(runner.sampler)
    ((num_queries, head_dim),) = heads
    check_operations(shapes, num_queries, head_dim, runner.model_config.dtype)


def _normalize(
    norm: Any, hidden: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if residual is None:
        return rows.normalize(hidden, norm.weight, norm.variance_epsilon)
    total = hidden + residual
    return rows.normalize(total, norm.weight, norm.variance_epsilon), total


def _choose_rotation(rotation: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    if not rotation.is_neox_style:
        raise PlatformError("--batch-invariant: rotations of neighboring dimensions have no batch-invariant form here")
    frequencies_F = rotation._compute_inv_freq(rotation.base)

    def rotate(
        positions_R: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        turned = rows.turn(positions_R, frequencies_F)
        heads = (one.view(len(one), -1, rotation.head_size) for one in (queries, keys))
        queries_RHD, keys_RGD = (rows.rotate(one, *turned) for one in heads)
        return queries_RHD.flatten(1), keys_RGD.flatten(1)

    return rotate


def _change_attention(name: str, module: Any) -> None:
    impl = module.impl
    for reason in _find_reasons(impl):
        raise PlatformError(f"--batch-invariant: {name} has {reason}, which has no batch-invariant form here")

    def write(_: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots_R: torch.Tensor) -> None:
        _view_cache(cache)[slots_R] = torch.cat((key, value), dim=-1)[: len(slots_R)]

    def forward(
        _: Any, query: torch.Tensor, key: Any, value: Any, cache: torch.Tensor, step: Any, output: torch.Tensor,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        assert output_scale is None and output_block_scale is None
        if step is None:
            return output
        tiles, keys_SL = _find_tiles(step, cache.shape[2])
        num_rows = len(tiles.places_R)
        output[:num_rows] = attend(query[:num_rows], _view_cache(cache), tiles, keys_SL, impl.scale)[0]
        return output

    impl.do_kv_cache_update, impl.forward = write, forward


def _find_reasons(impl: Any) -> Iterator[str]:
    if type(impl).__name__ != "CPUAttentionBackendImpl":
        yield f"the backend {type(impl).__name__}"
    if impl.attn_type != "decoder":
        yield f"the type {impl.attn_type}"
    for what in ("alibi_slopes", "sinks", "logits_soft_cap", "kv_sharing_target_layer_name", "is_fp8_kv_cache"):
        if getattr(impl, what) not in (None, False, 0):
            yield what
    if impl.sliding_window != -1:
        yield "a sliding window"


def _view_cache(cache: torch.Tensor) -> torch.Tensor:
    """View the memory of a layer's cache as rows of keys and values [N, G, 2D], a row a token.

    vLLM's own order within a block is another one, but only this module reads and writes it.
    """
    num_blocks, num_groups, size, width = cache.shape
    return cache.view(num_blocks * size, num_groups, width)


def _find_tiles(step: Any, block_size: int) -> tuple[Tiles, torch.Tensor]:
    """Return the tiles of a step's rows, and the slot of each request's positions, made once for all layers."""
    found = getattr(step, _TILES, None)
    if found is None:
        assert step.causal and block_size % NUM_KEYS == 0
        starts, lengths_S = step.query_start_loc.long(), step.seq_lens.long()
        counts_S = starts.diff()
        sequences_R = torch.arange(len(counts_S)).repeat_interleave(counts_S)
        offsets_S = lengths_S - starts[1:]
        positions_R = torch.arange(len(sequences_R)) + offsets_S[sequences_R]
        places_L = torch.arange(pad_keys(int(lengths_S.max())))
        # After its end, a request's last key stands for those that are not there.
        places_SL = torch.minimum(places_L, lengths_S[:, None] - 1).clamp_min(0)
        blocks_SL = step.block_table.long()[: len(lengths_S)].gather(1, places_SL // block_size)
        found = Tiles.of(sequences_R, positions_R), blocks_SL * block_size + places_SL % block_size
        setattr(step, _TILES, found)
    return found


def _change_sampler(sampler: Any) -> None:
    """Have the sampler compute log-probs by ours, of logits that are divided by the temperature already."""
    draws = sampler.topk_topp_sampler
    given = draws.forward
    # Its own log-probs are left out.
    draws.logprobs_mode = "raw_logprobs"

    def draw(logits: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert k is None and p is None
        log_probs = log_softmax(logits)
        sampled, _ = given(logits, generators, k, p)
        return sampled, log_probs

    draws.forward = draw
    sampler.compute_logprobs = lambda logits: log_softmax(logits.float())
