"""Cubins on disk: the right one is found, a damaged one is never loaded, and one process builds for all.

Grid: with and without the DSL, its version the entry's or another, sources the present ones or others, one folder or
two, and four processes that want the same entry at once.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import replace
from hashlib import sha256

import pytest

from pagedmla.cutlass_kernels import cubin_cache
from pagedmla.cutlass_kernels.cubin_cache import Cubin, CubinCache, CubinError, kernel_modules

VARIANT = "mla_decode_stand_in"


def cubin(image=b"\x7fELF image", *, source="s" * 64, dsl="4.8.1", variant=VARIANT):
    return Cubin(
        variant=variant,
        entry=f"{variant}_0",
        threads=384,
        shared_bytes=200_000,
        cluster=2,
        rows=128,
        may_start_early=False,
        source=source,
        dsl=dsl,
        sha256=sha256(image).hexdigest(),
        image=image,
    )


@pytest.fixture(autouse=True)
def sources_and_no_dsl(monkeypatch):
    monkeypatch.setattr(cubin_cache, "source_digest", lambda: "s" * 64)
    monkeypatch.setattr(cubin_cache, "dsl_version", lambda: None)


def use_dsl(monkeypatch, version):
    monkeypatch.setattr(cubin_cache, "dsl_version", lambda: version)


def test_an_entry_comes_back_as_it_was_kept(tmp_path):
    CubinCache([tmp_path]).keep(cubin())
    found = CubinCache([tmp_path]).find(VARIANT)
    assert found == cubin()
    assert found.image == cubin().image


def test_other_sources_and_other_variants_are_not_taken(tmp_path):
    cache = CubinCache([tmp_path])
    cache.keep(cubin(source="t" * 64))
    cache.keep(cubin(variant=VARIANT + "_wide"))
    assert cache.find(VARIANT) is None


def test_with_the_dsl_only_its_own_version_is_taken(tmp_path, monkeypatch):
    cache = CubinCache([tmp_path])
    cache.keep(cubin(dsl="4.8.1"))
    use_dsl(monkeypatch, "4.9.0")
    assert cache.find(VARIANT) is None
    use_dsl(monkeypatch, "4.8.1")
    assert cache.find(VARIANT) == cubin(dsl="4.8.1")


def test_without_the_dsl_the_newest_version_is_taken(tmp_path):
    cache = CubinCache([tmp_path])
    for version in ("4.10.0", "4.9.2", "4.8.1"):
        cache.keep(cubin(version.encode(), dsl=version))
    assert cache.find(VARIANT).dsl == "4.10.0"


def test_a_damaged_image_is_never_loaded(tmp_path):
    path = CubinCache([tmp_path]).keep(cubin())
    path.write_bytes(cubin().image + b"!")
    with pytest.raises(CubinError, match=r"expected sha256 .*; got .*\. Remove it and build again"):
        CubinCache([tmp_path]).find(VARIANT)


def test_a_record_without_its_image_says_so(tmp_path):
    CubinCache([tmp_path]).keep(cubin()).unlink()
    with pytest.raises(CubinError, match="No such file"):
        CubinCache([tmp_path]).find(VARIANT)


@pytest.mark.parametrize("record", [b"{", b"[]", b'{"variant": "x"}'])
def test_a_damaged_record_says_so(tmp_path, record):
    path = CubinCache([tmp_path]).keep(cubin()).with_suffix(".json")
    path.write_bytes(record)
    with pytest.raises(CubinError, match="not a cubin's record"):
        CubinCache([tmp_path]).find(VARIANT)


@pytest.mark.parametrize("record", [b"{", b'{"variant": "x", "of": "another release"}'])
def test_a_record_that_can_not_be_read_hides_nothing(tmp_path, record):
    """The user's folder is shared among releases: one record of another form stopped every kernel of that name."""
    cache = CubinCache([tmp_path])
    cache.keep(cubin())
    (tmp_path / f"{VARIANT}.0.json").write_bytes(record)
    assert cache.find(VARIANT) == cubin()
    only = CubinCache([tmp_path / "other"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{VARIANT}.0.json").write_bytes(record)
    assert only.get(VARIANT, cubin) == cubin()


def test_an_image_that_is_not_what_it_says_is_not_kept(tmp_path):
    with pytest.raises(CubinError, match="isn't what its sha256 says"):
        CubinCache([tmp_path]).keep(replace(cubin(), image=b"another"))
    assert not list(tmp_path.glob("*.json"))


def test_a_missing_entry_says_what_to_do(tmp_path):
    with pytest.raises(CubinError) as caught:
        CubinCache([tmp_path]).get(VARIANT)
    said = str(caught.value)
    assert VARIANT in said
    assert str(tmp_path) in said
    assert "pip install pagedmla[cutlass]" in said
    assert "pagedmla compile --executor cutlass --out" in said
    assert "PAGEDMLA_CUBINS" in said


def test_what_is_there_is_not_built_again(tmp_path):
    cache = CubinCache([tmp_path])
    assert cache.get(VARIANT, cubin) == cubin()
    assert cache.get(VARIANT, lambda: pytest.fail("built again")) == cubin()


def test_folders_are_searched_in_order_and_the_first_is_written_to(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    CubinCache([second]).keep(cubin())
    cache = CubinCache([first, second])
    assert cache.find(VARIANT) == cubin()
    assert cache.keep(cubin()).parent == first


def test_the_folders_may_be_set(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDMLA_CUBINS", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert CubinCache().folders == [tmp_path / "a", tmp_path / "b"]
    assert CubinCache().keep(cubin()).parent == tmp_path / "a"


def test_by_default_a_clones_travelling_folder_comes_first_and_the_users_cache_is_written_to(tmp_path, monkeypatch):
    monkeypatch.delenv("PAGEDMLA_CUBINS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cubin_cache, "_ROOT", tmp_path)
    user = tmp_path / "cache" / "pagedmla" / "cubins"
    assert CubinCache().folders == [user]
    (tmp_path / "build" / "cubins").mkdir(parents=True)
    assert CubinCache().folders == [tmp_path / "build" / "cubins", user]
    assert CubinCache().keep(cubin()).parent == user


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(cubin_cache.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        CubinCache([tmp_path]).keep(cubin())
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_of_several_processes_one_builds(tmp_path):
    """Each would note its build in a file; a slow build gives the others time to come."""
    notes = tmp_path / "notes"

    def build():
        with notes.open("a") as file:
            file.write("built\n")
        time.sleep(0.5)
        return cubin()

    def want():
        assert CubinCache([tmp_path]).get(VARIANT, build) == cubin()

    context = multiprocessing.get_context("fork")
    children = [context.Process(target=want) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=60)
    assert [child.exitcode for child in children] == [0] * 4
    assert notes.read_text() == "built\n"


# -- the address -----------------------------------------------------------------------------------------------------


def test_the_address_depends_on_variant_sources_and_dsl():
    addresses = {
        entry.address
        for entry in (cubin(), cubin(variant="other"), cubin(source="t" * 64), cubin(dsl="4.9.0"), cubin(b"image"))
    }
    assert len(addresses) == 4  # the last has another image, and so the first one's address
    record = json.loads(json.dumps([VARIANT, "s" * 64, "4.8.1"]))
    assert cubin().address == sha256(json.dumps(record).encode()).hexdigest()


def test_the_kernels_sources_are_those_that_they_import():
    modules = {name.removeprefix("pagedmla.cutlass_kernels.") for name in kernel_modules()}
    assert {"variants", "arguments", "protocol", "tiles", "schedule", "fragments", "decode_sm90", "producer"} <= modules
    assert not modules & {
        "launch",
        "driver",
        "cubin_cache",
        "build",
        "compile",
        "tensor_maps",
        "interleavings",
        "model",
    }


def test_a_changed_source_changes_the_digest_and_a_line_ending_does_not(tmp_path, monkeypatch):
    package = tmp_path / "cutlass_kernels"
    package.mkdir()
    for root in ("arguments", "combine"):
        (package / f"{root}.py").write_text("")
    (package / "decode_sm90.py").write_text("def compile():\n    from pagedmla.cutlass_kernels import kernel\n")
    kernel = package / "kernel.py"
    monkeypatch.undo()
    monkeypatch.setattr(cubin_cache, "_ROOT", tmp_path)

    def digest(text):
        kernel.write_bytes(text)
        return cubin_cache.source_digest.__wrapped__()

    assert digest(b"x = 1\n") == digest(b"x = 1\r\n")
    assert digest(b"x = 1\n") != digest(b"x = 2\n")
