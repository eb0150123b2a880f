"""Variants of store, decompress, prefill and merge to build ahead of time: what their host functions launch.

Shapes here stand for those of a served DeepSeek model (latent 512, pages of 64 tokens, bf16 activations); what matters
for the build is which of them are 1, a multiple of 16, or beyond 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagedmla.kv_cache.layouts import CacheLayout, RowPlanes, get_layout
from pagedmla.kv_cache.paged_tensor import PagedTensor
from pagedmla.triton_kernels.recording import record, specialise
from pagedmla.triton_kernels.targets import TARGETS, Target

_LAYOUTS = (
    ("bf16", None),
    ("fp16", None),
    ("fp32", None),
    ("fp8_flat", None),
    ("fp8_flat", 128),
    ("fp8_rope_bf16", None),
    ("fp8_rope_bf16_prescaled", None),
    ("fp8_ds_mla", None),
)
_HEAD_WIDTHS = ((192, 128), (128, 128), (64, 64))
_TOKENS, _HEADS, _REQUESTS, _COLUMNS = 4096, 128, 64, 512
_PAGES, _LAYERS, _PAGE_SIZE = 1024, 61, 64


@dataclass(frozen=True)
class StepVariant:
    """See pagedmla.triton_kernels.compile.Variant."""

    kernel: str
    layout: str
    rows: int
    function: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible_by_16: tuple[str, ...]
    tokens_per_iteration: int | None
    bytes_per_token: float | None
    num_warps: int
    num_stages: int
    targets: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


def variants(targets: Iterable[str] = tuple(TARGETS)) -> list[StepVariant]:
    """All of them, for each target: constants and tiles depend on it."""
    found = []
    for name in targets:
        target = TARGETS[name]
        for layout, granularity in _LAYOUTS:
            found += _cache_variants(get_layout(layout, granularity=granularity), target)
        for key_columns, value_columns in _HEAD_WIDTHS:
            for causal in (True, False):
                found.append(_prefill_variant(key_columns, value_columns, causal, target))
        found.append(_merge_variant(target))
    return found


def _cache_variants(layout: CacheLayout, target: Target) -> list[StepVariant]:
    from pagedmla.triton_kernels.decompress import TOKENS as DECOMPRESS_TOKENS
    from pagedmla.triton_kernels.decompress import decompress
    from pagedmla.triton_kernels.store import TOKENS as STORE_TOKENS
    from pagedmla.triton_kernels.store import store, store_slots

    planes = _planes(layout)
    latent, rope = _meta(_TOKENS, layout.latent), _meta(_TOKENS, layout.rope)
    table, lengths, starts = _int32(_REQUESTS, _COLUMNS), _int32(_REQUESTS), _int32(_REQUESTS + 1)
    scale_table = None if planes.scales_in_value_pages else table
    slots = _meta(_TOKENS, dtype=torch.int64)

    def variant(kernel: str, tokens: int, call: Callable[[], None]) -> StepVariant:
        return _variant(
            call,
            kernel=kernel,
            layout=layout.name,
            target=target,
            rows=tokens,
            tokens=tokens,
            bytes_per_token=layout.bytes_per_token + 2.0 * layout.width,
        )

    return [
        variant("store", STORE_TOKENS, lambda: store(latent, rope, planes, table, lengths, starts, scale_table)),
        variant("store", STORE_TOKENS, lambda: store_slots(latent, rope, planes, slots)),
        variant(
            "decompress",
            DECOMPRESS_TOKENS,
            lambda: decompress(planes, table, lengths, starts, _meta(_TOKENS, layout.width), scale_table),
        ),
    ]


def _prefill_variant(key_columns: int, value_columns: int, causal: bool, target: Target) -> StepVariant:
    from pagedmla.triton_kernels.prefill import constants, prefill

    q, k = _meta(_TOKENS, _HEADS, key_columns), _meta(_TOKENS, _HEADS, key_columns)
    v, out = _meta(_TOKENS, _HEADS, value_columns), _meta(_TOKENS, _HEADS, value_columns)
    starts, lse = _int32(_REQUESTS + 1), _meta(_TOKENS, _HEADS, dtype=torch.float32)
    tile = constants(q.dtype, key_columns, value_columns, causal, target)
    return _variant(
        lambda: prefill(q, k, v, starts, starts, out, lse, sm_scale=key_columns**-0.5, causal=causal),
        kernel="prefill",
        layout="bf16",
        target=target,
        rows=tile["BLOCK_M"],
        tokens=tile["BLOCK_N"],
        bytes_per_token=2.0 * (key_columns + value_columns),
    )


def _merge_variant(target: Target) -> StepVariant:
    from pagedmla.triton_kernels.merge import merge

    partial = _meta(8, _TOKENS, _HEADS, 512, dtype=torch.float32)
    partial_lse, lse = (_meta(*shape, dtype=torch.float32) for shape in ((8, _TOKENS, _HEADS), (_TOKENS, _HEADS)))
    return _variant(
        lambda: merge(partial, partial_lse, _meta(_TOKENS, _HEADS, 512), lse),
        kernel="merge",
        layout="",
        target=target,
        rows=1,
        tokens=None,
        bytes_per_token=None,
    )


def _variant(
    call: Callable[[], None],
    *,
    kernel: str,
    layout: str,
    target: Target,
    rows: int,
    tokens: int | None,
    bytes_per_token: float | None,
) -> StepVariant:
    (launched,) = record(call, target)
    types = specialise(launched)
    options = dict(types.options)
    return StepVariant(
        kernel=kernel,
        layout=layout,
        rows=rows,
        function=f"{launched.kernel.fn.__module__}:{launched.kernel.fn.__name__}",
        signature=types.signature,
        constants=types.constants,
        divisible_by_16=types.divisible_by_16,
        tokens_per_iteration=tokens,
        bytes_per_token=bytes_per_token,
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages", 2),
        targets=(target.name,),
        options=options,
    )


def _planes(layout: CacheLayout) -> RowPlanes:
    values = _meta(_PAGES, 1, _LAYERS, _PAGE_SIZE, 1, layout.row_elements, dtype=layout.value_dtypes[0])
    scales = None
    if layout.scales_per_token:
        pool = _meta(_PAGES, 1, _LAYERS, _PAGE_SIZE, 1, layout.scales_per_token, dtype=torch.float32)
        scales = PagedTensor(pool, "kv_scales", pool.stride(0))
    return layout.planes(PagedTensor(values, "kv_blocks", values.stride(0)), scales, 0)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int32(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int32)
