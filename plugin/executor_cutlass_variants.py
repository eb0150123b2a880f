"""Which compiled decode kernel a step takes: from layout, pages and dtype, its query rows, its keys and a precision.

What may be chosen is `cutlass_kernels.variants.VARIANTS`, and nothing else. A tile of rows holds the query tokens of a
request times heads where it can, since keys are read once for each tile; the precision asked for comes before that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pagedmla.cutlass_kernels.tiles import LATENT, ROPE
from pagedmla.cutlass_kernels.variants import DTYPES, LAYOUT_OF_ROPE, PAGE_SIZES, VARIANTS, Variant
from pagedmla.kv_cache.checks import ceildiv, counted, dtype_name
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.plugin.executors import AUTO, AttendOptions, Capacity, Configuration
from pagedmla.plugin.step import Step

SHORT = 512  # keys; over fewer, weights rounded to e4m3 don't average out
FP16_ROWS = 16  # up to which fp16 hides behind memory: by time_model.py 1 % of a step there, 14 % at 32 rows
ROWS = tuple(sorted({variant.rows for variant in VARIANTS}))
# At least. By time_model.py one request of 16 heads and 640 to 8192 keys takes 8 to 32 % less than with 256, and four
# or sixteen requests up to 25 % less and 3 % more.
KEYS_A_PIECE = 128
MOST_HEADS = 128  # of the prompts that stand behind decode rows: Triton's limit

_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16"}


def refusal(configuration: Configuration) -> str | None:
    """Why no variant takes this, or None. `attend` alone."""
    layout, page_size, dtype = configuration.layout, configuration.page_size, configuration.dtype
    if layout is not None:
        served = tuple(LAYOUT_OF_ROPE.values())
        if layout.name not in served or layout.scales_per_token != 1:
            return f"its layouts are {', '.join(served)} with one scale a token or tensor, not {layout}"
        if (layout.latent, layout.rope) != (LATENT, ROPE):
            return f"it takes a latent of {LATENT} and a rope of {ROPE}, not {layout.latent} and {layout.rope}"
    if page_size is not None and page_size not in PAGE_SIZES:
        return f"its pages have {', '.join(map(str, PAGE_SIZES))} tokens, not {page_size}"
    if dtype is not None and not any(_DTYPE_NAMES[variant.dtype] == dtype_name(dtype) for variant in VARIANTS):
        built = [_DTYPE_NAMES[name] for name in DTYPES if any(variant.dtype == name for variant in VARIANTS)]
        return f"it is built for queries in {' or '.join(built)}, not {dtype_name(dtype)}"
    if configuration.num_heads is not None and configuration.num_heads > MOST_HEADS:
        return f"the kernels take up to {MOST_HEADS} heads, not {configuration.num_heads}"
    return None


class Use(NamedTuple):
    """A variant and the decode rows that take it."""

    variant: Variant
    fewest: int  # query tokens of a request
    most: int | None
    short: bool  # only in steps of fewer than SHORT keys

    def __str__(self) -> str:
        if self.most is None:
            tokens = f"{self.fewest} or more query tokens"
        elif self.most == self.fewest:
            tokens = counted(self.most, "query token")
        else:
            tokens = f"{self.fewest} to {self.most} query tokens"
        return f"{tokens} a request" + (f", under {SHORT} keys" if self.short else "")


def choose_variant(configuration: Configuration, query_tokens: int, keys: int) -> Variant:
    """The variant for requests of up to `query_tokens` tokens and `keys` keys; `refusal` gave None."""
    rows = query_tokens * (configuration.num_heads or 1)
    return _variant(configuration, _tile_of(rows), keys < SHORT)


def variant_of_step(step: Step, q: Tensor, options: AttendOptions, requests: int, tokens: int) -> Variant:
    """The variant for the first `requests` requests of a step, which have `tokens` query tokens.

    By bounds that the host knows, and a captured graph keeps: never by lengths.
    """
    keys, heads = step.cache.max_cache_length, q.shape[1]
    if options.max_keys is not None:
        keys = min(keys, options.max_keys)
    tile = _tile_of(step.longest_of(requests, tokens) * heads)
    about = q.device, step.layout, heads, step.cache.page_size, q.dtype, options.precision
    return _of_step(*about, tile, keys < SHORT)


def choices(configuration: Configuration, capacity: Capacity | None = None) -> tuple[Variant, ...]:
    """All that steps of this configuration may take, within a plan's capacity."""
    return tuple(dict.fromkeys(use.variant for use in uses(configuration, capacity)))


def uses(configuration: Configuration, capacity: Capacity | None = None) -> list[Use]:
    """`choices`, each with the decode rows that take it."""
    heads = configuration.num_heads or 1
    long_too = capacity is None or capacity.max_cache_length >= SHORT
    found: list[Use] = []
    for short in (False, True) if long_too else (True,):
        held = 0  # query tokens of the size of tile before
        for size in ROWS:
            if capacity is not None and held >= max(1, capacity.max_tokens):
                break  # no step has a request of more
            most = None if size == ROWS[-1] else size // heads
            if most == held:
                continue
            variant, fewest, held = _variant(configuration, size, short), held + 1, most or held
            if short and long_too and variant == _variant(configuration, size, False):
                continue
            if found and (found[-1].variant, found[-1].short) == (variant, short and long_too):
                fewest = found.pop().fewest
            found.append(Use(variant, fewest, most, short and long_too))
    return found


def pieces(configuration: Configuration, capacity: Capacity, requests: int, tokens: int, multiprocessors: int) -> int:
    """Pieces that a request's keys may be cut into; the kernel takes as few as the lengths on the device allow.

    As many as there are workers, so that one long request among short ones is shared by all of them.
    """
    if requests == 0 or tokens == 0:
        return 1
    variant = choose_variant(configuration, ceildiv(tokens, requests), capacity.max_cache_length)
    workers = multiprocessors // variant.cluster
    return max(1, min(workers, capacity.max_cache_length // KEYS_A_PIECE))


def _tile_of(rows: int) -> int:
    """The smallest tile that holds so many rows, or the largest of all."""
    for size in ROWS:
        if size >= rows:
            return size
    return ROWS[-1]


@lru_cache(maxsize=4096)
def _of_step(
    device: torch.device,
    layout: CacheLayout,
    heads: int,
    page_size: int,
    dtype: torch.dtype,
    precision: str,
    tile: int,
    short: bool,
) -> Variant:
    """In every call of a step: without a Configuration, which takes longer to make and to hash than all the rest."""
    return _variant(Configuration("attend", device, layout, heads, page_size, dtype, precision), tile, short)


@lru_cache(maxsize=4096)
def _variant(configuration: Configuration, rows: int, short: bool) -> Variant:
    """Of the forms that the precision allows, the first that is built for tiles of so many rows.

    Where none is (fp16 for more than 32, two terms for more than 64), the one with the most rows: keys are then read
    once for each such tile.
    """
    covering = [variant for variant in VARIANTS if _covers(variant, configuration)]
    forms = _forms(configuration.precision, short, rows)
    for form in forms:
        for variant in covering:
            if (variant.shape.form, variant.rows) == (form, rows):
                return variant
    return max((variant for variant in covering if variant.shape.form in forms), key=lambda variant: variant.rows)


def _covers(variant: Variant, configuration: Configuration) -> bool:
    layout, page_size, dtype = configuration.layout, configuration.page_size, configuration.dtype
    return (
        (layout is None or variant.layout == layout.name)
        and (page_size is None or page_size in variant.page_sizes)
        and (dtype is None or _DTYPE_NAMES[variant.dtype] == dtype_name(dtype))
    )


def _forms(precision: str, short: bool, rows: int) -> tuple[str, ...]:
    """Forms in order of preference. "auto": the most exact one that costs no time; one term only where asked for."""
    if precision == AUTO:
        return ("fp16",) if short or rows <= FP16_ROWS else ("fp8x2",)
    return {"fp8": ("fp8x1", "fp8x2"), "fp8x2": ("fp8x2",), "fp16": ("fp16",)}[precision]
