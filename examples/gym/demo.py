"""Run the demo: a tiny model that is often careless learns a mixture of reasoning-gym's tasks, with real vLLM.

python -m examples.gym.demo [--layout dp2|tp2|pp2] [--seed 0] [--out FOLDER] [-- flags of pretrain_grpo.py]
"""

import os
import random
import string
from pathlib import Path
from typing import Any

import reasoning_gym

from examples import tiny_run
from examples.calculator.model import END, SPECIAL, draw, make_tokenizer

# As the tasks are, but small enough for a tiny model.
TASKS = {
    "palindrome_generation": {"min_length": 3, "max_length": 4},
    "rotate_matrix": {"max_n": 2, "min_rotations": 1, "max_rotations": 3},
    "spell_backward": {"max_word_len": 5},
}
SHARES = {"palindrome_generation": 1, "rotate_matrix": 2, "spell_backward": 1}
NUM_ENTRIES, NUM_HELD_OUT = 4096, 32
FLAGS = [
    "--train-iters", "20", "--grpo-prompts-per-step", "32", "--micro-batch-size", "256", "--seq-length", "64",
    "--rollout-max-tokens", "10", "--prompt-chat", "--lr", "1e-3", "--eval-num-samples", "4",
    "--reward", f"{Path(__file__).parent / 'reward.py'}:score",
]  # fmt: skip


def main() -> None:
    sources = [f"{task}.jsonl={share}" for task, share in SHARES.items()]
    what = f"{NUM_HELD_OUT} held-out questions of each task"
    tiny_run.run_demo(__doc__, "gym", prepare, FLAGS, what, sources)


def prepare(folder: Path, seed: int) -> None:
    """Write the questions to train on and those held out, and warm the model up with the former."""
    entries = {task: draw_entries(task, seed) for task in TASKS}
    for task, drawn in entries.items():
        for name, chosen in ((f"held_out_{task}", drawn[:NUM_HELD_OUT]), (task, drawn[NUM_HELD_OUT:])):
            rows = ({"prompt": entry["question"], "entry": entry} for entry in chosen)
            tiny_run.write_rows(folder / f"{name}.jsonl", rows)
    known = [drawn[NUM_HELD_OUT:] for drawn in entries.values()]

    def write_chat(drawn: random.Random, care: float) -> str:
        """Write a question and its answer, or the answer of another one."""
        asked, other = drawn.choices(drawn.choice(known), k=2)
        answered = asked if drawn.random() < care else other
        return f"<user>{asked['question']}{END}<assistant>{answered['answer']}{END}"

    tokens, pieces = list_tokens(known)
    model, tokenizer = draw(seed, tokens), make_tokenizer(tokens, pieces)
    tiny_run.warm_up(folder / "model", seed, model, tokenizer, write_chat, num_steps=500, num_careful=440)


def list_tokens(tasks: list[list[dict[str, Any]]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return all tokens, and those that are longer than a character: what all questions of a task begin with."""
    begins = [os.path.commonprefix([entry["question"] for entry in drawn]) for drawn in tasks]  # noqa: RUF071
    pieces = (*begins, " degrees clockwise:\n")
    return (*string.ascii_letters, *string.digits, *" ,\n", *pieces, *SPECIAL), pieces


def draw_entries(task: str, seed: int) -> list[dict[str, Any]]:
    """Draw entries of a task, whose questions differ."""
    # An entry is drawn with the sum of the seed and its place.
    data = reasoning_gym.create_dataset(task, seed=seed * NUM_ENTRIES, size=NUM_ENTRIES, **TASKS[task])
    return [*{entry["question"]: entry for entry in data}.values()]


if __name__ == "__main__":
    main()
