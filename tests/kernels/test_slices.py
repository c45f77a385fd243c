"""The operations over slices: their kernels, compiled, and what they do without kernels."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.ops.slices import Slice, build_digester, list_reasons_against_kernels, naive


def test_without_kernels_the_naive_twin_digests_and_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    values = torch.randn(3, 5)
    assert isinstance(build_digester([Slice(values, 0)], torch.float32, 1), naive.NaiveDigester)
    (reason,) = list_reasons_against_kernels([Slice(values, 0)], torch.float32)
    assert "TRITON_INTERPRET=1" in reason


@pytest.mark.parametrize(
    ("device", "source", "target", "reason"),
    [
        ("npu", torch.bfloat16, torch.bfloat16, "they are not known to work on npu"),
        ("cuda", torch.float32, torch.float64, "they do not convert torch.float64"),
        ("cuda", torch.int8, torch.float32, "they do not convert torch.int8"),
        ("cuda", torch.float64, torch.float64, None),
        ("cuda", torch.float32, torch.bfloat16, None),
    ],
)
def test_kernels_refuse_devices_and_conversions_that_they_do_not_know(device, source, target, reason) -> None:
    values = SimpleNamespace(dtype=source, device=SimpleNamespace(type=device))
    assert list_reasons_against_kernels([Slice(values, 0)], target) == ([] if reason is None else [reason])
