"""Decode steps to time: a cache in scrambled pages, filled by `store`, and queries, the same for every contender."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

import pagedmla
from pagedmla.bench.ragged import normal_lengths
from pagedmla.kv_cache.checks import Refusal, ceildiv
from pagedmla.kv_cache.layouts import CacheLayout, get_layout
from pagedmla.kv_cache.page_pool import PagePool, StepInputs
from pagedmla.kv_cache.values import KVCacheInputsPerDevice

FLAGSHIP = "fp8_rope_bf16"
PAGE_SIZE = 64
SM_SCALE = 192**-0.5
UNIFORM, IMBALANCED = "uniform", "imbalanced"
_STORED_AT_ONCE = 65536  # tokens


@dataclass(frozen=True)
class Case:
    """One decode step: `batch` requests of `q_len` query tokens and, those included, `kv_len` keys each.

    Of imbalanced lengths `kv_len` is the mean that they are drawn around. ValueError for a step that can't be.
    """

    layout: str
    heads: int
    batch: int
    kv_len: int
    q_len: int = 1
    lengths: str = UNIFORM

    def __post_init__(self) -> None:
        get_layout(self.layout)  # refuses unknown names
        for name in ("heads", "batch", "kv_len", "q_len"):
            if getattr(self, name) < 1:
                raise Refusal(f"{name}: expected at least 1; got {getattr(self, name)}")
        if self.q_len > self.kv_len:
            raise Refusal(f"kv_len: expected at least the {self.q_len} query tokens; got {self.kv_len}")
        if self.lengths not in (UNIFORM, IMBALANCED):
            raise Refusal(f"lengths: expected {UNIFORM!r} or {IMBALANCED!r}; got {self.lengths!r}")

    @property
    def kv_lens(self) -> tuple[int, ...]:
        if self.lengths == UNIFORM:
            return (self.kv_len,) * self.batch
        return normal_lengths(self.kv_len, self.batch, self.q_len)

    @property
    def tokens(self) -> int:
        """Query tokens of the step."""
        return self.batch * self.q_len

    def __str__(self) -> str:
        queries = f", {self.q_len} query tokens" if self.q_len > 1 else ""
        ragged = f", {self.lengths}" if self.lengths != UNIFORM else ""
        return f"{self.layout}, {self.heads} heads, {self.batch} x {self.kv_len} keys{queries}{ragged}"


@dataclass(frozen=True, eq=False)
class Inputs:
    """A case on a device."""

    case: Case
    layout: CacheLayout
    values: KVCacheInputsPerDevice
    query_start_loc: Tensor | None  # [B + 1] int32; None: a query token a request
    q: Tensor  # [T, H, 576] bf16


def grid(
    layouts: Iterable[str],
    heads: Iterable[int],
    batches: Iterable[int],
    kv_lens: Iterable[int],
    q_lens: Iterable[int] = (1,),
    lengths: Iterable[str] = (UNIFORM,),
) -> Iterator[Case]:
    """Every combination, cheap cases first within a layout."""
    for layout, ragged, q_len, kv_len, batch, count in product(
        tuple(layouts), tuple(lengths), tuple(q_lens), tuple(kv_lens), tuple(batches), tuple(heads)
    ):
        yield Case(layout, count, batch, kv_len, q_len, ragged)


def cpu_cases() -> list[Case]:
    """The flagship and bf16 around a middle, then ragged and speculative steps, and the other FP8 layouts."""
    cases = [
        *grid([FLAGSHIP, "bf16"], (16,), (1, 8), (640, 4096)),
        *grid([FLAGSHIP, "bf16"], (128,), (1,), (640, 4096)),
    ]
    cases += [Case(FLAGSHIP, 16, 4, 1024, 4), Case(FLAGSHIP, 16, 8, 1024, 1, IMBALANCED)]
    cases += [Case(layout, 16, 8, 640) for layout in ("fp8_flat", "fp8_ds_mla")]
    cases += [Case(layout, 16, 1, 16384) for layout in (FLAGSHIP, "bf16")]
    return cases


def quick_cases() -> list[Case]:
    """A few seconds' worth."""
    return [Case(layout, 16, batch, kv_len) for layout in (FLAGSHIP, "bf16") for batch, kv_len in ((1, 640), (4, 1024))]


def gpu_cases() -> list[Case]:
    """Every axis of `full_gpu_cases` through its middle, 16 and 128 heads, in the order of what matters most."""
    cases = [Case(FLAGSHIP, heads, batch, 4096) for heads in (16, 128) for batch in (1, 8, 32, 128)]
    cases += [Case(FLAGSHIP, heads, 128, 640) for heads in (16, 128)]
    cases += [Case(FLAGSHIP, heads, 8, 32768) for heads in (16, 128)]
    cases += [Case(FLAGSHIP, heads, 1, 131072) for heads in (16, 128)]
    cases += [Case(FLAGSHIP, 16, batch, 4096, q_len) for q_len in (2, 4) for batch in (8, 128)]
    cases += [Case(FLAGSHIP, heads, batch, 4096, 1, IMBALANCED) for heads in (16, 128) for batch in (8, 128)]
    cases += [Case(layout, heads, 128, 4096) for layout in ("fp8_flat", "bf16", "fp8_ds_mla") for heads in (16, 128)]
    cases += [Case(FLAGSHIP, heads, batch, 4096) for heads in (32, 64) for batch in (1, 8, 32, 128)]
    cases += [Case(FLAGSHIP, 16, 128, 32768), Case(FLAGSHIP, 16, 32, 131072), Case(FLAGSHIP, 16, 1, 640)]
    cases += [Case(FLAGSHIP, 16, batch, 4096) for batch in (2, 4, 16, 64)]
    cases += [Case(FLAGSHIP, 16, 32, 4096, 3), Case(FLAGSHIP, 128, 32, 4096, 2)]
    return cases


def full_gpu_cases() -> list[Case]:
    """B 1 to 128, kv 640 to 128k, 16 to 128 heads, 1 to 4 query tokens, uniform and imbalanced: hours, not seconds."""
    return list(
        grid(
            (FLAGSHIP, "fp8_flat", "bf16", "fp8_ds_mla"),
            (16, 32, 64, 128),
            (1, 2, 4, 8, 16, 32, 64, 128),
            (640, 1024, 4096, 8192, 32768, 131072),
            (1, 2, 3, 4),
            (UNIFORM, IMBALANCED),
        )
    )


def build(case: Case, device: torch.device | str, *, pool_times: int = 1) -> Inputs:
    """The case on a device; the same numbers each time on the same kind of device.

    `pool_times` makes the pool that many times as large as what is live.
    """
    layout = get_layout(case.layout)
    kv_lens = case.kv_lens
    pages = sum(ceildiv(kv_len, PAGE_SIZE) for kv_len in kv_lens) * pool_times
    sigma = torch.tensor([0.05]) if layout.name == "fp8_flat" else None
    pool = PagePool(
        layout, num_layers=1, page_size=PAGE_SIZE, num_pages=pages, shuffle_seed=0, sigma=sigma, device=device
    )
    generator = torch.Generator(device).manual_seed(0)
    names = list(range(case.batch))
    for name in names:
        pool.allocate(name)
    for some in _groups(kv_lens):
        counts = [kv_lens[name] - case.q_len for name in some]
        _store(pool, layout, some, counts, generator, device)
        pool.advance(some, counts)
    query_lens = [case.q_len] * case.batch
    step = _store(pool, layout, names, query_lens, generator, device)
    q = torch.randn(case.tokens, case.heads, layout.width, generator=generator, device=device).to(torch.bfloat16)
    starts = None if case.q_len == 1 else step.query_start_loc
    return Inputs(case, layout, step.values, starts, q)


def _groups(kv_lens: tuple[int, ...]) -> Iterator[list[int]]:
    """Requests in order, as many together as a store of _STORED_AT_ONCE tokens takes, and at least one."""
    group: list[int] = []
    held = 0
    for name, kv_len in enumerate(kv_lens):
        if group and held + kv_len > _STORED_AT_ONCE:
            yield group
            group, held = [], 0
        group.append(name)
        held += kv_len
    yield group


def _store(
    pool: PagePool,
    layout: CacheLayout,
    requests: list[int],
    counts: list[int],
    generator: torch.Generator,
    device: torch.device | str,
) -> StepInputs:
    step = pool.values(requests, counts)
    tokens = sum(counts)
    latent = torch.randn(tokens, layout.latent, generator=generator, device=device).to(torch.bfloat16)
    rope = torch.randn(tokens, layout.rope, generator=generator, device=device).to(torch.bfloat16)
    pagedmla.store(latent, rope, step.values, 0, query_start_loc=step.query_start_loc, layout=layout)
    return step
