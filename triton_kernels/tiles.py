"""Which tile an attention kernel works in: rows, keys, column chunks, MMA types and warps for a cache layout and a
target.

The figures that decided stand in docs/kernels/decode_triton.md.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pagedmla.hardware.targets import Target
from pagedmla.kv_cache.checks import dtype_name, refuse

ROWS = (16, 32, 64)
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SMALLEST_CHUNK = 64  # columns: the M of a warpgroup MMA
_ROOMY = 128 * 1024  # bytes of shared memory a block, from which 64 keys and 64 rows fit together


@dataclass(frozen=True)
class Tile:
    """Compile-time constants of `device/attention.py`, and the launch options they were chosen with."""

    ROWS: int
    TILE: int
    CHUNK: int
    ROPE_CHUNK: int
    LATENT_MMA: str
    ROPE_MMA: str
    PRECISION: str
    DEQUANTISE: bool
    NATIVE_E4M3: bool
    PREFETCH: bool
    PREFETCH_ROPE: bool
    num_warps: int
    num_stages: int

    def keywords(self) -> dict[str, Any]:
        return asdict(self)


def choose_tile(
    known: dict[str, Any],
    rows: int,
    query_dtype: torch.dtype,
    cache_dtypes: tuple[torch.dtype, torch.dtype],
    target: Target,
) -> Tile:
    """The tile for planes with the compile-time facts `known` (see planes.constants).

    rows          of a request at most: query tokens * heads
    cache_dtypes  of the latent and the rope plane; uint8 stands for e4m3
    """
    latent_mma, rope_mma = (_mma_type(dtype, query_dtype) for dtype in cache_dtypes)
    chunk, rope_chunk = _chunks(known)
    dequantise = known["GROUPS"] > 0 and min(chunk, rope_chunk) < _SMALLEST_CHUNK
    if dequantise or latent_mma == "float32":
        return _float32_tile(dequantise, target)
    if known["FP8_LATENT"] and query_dtype == torch.float32:
        refuse("q", "bfloat16 or float16 for an FP8 cache", dtype_name(query_dtype))
    roomy = target.shared_per_block > _ROOMY
    tile_rows = _rows_for(rows, 64 if roomy else 32)
    warpgroup_mma = target.name in ("sm_90", "sm_100")  # 64 rows of M, so that many keys
    prefetch = known["FP8_LATENT"]
    if prefetch and tile_rows == 64:
        chunk = min(chunk, 128)
    return Tile(
        ROWS=tile_rows,
        TILE=64 if warpgroup_mma else 32,
        CHUNK=chunk,
        ROPE_CHUNK=rope_chunk,
        LATENT_MMA=latent_mma,
        ROPE_MMA=rope_mma,
        PRECISION=_precision(target),
        DEQUANTISE=False,
        NATIVE_E4M3=target.native_e4m3,
        PREFETCH=prefetch,
        PREFETCH_ROPE=prefetch and known["FP8_ROPE"] and chunk == known["LATENT"],
        num_warps=4 if tile_rows == 16 else 8,
        # A second stage of bf16 keys fits Hopper; Blackwell's build needs a little more than its shared memory for it.
        num_stages=2 if latent_mma == "bfloat16" and tile_rows == 16 and target.name == "sm_90" else 1,
    )


def _float32_tile(dequantise: bool, target: Target) -> Tile:
    """The way out for what no 16-bit MMA holds exactly: right, and slow."""
    return Tile(
        ROWS=16,
        TILE=32,
        CHUNK=64,
        ROPE_CHUNK=64,
        LATENT_MMA="float32",
        ROPE_MMA="float32",
        PRECISION=_precision(target),
        DEQUANTISE=dequantise,
        NATIVE_E4M3=target.native_e4m3,
        PREFETCH=False,
        PREFETCH_ROPE=False,
        num_warps=4,
        num_stages=1,
    )


def _rows_for(rows: int, largest: int) -> int:
    """The smallest tile of rows that holds a request, or the largest there is. A larger tile reads each key less
    often, a
    smaller one pads less."""
    return next((size for size in ROWS if rows <= size or size == largest), largest)


def _precision(target: Target) -> str:
    """Of float32 MMAs: three TF32 products come within 2^-21, and AMD has no TF32 that Triton knows on all targets."""
    return "tf32x3" if target.backend == "cuda" else "ieee"


def _mma_type(cache: torch.dtype, query: torch.dtype) -> str:
    """The narrowest type that holds both operands exactly; float16 does after the row scaling of device/rows.py."""
    if cache == torch.uint8 or (cache == torch.float16 and query != torch.float32):
        return "float16"
    if cache == torch.bfloat16 and query == torch.bfloat16:
        return "bfloat16"
    return "float32"


def _chunks(known: dict[str, Any]) -> tuple[int, int]:
    """Latent and rope columns of a chunk, so that none takes two scales."""
    latent, rope, group = known["LATENT"], known["ROPE"], known["GROUP"]
    if known["GROUPS"] == 0:
        return latent, rope
    chunk = latent if group >= latent else math.gcd(group, latent)
    if not known["ROPE_SCALED"] or group >= latent + rope:
        return chunk, rope
    return chunk, math.gcd(group, rope)
