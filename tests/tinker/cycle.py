"""A client that resumes a model, trains it, samples and saves it, in a process that may be killed.

python -m tests.tinker.cycle URL KEY BASE RESULTS NUMBER

It reads the path of the model's last checkpoint from RESULTS/NUMBER-1.json, writes what it got into
RESULTS/NUMBER.json, and prints the kind of each request once that was sent.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

KINDS = ("create", "pass", "step", "keep", "sample", "save", "load")
RANK, PROMPT = 8, [10, 11, 12, 13, 14, 15]
_SENT_SECONDS = 0.2
"""A future's request leaves in another thread."""


def sent(kind: str, future: Any) -> Any:
    time.sleep(_SENT_SECONDS)
    print(kind, flush=True)
    return future.result()


def draw(seed: int) -> list[Any]:
    generator, data = np.random.default_rng(seed), []
    for count in range(3, 9):
        tokens = [*PROMPT, *generator.integers(0, 250, count).tolist()]
        values = {"target_tokens": tokens[1:], "weights": [0.0] * 5 + [1.0] * count}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=values))
    return data


def main(url: str, key: str, base: str, results: Path, number: int) -> None:
    service, before = tinker.ServiceClient(base_url=url, api_key=key), results / f"{number - 1}.json"
    if not before.exists():
        training = sent("create", service.create_lora_training_client(base_model=base, rank=RANK, seed=1))
    else:
        path = json.loads(before.read_text())["path"]
        training = sent("create", service.create_training_client_from_state_with_optimizer(path))
    data = draw(number)
    passed = sent("pass", training.forward_backward(data, "cross_entropy"))
    adam = types.AdamParams(learning_rate=1e-2)
    norm = sent("step", training.optim_step(adam)).metrics["grad_norm:mean"]
    sampler = sent("keep", training.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=8, seed=5)
    prompt = types.ModelInput.from_ints(PROMPT)
    answered = sent("sample", sampler.sample(prompt=prompt, num_samples=2, sampling_params=params))
    saved = sent("save", training.save_state("saved"))
    sent("load", training.load_state_with_optimizer(saved.path))
    again = training.forward(data, "cross_entropy").result()
    found = {
        "path": saved.path,
        "norm": norm,
        "passed": digest(one["logprobs"].data for one in passed.loss_fn_outputs),
        "sampled": [one.tokens for one in answered.sequences],
        "again": digest(one["logprobs"].data for one in again.loss_fn_outputs),
    }
    (results / "unfinished").write_text(json.dumps(found))
    (results / "unfinished").rename(results / f"{number}.json")


def digest(values: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(one, "<f4").tobytes() for one in values)).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
