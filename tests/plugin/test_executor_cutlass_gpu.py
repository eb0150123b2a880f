"""`executor="cutlass"` on a Hopper GPU, through plans and the public calls; tests/gpu holds the kernels' own grids.

A step of cases/steps.py goes to the GPU as it is, poison and wild ids included. Grid: each tile of rows in each form,
cut and uncut, short steps, prompts behind decode rows, and a captured graph that replays with other lengths and tables.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases.decode_sm90 import SHORT_BOUNDS
from cases.steps import Step, StepCase, build_step, with_values
from torch import Tensor

import pagedmla
from pagedmla.plugin.executor_cutlass import HOPPER

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

ONE_TERM, TWO_TERMS, FLOAT16 = (5e-2, 4e-2), (2.5e-2, 1e-2), (3e-3, 1e-4)  # relative L2 of out, error of lse
TENSORS = ("kv_blocks", "kv_scales", "cache_lengths", "lookup_table", "scales_lookup_table")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEDMLA_CHECK", "PAGEDMLA_EXECUTORS", "PAGEDMLA_PRECISION", "PAGEDMLA_ALLOW_UNPROVEN"):
        monkeypatch.delenv(name, raising=False)


def on_gpu(step: Step) -> Step:
    moved = {name: getattr(step.values, name).cuda() for name in TENSORS}
    there = replace(step, q=step.q.cuda(), query_start_loc=step.query_start_loc.cuda())
    return with_values(there, **moved)


def plan_for(step: Step, **changes: object) -> pagedmla.Plan:
    arguments: dict[str, object] = {
        "layout": step.layout, "num_heads": step.case.heads, "page_size": step.case.page_size, "max_batch": 8,
        "max_tokens": 64, "max_cache_length": 4096, "dtype": torch.bfloat16, "device": "cuda",
        "sm_scale": step.sm_scale, "executor": "cutlass", **changes,
    }  # fmt: skip
    return pagedmla.plan(**arguments)  # type: ignore[arg-type]


def attend(step: Step, plan: pagedmla.Plan | None, **changes: object) -> tuple[Tensor, Tensor]:
    call = {**step.call(), "plan": plan, **changes}
    return pagedmla.attend(step.q, step.values, step.layer, **call)  # type: ignore[arg-type]


def assert_near(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], bounds: tuple[float, float]) -> None:
    (out, lse), (want_out, want_lse) = (each.cpu() for each in got), want
    live = want_lse != -torch.inf
    assert torch.equal(lse == -torch.inf, ~live)
    assert bool((out[~live] == 0).all())
    assert float((out.double() - want_out)[live].norm() / want_out[live].norm()) <= bounds[0]
    assert float((lse.double() - want_lse)[live].abs().max()) <= bounds[1]


@pytest.mark.parametrize("layout", ["fp8_rope_bf16", "fp8_rope_bf16_prescaled", "fp8_flat"])
@pytest.mark.parametrize(
    ("precision", "heads", "form", "bounds"),
    [
        ("auto", 16, "fp16_r16", FLOAT16), ("auto", 32, "fp8x2_r32", TWO_TERMS),
        ("auto", 64, "fp8x2_r64", TWO_TERMS), ("auto", 128, "fp8x2_r64", TWO_TERMS),
        ("fp8x2", 16, "fp8x2_r16", TWO_TERMS), ("fp8x2", 32, "fp8x2_r32", TWO_TERMS),
        ("fp8", 64, "fp8x1_r64", ONE_TERM), ("fp8", 128, "fp8x1_r128", ONE_TERM), ("fp16", 128, "fp16_r32", FLOAT16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("partitions", [1, None])
def test_planned_steps(
    layout: str, precision: str, heads: int, form: str, bounds: tuple[float, float], partitions: int | None
) -> None:
    case = StepCase((1, 1, 1), (600, 4096, 513), page_size=64, heads=heads)
    step = build_step(case, layout, dtype=torch.bfloat16)
    plan = plan_for(step, num_partitions=partitions, precision=precision)
    assert plan.attend_choice.executor.name == "cutlass"
    assert f"_{form}_" in plan.explain().splitlines()[2]  # of steps with one token a request
    assert_near(attend(on_gpu(step), plan, check=True), step.dense_attention(), bounds)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_short_steps_are_exact(page_size: int, heads: int) -> None:
    """16, 32 and 128 rows: the last take float16 in four tiles."""
    case = StepCase((1, 2), (90, 511), page_size=page_size, heads=heads)
    step = build_step(case, "fp8_rope_bf16", dtype=torch.bfloat16)
    assert_near(attend(on_gpu(step), plan_for(step)), step.dense_attention(), FLOAT16)


def test_without_a_plan() -> None:
    step = build_step(StepCase((1, 1), (300, 2), page_size=64, heads=16), "fp8_rope_bf16", dtype=torch.bfloat16)
    there = with_values(on_gpu(step), mla_num_partitions=4)
    assert_near(attend(there, None, executor="cutlass"), step.dense_attention(), FLOAT16)


def test_prompts_behind_decode_rows() -> None:
    """Two launches, of two executors, into one output."""
    case = StepCase((1, 2, 40), (300, 400, 90), page_size=64, heads=16)
    step = build_step(case, "fp8_rope_bf16", dtype=torch.bfloat16)
    split = torch.tensor([2, 3], dtype=torch.int32)
    got = attend(with_values(on_gpu(step), mixed_step_split=split), plan_for(step))
    assert_near(got, step.dense_attention(), (5e-3, 1e-4))


@pytest.mark.parametrize(
    ("precision", "heads", "bounds"),
    [
        ("fp16", 16, FLOAT16), ("fp8x2", 32, SHORT_BOUNDS["fp8", 2]), ("fp8x2", 128, SHORT_BOUNDS["fp8", 2]),
        ("fp8", 128, SHORT_BOUNDS["fp8", 1]),
    ],
)  # fmt: skip
def test_a_captured_graph_replays_other_steps(precision: str, heads: int, bounds: tuple[float, float]) -> None:
    """Lengths, tables and queries change under the graph, from all requests long to one of a single key and padding."""
    cases = [
        StepCase((1, 1, 1, 1), (4000, 700, 600, 2000), page_size=64, heads=heads),
        StepCase((1, 1, 1, 1), (1, 3000, 0, 0), page_size=64, heads=heads),
        StepCase((1, 1, 1, 1), (512, 513, 4096, 64), page_size=64, heads=heads),
    ]
    steps = [build_step(case, "fp8_rope_bf16", dtype=torch.bfloat16) for case in cases]
    plan = plan_for(steps[0], precision=precision)
    pages = max(step.values.kv_blocks.shape[0] for step in steps)
    scale_pages = max(step.values.kv_scales.shape[0] for step in steps)  # type: ignore[union-attr]
    columns = max(step.values.lookup_table.shape[1] for step in steps)

    def grown(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The tensor at the front of a larger one, on the GPU, whose other bytes are 0xFF."""
        room = torch.full((*shape, tensor.element_size()), 0xFF, dtype=torch.uint8).view(tensor.dtype)[..., 0]
        room[tuple(slice(0, size) for size in tensor.shape)] = tensor
        return room.cuda()

    def inputs(step: Step) -> dict[str, Tensor]:
        values = step.values
        return {
            "kv_blocks": grown(values.kv_blocks.view(torch.uint8), (pages, *values.kv_blocks.shape[1:])).view(
                values.kv_blocks.dtype
            ),
            "kv_scales": grown(values.kv_scales, (scale_pages, *values.kv_scales.shape[1:])),  # type: ignore[arg-type, union-attr]
            "lookup_table": grown(values.lookup_table, (4, columns)),
            "scales_lookup_table": grown(values.scales_lookup_table, (4, columns)),  # type: ignore[arg-type]
            "cache_lengths": values.cache_lengths.cuda(),
        }

    held = inputs(steps[0])
    q, starts = steps[0].q.cuda(), steps[0].query_start_loc.cuda()
    captured = with_values(replace(steps[0], q=q, query_start_loc=starts), max_cache_length=4096, **held)
    attend(captured, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(captured, plan)
    for step in (*steps, steps[0]):
        for name, tensor in inputs(step).items():
            held[name].view(torch.uint8).copy_(tensor.view(torch.uint8))
        q.copy_(step.q)
        for result in got:
            result.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_near(got, step.dense_attention(), bounds)


def test_a_stride_that_no_map_takes_is_tritons_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDMLA_ALLOW_UNPROVEN", "1")
    step = build_step(StepCase((1, 1), (90, 40), page_size=64, heads=16), "fp8_rope_bf16", dtype=torch.bfloat16)
    there = on_gpu(step)
    wide = torch.zeros(2, 16, 580, dtype=torch.bfloat16, device="cuda")
    wide[..., :576] = there.q
    odd = replace(there, q=wide[..., :576])
    plan = plan_for(step, executor="auto")
    assert plan.attend_choice.executor.name == "cutlass"
    with pytest.warns(RuntimeWarning, match="Triton serves steps that mla_decode_"):
        got = attend(odd, plan)
    assert_near(got, step.dense_attention(), (5e-3, 1e-4))
    with pytest.raises(ValueError, match="q: expected rows that begin at multiples of 16 bytes"):
        attend(odd, plan_for(step))
