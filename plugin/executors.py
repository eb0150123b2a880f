"""What an executor is, and choosing one: which can run a configuration, and which is expected to win.

Capability and profit are two answers. An executor that can't run something says why; one that can but isn't expected to
win is taken only when asked for, or when no other can run it. The list is in order of preference, and users may edit
it: PAGEDMLA_EXECUTORS="torch,reference". An executor may have a kernel for attention alone: then another one `serves`
the rest, and the choice is made, and told, for each operation by itself.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import quoted, refuse
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.plugin.step import Step

AUTO = "auto"
EXECUTORS_SWITCH = "PAGEDMLA_EXECUTORS"
PRECISIONS = (AUTO, "fp8", "fp8x2", "fp16")
"""Rounding of queries and softmax weights before they meet an FP8 cache, where an executor has a choice. "fp8": queries
in one e4m3 term (two where the second costs no time), weights in e4m3. "fp8x2": queries in two terms. "fp16": both in
float16. "auto": the executor decides."""


@dataclass(frozen=True)
class Configuration:
    """What a choice depends on; None where the call doesn't say."""

    operation: str  # "attend", "store", "prefill", "decompress" or "merge"
    device: torch.device
    layout: CacheLayout | None = None
    num_heads: int | None = None
    page_size: int | None = None
    dtype: torch.dtype | None = None
    precision: str = AUTO

    def __str__(self) -> str:
        layout = "" if self.layout is None else f" in layout {self.layout}"
        return f"{self.operation}{layout} on {self.device.type}"


@dataclass(frozen=True)
class Capacity:
    """The most that a plan's steps bring."""

    max_batch: int
    max_tokens: int
    max_cache_length: int


class Workspace(ABC):
    """Scratch of one plan; what it holds is its executor's business."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


class NoWorkspace(Workspace):
    """Of an executor that needs none."""

    def tensors(self) -> tuple[Tensor, ...]:
        return ()


class Schedule(Protocol):
    """What an executor launches once for all layers of a step."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What its launches of a layer are handed of it, by name."""


@dataclass(frozen=True, eq=False)
class AttendOptions:
    """What `attend` is told beside a step. `workspace` is the plan's; None: the call takes memory of its own."""

    sm_scale: float
    causal: bool
    num_partitions: int
    workspace: Workspace | None
    precision: str = AUTO
    max_keys: int | None = None  # bound of the plan on a request's keys
    asked_for: bool = False  # by name: what its kernels don't take is refused, not handed to another
    schedule: Schedule | None = None  # of the step, by `Executor.schedule`; None: the call makes its own


class Executor(ABC):
    """One way to run the operations. Arguments have been checked; `out` and `lse` are written, whatever they held."""

    name: ClassVar[str]
    summary: ClassVar[str]
    only_launches: ClassVar[bool] = False
    """Whether `attend` and `store_slots` do nothing on a device but launch Triton kernels: see repeat.py."""

    def serving(self, operation: str) -> Executor:
        """What runs an operation where this executor was named: itself, or another for what it has no kernel for."""
        return self

    def refusal(self, configuration: Configuration) -> str | None:
        """Why it can't run this, or None."""
        return None

    def drawback(self, configuration: Configuration) -> str | None:
        """Why it isn't expected to win, or None."""
        return None

    def load(self, configuration: Configuration, capacity: Capacity) -> str | None:
        """Load what steps within `capacity` run, so that a captured one loads nothing. Why that failed, or None."""
        return None

    def kernels(self, configuration: Configuration, capacity: Capacity) -> tuple[str, ...]:
        """Which of its kernels decode rows take, and when: a line each, where it has several."""
        return ()

    def partitions(self, configuration: Configuration, capacity: Capacity, requests: int, tokens: int) -> int:
        """Parts that the keys of `requests` decode rows with `tokens` query tokens are best cut into.

        A number of shapes alone, never of lengths: a captured graph replays it.
        """
        return 1

    def workspace(self, configuration: Configuration, capacity: Capacity, num_partitions: int) -> Workspace:
        """Scratch for steps within `capacity`, cut into up to `num_partitions` parts, on the configuration's device."""
        return NoWorkspace()

    def schedule(self, step: Step, q: Tensor, options: AttendOptions) -> Schedule | None:
        """Launch what all layers of a step share; it goes into their options. `q` is a layer's."""
        return None

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
    asked_for: bool = False  # by name
    last_resort: bool = False  # it isn't expected to win, and every one that is can't run this


def choose(configuration: Configuration, requested: str = AUTO, capacity: Capacity | None = None) -> Choice:
    """The executor for a configuration. ValueError where the requested one, or every one, can't run it.

    With a `capacity` its kernels are loaded too, and one whose kernels can't be is passed over like one that can't run.
    """
    if requested != AUTO:
        named = _named(requested, "executor", allow_auto=True)
        executor = named.serving(configuration.operation)
        obstacle = executor.refusal(configuration) or _load(executor, configuration, capacity)
        if obstacle is not None:
            refuse("executor", f"one that can run {configuration}", f"{executor.name!r}, but {obstacle}")
        reason = "asked for" if executor is named else f"asked for with {requested}, which only attends"
        return Choice(executor, reason, (), asked_for=True)
    obstacles: dict[str, str] = {}
    fallbacks: list[Executor] = []
    for executor in _preference(configuration.operation):
        obstacle = executor.refusal(configuration)
        if obstacle is None:
            obstacle = executor.drawback(configuration)
            if obstacle is None:
                obstacle = _load(executor, configuration, capacity)
                if obstacle is None:
                    return Choice(executor, executor.summary, tuple(obstacles.items()))
            else:
                fallbacks.append(executor)
        obstacles[executor.name] = obstacle
    for executor in fallbacks:
        obstacle = _load(executor, configuration, capacity)
        if obstacle is None:
            del obstacles[executor.name]
            reason = f"the first that can run it ({executor.summary})"
            return Choice(executor, reason, tuple(obstacles.items()), last_resort=True)
        obstacles[executor.name] = obstacle
    reasons = "; ".join(f"{name}: {reason}" for name, reason in obstacles.items())
    refuse("executor", f"one that can run {configuration}", f"none ({reasons})")


def executors() -> tuple[Executor, ...]:
    """All of them, in order of preference."""
    from pagedmla.plugin.executor_cutlass import CutlassExecutor
    from pagedmla.plugin.executor_cutlass_model import CutlassModelExecutor
    from pagedmla.plugin.executor_reference import ReferenceExecutor
    from pagedmla.plugin.executor_torch import TorchExecutor
    from pagedmla.plugin.executor_triton import TritonExecutor

    return (CutlassExecutor(), TritonExecutor(), TorchExecutor(), ReferenceExecutor(), CutlassModelExecutor())


def chosen_precision(given: str = AUTO) -> str:
    """`given`, or PAGEDMLA_PRECISION where that is "auto". ValueError for what isn't one of PRECISIONS."""
    name, precision = "precision", given
    if given == AUTO:
        name, precision = "PAGEDMLA_PRECISION", os.environ.get("PAGEDMLA_PRECISION", "").strip() or AUTO
    if precision not in PRECISIONS:
        refuse(name, f"one of {', '.join(PRECISIONS)}", quoted(precision))
    return precision


def _load(executor: Executor, configuration: Configuration, capacity: Capacity | None) -> str | None:
    return None if capacity is None else executor.load(configuration, capacity)


def _preference(operation: str) -> list[Executor]:
    edited = os.environ.get(EXECUTORS_SWITCH, "").strip()
    if edited:
        listed = [_named(name.strip(), EXECUTORS_SWITCH) for name in edited.split(",")]
    else:
        listed = list(executors())
    serving = [executor.serving(operation) for executor in listed]
    return list({executor.name: executor for executor in serving}.values())


def _named(name: str, source: str, allow_auto: bool = False) -> Executor:
    known = {executor.name: executor for executor in executors()}
    if name not in known:
        refuse(source, f"one of {', '.join([AUTO] * allow_auto + list(known))}", quoted(name))
    return known[name]
