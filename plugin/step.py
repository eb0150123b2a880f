"""One call's arguments, bound and checked: what every executor is handed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real

import torch
from torch import Tensor

from pagedmla.kv_cache.binding import bind_values
from pagedmla.kv_cache.checks import (
    INDEX_DTYPES,
    IndexRefusal,
    ceildiv,
    checks_enabled,
    counted,
    describe,
    expect_int,
    expect_memory,
    expect_same_device,
    expect_tensor,
    host_int,
    quoted,
    refuse,
)
from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.layouts import CacheLayout, RowPlanes
from pagedmla.kv_cache.tables import int32_view, int64_lengths
from pagedmla.kv_cache.validation import (
    LivePages,
    check_ids,
    check_lengths,
    check_live_values,
    check_one_scale,
    check_table_width,
    live_pages,
)
from pagedmla.kv_cache.values import KVCacheInputsPerDevice

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
START_DTYPES = (*INDEX_DTYPES, torch.int64)


@dataclass(frozen=True, eq=False)
class Step:
    """The cache of one device, the layout of its rows, and which query tokens belong to which request."""

    values: KVCacheInputsPerDevice
    cache: PagedKVCacheCollection
    layout: CacheLayout
    layer: int
    query_start_loc: Tensor  # [B + 1] int32
    num_tokens: int
    one_token_each: bool  # the call gave no query_start_loc
    known_planes: RowPlanes | None = None  # of a layer that was bound before: made once a layer, not once a step too

    @cached_property
    def planes(self) -> RowPlanes:
        """The layer as kernels see it."""
        if self.known_planes is not None:
            return self.known_planes
        return self.layout.planes(self.cache.value_pool, self.cache.scale_pool, self.layer)

    def over(self, other: Step) -> Step:
        """These requests over another step's layer: pools of the same shape and layout, bound before."""
        cache = replace(self.cache, value_pool=other.cache.value_pool, scale_pool=other.cache.scale_pool)
        values = replace(self.values, kv_blocks=other.values.kv_blocks, kv_scales=other.values.kv_scales)
        return replace(self, cache=cache, values=values, layer=other.layer, known_planes=other.planes)

    @property
    def batch(self) -> int:
        return int(self.cache.cache_lengths.shape[0])

    @property
    def on_host(self) -> bool:
        """Whether lengths and tables can be read without a device sync."""
        return self.cache.cache_lengths.device.type == "cpu"

    def query_lens(self) -> Tensor:
        return self.query_start_loc.to(torch.int64).diff()

    def kv_lens(self) -> Tensor:
        """Keys each request can see this step: cache_length + query length, int64 `[B]`."""
        return (int64_lengths(self.cache.cache_lengths) + self.query_lens()).clamp(min=0)

    def decode_requests(self) -> int | None:
        """How many requests stand first and are decode rows, by `mixed_step_split`; None where it isn't given."""
        return decode_requests_of(self.values, self.batch, self.query_start_loc if self.on_host else None)

    @cached_property
    def decode_rows(self) -> tuple[int, int]:
        """Requests and query tokens that stand first and are decode rows, by `mixed_step_split`; all without it."""
        requests = self.decode_requests()
        if requests is None:
            return self.batch, self.num_tokens
        return requests, int(self.values.mixed_step_split[1])

    @cached_property
    def max_query_length(self) -> int:
        """Largest query length of the step: exact on the host, else the caller's bound."""
        if self.on_host:
            return int(self.query_lens().max()) if self.batch else 0
        return host_int(self.values.max_prompt_length, "max_prompt_length")

    def longest_of(self, requests: int, tokens: int) -> int:
        """Query tokens by which a tile is chosen for the first `requests` requests, which have `tokens` together.

        Where others stand behind, the step's bound is those prompts' own: decode rows are short and alike, and go by
        their mean. A caller's bound may be above all tokens that there are.
        """
        return ceildiv(tokens, requests) if requests < self.batch else min(self.max_query_length, tokens)

    def check_reads(self, check: bool | None) -> None:
        """Checks before attention: table width and ids on the host, scales and bytes too on request."""
        if not (self.on_host or checks_enabled(check)):
            return
        kv_lens = self.kv_lens()
        check_table_width(self.cache, kv_lens)
        live = live_pages(self.cache, kv_lens)
        check_ids(self.cache, live)
        if checks_enabled(check):
            check_lengths(self.cache, self.query_lens())
            self._check_bounds(kv_lens)
            check_live_values(self.cache, self.layout, self.layer, live)

    def check_writes(self, check: bool | None) -> None:
        """Checks before a store through the tables: width on the host, ids and a scale that it reads too on request."""
        if not (self.on_host or checks_enabled(check)):
            return
        kv_lens = self.kv_lens()
        check_table_width(self.cache, kv_lens)
        if checks_enabled(check):
            check_lengths(self.cache, self.query_lens())
            self._check_bounds(kv_lens)
            check_ids(self.cache, live_pages(self.cache, kv_lens))
            check_one_scale(self.cache, self.layer)

    def check_span(self, starts: Tensor, key_start_loc: Tensor, check: bool | None) -> None:
        """Checks before decompression: place, table width and ids on the host, scales and bytes too on request.

        An empty span reads nothing, wherever it starts.
        """
        if not (self.on_host or checks_enabled(check)):
            return
        cached, first, lengths = int64_lengths(self.cache.cache_lengths), starts.long(), key_start_loc.long().diff()
        ends = torch.where(lengths > 0, first + lengths, 0)
        outside = (first < 0) | (ends > cached.clamp(min=0))
        if bool(outside.any()):
            b = int(outside.to(torch.uint8).argmax())
            refuse(
                "starts",
                f"tokens within the {int(cached[b])} cached ones of request {b}",
                f"{int(first[b])} .. {int(first[b] + lengths[b]) - 1}",
            )
        check_table_width(self.cache, ends)
        live = live_pages(self.cache, ends)
        wanted = (live.column + 1) * self.cache.page_size > first[live.row]
        live = LivePages(*(each[wanted] for each in live))
        check_ids(self.cache, live)
        if checks_enabled(check):
            check_live_values(self.cache, self.layout, self.layer, live)

    def _check_bounds(self, kv_lens: Tensor) -> None:
        check_bounds(self.cache, self.query_lens(), kv_lens)


def check_bounds(cache: PagedKVCacheCollection, query_lens: Tensor, kv_lens: Tensor) -> None:
    """max_* are upper bounds: a row above them is a lie that a captured launch would act on."""
    longest_query, longest_kv = (int(lengths.max()) if lengths.numel() else 0 for lengths in (query_lens, kv_lens))
    if longest_query > cache.max_prompt_length:
        refuse("max_prompt_length", f"at least {longest_query}, the longest query", cache.max_prompt_length)
    if longest_kv > cache.max_cache_length:
        refuse("max_cache_length", f"at least {longest_kv}, the longest kv_len", cache.max_cache_length)


def decode_requests_of(values: KVCacheInputsPerDevice, batch: int, host_starts: Tensor | None) -> int | None:
    """The first number of `mixed_step_split`, checked against the batch and, if at hand, the query starts."""
    split = values.mixed_step_split
    if split is None:
        return None
    expect_tensor(split, "mixed_step_split", [2], (torch.int32,), "It is (requests, query tokens), on the host.")
    if split.device.type != "cpu":
        refuse("mixed_step_split", "a tensor on the host", f"one on {split.device}")
    requests, tokens = (int(count) for count in split.tolist())
    if not 0 <= requests <= batch:
        refuse("mixed_step_split", f"0 to {batch} requests", split.tolist())
    if host_starts is not None and int(host_starts[requests]) != tokens:
        wanted = f"{int(host_starts[requests])} query tokens for the first {requests} requests"
        refuse("mixed_step_split", wanted, split.tolist())
    return requests


def bind_step(
    values: KVCacheInputsPerDevice,
    layer: int,
    layout: CacheLayout | str,
    query_start_loc: Tensor | None,
    tokens: Tensor,
    tokens_name: str,
    check: bool | None = None,
) -> Step:
    """Check and bind what attend and store share. `tokens [T, ...]` holds the step's tokens.

    Rows of `tokens` past query_start_loc[-1] are the padding of a captured graph.
    """
    values, layout, cache = bind_values(values, layout)
    layer = expect_int(layer, "layer")
    if not 0 <= layer < cache.num_layers:
        raise IndexRefusal(f"layer: {layer} is out of range for a cache of {counted(cache.num_layers, 'layer')}")
    expect_same_device(cache.blocks, "kv_blocks", **{tokens_name: tokens})
    if checks_enabled(check):  # values are read here already
        expect_memory(cache.blocks, "kv_blocks")
    batch, num_tokens = int(cache.cache_lengths.shape[0]), int(tokens.shape[0])
    one_token_each = query_start_loc is None
    if query_start_loc is None:
        if num_tokens != batch:
            refuse(
                tokens_name,
                f"{batch} tokens, one for each request, since query_start_loc is absent",
                f"{num_tokens}",
                "For several tokens a request pass query_start_loc [B + 1] int32.",
            )
        query_start_loc = torch.arange(batch + 1, dtype=torch.int32, device=tokens.device)
    else:
        expect_tensor(query_start_loc, "query_start_loc", [batch + 1], START_DTYPES)
        expect_same_device(cache.blocks, "kv_blocks", query_start_loc=query_start_loc)
        check_starts(query_start_loc, "query_start_loc", num_tokens, tokens_name, check)
        query_start_loc = int32_starts(query_start_loc)
    return Step(values, cache, layout, layer, query_start_loc, num_tokens, one_token_each)


def int32_starts(starts: Tensor) -> Tensor:
    """Checked starts as executors take them."""
    return int32_view(starts).to(torch.int32)


def check_starts(start_loc: Tensor, name: str, num_tokens: int, tokens_name: str, check: bool | None = False) -> None:
    """Refuse starts that don't rise from 0 to at most `num_tokens`; a device's are read on request alone."""
    if start_loc.device.type != "cpu" and not checks_enabled(check):
        return
    starts = start_loc.tolist()
    if not starts or starts[0] != 0 or starts != sorted(starts):
        refuse(name, "0 first, then rising or equal", starts)
    if starts[-1] > num_tokens:
        refuse(name, f"at most {num_tokens}, the tokens of {tokens_name}, at its end", starts[-1])


def expect_scale(sm_scale: object) -> float:
    """`sm_scale` as a finite Python float; a tensor may lie on a device."""
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, Real):
        refuse("sm_scale", "a number", quoted(sm_scale), error=TypeError)
    if not math.isfinite(sm_scale):
        refuse("sm_scale", "a finite number", sm_scale)
    return float(sm_scale)


def check_out(out: Tensor, anchor: Tensor) -> None:
    """Refuse an `out` that can't be written in place, element by element, on the device of `anchor`."""
    if out.device != anchor.device:
        refuse("out", f"a tensor on {anchor.device}", f"one on {out.device}")
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape)):
        refuse("out", "an address for each element", f"strides {out.stride()}", "It is written in place.")
    if out.requires_grad and torch.is_grad_enabled():
        refuse("out", "a tensor that doesn't require grad", f"{describe(out)} that does", "Call under torch.no_grad().")
