"""The backend as vLLM questions it: resolved to our class, and a sentence for each thing that we don't serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

GOOD: dict[str, Any] = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 64,
    "use_mla": True,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "attn_type": "decoder",
    "device_capability": None,
}


@pytest.fixture
def backend(vllm: Any) -> Any:
    from pagedmla.plugin.vllm.backend import PagedMLABackend

    return PagedMLABackend


def test_custom_resolves_to_our_class_however_often_it_is_registered(vllm: Any, backend: Any) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from pagedmla.plugin.vllm.entry_points import register

    register()
    register()
    assert AttentionBackendEnum.CUSTOM.get_class() is backend
    assert backend.get_name() == "PAGEDMLA"


def test_replacing_another_plugin_is_said(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import registry

    from pagedmla.plugin.vllm import entry_points

    said: list[tuple[Any, ...]] = []
    log = SimpleNamespace(warning=lambda *message: said.append(message))
    monkeypatch.setattr(entry_points, "_log", log)
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, "another.plugin.Backend")
    entry_points.register()
    ((_, before, after),) = said
    assert (before, after) == ("another.plugin.Backend", entry_points.BACKEND)
    assert registry.AttentionBackendEnum.CUSTOM.get_path() == entry_points.BACKEND


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla", "fp8_per_token_head"])
@pytest.mark.parametrize("head_size", [576, 320])
def test_what_we_serve(backend: Any, cache_dtype: str, head_size: int) -> None:
    assert backend.validate_configuration(**{**GOOD, "kv_cache_dtype": cache_dtype, "head_size": head_size}) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_sparse": True}, "use FLASHMLA_SPARSE or FLASHINFER_MLA_SPARSE"),
        ({"use_mla": False, "head_size": 128}, "pagedmla serves MLA models"),
        ({"head_size": 512}, "head sizes 576 or 320 (latent 512 or 256, rope 64); this model has 512"),
        ({"dtype": torch.float64}, "bfloat16, float16 and float32; this one is in torch.float64"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_per_token_head; got fp8_e5m2"),
        ({"block_size": 24}, "a --block-size that is a multiple of 16; got 24"),
    ],
)
def test_what_we_do_not_serve_gets_a_sentence(backend: Any, change: dict[str, Any], sentence: str) -> None:
    reasons = backend.validate_configuration(**{**GOOD, **change})
    assert sum(sentence in reason for reason in reasons) == 1


def test_one_page_size_for_the_kernels(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDMLA_PAGE_SIZE", "64")
    assert backend.get_supported_kernel_block_sizes() == [64]
    assert backend.validate_configuration(**{**GOOD, "block_size": 128}) == []
    reasons = backend.validate_configuration(**{**GOOD, "block_size": 96})
    assert any("a multiple of 64; got 96" in reason for reason in reasons)


@pytest.mark.parametrize("setting", ["8", "100", "many", "-64"])
def test_page_sizes_that_no_kernel_takes(backend: Any, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("PAGEDMLA_PAGE_SIZE", setting)
    with pytest.raises(ValueError, match=f"PAGEDMLA_PAGE_SIZE: expected a multiple of 16; got '{setting}'"):
        backend.get_supported_kernel_block_sizes()


def test_cpu_platform_refuses_instead_of_falling_back(vllm: Any, backend: Any) -> None:
    """The stock platform only logs that it can't use a backend, and runs another."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from pagedmla.plugin.vllm.cpu_platform import PagedMLACpuPlatform
    from pagedmla.plugin.vllm.entry_points import BACKEND, register

    register()
    asked = AttentionSelectorConfig(576, torch.float32, kv_cache_dtype="fp8", block_size=64, use_mla=True)
    custom = AttentionBackendEnum.CUSTOM
    assert PagedMLACpuPlatform.get_attn_backend_cls(custom, asked, num_heads=8) == BACKEND
    with pytest.raises(ValueError, match=r"CUSTOM can't serve this configuration: .*FLASHMLA_SPARSE"):
        PagedMLACpuPlatform.get_attn_backend_cls(custom, asked._replace(use_sparse=True))
    stock = asked._replace(kv_cache_dtype="auto", block_size=16)
    assert PagedMLACpuPlatform.get_attn_backend_cls(None, stock) != BACKEND


@pytest.mark.parametrize("change", [{"kv_cache_dtype": "fp8"}, {"block_size": 64}])
def test_layers_without_a_backend_are_not_left_to_the_stock_one(vllm: Any, change: dict[str, Any]) -> None:
    """Draft layers don't follow --attention-backend: vLLM gave theirs to a backend that misread our pages."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from pagedmla.plugin.vllm.cpu_platform import PagedMLACpuPlatform

    given = {"kv_cache_dtype": "auto", "block_size": 16, **change}
    asked = AttentionSelectorConfig(576, torch.float32, use_mla=True, **given)
    with pytest.raises(ValueError, match=r'add "attention_backend": "CUSTOM" to --speculative-config'):
        PagedMLACpuPlatform.get_attn_backend_cls(None, asked)
