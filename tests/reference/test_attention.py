"""Attention over the paged cache: meaning ("reference", float64) and CPU executor ("torch", float32).

Three judges that don't know each other: a dense softmax over rows that never saw a page (cases/steps.py), cases small
enough to compute by hand, and invariants. Grids are the peers' (cases/grids.py). Memory is NaN wherever a step has no
token, in every test here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import grids
from cases.steps import LAYOUTS, Step, StepCase, as_table, assert_attention_close, build_step, with_values
from torch import Tensor

import pagedmla
from pagedmla import KVCacheInputsPerDevice, get_layout
from pagedmla.kv_cache.layouts import per_tensor_scale
from pagedmla.kv_cache.paged_tensor import raw_view
from pagedmla.reference import attention, vectorised
from pagedmla.reference.cache import decompress

EXECUTORS = ["torch", "reference"]
RAGGED = StepCase((1, 4, 2, 0), (33, 20, 2, 17), name="ragged")


def attend(step: Step, executor: str = "torch", **changes: object) -> tuple[Tensor, Tensor]:
    arguments = {**step.call(), **changes}
    return pagedmla.attend(step.q, step.values, step.layer, executor=executor, check=True, **arguments)


# -- against the dense softmax -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", grids.ALL, ids=str)
def test_the_cpu_executor_on_the_peers_grids(case: StepCase) -> None:
    step = build_step(case, "fp8_rope_bf16")
    got = attend(step)
    if not case.q_lens:
        assert got[0].shape == (0, case.heads, 512)
        assert got[1].shape == (0, case.heads)
        return
    assert_attention_close(got, step.dense_attention())


@pytest.mark.parametrize("case", [c for c in grids.REPORTS + grids.VLLM[:2] if c.q_lens], ids=str)
def test_the_meaning_on_the_peers_grids(case: StepCase) -> None:
    step = build_step(case, "fp8_rope_bf16", dtype=torch.float64)
    out, lse = attend(step, "reference")
    want, want_lse = step.dense_attention()
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse.float(), rtol=0, atol=1e-6)  # returned in float32


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, executor: str) -> None:
    step = build_step(RAGGED, layout)
    assert_attention_close(attend(step, executor), step.dense_attention())


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["fp8_flat", "fp8_rope_bf16", "fp8_rope_bf16_prescaled", "fp8_ds_mla", "bf16"])
def test_latents_of_256(name: str, executor: str) -> None:
    step = build_step(RAGGED, get_layout(name, latent=256))
    out, lse = attend(step, executor)
    assert out.shape[-1] == 256
    assert_attention_close((out, lse), step.dense_attention())
    if name != "fp8_ds_mla":  # by name, the width is read off the pool
        assert torch.equal(attend(step, executor, layout=name)[0], out)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float8_e8m0fnu])
def test_other_scale_dtypes(scale_dtype: torch.dtype, executor: str) -> None:
    step = build_step(RAGGED, "fp8_flat-g64", scale_dtype=scale_dtype)
    assert_attention_close(attend(step, executor), step.dense_attention())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_of_queries(dtype: torch.dtype) -> None:
    step = build_step(RAGGED, "fp8_rope_bf16", dtype=dtype)
    out, lse = attend(step)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    want, want_lse = step.dense_attention()
    half_ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 0.0)
    torch.testing.assert_close(out.double(), want, rtol=half_ulp, atol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=2e-5)


def test_one_scale_for_the_whole_pool() -> None:
    """vllm and SGLang ship this: sigma 1 or a calibrated one, a stride-0 view as kv_scales."""
    step = build_step(RAGGED, "fp8_flat", shared_tables=True)
    values = step.values
    sigma = torch.tensor([0.25])
    scaled = with_values(step, kv_scales=per_tensor_scale(sigma, values.kv_blocks))
    doubled = with_values(step, kv_scales=per_tensor_scale(2 * sigma, values.kv_blocks))
    # twice the scale with half the queries: the same logits, twice the values
    out, lse = attend(scaled)
    half = replace(doubled, q=doubled.q / 2)
    out2, lse2 = attend(half)
    assert torch.equal(lse, lse2)
    assert torch.equal(2 * out, out2)
    assert_attention_close((out, lse), tuple(map(Tensor.double, attend(scaled, "reference"))))


# -- by hand -----------------------------------------------------------------------------------------------------------


def small_cache(rows: list[list[float]]) -> KVCacheInputsPerDevice:
    """One request whose float32 rows lie on pages of one token, in reverse; the last of them is this step's."""
    blocks = torch.tensor(rows, dtype=torch.float32).flip(0).view(len(rows), 1, 1, 1, 1, -1)
    table = torch.arange(len(rows), dtype=torch.int32).flip(0).unsqueeze(0)
    return KVCacheInputsPerDevice(blocks, torch.tensor([len(rows) - 1], dtype=torch.int32), table, 1, len(rows), -1)


LN2, LN3 = 0.6931471805599453, 1.0986122886681098


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("rows", "q", "out", "lse"),
    [
        pytest.param([[5.0, 7.0, 1.0]], [9.0, 9.0, 9.0], [5.0, 7.0], 117.0, id="one-key-is-its-value"),
        pytest.param([[1, 0, 0], [0, 1, 0]], [LN3, 0, 0], [0.75, 0.25], 2 * LN2, id="weights-3-to-1"),
        pytest.param([[4, 0, 1], [0, 4, 0]], [0, 0, LN3], [3.0, 1.0], 2 * LN2, id="rope-counts-in-logits-only"),
        pytest.param([[0, 8, 0]] * 4, [0, 1, 0], [0.0, 8.0], 8 + 2 * LN2, id="equal-keys-add-ln4"),
        pytest.param([[1000, 0, 0], [0, 1, 0]], [1, 0, 0], [1000.0, 0.0], 1000.0, id="no-overflow"),
    ],
)
def test_by_hand(rows: list[list[float]], q: list[float], out: list[float], lse: float, executor: str) -> None:
    layout = get_layout("fp32", latent=2, rope=1)
    got, got_lse = pagedmla.attend(
        torch.tensor([[q]], dtype=torch.float32), small_cache(rows), 0, sm_scale=1.0, layout=layout, executor=executor
    )
    torch.testing.assert_close(got[0, 0], torch.tensor(out), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got_lse[0, 0], torch.tensor(lse), rtol=1e-6, atol=0)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_sm_scale_multiplies_the_logit_once(executor: str) -> None:
    """flashinfer#787: log2(e) or sm_scale folded in twice. logit 4, scale 1/2: lse is 2."""
    layout = get_layout("fp32", latent=1, rope=1)
    values = small_cache([[4.0, 0.0]])
    _, lse = pagedmla.attend(torch.ones(1, 1, 2), values, 0, sm_scale=0.5, layout=layout, executor=executor)
    assert lse.item() == 2.0


@pytest.mark.parametrize("executor", EXECUTORS)
def test_many_small_weights_are_not_lost(executor: str) -> None:
    """aiter#5535: logit 0 once and -7 two thousand times, all values 1: a P kept in e4m3 unscaled gave 0.35, not 1."""
    layout = get_layout("fp8_flat", latent=256)
    latent, rope = torch.ones(2048, 256), torch.zeros(2048, 64)
    rope[1:, 0] = -1.0
    made = layout.quantize(latent, rope)
    blocks = made.values.view(16, 1, 1, 128, 1, 320)
    table = torch.arange(16, dtype=torch.int32).unsqueeze(0)
    values = KVCacheInputsPerDevice(
        blocks,
        torch.tensor([2047], dtype=torch.int32),
        table,
        1,
        2048,
        -1,
        kv_scales=made.scales.view(16, 1, 1, 128, 1, 1),
    )
    q = torch.zeros(1, 1, 320)
    q[..., 256] = 7.0
    out, lse = pagedmla.attend(q, values, 0, sm_scale=1.0, layout=layout, executor=executor)
    torch.testing.assert_close(out, torch.ones(1, 1, 256), rtol=0, atol=1e-5)
    assert lse.item() == pytest.approx(torch.tensor(1 + 2047 * 2.718281828459045**-7).log().item(), abs=1e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_row_alias_would_show(executor: str) -> None:
    """FlashInfer's fixture: the rope picks token 4 and shuns token 8, whose contents are +100 and -100. A kernel that
    pairs one token's rope with another's latent answers with the wrong sign."""
    layout = get_layout("fp8_rope_bf16")
    latent, rope = torch.zeros(12, 512), torch.zeros(12, 64)
    latent[4], latent[8] = 100.0, -100.0
    rope[4], rope[8] = 1.0, -1.0
    made = layout.quantize(latent, rope)
    values = KVCacheInputsPerDevice(
        made.values.view(3, 1, 1, 4, 1, 640)[[2, 0, 1]].contiguous(),
        torch.tensor([11], dtype=torch.int32),
        torch.tensor([[1, 2, 0]], dtype=torch.int32),
        1,
        12,
        -1,
        kv_scales=made.scales.view(3, 1, 1, 4, 1, 1)[[1, 2, 0]].contiguous(),
        scales_lookup_table=torch.tensor([[2, 0, 1]], dtype=torch.int32),
    )
    q = torch.zeros(1, 2, 576)
    q[..., 512:] = 1.0
    out, _ = pagedmla.attend(q, values, 0, sm_scale=1.0, layout=layout, executor=executor)
    torch.testing.assert_close(out, torch.full_like(out, 100.0))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_query_before_its_first_key_is_empty(executor: str) -> None:
    """vllm#45227: two query tokens over one key: the first sees nothing."""
    step = build_step(StepCase((2, 2), (1, 2)), "fp8_rope_bf16")
    out, lse = attend(step, executor)
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == -torch.inf).all())
    alone = step.rows[0][0, :512].float().expand(2, 512)
    torch.testing.assert_close(out[1], alone)
    torch.testing.assert_close(out[2], step.rows[1][0, :512].float().expand(2, 512))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_of_zeros_gives_zeros(layout: str, executor: str) -> None:
    """vllm#49435: an all-zero token must not become 0 / 0."""
    step = build_step(replace(RAGGED, magnitude=0.0), layout)
    assert bool((attend(step, executor)[0] == 0).all())


# -- empty and padded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
def test_no_requests(executor: str) -> None:
    step = build_step(StepCase((), ()), "fp8_rope_bf16")
    out, lse = attend(step, executor)
    assert (out.shape, lse.shape) == ((0, 2, 512), (0, 2))
    out, _ = pagedmla.attend(step.q, step.values, 1, sm_scale=1.0, layout=step.layout, executor=executor)
    assert out.shape == (0, 2, 512)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_table_without_columns(executor: str) -> None:
    """sglang#5875: 16 idle requests, a table [16, 0]."""
    step = build_step(StepCase((1,) * 16, (0,) * 16), "fp8_rope_bf16")
    none = torch.zeros(16, 0, dtype=torch.int32)
    out, lse = attend(with_values(step, lookup_table=none, scales_lookup_table=none), executor)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.uint32], ids=["int32", "uint32"])
def test_padding_rows_of_a_captured_graph(table_dtype: torch.dtype, executor: str) -> None:
    """vllm#35969: rows 2 and 3 pad the batch: one query token each, length 0 (so cache_length -1), table all -1."""
    real = build_step(StepCase((1, 1), (64, 20)), "fp8_rope_bf16", table_dtype=table_dtype)
    padded = build_step(StepCase((1, 1, 1, 1), (64, 20, 0, 0)), "fp8_rope_bf16", table_dtype=table_dtype)
    assert padded.values.cache_lengths.view(torch.int32).tolist() == [63, 19, -1, -1]
    out, lse = attend(padded, executor)
    want, want_lse = attend(real, executor)
    assert bool((out[2:] == 0).all())
    assert bool((lse[2:] == -torch.inf).all())
    padded_q = replace(padded, q=torch.cat((real.q, torch.full_like(real.q, torch.nan))))
    out, lse = attend(padded_q, executor)
    assert torch.equal(out[:2], want)
    assert torch.equal(lse[:2], want_lse)
    assert bool((out[2:] == 0).all())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_tokens_behind_the_last_request(executor: str) -> None:
    """A captured graph's queries are longer than the step: what lies behind query_start_loc[-1] is padding."""
    step = build_step(RAGGED, "fp8_rope_bf16")
    longer = replace(step, q=torch.cat((step.q, torch.full((5, 2, 576), torch.nan))))
    out, lse = attend(longer, executor)
    want, want_lse = attend(step, executor)
    assert torch.equal(out[:7], want)
    assert torch.equal(lse[:7], want_lse)
    assert bool((out[7:] == 0).all())
    assert bool((lse[7:] == -torch.inf).all())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_maxima_are_upper_bounds(executor: str) -> None:
    step = build_step(RAGGED, "fp8_rope_bf16")
    raised = with_values(step, max_prompt_length=4096, max_cache_length=2**31)
    for got, want in zip(attend(raised, executor), attend(step, executor)):
        assert torch.equal(got, want)


# -- poison ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_must_not_be_read_changes_no_bit(layout: str, executor: str) -> None:
    """flashinfer#941, vllm#57716: slots past kv_len, unused pages and scales, NaN of both signs or numbers; unused
    table columns of any id, in both sentinel conventions."""
    reference = attend(build_step(RAGGED, layout), executor)
    pool = build_step(RAGGED, layout).values.kv_blocks.shape[0]
    for poison, wild in ((0xFF, pool), (0x7F, 0), (0x00, 0xFFFFFFFF), (0x42, 2147480000)):
        got = attend(build_step(RAGGED, layout, poison=poison, wild=wild), executor)
        assert torch.equal(got[0], reference[0]), (poison, wild)
        assert torch.equal(got[1], reference[1]), (poison, wild)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("where", ["latent", "rope", "scale"])
def test_nan_reaches_only_the_queries_that_see_it(where: str, executor: str) -> None:
    """NaN in token 17 of request 1 (kv 20, queries at 16 .. 19): the queries at 17, 18 and 19 see it, nobody else."""
    step = build_step(RAGGED, "fp8_rope_bf16")
    clean = pagedmla.attend(step.q, step.values, 1, executor=executor, **step.call())
    page = int(step.values.lookup_table[1, 1])
    scale_page = int(step.values.scales_lookup_table[1, 1])
    if where == "scale":
        step.values.kv_scales[scale_page, 0, 1, 1] = torch.nan
    else:
        first = 0 if where == "latent" else 514
        nan = torch.tensor([0xC0, 0x7F], dtype=torch.uint8)  # -2 and NaN in e4m3, a NaN in bf16
        step.values.kv_blocks.view(torch.uint8)[page, 0, 1, 1, 0, first : first + 2] = nan
    out, lse = pagedmla.attend(step.q, step.values, 1, executor=executor, **step.call())
    hit = torch.tensor([False, False, True, True, True, False, False])
    assert bool(out[hit].isnan().all())
    assert bool(lse[hit].isnan().all())
    assert torch.equal(out[~hit], clean[0][~hit])
    assert torch.equal(lse[~hit], clean[1][~hit])


# -- invariants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", ["bf16", "fp8_rope_bf16", "fp8_ds_mla"])
def test_page_sizes_agree(layout: str, executor: str) -> None:
    """flashinfer#810: the same tokens on pages of 1, 16 and 64 give the same bits."""
    case = StepCase((1, 5, 2), (70, 64, 33), heads=3)
    want = attend(build_step(replace(case, page_size=64), layout), executor)
    for page_size in (1, 3, 16):
        got = attend(build_step(replace(case, page_size=page_size), layout), executor)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_table_forms_agree(executor: str) -> None:
    """int32 and uint32, five columns, and a non-contiguous slice of a wider table: the same bits."""
    step = build_step(RAGGED, "fp8_rope_bf16")
    want = attend(step, executor)
    tables = {name: getattr(step.values, name) for name in ("lookup_table", "scales_lookup_table")}
    forms = [
        {name: table.view(torch.uint32) for name, table in tables.items()},
        {name: table[:, :5] for name, table in tables.items()},
        {name: torch.cat((table, table), 1)[:, : table.shape[1]] for name, table in tables.items()},
        {name: table.t().contiguous().t() for name, table in tables.items()},
        {"lookup_table": tables["lookup_table"].view(torch.uint32)},
    ]
    for form in forms:
        got = attend(with_values(step, **form), executor)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("starts_dtype", [torch.int32, torch.uint32, torch.int64])
def test_dtypes_of_query_starts(starts_dtype: torch.dtype) -> None:
    step = build_step(RAGGED, "fp8_rope_bf16")
    starts = step.query_start_loc if starts_dtype != torch.int64 else step.query_start_loc.long()
    starts = starts.view(starts_dtype)
    assert torch.equal(attend(step, query_start_loc=starts)[0], attend(step)[0])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_one_query_a_request_needs_no_starts(executor: str) -> None:
    step = build_step(StepCase((1, 1, 1), (16, 17, 40)), "fp8_rope_bf16")
    assert torch.equal(attend(step, executor, query_start_loc=None)[0], attend(step, executor)[0])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_requests_don_t_know_each_other(executor: str) -> None:
    """A request's result doesn't depend on who shares its batch, or on where it stands in it."""
    step = build_step(RAGGED, "fp8_rope_bf16")
    want_out, want_lse = attend(step, executor)
    order = [2, 0, 1]
    starts = step.query_start_loc.tolist()
    tokens = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in order])
    lens = torch.tensor([0, *(RAGGED.q_lens[b] for b in order)])
    values = replace(
        step.values,
        **{n: getattr(step.values, n)[order] for n in ("cache_lengths", "lookup_table", "scales_lookup_table")},
    )
    shuffled = replace(step, values=values, q=step.q[tokens], query_start_loc=lens.cumsum(0).to(torch.int32))
    out, lse = attend(shuffled, executor)
    assert torch.equal(out, want_out[tokens])
    assert torch.equal(lse, want_lse[tokens])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_shared_prefix_is_read_by_both(executor: str) -> None:
    """trtllm#2699: two requests over the same two pages give twice the same answer."""
    step = build_step(StepCase((1, 1), (32, 32)), "fp8_rope_bf16")
    tables = {n: getattr(step.values, n)[[0, 0]] for n in ("lookup_table", "scales_lookup_table")}
    out, _ = attend(replace(with_values(step, **tables), q=step.q[[0, 0]]), executor)
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], attend(step, executor)[0][0])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_other_layer_is_not_touched(executor: str) -> None:
    step = build_step(RAGGED, "fp8_rope_bf16", layers=3, layer=1)
    before = raw_view(step.values.kv_blocks).clone()
    assert_attention_close(attend(step, executor), step.dense_attention())
    assert torch.equal(raw_view(step.values.kv_blocks), before)
    out, _ = pagedmla.attend(step.q, step.values, 2, executor=executor, **step.call())
    assert bool(out[0].isnan().all())  # nothing but poison there


@pytest.mark.parametrize("executor", EXECUTORS)
def test_causal_tokens_are_steps_of_decoding(executor: str) -> None:
    """A step of four queries gives what four steps of one query give, token by token."""
    step = build_step(StepCase((4,), (20,)), "fp8_rope_bf16")
    out, lse = attend(step, executor)
    for i in range(4):
        one = with_values(step, cache_lengths=torch.tensor([16 + i], dtype=torch.int32))
        alone = replace(one, q=step.q[i : i + 1], query_start_loc=torch.tensor([0, 1], dtype=torch.int32))
        got = attend(alone, executor)
        torch.testing.assert_close(got[0][0], out[i], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1][0], lse[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "fp16"])
@pytest.mark.parametrize("power", [-90, -20, 13, 90])
def test_range_of_latents(layout: str, power: int) -> None:
    """Rows times 2^n and queries divided by it: every code is the same, so out is 2^n times as large, bit for bit."""
    factor = 2.0**power
    out, lse = attend(build_step(RAGGED, layout))
    big, big_lse = attend(build_step(replace(RAGGED, magnitude=factor, rope_magnitude=factor), layout))
    assert torch.equal(big, out * factor)
    assert torch.equal(big_lse, lse)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("magnitude", [1e-6, 1e-2, 1e2, 1e4])
def test_relative_error_is_the_same_for_all_latents(magnitude: float, executor: str) -> None:
    """Contract 7, in the flagship layout: small and large latents lose the same share to FP8, no more to attention."""

    def loss(scale: float) -> float:
        step = build_step(replace(RAGGED, magnitude=scale), "fp8_rope_bf16")
        exact = build_step(replace(RAGGED, magnitude=scale), "fp32")
        out, want = attend(step, executor)[0].double(), exact.dense_attention()[0]
        return float((out - want).norm() / want.norm())

    assert loss(magnitude) == pytest.approx(loss(1.0), rel=0.1)
    assert loss(magnitude) < 0.04


# -- partitions --------------------------------------------------------------------------------------------------------


def plan_for(step: Step, **changes: object) -> pagedmla.Plan:
    arguments: dict[str, object] = {
        "layout": step.layout,
        "num_heads": step.case.heads,
        "page_size": step.case.page_size,
        "max_batch": 8,
        "max_tokens": 16,
        "max_cache_length": 256,
        "dtype": step.q.dtype,
        "device": "cpu",
        "sm_scale": step.sm_scale,
        **changes,
    }
    return pagedmla.plan(**arguments)  # type: ignore[arg-type]


DECODE = StepCase((1, 1, 2), (100, 17, 64), name="decode")


@pytest.mark.parametrize("partitions", [1, 2, 3, 7, 32])
def test_partitions_change_the_split_and_not_the_result(partitions: int) -> None:
    """vllm#24966: more splits than pages leaves some empty; they must weigh nothing."""
    step = build_step(DECODE, "fp8_rope_bf16")
    plan = plan_for(step, num_partitions=partitions)
    out, lse = attend(step, plan=plan)
    assert_attention_close((out, lse), step.dense_attention())
    parts = plan.workspace.partial_lse[:, :4]
    # kv 100 is 7 pages of 16 tokens: ceildiv(7, S) pages a part, so this many parts hold tokens
    assert int((parts[:, 0, 0] > -torch.inf).sum()) == {1: 1, 2: 2, 3: 3, 7: 7, 32: 7}[partitions]
    torch.testing.assert_close(parts.logsumexp(0), lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("with_plan", [True, False], ids=["plan", "no-plan"])
def test_dispatch_metadata_sets_the_partitions(with_plan: bool) -> None:
    step = build_step(DECODE, "fp8_rope_bf16")
    plan = plan_for(step, num_partitions=8) if with_plan else None
    want = attend(step)
    for count, host in ((1, None), (3, 3), (8, 8)):
        asking = with_values(
            step,
            attention_dispatch_metadata=torch.tensor([3, 2, count]),
            mla_num_partitions=None if host is None else torch.tensor([host]),
        )
        got = attend(asking, plan=plan)
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
        if plan is not None:
            used = (plan.workspace.partial_lse[:, 0, 0] > -torch.inf).sum()
            if count > 1 or used > 1:
                assert int(used) == {1: 1, 3: 3, 8: 7}[count]


def test_the_workspace_shows_the_last_step_only() -> None:
    step = build_step(DECODE, "fp8_rope_bf16")
    plan = plan_for(step, num_partitions=8)
    attend(step, plan=plan)
    attend(with_values(step, mla_num_partitions=2), plan=plan)
    assert int((plan.workspace.partial_lse[:2, 0, 0] > -torch.inf).sum()) == 2


def test_draft_metadata_serves_the_drafts_query_length() -> None:
    """Target verifies 2 tokens in 4 partitions, the draft decodes 1 in 2: each step takes what was made for it."""
    fields = {
        "attention_dispatch_metadata": torch.tensor([2, 2, 4]),
        "mla_num_partitions": torch.tensor([4]),
        "draft_attention_dispatch_metadata": torch.tensor([2, 1, 2]),
        "draft_mla_num_partitions": torch.tensor([2]),
    }
    for q_len, expected in ((2, 4), (1, 2)):
        step = with_values(build_step(StepCase((q_len,) * 2, (64, 64)), "fp8_rope_bf16"), **fields)
        plan = plan_for(step, num_partitions=4)
        assert_attention_close(attend(step, plan=plan), step.dense_attention())
        assert int((plan.workspace.partial_lse[:, 0, 0] > -torch.inf).sum()) == expected
        draft = replace(step, values=step.values.for_draft())
        plan = plan_for(step, num_partitions=4)
        attend(draft, plan=plan)
        assert int((plan.workspace.partial_lse[:, 0, 0] > -torch.inf).sum()) == 2


def test_mixed_step_split_partitions_decode_rows_only() -> None:
    """Two decode requests (three tokens) stand first; the prefill behind them keeps its keys whole."""
    step = build_step(StepCase((1, 2, 5), (64, 48, 64)), "fp8_rope_bf16")
    want = step.dense_attention()
    split = with_values(step, mixed_step_split=torch.tensor([2, 3], dtype=torch.int32))
    plan = plan_for(step, num_partitions=4)
    assert_attention_close(attend(split, plan=plan), want)
    used = (plan.workspace.partial_lse[:, :8, 0] > -torch.inf).sum(0)
    assert used.tolist() == [4, 3, 3, 1, 1, 1, 1, 1]
    for boundary in ([0, 0], [3, 8]):
        other = with_values(step, mixed_step_split=torch.tensor(boundary, dtype=torch.int32))
        assert_attention_close(attend(other, plan=plan), want)


# -- dense attention and decompression ---------------------------------------------------------------------------------


def test_prefill_on_dense_rows_is_masked_softmax() -> None:
    """Ragged, causal from the end: a request with two cached keys, one without, one with no queries."""
    g = torch.Generator().manual_seed(0)
    q_lens, k_lens = [3, 4, 0], [5, 4, 2]
    q, k = torch.randn(7, 3, 24, generator=g).double(), torch.randn(11, 3, 24, generator=g).double()
    v = torch.randn(11, 3, 16, generator=g).double()
    starts, key_starts = torch.tensor([0, 3, 7, 7]), torch.tensor([0, 5, 9, 11])
    for causal in (True, False):
        out, lse = attention.prefill(q, k, v, starts, key_starts, sm_scale=0.2, causal=causal)
        for b, (q_len, k_len) in enumerate(zip(q_lens, k_lens)):
            rows, keys = slice(int(starts[b]), int(starts[b + 1])), slice(int(key_starts[b]), int(key_starts[b + 1]))
            mask = torch.ones(q_len, k_len, dtype=torch.bool)
            mask = mask.tril(k_len - q_len) if causal else mask
            want = torch.nn.functional.scaled_dot_product_attention(
                q[rows].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1), attn_mask=mask, scale=0.2
            )
            torch.testing.assert_close(out[rows], want.transpose(0, 1))
            logits = 0.2 * torch.einsum("qhd,khd->qhk", q[rows], k[keys])
            logits = logits.masked_fill(~mask.unsqueeze(1), -torch.inf)
            torch.testing.assert_close(lse[rows], logits.logsumexp(-1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decompression_of_ranges(layout: str) -> None:
    """Chunks of a cached context: from within a page to within another, a whole request, nothing."""
    step = build_step(RAGGED, layout)
    starts, lengths = torch.tensor([5, 0, 2, 16]), torch.tensor([27, 20, 0, 1])
    cache = step.values.collection(step.layout.pool_granularity)
    got = decompress(cache, step.layout, step.layer, starts, lengths)
    want = [rows[start : start + length] for rows, start, length in zip(step.rows, starts, lengths)]
    assert torch.equal(got, torch.cat(want))


def test_blocks_of_query_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU executor cuts queries and keys into blocks: any block size gives the same result."""
    step = build_step(StepCase((9, 1), (33, 40), heads=4), "fp8_rope_bf16")
    want = attend(step)
    for rows, keys in ((4, 1), (12, 7), (1, 40)):
        monkeypatch.setattr(vectorised, "ROW_CHUNK", rows)
        monkeypatch.setattr(vectorised, "KEY_CHUNK", keys)
        got = attend(step)
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_blocks_of_dense_query_rows(rows: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block looks at no key behind its last row: with cached keys, with whole blocks that see none, with a NaN."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(count, 2, width, generator=g) for count, width in ((13, 24), (12, 24), (12, 16)))
    v[4, 1, 3] = torch.nan  # seen by the last two queries of the first request
    call = (q, k, v, torch.tensor([0, 5, 13]), torch.tensor([0, 6, 12]))
    monkeypatch.setattr(vectorised, "ROW_CHUNK", rows * 2 * 6)
    monkeypatch.setattr(vectorised, "KEY_CHUNK", 1)
    got = vectorised.prefill(*call, sm_scale=0.3, causal=causal)
    want = attention.prefill(*call, sm_scale=0.3, causal=causal)
    torch.testing.assert_close(got[0].double(), want[0], rtol=0, atol=3e-6, equal_nan=True)
    torch.testing.assert_close(got[1].double(), want[1], rtol=0, atol=3e-6)
    assert want[0].isnan().any()
    assert bool((want[1][5:7] == -torch.inf).all()) == causal


def test_wild_ids_in_use_are_refused_by_name() -> None:
    """Not read past the end, and not silently read within it."""
    step = build_step(RAGGED, "fp8_rope_bf16")
    bad = step.values.lookup_table.clone()
    bad[1, 0] = 99
    with pytest.raises(IndexError, match=r"lookup_table: row 1, column 0 holds page id 99; kv_blocks has 11 pages"):
        attend(with_values(step, lookup_table=bad))
    scales = as_table(torch.full((4, 6), 0xFFFFFFFF), torch.uint32)
    with pytest.raises(
        IndexError, match=r"scales_lookup_table: row 0, column 0 holds page id 4294967295; kv_scales has 13"
    ):
        attend(with_values(step, scales_lookup_table=scales))


@pytest.mark.parametrize("executor", ["torch", "reference"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_queries_that_do_not_see_infinity_are_untouched(executor: str, value: float) -> None:
    """Rows of one chunk share a matrix product with keys they don't see: 0 * inf must not reach them."""
    step = build_step(StepCase((4,), (7,), page_size=4), "bf16")
    want = pagedmla.attend(step.q, step.values, step.layer, executor=executor, **step.call())
    page = int(step.values.lookup_table.view(torch.int32)[0, 1])
    step.values.kv_blocks[page, 0, step.layer, 1] = value  # token 5, which the last two of the queries 3 .. 6 see
    got = pagedmla.attend(step.q, step.values, step.layer, executor=executor, **step.call())
    assert torch.equal(got[0][:2], want[0][:2])
    assert torch.equal(got[1][:2], want[1][:2])
