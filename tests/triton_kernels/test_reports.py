"""Public bug reports that concern these kernels: each is a test that tells what a user saw and why it happened.

Many stories stand beside the kernel that they concern. TOLD_ELSEWHERE says where, and a test holds it to that; the rest
stands here, through the public calls.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases.attending import run_decode
from cases.bounds import LSE_ABSOLUTE, assert_kernel_agrees
from cases.steps import Step, StepCase, build_step, with_rows, with_values
from torch import Tensor

import pagedmla
from pagedmla import get_layout
from pagedmla.hardware.targets import TARGETS, assumed_target
from pagedmla.kv_cache.paged_tensor import raw_view

pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")

from pagedmla.triton_kernels.launch import intercepted
from pagedmla.triton_kernels.variants import attention_variants

TOLD_ELSEWHERE = {
    "FlashMLA#11": "test_mixed.py::test_requests_without_keys_and_padding_rows",
    "flashinfer#868": "test_mixed.py::test_requests_without_keys_and_padding_rows",
    "vllm#35969": "test_decode.py::test_padding_rows",
    "sglang#39899": "test_decode.py::test_a_step_without_requests",
    "vllm#27491": "test_merge.py::test_all_splits_empty_gives_the_empty_state",
    "imp#1678": "test_mixed.py::test_table_columns_past_the_end_hold_anything",
    "b12x#156": "test_store.py::test_ids_outside_the_pool_are_dropped_whole",
    "vllm#47671": "test_mixed.py::test_offsets_beyond_two_to_the_31",
    "flashinfer#3130": "test_merge.py::test_addresses_past_two_to_the_31",
    "MAX": "test_store.py::test_scale_pool_may_be_larger_or_smaller_than_the_value_pool",
    "flashinfer#3915": "test_mixed.py::test_strided_tables",
    "vllm#51848": "test_decode.py::test_rows_fold",
    "FlashMLA#28": "test_mixed.py::test_layouts",
    "vllm#45227": "test_mixed.py::test_causal_rows_that_see_nothing",
    "FlashMLA#182": "test_mixed.py::test_seventy_thousand_rows_stay_on_the_first_axis",
    "vllm#49435": "test_store.py::test_zero_token_keeps_a_positive_scale",
    "aiter#5535": "test_mixed.py::test_weights_of_sparse_attention_by_hand",
    "vllm#48611": "test_decompress.py::test_two_requests_may_share_a_prefix",
    "sglang#33064": "test_merge.py::test_natural_log_and_not_base_two",
    "vllm#49294": "test_merge.py::test_empty_splits_are_never_read",
    "vllm#24966": "test_merge.py::test_one_live_split_of_many_comes_through_unchanged",
    "trtllm#15138": "test_pieces.py::test_pieces_merge_to_the_whole",
    "sglang#27954": "test_mixed.py::test_heads_that_divide_nothing",
    "flashinfer#810": "test_mixed.py::test_page_sizes_agree",
}


@pytest.mark.parametrize(("report", "place"), TOLD_ELSEWHERE.items())
def test_told_elsewhere(report, place):
    file, name = place.split("::")
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert report in (ast.get_docstring(function) or "")


def make_step(case: StepCase, layout: str = "fp8_rope_bf16", **options: object) -> Step:
    return build_step(case, layout, dtype=torch.bfloat16, **options)  # type: ignore[arg-type]


def attend(step: Step, **changes: object) -> tuple[Tensor, Tensor]:
    call = {**step.call(), **changes}
    return pagedmla.attend(step.q, step.values, step.layer, executor="triton", **call)  # type: ignore[arg-type]


def same_bits(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(raw_view(mine), raw_view(theirs)) for mine, theirs in zip(got, want))


@pytest.fixture
def recorded():
    """(kernel, grid, tensors) of every launch of the test, none of which happens."""
    seen: list[tuple[str, tuple[int, ...], list[Tensor]]] = []

    def receive(kernel, grid, args, kwargs):
        seen.append((kernel.fn.__name__, grid, [arg for arg in args if isinstance(arg, Tensor)]))

    with intercepted(receive):
        yield seen


# -- empty and poisoned ------------------------------------------------------------------------------------------------


def test_sglang_5875_a_table_without_columns():
    """TP16 with all sequences of length 0 ended in an illegal memory access: the kernel read a page id for request 0
    of a table that had no columns."""
    step = make_step(StepCase((1,) * 16, (0,) * 16))
    none = torch.zeros(16, 0, dtype=torch.int32)
    out, lse = attend(with_values(step, lookup_table=none, scales_lookup_table=none))
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("layout", ["fp8_flat-g128", "fp8_rope_bf16", "fp8_ds_mla", "bf16"])
def test_flashinfer_941_and_vllm_57716_poison_leaks(layout):
    """A pool recycled from another dtype made outputs NaN: its bytes were NaN in e4m3, and a masked weight of 0 still
    multiplied them. 13 tokens on pages of 4 leave three slots of the last page, whose bytes may change no bit."""
    case = StepCase((1, 2), (13, 6), page_size=4)
    want = attend(make_step(case, layout, poison=0x00))
    assert bool(want[0].isfinite().all())
    for poison in (0xFF, 0x7F, 0x42):
        assert same_bits(attend(make_step(case, layout, poison=poison)), want)


def test_b12x_156_a_length_beyond_the_table():
    """A length beyond the table made the kernel read the next request's row as its own, and so another's cache:
    130 tokens on pages of 64 need a third column."""
    step = make_step(StepCase((1, 1), (130, 20), page_size=64))
    tables = {name: getattr(step.values, name)[:, :2] for name in ("lookup_table", "scales_lookup_table")}
    with pytest.raises(ValueError, match=r"lookup_table: .*3 columns"):
        attend(with_values(step, **tables))


def test_flashinfer_3943_only_active_entries_are_checked():
    """A bounds check that looked at padding too refused every captured graph: the columns that nobody uses hold -1."""
    step = make_step(StepCase((1, 1), (17, 0)))
    assert_kernel_agrees(attend(step, check=True), step.dense_attention())


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["fp8_flat-g128", "fp8_rope_bf16", "fp8_ds_mla", "bf16"])
def test_vllm_37090_page_strides_are_read(layout):
    """GLM-4.7-Flash answered garbage in a pool with padded pages and interleaved layers: the kernel took a page's
    stride for page size times row. So did MAX with scales, which then belonged to the block before."""
    step = make_step(StepCase((1, 3), (40, 3)), layout, layers=3)
    want = attend(step)
    changes: dict[str, Tensor] = {}
    for name, padding in (("kv_blocks", 16), ("kv_scales", 5)):
        pool = getattr(step.values, name)
        if pool is None:
            continue
        pages, page = pool.shape[0], pool[0].numel()
        arena = torch.full((pages * (page + padding) * pool.element_size(),), 0xFF, dtype=torch.uint8)
        padded = arena.view(pool.dtype).as_strided(pool.shape, (page + padding, *pool.stride()[1:]))
        raw_view(padded).copy_(raw_view(pool))
        changes[name] = padded
    assert same_bits(attend(with_values(step, **changes)), want)


def test_vllm_56314_a_row_of_another_width():
    """A kernel with 576 columns built in read past rows of a model without rope: a fault instead of a sentence."""
    layout = get_layout("bf16", latent=512, rope=32)
    step = build_step(StepCase((1,), (5,)), layout, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="latents of 512 or 256 and a rope of 64, not 512 and 32"):
        attend(step)


# -- several queries a request -----------------------------------------------------------------------------------------


def test_aiter_3046_queries_of_128_heads_keep_their_mask():
    """Speculative decoding with 128 heads ignored the causal mask: rows were folded as if all were one token's.
    Two tokens over 1, 2 and 66 keys: the first of them must not see the last key."""
    step = make_step(StepCase((2, 2, 2), (1, 2, 66), heads=128))
    out, lse = attend(step)
    assert bool((lse[0] == -torch.inf).all())
    assert_kernel_agrees((out, lse), step.dense_attention())


@pytest.mark.parametrize(
    ("target", "q_len", "tiles"),
    [
        ("sm_90", 1, 1),
        ("sm_90", 2, 2),
        ("sm_90", 3, 1),
        ("sm_90", 4, 1),
        ("sm_90", 5, 2),
        ("sm_90", 8, 2),
        ("sm_100", 2, 1),
    ],
)
def test_flashmla_30_keys_are_read_once_for_64_rows(guarded, recorded, target, q_len, tiles):
    """Speculative decoding fell off a cliff where a request's rows left one tile, since each further tile reads the
    cache again: the tile must grow with the rows. 16 heads fill 64 rows with four query tokens; until then a request is
    one program a split, and from there on one for every 64 rows. Only on Hopper two tokens are two tiles of 16, for
    want of a compiler that gets tiles of 32 right."""
    step = make_step(StepCase((q_len,) * 3, (70,) * 3, heads=16))
    with assumed_target(TARGETS[target]):
        run_decode(guarded, step)
    ((kernel, grid, _),) = recorded
    assert (kernel, grid[0]) == ("decode_kernel", 3 * tiles)


def test_vllm_54035_decode_is_prefill_token_by_token():
    """Decoding differed from prefill from position 97 on, where the kernel's second tile began."""
    step = make_step(StepCase((4,), (98,)))
    out, lse = attend(step)
    for i in range(4):
        cached = torch.tensor([94 + i], dtype=torch.int32)
        one = replace(with_values(step, cache_lengths=cached), q=step.q[i : i + 1])
        alone = attend(one, query_start_loc=None)
        torch.testing.assert_close(alone[0][0].float(), out[i].float(), rtol=2**-7, atol=1e-4)
        torch.testing.assert_close(alone[1][0], lse[i], rtol=0, atol=LSE_ABSOLUTE)


# -- scales and FP8 ----------------------------------------------------------------------------------------------------


def stored(latent: Tensor, rope: Tensor, layout: str) -> Step:
    """A step of one query over tokens that the store kernel has written."""
    tokens = latent.shape[0]
    step = make_step(StepCase((1,), (tokens,)), layout, poison=0x00)
    values = replace(step.values, cache_lengths=torch.zeros(1, dtype=torch.int32))
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    pagedmla.store(latent, rope, values, step.layer, query_start_loc=starts, layout=step.layout, executor="triton")
    return replace(step, rows=[torch.cat((latent, rope), 1).double()])  # what was meant, unquantised


def test_vllm_42956_rope_does_not_saturate():
    """A scale calibrated on contents of 0.05 clipped ropes of 1.0, and attention lost its positions. Here logits come
    from the rope alone, and must be those of the rope in bf16, whatever the content."""
    g = torch.Generator().manual_seed(0)
    latent = 0.05 * torch.randn(40, 512, generator=g)
    rope = torch.randn(40, 64, generator=g).sign().bfloat16().float()
    step = stored(latent, rope, "fp8_rope_bf16")
    q = step.q.clone()
    q[..., :512] = 0
    step = replace(step, q=q)
    torch.testing.assert_close(attend(step)[1].double(), step.dense_attention()[1], rtol=0, atol=LSE_ABSOLUTE)


@pytest.mark.parametrize("layout", ["fp8_flat", "fp8_rope_bf16", "fp8_ds_mla"])
def test_trtllm_16916_the_scale_that_was_written_is_the_scale_that_is_read(layout):
    """GSM8K fell from 96 to 74 when scales were absent at reading: contents of size 30 came out as codes."""
    g = torch.Generator().manual_seed(0)
    step = stored(30 * torch.randn(40, 512, generator=g), torch.randn(40, 64, generator=g), layout)
    step = replace(step, sm_scale=step.sm_scale / 30)
    want = step.dense_attention()[0]

    def loss(read: Step) -> float:
        return float((attend(read)[0].double() - want).norm() / want.norm())

    assert loss(step) < 0.05
    if step.values.kv_scales is not None:
        assert loss(with_values(step, kv_scales=torch.ones_like(step.values.kv_scales))) > 0.5
        with pytest.raises(ValueError, match="kv_scales"):
            attend(with_values(step, kv_scales=None, scales_page_stride=None, scales_lookup_table=None))


def test_sglang_flashmla_queries_keep_a_scale_of_their_own():
    """SGLang's FlashMLA path quantises queries with the scale of the keys, so that queries of 100 over keys of 0.1
    saturate. Here queries are in the thousands over latents of a thousandth, and logits stay exact."""
    step = make_step(StepCase((1, 1), (40, 3), magnitude=1e-3, rope_magnitude=1e-3))
    assert float(step.q.abs().max()) > 3000
    assert_kernel_agrees(attend(step), step.dense_attention())


@pytest.mark.parametrize("layout", ["fp8_flat", "fp8_rope_bf16", "fp8_ds_mla"])
def test_vllm_45562_bytes_are_e4m3fn(layout):
    """Bytes read as e4m3fnuz are off by 2 exactly, and 0x80, minus zero, is NaN there. A cache of 1.0 is 1.0, and
    one of -0.0 is 0."""
    step = make_step(StepCase((1,), (20,)), layout)
    one, zero = torch.ones(20, 512), torch.full((20, 512), -0.0)
    rope = torch.zeros(20, 64)
    out, _ = attend(with_rows(step, [one], [rope]))
    assert bool((out == 1).all())
    step = with_rows(step, [zero], [rope])
    page = int(step.values.lookup_table[0, 0])
    assert int(raw_view(step.values.kv_blocks)[page, 0, step.layer, 0, 0, 0]) == 0x80
    out, lse = attend(step)
    assert bool((out == 0).all())
    torch.testing.assert_close(lse, torch.tensor(20.0).log().expand_as(lse))


def test_fa_104_no_narrow_accumulator():
    """FP8 MMAs of Hopper accumulate with about 14 bits: a needle in 128k keys was found in 13 % of cases instead of
    91. No variant multiplies in FP8, so none has that accumulator."""
    types = {(v.constants["LATENT_MMA"], v.constants["ROPE_MMA"]) for v in attention_variants(["sm_90", "sm_100"])}
    assert types == {("float16", "float16"), ("float16", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")}


def test_flashmla_192_what_accuracy_costs_is_written_down():
    """An accuracy fix made decoding slower, and users asked for the trade in writing. Ours: no FP8 MMA for scores,
    since queries rounded to e4m3 move lse by 1e-2 where ours is within 1e-5. docs/kernels/decode_triton.md says so, and
    this is the figure."""
    step = make_step(StepCase((1,), (130,), heads=16))
    want = step.dense_attention()[1]
    ours = float((attend(step)[1].double() - want).abs().max())
    scale = step.q.float().abs().amax(-1, keepdim=True) / 448
    rounded = (step.q.float() / scale).to(torch.float8_e4m3fn).double() * scale
    theirs = float((replace(step, q=rounded).dense_attention()[1] - want).abs().max())
    assert ours < LSE_ABSOLUTE
    assert 3e-3 < theirs < 3e-2
    page = Path(__file__).parents[2] / "docs/kernels/decode_triton.md"
    assert "FP8 MMA for scores isn't used" in page.read_text(encoding="utf-8")


# -- states and splits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
def test_vllm_47801_lse_is_float32(partitions):
    """An LSE kept in bf16 has a spacing of 0.0625 at 10: a weight in a merge is then 3 % off."""
    step = make_step(StepCase((1,), (200,)))
    step = with_values(replace(step, sm_scale=step.sm_scale * 4), mla_num_partitions=partitions)
    _, lse = attend(step)
    assert lse.dtype == torch.float32
    want = step.dense_attention()[1]
    assert float((want - want.bfloat16().double()).abs().max()) > 100 * LSE_ABSOLUTE  # bf16 would show
    torch.testing.assert_close(lse.double(), want, rtol=1e-6, atol=LSE_ABSOLUTE)


def test_vllm_51119_a_captured_split_serves_every_length(recorded):
    """A graph captured at 64 keys replayed one split for ever. Grids follow from the plan: a step of 64 keys and one of
    65,536 are the same launches, in which the kernels find the lengths."""
    grids = []
    for kv_len in (64, 65_536):
        step = make_step(StepCase((1, 1), (64, 64), page_size=64))
        table = step.values.lookup_table[:, :1].expand(2, 1024).contiguous()  # one page over and over
        scales_table = step.values.scales_lookup_table[:, :1].expand(2, 1024).contiguous()
        step = with_values(
            step, lookup_table=table, scales_lookup_table=scales_table, max_cache_length=65_536,
            cache_lengths=torch.full((2,), kv_len - 1, dtype=torch.int32),
        )  # fmt: skip
        plan = pagedmla.plan(
            layout=step.layout, num_heads=2, page_size=64, max_batch=2, max_tokens=2, max_cache_length=65_536,
            dtype=torch.bfloat16, device="cpu", sm_scale=step.sm_scale, executor="triton",
        )  # fmt: skip
        attend(step, plan=plan)
        grids.append([(kernel, grid) for kernel, grid, _ in recorded])
        recorded.clear()
    assert grids[0] == grids[1]
    *_, (kernel, (pieces,)), (last, _) = grids[0]
    assert (kernel, last) == ("pieces_kernel", "merge_cuts_kernel")
    assert pieces > 2  # room for cuts


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pool", "asked"), [("fp8_ds_mla", "fp8_flat"), ("fp8_flat", "fp8_ds_mla")])
def test_gcnasm_50_two_layouts_are_called_fp8_mla(pool, asked):
    """FP8 MLA meant rows of 576 bytes to one project and of 656 to another, and it took an analysis to see why results
    differed. A pool read as the other is refused, by name."""
    step = make_step(StepCase((1,), (5,)), pool)
    with pytest.raises(ValueError, match=rf"kv_blocks: .* for layout {asked}; .* A pool of such rows is {pool}\."):
        attend(step, layout=get_layout(asked))


@pytest.mark.parametrize(("pool", "asked"), [("bf16", "fp8_flat"), ("fp8_flat", "bf16")])
def test_modular_6432_a_dtype_that_doesnt_fit_is_explained(pool, asked):
    """An FP8 cache failed with "expected input to be dtype float8_e4m3fn, got bfloat16", which is right and helps
    nobody: the sentence must name the tensor, the layout that asks for the dtype, and the layout that the pool has."""
    step = make_step(StepCase((1,), (5,)), pool)
    with pytest.raises(ValueError, match=rf"kv_blocks: expected .* for layout {asked}; got .* is {pool}\."):
        attend(step, layout=get_layout(asked))


# -- pools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["fp8_flat-g128", "fp8_rope_bf16", "fp8_ds_mla"])
def test_sglang_35291_cost_does_not_follow_the_pool(recorded, layout):
    """43 % of a step went into casting the whole pool to bf16. The kernels are handed the pools' own memory, and a pool
    ten times as large changes nothing about the launch."""
    case = StepCase((1, 1), (40, 3))
    step = make_step(case, layout)
    grids = []
    for factor in (1, 10):
        pools = {
            name: torch.cat([pool] * factor) if factor > 1 else pool
            for name in ("kv_blocks", "kv_scales")
            if (pool := getattr(step.values, name)) is not None
        }
        attend(with_values(step, **pools))
        ((kernel, grid, tensors),) = recorded
        recorded.clear()
        grids.append((kernel, grid))
        memory = {pool.untyped_storage().data_ptr() for pool in pools.values()}
        others = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in memory]
        assert len(others) < len(tensors) - 2  # latent, rope and scales are views into the pools
        assert max(tensor.nbytes for tensor in others) <= step.q.nbytes  # and nothing else is larger than the queries
    assert grids[0] == grids[1]


def test_sglang_39089_scales_that_stay_behind():
    """Pages restored from the host came back with whatever scales the device held. Moved with their scales, by both
    tables, they give the same bits; moved without, they don't."""
    step = make_step(StepCase((1,), (40,)))
    want = attend(step)
    values = step.values
    tables = {name: getattr(values, name).clone() for name in ("lookup_table", "scales_lookup_table")}
    pools = {"lookup_table": values.kv_blocks.clone(), "scales_lookup_table": values.kv_scales.clone()}
    for name, table in tables.items():
        old = table[0, :3].long()
        free = [page for page in range(pools[name].shape[0]) if page not in old.tolist()][:3]
        raw_view(pools[name])[free] = raw_view(pools[name])[old]
        raw_view(pools[name])[old] = -1 if name == "scales_lookup_table" else 0xFF
        table[0, :3] = torch.tensor(free, dtype=torch.int32)
    moved = with_values(step, kv_blocks=pools["lookup_table"], kv_scales=pools["scales_lookup_table"], **tables)
    assert same_bits(attend(moved), want)
    left = with_values(moved, scales_lookup_table=values.scales_lookup_table)
    assert bool(attend(left)[0].isnan().all())
    with pytest.raises(ValueError, match=r"scale"):
        attend(left, check=True)


def test_trtllm_2699_prefix_reuse():
    """A reused FP8 cache answered differently from a fresh one. Two requests over the same pages, one after a prefix of
    two pages that it shares, give what each gives alone."""
    step = make_step(StepCase((1, 1), (32, 40)))
    values = step.values
    tables = {}
    for name in ("lookup_table", "scales_lookup_table"):
        tables[name] = getattr(values, name)[[1, 1]]
    step = replace(step, q=step.q[[1, 1]])
    step = with_values(step, **tables)
    out, lse = attend(step)
    alone = with_values(replace(step, q=step.q[:1]), cache_lengths=values.cache_lengths[:1],
                        **{name: table[:1] for name, table in tables.items()})  # fmt: skip
    assert torch.equal(attend(alone, query_start_loc=None)[0][0], out[0])
    dense = replace(step, rows=[step.rows[1][:32], step.rows[1]])
    assert_kernel_agrees((out, lse), dense.dense_attention())
