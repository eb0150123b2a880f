"""Kernel launches that are decided and checked once, and made again with other tensors of the same geometry.

The layers of a step differ in their pools, queries and outputs; tables, lengths, tiles, splits and constants are the
step's. So the first layer's call is recorded, and each layer launches what was recorded with its own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from pagedmla.kv_cache.layouts import RowPlanes

Named = Mapping[str, Tensor | None]


def pool_tensors(planes: RowPlanes) -> dict[str, Tensor | None]:
    """A layer's pool by name, as kernels are handed it."""
    from pagedmla.triton_kernels.planes import as_bytes

    return {
        "pool latent": as_bytes(planes.latent),
        "pool rope": as_bytes(planes.rope),
        "pool scales": as_bytes(planes.scales),
    }


def geometry(tensors: Named) -> tuple[object, ...]:
    """What must be equal for a repetition: shapes, strides, dtypes and devices."""
    return tuple(
        None if each is None else (each.shape, each.stride(), each.dtype, each.device) for each in tensors.values()
    )


class _Place(NamedTuple):
    """Rows `first .. first + rows - 1` of a named tensor; all of it where `rows` is None."""

    position: int
    name: str
    first: int
    rows: int | None


class _Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    places: tuple[_Place, ...]


class Repeat:
    """The launches of one call, to be made for other tensors.

    `call` is run once, its launches kept and not made: it must do nothing but launch. Among their arguments, what is
    one of `tensors`, or rows of it, is replaced in a repetition; all else stays as it was.
    """

    def __init__(self, call: Callable[[], object], tensors: Named) -> None:
        from pagedmla.triton_kernels.launch import intercepted

        made: list[_Launch] = []
        with intercepted(lambda kernel, grid, args, kwargs: made.append(_placed(kernel, grid, args, kwargs, tensors))):
            call()
        self._launches = made

    def __call__(self, tensors: Named) -> None:
        """Launch with `tensors`, which have the names and the geometry of the first ones."""
        from pagedmla.triton_kernels.launch import launch

        for kernel, grid, recorded, kwargs, places in self._launches:
            args = list(recorded)
            for position, name, first, rows in places:
                tensor = tensors[name]
                args[position] = tensor if rows is None or tensor is None else tensor.narrow(0, first, rows)
            launch(kernel, grid, *args, **kwargs)


def _placed(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Named
) -> _Launch:
    places = []
    kept = list(args)
    for position, argument in enumerate(args):
        if isinstance(argument, Tensor):
            place = _find(argument, position, tensors)
            if place is not None:
                places.append(place)
                kept[position] = None  # the first layer's memory isn't held on to
    return _Launch(kernel, grid, tuple(kept), kwargs, tuple(places))


def _find(argument: Tensor, position: int, tensors: Named) -> _Place | None:
    for name, tensor in tensors.items():
        if tensor is None or argument.dtype != tensor.dtype or argument.stride() != tensor.stride():
            continue
        if argument.data_ptr() == tensor.data_ptr() and argument.shape == tensor.shape:
            return _Place(position, name, 0, None)
    for name, tensor in tensors.items():
        if tensor is None or argument.dtype != tensor.dtype or argument.stride() != tensor.stride():
            continue
        if argument.shape[1:] != tensor.shape[1:] or tensor.stride(0) == 0:
            continue
        first, beside = divmod(argument.data_ptr() - tensor.data_ptr(), tensor.stride(0) * tensor.element_size())
        if beside == 0 and 0 <= first and first + argument.shape[0] <= tensor.shape[0]:
            return _Place(position, name, first, argument.shape[0])
    return None
