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
    lse = torch.logsumexp(lses, 0) if lses.shape[0] else lses.new_full(lses.shape[1:], -torch.inf)
    weights = torch.exp(lses - torch.where(lse == -torch.inf, torch.zeros_like(lse), lse))  # [S, T, H]
    weighted = torch.where(lses.unsqueeze(-1) == -torch.inf, torch.zeros_like(outs), outs * weights.unsqueeze(-1))
    return weighted.sum(0), lse
