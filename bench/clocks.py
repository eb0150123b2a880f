"""Clocks: each takes calls that do the same work, and says microseconds for each.

on a GPU    the median of CUDA events around the replay of a captured graph, so from the first kernel's start to the
            last kernel's end; memory twice the size of L2 is written before each, so that rows come from HBM
on a CPU    the least of several rounds, since other processes only ever add; the calls take turns, so that a busy
            moment of the machine meets all of them. Wall time; where torch has one thread, that thread's CPU time,
            which is the wall time of an idle machine
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Call = Callable[[], Tensor]

REPEATS = 30  # of a captured graph
_WARM_UPS = 3
_FEWEST, _MOST = 5, 100  # rounds on a CPU
_SECONDS = 0.2  # a call and case on a CPU, as far as _FEWEST allows


class Clock(Protocol):
    """`together`: it wants all calls at once, since they are compared; else one after the other, to save memory.
    `name`: what its microseconds are."""

    @property
    def together(self) -> bool: ...

    @property
    def name(self) -> str: ...

    def __call__(self, calls: Sequence[Call]) -> list[float]: ...


class CpuClock:
    together = True

    def __init__(self, seconds: float | None = None, fewest: int = _FEWEST) -> None:
        self.seconds, self.fewest = _SECONDS if seconds is None else seconds, fewest
        alone = torch.get_num_threads() == 1
        self._now = time.thread_time if alone else time.perf_counter
        self.name = "least CPU time of one thread" if alone else f"least wall time, {torch.get_num_threads()} threads"

    def __call__(self, calls: Sequence[Call]) -> list[float]:
        spans: list[list[float]] = [[] for _ in calls]
        until = time.perf_counter() + self.seconds * len(calls)
        while len(spans[0]) < self.fewest or (len(spans[0]) < _MOST and time.perf_counter() < until):
            for call, mine in zip(calls, spans, strict=True):
                start = self._now()
                call()
                mine.append(self._now() - start)
        return [1e6 * min(mine) for mine in spans]


class CudaClock:
    together = False
    name = "median of CUDA events around a captured graph, cold L2"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._swept = torch.empty(2 * l2, dtype=torch.uint8, device=device)

    def __call__(self, calls: Sequence[Call]) -> list[float]:
        return [self._microseconds(call) for call in calls]

    def _microseconds(self, call: Call) -> float:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        spans = []
        for _ in range(REPEATS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._swept.zero_()
            start.record()
            graph.replay()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize(self.device)
        return 1e3 * statistics.median(float(start.elapsed_time(end)) for start, end in spans)


def least_microseconds(call: Callable[[], object], seconds: float = 0.1, calls: int = 1) -> float:
    """Of a host function that runs in one thread: the least CPU time of its runs, of which there are _FEWEST or more.

    CPU time, since host functions are small: on a busy machine their wall time is mostly that of others. `calls` a run,
    of which one is told: for those that take so little that reading the clock, near a microsecond, would show.
    """
    call()
    best, runs, until = float("inf"), 0, time.perf_counter() + seconds
    while runs < _FEWEST or time.perf_counter() < until:
        start = time.thread_time()
        for _ in range(calls):
            call()
        best, runs = min(best, time.thread_time() - start), runs + 1
    return 1e6 * best / calls
