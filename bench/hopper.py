"""The decode benchmark for a real GPU: what `make gpu` measures, as one JSON and one picture.

    python -m pagedmla.bench.hopper --out bench/results
    python -m pagedmla.bench.hopper --full           # every combination: hours

B 1 to 128, kv 640 to 128k, 16 to 128 heads, 1 to 4 query tokens, equal and imbalanced lengths, on a cold L2, from the
first kernel's start to the last one's end; beside vLLM's Triton kernel with its own splits, FlashMLA and FlashInfer
where they are installed, and dense bf16. By default every axis through its middle, what matters most first, and no new
case after `--seconds`: what wasn't reached is listed. The file is written again after each case.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from pagedmla.bench.cases import Case, full_gpu_cases, gpu_cases
from pagedmla.bench.measure import device_name
from pagedmla.bench.pictures import draw
from pagedmla.bench.run import Bench, make_console, write_report

SECONDS = 100.0


def run(device: torch.device, cases: Sequence[Case], folder: Path, seconds: float | None = None) -> Path:
    """Measure, print, write gpu-CARD.json and, where anything was measured, gpu-CARD.png; returns the JSON's path."""
    card = device_name(device)
    path = folder / f"{record_name(card)}.json"
    bench = Bench(device, make_console(), seconds)

    def write() -> None:
        write_report(bench.report(), path)
        print(f"{path}: {len(bench.rows)} rows", flush=True)  # a log has no progress bar

    bench.measure(cases, after_each=write)
    write()
    if bench.rows:
        draw(bench.rows, bench.roof, f"decode on {card}", path.with_suffix(".png"))
    return path


def record_name(card: str) -> str:
    """gpu-h100-80gb-hbm3 for "NVIDIA H100 80GB HBM3"."""
    return f"gpu-{card.removeprefix('NVIDIA ').replace(' ', '-').lower()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench", "results"), help="folder of the JSON and the picture")
    parser.add_argument("--full", action="store_true", help="every combination, however long it takes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no case after so long")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device to measure on")
    device = torch.device("cuda", torch.cuda.current_device())
    if given.full:
        print(run(device, full_gpu_cases(), given.out))
    else:
        print(run(device, gpu_cases(), given.out, given.seconds))


if __name__ == "__main__":
    main()
