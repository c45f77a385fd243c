"""Sample many tokens by vLLM's rule of acceptance on a CPU, from drafts that are likely or not; print chi-squared.

    python -m tests.sidecar.acceptance

Each row has three drafts and a seed of its own. All rows have the same logits. So the tokens at a place, in all rows
with earlier drafts that were accepted, must have the exact probabilities of its logits. The last line is JSON.
"""

import dataclasses
import json
from typing import Any

import torch

from megatron_rl.sidecar.vllm.patches import patch_expansion

NUM_ROUNDS, NUM_ROWS, VOCAB_SIZE, TEMPERATURE = 150, 256, 12, 0.5


def main() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    # As vLLM does when it starts without a Triton for CPUs.
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample import rejection_sampler

    report = patch_expansion(rejection_sampler)
    logits = 1.5 * torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    exact = (logits.double() / TEMPERATURE).softmax(-1)
    # A draft that is rejected often, between two that are accepted often.
    drafts = torch.tensor([int(exact[0].argmax()), 1, int(exact[2].argmax())])
    counts = torch.zeros(3, VOCAB_SIZE, dtype=torch.float64)
    for number in range(NUM_ROUNDS):
        for place, tokens in enumerate(sample(rejection_sampler, logits, drafts, number).T):
            counts[place] += torch.bincount(tokens[tokens >= 0].long(), minlength=VOCAB_SIZE)
    expected = exact * counts.sum(1, keepdim=True)
    found = ((counts - expected) ** 2 / expected).sum(1)
    print(json.dumps({"patch": report, "num": counts.sum(1).tolist(), "chi_squared": found.tolist()}))


def sample(sampler: Any, logits: torch.Tensor, drafts: torch.Tensor, number: int) -> torch.Tensor:
    """Return the tokens of one round, a row for each request; negative ones follow a rejected draft."""
    metadata = describe(number)
    ends = 3 * torch.arange(1, NUM_ROWS + 1, dtype=torch.int32)
    scaled = sampler.apply_sampling_constraints(logits.repeat(NUM_ROWS, 1), ends, metadata)
    last = torch.zeros(NUM_ROWS, 1, dtype=torch.int64)
    drafted = drafts.repeat(NUM_ROWS).to(torch.int32)
    tokens = sampler.rejection_sample(drafted, [3] * NUM_ROWS, 3, ends, None, scaled, last, metadata)
    return tokens[:, :3]  # type: ignore[no-any-return]


def describe(number: int) -> Any:
    from vllm.v1.sample.metadata import SamplingMetadata

    seeds = range(number * NUM_ROWS, (number + 1) * NUM_ROWS)
    values: dict[str, Any] = {
        "temperature": torch.full((NUM_ROWS,), TEMPERATURE), "all_random": True, "no_penalties": True,
        "generators": {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)},
        "bad_words_token_ids": {}, "output_token_ids": [[] for _ in seeds],
    }  # fmt: skip
    names = [field.name for field in dataclasses.fields(SamplingMetadata)]
    return SamplingMetadata(**{name: values.get(name, False if name == "all_greedy" else None) for name in names})


if __name__ == "__main__":
    main()
