"""attend, store and merge_states as a caller meets them: outputs, choice of executor, checks, every refusal by text.

What the operations compute is judged in tests/reference; here stands what surrounds it.
"""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from cases.arena import Geometry
from cases.steps import Step, StepCase, build_step, with_values
from torch import Tensor

import pagedmla
from pagedmla import KVCacheInputsPerDevice, PagedCacheValues, SplitKVHeadDims, get_layout
from pagedmla.plugin.executors import Configuration, choose, executors
from pagedmla.plugin.step import bind_step

CASE = StepCase((1, 2), (5, 3), page_size=4)  # pages 2 and 1, three query tokens


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEDMLA_CHECK", "PAGEDMLA_EXECUTORS", "PAGEDMLA_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def step() -> Step:
    return build_step(CASE, "fp8_rope_bf16")


def attend(step: Step, **changes: object) -> tuple[Tensor, Tensor]:
    arguments = {"q": step.q, "values": step.values, "layer": step.layer, **step.call(), **changes}
    return pagedmla.attend(**arguments)  # type: ignore[arg-type]


def store(step: Step, **changes: object) -> None:
    arguments = {
        "latent": torch.ones(3, 512), "rope": torch.ones(3, 64), "values": step.values, "layer": step.layer,
        "query_start_loc": step.query_start_loc, "layout": step.layout, **changes,
    }  # fmt: skip
    pagedmla.store(**arguments)  # type: ignore[arg-type]


# -- outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("executor", ["torch", "reference"])
def test_out_is_written_in_place(dtype: torch.dtype, executor: str) -> None:
    step = build_step(CASE, "fp8_rope_bf16", dtype=dtype)
    want, want_lse = attend(step, executor=executor)
    wide = torch.full((3, 2, 1024), torch.nan, dtype=dtype)
    out, lse = attend(step, executor=executor, out=wide[..., ::2])
    assert out.data_ptr() == wide.data_ptr()
    assert torch.equal(wide[..., ::2], want)
    assert bool(wide[..., 1::2].isnan().all())
    assert torch.equal(lse, want_lse)


def test_inputs_stay_as_they_are(step: Step) -> None:
    fields = [leaf for leaf in (*step.values.flatten()[0], step.q, step.query_start_loc) if isinstance(leaf, Tensor)]
    before = [leaf.clone().view(torch.uint8) for leaf in fields]
    attend(step)
    assert all(torch.equal(leaf.view(torch.uint8), was) for leaf, was in zip(fields, before))


def test_queries_of_any_stride(step: Step) -> None:
    want = attend(step)[0]
    heads_first = step.q.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.cat((step.q, step.q), -1)[..., :576]
    for q in (heads_first, wide):
        assert torch.equal(attend(replace(step, q=q))[0], want)


def test_a_bundle_of_one_device_serves(step: Step) -> None:
    """`attend` took one; a store to slots and `decompress` said that cache_lengths was a tuple."""
    bundle = PagedCacheValues.from_upstream([step.values], ["cpu"])
    assert torch.equal(attend(step, values=bundle)[0], attend(step)[0])
    where = {"starts": torch.tensor([0, 0]), "key_start_loc": torch.tensor([0, 4, 5]), "layout": step.layout}
    assert torch.equal(
        pagedmla.decompress(bundle, step.layer, **where), pagedmla.decompress(step.values, step.layer, **where)
    )
    before = step.values.kv_blocks.view(torch.uint8).clone()
    store(step, values=bundle, query_start_loc=None, slot_mapping=torch.tensor([3, -1, -1]))
    changed = (step.values.kv_blocks.view(torch.uint8) != before).flatten(2, -1).any(-1)
    assert changed.nonzero().tolist() == [[0, 0]]


@pytest.mark.parametrize("executor", ["torch", "reference", "triton"])
def test_results_carry_no_gradient(executor: str) -> None:
    """Queries of a model outside no_grad kept every chunk of keys for a backward pass that then failed."""
    step = build_step(CASE, "fp32")
    q = step.q.clone().requires_grad_()
    states = [*attend(step, q=q, executor=executor)]
    dense = {"sm_scale": 1.0, "query_start_loc": step.query_start_loc, "executor": executor}
    states += pagedmla.prefill(q[..., :64], q[..., :64], q[..., :32], **dense)
    states += pagedmla.merge_states([q, q], [q[..., 0], q[..., 0]], executor=executor)
    latent = torch.ones(3, 512, requires_grad=True)
    store(step, latent=latent, executor=executor)
    assert not any(state.requires_grad for state in (*states, step.values.kv_blocks))


def test_only_live_pages_are_touched(tmp_path: Path) -> None:
    """sglang#35291: the whole pool cast every layer. A pool of 16 GB, of which three pages live, costs three pages."""
    layout = get_layout("fp8_rope_bf16")
    geometry = Geometry(400_000, 1, 1, 64, 1, 640)
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=geometry.elements, dtype=torch.uint8)
    scales = torch.from_file(str(tmp_path / "scales"), shared=True, size=400_000 * 64, dtype=torch.float32)
    table = torch.tensor([[399_999, 7], [200_000, 0]], dtype=torch.int32)
    values = KVCacheInputsPerDevice(
        geometry.strided(pool.view(torch.float8_e4m3fn)), torch.tensor([99, 9], dtype=torch.int32), table, 1, 100, -1,
        kv_scales=scales.view(400_000, 1, 1, 64, 1, 1),
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    g = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, 100, 110], dtype=torch.int32)
    fill = replace(values, cache_lengths=torch.zeros(2, dtype=torch.int32))
    latent, rope = torch.randn(110, 512, generator=g), torch.randn(110, 64, generator=g)
    for executor in ("torch", "reference"):
        pagedmla.store(latent, rope, fill, 0, query_start_loc=starts, layout=layout, executor=executor)
        out, _ = pagedmla.attend(torch.randn(2, 4, 576, generator=g), values, 0, sm_scale=0.04, layout=layout,
                                 executor=executor, check=True)  # fmt: skip
        assert bool((out != 0).any())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


# -- the choice of an executor -----------------------------------------------------------------------------------------


def configuration(device: str = "cpu", operation: str = "attend") -> Configuration:
    return Configuration(operation, torch.device(device), get_layout("fp8_rope_bf16"))


def test_the_first_that_can_and_is_expected_to_win() -> None:
    chosen = choose(configuration())
    assert chosen.executor.name == "torch"
    assert dict(chosen.passed_over) == {
        "cutlass": "it runs on Hopper GPUs, not on cpu",
        "triton": "on a CPU it runs in Triton's interpreter, which is for tests",
    }
    assert chosen.reason == "vectorised float32 in torch"


def test_what_can_run_without_winning_is_the_fallback() -> None:
    chosen = choose(configuration("meta"))
    assert chosen.executor.name == "torch"
    assert chosen.reason.startswith("the first that can run it")
    assert chosen.last_resort
    assert dict(chosen.passed_over) == {
        "cutlass": "it runs on Hopper GPUs, not on meta",
        "triton": "Triton kernels run on cuda and cpu devices, not on meta",
        "reference": "it runs on the CPU only",
        "cutlass-model": "the model runs on the CPU, not on meta",
    }


def test_users_may_edit_the_order(monkeypatch: pytest.MonkeyPatch, step: Step) -> None:
    monkeypatch.setenv("PAGEDMLA_EXECUTORS", "reference, torch")
    chosen = choose(configuration())
    assert chosen.executor.name == "torch"  # the reference can run, but isn't written to be fast
    assert dict(chosen.passed_over) == {"reference": "it is written to be read, not to be fast"}
    monkeypatch.setenv("PAGEDMLA_EXECUTORS", "reference")
    chosen = choose(configuration())
    assert (chosen.executor.name, chosen.passed_over) == ("reference", ())
    assert torch.equal(attend(step)[0], attend(step, executor="reference")[0])
    with pytest.raises(
        ValueError,
        match=r"executor: expected one that can run attend in layout fp8_rope_bf16 on meta; got none \(reference: it "
        r"runs on "
        r"the CPU only\)\.",
    ):
        choose(configuration("meta"))
    assert choose(configuration("meta"), "torch").reason == "asked for"
    monkeypatch.setenv("PAGEDMLA_EXECUTORS", "torch,cuda")
    known = "cutlass, triton, torch, reference, cutlass-model"
    with pytest.raises(ValueError, match=rf"PAGEDMLA_EXECUTORS: expected one of {known}; got 'cuda'\."):
        attend(step)


def test_an_executor_that_was_asked_for_must_be_able() -> None:
    names = ", ".join(executor.name for executor in executors())
    with pytest.raises(ValueError, match=rf"executor: expected one of auto, {names}; got 'flash'\."):
        choose(configuration(), "flash")
    with pytest.raises(
        ValueError,
        match=r"executor: expected one that can run store in layout fp8_rope_bf16 on meta; got 'reference', but it "
        r"runs on the "
        r"CPU only\.",
    ):
        choose(configuration("meta", "store"), "reference")


# -- checks of values --------------------------------------------------------------------------------------------------


def test_table_width_is_checked_against_lengths(step: Step) -> None:
    narrow = with_values(step, lookup_table=step.values.lookup_table[:, :1])
    message = r"lookup_table: expected at least 2 columns for row 0, which has 5 tokens in pages of 4; got 1\."
    for call in (attend, store):
        with pytest.raises(ValueError, match=message):
            call(narrow)
    narrow = with_values(step, scales_lookup_table=step.values.scales_lookup_table[:, :1])
    with pytest.raises(ValueError, match="scales_" + message):
        attend(narrow)


def test_ids_are_checked_against_both_pools(step: Step) -> None:
    """b12x#160: an id may fit the value pool and not the scale pool, or the reverse."""
    table = step.values.lookup_table.clone()
    table[1, 0] = 6
    message = r"lookup_table: row 1, column 0 holds page id 6; kv_blocks has 6 pages"
    with pytest.raises(IndexError, match=message):
        attend(with_values(step, lookup_table=table))
    scales = step.values.scales_lookup_table.clone()
    scales[0, 1] = 8
    with pytest.raises(
        IndexError, match=r"scales_lookup_table: row 0, column 1 holds page id 8; kv_scales has 8 pages"
    ):
        attend(with_values(step, scales_lookup_table=scales))
    scales[0, 1] = 7  # beyond the value pool, within the scale pool
    attend(with_values(step, scales_lookup_table=scales))


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_of_live_slots_are_checked_on_request(sigma: float, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """trtllm#16916: a scale that isn't finite and positive, by row, column, slot and page."""
    page = int(step.values.scales_lookup_table[0, 1])
    step.values.kv_scales[page, 0, 1, 0] = sigma
    attend(step)
    where = rf"row 0, column 1, slot 0 of scale page {page}, layer 1"
    message = rf"kv_scales: expected finite scales > 0; got \[{sigma}\] at {where}\."
    with pytest.raises(ValueError, match=message):
        attend(step, check=True)
    monkeypatch.setenv("PAGEDMLA_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        attend(step)
    attend(step, check=False)


@pytest.mark.parametrize("layout", ["fp8_rope_bf16", "fp8_flat", "fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("column", [0, -1], ids=["latent", "rope"])
def test_nan_in_live_slots_is_found_on_request(layout: str, column: int) -> None:
    step = build_step(CASE, layout)
    page = int(step.values.lookup_table[0, 1])
    row = step.values.kv_blocks.view(torch.uint8)[page, 0, 1, 0, 0]
    row[[0, 1] if column == 0 else [-2, -1]] = torch.tensor(
        [0xC0, 0x7F], dtype=torch.uint8
    )  # -2 and NaN, or a NaN of bf16
    with pytest.raises(
        ValueError,
        match=rf"kv_blocks: expected no NaN in live slots; got one at row 0, column 1, slot 0 of value page {page}, "
        rf"layer 1\.",
    ):
        attend(step, check=True)


def test_inline_scales_are_checked_too() -> None:
    """The refusal named kv_scales and a scale page; fp8_ds_mla has neither, its scales lie in the value pages."""
    step = build_step(CASE, "fp8_ds_mla")
    page = int(step.values.lookup_table[1, 0])
    step.values.kv_blocks.view(torch.uint8)[page, 0, 1, 2, 0, 516:520] = 0
    with pytest.raises(
        ValueError,
        match=rf"kv_blocks: expected finite scales > 0; got \[.*, 0\.0, .*\] at row 1, column 0, slot 2 of value page "
        rf"{page}",
    ):
        attend(step, check=True)


def test_bounds_that_lie_are_found_on_request(step: Step) -> None:
    for call in (attend, store):
        with pytest.raises(ValueError, match=r"max_prompt_length: expected at least 2, the longest query; got 1\."):
            call(with_values(step, max_prompt_length=1), check=True)
        with pytest.raises(ValueError, match=r"max_cache_length: expected at least 5, the longest kv_len; got 4\."):
            call(with_values(step, max_cache_length=4), check=True)
        call(with_values(step, max_prompt_length=1, max_cache_length=4))


# -- refusals ----------------------------------------------------------------------------------------------------------

META = "meta"

ATTENDING = [
    ({"q": torch.zeros(3, 576)}, ValueError, r"q: expected \[\*, \*, \*\] bfloat16 or .*; got \[3, 576\] float32\. It "
                                             r"is \[T, H, "
     r"latent \+ rope\]\."),
    ({"q": torch.zeros(3, 2, 576, dtype=torch.int32)}, ValueError, r"q: expected .* float64; got \[3, 2, 576\] "
                                                                   r"int32\."),
    ({"q": [1.0]}, TypeError, r"q: expected a tensor \[\*, \*, \*\] .*; got list\."),
    ({"q": torch.zeros(3, 2, 192)}, ValueError, r"q: expected \[\*, \*, 576\] for layout fp8_rope_bf16; got \[3, 2, "
                                                r"192\] float32\. "
     r"Fold W_UK in first \(absorbed query\)\."),
    ({"q": torch.zeros(3, 2, 576, device=META)}, ValueError, r"q: expected a tensor on cpu, as kv_blocks; got one on "
                                                             r"meta\."),
    ({"q": torch.zeros(2, 2, 576)}, ValueError, r"query_start_loc: expected at most 2, the tokens of q, at its end; "
                                                r"got 3\."),
    ({"out": torch.zeros(3, 2, 576)}, ValueError, r"out: expected \[3, 2, 512\] float32; got \[3, 2, 576\] float32\."),
    ({"out": torch.zeros(3, 2, 512).bfloat16()}, ValueError, r"out: expected \[3, 2, 512\] float32; got \[3, 2, 512\] "
                                                             r"bfloat16"),
    ({"out": torch.zeros(3, 2, 512, device=META)}, ValueError, r"out: expected a tensor on cpu; got one on meta\."),
    ({"layer": 2}, IndexError, r"layer: 2 is out of range for a cache of 2 layers"),
    ({"layer": -1}, IndexError, r"layer: -1 is out of range for a cache of 2 layers"),
    ({"layer": torch.tensor(1)}, TypeError, r"layer: expected an int; got \[\] int64\."),
    ({"layer": True}, TypeError, r"layer: expected an int; got True\."),
    ({"query_start_loc": None}, ValueError, r"q: expected 2 tokens, one for each request, since query_start_loc is "
                                            r"absent; got 3\. "
     r"For several tokens a request pass query_start_loc \[B \+ 1\] int32\."),
    ({"query_start_loc": torch.tensor([0, 1])}, ValueError, r"query_start_loc: expected \[3\] int32 or uint32 or "
                                                            r"int64; got \[2\]"),
    ({"query_start_loc": torch.tensor([0.0, 1.0, 3.0])}, ValueError, r"query_start_loc: expected \[3\] int32 .*; got "
                                                                     r"\[3\] float32"),
    ({"query_start_loc": torch.tensor([0, 1, 3], device=META)}, ValueError,
     r"query_start_loc: expected a tensor on cpu, as kv_blocks; got one on meta\."),
    ({"query_start_loc": torch.tensor([1, 1, 3])}, ValueError,
     r"query_start_loc: expected 0 first, then rising or equal; got \[1, 1, 3\]\."),
    ({"query_start_loc": torch.tensor([0, 2, 1])}, ValueError,
     r"query_start_loc: expected 0 first, then rising or equal; got \[0, 2, 1\]\."),
    ({"layout": "fp8_flat"}, ValueError, r"kv_blocks: expected \[\*, 1, \*, \*, 1, 576\] float8_e4m3fn or uint8 for "
                                         r"layout fp8_flat; "
     r"got \[6, 1, 2, 4, 1, 640\] float8_e4m3fn\. A pool of such rows is fp8_rope_bf16 or fp8_rope_bf16_prescaled\."),
    ({"layout": get_layout("bf16")}, ValueError, r"kv_blocks: expected \[\*, 1, \*, \*, 1, 576\] bfloat16 for layout "
                                                 r"bf16; got "),
    ({"layout": None}, TypeError, r"layout: expected a CacheLayout or its name; got None\."),
    ({"values": {}}, TypeError, r"values: expected PagedCacheValues or KVCacheInputsPerDevice; got dict\."),
    ({"executor": "cuda"}, ValueError, r"executor: expected one of auto, .*; got 'cuda'\."),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), ATTENDING, ids=range(len(ATTENDING)))
def test_attend_refuses_by_name(changes: dict[str, object], error: type[Exception], message: str, step: Step) -> None:
    with pytest.raises(error, match=message):
        attend(step, **changes)


SPLITS = [
    (torch.tensor([1, 1, 1], dtype=torch.int32), r"mixed_step_split: expected \[2\] int32; got \[3\] int32\. It is "
                                                 r"\(requests, "
     r"query tokens\), on the host\."),
    (torch.tensor([1, 1]), r"mixed_step_split: expected \[2\] int32; got \[2\] int64\."),
    (torch.zeros(2, dtype=torch.int32, device=META), r"mixed_step_split: expected a tensor on the host; got one on "
                                                     r"meta\."),
    (torch.tensor([3, 3], dtype=torch.int32), r"mixed_step_split: expected 0 to 2 requests; got \[3, 3\]\."),
    (torch.tensor([-1, 0], dtype=torch.int32), r"mixed_step_split: expected 0 to 2 requests; got \[-1, 0\]\."),
    (torch.tensor([1, 2], dtype=torch.int32), r"mixed_step_split: expected 1 query tokens for the first 1 requests; "
                                              r"got \[1, 2\]\."),
]  # fmt: skip


@pytest.mark.parametrize(("split", "message"), SPLITS, ids=range(len(SPLITS)))
def test_mixed_step_split_is_checked(split: Tensor, message: str, step: Step) -> None:
    with pytest.raises(ValueError, match=message):
        attend(with_values(step, mixed_step_split=split))


SLOTS = torch.tensor([0, 1, -1])

STORING = [
    ({"latent": torch.ones(3, 1, 512)}, r"latent: expected \[\*, \*\] bfloat16 or .*; got \[3, 1, 512\] float32\."),
    ({"latent": torch.ones(3, 512, dtype=torch.int8)}, r"latent: expected \[\*, \*\] .* float64; got \[3, 512\] "
                                                       r"int8\."),
    ({"rope": torch.ones(2, 64)}, r"rope: expected \[3, \*\] .*; got \[2, 64\] float32\. It has a row for each row of "
                                  r"latent\."),
    ({"latent": torch.ones(3, 576)}, r"latent: expected \[\*, 512\] for layout fp8_rope_bf16; got \[3, 576\] "
                                     r"float32\."),
    ({"rope": torch.ones(3, 32)}, r"rope: expected \[\*, 64\] for layout fp8_rope_bf16; got \[3, 32\] float32\."),
    ({"latent": torch.ones(3, 512, device=META)}, r"latent: expected a tensor on cpu, as kv_blocks; got one on meta\."),
    ({"rope": torch.ones(3, 64, device=META)}, r"rope: expected a tensor on cpu, as kv_blocks; got one on meta\."),
    ({"slot_mapping": SLOTS}, r"query_start_loc: expected None, since slot_mapping says where tokens go; got \[3\] "
                              r"int32\."),
    ({"query_start_loc": None, "scales_slot_mapping": SLOTS},
     r"slot_mapping: expected \[T\] int64 beside scales_slot_mapping; got None\."),
    ({"query_start_loc": None, "slot_mapping": SLOTS[:2]}, r"slot_mapping: expected \[3\] int64; got \[2\] int64\."),
    ({"query_start_loc": None, "slot_mapping": SLOTS.int()}, r"slot_mapping: expected \[3\] int64; got \[3\] int32\."),
    ({"query_start_loc": None, "slot_mapping": SLOTS, "scales_slot_mapping": SLOTS.int()},
     r"scales_slot_mapping: expected \[3\] int64; got \[3\] int32\."),
    ({"query_start_loc": None, "slot_mapping": SLOTS.to(META)}, r"slot_mapping: expected a tensor on cpu, as "
                                                                r"kv_blocks; got one on meta\."),
    ({"query_start_loc": None}, r"latent: expected 2 tokens, one for each request, since query_start_loc is absent; "
                                r"got 3\."),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), STORING, ids=range(len(STORING)))
def test_store_refuses_by_name(changes: dict[str, object], message: str, step: Step) -> None:
    before = step.values.kv_blocks.view(torch.uint8).clone()
    with pytest.raises(ValueError, match=message):
        store(step, **changes)
    assert torch.equal(step.values.kv_blocks.view(torch.uint8), before)


@pytest.mark.parametrize(
    ("slots", "scale_slots", "message"),
    [
        ([0, 24, 1], None, r"slot_mapping: token 1 has slot 24; kv_blocks has 6 pages of 4 \(24 slots\)"),
        ([0, -2, 1], None, r"slot_mapping: token 1 has slot -2; kv_blocks has 6 pages of 4 \(24 slots\)"),
        ([0, 2, 1], [0, 2, 32], r"scales_slot_mapping: token 2 has slot 32; kv_scales has 8 pages of 4 \(32 slots\)"),
    ],
)
def test_slots_are_checked_on_request(
    slots: list[int], scale_slots: list[int] | None, message: str, step: Step
) -> None:
    before = step.values.kv_blocks.view(torch.uint8).clone()
    scales = None if scale_slots is None else torch.tensor(scale_slots)
    with pytest.raises(IndexError, match=message):
        store(step, query_start_loc=None, slot_mapping=torch.tensor(slots), scales_slot_mapping=scales, check=True)
    assert torch.equal(step.values.kv_blocks.view(torch.uint8), before)


def test_merge_states_takes_sequences() -> None:
    outs, lses = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2)
    by_list = pagedmla.merge_states(list(outs), tuple(lses))
    assert torch.equal(by_list[0], pagedmla.merge_states(outs, lses)[0])


# -- devices whose values can't be read --------------------------------------------------------------------------------


def test_nothing_is_read_from_a_device() -> None:
    """On the meta device a read raises: binding a step there, with wild values, proves that none happens."""
    values = KVCacheInputsPerDevice(
        torch.empty(6, 1, 2, 4, 1, 640, dtype=torch.float8_e4m3fn, device=META),
        torch.empty(2, dtype=torch.int32, device=META),
        torch.empty(2, 3, dtype=torch.uint32, device=META),
        torch.tensor([5], dtype=torch.uint32),
        9,
        -1,
        kv_scales=torch.empty(8, 1, 2, 4, 1, 1, device=META),
        attention_dispatch_metadata=torch.empty(3, dtype=torch.int64, device=META),
        mla_num_partitions=torch.tensor([4]),
        mixed_step_split=torch.tensor([1, 17], dtype=torch.int32),
    )
    q = torch.empty(7, 2, 576, device=META)
    starts = torch.empty(3, dtype=torch.int32, device=META)
    bound = bind_step(values, 0, "fp8_rope_bf16", starts, q, "q")
    assert not bound.on_host
    bound.check_reads(None)
    bound.check_writes(None)
    assert bound.max_query_length == 5  # the caller's bound
    assert bound.decode_requests() == 1
    assert bound.values.dispatch(bound.max_query_length).num_partitions == 4


@pytest.mark.parametrize("executor", ["auto", "torch", "reference", "triton", "cutlass-model", "cutlass"])
def test_tensors_without_numbers_are_refused_by_every_call(step: Step, executor: str, tmp_path: Path) -> None:
    """The meta device ended in NotImplementedError from within torch, once in a file that held nothing."""
    names = ("kv_blocks", "kv_scales", "cache_lengths", "lookup_table", "scales_lookup_table")
    values = with_values(step, **{name: getattr(step.values, name).to(META) for name in names}).values
    starts, q = step.query_start_loc.to(META), step.q.to(META)
    latent, rope, slots = torch.ones(3, 512, device=META), torch.ones(3, 64, device=META), torch.arange(3, device=META)
    where = {"values": values, "executor": executor}
    keys = torch.ones(3, 2, 64, device=META)
    no_blocks = r"^kv_blocks: expected a tensor on cpu or cuda; got \[.*\] float8_e4m3fn on meta, which holds no "
    for check in (None, True):
        with pytest.raises(ValueError, match=no_blocks):
            attend(step, q=q, query_start_loc=starts, check=check, **where)
        with pytest.raises(ValueError, match=no_blocks):
            store(step, latent=latent, rope=rope, query_start_loc=starts, check=check, **where)
        with pytest.raises(ValueError, match=no_blocks):
            store(step, latent=latent, rope=rope, query_start_loc=None, slot_mapping=slots, check=check, **where)
        with pytest.raises(ValueError, match=no_blocks):
            pagedmla.decompress(
                layer=0, layout=step.layout, starts=starts[:2], key_start_loc=starts, out=q[:, 0], check=check, **where
            )
    if executor in ("auto", "torch"):  # the only one that a plan takes there
        plan = pagedmla.plan(
            layout=step.layout, num_heads=2, page_size=4, max_batch=2, max_tokens=3, max_cache_length=8, dtype=q.dtype,
            device=META, sm_scale=step.sm_scale, executor=executor,
        )  # fmt: skip
        with pytest.raises(ValueError, match=no_blocks):
            attend(step, q=q, query_start_loc=starts, plan=plan, values=values)
    with pytest.raises(ValueError, match=r"^q: expected a tensor on cpu or cuda; got \[3, 2, 64\] float32 on meta"):
        pagedmla.prefill(keys, keys, keys, sm_scale=1.0, query_start_loc=starts, executor=executor)
    with pytest.raises(
        ValueError, match=r"^outs: expected a tensor on cpu or cuda; got \[1, 3, 2, 64\] float32 on meta"
    ):
        pagedmla.merge_states([keys], [keys[..., 0]], executor=executor)
    with pytest.raises(ValueError, match=no_blocks):
        pagedmla.inspect(values, layout=step.layout)
    with pytest.raises(ValueError, match=no_blocks):
        pagedmla.save_cache(tmp_path / "cache.pt", values, step.layout, starts)
    assert not any(tmp_path.iterdir())


# -- found by a review -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("starts", [[0, 2**32, 2**32], [2**32, 1, 2 + 2**32], [0, -1, 3]])
def test_query_starts_are_checked_before_they_are_narrowed(step: Step, starts: list[int]) -> None:
    """int64 starts wrapped to int32 first: 2 ** 32 passed as 0."""
    for call in (attend, store):
        with pytest.raises(ValueError, match="query_start_loc: expected"):
            call(step, query_start_loc=torch.tensor(starts))


def flat_step(sigma: Tensor) -> Step:
    step = build_step(CASE, "fp8_flat")
    return with_values(step, kv_scales=sigma.expand(step.values.kv_scales.shape))


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
def test_a_store_checks_the_scale_that_it_reads(sigma: float) -> None:
    """check=True looked at ids alone, and a store divided by a tensor's scale of 0."""
    step = flat_step(torch.tensor([sigma]))
    before = step.values.kv_blocks.view(torch.uint8).clone()
    with pytest.raises(ValueError, match="kv_scales: expected finite numbers of at least"):
        store(step, check=True)
    with pytest.raises(ValueError, match="kv_scales: expected finite numbers of at least"):
        store(step, query_start_loc=None, slot_mapping=SLOTS, check=True)
    assert torch.equal(step.values.kv_blocks.view(torch.uint8), before)
    store(flat_step(torch.tensor([0.5])), check=True)


def test_a_scale_slot_outside_its_pool_is_an_error_under_check(step: Step) -> None:
    """Scale slot -1 beside a real value slot was a warning under check, and padding with scale slot 999 an error."""
    call = {"query_start_loc": None, "check": True, "slot_mapping": torch.tensor([0, 1, -1])}
    with pytest.raises(IndexError, match="scales_slot_mapping: token 0 has slot -1; kv_scales has 8 pages of 4"):
        store(step, scales_slot_mapping=torch.tensor([-1, 1, 2]), **call)
    store(step, scales_slot_mapping=torch.tensor([0, 1, 999]), **call)


@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
def test_scale_slots_where_there_is_no_scale_pool(layout: str) -> None:
    """scales_slot_mapping was silently ignored."""
    step = build_step(CASE, layout)
    with pytest.raises(ValueError, match=r"scales_slot_mapping: expected None, since layout .* keeps no scale pool"):
        store(step, query_start_loc=None, slot_mapping=SLOTS, scales_slot_mapping=SLOTS)


@pytest.mark.parametrize("length", [-5, -(2**31)])
def test_lengths_below_padding_are_refused_under_check(step: Step, length: int) -> None:
    """A padding row has minus its query tokens; anything below that passed as padding too."""
    broken = with_values(step, cache_lengths=torch.tensor([4, length], dtype=torch.int32))
    for call in (attend, store):
        with pytest.raises(
            ValueError, match=f"cache_lengths: expected at least 0, or -2 for padding; got {length} in row 1"
        ):
            call(broken, check=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sm_scale": None}, "sm_scale: expected a number; got None"),
        ({"sm_scale": "1"}, "sm_scale: expected a number; got '1'"),
        ({"sm_scale": torch.ones(2)}, r"sm_scale: expected a number; got \[2\] float32"),
        ({"sm_scale": float("nan")}, "sm_scale: expected a finite number; got nan"),
        ({"sm_scale": float("inf")}, "sm_scale: expected a finite number; got inf"),
        ({"causal": "no"}, "causal: expected True or False; got 'no'"),
        ({"check": "no"}, "check: expected True or False; got 'no'"),
        ({"plan": 3}, "plan: expected a Plan, made by plan.*; got int"),
        ({"q": torch.zeros(3, 0, 576)}, r"q: expected at least 1 head; got \[3, 0, 576\]"),
        ({"out": torch.zeros(1, 2, 512).expand(3, -1, -1)}, "out: expected an address for each element; got strides"),
        ({"out": torch.zeros(3, 2, 512, requires_grad=True)}, "out: expected a tensor that doesn't require grad; got"),
    ],
)
def test_arguments_of_attend_that_are_not_of_their_kind(step: Step, changes: dict[str, object], message: str) -> None:
    """NaN came back for a scale of NaN, "no" counted as true, and torch's own errors named no argument."""
    with pytest.raises((ValueError, TypeError), match=message):
        attend(step, **changes)


def test_fields_do_not_sleep(step: Step) -> None:
    """split_head_dims was never compared with anything, and store took a split that isn't the step's."""
    wrong = with_values(step, split_head_dims=SplitKVHeadDims(3, 4))
    for call in (attend, store):
        with pytest.raises(ValueError, match=r"split_head_dims: expected None or SplitKVHeadDims\(key_head_dim=576, "):
            call(wrong)
    attend(with_values(step, split_head_dims=SplitKVHeadDims(576, 512)))
    with pytest.raises(ValueError, match="mixed_step_split: expected 1 query tokens for the first 1 requests"):
        store(with_values(step, mixed_step_split=torch.tensor([1, 2], dtype=torch.int32)))
    with pytest.raises(TypeError, match="kv_blocks: expected a tensor; got None"):
        attend(with_values(step, kv_blocks=None))


@pytest.mark.parametrize("executor", ["torch", "reference"])
def test_partitions_beyond_the_pages_cost_nothing(step: Step, executor: str) -> None:
    """10 ** 6 partitions of two pages looped for minutes over empty parts."""
    want = attend(step, executor=executor)
    got = attend(with_values(step, mla_num_partitions=10**9), executor=executor)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


def test_any_integer_names_a_layer(step: Step) -> None:
    assert torch.equal(attend(step, layer=numpy.int64(step.layer))[0], attend(step)[0])


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "outs: expected a tensor, or at least one; got none"),
        ([torch.zeros(1, 1, 4), torch.zeros(2, 1, 4)], "outs: expected tensors all alike"),
        ([3], "outs: expected tensors all alike"),
        (3, "outs: expected a tensor, or a sequence of them; got int"),
        ([torch.zeros(1), torch.zeros(1, device=META)], r"outs\[1\]: expected a tensor on cpu, as outs\[0\]"),
    ],
    ids=range(5),
)
def test_states_to_merge_are_alike(states: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pagedmla.merge_states(states, states)  # type: ignore[arg-type]


def test_what_is_no_cache_is_refused_by_every_call(step: Step) -> None:
    """A store to slots and `decompress` looked for cache_lengths in whatever came."""
    nowhere = {"starts": torch.tensor([0]), "key_start_loc": torch.tensor([0, 1]), "layout": step.layout}
    for call in (
        lambda: attend(step, values=None),
        lambda: store(step, values=None),
        lambda: store(step, values=None, query_start_loc=None, slot_mapping=SLOTS),
        lambda: pagedmla.decompress(None, 0, **nowhere),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="values: expected PagedCacheValues or KVCacheInputsPerDevice; got None"):
            call()
