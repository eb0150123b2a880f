"""Where an element lies: strides, both tables, both page strides, and writes that touch nothing else.

Pools hold their own addresses (element i holds the number i), so a load names the place it came from; the judge is the
formula of the interface written out in plain integers (cases/arena.py). Sizes stand on the boundaries: one page, one
token a page, padding of a row and of a single element, ragged last groups, 2^31 and 2^32 elements.
"""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from cases.arena import FILL, Geometry, counting, untouched
from cases.steps import as_table
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pagedmla
from pagedmla import DroppedStoreWarning, KVCacheInputsPerDevice, PagedKVCacheCollection, get_layout
from pagedmla.kv_cache.paged_tensor import raw_view


def table(ids: list[list[int]], dtype: torch.dtype = torch.uint32) -> Tensor:
    return as_table(torch.tensor(ids), dtype)


def lengths(*each: int) -> Tensor:
    return torch.tensor(each, dtype=torch.uint32)


def unscaled(blocks: Tensor, ids: list[list[int]], page_stride: Tensor | int | None = None) -> PagedKVCacheCollection:
    tokens = len(ids[0]) * blocks.shape[3]
    return pagedmla.generic_get_paged_cache(
        blocks, lengths(*[0] * len(ids)), table(ids), tokens, tokens, page_stride=page_stride
    )


# -- the two tables ----------------------------------------------------------------------------------------------------


def test_scales_resolve_through_their_own_table() -> None:
    """MAX's decoy: one value page, three scale pages; 111 waits where the values' table points."""
    blocks = torch.full((1, 1, 1, 1, 4, 4), 2.0).to(torch.float8_e4m3fn)
    scales = torch.full((3, 1, 1, 1, 4, 1), torch.nan)
    scales[0], scales[2] = 111.0, 222.0
    cache = pagedmla.generic_get_paged_cache_with_scales(
        blocks, lengths(0), table([[0]]), 1, 1, scales, table([[2]])
    ).get_key_cache(0)
    head, dim = torch.arange(4).unsqueeze(1), torch.arange(4)
    assert bool((cache.load_scale(0, head, 0, dim) == 222.0).all())
    assert bool((cache.load(0, head, 0, dim) == 444.0).all())
    assert cache.scale_row_idx(0, 0).item() == 2
    assert cache.row_idx(0, 0).item() == 0


@pytest.mark.parametrize("executor", ["torch", "reference"])
def test_the_decoy_through_attention_and_store(executor: str) -> None:
    """The same pools used as a cache: what attention reads and store writes follows scale page 2 as well."""
    layout = get_layout("fp8_rope_bf16")
    blocks = torch.zeros(1, 1, 1, 1, 1, 640, dtype=torch.float8_e4m3fn)
    scales = torch.full((3, 1, 1, 1, 1, 1), 111.0)
    values = KVCacheInputsPerDevice(
        blocks, lengths(0), table([[0]]), 1, 1, -1, kv_scales=scales, scales_lookup_table=table([[2]])
    )
    pagedmla.store(torch.full((1, 512), 448.0 * 222.0), torch.zeros(1, 64), values, 0, layout=layout, executor=executor)
    assert scales.flatten().tolist() == [111.0, 111.0, 222.0]
    out, _ = pagedmla.attend(torch.zeros(1, 1, 576), values, 0, sm_scale=1.0, layout=layout, executor=executor)
    assert bool((out == 448.0 * 222.0).all())


def test_absent_scales_table_means_the_values_table() -> None:
    blocks = torch.ones(3, 1, 1, 2, 1, 4).to(torch.float8_e4m3fn)
    scales = torch.arange(6.0).view(3, 1, 1, 2, 1, 1)
    cache = pagedmla.generic_get_paged_cache_with_scales(blocks, lengths(0), table([[2, 1]]), 4, 4, scales)
    assert cache.scales_lookup_table is cache.lookup_table
    assert cache.get_key_cache(0).load(0, 0, torch.arange(4), 0).tolist() == [4.0, 5.0, 2.0, 3.0]


# -- strides -----------------------------------------------------------------------------------------------------------

geometries = st.builds(
    Geometry,
    num_pages=st.integers(1, 4),
    kv_dim=st.integers(1, 2),
    num_layers=st.integers(1, 3),
    page_size=st.integers(1, 5),
    num_heads=st.integers(1, 3),
    width=st.integers(1, 12),
    padding=st.integers(0, 9),
)


@given(values=geometries, scale_padding=st.integers(0, 5), more_scale_pages=st.integers(0, 2), data=st.data())
def test_addresses_are_the_interfaces_formula(
    values: Geometry, scale_padding: int, more_scale_pages: int, data: st.DataObject
) -> None:
    granularity = data.draw(st.integers(1, values.width + 2), "granularity")
    groups = -(-values.width // granularity)
    scales = Geometry(values.num_pages + more_scale_pages, *values.shape[1:5], groups, scale_padding)
    batch, columns = data.draw(st.integers(1, 3), "batch"), data.draw(st.integers(1, 3), "columns")
    ids = data.draw(st.lists(st.lists(st.integers(0, values.num_pages - 1), min_size=columns, max_size=columns),
                             min_size=batch, max_size=batch), "lookup_table")  # fmt: skip
    scale_ids = data.draw(st.lists(st.lists(st.integers(0, scales.num_pages - 1), min_size=columns, max_size=columns),
                                   min_size=batch, max_size=batch), "scales_lookup_table")  # fmt: skip
    short = data.draw(st.booleans(), "short")
    bind = Geometry.short if short else Geometry.strided
    collection = pagedmla.generic_get_paged_cache_with_scales(
        bind(values, counting(values.elements)),
        lengths(*[0] * batch),
        table(ids),
        1,
        1,
        bind(scales, counting(scales.elements)),
        table(scale_ids),
        quantization_granularity=granularity,
        page_stride=values.page_stride if short else None,
        scales_page_stride=scales.page_stride if short else None,
    )
    kv = data.draw(st.integers(0, values.kv_dim - 1), "kv")
    layer = data.draw(st.integers(0, values.num_layers - 1), "layer")
    cache = collection.get_value_cache(layer) if kv else collection.get_key_cache(layer)
    b, tok = (
        data.draw(st.integers(0, batch - 1), "bs"),
        data.draw(st.integers(0, columns * values.page_size - 1), "tok"),
    )
    head, dim = (
        data.draw(st.integers(0, values.num_heads - 1), "head"),
        data.draw(st.integers(0, values.width - 1), "dim"),
    )

    page, slot = divmod(tok, values.page_size)
    address = values.address(ids[b][page], kv, layer, slot, head, dim)
    scale_address = scales.address(scale_ids[b][page], kv, layer, slot, head, dim // granularity)
    assert cache.load_quantized(b, head, tok, dim).item() == address
    assert cache.load_scale(b, head, tok, dim).item() == scale_address
    assert cache.load(b, head, tok, dim, torch.float64).item() == torch.tensor(float(address)) * scale_address

    row = values.num_heads * values.width
    if values.page_stride % row == 0:
        rows_before = values.address(0, kv, layer, 0, 0, 0)
        assert cache.row_idx(b, tok).item() == (address - rows_before - head * values.width - dim) // row
        assert cache.row_idx(b, tok).item() < cache.num_kv_rows


def check_pool_in_place(pool: Tensor, ids: list[list[int]], expected: Tensor) -> None:
    """Loads of a strided pool against plain indexing of the same tensor."""
    collection = unscaled(pool, ids)
    _, _, layers, page_size, heads, width = pool.shape
    tokens = len(ids[0]) * page_size
    bs, head, tok, dim = torch.meshgrid(*map(torch.arange, (len(ids), heads, tokens, width)), indexing="ij")
    page = torch.tensor(ids)[bs, tok // page_size]
    for layer in range(layers):
        want = expected[page, 0, layer, tok % page_size, head, dim]
        assert torch.equal(collection.get_key_cache(layer).load(bs, head, tok, dim), want)


def test_cross_layer_pools() -> None:
    """vllm#37032: layers interleaved inside a page, or outermost; kernels that rebuilt strides read garbage."""
    shape = (3, 2, 4, 2, 5)  # pages, layers, slots, heads, columns
    ids = [[2, 0], [1, 1]]
    layers_outermost = torch.arange(240.0).view(2, 3, 1, 4, 2, 5).permute(1, 2, 0, 3, 4, 5)
    layers_inside_slots = torch.arange(240.0).view(3, 1, 4, 2, 2, 5).permute(0, 1, 3, 2, 4, 5)
    heads_outside_slots = torch.arange(240.0).view(3, 1, 2, 2, 4, 5).permute(0, 1, 2, 4, 3, 5)
    for pool in (layers_outermost, layers_inside_slots, heads_outside_slots):
        assert pool.shape == (shape[0], 1, *shape[1:])
        assert not pool.is_contiguous()
        check_pool_in_place(pool, ids, pool.contiguous())


def test_inline_scales_are_strides() -> None:
    """Rows of 8 bytes followed by their two float32 scales, as one byte pool with two views."""
    memory = torch.zeros(3, 1, 2, 4, 1, 16, dtype=torch.uint8)
    scales = memory.view(torch.float32)[..., 2:]
    blocks = memory[..., :8].view(torch.float8_e4m3fn)
    scales.copy_(torch.arange(48.0).view(3, 1, 2, 4, 1, 2))
    blocks.copy_(torch.ones(3, 1, 2, 4, 1, 8))
    cache = pagedmla.generic_get_paged_cache_with_scales(blocks, lengths(0), table([[2, 0]]), 8, 8, scales)
    layer = cache.get_key_cache(1)
    tok, dim = torch.arange(8).unsqueeze(1), torch.arange(8)
    want = scales[[2, 0], 0, 1, :, 0].reshape(8, 2).repeat_interleave(4, 1)
    assert torch.equal(layer.load(0, 0, tok, dim), want)
    expected = memory.clone()
    expected.view(torch.float32)[0, 0, 1, 1, 0, 2:] = torch.tensor([0.5, 0.25])
    layer.store_scale(0, 0, 5, torch.tensor([0, 4]), torch.tensor([0.5, 0.25]))
    assert torch.equal(memory, expected)


def test_a_view_into_an_arena_keeps_its_offset() -> None:
    arena = torch.arange(200.0)
    pool = arena[13 : 13 + 96].view(3, 1, 2, 4, 1, 4)
    check_pool_in_place(pool, [[1, 2]], pool.clone())


@pytest.mark.parametrize("given", [None, -1, torch.tensor([-1]), 40, torch.tensor([40])], ids=str)
def test_page_strides_absent_packed_and_explicit(given: Tensor | int | None) -> None:
    """-1 and nothing mean the tensor's own stride(0); 40 is that stride said aloud, in a pool padded by a row."""
    geometry = Geometry(3, 1, 2, 2, 1, 8, padding=8)
    blocks = geometry.strided(counting(geometry.elements))
    cache = unscaled(blocks, [[2, 0]], given).get_key_cache(1)
    assert cache.load(0, 0, torch.arange(4), 0).tolist() == [96.0, 104.0, 16.0, 24.0]
    assert cache.row_idx(0, torch.arange(4)).tolist() == [10, 11, 0, 1]
    assert cache.num_kv_rows == 12


def test_a_page_stride_that_no_address_has() -> None:
    """A pool of one page is bound by no distance: torch failed later, in words of its own."""
    with pytest.raises(ValueError, match="page_stride: expected an int64; got 1180591620717411303424"):
        unscaled(torch.zeros(1, 1, 1, 2, 1, 3), [[0]], 2**70)


def test_an_explicit_page_stride_wins_over_the_tensors_own() -> None:
    geometry = Geometry(3, 1, 1, 2, 1, 4, padding=5)
    blocks = geometry.short(counting(geometry.elements))
    assert unscaled(blocks, [[2]]).get_key_cache(0).load(0, 0, 0, 0).item() == 16.0
    assert unscaled(blocks, [[2]], 13).get_key_cache(0).load(0, 0, 0, 0).item() == 26.0


def test_addresses_are_bounded_by_the_storage() -> None:
    """A short tensor is no reason to refuse; a storage that is too short is."""
    arena = torch.zeros(2 * 64 + 32)
    blocks = arena.as_strided((3, 1, 2, 2, 1, 8), (32, 32, 16, 8, 8, 1))
    assert unscaled(blocks, [[2]], 64).get_key_cache(1).load(0, 0, 1, 7).item() == 0.0
    with pytest.raises(
        ValueError,
        match=r"blocks: expected a storage of at least 162 elements for 3 pages 65 elements apart; got 160 elements\. "
        r"Bind a view into the whole arena, or pass the real page_stride\.",
    ):
        unscaled(blocks, [[2]], 65)
    with pytest.raises(
        ValueError, match=r"scales: expected a storage of at least .* pass the real scales_page_stride\."
    ):
        pagedmla.generic_get_paged_cache_with_scales(
            blocks, lengths(0), table([[0]]), 1, 1, torch.ones(3, 1, 2, 2, 1, 1), scales_page_stride=100
        )


def test_pages_split_into_planes_have_addresses_but_no_rows() -> None:
    """Padding that isn't a whole number of rows: elements are where they are, rows can't be counted."""
    geometry = Geometry(3, 1, 1, 2, 1, 8, padding=5)
    cache = unscaled(geometry.strided(counting(geometry.elements)), [[1, 2]]).get_key_cache(0)
    assert cache.load(0, 0, torch.arange(4), 3).tolist() == [24.0, 32.0, 45.0, 53.0]
    message = (
        r"page stride of blocks: expected a whole number of rows of 8 elements; got 21\. "
        r"Such pages have element addresses but no row numbers\."
    )
    for rows in (lambda: cache.row_idx(0, 0), lambda: cache.num_kv_rows):
        with pytest.raises(ValueError, match=message):
            rows()


# -- far addresses -----------------------------------------------------------------------------------------------------


def resident_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def sparse(path: Path, elements: int, dtype: torch.dtype) -> Tensor:
    """A tensor of `elements` backed by a file of holes: only what is touched takes memory."""
    return torch.from_file(str(path), shared=True, size=elements, dtype=dtype)


@pytest.mark.parametrize("executor", ["torch", "reference"])
def test_pages_beyond_2_to_the_31_and_2_to_the_32_elements(tmp_path: Path, executor: str) -> None:
    """vllm#47671, flashinfer#3130, aiter#3062: page id times page stride wraps in 32 bits and answers with other pages.

    Pages 2^24 elements apart: ids 127, 128, 255 and 256 straddle 2^31 and 2^32. Scale pages, 2^22 float32 apart, do the
    same for their bytes.
    """
    before = resident_kib()
    layout = get_layout("fp8_rope_bf16")
    ids, scale_ids = [[127, 128, 255, 256]], [[256, 3, 127, 129]]
    far = sparse(tmp_path / "values", 257 * 2**24, torch.uint8).view(torch.float8_e4m3fn)
    far_scales = sparse(tmp_path / "scales", 257 * 2**22, torch.float32)
    blocks = Geometry(257, 1, 1, 4, 1, 640).short(far)
    scales = Geometry(257, 1, 1, 4, 1, 1).short(far_scales)

    def values_of(blocks: Tensor, scales: Tensor, ids: Tensor, scale_ids: Tensor, *strides: int):
        return KVCacheInputsPerDevice(
            blocks, lengths(11), ids, 4, 15, strides[0],
            kv_scales=scales, scales_page_stride=strides[1], scales_lookup_table=scale_ids,
        )  # fmt: skip

    values = values_of(blocks, scales, table(ids), table(scale_ids), 2**24, 2**22)
    near_blocks, near_scales = torch.zeros(4, 1, 1, 4, 1, 640).to(torch.float8_e4m3fn), torch.zeros(4, 1, 1, 4, 1, 1)
    near = values_of(near_blocks, near_scales, table([[0, 1, 2, 3]]), table([[3, 2, 1, 0]]), -1, -1)

    g = torch.Generator().manual_seed(0)
    latent, rope = torch.randn(15, 512, generator=g), torch.randn(15, 64, generator=g)
    q = torch.randn(4, 2, 576, generator=g)
    context, step = torch.tensor([0, 11], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    for each in (values, near):
        first = KVCacheInputsPerDevice(**{**vars(each), "cache_lengths": lengths(0)})
        pagedmla.store(latent[:11], rope[:11], first, 0, query_start_loc=context, layout=layout, executor=executor)
        pagedmla.store(latent[11:], rope[11:], each, 0, query_start_loc=step, layout=layout, executor=executor)
    for column, page in enumerate(ids[0]):
        stored = far.view(torch.uint8)[page * 2**24 :][: 4 * 640].view(4, 640)
        tokens = 3 if column == 3 else 4
        assert torch.equal(stored[:tokens], near_blocks.view(torch.uint8)[column, 0, 0, :tokens, 0])
    far_out = pagedmla.attend(
        q, values, 0, sm_scale=0.04, query_start_loc=step, layout=layout, executor=executor, check=True
    )
    near_out = pagedmla.attend(q, near, 0, sm_scale=0.04, query_start_loc=step, layout=layout, executor=executor)
    assert torch.equal(far_out[0], near_out[0])
    assert torch.equal(far_out[1], near_out[1])
    cache = values.collection(640).get_key_cache(0)
    assert cache.load_quantized(0, 0, 12, 5).float() == near_blocks[3, 0, 0, 0, 0, 5].float()
    assert resident_kib() - before < 200 * 1024


def test_rows_beyond_2_to_the_32(tmp_path: Path) -> None:
    """MAX counts rows in 32 bits. A page of one-byte rows 2^24 apart: page 256 begins at row 2^32."""
    arena = sparse(tmp_path / "rows", 257 * 2**24, torch.uint8)
    cache = unscaled(Geometry(257, 1, 1, 2, 1, 1).short(arena), [[256, 255]], 2**24).get_key_cache(0)
    assert cache.row_idx(0, torch.arange(4)).tolist() == [2**32, 2**32 + 1, 2**32 - 2**24, 2**32 - 2**24 + 1]
    assert cache.num_kv_rows == 2**32 + 2
    cache.store(0, 0, 1, 0, 7)
    assert arena[2**32 + 1].item() == 7
    assert arena[1].item() == 0


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
def test_table_forms(dtype: torch.dtype) -> None:
    """Five columns, a slice of a wider table, a transposed one: strides are read from the table too."""
    blocks = torch.arange(12.0).view(6, 1, 1, 2, 1, 1)
    ids = [[5, 3, 1, 0, 2], [0, 1, 2, 3, 4]]
    packed = table(ids, dtype)
    wide = torch.full((2, 24), -1, dtype=torch.int32).view(dtype)
    wide.view(torch.int32)[:, :5] = packed.view(torch.int32)
    for form in (packed, wide[:, :5], packed.t().contiguous().t()):
        cache = pagedmla.generic_get_paged_cache(blocks, lengths(0, 0), form, 10, 10).get_key_cache(0)
        want = [[2.0 * page + slot for page in row for slot in (0, 1)] for row in ids]
        assert cache.load(torch.arange(2).unsqueeze(1), 0, torch.arange(10), 0).tolist() == want


def test_ids_are_unsigned_in_uint32_tables_only() -> None:
    blocks = torch.zeros(2, 1, 1, 2, 1, 1)
    for dtype, shown in ((torch.uint32, 4294967295), (torch.int32, -1)):
        cache = pagedmla.generic_get_paged_cache(
            blocks, lengths(0), table([[0, 0xFFFFFFFF]], dtype), 1, 1
        ).get_key_cache(0)
        assert cache.load(0, 0, 1, 0).item() == 0.0
        with pytest.raises(
            IndexError, match=rf"lookup_table: row 0, column 1 holds page id {shown}; blocks has 2 pages"
        ):
            cache.load(0, 0, 2, 0)


def test_pages_of_one_token() -> None:
    blocks = torch.arange(5.0).view(5, 1, 1, 1, 1, 1)
    cache = unscaled(blocks, [[4, 2, 0]]).get_key_cache(0)
    assert cache.load(0, 0, torch.arange(3), 0).tolist() == [4.0, 2.0, 0.0]
    assert cache.row_idx(0, torch.arange(3)).tolist() == [4, 2, 0]


def test_indices_broadcast_and_may_be_numbers() -> None:
    blocks = torch.arange(2 * 2 * 3 * 4.0).view(2, 1, 1, 2, 3, 4)
    cache = unscaled(blocks, [[1, 0], [0, 1]]).get_key_cache(0)
    whole = cache.load(torch.arange(2).view(2, 1, 1, 1), torch.arange(3), torch.arange(4).view(4, 1, 1),
                       torch.arange(4).view(4, 1))  # fmt: skip
    assert whole.shape == (2, 4, 4, 3)
    assert cache.load(1, 2, 3, 1).shape == ()
    assert cache.load(1, 2, 3, 1) == whole[1, 3, 1, 2] == blocks[1, 0, 0, 1, 2, 1]
    assert cache.load(torch.zeros(0, dtype=torch.int64), 0, 0, 0).shape == (0,)
    assert (
        cache.load(torch.tensor(1, dtype=torch.int32), 2, torch.tensor(3, dtype=torch.uint32), 1)
        == blocks[1, 0, 0, 1, 2, 1]
    )


# -- scales ------------------------------------------------------------------------------------------------------------


def with_scales(blocks: Tensor, scales: Tensor, **named: int) -> PagedKVCacheCollection:
    return pagedmla.generic_get_paged_cache_with_scales(blocks, lengths(0), table([[0]]), 1, 1, scales, **named)


def test_e8m0_scales_load_as_powers_of_two() -> None:
    """MAX 26.7 can't compile this load. 0x7F is 1, every step up doubles; 0xFF is NaN."""
    scales = torch.tensor([0x7F, 0x80, 0x70, 0xFF], dtype=torch.uint8).view(torch.float8_e8m0fnu).view(1, 1, 1, 1, 1, 4)
    blocks = torch.full((1, 1, 1, 1, 1, 4), 1.5).to(torch.float8_e4m3fn)
    cache = with_scales(blocks, scales).get_key_cache(0)
    assert cache.load(0, 0, 0, torch.arange(3)).tolist() == [1.5, 3.0, 1.5 * 2.0**-15]
    assert bool(cache.load(0, 0, 0, 3).isnan())
    assert cache.load_scale(0, 0, 0, 0).dtype == torch.float8_e8m0fnu


def test_the_product_is_made_in_the_scales_dtype() -> None:
    """As MAX does it: 104 * 0.02 in float16 is 2.080078125, which no float32 product gives."""
    scales = torch.full((1, 1, 1, 1, 1, 1), 0.02, dtype=torch.float16)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        cache = with_scales(torch.full((1, 1, 1, 1, 1, 2), 104.0).to(dtype), scales).get_key_cache(0)
        assert cache.load(0, 0, 0, 0).item() == 2.080078125
        assert cache.load(0, 0, 0, 0, torch.bfloat16).item() == 2.078125


def test_several_scales_a_token_are_stored_each_in_its_slot() -> None:
    """MAX 26.7's store operation puts every scale of a token into slot 0."""
    scales = torch.full((1, 1, 1, 2, 1, 5), torch.nan)
    blocks = torch.zeros(1, 1, 1, 2, 1, 576).to(torch.float8_e4m3fn)
    cache = with_scales(blocks, scales, quantization_granularity=128).get_key_cache(0)
    cache.store_scale(0, 0, 1, torch.arange(0, 576, 128), torch.arange(5) + 1.0)
    assert scales[0, 0, 0, 1, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert bool(scales[0, 0, 0, 0].isnan().all())
    assert cache.load_scale(0, 0, 1, torch.tensor([0, 127, 128, 511, 512, 575])).tolist() == [
        1.0,
        1.0,
        2.0,
        4.0,
        5.0,
        5.0,
    ]


# -- views -------------------------------------------------------------------------------------------------------------


def test_block_views_share_memory() -> None:
    geometry = Geometry(3, 2, 2, 4, 2, 3, padding=6)
    arena = counting(geometry.elements)
    collection = unscaled(geometry.strided(arena), [[0, 2]])
    view = collection.get_value_cache(1).block_paged_view(0, 6, 2)
    assert view.shape == (2, 2, 3)
    assert view[1, 1, 2].item() == geometry.address(2, 1, 1, 3, 1, 2)
    view[0, 0, 0] = -1.0
    assert arena[geometry.address(2, 1, 1, 2, 0, 0)].item() == -1.0
    short = unscaled(geometry.short(arena), [[0, 2]], geometry.page_stride)
    assert torch.equal(short.get_value_cache(1).block_paged_view(0, 6, 2), view)


# -- store -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_mla", [True, False], ids=["MLA", "MHA"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared-table", "own-table"])
@pytest.mark.parametrize("padding", [(0, 0), (8, 4), (3, 1)], ids=["packed", "padded", "unaligned"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_store_writes_its_bytes_and_no_other(
    is_mla: bool, shared: bool, padding: tuple[int, int], layer: int
) -> None:
    """MAX's store grid, over the bytes of both arenas: one token, 2 layers, 4 pages, tables [2, 0] and [1, 3]."""
    kv_dim, heads = (1, 1) if is_mla else (2, 2)
    values = Geometry(4, kv_dim, 2, 2, heads, 8, padding[0])
    scales = Geometry(4, kv_dim, 2, 2, heads, 2, padding[1])
    arena, scale_arena = untouched(values.elements, torch.float8_e4m3fn), untouched(scales.elements, torch.float32)
    ids, scale_ids = [2, 0], [2, 0] if shared else [1, 3]
    collection = pagedmla.generic_get_paged_cache_with_scales(
        values.strided(arena), lengths(1), table([ids]), 1, 2, scales.strided(scale_arena),
        None if shared else table([scale_ids]),
    )  # fmt: skip
    want, want_scales = arena.view(torch.uint8).clone(), scale_arena.clone()
    for kv in range(kv_dim):
        cache = collection.get_value_cache(layer) if kv else collection.get_key_cache(layer)
        for tok in (1, 2):  # the last slot of the first page, the first of the second
            head, dim = torch.arange(heads).unsqueeze(1), torch.arange(8)
            number = 1.0 + tok + kv
            cache.store(0, head, tok, dim, number)
            cache.store_scale(0, head, tok, torch.tensor([0, 4]), number / 8)
            for h in range(heads):
                page, slot = divmod(tok, 2)
                first = values.address(ids[page], kv, layer, slot, h, 0)
                want[first : first + 8] = torch.tensor(number).to(torch.float8_e4m3fn).view(torch.uint8)
                first = scales.address(scale_ids[page], kv, layer, slot, h, 0)
                want_scales[first : first + 2] = number / 8
    assert torch.equal(arena.view(torch.uint8), want)
    assert torch.equal(scale_arena.view(torch.int32), want_scales.view(torch.int32))
    assert int((want != FILL).sum()) == 8 * 2 * kv_dim * heads


def test_a_store_outside_the_pool_is_dropped_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """MAX 26.7 writes past the pool here. Page 3 of 3 is one past the end: half of the elements go, half stay."""
    arena = untouched(4 * 8, torch.float32)
    blocks = arena[:24].view(3, 1, 1, 2, 1, 4)
    cache = unscaled(blocks, [[1, 3]]).get_key_cache(0)
    tok, dim = torch.arange(4).unsqueeze(1), torch.arange(4)
    message = r"lookup_table: row 0, column 1 holds page id 3; blocks has 3 pages"
    with pytest.warns(DroppedStoreWarning, match=message + "; 8 elements dropped"):
        cache.store(0, 0, tok, dim, 1.0)
    want = untouched(32, torch.float32)
    want[8:16] = 1.0
    assert torch.equal(raw_view(arena), raw_view(want))

    with pytest.raises(IndexError, match=message):
        cache.store(0, 0, tok, dim, 2.0, check=True)
    monkeypatch.setenv("PAGEDMLA_CHECK", "1")
    with pytest.raises(IndexError, match=message):
        cache.store(0, 0, tok, dim, 2.0)
    with pytest.warns(DroppedStoreWarning):
        cache.store(0, 0, 2, 0, 2.0, check=False)
    assert torch.equal(raw_view(arena), raw_view(want))  # with checks on, nothing at all was written


def test_scale_ids_are_checked_against_the_scale_pool() -> None:
    """MAX 26.7 checks them against the value pool: valid ids abort, invalid ones pass."""
    blocks, scales = torch.zeros(1, 1, 1, 1, 1, 4).to(torch.float8_e4m3fn), torch.zeros(3, 1, 1, 1, 1, 1)
    collection = pagedmla.generic_get_paged_cache_with_scales(
        blocks, lengths(0), table([[0, 0]]), 1, 1, scales, table([[2, 3]])
    )
    cache = collection.get_key_cache(0)
    cache.store_scale(0, 0, 0, 0, 5.0, check=True)
    assert scales.flatten().tolist() == [0.0, 0.0, 5.0]
    message = r"scales_lookup_table: row 0, column 1 holds page id 3; scales has 3 pages"
    with pytest.raises(IndexError, match=message):
        cache.store_scale(0, 0, 1, 0, 5.0, check=True)
    with pytest.warns(DroppedStoreWarning, match=message):
        cache.store_scale(0, 0, 1, 0, 5.0)
    with pytest.raises(IndexError, match=message):
        cache.load(0, 0, 1, 0)


@pytest.mark.parametrize(
    ("dtype", "given", "stored"),
    [
        (torch.float8_e4m3fn, [1e9, -1e9, float("inf"), 460.0, 0.3], [448.0, -448.0, 448.0, 448.0, 0.3125]),
        (torch.int8, [1e9, -1e9, 127.6, 2.5, -3.5], [127, -128, 127, 2, -4]),
        (
            torch.bfloat16,
            [1e39, -1e39, 1.00390625, 0.0, -0.0],
            [3.3895313892515355e38, -3.3895313892515355e38, 1.0, 0.0, 0.0],
        ),
        (torch.float16, [1e9, -65520.0, 0.1, 0.0, 1.0], [65504.0, -65504.0, 0.0999755859375, 0.0, 1.0]),
    ],
    ids=str,
)
def test_stores_saturate(dtype: torch.dtype, given: list[float], stored: list[float]) -> None:
    cache = unscaled(torch.zeros(1, 1, 1, 1, 1, 5).to(dtype), [[0]]).get_key_cache(0)
    cache.store(0, 0, 0, torch.arange(5), torch.tensor(given, dtype=torch.float64))
    assert cache.load_quantized(0, 0, 0, torch.arange(5)).to(torch.float64).tolist() == stored


def test_nan_is_stored_as_nan() -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32):
        cache = unscaled(torch.zeros(1, 1, 1, 1, 1, 2).to(dtype), [[0]]).get_key_cache(0)
        cache.store(0, 0, 0, 0, float("nan"))
        assert cache.load(0, 0, 0, torch.arange(2)).isnan().tolist() == [True, False]


def test_bytes_are_stored_as_they_are() -> None:
    """A value in the pool's own dtype is copied, e4m3 NaN codes included."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    blocks = torch.zeros(1, 1, 1, 1, 1, 256).to(torch.float8_e4m3fn)
    unscaled(blocks, [[0]]).get_key_cache(0).store(0, 0, 0, torch.arange(256), codes)
    assert torch.equal(blocks.view(torch.uint8).flatten(), codes.view(torch.uint8))
