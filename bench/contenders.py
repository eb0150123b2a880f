"""Who is timed: pagedmla by each executor that can run a case, the peers that are installed, and dense attention.

All read one cache and answer the same queries. A peer without the layout reads the same numbers from pages of its own,
in bf16, and is charged for those bytes (`reads`). Who can't take part says why, in a line below the table.

dense    torch's scaled_dot_product_attention over the dequantised rows, contiguous and padded to the longest request:
         what paging, quantisation and a fused kernel are measured against
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import pagedmla
from pagedmla.bench import peers
from pagedmla.bench.cases import PAGE_SIZE, SM_SCALE, Inputs
from pagedmla.bench.clocks import Call
from pagedmla.bench.judge import EXACT, ONE_TERM, ROUNDED, TWO_TERMS, dequantised
from pagedmla.bench.peers import Absent
from pagedmla.hardware.cost import StepCost, attention_cost
from pagedmla.kv_cache.checks import Refusal
from pagedmla.plugin.executor_reference import ReferenceExecutor
from pagedmla.plugin.executor_triton import TritonExecutor
from pagedmla.plugin.executors import PRECISIONS

OURS = "pagedmla "
_GPU_EXECUTORS = ("cutlass", "triton")
_ORACLE_AT_MOST = 1 << 17  # logits: beyond, float64 a query at a time takes seconds
_PRECISIONS = dict.fromkeys(("cutlass", "cutlass-model"), PRECISIONS)
_TOLERANCES = {"fp16": EXACT, "fp8x2": TWO_TERMS, "fp8x1": ONE_TERM}


@dataclass(frozen=True)
class Contender:
    """`call` runs a step and returns out `[T, H, latent]`; `cost` is the least it must move and compute."""

    name: str
    call: Call
    cost: StepCost
    reads: str  # the cache's format
    tolerance: float = EXACT  # largest relative L2 of a row that still counts as correct
    fp8_mma: bool = False  # whether its floor is that of FP8 tensor cores
    ours: bool = False
    oracle: bool = False  # the float64 meaning, which is no party to a race


def contenders(inputs: Inputs, executors: tuple[str, ...] | None = None) -> Iterator[Contender | Absent]:
    """Everyone who may run the case, made one at a time: a contender's memory goes with it."""
    for name in executors or _executors(inputs):
        yield from _executor(inputs, name)
    for peer in peers.for_device(inputs.q.device):
        yield _peer(inputs, peer)
    yield _dense(inputs, torch.bfloat16)
    if not inputs.q.is_cuda:  # a CPU multiplies float32 faster than bf16 unless it has instructions for it
        yield _dense(inputs, torch.float32)


def _peer(inputs: Inputs, peer: peers.Peer) -> Contender | Absent:
    try:
        call, layout = peer.offer(inputs)
    except Absent as absent:
        return absent
    except peers.REFUSALS as refusal:
        return Absent.refused(peer.name, inputs.case, refusal)
    return Contender(peer.name, call, _cost(inputs, layout), layout, ROUNDED)


def _executors(inputs: Inputs) -> tuple[str, ...]:
    if inputs.q.is_cuda:
        return _GPU_EXECUTORS
    case = inputs.case
    logits = case.heads * case.q_len * sum(case.kv_lens)
    return ("torch", "reference") if logits <= _ORACLE_AT_MOST else ("torch",)


def _executor(inputs: Inputs, executor: str) -> Iterator[Contender | Absent]:
    """The executor in each precision that changes which kernel it takes."""
    case, seen = inputs.case, set()
    for precision in _PRECISIONS.get(executor, ("auto",)):
        try:
            plan = pagedmla.plan(
                layout=inputs.layout, num_heads=case.heads, page_size=PAGE_SIZE, max_batch=case.batch,
                max_tokens=case.tokens, max_cache_length=max(case.kv_lens), dtype=inputs.q.dtype,
                device=inputs.q.device, sm_scale=SM_SCALE, executor=executor, precision=precision,
            )  # fmt: skip
        except Refusal as refused:
            yield Absent(OURS + executor, str(refused))
            return
        form = _form(plan, inputs)
        if form in seen:
            continue
        seen.add(form)
        yield Contender(
            _name(plan, form),
            _ours(inputs, plan),
            _cost(inputs, case.layout),
            case.layout,
            _TOLERANCES.get(form, EXACT),
            fp8_mma=inputs.layout.quantised,
            ours=True,
            oracle=executor == ReferenceExecutor.name,
        )


def _name(plan: pagedmla.Plan, form: str) -> str:
    executor = plan.attend_choice.executor
    name = OURS + executor.name
    if executor.name == TritonExecutor.name and plan.device.type == "cpu":
        name += " (interpreted)"
    return f"{name} {form}" if form else name


def _form(plan: pagedmla.Plan, inputs: Inputs) -> str:
    """Of the CUTLASS kernel that the case takes: fp16, fp8x1 or fp8x2; nothing for an executor of one form."""
    if plan.attend_choice.executor.name not in _PRECISIONS:
        return ""
    from pagedmla.plugin.executor_cutlass_variants import choose_variant

    return choose_variant(plan.configuration, inputs.case.q_len, plan.max_cache_length).shape.form


def _ours(inputs: Inputs, plan: pagedmla.Plan) -> Call:
    out = inputs.q.new_empty(*inputs.q.shape[:2], inputs.layout.latent)

    def call() -> Tensor:
        pagedmla.attend(
            inputs.q, inputs.values, 0, sm_scale=SM_SCALE, query_start_loc=inputs.query_start_loc,
            layout=inputs.layout, plan=plan, out=out,
        )  # fmt: skip
        return out

    return call


def _dense(inputs: Inputs, dtype: torch.dtype) -> Contender | Absent:
    reads = "bf16" if dtype == torch.bfloat16 else "fp32"
    name = f"dense {reads} (sdpa)"
    longest = max(inputs.case.kv_lens)
    try:
        call = _dense_call(inputs, dtype, longest)
    except torch.OutOfMemoryError as refusal:
        return Absent.refused(name, inputs.case, refusal)
    case = inputs.case
    cost = attention_cost(
        pagedmla.get_layout(reads), num_heads=case.heads, query_tokens=case.tokens, key_tokens=case.batch * longest,
        scored_pairs=case.tokens * longest, io_bytes=dtype.itemsize,
    )  # fmt: skip
    return Contender(name, call, cost, reads, EXACT if reads == "fp32" else ROUNDED)


def _dense_call(inputs: Inputs, dtype: torch.dtype, longest: int) -> Call:
    """Heads and query tokens stand together where query tokens do; a mask only where a row sees less than all."""
    case = inputs.case
    keys = torch.zeros(case.batch, 1, longest, inputs.layout.width, dtype=dtype, device=inputs.q.device)
    for request, kv_len in enumerate(case.kv_lens):
        keys[request, 0, :kv_len] = dequantised(inputs, request, dtype)
    values = keys[..., : inputs.layout.latent].contiguous()
    q = inputs.q.to(dtype).view(case.batch, 1, case.q_len * case.heads, -1)
    mask = _mask(inputs, longest) if case.q_len > 1 or min(case.kv_lens) < longest else None

    def call() -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=SM_SCALE)
        return out.reshape(case.tokens, case.heads, -1)

    return call


def _mask(inputs: Inputs, longest: int) -> Tensor:
    """Which keys a row sees, bool `[B, 1, q_len * H, longest]`."""
    case, device = inputs.case, inputs.q.device
    ends = torch.tensor(case.kv_lens, device=device).unsqueeze(1)
    last = ends - case.q_len + torch.arange(case.q_len, device=device)  # [B, q_len]: a token's own position
    seen = torch.arange(longest, device=device) <= last.unsqueeze(-1)
    return seen.repeat_interleave(case.heads, 1).unsqueeze(1)


def _cost(inputs: Inputs, layout: str) -> StepCost:
    case = inputs.case
    keys = sum(case.kv_lens)
    return attention_cost(
        pagedmla.get_layout(layout), num_heads=case.heads, query_tokens=case.tokens, key_tokens=keys,
        scored_pairs=case.q_len * keys,
    )  # fmt: skip
