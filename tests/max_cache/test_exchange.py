"""Caches of the real MAX, exchanged both ways, byte for byte, on a CPU.

Prompts of 300, 5 and 128 tokens in pages of 128: several pages, part of one, exactly one, and the decode step after it
opens a new page. The legacy manager's tables end in the page past the last and its scales share the values' ids; the
pooled one's end in page 0, and values and scales lie in one arena under ids of their own.
"""

from __future__ import annotations

import gc
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from theirs import (
    LAYERS,
    MANAGERS,
    PAGE_SIZE,
    ROW,
    Operations,
    devices_of,
    mla_params,
    new_requests,
    next_step,
    step_of,
)
from torch import Tensor

import pagedmla
from pagedmla import DroppedStoreWarning, FlattenOrder, KVCacheInputsPerDevice, PagePool
from pagedmla.adapters.max import (
    cache_from_max,
    layout_of,
    layout_of_params,
    values_from_flat,
    values_from_max,
    with_decode_scales,
    with_unit_scale,
)
from pagedmla.adapters.to_max import cache_to_max, decode_arguments, values_to_flat, values_to_max
from pagedmla.kv_cache.layouts import CacheLayout, per_tensor_scale

PROMPTS = [300, 5, 128]
PRESCALED = pagedmla.get_layout("fp8_rope_bf16_prescaled")
NAMES = [field.name for field in fields(KVCacheInputsPerDevice)]


@pytest.fixture(params=MANAGERS)
def manager(request: pytest.FixtureRequest) -> Any:
    return MANAGERS[request.param](mla_params())


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def some_tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 512, generator=generator), torch.randn(count, 64, generator=generator)


def store(values: KVCacheInputsPerDevice, lengths: list[int], layout: CacheLayout = PRESCALED, seed: int = 0) -> Any:
    """Store a step by pagedmla in layer 1, and say what its rows are."""
    latent, rope = some_tokens(sum(lengths), seed)
    pagedmla.store(latent, rope, values, 1, query_start_loc=starts_of(lengths), layout=layout)
    return layout.quantize(latent, rope)


def rows_and_scales(values: KVCacheInputsPerDevice, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The first `lengths[b]` rows of each request as bytes `[T, 640]`, and their sigma `[T]`, read by pagedmla."""
    cache = values.collection(ROW).get_key_cache(1)
    bs = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tok = torch.cat([torch.arange(length) for length in lengths])
    rows = cache.load_quantized(bs[:, None], 0, tok[:, None], torch.arange(ROW))
    return rows.view(torch.uint8), cache.load_scale(bs, 0, tok, 0)


def arena_of(values: KVCacheInputsPerDevice) -> list[Tensor]:
    """All bytes of both pools, once where they share them."""
    pools = {pool.data_ptr(): pool for pool in (values.kv_scales, values.kv_blocks)}  # the values' is the longer
    return [pool.contiguous().view(torch.uint8).flatten() for pool in pools.values()]


def address(value: Any) -> int:
    return int(value._data_ptr())


# -- fields


def expect_same(theirs: Any, ours: KVCacheInputsPerDevice) -> None:
    for name in NAMES:
        buffer, tensor = getattr(theirs, name, None), getattr(ours, name)
        assert (buffer is None) == (tensor is None), name
        if buffer is not None:
            assert tensor.data_ptr() == address(buffer), name
            assert str(tensor.dtype) == f"torch.{buffer.dtype.name}"
            assert tuple(tensor.shape) == tuple(buffer.shape), name


def test_every_field_there_and_back_in_the_same_memory(manager: Any) -> None:
    requests = new_requests(manager, PROMPTS)
    for theirs in (step_of(manager, requests), next_step(manager, requests)):
        ours = values_from_max(theirs)
        expect_same(theirs, ours)
        back = values_to_max(ours, PRESCALED)
        assert type(back) is type(theirs)
        expect_same(back, ours)
        for name in vars(theirs):
            if getattr(theirs, name) is not None:
                assert address(getattr(back, name)) == address(getattr(theirs, name)), name
    assert ours.cache_lengths.tolist() == PROMPTS


@pytest.mark.parametrize("kind", MANAGERS)
def test_the_two_conventions_of_unused_columns(kind: str) -> None:
    """Page 0 is a request's own in one manager, and none in the other; scales' ids may lie past the value pool."""
    manager = MANAGERS[kind](mla_params())
    theirs = step_of(manager, new_requests(manager, PROMPTS))
    ours = values_from_max(theirs)
    unused, first = (12, 0) if kind == "legacy" else (0, 1)
    assert ours.lookup_table[:, 3:].unique().tolist() == [unused]
    assert ours.lookup_table[0, :3].tolist() == [first, first + 1, first + 2]
    shared = torch.equal(ours.lookup_table.int(), ours.scales_lookup_table.int())
    assert shared == (kind == "legacy")
    if not shared:
        assert int(ours.scales_lookup_table[0].int().max()) >= ours.kv_blocks.shape[0]
        assert ours.kv_blocks.data_ptr() == ours.kv_scales.data_ptr()  # one arena


def test_bounds_that_a_captured_graph_raises(manager: Any) -> None:
    """MAX raises the lengths' bounds to those of the captured graph, and leaves tables and lengths as they are."""
    from max.nn.kv_cache import BatchCharacteristics

    requests = new_requests(manager, PROMPTS)
    bounds = BatchCharacteristics(batch_size=4, max_prompt_length=300, max_cache_valid_length=5000)
    theirs = step_of(manager, requests, batch_characteristics=bounds)
    ours = values_from_max(theirs)
    assert (int(ours.max_cache_length), ours.lookup_table.shape[1]) == (5000, 24)
    store(ours, PROMPTS)
    q, starts = torch.randn(433, 2, 576), starts_of(PROMPTS)
    out, _ = pagedmla.attend(q, ours, 1, sm_scale=0.1, query_start_loc=starts, layout=PRESCALED)
    assert bool(out.isfinite().all())
    assert address(values_to_max(ours, PRESCALED).lookup_table) == address(theirs.lookup_table)


def test_speculative_metadata_is_kept(manager: Any) -> None:
    """MAX's own bundling for several devices drops both of the draft's fields: ours keeps them."""
    manager = MANAGERS["pooled"](mla_params(speculative_method="eagle", num_draft_tokens=3))
    cache = cache_from_max(manager.runtime_inputs([new_requests(manager, PROMPTS)]))
    assert cache.draft_attention_dispatch_metadata[0].shape == (3,)
    assert cache.per_device(0).for_draft().mla_num_partitions.tolist() == [1]
    (back,) = cache_to_max(cache, PRESCALED)
    assert back.draft_mla_num_partitions.to_numpy().tolist() == [1]


def test_two_replicas_are_two_devices() -> None:
    from max.graph import DeviceRef

    manager = MANAGERS["pooled"](mla_params(devices=[DeviceRef.CPU()] * 2, data_parallel_degree=2))
    batches = [new_requests(manager, [300]), new_requests(manager, [130, 7], replica=1)]
    step = manager.runtime_inputs(batches)
    cache, theirs = cache_from_max(step), devices_of(step)
    assert cache.n_devices == 2
    for index, back in enumerate(cache_to_max(cache, PRESCALED)):
        expect_same(theirs[index], cache.per_device(index))
        assert address(back.kv_blocks) == address(theirs[index].kv_blocks)


def test_eager_tensors_and_graph_values(manager: Any) -> None:
    from max.experimental.tensor import Tensor as EagerTensor

    theirs = step_of(manager, new_requests(manager, PROMPTS))
    eager = {name: EagerTensor(storage=value) for name, value in vars(theirs).items() if value is not None}
    ours = values_from_max(type(theirs)(**eager))
    assert ours.kv_blocks.data_ptr() == address(theirs.kv_blocks)
    symbolic = devices_of(manager.params.get_symbolic_inputs())
    with pytest.raises(
        TypeError, match=r"expected a driver Buffer or .*; got \w+Type\. A graph's values have no memory"
    ):
        values_from_max(symbolic[0])


def test_the_memory_outlives_its_manager() -> None:
    manager = MANAGERS["pooled"](mla_params())
    ours = values_from_max(step_of(manager, new_requests(manager, PROMPTS)))
    expected = store(ours, PROMPTS)
    del manager
    gc.collect()
    others = [torch.full((1 << 20,), 0xAA, dtype=torch.uint8) for _ in range(8)]
    rows, sigma = rows_and_scales(ours, PROMPTS)
    assert torch.equal(rows, expected.values.view(torch.uint8))
    assert torch.equal(sigma, expected.scales[:, 0])
    assert len(others) == 8


# -- stored by one, read by the other


def test_max_stores_and_we_read(manager: Any, operations: Operations) -> None:
    """And the next token the other way round, into the same pages: prefill by MAX, decode by us."""
    requests = new_requests(manager, PROMPTS)
    theirs = step_of(manager, requests)
    latent, rope = some_tokens(sum(PROMPTS))
    made = PRESCALED.quantize(latent, rope)
    operations.store(theirs, 1, made.values.view(torch.uint8), made.scales[:, 0], PROMPTS)
    ours = values_from_max(theirs)
    rows, sigma = rows_and_scales(ours, PROMPTS)
    assert torch.equal(rows, made.values.view(torch.uint8))
    assert torch.equal(sigma, made.scales[:, 0])

    decode = next_step(manager, requests)
    added = store(values_from_max(decode), [1, 1, 1], seed=1).values.view(torch.uint8)
    every = operations.gather(decode, 1, [length + 1 for length in PROMPTS])
    last = torch.tensor([length + 1 for length in PROMPTS]).cumsum(0) - 1
    assert torch.equal(every[last], added)
    kept = torch.ones(len(every), dtype=torch.bool).index_fill(0, last, False)
    assert torch.equal(every[kept], rows)


def test_we_store_and_max_reads(manager: Any, operations: Operations) -> None:
    """Nothing but the rows and scales of layer 1 changes, though values and scales may lie in one arena."""
    theirs = step_of(manager, new_requests(manager, PROMPTS))
    ours = values_from_max(theirs)
    for bytes_ in arena_of(ours):
        bytes_.fill_(0xFF)
    before = [bytes_.clone() for bytes_ in arena_of(ours)]
    made = store(ours, PROMPTS)
    read = operations.gather(theirs, 1, PROMPTS)
    assert torch.equal(read, made.values.view(torch.uint8))
    scales = torch.from_dlpack(theirs.kv_scales)
    table = torch.from_dlpack(theirs.scales_lookup_table).int()
    for request, (first, length) in enumerate(zip(starts_of(PROMPTS).tolist(), PROMPTS)):
        for token in range(length):
            page = int(table[request, token // PAGE_SIZE])
            assert scales[page, 0, 1, token % PAGE_SIZE, 0, 0] == made.scales[first + token, 0]
    changed = sum(int((after != was).sum()) for after, was in zip(arena_of(ours), before))
    written = torch.cat([made.values.view(torch.uint8).flatten(), made.scales.view(torch.uint8).flatten()])
    assert changed == int((written != 0xFF).sum())


def test_inspection_finds_nothing(manager: Any) -> None:
    """What MAX's managers leave unused is NaN here: no report may come of it."""
    requests = new_requests(manager, PROMPTS)
    ours = values_from_max(step_of(manager, requests))
    for bytes_ in arena_of(ours):
        bytes_.fill_(0xFF)
    for layer in range(LAYERS):
        pagedmla.store(*some_tokens(433), ours, layer, query_start_loc=starts_of(PROMPTS), layout=PRESCALED)
    report = pagedmla.inspect(values_from_max(next_step(manager, requests)), layout=PRESCALED)
    assert report.ok, report.findings


@pytest.mark.usefixtures("page_strides")
@pytest.mark.parametrize("ours_first", [True, False], ids=["we store", "max stores"])
def test_padded_pages(operations: Operations, ours_first: bool) -> None:
    """MAX binds a padded pool as a tensor that ends before its last page, with the distance of pages beside it.

    Its pooled manager makes no such pool yet; the views are those that its parameters make of a slab.
    """
    from max.driver import CPU, Buffer
    from max.dtype import DType

    params = mla_params()
    manager = MANAGERS["pooled"](params)
    theirs = step_of(manager, new_requests(manager, PROMPTS))
    (values_id, page), (scales_id, scales_page) = (
        (name, leaf.bytes_per_page) for name, leaf in sorted(params.leaves().items())
    )
    padded = {values_id: page + 3 * ROW, scales_id: scales_page + 64}
    slabs = [Buffer.zeros((math.lcm(*padded.values()),), DType.uint8, CPU()) for _ in padded]
    views = [params.slab_to_buffer_views([slab], padded) for slab in slabs]
    theirs = replace(
        theirs,
        kv_blocks=views[0].values_packed[0],
        page_stride=Buffer.from_dlpack(torch.tensor([padded[values_id]])),
        kv_scales=views[1].scales_packed[0],
        scales_page_stride=Buffer.from_dlpack(torch.tensor([padded[scales_id] // 4])),
    )
    ours = values_from_max(theirs)
    assert ours.kv_blocks.stride(0) == page + 3 * ROW
    assert ours.kv_scales.stride(0) == scales_page // 4 + 16
    latent, rope = some_tokens(433)
    made = PRESCALED.quantize(latent, rope)
    rows = made.values.view(torch.uint8)
    if ours_first:
        store(ours, PROMPTS)
        assert torch.equal(operations.gather(theirs, 1, PROMPTS), rows)
    else:
        operations.store(theirs, 1, rows, made.scales[:, 0], PROMPTS)
    found, sigma = rows_and_scales(ours, PROMPTS)
    assert torch.equal(found, rows)
    assert torch.equal(sigma, made.scales[:, 0])
    slab = torch.from_dlpack(slabs[0]).view(-1, page + 3 * ROW)
    assert not bool(slab[:, page:].any())  # the padding is as it was
    back = values_to_max(ours, PRESCALED)
    for name in ("kv_blocks", "kv_scales", "page_stride", "scales_page_stride"):
        assert address(getattr(back, name)) == address(getattr(theirs, name)), name
        assert tuple(getattr(back, name).shape) == tuple(getattr(theirs, name).shape)


def test_max_reads_a_pool_of_ours(operations: Operations) -> None:
    pool = PagePool(PRESCALED, num_layers=LAYERS, page_size=PAGE_SIZE, num_pages=9, num_scale_pages=14, shuffle_seed=1)
    for name in "abc":
        pool.allocate(name)
    dispatch = {"attention_dispatch_metadata": torch.tensor([3, 300, 1]), "mla_num_partitions": 1}
    ours = replace(pool.values("abc", PROMPTS).values, **dispatch)  # MAX's graphs of MLA take both
    made = store(ours, PROMPTS)
    theirs = values_to_max(ours, PRESCALED)
    assert torch.equal(operations.gather(theirs, 1, PROMPTS), made.values.view(torch.uint8))
    other = PRESCALED.quantize(*some_tokens(433, seed=2))
    operations.store(theirs, 1, other.values.view(torch.uint8), other.scales[:, 0], PROMPTS)
    rows, sigma = rows_and_scales(ours, PROMPTS)
    assert torch.equal(rows, other.values.view(torch.uint8))
    assert torch.equal(sigma, other.scales[:, 0])


# -- orders


def test_the_three_orders(manager: Any) -> None:
    """Graph inputs, a kernel's operands, and iteration, which knows no page strides and no scales' table."""
    theirs = step_of(manager, new_requests(manager, PROMPTS))
    flat = {FlattenOrder.OPERAND: theirs.flatten_without_attention_dispatch_metadata()}
    if hasattr(theirs, "flatten"):
        flat[FlattenOrder.DECLARATION] = theirs.flatten()
    else:
        from max import tree

        flat[FlattenOrder.DECLARATION] = tree.leaves(theirs)
    ours = values_from_max(theirs)
    for order, leaves in flat.items():
        assert [leaf.data_ptr() for leaf in ours.flatten(order)[0]] == [address(leaf) for leaf in leaves]
        assert [address(leaf) for leaf in values_to_flat(ours, PRESCALED, order)] == [address(leaf) for leaf in leaves]
        present = ours.flatten(order)[1].present
        again = values_from_flat(leaves, order, None if "page_stride" in vars(theirs) else present)
        assert again.flatten(order)[1].present == present
        assert all(getattr(again, name).data_ptr() == getattr(ours, name).data_ptr() for name in present)


@pytest.mark.usefixtures("page_strides")
def test_the_order_of_maxs_distributed_values(manager: Any) -> None:
    from max.experimental.nn.common_layers.kv_cache import PagedCacheValues
    from max.experimental.tensor import Tensor as EagerTensor

    theirs = step_of(manager, new_requests(manager, PROMPTS))
    given = {name: EagerTensor(storage=value) for name, value in vars(theirs).items() if value is not None}
    distributed = PagedCacheValues(**given)
    cache = cache_from_max(distributed)
    assert cache.n_devices == distributed.n_devices == 1
    iterated = [address(tensor.storage) for tensor in distributed]
    assert [leaf.data_ptr() for leaf in cache.per_device(0)] == iterated
    assert [
        address(leaf) for leaf in values_to_flat(values_from_max(theirs), PRESCALED, FlattenOrder.ITERATION)
    ] == iterated


# -- layouts, and what MAX would get wrong


@pytest.mark.parametrize(("dtype", "row", "granularity", "name"), [
    ("bfloat16", 576, None, "bf16"),
    ("float32", 576, None, "fp32"),
    ("float8_e4m3fn", 576, None, "fp8_flat"),
    ("float8_e4m3fn", 576, 576, "fp8_flat"),
    ("float8_e4m3fn", 576, 64, "fp8_flat"),
    ("float8_e4m3fn", 640, 640, "fp8_rope_bf16_prescaled"),
    ("float8_e4m3fn", 640, None, "fp8_rope_bf16_prescaled"),
])  # fmt: skip
def test_layouts_of_real_params(dtype: str, row: int, granularity: int | None, name: str) -> None:
    params = mla_params(dtype, row, granularity)
    manager = MANAGERS["pooled"](params)
    ours = values_from_max(step_of(manager, new_requests(manager, PROMPTS)))
    layout = layout_of_params(params)
    assert layout.name == name
    assert layout_of(ours) == layout
    complete = with_unit_scale(ours) if ours.kv_scales is None and name == "fp8_flat" else ours
    if granularity is not None or name != "fp8_rope_bf16_prescaled":  # the other's scales come beside the cache
        store(complete, PROMPTS, layout)
        values_to_max(ours, layout)


@pytest.mark.usefixtures("page_strides")
def test_pages_of_fewer_slots_than_tokens() -> None:
    with pytest.raises(ValueError, match=r"params\.slots_per_page: expected 128; got 32"):
        layout_of_params(mla_params(slots_per_page=32))


def test_several_scales_a_token() -> None:
    """MAX's own store writes all scales of a token to the first: it takes their column for that of an element."""
    layout = pagedmla.get_layout("fp8_flat", granularity=64)
    manager = MANAGERS["pooled"](mla_params(row=576, granularity=64))
    theirs = step_of(manager, new_requests(manager, PROMPTS))
    made = store(values_from_max(theirs), PROMPTS, layout)
    scales, page = torch.from_dlpack(theirs.kv_scales), int(theirs.scales_lookup_table.to_numpy()[1, 0])
    assert torch.equal(scales[page, 0, 1, :5, 0], made.scales[300:305])


def test_a_store_past_the_pool_is_dropped(manager: Any) -> None:
    """MAX writes such a row past the end of its pool, into whatever lies there, unless it was built with assertions."""
    theirs = step_of(manager, new_requests(manager, PROMPTS))
    ours = values_from_max(theirs)
    table = ours.lookup_table.view(torch.int32)
    table[1, 0] = ours.kv_blocks.shape[0]
    with pytest.warns(DroppedStoreWarning):
        store(ours, PROMPTS)
    rows, _ = rows_and_scales(ours, [300])
    latent, rope = some_tokens(433)
    assert torch.equal(rows, PRESCALED.quantize(latent, rope).values[:300].view(torch.uint8))


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def page_of(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(("layout", "changes", "sentence"), [
    ("fp8_rope_bf16", {}, r"layout: expected one that MAX reads .*; got fp8_rope_bf16\. .*convert_rows"),
    ("fp8_ds_mla", {}, r"layout: expected one that MAX reads .*; got fp8_ds_mla"),
    (PRESCALED, {"lookup_table": int32(*range(20)).view(1, 20)}, "lookup_table: expected at least 24 columns, and a"),
    (PRESCALED, {"lookup_table": int32(*range(28)).view(1, 28)}, "lookup_table: expected at least 24 columns, and a"),
    (PRESCALED, {"cache_lengths": int32(130)}, "lookup_table: expected at least 32 columns"),
    (PRESCALED, {"cache_lengths": int32(-1)}, r"cache_lengths: expected lengths of at least 0, .*; got \[-1\]"),
    (PRESCALED, {"scales_lookup_table": int32(*range(24)).view(24, 1).T.expand(1, 24).flip(1)[:, ::2]},
     "scales_lookup_table: expected at least 24 columns"),
    (PRESCALED, {"lookup_table": int32(*range(48)).view(1, 48)[:, ::2]}, "lookup_table: expected a contiguous tensor"),
    (PRESCALED, {"kv_blocks": page_of(9, 1, 1, 16, 1, 1280)[..., :640]}, "kv_blocks: expected pages packed within"),
    (PRESCALED, {"kv_blocks": page_of(9, 16 * 644)[:, : 16 * 640].unflatten(1, (1, 1, 16, 1, 640))},
     "page_stride: expected a whole number of rows of 640 elements; got 10304"),
])  # fmt: skip
def test_what_max_would_misread(layout: CacheLayout | str, changes: dict[str, Tensor], sentence: str) -> None:
    """The last is a page of two planes, as vLLM has them: rows, then scales. 644 bytes a token are no whole rows."""
    pool = PagePool(layout, num_layers=1, page_size=16, num_pages=9)
    pool.allocate("a")
    values = pool.values(["a"], [40]).values
    with pytest.raises(ValueError, match=sentence):
        values_to_max(replace(values, **changes), layout)


@pytest.mark.parametrize(("given", "error", "sentence"), [
    ([1, 1, 1], TypeError, r"expected a tensor \[3\] int64; got list"),
    ("1 1 1", TypeError, r"expected a tensor \[3\] int64; got str"),
    (torch.ones(6, dtype=torch.int64)[::2], ValueError, r"expected a contiguous tensor, .*; got strides \(2,\)"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["attention_dispatch_metadata", "draft_attention_dispatch_metadata"])
def test_dispatch_metadata_that_max_cant_bind(name: str, given: Any, error: type[Exception], sentence: str) -> None:
    """AttributeErrors of lists and strings, and MAX's own words about strides, named no field."""
    pool = PagePool(PRESCALED, num_layers=1, page_size=16, num_pages=9)
    pool.allocate("a")
    values = replace(pool.values(["a"], [40]).values, **{name: given})
    with pytest.raises(error, match=f"^{name}: {sentence}"):
        values_to_max(values, PRESCALED)


def test_orders_by_their_names(manager: Any) -> None:
    values = values_from_max(step_of(manager, new_requests(manager, PROMPTS)))
    by_name, by_order = (values_to_flat(values, PRESCALED, each) for each in ("operand", FlattenOrder.OPERAND))
    assert list(map(address, by_name[:4])) == list(map(address, by_order[:4]))
    with pytest.raises(ValueError, match="order: expected 'declaration' or 'operand' or 'iteration'; got 'OPERAND'"):
        values_to_flat(values, PRESCALED, "OPERAND")


@pytest.mark.usefixtures("page_strides")
def test_a_page_stride_past_all_addresses() -> None:
    """The size of such a pool overflowed in torch, which ended the process."""
    from max.driver import Buffer

    manager = MANAGERS["legacy"](mla_params())
    theirs = step_of(manager, new_requests(manager, PROMPTS))
    for field in ("page_stride", "scales_page_stride"):
        beyond = replace(theirs, **{field: Buffer.from_dlpack(torch.tensor([2**62]))})
        with pytest.raises(ValueError, match=f"^{field}: expected at most "):
            values_from_max(beyond)


@pytest.mark.usefixtures("page_strides")
def test_the_example_of_the_page(manager: Any) -> None:
    """docs/max.md, as it stands; 26.6 wraps what runtime_inputs returns."""
    page = (Path(__file__).parents[2] / "docs" / "max.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    latent, rope = some_tokens(sum(PROMPTS))
    names = {"manager": manager, "requests": new_requests(manager, PROMPTS), "latent": latent, "rope": rope,
             "layer": 1, "starts": starts_of(PROMPTS), "pagedmla": pagedmla}  # fmt: skip
    exec(example, names)
    rows, _ = rows_and_scales(names["values"], PROMPTS)
    assert torch.equal(rows, PRESCALED.quantize(latent, rope).values.view(torch.uint8))
    assert address(names["back"].kv_blocks) == address(names["inputs"][0].kv_blocks)


def test_one_scale_for_all_pages_isnt_maxs() -> None:
    pool = PagePool("fp8_flat", num_layers=1, page_size=16, num_pages=9, sigma=torch.ones(1))
    pool.allocate("a")
    values = pool.values(["a"], [40]).values
    with pytest.raises(
        ValueError, match=r"kv_scales: expected pages packed within.* where it is 1, leave kv_scales away"
    ):
        values_to_max(values, "fp8_flat")
    unscaled = {"kv_scales": None, "scales_page_stride": None, "scales_lookup_table": None}
    theirs = values_to_max(replace(values, **unscaled), "fp8_flat")
    assert theirs.kv_scales is None
    assert per_tensor_scale(torch.ones(1), values.kv_blocks).shape == values.kv_scales.shape


def test_arguments_of_the_scaled_decode() -> None:
    """MAX takes the scales beside the cache and finds them through the values' table: ids of their own are refused."""
    pool = PagePool(PRESCALED, num_layers=1, page_size=16, num_pages=9)
    pool.allocate("a")
    values = pool.values(["a"], [40]).values
    theirs, scales = decode_arguments(replace(values, scales_lookup_table=None))
    assert theirs.kv_scales is None
    assert address(scales) == values.kv_scales.data_ptr()
    ours = with_decode_scales(values_from_max(theirs), scales, 0)
    assert ours.kv_scales.data_ptr() == values.kv_scales.data_ptr()
    apart = PagePool(PRESCALED, num_layers=1, page_size=16, num_pages=9, num_scale_pages=14)
    apart.allocate("a")
    with pytest.raises(
        ValueError, match="scales_lookup_table: expected None or lookup_table, which MAX's scaled decode"
    ):
        decode_arguments(apart.values(["a"], [40]).values)
