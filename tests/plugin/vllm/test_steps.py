"""Builder and impl on steps that a small engine run seldom or never makes: padded graph rows, drafts of unequal length,
shards of decode context parallelism.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla.kv_cache.layouts import get_layout
from pagedmla.plugin.bound import Stores

H, NOPE, ROPE, LATENT, VALUE = 3, 16, 64, 512, 24
P, BLOCKS = 16, 9
SCALE = 0.1


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_plan(layout: str, heads: int = H) -> Any:
    return pagedmla.plan(
        layout=layout, num_heads=heads, page_size=P, max_batch=8, max_tokens=64, max_cache_length=256,
        dtype=torch.float32, device="cpu", sm_scale=SCALE,
    )  # fmt: skip


@pytest.fixture
def builder(vllm: Any) -> Any:
    """A builder without the engine's configuration: what `build` reads."""
    from pagedmla.plugin.dense import DenseCalls
    from pagedmla.plugin.vllm.builder import PagedMLABuilder

    made = PagedMLABuilder.for_measuring(make_plan("fp32"), {"dcp_world_size": 1, "reorder_batch_threshold": 30})
    made._longest_decode = 4
    made._dense_calls, made._workspace = DenseCalls.choose(made.plan), torch.full((64, LATENT + ROPE), torch.nan)
    return made


def step(starts: Tensor, seq_lens: Tensor, tokens: int | None = None, **changes: Any) -> Any:
    requests = len(seq_lens)
    given = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": seq_lens,
        "seq_lens_cpu_upper_bound": seq_lens,
        "num_reqs": requests,
        "num_actual_tokens": int(starts[-1]) if tokens is None else tokens,
        "max_query_len": int(starts.diff().max()),
        "max_seq_len": int(seq_lens.max()),
        "block_table_tensor": torch.arange(requests * 4, dtype=torch.int32).view(requests, 4),
        "slot_mapping": torch.arange(int(starts[-1])),
        "causal": True,
        **changes,
    }
    return SimpleNamespace(**given)


def test_drafts_of_unequal_length_are_decode_rows(builder: Any) -> None:
    """Threshold 4 is one token and three drafts."""
    metadata = builder.build(0, step(int32(0, 1, 5, 7), int32(30, 9, 2)))
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (3, 7, 0)
    assert (metadata.kind, metadata.dense) == ("decode", None)
    assert metadata.absorbed.rows.cache_lengths.tolist() == [29, 5, 0]
    assert metadata.absorbed.rows.mixed_step_split.tolist() == [3, 7]


def test_short_prompts_share_the_launch_of_decode_rows(builder: Any) -> None:
    metadata = builder.build(0, step(int32(0, 1, 2, 28), int32(8, 40, 26)))
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (3, 28, 0)
    assert (metadata.kind, metadata.dense) == ("mixed", None)
    assert metadata.absorbed.rows.mixed_step_split.tolist() == [2, 2]
    assert metadata.absorbed.rows.cache_lengths.tolist() == [7, 39, 0]


def test_short_prompts_alone_are_prefill(builder: Any) -> None:
    metadata = builder.build(0, step(int32(0, 20, 45), int32(20, 60)))
    assert (metadata.kind, metadata.num_prefills) == ("prefill", 0)
    assert metadata.absorbed.rows.mixed_step_split.tolist() == [0, 0]


def test_long_prompts_go_the_dense_way_beside_the_others(builder: Any) -> None:
    """A decode row, a prompt's short tail, and 31 tokens where 30 are the bound."""
    metadata = builder.build(0, step(int32(0, 1, 11, 42), int32(8, 40, 55)))
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (2, 11, 1)
    assert metadata.kind == "mixed"
    assert metadata.absorbed.rows.cache_lengths.tolist() == [7, 30]
    assert metadata.absorbed.rows.mixed_step_split.tolist() == [1, 1]
    assert metadata.absorbed.rows.query_start_loc.tolist() == [0, 1, 11]
    assert metadata.absorbed.rows.max_query_length == 30
    assert metadata.dense._query_start_loc.tolist() == [0, 31]
    (one,) = metadata.dense._passes
    assert (one.starts.tolist(), one.key_start_loc.tolist(), one.keys, one.causal) == ([0], [0, 55], 55, True)


def test_decode_rows_beside_long_prompts_are_still_decode_rows(builder: Any) -> None:
    builder._longest_decode = 1
    metadata = builder.build(0, step(int32(0, 1, 2, 33), int32(8, 40, 31)))
    assert (metadata.kind, metadata.num_decodes, metadata.num_prefills) == ("decode", 2, 1)
    assert metadata.absorbed.rows.one_token_each
    assert metadata.absorbed.rows.cache_lengths.tolist() == [7, 39]
    assert metadata.decode.seq_lens.tolist() == [8, 40]


def test_shards_of_decode_context_parallelism(builder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's own lengths, one query token each; the engine attends the prompt behind them."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    decode = SimpleNamespace(seq_lens=int32(4, 0))
    made = SimpleNamespace(num_decodes=2, num_decode_tokens=2, decode=decode, absorbed=None)
    monkeypatch.setattr(MLACommonMetadataBuilder, "build", lambda *arguments: made)
    builder.dcp_world_size = 2
    metadata = builder.build(0, step(int32(0, 1, 2, 28), int32(8, 1, 26)))
    assert metadata.absorbed.rows.one_token_each
    assert metadata.absorbed.rows.cache_lengths.tolist() == [3, -1]
    assert metadata.absorbed.rows.lookup_table.shape[0] == 2


def test_long_prompts_alone_leave_no_absorbed_rows(builder: Any) -> None:
    metadata = builder.build(0, step(int32(0, 31, 62), int32(31, 31)))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.absorbed, metadata.decode) == (0, 2, None, None)


def test_graph_padding_keeps_addresses(builder: Any) -> None:
    """Four rows of a captured graph, two of them real this time: every step writes where the capture reads."""
    steps = [step(int32(0, 1, 2, 2, 2), int32(30, 9, 0, 0), tokens=4), step(int32(0, 1, 2, 3, 4), int32(31, 10, 1, 7))]
    first, second = (builder.build(0, each).absorbed.rows for each in steps)
    assert first.num_tokens == 4
    assert first.cache_lengths.data_ptr() == second.cache_lengths.data_ptr()
    assert second.cache_lengths.tolist() == [30, 9, 0, 6]


def test_non_causal_steps_are_refused(builder: Any) -> None:
    with pytest.raises(ValueError, match="expected causal attention; got a step with causal=False"):
        builder.build(0, step(int32(0, 1), int32(3), causal=False))


@pytest.fixture
def impl(vllm: Any) -> Any:
    """An impl with projections of its own: what its calls read."""
    from pagedmla.plugin.vllm.impl import PagedMLAImpl

    torch.manual_seed(0)
    made = PagedMLAImpl.__new__(PagedMLAImpl)
    made.num_heads, made.qk_nope_head_dim, made.qk_rope_head_dim = H, NOPE, ROPE
    made.kv_lora_rank, made.v_head_dim, made.scale, made.dcp_world_size = LATENT, VALUE, SCALE, 1
    made._bound = None
    layer = SimpleNamespace(
        W_UK_T=torch.randn(H, NOPE, LATENT) / 4,
        W_UV=torch.randn(H, LATENT, VALUE) / 20,
        _k_scale=torch.ones(1),
        _k_scale_float=1.0,
    )
    made.bind("model.layers.0", layer, make_plan("fp32"), Stores())
    return made


def test_two_micro_batches_bind_a_layer(impl: Any) -> None:
    """In threads of their own, one could compare its memory and take the layer that the other had bound meanwhile.

    The other's whole call comes where the key is compared."""
    caches = [torch.zeros(BLOCKS, P, LATENT + ROPE) for _ in range(2)]
    pending = []

    class Scale(torch.Tensor):
        def data_ptr(self) -> Any:
            return Address(super().data_ptr())

    class Address(int):
        def __eq__(self, other: object) -> bool:
            if pending:
                impl._layer_of(pending.pop(), scale)
            return int.__eq__(self, other)

        __hash__ = int.__hash__

    scale = torch.ones(1).as_subclass(Scale)
    impl._layer_of(caches[0], scale)
    pending.append(caches[1])
    assert impl._layer_of(caches[0], scale).pools.blocks.data_ptr() == caches[0].data_ptr()
    assert not pending


def test_dense_prompt_equals_attention_on_projected_keys(impl: Any, builder: Any) -> None:
    """A prompt of 40 tokens, of which 5 are cached already, behind a decode row that forward_mha isn't shown."""
    cache = torch.full((BLOCKS, P, LATENT + ROPE), torch.nan)
    latent, rope, q = torch.randn(40, LATENT), torch.randn(40, ROPE), torch.randn(35, H, NOPE + ROPE)
    k_scale = impl._layer._k_scale
    slots = torch.arange(4 * P, 4 * P + 40)  # the second row of `step`'s table
    impl.do_kv_cache_update(latent, rope.unsqueeze(1), cache, slots, "auto", k_scale, False)
    metadata = builder.build(0, step(int32(0, 1, 36), int32(8, 40)))
    output = torch.empty(35, H * VALUE)
    impl.forward_mha(q, latent, rope.unsqueeze(1), cache, metadata, k_scale, output)
    keys = torch.cat((torch.einsum("hpl,kl->khp", impl._layer.W_UK_T, latent), rope.unsqueeze(1).expand(-1, H, -1)), -1)
    values = torch.einsum("hlv,kl->khv", impl._layer.W_UV, latent)
    seen = torch.arange(40) <= torch.arange(5, 40).unsqueeze(1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, keys, values)), attn_mask=seen, scale=SCALE
    ).transpose(0, 1)
    torch.testing.assert_close(output.view(35, H, VALUE), expected, rtol=1e-4, atol=1e-5)


def test_shards_combine_by_natural_lse(impl: Any, builder: Any) -> None:
    """Two ranks of decode context parallelism hold every other token; the second has none of the 1-token request.

    The weights exp(lse of a shard - lse of all) add up to 1; of a base-2 LSE they wouldn't.
    """
    kv_lens, starts = [21, 1], int32(0, 1, 2)
    latent, rope = torch.randn(22, LATENT) / 4, torch.randn(22, ROPE) / 4
    q = torch.randn(2, H, LATENT + ROPE)
    k_scale = impl._layer._k_scale

    def attend(members: list[list[int]]) -> tuple[Tensor, Tensor]:
        cache = torch.full((BLOCKS, P, LATENT + ROPE), torch.nan)
        picked = torch.tensor([token for each in members for token in each])
        mapping = torch.tensor([4 * P * b + i for b, each in enumerate(members) for i in range(len(each))])
        impl.do_kv_cache_update(latent[picked], rope[picked].unsqueeze(1), cache, mapping, "auto", k_scale)
        one = step(starts, int32(*map(len, members)))
        out, lse = impl.forward_mqa((q[..., :LATENT], q[..., LATENT:]), cache, builder.build(0, one), impl._layer)
        return out, lse

    tokens = [list(range(kv_lens[0])), [21]]
    whole, lse = attend(tokens)
    parts = [attend([each[rank::2] for each in tokens]) for rank in (0, 1)]
    assert all(part.dtype == torch.float32 for _, part in parts)
    assert bool((parts[1][1][1] == -torch.inf).all())
    weights = torch.stack([torch.exp(part - lse) for _, part in parts])
    torch.testing.assert_close(weights.sum(0), torch.ones(2, H), rtol=1e-5, atol=1e-5)
    combined = sum(w.unsqueeze(-1) * out for w, (out, _) in zip(weights, parts))
    torch.testing.assert_close(combined, whole, rtol=1e-5, atol=1e-5)


def test_memory_profiling_has_no_cache_yet(impl: Any) -> None:
    impl.do_kv_cache_update(torch.ones(1, LATENT), torch.ones(1, 1, ROPE), torch.tensor([]), int32(0), "auto", None)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"_k_scale_float": float("nan")}, "layer.7: expected a finite k_scale > 0; got nan"),
        ({"_k_scale_float": 0.0}, r"layer.7: expected a finite k_scale > 0; got 0\.0"),
        ({"W_UV": None}, "layer.7: expected W_UV of an MLA layer in the model's dtype; got none"),
    ],
)
def test_layers_that_cannot_be_bound(impl: Any, change: dict[str, Any], sentence: str) -> None:
    layer = SimpleNamespace(**{**vars(impl._layer), **change})
    with pytest.raises(ValueError, match=sentence):
        impl.bind("layer.7", layer, impl._plan, Stores())


def test_our_layout_is_handed_as_e4m3_bytes(impl: Any) -> None:
    """The engine views any quantised cache but fp8_ds_mla as e4m3 before it hands it over, also 644-byte rows."""
    impl._plan = make_plan("fp8_rope_bf16")
    cache = torch.zeros(BLOCKS, P, 644, dtype=torch.uint8)
    latent, rope = torch.randn(3, LATENT), torch.randn(3, ROPE)
    mapping, k_scale = torch.tensor([0, 1, 2]), torch.ones(1)
    for view in (cache, cache.view(torch.float8_e4m3fn)):  # stored as bytes, read as e4m3
        impl.do_kv_cache_update(latent, rope.unsqueeze(1), view, mapping, "fp8_rope_bf16", k_scale)
    made = get_layout("fp8_rope_bf16").quantize(latent, rope)
    assert made.scales is not None
    page = cache[0].flatten()
    assert torch.equal(page[: 3 * 640].view(3, 640), made.values.view(torch.uint8))
    assert torch.equal(page[640 * P : 640 * P + 12].view(torch.float32), made.scales.flatten())
