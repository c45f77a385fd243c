# Qwen2.5 7B, 4 ranks: tensor 4.
MODEL_ARGS=(
    --transformer-impl transformer_engine
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --max-position-embeddings 131072
    --position-embedding-type rope
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --attention-softmax-in-fp32
    --no-masked-softmax-fusion
    --no-rope-fusion
    --make-vocab-size-divisible-by 128
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 64
    --seq-length 4096
    --train-iters 500
    --lr 1e-5
    --min-lr 1e-6
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 1e-1
    --clip-grad 1.0
    --bf16
    --seed 42
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 1
    --sequence-parallel
    --use-distributed-optimizer
    --recompute-activations
)
DATA_AND_LOGGING_ARGS=(
    --data-path 0.7 corpus_a_text_document 0.3 corpus_b_text_document
    --split 949,50,1
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model Qwen/Qwen2.5-7B
    --vocab-size 152064
    --log-interval 1
    --eval-iters 10
    --save checkpoints/qwen2_5_7b
    --load checkpoints/qwen2_5_7b
    --save-interval 100
    --no-load-optim
    --no-load-rng
)
