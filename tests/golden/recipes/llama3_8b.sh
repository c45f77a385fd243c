# Llama 3 8B, 8 ranks: tensor 2, pipeline 2 interleaved, data 2.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --rotary-percent 1.0
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.0134
    --attention-backend auto
    --no-masked-softmax-fusion
    --no-rope-fusion
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --seq-length 8192
    --train-iters 1000
    --lr 1.5e-4
    --min-lr 1.0e-5
    --lr-decay-style cosine
    --lr-warmup-iters 20
    --lr-decay-iters 1000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --manual-gc
    --exit-duration-in-mins 230
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 8
    --context-parallel-size 1
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
DATA_AND_LOGGING_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 128256
    --split '99,1,0'
    --no-create-attention-mask-in-dataloader
    --num-workers 1
    --eval-iters 32
    --eval-interval 100
    --log-interval 1
    --log-throughput
    --tensorboard-dir "tensorboard_logs/llama3_8b"
    --save-interval 1000
    --ckpt-format torch_dist
    --distributed-timeout-minutes 60
)
