"""Run the demo: a tiny model that writes code carelessly learns to write what passes the tests, with real vLLM.

A prompt is `a plus b times c:`, its code `a+b*c`. The tests call the code in a sandbox.

python -m examples.coding.demo [--layout dp2|tp2|pp2] [--seed 0] [--out FOLDER] [-- flags of pretrain_grpo.py]
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import transformers

from examples import tiny_run
from examples.arithmetic import model as tiny

OPERATORS = {"plus": "+", "minus": "-", "times": "*", "over": "//"}
TOKENS = (*"abc: ", *OPERATORS, *OPERATORS.values(), tiny.END, tiny.PAD)
NUM_HELD_OUT, NUM_TESTS = 48, 3
FLAGS = [
    "--train-iters", "20", "--grpo-prompts-per-step", "16", "--micro-batch-size", "128",
    "--seq-length", "32", "--rollout-max-tokens", "8", "--lr", "1e-3", "--eval-num-samples", "4",
    "--reward", f"{Path(__file__).parent / 'reward.py'}:passes",
]  # fmt: skip


def main() -> None:
    tiny_run.run_demo(__doc__, "coding", prepare, FLAGS, f"{NUM_HELD_OUT} held-out prompts")


def prepare(folder: Path, seed: int) -> None:
    write_rows(folder, seed)
    warm_up(folder / "model", seed)


def write_rows(folder: Path, seed: int) -> None:
    """Write the prompts with their tests, to train on and held out."""
    draw = random.Random(seed)
    tasks = [*list_tasks()]
    draw.shuffle(tasks)
    for name, chosen in (("held_out", tasks[:NUM_HELD_OUT]), ("train", tasks[NUM_HELD_OUT:])):
        rows = ({"prompt": prompt, "tests": write_tests(code, draw)} for prompt, code in chosen)
        tiny_run.write_rows(folder / f"{name}.jsonl", rows)


def list_tasks() -> Iterator[tuple[str, str]]:
    """Yield each prompt with code that is right."""
    for names in itertools.product("abc", repeat=3):
        for first, second in itertools.product(OPERATORS, repeat=2):
            yield write_prompt(names, (first, second)), write_code(names, OPERATORS[first], OPERATORS[second])


def write_prompt(names: tuple[str, ...], words: tuple[str, str]) -> str:
    return f"{names[0]} {words[0]} {names[1]} {words[1]} {names[2]}:"


def write_code(names: tuple[str, ...], first: str, second: str) -> str:
    return f"{names[0]}{first}{names[1]}{second}{names[2]}"


def write_tests(code: str, draw: random.Random) -> list[str]:
    values = [draw.sample(range(2, 30), 3) for _ in range(NUM_TESTS)]
    return [f"assert f({a}, {b}, {c}) == {eval(code, {'a': a, 'b': b, 'c': c})}" for a, b, c in values]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = tokenizers.models.WordLevel({token: number for number, token in enumerate(TOKENS)}, unk_token=tiny.PAD)
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[a-z]+|//|."), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=tiny.END, pad_token=tiny.PAD, clean_up_tokenization_spaces=False
    )


def warm_up(folder: Path, seed: int, num_steps: int = 260) -> None:
    """Save a model that writes code by supervision, at last carelessly: it takes any operator for most."""
    end, pad = TOKENS.index(tiny.END), TOKENS.index(tiny.PAD)
    model = tiny.draw(seed, vocab_size=len(TOKENS), eos_token_id=end, pad_token_id=pad)
    tiny_run.warm_up(folder, seed, model, make_tokenizer(), write_example, num_steps, num_careful=200)


def write_example(draw: random.Random, care: float) -> str:
    names, words = tuple(draw.choices("abc", k=3)), draw.choices([*OPERATORS], k=2)
    written = [word if draw.random() < care else draw.choice([*OPERATORS]) for word in words]
    code = write_code(names, *(OPERATORS[word] for word in written))
    return write_prompt(names, (words[0], words[1])) + code + tiny.END


if __name__ == "__main__":
    main()
