"""Decode for Hopper: FP8 paged MLA attention of a few query tokens a request, in the CUTLASS Python DSL.

contract   see docs/contract.md; layouts fp8_rope_bf16, fp8_rope_bf16_prescaled, and fp8_flat with one scale a token or
           a tensor; latent 512, rope 64; q and out bf16; pages of 16 to 256 keys at strides of 16 bytes
arguments  arguments.py: `DECODE`
meaning    reference/attention.py; the algorithm step by step: model.py
grid       (workers * cluster,): CTAs that stay, each with an equal share of all tiles of keys (schedule.py)
roles      protocol.py: one producer warp, two consumer warpgroups
limits     variants.py lists what is compiled, and why
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.cute.nvgpu.cpasync as cpasync
import cutlass.cute.nvgpu.warpgroup as warpgroup
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor, make_ptr
from cutlass.cute.typing import Pointer

from pagedmla.cutlass_kernels import epilogue, queries, schedule, work
from pagedmla.cutlass_kernels.arguments import DECODE, INT32, INT64, POINTER
from pagedmla.cutlass_kernels.barriers import Barriers
from pagedmla.cutlass_kernels.consumer import Begin, Consumer, Place
from pagedmla.cutlass_kernels.producer import Pages, Producer
from pagedmla.cutlass_kernels.protocol import Action
from pagedmla.cutlass_kernels.scores import Scores
from pagedmla.cutlass_kernels.tiles import ALIGNMENT, LATENT_PANELS, PANEL_BYTES, THREADS, WARPGROUPS, WARPS
from pagedmla.cutlass_kernels.traced import Traced
from pagedmla.cutlass_kernels.values import Values
from pagedmla.cutlass_kernels.variants import Variant

_ROLE = "consumer0"  # both do the same steps


class ConsumerRole(Traced):
    """Called with each item of the CTA's share: `fill` is its first tile's, the one behind its last is returned."""

    def __init__(
        self,
        consumer: Consumer,
        rows: queries.Rows,
        outputs: epilogue.Outputs,
        rank: Any,
        causal: Any,
        notes: work.Notes,
    ) -> None:
        self.consumer, self.rows, self.outputs = consumer, rows, outputs
        self.rank, self.causal, self.notes = rank, causal, notes
        self.scores, self.values = Scores(consumer), Values(consumer)

    @cute.jit
    def __call__(self, item: work.Item, fill: Int32, items: Int32) -> Int32:
        consumer, barriers, place = self.consumer, self.consumer.barriers, self.consumer.place
        first_row = queries.first_row(consumer, item, self.rank)
        barriers.begin(_ROLE, "before")
        barriers.acquire("queries", items)
        queries.load_queries(consumer, self.rows, item, first_row)
        if place.which == 0:
            queries.set_rows(consumer, self.rows, item, first_row, self.causal)
        cute.arch.fence_proxy("async.shared", space="cta")
        consumer.meet()
        if consumer.is_first():
            barriers.commit("queries", items)
        self.values.clear()
        work.keep_range(self.notes, item, self._seen_by_all(item, first_row), fill)
        cute.arch.sync_warp()
        barriers.wait("queries", items)
        barriers.end()
        if item.tiles > 0:
            self._walk()
        barriers.begin(_ROLE, "after")
        piece, pieces = work.pieces_of(self.notes)
        epilogue.write(consumer, self.values, self.outputs, piece, pieces)
        consumer.meet()
        if consumer.is_first():
            barriers.release("queries", work.items_before(self.notes))
        barriers.end()
        keys = work.range_of(self.notes)
        return keys.fill + keys.tiles

    @cute.jit
    def _walk(self) -> None:
        """All tiles of an item. The consumer scores every other one; its last trip may multiply the other's alone."""
        barriers, ahead = self.consumer.barriers, self.consumer.shape.ahead
        known = work.range_of(self.notes)
        tile = Int32(self.consumer.place.which)
        if cutlass.const_expr(ahead):
            barriers.begin(_ROLE, "trip", (2,))
            for part in self._following(known, tile, 1):
                part.call()
            barriers.end()
        running = Int32(tile < known.tiles)
        while running != 0:
            barriers.begin(_ROLE, "trip")
            self._trip(known, tile)
            barriers.end()
            tile += WARPGROUPS
            running = Int32(tile < self._keys(known).tiles)
        keys = self._keys(known)
        if tile == keys.tiles:
            barriers.begin(_ROLE, "trip", (-1,))
            fill = keys.fill + tile - 1
            barriers.wait("keys", fill, -1)
            self.values.prepare(keys, tile - 1)
            self.values.load(fill, self.values.matrices_before)
            barriers.wait("probabilities", fill, -1)
            self.values.rescale(fill)
            self.values.multiply(fill, self.values.matrices_before, -1)
            barriers.end()
        if cutlass.const_expr(ahead):
            warpgroup.wait_group(0)

    def _keys(self, keys: work.Keys) -> work.Keys:
        """The item's range; with 64 rows read anew, for it would cost registers where they are short."""
        return work.range_of(self.notes) if self.consumer.shape.rows > 32 else keys

    def _following(self, keys: work.Keys, tile: Any, back: int) -> Sequence[Begin]:
        """What begins the scores of a tile to come.

        Past the end it takes those of the tile `back` before it again, whatever its stage holds by then: nobody looks
        at them, they spare a branch where products are under way.
        """
        if not self.consumer.shape.ahead:
            return ()
        fill = keys.fill + tile - (1 - Int32(tile < keys.tiles)) * back
        first, *others = self.scores.parts_of(fill)
        return Begin(partial(self._when_there, fill, first.call), first.groups), *others

    def _when_there(self, fill: Any, begin: Callable[[], None]) -> None:
        self.consumer.barriers.wait("keys", fill, 2)
        begin()

    @cute.jit
    def _trip(self, known: work.Keys, tile: Int32) -> None:
        """The trip at the consumer's own tile, in the order of the protocol."""
        consumer, barriers, scores, values = self.consumer, self.consumer.barriers, self.scores, self.values
        keys = self._keys(known)
        fill = keys.fill + tile
        if cutlass.const_expr(not consumer.shape.ahead):
            barriers.wait("keys", fill)
            scores.begin(fill)
        scores.finish(keys, tile)
        before = fill - Int32(tile > 0)  # the first tile stands in for the one before it
        if tile > 0:
            barriers.wait("keys", before, -1)
        values.load(before, values.matrices_before)
        consumer.meet()
        if tile > 0:
            barriers.wait("probabilities", before, -1)
        barriers.acquire("probabilities", fill)
        scores.settle(fill)
        keys = self._keys(known)
        values.prepare(keys, tile)
        if cutlass.const_expr(consumer.shape.matrices_ahead > 1):
            values.load(fill, values.matrices_own)
        consumer.meet()
        scores.store(fill)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if consumer.is_first_of_warp():
            barriers.commit("probabilities", fill)
        if tile > 0:
            values.rescale(before)
            values.multiply(before, values.matrices_before, -1)
        values.rescale(fill)
        if cutlass.const_expr(consumer.shape.matrices_ahead == 1):
            values.load(fill, values.matrices_own)
        barriers.wait("probabilities", fill)
        values.multiply(fill, values.matrices_own, 0, self._following(self._keys(known), tile + WARPGROUPS, WARPGROUPS))

    def _seen_by_all(self, item: work.Item, first_row: Any) -> Any:
        """Keys that each of the CTA's rows sees: its first token's, if causal."""
        token = first_row // self.rows.heads
        return schedule.keys_seen(item.request.cache_length, item.request.kv_len, token, self.causal)


class Decode:
    """A variant's kernel and the host function that the DSL compiles with it."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.protocol = variant.protocol

    @cute.jit
    def __call__(
        self,
        latent: cute.Tensor,
        rope: cute.Tensor,
        pointers: tuple[Pointer, ...],
        wide: tuple[Int64, ...],
        narrow: tuple[Int32, ...],
        scale_log2: Float32,
        workers: Int32,
        stream: Any,
    ) -> None:
        """`latent` and `rope`: bytes [width, page_size, pages]; the others are in the order of `arguments.DECODE`."""
        variant = self.variant
        latent_map = self._map(latent, PANEL_BYTES)
        rope_map = self._map(rope, variant.shape.rope_bytes)
        self.kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(latent_map, rope_map, *pointers, *wide, *narrow, scale_log2).launch(
            grid=[workers * variant.cluster, 1, 1],
            block=[self.protocol.threads, 1, 1],
            cluster=[variant.cluster, 1, 1],
            smem=variant.shape.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _map(self, tensor: Any, width: int) -> Any:
        box = self.variant.box
        swizzle = cute.make_swizzle(3 if width == 128 else 2, 4, 3)
        plain = cute.make_layout((width, box, 1), stride=(1, width, width * box))
        layout = cute.make_composed_layout(swizzle, 0, plain)
        operation = cpasync.CopyBulkTensorTileG2SOp()
        if self.variant.cluster > 1:
            operation = cpasync.CopyBulkTensorTileG2SMulticastOp()
        atom, _ = cpasync.make_tiled_tma_atom(operation, tensor, layout, (width, box, 1))
        return atom

    @cute.kernel
    def kernel(
        self,
        latent_map: cute.CopyAtom,
        rope_map: cute.CopyAtom,
        q: Pointer,
        lookup_table: Pointer,
        scales: Pointer,
        scales_lookup_table: Pointer,
        cache_lengths: Pointer,
        query_start_loc: Pointer,
        out: Pointer,
        lse: Pointer,
        partial_out: Pointer,
        partial_lse: Pointer,
        cuts: Pointer,
        stride_scale_page: Int64,
        stride_scale_slot: Int64,
        stride_q_token: Int64,
        stride_q_head: Int64,
        stride_out_token: Int64,
        stride_out_head: Int64,
        stride_table: Int32,
        stride_scales_table: Int32,
        batch: Int32,
        tokens: Int32,
        heads: Int32,
        page_shift: Int32,
        partitions: Int32,
        causal: Int32,
        scale_log2: Float32,
    ) -> None:
        variant, protocol = self.variant, self.protocol
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32
        rank, worker, workers = block % variant.cluster, block // variant.cluster, blocks // variant.cluster
        smem = cute.arch.get_dyn_smem(Uint8, alignment=ALIGNMENT)
        address = Int32(smem.toint())
        barriers = Barriers(protocol, smem + variant.shape.place("barriers"))
        if partitions > 1:  # the merge may come as CTAs end; why that is safe: combine.py
            cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            barriers.initialise()
        cute.arch.mbarrier_init_fence()
        lengths = work.Lengths(
            cache_lengths.toint(), query_start_loc.toint(), batch, tokens, heads, workers, partitions
        )
        search = address + variant.shape.place("search")
        # All threads meet in there: behind it the barriers are seen.
        found = work.find_share(lengths, worker, thread, search, variant.rows, protocol.threads)
        notes = work.Notes(found, address + variant.shape.place("notes") + 64 * warp)
        if cutlass.const_expr(variant.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

        producer_warps = protocol.role("producer").warps
        if warp < producer_warps:
            cute.arch.setmaxregister_decrease(protocol.role("producer").registers)
            if warp == 0:
                cpasync.prefetch_descriptor(latent_map)
                cpasync.prefetch_descriptor(rope_map)
                pages = Pages(
                    lookup_table.toint(),
                    scales_lookup_table.toint(),
                    scales.toint(),
                    stride_table,
                    stride_scales_table,
                    stride_scale_page,
                    stride_scale_slot,
                    page_shift,
                )
                producer = Producer(variant, latent_map, rope_map, pages, barriers, smem, address, rank, lane)
                work.walk(producer, lengths, worker, notes, variant.rows)
        else:
            cute.arch.setmaxregister_increase(protocol.role("consumer0").registers)
            which = warp // WARPS - producer_warps // WARPS
            place = Place(which, thread % THREADS, warp % WARPS, lane)
            consumer = Consumer(variant, barriers, smem, address, place)
            rows = queries.Rows(q.toint(), stride_q_token, stride_q_head, heads, scale_log2)
            outputs = epilogue.Outputs(
                out.toint(),
                lse.toint(),
                partial_out.toint(),
                partial_lse.toint(),
                cuts.toint(),
                stride_out_token,
                stride_out_head,
                heads,
            )
            role = ConsumerRole(consumer, rows, outputs, rank, causal, notes)
            work.walk(role, lengths, worker, notes, variant.rows)
        if cutlass.const_expr(variant.cluster > 1):
            barriers.begin("producer", "finish")  # consumers do the same
            barriers.step(Action.MEET, "cluster")
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            barriers.end()


def compile_decode(variant: Variant) -> Any:
    """The variant compiled for sm_90a. Needs no GPU. ValueError for fp16 with 64 rows, which the model alone knows."""
    if variant.shape.rows > 32 and variant.shape.precision == "fp16":
        raise ValueError(f"{variant.name}: expected at most 32 rows with fp16: more leave its rope no accumulators")

    def plane(width: int) -> Any:
        shape = (width, cute.sym_int32(), cute.sym_int32())
        strides = (1, cute.sym_int64(divisibility=16), cute.sym_int64(divisibility=16))
        return make_fake_tensor(Uint8, shape, strides, assumed_align=16)

    def each(kind: str, value: Callable[[], Any]) -> tuple[Any, ...]:
        return tuple(value() for argument in DECODE if argument.kind == kind)

    return cute.compile(
        Decode(variant),
        plane(LATENT_PANELS * PANEL_BYTES),
        plane(variant.shape.rope_bytes),
        each(POINTER, lambda: make_ptr(Uint8, 16, cute.AddressSpace.gmem, assumed_align=16)),
        each(INT64, lambda: Int64(16)),
        each(INT32, lambda: Int32(1)),
        Float32(1.0),
        Int32(132),
        make_fake_stream(),
        options="--gpu-arch sm_90a",
    )
