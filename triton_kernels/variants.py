"""Every variant of every kernel that the package launches: attention and its schedule, and the other steps.

What stands here is which calls are foreseen; what such a call compiles is recorded from the host functions
(recording.py), so that what is built ahead of time is what runs. Shapes stand for those of a served DeepSeek model;
what matters for the build is which of them are 1, a multiple of 16, or beyond 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagedmla.hardware.targets import TARGETS, Target
from pagedmla.kv_cache.layouts import CacheLayout, RowPlanes, get_layout
from pagedmla.kv_cache.paged_tensor import PagedTensor
from pagedmla.triton_kernels import KERNELS
from pagedmla.triton_kernels.recording import record, specialise

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
SERVED = (("fp8_flat", None), ("fp8_rope_bf16", None), ("fp8_ds_mla", None))  # what engines keep in FP8
# One layout for each kind of arithmetic. The others differ from these in types of a width or in constants.
KINDS = (("bf16", None), ("fp32", None), ("fp8_flat", 40), *SERVED)
WITH_BF16 = (("bf16", None), ("fp8_rope_bf16", None), ("fp8_ds_mla", None))  # float16 queries are split for these
BUDGETED = "sm_90"  # the target with every layout, every tile of rows, small pages and mixed
HEADS = (16, 32, 128)  # one for each size of a request that tiles.py tells apart
PAGE_SIZE = 64  # a multiple of every tile of keys
SMALL_PAGE = 16  # a tile of keys takes several
HEAD_WIDTHS = ((192, 128), (128, 128), (64, 64))  # of keys and values, once decompressed
_REQUESTS, _COLUMNS, _SPLITS, _SLOTS = 64, 512, 8, 264
_TOKENS, _HEADS = 4096, 128
_PAGES, _LAYERS = 1024, 61


@dataclass(frozen=True)
class Variant:
    """One kernel with everything fixed that the compiler fixes.

    function         "module:name" of the @triton.jit function
    signature        its arguments in order: "*fp16", "*u8", "i32", "i64", "fp32", or "constexpr" where `constants` says
    divisible_by_16  arguments that the JIT would find to be multiples of 16
    rows             of a tile
    tokens_per_iteration, bytes_per_token   see footprint.report_row; None where a kernel doesn't walk tokens
    targets          names of those it is meant for
    """

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


def variants(targets: Iterable[str] = tuple(TARGETS)) -> list[Variant]:
    """All of them, for each target: constants and tiles depend on it."""
    names = tuple(targets)
    return [*attention_variants(names), *step_variants(names)]


def attention_variants(targets: Iterable[str] = tuple(TARGETS)) -> list[Variant]:
    """Pieces for every kind of layout and the least and largest tile of rows, for each target.

    Also, for what engines serve and 16 rows, decode and mixed, which have the same loop behind other prologues, and
    small pages, which change addresses alone; on BUDGETED all tiles of these, the other layouts, and float16 queries.
    Calls that differ in the type of `out`, another slot stride or granularity in constants are built when they are
    first used.
    """
    found: list[Variant] = []
    for name in targets:
        target = TARGETS[name]
        if name != BUDGETED:
            for layout in KINDS:
                found += [_attention("pieces", layout, PAGE_SIZE, heads, target) for heads in (HEADS[0], HEADS[-1])]
            for layout in SERVED:
                found += [_attention(kernel, layout, PAGE_SIZE, HEADS[0], target) for kernel in ("decode", "mixed")]
                found.append(_attention("pieces", layout, SMALL_PAGE, HEADS[0], target))
            continue
        for heads in HEADS:
            found += [_attention("pieces", layout, PAGE_SIZE, heads, target) for layout in LAYOUTS]
            found += [_attention("decode", layout, PAGE_SIZE, heads, target) for layout in SERVED]
            for kernel, page_size in (("mixed", PAGE_SIZE), ("mixed", SMALL_PAGE), ("pieces", SMALL_PAGE)):
                found += [_attention(kernel, layout, page_size, heads, target) for layout in SERVED]
            found += [_attention("pieces", layout, PAGE_SIZE, heads, target, torch.float16) for layout in WITH_BF16]
    return _distinct(found)


def step_variants(targets: Iterable[str] = tuple(TARGETS)) -> list[Variant]:
    """Store, decompress, prefill, schedule and both merges, for each target."""
    found: list[Variant] = []
    for name in targets:
        target = TARGETS[name]
        for layout_name, granularity in LAYOUTS if name == BUDGETED else KINDS:
            found += _cache_steps(get_layout(layout_name, granularity=granularity), target)
        for key_columns, value_columns in HEAD_WIDTHS:
            for causal in (True, False):
                found.append(_prefill(key_columns, value_columns, causal, target))
        found.append(_merge(target))
        for heads in (HEADS[0], HEADS[-1]):
            of_pieces = ("schedule", "records", "merge_cuts")
            found += [_attention(kernel, ("fp8_rope_bf16", None), PAGE_SIZE, heads, target) for kernel in of_pieces]
    return _distinct(found)


def _distinct(found: list[Variant]) -> list[Variant]:
    """Without repetitions: calls that get one tile share a variant, 16 and 32 heads on Hopper, or all over float32."""
    return [variant for index, variant in enumerate(found) if variant not in found[:index]]


def _attention(
    kernel: str,
    layout_of: tuple[str, int | None],
    page_size: int,
    heads: int,
    target: Target,
    query_dtype: torch.dtype | None = None,
) -> Variant:
    """`query_dtype` None: the cache's own where it isn't FP8, else bfloat16."""
    from pagedmla.triton_kernels.decode import attend_decode
    from pagedmla.triton_kernels.mixed import attend_mixed
    from pagedmla.triton_kernels.pieces import attend_pieces, tile_of
    from pagedmla.triton_kernels.schedule import make_schedule

    layout = get_layout(layout_of[0], granularity=layout_of[1])
    planes = _planes(layout, page_size)
    usual = {"fp32": torch.float32, "fp16": torch.float16}.get(layout.name, torch.bfloat16)
    q = _meta(_REQUESTS, heads, layout.width, dtype=query_dtype or usual)
    out, lse = _meta(_REQUESTS, heads, layout.latent, dtype=q.dtype), _meta(_REQUESTS, heads, dtype=torch.float32)
    table, lengths, starts = (
        _meta(*shape, dtype=torch.int32) for shape in ((_REQUESTS, _COLUMNS), (_REQUESTS,), (_REQUESTS + 1,))
    )

    def decode() -> None:
        attend_decode(q, planes, table, lengths, out, lse, sm_scale=layout.width**-0.5)

    def mixed() -> None:
        attend_mixed(q, planes, table, lengths, starts, out, lse, sm_scale=layout.width**-0.5, max_query_len=1)

    def pieces() -> None:
        rows, keys = tile_of(q, planes, 1)
        schedule = make_schedule(
            lengths,
            starts,
            tokens=_REQUESTS,
            heads=heads,
            rows=rows,
            keys=keys,
            row_tiles=_REQUESTS,
            places=_SLOTS,
            slots=_SLOTS,
            most_pieces=_SLOTS,
        )
        states, state_lse = (_meta(_SLOTS, rows, *more, dtype=torch.float32) for more in ((layout.latent,), ()))
        attend_pieces(q, planes, table, schedule, out, lse, states, state_lse, sm_scale=1.0, max_query_len=1)

    call = {"decode": decode, "mixed": mixed}.get(kernel, pieces)
    launches = ("schedule", "records", "pieces", "merge_cuts")
    launch = launches.index(kernel) if kernel in launches else 0
    if kernel in launches and kernel != "pieces":
        return _variant(call, kernel, target, "", rows=None, tokens=None, launch=launch)
    return _variant(call, kernel, target, layout.name, bytes_per_token=float(layout.bytes_per_token), launch=launch)


def _cache_steps(layout: CacheLayout, target: Target) -> Iterator[Variant]:
    from pagedmla.triton_kernels.decompress import decompress
    from pagedmla.triton_kernels.store import store, store_slots

    planes = _planes(layout, PAGE_SIZE)
    latent, rope, workspace = (
        _meta(_TOKENS, columns, dtype=torch.bfloat16) for columns in (layout.latent, layout.rope, layout.width)
    )
    table, lengths, starts = (
        _meta(*shape, dtype=torch.int32) for shape in ((_REQUESTS, _COLUMNS), (_REQUESTS,), (_REQUESTS + 1,))
    )
    scale_table = None if planes.scales_in_value_pages else table
    slots = _meta(_TOKENS, dtype=torch.int64)
    for kernel, call in (
        ("store", lambda: store(latent, rope, planes, table, lengths, starts, scale_table)),
        ("store", lambda: store_slots(latent, rope, planes, slots)),
        ("decompress", lambda: decompress(planes, table, lengths, starts, workspace, scale_table)),
    ):
        cost = layout.bytes_per_token + 2.0 * layout.width
        yield _variant(call, kernel, target, layout.name, rows="TOKENS", tokens="TOKENS", bytes_per_token=cost)


def _prefill(key_columns: int, value_columns: int, causal: bool, target: Target) -> Variant:
    from pagedmla.triton_kernels.prefill import prefill

    q, k, v, out = (
        _meta(_TOKENS, _HEADS, columns, dtype=torch.bfloat16)
        for columns in (key_columns, key_columns, value_columns, value_columns)
    )
    starts, lse = _meta(_REQUESTS + 1, dtype=torch.int32), _meta(_TOKENS, _HEADS, dtype=torch.float32)
    return _variant(
        lambda: prefill(q, k, v, starts, starts, out, lse, sm_scale=key_columns**-0.5, causal=causal),
        "prefill",
        target,
        "bf16",
        rows="BLOCK_M",
        tokens="BLOCK_N",
        bytes_per_token=2.0 * (key_columns + value_columns),
    )


def _merge(target: Target) -> Variant:
    from pagedmla.triton_kernels.merge import merge

    columns = get_layout("bf16").latent
    partial = _meta(_SPLITS, _TOKENS, _HEADS, columns, dtype=torch.float32)
    partial_lse = _meta(_SPLITS, _TOKENS, _HEADS, dtype=torch.float32)
    out, lse = _meta(_TOKENS, _HEADS, columns, dtype=torch.bfloat16), _meta(_TOKENS, _HEADS, dtype=torch.float32)
    return _variant(lambda: merge(partial, partial_lse, out, lse), "merge", target, "", rows=None, tokens=None)


def _variant(
    call: Callable[[], None],
    kernel: str,
    target: Target,
    layout: str,
    *,
    rows: str | None = "ROWS",
    tokens: str | None = "TILE",
    bytes_per_token: float | None = None,
    launch: int = 0,
) -> Variant:
    """Launch number `launch` of `call`. `rows` and `tokens` name the constants that say what a program covers; None:
    one row, and no walk over tokens."""
    assert kernel in KERNELS, f"{kernel} is not among KERNELS, which users choose from"
    launched = record(call, target)[launch]
    types = specialise(launched)
    options = dict(types.options)
    return Variant(
        kernel=kernel,
        layout=layout,
        rows=1 if rows is None else types.constants[rows],
        function=f"{launched.kernel.fn.__module__}:{launched.kernel.fn.__name__}",
        signature=types.signature,
        constants=types.constants,
        divisible_by_16=types.divisible_by_16,
        tokens_per_iteration=None if tokens is None else types.constants[tokens],
        bytes_per_token=bytes_per_token,
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages", 2),
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
