"""How SGLang finds us: entry point, choices, factory, handler, hooks; and that it hears why where we don't serve."""

from __future__ import annotations

import shlex
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

NAME = "pagedmla"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def registered(sglang: Any, published: Any) -> None:
    from pagedmla.plugin.sglang.entry_points import register

    register()
    register()  # every process loads plugins, and some more than once


def test_the_engine_loads_the_plugin(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine's own loader, from the metadata of the installed package."""
    from sglang.srt import plugins
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    (found,) = [each for each in entry_points(group=plugins.GENERAL_PLUGINS_GROUP) if each.name == NAME]
    assert found.value == "pagedmla.plugin.sglang.entry_points:register"
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    ATTENTION_BACKENDS.pop(NAME, None)
    plugins.load_plugins()
    assert ATTENTION_BACKENDS[NAME].__module__ == "pagedmla.plugin.sglang.entry_points"
    assert NAME in choices.ATTENTION_BACKEND_CHOICES


def test_three_registrations(registered: None, engine: Any) -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    from pagedmla.plugin.sglang.backend import PagedMLAAttnBackend

    for names in (choices.ATTENTION_BACKEND_CHOICES, choices.DRAFT_ATTENTION_BACKEND_CHOICES):
        assert names.count(NAME) == 1
    assert isinstance(ATTENTION_BACKENDS[NAME](engine().runner), PagedMLAAttnBackend)
    handler = AttentionBackendRegistry.get_handler(NAME)
    assert handler is not AttentionBackendRegistry.get_handler("triton")
    made = engine()
    assert handler(None, made.batch("DECODE", [(made.request(), 1)])) is AttnForwardMethod.MLA


def test_the_commands_of_the_page(registered: None) -> None:
    """docs/sglang.md, as far as the engine's command line reads it."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    from pagedmla.plugin.sglang.settings import CACHE_SWITCH

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    page = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
    launches = [line for line in page.splitlines() if "-m sglang.launch_server" in line]
    assert len(launches) == 2
    for line in launches:
        setting, _, arguments = line.partition("python -m sglang.launch_server ")
        assert setting.strip() in ("", f"{CACHE_SWITCH}=fp8_rope_bf16")
        given = parser.parse_args(shlex.split(arguments))
        assert (given.attention_backend, given.page_size) == (NAME, 64)


def test_another_release_is_refused_when_the_backend_is_asked_for(
    registered: None, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    with pytest.raises(ImportError, match=r"sglang: expected 0\.5\.23, .*; got 0\.5\.24"):
        ATTENTION_BACKENDS[NAME](engine().runner)


# -- hooks


@pytest.fixture
def hooked(registered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from pagedmla.plugin.sglang.hooks import hook_drafts, hook_pool

    monkeypatch.setenv("PAGEDMLA_KV_CACHE", "fp8_rope_bf16")
    hook_pool()
    hook_drafts()
    hook_pool()  # again: nothing is wrapped twice
    HookRegistry.apply_hooks()


def test_our_pool_takes_the_place_of_the_engines(hooked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.runtime_context import get_spec

    from pagedmla.plugin.sglang.pool import PagedMLATokenToKVPool

    def chosen(kind: str = "mla", dtype: torch.dtype = torch.float8_e4m3fn, draft: bool = False) -> type:
        configurator = SimpleNamespace(kv_cache_dtype=dtype, is_draft_worker=draft)
        default = MHATokenToKVPool if kind == "mha" else MLATokenToKVPool
        return KVCacheConfigurator._resolve_kv_pool_class(configurator, kind=kind, default=default)

    assert chosen() is PagedMLATokenToKVPool
    assert chosen("mha") is MHATokenToKVPool
    with pytest.raises(ValueError, match="PAGEDMLA_KV_CACHE=fp8_rope_bf16: expected --kv-cache-dtype fp8_e4m3"):
        chosen(dtype=torch.bfloat16)
    with get_spec().override(speculative_draft_attention_backend="triton"):
        assert chosen(draft=True) is MLATokenToKVPool
        assert chosen() is PagedMLATokenToKVPool
    monkeypatch.delenv("PAGEDMLA_KV_CACHE")
    assert chosen() is MLATokenToKVPool


def test_other_backends_keep_their_pool(hooked: None) -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.runtime_context import get_exec

    configurator = SimpleNamespace(kv_cache_dtype=torch.float8_e4m3fn, is_draft_worker=False)
    with get_exec().kernel.override(decode_attention_backend="flashmla"):
        found = KVCacheConfigurator._resolve_kv_pool_class(configurator, kind="mla", default=MLATokenToKVPool)
    assert found is MLATokenToKVPool


def test_the_engine_counts_the_bytes_of_our_slots(hooked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sized by rows of 576 bytes, the pool would have taken an eighth more memory than there was; sized by ours, the
    pool of another backend took an eighth less.
    """
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.runtime_context import get_exec, get_spec

    def width(dtype: torch.dtype, draft: bool = False) -> int:
        config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["X"]), kv_lora_rank=512, qk_rope_head_dim=64,
                                 is_draft_model=draft)  # fmt: skip
        return kv_cache_configurator.calculate_mla_kv_cache_dim(model_config=config, kv_cache_dtype=dtype)

    assert width(torch.float8_e4m3fn) == 656
    assert width(torch.bfloat16) == 576
    with get_exec().kernel.override(decode_attention_backend="flashmla"):  # whose slots have 576 bytes
        assert width(torch.float8_e4m3fn) == 576
    with get_spec().override(speculative_draft_attention_backend="triton"):
        assert (width(torch.float8_e4m3fn, draft=True), width(torch.float8_e4m3fn)) == (576, 656)
    monkeypatch.delenv("PAGEDMLA_KV_CACHE")
    assert width(torch.float8_e4m3fn) == 576


def test_a_setting_that_isnt_known_is_our_backends_to_refuse(
    sglang: Any, published: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin's loading failed on it, in engines that don't use this backend too."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_exec

    from pagedmla.plugin.sglang.entry_points import register

    monkeypatch.setenv("PAGEDMLA_KV_CACHE", "bogus")
    register()
    HookRegistry.apply_hooks()
    sentence = "PAGEDMLA_KV_CACHE: expected auto or fp8_rope_bf16; got 'bogus'"
    configurator = SimpleNamespace(kv_cache_dtype=torch.float8_e4m3fn, is_draft_worker=False)

    def pool() -> type:
        return KVCacheConfigurator._resolve_kv_pool_class(configurator, kind="mla", default=MLATokenToKVPool)

    with pytest.raises(ValueError, match=sentence):
        ATTENTION_BACKENDS[NAME](engine().runner)
    with pytest.raises(ValueError, match=sentence):
        pool()
    with get_exec().kernel.override(attention_backend="triton"):
        assert pool() is MLATokenToKVPool


def test_drafts_run_on_our_backend_too(hooked: None, engine: Any) -> None:
    """The engine's map of draft backends is closed: it stopped with "EAGLE is not supported in ... pagedmla"."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from pagedmla.plugin.sglang.backend import PagedMLAAttnBackend
    from pagedmla.plugin.sglang.drafts import PagedMLAMultiStepDraftBackend

    runner = engine("fp8_rope_bf16").runner
    runner.draft_attention_backend = None
    factory = DraftBackendFactory(runner, 1, 3)
    decode, extend = factory.create_decode_backend(), factory.create_draft_extend_backend()
    assert isinstance(decode, PagedMLAMultiStepDraftBackend)
    assert isinstance(extend, PagedMLAAttnBackend)
    for backend in (decode, extend, *decode.attn_backends):
        assert backend.decode_attention_backend_str == backend.prefill_attention_backend_str == NAME
    assert DraftBackendFactory(runner, 1, 1).create_decode_backend() is None
    with pytest.raises(ValueError, match=r"expected a chain of drafts \(--speculative-eagle-topk 1\); got 4"):
        DraftBackendFactory(runner, 4, 3).create_decode_backend()
    runner.draft_attention_backend = "no such backend"
    with pytest.raises(ValueError, match="EAGLE is not supported"):
        DraftBackendFactory(runner, 1, 3).create_decode_backend()


# -- what isn't served


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_mla_backend": False}, "pagedmla serves MLA models; this one has another kind of attention"),
        ({"token_to_kv_pool": object()}, "pagedmla serves dense MLA over MLATokenToKVPool; got object"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "got a unified memory pool"),
    ],
)
def test_runners_that_are_refused(registered: None, engine: Any, change: dict[str, Any], sentence: str) -> None:
    from pagedmla.plugin.sglang.entry_points import create

    runner = engine().runner
    vars(runner).update(change)
    with pytest.raises(ValueError, match=sentence):
        create(runner)


def test_decode_context_parallelism_is_refused(registered: None, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedmla.plugin.sglang import refusals
    from pagedmla.plugin.sglang.entry_points import create

    monkeypatch.setattr(refusals, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=2))
    with pytest.raises(ValueError, match="expected decode context parallelism to be off; got --dcp-size 2"):
        create(engine().runner)


def test_prefill_context_parallelism_is_refused(registered: None, engine: Any) -> None:
    """Other backends gather a prompt's latents across ranks by themselves; ours attended a rank's own alone."""
    from sglang.srt.runtime_context import get_parallel

    from pagedmla.plugin.sglang.entry_points import create

    with get_parallel().override(enable_prefill_cp=True):
        with pytest.raises(ValueError, match=r"expected prefill context parallelism to be off.*--enable-prefill-cp"):
            create(engine().runner)


def test_our_pool_asked_for_and_not_there(registered: None, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that another plugin displaced: the engine would have served 8-bit ropes without a word."""
    from pagedmla.plugin.sglang.entry_points import create

    monkeypatch.setenv("PAGEDMLA_KV_CACHE", "fp8_rope_bf16")
    with pytest.raises(ValueError, match="expected the engine to make PagedMLATokenToKVPool; got MLATokenToKVPool"):
        create(engine().runner)


def test_trees_of_drafts_are_refused(registered: None, engine: Any) -> None:
    from sglang.srt.runtime_context import get_spec

    from pagedmla.plugin.sglang.entry_points import create

    made = engine()
    with get_spec().override(speculative_algorithm="EAGLE", speculative_eagle_topk=4):
        with pytest.raises(ValueError, match=r"expected a chain of drafts .*; got a tree of 4 branches"):
            create(made.runner)
    backend = create(made.runner)
    request = made.request()
    for topk, sentence in ((2, "a tree of 2 branches"), (-1, "a tree, which needs a mask")):
        verify = made.verify_input(4, topk=topk)
        batch = made.batch("TARGET_VERIFY", [(request, 4)], spec_info=verify)
        with pytest.raises(ValueError, match=sentence):
            backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"logit_cap": 30.0}, r"layer 0: expected logit_cap 0\.0, plain causal attention; got 30\.0"),
        ({"sliding_window_size": 128}, "layer 0: expected sliding_window_size -1"),
        ({"is_cross_attention": True}, "layer 0: expected is_cross_attention False"),
        ({"k_scale_float": float("nan")}, "layer 0: expected a finite k_scale > 0; got nan"),
        ({"k_scale_float": 0.0}, r"layer 0: expected a finite k_scale > 0; got 0\.0"),
        ({"head_dim": 192}, "layer 0: expected absorbed attention, heads of 576 and values of 512; got heads of 192"),
    ],
)
def test_layers_that_are_refused(registered: None, engine: Any, change: dict[str, Any], sentence: str) -> None:
    from pagedmla.plugin.sglang.entry_points import create

    made = engine("fp8_e4m3")
    backend = create(made.runner)
    batch = made.batch("EXTEND", [(made.request(), 2)])
    backend.init_forward_metadata(batch)
    vars(made.layers[0]).update(change)
    with pytest.raises(ValueError, match=sentence):
        backend.forward(torch.empty(2, 3 * 576), torch.empty(2, 1, 576), None, made.layers[0], batch)


def test_arguments_of_other_attention_are_named(registered: None, engine: Any) -> None:
    from pagedmla.plugin.sglang.entry_points import create

    made = engine()
    backend = create(made.runner)
    batch = made.batch("EXTEND", [(made.request(), 2)])
    backend.init_forward_metadata(batch)
    arguments = (torch.empty(2, 3 * 576), torch.empty(2, 1, 576), None, made.layers[0], batch)
    with pytest.raises(ValueError, match="forward: expected queries, keys and ropes of dense MLA; got topk_indices"):
        backend.forward(*arguments, topk_indices=torch.zeros(1))


def test_a_missing_scale_is_said_once(registered: None, engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    from pagedmla.plugin.sglang.entry_points import create

    made = engine("fp8_e4m3")
    made.run(create(made.runner), "EXTEND", [(made.request(), 3)])
    said = [record.getMessage() for record in caplog.records if "k_scale" in record.getMessage()]
    assert len(said) == 1
    assert "layer 0 has no k_scale" in said[0]
    assert "PAGEDMLA_KV_CACHE=fp8_rope_bf16" in said[0]
