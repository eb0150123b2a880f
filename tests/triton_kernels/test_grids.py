"""The peers' grids through the public calls, on the Triton kernels, against `reference/`.

What the grids are and where their boundaries lie: tests/cases/grids.py. How far a result may be off:
tests/cases/bounds.py. The CPU executor takes the attention grids in tests/reference/test_attention.py, and here those
that are about FP8. Memory is NaN wherever a step has no token, unused table columns hold wild ids, and every tensor
that attention is handed stands between sentinels (conftest.py), with PAGEDMLA_CHECK=1.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import grids
from cases.arena import FILL, Geometry, untouched
from cases.bounds import FLOAT32, assert_kernel_agrees
from cases.steps import LAYOUTS, Step, StepCase, build_step, with_values
from torch import Tensor

import pagedmla
from pagedmla import CacheLayout, KVCacheInputsPerDevice
from pagedmla.kv_cache.paged_tensor import raw_view

pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")

EXECUTORS = ["triton", "torch"]
NAMES = {case.name: case for case in grids.ALL}
WITH_TOKENS = [case for case in grids.ALL if case.q_lens]


def make_step(case: StepCase, layout: CacheLayout | str = "fp8_rope_bf16") -> Step:
    return build_step(case, layout, dtype=torch.bfloat16)


def guard(guarded, step: Step) -> Step:
    """The same step, all of whose tensors lie between sentinels and may not be written."""
    tensors = {name: getattr(step.values, name) for name in (
        "kv_blocks", "kv_scales", "lookup_table", "scales_lookup_table", "cache_lengths",
    )}  # fmt: skip
    frozen = {name: guarded.frozen(tensor) for name, tensor in tensors.items() if tensor is not None}
    return replace(
        with_values(step, **frozen), q=guarded.frozen(step.q), query_start_loc=guarded.frozen(step.query_start_loc)
    )


def attend(guarded, step: Step, executor: str = "triton", **changes: object) -> tuple[Tensor, Tensor]:
    step = guard(guarded, step)
    out = guarded.empty((*step.q.shape[:2], step.layout.latent), step.q.dtype)
    call = {**step.call(), **changes}
    return pagedmla.attend(step.q, step.values, step.layer, executor=executor, out=out, **call)  # type: ignore[arg-type]


def meaning(step: Step, **changes: object) -> tuple[Tensor, Tensor]:
    call = {**step.call(), **changes}
    return pagedmla.attend(step.q.double(), step.values, step.layer, executor="reference", **call)  # type: ignore[arg-type]


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", WITH_TOKENS, ids=str)
def test_attention(guarded, case):
    step = make_step(case)
    assert_kernel_agrees(attend(guarded, step), meaning(step))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "fp8_rope_bf16"])
def test_a_mixed_batch_in_every_layout(guarded, layout, executor):
    """FlashAttention's backend of vLLM gives NaN on mixed_small."""
    step = make_step(NAMES["mixed_small"], layout)
    assert_kernel_agrees(attend(guarded, step, executor), meaning(step))


def test_an_idle_rank(guarded):
    step = make_step(NAMES["idle-rank"])
    out, lse = attend(guarded, step)
    assert (out.shape, lse.shape) == ((0, 2, 512), (0, 2))


def test_page_orders_change_no_bit(guarded):
    """SGLang's own list of failures: FlashInfer and FlashMLA crash on interleaved and non-monotonic pages."""
    orders = [NAMES[f"ragged-prefix-{order}"] for order in ("shuffled", "interleaved", "non-monotonic")]
    first, *others = (attend(guarded, make_step(case)) for case in orders)
    for got in others:
        assert torch.equal(got[0], first[0])
        assert torch.equal(got[1], first[1])


# -- FP8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in grids.FLASHINFER_FP8 if c.name.startswith("scales-")], ids=str)
def test_scale_pairs(guarded, case):
    """Content and rope with a scale each, up to a hundredfold apart."""
    step = make_step(case, grids.FLASHINFER_FP8_LAYOUT)
    assert step.values.kv_scales.shape[-1] == 2
    assert_kernel_agrees(attend(guarded, step), meaning(step))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", ["fp8_flat", "fp8_flat-g128", "fp8_rope_bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("name", ["group-scales", "q16"])
def test_fp8(guarded, name, layout, executor):
    (case,) = (case for case in grids.FLASHINFER_FP8 if case.name == name)
    step = make_step(case, layout)
    if name == "group-scales":
        assert step.values.lookup_table[:, :3].tolist() == [[4, 1, 3], [0, 5, -1]]
    assert_kernel_agrees(attend(guarded, step, executor), meaning(step))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("fp8")])
def test_a_cache_of_zeros_gives_zeros(guarded, layout):
    """vllm#49435: an all-zero token became 0 / 0. Equal logits: lse is the logarithm of the number of keys seen."""
    (case,) = (case for case in grids.FLASHINFER_FP8 if case.name == "zeros")
    step = make_step(case, layout)
    out, lse = attend(guarded, step)
    assert bool((out == 0).all())
    seen = torch.tensor([64, *range(65, 81)])
    torch.testing.assert_close(lse, seen.log()[:, None].expand_as(lse), rtol=1e-6, atol=0)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_alias_would_show(guarded, layout, executor):
    """Logit 64 for the token whose content is 100 and -64 for the one whose content is -100."""
    step = grids.row_alias(layout)
    out, lse = attend(guarded, step, executor)
    assert_kernel_agrees((out, lse), meaning(step))
    torch.testing.assert_close(out, torch.full_like(out, 100.0), rtol=4e-3, atol=0)


# -- parts of a split --------------------------------------------------------------------------------------------------


def make_plan(step: Step, partitions: int, **changes: object) -> pagedmla.Plan:
    case = step.case
    held: dict[str, object] = {
        "layout": step.layout, "num_heads": case.heads, "page_size": case.page_size,
        "max_batch": len(case.q_lens), "max_tokens": step.q.shape[0], "max_cache_length": max(case.kv_lens),
        "dtype": step.q.dtype, "device": "cpu", "sm_scale": step.sm_scale, "causal": case.causal,
        "num_partitions": partitions, "executor": "triton",
    }  # fmt: skip
    return pagedmla.plan(**{**held, **changes})  # type: ignore[arg-type]


SPLIT = ["varlen-corner", "mixed_small", "spec_decode_4", "prefix-32-and-63", "query-that-sees-nothing"]


@pytest.mark.parametrize("partitions", [1, 2, 7])
@pytest.mark.parametrize("name", SPLIT)
def test_partitions(guarded, name, partitions):
    """Seven parts are more than most requests have tiles, so some parts are empty."""
    step = make_step(NAMES[name])
    plan = make_plan(step, partitions)
    assert_kernel_agrees(attend(guarded, step, plan=plan), meaning(step))


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("name", ["small_decode", "empty-rows"])
def test_partitions_of_one_token_each(guarded, name, partitions):
    """Without query_start_loc a step is a decode step."""
    step = make_step(NAMES[name])
    got = attend(guarded, step, plan=make_plan(step, partitions), query_start_loc=None)
    assert_kernel_agrees(got, meaning(step))


def mixed(step: Step) -> Step:
    """The step with its leading requests of few tokens declared decode rows."""
    q_lens = step.case.q_lens
    requests = next((b for b, q_len in enumerate(q_lens) if q_len > q_lens[0]), len(q_lens))
    return with_values(step, mixed_step_split=torch.tensor([requests, sum(q_lens[:requests])], dtype=torch.int32))


@pytest.fixture
def launched(monkeypatch):
    """Kernels that this test launches; they run as well."""
    from pagedmla.triton_kernels import decode, merge, pieces, schedule
    from pagedmla.triton_kernels import mixed as mixed_module

    seen: list[str] = []
    for module in (decode, merge, mixed_module, pieces, schedule):
        real = module.launch

        def launch(kernel, grid, *args, real=real, **kwargs):
            seen.append(kernel.fn.__name__)
            real(kernel, grid, *args, **kwargs)

        monkeypatch.setattr(module, "launch", launch)
    return seen


BEHIND = StepCase((1, 1, 17), (130, 64, 70), name="a-prompt-behind-decode-rows")


@pytest.mark.parametrize("case", [NAMES["mixed_small"], BEHIND], ids=str)
@pytest.mark.parametrize("room", ["all pieces", "few", "none"])
@pytest.mark.parametrize("gpu", ["empty", "full"])
def test_prompts_behind_decode_rows(guarded, case, room, gpu, launched, monkeypatch):
    """Prompts that fill a GPU by themselves are a launch of their own, in their own tile; the three rows of padding
    belong to the last launch. A workspace too small for all pieces means fewer of them."""
    from pagedmla.plugin import executor_triton
    from pagedmla.plugin.executor_triton import PartialStates

    if gpu == "full":
        monkeypatch.setattr(executor_triton, "multiprocessors", lambda device: 0)
        monkeypatch.setattr(executor_triton, "places", lambda *_: 8)
    step = mixed(make_step(case))
    requests, _ = step.values.mixed_step_split.tolist()
    assert requests < len(case.q_lens)
    total = step.q.shape[0]
    step = replace(step, q=torch.cat((step.q, torch.full((3, *step.q.shape[1:]), torch.nan, dtype=step.q.dtype))))
    rows = {"all pieces": 16 * 64, "few": 2 * 64, "none": 15}[room]
    space = PartialStates(guarded.empty((rows,), torch.float32), guarded.empty((rows, 512), torch.float32))
    plan = replace(make_plan(step, 3), workspace=space)
    out, lse = attend(guarded, step, plan=plan)
    assert_kernel_agrees((out, lse), meaning(step))
    assert bool((lse[total:] == -torch.inf).all())
    merge = ["merge_cuts_kernel"] * (room != "none")
    apart = ["mixed_kernel"] * (gpu == "full")
    assert launched == ["schedule_kernel", "records_kernel", "pieces_kernel", *merge, *apart]


def test_states_of_shards_merge_to_the_whole(guarded):
    """Decode context parallelism: each rank holds every third page of a request, some ranks none; merged, the states
    are those of one rank."""
    step = make_step(StepCase((1, 1, 1), (64, 30, 7), page_size=16))
    want = meaning(step)
    outs, lses = [], []
    for rank in range(3):
        mine = [list(range(rank, -(-kv_len // 16), 3)) for kv_len in step.case.kv_lens]
        kept = [sum(min(16, kv_len - 16 * page) for page in pages) for pages, kv_len in zip(mine, step.case.kv_lens)]
        tables = {name: torch.full((3, 2), -1, dtype=torch.int32) for name in ("lookup_table", "scales_lookup_table")}
        for name, table in tables.items():
            for b, pages in enumerate(mine):
                table[b, : len(pages)] = getattr(step.values, name)[b, pages]
        shard = with_values(step, cache_lengths=torch.tensor(kept, dtype=torch.int32) - 1, **tables)
        out, lse = attend(guarded, replace(shard, q=step.q))
        outs.append(out)
        lses.append(lse)
    assert bool((torch.stack(lses) == -torch.inf).any())
    for executor in ("triton", "torch"):
        assert_kernel_agrees(pagedmla.merge_states(outs, lses, executor=executor), want, out_bound=2 * 4e-3)


# -- store -------------------------------------------------------------------------------------------------------------


def tokens_of(step: Step, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(7)
    tokens = step.q.shape[0]
    return torch.randn(tokens, 512, generator=g).to(dtype), torch.randn(tokens, 64, generator=g).to(dtype)


STORED = [
    NAMES[name]
    for name in ("mixed_small", "prefix-32-and-63", "empty-rows", "query-that-sees-nothing", "requests-without-queries")
]


@pytest.mark.parametrize("layout", ["fp8_rope_bf16", "fp8_flat-g128", "fp8_ds_mla", "bf16"])
def test_a_store_writes_the_bytes_of_the_meaning(layout):
    """Both pools whole, NaN poison included, after the same store by either."""
    for case in STORED:
        step, other = make_step(case, layout), make_step(case, layout)
        arguments = {"query_start_loc": step.query_start_loc, "layout": step.layout}
        pagedmla.store(*tokens_of(step), step.values, step.layer, executor="triton", **arguments)
        pagedmla.store(*tokens_of(step), other.values, step.layer, executor="reference", **arguments)
        for name in ("kv_blocks", "kv_scales"):
            mine, wanted = getattr(step.values, name), getattr(other.values, name)
            assert (mine is None) == (wanted is None)
            assert mine is None or torch.equal(raw_view(mine), raw_view(wanted)), str(case)


@pytest.mark.parametrize("given", ["by the tensor", "by number"])
@pytest.mark.parametrize("store", grids.MAX_STORES, ids=str)
def test_max_store(store, given):
    """Three tokens from position 1: slot 1 of the first page, both of the second. All else keeps its bytes."""
    layout = LAYOUTS["fp8_rope_bf16"]
    pool = Geometry(store.pages, 1, store.layers, store.page_size, 1, layout.row_elements, store.padding)
    scale_pool = Geometry(store.pages, 1, store.layers, store.page_size, 1, 1, store.scales_padding)
    arena, scale_arena = untouched(pool.elements, layout.value_dtypes[0]), untouched(scale_pool.elements, torch.float32)
    bind = Geometry.strided if given == "by the tensor" else Geometry.short
    scales_table = store.scales_table if store.own_scales_table else store.lookup_table
    values = KVCacheInputsPerDevice(
        bind(pool, arena),
        torch.tensor([store.cache_length], dtype=torch.int32),
        torch.tensor([store.lookup_table], dtype=torch.int32),
        3,
        4,
        -1 if given == "by the tensor" else pool.page_stride,
        kv_scales=bind(scale_pool, scale_arena),
        scales_page_stride=-1 if given == "by the tensor" else scale_pool.page_stride,
        scales_lookup_table=torch.tensor([scales_table], dtype=torch.int32) if store.own_scales_table else None,
    )
    g = torch.Generator().manual_seed(0)
    latent, rope = torch.randn(3, 512, generator=g), torch.randn(3, 64, generator=g)
    want, want_scales = raw_view(arena).clone(), raw_view(scale_arena).clone()
    made = layout.quantize(latent, rope)
    for token in range(3):
        page, slot = divmod(store.cache_length + token, store.page_size)
        first = pool.address(store.lookup_table[page], 0, 1, slot, 0, 0)
        want[first : first + pool.width] = raw_view(made.values[token])
        want_scales[scale_pool.address(scales_table[page], 0, 1, slot, 0, 0)] = raw_view(made.scales[token])[0]
    starts = torch.tensor([0, 3], dtype=torch.int32)
    pagedmla.store(latent, rope, values, 1, query_start_loc=starts, layout=layout, executor="triton")
    assert torch.equal(raw_view(arena), want)
    assert torch.equal(raw_view(scale_arena), want_scales)
    assert int((want == FILL).sum()) > 0


def test_max_decoy(guarded):
    """Scales resolve through their own table: the one value page is page 0, and so is the decoy among the scales."""
    decoy = grids.MAX_DECOY
    step = make_step(StepCase((1,), (1,), page_size=1, heads=4))
    page = int(step.values.lookup_table[0, 0])
    blocks = step.values.kv_blocks[page : page + 1].clone()
    scales = torch.full((decoy.scale_pages, 1, 2, 1, 1, 1), torch.nan)
    scales[0], scales[decoy.scale_page] = decoy.decoy, decoy.truth
    step = with_values(
        step, kv_blocks=blocks, kv_scales=scales, lookup_table=torch.tensor([[0]], dtype=torch.int32),
        scales_lookup_table=torch.tensor([[decoy.scale_page]], dtype=torch.int32),
    )  # fmt: skip
    out, _ = attend(guarded, step)
    codes = blocks[0, 0, step.layer, 0, 0, :512].float()
    torch.testing.assert_close(out[0].float(), (codes * decoy.truth).expand(4, 512), rtol=4e-3, atol=FLOAT32)
