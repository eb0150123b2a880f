"""The trained model of examples/tiny_model/: that it can be had, that it learnt, and what the cache layouts cost it.

Bounds stand on these figures: a table of byte pairs needs 3.6 bits for a byte of such text, so a model below BITS has
learnt words; the recorded table covers the whole held-out text, the recomputed one a slice that fits a test run.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny_model"
RECORD = ROOT / "bench" / "results" / "accuracy-tiny.json"

MOST_BYTES = 12 << 20
BITS = 3.0
SLICE = 4097  # tokens: 8 windows of 512

OWN, PER_TENSOR = "fp8_rope_bf16", ("fp8_flat per tensor, scale 1", "fp8_flat per tensor, fitted")


@pytest.fixture(scope="module")
def accuracy() -> Any:
    pytest.importorskip("transformers", reason="transformers isn't installed: `make test-engine` installs it")
    sys.path.insert(0, str(ROOT / "bench"))
    import accuracy

    return accuracy


@pytest.fixture(scope="module")
def model(accuracy: Any) -> Any:
    return accuracy.load(MODEL)


@pytest.fixture(scope="module")
def recomputed(accuracy: Any, model: Any) -> dict[str, Any]:
    found, _ = accuracy.measure(model, accuracy.held_out_windows(MODEL, most_bytes=SLICE))
    return {row.name: asdict(row) for row in found}


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(RECORD.read_text())["accuracy"]}


def test_fits_into_the_repository() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < MOST_BYTES


def test_has_the_shape_of_the_real_models(model: Any) -> None:
    config = model.config
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim) == (512, 64, 128)
    assert config.rope_parameters["rope_type"] == "yarn"


def test_a_token_is_a_byte(accuracy: Any) -> None:
    tokenizer = accuracy.AutoTokenizer.from_pretrained(MODEL)
    text = bytes(range(128)).decode() + "é 中 \U0001f600"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 256


def test_held_out_text_is_what_training_held_out(accuracy: Any) -> None:
    windows = accuracy.held_out_windows(MODEL, length=1)
    assert len(windows) + 1 == json.loads((MODEL / "training.json").read_text())["held_out_tokens"]


def test_predicts_held_out_text(recomputed: dict[str, Any]) -> None:
    assert recomputed["fp32 (reference)"]["bits_per_byte"] < BITS


def test_writes_words(accuracy: Any, model: Any) -> None:
    """Greedy text, the words of which (three letters or more) are mostly those of the held-out text."""
    tokenizer = accuracy.AutoTokenizer.from_pretrained(MODEL)
    known = set(re.findall(r"[a-z]{3,}", (MODEL / "held_out.txt").read_text(encoding="utf-8").lower()))
    prompts = ["The ", "Return the ", "def open("]
    words = []
    for prompt in prompts:
        start = accuracy.torch.tensor([[tokenizer.bos_token_id, *tokenizer(prompt)["input_ids"]]])
        made = model.generate(start, max_new_tokens=60, do_sample=False)[0, start.shape[1] :]
        # Bytes that end the piece may have cut a word.
        words += re.findall(r"[a-z]{3,}(?=[^a-z])", tokenizer.decode(made).lower())
    assert len(words) >= 10
    assert sum(word in known for word in words) >= 0.8 * len(words)


@pytest.mark.parametrize("per_tensor", PER_TENSOR)
@pytest.mark.parametrize("figures", ["recorded", "recomputed"])
def test_own_format_loses_less_than_one_scale_a_tensor(
    figures: str, per_tensor: str, request: pytest.FixtureRequest
) -> None:
    """By far more than chance: each mean lies three of its standard errors from the middle."""
    rows = request.getfixturevalue(figures)
    own, other = rows[OWN], rows[per_tensor]
    middle = (own["kl"] + other["kl"]) / 2
    assert own["kl"] + 3 * own["kl_error"] < middle < other["kl"] - 3 * other["kl_error"]


def test_recorded_figures_are_those_of_this_checkpoint(
    accuracy: Any, model: Any, recorded: dict[str, Any], recomputed: dict[str, Any]
) -> None:
    """The record covers other text than the slice, so the model's bits a byte are computed again over all of it."""
    assert recorded.keys() == recomputed.keys()
    record = json.loads(RECORD.read_text())
    windows = accuracy.held_out_windows(MODEL, record["window"], record["bytes"] + 1)
    reference = accuracy.log_probabilities(model, windows)
    bits = -reference.gather(-1, windows[:, 1:, None]).mean().item() / 0.693147
    assert bits == pytest.approx(recorded["fp32 (reference)"]["bits_per_byte"], rel=1e-4)
