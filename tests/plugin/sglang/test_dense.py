"""Long prompts the dense way, through SGLang's own attention of DeepSeek.

Real: `DeepseekV2AttentionMLA` with its projections, its rotary embedding, its choice of a form by our handler, and its
weights as their loader lays them out. Judged by float64 from hidden states to outputs, over the bytes of the pool.

Why these: a prompt goes dense from 8 query tokens on, so 70 and 40 do, and 9 beside decode rows with long contexts do
not, and 60 do; passes of 24 keys, so that a context of 64 comes in three, of which the last is short, and one of 6 in
one; pages of 1, 16 and 64, of which the first is a slot and the last a context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

H, LATENT, ROPE, LAYERS, NOPE, VALUE, HIDDEN = 3, 512, 64, 2, 16, 24, 32
POOLS = [("bf16", None), ("fp8_e4m3", None), ("fp8_e4m3", 0.031), ("fp8_rope_bf16", None)]
YARN = {"factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "rope_type": "deepseek_yarn"}  # fmt: skip


class Deepseek:
    """The attention of a model's layers over an engine's pools, and what it means in float64."""

    def __init__(self, engine: Any, q_lora_rank: int | None = None) -> None:
        from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin
        from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
        from transformers import PretrainedConfig

        config = PretrainedConfig(rms_norm_eps=1e-6, architectures=["DeepseekV2ForCausalLM"])
        self.engine, self.q_lora_rank, dtype = engine, q_lora_rank, engine.dtype
        self.layers = [
            DeepseekV2AttentionMLA(
                config, HIDDEN, H, NOPE, ROPE, VALUE, q_lora_rank, LATENT, rope_scaling=dict(YARN), layer_id=i
            ).to(dtype)
            for i in range(LAYERS)
        ]
        self._generator = torch.Generator().manual_seed(11)
        for layer in self.layers:
            for weight in layer.parameters():
                weight.requires_grad_(False)
                made = torch.randn(weight.shape, generator=self._generator)
                weight.data = (made / weight.shape[1] ** 0.5 if weight.dim() == 2 else 1 + made / 10).to(dtype)
            if engine.k_scale is not None:  # of the checkpoint, which knows attn_mqa alone
                layer.attn_mqa.k_scale, layer.attn_mqa.k_scale_float = torch.tensor(engine.k_scale), engine.k_scale
        stack = SimpleNamespace(
            layers=[SimpleNamespace(self_attn=layer) for layer in self.layers], start_layer=0, end_layer=LAYERS
        )
        loader = SimpleNamespace(config=config, quant_config=None, model=stack)
        DeepseekV2WeightLoaderMixin.post_load_weights(loader, is_nextn=False)
        engine.runner.model_config.scaling = self.layers[0].scaling

    def forward(self, layer: Any, backend: Any, batch: Any, hidden: Tensor) -> tuple[str, Tensor]:
        """The form that the layer takes, and its outputs `[T, hidden]`."""
        from sglang.srt.layers.layer_boundary.adapters.attention import AttentionInputs, get_attn_tp_context
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.runtime_context import get_forward

        inputs = nullcontext()
        if self.q_lora_rank is not None:  # as the layer's boundary prepares them
            inputs = get_forward().scoped(attn_inputs=AttentionInputs(hidden, batch, layer.prepare_qkv_latent))
            assert not get_attn_tp_context().input_scattered
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch), inputs:
            form = layer.dispatch_attn_forward_method(batch).name
            return form, layer(batch.positions, hidden, batch, None)

    def run(
        self,
        backend: Any,
        mode: str,
        members: list[tuple[Any, int]],
        form: str,
        *,
        bound: float = 5e-5,
        padding: int = 0,
        **more: Any,
    ) -> None:
        """One step in a form: stored rows, and every layer's output against float64. `padding` rows stand behind it."""
        engine = self.engine
        batch = engine.batch(mode, members, **more)
        backend.init_forward_metadata(batch)
        tokens = batch.out_cache_loc.shape[0]
        if padding:
            batch.out_cache_loc = torch.cat((batch.out_cache_loc, torch.zeros(padding, dtype=torch.int64)))
            batch.positions = torch.cat((batch.positions, torch.zeros(padding, dtype=torch.int64)))
            batch.global_num_token_non_padded_cpu = tokens
        for layer in self.layers:
            hidden = torch.randn(tokens + padding, HIDDEN, generator=self._generator).to(engine.dtype)
            taken, out = self.forward(layer, backend, batch, hidden)
            assert taken == form
            assert out.shape == (tokens + padding, HIDDEN)
            assert bool((out[tokens:] == 0).all())
            q, rows = self._meaning(layer, hidden[:tokens].double(), batch.positions[:tokens])
            engine.gave(layer.layer_id, batch.out_cache_loc[:tokens].tolist(), rows)
            first = 0
            for request, count in members:
                mine = slice(first, first + count)
                if bound < 1e-3:
                    engine.check_stored(layer.layer_id, request.slots[request.cached : request.cached + count], 2e-6)
                expected = self._attended(layer, q[mine], request)
                torch.testing.assert_close(out[mine].double(), expected, rtol=0, atol=bound)
                first += count
        for request, count in members:
            request.cached += count

    def _meaning(self, layer: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries `[T, H, P + R]` and cached rows `[T, 576]` of hidden states."""
        weights = {name: weight.double() for name, weight in layer.named_parameters()}
        if self.q_lora_rank is None:
            q = hidden @ weights["q_proj.weight"].T
            row = hidden @ weights["kv_a_proj_with_mqa.weight"].T
        else:
            both = hidden @ weights["fused_qkv_a_proj_with_mqa.weight"].T
            compressed, row = both.split([self.q_lora_rank, LATENT + ROPE], -1)
            q = _normed(compressed, weights["q_a_layernorm.weight"]) @ weights["q_b_proj.weight"].T
        nope, rope = q.view(-1, H, NOPE + ROPE).split([NOPE, ROPE], -1)
        latent, k_rope = row.split([LATENT, ROPE], -1)
        turns = layer.rotary_emb.cos_sin_cache[positions].double()
        rope, k_rope = _rotated(rope, turns.unsqueeze(1)), _rotated(k_rope, turns)
        return torch.cat((nope, rope), -1), torch.cat((_normed(latent, weights["kv_a_layernorm.weight"]), k_rope), -1)

    def _attended(self, layer: Any, q: Tensor, request: Any) -> Tensor:
        """Outputs `[T, hidden]` of one request's queries, which fold W_UK in, over what the pool holds."""
        keys = request.cached + q.shape[0]
        rows = self.engine.stored(layer.layer_id, request.slots[:keys])
        w_uk, w_uv = layer.kv_b_proj.weight.double().view(H, NOPE + VALUE, LATENT).split([NOPE, VALUE], 1)
        folded = torch.cat((torch.einsum("thp,hpl->thl", q[..., :NOPE], w_uk), q[..., NOPE:]), -1)
        logits = torch.einsum("thd,kd->thk", folded, rows) * layer.scaling
        seen = torch.arange(keys) <= torch.arange(request.cached, keys)[:, None]
        weights = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        values = torch.einsum("thl,hvl->thv", weights @ rows[:, :LATENT], w_uv)
        return values.flatten(1) @ layer.o_proj.weight.double().T


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    cos, sin = turns.chunk(2, -1)
    one, two = x[..., ::2], x[..., 1::2]
    return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)


@pytest.fixture
def deepseek(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Deepseek, Any]]:
    """A model and the backend of its runner, which goes dense from 8 query tokens on, in passes of 24 keys."""
    # The rotary embedding names a kernel of another engine, which no CPU calls.
    for name in ("vllm", "vllm._custom_ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["vllm._custom_ops"])["rotary_embedding"] = None
    monkeypatch.setenv("PAGEDMLA_DENSE_PREFILL", "8")
    monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", "24")

    def make(*arguments: Any, q_lora_rank: int | None = None, **more: Any) -> tuple[Deepseek, Any]:
        from pagedmla.plugin.sglang.entry_points import create

        made = engine(*arguments, **more)
        return Deepseek(made, q_lora_rank), create(made.runner)

    return make


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("pool", "k_scale"), POOLS)
def test_a_life_of_requests(deepseek: Any, pool: str, k_scale: float | None, page_size: int) -> None:
    """Prompts, contexts in passes, decode rows beside them and after them: both forms read what either wrote."""
    model, backend = deepseek(pool, page_size, k_scale=k_scale)
    engine = model.engine
    long, short = engine.request(), engine.request()
    model.run(backend, "EXTEND", [(long, 70), (short, 5)], "MHA")
    shared, turn = engine.request(long, 64), engine.request(long, 64)
    model.run(backend, "EXTEND", [(turn, 10)], "MHA")
    model.run(backend, "MIXED", [(shared, 9), (long, 1), (short, 1)], "MLA")
    model.run(backend, "MIXED", [(shared, 60), (long, 1), (short, 1)], "MHA")
    model.run(backend, "DECODE", [(long, 1), (shared, 1)], "MLA")
    model.run(backend, "EXTEND", [(short, 40), (turn, 12)], "MHA")
    model.run(backend, "DECODE", [(short, 1), (turn, 1)], "MLA")
    model.run(backend, "EXTEND", [(short, 7)], "MLA")


def test_compressed_queries(deepseek: Any) -> None:
    """Models with a q_lora_rank, V3 and R1, come to our hook by another way."""
    model, backend = deepseek("fp8_rope_bf16", q_lora_rank=40)
    request = model.engine.request()
    for form, tokens in (("MHA", 30), ("MHA", 9), ("MLA", 3)):
        model.run(backend, "EXTEND", [(request, tokens)], form)


def test_a_model_in_bfloat16_on_triton(deepseek: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDMLA_EXECUTORS", "triton")
    model, backend = deepseek("fp8_rope_bf16", dtype=torch.bfloat16)
    calls = backend.layers.dense_calls(backend.layers.plan(H, model.layers[0].scaling))
    assert {each.executor.name for each in (calls.prefill, calls.decompress, calls.merge)} == {"triton"}
    request = model.engine.request()
    for tokens in (20, 9):
        model.run(backend, "EXTEND", [(request, tokens)], "MHA", bound=3e-2)


def test_contexts_come_in_passes(deepseek: Any) -> None:
    """64 cached tokens in passes of 24 keys, then the prompt's own; all in one where there is room."""
    model, backend = deepseek("fp8_rope_bf16")
    request = model.engine.request()
    for tokens, passes in ((64, 1), (10, 4), (80, 2)):
        model.run(backend, "EXTEND", [(request, tokens)], "MHA")
        (prompts,) = backend.forward_metadata._dense.values()
        assert len(prompts._passes) == passes


def test_layers_wait_for_the_host_cache(deepseek: Any) -> None:
    """A layer that is still on its way back from the host must not be projected up."""
    model, backend = deepseek("fp8_rope_bf16")
    waited: list[int] = []
    model.engine.pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    model.run(backend, "EXTEND", [(model.engine.request(), 20)], "MHA")
    assert waited == [0, 1]


def test_padding_behind_a_prompt(deepseek: Any) -> None:
    """Ranks of data-parallel attention pad to a common number of tokens; metadata counts the real ones."""
    model, backend = deepseek("fp8_rope_bf16")
    request = model.engine.request()
    model.run(backend, "EXTEND", [(request, 20)], "MHA", padding=4)
    model.run(backend, "EXTEND", [(request, 10)], "MHA", padding=6)


def test_requests_that_only_pad(deepseek: Any) -> None:
    """A step padded to more requests lists the tokens of the real ones; a padding request has one key, in slot 0."""
    model, backend = deepseek()
    request = model.engine.request()
    model.run(backend, "EXTEND", [(request, 20)], "MHA")
    row = request.row
    padded = {"batch_size": 3, "req_pool_indices": torch.tensor([row, 0, 0]), "seq_lens": torch.tensor([30, 1, 1])}
    model.run(backend, "EXTEND", [(request, 10)], "MHA", **padded)


@pytest.mark.parametrize("scale", [1.0, 0.25, "a tensor"])
def test_projections_in_fp8(deepseek: Any, scale: Any) -> None:
    """Channel-quantised checkpoints: SGLang keeps W_UK and W_UV as e4m3 with one scale."""
    model, backend = deepseek()
    for layer in model.layers:
        layer.w_scale = torch.tensor([0.125]) if scale == "a tensor" else scale
        factor = float(layer.w_scale)
        weight = torch.empty_like(layer.kv_b_proj.weight).view(H, NOPE + VALUE, LATENT)
        for name, part in (("w_kc", weight[:, :NOPE]), ("w_vc", weight[:, NOPE:].transpose(1, 2))):
            quantised = (getattr(layer, name) / factor).to(torch.float8_e4m3fn)
            setattr(layer, name, quantised)
            part.copy_(quantised.float() * factor)
        layer.kv_b_proj.weight.data = weight.flatten(0, 1)  # what the judge takes
    request = model.engine.request()
    for tokens in (20, 9):
        model.run(backend, "EXTEND", [(request, tokens)], "MHA")


# -- the choice


def forms(backend: Any, model: Deepseek, batch: Any) -> str:
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
        (form,) = {layer.dispatch_attn_forward_method(batch).name for layer in model.layers}
    return form


def test_modes(deepseek: Any) -> None:
    """Drafts and their verification are absorbed however many they are."""
    model, backend = deepseek()
    engine = model.engine
    request = engine.request()
    verify = {"spec_info": engine.verify_input(20)}
    for mode, form in (("EXTEND", "MHA"), ("MIXED", "MHA"), ("SPLIT_PREFILL", "MHA"), ("DRAFT_EXTEND_V2", "MLA")):
        assert forms(backend, model, engine.batch(mode, [(request, 20)])) == form
    assert forms(backend, model, engine.batch("TARGET_VERIFY", [(request, 20)], **verify)) == "MLA"
    assert forms(backend, model, engine.batch("EXTEND", [(request, 20)], extend_prefix_lens_cpu=None)) == "MLA"


def test_captured_pieces_are_absorbed(deepseek: Any) -> None:
    """A graph replays the form that it was captured with, for prompts of any length."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import enable_breakable_cuda_graph

    model, backend = deepseek()
    batch = model.engine.batch("EXTEND", [(model.engine.request(), 20)])
    with enable_breakable_cuda_graph():
        assert forms(backend, model, batch) == "MLA"
    assert forms(backend, model, batch) == "MHA"


class Split:
    """Prefill apart from decode, as far as HybridAttnBackend is asked here; its module loads the engine's server."""

    def __init__(self, prefill: Any) -> None:
        self.prefill_backend, self.decode_backend = prefill, SimpleNamespace()
        self.token_to_kv_pool, self.req_to_token_pool = prefill.token_to_kv_pool, prefill.req_to_token_pool
        self.prefill_attention_backend_str, self.decode_attention_backend_str = "pagedmla", "fa3"
        self.forward, self.init_forward_metadata = prefill.forward, prefill.init_forward_metadata

    def _select_backend(self, mode: Any) -> Any:
        return self.decode_backend if mode.is_decode_or_idle() else self.prefill_backend


def test_behind_wrappers(deepseek: Any) -> None:
    """Two-batch overlap, and prefill apart from decode: the handler and the hook find our backend behind them."""
    from sglang.srt.layers.attention.tbo_backend import TboAttnBackend

    from pagedmla.plugin.sglang.entry_points import create

    model, ours = deepseek()
    for wrapped in (TboAttnBackend.init_new(lambda: create(model.engine.runner)), Split(ours)):
        model.run(wrapped, "EXTEND", [(model.engine.request(), 20)], "MHA")


@pytest.mark.parametrize("why", ["LoRA", "DeepGEMM", "FP4", "no weights"])
def test_projections_that_are_not_ours_to_use(deepseek: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """kv_b_proj is more than W_UK and W_UV, or these are in a form of other kernels': absorbed, and said once."""
    model, backend = deepseek()
    layer = model.layers[0]
    if why == "LoRA":
        layer.kv_b_proj.set_lora = True
    elif why == "DeepGEMM":
        layer.use_deep_gemm_bmm = True
    elif why == "FP4":
        layer.w_kc = torch.zeros(H, NOPE, LATENT // 2, dtype=torch.uint8)
    else:
        layer.w_kc = None
    batch = model.engine.batch("EXTEND", [(model.engine.request(), 20)])
    with caplog.at_level("INFO", "sglang.pagedmla"):
        assert forms(backend, model, batch) == forms(backend, model, batch) == "MLA"
    said = [record.getMessage() for record in caplog.records if "prompts stay absorbed" in record.getMessage()]
    assert len(said) == 1
    assert "layer 0 has no plain W_UK and W_UV" in said[0]


def test_models_that_are_always_absorbed(deepseek: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral Large 3 scales queries, and SGLang doesn't hand MHA the factors; kernels have limits; company counts."""
    from sglang.srt.runtime_context import get_exec

    from pagedmla.plugin.sglang.entry_points import create

    model, backend = deepseek()
    runner, config = model.engine.runner, model.engine.runner.model_config
    assert backend.dense.least == 8
    scaled = SimpleNamespace(llama_4_scaling={"beta": 0.1, "original_max_position_embeddings": 8192})
    for change in ({"hf_config": scaled}, {"hf_text_config": scaled}, {"qk_nope_head_dim": 256}, {"v_head_dim": 320}):
        with monkeypatch.context() as patched:
            for name, value in change.items():
                patched.setattr(config, name, value, raising=False)
            assert create(runner).dense.least is None
    with get_exec().deterministic.override(enable_deterministic_inference=True):
        assert create(runner).dense.least is None


def test_the_user_may_choose(deepseek: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from pagedmla.plugin.sglang.entry_points import create

    model, _ = deepseek()
    engine = model.engine
    request = engine.request()
    for setting, least in (("never", None), ("64", 64), ("auto", 21), ("", 21)):  # 512 (16 + 24) / 984 = 20.8
        monkeypatch.setenv("PAGEDMLA_DENSE_PREFILL", setting)
        caplog.clear()
        with caplog.at_level("INFO", "sglang.pagedmla"):
            backend = create(engine.runner)
        assert backend.dense.least == least
        said = [record.getMessage() for record in caplog.records if "dense; prefill: torch (" in record.getMessage()]
        assert [text.split(" on: ")[0] for text in said] == (
            [] if least is None else [f"pagedmla: prompts from {least} query tokens"]
        )
        for tokens in (20, 21, 63, 64):
            batch = engine.batch("EXTEND", [(request, tokens)])
            assert forms(backend, model, batch) == ("MHA" if least is not None and tokens >= least else "MLA")
    monkeypatch.setenv("PAGEDMLA_DENSE_PREFILL", "often")
    with pytest.raises(ValueError, match=r"PAGEDMLA_DENSE_PREFILL: expected auto, never, or .*; got 'often'"):
        create(engine.runner)


DEEPSEEK = {"least": 171, "per_pair": 768, "per_key": 131072, "heads": 16}


@pytest.mark.parametrize(
    ("contexts", "queries", "pays"),
    [
        ([0], [170], False),
        ([0], [171], True),
        ([100_000], [170], False),  # each cached key is projected up for too few queries
        ([100_000], [171], True),
        ([0, 0], [4000, 20], True),  # a long prompt carries a short one
        ([0, 50_000], [4000, 20], True),
        ([0, 60_000], [4000, 20], False),  # 3829 * 4000 against 151 * 120020
        ([0] + [4096] * 20, [8192] + [1] * 20, True),
        ([0] + [4096] * 60, [8192] + [1] * 60, False),  # decode rows hold it back
        ([0, 0], [0, 0], False),
        ([], [], False),
    ],
)
def test_a_step_is_weighed_as_a_whole(sglang: Any, contexts: list[int], queries: list[int], pays: bool) -> None:
    from pagedmla.plugin.sglang.dense import DenseRule

    assert DenseRule(**DEEPSEEK).pays(contexts, queries) is pays
    assert DenseRule(None).pays(contexts, queries) is False


def test_what_is_weighed_is_the_arithmetic(sglang: Any) -> None:
    """Against the multiply-adds of both forms: the rule never takes the dearer one, and is at most 171 queries late."""
    from pagedmla.plugin.sglang.dense import DenseRule

    rule = DenseRule(**DEEPSEEK)
    for context in (0, 100, 1000, 50_000):
        for query in (1, 100, 170, 171, 500, 8000):
            seen = query * context + query * query // 2
            absorbed, dense = 1088 * seen + 131072 * query, 320 * seen + 131072 * (context + query)
            if rule.pays([context], [query]):
                assert dense < absorbed
            elif dense < absorbed:
                assert query < 171


# -- graphs


def test_when_a_graph_is_left(deepseek: Any) -> None:
    """Replayed prompts are absorbed, and leaving has to pay: the numbers of docs/sglang.md. Ranks vote."""
    from pagedmla.plugin.sglang.dense import DenseRule

    model, backend = deepseek()
    backend.dense = DenseRule(**DEEPSEEK)
    for context, query, stays in ((0, 4000, True), (0, 4100, False), (20_000, 500, True), (20_000, 600, False)):
        contexts, queries = [context], [query]
        batch = model.engine.batch("EXTEND", [])
        batch.batch_size, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = 1, contexts, queries
        assert backend.can_run_prefill_cuda_graph(batch) is stays
        assert backend.vote_prefill_cuda_graph(SimpleNamespace(prefix_lens=contexts, extend_lens=queries)) is stays
        batch.global_num_tokens_cpu = [1000, 1000]  # data-parallel attention: the vote has decided
        assert backend.can_run_prefill_cuda_graph(batch) is True
    assert backend.can_run_prefill_cuda_graph(model.engine.batch("DECODE", [])) is True
    asked = DenseRule(**DEEPSEEK, asked=True)
    assert asked.leaves_graph([0], [1000])
    assert not asked.leaves_graph([0], [100])


def test_the_engine_asks_before_it_replays(sglang: Any) -> None:
    """By the names that its runner of captured prompts looks up."""
    import inspect

    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    from pagedmla.plugin.sglang.backend import PagedMLAAttnBackend

    source = inspect.getsource(PrefillCudaGraphRunner.__init__)
    for name in ("can_run_prefill_cuda_graph", "vote_prefill_cuda_graph"):
        assert f'"{name}"' in source
        assert callable(getattr(PagedMLAAttnBackend, name))


# -- what a pass may take


@pytest.mark.parametrize(
    ("heads", "engines", "keys"),
    [(16, 131072, 131072), (128, 131072, 26214), (128, 4096, 4096), (10**9, 131072, 1)],
)
def test_passes_are_bounded(sglang: Any, heads: int, engines: int, keys: int) -> None:
    """2 GiB of keys and values, and no more keys than the engine's own passes have."""
    from pagedmla.plugin.sglang.dense import room

    assert room(192 + 128, torch.bfloat16, heads, engines) == keys


def test_queries_that_missed_the_hook(deepseek: Any) -> None:
    """A layer's attn_mha with keys and values of its own is another form's: refused, before and after the hook ran."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    model, backend = deepseek()
    layer = model.layers[0]
    batch = model.engine.batch("EXTEND", [(model.engine.request(), 20)])
    backend.init_forward_metadata(batch)
    q, k, v = (torch.zeros(20, H, width) for width in (NOPE + ROPE, NOPE + ROPE, VALUE))
    for error, sentence in (
        (ValueError, "layer 0: expected absorbed attention, heads of 576 and values of 512; got heads of 80"),
        (RuntimeError, "pagedmla: expected queries of prepare_prefill_qkv in a step of prompts; got others"),
    ):
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
            with pytest.raises(error, match=sentence):
                layer.attn_mha(q, k, v, batch, save_kv_cache=False)
        model.run(backend, "EXTEND", [(model.engine.request(), 20)], "MHA")
