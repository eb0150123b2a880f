"""Which form of attention DeepSeek's layers hand us: the absorbed one, or for long prompts queries alone.

SGLang asks once a layer, for all requests of a step:

    MLA   absorbed queries, the step's latents beside them; we store and attend
    MHA   unabsorbed queries; its hook `prepare_prefill_qkv` lets us store, and keep keys and values to ourselves

MHA_ONE_SHOT and MHA_CHUNKED_KV are never chosen. They attend a step's own keys as they were before they were stored,
and read cached ones, and write all, without the layer's scale; so what MHA means to us covers contexts too.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import is_in_tc_piecewise_cuda_graph
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha import resolve_attn_backend

from pagedmla.plugin.sglang.backend import PagedMLAAttnBackend
from pagedmla.plugin.sglang.settings import BACKEND


def register_handler() -> None:
    AttentionBackendRegistry.register(BACKEND, choose_method)


def choose_method(attention: Any, forward_batch: Any) -> AttnForwardMethod:
    """MHA where the dense way pays and can be gone, else MLA; SGLang turns them into those of its platform."""
    return AttnForwardMethod.MHA if _goes_dense(attention, forward_batch) else AttnForwardMethod.MLA


def _goes_dense(attention: Any, forward_batch: Any) -> bool:
    if not forward_batch.forward_mode.is_extend_without_speculative():
        return False
    if is_in_breakable_cuda_graph() or is_in_tc_piecewise_cuda_graph():  # which replay what they captured
        return False
    backend = resolve_attn_backend(forward_batch)  # behind those that split a batch, or prefill from decode
    return isinstance(backend, PagedMLAAttnBackend) and backend.goes_dense(attention, forward_batch)
