"""`pagedmla demo`: a prefill and some decode steps over pages, each checked against float64.

The requests are made up; the rest is the product itself: an allocator whose scale pages have ids of their own,
store, attend, the plan and the inspector.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pagedmla.kv_cache.inspection import inspect
from pagedmla.kv_cache.layouts import CacheLayout, get_layout
from pagedmla.kv_cache.page_pool import NULL_PAGE, PagePool
from pagedmla.kv_cache.saving import save_cache
from pagedmla.plugin.api import attend, store
from pagedmla.plugin.plan import plan
from pagedmla.reference.attention import softmax_state

HEADS, LATENT, ROPE = 16, 512, 64
SM_SCALE = 192**-0.5  # DeepSeek-V3: a query head is 128 + 64 wide before absorption
PROMPTS = {"ada": 37, "bob": 5, "eve": 70}
DECODE_STEPS = 4
PAGE_SIZE, PAGES, SCALE_PAGES = 16, 16, 24
EXECUTOR_BOUND = 1e-5  # float32 rounding
# e4m3 rounds to one part in 16 at worst, 1 in 40 on average. Logits of deviation 1.7 pass that on to the weights, and
# values that are pure noise average out while their errors don't: made-up tokens are the format's hardest case.
FP8_BOUND = 0.15


class StepRow(NamedTuple):
    """One line of the table."""

    name: str
    tokens: int
    keys: int
    milliseconds: float
    error_exact: float  # against float64 on the quantised cache: what the executor adds
    error_format: float  # against float64 on the tokens before they were cached: what the layout costs
    error_lse: float
    format_bound: float

    @property
    def passed(self) -> bool:
        return max(self.error_exact, self.error_lse) <= EXECUTOR_BOUND and self.error_format <= self.format_bound


def format_bound(layout: CacheLayout) -> float:
    """Of the format error. An unquantised number is off by half an eps, and a logit sums 576 products of them."""
    if layout.quantised:
        return FP8_BOUND
    return max(EXECUTOR_BOUND, 4 * torch.finfo(layout.value_dtypes[0]).eps)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest relative L2 error of any (token, head) row."""
    difference = (got.double() - wanted.double()).norm(dim=-1)
    return float((difference / wanted.double().norm(dim=-1).clamp(min=1e-30)).max())


def run(layout_name: str, save: Path | None) -> tuple[list[StepRow], PagePool]:
    """The steps of the demonstration; saves the cache of the last one where `save` says."""
    generator = torch.Generator().manual_seed(0)
    layout = get_layout(layout_name)
    pool = PagePool(
        layout,
        num_layers=1,
        page_size=PAGE_SIZE,
        num_pages=PAGES,
        num_scale_pages=SCALE_PAGES if layout.scales_per_token else None,
        sentinel=NULL_PAGE,
        shuffle_seed=0,
    )
    made = plan(
        layout=layout,
        num_heads=HEADS,
        page_size=PAGE_SIZE,
        max_batch=len(PROMPTS),
        max_tokens=sum(PROMPTS.values()),
        max_cache_length=128,
        dtype=torch.float32,
        device="cpu",
        sm_scale=SM_SCALE,
        num_partitions=2,
    )
    names = list(PROMPTS)
    for name in names:
        pool.allocate(name)
    history = {name: torch.zeros(0, LATENT + ROPE, dtype=torch.float64) for name in names}
    rows = []
    for number in range(1 + DECODE_STEPS):
        query_lens = list(PROMPTS.values()) if number == 0 else [1] * len(names)
        step = pool.values(names, query_lens)
        tokens = sum(query_lens)
        latent = torch.randn(tokens, LATENT, generator=generator)
        rope = torch.randn(tokens, ROPE, generator=generator)
        q = torch.randn(tokens, HEADS, LATENT + ROPE, generator=generator)
        for name, new in zip(names, torch.cat((latent, rope), -1).double().split(query_lens)):
            history[name] = torch.cat((history[name], new))

        started = time.perf_counter()
        store(latent, rope, step.values, 0, query_start_loc=step.query_start_loc, layout=layout)
        out, lse = attend(
            q, step.values, 0, sm_scale=SM_SCALE, query_start_loc=step.query_start_loc, layout=layout, plan=made
        )
        milliseconds = (time.perf_counter() - started) * 1e3
        exact, exact_lse = attend(
            q.double(),
            step.values,
            0,
            sm_scale=SM_SCALE,
            query_start_loc=step.query_start_loc,
            layout=layout,
            executor="reference",
        )
        unquantised = torch.cat(
            [_dense(part, history[name]) for name, part in zip(names, q.double().split(query_lens))]
        )
        rows.append(
            StepRow(
                "prefill" if number == 0 else f"decode {number}",
                tokens,
                sum(len(history[name]) for name in names),
                milliseconds,
                relative_error(out, exact),
                relative_error(out, unquantised),
                float((lse.double() - exact_lse.double()).abs().max()),
                format_bound(layout),
            )
        )
        pool.advance(names, query_lens)
    if save is not None:
        save_cache(save, step.values, layout, query_start_loc=step.query_start_loc, request_names=names)
    return rows, pool


def _dense(q: Tensor, keys: Tensor) -> Tensor:
    """Float64 attention of a request's last tokens `q [n, H, width]` over all its `keys [kv_len, width]`."""
    outs = []
    for i, token in enumerate(q):
        seen = keys[: len(keys) - len(q) + i + 1]
        outs.append(softmax_state(SM_SCALE * token @ seen.T, seen[:, :LATENT])[0])
    return torch.stack(outs)


def main(layout_name: str = "fp8_rope_bf16", save: Path | None = None) -> int:
    """Print the table and the page map; 0 if every step is within its bounds."""
    from rich.console import Console
    from rich.table import Table

    from pagedmla.plugin.report import print_report
    from pagedmla.plugin.terminal import printable

    console = Console()
    layout = get_layout(layout_name)
    rows, pool = run(layout_name, save)
    control = get_layout("bf16").bytes_per_token
    console.print(
        f"Cache layout [bold]{layout}[/bold]: {layout.bytes_per_token} bytes a token and layer (bf16: {control}). "
        f"{len(PROMPTS)} requests, {HEADS} heads, pages of {PAGE_SIZE}, {_scales_of(layout)}."
    )
    table = Table(title="Each step, and its errors against float64")
    for heading in ("step", "tokens", "keys", "ms (CPU)", "out error", "lse error", "format error", "result"):
        table.add_column(heading, justify="right" if heading not in ("step", "result") else "left")
    for row in rows:
        table.add_row(
            row.name,
            str(row.tokens),
            str(row.keys),
            f"{row.milliseconds:.1f}",
            f"{row.error_exact:.0e}",
            f"{row.error_lse:.0e}",
            f"{row.error_format:.1%}",
            "[green]ok[/green]" if row.passed else "[red]WRONG[/red]",
        )
    console.print(table)
    bound = f"{100 * format_bound(layout):.2g}%{' (random tokens are the hardest case)' if layout.quantised else ''}"
    console.print(
        f"out error: against float64 on the same cache, bound {EXECUTOR_BOUND:.0e}; lse error: the same for the LSE; "
        f"format error: out against float64 on the tokens before they were cached, bound {bound}. "
        "Each is the worst (token, head) row, relative L2 for out.\n"
    )
    names = list(PROMPTS)
    report = inspect(pool.values(names, [0] * len(names)).values, layout=layout, request_names=names)
    print_report(report)
    if save is not None:
        console.print(f"\nWrote {printable(str(save))}", highlight=False, markup=False, soft_wrap=True)
    console.print("\nNext: [bold]pagedmla --help[/bold], and docs/contract.md for what the numbers mean.")
    return 0 if all(row.passed for row in rows) and report.ok else 1


def _scales_of(layout: CacheLayout) -> str:
    if layout.scales_per_token:
        return "scales in pages of their own"
    return "scales inside the rows" if layout.quantised else "no scales"
