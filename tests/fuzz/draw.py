"""Drawing settings and actions at random. Where the boundaries lie that sizes are drawn around: tests/cases/grids.py.

What an executor doesn't take by its own account (docs/limitations.md) isn't drawn for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import cast

import torch
from fuzz.actions import (
    Allocate,
    Append,
    Decompress,
    Fork,
    Free,
    Poison,
    Preempt,
    Refused,
    Resume,
    Setting,
    SwapIn,
    SwapOut,
    Truncate,
)
from fuzz.play import Doing, World
from fuzz.steps import Plan, Relaid, Row, Step
from fuzz.vocabulary import pages_needed

from pagedmla import PagePool, get_layout

HALVES = (torch.bfloat16, torch.float16)
ORDERS = ("page layer slot", "layer page slot", "page slot layer", "layer slot page", "slot page layer")


@dataclass(frozen=True)
class Limits:
    """What an executor takes, how much of it a step may be, and how many actions a pool sees."""

    layouts: tuple[str, ...]
    widths: tuple[tuple[int, int], ...]
    page_sizes: tuple[int, ...]
    heads: tuple[int, ...]
    pool_tokens: int
    step_tokens: int
    rows: int
    dtypes: tuple[torch.dtype, ...]
    actions: int
    stride_bytes: int = 1
    scale_dtypes: tuple[torch.dtype, ...] = (torch.float32,)


ALL_LAYOUTS = (
    "bf16",
    "fp16",
    "fp32",
    *3 * ("fp8_flat",),
    *2 * ("fp8_rope_bf16",),
    "fp8_rope_bf16_prescaled",
    "fp8_ds_mla",
)
LIMITS = {
    "torch": Limits(
        layouts=ALL_LAYOUTS,
        widths=(*4 * ((512, 64),), (256, 64), (24, 8), (4, 2)),
        page_sizes=(1, 2, 3, 4, 5, 7, 8, 16, 17, 24, 32, 48, 64, 100, 128, 256),
        heads=(1, 1, 2, 2, 3, 4, 8, 16, 63, 128),
        pool_tokens=700,
        step_tokens=70,
        rows=6,
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        actions=30,
        scale_dtypes=(torch.float32, torch.float16, torch.float8_e8m0fnu),
    ),
    "triton": Limits(
        layouts=ALL_LAYOUTS,
        widths=(*3 * ((512, 64),), (256, 64)),
        page_sizes=(1, 2, 4, 8, 16, 32, 48, 64, 128, 256),
        heads=(1, 2, 3, 9, 16, 17),
        pool_tokens=300,
        step_tokens=20,
        rows=3,
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        actions=15,
        scale_dtypes=(torch.float32, torch.float16, torch.float8_e8m0fnu),
    ),
    "cutlass-model": Limits(
        layouts=("fp8_flat", "fp8_rope_bf16", "fp8_rope_bf16_prescaled"),
        widths=((512, 64),),
        page_sizes=(16, 32, 64, 128, 256),
        heads=(1, 2, 3, 9, 16, 17, 33),
        pool_tokens=480,
        step_tokens=20,
        rows=4,
        dtypes=(torch.bfloat16,),
        actions=15,
        stride_bytes=16,
    ),
}
MOST_REQUESTS = 9
LARGEST_COPY = 4_000_000  # bytes of a pool that is laid out anew for a step
LONG_POOL = 2600  # tokens, which `Append` brings; past two chunks of keys of the vectorised form


def draw_setting(draw: Random, executor: str) -> Setting:
    limits = LIMITS[executor]
    layout = draw.choice(limits.layouts)
    latent, rope = draw.choice(limits.widths)
    if layout == "fp8_ds_mla" and latent % 4:
        latent = 4
    page_size, layers = draw.choice(limits.page_sizes), draw.choice((1, 1, 2, 3))
    tokens = draw.randint(3 * page_size, max(4 * page_size, limits.pool_tokens))
    if executor == "torch" and draw.random() < 0.03:
        tokens, layers = LONG_POOL, 1
    num_pages = max(3, tokens // (page_size * layers))
    setting = Setting(
        layout,
        latent,
        rope,
        layers=layers,
        page_size=page_size,
        num_pages=num_pages,
        sentinel=draw.choice(("one_past_end", "null_page")),
        shuffle_seed=draw.choice((None, draw.randrange(1000), draw.randrange(1000))),
        table_dtype=draw.choice((torch.uint32, torch.int32)),
        power_of_two=draw.random() < 0.2,
        executor=executor,
    )
    if layout == "fp8_flat":
        setting = replace(setting, scale_dtype=draw.choice(limits.scale_dtypes))
        if draw.random() < 0.25:
            sigmas = [10.0 ** draw.uniform(-3, 0) for _ in range(draw.choice((1, layers)))]
            exact = torch.tensor(sigmas).to(setting.scale_dtype).float().tolist()
            return replace(setting, sigma=tuple(exact))
        if executor != "cutlass-model" and draw.random() < 0.6:
            choices = (64, 128, 512) if latent == 512 else (64, 128, 192) if latent == 256 else (3, 8)
            setting = replace(setting, granularity=draw.choice(choices))
    if get_layout(layout, latent=latent, rope=rope).scales_per_token and draw.random() < 0.75:
        setting = replace(setting, num_scale_pages=max(3, num_pages + draw.choice((-2, 0, 1, 7))))
    return setting


@dataclass
class Life:
    """What the generator knows of its world: how its numbers are drawn, and who was born."""

    draw: Random
    world: World
    data: torch.dtype
    magnitude: tuple[float, float]
    zeros: float
    born: int = 0

    @classmethod
    def begin(cls, draw: Random, world: World) -> Life:
        data = draw.choice((torch.float32, torch.bfloat16, torch.float16))
        magnitude = draw.choice(((1.0, 1.0), (1.0, 1.0), (1e-6, 1e-6), (1e4, 1e4), (1e-2, 1e2), (1e-6, 1e4)))
        setting = world.setting
        if setting.scale_dtype == torch.float16 or setting.layout == "fp16" or data == torch.float16:
            magnitude = draw.choice(((1.0, 1.0), (1e-2, 1e2), (1e3, 1e3)))
        if setting.sigma is not None:
            magnitude = (min(setting.sigma) * 10, max(setting.sigma) * 100)
        return cls(draw, world, data, magnitude, draw.choice((0.0, 0.0, 0.2)))

    @property
    def pool(self) -> PagePool:
        return cast(PagePool, self.world["pool"])

    def names_of(self, where: str) -> list[str]:
        return sorted(cast(dict[str, object], self.world[where]))

    def new_name(self) -> str:
        self.born += 1
        return f"r{self.born}"

    # -- one action --------------------------------------------------------------------------------------------------

    def next(self) -> Doing:
        draw, live = self.draw, self.names_of("held")
        swapped = self.names_of("swapped")
        preempted = [name for name in self.names_of("preempted") if name not in live and name not in swapped]
        if len(live) < 2 and not preempted:
            return Allocate(self.new_name())
        some, more = bool(live), len(live) < MOST_REQUESTS
        choices: tuple[tuple[int, Callable[[], Doing]], ...] = (
            (60, lambda: self._step(live)),
            (6 * more, lambda: Allocate(self.new_name())),
            (4 * some, lambda: self._append(live)),
            (9 * (some and more), lambda: self._fork(draw.choice(live))),
            ((2 if more else 6) * some, lambda: Free(draw.choice(live))),
            (4 * some, lambda: self._truncate(draw.choice(live))),
            (3 * some, lambda: self._preempt(draw.choice(live))),
            (6 * bool(preempted), lambda: Resume(draw.choice(preempted))),
            (4 * some, lambda: SwapOut(draw.choice(live))),
            (8 * bool(swapped), lambda: self._swap_in(draw.choice(swapped))),
            (4, lambda: Poison(draw.choice((0xFF, 0x7F, 0x00, 0xA5)))),
            (5 * some, lambda: self._decompress(live)),
        )
        (make,) = draw.choices([make for _, make in choices], [weight for weight, _ in choices])
        return make()

    def _fork(self, parent: str) -> Doing:
        tokens = self.pool.tokens(parent)
        return Fork(parent, self.new_name(), self.draw.choice((tokens, self.draw.randint(0, tokens))))

    def _truncate(self, name: str) -> Doing:
        return Truncate(name, self.draw.randint(0, self.pool.tokens(name)))

    def _preempt(self, name: str) -> Doing:
        """But for one in the middle of coming back: the rest of its tokens would be forgotten."""
        return Free(name) if self._missing(name) else Preempt(name)

    def _missing(self, name: str) -> int:
        """Tokens that a request had before it was preempted and doesn't have again yet."""
        preempted = cast(dict[str, list[object]], self.world["preempted"])
        return max(0, len(preempted.get(name, [])) - self.pool.tokens(name))

    def _swap_in(self, name: str) -> Doing:
        swapped = cast(dict[str, tuple[object, list[object]]], self.world["swapped"])
        pages = -(-len(swapped[name][1]) // self.pool.page_size)
        return SwapIn(name) if pages <= self.pool.free_pages else self._relief()

    def _relief(self) -> Doing:
        """Pages given back, as a scheduler would when a step doesn't fit."""
        live = [name for name in self.names_of("held") if self.pool.tokens(name)] or self.names_of("held")
        name = self.draw.choice(live)
        return self.draw.choice((Free, SwapOut, Truncate, self._preempt))(name)

    def _append(self, live: list[str]) -> Doing:
        whole = [name for name in live if not self._missing(name)]
        if not whole:
            return Poison()
        room = min(self.pool.free_pages * self.pool.page_size, 20 * LIMITS[self.world.setting.executor].step_tokens)
        name, tokens = self.draw.choice(whole), self.draw.choice((self.draw.randint(0, 20), self.draw.randint(0, room)))
        if pages_needed(self.pool, [name], [tokens])[1] > self.pool.free_pages:
            return self._relief()
        executor = "torch" if self.world.setting.executor == "cutlass-model" else self.world.setting.executor
        return Append(name, tokens, self.draw.randrange(10**6), self.data, self.magnitude, executor)

    def _decompress(self, live: list[str]) -> Doing:
        spans = []
        for name in self.draw.sample(live, self.draw.randint(1, len(live))):
            start = self.draw.randint(0, self.pool.tokens(name))
            spans.append((name, start, self.draw.randint(0, min(64, self.pool.tokens(name) - start))))
        dtypes = (torch.float32, torch.bfloat16)
        executor = "torch" if self.world.setting.executor == "cutlass-model" else self.world.setting.executor
        return Decompress(
            tuple(spans), self.draw.randrange(self.world.setting.layers), self.draw.choice(dtypes), executor
        )

    # -- a step ------------------------------------------------------------------------------------------------------

    def _step(self, live: list[str]) -> Doing:
        draw, limits = self.draw, LIMITS[self.world.setting.executor]
        names = draw.sample(live, min(len(live), draw.choice((0, 1, 1, 2, 3, limits.rows, limits.rows))))
        rows, left = [], limits.step_tokens
        decode_only = draw.random() < 0.3
        for name in names:
            row = self._row(name, left, decode_only)
            rows.append(row)
            left -= row.tokens
        wanted = [row.request for row in rows if row.request], [row.tokens for row in rows]
        least, most = pages_needed(self.pool, *wanted)
        if least > self.pool.free_pages and draw.random() < 0.5:
            return Refused(*map(tuple, wanted))
        if most > self.pool.free_pages:
            return self._relief()
        own_tables = draw.random() < 0.7
        if own_tables and not decode_only:
            for _ in range(draw.choice((0, 0, 1, 2))):
                padding = draw.choice((0, 1, 1, 2))
                rows.insert(draw.randint(0, len(rows)), Row(None, padding, 0))
        return self._options(Step(tuple(rows), draw.randrange(10**6), own_tables=own_tables))

    def _row(self, name: str, left: int, decode_only: bool) -> Row:
        draw, missing = self.draw, self._missing(name)
        kind = "decode" if decode_only else draw.choice(("decode", "prompt", "prompt", "speculative", "nothing"))
        tokens = {
            "decode": 1,
            "prompt": draw.choice((draw.randint(1, 12), self.pool.page_size, draw.randint(1, 64))),
            "speculative": draw.randint(2, 5),
            "nothing": 0,
        }[kind]
        tokens = min(tokens, max(left, 1))
        if missing:
            tokens = min(tokens, missing)
            return Row(name, tokens, tokens, again=True)
        return Row(name, tokens, draw.randint(0, tokens) if kind == "speculative" else tokens)

    def _options(self, step: Step) -> Step:
        """Everything about a step but its rows."""
        draw, setting = self.draw, self.world.setting
        executor, limits = setting.executor, LIMITS[setting.executor]
        tokens = sum(row.tokens for row in step.rows)
        heads = draw.choice([heads for heads in limits.heads if heads * max(tokens, 1) <= 1500] or [1])
        if executor == "torch" and draw.random() < 0.01 and tokens:
            heads = 128
        dtypes = [
            dtype for dtype in limits.dtypes
            if executor != "triton" or dtype in HALVES or not setting.layout.startswith("fp8")
        ]  # fmt: skip
        if self.magnitude[1] > 1e3 or self.magnitude[0] < 1e-3:
            dtypes = [dtype for dtype in dtypes if dtype != torch.float16]  # outputs would leave its range
        store_executor = {"torch": ("torch", "torch", "auto", "reference")}.get(executor, (executor,))
        single = bool(step.rows) and all(row.tokens == 1 and row.request for row in step.rows)
        step = replace(
            step,
            layer=draw.randrange(setting.layers),
            heads=heads,
            executor=draw.choice(("torch", "torch", "auto")) if executor == "torch" else executor,
            store_executor=draw.choice(store_executor),
            data=self.data,
            magnitude=self.magnitude,
            zeros=self.zeros,
            q_dtype=draw.choice(dtypes),
            deviation=draw.choice((0.3, 1.0, 2.0)),
            aim=draw.choice((0.0, 0.0, 0.3)),
            sm_scale=draw.choice((0.04, 0.0721687836487, 1.0)),
            causal=draw.random() < 0.8,
            padding=draw.choice((0, 0, 0, 1, 3)),
            wide=draw.choice((None, None, 8, 64)),
            slots=draw.random() < 0.25,
            starts=True,
            check=draw.choice((None, None, True)),
            byte=draw.choice((None, None, 0x00, 0x7F, 0xFF, 0xA5)),
            spoil=draw.random() < 0.5,
            thorough=draw.random() < 0.2,
        )
        if single and draw.random() < 0.5:
            step = replace(step, starts=False, padding=0)
        if draw.random() < 0.4:
            step = replace(
                step,
                partitions=draw.choice((1, 2, 3, 7, 40)),
                dispatch=draw.choice(("host", "metadata", "draft")),
            )
        if step.rows and draw.random() < 0.3:
            step = replace(step, split=draw.randint(0, len(step.rows)))
        if draw.random() < 0.3:
            plan = Plan(draw.choice((None, 1, 2, 5)), draw.choice((0, 3, 100)))
            step = replace(step, plan=plan)
        if step.own_tables:
            step = replace(
                step,
                unused=draw.choice((-1, -1, 0, 0xFFFFFFFF, 2147480000)),
                extra_columns=draw.choice((0, 0, 1, 5)),
                row_stride=draw.choice((0, 0, 3)),
                one_table=setting.num_scale_pages is None and draw.random() < 0.5,
                dtype=draw.choice((torch.int32, torch.uint32)),
                slack=draw.choice((0, 0, 13)),
            )
            if setting.num_scale_pages is None and setting.sigma is not None:
                step = replace(step, one_table=True)
        return self._relay(step)

    def _relay(self, step: Step) -> Step:
        """The pools in other strides, or not."""
        draw, setting = self.draw, self.world.setting
        layout, pool = self.pool.layout, self.pool
        size = pool.blocks.element_size()
        own_scales = layout.scales_per_token > 0 and setting.sigma is None
        if pool.blocks.numel() * size > LARGEST_COPY or draw.random() < 0.4:
            return step
        # Inside the value pages scales need the pages' ids.
        if own_scales and setting.num_scale_pages is None and draw.random() < 0.4:
            return replace(step, inside=True, one_table=True)
        unit = max(layout.alignment, LIMITS[setting.executor].stride_bytes) // size or 1
        blocks = self._relaid(unit)
        short = draw.random() < 0.3 and step.own_tables
        if short:
            blocks = Relaid(ORDERS[0], (unit * draw.choice((0, 1, 8)), 0, 0), unit * draw.choice((0, 4)))
        step = replace(step, blocks=blocks, short=short)
        if own_scales and draw.random() < 0.7:
            assert pool.scales is not None
            unit = max(1, LIMITS[setting.executor].stride_bytes // pool.scales.element_size())
            step = replace(step, scales=self._relaid(unit))
        return step

    def _relaid(self, unit: int) -> Relaid:
        draw = self.draw
        gaps = tuple(unit * draw.choice((0, 0, 1, 3)) for _ in range(3))
        return Relaid(draw.choice(ORDERS), cast(tuple[int, int, int], gaps), unit * draw.choice((0, 1, 4)))
