"""The command line as people type it: exit code 0 for sound, 1 for something wrong, 2 for wrong usage."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
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
        (["--heads", "0"], "num_heads: expected at least 1; got 0."),
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
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None,
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
    for name in (variant, "mla_combine_bf16"):
        assert name in result.output  # not cut to fit
        assert CubinCache([tmp_path / "cubins"]).get(name).variant == name


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
        raise RuntimeError("build: the compiler's process ended with -9")

    monkeypatch.setattr("pagedmla.triton_kernels.compile.compile_all", breaks_off)
    assert_misused(run("compile", "--only", "merge", "--json", table), "ended with -9")
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
def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, or "Invalid value for --save" of whatever was printed: neither is wrong usage."""
    sentence = "pagedmla: [Errno 28] No space left on device"
    with Path("/dev/full").open("w") as full:
        assert ended(monkeypatch, full, "explain") == sentence
    with Path("/dev/full").open("w") as full:
        assert ended(monkeypatch, full, "demo", "--save", "/dev/null") == sentence
    with Path("/dev/null").open("w") as null:
        assert ended(monkeypatch, null, "demo", "--save", "/dev/full") == f"{sentence}: '/dev/full'"


def test_a_reader_that_leaves_early_is_no_misuse(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """`pagedmla explain | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as left:
        assert ended(monkeypatch, left, "explain") == 1
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
