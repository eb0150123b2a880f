"""Run a kernel where its tensors are: on their GPU, or for CPU tensors in the corrected interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import checks_enabled
from pagedmla.triton_kernels.targets import TARGETS


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """`kernel[grid](*args, **kwargs)` on the device of the first tensor among `args`.

    On the CPU, PAGEDMLA_CHECK=1 makes an access outside every tensor's storage an error.
    """
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type == "cpu":
        from pagedmla.triton_kernels.interpreter import interpreted

        interpreted(kernel, debug=checks_enabled())[grid](*args, **kwargs)
        return
    with torch.cuda.device(device):
        kernel[grid](*args, **kwargs)


def shared_bytes_of(device: torch.device) -> int:
    """Shared memory that a block may have on this device; the interpreter, which has no limit, passes for sm_90."""
    if device.type == "cpu":
        return TARGETS["sm_90"].shared_per_block
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)
