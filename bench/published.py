"""What other projects published for a case: their measurements, on their cards. Shown beside our model, never run here.

A figure is for a case's heads, requests, keys and query tokens, all requests of one length, with whatever cache its
project reads. Read from the threads that `source` names in November 2026; H800: an H100's multiprocessors and memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedmla.bench.cases import UNIFORM, Case

_FLASHMLA = "https://github.com/deepseek-ai/FlashMLA/blob/f6894dbf/docs/20250422-new-kernel-deep-dive.md"
_H100_RUN = "https://github.com/ai-bot-pro/achatbot/pull/123"  # FlashMLA's own test, of February 2025
_FLAGGEMS = "https://github.com/flagos-ai/FlagGems/pull/5849"
_VLLM = "https://github.com/vllm-project/vllm/pull/27363"


@dataclass(frozen=True)
class Published:
    """`tflop_per_s`: what was published is this rate, as that project's best, and the time follows from it."""

    who: str
    reads: str
    card: str
    microseconds: float
    source: str
    tflop_per_s: float | None = None

    def __str__(self) -> str:
        rate = "" if self.tflop_per_s is None else f" at its best rate, {self.tflop_per_s:g} TFLOP/s"
        return f"{self.microseconds:,.1f} {self.who} {self.reads}, {self.card}{rate}"


Shape = tuple[int, int, int, int]  # heads, requests, keys, query tokens


def published(case: Case) -> tuple[Published, ...]:
    """The figures for this very case, fastest first; nothing for ragged lengths."""
    if case.lengths != UNIFORM:
        return ()
    return _FIGURES.get((case.heads, case.batch, case.kv_len, case.q_len), ())


def shapes() -> tuple[Shape, ...]:
    """All that have a figure."""
    return tuple(_FIGURES)


def _figures() -> dict[Shape, tuple[Published, ...]]:
    found: dict[Shape, list[Published]] = {}

    def add(shape: Shape, *figures: Published) -> None:
        found.setdefault(shape, []).extend(figures)

    for heads, q_len, microseconds in ((16, 1, 215.0), (16, 2, 218.0), (32, 1, 218.0), (32, 2, 223.0), (64, 1, 223.0)):
        add((heads, 128, 4096, q_len), Published("FlashMLA", "bf16", "H100", microseconds, _H100_RUN))
    flops = 2 * (576 + 512) * 128 * 128 * 4096  # of the case that its best rate is set against
    add((128, 128, 4096, 1), Published("FlashMLA", "bf16", "H800", round(flops / 660e6, 1), _FLASHMLA, 660.0))
    for q_len, flash_attention, flashmla in ((1, 71.0, 84.0), (2, 73.0, 85.0), (4, 75.0, 88.0)):
        add(
            (16, 128, 1024, q_len),
            Published("FlashAttention", "bf16", "H100", flash_attention, _VLLM),
            Published("FlashMLA", "bf16", "H100", flashmla, _VLLM),
        )
    for heads, kv_len, rows in ((128, 640, _FLAGGEMS_640), (64, 8192, _FLAGGEMS_8192)):
        for batch, (flaggems, vllm, snapmla) in rows.items():
            add(
                (heads, batch, kv_len, 1),
                Published("FlagGems", "FP8", "H800", flaggems, _FLAGGEMS),
                Published("vLLM", "bf16", "H800", vllm, _FLAGGEMS),
                Published("SnapMLA", "FP8", "H800", snapmla, _FLAGGEMS),
            )
    return {shape: tuple(sorted(each, key=lambda one: one.microseconds)) for shape, each in found.items()}


# Requests: FlagGems' per-token FP8, vLLM in bf16, SnapMLA's CUDA kernel (there "CUDA FP8").
_FLAGGEMS_640 = {
    1: (16.669, 13.894, 23.388),
    2: (18.479, 14.036, 23.050),
    4: (17.104, 15.848, 24.173),
    8: (19.300, 17.510, 24.348),
    16: (23.923, 22.119, 27.084),
    32: (28.066, 36.054, 36.074),
    64: (33.444, 34.536, 31.790),
    128: (63.456, 65.303, 56.514),
}
_FLAGGEMS_8192 = {
    1: (27.763, 27.754, 37.914),
    2: (29.595, 26.870, 39.212),
    4: (33.924, 31.136, 41.532),
    8: (47.572, 50.770, 45.328),
    16: (69.096, 79.126, 57.548),
    32: (100.094, 129.294, 86.878),
}
_FIGURES = _figures()
