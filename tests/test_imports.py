"""Imports point one way, and light packages stay light.

Read from the source with `ast`, so a violation inside a function that no test calls is found too. Every source file is
one case; the broken snippets below prove that each rule can fail.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FACE = "pagedmla"

# Which of our packages each of them may import. FACE is pagedmla/ itself, the public API. bench and tests are in no
# list but bench's own; the command line may load bench when it is asked to.
KERNELS = {"triton_kernels", "cutlass_kernels"}
PLUGIN = {FACE, "adapters", "hardware", "kv_cache", "plugin", "reference"} | KERNELS
MAY_IMPORT = {
    "kv_cache": {"kv_cache"},
    "reference": {"reference", "kv_cache"},
    "hardware": {"hardware", "kv_cache"},
    "triton_kernels": {"triton_kernels", "hardware", "kv_cache"},
    "cutlass_kernels": {"cutlass_kernels", "hardware", "kv_cache"},
    "adapters": {"adapters", "kv_cache"},
    "plugin": PLUGIN,
    FACE: PLUGIN,
    "bench": PLUGIN | {"bench"},
}

COMMAND_LINE = "plugin/commands/bench.py"

# Other projects, beside the standard library: what runs on import, and what a function may load when it is called.
ON_IMPORT = {"kv_cache": {"torch"}, "reference": {"torch"}, FACE: {"torch"}}
WHEN_CALLED = {"kv_cache": {"torch", "numpy", "matplotlib", "rich"}, "reference": {"torch"}, FACE: {"torch"}}


@dataclass(frozen=True)
class Import:
    line: int
    module: str
    on_import: bool  # it runs when its module is imported, not when a function of it is called
    for_typing: bool  # under `if TYPE_CHECKING:`, which never runs


def imports_of(tree: ast.AST, on_import: bool = True, for_typing: bool = False) -> Iterator[Import]:
    """Every module that the source may load: statements, and importlib.import_module("...") with a literal name."""
    for node in ast.iter_child_nodes(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from pagedmla import kv_cache` names a subpackage; `from pagedmla import attend` goes through the face.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "pagedmla" else [module]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        else:
            names = []
        yield from (Import(line, name, on_import, for_typing) for name in names)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from imports_of(ast.Module(node.body, []), on_import, for_typing=True)
            yield from imports_of(ast.Module(node.orelse, []), on_import, for_typing)
            continue
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from imports_of(node, on_import and not is_function, for_typing)


def violations(source: str, package: str, path: str = "") -> list[str]:
    """What `source`, a module of `package` (a key of MAY_IMPORT), imports against the rules, a sentence each."""
    found = []
    for item in imports_of(ast.parse(source)):
        root, _, rest = item.module.partition(".")
        subpackage = rest.partition(".")[0]
        if not root:
            found.append(f"line {item.line}: {item.module} is relative; imports are absolute")
        elif root == "pagedmla":
            is_package = subpackage in MAY_IMPORT or (ROOT / subpackage).is_dir()
            target = subpackage if subpackage and is_package else FACE
            asked = target == "bench" and path == COMMAND_LINE and not item.on_import
            if target not in MAY_IMPORT[package] and not asked:
                found.append(f"line {item.line}: {package} may not import {item.module}")
        elif root in MAY_IMPORT or root in ("tests", "conftest"):
            found.append(f"line {item.line}: {root} is not a top-level module")
        elif package in ON_IMPORT and not item.for_typing and root not in sys.stdlib_module_names:
            if root not in WHEN_CALLED[package]:
                found.append(f"line {item.line}: {package} may not load {root}")
            elif item.on_import and root not in ON_IMPORT[package]:
                found.append(f"line {item.line}: {package} may load {root} inside a function only")
    return found


def source_files() -> list[Path]:
    """Every module of the package, in the folders that hold __init__.py."""
    folders = sorted(path.parent for path in ROOT.glob("*/__init__.py"))
    return [path.relative_to(ROOT) for folder in folders for path in sorted(folder.rglob("*.py"))]


@pytest.mark.parametrize("path", source_files(), ids=str)
def test_imports_point_one_way(path: Path) -> None:
    assert violations((ROOT / path).read_text(encoding="utf-8"), path.parts[0], path.as_posix()) == []


def test_every_package_has_its_rule() -> None:
    assert {path.parts[0] for path in source_files()} <= MAY_IMPORT.keys()


@pytest.mark.parametrize(
    ("package", "source", "sentence"),
    [
        ("kv_cache", "import pagedmla.reference", "line 1: kv_cache may not import pagedmla.reference"),
        ("kv_cache", "from pagedmla import reference", "line 1: kv_cache may not import pagedmla.reference"),
        ("kv_cache", "from pagedmla import attend", "line 1: kv_cache may not import pagedmla.attend"),
        ("kv_cache", "import pagedmla", "line 1: kv_cache may not import pagedmla"),
        ("kv_cache", "from . import tables", "line 1: . is relative; imports are absolute"),
        ("kv_cache", "import numpy", "line 1: kv_cache may load numpy inside a function only"),
        ("kv_cache", "try:\n    import rich\nexcept ImportError:\n    rich = None",
         "line 2: kv_cache may load rich inside a function only"),
        ("kv_cache", "class Page:\n    import matplotlib.pyplot as plt",
         "line 2: kv_cache may load matplotlib inside a function only"),
        ("kv_cache", "def f():\n    import triton", "line 2: kv_cache may not load triton"),
        ("reference", "from pagedmla.triton_kernels.merge import merge",
         "line 1: reference may not import pagedmla.triton_kernels.merge"),
        ("reference", "def f():\n    import numpy", "line 2: reference may not load numpy"),
        ("triton_kernels", "def f():\n    from pagedmla.plugin import ops",
         "line 2: triton_kernels may not import pagedmla.plugin"),
        ("triton_kernels", "import importlib\nimportlib.import_module('pagedmla.reference')",
         "line 2: triton_kernels may not import pagedmla.reference"),
        ("triton_kernels", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pagedmla.cutlass_kernels",
         "line 3: triton_kernels may not import pagedmla.cutlass_kernels"),
        ("adapters", "import pagedmla.triton_kernels", "line 1: adapters may not import pagedmla.triton_kernels"),
        ("plugin", "import pagedmla.bench", "line 1: plugin may not import pagedmla.bench"),
        ("plugin", "import pagedmla.tests.oracle", "line 1: plugin may not import pagedmla.tests.oracle"),
        ("plugin", "import kv_cache", "line 1: kv_cache is not a top-level module"),
        ("bench", "import tests.oracle", "line 1: tests is not a top-level module"),
        (FACE, "import pagedmla.bench", "line 1: pagedmla may not import pagedmla.bench"),
        (FACE, "import triton", "line 1: pagedmla may not load triton"),
    ],
)  # fmt: skip
def test_a_broken_import_is_found(package: str, source: str, sentence: str) -> None:
    assert violations(source, package) == [sentence]


def test_the_command_line_loads_bench_only_when_asked() -> None:
    inside = "def bench():\n    import pagedmla.bench"
    assert violations(inside, "plugin", COMMAND_LINE) == []
    assert violations(inside, "plugin", "plugin/plan.py") == ["line 2: plugin may not import pagedmla.bench"]
    assert violations("import pagedmla.bench", "plugin", COMMAND_LINE) == [
        "line 1: plugin may not import pagedmla.bench"
    ]


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("kv_cache", "import os.path\nimport torch\nfrom pagedmla.kv_cache.tables import as_index"),
        ("kv_cache", "def draw():\n    import matplotlib.pyplot as plt\n    import rich"),
        ("kv_cache", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rich.table import Table"),
        ("reference", "from pagedmla.kv_cache import layouts"),
        ("triton_kernels", "import triton\nfrom pagedmla.kv_cache.layouts import RowPlanes"),
        ("adapters", "def values():\n    import vllm"),
        ("plugin", "import typer\nfrom pagedmla import __version__\nimport pagedmla.cutlass_kernels"),
        ("bench", "import pagedmla\nimport pagedmla.bench"),
        (FACE, "from pagedmla.plugin.dispatch import attend"),
    ],
)
def test_a_right_import_passes(package: str, source: str) -> None:
    assert violations(source, package) == []
