"""DLPack: another library's pages as a tensor in the same memory, at the distance that they really have.

A library that takes contiguous tensors only binds padded pages as a short one, and gives their distance beside it.
Imported as it stands, such a tensor ends before its last page does. Here the distance goes into the struct that is
exchanged (DLPack's unversioned one, whose layout is fixed): torch then sees strides, and a storage that ends with the
last page.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pagedmla.kv_cache.checks import refuse

_CAPSULE = b"dltensor"


class _DLTensor(ctypes.Structure):
    """The head of a DLManagedTensor; what follows it is the producer's."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def pages_apart(producer: Any, page_stride: int) -> Tensor:
    """The memory of `producer` `[num_pages, ...]`, contiguous there, with its pages `page_stride` elements apart.

    The caller vouches for the memory between and behind the pages. The tensor keeps the producer's memory alive. Raises
    ValueError where the producer isn't contiguous, or pages would overlap.
    """
    shared: Tensor = from_dlpack(producer)
    page = shared[:1].numel()
    if not shared.is_contiguous():
        wanted = f"a contiguous tensor, since they are {page_stride} elements apart"
        refuse("pages", wanted, f"strides {shared.stride()}")
    if page_stride < page:
        refuse("page_stride", f"at least {page}, the elements of a page", page_stride)
    if page_stride == page or shared.shape[0] < 2:
        return shared
    respaced = _Respaced(producer, (page_stride, *shared.stride()[1:]))
    try:
        spread: Tensor = from_dlpack(respaced)
    finally:
        respaced.give_back()
    return spread


class _Respaced:
    """`producer` with other strides. Its own are back in the struct before it is asked to free them."""

    def __init__(self, producer: Any, strides: tuple[int, ...]) -> None:
        self._producer = producer
        self._strides = (ctypes.c_int64 * len(strides))(*strides)
        self._lent: list[tuple[Any, _DLTensor, Any]] = []

    def __dlpack_device__(self) -> Any:
        return self._producer.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        capsule = self._producer.__dlpack__(stream=stream)  # no max_version: the unversioned struct
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        struct = _DLTensor.from_address(pointer_of(capsule, _CAPSULE))
        # The capsule too: if torch refuses it, its destructor mustn't run before the strides are back.
        self._lent.append((capsule, struct, ctypes.cast(struct.strides, ctypes.c_void_p).value))
        struct.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
        return capsule

    def give_back(self) -> None:
        for _, struct, strides in self._lent:
            struct.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
        self._lent.clear()
