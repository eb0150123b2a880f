"""The adapter on tensors as SGLang makes them: no engine is needed.

Geometry: page sizes 1 (SGLang's default), 16 and 64; requests of one token, of a page less one, of a page, of a page
and one; pages in no order, with a row of `req_to_token` that holds garbage behind a request's last token.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla.adapters.rows import store_values
from pagedmla.adapters.sglang import (
    LAYOUTS,
    Lengths,
    StepBuffers,
    check_version,
    layer_pools,
    layout_of,
    slot_bytes,
    split_slots,
)
from pagedmla.kv_cache.layouts import get_layout

CONTEXT = 200
GARBAGE = 123_456
OURS = get_layout("fp8_rope_bf16")


def req_to_token(page_size: int, lengths: dict[int, int], rows: int = 6, seed: int = 0) -> tuple[Tensor, int]:
    """Rows with so many tokens on pages in no order, and the number of pages; page 0 is nobody's."""
    pages = 1 + sum(-(-length // page_size) for length in lengths.values())
    free = (torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    table = torch.full((rows, CONTEXT), GARBAGE, dtype=torch.int32)
    table[0] = 0
    for row, length in lengths.items():
        for token in range(length):
            if token % page_size == 0:
                page = free.pop()
            table[row, token] = page * page_size + token % page_size
    return table, pages


# -- versions and names


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cpu"])
def test_the_known_version(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.231", "1.0.0", "dev", "",
                                     "0.5.23rc1", "0.5.23.dev4", "0.5.23a1+cpu", "0.5.23.1"])  # fmt: skip
def test_other_versions_are_named(version: str) -> None:
    """Pre-releases passed for the release: their interfaces may still change."""
    with pytest.raises(ImportError, match=r"sglang: expected 0\.5\.23, .*; got " + re.escape(version)):
        check_version(version)


def test_layouts_of_the_engines_pools() -> None:
    assert {dtype: layout_of(dtype).name for dtype in LAYOUTS} == LAYOUTS
    assert layout_of(torch.bfloat16, latent=256) == get_layout("bf16", latent=256)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint8])
def test_other_dtypes_are_named(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype: expected one of bfloat16, .*float8_e4m3fn; got "):
        layout_of(dtype)


# -- pools


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", LAYOUTS)
def test_pools_are_views(dtype: torch.dtype, page_size: int) -> None:
    buffer = torch.zeros(4 * page_size, 1, 576, dtype=dtype)
    pools = layer_pools(buffer, page_size, layout_of(dtype))
    assert list(pools.blocks.shape) == [4, 1, 1, page_size, 1, 576]
    assert pools.blocks.data_ptr() == buffer.data_ptr()
    assert (pools.scales is None) == (dtype != torch.float8_e4m3fn)


def test_slots_behind_the_last_whole_page_are_left_out() -> None:
    assert layer_pools(torch.zeros(70, 1, 576), 16, layout_of(torch.float32)).blocks.shape[0] == 4


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_slots_of_our_pool_hold_rows_and_scales(page_size: int) -> None:
    size = slot_bytes(OURS)
    assert size == 656
    assert size % 16 == 0
    buffer = torch.full((3 * page_size, 1, size), 0xAA, dtype=torch.uint8)
    pools = layer_pools(buffer, page_size, OURS)
    latent, rope = torch.randn(2, 512), torch.randn(2, 64)
    slots = torch.tensor([page_size, 2 * page_size])
    pagedmla.store(latent, rope, store_values(pools), 0, slot_mapping=slots, layout=OURS)
    made = OURS.quantize(latent, rope)
    assert made.scales is not None
    written = buffer[slots, 0]
    assert torch.equal(written[:, :640], made.values.view(torch.uint8))
    assert torch.equal(written[:, 640:644].view(torch.float32), made.scales)
    assert bool((written[:, 644:] == 0xAA).all())
    others = torch.ones(3 * page_size, dtype=torch.bool)
    others[slots] = False
    assert bool((buffer[others] == 0xAA).all())
    assert torch.equal(split_slots(buffer, OURS)[1][slots], made.scales)


def test_one_scale_serves_a_layer() -> None:
    scale = torch.tensor(0.25)
    buffer = torch.zeros(8, 1, 576, dtype=torch.uint8)
    pools = layer_pools(buffer, 4, layout_of(torch.float8_e4m3fn), scale)
    rows = torch.full((1, 576), 3.0)
    slots = torch.tensor([5])
    pagedmla.store(rows[:, :512], rows[:, 512:], store_values(pools), 0, slot_mapping=slots, layout=pools.layout)
    assert bool((buffer[5].view(torch.float8_e4m3fn).float() == 12.0).all())


@pytest.mark.parametrize(
    ("buffer", "layout", "scale", "sentence"),
    [
        (torch.zeros(8, 576), "bf16", None, r"kv_buffer: expected \[\*, 1, \*\]"),
        (torch.zeros(8, 1, 640, dtype=torch.uint8), "fp8_rope_bf16", None, r"kv_buffer: expected \[\*, 1, 656\] uint8"),
        (torch.zeros(8, 1, 576).to(torch.float8_e5m2), "fp8_flat", None, "kv_buffer: expected float8_e4m3fn or its b"),
        (torch.zeros(8, 1, 576, dtype=torch.uint8), "fp8_flat", torch.ones(2), r"k_scale: expected \[1\] float32"),
        (torch.zeros(8, 1, 500), "fp32", None, "kv_blocks: expected"),
    ],
)
def test_buffers_that_are_refused(buffer: Tensor, layout: str, scale: Tensor | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        layer_pools(buffer, 4, get_layout(layout), scale)


# -- steps


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tables_are_pages_of_the_first_slots(page_size: int) -> None:
    """A table of token slots taken for pages dropped another engine's backend from 0.975 to 0.005 of gsm8k."""
    lengths = {4: 1, 2: page_size - 1 or 1, 5: page_size, 1: page_size + 1}
    tokens, pages = req_to_token(page_size, lengths)
    rows = torch.tensor(list(lengths))
    seq_lens = torch.tensor(list(lengths.values()))
    made = StepBuffers(tokens, page_size, 8, CONTEXT).write(rows, seq_lens, Lengths(1, -1), CONTEXT)
    assert made.cache_lengths.tolist() == [length - 1 for length in lengths.values()]
    assert made.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert made.one_token_each
    for b, (row, length) in enumerate(lengths.items()):
        for token in range(length):
            page = int(made.lookup_table[b, token // page_size])
            assert 0 < page < pages
            assert page * page_size + token % page_size == int(tokens[row, token])


@pytest.mark.parametrize(
    ("lengths", "cached", "starts", "split"),
    [
        (Lengths(1, -1), [8, 30], [0, 1, 2], [2, 2]),  # decode
        (Lengths(1, 2), [11, 33], [0, 1, 2], [2, 2]),  # the third draft of a chain
        (Lengths(4, 0), [9, 31], [0, 4, 8], [2, 8]),  # verify
        (Lengths(4, -4), [5, 27], [0, 4, 8], [2, 8]),  # draft extend
        (Lengths.each([9, 1]), [0, 30], [0, 9, 10], [0, 0]),  # mixed: a prompt, and a decode row behind it
    ],
)
def test_what_modes_count(lengths: Lengths, cached: list[int], starts: list[int], split: list[int]) -> None:
    tokens, _ = req_to_token(16, {1: 40, 2: 40})
    made = StepBuffers(tokens, 16, 2, 64).write(torch.tensor([1, 2]), torch.tensor([9, 31]), lengths, 64)
    assert made.cache_lengths.tolist() == cached
    assert made.query_start_loc.tolist() == starts
    assert made.mixed_step_split.tolist() == split
    assert (made.num_tokens, made.max_query_length) == (starts[-1], lengths.longest())


def test_buffers_keep_their_addresses() -> None:
    tokens, _ = req_to_token(16, {1: 100, 2: 3})
    buffers = StepBuffers(tokens, 16, 4, CONTEXT)
    first = buffers.write(torch.tensor([1, 2]), torch.tensor([9, 3]), Lengths(1, -1), CONTEXT)
    second = buffers.write(torch.tensor([2, 1, 0]), torch.tensor([3, 100, 1]), Lengths(1, -1), CONTEXT)
    for name in ("cache_lengths", "lookup_table", "query_start_loc"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()
    assert second.cache_lengths.tolist() == [2, 99, 0]
    assert first.cache_lengths.tolist() == [2, 99]
    assert int(second.lookup_table[2, 0]) == 0  # padding stands on page 0


def test_tables_are_as_wide_as_the_longest_request() -> None:
    tokens, _ = req_to_token(16, {1: 33})
    arguments: tuple[Any, ...] = (torch.tensor([1]), torch.tensor([33]), Lengths(1, -1))
    assert StepBuffers(tokens, 16, 1, 33).write(*arguments, 33).lookup_table.shape == (1, 3)
    assert StepBuffers(tokens, 16, 1, 10_000).write(*arguments, 10_000).lookup_table.shape == (1, 13)


@pytest.mark.parametrize("page_size", [0, -16])
def test_pages_of_no_tokens(page_size: int) -> None:
    """A ZeroDivisionError named nothing."""
    for make in (
        lambda: layer_pools(torch.zeros(8, 1, 576), page_size, layout_of(torch.float32)),
        lambda: StepBuffers(torch.zeros(2, 8, dtype=torch.int32), page_size, 1, 8),
    ):
        with pytest.raises(ValueError, match=f"page_size: expected at least 1; got {page_size}"):
            make()


@pytest.mark.parametrize("queries", [[1], [1, 2, 3], [], [3, -1]])
def test_queries_are_counted(queries: list[int]) -> None:
    """One number for two requests was taken for both: the second's lengths were wrong, and nothing said so."""
    tokens, _ = req_to_token(16, {1: 40, 2: 40})
    wanted = r"lengths\.queries: expected 2 numbers of at least 0, one a request; got \["
    with pytest.raises(ValueError, match=wanted):
        StepBuffers(tokens, 16, 2, 64).write(torch.tensor([1, 2]), torch.tensor([9, 31]), Lengths.each(queries), 64)


def test_every_request_has_its_row() -> None:
    tokens, _ = req_to_token(16, {1: 40, 2: 40})
    with pytest.raises(ValueError, match=r"req_pool_indices: expected \[2\], as seq_lens; got \[1\] int64"):
        StepBuffers(tokens, 16, 2, 64).write(torch.tensor([1]), torch.tensor([9, 31]), Lengths(1, -1), 64)


def test_more_requests_than_buffers_hold() -> None:
    tokens, _ = req_to_token(1, {1: 3})
    with pytest.raises(ValueError, match="seq_lens: expected at most 1 requests"):
        StepBuffers(tokens, 1, 1, 8).write(torch.tensor([1, 0]), torch.tensor([3, 1]), Lengths(1, -1), 8)


@pytest.mark.parametrize("lengths", [Lengths(1, -1), Lengths(4, 0), Lengths(4, -4)])
def test_no_value_of_a_device_is_read(lengths: Lengths) -> None:
    """A meta tensor has none to read."""
    tokens = torch.zeros(6, CONTEXT, dtype=torch.int32, device="meta")
    rows, seq_lens = (torch.zeros(3, dtype=torch.int64, device="meta") for _ in range(2))
    made = StepBuffers(tokens, 16, 4, CONTEXT).write(rows, seq_lens, lengths, CONTEXT)
    assert made.lookup_table.shape == (3, 13)


@pytest.mark.parametrize("page_size", [1, 16])
def test_kernels_take_the_slots_of_our_pool(page_size: int) -> None:
    """Rows 656 bytes apart and scales 164 floats apart, through Triton's kernels as the interpreter runs them."""
    tokens, pages = req_to_token(page_size, {1: 37, 2: 18})
    buffer = torch.full((pages * page_size, 1, slot_bytes(OURS)), 0xFF, dtype=torch.uint8)  # NaN
    pools = layer_pools(buffer, page_size, OURS)
    slots = torch.cat((tokens[1, :37], tokens[2, :18])).long()
    latent, rope = torch.randn(55, 576).bfloat16().split([512, 64], 1)  # as the engine joins them
    stored = {"slot_mapping": slots, "layout": OURS}
    pagedmla.store(latent, rope, store_values(pools), 0, **stored, executor="triton")
    kernels = buffer.clone()
    buffer.fill_(0xFF)
    pagedmla.store(latent, rope, store_values(pools), 0, **stored, executor="reference")
    assert torch.equal(buffer, kernels)
    q = torch.randn(7, 4, 576).bfloat16() / 4
    lengths = Lengths.each([5, 2])
    rows = StepBuffers(tokens, page_size, 2, 40).write(torch.tensor([1, 2]), torch.tensor([37, 18]), lengths, 40)
    step = {"sm_scale": 0.1, "query_start_loc": rows.query_start_loc, "layout": OURS}
    out, lse = pagedmla.attend(q, rows.values(pools), 0, **step, executor="triton")
    expected_out, expected_lse = pagedmla.attend(q, rows.values(pools), 0, **step, executor="reference")
    torch.testing.assert_close(out, expected_out, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-3)
