"""Running a trace: its statements one after the other in a namespace of their own, up to the first that fails."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, replace
from time import process_time

import torch
from fuzz import vocabulary
from fuzz.actions import ENVIRONMENT, Action, Setting, Statement
from fuzz.steps import Row, Step

Doing = Action | Step


@dataclass(frozen=True)
class Failure:
    """The statement that failed, and why."""

    statement: Statement
    error: Exception

    @property
    def kind(self) -> tuple[str, str, str]:
        """What must stay the same while a trace is made smaller: the exception, how it begins, and what was called."""
        begins = re.split(r"[\d\[(]", str(self.error), maxsplit=1)[0]
        return type(self.error).__name__, begins, self.statement.text.partition("(")[0]

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


class World:
    """The namespace that statements are run in; what they leave there (`pool`, `held`, ...) can be looked at.

    A context manager: it puts back the environment. Its setting's statements are the first to be played.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.names: dict[str, object] = {**vars(vocabulary), "os": os}
        self._environment = {name: os.environ.get(name) for name, _ in ENVIRONMENT.values()}

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    def __getitem__(self, name: str) -> object:
        return self.names[name]

    def play(self, statements: Iterable[Statement]) -> Failure | None:
        """Run them; the first failure ends it."""
        for statement in statements:
            try:
                self._run(statement)
            except Exception as error:
                return Failure(statement, error)
        return None

    def _run(self, statement: Statement) -> None:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")  # a DroppedStoreWarning is a token lost
            exec(compile(statement.text, "<fuzz>", "exec"), self.names)


@dataclass(frozen=True)
class Trace:
    """A setting and what happened in it. With `judging` False only the last action is judged."""

    setting: Setting
    actions: tuple[Doing, ...]
    judging: bool = True

    def statements(self) -> list[Statement]:
        """All of them, the setting's included."""
        done = self.setting.statements()
        for action in self.actions:
            last = action is self.actions[-1]
            done += [each for each in action.statements(self.setting) if self.judging or last or not each.judges]
        return done

    def fails(self) -> tuple[Failure, list[Statement]] | None:
        """The failure and the statements up to it."""
        statements = self.statements()
        with World(self.setting) as world:
            for at, statement in enumerate(statements):
                failure = world.play([statement])
                if failure is not None:
                    return failure, statements[: at + 1]
        return None


def shrink(trace: Trace, kind: tuple[str, str, str], seconds: float) -> Trace:
    """A smaller trace that fails in the same way: fewer actions, and each field nearer to its default.

    `seconds` of this process's time, not the clock's: on a busy machine it is made as small as elsewhere.
    """
    end = process_time() + seconds

    def still_fails(candidate: Trace) -> bool:
        if process_time() > end:
            return False
        found = candidate.fails()
        return found is not None and found[0].kind == kind

    if still_fails(replace(trace, judging=False)):
        trace = replace(trace, judging=False)
    before = None
    while before != trace and process_time() < end:
        before = trace
        trace = _with_fewer_actions(trace, still_fails)
        for at in reversed(range(len(trace.actions))):
            trace = _simplified(
                trace,
                trace.actions[at],
                lambda trace, action, at=at: replace(
                    trace, actions=(*trace.actions[:at], action, *trace.actions[at + 1 :])
                ),
                still_fails,
            )
        trace = _simplified(trace, trace.setting, lambda trace, setting: replace(trace, setting=setting), still_fails)
    return trace


def _with_fewer_actions(trace: Trace, still_fails: Callable[[Trace], bool]) -> Trace:
    """Half of them left out, a quarter, and so on to single ones, the latest first; the last action fails and stays."""
    size = len(trace.actions) // 2
    while size:
        at = len(trace.actions) - 1 - size
        while at >= 0:
            candidate = replace(trace, actions=trace.actions[:at] + trace.actions[at + size :])
            if still_fails(candidate):
                trace = candidate
            at -= size
        size //= 2
    return trace


def _simplified(
    trace: Trace,
    thing: Doing | Setting,
    put: Callable[[Trace, Doing | Setting], Trace],
    still_fails: Callable[[Trace], bool],
) -> Trace:
    """The trace with `thing` simplified, field by field; `put` gives it another one in its place."""
    for field in fields(thing):
        for value in _simpler_values(thing, field):
            simpler = replace(thing, **{field.name: value})
            candidate = put(trace, simpler)
            if still_fails(candidate):
                trace, thing = candidate, simpler
                break
    return trace


def _simpler_values(thing: Doing | Setting, field: Field[object]) -> Iterator[object]:
    """Its default; of rows one fewer, or one with fewer tokens."""
    value = getattr(thing, field.name)
    if field.name in ("rows", "spans"):
        for at in range(len(value)):
            yield value[:at] + value[at + 1 :]
        for at, row in enumerate(value):
            if isinstance(row, Row) and row.tokens > 1:
                for tokens in (1, row.tokens // 2):
                    yield (*value[:at], row._replace(tokens=tokens, kept=min(tokens, row.kept)), *value[at + 1 :])
    elif field.default is not MISSING and value != field.default and field.name not in ("executor", "num_pages"):
        yield field.default
