"""Decompress, judged by the layouts' own dequantisation bit for bit, by rows computed by hand, and by what isn't
touched.

Grid: every layout and scale dtype; chunks that begin and end inside pages, of no tokens, and of more than the 16
tokens of a program; page sizes 1 and 2 and 16. Whatever no chunk asks for is NaN: other slots, other layers, unused
pages and scales.
"""

from __future__ import annotations

import pytest
import torch

from pagedmla.hardware.targets import assumed_target, find_target
from pagedmla.kv_cache.layouts import RowPlanes, get_layout, per_tensor_scale
from pagedmla.kv_cache.paged_tensor import PagedTensor
from pagedmla.triton_kernels.decompress import decompress

LAYOUTS = [
    ("bf16", None, None),
    ("fp16", None, None),
    ("fp32", None, None),
    ("fp8_flat", None, torch.float32),
    ("fp8_flat", 128, torch.float16),
    ("fp8_flat", 100, torch.float8_e8m0fnu),
    ("fp8_rope_bf16", None, torch.float32),
    ("fp8_rope_bf16_prescaled", None, torch.float32),
    ("fp8_ds_mla", None, None),
]
LAYERS, LAYER = 2, 1


def raw(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


class Cache:
    """A poisoned pool in which some tokens of each request are alive; scales stand in other pages than values."""

    def __init__(self, guarded, layout, live, page_size, scale_dtype=torch.float32, pages=16):
        self.layout = layout
        generator = torch.Generator().manual_seed(page_size)
        row, groups = layout.row_elements, layout.scales_per_token
        values = torch.empty((pages, 1, LAYERS, page_size, 1, row), dtype=layout.value_dtypes[0])
        raw(values).fill_(-1 if values.element_size() > 1 else 0xFF)
        scales = None
        if groups:
            scales = torch.empty((pages, 1, LAYERS, page_size, 1, groups), dtype=scale_dtype)
            raw(scales).fill_(-1 if scales.element_size() > 1 else 0xFF)
        width = max((-(-last // page_size) for _, last in live), default=0) + 2
        assert sum(-(-last // page_size) for _, last in live) <= pages
        order = iter(torch.randperm(pages, generator=generator).tolist())
        other = iter(torch.randperm(pages, generator=generator).tolist())
        self.table = torch.full((len(live), width), -1, dtype=torch.int32)
        self.scale_table = torch.full((len(live), width), 2147480000, dtype=torch.int32)
        self.rows = []  # float32 meaning of each request's live tokens
        for b, (first, last) in enumerate(live):
            for column in range(first // page_size, -(-last // page_size)):
                self.table[b, column], self.scale_table[b, column] = next(order), next(other)
            size = 10.0 ** torch.randint(-6, 5, (last - first, 1), generator=generator)
            rows = torch.randn(last - first, layout.width, generator=generator) * size
            how = {"scale_dtype": scale_dtype} if groups else {}
            made = layout.quantize(rows[:, : layout.latent], rows[:, layout.latent :], **how)
            for i in range(last - first):
                column, slot = divmod(first + i, page_size)
                raw(values)[self.table[b, column], 0, LAYER, slot, 0] = raw(made.values[i])
                if scales is not None:
                    raw(scales)[self.scale_table[b, column], 0, LAYER, slot, 0] = raw(made.scales[i])
            self.rows.append(layout.dequantize(made.values, made.scales) if last > first else rows)
        self.values = guarded.frozen(values)
        self.scales = None if scales is None else guarded.frozen(scales)

    def planes(self):
        scales = None if self.scales is None else PagedTensor.bind(self.scales, "scales")
        return self.layout.planes(PagedTensor.bind(self.values, "values"), scales, LAYER)


def run(guarded, cache, chunks, dtype, spare=0):
    """Decompress chunks [(first, last)] of each request; `spare` rows of the workspace belong to nobody."""
    starts = torch.tensor([first for first, _ in chunks], dtype=torch.int32)
    loc = torch.tensor(
        [0, *torch.tensor([last - first for first, last in chunks]).cumsum(0).tolist()], dtype=torch.int32
    )
    workspace = guarded.empty((int(loc[-1]) + spare, cache.layout.width), dtype, (cache.layout.width + 8, 1))
    scale_table = None if cache.scales is None else guarded.frozen(cache.scale_table.view(torch.uint32))
    decompress(
        cache.planes(),
        guarded.frozen(cache.table.view(torch.uint32)),
        guarded.frozen(starts),
        guarded.frozen(loc),
        workspace,
        scale_table,
    )
    return workspace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "granularity", "scale_dtype"), LAYOUTS)
def test_agrees_with_the_layout(guarded, name, granularity, scale_dtype, dtype):
    layout = get_layout(name, granularity=granularity)
    chunks = [(3, 8), (4, 4), (1, 15)]
    cache = Cache(guarded, layout, chunks, page_size=2, scale_dtype=scale_dtype)
    workspace = run(guarded, cache, chunks, dtype)
    assert torch.equal(workspace, torch.cat(cache.rows).to(dtype))


@pytest.mark.parametrize("page_size", [1, 16])
def test_page_sizes(guarded, page_size):
    chunks = [(5, 10), (2, 7)]
    cache = Cache(guarded, get_layout("fp8_rope_bf16"), chunks, page_size, pages=20)
    assert torch.equal(run(guarded, cache, chunks, torch.float32), torch.cat(cache.rows))


@pytest.mark.parametrize("name", ["bf16", "fp8_flat", "fp8_rope_bf16", "fp8_ds_mla"])
def test_latent_of_256(guarded, name):
    cache = Cache(guarded, get_layout(name, latent=256), [(0, 5)], page_size=2)
    assert torch.equal(run(guarded, cache, [(0, 5)], torch.float32), cache.rows[0])


def test_bits_shifted_into_place_give_the_same_numbers(guarded):
    """Targets without an e4m3 type decode by shifting."""
    cache = Cache(guarded, get_layout("fp8_flat", granularity=128), [(0, 5)], page_size=2)
    with assumed_target(find_target("sm_80")):
        assert torch.equal(run(guarded, cache, [(0, 5)], torch.float32), cache.rows[0])


def test_many_small_groups(guarded):
    """Groups of 16 columns: 36 scales a token, walked by a loop that isn't unrolled."""
    cache = Cache(guarded, get_layout("fp8_flat", granularity=16), [(0, 3)], page_size=2)
    assert torch.equal(run(guarded, cache, [(0, 3)], torch.float32), cache.rows[0])


def test_chunk_by_chunk_is_the_whole(guarded):
    """A context is walked in pieces of the workspace's size; the pieces side by side are the context."""
    cache = Cache(guarded, get_layout("fp8_flat", granularity=128), [(0, 11), (0, 4)], page_size=2)
    pieces = [
        run(guarded, cache, chunks, torch.float32) for chunks in ([(0, 4), (0, 4)], [(4, 8), (4, 4)], [(8, 11), (4, 4)])
    ]
    assert torch.equal(torch.cat((pieces[0][:4], pieces[1], pieces[2])), cache.rows[0])
    assert torch.equal(pieces[0][4:], cache.rows[1])


def test_rows_past_the_last_request_keep_their_bytes(guarded):
    cache = Cache(guarded, get_layout("fp8_rope_bf16"), [(0, 3)], page_size=2)
    workspace = run(guarded, cache, [(0, 3)], torch.float32, spare=20)
    assert torch.equal(workspace[:3], cache.rows[0])
    assert (workspace[3:].view(torch.int32) == -1).all()


def test_one_row_by_hand(guarded):
    """Codes 0x38 = 1, 0xB8 = -1, 0x7E = 448 and 0x01 = 2^-9 with sigma 0.5, a rope of 1.0 and NaN codes."""
    values = torch.zeros(1, 1, 640, dtype=torch.uint8)
    values[0, 0, :6] = torch.tensor([0x38, 0xB8, 0x7E, 0x01, 0x7F, 0xFF])
    values[0, 0, 512:514] = torch.tensor([0x80, 0x3F])
    planes = RowPlanes(
        values[..., :512], values[..., 512:].view(torch.bfloat16), torch.tensor([[[0.5]]]), 512, False, False
    )
    workspace = guarded.empty((1, 576), torch.float32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    decompress(planes, table, torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), workspace)
    assert workspace[0, :4].tolist() == [0.5, -0.5, 224.0, 2.0**-10]
    assert workspace[0, 4:6].isnan().all()
    assert workspace[0, 512].item() == 1.0
    assert workspace[0, 6:512].count_nonzero() == 0


def test_per_tensor_scale(guarded):
    layout = get_layout("fp8_flat")
    cache = Cache(guarded, layout, [(0, 4)], page_size=2)
    sigma = torch.tensor([0.125])
    cache.scales = per_tensor_scale(sigma, cache.values)
    cache.scale_table = cache.table
    workspace = run(guarded, cache, [(0, 4)], torch.float32)
    codes = torch.stack([cache.values[cache.table[0, t // 2], 0, LAYER, t % 2, 0] for t in range(4)])
    assert torch.equal(workspace, layout.dequantize(codes, sigma.expand(4, 1)))


def test_two_requests_may_share_a_prefix(guarded):
    """Prefix caching: the same pages in two tables (vllm#48611, trtllm#2699)."""
    cache = Cache(guarded, get_layout("fp8_rope_bf16"), [(0, 6)], page_size=2)
    cache.table, cache.scale_table = cache.table.repeat(2, 1), cache.scale_table.repeat(2, 1)
    workspace = run(guarded, cache, [(0, 6), (2, 5)], torch.float32)
    assert torch.equal(workspace, torch.cat((cache.rows[0], cache.rows[0][2:5])))


@pytest.mark.parametrize("bad", [-1, 16, 2147480000])
def test_a_bad_page_id_shows_as_nan(guarded, bad):
    """An id past the pool read another request's cache, silently (b12x#156). Its tokens must not look like numbers."""
    cache = Cache(guarded, get_layout("fp8_rope_bf16"), [(0, 6)], page_size=2)
    cache.table[0, 1] = bad
    workspace = run(guarded, cache, [(0, 6)], torch.float32)
    assert torch.equal(workspace[[0, 1, 4, 5]], cache.rows[0][[0, 1, 4, 5]])
    assert workspace[2:4].isnan().all()


@pytest.mark.parametrize("name", ["bf16", "fp8_flat", "fp8_rope_bf16", "fp8_ds_mla"])
def test_a_position_below_0_shows_as_nan(guarded, name):
    """A chunk_start of -2 read the slots before the request's first page, in page 0 what lies before the pool: Triton's
    division gives such positions column 0 and a negative slot."""
    cache = Cache(guarded, get_layout(name), [(0, 4)], page_size=4)
    workspace = run(guarded, cache, [(-2, 4)], torch.float32)
    assert workspace[:2].isnan().all()
    assert torch.equal(workspace[2:], cache.rows[0])


def test_addresses_past_two_to_the_31(guarded):
    """Page times stride in 32 bits wraps to zero or to another page (vllm#47671, flashinfer#3130)."""
    layout, stride = get_layout("fp8_flat"), 2**30 + 576
    memory = torch.empty(2 * stride + 576, dtype=torch.uint8)  # untouched pages cost nothing
    values = memory.as_strided((3, 1, 576), (stride, 576, 1))
    codes = torch.arange(576).remainder(120).to(torch.uint8)
    values[2, 0] = codes
    planes = RowPlanes(values[..., :512], values[..., 512:], torch.ones(3, 1, 1), 576, True, False)
    workspace = guarded.empty((1, 576), torch.float32)
    table = torch.tensor([[2]], dtype=torch.int32)
    decompress(planes, table, torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), workspace)
    assert torch.equal(workspace[0], layout.dequantize(codes, torch.ones(1)))


def test_nothing_to_read_is_legal(guarded):
    cache = Cache(guarded, get_layout("fp8_rope_bf16"), [], page_size=2)
    assert run(guarded, cache, [], torch.float32).shape == (0, 576)
    idle = Cache(guarded, get_layout("fp8_rope_bf16"), [(0, 0), (0, 0)], page_size=2)
    workspace = run(guarded, idle, [(0, 0), (0, 0)], torch.float32, spare=3)
    assert (workspace.view(torch.int32) == -1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workspace": torch.zeros(4, 512)}, r"workspace: expected \[\*, 576\] .* got \[4, 512\] float32"),
        ({"workspace": torch.zeros(576, 4).T}, r"workspace: expected adjacent columns"),
        ({"key_start_loc": torch.zeros(1, dtype=torch.int32)}, r"key_start_loc: expected \[2\]"),
        ({"chunk_start": torch.zeros(1)}, r"chunk_start: .* got \[1\] float32"),
        (
            {"chunk_start": torch.zeros(1, 1, dtype=torch.int32)},
            r"chunk_start: expected \[\*\] int32 .*; got \[1, 1\] int32",
        ),
        ({"scales_lookup_table": torch.zeros(1, 9, dtype=torch.int32)}, r"scales_lookup_table: expected \[1, 5\]"),
    ],
    ids=["workspace width", "columns apart", "starts", "float starts", "matrix of starts", "scale table width"],
)
def test_refuses_by_name(guarded, change, message):
    cache = Cache(guarded, get_layout("fp8_rope_bf16"), [(0, 6)], page_size=2)
    given = {
        "lookup_table": cache.table,
        "scales_lookup_table": cache.scale_table,
        "chunk_start": torch.zeros(1, dtype=torch.int32),
        "key_start_loc": torch.tensor([0, 4], dtype=torch.int32),
        "workspace": torch.zeros(4, 576),
    }
    with pytest.raises(ValueError, match=message):
        decompress(cache.planes(), **{**given, **change})
