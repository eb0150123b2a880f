"""Latents and ropes as they are stored, kept for `pagedmla calibrate`. Off unless a worker is asked:

    llm = LLM(..., worker_extension_cls="pagedmla.plugin.vllm.recorder.RecordsExtension")
    llm.collective_rpc("pagedmla_record", args=(4096,))
    llm.generate(...)
    llm.collective_rpc("pagedmla_recorded")    # [{layer: statistics}], one a worker; and recording ends

Tokens are kept on the host in the dtype they came in: 1152 bytes each and layer for a bf16 model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedmla.plugin.latent_statistics import measure_layer
from pagedmla.plugin.vllm.counters import CountsExtension


class Recorder:
    """The first `most_tokens` tokens of every layer."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._kept: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, layer: str, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
        """`latent [T, L]` and `rope [T, R]` on their way to `slots [T]`; -1 pads."""
        kept = self._kept.setdefault(layer, [])
        room = self.most_tokens - sum(len(latents) for latents, _ in kept)
        if room > 0:
            live = slots >= 0
            kept.append((latent[live][:room].to("cpu", copy=True), rope[live][:room].to("cpu", copy=True)))

    def rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For each layer its latents `[T, L]` and ropes `[T, R]`."""
        columns = {layer: zip(*kept, strict=True) for layer, kept in self._kept.items() if kept}
        return {layer: (torch.cat(latents), torch.cat(ropes)) for layer, (latents, ropes) in columns.items()}


active: Recorder | None = None  # of this process


class RecordsExtension(CountsExtension):
    """Methods that vLLM's workers gain; their results travel between processes."""

    def pagedmla_record(self, most_tokens: int) -> None:
        """Keep what is stored from now on."""
        global active
        active = Recorder(most_tokens)

    def pagedmla_recorded(self, margin: float = 1.0) -> dict[str, dict[str, Any]]:
        """`LayerStatistics.to_dict()` of each layer of this worker that stored anything; recording ends."""
        global active
        recorded, active = active, None
        if recorded is None:
            raise RuntimeError("pagedmla_recorded: expected pagedmla_record before it; nothing was recorded")
        return {
            layer: measure_layer(layer, latents, ropes, margin).to_dict()
            for layer, (latents, ropes) in recorded.rows().items()
            if len(latents)  # an engine's dummy runs store padding alone
        }
