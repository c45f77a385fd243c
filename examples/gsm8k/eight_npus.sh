#!/usr/bin/env bash
# Eight NPUs of one node: the trainer has the first four, two engines of two NPUs each the others. vllm-ascend pins
# another torch than MindSpeed wants, so it lives in an environment of its own.
#   VLLM_PYTHON=/path/to/python bash examples/gsm8k/eight_npus.sh MODEL TRAIN TEST RUN
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/gsm8k/common.sh

torchrun --standalone --nproc-per-node 4 pretrain_grpo.py "${FLAGS[@]}" \
    --platform npu --tensor-model-parallel-size 2 --sequence-parallel \
    --rollout-python "${VLLM_PYTHON:?the interpreter that vllm-ascend is installed for}" \
    --rollout-num-engines 2 --rollout-tensor-parallel-size 2 --rollout-devices 4 5 6 7 --rollout-max-num-seqs 256
