"""vLLM's offload of pages to host memory, on a CPU engine: its connector, scheduler, manager and canonical views of a
cache are the real ones; only the copy stands in, since vLLM's needs CUDA streams. The engine loads it by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadSpec(CPUOffloadingSpec):  # type: ignore[misc] # vllm is not there for a plain type check
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            self._worker = PageCopies(kv_caches, self.num_chunks)
        return self._worker


@dataclass
class Moved:
    stored: int = 0
    loaded: int = 0
    to_other_pages: int = 0


@dataclass
class PageCopies(OffloadingWorker):  # type: ignore[misc]
    """Whole pages of `page_size_bytes`, as vLLM's own worker copies them, at once instead of on a stream."""

    caches: CanonicalKVCaches
    chunks: int
    moved: Moved = field(default_factory=Moved)

    def __post_init__(self) -> None:
        self._tensors = [each.tensor.view(torch.int8) for each in self.caches.tensors]
        self._host = [torch.zeros(self.chunks, each.page_size_bytes, dtype=torch.int8) for each in self.caches.tensors]
        self._refs = {ref.tensor_idx: ref.page_size_bytes for group in self.caches.group_data_refs for ref in group}
        self._came_from: dict[int, int] = {}
        self._done: list[TransferResult] = []
        pages = sorted(set(self._refs.values()))
        print(f"host offload: {len(self._tensors)} tensors of {self._tensors[0].shape[0]} pages, {pages} bytes a page")

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        pages, chunks = map(torch.from_numpy, (src_spec.block_ids, dst_spec.block_ids))
        for index, size in self._refs.items():
            self._host[index][chunks.long(), :size] = self._tensors[index][pages.long(), :size]
        self._came_from.update(zip(chunks.tolist(), pages.tolist(), strict=True))
        self.moved.stored += len(pages)
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        chunks, pages = map(torch.from_numpy, (src_spec.block_ids, dst_spec.block_ids))
        for index, size in self._refs.items():
            self._tensors[index][pages.long()] = 0x7F  # NaN in every format: what isn't brought back shows
            self._tensors[index][pages.long(), :size] = self._host[index][chunks.long(), :size]
        self.moved.loaded += len(pages)
        pairs = zip(chunks.tolist(), pages.tolist(), strict=True)
        self.moved.to_other_pages += sum(self._came_from[chunk] != page for chunk, page in pairs)
        return self._finish(job_id)

    def _finish(self, job_id: int) -> bool:
        print(f"host offload so far: {self.moved}", flush=True)
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Copies are done when they are submitted."""
