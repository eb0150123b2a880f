"""What happens in a fuzzed world, as data: each action says in Python text what it does and what must hold after it.

The fuzzer runs that text and nothing else, so a failure's script is what was run. A field's default is its simplest
value, and `shrink` goes back to it where it can. An action keeps the pool and the shadow (`held`, vocabulary.py) in
step, so that any of them can be left out of a trace.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch


class Statement(NamedTuple):
    """A line of a script, or a few. One that `judges` changes nothing: it is left out where a later action fails."""

    text: str
    judges: bool = False


class Code(str):
    """Text that stands for itself: its repr is the text."""

    def __repr__(self) -> str:
        return str(self)


def call(name: str, *arguments: object, **keywords: object) -> str:
    """Text of a call."""
    shown = [_shown(argument) for argument in arguments]
    return f"{name}({', '.join(shown + [f'{key}={_shown(value)}' for key, value in keywords.items()])})"


def _shown(value: object) -> str:
    return str(value) if isinstance(value, (Code, torch.dtype)) else repr(value)


def unusual(action: object, *names: str) -> dict[str, object]:
    """Those of an action's fields that aren't at their defaults."""
    defaults = {field.name: field.default for field in fields(action)}  # type: ignore[arg-type]
    return {name: value for name in names if (value := getattr(action, name)) != defaults[name]}


ENVIRONMENT = {
    "triton": ("PAGEDMLA_CHECK", "1"),  # the interpreter refuses addresses outside all storage
    "cutlass-model": ("PAGEDMLA_PRECISION", "fp16"),  # the form that is exact to the stored FP8
}
JUDGE = (
    Statement("pool.check()", judges=True),
    Statement("assert_holds(pool, held, power_of_two)", judges=True),
    Statement("report = assert_sound(pool, report)", judges=True),
)


@dataclass(frozen=True)
class Setting:
    """The pool of an episode."""

    layout: str
    latent: int = 512
    rope: int = 64
    granularity: int | None = None
    layers: int = 1
    page_size: int = 16
    num_pages: int = 8
    num_scale_pages: int | None = None
    sentinel: str = "one_past_end"
    shuffle_seed: int | None = None
    sigma: tuple[float, ...] | None = None
    scale_dtype: torch.dtype = torch.float32
    table_dtype: torch.dtype = torch.uint32
    power_of_two: bool = False
    executor: str = "torch"

    @property
    def title(self) -> str:
        """The layout as the summary names it."""
        parts = [self.layout, "a tensor" if self.sigma else "", f"g{self.granularity}" if self.granularity else ""]
        parts.append("" if self.scale_dtype == torch.float32 else str(self.scale_dtype).removeprefix("torch."))
        return " ".join(part for part in parts if part)

    def statements(self) -> list[Statement]:
        layout = call("pagedmla.get_layout", self.layout, **unusual(self, "latent", "rope", "granularity"))
        geometry = {"num_layers": self.layers, "page_size": self.page_size, "num_pages": self.num_pages}
        more = unusual(self, "num_scale_pages", "sentinel", "shuffle_seed", "scale_dtype", "table_dtype")
        if self.sigma is not None:
            more["sigma"] = Code(call("torch.tensor", list(self.sigma), dtype=self.scale_dtype))
            more.pop("scale_dtype", None)
        lines = [
            f"layout = {layout}",
            f"pool = {call('pagedmla.PagePool', Code('layout'), **geometry, **more)}",
            f"power_of_two = {self.power_of_two}",
            "held, preempted, swapped, report = {}, {}, {}, None",
            "poison(pool)",
        ]
        if self.executor in ENVIRONMENT:
            lines.insert(0, "os.environ[{!r}] = {!r}".format(*ENVIRONMENT[self.executor]))
        return [Statement(line) for line in lines]


@dataclass(frozen=True)
class Allocate:
    request: str

    def statements(self, setting: Setting) -> list[Statement]:
        return [Statement(f"pool.allocate({self.request!r})\nheld[{self.request!r}] = []"), *JUDGE]


@dataclass(frozen=True)
class Append:
    """Room first, counted at once; then the tokens come, slot by slot, as an engine that plans ahead stores them."""

    request: str
    tokens: int
    seed: int
    data: torch.dtype = torch.float32
    magnitude: tuple[float, float] = (1.0, 1.0)
    executor: str = "torch"

    def statements(self, setting: Setting) -> list[Statement]:
        name, options = self.request, unusual(self, "magnitude")
        if self.data != torch.float32:
            options["dtype"] = self.data
        new = call("numbers", self.seed, self.tokens, Code("pool"), **options)
        latent, rope = (Code(f"given[:, layer, {columns}]") for columns in (": layout.latent", "layout.latent :"))
        slots = f"places(pool, {name!r}, len(held[{name!r}]), pool.tokens({name!r}))"
        store = call(
            "pagedmla.store", latent, rope, Code("pool.values([], []).values"), Code("layer"),
            slot_mapping=Code("slots[0]"), layout=Code("layout"), executor=self.executor,
            power_of_two=Code("power_of_two"),
            scales_slot_mapping=Code("slots[1] if layout.scales_per_token else None"),
        )  # fmt: skip
        lines = [
            f"pool.append({name!r}, {self.tokens})",
            f"new = {new}",
            f"given = new.to({self.data})",
            f"where = torch.tensor({slots}, dtype=torch.int64).view(-1, 3)",
            "slots = [where[:, which] * pool.page_size + where[:, 2] for which in (0, 1)]",
            f"for layer in {list(range(setting.layers))}:\n    {store}",
            f"held[{name!r}] += new",
        ]
        return [Statement("\n".join(lines)), *JUDGE]


@dataclass(frozen=True)
class Free:
    request: str

    def statements(self, setting: Setting) -> list[Statement]:
        return [Statement(f"pool.free({self.request!r})\ndel held[{self.request!r}]"), *JUDGE]


@dataclass(frozen=True)
class Fork:
    """A child with the parent's first tokens: the same pages, until one of them appends."""

    parent: str
    child: str
    tokens: int = 0

    def statements(self, setting: Setting) -> list[Statement]:
        pages = f"pool.pages({self.parent!r})[: -(-{self.tokens} // pool.page_size)]"
        return [
            Statement(
                f"pool.fork({self.parent!r}, {self.child!r}, {self.tokens})\n"
                f"held[{self.child!r}] = held[{self.parent!r}][:{self.tokens}]"
            ),
            Statement(f"assert pool.pages({self.child!r}) == {pages}", judges=True),
            *JUDGE,
        ]


@dataclass(frozen=True)
class Truncate:
    """Tokens taken back long after they were accepted."""

    request: str
    tokens: int = 0

    def statements(self, setting: Setting) -> list[Statement]:
        name, tokens = self.request, self.tokens
        return [Statement(f"pool.truncate({name!r}, {tokens})\ndel held[{name!r}][{tokens}:]"), *JUDGE]


@dataclass(frozen=True)
class Preempt:
    """The request's pages are given up; its tokens will be stored again (`Resume`)."""

    request: str

    def statements(self, setting: Setting) -> list[Statement]:
        name = self.request
        return [Statement(f"pool.free({name!r})\npreempted[{name!r}] = held.pop({name!r})"), *JUDGE]


@dataclass(frozen=True)
class Resume:
    """The request comes back without pages; steps bring its tokens again."""

    request: str

    def statements(self, setting: Setting) -> list[Statement]:
        return [Statement(f"pool.allocate({self.request!r})\nheld[{self.request!r}] = []"), *JUDGE]


@dataclass(frozen=True)
class SwapOut:
    """Pages to the host, both planes."""

    request: str

    def statements(self, setting: Setting) -> list[Statement]:
        name = self.request
        return [Statement(f"swapped[{name!r}] = pool.swap_out({name!r}), held.pop({name!r})"), *JUDGE]


@dataclass(frozen=True)
class SwapIn:
    """Back from the host, into pages of other ids."""

    request: str

    def statements(self, setting: Setting) -> list[Statement]:
        name = self.request
        lines = (
            f"pool.swap_in({name!r}, swapped[{name!r}][0])",
            f"held[{name!r}] = swapped.pop({name!r})[1]",
        )
        return [Statement("\n".join(lines)), *JUDGE]


@dataclass(frozen=True)
class Poison:
    """Every byte that isn't of a live token is overwritten."""

    byte: int = 0xFF

    def statements(self, setting: Setting) -> list[Statement]:
        return [Statement(f"poison(pool, 0x{self.byte:02X})"), *JUDGE]


@dataclass(frozen=True)
class Refused:
    """A step that the pool has no room for."""

    requests: tuple[str, ...]
    tokens: tuple[int, ...]

    def statements(self, setting: Setting) -> list[Statement]:
        return [Statement(f"assert_refused(pool, {list(self.requests)}, {list(self.tokens)})"), *JUDGE]


@dataclass(frozen=True)
class Decompress:
    """Cached tokens start .. start + count - 1 of some requests, as a prompt over a cached context wants them."""

    spans: tuple[tuple[str, int, int], ...]
    layer: int = 0
    dtype: torch.dtype = torch.float32
    executor: str = "torch"

    def statements(self, setting: Setting) -> list[Statement]:
        layer = min(self.layer, setting.layers - 1)
        names, starts = [name for name, _, _ in self.spans], [start for _, start, _ in self.spans]
        ends = [0]
        for _, _, count in self.spans:
            ends.append(ends[-1] + count)
        parts = ", ".join(f"held[{name!r}][{start}:{start + count}]" for name, start, count in self.spans)
        lines = [
            f"values, _ = pool.values({names}, {[0] * len(names)})",
            f"rows = torch.full(({ends[-1]}, layout.width), torch.nan, dtype={self.dtype})",
            "before = memory(pool.blocks, pool.scales)",
            call(
                "pagedmla.decompress",
                Code("values"),
                layer,
                starts=Code(f"torch.tensor({starts}, dtype=torch.int32)"),
                key_start_loc=Code(f"torch.tensor({ends}, dtype=torch.int32)"),
                layout=Code("layout"),
                out=Code("rows"),
                executor=self.executor,
            ),
            f"want = [meaning(stack(part, pool), pool, power_of_two, {layer}) for part in ({parts},)]",
        ]
        return [
            *map(Statement, lines),
            Statement("assert_rows(rows, torch.cat(want))", judges=True),
            Statement("assert_kept(before, [pool.blocks, pool.scales])", judges=True),
        ]


Action = (
    Allocate | Append | Free | Fork | Truncate | Preempt | Resume | SwapOut | SwapIn | Poison | Refused | Decompress
)
