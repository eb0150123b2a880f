"""`attend`, `store` and `merge_states` as torch custom ops: what torch.compile and torch.export see instead of kernels.

    from pagedmla.plugin import ops                       # registers torch.ops.pagedmla.*

    ops.store(latent, rope, values, layer, layout=...)    # as pagedmla.store
    out, lse = ops.attend(q, values, layer, layout=..., sm_scale=...)

| op          | writes               | gives                                           |
|-------------|----------------------|-------------------------------------------------|
| store       | kv_blocks, kv_scales | nothing                                         |
| attend      | nothing              | out `[T, H, latent]`, lse `[T, H]` float32      |
| merge       | nothing              | out `[T, H, D]`, lse `[T, H]` float32           |

The functions below take the arguments of the public calls and hand the fields of `values` to the op, each a tensor.
torch.compile wants every tensor that an op writes to be one that it can clone and write back, so

* 8-bit pools go as bytes: torch doesn't copy and compare float8 everywhere;
* one scale for a whole pool goes as `[1]` or `[num_layers]`, which no op writes;
* scales that lie in the pages of their values aren't an argument: `values.kv_blocks` is then the engine's own cache,
  `[num_blocks, page_size, row]` as vLLM has it (`adapters.vllm.layer_pools`), and `values.kv_scales` None;
* pools have their own strides: a `page_stride` over a tensor that doesn't reach that far is for eager calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagedmla.adapters.vllm import layer_pools
from pagedmla.kv_cache.checks import describe, dtype_name, expect_int, expect_tensor, quoted, refuse
from pagedmla.kv_cache.layouts import CacheLayout, get_layout, per_tensor_scale
from pagedmla.kv_cache.paged_tensor import is_repeated
from pagedmla.kv_cache.values import KVCacheInputsPerDevice, single_device
from pagedmla.plugin import api
from pagedmla.plugin.executors import AUTO

# What a step reads of KVCacheInputsPerDevice beside its pools, in the order of the ops' schemas.
_FIELDS = {
    "cache_lengths": "Tensor",
    "lookup_table": "Tensor",
    "max_prompt_length": "Tensor",
    "max_cache_length": "Tensor",
    "page_stride": "Tensor?",
    "scales_page_stride": "Tensor?",
    "scales_lookup_table": "Tensor?",
    "attention_dispatch_metadata": "Tensor?",
    "mla_num_partitions": "Tensor?",
    "mixed_step_split": "Tensor?",
}
# `sigma` is one scale for a whole pool, or one a layer.
_CACHE = ", ".join(["Tensor? sigma", *(f"{kind} {name}" for name, kind in _FIELDS.items())])
# The layout, as what a schema can hold: 0 columns where the pool is to say.
_LAYOUT = "int layer, str layout, int latent_columns, int rope_columns, int? granularity, str executor"


def attend(
    q: Tensor,
    values: KVCacheInputsPerDevice,
    layer: int,
    *,
    sm_scale: float,
    query_start_loc: Tensor | None = None,
    causal: bool = True,
    layout: CacheLayout | str,
    executor: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """As `pagedmla.attend` without plan, out and check, one op in a graph. Shapes, dtypes and errors are those of that
    call; arguments of another type meet torch's schema first. PAGEDMLA_CHECK=1 checks here too.
    """
    expect_tensor(q, "q", [None, None, None], (), "It is [T, H, latent + rope].")
    kv_blocks, kv_scales, fields = _flattened(values)
    out, lse = torch.ops.pagedmla.attend(
        q, kv_blocks, kv_scales, *fields, query_start_loc, sm_scale, causal, *_described(layout, layer), executor
    )
    return out, lse


def store(
    latent: Tensor,
    rope: Tensor,
    values: KVCacheInputsPerDevice,
    layer: int,
    *,
    query_start_loc: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    scales_slot_mapping: Tensor | None = None,
    layout: CacheLayout | str,
    executor: str = AUTO,
    power_of_two: bool = False,
) -> None:
    """As `pagedmla.store` without check, one op in a graph. Shapes, dtypes and errors are those of that call; arguments
    of another type meet torch's schema first. PAGEDMLA_CHECK=1 checks here too.
    """
    kv_blocks, kv_scales, fields = _flattened(values)
    places = query_start_loc, slot_mapping, scales_slot_mapping
    torch.ops.pagedmla.store(
        latent, rope, kv_blocks, kv_scales, *fields, *places, power_of_two, *_described(layout, layer), executor
    )


def merge_states(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], *, executor: str = AUTO
) -> tuple[Tensor, Tensor]:
    """As `pagedmla.merge_states`, one op in a graph."""
    out, lse = torch.ops.pagedmla.merge(api.stacked(outs, "outs"), api.stacked(lses, "lses"), executor)
    return out, lse


def _flattened(values: KVCacheInputsPerDevice) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """kv_blocks, kv_scales, then sigma and the other fields, as the ops' schemas have them."""
    given = single_device(values)
    fields = {name: _as_tensor(getattr(given, name), name) for name in _FIELDS}
    scales, sigma = given.kv_scales, None
    if isinstance(scales, Tensor) and scales.dim() == 6 and is_repeated(scales, scales.stride(0)):
        layers = 1 if scales.stride(2) == 0 else scales.shape[2]
        if scales.shape[0]:
            sigma = scales[0, 0, :layers, 0, 0, 0]
        else:  # no page to find it in, but it is there: `per_tensor_scale` of a pool without pages
            sigma = scales.as_strided((layers,), (scales.stride(2),))
        scales = fields["scales_page_stride"] = None
    return (
        _bytes(given.kv_blocks, "kv_blocks", torch.float8_e4m3fn),
        None if scales is None else _bytes(scales, "kv_scales", torch.float8_e8m0fnu),
        (sigma, *fields.values()),
    )


def _as_tensor(field: Any, name: str) -> Tensor | None:
    """Ints become `[1]` int64 on the host."""
    if field is None or isinstance(field, Tensor):
        return field
    return torch.tensor([expect_int(field, name, "a tensor or an int")], dtype=torch.int64)


def _bytes(pool: Any, name: str, eight_bits: torch.dtype) -> Tensor:
    if not isinstance(pool, Tensor):
        refuse(name, "a tensor", describe(pool), error=TypeError)
    if pool.element_size() > 1:
        return pool
    if pool.dtype not in (eight_bits, torch.uint8):  # bytes don't tell any more what they were
        refuse(name, f"{dtype_name(eight_bits)}, its bytes, or a wider dtype", pool)
    return pool.view(torch.uint8)


def _described(layout: CacheLayout | str, layer: int) -> tuple[int, str, int, int, int | None]:
    if isinstance(layout, str):
        return layer, layout, 0, 0, None
    if not isinstance(layout, CacheLayout):
        refuse("layout", "a CacheLayout or its name", quoted(layout), error=TypeError)
    return layer, layout.name, layout.latent, layout.rope, getattr(layout, "granularity", None)


def _bound(
    kv_blocks: Tensor, kv_scales: Tensor | None, fields: Sequence[Tensor | None], layout: Sequence[Any]
) -> tuple[KVCacheInputsPerDevice, CacheLayout | str]:
    """The values and the layout that an op was given in parts."""
    sigma, *rest = fields
    name, latent, rope, granularity = layout
    made = get_layout(name, latent=latent, rope=rope, granularity=granularity) if latent else name
    if kv_blocks.dim() == 3:
        if kv_scales is not None:
            refuse("kv_scales", "None, since an engine's own cache holds its scales", kv_scales)
        pools = layer_pools(kv_blocks, get_layout(name) if isinstance(made, str) else made, sigma)
        kv_blocks, kv_scales = pools.blocks, pools.scales
    elif sigma is not None:
        kv_scales = per_tensor_scale(sigma, kv_blocks)
    elif kv_scales is not None and kv_scales.dtype == torch.uint8:
        kv_scales = kv_scales.view(torch.float8_e8m0fnu)
    given: dict[str, Any] = dict(zip(_FIELDS, rest))
    return KVCacheInputsPerDevice(kv_blocks=kv_blocks, kv_scales=kv_scales, **given), made


@torch.library.custom_op(
    "pagedmla::attend",
    mutates_args=(),
    schema=f"(Tensor q, Tensor kv_blocks, Tensor? kv_scales, {_CACHE}, Tensor? query_start_loc, float sm_scale, "
    f"bool causal, {_LAYOUT}) -> (Tensor, Tensor)",
)
def _attend(q, kv_blocks, kv_scales, *rest):  # type: ignore[no-untyped-def]
    *fields, query_start_loc, sm_scale, causal, layer, name, latent, rope, granularity, executor = rest
    values, layout = _bound(kv_blocks, kv_scales, fields, (name, latent, rope, granularity))
    return api.attend(
        q,
        values,
        layer,
        sm_scale=sm_scale,
        query_start_loc=query_start_loc,
        causal=causal,
        layout=layout,
        executor=executor,
    )


@_attend.register_fake
def _(q, kv_blocks, kv_scales, *rest):  # type: ignore[no-untyped-def]
    rope_columns = rest[-3] or 64
    out = q.new_empty(*q.shape[:2], q.shape[2] - rope_columns)
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op(
    "pagedmla::store",
    mutates_args=("kv_blocks", "kv_scales"),
    schema=f"(Tensor latent, Tensor rope, Tensor(a!) kv_blocks, Tensor(b!)? kv_scales, {_CACHE}, "
    f"Tensor? query_start_loc, Tensor? slot_mapping, Tensor? scales_slot_mapping, bool power_of_two, {_LAYOUT}) -> ()",
)
def _store(latent, rope, kv_blocks, kv_scales, *rest):  # type: ignore[no-untyped-def]
    *fields, starts, slots, scale_slots, power_of_two, layer, name, columns, rope_columns, granularity, executor = rest
    values, layout = _bound(kv_blocks, kv_scales, fields, (name, columns, rope_columns, granularity))
    api.store(
        latent,
        rope,
        values,
        layer,
        query_start_loc=starts,
        slot_mapping=slots,
        scales_slot_mapping=scale_slots,
        layout=layout,
        executor=executor,
        power_of_two=power_of_two,
    )


@_store.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op(
    "pagedmla::merge", mutates_args=(), schema="(Tensor outs, Tensor lses, str executor) -> (Tensor, Tensor)"
)
def _merge(outs, lses, executor):  # type: ignore[no-untyped-def]
    out, lse = api.merge_states(outs, lses, executor=executor)
    return out.contiguous(), lse.contiguous()


@_merge.register_fake
def _(outs, lses, executor):  # type: ignore[no-untyped-def]
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:], dtype=torch.float32)  # contiguous
