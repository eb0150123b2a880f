"""Every variant of the attention kernels that the dispatcher may choose.

What stands here is which calls are foreseen; what such a call compiles is recorded from the host functions
(recording.py), so that what is built ahead of time is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from pagedmla.kv_cache.layouts import CacheLayout, RowPlanes, get_layout
from pagedmla.kv_cache.paged_tensor import PagedTensor
from pagedmla.triton_kernels.recording import record, specialise
from pagedmla.triton_kernels.step_variants import StepVariant as Variant
from pagedmla.triton_kernels.targets import TARGETS, Target

LAYOUTS = (
    ("bf16", None),
    ("fp16", None),
    ("fp32", None),
    ("fp8_flat", None),
    ("fp8_flat", 128),
    ("fp8_flat", 64),
    ("fp8_flat", 40),  # no chunk of columns fits: elements are dequantised
    ("fp8_rope_bf16", None),
    ("fp8_rope_bf16_prescaled", None),
    ("fp8_ds_mla", None),
)
HEADS = (16, 128)  # the smallest tile of rows and the largest
PAGE_SIZES = (64, 16)  # a multiple of the tile of keys, and not
_REQUESTS, _COLUMNS, _SPLITS = 64, 512, 8
_PAGES, _LAYERS = 1024, 61


def variants(targets: Iterable[str] = tuple(TARGETS)) -> list[Variant]:
    """Decode and mixed for every layout, tile of rows and kind of page, for each target, writing split states.

    An undivided call differs only in the type of `out`, another slot stride or granularity in constants: Triton
    builds those when they are first used.
    """
    found: list[Variant] = []
    for name in targets:
        for layout_name, granularity in LAYOUTS:
            layout = get_layout(layout_name, granularity=granularity)
            for page_size in PAGE_SIZES:
                for heads in HEADS:
                    found += _attention(layout, page_size, heads, TARGETS[name])
    return found


def _attention(layout: CacheLayout, page_size: int, heads: int, target: Target) -> Iterator[Variant]:
    from pagedmla.triton_kernels.decode import attend_decode
    from pagedmla.triton_kernels.mixed import attend_mixed

    planes = _planes(layout, page_size)
    dtype = torch.float32 if layout.name == "fp32" else torch.float16 if layout.name == "fp16" else torch.bfloat16
    q = _meta(_REQUESTS, heads, layout.width, dtype=dtype)
    out = _meta(_SPLITS, _REQUESTS, heads, layout.latent, dtype=torch.float32)
    lse = _meta(_SPLITS, _REQUESTS, heads, dtype=torch.float32)
    table, lengths, starts = (
        _meta(*shape, dtype=torch.int32) for shape in ((_REQUESTS, _COLUMNS), (_REQUESTS,), (_REQUESTS + 1,))
    )

    def decode() -> None:
        attend_decode(q, planes, table, lengths, out, lse, sm_scale=layout.width**-0.5)

    def mixed() -> None:
        attend_mixed(q, planes, table, lengths, starts, out, lse, sm_scale=layout.width**-0.5, max_query_len=1)

    for kernel, call in (("decode", decode), ("mixed", mixed)):
        yield _record(kernel, call, layout, target)


def _record(kernel: str, call: Callable[[], None], layout: CacheLayout, target: Target) -> Variant:
    (launched,) = record(call, target)
    types = specialise(launched)
    options = dict(types.options)
    return Variant(
        kernel=kernel,
        layout=layout.name,
        rows=types.constants["ROWS"],
        function=f"{launched.kernel.fn.__module__}:{launched.kernel.fn.__name__}",
        signature=types.signature,
        constants=types.constants,
        divisible_by_16=types.divisible_by_16,
        tokens_per_iteration=types.constants["TILE"],
        bytes_per_token=float(layout.bytes_per_token),
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages"),
        targets=(target.name,),
        options=options,
    )


def _planes(layout: CacheLayout, page_size: int) -> RowPlanes:
    pool = (_PAGES, 1, _LAYERS, page_size, 1)
    values = _meta(*pool, layout.row_elements, dtype=layout.value_dtypes[0])
    scales = None
    if layout.scales_per_token:
        scales = PagedTensor.bind(_meta(*pool, layout.scales_per_token, dtype=torch.float32), "kv_scales")
    return layout.planes(PagedTensor.bind(values, "kv_blocks"), scales, 0)


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
