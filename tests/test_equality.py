"""Dataclasses that hold tensors are equal to themselves alone: comparing fields would ask a tensor whether it is true.

Found from the source, so a new one is caught before anybody compares it; the broken snippets prove that it can be.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import pagedmla

ROOT = Path(__file__).parent.parent
TENSORS = {"Tensor", "ndarray", "NDArray", "Floats"}
SAYS_ANY = {"pagedmla.kv_cache.values.KVCacheInputsPerDevice", "pagedmla.triton_kernels.recording.Recorded"}


class Found(NamedTuple):
    name: str
    is_record: bool  # a dataclass or a named tuple
    compares: bool  # as a dataclass does, field by field
    mentions: set[str]  # in its annotations and bases; ours by module and name


def classes_of(source: str, module: str) -> Iterable[Found]:
    tree = ast.parse(source)
    named = {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pagedmla"):
            named |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            made = [ast.unparse(each) for each in node.decorator_list]
            made = [each for each in made if each.startswith("dataclass")]
            annotations = [ast.unparse(each.annotation) for each in node.body if isinstance(each, ast.AnnAssign)]
            held = [re.sub(r"Callable\[.*|ClassVar\[.*", "", each) for each in annotations]
            bases = [ast.unparse(each) for each in node.bases]
            words = re.findall(r"\w+", " ".join(held + bases))
            compares = bool(made) and "eq=False" not in made[0]
            mentions = {named.get(word, word) for word in words}
            yield Found(named[node.name], bool(made) or "NamedTuple" in bases, compares, mentions)


def comparing(sources: Mapping[str, str]) -> list[str]:
    """Dataclasses of modules by name that would compare tensors, also those of a record among their fields."""
    classes = [found for module, source in sources.items() for found in classes_of(source, module)]
    holders = TENSORS | SAYS_ANY
    while True:
        more = {each.name for each in classes if each.is_record and each.mentions & holders}
        if more <= holders:
            return sorted(each.name for each in classes if each.compares and each.name in holders)
        holders |= more


def test_no_dataclass_compares_tensors() -> None:
    """`values == other` ended in "Boolean value of Tensor with more than one value is ambiguous"."""
    sources = {}
    for top in (path.parent for path in ROOT.glob("*/__init__.py")):
        for path in sorted(top.rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(parts if parts[0] == "pagedmla" else ("pagedmla", *parts))
            sources[module] = path.read_text(encoding="utf-8")
    assert SAYS_ANY <= {found.name for module, source in sources.items() for found in classes_of(source, module)}
    assert comparing(sources) == []


HOLDER = "@dataclass(frozen=True)\nclass Pool:\n    tensor: Tensor | None\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (HOLDER, ["Pool"]),
        (HOLDER.replace("frozen=True", "frozen=True, eq=False"), []),
        (HOLDER.replace("(frozen=True)", ""), ["Pool"]),
        (f"{HOLDER}@dataclass\nclass Cache:\n    pools: list[Pool]\n", ["Cache", "Pool"]),
        (f"{HOLDER}@dataclass\nclass Wide(Pool):\n    width: int\n", ["Pool", "Wide"]),
        ("class Rows(NamedTuple):\n    values: Tensor\n@dataclass\nclass Look:\n    rows: Rows\n", ["Look"]),
        ("@dataclass\nclass Peer:\n    offer: Callable[[Tensor], int]\n", []),
        ("@dataclass\nclass Sizes:\n    pages: int\n", []),
    ],
)
def test_one_that_does_is_found(source: str, found: list[str]) -> None:
    assert comparing({"m": source}) == [f"m.{name}" for name in found]


def test_values_are_equal_to_themselves() -> None:
    pool = pagedmla.PagePool("fp8_rope_bf16", num_layers=1, page_size=4, num_pages=4)
    pool.allocate("ada")
    values = pool.values(["ada"], [9]).values
    same = replace(values)
    assert values == values
    assert values != same
    assert same not in [values]
    assert len({values, same}) == 2
    bundle = pagedmla.PagedCacheValues.from_upstream([values], ["cpu"])
    assert bundle == bundle
    assert bundle != replace(bundle)
    bounds = {"page_size": 4, "max_batch": 1, "max_tokens": 9, "max_cache_length": 9}
    plan = pagedmla.plan(layout=pool.layout, num_heads=16, dtype=torch.float32, device="cpu", sm_scale=1.0, **bounds)
    assert plan == plan
    assert plan != replace(plan)
