#!/usr/bin/env bash
# pretrain_gpt.py of a Megatron-LM tree, unchanged, on four GPUs; two engines have four others.
#   bash examples/recipes/megatron_tree.sh TREE MODEL TRAIN RUN
set -euo pipefail
TREE=$1 MODEL=$2 TRAIN=$3 RUN=$4

# What the recipe said for pretraining; files of data and of its tokenizer need not be there.
RECIPE=(
    --use-mcore-models --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm
    --max-position-embeddings 40960 --seq-length 2048 --position-embedding-type rope --rotary-base 1000000
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
    --attention-dropout 0.0 --hidden-dropout 0.0 --bf16
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
    --micro-batch-size 8 --global-batch-size 1024 --train-iters 400
    --lr 1e-6 --lr-decay-style constant --weight-decay 0.01 --clip-grad 1.0
    --data-path "data/pretraining_text_document" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL"
)
# What is added for GRPO.
GRPO=(
    --hf-model "$MODEL" --prompts "$TRAIN" --reward gsm8k --rollout-max-tokens 1536 --max-prompt-tokens 512
    --grpo-prompts-per-step 128 --grpo-group-size 8
    --rollout-num-engines 2 --rollout-tensor-parallel-size 2 --rollout-devices 4 5 6 7
    --save "$RUN" --load "$RUN" --save-interval 20
)

torchrun --standalone --nproc-per-node 4 \
    -m megatron_rl.recipe "$TREE/pretrain_gpt.py" "${RECIPE[@]}" "${GRPO[@]}"
