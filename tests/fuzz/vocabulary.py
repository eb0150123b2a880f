"""What the statements of the fuzzer call: data, caches as engines lay them out, and the judges.

A script of a failure carries the source of those that it calls, so each is a function of plain arguments, and imports
nothing but torch and pagedmla. The shadow of the cache is `held`: for each request a list of its tokens as the model
gave them, float64 `[layers, width]` each. It knows nothing of pages, slots or strides.

Three judges that don't know each other:

    assert_holds   each request's bytes, read through its pages, are its own tokens' by the layout's rule
    agrees         attention against one float64 softmax over the shadow's rows; "reference" over the cache's bytes too
    assert_kept    no byte of the storage changed but those of rows that a step stores: gaps, other layers, free pages
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from cases.bounds import FLOAT32, LSE_ABSOLUTE, LSE_RELATIVE, OUT_RELATIVE, bf16_bound, e4m3_bound
from torch import Tensor

import pagedmla

POISON = 0xFF  # a byte that is NaN in every float format
RANDOM = -1  # in place of a page id: another one in each column, from both pools and from outside

# Relative L2 error of a row's out before it is rounded to its dtype, and what its lse may be off by (cases/bounds.py).
TOLERANCE = {
    "float64": (1e-9, LSE_ABSOLUTE),
    "torch": (FLOAT32, FLOAT32),
    "triton": (OUT_RELATIVE, LSE_ABSOLUTE),
    "cutlass-model": (OUT_RELATIVE, 1e-4),
}


# -- data --------------------------------------------------------------------------------------------------------------


def numbers(
    seed: int,
    tokens: int,
    pool: pagedmla.PagePool,
    *,
    magnitude: tuple[float, float] = (1.0, 1.0),
    zeros: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Tokens that `dtype` holds exactly, float64 `[tokens, layers, width]`.

    Latents and ropes have sizes of their own between the two of `magnitude`; a share of `zeros` rows is all zero.
    """
    g = torch.Generator().manual_seed(seed)
    layers, layout = pool.blocks.shape[2], pool.layout
    low, high = map(math.log, magnitude)
    size = (low + (high - low) * torch.rand(tokens, layers, 2, generator=g)).exp()
    x = torch.randn(tokens, layers, layout.width, generator=g)
    x[..., : layout.latent] *= size[..., :1]
    x[..., layout.latent :] *= size[..., 1:]
    x[torch.rand(tokens, layers, generator=g) < zeros] = 0.0
    return x.to(dtype).double()


def unknown(tokens: int, pool: pagedmla.PagePool) -> Tensor:
    """What padding rows hold."""
    return torch.full((tokens, pool.blocks.shape[2], pool.layout.width), torch.nan, dtype=torch.float64)


def queries(
    seed: int,
    keys: Sequence[Tensor],
    q_lens: Sequence[int],
    heads: int,
    *,
    sm_scale: float,
    deviation: float = 1.0,
    aim: float = 0.0,
    padding: int = 0,
    width: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Queries `[T + padding, heads, width of a key]` whose logits have about this deviation over their request's keys.

    A share of `aim` looks at one key of its request, with a logit of 12 or so. Rows without keys, and the padding, are
    NaN. `width` gives them so many columns in memory, the others NaN.
    """
    g = torch.Generator().manual_seed(seed)
    columns = keys[0].shape[1] if keys else 1
    most = 3e4 if dtype == torch.float16 else 1e30
    parts = []
    for rows, q_len in zip(keys, q_lens):
        q = torch.randn(q_len, heads, columns, generator=g, dtype=torch.float64)
        norms = rows.norm(dim=1)
        if not len(rows):
            parts.append(torch.full_like(q, torch.nan))
            continue
        q *= deviation / (sm_scale * max(float(norms.max()), 1e-30))
        aimed = torch.rand(q_len, heads, generator=g) < aim
        target = torch.randint(len(rows), (q_len, heads), generator=g)
        pointing = rows[target] * (12.0 / (sm_scale * norms[target].square().clamp(min=1e-30)))[..., None]
        # A short key beside long ones would need a query that gives the long ones logits of thousands.
        aimed &= norms[target] > 0.3 * norms.max()
        parts.append(torch.where(aimed[..., None], pointing, q).clamp(-most, most))
    q = torch.cat([*parts, torch.full((padding, heads, columns), torch.nan, dtype=torch.float64)])
    wide = torch.full((*q.shape[:2], max(columns, width or 0)), torch.nan, dtype=dtype)
    wide[..., :columns] = q
    return wide[..., :columns]


# -- the cache as an engine lays it out --------------------------------------------------------------------------------


def raw(tensor: Tensor) -> Tensor:
    """The same elements as integers: torch indexes those of every width."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def poison(pool: pagedmla.PagePool, byte: int = POISON) -> None:
    """Fill every byte that isn't of a live token: free pages, slots past the end, rejected tokens."""
    live = [place for name in pool.requests for place in places(pool, name, 0, pool.tokens(name))]
    for which, tensor in enumerate(paged(pool.blocks, pool.scales)):
        dead = torch.ones(tensor.shape[0], tensor.shape[3], dtype=torch.bool)
        for place in live:
            dead[place[which], place[2]] = False
        tensor.view(torch.uint8).permute(0, 3, 1, 2, 4, 5)[dead] = byte


def paged(blocks: Tensor, scales: Tensor | None) -> list[Tensor]:
    """The tensors that have pages: not one scale for all of them."""
    return [blocks] if scales is None or scales.stride(0) == 0 else [blocks, scales]


def places(pool: pagedmla.PagePool, request: str, start: int, end: int) -> list[tuple[int, int, int]]:
    """(value page, scale page, slot) of a request's tokens start .. end - 1."""
    pages = pool.pages(request)
    return [(*pages[token // pool.page_size], token % pool.page_size) for token in range(start, end)]


def relaid(tensor: Tensor, order: str, gaps: tuple[int, int, int] = (0, 0, 0), offset: int = 0) -> Tensor:
    """A copy in an arena of poison: its dimensions nest in `order`, outermost first, with gaps (elements) in each."""
    sizes = {"page": tensor.shape[0], "layer": tensor.shape[2], "slot": tensor.shape[3]}
    stride, strides = tensor.shape[5], {}
    for dimension, gap in reversed(list(zip(order.split(), gaps))):
        stride += gap
        strides[dimension] = stride
        stride *= sizes[dimension]
    arena = torch.full(((offset + stride) * tensor.element_size(),), POISON, dtype=torch.uint8).view(tensor.dtype)
    # Dimensions of one element have a stride that means nothing.
    view = arena.as_strided(
        tensor.shape, (strides["page"], stride, strides["layer"], strides["slot"], stride, 1), offset
    )
    raw(view).copy_(raw(tensor))
    return view


def inside(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of both pools in one arena: a page's scales lie behind its rows, as vLLM keeps them."""
    (rows, row), (sigmas, sigma) = (
        (pool[0].numel() * pool.element_size(), pool.element_size()) for pool in (blocks, scales)
    )
    first = -(-rows // 16) * 16
    page = first + -(-sigmas // 16) * 16
    arena = torch.full((blocks.shape[0] * page,), POISON, dtype=torch.uint8)
    views = (
        arena.view(pool.dtype).as_strided(pool.shape, (page // size, *pool[:1].contiguous().stride()[1:]), at // size)
        for pool, size, at in ((blocks, row, 0), (scales, sigma, first))
    )
    moved, moved_scales = views
    raw(moved).copy_(raw(blocks))
    raw(moved_scales).copy_(raw(scales))
    return moved, moved_scales


def short(tensor: Tensor) -> Tensor:
    """The pool as MAX binds it: a contiguous tensor, shorter than the pool is; its page stride must be given."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride(), tensor.storage_offset())


def engine_step(
    pool: pagedmla.PagePool,
    rows: Sequence[tuple[str | None, int]],
    blocks: Tensor,
    scales: Tensor | None,
    *,
    unused: int = RANDOM,
    seed: int = 0,
    extra_columns: int = 0,
    row_stride: int = 0,
    one_table: bool = False,
    dtype: torch.dtype = torch.int32,
    slack: int = 0,
    **fields: object,
) -> tuple[pagedmla.KVCacheInputsPerDevice, Tensor]:
    """What an engine makes of the pool's pages for a step of (request, query tokens), and its query starts.

    Request None is a padding row: no keys, whatever its tokens and its table hold. `unused` stands in table columns
    that aren't in use, `row_stride` more columns lie behind the table's own, `slack` is added to both bounds.
    """
    draw = random.Random(seed)
    lengths = [-tokens if name is None else pool.tokens(name) for name, tokens in rows]
    needed = [-(-(length + tokens) // pool.page_size) for length, (_, tokens) in zip(lengths, rows)]
    columns = max([1, *needed]) + extra_columns
    tables = []
    for which, tensor in enumerate(paged(blocks, scales)):
        ids = [
            draw.choice([0, tensor.shape[0] - 1, tensor.shape[0], 2**31 - 1, 2**32 - 1]) if unused == RANDOM else unused
            for _ in range(len(rows) * (columns + row_stride))
        ]
        table = torch.tensor(ids, dtype=torch.int64).view(len(rows), columns + row_stride)
        for row, ((name, _), pages) in enumerate(zip(rows, needed)):
            if name is not None:
                table[row, :pages] = torch.tensor([page[which] for page in pool.pages(name)[:pages]])
        tables.append(bits32(table, dtype)[:, :columns])
    starts = [0]
    for _, tokens in rows:
        starts.append(starts[-1] + tokens)
    values = pagedmla.KVCacheInputsPerDevice(
        kv_blocks=blocks,
        cache_lengths=bits32(torch.tensor(lengths, dtype=torch.int64), dtype),
        lookup_table=tables[0],
        max_prompt_length=max([0, *(tokens for _, tokens in rows)]) + slack,
        max_cache_length=max([0, *(length + tokens for length, (_, tokens) in zip(lengths, rows))]) + slack,
        page_stride=None,
        kv_scales=scales,
        scales_lookup_table=tables[1] if len(tables) == 2 and not one_table else None,
    )
    return replace(values, **fields), torch.tensor(starts, dtype=torch.int32)


def bits32(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 numbers as 32 bits, read as int32 or uint32."""
    low = numbers & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32).view(dtype)


def slots_of(
    pool: pagedmla.PagePool, rows: Sequence[tuple[str | None, int]], seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The step's tokens in another order, and where each goes: (order, value slots, scale slots), int64 `[T]` each."""
    where: list[tuple[int, int]] = []
    for name, tokens in rows:
        if name is None:
            where += [(-1, -1)] * tokens
            continue
        start = pool.tokens(name)
        where += [
            (value * pool.page_size + slot, scale * pool.page_size + slot)
            for value, scale, slot in places(pool, name, start, start + tokens)
        ]
    order = torch.tensor(random.Random(seed).sample(range(len(where)), len(where)), dtype=torch.int64)
    slots = torch.tensor(where, dtype=torch.int64).view(-1, 2)[order]
    return order, slots[:, 0], slots[:, 1]


# -- the shadow --------------------------------------------------------------------------------------------------------


def stack(tokens: Sequence[Tensor], pool: pagedmla.PagePool) -> Tensor:
    """A request's tokens as one tensor, float64 `[tokens, layers, width]`."""
    return torch.stack(list(tokens)) if len(tokens) else unknown(0, pool)


def as_stored(given: Tensor, pool: pagedmla.PagePool, power_of_two: bool) -> pagedmla.QuantizedRows:
    """Tokens `[tokens, layers, width]` as the layout's own rule makes rows of them."""
    latent, rope = given.split([pool.layout.latent, pool.layout.rope], -1)
    scales, options = pool.scales, {"power_of_two": power_of_two}
    if scales is not None and scales.stride(0) == 0:
        options["sigma"] = scales[0, 0, :, 0, 0].expand(len(given), -1, 1)
    elif scales is not None:
        options["scale_dtype"] = scales.dtype
    return pool.layout.quantize(latent, rope, **options)


def meaning(given: Tensor, pool: pagedmla.PagePool, power_of_two: bool, layer: int) -> Tensor:
    """What rows of one layer mean, float64 `[tokens, width]`."""
    made = as_stored(given, pool, power_of_two)
    scales = None if made.scales is None else made.scales[:, layer]
    return pool.layout.dequantize(made.values[:, layer], scales, torch.float64)


def attention(
    q: Tensor, keys: Sequence[Tensor], q_lens: Sequence[int], latent: int, *, sm_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, one dense softmax a request; rows without a key, and behind the last request: 0, -inf."""
    out = torch.zeros(*q.shape[:2], latent, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    first = 0
    for rows, q_len in zip(keys, q_lens):
        mine = slice(first, first + q_len)
        first += q_len
        if q_len == 0 or len(rows) == 0:
            continue
        logits = sm_scale * (q[mine].double() @ rows.T)  # [q_len, H, keys]
        if causal:
            position = torch.arange(q_len) + len(rows) - q_len
            logits.masked_fill_((torch.arange(len(rows)) > position[:, None])[:, None], -torch.inf)
        lse[mine] = logits.logsumexp(-1)
        out[mine] = (logits - lse[mine][..., None]).exp() @ rows[:, :latent]
    return out, lse


# -- judges ------------------------------------------------------------------------------------------------------------


def agrees(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], executor: str) -> tuple[float, float]:
    """(out, lse) against float64; returns both errors as parts of what is allowed."""
    (out, lse), (want_out, want_lse) = got, want
    live = want_lse > -torch.inf
    for name, state in (("out", out), ("lse", lse)):
        assert not bool(state.isnan().any()), f"{name}: NaN, first at {torch.nonzero(state.isnan())[0].tolist()}"
    wrong = torch.nonzero((lse > -torch.inf) != live)
    assert not len(wrong), f"lse: empty, or not empty, in other rows than it should be: {wrong.tolist()[:8]}"
    assert bool((out[~live] == 0).all()), "out of an empty row isn't 0"
    if not bool(live.any()):
        return 0.0, 0.0
    out, lse, want_out, want_lse = (each[live].double() for each in (out, lse, want_out, want_lse))
    relative, absolute = TOLERANCE[executor]
    format_ = torch.finfo(got[0].dtype)
    half_a_step = (want_out.abs() * format_.eps / 2).clamp(min=format_.tiny * format_.eps / 2).norm(dim=-1)
    errors = []
    for name, off, allowed in (
        ("lse", (lse - want_lse).abs(), absolute + LSE_RELATIVE * want_lse.abs()),
        ("out", (out - want_out).norm(dim=-1), relative * want_out.norm(dim=-1) + half_a_step),
    ):
        share = torch.where(off == 0, 0.0, off / allowed).nan_to_num(torch.inf)
        at = int(share.argmax())
        row, by, bound = torch.nonzero(live)[at].tolist(), float(off[at]), float(allowed[at])
        assert float(share[at]) <= 1, f"{name}: row {row} is off by {by:.2e}, allowed {bound:.2e}"
        errors.append(float(share[at]))
    return errors[0], errors[1]


def assert_holds(pool: pagedmla.PagePool, held: dict[str, list[Tensor]], power_of_two: bool) -> None:
    """Every request's rows and scales, read through its own pages, are those of its own tokens, byte for byte."""
    assert set(pool.requests) == set(held)
    for name, tokens in held.items():
        assert pool.tokens(name) == len(tokens), f"{name} has {pool.tokens(name)} tokens, and was given {len(tokens)}"
        if not tokens:
            continue
        made = as_stored(stack(tokens, pool), pool, power_of_two)
        where = torch.tensor(places(pool, name, 0, len(tokens)))
        for which, (tensor, wanted) in enumerate(zip(paged(pool.blocks, pool.scales), made)):
            found = raw(tensor)[where[:, which], 0, :, where[:, 2], 0]
            wrong = (found != raw(wanted)).any(-1)
            assert not bool(wrong.any()), (
                f"{('kv_blocks', 'kv_scales')[which]}: {name} doesn't hold its (token, layer) "
                f"{torch.nonzero(wrong)[0].tolist()}, at (value page, scale page, slot) "
                f"{where[torch.nonzero(wrong)[0, 0]].tolist()}"
            )


def assert_rows(got: Tensor, want: Tensor) -> None:
    """Decompressed rows against float64: the rounding of float32 and of their own dtype."""
    format_ = torch.finfo(got.dtype)
    allowed = want.abs() * (format_.eps + 2.0**-22) + format_.tiny * format_.eps + 2.0**-133
    off = (got.double() - want).abs()
    assert bool((off <= allowed).all()), f"rows: off by {float(off.nan_to_num(torch.inf).max())}"


def assert_close(given: Tensor, stored: Tensor, pool: pagedmla.PagePool, power_of_two: bool) -> None:
    """Dequantised rows `[tokens, width]` lie where e4m3 allows: its steps by hand, no code of the layout."""
    layout = pool.layout
    if not layout.quantised or pool.scales is None or pool.scales.stride(0) == 0:
        return
    latent, group = layout.latent, min(layout.scale_group, layout.width)
    width = layout.width if layout.name == "fp8_flat" else latent
    floor, most = (2.0**-24, 146.125) if pool.scales.dtype == torch.float16 else (2.0**-100, 2.0**119)
    for first in range(0, width, group):
        columns = slice(first, min(first + group, width))
        x = given[:, columns].float()
        amax = x.abs().amax(-1, keepdim=True).double()
        sigma = (amax / 448).clamp(floor, most)
        if power_of_two or pool.scales.dtype == torch.float8_e8m0fnu:
            sigma = torch.exp2(sigma.log2().ceil().clamp(max=math.floor(math.log2(most))))
        off = (stored[:, columns] - x.double()).abs()
        slack = 2.0**-10 * x.double().abs()  # sigma's own rounding, to float16 at most
        assert bool((off <= e4m3_bound(x, sigma) + slack).all()), f"e4m3: off by {float(off.max())} at sigma {sigma}"
    if width == latent and not layout.rope_scaled:
        rope = given[:, latent:]
        assert bool(((stored[:, latent:] - rope).abs() <= bf16_bound(rope) + 2.0**-133).all()), "rope: off"


def memory(*tensors: Tensor | None) -> list[Tensor]:
    """A copy of all storage behind these tensors."""
    return [whole(tensor).clone() for tensor in tensors if tensor is not None]


def whole(tensor: Tensor) -> Tensor:
    """The storage behind a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def assert_kept(
    before: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    written: Sequence[tuple[int, int, int]] = (),
    layers: Sequence[int] = (),
) -> None:
    """No byte has changed but those of `written` (value page, scale page, slot) in `layers`."""
    views = [tensor for tensor in tensors if tensor is not None]
    allowed: dict[int, Tensor] = {}
    for which, view in enumerate(views):
        mask = allowed.setdefault(view.untyped_storage().data_ptr(), torch.zeros_like(whole(view), dtype=torch.uint8))
        if view.stride(0) == 0:
            continue  # one scale for all: never written
        mine = mask[: len(mask) // view.element_size() * view.element_size()].view(view.dtype)
        mine = raw(mine.as_strided(view.shape, view.stride(), view.storage_offset()))
        for place in written:
            for layer in layers:
                mine[place[which], 0, layer, place[2]] = -1 if view.element_size() > 1 else 255
    for view, old in zip(views, before, strict=True):
        changed = (whole(view) != old) & (allowed[view.untyped_storage().data_ptr()] == 0)
        assert not bool(changed.any()), (
            f"{int(changed.sum())} bytes changed that aren't the step's, first byte {int(changed.nonzero()[0, 0])} of "
            f"storage; shape {tuple(view.shape)}, strides {view.stride()}, offset {view.storage_offset()}"
        )


def assert_sound(pool: pagedmla.PagePool, before: pagedmla.CacheReport | None) -> pagedmla.CacheReport:
    """`inspect` finds nothing in all requests, and no scales that didn't follow their values since the last report."""
    names = list(pool.requests)
    values, _ = pool.values(names, [0] * len(names))
    report = pagedmla.inspect(values, layout=pool.layout, request_names=names, before=before)
    assert report.ok, "; ".join(problem.sentence for problem in report.problems)
    return report


def only_live(
    values: pagedmla.KVCacheInputsPerDevice,
    blocks: Tensor,
    scales: Tensor | None,
    live: Sequence[tuple[int, int, int]],
    byte: int,
) -> pagedmla.KVCacheInputsPerDevice:
    """The same cache, packed, with another byte wherever no token of `live` (value page, scale page, slot) lies."""
    where = torch.tensor(live, dtype=torch.int64).view(-1, 3)
    made = []
    for which, tensor in enumerate(paged(blocks, scales)):
        arena = torch.full((tensor.numel() * tensor.element_size(),), byte, dtype=torch.uint8)
        made.append(arena.view(tensor.dtype).view(tensor.shape))
        page, slot = where[:, which], where[:, 2]
        raw(made[-1])[page, :, :, slot] = raw(tensor)[page, :, :, slot]
    fields = dict(zip(("kv_blocks", "kv_scales"), made))
    return replace(values, page_stride=None, scales_page_stride=None, **fields)


def assert_same_bits(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    for name, one, other in zip(("out", "lse"), first, second):
        assert torch.equal(one, other), f"{name}: bytes that no query sees changed it"


def spoilt(values: pagedmla.KVCacheInputsPerDevice, place: tuple[int, int, int], layer: int) -> None:
    """One token's latent starts with a NaN."""
    blocks = values.kv_blocks.view(torch.uint8)
    blocks[place[0], 0, layer, place[2], 0, : values.kv_blocks.element_size()] = POISON


def assert_nan_stays(
    first: tuple[Tensor, Tensor],
    spoilt: tuple[Tensor, Tensor],
    pool: pagedmla.PagePool,
    rows: Sequence[tuple[str | None, int]],
    place: tuple[int, int, int],
    *,
    causal: bool,
    exactly: bool,
) -> None:
    """The NaN at `place` reaches every query that sees the token. It changes no bit of the others, or (`exactly` False)
    of those whose request doesn't hold the token."""
    token = 0
    for name, tokens in rows:
        start = -tokens if name is None else pool.tokens(name)
        seen = [] if name is None else places(pool, name, 0, start + tokens)
        for i in range(tokens):
            if place in (seen[: start + i + 1] if causal else seen):
                assert bool(spoilt[1][token].isnan().all()), f"lse: row {token} sees a NaN and isn't"
            elif exactly or place not in seen:
                same = all(torch.equal(one[token], other[token]) for one, other in zip(first, spoilt))
                assert same, f"row {token} changed with a NaN that it doesn't see"
            token += 1


def pages_needed(pool: pagedmla.PagePool, names: Sequence[str], tokens: Sequence[int]) -> tuple[int, int]:
    """How many free pages a step takes: at least, and at most (a shared last page may need a copy)."""
    new = copies = 0
    for name, count in zip(names, tokens):
        pages = pool.pages(name)
        new += max(0, -(-(pool.tokens(name) + count) // pool.page_size) - len(pages))
        at = pool.tokens(name) // pool.page_size
        copies += count > 0 and at < len(pages) and pool.references(pages[at]) > 1
    return new, new + copies


def assert_refused(pool: pagedmla.PagePool, names: Sequence[str], tokens: Sequence[int]) -> None:
    """A step without room for it raises OutOfPagesError and changes nothing."""
    books = {name: (pool.tokens(name), pool.pages(name)) for name in pool.requests}, pool.free_pages
    before = memory(pool.blocks, pool.scales)
    try:
        pool.values(names, tokens)
    except pagedmla.OutOfPagesError:
        assert ({name: (pool.tokens(name), pool.pages(name)) for name in pool.requests}, pool.free_pages) == books
        assert_kept(before, [pool.blocks, pool.scales])
    else:
        raise AssertionError(f"{pages_needed(pool, names, tokens)} pages needed, {pool.free_pages} free: not refused")
