"""The adapter on tensors as vLLM makes them: no engine is needed.

Geometry: blocks of 16 are the smallest page; two layers in one buffer make a page stride that spans both (the engine's
block-first layouts); a table wider than any request keeps the null block 0 in unused columns; the last request of a
captured graph is padding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pagedmla
from pagedmla.adapters.rows import LayerPools, Rows, step_rows, store_values
from pagedmla.adapters.vllm import CACHE_DTYPES, CacheLengths, check_version, layer_pools, layout_of, row_bytes
from pagedmla.kv_cache.layouts import CacheLayout, get_layout

BLOCKS, P = 7, 16
QUANTISED = ["fp8", "fp8_ds_mla", "fp8_rope_bf16", "fp8_per_token_head"]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def layer_cache(layout: CacheLayout, layer: int = 0, layers: int = 1, poison: int = 0xAA) -> Tensor:
    """`[BLOCKS, P, row]` as the engine hands it over: one layer of a buffer in which a block holds all layers."""
    token = row_bytes(layout)
    buffer = torch.full((BLOCKS, layers, P * token), poison, dtype=torch.uint8)
    cache = buffer[:, layer].unflatten(1, (P, token))
    return cache.view(layout.value_dtypes[0])


def rows_of(starts: Tensor, seq_lens: Tensor, table: Tensor, tokens: int | None = None) -> Rows:
    lengths = CacheLengths(8, "cpu").write(seq_lens, starts)
    return step_rows(
        lengths,
        table,
        starts,
        num_tokens=int(starts[-1]) if tokens is None else tokens,
        max_query_length=64,
        max_seq_len=256,
        num_decodes=0,
        num_decode_tokens=0,
    )


# -- versions and names


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0", "0.33.0+cpu", "0.33.1.dev7+g123"])
def test_known_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.28.0", "0.34.0", "1.0.0", "dev", ""])
def test_other_versions_are_named(version: str) -> None:
    with pytest.raises(ImportError, match=r"vllm: expected 0\.29 to 0\.33, .*; got " + version):
        check_version(version)


@pytest.mark.parametrize(
    ("cache_dtype", "model_dtype", "name"),
    [
        ("auto", torch.bfloat16, "bf16"),
        ("auto", torch.float16, "fp16"),
        ("auto", torch.float32, "fp32"),
        ("bfloat16", torch.float16, "bf16"),
        ("float16", torch.bfloat16, "fp16"),
        ("fp8", torch.bfloat16, "fp8_flat"),
        ("fp8_e4m3", torch.bfloat16, "fp8_flat"),
        ("fp8_ds_mla", torch.bfloat16, "fp8_ds_mla"),
        ("fp8_rope_bf16", torch.bfloat16, "fp8_rope_bf16"),
        ("fp8_per_token_head", torch.bfloat16, "fp8_rope_bf16"),
    ],
)
def test_layout_behind_a_cache_dtype(cache_dtype: str, model_dtype: torch.dtype, name: str) -> None:
    assert layout_of(cache_dtype, model_dtype) == get_layout(name)


def test_unknown_cache_dtype_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype: expected one of auto, .*fp8_rope_bf16.*; got fp8_e5m2"):
        layout_of("fp8_e5m2", torch.bfloat16)


def test_double_precision_has_no_unquantised_layout() -> None:
    with pytest.raises(ValueError, match=r"a model of bfloat16, float16 or float32 .*; got torch\.float64"):
        layout_of("auto", torch.float64)


def test_bytes_of_a_token_in_a_page() -> None:
    sizes = {name: row_bytes(get_layout(name)) for name in ("bf16", "fp8_flat", "fp8_rope_bf16", "fp8_ds_mla")}
    assert sizes == {"bf16": 1152, "fp8_flat": 576, "fp8_rope_bf16": 644, "fp8_ds_mla": 656}


# -- pools


def test_two_planes_byte_by_byte() -> None:
    """Rows [P, 640], then sigmas [P] float32, in every page; written by hand and read through the pools."""
    layout = get_layout("fp8_rope_bf16")
    cache = layer_cache(layout, layer=1, layers=2, poison=0)
    pools = layer_pools(cache, layout)
    page, slot = 3, 5
    raw = cache[page].view(torch.uint8).flatten()
    raw[640 * slot + 7] = 0x38  # e4m3 of 1.0, latent column 7
    raw[640 * P + 4 * slot : 640 * P + 4 * slot + 4] = torch.tensor([0.25]).view(torch.uint8)
    assert pools.blocks[page, 0, 0, slot, 0, 7].float() == 1.0
    assert pools.scales is not None
    assert pools.scales[page, 0, 0, slot, 0, 0] == 0.25
    assert int(pools.blocks.view(torch.uint8).count_nonzero()) == 1
    assert int(pools.scales.count_nonzero()) == 1


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cache_dtype", list(CACHE_DTYPES))
def test_pools_are_views_with_the_strides_of_the_tensor(cache_dtype: str, layers: int) -> None:
    layout = layout_of(cache_dtype, torch.bfloat16)
    cache = layer_cache(layout, layer=layers - 1, layers=layers)
    pools = layer_pools(cache, layout, torch.ones(1))
    assert pools.page_size == P
    assert pools.blocks.data_ptr() == cache.data_ptr()
    assert pools.blocks.stride(0) == cache.stride(0)
    assert pools.blocks.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    if row_bytes(layout) == 644 and pools.scales is not None:
        assert pools.scales.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        assert pools.scales.stride(0) == cache.stride(0) // 4


def test_per_tensor_scale_is_read_not_copied() -> None:
    layout, sigma = get_layout("fp8_flat"), torch.tensor(0.5)
    pools = layer_pools(layer_cache(layout), layout, sigma)
    sigma.fill_(2.0)  # the engine may calibrate it later
    assert pools.scales is not None
    assert bool((pools.scales == 2.0).all())


@pytest.mark.parametrize(
    ("name", "cache", "scale", "sentence"),
    [
        ("bf16", torch.zeros(BLOCKS, P * 576), None, r"kv_cache: expected \[\*, \*, \*\]; got"),
        ("bf16", torch.zeros(BLOCKS, P, 512, dtype=torch.bfloat16), None, r"kv_blocks: expected .*576\] bfloat16"),
        ("fp8_flat", torch.zeros(BLOCKS, P, 576, dtype=torch.uint8), None, "k_scale: expected one float32"),
        ("fp8_flat", torch.zeros(BLOCKS, P, 576, dtype=torch.uint8), torch.ones(2), r"k_scale: expected \[1\] float32"),
        ("fp8_rope_bf16", torch.zeros(BLOCKS, P, 640, dtype=torch.uint8), None, r"expected \[\*, \*, 644\] bytes"),
        ("fp8_rope_bf16", torch.zeros(BLOCKS, P, 644), None, r"expected \[\*, \*, 644\] bytes"),
        ("fp8_rope_bf16", torch.zeros(BLOCKS, P, 648, dtype=torch.uint8)[..., :644], None, "bytes are adjacent"),
        (
            "fp8_rope_bf16",
            torch.zeros(BLOCKS * (P * 644 + 2), dtype=torch.uint8).as_strided((BLOCKS, P, 644), (P * 644 + 2, 644, 1)),
            None,
            "start at multiples of 4 bytes",
        ),
    ],
)  # fmt: skip
def test_caches_that_are_not_of_the_layout(name: str, cache: Tensor, scale: Tensor | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        layer_pools(cache, get_layout(name), scale)


# -- steps


def test_cache_lengths_in_a_buffer_that_stays() -> None:
    """A decode row, a chunk, a new prompt, the padding of a graph, and padding that still has a query token."""
    buffer = CacheLengths(8, "cpu")
    whole = buffer.write(int32(*[99] * 8), int32(*[0] * 9))
    lengths = buffer.write(int32(8, 40, 6, 0, 0), int32(0, 1, 27, 33, 33, 34))
    assert lengths.tolist() == [7, 14, 0, 0, -1]
    assert lengths.data_ptr() == whole.data_ptr()
    assert whole[5:].tolist() == [99, 99, 99]


def test_cache_lengths_of_single_token_steps() -> None:
    """One operation serves; the padding of a graph, without a query token, becomes -1 and stays empty."""
    buffer = CacheLengths(4, "cpu")
    lengths = buffer.write(int32(8, 1, 0), int32(0, 1, 2, 2), max_query_length=1)
    assert lengths.tolist() == [7, 0, -1]
    assert lengths.data_ptr() == buffer.write(int32(8, 1, 0), int32(0, 1, 2, 2)).data_ptr()


def test_a_step_makes_no_tensor_that_outlives_it() -> None:
    """A captured graph would have replayed with ones of another step's: they came from a cache of up to 1,024 device
    tensors, and one first made inside a capture holds only what its replay fills."""
    buffer = CacheLengths(4, "cpu")
    made = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(str(function))
            return function(*args, **(kwargs or {}))

    seq_lens, starts = int32(8, 1, 0), int32(0, 1, 2, 2)
    with Recorder():
        buffer.write(seq_lens, starts, max_query_length=1)
    assert made == ["aten.slice.Tensor", "aten.sub.out"]


def test_too_many_requests_for_the_buffer() -> None:
    with pytest.raises(ValueError, match=r"seq_lens: expected at most 1 requests; got \[2\] int32"):
        CacheLengths(1, "cpu").write(int32(1, 1), int32(0, 1, 2))


def test_tables_are_the_engines_memory() -> None:
    """A row-strided slice of the persistent buffer becomes uint32 of the same memory."""
    persistent = torch.zeros(6, 12, dtype=torch.int32)
    rows = rows_of(int32(0, 1, 2), int32(3, 4), persistent[:, :8])
    assert rows.lookup_table.dtype == torch.uint32
    assert rows.lookup_table.data_ptr() == persistent.data_ptr()
    assert (rows.lookup_table.shape, rows.lookup_table.stride()) == ((2, 8), (12, 1))


def test_a_table_of_wider_ids_is_refused() -> None:
    """A table of int64 was seen as uint32 with twice the columns: every second id was page 0, without a word."""
    with pytest.raises(ValueError, match=r"block_table: expected \[\*, \*\] int32 or uint32; got \[2, 8\] int64\."):
        rows_of(int32(0, 1, 2), int32(3, 4), torch.zeros(2, 8, dtype=torch.int64))


def test_values_of_a_step() -> None:
    layout = get_layout("fp8_rope_bf16")
    pools = layer_pools(layer_cache(layout), layout)
    rows = step_rows(
        int32(7, 0), torch.zeros(2, 8, dtype=torch.int32), int32(0, 1, 27), num_tokens=32, max_query_length=26,
        max_seq_len=40, num_decodes=1, num_decode_tokens=1, num_partitions=4,
    )  # fmt: skip
    values = rows.values(pools)
    assert values.lookup_table is rows.lookup_table
    assert values.scales_lookup_table is rows.lookup_table
    assert values.mixed_step_split.tolist() == [1, 1]
    assert values.attention_dispatch_metadata.tolist() == [2, 26, 4]
    assert (values.max_prompt_length, values.max_cache_length) == (26, 40)
    assert values.dispatch(26).num_partitions == 4


def test_more_decodes_than_requests() -> None:
    with pytest.raises(ValueError, match=r"num_decodes: expected 0 to 1, the requests of cache_lengths; got 2"):
        step_rows(
            int32(0), torch.zeros(1, 4, dtype=torch.int32), int32(0, 2), num_tokens=2, max_query_length=2,
            max_seq_len=2, num_decodes=2, num_decode_tokens=2,
        )  # fmt: skip


# -- both together: what the engine stores is what it attends to


def slots(table: Tensor, request: int, first: int, last: int) -> list[int]:
    return [int(table[request, t // P]) * P + t % P for t in range(first, last)]


@pytest.mark.parametrize("cache_dtype", ["auto", *QUANTISED])
def test_store_by_slots_then_attend(cache_dtype: str) -> None:
    """A decode row of 21 keys, a prompt of 18 and a padding row, in layer 1 of interleaved layers.

    The answer is dense attention over the rows that the layout gives back. Nothing else of the buffer changes.
    """
    torch.manual_seed(0)
    layout = layout_of(cache_dtype, torch.float32)
    cache = layer_cache(layout, layer=1, layers=2)
    before = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).clone()
    k_scale = torch.tensor([0.03])
    pools = layer_pools(cache, layout, k_scale)
    table = int32(5, 2, 0, 0, 3, 6, 0, 0, 0, 0, 0, 0).view(3, 4)
    kv_lens = [21, 18]
    latent, rope = torch.randn(39, 512), torch.randn(39, 64)
    mapping = torch.tensor([*slots(table, 0, 0, 21), *slots(table, 1, 0, 18), -1])
    padded = (torch.cat((x, x[:1])) for x in (latent, rope))
    pagedmla.store(*padded, store_values(pools), 0, slot_mapping=mapping, layout=layout)
    expect_only_these_written(cache, before, pools, mapping)

    starts = int32(0, 1, 19, 19)
    rows = rows_of(starts, int32(*kv_lens, 0), table, tokens=20)
    q = torch.randn(20, 3, 576)
    out, lse = pagedmla.attend(q, rows.values(pools), 0, sm_scale=0.1, query_start_loc=starts, layout=layout)

    sigma = k_scale.expand(39, 1) if layout.name == "fp8_flat" else None
    made = layout.quantize(latent, rope, sigma=sigma)
    keys = layout.dequantize(made.values, made.scales).split(kv_lens)
    for request, (first, last) in enumerate([(0, 1), (1, 19)]):
        n, k = last - first, keys[request]
        logits = torch.einsum("thd,kd->htk", q[first:last], k) * 0.1
        unseen = torch.arange(len(k)) > torch.arange(len(k) - n, len(k)).unsqueeze(1)
        logits.masked_fill_(unseen, -torch.inf)
        expected = torch.einsum("htk,kd->thd", logits.softmax(-1), k[:, :512])
        torch.testing.assert_close(out[first:last], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[first:last], logits.logsumexp(-1).T, rtol=1e-5, atol=1e-5)
    assert bool((out[19:] == 0).all())
    assert bool((lse[19:] == -torch.inf).all())


def expect_only_these_written(cache: Tensor, before: Tensor, pools: LayerPools, mapping: Tensor) -> None:
    written = torch.zeros_like(before, dtype=torch.bool)
    base, owner = cache.storage_offset() * cache.element_size(), [mapping // P, mapping % P]
    for tensor in (pools.blocks, pools.scales):
        if tensor is None or tensor.untyped_storage().data_ptr() != cache.untyped_storage().data_ptr():
            continue
        size = tensor.element_size()
        for page, slot in zip(*(index[mapping >= 0].tolist() for index in owner)):
            start = (tensor.storage_offset() + page * tensor.stride(0) + slot * tensor.stride(3)) * size
            written[start : start + tensor.shape[5] * size] = True
    assert base > 0
    after = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    assert torch.equal(after[~written], before[~written])
