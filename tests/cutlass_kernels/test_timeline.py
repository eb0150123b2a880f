"""The timeline: its order against lists by hand, its time against bounds that can't be beaten and measured steps.

Measured rows are of the kernels of 2026-11-29, so that day's table, order of work and instruction counts are written
out here: kernels change. Grid: the seven forms that were measured, and bandwidths at which the loop binds (64 bytes a
cycle), at which both are close (18) and at which memory does (6).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pagedmla.bench.model import CUTLASS_TABLE, compile_table, usual_trip
from pagedmla.cutlass_kernels import phases, schedule, time_model, timeline
from pagedmla.cutlass_kernels.phases import Kind, Op, Phase, products_of
from pagedmla.cutlass_kernels.protocol import Action, Meeting, Protocol, Ring, Role, Step, Unit
from pagedmla.cutlass_kernels.tiles import KEYS, Shape, turns
from pagedmla.cutlass_kernels.timeline import H200_TIMINGS, Timings, Trace, Work, simulate
from pagedmla.cutlass_kernels.variants import VARIANTS, Variant
from pagedmla.hardware.cost import H200

ACQUIRE, ARM, COPY, FETCH = Action.ACQUIRE, Action.ARM, Action.COPY, Action.FETCH
COMMIT, WAIT, RELEASE = Action.COMMIT, Action.WAIT, Action.RELEASE

RESULTS = Path(time_model.__file__).parents[1] / "bench" / "results" / "h200-2026-11-29.json"
# (rows, form): warp instructions of a consumer's usual trip, by that day's compile table
FORMS = {
    (16, "fp8x2"): 896, (16, "fp16"): 1109, (32, "fp8x2"): 1075, (32, "fp16"): 1307,
    (64, "fp8x1"): 1347, (64, "fp8x2"): 1597, (128, "fp8x1"): 1384,
}  # fmt: skip
TILE_BYTES = 64 * 644
WITHIN, ON_AVERAGE = 0.10, 0.035  # of the measured time; root mean square


def measured_protocol(stages: int, cluster: int = 1, probability_stages: int = 2) -> Protocol:
    """The table of 2026-11-29: scores and P of j, values of j - 1, values of j."""
    rings = (
        Ring("keys", stages, full=33, empty=8 * cluster, multicast=cluster > 1),
        Ring("probabilities", probability_stages, full=4, empty=8),
        Ring("queries", 1, full=2, empty=2, unit=Unit.ITEM),
    )
    producer = Role("producer", 4, 24, (Step(ACQUIRE, "keys"), Step(ARM, "keys", 0, 1), Step(COPY, "keys"),
                                        Step(FETCH, "keys", 0, 32)))  # fmt: skip
    trip = (
        Step(WAIT, "keys"), Step(WAIT, "probabilities", -1), Step(ACQUIRE, "probabilities"),
        Step(COMMIT, "probabilities", 0, 4),
        Step(WAIT, "keys", -1), Step(WAIT, "probabilities", -1), Step(RELEASE, "probabilities", -1, 4),
        Step(RELEASE, "keys", -1, 4),
        Step(WAIT, "keys"), Step(WAIT, "probabilities"), Step(RELEASE, "probabilities", 0, 4),
        Step(RELEASE, "keys", 0, 4),
    )  # fmt: skip
    before = (Step(ACQUIRE, "queries"), Step(COMMIT, "queries", 0, 1), Step(WAIT, "queries"))
    after = (Step(Action.MEET, "consumers"), Step(RELEASE, "queries", 0, 1))
    consumers = (Role(f"consumer{w}", 4, 216, trip, before, after, first=w, stride=2) for w in range(2))
    return Protocol(rings, (producer, *consumers), (Meeting("consumers", ("consumer0", "consumer1")),), cluster)


def measured_script(shape: Shape) -> list[Step | Phase]:
    """What a consumer did between those steps. Terms of Q were multiplied one after the other."""
    before, own = (
        [Step(WAIT, "keys", block), Step(WAIT, "probabilities", block), Phase("values", block, measured_values(shape)),
         Step(RELEASE, "probabilities", block), Step(RELEASE, "keys", block)]
        for block in (-1, 0)
    )  # fmt: skip
    start, finish = measured_scores(shape)
    softmax = (*phases.settle(shape), *phases.store(shape))
    return [
        Step(WAIT, "keys"), Phase("start", 0, start), Phase("finish", 0, finish),
        Step(WAIT, "probabilities", -1), Step(ACQUIRE, "probabilities"), Phase("settle", 0, softmax),
        Step(COMMIT, "probabilities"), *before, *own,
    ]  # fmt: skip


def measured_scores(shape: Shape) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Products that were started, and what was done until each warp's maxima were there."""
    scores, columns = shape.rows // 2, shape.rows // 4
    latent, rope, wait = 16 * shape.terms, products_of(4, shape.rows, from_shared=True), Op(Kind.DRAIN)
    logits = [Op(Kind.READ), Op(Kind.EXPONENTIAL, 2), Op(Kind.CHAIN, 10), Op(Kind.WIDE, scores)]
    peaks = [Op(Kind.WIDE, columns), *phases.fold(columns), Op(Kind.MEET)]
    if shape.precision == "fp16":
        start: list[Op] = []
        for part in range(8):
            widened = products_of(4, shape.rows, from_shared=False, group=str(part))
            start += [Op(Kind.LOAD, 2), Op(Kind.LANDED), Op(Kind.CONVERT, 16), widened]
            start += [Op(Kind.DRAIN, group=str(part - 1))] if part else []
        start.append(rope)
        products = [wait, Op(Kind.WIDE, scores)]
    elif shape.rows <= 32:
        start, products = [products_of(latent, shape.rows, from_shared=True), rope], [wait, Op(Kind.WIDE, scores)]
    elif shape.terms == 1:
        start, products = [products_of(latent, 64, from_shared=True)], [wait, Op(Kind.WIDE, scores), rope, wait]
    else:
        chunk, add = products_of(latent // 4, 64, from_shared=True), Op(Kind.WIDE, scores)
        start, products = [chunk], [wait, *3 * [add, chunk, wait], add, add, rope, wait]
    return tuple(start), (*products, *logits, *peaks)


def measured_values(shape: Shape) -> tuple[Op, ...]:
    """A column tile's loads stood before its products; 64 rows were multiplied in two parts, one pair after another."""
    parts = shape.rows // 32 or 1
    ops = [Op(Kind.READ)]
    for begin, end in turns(4 * parts, 2 if parts == 2 else 4, overlapped=parts == 1):
        if begin is not None:
            ops += phases.transpose(shape) if begin % parts == 0 else []
            ops.append(phases.value_products(shape, str(begin)))
        if end is not None:
            ops += [Op(Kind.DRAIN, group=str(end)), Op(Kind.WIDE, min(shape.rows, 32) // 2)]
    return tuple(ops)


def both(script: Sequence[Step | Phase], instructions: float) -> dict[str, Work]:
    """That is both consumers'. 48: what the compile table counts for a share of the producer's."""
    return {f"consumer{w}": Work(script, instructions - 48) for w in range(2)}


def variant_of(rows: int, form: str) -> Variant:
    precision, terms = ("fp16", 1) if form == "fp16" else ("fp8", int(form[-1]))
    cluster = rows // 64 or 1
    return Variant(Shape(rows // cluster, precision, terms), cluster, KEYS // cluster)


@cache
def measured_trace(
    rows: int, form: str, bytes_a_cycle: float, timings: Timings = H200_TIMINGS, stages: int | None = None
) -> Trace:
    variant = variant_of(rows, form)
    stages = stages or (3 if (rows, form) == (64, "fp8x2") else 4)
    return simulate(
        measured_protocol(stages, variant.cluster),
        both(measured_script(variant.shape), FORMS[rows, form]),
        64,
        tile_bytes=TILE_BYTES,
        bytes_a_cycle=bytes_a_cycle,
        timings=timings,
    )


# -- against measured steps ------------------------------------------------------------------------------------------


def measured_rows() -> list[tuple[int, str, int, int, int, int, float]]:
    """(rows, form, heads, batch, kv_len, pieces at most, microseconds) of the kernels' last state that day."""
    named = re.compile(r"pagedmla cutlass (\w+), tiles of (\d+) rows, at most (\d+) pieces?")
    rows = []
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        if found := named.fullmatch(row["contender"]):
            form, tile, pieces = found.groups()
            rows.append((int(tile), form, row["heads"], row["batch"], row["kv_len"], int(pieces), row["microseconds"]))
    return rows


def modelled(rows: int, form: str, heads: int, batch: int, kv_len: int, pieces: int) -> float:
    """By that day's cut. Its merge took a round trip for each of a row's pieces, where the model has one for all."""
    variant, kv_lens = variant_of(rows, form), [kv_len] * batch
    with patch.object(schedule, "is_whole", measured_is_whole):
        step = time_model.step_us(
            variant,
            H200,
            kv_lens=kv_lens,
            q_len=1,
            heads=heads,
            partitions=pieces,
            consumer_instructions=FORMS[rows, form],
            pace=lambda bytes_a_cycle: measured_trace(rows, form, bytes_a_cycle).pace,
            query_rows_a_trip=8,
        )
    return step + time_model.MERGE_TRIP_US * (most_pieces(variant, kv_lens, heads, pieces) - 1)


def measured_is_whole(total: int, longest: int, segments: int, workers: int, partitions: int) -> bool:
    return partitions < 2 or (segments <= workers and 8 * longest <= 9 * -(-total // workers))


def most_pieces(variant: Variant, kv_lens: list[int], heads: int, partitions: int) -> int:
    """Of a request, all of the same length."""
    units = kv_lens[0] // KEYS
    segments = len(kv_lens) * -(-heads // variant.rows)
    workers = time_model.SMS // variant.cluster
    if measured_is_whole(units * segments, units, segments, workers, partitions):
        return 1
    share = schedule.share_of(units * segments, units, workers, partitions)
    return max((start + units - 1) // share - start // share + 1 for start in range(0, units * segments, units))


def test_all_forms_were_measured() -> None:
    assert {row[:2] for row in measured_rows()} == set(FORMS)
    assert len(measured_rows()) == 72


@pytest.mark.parametrize("row", measured_rows(), ids=lambda row: "-".join(map(str, row[:-1])))
def test_a_measured_step(row: tuple[int, str, int, int, int, int, float]) -> None:
    """The first model (the slowest resource, nine tenths busy) said 84.6 us for 104.7 measured, and 129 for 262."""
    assert modelled(*row[:-1]) == pytest.approx(row[-1], rel=WITHIN)


def test_measured_steps_on_average() -> None:
    errors = [modelled(*row[:-1]) / row[-1] - 1 for row in measured_rows()]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < ON_AVERAGE
    assert abs(sum(errors) / len(errors)) < 0.01


# -- what it is for: who waits for whom --------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "form"), FORMS)
def test_consumers_run_half_a_trip_apart(rows: int, form: str) -> None:
    """Neither was in lockstep: one's softmax stood beside the other's products. What bound was each one's own chain."""
    trace = measured_trace(rows, form, 64.0)
    steady = trace.committed[12:-4]
    for before, own, after in zip(steady, steady[1:], steady[2:], strict=False):
        assert 0.36 < (own - before) / (after - before) < 0.64
    assert trace.tensor < 0.45
    assert trace.shared < 0.65
    assert sum(share for what, share in trace.time_of("consumer0").items() if what.startswith("wait")) < 0.1


def test_consumers_in_lockstep_are_seen() -> None:
    """Where both wait for each other at every trip's start, P of j + 1 comes soon after P of j, and both pay for it."""
    free, script = measured_protocol(4), measured_script(Shape(64))
    meeting = Step(Action.MEET, "consumers")
    roles = tuple(replace(r, trip=(meeting, *r.trip)) if r.stride == 2 else r for r in free.roles)
    lockstep, half = (
        simulate(protocol, both(order, 1347), 64, tile_bytes=TILE_BYTES, bytes_a_cycle=64)
        for protocol, order in ((replace(free, roles=roles), [meeting, *script]), (free, script))
    )
    before, own, after = lockstep.committed[30:33]
    assert (own - before) / (after - before) < 0.35
    assert lockstep.cycles_a_block > 1.05 * half.cycles_a_block


# -- refusals ----------------------------------------------------------------------------------------------------------


def item(protocol: Protocol, blocks: int, **changes: Any) -> Trace:
    """Of 16 rows and two terms of fp8."""
    script = measured_script(Shape(16, "fp8", 2))
    given = {"tile_bytes": TILE_BYTES, "bytes_a_cycle": 64.0, **changes}
    return simulate(protocol, both(script, 896), blocks, **given)


def test_a_protocol_that_stops_is_refused() -> None:
    """P of j waits for the stage of P of j - 1, which is released after P of j."""
    with pytest.raises(RuntimeError, match="consumer1 of CTA 0: acquire probabilities of block 1"):
        item(measured_protocol(4, probability_stages=1), 8)


@pytest.mark.parametrize(
    ("trip", "expected"),
    [
        (lambda trip: trip[1:], "expected wait probabilities of block -1, by the table; the script has wait keys"),
        (lambda trip: trip[:-1], "expected no more steps, by the table; the script has release keys of block +0"),
        (lambda trip: (*trip, trip[0]), "expected wait keys of block +0, by the table; the script ends before"),
    ],
)
def test_a_script_of_another_table_is_refused(
    trip: Callable[[tuple[Step, ...]], tuple[Step, ...]], expected: str
) -> None:
    protocol = measured_protocol(4)
    roles = tuple(replace(r, trip=trip(r.trip)) if r.stride == 2 else r for r in protocol.roles)
    with pytest.raises(ValueError, match=re.escape(f"consumer0: {expected}")):
        item(replace(protocol, roles=roles), 8)


@pytest.mark.parametrize(("blocks", "bytes_a_cycle"), [(0, 64.0), (8, 0.0), (8, -1.0)])
def test_senseless_numbers_are_refused(blocks: int, bytes_a_cycle: float) -> None:
    expected = f"at least 1 block and bytes_a_cycle > 0; got {blocks} and {bytes_a_cycle}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        item(measured_protocol(4), blocks, bytes_a_cycle=bytes_a_cycle)


def test_too_short_a_run_has_no_pace() -> None:
    with pytest.raises(RuntimeError, match="expected more than 16 blocks; got 8"):
        _ = item(measured_protocol(4), 8).cycles_a_block


# -- by hand -----------------------------------------------------------------------------------------------------------


def order_of(role: Role, script: Sequence[Step | Phase], blocks: int) -> list[str]:
    return [
        f"{what.name if isinstance(what, Phase) else what} {block}"
        for what, block in timeline.programme(role, blocks, script)
        if block >= 0
    ]


def test_the_order_of_two_blocks() -> None:
    """Consumer 0: it scores block 0, and multiplies both."""
    role, script = measured_protocol(4).role("consumer0"), measured_script(Shape(16))
    assert order_of(role, script, 2) == [
        "wait keys 0", "start 0", "finish 0", "acquire probabilities 0", "settle 0", "commit probabilities 0",
        "wait keys 0", "wait probabilities 0", "values 0", "release probabilities 0", "release keys 0",
        "wait probabilities 1", "wait keys 1", "wait probabilities 1", "values 1", "release probabilities 1",
        "release keys 1",
    ]  # fmt: skip


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.box * v.cluster == KEYS], ids=lambda v: v.name)
def test_todays_script_is_todays_table(variant: Variant) -> None:
    """Each block is scored once, by one consumer, and multiplied by both, whose P it then is."""
    script = phases.trip(variant.shape)
    orders = [order_of(variant.protocol.role(f"consumer{w}"), script, 7) for w in range(2)]
    for block in range(7):
        for phase in ("finish", "store"):
            assert sum(order.count(f"{phase} {block}") for order in orders) == 1
        scorer = orders[block % 2]
        places = [scorer.index(f"{what} {block}") for what in ("start", "finish", "store", "commit probabilities")]
        assert places == sorted(places)
        for order in orders:
            assert f"values {block}" in order
            waited = order.index(f"wait probabilities {block}")
            assert waited < order.index(f"values {block}") < order.index(f"release probabilities {block}")


def test_the_first_scores_by_hand() -> None:
    """41,216 bytes at 64 a cycle after a copy's latency, the last box through the port; 36 products of 20 cycles."""
    timings = Timings(copy=1000.0)
    trace = item(measured_protocol(4), 1, timings=timings)
    keys = next(span for span in trace.spans if (span.role, span.what) == ("consumer0", "wait keys"))
    producer = 3 * timings.chain  # acquire, arm, copy
    assert keys.end == pytest.approx(producer + 1000 + 41216 / 64 + 41216 / 5 / 128 + timings.wake, abs=1e-6)
    start, finish = (next(span for span in trace.spans if span.what == what) for what in ("start", "finish"))
    assert finish.end > start.begin + 36 * 20 + timings.product


def test_products_take_turns() -> None:
    """A product of one consumer waits for one of the other's, not for all that it has started."""
    clock, cta = timeline._Clock(), timeline._Cta()
    done: dict[str, float] = {}
    for name, count in (("many", 10), ("one", 1)):
        products = timeline._Products(clock, cta, Timings(product=0.0))
        products.start(Op(Kind.PRODUCTS, count, 32.0, 16.0, name))
        gate = products.latest(name)
        assert gate is not None
        gate.wait(lambda name=name: done.setdefault(name, clock.now))
    clock.run()
    assert done == {"one": 64.0, "many": 352.0}


def test_a_wait_for_one_group_leaves_later_ones() -> None:
    """Products of scores stand behind those of values: additions of these don't wait for those."""
    clock, cta = timeline._Clock(), timeline._Cta()
    products = timeline._Products(clock, cta, Timings(product=5.0))
    done: dict[str, float] = {}
    for name, count in (("values", 2), ("scores", 10)):
        products.start(Op(Kind.PRODUCTS, count, 8.0, 4.0, name))
        gate = products.latest(name)
        assert gate is not None
        assert products.latest("") is gate
        gate.wait(lambda name=name: done.setdefault(name, clock.now))
    clock.run()
    assert done == {"values": 21.0, "scores": 101.0}


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.box * v.cluster == KEYS], ids=lambda v: v.name)
@pytest.mark.parametrize("share", [0.25, 1.0, 4.0])
def test_never_below_the_slowest_resource(variant: Variant, share: float) -> None:
    """What a resource takes at its published rate is the least; a quarter of the bandwidth makes it memory."""
    gpu = replace(H200, terabytes_per_second=H200.terabytes_per_second * share)
    bytes_a_cycle = gpu.terabytes_per_second * 1e3 / (time_model.SMS * time_model.clock_ghz(gpu))
    instructions = instructions_of(variant)
    least = time_model.tile_cycles(variant, gpu, instructions).most
    pace = timeline.pace_of(variant, bytes_a_cycle, instructions)
    assert pace.tile >= 0.999 * least
    assert pace.fill > 0


def instructions_of(variant: Variant) -> float:
    table = {row["options"].get("variant"): row for row in compile_table(CUTLASS_TABLE)}
    return usual_trip(table[variant.name], variant)


@pytest.mark.parametrize(("rows", "form"), FORMS)
def test_memory_sets_the_pace_where_it_is_slow(rows: int, form: str) -> None:
    """A tile's bytes over what comes in a cycle; in a cluster each CTA brings half of them."""
    bytes_a_cycle = 6.0 / (rows // 64 or 1)
    assert measured_trace(rows, form, bytes_a_cycle).cycles_a_block == pytest.approx(41216 / 6, rel=1e-3)


@pytest.mark.parametrize("name", [each.name for each in fields(Timings)])
@pytest.mark.parametrize(("rows", "form"), [(16, "fp8x2"), (64, "fp8x1")])
def test_longer_latencies_take_longer(rows: int, form: str, name: str) -> None:
    """Each one doubled, an item takes no less; those that stand in a consumer's chain make it longer."""
    doubled = replace(H200_TIMINGS, **{name: 2 * getattr(H200_TIMINGS, name)})
    usual, longer = (measured_trace(rows, form, 64.0, timings).cycles for timings in (H200_TIMINGS, doubled))
    assert longer >= 0.99 * usual  # what comes a little later may be in nobody's way
    if name in ("chain", "wide", "product", "read", "exchange", "matrix_load", "meet", "fence", "exponential"):
        assert longer > 1.005 * usual


@pytest.mark.parametrize(("rows", "form"), [(16, "fp8x2"), (64, "fp8x1"), (64, "fp8x2")])
def test_fewer_stages_are_no_faster(rows: int, form: str) -> None:
    paces = [measured_trace(rows, form, 18.0, stages=stages).cycles_a_block for stages in (2, 3, 4)]
    assert paces[0] > paces[1] >= 0.99 * paces[2]


def test_the_same_again() -> None:
    assert item(measured_protocol(4), 24, bytes_a_cycle=18) == item(measured_protocol(4), 24, bytes_a_cycle=18)
