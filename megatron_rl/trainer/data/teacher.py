"""The check that a teacher has the policy's tokens: a distribution over others would mean something else."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_rl.errors import InputError
from megatron_rl.trainer.data.tokenizer import load_tokenizer


def check_tokens(teacher: Path, policy: Path, prompts: Iterable[Sequence[int]]) -> None:
    """Raise an InputError unless both folders' tokenizers have the same tokens and turn text into them alike.

    `prompts` are some of the run, in tokens.
    """
    one, other = load_tokenizer(teacher, "--teacher"), load_tokenizer(policy)
    tokens, of_policy = one.get_vocab(), other.get_vocab()
    differing = sorted(token for token in tokens.keys() | of_policy.keys() if tokens.get(token) != of_policy.get(token))
    remedy = f"write a teacher with the tokenizer of --hf-model {policy}"
    if differing:
        token = differing[0]
        raise InputError(
            f"--teacher {teacher} has other tokens: {len(differing)} differ, and {token!r} is {tokens.get(token)} in "
            f"place of {of_policy.get(token)}; {remedy}"
        )
    for prompt in prompts:
        text = other.decode(prompt)
        if one.encode(text, add_special_tokens=False) != other.encode(text, add_special_tokens=False):
            raise InputError(f"--teacher {teacher} makes other tokens of {text[:60]!r}; {remedy}")
