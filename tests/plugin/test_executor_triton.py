"""The Triton executor behind the public calls: what it refuses, and how a step becomes launches.

That the kernels are right is tests/triton_kernels' business. Here one ragged step, with prompts behind its decode rows,
goes through every form a step can take: whole, in parts, and with the prompts as a launch of their own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases.steps import Step, StepCase, build_step

import pagedmla
from pagedmla import get_layout
from pagedmla.plugin.executor_triton import PartialStates, TritonExecutor
from pagedmla.plugin.executors import AttendOptions, Capacity, Configuration, choose
from pagedmla.plugin.step import bind_step

pytest.importorskip("triton", reason="triton isn't installed: pip install pagedmla[triton]")

CASE = StepCase((1, 2, 19), (37, 40, 19), page_size=16, heads=3, name="two decode rows and a prompt")
ROUNDING = 4e-3  # of bf16 outputs, relative to the largest


@pytest.fixture(scope="module")
def step() -> Step:
    made = build_step(CASE, "fp8_rope_bf16", dtype=torch.bfloat16)
    return replace(made, values=replace(made.values, mixed_step_split=torch.tensor([2, 3], dtype=torch.int32)))


def make_plan(step: Step, partitions: int) -> pagedmla.Plan:
    return pagedmla.plan(
        layout=step.layout,
        num_heads=CASE.heads,
        page_size=CASE.page_size,
        max_batch=3,
        max_tokens=22,
        max_cache_length=64,
        dtype=torch.bfloat16,
        device="cpu",
        sm_scale=step.sm_scale,
        num_partitions=partitions,
        executor="triton",
    )


FORMS = {
    "whole": ["attend_mixed"],
    "spread": ["make_schedule", "attend_pieces"],
    "prompts apart": ["make_schedule", "attend_pieces", "attend_mixed"],
    "no room for states": ["make_schedule", "attend_pieces"],
    "spread without a plan": ["make_schedule", "attend_pieces"],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_step(form: str, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedmla.plugin import executor_triton
    from pagedmla.triton_kernels import decode, mixed, pieces, schedule

    launches = []
    for module, name in (
        (mixed, "attend_mixed"), (decode, "attend_decode"), (pieces, "attend_pieces"), (schedule, "make_schedule"),
    ):  # fmt: skip
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, real=real, name=name, **more: (launches.append(name), real(*args, **more))[1]
        )
    values, plan = step.values, None
    if form == "spread without a plan":
        values = replace(values, mla_num_partitions=3)
    else:
        plan = make_plan(step, 1 if form == "whole" else 3)
    if form == "no room for states":
        plan = replace(plan, workspace=PartialStates(torch.empty(0), torch.empty(0, 512)))
    if form == "prompts apart":  # they fill this GPU
        monkeypatch.setattr(executor_triton, "multiprocessors", lambda device: 0)
        monkeypatch.setattr(executor_triton, "places", lambda *_: 8)
    out, lse = pagedmla.attend(step.q, values, step.layer, plan=plan, executor="triton", check=True, **step.call())
    want, want_lse = step.dense_attention()
    assert float((out.double() - want).abs().max() / want.abs().max()) < ROUNDING
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)
    assert launches == FORMS[form]


def test_one_token_each_is_a_decode(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedmla.triton_kernels import mixed

    made = build_step(StepCase((1, 1), (20, 7), heads=2), "fp8_rope_bf16", dtype=torch.bfloat16)
    monkeypatch.setattr(mixed, "attend_mixed", None)
    call = {name: value for name, value in made.call().items() if name != "query_start_loc"}
    out, _ = pagedmla.attend(made.q, made.values, made.layer, executor="triton", **call)
    want, _ = made.dense_attention()
    assert float((out.double() - want).abs().max() / want.abs().max()) < ROUNDING


@pytest.mark.parametrize("name", ["cache_lengths", "query_start_loc"])
def test_vectors_with_a_stride_are_refused(name: str, step: Step) -> None:
    """A column of a table of lengths was read as if its elements were adjacent: wrong rows, stores in wrong slots."""

    def strided(vector: torch.Tensor) -> torch.Tensor:
        return torch.stack([vector, torch.full_like(vector, 3)], 1)[:, 0]

    values, starts = step.values, step.query_start_loc
    if name == "cache_lengths":
        values = replace(values, cache_lengths=strided(values.cache_lengths))
    else:
        starts = strided(starts)
    call = {**step.call(), "query_start_loc": starts}
    message = rf"{name}: expected adjacent elements \(stride\(0\) 1\); got stride 2\. Pass a contiguous copy\."
    with pytest.raises(ValueError, match=message):
        pagedmla.attend(step.q, values, step.layer, executor="triton", **call)
    latent, rope = torch.ones(22, 512), torch.ones(22, 64)
    with pytest.raises(ValueError, match=message):
        pagedmla.store(latent, rope, values, 0, query_start_loc=starts, layout=step.layout, executor="triton")


def test_decode_rows_keep_their_tile_beside_prompts(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decode rows of a step with a long prompt took the prompt's tile: twice the instructions a key."""
    from pagedmla.plugin import executor_triton
    from pagedmla.triton_kernels import mixed, pieces

    longest = []
    for module, name in ((pieces, "attend_pieces"), (mixed, "attend_mixed")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, real=real, **k: (longest.append(k["max_query_len"]), real(*a, **k))
        )
    monkeypatch.setattr(executor_triton, "multiprocessors", lambda device: 0)
    monkeypatch.setattr(executor_triton, "places", lambda *_: 8)
    pagedmla.attend(step.q, step.values, step.layer, plan=make_plan(step, 3), **step.call())
    assert longest == [2, 19]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, r"queries over an FP8 cache are bfloat16 or float16, not float32"),
        ({"dtype": torch.float64}, r"the kernels compute in float32 at most, not in float64"),
        ({"page_size": 24}, r"page sizes are powers of two or multiples of 16, not 24"),
        ({"num_heads": 129}, r"the kernels take up to 128 heads, not 129"),
        ({"layout": get_layout("bf16", latent=384)}, r"latents of 512 or 256 and a rope of 64, not 384 and 64"),
        ({"device": torch.device("meta")}, r"Triton kernels run on cuda and cpu devices, not on meta"),
    ],
)
def test_what_it_refuses(changes: dict[str, object], message: str) -> None:
    usual = Configuration("attend", torch.device("cpu"), get_layout("fp8_rope_bf16"), 16, 64, torch.bfloat16)
    assert TritonExecutor().refusal(usual) is None
    with pytest.raises(ValueError, match=rf"executor: expected one that can run .*'triton', but .*{message}"):
        choose(replace(usual, **changes), "triton")


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedmla.plugin import executor_triton

    monkeypatch.setattr(executor_triton, "_has_triton", lambda: False)
    usual = Configuration("attend", torch.device("cpu"), get_layout("fp8_rope_bf16"))
    assert TritonExecutor().refusal(usual) == "triton isn't installed: pip install pagedmla[triton]"


def test_triton_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every automatic choice walked over sys.path, for each layer of a step without a plan."""
    from pagedmla.plugin import executor_triton

    usual = Configuration("attend", torch.device("cpu"), get_layout("fp8_rope_bf16"))
    looked: list[str] = []
    monkeypatch.setattr(executor_triton, "find_spec", looked.append)
    executor_triton._has_triton.cache_clear()
    try:
        for _ in range(3):
            assert dict(choose(usual).passed_over)["triton"].startswith("triton isn't installed")
    finally:
        executor_triton._has_triton.cache_clear()
    assert looked == ["triton"]


def test_an_engine_is_not_served_by_an_executor_that_nobody_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without Triton the engine went on with torch, which syncs once a layer, and only its log said so."""
    from pagedmla.plugin import executor_triton

    monkeypatch.delenv("PAGEDMLA_EXECUTORS", raising=False)
    usual = {
        "layout": "fp8_rope_bf16", "num_heads": 16, "page_size": 64, "max_batch": 8, "max_tokens": 8,
        "max_cache_length": 4096, "dtype": torch.bfloat16, "sm_scale": 0.1, "reserve": False,
    }  # fmt: skip
    pagedmla.plan(**usual, device="cuda").check_engine()
    pagedmla.plan(**usual, device="cpu").check_engine()
    monkeypatch.setattr(executor_triton, "_has_triton", lambda: False)
    made = pagedmla.plan(**usual, device="cuda")
    sentence = r"expected an executor that is meant to attend on cuda; got none \(.*triton: triton isn't installed.*"
    with pytest.raises(ValueError, match=sentence + "PAGEDMLA_EXECUTORS=torch takes torch all the same"):
        made.check_engine()
    monkeypatch.setenv("PAGEDMLA_EXECUTORS", "torch")
    made.check_engine()


def test_float64_is_taken_where_the_public_call_takes_it() -> None:
    """LSEs in float64 were refused under an inner name, and so were latents, whose calls "auto" gave to Triton."""
    outs, lses = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, dtype=torch.float64)
    (out, lse), (expected, expected_lse) = (
        pagedmla.merge_states(outs, lses, executor=name) for name in ("triton", "torch")
    )
    assert torch.allclose(out, expected, atol=1e-6)
    assert torch.allclose(lse, expected_lse, atol=1e-6)
    pool = pagedmla.PagePool("fp8_rope_bf16", num_layers=1, page_size=16, num_pages=2)
    pool.allocate("a")
    values = pool.values(["a"], [1]).values
    latent, rope = torch.zeros(1, 512, dtype=torch.float64), torch.zeros(1, 64)
    with pytest.raises(ValueError, match="'triton', but the kernels compute in float32 at most, not in float64"):
        pagedmla.store(latent, rope, values, 0, layout=pool.layout, executor="triton")


def test_how_many_pieces_a_plan_takes_by_itself() -> None:
    """As many as run at once, two small blocks or a large one for each of 132 multiprocessors, none under 128 keys; the
    schedule takes fewer. A shape alone decides."""
    usual = Configuration("attend", torch.device("cpu"), get_layout("fp8_rope_bf16"), 16, 64, torch.bfloat16)

    def most(requests: int, tokens: int, keys: int, **changes: object) -> int:
        return TritonExecutor().partitions(
            replace(usual, **changes),  # type: ignore[arg-type]
            Capacity(8192, 8192, keys),
            requests,
            tokens,
        )

    assert [most(1, 1, keys) for keys in (127, 128, 4096, 131072)] == [1, 1, 32, 264]
    assert [most(32, 32, 131072, num_heads=heads) for heads in (16, 32, 64, 128)] == [264, 264, 132, 132]
    assert [most(requests, requests, 131072) for requests in (128, 4095, 4096)] == [264, 264, 1]
    assert most(3, 0, 4096) == 1  # requests without tokens: was a division by zero
    assert most(128, 128, 131072, layout=get_layout("bf16")) == 132  # its blocks have a multiprocessor each


@pytest.mark.parametrize("heads", [16, 128])
def test_a_plan_has_room_for_the_cuts_of_any_step(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of 256 requests and 8,192 tokens took no split for a lone long request, or a gigabyte of LSEs."""
    from pagedmla.triton_kernels import schedule

    usual = Configuration("attend", torch.device("cpu"), get_layout("fp8_rope_bf16"), heads, 64, torch.bfloat16)
    executor, capacity = TritonExecutor(), Capacity(256, 8192, 131072)
    space = executor.workspace(usual, capacity, executor.partitions(usual, capacity, 1, 1))
    assert space.nbytes < 20e6
    asked = []
    monkeypatch.setattr(schedule, "make_schedule", lambda *_, **more: asked.append((more["slots"], more["rows"])))
    for requests in (1, 2, 256):
        made = build_step(
            StepCase((1,) * requests, (1,) * requests, heads=heads), "fp8_rope_bf16", dtype=torch.bfloat16
        )
        bound = bind_step(made.values, 0, made.layout, None, made.q, "q")
        executor.schedule(bound, made.q, AttendOptions(0.1, True, 264, space))
    rows = 16 if heads == 16 else 64
    assert asked == [(132 * 64 // rows if heads == 128 else 264, rows)] * 3


def test_a_small_plan_has_room_for_its_drafts() -> None:
    """One request of 32 heads takes 66 parts with one token, 132 with two: they found no room and ran unsplit."""
    usual = Configuration("attend", torch.device("cpu"), get_layout("bf16"), 32, 64, torch.bfloat16)
    capacity = Capacity(1, 2, 131072)
    executor = TritonExecutor()
    space = executor.workspace(usual, capacity, executor.partitions(usual, capacity, 1, 1))
    assert space.partial_lse.shape[0] == 132 * 64


def test_a_store_reports_what_it_drops(step: Step) -> None:
    cache = pagedmla.PagePool("fp8_rope_bf16", num_layers=1, page_size=16, num_pages=2)
    cache.allocate("a")
    made = cache.values(["a"], [2])
    slots = torch.tensor([0, 32])
    with pytest.warns(pagedmla.DroppedStoreWarning, match=r"1 of 2 tokens dropped, first token 1 \(value slot 32"):
        pagedmla.store(
            torch.ones(2, 512), torch.ones(2, 64), made.values, 0, slot_mapping=slots, layout=cache.layout,
            executor="triton",
        )  # fmt: skip
