"""Time shared-prompt attention beside the same sequences whole, at the shapes of `make gpu-check`.

The times of the backends are written to a file too, from which `--shared-prompt-backend auto` chooses.
"""

import torch

from benchmarks import gpu_times
from benchmarks.gpu.attention_blocks import try_blocks
from benchmarks.gpu.work import Work
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.measured import FLAG, write_times

# Beside the rows of the part.
FILE = "attention-times.json"

# Seconds that a way may take of a shape; `make gpu-check` takes longer, and checks what is computed.
SECONDS_OF_A_WAY = 0.5
# Seconds that a further shape may take.
SECONDS_OF_A_SHAPE = 6.0
# Seconds in which the kernels of other blocks are compiled and timed.
SECONDS_TO_COMPILE = 45.0


def measure(work: Work) -> None:
    """Add a row for each shape, as long as there is time."""
    # The definition in dense matrices is for checks.
    names = [name for name in BACKENDS if name != "naive"]
    shapes = gpu_times.shapes(work.device)
    rows = gpu_times.measure(names, work.device, SECONDS_OF_A_WAY)
    chip = torch.cuda.get_device_name() if work.device == "cuda" else "CPU"
    timed: list[gpu_times.Row] = []
    file = work.rows.with_name(FILE)
    for number, shape in enumerate(shapes):
        if number and not work.has_time("attention", shape.name, SECONDS_OF_A_SHAPE):
            continue
        with work.spared("attention", shape.name):
            row = next(rows)
            _add(work, row)
            timed.append(row)
            write_times([one.describe_for(chip) for one in timed], file)
    blocks: dict[str, str | None] = {}
    for row in timed:
        # The first shape's kernels are compiled, which the others have.
        if "triton" not in row.shared or work.seconds_left < (SECONDS_OF_A_SHAPE if blocks else SECONDS_TO_COMPILE):
            break
        blocks[row.shape.name] = try_blocks(row.shape, work.device)
        write_times([one.describe_for(chip, blocks.get(one.shape.name)) for one in timed], file)
    print(f"written: {file}, for {FLAG}")


def _add(work: Work, row: gpu_times.Row) -> None:
    whole, shared = gpu_times.fastest(row.whole), gpu_times.fastest(row.shared)
    figures = {"floor": row.floor.both}
    if whole:
        figures["whole"] = row.whole[whole].both
    if shared:
        figures |= {"shared": row.shared[shared].both, "over_floor": row.shared[shared].both / row.floor.both}
    if whole and shared:
        figures["speedup"] = row.whole[whole].both / row.shared[shared].both
    times = ", ".join(f"{name} {value}" for name, value in {**row.shared, **row.whole}.items())
    work.add("attention", row.shape.name, times, **figures)
