"""Checks of teachers and critic: they have the policy's tokens, and each row names a teacher."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from megatron_rl.errors import InputError
from megatron_rl.trainer.data.prompt_files import Row
from megatron_rl.trainer.data.tokenizer import load_tokenizer


def check_choices(models: Collection[str], rows: Iterable[Row]) -> None:
    """Raise an InputError unless each row's column `teacher` names one of these models, `teacher.NAME` each.

    A lone teacher without a name is everybody's.
    """
    names = {model.partition(".")[2] for model in models}
    for row in rows if names and "" not in names else ():
        name = row.columns.get("teacher")
        if not isinstance(name, str) or name not in names:
            raise row.error(
                f"has the column teacher {name!r}, and must have one of --teacher: write {' or '.join(sorted(names))}"
            )


def check_tokens(flag: str, folder: Path, policy: Path, prompts: Iterable[Sequence[int]]) -> None:
    """Raise an InputError unless both folders' tokenizers have the same tokens and turn text into them alike.

    A distribution over other tokens would mean something else. `prompts` are some of the run, in tokens.
    """
    one, other = load_tokenizer(folder, flag), load_tokenizer(policy)
    tokens, of_policy = one.get_vocab(), other.get_vocab()
    differing = sorted(token for token in tokens.keys() | of_policy.keys() if tokens.get(token) != of_policy.get(token))
    remedy = f"write a folder with the tokenizer of --hf-model {policy}"
    if differing:
        token = differing[0]
        raise InputError(
            f"{flag} {folder} has other tokens: {len(differing)} differ, and {token!r} is {tokens.get(token)} in "
            f"place of {of_policy.get(token)}; {remedy}"
        )
    for prompt in prompts:
        text = other.decode(prompt)
        if one.encode(text, add_special_tokens=False) != other.encode(text, add_special_tokens=False):
            raise InputError(f"{flag} {folder} makes other tokens of {text[:60]!r}; {remedy}")
