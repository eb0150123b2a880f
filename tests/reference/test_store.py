"""Store: quantise a step's tokens and write them, and nothing else, through both tables.

The judge places rows byte by byte at addresses from the interface's formula (cases/arena.py) in a copy of both arenas;
then all bytes must be equal, padding between pages, other layers and other pages included. Requests start before, at
and past a page's last slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from cases.arena import FILL, Geometry, untouched
from cases.steps import LAYOUTS, as_table
from torch import Tensor

import pagedmla
from pagedmla import CacheLayout, DroppedStoreWarning, KVCacheInputsPerDevice, per_tensor_scale
from pagedmla.kv_cache.paged_tensor import raw_view
from pagedmla.reference import store as meaning
from pagedmla.reference import vectorised

EXECUTORS = ["torch", "reference"]
PAGE_SIZE, LAYERS = 4, 2
CACHE_LENGTHS, QUERY_LENS = (3, 0, 8, -1), (3, 4, 0, 1)  # the last is a padding row: its token has no place
TABLE = [[5, 1, 9], [2, 9, 9], [4, 3, 9], [9, 9, 9]]
SCALES_TABLE = [[0, 6, 8], [7, 9, 9], [1, 2, 8], [9, 9, 9]]
WHERE = [(0, 3), (0, 4), (0, 5), (1, 0), (1, 1), (1, 2), (1, 3), None]  # request and position of every token


@dataclass
class Target:
    """Both pools in untouched arenas, and the step that writes into them."""

    layout: CacheLayout
    values: KVCacheInputsPerDevice
    pool: Geometry
    arena: Tensor
    scale_pool: Geometry | None
    scale_arena: Tensor | None
    scales_table: list[list[int]]

    def bytes(self) -> tuple[Tensor, Tensor | None]:
        return raw_view(self.arena).clone(), None if self.scale_arena is None else raw_view(self.scale_arena).clone()


def target(layout: CacheLayout, *, padded: bool = False, shared: bool = False, short: bool = False,
           scale_dtype: torch.dtype = torch.float32) -> Target:  # fmt: skip
    padding = 16 if padded else 0
    pool = Geometry(6, 1, LAYERS, PAGE_SIZE, 1, layout.row_elements, padding)
    arena = untouched(pool.elements, layout.value_dtypes[0])
    bind = Geometry.short if short else Geometry.strided
    scale_pool, scale_arena = None, None
    if layout.scales_per_token:
        scale_pool = Geometry(8, 1, LAYERS, PAGE_SIZE, 1, layout.scales_per_token, 3 if padded else 0)
        scale_arena = untouched(scale_pool.elements, scale_dtype)
    scales_table = TABLE if shared else SCALES_TABLE
    values = KVCacheInputsPerDevice(
        bind(pool, arena),
        torch.tensor(CACHE_LENGTHS, dtype=torch.int32),
        as_table(torch.tensor(TABLE)),
        4,
        8,
        pool.page_stride if short else -1,
        kv_scales=None if scale_pool is None or scale_arena is None else bind(scale_pool, scale_arena),
        scales_page_stride=None if scale_pool is None else scale_pool.page_stride if short else -1,
        scales_lookup_table=None if scale_pool is None or shared else as_table(torch.tensor(scales_table)),
    )
    return Target(layout, values, pool, arena, scale_pool, scale_arena, scales_table)


def tokens(count: int = len(WHERE), layout: CacheLayout = LAYOUTS["bf16"]) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(count, layout.latent, generator=g) * 3, torch.randn(count, layout.rope, generator=g)


def starts() -> Tensor:
    return torch.tensor([0, *QUERY_LENS]).cumsum(0).to(torch.int32)


def expected(made: Target, latent: Tensor, rope: Tensor, layer: int, keep: list[int], **options: object) -> tuple:
    """Both arenas as they must be after the tokens in `keep` are stored."""
    memory, scale_memory = made.bytes()
    scale_dtype = None if made.scale_arena is None else made.scale_arena.dtype
    for t in keep:
        at = WHERE[t]
        assert at is not None
        b, position = at
        page, slot = divmod(position, PAGE_SIZE)
        rows = made.layout.quantize(latent[t], rope[t], scale_dtype=scale_dtype, **options)  # type: ignore[arg-type]
        first = made.pool.address(TABLE[b][page], 0, layer, slot, 0, 0)
        memory[first : first + made.pool.width] = raw_view(rows.values)
        if made.scale_pool is not None and scale_memory is not None and rows.scales is not None:
            first = made.scale_pool.address(made.scales_table[b][page], 0, layer, slot, 0, 0)
            scale_memory[first : first + made.scale_pool.width] = raw_view(rows.scales)
    return memory, scale_memory


def assert_bytes(made: Target, want: tuple[Tensor, Tensor | None]) -> None:
    memory, scale_memory = made.bytes()
    assert torch.equal(memory, want[0])
    assert (scale_memory is None) == (want[1] is None)
    if scale_memory is not None and want[1] is not None:
        assert torch.equal(scale_memory, want[1])


REAL = [t for t, at in enumerate(WHERE) if at is not None]


# -- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("shared", [True, False], ids=["shared-table", "own-table"])
@pytest.mark.parametrize("pages", ["packed", "padded", "short"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("layout", ["bf16", "fp8_flat-g128", "fp8_rope_bf16", "fp8_ds_mla"])
def test_a_store_writes_its_bytes_and_no_other(
    layout: str, layer: int, pages: str, shared: bool, executor: str
) -> None:
    made = target(LAYOUTS[layout], padded=pages != "packed", short=pages == "short", shared=shared)
    latent, rope = tokens()
    want = expected(made, latent, rope, layer, REAL)
    pagedmla.store(latent, rope, made.values, layer, query_start_loc=starts(), layout=made.layout, executor=executor)
    assert_bytes(made, want)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_every_layout_and_input_dtype(layout: str, dtype: torch.dtype, executor: str) -> None:
    made = target(LAYOUTS[layout])
    latent, rope = (each.to(dtype) for each in tokens())
    want = expected(made, latent, rope, 1, REAL)
    pagedmla.store(latent, rope, made.values, 1, query_start_loc=starts(), layout=made.layout, executor=executor)
    assert_bytes(made, want)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float8_e8m0fnu], ids=str)
def test_other_scale_dtypes(scale_dtype: torch.dtype, executor: str) -> None:
    made = target(LAYOUTS["fp8_flat-g64"], scale_dtype=scale_dtype)
    latent, rope = tokens()
    want = expected(made, latent, rope, 0, REAL)
    pagedmla.store(latent, rope, made.values, 0, query_start_loc=starts(), layout=made.layout, executor=executor)
    assert_bytes(made, want)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_power_of_two_scales(executor: str) -> None:
    made = target(LAYOUTS["fp8_rope_bf16"])
    latent, rope = tokens()
    want = expected(made, latent, rope, 0, REAL, power_of_two=True)
    pagedmla.store(
        latent, rope, made.values, 0, query_start_loc=starts(), layout=made.layout, executor=executor, power_of_two=True
    )
    assert_bytes(made, want)


# -- slot mappings -----------------------------------------------------------------------------------------------------


def slots_through(table: list[list[int]]) -> Tensor:
    """An engine's slot mapping: page id * page size + slot, -1 for padding."""
    pages = [-1 if at is None else table[at[0]][at[1] // PAGE_SIZE] * PAGE_SIZE + at[1] % PAGE_SIZE for at in WHERE]
    return torch.tensor(pages)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("layout", "shared"), [("fp8_rope_bf16", True), ("fp8_rope_bf16", False), ("fp8_ds_mla", True), ("bf16", True)]
)
def test_slot_mappings_mean_the_same_as_tables(layout: str, shared: bool, executor: str) -> None:
    made = target(LAYOUTS[layout], shared=shared)
    latent, rope = tokens()
    want = expected(made, latent, rope, 1, REAL)
    nothing_to_read = replace(
        made.values, lookup_table=torch.full((4, 0), 0, dtype=torch.int32), scales_lookup_table=None
    )
    pagedmla.store(
        latent, rope, nothing_to_read, 1, layout=made.layout, executor=executor, check=True,
        slot_mapping=slots_through(TABLE), scales_slot_mapping=None if shared else slots_through(made.scales_table),
    )  # fmt: skip
    assert_bytes(made, want)


@pytest.mark.parametrize("slots_of_step", [meaning.slots_of_step, vectorised.slots_of_step], ids=["reference", "torch"])
def test_slots_of_a_step(slots_of_step) -> None:
    made = target(LAYOUTS["fp8_rope_bf16"])
    cache = made.values.collection(640)
    assert slots_of_step(cache, starts(), cache.lookup_table).tolist() == [23, 4, 5, 8, 9, 10, 11, -1]
    assert slots_of_step(cache, starts(), cache.scales_lookup_table).tolist() == [3, 24, 25, 28, 29, 30, 31, -1]
    negative = as_table(torch.tensor([[-1, 1, 9], *TABLE[1:]]))
    assert slots_of_step(cache, starts(), negative).tolist()[:3] == [meaning.OUT_OF_POOL, 4, 5]
    unsigned = slots_of_step(cache, starts(), negative.view(torch.uint32)).tolist()
    assert unsigned[:3] == [0xFFFFFFFF * 4 + 3, 4, 5]
    idle = torch.zeros(5, dtype=torch.int32)
    assert slots_of_step(cache, idle, cache.lookup_table).tolist() == []


# -- what is dropped ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("which", "slot"), [("value", 24), ("value", -2), ("value", 2**40), ("scale", 32), ("scale", -7)]
)
def test_a_token_outside_either_pool_is_dropped_whole(which: str, slot: int, executor: str) -> None:
    """A row without its scale, or a scale without its row, would be read as something else."""
    made = target(LAYOUTS["fp8_rope_bf16"], padded=True)
    latent, rope = tokens()
    value_slots, scale_slots = slots_through(TABLE), slots_through(SCALES_TABLE)
    (value_slots if which == "value" else scale_slots)[4] = slot
    want = expected(made, latent, rope, 0, [t for t in REAL if t != 4])
    shown = (slot, 29) if which == "value" else (9, slot)
    message = (
        rf"store: 1 of 8 tokens dropped, first token 4 \(value slot {shown[0]}, scale slot {shown[1]}\), outside "
        rf"kv_blocks "
        rf"\(24 slots of float8_e4m3fn\) or kv_scales \(32 slots of float32\)"
    )
    with pytest.warns(DroppedStoreWarning, match=message):
        pagedmla.store(
            latent, rope, made.values, 0, layout=made.layout, executor=executor,
            slot_mapping=value_slots, scales_slot_mapping=scale_slots,
        )  # fmt: skip
    assert_bytes(made, want)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("page", [6, 0xFFFFFFFF, -1])
def test_a_page_outside_the_pool_is_dropped_or_refused(page: int, executor: str) -> None:
    """MAX's sentinel is one past the last page: storing to it overwrites what lies behind the pool there."""
    made = target(LAYOUTS["fp8_rope_bf16"])
    bad = torch.tensor(TABLE)
    bad[0, 1] = page
    made.values = replace(made.values, lookup_table=as_table(bad, torch.int32 if page < 0 else torch.uint32),
                          scales_lookup_table=as_table(torch.tensor(SCALES_TABLE), torch.uint32))  # fmt: skip
    latent, rope = tokens()
    arguments = {"query_start_loc": starts(), "layout": made.layout, "executor": executor}
    before = made.bytes()
    message = rf"lookup_table: row 0, column 1 holds page id {page}; kv_blocks has 6 pages"
    with pytest.raises(IndexError, match=message):
        pagedmla.store(latent, rope, made.values, 0, check=True, **arguments)
    assert_bytes(made, before)
    want = expected(made, latent, rope, 0, [0, 3, 4, 5, 6])
    with pytest.warns(DroppedStoreWarning, match="store: 2 of 8 tokens dropped, first token 1, outside kv_blocks"):
        pagedmla.store(latent, rope, made.values, 0, **arguments)
    assert_bytes(made, want)


# -- per-tensor scales, NaN, padding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_scale_for_the_whole_pool_is_read_and_never_written(executor: str) -> None:
    made = target(LAYOUTS["fp8_flat"], shared=True)
    sigma = torch.tensor([0.5, 2.0])
    made.values = replace(
        made.values, kv_scales=per_tensor_scale(sigma, made.values.kv_blocks), scales_page_stride=None
    )
    latent, rope = tokens()
    want, _ = expected(made, latent, rope, 1, REAL, sigma=torch.tensor([2.0]))
    pagedmla.store(latent, rope, made.values, 1, query_start_loc=starts(), layout=made.layout, executor=executor)
    assert torch.equal(made.bytes()[0], want)
    assert sigma.tolist() == [0.5, 2.0]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", ["fp8_flat", "fp8_rope_bf16", "fp8_ds_mla", "bf16"])
def test_nan_stays_in_its_token(layout: str, executor: str) -> None:
    clean, dirty = target(LAYOUTS[layout]), target(LAYOUTS[layout])
    latent, rope = tokens()
    arguments = {"query_start_loc": starts(), "layout": LAYOUTS[layout], "executor": executor}
    pagedmla.store(latent, rope, clean.values, 0, **arguments)
    latent[4, 100] = math.nan
    pagedmla.store(latent, rope, dirty.values, 0, **arguments)
    memory, want = dirty.bytes()[0], clean.bytes()[0]
    first = clean.pool.address(2, 0, 0, 1, 0, 0)
    row = slice(first, first + clean.pool.width)
    assert not torch.equal(memory[row], want[row])
    memory[row] = want[row]
    assert torch.equal(memory, want)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_padding_tokens_are_not_stored(executor: str) -> None:
    """Behind query_start_loc[-1], and in a batch whose tables have no columns at all."""
    made = target(LAYOUTS["fp8_rope_bf16"])
    latent, rope = tokens(len(WHERE) + 3)
    want = expected(made, latent, rope, 0, REAL)
    pagedmla.store(latent, rope, made.values, 0, query_start_loc=starts(), layout=made.layout, executor=executor)
    assert_bytes(made, want)
    empty = torch.zeros(4, 0, dtype=torch.int32)
    idle = replace(made.values, cache_lengths=torch.full((4,), -1, dtype=torch.int32), lookup_table=empty,
                   scales_lookup_table=empty)  # fmt: skip
    pagedmla.store(latent[:4], rope[:4], idle, 0, layout=made.layout, executor=executor)
    assert_bytes(made, want)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_nothing_to_store(executor: str) -> None:
    made = target(LAYOUTS["fp8_rope_bf16"])
    before = made.bytes()
    latent, rope = tokens(0)
    none = torch.zeros(5, dtype=torch.int32)
    pagedmla.store(latent, rope, made.values, 0, query_start_loc=none, layout=made.layout, executor=executor)
    pagedmla.store(latent, rope, made.values, 0, slot_mapping=torch.zeros(0, dtype=torch.int64), layout=made.layout,
                   executor=executor)  # fmt: skip
    no_batch = replace(made.values, cache_lengths=torch.zeros(0, dtype=torch.int32),
                       lookup_table=torch.zeros(0, 3, dtype=torch.int32), scales_lookup_table=None)  # fmt: skip
    pagedmla.store(latent, rope, no_batch, 0, layout=made.layout, executor=executor)
    assert_bytes(made, before)
    assert bool((before[0] == FILL).all())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_inputs_of_any_stride(executor: str) -> None:
    made = target(LAYOUTS["fp8_rope_bf16"])
    latent, rope = tokens()
    want = expected(made, latent, rope, 0, REAL)
    fused = torch.cat((latent, rope), 1)
    pagedmla.store(fused[:, :512], fused[:, 512:], made.values, 0, query_start_loc=starts(), layout=made.layout,
                   executor=executor)  # fmt: skip
    assert_bytes(made, want)
