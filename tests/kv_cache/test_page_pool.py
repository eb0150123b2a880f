"""The allocator against a model that knows nothing of pages: a list of stamps for each request.

Every token gets a stamp of its own, written into its row and its scale through the step's tables. After every operation
each request must still read its own stamps, from values and scales alike, and the books must balance. Pages of 4 and a
pool of 12 make partly filled, shared and exhausted pages common; 12 and 15 pages keep value ids and scale ids apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils._python_dispatch import TorchDispatchMode

from pagedmla import get_layout
from pagedmla.kv_cache.page_pool import (
    NULL_PAGE,
    ONE_PAST_END,
    OutOfPagesError,
    Page,
    PagePool,
    StepInputs,
    SwappedRequest,
    padded_columns,
)

ROW = get_layout("fp8_flat", latent=6, rope=2)  # 8 bytes: one int64 stamp
PAGE_SIZE = 4
LAYERS = 2


def make_pool(**changes: object) -> PagePool:
    settings_ = {"num_layers": LAYERS, "page_size": PAGE_SIZE, "num_pages": 12, "num_scale_pages": 15}
    return PagePool(ROW, **{**settings_, **changes})


def stamps_of(pool: PagePool) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool as stamps, [pages, layers, slots] each: int64 in the rows, float32 in the scales."""
    assert pool.scales is not None
    return pool.blocks.view(torch.int64).squeeze(-1)[:, 0, :, :, 0], pool.scales[:, 0, :, :, 0, 0]


def write(pool: PagePool, step: StepInputs, row: int, tokens: list[int]) -> None:
    """Stamp a row's new tokens, through the tables that a kernel would use."""
    values, scales = stamps_of(pool)
    table = step.values.lookup_table.view(torch.int32)
    scales_table = (
        table if step.values.scales_lookup_table is None else step.values.scales_lookup_table.view(torch.int32)
    )
    start = int(step.values.cache_lengths.view(torch.int32)[row])
    for position, stamp in enumerate(tokens, start):
        column, slot = divmod(position, pool.page_size)
        values[table[row, column], :, slot] = stamp
        scales[scales_table[row, column], :, slot] = float(stamp)


def read(pool: PagePool, request: str) -> list[int]:
    """A request's stamps; its two pools and all layers must agree."""
    values, scales = stamps_of(pool)
    found = []
    for position in range(pool.tokens(request)):
        page, slot = pool.pages(request)[position // pool.page_size], position % pool.page_size
        copies = {*values[page.value, :, slot].tolist(), *(int(x) for x in scales[page.scale, :, slot].tolist())}
        assert len(copies) == 1, f"token {position} of {request} reads {copies}"
        found.append(copies.pop())
    return found


class PoolAgainstModel(RuleBasedStateMachine):
    """Random lives of requests. `model` maps a request to its stamps, `swapped` those on the host."""

    @initialize(
        sentinel=st.sampled_from([ONE_PAST_END, NULL_PAGE]),
        num_scale_pages=st.sampled_from([None, 9, 15]),
        seed=st.sampled_from([None, 0, 1]),
    )
    def start(self, sentinel: str, num_scale_pages: int | None, seed: int | None) -> None:
        self.pool = make_pool(sentinel=sentinel, num_scale_pages=num_scale_pages, shuffle_seed=seed)
        self.model: dict[str, list[int]] = {}
        self.swapped: dict[str, tuple[SwappedRequest, list[int]]] = {}
        self.stamp = self.born = 0

    def name(self) -> str:
        self.born += 1
        return f"r{self.born}"

    def books(self) -> object:
        requests = {name: (self.pool.tokens(name), self.pool.pages(name)) for name in self.pool.requests}
        return requests, self.pool.free_pages, self.pool.blocks.view(torch.uint8).clone().tolist()

    def some(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.model)))

    @rule()
    def allocate(self) -> None:
        name = self.name()
        self.pool.allocate(name)
        self.model[name] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Store a few tokens for some requests and keep some of them, as speculative decoding does."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
        counts = [data.draw(st.integers(0, 6)) for _ in names]
        before = self.books()
        try:
            step = self.pool.values(names, counts)
        except OutOfPagesError:
            assert self.books() == before
            return
        kept = [data.draw(st.integers(0, count)) for count in counts]
        for row, (name, count, keep) in enumerate(zip(names, counts, kept)):
            new = list(range(self.stamp, self.stamp + count))
            self.stamp += count
            write(self.pool, step, row, new)
            self.model[name] = self.model[name] + new[:keep]
        self.pool.advance(names, kept)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.some(data), self.name()
        tokens = data.draw(st.none() | st.integers(0, len(self.model[parent])))
        self.pool.fork(parent, child, tokens)
        self.model[child] = self.model[parent][:tokens]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        name = self.some(data)
        tokens = data.draw(st.integers(0, len(self.model[name])))
        self.pool.truncate(name, tokens)
        self.model[name] = self.model[name][:tokens]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = self.some(data)
        self.pool.free(name)
        del self.model[name]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        name = self.some(data)
        self.swapped[name] = self.pool.swap_out(name), self.model.pop(name)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.swapped)))
        before = self.books()
        try:
            self.pool.swap_in(name, self.swapped[name][0])
        except OutOfPagesError:
            assert self.books() == before
            return
        self.model[name] = self.swapped.pop(name)[1]

    @invariant()
    def requests_read_their_own_tokens(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert {name: read(self.pool, name) for name in self.pool.requests} == self.model

    def teardown(self) -> None:
        """Nothing has leaked: with every request gone every page can be handed out again."""
        if hasattr(self, "pool"):
            for name in self.pool.requests:
                self.pool.free(name)
            self.pool.check()
            null_pages = 1 if self.pool.sentinel == NULL_PAGE else 0
            scale_pages = 12 if self.pool.scales is None else self.pool.scales.shape[0]
            assert self.pool.free_pages == min(12, scale_pages) - null_pages


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=25)


@dataclass(frozen=True)
class Convention:
    """A way to mark unused columns, with what the first handed-out page and an unused column are."""

    sentinel: str
    first_page: int
    unused: int
    unused_scale: int


CONVENTIONS = [Convention(ONE_PAST_END, 0, 12, 15), Convention(NULL_PAGE, 1, 0, 0)]


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: c.sentinel)
@pytest.mark.parametrize("table_dtype", [torch.uint32, torch.int32], ids=str)
def test_tables_of_a_step(convention: Convention, table_dtype: torch.dtype) -> None:
    pool = make_pool(sentinel=convention.sentinel, table_dtype=table_dtype)
    for name, tokens in (("a", 6), ("b", 0)):
        pool.allocate(name)
        pool.append(name, tokens)
    values, query_start_loc = pool.values(["a", "b"], [3, 1])
    first = convention.first_page
    assert values.lookup_table.dtype == values.scales_lookup_table.dtype == values.cache_lengths.dtype == table_dtype
    ids = values.lookup_table.view(torch.int32)
    scale_ids = values.scales_lookup_table.view(torch.int32)
    assert ids.shape == scale_ids.shape == (2, 24)
    assert ids[0, :4].tolist() == [first, first + 1, first + 2, convention.unused]
    assert ids[1, :2].tolist() == [first + 3, convention.unused]
    assert set(ids[:, 3:].flatten().tolist()) == {convention.unused}
    assert set(scale_ids[:, 3:].flatten().tolist()) == {convention.unused_scale}
    assert values.cache_lengths.view(torch.int32).tolist() == [6, 0]
    assert query_start_loc.tolist() == [0, 3, 4]
    assert int(values.max_prompt_length.view(torch.int32)) == 3
    assert int(values.max_cache_length.view(torch.int32)) == 9


def test_a_table_holds_the_pages_of_its_step_alone() -> None:
    """Room of an earlier, longer step is no part of this one's table; forks and copies read as their pages do."""
    pool = make_pool(shuffle_seed=1)
    for name in ("a", "b"):
        pool.allocate(name)
    pool.append("a", 6)
    pool.values(["a", "b"], [10, 9])
    pool.fork("a", "c", 5)
    values = pool.values(["c", "b", "a"], [1, 0, 2]).values
    pages = [pool.pages(name)[:count] for name, count in (("c", 2), ("b", 0), ("a", 2))]
    assert len(pool.pages("a")) == 4
    assert pages[0][0] == pages[2][0]
    assert pages[0][1] != pages[2][1]
    for table, which, unused in ((values.lookup_table, 0, 12), (values.scales_lookup_table, 1, 15)):
        assert table.is_contiguous()
        rows = [[page[which] for page in row] for row in pages]
        assert table.view(torch.int32).tolist() == [row + [unused] * (24 - len(row)) for row in rows]


def test_a_step_costs_as_many_tensor_operations_for_any_number_of_requests() -> None:
    """1,024 requests of 64 pages took 32 ms, 65 with two tables: a tensor was made and copied for every row."""

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **kwargs or {})

    counts = []
    for requests in (1, 8):
        pool = make_pool()
        for name in range(requests):
            pool.allocate(name)
            pool.append(name, 1)
        with Counting() as counting:
            pool.values(range(requests), [1] * requests)
        counts.append(counting.calls)
    assert counts[0] == counts[1] > 0


def test_one_id_space_has_one_table() -> None:
    pool = make_pool(num_scale_pages=None)
    pool.allocate("a")
    values = pool.values(["a"], [1]).values
    assert values.scales_lookup_table is None
    assert values.kv_scales.shape[0] == values.kv_blocks.shape[0] == 12
    values.collection(ROW.pool_granularity)


def test_an_empty_batch_is_a_step() -> None:
    values, query_start_loc = make_pool().values([], [])
    assert values.lookup_table.shape == (0, 16)
    assert query_start_loc.tolist() == [0]
    values.collection(ROW.pool_granularity)


def test_layout_without_scales() -> None:
    pool = PagePool("bf16", num_layers=1, page_size=2, num_pages=3)
    pool.allocate("a")
    values = pool.values(["a"], [3]).values
    assert pool.scales is values.kv_scales is values.scales_page_stride is values.scales_lookup_table is None
    pool.copy_pages([(Page(0, 0), Page(2, 2))])


def test_a_scale_for_the_tensor_is_shared_by_all_pages() -> None:
    sigma = torch.tensor([0.5, 0.25])
    pool = make_pool(num_scale_pages=None, sigma=sigma)
    assert pool.scales.shape == (12, 1, LAYERS, PAGE_SIZE, 1, 1)
    assert pool.scales.untyped_storage().data_ptr() == sigma.untyped_storage().data_ptr()
    pool.allocate("a")
    pool.append("a", 5)
    swapped = pool.swap_out("a")
    assert swapped.scales is None
    pool.swap_in("a", swapped)
    assert sigma.tolist() == [0.5, 0.25]


@pytest.mark.parametrize(("pages", "columns"), [(0, 16), (1, 24), (8, 24), (9, 32), (17, 40)])
def test_table_width(pages: int, columns: int) -> None:
    """The widths that MAX's manager gave for these numbers of pages."""
    assert padded_columns(pages) == columns


def test_shuffled_order_is_random_and_repeats() -> None:
    def order(seed: int | None) -> list[Page]:
        pool = make_pool(shuffle_seed=seed)
        pool.allocate("a")
        pool.append("a", 12 * PAGE_SIZE)
        return list(pool.pages("a"))

    assert order(None) == [Page(i, i) for i in range(12)]
    assert order(3) == order(3) != order(4)
    assert sorted(page.value for page in order(3)) == list(range(12))
    assert [page.value for page in order(3)] != [page.scale for page in order(3)]


def test_copy_on_write_copies_only_the_shared_last_page() -> None:
    pool = make_pool()
    pool.allocate("parent")
    write(pool, pool.values(["parent"], [6]), 0, [10, 11, 12, 13, 14, 15])
    pool.advance(["parent"], [6])
    pool.fork("parent", "child")
    first, last = pool.pages("parent")
    assert pool.pages("child") == (first, last)
    assert pool.references(last) == 2

    pool.append("child", 1)
    assert pool.pages("child")[0] == first
    own = pool.pages("child")[1]
    assert own.value != last.value
    assert own.scale != last.scale
    assert pool.pages("parent") == (first, last)
    assert read(pool, "child")[:6] == read(pool, "parent") == [10, 11, 12, 13, 14, 15]

    pool.append("parent", 1)  # now alone on its last page
    assert pool.pages("parent") == (first, last)


def test_both_sharers_in_one_step_need_one_copy() -> None:
    """Two sharers of a last page append in the same step, and one page is free: the second keeps the page."""
    pool = make_pool(num_pages=3, num_scale_pages=3)
    pool.allocate("a")
    pool.append("a", 5)
    pool.fork("a", "b")
    pool.values(["a", "b"], [1, 1])
    pool.check()
    assert pool.free_pages == 0
    assert pool.pages("a")[1] != pool.pages("b")[1]


def test_copy_pages_reads_before_it_writes() -> None:
    pool = make_pool()
    values, scales = stamps_of(pool)
    for page in range(3):
        values[page], scales[page] = 100 + page, 200.0 + page
    a, b, c = (Page(i, i) for i in range(3))
    pool.copy_pages([(a, b), (b, a), (a, c)])
    assert [int(values[i, 0, 0]) for i in range(3)] == [101, 100, 100]
    assert [float(scales[i, 0, 0]) for i in range(3)] == [201.0, 200.0, 200.0]


def test_out_of_pages_names_the_pool_and_changes_nothing() -> None:
    pool = make_pool(num_scale_pages=3)
    pool.allocate("a")
    pool.allocate("b")
    pool.append("a", 4)
    with pytest.raises(OutOfPagesError) as refusal:
        pool.values(["a", "b"], [1, 8])
    assert str(refusal.value) == (
        "kv_scales: 3 more pages needed for requests ['a', 'b']; 2 of 3 are free. Free, swap out or truncate a request."
    )
    assert pool.pages("a") == (Page(0, 0),)
    assert pool.pages("b") == ()
    swapped = SwappedRequest(
        16, ROW, torch.zeros(4, *pool.blocks.shape[1:]).to(pool.blocks.dtype), torch.zeros(4, 1, 2, 4, 1, 1)
    )
    with pytest.raises(OutOfPagesError, match="4 more pages needed"):
        pool.swap_in("c", swapped)
    assert pool.requests == ("a", "b")


GEOMETRY_REFUSALS = [
    ({"sentinel": "minus_one"}, "sentinel: expected 'one_past_end' or 'null_page'; got 'minus_one'."),
    ({"table_dtype": torch.int64}, "table_dtype: expected int32 or uint32; got int64."),
    ({"num_layers": 0}, "num_layers: expected at least 1; got 0."),
    ({"page_size": 0}, "page_size: expected at least 1; got 0."),
    ({"num_pages": 0}, "num_pages: expected at least 1; got 0."),
    ({"num_scale_pages": 1, "sentinel": NULL_PAGE}, "num_scale_pages: expected at least 2; got 1."),
    ({"sigma": torch.ones(1)}, "num_scale_pages: expected None, since sigma is one scale for all pages; got 15."),
    ({"scale_dtype": torch.bfloat16}, "kv_scales: expected [*, 1, 2, 4, 1, 1] float32 or float16 or float8_e8m0fnu"),
]


@pytest.mark.parametrize(("changes", "sentence"), GEOMETRY_REFUSALS)
def test_geometry_that_cannot_be(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match="expected") as refusal:
        make_pool(**changes)
    assert str(refusal.value).startswith(sentence)


def test_scales_that_the_layout_does_not_have() -> None:
    with pytest.raises(ValueError, match="num_scale_pages: expected None, since layout bf16 has no scale pool; got 4"):
        PagePool("bf16", num_layers=1, page_size=2, num_pages=3, num_scale_pages=4)
    with pytest.raises(ValueError, match=r"scale_dtype: expected None, since layout bf16 has no scale pool; got 'x'\."):
        PagePool("bf16", num_layers=1, page_size=2, num_pages=3, scale_dtype="x")  # was taken, and meant nothing
    with pytest.raises(ValueError, match=r"scale_dtype: expected None, since sigma is one .*; got torch\.float16\."):
        PagePool("fp8_flat", num_layers=1, page_size=2, num_pages=3, sigma=torch.ones(1), scale_dtype=torch.float16)
    with pytest.raises(ValueError, match="sigma: expected None, since layout bf16 doesn't have one scale a row"):
        PagePool("bf16", num_layers=1, page_size=2, num_pages=3, sigma=torch.ones(1))


MISUSES = {
    "allocate": (lambda pool: pool.allocate("a"), "request: expected an id that isn't in the pool yet; got 'a'."),
    "unknown": (lambda pool: pool.free("z"), "request: expected one of ['a', 'b']; got 'z'."),
    "fork": (lambda pool: pool.fork("a", "c", 6), "tokens: expected 0 to 5, the tokens of request 'a'; got 6."),
    "truncate": (lambda pool: pool.truncate("a", -1), "tokens: expected 0 to 5, the tokens of request 'a'; got -1."),
    "counts": (
        lambda pool: pool.values(["a"], [1, 2]),
        "query_lens: expected 1 numbers, one for each request; got 2.",
    ),
    "twice": (lambda pool: pool.values(["a", "a"], [1, 1]), "requests: expected each request once; got ['a', 'a']."),
    "negative": (
        lambda pool: pool.values(["a", "b"], [1, -1]),
        "query_lens: expected at least 0 for request 'b'; got -1.",
    ),
    # Both told of query_lens, which neither takes; the second left request c behind.
    "append": (lambda pool: pool.append("a", -1), "tokens: expected at least 0 for request 'a'; got -1."),
    "swapped": (
        lambda pool: pool.swap_in(
            "c",
            SwappedRequest(
                -1, ROW, *(torch.empty(0, *at.shape[1:], dtype=at.dtype) for at in (pool.blocks, pool.scales))
            ),
        ),
        "swapped.tokens: expected at least 0; got -1.",
    ),
    "advance": (
        lambda pool: pool.advance(["b", "a"], [0, 4]),
        "tokens: expected at most 3 for request 'a', the room that its step made; got 4. "
        "Call values() for the step first.",
    ),
    "copy_twice": (
        lambda pool: pool.copy_pages([(Page(0, 0), Page(2, 2)), (Page(1, 1), Page(2, 3))]),
        "pairs: expected no target page twice; got [(2, 2), (2, 3)].",
    ),
    "swap_in": (
        lambda pool: pool.swap_in("c", SwappedRequest(5, ROW, torch.zeros(1), None)),
        "swapped.values: expected [2, 1, 2, 4, 1, 8] float8_e4m3fn, as in this pool; got [1] float32.",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_refused_and_changes_nothing(misuse: str) -> None:
    call, sentence = MISUSES[misuse]
    pool = make_pool()
    for name, tokens in (("a", 5), ("b", 1)):
        pool.allocate(name)
        pool.append(name, tokens)
    before = {name: (pool.tokens(name), pool.pages(name)) for name in pool.requests}
    with pytest.raises(ValueError, match="expected") as refusal:
        call(pool)
    assert str(refusal.value) == sentence
    assert {name: (pool.tokens(name), pool.pages(name)) for name in pool.requests} == before
    pool.check()


def test_copy_outside_the_pool() -> None:
    with pytest.raises(IndexError, match="kv_scales: page id 15 is out of range for 15 pages"):
        make_pool().copy_pages([(Page(0, 15), Page(1, 1))])
    with pytest.raises(IndexError, match="kv_blocks: page id -1 is out of range for 12 pages"):
        make_pool().copy_pages([(Page(0, 0), Page(-1, 1))])


def lose_a_page(pool: PagePool) -> None:
    pool._value_ids.free.remove(11)


def free_a_held_page(pool: PagePool) -> None:
    pool._scale_ids.free.append(1)


def forget_a_reference(pool: PagePool) -> None:
    pool._references[pool.pages("a")[0]] = 2


def hold_the_null_page(pool: PagePool) -> None:
    pool._value_ids.free.append(0)


def repeat_a_page(pool: PagePool) -> None:
    pool._requests["a"].extend(pool.pages("a")[:1])
    pool._references[pool.pages("a")[0]] += 1


def outgrow_the_pages(pool: PagePool) -> None:
    pool._requests["a"].tokens = 9


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lose_a_page, "page pool: page 11 of kv_blocks is neither free nor held by a request."),
        (free_a_held_page, "page pool: page 1 of kv_scales is in use 2 times."),
        (forget_a_reference, "page pool: Page(value=1, scale=1) has 2 references and is held 1 times."),
        (hold_the_null_page, "page pool: page 0 of kv_blocks is in use; ids run from 1 to 11."),
        (repeat_a_page, "page pool: request 'a' holds a page twice: "),
        (outgrow_the_pages, "page pool: request 'a' has 9 tokens and 2 pages."),
    ],
)
def test_check_finds_damaged_books(damage, sentence: str) -> None:
    pool = make_pool(sentinel=NULL_PAGE)
    pool.allocate("a")
    pool.append("a", 5)
    pool.check()
    damage(pool)
    with pytest.raises(RuntimeError) as found:
        pool.check()
    assert str(found.value).startswith(sentence)


# -- what isn't meant --------------------------------------------------------------------------------------------------


def test_a_swapped_request_keeps_its_layout() -> None:
    """Swapped from fp8_rope_bf16 into its prescaled twin, all rope was off by sigma: the bytes have the same shape."""
    geometry = {"num_layers": 1, "page_size": 4, "num_pages": 4}
    source, twin = PagePool("fp8_rope_bf16", **geometry), PagePool("fp8_rope_bf16_prescaled", **geometry)
    source.allocate("x")
    source.append("x", 3)
    swapped = source.swap_out("x")
    with pytest.raises(
        ValueError, match="swapped: expected a request of layout fp8_rope_bf16_prescaled; got one of fp8_"
    ):
        twin.swap_in("x", swapped)
    assert twin.requests == ()
    source.swap_in("x", swapped)
    assert source.tokens("x") == 3


def test_a_fork_makes_its_step_before_it_advances() -> None:
    """advance() on a fresh fork counted the parent's bytes as the child's: nobody had copied the shared page."""
    pool = make_pool()
    pool.allocate("a")
    pool.append("a", 5)
    pool.fork("a", "c")
    with pytest.raises(ValueError, match="tokens: expected 0 for request 'c', whose last page others share; got 2"):
        pool.advance(["c"], [2])
    assert pool.tokens("c") == 5
    pool.values(["c"], [2])
    pool.advance(["c"], [2])
    assert pool.tokens("c") == 7
    assert pool.pages("a")[1] != pool.pages("c")[1]


@pytest.mark.parametrize("count", [float("nan"), 2.0, "2", True, None])
def test_counts_of_tokens_are_integers(count: object) -> None:
    """nan and 2.0 went into the books, and later calls failed far away."""
    pool = make_pool()
    pool.allocate("a")
    pool.append("a", 5)
    calls = [lambda: pool.append("a", count), lambda: pool.advance(["a"], [count]), lambda: pool.truncate("a", count)]
    for call in calls:
        with pytest.raises(TypeError, match=r"expected an int; got"):
            call()
    if count is not None:
        with pytest.raises(TypeError, match="tokens: expected an int; got"):
            pool.fork("a", "b", count)
    assert pool.requests == ("a",)
    assert pool.tokens("a") == 5
    pool.check()


def test_a_pool_names_the_argument_that_is_not_of_its_kind() -> None:
    for changes, message in (
        ({"page_size": 2.5}, r"page_size: expected an int; got 2\.5"),
        ({"num_pages": "8"}, "num_pages: expected an int; got '8'"),
        ({"num_scale_pages": 3.0}, r"num_scale_pages: expected an int; got 3\.0"),
    ):
        with pytest.raises(TypeError, match=message):
            make_pool(**changes)
    with pytest.raises(TypeError, match="layout: expected a CacheLayout or its name; got None"):
        PagePool(None, num_layers=1, page_size=4, num_pages=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sigma: expected finite numbers of at least"):
        make_pool(num_scale_pages=None, sigma=torch.zeros(1))
    pool = make_pool()
    with pytest.raises(TypeError, match="swapped: expected a SwappedRequest; got None"):
        pool.swap_in("a", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pairs: expected \(Page, Page\) each"):
        pool.copy_pages([((0, 0), (1, 1))])  # type: ignore[list-item]
