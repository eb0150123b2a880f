"""`executor="cutlass"`: what it refuses, what it would launch, its memory, its proofs. No test here runs a kernel.

What a step launches is seen at our driver interface, by the double of tests/cutlass_kernels, on CPU tensors. Grid:
whole steps and decode rows beside prompts, cut and uncut, with room for all pieces and for few.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.steps import Step, StepCase, build_step, with_values

import pagedmla
from pagedmla.cutlass_kernels import launch
from pagedmla.cutlass_kernels.cubin_cache import Cubin, address_of, source_digest
from pagedmla.cutlass_kernels.launch import DecodeLauncher
from pagedmla.cutlass_kernels.variants import VARIANTS, Variant
from pagedmla.plugin import executor_cutlass, executor_triton, proven
from pagedmla.plugin import executor_cutlass_variants as variants
from pagedmla.plugin.executor_cutlass import CutlassExecutor, Pieces
from pagedmla.plugin.executor_triton import TritonExecutor
from pagedmla.plugin.executors import AttendOptions, Capacity, Configuration, choose
from pagedmla.plugin.step import Step as BoundStep
from pagedmla.plugin.step import bind_step

pytest.importorskip("triton", reason="prompts are Triton's, and it isn't installed: pip install pagedmla[triton]")

CUDA = torch.device("cuda", 0)
USUAL = Configuration("attend", CUDA, pagedmla.get_layout("fp8_rope_bf16"), 16, 64, torch.bfloat16)
MIXED = StepCase((1, 2, 19), (37, 40, 19), page_size=16, heads=3, name="two decode rows and a prompt")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEDMLA_CHECK", "PAGEDMLA_EXECUTORS", "PAGEDMLA_PRECISION", "PAGEDMLA_ALLOW_UNPROVEN"):
        monkeypatch.delenv(name, raising=False)


# -- what a step launches ----------------------------------------------------------------------------------------------


@pytest.fixture
def recorder() -> Iterator[Any]:
    path = Path(__file__).parent.parent / "cutlass_kernels" / "conftest.py"
    spec = importlib.util.spec_from_file_location("recording_driver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recording_driver"] = module
    spec.loader.exec_module(module)
    yield module.RecordingDriver()
    del sys.modules["recording_driver"]


@pytest.fixture
def launches(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """(who launches, its arguments by name) in order; each has passed the launcher's own checks."""
    order: list[tuple[str, dict[str, Any]]] = []

    def stand_in(name: str, rows: int, cluster: int) -> Cubin:
        return Cubin(name, name, 384, 1024, cluster, rows, False, "", "", "", b"image")

    def launcher(variant: Variant, device: torch.device) -> Any:
        decode = stand_in(variant.name, variant.rows, variant.cluster)
        made = DecodeLauncher(variant, recorder, 0, decode, stand_in("combine", 4, 1), lambda: 7)

        def call(*args: Any, **named: Any) -> None:
            before = len(recorder.launches)
            made(*args, **named)
            names = ("q", "planes", "lookup_table", "cache_lengths", "query_start_loc", "out", "lse", "workspace")
            kernels = [each.function.split(" of ")[0] for each in recorder.launches[before:]]
            order.append((" + ".join(kernels), {**dict(zip(names, args, strict=True)), **named}))

        return call

    def by_triton(step: BoundStep, q: Any, out: Any, lse: Any, options: Any, first: int) -> None:
        order.append(("triton", {"q": q, "first": first, "end": step.batch, "longest": step.max_query_length}))

    monkeypatch.setattr(launch, "launcher", launcher)
    monkeypatch.setattr(executor_cutlass, "attend_from", by_triton)
    monkeypatch.setattr(executor_triton, "attend_from", by_triton)
    return order


def run(step: Step, partitions: int = 1, workspace: Pieces | None = None, **options: Any) -> BoundStep:
    bound = bind_step(step.values, step.layer, step.layout, step.query_start_loc, step.q, "q")
    out, lse = step.q.new_empty(*step.q.shape[:2], 512), torch.empty(step.q.shape[:2])
    asked = AttendOptions(step.sm_scale, True, partitions, workspace, **options)
    CutlassExecutor().attend(bound, step.q, out, lse, asked)
    return bound


def test_a_whole_step_is_one_launch(launches: list[tuple[str, dict[str, Any]]]) -> None:
    step = build_step(StepCase((1, 1), (600, 70), page_size=64, heads=16), "fp8_rope_bf16", dtype=torch.bfloat16)
    bound = run(step)
    ((kernels, given),) = launches
    assert kernels == "mla_decode_fp8_rope_bf16_fp16_r16_b64_bf16"
    assert given["q"].data_ptr() == step.q.data_ptr()
    assert given["lookup_table"] is bound.cache.lookup_table
    assert given["scales_lookup_table"] is bound.cache.scales_lookup_table
    assert given["cache_lengths"] is bound.cache.cache_lengths
    assert given["query_start_loc"] is bound.query_start_loc
    assert (given["num_partitions"], given["causal"], given["sm_scale"]) == (1, True, step.sm_scale)
    assert (given["workspace"].cuts.shape, given["workspace"].partial_out.numel()) == ((32,), 0)


def test_a_cut_step_is_merged(launches: list[tuple[str, dict[str, Any]]]) -> None:
    step = build_step(StepCase((1,), (600,), page_size=64, heads=128), "fp8_rope_bf16", dtype=torch.bfloat16)
    run(step, partitions=4)
    ((kernels, given),) = launches
    assert kernels == "mla_decode_fp8_rope_bf16_fp8x2_r64_b64_bf16 + combine"
    assert (given["num_partitions"], given["workspace"].cuts.shape) == (4, (128,))
    assert given["workspace"].partial_out.shape == (132 * 2 * 64, 512)  # whatever the step's size


def test_prompts_behind_decode_rows_are_a_launch_of_triton(launches: list[tuple[str, dict[str, Any]]]) -> None:
    """The prompt's 19 tokens don't widen the tile of the decode rows, and no row is computed twice."""
    step = build_step(MIXED, "fp8_rope_bf16", dtype=torch.bfloat16)
    run(with_values(step, mixed_step_split=torch.tensor([2, 3], dtype=torch.int32)))
    (decode, given), (prompts, behind) = launches
    assert (decode, prompts) == ("mla_decode_fp8_rope_bf16_fp16_r16_b16_bf16", "triton")
    for name, size in (("q", 3), ("out", 3), ("lse", 3), ("lookup_table", 2), ("scales_lookup_table", 2),
                       ("cache_lengths", 2), ("query_start_loc", 3)):  # fmt: skip
        assert given[name].shape[0] == size, name
    assert (behind["first"], behind["end"], behind["longest"]) == (2, 3, 19)
    assert behind["q"].shape[0] == 22
    launches.clear()
    run(with_values(step, mixed_step_split=torch.tensor([0, 0], dtype=torch.int32)))
    assert [who for who, _ in launches] == ["triton"]


def test_padding_goes_with_the_decode_rows(launches: list[tuple[str, dict[str, Any]]]) -> None:
    """Rows of q behind the last request are written by somebody: with no prompts there, by the decode kernel."""
    step = build_step(StepCase((1, 1), (20, 7), heads=2), "fp8_rope_bf16", dtype=torch.bfloat16)
    padded = replace(step, q=torch.cat((step.q, step.q)))
    for split in (None, torch.tensor([2, 2], dtype=torch.int32)):
        run(with_values(padded, mixed_step_split=split))
        assert launches.pop()[1]["q"].shape[0] == 4


def test_without_room_nothing_is_cut(launches: list[tuple[str, dict[str, Any]]]) -> None:
    """Workers write pieces into rows of their own: with one row too few the step stays whole, and right."""
    step = build_step(StepCase((1, 1), (600, 600), page_size=64, heads=16), "fp8_rope_bf16", dtype=torch.bfloat16)
    needed = 132 * 2 * 16
    for partial_rows, partitions in ((needed + 1, 8), (needed, 8), (needed - 1, 1), (0, 1)):
        room = Pieces.empty(partial_rows, 32, 512, torch.device("cpu"))
        run(step, partitions=8, workspace=room)
        given = launches.pop()[1]
        assert given["num_partitions"] == partitions
        assert given["workspace"].partial_out is room.partial_out
        assert given["workspace"].cuts is room.cuts


def test_what_no_map_can_say_goes_to_triton_where_nobody_asked(
    launches: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides are known at the first step: where nobody named an executor it goes on, and says so."""
    monkeypatch.setattr(executor_cutlass, "_told", set())
    step = build_step(StepCase((1, 1), (20, 7), heads=2), "fp8_rope_bf16", dtype=torch.bfloat16)
    odd = replace(step, q=torch.zeros(2, 2, 580, dtype=torch.bfloat16)[..., :576])
    with pytest.warns(RuntimeWarning, match=r"Triton serves steps that mla_decode_.* doesn't take\. q: expected rows"):
        run(odd)
    assert [who for who, _ in launches] == ["triton"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(odd)  # told once
    with pytest.raises(ValueError, match=r"q: expected rows that begin at multiples of 16 bytes"):
        run(odd, asked_for=True)
    assert [who for who, _ in launches] == ["triton", "triton"]


def test_a_bug_is_not_told_as_a_step_that_it_does_not_take(
    launches: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the launcher's own arithmetic became "Triton serves steps that ... doesn't take": any ValueError
    did."""

    def broken(*_: Any) -> Any:
        raise ValueError("grid: expected a multiple of cluster 2; got 3")

    monkeypatch.setattr(launch, "launcher", broken)
    step = build_step(StepCase((1, 1), (20, 7), heads=2), "fp8_rope_bf16", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="grid: expected a multiple of cluster 2"):
        run(step)
    assert launches == []


def test_rows_beyond_the_room_are_refused(launches: list[tuple[str, dict[str, Any]]]) -> None:
    """A workspace of 16 rows said that it held the 32 that were asked for, so that the kernel wrote behind it."""
    step = build_step(StepCase((1, 1), (600, 600), page_size=64, heads=16), "fp8_rope_bf16", dtype=torch.bfloat16)
    room = Pieces.empty(64, 16, 512, torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"workspace: expected room for 32 rows and 0 partial ones; got room for 16 rows"
    ):
        run(step, partitions=2, workspace=room)
    assert launches == []


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [16, 128])
def test_a_plan_has_room_for_every_cut_it_makes(heads: int) -> None:
    executor, capacity = CutlassExecutor(), Capacity(256, 8192, 131072)
    usual = replace(USUAL, device=torch.device("meta"), num_heads=heads)
    room = executor.workspace(usual, capacity, executor.partitions(usual, capacity, 1, 1))
    assert room.nbytes <= (132 * 2 * 64 * 513 + 8192 * heads) * 4
    for variant in variants.choices(usual, capacity):
        assert launch.partial_rows(variant, 132) <= room.partial_lse.shape[0], variant.name
    small = executor.workspace(replace(usual, num_heads=16), Capacity(1, 1, 131072), 132)
    assert small.partial_lse.shape[0] == 132 * 2 * 16 * 2  # Triton's, for a prompt
    assert executor.workspace(usual, capacity, 1).partial_out.numel() == 0


def test_its_room_serves_tritons_pieces() -> None:
    room = Pieces.empty(96, 48, 512, torch.device("cpu"))
    out, lse = room.views(6, 16)
    assert (out.shape, lse.shape) == ((6, 16, 512), (6, 16))


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the device, as an H200 answers it. Nothing is run on it."""
    monkeypatch.setenv("PAGEDMLA_SELF_CHECK", "0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(executor_cutlass, "_has_bindings", lambda: True)
    monkeypatch.setattr(executor_cutlass, "dsl_version", lambda: "4.8.1")


def test_a_hopper_gpu_can_run_it(hopper: None) -> None:
    assert CutlassExecutor().refusal(USUAL) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": torch.device("cpu")}, "it runs on Hopper GPUs, not on cpu"),
        ({"layout": pagedmla.get_layout("fp8_ds_mla")}, "its layouts are "),
        ({"page_size": 48}, "its pages have "),
        ({"dtype": torch.float16}, "it is built for queries in bfloat16, not float16"),
        ({"num_heads": 129}, "the kernels take up to 128 heads, not 129"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], message: str, hopper: None) -> None:
    reason = CutlassExecutor().refusal(replace(USUAL, **changes))
    assert reason is not None
    assert reason.startswith(message)


def test_what_a_machine_lacks(hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the order of what a user would mend last."""
    monkeypatch.setattr(executor_cutlass, "dsl_version", lambda: None)
    monkeypatch.setenv("PAGEDMLA_CUBINS", str(tmp_path))
    reason = CutlassExecutor().refusal(USUAL)
    assert reason is not None
    assert "isn't built for the sources of this release" in reason
    assert "pagedmla compile --executor cutlass --out DIR" in reason
    monkeypatch.setattr(executor_cutlass, "_has_bindings", lambda: False)
    assert CutlassExecutor().refusal(USUAL) == "cuda-python isn't installed: pip install pagedmla[cutlass]"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    wanted = "it is built for compute capability 9.0 (Hopper), and NVIDIA B200 has 10.0"
    assert CutlassExecutor().refusal(USUAL) == wanted
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm counts its gfx90a as 9.0
    assert CutlassExecutor().refusal(USUAL) == "there is no CUDA device here"


def test_other_operations_are_tritons(hopper: None) -> None:
    for operation in ("store", "prefill", "decompress", "merge"):
        chosen = choose(Configuration(operation, CUDA, dtype=torch.bfloat16), "cutlass")
        assert type(chosen.executor) is TritonExecutor
        assert chosen.reason == "asked for with cutlass, which only attends"
        alone = choose(Configuration(operation, CUDA, dtype=torch.bfloat16))
        assert (alone.executor.name, alone.passed_over) == ("triton", ())


# -- what is proven ----------------------------------------------------------------------------------------------------


def record(kernel: str, **changes: Any) -> dict[str, Any]:
    return {
        "variant": kernel, "address": address_of(kernel, source_digest(), "4.8.1"), "sha256": "0" * 64,
        "card": "NVIDIA H200", "driver": "580.1", "date": "2026-01-02", "cases": 99, **changes,
    }  # fmt: skip


def prove(monkeypatch: pytest.MonkeyPatch, path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(records))
    monkeypatch.setattr(proven, "RECORDS", path)


def needed() -> list[str]:
    return [kernel.name for kernel in executor_cutlass._needed(USUAL)]


def test_what_a_configuration_needs() -> None:
    """Tiles of 16 rows in fp16, of 32 and 64 in two terms, 32 in fp16 for short steps, and the merge."""
    assert needed() == [
        "mla_decode_fp8_rope_bf16_fp16_r16_b64_bf16",
        "mla_decode_fp8_rope_bf16_fp8x2_r32_b64_bf16",
        "mla_decode_fp8_rope_bf16_fp8x2_r64_b64_bf16",
        "mla_decode_fp8_rope_bf16_fp16_r32_b64_bf16",
        "mla_combine_bf16",
    ]


@pytest.fixture
def nothing_built(hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PAGEDMLA_CUBINS", str(tmp_path / "none"))
    monkeypatch.setattr(proven, "RECORDS", tmp_path / "absent.json")
    return tmp_path / "proven.json"


def test_until_it_is_proven_triton_is_preferred(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(USUAL)
    assert chosen.executor.name == "triton"
    ((name, reason),) = chosen.passed_over
    assert (name, reason) == (
        "cutlass",
        "unproven on a GPU: mla_decode_fp8_rope_bf16_fp16_r16_b64_bf16 and 4 more (executor='cutlass' or "
        "PAGEDMLA_ALLOW_UNPROVEN=1 takes it all the same)",
    )
    prove(monkeypatch, nothing_built, [record(kernel) for kernel in needed()[:-1]])
    assert dict(choose(USUAL).passed_over)["cutlass"].startswith("unproven on a GPU: mla_combine_bf16 (executor")
    prove(monkeypatch, nothing_built, [record(kernel) for kernel in needed()])
    chosen = choose(USUAL)
    assert (chosen.executor.name, chosen.passed_over) == ("cutlass", ())


def test_unproven_kernels_run_where_they_are_asked_for(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(USUAL, "cutlass").executor.name == "cutlass"
    monkeypatch.setenv("PAGEDMLA_ALLOW_UNPROVEN", "1")
    assert choose(USUAL).executor.name == "cutlass"
    monkeypatch.setenv("PAGEDMLA_ALLOW_UNPROVEN", "0")
    assert choose(USUAL).executor.name == "triton"
    monkeypatch.setenv("PAGEDMLA_ALLOW_UNPROVEN", "yes")
    with pytest.raises(ValueError, match=r"PAGEDMLA_ALLOW_UNPROVEN: expected 0 or 1; got 'yes'\."):
        choose(USUAL)


def test_a_record_is_of_the_sources_and_of_the_image(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that changed after its run, or was built into something else, is as unproven as one that never ran."""
    prove(monkeypatch, nothing_built, [record(kernel, address="1" * 64) for kernel in needed()])
    assert choose(USUAL).executor.name == "triton"
    prove(monkeypatch, nothing_built, [record(kernel) for kernel in needed()])

    def cubin(name: str, where: tuple[Path, ...]) -> Cubin:
        sha256 = "2" * 64 if name == needed()[0] else "0" * 64
        return Cubin(name, name, 384, 0, 1, 16, False, source_digest(), "4.8.1", sha256)

    monkeypatch.setattr(executor_cutlass, "_cubin", cubin)
    assert dict(choose(USUAL).passed_over)["cutlass"].startswith(f"unproven on a GPU: {needed()[0]} (executor")


def test_explain_tells_what_is_proven(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(monkeypatch, nothing_built, [record(needed()[0])])
    told = CutlassExecutor().kernels(USUAL, Capacity(8, 8, 4096))
    assert told[0] == (
        "1 query token a request: mla_decode_fp8_rope_bf16_fp16_r16_b64_bf16 (proven on NVIDIA H200, 2026-01-02)"
    )
    assert told[1].endswith("_r32_b64_bf16 (unproven on a GPU)")


def test_a_damaged_file_of_records_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stopped "auto" on Hopper, where Triton could go on."""
    monkeypatch.setattr(proven, "RECORDS", tmp_path / "proven.json")
    monkeypatch.setattr(executor_cutlass, "dsl_version", lambda: "4.8.1")  # without one, nothing is looked up
    proven.RECORDS.write_text("{}")
    with pytest.warns(RuntimeWarning, match=r"proven\.json: expected a list of records"):
        assert executor_cutlass.proof(VARIANTS[0]) is None
    proven.RECORDS.unlink()
    proven.RECORDS.mkdir()
    with pytest.warns(RuntimeWarning, match="IsADirectoryError"):
        assert executor_cutlass.proof(VARIANTS[0]) is None


@pytest.mark.parametrize("text", ["{", "{}", '["mla"]', '[{"variant": "mla"}]'])
def test_a_damaged_file_of_records_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "proven.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path}: expected a list of records, each with variant, address, sha256, "):
        proven.records(path)


def test_records_are_read_again_when_they_change(tmp_path: Path) -> None:
    path = tmp_path / "proven.json"
    assert proven.records(path) == {}
    path.write_text("[]")
    assert proven.records(path) == {}
    path.write_text(json.dumps([record("mla_combine_bf16")]))
    (read,) = proven.records(path).values()
    assert (read.variant, read.cases) == ("mla_combine_bf16", 99)


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_plan_loads_what_its_steps_may_take(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is loaded in a captured step breaks the capture."""
    loaded: list[str] = []
    monkeypatch.setattr(launch, "launcher", lambda variant, device: loaded.append(variant.name))
    chosen = choose(USUAL, "cutlass", Capacity(8, 8, 4096))
    assert (chosen.executor.name, loaded) == ("cutlass", needed()[:-1])
    loaded.clear()
    choose(USUAL, "cutlass", Capacity(8, 8, 511))
    tiles = [name.removeprefix("mla_decode_fp8_rope_bf16_").split("_b")[0] for name in loaded]
    assert tiles == ["fp16_r16", "fp16_r32"]
    loaded.clear()
    choose(USUAL, "cutlass")
    assert loaded == []


def test_kernels_that_do_not_load_are_passed_over(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver older than the cubins: an engine that chose by itself goes on with Triton, and explain says why."""
    from pagedmla.cutlass_kernels.driver import DriverError

    def launcher(variant: Variant, device: torch.device) -> None:
        raise DriverError("cuModuleLoadData, to load a cubin of 9 bytes: CUDA_ERROR_NO_BINARY_FOR_GPU (too old)")

    monkeypatch.setattr(launch, "launcher", launcher)
    monkeypatch.setenv("PAGEDMLA_ALLOW_UNPROVEN", "1")
    chosen = choose(USUAL, capacity=Capacity(8, 8, 4096))
    assert chosen.executor.name == "triton"
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in dict(chosen.passed_over)["cutlass"]
    with pytest.raises(ValueError, match=r"executor: expected .*; got 'cutlass', but cuModuleLoadData.*too old"):
        choose(USUAL, "cutlass", Capacity(8, 8, 4096))
