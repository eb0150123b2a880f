"""What a device could do at best: a GPU's published peaks, or what this CPU does in this very run."""

from __future__ import annotations

import torch

from pagedmla.bench.clocks import CpuClock
from pagedmla.hardware.cost import GPUS, Gpu

_READ = 256 << 20  # bytes, beyond any last-level cache here
_SIDE = 1024  # of the matrices that are multiplied


def roof_of(device: torch.device) -> Gpu | None:
    """The peaks of a device; None for a GPU that isn't listed."""
    if device.type == "cuda":
        return gpu_named(torch.cuda.get_device_name(device))
    return cpu_roof()


def gpu_named(name: str) -> Gpu | None:
    """The published peaks of a GPU by the name that its driver gives, or None."""
    return next((gpu for gpu in GPUS if gpu.name.split()[0] in name), None)


def cpu_roof() -> Gpu:
    """Measured now, with as many threads as torch has: reading memory, and multiplying float32 matrices.

    The torch executor multiplies in float32, so that is the peak of every precision here.
    """
    clock = CpuClock(seconds=0.5)
    memory = torch.ones(_READ // 4)
    a, b = torch.randn(2, _SIDE, _SIDE)
    (read_us,) = clock([lambda: memory.sum()])
    (multiply_us,) = clock([lambda: a @ b])
    tflops = 2 * _SIDE**3 / multiply_us / 1e6
    return Gpu("this CPU", _READ / read_us / 1e6, tflops, tflops)
