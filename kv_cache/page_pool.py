"""An embedded allocator: pages for requests, and the pools that hold their bytes. An engine brings its own.

A page is a pair of ids (`Page`), one into the value pool and one into the scale pool. The two are handed out, shared,
copied, swapped and given back together, so a scale page can't be left behind. In one id space both ids are equal; with
`num_scale_pages` the scale pool has an id space of its own, and two tables.

A step:

    step = pool.values(["a", "b"], [5, 1])  # makes room for the tokens, or raises OutOfPagesError and changes nothing
    store(latent, rope, step.values, layer, query_start_loc=step.query_start_loc, layout=pool.layout)
    attend(q, step.values, layer, query_start_loc=step.query_start_loc, layout=pool.layout, ...)
    pool.advance(["a", "b"], [5, 1])        # only now do they count as tokens in the cache

After speculative decoding advance by the accepted tokens alone: the next step writes over the others.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import (
    INDEX_DTYPES,
    IndexRefusal,
    ceildiv,
    describe,
    dtype_name,
    expect_int,
    quoted,
    refuse,
)
from pagedmla.kv_cache.layouts import CacheLayout, get_layout, per_tensor_scale
from pagedmla.kv_cache.paged_tensor import PACKED_PAGE_STRIDE, raw_view
from pagedmla.kv_cache.quantise import check_sigma
from pagedmla.kv_cache.values import KVCacheInputsPerDevice

ONE_PAST_END = "one_past_end"
NULL_PAGE = "null_page"

RequestId = Hashable


class OutOfPagesError(RuntimeError):
    """A pool has too few free pages. Nothing was changed: free, swap out or truncate a request and try again."""


class Page(NamedTuple):
    """A value page and its scale page, by their ids; the same number twice in one id space."""

    value: int
    scale: int


class StepInputs(NamedTuple):
    """The cache for one step and `query_start_loc [B + 1]` int32."""

    values: KVCacheInputsPerDevice
    query_start_loc: Tensor


class SwappedRequest(NamedTuple):
    """A request's bytes on the host, and what they mean.

    values  [pages, 1, num_layers, page_size, 1, row]
    scales  [pages, 1, num_layers, page_size, 1, G], or None where the pool has no pages of scales
    """

    tokens: int
    layout: CacheLayout
    values: Tensor
    scales: Tensor | None


@dataclass
class _Request:
    """Its pages are kept as a table wants them: value id and scale id in turn, int32, so that a step only copies."""

    tokens: int = 0
    ids: array[int] = field(default_factory=lambda: array("i"))

    @property
    def num_pages(self) -> int:
        return len(self.ids) // 2

    @property
    def pages(self) -> list[Page]:
        return list(map(Page, self.ids[::2], self.ids[1::2]))

    def page(self, index: int) -> Page:
        return Page(self.ids[2 * index], self.ids[2 * index + 1])

    def extend(self, pages: Iterable[Page]) -> None:
        self.ids.extend(chain.from_iterable(pages))

    def replace(self, index: int, page: Page) -> None:
        self.ids[2 * index : 2 * index + 2] = array("i", page)

    def keep(self, pages: int) -> None:
        del self.ids[2 * pages :]


def padded_columns(pages: int) -> int:
    """Table columns for `pages` pages: whole groups of 8, and 16 more, since readers load up to 16 ids at once."""
    return ceildiv(pages, 8) * 8 + 16


class PagePool:
    """Pages of one layout for requests that come and go.

    layout           a CacheLayout or its name
    num_pages        of the value pool; the null page counts
    num_scale_pages  None: scale ids are value ids; else the scale pool has that many pages and ids of its own
    sentinel         what unused table columns hold: "one_past_end" (the number of pages) or "null_page" (0: page 0 of
                     each id space is never handed out)
    shuffle_seed     None: lowest fresh id first, then the page freed last; else a random order, the same for a seed
    sigma            [1] or [num_layers]: one scale a tensor or a layer (`fp8_flat`) instead of pages of scales
    scale_dtype      of the scale pool (None: float32); table_dtype: uint32 or int32

    `blocks` and `scales` are the tensors (`scales` None where the layout has none). Fresh memory is zero. Raises
    ValueError for a geometry that can't be.
    """

    def __init__(
        self,
        layout: CacheLayout | str,
        *,
        num_layers: int,
        page_size: int,
        num_pages: int,
        num_scale_pages: int | None = None,
        sentinel: str = ONE_PAST_END,
        shuffle_seed: int | None = None,
        sigma: Tensor | None = None,
        scale_dtype: torch.dtype | None = None,
        table_dtype: torch.dtype = torch.uint32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = get_layout(layout) if isinstance(layout, str) else layout
        if not isinstance(self.layout, CacheLayout):
            refuse("layout", "a CacheLayout or its name", layout, error=TypeError)
        self.page_size, self.num_pages, self.sentinel, self.table_dtype = page_size, num_pages, sentinel, table_dtype
        if sentinel not in (ONE_PAST_END, NULL_PAGE):
            refuse("sentinel", f"{ONE_PAST_END!r} or {NULL_PAGE!r}", repr(sentinel))
        if table_dtype not in INDEX_DTYPES:
            refuse("table_dtype", " or ".join(map(dtype_name, INDEX_DTYPES)), dtype_name(table_dtype))
        smallest = 2 if sentinel == NULL_PAGE else 1
        for name, size, least in (
            ("num_layers", num_layers, 1),
            ("page_size", page_size, 1),
            ("num_pages", num_pages, smallest),
            ("num_scale_pages", smallest if num_scale_pages is None else num_scale_pages, smallest),
        ):
            if expect_int(size, name) < least:
                refuse(name, f"at least {least}", size)
        if self.layout.scales_per_token == 0 or sigma is not None:
            why = "sigma is one scale for all pages" if sigma is not None else f"layout {self.layout} has no scale pool"
            for name, given in (("num_scale_pages", num_scale_pages), ("scale_dtype", scale_dtype)):
                if given is not None:
                    refuse(name, f"None, since {why}", quoted(given))
        scale_dtype = torch.float32 if scale_dtype is None else scale_dtype
        if sigma is not None and self.layout.scales_per_token != 1:
            refuse("sigma", f"None, since layout {self.layout} doesn't have one scale a row", sigma)

        row = (1, num_layers, page_size, 1)
        self.blocks = torch.zeros(
            num_pages, *row, self.layout.row_elements, dtype=self.layout.value_dtypes[0], device=device
        )
        self.scales: Tensor | None = None
        if sigma is not None:
            check_sigma(sigma)
            self.scales = per_tensor_scale(sigma.to(device), self.blocks)
        elif self.layout.scales_per_token:
            pages = num_pages if num_scale_pages is None else num_scale_pages
            self.scales = torch.zeros(pages, *row, self.layout.scales_per_token, dtype=scale_dtype, device=device)
        self.layout.check_pool(self.blocks, self.scales)

        self._paged_scales = None if sigma is not None else self.scales
        self._value_ids = _IdSpace("kv_blocks", num_pages, sentinel, shuffle_seed)
        self._scale_ids: _IdSpace | None = None
        if num_scale_pages is not None:
            # Another seed, so that the two orders differ and a reader of the wrong table is caught.
            seed = None if shuffle_seed is None else ~shuffle_seed
            self._scale_ids = _IdSpace("kv_scales", num_scale_pages, sentinel, seed)
        self._requests: dict[RequestId, _Request] = {}
        self._references: Counter[Page] = Counter()

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> tuple[RequestId, ...]:
        return tuple(self._requests)

    @property
    def free_pages(self) -> int:
        """How many more pages can be handed out."""
        return min(len(space.free) for space in self._id_spaces())

    def tokens(self, request: RequestId) -> int:
        """Tokens in the cache, without those of a step that hasn't been advanced."""
        return self._find(request).tokens

    def pages(self, request: RequestId) -> tuple[Page, ...]:
        """The request's pages in order, those with room for a coming step included."""
        return tuple(self._find(request).pages)

    def references(self, page: Page) -> int:
        """How many requests hold the page."""
        return self._references[page]

    # -- requests ----------------------------------------------------------------------------------------------------

    def allocate(self, request: RequestId) -> None:
        """A new request with no tokens and no pages."""
        if request in self._requests:
            refuse("request", "an id that isn't in the pool yet", repr(request))
        self._requests[request] = _Request()

    def append(self, request: RequestId, tokens: int) -> None:
        """Room for `tokens` more, counted as in the cache at once. Raises OutOfPagesError, with nothing changed."""
        self._reserve([request], [tokens], "tokens")
        self.advance([request], [tokens])

    def free(self, request: RequestId) -> None:
        """Forget the request; pages that no other request holds can be handed out again."""
        self._release(self._find(request).pages)
        del self._requests[request]

    def fork(self, parent: RequestId, child: RequestId, tokens: int | None = None) -> None:
        """A new request that shares the parent's first `tokens` tokens (None: all of them), by reference.

        A last page that is only partly the child's is shared too; whichever sharer appends to it first gets a copy.
        """
        source = self._find(parent)
        tokens = source.tokens if tokens is None else expect_int(tokens, "tokens")
        if not 0 <= tokens <= source.tokens:
            refuse("tokens", f"0 to {source.tokens}, the tokens of request {parent!r}", tokens)
        self.allocate(child)
        shared = _Request(tokens, source.ids[: 2 * ceildiv(tokens, self.page_size)])
        self._references.update(shared.pages)
        self._requests[child] = shared

    def truncate(self, request: RequestId, tokens: int) -> None:
        """Keep the first `tokens` tokens, and give back the pages behind them with all unused room."""
        held = self._find(request)
        tokens = expect_int(tokens, "tokens")
        if not 0 <= tokens <= held.tokens:
            refuse("tokens", f"0 to {held.tokens}, the tokens of request {request!r}", tokens)
        keep = ceildiv(tokens, self.page_size)
        self._release(held.pages[keep:])
        held.keep(keep)
        held.tokens = tokens

    # -- steps -------------------------------------------------------------------------------------------------------

    def values(self, requests: Sequence[RequestId], query_lens: Sequence[int]) -> StepInputs:
        """The cache for a step in which request i brings `query_lens[i]` tokens, with room made for them.

        cache_lengths are the tokens before the step. Rows follow `requests`; table columns past a row's last page hold
        the sentinel. Raises OutOfPagesError, with nothing changed.
        """
        held = self._reserve(requests, query_lens, "query_lens")
        kv_lens = [row.tokens + query_len for row, query_len in zip(held, query_lens)]
        tables = self._tables(held, [ceildiv(kv_len, self.page_size) for kv_len in kv_lens])
        device = self.blocks.device
        packed = torch.tensor([PACKED_PAGE_STRIDE], dtype=torch.int64)
        values = KVCacheInputsPerDevice(
            kv_blocks=self.blocks,
            cache_lengths=_int32([row.tokens for row in held]).view(self.table_dtype).to(device),
            lookup_table=tables[0],
            max_prompt_length=_int32([max(query_lens, default=0)]).view(torch.uint32),
            max_cache_length=_int32([max(kv_lens, default=0)]).view(torch.uint32),
            page_stride=packed,
            kv_scales=self.scales,
            scales_page_stride=None if self.scales is None else packed.clone(),
            scales_lookup_table=None if self._scale_ids is None else tables[1],
        )
        return StepInputs(values, _int32(list(accumulate(query_lens, initial=0))).to(device))

    def advance(self, requests: Sequence[RequestId], tokens: Sequence[int]) -> None:
        """Count `tokens[i]` more tokens of request i as in the cache; the step must have made room for them.

        A step makes room in pages of the request's own: after a fork make the step before you advance.
        """
        step = self._check_step(requests, tokens, "tokens")
        for request, held, count in zip(requests, step, tokens):
            room = held.num_pages * self.page_size
            if held.tokens + count > room:
                refuse(
                    "tokens",
                    f"at most {room - held.tokens} for request {request!r}, the room that its step made",
                    count,
                    "Call values() for the step first.",
                )
            if self._appends_to_page(held, count) and self._references[held.page(held.tokens // self.page_size)] > 1:
                refuse(
                    "tokens",
                    f"0 for request {request!r}, whose last page others share",
                    count,
                    "Call values() for the step first: it gives the request a page of its own.",
                )
        for held, count in zip(step, tokens):
            held.tokens += count

    # -- bytes -------------------------------------------------------------------------------------------------------

    def copy_pages(self, pairs: Sequence[tuple[Page, Page]]) -> None:
        """Copy whole pages, values and scales, from the first to the second of each pair, all layers.

        Every source is read before anything is written, so chains and exchanges are right.
        """
        if any(not isinstance(page, Page) for pair in pairs for page in pair):
            refuse("pairs", "(Page, Page) each", list(pairs), error=TypeError)
        targets = Counter(target.value for _, target in pairs) | Counter(target.scale for _, target in pairs)
        if any(count > 1 for count in targets.values()):
            refuse("pairs", "no target page twice", [tuple(target) for _, target in pairs])
        for name, pool, which in (("kv_blocks", self.blocks, 0), ("kv_scales", self._paged_scales, 1)):
            if pool is None or not pairs:
                continue
            ids = torch.tensor([(source[which], target[which]) for source, target in pairs])
            outside = (ids < 0) | (ids >= pool.shape[0])
            if bool(outside.any()):
                raise IndexRefusal(f"{name}: page id {int(ids[outside][0])} is out of range for {pool.shape[0]} pages")
        for pool, which in ((self.blocks, 0), (self._paged_scales, 1)):
            if pool is None:
                continue
            raw = raw_view(pool)
            sources = _ids([source[which] for source, _ in pairs], pool)
            raw[_ids([target[which] for _, target in pairs], pool)] = raw[sources]

    def swap_out(self, request: RequestId) -> SwappedRequest:
        """Copy the request's pages to the host and free it. Pages that others share stay with them."""
        held = self._find(request)
        pages = held.pages[: ceildiv(held.tokens, self.page_size)]
        swapped = SwappedRequest(
            held.tokens,
            self.layout,
            _gather(self.blocks, [page.value for page in pages]),
            None if self._paged_scales is None else _gather(self._paged_scales, [page.scale for page in pages]),
        )
        self.free(request)
        return swapped

    def swap_in(self, request: RequestId, swapped: SwappedRequest) -> None:
        """Bring a swapped request back, in pages of its own. Raises OutOfPagesError, with nothing changed."""
        if not isinstance(swapped, SwappedRequest):
            refuse("swapped", "a SwappedRequest", describe(swapped), error=TypeError)
        if swapped.layout != self.layout:
            refuse("swapped", f"a request of layout {self.layout}", f"one of {swapped.layout}")
        if expect_int(swapped.tokens, "swapped.tokens") < 0:
            refuse("swapped.tokens", "at least 0", swapped.tokens)
        count = ceildiv(swapped.tokens, self.page_size)
        for name, copy, pool in (
            ("swapped.values", swapped.values, self.blocks),
            ("swapped.scales", swapped.scales, self._paged_scales),
        ):
            wanted = None if pool is None else (count, *pool.shape[1:])
            got = None if copy is None else tuple(copy.shape)
            if wanted != got or (copy is not None and pool is not None and copy.dtype != pool.dtype):
                expected = "None" if pool is None else f"{[count, *pool.shape[1:]]} {dtype_name(pool.dtype)}"
                refuse(name, f"{expected}, as in this pool", describe(copy))
        self.allocate(request)
        try:
            self._reserve([request], [swapped.tokens], "swapped.tokens")
        except OutOfPagesError:
            del self._requests[request]
            raise
        pages = self._find(request).pages
        _scatter(self.blocks, [page.value for page in pages], swapped.values)
        if self._paged_scales is not None and swapped.scales is not None:
            _scatter(self._paged_scales, [page.scale for page in pages], swapped.scales)
        self.advance([request], [swapped.tokens])

    # -- books -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """RuntimeError that names the page where the books don't balance.

        Every page that isn't free is held by as many requests as it has references, no id is in two pages, none is
        lost, the null page is never held, and every request has a page for each of its tokens.
        """
        holders = Counter(page for request in self._requests.values() for page in request.pages)
        for page in holders.keys() | self._references.keys():
            if holders[page] != self._references[page]:
                _unbalanced(f"{page} has {self._references[page]} references and is held {holders[page]} times")
        for request, held in self._requests.items():
            if len(set(held.pages)) != held.num_pages:
                _unbalanced(f"request {request!r} holds a page twice: {held.pages}")
            if held.num_pages * self.page_size < held.tokens:
                _unbalanced(f"request {request!r} has {held.tokens} tokens and {held.num_pages} pages")
        for which, space in enumerate(self._id_spaces()):
            space.check([page[which] for page in holders])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _id_spaces(self) -> list[_IdSpace]:
        return [self._value_ids] if self._scale_ids is None else [self._value_ids, self._scale_ids]

    def _find(self, request: RequestId) -> _Request:
        if request not in self._requests:
            refuse("request", f"one of {list(self._requests)}", repr(request))
        return self._requests[request]

    def _check_step(self, requests: Sequence[RequestId], counts: Sequence[int], counts_name: str) -> list[_Request]:
        """The step's requests, in order."""
        if len(requests) != len(counts):
            refuse(counts_name, f"{len(requests)} numbers, one for each request", f"{len(counts)}")
        if len(set(requests)) != len(requests):
            refuse("requests", "each request once", list(requests))
        held = []
        for request, count in zip(requests, counts):
            held.append(self._find(request))
            if expect_int(count, counts_name) < 0:
                refuse(counts_name, f"at least 0 for request {request!r}", count)
        return held

    def _reserve(self, requests: Sequence[RequestId], counts: Sequence[int], counts_name: str) -> list[_Request]:
        """Pages for `counts[i]` more tokens of each request, of its own where they will be written. All or nothing.

        Returns the requests, in order.
        """
        step = self._check_step(requests, counts, counts_name)
        lost: Counter[Page] = Counter()  # references to shared last pages, whose sharers are about to get their own
        work: list[tuple[_Request, Page | None, int]] = []  # (request, shared page to copy, pages to add)
        for held, count in zip(step, counts):
            shared = None
            if self._appends_to_page(held, count):
                last = held.page(held.tokens // self.page_size)
                if self._references[last] - lost[last] > 1:
                    lost[last] += 1
                    shared = last
            missing = max(0, ceildiv(held.tokens + count, self.page_size) - held.num_pages)
            if missing or shared is not None:
                work.append((held, shared, missing))
        needed = lost.total() + sum(missing for _, _, missing in work)
        for space in self._id_spaces():
            if needed > len(space.free):
                raise OutOfPagesError(
                    f"{space.name}: {needed} more pages needed for requests {list(requests)}; "
                    f"{len(space.free)} of {space.num_pages} are free. Free, swap out or truncate a request."
                )
        pairs = []
        for held, shared, missing in work:
            if shared is not None:
                own = self._take()
                pairs.append((shared, own))
                self._references[shared] -= 1
                held.replace(held.tokens // self.page_size, own)
            held.extend([self._take() for _ in range(missing)])
        self.copy_pages(pairs)
        return step

    def _appends_to_page(self, held: _Request, count: int) -> bool:
        """Whether the next token lands in a page that holds tokens already."""
        return count > 0 and held.tokens % self.page_size > 0

    def _take(self) -> Page:
        value = self._value_ids.take()
        page = Page(value, value if self._scale_ids is None else self._scale_ids.take())
        self._references[page] = 1
        return page

    def _release(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                self._value_ids.free.append(page.value)
                if self._scale_ids is not None:
                    self._scale_ids.free.append(page.scale)

    def _tables(self, requests: Sequence[_Request], counts: Sequence[int]) -> list[Tensor]:
        """Tables of value ids and of scale ids, `[B, columns]` each: the first `counts[i]` pages of each request."""
        columns = padded_columns(max(counts, default=0))
        spaces = self._value_ids, self._scale_ids or self._value_ids
        unused = memoryview(array("i", [space.unused for space in spaces]) * columns)
        rows = [unused]  # one too many, since torch takes no empty buffer
        for held, count in zip(requests, counts):
            rows += memoryview(held.ids)[: 2 * count], unused[2 * count :]
        ids = torch.frombuffer(bytearray().join(rows), dtype=torch.int32).view(-1, columns, 2)[1:]
        return [table.contiguous().view(self.table_dtype).to(self.blocks.device) for table in ids.unbind(-1)]


class _IdSpace:
    """The ids of one pool: which are free, and what stands for none."""

    def __init__(self, name: str, num_pages: int, sentinel: str, shuffle_seed: int | None) -> None:
        self.name, self.num_pages = name, num_pages
        self.unused = 0 if sentinel == NULL_PAGE else num_pages
        self.first = 1 if sentinel == NULL_PAGE else 0
        self.free = list(range(num_pages - 1, self.first - 1, -1))
        self._random = None if shuffle_seed is None else random.Random(shuffle_seed)

    def take(self) -> int:
        if self._random is not None:
            at = self._random.randrange(len(self.free))
            self.free[at], self.free[-1] = self.free[-1], self.free[at]
        return self.free.pop()

    def check(self, held: list[int]) -> None:
        counts = Counter(self.free) + Counter(held)
        for page in sorted(counts.keys() | set(range(self.first, self.num_pages))):
            if not self.first <= page < self.num_pages:
                _unbalanced(f"page {page} of {self.name} is in use; ids run from {self.first} to {self.num_pages - 1}")
            if counts[page] == 0:
                _unbalanced(f"page {page} of {self.name} is neither free nor held by a request")
            if counts[page] > 1:
                _unbalanced(f"page {page} of {self.name} is in use {counts[page]} times")


def _unbalanced(sentence: str) -> None:
    raise RuntimeError(f"page pool: {sentence}.")


def _int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _ids(numbers: list[int], pool: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=pool.device)


def _gather(pool: Tensor, ids: list[int]) -> Tensor:
    """Whole pages as a copy on the host."""
    return raw_view(pool)[_ids(ids, pool)].cpu().view(pool.dtype)


def _scatter(pool: Tensor, ids: list[int], pages: Tensor) -> None:
    raw_view(pool)[_ids(ids, pool)] = raw_view(pages).to(pool.device)
