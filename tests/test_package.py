"""What is shipped: the folders in the wheel and nothing else, one version, an import that loads nothing heavy.

The distributions are built once, from a copy of the tree (setuptools would take stale modules out of build/), as
`python -m build` does it: the source distribution first, the wheel from that.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
(VERSION,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "pagedmla/__init__.py").read_text(encoding="utf-8"), re.M)
HEAVY = ["triton", "cutlass", "cuda", "vllm", "sglang", "max", "matplotlib", "rich", "typer"]


def package_folders() -> dict[str, str]:
    """Import name -> folder, of every folder that holds __init__.py: kv_cache/ is pagedmla.kv_cache."""
    tops = [path.parent for path in ROOT.glob("*/__init__.py")]
    folders = [path.parent.relative_to(ROOT) for top in tops for path in top.rglob("__init__.py")]
    names = {folder: ".".join(folder.parts) for folder in folders}
    return {name if name == "pagedmla" else f"pagedmla.{name}": folder.as_posix() for folder, name in names.items()}


def python(code: str, cwd: Path, **environment: str) -> str:
    """What `code` prints in an interpreter of its own, or its error."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the source distribution and the wheel, built where importing torch is an error."""
    folder = tmp_path_factory.mktemp("distributions")
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "tree", ignore=skipped)
    (folder / "poison").mkdir()
    (folder / "poison/torch.py").write_text('raise ImportError("building a wheel must not import torch")\n')
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "tree"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "poison")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "dist/log").write_text(done.stdout + done.stderr)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    return distributions / f"pagedmla-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def metadata(contents: dict[str, bytes]) -> Message:
    return Parser().parsestr(contents[f"pagedmla-{VERSION}.dist-info/METADATA"].decode())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed into, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target


def test_pyproject_names_every_folder_once() -> None:
    tool = PROJECT["tool"]["setuptools"]
    folders = package_folders()
    assert sorted(tool["packages"]) == sorted(folders)
    # A nested folder follows its parent's mapping.
    assert tool["package-dir"] == {name: folder for name, folder in folders.items() if "/" not in folder}


@pytest.mark.parametrize("folder", ["adapters", "hardware", "kv_cache", "reference", "triton_kernels"])
def test_a_package_tells_of_its_modules(folder: str) -> None:
    """Twenty files by their names alone are no map: each stands in its package's docstring."""
    told = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    inside = [path for path in (ROOT / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert {path.stem for path in inside} - {"__init__"} <= set(re.findall(r"`(\w+)`", told))


def test_nothing_else_is_a_package() -> None:
    """An __init__.py in the root or in tests/ would make pytest and mypy take a folder's name for the package."""
    assert not (ROOT / "__init__.py").exists()
    assert [*(ROOT / "tests").rglob("__init__.py")] == []


def test_wheel_holds_the_package_and_nothing_else(contents: dict[str, bytes]) -> None:
    expected = {
        f"{name.replace('.', '/')}/{path.name}"
        for name, folder in package_folders().items()
        for path in (ROOT / folder).glob("*.py")
    }
    expected.add("pagedmla/py.typed")
    results = ROOT / "bench" / "results"
    read = [*results.glob("compile-*.json"), *results.glob("proven.json")]  # by bench/model.py and plugin/proven.py
    expected |= {f"pagedmla/bench/results/{path.name}" for path in read}
    record = f"pagedmla-{VERSION}.dist-info"
    expected |= {f"{record}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")}
    expected.add(f"{record}/licenses/LICENSE")
    assert sorted(contents) == sorted(expected)
    assert contents[f"{record}/top_level.txt"].split() == [b"pagedmla"]


def test_source_distribution_is_what_a_wheel_is_built_from(distributions: Path) -> None:
    """It held six files of tests/, without those that they need; the build warned of a package that is none."""
    with tarfile.open(distributions / f"pagedmla-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in names if name.split("/")[0] == "tests"]
    assert {"README.md", "LICENSE", "pyproject.toml", "bench/results/compile-triton.json"} <= names
    assert "absent from the `packages` configuration" not in (distributions / "log").read_text()


def test_wheel_carries_the_licence(contents: dict[str, bytes], metadata: Message) -> None:
    assert contents[f"pagedmla-{VERSION}.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]


def test_wheel_metadata(contents: dict[str, bytes], metadata: Message) -> None:
    assert metadata["Name"] == "pagedmla"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    extras = ["cutlass", "dev", "max", "plots", "sglang", "test", "triton", "vllm"]
    assert sorted(metadata.get_all("Provides-Extra", [])) == extras
    always = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(always) == ["numpy", "rich", "torch>=2.11", "typer"]
    entry_points = contents[f"pagedmla-{VERSION}.dist-info/entry_points.txt"].decode()
    assert entry_points.split("\n") == [
        "[console_scripts]",
        "pagedmla = pagedmla.__main__:main",
        "",
        "[sglang.srt.plugins]",
        "pagedmla = pagedmla.plugin.sglang.entry_points:register",
        "",
        "[vllm.general_plugins]",
        "pagedmla = pagedmla.plugin.vllm.entry_points:register",
        "",
        "[vllm.platform_plugins]",
        "pagedmla_cpu = pagedmla.plugin.vllm.entry_points:cpu_platform",
        "",
    ]


def test_cutlass_extra_has_no_upper_pin(metadata: Message) -> None:
    """Engines pin the DSL themselves (vLLM 0.33 at 4.8.0): an upper bound would make both uninstallable together."""
    lines = [line for line in metadata.get_all("Requires-Dist", []) if line.endswith('extra == "cutlass"')]
    assert sorted(lines) == [
        'cuda-python; extra == "cutlass"',
        'nvidia-cutlass-dsl[cu13]>=4.8.0; extra == "cutlass"',
    ]


def test_version_is_in_one_place(distributions: Path, metadata: Message) -> None:
    assert "version" not in PROJECT["project"]
    assert metadata["Version"] == VERSION
    assert (distributions / f"pagedmla-{VERSION}.tar.gz").is_file()


def test_installed_wheel_is_whole(installed: Path, tmp_path: Path) -> None:
    """Away from the checkout every package comes from the wheel, and the clone's extra path entry is not made."""
    code = (
        "import importlib, pagedmla\n"
        "print(pagedmla.__version__, len(pagedmla.__path__))\n"
        f"for name in {sorted(package_folders())}:\n"
        "    print(importlib.import_module(name).__file__)\n"
    )
    first, *files = python(code, tmp_path, PYTHONPATH=str(installed)).splitlines()
    assert first == f"{VERSION} 1"
    expected = sorted(package_folders())
    assert files == [str(installed / name.replace(".", "/") / "__init__.py") for name in expected]


@pytest.mark.parametrize(
    "statement",
    [
        "import pagedmla",
        "from pagedmla import *",  # public names may be lazy: this fetches them all
        *(f"import {name}" for name in sorted(package_folders()) if name != "pagedmla"),
    ],
)
def test_importing_loads_nothing_heavy(statement: str) -> None:
    """What torch itself brings along is not ours to answer for."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        f"print(sorted({{name.split('.')[0] for name in sys.modules.keys() - before}} & set({HEAVY})))\n"
    )
    assert python(code, ROOT) == "[]"


def test_the_face_waits_for_torch() -> None:
    """`pagedmla --help` took seconds, and so did an engine's search for plugins. All names are there all the same."""
    code = (
        "import sys, pagedmla, pagedmla.__main__, pagedmla.plugin.cli\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))\n"
        "assert not hasattr(pagedmla, '__wrapped__') and 'torch' not in sys.modules  # as inspect looks for\n"
        "assert not hasattr(pagedmla, 'nonsense')\n"
        "assert set(pagedmla.__all__) <= set(dir(pagedmla))\n"
        "assert all(getattr(pagedmla, name) is pagedmla.__dict__[name] for name in pagedmla.__all__)\n"
        "assert pagedmla.kv_cache.__name__ == 'pagedmla.kv_cache'  # as `import pagedmla` always brought it\n"
    )
    assert python(code, ROOT) == "[]"


def test_the_face_shows_names_of_its_own_alone() -> None:
    """`dir(pagedmla)` held Path, import_module and TYPE_CHECKING, and Ctrl-C waited for pathlib."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import pagedmla.__main__\n"
        "assert not {'pathlib', 'typing'} & (set(sys.modules) - before)\n"
        "print([name for name in vars(pagedmla) if not name.startswith('_')])"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_type_checkers_know_the_public_names() -> None:
    """`pagedmla.__all__` didn't exist for mypy and pyright, since `import *` leaves it out."""
    tree = ast.parse((ROOT / "pagedmla/__init__.py").read_text(encoding="utf-8"))
    imported = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert ("__all__", "__all__") in [(alias.name, alias.asname) for alias in imported]  # re-exported


def test_the_command_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagedmla", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"pagedmla {VERSION}\n")
