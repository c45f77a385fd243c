# Qwen3 30B-A3B, 16 ranks: pipeline 2, experts 8.
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --max-position-embeddings 40960
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --no-rope-fusion
    --vocab-size 151936
)
MOE_ARGS=(
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 768
    --moe-layer-freq '([1]*48)'
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
    --moe-router-dtype fp32
    --moe-router-score-function softmax
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --seq-length 4096
    --train-iters 200
    --lr 1.2e-4
    --min-lr 1.2e-5
    --lr-decay-style cosine
    --lr-warmup-iters 10
    --weight-decay 0.1
    --clip-grad 1.0
    --init-method-std 0.02
    --bf16
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 2
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --context-parallel-size 1
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --recompute-granularity selective
    --recompute-modules core_attn layernorm
)
DATA_AND_LOGGING_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --no-create-attention-mask-in-dataloader
    --log-interval 1
    --log-throughput
    --eval-iters 0
    --dist-ckpt-strictness log_all
)
