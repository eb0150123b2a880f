"""Rows of one layout as rows of another."""

from __future__ import annotations

import torch

from pagedmla.kv_cache.checks import describe, quoted, refuse
from pagedmla.kv_cache.layouts import CacheLayout, Fp8RopeBf16, QuantizedRows


def convert_rows(rows: QuantizedRows, source: CacheLayout, target: CacheLayout) -> QuantizedRows:
    """`rows` of `source` in `target`.

    Between `fp8_rope_bf16` and its prescaled twin the latent bytes and sigma are kept and only the rope is recomputed;
    every other pair goes through float32 and is quantised anew. Raises ValueError and TypeError that name the argument.
    """
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, CacheLayout):
            refuse(name, "a CacheLayout", quoted(layout), error=TypeError)
    if not isinstance(rows, QuantizedRows):
        refuse("rows", "QuantizedRows(values, scales)", describe(rows), error=TypeError)
    if (source.latent, source.rope) != (target.latent, target.rope):
        refuse(
            "target",
            f"a layout of latent {source.latent} and rope {source.rope}",
            f"latent {target.latent} and rope {target.rope}",
        )
    if source == target:
        return rows
    row = source.dequantize(rows.values, rows.scales, torch.float32)
    latent, rope = row[..., : source.latent], row[..., source.latent :]
    keeps_latent = isinstance(source, Fp8RopeBf16) and isinstance(target, Fp8RopeBf16)
    if not keeps_latent:
        return target.quantize(latent, rope)
    converted = target.quantize(latent, rope, sigma=rows.scales)
    values = converted.values.view(torch.uint8)
    values[..., : source.latent] = rows.values[..., : source.latent].view(torch.uint8)
    return QuantizedRows(converted.values, rows.scales)
