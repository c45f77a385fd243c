#!/usr/bin/env bash
# Eight GPUs of one node: the trainer has the first four, two engines of two GPUs each the others.
#   bash examples/gsm8k/eight_gpus.sh MODEL TRAIN TEST RUN
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/gsm8k/common.sh

torchrun --standalone --nproc-per-node 4 pretrain_grpo.py "${FLAGS[@]}" \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --rollout-num-engines 2 --rollout-tensor-parallel-size 2 --rollout-devices 4 5 6 7 --rollout-max-num-seqs 256
