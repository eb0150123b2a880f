"""The producer: one warp that walks the page tables and brings tiles of keys into the ring.

Values come by tensor copies with the page's id as a coordinate, a tile of keys each, or a page where pages are smaller;
sigma by the lanes' own asynchronous copies through its own table. Nothing at or past kv_len is fetched by a lane, and
no page past the last live one is named; what a whole box brings beyond kv_len is masked by the consumers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu.cpasync as cpasync
from cutlass import Int32, Int64

from pagedmla.cutlass_kernels import ptx, schedule
from pagedmla.cutlass_kernels.barriers import Barriers
from pagedmla.cutlass_kernels.protocol import Action
from pagedmla.cutlass_kernels.tiles import KEYS, LATENT_BYTES, LATENT_PANELS, PANEL_BYTES
from pagedmla.cutlass_kernels.traced import Traced
from pagedmla.cutlass_kernels.variants import PAGE_SIZES, Variant
from pagedmla.cutlass_kernels.work import Item

_MOST_PAGES = 1 << 30  # more than any pool has; the tensor map holds the true bound
_LARGEST_PAGE = PAGE_SIZES[-1]


class Pages(NamedTuple):
    """Tables and scales; addresses are Int64."""

    table: Any
    scales_table: Any
    scales: Any
    stride_table: Any
    stride_scales_table: Any
    stride_scale_page: Any
    stride_scale_slot: Any
    page_shift: Any


class Producer(Traced):
    """Called with each item of the CTA's share: `fill` is its first tile's, the one behind its last is returned."""

    def __init__(
        self,
        variant: Variant,
        latent_map: Any,
        rope_map: Any,
        pages: Pages,
        barriers: Barriers,
        smem: Any,
        smem_address: Any,
        rank: Any,
        lane: Any,
    ) -> None:
        self.variant, self.shape = variant, variant.shape
        self.maps = (latent_map, rope_map)
        self.pages, self.barriers = pages, barriers
        self.smem, self.smem_address = smem, smem_address
        self.rank, self.lane = rank, lane

    @cute.jit
    def __call__(self, item: Item, fill: Int32, items: Int32) -> Int32:
        lane, kv_len = self.lane, item.request.kv_len
        first_copied = self.rank * self.variant.copied_keys
        box_lane = schedule.smaller(lane, self.variant.copies - 1)
        table = self.pages.table + Int64(item.request.index) * self.pages.stride_table * 4
        scales_table = self.pages.scales_table + Int64(item.request.index) * self.pages.stride_scales_table * 4
        key = item.begin * KEYS
        page = self._page(table, key + first_copied + box_lane * self.variant.box, kv_len)
        low, high = (self._page(scales_table, key + lane + 32 * half, kv_len) for half in range(2))
        for tile in cutlass.range(item.begin, item.begin + item.tiles, unroll=1):
            key = tile * KEYS
            after = key + KEYS
            next_page = self._page(table, after + first_copied + box_lane * self.variant.box, kv_len)
            next_low = self._page(scales_table, after + lane, kv_len)
            next_high = self._page(scales_table, after + lane + 32, kv_len)
            self.barriers.begin("producer", "trip")
            self.barriers.acquire("keys", fill)
            boxes = schedule.smaller(schedule.ceildiv(kv_len - key, self.variant.box), KEYS // self.variant.box)
            self.barriers.step(Action.ARM, "keys")
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    self.barriers.full("keys", fill), boxes * (self.variant.box * self.shape.key_bytes)
                )
            self.barriers.step(Action.COPY, "keys")
            for box in cutlass.range_constexpr(self.variant.copies):
                in_tile = first_copied + box * self.variant.box
                its_page = cute.arch.shuffle_sync(page, box)
                if key + in_tile < kv_len:
                    self._copy(fill, its_page, key + in_tile, in_tile)
            self.barriers.step(Action.FETCH, "keys")
            self._fetch_sigma(fill, low, key + lane, lane, kv_len)
            self._fetch_sigma(fill, high, key + lane + 32, lane + 32, kv_len)
            cute.arch.cp_async_mbarrier_arrive_noinc(self.barriers.full("keys", fill))
            self.barriers.end()
            page, low, high = next_page, next_low, next_high
            fill += 1
        return fill

    def _page(self, table: Any, key: Any, kv_len: Any) -> Any:
        """Id of a key's page, 0 past the end."""
        column = key >> self.pages.page_shift
        return ptx.load_global_or(table + Int64(column) * 4, 1, key < kv_len)[0]

    def _copy(self, fill: Any, page: Any, key: Any, in_tile: Any) -> None:
        """One box of keys, from slot `key % page_size` of a page to row `in_tile` of the stage: panels and rope."""
        stage = self.barriers.stage("keys", fill)
        slot_box = (key & ((1 << self.pages.page_shift) - 1)) // self.variant.box
        latent = self.shape.latent_offset + stage * LATENT_BYTES + in_tile * PANEL_BYTES
        for panel in range(LATENT_PANELS):
            self._copy_box(0, fill, PANEL_BYTES, latent + panel * (KEYS * PANEL_BYTES), panel, slot_box, page)
        width = self.shape.rope_bytes
        rope = self.shape.rope_offset + stage * (KEYS * width) + in_tile * width
        self._copy_box(1, fill, width, rope, 0, slot_box, page)

    def _copy_box(self, which: int, fill: Any, width: int, target: Any, panel: int, slot_box: Any, page: Any) -> None:
        box = self.variant.box
        shape = (width, box, 1)
        source = cute.make_identity_tensor((width * (LATENT_PANELS if which == 0 else 1), _LARGEST_PAGE, _MOST_PAGES))
        boxes = cute.group_modes(cute.local_tile(source, shape, (None, None, None)), 0, 3)
        memory = cute.make_tensor(self.smem + cute.assume(target, 512), cute.make_layout(shape, stride=(1, width, 0)))
        to, come_from = cpasync.tma_partition(
            self.maps[which], 0, cute.make_layout(1), cute.group_modes(memory, 0, 3), boxes
        )
        mask = {"mcast_mask": cutlass.Int16((1 << self.variant.cluster) - 1)} if self.variant.cluster > 1 else {}
        cute.copy(
            self.maps[which],
            come_from[None, panel, slot_box, page],
            to,
            tma_bar_ptr=self.barriers.full("keys", fill),
            **mask,
        )

    def _fetch_sigma(self, fill: Any, page: Any, key: Any, in_tile: Any, kv_len: Any) -> None:
        pages = self.pages
        slot = key & ((1 << pages.page_shift) - 1)
        source = pages.scales + (Int64(page) * pages.stride_scale_page + Int64(slot) * pages.stride_scale_slot) * 4
        stage = self.barriers.stage("keys", fill)
        target = self.smem_address + self.shape.place("sigma") + (stage * KEYS + in_tile) * 4
        ptx.copy_async_or_zero(target, source, Int32(key < kv_len) * 4)
