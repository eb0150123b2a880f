"""Whether a contender is right: its output against float64 over the dequantised rows of the cache.

Judged are the first, the last and the longest request of a step, all their query tokens and heads; the error is the
largest relative L2 of a row of `out`. NaN is never right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedmla.bench.cases import SM_SCALE, Inputs
from pagedmla.reference.attention import softmax_state
from pagedmla.reference.cache import read_rows

# Largest relative L2 of a row. A bf16 output alone is rounded by 2e-3.
EXACT = 4e-3
# Peers round the dequantised rows of an FP8 cache to bf16, or read them so: 4e-3 to 1e-2 in the output.
ROUNDED = 2e-2
# The CUTLASS kernels' FP8 forms, as docs/limitations.md states them for 512 keys and more.
TWO_TERMS, ONE_TERM = 2.7e-2, 1e-1


class Judge:
    """Made once for a case."""

    def __init__(self, inputs: Inputs) -> None:
        kv_lens = inputs.case.kv_lens
        self._q_len = inputs.case.q_len
        judged = {0, inputs.case.batch - 1, max(range(len(kv_lens)), key=kv_lens.__getitem__)}
        self._wanted = {request: meaning(inputs, request) for request in judged}

    def error(self, out: Tensor) -> float:
        """Largest relative L2 of a row of `out [T, H, latent]`; NaN where a row holds one."""
        errors = [self._of_request(out, request, wanted) for request, wanted in self._wanted.items()]
        return float(torch.stack(errors).max())

    def _of_request(self, out: Tensor, request: int, wanted: Tensor) -> Tensor:
        got = out[request * self._q_len : (request + 1) * self._q_len].double()
        relative: Tensor = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        return relative.max()


def meaning(inputs: Inputs, request: int) -> Tensor:
    """float64 out `[q_len, H, latent]` of a request."""
    case = inputs.case
    kv_len, q_len = case.kv_lens[request], case.q_len
    rows = dequantised(inputs, request, torch.float64)
    q = inputs.q[request * q_len : (request + 1) * q_len].double()
    logits = SM_SCALE * q @ rows.T  # [q_len, H, keys]
    position = torch.arange(kv_len - q_len, kv_len, device=q.device)
    hidden = torch.arange(kv_len, device=q.device) > position.unsqueeze(1)
    logits = logits.masked_fill(hidden.unsqueeze(1), -torch.inf)
    return softmax_state(logits, rows[:, : inputs.layout.latent])[0]


def dequantised(inputs: Inputs, request: int, dtype: torch.dtype) -> Tensor:
    """The request's cached rows `[kv_len, 576]`, rounded to `dtype` once: a scale rounded to bf16 first would make
    whoever reads the result look wrong."""
    cache = inputs.values.collection(inputs.layout.pool_granularity)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return read_rows(cache, inputs.layout, 0, request, 0, inputs.case.kv_lens[request], exact).to(dtype)
