"""What a collection says about itself, and every refusal of binding and indexing, by its text."""

from __future__ import annotations

import numpy
import pytest
import torch
from cases.steps import as_table
from torch import Tensor

import pagedmla
from pagedmla import KVCacheStaticParams, PagedKVCacheCollection
from pagedmla.kv_cache.checks import checks_enabled, host_int

BLOCKS = torch.zeros(3, 1, 2, 4, 1, 8).to(torch.float8_e4m3fn)
SCALES = torch.ones(5, 1, 2, 4, 1, 2)
LENGTHS = torch.tensor([4, 0], dtype=torch.int32)
TABLE = as_table(torch.tensor([[0, 1], [2, 9]]))


def bind(**changes: object) -> PagedKVCacheCollection:
    arguments: dict[str, object] = {
        "blocks": BLOCKS, "cache_lengths": LENGTHS, "lookup_table": TABLE, "max_prompt_length": 2,
        "max_cache_length": 6, "scales": SCALES, "scales_lookup_table": TABLE, **changes,
    }  # fmt: skip
    return pagedmla.generic_get_paged_cache_with_scales(**arguments)  # type: ignore[arg-type]


def plain(**changes: object) -> PagedKVCacheCollection:
    arguments = {"blocks": BLOCKS, "cache_lengths": LENGTHS, "lookup_table": TABLE, **changes}
    return pagedmla.generic_get_paged_cache(**arguments, max_prompt_length=2, max_cache_length=6)  # type: ignore[arg-type]


def test_what_a_collection_says() -> None:
    host = torch.tensor([7], dtype=torch.uint32)
    collection = bind(max_prompt_length=host, max_cache_length=torch.tensor([9]))
    assert (collection.max_prompt_length, collection.max_cache_length) == (7, 9)
    assert (collection.page_size, collection.num_layers, collection.head_dim_granularity) == (4, 2, 2)
    assert collection.quantization_granularity == 4
    assert collection.kv_params == KVCacheStaticParams(num_heads=1, head_size=8, is_mla=True)
    assert [collection.cache_length(0), collection.cache_length(1)] == [4, 0]
    assert bind(cache_lengths=LENGTHS.view(torch.uint32)).cache_length(0) == 4
    assert collection.blocks is BLOCKS
    assert collection.scales is SCALES
    unscaled = plain(kv_params=KVCacheStaticParams(1, 8, True), page_size=4)
    assert (unscaled.scales, unscaled.head_dim_granularity) == (None, 1)
    two = plain(blocks=torch.zeros(3, 2, 2, 4, 5, 8))
    assert two.kv_params == KVCacheStaticParams(num_heads=5, head_size=8, is_mla=False)


def test_arguments_stand_in_the_documented_order() -> None:
    by_position = pagedmla.generic_get_paged_cache_with_scales(BLOCKS, LENGTHS, TABLE, 2, 6, SCALES, TABLE)
    assert by_position.scales_lookup_table is TABLE
    assert pagedmla.generic_get_paged_cache(BLOCKS, LENGTHS, TABLE, 2, 6).max_cache_length == 6


@pytest.mark.parametrize(
    ("width", "groups", "granularity", "expected"),
    [
        (8, 2, None, 4),
        (8, 1, None, 8),
        (8, 8, None, 1),
        (8, 3, 3, 3),
        (8, 1, 100, 100),
        (10, 3, 4, 4),
        (576, 5, 128, 128),
    ],
)
def test_granularity_is_read_off_the_shapes(width: int, groups: int, granularity: int | None, expected: int) -> None:
    blocks = torch.zeros(3, 1, 2, 4, 1, width).to(torch.float8_e4m3fn)
    bound = bind(blocks=blocks, scales=torch.ones(5, 1, 2, 4, 1, groups), quantization_granularity=granularity)
    assert bound.quantization_granularity == expected
    assert bound.head_dim_granularity == groups


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


BINDING = [
    ({"blocks": torch.zeros(3, 4)}, r"blocks: expected \[\*, \*, \*, \*, \*, \*\]; got \[3, 4\] float32\. Pools are "
                                    r"\[num_blocks, "
     r"kv_dim, num_layers, page_size, num_heads, head_dim\]\."),
    ({"blocks": torch.zeros(3, 3, 2, 4, 1, 8)}, r"blocks: expected kv_dim \(dimension 1\) of 1 for MLA or 2 for K and "
                                                r"V; got "),
    ({"blocks": torch.zeros(3, 1, 2, 0, 1, 8)}, r"blocks: expected a page size \(dimension 3\) of at least 1; got "),
    ({"kv_params": KVCacheStaticParams(2, 8, True)}, r"kv_params: expected KVCacheStaticParams\(num_heads=1, "
                                                     r"head_size=8, "
     r"is_mla=True\), read off blocks \[3, 1, 2, 4, 1, 8\] float8_e4m3fn; got KVCacheStaticParams\(num_heads=2"),
    ({"page_size": 128}, r"page_size: expected 4, dimension 3 of blocks \[3, 1, 2, 4, 1, 8\] float8_e4m3fn; got 128\."),
    ({"scales": torch.ones(5, 1, 2, 4)}, r"scales: expected \[\*, \*, \*, \*, \*, \*\] float32 or float16 or "
                                         r"float8_e8m0fnu; got "),
    ({"scales": SCALES.bfloat16()}, r"scales: expected .* float32 or float16 or float8_e8m0fnu; got \[5, 1, 2, 4, 1, "
                                    r"2\] bfloat16"),
    ({"scales": torch.ones(5, 1, 3, 4, 1, 2)}, r"scales: expected \[\*, 1, 2, 4, 1, 2\] .*; got \[5, 1, 3, 4, 1, 2\] "
                                               r"float32\. It "
     r"goes with blocks \[3, 1, 2, 4, 1, 8\] float8_e4m3fn at quantization_granularity=4\."),
    ({"scales": torch.ones(5, 1, 2, 4, 1, 3)}, r"quantization_granularity: expected a number of elements, since 3 "
                                               r"scales don't "
     r"divide a row of 8 evenly; got None\."),
    ({"quantization_granularity": 0}, r"quantization_granularity: expected at least 1; got 0\."),
    ({"quantization_granularity": 3}, r"scales: expected \[\*, 1, 2, 4, 1, 3\] .*; got \[5, 1, 2, 4, 1, 2\] float32\."),
    ({"cache_lengths": LENGTHS.long()}, r"cache_lengths: expected \[\*\] int32 or uint32; got \[2\] int64\."),
    ({"lookup_table": TABLE[:1]}, r"lookup_table: expected \[2, \*\] int32 or uint32; got \[1, 2\] int32\. The batch "
                                  r"is 2, from "
     r"cache_lengths\."),
    ({"scales_lookup_table": TABLE[0]}, r"scales_lookup_table: expected \[2, \*\] int32 or uint32; got \[2\] int32\."),
    ({"lookup_table": TABLE.long()}, r"lookup_table: expected \[2, \*\] int32 or uint32; got \[2, 2\] int64\."),
    ({"cache_lengths": meta(LENGTHS)}, r"cache_lengths: expected a tensor on cpu, as blocks; got one on meta\."),
    ({"lookup_table": meta(TABLE)}, r"lookup_table: expected a tensor on cpu, as blocks; got one on meta\."),
    ({"scales_lookup_table": meta(TABLE)}, r"scales_lookup_table: expected a tensor on cpu, as blocks; got one on "
                                           r"meta\."),
    ({"scales": meta(SCALES)}, r"scales: expected a tensor on cpu, as blocks; got one on meta\."),
    ({"page_stride": -2}, r"page_stride: expected at least -1; got -2\."),
    ({"scales_page_stride": -2}, r"scales_page_stride: expected at least -1; got -2\."),
    ({"page_stride": torch.tensor([1, 2])}, r"page_stride: expected one integer; got \[2\] int64\."),
    ({"page_stride": torch.tensor([64.0])}, r"page_stride: expected one integer; got \[1\] float32\."),
    ({"max_prompt_length": -1}, r"max_prompt_length: expected at least 0; got -1\."),
    ({"max_cache_length": torch.tensor([True])}, r"max_cache_length: expected one integer; got \[1\] bool\."),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BINDING, ids=range(len(BINDING)))
def test_binding_refuses_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bind(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_lengths": [1, 2]}, r"cache_lengths: expected a tensor \[\*\] int32 or uint32; got list\."),
        ({"lookup_table": None}, r"lookup_table: expected a tensor \[2, \*\] int32 or uint32; got None\."),
        ({"max_cache_length": 6.0}, r"max_cache_length: expected one integer; got 6\.0\."),
        ({"max_cache_length": True}, r"max_cache_length: expected one integer; got True\."),
    ],
    ids=range(4),
)
def test_binding_refuses_types(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        bind(**changes)


def test_binding_reads_no_value() -> None:
    """Tables full of wild ids bind: only entries in use are ever looked at."""
    wild = as_table(torch.full((2, 24), 0xFFFFFFFF), torch.uint32)
    bind(lookup_table=wild, scales_lookup_table=wild)
    assert plain(blocks=meta(BLOCKS), cache_lengths=meta(LENGTHS), lookup_table=meta(TABLE)).page_size == 4


INDEXING = [
    (lambda c: c.cache_length(2), IndexError, r"cache_length: row 2 is out of range for a batch of 2"),
    (lambda c: c.cache_length(-1), IndexError, r"cache_length: row -1 is out of range for a batch of 2"),
    (lambda c: c.get_key_cache(2), IndexError, r"layer: 2 is out of range for a cache of 2 layers"),
    (lambda c: c.get_key_cache(-1), IndexError, r"layer: -1 is out of range for a cache of 2 layers"),
    (lambda c: c.get_value_cache(0), ValueError, r"get_value_cache: an MLA cache stores no values of its own \(kv_dim "
                                                 r"1\); they "
     r"are the latent columns of get_key_cache"),
    (lambda c: c.get_key_cache(0).load(2, 0, 0, 0), IndexError, r"bs: 2 is out of range for 2"),
    (lambda c: c.get_key_cache(0).load(0, 1, 0, 0), IndexError, r"head: 1 is out of range for 1"),
    (lambda c: c.get_key_cache(0).load(0, 0, 0, torch.tensor([3, -1])), IndexError, r"dim: -1 is out of range for 8"),
    (lambda c: c.get_key_cache(0).load_scale(0, 0, 0, 8), IndexError, r"dim: 8 is out of range for 8"),
    (lambda c: c.get_key_cache(0).store(0, 0, 0, 8, 1.0), IndexError, r"dim: 8 is out of range for 8"),
    (lambda c: c.get_key_cache(0).row_idx(0, -3), IndexError, r"tok: -3 is negative"),
    (lambda c: c.get_key_cache(0).load(torch.tensor([[0], [1]]), 0, torch.tensor([1, 8]), 0), IndexError,
     r"lookup_table: row 0 needs column 2 for token 8 in pages of 4; got 2 columns"),
    (lambda c: c.get_key_cache(0).load(1, 0, 4, 0), IndexError,
     r"lookup_table: row 1, column 1 holds page id 9; blocks has 3 pages"),
    (lambda c: c.get_key_cache(0).scale_row_idx(1, 5), IndexError,
     r"scales_lookup_table: row 1, column 1 holds page id 9; scales has 5 pages"),
    (lambda c: c.get_key_cache(0).block_paged_view(0, 0, 3), ValueError, r"tile: expected a divisor of the page size "
                                                                         r"4; got 3\."),
    (lambda c: c.get_key_cache(0).block_paged_view(0, 0, 0), ValueError, r"tile: expected a divisor of the page size "
                                                                         r"4; got 0\."),
    (lambda c: c.get_key_cache(0).block_paged_view(0, 3, 2), ValueError,
     r"tok: expected 2 tokens within one page of 4; got tokens 3\.\.4\."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), INDEXING, ids=range(len(INDEXING)))
def test_indexing_refuses_by_name(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(bind())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("load_scale", lambda cache: cache.load_scale(0, 0, 0, 0)),
        ("store_scale", lambda cache: cache.store_scale(0, 0, 0, 0, 1.0)),
        ("scale_row_idx", lambda cache: cache.scale_row_idx(0, 0)),
        ("num_scale_rows", lambda cache: cache.num_scale_rows),
    ],
)
def test_scales_of_a_cache_without_them(name: str, call) -> None:
    with pytest.raises(
        ValueError, match=rf"{name}: this cache has no scales; make it with generic_get_paged_cache_with_scales"
    ):
        call(plain().get_key_cache(0))


def test_indices_are_integers() -> None:
    """Token 1.5 used to read token 1: torch casts without a word."""
    cache = plain().get_key_cache(0)
    with pytest.raises(TypeError, match=r"index: expected integers; got \[\] float32\."):
        cache.load(0, 0, 1.5, 0)
    with pytest.raises(TypeError, match=r"index: expected integers; got \[2\] bool\."):
        cache.load(0, 0, torch.tensor([True, False]), 0)


def test_whether_values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDMLA_CHECK", raising=False)
    assert not checks_enabled()
    assert checks_enabled(True)
    for setting, enabled in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("PAGEDMLA_CHECK", setting)
        assert checks_enabled() == enabled
        assert not checks_enabled(False)
    monkeypatch.setenv("PAGEDMLA_CHECK", "yes")
    with pytest.raises(ValueError, match=r"PAGEDMLA_CHECK: expected 0 or 1; got 'yes'"):
        checks_enabled()


def test_host_integers_stay_on_the_host() -> None:
    class OnDevice(torch.Tensor):
        """A one-element tensor that claims to lie on a GPU."""

        device = torch.device("cuda", 0)

    on_device = torch.tensor([3]).as_subclass(OnDevice)
    with pytest.raises(
        ValueError,
        match=r"page_stride: expected an int or a tensor on the host; got one on cuda:0\. Keep this field on the CPU\.",
    ):
        host_int(on_device, "page_stride")


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_pools_hold_real_numbers(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="blocks: expected real numbers; got"):
        pagedmla.generic_get_paged_cache(torch.zeros(3, 1, 2, 4, 1, 8, dtype=dtype), LENGTHS, TABLE, 1, 1)


def test_layers_are_integers() -> None:
    """get_key_cache(0.5) made a cache, and its loads failed inside torch."""
    cache = pagedmla.generic_get_paged_cache(torch.zeros(3, 1, 2, 4, 1, 8), LENGTHS, TABLE, 1, 1)
    with pytest.raises(TypeError, match=r"layer: expected an int; got 0\.5"):
        cache.get_key_cache(0.5)  # type: ignore[arg-type]
    assert cache.get_key_cache(numpy.int64(1)).layer == 1


def test_a_value_of_another_length() -> None:
    cache = pagedmla.generic_get_paged_cache(torch.zeros(3, 1, 2, 4, 1, 8), LENGTHS, TABLE, 1, 1).get_key_cache(0)
    with pytest.raises(
        ValueError, match=r"value: expected a number, or numbers for the \[4\] elements of the index; got"
    ):
        cache.store(0, 0, 0, torch.arange(4), torch.ones(3))
