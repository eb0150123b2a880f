"""Ragged batches: what the requests of one step have in the cache. Where each comes from stands beside it.

"published" lengths were printed by somebody who timed them; "rule" ones follow a published rule with our seed;
"synthetic" ones are ours, made to be hard for a schedule. None was recorded on a server.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

PUBLISHED, RULE, SYNTHETIC = "published", "rule", "synthetic"


@dataclass(frozen=True)
class RaggedBatch:
    """`kv_lens` of a step's requests, each with `q_len` query tokens; `kind` and `origin` say where they come from."""

    name: str
    kind: str
    origin: str
    kv_lens: tuple[int, ...]
    q_len: int = 1


def normal_lengths(mean: int, batch: int, least: int = 1, seed: int = 0) -> tuple[int, ...]:
    """Normal with half the mean as deviation, cut off at `least`: the rule of FlashMLA's own tests."""
    draw = random.Random(seed)
    return tuple(max(least, round(draw.normalvariate(mean, mean / 2))) for _ in range(batch))


def long_tailed_lengths(mean: int, batch: int, deviation: float = 1.0, seed: int = 0) -> tuple[int, ...]:
    """Lognormal around a mean, `deviation` that of the logarithm; up to 128k."""
    draw = random.Random(seed)
    centre = math.log(mean) - deviation**2 / 2
    return tuple(min(131072, max(1, round(draw.lognormvariate(centre, deviation)))) for _ in range(batch))


BATCHES = (
    RaggedBatch("equal", SYNTHETIC, "128 requests of 4096 keys", (4096,) * 128),
    RaggedBatch(
        "thundermla-4",
        PUBLISHED,
        "ThunderMLA's example of an imbalanced step: 4 requests, 4 query tokens each",
        (4641, 45118, 1730, 1696),
        q_len=4,
    ),
    RaggedBatch(
        "flashmla-varlen-32",
        RULE,
        "FlashMLA's tests: normal, deviation half the mean; mean 4096",
        normal_lengths(4096, 32),
    ),
    RaggedBatch("flashmla-varlen-128", RULE, "the same for 128 requests", normal_lengths(4096, 128)),
    RaggedBatch(
        "long-tail-64",
        SYNTHETIC,
        "lognormal with a mean of 7590 tokens, the mean input in Mooncake's paper; the shape is ours",
        long_tailed_lengths(7590, 64),
    ),
    RaggedBatch("one-long", SYNTHETIC, "one request of 128k among 63 of 640", (640,) * 63 + (131072,)),
    RaggedBatch("empty-rows", SYNTHETIC, "a padded graph: 8 live requests of 128", (4096,) * 8 + (0,) * 120),
)
