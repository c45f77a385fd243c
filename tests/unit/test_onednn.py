"""fp32 products by oneDNN: as exact as torch's own, refused in torch's words, and taken where they are faster."""

import os
import textwrap
from pathlib import Path

import pytest
import torch

from megatron_rl.platforms import host
from tests.processes import run_python

pytestmark = pytest.mark.each_change

PREPARED = """
import itertools, torch
from megatron_rl.platforms import host

def made(kind, rows, columns):
    return {
        "rows": lambda: torch.randn(rows, columns),
        "columns": lambda: torch.randn(columns, rows).t(),
        "rows apart": lambda: torch.randn(rows, 2 * columns)[:, :columns],
        "columns apart": lambda: torch.randn(columns, 2 * rows)[:, :rows].t(),
        "every second row": lambda: torch.randn(2 * rows, columns)[::2],
        "every second column": lambda: torch.randn(rows, 2 * columns)[:, ::2],
        "one row": lambda: torch.randn(1, columns).expand(rows, columns),
        "one column": lambda: torch.randn(rows, 1).expand(rows, columns),
        "one element": lambda: torch.randn(1, 1).expand(rows, columns),
        "an offset": lambda: torch.randn(rows * columns + 3)[3:].view(rows, columns),
        "rows that overlap": lambda: torch.randn(2 * rows + columns).as_strided((rows, columns), (1, 1)),
    }[kind]()

KINDS = (
    "rows", "columns", "rows apart", "columns apart", "every second row", "every second column", "one row",
    "one column", "one element", "an offset", "rows that overlap",
)
SIZES = ((5, 7, 3), (1, 16, 1), (64, 33, 17), (130, 64, 100), (1, 1, 1), (3, 1, 4), (0, 4, 3), (3, 0, 4), (3, 4, 0))
"""


def run(code: str) -> str:
    return run_python(PREPARED + textwrap.dedent(code))


def test_a_product_is_within_fp32_of_the_one_in_float64_whatever_the_strides():
    run(
        """
        host.replace_mm()
        for left, right in itertools.product(KINDS, KINDS):
            for m, k, n in SIZES:
                a, b = made(left, m, k), made(right, k, n)
                exact = a.double() @ b.double()
                # Roundings of k products and k sums.
                bound = 2 * k * 2.0**-24 * (a.double().abs() @ b.double().abs())
                result = a @ b
                assert result.dtype is torch.float32 and result.is_contiguous() and result.shape == exact.shape
                assert ((result - exact).abs() <= bound).all(), (left, right, m, k, n)
        """
    )


def test_gradients_go_through_products_of_the_same_kind():
    run(
        """
        host.replace_mm()
        x, w = torch.randn(3, 5, 64, requires_grad=True), torch.randn(96, 64, requires_grad=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            (x @ w.t()).square().sum().backward()
        calls = {event.key: event.count for event in profile.key_averages()}
        assert calls["aten::mm"] == calls["mkldnn::_linear_pointwise"] == 3, calls
        exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, w))
        (exact_x @ exact_w.t()).square().sum().backward()
        torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(w.grad.double(), exact_w.grad, rtol=1e-5, atol=1e-3)
        """
    )


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_mkls_products_do_not_depend_on_threads_and_a_mode_of_the_users_stays() -> None:
    code = """
        import ctypes, os, torch
        from megatron_rl import platforms
        platforms.select("cpu").install()
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        print(hex(library.mkl_serv_cbwr_get(-1)))
    """
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    # MKL's numbers for AUTO with STRICT, and for its slowest mode.
    assert run_python(code, env=environment).strip() == "0x10002"
    assert run_python(code, env={**environment, "MKL_CBWR": "COMPATIBLE"}).strip() == "0x3"


def test_products_of_other_types_and_mistakes_are_torchs_own():
    run(
        """
        def outcome(a, b):
            try:
                return torch.mm(a, b)
            except RuntimeError as error:
                return str(error)

        a, b = torch.randn(6, 5), torch.randn(5, 4)
        pairs = [
            *((a.to(dtype), b.to(dtype)) for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64)),
            (a, b.double()), (a, a), (a[0], b), (a, b[:, 0]), (a[None], b),
        ]
        before = [outcome(*pair) for pair in pairs]
        host.replace_mm()
        host.replace_mm()
        for pair, was in zip(pairs, before, strict=True):
            now = outcome(*pair)
            assert now == was if isinstance(was, str) else torch.equal(now, was) and now.dtype is was.dtype, (pair, now)
        """
    )


@pytest.mark.parametrize(
    ("cpuinfo", "is_taken"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", True),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", False),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", False),
        (None, False),
    ],
)
def test_onednn_products_are_taken_on_processors_that_mkl_has_no_kernels_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpuinfo: str | None, is_taken: bool
) -> None:
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    taken = []
    monkeypatch.setattr(host, "_CPUINFO", path)
    monkeypatch.setattr(host, "replace_mm", lambda: taken.append(True))
    host.multiply_with_onednn()
    assert bool(taken) == is_taken
