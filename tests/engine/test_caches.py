"""FP8 caches and odd memory on the real engine: each start shows several things, none of which hides another.

The oracle rounds latents and keys as the layout does, so what remains is float32 noise, and codes that it tips over to
the next one (one e4m3 step of one of 512 columns: some 1e-3 of log-probability). The layouts' own noise is 1e-1 here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedmla.kv_cache.layouts import get_layout

LENGTHS = (5, 37, 20, 150, 33)
TIPPED = 1e-2
REPEATED = 1e-3  # a second turn over cached pages: sums in another order, which tip a code here and there


def turn(*lengths: int, new: int = 8) -> dict[str, Any]:
    from tiny import prompts

    return {"prompts": prompts(*lengths), "max_tokens": new}


def served(one: Any, executor: str = "torch") -> bool:
    """Each step stored and attended once in each layer, on that executor."""
    counts = one.counts()
    attended = sum(counts.get(kind, 0) for kind in ("decode", "prefill", "mixed"))
    return one.executors == {executor} and counts["store"] == attended > 0


def test_own_format_with_split_blocks_and_a_second_turn(
    run_engine: Callable[..., Any], worst_disagreement: Callable[..., float]
) -> None:
    """644 bytes a token. The engine's blocks of 128 reach us as pages of 64, and a second pass reads them back."""
    answer = run_engine(
        [turn(*LENGTHS), turn(*LENGTHS)],
        {"PAGEDMLA_PAGE_SIZE": "64"},
        kv_cache_dtype="fp8_per_token_head",
        block_size=128,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    for one in answer.passes:
        assert worst_disagreement(one, get_layout("fp8_rope_bf16")) < TIPPED
        assert served(one)
    assert answer.passes[1].cached == [0, 0, 0, 128, 0]
    assert answer.passes[0].change_to(answer.passes[1]) < REPEATED
    for text in answer.layers.values():
        assert "layout fp8_rope_bf16" in text
        assert "pages of 64" in text
        assert ", 64, 644]" in text


def test_per_tensor_scale_with_interleaved_layers(
    run_engine: Callable[..., Any], worst_disagreement: Callable[..., float]
) -> None:
    """A page of one layer lies behind a page of the other: the page stride spans both."""
    answer = run_engine(
        [turn(*LENGTHS)],
        {"VLLM_KV_CACHE_LAYOUT": "BLNHC"},
        kv_cache_dtype="fp8",
        block_size=64,
        max_num_batched_tokens=64,
    )
    (one,) = answer.passes
    assert worst_disagreement(one, get_layout("fp8_flat")) < TIPPED
    assert served(one)
    assert all(text.endswith(f"strides [{2 * 64 * 576}, 576, 1]") for text in answer.layers.values())


def test_inline_scales_with_speculative_decoding(
    run_engine: Callable[..., Any], worst_disagreement: Callable[..., float]
) -> None:
    """656 bytes a token; drafts from the prompt are verified several tokens a request, of unequal number."""
    wanted = turn(*LENGTHS, new=32)
    answer = run_engine(
        [wanted],
        kv_cache_dtype="fp8_ds_mla",
        block_size=64,
        max_num_batched_tokens=64,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        },
    )
    (one,) = answer.passes
    assert worst_disagreement(one, get_layout("fp8_ds_mla")) < TIPPED
    assert served(one)
    assert answer.metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    assert one.counts()["decode"] > 0


def test_long_prompts_the_dense_way(run_engine: Callable[..., Any], worst_disagreement: Callable[..., float]) -> None:
    """From 30 query tokens on, here: whole prompts, chunks with a cached context, and what a prefix hit leaves of one.

    The oracle rounds the prompt's own keys too, so a dense step that read them unrounded would stand out.
    """
    first = turn(*LENGTHS)
    longer = {"prompts": [first["prompts"][3] + turn(60)["prompts"][0]], "max_tokens": 8}
    answer = run_engine(
        [first, longer, first],
        {"PAGEDMLA_DENSE_PREFILL": "30"},
        kv_cache_dtype="fp8_per_token_head",
        block_size=32,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    for one in answer.passes:
        assert worst_disagreement(one, get_layout("fp8_rope_bf16")) < TIPPED
        assert one.executors == {"torch"}
    whole, continued, again = answer.passes
    assert continued.cached == [128]
    assert continued.counts() == {"store": 9, "dense": 1, "prefill": 1, "decode": 7}  # 82 tokens in 64 and 18
    assert whole.counts()["dense"] >= 3
    assert whole.counts()["mixed"] > 0
    assert again.cached == [0, 32, 0, 128, 32]
    assert whole.change_to(again) < REPEATED  # a prompt attended densely then, absorbed now
    assert "dense" not in again.counts()
    assert "prompts from 30 query tokens on: dense, torch (" in answer.log


def test_preemption_in_a_process_of_its_own(
    run_engine: Callable[..., Any], worst_disagreement: Callable[..., float]
) -> None:
    """40 blocks of 16 for requests that want 60: some lose their pages midway and come back."""
    answer = run_engine(
        [turn(*[90] * 6, new=60)],
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        block_size=16,
        num_gpu_blocks_override=40,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
    )
    (one,) = answer.passes
    assert answer.metrics["vllm:num_preemptions"] > 0
    assert worst_disagreement(one) < 1e-5
    assert served(one)
    assert one.counts()["mixed"] > 0


def test_model_in_bfloat16(run_engine: Callable[..., Any], worst_disagreement: Callable[..., float]) -> None:
    """The oracle computes in float32: what differs is the model's own rounding."""
    answer = run_engine([turn(*LENGTHS)], dtype="bfloat16", block_size=64, max_num_batched_tokens=64)
    (one,) = answer.passes
    assert served(one)
    assert all("layout bf16" in text for text in answer.layers.values())
    assert worst_disagreement(one, tie=0.1) < 0.1


def test_triton_kernels_interpreted_inside_the_engine(
    run_engine: Callable[..., Any], worst_disagreement: Callable[..., float]
) -> None:
    """A prompt step, a mixed step and decode steps, 16 tokens each, as the torch executor computes them. FP8 kernels
    take 16-bit queries only, so the model's own rounding stands between either and the oracle.
    """
    by_triton, by_torch = (
        run_engine(
            [turn(5, 20, new=3)],
            {"PAGEDMLA_EXECUTORS": executor},
            dtype="bfloat16",
            kv_cache_dtype="fp8_per_token_head",
            block_size=16,
            max_num_batched_tokens=16,
        ).passes[0]
        for executor in ("triton", "torch")
    )
    assert served(by_triton, "triton")
    assert served(by_torch, "torch")
    assert by_triton.counts() == by_torch.counts()
    assert by_triton.counts().keys() == {"store", "decode", "prefill", "mixed"}
    assert by_triton.change_to(by_torch) <= 2 * 2**-5  # logits between 4 and 8 are bf16: a step is 2^-5
    assert worst_disagreement(by_triton, get_layout("fp8_rope_bf16"), tie=0.1) < 0.15
