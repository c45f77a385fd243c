"""Run the demo: a tiny model that searches carelessly learns to search for what it is asked, with real vLLM.

python -m examples.search.demo [--layout dp2|tp2|pp2] [--seed 0] [--out FOLDER] [-- flags of pretrain_grpo.py]
"""

import random
from pathlib import Path

from examples import tiny_run
from examples.calculator.model import CALL_END, END, SPECIAL, draw, make_tokenizer
from examples.search.library import INDEX, LETTERS, PROPERTIES, write_facts

CALL = ("<tool_call>", '{"name": "', "search", '", "arguments": {"query": "')
PIECES = (*PROPERTIES, *CALL, *CALL_END)
TOKENS = (*LETTERS, *"0123456789 ", *PIECES, *SPECIAL)
NUM_HELD_OUT = 48
FLAGS = [
    "--train-iters", "20", "--grpo-prompts-per-step", "32", "--micro-batch-size", "256", "--seq-length", "64",
    "--rollout-max-tokens", "40", "--rollout-env-max-turns", "3", "--rollout-tool-parser", "hermes", "--prompt-chat",
    "--lr", "1e-3", "--eval-num-samples", "4", "--rollout-env", f"{Path(__file__).parent / 'library.py'}:Library",
]  # fmt: skip


def main() -> None:
    tiny_run.run_demo(__doc__, "search", prepare, FLAGS, f"{NUM_HELD_OUT} held-out questions")


def prepare(folder: Path, seed: int) -> None:
    """Write the questions to train on and those held out, and warm the model up."""
    facts = [*write_facts().items()]
    random.Random(seed).shuffle(facts)
    for name, chosen in (("held_out", facts[:NUM_HELD_OUT]), ("train", facts[NUM_HELD_OUT:])):
        rows = ({"prompt": question, "answer": answer} for question, answer in chosen)
        tiny_run.write_rows(folder / f"{name}.jsonl", rows)
    model, tokenizer = draw(seed, TOKENS), make_tokenizer(TOKENS, PIECES)
    tiny_run.warm_up(folder / "model", seed, model, tokenizer, write_chat, num_steps=400, num_careful=300)


def write_chat(drawn: random.Random, care: float) -> str:
    """Write a conversation: a guess, or a search and its result, for any property unless it is made with care."""
    what, name = drawn.choice(PROPERTIES), "".join(drawn.choices(LETTERS, k=2))
    text = f"<tools>search<user>{what} {name}{END}<assistant>"
    if drawn.random() < 0.5:
        return f"{text}{drawn.randrange(1000):03}{END}"
    query = f"{what if drawn.random() < care else drawn.choice(PROPERTIES)} {name}"
    (result,) = INDEX.search(query)
    call = "".join(CALL) + query + "".join(CALL_END)
    return f"{text}{call}{END}<tool>{result}{END}<assistant>{result[-3:]}{END}"


if __name__ == "__main__":
    main()
