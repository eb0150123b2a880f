"""Long prompts: keys and values projected up from the cache, then attended densely (`pagedmla.prefill`).

Multiply-adds of a head, with latent L, rope R, nope P and value V columns:

    absorbed   2 L + R for a (query, key) pair                               1088
    dense      P + R + V for a pair, and L (P + V) once a key                 320, and 131072

A key of the context is worth projecting up where more than 131072 / 768 = 170.7 queries of its request see it. A
prompt's own keys cost what folding W_UK into its queries would have cost. So a request goes by its query tokens alone.

Every key is read from the cache, the prompt's own too: what a token means doesn't depend on how its prompt was cut into
steps, or on which of its pages another request left behind. W_UK and W_UV are those of the absorbed form.

Keys come in passes, each as many as the engine's workspace holds:

    pass     keys                                   causal
    one      everything, where it fits              yes
    first    the contexts, one after the other      no: every query sees them all
    last     the prompts' own                       yes

and the states of passes are merged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pagedmla.adapters.rows import page_ids
from pagedmla.kv_cache.checks import ceildiv, checks_enabled, quoted, refuse
from pagedmla.kv_cache.values import KVCacheInputsPerDevice
from pagedmla.plugin.bound import BoundLayer
from pagedmla.plugin.executors import Choice, Configuration, choose
from pagedmla.plugin.plan import Plan
from pagedmla.plugin.step import Step, bind_step

WIDEST = 256  # columns of a head that the kernels of `prefill` take
SWITCH = "PAGEDMLA_DENSE_PREFILL"


def least_queries(latent: int, rope: int, nope: int, value: int) -> int | None:
    """The fewest query tokens with which a prompt is attended densely; None where no prompt is.

    PAGEDMLA_DENSE_PREFILL: auto (where it is cheaper), never, or a number.
    """
    setting = os.environ.get(SWITCH) or "auto"
    if setting == "never":
        return None
    number = int(setting) if setting.isdecimal() else 0
    if setting != "auto" and number < 1:
        refuse(SWITCH, "auto, never, or a number of query tokens of at least 1", quoted(setting))
    if max(nope + rope, value) > WIDEST:
        return None
    if number:
        return number
    saved = (2 * latent + rope) - (nope + rope + value)
    return ceildiv(latent * (nope + value), saved) if saved > 0 else None


@dataclass(frozen=True)
class DenseCalls:
    """Who runs the parts of the dense way."""

    decompress: Choice
    prefill: Choice
    merge: Choice

    @classmethod
    def choose(cls, plan: Plan) -> DenseCalls:
        device, dtype = plan.device, plan.dtype
        return cls(
            choose(Configuration("decompress", device, plan.layout, dtype=dtype)),
            choose(Configuration("prefill", device, num_heads=plan.num_heads, dtype=dtype)),
            choose(Configuration("merge", device, dtype=dtype)),
        )


class Span(NamedTuple):
    """One pass on the host: request b's keys starts[b] .. starts[b] + lengths[b] - 1."""

    starts: list[int]
    lengths: list[int]
    causal: bool


def spans(contexts: Sequence[int], queries: Sequence[int], room: int) -> list[Span]:
    """Passes of at most `room` keys over requests with so many cached and so many new tokens."""
    requests = len(contexts)
    if sum(contexts) + sum(queries) <= room:
        return [Span([0] * requests, [c + q for c, q in zip(contexts, queries, strict=True)], True)]
    made = []
    starts, lengths, left = [0] * requests, [0] * requests, room
    for b, context in enumerate(contexts):
        done = 0
        while done < context:
            starts[b], lengths[b] = done, min(left, context - done)
            done, left = done + lengths[b], left - lengths[b]
            if left == 0:
                made.append(Span(starts, lengths, False))
                starts, lengths, left = [0] * requests, [0] * requests, room
    if any(lengths):
        made.append(Span(starts, lengths, False))
    made.append(Span(list(contexts), list(queries), True))
    return made


class _Pass(NamedTuple):
    starts: Tensor  # [B] int32
    key_start_loc: Tensor  # [B + 1] int32
    keys: int
    causal: bool


class DensePrompts:
    """The long prompts of a step, for all its layers.

    seq_lens     `[B]` int32, block_table `[B, W]` int32: the engine's, of these requests
    contexts, queries  tokens before the step and in it, on the host
    workspace    `[rows, latent + rope]` in the model's dtype, at least as long as all of `queries`
    """

    def __init__(
        self,
        seq_lens: Tensor,
        block_table: Tensor,
        contexts: Sequence[int],
        queries: Sequence[int],
        *,
        workspace: Tensor,
        calls: DenseCalls,
    ) -> None:
        if sum(queries) > workspace.shape[0]:
            refuse("workspace", f"at least {sum(queries)} rows, one a query token", workspace)
        self._seq_lens, self._table = seq_lens, page_ids(block_table)
        self._workspace, self._calls = workspace, calls
        self._longest = (max(queries), max(c + q for c, q in zip(contexts, queries, strict=True)))
        self._query_start_loc, self._passes = _upload(spans(contexts, queries, workspace.shape[0]), queries, seq_lens)
        self._bound: tuple[object, Step] | None = None  # behind the kind of layer that it was made for

    @property
    def executor(self) -> str:
        return self._calls.prefill.executor.name

    def attend(self, q: Tensor, layer: BoundLayer, w_uk_t: Tensor, w_uv: Tensor, output: Tensor) -> None:
        """`output [T, H, V]` of `q [T, H, P + R]` through `w_uk_t [H, P, L]` and `w_uv [H, L, V]`."""
        step = self._bind(layer)
        state: tuple[Tensor, Tensor] | None = None
        for number, one in enumerate(self._passes, 1):
            k, v = self._keys(step, one, w_uk_t, w_uv)
            out = output if len(self._passes) == 1 else torch.empty_like(output)
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            self._calls.prefill.executor.prefill(
                q,
                k,
                v,
                self._query_start_loc,
                one.key_start_loc,
                out,
                lse,
                sm_scale=layer.plan.sm_scale,
                causal=one.causal,
            )
            if state is not None:
                into = output if number == len(self._passes) else torch.empty_like(output)
                outs, lses = (torch.stack(pair) for pair in zip(state, (out, lse)))
                out, lse = into, torch.empty_like(lse)
                self._calls.merge.executor.merge(outs, lses, out, lse)
            state = out, lse

    def _keys(self, step: Step, one: _Pass, w_uk_t: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
        """`k [K, H, P + R]` and `v [K, H, V]` of a pass."""
        (heads, nope, columns), value = w_uk_t.shape, w_uv.shape[2]
        rows = self._workspace[: one.keys]
        self._calls.decompress.executor.decompress(step, one.starts, one.key_start_loc, rows)
        rope = rows[:, columns:]
        k = rows.new_empty(one.keys, heads, nope + rope.shape[1])
        v = rows.new_empty(one.keys, heads, value)
        latent = rows[:, :columns].expand(heads, -1, -1)
        torch.bmm(latent, w_uk_t.transpose(1, 2), out=k[..., :nope].transpose(0, 1))
        torch.bmm(latent, w_uv, out=v.transpose(0, 1))
        k[..., nope:] = rope.unsqueeze(1)
        return k, v

    def _bind(self, layer: BoundLayer) -> Step:
        """As `BoundRows` does; to decompress, all of a request's keys are in the cache by now."""
        pools, known = layer.pools, self._bound
        if known is not None and known[0] == layer.kind and not checks_enabled():
            return known[1].over(layer.empty_step)
        values = KVCacheInputsPerDevice(
            kv_blocks=pools.blocks,
            cache_lengths=self._seq_lens,
            lookup_table=self._table,
            max_prompt_length=self._longest[0],
            max_cache_length=self._longest[1],
            page_stride=None,
            kv_scales=pools.scales,
            scales_lookup_table=None if pools.scales is None else self._table,
        )
        nobody = torch.zeros_like(self._query_start_loc)
        first = bind_step(values, 0, pools.layout, nobody, self._seq_lens, "seq_lens", check=False)
        for one in self._passes:
            first.check_span(one.starts, one.key_start_loc, check=None)
        self._bound = layer.kind, first
        return first


def _upload(made: list[Span], queries: Sequence[int], device_of: Tensor) -> tuple[Tensor, list[_Pass]]:
    """Query starts `[B + 1]` and the passes, on the device of a tensor, by one copy."""
    requests = len(queries)
    numbers = list(accumulate(queries, initial=0))
    for span in made:
        numbers += [*span.starts, *accumulate(span.lengths, initial=0)]
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device_of.is_cuda)
    query_start_loc, *parts = host.to(device_of.device, non_blocking=True).split(
        [requests + 1, *(requests, requests + 1) * len(made)]
    )
    passes = [
        _Pass(starts, key_start_loc, sum(span.lengths), span.causal)
        for span, starts, key_start_loc in zip(made, parts[::2], parts[1::2], strict=True)
    ]
    return query_start_loc, passes
