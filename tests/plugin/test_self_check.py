"""The check that a plan makes of its kernels on a GPU, run here in the interpreter, and what it finds when they lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pagedmla
from pagedmla.plugin import executor_triton, self_check
from pagedmla.plugin import plan as plan_module
from pagedmla.plugin.executor_triton import TritonExecutor
from pagedmla.plugin.executors import Capacity, Choice, Configuration, choose

pytest.importorskip("triton", reason="triton isn't installed: pip install pagedmla[triton]")

CAPACITY = Capacity(8, 64, 4096)
USUAL = Configuration("attend", torch.device("cpu"), pagedmla.get_layout("fp8_rope_bf16"), 2, 64, torch.bfloat16)
ON_GPU = replace(USUAL, device=torch.device("cuda"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": pagedmla.get_layout("bf16"), "dtype": torch.float16, "page_size": 16},
        {"layout": pagedmla.get_layout("fp32"), "dtype": torch.float32, "page_size": 1},
        {"layout": pagedmla.get_layout("fp8_ds_mla"), "num_heads": 17},
        {"layout": pagedmla.get_layout("fp8_flat")},
    ],
    ids=["flagship", "fp16 queries", "fp32", "two tiles of rows", "flat"],
)
def test_right_kernels_pass(changes: dict[str, Any]) -> None:
    assert self_check.fault(TritonExecutor(), replace(USUAL, **changes), 4) is None


def break_out(out: torch.Tensor, lse: torch.Tensor) -> None:
    """As ptxas 12.8 did: LSE is right, 64 columns of out aren't."""
    out[:, :, 64:128] *= -1


def break_lse(out: torch.Tensor, lse: torch.Tensor) -> None:
    lse[-1, -1] = torch.nan


@pytest.mark.parametrize(
    ("module", "name", "what", "harm"),
    [
        ("decode", "attend_decode", "decode", break_lse),
        ("pieces", "attend_pieces", "decode in pieces", break_out),
        ("mixed", "attend_mixed", "prompts", break_out),
        ("pieces", "attend_pieces", "prompts in pieces", break_out),
    ],
    ids=["decode", "pieces", "mixed", "pieces of prompts"],
)
def test_wrong_attention_is_named(
    harm: Any, module: str, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import import_module

    kernel = import_module(f"pagedmla.triton_kernels.{module}")
    real = getattr(kernel, name)

    def wrong(*args: Any, **more: Any) -> None:
        real(*args, **more)
        places = {"attend_decode": (4, 5), "attend_pieces": (4, 5), "attend_mixed": (5, 6)}[name]
        if not what.startswith("prompts") or args[0].shape[0] > 2:  # not at the decode rows before
            harm(*(args[place] for place in places))

    monkeypatch.setattr(kernel, name, wrong)
    found = self_check.fault(TritonExecutor(), USUAL, 4)
    assert found is not None
    assert found.startswith(f"Triton's {what} kernel is wrong (fp8_rope_bf16, 2 heads, on cpu with Triton ")


@pytest.mark.parametrize(("name", "how"), [("store", "tables"), ("store_slots", "slots")])
def test_a_wrong_store_is_named(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(TritonExecutor, name)

    def wrong(self: Any, step: Any, latent: Any, rope: Any, *rest: Any, **more: Any) -> Any:
        return real(self, step, latent, rope.neg(), *rest, **more)

    monkeypatch.setattr(TritonExecutor, name, wrong)
    found = self_check.fault(TritonExecutor(), USUAL, 4)
    assert found is not None
    assert found.startswith(f"Triton's store by {how} writes other bytes to blocks than torch does (fp8_rope_bf16, ")


def test_a_plan_on_a_gpu_is_refused_with_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name it is refused; "auto" passes it over, and an engine stops with the reason."""
    monkeypatch.setattr(executor_triton.self_check, "fault", lambda *_: "Triton's decode kernel is wrong (here)")
    executor_triton._fault.cache_clear()
    with pytest.raises(ValueError, match=r"'triton', but Triton's decode kernel is wrong \(here\)"):
        choose(ON_GPU, "triton", CAPACITY)
    chosen = choose(ON_GPU, capacity=CAPACITY)
    assert chosen.executor.name != "triton"
    assert dict(chosen.passed_over)["triton"] == "Triton's decode kernel is wrong (here)"
    monkeypatch.setenv(self_check.SWITCH, "0")
    assert choose(ON_GPU, capacity=CAPACITY).executor.name == "triton"
    executor_triton._fault.cache_clear()


def test_a_plan_asks_for_its_store_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked for its attention alone: torch attended what Triton's store, found wrong, had written."""
    asked = []

    def chosen(configuration: Configuration, executor: str, capacity: Capacity | None) -> Choice:
        asked.append((configuration.operation, capacity is not None))
        return choose(replace(configuration, device=torch.device("cpu")), "torch")

    monkeypatch.setattr(plan_module, "choose", chosen)
    arguments = {"layout": "bf16", "num_heads": 1, "page_size": 16, "max_batch": 1, "max_tokens": 1,
                 "max_cache_length": 16, "dtype": torch.bfloat16, "device": "cpu", "sm_scale": 1.0}  # fmt: skip
    for reserve in (True, False):
        pagedmla.plan(**arguments, reserve=reserve)
    assert asked == [("attend", True), ("store", True), ("attend", False), ("store", False)]


def test_what_was_checked_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that held more requests ran the whole check again, while serving: its capacity was part of the key."""
    checked: list[tuple[Configuration, int]] = []
    monkeypatch.setattr(executor_triton.self_check, "fault", lambda _, *what: checked.append(what))
    monkeypatch.setattr(executor_triton, "multiprocessors", lambda device: 132)
    executor_triton._fault.cache_clear()
    card = replace(USUAL, device=torch.device("cuda", 0))
    for capacity in (CAPACITY, Capacity(16, 256, 4096), Capacity(8, 64, 2**20)):
        for precision in ("auto", "fp16"):
            assert TritonExecutor().load(replace(card, precision=precision), capacity) is None
    assert len(checked) == 1
    for other in (
        replace(card, device=torch.device("cuda", 1)), replace(card, num_heads=16), replace(card, page_size=16),
        replace(card, dtype=torch.float16), replace(card, layout=pagedmla.get_layout("fp8_flat")),
    ):  # fmt: skip
        TritonExecutor().load(other, CAPACITY)
    TritonExecutor().load(card, Capacity(8, 64, 256))  # cut into 2 parts
    assert [cut for _, cut in checked] == [4] * 6 + [2]
    executor_triton._fault.cache_clear()


def test_kernels_that_do_not_run_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(executor_triton.self_check, "fault", fails)
    executor_triton._fault.cache_clear()
    reason = TritonExecutor().load(ON_GPU, CAPACITY)
    wanted = "Triton's kernels can't be run: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert reason == wanted
    executor_triton._fault.cache_clear()


def test_running_out_of_memory_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was kept as a fault of the kernels for the life of the process."""

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    executor_triton._fault.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(executor_triton.self_check, "fault", fails)
        with pytest.raises(torch.OutOfMemoryError):
            TritonExecutor().load(ON_GPU, CAPACITY)
    monkeypatch.setattr(executor_triton.self_check, "fault", lambda *_: None)
    assert TritonExecutor().load(ON_GPU, CAPACITY) is None
    executor_triton._fault.cache_clear()


def test_on_a_cpu_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow, and tested."""
    monkeypatch.setattr(executor_triton.self_check, "fault", None)
    assert TritonExecutor().load(USUAL, CAPACITY) is None


def test_the_switch_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(self_check.SWITCH, "no")
    with pytest.raises(ValueError, match="PAGEDMLA_SELF_CHECK: expected 0 or 1; got 'no'"):
        TritonExecutor().load(ON_GPU, CAPACITY)
