"""Faults to plant, and a script's run with and without one.

    python tests/fuzz/faults.py NAME SCRIPT ...     runs each script twice; says how it went with the fault, and without

This file imports nothing of the tests, so that scripts run as they would anywhere.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from pagedmla import PagePool
from pagedmla.kv_cache import page_pool
from pagedmla.reference import vectorised


@contextmanager
def a_sigma_is_dropped() -> Iterator[None]:
    """A step's last token gets its codes and not its scale."""
    real = vectorised.store

    def store(latent: Any, rope: Any, cache: Any, *more: Any, **options: Any) -> Any:
        pool = cache.scale_pool
        before = None if pool is None else pool.flat().clone()
        dropped = real(latent, rope, cache, *more, **options)
        if pool is not None and before is not None and len(latent) > 1:
            changed = (pool.flat() != before).nonzero().flatten()
            pool.flat()[changed[-1:]] = before[changed[-1:]]
        return dropped

    with patch.object(vectorised, "store", store):
        yield


@contextmanager
def scales_through_the_values_table() -> Iterator[None]:
    """A page's scales are looked up under the id of its values."""
    real = vectorised.read_rows

    def read_rows(cache: Any, *more: Any) -> Any:
        return real(replace(cache, scales_lookup_table=cache.lookup_table), *more)

    with patch.object(vectorised, "read_rows", read_rows):
        yield


@contextmanager
def a_query_sees_the_next_key() -> Iterator[None]:
    """Off by one in the causal mask of steps with several tokens."""
    real = vectorised._attend_range

    def attend_range(q: Any, cache: Any, layout: Any, layer: int, request: int, last_seen: Any, *keys: int) -> Any:
        return real(q, cache, layout, layer, request, (last_seen + 1).clamp(max=int(last_seen.max())), *keys)

    with patch.object(vectorised, "_attend_range", attend_range):
        yield


@contextmanager
def scales_stay_behind_a_copy() -> Iterator[None]:
    """A page copied on write takes its values along and leaves its scales."""
    real = PagePool.copy_pages

    def copy_pages(pool: PagePool, pairs: Any) -> None:
        scales, pool._paged_scales = pool._paged_scales, None
        try:
            real(pool, pairs)
        finally:
            pool._paged_scales = scales

    with patch.object(PagePool, "copy_pages", copy_pages):
        yield


@contextmanager
def a_page_comes_back_elsewhere() -> Iterator[None]:
    """The last two pages of a request change places on their way from the host."""
    real = page_pool._scatter

    def scatter(pool: Any, pages: list[int], copy: Any) -> None:
        real(pool, pages if len(pages) < 2 else [*pages[:-2], pages[-1], pages[-2]], copy)

    with patch.object(page_pool, "_scatter", scatter):
        yield


@contextmanager
def the_last_part_is_lost() -> Iterator[None]:
    """Keys cut into parts: the merge takes all but the last."""
    real = vectorised.used_partitions

    def used_partitions(kv_len: int, num_partitions: int, tile: int) -> int:
        return max(1, real(kv_len, num_partitions, tile) - (num_partitions > 1))

    with patch.object(vectorised, "used_partitions", used_partitions):
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    fault.__name__: fault
    for fault in (
        a_sigma_is_dropped,
        scales_through_the_values_table,
        a_query_sees_the_next_key,
        scales_stay_behind_a_copy,
        a_page_comes_back_elsewhere,
        the_last_part_is_lost,
    )
}


def outcome(script: str, fault: Callable[[], Any] = nullcontext) -> str:
    """How a run of the script ends: "passes", or the name of its exception."""
    try:
        with fault():
            runpy.run_path(script)
    except Exception as error:
        return type(error).__name__
    return "passes"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, script in zip(sys.argv[1::2], sys.argv[2::2]):
        print(name, outcome(script, FAULTS[name]), outcome(script))
