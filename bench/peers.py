"""Other projects' paged MLA decode, each called as its engine calls it. One that isn't installed is `Absent`.

on a GPU   vLLM's Triton kernel, with the splits that vLLM chooses; FlashMLA; FlashInfer
on a CPU   vLLM's own CPU kernel

Where a step has several query tokens a request, vLLM's kernels get a row a query token, as vLLM gives it to them. What
a peer plans on the host before a step isn't timed, like our plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedmla import triton_kernels
from pagedmla.bench.cases import PAGE_SIZE, SM_SCALE, Case, Inputs
from pagedmla.bench.clocks import Call
from pagedmla.bench.judge import dequantised
from pagedmla.kv_cache.checks import ceildiv
from pagedmla.kv_cache.paged_tensor import raw_view
from pagedmla.plugin.executor_triton import multiprocessors

_VLLM_CPU_PAGE = 16  # the only page size of its kernel
_VLLM_OLD_SPLITS = 4  # of releases that didn't choose
_FLASHINFER_WORKSPACE = 128 << 20  # bytes, as its documentation recommends


# What a peer raises for a case, a card or a release that it wasn't made for.
REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, NotImplementedError)


class Absent(Exception):
    """A contender that can't run a case, and why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason

    @classmethod
    def refused(cls, name: str, case: Case, refusal: Exception) -> Absent:
        return cls(name, f"{type(refusal).__name__} on {case}: {str(refusal).strip()[:200]}")


@dataclass(frozen=True)
class Peer:
    """`offer(inputs)` gives a call and the layout that it reads, or raises Absent."""

    name: str
    offer: Callable[[Inputs], tuple[Call, str]]


def for_device(device: torch.device) -> tuple[Peer, ...]:
    if device.type == "cuda":
        return (Peer("vllm triton_mla", vllm_triton), Peer("flashmla", flashmla), Peer("flashinfer", flashinfer))
    return (Peer("vllm cpu_mla", vllm_cpu),)


def vllm_cpu(inputs: Inputs) -> tuple[Call, str]:
    """`torch.ops._C.mla_decode_kvcache`; our pages of 64 are four of its pages of 16."""
    _import("vllm cpu_mla", "vllm._custom_ops", "vllm isn't installed here")
    if not hasattr(torch.ops._C, "mla_decode_kvcache"):
        raise Absent("vllm cpu_mla", "this build of vllm has no mla_decode_kvcache (a GPU build)")
    pages = bf16_pages(inputs).reshape(-1, _VLLM_CPU_PAGE, inputs.layout.width)
    parts = PAGE_SIZE // _VLLM_CPU_PAGE
    table, lengths = _row_each(inputs)
    table = (table.unsqueeze(-1) * parts + torch.arange(parts)).flatten(1).to(torch.int32)
    out = torch.zeros(*inputs.q.shape[:2], inputs.layout.latent, dtype=inputs.q.dtype)

    def call() -> Tensor:
        torch.ops._C.mla_decode_kvcache(out, inputs.q, pages, SM_SCALE, table, lengths)
        return out

    return call, "bf16"


def vllm_triton(inputs: Inputs) -> tuple[Call, str]:
    """vLLM's TRITON_MLA: e4m3 with one scale a tensor, or bf16."""
    name = "vllm triton_mla"
    attention = _import(name, "vllm.v1.attention.ops.triton_decode_attention", "vllm isn't installed here")
    case, device = inputs.case, inputs.q.device
    reads = "fp8_flat" if case.layout == "fp8_flat" else "bf16"
    sigma = torch.ones(1, device=device)
    if reads == "fp8_flat":
        pages = inputs.values.kv_blocks.reshape(-1, PAGE_SIZE, inputs.layout.width)
        assert inputs.values.kv_scales is not None
        sigma = inputs.values.kv_scales.reshape(-1)[:1].clone()
    else:
        pages = bf16_pages(inputs)
    pool = pages.unsqueeze(2)
    table, lengths = _row_each(inputs)
    splits = _vllm_splits(max(case.kv_lens), multiprocessors(device))
    rows, latent = inputs.q.shape[0], inputs.layout.latent
    out = inputs.q.new_empty(rows, case.heads, latent)
    lse = inputs.q.new_empty(rows, case.heads)  # in q's dtype, as its backend keeps it
    parts = inputs.q.new_empty(rows, case.heads, splits, latent + 1, dtype=torch.float32)

    def call() -> Tensor:
        attention.decode_attention_fwd(
            inputs.q, pool, pool[..., :latent], out, lse, table, lengths, parts, splits, SM_SCALE, PAGE_SIZE,
            k_scale=sigma, v_scale=sigma, is_mla=True,
        )  # fmt: skip
        return out

    return call, reads


def flashmla(inputs: Inputs) -> tuple[Call, str]:
    """DeepSeek's dense kernel over bf16 pages of 64, by itself or as vLLM carries it."""
    case = inputs.case
    try:
        module = _import("flashmla", "flash_mla", "flash_mla isn't installed")
    except Absent:
        module = _import("flashmla", "vllm.v1.attention.ops.flashmla", "neither flash_mla nor vllm is installed here")
        supported, reason = module.is_flashmla_dense_supported()
        if not supported:
            raise Absent("flashmla", str(reason)) from None
    pool = bf16_pages(inputs).unsqueeze(2)
    lengths = torch.tensor(case.kv_lens, dtype=torch.int32, device=pool.device)
    table = _table(inputs)
    schedule, splits = module.get_mla_metadata(lengths, case.q_len * case.heads, 1)
    q = inputs.q.view(case.batch, case.q_len, case.heads, -1)

    def call() -> Tensor:
        out, _ = module.flash_mla_with_kvcache(
            q, pool, table, lengths, inputs.layout.latent, schedule, splits, softmax_scale=SM_SCALE,
            causal=case.q_len > 1,
        )  # fmt: skip
        result: Tensor = out.view(case.tokens, case.heads, -1)
        return result

    return call, "bf16"


def flashinfer(inputs: Inputs) -> tuple[Call, str]:
    """FlashInfer's paged MLA over bf16 pages, with the backend that it chooses."""
    module = _import("flashinfer", "flashinfer.mla", "flashinfer isn't installed")
    case, device, latent = inputs.case, inputs.q.device, inputs.layout.latent
    pages, table = bf16_pages(inputs), _table(inputs)
    counts = [ceildiv(kv_len, PAGE_SIZE) for kv_len in case.kv_lens]
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.q_len
    ends = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
    ids = torch.cat([table[request, :count] for request, count in enumerate(counts)])
    lengths = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    wrapper = module.BatchMLAPagedAttentionWrapper(
        torch.empty(_FLASHINFER_WORKSPACE, dtype=torch.int8, device=device), backend="auto"
    )
    wrapper.plan(
        starts, ends, ids, lengths, case.heads, latent, inputs.layout.rope, PAGE_SIZE, case.q_len > 1, SM_SCALE,
        inputs.q.dtype, pages.dtype,
    )  # fmt: skip
    q_latent, q_rope = (part.contiguous() for part in inputs.q.split([latent, inputs.layout.rope], -1))
    latents, ropes = pages.split([latent, inputs.layout.rope], -1)
    out = torch.empty_like(q_latent)

    def call() -> Tensor:
        wrapper.run(q_latent, q_rope, latents, ropes, out=out, return_lse=False)
        return out

    return call, "bf16"


def bf16_pages(inputs: Inputs) -> Tensor:
    """`[pages, 64, 576]` bf16 with the dequantised rows of the cache, in the same pages; the pool itself where it is
    bf16."""
    pool, width = inputs.values.kv_blocks, inputs.layout.width
    if pool.dtype == torch.bfloat16:
        same: Tensor = pool.reshape(-1, PAGE_SIZE, width)
        return same
    pages = torch.zeros(pool.shape[0], PAGE_SIZE, width, dtype=torch.bfloat16, device=pool.device)
    table = _table(inputs).to(torch.int64)
    for request, kv_len in enumerate(inputs.case.kv_lens):
        token = torch.arange(kv_len, device=pool.device)
        pages[table[request, token // PAGE_SIZE], token % PAGE_SIZE] = dequantised(inputs, request, torch.bfloat16)
    return pages


def _table(inputs: Inputs) -> Tensor:
    """`[B, columns]` int32, with page 0 in the columns that a request doesn't use: some kernels load those too."""
    counts = torch.tensor([ceildiv(kv_len, PAGE_SIZE) for kv_len in inputs.case.kv_lens], device=inputs.q.device)
    columns = int(counts.max())
    table = raw_view(inputs.values.lookup_table)[:, :columns]
    used = torch.arange(columns, device=table.device) < counts.unsqueeze(1)
    return table.masked_fill(~used, 0).contiguous()


def _row_each(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Table and kv_lens with a row for each query token, which sees keys up to its own."""
    case, table = inputs.case, _table(inputs)
    ends = torch.tensor(case.kv_lens, dtype=torch.int32, device=table.device).unsqueeze(1)
    lengths = ends + torch.arange(1 - case.q_len, 1, dtype=torch.int32, device=table.device)
    return table.repeat_interleave(case.q_len, 0), lengths.flatten()


def _vllm_splits(longest: int, count: int) -> int:
    """What its backend chooses for a step whose longest request has so many keys, on so many multiprocessors."""
    try:
        from vllm.v1.attention.backends.mla.triton_mla import _compute_num_kv_splits
    except ImportError:
        return _VLLM_OLD_SPLITS
    return int(_compute_num_kv_splits(longest, count))


def hide_checkout() -> None:
    """Take a checkout of ours off sys.path, before vLLM is imported.

    It imports a package named triton_kernels wherever it finds one, and means another project's. Our own modules are
    found without it, once pagedmla is imported.
    """
    checkout = Path(triton_kernels.__file__).resolve().parent.parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != checkout]


def _import(name: str, module: str, otherwise: str) -> Any:
    if module.startswith("vllm.") and "vllm" not in sys.modules and find_spec("vllm") is not None:
        hide_checkout()
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is None or module.split(".")[0] != missing.name.split(".")[0]:
            raise Absent(name, f"it needs {missing.name}, which isn't installed") from missing
        raise Absent(name, otherwise) from missing
    except (ImportError, OSError) as broken:
        raise Absent(name, f"importing {module} failed: {broken}") from broken
