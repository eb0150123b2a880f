"""What the executors by `reference`'s functions share: lengths are read on the host, results are copied in place."""

from __future__ import annotations

from abc import abstractmethod
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from pagedmla.plugin.executors import Executor
from pagedmla.plugin.step import Step
from pagedmla.reference import cache, merge


class HostExecutor(Executor):
    """All but attention. Subclasses name the modules that give the meaning, and the dtype that they compute in."""

    storing: ClassVar[ModuleType]  # modules, not their functions: tests/fuzz/faults.py replaces those
    attending: ClassVar[ModuleType]

    @abstractmethod
    def dtype_for(self, given: torch.dtype) -> torch.dtype:
        """What tensors of a dtype are computed in."""

    def store(self, step: Step, latent: Tensor, rope: Tensor, *, power_of_two: bool) -> Tensor | None:
        slots, scale_slots = (
            self.storing.slots_of_step(step.cache, step.query_start_loc, table)
            for table in (step.cache.lookup_table, step.cache.scales_lookup_table)
        )
        real = slots.shape[0]  # the rest is padding
        return self.store_slots(step, latent[:real], rope[:real], slots, scale_slots, power_of_two=power_of_two)

    def store_slots(
        self, step: Step, latent: Tensor, rope: Tensor, slots: Tensor, scale_slots: Tensor, *, power_of_two: bool
    ) -> Tensor | None:
        dropped: Tensor | None = self.storing.store(
            latent, rope, step.cache, step.layout, step.layer, slots, scale_slots, power_of_two=power_of_two
        )
        return dropped

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
        computed = self.attending.prefill(q, k, v, query_start_loc, key_start_loc, sm_scale=sm_scale, causal=causal)
        _copy(computed, out, lse)

    def decompress(self, step: Step, starts: Tensor, key_start_loc: Tensor, out: Tensor) -> None:
        lengths = key_start_loc.diff()
        rows = cache.decompress(step.cache, step.layout, step.layer, starts, lengths, self.dtype_for(out.dtype))
        out[: rows.shape[0]] = rows

    def merge(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        dtype = self.dtype_for(outs.dtype)
        _copy(merge.merge_states(outs.to(dtype), lses.to(dtype)), out, lse)


def _copy(computed: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
    out.copy_(computed[0])
    lse.copy_(computed[1])
