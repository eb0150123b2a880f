"""The decode kernel's call and bounds, for tests on a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from cases import grids
from cases.steps import Step
from torch import Tensor

from pagedmla.cutlass_kernels.launch import Workspace, launcher, partial_rows
from pagedmla.cutlass_kernels.variants import PAGE_SIZES, Variant
from pagedmla.plugin.step import bind_step

BOUNDS = {("fp8", 1): (5e-2, 4e-2), ("fp8", 2): (2.5e-2, 1e-2), ("fp16", 1): (3e-3, 1e-4)}
SHORT = 512  # keys; below it an fp8 form may be off by
SHORT_BOUNDS = {("fp8", 1): (0.12, 0.12), ("fp8", 2): (0.08, 0.04)}
PEERS = [case for case in grids.ALL if case.page_size in PAGE_SIZES and case.q_lens]


def run_kernel(variant: Variant, step: Step, device: torch.device, partitions: int = 1) -> tuple[Tensor, Tensor]:
    """(out, lse) on the host; both were NaN before, and stand between sentinels."""
    bound = bind_step(step.values, step.layer, step.layout, step.query_start_loc, step.q, "q")
    planes = bound.layout.planes(bound.cache.value_pool, bound.cache.scale_pool, bound.layer)
    moved: dict[int, Tensor] = {}

    def there(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in moved:
            moved[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).to(device)
        made = torch.empty(0, dtype=tensor.dtype, device=device)
        base = moved[storage.data_ptr()].untyped_storage()
        return made.set_(base, tensor.storage_offset(), tensor.shape, tensor.stride())

    parts = {name: there(part) for name in ("latent", "rope", "scales") if (part := getattr(planes, name)) is not None}
    planes = replace(planes, **parts)
    tokens, heads, _ = step.q.shape
    band = 64
    out_room = torch.full((2 * band + tokens * heads * 512,), torch.nan, dtype=torch.bfloat16, device=device)
    lse_room = torch.full((2 * band + tokens * heads,), torch.nan, dtype=torch.float32, device=device)
    out = out_room[band : band + tokens * heads * 512].view(tokens, heads, 512)
    lse = lse_room[band : band + tokens * heads].view(tokens, heads)
    held = torch.cuda.get_device_properties(device).multi_processor_count
    partial = partial_rows(variant, held) if partitions > 1 else 0
    room = Workspace.empty(partial, max(1, tokens * heads), device)
    for scratch in (room.partial_out, room.partial_lse):
        scratch.fill_(torch.nan)
    room.cuts.fill_(-7)
    table, scales_table = step.values.lookup_table, step.values.scales_lookup_table
    q, lengths, starts = (there(t) for t in (step.q, step.values.cache_lengths, step.query_start_loc))
    launcher(variant, device)(
        q, planes, there(table), lengths, starts, out, lse, room,
        sm_scale=step.sm_scale, causal=step.case.causal, num_partitions=partitions,
        scales_lookup_table=None if scales_table is None else there(scales_table),
    )  # fmt: skip
    torch.cuda.synchronize()
    for name, outer in (("out", out_room), ("lse", lse_room)):
        assert bool(outer[:band].isnan().all() and outer[-band:].isnan().all()), f"written outside {name}"
    return out.cpu(), lse.cpu()


def assert_within(variant: Variant, step: Step, got: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Against float64; returns (relative L2 of out, largest error of lse)."""
    (out, lse), (want_out, want_lse) = got, step.dense_attention()
    live = want_lse != -torch.inf
    assert torch.equal(lse == -torch.inf, ~live), (
        f"empty rows differ: {int((lse == -torch.inf).sum())} for {int((~live).sum())}"
    )
    assert bool((out[~live] == 0).all()), "an empty row isn't 0"
    if not bool(live.any()):
        return 0.0, 0.0
    gap = float((out.double() - want_out)[live].norm() / want_out[live].norm())
    off = float((lse.double() - want_lse)[live].abs().max())
    form = variant.shape.precision, variant.shape.terms
    seen = min(step.case.kv_lens) if step.case.kv_lens else 0
    bounds = SHORT_BOUNDS[form] if form in SHORT_BOUNDS and seen < SHORT else BOUNDS[form]
    assert gap <= bounds[0], f"relative L2 {gap:.2e}, bound {bounds[0]}"
    assert off <= bounds[1], f"lse off by {off:.2e}, bound {bounds[1]}"
    return gap, off
