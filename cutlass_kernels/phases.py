"""What a consumer does in a trip, as operations between the protocol's steps: counts here, cycles in timeline.py.

`trip` is the kernel's own order (decode_sm90.py, scores.py, values.py), a warp's share of it. Steps stand in it as in
the protocol's table, and timeline.py holds it to that. What a compiled trip has beyond these counts (waiting code,
addresses, the loop) is spread evenly over the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from pagedmla.cutlass_kernels.protocol import Action, Step
from pagedmla.cutlass_kernels.tiles import (
    COLUMN_TILES,
    KEYS,
    LATENT,
    SCORE_CHUNK,
    SCORE_TRIPS,
    Shape,
    turns,
)

SHARED_BYTES_A_CYCLE = 128
A_BYTES = 2048  # of a WGMMA's A where that comes from shared memory
STEP_BYTES = 32  # of K: what a WGMMA takes of a row
_FOLDS = 3  # of a warp's 8 groups of keys into one
_AROUND_PRODUCTS, _A_PRODUCT = 5, 3  # instructions: fence, commit, wait; descriptors and WGMMA


class Kind(Enum):
    """`count` is instructions, unless said otherwise."""

    CHAIN = "each needs the one before"
    WIDE = "independent ones"
    CONVERT = "to or from 8 bits"
    EXPONENTIAL = "exp2, log2, reciprocal"
    READ = "round trips to shared memory"
    EXCHANGE = "round trips between lanes"
    MEET = "the warpgroup's own barrier"
    FENCE = "the warp's stores seen by tensor copies and products"
    LOAD = "matrix loads, started"
    LANDED = "wait for all matrix loads"
    PRODUCTS = "WGMMAs of one group, started"
    DRAIN = "wait for a group, and so for all before it"


@dataclass(frozen=True)
class Op:
    """`tensor` and `shared`: cycles for which each WGMMA occupies the tensor cores and shared memory's port.

    `group` names PRODUCTS, and what a DRAIN waits for: the latest of that name, or with "" the latest of all.
    """

    kind: Kind
    count: float = 1
    tensor: float = 0.0
    shared: float = 0.0
    group: str = ""

    @property
    def instructions(self) -> float:
        if self.kind is Kind.PRODUCTS:
            return _AROUND_PRODUCTS + _A_PRODUCT * self.count
        return 0.0 if self.kind is Kind.LANDED else self.count


@dataclass(frozen=True)
class Phase:
    """Operations on a block, counted from the trip's own as in protocol.Step; left out where there is no such block."""

    name: str
    block: int
    ops: tuple[Op, ...]

    @property
    def instructions(self) -> float:
        return sum(op.instructions for op in self.ops)


Script = Sequence[Step | Phase]


def trip(shape: Shape) -> list[Step | Phase]:
    """The trip at a consumer's own block."""
    loads = [_load_all(shape)] if shape.matrices_ahead else []
    script: list[Step | Phase] = []
    if not shape.ahead:
        script += [Step(Action.WAIT, "keys"), _phase("start", 0, *starts(shape))]
    script += [
        _phase("finish", 0, finish(shape)),
        Step(Action.WAIT, "keys", -1),
        _phase("load", -1, *loads),
        _phase("settle", 0, [Op(Kind.MEET)]),
        Step(Action.WAIT, "probabilities", -1),
        Step(Action.ACQUIRE, "probabilities"),
        _phase("settle", 0, settle(shape)),
        _phase("load", 0, *(loads if shape.matrices_ahead > 1 else [])),
        _phase("store", 0, store(shape)),
        Step(Action.COMMIT, "probabilities"),
        *multiply(shape, -1),
        Step(Action.RELEASE, "probabilities", -1),
        Step(Action.RELEASE, "keys", -1),
        _phase("load", 0, *(loads if shape.matrices_ahead == 1 else [])),
        Step(Action.WAIT, "probabilities"),
        *multiply(shape, 0, starts(shape) if shape.ahead else ()),
        Step(Action.RELEASE, "probabilities"),
        Step(Action.RELEASE, "keys"),
    ]
    return script


def starts(shape: Shape) -> list[list[Op]]:
    """Score products that run by themselves once they are started, in the parts in which they are."""
    if shape.precision == "fp16":
        rope = [] if shape.rope_joined else [_rope_products(shape)]
        return [[*_widened_products(shape), *rope]]
    rope_last = [[_rope_products(shape)]] if shape.rope_apart or shape.rope_joined else []
    if shape.rows <= 32:
        columns = LATENT // shape.column_parts
        return [[_latent_products(shape, columns)] for _ in range(shape.column_parts)] + rope_last
    if shape.terms > shape.stacked:
        return [list(_terms_in_turn(shape))]
    return [[_latent_products(shape, SCORE_CHUNK)] for _ in range(LATENT // SCORE_CHUNK)] + rope_last


def _terms_in_turn(shape: Shape) -> Iterator[Op]:
    """64 rows, two terms: a part of the columns after another, the low term's first, a joined rope's with the last."""
    chunk, rope = _latent_products(shape, SCORE_CHUNK), _rope_products(shape)
    for part in range(shape.column_parts):
        for term in reversed(range(shape.terms)):
            yield from [replace(chunk, count=chunk.count / shape.terms)] * SCORE_TRIPS
            if shape.rope_joined and part + 1 == shape.column_parts and term < shape.query_rope_terms:
                yield replace(rope, count=rope.count / shape.query_rope_terms)


def finish(shape: Shape) -> list[Op]:
    """Until a tile's scores are there as logits, and each warp's maxima in shared memory."""
    scores, columns = shape.rows // 2, shape.rows // 4  # a thread's
    parts = shape.rope_parts
    ops = [Op(Kind.READ), Op(Kind.DRAIN), Op(Kind.EXPONENTIAL, 2), Op(Kind.CHAIN, 10)]
    for part in range(parts):
        ops.append(Op(Kind.WIDE, shape.stacked * shape.column_parts * scores // parts))
        if parts > 1:
            ops.append(_rope_products(shape, f"rope {part}"))
    ops.append(Op(Kind.READ))
    for part in range(parts):
        ops += [Op(Kind.DRAIN, group=f"rope {part}")] if parts > 1 else []
        ops.append(Op(Kind.WIDE, scores // parts))
    return [*ops, Op(Kind.WIDE, columns), *fold(columns)]


def settle(_: Shape) -> list[Op]:
    """A thread a row: the tile's maximum and the weights."""
    return [Op(Kind.READ), Op(Kind.CHAIN, 40), Op(Kind.EXPONENTIAL, 3), Op(Kind.EXCHANGE)]


def store(shape: Shape) -> list[Op]:
    """A thread its scores: P, and the sums."""
    scores, columns = shape.rows // 2, shape.rows // 4
    return [
        Op(Kind.MEET), Op(Kind.READ), Op(Kind.EXPONENTIAL, 2), Op(Kind.WIDE, scores), Op(Kind.EXPONENTIAL, scores),
        Op(Kind.WIDE, 2 * columns), *fold(columns), Op(Kind.READ), Op(Kind.CHAIN, 12),
        Op(Kind.CONVERT, scores // 2), Op(Kind.CHAIN, max(1, shape.rows // 16)), Op(Kind.FENCE),
    ]  # fmt: skip


def multiply(shape: Shape, block: int, beside: Sequence[list[Op]] = ()) -> list[Step | Phase]:
    """A tile's value products and additions. `beside`: parts of the start of the scores of block + 2, among them."""
    parts = shape.rows // shape.part_rows
    products = COLUMN_TILES * parts
    left = list(beside)
    done: list[Step | Phase] = []
    ops = [Op(Kind.READ, 2)]
    if not shape.matrices_ahead:
        ops += transpose(shape)
    for begin, end in turns(products, shape.in_flight, shape.values_overlapped):
        if begin is not None:
            column_tile, part = divmod(begin, parts)
            ops.append(value_products(shape, f"{column_tile}.{part}"))
            last = begin + 1 == products
            behind: list[list[Op]] = []
            if shape.matrices_ahead:
                behind, left = (left, []) if last else ([], left)
            elif part + 1 == parts:
                if not last:
                    ops += transpose(shape)
                behind, left = (left, []) if last else (left[:1], left[1:])
            if behind:
                done.append(_phase("values", block, ops))
                if behind[0] is beside[0]:
                    done.append(Step(Action.WAIT, "keys", block + 2))
                done.append(_phase("start", block + 2, *behind))
                ops = []
        if end is not None:
            column_tile, part = divmod(end, parts)
            ops += [Op(Kind.DRAIN, group=f"{column_tile}.{part}"), Op(Kind.WIDE, shape.rows // parts // 2)]
    return [*done, _phase("values", block, ops)]


def transpose(shape: Shape, column_tiles: int = 1) -> list[Op]:
    """V^T of column tiles into registers."""
    loads = column_tiles * KEYS // 32
    widened = [Op(Kind.CONVERT, 8 * loads)] if shape.precision == "fp16" else []
    return [Op(Kind.LOAD, loads), Op(Kind.LANDED), Op(Kind.WIDE, 4 * loads), *widened]


def value_products(shape: Shape, group: str) -> Op:
    """Of a column tile and a part of the rows."""
    return products_of(KEYS * shape.element_bytes // STEP_BYTES, shape.part_rows, from_shared=False, group=group)


def products_of(count: int, rows: int, *, from_shared: bool, group: str = "scores") -> Op:
    """So many WGMMAs of one group: rows / 2 cycles of the tensor cores each, B and maybe A from shared memory."""
    operands = STEP_BYTES * rows + (A_BYTES if from_shared else 0)
    return Op(Kind.PRODUCTS, count, rows / 2, operands / SHARED_BYTES_A_CYCLE, group)


def fold(columns: int) -> list[Op]:
    """Consumer.fold: each round halves the columns; then they are stored."""
    return [Op(Kind.WIDE, 2 * (columns + columns // 2 + columns // 4)), Op(Kind.EXCHANGE, _FOLDS), Op(Kind.CHAIN, 3)]


def _phase(name: str, block: int, *parts: Iterable[Op]) -> Phase:
    return Phase(name, block, tuple(op for part in parts for op in part))


def _load_all(shape: Shape) -> list[Op]:
    return transpose(shape, COLUMN_TILES)


def _latent_products(shape: Shape, columns: int) -> Op:
    count = shape.terms // shape.stacked * columns // STEP_BYTES
    return products_of(count, shape.query_rows, from_shared=True)


def _rope_products(shape: Shape, group: str = "scores") -> Op:
    """Those of one of the rope's parts."""
    terms = shape.query_rope_terms * shape.rows // shape.query_rope_rows
    rows = shape.query_rope_rows // shape.rope_parts
    return products_of(terms * shape.query_rope_bytes // STEP_BYTES, rows, from_shared=True, group=group)


def _widened_products(shape: Shape) -> Iterator[Op]:
    """fp16: K's codes become fp16 on their way into registers, two sets in turn."""
    wide = shape.widened_columns
    columns = range(0, LATENT + (shape.rope_bytes if shape.rope_joined else 0), wide)
    yield Op(Kind.LOAD, wide // 32)
    for column in columns:
        yield Op(Kind.LANDED)
        if column != columns[-1]:
            yield Op(Kind.LOAD, wide // 32)  # on their way while these are widened
        yield Op(Kind.CONVERT, 8 * wide // 32)
        yield products_of(2 * wide // STEP_BYTES, shape.rows, from_shared=False, group=f"widened {column // wide % 2}")
        if column:
            yield Op(Kind.DRAIN, group=f"widened {(column // wide - 1) % 2}")
