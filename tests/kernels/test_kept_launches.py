"""Kept launches give a launcher what Triton gives it. A driver without a device has a launcher that notes it."""

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron_rl.ops import triton_support

Launched = tuple[Any, ...]


def _scale(
    to: tl.tensor,
    of: tl.tensor | None,
    STRIDE: tl.constexpr,
    factor: tl.tensor,
    count: tl.tensor,
    SIZE: tl.constexpr,
    SHIFT: tl.constexpr = 3,
) -> None:
    places = tl.arange(0, SIZE) * STRIDE
    values = 1.0 if of is None else tl.load(of + places)
    tl.store(to + places, (values * factor + count + SHIFT).to(tl.float32))


class Device:
    """A driver without a device: it has two devices by number, and its launchers note what they are given."""

    def __init__(self) -> None:
        self.current, self.stream = 0, 70
        self.launched: list[Launched] = []
        self.num_loaded = 0
        properties = {"max_shared_mem": 200_000}
        self.utils = SimpleNamespace(
            load_binary=self._load, unload_module=lambda _: None, get_device_properties=lambda _: properties
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *given: self.launched.append(given)

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def _load(self, *_: Any) -> tuple[str, str, int, int, int]:
        """Give each loaded kernel a function of its own."""
        self.num_loaded += 1
        return "module", f"function {self.num_loaded}", 0, 0, 1024


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = Device()
    monkeypatch.setattr(driver, "_active", found)
    return found


@pytest.fixture
def kernel(device: Device) -> Iterator[Any]:
    """Yield a kernel, and unload what was compiled of it before its driver is removed."""
    found = JITFunction(_scale, do_not_specialize=["count"])
    yield found
    triton_support._LAUNCHES.clear()
    found.device_caches.clear()
    gc.collect()


@pytest.fixture
def triton_runs(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> list[None]:
    """Return a list that has an element for each launch that took Triton's way."""
    runs: list[None] = []

    def get(grid: Any) -> Any:
        runs.append(None)
        return lambda *args, **kwargs: JITFunction.run(kernel, *args, grid=grid, warmup=False, **kwargs)

    monkeypatch.setattr(JITFunction, "__getitem__", lambda _, grid: get(grid))
    return runs


def test_kept_launches_give_a_launcher_what_triton_does(device: Device, kernel: Any, triton_runs: list[None]) -> None:
    place, halves = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    unaligned = place[1:]
    assert place.data_ptr() % 16 == 0
    cases: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = [
        (0, (place, place, 1, 1, 5), {"SIZE": 16}),
        (0, (place, place, 1, 16, 5), {"SIZE": 16}),
        (0, (place, place, 1, 17, 5), {"SIZE": 16}),
        (0, (place, place, 1, 2**31, 5), {"SIZE": 16}),
        (0, (place, place, 1, 2**31 + 1, 5), {"SIZE": 16}),
        (0, (place, place, 1, 0.5, 5), {"SIZE": 16}),
        (0, (place, place, 1, 17, 2**31), {"SIZE": 16}),
        (0, (unaligned, place, 1, 17, 5), {"SIZE": 16}),
        (0, (place, unaligned, 1, 17, 5), {"SIZE": 16}),
        (0, (place, halves, 1, 17, 5), {"SIZE": 16}),
        (0, (place, None, 1, 17, 5), {"SIZE": 16}),
        (0, (place, place, 3, 17, 5), {"SIZE": 16}),
        (0, (place, place, 5, 17, 5), {"SIZE": 16}),
        (0, (place, place, 1, 17, 5), {"SIZE": 32}),
        (0, (place, place, 1, 17, 5), {"SIZE": 16, "SHIFT": 4}),
        (0, (place, place, 1, 17, 5), {"SIZE": 16, "num_warps": 2}),
        (1, (place, place, 1, 17, 5), {"SIZE": 16}),
    ]
    expected = []
    for device.current, arguments, constants in cases:
        JITFunction.run(kernel, *arguments, grid=(3, 2), warmup=False, **constants)
        expected.append(_without_hooks(device.launched.pop()))
    # Each case is compiled for itself, so a wrong kernel is seen by its function.
    assert len({given[4] for given in expected}) == len(cases)

    for turn in range(3):
        for (device.current, arguments, constants), one in zip(cases, expected, strict=True):
            triton_support.launch(kernel, (3, 2), *arguments, **constants)
            _compare(_without_hooks(device.launched.pop()), one)
        assert len(triton_runs) == len(cases), turn

    # What a kernel is not compiled for is given as it is, without a new kernel: values, places, grids, streams.
    device.current, device.stream, other = 0, 80, torch.ones(64)
    for grid, arguments in (((9,), (other, place, 1, 19, 1)), ((1, 2, 3), (place, other, 1, 33, 16))):
        JITFunction.run(kernel, *arguments, grid=grid, warmup=False, SIZE=16)
        triton_support.launch(kernel, grid, *arguments, SIZE=16)
        _compare(*map(_without_hooks, device.launched[-2:]))
    assert len(triton_runs) == len(cases)


def test_launches_take_tritons_way_while_they_are_watched(
    device: Device, kernel: Any, triton_runs: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch() -> tuple[int, int]:
        """Launch twice, and return how many launches there were in all, and how many took Triton's way."""
        before = len(device.launched), len(triton_runs)
        for _ in range(2):
            triton_support.launch(kernel, (1,), place, place, 1, 17, 5, SIZE=16)
        return len(device.launched) - before[0], len(triton_runs) - before[1]

    place = torch.zeros(64)
    assert launch() == (2, 1)
    assert launch() == (2, 0)
    knobs = triton.knobs
    for owner, name, value in (
        (knobs.runtime.launch_enter_hook, "calls", [lambda _: None]),
        (knobs.runtime.launch_exit_hook, "calls", [lambda _: None]),
        (knobs.runtime, "launch_enter_hook", None),
        (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "fpsan"),
        (kernel, "pre_run_hooks", [lambda *_, **__: None]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            if name == "instrumentation_mode":
                patch.setattr(JITFunction, "_do_compile", lambda *_, **__: None)
                assert launch() == (0, 2)
            else:
                assert launch() == (2, 2), name
        assert launch() == (2, 0), name

    counted = []
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda *_, **__: counted.append(None))
        assert launch() == (0, 2)
    assert len(counted) == 2
    assert launch() == (2, 0)


def test_no_launch_is_kept_with_a_version_of_triton_that_was_not_checked(
    device: Device,
    kernel: Any,
    triton_runs: list[None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    triton_support._find_triton.cache_clear()
    place = torch.zeros(64)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            triton_support.launch(kernel, (1,), place, place, 1, 17, 5, SIZE=16)
    triton_support._find_triton.cache_clear()
    assert len(triton_runs) == len(device.launched) == 3
    assert [record.getMessage().split("this is ")[1] for record in caplog.records] == ["3.99.0"]


def _without_hooks(given: Launched) -> Launched:
    """Leave out the hooks, which have nothing to call, and what they are told."""
    assert all(hook is None or not hook.calls for hook in given[7:9])
    return given[:6] + given[9:]


def _compare(given: Launched, expected: Launched) -> None:
    """Check that both are the same objects, and numbers of the same type."""
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        assert one is other or (type(one) is type(other) and not isinstance(one, torch.Tensor) and one == other)
