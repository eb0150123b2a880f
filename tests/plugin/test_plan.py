"""A plan: capacities that it holds, what it refuses and how it says so, preparation from host copies, and `explain`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases.steps import Step, StepCase, build_step, with_values

import pagedmla
from pagedmla import Plan, get_layout
from pagedmla.plugin.cost import H200, attention_cost

CASE = StepCase((1, 2), (5, 3), page_size=4)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEDMLA_CHECK", "PAGEDMLA_EXECUTORS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def step() -> Step:
    return build_step(CASE, "fp8_rope_bf16")


def make(**changes: object) -> Plan:
    arguments: dict[str, object] = {
        "layout": "fp8_rope_bf16", "num_heads": 2, "page_size": 4, "max_batch": 3, "max_tokens": 4,
        "max_cache_length": 8, "dtype": torch.float32, "device": "cpu", "sm_scale": 576**-0.5, **changes,
    }  # fmt: skip
    return pagedmla.plan(**arguments)  # type: ignore[arg-type]


def attend(step: Step, plan: Plan, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {**step.call(), "sm_scale": 576**-0.5, **changes}
    return pagedmla.attend(step.q, step.values, step.layer, plan=plan, **arguments)  # type: ignore[arg-type]


# -- what a plan holds -------------------------------------------------------------------------------------------------


def test_a_plan_fixes_capacities_and_never_lengths() -> None:
    """vllm#51119: a plan made at one length and replayed at others. One plan serves every step that fits."""
    plan = make(num_partitions=3)
    for case in (CASE, StepCase((1,), (8,), page_size=4), StepCase((1, 1, 2), (1, 8, 2), page_size=4), StepCase((), ()),
                 StepCase((1, 1, 1), (0, 0, 4), page_size=4)):  # fmt: skip
        step = build_step(replace(case, page_size=4), "fp8_rope_bf16")
        got = attend(step, plan)
        want = pagedmla.attend(step.q, step.values, step.layer, **step.call())
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


def test_a_full_plan_holds() -> None:
    step = build_step(StepCase((1, 1, 2), (8, 8, 8), page_size=4), "fp8_rope_bf16")
    attend(step, make())


def test_workspace() -> None:
    plan = make(num_partitions=5)
    assert plan.workspace.partial_lse.shape == (5, 4, 2)
    assert plan.workspace.partial_lse.dtype == torch.float32
    assert plan.workspace.nbytes == 5 * 4 * 2 * 4


def test_the_plans_executor_serves(step: Step) -> None:
    plan = make(executor="reference")
    assert plan.attend_choice.executor.name == plan.store_choice.executor.name == "reference"
    want = pagedmla.attend(step.q, step.values, step.layer, executor="reference", **step.call())
    assert torch.equal(attend(step, plan)[0], want[0])
    assert torch.equal(attend(step, plan, executor="reference")[0], want[0])
    with pytest.raises(ValueError, match=r"executor: expected 'reference', as in the plan; got torch\."):
        attend(step, plan, executor="torch")


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"layout": "bf16"}, r"plan holds layout bf16; got fp8_rope_bf16\. Make another plan for it\."),
    ({"layout": get_layout("fp8_rope_bf16", latent=256)}, r"plan holds layout fp8_rope_bf16 \(latent 256\); got "
                                                          r"fp8_rope_bf16\."),
    ({"device": "meta", "executor": "torch"}, r"plan holds device meta; got cpu\."),
    ({"num_heads": 16}, r"plan holds H 16; got 2\."),
    ({"page_size": 64}, r"plan holds page size 64; got 4\."),
    ({"dtype": torch.bfloat16}, r"plan holds query dtype bfloat16; got float32\."),
    ({"sm_scale": 0.5}, r"plan holds sm_scale 0\.5; got 0\.04"),
    ({"causal": False}, r"plan holds causal False; got True\."),
    ({"max_batch": 1}, r"plan holds 1 requests; got 2\. Make a larger plan\."),
    ({"max_tokens": 2}, r"plan holds 2 tokens; got 3\. Make a larger plan\."),
    ({"max_cache_length": 4}, r"plan holds 4 keys; got 5\. Make a larger plan\."),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[next(iter(changes)) for changes, _ in REFUSED])
def test_a_plan_refuses_what_it_was_not_made_for(changes: dict[str, object], message: str, step: Step) -> None:
    with pytest.raises(ValueError, match=message):
        attend(step, make(**changes))


def test_metadata_may_not_ask_for_more_partitions_than_the_workspace(step: Step) -> None:
    asking = with_values(step, mla_num_partitions=4)
    for call in (lambda: attend(asking, make(num_partitions=3)), lambda: make(num_partitions=3).prepare(asking.values)):
        with pytest.raises(ValueError, match=r"plan holds 3 partitions; got 4\. Make a larger plan\."):
            call()
    attend(asking, make(num_partitions=4))


CAPACITIES = ["num_heads", "page_size", "max_batch", "max_tokens", "max_cache_length", "num_partitions"]


@pytest.mark.parametrize("name", CAPACITIES)
def test_capacities_are_positive_integers(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: expected at least 1; got 0\."):
        make(**{name: 0})
    for given in (2.0, True):
        with pytest.raises(TypeError, match=rf"{name}: expected an int; got {given}\."):
            make(**{name: given})


def test_a_plan_wants_an_executor_that_can_run() -> None:
    with pytest.raises(
        ValueError,
        match=r"executor: expected one that can run attend in layout fp8_rope_bf16 on meta; got 'reference', but it "
        r"runs on the "
        r"CPU only\.",
    ):
        make(device="meta", executor="reference")
    with pytest.raises(ValueError, match=r"layout: expected one of bf16, .*; got fp8\."):
        make(layout="fp8")


# -- preparation -------------------------------------------------------------------------------------------------------


def test_a_summary_counts_the_step(step: Step) -> None:
    summary = make().prepare(step.values, step.query_start_loc)
    assert summary == (
        type(summary)(
            decode_requests=2,
            decode_tokens=3,
            prefill_requests=0,
            query_tokens=3,
            key_tokens=8,
            scored_pairs=1 * 5 + 2 * 3,
            num_partitions=1,
        )
    )
    mixed = with_values(step, mixed_step_split=torch.tensor([1, 1], dtype=torch.int32), mla_num_partitions=2)
    summary = make(num_partitions=2).prepare(mixed.values, step.query_start_loc)
    assert (summary.decode_requests, summary.decode_tokens, summary.prefill_requests) == (1, 1, 1)
    assert summary.num_partitions == 2
    wrong = with_values(step, mixed_step_split=torch.tensor([1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"mixed_step_split: expected 1 query tokens for the first 1 requests; got"):
        make().prepare(wrong.values, step.query_start_loc)
    one_each = build_step(StepCase((1, 1), (5, 3), page_size=4), "fp8_rope_bf16")
    assert make().prepare(one_each.values).query_tokens == 2
    nobody = build_step(StepCase((), ()), "fp8_rope_bf16")
    assert make().prepare(nobody.values).key_tokens == 0


def test_padding_rows_count_no_keys() -> None:
    padded = build_step(StepCase((1, 1, 1), (8, 0, 0), page_size=4), "fp8_rope_bf16", table_dtype=torch.uint32)
    assert padded.values.cache_lengths.dtype == torch.uint32
    assert make().prepare(padded.values).key_tokens == 8


def test_host_copies_stand_for_device_tensors(step: Step) -> None:
    """What is given as a host copy is taken, and nothing is read from the device: the meta device would raise."""
    lengths, starts = step.values.cache_lengths, step.query_start_loc
    away = with_values(step, cache_lengths=lengths.to("meta")).values
    plan = make()
    want = plan.prepare(step.values, starts)
    assert plan.prepare(away, starts, host_cache_lengths=lengths) == want
    assert plan.prepare(away, starts.to("meta"), host_cache_lengths=lengths, host_query_start_loc=starts.long()) == want
    assert plan.prepare(away, host_cache_lengths=lengths, host_query_start_loc=starts) == want
    with pytest.raises(
        ValueError,
        match=r"host_cache_lengths: expected a copy \[2\] on the host, since the tensor itself is on a device; got "
        r"None\.",
    ):
        plan.prepare(away, starts)
    with pytest.raises(
        ValueError, match=r"host_query_start_loc: expected a copy \[3\] on the host, since .*; got None\."
    ):
        plan.prepare(away, starts.to("meta"), host_cache_lengths=lengths)
    with pytest.raises(
        ValueError, match=r"host_cache_lengths: expected \[2\] int32 or uint32 or int64; got \[3\] int32\."
    ):
        plan.prepare(away, starts, host_cache_lengths=starts)


def test_preparation_checks_capacities_and_tables(step: Step) -> None:
    for changes, message in (
        ({"max_batch": 1}, r"plan holds 1 requests; got 2\."),
        ({"max_tokens": 2}, r"plan holds 2 tokens; got 3\."),
        ({"max_cache_length": 4}, r"plan holds 4 keys; got 5\."),
    ):
        with pytest.raises(ValueError, match=message):
            make(**changes).prepare(step.values, step.query_start_loc)
    for name in ("lookup_table", "scales_lookup_table"):
        narrow = with_values(step, **{name: getattr(step.values, name)[:, :1]})
        with pytest.raises(
            ValueError, match=rf"{name}: expected at least 2 columns for the longest request; got \[2, 1\] int32\."
        ):
            make().prepare(narrow.values, step.query_start_loc)


# -- explain -----------------------------------------------------------------------------------------------------------


def test_explain(step: Step) -> None:
    plan = make(num_partitions=3)
    shown = plan.explain(plan.prepare(step.values, step.query_start_loc)).splitlines()
    assert shown[0] == ("plan of layout fp8_rope_bf16, H=2, pages of 4, up to 3 requests, 4 tokens and 8 keys")
    assert shown[1:5] == [
        "  attend: torch (vectorised float32 in torch)",
        "    not triton: queries over an FP8 cache are bfloat16 or float16, not float32",
        "  store: torch (vectorised float32 in torch)",
        "    not triton: on a CPU it runs in Triton's interpreter, which is for tests",
    ]
    # 8 keys of 644 bytes, 3 tokens of 2 heads that read 576, write 512 (float32) and one lse each
    bytes_moved = 8 * 644 + 3 * 2 * (4 * (576 + 512) + 4)
    flops = 2 * (576 + 512) * 2 * 11
    assert shown[5] == "  partitions: 3; workspace: 96 bytes"
    assert shown[6] == f"  this step, one layer: {bytes_moved:,} bytes, {flops:,} FLOPs"
    assert shown[7].startswith("  floor at published peaks (model, not measured): H100 SXM ")
    assert len(shown) == 8


def test_explain_says_why_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDMLA_EXECUTORS", "reference,torch")
    shown = make().explain()
    assert "    not reference: it is written to be read, not to be fast" in shown
    assert "  attend: torch (vectorised float32 in torch)" in shown
    assert "  the largest step, one layer: " in shown
    monkeypatch.delenv("PAGEDMLA_EXECUTORS")
    assert "  store: reference (asked for)" in make(executor="reference").explain()


def test_the_model_behind_the_floor() -> None:
    """128 requests over 4096 keys on an H200: 71 us at H 16, by bandwidth; at H 128, 78 with FP8 MMA, 148 with bf16."""
    layout = get_layout("fp8_rope_bf16")
    costs = {
        heads: attention_cost(layout, num_heads=heads, query_tokens=128, key_tokens=128 * 4096, scored_pairs=128 * 4096)
        for heads in (16, 128)
    }
    assert costs[16].floor_us(H200, fp8_mma=True) == pytest.approx(71.3, abs=0.1)
    assert costs[128].floor_us(H200, fp8_mma=True) == pytest.approx(77.8, abs=0.1)
    assert costs[128].floor_us(H200, fp8_mma=False) == pytest.approx(147.5, abs=0.1)
    assert costs[128].flops == 2176 * 128 * 128 * 4096
