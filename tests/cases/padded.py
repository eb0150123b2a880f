"""The cache of a step laid out anew in one arena of bytes: pages and layers with gaps, scales in their values' pages.

    page     layer 0, gap, layer 1, gap, ..., gap          a layer: rows of all slots, then (inline) their scales

Gaps and whatever else isn't a live token's are NaN in every format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases.steps import Step, with_values
from torch import Tensor


@dataclass(frozen=True)
class Gaps:
    """Bytes behind a slot's row, a layer and a page; `inline`: scales lie behind their layer's rows."""

    slot: int = 0
    layer: int = 0
    page: int = 0
    inline: bool = False

    def __str__(self) -> str:
        return f"{'inline' if self.inline else 'apart'}-gaps-{self.slot}-{self.layer}-{self.page}"


# Tensor maps take multiples of 16 bytes. 4 bytes of scales a slot are one from 4 slots on.
GAPS = (
    Gaps(page=48),
    Gaps(layer=80),
    Gaps(slot=32, layer=16, page=4096),
    Gaps(inline=True),
    Gaps(slot=16, layer=112, page=208, inline=True),
)


def laid_out(step: Step, gaps: Gaps) -> Step:
    """The same step over pools with these gaps. Inline scales want a step of shared tables."""
    values, scales = step.values.kv_blocks, step.values.kv_scales
    assert scales is not None
    pages, _, layers, slots, _, row = values.shape
    assert values.element_size() == 1
    groups = scales.shape[-1]
    row_stride = row + gaps.slot
    rows = slots * row_stride
    layer_stride = rows + (4 * groups * slots if gaps.inline else 0) + gaps.layer
    page_stride = layers * layer_stride + gaps.page
    arena = torch.full((pages * page_stride,), 0xFF, dtype=torch.uint8)
    shape, strides = (pages, 1, layers, slots, 1), (page_stride, page_stride, layer_stride, row_stride, row_stride)
    blocks = arena.view(values.dtype).as_strided((*shape, row), (*strides, 1))
    blocks.view(torch.uint8).copy_(values.view(torch.uint8))
    if not gaps.inline:
        return with_values(step, kv_blocks=blocks, kv_scales=_padded_scales(scales, gaps))
    assert step.values.scales_lookup_table is None
    assert scales.shape[0] == pages
    words = (page_stride // 4, page_stride // 4, layer_stride // 4, groups, groups)
    inside = arena.view(torch.float32).as_strided((*shape, groups), (*words, 1), rows // 4)
    inside.copy_(scales)
    return with_values(step, kv_blocks=blocks, kv_scales=inside)


def _padded_scales(scales: Tensor, gaps: Gaps) -> Tensor:
    """A pool of scales of its own, with gaps of a word or two behind layers and pages."""
    pages, _, layers, slots, _, groups = scales.shape
    layer_stride = slots * groups + gaps.layer // 16
    page_stride = layers * layer_stride + gaps.page // 16
    arena = torch.full((pages * page_stride,), torch.nan)
    strides = (page_stride, page_stride, layer_stride, groups, groups, 1)
    padded = arena.as_strided(tuple(scales.shape), strides)
    padded.copy_(scales)
    return padded
