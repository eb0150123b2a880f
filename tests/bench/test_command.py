"""`pagedmla bench`: its table, its files, its exit code. Cases are tiny, clocks short; nothing here judges a time."""

from __future__ import annotations

import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from pagedmla.bench import command, growth, hopper, host_cost, memory, pictures, table
from pagedmla.bench import run as run_module
from pagedmla.bench.cases import FLAGSHIP, Case
from pagedmla.bench.command import Axes, bench
from pagedmla.bench.rows import Row, make_row
from pagedmla.bench.run import Bench
from pagedmla.hardware.cost import Roof, StepCost
from pagedmla.plugin.cli import app

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CPU = torch.device("cpu")
ROOF = Roof("this CPU", 0.01, 0.1, 0.1)
PARTS = {"plan", "prepare", "allocator", "adapter", "launcher", "launcher, cut"}
TINY = Axes([FLAGSHIP, "bf16"], heads=[2], batches=[2], kv_lens=[5, 70])


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedmla.bench.clocks._SECONDS", 0.0)
    monkeypatch.setattr("pagedmla.bench.run.roof_of", lambda device: ROOF)
    monkeypatch.setattr(command, "quick_cases", lambda: [Case(FLAGSHIP, 2, 1, 5)])


def wide() -> Console:
    return Console(file=io.StringIO(), width=160)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_the_report_the_table_and_the_pictures(tmp_path: Path) -> None:
    console, path = wide(), tmp_path / "deep" / "bench.json"
    assert bench(TINY, quick=True, json_file=path, pictures=tmp_path, device=CPU, console=console)
    report = json.loads(path.read_text())
    assert {"about", "rows", "kernels", "host", "absent", "losing", "wrong", "unmeasured", "left_out"} == report.keys()
    assert report["about"]["roof"] == {"gb_per_s": 10.0, "tflop_per_s": 0.1, "fp8_tflop_per_s": 0.1}
    assert report["about"]["versions"]["torch"] == torch.__version__
    assert {row["source"] for row in report["rows"]} == {"measured", "model"}
    measured = [row for row in report["rows"] if row["source"] == "measured"]
    assert {(row["layout"], row["kv_len"]) for row in measured} == {
        (layout, kv_len) for layout in (FLAGSHIP, "bf16") for kv_len in (5, 70)
    }
    assert all(row["correct"] for row in measured)
    assert {row["device"] for row in measured} == {"CPU"}
    assert {row["device"] for row in report["rows"] if row["source"] == "model"} == {"H200", "H100 SXM"}
    assert report["wrong"] == report["unmeasured"] == []
    assert {cost["what"] for cost in report["host"]} >= PARTS | {"launch"}
    text = printed(console)
    for phrase in (
        "decode, one layer, measured on CPU",
        "a model of H200 and H100 SXM: nothing was run",
        "compiled kernels on H200 (model)",
        "host time of a step's parts (measured)",
        "floor: 10 GB/s and 0.1 TFLOP/s (FP8 0.1) of this CPU as this run measured them",
        "bf16 H=2 2 x 70",
    ):
        assert phrase in text
    for sentence in report["losing"] or ["pagedmla loses no case here to a peer"]:
        assert sentence in text
    assert [each.name for each in tmp_path.glob("**/*.png")] == ["bench.png"]
    assert (tmp_path / "bench.png").stat().st_size > 30_000


def test_time_that_ran_out_is_told() -> None:
    """No case is begun after it, none is left out silently, and the first one always runs."""
    console = wide()
    made = Bench(CPU, console, seconds=0.0)
    made.measure([Case("bf16", 1, 1, 5), Case("bf16", 1, 1, 6), Case("bf16", 1, 1, 7)])
    assert {row.kv_len for row in made.rows} == {5}
    assert made.report()["unmeasured"] == ["bf16, 1 heads, 1 x 6 keys", "bf16, 1 heads, 1 x 7 keys"]
    assert (
        "2 cases were left out after 0 s; --seconds gives more time: bf16, 1 heads, 1 x 6 keys "
        "bf16, 1 heads, 1 x 7 keys"
    ) in printed(console)
    many = Bench(CPU, console, seconds=0.0)
    many.measure([Case("bf16", 1, 1, kv_len) for kv_len in range(5, 30)])
    assert "1 x 25 keys and 4 more: `unmeasured` in the JSON names all" in printed(console)


def test_a_wrong_executor_is_told_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(self, step, q, out, lse, options) -> None:
        out.zero_()

    monkeypatch.setattr("pagedmla.plugin.executor_torch.TorchExecutor.attend", attend)
    console = wide()
    assert not bench(Axes(heads=[2], kv_lens=[5]), quick=True, executors=["torch"], device=CPU, console=console)
    assert "WRONG" in printed(console)
    assert "pagedmla torch is wrong: relative L2 1.0e+00" in printed(console)


def test_a_table_of_other_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's figures are those of the committed compile table, whatever the sources have become since."""
    monkeypatch.setattr(run_module, "stale", lambda rows: f"of {rows[0]['executor']}: run `this`")
    console = wide()
    Bench(CPU, console).model(None, [Case(FLAGSHIP, 16, 1, 64)])
    assert "of cutlass: run `this`" in printed(console)
    monkeypatch.setattr(run_module, "stale", lambda rows: None)
    console = wide()
    Bench(CPU, console).model(None, [Case(FLAGSHIP, 16, 1, 64)])
    assert "run `" not in printed(console)


def test_growth_has_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = [
        growth.Growth("attention", 1, "times", 2.0, 1.0, True),
        growth.Growth("attention", 10, "times", 3.0, 1.5, False),
    ]
    monkeypatch.setattr(growth, "growth", lambda requests, contexts: iter(grown))
    console = wide()
    made = Bench(CPU, console)
    made.growth()
    assert [row["ratio"] for row in made.report()["growth"]] == [1.0, 1.5]
    assert {row["executor"] for row in made.report()["balance"]} == {"cutlass", "triton"}
    assert "how cost grows (measured)" in printed(console)
    assert "balance of the schedules on ragged batches (model)" in printed(console)


def test_a_terminal_of_80_columns_keeps_who_was_right_and_how_fast() -> None:
    console = Console(file=io.StringIO(), width=80)
    cost = StepCost(1000, 1000)
    row = make_row(
        Case(FLAGSHIP, 16, 128, 131072), cost, 1234567.8, source="measured", device="CPU", contender="pagedmla torch",
        ours=True, reads=FLAGSHIP, roof=ROOF, fp8_mma=True, relative_l2=1e-3, tolerance=4e-3,
    )  # fmt: skip
    console.print(table.case_table([row], "measured", console.width))
    for phrase in ("pagedmla torch", "yes", "1.0e-03", "1,234,567.8"):
        assert phrase in printed(console)


def test_pictures_refuse_to_mix(tmp_path: Path) -> None:
    cost = StepCost(1000, 1000)
    rows = [
        make_row(Case(FLAGSHIP, 16, 1, 64), cost, 1.0, source=source, device=device, contender="a", ours=False,
                 reads="bf16", roof=ROOF, fp8_mma=True)
        for source, device in (("measured", "CPU"), ("model", "H200"))
    ]  # fmt: skip
    path = tmp_path / "deep" / "bench.png"
    with pytest.raises(ValueError, match="measured and model"):
        pictures.draw(rows, ROOF, "title", path)
    with pytest.raises(ValueError, match="got none"):
        pictures.draw([], ROOF, "title", path)
    assert not path.parent.exists()
    assert pictures.draw(rows[1:], None, "title", path) == path


def drawn(rows: list[Row], roof: Roof | None, path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(pictures, "write_picture", lambda figure, *rest: figures.append(figure))
    pictures.draw(rows, roof, "title", path)
    (figure,) = figures
    return figure


def test_one_picture_has_every_panel_and_one_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make gpu` left three pictures, in which a contender had another colour in each panel that lacked some other."""
    pytest.importorskip("matplotlib", reason="pip install pagedmla[plots]")
    rows = [
        make_row(Case(layout, heads, 1, 64), StepCost(10**6, 10**8), 9.0, source="measured", device="CPU",
                 contender=contender, ours=contender == "ours", reads="bf16", roof=ROOF, fp8_mma=False)
        for layout, heads, contender in (("bf16", 16, "ours"), ("bf16", 16, "a"), ("bf16", 16, "b"), (FLAGSHIP, 2, "b"))
    ]  # fmt: skip
    rows[0] = replace(rows[0], best_peer="a", speedup=0.5)
    figure = drawn(rows, ROOF, tmp_path / "bench.png", monkeypatch)
    panels = [axis for axis in figure.axes if axis.axison]
    keys = "keys of all requests"
    assert [axis.get_xlabel() for axis in panels] == ["FLOPs a byte", "GFLOP of the step", keys, keys]
    assert [axis.get_title() for axis in panels[2:]] == ["bf16, 16 heads", f"{FLAGSHIP}, 2 heads"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["roof", "ours", "a", "b", "loses to a peer"]
    lines = [line for axis in panels for line in axis.lines]
    assert len({line.get_color() for line in lines if line.get_label() == "b"}) == 1
    rings = [line.get_xydata().tolist() for line in lines if line.get_label() == "loses to a peer"]
    assert len(rings) == 3  # in the roofline, the floors, and its own context; none where nobody loses
    assert rings[2] == [[64.0, 9.0]]
    figure = drawn(rows, None, tmp_path / "bench.png", monkeypatch)  # no roof, so no share of a floor either
    assert [axis.get_xlabel() for axis in figure.axes if axis.axison] == [keys, keys]


TOO_LONG = 2**31 - 1
MEMORY = f"{FLAGSHIP}, 2 heads, 1 x {TOO_LONG} keys left out: needs about"


def test_a_case_too_large_for_memory_is_left_out() -> None:
    """`--kv-len 64 --kv-len 99999999999` ended in a traceback and 9999999 keys killed the process: cases were built
    whatever their size."""
    console = wide()
    made = Bench(CPU, console)
    made.measure(
        [Case(FLAGSHIP, 2, 1, TOO_LONG), Case(FLAGSHIP, 2, TOO_LONG, 1, 1, "imbalanced"), Case("bf16", 2, 1, 5)]
    )
    assert {row.kv_len for row in made.rows} == {5}
    assert list(made.report()["left_out"]) == [
        f"{FLAGSHIP}, 2 heads, 1 x {TOO_LONG} keys",
        f"{FLAGSHIP}, 2 heads, {TOO_LONG} x 1 keys, imbalanced",
    ]
    assert MEMORY in printed(console)
    assert "no executor of ours" not in printed(console)


@pytest.mark.parametrize("error", [MemoryError("none"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out_ends_one_case(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate can be too small: what torch then raises left nothing of the other cases either."""
    real = run_module.measure

    def measure(case: Case, *rest: Any) -> Any:
        if case.kv_len == 6:
            raise error
        return real(case, *rest)

    monkeypatch.setattr(run_module, "measure", measure)
    made = Bench(CPU, wide())
    made.measure([Case("bf16", 1, 1, kv_len) for kv_len in (5, 6, 7)])
    assert {row.kv_len for row in made.rows} == {5, 7}
    assert made.left_out == {"bf16, 1 heads, 1 x 6 keys": f"memory ran out: {error}"}


@pytest.mark.parametrize("late", ["measure", "model"])
def test_a_late_fault_leaves_what_was_found(late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the last case took the table and the JSON of all before it: both came at the end only."""
    real = run_module.measure

    def measure(case: Case, *rest: Any) -> Any:
        if late == "measure" and case.kv_len == 6:
            raise RuntimeError("a fault")
        return real(case, *rest)

    def model(*rest: Any, **options: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(run_module, "measure", measure)
    monkeypatch.setattr(Bench, "model", model)
    console, path = wide(), tmp_path / "bench.json"
    with pytest.raises(RuntimeError, match="a fault"):
        bench(Axes(["bf16"], [1], [1], [5, 6]), quick=True, json_file=path, device=CPU, console=console)
    found = {5} if late == "measure" else {5, 6}
    assert {row["kv_len"] for row in json.loads(path.read_text())["rows"]} == found
    assert "bf16 H=1 1 x 5" in printed(console)


def test_the_json_is_there_after_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed writes nothing more: what it had measured must be in the file by then."""
    path, held = tmp_path / "bench.json", []
    real = run_module.measure

    def measure(case: Case, *rest: Any) -> Any:
        held.append(len(json.loads(path.read_text())["rows"]) if path.exists() else None)
        return real(case, *rest)

    monkeypatch.setattr(run_module, "measure", measure)
    bench(Axes(["bf16"], [1], [1], [5, 6, 7]), quick=True, json_file=path, device=CPU, console=wide())
    assert held == [None, 4, 8]


def test_memory_is_estimated_from_numbers() -> None:
    """Measured once: peaks of 940 MB for 65,536 keys, 1.9 GB for 16 x 8,192, 1 GB with 4 query tokens."""
    for case, peak in (
        (Case("bf16", 16, 1, 65536), 930e6),
        (Case(FLAGSHIP, 128, 1, 65536), 986e6),
        (Case(FLAGSHIP, 16, 16, 8192), 2.0e9),
        (Case("fp8_ds_mla", 16, 1, 65536, 4), 1.08e9),
    ):
        assert 1 <= memory.needed_bytes(case, CPU) / peak < 1.6
        assert memory.needed_bytes(case, torch.device("cuda")) < 1e7
    assert memory.free_bytes() > 0


def test_a_containers_limit_is_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's free memory doesn't help a process whose container has less; cached files are given back."""
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(memory, "_CGROUPS", [(limit, used)])
    machine = memory.free_bytes()
    limit.write_text("max\n")
    used.write_text("700\n")
    assert memory.free_bytes() == pytest.approx(machine, rel=0.2)
    limit.write_text("1000\n")
    assert memory.free_bytes() == 300
    (tmp_path / "memory.stat").write_text("active_file 5\ninactive_file 60\n")
    assert memory.free_bytes() == 360
    assert (memory.refusal(Case("bf16", 1, 1, 5), CPU) or "").endswith("0.0 GB are free")


# -- the command line --------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"TERM": "dumb", "COLUMNS": "100"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU bench measures that")
def test_the_command(tmp_path: Path) -> None:
    result = run(
        "--quick", "--heads", 2, "--kv-len", 5, "--q-len", 2, "--imbalanced", "--json", tmp_path / "bench.json"
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {(row["heads"], row["kv_len"], row["q_len"], row["lengths"]) for row in rows} == {(2, 5, 2, "imbalanced")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU --full is what it takes")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layout", "fp9"], "fp9"),
        (["--quick", "--full"], "--quick and --full: expected one of them"),
        (["--full"], "--full: expected a GPU"),
        (["--executor", "fast"], "--executor: expected one of cutlass, triton, torch"),
        (["--q-len", 5, "--kv-len", 3], "kv_len: expected at least the 5 query tokens; got 3"),
    ],
)
def test_wrong_usage_is_a_sentence(arguments: list[object], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert sentence in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU cutlass and triton have other reasons")
@pytest.mark.parametrize(("executor", "heads"), [("cutlass", 16), ("triton", 300)])
def test_no_win_where_nothing_of_ours_ran(executor: str, heads: int) -> None:
    """`--executor cutlass` on a CPU said "pagedmla loses no case here to a peer", exit code 0: only dense rows had
    been measured."""
    result = run("--quick", "--executor", executor, "--heads", heads, "--batch", 1, "--kv-len", 5)
    output = " ".join(result.output.split())
    assert result.exit_code == 1, output
    assert "no executor of ours ran" in output
    assert f"pagedmla {executor} left out: " in output
    assert "loses no case" not in output


def test_no_win_without_a_peer() -> None:
    """The float64 oracle stands in no race, so alone it can't win one."""
    console = wide()
    made = Bench(CPU, console, executors=("reference",))
    made.measure([Case("bf16", 1, 1, 5)])
    assert "no executor of ours stood beside a peer that was right: nothing is compared" in printed(console)
    assert "loses no case" not in printed(console)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU bench measures that")
@pytest.mark.parametrize(
    ("option", "name", "refused"),
    [("--json", "file/bench.json", "file"), ("--pictures", "file/folder", "file/folder")],
)
def test_files_are_tried_before_anything_is_measured(
    option: str, name: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that can't be written was a clean sentence, after the whole run had been measured and was lost."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(Bench, "measure", lambda *rest, **options: pytest.fail("measured"))
    result = run("--quick", option, tmp_path / name)
    assert result.exit_code == 2, result.output
    output = "".join(result.output.replace("│", " ").split())  # a frame cuts paths
    assert f"Invalidvalue:{tmp_path / refused}:expectedafolderthatfilescanbemadein" in output


def test_a_report_is_whole_or_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written again after every case: a run that was killed just then left half a report over a good one."""
    path = tmp_path / "bench.json"
    run_module.write_report({"rows": [1]}, path)
    monkeypatch.setattr("pagedmla.kv_cache.files.os.replace", lambda *paths: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        run_module.write_report({"rows": [1, 2]}, path)
    assert json.loads(path.read_text()) == {"rows": [1]}
    assert [each.name for each in tmp_path.iterdir()] == ["bench.json"]


def test_pictures_without_matplotlib_are_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing extra was named after the run that should have been drawn."""
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    monkeypatch.setattr(Bench, "measure", lambda *rest, **options: pytest.fail("measured"))
    with pytest.raises(ImportError, match="pip install pagedmla"):
        bench(TINY, pictures=tmp_path, device=CPU, console=wide())


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU bench measures that")
def test_where_nothing_fits_nothing_is_drawn(tmp_path: Path) -> None:
    """No row at all is told, in the JSON too, and isn't a success."""
    path = tmp_path / "bench.json"
    result = run("--quick", "--heads", 2, "--batch", 1, "--kv-len", TOO_LONG, "--json", path, "--pictures", tmp_path)
    output = " ".join(result.output.split())
    assert result.exit_code == 1, output
    assert MEMORY in output
    assert "no pictures: nothing was measured" in output
    assert len(json.loads(path.read_text())["left_out"]) == 1


def test_a_log_gets_a_line_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    """With stderr in a file a run of 50 s printed nothing: the progress bar is drawn on terminals alone."""
    Bench(CPU, wide()).measure([Case("bf16", 1, 1, 5), Case("bf16", 1, 1, 6)])
    assert capsys.readouterr().err.splitlines() == [
        "1 of 2: bf16, 1 heads, 1 x 5 keys",
        "2 of 2: bf16, 1 heads, 1 x 6 keys",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is modelled")
def test_without_a_compile_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedmla.bench.model.TRITON_TABLE", tmp_path / "compile-triton.json")
    monkeypatch.setattr(Bench, "measure", lambda *rest, **options: pytest.fail("measured"))  # known beforehand
    result = run("--quick")
    assert result.exit_code == 2
    assert "`pagedmla compile --json" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page's commands are written for a CPU")
def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/benchmark.md, in its order; the quick cases are tinier here."""
    page = (Path(__file__).parents[2] / "docs" / "benchmark.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert [line[:2] for line in lines] == [["pagedmla", "bench"]] * 3
    monkeypatch.chdir(tmp_path)
    for line in lines:
        result = run(*line[2:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
    assert json.loads((tmp_path / "build" / "bench.json").read_text())["rows"]
    assert [path.name for path in (tmp_path / "build" / "bench").iterdir()] == ["bench.png"]


def test_what_make_gpu_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One JSON, there after every case, so that a card that hangs keeps what came before; and one picture."""
    path = tmp_path / "gpu-cpu.json"
    held = []
    real = Bench.report

    def report(self: Bench) -> dict[str, Any]:
        made = real(self)
        held.append(len(made["rows"]))
        return made

    monkeypatch.setattr(Bench, "report", report)
    cases = [Case("bf16", 1, 1, 5), Case("bf16", 1, 1, 6)]
    assert hopper.run(CPU, cases, tmp_path) == path
    assert held == [4, 8, 8]
    assert len(json.loads(path.read_text())["rows"]) == 8
    assert sorted(each.name for each in tmp_path.iterdir()) == ["gpu-cpu.json", "gpu-cpu.png"]
    refused = tmp_path / "refused"
    assert json.loads(hopper.run(CPU, [Case(FLAGSHIP, 2, 1, TOO_LONG)], refused).read_text())["rows"] == []
    assert [each.name for each in refused.iterdir()] == ["gpu-cpu.json"]  # nothing to draw
    if not torch.cuda.is_available():
        monkeypatch.setattr("sys.argv", ["hopper", "--out", str(tmp_path)])
        with pytest.raises(SystemExit, match="2"):
            hopper.main()
        assert "no CUDA device to measure on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("card", "name"),
    [("NVIDIA H200", "gpu-h200"), ("NVIDIA H100 80GB HBM3", "gpu-h100-80gb-hbm3"), ("CPU", "gpu-cpu")],
)
def test_a_record_is_named_after_its_card(card: str, name: str) -> None:
    """An H100's was gpu-hbm3.json: the last word of "NVIDIA H100 80GB HBM3"."""
    assert hopper.record_name(card) == name


def test_drawing_leaves_the_callers_matplotlib_alone(tmp_path: Path) -> None:
    """A notebook that drew a bench got no pictures of its own any more: the backend had become "Agg"."""
    matplotlib = pytest.importorskip("matplotlib", reason="pip install pagedmla[plots]")
    row = make_row(
        Case(FLAGSHIP, 16, 1, 64), StepCost(10**4, 10**5), 9.0, source="model", device="H200", contender="a", ours=True,
        reads="bf16", roof=ROOF, fp8_mma=False,
    )  # fmt: skip
    before = matplotlib.get_backend()
    other = next(name for name in ("svg", "pdf") if name != before)
    matplotlib.use(other)
    try:
        assert pictures.draw([row], ROOF, "title", tmp_path / "bench.png").exists()
        assert matplotlib.get_backend() == other
    finally:
        matplotlib.use(before)


def test_hosts_that_have_no_triton_have_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "find_spec", lambda name: None)
    assert {cost.what for cost in host_cost.measure((1,), 64, 0.0)} == PARTS


@pytest.mark.parametrize(("pieces", "launches"), [(1, 1), (host_cost.PIECES, 2)])
def test_the_launcher_goes_all_the_way_to_the_driver(pieces: int, launches: int) -> None:
    """A cut step is two launches, the merge behind its own; each call makes them anew."""
    behind = host_cost._NothingBehind()
    call = host_cost.launcher_call(3, 4096, pieces, behind)
    for calls in (1, 2):
        call()
        assert behind.launches == calls * launches
