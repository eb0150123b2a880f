"""What options may name, for their help: taken from where it is listed, when help is asked for."""

from __future__ import annotations

from collections.abc import Sequence


def with_names(text: str) -> str:
    """`text` with its {layouts}, {kernels} and so on written out."""
    if "{" not in text:
        return text
    from pagedmla.hardware.targets import TARGETS
    from pagedmla.kv_cache.layouts import LAYOUTS
    from pagedmla.plugin.compile_report import CUTLASS_FAMILIES
    from pagedmla.plugin.executors import PRECISIONS, executors
    from pagedmla.triton_kernels import KERNELS

    return text.format(
        layouts=_one_of(tuple(LAYOUTS)),
        targets=_one_of(tuple(TARGETS)),
        kernels=_one_of(KERNELS),
        families=", ".join(CUTLASS_FAMILIES),
        precisions=_one_of(PRECISIONS),
        executors=_one_of([executor.name for executor in executors()]),
    )


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
