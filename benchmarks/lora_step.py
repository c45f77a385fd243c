"""Time a training step of adapters beside one of all weights, in turns on one thread.

The model has 40 M parameters, and the adapters have ranks of 8, 32 and 128 in all linear layers. A step goes from slots
to update. Its groups are 16 responses of 32 tokens to two prompts of 256, so both have the same tokens. Seconds are the
processor's, which other programs on the machine change little.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import random_models, report
from benchmarks.publish import ARCHITECTURES, SMALLEST
from benchmarks.shared_prompt_step import FLAGS, draw_slot, our_step, time_in_turns
from megatron_rl.types import Architecture
from tests.ranks import run_ranks

RANKS = (8, 32, 128)
ALL = "all weights"
PROMPT, RESPONSE, GROUP_SIZE, NUM_GROUPS = 256, 32, 8, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    name, rounds = (SMALLEST, 1) if arguments.tiny else ("40m", arguments.rounds)
    seconds = run_ranks(_measure, 1, ARCHITECTURES[name], rounds, timeout=600)[0]
    num_tokens = NUM_GROUPS * (PROMPT + GROUP_SIZE * RESPONSE)
    report.table(
        f"{name}: tokens of a pack, a second",
        {way: [num_tokens / one for one in values] for way, values in seconds.items()},
        "",
    )
    ratios = {
        way: [whole / own for whole, own in zip(seconds[ALL], values, strict=True)]
        for way, values in seconds.items()
        if way != ALL
    }
    report.table(f"tokens a second / those with {ALL}", ratios, "")
    report.finish({way.replace(" ", "_"): statistics.median(values) for way, values in ratios.items()})


def _measure(architecture: Architecture, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way of training, round by round."""
    from megatron_rl.command_line import parse as command_line
    from megatron_rl.trainer.mcore.session import start_session

    torch.set_num_threads(1)
    slot = draw_slot(PROMPT, RESPONSE, GROUP_SIZE, architecture.vocab_size)
    words = FLAGS.format(groups=NUM_GROUPS, k=GROUP_SIZE, r=RESPONSE, length=PROMPT + RESPONSE)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        random_models.make(model, architecture)
        parse = [*words.split(), "--hf-model", str(model)]
        settings = {ALL: command_line.parse(parse)}
        settings |= {f"rank {rank}": command_line.parse([*parse, "--lora-rank", str(rank)]) for rank in RANKS}
        with start_session(settings[ALL]) as session:
            ways = {way: our_step(one, session, slot) for way, one in settings.items()}
            return time_in_turns(ways, rounds, time.process_time)


if __name__ == "__main__":
    # Under its importable name, where the ranks find the function they run.
    from benchmarks.lora_step import main as importable_main

    importable_main()
