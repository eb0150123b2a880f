"""What the pages under docs/ tell a reader must hold: links lead somewhere, examples run, and so do commands.

Commands that need what isn't here (a model, an engine, the CUTLASS DSL, a server that stays) are named below, each with
what tests it instead.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
COMMAND = "from pagedmla.plugin.cli import main; main()"
ELSEWHERE = {
    "pagedmla compile --executor cutlass --out build/cubins": "tests/cutlass_kernels builds every variant",
}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{ids(page)} links to {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{ids(page)} links to {target}"


WHOLE = [
    (page, number)
    for page in PAGES[1:]
    for number, example in enumerate(blocks(page, "python"))
    if re.search("^import ", example, re.MULTILINE)  # the others are lines of a program, or another environment's
]
assert WHOLE  # an example that begins otherwise would go unnoticed


@pytest.mark.parametrize(("page", "number"), WHOLE, ids=lambda each: ids(each) if isinstance(each, Path) else str(each))
def test_examples(page: Path, number: int, tmp_path: Path) -> None:
    done = run(["-c", blocks(page, "python")[number]], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=ids)
def test_commands(page: Path, tmp_path: Path) -> None:
    """README's are run by test_readme.py."""
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            command = line.split("  #")[0].strip()
            if not command.startswith("pagedmla ") or command in ELSEWHERE:
                continue
            done = run(["-c", COMMAND, *shlex.split(command)[1:]], tmp_path)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_names_that_pages_use_are_there() -> None:
    """`pagedmla.plan`, `pagedmla.bench.hopper`: each is an attribute or a module."""
    names = sorted({name.rstrip(".") for page in PAGES for name in re.findall(r"\bpagedmla(?:\.\w+)+", text(page))})
    assert len(names) > 10
    code = (
        "import pkgutil\n"
        f"for name in {names}:\n"
        "    pkgutil.resolve_name(name)  # ImportError or AttributeError names it\n"
    )
    done = run(["-c", code], ROOT)
    assert done.returncode == 0, done.stderr


def test_settings_are_all_told_and_all_there() -> None:
    """A variable that no page has can't be found by who needs it; one that no module reads does nothing."""
    sources = [path for top in ROOT.glob("*/__init__.py") for path in top.parent.rglob("*.py")]
    pattern = r"\bPAGEDMLA_[A-Z_]+\b"
    read = {name for path in sources for name in re.findall(pattern, text(path))}
    told = {name for page in PAGES for name in re.findall(pattern, text(page))}
    assert read == told
