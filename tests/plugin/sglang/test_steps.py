"""Steps of every mode over SGLang's real classes, each against float64 attention over what the pool holds.

Why these: pages of 1, 16 and 64 tokens, so that a page is a slot, part of a prompt, and all of one; prompts of 70, 5
and 9 tokens, so that one ends inside a page, one is shorter than any, and one begins behind 64 shared tokens; pages in
no order; drafts of which all, some and one are accepted, so that the next step writes over the rest. Whatever wasn't
written is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

POOLS = [("bf16", None), ("fp8_e4m3", None), ("fp8_e4m3", 0.031), ("fp8_rope_bf16", None)]
DRAFTS = 4


@pytest.fixture
def backend_of(published: Any) -> Callable[[Any], Any]:
    def make(engine: Any) -> Any:
        from pagedmla.plugin.sglang.entry_points import create

        return create(engine.runner)

    return make


@pytest.mark.parametrize("split", [False, True], ids=["joined", "split"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("pool", "k_scale"), POOLS)
def test_a_life_of_requests(
    engine: Any, backend_of: Any, pool: str, k_scale: float | None, page_size: int, split: bool
) -> None:
    """Prompts, a shared prefix beside running requests, decode, and drafts verified and accepted in part."""
    made = engine(pool, page_size, k_scale=k_scale)
    backend = backend_of(made)
    long, short = made.request(), made.request()
    made.run(backend, "EXTEND", [(long, 70), (short, 5)], split=split)
    shared = made.request(long, 64)
    made.run(backend, "MIXED", [(shared, 9), (long, 1), (short, 1)], split=split)
    everyone = [(long, 1), (short, 1), (shared, 1)]
    for _ in range(2):
        made.run(backend, "DECODE", everyone, split=split)
    drafts = [(request, DRAFTS) for request, _ in everyone]
    verify = {"spec_info": made.verify_input(DRAFTS), "split": split}
    made.run(backend, "TARGET_VERIFY", drafts, accepted=[4, 2, 1], **verify)
    made.run(backend, "DRAFT_EXTEND_V2", drafts, accepted=[1, 4, 2], split=split)
    made.run(backend, "TARGET_VERIFY", drafts, **verify)
    made.run(backend, "EXTEND", [(short, 40)], split=split)  # a chunk of a prompt, or another turn
    made.run(backend, "DECODE", everyone, split=split)


@pytest.mark.parametrize("pool", ["bf16", "fp8_rope_bf16"])
def test_queries_of_a_served_model(engine: Any, backend_of: Any, pool: str) -> None:
    """bfloat16 all through: outputs are rounded to it once."""
    made = engine(pool, 64, dtype=torch.bfloat16)
    backend = backend_of(made)
    one, two = made.request(), made.request()
    made.run(backend, "EXTEND", [(one, 70), (two, 5)], tolerance=2e-2)
    made.run(backend, "DECODE", [(one, 1), (two, 1)], tolerance=2e-2)


def test_cached_tokens_are_not_written_again(engine: Any, backend_of: Any) -> None:
    made = engine()
    backend = backend_of(made)
    request = made.request()
    made.run(backend, "EXTEND", [(request, 20)])
    before = [buffer.clone() for buffer in made.pool.kv_buffer]
    request.cached -= 1
    batch = made.batch("DECODE", [(request, 1)])
    backend.init_forward_metadata(batch)
    for layer, (q, out) in enumerate(made.forward(backend, batch, split=False, save=False)):
        expected = made.expected(layer, q, request, request.cached)
        torch.testing.assert_close(out.view_as(expected).double(), expected, rtol=0, atol=2e-5)
    assert all(
        torch.equal(was.view(torch.uint8), now.view(torch.uint8)) for was, now in zip(before, made.pool.kv_buffer)
    )


def test_padding_of_data_parallel_ranks(engine: Any, backend_of: Any) -> None:
    """Metadata is made first, then the batch grows to what other ranks have: rows behind it came from stale tables."""
    made = engine()
    backend = backend_of(made)
    one, two = made.request(), made.request()
    made.run(backend, "EXTEND", [(one, 20), (two, 3)])
    batch = made.batch("DECODE", [(one, 1), (two, 1)])
    backend.init_forward_metadata(batch)
    batch.out_cache_loc = torch.cat((batch.out_cache_loc, torch.zeros(3, dtype=torch.int64)))
    for layer, (q, out) in enumerate(made.forward(backend, batch, split=False)):
        for b, request in enumerate((one, two)):
            expected = made.expected(layer, q[b : b + 1], request, request.cached)
            torch.testing.assert_close(out[b].view_as(expected).double(), expected, rtol=0, atol=2e-5)
        assert bool((out[2:] == 0).all())


def test_requests_without_a_query(engine: Any, backend_of: Any) -> None:
    """A prompt step padded to more requests lists the query tokens of the real ones alone."""
    made = engine()
    backend = backend_of(made)
    request = made.request()
    batch = made.batch("EXTEND", [(request, 20)])
    batch.batch_size = 3
    batch.req_pool_indices = torch.tensor([request.row, 0, 0])
    batch.seq_lens = torch.tensor([20, 1, 1])
    backend.init_forward_metadata(batch)
    for layer, (q, out) in enumerate(made.forward(backend, batch, split=False)):
        expected = made.expected(layer, q, request, 0)
        torch.testing.assert_close(out.view_as(expected).double(), expected, rtol=0, atol=2e-5)


def test_a_step_larger_than_the_plan(engine: Any, backend_of: Any) -> None:
    """Prompts can exceed a chunk (a dynamic chunk, a warm-up): the plan grows instead of stopping the engine."""
    made = engine(page_size=16)
    backend = backend_of(made)
    assert backend.layers.max_tokens == 64 + 7
    request = made.request()
    made.run(backend, "EXTEND", [(request, 100)])
    assert backend.layers.max_tokens == 100
    made.run(backend, "DECODE", [(request, 1)])


def test_idle_ranks_have_nothing_to_attend(engine: Any, backend_of: Any) -> None:
    made = engine()
    backend = backend_of(made)
    batch = made.batch("IDLE", [], extend_seq_lens_cpu=None)
    backend.init_forward_metadata(batch)
    out = backend.forward(torch.empty(0, 3 * 576), None, None, made.layers[0], batch)
    assert out.shape == (0, 3 * 512)


# -- captured graphs: what the host does around them


class NoSync(TorchDispatchMode):
    """Refuses what would wait for a device: reading a tensor's value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "a device value was read"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_sync() -> Iterator[None]:
    with NoSync():
        yield


def replay_view(made: Any, mode: str, members: list[tuple[Any, int]], size: int, **more: Any) -> Any:
    """What the graph runners hand over before a replay: buffers for `size` requests, padded with row 0 and length 1."""
    batch = made.batch(mode, members, **more)
    padding = size - len(members)
    width = members[0][1]
    view = {
        "batch_size": size,
        "forward_mode": batch.forward_mode,
        "req_pool_indices": torch.cat((batch.req_pool_indices, torch.zeros(padding + 2, dtype=torch.int64))),
        "seq_lens": torch.cat((batch.seq_lens, torch.ones(padding + 2, dtype=torch.int64))),
        "seq_lens_cpu": None,
        "out_cache_loc": torch.cat((batch.out_cache_loc, torch.zeros(padding * width, dtype=torch.int64))),
        "spec_info": batch.spec_info,
    }
    return SimpleNamespace(**view)


@pytest.mark.parametrize(("mode", "width"), [("DECODE", 1), ("TARGET_VERIFY", DRAFTS), ("DRAFT_EXTEND_V2", DRAFTS)])
@pytest.mark.parametrize("page_size", [1, 64])
def test_graphs_find_their_buffers(engine: Any, backend_of: Any, mode: str, width: int, page_size: int) -> None:
    """Captured for four requests, replayed for three and for two: same addresses, this step's numbers, no sync."""
    made = engine("fp8_rope_bf16", page_size)
    backend = backend_of(made)
    members = [made.request() for _ in range(3)]
    made.run(backend, "EXTEND", list(zip(members, (70, 5, 18))))
    backend.init_cuda_graph_state(4, 4 * width)
    more = {"spec_info": made.verify_input(width)} if mode == "TARGET_VERIFY" else {}
    captured = replay_view(made, mode, [(members[0], width)], 4, **more)
    with NoSync():
        backend.init_forward_metadata_out_graph(captured, in_capture=True)
        backend.init_forward_metadata_in_graph(captured)
    step = backend.forward_metadata
    where = [getattr(step._rows, name).data_ptr() for name in ("cache_lengths", "lookup_table", "query_start_loc")]
    for active in (members, members[1:]):
        view = replay_view(made, mode, [(request, width) for request in active], 4, **more)
        with NoSync():
            backend.init_forward_metadata_out_graph(view)
        assert backend.forward_metadata is step
        rows = step._rows
        assert where == [getattr(rows, n).data_ptr() for n in ("cache_lengths", "lookup_table", "query_start_loc")]
        batch = made.batch(mode, [(request, width) for request in active], **more)
        batch.out_cache_loc = view.out_cache_loc
        for layer, (q, out) in enumerate(made.forward(backend, batch, split=False)):
            for b, request in enumerate(active):
                mine = slice(b * width, (b + 1) * width)
                expected = made.expected(layer, q[mine], request, request.cached)
                torch.testing.assert_close(out[mine].view_as(expected).double(), expected, rtol=0, atol=2e-5)
        for request in active:
            request.cached += width


def test_graphs_of_several_sizes_share_buffers(engine: Any, backend_of: Any) -> None:
    made = engine()
    backend = backend_of(made)
    request = made.request()
    made.run(backend, "EXTEND", [(request, 20)])
    backend.init_cuda_graph_state(4, 4)
    steps = []
    for size in (4, 1):
        backend.init_forward_metadata_out_graph(replay_view(made, "DECODE", [(request, 1)], size), in_capture=True)
        steps.append(backend.forward_metadata)
    assert steps[0] is not steps[1]
    assert steps[0]._rows.lookup_table.data_ptr() == steps[1]._rows.lookup_table.data_ptr()
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_graph_steps_before_their_buffers(engine: Any, backend_of: Any) -> None:
    made = engine()
    backend = backend_of(made)
    request = made.request()
    with pytest.raises(RuntimeError, match="pagedmla: expected init_cuda_graph_state before"):
        backend.init_forward_metadata_out_graph(replay_view(made, "DECODE", [(request, 1)], 1))
    with pytest.raises(RuntimeError, match="pagedmla: expected init_forward_metadata before"):
        made.forward(backend, made.batch("DECODE", [(request, 1)]), split=False)


def test_graphs_of_whole_prompts_are_refused(engine: Any, backend_of: Any) -> None:
    """They would replay the tables of the prompt that they were captured with."""
    made = engine()
    backend = backend_of(made)
    backend.init_cuda_graph_state(4, 4)
    batch = made.batch("EXTEND", [(made.request(), 3)])
    with pytest.raises(ValueError, match="--cuda-graph-backend-prefill: expected breakable or disabled"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


# -- drafts


def test_each_draft_sees_one_token_more(engine: Any, published: Any) -> None:
    """A chain of three drafts is two forwards of the draft model, at seq_lens and seq_lens + 1."""
    from pagedmla.plugin.sglang.backend import PagedMLAAttnBackend
    from pagedmla.plugin.sglang.drafts import PagedMLAMultiStepDraftBackend

    made = engine("fp8_rope_bf16", 16)
    request, other = made.request(), made.request()
    made.run(PagedMLAAttnBackend(made.runner), "EXTEND", [(request, 15), (other, 3)])
    drafts = PagedMLAMultiStepDraftBackend(made.runner, 1, 3)
    assert len(drafts.attn_backends) == 2
    members = [(request, 2), (other, 2)]
    batch = made.batch("TARGET_VERIFY", members, spec_info=made.verify_input(2))  # takes two slots each
    slots = batch.out_cache_loc.view(2, 2)
    for eager in (True, False):
        if eager:
            drafts.init_forward_metadata(batch)
        else:
            drafts.init_cuda_graph_state(2, 2)
            drafts.init_forward_metadata_out_graph(batch, in_capture=True)
        for i, backend in enumerate(drafts.attn_backends):
            step = made.batch("DECODE", [])
            step.batch_size, step.out_cache_loc = 2, slots[:, i]
            for layer, (q, out) in enumerate(made.forward(backend, step, split=False)):
                for b, (one, _) in enumerate(members):
                    expected = made.expected(layer, q[b : b + 1], one, one.cached + i)
                    torch.testing.assert_close(out[b].view_as(expected).double(), expected, rtol=0, atol=2e-5)


# -- DeepSeek's layer around ours


def test_deepseek_joins_queries_and_projects_our_output(engine: Any, backend_of: Any) -> None:
    """The engine's own `forward_absorb_core`: what it hands a backend that it doesn't know, and what it makes of it."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import DeepseekMLAForwardMixin

    made = engine("fp8_rope_bf16")
    backend = backend_of(made)
    request = made.request()
    batch = made.batch("EXTEND", [(request, 20)])
    backend.init_forward_metadata(batch)
    w_vc = torch.randn(3, 512, 24) / 20
    attention = SimpleNamespace(
        current_attention_backend="pagedmla", attn_mqa=made.layers[0], num_local_heads=3, kv_lora_rank=512,
        v_head_dim=24, w_vc=w_vc, use_deep_gemm_bmm=False, kv_b_proj=None, next_skip_topk=None, dcp_size=1,
        is_dcp_mla_decode_phase=lambda forward_batch: False, o_proj=lambda x: (x, None),
    )  # fmt: skip
    q, rows = torch.randn(20, 3, 576) / 4, torch.randn(20, 1, 576)
    with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
        out = DeepseekMLAForwardMixin.forward_absorb_core(
            attention, q[..., 512:], rows[..., 512:], q[..., :512], rows[..., :512], batch, None, None, None, None
        )
    expected = torch.einsum("thl,hlv->thv", made.expected(0, q, request, 0), w_vc.double())
    torch.testing.assert_close(out.view(20, 3, 24).double(), expected, rtol=0, atol=2e-5)
