"""Ahead-of-time builds: every kernel variant for every target, and what each costs. Needs neither a GPU nor its driver.

contract   a variant (variants.py) names a kernel, its argument types, its compile-time constants and its options;
           `compile_variant` builds it for one target and returns a row (footprint.py), `compile_all` a list of rows
refusal    a target that can't take a variant gives a row with the reason, not an exception
files      with `out_dir`: NAME.TARGET.cubin, .ptx and .sass, or .hsaco and .amdgcn
limits     a process in which kernels were defined with TRITON_INTERPRET set can't compile them
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pagedmla.hardware import footprint
from pagedmla.hardware.targets import TARGETS, Target, find_target
from pagedmla.kv_cache.files import write_bytes, write_text
from pagedmla.triton_kernels.variants import Variant
from pagedmla.triton_kernels.variants import variants as list_variants

_TENSOR_MEMORY_COLUMNS = 512  # of an sm_100 SM; Triton itself looks only at launch


def compile_all(
    variants: Iterable[Variant] | None = None,
    targets: Iterable[str] | None = None,
    out_dir: str | Path | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Build every variant for every one of `targets` that it is meant for; None means all there are.

    `on_row` sees each row as soon as it is there (a full table takes minutes).
    """
    wanted = [find_target(name).name for name in (TARGETS if targets is None else targets)]
    expect_compiler()  # before variants are recorded: they come from the kernels that it would compile
    rows = []
    for variant in list_variants() if variants is None else variants:
        for name in wanted:
            if name in variant.targets:
                rows.append(compile_variant(variant, name, out_dir))
                if on_row:
                    on_row(rows[-1])
    return rows


def compile_variant(variant: Variant, target: str, out_dir: str | Path | None = None) -> dict[str, Any]:
    """Build one variant for one target. Returns its row; a target that can't take it gives a row with `refused`."""
    triton = expect_compiler()
    aim = find_target(target)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    about = {
        "kernel": variant.kernel,
        "executor": "triton",
        "target": aim,
        "layout": variant.layout,
        "rows": variant.rows,
        "options": {**variant.constants, **options},
        "compiler": triton.__version__,
    }
    try:
        built = _build(_source(variant), aim, options)
    except _build_errors() as error:
        return footprint.refusal_row(**about, reason=_reason(error))
    if out_dir is not None:
        _write(Path(out_dir), _file_name(variant), aim, built.asm)
    used = _footprint(built, aim)
    too_much = _exceeds(built, aim)
    if too_much:
        return footprint.refusal_row(**about, reason=too_much)
    return footprint.report_row(
        **about, footprint=used, tokens=variant.tokens_per_iteration, bytes_per_token=variant.bytes_per_token
    )


def expect_compiler() -> Any:
    """Triton. ImportError where it isn't installed, RuntimeError where it was imported for the interpreter."""
    try:
        import triton
        import triton.language  # its own helpers are kernels too: they tell how Triton was imported
    except ImportError as missing:
        raise ImportError("compile: Triton isn't installed; pip install pagedmla[triton]") from missing
    _refuse_interpreted(triton.language.sum, "Triton")
    return triton


def _refuse_interpreted(function: Any, name: str) -> None:
    from triton.runtime.jit import JITFunction

    if not isinstance(function, JITFunction):
        raise RuntimeError(
            f"compile: {name} was imported with TRITON_INTERPRET set, so its kernels exist only for the interpreter; "
            "unset it and start the process again"
        )


def _source(variant: Variant) -> Any:
    from triton.compiler import ASTSource

    module, name = variant.function.split(":")
    kernel = getattr(importlib.import_module(module), name)
    _refuse_interpreted(kernel, module)
    position = {argument: (index,) for index, argument in enumerate(kernel.arg_names)}
    return ASTSource(
        fn=kernel,
        signature=dict(variant.signature),
        constexprs={position[argument]: value for argument, value in variant.constants.items()},
        attrs={position[argument]: [["tt.divisibility", 16]] for argument in variant.divisible_by_16},
    )


def _build(source: Any, target: Target, options: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    with contextlib.redirect_stdout(io.StringIO()):  # where ptxas fails, Triton prints the whole PTX
        return triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options)


def _build_errors() -> tuple[type[Exception], ...]:
    from triton.compiler import CompilationError

    return (CompilationError, RuntimeError)  # front end; MLIR passes, LLVM and ptxas


def _reason(error: Exception) -> str:
    """The sentence that says why: an assembler's fatal line, else the last line of what the front end found wrong."""
    cause: BaseException = error
    while cause.__cause__ is not None:  # a CompilationError only draws the source line that it met the cause in
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    fatal = [line for line in lines if "fatal" in line.lower() or line.lower().startswith("error")]
    return (fatal or lines or [type(cause).__name__])[-1]


def _footprint(built: Any, target: Target) -> footprint.Footprint:
    warps, shared = built.metadata.num_warps, built.metadata.shared
    if target.backend == "cuda":
        return footprint.of_cubin(built.asm["cubin"], warps, shared)
    return footprint.of_amdgcn(built.asm["amdgcn"], warps, shared)


def _exceeds(built: Any, target: Target) -> str | None:
    shared = built.metadata.shared
    if shared > target.shared_per_block:
        return f"needs {shared} bytes of shared memory a block; {target.name} has {target.shared_per_block}"
    columns = getattr(built.metadata, "tmem_size", 0) or 0
    if columns > _TENSOR_MEMORY_COLUMNS:
        return f"needs {columns} columns of tensor memory; {target.name} has {_TENSOR_MEMORY_COLUMNS}"
    return None


def _file_name(variant: Variant) -> str:
    """Kernel, layout and rows, and a digest of what else tells variants apart."""
    rest = json.dumps(
        [dict(variant.signature), dict(variant.constants), variant.num_warps, variant.num_stages, dict(variant.options)]
    )
    digest = hashlib.sha256(rest.encode()).hexdigest()[:8]
    return "-".join(part for part in (variant.kernel, variant.layout, str(variant.rows or ""), digest) if part)


def _write(folder: Path, name: str, target: Target, assemblies: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("cubin", "ptx", "hsaco", "amdgcn"):
        content = assemblies.get(kind)
        if content is not None:
            whole = content if isinstance(content, bytes) else content.encode()
            write_bytes(folder / f"{name}.{target.name}.{kind}", whole)
    if "cubin" in assemblies:
        write_text(folder / f"{name}.{target.name}.sass", footprint.disassemble(assemblies["cubin"]))
