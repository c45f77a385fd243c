"""Seeds of responses: a pure function of run, iteration, prompt and sample, so that a group can be sampled again."""

import hashlib


def group_seed(run: str, version: int, prompt_index: int) -> int:
    """The seed of a group's first response; vLLM gives the i-th one seed + i, so neighbours must lie far apart."""
    text = f"{run}\0{version}\0{prompt_index}".encode()
    # Below 2**62, so that adding the number of a sample stays within a signed 64-bit integer.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


def evaluation_seed(run: str, version: int, prompt_index: int) -> int:
    """The same for prompts that are only evaluated: never the seeds of training."""
    return group_seed(f"{run}\0evaluation", version, prompt_index)
