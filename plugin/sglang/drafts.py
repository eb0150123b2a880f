"""A chain of drafts: the draft model's forwards of one step, each a token further than the one before it."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view

from pagedmla.kv_cache.checks import Refusal
from pagedmla.plugin.sglang.backend import PagedMLAAttnBackend
from pagedmla.plugin.sglang.settings import BACKEND


class PagedMLAMultiStepDraftBackend:
    """One backend for each forward of the draft model: a draft less one. Forward i sees `seq_lens + i + 1` keys."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, speculative_num_steps: int) -> None:
        if topk != 1:
            raise Refusal(f"{BACKEND}: expected a chain of drafts (--speculative-eagle-topk 1); got {topk}")
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        first = PagedMLAAttnBackend(runner, draft_step=0)
        self.attn_backends = [first] + [
            PagedMLAAttnBackend(runner, layers=first.layers, draft_step=step)
            for step in range(1, speculative_num_steps - 1)
        ]
        self.attn_backend_list = self.attn_backends
        self.max_context_len = first.max_context_len
        self.forward_metadata = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        view = _as_decode(forward_batch)
        for backend in self.attn_backends:
            backend.init_forward_metadata(view)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        view = _as_decode(forward_batch)
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(view, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)


def _as_decode(forward_batch: Any) -> Any:
    return build_inner_fb_view(forward_batch, bs=forward_batch.batch_size, forward_mode=ForwardMode.DECODE)
