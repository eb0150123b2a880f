"""Pieces: the schedule by its definition and by what it must cover, the attention by float64.

Lengths are drawn to differ as served ones do: none, one tile, one request a hundred times the others. Grid of the
schedule: more tiles of rows than run at once, fewer, and as many; room for all cuts, for some, for none.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.attending import INF, assert_agrees, planes_of, results, run_mixed, run_pieces, scheduled
from cases.steps import LAYOUTS, Step, StepCase, build_step, with_values

from pagedmla.kv_cache.checks import ceildiv
from pagedmla.kv_cache.splits import MOST_REQUESTS, choose_span
from pagedmla.triton_kernels.pieces import attend_pieces
from pagedmla.triton_kernels.schedule import Schedule, make_schedule

ROWS, KEYS = 16, 64


# -- the schedule ------------------------------------------------------------------------------------------------------


def schedule_of(
    kv_lens: list[int],
    q_lens: list[int],
    *,
    heads: int = 16,
    places: int,
    slots: int,
    most: int = 999,
    padding: int = 0,
) -> Schedule:
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    tokens = int(starts[-1]) + padding
    return make_schedule(
        torch.tensor(kv_lens, dtype=torch.int32) - torch.tensor(q_lens, dtype=torch.int32), starts, tokens=tokens,
        heads=heads, rows=ROWS, keys=KEYS, row_tiles=tokens * heads // ROWS + len(q_lens) + 1, places=places,
        slots=slots, most_pieces=most,
    )  # fmt: skip


def drawn(seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(seed)
    kv_lens = [
        draw.choice((0, 1, 64, 65, draw.randrange(2000), draw.randrange(200))) for _ in range(draw.randrange(40))
    ]
    q_lens = [draw.choice((1, 1, 2, 5)) if kv_len else draw.choice((0, 1)) for kv_len in kv_lens]
    if kv_lens and seed % 3 == 0:
        kv_lens[draw.randrange(len(kv_lens))] = 100_000
    return [max(kv_len, q_len) if kv_len else 0 for kv_len, q_len in zip(kv_lens, q_lens)], q_lens


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize(("places", "slots", "most"), [(264, 264, 999), (24, 24, 5), (7, 3, 999), (1, 0, 1)])
def test_every_row_meets_every_key_once(seed: int, places: int, slots: int, most: int) -> None:
    """Pieces of a tile of rows follow one another from key 0 to the last; its cut names their slots, which nobody else
    has, and how finely it is cut is what the definition says."""
    kv_lens, q_lens = drawn(seed)
    heads, padding = 5 if seed % 2 else 16, seed % 4
    made = schedule_of(kv_lens, q_lens, heads=heads, places=places, slots=slots, most=most, padding=padding)
    live, rest = made.pieces[made.pieces[:, 0] >= 0].tolist(), made.pieces[made.pieces[:, 0] < 0]
    assert bool((rest[:, 0] == -1).all())

    starts = [sum(q_lens[:b]) for b in range(len(q_lens) + 1)]
    rows = [*(q_len * heads for q_len in q_lens), padding * heads]
    row_tiles = [ceildiv(count, ROWS) for count in rows]
    key_tiles = [max(ceildiv(kv_len, KEYS), 1) for kv_len in [*kv_lens, 0]]
    span = choose_span(row_tiles, key_tiles, places=places, slots=slots, most_pieces=most, smallest=ceildiv(128, KEYS))
    wanted, cuts, slot = [], [], 0
    for b, (count, tiles, keys) in enumerate(zip(rows, row_tiles, key_tiles)):
        cached, kv_len = (kv_lens[b] - q_lens[b], kv_lens[b]) if b < len(kv_lens) else (0, 0)
        each = ceildiv(keys, span)
        long = ceildiv(keys, each)
        for tile in range(tiles):
            if each > 1:
                cuts.append([starts[b], count, tile * ROWS, slot, each])
            for part in range(each):
                end = min((part + 1) * long * KEYS, kv_len)
                assert part * long * KEYS < end or (part, kv_len) == (0, 0)  # none is empty, but of what has no keys
                wanted.append(
                    [b, starts[b], count, tile * ROWS, cached, part * long, end, slot + part if each > 1 else -1]
                )
            slot += each if each > 1 else 0
    assert live == wanted
    assert made.cuts[made.cuts[:, 4] > 0, :5].tolist() == cuts
    assert slot <= slots
    assert max((each for *_, each in cuts), default=1) <= most


@pytest.mark.parametrize(
    ("kv_lens", "share"),
    [
        ([4096] * 128, 1.04),
        ([131_072] + [640] * 127, 1.25),
        ([131_072] + [640] * 511, 1.1),
        ([640], 53.0),  # 128 keys, where an even share of 264 is 2.4
        ([4096 * (1 + b) // 64 for b in range(128)], 1.6),
    ],
    ids=["alike", "one long", "one long among many", "one", "all different"],
)
def test_nobody_waits_long(kv_lens: list[int], share: float) -> None:
    """One request of 131,072 keys among 127 of 640 kept its program busy for 50 even shares: all were cut alike."""
    made = schedule_of(kv_lens, [1] * len(kv_lens), places=264, slots=264)
    live = made.pieces[made.pieces[:, 0] >= 0]
    longest = int((live[:, 6] - live[:, 5] * KEYS).max())
    assert longest <= share * sum(kv_lens) / 264
    assert len(live) <= 264 or len(kv_lens) >= 264


def test_even_steps_stay_whole() -> None:
    """A cut of what is balanced without it costs a merge and gains nothing."""
    for requests in (200, 264, 512):
        assert schedule_of([4096] * requests, [1] * requests, places=264, slots=264).cuts[:, 4].sum() == 0


@pytest.mark.parametrize("requests", [0, 1, 255, 256, 1023, 1024, MOST_REQUESTS])
def test_any_number_of_requests(requests: int) -> None:
    """Builds for 256, 1024 and 4096 of them, the padding among them."""
    made = schedule_of([65] * requests, [1] * requests, places=4, slots=0)
    assert made.pieces[made.pieces[:, 0] >= 0][:, 0].tolist() == list(range(requests))
    if requests == MOST_REQUESTS:
        with pytest.raises(ValueError, match=r"cache_lengths: expected at most 4095 requests; got \[4096\] int32"):
            schedule_of([65] * 4096, [1] * 4096, places=4, slots=0)


def test_keys_near_two_to_the_31() -> None:
    """The product of tiles wrapped, and the last piece ended at -2147468800: its keys were lost."""
    for kv_len in (2**31 - 5000, 2**31 - 200, 2**31 - 1):
        made = schedule_of([kv_len], [1], places=8, slots=8)
        live = made.pieces[made.pieces[:, 0] >= 0].long()
        assert live[:, 6].tolist() == [*(live[1:, 5] * KEYS).tolist(), kv_len]


def test_a_schedule_writes_nothing_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program stored offsets and, behind a barrier that on gfx942 doesn't wait for memory, loaded them: a race that
    no interpreter shows. What a launch writes, it doesn't read now."""
    from pagedmla.triton_kernels import schedule

    made: list[tuple[str, list[torch.Tensor], list[torch.Tensor]]] = []
    real = schedule.launch

    def watched(kernel: Any, grid: tuple[int, ...], *args: Any, **more: Any) -> None:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        before = [each.clone() for each in tensors]
        real(kernel, grid, *args, **more)
        made.append((kernel.fn.__name__, before, tensors))

    monkeypatch.setattr(schedule, "launch", watched)
    schedule_of([700, 3, 0], [1, 1, 1], places=8, slots=8)
    written = [[not torch.equal(a, b) for a, b in zip(before, after)] for _, before, after in made]
    assert [name for name, *_ in made] == ["schedule_kernel", "records_kernel"]
    assert not written[1][2]  # offsets, which records_kernel reads
    assert "debug_barrier" not in Path(schedule.__file__).read_text(encoding="utf-8")


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(guarded, layout):
    """A request that is cut between two that aren't, one of them a padding row."""
    step = build_step(StepCase((1, 1, 1), (0, 600, 65), heads=4), layout, dtype=torch.bfloat16)
    out, lse, _, state_lse = run_pieces(guarded, step)
    assert int((~state_lse.isnan()).sum()) == 5 * 4  # 128 keys each, of 4 rows
    assert bool((lse[0] == -INF).all())
    assert_agrees(step, (out, lse))


@pytest.mark.parametrize(("q_lens", "heads"), [((2, 1), 40), ((3, 0, 5), 5), ((1, 1), 128)])
def test_rows_fold(guarded, q_lens, heads):
    """Several tiles of rows of a request, all cut in the same places; rows that don't exist are written nowhere."""
    case = StepCase(q_lens, tuple(200 + q_len if q_len else 0 for q_len in q_lens), heads=heads)
    step = build_step(case, "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse, _, state_lse = run_pieces(guarded, step, dtype=torch.bfloat16)
    assert bool((~state_lse.isnan()).any())
    assert_agrees(step, (out, lse), 4e-3)


@pytest.mark.parametrize("most", [1, 3, 33])
def test_pieces_merge_to_the_whole(guarded, most):
    """trtllm#15138, vllm#24966: more pieces than tiles of keys."""
    step = build_step(StepCase((1, 2), (300, 3), heads=2), "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse, states, state_lse = run_pieces(guarded, step, most_pieces=most)
    written = ~state_lse.isnan()
    assert int(written.sum()) == {1: 0, 3: 6, 33: 6}[most]  # rows of a request in pieces of 128 keys
    assert bool(states[~written].isnan().all())
    assert_agrees(step, (out, lse))


def test_uncut_it_is_mixed_bit_for_bit(guarded):
    step = build_step(StepCase((2, 0, 2), (170, 0, 3)), "fp8_ds_mla", dtype=torch.bfloat16)
    for pieces, mixed in zip(run_pieces(guarded, step, most_pieces=1)[:2], run_mixed(guarded, step)):
        assert torch.equal(pieces, mixed)


@pytest.mark.parametrize("slots", [0, 3, 6])
def test_room_for_few_states(guarded, slots):
    """What finds no slot stays whole: the workspace bounds the cuts, never the step."""
    step = build_step(StepCase((1, 1), (400, 390), heads=4), "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse, _, state_lse = run_pieces(guarded, step, slots=slots)
    assert int((~state_lse.isnan()).sum()) == {0: 0, 3: 0, 6: 6 * 4}[slots]
    assert_agrees(step, (out, lse))


@pytest.mark.parametrize("held", [2**31 - 1, -(2**31)])
def test_records_may_lie_on_anything(guarded, monkeypatch, held):
    """A program of a cut that isn't one added its row to whatever the memory held: an overflow in checked runs, on one
    clean machine of many. Of such a cut only the count is read."""
    real = torch.empty

    def poisoned(*size: Any, **more: Any) -> torch.Tensor:
        made = real(*size, **more)
        return made.fill_(held) if made.dtype is torch.int32 else made

    step = build_step(StepCase((1, 1, 1), (0, 600, 65), heads=4), "fp8_rope_bf16", dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "empty", poisoned)
    out, lse, *_ = run_pieces(guarded, step)
    monkeypatch.undo()
    assert_agrees(step, (out, lse))


def test_padding_behind_the_last_request(guarded):
    step = build_step(StepCase((1, 1, 1), (0, 333, 0)), "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse, *_ = run_pieces(guarded, step, padding=20)
    assert_agrees(step, (out[:3], lse[:3]))
    assert bool((out[3:] == 0).all())
    assert bool((lse[3:] == -INF).all())


def test_queries_that_see_few_keys(guarded):
    """Causal rows see nothing of late pieces, whose states weigh nothing; without the mask all see all."""
    for causal in (True, False):
        case = StepCase((150, 1), (150, 300), heads=1, causal=causal)
        step = build_step(case, "fp8_rope_bf16", dtype=torch.bfloat16)
        out, lse, _, state_lse = run_pieces(guarded, step)
        assert bool((state_lse == -INF).any()) == causal
        assert_agrees(step, (out, lse))


def test_a_schedule_follows_lengths_in_place(guarded):
    """A captured graph replays the same launches over other lengths and tables: nothing of them may be on the host."""
    step = build_step(StepCase((1, 1), (500, 70), heads=4), "fp8_rope_bf16", dtype=torch.bfloat16)
    shorter = torch.tensor([40, 69], dtype=torch.int32)
    lengths = step.values.cache_lengths.clone()
    moving = with_values(step, cache_lengths=lengths)
    first = scheduled(moving, (ROWS, KEYS))
    again = scheduled(with_values(step, cache_lengths=shorter), (ROWS, KEYS))
    assert first.pieces.shape == again.pieces.shape
    assert first.cuts.shape == again.cuts.shape
    assert not torch.equal(first.pieces, again.pieces)


def test_a_table_and_lengths_that_are_none(guarded):
    """How many requests there are was read off a table or lengths before their shape was looked at: IndexError."""
    step: Step = build_step(StepCase((1,), (70,)), "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse = results(guarded, step, torch.float32)
    states = torch.empty(4, ROWS, 512)
    none = torch.tensor(0, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lookup_table: expected \[\*, \*\] int32 or uint32; got \[\] int32"):
        attend_pieces(
            step.q, planes_of(guarded, step), none, scheduled(step, (ROWS, KEYS)), out, lse, states,
            states[..., 0].contiguous(), sm_scale=1.0, max_query_len=1,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"cache_lengths: expected \[\*\] int32 or uint32; got \[\] int32"):
        scheduled(with_values(step, cache_lengths=none), (ROWS, KEYS))


def test_another_tiles_schedule_is_refused(guarded):
    step: Step = build_step(StepCase((1,), (70,)), "fp8_rope_bf16", dtype=torch.bfloat16)
    out, lse = results(guarded, step, torch.float32)
    states = torch.empty(4, 64, 512)
    with pytest.raises(ValueError, match="schedule: expected one for tiles of 16 rows and 64 keys; got 64 and 64"):
        attend_pieces(
            step.q, planes_of(guarded, step), step.values.lookup_table, scheduled(step, (64, 64)), out, lse, states,
            states[..., 0].contiguous(), sm_scale=1.0, max_query_len=1,
        )  # fmt: skip
