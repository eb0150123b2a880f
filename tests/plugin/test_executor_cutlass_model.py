"""`executor="cutlass-model"` behind the public calls, against float64 attention on the quantised cache.

That the model computes what the kernel would is tests/cutlass_kernels' business. Here a step goes through it as an
engine's would: planned, split, beside a prompt, with padding, with nothing to do, stored by the executor beside it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases.steps import Step, StepCase, build_step, with_values
from torch import Tensor

import pagedmla
from pagedmla.cutlass_kernels import model
from pagedmla.plugin.executors import AUTO, Configuration, choose

BOUNDS = {"fp8": (5e-2, 4e-2), "fp8x2": (2.5e-2, 1e-2), "fp16": (3e-3, 1e-4)}  # relative L2 of out, error of lse
LONG = StepCase((1, 2), (600, 700), page_size=64, heads=16, name="two requests over 512 keys")
SHORT = StepCase((1, 2, 19), (37, 40, 19), page_size=16, heads=3, name="two decode rows and a prompt")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEDMLA_CHECK", "PAGEDMLA_EXECUTORS", "PAGEDMLA_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(variant, query tokens, partitions) of each call of the model."""
    calls: list[tuple[str, int, int]] = []
    real = model.attend

    def attend(q: Tensor, *args: object, **more: object) -> tuple[Tensor, Tensor]:
        calls.append((more["variant"].name, q.shape[0], more["num_partitions"]))  # type: ignore[attr-defined, arg-type]
        return real(q, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "attend", attend)
    return calls


def made(case: StepCase, layout: str = "fp8_rope_bf16") -> Step:
    return build_step(case, layout, dtype=torch.bfloat16)


def plan_for(step: Step, **changes: object) -> pagedmla.Plan:
    arguments: dict[str, object] = {
        "layout": step.layout, "num_heads": step.case.heads, "page_size": step.case.page_size, "max_batch": 4,
        "max_tokens": 32, "max_cache_length": 1024, "dtype": torch.bfloat16, "device": "cpu",
        "sm_scale": step.sm_scale, "executor": "cutlass-model", **changes,
    }  # fmt: skip
    return pagedmla.plan(**arguments)  # type: ignore[arg-type]


def attend(step: Step, **changes: object) -> tuple[Tensor, Tensor]:
    return pagedmla.attend(step.q, step.values, step.layer, **{**step.call(), **changes})  # type: ignore[arg-type]


def assert_near(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], precision: str) -> None:
    (out, lse), (want_out, want_lse) = got, want
    live = want_lse != -torch.inf
    assert torch.equal(lse == -torch.inf, ~live)
    assert bool((out[~live] == 0).all())
    if bool(live.any()):
        gap = (out.double() - want_out)[live].norm() / want_out[live].norm()
        assert float(gap) <= BOUNDS[precision][0]
        assert float((lse.double() - want_lse)[live].abs().max()) <= BOUNDS[precision][1]


@pytest.mark.parametrize("layout", ["fp8_rope_bf16", "fp8_rope_bf16_prescaled", "fp8_flat"])
@pytest.mark.parametrize(("precision", "form"), [("auto", "fp8x2"), ("fp8x2", "fp8x2"), ("fp16", "fp16")])
def test_a_planned_step(layout: str, precision: str, form: str, modelled: list[tuple[str, int, int]]) -> None:
    step = made(LONG, layout)
    got = attend(step, plan=plan_for(step, precision=precision), check=True)
    assert_near(got, step.dense_attention(), form)
    assert modelled == [(f"mla_decode_{layout}_{form}_r32_b64_bf16", 3, 8)]


@pytest.mark.parametrize("layout", ["fp8_rope_bf16", "fp8_flat"])
@pytest.mark.parametrize("precision", ["fp16", "fp8x2"])
@pytest.mark.parametrize(
    "case",
    [
        LONG,
        StepCase((1, 1, 1), (600, 0, 513), page_size=16, heads=16, name="an empty row between two"),
        StepCase((2, 1), (700, 520), page_size=32, heads=32, name="64 rows, causal"),
    ],
    ids=lambda case: case.name,
)
def test_triton_says_the_same(case: StepCase, precision: str, layout: str) -> None:
    """The two executors that a plan has on Hopper, over the same pages: what one leaves to the other must fit."""
    pytest.importorskip("triton", reason="triton isn't installed: pip install pagedmla[triton]")
    step = made(case, layout)
    out, lse = attend(step, executor="triton")
    assert_near(attend(step, plan=plan_for(step, precision=precision)), (out.double(), lse.double()), precision)


def test_short_steps_take_the_exact_form(modelled: list[tuple[str, int, int]]) -> None:
    """Over few keys weights rounded to e4m3 don't average out: the bound on a step's keys decides, never a length."""
    step = made(replace(LONG, heads=32, kv_lens=(90, 511)))  # 64 rows
    assert_near(attend(step, plan=plan_for(step)), step.dense_attention(), "fp16")
    assert "_fp16_r32_" in modelled.pop()[0]
    attend(with_values(step, max_cache_length=512), plan=plan_for(step))
    assert "_fp8x2_r64_" in modelled.pop()[0]
    attend(with_values(step, max_cache_length=512), plan=plan_for(step, max_cache_length=511))
    assert "_fp16_r32_" in modelled.pop()[0]


@pytest.mark.parametrize("precision", ["fp8", "fp8x2", "fp16", "fp4"])
def test_the_environment_sets_the_precision(
    precision: str, monkeypatch: pytest.MonkeyPatch, modelled: list[tuple[str, int, int]]
) -> None:
    """Where an engine makes the plan, nobody can pass an argument."""
    step = made(replace(LONG, heads=64, q_lens=(1, 1)))
    monkeypatch.setenv("PAGEDMLA_PRECISION", precision)
    if precision == "fp4":
        message = r"PAGEDMLA_PRECISION: expected one of auto, fp8, fp8x2, fp16; got 'fp4'\."
        for call in (lambda: plan_for(step), lambda: attend(step, executor="cutlass-model")):
            with pytest.raises(ValueError, match=message):
                call()
        return
    for executor in (AUTO, "cutlass-model"):
        plan = plan_for(step) if executor == AUTO else None
        assert_near(attend(step, plan=plan, executor=executor), step.dense_attention(), precision)
        form = "fp8x1_r64" if precision == "fp8" else "fp8x2_r64" if precision == "fp8x2" else "fp16_r32"
        assert f"_{form}_" in modelled.pop()[0]
    assert plan_for(step, precision="fp8x2").precision == "fp8x2"  # an argument comes before the environment


def test_prompts_behind_decode_rows_are_the_other_executors(modelled: list[tuple[str, int, int]]) -> None:
    step = with_values(made(SHORT), mixed_step_split=torch.tensor([2, 3], dtype=torch.int32))
    for plan in (plan_for(step), None):
        got = attend(step, plan=plan, executor="cutlass-model", check=True)
        assert_near(got, step.dense_attention(), "fp16")
        assert modelled.pop()[:2] == ("mla_decode_fp8_rope_bf16_fp16_r16_b16_bf16", 3)
    prompts = with_values(made(SHORT), mixed_step_split=torch.tensor([0, 0], dtype=torch.int32))
    assert_near(attend(prompts, plan=plan_for(prompts)), prompts.dense_attention(), "fp16")
    assert modelled == []


@pytest.mark.parametrize("split", [None, [3, 3]], ids=["no split", "all decode rows"])
def test_padding_rows(split: list[int] | None) -> None:
    """Of a captured graph: query rows that no request owns, whatever they hold, give out 0 and lse -inf."""
    step = made(StepCase((1, 1, 1), (70, 0, 9), page_size=16, heads=2))
    q = torch.cat((step.q, torch.full((2, 2, 576), torch.nan, dtype=torch.bfloat16)))
    if split is not None:
        step = with_values(step, mixed_step_split=torch.tensor(split, dtype=torch.int32))
    out, lse = attend(replace(step, q=q), plan=plan_for(step))
    assert_near((out[:3], lse[:3]), step.dense_attention(), "fp16")
    assert bool((out[3:] == 0).all())
    assert bool((lse[3:] == -torch.inf).all())


@pytest.mark.parametrize("case", [StepCase((), ()), StepCase((0, 0), (3, 0))], ids=["no request", "no token"])
def test_steps_without_work(case: StepCase) -> None:
    step = made(case)
    out, lse = attend(step, plan=plan_for(step))
    assert (out.shape, lse.shape) == ((0, 2, 512), (0, 2))


@pytest.mark.parametrize("partitions", [1, 5])
def test_partitions_reach_the_model(partitions: int, modelled: list[tuple[str, int, int]]) -> None:
    step = made(LONG)
    got = attend(step, plan=plan_for(step, num_partitions=partitions, precision="fp16"))
    assert_near(got, step.dense_attention(), "fp16")
    asked = with_values(step, mla_num_partitions=2)
    attend(asked, plan=plan_for(step, num_partitions=partitions + 1))
    assert [call[2] for call in modelled] == [partitions, 2]


def test_its_plan_stores_and_explains() -> None:
    """A plan for an executor that only attends left nobody to store."""
    step = made(LONG)
    plan = plan_for(step)
    assert (plan.attend_choice.executor.name, plan.store_choice.executor.name) == ("cutlass-model", "torch")
    shown = plan.explain().splitlines()
    assert shown[1] == "  attend: cutlass-model (asked for)"
    assert shown[2] == "    1 query token a request: the model of mla_decode_fp8_rope_bf16_fp16_r16_b64_bf16"
    assert "  store: torch (asked for with cutlass-model, which only attends)" in shown
    pool = pagedmla.PagePool("fp8_rope_bf16", num_layers=1, page_size=64, num_pages=4)
    pool.allocate("a")
    values, starts = pool.values(["a"], [70])
    where = {"query_start_loc": starts, "layout": pool.layout}
    latent, rope = torch.randn(70, 512), torch.randn(70, 64)
    pagedmla.store(latent, rope, values, 0, executor="cutlass-model", **where)  # type: ignore[arg-type]
    q = torch.randn(70, 2, 576).to(torch.bfloat16)
    got, want = (
        pagedmla.attend(q, values, 0, sm_scale=0.04, executor=name, **where)[0].float()  # type: ignore[arg-type]
        for name in ("cutlass-model", "torch")
    )
    assert float((got - want).norm() / want.norm()) < BOUNDS["fp16"][0]


USUAL = Configuration("attend", torch.device("cpu"), pagedmla.get_layout("fp8_rope_bf16"), 16, 64, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": torch.device("meta")}, "the model runs on the CPU, not on meta"),
        ({"dtype": torch.float32}, "it is built for queries in bfloat16, not float32"),
        ({"page_size": 8}, "its pages have 16, 32, 64, 128, 256 tokens, not 8"),
        ({"num_heads": 129}, "the kernels take up to 128 heads, not 129"),
        ({"layout": pagedmla.get_layout("bf16")}, "its layouts are .* with one scale a token or tensor, not bf16"),
    ],
)
def test_what_it_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"executor: expected .*; got 'cutlass-model', but {message}"):
        choose(replace(USUAL, **changes), "cutlass-model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_scales": torch.float16}, r"planes.scales: expected \[\*, 64, 1\] float32 .*; got .*float16"),
        ({"kv_scales": torch.float8_e8m0fnu}, r"planes.scales: expected .* float32 for .*; got .*float8_e8m0fnu"),
        ({"row": 577}, r"planes.latent: expected a slot stride that is a multiple of 16 bytes, .*; got 577 bytes"),
        ({"q": 580}, r"q: expected rows that begin at multiples of 16 bytes; got strides \(9280, 580, 1\)"),
    ],
    ids=["float16 scales", "e8m0 scales", "rows 577 bytes apart", "queries 580 columns apart"],
)
def test_what_the_launcher_would_refuse(
    change: dict[str, object], message: str, modelled: list[tuple[str, int, int]]
) -> None:
    """`cutlass` refuses these with these words: a model that took more than its kernel would say nothing of it."""
    step = made(LONG, "fp8_flat")
    if "kv_scales" in change:
        step = build_step(LONG, "fp8_flat", dtype=torch.bfloat16, scale_dtype=change["kv_scales"])  # type: ignore[arg-type]
    elif "row" in change:
        wide = torch.nn.functional.pad(step.values.kv_blocks.view(torch.uint8), (0, 1))
        step = with_values(step, kv_blocks=wide[..., :576].view(torch.float8_e4m3fn))
    else:
        step = replace(step, q=torch.nn.functional.pad(step.q, (0, 4))[..., :576])
    with pytest.raises(ValueError, match=message):
        attend(step, plan=plan_for(step))


def test_it_runs_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(USUAL).executor.name == "torch"
    monkeypatch.setenv("PAGEDMLA_EXECUTORS", "cutlass-model,reference")
    chosen = choose(USUAL)
    assert (chosen.executor.name, chosen.asked_for) == ("cutlass-model", False)
    stores = choose(replace(USUAL, operation="store"))
    assert (stores.executor.name, stores.passed_over) == ("torch", ())
