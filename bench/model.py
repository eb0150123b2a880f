"""How much of a GPU's bandwidth a compiled kernel could reach: a model from static figures, never a measurement.

A key token costs one multiprocessor

    memory   bytes_per_token / (bandwidth / multiprocessors)
    issue    warp_instructions_per_token / (4 schedulers * clock)
    tensor   2 * (576 + 512) * rows FLOPs / (float16 throughput / multiprocessors), in attention

and the largest of the three binds, if all else overlaps perfectly. So it is an upper bound: latency, shared memory,
the second read of keys by a second tile of rows and the merge of splits aren't in it. Rows are those of the tile, so a
request with fewer pays for the padding. `split_queries` marks float16 queries in two bfloat16 parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pagedmla.hardware.cost import B200, H100, H200, Gpu

SCHEDULERS = 4  # warp instructions a cycle and multiprocessor
CLOCK_GHZ = 1.8  # under load; published tensor peaks imply 1.83 (Hopper) and 1.86 (Blackwell)
MULTIPROCESSORS = {H100: 132, H200: 132, B200: 148}
TARGET_OF = {H100: "sm_90", H200: "sm_90", B200: "sm_100"}
FLOPS_PER_ROW = 2 * (576 + 512)
ATTENTION = ("decode", "mixed")


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
    flops = FLOPS_PER_ROW * row["rows"] if row["kernel"] in ATTENTION else 0
    return Floor(
        memory=_memory_ns(row["bytes_per_token"], gpu),
        issue=row["warp_instructions_per_token"] / (SCHEDULERS * CLOCK_GHZ),
        tensor=flops * MULTIPROCESSORS[gpu] / (gpu.bf16_tflops * 1e3),
    )


def model_rows(table: Iterable[dict[str, Any]], layouts: Iterable[str] | None = None) -> list[dict[str, Any]]:
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
                        "kernel": row["kernel"],
                        "layout": row["layout"],
                        "rows": row["rows"],
                        "group": row["options"]["GROUP"],
                        "page_size": row["options"]["PAGE_SIZE"],
                        "split_queries": row["options"]["SPLIT_QUERIES"],
                        "memory_ns": round(floor.memory, 2),
                        "issue_ns": round(floor.issue, 2),
                        "tensor_ns": round(floor.tensor, 2),
                        "bound": floor.bound,
                        "share_of_bandwidth": round(floor.share, 3),
                    }
                )
    return rows


def _memory_ns(bytes_per_token: float, gpu: Gpu) -> float:
    return bytes_per_token * MULTIPROCESSORS[gpu] / (gpu.terabytes_per_second * 1e3)
