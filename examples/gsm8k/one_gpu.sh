#!/usr/bin/env bash
# One GPU, which the trainer and its engine share: Qwen3-0.6B or 1.7B. The run counts what the trainer needs, gives the
# engine the rest, as far as it can use it, and says so in a line at the start.
#   bash examples/gsm8k/one_gpu.sh MODEL TRAIN TEST RUN
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/gsm8k/common.sh

torchrun --standalone --nproc-per-node 1 pretrain_grpo.py "${FLAGS[@]}" \
    --rollout-colocate --rollout-max-num-seqs 256
