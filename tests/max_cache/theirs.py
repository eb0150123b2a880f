"""MAX itself, on a CPU: its two page managers, and one compiled graph of its cache operations.

MAX compiles no FP8 graph for a CPU. So its operations are compiled for int8 rows of 640: the bytes of an FP8 cache,
which they copy as they are, through MAX's tables and page strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

PAGE_SIZE, LAYERS, ROW = 128, 2, 640


def mla_params(dtype: str = "float8_e4m3fn", row: int = ROW, granularity: int | None = ROW, **settings: Any) -> Any:
    from max.dtype import DType
    from max.graph import DeviceRef
    from max.nn.kv_cache import KVCacheQuantizationConfig, MLAKVCacheParams

    scales = {} if granularity is None else {
        "kvcache_quant_config": KVCacheQuantizationConfig(
            scale_dtype=DType.float32, quantization_granularity=granularity
        )
    }  # fmt: skip
    usual = {"num_layers": LAYERS, "page_size": PAGE_SIZE, "num_q_heads": 16, "devices": [DeviceRef.CPU()]}
    return MLAKVCacheParams(dtype=getattr(DType, dtype), head_dim=row, **usual | scales | settings)


def legacy_manager(params: Any) -> Any:
    """One pool, whose last page stands for none; scales share the ids of values."""
    from max.driver import CPU
    from max.engine import InferenceSession
    from max.pipelines.kv_cache import PagedKVCacheManager

    session = InferenceSession(devices=[CPU()])
    return PagedKVCacheManager(params=params, session=session, total_num_pages=12, max_batch_size=4)


def pooled_manager(params: Any) -> Any:
    """One arena for values and scales, each with ids of its own; page 0 stands for none."""
    from max.pipelines.kv_cache import JengaKVCacheManager

    return JengaKVCacheManager.create(params=params, available_bytes=8 << 20, max_batch_size=4, max_seq_len=512)


MANAGERS: dict[str, Callable[[Any], Any]] = {"legacy": legacy_manager, "pooled": pooled_manager}


def new_requests(manager: Any, prompts: Sequence[int], replica: int = 0) -> list[Any]:
    """Requests of so many tokens, with pages for their first step."""
    from max.pipelines.context import TextContext, TokenBuffer
    from max.pipelines.modeling.types import RequestID

    requests = []
    for tokens in prompts:
        buffer = TokenBuffer(np.arange(tokens, dtype=np.int64))
        request = TextContext(request_id=RequestID(), max_length=1000, tokens=buffer)
        manager.claim(request, replica_idx=replica)
        manager.alloc(request)
        requests.append(request)
    return requests


def devices_of(step: Any) -> Any:
    """A step's tuple of devices, which 26.6 wraps."""
    return getattr(step, "inputs", step)


def step_of(manager: Any, requests: list[Any], **bounds: Any) -> Any:
    """What MAX hands to a model on its only device."""
    return devices_of(manager.runtime_inputs([requests], **bounds))[0]


def next_step(manager: Any, requests: list[Any]) -> Any:
    """The decode step after: every request has one token more."""
    for request in requests:
        request.update(7)
        manager.step(request)
        manager.alloc(request)
    return step_of(manager, requests)


def in_bytes(inputs: Any) -> Any:
    """The same cache with its FP8 rows as int8, as the graph takes them."""
    from max.dtype import DType

    return replace(inputs, kv_blocks=inputs.kv_blocks.view(DType.int8, inputs.kv_blocks.shape))


@dataclass(frozen=True)
class Operations:
    """MAX's own store and gather, compiled once."""

    model: Any

    def run(
        self, inputs: Any, layer: int, store: tuple[Tensor, Tensor, Tensor], gather: tuple[Tensor, Tensor]
    ) -> Tensor:
        from max import tree
        from max.driver import Buffer

        leading = [*store, torch.tensor(layer, dtype=torch.uint32), *gather]
        given = [Buffer.from_dlpack(tensor) for tensor in leading]
        return torch.from_dlpack(self.model.execute(*given, *tree.leaves(in_bytes(inputs)))[0])

    def store(self, inputs: Any, layer: int, rows: Tensor, sigma: Tensor, lengths: Sequence[int]) -> None:
        """Rows `[T, 640]` and sigma `[T]` of a step with `lengths[b]` new tokens, by MAX."""
        starts = torch.tensor([0, *np.cumsum(lengths)]).to(torch.uint32)
        nothing = (torch.zeros(0, 1, dtype=torch.int32), torch.zeros(len(lengths) + 1, dtype=torch.uint32))
        self.run(inputs, layer, (rows.view(torch.int8).unsqueeze(1), sigma.view(-1, 1, 1), starts), nothing)

    def gather(self, inputs: Any, layer: int, lengths: Sequence[int]) -> Tensor:
        """The first `lengths[b]` rows of each request as bytes `[sum, 640]`, read by MAX."""
        starts = torch.tensor([0, *np.cumsum(lengths)]).to(torch.uint32)
        slots = torch.cat([torch.arange(length) for length in lengths]).to(torch.int32).unsqueeze(1)
        rows = torch.zeros(0, 1, ROW, dtype=torch.int8)
        nothing = (rows, torch.zeros(0, 1, 1), torch.zeros(len(lengths) + 1, dtype=torch.uint32))
        return self.run(inputs, layer, nothing, (slots, starts))[:, 0].view(torch.uint8)


def compile_operations() -> Operations:
    import max.nn.kernels as kernels
    from max.driver import CPU
    from max.dtype import DType
    from max.engine import InferenceSession
    from max.graph import BufferType, DeviceRef, Graph, TensorType

    params, cpu = mla_params("int8"), DeviceRef.CPU()
    fields = params.flattened_kv_inputs()
    leading = [
        TensorType(DType.int8, ["tokens", 1, ROW], cpu),
        TensorType(DType.float32, ["tokens", 1, 1], cpu),
        TensorType(DType.uint32, ["starts"], cpu),
        TensorType(DType.uint32, [], cpu),
        TensorType(DType.int32, ["slots", 1], cpu),
        TensorType(DType.uint32, ["slot_starts"], cpu),
    ]
    graph = Graph("operations", input_types=[*leading, *fields])
    with graph:
        rows, sigma, starts, layer, slots, slot_starts = (value.tensor for value in graph.inputs[:6])
        given = zip(graph.inputs[6:], fields)
        leaves = [value.buffer if isinstance(kind, BufferType) else value.tensor for value, kind in given]
        (cache,) = params.unflatten_kv_inputs(iter(leaves))
        kernels.store_k_cache_ragged(cache, rows, starts, layer)
        kernels.store_k_scale_cache_ragged(cache, sigma, starts, layer, ROW)
        graph.output(kernels.kv_cache_gather_rows_ragged(cache, slots, slot_starts, layer, key_or_value=0))
    return Operations(InferenceSession(devices=[CPU()]).load(graph))
