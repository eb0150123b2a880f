"""One build serves every step: what Triton compiles a launch for must not depend on how many tokens a step brings.

Grid: 1 and 16 are the integers that Triton's JIT takes as special (a constant, and a multiple of 16), 3 is neither; so
are tables of 1, 16 and 5 columns. Lengths and starts are slices as engines make them, some 16-byte aligned, some not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagedmla.hardware.targets import TARGETS
from pagedmla.kv_cache.layouts import RowPlanes, get_layout
from pagedmla.kv_cache.paged_tensor import PagedTensor

triton = pytest.importorskip("triton", reason="Triton isn't installed: pip install pagedmla[triton]")

from pagedmla.triton_kernels.decode import attend_decode  # noqa: E402
from pagedmla.triton_kernels.decompress import decompress  # noqa: E402
from pagedmla.triton_kernels.merge import merge  # noqa: E402
from pagedmla.triton_kernels.mixed import attend_mixed  # noqa: E402
from pagedmla.triton_kernels.pieces import attend_pieces  # noqa: E402
from pagedmla.triton_kernels.prefill import prefill  # noqa: E402
from pagedmla.triton_kernels.recording import Recorded, Specialisation, record, specialise  # noqa: E402
from pagedmla.triton_kernels.schedule import make_schedule  # noqa: E402
from pagedmla.triton_kernels.store import store, store_slots  # noqa: E402

HEADS = 16


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def lengths(count: int, first: int = 0) -> Tensor:
    """int32 numbers of the requests from `first` on, out of a buffer for all."""
    return meta(first + count, dtype=torch.int32)[first:]


def pool(layout_name: str, page_size: int = 64) -> RowPlanes:
    layout = get_layout(layout_name)
    values = meta(128, 1, 2, page_size, 1, layout.row_elements, dtype=layout.value_dtypes[0])
    scales = meta(128, 1, 2, page_size, 1, layout.scales_per_token, dtype=torch.float32)
    bound = PagedTensor.bind(scales, "kv_scales") if layout.scales_per_token else None
    return layout.planes(PagedTensor.bind(values, "kv_blocks"), bound, 0)


def calls(requests: int, columns: int, first: int) -> dict[str, Callable[[], None]]:
    """Every kernel on a step of so many requests, one token each, with page tables of so many columns."""
    planes = pool("fp8_rope_bf16")
    table = meta(first + requests, columns, dtype=torch.int32)[first:]
    q = meta(requests, HEADS, 576)
    out, lse = meta(requests, HEADS, 512), meta(requests, HEADS, dtype=torch.float32)
    outs, lses = meta(4, requests, HEADS, 512, dtype=torch.float32), meta(4, requests, HEADS, dtype=torch.float32)
    starts = lengths(requests + 1, first)
    latent, rope, workspace = meta(requests, 512), meta(requests, 64), meta(requests, 576)
    slots = meta(first + requests, dtype=torch.int64)[first:]
    dense, dense_out = meta(requests, HEADS, 192), meta(requests, HEADS, 128)

    def pieces() -> None:
        schedule = make_schedule(
            lengths(requests, first), starts, tokens=requests, heads=HEADS, rows=16, keys=64, row_tiles=requests,
            places=264, slots=264, most_pieces=264,
        )  # fmt: skip
        states = meta(264, 16, 512, dtype=torch.float32), meta(264, 16, dtype=torch.float32)
        attend_pieces(q, planes, table, schedule, out, lse, *states, sm_scale=1.0, max_query_len=1)

    return {
        "schedule": pieces,
        "records": pieces,
        "pieces": pieces,
        "merge_cuts": pieces,
        "decode": lambda: attend_decode(q, planes, table, lengths(requests, first), out, lse, sm_scale=1.0),
        "mixed": lambda: attend_mixed(
            q, planes, table, lengths(requests, first), starts, out, lse, sm_scale=1.0, max_query_len=1
        ),
        "store": lambda: store(latent, rope, planes, table, lengths(requests, first), starts),
        "store_slots": lambda: store_slots(latent, rope, planes, slots),
        "decompress": lambda: decompress(planes, table, lengths(requests, first), starts, workspace),
        "prefill": lambda: prefill(dense, dense, dense[..., :128], starts, starts, dense_out, lse, sm_scale=1.0),
        "merge": lambda: merge(outs, lses, outs[0], lses[0]),
    }


KERNELS = tuple(calls(1, 1, 0))


def launched(kernel: str, requests: int, columns: int = 5, first: int = 0) -> Recorded:
    made = record(calls(requests, columns, first)[kernel], TARGETS["sm_90"])
    return made[("schedule", "records", "pieces", "merge_cuts").index(kernel)] if len(made) == 4 else made[0]


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_build_serves_every_number_of_requests(kernel: str) -> None:
    """Triton compiles an integer argument anew when it is 1 and when it is a multiple of 16: requests, tokens and table
    widths made up to nine builds of one tile, each seconds long, in the middle of serving."""
    seen: list[Specialisation] = [
        specialise(launched(kernel, requests, first=first)) for requests in (1, 3, 16) for first in (0, 1)
    ]
    assert all(types == seen[0] for types in seen)


@pytest.mark.parametrize("kernel", ["pieces", "decode", "mixed", "decompress"])
def test_one_build_serves_every_table(kernel: str) -> None:
    seen = [specialise(launched(kernel, 3, columns)) for columns in (1, 5, 16)]
    assert all(types == seen[0] for types in seen)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_numbers_stay_known_to_be_aligned(kernel: str) -> None:
    """What loads move in 16-byte pieces must keep its alignment, or each becomes single bytes."""
    wide = {
        "schedule": set(),
        "records": {"pieces"},
        "pieces": {"q", "latent", "rope", "stride_q_token", "stride_latent_page", "stride_rope_page"},
        "merge_cuts": {"states", "out", "stride_out_token"},
        "decode": {"q", "latent", "rope", "stride_q_token", "stride_latent_page", "stride_rope_page"},
        "mixed": {"q", "latent", "rope", "stride_q_token", "stride_latent_page", "stride_rope_page"},
        "store": {"latent", "rope", "stride_latent", "stride_latent_page", "stride_latent_slot"},
        "store_slots": {"latent", "rope", "stride_latent", "stride_latent_page", "stride_latent_slot"},
        "decompress": {"workspace", "stride_workspace", "stride_latent_page", "stride_latent_slot"},
        "prefill": {"q", "k", "v", "out", "stride_q_token", "stride_k_token", "stride_v_token"},
        "merge": {"partial_out", "out", "stride_partial_split", "stride_out_token"},
    }[kernel]
    assert wide <= set(specialise(launched(kernel, 3)).divisible_by_16)


@pytest.mark.parametrize("requests", [1, 3, 16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_is_what_the_jit_derives(kernel: str, requests: int) -> None:
    """The judge is Triton's own binder, which needs a backend and no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    one = launched(kernel, requests)
    bind = create_function_from_signature(
        one.kernel.signature, one.kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    _, derived, _ = bind(*one.args, **one.kwargs)
    types = specialise(one)
    for name, (kind, special) in zip(one.kernel.arg_names, derived, strict=True):
        assert (kind == "constexpr") == (name in types.constants), name
        if kind != "constexpr":
            assert kind == types.signature[name], name
            assert (special == "D") == (name in types.divisible_by_16), name
