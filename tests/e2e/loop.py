"""A whole run for tests: a tiny model with a tokenizer, prompts, a reward, scripted engines, and its ranks."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from tests import hf_models
from tests.e2e.forked import ForkedProcess
from tests.ranks import ROOT, free_port

SCRIPT = ROOT / "pretrain_grpo.py"

REWARD = '''
def parity(prompts, completions, completion_ids, **columns):
    """Of the tokens' sum: as good as random, and the same for the same tokens."""
    return [float(sum(ids) % 3) for ids in completion_ids]
'''


def draw_model(folder: Path, seed: int = 0, family: str = "qwen3", **changes: Any) -> Path:
    """Draw a model of two layers whose tokens are numbers."""
    hf_models.draw(family, folder, seed, **{"num_hidden_layers": 2, "max_position_embeddings": 1024, **changes})
    size = changes.get("vocab_size", hf_models.VOCAB_SIZE)
    vocabulary = {str(number): number for number in range(size)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1", pad_token="0").save_pretrained(
        folder
    )
    return folder


def draw_teacher(world: "World") -> Path:
    """Draw a wider model of another family, whose layers stages do not divide evenly, with the same tokens."""
    return draw_model(world.folder / "teacher", 5, "llama", hidden_size=80, num_hidden_layers=3)


def write_prompts(path: Path, count: int) -> Path:
    """Write ragged prompts of numbers, with an answer and one of two teachers."""
    rows = [
        {
            "prompt": " ".join(str((7 * row + 3 * place) % 120 + 2) for place in range(3 + row % 9)),
            "answer": str(row),
            "teacher": ("even", "odd")[row % 2],
        }
        for row in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_reward(path: Path) -> str:
    path.write_text(REWARD)
    return f"{path}:parity"


@dataclasses.dataclass
class Ranks:
    """The processes of a run."""

    processes: list[subprocess.Popen | ForkedProcess]
    outputs: list[Path]

    def wait(self, seconds: float = 600.0) -> list[int]:
        """Return the exit codes.

        A process that has not ended by then is killed, and the test fails with the output of all.
        """
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT)
            time.sleep(2)
            raise AssertionError(f"not all ranks ended within {seconds} s\n{self.text()}") from None
        finally:
            self.kill()

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def text(self) -> str:
        return "\n".join(f"--- rank {rank}\n{path.read_text()[-6000:]}" for rank, path in enumerate(self.outputs))


def start(
    folder: Path,
    world_size: int,
    words: list[str],
    faults: Mapping[int, str] | None = None,
    program: list[str] | None = None,
    is_forked: bool = True,
    platform: str = "cpu",
    **environment: str,
) -> Ranks:
    """Start the ranks as torchrun would; `faults` is code that a rank runs before pretrain_grpo.py begins.

    `program` takes the place of pretrain_grpo.py. Ranks are forked off a process that has imported megatron for
    the platform, unless they are to be started as they are outside of tests.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shared = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        **environment,
    }
    processes: list[subprocess.Popen | ForkedProcess] = []
    outputs = []
    for rank in range(world_size):
        outputs.append(folder / f"rank-{rank}.output")
        if is_forked and program is None:
            fault = textwrap.dedent((faults or {}).get(rank, ""))
            of_rank = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(ForkedProcess(SCRIPT, words, fault, outputs[-1], of_rank, platform))
            continue
        with outputs[-1].open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *(program or _program((faults or {}).get(rank))), *words],
                    cwd=ROOT,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return Ranks(processes, outputs)


def _program(fault: str | None) -> list[str]:
    script = str(SCRIPT)
    if fault is None:
        return [script]
    # A run's imports search the script's folder first, as they would without the fault.
    prologue = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r})\n"
    return ["-c", f"{prologue}{textwrap.dedent(fault)}\nrunpy.run_path({script!r}, run_name='__main__')"]


@contextlib.contextmanager
def running(
    folder: Path,
    world_size: int,
    words: list[str],
    faults: Mapping[int, str] | None = None,
    is_forked: bool = True,
    platform: str = "cpu",
    **environment: str,
) -> Iterator[Ranks]:
    """Start the ranks; at the end, kill those that still run."""
    ranks = start(folder, world_size, words, faults, is_forked=is_forked, platform=platform, **environment)
    try:
        yield ranks
    finally:
        ranks.kill()


def run(
    folder: Path,
    world_size: int,
    words: list[str],
    faults: Mapping[int, str] | None = None,
    code: int = 0,
    seconds: float = 600.0,
    is_forked: bool = True,
    **environment: str,
) -> Ranks:
    """Run to the end, which all ranks must reach with this exit code."""
    ranks = start(folder, world_size, words, faults, is_forked=is_forked, **environment)
    codes = ranks.wait(seconds)
    assert codes == [code] * world_size, f"exit codes {codes}\n{ranks.text()}"
    return ranks


def call_cli(folder: Path, *words: object) -> None:
    """Call megatron-rl in a process of its own."""
    code = f"from megatron_rl import cli\nraise SystemExit(cli.main({[str(word) for word in words]}))"
    run(folder, 1, [], {0: code})


def read_events(run: Path) -> list[dict[str, Any]]:
    """Read the audit log of a run."""
    return [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]


def to_words(flags: Mapping[str, Any]) -> list[str]:
    """Write flags as words: None drops one, True makes a switch, and a list has several words."""
    words: list[str] = []
    for name, value in flags.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


@dataclasses.dataclass(frozen=True)
class World:
    """The files that runs of a test share."""

    folder: Path
    model: Path
    prompts: Path
    reward: str

    def words(self, run: str, **changes: Any) -> list[str]:
        """Return the words of a small run over scripted engines; a change replaces a flag: see `to_words`."""
        flags: dict[str, Any] = {
            "hf_model": self.model,
            "prompts": self.prompts,
            "reward": self.reward,
            "reward_workers": 1,
            "rollout_engine": "scripted",
            "rollout_folder": self.folder / "runs" / run,
            "rollout_num_engines": 2,
            "rollout_max_tokens": 24,
            "seq_length": 64,
            "train_iters": 3,
            "grpo_prompts_per_step": 8,
            "grpo_group_size": 4,
            "micro_batch_size": 4,
            "lr": 1e-3,
            "lr_decay_style": "constant",
            "clip_grad": 1.0,
            "weight_decay": 0.01,
            "rollout_deadline_minutes": 10,
            "consume_order": "prompt",
            **changes,
        }
        return to_words(flags)


def make_world(folder: Path, num_prompts: int = 40, family: str = "qwen3", **changes: Any) -> World:
    """Draw the model, write prompts and reward."""
    return World(
        folder,
        draw_model(folder / "model", family=family, **changes),
        write_prompts(folder / "prompts.jsonl", num_prompts),
        write_reward(folder / "reward.py"),
    )
