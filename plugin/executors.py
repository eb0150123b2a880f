"""What an executor is, and choosing one: which can run a configuration, and which is expected to win.

Capability and profit are two answers. An executor that can't run something says why; one that can but isn't expected to
win is taken only when asked for, or when no other can run it. The list is in order of preference, and users may edit
it: PAGEDMLA_EXECUTORS="torch,reference".
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import quoted, refuse
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.plugin.step import Step

AUTO = "auto"


@dataclass(frozen=True)
class Configuration:
    """What a choice depends on; None where the call doesn't say."""

    operation: str  # "attend", "store", "prefill", "decompress" or "merge"
    device: torch.device
    layout: CacheLayout | None = None
    num_heads: int | None = None
    page_size: int | None = None
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        layout = "" if self.layout is None else f" in layout {self.layout}"
        return f"{self.operation}{layout} on {self.device.type}"


@dataclass(frozen=True)
class Capacity:
    """The most that a plan's steps bring."""

    max_batch: int
    max_tokens: int
    max_cache_length: int


@dataclass(frozen=True)
class Workspace:
    """Scratch for the parts of a split: `partial_lse [S, max_tokens, H]` float32, the LSE of each part."""

    partial_lse: Tensor

    @property
    def nbytes(self) -> int:
        return self.partial_lse.numel() * self.partial_lse.element_size()


@dataclass(frozen=True)
class AttendOptions:
    sm_scale: float
    causal: bool
    num_partitions: int
    decode_requests: int | None
    workspace: Workspace | None


class Executor(ABC):
    """One way to run the operations. Arguments have been checked; `out` and `lse` are written, whatever they held."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def refusal(self, configuration: Configuration) -> str | None:
        """Why it can't run this, or None."""
        return None

    def drawback(self, configuration: Configuration) -> str | None:
        """Why it isn't expected to win, or None."""
        return None

    def partitions(self, configuration: Configuration, capacity: Capacity, requests: int, tokens: int) -> int:
        """Parts that the keys of `requests` decode rows with `tokens` query tokens are best cut into.

        A number of shapes alone, never of lengths: a captured graph replays it.
        """
        return 1

    def workspace(self, configuration: Configuration, capacity: Capacity, num_partitions: int) -> Workspace:
        heads = configuration.num_heads or 0
        shape = (num_partitions, capacity.max_tokens, heads)
        return Workspace(torch.full(shape, -torch.inf, dtype=torch.float32, device=configuration.device))

    @abstractmethod
    def attend(self, step: Step, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions) -> None:
        """`out [T, H, latent]` in any float dtype and `lse [T, H]` float32 of `q [T, H, width]`."""

    @abstractmethod
    def store(self, step: Step, latent: Tensor, rope: Tensor, *, power_of_two: bool) -> Tensor | None:
        """Write the step's tokens through the tables. The dropped tokens, where they are known without a sync."""

    @abstractmethod
    def store_slots(
        self, step: Step, latent: Tensor, rope: Tensor, slots: Tensor, scale_slots: Tensor, *, power_of_two: bool
    ) -> Tensor | None:
        """The same to given slots, int64 `[T]` each."""

    @abstractmethod
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
        """`out [T, H, Dv]` and `lse [T, H]` of `q [T, H, D]` over dense `k [K, Hk, D]`, `v [K, Hk, Dv]`."""

    @abstractmethod
    def decompress(self, step: Step, starts: Tensor, key_start_loc: Tensor, out: Tensor) -> None:
        """Cached tokens `starts[b] ..` of every request into rows key_start_loc[b] .. of `out [K, latent + rope]`."""

    @abstractmethod
    def merge(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        """`outs [S, T, H, D]` and `lses [S, T, H]` to `out [T, H, D]` and `lse [T, H]`."""


@dataclass(frozen=True)
class Choice:
    """The executor of an operation, why it was taken, and why each one before it wasn't."""

    executor: Executor
    reason: str
    passed_over: tuple[tuple[str, str], ...]


def choose(configuration: Configuration, requested: str = AUTO) -> Choice:
    """The executor for a configuration. ValueError where the requested one, or every one, can't run it."""
    if requested != AUTO:
        executor = _named(requested, "executor", allow_auto=True)
        refusal = executor.refusal(configuration)
        if refusal is not None:
            refuse("executor", f"one that can run {configuration}", f"{requested!r}, but {refusal}")
        return Choice(executor, "asked for", ())
    passed_over: list[tuple[str, str]] = []
    fallback: Executor | None = None
    for executor in _preference():
        obstacle = executor.refusal(configuration)
        if obstacle is None:
            obstacle = executor.drawback(configuration)
            if obstacle is None:
                return Choice(executor, executor.summary, tuple(passed_over))
            fallback = fallback or executor
        passed_over.append((executor.name, obstacle))
    if fallback is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
        refuse("executor", f"one that can run {configuration}", f"none ({reasons})")
    others = tuple((name, reason) for name, reason in passed_over if name != fallback.name)
    return Choice(fallback, f"the first that can run it ({fallback.summary})", others)


def executors() -> tuple[Executor, ...]:
    """All of them, in order of preference."""
    from pagedmla.plugin.executor_reference import ReferenceExecutor
    from pagedmla.plugin.executor_torch import TorchExecutor
    from pagedmla.plugin.executor_triton import TritonExecutor

    return (TritonExecutor(), TorchExecutor(), ReferenceExecutor())


def _preference() -> list[Executor]:
    edited = os.environ.get("PAGEDMLA_EXECUTORS", "").strip()
    if not edited:
        return list(executors())
    return [_named(name.strip(), "PAGEDMLA_EXECUTORS") for name in edited.split(",")]


def _named(name: str, source: str, allow_auto: bool = False) -> Executor:
    known = {executor.name: executor for executor in executors()}
    if name not in known:
        refuse(source, f"one of {', '.join([AUTO] * allow_auto + list(known))}", quoted(name))
    return known[name]
