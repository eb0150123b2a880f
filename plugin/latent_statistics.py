"""What one layer puts into the cache, and what each layout makes of it: ranges, codes that are lost, errors.

error       |dequantised - value| / |value| of each column, as L2 norms over the tokens, and the root of the mean square
            over columns: a small column counts like a large one, since the projections behind it may be large
saturated   share of values beyond 448 sigma, which the code can't say
vanished    share of values that aren't 0 and whose code is
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pagedmla.kv_cache.layouts import get_layout
from pagedmla.kv_cache.quantise import E4M3_MAX, SIGMA_FLOOR

MOST_ERROR = 0.04  # of latents; 3 bits of mantissa leave 0.026 at a fitting scale
PER_TOKEN = ("fp8_rope_bf16", "fp8_ds_mla", "fp8_flat")


@dataclass(frozen=True)
class Errors:
    """Relative errors, as at the top of this file."""

    latent: float
    rope: float


@dataclass(frozen=True)
class PerTensor:
    """One scale for all tokens of a layer, as --kv-cache-dtype fp8 has it."""

    scale: float
    saturated: float
    vanished: float
    errors: Errors


@dataclass(frozen=True)
class LayerStatistics:
    """Ranges of one layer's latents and ropes, what each layout makes of them, and the layout that suits them."""

    layer: str
    tokens: int
    latent_amax: float
    rope_amax: float
    not_finite: int  # numbers, left out of all the rest
    unit: PerTensor  # scale 1
    fitted: PerTensor  # the largest number's, times the margin
    layouts: dict[str, Errors]  # with a scale a token, or finer
    recommended: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> LayerStatistics:
        """What `to_dict` gave, from another process."""
        parts = {
            name: PerTensor(**{**found[name], "errors": Errors(**found[name]["errors"])}) for name in ("unit", "fitted")
        }
        layouts = {name: Errors(**errors) for name, errors in found["layouts"].items()}
        return cls(**{**found, **parts, "layouts": layouts})


def measure_layer(layer: str, latent: Tensor, rope: Tensor, margin: float = 1.0) -> LayerStatistics:
    """Statistics of `latent [T, L]` and `rope [T, R]`, T >= 1, of any float dtype."""
    latent, rope = latent.to(torch.float32), rope.to(torch.float32)
    not_finite = int((~latent.isfinite()).sum() + (~rope.isfinite()).sum())
    latent, rope = (torch.where(x.isfinite(), x, torch.zeros_like(x)) for x in (latent, rope))
    amax = float(latent.abs().max()), float(rope.abs().max())
    fitted = max(margin * max(amax) / E4M3_MAX, SIGMA_FLOOR)
    layouts = {name: _errors(name, latent, rope) for name in PER_TOKEN}
    unit, best = (per_tensor(latent, rope, scale) for scale in (1.0, fitted))
    recommended, reason = _recommend(layouts, not_finite)
    return LayerStatistics(
        layer, latent.shape[0], *amax, not_finite, unit, best, layouts, recommended=recommended, reason=reason
    )


def per_tensor(latent: Tensor, rope: Tensor, scale: float) -> PerTensor:
    """What one scale makes of finite `latent [T, L]` and `rope [T, R]` float32."""
    sigma = torch.full((*latent.shape[:-1], 1), scale, device=latent.device)
    numbers = torch.cat((latent, rope), -1)
    beyond = numbers.abs() > E4M3_MAX * scale * (1 + 2.0**-20)  # a scale's own rounding isn't saturation
    layout = get_layout("fp8_flat", latent=latent.shape[-1], rope=rope.shape[-1])
    kept = layout.dequantize(layout.quantize(latent, rope, sigma=sigma).values, sigma)
    vanished = (kept == 0) & (numbers != 0)
    size = latent.shape[-1]
    return PerTensor(
        scale,
        float(beyond.double().mean()),
        float(vanished.double().mean()),
        Errors(_relative(kept[..., :size], latent), _relative(kept[..., size:], rope)),
    )


def overall(layers: list[LayerStatistics]) -> str:
    """The one layout for all layers: the widest that any of them needs."""
    order = ("fp8_rope_bf16", "fp8_ds_mla", "bf16")
    return max((each.recommended for each in layers), key=order.index)


def _errors(name: str, latent: Tensor, rope: Tensor) -> Errors:
    layout = get_layout(name, latent=latent.shape[-1], rope=rope.shape[-1])
    made = layout.quantize(latent, rope)
    kept = layout.dequantize(made.values, made.scales)
    size = latent.shape[-1]
    return Errors(_relative(kept[..., :size], latent), _relative(kept[..., size:], rope))


def _relative(kept: Tensor, value: Tensor) -> float:
    """Columns that hold nothing but 0 are left out."""
    size = value.double().norm(dim=0)
    apart = (kept.double() - value.double()).norm(dim=0)[size > 0] / size[size > 0]
    return float(apart.square().mean().sqrt()) if apart.numel() else 0.0


def _recommend(layouts: dict[str, Errors], not_finite: int) -> tuple[str, str]:
    token, groups, flat = (layouts[name] for name in PER_TOKEN)
    if not_finite:
        return "bf16", f"numbers that aren't finite: {not_finite}. Look for the cause first"
    if token.latent <= MOST_ERROR:
        return (
            "fp8_rope_bf16",
            f"latents lose {token.latent:.1%}, e4m3's own rounding; the rope stays bf16, in FP8 it would lose "
            f"{flat.rope:.1%}",
        )
    if groups.latent <= MOST_ERROR:
        return (
            "fp8_ds_mla",
            f"some columns are far larger than others: latents lose {token.latent:.1%} with a scale a token, "
            f"{groups.latent:.1%} with one for 128 columns",
        )
    return "bf16", f"latents lose {token.latent:.1%} in FP8, and {groups.latent:.1%} with a scale for 128 columns"
