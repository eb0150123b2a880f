"""What compiled kernels could do on a GPU: models from static figures, never measurements.

**Budgets** (`kernel_rows`): how much of the bandwidth an attention kernel of the compile table could reach.

A key token costs one multiprocessor

    memory   bytes_per_token / (bandwidth / multiprocessors)
    issue    warp_instructions_per_token / (4 schedulers * clock)
    tensor   2 * (576 + 512) * rows FLOPs / (throughput / multiprocessors), in attention; float16, or e4m3 a term of Q

and the largest of the three binds, if all else overlaps perfectly. So it is an upper bound: latency, shared memory,
the second read of keys by a second tile of rows and the merge of splits aren't in it. Rows are those of the tile, so a
request with fewer pays for the padding. `split_queries` marks float16 queries in two bfloat16 parts.

**Steps** (`step_rows`): microseconds of a case, in the format of measured rows, with the floor and what others
published for that very case. CUTLASS by its time model (cutlass_kernels/time_model.py), whose constants are fitted to
an H200's rows; Triton by the bound above alone: its row says "at least" and has no share of a floor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pagedmla
from pagedmla.bench import published
from pagedmla.bench.cases import PAGE_SIZE, Case, grid
from pagedmla.bench.contenders import OURS
from pagedmla.bench.rows import MODEL, Row, make_row
from pagedmla.cutlass_kernels import time_model
from pagedmla.cutlass_kernels.tiles import KEYS, LATENT, ROPE, WARPGROUPS, Shape
from pagedmla.cutlass_kernels.variants import Variant
from pagedmla.hardware.cost import B200, H100, H200, Gpu, StepCost, attention_cost
from pagedmla.hardware.targets import find_target
from pagedmla.kv_cache.checks import ceildiv
from pagedmla.plugin import executor_cutlass_variants as variants
from pagedmla.plugin.executors import PRECISIONS, Capacity, Configuration
from pagedmla.triton_kernels.tiles import rows_for

RESULTS = Path(__file__).parent / "results"
TRITON_TABLE = RESULTS / "compile-triton.json"
CUTLASS_TABLE = RESULTS / "compile-cutlass.json"

STEPS_ON = (H200, H100)  # whose steps are modelled
SCHEDULERS = 4  # warp instructions a cycle and multiprocessor
CLOCK_GHZ = 1.8  # under load; published tensor peaks imply 1.83 (Hopper) and 1.86 (Blackwell)
TARGET_OF = {H100: "sm_90", H200: "sm_90", B200: "sm_100"}
FLOPS_PER_ROW = 2 * (576 + 512)
ATTENTION = ("pieces", "decode", "mixed")
# The compile table counts instructions of all consumer warps a key; the time model wants those of one warp and trip.
_TOKENS_A_TRIP = 2 * KEYS
_CONSUMER_WARPS = 4 * WARPGROUPS


@dataclass(frozen=True)
class Floor:
    """Nanoseconds of one multiprocessor for one key token."""

    memory: float
    issue: float
    tensor: float

    @property
    def bound(self) -> str:
        """What binds: "memory", "issue" or "tensor"."""
        return max(("memory", "issue", "tensor"), key=lambda name: float(getattr(self, name)))

    @property
    def share(self) -> float:
        """Of the memory bandwidth, the most that the kernel can reach: 0 to 1."""
        return self.memory / max(self.memory, self.issue, self.tensor)


def issue_slots(bytes_per_token: float, gpu: Gpu) -> float:
    """Warp instructions that a multiprocessor can issue while its share of the bandwidth brings one token."""
    return _memory_ns(bytes_per_token, gpu) * SCHEDULERS * CLOCK_GHZ


def floor_of(row: dict[str, Any], gpu: Gpu) -> Floor:
    """The floor of a row of the compile table on `gpu`."""
    flops = _flops(row) if row["kernel"] in ATTENTION else 0
    return Floor(
        memory=_memory_ns(row["bytes_per_token"], gpu),
        issue=row["warp_instructions_per_token"] / (SCHEDULERS * CLOCK_GHZ),
        tensor=flops * gpu.multiprocessors / (_tflops(row, gpu) * 1e3),
    )


def _is_fp8(row: dict[str, Any]) -> bool:
    """Whether its products are of e4m3: in the CUTLASS kernels' FP8 forms."""
    return bool(row["options"].get("precision") == "fp8")


def _flops(row: dict[str, Any]) -> float:
    """Of a key, in products of the kind that `_tflops` is for: queries of two terms meet the latent twice, and a bf16
    rope beside e4m3 has half the rate.
    """
    if not _is_fp8(row):
        return float(FLOPS_PER_ROW * row["rows"])
    terms = row["options"]["terms"]
    rope = ROPE * (terms if row["options"]["rope"] == "e4m3" else 2)
    return float(2 * (LATENT * terms + rope + LATENT) * row["rows"])


def _tflops(row: dict[str, Any], gpu: Gpu) -> float:
    return gpu.fp8_tflops if _is_fp8(row) else gpu.bf16_tflops


def kernel_rows(table: Iterable[dict[str, Any]], layouts: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """A row for each attention kernel of the compile table and each GPU that its target stands for."""
    wanted = None if layouts is None else set(layouts)
    rows = []
    for row in table:
        if row["kernel"] not in ATTENTION or "refused" in row or (wanted is not None and row["layout"] not in wanted):
            continue
        for gpu, target in TARGET_OF.items():
            if row["target"] == target:
                floor = floor_of(row, gpu)
                rows.append(
                    {
                        "source": "model",
                        "gpu": gpu.name,
                        "executor": row["executor"],
                        "kernel": row["kernel"],
                        "layout": row["layout"],
                        "rows": row["rows"],
                        **_variant(row),
                        "registers": row["registers"],
                        "spills_in_loop": row["spill_words_in_loop"],
                        "shared_bytes": row["shared_bytes"],
                        "instructions": row["warp_instructions_per_token"],
                        "issue_slots": round(issue_slots(row["bytes_per_token"], gpu), 1),
                        "memory_ns": round(floor.memory, 2),
                        "issue_ns": round(floor.issue, 2),
                        "tensor_ns": round(floor.tensor, 2),
                        "bound": floor.bound,
                        "share_of_bandwidth": round(floor.share, 3),
                    }
                )
    return rows


def _variant(row: dict[str, Any]) -> dict[str, Any]:
    """What tells variants apart: of Triton's kernels, and of CUTLASS ones, whose boxes of keys stand for page sizes."""
    options = row["options"]
    if row["executor"] == "cutlass":
        form = Shape(row["rows"] // options["cluster"], options["precision"], options["terms"], options["rope"]).form
        page_size = PAGE_SIZE if options["box"] * options["cluster"] >= PAGE_SIZE else options["box"]
        return {"form": form, "group": None, "page_size": page_size, "split_queries": False}
    return {
        "form": None,
        "group": options["GROUP"],
        "page_size": options["PAGE_SIZE"],
        "split_queries": options["SPLIT_QUERIES"],
    }


def expect_table(path: Path) -> None:
    """FileNotFoundError says how to write a compile table that isn't there."""
    if not path.exists():
        executor = " --executor cutlass" if path.name == CUTLASS_TABLE.name else ""
        raise FileNotFoundError(f"{path}: no such compile table; `pagedmla compile{executor} --json {path}` writes it")


def compile_table(path: Path) -> list[dict[str, Any]]:
    """Rows that `pagedmla compile --json` wrote. FileNotFoundError says how to."""
    expect_table(path)
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def step_cases(layouts: Iterable[str], *, few: bool = False) -> list[Case]:
    """What is modelled where nobody asks for a case: 4096 keys and, unless `few`, each shape that others published."""
    cases: list[Case] = []
    for layout in layouts:
        of_layout = {*grid([layout], (16, 128), (1, 8, 32, 128), (4096,))}
        if not few:
            of_layout |= {Case(layout, *shape) for shape in published.shapes()}
        cases += sorted(of_layout, key=lambda case: (case.heads, case.q_len, case.kv_len, case.batch))
    return cases


def step_rows(case: Case, gpu: Gpu, triton: Iterable[dict[str, Any]], cutlass: Iterable[dict[str, Any]]) -> list[Row]:
    """The case on `gpu`, by each executor whose compile table has the kernel that it would take."""
    layout = pagedmla.get_layout(case.layout)
    keys = sum(case.kv_lens)
    cost = attention_cost(
        layout, num_heads=case.heads, query_tokens=case.tokens, key_tokens=keys, scored_pairs=case.q_len * keys
    )
    found = [(*step, False) for step in _cutlass_steps(case, gpu, cutlass)]
    found += [(*step, True) for step in _triton_step(case, gpu, cost, triton)]
    return [
        make_row(
            case, cost, microseconds, source=MODEL, device=gpu.name, contender=name, ours=True, reads=case.layout,
            roof=gpu, fp8_mma=layout.quantised, bound=bound,
        )
        for name, microseconds, bound in found
    ]  # fmt: skip


def usual_trip(row: dict[str, Any], variant: Variant) -> float:
    """Instructions of a consumer warp's usual trip, by a variant's row of the compile table, producer included."""
    every = row["warp_instructions_per_token"] * _TOKENS_A_TRIP / _CONSUMER_WARPS
    return float(every - time_model.rare_instructions(variant.shape))


def _cutlass_steps(case: Case, gpu: Gpu, table: Iterable[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """In each precision that changes which kernel it takes."""
    if TARGET_OF[gpu] != "sm_90":  # the kernels are Hopper's
        return
    rows = {row["options"]["variant"]: row for row in table if row["kernel"] == "decode" and "refused" not in row}
    chosen: dict[Variant, int] = {}
    for precision in PRECISIONS:
        configuration = Configuration(
            "attend", torch.device("cuda"), pagedmla.get_layout(case.layout), case.heads, PAGE_SIZE, torch.bfloat16,
            precision,
        )  # fmt: skip
        if variants.refusal(configuration) is not None:
            return
        capacity = Capacity(case.batch, case.tokens, max(case.kv_lens))
        variant = variants.choose_variant(configuration, case.q_len, capacity.max_cache_length)
        pieces = variants.pieces(configuration, capacity, case.batch, case.tokens, gpu.multiprocessors)
        chosen.setdefault(variant, pieces)
    for variant, pieces in chosen.items():
        if variant.name not in rows:
            continue
        microseconds = time_model.step_us(
            variant,
            gpu,
            kv_lens=list(case.kv_lens),
            q_len=case.q_len,
            heads=case.heads,
            partitions=pieces,
            consumer_instructions=usual_trip(rows[variant.name], variant),
        )
        yield f"{OURS}cutlass {variant.shape.form}", microseconds


def _triton_step(case: Case, gpu: Gpu, cost: StepCost, table: Iterable[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """The bound of the smallest compiled tile that holds a request's rows, or of several of the largest."""
    if case.heads > variants.MOST_HEADS:
        return
    group = pagedmla.get_layout(case.layout).pool_granularity
    fitting = {
        row["rows"]: row
        for row in table
        if (row["kernel"], row["target"], row["layout"]) == ("pieces", TARGET_OF[gpu], case.layout)
        and "refused" not in row
        and row["options"]["PAGE_SIZE"] == PAGE_SIZE
        and not row["options"]["SPLIT_QUERIES"]
        and (group is None or row["options"]["GROUPS"] <= 1)
    }
    if not fitting:
        return
    rows = case.heads * case.q_len
    size = rows_for(rows, find_target(TARGET_OF[gpu]))
    if size not in fitting:
        size = min((each for each in fitting if each >= rows), default=max(fitting))
    floor = floor_of(fitting[size], gpu)
    tiles = ceildiv(rows, size)
    per_key = max(floor.memory, tiles * floor.issue, tiles * floor.tensor)
    io_us = cost.bytes / gpu.terabytes_per_second * 1e-6
    yield f"{OURS}triton (at least)", max(io_us, sum(case.kv_lens) * per_key / gpu.multiprocessors / 1e3)


def _memory_ns(bytes_per_token: float, gpu: Gpu) -> float:
    return bytes_per_token * gpu.multiprocessors / (gpu.terabytes_per_second * 1e3)
