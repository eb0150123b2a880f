"""The attention backend: once a step lengths and tables, once a layer store and attention.

    mode                   step made by                          query tokens a request
    decode                 eagerly, or in a graph's buffers      1
    target verify          eagerly, or in a graph's buffers      the drafts and the token before them, causally
    draft extend           eagerly, or in a graph's buffers      the accepted tokens, padded to a fixed width
    extend, mixed          eagerly                               any

All of them are one absorbed launch over the pages: `q` comes as latent and rope side by side, or as two tensors. The
cache is written first, so that a step's own tokens are attended as they were stored.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_parallel, get_schedule, get_spec
from torch import Tensor

from pagedmla.adapters.rows import Rows, first_rows
from pagedmla.adapters.sglang import Lengths, StepBuffers
from pagedmla.kv_cache.checks import refuse
from pagedmla.plugin.bound import BoundRows
from pagedmla.plugin.plan import Plan
from pagedmla.plugin.sglang.layers import Layers
from pagedmla.plugin.sglang.refusals import refuse_runner, refuse_verify
from pagedmla.plugin.sglang.settings import BACKEND


class PagedMLAAttnBackend(AttentionBackend):  # type: ignore[misc] # sglang is not there for a plain type check
    needs_cpu_seq_lens = False  # they bound a table where the engine has them

    def __init__(self, runner: Any, *, layers: Layers | None = None, draft_step: int | None = None) -> None:
        """`layers` of a backend that serves the same runner; `draft_step` for one step of a chain of drafts."""
        super().__init__()
        refuse_runner(runner)
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.max_context_len = int(runner.req_to_token_pool.req_to_token.shape[1])
        self.layers = _layers_of(runner, self.max_context_len) if layers is None else layers
        self.forward_metadata: Step | None = None
        self._ahead = -1 if draft_step is None else draft_step
        self._graph: StepBuffers | None = None
        self._captured: dict[tuple[int, int | None, int], Step] = {}

    # -- once a step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A step outside of graphs."""
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        lengths, keys, requests = self._lengths(forward_batch), self._longest(forward_batch), forward_batch.batch_size
        self.layers.grow(requests, lengths.tokens(requests))
        self.forward_metadata = Step(self._buffers(requests, keys).write(*_requests(forward_batch), lengths, keys))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._graph = self._buffers(max_bs, self.max_context_len)
        self._captured.clear()
        self.layers.grow(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture or a replay: the buffers that the graph reads are written anew, at their addresses."""
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()):
            refuse(
                "--cuda-graph-backend-prefill",
                "breakable or disabled, where attention of prompts runs between the pieces of a graph",
                f"a graph that captures it (mode {mode.name})",
            )
        if self._graph is None:
            raise RuntimeError(f"{BACKEND}: expected init_cuda_graph_state before the steps of a graph; got none")
        lengths = self._lengths(forward_batch, in_graph=True)
        rows = self._graph.write(*_requests(forward_batch), lengths, self.max_context_len)
        key = forward_batch.batch_size, lengths.width, lengths.ahead
        if in_capture or key not in self._captured:
            self._captured[key] = Step(rows)
        self.forward_metadata = self._captured[key]

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # a padding request is that of row 0 of req_to_token, whose token lies in slot 0

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing depends on what the drafts are: they are a chain."""

    def _buffers(self, requests: int, keys: int) -> StepBuffers:
        return StepBuffers(self.req_to_token_pool.req_to_token, self.token_to_kv_pool.page_size, requests, keys)

    def _lengths(self, forward_batch: Any, in_graph: bool = False) -> Lengths:
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle():
            return Lengths(1, self._ahead)
        if mode.is_target_verify():
            refuse_verify(forward_batch.spec_info)
            return Lengths(forward_batch.spec_info.draft_token_num, 0)
        if mode.is_dllm_extend():
            raise ValueError(f"{BACKEND}: expected causal attention; got a step of a diffusion model ({mode.name})")
        if mode.is_draft_extend_v2() and (in_graph or forward_batch.extend_seq_lens_cpu is None):
            width = forward_batch.out_cache_loc.shape[0] // forward_batch.batch_size
            return Lengths(width, -width)
        queries = [int(query) for query in forward_batch.extend_seq_lens_cpu]
        return Lengths.each(queries + [0] * (forward_batch.batch_size - len(queries)))  # padding has none

    def _longest(self, forward_batch: Any) -> int:
        """A bound on the keys of a request: what the host knows, or what any has at most."""
        known = forward_batch.seq_lens_cpu
        if known is None or known.numel() == 0:
            return self.max_context_len
        keys = int(known.max())
        if forward_batch.forward_mode.is_target_verify():
            keys += forward_batch.spec_info.draft_token_num
        return min(self.max_context_len, keys + max(0, self._ahead + 1))

    # -- once a layer

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """`[T, H * latent]` of absorbed queries `[T, H * (latent + rope)]`, or `q [T, H * latent]` beside `q_rope`.

        `k` is `[T, 1, latent + rope]`, or the latent beside `k_rope`; `v` is part of it.
        """
        if self.forward_metadata is None:
            raise RuntimeError(f"{BACKEND}: expected init_forward_metadata before a layer's attention; got none")
        given = sorted(name for name, value in unknown.items() if value is not None)
        if given:
            refuse("forward", "queries, keys and ropes of dense MLA", ", ".join(given))
        bound = self.layers.of(layer)
        latent, rope = bound.plan.layout.latent, bound.plan.layout.rope
        if layer.head_dim != latent + rope or layer.v_head_dim != latent:
            refuse(
                f"layer {layer.layer_id}",
                f"absorbed attention, heads of {latent + rope} and values of {latent}",
                f"heads of {layer.head_dim} and values of {layer.v_head_dim}",
            )
        if save_kv_cache and k is not None:
            self._store(k, k_rope, forward_batch.out_cache_loc, latent, bound)
        heads = layer.tp_q_head_num
        if q_rope is None:
            absorbed = q.reshape(-1, heads, latent + rope)
        else:
            absorbed = torch.cat((q.reshape(-1, heads, latent), q_rope.reshape(-1, heads, rope)), -1)
        self.layers.wait(layer)
        out, _ = self.forward_metadata.rows(absorbed.shape[0], bound.plan).attend(absorbed, bound)
        return out.flatten(1)

    forward_extend = forward_decode

    @staticmethod
    def _store(k: Tensor, k_rope: Tensor | None, slots: Tensor, latent: int, bound: Any) -> None:
        rows = k.flatten(1)
        rope = rows[:, latent:] if k_rope is None else k_rope.flatten(1)
        slots = slots[: rows.shape[0]].to(torch.int64).contiguous()  # one draft's are a column of all drafts'
        bound.store(rows[:, :latent], rope, slots)


class Step:
    """The rows of a step, bound once for all layers that share a plan."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._bound: dict[tuple[int, int], BoundRows] = {}

    def rows(self, tokens: int, plan: Plan) -> BoundRows:
        """For `tokens` query tokens: those of the step, and where the engine pads it behind them, padding."""
        key = tokens, id(plan)
        if key not in self._bound:
            rows = self._rows if tokens == self._rows.num_tokens else self._rows._replace(num_tokens=tokens)
            self._bound[key] = BoundRows(rows, plan)
        return self._bound[key]


def _requests(forward_batch: Any) -> tuple[Tensor, Tensor]:
    """`req_pool_indices [B]` and `seq_lens [B]`: a graph's buffers have room for more."""
    requests = forward_batch.batch_size
    return first_rows(forward_batch.req_pool_indices, requests), first_rows(forward_batch.seq_lens, requests)


def _layers_of(runner: Any, max_keys: int) -> Layers:
    schedule, config = get_schedule(), runner.model_config
    requests = int(runner.req_to_token_pool.req_to_token.shape[0])
    prompts = schedule.chunked_prefill_size or 0
    if prompts <= 0:  # a prompt comes whole
        prompts = max(schedule.max_prefill_tokens or 0, max_keys)
    drafts = get_spec().speculative_num_draft_tokens or 1
    made = Layers(runner.token_to_kv_pool, runner.dtype, requests, prompts + requests * drafts, max_keys)
    made.plan(config.num_attention_heads // get_parallel().attn_tp_size, config.scaling)
    return made
