"""The attention backend: once a step lengths and tables, once a layer store and attention.

    mode                   step made by                          query tokens a request
    decode                 eagerly, or in a graph's buffers      1
    target verify          eagerly, or in a graph's buffers      the drafts and the token before them, causally
    draft extend           eagerly, or in a graph's buffers      the accepted tokens, padded to a fixed width
    extend, mixed          eagerly                               any

    form (`handler`)       calls of a layer                      attention
    MLA                    forward_decode, forward_extend        one absorbed launch over the pages: `q` comes as latent
                                                                 and rope side by side, or as two tensors
    MHA                    prepare_prefill_qkv, forward_extend   of long prompts (`dense`): keys projected up from pages

In both the cache is written first, so that a step's own tokens are attended as they were stored.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_parallel, get_schedule, get_spec
from torch import Tensor

from pagedmla.adapters.rows import Rows, first_rows
from pagedmla.adapters.sglang import Lengths, StepBuffers
from pagedmla.kv_cache.checks import Refusal, refuse
from pagedmla.plugin.bound import BoundRows
from pagedmla.plugin.dense import SWITCH, DenseCalls, DensePrompts
from pagedmla.plugin.plan import Plan
from pagedmla.plugin.sglang.dense import DenseRule, has_projections, projections, room, rule_of
from pagedmla.plugin.sglang.layers import Layers
from pagedmla.plugin.sglang.refusals import refuse_runner, refuse_verify
from pagedmla.plugin.sglang.settings import BACKEND

logger = logging.getLogger("sglang.pagedmla")  # below "sglang", where the engine's log handlers are


class PagedMLAAttnBackend(AttentionBackend):  # type: ignore[misc] # sglang is not there for a plain type check
    needs_cpu_seq_lens = False  # they bound a table where the engine has them

    def __init__(self, runner: Any, *, layers: Layers | None = None, draft_step: int | None = None) -> None:
        """`layers` of a backend that serves the same runner; `draft_step` for one step of a chain of drafts."""
        super().__init__()
        refuse_runner(runner)
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.max_context_len = int(runner.req_to_token_pool.req_to_token.shape[1])
        self.dense = rule_of(runner.model_config, _heads_of(runner))
        self.layers = _layers_of(runner, self.max_context_len, self.dense) if layers is None else layers
        self.forward_metadata: BoundStep | None = None
        self._ahead = -1 if draft_step is None else draft_step
        self._graph: StepBuffers | None = None
        self._captured: dict[tuple[int, int | None, int], BoundStep] = {}
        self._projecting: dict[int, Any] = {}  # by layer: DeepSeek's attention, of those that went the dense way

    # -- once a step, before it is made

    def goes_dense(self, attention: Any, forward_batch: Any) -> bool:
        """Whether a step goes the dense way through a DeepSeek attention (`handler` asks, once a layer)."""
        known = _prompts_of(forward_batch)
        if known is None or not self.dense.pays(*known):
            return False
        if not has_projections(attention):
            logger.info(
                "pagedmla: prompts stay absorbed, since layer %d has no plain W_UK and W_UV (a LoRA adapter on "
                "kv_b_proj, or weights quantised for other kernels)",
                attention.layer_id,
            )
            self.dense = DenseRule(None)
            return False
        return True

    def can_run_prefill_cuda_graph(self, forward_batch: Any) -> bool:
        """SGLang's question before it replays a prompt's graph, in which attention is absorbed.

        Ranks of data-parallel attention have voted by then, and go together.
        """
        known = _prompts_of(forward_batch)
        return known is None or forward_batch.global_num_tokens_cpu is not None or not self.dense.leaves_graph(*known)

    def vote_prefill_cuda_graph(self, batch: Any) -> bool:
        """The same of the scheduler's batch: the vote of a rank of data-parallel attention."""
        return not self.dense.leaves_graph(batch.prefix_lens, batch.extend_lens)

    # -- once a step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A step outside of graphs."""
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        lengths, keys, requests = self._lengths(forward_batch), self._longest(forward_batch), forward_batch.batch_size
        self.layers.grow(requests, lengths.tokens(requests))
        rows = self._buffers(requests, keys).write(*_requests(forward_batch), lengths, keys)
        self.forward_metadata = BoundStep(rows, _prompts_of(forward_batch))

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
            self._captured[key] = BoundStep(rows)
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
            raise Refusal(f"{BACKEND}: expected causal attention; got a step of a diffusion model ({mode.name})")
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

    def prepare_prefill_qkv(
        self,
        *,
        q: Tensor,  # [T, H, nope + rope]
        q_pe: Tensor,  # [T, H, rope], its columns
        kv_a: Tensor,  # [T, latent], normed
        k_pe: Tensor,  # [T, 1, rope]
        positions: Tensor,
        layer: Any,
        forward_batch: Any,
    ) -> tuple[Tensor, None, None]:
        """SGLang's hook between projections and attention of the form MHA: rotate, store, hand on queries alone.

        Keys and values come from the cache, the step's own too, in `forward_extend`.
        """
        if layer.rotary_emb is not None:
            q_pe, k_pe = layer.rotary_emb(positions, q_pe, k_pe)
        q[..., layer.qk_nope_head_dim :] = q_pe
        bound = self.layers.of(layer.attn_mqa)  # whose scale the checkpoint's is; that of attn_mha isn't loaded
        self._store(kv_a, k_pe, forward_batch.out_cache_loc, bound.plan.layout.latent, bound)
        self._projecting[layer.attn_mha.layer_id] = layer
        return q, None, None

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Tensor:
        """As `forward_decode`; or `[T, H * value]` of `q [T, H, nope + rope]` that went through the hook above."""
        attention = self._projecting.get(layer.layer_id)
        if attention is None or layer is not attention.attn_mha:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **more)
        if self.forward_metadata is None or k is not None:
            raise RuntimeError(f"{BACKEND}: expected queries of prepare_prefill_qkv in a step of prompts; got others")
        bound = self.layers.of(attention.attn_mqa)
        self.layers.wait(layer)
        q = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        out = q.new_empty(*q.shape[:2], layer.v_head_dim)
        keys = room(layer.head_dim + layer.v_head_dim, q.dtype, q.shape[1], forward_batch.get_max_chunk_capacity())
        prompts = self.forward_metadata.prompts(bound.plan, self.layers.dense_calls(bound.plan), keys)
        prompts.attend(q, bound, *projections(attention, q.dtype), out)
        return out.flatten(1)

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

    @staticmethod
    def _store(k: Tensor, k_rope: Tensor | None, slots: Tensor, latent: int, bound: Any) -> None:
        rows = k.flatten(1)
        rope = rows[:, latent:] if k_rope is None else k_rope.flatten(1)
        slots = slots[: rows.shape[0]].to(torch.int64).contiguous()  # one draft's are a column of all drafts'
        bound.store(rows[:, :latent], rope, slots)


class Prompts(NamedTuple):
    """Tokens of each request before a step and in it, on the host."""

    contexts: list[int]
    queries: list[int]


class BoundStep:
    """The rows of a step, bound once for all layers that share a plan."""

    def __init__(self, rows: Rows, prompts: Prompts | None = None) -> None:
        self._rows, self._prompts = rows, prompts
        self._bound: dict[tuple[int, int], BoundRows] = {}
        self._dense: dict[int, DensePrompts] = {}

    def rows(self, tokens: int, plan: Plan) -> BoundRows:
        """For `tokens` query tokens: those of the step, and where the engine pads it behind them, padding."""
        key = tokens, id(plan)
        if key not in self._bound:
            rows = self._rows if tokens == self._rows.num_tokens else self._rows._replace(num_tokens=tokens)
            self._bound[key] = BoundRows(rows, plan)
        return self._bound[key]

    def prompts(self, plan: Plan, calls: DenseCalls, keys: int) -> DensePrompts:
        """For the dense way, in passes of `keys` keys, or as many as the step has query tokens."""
        if self._prompts is None:
            raise RuntimeError(f"{BACKEND}: expected a step of prompts for dense attention; got another")
        if id(plan) not in self._dense:
            rows, (contexts, queries) = self._rows, self._prompts
            longest = max(sum(queries), min(keys, sum(contexts) + sum(queries)))
            self._dense[id(plan)] = DensePrompts(
                rows.cache_lengths + rows.query_start_loc.diff(),
                rows.lookup_table,
                contexts,
                queries,
                workspace=torch.empty(longest, plan.layout.width, dtype=plan.dtype, device=plan.device),
                calls=calls,
            )
        return self._dense[id(plan)]


def _requests(forward_batch: Any) -> tuple[Tensor, Tensor]:
    """`req_pool_indices [B]` and `seq_lens [B]`: a graph's buffers have room for more."""
    requests = forward_batch.batch_size
    return first_rows(forward_batch.req_pool_indices, requests), first_rows(forward_batch.seq_lens, requests)


def _prompts_of(forward_batch: Any) -> Prompts | None:
    """Of a step of prompts; requests that only pad it have no token."""
    if not forward_batch.forward_mode.is_extend_without_speculative():  # whose views lack what follows
        return None
    contexts, queries = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    if contexts is None or queries is None:
        return None
    padding = [0] * (forward_batch.batch_size - len(queries))
    return Prompts([*map(int, contexts), *padding], [*map(int, queries), *padding])


def _heads_of(runner: Any) -> int:
    return int(runner.model_config.num_attention_heads // get_parallel().attn_tp_size)


def _layers_of(runner: Any, max_keys: int, dense: DenseRule) -> Layers:
    schedule, config = get_schedule(), runner.model_config
    requests = int(runner.req_to_token_pool.req_to_token.shape[0])
    prompts = schedule.chunked_prefill_size or 0
    if prompts <= 0:  # a prompt comes whole
        prompts = max(schedule.max_prefill_tokens or 0, max_keys)
    drafts = get_spec().speculative_num_draft_tokens or 1
    made = Layers(runner.token_to_kv_pool, runner.dtype, requests, prompts + requests * drafts, max_keys)
    plan = made.plan(_heads_of(runner), config.scaling)
    if dense.least is not None:
        calls = made.dense_calls(plan)
        chosen = {"prefill": calls.prefill, "decompress": calls.decompress, "merge": calls.merge}
        logger.info(
            "pagedmla: prompts from %d query tokens on: dense; %s. %s chooses otherwise",
            dense.least,
            "; ".join(f"{name}: {choice.executor.name} ({choice.reason})" for name, choice in chosen.items()),
            SWITCH,
        )
    return made
