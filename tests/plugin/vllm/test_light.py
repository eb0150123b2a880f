"""What loads in every process of every vLLM user, and what needs no engine: names, sizes, counters."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pagedmla.plugin.vllm import counters, entry_points
from pagedmla.plugin.vllm.cache_dtypes import register_cache_dtype, sized_spec
from pagedmla.plugin.vllm.entry_points import PLATFORM, cpu_platform

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Spec:
    """The fields of vLLM's cache spec that we read or set."""

    cache_dtype_str: str
    dtype: torch.dtype = torch.uint8
    head_size: int = 576
    state_content_bytes: int | None = None


def test_entry_points_load_nothing_heavy() -> None:
    code = "import sys, pagedmla.plugin.vllm.entry_points; print([n for n in ('vllm', 'triton') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("registry_names", "missing"),
    [
        (None, "No module named 'vllm.v1.attention.backends.registry'"),
        ({"register_backend": None}, "cannot import name 'AttentionBackendEnum'"),
        ({"AttentionBackendEnum": SimpleNamespace(), "register_backend": None}, "no attribute 'CUSTOM'"),
    ],
    ids=["no registry", "no enumeration", "no slot"],
)
def test_a_release_that_has_no_place_for_us_starts_all_the_same(
    registry_names: dict[str, Any] | None, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM calls plugins unguarded: beside a release of another shape, ours ended every engine of that environment."""
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    name = "vllm.v1.attention.backends.registry"
    monkeypatch.delitem(sys.modules, name, raising=False)
    if registry_names is not None:
        double = ModuleType(name)
        vars(double).update(registry_names)
        monkeypatch.setitem(sys.modules, name, double)
    said: list[str] = []
    monkeypatch.setattr(entry_points._log, "warning", lambda line, *words: said.append(line % words))
    entry_points.register()
    (line,) = said
    assert line.startswith("pagedmla is installed, and can't serve this release of vLLM: ")
    assert missing in line


@pytest.mark.parametrize(
    ("setting", "platform"),
    [(None, None), ("", None), ("0", None), ("1", PLATFORM), ("true", PLATFORM), (" Yes", PLATFORM), ("off", None)],
)
def test_cpu_platform_is_inert_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, platform: str | None
) -> None:
    monkeypatch.delenv("PAGEDMLA_CPU_PLATFORM", raising=False)
    if setting is not None:
        monkeypatch.setenv("PAGEDMLA_CPU_PLATFORM", setting)
    assert cpu_platform() == platform


@pytest.mark.parametrize("name", ["fp8_per_token_head", "fp8_rope_bf16"])
@pytest.mark.parametrize(("head_size", "size"), [(576, 644), (320, 388)])
def test_our_format_sizes_its_tokens(name: str, head_size: int, size: int) -> None:
    assert sized_spec(Spec(name, head_size=head_size)).state_content_bytes == size


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A double of vLLM 0.33's registry of cache dtypes, name to handler: that release has no build for a CPU."""
    known: dict[str, Any] = {"auto": None, "fp8": None}

    def register_kv_cache_dtype(name: str) -> Any:
        def keep(handler: Any) -> Any:
            assert name not in known
            known[name] = handler
            return handler

        return keep

    for module, names in {
        "vllm": {},
        "vllm.config": {},
        "vllm.config.cache": {"KV_CACHE_DTYPES": known, "register_kv_cache_dtype": register_kv_cache_dtype},
        "vllm.v1": {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": SimpleNamespace(CUSTOM="custom")},
    }.items():
        double = ModuleType(module)
        vars(double).update(names)
        monkeypatch.setitem(sys.modules, module, double)
    return known


def test_our_name_where_the_engine_takes_new_ones(registry: dict[str, Any]) -> None:
    """As 0.33 calls a handler: for the dtype of the pages, and for who quantises them. Plugins load more than once."""
    register_cache_dtype()
    register_cache_dtype()
    handler = registry["fp8_rope_bf16"]()
    assert handler.torch_dtype() == torch.uint8
    assert handler.quant_mode() == "custom"


@pytest.mark.parametrize("spec", [Spec("auto"), Spec("fp8"), Spec("fp8_ds_mla", state_content_bytes=656)])
def test_other_formats_keep_the_engines_size(spec: Spec) -> None:
    assert sized_spec(spec) is spec


def test_counters_travel_as_plain_rows() -> None:
    counters.clear()
    worker: Any = counters.CountsExtension()
    for kind in ("store", "decode", "store"):
        counters.count("layer.0", kind, "torch")
    assert counters.counts()[counters.Call("layer.0", "store", "torch")] == 2
    assert worker.pagedmla_counts() == [("layer.0", "decode", "torch", 1), ("layer.0", "store", "torch", 2)]
    worker.pagedmla_counts(reset=True)
    assert worker.pagedmla_counts() == []
