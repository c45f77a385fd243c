"""The speeds and sizes of devices by their data sheets, and the shares of them that programs are assumed to reach."""

import dataclasses

from megatron_rl.errors import UsageError


@dataclasses.dataclass(frozen=True)
class DeviceFigures:
    """A device as a program sees it: each die of an Ascend 910C counts as one."""

    flops: float
    """Operations a second, in dense products in bf16."""
    bandwidth: float
    """Bytes a second, to and from its memory."""
    gib: float
    link: float
    """Bytes a second in one direction, to devices of the same host."""
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
    # Huawei's data sheet of the Atlas 800T A2, which has 8: 313 TFLOPS in FP16 and 64 GB each, and 200 Gb/s of RoCE
    # for each. Third parties report 1.6 TB/s, and 392 GB/s between devices in both directions.
    "ascend910b": DeviceFigures(313e12, 1.6e12, 61, 196e9, 25e9),
    # One die of the two. Huawei's paper on CloudMatrix384 (arXiv 2506.12708): 376 TFLOPS, 64 GB at 1.6 TB/s. Both
    # dies share 392 GB/s in one direction within the machine, and 400 Gb/s of RDMA.
    "ascend910c": DeviceFigures(376e12, 1.6e12, 61, 196e9, 25e9),
}


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """The shares of a data sheet's figures that a program reaches. None was measured here; only runs show them."""

    training: float = 0.4
    """The share of the peak that forward and backward passes reach."""
    prefill: float = 0.5
    decoding: float = 0.6
    """The share of the memory's bandwidth that decoding reaches."""
    network: float = 0.7
    """The share of the speed of links and network that is reached."""
    step_seconds: float = 0.003
    """Other seconds of a decode step: scheduling, sampling, starting kernels."""
    collective_seconds: float = 12e-6
    """Seconds of each sum over an engine's devices."""
    publish_seconds: float = 2.0
    """Seconds of a publish besides its bytes: pausing, checking, resuming."""


ASSUMED = Assumptions()


def find_figures(name: str) -> DeviceFigures:
    """Return the figures of the chip `name`."""
    if name not in CHIPS:
        raise UsageError(f"--chip {name} is unknown: write one of {', '.join(CHIPS)}")
    return CHIPS[name]
