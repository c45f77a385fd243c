"""Run the demo: a tiny model that forgets carries learns not to, with real vLLM, two Megatron ranks, and a picture.

python -m examples.arithmetic.demo [--model qwen3|glm4_moe|qwen3_next] [--layout dp2|tp2|pp2] [--seed 0]
                                   [--out FOLDER] [-- flags of pretrain_grpo.py]

With --gpu, one rank and one engine share a GPU, in bf16. Without a GPU the demo stops when the model is warmed up.

With --recipe TREE/pretrain_gpt.py, a Megatron-LM tree trains it; --python names an environment that the tree runs in.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from examples.arithmetic import model, task, warm_up
from megatron_rl.analysis.picture import picture
from megatron_rl.errors import ExitCode, count_noun
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.summary import text_curves
from megatron_rl.shared.records.audit_check import verify

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    "dp2": ["--use-distributed-optimizer"],
    "tp2": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
}
# On a CPU, vLLM computes linear layers in bfloat16 only.
OF_FAMILIES = {"qwen3_next": ["--rollout-dtype", "bfloat16", "--publish-dtype", "bfloat16"]}
ON_GPU = ["--platform", "cuda", "--bf16", "--rollout-colocate"]
FLAGS = [
    "--train-iters", "40", "--grpo-prompts-per-step", "64", "--grpo-group-size", "16", "--micro-batch-size", "256",
    "--seq-length", "32", "--rollout-max-tokens", "6", "--rollout-temperature", "1.0", "--rollout-max-num-seqs", "256",
    "--lr", "3e-4", "--lr-warmup-iters", "2", "--lr-decay-style", "linear", "--weight-decay", "0",
    "--adam-beta1", "0.9", "--adam-beta2", "0.95", "--clip-grad", "1.0", "--eval-interval", "5",
]  # fmt: skip


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--layout", choices=sorted(LAYOUTS), default="dp2", help="of two ranks, on the CPU")
    places.add_argument("--gpu", action="store_true", help="train and sample on one GPU")
    parser.add_argument("--model", choices=model.FAMILIES, default="qwen3", help="the family of the tiny model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--reward", default="right_answer", help="a function of examples/arithmetic/reward.py")
    parser.add_argument("--forgotten", type=float, default=task.FORGOTTEN, help="how often solutions forget a carry")
    parser.add_argument("--warm-up-steps", type=int, default=warm_up.Recipe.num_steps, help="of the tiny model")
    parser.add_argument("--hidden-size", type=int, default=model.HIDDEN_SIZE, help="of the tiny model")
    parser.add_argument("--recipe", help="a script of Megatron-LM that trains in place of pretrain_grpo.py")
    parser.add_argument("--python", default=sys.executable, help="the Python that trains; the rest stays on this one")
    parser.add_argument("flags", nargs="*", help="after --: flags for pretrain_grpo.py, which win over the demo's")
    arguments = parser.parse_args()
    if arguments.recipe is not None and arguments.model != "qwen3":
        parser.error("--recipe trains the Qwen3 that its flags describe: drop --model")
    start = time.monotonic()
    out = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    task.write_files(out, arguments.seed)
    recipe = warm_up.Recipe(num_steps=arguments.warm_up_steps, forgotten=arguments.forgotten)
    before = warm_up.make(out / "model", arguments.seed, recipe, arguments.model, arguments.hidden_size)
    if arguments.gpu and not torch.cuda.is_available():
        print(describe_missing_gpu(out), file=sys.stderr)
        sys.exit(ExitCode.ENVIRONMENT)
    of_family = OF_FAMILIES.get(arguments.model, [])
    flags = (ON_GPU if arguments.gpu else LAYOUTS[arguments.layout] + of_family) + arguments.flags
    program, num_ranks = find_program(arguments.recipe), 1 if arguments.gpu else 2
    run = train(out, program, arguments.python, arguments.reward, arguments.seed, flags, num_ranks)
    records = read_metrics(run)
    print(text_curves({"arithmetic": records}))
    picture({"arithmetic": run}, out / "picture.png")
    after = records[-1]["evaluation"]["pass"]
    print(f"\n{describe_audit(run)}")
    print(
        f"of 512 held-out problems {before:.1%} were answered after the warm-up, {after:.1%} after GRPO; "
        f"{time.monotonic() - start:.0f} s in all\n(answered with the likeliest tokens; the reward is given to tokens "
        f"drawn at temperature 1)\nthe picture: {out / 'picture.png'}"
    )
    print(describe_next(run))
    (out / "result.json").write_text(json.dumps({"before": before, "after": after}) + "\n")


def find_program(recipe: str | None) -> list[str]:
    """Return torchrun's program, and the flags that it alone needs: for a script of Megatron's, those of its model."""
    if recipe is None:
        return [str(ROOT / "pretrain_grpo.py")]
    return ["-m", "megatron_rl.recipe", recipe, *model.MEGATRON_FLAGS]


def describe_missing_gpu(out: Path) -> str:
    """Say that no GPU was found, what has been done without one, and what to do."""
    return (
        f"no GPU: torch {torch.__version__} finds no CUDA device here (`nvidia-smi` lists those that the driver knows, "
        f"and CUDA_VISIBLE_DEVICES must not hide them). The environment is installed; prompts and the warmed-up model "
        f"are in {out}. On a machine with a GPU the same command trains"
    )


def describe_audit(run: Path) -> str:
    """Check the run's audit log, and return the result in a line."""
    report = verify(run)
    proofs, breaches = report.proofs, count_noun(len(report.breaches), "breach", "breaches")
    return (
        f"audit: {report.num_lines} lines, {breaches}; in {proofs.num_whole} of {proofs.num_reports} publishes the "
        "engine's weights were compared bit for bit with what was published"
    )


def describe_next(run: Path) -> str:
    """Name the commands that show more of the run."""
    command = Path(sys.executable).with_name("megatron-rl")
    uses = {
        f"report {run} --out {run.parent / 'report.html'}": "a page about the run",
        f"explain {run}": "where the time goes",
        f"audit {run}": "what was published, sampled and trained on",
    }
    return "\n".join(("see more:", *(f"  {command} {words}   # {what}" for words, what in uses.items())))


def train(
    out: Path, program: list[str], python: str, reward: str, seed: int, flags: list[str], num_ranks: int = 2
) -> Path:
    """Train by GRPO with an engine; return the run's folder."""
    run = out / "run"
    subprocess.run(
        [
            python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *program, *FLAGS,
            "--rollout-python", sys.executable,
            "--hf-model", str(out / "model"), "--prompts", str(out / "train.jsonl"),
            "--eval-prompts", str(out / "held_out.jsonl"), "--seed", str(seed + 1),
            "--reward", f"{ROOT / 'examples' / 'arithmetic' / 'reward.py'}:{reward}", "--reward-workers", "1",
            "--rollout-folder", str(run), *flags,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    return run


if __name__ == "__main__":
    main()
