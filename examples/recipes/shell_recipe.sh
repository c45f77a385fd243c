#!/usr/bin/env bash
# Megatron-LM's own shell recipe of Mixtral, in a tree that `megatron-rl patch TREE` has changed.
#   bash examples/recipes/shell_recipe.sh TREE MODEL TRAIN RUN
set -euo pipefail
TREE=$1 MODEL=$2 TRAIN=$3 RUN=$4
cd "$TREE"

# The recipe hands this on to pretrain_gpt.py, which trains with GRPO because there are prompts.
export GRPO_ARGS="--hf-model $MODEL --prompts $TRAIN --reward gsm8k --rollout-max-tokens 1536 --max-prompt-tokens 512
    --grpo-prompts-per-step 128 --grpo-group-size 8 --rollout-endpoint ${ADDRESS:-10.0.0.1:8700}"

bash examples/mixtral/train_mixtral_8x7b_distributed.sh "$RUN" "$MODEL/tokenizer.model" data/pretraining_text_document
