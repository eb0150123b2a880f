"""Run a kernel where its tensors are: on their GPU, or for CPU tensors in the corrected interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import checks_enabled

_Receiver = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], object]
_receiver: ContextVar[_Receiver | None] = ContextVar("receiver", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """`kernel[grid](*args, **kwargs)` on the device of the first tensor among `args`.

    On the CPU, PAGEDMLA_CHECK=1 makes an access outside every tensor's storage an error.
    """
    receiver = _receiver.get()
    if receiver is not None:
        receiver(kernel, grid, args, kwargs)
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type == "cpu":
        from pagedmla.triton_kernels.interpreter import interpreted

        interpreted(kernel, debug=checks_enabled())[grid](*args, **kwargs)
        return
    with torch.cuda.device(device):
        kernel[grid](*args, **kwargs)


@contextlib.contextmanager
def intercepted(receiver: _Receiver) -> Iterator[None]:
    """Hand launches of this thread to `receiver(kernel, grid, args, kwargs)` instead of a device."""
    token = _receiver.set(receiver)
    try:
        yield
    finally:
        _receiver.reset(token)
