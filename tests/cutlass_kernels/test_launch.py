"""The launcher: what it packs, what it launches where, what it refuses, and what it costs.

A recording double stands at our driver interface, so addresses, strides and streams are seen as the driver would see
them; tensors lie on the CPU. Grid: a cluster of one and of two, both widths of rope, one and several partitions,
distinct and absent scale tables, strided q and out, empty steps, and two threads at once.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from hashlib import sha256

import pytest
import torch

from pagedmla.cutlass_kernels.arguments import COMBINE, DECODE, FLOAT32, INT32, INT64, MAP, POINTER, Argument, offsets
from pagedmla.cutlass_kernels.cubin_cache import Cubin
from pagedmla.cutlass_kernels.driver import DriverError
from pagedmla.cutlass_kernels.launch import DecodeLauncher, Workspace, partial_rows
from pagedmla.cutlass_kernels.loaded_kernel import ParameterBlock
from pagedmla.cutlass_kernels.variants import VARIANTS
from pagedmla.kv_cache.layouts import get_layout
from pagedmla.kv_cache.paged_tensor import PagedTensor

PAGES, LAYERS = 6, 2


def variant_of(layout="fp8_rope_bf16", rows=16, page_size=64):
    return next(v for v in VARIANTS if (v.layout, v.rows) == (layout, rows) and page_size in v.page_sizes)


def stand_in(name, **changes):
    """A cubin that no driver will see: the double takes its name alone."""
    image = name.encode()
    facts = {"threads": 384, "shared_bytes": 200_000, "cluster": 1, "rows": 16, "may_start_early": False, **changes}
    return Cubin(
        variant=name, entry=f"{name}_0", source="", dsl="", sha256=sha256(image).hexdigest(), image=image, **facts
    )


def make_launcher(recorder, variant, streams=lambda: 7):
    decode = stand_in("decode", cluster=variant.cluster, rows=variant.rows)
    combine = stand_in("combine", threads=512, shared_bytes=11_008, rows=4, may_start_early=True)
    return DecodeLauncher(variant, recorder, 3, decode, combine, streams)


def make_step(variant, batch=3, heads=16, page_size=64, num_partitions=1):
    """A step of one token a request, as the launcher's arguments."""
    layout = get_layout(variant.layout)
    shape = (PAGES, 1, LAYERS, page_size, 1)
    values = torch.zeros(*shape, layout.row_elements, dtype=torch.uint8)
    planes = layout.planes(
        PagedTensor.bind(values, "kv_blocks"), PagedTensor.bind(torch.ones(*shape, 1), "kv_scales"), 1
    )
    return {
        "q": torch.zeros(batch, heads, 576, dtype=torch.bfloat16),
        "planes": planes,
        "lookup_table": torch.zeros(batch, 4, dtype=torch.int32),
        "cache_lengths": torch.zeros(batch, dtype=torch.int32),
        "query_start_loc": torch.arange(batch + 1, dtype=torch.int32),
        "out": torch.zeros(batch, heads, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(batch, heads),
        "workspace": Workspace.empty(partial_rows(variant, 132) if num_partitions > 1 else 0, batch * heads, "cpu"),
        "sm_scale": 0.25,
        "num_partitions": num_partitions,
    }


_FORMATS = {MAP: "128s", POINTER: "Q", INT32: "i", INT64: "q", FLOAT32: "f"}


def unpacked(parameters, arguments):
    places = offsets(arguments)
    return {
        argument.name: struct.unpack_from("<" + _FORMATS[argument.kind], parameters, place)[0]
        for argument, place in zip(arguments, places, strict=True)
    }


def test_every_argument_lies_at_its_place(recorder):
    variant = variant_of()
    step = make_step(variant, num_partitions=3)
    step["scales_lookup_table"] = torch.zeros(3, 9, dtype=torch.uint32)[:, :4]
    step["q"] = torch.zeros(16, 3, 640, dtype=torch.bfloat16)[:, :, :576].transpose(0, 1)
    make_launcher(recorder, variant)(**step)
    decode, _ = recorder.launches
    got = unpacked(decode.parameters, DECODE)
    planes, workspace = step["planes"], step["workspace"]
    assert (got["latent_map"], got["rope_map"]) == (b"\x01" * 128, b"\x02" * 128)
    assert recorder.encoded[0].address == planes.latent.data_ptr()
    assert recorder.encoded[1].address == planes.rope.data_ptr()
    for name in ("q", "lookup_table", "scales_lookup_table", "cache_lengths", "query_start_loc", "out", "lse"):
        assert got[name] == step[name].data_ptr(), name
    assert got["scales"] == planes.scales.data_ptr()
    for name in ("partial_out", "partial_lse", "cuts"):
        assert got[name] == getattr(workspace, name).data_ptr(), name
    assert {name: value for name, value in got.items() if name.startswith("stride")} == {
        "stride_scale_page": LAYERS * 64,
        "stride_scale_slot": 1,
        "stride_q_token": 640,
        "stride_q_head": 3 * 640,
        "stride_out_token": 16 * 512,
        "stride_out_head": 512,
        "stride_table": 4,
        "stride_scales_table": 9,
    }
    assert (got["batch"], got["tokens"], got["heads"], got["page_shift"], got["partitions"]) == (3, 3, 16, 6, 3)
    assert got["scale_log2"] == pytest.approx(0.25 / math.log(2))


def test_without_a_scale_table_the_values_table_serves(recorder):
    step = make_step(variant_of())
    make_launcher(recorder, variant_of())(**step)
    got = unpacked(recorder.launches[0].parameters, DECODE)
    assert got["scales_lookup_table"] == got["lookup_table"] == step["lookup_table"].data_ptr()


def test_a_scale_for_the_whole_tensor_has_strides_of_0(recorder):
    variant = variant_of("fp8_flat")
    step = make_step(variant)
    scales = torch.ones(1, 1, 1).expand(PAGES, 64, 1)
    step["planes"] = replace(step["planes"], scales=scales)
    make_launcher(recorder, variant)(**step)
    got = unpacked(recorder.launches[0].parameters, DECODE)
    assert (got["stride_scale_page"], got["stride_scale_slot"]) == (0, 0)
    assert recorder.encoded[1].box == (64, 64, 1)


@pytest.mark.parametrize("rows", [16, 128])
def test_the_grid_is_what_the_device_holds_at_a_time(recorder, rows):
    variant = variant_of(rows=rows, page_size=32)
    make_launcher(recorder, variant)(**make_step(variant, heads=rows, page_size=32))
    shape = recorder.launches[0].shape
    assert (shape.grid, shape.cluster, shape.threads, shape.shared_bytes) == (132, variant.cluster, 384, 200_000)
    assert not shape.may_start_early
    assert recorder.allowed["decode_0 of module 1"] == 200_000


def test_cut_requests_are_merged_on_the_same_stream(recorder):
    step = make_step(variant_of(), num_partitions=2)
    make_launcher(recorder, variant_of())(**step)
    assert [launch.function for launch in recorder.launches] == ["decode_0 of module 1", "combine_0 of module 2"]
    assert {launch.stream for launch in recorder.launches} == {7}
    merge = recorder.launches[1]
    assert (merge.shape.grid, merge.shape.threads, merge.shape.shared_bytes) == (4 * 48, 512, 11_008)
    assert merge.shape.may_start_early
    got = unpacked(merge.parameters, COMBINE)
    assert (got["rows"], got["heads"], got["tile_rows"]) == (48, 16, 16)
    assert got["partial_out"] == step["workspace"].partial_out.data_ptr()
    assert got["out"] == step["out"].data_ptr()


@pytest.mark.parametrize(
    ("requests", "heads", "ctas"),
    [(1, 16, 64), (32, 16, 264), (128, 16, 264), (2, 128, 264), (1, 66, 264), (1, 65, 260)],
)
def test_the_merge_has_a_cta_a_quarter_row_and_no_more_than_two_a_multiprocessor(recorder, requests, heads, ctas):
    """A merge of 4,096 CTAs, most of which found nothing to do, cost 25 us on an H200."""
    make_launcher(recorder, variant_of())(**make_step(variant_of(), requests, heads, num_partitions=2))
    assert recorder.launches[1].shape.grid == ctas


def test_the_merge_starts_early_and_decode_does_not(recorder):
    """Only the merge waits by itself for the kernel before it: decode, launched so, would overtake the store."""
    launch = make_launcher(recorder, variant_of())
    launch(**make_step(variant_of(), num_partitions=2))
    assert [each.shape.may_start_early for each in recorder.launches] == [False, True]


def test_no_row_gets_more_pieces_than_a_merge_holds(recorder):
    """144 of them: a larger bound would let a merge drop what its warps have no load for."""
    step = make_step(variant_of(), batch=1, heads=1, num_partitions=1000)
    make_launcher(recorder, variant_of())(**step)
    assert unpacked(recorder.launches[0].parameters, DECODE)["partitions"] == 144


def test_one_partition_needs_no_merge(recorder):
    make_launcher(recorder, variant_of())(**make_step(variant_of(), num_partitions=1))
    assert len(recorder.launches) == 1


def test_the_stream_is_asked_for_in_each_call(recorder):
    """A stream that is kept from the first call makes an empty graph: the capture's stream is another one."""
    streams = iter([11, 12])
    launch = make_launcher(recorder, variant_of(), lambda: next(streams))
    step = make_step(variant_of())
    launch(**step)
    launch(**step)
    assert [each.stream for each in recorder.launches] == [11, 12]


def test_loading_and_preparing_are_done_before_and_once(recorder):
    """A module load would break a capture, so the second call of any step may do nothing but launch."""
    launch = make_launcher(recorder, variant_of())
    assert recorder.loaded == [b"decode", b"combine"]
    step = make_step(variant_of(), num_partitions=2)
    for _ in range(3):
        launch(**step)
    assert len(recorder.loaded) == len(recorder.prepared) == len(recorder.encoded) == 2
    assert len(recorder.launches) == 6


def test_a_pool_that_moved_or_grew_gets_maps_of_its_own(recorder):
    """A stale map would read the old pool."""
    launch = make_launcher(recorder, variant_of())
    step = make_step(variant_of())
    planes = step["planes"]
    for pages in (slice(0, 6), slice(1, 6), slice(0, 5), slice(0, 6, 2), slice(0, 6)):
        launch(**{**step, "planes": replace(planes, latent=planes.latent[pages], rope=planes.rope[pages])})
    assert [tiles.dims[2] for tiles in recorder.encoded[::2]] == [6, 5, 5, 3]
    assert len(set(recorder.encoded)) == len(recorder.encoded) == 8
    used = [unpacked(each.parameters, DECODE)["latent_map"][0] for each in recorder.launches]
    assert used == [1, 3, 5, 7, 1]


def test_planes_that_differ_in_meaning_alone_are_checked_again(recorder):
    """The same bytes, but rope to be multiplied by sigma: the kernel's own layout must not hide that."""
    launch = make_launcher(recorder, variant_of())
    step = make_step(variant_of())
    launch(**step)
    for change in ({"rope_scaled": True}, {"scales": None}, {"scales": torch.ones(6, 64, 4)}):
        with pytest.raises(ValueError, match="planes"):
            launch(**{**step, "planes": replace(step["planes"], **change)})


def test_an_empty_step_launches_nothing(recorder):
    make_launcher(recorder, variant_of())(**make_step(variant_of(), batch=0))
    assert recorder.launches == []


def test_padding_rows_without_a_request_are_launched(recorder):
    """A captured graph's rows that no request owns get zeros, so somebody has to write them."""
    step = make_step(variant_of())
    step["lookup_table"] = torch.zeros(0, 4, dtype=torch.int32)
    step["cache_lengths"], step["query_start_loc"] = (
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    make_launcher(recorder, variant_of())(**step)
    got = unpacked(recorder.launches[0].parameters, DECODE)
    assert (got["batch"], got["tokens"]) == (0, 3)


def test_two_threads_do_not_share_a_parameter_block(recorder):
    """The driver lets other threads run while it launches: each must find its own arguments there."""
    prepare = recorder.prepare

    def slow(*args):
        start = prepare(*args)

        def wait_and_start(stream):
            time.sleep(0.0005)
            start(stream)

        return wait_and_start

    recorder.prepare = slow
    launch = make_launcher(recorder, variant_of(), streams=threading.get_ident)
    steps = [make_step(variant_of(), batch=batch) for batch in (3, 5)]
    tokens_of = {}

    def run(step):
        tokens_of[threading.get_ident()] = step["q"].shape[0]
        for _ in range(40):
            launch(**step)

    threads = [threading.Thread(target=run, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.launches) == 80
    # A thread that never used CUDA has no context: each is given one, once.
    assert sorted(recorder.made_current[1:]) == sorted((thread, 3) for thread in tokens_of)
    for each in recorder.launches:
        assert unpacked(each.parameters, DECODE)["tokens"] == tokens_of[each.stream]


def but(**changes):
    return lambda step: {**step, **changes}


def of_planes(**changes):
    return lambda step: {**step, "planes": replace(step["planes"], **changes)}


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


INT32S, BYTES = torch.int32, torch.uint8
REFUSED = [
    (but(q=zeros(3, 16, 512)), r"q: expected \[T, H, 576\] bf16"),
    (but(q=zeros(3, 16, 576, dtype=torch.float16)), r"q: expected \[T, H, 576\] bf16"),
    (but(q=zeros(3, 16, 580)[:, :, :576]), "q: expected rows that begin at multiples of 16 bytes"),
    (but(out=zeros(3, 16, 576)), r"out: expected \[3, 16, 512\] bf16"),
    (but(out=zeros(3, 16, 513)[:, :, :512]), "out: expected rows that begin at multiples of 4 bytes"),
    (but(out=zeros(3 * 16 * 512 + 1)[1:].view(3, 16, 512)), "first bytes at multiples of 16, 4"),
    (but(lse=zeros(3, 16)), r"lse: expected \[3, 16\] float32"),
    (but(lse=zeros(16, 3, dtype=torch.float32).T), r"lse: expected \[3, 16\] float32, contiguous"),
    (but(lookup_table=zeros(2, 4, dtype=INT32S)), r"lookup_table: expected \[3, \*\] int32"),
    (but(lookup_table=zeros(3, 4, dtype=torch.int64)), r"lookup_table: expected \[3, \*\] int32 or uint32"),
    (but(lookup_table=zeros(3, 4, dtype=INT32S).to("meta")), "lookup_table: .* on cpu, as q; got .* meta"),
    (but(scales_lookup_table=zeros(3, 8, dtype=INT32S)[:, ::2]), "scales_lookup_table: .* adjacent columns"),
    (but(cache_lengths=zeros(3, dtype=torch.int64)), r"cache_lengths: expected \[3\] int32"),
    (but(query_start_loc=zeros(3, dtype=INT32S)), r"query_start_loc: expected \[4\] int32"),
    (but(workspace=Workspace.empty(0, 47, "cpu")), "room for 48 rows and 0 partial ones; got room for 47 rows and 0"),
    (but(num_partitions=2), "room for 48 rows and 4224 partial ones; got room for 48 rows and 0 partial ones"),
    (of_planes(scales=None), "planes.scales: expected float32 scales"),
    (of_planes(scales=torch.ones(6, 64, 4)), r"planes.scales: expected \[\*, 64, 1\] float32"),
    (of_planes(scales=torch.ones(6, 64, 1).half()), r"planes.scales: expected \[\*, 64, 1\] float32"),
    (of_planes(rope_scaled=True), r"planes.rope: expected \[6, 64, 64\] bf16"),
    (of_planes(rope=zeros(6, 64, 64, dtype=BYTES)), r"planes.rope: expected \[6, 64, 64\] bf16"),
    (of_planes(latent=zeros(6, 64, 256, dtype=BYTES)), r"planes.latent: expected \[\*, 64, 512\] e4m3"),
    (of_planes(latent=zeros(6, 48, 512, dtype=BYTES)), "planes: expected pages of 64 or 128 or 256"),
    (of_planes(latent=zeros(6, 64, 520, dtype=BYTES)[:, :, :512]), "a slot stride that is a multiple of 16"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_the_variant_does_not_take_is_refused_by_name(recorder, change, message):
    launch = make_launcher(recorder, variant_of())
    with pytest.raises(ValueError, match=message):
        launch(**change(make_step(variant_of())))
    assert recorder.launches == []


def test_gaps_between_arguments_are_zero_and_places_are_as_said():
    arguments = (
        Argument("a", INT32, ""),
        Argument("b", POINTER, ""),
        Argument("c", MAP, ""),
        Argument("d", FLOAT32, ""),
    )
    block = ParameterBlock(arguments)
    assert [address - block.addresses[0] for address in block.addresses] == [0, 8, 64, 192]
    block.pack({"d": 1.0, "c": b"m" * 128, "b": 1 << 40, "a": -1})
    assert unpacked(_bytes_of(block), arguments) == {"a": -1, "b": 1 << 40, "c": b"m" * 128, "d": 1.0}
    assert _bytes_of(block)[4:8] == bytes(4)
    with pytest.raises(KeyError, match="b"):
        block.pack({"a": 0, "c": bytes(128), "d": 0.0})


def _bytes_of(block):
    return ctypes.string_at(block.addresses[0], block.addresses[-1] - block.addresses[0] + 4)


def test_a_call_makes_few_calls(recorder):
    """A call is to cost the host less than 15 us beside the driver's own, some 100 calls of 0.1 us. They are counted,
    both launches together, since a clock lies on a busy machine."""
    recorder.prepare = lambda *args: lambda stream: None
    launch = make_launcher(recorder, variant_of())
    step = make_step(variant_of(), num_partitions=2)
    launch(**step)
    events = Counter()
    sys.setprofile(lambda frame, event, argument: events.update([event]))
    try:
        launch(**step)
    finally:
        sys.setprofile(None)
    assert events["call"] <= 25
    assert events["c_call"] <= 45


def test_a_device_that_holds_no_cluster_is_told_when_it_is_loaded(recorder, monkeypatch):
    """A share of a GPU may have no room for two CTAs of a cluster: the plan passed, and its first step was refused."""
    monkeypatch.setattr(recorder, "active_clusters", lambda *_: 0)
    with pytest.raises(DriverError, match="the device holds no cluster of 1 CTAs of this kernel"):
        make_launcher(recorder, variant_of())
