"""What a file must keep beside the numbers: dtypes, strides, what shares memory, and everything that may be absent."""

from __future__ import annotations

import contextlib
import errno
import io
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from pagedmla import KVCacheInputsPerDevice, PagedCacheValues, SplitKVHeadDims, get_layout
from pagedmla.kv_cache import saving
from pagedmla.kv_cache.layouts import CacheLayout
from pagedmla.kv_cache.page_pool import PagePool
from pagedmla.kv_cache.paged_tensor import raw_view
from pagedmla.kv_cache.saving import load_cache, save_cache


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return raw_view(tensor)


def make_values(layout: CacheLayout, **changes: object) -> KVCacheInputsPerDevice:
    pool = PagePool(layout, num_layers=2, page_size=2, num_pages=3, **changes)
    bits(pool.blocks).random_()
    pool.allocate("a")
    return pool.values(["a"], [3]).values


def assert_same(got: object, want: object) -> None:
    if not isinstance(want, torch.Tensor):
        assert got == want
        return
    assert isinstance(got, torch.Tensor)
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert torch.equal(bits(got), bits(want))


LAYOUTS = [
    get_layout("bf16"),
    get_layout("fp8_flat", granularity=100),
    get_layout("fp8_rope_bf16"),
    get_layout("fp8_rope_bf16_prescaled", latent=256),
    get_layout("fp8_ds_mla"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_field_comes_back(layout: CacheLayout, tmp_path: Path) -> None:
    values = replace(
        make_values(layout),
        attention_dispatch_metadata=torch.tensor([1, 3, 2]),
        mla_num_partitions=torch.tensor([2]),
        split_head_dims=SplitKVHeadDims(576, 512),
        mixed_step_split=torch.tensor([0, 0], dtype=torch.int32),
        max_prompt_length=3,
    )
    starts = torch.tensor([0, 3], dtype=torch.int32)
    save_cache(tmp_path / "cache.pt", values, layout, starts)
    loaded = load_cache(tmp_path / "cache.pt")
    assert loaded.layout == layout
    assert torch.equal(loaded.query_start_loc, starts)
    for field in fields(values):
        assert_same(getattr(loaded.values, field.name), getattr(values, field.name))
    loaded.values.collection(layout.pool_granularity)


def test_e8m0_scales_and_a_scale_for_the_tensor(tmp_path: Path) -> None:
    layout = get_layout("fp8_flat", granularity=64)
    values = make_values(layout, scale_dtype=torch.float8_e8m0fnu)
    save_cache(tmp_path / "e8m0.pt", values, layout)
    assert_same(load_cache(tmp_path / "e8m0.pt").values.kv_scales, values.kv_scales)

    values = make_values(get_layout("fp8_flat"), sigma=torch.tensor([0.5, 0.25]))
    save_cache(tmp_path / "tensor.pt", values, "fp8_flat")
    loaded = load_cache(tmp_path / "tensor.pt")
    assert loaded.query_start_loc is None
    assert loaded.values.kv_scales.stride()[0] == loaded.values.kv_scales.stride()[3] == 0
    assert loaded.values.kv_scales.untyped_storage().nbytes() == 8


def test_one_arena_stays_one(tmp_path: Path) -> None:
    """Values and scales of a pooled engine lie in one slab, pages padded apart; a store must still reach both views."""
    slab = torch.zeros(3, 1024, dtype=torch.uint8)
    blocks = slab[:, :640].view(torch.float8_e4m3fn).view(3, 1, 1, 1, 1, 640)
    scales = slab[:, 640:644].view(torch.float32).view(3, 1, 1, 1, 1, 1)
    values = replace(make_values(get_layout("fp8_rope_bf16")), kv_blocks=blocks, kv_scales=scales)
    save_cache(tmp_path / "slab.pt", values, "fp8_rope_bf16")
    loaded = load_cache(tmp_path / "slab.pt").values
    assert loaded.kv_blocks.stride(0) == 1024
    assert loaded.kv_scales.stride(0) == 256
    assert loaded.kv_blocks.untyped_storage().data_ptr() == loaded.kv_scales.untyped_storage().data_ptr()


def test_a_bundle_of_one_device_is_saved_as_that_device(tmp_path: Path) -> None:
    values = make_values(get_layout("bf16"))
    save_cache(tmp_path / "one.pt", PagedCacheValues.from_upstream([values], ["cpu"]), "bf16")
    assert_same(load_cache(tmp_path / "one.pt").values.kv_blocks, values.kv_blocks)
    two = PagedCacheValues.from_upstream([values, values], ["cpu", "cpu"])
    with pytest.raises(ValueError, match="2 devices"):
        save_cache(tmp_path / "two.pt", two, "bf16")


def test_a_pool_of_another_layout_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_blocks: expected"):
        save_cache(tmp_path / "cache.pt", make_values(get_layout("bf16")), "fp8_rope_bf16")
    assert not (tmp_path / "cache.pt").exists()


def test_a_disk_that_is_full_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a cache lay over the good one, and torch spoke of an "unexpected pos" in its archive instead of the disk."""
    path = tmp_path / "cache.pt"
    values = make_values(get_layout("bf16"))
    save_cache(path, values, "bf16")
    before = path.read_bytes()
    real = Path.open

    class Full(io.FileIO):
        def write(self, data: object) -> int:
            if self.tell() > 1000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    def opened(file: Path, mode: str) -> object:
        return Full(file, mode) if mode == "xb" else real(file, mode)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(OSError, match=r"No space left on device: '.*cache\.pt'"):
        save_cache(path, values, "bf16")
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["cache.pt"]


def test_files_of_others(tmp_path: Path) -> None:
    ours = "expected a cache written by pagedmla.save_cache; got"
    text, tensor, newer = tmp_path / "text.pt", tmp_path / "tensor.pt", tmp_path / "newer.pt"
    text.write_text("not a cache")
    torch.save(torch.zeros(1), tensor)
    torch.save({"format": "pagedmla cache", "version": 2}, newer)
    for path, sentence in (
        (text, f"{text}: {ours} a file that torch can't load (UnpicklingError)."),
        (tensor, f"{tensor}: {ours} another file of torch.save."),
        (newer, f"{newer}: expected version 1 of the format; got version 2. Use a newer pagedmla."),
    ):
        with pytest.raises(ValueError, match="expected") as refusal:
            load_cache(path)
        assert str(refusal.value) == sentence
    (tmp_path / "empty.pt").touch()
    with pytest.raises(ValueError, match="a file that torch can't load"):
        load_cache(tmp_path / "empty.pt")
    with pytest.raises(FileNotFoundError):
        load_cache(tmp_path / "missing.pt")


class Code:
    """Unpickling it would run a call."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("run",)


def test_a_file_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"format": "pagedmla cache", "version": 1, "layout": Code()}, tmp_path / "cache.pt")
    with pytest.raises(ValueError, match="UnpicklingError"):
        load_cache(tmp_path / "cache.pt")
    assert capsys.readouterr().out == ""


def test_names_of_rows_come_back(tmp_path: Path) -> None:
    """A picture of a saved cache had row numbers for a legend."""
    values = make_values(get_layout("bf16"))
    save_cache(tmp_path / "named.pt", values, "bf16", request_names=("ada",))
    assert load_cache(tmp_path / "named.pt").request_names == ["ada"]
    save_cache(tmp_path / "plain.pt", values, "bf16")
    assert load_cache(tmp_path / "plain.pt").request_names is None


DAMAGE = {
    "no values": lambda data: data.pop("values"),
    "no storages": lambda data: data.pop("storages"),
    "an unknown field": lambda data: data["values"].update(colour=3),
    "an unknown layout": lambda data: data["layout"].update(name="fp9"),
    "shape too large": lambda data: data["values"]["kv_blocks"].update(shape=(2**40, 1, 2, 2, 1, 576)),
    "offset too large": lambda data: data["values"]["kv_blocks"].update(offset=2**40),
    "no such storage": lambda data: data["values"]["kv_blocks"].update(storage=99),
    "a name that is none": lambda data: data.update(request_names=[["a"]]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(damage: str, tmp_path: Path) -> None:
    """They ended in tracebacks that didn't name the file, or grew a storage to whatever the file said."""
    path = tmp_path / "cache.pt"
    save_cache(path, make_values(get_layout("bf16")), "bf16")
    data = torch.load(path, weights_only=True)
    DAMAGE[damage](data)
    torch.save(data, path)
    with pytest.raises(
        ValueError, match=rf"{path}: expected a cache written by pagedmla.save_cache; got a damaged one"
    ):
        load_cache(path)


@pytest.mark.parametrize("checksums", [True, False])
def test_flipped_bytes(checksums: bool, tmp_path: Path) -> None:
    """torch reads a cache with flipped bytes as it is, and the inspector found no problems in it. A program may have
    switched off checksums for its own files."""
    path = tmp_path / "cache.pt"
    values = make_values(get_layout("fp8_rope_bf16"))
    torch.serialization.set_crc32_options(checksums)
    try:
        save_cache(path, values, "fp8_rope_bf16")
        assert torch.serialization.get_crc32_options() is checksums
    finally:
        torch.serialization.set_crc32_options(True)
    content = bytearray(path.read_bytes())
    at = content.index(bits(values.kv_blocks).flatten()[:64].numpy().tobytes())
    assert load_cache(path).values.kv_blocks.shape == values.kv_blocks.shape
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"got a damaged one \(its part '.*' isn't what was written\)"):
        load_cache(path)


def test_a_cache_saved_without_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program has switched them off torch writes 0 for each, and every such cache was a damaged one."""
    monkeypatch.setattr(saving, "_checksums", contextlib.nullcontext)
    path, values = tmp_path / "cache.pt", make_values(get_layout("bf16"))
    torch.serialization.set_crc32_options(False)
    try:
        save_cache(path, values, "bf16")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(bits(load_cache(path).values.kv_blocks), bits(values.kv_blocks))


def test_a_file_without_a_version_and_a_line_of_text(tmp_path: Path) -> None:
    """`hello` is a pickle of sorts: it failed with KeyError 101."""
    torch.save({"format": "pagedmla cache"}, tmp_path / "old.pt")
    with pytest.raises(ValueError, match="expected version 1 of the format; got version None"):
        load_cache(tmp_path / "old.pt")
    (tmp_path / "text.pt").write_text("hello\n")
    with pytest.raises(
        ValueError, match=r"text\.pt: expected a cache written by pagedmla\.save_cache; got a file that torch"
    ):
        load_cache(tmp_path / "text.pt")


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    values = make_values(get_layout("bf16"))
    with pytest.raises(FileNotFoundError):
        save_cache(tmp_path / "none" / "cache.pt", values, "bf16")
    with pytest.raises(IsADirectoryError):
        save_cache(tmp_path, values, "bf16")
    with pytest.raises(TypeError, match="split_head_dims: expected SplitKVHeadDims or None; got"):
        save_cache(tmp_path / "cache.pt", replace(values, split_head_dims=(576, 512)), "bf16")
