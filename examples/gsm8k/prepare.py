"""Write GSM8K's files as prompts: python examples/gsm8k/prepare.py DOWNLOADED OUT"""

import json
import sys
from pathlib import Path

INSTRUCTION = "Reason step by step, and write the final answer after ####."


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    for name in ("train.jsonl", "test.jsonl"):
        with (source / name).open() as rows, (out / name).open("w") as prompts:
            for row in map(json.loads, rows):
                message = {"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}
                prompts.write(json.dumps({"prompt": [message], "answer": row["answer"]}) + "\n")


if __name__ == "__main__":
    main()
