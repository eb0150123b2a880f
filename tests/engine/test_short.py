"""One engine start that shows the most: an unquantised cache, so that every deviation is ours, not the layout's.

64 tokens a step and blocks of 32: the prompt of 150 goes in chunks, prompts and decode rows meet in one step, the
prompt of 1 arrives as a decode row, and the second pass finds whole blocks in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LENGTHS = (5, 37, 1, 20, 150, 33)
NEW = 8


@pytest.fixture(scope="module")
def answer(run_engine: Callable[..., Any]) -> Any:
    from tiny import prompts

    turn = {"prompts": prompts(*LENGTHS), "max_tokens": NEW}
    return run_engine([turn, turn], block_size=32, max_num_batched_tokens=64, enable_prefix_caching=True)


@pytest.mark.parametrize("turn", [0, 1])
def test_agrees_with_hugging_face(answer: Any, turn: int, worst_disagreement: Callable[..., float]) -> None:
    assert worst_disagreement(answer.passes[turn]) < 1e-5


def test_every_layer_ran_here_in_every_step(answer: Any) -> None:
    """A step stores once and attends once in each layer, whatever rows it mixes."""
    for one in answer.passes:
        counts = one.counts()
        assert len({layer for layer, *_ in one.calls}) == 2
        assert counts["store"] == sum(counts.get(kind, 0) for kind in ("decode", "prefill", "mixed"))
        assert counts["decode"] >= NEW - 1
        assert one.executors == {"torch"}


def test_first_pass_has_each_kind_of_step(answer: Any) -> None:
    assert answer.passes[0].counts().keys() == {"store", "decode", "prefill", "mixed"}
    assert answer.passes[0].cached == [0] * len(LENGTHS)


def test_second_pass_reads_whole_blocks_from_the_cache(answer: Any) -> None:
    assert answer.passes[1].cached == [0, 32, 0, 0, 128, 32]
    assert answer.passes[1].counts()["store"] < answer.passes[0].counts()["store"]


def test_the_log_says_once_what_was_chosen_and_why(answer: Any) -> None:
    (line,) = [line for line in answer.log.splitlines() if "serves 2 layers" in line]
    assert "cache fp32, 2304 bytes a token, pages of 32, 8 heads; store: torch (" in line
    assert "; all rows: torch (" in line  # 64 tokens a step: no prompt is long
    assert "not triton: on a CPU it runs in Triton's interpreter" in line
