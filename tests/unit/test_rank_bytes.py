"""The formulas of a rank's memory, beside the count of `megatron-rl doctor --fit`."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.ops.log_probs import triton_fused
from megatron_rl.shared.device_memory import LOGITS
from megatron_rl.types import Experts
from tests.command_lines import folder
from tests.processes import ROOT
from tests.unit.test_examples import QWEN3_4B

DENSE = dataclasses.replace(QWEN3_4B, num_layers=4)
SPARSE = dataclasses.replace(
    DENSE, family="qwen3_moe", hidden_size=1024, experts=Experts(16, 4, 768, True), tied_embeddings=False
)
FULL = "--recompute-granularity full --recompute-method"
TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size"
HALF = "--bf16 --use-distributed-optimizer"
LAYOUTS = (
    "",
    HALF,
    f"{HALF} {TP} --sequence-parallel",
    f"{HALF} {PP} 4",
    f"{HALF} {TP} --sequence-parallel --context-parallel-size 2",
    f"{HALF} {FULL} uniform --recompute-num-layers 1",
    TP,
    f"{HALF} {TP} --grad-reduce-in-bf16 --grpo-kl-beta 0.1",
    f"--bf16 {FULL} block --recompute-num-layers 1 --grpo-kl-beta 0.1 --frozen-offload",
    f"{HALF} {FULL} uniform --recompute-num-layers 2",
    f"--bf16 {PP} 2 --num-virtual-stages-per-pipeline-rank 2 --optimizer sgd",
    "--recompute-granularity selective --recompute-modules layernorm",
    f"{HALF} {TP} --sequence-parallel --recompute-granularity selective --recompute-modules layernorm",
    f"{HALF} --global-batch-size 64 --rollout-transport nccl",
    f"{HALF} {PP} 2 --grpo-advantage gae --critic policy",
    f"{HALF} {TP} --global-batch-size 64 --grpo-advantage gae --critic policy",
    f"{HALF} {PP} 2 --global-batch-size 64 --grpo-advantage gae --critic head",
    f"{HALF} {TP} --sequence-parallel {FULL} uniform --recompute-num-layers 1 --grpo-advantage gae --critic head",
)
OF_EXPERTS = (
    f"{HALF} --expert-model-parallel-size 4",
    f"--bf16 {TP} --sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 "
    "--recompute-granularity selective --recompute-modules layernorm",
)
COUNTING = """
import json, os, sys
from megatron_rl.command_line import pack_size, parse as command_line
from megatron_rl.trainer.loop.rank_memory import make_workload
os.environ["LOCAL_WORLD_SIZE"] = "8"
choose, found = pack_size.choose_pack, []
def chosen(*arguments):
    found.append(choose(*arguments))
    return found[-1]
pack_size.choose_pack = chosen
for words in json.loads(sys.argv[1]):
    settings, sizes = command_line.parse_sizes(words.split(), 8, 1 << 50)
    from megatron_rl.trainer.mcore import footprint
    work = make_workload(sizes, 8)
    counted = [one.device for one in footprint.count(settings, work)]
    tokens = sum(prompt + sum(responses) for prompt, responses in work.lengths)
    print(json.dumps([max(counted, key=lambda one: sum(one.values())), found[-1].taken.total, tokens,
                      found[-1].size.tokens, work.num_micro_batches, found[-1].size.num_micro_batches]))
"""


@pytest.mark.each_change
def test_the_formula_estimates_what_doctor_counts(tmp_path: Path) -> None:
    places = {"dense": folder(tmp_path / "dense", DENSE), "sparse": folder(tmp_path / "sparse", SPARSE)}
    cases = [("dense", words) for words in LAYOUTS] + [("sparse", words) for words in OF_EXPERTS]
    common = (
        f"--platform cpu --prompts none.jsonl --reward exact --lr 1e-6 --train-iters 4 --seq-length 3072 "
        f"--rollout-max-tokens 2048 --rollout-folder {tmp_path}/run --rollout-engine scripted "
        "--grpo-prompts-per-step 64 --grpo-group-size 4 --micro-batch-size 4 --print-config"
    )
    lines = [f"{common} --hf-model {places[name]} {words}" for name, words in cases]
    ended = subprocess.run(
        [sys.executable, "-c", COUNTING, json.dumps(lines)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    for line, (name, words) in zip(ended.stdout.splitlines(), cases, strict=True):
        counted, estimated, tokens, own_tokens, num_micro_batches, own_number = json.loads(line)
        assert (own_tokens, own_number) == (tokens, num_micro_batches), words
        total = sum(counted.values())
        print(f"{estimated / total:.4f}", name, words, counted)
        assert estimated == pytest.approx(total, rel=0.02), (words, counted)


def test_the_largest_block_of_logits_is_that_of_the_kernels() -> None:
    assert LOGITS == triton_fused.MOST_BLOCK_BYTES
