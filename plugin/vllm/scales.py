"""A checkpoint's `k_scale` for layers whose cache has one scale for the tensor.

vLLM makes room for it in MLA layers of ModelOpt and Quark checkpoints alone (0.32), and passes over it in all others,
block-FP8 and unquantised ones. Here it is read for any checkpoint in a local folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pagedmla.kv_cache.checks import Refusal
from pagedmla.plugin.checkpoint_scales import read_scales

_LAYER = re.compile(r"(?:(.*)\.)?layers\.(\d+)\.")


def load_scales(model: str, layers: Iterable[tuple[str, Any]]) -> int:
    """Give each (name, layer) the scale that the checkpoint `model` holds for it; how many got one.

    A name of the engine and one of the checkpoint may differ in what stands before `layers`; where the checkpoint has
    several such, they mustn't. ValueError where that leaves a layer's scale in doubt.
    """
    folder = Path(model)
    scales = read_scales(folder) if folder.is_dir() else {}
    prefixes = {prefix for prefix, _ in scales}
    loaded = 0
    for name, layer in layers if scales else ():
        matched = _LAYER.match(name)
        if matched is None:
            continue
        prefix, number = matched[1] or "", int(matched[2])
        if prefix not in prefixes:
            if len(prefixes) > 1:
                known = ", ".join(f"{each}.layers" for each in sorted(prefixes))
                raise Refusal(f"{name}: expected its k_scale under its own name in {model}; got some of {known}")
            (prefix,) = prefixes
        scale = scales.get((prefix, number))
        if scale is not None:
            layer._k_scale.fill_(scale)
            layer._k_scale_float = scale
            loaded += 1
    return loaded
