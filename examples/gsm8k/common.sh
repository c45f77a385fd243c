# The algorithm and the model, the same on every kind of machine; sourced by the recipes.
MODEL=$1 TRAIN=$2 TEST=$3 RUN=$4

FLAGS=(
    --hf-model "$MODEL" --prompts "$TRAIN" --eval-prompts "$TEST" --reward gsm8k
    --seq-length 2048 --max-prompt-tokens 512 --rollout-max-tokens 1536
    --train-iters 400 --grpo-prompts-per-step 128 --grpo-group-size 8
    --grpo-kl-beta 0.0 --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28
    --bf16 --lr 1e-6 --lr-decay-style constant --lr-warmup-iters 10 --weight-decay 0.01 --clip-grad 1.0
    --use-distributed-optimizer --overlap-grad-reduce
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --eval-interval 20 --save "$RUN" --load "$RUN" --save-interval 20 --save-keep-last 2 --save-hf "$RUN/hf"
    --tensorboard-dir "$RUN/tensorboard"
)
