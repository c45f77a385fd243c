"""Draw a run's folder as a long run leaves it, for the code that reads such folders."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.observe.trace import FOLDER, FORMAT
from tests.observed import write_metrics

WORDS = ("so", "then", "we", "have", "the", "sum", "of", "two", "and", "five", "which", "leaves", "one", "to", "carry")


def write_samples(path: Path, num_versions: int, groups_per_version: int, group_size: int, num_words: int = 40) -> None:
    """Write samples whose rows come again every ten versions."""
    draw = random.Random(0)
    with path.open("a", encoding="utf-8") as file:
        for version in range(num_versions):
            for group in _groups(draw, version, groups_per_version, group_size, num_words):
                file.write(json.dumps(group, ensure_ascii=False) + "\n")


def write_run(folder: Path, num_versions: int, groups_per_version: int = 4, group_size: int = 4, num_words: int = 40):
    """Write metrics and samples; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_metrics(folder / "metrics.jsonl", range(num_versions))
    write_samples(folder / "samples.jsonl", num_versions, groups_per_version, group_size, num_words)
    return folder


def _groups(draw: random.Random, version: int, count: int, group_size: int, num_words: int) -> Iterator[dict]:
    for place in range(count):
        row = (version % 10) * count + place
        yield {
            "version": version,
            "kind": "training",
            "row": f"train.jsonl:{row}",
            "prompt": f"Problem {row}: what is {row} + {place}?",
            "responses": [_response(draw, version, num_words) for _ in range(group_size)],
        }


def _response(draw: random.Random, version: int, num_words: int) -> dict:
    reward = float(draw.random() < 0.2 + 0.0007 * version)
    return {
        "text": " ".join(draw.choices(WORDS, k=num_words)) + f" {draw.random()}",
        "reward": reward,
        "components": {"right": reward},
        "num_tokens": num_words + 1,
        "finish_reason": "stop",
        "advantage": reward - 0.5,
    }


def write_trace(folder: Path, num_versions: int) -> None:
    """Write a trace of one rank, an iteration a second."""
    kinds = [
        {"lane": "main", "name": "train"},
        {"lane": "main", "name": "wait"},
        {"lane": "compute", "name": "forward", "role": "policy"},
    ]
    (folder / FOLDER).mkdir()
    with (folder / FOLDER / "rank-0.jsonl").open("w") as file:
        for version in range(num_versions):
            spans = [[0, 0, 900_000], [1, 100_000, 50_000, 0], [2, 200_000, 300_000, 0, 77]]
            line = {"version": version, "format": FORMAT, "process": "rank-0", "begin": version, "end": version + 1}
            rest = {"offset": 1e9, "error": 1e-4, "dropped": 0, "kinds": kinds, "spans": spans}
            file.write(json.dumps(line | rest) + "\n")
