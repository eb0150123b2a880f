"""How evenly a step's work is cut on ragged batches: a model of both schedules from their own code, nothing is run.

share    the busiest worker's tiles of keys over an even share (1.0: nobody waits)
cutlass  `cutlass_kernels/schedule.py`: shares of all requests laid end to end, a worker a CTA or cluster
triton   `kv_cache/splits.py::choose_span`: pieces, handed out in their order to whoever is free first

Prologues, merges and memory aren't in it: the model says who waits for whom, not for how long.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import pagedmla
from pagedmla.bench.cases import FLAGSHIP, PAGE_SIZE
from pagedmla.bench.ragged import BATCHES, RaggedBatch
from pagedmla.cutlass_kernels import schedule
from pagedmla.cutlass_kernels.tiles import KEYS
from pagedmla.cutlass_kernels.variants import Variant
from pagedmla.hardware.cost import H200
from pagedmla.hardware.targets import find_target
from pagedmla.kv_cache.checks import ceildiv
from pagedmla.kv_cache.splits import SMALLEST_PIECE, choose_span
from pagedmla.plugin import executor_cutlass_variants as variants
from pagedmla.plugin.executor_triton import TritonExecutor, places
from pagedmla.plugin.executors import Capacity, Configuration
from pagedmla.triton_kernels.tiles import rows_for


@dataclass(frozen=True)
class Balance:
    """`pieces`: what the longest request is cut into; `busiest` and `even`: keys of a worker."""

    batch: str
    kind: str
    executor: str
    heads: int
    pieces: int
    busiest: int
    even: float

    @property
    def share(self) -> float:
        return self.busiest / self.even if self.even else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"source": "model", **asdict(self), "share": round(self.share, 3)}


def balances(batches: Iterable[RaggedBatch] = BATCHES, heads: Sequence[int] = (16, 128)) -> Iterator[Balance]:
    """A row for each batch, number of heads and executor."""
    for batch in batches:
        for count in heads:
            capacity = Capacity(len(batch.kv_lens), len(batch.kv_lens) * batch.q_len, max(batch.kv_lens))
            configuration = Configuration(
                "attend", torch.device("cpu"), pagedmla.get_layout(FLAGSHIP), count, PAGE_SIZE, torch.bfloat16
            )
            for executor, cut in (("cutlass", cutlass_loads), ("triton", triton_loads)):
                pieces, loads = cut(batch, configuration, capacity)
                yield Balance(batch.name, batch.kind, executor, count, pieces, max(loads), sum(loads) / len(loads))


def cutlass_loads(batch: RaggedBatch, configuration: Configuration, capacity: Capacity) -> tuple[int, list[int]]:
    """(pieces of the longest request, keys of each worker), in whole tiles."""
    variant: Variant = variants.choose_variant(configuration, batch.q_len, capacity.max_cache_length)
    partitions = variants.pieces(configuration, capacity, capacity.max_batch, capacity.max_tokens, H200.multiprocessors)
    workers = H200.multiprocessors // variant.cluster
    row_tiles = int(schedule.row_tiles_of(batch.q_len, configuration.num_heads, variant.rows))
    units = [int(schedule.units_of(kv_len)) for kv_len in batch.kv_lens for _ in range(row_tiles)]
    total, longest = sum(units), max(units)
    share = schedule.share_of(total, longest, workers, partitions)
    whole = schedule.is_whole(total, longest, len(units), workers, partitions)
    loads, most_pieces, start = [0] * workers, 1, 0
    for segment, count in enumerate(units):
        if whole:
            loads[schedule.owner_of(segment, start, len(units), workers, share)] += count
        else:
            first, last = start // share, (start + count - 1) // share
            for worker in range(first, last + 1):
                begin, end, _, pieces = schedule.piece_of(worker, start, count, share)
                loads[worker] += end - begin
                most_pieces = max(most_pieces, pieces)
        start += count
    return most_pieces, [load * KEYS for load in loads]


def triton_loads(batch: RaggedBatch, configuration: Configuration, capacity: Capacity) -> tuple[int, list[int]]:
    """(pieces of the longest request, keys of each place for a block), in whole tiles."""
    executor, rows = TritonExecutor(), batch.q_len * (configuration.num_heads or 1)
    most = executor.partitions(configuration, capacity, capacity.max_batch, capacity.max_tokens)
    tile = rows_for(rows, find_target("sm_90"))
    at_once = places(configuration.device, tile, quantised=True)
    row_tiles, units = ceildiv(rows, tile), [int(schedule.units_of(kv_len)) for kv_len in batch.kv_lens]
    span = choose_span(
        [row_tiles] * len(units), units, places=at_once, slots=at_once, most_pieces=most,
        smallest=ceildiv(SMALLEST_PIECE, KEYS),
    )  # fmt: skip
    free = [(0, place) for place in range(at_once)]
    loads = [0] * at_once
    for count in units:
        pieces = ceildiv(count, span)
        long = ceildiv(count, pieces)
        for _ in range(row_tiles):
            for piece in range(pieces):
                load, place = heapq.heappop(free)
                loads[place] = load + min(long, count - piece * long)
                heapq.heappush(free, (loads[place], place))
    return ceildiv(max(units), span), [load * KEYS for load in loads]
