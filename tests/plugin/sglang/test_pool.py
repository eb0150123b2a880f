"""Our pool in SGLang's hands: what other code of the engine writes, reads, moves and copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedmla.kv_cache.layouts import get_layout

LAYOUT = get_layout("fp8_rope_bf16")
SLOTS = [16, 17, 40, 63]


@pytest.fixture
def filled(engine: Any) -> Any:
    """A pool with the same four tokens in both layers, written by the engine's calls; and the tokens."""
    pool = engine("fp8_rope_bf16", 16, pages=4).pool
    generator = torch.Generator().manual_seed(3)
    latent, rope = (torch.randn(4, 1, width, generator=generator) for width in (512, 64))
    latent[1] *= 1000  # far beyond 448: a scale for each token
    for layer in (0, 1):
        pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer), torch.tensor(SLOTS), latent, rope)
    return SimpleNamespace(pool=pool, latent=latent, rope=rope)


def slot_of(pool: Any, layer: int, slot: int) -> torch.Tensor:
    """The bytes of a slot that mean something: row and scale."""
    return pool.kv_buffer[layer][slot, 0, :644]


def test_slots_hold_what_the_layout_says(filled: Any) -> None:
    made = LAYOUT.quantize(filled.latent[:, 0], filled.rope[:, 0])
    assert made.scales is not None
    for layer in (0, 1):
        found = torch.stack([slot_of(filled.pool, layer, slot) for slot in SLOTS])
        assert torch.equal(found[:, :640], made.values.view(torch.uint8))
        assert torch.equal(filled.pool.scale_buffer[layer][SLOTS], made.scales)
    assert bool((filled.pool.kv_buffer[0][18] == 0xFF).all())


def test_whole_rows_are_written_the_same_way(filled: Any) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    rows = torch.cat((filled.latent, filled.rope), -1)
    where = torch.tensor([20, 21, 22, 23])
    filled.pool.set_kv_buffer(SimpleNamespace(layer_id=0), KVWriteLoc(where), rows, rows[..., :512])
    for one, other in zip(SLOTS, where.tolist()):
        assert torch.equal(slot_of(filled.pool, 0, one), slot_of(filled.pool, 0, other))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_rows_are_read_with_their_scales(filled: Any, dtype: torch.dtype | None) -> None:
    """Chunked prefixes are read so; without scales they were off by a factor."""
    latent, rope = filled.pool.get_mla_kv_buffer(SimpleNamespace(layer_id=1), torch.tensor(SLOTS), dtype)
    assert (latent.shape, rope.shape) == ((4, 1, 512), (4, 1, 64))
    assert latent.dtype == rope.dtype == (dtype or torch.bfloat16)
    torch.testing.assert_close(latent.float(), filled.latent, rtol=2**-4 + 2**-8, atol=1e-2 * 1000)
    torch.testing.assert_close(latent[2:].float(), filled.latent[2:], rtol=2**-4 + 2**-8, atol=1e-2)
    torch.testing.assert_close(rope.float(), filled.rope, rtol=2**-7, atol=0)


def test_accepted_drafts_move_with_their_scales(filled: Any) -> None:
    wanted = [slot_of(filled.pool, layer, 17).clone() for layer in (0, 1)]
    filled.pool.move_kv_cache(torch.tensor([30]), torch.tensor([17]))
    assert all(torch.equal(slot_of(filled.pool, layer, 30), wanted[layer]) for layer in (0, 1))


def test_retracted_requests_come_back_with_their_scales(filled: Any) -> None:
    wanted = [[slot_of(filled.pool, layer, slot).clone() for slot in SLOTS] for layer in (0, 1)]
    copied = filled.pool.get_cpu_copy(torch.tensor(SLOTS))
    for buffer in filled.pool.kv_buffer:
        buffer.fill_(0xFF)
    elsewhere = torch.tensor([50, 18, 33, 16])
    filled.pool.load_cpu_copy(copied, elsewhere)
    for layer in (0, 1):
        for slot, expected in zip(elsewhere.tolist(), wanted[layer]):
            assert torch.equal(slot_of(filled.pool, layer, slot), expected)


def test_transfer_sees_rows_and_scales(filled: Any) -> None:
    """Pages as another instance is sent them: from byte page * item_len, all slots of the page with their scales."""
    pool = filled.pool
    addresses, lengths, items = pool.get_contiguous_buf_infos()
    assert addresses == [buffer.data_ptr() for buffer in pool.kv_buffer]
    assert lengths == [64 * 656] * 2
    assert items == [16 * 656] * 2
    page = pool.kv_buffer[0].flatten()[16 * 656 : 2 * 16 * 656]  # page 1: slots 16 .. 31
    assert torch.equal(page[656 + 640 : 656 + 644].view(torch.float32), pool.scale_buffer[0][17])


def test_the_host_cache_takes_our_slots(filled: Any) -> None:
    """It refuses pools whose scales lie in a tensor of their own."""
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    (info,) = filled.pool.get_device_pool_infos()
    info.buffer_info.validate()
    assert info.buffer_info.scales is None
    host = MLATokenToKVPoolHost(
        info.buffer_info, 2.0, 0, 16, "layer_first", pin_memory=False, override_kv_cache_dim=filled.pool.kv_cache_dim,
        device_capacity_tokens=filled.pool.size, start_layer=0, end_layer=1, target_layer_num=2,
    )  # fmt: skip
    assert host.get_size_per_token() == 2 * 656
    assert host.kv_buffer.shape[-1] == 656


def test_the_page_of_padding_has_scales(published: Any) -> None:
    """Padding of verify graphs sees slots of page 0 that are never written: PAGEDMLA_CHECK=1 found scales of 0."""
    from pagedmla.plugin.sglang.pool import PagedMLATokenToKVPool

    pool = PagedMLATokenToKVPool(64, 16, torch.float8_e4m3fn, 512, 64, 1, "cpu", False)
    assert pool.scale_buffer[0].flatten().tolist() == [1.0] * 16 + [0.0] * 64


def test_the_engine_counts_its_memory(filled: Any) -> None:
    assert filled.pool.get_kv_size_bytes() == 2 * 64 * 656
    assert filled.pool.get_kv_buffer_shape()[0] == (64, 1, 656)


@pytest.mark.parametrize("read", ["get_key_buffer", "get_value_buffer", "get_kv_buffer"])
def test_backends_that_do_not_know_our_rows_are_stopped(filled: Any, read: str) -> None:
    with pytest.raises(ValueError, match="expected a reader that knows its rows of 656 bytes"):
        getattr(filled.pool, read)(0)


@pytest.mark.parametrize(
    ("dtype", "sparse", "sentence"),
    [
        (torch.bfloat16, False, "expected dtype float8_e4m3fn; got torch.bfloat16"),
        (torch.float8_e4m3fn, True, "expected dense MLA; got a model with sparse attention"),
    ],
)
def test_pools_that_are_not_made(published: Any, dtype: torch.dtype, sparse: bool, sentence: str) -> None:
    from pagedmla.plugin.sglang.pool import PagedMLATokenToKVPool

    with pytest.raises(ValueError, match=sentence):
        PagedMLATokenToKVPool(64, 16, dtype, 512, 64, 1, "cpu", False, use_dsa=sparse)


def test_layers_wait_for_the_host_cache(engine: Any) -> None:
    """A layer that is still on its way back from the host must not be read."""
    from pagedmla.plugin.sglang.backend import PagedMLAAttnBackend

    made = engine("fp8_rope_bf16")
    waited: list[int] = []
    made.pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    made.run(PagedMLAAttnBackend(made.runner), "EXTEND", [(made.request(), 3)])
    assert waited == [0, 1]
