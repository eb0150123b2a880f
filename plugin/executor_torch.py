"""The vectorised float32 form in torch: the default on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedmla.plugin.executors import AttendOptions, Configuration, Executor
from pagedmla.plugin.step import Step
from pagedmla.reference import cache, merge, vectorised


class TorchExecutor(Executor):
    name = "torch"
    summary = "vectorised float32 in torch"

    def drawback(self, configuration: Configuration) -> str | None:
        return None if configuration.device.type == "cpu" else "it reads lengths on the host, once a layer"

    def attend(self, step: Step, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions) -> None:
        computed = vectorised.attend(
            q,
            step.cache,
            step.layout,
            step.layer,
            step.query_start_loc,
            sm_scale=options.sm_scale,
            causal=options.causal,
            num_partitions=options.num_partitions,
            decode_requests=options.decode_requests,
            partial_lse=None if options.workspace is None else options.workspace.partial_lse,
        )
        out.copy_(computed[0])
        lse.copy_(computed[1])

    def store(self, step: Step, latent: Tensor, rope: Tensor, *, power_of_two: bool) -> Tensor | None:
        slots, scale_slots = (
            vectorised.slots_of_step(step.cache, step.query_start_loc, table)
            for table in (step.cache.lookup_table, step.cache.scales_lookup_table)
        )
        real = slots.shape[0]  # the rest is padding
        return self.store_slots(step, latent[:real], rope[:real], slots, scale_slots, power_of_two=power_of_two)

    def store_slots(
        self, step: Step, latent: Tensor, rope: Tensor, slots: Tensor, scale_slots: Tensor, *, power_of_two: bool
    ) -> Tensor | None:
        return vectorised.store(
            latent, rope, step.cache, step.layout, step.layer, slots, scale_slots, power_of_two=power_of_two
        )

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
        computed = vectorised.prefill(q, k, v, query_start_loc, key_start_loc, sm_scale=sm_scale, causal=causal)
        out.copy_(computed[0])
        lse.copy_(computed[1])

    def decompress(self, step: Step, starts: Tensor, key_start_loc: Tensor, out: Tensor) -> None:
        lengths = key_start_loc.diff()
        out[: int(lengths.sum())] = cache.decompress(
            step.cache, step.layout, step.layer, starts, lengths, torch.float32
        )

    def merge(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        precision = torch.float64 if outs.dtype == torch.float64 else torch.float32
        computed = merge.merge_states(outs.to(precision), lses.to(precision))
        out.copy_(computed[0])
        lse.copy_(computed[1])
