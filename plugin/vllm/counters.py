"""Which layer ran which kind of step on which executor: counted by the calls themselves, never assumed.

Counts are of a process, and of calls that the host makes: the replay of a captured graph makes none. A worker hands
them out through `CountsExtension`:

    llm = LLM(..., worker_extension_cls="pagedmla.plugin.vllm.counters.CountsExtension")
    llm.collective_rpc("pagedmla_counts")
    llm.collective_rpc("pagedmla_layers")
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Call(NamedTuple):
    layer: str
    kind: str  # store, decode, prefill (prompt rows alone) or mixed (decode and prompt rows in one call)
    executor: str


_counts: Counter[Call] = Counter()
_layers: dict[str, str] = {}


def count(layer: str, kind: str, executor: str) -> None:
    _counts[Call(layer, kind, executor)] += 1


def counts() -> dict[Call, int]:
    return dict(_counts)


def clear() -> None:
    _counts.clear()


def describe_layer(layer: str, text: str) -> None:
    """What serves a layer: said again where the engine gives it another cache."""
    _layers[layer] = text


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
