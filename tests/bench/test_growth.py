"""How cost grows: which rows there are and what they compare. No time is judged; results that must be the same are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedmla.bench import balance, growth, host_cost
from pagedmla.bench.ragged import BATCHES, SYNTHETIC, RaggedBatch


def test_ten_times_the_pool_gives_the_same_bits() -> None:
    first, second = growth.by_pool(seconds=0.0)
    assert (first.size, first.ratio, first.same) == (1, 1.0, True)
    assert (second.size, second.same) == (10, True)


def test_pages_past_2_31_elements_give_the_same_bits() -> None:
    near, far = growth.by_address(seconds=0.0)
    assert near.size < 2**31 <= far.size
    assert far.same is True


def test_addresses_that_wrap_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that cuts addresses to 31 bits finds page 0 where page 32 is; its row says that the bits differ."""
    attend = growth._attend

    def wrapping(inputs):
        blocks = inputs.values.kv_blocks
        last = blocks.stride(0) * (len(blocks) - 1)
        if last >= 2**31:  # page 32 lands on page 0
            wrapped = blocks.clone()
            wrapped[32] = blocks[0]
            inputs = replace(inputs, values=replace(inputs.values, kv_blocks=wrapped))
        return attend(inputs)

    monkeypatch.setattr(growth, "_attend", wrapping)
    _, far = growth.by_address(seconds=0.0)
    assert far.same is False


def test_context_grows_over_a_pool_that_does_not() -> None:
    rows = list(growth.attention_by_context((64, 640, 6400), pool_pages=4))
    assert [row.size for row in rows] == [64, 640, 6400]
    assert rows[0].ratio == 1.0
    assert all(row.microseconds > 0 for row in rows)


def test_host_parts_by_requests_and_context() -> None:
    rows = [*growth.host_by_requests((1, 3), kv_len=65), *growth.host_by_context((64, 1 << 20), requests=2)]
    kinds = {row.what.split(",")[0] for row in rows}
    assert kinds == {"plan", "prepare", "allocator", "adapter", "launcher", "launch"}
    assert {row.to_dict()["source"] for row in rows} == {"measured"}
    assert {row.size for row in rows} == {1, 3, 64, 1 << 20}


def test_the_launch_goes_all_the_way_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed ends in launches that are recorded, on the kernels that a GPU would run."""
    recorded = []
    record = host_cost.record

    def recording(call, target):
        found = record(call, target)
        recorded.extend(launched.kernel.fn.__name__ for launched in found)
        return found

    monkeypatch.setattr(host_cost, "record", recording)
    host_cost.launch_call(2, 4096)()
    assert recorded == ["schedule_kernel", "records_kernel", "pieces_kernel", "merge_cuts_kernel"]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_every_key_is_some_workers(batch: RaggedBatch) -> None:
    """Both cut tiles of 64 keys; rows beyond a tile read them again."""
    rows = list(balance.balances([batch], heads=[16]))
    assert [row.executor for row in rows] == ["cutlass", "triton"]
    for row in rows:
        workers = 132 if row.executor == "cutlass" or 16 * batch.q_len > 32 else 264
        tiles = 1 if 16 * batch.q_len <= 64 else 2
        rounding = 64 * tiles * len(batch.kv_lens)
        assert 0 <= row.even * workers - tiles * sum(batch.kv_lens) <= rounding
        assert row.share >= 1 or not row.even
        assert row.to_dict()["source"] == "model"


def test_a_long_request_keeps_nobody_waiting() -> None:
    """One request of 128k among 63 short ones took 50 even shares while Triton's parts were as many for each."""
    one_long = next(batch for batch in BATCHES if batch.name == "one-long")
    assert [row.share < 1.1 for row in balance.balances([one_long], heads=[16])] == [True, True]
    equal = RaggedBatch("equal", SYNTHETIC, "", (4096,) * 132)
    assert [row.share for row in balance.balances([equal], heads=[16])] == [1.0, 1.0]


def test_ragged_batches_say_where_they_come_from() -> None:
    for batch in BATCHES:
        assert batch.kind in ("published", "rule", "synthetic")
        assert batch.origin
        assert min(batch.kv_lens) >= 0
    assert len({batch.name for batch in BATCHES}) == len(BATCHES)
