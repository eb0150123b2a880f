"""Pages that leave the engine and come back: another process reads what a first one wrote, through a KV connector.

Rows and scales lie in one page, so whoever copies whole pages carries both. A connector that lost the scales, or that
copied a page's rows to other slots, would turn the second engine's log-probabilities into noise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedmla.kv_cache.layouts import get_layout


def test_pages_of_another_engine(
    run_engine: Callable[..., Any], worst_disagreement: Callable[..., float], tmp_path: Path
) -> None:
    from tiny import prompts

    passes = [{"prompts": prompts(150, 200), "max_tokens": 8}]
    engine = {
        "kv_cache_dtype": "fp8_per_token_head",
        "block_size": 64,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "kv_transfer_config": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
    }
    wrote, read = (run_engine(passes, **engine) for _ in range(2))
    assert "External Cache Hit!" not in wrote.log
    assert read.log.count("External Cache Hit!") >= 2
    for answer in (wrote, read):
        assert worst_disagreement(answer.passes[0], get_layout("fp8_rope_bf16")) < 1e-2
    assert [request["cached"] for request in read.passes[0].requests] == [128, 192]
    assert wrote.passes[0].change_to(read.passes[0]) < 1e-3


def test_pages_offloaded_to_host_memory(
    run_engine: Callable[..., Any], worst_disagreement: Callable[..., float]
) -> None:
    """vLLM's offloading connector takes pages out, others overwrite them, and they come back under other ids."""
    from tiny import prompts

    first, others = prompts(150, 200), prompts(170, 180, 190, 160, seed=1)
    passes = [{"prompts": each, "max_tokens": 8} for each in (first, others, first)]
    answer = run_engine(
        passes,
        kv_cache_dtype="fp8_per_token_head",
        block_size=16,
        num_gpu_blocks_override=48,
        max_num_batched_tokens=512,
        enable_prefix_caching=True,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "HostOffloadSpec",
                "spec_module_path": "host_offload",
                "cpu_bytes_to_use": 1 << 24,
            },
        },
    )
    before, _, after = answer.passes
    (page_bytes,) = re.findall(r"\[(\d+)\] bytes a page", answer.log)
    assert int(page_bytes) == 16 * 644  # rows and scales
    stored, loaded, moved = map(int, re.findall(r"stored=(\d+), loaded=(\d+), to_other_pages=(\d+)", answer.log)[-1])
    assert min(stored, loaded, moved) > 0
    assert after.cached == [144, 192]  # all whole pages but what must be computed
    assert worst_disagreement(after, get_layout("fp8_rope_bf16")) < 1e-2
    assert before.change_to(after) < 1e-3
