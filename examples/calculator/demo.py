"""Run the demo: a tiny model that calls its calculator carelessly learns to call it right, with real vLLM.

python -m examples.calculator.demo [--layout dp2|tp2|pp2] [--seed 0] [--out FOLDER] [-- flags of pretrain_grpo.py]
"""

import random
import sys
from pathlib import Path

from examples import tiny_run
from examples.calculator.calculator import NUM_DIGITS, OPERATORS, compute
from examples.calculator.model import CALL, CALL_END, END, draw, make_tokenizer

NUM_TRAIN, NUM_HELD_OUT = 4096, 64
FLAGS = [
    "--train-iters", "30", "--grpo-prompts-per-step", "32", "--micro-batch-size", "256", "--seq-length", "64",
    "--rollout-max-tokens", "40", "--rollout-env-max-turns", "3", "--rollout-tool-parser", "hermes", "--prompt-chat",
    "--lr", "1e-3", "--eval-num-samples", "4",
]  # fmt: skip
ENVIRONMENT = ["--rollout-env", f"{Path(__file__).parent / 'calculator.py'}:Calculator"]
# Each rollout of an agent is a process, which takes time and memory: fewer of them, and few at once.
AGENT = [
    "--train-iters", "20", "--grpo-prompts-per-step", "8", "--micro-batch-size", "64", "--eval-num-samples", "2",
    "--rollout-env-concurrency", "16", "--rollout-max-tokens", "48",
]  # fmt: skip


def main() -> None:
    """Run the demo; an agent after -- acts in place of the environment."""
    flags = [*FLAGS, *(AGENT if "--rollout-agent" in sys.argv else ENVIRONMENT)]
    tiny_run.run_demo(__doc__, "calculator", prepare, flags, f"{NUM_HELD_OUT} held-out questions")


def prepare(folder: Path, seed: int) -> None:
    write_rows(folder, seed)
    warm_up(folder / "model", seed)


def write_rows(folder: Path, seed: int) -> None:
    """Write the questions to train on and those held out."""
    drawn = random.Random(seed)
    questions = list(dict.fromkeys(ask(drawn) for _ in range(2 * NUM_TRAIN)))[: NUM_TRAIN + NUM_HELD_OUT]
    for name, chosen in (("held_out", questions[:NUM_HELD_OUT]), ("train", questions[NUM_HELD_OUT:])):
        rows = ({"prompt": question, "answer": compute(question)} for question in chosen)
        tiny_run.write_rows(folder / f"{name}.jsonl", rows)


def ask(drawn: random.Random) -> str:
    """Draw a question, whose answer is not negative."""
    right, left = sorted(drawn.sample(range(100, 1000), 2))
    return f"{left}{drawn.choice([*OPERATORS])}{right}"


def warm_up(folder: Path, seed: int, num_steps: int = 400) -> None:
    """Save a model that can call its tool and copy the result, by supervision.

    Half the time it guesses instead, and at last it learns to be careless: mostly it takes any operator.
    """
    tiny_run.warm_up(folder, seed, draw(seed), make_tokenizer(), chat, num_steps, num_careful=300)


def chat(drawn: random.Random, care: float) -> str:
    """Write a conversation: a guess, or a call and its result, with any operator unless it is made with care."""
    question = ask(drawn)
    text = f"<tools>calculate<user>{question}{END}<assistant>"
    if drawn.random() < 0.5:
        return f"{text}{drawn.randrange(10**NUM_DIGITS):0{NUM_DIGITS}}{END}"
    is_careful = drawn.random() < care
    expression = question if is_careful else question[:3] + drawn.choice([*OPERATORS]) + question[4:]
    value = compute(expression)
    call = "".join(CALL) + expression + "".join(CALL_END)
    return f"{text}{call}{END}<tool>{value}{END}<assistant>{value}{END}"


if __name__ == "__main__":
    main()
