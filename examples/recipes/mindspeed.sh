#!/usr/bin/env bash
# The flags of MindSpeed-LLM's recipe for Qwen3-4B, with GRPO, on four NPUs; two engines have four others.
#   VLLM_PYTHON=/path/to/python bash examples/recipes/mindspeed.sh MODEL TRAIN RUN
# MindSpeed-LLM's own tree is of a core below 0.16: its flags are taken, its scripts are not started.
set -euo pipefail
MODEL=$1 TRAIN=$2 RUN=$3
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# What the recipe said for pretraining; files of data and of its tokenizer need not be there.
RECIPE=(
    --use-flash-attn --use-fused-rotary-pos-emb --use-rotary-position-embeddings --use-fused-swiglu --use-fused-rmsnorm
    --no-masked-softmax-fusion --use-distributed-optimizer --micro-batch-size 8 --global-batch-size 1024
    --lr 1.25e-6 --lr-decay-style cosine --min-lr 1.25e-7 --weight-decay 1e-1 --lr-warmup-fraction 0.01
    --attention-dropout 0.0 --init-method-std 0.01 --hidden-dropout 0.0 --clip-grad 1.0 --adam-beta1 0.9
    --adam-beta2 0.95 --initial-loss-scale 4096 --seed 42 --bf16 --train-iters 400 --seq-length 2048 --no-shared-storage
    --tensor-model-parallel-size 2 --sequence-parallel --use-mcore-models
    --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --qk-layernorm --kv-channels 128
    --tokenizer-name-or-path "$MODEL" --max-position-embeddings 40960 --num-layers 36 --hidden-size 2560
    --ffn-hidden-size 9728 --num-attention-heads 32 --tokenizer-type PretrainedFromHF
    --make-vocab-size-divisible-by 1 --padded-vocab-size 151936 --rotary-base 1000000 --disable-bias-linear
    --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --attention-softmax-in-fp32
    --no-gradient-accumulation-fusion --group-query-attention --num-query-groups 8
    --data-path data --handler-name GeneralPretrainHandler --split 100,0,0 --distributed-backend nccl
)
# What is added for GRPO. vllm-ascend pins another torch than MindSpeed wants, so it has an environment of its own.
GRPO=(
    --platform npu --hf-model "$MODEL" --prompts "$TRAIN" --reward gsm8k
    --rollout-max-tokens 1536 --max-prompt-tokens 512 --grpo-prompts-per-step 128 --grpo-group-size 8
    --rollout-python "${VLLM_PYTHON:?the interpreter that vllm-ascend is installed for}"
    --rollout-num-engines 2 --rollout-tensor-parallel-size 2 --rollout-devices 4 5 6 7 --rollout-max-num-seqs 256
    --save "$RUN" --load "$RUN" --save-interval 20
)

torchrun --standalone --nproc-per-node 4 pretrain_grpo.py "${RECIPE[@]}" "${GRPO[@]}"
