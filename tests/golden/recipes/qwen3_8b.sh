# Qwen3 8B, 8 ranks: tensor 2, data 4, activations recomputed in whole layers.
GPT_MODEL_ARGS=(
    --use-mcore-models
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm
    --max-position-embeddings 40960
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --no-rope-fusion
    --no-bias-swiglu-fusion
    --no-gradient-accumulation-fusion
)
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 256
    --seq-length 4096
    --train-iters 2000
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.01
    --adam-beta1 0.9
    --adam-beta2 0.98
    --clip-grad 1.0
    --bf16
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
    --distributed-backend nccl
)
DATA_AND_LOGGING_ARGS=(
    --data-path corpus_text_document
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model Qwen/Qwen3-8B
    --vocab-size 151936
    --split 100,0,0
    --log-interval 1
    --eval-interval 1000
    --eval-iters 0
    --save-interval 500
)
