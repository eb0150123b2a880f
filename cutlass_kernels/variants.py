"""Which kernels are compiled: the one list that the dispatcher may choose from, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pagedmla.cutlass_kernels.protocol import Protocol, decode_protocol
from pagedmla.cutlass_kernels.tiles import KEYS, PROBABILITY_STAGES, Shape

PAGE_SIZES = (16, 32, 64, 128, 256)
DTYPES = ("bf16", "fp16")
LAYOUT_OF_ROPE = {"bf16": "fp8_rope_bf16", "scaled_bf16": "fp8_rope_bf16_prescaled", "e4m3": "fp8_flat"}


def box_for(page_size: int, cluster: int = 1) -> int:
    """Keys of a tensor copy for pages of that size: as many as a CTA brings of a tile, and never more than a page."""
    return min(page_size, KEYS // cluster)


def boxes_of(cluster: int) -> tuple[int, ...]:
    """All that pages ask for."""
    return tuple(dict.fromkeys(box_for(size, cluster) for size in PAGE_SIZES))


@dataclass(frozen=True)
class Variant:
    """One compiled kernel.

    shape      arithmetic and memory of a CTA
    cluster    CTAs that share the keys by multicast, each with rows of its own
    box        keys that one tensor copy brings, see `box_for`
    dtype      of q and out: "bf16" or "fp16"
    """

    shape: Shape
    cluster: int = 1
    box: int = KEYS
    dtype: str = "bf16"
    reason: str = ""

    def __post_init__(self) -> None:
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster: expected 1 or 2; got {self.cluster}")
        if self.box not in boxes_of(self.cluster):
            raise ValueError(f"box: expected {' or '.join(map(str, boxes_of(self.cluster)))} keys; got {self.box}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}; got {self.dtype!r}")

    @property
    def rows(self) -> int:
        """Query rows of a cluster."""
        return self.shape.rows * self.cluster

    @property
    def copied_keys(self) -> int:
        """Keys of a tile that each CTA of a cluster copies for all."""
        return KEYS // self.cluster

    @property
    def copies(self) -> int:
        """Boxes that a CTA copies for a tile, of latent panel or rope each."""
        return self.copied_keys // self.box

    @property
    def layout(self) -> str:
        return LAYOUT_OF_ROPE[self.shape.rope]

    @property
    def name(self) -> str:
        return f"mla_decode_{self.layout}_{self.shape.form}_r{self.rows}_b{self.box}_{self.dtype}"

    @property
    def threads(self) -> int:
        return self.protocol.threads

    @property
    def shared_bytes(self) -> int:
        return self.shape.shared_bytes

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return tuple(size for size in PAGE_SIZES if box_for(size, self.cluster) == self.box)

    @property
    def protocol(self) -> Protocol:
        producer, consumer = (24, 240) if self.shape.rows > 16 else (56, 216)
        return decode_protocol(
            self.shape.stages,
            probability_stages=PROBABILITY_STAGES,
            ahead=self.shape.ahead,
            cluster=self.cluster,
            producer_registers=producer,
            consumer_registers=consumer,
        )


@dataclass(frozen=True)
class CombineVariant:
    """The kernel that merges the pieces of cut requests, quarter row by quarter row: 128 columns, 512 bytes of a piece.

    Its CTAs stay, two on a multiprocessor. Up to `alone[-1]` pieces are a warp's, more are all warps': piece p is warp
    p % 16's, and 16 warps of 9 loads hold 144 of them at a time, one for each multiprocessor of the largest Hopper.
    """

    dtype: str = "bf16"
    reason: str = "merges what the decode kernel cut; rows that weren't cut are left alone"

    cluster: ClassVar[int] = 1
    parts: ClassVar[int] = 4  # of a row
    warps: ClassVar[int] = 16
    alone: ClassVar[tuple[int, ...]] = (4, 8, 16)  # pieces that a warp merges by itself: a path for up to so many each
    first_loads: ClassVar[int] = 8  # of them in flight before it waits
    loads: ClassVar[int] = 9  # in flight, of each warp where all merge
    pieces: ClassVar[int] = warps * loads  # that a row may have
    lses: ClassVar[int] = -(-pieces // 32) * 32  # of a row in shared memory
    rows: ClassVar[int] = warps // parts  # of a CTA at a time
    threads: ClassVar[int] = 32 * warps
    per_multiprocessor: ClassVar[int] = 2

    # Of shared memory: each warp's sums over 128 columns and its sum of weights; LSEs of a row's pieces; how each
    # of the CTA's next quarter rows was cut, and for each warp a bit a lane where that is more than it takes alone.
    memory: ClassVar[dict[str, int]] = {
        "sums": warps * 128 * 4,
        "totals": warps * 4,
        "lse": lses * 4,
        "cuts": threads * 4,
        "many": warps * 4,
    }
    shared_bytes: ClassVar[int] = sum(memory.values())

    def place(self, name: str) -> int:
        """Byte at which a part of the memory lies."""
        names = list(self.memory)
        return sum(self.memory[before] for before in names[: names.index(name)])

    # Who has what; each takes ints or values of the DSL.

    def quarter(self, first: Any, warp: Any, lane: Any, ctas: Any) -> Any:
        """The quarter row that a lane looks at, of the CTA's next `threads`: neighbours go to other CTAs and warps."""
        return first + (lane * self.warps + warp) * ctas

    def row(self, quarter: Any) -> Any:
        return quarter >> (self.parts.bit_length() - 1)

    def column(self, quarter: Any, lane: Any) -> Any:
        """The first of a lane's four columns."""
        return (quarter & (self.parts - 1)) * 128 + lane * 4

    def piece(self, first: Any, step: int, number: Any) -> Any:
        """A warp's pieces: from 0 on, every one, where it is alone; from its own number on, every 16th, where not."""
        return first + number * step

    @property
    def name(self) -> str:
        return f"mla_combine_{self.dtype}"


_REASONS = {
    16: "16 heads and one token (DeepSeek-V3 under TP8): bound by memory, a tile of 16 rows wastes no row",
    32: "16 heads and two tokens, or 32 heads: still bound by memory",
    64: "64 heads, or 16 and four tokens: bound by memory; with two terms shared memory comes close",
    128: "128 heads: two CTAs share each key tile by multicast",
}

# Up to 32 rows two terms, and fp16, exact to the stored FP8; beyond, e4m3 with one term or two. With two terms, two
# tiles of 64 rows on CTAs of their own are faster than a cluster: 318 and 332 us for 128 heads on an H200.
_FORMS = {
    16: (("fp8", 2), ("fp16", 1)),
    32: (("fp8", 2), ("fp16", 1)),
    64: (("fp8", 1), ("fp8", 2)),
    128: (("fp8", 1),),
}


def _all() -> tuple[Variant, ...]:
    listed = []
    for rope in LAYOUT_OF_ROPE:
        for rows, forms in _FORMS.items():
            cluster = rows // 64 or 1
            for precision, terms in forms:
                shape = Shape(rows // cluster, precision, terms, rope)
                for box in boxes_of(cluster):
                    listed.append(Variant(shape, cluster, box, reason=_REASONS[rows]))
    return tuple(listed)


VARIANTS = _all()
COMBINES = tuple(CombineVariant(dtype) for dtype in dict.fromkeys(variant.dtype for variant in VARIANTS))
