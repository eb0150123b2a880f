"""Once a step: the engine's metadata as rows for all layers, and which call serves which of them.

What a step costs the host is here, not in the layers: two small device operations, a handful of views, no copy to the
host. `cache_lengths` lives in a buffer of the builder's, so that a captured graph finds it where it was.

    rows                                   call of a layer
    decode rows, drafts, short prompts     forward_mqa: one absorbed launch
    prompts of many query tokens           forward_mha: keys projected up, dense attention (`dense`)

The engine puts the first before the second, since that is where `reorder_batch_threshold` stands. With decode context
parallelism prompts go through the engine's own prefill backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

import pagedmla
from pagedmla.adapters.rows import first_rows, step_rows
from pagedmla.adapters.vllm import CacheLengths, layout_of
from pagedmla.kv_cache.checks import Refusal
from pagedmla.kv_cache.layouts import CacheLayout, Fp8Flat
from pagedmla.plugin import dense
from pagedmla.plugin.bound import BoundRows, Stores
from pagedmla.plugin.dense import DenseCalls, DensePrompts
from pagedmla.plugin.plan import Plan
from pagedmla.plugin.vllm.choices import choices_line
from pagedmla.plugin.vllm.scales import load_scales

logger = init_logger("vllm.pagedmla")  # below "vllm", where the engine's log handlers are


@dataclass
class PagedMLAMetadata(MLACommonMetadata):  # type: ignore[misc] # vllm is not there for a plain type check
    """What the engine reads of a step, and the rows of each of our two calls."""

    absorbed: BoundRows | None = None
    kind: str = "decode"  # of the absorbed rows: decode, prefill, or mixed where there are both
    dense: DensePrompts | None = None


class PagedMLABuilder(MLACommonMetadataBuilder[PagedMLAMetadata]):  # type: ignore[misc]
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = 1  # query tokens of the longest row that is absorbed, which the engine puts first
    _longest_decode: int = 1  # of a decode row: a token and its drafts

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, **more: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, PagedMLAMetadata)
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        limits = vllm_config.scheduler_config
        self._longest_decode = self.reorder_batch_threshold
        self.layout = _layout_of(layers[0], vllm_config.model_config.dtype)
        if self.dcp_world_size > 1 and self.layout.quantised and not isinstance(self.layout, Fp8Flat):
            raise Refusal(
                f"decode context parallelism: expected --kv-cache-dtype auto or fp8, whose pages the engine's own "
                f"prompt attention gathers across ranks; got {layers[0].kv_cache_dtype}"
            )
        # Everything that a kernel needs beside a step is made here, before the engine locks its own workspace.
        self._cache_lengths = CacheLengths(limits.max_num_seqs, device)
        self.plan = pagedmla.plan(
            layout=self.layout,
            num_heads=layers[0].num_heads * self.dcp_world_size,  # decode gathers the heads of all ranks
            page_size=kv_cache_spec.block_size,
            max_batch=limits.max_num_seqs,
            max_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs),
            max_cache_length=vllm_config.model_config.max_model_len,
            dtype=vllm_config.model_config.dtype,
            device=device,
            sm_scale=layers[0].impl.scale,
        )
        self.plan.check_engine()
        if isinstance(self.layout, Fp8Flat):
            model = vllm_config.model_config.model
            loaded = load_scales(model, zip(layer_names, layers))
            if loaded:
                logger.info_once("pagedmla: k_scale of %d of %d layers from %s", loaded, len(layers), model)
            unscaled = sum(layer._k_scale_float == 1.0 for layer in layers)
            if unscaled:
                logger.warning_once(
                    "pagedmla: %d of %d layers have no k_scale, or 1: their rows are stored with scale 1, which clamps "
                    "numbers beyond 448 and loses bits of those below 0.02. `pagedmla calibrate` writes scales; they "
                    "are read from a local folder. A cache of fp8_rope_bf16 needs none",
                    unscaled,
                    len(layers),
                )
        stores = Stores()
        for name, layer in zip(layer_names, layers):
            layer.impl.bind(name, layer, self.plan, stores)
        self._prepare_dense(layers[0].impl, limits.max_num_batched_tokens)
        least = None if self._dense_calls is None else self.reorder_batch_threshold + 1
        logger.info_once(choices_line(self.plan, len(layers), least, self._dense_calls))
        logger.debug_once(self.plan.explain())

    @classmethod
    def for_measuring(cls, plan: Plan, engine: dict[str, Any]) -> PagedMLABuilder:
        """One that builds steps of decode rows for `plan`, without an engine: `engine` are the attributes of the
        engine's part that its `build` reads."""
        made = cls.__new__(cls)
        for name, value in engine.items():
            setattr(made, name, value)
        made.plan = plan
        made._cache_lengths = CacheLengths(plan.max_batch, plan.device)
        return made

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedMLAMetadata:
        step = common_attn_metadata
        if step.causal is not True:
            raise Refusal("pagedmla: expected causal attention; got a step with causal=False (a non-causal drafter)")
        if self.dcp_world_size > 1:
            return self._build_sharded(common_prefix_len, step, fast_build)
        short, long, short_tokens, _ = split_decodes_and_prefills(step, decode_threshold=self.reorder_batch_threshold)
        absorbed, kind = (None, "decode") if short == 0 else self._absorbed(step, short, short_tokens)
        return PagedMLAMetadata(
            num_reqs=step.num_reqs,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            num_actual_tokens=step.num_actual_tokens,
            query_start_loc=step.query_start_loc,
            slot_mapping=step.slot_mapping,
            num_decodes=short,
            num_decode_tokens=short_tokens,
            num_prefills=long,
            decode=None if short == 0 else _decode_metadata(step, short),
            absorbed=absorbed,
            kind=kind,
            dense=None if long == 0 else self._long_prompts(step, short),
        )

    def _build_sharded(self, common_prefix_len: int, step: Any, fast_build: bool) -> PagedMLAMetadata:
        """Decode context parallelism: a rank holds every n-th token, and one query token a request sees them all.

        Prompts are attended by the engine's own prefill backend, which gathers the shards.
        """
        metadata: PagedMLAMetadata = super().build(common_prefix_len, step, fast_build)
        if metadata.num_decodes:
            decodes, tokens = metadata.num_decodes, metadata.num_decode_tokens
            metadata.absorbed = self._rows(step, metadata.decode.seq_lens, tokens, decodes, tokens, longest=1)
        return metadata

    def _prepare_dense(self, impl: Any, most_queries: int) -> None:
        """From how many query tokens on prompts go the dense way, and what they need for it."""
        self._dense_calls: DenseCalls | None = None
        least = dense.least_queries(self.layout.latent, self.layout.rope, impl.qk_nope_head_dim, impl.v_head_dim)
        if self.dcp_world_size > 1:
            return
        self.reorder_batch_threshold = max(self._longest_decode, most_queries if least is None else least - 1)
        if self.reorder_batch_threshold >= most_queries:
            return
        self._dense_calls = DenseCalls.choose(self.plan)
        # The engine has this memory anyway; it is ours where it is as we need it.
        self._workspace = self.chunked_prefill_workspace
        if self._workspace.dtype != self.plan.dtype or self._workspace.shape[0] < most_queries:
            rows = max(most_queries, self._workspace.shape[0])
            self._workspace = torch.empty(rows, self.layout.width, dtype=self.plan.dtype, device=self.device)

    def _absorbed(self, step: Any, requests: int, tokens: int) -> tuple[BoundRows, str]:
        """The first rows of a step, and whether they are decode rows, prompts or both."""
        decodes, decode_tokens, longest = requests, tokens, self._longest_decode
        if step.max_query_len > longest:
            decodes, _, decode_tokens, _ = split_decodes_and_prefills(step, decode_threshold=longest)
        kind = "decode"
        if decodes < requests:
            kind, longest = "mixed" if decodes else "prefill", self.reorder_batch_threshold
        seq_lens = first_rows(step.seq_lens, requests)
        rows = self._rows(step, seq_lens, tokens, decodes, decode_tokens, min(longest, step.max_query_len))
        return rows, kind

    def _long_prompts(self, step: Any, first: int) -> DensePrompts:
        """Requests `first` and later. What the engine knows of their lengths on the host is exact."""
        assert self._dense_calls is not None
        last = step.num_reqs
        queries = step.query_start_loc_cpu[first : last + 1].diff().tolist()
        contexts = [n - q for n, q in zip(step.seq_lens_cpu_upper_bound[first:last].tolist(), queries, strict=True)]
        return DensePrompts(
            step.seq_lens[first:last],
            step.block_table_tensor[first:last],
            contexts,
            queries,
            workspace=self._workspace,
            calls=self._dense_calls,
        )

    def _rows(
        self, step: Any, seq_lens: Tensor, tokens: int, decodes: int, decode_tokens: int, longest: int
    ) -> BoundRows:
        """The first requests of the step, as many as `seq_lens [B]` has, of at most `longest` query tokens each."""
        starts = first_rows(step.query_start_loc, seq_lens.shape[0] + 1)
        rows = step_rows(
            self._cache_lengths.write(seq_lens, starts, longest),
            step.block_table_tensor,
            starts,
            num_tokens=tokens,
            max_query_length=longest,
            max_seq_len=step.max_seq_len,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            num_partitions=self.plan.num_partitions,
        )
        return BoundRows(rows, self.plan)


def _decode_metadata(step: Any, requests: int) -> MLACommonDecodeMetadata:
    tables, seq_lens = (first_rows(tensor, requests) for tensor in (step.block_table_tensor, step.seq_lens))
    return MLACommonDecodeMetadata(tables, seq_lens, None)


def _layout_of(layer: Any, model_dtype: torch.dtype) -> CacheLayout:
    return layout_of(layer.kv_cache_dtype, model_dtype, latent=layer.kv_lora_rank)
