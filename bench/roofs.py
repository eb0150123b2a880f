"""What a device could do at best: a GPU's published peaks, or what this CPU does in this very run."""

from __future__ import annotations

import torch

from pagedmla.bench.clocks import CpuClock
from pagedmla.hardware.cost import B200, H100, H200, Gpu, Roof

# By the name that their driver gives. Others of a family (PCIe, NVL, GH200, GB200) have other memory, clocks or power.
CARDS = {"NVIDIA H100 80GB HBM3": H100, "NVIDIA H200": H200, "NVIDIA B200": B200}

_READ = 256 << 20  # bytes, beyond any last-level cache here
_SIDE = 1024  # of the matrices that are multiplied


def roof_of(device: torch.device) -> Roof | None:
    """The peaks of a device; None for a GPU that isn't listed."""
    if device.type == "cuda":
        return gpu_named(torch.cuda.get_device_name(device))
    return cpu_roof()


def gpu_named(name: str) -> Gpu | None:
    """The published peaks of the card that a driver calls so; None for one that isn't listed."""
    return CARDS.get(name)


def cpu_roof() -> Roof:
    """Measured now, with as many threads as torch has: reading memory, and multiplying float32 matrices.

    The torch executor multiplies in float32, so that is the peak of every precision here.
    """
    clock = CpuClock(seconds=0.5)
    memory = torch.ones(_READ // 4)
    a, b = torch.randn(2, _SIDE, _SIDE)
    (read_us,) = clock([lambda: memory.sum()])
    (multiply_us,) = clock([lambda: a @ b])
    tflops = 2 * _SIDE**3 / multiply_us / 1e6
    return Roof("this CPU", _READ / read_us / 1e6, tflops, tflops)
