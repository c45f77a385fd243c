#!/usr/bin/env bash
# A model file of slime's, sourced as it is, on four GPUs; two engines have four others.
#   bash examples/recipes/slime_model.sh SLIME MODEL TRAIN RUN
# A whole launch script of slime's: megatron-rl translate SCRIPT prints the command line for it.
set -euo pipefail
SLIME=$1 MODEL=$2 TRAIN=$3 RUN=$4
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Sets MODEL_ARGS; what it says must be what the model's config.json says.
source "$SLIME/scripts/models/qwen3-4B.sh"
# slime's names for what has one here too.
ROLLOUT_ARGS=(
    --rollout-batch-size 128 --n-samples-per-prompt 8 --rollout-max-response-len 1536 --rollout-max-prompt-len 512
    --global-batch-size 1024 --use-dynamic-batch-size --max-tokens-per-gpu 16384
)

torchrun --standalone --nproc-per-node 4 pretrain_grpo.py \
    "${MODEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" --hf-model "$MODEL" --prompts "$TRAIN" --reward gsm8k \
    --tensor-model-parallel-size 2 --sequence-parallel --bf16 --use-distributed-optimizer \
    --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --train-iters 400 \
    --rollout-num-engines 2 --rollout-tensor-parallel-size 2 --rollout-devices 4 5 6 7 \
    --save "$RUN" --load "$RUN" --save-interval 20
