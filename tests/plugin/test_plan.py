"""A plan: capacities that it holds, what it refuses and how it says so, preparation from host copies, and `explain`."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.steps import Step, StepCase, build_step, with_values

import pagedmla
from pagedmla import KVCacheInputsPerDevice, Plan, get_layout
from pagedmla.hardware.cost import H200, attention_cost
from pagedmla.plugin import plan as plan_module
from pagedmla.plugin.executors import Choice, Configuration, choose
from pagedmla.plugin.step import bind_step

CASE = StepCase((1, 2), (5, 3), page_size=4)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEDMLA_CHECK", "PAGEDMLA_EXECUTORS", "PAGEDMLA_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def step() -> Step:
    return build_step(CASE, "fp8_rope_bf16")


ARGUMENTS: dict[str, Any] = {
    "layout": "fp8_rope_bf16", "num_heads": 2, "page_size": 4, "max_batch": 3, "max_tokens": 4, "max_cache_length": 8,
    "dtype": torch.float32,
}  # fmt: skip


def make(**changes: Any) -> Plan:
    return pagedmla.plan(**{**ARGUMENTS, "device": "cpu", "sm_scale": 576**-0.5, **changes})


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
    plan = make(num_partitions=5, max_cache_length=20)
    assert plan.workspace.partial_lse.shape == (5, 4, 2)
    assert plan.workspace.partial_lse.dtype == torch.float32
    assert plan.workspace.nbytes == 5 * 4 * 2 * 4


def test_the_plans_executor_serves(step: Step) -> None:
    plan = make(executor="reference")
    assert plan.attend_choice.executor.name == plan.store_choice.executor.name == "reference"
    want = pagedmla.attend(step.q, step.values, step.layer, executor="reference", **step.call())
    assert torch.equal(attend(step, plan)[0], want[0])
    assert torch.equal(attend(step, plan, executor="reference")[0], want[0])
    with pytest.raises(ValueError, match=r"executor: expected 'reference', as in the plan; got 'torch'\."):
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
    small = make(num_partitions=3, max_cache_length=16)
    starts = asking.query_start_loc
    for call in (lambda: attend(asking, small), lambda: small.prepare(asking.values, starts)):
        with pytest.raises(ValueError, match=r"plan holds 3 partitions; got 4\. Make a larger plan\."):
            call()
    attend(asking, make(num_partitions=4, max_cache_length=16))


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
    with pytest.raises(ValueError, match=r"layout: expected one of bf16, .*; got 'fp8'\."):
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
    nobody = build_step(StepCase((), (), page_size=4), "fp8_rope_bf16")
    assert make().prepare(nobody.values).key_tokens == 0


def test_padding_rows_count_no_keys() -> None:
    padded = build_step(StepCase((1, 1, 1), (8, 0, 0), page_size=4), "fp8_rope_bf16", table_dtype=torch.uint32)
    assert padded.values.cache_lengths.dtype == torch.uint32
    assert make().prepare(padded.values).key_tokens == 8


def on_a_device(step: Step) -> KVCacheInputsPerDevice:
    names = ("kv_blocks", "kv_scales", "cache_lengths", "lookup_table", "scales_lookup_table")
    return with_values(step, **{name: getattr(step.values, name).to("meta") for name in names}).values


def test_host_copies_stand_for_device_tensors(step: Step) -> None:
    """What is given as a host copy is taken, and nothing is read from the device: the meta device would raise."""
    lengths, starts = step.values.cache_lengths, step.query_start_loc
    away = on_a_device(step)
    plan = make()
    want = plan.prepare(step.values, starts)
    assert plan.prepare(away, starts, host_cache_lengths=lengths) == want
    for dtype in (torch.int64, torch.uint32):  # torch has no maximum of uint32
        given = starts.to(dtype)
        assert plan.prepare(step.values, given) == want
        assert plan.prepare(away, starts.to("meta"), host_cache_lengths=lengths, host_query_start_loc=given) == want
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
    plan = make(num_partitions=3, max_cache_length=12)
    shown = plan.explain(plan.prepare(step.values, step.query_start_loc)).splitlines()
    assert shown[0] == ("plan of layout fp8_rope_bf16, H=2, pages of 4, up to 3 requests, 4 tokens and 12 keys")
    assert shown[1:6] == [
        "  attend: torch (vectorised float32 in torch)",
        "    not cutlass: it runs on Hopper GPUs, not on cpu",
        "    not triton: queries over an FP8 cache are bfloat16 or float16, not float32",
        "  store: torch (vectorised float32 in torch)",
        "    not triton: on a CPU it runs in Triton's interpreter, which is for tests",
    ]
    # 8 keys of 644 bytes, 3 tokens of 2 heads that read 576, write 512 (float32) and one lse each
    bytes_moved = 8 * 644 + 3 * 2 * (4 * (576 + 512) + 4)
    flops = 2 * (576 + 512) * 2 * 11
    assert shown[6] == "  partitions: 3; workspace: 96 bytes"
    assert shown[7] == f"  this step, one layer: {bytes_moved:,} bytes, {flops:,} FLOPs"
    assert shown[8].startswith("  floor at published peaks (model, not measured): H100 SXM ")
    assert len(shown) == 9


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


def test_options_are_what_an_executor_is_told(step: Step) -> None:
    """An engine that makes an executor's options itself would miss what plans learn later: it takes the plan's."""
    bound = bind_step(step.values, step.layer, step.layout, step.query_start_loc, step.q, "q")
    plan = make(num_partitions=2, executor="reference", precision="fp16")
    told = plan.options(bound)
    assert (told.sm_scale, told.causal, told.num_partitions) == (plan.sm_scale, True, 2)
    assert (told.precision, told.max_keys, told.asked_for) == ("fp16", 8, True)
    assert told.workspace is plan.workspace
    assert not make().options(bound).asked_for


# -- what prepare and plan refuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("starts", [[0, 2, 1], [5, 6, 7]])
def test_prepare_refuses_query_starts_that_fall(step: Step, starts: list[int]) -> None:
    """Accepted, as negative query lengths: host copies were counted and never looked at."""
    with pytest.raises(ValueError, match=r"query_start_loc: expected 0 first, then rising or equal; got \["):
        make().prepare(step.values, torch.tensor(starts, dtype=torch.int32))


def test_prepare_looks_at_the_whole_step(step: Step) -> None:
    """A pool of another layout, no table and bounds of 0 went through: only capacities and widths were compared."""
    for changes, message in (
        ({"lookup_table": None}, "lookup_table: expected a tensor"),
        ({"max_cache_length": 0}, "max_cache_length: expected at least 5"),
        ({"kv_blocks": torch.zeros(3, 1, 2, 4, 1, 576)}, "kv_blocks: expected .* for layout fp8_rope_bf16"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            make().prepare(with_values(step, **changes).values, step.query_start_loc)


@pytest.mark.parametrize("name", ["lookup_table", "scales_lookup_table"])
def test_prepare_checks_ids_of_host_copies(step: Step, name: str) -> None:
    """Wild ids of a step on a GPU weren't found: prepare took host copies of lengths and none of tables."""
    away = on_a_device(step)
    lengths, tables = step.values.cache_lengths, {"lookup_table": step.values.lookup_table.clone()}
    tables["scales_lookup_table"] = step.values.scales_lookup_table.clone()
    known = {"host_cache_lengths": lengths, "host_query_start_loc": step.query_start_loc}
    copies = {f"host_{each}": table for each, table in tables.items()}
    assert make().prepare(away, **known, **copies) == make().prepare(step.values, step.query_start_loc)
    tables[name].view(torch.int32)[0, 1] = 99
    with pytest.raises(IndexError, match=rf"{name}: row 0, column 1 holds page id 99; kv_"):
        make().prepare(away, **known, **copies)
    own = with_values(step, **{name: tables[name]}).values
    with pytest.raises(IndexError, match=rf"{name}: row 0, column 1 holds page id 99; kv_"):
        make().prepare(own, step.query_start_loc)


def test_host_tables_fit_the_step(step: Step) -> None:
    away = on_a_device(step)
    known = {"host_cache_lengths": step.values.cache_lengths, "host_query_start_loc": step.query_start_loc}
    with pytest.raises(ValueError, match=r"host_lookup_table: expected \[2, "):
        make().prepare(away, **known, host_lookup_table=step.values.lookup_table[:1])
    with pytest.raises(ValueError, match="host_lookup_table: expected a tensor on the host; got one on meta"):
        make().prepare(away, **known, host_lookup_table=away.lookup_table)
    one_table = replace(away, scales_lookup_table=None)
    with pytest.raises(ValueError, match="host_scales_lookup_table: expected None, since there is no scales_lookup_"):
        make().prepare(one_table, **known, host_scales_lookup_table=step.values.lookup_table)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.int32}, "dtype: expected bfloat16 or float16 or float32 or float64; got torch.int32"),
        ({"dtype": "float32"}, "dtype: expected bfloat16 or .*; got float32"),
        ({"sm_scale": None}, "sm_scale: expected a number; got None"),
        ({"sm_scale": float("nan")}, "sm_scale: expected a finite number; got nan"),
        ({"causal": 1}, "causal: expected True or False; got 1"),
        ({"precision": "fp4"}, "precision: expected one of auto, fp8, fp8x2, fp16; got 'fp4'"),
        ({"layout": None}, "layout: expected a CacheLayout or its name; got None"),
    ],
)
def test_plan_refuses_what_is_not_of_its_kind(changes: dict[str, object], message: str) -> None:
    """Plans for integer queries or without a scale were made, and failed at their first step."""
    with pytest.raises((ValueError, TypeError), match=message):
        make(**changes)


def test_partitions_beyond_the_keys_take_no_memory() -> None:
    """A plan with 10 ** 6 partitions held a workspace for each, whatever the keys."""
    assert make(num_partitions=10**6).workspace.partial_lse.shape[0] == 2  # 8 keys in pages of 4


def test_a_plan_without_memory_explains_and_serves_nothing() -> None:
    """`explain` allocated the workspace, so it needed the device and the memory of what it only described."""
    arguments = {"layout": "bf16", "num_heads": 128, "page_size": 64, "max_batch": 128, "max_tokens": 10**7,
                 "max_cache_length": 2**20, "dtype": torch.bfloat16, "sm_scale": 1.0}  # fmt: skip
    drawn = pagedmla.plan(**arguments, device="cuda", num_partitions=10**7, reserve=False)
    assert drawn.device.type == "cuda"
    assert drawn.workspace.partial_lse.device.type == "meta"
    assert drawn.workspace.nbytes > 10**6
    assert "workspace" in drawn.explain()
    with pytest.raises(ValueError, match=r"plan holds no memory\. Make it with reserve=True"):
        attend(build_step(replace(CASE, page_size=4), "fp8_rope_bf16"), make(reserve=False))


def test_a_plan_names_its_device_by_number() -> None:
    """plan(device="cuda") refused queries on cuda:0: it compared with the name it was given, not with its memory."""
    made = make(device="cpu:0")
    assert made.device == made.workspace.partial_lse.device == torch.zeros(1).device


def test_the_current_card_is_named_before_anything_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for "cuda" made on card 0 and then on card 1 were one key for the check of kernels: the second went
    unchecked."""
    asked = []

    def chosen(configuration: Configuration, *rest: object) -> Choice:
        asked.append(configuration.device)
        return choose(replace(configuration, device=torch.device("cpu")), "torch")

    monkeypatch.setattr(plan_module, "choose", chosen)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert pagedmla.plan(**ARGUMENTS, device="cuda", sm_scale=1.0, reserve=False).device == torch.device("cuda", 1)
    assert asked == [torch.device("cuda", 1)] * 2


def test_a_device_that_torch_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match=r"device: expected a device of torch's; got 'gpu' \("):
        make(device="gpu")


def test_the_signature_is_what_a_caller_may_pass() -> None:
    """`help(pagedmla.plan)` showed a private parameter."""
    parameters = inspect.signature(pagedmla.plan).parameters
    chosen = ["device", "sm_scale", "causal", "num_partitions", "executor", "precision", "reserve"]
    assert list(parameters) == [*ARGUMENTS, *chosen]
    assert all(each.kind is each.KEYWORD_ONLY for each in parameters.values())
