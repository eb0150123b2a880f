"""Long prompts the dense way: the same numbers as absorbed attention, however the keys are cut into passes.

Three requests stand on the boundaries: no context, a context that ends inside a page, and one longer than the prompt.
`room` cuts them: all in one pass, the contexts in one, a context in two, and pages of a pass for two requests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla.adapters.vllm import layer_pools
from pagedmla.kv_cache.layouts import get_layout
from pagedmla.kv_cache.values import KVCacheInputsPerDevice
from pagedmla.plugin.bound import BoundLayer
from pagedmla.plugin.dense import DenseCalls, DensePrompts, Span, least_queries, spans

H, NOPE, ROPE, LATENT, VALUE = 2, 16, 64, 512, 24
P, WIDTH = 16, 5
CONTEXTS, QUERIES = [0, 21, 50], [12, 7, 9]
KV_LENS = [c + q for c, q in zip(CONTEXTS, QUERIES)]
SCALE = 0.1
# float64 attention of the same cache against ours in float32
BOUND = {"rtol": 2e-4, "atol": 2e-5}


@pytest.mark.parametrize(
    ("dims", "least"),
    [
        ((512, 64, 128, 128), 171),  # DeepSeek V2, V3 and R1: 131072 / 768 = 170.7
        ((256, 64, 128, 128), 256),
        ((512, 64, 512, 512), None),  # projected keys as wide as latents: nothing is saved
        ((512, 64, 224, 128), None),  # wider than prefill takes: the engine failed at the first long prompt
    ],
)
def test_where_the_dense_way_is_cheaper(dims: tuple[int, int, int, int], least: int | None) -> None:
    assert least_queries(*dims) == least


def test_the_user_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, least in (("never", None), ("64", 64), ("auto", 171), ("", 171)):
        monkeypatch.setenv("PAGEDMLA_DENSE_PREFILL", setting)
        assert least_queries(512, 64, 128, 128) == least
    for setting in ("0", "often", "-3"):
        monkeypatch.setenv("PAGEDMLA_DENSE_PREFILL", setting)
        with pytest.raises(ValueError, match=f"PAGEDMLA_DENSE_PREFILL: expected auto, never, or .*; got '{setting}'"):
            least_queries(512, 64, 128, 128)


def test_spans_cover_each_key_once() -> None:
    assert spans(CONTEXTS, QUERIES, sum(KV_LENS)) == [Span([0, 0, 0], KV_LENS, True)]
    assert spans(CONTEXTS, QUERIES, 71) == [Span([0, 0, 0], [0, 21, 50], False), Span(CONTEXTS, QUERIES, True)]
    assert spans(CONTEXTS, QUERIES, 40) == [
        Span([0, 0, 0], [0, 21, 19], False),
        Span([0, 0, 19], [0, 0, 31], False),
        Span(CONTEXTS, QUERIES, True),
    ]
    for room in range(28, 120):
        seen = {b: list[int]() for b in range(3)}
        for span in spans(CONTEXTS, QUERIES, room):
            assert sum(span.lengths) <= room
            for b in range(3):
                seen[b] += range(span.starts[b], span.starts[b] + span.lengths[b])
        assert [seen[b] for b in range(3)] == [list(range(n)) for n in KV_LENS]


def make_plan(layout: str, dtype: torch.dtype = torch.float32, executor: str = "auto") -> Any:
    return pagedmla.plan(
        layout=layout, num_heads=H, page_size=P, max_batch=4, max_tokens=64, max_cache_length=WIDTH * P,
        dtype=dtype, device="cpu", sm_scale=SCALE, executor=executor,
    )  # fmt: skip


def make_layer(plan: Any, seed: int) -> tuple[BoundLayer, list[Tensor]]:
    """A layer whose free slots are NaN, and its requests' tokens as the cache holds them, float64 `[kv_len, 576]`."""
    layout, generator = plan.layout, torch.Generator().manual_seed(seed)
    shape = (3 * WIDTH, P)
    if layout.quantised:
        width = (
            layout.bytes_per_token
            if layout.scales_per_token and layout.name.startswith("fp8_rope_bf16")
            else layout.row_bytes
        )
        cache = torch.full((*shape, width), 0x7F, dtype=torch.uint8)
    else:
        cache = torch.full((*shape, LATENT + ROPE), torch.nan, dtype=layout.value_dtypes[0])
    sigma = torch.tensor([0.02]) if layout.name == "fp8_flat" else None
    layer = BoundLayer(f"layer.{seed}", layer_pools(cache, layout, sigma), plan)
    tokens = []
    for b, kv_len in enumerate(KV_LENS):
        latent, rope = (torch.randn(kv_len, width, generator=generator) for width in (LATENT, ROPE))
        layer.store(latent, rope, table()[b, 0] * P + torch.arange(kv_len))
        made = layout.quantize(latent, rope, sigma=None if sigma is None else sigma.expand(kv_len, 1))
        tokens.append(layout.dequantize(made.values, made.scales).double())
    return layer, tokens


def table() -> Tensor:
    """Each request's pages are neighbours, the last request's first."""
    return torch.arange(3 * WIDTH, dtype=torch.int32).view(3, WIDTH).flip(0)


def make_prompts(plan: Any, room: int) -> DensePrompts:
    return DensePrompts(
        torch.tensor(KV_LENS, dtype=torch.int32),
        table(),
        CONTEXTS,
        QUERIES,
        workspace=torch.full((room, LATENT + ROPE), torch.nan, dtype=plan.dtype),
        calls=DenseCalls.choose(plan),
    )


def projections(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    w_uk_t = torch.randn(H, NOPE, LATENT, generator=generator) / 16
    w_uv = torch.randn(H, LATENT, VALUE, generator=generator) / 16
    return w_uk_t.to(dtype), w_uv.to(dtype)


def absorbed(q: Tensor, tokens: list[Tensor]) -> Tensor:
    """Float64, and never a projected key: W_UK goes into the queries, W_UV into the outputs."""
    w_uk_t, w_uv = (w.double() for w in projections(q.dtype))
    made = []
    for keys, context, part in zip(tokens, CONTEXTS, q.double().split(QUERIES), strict=True):
        folded = torch.cat((torch.einsum("thp,hpl->thl", part[..., :NOPE], w_uk_t), part[..., NOPE:]), -1)
        logits = SCALE * torch.einsum("thc,kc->thk", folded, keys)
        unseen = torch.arange(len(keys)) > context + torch.arange(len(part)).unsqueeze(1)
        weights = logits.masked_fill(unseen.unsqueeze(1), -torch.inf).softmax(-1)
        made.append(torch.einsum("thl,hlv->thv", weights @ keys[:, :LATENT], w_uv))
    return torch.cat(made)


def attend(prompts: DensePrompts, layer: BoundLayer, q: Tensor) -> Tensor:
    output = q.new_full((q.shape[0], H * VALUE), torch.nan).view(-1, H, VALUE)
    prompts.attend(q, layer, *projections(q.dtype), output)
    return output


def queries(dtype: torch.dtype = torch.float32) -> Tensor:
    """Behind decode rows of the same tensor, as the engine hands them over."""
    generator = torch.Generator().manual_seed(9)
    return torch.randn(3 + sum(QUERIES), H, NOPE + ROPE, generator=generator).to(dtype)[3:]


@pytest.mark.parametrize("room", [99, 71, 40, 28])
@pytest.mark.parametrize("layout", ["fp32", "fp8_rope_bf16", "fp8_ds_mla", "fp8_flat"])
def test_equals_absorbed_attention(layout: str, room: int) -> None:
    plan = make_plan(layout)
    layer, tokens = make_layer(plan, 0)
    torch.testing.assert_close(
        attend(make_prompts(plan, room), layer, queries()).double(), absorbed(queries(), tokens), **BOUND
    )


def test_each_layer_reads_its_own_pages() -> None:
    plan = make_plan("fp8_rope_bf16")
    prompts = make_prompts(plan, 40)
    for seed in (0, 1):
        layer, tokens = make_layer(plan, seed)
        torch.testing.assert_close(attend(prompts, layer, queries()).double(), absorbed(queries(), tokens), **BOUND)


@pytest.mark.parametrize("room", [99, 40])
def test_triton_kernels(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 keys, values and weights: their own rounding is what remains, 2^-8 a number."""
    monkeypatch.setenv("PAGEDMLA_EXECUTORS", "triton")
    plan = make_plan("fp8_rope_bf16", torch.bfloat16)
    layer, tokens = make_layer(plan, 0)
    prompts, q = make_prompts(plan, room), queries(torch.bfloat16)
    assert prompts.executor == "triton"
    torch.testing.assert_close(attend(prompts, layer, q).double(), absorbed(q, tokens), rtol=0.05, atol=0.03)


def test_cutting_a_prompt_changes_nothing_but_rounding() -> None:
    """A second turn gave other log-probabilities: the first one's keys had been read before they were rounded."""
    plan = make_plan("fp8_rope_bf16")
    layer, _ = make_layer(plan, 0)
    whole = attend(make_prompts(plan, 99), layer, queries())
    for room in (71, 40, 28):
        torch.testing.assert_close(attend(make_prompts(plan, room), layer, queries()), whole, rtol=1e-4, atol=1e-5)


def test_bad_ids_and_small_workspaces_are_refused() -> None:
    plan = make_plan("fp32")
    layer, _ = make_layer(plan, 0)
    with pytest.raises(ValueError, match=r"workspace: expected at least 28 rows, one a query token; got \[27, 576\]"):
        make_prompts(plan, 27)
    prompts = make_prompts(plan, 99)
    prompts._table = (table() + 12).view(torch.uint32)
    with pytest.raises(IndexError, match="lookup_table: row 0, column 0 holds page id 22; kv_blocks has 15 pages"):
        attend(prompts, layer, queries())


def test_agrees_with_the_public_calls() -> None:
    """One pass is decompress, two products and prefill."""
    plan = make_plan("fp8_rope_bf16")
    layer, _ = make_layer(plan, 0)
    lengths, lookup = torch.tensor(KV_LENS, dtype=torch.int32), table().view(torch.uint32)
    values = KVCacheInputsPerDevice(
        layer.pools.blocks, lengths, lookup, 12, 59, None, kv_scales=layer.pools.scales, scales_lookup_table=lookup
    )
    ends = torch.tensor([0, *torch.tensor(KV_LENS).cumsum(0)], dtype=torch.int32)
    rows = pagedmla.decompress(
        values, 0, starts=torch.zeros(3, dtype=torch.int32), key_start_loc=ends, layout=get_layout("fp8_rope_bf16")
    )
    w_uk_t, w_uv = projections()
    k = torch.cat((torch.einsum("kl,hpl->khp", rows[:, :LATENT], w_uk_t), rows[:, None, LATENT:].expand(-1, H, -1)), -1)
    v = torch.einsum("kl,hlv->khv", rows[:, :LATENT], w_uv)
    starts = torch.tensor([0, *torch.tensor(QUERIES).cumsum(0)], dtype=torch.int32)
    expected, _ = pagedmla.prefill(queries(), k, v, sm_scale=SCALE, query_start_loc=starts, key_start_loc=ends)
    torch.testing.assert_close(attend(make_prompts(plan, 99), layer, queries()), expected, rtol=1e-4, atol=1e-5)


def test_the_log_line_names_each_part_and_the_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 queries over an FP8 cache: Triton can't attend, and can do the rest."""
    from pagedmla.plugin.vllm.choices import choices_line

    monkeypatch.setenv("PAGEDMLA_EXECUTORS", "triton,torch")
    plan = make_plan("fp8_rope_bf16")
    line = choices_line(plan, 61, 171, DenseCalls.choose(plan))
    assert line.startswith("pagedmla ")
    assert "serves 61 layers: cache fp8_rope_bf16, 644 bytes a token, pages of 16, 2 heads; store: " in line
    assert "not triton: queries over an FP8 cache are bfloat16 or float16, not float32" in line
    assert "; prompts from 171 query tokens on: dense, torch (" in line
    assert "; all rows: torch (" in choices_line(plan, 61, None, None)
    assert "\n" not in line


def test_a_layer_of_another_layout_is_bound_for_itself() -> None:
    """Pools of one shape passed for one kind: rows of fp8_rope_bf16_prescaled were read as the first layer's."""
    plans = [make_plan(layout) for layout in ("fp8_rope_bf16", "fp8_rope_bf16_prescaled")]
    made = make_prompts(plans[0], sum(KV_LENS))
    found = []
    for plan in plans:
        layer, _ = make_layer(plan, 0)
        found.append([made._bind(layer), make_prompts(plan, sum(KV_LENS))._bind(layer)])
    for shared, alone in found:
        assert shared.layout == alone.layout
        assert shared.planes.rope_scaled is alone.planes.rope_scaled
