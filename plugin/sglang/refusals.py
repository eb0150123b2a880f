"""A sentence for each thing that we don't serve, before the first step where it can be known by then."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel, get_spec

from pagedmla.kv_cache.checks import Refusal
from pagedmla.plugin.sglang.pool import PagedMLATokenToKVPool
from pagedmla.plugin.sglang.settings import BACKEND, CACHE_SWITCH, asks_for_our_pool


def refuse_runner(runner: Any) -> None:
    """ValueError for a model runner that we don't serve."""
    if not runner.use_mla_backend:
        raise Refusal(
            f"{BACKEND} serves MLA models; this one has another kind of attention: leave --attention-backend out"
        )
    pool = runner.token_to_kv_pool
    if type(pool) is not MLATokenToKVPool and not isinstance(pool, PagedMLATokenToKVPool):
        raise Refusal(
            f"{BACKEND} serves dense MLA over MLATokenToKVPool; got {type(pool).__name__} (sparse attention, FP4, "
            f"hybrid, sharded and unified pools have other rows): use a backend that reads it"
        )
    if asks_for_our_pool() and not runner.is_draft_worker and not isinstance(pool, PagedMLATokenToKVPool):
        raise Refusal(
            f"{CACHE_SWITCH}=fp8_rope_bf16: expected the engine to make PagedMLATokenToKVPool; got "
            f"{type(pool).__name__}. Is this plugin left out of SGLANG_PLUGINS, or another one in its place?"
        )
    if get_parallel().attn_dcp_size > 1:
        raise Refusal(
            f"{BACKEND}: expected decode context parallelism to be off; got --dcp-size {get_parallel().attn_dcp_size}"
        )
    if get_parallel().enable_prefill_cp:
        raise Refusal(
            f"{BACKEND}: expected prefill context parallelism to be off, under which a rank stores some of a prompt's "
            f"keys alone; got --enable-prefill-cp"
        )
    translator = getattr(runner, "kv_index_translator", None)
    if translator is not None and translator.is_translating:
        raise Refusal(f"{BACKEND}: expected slots that stay where they are; got a unified memory pool")
    if get_spec().speculative_algorithm is not None and (get_spec().speculative_eagle_topk or 1) > 1:
        raise _tree(get_spec().speculative_eagle_topk)


def refuse_verify(spec_info: Any) -> None:
    """ValueError for drafts that aren't a chain of the same length for all."""
    branches = getattr(spec_info, "tree_topk", 1)
    if branches != 1:
        raise _tree(branches)
    if getattr(spec_info, "ragged_verify_layout", None) is not None:
        raise Refusal(
            f"{BACKEND}: expected as many drafts for every request; got a ragged verify layout "
            f"(verify lengths that differ)"
        )


def refuse_layer(layer: Any) -> None:
    """ValueError for a layer that isn't plain causal attention."""
    plain = {
        "is_cross_attention": False,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "xai_temperature_len": -1,
    }
    for name, value in plain.items():
        if getattr(layer, name, value) != value:
            raise Refusal(
                f"layer {layer.layer_id}: expected {name} {value}, plain causal attention; got {getattr(layer, name)}"
            )
    attn_type = getattr(layer, "attn_type", None)
    if attn_type is not None and attn_type.value != "decoder":
        raise Refusal(f"layer {layer.layer_id}: expected attention of type decoder; got {attn_type.value}")


def _tree(branches: int) -> Refusal:
    shape = "a tree" if branches < 1 else f"a tree of {branches} branches"
    return Refusal(
        f"{BACKEND}: expected a chain of drafts (--speculative-eagle-topk 1), of which each token sees those before "
        f"it; got {shape}, which needs a mask"
    )
