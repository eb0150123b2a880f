"""What users of DeepSeek meet beside the plain model: block-FP8 weights, tensor parallel, drafts, sparse attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedmla.kv_cache.layouts import get_layout

LENGTHS = (5, 37, 20, 150, 33)


@pytest.fixture(scope="module")
def turn() -> dict[str, Any]:
    from tiny import prompts

    return {"prompts": prompts(*LENGTHS), "max_tokens": 8}


def test_block_fp8_weights(
    run_engine: Callable[..., Any],
    worst_disagreement: Callable[..., float],
    checkpoint: Path,
    tmp_path: Path,
    turn: dict[str, Any],
) -> None:
    """Real V3 and R1 checkpoints. Absorbed rows and dense prompts read the same dequantised W_UK and W_UV."""
    from oracle import Oracle
    from tiny import write_block_fp8_checkpoint

    quantised, dequantised = write_block_fp8_checkpoint(checkpoint, tmp_path)
    answer = run_engine(
        [turn],
        {"PAGEDMLA_DENSE_PREFILL": "30"},
        block_fp8=True,
        model=str(quantised),
        dtype="bfloat16",
        kv_cache_dtype="fp8_per_token_head",
        block_size=64,
        max_num_batched_tokens=64,
    )
    (one,) = answer.passes
    assert one.counts().keys() >= {"store", "dense", "mixed", "decode"}
    assert worst_disagreement(one, get_layout("fp8_rope_bf16"), tie=0.15, judge=Oracle(dequantised)) < 0.15


def test_tensor_parallel(
    run_engine: Callable[..., Any], worst_disagreement: Callable[..., float], turn: dict[str, Any]
) -> None:
    """Two workers with four heads each, and a cache of their own each; both count the same calls."""
    answer = run_engine(
        [turn],
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PAGEDMLA_DENSE_PREFILL": "30"},
        tensor_parallel_size=2,
        kv_cache_dtype="fp8_per_token_head",
        block_size=64,
        max_num_batched_tokens=64,
    )
    (one,) = answer.passes
    assert worst_disagreement(one, get_layout("fp8_rope_bf16")) < 1e-2
    assert one.counts().keys() >= {"store", "dense", "mixed", "decode"}
    assert all("H=4" in text for text in answer.layers.values())


def test_draft_layers(
    run_engine: Callable[..., Any], worst_disagreement: Callable[..., float], tmp_path: Path, turn: dict[str, Any]
) -> None:
    """Multi-token prediction: the draft layer has a cache of its own here, and rows of three tokens verify it."""
    from oracle import Oracle
    from tiny import write_mtp_checkpoint

    folder = write_mtp_checkpoint(tmp_path)
    answer = run_engine(
        [{**turn, "max_tokens": 24}],
        model=str(folder),
        kv_cache_dtype="fp8_per_token_head",
        block_size=64,
        max_num_batched_tokens=64,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2, "attention_backend": "CUSTOM"},
    )
    (one,) = answer.passes
    assert worst_disagreement(one, get_layout("fp8_rope_bf16"), judge=Oracle(folder)) < 1e-2
    assert one.executors == {"torch"}
    layers = {layer: {kind: n for name, kind, _, n in one.calls if name == layer} for layer, *_ in one.calls}
    target, draft = (counts for _, counts in sorted(layers.items()))
    assert draft["decode"] > target["decode"]  # two drafts for each verification
    accepted, drafted = (answer.metrics[f"vllm:spec_decode_num_{name}_tokens"] for name in ("accepted", "draft"))
    assert accepted > 0.5 * drafted


def test_sparse_attention_is_refused_by_name(
    run_engine: Callable[..., Any], checkpoint: Path, tmp_path: Path, turn: dict[str, Any]
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    sparse = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_topk": 2048,
        "index_n_heads": 8,
        "index_head_dim": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **sparse}))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    answer = run_engine([turn], fails=True, model=str(tmp_path), dtype="bfloat16", block_size=64)
    assert "CUSTOM can't serve this configuration" in answer.log
    assert "sparse attention, DeepSeek V3.2 and later): use FLASHMLA_SPARSE or FLASHINFER_MLA_SPARSE" in answer.log
