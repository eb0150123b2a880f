"""The peers' test grids as data, scaled down: boundaries kept, sizes cut to what float64 and an interpreter can check.

FLASHMLA        FlashMLA's dense decoding tests: q_len 1, 2, 4; head counts beside every tile; wild unused columns
FLASHINFER      FlashInfer's tests of paged MLA: kv 0, 1, around 16, 32 and 96, 514, 1024; pages of 1, 16, 32; q to 17
FLASHINFER_FP8  FlashInfer's tests of FP8 MLA: scale pairs of content and rope; zeros; five pages in a given order
VLLM            vLLM's BATCH_SPECS: decode, mixed, speculative and chunked batches; page 0 is nobody's
SGLANG          SGLang's MLA layout matrix: extends of 63, 64, 65 over prefixes, page orders that other kernels crash on
SNAPMLA         FlagGems' and SnapMLA's shapes: few requests, long contexts
REPORTS         public bug reports: empty and idle rows, a query that sees nothing, ragged multi-token queries
MAX_STORES      MAX's tests of storing: packed and padded pools, one table and two; begins on a page's last slot

FlashInfer's row alias and MAX's decoy are caches with chosen contents: `row_alias` and MAX_DECOY.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cases.steps import LAYOUTS, Step, StepCase, build_step, with_rows

FLASHMLA_WILD = 2147480000

FLASHMLA = [
    replace(case, wild=FLASHMLA_WILD)
    for case in [
        *(
            StepCase((q_len,) * 2, kv, page_size=16, heads=heads, causal=causal)
            for q_len, heads, causal in ((1, 1, True), (2, 3, True), (4, 9, True), (2, 16, False), (1, 63, False))
            for kv in ((20, 20), (140, 9))
        ),
        *(
            StepCase((q_len,) * 2, (20, 140), page_size=64, heads=heads)
            for q_len, heads in ((1, 64), (1, 126), (2, 128))
        ),
        StepCase((2,) * 6, (70, 0, 33, 16, 17, 64), name="varlen-corner"),
        StepCase((1,), (4096,), page_size=64, heads=1, name="one-request-4096"),
    ]
]

FLASHINFER = [
    *(
        StepCase((q_len,) * len(kv), tuple(max(n, q_len) for n in kv), page_size=page_size, heads=2)
        for q_len in (1, 3, 17)
        for page_size in (1, 16)
        for kv in ((0, 17, 33), (96, 97, 1))
    ),
    StepCase((1,) * 4, (1, 3, 11, 114), page_size=16),
    StepCase((1,) * 7, (0, 17, 33, 96, 97, 114, 1), page_size=32, heads=16, name="seven-requests"),
    StepCase((1, 1), (514, 1024), page_size=32, heads=16, name="half-a-page-and-whole-pages"),
]

# Scales of content and rope apart: amax / 448 of a group gives both.
FLASHINFER_FP8_LAYOUT = replace(LAYOUTS["fp8_flat"], granularity=512)
FLASHINFER_FP8 = [
    *(
        StepCase((1,), (70,), page_size=16, magnitude=content, rope_magnitude=rope, name=f"scales-{content}-{rope}")
        for content in (0.01, 0.1, 1.0)
        for rope in (0.01, 0.1, 1.0)
    ),
    StepCase((16,), (64,), page_size=64, heads=16, name="q16"),
    StepCase((1, 16), (64, 80), magnitude=0.0, rope_magnitude=0.0, name="zeros"),
    StepCase((1, 1), (45, 29), page_order=(4, 1, 3, 0, 5), name="group-scales"),
]

VLLM = [
    replace(case, page_order="after-null")
    for case in (
        StepCase((1, 1), (32, 40), name="small_decode"),
        StepCase((1, 1, 5, 5), (32, 40, 48, 56), name="mixed_small"),
        StepCase((1,) * 6, (128, 256, 130, 64, 129, 31), name="medium_decode"),
        StepCase((1, 1, 1, 7, 7, 7), (64, 65, 128, 100, 129, 33), name="mixed_medium"),
        StepCase((1,) * 16, tuple(64 + request % 3 for request in range(16)), name="large_decode"),
        StepCase((32, 32), (160, 64), heads=1, name="large_prefill"),
        StepCase((4,) * 3, (64, 65, 66), name="spec_decode_4"),
        StepCase((8,) * 3, (128, 9, 8), name="spec_decode_8"),
        StepCase((32, 8, 8, 16, 16, 8), (156, 52, 8, 80, 96, 8), name="chunked_context"),
    )
]

SGLANG = [
    replace(case, page_size=32, heads=1)
    for case in (
        StepCase((63, 64, 65), (63, 64, 65), name="extend-no-prefix"),
        StepCase((63, 64, 65), (127, 128, 129), name="extend-prefix-64"),
        StepCase((32, 2), (64, 65), page_order="reversed", name="prefix-32-and-63"),
        StepCase((63, 32, 1), (63, 64, 65), page_order="interleaved", name="ragged-prefix-interleaved"),
        StepCase((63, 32, 1), (63, 64, 65), page_order="shuffled", name="ragged-prefix-shuffled"),
        StepCase((63, 32, 1), (63, 64, 65), page_order="reversed", name="ragged-prefix-non-monotonic"),
    )
]

SNAPMLA = [
    StepCase((1,), (640,), page_size=64, heads=8, name="one-request-640"),
    StepCase((1, 1), (2050, 1023), page_size=64, heads=4, page_order="interleaved", name="past-a-chunk"),
]

REPORTS = [
    StepCase((0, 1), (0, 64), page_size=64, name="zero-length-row"),
    StepCase((1,) * 4, (0, 0, 33, 0), name="empty-rows"),
    StepCase((2, 2), (1, 2), name="query-that-sees-nothing"),
    StepCase((1, 4, 2), (9, 20, 2), name="ragged-queries"),
    StepCase((0, 3, 0), (12, 3, 0), name="requests-without-queries"),
    StepCase((), (), name="idle-rank"),
    StepCase((1,), (1,), page_size=1, heads=1, name="one-token"),
]

ALL = FLASHMLA + FLASHINFER + VLLM + SGLANG + SNAPMLA + REPORTS


def row_alias(layout: str) -> Step:
    """FlashInfer's fixture: the rope picks token 4 and shuns token 8, whose contents are +100 and -100.

    A kernel that pairs one token's rope with another's content answers with the wrong sign, or with a mixture.
    """
    step = build_step(StepCase((1,), (12,), page_size=4, name="row-alias"), layout, dtype=torch.bfloat16)
    latent, rope = torch.zeros(12, step.layout.latent), torch.zeros(12, 64)
    latent[4], latent[8] = 100.0, -100.0
    rope[4], rope[8] = 1.0, -1.0
    step = with_rows(step, [latent], [rope])
    q = torch.zeros_like(step.q)
    q[..., step.layout.latent :] = 1.0
    return replace(step, q=q, sm_scale=1.0)


@dataclass(frozen=True)
class MaxStore:
    """A store of MAX's tests: 4 pages of 2 slots, 2 layers, 1 token cached; padding in elements behind each page."""

    padding: int
    scales_padding: int
    own_scales_table: bool

    lookup_table = (2, 0)
    scales_table = (1, 3)
    pages, page_size, layers, cache_length = 4, 2, 2, 1

    def __str__(self) -> str:
        return f"{'padded' if self.padding else 'packed'}-{'two-tables' if self.own_scales_table else 'one-table'}"


MAX_STORES = [MaxStore(*padding, own_table) for padding in ((0, 0), (8, 4)) for own_table in (False, True)]


@dataclass(frozen=True)
class MaxDecoy:
    """One value page whose scale stands on page 2 of 3; page 0 of the scale pool holds what must not be taken."""

    scale_pages: int = 3
    scale_page: int = 2
    decoy: float = 111.0
    truth: float = 222.0


MAX_DECOY = MaxDecoy()
