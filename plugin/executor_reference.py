"""The float64 meaning, token by token: written to be read, and to judge the others by."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from pagedmla.plugin.executor_host import HostExecutor
from pagedmla.plugin.executors import AttendOptions, Configuration
from pagedmla.plugin.step import Step
from pagedmla.reference import attention, store


class ReferenceExecutor(HostExecutor):
    name = "reference"
    summary = "the float64 meaning, token by token"
    storing: ClassVar[ModuleType] = store
    attending: ClassVar[ModuleType] = attention

    def dtype_for(self, given: torch.dtype) -> torch.dtype:
        return torch.float64

    def refusal(self, configuration: Configuration) -> str | None:
        return None if configuration.device.type == "cpu" else "it runs on the CPU only"

    def drawback(self, configuration: Configuration) -> str | None:
        return "it is written to be read, not to be fast"

    def attend(self, step: Step, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions) -> None:
        computed = attention.attend(
            q,
            step.cache,
            step.layout,
            step.layer,
            step.query_start_loc,
            sm_scale=options.sm_scale,
            causal=options.causal,
        )
        out.copy_(computed[0])
        lse.copy_(computed[1])
