"""Prefill, judged by float64 softmax attention, by cases computed by hand, and by what masks and merging must leave
the same.

Grid: head widths 192/128 (DeepSeek), powers of two, one below 16, and 80, 96, 40 that split in two parts or pad;
requests of no, 1, 3 and 70 queries, the last more than one tile of rows in float32 (64) and less in bfloat16 (128);
more keys than one tile (32, 128), fewer keys than queries, and none. Tokens and keys that belong to no request are
NaN and must stay without effect.
"""

from __future__ import annotations

import math

import pytest
import torch

from pagedmla.triton_kernels.merge import merge
from pagedmla.triton_kernels.prefill import prefill, split_columns

INF = float("inf")
NAN = float("nan")


def meaning(q, k, v, sm_scale, limits):
    """Float64 attention of one request: q [Q, H, DK], k [K, HK, DK], v [K, HK, DV]; row i sees keys below limits[i]."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -INF, dtype=torch.float64)
    for i in range(q.shape[0]):
        seen = min(max(limits[i], 0), k.shape[0])
        if seen:
            for head in range(q.shape[1]):
                logit = sm_scale * (k[:seen, head // group] @ q[i, head])
                lse[i, head] = logit.logsumexp(0)
                out[i, head] = (logit - lse[i, head]).exp() @ v[:seen, head // group]
    return out, lse


def limits_of(queries, keys, causal):
    return [keys - queries + i + 1 if causal else keys for i in range(queries)]


class Batch:
    """Ragged q, k and v with poison behind the last request's rows."""

    def __init__(self, guarded, lengths, heads, columns, dtype=torch.float32, key_heads=None, spare=2, scale=1.0):
        self.guarded, self.lengths, self.dtype = guarded, lengths, dtype
        generator = torch.Generator().manual_seed(columns[0])
        starts = torch.tensor([[0, 0], *lengths]).cumsum(0)
        self.query_loc, self.key_loc = starts[:, 0].tolist(), starts[:, 1].tolist()
        rows = {"q": (self.query_loc[-1], heads), "k": (self.key_loc[-1], key_heads or heads)}
        rows["v"] = rows["k"]
        width = {"q": columns[0], "k": columns[0], "v": columns[1]}
        for name, (count, of_heads) in rows.items():
            live = torch.randn(count, of_heads, width[name], generator=generator) * scale
            dead = torch.full((spare, of_heads, width[name]), NAN)
            setattr(self, name, torch.cat((live, dead)).to(dtype))
        self.heads, self.columns = heads, columns
        self.sm_scale = columns[0] ** -0.5

    def run(self, causal=True, out_dtype=None):
        tokens = self.q.shape[0]
        out = self.guarded.empty((tokens, self.heads, self.columns[1]), out_dtype or self.dtype)
        lse = self.guarded.empty((tokens, self.heads), torch.float32)
        query_loc, key_loc = (
            self.guarded.frozen(torch.tensor(loc, dtype=torch.int32)) for loc in (self.query_loc, self.key_loc)
        )
        q, k, v = (self.guarded.frozen(x) for x in (self.q, self.k, self.v))
        prefill(q, k, v, query_loc, key_loc, out, lse, sm_scale=self.sm_scale, causal=causal)
        return out, lse

    def expected(self, causal=True):
        parts = []
        for b, (queries, keys) in enumerate(self.lengths):
            rows, columns = slice(self.query_loc[b], self.query_loc[b + 1]), slice(self.key_loc[b], self.key_loc[b + 1])
            limits = limits_of(queries, keys, causal)
            parts.append(meaning(self.q[rows], self.k[columns], self.v[columns], self.sm_scale, limits))
        spare = self.q.shape[0] - self.query_loc[-1]
        parts.append((torch.zeros(spare, self.heads, self.columns[1]), torch.full((spare, self.heads), -INF)))
        return tuple(torch.cat(part) for part in zip(*parts))

    def check(self, causal=True, out_dtype=None):
        out, lse = self.run(causal, out_dtype)
        expected, expected_lse = self.expected(causal)
        # The exact products of 16-bit inputs are summed in float32; p and the output are rounded to the inputs' dtype.
        error = (out.double() - expected).norm(dim=-1)
        bound = expected.norm(dim=-1) * {2: 4e-3, 4: 3e-6}[out.element_size() if out_dtype is None else 2]
        assert error.le(bound).all(), (error - bound).max()
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_agrees_with_float64(guarded, dtype, causal):
    Batch(guarded, [(3, 3), (0, 4), (70, 133), (1, 40), (2, 0)], 2, (192, 128), dtype).check(causal)


@pytest.mark.parametrize("columns", [(64, 64), (128, 128), (256, 256), (80, 96), (8, 40), (192, 96)], ids=str)
def test_head_widths(guarded, columns):
    Batch(guarded, [(5, 37)], 1, columns).check()


@pytest.mark.parametrize("heads", [(6, 3), (3, 1)], ids=str)
def test_query_heads_share_key_heads(guarded, heads):
    Batch(guarded, [(3, 5)], heads[0], (16, 16), key_heads=heads[1]).check()


def test_output_may_be_wider_than_the_inputs(guarded):
    """Pieces that go through merge are kept in float32: their error is that of p in bfloat16 alone."""
    Batch(guarded, [(4, 9)], 2, (32, 16), torch.bfloat16).check(out_dtype=torch.float32)


def test_fewer_keys_than_queries(guarded):
    """Queries before the first key see nothing: out 0, lse -inf (vllm#45227: q 2 over kv 1 gave NaN)."""
    batch = Batch(guarded, [(2, 1), (4, 2)], 2, (16, 16))
    batch.check()
    out, lse = batch.run()
    assert torch.equal(lse == -INF, torch.tensor([1, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)[:, None].expand(8, 2))
    assert torch.equal(out[lse == -INF], torch.zeros_like(out[lse == -INF]))


def test_by_hand(guarded):
    """Two keys with logits ln 2 and ln 8: weights 0.2 and 0.8, values 0 and 10, so out 8 and lse ln 10."""
    q = torch.zeros(1, 1, 16)
    q[0, 0, 0] = 1.0
    k, v = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
    k[:, 0, 0] = torch.tensor([2.0, 8.0]).log() / 0.5
    v[1] = 10.0
    out, lse = guarded.empty((1, 1, 16), torch.float32), guarded.empty((1, 1), torch.float32)
    loc = torch.tensor([0, 1], dtype=torch.int32)
    prefill(q, k, v, loc, 2 * loc, out, lse, sm_scale=0.5)
    torch.testing.assert_close(out, torch.full_like(out, 8.0))
    assert lse.item() == pytest.approx(math.log(10.0), abs=1e-6)


def test_equal_logits_average_the_values(guarded):
    """A query of zeros weighs all keys it sees alike, so row i is the mean of the first i + 1 values and lse is ln(i +
    1).
    """
    batch = Batch(guarded, [(40, 40)], 1, (16, 16), spare=0)
    batch.q.zero_()
    out, lse = batch.run()
    count = torch.arange(1, 41, dtype=torch.float64)
    torch.testing.assert_close(
        out[:, 0].double(), batch.v[:, 0].double().cumsum(0) / count[:, None], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(lse[:, 0].double(), count.log(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 30.0])
def test_keeps_relative_error_at_any_size(guarded, scale):
    """q.k of 1e-12 gives nearly equal weights, q.k of thousands gives one-hot weights; neither may overflow or lose
    out.
    """
    Batch(guarded, [(4, 35)], 1, (64, 32), scale=scale).check()


def test_future_keys_have_no_effect(guarded):
    """Causal: whatever stands behind a query's position, its row keeps every bit."""
    batch = Batch(guarded, [(40, 40)], 1, (16, 16))
    before, before_lse = batch.run()
    batch.k[25:40], batch.v[25:40] = 50.0, -1e30
    after, after_lse = batch.run()
    assert torch.equal(after[:25], before[:25])
    assert torch.equal(after_lse[:25], before_lse[:25])
    assert not torch.equal(after[25:40], before[25:40])


def test_a_request_does_not_see_its_neighbours(guarded):
    """The same request alone and in company gives the same bits."""
    batch = Batch(guarded, [(3, 7), (5, 33), (2, 2)], 2, (32, 16))
    out, lse = batch.run()
    alone = Batch(guarded, [(5, 33)], 2, (32, 16), spare=0)
    alone.q, alone.k, alone.v = batch.q[3:8], batch.k[7:40], batch.v[7:40]
    alone_out, alone_lse = alone.run()
    assert torch.equal(out[3:8], alone_out)
    assert torch.equal(lse[3:8], alone_lse)


def test_context_chunks_merge_to_the_whole(guarded):
    """A prompt of 6 tokens over a context of 37: its own keys causally, the context in chunks of 16 unmasked, then
    merge.
    """
    whole = Batch(guarded, [(6, 43)], 2, (48, 32), spare=0)
    expected, expected_lse = whole.run()
    outs, lses = [], []
    for first, last, causal in ((37, 43, True), (0, 16, False), (16, 32, False), (32, 37, False)):
        piece = Batch(guarded, [(6, last - first)], 2, (48, 32), spare=0)
        piece.q, piece.k, piece.v = whole.q, whole.k[first:last], whole.v[first:last]
        out, lse = piece.run(causal)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    merge(torch.stack(outs), torch.stack(lses), out, lse)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-5)


def test_strides_are_read(guarded):
    """q and k are slices of wider projections, v lies head by head, out is padded."""
    batch = Batch(guarded, [(3, 5)], 2, (16, 16), spare=0)
    expected, _ = batch.run()
    q = guarded.frozen(batch.q, (2 * 16 + 9, 16, 1))
    k = guarded.frozen(torch.cat((batch.k, torch.full_like(batch.k, NAN)), -1))[..., :16]
    v = guarded.frozen(batch.v, (16, 5 * 16, 1))
    out = guarded.empty((3, 2, 16), torch.float32, (100, 24, 1))
    loc = torch.tensor([0, 1], dtype=torch.int32)
    prefill(q, k, v, 3 * loc, 5 * loc, out, sm_scale=batch.sm_scale)
    assert torch.equal(out, expected)


def test_addresses_past_two_to_the_31(guarded):
    stride = 2**30 + 16
    memory = torch.empty(2 * stride + 16, dtype=torch.float16)  # untouched pages cost nothing
    k = memory.as_strided((3, 1, 16), (stride, 16, 1))
    k.copy_(torch.zeros(3, 1, 16))
    v = torch.arange(3.0).reshape(3, 1, 1).expand(3, 1, 16).contiguous().half()
    out = guarded.empty((1, 1, 16), torch.float32)
    loc = torch.tensor([0, 1], dtype=torch.int32)
    prefill(torch.ones(1, 1, 16).half(), k, v, loc, 3 * loc, out, sm_scale=1.0)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-3, atol=0)


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 3), (0, 0)]], ids=str)
def test_only_padding(guarded, lengths):
    """An idle rank brings no requests, or requests without tokens, and rows that belong to nobody (sglang#39899)."""
    batch = Batch(guarded, lengths or [(0, 0)], 2, (16, 16), spare=3)
    if not lengths:
        batch.query_loc, batch.key_loc = [0], [0]
    out, lse = batch.run()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -INF))


@pytest.mark.parametrize("plane", ["k", "v"])
def test_where_nan_goes(guarded, plane):
    """The last key of request 0 is NaN; its last query alone sees it. In a key, a NaN score that is masked leaves no
    trace. In a value, 0 * NaN is NaN, and the tile's other rows lose that column of their outputs, not their lse. The
    other request, and columns that hold numbers, don't change by a bit."""
    batch = Batch(guarded, [(3, 5), (2, 4)], 1, (16, 16))
    want, want_lse = batch.run()
    getattr(batch, plane)[4, 0, 7] = NAN
    out, lse = batch.run()
    assert torch.equal(out[3:], want[3:])
    assert torch.equal(lse[3:], want_lse[3:])
    assert torch.equal(lse[:2], want_lse[:2])
    if plane == "k":
        assert torch.equal(out[:2], want[:2])
        assert bool(out[2].isnan().all())
        assert bool(lse[2].isnan().all())
    else:
        assert bool(out[:3, :, 7].isnan().all())
        others = [column for column in range(16) if column != 7]
        assert torch.equal(out[:3][..., others], want[:3][..., others])
        assert torch.equal(lse, want_lse)


def test_columns_split_without_waste():
    assert [split_columns(n) for n in (1, 16, 24, 40, 64, 80, 96, 128, 192, 256)] == [
        (16, 0), (16, 0), (32, 0), (32, 16), (64, 0), (64, 16), (64, 32), (128, 0), (128, 64), (256, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(4, 2, 24)}, r"k: expected \[\*, \*, 32\] float32; got \[4, 2, 24\]"),
        ({"v": torch.zeros(5, 2, 16)}, r"v: expected \[4, 2, \*\] float32"),
        ({"k": torch.zeros(4, 2, 32).half()}, r"k: .* float32; got \[4, 2, 32\] float16"),
        ({"k": torch.zeros(4, 4, 32), "v": torch.zeros(4, 4, 16)}, r"k: expected a number of heads that divides q's 2"),
        ({"out": torch.zeros(3, 2, 32)}, r"out: expected \[3, 2, 16\]"),
        ({"lse": torch.zeros(3, 2).bfloat16()}, r"lse: expected \[3, 2\] float32; got \[3, 2\] bfloat16"),
        ({"key_start_loc": torch.zeros(3, dtype=torch.int32)}, r"key_start_loc: expected \[2\]"),
        (
            {"query_start_loc": torch.tensor(0, dtype=torch.int32)},
            r"query_start_loc: expected \[\*\] .*; got \[\] int32",
        ),
        (
            {"query_start_loc": torch.zeros(0, dtype=torch.int32)},
            r"query_start_loc: expected \[B \+ 1\], .*; got \[0\] int32",
        ),
        ({"q": torch.zeros(3, 32, 2).mT}, r"q: expected adjacent columns"),
    ],
    ids=[
        "k columns",
        "v keys",
        "mixed dtypes",
        "heads",
        "out columns",
        "lse in bf16",
        "starts",
        "no vector",
        "no starts",
        "columns apart",
    ],
)
def test_refuses_by_name(change, message):
    given = {
        "q": torch.zeros(3, 2, 32),
        "k": torch.zeros(4, 2, 32),
        "v": torch.zeros(4, 2, 16),
        "query_start_loc": torch.tensor([0, 3], dtype=torch.int32),
        "key_start_loc": torch.tensor([0, 4], dtype=torch.int32),
        "out": torch.zeros(3, 2, 16),
        "lse": torch.zeros(3, 2),
    }
    with pytest.raises(ValueError, match=message):
        prefill(**{**given, **change}, sm_scale=1.0)


def test_refuses_wide_heads():
    loc = torch.tensor([0, 1], dtype=torch.int32)
    q, out = torch.zeros(1, 1, 320), torch.zeros(1, 1, 16)
    with pytest.raises(ValueError, match=r"q: expected 1 to 256 columns; got \[1, 1, 320\]"):
        prefill(q, q, torch.zeros(1, 1, 16), loc, loc, out, sm_scale=1.0)
