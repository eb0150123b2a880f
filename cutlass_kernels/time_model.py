"""How long a decode step should take: a model from counts, calibrated on measured steps, never a measurement.

A tile of 64 keys occupies four resources of an SM, each at its published rate (`TileCycles`); none can be beaten:

    memory   bytes of a tile over the SM's share of the bandwidth   2074 cycles on an H200 for 644-byte tokens
    tensor   64 x rows x K products: rows / 2 cycles an m64 k32 (fp8) or k16 (16-bit) instruction, at least 16 cycles
             where its 2 KiB of A come from shared memory
    shared   128 bytes a cycle: tensor copies in, operands of WGMMA, matrix loads of V (and of K in fp16), P
    issue    instructions of both consumers over four schedulers; counted in the compiled kernel, see test_compile.py

How long a tile takes is timeline.py's answer: none of them is full, the roles wait. A step is the launch, the tiles
and pieces of the busiest worker, and the merge (`step_us`); what they cost is fitted to an H200's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedmla.cutlass_kernels import schedule
from pagedmla.cutlass_kernels.phases import A_BYTES, SHARED_BYTES_A_CYCLE, STEP_BYTES
from pagedmla.cutlass_kernels.tiles import COLUMN_TILES, KEYS, LATENT, LATENT_BYTES, WARPGROUPS, WARPS, Shape
from pagedmla.cutlass_kernels.timeline import MOST_BYTES_A_CYCLE, Pace, pace_of
from pagedmla.cutlass_kernels.variants import Variant
from pagedmla.hardware.cost import H200, Gpu
from pagedmla.kv_cache.layouts import get_layout

SMS = H200.multiprocessors
FP8_FLOPS_A_CYCLE = 8192  # of an SM; 16-bit half of it
BANDWIDTH = 0.9  # of the published: what the best kernels reach; they stand between 0.84 and 0.90

# Fitted, with timeline.py's three, to all rows of these kernels' last state in bench/results/h200-2026-11-29.json.
LAUNCH_US = 6.4  # the launch, lengths and schedule, until the first copy
PIECE_US = 2.3  # barriers and output of a piece; its pipeline's fill and drain are timeline.py's
QUERY_TRIP_US = 0.65  # queries of a piece that are loaded together; eight rows when this was measured
QUERY_ROWS_A_TRIP = 32  # queries.py: 4 of each of 8 warps
COLD_US = 6.5  # more where all SMs start on a cold L2, in proportion to how many do; why isn't known
MERGE_US = 0.5  # the second launch
MERGE_TRIP_US = 0.47  # a round trip of the merge: one a piece then; since, one, or two where a row has 9 to 16 pieces
_TILES_A_PIECE = 4  # what one costs, about
_TILES_A_TRIP = 2  # that a consumer multiplies; it scores one
_SCHEDULERS = 4  # of an SM


@dataclass(frozen=True)
class TileCycles:
    """Cycles of an SM for one tile of keys against a CTA's rows."""

    memory: float
    tensor: float
    shared: float
    issue: float

    @property
    def most(self) -> float:
        return max(self.memory, self.tensor, self.shared, self.issue)


def clock_ghz(gpu: Gpu) -> float:
    """The clock that the published tensor peak stands for."""
    return gpu.fp8_tflops * 1e3 / (SMS * FP8_FLOPS_A_CYCLE)


def tensor_cycles(shape: Shape) -> float:
    """Both products of a tile."""
    value = shape.rows / 2
    values = (LATENT // 64) * (KEYS * shape.element_bytes // 32) * value
    latent_steps, rope_steps = _score_steps(shape)
    rope = rope_steps * (value if _rope_widened(shape) else _from_shared(shape.query_rope_rows))
    if shape.precision == "fp16":
        return latent_steps * value + rope + values
    return latent_steps * _from_shared(shape.query_rows) + rope + values


def _from_shared(rows: int) -> float:
    """Cycles of a WGMMA whose A is in shared memory."""
    return max(rows / 2, A_BYTES / SHARED_BYTES_A_CYCLE)


def _rope_widened(shape: Shape) -> bool:
    return shape.precision == "fp16" and shape.rope == "e4m3"


def _score_steps(shape: Shape) -> tuple[int, int]:
    """WGMMAs of a tile's scores: of the latent, and of the rope. Stacked terms of Q meet K in one."""
    latent = shape.terms // shape.stacked * LATENT * shape.element_bytes // 32
    terms = shape.query_rope_terms * shape.rows // shape.query_rope_rows
    return latent, terms * shape.query_rope_bytes // 32


def shared_cycles(shape: Shape) -> float:
    """Everything that passes through shared memory for a tile, statistics aside."""
    copies_in = KEYS * shape.key_bytes
    latent_steps, rope_steps = _score_steps(shape)
    if shape.precision == "fp16":
        keys = LATENT_BYTES + KEYS * shape.rope_bytes
    else:
        keys = (latent_steps + rope_steps) * A_BYTES
    queries = STEP_BYTES * (latent_steps * shape.query_rows + rope_steps * shape.query_rope_rows)
    values = LATENT_BYTES + WARPGROUPS * COLUMN_TILES * KEYS * shape.element_bytes * shape.rows
    probabilities = shape.probability_bytes
    return (copies_in + keys + queries + values + probabilities) / SHARED_BYTES_A_CYCLE


def rare_instructions(shape: Shape) -> int:
    """Of a consumer warp's trip, those in branches that a usual trip doesn't take: O scaled anew, keys masked."""
    scores = shape.rows // 2  # a thread's, and as many of each column tile of O
    return (
        _TILES_A_TRIP * COLUMN_TILES * scores + 2 * scores
    )  # O scaled before each tile; a key's comparison, its choice


def tile_cycles(variant: Variant, gpu: Gpu, consumer_instructions: float) -> TileCycles:
    """`consumer_instructions`: what one consumer warp issues for a usual trip, which covers two tiles."""
    bytes_per_token = get_layout(variant.layout).bytes_per_token
    bytes_a_cycle = gpu.terabytes_per_second * 1e3 / (SMS * clock_ghz(gpu))
    return TileCycles(
        memory=KEYS * bytes_per_token / (bytes_a_cycle * variant.cluster),
        tensor=tensor_cycles(variant.shape),
        shared=shared_cycles(variant.shape),
        issue=consumer_instructions * (WARPGROUPS * WARPS) / (_TILES_A_TRIP * _SCHEDULERS),
    )


@dataclass(frozen=True)
class Share:
    """What the busiest worker has to do, and how many have something to do."""

    tiles: int
    pieces: int
    workers: int
    cut_pieces: int  # of all workers, where requests are cut: they are written, and read by the merge


def busiest_share(variant: Variant, kv_lens: Sequence[int], *, q_len: int, heads: int, partitions: int) -> Share:
    """By schedule.py's own cut. Pieces weigh in as `_TILES_A_PIECE` tiles."""
    workers = SMS // variant.cluster
    row_tiles = int(schedule.row_tiles_of(q_len, heads, variant.rows))
    units = [int(schedule.units_of(kv_len)) for kv_len in kv_lens for _ in range(row_tiles)]
    total, longest = sum(units), max(units)
    whole = schedule.is_whole(total, longest, len(units), workers, partitions)
    share = schedule.share_of(total, longest, workers, partitions)
    tiles, pieces, start = [0] * workers, [0] * workers, 0
    for segment, count in enumerate(units):
        if whole:
            owner = schedule.owner_of(segment, start, len(units), workers, share)
            tiles[owner] += count
            pieces[owner] += 1
        else:
            for worker in range(start // share, (start + count - 1) // share + 1):
                begin, end, _, _ = schedule.piece_of(worker, start, count, share)
                tiles[worker] += end - begin
                pieces[worker] += 1
        start += count
    most = max(range(workers), key=lambda worker: tiles[worker] + _TILES_A_PIECE * pieces[worker])
    return Share(tiles[most], pieces[most], sum(count > 0 for count in pieces), 0 if whole else sum(pieces))


def step_us(
    variant: Variant,
    gpu: Gpu,
    *,
    kv_lens: Sequence[int],
    q_len: int,
    heads: int,
    partitions: int,
    consumer_instructions: float,
    pace: Callable[[float], Pace] | None = None,
    query_rows_a_trip: int = QUERY_ROWS_A_TRIP,
) -> float:
    """Microseconds of a decode step (a model).

    `pace` gives an item's cycles for an SM's share of the bandwidth in bytes a cycle; None: the variant's as it stands.
    """
    share = busiest_share(variant, kv_lens, q_len=q_len, heads=heads, partitions=partitions)
    cycles_a_us = clock_ghz(gpu) * 1e3
    bandwidth = gpu.terabytes_per_second * 1e6 * BANDWIDTH  # bytes a microsecond
    bytes_a_cycle = round(min(bandwidth / (share.workers * variant.cluster * cycles_a_us), MOST_BYTES_A_CYCLE), 1)
    per = pace(bytes_a_cycle) if pace else pace_of(variant, bytes_a_cycle, consumer_instructions)
    loop_us = (share.tiles * per.tile + share.pieces * per.fill) / cycles_a_us
    query_trips = -(-variant.shape.rows // query_rows_a_trip)
    pieces_us = share.pieces * (PIECE_US + QUERY_TRIP_US * query_trips)
    cold_us = COLD_US * share.workers / SMS
    return LAUNCH_US + cold_us + pieces_us + loop_us + merge_us(variant, share, partitions, bandwidth)


def merge_us(variant: Variant, share: Share, partitions: int, bandwidth: float) -> float:
    """Launched wherever requests may be cut; each partial row is written and read once, in float32."""
    if partitions < 2:
        return 0.0
    return MERGE_US + MERGE_TRIP_US + share.cut_pieces * variant.rows * LATENT * 4 * 2 / bandwidth
