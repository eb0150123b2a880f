"""What an engine hands over: fields and orders, the bundle of several devices, dispatch metadata, and torch.export.

Devices are "cpu" and "meta": two that every machine has. Messages are checked by their text, each once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed
import torch.utils._pytree as pytree
from cases.steps import StepCase, build_step
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import pagedmla
from pagedmla import FlattenOrder, KVCacheInputsPerDevice, PagedCacheValues, SplitKVHeadDims
from pagedmla.kv_cache.paged_tensor import raw_view
from pagedmla.kv_cache.values import Dispatch, single_device

ORDER = [
    "kv_blocks", "cache_lengths", "lookup_table", "max_prompt_length", "max_cache_length", "page_stride", "kv_scales",
    "scales_page_stride", "scales_lookup_table", "attention_dispatch_metadata", "draft_attention_dispatch_metadata",
    "mla_num_partitions", "draft_mla_num_partitions", "split_head_dims", "mixed_step_split",
]  # fmt: skip


def one_device(device: str = "cpu", **changes: object) -> KVCacheInputsPerDevice:
    """A cache with every field set."""
    full: dict[str, object] = {
        "kv_blocks": torch.zeros(3, 1, 2, 4, 1, 640, device=device).to(torch.float8_e4m3fn),
        "cache_lengths": torch.tensor([4, 2], dtype=torch.int32, device=device),
        "lookup_table": torch.tensor([[0, 1], [2, 9]], dtype=torch.int32, device=device),
        "max_prompt_length": torch.tensor([2], dtype=torch.uint32),
        "max_cache_length": torch.tensor([6], dtype=torch.uint32),
        "page_stride": torch.tensor([-1]),
        "kv_scales": torch.ones(4, 1, 2, 4, 1, 1, device=device),
        "scales_page_stride": torch.tensor([-1]),
        "scales_lookup_table": torch.tensor([[3, 1], [0, 9]], dtype=torch.int32, device=device),
        "attention_dispatch_metadata": torch.tensor([2, 2, 4]),
        "draft_attention_dispatch_metadata": torch.tensor([2, 1, 3]),
        "mla_num_partitions": torch.tensor([4]),
        "draft_mla_num_partitions": torch.tensor([3]),
        "split_head_dims": SplitKVHeadDims(576, 512),
        "mixed_step_split": torch.tensor([1, 1], dtype=torch.int32),
    }
    return KVCacheInputsPerDevice(**{**full, **changes})


UNSCALED = {"kv_scales": None, "scales_page_stride": None, "scales_lookup_table": None}


# -- fields and orders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KVCacheInputsPerDevice, PagedCacheValues])
def test_repr_tells_shapes_and_no_numbers(kind: type[KVCacheInputsPerDevice]) -> None:
    """Every pytest traceback that met a cache held 18 KB of its numbers."""
    lengths = torch.zeros(3, dtype=torch.int32)
    assert repr(kind(torch.zeros(64, 1, 1, 8, 1, 640), lengths, lengths, 1, 2, None)) == (
        f"{kind.__name__}(kv_blocks=[64, 1, 1, 8, 1, 640] float32 cpu, cache_lengths=[3] int32 cpu, "
        "lookup_table=[3] int32 cpu, max_prompt_length=1, max_cache_length=2)"
    )


def test_fields_stand_in_the_documented_order() -> None:
    assert [field.name for field in fields(KVCacheInputsPerDevice)] == ORDER
    assert [field.name for field in fields(PagedCacheValues)] == ORDER
    assert issubclass(PagedCacheValues, KVCacheInputsPerDevice)
    minimal = KVCacheInputsPerDevice(*range(6))
    assert [getattr(minimal, name) for name in ORDER] == [*range(6), *[None] * 9]
    assert KVCacheInputsPerDevice.MUTATED == ("kv_blocks", "kv_scales")


@pytest.mark.parametrize("order", FlattenOrder)
@pytest.mark.parametrize("changes", [{}, UNSCALED, {"draft_mla_num_partitions": None, "split_head_dims": None}],
                         ids=["full", "unscaled", "partly"])  # fmt: skip
def test_orders_round_trip(order: FlattenOrder, changes: dict[str, object]) -> None:
    values = one_device(**changes)
    leaves, spec = values.flatten(order)
    assert all(leaf is getattr(values, name) for leaf, name in zip(leaves, spec.present))
    source = iter([*leaves, "the next one's"])
    back = KVCacheInputsPerDevice.unflatten(source, spec)
    assert next(source) == "the next one's"  # it took exactly its own
    for name in ORDER:
        kept = name in spec.present or name == "split_head_dims"
        assert getattr(back, name) is (getattr(values, name) if kept else None)
    assert [id(leaf) for leaf in back.flatten(order)[0]] == [id(leaf) for leaf in leaves]


def test_what_each_order_holds() -> None:
    values = one_device()
    named = {id(getattr(values, name)): name for name in ORDER}

    def names(order: FlattenOrder) -> list[str]:
        return [named[id(leaf)] for leaf in values.flatten(order)[0]]

    assert names(FlattenOrder.DECLARATION) == [name for name in ORDER if name != "split_head_dims"]
    assert names(FlattenOrder.OPERAND) == [ORDER[0], "page_stride", *ORDER[1:5], *ORDER[6:9]]
    assert names(FlattenOrder.ITERATION) == [*ORDER[:5], "kv_scales"] == [named[id(leaf)] for leaf in values]


def test_unflatten_wants_all_its_leaves() -> None:
    leaves, spec = one_device(**UNSCALED).flatten(FlattenOrder.OPERAND)
    with pytest.raises(ValueError, match=r"leaves: expected 6 for \['kv_blocks', 'page_stride', .*\]; got 4\."):
        KVCacheInputsPerDevice.unflatten(leaves[:4], spec)


def test_values_are_a_pytree() -> None:
    for values in (one_device(), PagedCacheValues.from_upstream([one_device()], ["cpu"])):
        leaves, tree = pytree.tree_flatten(values)
        back = pytree.tree_unflatten(leaves, tree)
        assert type(back) is type(values)
        assert back.split_head_dims == SplitKVHeadDims(576, 512)
        assert back.mixed_step_split is values.mixed_step_split or isinstance(back.mixed_step_split, tuple)
        serialised = pytree.treespec_loads(pytree.treespec_dumps(tree))
        assert pytree.tree_unflatten(leaves, serialised).split_head_dims == SplitKVHeadDims(576, 512)
    moved = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, one_device())
    assert torch.equal(moved.lookup_table, one_device().lookup_table)


# -- collection --------------------------------------------------------------------------------------------------------


def test_collection_of_values() -> None:
    values = one_device()
    collection = values.collection()
    assert collection.blocks is values.kv_blocks
    assert collection.scales is values.kv_scales
    assert (collection.max_prompt_length, collection.max_cache_length) == (2, 6)
    assert collection.scales_lookup_table is values.scales_lookup_table
    plain = one_device(**UNSCALED).collection()
    assert plain.scales is None
    assert plain.scales_lookup_table is plain.lookup_table
    grouped = one_device(kv_scales=torch.ones(4, 1, 2, 4, 1, 3))
    assert grouped.collection(quantization_granularity=256).head_dim_granularity == 3


def test_page_strides_reach_the_pools() -> None:
    arena, scale_arena = torch.zeros(3 * 6000).to(torch.float8_e4m3fn), torch.zeros(4 * 24)
    values = one_device(
        kv_blocks=arena[: 3 * 5120].view(3, 1, 2, 4, 1, 640), page_stride=torch.tensor([6000]),
        kv_scales=scale_arena[: 4 * 8].view(4, 1, 2, 4, 1, 1), scales_page_stride=24,
    )  # fmt: skip
    collection = values.collection()
    assert collection.value_pool.page_stride == 6000
    assert collection.scale_pool is not None
    assert collection.scale_pool.page_stride == 24


def test_scale_fields_without_scales() -> None:
    for name in ("scales_lookup_table", "scales_page_stride"):
        fields_left = {key: value for key, value in UNSCALED.items() if key != name}
        with pytest.raises(ValueError, match=rf"{name}: expected None, since there are no kv_scales; got \["):
            one_device(**fields_left).collection()


def test_blocks_must_be_a_pool() -> None:
    with pytest.raises(TypeError, match=r"kv_blocks: expected a tensor \[\*, \*, \*, \*, \*, \*\]; got list\."):
        one_device(kv_blocks=[1]).collection()
    with pytest.raises(ValueError, match=r"kv_blocks: expected \[\*, \*, \*, \*, \*, \*\]; got \[3\] float32\."):
        one_device(kv_blocks=torch.zeros(3)).collection()


# -- several devices ---------------------------------------------------------------------------------------------------


def test_from_upstream_bundles_every_field() -> None:
    """MAX 26.7 drops the draft fields here and looks at device 0 only."""
    caches = [one_device("cpu"), one_device("meta")]
    bundle = PagedCacheValues.from_upstream(caches, ["cpu", torch.device("meta")])
    assert bundle.n_devices == 2
    for name in ORDER:
        if name == "split_head_dims":
            assert bundle.split_head_dims == SplitKVHeadDims(576, 512)
            continue
        assert isinstance(getattr(bundle, name), tuple)
        assert all(mine is getattr(cache, name) for mine, cache in zip(getattr(bundle, name), caches))
    for index, cache in enumerate(caches):
        single = bundle.per_device(index)
        assert type(single) is KVCacheInputsPerDevice
        assert all(getattr(single, name) is getattr(cache, name) for name in ORDER if name != "split_head_dims")
        assert single.split_head_dims == cache.split_head_dims


def test_plain_tensors_mean_one_device() -> None:
    values = PagedCacheValues(**vars(one_device()))
    assert values.n_devices == 1
    assert values.per_device(0).kv_blocks is values.kv_blocks
    assert values.collection().blocks is values.kv_blocks
    assert single_device(values).lookup_table is values.lookup_table
    for mapping in ("cpu", torch.device("cpu"), ["cpu"]):
        assert PagedCacheValues.from_upstream([one_device()], mapping).n_devices == 1


def test_absent_fields_stay_absent() -> None:
    bundle = PagedCacheValues.from_upstream([one_device(**UNSCALED)] * 2, ["cpu", "cpu"])
    assert bundle.kv_scales is None
    assert bundle.per_device(1).scales_lookup_table is None


@pytest.mark.parametrize("name", [n for n in ORDER[5:] if n != "split_head_dims"])
def test_devices_must_agree_on_optional_fields(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"device 1 \(meta\): {name}: expected set, as on device 0 \(cpu\); got None\."
    ):
        PagedCacheValues.from_upstream([one_device("cpu"), one_device("meta", **{name: None})], ["cpu", "meta"])
    with pytest.raises(
        ValueError, match=rf"device 1 \(meta\): {name}: expected None, as on device 0 \(cpu\); got set\."
    ):
        PagedCacheValues.from_upstream([one_device("cpu", **{name: None}), one_device("meta")], ["cpu", "meta"])


BUNDLING = [
    ([], ["cpu"], r"per_device: expected at least one device's cache; got none\."),
    ([one_device()], ["cpu", "meta"], r"mapping: expected 1 devices, one for each cache; got 2: \["),
    ([one_device(), one_device(split_head_dims=SplitKVHeadDims(576, 256))], ["cpu", "cpu"],
     r"device 1 \(cpu\): split_head_dims: expected SplitKVHeadDims\(key_head_dim=576, value_head_dim=512\), as on "
     r"device 0 "
     r"\(cpu\); got SplitKVHeadDims\(key_head_dim=576, value_head_dim=256\)\."),
    ([one_device(), one_device("meta")], ["cpu", "cpu"],
     r"device 1 \(cpu\): kv_blocks: expected a tensor on cpu; got meta\."),
]  # fmt: skip


@pytest.mark.parametrize(("caches", "mapping", "message"), BUNDLING, ids=range(len(BUNDLING)))
def test_bundles_are_refused_by_device_and_field(caches: list, mapping: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedCacheValues.from_upstream(caches, mapping)


def test_a_mapping_is_a_list_or_a_mesh() -> None:
    with pytest.raises(TypeError, match=r"mapping: expected a list of devices or a DeviceMesh; got 2\."):
        PagedCacheValues.from_upstream([one_device()], 2)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group of two ranks of which this process is the first; nothing is ever sent."""
    fake = pytest.importorskip(
        "torch.testing._internal.distributed.fake_pg", reason="this torch has no fake process group"
    )
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_a_device_mesh_is_read_for_its_devices() -> None:
    mesh = init_device_mesh("cpu", (2,))
    assert PagedCacheValues.from_upstream([one_device(), one_device()], mesh).n_devices == 2
    with pytest.raises(ValueError, match=r"mapping: expected 1 devices, one for each cache; got 2"):
        PagedCacheValues.from_upstream([one_device()], mesh)
    with pytest.raises(ValueError, match=r"device 1 \(cpu\): kv_blocks: expected a tensor on cpu; got meta\."):
        PagedCacheValues.from_upstream([one_device(), one_device("meta")], mesh)


def test_several_devices_where_one_is_needed() -> None:
    bundle = PagedCacheValues.from_upstream([one_device(), one_device()], ["cpu", "cpu"])
    for call, name in ((bundle.to_graph_values, "to_graph_values"), (bundle.collection, "collection")):
        with pytest.raises(
            ValueError, match=rf"{name}: expected one device; got 2 devices\. Take one with per_device\(index\)\."
        ):
            call()
    with pytest.raises(ValueError, match=r"values: expected one device's cache; got 2 devices\. Take one with"):
        single_device(bundle)
    with pytest.raises(IndexError, match=r"per_device: 2 is out of range for 2 devices"):
        bundle.per_device(2)
    with pytest.raises(TypeError, match=r"values: expected PagedCacheValues or KVCacheInputsPerDevice; got .*dict"):
        single_device({})  # type: ignore[arg-type]


# -- dispatch ----------------------------------------------------------------------------------------------------------


def test_dispatch_follows_the_query_length() -> None:
    values = one_device()
    assert values.dispatch(2) == Dispatch(2, 4)
    assert values.dispatch(1) == Dispatch(1, 3)  # only the draft has queries of 1
    assert values.dispatch(7) == Dispatch(2, 4)
    same = replace(values, draft_attention_dispatch_metadata=torch.tensor([2, 2, 3]))
    assert same.dispatch(2) == Dispatch(2, 4)  # where both fit, the target's
    assert one_device(attention_dispatch_metadata=None, draft_attention_dispatch_metadata=None).dispatch(1) == (None, 4)
    absent = dict.fromkeys(name for name in ORDER if "dispatch" in name or "partitions" in name)
    assert one_device(**absent).dispatch(1) == (None, None)
    without_host = one_device(mla_num_partitions=None, draft_mla_num_partitions=None)
    assert (without_host.dispatch(2), without_host.dispatch(1)) == ((2, 4), (1, 3))


def test_device_metadata_is_not_read() -> None:
    """A read would sync: the host copy of the count is taken, and nothing where there is none."""
    on_device = one_device(attention_dispatch_metadata=torch.zeros(3, dtype=torch.int64, device="meta"))
    assert on_device.dispatch(5) == Dispatch(None, 4)
    assert replace(on_device, mla_num_partitions=None).dispatch(5) == Dispatch(None, None)


def test_for_draft_puts_the_drafts_metadata_in_force() -> None:
    values = one_device()
    draft = values.for_draft()
    assert draft.dispatch(2) == Dispatch(1, 3)
    assert draft.attention_dispatch_metadata is values.draft_attention_dispatch_metadata
    assert draft.mla_num_partitions is values.draft_mla_num_partitions
    assert draft.kv_blocks is values.kv_blocks
    assert draft.draft_mla_num_partitions is None
    with pytest.raises(
        ValueError, match=r"draft_attention_dispatch_metadata: expected \[3\] int64 for a draft step; got None\."
    ):
        draft.for_draft()


DISPATCH = [
    ({"mla_num_partitions": torch.tensor([5])}, 2,
     r"mla_num_partitions: expected 4, as in attention_dispatch_metadata; got 5\."),
    ({"draft_mla_num_partitions": 5}, 1,
     r"draft_mla_num_partitions: expected 3, as in draft_attention_dispatch_metadata; got 5\."),
    ({"mla_num_partitions": 0}, 2, r"mla_num_partitions: expected at least 1; got 0\."),
    ({"mla_num_partitions": torch.zeros(1, dtype=torch.int64, device="meta").expand(2)}, 2,
     r"mla_num_partitions: expected one integer; got \[2\] int64\."),
    ({"attention_dispatch_metadata": torch.tensor([2, 2, 0]), "mla_num_partitions": None}, 2,
     r"attention_dispatch_metadata: expected at least 1 partition; got \[2, 2, 0\]\."),
    ({"attention_dispatch_metadata": torch.tensor([1, 2, 4])}, 2,
     r"attention_dispatch_metadata: expected a batch of at least 2; got \[1, 2, 4\]\."),
    ({"attention_dispatch_metadata": torch.tensor([2, 2, 4, 6])}, 2,
     r"attention_dispatch_metadata: expected \[3\] int64; got \[4\] int64\. It is \(batch, largest query length, "
     r"partitions\)"),
    ({"attention_dispatch_metadata": torch.tensor([2, 2, 4], dtype=torch.int32)}, 2,
     r"attention_dispatch_metadata: expected \[3\] int64; got \[3\] int32\."),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "query_length", "message"), DISPATCH, ids=range(len(DISPATCH)))
def test_metadata_is_refused_by_name(changes: dict[str, object], query_length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_device(**changes).dispatch(query_length)


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_graph_values_are_all_tensors() -> None:
    values = one_device(
        max_prompt_length=2, max_cache_length=6, page_stride=None, scales_page_stride=None, scales_lookup_table=None,
        mla_num_partitions=4, draft_mla_num_partitions=3,
    )  # fmt: skip
    graph = PagedCacheValues.from_upstream([values], ["cpu"]).to_graph_values()
    assert type(graph) is KVCacheInputsPerDevice
    assert all(isinstance(leaf, Tensor) for leaf in graph.flatten()[0])
    for name, number, dtype in (
        ("max_prompt_length", 2, torch.uint32),
        ("max_cache_length", 6, torch.uint32),
        ("page_stride", -1, torch.int64),
        ("scales_page_stride", -1, torch.int64),
        ("mla_num_partitions", 4, torch.int64),
        ("draft_mla_num_partitions", 3, torch.int64),
    ):
        assert (getattr(graph, name).tolist(), getattr(graph, name).dtype) == ([number], dtype)
    assert graph.scales_lookup_table is values.lookup_table
    assert graph.kv_blocks is values.kv_blocks
    unscaled = PagedCacheValues(**vars(one_device(**UNSCALED))).to_graph_values()
    assert unscaled.kv_scales is unscaled.scales_page_stride is unscaled.scales_lookup_table is None


@torch.library.custom_op("pagedmla_tests::step", mutates_args=("kv_blocks", "kv_scales"))
def step_op(
    kv_blocks: Tensor, kv_scales: Tensor, cache_lengths: Tensor, lookup_table: Tensor, scales_lookup_table: Tensor,
    latent: Tensor, rope: Tensor, q: Tensor,
) -> Tensor:  # fmt: skip
    """Store and attend. Pools come as bytes: a custom op may mutate any tensor, not every dtype has kernels for it."""
    values = KVCacheInputsPerDevice(
        kv_blocks.view(torch.float8_e4m3fn), cache_lengths, lookup_table, 1, 64, -1,
        kv_scales=kv_scales.view(torch.float32), scales_lookup_table=scales_lookup_table,
    )  # fmt: skip
    pagedmla.store(latent, rope, values, 1, layout="fp8_rope_bf16")
    return pagedmla.attend(q, values, 1, sm_scale=0.04, layout="fp8_rope_bf16")[0]


@step_op.register_fake
def _(
    kv_blocks: Tensor, kv_scales: Tensor, cache_lengths: Tensor, lookup_table: Tensor, scales_lookup_table: Tensor,
    latent: Tensor, rope: Tensor, q: Tensor,
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:2], 512)


class DecodeStep(torch.nn.Module):
    """A model's view of the cache: graph values in, an operation that writes the mutated fields."""

    def forward(self, values: KVCacheInputsPerDevice, latent: Tensor, rope: Tensor, q: Tensor) -> Tensor:
        return torch.ops.pagedmla_tests.step(
            values.kv_blocks.view(torch.uint8), values.kv_scales.view(torch.uint8), values.cache_lengths,
            values.lookup_table, values.scales_lookup_table, latent, rope, q,
        )  # fmt: skip


def test_torch_export_of_a_module_that_writes_the_cache() -> None:
    """The exported graph takes the values as they are, mutates both pools in place, and gives the eager result."""
    step = build_step(StepCase((1, 1, 1), (17, 32, 2)), "fp8_rope_bf16")
    g = torch.Generator().manual_seed(9)
    latent, rope = torch.randn(3, 512, generator=g), torch.randn(3, 64, generator=g)

    def fresh() -> KVCacheInputsPerDevice:
        values = PagedCacheValues.from_upstream([step.values], ["cpu"]).to_graph_values()
        return replace(values, kv_blocks=values.kv_blocks.clone(), kv_scales=values.kv_scales.clone())

    eager, exported = fresh(), fresh()
    want = DecodeStep()(eager, latent, rope, step.q)
    assert not torch.equal(raw_view(eager.kv_blocks), raw_view(step.values.kv_blocks))
    program = torch.export.export(DecodeStep(), (fresh(), latent, rope, step.q))
    mutated = program.run_decompositions({}).graph_signature.user_inputs_to_mutate.values()
    assert sorted(mutated) == ["values_kv_blocks", "values_kv_scales"]
    got = program.module()(exported, latent, rope, step.q)
    assert torch.equal(got, want)
    assert torch.equal(raw_view(exported.kv_blocks), raw_view(eager.kv_blocks))
    assert torch.equal(raw_view(exported.kv_scales), raw_view(eager.kv_scales))


def test_refusals_name_the_fields() -> None:
    """`blocks: expected a storage of ...` for a field called kv_blocks, and lengths on meta failed inside torch."""
    for changes, message in (
        ({"page_stride": 10**9}, "kv_blocks: expected a storage of at least"),
        ({"scales_page_stride": 10**9}, "kv_scales: expected a storage of at least"),
        ({"max_prompt_length": torch.zeros(1, device="meta")}, "max_prompt_length: expected one integer"),
        ({"max_prompt_length": torch.zeros(1, dtype=torch.int32, device="meta")},
         "max_prompt_length: expected an int or a tensor on the host; got one on meta"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            one_device(**changes).collection()


def test_upstream_values_and_devices_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"per_device\[0\]: expected KVCacheInputsPerDevice; got int"):
        PagedCacheValues.from_upstream([3], ["cpu"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="mapping: expected a list of devices or a DeviceMesh; got"):
        PagedCacheValues.from_upstream([one_device()], ["nowhere"])
