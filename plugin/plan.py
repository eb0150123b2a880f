"""A plan: made once for a configuration, checked against every step, never a step's lengths.

It fixes capacities (requests, tokens, lengths, heads, layout), the executor of each operation and the workspace, so
that a captured graph replays with other lengths and tables. It refuses what exceeds it, by name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from pagedmla.hardware.cost import GPUS, attention_cost
from pagedmla.kv_cache.binding import bind_values
from pagedmla.kv_cache.checks import (
    INDEX_DTYPES,
    Refusal,
    counted,
    dtype_name,
    expect_bool,
    expect_int,
    expect_tensor,
    refuse,
)
from pagedmla.kv_cache.collection import PagedKVCacheCollection
from pagedmla.kv_cache.layouts import CacheLayout, get_layout
from pagedmla.kv_cache.splits import useful_partitions
from pagedmla.kv_cache.tables import int64_lengths
from pagedmla.kv_cache.validation import check_ids, live_pages
from pagedmla.kv_cache.values import KVCacheInputsPerDevice
from pagedmla.plugin.executors import (
    AUTO,
    EXECUTORS_SWITCH,
    AttendOptions,
    Capacity,
    Choice,
    Configuration,
    Workspace,
    choose,
    chosen_precision,
)
from pagedmla.plugin.step import FLOATS, Step, check_bounds, check_starts, decode_requests_of, expect_scale

_Field = TypeVar("_Field")


@dataclass(frozen=True)
class StepSummary:
    """What `Plan.prepare` learned of a step from host copies."""

    decode_requests: int
    decode_tokens: int
    prefill_requests: int
    query_tokens: int
    key_tokens: int
    scored_pairs: int
    num_partitions: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Made by `plan(...)`. One step at a time: calls on two streams need a plan each, since they share `workspace`.

    configuration     what steps are made of: layout, heads, pages, dtype, device, precision
    capacity          the most that they bring
    sm_scale, causal  of attention
    num_partitions    parts that a decode row's keys are cut into; None: the executor's choice by a step's shape
    most_partitions   the most that a step may have, of which `workspace` holds the states
    attend_choice, store_choice  the executor of each operation, and why it was taken
    workspace         scratch of `attend`
    reserved          whether it is there; else it is on the meta device, and the plan serves no step
    """

    configuration: Configuration
    capacity: Capacity
    sm_scale: float
    causal: bool
    num_partitions: int | None
    most_partitions: int
    attend_choice: Choice
    store_choice: Choice
    workspace: Workspace
    reserved: bool

    @property
    def layout(self) -> CacheLayout:
        return _given(self.configuration.layout)

    @property
    def num_heads(self) -> int:
        return _given(self.configuration.num_heads)

    @property
    def page_size(self) -> int:
        return _given(self.configuration.page_size)

    @property
    def dtype(self) -> torch.dtype:
        return _given(self.configuration.dtype)

    @property
    def device(self) -> torch.device:
        return self.configuration.device

    @property
    def precision(self) -> str:
        return self.configuration.precision

    @property
    def max_batch(self) -> int:
        return self.capacity.max_batch

    @property
    def max_tokens(self) -> int:
        return self.capacity.max_tokens

    @property
    def max_cache_length(self) -> int:
        return self.capacity.max_cache_length

    def __str__(self) -> str:
        return (
            f"plan of layout {self.layout}, H={self.num_heads}, pages of {self.page_size}, up to {self.max_batch} "
            f"requests, {self.max_tokens} tokens and {self.max_cache_length} keys"
        )

    def check(self, step: Step, q: Tensor, sm_scale: float, causal: bool) -> None:
        """ValueError where a call isn't what the plan was made for. Reads no device value."""
        if not self.reserved:
            raise Refusal("plan holds no memory. Make it with reserve=True.")
        self._same("layout", self.layout, step.layout)
        self._same("device", self.device, q.device)
        self._same("H", self.num_heads, q.shape[1])
        self._same("columns a query", self.layout.width, q.shape[2])
        self._same("page size", self.page_size, step.cache.page_size)
        self._same("query dtype", dtype_name(self.dtype), dtype_name(q.dtype))
        self._same("sm_scale", self.sm_scale, sm_scale)
        self._same("causal", self.causal, causal)
        self._at_most("requests", self.max_batch, step.batch)
        self._at_most("tokens", self.max_tokens, step.num_tokens)
        if step.on_host and step.batch:
            self._at_most("keys", self.max_cache_length, int(step.kv_lens().max()))

    def check_engine(self) -> None:
        """ValueError where an engine's steps would go to an executor that nobody named and that isn't meant for them.

        A layer would be right, and the engine slow without a word: on a GPU without Triton, say.
        """
        if os.environ.get(EXECUTORS_SWITCH, "").strip():
            return
        for operation, choice in (("attend", self.attend_choice), ("store", self.store_choice)):
            if choice.last_resort:
                name = choice.executor.name
                refuse(
                    "pagedmla",
                    f"an executor that is meant to {operation} on {self.device.type}",
                    "none (" + "; ".join(f"{each}: {why}" for each, why in choice.passed_over) + ")",
                    f"{EXECUTORS_SWITCH}={name} takes {name} all the same.",
                )

    def partitions(self, step: Step) -> int:
        """Partitions of a step's decode rows: what the values' dispatch metadata asks for, else the plan's number, else
        what the executor takes for a step of this shape."""
        asked = step.values.dispatch(step.max_query_length).num_partitions
        requests, tokens = step.decode_rows
        return self._partitions(asked, requests, tokens)

    def _partitions(self, asked: int | None, requests: int, tokens: int) -> int:
        if asked is not None:
            asked = useful_partitions(asked, self.max_cache_length, self.page_size)
            self._at_most("partitions", self.most_partitions, asked)
            return asked
        if self.num_partitions is not None:
            return self.num_partitions
        return self.attend_choice.executor.partitions(self.configuration, self.capacity, requests, tokens)

    def options(self, step: Step) -> AttendOptions:
        """What the executor of `attend` is told beside a step that `check` let pass."""
        return AttendOptions(
            self.sm_scale,
            self.causal,
            self.partitions(step),
            self.workspace,
            self.precision,
            self.max_cache_length,
            self.attend_choice.asked_for,
        )

    def prepare(
        self,
        values: KVCacheInputsPerDevice,
        query_start_loc: Tensor | None = None,
        *,
        host_cache_lengths: Tensor | None = None,
        host_query_start_loc: Tensor | None = None,
        host_lookup_table: Tensor | None = None,
        host_scales_lookup_table: Tensor | None = None,
    ) -> StepSummary:
        """Check a step once for all its layers, from host copies (or from the tensors, where they lie on the host).

        query_start_loc           `[B + 1]` int32, uint32 or int64, as `attend` takes it; None: one token each
        host_cache_lengths        `[B]`, host_query_start_loc `[B + 1]`: int32, uint32 or int64, on the CPU
        host_lookup_table         like `values.lookup_table`, host_scales_lookup_table like its namesake: same shape and
                                  dtype, on the CPU; without them ids on a device aren't checked

        Checks the layout, capacities, query starts, the `max_*` bounds, the width of both tables against the lengths,
        and, where the tables' entries are at hand, the ids in use against both pools. Raises ValueError, TypeError and
        IndexError; reads no device value.
        """
        values, _, cache = bind_values(values, self.layout)
        self._same("page size", self.page_size, cache.page_size)
        batch = int(cache.cache_lengths.shape[0])
        lengths = _host_copy(values.cache_lengths, host_cache_lengths, "host_cache_lengths", batch)
        if query_start_loc is None and host_query_start_loc is None:
            starts = torch.arange(batch + 1)
        else:
            starts = _host_copy(query_start_loc, host_query_start_loc, "host_query_start_loc", batch + 1)
            starts = starts.to(torch.int64)
            check_starts(starts, "query_start_loc", int(starts.max()), "the step")
        query_lens = starts.diff()
        kv_lens = (int64_lengths(lengths) + query_lens).clamp(min=0)
        self._at_most("requests", self.max_batch, batch)
        self._at_most("tokens", self.max_tokens, int(query_lens.sum()))
        self._at_most("keys", self.max_cache_length, int(kv_lens.max()) if batch else 0)
        columns = int((-(-kv_lens // self.page_size)).max()) if batch else 0
        for name in ("lookup_table", "scales_lookup_table"):
            table = getattr(cache, name)
            if table.shape[1] < columns:
                refuse(name, f"at least {counted(columns, 'column')} for the longest request", table)
        check_bounds(cache, query_lens, kv_lens)
        host = _with_host_tables(cache, values, host_lookup_table, host_scales_lookup_table)
        if host is not None:
            check_ids(host, live_pages(host, kv_lens))
        longest_query = int(query_lens.max()) if batch else 0
        asked = values.dispatch(longest_query).num_partitions
        decode_requests = decode_requests_of(values, batch, starts)
        if decode_requests is None:
            decode_requests = batch
        decode_tokens = int(query_lens[:decode_requests].sum())
        return StepSummary(
            decode_requests,
            decode_tokens,
            batch - decode_requests,
            int(query_lens.sum()),
            int(kv_lens.sum()),
            int((query_lens * kv_lens).sum()),
            self._partitions(asked, decode_requests, decode_tokens),
        )

    def explain(self, summary: StepSummary | None = None) -> str:
        """Which executor runs what, why, why not the others, and the bytes and floor of a step (a model).

        Without a `summary` the step is the largest that the plan holds.
        """
        lines = [str(self)]
        for operation, choice in (("attend", self.attend_choice), ("store", self.store_choice)):
            lines.append(f"  {operation}: {choice.executor.name} ({choice.reason})")
            if operation == "attend":
                lines += [f"    {each}" for each in choice.executor.kernels(self.configuration, self.capacity)]
            lines += [f"    not {name}: {reason}" for name, reason in choice.passed_over]
        if summary is None:
            pairs = self.max_tokens * self.max_cache_length
            keys, tokens, partitions = self.max_batch * self.max_cache_length, self.max_tokens, self.most_partitions
        else:
            pairs, keys, tokens = summary.scored_pairs, summary.key_tokens, summary.query_tokens
            partitions = summary.num_partitions
        cost = attention_cost(
            self.layout,
            num_heads=self.num_heads,
            query_tokens=tokens,
            key_tokens=keys,
            scored_pairs=pairs,
            io_bytes=self.dtype.itemsize,
        )
        what = "the largest step" if summary is None else "this step"
        at_most = "at most " if summary is None and self.num_partitions is None and partitions > 1 else ""
        lines.append(f"  partitions: {at_most}{partitions}; workspace: {self.workspace.nbytes:,} bytes")
        lines.append(f"  {what}, one layer: {cost.bytes:,} bytes, {cost.flops:,} FLOPs")
        floors = ", ".join(f"{gpu.name} {cost.floor_us(gpu, fp8_mma=self.layout.quantised):,.1f} us" for gpu in GPUS)
        lines.append(f"  floor at published peaks (model, not measured): {floors}")
        return "\n".join(lines)

    def _same(self, what: str, held: object, got: object) -> None:
        if held != got:
            raise Refusal(f"plan holds {what} {held}; got {got}. Make another plan for it.")

    def _at_most(self, what: str, held: int, got: int) -> None:
        if got > held:
            raise Refusal(f"plan holds {held} {what}; got {got}. Make a larger plan.")


def plan(
    *,
    layout: CacheLayout | str,
    num_heads: int,
    page_size: int,
    max_batch: int,
    max_tokens: int,
    max_cache_length: int,
    dtype: torch.dtype,
    device: torch.device | str,
    sm_scale: float,
    causal: bool = True,
    num_partitions: int | None = None,
    executor: str = AUTO,
    precision: str = AUTO,
    reserve: bool = True,
) -> Plan:
    """Fix everything about a series of steps but their lengths and tables.

    layout            a CacheLayout, or the name of one (latent 512, rope 64)
    num_heads         query heads on this device; page_size: tokens a page
    max_batch         requests a step; max_tokens: query tokens a step; max_cache_length: keys a request, after the step
    dtype, device     of the queries
    sm_scale, causal  of attention, as in `attend`
    num_partitions    parts that a decode row's keys are cut into, as far as `max_cache_length` keys can be cut; None
                      leaves it to the executor, by a step's shape;
                      the values' dispatch metadata, where present, overrides it from step to step
    executor          "auto", or one by name. One that has no kernel for an operation leaves it to another
    precision         "auto", "fp8", "fp8x2" or "fp16": what the CUTLASS kernels round queries to (e4m3 in one term or
                      in two, float16), and weights (e4m3, float16); "auto" takes PAGEDMLA_PRECISION where that is
                      set. The other executors have one precision, at least that of fp16
    reserve           False: no kernel is loaded and no memory taken. Such a plan explains, here or for a device that
                      isn't, and serves no step

    Raises ValueError for capacities below 1 and for what no executor can run, TypeError for what isn't of its kind.
    """
    if isinstance(layout, str):
        layout = get_layout(layout)
    if not isinstance(layout, CacheLayout):
        refuse("layout", "a CacheLayout or its name", layout, error=TypeError)
    if dtype not in FLOATS:
        refuse("dtype", " or ".join(map(dtype_name, FLOATS)), str(dtype))
    sm_scale, causal, reserve = expect_scale(sm_scale), expect_bool(causal, "causal"), expect_bool(reserve, "reserve")
    capacities = {
        "num_heads": num_heads,
        "page_size": page_size,
        "max_batch": max_batch,
        "max_tokens": max_tokens,
        "max_cache_length": max_cache_length,
        "num_partitions": 1 if num_partitions is None else num_partitions,
    }
    for name, value in capacities.items():
        if expect_int(value, name) < 1:
            refuse(name, "at least 1", value)
    device, precision = expect_device(device), chosen_precision(precision)
    configuration = Configuration("attend", device, layout, num_heads, page_size, dtype, precision)
    capacity = Capacity(max_batch, max_tokens, max_cache_length)
    attend_choice = choose(configuration, executor, capacity if reserve else None)
    store_choice = choose(replace(configuration, operation="store"), executor, capacity if reserve else None)
    if num_partitions is not None:
        num_partitions = useful_partitions(num_partitions, max_cache_length, page_size)
    most_partitions = num_partitions or attend_choice.executor.partitions(configuration, capacity, 1, 1)
    room = configuration if reserve else replace(configuration, device=torch.device("meta"))
    try:
        workspace = attend_choice.executor.workspace(room, capacity, most_partitions)
    except RuntimeError as impossible:  # on the meta device no memory runs out
        if reserve:
            raise
        refuse("workspace", "a size that memory can have", str(impossible).partition("\n")[0])
    return Plan(
        configuration,
        capacity,
        sm_scale,
        causal,
        num_partitions,
        most_partitions,
        attend_choice,
        store_choice,
        workspace,
        reserve,
    )


def expect_device(device: torch.device | str) -> torch.device:
    """As the tensors of a step name theirs. "cuda" alone is the card that is current now: another one, later."""
    try:
        device = torch.device(device)
    except RuntimeError as unknown:
        refuse("device", "a device of torch's", f"{device!r} ({str(unknown).splitlines()[0]})")
    if device == torch.device("cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def _given(field: _Field | None) -> _Field:
    assert field is not None  # `plan` has it
    return field


def _with_host_tables(
    cache: PagedKVCacheCollection, values: KVCacheInputsPerDevice, copy: Tensor | None, scales_copy: Tensor | None
) -> PagedKVCacheCollection | None:
    """The cache with tables that can be read: the copies, or its own on the host. None where there is neither.

    Without a readable table of scales it has no scale pool.
    """
    if values.scales_lookup_table is None and scales_copy is not None:
        refuse("host_scales_lookup_table", "None, since there is no scales_lookup_table", scales_copy)
    table = _host_table(cache.lookup_table, copy, "host_lookup_table")
    scales_table = table
    if values.scales_lookup_table is not None:
        scales_table = _host_table(cache.scales_lookup_table, scales_copy, "host_scales_lookup_table")
    if table is None:
        return None
    if scales_table is None:
        return replace(cache, lookup_table=table, scales_lookup_table=table, scale_pool=None)
    return replace(cache, lookup_table=table, scales_lookup_table=scales_table)


def _host_table(table: Tensor, copy: Tensor | None, name: str) -> Tensor | None:
    if copy is None:
        return table if table.device.type == "cpu" else None
    expect_tensor(copy, name, list(table.shape), (table.dtype,))
    if copy.device.type != "cpu":
        refuse(name, "a tensor on the host", f"one on {copy.device}")
    return copy


def _host_copy(tensor: Tensor | None, copy: Tensor | None, name: str, size: int) -> Tensor:
    source = copy if copy is not None else tensor
    if source is None or source.device.type != "cpu":
        refuse(name, f"a copy [{size}] on the host, since the tensor itself is on a device", copy)
    return expect_tensor(source, name, [size], (*INDEX_DTYPES, torch.int64))
