"""Shapes of the decode kernel: what a tile holds, and where everything lies in shared memory.

A CTA multiplies tiles of 64 keys with its query rows (token i of a request and head h make row i * H + h). Both
products have keys or latent columns as WGMMA's M and query rows as its N, so a tile of 16 rows wastes nothing:

    scores   S^T [64 keys, rows]      = K [64, 576] . Q^T         K from shared memory as it lies
    values   O^T [512 columns, rows] += V^T [512, 64] . P^T       V^T made in registers from the same K tile

    stage (one tile of keys)                  bytes
    latent   4 panels [64 keys, 128 bytes]    32768   128-byte swizzle
    rope     1 panel  [64 keys, 128 bytes]     8192   bf16; e4m3 has [64, 64 bytes] and a 64-byte swizzle
    sigma    [64] float32                       256
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

KEYS = 64  # of a tile: M of the score product
LATENT = 512
ROPE = 64
PANEL_BYTES = 128  # of a row: what one swizzle atom, and so one tensor copy, is wide
LATENT_PANELS = LATENT // PANEL_BYTES
LATENT_BYTES = KEYS * LATENT

SCORE_CHUNK = 128  # columns of K in one group of score products at 64 rows
SCORE_TRIPS = 2  # of each loop over such groups, with two terms: half of the columns

WARPGROUPS = 2  # consumers
WARPS = 4  # of a warpgroup
THREADS = 128
MAX_WARPS = 12  # of a CTA
COLUMNS = LATENT // WARPGROUPS  # of the output, for each consumer
COLUMN_TILE = 64  # M of one value product
COLUMN_TILES = COLUMNS // COLUMN_TILE

PROBABILITY_STAGES = 3  # with two, P of a tile would wait for the other consumer's values of two tiles before
MAX_STAGES = 5
AHEAD_STAGES = 4  # from so many on, the next scores start behind the value products of the tile at hand
SHARED_BYTES = 232448  # a CTA may have on sm_90: 227 KiB
ALIGNMENT = 1024  # of whatever a 128-byte swizzle addresses

# O and the sums are scaled anew only when a row's maximum has risen by more than 2^16: float32 has room.
PEAK_LAG = 16.0

LEAST_SIGMA = 2.0**-126  # keys past the end have sigma 0: keep its logarithm and its inverse finite
LEAST_QUERY_SCALE = 2.0**-100
NO_CACHE = -(1 << 30)  # cache_length of the rows of q that no request owns

PRECISIONS = ("fp8", "fp16")
ROPE_KINDS = ("bf16", "scaled_bf16", "e4m3")
"""What the rope columns are: bf16 unscaled, bf16 times sigma, or e4m3 times sigma (one row of 576 bytes)."""


@dataclass(frozen=True)
class Shape:
    """What is fixed when a kernel is compiled, as far as arithmetic and memory go.

    rows         query rows of a CTA: 16, 32 or 64
    precision    "fp8": Q and P in e4m3. "fp16": both in fp16, K widened on its way into registers
    terms        e4m3 terms of Q (1, or 2: high and low)
    rope         one of ROPE_KINDS
    """

    rows: int
    precision: str = "fp8"
    terms: int = 1
    rope: str = "bf16"

    def __post_init__(self) -> None:
        if self.rows not in (16, 32, 64):
            raise ValueError(f"rows: expected 16, 32 or 64; got {self.rows}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}; got {self.precision!r}")
        if self.rope not in ROPE_KINDS:
            raise ValueError(f"rope: expected one of {', '.join(ROPE_KINDS)}; got {self.rope!r}")
        if self.terms not in ((1, 2) if self.precision == "fp8" else (1,)):
            raise ValueError(f"terms: expected 1, or 2 with fp8; got {self.terms} with {self.precision}")

    @property
    def stacked(self) -> int:
        """Terms of Q that lie below each other and meet K in one product, side by side in its accumulators.

        64 rows have no registers for that: there the terms follow each other in one accumulation.
        """
        return self.terms if self.rows <= 32 else 1

    @property
    def column_parts(self) -> int:
        """Parts of the latent's columns whose scores have sums of their own, added up in float32.

        One product of all columns cuts every step's to the 14 bits of the whole sum, twice as often with two terms: by
        the model LSE was then off by 0.013 for logits of deviation 5, by 0.005 with two parts.
        """
        return self.terms

    @property
    def query_rows(self) -> int:
        """Rows of Q's latent panels, and of its rope where that has as many terms: N of the score product."""
        return self.rows * self.stacked

    @property
    def rope_joined(self) -> bool:
        """Whether the rope's products end the latent's sum: where it is e4m3, or bf16 times sigma at 64 rows.

        At fewer rows stacked terms of Q give the latent more accumulators than a bf16 rope has. Last, for each fp8
        product after it would cut it to the sum's 14 bits anew.
        """
        return self.rope == "e4m3" or (self.rope == "scaled_bf16" and self.rows > 32)

    @property
    def rope_apart(self) -> bool:
        """Whether the rope has accumulators of its own. 64 rows have none left: it is added to the scaled sum there."""
        return self.rows <= 32 and not self.rope_joined

    @property
    def rope_parts(self) -> int:
        """Products of the rope, of a share of the rows each. Where it comes last, one runs beside work on the other."""
        return 1 if self.rope_joined or self.rope_apart else 2

    @property
    def keeps_targets(self) -> bool:
        """Whether the place where a thread stores P waits in shared memory."""
        return self.rows > 32

    @property
    def ahead(self) -> bool:
        """Whether a consumer starts its next scores behind its own tile's value products; else at the trip's start."""
        return self.stages >= AHEAD_STAGES

    @property
    def matrices_ahead(self) -> int:
        """Tiles of which a consumer loads all its V^T before it may multiply them: 0, 1 or 2, as registers go."""
        if self.rows == 64:
            return 0
        return 2 if (self.rows, self.precision) == (16, "fp8") else 1

    @property
    def values_overlapped(self) -> bool:
        """Whether a value product is started for each that is finished, see `turns`."""
        return self.rows <= 32

    @property
    def in_flight(self) -> int:
        """Value products that a consumer has begun and not yet added up, as far as its registers go."""
        return COLUMN_TILES if self.rows == 16 else 2

    @property
    def part_rows(self) -> int:
        """Of a value product: 64 rows are multiplied in two parts, whose sums beside O take half the registers."""
        return min(self.rows, 32)

    @property
    def widened_columns(self) -> int:
        """fp16: columns of K that are in registers at a time for the score product, two sets in turn."""
        return 64 if self.rows == 16 else 32

    @property
    def form(self) -> str:
        """ "fp16", or "fp8x1" and "fp8x2" by the terms of Q."""
        return f"fp8x{self.terms}" if self.precision == "fp8" else self.precision

    @property
    def element_bytes(self) -> int:
        """Of Q's latent columns and of P in shared memory."""
        return 1 if self.precision == "fp8" else 2

    @property
    def top(self) -> float:
        """The largest P that is stored: e4m3's maximum, or a power of two that leaves fp16 all of its small numbers."""
        return 448.0 if self.precision == "fp8" else 32768.0

    @property
    def query_top(self) -> float:
        """The largest Q that is stored."""
        return 448.0 if self.precision == "fp8" else 16384.0

    @property
    def rope_bytes(self) -> int:
        """Of a key's rope columns."""
        return ROPE if self.rope == "e4m3" else 2 * ROPE

    @property
    def query_rope_bytes(self) -> int:
        """Of a query row's rope columns: as the key's, but fp16 where K is widened."""
        return 2 * ROPE if self.precision == "fp16" else self.rope_bytes

    @property
    def query_rope_terms(self) -> int:
        return self.terms if self.rope == "e4m3" else 1

    @property
    def query_rope_rows(self) -> int:
        """Rows of Q's rope panel."""
        return self.query_rows if self.query_rope_terms > 1 else self.rows

    @property
    def key_bytes(self) -> int:
        """Of a token that the tensor copies bring."""
        return LATENT + self.rope_bytes

    @property
    def latent_steps(self) -> int:
        """Panels of Q's latent columns for one term; each is one accumulation of the score product."""
        return LATENT * self.element_bytes // PANEL_BYTES

    # Shared memory, in bytes from an aligned base: Q, P, stages of latent, of rope, of sigma, statistics, barriers.

    @property
    def query_panel(self) -> int:
        return self.query_rows * PANEL_BYTES

    @property
    def query_rope_offset(self) -> int:
        return self.terms // self.stacked * self.latent_steps * self.query_panel

    @property
    def query_bytes(self) -> int:
        return self.query_rope_offset + self.query_rope_terms * self.rows * self.query_rope_bytes

    @property
    def probability_bytes(self) -> int:
        return self.rows * KEYS * self.element_bytes

    @property
    def probability_offset(self) -> int:
        return _aligned(self.query_bytes)

    @property
    def latent_offset(self) -> int:
        return _aligned(self.probability_offset + PROBABILITY_STAGES * self.probability_bytes)

    @property
    def stage_bytes(self) -> int:
        return KEYS * self.key_bytes

    @property
    def stages(self) -> int:
        """Tiles in flight: as many as fit, up to MAX_STAGES."""
        free = SHARED_BYTES - ALIGNMENT - self.latent_offset - self._tail_bytes(0)
        return min(MAX_STAGES, free // (self.stage_bytes + self._tail_bytes(1) - self._tail_bytes(0)))

    @property
    def rope_offset(self) -> int:
        return self.latent_offset + self.stages * LATENT_BYTES

    @property
    def tail_offset(self) -> int:
        """Sigma, statistics and barriers; `tail` says where each of them lies."""
        return self.rope_offset + self.stages * KEYS * self.rope_bytes

    def tail(self, stages: int) -> dict[str, tuple[int, int]]:
        """Name to (byte from `tail_offset`, bytes). Statistics are [rows], in the order of `fragments.row_place`.

        sigma        of each stage's keys                           factor       log2(e) * sm_scale * s_q
        warp_peak    each consumer warp's maximum in a tile         limit        keys that the row sees
        warp_sum     and its sum so far, relative to own_peak
        reference    each consumer's: what its exponents subtract   peak         running maximum
        gain, keep   each consumer's: weights of new and old sums   row          the row's place in the output
        own_peak     each consumer's: running maximum at its last tile
        decay, rise  of each P stage: weights of old and new O      rescale      of each P stage: is any decay not 1
        address      where the row's output goes (0: nowhere)       search, notes  the schedule's, see work.py
        target       of each consumer thread: where in a P stage it stores (64 rows: a register too many)
        """
        row = 4 * self.rows
        sizes = {
            "sigma": stages * 4 * KEYS,
            "warp_peak": WARPGROUPS * WARPS * row,
            "warp_sum": WARPGROUPS * WARPS * row,
            "reference": WARPGROUPS * row,
            "gain": WARPGROUPS * row,
            "keep": WARPGROUPS * row,
            "own_peak": WARPGROUPS * row,
            "decay": PROBABILITY_STAGES * row,
            "rise": PROBABILITY_STAGES * row,
            "factor": row,
            "limit": row,
            "peak": row,
            "row": row,
            "address": 2 * row,
            "rescale": 16 * PROBABILITY_STAGES,
            "search": 16 * (MAX_WARPS + 2),
            "notes": 64 * MAX_WARPS,
            "target": 4 * WARPGROUPS * THREADS if self.keeps_targets else 0,
            "barriers": 16 * (stages + PROBABILITY_STAGES + 1),
        }
        places, offset = {}, 0
        for name, size in sizes.items():
            places[name] = (offset, size)
            offset += size
        return places

    def _tail_bytes(self, stages: int) -> int:
        return sum(size for _, size in self.tail(stages).values())

    def place(self, name: str) -> int:
        """Byte at which a part of the tail lies."""
        return self.tail_offset + self.tail(self.stages)[name][0]

    @property
    def shared_bytes(self) -> int:
        """All of it, with room to align the base."""
        return ALIGNMENT + self.tail_offset + self._tail_bytes(self.stages)


def turns(products: int, in_flight: int, overlapped: bool = True) -> Iterator[tuple[int | None, int | None]]:
    """(product to start, product to finish) in the order of a consumer's instructions; None: none at this turn.

    Overlapped, one is started for each that is finished; otherwise all in flight are finished before others start.
    """
    depth = min(in_flight, products)
    if overlapped:
        for turn in range(products + depth - 1):
            yield turn if turn < products else None, turn - depth + 1 if turn >= depth - 1 else None
        return
    for first in range(0, products, depth):
        group = range(first, min(first + depth, products))
        yield from ((start, None) for start in group)
        yield from ((None, finish) for finish in group)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
