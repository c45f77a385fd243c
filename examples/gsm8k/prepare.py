"""Write GSM8K's rows as prompts: python examples/gsm8k/prepare.py DOWNLOADED OUT [SUFFIX]

DOWNLOADED has train.jsonl and test.jsonl, or the Parquet files of openai/gsm8k. SUFFIX is added to each question:
Qwen3 answers without thinking first if it is /no_think.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

INSTRUCTION = "Reason step by step, and write the final answer after ####."


def main() -> None:
    source, out, *suffix = sys.argv[1:]
    Path(out).mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        with (Path(out) / f"{name}.jsonl").open("w") as prompts:
            for row in read_rows(Path(source), name):
                message = {"role": "user", "content": " ".join([f"{row['question']}\n{INSTRUCTION}", *suffix])}
                prompts.write(json.dumps({"prompt": [message], "answer": row["answer"]}) + "\n")


def read_rows(source: Path, name: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a part of GSM8K."""
    lines = source / f"{name}.jsonl"
    if lines.exists():
        with lines.open() as rows:
            yield from map(json.loads, rows)
        return
    files = sorted((source / "main").glob(f"{name}-*.parquet"))
    if not files:
        sys.exit(f"{source} must hold {name}.jsonl, or main/{name}-*.parquet of openai/gsm8k: download one of them")
    import pyarrow.parquet

    for file in files:
        yield from pyarrow.parquet.read_table(file, columns=["question", "answer"]).to_pylist()


if __name__ == "__main__":
    main()
