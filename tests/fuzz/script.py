"""A failure as a script of its own: it needs torch and pagedmla, and nothing of these tests."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from cases import bounds
from fuzz import vocabulary
from fuzz.actions import Statement

SOURCES: tuple[ModuleType, ...] = (bounds, vocabulary)
IMPORTS = """\
from __future__ import annotations

import math
import os
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import pagedmla

warnings.simplefilter("error")
"""


def write_script(path: Path, statements: Sequence[Statement], failure: str, story: str) -> None:
    """`statements`, the last of which fails, below the source of all that they call."""
    text = "\n".join(statement.text for statement in statements)
    called = definitions(text)
    quoted = failure.replace("\\", "\\\\").replace('"""', "'''")
    parts = [f'"""{story}\n\n{quoted}\n"""', "", IMPORTS, *called, "", "# What happened.", "", text, ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts), encoding="utf-8")


def definitions(text: str) -> list[str]:
    """The source of every function and constant that `text` names, and that those name, in the order of the modules."""
    known: dict[str, tuple[int, ast.stmt, str]] = {}
    for module in SOURCES:
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            for name in _defines(node):
                known[name] = (len(known), node, source)
    wanted, found = _names(ast.parse(text)), set()
    while wanted:
        name = wanted.pop()
        if name in known and name not in found and not hasattr(builtins, name):
            found.add(name)
            wanted |= _names(known[name][1])
    chosen = {id(node): (place, node, source) for place, node, source in (known[name] for name in found)}
    parts = []
    for _, node, source in sorted(chosen.values(), key=lambda each: each[0]):
        function = isinstance(node, ast.FunctionDef)
        parts.append(
            ("\n\n" if function else "") + str(ast.get_source_segment(source, node)) + ("\n" if function else "")
        )
    return parts


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if not isinstance(node, ast.Assign):
        return []
    return [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
