"""Which layer ran which kind of step on which executor: counted by the calls themselves, never assumed.

Counts are of a process, and of calls that the host makes: the replay of a captured graph makes none. A worker hands
them out through `CountsExtension`:

    llm = LLM(..., worker_extension_cls="pagedmla.plugin.vllm.counters.CountsExtension")
    llm.collective_rpc("pagedmla_counts")
    llm.collective_rpc("pagedmla_layers")
    llm.collective_rpc("pagedmla_caches")
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

from pagedmla.kv_cache.checks import describe, dtype_name


class Call(NamedTuple):
    layer: str
    kind: str  # store, decode, prefill (prompt rows alone) or mixed (decode and prompt rows in one call)
    executor: str


_counts: Counter[Call] = Counter()
_layers: dict[str, str] = {}
_caches: dict[str, tuple[list[int], str, int]] = {}


def count(layer: str, kind: str, executor: str) -> None:
    _counts[Call(layer, kind, executor)] += 1


def counts() -> dict[Call, int]:
    return dict(_counts)


def clear() -> None:
    _counts.clear()


def describe_layer(layer: str, text: str, cache: Tensor) -> None:
    """What serves a layer: said again where the engine gives it another cache."""
    _layers[layer] = f"{text}; cache {describe(cache)}, strides {list(cache.stride())}"
    _caches[layer] = list(cache.shape), dtype_name(cache.dtype), cache.element_size()


class CountsExtension:
    """Methods that vLLM's workers gain; their results travel between processes."""

    def pagedmla_counts(self, reset: bool = False) -> list[tuple[str, str, str, int]]:
        """(layer, kind, executor, calls) of this worker, sorted."""
        found = sorted((*call, number) for call, number in counts().items())
        if reset:
            clear()
        return found

    def pagedmla_layers(self) -> dict[str, str]:
        """For each layer of this worker its plan, and the cache as the engine handed it over."""
        return dict(_layers)

    def pagedmla_caches(self) -> dict[str, tuple[list[int], str, int]]:
        """For each layer of this worker the shape, dtype and bytes an element of its cache."""
        return dict(_caches)
