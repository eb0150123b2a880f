"""`python -m cases.gpu_ready`: what `make gpu` needs of a machine, said before anything runs.

Exit code 1 where something is missing, a line for each thing; what only leaves a part out is a line too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec

PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "triton": "triton",
    "typer": "typer",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "pytest": "pytest",
    "xdist": "pytest-xdist",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
HOPPER = (9, 0)


def missing(installed: Callable[[str], object] = find_spec) -> list[str]:
    """A sentence for each thing without which nothing can be run."""
    absent = [package for module, package in PACKAGES.items() if installed(module) is None]
    found = []
    if absent:
        found.append(f"{' '.join(absent)}: not installed for {sys.executable}; pip install, or make gpu GPU_PYTHON=...")
    if "torch" not in absent:
        import torch

        if not torch.cuda.is_available():
            build = "a build of torch without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
            found.append(f"no GPU: {build} ({torch.__version__})")
    return found


def left_out(installed: Callable[[str], object] = find_spec) -> list[str]:
    """Of a machine that isn't missing anything: why a part won't be run."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != HOPPER:
        name = torch.cuda.get_device_name()
        return [f"CUTLASS kernels are for compute capability 9.0 (Hopper); {name} has {major}.{minor}: skipped"]
    from pagedmla.cutlass_kernels.cubin_cache import CubinCache, dsl_version
    from pagedmla.cutlass_kernels.variants import VARIANTS

    if installed("cuda") is None or installed("cuda.bindings") is None:
        return ["cuda-python isn't installed: tests of the CUTLASS kernels will fail"]
    built = sum(CubinCache().find(variant.name) is not None for variant in VARIANTS)
    if dsl_version() is None and built < len(VARIANTS):
        command = "pagedmla compile --executor cutlass --out build/cubins"
        return [f"{built} of {len(VARIANTS)} CUTLASS kernels are built and the DSL isn't installed: run `{command}` "
                "where it is and bring the folder; tests of the others will fail"]  # fmt: skip
    return []


def main() -> int:
    needed = missing()
    for sentence in needed or left_out():
        print(f"make gpu: {sentence}", file=sys.stderr)
    return 1 if needed else 0


if __name__ == "__main__":
    sys.exit(main())
