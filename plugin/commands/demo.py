"""`pagedmla demo`: a small cache, filled and attended, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedmla.plugin.commands.misuse import misuse

EXAMPLES = """Examples:

* `pagedmla demo`

* `pagedmla demo --layout bf16 --save cache.pt`, then `pagedmla inspect cache.pt`
"""


def demo(
    layout: Annotated[str, typer.Option(help="Of the cache: {layouts}.")] = "fp8_rope_bf16",
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the cache of the last step, for `pagedmla inspect`.")
    ] = None,
) -> None:
    """Prefill and decode over a small paged cache, checked against float64. Exit code 1 where a result is off."""
    from pagedmla.kv_cache.files import expect_file
    from pagedmla.kv_cache.layouts import LAYOUTS
    from pagedmla.plugin.demo import main as run_demo

    if layout not in LAYOUTS:
        raise typer.BadParameter(f"expected one of {', '.join(LAYOUTS)}; got {layout}", param_hint="--layout")
    if save is not None:
        with misuse(option="--save"):
            expect_file(save)
    raise typer.Exit(run_demo(layout, save))
