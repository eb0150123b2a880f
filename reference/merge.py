"""Meaning: partial states over disjoint keys to the state over all of them.

    lse = ln(sum(exp(lse_s)))          out = sum(exp(lse_s - lse) * out_s)

An empty part has lse -inf and weighs nothing, whatever its out holds (it may be uninitialised): it is never multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`outs [S, T, H, D]`, `lses [S, T, H]` (natural log) to (out `[T, H, D]`, lse `[T, H]`), in the inputs' precision.

    All parts empty gives out 0 and lse -inf.
    """
    if not lses.shape[0]:
        return outs.new_zeros(outs.shape[1:]), lses.new_full(lses.shape[1:], -torch.inf)
    peak = lses.amax(0)
    anchor = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = torch.exp(lses - anchor)  # [S, T, H], divided by their own sum: the rounding of a large lse cancels
    total = weights.sum(0)
    weighted = torch.where(lses.unsqueeze(-1) == -torch.inf, torch.zeros_like(outs), outs * weights.unsqueeze(-1))
    out = weighted.sum(0) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out, anchor + total.log()
