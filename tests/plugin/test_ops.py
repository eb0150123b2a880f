"""The custom ops as torch sees them: opcheck, torch.compile and torch.export, each against the eager call.

Layouts stand on what a graph must carry: no scales (bf16), a pool of scales (fp8_rope_bf16, and fp8_flat by groups that
don't divide the row), e8m0 scales, one scale for the tensor, scales inside the row (fp8_ds_mla) or the page (vLLM's).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import pagedmla
from pagedmla.adapters.vllm import layer_pools, row_bytes
from pagedmla.kv_cache.layouts import CacheLayout, get_layout, per_tensor_scale
from pagedmla.kv_cache.values import KVCacheInputsPerDevice, PagedCacheValues
from pagedmla.plugin import ops

H, P, PAGES, LAYERS, LAYER = 2, 16, 8, 2, 1
STARTS = torch.tensor([0, 5, 8], dtype=torch.int32)
TABLE = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
CONTEXT = torch.tensor([3, 14], dtype=torch.int32)  # the second request crosses into its second page
SLOTS = torch.tensor([19, 20, 21, 22, 23, 62, 63, 64])
CASES = [
    "bf16",
    "fp32",
    "fp8_rope_bf16",
    "fp8_flat",
    "fp8_flat by 128",
    "e8m0",
    "one scale",
    "a layer's scale",
    "fp8_ds_mla",
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()  # torch keeps eight graphs of a function, and then refuses


def make_values(case: str) -> tuple[CacheLayout, KVCacheInputsPerDevice]:
    """A cache of PAGES pages whose tokens are all readable, and a step of 5 + 3 tokens."""
    layout = (
        get_layout("fp8_flat", granularity=128)
        if case == "fp8_flat by 128"
        else get_layout({"e8m0": "fp8_flat", "one scale": "fp8_flat", "a layer's scale": "fp8_flat"}.get(case, case))
    )
    generator = torch.Generator().manual_seed(0)
    latent, rope = (torch.randn(PAGES, 1, LAYERS, P, 1, width, generator=generator) for width in (512, 64))
    made = layout.quantize(latent, rope, scale_dtype=torch.float8_e8m0fnu if case == "e8m0" else None)
    blocks, scales = made.values.contiguous(), made.scales
    if case in ("one scale", "a layer's scale"):
        scales = per_tensor_scale(torch.tensor([0.25, 0.5])[: 1 if case == "one scale" else 2], blocks)
    values = KVCacheInputsPerDevice(blocks, CONTEXT.clone(), TABLE.clone(), 5, 17, None, kv_scales=scales)
    return layout, values


def pools(values: KVCacheInputsPerDevice) -> list[Tensor]:
    """What a step may have changed, as bytes."""
    found = [values.kv_blocks] + ([] if values.kv_scales is None else [values.kv_scales.contiguous()])
    return [pool.view(torch.uint8) for pool in found]


def step_inputs(seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(8, *shape, generator=generator) for shape in ((512,), (64,), (H, 576)))  # type: ignore[return-value]


class Block(torch.nn.Module):
    """A layer's part of a model: store, attend, merge with itself, with ordinary work around each."""

    def __init__(self, layout: CacheLayout | str, layer: int = LAYER) -> None:
        super().__init__()
        self.layout, self.layer = layout, layer

    def forward(
        self, latent: Tensor, rope: Tensor, q: Tensor, values: Any, starts: Tensor, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        where: dict[str, Any] = {"query_start_loc": starts} if slots is None else {"slot_mapping": slots}
        ops.store(latent * 2, rope, values, self.layer, layout=self.layout, **where)
        out, lse = ops.attend(q + 1, values, self.layer, sm_scale=0.1, query_start_loc=starts, layout=self.layout)
        merged, lse = ops.merge_states([out, out], [lse, lse])
        return merged * 1.5, lse


def eagerly(
    layout: CacheLayout, latent: Tensor, rope: Tensor, q: Tensor, values: KVCacheInputsPerDevice, layer: int = LAYER
) -> tuple[Tensor, Tensor]:
    """The same by the public calls."""
    pagedmla.store(latent * 2, rope, values, layer, query_start_loc=STARTS, layout=layout)
    out, lse = pagedmla.attend(q + 1, values, layer, sm_scale=0.1, query_start_loc=STARTS, layout=layout)
    merged, lse = pagedmla.merge_states([out, out], [lse, lse])
    return merged * 1.5, lse


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str) -> None:
    """Schema, mutations, fakes and dispatch, each against what the op really does."""
    layout, values = make_values(case)
    latent, rope, q = step_inputs()
    blocks, scales, fields = ops._flattened(values)
    tail = (*ops._described(layout, LAYER), "auto")
    opcheck(torch.ops.pagedmla.attend.default, (q, blocks, scales, *fields, STARTS, 0.1, True, *tail))
    for places in ((STARTS, None, None), (None, SLOTS, None)):
        opcheck(torch.ops.pagedmla.store.default, (latent, rope, blocks, scales, *fields, *places, False, *tail))


def test_opcheck_of_merge() -> None:
    opcheck(torch.ops.pagedmla.merge.default, (torch.randn(3, 4, H, 8), torch.randn(3, 4, H), "auto"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["compile", "export", "decomposed"])
def test_graphs_compute_and_write_what_eager_calls_do(case: str, way: str) -> None:
    """aot_eager functionalises as every compiler of torch does, and compiles nothing."""
    layout, values = make_values(case)
    _, expected_values = make_values(case)
    latent, rope, q = step_inputs()
    expected = eagerly(layout, latent, rope, q, expected_values)
    block = Block(layout)
    call: Any = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=False)
    if way != "compile":
        exported = torch.export.export(block, (latent, rope, q, values, STARTS))
        call = (exported.run_decompositions({}) if way == "decomposed" else exported).module()
    assert_same(call(latent, rope, q, values, STARTS), expected)
    for got, wanted in zip(pools(values), pools(expected_values), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["fp8_rope_bf16", "fp8_flat", "fp8_ds_mla", "bf16"])
def test_an_engines_pages_go_as_one_tensor(name: str) -> None:
    """Scales in the value pages are a second view of the same bytes, which torch.compile refuses as an argument."""
    layout = get_layout(name)
    width = row_bytes(layout) // layout.value_dtypes[0].itemsize
    dtype = torch.bfloat16 if name == "bf16" else torch.uint8
    sigma = torch.tensor([0.5]) if name == "fp8_flat" else None
    caches = [torch.zeros(PAGES, P, width, dtype=dtype) for _ in range(2)]
    latent, rope, q = step_inputs()
    lengths = torch.zeros(2, dtype=torch.int32)
    found = layer_pools(caches[0], layout, sigma)
    expected_values = KVCacheInputsPerDevice(found.blocks, lengths, TABLE, 5, 5, None, kv_scales=found.scales)
    expected = eagerly(layout, latent, rope, q, expected_values, layer=0)
    flat_scale = None if sigma is None else per_tensor_scale(sigma, found.blocks)
    values = KVCacheInputsPerDevice(caches[1], lengths, TABLE, 5, 5, None, kv_scales=flat_scale)
    call = torch.compile(Block(layout, 0), fullgraph=True, backend="aot_eager", dynamic=False)
    assert_same(call(latent, rope, q, values, STARTS), expected)
    assert torch.equal(*(cache.view(torch.uint8) for cache in caches))


def test_one_graph_serves_other_lengths_and_pages() -> None:
    layout, values = make_values("fp8_rope_bf16")
    latent, rope, q = step_inputs()
    call = torch.compile(Block(layout), fullgraph=True, backend="aot_eager", dynamic=False)
    call(latent, rope, q, values, STARTS)
    values.cache_lengths.copy_(torch.tensor([0, 2], dtype=torch.int32))
    values.lookup_table.copy_(torch.tensor([[6, 7], [5, 1]], dtype=torch.int32))
    _, other = make_values("fp8_rope_bf16")
    other.kv_blocks.copy_(values.kv_blocks)
    other.kv_scales.copy_(values.kv_scales)
    other.cache_lengths.copy_(values.cache_lengths)
    other.lookup_table.copy_(values.lookup_table)
    with torch.compiler.set_stance("fail_on_recompile"):
        got = call(latent, rope, q, values, STARTS)
    assert_same(got, eagerly(layout, latent, rope, q, other))


def test_names_and_bundles_serve_as_in_eager_calls() -> None:
    layout, values = make_values("fp8_rope_bf16")
    bundle = PagedCacheValues.from_upstream([values], ["cpu"])
    _, _, q = step_inputs()
    by_name = ops.attend(q, bundle, LAYER, sm_scale=0.1, query_start_loc=STARTS, layout="fp8_rope_bf16")
    assert_same(by_name, pagedmla.attend(q, values, LAYER, sm_scale=0.1, query_start_loc=STARTS, layout=layout))


def test_errors_are_those_of_the_calls() -> None:
    layout, values = make_values("bf16")
    _, _, q = step_inputs()
    with pytest.raises(ValueError, match=r"q: expected \[\*, \*, 576\] for layout bf16; got \[8, 2, 575\]"):
        ops.attend(q[..., :575], values, LAYER, sm_scale=0.1, query_start_loc=STARTS, layout=layout)
    latent, rope, _ = step_inputs()
    with pytest.raises(ValueError, match="query_start_loc: expected None, since slot_mapping says where tokens go"):
        ops.store(latent, rope, values, LAYER, query_start_loc=STARTS, slot_mapping=SLOTS, layout=layout)
    with pytest.raises(ValueError, match=r"slot_mapping: expected \[T\] int64 beside scales_slot_mapping; got None"):
        ops.store(latent, rope, values, LAYER, scales_slot_mapping=SLOTS, layout=layout)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8], ids=str)
def test_bytes_of_another_meaning_are_refused(dtype: torch.dtype) -> None:
    """Seen as bytes, any 8-bit pool was taken for e4m3, and written."""
    pool = pagedmla.PagePool("fp8_rope_bf16", num_layers=1, page_size=16, num_pages=2)
    pool.allocate("a")
    values = pool.values(["a"], [1]).values
    other = dataclasses.replace(values, kv_blocks=values.kv_blocks.view(dtype))
    with pytest.raises(ValueError, match="kv_blocks: expected float8_e4m3fn, its bytes, or a wider dtype"):
        ops.store(torch.zeros(1, 512), torch.zeros(1, 64), other, 0, layout=pool.layout)


def test_arguments_that_would_be_lost_or_met_late_are_refused() -> None:
    """Scales beside an engine's own cache were ignored; the others failed inside torch, without a name."""
    values = KVCacheInputsPerDevice(
        kv_blocks=torch.zeros(2, 16, 644, dtype=torch.uint8),
        kv_scales=torch.ones(2, 1, 1, 16, 1, 1),
        cache_lengths=torch.zeros(1, dtype=torch.int32),
        lookup_table=torch.zeros(1, 2, dtype=torch.int32),
        max_prompt_length=1,
        max_cache_length=1,
        page_stride=None,
    )
    with pytest.raises(ValueError, match="kv_scales: expected None, since an engine's own cache holds its scales"):
        ops.store(torch.zeros(1, 512), torch.zeros(1, 64), values, 0, layout="fp8_rope_bf16")
    with pytest.raises(TypeError, match="layout: expected a CacheLayout or its name; got None"):
        ops.attend(torch.zeros(1, 1, 576), values, 0, layout=None, sm_scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outs: expected a tensor, or at least one; got none"):
        ops.merge_states([], [])
    for name, field, message in (
        ("kv_blocks", None, "kv_blocks: expected a tensor; got None"),
        ("kv_scales", [1.0], "kv_scales: expected a tensor; got list"),
        ("cache_lengths", [1], r"cache_lengths: expected a tensor or an int; got \[1\]"),
        ("max_cache_length", 1.5, "max_cache_length: expected a tensor or an int; got 1.5"),
    ):
        with pytest.raises(TypeError, match=message):
            ops.attend(
                torch.zeros(1, 1, 576), dataclasses.replace(values, **{name: field}), 0, layout="bf16", sm_scale=1.0
            )


def test_any_integer_is_a_bound() -> None:
    """numpy's passed in an eager call, and met the op's schema in a graph."""
    layout, values = make_values("fp8_rope_bf16")
    _, _, q = step_inputs()
    call: dict[str, Any] = {"query_start_loc": STARTS, "layout": layout, "sm_scale": 0.1}
    bounded = dataclasses.replace(values, max_cache_length=numpy.int64(17))
    assert_same(ops.attend(q, bounded, LAYER, **call), ops.attend(q, values, LAYER, **call))


def test_one_graph_serves_other_bounds() -> None:
    """A bound that grew is a symbol to dynamo, which was asked for its __index__ and broke off."""
    layout, values = make_values("fp8_rope_bf16")
    latent, rope, q = step_inputs()
    call = torch.compile(Block(layout), fullgraph=True, backend="aot_eager")
    for most in (17, 18, 30):
        bounded = dataclasses.replace(values, max_cache_length=most)
        assert_same(call(latent, rope, q, bounded, STARTS), eagerly(layout, latent, rope, q, bounded))


@pytest.mark.parametrize("case", CASES)
def test_a_pool_without_pages_takes_empty_steps(case: str) -> None:
    """One scale for the tensor was looked for in its first page: "index 0 is out of bounds for dimension 0"."""
    layout, values = make_values(case)
    none = dataclasses.replace(
        values, kv_blocks=values.kv_blocks[:0], kv_scales=None if values.kv_scales is None else values.kv_scales[:0]
    )
    empty = dataclasses.replace(none, cache_lengths=CONTEXT[:0], lookup_table=TABLE[:0])
    latent, rope, q = step_inputs()
    for call in (Block(layout), torch.compile(Block(layout), fullgraph=True, backend="aot_eager")):
        out, lse = call(latent[:0], rope[:0], q[:0], empty, STARTS[:1])
        assert (out.shape, lse.shape) == ((0, H, 512), (0, H))
    ops.store(latent, rope, none, LAYER, slot_mapping=torch.full_like(SLOTS, -1), layout=layout)  # padding alone
    with pytest.raises(IndexError, match="lookup_table: row 0, column 0 holds page id 1; kv_blocks has 0 pages"):
        ops.attend(q, none, LAYER, sm_scale=0.1, query_start_loc=STARTS, layout=layout)
    with pytest.warns(pagedmla.DroppedStoreWarning, match="8 of 8 tokens dropped"):
        ops.store(latent, rope, none, LAYER, query_start_loc=STARTS, layout=layout)


def test_the_scale_of_a_pool_without_pages_is_the_one_given() -> None:
    """Read past the pages, so it must be the number itself, of each layer."""
    _, values = make_values("a layer's scale")
    none = dataclasses.replace(values, kv_blocks=values.kv_blocks[:0], kv_scales=values.kv_scales[:0])
    _, _, (sigma, *_) = ops._flattened(none)
    assert sigma.tolist() == [0.25, 0.5]
    _, _, (sigma, *_) = ops._flattened(dataclasses.replace(none, kv_scales=none.kv_scales[:, :, 1:]))
    assert sigma.tolist() == [0.5]
