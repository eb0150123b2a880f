"""Which tile an attention kernel works in: rows, keys, column chunks, MMA types and warps for a cache layout and a
target.

The figures that decided stand in docs/kernels/decode_triton.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from pagedmla.hardware.targets import Target
from pagedmla.kv_cache.checks import dtype_name, refuse

ROWS = (16, 32, 64)
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SMALLEST_CHUNK = 64  # columns: the M of a warpgroup MMA
_SMALLEST_WGMMA_CHUNK = 128
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
    SPLIT_QUERIES: bool
    PRECISION: str
    DEQUANTISE: bool
    NATIVE_E4M3: bool
    HOIST: bool
    PREFETCH: bool
    PREFETCH_ROPE: bool
    num_warps: int
    num_stages: int

    def keywords(self) -> dict[str, Any]:
        return dict(vars(self))


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
    split = latent_mma == "bfloat16" and query_dtype == torch.float16
    tile_rows = rows_for(rows, target, split)
    prefetch = known["FP8_LATENT"]
    if prefetch and tile_rows == 64:
        chunk = min(chunk, 128)
    # WGMMA's M is 64 keys of the scores. Narrow chunks leave those to the warps' own MMA ("ptxas 12.8" in the docs).
    warpgroups = target.warpgroup_mma and chunk >= _SMALLEST_WGMMA_CHUNK
    return Tile(
        ROWS=tile_rows,
        TILE=64 if warpgroups else 32,
        CHUNK=chunk,
        ROPE_CHUNK=rope_chunk,
        LATENT_MMA=latent_mma,
        ROPE_MMA=rope_mma,
        SPLIT_QUERIES=query_dtype == torch.float16 and "bfloat16" in (latent_mma, rope_mma),
        PRECISION=float32_precision(target),
        DEQUANTISE=False,
        NATIVE_E4M3=target.native_e4m3,
        HOIST=False,
        PREFETCH=prefetch,
        # Where two blocks of 16 rows and 64 keys share an SM, registers count for more than the rope's latency.
        PREFETCH_ROPE=(
            prefetch
            and known["FP8_ROPE"]
            and chunk == known["LATENT"]
            and not (tile_rows == 16 and target.warpgroup_mma)
        ),
        num_warps=4 if tile_rows == 16 else 8,
        num_stages=2 if not prefetch and tile_rows == 16 and target.second_stage else 1,
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
        SPLIT_QUERIES=False,
        PRECISION=float32_precision(target),
        DEQUANTISE=dequantise,
        NATIVE_E4M3=target.native_e4m3,
        HOIST=target.hoists_float32,
        PREFETCH=False,
        PREFETCH_ROPE=False,
        num_warps=4,
        num_stages=1,
    )


def rows_for(rows: int, target: Target, split: bool = False) -> int:
    """Rows of the tile for requests of `rows` rows: the smallest that holds one, or the largest there is. A larger tile
    reads each key less often, a smaller one pads less.

    split  queries are bfloat16 in two parts (see `Tile.SPLIT_QUERIES`), which take twice the room
    """
    largest = _largest_rows(target, split)
    sizes = [size for size in ROWS if size <= largest and (size != 32 or target.tiles_of_32)]
    if rows <= 32:  # two tiles of 16 stand for one of 32
        sizes = [size for size in sizes if size <= 32]
    return next((size for size in sizes if rows <= size), sizes[-1])


def _largest_rows(target: Target, split: bool) -> int:
    if target.backend == "hip":  # larger ones spill hundreds of words, and tiles of 16 cost less
        return 16
    largest = 64 if target.shared_per_block > _ROOMY else 32
    return largest // 2 if split and not target.warpgroup_mma else largest


def float32_precision(target: Target) -> str:
    """Of float32 MMAs: three TF32 products come within 2^-21, and AMD has no TF32 that Triton knows on all targets."""
    return "tf32x3" if target.backend == "cuda" else "ieee"


def _mma_type(cache: torch.dtype, query: torch.dtype) -> str:
    """The narrowest type that holds both operands exactly: float16 does after the row scaling of device/rows.py, and
    bfloat16 holds a float16 query in two parts (device/attention.py::load_queries)."""
    if cache == torch.uint8 or (cache == torch.float16 and query != torch.float32):
        return "float16"
    if cache == torch.bfloat16 and query != torch.float32:
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
