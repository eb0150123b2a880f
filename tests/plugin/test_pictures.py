"""Pictures as files: refused before the work where they can't be drawn, and whole whatever ends the drawing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedmla.plugin import pictures

figure_module = pytest.importorskip("matplotlib.figure", reason="pip install pagedmla[plots]")


@pytest.mark.parametrize("ending", ["png", "svg", "pdf", "PNG"])
def test_the_ending_sets_the_format(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"picture.{ending}"
    pictures.expect_picture(path)
    pictures.write_picture(pictures.new_figure(1, 1), path)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending.lower()]
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["picture", "picture.txt", "folder.png", "file/picture.png"])
def test_what_cant_be_drawn_is_told_before(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises((ValueError, OSError), match=r"expected|supported"):
        pictures.expect_picture(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


def test_an_interrupted_drawing_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a large map was drawn left a file that no viewer opens."""
    path = tmp_path / "picture.png"
    pictures.write_picture(pictures.new_figure(1, 1), path)
    before = path.read_bytes()

    def interrupted(figure: object, file: object, **how: object) -> None:
        file.write(b"\x89PNG")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure_module.Figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pictures.write_picture(pictures.new_figure(1, 1), path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["picture.png"]


def test_the_size_of_a_picture(tmp_path: Path) -> None:
    """`bench` draws at a resolution of its own."""
    for dpi, width in ((None, pictures.DPI), (90, 90)):
        pictures.write_picture(pictures.new_figure(1, 1), tmp_path / "picture.png", dpi)
        assert int.from_bytes((tmp_path / "picture.png").read_bytes()[16:20], "big") == width
