"""The other flags of Megatron's training scripts: those that have no effect here, and those that are refused.

A list names them with their shape: "--x" is a switch, "--x=" takes a value, "--x+" one or more, "--x*" any number, and
"--x=1" a value of which 1 asks for nothing, so that it is accepted of a refused flag too. A flag that this package
comes to use moves out of here.
"""

from collections.abc import Iterator

from megatron_rl.config.flag import Flag, Kind

IGNORED = {
    "prompts come from a data set of their own, named by flags of this package": """
        --data-path* --split= --train-data-path* --valid-data-path* --test-data-path* --data-args-path=
        --per-split-data-args-path= --per-dataset-sequences-path= --data-cache-path= --mock-data
        --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --no-mmap-bin-files --sample-rate= --mask-prob=
        --short-seq-prob= --num-workers= --reset-position-ids --reset-attention-mask --eod-mask-loss
        --dataloader-inter-document-masking --no-create-attention-mask-in-dataloader --num-dataset-builder-threads=
        --object-storage-cache-path= --mid-level-dataset-surplus= --allow-ambiguous-pad-tokens --dataloader-type=
        --phase-transition-iterations= --fim-rate= --fim-spm-rate= --fim-split-sample= --fim-fragment-rate=
        --fim-no-prefix= --fim-prefix-token= --fim-middle-token= --fim-suffix-token= --fim-pad-token= --fim-eod-token=
        --sft-tokenizer-prompt-format=""",
    "the tokenizer is that of --hf-model": """
        --vocab-file= --merge-file= --vocab-extra-ids= --tokenizer-type= --tokenizer-model= --tokenizer-metadata=
        --tokenizer-special-tokens+ --tiktoken-pattern= --tiktoken-num-special-tokens=
        --tokenizer-sentencepiece-legacy --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-no-use-fast
        --tokenizer-hf-no-include-special-tokens --trust-remote-code --null-tokenizer-eod-id=
        --null-tokenizer-pad-id= --chat-template= --no-use-tokenizer-model-from-checkpoint-args
        --disable-use-tokenizer-model-from-checkpoint-args""",
    "rewards are the measure here, and there is no validation loss": """
        --eval-iters= --start-eval-at-iter= --eval-global-batch-size= --eval-micro-batch-size=
        --test-mode --full-validation --multiple-validation-sets --validation-set-names+ --no-manual-gc-eval
        --disable-manual-gc-eval""",
    "metrics and traces are those of this package": """
        --log-params-norm --log-throughput --log-progress --timing-log-level= --timing-log-option=
        --tensorboard-log-interval= --tensorboard-queue-size= --log-timers-to-tensorboard
        --no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard
        --log-memory-to-tensorboard --log-memory-interval= --log-device-memory-used --log-num-zeros-in-grad
        --log-max-attention-logit --no-barrier-with-level-1-timing --log-world-size-to-tensorboard
        --logging-level= --log-energy --moe-per-layer-logging
        --moe-routing-trace-path= --moe-routing-trace-max-training-iters= --moe-routing-trace-capture-logits
        --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights --log-straggler
        --straggler-ctrlr-port= --straggler-minmax-count= --disable-straggler-on-startup
        --run-workload-inspector-server --no-one-logger --one-logger-project= --one-logger-run-name=
        --one-logger-async --app-tag-run-name= --app-tag-run-version= --profile --profile-step-start=
        --profile-step-end= --use-pytorch-profiler --pytorch-profiler-collect-shapes
        --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra --profile-ranks+
        --record-memory-history --memory-snapshot-path= --record-shapes --nvtx-ranges
        --save-activations-interval= --save-tokens-per-expert-interval= --save-wgrads-interval=
        --save-dgrads-interval= --dump-param-to-param-group-map=""",
    "the run ends after --train-iters, and a job's limits are the scheduler's": """
        --exit-interval= --exit-duration-in-mins= --exit-signal-handler --exit-signal=
        --exit-signal-handler-for-dataloader --exit-signal-handler-for-training --adlr-autoresume
        --adlr-autoresume-interval= --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters=""",
    "it is how Megatron-core works in any case, or what its scripts no longer read": """
        --use-mcore-models --use-flash-attn --no-bias-gelu-fusion --local-rank= --lazy-mpu-init --onnx-safe=
        --bert-no-binary-head --use-dist-ckpt --dist-ckpt-format= --ckpt-fully-parallel-save --dist-ckpt-workers=
        --auto-detect-ckpt-format --disable-msc --no-position-embedding --relative-attention-num-buckets=
        --relative-attention-max-distance= --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load
        --no-use-layer-wise-param-layout --data-parallel-sharding-strategy= --outer-dp-sharding-strategy=
        --suggested-communication-unit-size= --torch-fsdp2-no-reshard-after-forward --rerun-mode=
        --error-injection-rate= --error-injection-type= --decrease-batch-size-if-needed --no-align-grad-reduce
        --disable-align-grad-reduce --no-gradient-reduce-div-fusion""",
    "attention is shared-prompt attention, which --shared-prompt-backend chooses": """
        --attention-softmax-in-fp32 --no-masked-softmax-fusion""",
    "norms are those of this package, or TransformerEngine's": """
        --no-persist-layer-norm""",
    "the norm of the reduced gradients is checked in each update": """
        --no-check-for-nan-in-loss-and-grad""",
    "each platform has one backend of collectives": """
        --distributed-backend=""",
    "the loop here takes care of it, or the defaults of Megatron-core hold": """
        --manual-gc --manual-gc-interval= --empty-unused-memory-level= --train-sync-interval=
        --check-weight-hash-across-dp-replicas-interval= --gpu-sniff-test-interval= --disable-jit-fuser
        --nccl-communicator-config-path= --use-sharp --sharp-enabled-group= --high-priority-stream-groups+
        --distributed-timeout-seconds-after-init= --flight-recorder-dump-path= --flight-recorder-trace-buffer-size=
        --no-flight-recorder-dump-on-timeout --disable-flight-recorder-dump-on-timeout
        --flight-recorder-include-stack-trace --no-flight-recorder-include-only-active
        --disable-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec
        --disable-flight-recorder-extra-dump-on-exec --create-all-gather-group --async-strategy=
        --use-persistent-ckpt-worker --async-ckpt-cpu-priority= --async-ckpt-io-priority= --async-ckpt-use-cpu-shm
        --ckpt-fully-parallel-load-exchange-algo= --ckpt-fully-parallel-save-process-group=
        --ckpt-fully-parallel-load-process-group= --ckpt-assume-constant-structure --verify-integrity
        --no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity
        --no-stream-ckpt-dequant --disable-stream-ckpt-dequant --distrib-optim-fully-reshardable-mem-efficient
        --dist-ckpt-optim-fully-reshardable --cross-entropy-loss-fusion --cross-entropy-fusion-impl=
        --enable-experimental""",
}

REFUSED = {
    "counted in samples, the length of training depends on what is sampled; write --train-iters and the flags in "
    "iterations": """
        --train-samples= --lr-decay-samples= --lr-warmup-samples=0 --lr-wsd-decay-samples=""",
    "every update has the same number of responses; write --global-batch-size": """
        --rampup-batch-size+ --step-batch-size-schedule= --iterations-to-skip+ --result-rejected-tracker-filename=""",
    "the optimizer is megatron-core's Adam or SGD; drop the flag": """
        --muon-momentum= --muon-no-split-qkv --muon-nesterov --muon-use-nesterov --muon-scale-mode=
        --muon-fp32-matmul-prec= --muon-coefficient-type= --muon-num-ns-steps= --muon-tp-mode=
        --muon-extra-scale-factor= --muon-scalar-optimizer= --lion-beta1= --lion-beta2= --optimizer-cuda-graph""",
    "ranks are numbered by tensor, context and data, and by stage of the pipeline last; drop the flag": """
        --use-tp-pp-dp-mapping""",
    "write --apply-wd-to-qk-layernorm": """
        --no-weight-decay-cond-type=""",
    "weights are gathered by data-parallel rank when they are published, and FSDP keeps them otherwise; write "
    "--use-distributed-optimizer": """
        --use-megatron-fsdp --use-torch-fsdp2 --fsdp-manual-registration --fsdp-double-buffer
        --enable-full-sharding-in-hsdp --keep-fp8-transpose-cache --megatron-fsdp-main-params-dtype=fp32
        --megatron-fsdp-main-grads-dtype=auto --megatron-fsdp-grad-comm-dtype=auto
        --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
        --fsdp-db-use-persist-buf-on-alloc-fail""",
    "Megatron-core cannot save such a run in its distributed format; drop the flag": """
        --overlap-param-gather-with-optimizer-step""",
    "gradients of every parameter are accumulated alike; write --accumulate-allreduce-grads-in-fp32": """
        --ddp-param-name-patterns-for-fp32-local-accumulation+""",
    "weights are published in the dtype that was trained; write --bf16": """
        --fp8-param-gather --fp4-param-gather --te-precision-config-file= --reuse-grad-buf-for-mxfp8-param-ag
        --kitchen-config-file= --kitchen-recipe-number=""",
    "log-probs are computed in float32 by an operation of this package; drop the flag": """
        --fp16-lm-cross-entropy""",
    "packed groups differ in length from one micro-batch to the next, and a graph needs one length; drop it": """
        --cuda-graph-scope+ --cuda-graph-modules+ --te-rng-tracker --enable-cuda-graph --external-cuda-graph""",
    "its buffers are made for one sequence length, and packed groups differ in length; drop the flag": """
        --tp-comm-overlap-cfg=""",
    "write --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers": """
        --pipeline-model-parallel-layout=""",
    "no supported model has it, and engines and weight export would not know it; drop the flag": """
        --window-attn-skip-freq= --no-rope-freq= --openai-gelu --squared-relu --quick-geglu --q-lora-rank=
        --kv-lora-rank= --qk-head-dim= --qk-pos-emb-head-dim= --v-head-dim= --mscale=1.0 --mscale-all-dim=0.0
        --cache-mla-latents --mla-down-proj-fusion --linear-attention-freq= --heterogeneous-layers-config-path=
        --heterogeneous-layers-config-encoded-json= --spec* --hybrid-layer-pattern= --hybrid-override-pattern=
        --mtp-hybrid-override-pattern= --mamba-training-ssm-states-dtype= --moe-use-upcycling
        --moe-upcycling-granularity= --encoder-num-layers= --decoder-num-layers= --encoder-seq-length=
        --decoder-seq-length=""",
    "the vocabulary is that of --hf-model, or --vocab-size, padded to --make-vocab-size-divisible-by": """
        --padded-vocab-size= --no-pad-vocab-size --disable-pad-vocab-size""",
    "the first weights come from --hf-model or --load; drop the flag": """
        --init-method-xavier-uniform --data-parallel-random-init --freeze-all-layers --pretrained-checkpoint=""",
    "flags come from the command line only; write them out": """
        --yaml-cfg= --use-checkpoint-args --use-mp-args-from-checkpoint-args""",
    "checkpoints are in Megatron's torch_dist, in --save and --load only; drop the flag": """
        --ckpt-convert-format= --ckpt-convert-save= --ckpt-convert-update-legacy-dist-opt-format
        --non-persistent-save-interval= --non-persistent-ckpt-type= --non-persistent-global-ckpt-dir=
        --non-persistent-local-ckpt-dir= --non-persistent-local-ckpt-algo= --replication --replication-jump=
        --replication-factor= --load-main-params-from-ckpt --override-ckpt-iteration= --dist-ckpt-save-pre-mcore-014
        --save-params-interval= --enable-msc""",
    "Megatron's scripts have given it up; write --micro-batch-size": """
        --batch-size=""",
    "Megatron's scripts have given it up; write --tensor-model-parallel-size": """
        --model-parallel-size=""",
    "Megatron's scripts have given it up; write --lr-warmup-fraction": """
        --warmup=""",
    "Megatron's scripts have given it up; write --recompute-granularity": """
        --checkpoint-activations""",
    "ranks that talk to nobody do not train; drop the flag": """
        --fake-process-group""",
    "a rank that fails ends the run with its reason, and the run is started again from --load; drop the flag": """
        --inprocess-restart --inprocess-max-iterations= --inprocess-monitor-thread-interval=
        --inprocess-monitor-process-interval= --inprocess-progress-watchdog-interval= --inprocess-heartbeat-interval=
        --inprocess-soft-timeout= --inprocess-hard-timeout= --inprocess-heartbeat-timeout=
        --inprocess-barrier-timeout= --inprocess-completion-timeout= --inprocess-last-call-wait=
        --inprocess-termination-grace-time= --inprocess-granularity= --inprocess-active-world-size=
        --inprocess-empty-cuda-cache --check-for-spiky-loss --fault-injector-ranks= --fault-injector-num-ranks=
        --fault-injector-fault-types= --fault-injector-fault-probabilities= --fault-injector-fault-delay=
        --fault-injector-delay-start-iteration= --fault-injector-mtti-seconds= --fault-injector-offset-seconds=
        --fault-injector-seed=""",
    "this package trains on rewards; drop the flag": """
        --sft --fim-data --skip-train --ict-head-size= --biencoder-projection-dim= --retriever-score-scaling
        --biencoder-shared-query-context-model --ict-load= --bert-load= --titles-data-path= --query-in-block-prob=
        --use-one-sent-docs --evidence-data-path= --retriever-report-topk-accuracies+ --block-data-path=
        --embedding-path= --indexer-batch-size= --indexer-log-interval= --num-classes= --img-h= --img-w=
        --num-channels= --patch-dim= --classes-fraction= --data-per-class-fraction= --no-data-sharding
        --head-lr-mult= --vision-pretraining --vision-pretraining-type= --vision-backbone-type=
        --swin-backbone-type= --mask-type= --mask-factor= --iter-per-epoch= --dino-local-img-size=
        --dino-local-crops-number= --dino-head-hidden-size= --dino-bottleneck-size= --dino-freeze-last-layer=
        --dino-norm-last-layer --dino-warmup-teacher-temp= --dino-teacher-temp= --dino-warmup-teacher-temp-epochs=
        --logits-save-top-k= --logits-save-top-p= --logits-save-top-p-min-k= --logits-save-dir=
        --logits-save-dtype= --logits-load-dir= --logits-load-decode-threads= --logits-load-prefetch-factor=
        --logits-load-msc-prefetch-depth= --logits-load-kd-loss-alpha= --logits-load-ignore-errors""",
    "it belongs to Megatron's own loop of reinforcement learning, and this package has another; drop the flag": """
        --perform-rl-step --rl-prompts-per-eval= --rl-generation-lag=0
        --rl-submission-granularity= --rl-consumption-granularity= --grpo-iterations=
        --grpo-entropy-term-weight= --grpo-filter-groups-with-same-reward
        --langrl-env-config= --rl-default-top-p= --rl-default-top-k=
        --rl-offload-optimizer-during-inference --rl-kv-cache-management-mode= --rl-persist-cuda-graphs
        --no-rl-persist-cuda-graphs --rl-partial-rollouts --no-rl-partial-rollouts
        --no-rl-inference-logprobs-is-correction
        --rl-use-sequence-packing --no-rl-use-sequence-packing
        --rl-sequence-packing-max-sequences-per-bin= --rl-sequence-packing-algo= --rl-training-cuda-graphs
        --no-rl-training-cuda-graphs --rl-inference-tensor-model-parallel-size=
        --rl-inference-pipeline-model-parallel-size= --rl-inference-expert-model-parallel-size=
        --rl-inference-expert-tensor-model-parallel-size= --rl-inference-model-unified-memory-level=
        --rl-offload-inference-model-weights-when-idle --no-rl-offload-inference-model-weights-when-idle
        --refit-method= --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap --rl-skip-bos-token
        --no-rl-skip-bos-token --rl-profile --rl-profile-dir= --rl-inference-parsers*""",
    "it belongs to Megatron's own inference, and the engines here are vLLM's; drop the flag": """
        --inference-rng-tracker --inference-batch-times-seqlen-threshold= --max-tokens-to-oom=
        --output-bert-embeddings --bert-embedder-type= --use-legacy-static-engine --inference-max-requests=
        --inference-max-seq-length= --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb=
        --inference-dynamic-batching-paused-buffer-size-gb= --inference-dynamic-batching-mamba-memory-ratio=
        --inference-dynamic-batching-block-size= --inference-dynamic-batching-max-requests=
        --inference-dynamic-batching-max-tokens= --inference-dynamic-batching-num-cuda-graphs=
        --inference-dynamic-batching-track-paused-request-events
        --inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs
        --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens=
        --inference-dynamic-batching-unified-memory-level= --enable-chunked-prefill --num-speculative-tokens=
        --inference-dynamic-batching-prefix-caching --no-inference-dynamic-batching-prefix-caching
        --inference-dynamic-batching-prefix-caching-eviction-policy=
        --inference-dynamic-batching-prefix-caching-coordinator-policy=
        --inference-dynamic-batching-prefix-caching-routing-alpha=
        --inference-dynamic-batching-prefix-caching-mamba-gb=
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count=
        --inference-dynamic-batching-cuda-graph-sizing-distribution=
        --inference-dynamic-batching-sampling-backend= --use-same-sampling-seed-across-dp-ranks
        --inference-dynamic-batching-async-sched-mode= --inference-dynamic-batching-logprobs-mode=
        --inference-logging-step-interval= --inference-text-gen-server-logging
        --no-inference-text-gen-server-logging --inference-wandb-logging --no-inference-wandb-logging
        --inference-coordinator-port= --mamba-inference-conv-states-dtype= --mamba-inference-ssm-states-dtype=
        --inference-use-synchronous-zmq-collectives --no-inference-use-synchronous-zmq-collectives
        --inference-disable-ep-consensus --no-inference-disable-ep-consensus --inference-shards=""",
}


def flags() -> Iterator[Flag]:
    for kind, lists in ((Kind.IGNORED, IGNORED), (Kind.REFUSED, REFUSED)):
        for remedy, words in lists.items():
            for word in words.split():
                yield _flag(word, kind, remedy)


def _flag(word: str, kind: Kind, remedy: str) -> Flag:
    name, mark, harmless = _split(word)
    refused = kind is Kind.REFUSED
    return Flag(
        name=name,
        kind=kind,
        remedy=remedy,
        convert=str if mark else None,
        nargs=mark if mark in ("+", "*") else None,
        allowed=((harmless,) if harmless else ()) if refused else None,
    )


def _split(word: str) -> tuple[str, str, str]:
    for mark in "=+*":
        name, found, harmless = word.partition(mark)
        if found:
            return name, mark, harmless
    return word, "", ""
