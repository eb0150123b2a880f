"""Store, judged by the layouts' own quantisation byte for byte, by rows computed by hand, and by what must never
change.

Grid: every layout; groups that divide the row, straddle latent and rope (96, 100) or end ragged (100 leaves 76
columns); every scale dtype; page sizes 1, 2 and 16 so that tokens cross pages; 17 tokens fill one program and begin
another. Inputs hold zeros, NaN, infinities and sizes from 1e-30 to 3e38. The whole pool is compared, poison included,
so one byte too many fails.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pagedmla.hardware.targets import assumed_target, find_target
from pagedmla.kv_cache.layouts import RowPlanes, get_layout, per_tensor_scale
from pagedmla.kv_cache.paged_tensor import PagedTensor
from pagedmla.triton_kernels.device.fp8 import encode_e4m3
from pagedmla.triton_kernels.interpreter import interpreted
from pagedmla.triton_kernels.store import store, store_slots

PLAIN = [(name, None, None) for name in ("bf16", "fp16", "fp32")]
SCALED = [
    ("fp8_flat", None, torch.float32),
    ("fp8_flat", 128, torch.float32),
    ("fp8_flat", 96, torch.float16),
    ("fp8_flat", 100, torch.float8_e8m0fnu),
    ("fp8_rope_bf16", None, torch.float32),
    ("fp8_rope_bf16_prescaled", None, torch.float32),
    ("fp8_ds_mla", None, None),
]
LAYERS = 2
LAYER = 1  # the other one must keep its bytes


class Pool:
    """A poisoned value pool and scale pool of one layout, pages padded, and what they should hold by now."""

    def __init__(self, guarded, layout, pages, page_size, scale_dtype=torch.float32, scale_pages=None):
        self.layout, self.page_size = layout, page_size
        row, groups = layout.row_elements, layout.scales_per_token
        self.values = guarded.empty(
            (pages, 1, LAYERS, page_size, 1, row),
            layout.value_dtypes[0],
            (LAYERS * page_size * row + 16, LAYERS * page_size * row, page_size * row, row, row, 1),
        )
        self.scales = None
        if groups:
            self.scales = guarded.empty(
                (scale_pages or pages, 1, LAYERS, page_size, 1, groups),
                scale_dtype,
                (LAYERS * page_size * groups + 4, LAYERS * page_size * groups, page_size * groups, groups, groups, 1),
            )
        self.scale_dtype = scale_dtype
        self.expected = raw(self.values).clone()
        self.expected_scales = None if self.scales is None else raw(self.scales).clone()

    def planes(self):
        scales = None if self.scales is None else PagedTensor.bind(self.scales, "scales")
        return self.layout.planes(PagedTensor.bind(self.values, "values"), scales, LAYER)

    def expect(self, place, latent, rope, scale_place=None, **how):
        """Note that a token should stand at `place` (page, slot), its scales at `scale_place`."""
        if self.layout.scales_per_token:
            how.setdefault("scale_dtype", self.scale_dtype)
        made = self.layout.quantize(latent, rope, **how)
        self.expected[place[0], 0, LAYER, place[1], 0] = raw(self._with_quiet_nan(made.values, rope.dtype))
        if self.scales is not None and "sigma" not in how:
            page, slot = scale_place or place
            self.expected_scales[page, 0, LAYER, slot, 0] = raw(made.scales)

    def _with_quiet_nan(self, values, given):
        """Numbers that were converted hold the quiet NaN; torch's conversion gives one or another, by vector width."""
        wide = values[..., -2 * 64 :].view(torch.bfloat16) if self.layout.quantised else values
        if self.layout.name == "fp8_flat" or (wide.dtype == given and not self.layout.name.endswith("prescaled")):
            return values
        quiet = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}[wide.dtype]
        raw(wide)[wide.isnan()] = quiet
        return values

    def check(self):
        assert torch.equal(raw(self.values), self.expected)
        if self.scales is not None:
            assert torch.equal(raw(self.scales), self.expected_scales)


def raw(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def step(tokens, latent=512, dtype=torch.bfloat16):
    """Latents and ropes of very different sizes; some tokens are zero, some hold NaN or infinities."""
    generator = torch.Generator().manual_seed(tokens)
    size = 10.0 ** torch.tensor([0.0, -2, 4, -30, 37.5, -6]).repeat(tokens // 6 + 1)[:tokens, None]
    rows = torch.randn(tokens, latent + 64, generator=generator) * size
    if tokens > 3:
        rows[3] = 0.0
        rows[3, 7] = -0.0
        rows[1, [5, 300 % latent, -1]] = float("nan")
        rows[2, [9, -2]] = torch.tensor([float("inf"), -float("inf")])
    rows = rows.to(dtype)
    return rows[:, :latent].contiguous(), rows[:, latent:].contiguous()


def lengths(guarded, *values):
    return guarded.frozen(torch.tensor(values, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "granularity", "scale_dtype"), PLAIN + SCALED)
def test_bytes_of_every_layout(guarded, name, granularity, scale_dtype, dtype):
    layout = get_layout(name, granularity=granularity)
    pool = Pool(guarded, layout, pages=12, page_size=2, scale_dtype=scale_dtype)
    latent, rope = step(17, dtype=dtype)
    starts, cached = [0, 5, 5, 17], [3, 9, 0]
    table = torch.randperm(12, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    table = torch.stack((table, table.flip(0), table.roll(4)))  # request 1 has no tokens; 0 and 2 share no page in use
    for b in (0, 2):
        for i in range(starts[b + 1] - starts[b]):
            position, t = cached[b] + i, starts[b] + i
            pool.expect((int(table[b, position // 2]), position % 2), latent[t], rope[t])
    store(
        guarded.frozen(latent),
        guarded.frozen(rope),
        pool.planes(),
        guarded.frozen(table),
        lengths(guarded, *cached),
        lengths(guarded, *starts),
    )
    pool.check()


@pytest.mark.parametrize("name", ["bf16", "fp8_flat", "fp8_rope_bf16", "fp8_ds_mla"])
def test_latent_of_256(guarded, name):
    layout = get_layout(name, latent=256)
    pool = Pool(guarded, layout, pages=3, page_size=2)
    latent, rope = step(4, latent=256)
    for t in range(4):
        pool.expect(([2, 2, 0, 0][t], t % 2), latent[t], rope[t])
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    store(
        guarded.frozen(latent), guarded.frozen(rope), pool.planes(), table, lengths(guarded, 0), lengths(guarded, 0, 4)
    )
    pool.check()


def test_the_integer_path_writes_the_same_bytes(guarded):
    """sm_80 has no e4m3 and sm_89's conversion rounds twice: there integers make the codes."""
    pool = Pool(guarded, get_layout("fp8_flat", granularity=128), pages=1, page_size=16)
    latent, rope = step(6)
    for t in range(6):
        pool.expect((0, t), latent[t], rope[t])
    with assumed_target(find_target("sm_80")):
        store_slots(latent, rope, pool.planes(), torch.arange(6))
    pool.check()


def test_many_small_groups(guarded):
    """Groups of 16 columns: 36 scales a token, walked by a loop that isn't unrolled."""
    pool = Pool(guarded, get_layout("fp8_flat", granularity=16), pages=1, page_size=4)
    latent, rope = step(4)
    for t in range(4):
        pool.expect((0, t), latent[t], rope[t])
    store_slots(latent, rope, pool.planes(), torch.arange(4))
    pool.check()


@pytest.mark.parametrize(("name", "granularity", "scale_dtype"), SCALED)
def test_power_of_two_scales(guarded, name, granularity, scale_dtype):
    """Readers that multiply by an exponent (e8m0) need sigma to be a power of two (vllm#49435)."""
    layout = get_layout(name, granularity=granularity)
    pool = Pool(guarded, layout, pages=1, page_size=16, scale_dtype=scale_dtype)
    latent, rope = step(6)
    for t in range(6):
        pool.expect((0, t), latent[t], rope[t], power_of_two=True)
    slots = torch.arange(6)
    store_slots(guarded.frozen(latent), guarded.frozen(rope), pool.planes(), slots, power_of_two=True)
    pool.check()


def test_one_row_by_hand(guarded):
    """Largest 448 gives sigma 1, so codes are those of the numbers themselves; the rope keeps its bits."""
    pool = Pool(guarded, get_layout("fp8_rope_bf16"), pages=1, page_size=1)
    latent, rope = torch.zeros(1, 512), torch.zeros(1, 64)
    latent[0, :8] = torch.tensor([448.0, 1.0, -1.0, 0.5, 2**-9, 17.0, 19.0, 2**-10])
    rope[0, 0], rope[0, 63] = 1.0, -2.0
    store_slots(latent, rope, pool.planes(), torch.zeros(1, dtype=torch.int64))
    row = pool.values.view(torch.uint8).reshape(-1, 640)[1]  # layer 1
    # 17 and 19 lie between 16, 18 and 20 and go to the even one; half of the smallest code goes to zero
    assert row[:9].tolist() == [0x7E, 0x38, 0xB8, 0x30, 0x01, 0x58, 0x5A, 0x00, 0x00]
    assert row[512:514].tolist() == [0x80, 0x3F]
    assert row[638:640].tolist() == [0x00, 0xC0]
    assert pool.scales[0, 0, LAYER, 0, 0, 0].item() == 1.0


def test_zero_token_keeps_a_positive_scale(guarded):
    """An all-zero row gave 0 / 0 (vllm#49435): its scale must be positive and finite and its codes zero."""
    pool = Pool(guarded, get_layout("fp8_flat"), pages=1, page_size=1)
    store_slots(torch.zeros(1, 512), torch.zeros(1, 64), pool.planes(), torch.zeros(1, dtype=torch.int64))
    assert pool.scales[0, 0, LAYER].item() == 2.0**-100
    assert pool.values.view(torch.uint8)[0, 0, LAYER].count_nonzero() == 0


@pytest.mark.parametrize("granularity", [None, 64])
def test_error_is_that_of_the_format(guarded, granularity):
    """Half a unit in the last of 3 mantissa bits, or half the smallest code: for latents of every size."""
    layout = get_layout("fp8_flat", granularity=granularity)
    pool = Pool(guarded, layout, pages=1, page_size=4)
    latent, rope = (
        x[:4] * torch.tensor([1e-6, 1e-2, 1.0, 1e4])[:, None] for x in (torch.randn(4, 512), torch.randn(4, 64))
    )
    store_slots(latent, rope, pool.planes(), torch.arange(4))
    sigma = pool.scales[0, 0, LAYER, :, 0]
    stored = layout.dequantize(pool.values[0, 0, LAYER, :, 0], sigma).double()
    columns = torch.arange(576) // layout.scale_group
    exact = torch.cat((latent, rope), -1).double()
    bound = torch.maximum(exact.abs() * 2**-4, sigma.double()[:, columns] * 2**-10) * (1 + 1e-6)
    assert (stored - exact).abs().le(bound).all()


def test_scales_go_through_their_own_table(guarded):
    """Modular's fixture: 4 pages of 2 slots, values to pages [2, 0], scales to pages [1, 3], padding and decoys
    untouched.
    """
    layout = get_layout("fp8_rope_bf16")
    pool = Pool(guarded, layout, pages=4, page_size=2)
    latent, rope = step(4)
    for t in range(3):
        position = 1 + t
        pool.expect(([2, 0][position // 2], position % 2), latent[t], rope[t], ([1, 3][position // 2], position % 2))
    store(
        latent[:3],
        rope[:3],
        pool.planes(),
        guarded.frozen(torch.tensor([[2, 0]], dtype=torch.uint32)),
        lengths(guarded, 1),
        lengths(guarded, 0, 3),
        guarded.frozen(torch.tensor([[1, 3]], dtype=torch.uint32)),
    )
    pool.check()


def test_scale_pool_may_be_larger_or_smaller_than_the_value_pool(guarded):
    """MAX checks a scale page against the number of value pages: a legal store is refused, an illegal one isn't."""
    layout = get_layout("fp8_rope_bf16")
    pool = Pool(guarded, layout, pages=1, page_size=1, scale_pages=3)
    latent, rope = step(1)
    pool.expect((0, 0), latent[0], rope[0], (2, 0))
    store_slots(latent, rope, pool.planes(), torch.tensor([0]), torch.tensor([2]))
    pool.check()
    small = Pool(guarded, layout, pages=3, page_size=1, scale_pages=1)
    store_slots(latent, rope, small.planes(), torch.tensor([2]), torch.tensor([2]))
    small.check()


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32], ids=str)
@pytest.mark.parametrize("name", ["fp8_rope_bf16", "fp8_ds_mla", "bf16"])
def test_ids_outside_the_pool_are_dropped_whole(guarded, name, dtype):
    """A page id past the pool wrote to another request's cache, or out of memory (b12x#156): -1, N, and 2147480000."""
    pool = Pool(guarded, get_layout(name), pages=3, page_size=1)
    latent, rope = step(5)
    table = torch.tensor([[1, 3, -1, 2147480000, 2]], dtype=torch.int32).view(dtype)
    for t, page in ((0, 1), (4, 2)):
        pool.expect((page, 0), latent[t], rope[t])
    store(latent, rope, pool.planes(), guarded.frozen(table), lengths(guarded, 0), lengths(guarded, 0, 5))
    pool.check()


def test_a_scale_page_outside_its_pool_drops_the_values_too(guarded):
    pool = Pool(guarded, get_layout("fp8_flat", granularity=128), pages=4, page_size=1, scale_pages=2)
    latent, rope = step(4)
    scale_table = torch.tensor([[0, 2, -1, 1]], dtype=torch.int32)
    for t, page in ((0, 0), (3, 1)):
        pool.expect((3 - t, 0), latent[t], rope[t], (page, 0))
    table = torch.tensor([[3, 2, 1, 0]], dtype=torch.int32)
    store(latent, rope, pool.planes(), table, lengths(guarded, 0), lengths(guarded, 0, 4), scale_table)
    pool.check()


def test_padding_is_dropped(guarded):
    """A captured graph brings rows of length -1, tokens past the last request, short tables, and -1 slots."""
    pool = Pool(guarded, get_layout("fp8_rope_bf16"), pages=3, page_size=2)
    latent, rope = step(6)
    pool.expect((2, 1), latent[1], rope[1])
    table = torch.tensor([[-1, -1], [1, 2], [0, 1]], dtype=torch.int32)
    store(
        latent,
        rope,
        pool.planes(),
        guarded.frozen(table[:, :2]),
        lengths(guarded, -1, 3, 4),
        lengths(guarded, 0, 1, 2, 4),
    )  # request 2 stands at 4 and 5, past its two columns; tokens 4 and 5 belong to nobody
    pool.check()
    pool.expect((0, 1), latent[2], rope[2])
    store_slots(latent, rope, pool.planes(), guarded.frozen(torch.tensor([-1, -7, 1, 6, 2**40, -1])))
    pool.check()


def test_engine_slots(guarded):
    """Slots and scale slots from an engine, each its own mapping, 17 tokens over two programs, page size 16."""
    pool = Pool(guarded, get_layout("fp8_rope_bf16"), pages=2, page_size=16)
    latent, rope = step(17)
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(3))[:17]
    scale_slots = torch.randperm(32, generator=torch.Generator().manual_seed(4))[:17]
    for t in range(17):
        pool.expect(divmod(int(slots[t]), 16), latent[t], rope[t], divmod(int(scale_slots[t]), 16))
    store_slots(
        guarded.frozen(latent),
        guarded.frozen(rope),
        pool.planes(),
        guarded.frozen(slots),
        guarded.frozen(scale_slots, (3,)),
    )
    pool.check()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16, torch.float8_e8m0fnu], ids=str)
def test_per_tensor_scale_is_read_and_never_written(guarded, scale_dtype):
    layout = get_layout("fp8_flat")
    pool = Pool(guarded, layout, pages=2, page_size=2)
    sigma = guarded.frozen(torch.tensor([0.25]).to(scale_dtype))
    pool.scales, pool.expected_scales = per_tensor_scale(sigma, pool.values), None
    latent, rope = step(4)
    for t in range(4):
        pool.expect((t // 2, t % 2), latent[t], rope[t], sigma=sigma)
    store_slots(latent, rope, pool.planes(), torch.arange(4))
    assert torch.equal(raw(pool.values), pool.expected)


def test_inputs_may_be_slices_of_one_projection(guarded):
    """Engines hand over views into one [T, 576 + more] tensor: token strides are read."""
    pool = Pool(guarded, get_layout("fp8_rope_bf16"), pages=1, page_size=4)
    latent, rope = step(3)
    rows = guarded.frozen(torch.cat((torch.full((3, 8), float("nan"), dtype=latent.dtype), rope, latent), -1))
    for t in range(3):
        pool.expect((0, t), latent[t], rope[t])
    store_slots(rows[:, 72:], rows[:, 8:72], pool.planes(), torch.arange(3))
    pool.check()


def test_tables_may_be_slices(guarded):
    """A wide table cut to five columns has rows further apart than five (flashinfer#3915)."""
    pool = Pool(guarded, get_layout("bf16"), pages=4, page_size=1)
    latent, rope = step(2)
    table = guarded.frozen(torch.tensor([[9, 9, 9, 9, 1], [9, 9, 9, 9, 3]], dtype=torch.int32), (11, 1))
    pool.expect((1, 0), latent[0], rope[0])
    pool.expect((3, 0), latent[1], rope[1])
    store(latent, rope, pool.planes(), table, lengths(guarded, 4, 4), lengths(guarded, 0, 1, 2))
    pool.check()


def test_addresses_past_two_to_the_31(guarded):
    """Page times stride in 32 bits wraps to zero or to another page (vllm#47671, flashinfer#3130)."""
    layout, stride = get_layout("fp8_rope_bf16"), 2**30 + 640
    memory = torch.empty(2 * stride + 640, dtype=torch.uint8)  # untouched pages cost nothing
    values = memory.as_strided((3, 1, 640), (stride, 640, 1))
    sigma = torch.zeros(3, 1, 1)
    planes = RowPlanes(values[..., :512], values[..., 512:].view(torch.bfloat16), sigma, 512, False, False)
    latent, rope = step(1)
    values[2] = 0xAA
    store_slots(latent, rope, planes, torch.tensor([2]))
    made = layout.quantize(latent[0], rope[0])
    assert torch.equal(values[2, 0], made.values.view(torch.uint8))
    assert torch.equal(sigma[2, 0], made.scales)
    assert sigma[:2].count_nonzero() == 0


@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_to_store_is_legal(guarded, tokens):
    pool = Pool(guarded, get_layout("fp8_rope_bf16"), pages=2, page_size=2)
    latent, rope = torch.ones(tokens, 512), torch.ones(tokens, 64)
    store(latent, rope, pool.planes(), torch.empty(0, 4, dtype=torch.int32), lengths(guarded), lengths(guarded, 0))
    store_slots(latent, rope, pool.planes(), torch.full((tokens,), -1))
    store(
        latent,
        rope,
        pool.planes(),
        torch.empty(1, 0, dtype=torch.int32),
        lengths(guarded, 0),
        lengths(guarded, 0, tokens),
    )
    pool.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent": torch.zeros(2, 384)}, r"latent: expected \[\*, 512\] .* got \[2, 384\] float32"),
        ({"rope": torch.zeros(2, 32)}, r"rope: expected \[2, 64\]"),
        ({"latent": torch.zeros(2, 512, dtype=torch.float64)}, r"latent: .* got \[2, 512\] float64"),
        ({"latent": torch.zeros(512, 2).T}, r"latent: expected adjacent columns"),
        ({"lookup_table": torch.zeros(1, 4)}, r"lookup_table: .* int32 or uint32; got \[1, 4\] float32"),
        ({"lookup_table": torch.zeros(2, 4, dtype=torch.int32)}, r"lookup_table: expected \[1, \*\]"),
        ({"scales_lookup_table": torch.zeros(1, 5, dtype=torch.int32)}, r"scales_lookup_table: expected \[1, 4\]"),
        ({"query_start_loc": torch.zeros(3, dtype=torch.int32)}, r"query_start_loc: expected \[2\]"),
        ({"cache_lengths": torch.zeros(1, dtype=torch.int64)}, r"cache_lengths: .* got \[1\] int64"),
    ],
    ids=[
        "latent 384",
        "rope 32",
        "float64",
        "columns apart",
        "float table",
        "table rows",
        "scale table width",
        "starts",
        "int64",
    ],
)
def test_refuses_by_name(guarded, change, message):
    pool = Pool(guarded, get_layout("fp8_rope_bf16"), pages=1, page_size=4)
    given = {
        "latent": torch.zeros(2, 512),
        "rope": torch.zeros(2, 64),
        "lookup_table": torch.zeros(1, 4, dtype=torch.int32),
        "cache_lengths": torch.zeros(1, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2], dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        store(planes=pool.planes(), **{**given, **change})
    pool.check()


@pytest.mark.parametrize("shape", [(), (1, 1)], ids=str)
def test_vectors_are_no_matrices(guarded, shape):
    """Lengths of another rank were refused for not being `[-1]`, a latent of no dimension by an IndexError."""
    pool = Pool(guarded, get_layout("fp8_rope_bf16"), pages=1, page_size=4)
    latent, rope = step(1)
    lengths, starts = torch.zeros(shape, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cache_lengths: expected \[\*\] int32 or uint32; got"):
        store(latent, rope, pool.planes(), torch.zeros(1, 4, dtype=torch.int32), lengths, starts)
    with pytest.raises(ValueError, match=r"latent: expected \[\*, 512\] .*; got"):
        store_slots(torch.zeros(shape), rope, pool.planes(), torch.zeros(1, dtype=torch.int64))
    pool.check()


@triton.jit
def _encode_kernel(x, code, count, BLOCK: tl.constexpr, ROUNDS_E4M3: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(code + index, encode_e4m3(tl.load(x + index, mask=index < count), ROUNDS_E4M3), mask=index < count)


def encoded(x, by_instruction):
    code = torch.empty(x.shape, dtype=torch.uint8)
    interpreted(_encode_kernel)[(-(-len(x) // 65536),)](x, code, len(x), BLOCK=65536, ROUNDS_E4M3=by_instruction)
    return code


@pytest.mark.parametrize("by_instruction", [False, True])
def test_encoding_is_exact(by_instruction):
    """All codes, all ties between them and the float32 next to each tie, all bfloat16 numbers, and random float32."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    edges = torch.cat((codes, ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(500.0))))
    bf16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    x = torch.cat((edges, -edges, bf16, bits.to(torch.int32).view(torch.float32)))
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    expected = torch.where(x.isnan(), torch.full_like(expected, 0x7F), expected)
    assert torch.equal(encoded(x, by_instruction), expected)


@pytest.mark.parametrize("by_instruction", [False, True])
def test_ties_go_to_even(by_instruction):
    """The codes of 0x57 = 15 and 0x58 = 16 meet at 15.5, those of 0x58 and 0x59 = 18 at 17; both go to 0x58."""
    x = torch.tensor([15.5, 17.0, 2.0**-10, 3 * 2.0**-10, 464.0, 1e9, float("inf"), -float("inf")])
    assert encoded(x, by_instruction).tolist() == [0x58, 0x58, 0x00, 0x02, 0x7E, 0x7E, 0x7E, 0xFE]
