"""What a row of the cache means: its bytes, its scales, and how they are made and read.

A layout is one frozen object. `quantize` and `dequantize` are its meaning, byte for byte; `planes` shows one layer of a
pool to a kernel as strided views. Widths below are for a latent of 512 and a rope of 64; other widths move the bounds.

| name                      | bytes a token | row                     | scales                                    |
|---------------------------|---------------|-------------------------|-------------------------------------------|
| `bf16`, `fp16`, `fp32`    | 1152, 1152, 2304 | 576 numbers          | none                                      |
| `fp8_flat`                | 576 + 4 G     | 576 e4m3                | G = ceildiv(576, granularity), or a tensor's |
| `fp8_rope_bf16`           | 644           | 512 e4m3 + 64 bf16      | one a token, for the latent               |
| `fp8_rope_bf16_prescaled` | 644           | the same, rope / sigma  | one a token, for both                     |
| `fp8_ds_mla`              | 656           | 512 e4m3, 4 float32, 64 bf16 | four a token, inside the row         |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import ceildiv, describe, dtype_name, expect_int, expect_tensor, refuse
from pagedmla.kv_cache.paged_tensor import PagedTensor
from pagedmla.kv_cache.quantise import SCALE_DTYPES, check_sigma, decode_e4m3, quantise_group, saturating_cast, sigma_of

E4M3 = torch.float8_e4m3fn

# Columns that models have, and kernels take. A layout object may have any.
LATENTS = (512, 256)
ROPE = 64


Measure = Callable[[Tensor], Tensor]
"""The scale of each group: `[..., columns]` to `[...]`, as `sigma_of` with what the caller of `quantize` asked for."""


class QuantizedRows(NamedTuple):
    """Rows as a pool holds them: `values [..., row_elements]` and `scales [..., scales_per_token]` or None."""

    values: Tensor
    scales: Tensor | None


@dataclass(frozen=True, eq=False)
class RowPlanes:
    """One layer of a pool as kernels see it; every tensor is a view, and strides are whatever they are.

    latent  [num_pages, page_size, latent]        e4m3, or the unquantised dtype
    rope    [num_pages, page_size, rope]          e4m3, bf16, or the unquantised dtype
    scales  [num_scale_pages, page_size, G]       or None; column d of the row takes scale d // scale_group
    rope_scaled            whether the rope columns are multiplied by their scale too
    scales_in_value_pages  the scales lie in the value pages: their table is the values' table
    scales_repeated        one scale for all pages and slots: it is read and never written
    """

    latent: Tensor
    rope: Tensor
    scales: Tensor | None
    scale_group: int
    rope_scaled: bool
    scales_in_value_pages: bool
    scales_repeated: bool = False


@dataclass(frozen=True)
class CacheLayout(ABC):
    """Common ground of all layouts. `latent` and `rope` are columns of the decompressed row."""

    latent: int = LATENTS[0]
    rope: int = ROPE

    name: ClassVar[str]
    value_dtypes: ClassVar[tuple[torch.dtype, ...]] = (E4M3, torch.uint8)
    scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    rope_scaled: ClassVar[bool] = False
    inline_scales: ClassVar[bool] = False
    alignment: ClassVar[int] = 1  # bytes of the widest number inside a row of bytes

    def __post_init__(self) -> None:
        for name in ("latent", "rope"):
            object.__setattr__(self, name, expect_int(getattr(self, name), name))
        if self.latent < 1 or self.rope < 1:
            refuse("layout", "latent and rope of at least 1 column", f"latent={self.latent}, rope={self.rope}")

    def __str__(self) -> str:
        """The name, and whatever isn't as usual: `fp8_flat (latent 256, granularity 64)`."""
        parameters = [f"{field.name} {getattr(self, field.name)}" for field in fields(self)]
        usual = [f"{field.name} {field.default}" for field in fields(self)]
        unusual = [shown for shown, expected in zip(parameters, usual) if shown != expected]
        return f"{self.name} ({', '.join(unusual)})" if unusual else self.name

    # What each layout says for itself.

    @property
    @abstractmethod
    def row_elements(self) -> int:
        """Elements of the pool's innermost dimension."""

    @property
    def scales_per_token(self) -> int:
        """Scales that lie in a pool of their own, for each token."""
        return 0

    @property
    def scale_group(self) -> int:
        """Columns of the row that share a scale."""
        return self.width

    @property
    def pool_granularity(self) -> int | None:
        """Elements of a pool row for each scale of the scale pool; None where there is no scale pool."""
        return None

    @property
    def groups(self) -> int:
        """Scales of a row, wherever they lie."""
        return self.scales_per_token

    @abstractmethod
    def make_rows(self, latent: Tensor, rope: Tensor, sigma: Tensor | None, measure: Measure) -> QuantizedRows:
        """What `quantize` does, once its arguments fit; `measure` makes the scales that aren't given."""

    @abstractmethod
    def dequantize(self, values: Tensor, scales: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[..., latent + rope]` in `dtype`, which also carries the product with the scale."""

    @abstractmethod
    def latent_and_rope(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Both planes as views of pool rows `[..., row_elements]`."""

    def quantize(
        self,
        latent: Tensor,
        rope: Tensor,
        *,
        sigma: Tensor | None = None,
        power_of_two: bool = False,
        scale_dtype: torch.dtype | None = None,
    ) -> QuantizedRows:
        """Rows from `latent [..., latent]` and `rope [..., rope]` of any float dtype.

        sigma         [..., groups]: given scales, instead of measured ones
        power_of_two  rounds measured scales up to a power of two; no effect in unquantised layouts, or with sigma
        scale_dtype   that of the scale pool; None: the layout's first. Only None where the layout has no scale pool
        """
        self._check_tokens(latent, rope, sigma)
        if scale_dtype is None:
            scale_dtype = self.scale_dtypes[0] if self.scale_dtypes else torch.float32
        elif not self.scale_dtypes:
            refuse("scale_dtype", f"None, since layout {self} keeps no scale pool", _dtype_words(scale_dtype))
        elif scale_dtype not in self.scale_dtypes:
            wanted = f"{' or '.join(map(dtype_name, self.scale_dtypes))} for layout {self}"
            refuse("scale_dtype", wanted, _dtype_words(scale_dtype))
        measure = partial(sigma_of, scale_dtype=scale_dtype, power_of_two=power_of_two)
        return self.make_rows(latent, rope, sigma, measure)

    def _check_tokens(self, latent: Tensor, rope: Tensor, sigma: Tensor | None) -> None:
        """Refuse arguments of `quantize` that don't fit each other."""
        lead = _leading(latent, "latent")
        expect_tensor(latent, "latent", [*lead, self.latent], (), f"Layout {self}.")
        expect_tensor(rope, "rope", [*lead, self.rope], (), f"It goes with latent {describe(latent)}.")
        if sigma is None:
            return
        if not self.groups:
            refuse("sigma", f"None, since layout {self} has no scales", sigma)
        hint = f"It goes with latent {describe(latent)}."
        expect_tensor(sigma, "sigma", [*lead, self.groups], self.scale_dtypes or SCALE_DTYPES, hint)

    def _check_rows(self, values: Tensor, scales: Tensor | None) -> Tensor | None:
        """`scales`, once the arguments of `dequantize` fit each other."""
        lead = _leading(values, "values")
        expect_tensor(values, "values", [*lead, self.row_elements], self.value_dtypes, f"Layout {self}.")
        if scales is not None:
            if not self.scales_per_token:
                refuse("scales", f"None, since layout {self} has none beside its rows", scales)
            hint = f"They go with values {describe(values)}."
            expect_tensor(scales, "scales", [*lead, self.scales_per_token], SCALE_DTYPES, hint)
        return scales

    # What follows from it.

    @property
    def width(self) -> int:
        """Columns of a decompressed row: latent and rope."""
        return self.latent + self.rope

    @property
    def quantised(self) -> bool:
        return self.value_dtypes[0] == E4M3

    @property
    def row_bytes(self) -> int:
        return self.row_elements * self.value_dtypes[0].itemsize

    @property
    def bytes_per_token(self) -> int:
        """What one token occupies in one layer: its row and its float32 scales."""
        return self.row_bytes + 4 * self.scales_per_token

    def check_pool(self, blocks: Tensor, scales: Tensor | None) -> None:
        """Refuse a pool that isn't of this kind. Reads shapes, dtypes and strides only."""
        self._check_blocks(blocks)
        self.check_scales(blocks, scales)
        self.check_alignment(PagedTensor(blocks, "kv_blocks", blocks.stride(0)))

    def _check_blocks(self, blocks: Tensor) -> None:
        wanted = f"[*, 1, *, *, 1, {self.row_elements}] {' or '.join(map(dtype_name, self.value_dtypes))}"
        fits = blocks.dim() == 6 and (blocks.shape[1], *blocks.shape[4:]) == (1, 1, self.row_elements)
        if not fits or blocks.dtype not in self.value_dtypes:
            refuse("kv_blocks", f"{wanted} for layout {self}", blocks, _layout_hint(blocks))
        if blocks.stride(5) != 1:
            refuse("kv_blocks", f"rows whose elements are adjacent (stride(5) 1) for layout {self}", blocks.stride())

    def check_scales(self, blocks: Tensor, scales: Tensor | None) -> None:
        """Refuse a scale pool that doesn't go with `blocks`."""
        if self.scales_per_token == 0:
            if scales is not None:
                refuse("kv_scales", f"None, since layout {self} keeps no scale pool", scales)
            return
        _, _, layers, page_size, _, _ = blocks.shape
        wanted = f"[*, 1, {layers}, {page_size}, 1, {self.scales_per_token}]"
        wanted += f" {' or '.join(map(dtype_name, self.scale_dtypes))}"
        goes_with = f"to go with kv_blocks {describe(blocks)} in layout {self}"
        shape = [1, layers, page_size, 1, self.scales_per_token]
        if scales is None:
            refuse("kv_scales", f"{wanted} {goes_with}", None)
        if scales.dim() != 6 or list(scales.shape[1:]) != shape or scales.dtype not in self.scale_dtypes:
            hint = 'For grouped scales use layout "fp8_flat" with its granularity.'
            refuse("kv_scales", f"{wanted} {goes_with}", scales, hint if self.scales_per_token == 1 else "")

    def planes(self, values: PagedTensor, scales: PagedTensor | None, layer: int) -> RowPlanes:
        """One layer as views (see RowPlanes). The pools must have passed `check_pool`."""
        self.check_alignment(values)
        rows = values.layer(0, layer).squeeze(2)  # [num_pages, page_size, row_elements]
        latent, rope = self.latent_and_rope(rows)
        plane = self.scale_plane(rows, None if scales is None else scales.layer(0, layer).squeeze(2))
        repeated = scales is not None and not self.inline_scales and scales.repeated
        return RowPlanes(latent, rope, plane, self.scale_group, self.rope_scaled, self.inline_scales, repeated)

    def scale_plane(self, rows: Tensor, scales: Tensor | None) -> Tensor | None:
        """One layer's scales `[num_scale_pages, page_size, groups]`, from its rows or from the scale pool's."""
        return scales

    def check_alignment(self, values: PagedTensor) -> None:
        """Refuse strides that put the wider numbers of a byte row where they can't be viewed."""
        if self.alignment == 1:
            return
        blocks, size = values.tensor, self.alignment
        for what, elements in (
            ("first byte", blocks.storage_offset()),
            ("page stride", values.page_stride),
            ("layer stride", blocks.stride(2)),
            ("slot stride", blocks.stride(3)),
        ):
            if elements % size:
                refuse("kv_blocks", f"a {what} that is a multiple of {size} bytes for layout {self}", elements)


@dataclass(frozen=True)
class Unquantised(CacheLayout):
    """The control: numbers as the model made them.

    | element  | what   |
    |----------|--------|
    | 0 .. 511 | latent |
    | 512..575 | rope   |
    """

    @property
    def row_elements(self) -> int:
        return self.width

    def make_rows(self, latent: Tensor, rope: Tensor, sigma: Tensor | None, measure: Measure) -> QuantizedRows:
        columns = [saturating_cast(part, self.value_dtypes[0]) for part in (latent, rope)]
        return QuantizedRows(torch.cat(columns, -1), None)

    def dequantize(self, values: Tensor, scales: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        self._check_rows(values, scales)
        return values.to(dtype)

    def latent_and_rope(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return values[..., : self.latent], values[..., self.latent :]


class Bf16(Unquantised):
    name = "bf16"
    value_dtypes = (torch.bfloat16,)


class Fp16(Unquantised):
    name = "fp16"
    value_dtypes = (torch.float16,)


class Fp32(Unquantised):
    name = "fp32"
    value_dtypes = (torch.float32,)


@dataclass(frozen=True)
class Fp8Flat(CacheLayout):
    """Latent and rope alike in e4m3; one scale for every `granularity` columns, the last group may be shorter.

    | byte     | what                                        |
    |----------|---------------------------------------------|
    | 0 .. 511 | latent, e4m3, value = byte * sigma[d // g]  |
    | 512..575 | rope,   e4m3, value = byte * sigma[d // g]  |

    `granularity` None means the whole row, and so does one of at least its width. One scale for a whole tensor is a
    `kv_scales` view expanded with stride 0 (`per_tensor_scale` makes one): a store reads it and never writes it.
    """

    granularity: int | None = None

    name = "fp8_flat"
    scale_dtypes = SCALE_DTYPES
    rope_scaled = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.granularity is None:
            return
        granularity = expect_int(self.granularity, "granularity")
        if granularity < 1:
            refuse("granularity", "at least 1 column", granularity)
        # One group is the whole row, however it was asked for: equal layouts compare equal.
        object.__setattr__(self, "granularity", granularity if granularity < self.width else None)

    @property
    def row_elements(self) -> int:
        return self.width

    @property
    def scale_group(self) -> int:
        return self.granularity or self.width

    @property
    def scales_per_token(self) -> int:
        return ceildiv(self.width, self.scale_group)

    @property
    def pool_granularity(self) -> int | None:
        return self.scale_group

    def make_rows(self, latent: Tensor, rope: Tensor, sigma: Tensor | None, measure: Measure) -> QuantizedRows:
        row = torch.cat((latent.to(torch.float32), rope.to(torch.float32)), -1)
        groups = row.split(self.scale_group, -1)
        if sigma is None:
            sigma = _stack([measure(x) for x in groups])
        codes = [quantise_group(x, sigma[..., g]).view(torch.uint8) for g, x in enumerate(groups)]
        return QuantizedRows(torch.cat(codes, -1).view(E4M3), sigma)

    def dequantize(self, values: Tensor, scales: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        sigma = _need_scales(self, self._check_rows(values, scales))
        columns = torch.arange(self.width, device=values.device) // self.scale_group
        return decode_e4m3(_as_e4m3(values), dtype) * sigma.to(dtype)[..., columns]

    def latent_and_rope(self, values: Tensor) -> tuple[Tensor, Tensor]:
        rows = _as_e4m3(values)
        return rows[..., : self.latent], rows[..., self.latent :]


@dataclass(frozen=True)
class Fp8RopeBf16(CacheLayout):
    """The flagship: the latent in e4m3 with one scale a token, the rope in bf16, which never saturates.

    | byte     | what                                     |
    |----------|------------------------------------------|
    | 0 .. 511 | latent, e4m3, value = byte * sigma       |
    | 512..639 | rope, bf16, little endian, unscaled      |

    The scale pool holds one float32 a token.
    """

    name = "fp8_rope_bf16"
    scale_dtypes = (torch.float32,)
    alignment = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.latent % 2:
            refuse("layout", f"an even latent for {self.name}, since bf16 numbers follow it", f"latent={self.latent}")

    @property
    def row_elements(self) -> int:
        return self.latent + 2 * self.rope

    @property
    def scales_per_token(self) -> int:
        return 1

    @property
    def pool_granularity(self) -> int | None:
        return self.row_elements

    def make_rows(self, latent: Tensor, rope: Tensor, sigma: Tensor | None, measure: Measure) -> QuantizedRows:
        if sigma is None:
            sigma = measure(latent).unsqueeze(-1)
        codes = quantise_group(latent, sigma[..., 0])
        return QuantizedRows(_join_bytes(codes, self.stored_rope(rope, sigma)), sigma)

    def dequantize(self, values: Tensor, scales: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        sigma = _need_scales(self, self._check_rows(values, scales)).to(dtype)
        latent, rope = self.latent_and_rope(_aligned(values, self.alignment))
        return torch.cat((decode_e4m3(latent, dtype) * sigma, self.read_rope(rope.to(dtype), sigma)), -1)

    def stored_rope(self, rope: Tensor, sigma: Tensor) -> Tensor:
        """The rope as the row holds it, in the dtype that it has there; sigma `[..., 1]` is the latent's."""
        return saturating_cast(rope, torch.bfloat16)

    def read_rope(self, rope: Tensor, sigma: Tensor) -> Tensor:
        """The rope again, in the dtype of both, from what the row holds."""
        return rope

    def latent_and_rope(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return _as_e4m3(values[..., : self.latent]), values[..., self.latent :].view(torch.bfloat16)


@dataclass(frozen=True)
class Fp8RopeBf16Prescaled(Fp8RopeBf16):
    """The same bytes, but the rope is stored divided by sigma, so that one factor serves the whole logit column.

    | byte     | what                                     |
    |----------|------------------------------------------|
    | 0 .. 511 | latent, e4m3, value = byte * sigma       |
    | 512..639 | rope, bf16, value = number * sigma       |

    MAX's scaled decode and SnapMLA store this. Nothing in the bytes tells it from `fp8_rope_bf16`: name it.
    """

    name = "fp8_rope_bf16_prescaled"
    rope_scaled = True

    def stored_rope(self, rope: Tensor, sigma: Tensor) -> Tensor:
        inverse = torch.ones((), dtype=torch.float32, device=rope.device) / sigma.to(torch.float32)
        return saturating_cast(rope.to(torch.float32) * inverse, torch.bfloat16)

    def read_rope(self, rope: Tensor, sigma: Tensor) -> Tensor:
        return rope * sigma


@dataclass(frozen=True)
class Fp8DsMla(CacheLayout):
    """vLLM's and FlashMLA's row: the scales lie inside it, one float32 for every 128 latent columns.

    | byte     | what                                          |
    |----------|-----------------------------------------------|
    | 0 .. 511 | latent, e4m3, value = byte * sigma[d // 128]  |
    | 512..527 | 4 float32 sigmas                              |
    | 528..655 | rope, bf16, little endian, unscaled           |
    """

    name = "fp8_ds_mla"
    value_dtypes = (torch.uint8, E4M3)
    inline_scales = True
    alignment = 4

    GROUP: ClassVar[int] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.latent % 4 or self.rope % 2:
            got = f"latent={self.latent}, rope={self.rope}"
            refuse("layout", f"a latent of whole float32 and an even rope for {self.name}", got)

    @property
    def quantised(self) -> bool:
        return True

    @property
    def groups(self) -> int:
        return ceildiv(self.latent, self.GROUP)

    @property
    def scale_group(self) -> int:
        return self.GROUP

    @property
    def row_elements(self) -> int:
        return self.latent + 4 * self.groups + 2 * self.rope

    def make_rows(self, latent: Tensor, rope: Tensor, sigma: Tensor | None, measure: Measure) -> QuantizedRows:
        groups = latent.to(torch.float32).split(self.GROUP, -1)
        if sigma is None:
            sigma = _stack([measure(x) for x in groups])
        codes = torch.cat([quantise_group(x, sigma[..., g]).view(torch.uint8) for g, x in enumerate(groups)], -1)
        row = _join_bytes(codes, sigma.to(torch.float32), saturating_cast(rope, torch.bfloat16))
        return QuantizedRows(row.view(torch.uint8), None)

    def dequantize(self, values: Tensor, scales: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        self._check_rows(values, scales)
        values = _aligned(values, self.alignment)
        latent, rope = self.latent_and_rope(values)
        sigma = self._inline(values).to(dtype).repeat_interleave(self.GROUP, -1)[..., : self.latent]
        return torch.cat((decode_e4m3(latent, dtype) * sigma, rope.to(dtype)), -1)

    def _inline(self, values: Tensor) -> Tensor:
        return values[..., self.latent : self.latent + 4 * self.groups].view(torch.float32)

    def latent_and_rope(self, values: Tensor) -> tuple[Tensor, Tensor]:
        rope = values[..., self.latent + 4 * self.groups :].view(torch.bfloat16)
        return _as_e4m3(values[..., : self.latent]), rope

    def scale_plane(self, rows: Tensor, scales: Tensor | None) -> Tensor | None:
        return self._inline(rows)

    def check_scales(self, blocks: Tensor, scales: Tensor | None) -> None:
        if scales is None:
            return
        first = blocks.data_ptr() + self.latent
        if scales.dtype != torch.float32 or scales.data_ptr() != first:
            refuse(
                "kv_scales",
                f"None, or the float32 view of the scales inside the rows, since layout {self} keeps them there",
                scales,
            )


LAYOUTS: dict[str, type[CacheLayout]] = {
    cls.name: cls for cls in (Bf16, Fp16, Fp32, Fp8Flat, Fp8RopeBf16, Fp8RopeBf16Prescaled, Fp8DsMla)
}


def get_layout(name: str, *, latent: int = LATENTS[0], rope: int = ROPE, granularity: int | None = None) -> CacheLayout:
    """A layout by its name. `granularity` is for `fp8_flat` alone. Raises ValueError for a name we don't know."""
    if name not in LAYOUTS:
        refuse("layout", f"one of {', '.join(LAYOUTS)}", repr(name))
    if granularity is None:
        return LAYOUTS[name](latent, rope)
    if name != Fp8Flat.name:
        refuse("granularity", f"None for layout {name}; only {Fp8Flat.name} has one", granularity)
    return Fp8Flat(latent, rope, granularity)


def resolve_layout(layout: CacheLayout | str, blocks: Tensor, scales: Tensor | None) -> CacheLayout:
    """The layout of a pool from its name: latent width from the row (rope 64), granularity from the scales.

    A layout object is taken as it is. Either way the pool is checked against it.
    """
    if not isinstance(blocks, Tensor):
        refuse("kv_blocks", "a tensor", blocks, error=TypeError)
    if scales is not None and not isinstance(scales, Tensor):
        refuse("kv_scales", "a tensor or None", scales, error=TypeError)
    if isinstance(layout, str):
        named = get_layout(layout)
        if blocks.dim() == 6:
            named = _fit_to_row(named, blocks.shape[5])
        if isinstance(named, Fp8Flat) and scales is not None and scales.dim() == 6:
            named = _fit_to_scales(named, scales.shape[5])
        layout = named
    elif not isinstance(layout, CacheLayout):
        refuse("layout", "a CacheLayout or its name", layout, error=TypeError)
    layout.check_pool(blocks, scales)
    return layout


def _fit_to_row(layout: CacheLayout, row_elements: int) -> CacheLayout:
    for latent in LATENTS:
        fitted = replace(layout, latent=latent)
        if fitted.row_elements == row_elements:
            return fitted
    return layout


def _fit_to_scales(layout: Fp8Flat, groups: int) -> Fp8Flat:
    if groups <= 1:
        return layout
    if layout.width % groups:
        refuse(
            "layout",
            f"an Fp8Flat with its granularity, since {groups} scales don't divide a row of {layout.width} evenly",
            f"{layout.name!r}",
            f'For example get_layout("fp8_flat", granularity={_likely_granularity(layout.width, groups)}).',
        )
    return replace(layout, granularity=layout.width // groups)


def _likely_granularity(width: int, groups: int) -> int:
    """A power of two that cuts `width` into that many groups, if there is one: 128 for five groups of 576."""
    powers = [2**n for n in range(width.bit_length())]
    return next((g for g in powers if ceildiv(width, g) == groups), ceildiv(width, groups))


def per_tensor_scale(sigma: Tensor, blocks: Tensor) -> Tensor:
    """One scale for a whole pool (`sigma` with one element), or one a layer (`sigma [num_layers]`), as `kv_scales`.

    The view has stride 0 along pages and slots; every page and slot reads the same number. On a CPU sigma is checked:
    it must be finite and at least the floor of its dtype (docs/contract.md).
    """
    expect_tensor(blocks, "blocks", [None] * 6, ())
    pages, kv_dim, layers, page_size, heads, _ = blocks.shape
    check_sigma(sigma)
    if sigma.numel() not in (1, layers):
        refuse("sigma", f"[1] or [{layers}] {' or '.join(map(dtype_name, SCALE_DTYPES))}", sigma)
    flat = sigma.reshape(-1)
    stride_layer = 0 if flat.numel() == 1 else flat.stride(0)
    return flat.as_strided((pages, kv_dim, layers, page_size, heads, 1), (0, 0, stride_layer, 0, 0, 0))


def _dtype_words(dtype: object) -> str:
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)


def _leading(rows: Tensor, name: str) -> torch.Size:
    """All dimensions of rows but their columns."""
    if not isinstance(rows, Tensor):
        refuse(name, "a tensor", describe(rows), error=TypeError)
    return rows.shape[:-1]


def _aligned(rows: Tensor, size: int) -> Tensor:
    """Rows of bytes, copied where numbers of `size` bytes inside them couldn't be viewed."""
    rows = rows.contiguous()
    return rows.clone() if rows.storage_offset() % size else rows


def _as_e4m3(values: Tensor) -> Tensor:
    return values if values.dtype == E4M3 else values.view(E4M3)


def _join_bytes(*parts: Tensor) -> Tensor:
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1).view(E4M3)


def _stack(sigmas: list[Tensor]) -> Tensor:
    """Stack along a new last dimension; by bytes where torch can't stack the dtype."""
    if sigmas[0].dtype == torch.float8_e8m0fnu:
        return torch.stack([sigma.view(torch.uint8) for sigma in sigmas], -1).view(torch.float8_e8m0fnu)
    return torch.stack(sigmas, -1)


def _need_scales(layout: CacheLayout, scales: Tensor | None) -> Tensor:
    if scales is None:
        refuse("scales", f"[..., {layout.scales_per_token}] for layout {layout}", None)
    return scales


def _layout_hint(blocks: Tensor) -> str:
    """Which layouts have rows of this width and dtype, if any."""
    if blocks.dim() != 6:
        return ""
    fitting = [
        cls.name
        for cls in LAYOUTS.values()
        if blocks.dtype in cls.value_dtypes and _fit_to_row(cls(), blocks.shape[5]).row_elements == blocks.shape[5]
    ]
    return f"A pool of such rows is {' or '.join(fitting)}." if fitting else ""
