"""The barrier table of the decode kernel, and the checkers of its interleavings.

Grid: 2 to 4 stages with 4 to 9 blocks take each ring round at least twice; items of 0 and 1 blocks stand beside longer
ones, since fills go on across items; a cluster of two is walked with a round and a bit, and proved for many. Consumers
are one agent, halves or warps. The checkers are judged by tables with one thing wrong each, and by the walk that leaves
no order out.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedmla.cutlass_kernels.interleavings import check
from pagedmla.cutlass_kernels.order import check_order
from pagedmla.cutlass_kernels.protocol import (
    Action,
    Meeting,
    Protocol,
    Ring,
    Role,
    Statistic,
    Step,
    decode_protocol,
    in_parts,
)
from pagedmla.cutlass_kernels.stage_rules import ProtocolError
from pagedmla.cutlass_kernels.variants import VARIANTS

ACQUIRE, ARM, COPY, FETCH = Action.ACQUIRE, Action.ARM, Action.COPY, Action.FETCH
COMMIT, WAIT, RELEASE, MEET = Action.COMMIT, Action.WAIT, Action.RELEASE, Action.MEET
READ, WRITE = Action.READ, Action.WRITE


def with_role(protocol, name, **changes):
    return replace(protocol, roles=tuple(replace(r, **changes) if r.name == name else r for r in protocol.roles))


def with_ring(protocol, name, **changes):
    return replace(protocol, rings=tuple(replace(r, **changes) if r.name == name else r for r in protocol.rings))


def without(protocol, role, action, ring, block=0, section="trip"):
    """The table without one step."""
    steps = getattr(protocol.role(role), section)
    kept = tuple(step for step in steps if (step.action, step.ring, step.block) != (action, ring, block))
    assert len(kept) == len(steps) - 1
    return with_role(protocol, role, **{section: kept})


def fault(protocol, items=(4,)):
    with pytest.raises(ProtocolError) as caught:
        check(protocol, items)
    return str(caught.value)


# -- tables that are right -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [(1,), (2,), (4,), (7,), (3, 0, 2), (0, 1, 1, 5)])
@pytest.mark.parametrize(("key_stages", "ahead"), [(2, False), (3, False), (3, True), (4, True)])
def test_the_decode_table_holds(key_stages, ahead, items):
    assert check(decode_protocol(key_stages, ahead=ahead), items) > 1


@pytest.mark.parametrize(("key_stages", "ahead", "blocks"), [(2, False, 3), (3, True, 3)])
def test_the_decode_table_holds_in_a_cluster_of_two(key_stages, ahead, blocks):
    """With fewer stages than are built (4 of keys, 3 of P): that table has too many states to walk, and is proved."""
    protocol = decode_protocol(key_stages, probability_stages=2, ahead=ahead, cluster=2)
    assert check(protocol, (blocks,), max_states=2_000_000) > 1


def test_the_table_that_clusters_are_built_from_holds_for_a_few_tiles():
    """Its four stages of keys don't come round in these; with five tiles there are too many states to walk."""
    protocol = next(v.protocol for v in VARIANTS if v.cluster == 2)
    assert (protocol.ring("keys").stages, protocol.ring("probabilities").stages) == (4, 3)
    for tiles in (1, 2, 3):
        assert check(protocol, (tiles,)) > 1


@pytest.mark.parametrize("stages", sorted({v.shape.stages for v in VARIANTS if v.cluster == 1}))
def test_every_table_that_a_variant_is_built_from_holds(stages):
    protocol = next(v.protocol for v in VARIANTS if (v.shape.stages, v.cluster) == (stages, 1))
    assert check(protocol, (2 * stages + 1,)) > 1


def test_the_tables_of_clusters_are_the_walked_one_with_other_stages_and_registers():
    def shape(protocol):
        rings = tuple(replace(ring, stages=1) for ring in protocol.rings)
        return rings, tuple(replace(role, registers=24) for role in protocol.roles), protocol.meetings, protocol.cluster

    clusters = [variant for variant in VARIANTS if variant.cluster == 2]
    assert clusters
    assert {shape(variant.protocol) for variant in clusters} == {shape(decode_protocol(3, ahead=True, cluster=2))}


def table_of(variant):
    """The variant's table with its statistics."""
    return decode_protocol(
        variant.shape.stages,
        ahead=variant.shape.ahead,
        cluster=variant.cluster,
        producer_registers=variant.protocol.role("producer").registers,
        consumer_registers=variant.protocol.role("consumer0").registers,
        statistics=True,
    )


TABLES = {(v.shape.stages, v.cluster): v for v in VARIANTS}.values()


@pytest.mark.parametrize("variant", TABLES, ids=lambda v: f"{v.shape.stages}-stages-{v.cluster}-ctas")
def test_statistics_are_all_that_the_checked_table_has_more_than_the_built_one(variant):
    def built(role):
        silent = [role.name]
        sections = {
            section: tuple(
                step for step in getattr(role, section) if step.action not in (READ, WRITE) and step.ring not in silent
            )
            for section in ("before", "trip", "after", "finish")
        }
        return replace(role, **sections)

    full = table_of(variant)
    meetings = tuple(meeting for meeting in full.meetings if len(meeting.roles) > 1)
    assert variant.protocol == replace(full, roles=tuple(map(built, full.roles)), meetings=meetings, statistics=())


@pytest.mark.parametrize("clearing", [True, False], ids=["keys past the end", "full last tiles"])
@pytest.mark.parametrize("variant", TABLES, ids=lambda v: f"{v.shape.stages}-stages-{v.cluster}-ctas")
def test_every_table_holds_warp_by_warp_for_many_tiles(variant, clearing):
    """A cluster of two has 10 times as many states with each tile: its fifth, which takes the stages round, none had
    seen."""
    protocol = in_parts(table_of(variant), 4)
    for items in ((1,), (2,), (5,), (12, 0, 1, 7)):
        assert check_order(protocol, items, clearing=clearing) > 1


@pytest.mark.parametrize("clearing", [True, False], ids=["keys past the end", "full last tiles"])
@pytest.mark.parametrize(
    ("stages", "parts", "items"), [(2, 1, (5,)), (4, 1, (4, 0, 1)), (2, 2, (4,)), (4, 2, (3, 1)), (2, 4, (1,))]
)
def test_statistics_hold_in_every_order(stages, parts, items, clearing):
    """A warpgroup was one agent, whose warps could not drift apart."""
    protocol = in_parts(decode_protocol(stages, ahead=stages >= 4, statistics=True), parts)
    assert check(protocol, items, clearing=clearing) > 1


# -- tables with one thing wrong -------------------------------------------------------------------------------------


def test_a_release_that_is_missing_stops_the_producer():
    said = fault(without(decode_protocol(2), "consumer1", RELEASE, "keys", -1))
    assert "deadlock" in said
    assert "producer: acquire keys (item 0, block 2, stage 0) waits for 4 of 8 arrivals on empty" in said


def test_a_commit_that_is_missing_stops_both_consumers():
    said = fault(without(decode_protocol(2), "consumer0", COMMIT, "probabilities"))
    assert "consumer0: wait probabilities (item 0, block 0, stage 0) waits for 4 of 4 arrivals on full" in said
    assert "consumer1: wait probabilities (item 0, block 0, stage 0) waits for" in said


def test_copies_that_nobody_announced_never_fill_a_stage():
    said = fault(without(decode_protocol(2), "producer", ARM, "keys"))
    assert "consumer0: wait keys (item 0, block 0, stage 0) waits for 1 of 33 arrivals on full and -1 copies" in said


def test_a_wait_for_the_wrong_phase_reads_too_early():
    said = fault(with_ring(decode_protocol(2), "keys", first_wait=1))
    assert said.startswith("consumer0: wait keys (item 0, block 0, stage 0) reads before it is full")


def test_an_acquire_for_the_wrong_phase_never_passes():
    said = fault(with_ring(decode_protocol(2), "keys", first_acquire=0))
    assert "producer: acquire keys (item 0, block 0, stage 0) waits for" in said


def test_one_stage_of_probabilities_is_too_few():
    """A consumer publishes its P before it multiplies the other's, so two are alive."""
    said = fault(with_ring(decode_protocol(2), "probabilities", stages=1))
    assert said.startswith("deadlock")
    assert "consumer1: acquire probabilities (item 0, block 1, stage 0) waits for 4 of 8 arrivals on empty" in said


def test_one_stage_of_keys_is_too_few():
    """Consumer 1 begins with block 1: the second fill of a lone stage, whose parity a fresh barrier already shows."""
    said = fault(with_ring(decode_protocol(2), "keys", stages=1))
    assert said.startswith("consumer1: wait keys (item 0, block 1, stage 0) reads before it is full")


def test_two_stages_of_keys_are_too_few_for_scores_that_begin_early():
    """Block 2 is waited for before block 0 is given back, and the other consumer holds block 1."""
    said = fault(decode_protocol(2, ahead=True))
    assert said.startswith("deadlock")
    assert "consumer0: wait keys (item 0, block 2, stage 0) waits for 33 of 33 arrivals on full" in said


def test_a_full_barrier_that_counts_too_little_is_overrun():
    said = fault(with_ring(decode_protocol(2), "keys", full=32))
    assert said.startswith("producer: fetch keys (item 0, block 0, stage 0) arrives 32 times on full, which lacks 31")


def test_a_full_barrier_that_counts_too_much_never_fills():
    said = fault(with_ring(decode_protocol(2), "keys", full=34))
    assert "consumer0: wait keys (item 0, block 0, stage 0) waits for 1 of 34 arrivals on full" in said


def test_an_empty_barrier_that_counts_one_reader_lets_the_other_be_overwritten():
    said = fault(with_ring(decode_protocol(2), "keys", empty=4))
    assert "overwrites fill 0, which consumer" in said.splitlines()[0]
    assert said.startswith("producer: acquire keys (item 0, block 2, stage 0)")


def test_a_writer_that_does_not_acquire_overwrites_what_is_read():
    said = fault(without(decode_protocol(2), "producer", ACQUIRE, "keys"))
    assert "producer: copy keys" in said.splitlines()[0]
    assert "overwrites fill 0, which" in said.splitlines()[0]


def test_a_reader_that_does_not_wait_is_named():
    broken = without(decode_protocol(2), "consumer0", WAIT, "keys", 0)
    assert fault(broken).startswith(
        "consumer0: release keys (item 0, block 0, stage 0) gives back what it isn't reading"
    )


def test_a_stage_that_another_cta_still_reads_is_not_copied_over():
    """A multicast lands in both CTAs, so both CTAs' readers must have given the stage back."""
    said = fault(with_ring(small(2), "keys", stages=1, empty=1), (3,)).splitlines()[0]
    assert said.startswith("producer: ")
    assert said.endswith("overwrites fill 0, which consumer has yet to read")


def test_a_cta_that_leaves_early_is_missed_by_the_other():
    broken = decode_protocol(2, cluster=2)
    for role in broken.roles:
        broken = with_role(broken, role.name, finish=())
    assert "reaches another CTA, which has left" in fault(broken, (1,))


def test_a_meeting_that_one_role_skips_is_a_deadlock():
    said = fault(without(decode_protocol(2), "consumer1", MEET, "consumers", section="after"), (2,))
    assert "consumer0: meet consumers (item 0) waits for the others" in said


def without_meeting(protocol, role, section, number):
    """The table without the `number`-th meeting of a section."""
    steps = list(getattr(protocol.role(role), section))
    del steps[[at for at, step in enumerate(steps) if step.action is MEET][number]]
    return with_role(protocol, role, **{section: tuple(steps)})


def order_faults(protocol, items=(5, 0, 2)):
    """What check_order says of a table, with keys past the end and without; "" where it holds."""
    said = []
    for clearing in (True, False):
        try:
            check_order(protocol, items, clearing=clearing)
            said.append("")
        except ProtocolError as caught:
            said.append(str(caught))
    return said


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("section", "number", "first", "behind"),
    [
        ("before", 0, "wait queries", "reads before it is full"),
        ("trip", 0, "read columns*", "write columns*"),  # of the other consumer's last tile
        ("trip", 1, "read warp_peak*", "write warp_peak*"),
        ("trip", 2, "read columns*", "write columns*"),
        ("trip", 3, "read weights*", "write weights*"),
        ("after", 1, "read", "write"),
    ],
)
def test_each_meeting_of_a_consumers_warps_is_missed(section, number, first, behind, which, parts):
    """No ring knows the statistics: a table without these meetings held."""
    full = decode_protocol(4, ahead=True, statistics=True)
    said = order_faults(in_parts(without_meeting(full, f"consumer{which}", section, number), parts))
    found = [each for each in said if each]
    assert found
    assert all(first.replace("*", str(which)) in each and behind.replace("*", str(which)) in each for each in found)


def test_halves_of_a_consumer_that_do_not_meet_are_found_by_the_walk_too():
    said = fault(in_parts(without_meeting(decode_protocol(2, statistics=True), "consumer0", "trip", 1), 2), (2,))
    assert said == (
        "consumer0.0: read warp_peak0 (item 0, block 0) may come before "
        "consumer0.1: write warp_peak0 (item 0, block 0) is over"
    )


def without_consumers_meeting(protocol):
    for which in range(2):
        protocol = without(protocol, f"consumer{which}", MEET, "consumers", section="after")
    return protocol


def test_the_meetings_of_both_consumers_and_before_the_release_are_to_spare():
    """P of each tile comes behind its sums, and every consumer waits for every P; who reads `gain` has met once
    more than who releases. If this fails, something else has come to lean on them: then they are needed."""
    table = decode_protocol(4, ahead=True, statistics=True)
    for which in range(2):
        table = without_meeting(table, f"consumer{which}", "after", 2)
    assert order_faults(in_parts(without_consumers_meeting(table), 4)) == ["", ""]


def moved(protocol, role, step, behind):
    """The table with a step of the trip behind another."""
    steps = [each for each in protocol.role(role).trip if each != step]
    assert len(steps) == len(protocol.role(role).trip) - 1
    at = steps.index(behind) + 1
    return with_role(protocol, role, trip=(*steps[:at], step, *steps[at:]))


def test_sums_that_come_behind_p_need_the_consumers_meeting():
    """The meeting that is to spare is the only one that would hold them."""
    table = decode_protocol(4, ahead=True, statistics=True)
    for which in range(2):
        commit = Step(COMMIT, "probabilities", arrivals=4)
        table = moved(table, f"consumer{which}", Step(WRITE, f"sums{which}"), commit)
    assert order_faults(in_parts(table, 4)) == ["", ""]
    for parts in (1, 4):
        said = order_faults(in_parts(without_consumers_meeting(table), parts))
        assert all("read sums" in each and "write sums" in each for each in said)
    assert "write sums" in fault(without_consumers_meeting(table), (2,))


@pytest.mark.parametrize(
    ("step", "behind", "said"),
    [
        (Step(READ, "decay", -1), Step(RELEASE, "probabilities", -1, 4), "write decay"),  # too late: given back
        (Step(WRITE, "decay", warps=2), Step(WRITE, "warp_peak0"), "write decay"),  # too early: not acquired
        (Step(WRITE, "peak", warps=2), Step(WAIT, "keys", -1), "write peak"),  # before the other's maximum is there
        (Step(WRITE, "own_peak0", warps=2), Step(COMMIT, "probabilities", arrivals=4), ""),  # read after the item alone
        (Step(WRITE, "peak", warps=2), Step(COMMIT, "probabilities", arrivals=4), "write peak"),
    ],
)
def test_a_use_at_the_wrong_place_is_found(step, behind, said):
    """With two stages of P: of three, the third next one is the reader's own."""
    full = decode_protocol(4, probability_stages=2, ahead=True, statistics=True)
    assert order_faults(in_parts(full, 4)) == ["", ""]
    table = moved(full, "consumer0", step, behind)
    for parts in (1, 4):
        found = order_faults(in_parts(table, parts))
        assert all(said in each if said else not each for each in found), found


def test_a_fault_comes_with_the_way_to_it():
    said = fault(with_ring(decode_protocol(2), "keys", empty=4)).splitlines()
    assert said[1] == "after:"
    assert any("release keys" in line for line in said[2:])


# -- the checker -----------------------------------------------------------------------------------------------------


def verdict(protocol, items, every_order):
    try:
        check(protocol, items, every_order=every_order, max_states=100_000)
    except ProtocolError:
        return "fault"
    return "holds"


def is_proved(protocol, items):
    try:
        check_order(protocol, items)
    except ProtocolError:
        return False
    return True


def small(cluster):
    """A producer and a consumer with one stage: small enough to walk every order even in a cluster."""
    goodbye = (Step(MEET, "all"),) if cluster > 1 else ()
    return Protocol(
        (Ring("keys", 1, full=3, empty=cluster, multicast=cluster > 1),),
        (
            Role(
                "producer",
                1,
                24,
                (Step(ACQUIRE, "keys"), Step(ARM, "keys", arrivals=1), Step(COPY, "keys"), Step(FETCH, "keys", 0, 2)),
                finish=goodbye,
            ),
            Role("consumer", 4, 240, (Step(WAIT, "keys"), Step(RELEASE, "keys", arrivals=1)), finish=goodbye),
        ),
        (Meeting("all", ("producer", "consumer"), across_cluster=True),),
        cluster,
    )


@st.composite
def broken_tables(draw, table):
    """The table with one or two of its numbers or steps changed; often it still holds."""
    for _ in range(draw(st.integers(1, 2))):
        if draw(st.booleans()):
            ring = draw(st.sampled_from(table.rings))
            field = draw(st.sampled_from(["stages", "full", "empty", "first_wait", "first_acquire"]))
            change = draw(st.sampled_from([-1, 1]))
            value = getattr(ring, field) ^ 1 if field.startswith("first") else max(1, getattr(ring, field) + change)
            table = with_ring(table, ring.name, **{field: value})
        else:
            role = draw(st.sampled_from(table.roles))
            steps = list(role.trip)
            at = draw(st.integers(0, len(steps) - 1))
            if draw(st.booleans()):
                del steps[at]
            else:
                steps[at], steps[at - 1] = steps[at - 1], steps[at]
            table = with_role(table, role.name, trip=tuple(steps))
    return table


@settings(max_examples=100)
@given(broken_tables(decode_protocol(2)))
def test_leaving_out_orders_that_nobody_can_tell_apart_changes_no_verdict(table):
    assert verdict(table, (3,), every_order=False) == verdict(table, (3,), every_order=True)


@settings(max_examples=60)
@given(broken_tables(small(2)))
def test_nor_does_it_in_a_cluster(table):
    assert verdict(table, (2,), every_order=False) == verdict(table, (2,), every_order=True)


@settings(max_examples=60)
@given(broken_tables(decode_protocol(2, statistics=True)))
def test_statistics_are_judged_alike_in_every_state_and_by_what_barriers_put_in_order(table):
    assert verdict(table, (2,), every_order=False) == verdict(table, (2,), every_order=True)


@settings(max_examples=60)
@given(broken_tables(decode_protocol(2, statistics=True)), st.sampled_from([(3,), (1, 2)]))
def test_what_is_proved_holds_in_the_walk(table, items):
    if is_proved(table, items):
        assert verdict(table, items, every_order=False) == "holds"


@settings(max_examples=50)
@given(broken_tables(small(2)))
def test_so_it_does_in_a_cluster(table):
    if is_proved(table, (3,)):
        assert verdict(table, (3,), every_order=False) == "holds"


@settings(max_examples=40)
@given(broken_tables(in_parts(decode_protocol(2, statistics=True), 2)))
def test_and_in_halves(table):
    if is_proved(table, (2,)):
        assert verdict(table, (2,), every_order=False) == "holds"


def test_a_version_that_nobody_wrote_is_refused():
    table = decode_protocol(2, statistics=True)
    broken = without(table, "consumer0", WRITE, "rows", section="before")
    broken = without(broken, "consumer1", WRITE, "rows", section="before")
    assert fault(broken).endswith("read rows (item 0, block 0) finds what nobody has written")


def test_writers_of_the_same_are_each_read_by_their_own_role():
    """Both consumers write a row's address, and neither waits for the other's."""
    steps = (Step(WRITE, "note"), Step(READ, "note"))

    def table(alike):
        roles = tuple(Role(name, 4, 240, (), before=steps) for name in ("one", "other"))
        return Protocol((Ring("keys", 1, full=1, empty=1),), roles, statistics=(Statistic("note", alike=alike),))

    assert check_order(table(True), (0,)) == 0
    with pytest.raises(ProtocolError, match=r"read note .* may come before .* write note .* is over"):
        check_order(table(False), (0,))


def test_fewer_orders_are_walked_than_there_are():
    assert check(decode_protocol(2), (4,)) < check(decode_protocol(2), (4,), every_order=True)


def test_a_walk_that_would_not_end_says_so():
    with pytest.raises(RuntimeError, match="more than 100 states; give fewer stages, items or blocks"):
        check(decode_protocol(2), (7,), max_states=100)


# -- the table as the kernel reads it --------------------------------------------------------------------------------


def test_steps_of_a_consumer_written_out():
    """Consumer 1 with three blocks: it scores block 1 alone, and multiplies all three."""
    steps = [(str(step), block) for step, block in decode_protocol(4, ahead=True).role("consumer1").steps(3)]
    assert steps == [
        ("acquire queries", -1),
        ("commit queries", -1),
        ("wait queries", -1),
        ("wait keys", 1),
        ("wait keys", 0),
        ("wait probabilities", 0),
        ("acquire probabilities", 1),
        ("commit probabilities", 1),
        ("release probabilities", 0),
        ("release keys", 0),
        ("wait probabilities", 1),
        ("release probabilities", 1),
        ("release keys", 1),
        ("wait keys", 2),
        ("wait probabilities", 2),
        ("release probabilities", 2),
        ("release keys", 2),
        ("meet consumers", -1),
        ("release queries", -1),
    ]


def test_scores_begin_a_trip_ahead():
    """Consumer 0 with four blocks: block 0 before its first trip, block 2 in it, behind the products of block 0."""
    steps = decode_protocol(4, ahead=True).role("consumer0").steps(4)
    seen = [(str(step), block) for step, block in steps if step.ring == "keys"]
    assert seen[:3] == [("wait keys", 0), ("wait keys", 2), ("release keys", 0)]


def test_parities_turn_once_a_round():
    ring = Ring("keys", 3, full=1, empty=1)
    fills = np.arange(9)
    assert ring.stage(fills).tolist() == [0, 1, 2] * 3
    assert ring.wait_parity(fills).tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert ring.acquire_parity(fills).tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1]


def test_the_page_tells_the_rings_of_the_table():
    """docs/kernels/decode_sm90.md, "Barriers": stages, arrivals on full and on empty, a cluster's behind the others."""
    page = (Path(__file__).parents[2] / "docs" / "kernels" / "decode_sm90.md").read_text(encoding="utf-8")
    told = {
        name: [int(number) for number in re.findall(r"\d+", row)]
        for name, row in re.findall(r"^\| (keys|probabilities|queries) \|(.*)\|$", page, re.MULTILINE)
    }
    stages = {cluster: [v.shape.stages for v in VARIANTS if v.cluster == cluster] for cluster in (1, 2)}
    (clusters_stages,) = set(stages[2])
    protocol, clusters = decode_protocol(4), decode_protocol(4, cluster=2)
    want = {ring.name: [ring.stages, ring.full, ring.empty] for ring in protocol.rings}
    keys = [min(stages[1]), max(stages[1]), clusters_stages, protocol.ring("keys").full, protocol.ring("keys").empty]
    assert told == {**want, "keys": [*keys, clusters.ring("keys").empty]}


def test_parts_of_a_role_share_its_arrivals():
    """What one thread says for its warpgroup stays one arrival; the other warps are done before they meet."""
    halves = in_parts(decode_protocol(2, statistics=True), 2)
    told = {
        name: [(str(step), step.arrivals) for step in halves.role(name).before if step.action in (COMMIT, MEET)]
        for name in ("consumer1.0", "consumer1.1")
    }
    assert told == {
        "consumer1.0": [("meet consumer1", 0), ("commit queries", 1)],
        "consumer1.1": [("commit queries", 0), ("meet consumer1", 0)],
    }
    assert [step.arrivals for step in halves.role("consumer1.1").trip if step.action is RELEASE] == [2] * 4
    with pytest.raises(ValueError, match="consumer0: expected a number of parts that divides 4 warps; got 3"):
        in_parts(decode_protocol(2, statistics=True), 3)


def test_barriers_lie_side_by_side():
    protocol = decode_protocol(3)
    offsets = [
        offset(ring.name, stage)
        for ring in protocol.rings
        for offset in (protocol.full_offset, protocol.empty_offset)
        for stage in range(ring.stages)
    ]
    assert offsets == list(range(0, protocol.barrier_bytes, 8))


@pytest.mark.parametrize("shape", sorted({v.shape for v in VARIANTS}, key=str), ids=str)
def test_the_kernel_keeps_room_for_every_barrier(shape):
    variant = next(v for v in VARIANTS if v.shape == shape)
    _, room = shape.tail(shape.stages)["barriers"]
    assert variant.protocol.barrier_bytes <= room
    assert shape.place("barriers") % 8 == 0


def test_a_kernel_that_follows_the_table_is_left_alone():
    following = decode_protocol(2).following("consumer0", "trip", blocks=(-1,))
    following.step(WAIT, "keys", -1)
    following.step(WAIT, "probabilities", -1)
    following.step(RELEASE, "probabilities", -1)
    following.step(RELEASE, "keys", -1)
    following.end()


def test_a_kernel_that_differs_from_the_table_is_stopped():
    def traced(*steps):
        following = decode_protocol(2).following("producer", "trip")
        for step in steps:
            following.step(*step)
        following.end()

    with pytest.raises(
        RuntimeError, match=r"producer, trip, step 1: the table has arm keys .*; the kernel does copy keys"
    ):
        traced((ACQUIRE, "keys"), (COPY, "keys"))
    with pytest.raises(RuntimeError, match="producer, trip: the kernel leaves out step 1, arm keys"):
        traced((ACQUIRE, "keys"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ring("keys", 0, full=1, empty=1), "ring keys: expected at least 1 stage"),
        (
            lambda: with_role(decode_protocol(2), "producer", trip=(Step(WAIT, "values"),)),
            "producer: wait values: expected one of keys, probabilities, queries",
        ),
        (
            lambda: with_role(decode_protocol(2), "producer", finish=(Step(MEET, "consumers"),)),
            "producer: meet consumers: expected one of",
        ),
        (lambda: decode_protocol(2, consumer_registers=236), "consumer0: setmaxnreg takes multiples of 8; got 236"),
        (
            lambda: decode_protocol(2, producer_registers=32),
            "roles hold 65536 registers; the CTA is launched with 64512",
        ),
    ],
)
def test_a_table_that_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
