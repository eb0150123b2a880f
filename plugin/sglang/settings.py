"""What SGLang has no argument for, from the environment."""

from __future__ import annotations

import os

from pagedmla.kv_cache.checks import quoted, refuse
from pagedmla.kv_cache.layouts import Fp8RopeBf16

BACKEND = "pagedmla"
CACHE_SWITCH = "PAGEDMLA_KV_CACHE"
ENGINES_OWN = "auto"


def cache_setting() -> str:
    """PAGEDMLA_KV_CACHE as it is set, known or not: for the entry point, which refuses nothing."""
    return os.environ.get(CACHE_SWITCH) or ENGINES_OWN


def asks_for_our_pool() -> bool:
    """Whether PAGEDMLA_KV_CACHE is fp8_rope_bf16; it may also be auto, the engine's own pools. Others: ValueError."""
    setting = cache_setting()
    if setting not in (ENGINES_OWN, Fp8RopeBf16.name):
        refuse(CACHE_SWITCH, f"{ENGINES_OWN} or {Fp8RopeBf16.name}", quoted(setting))
    return setting == Fp8RopeBf16.name
