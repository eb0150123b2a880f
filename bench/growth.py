"""How cost grows, and what it must not grow with.

requests   host time of plan, checks, adapter and launch, 1 to 1,024 requests
context    the same and attention itself, to 1M keys. Beyond what memory should hold, tables name a few pages over and
           over: every key is read and multiplied, and the pool stays small
pool       one step over a pool as large as what is live, and over one ten times larger: the ratio should be 1
addresses  one step over pages side by side, and over pages so far apart that the last lies past 2^31 elements: the same
           bits, and the ratio of times should be 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

import pagedmla
from pagedmla.bench import host_cost
from pagedmla.bench.cases import FLAGSHIP, PAGE_SIZE, SM_SCALE, Case, Inputs, build
from pagedmla.bench.clocks import CpuClock, least_microseconds
from pagedmla.kv_cache.checks import ceildiv
from pagedmla.kv_cache.paged_tensor import raw_view

REQUESTS = (1, 4, 16, 64, 256, 1024)
CONTEXTS = (4096, 32768, 262144, 1 << 20)
HEADS = 16
_LIVE = Case(FLAGSHIP, HEADS, 4, 1024)
_FAR = 1 << 31  # elements
_FAR_PAGES = 33  # so far apart that the last begins there


@dataclass(frozen=True)
class Growth:
    """`what` grew to `size`; `ratio` is against the first size of the same `what`. `same` compares results bit for bit,
    where they should be the same."""

    what: str
    size: int
    unit: str
    microseconds: float
    ratio: float
    same: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"source": "measured", **asdict(self)}


def growth(requests: Sequence[int] = REQUESTS, contexts: Sequence[int] = CONTEXTS) -> Iterator[Growth]:
    """Everything above, in that order."""
    yield from host_by_requests(requests)
    yield from host_by_context(contexts)
    yield from attention_by_context(contexts)
    yield from by_pool()
    yield from by_address()


def host_by_requests(requests: Sequence[int], kv_len: int = 4096) -> Iterator[Growth]:
    rows = [cost for cost in host_cost.measure(requests, kv_len) if cost.beside is None]
    for what in dict.fromkeys(row.what for row in rows):
        mine = [row for row in rows if row.what == what]
        for row in mine:
            yield _against(
                f"{what}, by requests of {kv_len} keys",
                row.requests,
                "requests",
                row.microseconds,
                mine[0].microseconds,
            )


def host_by_context(contexts: Sequence[int], requests: int = 8) -> Iterator[Growth]:
    """Metadata only: tables as wide as they must be, over a pool of a few pages."""
    parts = {"prepare": host_cost.prepare_call, "adapter": host_cost.adapter_call, "launch": host_cost.launch_call}
    for what, part in parts.items():
        times = [least_microseconds(part(requests, kv_len), 0.1) for kv_len in contexts]
        for kv_len, microseconds in zip(contexts, times, strict=True):
            yield _against(f"{what}, by keys of {requests} requests", kv_len, "keys", microseconds, times[0])


def attention_by_context(contexts: Sequence[int], pool_pages: int = 64) -> Iterator[Growth]:
    """One request; whatever `executor="auto"` takes on this CPU."""
    inputs = build(Case(FLAGSHIP, HEADS, 1, pool_pages * PAGE_SIZE), "cpu")
    pages = raw_view(inputs.values.lookup_table)[:, :pool_pages]
    first = None
    for kv_len in contexts:
        columns = ceildiv(kv_len, PAGE_SIZE)
        values = replace(
            inputs.values,
            lookup_table=pages.repeat(1, ceildiv(columns, pool_pages))[:, :columns].contiguous().view(torch.uint32),
            cache_lengths=torch.tensor([kv_len - 1], dtype=torch.int32).view(torch.uint32),
            max_cache_length=torch.tensor([kv_len], dtype=torch.int32).view(torch.uint32),
        )
        # Long contexts average out by themselves, and take seconds a run.
        (microseconds,) = CpuClock(0.0, fewest=5 if kv_len <= 1 << 16 else 1)([_attend(replace(inputs, values=values))])
        first = microseconds if first is None else first
        yield _against("attention, by keys of one request", kv_len, "keys", microseconds, first)


def by_pool(times: int = 10, seconds: float = 0.5) -> Iterator[Growth]:
    calls = [_attend(build(_LIVE, "cpu", pool_times=factor)) for factor in (1, times)]
    outs = [call() for call in calls]
    spans = CpuClock(seconds)(calls)
    for factor, out, microseconds in zip((1, times), outs, spans, strict=True):
        same = bool(torch.equal(out, outs[0]))
        yield _against("attention, by the pool's size", factor, "times what is live", microseconds, spans[0], same)


def by_address(seconds: float = 0.5) -> Iterator[Growth]:
    """Memory between the pages is never touched, so it needs no room."""
    near = build(Case(FLAGSHIP, HEADS, 1, _FAR_PAGES * PAGE_SIZE), "cpu")
    blocks = near.values.kv_blocks
    stride = _FAR // (_FAR_PAGES - 1)
    room = torch.empty(stride * (_FAR_PAGES - 1) + blocks[0].numel(), dtype=blocks.dtype)
    apart = room.as_strided(blocks.shape, (stride, *blocks.stride()[1:]))
    for page in range(_FAR_PAGES):
        raw_view(apart)[page] = raw_view(blocks)[page]
    far = replace(near, values=replace(near.values, kv_blocks=apart, page_stride=None))
    calls = [_attend(near), _attend(far)]
    outs = [call() for call in calls]
    spans = CpuClock(seconds)(calls)
    lasts = [(_FAR_PAGES - 1) * each.stride(0) for each in (blocks, apart)]
    for last, out, microseconds in zip(lasts, outs, spans, strict=True):
        same = bool(torch.equal(out, outs[0]))
        yield _against("attention, by the last page's address", last, "elements", microseconds, spans[0], same)


def _attend(inputs: Inputs) -> Callable[[], Tensor]:
    def call() -> Tensor:
        return pagedmla.attend(inputs.q, inputs.values, 0, sm_scale=SM_SCALE, layout=inputs.layout)[0]

    return call


def _against(what: str, size: int, unit: str, microseconds: float, first: float, same: bool | None = None) -> Growth:
    return Growth(what, size, unit, round(microseconds, 1), round(microseconds / first, 3), same)
