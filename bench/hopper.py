"""The decode benchmark for a real GPU: what `make gpu` measures, as one JSON and one picture.

    python -m pagedmla.bench.hopper --out bench/results

Every row is measured here and now (bench/measure.py says how), losing rows like winning ones; the file says on which
card, with which driver and versions, and when.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pagedmla.bench.cases import Case
from pagedmla.bench.measure import cuda_clock, measure

PACKAGES = ("torch", "triton", "cuda-bindings", "vllm")
FLAGSHIP = "fp8_rope_bf16"


def cases() -> Iterator[Case]:
    """The flagship over heads, batches and contexts; the other layouts where they can be compared with it."""
    for heads in (16, 32, 64, 128):
        for batch in (1, 8, 32, 128):
            yield Case(FLAGSHIP, heads, batch, 4096)
    for heads in (16, 128):
        yield Case(FLAGSHIP, heads, 128, 640)
        yield Case(FLAGSHIP, heads, 8, 32768)
        yield Case(FLAGSHIP, heads, 1, 131072)
        for layout in ("fp8_flat", "fp8_ds_mla", "bf16"):
            yield Case(layout, heads, 128, 4096)


def run(folder: Path) -> Path:
    """Measure, print as it goes, write gpu-CARD.json after each case and its picture at the end; returns its path."""
    device = torch.device("cuda", torch.cuda.current_device())
    clock = cuda_clock(device)
    card = torch.cuda.get_device_name(device)
    rows: list[dict[str, Any]] = []
    report = {
        "card": card,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "rows": rows,
    }
    path = folder / f"gpu-{card.split()[-1].lower()}.json"
    for case in cases():
        for row in measure(case, device, clock):
            rows.append(row)
            print(_line(row), flush=True)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _draw(rows, card, path.with_suffix(".png"))
    return path


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['layout']:>14} H={row['heads']:<3} B={row['batch']:<3} kv={row['kv_len']:<6} {row['contender']:<26}"
        f"{row['microseconds']:>9} us {row['gb_per_s']:>7} GB/s {row['tflop_per_s']:>6} TFLOP/s"
        f"  floor {row['share_of_floor'] or 0:.0%}  error {row['relative_l2']:.1e}"
    )


def _draw(rows: list[dict[str, Any]], card: str, path: Path) -> None:
    """Time against batch for each number of heads, a line a contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["layout"] == FLAGSHIP and row["kv_len"] == 4096]
    heads = sorted({row["heads"] for row in shown})
    figure, axes = pyplot.subplots(1, len(heads), figsize=(4 * len(heads), 4), sharey=True, layout="constrained")
    for axis, count in zip(axes, heads):
        for contender in dict.fromkeys(row["contender"] for row in shown):
            mine = [row for row in shown if row["heads"] == count and row["contender"] == contender]
            axis.plot([row["batch"] for row in mine], [row["microseconds"] for row in mine], "o-", label=contender)
        axis.set(xscale="log", yscale="log", xlabel="requests", title=f"{count} heads, 4096 keys")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("microseconds")
    axes[0].legend()
    figure.suptitle(f"Decode of {FLAGSHIP} on {card}: median, cold L2")
    figure.savefig(path, dpi=90)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench", "results"), help="folder of the JSON and the picture")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        parser.error("no CUDA device to measure on")
    print(run(folder))


if __name__ == "__main__":
    main()
