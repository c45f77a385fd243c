"""What devices can do, by their data sheets, and what is assumed of it."""

import dataclasses

from megatron_rl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class DeviceFigures:
    """A device as a program sees it: a die of an Ascend 910C is one."""

    flops: float
    """A second, of dense products in bf16."""
    bandwidth: float
    """Bytes a second, of its memory."""
    gib: float
    link: float
    """Bytes a second in one direction, to devices of its host."""
    network: float
    """Bytes a second in one direction, to other hosts."""


CHIPS = {
    # NVIDIA's data sheet of the A100 80GB SXM: 312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s in both directions; a DGX has
    # 200 Gb/s of InfiniBand for each.
    "a100": DeviceFigures(312e12, 2.039e12, 80, 300e9, 25e9),
    # NVIDIA's data sheet of the H100 SXM: 989 TFLOPS without sparsity, 3.35 TB/s, NVLink 900 GB/s in both directions;
    # 400 Gb/s of InfiniBand for each.
    "h100": DeviceFigures(989e12, 3.35e12, 80, 450e9, 50e9),
    # NVIDIA's data sheet of the H200 SXM: as the H100, with 141 GB at 4.8 TB/s.
    "h200": DeviceFigures(989e12, 4.8e12, 131, 450e9, 50e9),
    # NVIDIA's figures of the H20, which it has published to makers of servers: 148 TFLOPS, 96 GB at 4.0 TB/s, NVLink
    # 900 GB/s in both directions.
    "h20": DeviceFigures(148e12, 4.0e12, 89, 450e9, 50e9),
    # Huawei's data sheet of the Atlas 800T A2, of 8: 313 TFLOPS in FP16 each, 64 GB; 1.6 TB/s and 392 GB/s between
    # devices in both directions as others have reported; 200 Gb/s of RoCE for each.
    "ascend910b": DeviceFigures(313e12, 1.6e12, 61, 196e9, 25e9),
    # Of one die of the two, by Huawei's paper on CloudMatrix384 (arXiv 2506.12708): 376 TFLOPS, 64 GB at 1.6 TB/s,
    # 392 GB/s for both dies in one direction within the machine, and 400 Gb/s of RDMA for both.
    "ascend910c": DeviceFigures(376e12, 1.6e12, 61, 196e9, 25e9),
}


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What a program gets of a data sheet's figures. None of these was measured here: only runs say what is so."""

    training: float = 0.4
    """Of the peak, in products of the forward and backward pass."""
    prefill: float = 0.5
    decoding: float = 0.6
    """Of the memory's bandwidth."""
    network: float = 0.7
    """Of links and network."""
    step_seconds: float = 0.003
    """Of a decode step besides: scheduling, sampling, starting kernels."""
    collective_seconds: float = 12e-6
    """Of each sum over an engine's devices."""
    publish_seconds: float = 2.0
    """Of a publish besides its bytes: pausing, checking, resuming."""


ASSUMED = Assumptions()


def find_figures(name: str) -> DeviceFigures:
    """Return the chip of that name."""
    if name not in CHIPS:
        raise UsageError(f"--chip {name} is unknown: write one of {', '.join(CHIPS)}")
    return CHIPS[name]
