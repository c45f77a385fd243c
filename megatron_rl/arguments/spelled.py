"""Flags that Megatron's training scripts add to megatron-core's fields, or spell in another way."""

import ast
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.config.flag import Flag, Kind
from megatron_rl.types import RopeKind


def switch(
    name: str, *targets: str, help: str, const: object = True, default: object = None, aliases: tuple[str, ...] = ()
) -> Flag:
    return Flag(name=name, targets=targets, help=help, const=const, default=default, aliases=aliases)


def value(
    name: str,
    convert: Callable[[str], object],
    *targets: str,
    help: str,
    default: object = None,
    choices: tuple[object, ...] = (),
    nargs: str | None = None,
    allowed: tuple[object, ...] | None = None,
    remedy: str = "",
) -> Flag:
    return Flag(
        name=name,
        convert=convert,
        targets=targets,
        help=help,
        default=default,
        choices=choices,
        nargs=nargs,
        allowed=allowed,
        remedy=remedy,
    )


def window(word: str) -> int:
    """Megatron's pair of tokens seen to the left and to the right, as the count of tokens seen in all."""
    left, right = (int(part) for part in word.strip("()").split(","))
    if right != 0:
        raise ValueError
    return left + 1


def layer_frequency(word: str) -> int | tuple[int, ...]:
    """One expert layer in so many, or a pattern of layers such as ([0]*2+[1]*46)."""
    return _layers(ast.parse(word.strip(), mode="eval").body)


def _layers(node: ast.expr) -> Any:
    """The value of an expression of whole numbers, lists of them, + and *; nothing else is evaluated."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return tuple(_layers(element) for element in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _layers(node.left), _layers(node.right)
        pair = {type(left), type(right)}
        if pair == ({tuple} if isinstance(node.op, ast.Add) else {tuple, int}):
            return left + right if isinstance(node.op, ast.Add) else left * right
    raise ValueError


def dtype(word: str) -> object:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}[word]


def flags() -> list[Flag]:
    return [*_model(), *_experts(), *_parallel(), *_precision(), *_fusions(), *_optimizer(), *_ddp()]


def _model() -> list[Flag]:
    return [
        switch("--group-query-attention", "described.group_query_attention", help="Queries share keys and values."),
        switch("--swiglu", "described.swiglu", help="The activation of every supported model."),
        switch(
            "--untie-embeddings-and-output-weights",
            "architecture.tied_embeddings",
            const=False,
            help="The output layer has weights of its own.",
        ),
        value("--max-position-embeddings", int, "architecture.max_position_embeddings", help="The longest sequence."),
        value("--vocab-size", int, "architecture.vocab_size", help="Tokens of the vocabulary, before padding."),
        value(
            "--position-embedding-type",
            str,
            "described.position_embedding_type",
            choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
            allowed=("rope", "yarn"),
            remedy="every supported model has rotary positions; write --position-embedding-type rope",
            help="How positions reach attention.",
        ),
        switch(
            "--use-rotary-position-embeddings",
            "described.position_embedding_type",
            const="rope",
            help="The older spelling of `--position-embedding-type rope`.",
        ),
        value("--rotary-base", float, "architecture.rope.base", help="The base of the rotary frequencies."),
        value(
            "--rotary-percent",
            float,
            allowed=(1.0,),
            remedy="every supported model rotates whole heads; drop the flag",
            help="The part of a head that is rotated.",
        ),
        value(
            "--rotary-seq-len-interpolation-factor",
            float,
            "described.interpolation_factor",
            help="Positions are divided by this.",
        ),
        switch(
            "--use-rope-scaling",
            "architecture.rope.kind",
            const=RopeKind.LLAMA3,
            help="Scale the rotary frequencies as Llama 3.1 does.",
        ),
        value(
            "--rope-scaling-factor",
            float,
            "described.rope_scaling_factor",
            help="The factor of Llama 3.1's scaling; 8 if not given.",
        ),
        value("--rotary-scaling-factor", float, "described.yarn_factor", help="The factor of YaRN."),
        value(
            "--yarn-original-max-position-embeddings",
            int,
            "architecture.rope.original_max_positions",
            help="The longest sequence before YaRN.",
        ),
        value("--yarn-beta-fast", float, "architecture.rope.beta_fast", help="YaRN's upper bound of rotations."),
        value("--yarn-beta-slow", float, "architecture.rope.beta_slow", help="YaRN's lower bound of rotations."),
        switch(
            "--yarn-correction-range-round-to-int",
            "architecture.rope.truncate",
            help="Round the ends of YaRN's range of dimensions.",
        ),
        switch(
            "--no-yarn-correction-range-round-to-int",
            "architecture.rope.truncate",
            const=False,
            help="Do not round the ends of YaRN's range of dimensions.",
        ),
        value(
            "--rope-type",
            str,
            choices=("rope", "yarn"),
            allowed=("rope",),
            remedy="write --position-embedding-type yarn",
            help="The kind of rotary positions, of models with latent attention.",
        ),
        value(
            "--window-size", window, "architecture.sliding_window", help="Tokens seen to the left and right: LEFT,0."
        ),
    ]


def _experts() -> list[Flag]:
    return [
        value("--num-experts", int, "architecture.experts.num_experts", help="Experts in each layer."),
        value(
            "--moe-layer-freq",
            layer_frequency,
            "transformer.moe_layer_freq",
            allowed=(1,),
            remedy="in every supported model all layers have experts or none has; drop the flag",
            help="One layer with experts in so many.",
        ),
        value(
            "--moe-router-load-balancing-type",
            str,
            "transformer.moe_router_load_balancing_type",
            nargs="+",
            choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"),
            allowed=("aux_loss", "none"),
            remedy="it routes otherwise than the engines, or counts over one sequence or over earlier micro-batches, "
            "and packs hold many and come in any order; write aux_loss or none",
            help="The auxiliary loss that balances experts.",
        ),
        value(
            "--moe-aux-loss-coeff",
            float,
            "transformer.moe_aux_loss_coeff",
            nargs="+",
            help="The weight of the loss that balances experts.",
        ),
    ]


def _parallel() -> list[Flag]:
    return [
        value(
            "--decoder-first-pipeline-num-layers",
            int,
            "transformer.num_layers_in_first_pipeline_stage",
            help="Layers of the first pipeline stage, if not as many as the others have.",
        ),
        value(
            "--decoder-last-pipeline-num-layers",
            int,
            "transformer.num_layers_in_last_pipeline_stage",
            help="Layers of the last pipeline stage, if not as many as the others have.",
        ),
        value(
            "--num-layers-per-virtual-pipeline-stage",
            int,
            "layout.layers_per_virtual_stage",
            help="Layers of a virtual stage of the interleaved schedule.",
        ),
        value(
            "--num-virtual-stages-per-pipeline-rank",
            int,
            "layout.num_virtual_stages",
            help="Virtual stages on each pipeline rank.",
        ),
        Flag(
            name="--no-overlap-p2p-communication",
            kind=Kind.IGNORED,
            # With virtual stages it is an error.
            targets=("layout.waits_for_stages",),
            remedy="stages overlap their communication with virtual stages, which need it, and without them never do",
        ),
        value(
            "--cp-comm-type",
            str,
            "transformer.cp_comm_type",
            nargs="+",
            default="p2p",
            allowed=("p2p", "a2a"),
            remedy="context-parallel ranks exchange attention's heads; write a2a",
            help="How context-parallel ranks communicate; where there are several, a2a without the flag.",
        ),
        switch(
            "--recompute-activations",
            "transformer.recompute_granularity",
            const="selective",
            help="The short way of `--recompute-granularity selective`.",
        ),
    ]


def _precision() -> list[Flag]:
    return [
        switch("--bf16", "transformer.bf16", "optimizer.bf16", help="Train in bfloat16."),
        switch("--fp16", "transformer.fp16", "optimizer.fp16", help="Train in float16, with loss scaling."),
        switch(
            "--accumulate-allreduce-grads-in-fp32",
            "ddp.grad_reduce_in_fp32",
            help="Accumulate and reduce gradients in float32; so it is with `--bf16` and `--fp16` in any case.",
        ),
        switch(
            "--grad-reduce-in-bf16",
            "ddp.grad_reduce_in_fp32",
            const=False,
            help="Accumulate and reduce gradients in bfloat16.",
        ),
    ]


def _fusions() -> list[Flag]:
    fusions = {
        "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
        "--no-bias-swiglu-fusion": "bias_activation_fusion",
        "--no-bias-dropout-fusion": "bias_dropout_fusion",
        "--no-rope-fusion": "apply_rope_fusion",
    }
    return [
        switch(
            name,
            f"transformer.{field}",
            const=False,
            default=True,
            help="Do without this fusion; where the platform has no kernel for it, it is off in any case.",
        )
        for name, field in fusions.items()
    ]


def _optimizer() -> list[Flag]:
    dtypes = {
        "--main-grads-dtype": "main_grads_dtype",
        "--main-params-dtype": "main_params_dtype",
        "--exp-avg-dtype": "exp_avg_dtype",
        "--exp-avg-sq-dtype": "exp_avg_sq_dtype",
    }
    return [
        switch(
            "--use-distributed-optimizer",
            "optimizer.use_distributed_optimizer",
            "ddp.use_distributed_optimizer",
            help="Shard the optimizer's state over data-parallel ranks.",
        ),
        switch(
            "--overlap-param-gather",
            "optimizer.overlap_param_gather",
            "ddp.overlap_param_gather",
            help="Gather parameters while the forward pass runs.",
        ),
        switch("--no-pin-cpu-grads", "optimizer.pin_cpu_grads", const=False, help="Do not pin offloaded gradients."),
        switch("--no-pin-cpu-params", "optimizer.pin_cpu_params", const=False, help="Do not pin offloaded weights."),
        *(
            value(name, dtype, f"optimizer.{field}", help="One of fp32, bf16, fp16, fp8.")
            for name, field in dtypes.items()
        ),
    ]


def _ddp() -> list[Flag]:
    return [
        switch("--overlap-grad-reduce", "ddp.overlap_grad_reduce", help="Reduce gradients while backward runs."),
        switch(
            "--no-align-param-gather",
            "ddp.align_param_gather",
            const=False,
            help="Let each pipeline stage gather parameters when it needs them, in the interleaved schedule.",
        ),
        switch("--check-for-large-grads", "ddp.check_for_large_grads", help="Look for very large gradients."),
        value("--ddp-num-buckets", int, "ddp.num_buckets", help="Buckets that gradients are reduced in."),
        value("--ddp-bucket-size", int, "ddp.bucket_size", help="Elements in a bucket."),
        switch(
            "--ddp-pad-buckets-for-high-nccl-busbw",
            "ddp.pad_buckets_for_high_nccl_busbw",
            help="Pad buckets to a power of two.",
        ),
        switch(
            "--ddp-reduce-scatter-with-fp32-accumulation",
            "ddp.reduce_scatter_with_fp32_accumulation",
            help="Send gradients in their dtype, sum them in float32.",
        ),
        switch("--ddp-average-in-collective", "ddp.average_in_collective", help="Average inside the collective."),
        switch("--use-nccl-ub", "ddp.nccl_ub", help="Register buffers with NCCL."),
        switch(
            "--disable-symmetric-registration",
            "ddp.disable_symmetric_registration",
            help="Do not register them symmetrically.",
        ),
        value(
            "--num-distributed-optimizer-instances",
            int,
            "ddp.num_distributed_optimizer_instances",
            allowed=(1,),
            remedy="weights are exported from one instance; write 1",
            help="Copies of the sharded optimizer.",
        ),
    ]
