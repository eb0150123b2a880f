"""Our cache against what MAX answered when it was run (tests/cases/max_golden/README.md), bit for bit.

The grid is MAX's: MLA and MHA, shared and distinct tables, one to five scales a row with a ragged last group, padded
pages, bf16 values with scales, and e8m0 scales, which MAX can address but not load.
"""

from __future__ import annotations

import pytest
import torch
from cases import golden
from cases.golden import ADDRESSING_CASES, AddressingCase

import pagedmla
from pagedmla import FlattenOrder, KVCacheInputsPerDevice, PagedCacheValues, PagedKVCache, PagedKVCacheCollection
from pagedmla.kv_cache.paged_tensor import PagedTensor, raw_view
from pagedmla.reference.attention import prefill

VIEWS = [pytest.param(case, kv, layer, id=f"{case.name}-kv{kv}-l{layer}") for case in ADDRESSING_CASES
         for kv, layer in case.views]  # fmt: skip


def view_of(collection: PagedKVCacheCollection, kv: int, layer: int) -> PagedKVCache:
    return collection.get_value_cache(layer) if kv else collection.get_key_cache(layer)


def offsets_of(pool: PagedTensor, kv: int, layer: int, pages: torch.Tensor, case: AddressingCase, group: int):
    """Element address of every element, by the pool's own address function."""
    _, head, tok, dim = case.element_indices()
    return pool.offsets(pages, kv, layer, tok % pool.page_size, head, dim // group)


def test_the_goldens_are_all_here() -> None:
    assert len(ADDRESSING_CASES) == 8
    assert len(VIEWS) == 16


@pytest.mark.parametrize(("case", "kv", "layer"), VIEWS)
def test_addresses(case: AddressingCase, kv: int, layer: int) -> None:
    collection = case.collection()
    assert collection.scale_pool is not None
    bs, _, tok, _ = case.element_indices()
    column = tok // collection.page_size
    values = collection.lookup_table.to(torch.int64)[bs, column]
    scales = collection.scales_lookup_table.to(torch.int64)[bs, column]
    suffix = f"_kv{kv}_l{layer}"
    mine = offsets_of(collection.value_pool, kv, layer, values, case, group=1)
    assert torch.equal(mine, case.elements("elem_offset" + suffix))
    mine = offsets_of(collection.scale_pool, kv, layer, scales, case, group=case.meta["granularity"])
    assert torch.equal(mine, case.elements("scale_offset" + suffix))


@pytest.mark.parametrize(("case", "kv", "layer"), VIEWS)
def test_rows(case: AddressingCase, kv: int, layer: int) -> None:
    cache = view_of(case.collection(), kv, layer)
    tokens = case.meta["max_pages"] * case.meta["page_size"]
    bs, tok = torch.arange(case.meta["B"]).unsqueeze(1), torch.arange(tokens)
    suffix = f"_kv{kv}_l{layer}"
    assert torch.equal(cache.row_idx(bs, tok).flatten(), case["row_idx" + suffix].to(torch.int64))
    assert torch.equal(cache.scale_row_idx(bs, tok).flatten(), case["scale_row_idx" + suffix].to(torch.int64))
    assert [cache.num_kv_rows, cache.num_scale_rows] == case["num_kv_rows" + suffix].tolist()


@pytest.mark.parametrize("table_dtype", [torch.uint32, torch.int32], ids=["uint32", "int32"])
@pytest.mark.parametrize(("case", "kv", "layer"), VIEWS)
def test_stored_bits(case: AddressingCase, kv: int, layer: int, table_dtype: torch.dtype) -> None:
    cache, at = view_of(case.collection(table_dtype), kv, layer), case.element_indices()
    suffix = f"_kv{kv}_l{layer}"
    assert torch.equal(bits(cache.load_quantized(*at)), same_width(case.elements("load_quantized" + suffix)))
    assert torch.equal(bits(cache.load_scale(*at)), same_width(case.elements("load_scale" + suffix)))


@pytest.mark.parametrize(("array", "dtype"), [("load_f32", torch.float32), ("load_bf16", torch.bfloat16)])
@pytest.mark.parametrize(("case", "kv", "layer"), VIEWS)
def test_loads(case: AddressingCase, kv: int, layer: int, array: str, dtype: torch.dtype) -> None:
    name = f"{array}_kv{kv}_l{layer}"
    cache, at = view_of(case.collection(), kv, layer), case.element_indices()
    if name not in case:
        # MAX doesn't compile these: e8m0 has no multiplication there, and a load may not return the pool's own dtype.
        assert case.name in ("mla_fp8_e8m0_noload", "mla_bf16_with_scales")
        expected = (cache.load_quantized(*at).double() * cache.load_scale(*at).to(torch.float64)).to(dtype)
        assert torch.equal(bits(cache.load(*at, output_dtype=dtype)), bits(expected))
        return
    assert_same_numbers(cache.load(*at, output_dtype=dtype), case.elements(name))


@pytest.mark.parametrize(("case", "kv", "layer"), VIEWS)
def test_wide_loads_follow_each_lanes_own_scale(case: AddressingCase, kv: int, layer: int) -> None:
    """MAX loads four lanes with the first lane's scale. Where a group is narrower than that (granularity 2) its answer
    is wrong for the lanes of the second group, and there, and only there, we differ."""
    name = f"load4_f32_kv{kv}_l{layer}"
    if name not in case:
        assert case.name == "mla_fp8_e8m0_noload"
        return
    cache, (bs, head, tok, dim) = view_of(case.collection(), kv, layer), case.element_indices()
    first_lane = dim - dim % 4
    theirs = cache.load_quantized(bs, head, tok, dim).float() * cache.load_scale(bs, head, tok, first_lane)
    assert_same_numbers(theirs, case.elements(name))
    other_group = (dim // case.meta["granularity"]) != (first_lane // case.meta["granularity"])
    ours = cache.load(bs, head, tok, dim)
    differs = bits(ours) != same_width(case.elements(name))
    differs &= ~(ours.isnan() & same_width(case.elements(name)).view(torch.float32).isnan())
    assert not bool(differs[~other_group].any())
    assert int(other_group.sum()) == (48 if case.name == "mla_fp8_f32_gran2" else 0)
    assert int(differs.sum()) == int((other_group & (theirs != ours)).sum())
    assert bool(differs.any()) == bool(other_group.any())


@pytest.mark.parametrize(
    ("name", "scales_lookup_table"), [("default", None), ("distinct", [[3, 1]])], ids=["default", "distinct"]
)
def test_the_older_signature(name: str, scales_lookup_table: list[list[int]] | None) -> None:
    """MAX 26.6: arguments as in `generic_get_paged_cache_with_scales`; no scales table means the values' table."""
    first_line, rows = golden.lines(f"seed_signature_26.6.0_{name}_scales_lut.txt")
    blocks = (torch.arange(3 * 2 * 2 * 8) % 13 - 6).float().reshape(3, 1, 2, 2, 1, 8).to(torch.float8_e4m3fn)
    scales = (torch.arange(4 * 2 * 2 * 2) * 0.25).reshape(4, 1, 2, 2, 1, 2)
    collection = pagedmla.generic_get_paged_cache_with_scales(
        blocks,
        torch.tensor([3], dtype=torch.uint32),
        torch.tensor([[2, 0]], dtype=torch.uint32),
        1,
        4,
        scales,
        None if scales_lookup_table is None else torch.tensor(scales_lookup_table, dtype=torch.uint32),
    )
    shown = f"max_seq {collection.max_prompt_length} max_cache {collection.max_cache_length}"
    assert f"{shown} hdg {collection.head_dim_granularity}" == first_line
    cache = collection.get_key_cache(1)
    tok, dim, quantised, scale, value, row = (torch.tensor(column) for column in zip(*rows))
    tok, dim = tok.to(torch.int64), dim.to(torch.int64)
    assert torch.equal(cache.load_quantized(0, 0, tok, dim).float(), quantised)
    assert torch.equal(cache.load_scale(0, 0, tok, dim), scale)
    assert torch.equal(cache.load(0, 0, tok, dim), value)
    assert torch.equal(cache.row_idx(0, tok), row.to(torch.int64))


def test_max_stores_int8_rows_and_scales_where_we_do() -> None:
    case = golden.arrays("mla_store_int8_f32_1scale_cpu_26.7.0.npz")
    blocks = torch.zeros_like(case["blocks_after"]).view(torch.int8)
    scales = torch.zeros_like(case["scales_after"])
    cache = pagedmla.generic_get_paged_cache_with_scales(
        blocks, case["cache_lengths"], case["lookup_table"], 4, 130, scales, case["scales_lookup_table"]
    ).get_key_cache(int(case["layer"]))
    bs, tok = positions(case["input_row_offsets"], case["cache_lengths"])
    dim = torch.arange(blocks.shape[5])
    cache.store(bs.unsqueeze(1), 0, tok.unsqueeze(1), dim, case["k"].view(torch.int8)[:, 0])
    cache.store_scale(bs, 0, tok, 0, case["k_scale"][:, 0, 0])
    assert torch.equal(blocks.view(torch.uint8), case["blocks_after"])
    assert torch.equal(scales, case["scales_after"])


def test_maxs_multi_head_store_and_attention() -> None:
    """Prefill over paged K and V: 3 requests with 5, 200 and 127 cached tokens, the last crosses into a new page."""
    case = golden.arrays("mha_cpu_26.7.0.npz")
    blocks = case["blocks_before"].clone()
    collection = pagedmla.generic_get_paged_cache(
        blocks, case["cache_lengths"], case["lookup_table"], case["max_prompt_length"], case["max_cache_length"]
    )
    layer = int(case["layer"])
    bs, tok = positions(case["input_row_offsets"], case["cache_lengths"])
    heads, dim = torch.arange(2).unsqueeze(1), torch.arange(16)
    at = (bs[:, None, None], heads, tok[:, None, None], dim)
    collection.get_key_cache(layer).store(*at, case["k"])
    collection.get_value_cache(layer).store(*at, case["v"])
    assert torch.equal(blocks, case["blocks_after"])

    starts = case["input_row_offsets"].to(torch.int64)
    kv_lens = case["cache_lengths"].to(torch.int64) + starts.diff()
    row = torch.repeat_interleave(torch.arange(3), kv_lens)
    token = torch.cat([torch.arange(int(length)) for length in kv_lens])
    at = (row[:, None, None], heads, token[:, None, None], dim)
    key, value = (cache.load(*at).repeat_interleave(2, 1) for cache in
                  (collection.get_key_cache(layer), collection.get_value_cache(layer)))  # fmt: skip
    key_starts = torch.cat((torch.zeros(1, dtype=torch.int64), kv_lens.cumsum(0)))
    out, _ = prefill(case["q"], key, value, starts, key_starts, sm_scale=16**-0.5)
    # MAX computes in float32: 201 keys, weights that sum to 1, values below 5.
    torch.testing.assert_close(out.float(), case["out"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["manager_26.7.0.json", "jenga_26.7.0.json"], ids=["sentinel-last", "null-page-first"])
@pytest.mark.parametrize("step", [0, 1], ids=["prefill", "decode"])
def test_the_managers_tables_bind(name: str, step: int) -> None:
    """One manager marks unused columns with a page past the last, the other with page 0; the second gives scales ids of
    their own, beyond the value pool. Both pad a table's width: neither may be read, refused or reported."""
    record = golden.records(name)[step]
    values = KVCacheInputsPerDevice(
        torch.full(record["kv_blocks_shape"], torch.nan, dtype=torch.float32),
        torch.tensor(record["cache_lengths"], dtype=torch.uint32),
        torch.tensor(record["lookup_table"], dtype=torch.uint32),
        torch.tensor(record["max_prompt_length"], dtype=torch.uint32),
        torch.tensor(record["max_cache_length"], dtype=torch.uint32),
        torch.tensor(record["page_stride"]),
        kv_scales=torch.full(record["kv_scales_shape"], torch.nan),
        scales_page_stride=torch.tensor(record["scales_page_stride"]),
        scales_lookup_table=torch.tensor(record["scales_lookup_table"], dtype=torch.uint32),
        attention_dispatch_metadata=torch.tensor(record["attention_dispatch_metadata"]),
        mla_num_partitions=torch.tensor(record["mla_num_partitions"]),
    )
    collection = PagedCacheValues.from_upstream([values], ["cpu"]).to_graph_values().collection()
    query_lens = [300, 5, 128] if step == 0 else [1, 1, 1]
    assert values.dispatch(max(query_lens)).num_partitions == 1
    cache = collection.get_key_cache(1)
    for b, query_len in enumerate(query_lens):
        kv_len = collection.cache_length(b) + query_len
        assert kv_len <= record["max_cache_length"][0]
        pages = -(-kv_len // 128)
        assert record["lookup_table"][b][pages:] == [8 if name.startswith("manager") else 0] * (24 - pages)
        tok = torch.arange(kv_len).unsqueeze(1)
        cache.store(b, 0, tok, torch.arange(64), float(b + 1), check=True)
        cache.store_scale(b, 0, tok, 0, 0.5, check=True)
    for b, query_len in enumerate(query_lens):
        tok = torch.arange(collection.cache_length(b) + query_len).unsqueeze(1)
        assert bool((cache.load(b, 0, tok, torch.arange(64)) == (b + 1) / 2).all())


def test_table_widths_that_max_pads() -> None:
    """Tables padded as MAX pads them bind, and what lies in the padding is never looked at."""
    for pages, columns in golden.records("py_api_26.7.0.json")["padded_lut_cols"].items():
        table = torch.full((1, columns), 0xFFFFFFFF, dtype=torch.uint32)
        table[0, : int(pages)] = 0
        blocks = torch.full((1, 1, 1, 2, 1, 8), 3.0)
        cache = pagedmla.generic_get_paged_cache(
            blocks, torch.tensor([0], dtype=torch.uint32), table, 2 * int(pages), 2 * int(pages)
        ).get_key_cache(0)
        assert bool((cache.load(0, 0, torch.arange(2 * int(pages)), 0) == 3.0).all())
        with pytest.raises(IndexError, match=rf"row 0, column {pages} holds page id 4294967295; blocks has 1 pages"):
            cache.load(0, 0, 2 * int(pages), 0)


def test_flattening_orders_are_maxs() -> None:
    record = golden.records("py_api_26.7.0.json")
    full = KVCacheInputsPerDevice(*[torch.tensor([i]) for i in range(13)])
    names = [name for name in vars(full) if getattr(full, name) is not None]
    assert names == record["tree_flatten_order"]
    assert [int(leaf) for leaf in full.flatten(FlattenOrder.DECLARATION)[0]] == list(range(13))
    assert (
        list(full.flatten(FlattenOrder.OPERAND)[1].present)
        == record["flatten_without_attention_dispatch_metadata_order"]
    )
    assert [int(leaf) for leaf in full] == [0, 1, 2, 3, 4, 6]  # as observed: kv_scales last, nothing else


def test_bytes_a_page_as_max_counts_them() -> None:
    """DeepSeek-V3 (61 layers, pages of 128): MAX's count of value and scale bytes is ours times layers and slots."""
    params = golden.records("py_api_26.7.0.json")["params"]
    for name, layout in (
        ("bf16", pagedmla.get_layout("bf16")),
        ("fp8_f32_g64", pagedmla.get_layout("fp8_flat", granularity=64)),
        ("fp8_f32_g576", pagedmla.get_layout("fp8_flat")),
    ):
        counted = params[name]["bytes_per_value_block"] + params[name]["bytes_per_scale_block"]
        assert counted == layout.bytes_per_token * 61 * 128


def positions(row_offsets: torch.Tensor, cache_lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of every token of a ragged step."""
    starts = row_offsets.to(torch.int64)
    bs = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    return bs, cache_lengths.to(torch.int64)[bs] + torch.arange(int(starts[-1])) - starts[bs]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return raw_view(tensor.contiguous())


def same_width(array: torch.Tensor) -> torch.Tensor:
    """MAX's bits in the integer type that `bits` uses."""
    return raw_view(array.contiguous())


def assert_same_numbers(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal bits, but for a NaN's sign and payload, which IEEE 754 leaves open in a product."""
    theirs = same_width(theirs).view(ours.dtype)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(bits(ours.nan_to_num(nan=0.0)), bits(theirs.nan_to_num(nan=0.0)))
