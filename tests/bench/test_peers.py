"""What peers are handed: their functions are replaced by float64 attention over the very arguments they get.

A wrong page, length, scale or order of rows would show as an error. 65 keys begin a second page of 64 and a fifth of
16; ragged lengths leave table columns unused; 3 query tokens see their own keys each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedmla.bench import peers
from pagedmla.bench.cases import IMBALANCED, Case, build
from pagedmla.bench.judge import ROUNDED, Judge

CASES = [
    Case("bf16", 3, 2, 65),
    Case("fp8_rope_bf16", 3, 3, 70, 1, IMBALANCED),
    Case("fp8_flat", 2, 3, 70, 3, IMBALANCED),
    Case("fp8_ds_mla", 2, 2, 5, 3),
]


def attention(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, scale: float, sigma: float = 1.0) -> Tensor:
    """`q [rows, H, 576]`, a table row and a length for each: out `[rows, H, 512]`. Ids in unused columns must exist."""
    assert table.dtype == lengths.dtype == torch.int32
    assert int(table.min()) >= 0
    assert int(table.max()) < len(pages)
    outs = []
    for row, ids, length in zip(q, table, lengths.tolist(), strict=True):
        keys = pages[ids.long()].flatten(0, 1)[:length].double() * sigma
        outs.append((scale * row.double() @ keys.T).softmax(-1) @ keys[:, :512])
    return torch.stack(outs)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def judged(case: Case, offer: Any) -> tuple[float, str]:
    inputs = build(case, "cpu")
    call, reads = offer(inputs)
    return Judge(inputs).error(call()), reads


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vllm_cpu(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    def decode(out: Tensor, q: Tensor, pages: Tensor, scale: float, table: Tensor, lengths: Tensor) -> None:
        assert pages.shape[1:] == (16, 576)
        out.copy_(attention(q, pages, table, lengths, scale))

    install(monkeypatch, "vllm._custom_ops")
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(mla_decode_kvcache=decode))
    error, reads = judged(case, peers.vllm_cpu)
    assert error < ROUNDED
    assert reads == "bf16"
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace())
    with pytest.raises(peers.Absent, match="no mla_decode_kvcache"):
        judged(case, peers.vllm_cpu)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vllm_triton(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    def decode(
        q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, table: Tensor, lengths: Tensor,
        parts: Tensor, splits: int, scale: float, page_size: int, k_scale: Tensor, v_scale: Tensor, is_mla: bool,
    ) -> None:  # fmt: skip
        assert (page_size, splits, parts.shape[2], is_mla) == (64, 7, 7, True)
        assert lse.shape == out.shape[:2]
        out.copy_(attention(q, keys.squeeze(2), table, lengths, scale, float(k_scale)))

    install(monkeypatch, "vllm.v1.attention.ops.triton_decode_attention", decode_attention_fwd=decode)
    install(monkeypatch, "vllm.v1.attention.backends.mla.triton_mla", _compute_num_kv_splits=lambda longest, count: 7)
    error, reads = judged(case, peers.vllm_triton)
    assert error < ROUNDED
    assert reads == ("fp8_flat" if case.layout == "fp8_flat" else "bf16")


def test_vllm_before_it_chose_its_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm.v1.attention.backends.mla.triton_mla")
    assert peers._vllm_splits(1 << 17, 132) == 4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flashmla(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    def decode(
        q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, latent: int, schedule: object, splits: object,
        softmax_scale: float, causal: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert (schedule, splits, latent, causal) == ("schedule", "splits", 512, case.q_len > 1)
        assert q.shape[:2] == (case.batch, case.q_len)
        ends = lengths.unsqueeze(1) + torch.arange(1 - case.q_len, 1, dtype=torch.int32)
        rows = table.repeat_interleave(case.q_len, 0)
        out = attention(q.flatten(0, 1), pool.squeeze(2), rows, ends.flatten(), softmax_scale)
        return out.view(*q.shape[:3], 512), None

    def metadata(lengths: Tensor, rows: int, kv_heads: int) -> tuple[str, str]:
        assert (rows, kv_heads) == (case.q_len * case.heads, 1)
        return "schedule", "splits"

    install(monkeypatch, "flash_mla", flash_mla_with_kvcache=decode, get_mla_metadata=metadata)
    error, reads = judged(case, peers.flashmla)
    assert error < ROUNDED
    assert reads == "bf16"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flashinfer(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    class Wrapper:
        def __init__(self, workspace: Tensor, backend: str) -> None:
            assert backend == "auto"

        def plan(self, *given: Any) -> None:
            self.given = given

        def run(self, q_latent: Tensor, q_rope: Tensor, latents: Tensor, ropes: Tensor, out: Tensor, **_: Any) -> None:
            starts, ends, ids, lengths, heads, latent, rope, page, causal, scale, q_dtype, kv_dtype = self.given
            assert (heads, latent, rope, page, causal) == (case.heads, 512, 64, 64, case.q_len > 1)
            assert q_dtype == kv_dtype == torch.bfloat16
            q, pages = torch.cat([q_latent, q_rope], -1), torch.cat([latents, ropes], -1)
            for request in range(case.batch):
                mine = ids[ends[request] : ends[request + 1]]
                for token in range(case.q_len):
                    row = int(starts[request]) + token
                    length = lengths[request : request + 1] - case.q_len + token + 1
                    out[row] = attention(q[row : row + 1], pages, mine[None], length, scale)[0]

    install(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=Wrapper)
    error, reads = judged(case, peers.flashinfer)
    assert error < ROUNDED
    assert reads == "bf16"


@pytest.mark.parametrize("offer", [peers.vllm_triton, peers.flashmla, peers.flashinfer, peers.vllm_cpu])
def test_without_a_peer(monkeypatch: pytest.MonkeyPatch, offer: Any) -> None:
    for name in ("vllm", "flash_mla", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(peers.Absent, match="installed"):
        judged(CASES[0], offer)


def test_vllm_never_sees_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make gpu` has the checkout on sys.path, whose folder triton_kernels vLLM would take for another project's."""
    checkout = Path(peers.triton_kernels.__file__).resolve().parent.parent
    monkeypatch.setattr(sys, "path", [str(checkout), "", "elsewhere", str(checkout / "tests")])
    monkeypatch.chdir(checkout)  # "" is the working folder
    peers.hide_checkout()
    assert sys.path == ["elsewhere", str(checkout / "tests")]


def test_a_broken_peer_is_told_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM without one of its own dependencies said "vllm isn't installed"."""

    def broken(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'cbor2'", name="cbor2")

    monkeypatch.setattr(peers, "import_module", broken)
    with pytest.raises(peers.Absent, match="it needs cbor2"):
        judged(CASES[0], peers.flashinfer)
