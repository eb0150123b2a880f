"""What loads in every process of every SGLang user, and what needs no engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagedmla.plugin.sglang.settings import asks_for_our_pool

ROOT = Path(__file__).parents[3]


def test_entry_points_load_nothing_heavy() -> None:
    code = (
        "import sys, pagedmla.plugin.sglang.entry_points; "
        "print([n for n in ('sglang', 'triton', 'vllm') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("setting", "ours"), [(None, False), ("", False), ("auto", False), ("fp8_rope_bf16", True)])
def test_our_pool_is_inert_unless_asked_for(monkeypatch: pytest.MonkeyPatch, setting: str | None, ours: bool) -> None:
    monkeypatch.delenv("PAGEDMLA_KV_CACHE", raising=False)
    if setting is not None:
        monkeypatch.setenv("PAGEDMLA_KV_CACHE", setting)
    assert asks_for_our_pool() is ours


def test_other_caches_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDMLA_KV_CACHE", "fp8_ds_mla")
    with pytest.raises(ValueError, match="PAGEDMLA_KV_CACHE: expected auto or fp8_rope_bf16; got 'fp8_ds_mla'"):
        asks_for_our_pool()
