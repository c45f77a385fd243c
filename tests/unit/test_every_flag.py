"""Every flag of Megatron that is listed as used has an effect: another value changes the result, or is an error.

A flag without a row fails. So does a flag whose row shows no change: it belongs to those without effect.
tests/distributed/test_fields.py checks that the fields of megatron-core's configurations are read when a model is
trained.
"""

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from packaging.version import Version

from megatron_rl.command_line import flags, resolve
from megatron_rl.command_line import parse as command_line
from megatron_rl.errors import UsageError
from megatron_rl.flag import Flag, Kind
from megatron_rl.shared.weights import families
from megatron_rl.types import Architecture, Experts, LinearAttention, Rope, RopeKind
from tests.command_lines import CPU, DENSE, RUN, SPARSE, parse, parse_run, without
from tests.effects import effect

MODEL = Architecture(
    family="qwen3", num_layers=8, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=4,
    kv_channels=32, vocab_size=200, max_position_embeddings=256, rope=Rope(base=1e6), qk_layernorm=True,
)  # fmt: skip
FOLDERS = {
    "run": MODEL,
    "expert run": dataclasses.replace(
        MODEL, family="qwen3_moe", experts=Experts(num_experts=8, num_active=2, ffn_hidden_size=32)
    ),
    "sigmoid run": dataclasses.replace(
        MODEL,
        family="glm4_moe",
        experts=Experts(8, 2, 32, score="sigmoid", has_bias=True, shared_ffn_hidden_size=32),
    ),
    "linear run": dataclasses.replace(
        MODEL,
        family="qwen3_5_text",
        linear=LinearAttention(4, 8, 16, 16, full_interval=2),
        attention_gate=True,
        zero_centered_norms=True,
    ),
    "yarn run": dataclasses.replace(
        MODEL, rope=Rope(base=1e6, kind=RopeKind.YARN, factor=4.0, original_max_positions=64)
    ),
}
NUM_RANKS = 8


DESCRIBED = {
    "dense": [*DENSE],
    "sparse": [*SPARSE],
    "sigmoid": [
        *[*SPARSE, "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"],
        *["--moe-shared-expert-intermediate-size", "48"],
    ],
    "biased": without(DENSE, "--disable-bias-linear"),
    "yarn": [
        *without(DENSE, "--position-embedding-type"),
        *[
            "--position-embedding-type",
            "yarn",
            "--rotary-scaling-factor",
            "4",
            "--yarn-original-max-position-embeddings",
            "64",
        ],
    ],
}


@dataclasses.dataclass(frozen=True)
class Row:
    """The words that show a flag's effect."""

    words: str
    """The flag with another value than the one that holds without it."""
    sees: str
    """The value that differs from the same command line without these words.

    "error" if they are an error that names the flag.
    """
    on: str = "run"
    """The command line: a run of a model, or a model that flags describe."""
    beside: str = ""
    """Words that both command lines have, too."""
    drops: str = ""
    """A flag of the description that is left out, because the row's contradicts it."""
    elsewhere: bool = False
    """A flag for effects on other platforms alone: there a field differs, and here a note or an error names it."""


def _on_model(name: str, words: str, sees: str, **others: str) -> Row:
    return Row(f"{name} {words}".strip(), sees, **{"on": "dense", **others})  # type: ignore[arg-type]


def _instead(words: str, sees: str, on: str = "dense") -> Row:
    """Build a row that replaces a flag of the description."""
    return Row(words, sees, on=on, drops=words.split()[0])


PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 2"
UNROUNDED = "--no-yarn-correction-range-round-to-int"
LINEAR_ENGINES = "--rollout-dtype bfloat16 --publish-dtype bfloat16"
GROWING = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1"
DISTRIBUTED = "--use-distributed-optimizer"
PRECISE = f"{DISTRIBUTED} --use-precision-aware-optimizer"
OFFLOADED = f"{PRECISE} --optimizer-cpu-offload"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FROM_CONFIG = (
    "--rotary-interleaved", "--multi-latent-attention", "--q-lora-rank 8", "--kv-lora-rank 8", "--qk-head-dim 8",
    "--qk-pos-emb-head-dim 8", "--v-head-dim 8", "--mscale 2", "--mscale-all-dim 1", "--softmax-type learnable",
    "--quick-geglu", "--glu-linear-offset 1", "--activation-func-clamp-value 7", "--window-attn-skip-freq 2",
    "--enable-gpt-oss",
)  # fmt: skip
ROWS: dict[str, Row] = {
    "--make-vocab-size-divisible-by": Row("--make-vocab-size-divisible-by 7", "model.vocab_size"),
    "--micro-batch-size": Row("--micro-batch-size 4", "iteration.sizes"),
    "--global-batch-size": Row("--global-batch-size 64", "iteration.sizes"),
    "--seq-length": Row("--seq-length 96", "iteration.sizes", drops="--seq-length"),
    "--train-iters": Row("--train-iters 5", "schedule.rates", drops="--train-iters"),
    "--seed": Row("--seed 5", "session.seed"),
    "--lr-decay-style": Row("--lr-decay-style cosine", "schedule.rates"),
    "--lr-decay-iters": Row("--lr-decay-iters 4", "schedule.rates"),
    "--lr-warmup-iters": Row("--lr-warmup-iters 1", "schedule.rates"),
    "--lr-warmup-fraction": Row("--lr-warmup-fraction 0.5", "schedule.rates"),
    "--lr-warmup-init": Row("--lr-warmup-init 1e-7", "schedule.rates", beside="--lr-warmup-fraction 0.5"),
    "--lr-wsd-decay-style": Row("--lr-wsd-decay-style linear", "schedule.rates", beside=WSD),
    "--lr-wsd-decay-iters": Row("--lr-wsd-decay-iters 4", "schedule.rates", beside=WSD, drops="--lr-wsd-decay-iters"),
    "--start-weight-decay": Row(
        "--start-weight-decay 0.5", "schedule.decays", beside=GROWING, drops="--start-weight-decay"
    ),
    "--end-weight-decay": Row("--end-weight-decay 2", "schedule.decays", beside=GROWING, drops="--end-weight-decay"),
    "--weight-decay-incr-style": Row(
        "--weight-decay-incr-style cosine", "schedule.decays", beside=GROWING, drops="--weight-decay-incr-style"
    ),
    "--override-opt-param-scheduler": Row("--override-opt-param-scheduler", "schedule.of_checkpoint"),
    "--use-checkpoint-opt-param-scheduler": Row("--use-checkpoint-opt-param-scheduler", "schedule.of_checkpoint"),
    "--save": Row("--save out", "checkpoints.calls"),
    "--save-interval": Row("--save-interval 2", "checkpoints.due", beside="--save out"),
    "--save-retain-interval": Row(
        "--save-retain-interval 4", "checkpoints.calls", beside="--save out --save-interval 2"
    ),
    "--load": Row("--load in", "checkpoints.calls"),
    "--ckpt-step": Row("--ckpt-step 3", "checkpoints.calls", beside="--load in"),
    "--exit-on-missing-checkpoint": Row("--exit-on-missing-checkpoint", "checkpoints.calls", beside="--load in"),
    "--finetune": Row("--finetune", "checkpoints.version", beside="--load in --ckpt-step 3"),
    "--no-save-optim": Row("--no-save-optim", "checkpoints.calls", beside="--save out"),
    "--no-save-rng": Row("--no-save-rng", "checkpoints.calls", beside="--save out"),
    "--no-load-optim": Row("--no-load-optim", "checkpoints.calls", beside="--load in --ckpt-step 3"),
    "--no-load-rng": Row("--no-load-rng", "checkpoints.calls", beside="--load in --ckpt-step 3"),
    "--async-save": Row("--async-save", "checkpoints.calls", beside="--save out"),
    "--no-ckpt-fully-parallel-save": Row("--no-ckpt-fully-parallel-save", "checkpoints.calls", beside="--save out"),
    "--ckpt-fully-parallel-load": Row(
        "--ckpt-fully-parallel-load", "checkpoints.calls", beside="--load in --ckpt-step 3"
    ),
    "--dist-ckpt-strictness": Row(
        "--dist-ckpt-strictness raise_all", "checkpoints.calls", beside="--load in --ckpt-step 3"
    ),
    "--distributed-timeout-minutes": Row("--distributed-timeout-minutes 3", "session.timeout"),
    "--disable-gloo-process-groups": Row("--disable-gloo-process-groups", "making.use_gloo_process_groups"),
    "--rollout-temperature": Row("--rollout-temperature 0.5", "roles.temperature"),
    "--grpo-group-size": Row("--grpo-group-size 4", "iteration.sizes"),
    "--grpo-prompts-per-step": Row("--grpo-prompts-per-step 8", "iteration.sizes", drops="--grpo-prompts-per-step"),
    "--grpo-clamp-eps-lower": Row("--grpo-clamp-eps-lower 0.3", "objective.loss"),
    "--grpo-clamp-eps-upper": Row("--grpo-clamp-eps-upper 0.3", "objective.loss"),
    "--grpo-kl-beta": Row("--grpo-kl-beta 0.1", "objective.loss"),
    "--grpo-filter-groups-with-same-reward": Row("--grpo-filter-groups-with-same-reward", "iteration.sizes"),
    "--rl-inference-logprobs-is-correction": Row("--rl-inference-logprobs-is-correction", "objective.loss"),
    "--rl-importance-sampling-truncation-coef": Row(
        "--rl-importance-sampling-truncation-coef 1",
        "objective.loss",
        beside="--rl-inference-logprobs-is-correction",
    ),
    "--eval-interval": Row("--eval-interval 3", "evaluations.due", beside="--prompts-held-out 1"),
    "--log-interval": Row("--log-interval 3", "observed.lines"),
    "--tensorboard-dir": Row("--tensorboard-dir board", "observed.dashboards"),
    "--wandb-project": Row("--wandb-project p", "observed.dashboards"),
    "--wandb-exp-name": Row("--wandb-exp-name e", "observed.dashboards", beside="--wandb-project p"),
    "--wandb-save-dir": Row("--wandb-save-dir .", "observed.dashboards", beside="--wandb-project p"),
    "--wandb-entity": Row("--wandb-entity me", "observed.dashboards", beside="--wandb-project p"),
    "--group-query-attention": Row("", "error", on="dense", drops="--group-query-attention"),
    "--swiglu": Row("", "error", on="dense", drops="--swiglu"),
    "--untie-embeddings-and-output-weights": _on_model(
        "--untie-embeddings-and-output-weights", "", "model.share_embeddings_and_output_weights"
    ),
    "--max-position-embeddings": _instead("--max-position-embeddings 64", "model.max_sequence_length"),
    "--vocab-size": _instead("--vocab-size 300", "model.vocab_size"),
    "--position-embedding-type": _instead(
        "--position-embedding-type yarn --rotary-scaling-factor 4", "positions.frequencies"
    ),
    "--use-rotary-position-embeddings": Row("--use-rotary-position-embeddings", "error", on="yarn"),
    "--rotary-base": _on_model("--rotary-base", "500000", "positions.frequencies"),
    "--rotary-percent": _on_model("--rotary-percent", "0.5", "positions.frequencies", on="sigmoid"),
    "--rotary-seq-len-interpolation-factor": _on_model(
        "--rotary-seq-len-interpolation-factor", "2", "positions.frequencies"
    ),
    "--use-rope-scaling": _on_model("--use-rope-scaling", "", "positions.frequencies"),
    "--rope-scaling-factor": _on_model(
        "--rope-scaling-factor", "32", "positions.frequencies", beside="--use-rope-scaling"
    ),
    "--rotary-scaling-factor": Row("--rotary-scaling-factor 8", "error", on="yarn run"),
    "--yarn-original-max-position-embeddings": _instead(
        "--yarn-original-max-position-embeddings 32", "positions.frequencies", on="yarn"
    ),
    "--yarn-beta-fast": _on_model("--yarn-beta-fast", "2", "positions.frequencies", on="yarn", beside=UNROUNDED),
    "--yarn-beta-slow": _on_model("--yarn-beta-slow", "0.1", "positions.frequencies", on="yarn", beside=UNROUNDED),
    "--yarn-correction-range-round-to-int": Row(
        "--yarn-correction-range-round-to-int", "error", on="yarn", beside="--no-yarn-correction-range-round-to-int"
    ),
    "--no-yarn-correction-range-round-to-int": _on_model(
        "--no-yarn-correction-range-round-to-int", "", "positions.frequencies", on="yarn"
    ),
    "--rope-type": _on_model("--rope-type", "yarn", "error"),
    "--window-size": _on_model("--window-size", "31,0", "transformer.window_size"),
    "--sliding-window": _on_model("--sliding-window", "32", "transformer.window_size"),
    "--norm-topk-prob": Row("--norm-topk-prob", "error", on="sparse", beside="--moe-router-pre-softmax"),
    "--rope-scaling-type": _on_model("--rope-scaling-type", "llama3", "positions.frequencies"),
    "--original-max-position-embeddings": _on_model(
        "--original-max-position-embeddings", "64", "positions.frequencies", beside="--use-rope-scaling"
    ),
    "--low-freq-factor": _on_model("--low-freq-factor", "2", "positions.frequencies", beside="--use-rope-scaling"),
    "--high-freq-factor": _on_model("--high-freq-factor", "8", "positions.frequencies", beside="--use-rope-scaling"),
    "--num-experts": _instead("--num-experts 4", "transformer.num_moe_experts", on="sparse"),
    "--moe-layer-freq": _on_model("--moe-layer-freq", "[0]*2+[1]*6", "transformer.moe_layer_freq", on="sigmoid"),
    "--moe-router-load-balancing-type": Row(
        "--moe-router-load-balancing-type none", "transformer.moe_router_load_balancing_type", on="expert run"
    ),
    "--moe-aux-loss-coeff": Row("--moe-aux-loss-coeff 0.1", "transformer.moe_aux_loss_coeff", on="expert run"),
    "--decoder-first-pipeline-num-layers": Row(
        "--decoder-first-pipeline-num-layers 3", "transformer.num_layers_in_first_pipeline_stage", beside=PP2
    ),
    "--decoder-last-pipeline-num-layers": Row(
        "--decoder-last-pipeline-num-layers 3", "transformer.num_layers_in_last_pipeline_stage", beside=PP2
    ),
    "--num-layers-per-virtual-pipeline-stage": Row(
        "--num-layers-per-virtual-pipeline-stage 2", "session.sizes", beside=PP2
    ),
    "--num-virtual-stages-per-pipeline-rank": Row(
        "--num-virtual-stages-per-pipeline-rank 4", "model.stages", beside=PP2
    ),
    "--cp-comm-type": Row("--cp-comm-type a2a", "transformer.cp_comm_type"),
    "--recompute-activations": Row("--recompute-activations", "transformer.recompute_granularity"),
    "--bf16": Row("--bf16", "transformer.params_dtype"),
    "--fp16": Row("--fp16", "transformer.params_dtype"),
    "--accumulate-allreduce-grads-in-fp32": Row(
        "--accumulate-allreduce-grads-in-fp32", "error", beside="--bf16 --grad-reduce-in-bf16"
    ),
    "--grad-reduce-in-bf16": Row("--grad-reduce-in-bf16", "ddp.grad_reduce_in_fp32", beside="--bf16"),
    "--no-gradient-accumulation-fusion": Row(
        "--no-gradient-accumulation-fusion", "transformer.gradient_accumulation_fusion", elsewhere=True
    ),
    "--no-bias-swiglu-fusion": Row("--no-bias-swiglu-fusion", "transformer.bias_activation_fusion", elsewhere=True),
    "--no-bias-dropout-fusion": Row(
        "--no-bias-dropout-fusion", "transformer.bias_dropout_fusion", on="biased", elsewhere=True
    ),
    "--no-rope-fusion": Row("--no-rope-fusion", "transformer.apply_rope_fusion", elsewhere=True),
    "--use-distributed-optimizer": Row("--use-distributed-optimizer", "ddp.use_distributed_optimizer"),
    "--overlap-param-gather": Row(
        "--overlap-param-gather", "ddp.overlap_param_gather", beside=f"{DISTRIBUTED} --overlap-grad-reduce"
    ),
    "--no-pin-cpu-grads": Row("--no-pin-cpu-grads", "optimizer.pin_cpu_grads", beside=OFFLOADED, elsewhere=True),
    "--no-pin-cpu-params": Row("--no-pin-cpu-params", "optimizer.pin_cpu_params", beside=OFFLOADED, elsewhere=True),
    "--main-grads-dtype": Row("--main-grads-dtype bf16", "optimizer.main_grads_dtype", beside=PRECISE, elsewhere=True),
    "--main-params-dtype": Row(
        "--main-params-dtype fp16", "optimizer.main_params_dtype", beside=PRECISE, elsewhere=True
    ),
    "--exp-avg-dtype": Row("--exp-avg-dtype bf16", "optimizer.exp_avg_dtype", beside=PRECISE, elsewhere=True),
    "--exp-avg-sq-dtype": Row("--exp-avg-sq-dtype bf16", "optimizer.exp_avg_sq_dtype", beside=PRECISE, elsewhere=True),
    "--overlap-grad-reduce": Row("--overlap-grad-reduce", "ddp.overlap_grad_reduce"),
    "--no-align-param-gather": Row("--no-align-param-gather", "ddp.align_param_gather", beside=VPP2),
    "--check-for-large-grads": Row("--check-for-large-grads", "ddp.check_for_large_grads"),
    "--ddp-bucket-size": Row("--ddp-bucket-size 9000", "ddp.bucket_size"),
    "--ddp-pad-buckets-for-high-nccl-busbw": Row(
        "--ddp-pad-buckets-for-high-nccl-busbw", "ddp.pad_buckets_for_high_nccl_busbw"
    ),
    "--ddp-reduce-scatter-with-fp32-accumulation": Row(
        "--ddp-reduce-scatter-with-fp32-accumulation", "ddp.reduce_scatter_with_fp32_accumulation"
    ),
    "--ddp-average-in-collective": Row("--ddp-average-in-collective", "ddp.average_in_collective"),
    "--use-nccl-ub": Row("--use-nccl-ub", "ddp.nccl_ub", elsewhere=True),
    "--disable-symmetric-registration": Row(
        "--disable-symmetric-registration", "ddp.disable_symmetric_registration", beside="--use-nccl-ub", elsewhere=True
    ),
    "--num-distributed-optimizer-instances": Row("--num-distributed-optimizer-instances 2", "error"),
    "--tensor-model-parallel-size": Row("--tensor-model-parallel-size 2", "session.sizes"),
    "--pipeline-model-parallel-size": Row("--pipeline-model-parallel-size 2", "session.sizes"),
    "--sequence-parallel": Row(
        "--sequence-parallel", "transformer.sequence_parallel", beside="--tensor-model-parallel-size 2"
    ),
    "--context-parallel-size": Row("--context-parallel-size 2", "session.sizes"),
    "--expert-model-parallel-size": Row("--expert-model-parallel-size 2", "session.sizes", on="expert run"),
    "--expert-tensor-parallel-size": Row(
        "--expert-tensor-parallel-size 2",
        "transformer.expert_tensor_parallel_size",
        on="expert run",
        elsewhere=True,
    ),
    "--batch-invariant-mode": Row("--batch-invariant-mode", "transformer.batch_invariant_mode", elsewhere=True),
    "--deterministic-mode": Row("--deterministic-mode", "transformer.deterministic_mode", elsewhere=True),
    "--overlap-p2p-communication-warmup-flush": Row(
        "--overlap-p2p-communication-warmup-flush", "transformer.overlap_p2p_comm_warmup_flush", beside=VPP2
    ),
    "--microbatch-group-size-per-virtual-pipeline-stage": Row(
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
        "transformer.microbatch_group_size_per_vp_stage",
        beside=VPP2,
    ),
    "--num-layers": _instead("--num-layers 4", "transformer.num_layers"),
    "--account-for-embedding-in-pipeline-split": Row(
        "--account-for-embedding-in-pipeline-split",
        "transformer.account_for_embedding_in_pipeline_split",
        beside="--account-for-loss-in-pipeline-split",
    ),
    "--account-for-loss-in-pipeline-split": Row(
        "--account-for-loss-in-pipeline-split",
        "transformer.account_for_loss_in_pipeline_split",
        beside="--account-for-embedding-in-pipeline-split",
    ),
    "--hidden-size": _instead("--hidden-size 128", "transformer.hidden_size"),
    "--num-attention-heads": _instead("--num-attention-heads 4", "transformer.num_attention_heads"),
    "--num-query-groups": _instead("--num-query-groups 2", "transformer.num_query_groups"),
    "--ffn-hidden-size": _instead("--ffn-hidden-size 64", "transformer.ffn_hidden_size"),
    "--kv-channels": _on_model("--kv-channels", "16", "transformer.kv_channels"),
    "--hidden-dropout": Row("--hidden-dropout 0.1", "error"),
    "--attention-dropout": Row("--attention-dropout 0.1", "error"),
    "--norm-epsilon": _on_model("--norm-epsilon", "1e-4", "transformer.layernorm_epsilon"),
    "--disable-bias-linear": Row("", "transformer.add_bias_linear", on="dense", drops="--disable-bias-linear"),
    "--add-qkv-bias": _on_model("--add-qkv-bias", "", "transformer.add_qkv_bias"),
    "--normalization": Row("", "error", on="dense", drops="--normalization"),
    "--qk-layernorm": _on_model("--qk-layernorm", "", "transformer.qk_layernorm"),
    "--disable-bf16-reduced-precision-matmul": Row(
        "--disable-bf16-reduced-precision-matmul", "process.reduced_precision", beside="--bf16"
    ),
    "--recompute-granularity": Row("--recompute-granularity selective", "transformer.recompute_granularity"),
    "--recompute-method": Row(
        "--recompute-method block", "transformer.recompute_method", beside=FULL, drops="--recompute-method"
    ),
    "--recompute-num-layers": Row(
        "--recompute-num-layers 2", "transformer.recompute_num_layers", beside=FULL, drops="--recompute-num-layers"
    ),
    "--distribute-saved-activations": Row(
        "--distribute-saved-activations",
        "transformer.distribute_saved_activations",
        beside=f"{FULL} --tensor-model-parallel-size 2",
    ),
    "--recompute-modules": Row(
        "--recompute-modules core_attn moe",
        "transformer.recompute_modules",
        on="expert run",
        beside="--recompute-granularity selective",
    ),
    "--moe-ffn-hidden-size": _instead("--moe-ffn-hidden-size 16", "transformer.moe_ffn_hidden_size", on="sparse"),
    "--moe-router-topk": _instead("--moe-router-topk 3", "transformer.moe_router_topk", on="sparse"),
    "--moe-router-pre-softmax": _on_model(
        "--moe-router-pre-softmax", "", "transformer.moe_router_pre_softmax", on="sparse"
    ),
    "--moe-router-score-function": Row("--moe-router-score-function sigmoid", "error", on="expert run"),
    "--moe-router-enable-expert-bias": Row("--moe-router-enable-expert-bias", "error", on="expert run"),
    "--moe-router-bias-update-rate": Row(
        "--moe-router-bias-update-rate 0.1", "transformer.moe_router_bias_update_rate", on="sigmoid run"
    ),
    "--moe-router-topk-scaling-factor": _on_model(
        "--moe-router-topk-scaling-factor", "2", "transformer.moe_router_topk_scaling_factor", on="sigmoid"
    ),
    "--moe-router-num-groups": _on_model(
        "--moe-router-num-groups", "2", "transformer.moe_router_num_groups", on="sigmoid"
    ),
    "--moe-router-group-topk": Row("--moe-router-group-topk 2", "error", on="expert run"),
    "--moe-shared-expert-intermediate-size": _instead(
        "--moe-shared-expert-intermediate-size 96", "transformer.moe_shared_expert_intermediate_size", on="sigmoid"
    ),
    "--moe-shared-expert-gate": Row("--moe-shared-expert-gate", "error", on="expert run"),
    "--moe-router-dtype": Row("--moe-router-dtype fp64", "transformer.moe_router_dtype", on="expert run"),
    "--moe-grouped-gemm": Row("--moe-grouped-gemm", "transformer.moe_grouped_gemm", on="expert run", elsewhere=True),
    "--moe-z-loss-coeff": Row("--moe-z-loss-coeff 0.1", "transformer.moe_z_loss_coeff", on="expert run"),
    "--attention-output-gate": Row("--attention-output-gate", "error"),
    **{words.split()[0]: _on_model(words, "", "error") for words in FROM_CONFIG},
    "--apply-layernorm-1p": Row("--apply-layernorm-1p", "error"),
    "--experimental-attention-variant": Row("--experimental-attention-variant gated_delta_net", "error"),
    "--linear-attention-freq": Row("--linear-attention-freq 4", "error", on="linear run", beside=LINEAR_ENGINES),
    "--linear-conv-kernel-dim": Row("--linear-conv-kernel-dim 3", "error", on="linear run", beside=LINEAR_ENGINES),
    "--linear-key-head-dim": Row("--linear-key-head-dim 8", "error", on="linear run", beside=LINEAR_ENGINES),
    "--linear-value-head-dim": Row("--linear-value-head-dim 8", "error", on="linear run", beside=LINEAR_ENGINES),
    "--linear-num-key-heads": Row("--linear-num-key-heads 8", "error", on="linear run", beside=LINEAR_ENGINES),
    "--linear-num-value-heads": Row("--linear-num-value-heads 4", "error", on="linear run", beside=LINEAR_ENGINES),
    "--spec": Row("--spec my_layers layer_spec", "error"),
    "--padded-vocab-size": Row("--padded-vocab-size 512", "model.vocab_size"),
    "--train-samples": Row("--train-samples 640", "schedule.rates", drops="--train-iters"),
    "--lr-decay-samples": Row("--lr-decay-samples 512", "schedule.rates"),
    "--lr-warmup-samples": Row("--lr-warmup-samples 128", "schedule.rates"),
    "--exit-interval": Row("--exit-interval 3", "limits.ends"),
    "--exit-duration-in-mins": Row("--exit-duration-in-mins 3", "limits.ends"),
    "--moe-token-dispatcher-type": Row("--moe-token-dispatcher-type none", "error", on="expert run"),
    "--moe-layer-recompute": Row("--moe-layer-recompute", "transformer.recompute_modules", on="expert run"),
    "--moe-permute-fusion": Row(
        "--moe-permute-fusion", "transformer.moe_permute_fusion", on="expert run", elsewhere=True
    ),
    "--moe-router-fusion": Row("--moe-router-fusion", "transformer.moe_router_fusion", on="expert run", elsewhere=True),
    "--no-clone-scatter-output-in-embedding": Row(
        "--no-clone-scatter-output-in-embedding", "transformer.clone_scatter_output_in_embedding"
    ),
    "--config-logger-dir": Row("--config-logger-dir logs", "transformer.config_logger_dir"),
    "--use-te-activation-func": Row(
        "--use-te-activation-func",
        "transformer.use_te_activation_func",
        beside="--no-bias-swiglu-fusion",
        elsewhere=True,
    ),
    "--transformer-impl": Row("--transformer-impl local", "transformer.transformer_impl", elsewhere=True),
    "--lr": Row("--lr 2e-6", "schedule.rates", drops="--lr"),
    "--min-lr": Row("--min-lr 1e-7", "schedule.rates"),
    "--decoupled-lr": Row("--decoupled-lr 1e-7", "optimizer.decoupled_lr"),
    "--decoupled-min-lr": Row("--decoupled-min-lr 1e-8", "optimizer.decoupled_min_lr", beside="--decoupled-lr 1e-7"),
    "--weight-decay": Row("--weight-decay 0.5", "schedule.decays"),
    "--apply-wd-to-qk-layernorm": Row("--apply-wd-to-qk-layernorm", "optimizer.apply_wd_to_qk_layernorm"),
    "--use-precision-aware-optimizer": Row(
        "--use-precision-aware-optimizer",
        "optimizer.use_precision_aware_optimizer",
        beside=DISTRIBUTED,
        elsewhere=True,
    ),
    "--optimizer": Row("--optimizer sgd", "optimizer.optimizer"),
    "--loss-scale": Row("--loss-scale 8", "optimizer.loss_scale", beside="--fp16"),
    "--initial-loss-scale": Row("--initial-loss-scale 8", "optimizer.initial_loss_scale", beside="--fp16"),
    "--min-loss-scale": Row("--min-loss-scale 2", "optimizer.min_loss_scale", beside="--fp16"),
    "--loss-scale-window": Row("--loss-scale-window 7", "optimizer.loss_scale_window", beside="--fp16"),
    "--hysteresis": Row("--hysteresis 1", "optimizer.hysteresis", beside="--fp16"),
    "--adam-beta1": Row("--adam-beta1 0.5", "optimizer.adam_beta1"),
    "--adam-beta2": Row("--adam-beta2 0.5", "optimizer.adam_beta2"),
    "--adam-eps": Row("--adam-eps 0.1", "optimizer.adam_eps"),
    "--sgd-momentum": Row("--sgd-momentum 0.5", "optimizer.sgd_momentum", beside="--optimizer sgd"),
    "--optimizer-cpu-offload": Row(
        "--optimizer-cpu-offload", "optimizer.optimizer_cpu_offload", beside=PRECISE, elsewhere=True
    ),
    "--optimizer-offload-fraction": Row(
        "--optimizer-offload-fraction 0.5", "optimizer.optimizer_offload_fraction", beside=OFFLOADED, elsewhere=True
    ),
    "--use-torch-optimizer-for-cpu-offload": Row(
        "--use-torch-optimizer-for-cpu-offload",
        "optimizer.use_torch_optimizer_for_cpu_offload",
        beside=OFFLOADED,
        elsewhere=True,
    ),
    "--overlap-cpu-optimizer-d2h-h2d": Row(
        "--overlap-cpu-optimizer-d2h-h2d", "optimizer.overlap_cpu_optimizer_d2h_h2d", beside=OFFLOADED, elsewhere=True
    ),
    "--clip-grad": Row("--clip-grad 0.5", "optimizer.clip_grad"),
    "--log-num-zeros-in-grad": Row("--log-num-zeros-in-grad", "optimizer.log_num_zeros_in_grad"),
}
if Version(importlib.metadata.version("megatron-core")) >= Version("0.18"):
    ROWS["--ddp-num-buckets"] = Row("--ddp-num-buckets 3", "ddp.num_buckets")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in FOLDERS}
    for name, folder in made.items():
        (folder / "config.json").write_text(json.dumps(families.derive_config(FOLDERS[name])))
    return made


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep relative folders within the test's, and reset what a configuration sets for the process."""
    monkeypatch.chdir(tmp_path)
    matmul = torch.backends.cuda.matmul
    was, matmul.allow_bf16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction, True
    yield
    matmul.allow_bf16_reduced_precision_reduction = was


@pytest.fixture
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the parser once: it is the same for every command line, and takes a while to make."""
    listed = flags.list_flags()
    parser = command_line._make_parser(listed)
    monkeypatch.setattr(flags, "list_flags", lambda: listed)
    monkeypatch.setattr(command_line, "_make_parser", lambda _: parser)


def command_lines(row: Row, folders: dict[str, Path]) -> tuple[list[str], list[str]]:
    """Return the command lines without the row's words, and with them."""
    of_model = DESCRIBED.get(row.on) or [*CPU, "--hf-model", str(folders[row.on]), *RUN]
    base = [*of_model, *row.beside.split()]
    return base, [*(without(base, row.drops) if row.drops else base), *row.words.split()]


@functools.cache
def seen(words: tuple[str, ...], name: str, is_described: bool, is_elsewhere: bool) -> object:
    """Return the value that a row looks at, or the error that the words end in."""
    try:
        if is_elsewhere:
            return fields_elsewhere(words)[name]
        settings = parse(*words) if is_described else parse_run(*words, world_size=NUM_RANKS)
    except UsageError as error:
        return error
    return effect(settings, name) if name != "error" else None


def fields_elsewhere(words: Sequence[str]) -> dict[str, object]:
    """Return the arguments of megatron-core's configurations on a platform that has everything."""
    able = SimpleNamespace(name="cuda", unsupported_fusions={})
    with patch.object(resolve, "find_engine_refusal", lambda: None):
        reading = command_line._read(words)
        folder = next((Path(words[i + 1]) for i, word in enumerate(words) if word == "--hf-model"), None)
        architecture = command_line._read_architecture(folder, reading)
        fields = resolve.resolve_fields(reading.flags, reading.given, architecture, able)
    assert not reading.problems
    values = {
        name: resolve._list_defaults(built) | getattr(fields, name) for name, built in flags.import_configs().items()
    }
    return {f"{name}.{field}": value for name, of_config in values.items() for field, value in of_config.items()}


def fault(flag: Flag, row: Row, folders: dict[str, Path]) -> str | None:
    """Return the fault of a flag that should have an effect; None if it has one."""
    before, after = (
        seen(tuple(words), row.sees, row.on in DESCRIBED, row.elsewhere) for words in command_lines(row, folders)
    )
    if isinstance(before, UsageError):
        return f"the row's own command line is an error: {before}"
    if row.sees == "error":
        is_named = isinstance(after, UsageError) and any(name in str(after) for name in flag.names)
        return None if is_named else f"{row.words or 'to leave it out'} must be an error that names it, and is {after}"
    if isinstance(after, UsageError):
        return f"{row.words} is an error: {after}"
    return None if before != after else f"{row.words} does not change {row.sees}"


def used_flags() -> dict[str, Flag]:
    return {flag.name: flag for flag in flags.list_flags() if flag.kind is Kind.USED and flag.megatron}


def faults(folders: dict[str, Path], rows: dict[str, Row]) -> dict[str, str]:
    used = used_flags()
    found = dict.fromkeys(used.keys() - rows, "has no row here")
    for name in used.keys() & rows:
        problem = fault(used[name], rows[name], folders)
        if problem is not None:
            found[name] = problem
    return found


@pytest.mark.usefixtures("_one_parser")
def test_another_value_of_every_used_flag_changes_an_object_or_is_an_error(folders: dict[str, Path]) -> None:
    assert faults(folders, ROWS) == {}
    assert ROWS.keys() == used_flags().keys()
    print(f"{len(ROWS)} flags")


@pytest.mark.usefixtures("_one_parser")
def test_flags_that_need_another_platform_are_said_here(folders: dict[str, Path]) -> None:
    for name, row in ROWS.items():
        if not row.elsewhere:
            continue
        words = tuple(command_lines(row, folders)[1])
        here = seen(words, row.sees, row.on in DESCRIBED, False)
        if isinstance(here, UsageError):
            # Names the flag itself, or one that it needs.
            assert any(needed in str(here) for needed in (name, *row.beside.split())), name
        elif here != fields_elsewhere(words)[row.sees]:
            assert any(name in note for note in parse_run(*words, world_size=NUM_RANKS).notes), name


def test_a_flag_that_changes_nothing_is_found(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    planted = Flag(name="--ddp-do-nothing", targets=("planted.nothing",), help="Nothing.")
    everything = [*flags.list_script_flags(), planted]
    monkeypatch.setattr(flags, "list_script_flags", lambda: everything)
    assert faults(folders, {"--ddp-do-nothing": Row("--ddp-do-nothing", "iteration.sizes")})["--ddp-do-nothing"] == (
        "--ddp-do-nothing does not change iteration.sizes"
    )
    rows = {name: ROWS[name] for name in ("--seed",)}
    assert faults(folders, rows)["--ddp-do-nothing"] == "has no row here"
