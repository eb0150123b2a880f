"""Side by side with vLLM's own Triton MLA decode kernel, on one cache: the error of each, and what each is compiled to.

PAGEDMLA_VLLM_WHEEL names a vLLM wheel (`pip download --no-deps vllm==0.33.0`); without it an installed vLLM serves. One
file of it is loaded, with stand-ins for the three modules that the file imports, so neither its GPU libraries nor its
dependencies are needed. Its kernels then run in our interpreter, as ours do.

Grid: what vLLM ships, e4m3 with one scale for the tensor, and bf16; 1, 33 and 130 keys on pages of 16 and 64 lie below,
beside and beyond its tile of 32 and ours of 64; 5 heads fill no tile, 16 fill one, 40 need several; one split and four.
`pytest -s` prints a row a case.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cases.bounds import row_errors
from cases.steps import Step, StepCase, build_step, with_values
from torch import Tensor

import pagedmla
from pagedmla.kv_cache.paged_tensor import raw_view

triton = pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")

from pagedmla.triton_kernels.compile import compile_variant  # noqa: E402
from pagedmla.triton_kernels.interpreter import interpreted  # noqa: E402
from pagedmla.triton_kernels.recording import Recorded, specialise  # noqa: E402
from pagedmla.triton_kernels.variants import Variant, attention_variants  # noqa: E402

SWITCH = "PAGEDMLA_VLLM_WHEEL"
MODULE = "vllm.v1.attention.ops.triton_decode_attention"
SIGMA = 0.3  # no power of two, so that multiplying elements by it rounds


class Redirected:
    """A kernel whose launches go to `receive(kernel, grid, args, kwargs)`."""

    def __init__(self, kernel: Any, receive: Any) -> None:
        self.kernel, self.receive = kernel, receive

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.receive(self.kernel, grid, args, kwargs)


class Peer:
    """vLLM's host functions, and its kernels wherever a test wants them to go."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.kernels = {name: made for name, made in vars(module).items() if isinstance(made, triton.JITFunction)}

    def decode(
        self, q: Tensor, pool: Tensor, table: Tensor, kv_lens: Tensor, sigma: Tensor, splits: int, sm_scale: float,
        receive: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(out `[B, H, latent]` in q's dtype, lse `[B, H]` float32) over `pool [N, P, 576]`."""
        batch, heads, width = q.shape
        latent = width - 64
        keys = pool.unsqueeze(2)
        out = q.new_empty(batch, heads, latent)
        lse = q.new_empty(batch, heads, dtype=torch.float32)
        parts = q.new_empty(batch, heads, splits, latent + 1, dtype=torch.float32)
        for name, kernel in self.kernels.items():
            setattr(self.module, name, Redirected(kernel, receive))
        try:
            self.module.decode_attention_fwd(
                q, keys, keys[..., :latent], out, lse, table, kv_lens, parts, splits, sm_scale, pool.shape[1],
                k_scale=sigma, v_scale=sigma, is_mla=True,
            )  # fmt: skip
        finally:
            for name, kernel in self.kernels.items():
                setattr(self.module, name, kernel)
        return out, lse


def run_interpreted(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    interpreted(kernel)[grid](*args, **kwargs)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    path = _source(tmp_path_factory)
    stand_ins = {
        "vllm": ModuleType("vllm"),
        "vllm.platforms": ModuleType("vllm.platforms"),
        "vllm.triton_utils": ModuleType("vllm.triton_utils"),
    }
    vars(stand_ins["vllm.platforms"])["current_platform"] = SimpleNamespace(is_rocm=lambda: False)
    vars(stand_ins["vllm.triton_utils"]).update(tl=triton.language, triton=triton)
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in stand_ins.items():
            patch.setitem(sys.modules, name, stand_in)
        spec.loader.exec_module(module)
        patch.setitem(sys.modules, MODULE, module)
        yield Peer(module)


def _source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's file on disk, where Triton reads the source of a kernel."""
    inside = MODULE.replace(".", "/") + ".py"
    wheel = os.environ.get(SWITCH)
    if wheel:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(inside, tmp_path_factory.mktemp("vllm")))
    installed = importlib.util.find_spec("vllm")
    if installed is None or not installed.submodule_search_locations:
        pytest.skip(f"{SWITCH} isn't set and vllm isn't installed: no kernel to stand beside")
    return Path(installed.submodule_search_locations[0]).parent / inside


def make_step(case: StepCase, cache: str) -> Step:
    """A step whose rows both kernels can read; over FP8 one scale serves the pool: vLLM's kernel knows no other."""
    step = build_step(case, "bf16" if cache == "bf16" else "fp8_flat", dtype=torch.bfloat16)
    if cache == "bf16":
        return step
    values = step.values
    rows = []
    for b, kv_len in enumerate(case.kv_lens):
        token = torch.arange(kv_len)
        page = values.lookup_table[b, token // case.page_size].long()
        codes = raw_view(values.kv_blocks)[page, 0, step.layer, token % case.page_size, 0]
        rows.append(codes.view(torch.float8_e4m3fn).double() * SIGMA)
    sigma = pagedmla.per_tensor_scale(torch.tensor([SIGMA]), values.kv_blocks)
    step = with_values(step, kv_scales=sigma, scales_page_stride=None, scales_lookup_table=None)
    return dataclasses.replace(step, rows=rows, sm_scale=step.sm_scale * 2**-7)  # codes reach 448


CASES = [
    StepCase((1, 1, 1), (1, 33, 130), page_size=16, heads=16),
    StepCase((1, 1), (130, 64), page_size=64, heads=40),
    StepCase((1,), (130,), page_size=16, heads=5),
]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cache", ["fp8", "bf16"])
def test_no_less_exact_than_vllm(vllm: Peer, cache: str, case: StepCase, splits: int) -> None:
    step = make_step(case, cache)
    values = step.values
    kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32)
    theirs = vllm.decode(
        step.q, values.kv_blocks[:, 0, step.layer, :, 0], values.lookup_table, kv_lens, torch.tensor(SIGMA), splits,
        step.sm_scale, run_interpreted,
    )  # fmt: skip
    split = with_values(step, mla_num_partitions=torch.tensor([splits]))
    out, lse = pagedmla.attend(split.q, split.values, split.layer, executor="triton", **split.call())
    want = step.dense_attention()
    ours_out, ours_lse = row_errors((out, lse), want)
    their_out, their_lse = row_errors(theirs, want)
    served_lse = row_errors((theirs[0], theirs[1].bfloat16()), want)[1]  # its backend keeps lse in q's dtype
    print(
        f"\n{cache:5}{case!s:34} S={splits}  out: ours {ours_out:.1e}, vLLM {their_out:.1e}   "
        f"lse: ours {ours_lse:.1e}, vLLM {their_lse:.1e}, {served_lse:.1e} as served",
        end="",
    )
    assert ours_out <= max(4e-3, their_out)
    assert ours_lse <= max(1e-5, their_lse)
    if cache == "fp8":
        assert ours_lse < their_lse / 10  # scales on scores against scales on elements, rounded to bf16
    # Where the peer itself were wrong, the comparison would say nothing.
    assert their_out < 2e-2
    assert their_lse < 5e-2


def test_fewer_instructions_a_key_than_vllm(vllm: Peer) -> None:
    """16 rows over an FP8 cache with one scale for the tensor, both as the JIT would build them for Hopper."""
    if not triton.__version__.startswith("3.7.1"):
        pytest.skip(f"the figures are those of Triton 3.7.1, and this is {triton.__version__}")

    def meta(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    recorded: list[Recorded] = []
    vllm.decode(
        meta(64, 16, 576, dtype=torch.bfloat16), meta(1024, 64, 576, dtype=torch.float8_e4m3fn),
        meta(64, 512, dtype=torch.int32), meta(64, dtype=torch.int32), meta(dtype=torch.float32), 8, 576**-0.5,
        lambda *launched: recorded.append(Recorded(*launched)),
    )  # fmt: skip
    stage1 = recorded[0]
    types = specialise(stage1)
    options = dict(types.options)
    theirs = compile_variant(
        Variant(
            kernel="vllm", layout="fp8_flat", rows=types.constants["BLOCK_H"],
            function=f"{MODULE}:{stage1.kernel.fn.__name__}", signature=types.signature, constants=types.constants,
            divisible_by_16=types.divisible_by_16, tokens_per_iteration=types.constants["BLOCK_N"],
            bytes_per_token=576.0, num_warps=options.pop("num_warps"), num_stages=options.pop("num_stages"),
            targets=("sm_90",), options=options,
        ),
        "sm_90",
    )  # fmt: skip
    ours = compile_variant(
        next(
            variant
            for variant in attention_variants(["sm_90"])
            if (variant.kernel, variant.layout, variant.rows) == ("decode", "fp8_flat", 16)
            and variant.constants["PAGE_SIZE"] == 64
            and variant.constants["GROUPS"] == 1
        ),
        "sm_90",
    )
    for name, row in (("ours", ours), ("vLLM", theirs)):
        print(f"\n{name}: ", {key: value for key, value in row.items() if key != "options"}, end="")
    assert ours["warp_instructions_per_token"] < theirs["warp_instructions_per_token"]
    assert ours["spill_words_in_loop"] <= theirs["spill_words_in_loop"]
