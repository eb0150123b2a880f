"""A step is bound once for all layers: what may be shared is, what is a layer's own isn't, and nothing goes unchecked.

Two layers of one cache group, with other tokens in each: whatever leaks from the first layer into the second shows.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla.adapters.rows import step_rows
from pagedmla.adapters.vllm import CacheLengths, layer_pools
from pagedmla.kv_cache.checks import DroppedStoreWarning
from pagedmla.kv_cache.layouts import CacheLayout, get_layout
from pagedmla.plugin import bound, executor_triton
from pagedmla.plugin.bound import BoundLayer, BoundRows, Stores
from pagedmla.plugin.executor_triton import TritonExecutor

PRESCALED = get_layout("fp8_rope_bf16_prescaled")
H, P, BLOCKS, TOKENS = 3, 16, 9, 20
SCALE = 0.1
CALLS_A_LAYER = 50  # in the second layer: 43 are counted; 396 before launches were repeated
LAYOUT = get_layout("fp8_rope_bf16")


def make_plan(**more: Any) -> Any:
    wanted = {
        "layout": LAYOUT, "num_heads": H, "page_size": P, "max_batch": 4, "max_tokens": 32, "max_cache_length": 64,
        "dtype": torch.float32, "device": "cpu", "sm_scale": SCALE,
    }  # fmt: skip
    return pagedmla.plan(**{**wanted, **more})


def make_layer(
    name: str, plan: Any, blocks: int = BLOCKS, stores: Stores | None = None, layout: CacheLayout = LAYOUT
) -> BoundLayer:
    cache = torch.full((blocks, P, layout.bytes_per_token), 0x7F, dtype=torch.uint8)  # NaN
    return BoundLayer(name, layer_pools(cache, layout), plan, stores)


def make_rows(
    plan: Any, starts: tuple[int, ...], seq_lens: tuple[int, ...], pages: tuple[int, ...], decodes: int | None = None
) -> BoundRows:
    decodes = len(seq_lens) if decodes is None else decodes
    query_start_loc, lengths = (torch.tensor(each, dtype=torch.int32) for each in (starts, seq_lens))
    longest = int(query_start_loc.diff().max())
    rows = step_rows(
        CacheLengths(4, "cpu").write(lengths, query_start_loc, longest),
        torch.tensor(pages, dtype=torch.int32).view(len(seq_lens), -1),
        query_start_loc,
        num_tokens=starts[-1],
        max_query_length=longest,
        max_seq_len=max(seq_lens),
        num_decodes=decodes,
        num_decode_tokens=starts[decodes],
    )
    return BoundRows(rows, plan)


def fill(layer: BoundLayer, seed: int) -> None:
    """20 tokens on pages 1 and 2."""
    generator = torch.Generator().manual_seed(seed)
    latent, rope = (torch.randn(TOKENS, width, generator=generator).to(layer.plan.dtype) for width in (512, 64))
    layer.store(latent, rope, torch.arange(P, P + TOKENS))


def publicly(q: Tensor, rows: BoundRows, layer: BoundLayer) -> tuple[Tensor, Tensor]:
    given = rows.rows
    return pagedmla.attend(
        q, given.values(layer.pools), 0, sm_scale=SCALE, query_start_loc=given.query_start_loc, layout=LAYOUT
    )


@pytest.mark.parametrize("starts", [(0, 1), (0, 5)])
def test_each_layer_reads_its_own_pages(starts: tuple[int, ...]) -> None:
    plan = make_plan()
    layers = [make_layer(f"layer.{i}", plan) for i in range(2)]
    for seed, layer in enumerate(layers):
        fill(layer, seed)
    rows = make_rows(plan, starts, (TOKENS,), (1, 2))
    q = torch.randn(starts[-1], H, 576)
    found = [rows.attend(q, layer) for layer in layers]
    for layer, (out, lse) in zip(layers, found):
        expected_out, expected_lse = publicly(q, rows, layer)
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)
    assert not torch.equal(found[0][0], found[1][0])


# Steps whose launches differ: one; pieces and their merge; pieces of the decode rows, and the prompts behind them.
STEPS = {
    "decode": ((0, 1, 2), (TOKENS, 17), (1, 2, 1, 2), None, 1),
    "split": ((0, 1, 2), (TOKENS, 17), (1, 2, 1, 2), None, 2),
    "split decode rows and a prompt": ((0, 1, 6), (TOKENS, 17), (1, 2, 1, 2), 1, 2),
    "padding behind the last request": ((0, 1, 3), (TOKENS, 17), (1, 2, 1, 2), None, 1),
}


@pytest.mark.parametrize("case", STEPS)
def test_launches_of_the_first_layer_are_repeated(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deciding and checking a layer's launches anew cost more than to make them, outside CUDA graphs."""
    pytest.importorskip("triton", reason="triton isn't installed: pip install pagedmla[triton]")
    *step, parts = STEPS[case]
    plan = make_plan(executor="triton", dtype=torch.bfloat16, num_partitions=parts)
    if case == "split decode rows and a prompt":  # which fills this GPU by itself
        monkeypatch.setattr(executor_triton, "multiprocessors", lambda device: 0)
        monkeypatch.setattr(executor_triton, "places", lambda *_: 8)
    stores = Stores()
    layers = [make_layer(f"layer.{i}", plan, stores=stores) for i in range(3)]
    decided: list[str] = []

    def counted(name: str) -> Any:
        stock = getattr(TritonExecutor, name)

        def call(*args: Any, **more: Any) -> Any:
            decided.append(name)
            return stock(*args, **more)

        return call

    for name in ("schedule", "attend", "store_slots"):
        monkeypatch.setattr(TritonExecutor, name, counted(name))
    for seed, layer in enumerate(layers):
        fill(layer, seed)
    rows = make_rows(plan, *step)
    tokens = 4 if case.startswith("padding") else step[0][-1]
    queries = [torch.randn(tokens, H, 576).bfloat16() for _ in layers]
    found = [rows.attend(q, layer) for q, layer in zip(queries, layers)]
    assert decided == ["store_slots", "schedule", "attend"]
    monkeypatch.undo()
    for q, layer, (out, lse) in zip(queries, layers, found):
        expected_out, expected_lse = publicly(q, rows, layer)
        assert (out - expected_out).abs().max() < 2e-2
        assert torch.allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("blocks", [(40, 40), (40, 41, 40)], ids=["layers alike", "layers that differ"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_captured_pass_follows_lengths_and_tables(passes: int, blocks: tuple[int, ...]) -> None:
    """A graph is captured after a warm-up over the same rows: a schedule that only the first pass made wasn't in it,
    and replays cut the keys by the lengths of the warm-up. The launches of the last pass are made again here."""
    pytest.importorskip("triton", reason="triton isn't installed: pip install pagedmla[triton]")
    from pagedmla.triton_kernels.launch import intercepted, launch

    plan = make_plan(executor="triton", dtype=torch.bfloat16, num_partitions=4, max_cache_length=512)
    layers = [make_layer(f"layer.{i}", plan, blocks=count) for i, count in enumerate(blocks)]
    for seed, layer in enumerate(layers):
        generator = torch.Generator().manual_seed(seed)
        latent, rope = (torch.randn(40 * P, width, generator=generator).bfloat16() for width in (512, 64))
        layer.store(latent, rope, torch.arange(40 * P))
    rows = make_rows(plan, (0, 1, 2), (20, 17), tuple(range(36)))
    rows.rows = rows.rows._replace(max_cache_length=288)
    q = torch.randn(2, H, 576).bfloat16()
    for _ in range(passes - 1):
        for layer in layers:
            rows.attend(q, layer)
    captured: list[Any] = []
    with intercepted(lambda *made: captured.append(made)):
        found = [rows.attend(q, layer) for layer in layers]
    rows.rows.cache_lengths.copy_(torch.tensor([280, 150]))
    table = rows.rows.lookup_table.view(torch.int32)
    table.copy_(table.flip(0))
    for kernel, grid, args, more in captured:
        launch(kernel, grid, *args, **more)
    for layer, (out, lse) in zip(layers, found):
        expected_out, expected_lse = publicly(q, rows, layer)
        assert (out - expected_out).abs().max() < 2e-2
        assert torch.allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("order", [(3, 24), (24, 3), (3, 24, 3)])
def test_queries_of_another_number_have_a_schedule_of_their_own(order: tuple[int, ...]) -> None:
    """A layer with 24 rows of queries after one with 3, over the same requests, left its 21 rows of padding unwritten:
    the step and its schedule were those of the first."""
    pytest.importorskip("triton", reason="triton isn't installed: pip install pagedmla[triton]")
    plan = make_plan(executor="triton", dtype=torch.bfloat16, num_partitions=4, max_cache_length=512)
    layers = [make_layer(f"layer.{i}", plan, blocks=40) for i in range(len(order))]
    for layer in layers:
        latent, rope = (torch.randn(40 * P, width).bfloat16() for width in (512, 64))
        layer.store(latent, rope, torch.arange(40 * P))
    rows = make_rows(plan, (0, 1, 3), (280, 150), tuple(range(36)))
    rows.rows = rows.rows._replace(max_cache_length=288)
    for _ in range(2):
        for count, layer in zip(order, layers):
            q = torch.randn(count, H, 576).bfloat16()
            out, lse = rows.attend(q, layer)
            expected_out, expected_lse = publicly(q, rows, layer)
            assert (out - expected_out).abs().max() < 2e-2
            assert torch.allclose(lse, expected_lse, atol=1e-5)
            assert bool((lse[3:] == -torch.inf).all())


def test_a_repeated_layer_costs_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200's host a layer's own Python took 250 us, which bound every step outside a CUDA graph."""
    pytest.importorskip("triton", reason="triton isn't installed: pip install pagedmla[triton]")
    from pagedmla.triton_kernels.launch import intercepted

    monkeypatch.setattr(BoundLayer, "_warn_of_dropped", lambda layer, slots: None)  # of slots on the host alone
    plan, stores = make_plan(executor="triton", dtype=torch.bfloat16, num_partitions=2), Stores()
    layers = [make_layer(f"layer.{i}", plan, stores=stores) for i in range(2)]
    rows = make_rows(plan, *STEPS["split"][:4])
    q, slots = torch.randn(2, H, 576).bfloat16(), torch.arange(P, P + 2)
    latent, rope = torch.randn(2, 512).bfloat16(), torch.randn(2, 64).bfloat16()
    launches: list[object] = []
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with intercepted(lambda kernel, *rest: launches.append(kernel)):
        for layer in layers:
            assert layer.kind
            assert layer.tensors  # a layer's own, worked out once
            calls = 0
            sys.setprofile(count)
            try:
                layer.store(latent, rope, slots)
                rows.attend(q, layer)
            finally:
                sys.setprofile(None)
    assert len(launches) == 2 + 2 * 3  # the step's schedule and its records; a layer's store, pieces, merge
    assert calls <= CALLS_A_LAYER, calls


def test_later_layers_bind_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep model paid the checks of a step in each of its layers: 0.7 ms of host time a layer."""
    plan = make_plan()
    layers = [make_layer(f"layer.{i}", plan) for i in range(3)]
    for layer in layers:
        fill(layer, 0)
    bindings: list[str] = []
    stock = bound.bind_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        bindings.append(args[5])
        return stock(*args, **kwargs)

    monkeypatch.setattr(bound, "bind_step", counted)
    rows = make_rows(plan, (0, 1), (TOKENS,), (1, 2))
    q = torch.randn(1, H, 576)
    for layer in layers:
        fill(layer, 1)
        rows.attend(q, layer)
    assert bindings == ["q"]


@pytest.mark.parametrize("executor", ["torch", "triton"])
@pytest.mark.parametrize(
    ("heads", "columns", "dtype", "layout", "message"),
    [
        (8, 576, torch.bfloat16, LAYOUT, "plan holds H 3; got 8"),
        (3, 512, torch.bfloat16, LAYOUT, "plan holds columns a query 576; got 512"),
        (3, 576, torch.float16, LAYOUT, "plan holds query dtype bfloat16; got float16"),
        (3, 576, torch.bfloat16, PRESCALED, "plan holds layout fp8_rope_bf16; got fp8_rope_bf16_prescaled"),
    ],
    ids=["heads", "columns", "dtype", "layout"],
)
def test_a_later_layer_is_refused_as_a_first_one(
    heads: int, columns: int, dtype: torch.dtype, layout: CacheLayout, message: str, executor: str
) -> None:
    """A second layer of 8 heads passed on a plan for 3, and one of another layout got the first one's launches, off by
    4.18 without an error: later layers compared the pools' shape and the number of tokens, and nothing else."""
    if executor == "triton":
        pytest.importorskip("triton", reason="triton isn't installed: pip install pagedmla[triton]")
    plan = make_plan(dtype=torch.bfloat16, executor=executor)
    usual, other = make_layer("usual", plan), make_layer("other", plan, layout=layout)
    fill(usual, 0)
    rows = make_rows(plan, (0, 1), (TOKENS,), (1, 2))
    good, bad = torch.randn(1, H, 576).bfloat16(), torch.randn(1, heads, columns).to(dtype)
    for _ in range(2):  # also where a pass is known
        rows.attend(good, usual)
        with pytest.raises(ValueError, match=message):
            rows.attend(bad, other)
        with pytest.raises(ValueError, match=message):
            make_rows(plan, (0, 1), (TOKENS,), (1, 2)).attend(bad, other)


def stored(layer: BoundLayer, tokens: int) -> Tensor:
    """The layer's bytes once so many tokens are in it."""
    generator = torch.Generator().manual_seed(3)
    latent, rope = (torch.randn(tokens, width, generator=generator).bfloat16() for width in (512, 64))
    layer.store(latent, rope, torch.arange(tokens))
    return layer.pools.blocks.view(torch.uint8).clone()


def test_stores_are_repeated_for_layers_of_a_kind_alone() -> None:
    """Pools of fp8_rope_bf16 and fp8_rope_bf16_prescaled have one geometry: the second got the first one's launches."""
    pytest.importorskip("triton", reason="triton isn't installed: pip install pagedmla[triton]")
    stores, found = Stores(), []
    for layout in (LAYOUT, PRESCALED):
        plan = make_plan(dtype=torch.bfloat16, executor="triton", layout=layout)
        stored(make_layer("before", plan, layout=layout), 2)
        together = stored(make_layer("together", plan, stores=stores, layout=layout), 2)
        found.append((together, stored(make_layer("alone", plan, layout=layout), 2)))
    for together, alone in found:
        assert torch.equal(together, alone)
    assert not torch.equal(found[0][0], found[1][0])


def test_two_threads_share_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches run in threads: one could compare its key, and launch what the other had recorded meanwhile.

    The other's whole call comes where the key is compared."""
    pytest.importorskip("triton", reason="triton isn't installed: pip install pagedmla[triton]")
    plan, stores = make_plan(dtype=torch.bfloat16, executor="triton"), Stores()
    layer, other, alone = (make_layer(name, plan, stores=stores) for name in ("one", "other", "alone"))
    pending: list[BoundLayer] = []

    class Compared(tuple):
        def __eq__(self, given: object) -> bool:
            same = tuple.__eq__(self, given)
            if pending:
                stored(pending.pop(), 2)
            return same

        __hash__ = tuple.__hash__

    stock = bound.geometry
    monkeypatch.setattr(bound, "geometry", lambda tensors: Compared(stock(tensors)))
    stored(layer, TOKENS)
    layer.pools.blocks.view(torch.uint8).fill_(0x7F)
    pending.append(other)
    found = stored(layer, TOKENS)
    assert not pending
    assert torch.equal(found, stored(alone, TOKENS))


def test_a_layer_with_fewer_pages_is_checked_anew() -> None:
    plan = make_plan()
    large, small = make_layer("large", plan), make_layer("small", plan, blocks=2)
    fill(large, 0)
    rows = make_rows(plan, (0, 1), (TOKENS,), (1, 2))
    q = torch.randn(1, H, 576)
    rows.attend(q, large)
    with pytest.raises(IndexError, match="lookup_table: row 0, column 1 holds page id 2; kv_blocks has 2 pages"):
        rows.attend(q, small)


def test_every_layer_is_read_where_checks_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    good, bad = make_layer("good", plan), make_layer("bad", plan)
    fill(good, 0)
    rows = make_rows(plan, (0, 1), (TOKENS,), (1, 2))
    q = torch.randn(1, H, 576)
    monkeypatch.setenv("PAGEDMLA_CHECK", "1")
    rows.attend(q, good)
    with pytest.raises(ValueError, match="kv_blocks: expected no NaN in live slots; got one at row 0, column 0"):
        rows.attend(q, bad)
    with pytest.raises(IndexError, match="slot_mapping: token 0 has slot 144"):
        good.store(torch.randn(1, 512), torch.randn(1, 64), torch.tensor([BLOCKS * P]))


def test_tokens_outside_the_cache_are_named() -> None:
    layer = make_layer("model.layers.4", make_plan())
    slots = torch.tensor([0, -1, BLOCKS * P + 3])
    sentence = "model.layers.4: 1 of 3 tokens dropped, first slot 147; the cache has 9 pages of 16"
    with pytest.warns(DroppedStoreWarning, match=sentence):
        layer.store(torch.randn(3, 512), torch.randn(3, 64), slots)


def test_plan_refuses_a_step_that_is_larger() -> None:
    plan = make_plan()
    layer = make_layer("layer.0", plan)
    rows = make_rows(plan, (0, 33), (40,), (1, 2, 3))
    with pytest.raises(ValueError, match="plan holds 32 tokens; got 33"):
        rows.attend(torch.randn(33, H, 576), layer)


def test_decode_steps_need_no_search_for_the_request() -> None:
    """Padding rows of a captured graph stand at length -1, so that their one token sees nothing."""
    plan = make_plan()
    decode, ragged = (
        make_rows(plan, (0, 1, 2, 2), (20, 3, 0), (1, 2, 3, 4, 5, 6)),
        make_rows(plan, (0, 1, 3), (20, 3), (1, 2, 3, 4)),
    )
    assert not decode.rows.one_token_each  # two tokens for three requests
    assert decode.rows._replace(num_tokens=3).one_token_each
    assert not ragged.rows.one_token_each
    assert decode.rows.cache_lengths.tolist() == [19, 2, -1]
