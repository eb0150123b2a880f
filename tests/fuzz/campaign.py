"""So many random steps through one executor: episodes of a pool each, a script for each failure, and a summary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from time import process_time
from typing import cast

from fuzz.draw import LIMITS, Life, draw_setting
from fuzz.play import Failure, Trace, World, shrink
from fuzz.script import write_script
from fuzz.steps import Step

SCRIPTS = Path(__file__).parents[2] / "build" / "fuzz"
SHRINKING = 20.0  # seconds a failure


@dataclass
class Summary:
    """What was run, and what came of it. `worst` holds shares of what is allowed, of lse and of out, by layout."""

    executor: str
    steps: int = 0
    pools: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    worst: dict[str, tuple[float, float]] = field(default_factory=lambda: defaultdict(lambda: (0.0, 0.0)))
    failures: list[tuple[Path, Failure]] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.actions.most_common())
        lines = [f"{self.executor}: {self.steps} steps in {self.pools} pools: {kinds}"]
        lines.append("  worst error, as a share of what is allowed (of lse, of out):")
        lines += [f"    {layout:28} {lse:.2f}  {out:.2f}" for layout, (lse, out) in sorted(self.worst.items())]
        lines += [f"  FAILED {path}\n    {failure}" for path, failure in self.failures]
        return "\n".join(lines)


def run(
    executor: str,
    steps: int,
    seed: int,
    *,
    scripts: Path = SCRIPTS,
    most_failures: int = 1,
    seconds: float = SHRINKING,
    progress: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """`steps` random actions through `executor`, the same ones for the same seed; ends early after `most_failures`.

    ValueError where either is less than 1: a campaign that runs nothing finds nothing.
    """
    for name, number in (("steps", steps), ("most_failures", most_failures)):
        if number < 1:
            raise ValueError(f"{name}: expected at least 1; got {number}")
    summary = Summary(executor)
    while summary.steps < steps and len(summary.failures) < most_failures:
        draw = Random(f"{seed} {executor} {summary.pools}")
        trace, failure = _episode(draw, executor, min(LIMITS[executor].actions, steps - summary.steps), summary)
        if failure is not None:
            # Pools that can't be made come to no step: their numbers keep their scripts apart.
            kind, number = ("step", summary.steps) if trace.actions else ("pool", summary.pools)
            path = scripts / f"{executor}-seed{seed}-{kind}{number}.py"
            title = f"pagedmla against float64: {kind} {number} of seed {seed}, executor {executor}."
            summary.failures.append((path, explain(trace, failure, path, title, seconds)))
        progress(summary)
    return summary


def _episode(draw: Random, executor: str, actions: int, summary: Summary) -> tuple[Trace, Failure | None]:
    """A new pool's life, from its making to its end or to its first failure."""
    trace = Trace(draw_setting(draw, executor), ())
    summary.pools += 1
    with World(trace.setting) as world:
        failure = world.play(trace.setting.statements())
        if failure is not None:
            return trace, failure
        life = Life.begin(draw, world)
        for _ in range(actions):
            action = life.next()
            trace = replace(trace, actions=(*trace.actions, action))
            summary.steps += 1
            summary.actions[type(action).__name__] += 1
            failure = world.play(action.statements(trace.setting))
            if failure is not None:
                return trace, failure
            if isinstance(action, Step):
                error, worst = cast(tuple[float, float], world["error"]), summary.worst[trace.setting.title]
                summary.worst[trace.setting.title] = max(worst[0], error[0]), max(worst[1], error[1])
    return trace, None


def explain(trace: Trace, failure: Failure, path: Path, title: str, seconds: float) -> Failure:
    """Write the smallest script that fails as this trace did; returns its failure."""
    start = process_time()
    smaller = shrink(trace, failure.kind, seconds)
    found = smaller.fails()
    failure, statements = (failure, smaller.statements()) if found is None else found
    story = (
        f"Made smaller from {len(trace.actions)} actions to {len(smaller.actions)} in {process_time() - start:.0f} s."
    )
    if found is None:
        story += "\nIt did not fail again when it was replayed."
    write_script(path, statements, str(failure), f"{title}\n\n{story}")
    return failure
