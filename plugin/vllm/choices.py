"""What was chosen for an engine's layers and why, as the one line of its log."""

from __future__ import annotations

import pagedmla
from pagedmla.adapters.vllm import row_bytes
from pagedmla.plugin.dense import SWITCH, DenseCalls
from pagedmla.plugin.executors import Choice
from pagedmla.plugin.plan import Plan


def choices_line(plan: Plan, layers: int, least_dense: int | None, dense: DenseCalls | None) -> str:
    """`least_dense` query tokens make a prompt a long one, whose calls are `dense`; both None where none is."""
    parts = [
        f"pagedmla {pagedmla.__version__} serves {layers} layers: cache {plan.layout}, {row_bytes(plan.layout)} bytes "
        f"a token, pages of {plan.page_size}, {plan.num_heads} heads",
        f"store: {_chosen(plan.store_choice)}",
        f"{'all rows' if dense is None else 'decode rows and short prompts'}: {_chosen(plan.attend_choice)}",
    ]
    if dense is not None:
        parts.append(f"prompts from {least_dense} query tokens on: dense, {_chosen(dense.prefill)}")
        for name, choice in (("decompress", dense.decompress), ("merge", dense.merge)):
            if choice.executor.name != dense.prefill.executor.name:
                parts.append(f"{name}: {_chosen(choice)}")
    return "; ".join(parts) + f". PAGEDMLA_EXECUTORS and {SWITCH} choose otherwise"


def _chosen(choice: Choice) -> str:
    """`torch (vectorised ..., not triton: ...)`"""
    others = "".join(f", not {name}: {reason}" for name, reason in choice.passed_over)
    return f"{choice.executor.name} ({choice.reason}{others})"
