"""The vectorised float32 form in torch: the default on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from pagedmla.plugin.executor_host import HostExecutor
from pagedmla.plugin.executors import AttendOptions, Capacity, Configuration, Workspace
from pagedmla.plugin.step import Step
from pagedmla.reference import vectorised


@dataclass(frozen=True, eq=False)
class PartLses(Workspace):
    """`partial_lse [S, max_tokens, H]` float32: the LSE of each part of a split."""

    partial_lse: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.partial_lse,)


class TorchExecutor(HostExecutor):
    name = "torch"
    summary = "vectorised float32 in torch"
    storing: ClassVar[ModuleType] = vectorised
    attending: ClassVar[ModuleType] = vectorised

    def dtype_for(self, given: torch.dtype) -> torch.dtype:
        return torch.float64 if given == torch.float64 else torch.float32

    def drawback(self, configuration: Configuration) -> str | None:
        return None if configuration.device.type == "cpu" else "it reads lengths on the host, once a layer"

    def workspace(self, configuration: Configuration, capacity: Capacity, num_partitions: int) -> Workspace:
        shape = (num_partitions, capacity.max_tokens, configuration.num_heads or 0)
        return PartLses(torch.full(shape, -torch.inf, dtype=torch.float32, device=configuration.device))

    def attend(self, step: Step, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions) -> None:
        room = options.workspace
        computed = vectorised.attend(
            q,
            step.cache,
            step.layout,
            step.layer,
            step.query_start_loc,
            sm_scale=options.sm_scale,
            causal=options.causal,
            num_partitions=options.num_partitions,
            decode_requests=step.decode_rows[0],
            partial_lse=room.partial_lse if isinstance(room, PartLses) else None,
        )
        out.copy_(computed[0])
        lse.copy_(computed[1])
