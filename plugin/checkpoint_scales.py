"""A checkpoint's scale of each layer's cache, `k_scale`: read, or laid over a checkpoint that isn't touched.

Written and read by the name that quantisation tools give it, one float32 a layer:

    model.layers.N.self_attn.k_proj.k_scale     or language_model.model.layers.N..., where a model has other parts too

The language model's layers are those whose attention has a latent's projection (`kv_b_proj`): towers that see or hear
have layers of the same numbers, which may have scales too, and attention of another kind.

The safetensors format in short: the header's length (8 bytes, little endian), the header as JSON, {name: {dtype, shape,
data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pagedmla.kv_cache.checks import Refusal, quoted
from pagedmla.kv_cache.files import expect_folder

INDEX = "model.safetensors.index.json"
SHARD = "model-kv-scales.safetensors"

_ATTENTION = r"(?:(.*)\.)?layers\.(\d+)\.self_attn\."
_LATENT = re.compile(_ATTENTION + r"(?:kv_b_proj|kv_a_proj_with_mqa)\.")
_SCALE = re.compile(_ATTENTION + r"(?:k_proj\.|attn\.|mla_attn\.)*k_scale$")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_scales(model: Path) -> dict[tuple[str, int], float]:
    """The scale of each MLA layer that has one, by what stands before `layers` in its name, and its number.

    ValueError where one isn't a single finite float32 above 0, or where two names of one layer disagree.
    """
    found: dict[tuple[str, int], float] = {}
    names = _names(model)
    for name, layer in _scale_names(names).items():
        file = names[name]
        scale = _expect_float32(_read_number(model / file, name), f"{model / file}: expected {name}")
        if found.setdefault(layer, scale) != scale:
            raise Refusal(f"{model / file}: expected one k_scale for layer {layer[1]}; got {found[layer]} and {scale}")
    return found


def lay_over(model: Path, out: Path, scales: Mapping[int, float]) -> None:
    """Make `out` the checkpoint `model` with these scales: links to its files, one more shard, and an index of all.

    `model` itself stays as it is, and must stay where it is. Scales that it has already are left out of the index.
    `out` is there whole or not at all. Raises what `check_overlay` does, and ValueError for a layer that the model
    doesn't have, or a scale that float32 doesn't hold as a finite number > 0.
    """
    check_overlay(model, out)
    names = _names(model)
    made = {}
    for layer, scale in sorted(scales.items()):
        name = _name_of_scale(model, names, layer)
        made[name] = _expect_float32(scale, f"{out}: expected {name}")
    replaced = _scale_names(names)
    index = _read_index(model)
    kept = {name: file for name, file in names.items() if name not in replaced}
    index["weight_map"] = {**kept, **dict.fromkeys(made, SHARD)}
    # Half a checkpoint would be served too, at a scale of 1.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        folder = Path(beside) / out.name  # of its own mode: `beside` is closed to other users
        folder.mkdir()
        for file in sorted(model.iterdir()):
            if file.name not in (INDEX, SHARD):
                (folder / file.name).symlink_to(os.path.realpath(file))
        _write_numbers(folder / SHARD, made)
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        folder.rename(out)


def check_overlay(model: Path, out: Path) -> None:
    """Make `out`'s parent, and refuse what `lay_over` can't do, whatever the scales.

    ValueError where `model` is no local folder or has no MLA layers in safetensors, or `out` would lie in it;
    FileExistsError where `out` is there already; OSError where it can't be made.
    """
    if not model.is_dir():
        raise Refusal(f"expected a model in a local folder to lay scales over; got {model}. Download it first")
    if os.path.lexists(out):
        raise FileExistsError(f"{out}: expected a folder that isn't there yet")
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(model)):
        raise Refusal(f"{out}: expected a folder outside the model's, {model}, whose files it links to")
    names = _names(model)
    if not names:
        raise Refusal(f"{model}: expected *.safetensors to lay scales over; got none")
    if not _layers(_LATENT, names):
        raise Refusal(f"{model}: expected MLA layers (layers.N.self_attn.kv_b_proj) to lay scales over; got none")
    expect_folder(out.parent)


def _layers(pattern: re.Pattern[str], names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """The names that match, and the layer of each: what stands before `layers`, and its number."""
    return {name: (matched[1] or "", int(matched[2])) for name in names if (matched := pattern.match(name))}


def _scale_names(names: Collection[str]) -> dict[str, tuple[str, int]]:
    """Which of a checkpoint's tensors are scales of an MLA layer, and of which."""
    latent = set(_layers(_LATENT, names).values())
    return {name: layer for name, layer in _layers(_SCALE, names).items() if layer in latent}


def _name_of_scale(model: Path, names: Iterable[str], number: int) -> str:
    """Of layer `number`, beside the checkpoint's own names of it."""
    prefixes = sorted({prefix for prefix, each in _layers(_LATENT, names).values() if each == number})
    if len(prefixes) != 1:
        got = " and ".join(f"{prefix}.layers.{number}".lstrip(".") for prefix in prefixes) or "none"
        raise Refusal(f"{model}: expected one MLA layer {number} to lay a scale over; got {got}")
    return f"{prefixes[0]}.layers.{number}.self_attn.k_proj.k_scale".lstrip(".")


def _names(model: Path) -> dict[str, str]:
    """Tensors of a checkpoint, and the file of each."""
    index = _read_index(model)
    if "weight_map" in index:
        names = index["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise Refusal(f"{model / INDEX}: expected weight_map as {{tensor: file}}; got {quoted(names)}")
        return names
    files = sorted(model.glob("*.safetensors"))
    return {name: file.name for file in files for name in _read_header(file)[0] if name != "__metadata__"}


def _read_index(model: Path) -> dict[str, Any]:
    file = model / INDEX
    if not file.is_file():
        return {"metadata": {}}
    return _parsed(file, file.read_bytes())


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header and where the data begin."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= file.stat().st_size - 8:
            raise Refusal(f"{file}: expected a safetensors file; got a header of {length} bytes")
        return _parsed(file, opened.read(length)), 8 + length


def _parsed(file: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as damage:
        raise Refusal(f"{file}: expected JSON; got {damage}") from None
    if not isinstance(found, dict):
        raise Refusal(f"{file}: expected a JSON object; got {type(found).__name__}")
    return found


def _read_number(file: Path, name: str) -> float:
    header, data = _read_header(file)
    if name not in header:
        raise Refusal(f"{file}: expected {name}, as the index says; got none")
    dtype, first, end = _placed(file, name, header[name])
    if data + end > file.stat().st_size:
        raise Refusal(f"{file}: expected {data + end} bytes or more, for {name}; got {file.stat().st_size}")
    with file.open("rb") as opened:
        opened.seek(data + first)
        raw = bytearray(opened.read(end - first))
    return float(torch.frombuffer(raw, dtype=_DTYPES[dtype]).item())


def _placed(file: Path, name: str, entry: object) -> tuple[str, int, int]:
    """A header's entry for one number: its dtype, and where in the data it begins and ends."""
    match entry:
        case {"dtype": str(dtype), "data_offsets": [int(first), int(end)]} if dtype in _DTYPES:
            if 0 <= first == end - _DTYPES[dtype].itemsize:
                return dtype, first, end
    raise Refusal(f"{file}: expected {name} as one number of {', '.join(_DTYPES)}; got {quoted(entry)}")


def _expect_float32(scale: float, expected: str) -> float:
    """The float32 nearest to `scale`, which is what a cache has room for."""
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= scale <= limits.max:
        raise Refusal(f"{expected} as a finite float32 > 0; got {scale}")
    return float(torch.tensor(scale, dtype=torch.float32))


def _write_numbers(file: Path, numbers: Mapping[str, float]) -> None:
    """Each as a float32 of no dimensions."""
    places = {name: [4 * i, 4 * i + 4] for i, name in enumerate(numbers)}
    header = {name: {"dtype": "F32", "shape": [], "data_offsets": place} for name, place in places.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    data = torch.tensor(list(numbers.values()), dtype=torch.float32).numpy().tobytes()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
