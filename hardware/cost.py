"""What a step must move and compute, and the least time a GPU could need for it: a model, never a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from pagedmla.kv_cache.layouts import CacheLayout


@dataclass(frozen=True)
class Roof:
    """The most of a device: memory in TB/s, dense tensor throughput in TFLOP/s."""

    name: str
    terabytes_per_second: float
    bf16_tflops: float
    fp8_tflops: float


@dataclass(frozen=True)
class Gpu(Roof):
    """Published peaks of a card."""

    multiprocessors: int


H100 = Gpu("H100 SXM", 3.35, 990, 1979, 132)
H200 = Gpu("H200", 4.8, 990, 1979, 132)
B200 = Gpu("B200", 8.0, 2250, 4500, 148)
GPUS = (H100, H200, B200)


@dataclass(frozen=True)
class StepCost:
    """Bytes from memory and FLOPs of one layer's attention for one step."""

    bytes: int
    flops: int

    def floor_us(self, roof: Roof, *, fp8_mma: bool) -> float:
        """Microseconds at a device's peaks, memory and tensor cores fully overlapped (a model)."""
        tflops = roof.fp8_tflops if fp8_mma else roof.bf16_tflops
        return max(self.bytes / roof.terabytes_per_second, self.flops / tflops) * 1e-6


def attention_cost(
    layout: CacheLayout, *, num_heads: int, query_tokens: int, key_tokens: int, scored_pairs: int, io_bytes: int = 2
) -> StepCost:
    """Cost of absorbed attention: every key row read once, every query read and written once.

    `key_tokens` sums kv_len over requests, `scored_pairs` sums q_len * kv_len (an upper bound under causality). A pair
    costs 2 * (latent + rope) FLOPs for its logit and 2 * latent for its value, for each head.
    """
    row = layout.width + layout.latent
    moved = key_tokens * layout.bytes_per_token + query_tokens * num_heads * (io_bytes * row + 4)
    return StepCost(moved, 2 * row * num_heads * scored_pairs)
