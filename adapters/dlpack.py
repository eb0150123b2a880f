"""DLPack: another library's pages as a tensor in the same memory, at the distance that they really have.

A library that takes contiguous tensors only binds padded pages as a short one, and gives their distance beside it.
Imported as it stands, such a tensor ends before its last page does. Here the distance goes into the struct that is
exchanged (DLPack's unversioned one, whose layout is fixed): torch then sees strides, and a storage that ends with the
last page.

torch ends the process, without an exception, over strides that run backwards and over a storage that no memory holds:
both are refused before it sees them.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pagedmla.kv_cache.checks import refuse

_HEAD = {b"dltensor": 0, b"dltensor_versioned": 32}  # capsules, and the bytes in their structs before the tensor
_ADDRESSABLE = 2**57  # bytes: what the widest virtual address reaches

# Of our own: a function of ctypes.pythonapi is one object for the whole process, and so are the types set on it.
_name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


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


def shared(producer: Any, name: str) -> Tensor:
    """The memory of `producer` as it stands. Raises ValueError where torch can't have it, which names it `name`."""
    try:
        tensor: Tensor = from_dlpack(_Forward(producer, name))
    except (AttributeError, BufferError, RuntimeError, TypeError) as error:
        refuse(name, "memory that its owner and torch exchange by DLPack", f"{type(error).__name__}: {error}")
    return tensor


def pages_apart(producer: Any, page_stride: int, name: str = "pages", stride_name: str = "page_stride") -> Tensor:
    """The memory of `producer` `[num_pages, ...]`, contiguous there, with its pages `page_stride` elements apart.

    The caller vouches for the memory between and behind the pages. The tensor keeps the producer's memory alive. Raises
    ValueError where the producer isn't contiguous, pages would overlap, or the last one lies past every address; it
    calls the producer `name` and the distance `stride_name`.
    """
    packed = shared(producer, name)
    if packed.dim() == 0:
        refuse(name, "[num_pages, ...]", packed)
    page = packed[:1].numel()
    if not packed.is_contiguous():
        wanted = f"a contiguous tensor, since its pages are {page_stride} elements apart"
        refuse(name, wanted, f"strides {packed.stride()}")
    if page_stride < page:
        refuse(stride_name, f"at least {page}, the elements of a page", page_stride)
    if page_stride == page or packed.shape[0] < 2:
        return packed
    if (packed.shape[0] * page_stride) * packed.element_size() > _ADDRESSABLE:
        most = _ADDRESSABLE // (packed.shape[0] * packed.element_size())
        refuse(stride_name, f"at most {most}, with which {packed.shape[0]} pages have addresses", page_stride)
    respaced = _Respaced(producer, (page_stride, *packed.stride()[1:]))
    try:
        spread: Tensor = from_dlpack(respaced)
    finally:
        respaced.give_back()
    return spread


class _Forward:
    """`producer`, unless its strides run backwards."""

    def __init__(self, producer: Any, name: str) -> None:
        self._producer, self._name = producer, name

    def __dlpack_device__(self) -> Any:
        return self._producer.__dlpack_device__()

    def __dlpack__(self, **asked: Any) -> Any:
        capsule = self._producer.__dlpack__(**asked)
        struct = _tensor_of(capsule)
        strides = tuple(struct.strides[: struct.ndim]) if struct.strides else ()
        if any(stride < 0 for stride in strides):
            refuse(self._name, "strides of at least 0, since torch has no others", f"strides {strides}")
        return capsule


def _tensor_of(capsule: Any) -> _DLTensor:
    """The struct that a capsule shares. It lives as long as the capsule isn't destroyed."""
    kind = _name_of(capsule)
    if kind not in _HEAD:
        raise BufferError(f"a capsule of the kind {kind!r}")
    return _DLTensor.from_address(_pointer_of(capsule, kind) + _HEAD[kind])


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
        struct = _tensor_of(capsule)
        # The capsule too: if torch refuses it, its destructor mustn't run before the strides are back.
        self._lent.append((capsule, struct, ctypes.cast(struct.strides, ctypes.c_void_p).value))
        struct.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
        return capsule

    def give_back(self) -> None:
        for _, struct, strides in self._lent:
            struct.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
        self._lent.clear()
