"""What each form of the CUTLASS kernels costs in accuracy: held-out text through the real vLLM engine, without a GPU.

    .venv-engine/bin/python bench/accuracy_forms.py
    .venv-engine/bin/python bench/accuracy_forms.py --windows 8 --json bench/results/accuracy-forms.json

forms      fp16, fp8x2 and fp8 of `executor="cutlass-model"`, the kernels' executable model: what they round, not what
           they run on
text       windows of examples/tiny_model/held_out.txt, teacher-forced: a prompt goes in steps of STEP_TOKENS tokens,
           which the engine takes for drafts to verify, so each step is a decode call of every layer. 4 heads make
           64 rows of that, the smallest tile that `fp8` is built for
scored     next bytes behind more than CONTEXT keys
costs      of the cache: KL from a bf16 cache, `torch` over both. Of the form: KL from `torch`, which multiplies in
           float32, over the same FP8 cache
floor      the model is served in bf16 (the kernels take nothing wider), so two exact executors differ too, by roundings
           that a sum in another order tips over: `reference`, in float64, shows how much

Each setting is an engine in a process of its own. Run it as a script: an engine mustn't see the checkout on sys.path.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

MODEL = Path(__file__).parent.parent / "examples" / "tiny_model"
END_OF_DOCUMENT = "\f"  # in held_out.txt
CONTEXT = 512  # keys: from here on "auto" takes e4m3 weights
WINDOW = 1024
STEP_TOKENS = 16
BLOCK = 64  # scored bytes; neighbours aren't independent
OWN_CACHE = "fp8_per_token_head"  # fp8_rope_bf16, by the name that releases before 0.33 take
ENVIRONMENT = {
    "PAGEDMLA_CPU_PLATFORM": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Setting:
    name: str
    cache: str
    executor: str
    precision: str = "auto"


EXACT_BF16 = Setting("bf16 cache, torch", "auto", "torch")
EXACT_FP8 = Setting("fp8_rope_bf16, torch", OWN_CACHE, "torch")
SETTINGS = (
    EXACT_BF16,
    EXACT_FP8,
    Setting("fp8_rope_bf16, reference", OWN_CACHE, "reference"),
    Setting("fp8_rope_bf16, fp16", OWN_CACHE, "cutlass-model", "fp16"),
    Setting("fp8_rope_bf16, fp8x2", OWN_CACHE, "cutlass-model", "fp8x2"),
    Setting("fp8_rope_bf16, fp8", OWN_CACHE, "cutlass-model", "fp8"),
)


@dataclass(frozen=True)
class Distance:
    """Between two settings over the same text: KL in nats a byte, and its standard error over blocks of BLOCK bytes."""

    kl: float
    kl_error: float
    same_next_byte: float


@dataclass(frozen=True)
class Row:
    setting: Setting
    perplexity: float
    from_bf16_cache: Distance
    from_torch: Distance  # over the same cache


def windows_of(text: str, encode: Any, count: int, length: int) -> list[list[int]]:
    """`count` windows of `length` + 1 tokens, one after the other: documents end to end."""
    tokens = [token for document in text.split(END_OF_DOCUMENT) for token in encode("<|end|>" + document)]
    starts = range(0, len(tokens) - length, length)
    if not 1 <= count <= len(starts):
        raise typer.BadParameter(f"expected 1 to {len(starts)} windows of {length} bytes; got {count}")
    return [tokens[start : start + length + 1] for start in starts[:count]]


def served(setting: Setting, count: int, length: int) -> tuple[Tensor, Tensor, float]:
    """(log-probabilities `[windows, scored, vocabulary]` float32, the true next tokens, seconds) of one engine.

    RuntimeError where a layer's decode steps ran on another executor, or weren't decode steps.
    """
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(MODEL),
        attention_backend="CUSTOM",
        kv_cache_dtype=setting.cache,
        block_size=64,
        dtype="bfloat16",
        hf_overrides={"head_dtype": "float32"},  # else logits are rounded to bf16, which hides what is measured
        max_model_len=length + 64,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=1,
        max_logprobs=-1,
        enable_prefix_caching=False,
        enforce_eager=True,
        use_tqdm_on_load=False,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": STEP_TOKENS - 1,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        },
        worker_extension_cls="pagedmla.plugin.vllm.counters.CountsExtension",
    )
    windows = windows_of((MODEL / "held_out.txt").read_text(), engine.get_tokenizer().encode, count, length)
    engine.collective_rpc("pagedmla_counts", args=(True,))
    asked = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False, flat_logprobs=True)
    started = time.perf_counter()
    found = []
    for window in windows:
        (output,) = engine.generate([{"prompt_token_ids": window}], asked, use_tqdm=False)
        steps = [output.prompt_logprobs[position] for position in range(CONTEXT + 1, len(window))]
        found.append(torch.tensor([[step[token].logprob for token in range(len(step))] for step in steps]))
    seconds = time.perf_counter() - started
    _check_calls(setting, engine.collective_rpc("pagedmla_counts")[0], len(windows) * -(-(length + 1) // STEP_TOKENS))
    return torch.stack(found), torch.tensor(windows)[:, CONTEXT + 1 :], seconds


def _check_calls(setting: Setting, calls: list[tuple[str, str, str, int]], steps: int) -> None:
    attended = {(kind, executor, number) for _, kind, executor, number in calls if kind != "store"}
    if attended != {("decode", setting.executor, steps)}:
        raise RuntimeError(f"{setting.name}: expected {steps} decode calls of {setting.executor} a layer; got {calls}")


def distance(found: Tensor, reference: Tensor) -> Distance:
    found, reference = found.double(), reference.double()
    kl = (reference.exp() * (reference - found)).sum(-1).unfold(-1, BLOCK, BLOCK).mean(-1).flatten()  # a block each
    error = kl.std().item() / len(kl) ** 0.5
    return Distance(kl.mean().item(), error, (found.argmax(-1) == reference.argmax(-1)).double().mean().item())


def measure(count: int, length: int, console: Console) -> list[Row]:
    """A row for each of SETTINGS."""
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    results: dict[str, Tensor] = {}
    rows = []
    for setting in SETTINGS:
        os.environ["PAGEDMLA_EXECUTORS"], os.environ["PAGEDMLA_PRECISION"] = setting.executor, setting.precision
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found, tokens, seconds = process.submit(served, setting, count, length).result()
        results[setting.name] = found
        exact = results[(EXACT_BF16 if setting is EXACT_BF16 else EXACT_FP8).name]
        nats = -found.double().gather(-1, tokens[..., None]).mean()
        between = distance(found, results[EXACT_BF16.name]), distance(found, exact)
        rows.append(Row(setting, nats.exp().item(), *between))
        console.print(f"{setting.name}: {seconds:.0f} s")
    return rows


def accuracy_table(rows: list[Row]) -> Table:
    style: dict[str, Any] = {"box": SIMPLE, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title="held-out text through the engine; KL in thousandths of a nat a byte", **style)
    for heading in ("cache, form", "perplexity", "KL from bf16 cache", "same", "KL from torch", "same"):
        table.add_column(heading, justify="left" if heading == "cache, form" else "right", no_wrap=True)
    for row in rows:
        cells = []
        for each in (row.from_bf16_cache, row.from_torch):
            cells += [f"{1e3 * each.kl:.3f} ± {1e3 * each.kl_error:.3f}", f"{each.same_next_byte:.2%}"]
        table.add_row(row.setting.name, f"{row.perplexity:.4f}", *cells)
    return table


def main(
    windows: Annotated[int, typer.Option(help="Windows of text.")] = 2,
    window: Annotated[int, typer.Option(min=CONTEXT + 2 * BLOCK, max=1984, help="Bytes of each.")] = WINDOW,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """KL and next byte of each form of the CUTLASS kernels, through the engine."""
    import vllm

    from pagedmla.kv_cache.files import write_text

    rows = measure(windows, window, Console(stderr=True))
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(accuracy_table(rows))
    if as_json is not None:
        content = {
            "window": window,
            "windows": windows,
            "scored_bytes": windows * (window - CONTEXT),
            "least_keys": CONTEXT + 1,
            "query_tokens_a_step": STEP_TOKENS,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "rows": [asdict(row) for row in rows],
        }
        write_text(as_json, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
