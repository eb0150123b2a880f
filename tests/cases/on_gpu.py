"""A pytest plugin (`-p cases.on_gpu`): tests that hold CPU tensors have their Triton kernels run on the GPU.

Whole storages go there and come back, so strides, offsets, sentinels and poison are what the test made them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedmla.triton_kernels.launch import intercepted


@pytest.fixture(autouse=True)
def _kernels_run_on_the_gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with intercepted(run_on_gpu):
        yield


def run_on_gpu(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A receiver of `launch.intercepted`: the kernel sees the same strides, offsets and neighbours of every tensor."""
    copies: dict[int, Tensor] = {}

    def there(arg: Any) -> Any:
        if not isinstance(arg, Tensor) or arg.is_cuda:
            return arg
        storage = arg.untyped_storage()
        bytes_there = copies.get(storage.data_ptr())
        if bytes_there is None:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            bytes_there = copies[storage.data_ptr()] = here.cuda()
        moved = torch.empty(0, dtype=arg.dtype, device="cuda")
        return moved.set_(bytes_there.untyped_storage(), arg.storage_offset(), arg.shape, arg.stride())

    kernel[grid](*(there(arg) for arg in args), **kwargs)
    torch.cuda.synchronize()
    for arg in args:
        if isinstance(arg, Tensor) and not arg.is_cuda:
            bytes_there = copies.pop(arg.untyped_storage().data_ptr(), None)
            if bytes_there is not None:
                torch.empty(0, dtype=torch.uint8).set_(arg.untyped_storage()).copy_(bytes_there)
