"""`pagedmla compile --executor cutlass`: what it leaves, and how a build that failed is told. Nothing is compiled here:
our own functions that call the compiler are replaced, so no DSL is needed and none is imitated."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pagedmla.cutlass_kernels import build as build_module
from pagedmla.cutlass_kernels import compile as compile_module
from pagedmla.cutlass_kernels import cubin_cache
from pagedmla.cutlass_kernels.build import BuildError, Built
from pagedmla.cutlass_kernels.compile import COMMAND, DIGEST, add_to_report, stale
from pagedmla.cutlass_kernels.cubin_cache import CubinCache, source_digest
from pagedmla.cutlass_kernels.variants import COMBINES, VARIANTS, CombineVariant, Variant
from pagedmla.plugin.cli import app

AnyVariant = Variant | CombineVariant
DECODE, MERGE = VARIANTS[0].name, COMBINES[0].name


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(
        app, ["compile", "--executor", "cutlass", *map(str, arguments)]
    )


def ptx_of(variant: AnyVariant) -> str:
    return f".visible .entry {variant.name}_0(\n)\n.reqntid {variant.threads}, 1, 1\n"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | Exception]:
    """What comes of a variant, by name: a reason, an error, or (where it isn't there) a build of the right form."""
    fates: dict[str, str | Exception] = {}

    def build(variants: Sequence[AnyVariant]) -> Iterator[tuple[AnyVariant, Built | str]]:
        for variant in variants:
            fate = fates.get(variant.name)
            if isinstance(fate, Exception):
                raise fate
            yield variant, fate or Built(ptx_of(variant), variant.name.encode())

    def row(variant: AnyVariant, built: Built) -> dict[str, Any]:
        """Of the form's own names, since there is no cubin to read figures from."""
        made = {**compile_module._refusal(variant, ""), "registers": len(built.cubin)}
        del made["refused"]
        return made

    monkeypatch.setattr(compile_module, "build", build)
    monkeypatch.setattr(compile_module, "_row", row)
    for module in (build_module, cubin_cache):
        monkeypatch.setattr(module, "dsl_version", lambda: "4.8.1")
    return fates


def test_each_kernel_leaves_ptx_cubin_and_a_row(builds: dict[str, str | Exception], tmp_path: Path) -> None:
    """`--out` left cubins alone: no PTX, and no table unless `--json` asked for one."""
    folder = tmp_path / "cubins"
    result = run("--only", DECODE, "--only", MERGE, "--out", folder)
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")
    stems = sorted({name.rpartition(".")[0] for name in names} - {"compile-cutlass"})
    assert [stem.rpartition(".")[0] for stem in stems] == sorted([DECODE, MERGE])
    assert names == sorted(["compile-cutlass.json", *(f"{s}.{end}" for s in stems for end in ("cubin", "json", "ptx"))])
    for variant in (VARIANTS[0], COMBINES[0]):
        (ptx,) = folder.glob(f"{variant.name}.*.ptx")
        assert ptx.read_text() == ptx_of(variant)
        found = CubinCache([folder]).find(variant.name)  # what lies beside them isn't in its way
        assert found is not None
        assert found.image == variant.name.encode() == ptx.with_suffix(".cubin").read_bytes()
    rows = json.loads((folder / "compile-cutlass.json").read_text())
    assert [row["options"]["variant"] for row in rows] == [DECODE, MERGE]
    assert {row[DIGEST] for row in rows} == {source_digest()}


def test_the_folders_table_tells_of_all_that_lies_there(builds: dict[str, str | Exception], tmp_path: Path) -> None:
    """Kernels that are built one at a time add up; those of other sources or another compiler don't, nor damage."""
    path = tmp_path / "compile-cutlass.json"
    assert run("--only", MERGE, "--out", tmp_path).exit_code == 0
    builds[DECODE] = "DSLError: no such instruction"
    assert run("--only", DECODE, "--out", tmp_path).exit_code == 1
    rows = json.loads(path.read_text())
    assert [(row["options"]["variant"], "refused" in row) for row in rows] == [(MERGE, False), (DECODE, True)]
    del builds[DECODE]
    assert run("--only", DECODE, "--out", tmp_path).exit_code == 0  # in place of the refusal
    rows = json.loads(path.read_text())
    assert [(row["options"]["variant"], "refused" in row) for row in rows] == [(MERGE, False), (DECODE, False)]
    for changed in ({DIGEST: "another"}, {"cutlass": "4.8.0"}):
        add_to_report([{**rows[1], **changed}], path)
        assert json.loads(path.read_text()) == [{**rows[1], **changed}]
        path.write_text(json.dumps(rows))
    for damage in ("{", "{}", "[1]", "3"):
        path.write_text(damage)
        add_to_report(rows, path)
        assert json.loads(path.read_text()) == rows


def test_a_table_is_a_row_a_line(builds: dict[str, str | Exception], tmp_path: Path) -> None:
    """The committed one is: two states of it can be compared line by line. `--json` wrote a line a figure."""
    table = tmp_path / "table.json"
    assert run("--only", MERGE, "--json", table).exit_code == 0
    lines = table.read_text().splitlines()
    rows = json.loads(table.read_text())
    assert len(lines) == len(rows) + 2
    assert rows[0][DIGEST] == source_digest()


def test_a_compiler_that_breaks_off_is_no_misuse(builds: dict[str, str | Exception], tmp_path: Path) -> None:
    """One that was killed for want of memory was "Usage: ... Invalid value", exit code 2. What was built is kept."""
    builds[MERGE] = BuildError("build: the compiler's process ended with -9: no message")
    table = tmp_path / "table.json"
    table.write_text("[]")
    result = run("--only", DECODE, "--only", MERGE, "--out", tmp_path / "cubins", "--json", table)
    assert result.exit_code == 1
    kept = f"What was built before is kept in {tmp_path / 'cubins'}"
    assert result.stderr == f"pagedmla: build: the compiler's process ended with -9: no message. {kept}\n"
    assert table.read_text() == "[]"
    assert CubinCache([tmp_path / "cubins"]).find(DECODE) is not None


def test_a_bug_is_told_as_a_bug(builds: dict[str, str | Exception]) -> None:
    """Any RuntimeError was wrong usage, without its trace: also those of our own protocol checks."""
    builds[MERGE] = RuntimeError("producer: expected wait; got arrive")
    result = run("--only", MERGE)
    assert isinstance(result.exception, RuntimeError)
    code = (
        "import sys; from pagedmla.plugin import cli, compile_report\n"
        "def broken(*_): raise RuntimeError('producer: expected wait; got arrive')\n"
        "compile_report.compile_cutlass = broken\n"
        "sys.argv = ['pagedmla', 'compile', '--executor', 'cutlass']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 70
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1] == "RuntimeError: producer: expected wait; got arrive"


def test_the_help_says_what_is_left() -> None:
    text = " ".join(CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["compile", "--help"]).output.split())
    for phrase in ("PTX", "compile-cutlass.json", "broke off"):
        assert phrase in text
    assert re.search(r"\.ptx", text)


# -- the committed table and the sources -------------------------------------------------------------------------------


def test_a_table_of_other_sources_names_the_command() -> None:
    """Kernels were changed and the table of what they cost wasn't: nothing compared the two."""
    mine, other = {DIGEST: source_digest()}, {DIGEST: "0" * 64}
    assert stale([mine, mine]) is None
    sentence = stale([mine, other, {}])
    assert sentence is not None
    assert "2 of 3 kernels were compiled from other sources" in sentence
    assert sentence.endswith(f"run `{COMMAND}`")
    assert stale([other]) is not None
    assert stale([{}, {}]) is None  # of before tables said so


def test_a_broken_build_leaves_the_table_of_what_was_built(builds: dict[str, str | Exception], tmp_path: Path) -> None:
    """The table was written after the last variant alone: a compiler that broke off left cubins without one."""
    builds[MERGE] = BuildError("build: the compiler's process ended with -9: no message")
    result = run("--only", DECODE, "--only", MERGE, "--out", tmp_path)
    assert result.exit_code == 1
    assert f"What was built before is kept in {tmp_path}" in result.output.replace("\n", "")
    rows = json.loads((tmp_path / "compile-cutlass.json").read_text())
    assert [row["options"]["variant"] for row in rows] == [DECODE]


def test_builds_into_one_folder_lose_no_row(builds: dict[str, str | Exception], tmp_path: Path) -> None:
    """Each read the table, added its rows and wrote it: of 20 at a time 5 were left."""
    rows = [{"options": {"variant": f"v{n}"}, DIGEST: "d", "cutlass": "4.8.1"} for n in range(20)]
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda row: add_to_report([row], tmp_path / "table.json"), rows))
    found = json.loads((tmp_path / "table.json").read_text())
    assert sorted(row["options"]["variant"] for row in found) == sorted(row["options"]["variant"] for row in rows)


def test_a_table_that_cannot_be_written_is_told_before_anything_is_built(
    builds: dict[str, str | Exception], tmp_path: Path
) -> None:
    """Minutes of building ended in "Is a directory"; `--json` with the table's own name left one run's rows there."""
    builds[DECODE] = AssertionError("nothing is to be built")
    taken = tmp_path / "taken"
    (taken / "compile-cutlass.json").mkdir(parents=True)
    result = run("--only", DECODE, "--out", taken)
    assert result.exit_code == 2
    assert "compile-cutlass.json" in result.output
    result = run("--only", DECODE, "--out", tmp_path, "--json", tmp_path / "compile-cutlass.json")
    assert result.exit_code == 2
    assert "another file than compile-cutlass.json" in result.output
