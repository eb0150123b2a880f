"""The peers' test grids as data, scaled down: boundaries kept, sizes cut to what float64 on two cores can check.

| grid | from | what its boundaries are |
|---|---|---|
| FLASHMLA | FlashMLA's dense decoding tests | q_len 1, 2, 4; odd head counts; kv across page boundaries |
| FLASHINFER | FlashInfer tests of paged MLA | kv 0, 1, around 16, 32 and 96; pages of 1 and 16; queries up to 17 |
| VLLM | vLLM tests of attention backends (BATCH_SPECS) | decode, mixed, speculative and chunked batches |
| SGLANG | SGLang MLA layout matrix | extends of 63, 64, 65 over prefixes, page orders that other kernels crash on |
| SNAPMLA | FlagGems and SnapMLA shapes | few requests, long contexts |
| REPORTS | public bug reports | empty and idle rows, a query that sees nothing, ragged multi-token queries |
"""

from __future__ import annotations

from cases.steps import StepCase

FLASHMLA = [
    StepCase((q_len,) * 2, kv, page_size=16, heads=heads, causal=causal)
    for q_len, heads, causal in ((1, 1, True), (2, 3, True), (4, 9, True), (2, 16, False), (1, 63, False))
    for kv in ((20, 20), (140, 9))
] + [StepCase((2,) * 6, (70, 0, 33, 16, 17, 64), name="varlen-corner")]

FLASHINFER = [
    StepCase((q_len,) * len(kv), tuple(max(n, q_len) for n in kv), page_size=page_size, heads=2)
    for q_len in (1, 3, 17)
    for page_size in (1, 16)
    for kv in ((0, 17, 33), (96, 97, 1))
] + [StepCase((1,) * 4, (1, 3, 11, 114), page_size=16)]

VLLM = [
    StepCase((1, 1), (32, 40), name="small_decode"),
    StepCase((1, 1, 5, 5), (32, 40, 48, 56), name="mixed_small"),
    StepCase((1,) * 6, (128, 256, 130, 64, 129, 31), name="medium_decode"),
    StepCase((1, 1, 1, 7, 7, 7), (64, 65, 128, 100, 129, 33), name="mixed_medium"),
    StepCase((32, 32), (160, 64), heads=1, name="large_prefill"),
    StepCase((4,) * 3, (64, 65, 66), name="spec_decode_4"),
    StepCase((8,) * 3, (128, 9, 8), name="spec_decode_8"),
    StepCase((32, 8, 8, 16, 16, 8), (156, 52, 8, 80, 96, 8), name="chunked_context"),
]

SGLANG = [
    StepCase((63, 64, 65), (63, 64, 65), page_size=32, heads=1, name="extend-no-prefix"),
    StepCase((32, 2), (64, 65), page_size=32, heads=1, page_order="reversed", name="prefix-32-and-63"),
    StepCase(
        (63, 32, 1), (63, 64, 65), page_size=32, heads=1, page_order="interleaved", name="ragged-prefix-interleaved"
    ),
    StepCase((63, 32, 1), (63, 64, 65), page_size=32, heads=1, page_order="shuffled", name="ragged-prefix-shuffled"),
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
