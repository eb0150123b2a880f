"""One step of a paged cache, from a description: poisoned, scrambled, and with its truth beside it.

All of memory is 0xFF first (NaN in every float format), scale pool included; then the live tokens are written by plain
indexing, page by page, by no code of the product but the layout's own `quantize`. Table columns that aren't in use hold
a wild id. `rows` keeps what each request's tokens mean, so that attention can be computed without any paging.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cases.bounds import FLOAT32
from torch import Tensor

from pagedmla import CacheLayout, KVCacheInputsPerDevice, QuantizedRows, get_layout
from pagedmla.kv_cache.paged_tensor import raw_view

WILD = 0xFFFFFFFF
PAGE_ORDERS = ("shuffled", "after-null", "sequential", "reversed", "interleaved")

LAYOUTS = {
    "bf16": get_layout("bf16"),
    "fp16": get_layout("fp16"),
    "fp32": get_layout("fp32"),
    "fp8_flat": get_layout("fp8_flat"),
    "fp8_flat-g64": get_layout("fp8_flat", granularity=64),
    "fp8_flat-g128": get_layout("fp8_flat", granularity=128),  # five scales, the last for 64 columns
    "fp8_rope_bf16": get_layout("fp8_rope_bf16"),
    "fp8_rope_bf16_prescaled": get_layout("fp8_rope_bf16_prescaled"),
    "fp8_ds_mla": get_layout("fp8_ds_mla"),
}


@dataclass(frozen=True)
class StepCase:
    """Request b has `kv_lens[b]` tokens after the step, `q_lens[b]` of which are this step's queries."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_size: int = 16
    heads: int = 2
    causal: bool = True
    page_order: str | tuple[int, ...] = "shuffled"  # or the pages themselves, request by request
    wild: int = WILD  # id in unused table columns
    magnitude: float = 1.0  # of the latents
    rope_magnitude: float = 1.0
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"kv{list(self.kv_lens)}-q{list(self.q_lens)}-P{self.page_size}-H{self.heads}"


@dataclass(frozen=True)
class Step:
    """What a call needs, and what it means."""

    case: StepCase
    layout: CacheLayout
    layer: int
    values: KVCacheInputsPerDevice
    q: Tensor  # [T, H, width]
    query_start_loc: Tensor  # [B + 1] int32
    rows: list[Tensor]  # for each request [kv_len, width] float64, as dequantised
    sm_scale: float

    def call(self) -> dict[str, object]:
        """Keyword arguments of `attend`."""
        return {
            "sm_scale": self.sm_scale,
            "query_start_loc": self.query_start_loc,
            "causal": self.case.causal,
            "layout": self.layout,
        }

    def dense_attention(self) -> tuple[Tensor, Tensor]:
        """(out, lse) in float64 from `rows`, a dense masked softmax a request: no pages, chunks or splits."""
        outs, lses = [], []
        first = 0
        for q_len, kv_len, rows in zip(self.case.q_lens, self.case.kv_lens, self.rows):
            q = self.q[first : first + q_len].double()
            first += q_len
            logits = self.sm_scale * torch.einsum("thw,kw->thk", q, rows)
            if self.case.causal:
                position = torch.arange(q_len) + kv_len - q_len
                hidden = torch.arange(kv_len) > position.unsqueeze(1)
                logits = logits.masked_fill(hidden.unsqueeze(1), -torch.inf)
            seen = logits > -torch.inf
            weights = torch.where(seen, logits.exp(), 0.0)
            total = weights.sum(-1)
            latents = rows[:, : self.layout.latent]
            out = torch.einsum("thk,kd->thd", weights, latents) / total.clamp(min=1e-300).unsqueeze(-1)
            outs.append(out)
            lses.append(total.log())
        return torch.cat(outs), torch.cat(lses)


def build_step(
    case: StepCase,
    layout: CacheLayout | str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    layer: int = 1,
    table_dtype: torch.dtype = torch.int32,
    wild: int | None = None,
    poison: int = 0xFF,
    scale_dtype: torch.dtype = torch.float32,
    shared_tables: bool = False,
) -> Step:
    """The step that `case` describes. `poison` is the byte that fills memory, `wild` overrides the case's.

    Logits are of order 1 whatever the magnitudes: queries are divided by them.
    """
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    wild = case.wild if wild is None else wild
    g = torch.Generator().manual_seed(seed)
    placing = torch.Generator().manual_seed(seed + 1)  # its own, so that the page size doesn't change the data
    page_size = case.page_size
    pages = [-(-kv_len // page_size) for kv_len in case.kv_lens]
    num_pages, num_scale_pages = sum(pages) + 3, sum(pages) + 5
    scaled = layout.scales_per_token > 0
    if shared_tables:
        num_scale_pages = num_pages

    blocks = poisoned((num_pages, 1, layers, page_size, 1, layout.row_elements), layout.value_dtypes[0], poison)
    scale_shape = (num_scale_pages, 1, layers, page_size, 1, layout.scales_per_token)
    scales = poisoned(scale_shape, scale_dtype, poison) if scaled else None
    width = max([*pages, 0]) + 3
    table = place_pages(pages, width, num_pages, case.page_order, wild, placing)
    scales_table = table if shared_tables else place_pages(pages, width, num_scale_pages, "shuffled", wild, placing)

    rows = []
    for b, kv_len in enumerate(case.kv_lens):
        latent = torch.randn(kv_len, layout.latent, generator=g) * case.magnitude
        rope = torch.randn(kv_len, layout.rope, generator=g) * case.rope_magnitude
        made = layout.quantize(latent, rope, scale_dtype=scale_dtype if scaled else None)
        _place(made, blocks, scales, table[b], scales_table[b], layer)
        rows.append(layout.dequantize(made.values, made.scales, torch.float64))

    q_lens = torch.tensor(case.q_lens, dtype=torch.int64)
    q = torch.randn(int(q_lens.sum()), case.heads, layout.width, generator=g)
    q[..., : layout.latent] /= case.magnitude or 1.0
    q[..., layout.latent :] /= case.rope_magnitude or 1.0
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), q_lens.cumsum(0))).to(torch.int32)
    values = KVCacheInputsPerDevice(
        blocks,
        as_lengths(torch.tensor(case.kv_lens, dtype=torch.int64) - q_lens, table_dtype),
        as_table(table, table_dtype),
        max([*case.q_lens, 1]),
        max([*case.kv_lens, 1]),
        -1,
        kv_scales=scales,
        scales_page_stride=-1 if scaled else None,
        scales_lookup_table=as_table(scales_table, table_dtype) if scaled and not shared_tables else None,
    )
    return Step(case, layout, layer, values, q.to(dtype), starts, rows, layout.width**-0.5)


def with_rows(step: Step, latents: list[Tensor], ropes: list[Tensor]) -> Step:
    """The same step after other rows, `[kv_len, latent]` and `[kv_len, rope]` a request, were written over its own."""
    values, rows = step.values, []
    scales_table = values.lookup_table if values.scales_lookup_table is None else values.scales_lookup_table
    for b, (latent, rope) in enumerate(zip(latents, ropes)):
        made = step.layout.quantize(latent, rope)
        tables = (table[b].view(torch.int32).long() for table in (values.lookup_table, scales_table))
        _place(made, values.kv_blocks, values.kv_scales, *tables, step.layer)
        rows.append(step.layout.dequantize(made.values, made.scales, torch.float64))
    return replace(step, rows=rows)


def _place(
    made: QuantizedRows, blocks: Tensor, scales: Tensor | None, table: Tensor, scales_table: Tensor, layer: int
) -> None:
    """Write one request's rows into one layer, page by page; table rows are int64 `[W]`."""
    token = torch.arange(made.values.shape[0])
    column, slot = token // blocks.shape[3], token % blocks.shape[3]
    raw_view(blocks)[table[column], 0, layer, slot, 0] = raw_view(made.values)
    if scales is not None and made.scales is not None:
        raw_view(scales)[scales_table[column], 0, layer, slot, 0] = raw_view(made.scales)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, byte: int = 0xFF) -> Tensor:
    """A tensor whose every byte is `byte`; 0xFF is NaN in float32, bf16, fp16, e4m3 and e8m0."""
    elements = int(torch.tensor(shape).prod())
    return torch.full((elements * dtype.itemsize,), byte, dtype=torch.uint8).view(dtype).view(shape)


def place_pages(
    pages: list[int],
    width: int,
    num_pages: int,
    order: str | tuple[int, ...],
    wild: int,
    generator: torch.Generator,
) -> Tensor:
    """An int64 table `[B, width]` that gives every request its own pages in the given physical order."""
    total = sum(pages)
    if isinstance(order, tuple):
        ids = torch.tensor(order)
    else:
        ids = {
            "shuffled": torch.randperm(num_pages, generator=generator)[:total],
            "after-null": torch.randperm(num_pages - 1, generator=generator)[:total] + 1,  # page 0 is nobody's
            "sequential": torch.arange(total) + num_pages - total,
            "reversed": torch.arange(total).flip(0),
            "interleaved": torch.cat((torch.arange(total)[0::2], torch.arange(total)[1::2])),
        }[order]
    table = torch.full((len(pages), width), wild, dtype=torch.int64)
    first = 0
    for b, count in enumerate(pages):
        table[b, :count] = ids[first : first + count]
        first += count
    return table


def as_table(ids: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """int64 ids as a table: the low 32 bits, read as uint32 or int32."""
    low = torch.where(ids & 0xFFFFFFFF >= 2**31, (ids & 0xFFFFFFFF) - 2**32, ids & 0xFFFFFFFF).to(torch.int32)
    return low.view(dtype)


as_lengths = as_table


def with_values(step: Step, **changes: object) -> Step:
    """The same step with other fields in its values."""
    return replace(step, values=replace(step.values, **changes))


def assert_attention_close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """float32 attention against float64 (cases/bounds.py)."""
    out, lse = (each.double() for each in got)
    want_out, want_lse = (each.double() for each in want)
    empty = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert bool((out[empty] == 0).all())
    assert bool(out.isfinite().all())
    if bool(empty.all()):
        return
    scale = want_out[~empty].abs().amax(-1, keepdim=True)
    assert float(((out - want_out)[~empty].abs() / scale).max()) < FLOAT32
    assert float((lse - want_lse)[~empty].abs().max()) < FLOAT32
