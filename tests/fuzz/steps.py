"""A model step as an action: store its tokens, attend, keep some of them. See actions.py for what an action is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from fuzz.actions import JUDGE, Code, Setting, Statement, call, unusual


class Row(NamedTuple):
    """A row of the batch: `request` None is padding. The first `kept` tokens are accepted.

    With `again` the tokens are those that the request had before it was preempted.
    """

    request: str | None
    tokens: int
    kept: int
    again: bool = False


@dataclass(frozen=True)
class Relaid:
    """A pool in other strides: see `relaid` of vocabulary.py."""

    order: str
    gaps: tuple[int, int, int] = (0, 0, 0)
    offset: int = 0

    def text(self, tensor: str) -> str:
        return call("relaid", Code(tensor), self.order, **unusual(self, "gaps", "offset"))


@dataclass(frozen=True)
class Plan:
    """A plan that holds the step, and more."""

    partitions: int | None = None
    spare: int = 0
    precision: str = "auto"


@dataclass(frozen=True)
class Step:
    """One step of the engine.

    blocks, scales   the pools in other strides; None: as the pool has them. `inside`: scales in the value pages
    short            the value pool is bound as a shorter tensor, with its page stride given
    own_tables       tables, lengths and starts by the engine, not by the pool; the fields up to `slack` are theirs
    unused           what stands in columns that aren't in use; -1: wild ids
    slots            the store gets slots, in another order, not tables
    partitions, split, dispatch   how decode rows are cut, which they are, and by which field that is asked for
    plan             attention runs by a plan; starts: the call is given query starts
    wide             columns of q in memory, and of out
    byte             the step is repeated with this byte wherever it has no keys; None: it isn't
    spoil            and then with a NaN in one live token
    thorough         also judged against float64 over the cache's own bytes, against e4m3's steps, and by `inspect`
    """

    rows: tuple[Row, ...]
    seed: int
    layer: int = 0
    heads: int = 1
    executor: str = "torch"
    store_executor: str = "torch"
    data: torch.dtype = torch.float32
    magnitude: tuple[float, float] = (1.0, 1.0)
    zeros: float = 0.0
    q_dtype: torch.dtype = torch.float32
    deviation: float = 1.0
    aim: float = 0.0
    sm_scale: float = 0.04
    causal: bool = True
    padding: int = 0
    wide: int | None = None
    blocks: Relaid | None = None
    scales: Relaid | None = None
    inside: bool = False
    short: bool = False
    own_tables: bool = False
    unused: int = -1
    extra_columns: int = 0
    row_stride: int = 0
    one_table: bool = False
    dtype: torch.dtype = torch.int32
    slack: int = 0
    slots: bool = False
    starts: bool = True
    partitions: int | None = None
    dispatch: str = "host"
    split: int | None = None
    plan: Plan | None = None
    check: bool | None = None
    byte: int | None = None
    spoil: bool = False
    thorough: bool = False

    def statements(self, setting: Setting) -> list[Statement]:
        named = [(b, row) for b, row in enumerate(self.rows) if row.request is not None]
        names, lens = [row.request for _, row in named], [row.tokens for _, row in named]
        layer, layers = min(self.layer, setting.layers - 1), list(range(setting.layers))
        lines = [
            Statement(f"step = pool.values({names}, {lens})"),
            Statement(self._tokens()),
            Statement("\n".join(self._cache())),
            Statement(f"rows = {[(row.request, row.tokens) for row in self.rows]}"),
            Statement("\n".join(self._values())),
            *self._store(layers),
            Statement(self._keys(layer), judges=True),
            Statement("\n".join(self._queries()), judges=True),
            *self._attend(layer),
        ]
        if self.blocks is not None or self.inside:
            lines.append(Statement("raw(pool.blocks).copy_(raw(blocks))"))
        if self.scales is not None or self.inside:
            lines.append(Statement("raw(pool.scales).copy_(raw(scales))"))
        lines.append(Statement(f"pool.advance({names}, {[row.kept for _, row in named]})"))
        lines += [
            Statement(f"held[{row.request!r}] += new[{b}]" + ("" if row.kept == row.tokens else f"[:{row.kept}]"))
            for b, row in named
        ]
        return lines + list(JUDGE if self.thorough else JUDGE[:2])

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _tokens(self) -> str:
        options = unusual(self, "magnitude", "zeros")
        if self.data != torch.float32:
            options["dtype"] = self.data
        parts = []
        for b, row in enumerate(self.rows):
            if row.request is None:
                parts.append(call("unknown", row.tokens, Code("pool")))
            elif row.again:
                have = f"len(held[{row.request!r}])"
                parts.append(f"stack(preempted[{row.request!r}][{have} : {have} + {row.tokens}], pool)")
            else:
                parts.append(call("numbers", self.seed + b, row.tokens, Code("pool"), **options))
        behind = [call("unknown", self.padding, Code("pool"))] if self.padding else []
        given = f"given = torch.cat([*new, {', '.join([*behind, 'unknown(0, pool)'])}]).to({self.data})"
        return "new = [" + "".join(f"\n    {part}," for part in parts) + ("\n" if parts else "") + f"]\n{given}"

    # -- the cache ---------------------------------------------------------------------------------------------------

    def _cache(self) -> list[str]:
        if self.inside:
            return ["blocks, scales = inside(pool.blocks, pool.scales)"]
        return [
            f"blocks = {'pool.blocks' if self.blocks is None else self.blocks.text('pool.blocks')}",
            f"scales = {'pool.scales' if self.scales is None else self.scales.text('pool.scales')}",
        ]

    def _values(self) -> list[str]:
        fields: dict[str, object] = {}
        if self.partitions is not None:
            triple = (
                f"torch.tensor([len(rows), {max([row.tokens for row in self.rows], default=0)}, {self.partitions}])"
            )
            if self.dispatch == "host":
                fields["mla_num_partitions"] = self.partitions
            else:
                fields[f"{'draft_' if self.dispatch == 'draft' else ''}attention_dispatch_metadata"] = Code(triple)
        if self.split is not None:
            requests = min(self.split, len(self.rows))
            tokens = sum(row.tokens for row in self.rows[:requests])
            fields["mixed_step_split"] = Code(f"torch.tensor([{requests}, {tokens}], dtype=torch.int32)")
        bound = {"kv_blocks": Code("blocks"), "kv_scales": Code("scales")}
        if self.short:
            bound["kv_blocks"] = Code("short(blocks)")
            fields["page_stride"] = Code("blocks.stride(0)")
        if self.own_tables or None in [row.request for row in self.rows]:  # the pool knows no padding rows
            options = unusual(self, "unused", "extra_columns", "row_stride", "one_table", "dtype", "slack")
            arguments = Code("pool"), Code("rows"), bound["kv_blocks"], bound["kv_scales"]
            return ["values, starts = " + call("engine_step", *arguments, seed=self.seed, **options, **fields)]
        if self.blocks is None and not self.inside:
            del bound["kv_blocks"]
        if self.scales is None and not self.inside:
            del bound["kv_scales"]
        if not bound and not fields:
            return ["values, starts = step"]
        return [f"values, starts = {call('replace', Code('step.values'), **bound, **fields)}, step.query_start_loc"]

    # -- store -------------------------------------------------------------------------------------------------------

    def _store(self, layers: list[int]) -> list[Statement]:
        written = "[place for name, tokens in rows if name for place in "
        written += "places(pool, name, pool.tokens(name), pool.tokens(name) + tokens)]"
        options: dict[str, object] = {"layout": Code("layout"), "executor": self.store_executor}
        options |= {"power_of_two": Code("power_of_two"), **unusual(self, "check")}
        tokens = "given"
        lines = []
        if self.slots:
            lines.append(f"order, slots, scale_slots = slots_of(pool, rows, {self.seed})")
            options |= {"slot_mapping": Code("slots")}
            tokens = "given[order]"
        elif self.starts:
            options |= {"query_start_loc": Code("starts")}
        latent, rope = (Code(f"{tokens}[:, layer, {columns}]") for columns in (": layout.latent", "layout.latent :"))
        scale_slots = ", scales_slot_mapping=scale_slots if layout.scales_per_token else None" if self.slots else ""
        store = call("pagedmla.store", latent, rope, Code("values"), Code("layer"), **options)[:-1] + scale_slots + ")"
        lines.append(f"for layer in {layers}:\n    {store}")
        return [
            Statement("before = memory(blocks, scales)", judges=True),
            Statement(f"written = {written}", judges=True),
            *map(Statement, lines),
            Statement(f"assert_kept(before, [blocks, scales], written, {layers})", judges=True),
        ]

    # -- attend ------------------------------------------------------------------------------------------------------

    def _keys(self, layer: int) -> str:
        parts = [
            "unknown(0, pool)" if row.request is None else f"torch.cat([stack(held[{row.request!r}], pool), new[{b}]])"
            for b, row in enumerate(self.rows)
        ]
        listed = "".join(f"\n    {part}," for part in parts) + ("\n" if parts else "")
        return f"keys = [meaning(tokens, pool, power_of_two, {layer}) for tokens in [{listed}]]"

    def _queries(self) -> list[str]:
        lens = [row.tokens for row in self.rows]
        options = unusual(self, "deviation", "aim", "padding")
        if self.q_dtype != torch.float32:
            options["dtype"] = self.q_dtype
        if self.wide is not None:
            options["width"] = Code(f"layout.width + {self.wide}")
        q = call("queries", self.seed, Code("keys"), lens, self.heads, sm_scale=self.sm_scale, **options)
        if not self.rows:  # no key to take the width from
            q = f"torch.full(({self.padding}, {self.heads}, layout.width), torch.nan, dtype={self.q_dtype})"
        return [f"q = {q}"]

    def _attend(self, layer: int) -> list[Statement]:
        meant = call("dict", sm_scale=self.sm_scale, causal=self.causal)
        options: dict[str, object] = {"layout": Code("layout"), **unusual(self, "check")}
        if self.starts:
            options["query_start_loc"] = Code("starts")
        lines = [f"how = {meant}"]
        if self.plan is not None:
            lines.append(f"plan = {self._plan()}")
            lines.append("plan.prepare(values, starts)" if self.starts else "plan.prepare(values)")
            run = {"plan": Code("plan")}
        else:
            run = {"executor": self.executor}
        if self.wide is not None:
            lines.append(
                f"room = torch.full((*q.shape[:2], layout.latent + {self.wide}), torch.nan, dtype=q.dtype)\n"
                "out = room[..., : layout.latent]"
            )
            options["out"] = Code("out")
        attend = call("pagedmla.attend", Code("q"), Code("values"), layer, **options, **run)[:-1] + ", **how)"
        lens = [row.tokens for row in self.rows]
        done = [
            Statement("\n".join(lines), judges=True),
            Statement("before = memory(blocks, scales)", judges=True),
            Statement(f"out, lse = {attend}", judges=True),
            Statement(f"want = attention(q, keys, {lens}, layout.latent, **how)", judges=True),
            Statement(f"error = agrees((out, lse), want, {setting_name(self.executor)!r})", judges=True),
            Statement("assert_kept(before, [blocks, scales])", judges=True),
        ]
        if self.wide is not None:
            done.append(Statement("assert bool(room[..., layout.latent :].isnan().all())", judges=True))
        if self.thorough:
            meaning = call(
                "pagedmla.attend", Code("q.double()"), Code("values"), layer, executor="reference",
                layout=Code("layout"), query_start_loc=Code("starts"),
            )  # fmt: skip
            done.append(Statement(f"agrees({meaning[:-1]}, **how), want, 'float64')", judges=True))
            found = "pagedmla.inspect(values, layout=layout, query_start_loc=starts).problems"
            close = (
                f"assert_close(tokens[:, {layer}], meaning(tokens, pool, power_of_two, {layer}), pool, power_of_two)"
            )
            done.append(Statement(f"problems = {found}\nassert not problems, problems", judges=True))
            real = "[tokens for tokens, (name, _) in zip(new, rows) if name]"
            done.append(Statement(f"for tokens in {real}:\n    {close}", judges=True))
        if self.byte is not None:
            done += self._repeat(layer, {**options, **run})
        return done

    def _repeat(self, layer: int, options: dict[str, object]) -> list[Statement]:
        """The same step over a cache that differs where it may."""
        live = "[place for name, tokens in rows if name for place in "
        live += "places(pool, name, 0, pool.tokens(name) + tokens)]"
        again = call("pagedmla.attend", Code("q"), Code("other"), layer, **options)[:-1] + ", **how)"
        lines = [
            f"live = {live}",
            f"first, other = (out.clone(), lse), only_live(values, blocks, scales, live, 0x{self.byte:02X})",
            f"assert_same_bits(first, {again})",
        ]
        done = [Statement("\n".join(lines), judges=True)]
        if self.spoil and any(row.request is not None for row in self.rows):
            exactly = setting_name(self.executor) == "torch"
            options = {**options, "check": False}
            spoilt = call("pagedmla.attend", Code("q"), Code("other"), layer, **options)[:-1] + ", **how)"
            judge = f"assert_nan_stays(first, spoilt_state, pool, rows, place, causal={self.causal}, exactly={exactly})"
            lines = [
                "if live:",
                f"    place = live[{self.seed} % len(live)]",
                f"    spoilt(other, place, {layer})",
                f"    spoilt_state = {spoilt}",
                f"    {judge}",
            ]
            done.append(Statement("\n".join(lines), judges=True))
        return done

    def _plan(self) -> str:
        assert self.plan is not None
        spare = self.plan.spare
        partitions = self.plan.partitions
        if self.partitions is not None:  # the step's number overrides the plan's, as far as the plan has room
            partitions = max(partitions or 1, self.partitions)
        held = {
            "layout": Code("layout"), "num_heads": self.heads, "page_size": Code("pool.page_size"),
            "max_batch": max(1, len(self.rows)) + spare,
            "max_tokens": max(1, sum(row.tokens for row in self.rows) + self.padding) + spare,
            "max_cache_length": Code(f"max([1, *map(len, keys)]) + {spare + self.slack}"), "dtype": self.q_dtype,
            "device": "cpu", "num_partitions": partitions, "executor": self.executor,
            **unusual(self.plan, "precision"),
        }  # fmt: skip
        return call("pagedmla.plan", **held)[:-1] + ", **how)"


def setting_name(executor: str) -> str:
    """Whose tolerance holds."""
    return "torch" if executor in ("auto", "reference") else executor
