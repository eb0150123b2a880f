"""The bench's own code, on a CPU with a clock that says 10 microseconds: its arithmetic and its errors, no speeds.

3 heads fill no tile; 65 keys begin a second page; 2 query tokens of 5 keys need a mask; ragged lengths need padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import pagedmla
from pagedmla.bench import contenders
from pagedmla.bench.cases import (
    FLAGSHIP,
    IMBALANCED,
    PAGE_SIZE,
    SM_SCALE,
    Case,
    build,
    cpu_cases,
    full_gpu_cases,
    gpu_cases,
    grid,
    quick_cases,
)
from pagedmla.bench.clocks import Call, CpuClock, least_microseconds
from pagedmla.bench.contenders import Contender
from pagedmla.bench.judge import Judge, meaning
from pagedmla.bench.measure import Measured, measure
from pagedmla.bench.peers import Absent
from pagedmla.bench.roofs import cpu_roof, gpu_named
from pagedmla.bench.rows import Row
from pagedmla.hardware.cost import B200, H100, H200, Gpu, Roof

CPU = torch.device("cpu")


class TenMicroseconds:
    together = True
    name = "ten microseconds"

    def __call__(self, calls: Sequence[Call]) -> list[float]:
        for call in calls:
            call()
        return [10.0] * len(calls)


def run(case: Case, roof: Roof | None = None) -> Measured:
    return measure(case, CPU, TenMicroseconds(), roof)


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.contender: row for row in rows}


@pytest.mark.parametrize("layout", ["bf16", "fp8_flat", "fp8_rope_bf16", "fp8_ds_mla"])
@pytest.mark.parametrize(
    "case",
    [(3, 2, 1), (3, 2, 65), (3, 2, 5, 2), (3, 3, 70, 1, IMBALANCED), (2, 3, 70, 3, IMBALANCED)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_every_contender_is_right_beside_its_speed(layout: str, case: tuple) -> None:
    found = run(Case(layout, *case))
    assert {row.contender for row in found.rows} >= {
        "pagedmla torch", "pagedmla reference", "dense bf16 (sdpa)", "dense fp32 (sdpa)",
    }  # fmt: skip
    for row in found.rows:
        assert row.source == "measured"
        assert row.correct, row
        assert row.share_of_floor is None  # no roof was given
    assert by_name(found.rows)["dense fp32 (sdpa)"].relative_l2 < 1e-5


def test_rates_by_hand() -> None:
    """3 heads, 2 requests of 65 keys: 2 * 1088 FLOPs a head and key; 644 bytes a key, 3 * (2 * 1088 + 4) a query."""
    row = by_name(run(Case(FLAGSHIP, 3, 2, 65), Roof("slow", 1e-6, 1.0, 1.0)).rows)["pagedmla torch"]
    moved = 2 * 65 * 644 + 2 * 3 * (2 * 1088 + 4)
    assert row.gb_per_s == pytest.approx(moved / 10 / 1e3, rel=1e-3)
    assert row.tflop_per_s == pytest.approx(2 * 1088 * 3 * 2 * 65 / 10 / 1e6, rel=1e-3)
    assert row.share_of_floor == round(moved * 1e-6 / 1e-6 / 10, 3)  # a TB/s of 1e-6 is a byte a microsecond


def test_bytes_are_those_that_a_contender_reads() -> None:
    """FP8 rows are 644 bytes where the dense baselines' are 1152 and 2304: each is judged by what it must move."""
    rows = by_name(run(Case(FLAGSHIP, 1, 1, 4096)).rows)
    assert {name: row.reads for name, row in rows.items()} == {
        "pagedmla torch": FLAGSHIP, "pagedmla reference": FLAGSHIP, "dense bf16 (sdpa)": "bf16",
        "dense fp32 (sdpa)": "fp32",
    }  # fmt: skip
    ours = rows["pagedmla torch"].gb_per_s
    assert rows["dense bf16 (sdpa)"].gb_per_s / ours == pytest.approx(1152 / 644, rel=0.01)
    assert rows["dense fp32 (sdpa)"].gb_per_s / ours == pytest.approx(2304 / 644, rel=0.01)


def test_the_floor_is_the_one_that_explain_prints() -> None:
    """`pagedmla explain` counted FP8 tensor cores for an FP8 cache and the bench 16-bit ones: at 128 heads one said
    77.8 us and the other 147.5 for the same step."""
    case = Case(FLAGSHIP, 128, 4, 640)
    (ours,) = [made for made in contenders.contenders(build(case, "cpu"), ("torch",)) if _is_ours(made)]
    plan = pagedmla.plan(
        layout=FLAGSHIP, num_heads=128, page_size=PAGE_SIZE, max_batch=4, max_tokens=4, max_cache_length=640,
        dtype=torch.bfloat16, device="cpu", sm_scale=SM_SCALE,
    )  # fmt: skip
    for gpu in (H100, H200, B200):
        assert f"{gpu.name} {ours.cost.floor_us(gpu, fp8_mma=ours.fp8_mma):,.1f} us" in plan.explain()


def _is_ours(made: Contender | Absent) -> bool:
    return isinstance(made, Contender) and made.ours


def test_a_wrong_contender_shows_and_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline that answers 0 would otherwise be the one to beat."""
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention",
        lambda q, k, v, attn_mask, scale: q[..., : v.shape[-1]] * 0,
    )
    rows = by_name(run(Case("bf16", 2, 1, 40)).rows)
    for name in ("dense bf16 (sdpa)", "dense fp32 (sdpa)"):
        assert rows[name].relative_l2 == 1.0
        assert rows[name].correct is False
    assert rows["pagedmla torch"].best_peer is None


def test_nan_is_never_right() -> None:
    inputs = build(Case("bf16", 2, 2, 40), "cpu")
    out = torch.cat([meaning(inputs, 0), meaning(inputs, 1)])
    judge = Judge(inputs)
    assert judge.error(out) == 0
    out[1, 0, 0] = torch.nan
    assert not judge.error(out) <= 1


def test_the_longest_request_is_judged() -> None:
    """The first and the last one alone would miss a fault that long requests alone show."""
    inputs = build(Case("bf16", 1, 8, 100, 1, IMBALANCED), "cpu")
    longest = max(range(8), key=inputs.case.kv_lens.__getitem__)
    assert longest not in (0, 7)
    out = torch.cat([meaning(inputs, request) for request in range(8)])
    out[longest] *= 1.1
    assert Judge(inputs).error(out) == pytest.approx(0.1)


def test_the_meaning_is_the_reference_operation() -> None:
    inputs = build(Case(FLAGSHIP, 2, 3, 70, 3, IMBALANCED), "cpu")
    out, _ = pagedmla.attend(
        inputs.q.double(), inputs.values, 0, sm_scale=SM_SCALE, query_start_loc=inputs.query_start_loc,
        layout=inputs.layout, executor="reference",
    )  # fmt: skip
    assert torch.allclose(out, torch.cat([meaning(inputs, request) for request in range(3)]), rtol=1e-12)


def test_who_cannot_take_part_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(inputs: object, executors: object) -> list[object]:
        return [Absent("a peer", "it isn't installed"), *made]

    case = Case("bf16", 2, 1, 40)
    made = [*contenders.contenders(build(case, "cpu"), ("torch",))]
    broken = Contender("another peer", lambda: torch.zeros(0)[1], made[0].cost, "bf16")
    made.append(broken)
    monkeypatch.setattr("pagedmla.bench.measure.contenders", refuse)
    with pytest.raises(IndexError):  # no way to refuse a case: a fault, which isn't hidden
        run(case)

    def unsupported() -> torch.Tensor:
        raise RuntimeError("this card isn't supported")

    made[-1] = Contender("another peer", unsupported, broken.cost, "bf16")
    found = run(case)
    assert found.absent["a peer"] == "it isn't installed"
    assert "RuntimeError" in found.absent["another peer"]
    assert "this card isn't supported" in found.absent["another peer"]
    made[-1] = Contender("pagedmla broken", unsupported, broken.cost, "bf16", ours=True)
    with pytest.raises(RuntimeError, match="isn't supported"):  # ours had said that it can
        run(case)


def test_grids_cover_what_they_say() -> None:
    assert list(grid(["bf16"], [4], [2], [100])) == [Case("bf16", 4, 2, 100)]
    for cases in (quick_cases(), cpu_cases(), gpu_cases()):
        assert len(set(cases)) == len(cases)
    for cases in (gpu_cases(), full_gpu_cases()):
        assert {case.batch for case in cases} == {1, 2, 4, 8, 16, 32, 64, 128}
        assert {640, 4096, 32768, 131072} <= {case.kv_len for case in cases}
        assert {case.heads for case in cases} == {16, 32, 64, 128}
        assert {case.q_len for case in cases} == {1, 2, 3, 4}
        assert {case.lengths for case in cases} == {"uniform", IMBALANCED}
    assert set(gpu_cases()) <= set(full_gpu_cases())


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (("fp9", 1, 1, 1), "fp9"),
        (("bf16", 0, 1, 1), "heads: expected at least 1; got 0"),
        (("bf16", 1, 1, 3, 4), "kv_len: expected at least the 4 query tokens; got 3"),
        (("bf16", 1, 1, 3, 1, "skewed"), "lengths: expected 'uniform' or 'imbalanced'; got 'skewed'"),
    ],
)
def test_cases_that_cannot_be(case: tuple, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Case(*case)


def test_the_cache_is_the_same_each_time() -> None:
    first, second = (build(Case("fp8_rope_bf16", 2, 2, 70), "cpu") for _ in range(2))
    assert torch.equal(first.values.kv_blocks.view(torch.uint8), second.values.kv_blocks.view(torch.uint8))
    assert torch.equal(first.q, second.q)
    assert first.values.cache_lengths.view(torch.int32).tolist() == [69, 69]


def test_imbalanced_lengths_are_drawn_around_the_mean() -> None:
    lengths = Case(FLAGSHIP, 1, 128, 4096, 4, IMBALANCED).kv_lens
    assert len(set(lengths)) > 100
    assert min(lengths) >= 4
    assert sum(lengths) / 128 == pytest.approx(4096, rel=0.15)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H200", H200),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA B200", B200),
        *((name, None) for name in ("NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA H100 PCIe", "NVIDIA H100 NVL")),
        *((name, None) for name in ("NVIDIA GB200", "NVIDIA A100-SXM4-80GB", "NVIDIA H20")),
    ],
)
def test_gpus_by_their_drivers_names(name: str, gpu: Gpu | None) -> None:
    """A GH200 and an H200 NVL got the H200's peaks, an H100 PCIe the SXM's: any name that held one of ours did."""
    assert gpu_named(name) is gpu


def test_a_bug_is_no_absent_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any ValueError while a plan was made put an executor of ours among those that can't take part."""
    inputs = build(Case("bf16", 1, 1, 5), "cpu")

    def broken(**_: object) -> None:
        raise ValueError("math domain error")

    (absent,) = contenders._executor(inputs, "cutlass")
    assert isinstance(absent, Absent)  # refused, in words
    monkeypatch.setattr(pagedmla, "plan", broken)
    with pytest.raises(ValueError, match="math domain error"):
        next(contenders._executor(inputs, "torch"))


def test_clocks_run_every_call_and_give_a_time_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls take turns, so that a busy moment meets all of them."""
    order: list[int] = []
    calls = [lambda number=number: order.append(number) or torch.zeros(1) for number in range(3)]
    times = CpuClock(seconds=0.0)(calls)
    assert order == [0, 1, 2] * 5
    assert all(time > 0 for time in times)
    assert least_microseconds(lambda: None, seconds=0.0) > 0
    made: list[int] = []
    alone = least_microseconds(lambda: made.append(sum(range(10_000))), seconds=0.0)
    once = len(made)
    together = least_microseconds(lambda: made.append(sum(range(10_000))), seconds=0.0, calls=50)
    assert len(made) - once == 50 * (once - 1) + 1  # one to warm up
    assert together < 10 * alone  # of a call, not of fifty
    monkeypatch.setattr("pagedmla.bench.roofs._READ", 1 << 20)
    monkeypatch.setattr("pagedmla.bench.roofs._SIDE", 64)
    roof = cpu_roof()
    assert roof.terabytes_per_second > 0
    assert roof.bf16_tflops == roof.fp8_tflops > 0
