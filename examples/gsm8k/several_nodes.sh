#!/usr/bin/env bash
# Engines on one node, a trainer over several others; RUN and SHARED lie on a file system that all nodes reach.
#   on the engines' node:    ROLE=sidecar ADDRESS=10.0.0.1:8700 SHARED=... bash several_nodes.sh MODEL TRAIN TEST RUN
#   on each trainer's node:  ROLE=trainer ADDRESS=10.0.0.1:8700 SHARED=... NODES=2 NODE_RANK=0 MASTER=10.0.0.2 \
#                                bash several_nodes.sh MODEL TRAIN TEST RUN
# The sidecar answers whoever has the token in the run's folder (mode 600): keep that folder, and the network, yours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/gsm8k/common.sh
FOLDER=$RUN/rollout/$(basename "$RUN")

case $ROLE in
sidecar)
    python -m megatron_rl.sidecar --rollout-folder "$FOLDER" --hf-model "$MODEL" --seq-length 2048 --reward gsm8k \
        --rollout-listen "$ADDRESS" --rollout-num-engines 4 --rollout-tensor-parallel-size 2 \
        --rollout-max-num-seqs 256 --rollout-retain-journals 21
    ;;
trainer)
    torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node 8 --master-addr "$MASTER" \
        --master-port 29500 pretrain_grpo.py "${FLAGS[@]}" \
        --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 \
        --rollout-endpoint "http://$ADDRESS" --rollout-folder "$FOLDER" --publish-folder "$SHARED"
    ;;
esac
