"""The executors, in order of preference: what each can run, and where it is expected to win.

Capability and profit are two answers. An executor that can't run says why; one that can but isn't expected to win is
taken only when asked for, or when nothing before it in the list applies. Users may edit the list:
PAGEDMLA_EXECUTORS="torch,reference".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import refuse
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.plugin.step import Step

AUTO = "auto"


@dataclass(frozen=True)
class Configuration:
    """What a choice depends on; None where the call doesn't say."""

    operation: str  # "attend" or "store"
    layout: CacheLayout
    device: torch.device
    num_heads: int | None = None
    page_size: int | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class AttendOptions:
    sm_scale: float
    causal: bool
    num_partitions: int
    decode_requests: int | None
    partial_lse: Tensor | None


@dataclass(frozen=True)
class Executor:
    """One way to run the operations. `attend` gives float (out, lse); `store` gives the dropped tokens."""

    name: str
    summary: str
    refusal: Callable[[Configuration], str | None]  # why it can't run this, or None
    drawback: Callable[[Configuration], str | None]  # why it isn't expected to win, or None
    honours_partitions: bool
    attend: Callable[[Step, Tensor, AttendOptions], tuple[Tensor, Tensor]]
    store: Callable[[Step, Tensor, Tensor, Tensor, Tensor, bool], Tensor]
    step_slots: Callable[[Step, Tensor], Tensor]


@dataclass(frozen=True)
class Choice:
    """The executor of an operation, why it was taken, and why each one before it wasn't."""

    executor: Executor
    reason: str
    passed_over: tuple[tuple[str, str], ...]


def choose(configuration: Configuration, requested: str = AUTO) -> Choice:
    """The executor for a configuration. ValueError where the requested one, or every one, can't run it."""
    if requested != AUTO:
        executor = _named(requested, "executor")
        refusal = executor.refusal(configuration)
        if refusal is not None:
            refuse("executor", f"one that can run {_shown(configuration)}", f"{requested!r}, but {refusal}")
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
        refuse("executor", f"one that can run {_shown(configuration)}", f"none ({reasons})")
    others = tuple((name, reason) for name, reason in passed_over if name != fallback.name)
    return Choice(fallback, f"the first that can run it ({fallback.summary})", others)


def _preference() -> list[Executor]:
    edited = os.environ.get("PAGEDMLA_EXECUTORS", "").strip()
    if not edited:
        return list(EXECUTORS)
    return [_named(name.strip(), "PAGEDMLA_EXECUTORS") for name in edited.split(",")]


def _named(name: str, source: str) -> Executor:
    for executor in EXECUTORS:
        if executor.name == name:
            return executor
    known = [executor.name for executor in EXECUTORS]
    refuse(source, f"one of {', '.join([AUTO, *known] if source == 'executor' else known)}", name)


def _shown(configuration: Configuration) -> str:
    return f"{configuration.operation} in layout {configuration.layout} on {configuration.device.type}"


# -- torch and reference ---------------------------------------------------------------------------------------------


def _never(configuration: Configuration) -> str | None:
    return None


def _torch_attend(step: Step, q: Tensor, options: AttendOptions) -> tuple[Tensor, Tensor]:
    from pagedmla.reference import vectorised

    return vectorised.attend(
        q,
        step.cache,
        step.layout,
        step.layer,
        step.query_start_loc,
        sm_scale=options.sm_scale,
        causal=options.causal,
        num_partitions=options.num_partitions,
        decode_requests=options.decode_requests,
        partial_lse=options.partial_lse,
    )


def _torch_store(
    step: Step, latent: Tensor, rope: Tensor, slots: Tensor, scale_slots: Tensor, power_of_two: bool
) -> Tensor:
    from pagedmla.reference import vectorised

    return vectorised.store(
        latent, rope, step.cache, step.layout, step.layer, slots, scale_slots, power_of_two=power_of_two
    )


def _torch_slots(step: Step, table: Tensor) -> Tensor:
    from pagedmla.reference import vectorised

    return vectorised.slots_of_step(step.cache, step.query_start_loc, table)


def _reference_refusal(configuration: Configuration) -> str | None:
    return None if configuration.device.type == "cpu" else "it runs on the CPU only"


def _reference_attend(step: Step, q: Tensor, options: AttendOptions) -> tuple[Tensor, Tensor]:
    from pagedmla.reference import attention

    return attention.attend(
        q,
        step.cache,
        step.layout,
        step.layer,
        step.query_start_loc,
        sm_scale=options.sm_scale,
        causal=options.causal,
    )


def _reference_store(
    step: Step, latent: Tensor, rope: Tensor, slots: Tensor, scale_slots: Tensor, power_of_two: bool
) -> Tensor:
    from pagedmla.reference import store

    return store.store(latent, rope, step.cache, step.layout, step.layer, slots, scale_slots, power_of_two=power_of_two)


def _reference_slots(step: Step, table: Tensor) -> Tensor:
    from pagedmla.reference import store

    return store.slots_of_step(step.cache, step.query_start_loc, table)


EXECUTORS: tuple[Executor, ...] = (
    Executor(
        name="torch",
        summary="vectorised float32 in torch",
        refusal=_never,
        drawback=lambda configuration: (
            None if configuration.device.type == "cpu" else "it reads lengths on the host, once a layer"
        ),
        honours_partitions=True,
        attend=_torch_attend,
        store=_torch_store,
        step_slots=_torch_slots,
    ),
    Executor(
        name="reference",
        summary="the float64 meaning, token by token",
        refusal=_reference_refusal,
        drawback=lambda configuration: "it is written to be read, not to be fast",
        honours_partitions=False,
        attend=_reference_attend,
        store=_reference_store,
        step_slots=_reference_slots,
    ),
)
