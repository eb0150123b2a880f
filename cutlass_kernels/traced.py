"""Plain Python objects inside traced control flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Traced:
    """An object that no branch or loop changes: the DSL carries none of its values through them.

    The DSL turns `if` and `for` into operations whose operands are the values they may change, and asks each object
    whose method is called there for its own. What these objects hold is fixed before the branch, so they have none.
    """

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: Sequence[Any]) -> Traced:
        return self
