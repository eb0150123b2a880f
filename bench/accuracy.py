"""What each cache layout costs in accuracy: held-out text under the model of examples/tiny_model/.

    python bench/accuracy.py
    python bench/accuracy.py --json bench/results/accuracy-tiny.json

reference    the same weights in float32 over a float32 cache
perplexity   exp of the mean nats a byte; every layout reads the same text, so differences are paired
KL           from the reference's next-byte distribution to the layout's, at every byte of the true text
             (teacher-forced)
99%          the KL that 99% of the bytes stay below
agreement    how often both would write the same byte

The cache is the only thing that differs: latents and ropes pass through the layout's own quantize and dequantize.
Needs transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from pagedmla.bench.layout_cache import LayoutCache
from pagedmla.kv_cache.files import write_text
from pagedmla.kv_cache.layouts import CacheLayout, get_layout
from pagedmla.kv_cache.quantise import E4M3_MAX

MODEL = Path(__file__).parent.parent / "examples" / "tiny_model"
END_OF_DOCUMENT = "\f"  # in held_out.txt
BATCH = 4  # windows
STYLE: dict[str, Any] = {"box": SIMPLE, "pad_edge": False, "padding": (0, 1, 0, 0)}


@dataclass(frozen=True)
class Candidate:
    """A layout and where its scales come from; `sigmas` is one scale a layer, None measures them."""

    name: str
    layout: CacheLayout
    sigmas: Sequence[float] | None = None


@dataclass(frozen=True)
class Accuracy:
    """One row of the table; KL in nats a byte, with the standard error of its mean over windows."""

    name: str
    bytes_per_token: int
    perplexity: float
    bits_per_byte: float
    kl: float
    kl_error: float
    kl_99th: float
    agreement: float


@dataclass(frozen=True)
class RowStatistics:
    """What one layer puts into the cache. A channel's size is its root mean square over the text."""

    layer: int
    latent_rms: float
    latent_largest: float
    latent_channel_spread: float  # size of the largest channel over the median channel's
    rope_rms: float
    rope_largest: float
    rope_channel_spread: float


def load(folder: Path = MODEL) -> Any:
    """The model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def held_out_windows(folder: Path = MODEL, length: int = 512, most_bytes: int | None = None) -> Tensor:
    """`[windows, length + 1]` tokens of held_out.txt: documents end to end, each behind the END token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = (folder / "held_out.txt").read_text(encoding="utf-8").split(END_OF_DOCUMENT)
    tokens = [token for text in documents for token in (tokenizer.bos_token_id, *tokenizer(text)["input_ids"])]
    return torch.tensor(tokens[:most_bytes]).unfold(0, length + 1, length)


@torch.no_grad()
def log_probabilities(model: Any, windows: Tensor, candidate: Candidate | None = None) -> Tensor:
    """`[windows, length, vocabulary]` float32 of every next token; without a candidate, the reference's."""
    found = []
    for batch in windows[:, :-1].split(BATCH):
        cache = DynamicCache() if candidate is None else LayoutCache(candidate.layout, candidate.sigmas)
        found.append(model(batch, past_key_values=cache).logits.log_softmax(-1))
    return torch.cat(found)


@torch.no_grad()
def cached_rows(model: Any, windows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each layer, the latents `[tokens, 512]` and the rotated ropes `[tokens, 64]` of the reference."""
    batches: list[list[tuple[Tensor, Tensor]]] = []
    for batch in windows[:, :-1].split(BATCH):
        cache = DynamicCache()
        model.model(batch, past_key_values=cache)
        batches.append([(layer.keys.flatten(0, 2), layer.values.flatten(0, 2)) for layer in cache.layers])
    return [(torch.cat(latents), torch.cat(ropes)) for latents, ropes in (zip(*layer) for layer in zip(*batches))]


def candidates(rows: list[tuple[Tensor, Tensor]]) -> list[Candidate]:
    """Every layout, and `fp8_flat` with scales from coarse to fine.

    The fitted scale is the largest number of `rows`, a layer's, over e4m3's maximum. Taken from the measured text
    itself, it is the best that one scale a tensor can know.
    """
    fitted = [float(max(latent.abs().max(), rope.abs().max())) / E4M3_MAX for latent, rope in rows]
    flat = get_layout("fp8_flat")
    return [
        Candidate("bf16", get_layout("bf16")),
        Candidate("fp16", get_layout("fp16")),
        Candidate("fp8_rope_bf16", get_layout("fp8_rope_bf16")),
        Candidate("fp8_rope_bf16_prescaled", get_layout("fp8_rope_bf16_prescaled")),
        Candidate("fp8_ds_mla", get_layout("fp8_ds_mla")),
        Candidate("fp8_flat, 64 columns a scale", get_layout("fp8_flat", granularity=64)),
        Candidate("fp8_flat, a scale a token", flat),
        Candidate("fp8_flat per tensor, fitted", flat, fitted),
        Candidate("fp8_flat per tensor, scale 1", flat, [1.0] * len(rows)),
    ]


def compare(candidate: Candidate, found: Tensor, reference: Tensor, windows: Tensor) -> Accuracy:
    """`found` and `reference` are log-probabilities `[windows, length, vocabulary]`."""
    nats = -found.gather(-1, windows[:, 1:, None]).double().mean().item()
    # Not clamped at 0: rounding errors of single bytes cancel in the mean.
    kl = (reference.double().exp() * (reference.double() - found.double())).sum(-1)  # [windows, length]
    # One scale for a tensor takes no room in a row.
    size = candidate.layout.row_bytes if candidate.sigmas is not None else candidate.layout.bytes_per_token
    return Accuracy(
        name=candidate.name,
        bytes_per_token=size,
        perplexity=math.exp(nats),
        bits_per_byte=nats / math.log(2),
        kl=kl.mean().item(),
        kl_error=kl.mean(-1).std().item() / len(windows) ** 0.5,
        kl_99th=kl.flatten().quantile(0.99).item(),
        agreement=(found.argmax(-1) == reference.argmax(-1)).double().mean().item(),
    )


def statistics(rows: list[tuple[Tensor, Tensor]]) -> list[RowStatistics]:
    def described(rows: Tensor) -> tuple[float, float, float]:
        channels = rows.square().mean(0).sqrt()
        spread = channels.max() / channels.median()
        return rows.square().mean().sqrt().item(), rows.abs().max().item(), spread.item()

    return [RowStatistics(index, *described(latent), *described(rope)) for index, (latent, rope) in enumerate(rows)]


def measure(model: Any, windows: Tensor) -> tuple[list[Accuracy], list[RowStatistics]]:
    """The table, its first row the reference, and what the cached rows look like."""
    rows = cached_rows(model, windows)
    reference = log_probabilities(model, windows)
    found = [compare(Candidate("fp32 (reference)", get_layout("fp32")), reference, reference, windows)]
    for candidate in track(candidates(rows), "layouts", console=Console(stderr=True), transient=True):
        found.append(compare(candidate, log_probabilities(model, windows, candidate), reference, windows))
    return found, statistics(rows)


def accuracy_table(found: list[Accuracy]) -> Table:
    table = Table(title="held-out text through each cache layout; KL in thousandths of a nat a byte", **STYLE)
    for heading in ("cache", "bytes", "perplexity", "KL", "99%", "agree"):
        table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=True)
    for row in found:
        table.add_row(
            row.name,
            str(row.bytes_per_token),
            f"{row.perplexity:.4f}",
            f"{1e3 * row.kl:.3f} ± {1e3 * row.kl_error:.3f}",
            f"{1e3 * row.kl_99th:.2f}",
            f"{row.agreement:.2%}",
        )
    return table


def statistics_table(found: list[RowStatistics]) -> Table:
    table = Table(title="what a layer caches; channels: the largest one over the median one", **STYLE)
    for heading in ("layer", "latent rms", "largest", "channels", "rope rms", "largest", "channels"):
        table.add_column(heading, justify="right")
    for row in found:
        index, *numbers = asdict(row).values()
        table.add_row(str(index), *(f"{number:.2f}" for number in numbers))
    return table


def main(
    model: Annotated[Path, typer.Option(help="A DeepSeek-V3-shaped checkpoint with a held_out.txt.")] = MODEL,
    window: Annotated[int, typer.Option(help="Tokens of context.")] = 512,
    most_bytes: Annotated[int | None, typer.Option(help="Read only so much of the text.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Perplexity and KL of every cache layout."""
    windows = held_out_windows(model, window, most_bytes)
    found, rows = measure(load(model), windows)
    console = Console()
    console.print(accuracy_table(found))
    console.print(statistics_table(rows))
    if as_json is not None:
        content = {
            "window": window,
            "bytes": windows[:, 1:].numel(),
            "torch": torch.__version__,
            "accuracy": [asdict(row) for row in found],
            "cached_rows": [asdict(row) for row in rows],
        }
        write_text(as_json, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
