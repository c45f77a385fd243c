"""Flag blocks of other projects' launch scripts (tests/golden/flag_blocks.toml), and the models that they train."""

import dataclasses
import functools
import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

_GOLDEN = Path(__file__).parent / "golden"
# The flags that a block that describes a model leaves to the user who starts a run of it.
_OF_A_RUN = (
    ("--train-iters", "10"), ("--lr", "1e-6"), ("--seq-length", "4096"), ("--global-batch-size", "128"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Block:
    """The flags of one launch script."""

    repository: str
    path: str
    model: str
    ranks: int
    words: tuple[str, ...]
    variant: str = ""
    describes: bool = False
    """A flag that says that the block describes a model, and no run."""
    refused: tuple[str, ...] = ()
    """The beginnings of the problems."""

    @property
    def name(self) -> str:
        return f"{self.repository}:{self.path}" + (f" {self.variant}" if self.variant else "")

    def complete(self, folder: Path) -> list[str]:
        """Return the words as they are, after the flags that every run of this package adds."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(read_models()[self.model]))
        prompts = folder / "prompts.jsonl"
        prompts.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
        words = ["--hf-model", str(folder), "--prompts", str(prompts)]
        # MindSpeed-LLM's own --stage means the same as ours.
        if "--stage" not in self.words:
            words += ["--reward", "exact"]
        if self.describes:
            given = {*self.words, *(("--train-iters",) if "--train-samples" in self.words else ())}
            words += [word for flag, value in _OF_A_RUN if flag not in given for word in (flag, value)]
        if "--save" not in self.words:
            words += ["--rollout-folder", str(folder / "run")]
        # The folder of the script's author may not be readable here.
        save = ["--save", str(folder / "save")] if "--save" in self.words else []
        return [*words, *self.words, *save]


@functools.cache
def read_models() -> dict[str, dict[str, Any]]:
    """Read config.json of released models, by name."""
    return tomllib.loads((_GOLDEN / "released_models.toml").read_text())


@functools.cache
def read_blocks() -> tuple[Block, ...]:
    """Read all blocks."""
    table = tomllib.loads((_GOLDEN / "flag_blocks.toml").read_text())
    return tuple(
        Block(**{**entry, "words": tuple(shlex.split(entry["words"])), "refused": tuple(entry.get("refused", ()))})
        for entry in table["block"]
    )
