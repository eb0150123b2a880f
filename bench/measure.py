"""Decode, timed on the GPU at hand: every contender on the same cache and queries, its error in the same row.

contenders  pagedmla by each executor that can run the case, with a plan; vLLM's Triton kernel where vllm is installed
            and the layout is one that it reads; dense: torch's scaled_dot_product_attention over the same rows, bf16,
            in one contiguous tensor
time        median of CUDA events around the replay of a captured graph, so from the first kernel's start to the last
            kernel's end; memory twice the size of L2 is written before each, so that the cache's rows come from HBM
error       against float64 over the dequantised rows, first and last request: the largest relative L2 of a row
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import pagedmla
from pagedmla.bench.cases import PAGE_SIZE, SM_SCALE, Case, Inputs, build
from pagedmla.hardware.cost import GPUS, Gpu, StepCost, attention_cost
from pagedmla.kv_cache.paged_tensor import raw_view
from pagedmla.reference.attention import softmax_state
from pagedmla.reference.cache import read_rows

Call = Callable[[], Tensor]
Clock = Callable[[Call], float]  # microseconds of a call

REPEATS = 30
EXECUTORS = ("cutlass", "triton")
_WARM_UPS = 3
_VLLM_SPLITS = 4


@dataclass(frozen=True)
class Contender:
    """`call` runs a step and returns out [B, H, latent]; `cost` is what it must move and compute."""

    name: str
    call: Call
    cost: StepCost


def measure(case: Case, device: torch.device, clock: Clock) -> list[dict[str, Any]]:
    """A row for each contender."""
    inputs = build(case, device)
    want = {request: _meaning(inputs, request) for request in {0, case.batch - 1}}
    rows = []
    for contender in _contenders(inputs):
        out = contender.call()
        error = max(float(((out[b].double() - row).norm(dim=-1) / row.norm(dim=-1)).max()) for b, row in want.items())
        rows.append(_row(case, contender, clock(contender.call), error, gpu_named(_name(device))))
    return rows


def gpu_named(name: str) -> Gpu | None:
    """The published peaks of a GPU by the name that its driver gives, or None."""
    return next((gpu for gpu in GPUS if gpu.name.split()[0] in name), None)


def cuda_clock(device: torch.device) -> Clock:
    """A clock that times a call on a cold cache (see the top of this file)."""
    swept = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)

    def microseconds(call: Call) -> float:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                call()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        spans = []
        for _ in range(REPEATS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            swept.zero_()
            start.record()
            graph.replay()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize(device)
        return 1e3 * statistics.median(float(start.elapsed_time(end)) for start, end in spans)

    return microseconds


def _contenders(inputs: Inputs) -> Iterator[Contender]:
    case = inputs.case
    pairs = case.batch * case.kv_len
    cost = attention_cost(
        inputs.layout, num_heads=case.heads, query_tokens=case.batch, key_tokens=pairs, scored_pairs=pairs
    )
    for executor in EXECUTORS if inputs.q.is_cuda else ("auto",):
        try:
            made = pagedmla.plan(
                layout=inputs.layout, num_heads=case.heads, page_size=PAGE_SIZE, max_batch=case.batch,
                max_tokens=case.batch, max_cache_length=case.kv_len, dtype=inputs.q.dtype, device=inputs.q.device,
                sm_scale=SM_SCALE, executor=executor,
            )  # fmt: skip
        except ValueError:  # it can't run this
            continue
        yield Contender(f"pagedmla {made.attend_choice.executor.name}", _ours(inputs, made), cost)
    if find_spec("vllm") is not None and inputs.q.is_cuda and case.layout in ("bf16", "fp8_flat"):
        yield Contender("vllm triton_mla", _vllm(inputs), cost)
    dense_cost = attention_cost(
        pagedmla.get_layout("bf16"), num_heads=case.heads, query_tokens=case.batch, key_tokens=pairs,
        scored_pairs=pairs,
    )  # fmt: skip
    yield Contender("dense bf16 (torch sdpa)", _dense(inputs), dense_cost)


def _ours(inputs: Inputs, made: pagedmla.Plan) -> Call:
    out = inputs.q.new_empty(inputs.case.batch, inputs.case.heads, inputs.layout.latent)

    def call() -> Tensor:
        pagedmla.attend(inputs.q, inputs.values, 0, sm_scale=SM_SCALE, layout=inputs.layout, plan=made, out=out)
        return out

    return call


def _dense(inputs: Inputs) -> Call:
    """The heads stand where query tokens do: all see the same keys, and no mask is needed."""
    keys = torch.stack([_dequantised(inputs, b, torch.bfloat16) for b in range(inputs.case.batch)]).unsqueeze(1)
    values = keys[..., : inputs.layout.latent].contiguous()
    q = inputs.q.unsqueeze(1)  # [B, 1, H, 576]

    def call() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, scale=SM_SCALE).squeeze(1)

    return call


def _vllm(inputs: Inputs) -> Call:
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    case, values = inputs.case, inputs.values
    pool = values.kv_blocks.reshape(-1, PAGE_SIZE, 1, inputs.layout.width)
    table = raw_view(values.lookup_table).contiguous()
    lengths = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device=pool.device)
    sigma = values.kv_scales.reshape(-1)[:1].clone() if values.kv_scales is not None else torch.ones(1).to(pool.device)
    latent = inputs.layout.latent
    out = inputs.q.new_empty(case.batch, case.heads, latent)
    lse = inputs.q.new_empty(case.batch, case.heads, dtype=torch.float32)
    parts = inputs.q.new_empty(case.batch, case.heads, _VLLM_SPLITS, latent + 1, dtype=torch.float32)

    def call() -> Tensor:
        decode_attention_fwd(
            inputs.q, pool, pool[..., :latent], out, lse, table, lengths, parts, _VLLM_SPLITS, SM_SCALE, PAGE_SIZE,
            k_scale=sigma, v_scale=sigma, is_mla=True,
        )  # fmt: skip
        return out

    return call


def _meaning(inputs: Inputs, request: int) -> Tensor:
    """float64 out [H, latent] of a request."""
    rows = _dequantised(inputs, request, torch.float64)
    logits = SM_SCALE * inputs.q[request].double() @ rows.T
    return softmax_state(logits, rows[:, : inputs.layout.latent])[0]


def _dequantised(inputs: Inputs, request: int, dtype: torch.dtype) -> Tensor:
    cache = inputs.values.collection(inputs.layout.pool_granularity)
    return read_rows(cache, inputs.layout, 0, request, 0, inputs.case.kv_len, dtype)


def _row(case: Case, contender: Contender, microseconds: float, error: float, gpu: Gpu | None) -> dict[str, Any]:
    floor = None if gpu is None else contender.cost.floor_us(gpu, fp8_mma=False)
    return {
        "source": "measured",
        "contender": contender.name,
        "layout": case.layout,
        "heads": case.heads,
        "batch": case.batch,
        "kv_len": case.kv_len,
        "microseconds": round(microseconds, 1),
        "gb_per_s": round(contender.cost.bytes / microseconds / 1e3, 1),
        "tflop_per_s": round(contender.cost.flops / microseconds / 1e6, 1),
        "share_of_floor": None if floor is None else round(floor / microseconds, 3),
        "relative_l2": error,
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
