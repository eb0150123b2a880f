"""`pagedmla calibrate` without an engine: statistics by hand, scales on disk, what is recorded, what is refused.

Numbers stand on e4m3's edges: 448 is the largest, 2^-9 the smallest, and 2^-10 the last that goes to 0.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from pagedmla.kv_cache.checks import Refusal
from pagedmla.plugin.calibrate import (
    Calibration,
    _last_line,
    _record,
    calibrate,
    number_of,
    to_picture,
    verdict,
    write_scales,
)
from pagedmla.plugin.checkpoint_scales import INDEX, SHARD, _write_numbers, lay_over, read_scales
from pagedmla.plugin.cli import app
from pagedmla.plugin.latent_statistics import Errors, LayerStatistics, measure_layer, overall, per_tensor
from pagedmla.plugin.vllm.scales import load_scales

NAME = "model.layers.{}.self_attn.k_proj.k_scale"
LATENT = "model.layers.{}.self_attn.kv_b_proj.weight"  # what makes a layer one of an MLA model


def rows(tokens: int = 64, latent: float = 1.0, rope: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(tokens, 512, generator=g) * latent, torch.randn(tokens, 64, generator=g) * rope


# Statistics


def test_codes_that_are_lost_by_hand() -> None:
    latent, rope = torch.ones(1, 512), torch.ones(1, 64)
    latent[0, :4] = torch.tensor([448.0, -449.0, 2.0**-9, 2.0**-10])
    rope[0, 0] = 1000.0
    one = per_tensor(latent, rope, 1.0)
    assert one.saturated == 2 / 576
    assert one.vanished == 1 / 576
    assert one.errors.latent == pytest.approx(((1 / 449) ** 2 + 1) ** 0.5 / 512**0.5)  # 449 became 448, 2^-10 0
    assert one.errors.rope == pytest.approx(0.552 / 64**0.5)
    twice = per_tensor(latent, rope, 4.0)
    assert (twice.saturated, twice.vanished) == (0, 2 / 576)


def test_the_fitted_scale_is_the_largest_number_of_both() -> None:
    latent, rope = rows(latent=2.0**12)
    found = measure_layer("model.layers.0.self_attn.attn", latent.to(torch.bfloat16), rope.to(torch.bfloat16))
    amax = float(latent.to(torch.bfloat16).abs().max())
    assert (found.latent_amax, found.fitted.scale) == (amax, amax / 448)
    assert found.unit.saturated > 0.7  # 512 of 576 columns have a sigma of 4096
    assert found.fitted.saturated == 0
    assert found.fitted.errors.latent < 0.03 < found.unit.errors.latent
    assert measure_layer("layers.0.", latent, rope, margin=2.0).fitted.scale == float(latent.abs().max()) / 224


def test_a_layer_of_zeros_has_a_scale() -> None:
    found = measure_layer("layers.0.", torch.zeros(2, 512), torch.zeros(2, 64))
    assert found.fitted.scale > 0
    assert found.fitted.errors == Errors(0.0, 0.0)


def test_recommendations() -> None:
    usual = measure_layer("model.layers.0.a", *rows())
    assert usual.recommended == "fp8_rope_bf16"
    assert usual.layouts["fp8_rope_bf16"].rope < 0.003 < 0.02 < usual.layouts["fp8_flat"].rope
    latent, rope = rows()
    latent[:, :128] *= 2.0**20  # a token's scale is theirs, and the other columns go to 0
    groups = measure_layer("model.layers.1.a", latent, rope)
    assert groups.recommended == "fp8_ds_mla"
    assert groups.layouts["fp8_rope_bf16"].latent == pytest.approx(0.75**0.5, rel=0.01)
    assert groups.layouts["fp8_ds_mla"].latent < 0.03
    latent[:, ::64] *= 2.0**20  # now in every group
    columns = measure_layer("model.layers.2.a", latent, rope)
    assert columns.recommended == "bf16"
    broken = rows()[0]
    broken[3, 5] = torch.inf
    assert (
        measure_layer("model.layers.3.a", broken, rope).reason
        == "numbers that aren't finite: 1. Look for the cause first"
    )
    assert overall([usual, groups]) == overall([groups, usual]) == "fp8_ds_mla"
    assert overall([columns, groups, usual]) == "bf16"


# Scales on disk


WEIGHTS = {"model.norm.weight": 1.0, **{LATENT.format(layer): 1.0 for layer in (0, 1, 2, 10)}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of one file, with a scale of layer 1 that it brought along."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    _write_numbers(folder / "model.safetensors", {**WEIGHTS, NAME.format(1): 0.5})
    return folder


def test_scales_are_laid_over_a_checkpoint(model: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    assert read_scales(model) == {("model", 1): 0.5}
    out = tmp_path / "made" / "scaled"
    lay_over(model, out, {0: 0.25, 1: 1 / 3})
    assert read_scales(out) == {("model", 0): 0.25, ("model", 1): pytest.approx(1 / 3, rel=1e-7)}
    assert (out / "config.json").read_text() == "{}"
    index = json.loads((out / INDEX).read_text())["weight_map"]
    assert index == {**dict.fromkeys(WEIGHTS, "model.safetensors"), NAME.format(0): SHARD, NAME.format(1): SHARD}
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
    again = tmp_path / "again"
    lay_over(out, again, {0: 2.0})  # what was laid over can be laid over
    assert read_scales(again) == {("model", 0): 2.0}
    with pytest.raises(FileExistsError):
        lay_over(model, out, {0: 1.0})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again", "made", "model"]


def write_file(file: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-60, 1e60])
def test_scales_that_are_none(tmp_path: Path, model: Path, scale: float) -> None:
    """1e-60 and 1e60 are fine in the float64 of a file, and 0 and inf in the float32 of a cache."""
    entry = {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}
    write_file(tmp_path / "model.safetensors", {LATENT.format(0): {}, NAME.format(0): entry}, struct.pack("<d", scale))
    message = rf"expected model.layers.0.self_attn.k_proj.k_scale as a finite float32 > 0; got {re.escape(str(scale))}"
    with pytest.raises(ValueError, match=f"model.safetensors: {message}"):
        read_scales(tmp_path)
    with pytest.raises(ValueError, match=f"out: {message}"):  # what is written is what can be read
        lay_over(model, tmp_path / "out", {0: scale})
    assert not (tmp_path / "out").exists()


def test_a_scale_is_float32(tmp_path: Path) -> None:
    """A tool's float64 and another's float32 of one number are one scale."""
    entries = {
        "layers.0.self_attn.kv_b_proj.weight": {},
        "layers.0.self_attn.k_scale": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]},
        "layers.0.self_attn.attn.k_scale": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
    }
    write_file(tmp_path / "model.safetensors", entries, struct.pack("<df", 0.1, 0.1))
    assert read_scales(tmp_path) == {("", 0): struct.unpack("<f", struct.pack("<f", 0.1))[0]}


def test_two_names_of_a_layer_that_disagree(tmp_path: Path) -> None:
    names = [f"model.layers.3.self_attn.{name}" for name in ("k_proj.k_scale", "attn.k_scale")]
    _write_numbers(tmp_path / "model.safetensors", {LATENT.format(3): 1.0, **dict.fromkeys(names, 0.5)})
    assert read_scales(tmp_path) == {("model", 3): 0.5}
    _write_numbers(tmp_path / "model.safetensors", {LATENT.format(3): 1.0, names[0]: 0.5, names[1]: 0.25})
    with pytest.raises(ValueError, match=r"expected one k_scale for layer 3; got 0\.5 and 0\.25"):
        read_scales(tmp_path)


VISION = "vision_tower.encoder.layers.0.self_attn.{}"


@pytest.mark.parametrize("prefix", ["model", "language_model.model", "model.language_model", ""])
@pytest.mark.parametrize("scales", ["both", "the tower", "the language model"])
def test_towers_beside_the_language_model(tmp_path: Path, prefix: str, scales: str) -> None:
    """A vision tower's scale of its layer 0, the only one of the checkpoint, became that of the language model's."""
    mine = f"{prefix}.layers.0.self_attn.".lstrip(".")
    tensors = {f"{mine}kv_a_proj_with_mqa.weight": 1.0, VISION.format("k_proj.weight"): 1.0}
    if scales != "the tower":
        tensors[f"{mine}k_proj.k_scale"] = 0.5
    if scales != "the language model":
        tensors[VISION.format("k_proj.k_scale")] = 0.25
    _write_numbers(tmp_path / "model.safetensors", tensors)
    found = {} if scales == "the tower" else {(prefix, 0): 0.5}
    assert read_scales(tmp_path) == found
    layer = SimpleNamespace(_k_scale=torch.ones(()), _k_scale_float=1.0)
    assert load_scales(str(tmp_path), [("language_model.model.layers.0.self_attn.attn", layer)]) == len(found)
    assert layer._k_scale_float == float(layer._k_scale) == found.get((prefix, 0), 1.0)


def test_two_language_models(tmp_path: Path) -> None:
    """A draft's layers beside the model's: a layer of the engine that has neither's name is nobody's."""
    mine, draft = LATENT.format(0), "draft.layers.0.self_attn.kv_b_proj.weight"
    scales = {NAME.format(0): 0.5, "draft.layers.0.self_attn.k_proj.k_scale": 0.25}
    (tmp_path / "model").mkdir()
    _write_numbers(tmp_path / "model" / "model.safetensors", {mine: 1.0, draft: 1.0, **scales})
    assert read_scales(tmp_path / "model") == {("model", 0): 0.5, ("draft", 0): 0.25}
    layer = SimpleNamespace(_k_scale=torch.ones(()), _k_scale_float=1.0)
    assert load_scales(str(tmp_path / "model"), [("model.layers.0.self_attn.attn", layer)]) == 1
    assert layer._k_scale_float == 0.5
    with pytest.raises(ValueError, match=r"its own name .* got some of draft.layers, model.layers"):
        load_scales(str(tmp_path / "model"), [("language_model.model.layers.0.self_attn.attn", layer)])
    with pytest.raises(ValueError, match=r"one MLA layer 0 to lay a scale over; got draft.layers.0 and model.layers.0"):
        lay_over(tmp_path / "model", tmp_path / "out", {0: 1.0})


def test_scales_are_laid_over_the_language_model_alone(tmp_path: Path) -> None:
    """They were named model.layers, whatever the model's layers are called, and the tower's own were left out."""
    (tmp_path / "model").mkdir()
    mine = "language_model.model.layers.0.self_attn."
    tower = VISION.format("k_proj.k_scale")
    tensors = {f"{mine}kv_b_proj.weight": 1.0, f"{mine}attn.k_scale": 0.5, tower: 0.25}
    _write_numbers(tmp_path / "model" / "model.safetensors", tensors)
    lay_over(tmp_path / "model", tmp_path / "out", {0: 0.125})
    assert read_scales(tmp_path / "out") == {("language_model.model", 0): 0.125}
    assert json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"] == {
        f"{mine}kv_b_proj.weight": "model.safetensors",
        f"{mine}k_proj.k_scale": SHARD,
        tower: "model.safetensors",
    }
    with pytest.raises(ValueError, match="expected one MLA layer 1 to lay a scale over; got none"):
        lay_over(tmp_path / "model", tmp_path / "more", {1: 0.125})
    _write_numbers(tmp_path / "model" / "model.safetensors", {tower: 0.25})
    with pytest.raises(ValueError, match=r"expected MLA layers .* to lay scales over; got none"):
        lay_over(tmp_path / "model", tmp_path / "more", {0: 0.125})


ENTRY = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "expected JSON; got "),
        (b"[" * 100_000, b"", "expected JSON; got "),
        ([1], b"", "expected a JSON object; got list"),
        ({NAME.format(0): [1]}, bytes(4), r"expected model.* as one number of F64, F32, .*; got \[1\]"),
        ({NAME.format(0): {"dtype": "F32", "shape": []}}, bytes(4), "expected model.* as one number of "),
        ({NAME.format(0): {**ENTRY, "dtype": ["F32"]}}, bytes(4), "expected model.* as one number of "),
        ({NAME.format(0): {**ENTRY, "dtype": "I8"}}, bytes(4), "expected model.* as one number of "),
        (
            {NAME.format(0): {**ENTRY, "data_offsets": [-4, 0]}},
            bytes(4),
            r"expected model.* as one number of .* \[-4, 0\]",
        ),
        ({NAME.format(0): {**ENTRY, "data_offsets": [0, 8]}}, bytes(8), "expected model.* as one number of "),
        ({NAME.format(0): {**ENTRY, "data_offsets": "04"}}, bytes(4), "expected model.* as one number of "),
        ({NAME.format(0): ENTRY}, bytes(3), r"expected \d+ bytes or more, for model.*; got \d+"),
    ],
)
def test_broken_files(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    """Offsets before the data gave bytes of the header as a scale."""
    write_file(
        tmp_path / "model.safetensors", {LATENT.format(0): {}, **header} if isinstance(header, dict) else header, data
    )
    with pytest.raises(ValueError, match=f"{tmp_path / 'model.safetensors'}: {message}"):
        read_scales(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "expected JSON; got "),
        ("[]", "expected a JSON object; got list"),
        ('{"weight_map": null}', r"expected weight_map as \{tensor: file\}; got None"),
        ('{"weight_map": {"x": 1}}', "expected weight_map as "),
    ],
)
def test_broken_indexes(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ValueError, match=f"{tmp_path / INDEX}: {message}"):
        read_scales(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_checkpoint_is_whole_or_not_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Interrupted, it left links without scales, to be served at 1, and in the way of the next attempt."""

    def interrupted(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("pagedmla.plugin.checkpoint_scales._write_numbers", interrupted)
        with pytest.raises(error):
            lay_over(model, tmp_path / "out", {0: 1.0})
    assert list(tmp_path.iterdir()) == [model]
    (model / "loop").symlink_to("loop")  # carried along as it is, like one that leads nowhere
    lay_over(model, tmp_path / "out", {0: 1.0})
    assert read_scales(tmp_path / "out") == {("model", 0): 1.0}
    assert (tmp_path / "out").stat().st_mode == model.stat().st_mode


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected \*.safetensors to lay scales over; got none"):
        lay_over(tmp_path, tmp_path.with_name("out"), {0: 1.0})
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="expected a safetensors file"):
        read_scales(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    _write_numbers(tmp_path / "other.safetensors", {"x": 1.0})
    names = LATENT.format(0), NAME.format(0)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "other.safetensors")}))
    with pytest.raises(ValueError, match="as the index says; got none"):
        read_scales(tmp_path)


@pytest.mark.parametrize("name", ["k_proj.k_scale", "attn.k_scale", "k_scale", "mla_attn.mla_attn.k_scale"])
def test_names_that_tools_give(tmp_path: Path, name: str) -> None:
    tensors = {LATENT.format(3): 1.0, f"model.layers.3.self_attn.{name}": 0.125}
    _write_numbers(tmp_path / "model.safetensors", tensors)
    assert read_scales(tmp_path) == {("model", 3): 0.125}


def test_layers_get_the_checkpoints_scales(model: Path) -> None:
    """vLLM 0.32 makes room for k_scale in MLA layers of two kinds of checkpoint alone: DeepSeek's own served at 1."""
    made = [SimpleNamespace(_k_scale=torch.ones(()), _k_scale_float=1.0) for _ in range(2)]
    layers = {f"model.layers.{number}.self_attn.attn": layer for number, layer in enumerate(made)}
    assert load_scales(str(model), layers.items()) == 1
    first, second = layers.values()
    assert (first._k_scale_float, float(first._k_scale)) == (1.0, 1.0)
    assert (second._k_scale_float, float(second._k_scale)) == (0.5, 0.5)
    assert load_scales("deepseek-ai/DeepSeek-V3", layers.items()) == 0


# The recorder


def test_the_recorder_keeps_so_many_live_tokens() -> None:
    from pagedmla.plugin.vllm.recorder import Recorder

    kept = Recorder(3)
    latent, rope = torch.arange(8.0).view(4, 2), torch.arange(4.0).view(4, 1)
    kept.add("a", latent, rope, torch.tensor([5, -1, 6, -1]))
    kept.add("a", latent + 10, rope + 10, torch.tensor([7, 8, 9, 10]))
    kept.add("b", latent, rope, torch.tensor([-1, -1, -1, -1]))
    latent.zero_()  # the engine's buffers are reused
    assert kept.rows()["a"][0].tolist() == [[0, 1], [4, 5], [10, 11]]
    assert kept.rows()["a"][1].tolist() == [[0], [2], [10]]
    assert kept.rows()["b"][0].shape == (0, 2)


def test_an_extension_records_once() -> None:
    from pagedmla.plugin.vllm import recorder

    worker = recorder.RecordsExtension()
    with pytest.raises(RuntimeError, match="expected pagedmla_record before it"):
        worker.pagedmla_recorded()
    worker.pagedmla_record(8)
    assert recorder.active is not None
    recorder.active.add("model.layers.0.attn", *rows(4), torch.arange(4))
    recorder.active.add("model.layers.1.attn", *rows(4), torch.full((4,), -1))  # an engine's dummy run
    found = worker.pagedmla_recorded()
    assert recorder.active is None
    assert list(found) == ["model.layers.0.attn"]
    assert found["model.layers.0.attn"]["tokens"] == 4
    assert LayerStatistics.from_dict(json.loads(json.dumps(found["model.layers.0.attn"]))) == measure_layer(
        "model.layers.0.attn", *rows(4)
    )


# The command


@pytest.fixture
def found() -> Calibration:
    layers = [measure_layer(f"model.layers.{i}.self_attn.attn", *rows(latent=2.0**i)) for i in (2, 10)]
    return Calibration("somewhere/model", 64, 1.0, tuple(layers))


def test_report(found: Calibration, tmp_path: Path) -> None:
    assert number_of("layers.12.self_attn") == 12
    for name in ("model.decoder.3.attn", "model.layers.last.attn", ""):
        with pytest.raises(ValueError, match=f"layer: expected a name with the layer's number, .* got '{name}'"):
            number_of(name)  # an IndexError that named nothing
    assert found.scales() == {2: found.layers[0].fitted.scale, 10: found.layers[1].fitted.scale}
    assert verdict(found).startswith("recommended: fp8_rope_bf16 (layer 2: latents lose 2.")
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [LayerStatistics.from_dict(each) for each in content["layers"]] == list(found.layers)
    pytest.importorskip("matplotlib", reason="matplotlib isn't installed: pip install pagedmla[plots]")
    to_picture(found, tmp_path / "latents.png")
    assert (tmp_path / "latents.png").stat().st_size > 10_000


def test_scales_of_a_model_that_is_not_here(found: Calibration, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a model in a local folder .*; got somewhere/model\. Download it"):
        write_scales(found, tmp_path / "out")


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["calibrate", *arguments], env={"COLUMNS": "400", "TERM": "dumb"})
    assert done.exit_code == 2
    return " ".join(done.output.split())


def test_misuse(tmp_path: Path, model: Path) -> None:
    text = tmp_path / "text"
    text.write_text("some text")
    assert "does not exist" in invoke(str(model), "--text", str(tmp_path / "none"))
    assert "a folder that isn't there yet" in invoke(str(model), "--text", str(text), "--write-scales", str(tmp_path))
    assert "a model in a local folder" in invoke(
        "org/name", "--text", str(text), "--write-scales", str(tmp_path / "new")
    )


@pytest.fixture
def engine(found: Calibration, model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An engine that only finds: what it was asked for."""
    asked: list[str] = []

    def run(name: str, text: str, **_: object) -> Calibration:
        asked.append(name)
        return replace(found, model=name)

    monkeypatch.setattr("pagedmla.plugin.calibrate.calibrate", run)
    return asked


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text("some text")
    return tmp_path / "text"


@pytest.mark.parametrize(
    ("option", "target", "message"),
    [
        ("--json", "file/found.json", "file: expected a folder that files can be made in"),
        ("--json", "/proc/found.json", "/proc: expected a folder that files can be made in"),
        ("--json", "/proc/new/found.json", "/proc/new: expected a folder"),
        ("--json", "dangling", "expected a file, or none; got a link that leads nowhere"),
        ("--json", "scaled/found.json", "expected a place outside"),
        ("--write-scales", "file/scaled", "file: expected a folder"),
        ("--write-scales", "/proc/scaled", "/proc: expected a folder"),
        ("--write-scales", "dangling", "dangling: expected a folder that isn't there yet"),
        ("--write-scales", "model/scaled", "model/scaled: expected a folder outside the model's"),
        ("--write-scales", "model/sub/scaled", "expected a folder outside the model's"),
        ("--write-scales", "link/scaled", "link/scaled: expected a folder outside the model's"),
        ("--picture", "file/latents.png", "file: expected a folder"),
        ("--picture", "model", "model: expected a file; got a folder"),
        ("--picture", "latents", "latents: expected an ending that names the format: png, svg or pdf"),
        ("--picture", "latents.txt", "'txt' is not supported"),
    ],
)
def test_targets_are_looked_at_before_the_engine_runs(
    tmp_path: Path, model: Path, text: Path, engine: list[str], option: str, target: str, message: str
) -> None:
    """They were found out by a traceback, after an hour of the model's."""
    if option == "--picture":
        pytest.importorskip("matplotlib", reason="matplotlib isn't installed: pip install pagedmla[plots]")
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "link").symlink_to(model)
    others = {"--json": "found.json", "--write-scales": "scaled"}
    others[option] = target
    arguments = [word for name, path in others.items() for word in (name, str(tmp_path / path))]
    assert message in invoke(str(model), "--text", str(text), *arguments)
    assert engine == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dangling", "file", "link", "model", "text"]


def test_a_checkpoint_without_safetensors(tmp_path: Path, text: Path, engine: list[str]) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").touch()
    assert "old: expected *.safetensors to lay scales over; got none" in invoke(
        str(tmp_path / "old"), "--text", str(text), "--write-scales", str(tmp_path / "scaled")
    )
    assert engine == []


def test_what_can_be_written_is(
    tmp_path: Path, model: Path, text: Path, engine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full by then costs the file that it had no room for, and no other."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "found.json")

    arguments = (str(model), "--text", str(text), "--json", str(tmp_path / "new" / "found.json"))
    with monkeypatch.context() as patched:
        patched.setattr("pagedmla.plugin.calibrate.write_json", full)
        assert "No space left on device: 'found.json'" in invoke(*arguments, "--write-scales", str(tmp_path / "scaled"))
    assert set(read_scales(tmp_path / "scaled")) == {("model", 2), ("model", 10)}
    done = CliRunner().invoke(app, ["calibrate", *arguments, "--write-scales", str(tmp_path / "again")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "new" / "found.json").read_text())["model"] == str(model)
    assert engine == [str(model)] * 2


@pytest.mark.parametrize("margin", [float("inf"), float("nan"), 1e9, 0.5])
def test_a_margin_that_is_none(margin: float) -> None:
    """inf became scales that no loader takes."""
    with pytest.raises(ValueError, match=f"margin: expected 1 to 229376; got {margin}"):
        calibrate("model", "some text", margin=margin)


def test_a_margin_that_is_none_is_said(model: Path, text: Path) -> None:
    said = invoke(str(model), "--text", str(text), "--margin", "inf")
    assert "margin: expected 1 to 229376; got inf" in said


def test_an_engine_that_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A truncated file ended in a trace of 123 lines, which names no model."""

    class Engine:
        def __init__(self, **_: object) -> None:
            raise Exception("while loading\n  incomplete metadata, file not fully covered\n")

    vllm = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = Engine, None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(RuntimeError) as caught:
        _record(str(model), "some text", 8, 8, 1, 1.0)
    assert str(caught.value) == f"{model}: the engine failed: Exception: incomplete metadata, file not fully covered"
    assert _last_line(ValueError()) == "ValueError"


def test_without_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedmla.plugin.calibrate.find_spec", lambda name: None)
    text = tmp_path / "text"
    text.write_text("some text")
    assert "vLLM, which isn't installed: pip install pagedmla[vllm]" in invoke(str(tmp_path), "--text", str(text))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_lora_rank": 512, "index_topk": 2048}, "expected a dense MLA model .*sparse attention, DeepSeek V3.2"),
        ({"model_type": "llama"}, "expected an MLA model, whose config has kv_lora_rank; got model_type llama"),
    ],
)
def test_models_that_are_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object], message: str
) -> None:
    """The engine's own refusal stands at the end of a trace of a hundred lines."""
    from pagedmla.plugin.calibrate import _check_model

    engine = ModuleType("vllm.transformers_utils.config")
    engine.get_config = lambda model, trust_remote_code: SimpleNamespace(**config)  # type: ignore[attr-defined]
    for name, module in {
        "vllm": ModuleType("vllm"),
        "vllm.transformers_utils": ModuleType("vllm.transformers_utils"),
        "vllm.transformers_utils.config": engine,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ValueError, match=message):
        _check_model(str(tmp_path))
    with pytest.raises(ValueError, match="which isn't there"):
        _check_model(str(tmp_path / "nowhere"))

    def unknown(model: str, trust_remote_code: bool) -> None:
        raise ValueError("Invalid repository ID or local directory specified: 'typo'.\nPlease verify")

    engine.get_config = unknown  # type: ignore[attr-defined]
    with pytest.raises(Refusal, match=r"^typo: Invalid repository ID or local directory specified: 'typo'\.$"):
        _check_model("typo")


def test_an_empty_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedmla.plugin.calibrate.find_spec", lambda name: object())
    text = tmp_path / "text"
    text.write_text(" \n")
    assert "text: expected some text to read; got none" in invoke(str(tmp_path), "--text", str(text))


def test_the_pages_program_waits_for_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's processes read the program's file again: without a guard each began an engine of its own."""
    page = Path(__file__).parents[2] / "docs" / "operators.md"
    (script,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    vllm = ModuleType("vllm")
    vllm.LLM = vllm.SamplingParams = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    exec(script, {"__name__": "__mp_main__"})
    with pytest.raises(TypeError):
        exec(script, {"__name__": "__main__"})
