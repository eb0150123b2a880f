"""The command line as people type it: exit code 0 for sound, 1 for something wrong, 2 for wrong usage, and others for
what says nothing of a cache."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TextIO

import pytest
import torch
from typer.testing import CliRunner, Result

import pagedmla
from pagedmla import store
from pagedmla.kv_cache.page_pool import PagePool
from pagedmla.kv_cache.saving import save_cache
from pagedmla.plugin.cli import app, main

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, [str(a) for a in arguments])


def words(result: Result) -> str:
    """All of the output in one line, without the frames that help and errors are drawn in."""
    text = result.output + (result.stderr if result.stderr_bytes else "")
    return " ".join(text.translate(str.maketrans("│╭╮╰╯─", "      ")).split())


def save(path: Path, break_scales: bool = False) -> Path:
    """Two requests in scrambled pages, two layers; broken: the scales of the first page of `ada` in layer 1 are 0."""
    pool = PagePool("fp8_rope_bf16", num_layers=2, page_size=4, num_pages=8, num_scale_pages=12, shuffle_seed=2)
    for name in ("ada", "bob"):
        pool.allocate(name)
    values, query_start_loc = pool.values(["ada", "bob"], [9, 2])
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        latent, rope = torch.randn(11, 512, generator=generator), torch.randn(11, 64, generator=generator)
        store(latent, rope, values, layer, query_start_loc=query_start_loc, layout=pool.layout)
    if break_scales:
        pool.scales[pool.pages("ada")[0].scale, 0, 1] = 0
    save_cache(path, values, pool.layout, query_start_loc)
    return path


def test_inspect_a_sound_cache(tmp_path: Path) -> None:
    result = run("inspect", save(tmp_path / "cache.pt"))
    assert result.exit_code == 0
    for part in ("value pages", "scale pages", "A 0: 9 tokens in 3 pages", "largest", "No problems."):
        assert part in result.output


def test_inspect_finds_what_is_wrong(tmp_path: Path) -> None:
    result = run("inspect", save(tmp_path / "cache.pt", break_scales=True))
    assert result.exit_code == 1
    assert "1 problem, 0 warnings" in result.output
    assert "has a scale of 0 in 4 of 8 live slots, first in layer 1, slot 0" in words(result)


def test_inspect_one_layer(tmp_path: Path) -> None:
    broken = save(tmp_path / "cache.pt", break_scales=True)
    assert run("inspect", broken, "--layer", 0).exit_code == 0
    assert run("inspect", broken, "--layer", 0, "--layer", 1).exit_code == 1
    result = run("inspect", broken, "--layer", 2)
    assert result.exit_code == 2
    assert "layers: 2 is out of range for a cache of 2 layers" in words(result)


def test_inspect_as_json(tmp_path: Path) -> None:
    result = run("inspect", save(tmp_path / "cache.pt", break_scales=True), "--json")
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert report["ok"] is False
    assert [finding["kind"] for finding in report["findings"]] == ["zero_scale"]
    assert [request["kv_len"] for request in report["requests"]] == [9, 2]


@pytest.mark.parametrize("form", ["cache", "json"])
def test_inspect_against_before(form: str, tmp_path: Path) -> None:
    """The same pages with other scales: only the earlier state shows it, from its cache or from its report."""
    before = save(tmp_path / "before.pt")
    if form == "json":
        text = run("inspect", before, "--json").output
        before = tmp_path / "before.json"
        before.write_text(text)
    now = save(tmp_path / "now.pt")
    assert run("inspect", now, "--before", before).exit_code == 0
    saved = torch.load(now, weights_only=True)
    scales = saved["storages"][saved["values"]["kv_scales"]["storage"]]
    scales.view(torch.float32).mul_(1.5)
    torch.save(saved, now)
    assert run("inspect", now).exit_code == 0
    result = run("inspect", now, "--before", before)
    assert result.exit_code == 1
    assert "held in the earlier report, without their scales" in words(result)


def test_inspect_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed: pip install pagedmla[plots]")
    cache = save(tmp_path / "cache.pt", break_scales=True)
    result = run("inspect", cache, "--picture", tmp_path / "pages.png")
    assert result.exit_code == 1
    assert (tmp_path / "pages.png").read_bytes().startswith(b"\x89PNG")
    result = run("inspect", cache, "--picture", tmp_path / "pages.doc")
    assert result.exit_code == 2
    assert "--picture" in words(result)


def test_inspect_files_that_are_not_caches(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("not a cache")
    (tmp_path / "text.json").write_text("{}")
    cache = save(tmp_path / "cache.pt")
    for arguments, sentence in (
        ([tmp_path / "missing.pt"], "does not exist"),
        ([tmp_path / "text.pt"], "expected a cache written by pagedmla.save_cache"),
        ([cache, "--before", tmp_path / "text.json"], "expected a report written by `pagedmla inspect --json`"),
    ):
        result = run("inspect", *arguments)
        assert result.exit_code == 2
        assert sentence in words(result)


def test_explain(tmp_path: Path) -> None:
    result = run("explain", "--layout", "fp8_flat", "--granularity", 64, "--heads", 16, "--page-size", 32, "--batch", 3)
    assert result.exit_code == 0
    assert "plan of layout fp8_flat (granularity 64), H=16, pages of 32, up to 3 requests, 3 tokens" in result.output
    assert "attend: " in result.output
    assert "model, not measured" in result.output


def test_explain_names_the_kernels_of_an_executor_with_several() -> None:
    result = run("explain", "--executor", "cutlass-model", "--heads", 16, "--precision", "fp16")
    assert result.exit_code == 0, result.output
    assert "1 query token a request: the model of mla_decode_fp8_rope_bf16_fp16_r16_b64_bf16" in words(result)
    assert "2 or more query tokens a request: the model of mla_decode_fp8_rope_bf16_fp16_r32_b64_bf16" in words(result)
    assert "store: torch (asked for with cutlass-model, which only attends)" in words(result)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layout", "fp4"], "layout: expected one of bf16"),
        (["--heads", "0"], "for --heads: expected at least 1; got 0."),
        (["--max-length", "0"], "for --max-length: expected at least 1; got 0."),
        (["--dtype", "int8"], "expected one of bfloat16, float16, float32; got int8"),
        (["--granularity", "64"], "granularity: expected None for layout fp8_rope_bf16"),
        (["--device", "nonsense"], "nonsense"),
        (["--precision", "fp4"], "precision: expected one of auto, fp8, fp8x2, fp16; got 'fp4'."),
    ],
)
def test_explain_refuses(arguments: list[str], sentence: str) -> None:
    result = run("explain", *arguments)
    assert result.exit_code == 2
    assert sentence in words(result)


def test_demo_saves_what_inspect_reads(tmp_path: Path) -> None:
    assert run("demo", "--save", tmp_path / "demo.pt").exit_code == 0
    assert run("inspect", tmp_path / "demo.pt").exit_code == 0


def test_demo_refuses_an_unknown_layout() -> None:
    result = run("demo", "--layout", "fp4")
    assert result.exit_code == 2
    assert "expected one of bf16" in words(result)


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.strip() == f"pagedmla {pagedmla.__version__}"


@pytest.mark.parametrize("bug", [TypeError("unhashable"), IndexError("range"), ValueError("math domain error")])
def test_a_bug_shows_its_trace(bug: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error inside `inspect` was told as wrong usage, exit code 2 and no trace: its type said nothing of whose it
    was."""

    def broken(*_: object, **__: object) -> None:
        raise bug

    path = save(tmp_path / "cache.pt")
    monkeypatch.setattr("pagedmla.kv_cache.inspection.inspect", broken)
    monkeypatch.setattr("pagedmla.plugin.plan.plan", broken)
    for arguments in (["inspect", path], ["explain"]):
        result = run(*arguments)
        assert (result.exit_code, result.exception) == (1, bug)


@pytest.mark.parametrize("command", ["inspect", "explain", "demo", "compile", "bench"])
def test_help_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.output
    assert f"pagedmla {command}" in words(result)


def test_help_names_what_there_is() -> None:
    """`compile --help` offered six of the ten kernels: the names are those of the lists that refusals quote."""
    from pagedmla.hardware.targets import TARGETS
    from pagedmla.kv_cache.layouts import LAYOUTS
    from pagedmla.triton_kernels.variants import KERNELS, variants

    assert {variant.kernel for variant in variants()} == set(KERNELS)
    for command, names in (
        ("compile", (*KERNELS, *TARGETS, *LAYOUTS, "decode, merge, or a variant's name")),
        ("explain", (*LAYOUTS, "cutlass-model", "fp8x2")),
        ("demo", tuple(LAYOUTS)),
        ("bench", tuple(LAYOUTS)),
    ):
        told = words(run(command, "--help"))
        assert [name for name in names if name not in told] == []
        assert "{" not in told


def test_help_lists_the_commands() -> None:
    for arguments in (["--help"], []):
        output = run(*arguments).output
        assert all(command in output for command in ("inspect", "explain", "demo", "compile", "bench", "--version"))


def test_the_installed_entry_point_is_named_pagedmla() -> None:
    """`main` is what the wheel's script calls: it names itself, and its exit code is the process's."""
    code = "import sys; from pagedmla.__main__ import main; sys.argv[1:] = ['inspect']; main()"
    for command in (["-c", code], ["-m", "pagedmla", "inspect"]):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2
        assert "Usage: pagedmla inspect" in done.stderr


SENTENCE = "pagedmla: interrupted\n"
KILL = "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1)"


def interrupted(tmp_path: Path, torch_source: str, ignored: bool = False) -> tuple[str, str, int]:
    """What `python -m pagedmla demo` prints, says, and ends with, where `torch` is this module."""
    (tmp_path / "torch.py").write_text(f"import atexit, os, signal, time\n{torch_source}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pagedmla", "demo"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        # As a shell starts it in front, or behind a script; the tests themselves may run behind one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )
    return done.stdout, done.stderr, done.returncode


def test_ctrl_c_while_torch_loads(tmp_path: Path) -> None:
    """A page of traceback from within torch; or torch caught it with what it can't import, and the command went on."""
    assert interrupted(tmp_path, KILL) == ("", SENTENCE, 130)
    swallows = f"try:\n    {KILL.replace(chr(10), chr(10) + '    ')}\nexcept BaseException:\n    pass"
    assert interrupted(tmp_path, swallows) == ("", SENTENCE, 130)


def test_ctrl_c_in_a_command(tmp_path: Path) -> None:
    """There it is an exception, so that files are left as they were: what is registered for the end still runs."""
    registered = "atexit.register(print, 'put away')"
    stop = f"{registered}\ndef __getattr__(name):\n    signal.raise_signal(signal.SIGINT)"
    assert interrupted(tmp_path, stop) == ("put away\n", SENTENCE, 130)


def test_ctrl_c_is_left_to_whom_it_belongs(tmp_path: Path) -> None:
    """A shell ignores it for what runs behind a script; a library may have taken it by the time a command begins."""
    assert interrupted(tmp_path, f"{KILL}\nos._exit(7)", ignored=True) == ("", "", 7)
    theirs = "signal.signal(signal.SIGINT, lambda *_: os._exit(8))"
    stop = "def __getattr__(name):\n    signal.raise_signal(signal.SIGINT)"
    assert interrupted(tmp_path, f"{theirs}\n{stop}") == ("", "", 8)


def test_the_command_line_loads_nothing_heavy_before_it_is_asked() -> None:
    """Nor torch: `pagedmla --help` took seconds."""
    code = (
        "import sys, pagedmla.plugin.cli\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'triton', 'cutlass', 'vllm'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_compile_one_kernel(tmp_path: Path) -> None:
    """The quickest there is: merge, on one target. Built, not run, so no GPU and no driver."""
    pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")
    table, folder = tmp_path / "deep" / "table.json", tmp_path / "kernels"
    result = run("compile", "--only", "merge", "--target", "sm_90a", "--out", folder, "--json", table)
    assert result.exit_code == 0, result.output
    assert "compiled, not run" in result.output
    assert "1 built, 0 refused" in words(result)
    (row,) = json.loads(table.read_text())
    assert (row["kernel"], row["executor"], row["target"], row["spill_words"]) == ("merge", "triton", "sm_90", 0)
    assert {path.suffix for path in folder.iterdir()} == {".cubin", ".ptx", ".sass"}


def test_compile_builds_cubins_that_travel(tmp_path: Path) -> None:
    """One variant and the merge, found again by the cache of a machine without the DSL."""
    pytest.importorskip("cutlass", reason="the CUTLASS DSL isn't installed: pip install pagedmla[cutlass]")
    from pagedmla.cutlass_kernels.cubin_cache import CubinCache

    variant, table = "mla_decode_fp8_flat_fp8x2_r16_b64_bf16", tmp_path / "table.json"
    only = ("--only", variant, "--only", "mla_combine_bf16")
    result = run("compile", "--executor", "cutlass", *only, "--out", tmp_path / "cubins", "--json", table)
    assert result.exit_code == 0, result.output
    assert "2 built, 0 refused" in words(result)
    row = next(row for row in json.loads(table.read_text()) if row["options"]["variant"] == variant)
    assert (row["kernel"], row["executor"], row["target"]) == ("decode", "cutlass", "sm_90")
    assert json.loads((tmp_path / "cubins" / "compile-cutlass.json").read_text()) == json.loads(table.read_text())
    for name in (variant, "mla_combine_bf16"):
        assert name in result.output  # not cut to fit
        found = CubinCache([tmp_path / "cubins"]).get(name)
        assert found.variant == name
        (ptx,) = (tmp_path / "cubins").glob(f"{name}.*.ptx")
        assert f".entry {found.entry}(" in ptx.read_text()


def test_compile_without_the_dsl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedmla.cutlass_kernels.build.dsl_version", lambda: None)
    result = run("compile", "--executor", "cutlass", "--only", "merge")
    assert_misused(result, "the CUTLASS Python DSL isn't installed; pip install pagedmla[cutlass]")


def test_compile_says_why_a_target_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")
    monkeypatch.setattr(
        "pagedmla.triton_kernels.compile._exceeds", lambda built, target: f"too large a block for {target.name}"
    )
    result = run("compile", "--only", "merge", "--target", "sm_90")
    assert result.exit_code == 1
    assert "merge" in result.output
    assert "too large a block for sm_90" in words(result)
    assert "0 built, 1 refused" in words(result)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--target", "sm_70"], "target: expected one of sm_80, sm_89, sm_90, sm_100, gfx942, gfx950; got 'sm_70'"),
        (["--only", "sort"], "only: expected one of decode, mixed, pieces, "),
        (["--only", "merge", "--only", "decoed"], "store; got 'decoed'"),
        (["--layout", "fp8"], "got 'fp8'"),
        (["--only", "prefill", "--layout", "fp8_flat"], "nothing to build: no variant of ['prefill'] in ['fp8_flat']"),
        (["--executor", "torch"], "'torch' is not"),
        (["--executor", "cutlass", "--target", "sm_80"], "target: expected sm_90, which the CUTLASS kernels are for"),
        (["--executor", "cutlass", "--only", "mixed"], "only: expected one of decode, merge or a variant; got 'mixed'"),
        (["--executor", "cutlass", "--layout", "bf16"], "no variant of any kernel in ['bf16']"),
    ],
)
def test_compile_refuses(arguments: list[str], sentence: str) -> None:
    result = run("compile", *arguments)
    assert result.exit_code == 2
    assert sentence in words(result)


# -- wrong usage is a sentence -----------------------------------------------------------------------------------------


def assert_misused(result: Result, sentence: str) -> None:
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert sentence in words(result)


def test_files_that_are_no_caches(tmp_path: Path) -> None:
    """A traceback with exit code 1, which means "problems found"."""
    text, sound = tmp_path / "text.pt", save(tmp_path / "cache.pt")
    text.write_text("hello\n")
    assert_misused(run("inspect", text), "expected a cache written by pagedmla.save_cache")
    assert_misused(run("inspect", sound, "--before", text), "expected a cache written by pagedmla.save_cache")
    data = torch.load(sound, weights_only=True)
    data["values"]["cache_lengths"] = None
    torch.save(data, text)
    assert_misused(run("inspect", text), "cache_lengths: expected a tensor")


def test_demo_where_nothing_can_be_saved(tmp_path: Path) -> None:
    assert_misused(run("demo", "--save", "/proc/none/x.pt"), "--save: /proc/none: expected a folder that files can be")
    assert_misused(run("demo", "--save", tmp_path), "expected a file; got a folder")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("pages", "--picture: pages: expected an ending that names the format: png, svg or pdf"),
        (".", "--picture: .: expected an ending"),
        ("/proc/none/pages.png", "--picture: /proc/none: expected a folder that files can be made in"),
        ("pages.txt", "'txt' is not supported"),
    ],
)
def test_pictures_that_cant_be_drawn_are_told_before_the_report(tmp_path: Path, name: str, sentence: str) -> None:
    """`--picture pages` drew pages.png, "" drew .png, and a wrong folder was told below the report, whose exit code it
    took."""
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed: pip install pagedmla[plots]")
    result = run("inspect", save(tmp_path / "cache.pt", break_scales=True), "--picture", name)
    assert_misused(result, sentence)
    assert "value pages" not in result.output


@pytest.mark.parametrize("option", ["--out", "--json"])
def test_compile_tries_its_files_before_it_builds(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour of builds ended in a traceback where the table couldn't be written; nothing is made for a slip."""
    pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")
    monkeypatch.setattr("pagedmla.triton_kernels.compile.compile_all", lambda *_: pytest.fail("built"))
    assert_misused(run("compile", "--only", "merge", option, "/proc/none/x"), "/proc/none")


def test_a_table_is_whole_or_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that breaks off leaves the table of the last one, and no folder or file for a kernel that isn't there."""
    pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")
    table = tmp_path / "table.json"
    table.write_text("[]")
    assert_misused(run("compile", "--only", "sort", "--out", tmp_path / "out", "--json", tmp_path / "new.json"), "sort")

    def breaks_off(*_: object) -> None:
        raise OSError("nvdisasm: no such file")

    monkeypatch.setattr("pagedmla.triton_kernels.compile.compile_all", breaks_off)
    assert_misused(run("compile", "--only", "merge", "--json", table), "nvdisasm: no such file")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"table.json": "[]"}


@pytest.mark.parametrize("option", ["--heads", "--page-size", "--batch", "--tokens", "--max-length", "--latent"])
def test_numbers_that_no_int32_holds(option: str) -> None:
    """`--heads 99999999999999999999` printed a backtrace of C++."""
    assert_misused(run("explain", option, 2**31), f"'{option}': Input should be less than or equal to {2**31 - 1}")


def test_a_workspace_that_no_memory_has_is_one_sentence() -> None:
    most = 2**31 - 1
    result = run("explain", "--heads", most, "--tokens", most)
    assert_misused(result, "overflowed")
    assert "frame #" not in result.output


def test_text_that_is_none(tmp_path: Path) -> None:
    """The decoder's own words named no file."""
    (tmp_path / "text").write_bytes(b"ab\xff")
    result = run("calibrate", tmp_path, "--text", tmp_path / "text")
    assert_misused(result, "expected text in UTF-8; got byte 0xff at 2")


def ended(monkeypatch: pytest.MonkeyPatch, stdout: TextIO, *arguments: str) -> object:
    """What `main` exits with, when it prints to `stdout`."""
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "argv", ["pagedmla", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """A traceback, or "Invalid value for --save" of whatever was printed: neither is wrong usage. Then exit code 1,
    which says that a cache has problems."""
    sentence = "pagedmla: [Errno 28] No space left on device"
    for where, arguments, told in (
        ("/dev/full", ["explain"], sentence),
        ("/dev/full", ["demo", "--save", "/dev/null"], sentence),
        ("/dev/null", ["demo", "--save", "/dev/full"], f"{sentence}: '/dev/full'"),
    ):
        with Path(where).open("w") as stdout:
            assert ended(monkeypatch, stdout, *arguments) == 74
        assert capfd.readouterr().err == f"{told}\n"


def test_a_reader_that_leaves_early_is_no_misuse(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """`pagedmla explain | head -1`, and of help: exit code 1, which says that a cache has problems."""
    for arguments in (["explain"], ["--help"], ["explain", "--help"], ["demo"]):
        reader, writer = os.pipe()
        os.close(reader)
        with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as left:
            assert ended(monkeypatch, left, *arguments) == 141
        assert capfd.readouterr().err == ""


def test_explain_needs_neither_the_device_nor_the_memory() -> None:
    """It allocated the workspace: an AssertionError without CUDA, the allocator's own words for a large one."""
    result = run("explain", "--device", "cuda", "--layout", "fp8_rope_bf16")
    assert result.exit_code == 0, result.output
    assert "plan of layout fp8_rope_bf16" in result.output
    result = run("explain", "--partitions", 10**7, "--tokens", 10**7)
    assert result.exit_code == 0, result.output
    assert "workspace:" in words(result)
    assert_misused(run("explain", "--device", "nowhere"), "nowhere")


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_explain_says_which_gpu_stands_for_one_that_isnt_here(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions and workspace came from the 132 multiprocessors of an H200 that nobody had spoken of."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("explain", "--device", device)
    assert result.exit_code == 0, result.output
    first = result.output.splitlines()[0]
    assert first.startswith("There is no GPU here. Partitions and workspace are those of an H200, with 132 ")
    assert "There is no GPU" not in run("explain", "--device", "cpu").output


def test_explain_asks_for_a_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one GPU, cuda:7 was an AssertionError of torch's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert_misused(run("explain", "--device", "cuda:2"), "a GPU of this machine, cuda:0 to cuda:1; got cuda:2")


# -- what a stranger's file and terminal bring -------------------------------------------------------------------------


def typed(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "pagedmla", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def named(path: Path, *names: str) -> Path:
    """The cache of `save`, whose requests bear these names."""
    saved = torch.load(save(path, break_scales=True), weights_only=True)
    saved["request_names"] = list(names)
    torch.save(saved, path)
    return path


STRANGE = ("[bold red]x[/] \x1b[31m", "two\nlines \u202e")


def test_names_reach_the_terminal_as_text(tmp_path: Path) -> None:
    """A name from a file reached the terminal with its escape sequences, and one with a line break tore the tables."""
    output = run("inspect", named(tmp_path / "cache.pt", *STRANGE)).output
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "A [bold red]x[/] \\x1b[31m: 9 tokens in 3 pages" in output
    assert "B two\\nlines \\u202e: 2 tokens in 1 page" in output
    assert "0 ([bold red]x[/] \\x1b[31m), column 0: scale page" in " ".join(output.split())


def test_refusals_of_a_strange_file_are_text(tmp_path: Path) -> None:
    """A format's version is whatever the file says."""
    path = save(tmp_path / "cache.pt")
    saved = torch.load(path, weights_only=True)
    torch.save(saved | {"version": "\x1b[31m"}, path)
    result = run("inspect", path)
    assert_misused(result, "version \\x1b[31m")
    assert "\x1b" not in result.output


@pytest.mark.parametrize("name", ["$x^{", "\u65e5\u672c", "\x1b[31m"])
def test_pictures_take_every_name(name: str, tmp_path: Path) -> None:
    """Matplotlib read `$` as a formula and failed, with exit code 1; letters that its font lacks were warned of."""
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed: pip install pagedmla[plots]")
    picture = tmp_path / "pages.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run("inspect", named(tmp_path / "cache.pt", name, "bob"), "--picture", picture)
    assert (result.exit_code, picture.read_bytes()[:4]) == (1, b"\x89PNG"), result.exception
    assert f"Wrote {picture}" in result.output.replace("\n", "")


def test_a_picture_that_fails_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback and exit code 1, which says that the cache has problems."""
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed: pip install pagedmla[plots]")

    def too_large(*_: object) -> None:
        raise ValueError("Image size of 99999x9 pixels is too large.")

    monkeypatch.setattr("pagedmla.plugin.page_picture.to_picture", too_large)
    result = run("inspect", save(tmp_path / "cache.pt"), "--picture", tmp_path / "pages.png")
    assert_misused(result, "for --picture: Image size")


def test_stdout_of_few_letters(tmp_path: Path) -> None:
    """`PYTHONIOENCODING=ascii pagedmla demo --help` was a UnicodeEncodeError, and so was a name beyond ASCII."""
    done = typed("demo", "--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    done = typed("inspect", named(tmp_path / "cache.pt", "\xfcn\xef", "bob"), PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert "A \\xfcn\\xef: 9 tokens" in done.stdout


def test_a_width_that_shows_nothing_is_ignored(tmp_path: Path) -> None:
    """`COLUMNS=0 pagedmla inspect cache.pt` printed nothing, with exit code 0."""
    done = typed("inspect", save(tmp_path / "cache.pt"), COLUMNS="0")
    assert done.returncode == 0
    assert "No problems." in done.stdout


def test_a_bug_has_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """Python's own is 1, which says that a cache has problems."""

    def broken(**_: object) -> None:
        raise TypeError("unhashable")

    monkeypatch.setattr("pagedmla.plugin.plan.plan", broken)
    with Path(os.devnull).open("w") as null:
        assert ended(monkeypatch, null, "explain") == 70
    assert capfd.readouterr().err.endswith("TypeError: unhashable\n")


@pytest.mark.parametrize("name", ["report.json", "rep.txt", "REP.JSON"])
def test_a_report_is_known_by_what_it_holds(name: str, tmp_path: Path) -> None:
    """Only `.json` was read as a report."""
    cache, before = save(tmp_path / "cache.pt"), tmp_path / name
    before.write_text(run("inspect", cache, "--json").output)
    assert run("inspect", cache, "--before", before).exit_code == 0


@pytest.mark.parametrize("before", ["report", "cache"])
def test_pipes(before: str, tmp_path: Path) -> None:
    """`--before <(...)` was "[Errno 29] Illegal seek", and so was a cache from a pipe."""
    files = {"cache": save(tmp_path / "cache.pt"), "report": tmp_path / "report.json"}
    files["report"].write_text(run("inspect", files["cache"], "--json").output)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"cat {files[before]} > {pipe}"], stderr=subprocess.DEVNULL):
        result = run("inspect", files["cache"], "--before", pipe)
    if before == "report":
        assert result.exit_code == 0, result.output
        with subprocess.Popen(["sh", "-c", f"cat {files['cache']} > {pipe}"]):
            assert run("inspect", pipe).exit_code == 0
    else:
        assert_misused(result, "expected a report from a pipe")


def test_reports_that_are_none(tmp_path: Path) -> None:
    """Brackets in brackets were a RecursionError's trace."""
    cache, deep = save(tmp_path / "cache.pt"), tmp_path / "deep.json"
    deep.write_text("[" * 200_000)
    assert_misused(run("inspect", cache, "--before", deep), "expected a report written by `pagedmla inspect --json`")
    deep.write_text("[]")
    assert_misused(run("inspect", cache, "--before", deep), "expected a report written by `pagedmla inspect --json`")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("requests", 0, "name"), ["a"]),
        (("requests", 0, "pages", 0, "fill"), None),
        (("requests", 0, "pages", 0, "column"), [1]),
        (("requests", 0, "pages", 0, "value_digest"), {}),
        (("layers", 0, "amax"), "x"),
        (("pool", "dead_value_pages"), [[1]]),
    ],
)
def test_reports_with_other_types(place: tuple[str | int, ...], value: object, tmp_path: Path) -> None:
    """They were believed, and ended in a TypeError where they were compared."""
    cache, before = save(tmp_path / "cache.pt"), tmp_path / "report.json"
    report = json.loads(run("inspect", cache, "--json").output)
    part = report
    for step in place[:-1]:
        part = part[step]
    assert part[place[-1]] != value
    part[place[-1]] = value
    before.write_text(json.dumps(report))
    assert_misused(run("inspect", cache, "--before", before), "expected a report written by `pagedmla inspect --json`")


# -- compile: what stands in its way, and rows that can be told apart --------------------------------------------------


def test_compile_where_kernels_are_interpreted() -> None:
    """`TRITON_INTERPRET=1 pagedmla compile` was an AttributeError of variants, which come before the compiler."""
    pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")
    done = typed(
        "compile", "--target", "sm_90", "--only", "store", "--layout", "bf16", TRITON_INTERPRET="1", COLUMNS="200"
    )
    assert done.returncode == 2
    assert "Triton was imported with TRITON_INTERPRET set" in done.stderr


def test_compile_without_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "No module named 'triton'", and not what to do about it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert_misused(run("compile", "--only", "merge"), "Triton isn't installed; pip install pagedmla[triton]")


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [
        ("/proc/none", "Triton's cache, which TRITON_CACHE_DIR moves: /proc/none: expected a folder that files can be"),
        ("/proc", "/proc: expected a folder that files can be made in; got one that takes none"),
        ("", "TRITON_CACHE_DIR: expected a folder, or no such variable; got ''"),
    ],
)
def test_compile_where_triton_can_keep_nothing(folder: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's own error, without a word of Triton; empty, every kernel was told as refused by its target."""
    pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")
    monkeypatch.setenv("TRITON_CACHE_DIR", folder)
    assert_misused(run("compile", "--only", "merge", "--target", "sm_90"), sentence)


def rows_of(*options: dict[str, object]) -> list[dict[str, object]]:
    same = {"kernel": "store", "executor": "triton", "target": "sm_90", "layout": "fp8_rope_bf16_prescaled", "rows": 16}
    costs = dict.fromkeys(
        ("spill_words", "spill_words_in_loop", "shared_bytes", "ctas_per_sm", "warp_instructions_per_token"), 0
    )
    return [{**same, **costs, "registers": 255, "bytes_per_token": 1234.5, "options": each} for each in options]


def test_rows_of_a_table_can_be_told_apart(capsys: pytest.CaptureFixture) -> None:
    """The README's example printed two rows with the same keys: what differed stood in the JSON alone."""
    from pagedmla.plugin.compile_report import _print

    _print(rows_of({"SLOTS": True, "A": 1, "num_warps": 4}, {"SLOTS": False, "A": 1, "num_warps": 4}))
    output = capsys.readouterr().out
    assert all(output.count(f"SLOTS={value}") == 1 for value in (True, False))
    assert "num_warps" not in output
    assert "A=" not in output
    _print(rows_of({"SLOTS": True}))
    assert "SLOTS" not in capsys.readouterr().out


def test_a_table_fits_a_terminal_and_loses_no_number(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was up to 111 columns wide wherever it was printed."""
    from pagedmla.plugin.compile_report import _print

    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    rows = rows_of({"SLOTS": True, "SPLIT": 1}, {"SLOTS": False, "SPLIT": 1})
    for columns in (80, 70):
        monkeypatch.setenv("COLUMNS", str(columns))
        _print(rows)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert max(map(len, lines)) <= columns
        assert sum("1,234.5" in line for line in lines) == 2


def test_compile_is_silent_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress wrote a lone line break to stderr; and a target that was named twice was built for twice."""
    pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")
    result = run("compile", "--only", "merge", "--only", "merge", "--target", "sm_90", "--target", "sm_90a")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "1 built, 0 refused" in result.output


@pytest.mark.parametrize("arguments", [["compile", "--out", ""], ["bench", "--pictures", ""]])
def test_folders_without_a_name(arguments: list[str]) -> None:
    """Path("") is the current folder, which was filled."""
    assert_misused(run(*arguments), "expected a folder; got an empty name")


# -- demo, explain -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "scales", "bound"),
    [
        ("bf16", "no scales", "3.1%. "),
        ("fp32", "no scales", "0.001%. "),
        ("fp8_ds_mla", "scales inside the rows", "15% (random tokens are the hardest case). "),
        ("fp8_flat", "scales in pages of their own", "15% (random tokens are the hardest case). "),
    ],
)
def test_demo_tells_of_its_layout(layout: str, scales: str, bound: str, tmp_path: Path) -> None:
    """It told of FP8 and of scale pages whatever the layout, and that it had written a file it didn't tell at all."""
    result = run("demo", "--layout", layout, "--save", tmp_path / "demo.pt")
    assert result.exit_code == 0, result.output
    assert f"pages of 16, {scales}." in words(result)
    assert f"before they were cached, bound {bound}" in words(result)
    assert f"Wrote {tmp_path / 'demo.pt'}" in result.output


def test_explain_answers_for_cutlass_on_a_gpu_that_isnt_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line spoke of an H200, the next but one refused the CUTLASS kernels for want of a device. A plan, which
    holds memory, is refused for it still."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("pagedmla.plugin.executor_cutlass.dsl_version", lambda: "4.8.1")
    result = run("explain", "--device", "cuda")
    assert result.exit_code == 0, result.output
    assert "there is no CUDA device here" not in result.output
    assert "not cutlass: unproven on a GPU: mla_decode_" in words(result)
    result = run("explain", "--device", "cuda", "--executor", "cutlass", "--precision", "fp8")
    assert result.exit_code == 0, result.output
    assert "attend: cutlass (asked for)" in result.output
    with pytest.raises(ValueError, match="'cutlass', but there is no CUDA device here"):
        pagedmla.plan(
            layout="fp8_rope_bf16", num_heads=16, page_size=64, max_batch=1, max_tokens=1, max_cache_length=64,
            dtype=torch.bfloat16, device="cuda", sm_scale=1.0, executor="cutlass",
        )  # fmt: skip


def test_explain_tells_of_a_precision_that_nobody_takes() -> None:
    """`--precision fp8` was dropped without a word where Triton or torch serve."""
    assert "precision fp8 is the CUTLASS kernels' to take" in run("explain", "--precision", "fp8").output
    assert "to take" not in run("explain").output
    assert "to take" not in run("explain", "--precision", "fp8", "--executor", "cutlass-model").output
