"""What a step costs the host, without any kernel: plan, checks, adapter, and all of a call up to the launch.

    python -m pagedmla.bench.host_cost        # beside vLLM's own MLA builder, where vllm is installed

plan       `pagedmla.plan`, once for an engine
prepare    `Plan.prepare` from host copies: every check of a step, once for all its layers
allocator  `PagePool.values`: the embedded allocator's tables and lengths (an engine brings its own)
adapter    vLLM's metadata as cache values: once a step
launch     `pagedmla.attend` with a plan, a layer, by Triton: all checks, and the launches up to the driver. Its tensors
           are on the meta device: as on a GPU nothing can be read from them
launcher   the CUTLASS launcher's own call, a layer: checks, packing, and the launches up to the driver (one; two where
           the step is cut). The aim: less than 15 us. Torch's answers, which device and stream are current, come on top
builder    our vLLM metadata builder, beside the engine's own on the same metadata (the aim: at most 1.2 of its time)

CPU time of the calling thread, the least of many runs, since other processes only ever add to one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import pagedmla
from pagedmla.adapters.rows import step_rows
from pagedmla.adapters.vllm import CacheLengths, layer_pools
from pagedmla.bench.cases import FLAGSHIP, PAGE_SIZE, SM_SCALE
from pagedmla.bench.clocks import least_microseconds
from pagedmla.bench.peers import hide_checkout
from pagedmla.cutlass_kernels.cubin_cache import Cubin
from pagedmla.cutlass_kernels.driver import Driver, LaunchShape
from pagedmla.cutlass_kernels.launch import DecodeLauncher, Workspace, partial_rows
from pagedmla.cutlass_kernels.tensor_maps import MAP_BYTES, TiledMap
from pagedmla.cutlass_kernels.variants import COMBINES, CombineVariant, Variant
from pagedmla.hardware.cost import H200
from pagedmla.hardware.targets import find_target
from pagedmla.kv_cache.checks import ceildiv
from pagedmla.kv_cache.page_pool import PagePool
from pagedmla.kv_cache.paged_tensor import PagedTensor
from pagedmla.plugin.executor_cutlass_variants import choose_variant
from pagedmla.plugin.executor_triton import TritonExecutor
from pagedmla.plugin.executors import AttendOptions, Choice, Configuration
from pagedmla.plugin.step import Step
from pagedmla.triton_kernels.recording import record

HEADS = 16
REQUESTS = (1, 64, 256)
KV_LEN = 4096
PIECES = 2  # of a cut request; more cost the host nothing more
RUNS, STEPS = 100, 20


@dataclass(frozen=True)
class HostCost:
    """Microseconds of host time for a step of `requests` requests of `kv_len` keys; `beside` is the engine's own."""

    what: str
    requests: int
    kv_len: int
    microseconds: float
    beside: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"source": "measured", **asdict(self)}


class _UpToTheDriver(TritonExecutor):
    """Triton's host side on meta tensors, its launches recorded instead of made."""

    def attend(self, step: Step, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions) -> None:
        record(lambda: super(_UpToTheDriver, self).attend(step, q, out, lse, options), find_target("sm_90"))


class _NothingBehind:
    """Stands at our own driver interface (cutlass_kernels/driver.py), counts launches and does nothing, so that a call
    takes the launcher's own time. It is no driver: nothing is loaded, mapped or run."""

    def __init__(self) -> None:
        self.launches = 0

    def make_current(self, device: int) -> None: ...

    def load(self, cubin: bytes) -> str:
        return "module"

    def function(self, module: str, name: str) -> str:
        return name

    def allow_shared(self, function: str, shared_bytes: int) -> None: ...

    def active_clusters(self, function: str, shape: LaunchShape) -> int:
        return H200.multiprocessors // shape.cluster

    def encode(self, tiles: TiledMap) -> bytes:
        return bytes(MAP_BYTES)

    def prepare(self, function: str, shape: LaunchShape, addresses: Sequence[int]) -> Callable[[int], None]:
        def start(stream: int) -> None:
            self.launches += 1

        return start


def measure(requests: Sequence[int] = REQUESTS, kv_len: int = KV_LEN, seconds: float = 0.1) -> Iterator[HostCost]:
    """Every part for each number of requests; `launch` where Triton is installed, the builder where vLLM is."""
    parts: dict[str, Callable[[int, int], Callable[[], object]]] = {
        "plan": plan_call,
        "prepare": prepare_call,
        "allocator": allocator_call,
        "adapter": adapter_call,
        "launcher": partial(launcher_call, pieces=1),
        "launcher, cut": partial(launcher_call, pieces=PIECES),
    }
    if find_spec("triton") is not None:
        parts["launch"] = launch_call
    for count in requests:
        for what, part in parts.items():
            calls = STEPS if what.startswith("launcher") else 1
            microseconds = least_microseconds(part(count, kv_len), seconds, calls)
            yield HostCost(what, count, kv_len, round(microseconds, 1))
    if find_spec("vllm") is not None:
        for count in requests:
            theirs, ours = beside_vllm(count)
            yield HostCost("builder", count, 100, round(ours, 1), round(theirs, 1))


def plan_call(requests: int, kv_len: int) -> Callable[[], object]:
    return lambda: make_plan(requests, kv_len)


def make_plan(requests: int, kv_len: int, executor: str = "auto") -> pagedmla.Plan:
    return pagedmla.plan(
        layout=FLAGSHIP, num_heads=HEADS, page_size=PAGE_SIZE, max_batch=requests, max_tokens=requests,
        max_cache_length=kv_len, dtype=torch.bfloat16, device="cpu", sm_scale=SM_SCALE, executor=executor,
    )  # fmt: skip


def prepare_call(requests: int, kv_len: int) -> Callable[[], object]:
    plan, values = make_plan(requests, kv_len), _values(requests, kv_len, "cpu")
    lengths, table = values.cache_lengths, values.lookup_table
    return lambda: plan.prepare(values, host_cache_lengths=lengths, host_lookup_table=table)


def allocator_call(requests: int, kv_len: int) -> Callable[[], object]:
    columns = ceildiv(kv_len, PAGE_SIZE)
    pool = PagePool(FLAGSHIP, num_layers=1, page_size=PAGE_SIZE, num_pages=requests * columns, device="meta")
    names, ones = list(range(requests)), [1] * requests
    for name in names:
        pool.allocate(name)
        pool.append(name, kv_len - 1)
    # The tables of a pool on the meta device would cost nothing to fill: they are made on the host, as an engine's are.
    pool.blocks = torch.empty(0)
    return lambda: pool.values(names, ones)


def adapter_call(requests: int, kv_len: int) -> Callable[[], object]:
    """The step's part once and a layer's values once, as the vLLM backend does for each."""
    layout = pagedmla.get_layout(FLAGSHIP)
    pools = layer_pools(torch.empty(2, PAGE_SIZE, layout.bytes_per_token, dtype=torch.uint8), layout)
    seq_lens = torch.full((requests,), kv_len, dtype=torch.int32)
    starts = torch.arange(requests + 1, dtype=torch.int32)
    table = torch.zeros(requests, ceildiv(kv_len, PAGE_SIZE), dtype=torch.int32)
    buffer = CacheLengths(requests, "cpu")

    def call() -> object:
        lengths = buffer.write(seq_lens, starts, 1)
        rows = step_rows(
            lengths, table, starts, num_tokens=requests, max_query_length=1, max_seq_len=kv_len,
            num_decodes=requests, num_decode_tokens=requests,
        )  # fmt: skip
        return rows.values(pools)

    return call


def launch_call(requests: int, kv_len: int) -> Callable[[], object]:
    made = make_plan(requests, kv_len, executor="triton")
    executor = _UpToTheDriver()
    device = torch.device("meta")
    plan = replace(
        made, configuration=replace(made.configuration, device=device), attend_choice=Choice(executor, "measured", ()),
        workspace=executor.workspace(
            replace(made.configuration, device=device), made.capacity, made.most_partitions
        ),
    )  # fmt: skip
    values = _values(requests, kv_len, device)
    layout = pagedmla.get_layout(FLAGSHIP)
    q = torch.empty(requests, HEADS, layout.width, dtype=torch.bfloat16, device=device)
    out = torch.empty(requests, HEADS, layout.latent, dtype=torch.bfloat16, device=device)
    return lambda: pagedmla.attend(q, values, 0, sm_scale=SM_SCALE, layout=layout, plan=plan, out=out)


def launcher_call(requests: int, kv_len: int, pieces: int, driver: Driver | None = None) -> Callable[[], object]:
    """The kernel that such a step takes, its tensors on the CPU: only their addresses are read."""
    layout = pagedmla.get_layout(FLAGSHIP)
    configuration = Configuration("attend", torch.device("cuda"), layout, HEADS, PAGE_SIZE, torch.bfloat16)
    variant = choose_variant(configuration, 1, kv_len)
    combine = next(each for each in COMBINES if each.dtype == variant.dtype)
    made = DecodeLauncher(
        variant, driver or _NothingBehind(), 0, _no_cubin(variant), _no_cubin(combine), current_stream=lambda: 0
    )
    values = _values(requests, kv_len, "cpu")
    planes = layout.planes(
        PagedTensor.bind(values.kv_blocks, "kv_blocks"), PagedTensor.bind(values.kv_scales, "kv_scales"), 0
    )
    q = torch.zeros(requests, HEADS, layout.width, dtype=torch.bfloat16)
    starts = torch.arange(requests + 1, dtype=torch.int32)
    out = torch.empty(requests, HEADS, layout.latent, dtype=torch.bfloat16)
    lse = torch.empty(requests, HEADS)
    held = partial_rows(variant, H200.multiprocessors) if pieces > 1 else 0
    workspace = Workspace.empty(held, requests * HEADS, "cpu")
    return lambda: made(
        q, planes, values.lookup_table, values.cache_lengths, starts, out, lse, workspace, sm_scale=SM_SCALE,
        num_partitions=pieces, scales_lookup_table=values.lookup_table,
    )  # fmt: skip


def _no_cubin(kernel: Variant | CombineVariant) -> Cubin:
    """A kernel's record, with nothing in it to load."""
    return Cubin(
        variant=kernel.name, entry=kernel.name, threads=kernel.threads, shared_bytes=kernel.shared_bytes,
        cluster=kernel.cluster, rows=kernel.rows, may_start_early=False, source="", dsl="", sha256="",
    )  # fmt: skip


def _values(requests: int, kv_len: int, device: torch.device | str) -> pagedmla.KVCacheInputsPerDevice:
    """A step of one token a request; its pages are few, and repeat in the table."""
    pool = PagePool(FLAGSHIP, num_layers=1, page_size=PAGE_SIZE, num_pages=8, device=device)
    columns = ceildiv(kv_len, PAGE_SIZE)
    return pagedmla.KVCacheInputsPerDevice(
        kv_blocks=pool.blocks,
        cache_lengths=torch.full((requests,), kv_len - 1, dtype=torch.int32, device=device),
        lookup_table=(torch.arange(requests * columns, dtype=torch.int32, device=device) % 8).view(requests, columns),
        max_prompt_length=1,
        max_cache_length=kv_len,
        page_stride=None,
        kv_scales=pool.scales,
    )


def beside_vllm(batch: int) -> tuple[float, float]:
    """(the engine's, ours) microseconds of a builder for a step of `batch` requests with one token each."""
    hide_checkout()
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonMetadata,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    )
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from pagedmla.plugin.vllm.builder import PagedMLABuilder

    starts = torch.arange(batch + 1, dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.full((batch,), 100, dtype=torch.int32),
        num_reqs=batch,
        num_actual_tokens=batch,
        max_query_len=1,
        max_seq_len=100,
        block_table_tensor=torch.zeros(batch, 8, dtype=torch.int32),
        slot_mapping=torch.arange(batch),
    )
    attributes = {
        "device": torch.device("cpu"), "reorder_batch_threshold": 1, "dcp_world_size": 1, "use_pcp": False,
        "query_len_support": QueryLenSupport.VARLEN, "metadata_cls": MLACommonMetadata,
        "model_config": SimpleNamespace(get_head_size=lambda: 576),
    }  # fmt: skip
    plan = pagedmla.plan(
        layout="bf16", num_heads=HEADS, page_size=PAGE_SIZE, max_batch=batch, max_tokens=batch, max_cache_length=512,
        dtype=torch.bfloat16, device="cpu", sm_scale=SM_SCALE,
    )  # fmt: skip
    engine: Any = MLACommonMetadataBuilder.__new__(MLACommonMetadataBuilder)
    for name, value in attributes.items():
        setattr(engine, name, value)
    ours = PagedMLABuilder.for_measuring(plan, attributes)
    runs = [[_microseconds(builder, step) for builder in (engine, ours)] for _ in range(RUNS)]
    engine_us, our_us = (min(each) for each in zip(*runs))
    return engine_us, our_us


def _microseconds(builder: Any, step: Any) -> float:
    start = time.thread_time()
    for _ in range(STEPS):
        builder.build(0, step)
    return (time.thread_time() - start) / STEPS * 1e6


if __name__ == "__main__":
    for cost in measure():
        ratio = (
            ""
            if cost.beside is None
            else f", vLLM's own {cost.beside:.1f} us, ratio {cost.microseconds / cost.beside:.2f}"
        )
        print(f"{cost.what:13} {cost.requests:5} requests: {cost.microseconds:8.1f} us{ratio}")
