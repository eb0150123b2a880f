"""`pagedmla calibrate`: a model's latents on given text, read in the real engine, and what each layout makes of them.

The engine is vLLM with this backend over an unquantised cache, so what is read is what the model computes, layer by
layer, as `store` gets it. Statistics are made where the latents are, in the engine's worker.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedmla.kv_cache.checks import Refusal, ceildiv, counted, quoted, refuse
from pagedmla.kv_cache.files import expect_file, write_text
from pagedmla.kv_cache.quantise import E4M3_MAX
from pagedmla.plugin.checkpoint_scales import check_overlay, lay_over
from pagedmla.plugin.latent_statistics import MOST_ERROR, LayerStatistics, PerTensor, overall
from pagedmla.plugin.palette import BLUE, GREEN, PURPLE, SKY_BLUE, VERMILION, YELLOW
from pagedmla.plugin.pictures import expect_picture, new_figure, write_picture

if TYPE_CHECKING:
    from rich.table import Table

RECORDER = "pagedmla.plugin.vllm.recorder.RecordsExtension"
MOST_MARGIN = E4M3_MAX * 2.0**9  # there the largest number has the smallest code, and all others go to 0
_LAYER_MARK = ".layers."


class EngineFailure(RuntimeError):
    """The engine that reads the text broke off: with its own last line."""


@dataclass(frozen=True)
class Calibration:
    """What the layers of a model cache for `tokens` tokens of text; fitted scales are `margin` times what they hold."""

    model: str
    tokens: int
    margin: float
    layers: tuple[LayerStatistics, ...]

    @property
    def recommended(self) -> str:
        return overall(list(self.layers))

    def scales(self) -> dict[int, float]:
        """The fitted per-tensor scale of each layer, by its number."""
        return {number_of(each.layer): each.fitted.scale for each in self.layers}

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "tokens": self.tokens,
            "margin": self.margin,
            "recommended": self.recommended,
            "layers": [each.to_dict() for each in self.layers],
        }


def calibrate(
    model: str, text: str, *, tokens: int = 4096, window: int = 1024, tensor_parallel: int = 1, margin: float = 1.0
) -> Calibration:
    """Statistics of the latents that `model` (a folder, or a name that vLLM knows) caches for the start of `text`.

    tokens    of the text that are read, in pieces of `window`
    margin    of the fitted scale over the largest number, from 1 to MOST_MARGIN

    ImportError without vLLM, ValueError for a model that isn't dense MLA and for too little text, EngineFailure where
    the engine fails.
    """
    if not 1 <= margin <= MOST_MARGIN:
        raise Refusal(f"margin: expected 1 to {MOST_MARGIN:.0f}; got {margin}")
    if find_spec("vllm") is None:
        raise ImportError("calibrate runs the model in vLLM, which isn't installed: pip install pagedmla[vllm]")
    if not text.strip():
        raise Refusal("text: expected some text to read; got none")
    _prepare_environment()
    _check_model(model)
    read, found = _record(model, text, tokens, window, tensor_parallel, margin)
    layers = sorted(
        (LayerStatistics.from_dict(each) for each in found.values()), key=lambda each: number_of(each.layer)
    )
    return Calibration(model, read, margin, tuple(layers))


def _record(
    model: str, text: str, tokens: int, window: int, tensor_parallel: int, margin: float
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the engine: how many tokens it read, and what its workers made of each layer."""
    from vllm import LLM, SamplingParams

    try:
        engine = LLM(
            model=model,
            attention_backend="CUSTOM",
            kv_cache_dtype="auto",
            max_model_len=window + 1,
            max_num_batched_tokens=window,
            max_num_seqs=1,
            tensor_parallel_size=tensor_parallel,
            enable_prefix_caching=False,  # a page that is found again isn't stored again
            enforce_eager=True,  # a captured graph's stores aren't seen
            worker_extension_cls=RECORDER,
        )
        read = engine.get_tokenizer().encode(text)[:tokens]
        pieces = [read[start : start + window] for start in range(0, len(read), window)]
        if len(read) > 1:
            engine.collective_rpc("pagedmla_record", args=(len(read),))
            one_token = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            engine.generate([{"prompt_token_ids": piece} for piece in pieces], one_token, use_tqdm=False)
            # Ranks of a tensor-parallel group store the same latents.
            workers = engine.collective_rpc("pagedmla_recorded", args=(margin,))
    except Exception as error:  # of whatever kind, at the end of a hundred lines
        raise EngineFailure(f"{model}: the engine failed: {_last_line(error)}") from error
    if len(read) < 2:
        raise Refusal(f"text: expected at least 2 tokens; got {counted(len(read), 'token')}")
    return len(read), {name: each for worker in workers for name, each in worker.items()}


def _last_line(error: Exception) -> str:
    """What it says at the end, but for the address that pydantic puts there."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("For further information visit")]
    return f"{type(error).__name__}: {said[-1]}" if said else type(error).__name__


def number_of(layer: str) -> int:
    """3 of model.layers.3.self_attn.attn"""
    _, mark, behind = f".{layer}".partition(_LAYER_MARK)
    number = behind.split(".", 1)[0]
    if not mark or not number.isdecimal():
        refuse("layer", "a name with the layer's number, as model.layers.3.self_attn.attn", quoted(layer))
    return int(number)


def read_text(file: Path) -> str:
    """ValueError where it isn't UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise Refusal(f"{file}: expected text in UTF-8; got {where}") from None


def check_targets(model: str, scales: Path | None, json_file: Path | None, picture: Path | None) -> None:
    """Refuse what couldn't be written, before the engine has run for it. Makes the folders that targets lie in.

    ValueError, ImportError or OSError, which name the target.
    """
    if scales is not None:
        check_overlay(Path(model), scales)
    for file in (json_file, picture):
        if file is None:
            continue
        if scales is not None and Path(os.path.realpath(file)).is_relative_to(os.path.realpath(scales)):
            raise Refusal(f"{file}: expected a place outside {scales}, which is made new")
        expect_file(file)
    if picture is not None:
        expect_picture(picture)


def write_scales(calibration: Calibration, folder: Path) -> None:
    """Lay the fitted scales over the model, in a new folder. ValueError where the model isn't a local folder."""
    lay_over(Path(calibration.model), folder, calibration.scales())


def write_json(calibration: Calibration, file: Path) -> None:
    write_text(file, json.dumps(calibration.to_dict(), indent=1, allow_nan=False) + "\n")


def _prepare_environment() -> None:
    """In this process, so that errors are its own; without a GPU, on the CPU."""
    import torch

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # of a text longer than a request, which is cut
    if not torch.cuda.is_available():
        os.environ.setdefault("PAGEDMLA_CPU_PLATFORM", "1")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB: one request of a window


def _check_model(model: str) -> None:
    """What the engine would say too, but at the end of a long trace."""
    from vllm.transformers_utils.config import get_config

    if not Path(model).exists() and model.startswith(("/", ".", "~")):
        raise Refusal(f"model: expected a folder with a checkpoint, or a name of one; got {model}, which isn't there")
    try:
        config = get_config(model, trust_remote_code=False)
    except (ValueError, RuntimeError) as error:  # vLLM's and transformers' for a name or a config
        raise Refusal(f"{model}: {str(error).strip().splitlines()[0]}") from error
    if getattr(config, "index_topk", None) is not None:
        raise Refusal(
            f"{model}: expected a dense MLA model (DeepSeek V2, V3, R1); this one selects its keys by an indexer "
            "(sparse attention, DeepSeek V3.2 and later), which pagedmla doesn't serve"
        )
    if not getattr(config, "kv_lora_rank", None):
        kind = getattr(config, "model_type", "unknown")
        raise Refusal(f"{model}: expected an MLA model, whose config has kv_lora_rank; got model_type {kind}")


def tables(calibration: Calibration) -> list[Table]:
    """Ranges and the per-tensor scale, then errors, a row a layer."""
    from rich.box import SIMPLE
    from rich.table import Table

    title = f"{calibration.model}, {calibration.tokens} tokens"
    ranges = Table(title=f"{title}: ranges, and one scale for the tensor", box=SIMPLE, title_justify="left")
    errors = Table(title="relative error, latent / rope", box=SIMPLE, title_justify="left")
    for heading in ("layer", "latent amax", "rope amax", "lost at 1", "scale", "lost at it"):
        ranges.add_column(heading, justify="right")
    for heading in ("layer", *calibration.layers[0].layouts, "per tensor, 1", "per tensor, fitted", "recommended"):
        errors.add_column(heading, justify="right")
    for each in calibration.layers:
        number = str(number_of(each.layer))
        ranges.add_row(
            number,
            f"{each.latent_amax:.3g}",
            f"{each.rope_amax:.3g}",
            _lost(each.unit),
            f"{each.fitted.scale:.3g}",
            _lost(each.fitted),
        )
        columns = (*each.layouts.values(), each.unit.errors, each.fitted.errors)
        errors.add_row(number, *(f"{one.latent:.2%} / {one.rope:.2%}" for one in columns), each.recommended)
    return [ranges, errors]


def verdict(calibration: Calibration) -> str:
    """The layout for all layers, and the reason of the first that needs it."""
    name = calibration.recommended
    first = next(each for each in calibration.layers if each.recommended == name)
    return f"recommended: {name} (layer {number_of(first.layer)}: {first.reason})"


def to_picture(calibration: Calibration, path: str | PathLike[str]) -> None:
    """Draw ranges and errors of all layers into `path`, in the format that its ending names.

    ImportError names the extra where matplotlib is missing.
    """
    figure = new_figure(9, 6)
    numbers = [number_of(each.layer) for each in calibration.layers]
    ranges, errors = figure.subplots(2, 1, sharex=True)
    ranges.plot(numbers, [each.latent_amax for each in calibration.layers], "o-", label="latent", color=BLUE)
    ranges.plot(numbers, [each.rope_amax for each in calibration.layers], "s-", label="rope", color=VERMILION)
    ranges.axhline(E4M3_MAX, color="black", linestyle=":", label="448: the largest number at scale 1")
    ranges.set(yscale="log", ylabel="largest |value|")
    curves = {
        "latent, a scale a token": [each.layouts["fp8_rope_bf16"].latent for each in calibration.layers],
        "latent, a scale for 128 columns": [each.layouts["fp8_ds_mla"].latent for each in calibration.layers],
        "latent, per tensor at 1": [each.unit.errors.latent for each in calibration.layers],
        "rope, per tensor at 1": [each.unit.errors.rope for each in calibration.layers],
        "latent, per tensor, fitted": [each.fitted.errors.latent for each in calibration.layers],
        "rope, per tensor, fitted": [each.fitted.errors.rope for each in calibration.layers],
    }
    colours = (BLUE, SKY_BLUE, GREEN, YELLOW, PURPLE, VERMILION)
    for (label, values), colour, mark in zip(curves.items(), colours, "ov^<s>", strict=True):
        errors.plot(numbers, values, marker=mark, label=label, color=colour, alpha=0.8)
    errors.axhline(MOST_ERROR, color="black", linestyle=":", label=f"{MOST_ERROR:.0%}: more asks for a finer scale")
    errors.set(yscale="log", ylim=(0.01, 1.5), xlabel="layer", ylabel="relative error")
    errors.set_xticks(numbers[:: ceildiv(len(numbers), 16)])
    for axes in (ranges, errors):
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"{calibration.model}, {calibration.tokens} tokens: {calibration.recommended}", fontsize=10)
    write_picture(figure, path)


def _lost(one: PerTensor) -> str:
    return f"{one.saturated:.2%} beyond, {one.vanished:.2%} to 0"
