"""The Triton kernels: on a GPU compiled, on a CPU run by the corrected interpreter, which is exact and slow.

Triton is imported when a kernel first runs. A step of one partition is one launch. Otherwise its work is spread by the
lengths: a schedule, which all layers share, a launch of its pieces and one that merges what was cut. Prompts that stand
behind the decode rows (`mixed_step_split`) and keep a GPU busy by themselves are a launch of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedmla.hardware.cost import H200
from pagedmla.hardware.targets import Target, target_of
from pagedmla.kv_cache.checks import ceildiv, dtype_name
from pagedmla.kv_cache.layouts import LATENTS, ROPE
from pagedmla.kv_cache.splits import MOST_REQUESTS, SMALLEST_PIECE
from pagedmla.plugin import self_check
from pagedmla.plugin.executors import AUTO, AttendOptions, Capacity, Configuration, Executor, Workspace
from pagedmla.plugin.step import Step
from pagedmla.reference import vectorised
from pagedmla.triton_kernels.tiles import rows_for

if TYPE_CHECKING:
    from pagedmla.triton_kernels.schedule import Schedule

ROWS_A_BLOCK = 64  # at most


@dataclass(frozen=True, eq=False)
class PartialStates(Workspace):
    """Room for the states of so many rows of cut tiles: `partial_lse [rows]`, `partial_out [rows, latent]`."""

    partial_lse: Tensor
    partial_out: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.partial_lse, self.partial_out

    def views(self, slots: int, rows: int) -> tuple[Tensor, Tensor]:
        """(out `[slots, rows, latent]`, lse `[slots, rows]`) at the front of the room."""
        out, lse = self.partial_out[: slots * rows], self.partial_lse[: slots * rows]
        return out.view(slots, rows, out.shape[1]), lse.view(slots, rows)


class TritonExecutor(Executor):
    name = "triton"
    summary = "Triton kernels"
    only_launches = True

    def refusal(self, configuration: Configuration) -> str | None:
        if not _has_triton():
            return "triton isn't installed: pip install pagedmla[triton]"
        if configuration.device.type not in ("cpu", "cuda"):
            return f"Triton kernels run on cuda and cpu devices, not on {configuration.device.type}"
        if configuration.dtype == torch.float64:
            return "the kernels compute in float32 at most, not in float64"
        layout = configuration.layout
        if layout is None:
            return None
        if layout.latent not in LATENTS or layout.rope != ROPE:
            latents = " or ".join(map(str, LATENTS))
            return f"the kernels take latents of {latents} and a rope of {ROPE}, not {layout.latent} and {layout.rope}"
        if configuration.operation == "attend":
            return self._attend_refusal(configuration)
        return None

    def _attend_refusal(self, configuration: Configuration) -> str | None:
        layout, page_size = configuration.layout, configuration.page_size
        if layout is not None and layout.quantised and configuration.dtype == torch.float32:
            return f"queries over an FP8 cache are bfloat16 or float16, not {dtype_name(torch.float32)}"
        if page_size is not None and page_size & (page_size - 1) and page_size % 16:
            return f"page sizes are powers of two or multiples of 16, not {page_size}"
        if configuration.num_heads is not None and configuration.num_heads > 128:
            return f"the kernels take up to 128 heads, not {configuration.num_heads}"
        return None

    def load(self, configuration: Configuration, capacity: Capacity) -> str | None:
        """See that its kernels are right on this GPU (self_check.py)."""
        if configuration.device.type != "cuda" or configuration.layout is None or not self_check.is_wanted():
            return None
        try:
            # What the check itself goes by: a plan that only holds more is not checked again.
            checked = replace(configuration, operation="attend", precision=AUTO)
            return _fault(checked, self_check.parts(TritonExecutor(), configuration, capacity))
        except torch.OutOfMemoryError:  # passes, and says nothing of the kernels
            raise
        except Exception as error:
            return f"Triton's kernels can't be run: {type(error).__name__}: {error}"

    def drawback(self, configuration: Configuration) -> str | None:
        if configuration.device.type == "cuda":
            return None
        return "on a CPU it runs in Triton's interpreter, which is for tests"

    def partitions(self, configuration: Configuration, capacity: Capacity, requests: int, tokens: int) -> int:
        """As many as there may be pieces of SMALLEST_PIECE keys, within what runs at once: the schedule takes fewer."""
        if not 0 < requests <= MOST_REQUESTS or tokens == 0:
            return 1
        rows = rows_for(ceildiv(tokens, requests) * (configuration.num_heads or 1), _target(configuration.device))
        quantised = configuration.layout is not None and configuration.layout.quantised
        return max(1, min(places(configuration.device, rows, quantised), capacity.max_cache_length // SMALLEST_PIECE))

    def workspace(self, configuration: Configuration, capacity: Capacity, num_partitions: int) -> Workspace:
        latent = 0 if configuration.layout is None else configuration.layout.latent
        rows, device = self.partial_rows(configuration, capacity, num_partitions), configuration.device
        return PartialStates(
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, latent, dtype=torch.float32, device=device),
        )

    def partial_rows(self, configuration: Configuration, capacity: Capacity, num_partitions: int) -> int:
        """States for as many tiles of rows as run at once, or for all pieces that may be made, if fewer."""
        if num_partitions == 1:
            return 0
        rows = capacity.max_tokens * (configuration.num_heads or 0) + (capacity.max_batch + 1) * ROWS_A_BLOCK
        return min(num_partitions * rows, multiprocessors(configuration.device) * ROWS_A_BLOCK)

    def schedule(self, step: Step, q: Tensor, options: AttendOptions) -> Schedule | None:
        """Of the step's first requests, whose work is spread; None where none is."""
        from pagedmla.triton_kernels.pieces import tile_of
        from pagedmla.triton_kernels.schedule import make_schedule

        requests, tokens = _spread_rows(step, q, options)
        if requests == 0:
            return None
        heads = q.shape[1]
        rows, keys = tile_of(q, step.planes, step.longest_of(requests, tokens))
        at_once = places(q.device, rows, step.layout.quantised)
        row_tiles = requests * ceildiv(heads, rows) if step.one_token_each else tokens * heads // rows + requests + 1
        room = options.workspace
        slots = min(at_once, row_tiles * options.num_partitions)
        if isinstance(room, PartialStates):
            slots = min(slots, room.partial_lse.shape[0] // rows)
        return make_schedule(
            step.cache.cache_lengths[:requests],
            step.query_start_loc[: requests + 1],
            tokens=tokens,
            heads=heads,
            rows=rows,
            keys=keys,
            row_tiles=row_tiles,
            places=at_once,
            slots=slots,
            most_pieces=options.num_partitions,
        )

    def attend(self, step: Step, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions) -> None:
        requests, tokens = _spread_rows(step, q, options)
        if requests > 0:
            first = slice(0, tokens)
            _attend_spread(self, step, q[first], out[first], lse[first], options, requests)
        if requests < step.batch or requests == 0:
            attend_from(step, q, out, lse, options, requests)

    def store(self, step: Step, latent: Tensor, rope: Tensor, *, power_of_two: bool) -> Tensor | None:
        from pagedmla.triton_kernels.store import store

        store(
            latent,
            rope,
            step.planes,
            step.cache.lookup_table,
            step.cache.cache_lengths,
            step.query_start_loc,
            step.cache.scales_lookup_table,
            power_of_two=power_of_two,
        )
        return vectorised.dropped_from_step(step.cache, step.layout, step.query_start_loc) if step.on_host else None

    def store_slots(
        self, step: Step, latent: Tensor, rope: Tensor, slots: Tensor, scale_slots: Tensor, *, power_of_two: bool
    ) -> Tensor | None:
        from pagedmla.triton_kernels.store import store_slots

        store_slots(latent, rope, step.planes, slots, scale_slots, power_of_two=power_of_two)
        return vectorised.dropped_tokens(step.cache, step.layout, slots, scale_slots) if step.on_host else None

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_start_loc: Tensor,
        key_start_loc: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        sm_scale: float,
        causal: bool,
    ) -> None:
        from pagedmla.triton_kernels.prefill import prefill

        prefill(q, k, v, query_start_loc, key_start_loc, out, lse, sm_scale=sm_scale, causal=causal)

    def decompress(self, step: Step, starts: Tensor, key_start_loc: Tensor, out: Tensor) -> None:
        from pagedmla.triton_kernels.decompress import decompress

        tables = step.cache.lookup_table, step.cache.scales_lookup_table
        decompress(step.planes, tables[0], starts, key_start_loc, out, tables[1])

    def merge(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        from pagedmla.triton_kernels.merge import merge

        merge(outs, lses.to(torch.float32), out, lse)


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    """Looked for once: every automatic choice asks, and where Triton isn't loaded it is a walk over sys.path."""
    return find_spec("triton") is not None


@lru_cache
def _fault(configuration: Configuration, parts: int) -> str | None:
    """Found once a process for plans that are alike."""
    return self_check.fault(TritonExecutor(), configuration, parts)


def _spread_rows(step: Step, q: Tensor, options: AttendOptions) -> tuple[int, int]:
    """Requests, and their query tokens, whose work is spread by lengths: the decode rows, and prompts behind them in a
    step that doesn't fill a GPU."""
    requests, tokens = step.decode_rows
    if options.num_partitions == 1 or tokens == 0:
        return 0, 0
    if ceildiv(step.num_tokens * q.shape[1], ROWS_A_BLOCK) <= multiprocessors(q.device):
        requests = step.batch
    if requests > MOST_REQUESTS:
        return 0, 0
    return requests, step.num_tokens if requests == step.batch else tokens


def _attend_spread(
    executor: TritonExecutor, step: Step, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions, requests: int
) -> None:
    """The first `requests` requests, whose tokens are all of `q`."""
    from pagedmla.triton_kernels.pieces import attend_pieces
    from pagedmla.triton_kernels.schedule import Schedule

    given, cache = options.schedule, step.cache
    schedule = given if isinstance(given, Schedule) else executor.schedule(step, q, options)
    assert schedule is not None
    if isinstance(options.workspace, PartialStates):
        states, state_lse = options.workspace.views(schedule.slots, schedule.rows)
    else:
        states = q.new_empty(schedule.slots, schedule.rows, out.shape[2], dtype=torch.float32)
        state_lse = q.new_empty(schedule.slots, schedule.rows, dtype=torch.float32)
    attend_pieces(
        q,
        step.planes,
        cache.lookup_table[:requests],
        schedule,
        out,
        lse,
        states,
        state_lse,
        cache.scales_lookup_table[:requests],
        sm_scale=options.sm_scale,
        max_query_len=step.longest_of(requests, q.shape[0]),
        causal=options.causal,
    )


def attend_from(step: Step, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions, first: int) -> None:
    """Request `first` and all behind it, a program a tile of rows; `q`, `out` and `lse` are the whole step's."""
    cache = step.cache
    where = (step.planes, cache.lookup_table[first:], cache.cache_lengths[first:])
    scales_table = cache.scales_lookup_table[first:]
    if step.one_token_each and first == 0:
        from pagedmla.triton_kernels.decode import attend_decode

        attend_decode(q, *where, out, lse, scales_table, sm_scale=options.sm_scale, causal=options.causal)
        return
    from pagedmla.triton_kernels.mixed import attend_mixed

    attend_mixed(
        q,
        *where,
        step.query_start_loc[first:],
        out,
        lse,
        scales_table,
        sm_scale=options.sm_scale,
        max_query_len=step.max_query_length,
        causal=options.causal,
    )


def places(device: torch.device, rows: int, quantised: bool) -> int:
    """Tiles of so many rows that run at once: of an FP8 cache a multiprocessor holds two blocks of 16 rows."""
    return multiprocessors(device) * (2 if rows == 16 and quantised else 1)


def _target(device: torch.device) -> Target:
    """What kernels are built for on a device; an H200 where there is no GPU."""
    return target_of(device if torch.cuda.is_available() else torch.device("cpu"))


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; an H200's where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H200.multiprocessors
    return torch.cuda.get_device_properties(device).multi_processor_count
