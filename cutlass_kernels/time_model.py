"""How long a decode step should take: a model from counts, never a measurement.

A tile of 64 keys occupies four resources of an SM, each at its published rate; the slowest one sets the pace, as far as
the two consumers keep the others busy (`OVERLAP`). To that come a prologue and an epilogue for each piece of work, and
the merge where requests are cut.

    memory   bytes of a tile over the SM's share of the bandwidth   2020 cycles on an H200 for 644-byte tokens
    tensor   64 x rows x K products: rows / 2 cycles an m64 k32 (fp8) or k16 (16-bit) instruction, at least 16 cycles
             where its 2 KiB of A come from shared memory
    shared   128 bytes a cycle: tensor copies in, operands of WGMMA, matrix loads of V (and of K in fp16), P
    issue    instructions of both consumers over four schedulers; counted in the compiled kernel, see test_compile.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagedmla.cutlass_kernels import schedule
from pagedmla.cutlass_kernels.tiles import COLUMN_TILES, KEYS, LATENT, LATENT_BYTES, ROPE, WARPGROUPS, Shape
from pagedmla.cutlass_kernels.variants import Variant
from pagedmla.kv_cache.layouts import get_layout

SMS = 132  # H100 SXM and H200
FP8_FLOPS_A_CYCLE = 8192  # of an SM; 16-bit half of it
SHARED_BYTES_A_CYCLE = 128
OVERLAP = 0.9  # share of the slowest resource's time that it is busy; published kernels reach 0.84 to 0.90 of bandwidth
PIECE_US = 4.0  # lengths, queries, pipeline fill and drain, output of a piece
MERGE_US = 3.0  # one more launch and the partial results' way through L2


class Gpu(Protocol):
    """Published peaks of a GPU with Hopper's SMs."""

    @property
    def terabytes_per_second(self) -> float: ...

    @property
    def fp8_tflops(self) -> float: ...


@dataclass(frozen=True)
class TileCycles:
    """Cycles of an SM for one tile of keys against a CTA's rows."""

    memory: float
    tensor: float
    shared: float
    issue: float

    @property
    def slowest(self) -> str:
        return max(("memory", "tensor", "shared", "issue"), key=lambda name: float(getattr(self, name)))

    @property
    def most(self) -> float:
        return max(self.memory, self.tensor, self.shared, self.issue)


def clock_ghz(gpu: Gpu) -> float:
    """The clock that the published tensor peak stands for."""
    return gpu.fp8_tflops * 1e3 / (SMS * FP8_FLOPS_A_CYCLE)


def tensor_cycles(shape: Shape) -> float:
    """Both products of a tile."""
    a_product = shape.rows / 2
    from_shared = max(a_product, 2048 / SHARED_BYTES_A_CYCLE)
    if shape.precision == "fp16":
        rope = from_shared if shape.rope != "e4m3" else a_product
        return (LATENT // 16) * a_product + (ROPE // 16) * rope + (LATENT // 64) * (KEYS // 16) * a_product
    scores = shape.terms * (LATENT // 32) * from_shared
    rope_steps = shape.query_rope_terms * shape.rope_bytes // 32
    return scores + rope_steps * from_shared + (LATENT // 64) * (KEYS // 32) * a_product


def shared_cycles(shape: Shape) -> float:
    """Everything that passes through shared memory for a tile, statistics aside."""
    copies_in = KEYS * shape.key_bytes
    step_b = 32 * shape.rows
    rope_steps = shape.query_rope_terms * shape.query_rope_bytes // 32
    if shape.precision == "fp16":
        keys, latent_steps = LATENT_BYTES + KEYS * shape.rope_bytes, LATENT // 16
    else:
        latent_steps = shape.terms * LATENT // 32
        keys = (latent_steps + rope_steps) * 2048
    queries = (latent_steps + rope_steps) * step_b
    values = LATENT_BYTES + WARPGROUPS * COLUMN_TILES * KEYS * shape.element_bytes * shape.rows
    probabilities = shape.probability_bytes
    return (copies_in + keys + queries + values + probabilities) / SHARED_BYTES_A_CYCLE


def rare_instructions(shape: Shape) -> int:
    """Of a consumer warp's trip, those in branches that a usual trip doesn't take: O scaled anew, keys masked."""
    return 2 * COLUMN_TILES * shape.rows // 2 + 2 * shape.rows // 2


def tile_cycles(variant: Variant, gpu: Gpu, consumer_instructions: float) -> TileCycles:
    """`consumer_instructions`: what one consumer warp issues for a usual trip, which covers two tiles."""
    bytes_per_token = get_layout(variant.layout).bytes_per_token
    bytes_a_cycle = gpu.terabytes_per_second * 1e3 / (SMS * clock_ghz(gpu))
    return TileCycles(
        memory=KEYS * bytes_per_token / (bytes_a_cycle * variant.cluster),
        tensor=tensor_cycles(variant.shape),
        shared=shared_cycles(variant.shape),
        issue=consumer_instructions * (WARPGROUPS * 4) / 2 / 4,
    )


def step_us(
    variant: Variant,
    gpu: Gpu,
    *,
    kv_lens: list[int],
    q_len: int,
    heads: int,
    partitions: int,
    consumer_instructions: float,
) -> float:
    """Microseconds of a decode step (a model)."""
    workers = SMS // variant.cluster
    row_tiles = int(schedule.row_tiles_of(q_len, heads, variant.rows))
    units = [int(schedule.units_of(kv_len)) for kv_len in kv_lens for _ in range(row_tiles)]
    total, longest = sum(units), max(units)
    whole = schedule.is_whole(total, longest, len(units), workers, partitions)
    share = longest if whole and len(units) <= workers else schedule.share_of(total, longest, workers, partitions)
    pieces = 1 if whole else min(len(units) / workers + 1, float(share))
    tile_us = tile_cycles(variant, gpu, consumer_instructions).most / (clock_ghz(gpu) * 1e3)
    return share * tile_us / OVERLAP + pieces * PIECE_US + (0.0 if whole else MERGE_US)
