"""The blocks of the `triton` backend: those of the chip, named ones, and those that `make gpu-bench` finds."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu import attention_blocks
from benchmarks.gpu.attention_blocks import find_fastest, list_choices, try_blocks
from benchmarks.gpu_times import SHAPES, Times
from megatron_rl.errors import UsageError
from megatron_rl.ops.shared_prompt.backends import triton_fused
from megatron_rl.ops.shared_prompt.backends.triton_blocks import (
    HOPPER,
    Blocks,
    KernelBlocks,
    choose_blocks,
    name_blocks,
    read_blocks,
    use_blocks,
)
from megatron_rl.ops.shared_prompt.layout import Layout

NAME = "64x32x4x3,16x128x8x2,32x16x2x1"
BLOCKS = KernelBlocks(Blocks(64, 32, 4, 3), Blocks(16, 128, 8, 2), Blocks(32, 16, 2, 1))
CHIP = choose_blocks(128, torch.bfloat16, HOPPER)


@pytest.fixture(autouse=True)
def _blocks_of_the_chip_afterwards() -> Iterator[None]:
    yield
    use_blocks("chip")


def test_blocks_have_a_name() -> None:
    assert read_blocks(NAME) == BLOCKS
    assert name_blocks(BLOCKS) == NAME


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "must be chip, or queries x keys x warps x stages of three kernels"),
        ("64x32x4x3,16x128x8x2", "must be chip, or"),
        (NAME + ",64x32x4x3", "must be chip, or"),
        (NAME.replace("64", "064"), "must be chip, or"),
        (NAME.replace("64", "-64"), "must be chip, or"),
        (NAME.replace("64", "96"), "rows of forward must be a power of two from 16 to 128"),
        (NAME.replace("64", "256"), "rows of forward must be a power of two from 16 to 128"),
        (NAME.replace("32x16x2", "32x8x2"), "rows of key_gradients must be a power of two from 16"),
        (NAME.replace("128x8", "128x12"), "of query_gradients .* warps a power of two up to 16"),
        (NAME.replace("128x8", "128x32"), "of query_gradients .* warps a power of two up to 16"),
        (NAME.replace("x2x1", "x2x0"), "stages of key_gradients must be between 1 and 8"),
        (NAME.replace("x2x1", "x2x9"), "stages of key_gradients must be between 1 and 8"),
    ],
)
def test_blocks_that_no_kernel_can_have_are_an_error_that_says_why(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"--shared-prompt-blocks .*{message}"):
        use_blocks(name)


def test_blocks_in_use_are_those_that_kernels_are_launched_with_in_half_precision() -> None:
    def launched(dtype: torch.dtype) -> KernelBlocks:
        inputs = [torch.zeros(3, 2, 128, dtype=dtype)] * 3
        tables = triton_fused.prepare(Layout((3,), (-1,)), torch.device("cpu"))
        return triton_fused._Launcher(tables, 1.0, inputs)._blocks

    full = launched(torch.float32)
    assert launched(torch.bfloat16) == CHIP
    use_blocks(NAME)
    assert launched(torch.bfloat16) == launched(torch.float16) == BLOCKS
    assert launched(torch.float32) == full
    use_blocks("chip")
    assert launched(torch.bfloat16) == CHIP


def make_times(**milliseconds: float) -> dict[KernelBlocks, Times]:
    """Return times of all choices: 2 + 6 ms, or the given ones for the first other blocks of a kernel."""
    times = dict.fromkeys(list_choices(CHIP), Times(2.0, 6.0))
    for kernel, time in milliseconds.items():
        is_forward = kernel == "forward"
        choice = CHIP._replace(**{kernel: attention_blocks.CANDIDATES[kernel][0]})
        times[choice] = Times(time if is_forward else 2.0, 6.0 if is_forward else time)
    return times


def test_the_fastest_blocks_of_each_kernel_are_joined() -> None:
    choices = list_choices(CHIP)
    assert choices[0] == CHIP
    assert len(choices) == len(set(choices))
    assert all(sum(one != own for one, own in zip(choice, CHIP, strict=True)) == 1 for choice in choices[1:])
    first = {kernel: listed[0] for kernel, listed in attention_blocks.CANDIDATES.items()}
    assert find_fastest(CHIP, make_times()) == CHIP
    found = find_fastest(CHIP, make_times(forward=1.9, query_gradients=5.5, key_gradients=6.5))
    assert found == CHIP._replace(forward=first["forward"], query_gradients=first["query_gradients"])
    # A gain that another run may not have.
    assert find_fastest(CHIP, make_times(forward=1.99)) == CHIP
    assert find_fastest(CHIP, make_times(key_gradients=5.0)) == CHIP._replace(key_gradients=first["key_gradients"])


def test_blocks_are_written_only_if_they_are_faster_together(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = CHIP._replace(forward=attention_blocks.CANDIDATES["forward"][0])

    def give(first: dict[KernelBlocks, Times], *again: Times) -> str | None:
        answers = iter([first, dict(zip([CHIP, fastest], again, strict=False))])
        monkeypatch.setattr(attention_blocks, "_time", lambda *_: next(answers))
        return try_blocks(SHAPES[0], "cpu")

    times = make_times(forward=1.0)
    assert give(times, Times(2, 6), Times(1, 6)) == name_blocks(fastest)
    assert give(times, Times(2, 6), Times(2, 6)) is None
    assert give(times, Times(2, 6)) is None
    assert give(make_times()) is None
    assert give({}) is None
