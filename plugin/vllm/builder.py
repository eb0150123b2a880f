"""Once a step: the engine's metadata as `Rows` for all layers, and which call serves which of them.

What a step costs the host is here, not in the layers: two small device operations, a handful of views, no copy to the
host. `cache_lengths` lives in a buffer of the builder's, so that a captured graph finds it where it was.

    step                           call of a layer
    decode rows alone              forward_mqa, queries of any length (drafts)
    prompt rows alone, or both     forward_mha, all rows of the step at once

Both are one absorbed launch. With decode context parallelism prompts go through the engine's own prefill backend.
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
from pagedmla.adapters.vllm import Rows, first_rows, layout_of, step_rows, write_cache_lengths
from pagedmla.kv_cache.layouts import CacheLayout, Fp8Flat
from pagedmla.plugin.vllm.cache_dtypes import ROPE_COLUMNS

logger = init_logger("vllm.pagedmla")  # below "vllm", where the engine's log handlers are


@dataclass
class PagedMLAMetadata(MLACommonMetadata):  # type: ignore[misc] # vllm is not there for a plain type check
    """What the engine reads of a step, and the rows of each of our two calls."""

    decode_rows: Rows | None = None
    prefill_rows: Rows | None = None
    kind: str = "prefill"  # of forward_mha: "prefill", or "mixed" where decode rows run in it too


class PagedMLABuilder(MLACommonMetadataBuilder[PagedMLAMetadata]):  # type: ignore[misc]
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, **more: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, PagedMLAMetadata)
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        limits = vllm_config.scheduler_config
        self.layout = _layout_of(layers[0], vllm_config.model_config.dtype)
        if self.dcp_world_size > 1 and self.layout.quantised and not isinstance(self.layout, Fp8Flat):
            raise ValueError(
                f"decode context parallelism: expected --kv-cache-dtype auto or fp8, whose pages the engine's own "
                f"prompt attention gathers across ranks; got {layers[0].kv_cache_dtype}"
            )
        # Everything that a kernel needs beside a step is made here, before the engine locks its own workspace.
        self._cache_lengths = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)
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
        for name, layer in zip(layer_names, layers):
            layer.impl.bind(name, layer, self.plan)
        logger.info_once("pagedmla %s: %s", pagedmla.__version__, self.plan.explain())

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedMLAMetadata:
        step = common_attn_metadata
        if step.causal is not True:
            raise ValueError("pagedmla: expected causal attention; got a step with causal=False (a non-causal drafter)")
        if self.dcp_world_size > 1:
            return self._build_sharded(common_prefix_len, step, fast_build)
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(
            step, decode_threshold=self.reorder_batch_threshold
        )
        requests, tokens = step.num_reqs, step.num_actual_tokens
        rows = self._rows(step, first_rows(step.seq_lens, requests), tokens, decodes, decode_tokens)
        prompts = prefills > 0
        return PagedMLAMetadata(
            num_reqs=requests,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            num_actual_tokens=tokens,
            query_start_loc=step.query_start_loc,
            slot_mapping=step.slot_mapping,
            num_decodes=0 if prompts else decodes,
            num_decode_tokens=0 if prompts else decode_tokens,
            num_prefills=requests if prompts else 0,
            decode=None if prompts else MLACommonDecodeMetadata(step.block_table_tensor, step.seq_lens, None),
            decode_rows=None if prompts else rows,
            prefill_rows=rows if prompts else None,
            kind="mixed" if decodes else "prefill",
        )

    def _build_sharded(self, common_prefix_len: int, step: Any, fast_build: bool) -> PagedMLAMetadata:
        """Decode context parallelism: a rank holds every n-th token, and one query token a request sees them all.

        Prompts are attended by the engine's own prefill backend, which gathers the shards.
        """
        metadata: PagedMLAMetadata = super().build(common_prefix_len, step, fast_build)
        if metadata.num_decodes:
            decodes, tokens = metadata.num_decodes, metadata.num_decode_tokens
            metadata.decode_rows = self._rows(step, metadata.decode.seq_lens, tokens, decodes, tokens)
        return metadata

    def _rows(self, step: Any, seq_lens: Tensor, tokens: int, decodes: int, decode_tokens: int) -> Rows:
        """The first requests of the step, as many as `seq_lens [B]` has."""
        starts = first_rows(step.query_start_loc, seq_lens.shape[0] + 1)
        return step_rows(
            write_cache_lengths(seq_lens, starts, self._cache_lengths, step.max_query_len),
            step.block_table_tensor,
            starts,
            num_tokens=tokens,
            max_query_length=step.max_query_len,
            max_seq_len=step.max_seq_len,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            num_partitions=self.plan.num_partitions,
        )


def _layout_of(layer: Any, model_dtype: torch.dtype) -> CacheLayout:
    return layout_of(layer.kv_cache_dtype, model_dtype, latent=layer.kv_lora_rank, rope=ROPE_COLUMNS)
