"""`python -m fuzz`, with tests/ on PYTHONPATH: the fuzzer as `make fuzz` runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from time import monotonic

import torch
from fuzz.campaign import Summary, run

SLOW_STEPS = 300
SECONDS_A_LINE = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description="Random steps through the executors, against float64.")
    parser.add_argument("--steps", type=at_least(1), default=10_000, help="through the vectorised executor")
    help_ = f"through the interpreted Triton kernels, then the CUTLASS model; by default {SLOW_STEPS}, or --steps"
    parser.add_argument("--slow-steps", type=at_least(0), help=help_)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=at_least(1), default=5, help="stop an executor after so many")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    slow_steps = min(SLOW_STEPS, given.steps) if given.slow_steps is None else given.slow_steps
    failed = 0
    for executor, steps in (("torch", given.steps), ("triton", slow_steps), ("cutlass-model", slow_steps)):
        if steps:
            progress = Progress(steps)
            summary = run(executor, steps, given.seed, most_failures=given.failures, progress=progress)
            print(f"{summary}\n  {progress.seconds():.0f} s", flush=True)
            failed += len(summary.failures)
    return 1 if failed else 0


def at_least(least: int) -> Callable[[str], int]:
    """A type of argument. Fewer would be a campaign that passes because it ran nothing."""

    def number(text: str) -> int:
        try:
            if (given := int(text)) >= least:
                return given
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}; got {text!r}")

    return number


class Progress:
    """A line now and then."""

    def __init__(self, steps: int) -> None:
        self.steps, self.start, self.shown = steps, monotonic(), 0.0

    def seconds(self) -> float:
        return monotonic() - self.start

    def __call__(self, summary: Summary) -> None:
        if self.seconds() < self.shown + SECONDS_A_LINE:
            return
        self.shown = self.seconds()
        done = f"{summary.executor}: {summary.steps} of {self.steps} steps, {len(summary.failures)} failed"
        print(f"{done}, {self.shown:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
