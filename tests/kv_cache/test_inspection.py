"""The inspector on caches whose state is known: sound ones of every layout, each kind of damage, and garbage.

The cache is small and scrambled: pages of 4, requests of 9 (three pages, the last with one token), 4 (one full page)
and 0 tokens, two id spaces in different random orders. All memory is NaN before the tokens are stored, so a report that
reads a page, slot or column it shouldn't isn't clean.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from pagedmla import KVCacheInputsPerDevice, get_layout, per_tensor_scale, store
from pagedmla.kv_cache.cache_report import CacheReport, Finding, FindingKind
from pagedmla.kv_cache.inspection import inspect
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.kv_cache.page_pool import Page, PagePool
from pagedmla.kv_cache.paged_tensor import raw_view

LENGTHS = {"ada": 9, "bob": 4, "eve": 0}
PAGE_SIZE, PAGES, SCALE_PAGES, LAYERS = 4, 16, 24, 2
FLAGSHIP = get_layout("fp8_rope_bf16")
LAYOUTS = {
    "bf16": get_layout("bf16"),
    "fp8_flat": get_layout("fp8_flat"),
    "fp8_flat-g128": get_layout("fp8_flat", granularity=128),
    "fp8_rope_bf16": FLAGSHIP,
    "fp8_rope_bf16_prescaled": get_layout("fp8_rope_bf16_prescaled"),
    "fp8_ds_mla": get_layout("fp8_ds_mla"),
}


class Cache:
    """A filled pool, and the values of a step in which nothing is new; `move` and friends break it."""

    def __init__(self, layout: CacheLayout = FLAGSHIP, one_id_space: bool = False, seed: int = 5, **changes: object):
        paged = layout.scales_per_token > 0 and not one_id_space and "sigma" not in changes
        self.pool = PagePool(
            layout,
            num_layers=LAYERS,
            page_size=PAGE_SIZE,
            num_pages=PAGES,
            num_scale_pages=SCALE_PAGES if paged else None,
            shuffle_seed=seed,
            **changes,
        )
        self.layout = layout
        raw_view(self.pool.blocks).view(torch.uint8).fill_(0xFF)
        if self.pool.scales is not None and "sigma" not in changes:
            raw_view(self.pool.scales).view(torch.uint8).fill_(0xFF)
        for name in LENGTHS:
            self.pool.allocate(name)
        self.generator = torch.Generator().manual_seed(seed)
        self.append(LENGTHS)

    def append(self, tokens: dict[str, int]) -> None:
        step = self.pool.values(list(tokens), list(tokens.values()))
        total = sum(tokens.values())
        for layer in range(LAYERS):
            latent = torch.randn(total, self.layout.latent, generator=self.generator)
            rope = torch.randn(total, self.layout.rope, generator=self.generator)
            store(latent, rope, step.values, layer, query_start_loc=step.query_start_loc, layout=self.layout)
        self.pool.advance(list(tokens), list(tokens.values()))
        self.values = self.pool.values(list(LENGTHS), [0] * len(LENGTHS)).values

    def page(self, name: str, column: int) -> Page:
        return self.pool.pages(name)[column]

    def entry(self, table: str, row: int, column: int, page: int) -> None:
        """Write one entry of a copy of a table."""
        changed = getattr(self.values, table).view(torch.int32).clone()
        changed[row, column] = page
        self.values = replace(self.values, **{table: changed})

    def spare(self) -> Page:
        """A pair of pages that no request has."""
        held = [page for name in LENGTHS for page in self.pool.pages(name)]
        value = min(set(range(PAGES)) - {page.value for page in held})
        return Page(value, min(set(range(SCALE_PAGES)) - {page.scale for page in held} - {value}))

    def copy_values(self, source: int, target: int) -> None:
        raw_view(self.pool.blocks)[target] = raw_view(self.pool.blocks)[source]

    def copy_scales(self, source: int, target: int) -> None:
        raw_view(self.pool.scales)[target] = raw_view(self.pool.scales)[source]

    def inspect(self, **options: object) -> CacheReport:
        return inspect(self.values, layout=self.layout, **{"request_names": list(LENGTHS), **options})


def kinds(report: CacheReport) -> list[str]:
    return [finding.kind for finding in report.findings]


def only(report: CacheReport) -> Finding:
    assert len(report.findings) == 1, report.findings
    return report.findings[0]


# -- sound caches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_sound_cache_of_every_layout(layout: CacheLayout) -> None:
    cache = Cache(layout)
    report = cache.inspect()
    assert report.findings == ()
    assert report.ok
    assert [(request.name, request.kv_len) for request in report.requests] == list(LENGTHS.items())
    assert [page.fill for page in report.pages()] == [4, 4, 1, 4]
    for request in report.requests:
        held = cache.pool.pages(request.name)
        assert [page.value_page for page in request.pages] == [page.value for page in held]
        paged = report.pool.scales == "paged"
        assert [page.scale_page for page in request.pages] == [page.scale if paged else None for page in held]
    storage = {"bf16": "none", "fp8_ds_mla": "inline"}.get(layout.name, "paged")
    assert report.pool.scales == storage
    for health in report.layers:
        assert health.live_slots == 13
        assert 2.5 < health.amax < 6  # the largest of 7,488 standard normal numbers
        assert health.nan_slots == health.zero_scales == health.negative_scales == health.non_finite_scales == 0
        if layout.quantised:
            assert 1 / layout.width <= health.saturated < 0.02
            assert health.sigma_min <= health.sigma_max < 6 / 448
        else:
            assert (health.saturated, health.sigma_min, health.sigma_max) == (None, None, None)


def test_dead_pages_are_all_the_others() -> None:
    cache = Cache()
    report = cache.inspect()
    held = {page for name in LENGTHS for page in cache.pool.pages(name)}
    for ranges, total, used in (
        (report.pool.dead_value_pages, PAGES, {page.value for page in held}),
        (report.pool.dead_scale_pages, SCALE_PAGES, {page.scale for page in held}),
    ):
        dead = [page for first, last in ranges for page in range(first, last + 1)]
        assert dead == sorted(set(range(total)) - used)


def test_health_by_hand() -> None:
    """Two tokens: 224 in every column (sigma 0.5, every code 448), and 1.75 in one column beside zeros (1 / 256)."""
    pool = PagePool(FLAGSHIP, num_layers=1, page_size=2, num_pages=1)
    pool.allocate("a")
    step = pool.values(["a"], [2])
    latent = torch.zeros(2, 512)
    latent[0], latent[1, 7] = 224.0, 1.75
    store(latent, torch.ones(2, 64), step.values, 0, query_start_loc=step.query_start_loc, layout=FLAGSHIP)
    (health,) = inspect(step.values, layout=FLAGSHIP, query_start_loc=step.query_start_loc).layers
    assert (health.amax, health.sigma_min, health.sigma_max) == (224.0, 2.0**-8, 0.5)
    assert health.saturated == 513 / 1024


def test_a_shared_page_is_counted_once() -> None:
    cache = Cache()
    alone = cache.inspect()
    cache.pool.fork("ada", "fork", 6)
    names = ["ada", "bob", "eve", "fork"]
    values = cache.pool.values(names, [0] * 4).values
    report = inspect(values, layout=FLAGSHIP, request_names=names)
    assert report.findings == ()
    assert report.layers == alone.layers
    assert [page.shared_with for page in report.requests[0].pages] == [(3,), (3,), ()]
    assert [(page.fill, page.shared_with) for page in report.requests[3].pages] == [(4, (0,)), (2, (0,))]


def test_this_steps_tokens_count_with_query_start_loc() -> None:
    cache = Cache()
    step = cache.pool.values(["bob"], [2])
    assert inspect(step.values, layout=FLAGSHIP).requests[0].kv_len == 4
    with_step = inspect(step.values, layout=FLAGSHIP, query_start_loc=step.query_start_loc)
    assert with_step.requests[0].kv_len == 6
    assert sorted(kinds(with_step)) == ["nan_values", "non_finite_scale"]  # the new page isn't stored yet
    assert inspect(step.values, layout=FLAGSHIP, kv_lens=[3]).requests[0].pages[0].fill == 3


def test_chosen_layers_only() -> None:
    cache = Cache()
    raw_view(cache.pool.scales)[:, :, 0] = 0
    assert [layer.layer for layer in cache.inspect(layers=[1]).layers] == [1]
    assert cache.inspect(layers=[1]).ok
    assert not cache.inspect(layers=[1, 0]).ok


def test_json_and_back() -> None:
    cache = Cache()
    cache.entry("lookup_table", 0, 1, 0x7FFFFFFF)
    report = cache.inspect()
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert json.loads(text)["ok"] is False
    assert CacheReport.from_dict(json.loads(text)) == report


def test_the_decoy_scale_page_is_not_read() -> None:
    """One value page, three scale pages, lookup_table [[0]], scales_lookup_table [[2]]: page 0 and 1 are decoys."""
    pool = PagePool(FLAGSHIP, num_layers=1, page_size=2, num_pages=1, num_scale_pages=3)
    pool.allocate("a")
    step = pool.values(["a"], [2])
    tables = {"lookup_table": torch.tensor([[0]]), "scales_lookup_table": torch.tensor([[2]])}
    values = replace(step.values, **{name: table.to(torch.int32) for name, table in tables.items()})
    pool.scales.fill_(torch.nan)
    store(torch.randn(2, 512), torch.randn(2, 64), values, 0, query_start_loc=step.query_start_loc, layout=FLAGSHIP)
    report = inspect(values, layout=FLAGSHIP, query_start_loc=step.query_start_loc)
    assert report.findings == ()
    assert [(page.value_page, page.scale_page) for page in report.pages()] == [(0, 2)]
    pool.scales[2] = torch.nan
    assert only(inspect(values, layout=FLAGSHIP, query_start_loc=step.query_start_loc)).kind == "non_finite_scale"


# -- scales left behind ----------------------------------------------------------------------------------------------


def test_moved_with_its_scales_is_sound() -> None:
    cache = Cache()
    before = cache.inspect()
    old, new = cache.page("ada", 1), cache.spare()
    cache.pool.copy_pages([(old, new)])
    cache.entry("lookup_table", 0, 1, new.value)
    cache.entry("scales_lookup_table", 0, 1, new.scale)
    assert cache.inspect(before=before).findings == ()


def test_scales_may_stay_where_they_have_ids_of_their_own() -> None:
    cache = Cache()
    before = cache.inspect()
    old, new = cache.page("ada", 1), cache.spare()
    cache.copy_values(old.value, new.value)
    cache.entry("lookup_table", 0, 1, new.value)
    assert cache.inspect(before=before).findings == ()


@pytest.mark.parametrize("column", [1, 2])
def test_left_behind_against_an_earlier_report(column: int) -> None:
    """The value page moves, its new scale page holds another page's sound scales: nothing but the past tells.

    Column 2 has one token before and four after: only the slots of before are compared.
    """
    cache = Cache()
    before = cache.inspect()
    old, new = cache.page("ada", column), cache.spare()
    cache.append({"ada": 3})
    cache.copy_values(old.value, new.value)
    cache.copy_scales(cache.page("bob", 0).scale, new.scale)
    cache.entry("lookup_table", 0, column, new.value)
    cache.entry("scales_lookup_table", 0, column, new.scale)
    assert cache.inspect().findings == ()
    found = only(cache.inspect(before=before))
    assert (found.kind, found.severity, found.row, found.column) == ("scales_left_behind", "error", 0, column)
    assert found.sentence == (
        f"kv_scales: row 0 (ada), column {column}: value page {new.value} holds the bytes that value page {old.value} "
        f"held in the earlier report, without their scales: those were in scale page {old.scale}, and scale page "
        f"{new.scale} holds others"
    )


def test_left_behind_in_one_id_space() -> None:
    """The id moves, and with it what both tables mean; only the values were copied."""
    cache = Cache(one_id_space=True)
    before = cache.inspect()
    old, new = cache.page("ada", 0), cache.spare()
    cache.copy_values(old.value, new.value)
    cache.copy_scales(cache.page("bob", 0).scale, new.value)
    cache.entry("lookup_table", 0, 0, new.value)
    found = only(cache.inspect(before=before))
    assert (found.kind, found.value_page, found.scale_page) == ("scales_left_behind", new.value, new.value)


def test_left_behind_while_rows_changed_places() -> None:
    """Rows come in another order and without names: full pages are known again by their bytes."""
    cache = Cache()
    before = inspect(cache.values, layout=FLAGSHIP)
    cache.copy_scales(cache.page("bob", 0).scale, cache.page("ada", 1).scale)
    shuffled = cache.pool.values(["bob", "eve", "ada"], [0, 0, 0]).values
    found = only(inspect(shuffled, layout=FLAGSHIP, before=before))
    assert (found.kind, found.row, found.column) == ("scales_left_behind", 2, 1)


def test_inline_scales_that_changed_under_their_values() -> None:
    cache = Cache(LAYOUTS["fp8_ds_mla"])
    before = cache.inspect()
    page = cache.page("bob", 0).value
    cache.pool.blocks.view(torch.uint8)[page, 0, 1, 2, 0, 512:516].view(torch.float32).mul_(2)
    found = only(cache.inspect(before=before))
    assert found.kind == "scales_left_behind"
    assert found.sentence.endswith("without their scales: the ones inside it are others")


def test_left_behind_on_a_page_that_was_never_written() -> None:
    """Without an earlier report: the fresh scale page is still zero."""
    cache = Cache()
    old, new = cache.page("ada", 1), cache.spare()
    cache.copy_values(old.value, new.value)
    cache.pool.scales[new.scale] = 0
    cache.entry("lookup_table", 0, 1, new.value)
    cache.entry("scales_lookup_table", 0, 1, new.scale)
    found = only(cache.inspect())
    assert found.sentence == (
        f"kv_scales: row 0 (ada), column 1: scale page {new.scale} (value page {new.value}) has a scale of 0 in 8 of 8 "
        "live slots, first in layer 0, slot 0"
    )


def test_left_behind_as_a_pair_torn_apart() -> None:
    """The value page moved and its scales entry was pointed at another request's page."""
    cache = Cache()
    ada, bob = cache.page("ada", 1), cache.page("bob", 0)
    cache.entry("scales_lookup_table", 0, 1, bob.scale)
    found = only(cache.inspect())
    assert (found.kind, found.severity) == ("scale_page_shared", "error")
    assert found.sentence == (
        f"scales_lookup_table: scale page {bob.scale} goes with value page {ada.value} at row 0 (ada), column 1 and "
        f"with value page {bob.value} at row 1 (bob), column 0"
    )


def test_one_value_page_with_two_scale_pages() -> None:
    cache = Cache()
    cache.pool.fork("ada", "fork")
    names = ["ada", "fork"]
    cache.values = cache.pool.values(names, [0, 0]).values
    new = cache.spare()
    cache.copy_scales(cache.page("ada", 1).scale, new.scale)
    cache.entry("scales_lookup_table", 1, 1, new.scale)
    found = only(cache.inspect(request_names=names))
    assert (found.kind, found.value_page, found.scale_page) == (
        "value_page_torn",
        cache.page("ada", 1).value,
        new.scale,
    )


@pytest.mark.parametrize(("factor", "seen"), [(2.0**7, True), (2.0**-7, True), (2.0**5, False)])
def test_scales_of_another_size_are_a_warning(factor: float, seen: bool) -> None:
    cache = Cache()
    cache.pool.scales[cache.page("ada", 1).scale, 0, 1] *= factor
    report = cache.inspect()
    assert report.ok
    assert kinds(report) == (["scale_size"] if seen else [])
    if seen:
        found = only(report)
        assert (found.severity, found.row, found.column, found.layer) == ("warning", 0, 1, 1)
        assert report.warnings == (found,)
        assert "in layer 1 its median scale is 2^" in found.sentence


# -- bad scales and values -------------------------------------------------------------------------------------------

BAD_SCALES = {
    "zero_scale": (0.0, "a scale of 0"),
    "negative_scale": (-1.0, "a negative scale"),
    "non_finite_scale": (torch.nan, "a NaN or infinite scale"),
    "floor_scale": (2.0**-100, "the scale of an all-zero row beside values that aren't zero"),
}


@pytest.mark.parametrize("kind", BAD_SCALES)
def test_bad_scale(kind: str) -> None:
    scale, words = BAD_SCALES[kind]
    cache = Cache()
    page = cache.page("ada", 0)
    cache.pool.scales[page.scale, 0, 1, 3] = scale
    report = cache.inspect()
    found = only(report)
    assert (found.kind, found.layer, found.row, found.column) == (kind, 1, 0, 0)
    assert found.sentence == (
        f"kv_scales: row 0 (ada), column 0: scale page {page.scale} (value page {page.value}) has {words} in 1 of 8 "
        "live slots, first in layer 1, slot 3"
    )
    health = report.layers[1]
    counted = {"zero_scale": health.zero_scales, "negative_scale": health.negative_scales}
    assert counted.get(kind, health.non_finite_scales if kind == "non_finite_scale" else 1) == 1


def test_the_floor_is_right_for_a_row_of_zeros() -> None:
    pool = PagePool(FLAGSHIP, num_layers=1, page_size=2, num_pages=1)
    pool.allocate("a")
    step = pool.values(["a"], [2])
    store(
        torch.zeros(2, 512), torch.randn(2, 64), step.values, 0, query_start_loc=step.query_start_loc, layout=FLAGSHIP
    )
    assert inspect(step.values, layout=FLAGSHIP, query_start_loc=step.query_start_loc).findings == ()


def test_bad_scale_behind_kv_len_is_nobodys() -> None:
    cache = Cache()
    cache.pool.scales[cache.page("ada", 2).scale, :, :, 1:] = 0
    assert cache.inspect().findings == ()


def test_bad_inline_scale() -> None:
    cache = Cache(LAYOUTS["fp8_ds_mla"])
    page = cache.page("bob", 0).value
    cache.pool.blocks.view(torch.uint8)[page, 0, 0, 1, 0, 524:528] = 0
    found = only(cache.inspect())
    assert found.sentence == (
        f"kv_blocks: row 1 (bob), column 0: value page {page} (scales inside it) has a scale of 0 in 1 of 8 live "
        "slots, first in layer 0, slot 1"
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("part", ["latent", "rope"])
def test_nan_in_a_live_row(layout: CacheLayout, part: str) -> None:
    cache = Cache(layout)
    page = cache.page("bob", 0).value
    collection = cache.values.collection(layout.pool_granularity)
    planes = layout.planes(collection.value_pool, collection.scale_pool, 1)
    raw = raw_view(getattr(planes, part))
    raw[page, 2, 5] = 0x7F if raw.dtype == torch.uint8 else 0x7FC0
    report = cache.inspect()
    found = only(report)
    assert found.sentence == (
        f"kv_blocks: row 1 (bob), column 0: value page {page} has NaN among its values in 1 of 8 live slots, first in "
        "layer 1, slot 2"
    )
    assert [layer.nan_slots for layer in report.layers] == [0, 1]


def test_one_scale_for_the_tensor() -> None:
    sigma = torch.tensor([0.01, 0.02])
    cache = Cache(get_layout("fp8_flat"), sigma=sigma)
    report = cache.inspect()
    assert report.findings == ()
    assert report.pool.scales == "per tensor"
    assert report.pool.num_scale_pages is None
    assert {page.scale_digest for page in report.pages()} == {None}
    assert [layer.sigma_max for layer in report.layers] == pytest.approx([0.01, 0.02])
    sigma[1] = -0.02
    assert only(cache.inspect()).sentence == "kv_scales: the one scale of layer 1 is negative"
    sigma[1] = torch.inf
    assert only(cache.inspect()).kind == "non_finite_scale"


# -- garbage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wild", [0xFFFFFFFF, PAGES, SCALE_PAGES])
@pytest.mark.parametrize("dtype", [torch.uint32, torch.int32])
def test_wild_ids_in_live_entries(wild: int, dtype: torch.dtype) -> None:
    cache = Cache()
    wild_entry = torch.tensor(wild, dtype=torch.int64).to(torch.int32)
    table = torch.full((3, 24), int(wild_entry), dtype=torch.int32).view(dtype)
    cache.values = replace(cache.values, lookup_table=table, scales_lookup_table=table.clone())
    report = cache.inspect()
    shown = -1 if dtype == torch.int32 and wild == 0xFFFFFFFF else wild
    outside_scales = wild != PAGES
    assert kinds(report) == ["id_out_of_range"] * (8 if outside_scales else 4)
    assert report.problems[0].sentence == (
        f"lookup_table: row 0 (ada), column 0 holds page id {shown}; kv_blocks has {PAGES} pages"
    )
    if outside_scales:
        assert report.problems[-1].sentence == (
            f"scales_lookup_table: row 1 (bob), column 0 holds page id {shown}; kv_scales has {SCALE_PAGES} pages"
        )
    assert {page.value_digest for page in report.pages()} == {None}


def test_tables_without_columns() -> None:
    cache = Cache()
    empty = torch.zeros(3, 0, dtype=torch.int32)
    cache.values = replace(cache.values, lookup_table=empty)
    report = cache.inspect()
    assert kinds(report) == ["table_width", "table_width"]
    assert report.problems[0].sentence == (
        "lookup_table: row 0 (ada) needs 3 columns for 9 tokens in pages of 4; the table has 0"
    )
    assert list(report.pages()) == []


def test_a_scales_table_that_is_too_narrow() -> None:
    cache = Cache()
    narrow = cache.values.scales_lookup_table.view(torch.int32)[:, :2]
    cache.values = replace(cache.values, scales_lookup_table=narrow)
    report = cache.inspect()
    assert only(report).sentence.startswith("scales_lookup_table: row 0 (ada) needs 3 columns")
    assert len(report.requests[0].pages) == 2


def test_no_requests() -> None:
    cache = Cache()
    values = cache.pool.values([], []).values
    report = inspect(values, layout=FLAGSHIP)
    assert report.ok
    assert report.requests == ()
    assert report.pool.dead_value_pages == ((0, PAGES - 1),)


def test_garbage_lengths() -> None:
    cache = Cache()
    lengths = torch.tensor([2**31 - 1, -7, -1], dtype=torch.int32)
    cache.values = replace(cache.values, cache_lengths=lengths)
    report = cache.inspect()
    assert {"negative_length", "table_width", "bound"} <= set(kinds(report))
    assert "cache_lengths: row 1 (bob) has -7 tokens" in [finding.sentence for finding in report.findings]
    assert not any(finding.row == 2 for finding in report.findings)  # -1: a padding row of a captured graph


def test_random_garbage_never_raises() -> None:
    """Tables of random bits, and of small ids that hit pages, over a pool of random bytes."""
    generator = torch.Generator().manual_seed(1)
    cache = Cache()
    raw_view(cache.pool.blocks).random_(generator=generator)
    raw_view(cache.pool.scales).random_(generator=generator)
    before = cache.inspect()
    for low, high in ((-(2**31), 2**31), (-1, 26)):
        for _ in range(5):
            tables = [torch.randint(low, high, (3, 5), generator=generator).to(torch.int32) for _ in range(2)]
            lengths = torch.randint(-3, 30, (3,), generator=generator).to(torch.int32)
            starts = torch.randint(-2, 9, (4,), generator=generator).to(torch.int32)
            cache.values = replace(
                cache.values, lookup_table=tables[0], scales_lookup_table=tables[1], cache_lengths=lengths
            )
            report = cache.inspect(query_start_loc=starts, before=before)
            json.dumps(report.to_dict(), allow_nan=False)


def test_page_twice_in_a_row_and_out_of_place() -> None:
    cache = Cache()
    first, bob = cache.page("ada", 0), cache.page("bob", 0)
    for table, page in (("lookup_table", first.value), ("scales_lookup_table", first.scale)):
        cache.entry(table, 0, 1, page)
    found = only(cache.inspect())
    assert (found.kind, found.severity) == ("repeated_page", "error")
    assert found.sentence == f"lookup_table: row 0 (ada) has value page {first.value} in columns 0 and 1"
    for table, page in (("lookup_table", bob.value), ("scales_lookup_table", bob.scale)):
        cache.entry(table, 0, 1, page)
    report = cache.inspect()
    assert report.ok
    assert only(report).sentence == (
        f"lookup_table: value page {bob.value} is column 1 of row 0 (ada) and column 0 of row 1 (bob); keys carry "
        "their positions"
    )


def test_bounds_that_are_too_small() -> None:
    cache = Cache()
    cache.values = replace(cache.values, max_cache_length=8, max_prompt_length=0)
    starts = torch.tensor([0, 0, 0, 0], dtype=torch.int32)
    assert only(cache.inspect(query_start_loc=starts)).sentence == (
        "max_cache_length: row 0 (ada) has 9 tokens; the bound is 8"
    )
    report = cache.inspect(query_start_loc=torch.tensor([0, 0, 0, 1], dtype=torch.int32), kv_lens=[8, 4, 0])
    assert only(report).sentence == "max_prompt_length: row 2 (eve) brings 1 token; the bound is 0"


def test_lengths_of_the_caller_are_named() -> None:
    """A negative entry of kv_lens was told as one of cache_lengths, which holds others."""
    report = Cache().inspect(kv_lens=[9, -3, 0])
    assert [finding.sentence for finding in report.findings] == ["kv_lens: row 1 (bob) has -3 tokens"]


def test_query_starts_that_fall() -> None:
    report = Cache().inspect(query_start_loc=torch.tensor([0, 3, 1, 1], dtype=torch.int32), kv_lens=[9, 4, 0])
    assert report.problems[0].sentence == "query_start_loc: expected 0 first, then rising or equal; got [0, 3, 1, 1]"


# -- arguments -------------------------------------------------------------------------------------------------------


def refused(cache: Cache, **options: object) -> str:
    with pytest.raises((ValueError, IndexError)) as refusal:
        cache.inspect(**options)
    return str(refusal.value)


def test_arguments_that_do_not_fit() -> None:
    cache = Cache()
    assert refused(cache, layers=[2]) == "layers: 2 is out of range for a cache of 2 layers"
    assert refused(cache, layers=[0, 0]) == "layers: expected each layer once; got [0, 0]."  # its slots counted twice
    assert refused(cache, layers=[]) == "layers: expected at least one layer; got []."
    assert refused(cache, request_names=["a", "b", "a"]) == (
        "request_names: expected 3 different names, one for each row; got ['a', 'b', 'a']."
    )
    assert refused(cache, kv_lens=[1]) == "kv_lens: expected [3]; got [1] int64."
    before = cache.inspect(layers=[0])
    assert refused(cache, before=before) == "before: expected a report of layers [0, 1]; got one of [0]."
    other = Cache(get_layout("bf16")).inspect()
    assert refused(cache, before=other) == "before: expected a report of layout fp8_rope_bf16; got one of bf16."


def test_a_per_tensor_view_made_elsewhere() -> None:
    """Engines expand their own scalar; the layout's helper and the pool agree with it."""
    cache = Cache(get_layout("fp8_flat"), sigma=torch.tensor([0.01]))
    values = replace(cache.values, kv_scales=per_tensor_scale(torch.tensor([0.01]), cache.pool.blocks))
    assert isinstance(values, KVCacheInputsPerDevice)
    assert inspect(values, layout="fp8_flat").layers == cache.inspect().layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"before": 3}, "before: expected a CacheReport; got int"),
        ({"layers": 0}, "layers: expected a list of ints; got 0"),
        ({"layers": [0.0]}, r"layers: expected an int; got 0\.0"),
        ({"kv_lens": "abc"}, "kv_lens: expected a list of ints or a tensor; got 'abc'"),
        ({"kv_lens": [1.5, 1, 1]}, r"kv_lens: expected an int; got 1\.5"),
        ({"kv_lens": torch.ones(3)}, r"kv_lens: expected integers; got \[3\] float32"),
    ],
)
def test_arguments_that_are_not_of_their_kind(changes: dict[str, object], message: str) -> None:
    """They ended in errors of torch or of Python that named no argument."""
    with pytest.raises((TypeError, ValueError), match=message):
        Cache().inspect(**changes)


def test_kinds_of_findings_are_told_to_operators() -> None:
    """Programs go by a finding's kind: 16 words in three modules, which stood in no list."""
    page = (Path(__file__).parents[2] / "docs/operators.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*`) \|", page, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(get_args(FindingKind))
