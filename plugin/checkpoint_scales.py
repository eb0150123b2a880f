"""A checkpoint's scale of each layer's cache, `k_scale`: read, or laid over a checkpoint that isn't touched.

Written and read by the name that quantisation tools give it, one float32 a layer:

    model.layers.N.self_attn.k_proj.k_scale

The safetensors format in short: the header's length (8 bytes, little endian), the header as JSON, {name: {dtype, shape,
data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pagedmla.kv_cache.checks import quoted

INDEX = "model.safetensors.index.json"
SHARD = "model-kv-scales.safetensors"
NAME = "model.layers.{}.self_attn.k_proj.k_scale"

_SCALE = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:k_proj\.|attn\.|mla_attn\.)*k_scale$")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_scales(model: Path) -> dict[int, float]:
    """The scale of each layer that has one. ValueError where one isn't a single finite number above 0."""
    found = {}
    for name, file in _names(model).items():
        matched = _SCALE.search(name)
        if matched is not None:
            scale = _read_number(model / file, name)
            if not 0.0 < scale < float("inf"):
                raise ValueError(f"{model / file}: expected a finite {name} > 0; got {scale}")
            found[int(matched[1])] = scale
    return found


def lay_over(model: Path, out: Path, scales: Mapping[int, float]) -> None:
    """Make `out` the checkpoint `model` with these scales: links to its files, one more shard, and an index of all.

    `model` itself stays as it is, and must stay where it is. Scales that it has already are left out of the index.
    Raises FileExistsError where `out` is there already, ValueError where `model` has no safetensors.
    """
    names = _names(model)
    if not names:
        raise ValueError(f"{model}: expected *.safetensors to lay scales over; got none")
    out.mkdir(parents=True)
    for file in sorted(model.iterdir()):
        if file.name not in (INDEX, SHARD):
            (out / file.name).symlink_to(file.resolve())
    made = {NAME.format(layer): scale for layer, scale in sorted(scales.items())}
    _write_numbers(out / SHARD, made)
    kept = {name: file for name, file in names.items() if not _SCALE.search(name)}
    index = _read_index(model)
    index["weight_map"] = {**kept, **dict.fromkeys(made, SHARD)}
    (out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _names(model: Path) -> dict[str, str]:
    """Tensors of a checkpoint, and the file of each."""
    index = _read_index(model)
    if "weight_map" in index:
        return dict(index["weight_map"])
    files = sorted(model.glob("*.safetensors"))
    return {name: file.name for file in files for name in _read_header(file)[0] if name != "__metadata__"}


def _read_index(model: Path) -> dict[str, Any]:
    file = model / INDEX
    if not file.is_file():
        return {"metadata": {}}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header and where the data begin."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length < file.stat().st_size:
            raise ValueError(f"{file}: expected a safetensors file; got a header of {length} bytes")
        header: dict[str, Any] = json.loads(opened.read(length))
    return header, 8 + length


def _read_number(file: Path, name: str) -> float:
    header, data = _read_header(file)
    if name not in header:
        raise ValueError(f"{file}: expected {name}, as the index says; got none")
    dtype, shape, (first, end) = (header[name][key] for key in ("dtype", "shape", "data_offsets"))
    if dtype not in _DTYPES or end - first != _DTYPES[dtype].itemsize:
        raise ValueError(f"{file}: expected {name} as one number of {', '.join(_DTYPES)}; got {quoted(dtype)} {shape}")
    with file.open("rb") as opened:
        opened.seek(data + first)
        raw = bytearray(opened.read(end - first))
    return float(torch.frombuffer(raw, dtype=_DTYPES[dtype]).item())


def _write_numbers(file: Path, numbers: Mapping[str, float]) -> None:
    """Each as a float32 of no dimensions."""
    places = {name: [4 * i, 4 * i + 4] for i, name in enumerate(numbers)}
    header = {name: {"dtype": "F32", "shape": [], "data_offsets": place} for name, place in places.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    data = torch.tensor(list(numbers.values()), dtype=torch.float32).numpy().tobytes()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
