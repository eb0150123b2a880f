"""The MAX adapter on stand-ins: no MAX is needed. tests/max_cache runs the same adapter on the real package.

The stand-ins are buffers with MAX's names over torch tensors, and dataclasses with the fields of each release: 26.6,
26.7, and one to come. Pages of 4 tokens, 10 rows apart, show where a short tensor ends before its last page does.
"""

from __future__ import annotations

import ctypes
import enum
import gc
import re
import warnings
from dataclasses import make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

import pagedmla
from pagedmla.adapters import dlpack
from pagedmla.adapters import max as adapter
from pagedmla.adapters.dlpack import pages_apart
from pagedmla.adapters.max import (
    UnknownMaxWarning,
    cache_from_max,
    check_version,
    layout_of,
    layout_of_params,
    values_from_flat,
    values_from_max,
    with_decode_scales,
    with_unit_scale,
)
from pagedmla.adapters.to_max import table_columns, values_to_max
from pagedmla.kv_cache.layouts import get_layout
from pagedmla.kv_cache.values import FlattenOrder, KVCacheInputsPerDevice, PagedCacheValues, SplitKVHeadDims

REQUIRED = ["kv_blocks", "cache_lengths", "lookup_table", "max_prompt_length", "max_cache_length"]
DISPATCH = ["attention_dispatch_metadata", "draft_attention_dispatch_metadata",
            "mla_num_partitions", "draft_mla_num_partitions"]  # fmt: skip
PER_LAYER = ["kv_blocks_per_layer", "kv_scales_per_layer"]
RELEASES = {
    "26.6": [*REQUIRED, "kv_scales", "scales_lookup_table", *DISPATCH, *PER_LAYER],
    "26.7": [*REQUIRED, "page_stride", "kv_scales", "scales_page_stride", "scales_lookup_table", *DISPATCH, *PER_LAYER],
    "to come": [*REQUIRED, "page_stride", "kv_scales", "scales_page_stride", "scales_lookup_table", *DISPATCH,
                "split_head_dims", "mixed_step_split"],
}  # fmt: skip

DType = enum.Enum("DType", ["uint8", "int8", "int32", "uint32", "int64", "bfloat16", "float16", "float32",
                            "float8_e4m3fn", "float8_e4m3fnuz", "float8_e8m0fnu"])  # fmt: skip


class Buffer:
    """Stands in for MAX's driver buffer: a dtype with MAX's name, and DLPack. FP8 leaves only as bytes here."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def dtype(self) -> DType:
        return DType[str(self.tensor.dtype).removeprefix("torch.")]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def view(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        return Buffer(self.tensor.view(getattr(torch, dtype.name)).view(shape))

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        assert not self.dtype.name.startswith("float8"), "older torch exchanges no FP8"
        return self.tensor.__dlpack__()


def fields(release: str = "26.7", **changes: Any) -> dict[str, Any]:
    """A cache of 2 requests, 3 pages of 4 tokens, 2 layers, as MAX 26.7 binds it."""
    every = {
        "kv_blocks": torch.zeros(3, 1, 2, 4, 1, 640, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "cache_lengths": torch.tensor([4, 2]).to(torch.uint32),
        "lookup_table": torch.zeros(2, 24, dtype=torch.int32).view(torch.uint32),
        "max_prompt_length": torch.tensor([1]).to(torch.uint32),
        "max_cache_length": torch.tensor([5]).to(torch.uint32),
        "page_stride": torch.tensor([-1]),
        "kv_scales": torch.ones(7, 1, 2, 4, 1, 1),
        "scales_page_stride": torch.tensor([-1]),
        "scales_lookup_table": torch.ones(2, 24, dtype=torch.int32).view(torch.uint32),
        "attention_dispatch_metadata": torch.tensor([2, 1, 3]),
        "draft_attention_dispatch_metadata": torch.tensor([2, 1, 2]),
        "mla_num_partitions": torch.tensor([3]),
        "draft_mla_num_partitions": torch.tensor([2]),
        "mixed_step_split": torch.tensor([1, 1], dtype=torch.int32),
    } | changes
    chosen = {name: every.get(name) for name in RELEASES[release]}
    return {name: Buffer(value) if isinstance(value, Tensor) else value for name, value in chosen.items()}


def inputs(release: str = "26.7", **changes: Any) -> Any:
    """Stands in for MAX's KVCacheInputsPerDevice of that release."""
    given = fields(release, **changes)
    return make_dataclass("KVCacheInputsPerDevice", list(given))(**given)


# -- fields


@pytest.mark.parametrize("release", RELEASES)
def test_every_field_of_every_release_in_the_same_memory(release: str) -> None:
    """26.6 has no page strides; a release to come has two hints more. What is absent comes back None."""
    dims = SimpleNamespace(key_head_dim=576, value_head_dim=512)
    theirs = inputs(release, split_head_dims=dims)
    ours = values_from_max(theirs)
    for name in vars(KVCacheInputsPerDevice(*range(6))):
        buffer, tensor = getattr(theirs, name, None), getattr(ours, name)
        if buffer is None:
            assert tensor is None, name
        elif name == "split_head_dims":
            assert tensor == SplitKVHeadDims(576, 512)
        else:
            assert tensor.data_ptr() == buffer.tensor.data_ptr()
            assert (tensor.dtype, tensor.shape) == (buffer.tensor.dtype, buffer.tensor.shape)
    ours.collection()


def test_scales_without_a_table_share_the_ids_of_values() -> None:
    ours = values_from_max(inputs("26.6", scales_lookup_table=None))
    cache = ours.collection()
    assert cache.scales_lookup_table is ours.lookup_table


@pytest.mark.parametrize(("changes", "error", "sentence"), [
    ({"kv_shadow": torch.ones(1)}, ValueError, "kv_shadow: expected None, since it is none of the known fields kv_bl"),
    ({"lookup_table": None}, ValueError, "lookup_table: expected a buffer, as in every MAX .*; got None"),
    ({"kv_blocks": SimpleNamespace(shape=(1,))}, TypeError, "kv_blocks: expected a driver Buffer .* graph's values"),
    ({"kv_blocks_per_layer": [1, 2]}, ValueError, "kv_blocks_per_layer: expected None: one pool .*; got 2 buffers"),
    ({"split_head_dims": (576, 512)}, ValueError, r"split_head_dims: expected an object .*; got \(576, 512\)"),
    ({"page_stride": torch.tensor([100])}, ValueError, "page_stride: expected at least 5120, the elements of a page"),
])  # fmt: skip
def test_fields_that_are_refused(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    given = fields()
    given |= {name: Buffer(value) if isinstance(value, Tensor) else value for name, value in changes.items()}
    with pytest.raises(error, match=sentence):
        values_from_max(given)


def test_strides_that_run_backwards() -> None:
    """torch ended the process over them, without an exception to catch."""
    backwards = np.arange(6, dtype=np.uint32)[::-2]
    with pytest.raises(ValueError, match=r"cache_lengths: expected strides of at least 0, .*; got strides \(-2,\)"):
        values_from_max(fields(cache_lengths=None) | {"cache_lengths": backwards})
    with pytest.raises(ValueError, match=r"pages: expected strides of at least 0"):
        pages_apart(np.zeros((4, 8), np.float32)[::-1], 40)
    forwards = np.arange(6, dtype=np.uint32)[::3]
    ours = values_from_max(fields(cache_lengths=None) | {"cache_lengths": forwards})
    assert ours.cache_lengths.view(torch.int32).tolist() == [0, 3]
    assert ours.cache_lengths.data_ptr() == forwards.ctypes.data


@pytest.mark.parametrize(("field", "pool"), [("page_stride", "kv_blocks"), ("scales_page_stride", "kv_scales")])
def test_a_page_stride_past_all_addresses(field: str, pool: str) -> None:
    """The size of such a pool overflowed in torch, which ended the process."""
    for stride in (2**62, 2**56):
        with pytest.raises(
            ValueError, match=rf"^{field}: expected at most \d+, with which \d pages have addr.*{stride}"
        ):
            values_from_max(fields(**{field: torch.tensor([stride])}))
    with pytest.raises(ValueError, match=rf"{pool}: expected \[num_pages, ...\]; got \[\]"):
        values_from_max(fields(**{field: torch.tensor([64]), pool: torch.tensor(1.0)}))


@pytest.mark.parametrize(
    "value", [np.array(["a"]), np.zeros(2, ">u4"), np.zeros(2, "M8[s]")], ids=["text", "big", "time"]
)
def test_what_dlpack_doesnt_exchange_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match="cache_lengths: expected memory that its owner and torch exchange by DLPack"):
        values_from_max(fields() | {"cache_lengths": value})


def test_what_isnt_a_cache_is_named() -> None:
    """An AttributeError said 'NoneType' and no more."""
    for function in (layout_of, with_unit_scale):
        with pytest.raises(TypeError, match=r"values: expected PagedCacheValues or KVCacheInputsPerDevice; got None"):
            function(None)
    with pytest.raises(TypeError, match=r"values: expected .*; got None"):
        with_decode_scales(None, torch.ones(1), 0)


@pytest.mark.parametrize("what", [None, 3, SimpleNamespace(leaves=())], ids=["nothing", "a number", "recurrent state"])
def test_what_is_no_paged_cache(what: Any) -> None:
    with pytest.raises(TypeError, match="inputs: expected a paged cache: MAX's KVCacheInputsPerDevice; got"):
        values_from_max(what)


@pytest.mark.parametrize("order", FlattenOrder)
@pytest.mark.parametrize("scaled", [True, False], ids=["scales", "no scales"])
@pytest.mark.parametrize("dispatch", [0, 2, 4])
def test_flat_lists_in_every_order(order: FlattenOrder, scaled: bool, dispatch: int) -> None:
    """How many leaves there are tells which: an MLA cache has no dispatch metadata, one pair, or two."""
    absent = [] if scaled else ["kv_scales", "scales_page_stride", "scales_lookup_table"]
    absent += {0: DISPATCH, 2: [name for name in DISPATCH if name.startswith("draft")], 4: []}[dispatch]
    theirs = {name: None if name in absent else value for name, value in fields().items() if name not in PER_LAYER}
    leaves, spec = KVCacheInputsPerDevice(**theirs).flatten(order)
    ours = values_from_flat(leaves, order)
    assert ours.flatten(order)[1].present == spec.present
    for name in spec.present:
        assert getattr(ours, name).data_ptr() == theirs[name].tensor.data_ptr()


@pytest.mark.parametrize("order", FlattenOrder)
def test_orders_by_their_names(order: FlattenOrder) -> None:
    """A name was looked up as an order: KeyError."""
    leaves = KVCacheInputsPerDevice(**{n: v for n, v in fields().items() if n not in PER_LAYER}).flatten(order)[0]
    by_name, by_order = (values_from_flat(leaves, each) for each in (order.value, order))
    assert by_name.flatten(order)[1] == by_order.flatten(order)[1]
    for other in ("forward", None):
        with pytest.raises(ValueError, match=r"order: expected 'declaration' or 'operand' or 'iteration'; got '?f?"):
            values_from_flat(leaves, other)


def test_a_flat_list_of_another_length() -> None:
    leaves = KVCacheInputsPerDevice(**{n: v for n, v in fields().items() if n not in PER_LAYER}).flatten()[0]
    with pytest.raises(ValueError, match=r"leaves: expected 6 or 8 or 9 or 10 or 11 or 13 for an MLA cache .*; got 12"):
        values_from_flat(leaves[:12])
    with pytest.raises(ValueError, match=r"leaves: expected 5 for \['kv_blocks'.*\]; got 6"):
        values_from_flat(leaves[:6], present=REQUIRED)
    assert values_from_flat(leaves[:5], present=REQUIRED).page_stride is None


# -- padded pools


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_a_short_tensor_becomes_pages_that_lie_apart(dtype: torch.dtype) -> None:
    """A padded pool came as a tensor that ends before its last page: reading the last page was refused, or wrong."""
    rows = 640 if dtype.itemsize == 1 else 576
    page, stride = 2 * 4 * rows, 10 * rows
    arena = torch.arange(3 * stride).to(torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)
    short = arena[: 3 * page].view(3, 1, 2, 4, 1, rows)
    ours = values_from_max(inputs(kv_blocks=short, page_stride=torch.tensor([stride])))
    assert ours.kv_blocks.shape == short.shape
    assert ours.kv_blocks.stride() == (stride, *short.stride()[1:])
    assert ours.kv_blocks.data_ptr() == arena.data_ptr()
    assert ours.kv_blocks.untyped_storage().nbytes() == (2 * stride + page) * dtype.itemsize
    last = arena[2 * stride : 2 * stride + page].view(torch.uint8)
    assert torch.equal(ours.kv_blocks[2].contiguous().view(torch.uint8).flatten(), last)
    ours.kv_blocks[2].view(torch.uint8).fill_(0x38)
    assert bool((last == 0x38).all())
    assert int((arena.view(torch.uint8) == 0x38).sum()) >= page * dtype.itemsize
    assert ours.collection().value_pool.page_stride == stride


def test_pages_apart_of_any_producer() -> None:
    """numpy's own strides were freed with ours in their place, had they not been given back."""
    for _ in range(200):
        base = np.arange(160, dtype=np.float32)
        spread = pages_apart(base[:128].reshape(4, 32), 40)
        assert spread[:, 0].tolist() == [0, 40, 80, 120]
        spread[3, 31] = -1.0
        assert base[151] == -1.0
        del base
        gc.collect(0)
        assert spread[3, 31] == -1.0  # its owner is still there


@pytest.mark.parametrize("page_stride", [32, 40])
def test_what_needs_no_other_strides(page_stride: int) -> None:
    base = torch.arange(32.0)
    assert pages_apart(base.view(1, 32), page_stride).data_ptr() == base.data_ptr()
    assert pages_apart(base.view(1, 32)[:0], page_stride).shape == (0, 32)


def test_pages_that_are_apart_already_or_overlap() -> None:
    base = torch.arange(160.0)
    with pytest.raises(
        ValueError, match="pages: expected a contiguous tensor, since its pages are 48 elements apart; got str"
    ):
        pages_apart(base.as_strided((4, 32), (40, 1)), 48)
    with pytest.raises(ValueError, match="page_stride: expected at least 32, the elements of a page; got 31"):
        pages_apart(base[:128].view(4, 32), 31)


def test_the_producers_strides_are_back_when_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer frees the strides of its struct: they must be its own again, whatever came in between."""
    seen: list[Any] = []

    def refusing(producer: Any) -> Tensor:
        if not seen:
            seen.append(None)
            return from_dlpack(producer)
        capsule = producer.__dlpack__()
        struct = dlpack._DLTensor.from_address(pointer_of(capsule))
        seen.append((capsule, struct, struct.strides[:2]))
        raise RuntimeError("refused")

    def pointer_of(capsule: Any) -> int:
        function = ctypes.pythonapi.PyCapsule_GetPointer
        function.restype, function.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        return int(function(capsule, b"dltensor"))

    monkeypatch.setattr(dlpack, "from_dlpack", refusing)
    with pytest.raises(RuntimeError, match="refused"):
        pages_apart(Buffer(torch.arange(128.0).view(4, 32)), 40)
    _, struct, lent = seen[1]
    assert lent == [40, 1]
    assert struct.strides[:2] == [32, 1]


def test_other_users_of_the_c_api_keep_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each exchange set argument types on functions of ctypes.pythonapi, which are one object for the whole process:
    whoever had declared them otherwise, or called them from another thread, got a wrong answer."""
    declared = ctypes.pythonapi.PyCapsule_GetName
    monkeypatch.setattr(declared, "restype", ctypes.c_void_p)
    monkeypatch.setattr(declared, "argtypes", [ctypes.c_void_p])
    assert dlpack.shared(torch.arange(3), "pages").tolist() == [0, 1, 2]
    assert (declared.restype, list(declared.argtypes)) == (ctypes.c_void_p, [ctypes.c_void_p])


# -- several devices


def test_a_tuple_is_one_cache_on_its_devices() -> None:
    cache = cache_from_max((inputs(), inputs()))
    assert isinstance(cache, PagedCacheValues)
    assert cache.n_devices == 2
    with pytest.raises(ValueError, match=r"device 1 \(cpu\): kv_scales: expected set"):
        cache_from_max((inputs(), inputs(kv_scales=None, scales_page_stride=None, scales_lookup_table=None)))


def test_distributed_values_have_a_shard_for_each_device() -> None:
    """Stands in for MAX's distributed PagedCacheValues: every tensor has local shards, each with one buffer."""
    shards = [fields(), fields()]
    fold = {
        name: SimpleNamespace(local_shards=[SimpleNamespace(storage=shard[name]) for shard in shards])
        for name in shards[0] if shards[0][name] is not None
    }  # fmt: skip
    cache = cache_from_max(SimpleNamespace(**fold))
    assert cache.n_devices == 2
    for index, shard in enumerate(shards):
        assert cache.per_device(index).kv_blocks.data_ptr() == shard["kv_blocks"].tensor.data_ptr()
    assert cache_from_max(inputs()).n_devices == 1


def test_the_wrappers_of_26_6() -> None:
    assert cache_from_max(SimpleNamespace(inputs=[inputs("26.6"), inputs("26.6")])).n_devices == 2
    with pytest.raises(ValueError, match="got a dict of caches: main, draft"):
        cache_from_max(SimpleNamespace(children={"main": 1, "draft": 2}))


def test_several_caches_are_taken_one_by_one() -> None:
    with pytest.raises(
        ValueError, match=r"inputs: expected the devices of one cache; got a dict of caches: main, draft"
    ):
        cache_from_max({"main": (inputs(),), "draft": (inputs(),)})


# -- layouts and scales


def pool(dtype: torch.dtype, row: int, groups: int | None = None) -> KVCacheInputsPerDevice:
    blocks = torch.zeros(3, 1, 2, 4, 1, row, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(
        3, 1, 2, 4, 1, row, dtype=dtype)  # fmt: skip
    scales = None if groups is None else torch.ones(3, 1, 2, 4, 1, groups)
    return KVCacheInputsPerDevice(blocks, *[torch.zeros(1)] * 5, kv_scales=scales)


@pytest.mark.parametrize(("dtype", "row", "groups", "layout"), [
    (torch.bfloat16, 576, None, get_layout("bf16")),
    (torch.float16, 576, None, get_layout("fp16")),
    (torch.float32, 320, None, get_layout("fp32", latent=256)),
    (torch.float8_e4m3fn, 576, None, get_layout("fp8_flat")),
    (torch.float8_e4m3fn, 576, 1, get_layout("fp8_flat")),
    (torch.float8_e4m3fn, 576, 9, get_layout("fp8_flat", granularity=64)),
    (torch.float8_e4m3fn, 320, 1, get_layout("fp8_flat", latent=256)),
    (torch.float8_e4m3fn, 640, 1, get_layout("fp8_rope_bf16_prescaled")),
    (torch.float8_e4m3fn, 640, None, get_layout("fp8_rope_bf16_prescaled")),
    (torch.float8_e4m3fn, 384, 1, get_layout("fp8_rope_bf16_prescaled", latent=256)),
])  # fmt: skip
def test_layouts_of_pools(dtype: torch.dtype, row: int, groups: int | None, layout: Any) -> None:
    """MAX's scaled decode divides the rope by sigma: 640 bytes are never taken for the raw layout."""
    assert layout_of(pool(dtype, row, groups)) == layout


def test_scales_that_dont_divide_the_row_need_their_granularity() -> None:
    """MAX's kernels take groups of 128 in a row of 576, its Python classes don't."""
    values = pool(torch.float8_e4m3fn, 576, 5)
    with pytest.raises(ValueError, match=r'get_layout\("fp8_flat", granularity=128\)'):
        layout_of(values)
    assert layout_of(values, 128) == get_layout("fp8_flat", granularity=128)


@pytest.mark.parametrize(("dtype", "row", "groups", "sentence"), [
    (torch.int8, 576, None, "kv_blocks: expected bfloat16 or float16 or float32 or float8_e4m3fn; got int8"),
    (torch.float8_e4m3fnuz, 576, None, "kv_blocks: expected .* or float8_e4m3fn; got float8_e4m3fnuz"),
    (torch.float8_e4m3fn, 512, None, r"kv_blocks: expected rows of 576 \(fp8_flat\), .* 384 .*; got 512"),
    (torch.bfloat16, 576, 1, "kv_scales: expected None, since layout bf16 keeps no scale pool"),
    (torch.float8_e4m3fn, 640, 5, "kv_scales: expected .* to go with kv_blocks"),
])  # fmt: skip
def test_pools_that_have_no_layout(dtype: torch.dtype, row: int, groups: int | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        layout_of(pool(dtype, row, groups))


def params(**changes: Any) -> Any:
    """Stands in for MAX's MLAKVCacheParams."""
    usual = {"dtype": SimpleNamespace(name="float8_e4m3fn"), "head_dim": 576, "kv_dim": 1, "page_size": 128,
             "slots_per_page": 128, "per_layer_buffers": False, "quantized_kv_cache": True,
             "kvcache_quant_config": SimpleNamespace(quantization_granularity=64)}  # fmt: skip
    return SimpleNamespace(**usual | changes)


def test_layouts_of_params() -> None:
    assert layout_of_params(params()) == get_layout("fp8_flat", granularity=64)
    assert layout_of_params(params(quantized_kv_cache=False)) == get_layout("fp8_flat")
    assert layout_of_params(params(head_dim=640)) == get_layout("fp8_rope_bf16_prescaled")
    assert layout_of_params(params(dtype=SimpleNamespace(name="bfloat16"), quantized_kv_cache=False)) == get_layout(
        "bf16"
    )


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"slots_per_page": 32}, "params.slots_per_page: expected 128; got 32"),
    ({"kv_dim": 2}, "params.kv_dim: expected 1; got 2"),
    ({"per_layer_buffers": True}, "params.per_layer_buffers: expected False; got True"),
    ({"dtype": SimpleNamespace(name="float4_e2m1fn")}, "kv_blocks: expected bfloat16 .*; got float4_e2m1fn"),
])  # fmt: skip
def test_params_that_have_no_layout(changes: dict[str, Any], sentence: str) -> None:
    """A page with fewer slots than tokens looks like a page of fewer tokens: from the pool alone it can't be told."""
    with pytest.raises(ValueError, match=sentence):
        layout_of_params(params(**changes))


def test_fp8_without_scales_is_attended_with_a_scale_of_one() -> None:
    unscaled = {"kv_scales": None, "scales_page_stride": None, "scales_lookup_table": None}
    blocks = torch.zeros(3, 1, 2, 4, 1, 576, dtype=torch.uint8).view(torch.float8_e4m3fn)
    table = torch.tensor([[1, 2] + [0] * 22, [0] * 24], dtype=torch.int32).view(torch.uint32)
    values = with_unit_scale(values_from_max(inputs(kv_blocks=blocks, lookup_table=table, **unscaled)))
    layout, starts = layout_of(values), torch.tensor([0, 1, 1], dtype=torch.int32)
    latent, rope = torch.full((1, 512), 2.0), torch.full((1, 64), -0.5)
    pagedmla.store(latent, rope, values, 1, query_start_loc=starts, layout=layout)
    assert blocks[2, 0, 1, 0, 0].float().tolist() == [2.0] * 512 + [-0.5] * 64  # token 4, by hand
    out, _ = pagedmla.attend(torch.ones(1, 1, 576), values, 1, sm_scale=1.0, query_start_loc=starts, layout=layout)
    torch.testing.assert_close(out, torch.full((1, 1, 512), 2.0))
    with pytest.raises(ValueError, match="kv_scales: expected None: a cache without scales"):
        with_unit_scale(values)


def test_scales_that_come_beside_the_cache() -> None:
    """MAX's scaled decode finds them through the values' table, a buffer for each layer."""
    unscaled = {"kv_scales": None, "scales_page_stride": None, "scales_lookup_table": None}
    values = values_from_max(inputs(**unscaled))
    scales = torch.rand(3, 1, 1, 4, 1, 1)
    layer = with_decode_scales(values, Buffer(scales), 1)
    assert layer.kv_blocks.data_ptr() == values.kv_blocks[:, :, 1].data_ptr()
    assert layer.kv_scales.data_ptr() == scales.data_ptr()
    assert layer.collection(640).scales_lookup_table is values.lookup_table
    assert layout_of(layer) == get_layout("fp8_rope_bf16_prescaled")
    with pytest.raises(ValueError, match=r"kv_scales: expected \[3, 1, 1, 4, 1, 1\] float32; got \[2, 1, 1, 4, 1, 1\]"):
        with_decode_scales(values, Buffer(scales[:2].contiguous()), 1)
    with pytest.raises(IndexError, match="layer: 2 is out of range for a cache of 2 layers"):
        with_decode_scales(values, Buffer(scales), 2)
    with pytest.raises(ValueError, match="kv_scales: expected None in the cache, since they come beside it"):
        with_decode_scales(layer, Buffer(scales), 0)


# -- versions


@pytest.mark.parametrize("version", ["26.6.0", "26.7.0", "26.7.1.dev3"])
def test_known_versions(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(version)


@pytest.mark.parametrize("version", ["26.5.0", "25.4", "nightly", ""])
def test_older_versions_are_named(version: str) -> None:
    with pytest.raises(
        ImportError, match=r"max: expected 26\.6 to 26\.7, .*; got " + re.escape(version) + r"\. Install"
    ):
        check_version(version)


def test_a_newer_version_is_named_once() -> None:
    with pytest.warns(UnknownMaxWarning, match=r"max: 27\.1\.0 is newer than 26\.7, the last one tried"):
        check_version("27.1.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version("27.1.0")


def test_without_max_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise adapter.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(adapter.metadata, "version", absent)
    adapter.installed_version.cache_clear()
    with pytest.raises(ImportError, match=r"max: it is not installed; pip install 'pagedmla\[max\]'"):
        values_to_max(values_from_max(inputs()), "fp8_rope_bf16_prescaled")


def test_table_widths_are_maxs() -> None:
    from cases import golden

    for pages, columns in golden.records("py_api_26.7.0.json")["padded_lut_cols"].items():
        assert table_columns(int(pages) * 128, 128) == table_columns(int(pages) * 128 - 127, 128) == columns


def test_replacing_pools_keeps_the_short_tensors_stride() -> None:
    """values_from_max keeps MAX's own page_stride tensor; a slice of layers with it must still bind."""
    stride = 10 * 640
    arena = torch.zeros(3 * stride, dtype=torch.uint8).view(torch.float8_e4m3fn)
    ours = values_from_max(inputs(kv_blocks=arena[: 3 * 5120].view(3, 1, 2, 4, 1, 640),
                                  page_stride=torch.tensor([stride])))  # fmt: skip
    one = replace(ours, kv_blocks=ours.kv_blocks[:, :, 1:], kv_scales=ours.kv_scales[:, :, 1:])
    assert one.collection(640).value_pool.page_stride == stride
