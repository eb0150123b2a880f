"""The public prefill and decompress: every executor against the float64 meaning, and a prompt in the cheap form.

The last test is what they are for: a prompt with a cached context, computed in pieces on decompressed keys and merged,
must equal the absorbed attention over the paged cache.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases.steps import LAYOUTS, StepCase, build_step
from torch import Tensor

import pagedmla
from pagedmla.reference import attention

EXECUTORS = ["torch", "reference", "triton"]


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def dense(q_lens: tuple[int, ...], k_lens: tuple[int, ...], heads: int = 2, key_heads: int = 2) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    made = {
        "q": torch.randn(sum(q_lens) + 2, heads, 48, generator=g),  # two tokens of padding
        "k": torch.randn(sum(k_lens), key_heads, 48, generator=g),
        "v": torch.randn(sum(k_lens), key_heads, 32, generator=g),
    }
    return {**made, "query_start_loc": starts(*q_lens), "key_start_loc": starts(*k_lens)}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_is_its_meaning(causal: bool, executor: str) -> None:
    """Ragged, more keys than queries, fewer (rows that see none), no queries, no keys, grouped heads, padding rows."""
    call = dense((5, 3, 0, 4, 2), (9, 2, 3, 4, 0), heads=4, key_heads=2)
    out, lse = pagedmla.prefill(**call, sm_scale=0.2, causal=causal, executor=executor)
    want, want_lse = attention.prefill(*call.values(), sm_scale=0.2, causal=causal)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=3e-6)
    assert bool((lse[14:] == -torch.inf).all())


@pytest.mark.parametrize("executor", ["torch", "reference"])
def test_a_value_that_is_no_number_reaches_those_who_see_it(executor: str) -> None:
    call = dense((4,), (4,))
    call["v"][2, 0, 5] = torch.nan
    out, _ = pagedmla.prefill(**call, sm_scale=0.2, executor=executor)
    assert out.isnan().nonzero().tolist() == [[2, 0, 5], [3, 0, 5]]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
def test_dtypes_of_starts(dtype: torch.dtype, executor: str) -> None:
    """int64 starts passed on a CPU, and were refused by Triton: `attend` takes them everywhere."""
    call = dense((5, 3), (9, 3))
    want = pagedmla.prefill(**call, sm_scale=0.2, executor=executor)
    wider = {name: call[name].to(dtype) for name in ("query_start_loc", "key_start_loc")}
    assert torch.equal(pagedmla.prefill(**{**call, **wider}, sm_scale=0.2, executor=executor)[0], want[0])


def test_one_key_a_query_token_by_default() -> None:
    call = dense((5, 3), (5, 3))
    del call["key_start_loc"]
    assert torch.equal(
        pagedmla.prefill(**call, sm_scale=0.2)[0],
        pagedmla.prefill(**dense((5, 3), (5, 3)), sm_scale=0.2)[0],
    )


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", ["bf16", "fp8_flat-g128", "fp8_rope_bf16", "fp8_rope_bf16_prescaled", "fp8_ds_mla"])
def test_decompress_is_its_meaning(layout: str, executor: str) -> None:
    """Spans inside pages, across pages, of nothing; rows behind the last one keep their bytes."""
    step = build_step(StepCase((1, 1, 1), (37, 20, 5), page_size=16), LAYOUTS[layout])
    first, count = (3, 16, 5), (30, 4, 0)
    out = torch.full((36, 576), 7.0)
    cached = replace(step.values, cache_lengths=torch.tensor([37, 20, 5], dtype=torch.int32))
    got = pagedmla.decompress(
        cached,
        step.layer,
        starts=torch.tensor(first, dtype=torch.int32),
        key_start_loc=starts(*count),
        layout=step.layout,
        out=out,
        executor=executor,
    )
    assert got is out
    want = torch.cat([rows[a : a + n] for rows, a, n in zip(step.rows, first, count)])
    torch.testing.assert_close(out[:34].double(), want, rtol=1e-6, atol=0)
    assert bool((out[34:] == 7).all())
    made = pagedmla.decompress(
        cached, step.layer, starts=torch.tensor(first), key_start_loc=starts(*count), layout=step.layout
    )
    assert torch.equal(made, out[:34])


def test_a_prompt_with_a_cached_context_in_the_cheap_form() -> None:
    """Own tokens causally, the context in two chunks without a mask, merged: the absorbed attention over the cache."""
    step = build_step(StepCase((6, 3), (40, 21), page_size=16, heads=2), "fp8_rope_bf16")
    cached = (34, 18)
    heads = step.q.shape[1]

    def keys_and_values(rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[:, None].expand(-1, heads, -1), rows[:, None, :512].expand(-1, heads, -1)

    everything = replace(step.values, cache_lengths=torch.tensor([40, 21], dtype=torch.int32))
    outs, lses = [], []
    for first, count, causal in (((0, 0), (20, 18), False), ((20, 18), (14, 0), False), (cached, (6, 3), True)):
        rows = pagedmla.decompress(
            everything, step.layer, starts=torch.tensor(first), key_start_loc=starts(*count), layout=step.layout
        )
        k, v = keys_and_values(rows)
        out, lse = pagedmla.prefill(
            step.q, k, v, sm_scale=step.sm_scale, causal=causal,
            query_start_loc=step.query_start_loc, key_start_loc=starts(*count),
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    out, lse = pagedmla.merge_states(outs, lses)
    want, want_lse = pagedmla.attend(step.q, step.values, step.layer, **step.call())
    torch.testing.assert_close(out, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(9, 2, 40)}, r"k: expected \[\*, \*, 48\] float32; got \[9, 2, 40\] float32\. It is \[K, Hk"),
        ({"v": torch.zeros(8, 2, 32)}, r"v: expected \[9, 2, \*\] float32; got \[8, 2, 32\] float32\."),
        ({"k": torch.zeros(9, 3, 48), "v": torch.zeros(9, 3, 32)}, r"k: expected a number of heads that divides q's 2"),
        ({"key_start_loc": starts(9, 0)}, r"key_start_loc: expected \[2\] int32 or uint32 or int64; got \[3\] int32\."),
        ({"key_start_loc": starts(10)}, r"key_start_loc: expected at most 9, the tokens of k, at its end; got 10\."),
        (
            {"query_start_loc": torch.tensor([1, 5])},
            r"query_start_loc: expected 0 first, then rising or equal",
        ),
        (
            {"key_start_loc": None, "k": torch.zeros(3, 2, 48), "v": torch.zeros(3, 2, 32)},
            r"query_start_loc: expected at most 3, the tok",
        ),
        ({"out": torch.zeros(7, 2, 48)}, r"out: expected \[7, 2, 32\] float32; got \[7, 2, 48\] float32\."),
    ],
)
def test_prefill_refuses_by_name(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pagedmla.prefill(**{**dense((5,), (9,)), **changes}, sm_scale=0.2)


@pytest.mark.parametrize(
    ("first", "count", "error", "message"),
    [
        (-1, 3, ValueError, r"starts: expected tokens within the 20 cached ones of request 0; got -1 \.\. 1\."),
        (18, 3, ValueError, r"starts: expected tokens within the 20 cached ones of request 0; got 18 \.\. 20\."),
        (0, 18, IndexError, r"lookup_table: row 0, column 1 holds page id -?\d+; kv_blocks has"),
    ],
)
def test_decompress_refuses_by_name(first: int, count: int, error: type[Exception], message: str) -> None:
    step = build_step(StepCase((1,), (20,), page_size=16), "fp8_rope_bf16")
    table = step.values.lookup_table.clone()
    table.view(torch.int32)[0, 1] = -1
    values = replace(step.values, lookup_table=table, cache_lengths=torch.tensor([20], dtype=torch.int32))
    call = {"starts": torch.tensor([first]), "key_start_loc": starts(count), "layout": step.layout}
    with pytest.raises(error, match=message):
        pagedmla.decompress(values, step.layer, **call)
    inside = {**call, "starts": torch.tensor([0]), "key_start_loc": starts(16)}  # the bad page isn't wanted
    assert pagedmla.decompress(values, step.layer, **inside).shape == (16, 576)


@pytest.mark.parametrize(
    ("key_start_loc", "message"),
    [
        ([0, -4], r"key_start_loc: expected 0 first, then rising or equal; got \[0, -4\]\."),
        ([0, 2**40], r"key_start_loc: expected at most 20, the tokens of the cache, at its end; got 1099511627776\."),
        ([0, 2**62], r"key_start_loc: expected at most 20, the tokens of the cache, at its end; got 46116860"),
    ],
)
def test_rows_are_counted_before_they_get_memory(key_start_loc: list[int], message: str) -> None:
    """Without `out` the last start was its number of rows, unseen: torch's own errors, of memory or a negative size."""
    step = build_step(StepCase((1,), (20,), page_size=16), "fp8_rope_bf16")
    values = replace(step.values, cache_lengths=torch.tensor([20], dtype=torch.int32))
    call = {"starts": torch.tensor([0]), "key_start_loc": torch.tensor(key_start_loc), "layout": step.layout}
    with pytest.raises(ValueError, match=message):
        pagedmla.decompress(values, step.layer, **call)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("first", [40, 1000])
def test_an_empty_span_reads_nothing_wherever_it_starts(first: int, executor: str) -> None:
    """A chunk that a short context doesn't reach starts behind it: its table was too narrow, or its id there wrong."""
    step = build_step(StepCase((1, 1), (60, 20), page_size=16), "fp8_rope_bf16")
    table = step.values.lookup_table.clone()
    table.view(torch.int32)[1, 2:] = -1
    values = replace(step.values, lookup_table=table, cache_lengths=torch.tensor([60, 20], dtype=torch.int32))
    call = {"key_start_loc": starts(20, 0), "layout": step.layout, "executor": executor}
    got = pagedmla.decompress(values, step.layer, starts=torch.tensor([32, first]), **call)
    assert torch.equal(got, pagedmla.decompress(values, step.layer, starts=torch.tensor([32, 0]), **call))


def test_scales_and_nan_of_a_span_are_checked_on_request() -> None:
    """PAGEDMLA_CHECK=1 looked at ids alone here, and check="no" passed for True."""
    step = build_step(StepCase((1,), (40,), page_size=16), "fp8_rope_bf16")
    values = replace(step.values, cache_lengths=torch.tensor([40], dtype=torch.int32))
    page = int(step.values.scales_lookup_table[0, 1])
    values.kv_scales[page, 0, step.layer, 3] = 0
    call = {"key_start_loc": starts(8), "layout": step.layout}
    pagedmla.decompress(values, step.layer, starts=torch.tensor([0]), check=True, **call)
    with pytest.raises(
        ValueError, match=r"kv_scales: expected finite scales > 0; got \[0\.0\] at row 0, column 1, slot 3"
    ):
        pagedmla.decompress(values, step.layer, starts=torch.tensor([20]), check=True, **call)
    with pytest.raises(TypeError, match="check: expected True or False; got 'no'"):
        pagedmla.decompress(values, step.layer, starts=torch.tensor([0]), check="no", **call)  # type: ignore[arg-type]
