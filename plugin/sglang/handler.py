"""Which form of attention DeepSeek's layers hand us: the absorbed one, always.

The others project keys and values up before they are cached, attend those, and read cached prefixes without a scale.
Absorbed attention reads what the cache holds, so that an answer doesn't depend on how its prompt was cut into steps or
on what of it was cached.
"""

from __future__ import annotations

from typing import Any

from pagedmla.plugin.sglang.settings import BACKEND


def register_handler() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    AttentionBackendRegistry.register(BACKEND, absorbed)


def absorbed(attention: Any, forward_batch: Any) -> Any:
    """The absorbed form, in the order of operations of this platform."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA
