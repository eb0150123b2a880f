"""What `inspect` finds: a tree of frozen dataclasses that hold plain Python only, so that it goes to JSON and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

ERROR = "error"
WARNING = "warning"

# Where scales live, in `PoolSummary.scales`.
NO_SCALES = "none"
PER_TENSOR = "per tensor"
INLINE = "inline"
PAGED = "paged"

FindingKind = Literal[
    "query_start_loc",
    "bound",
    "negative_length",
    "table_width",
    "id_out_of_range",
    "repeated_page",
    "shared_out_of_place",
    "scale_page_shared",
    "value_page_torn",
    "zero_scale",
    "negative_scale",
    "non_finite_scale",
    "floor_scale",
    "nan_values",
    "scale_size",
    "scales_left_behind",
]
"""What a finding is about, in a word for programs; docs/operators.md says what each means."""


@dataclass(frozen=True)
class Finding:
    """Something wrong, or (severity "warning") something to look at. What it isn't about is None.

    `kind` is for programs; `sentence` names row, column, page ids and bound, for people.
    """

    kind: FindingKind
    severity: str
    sentence: str
    row: int | None = None
    column: int | None = None
    value_page: int | None = None
    scale_page: int | None = None
    layer: int | None = None


@dataclass(frozen=True)
class PageInUse:
    """One table entry whose page holds tokens.

    fill          slots that hold tokens
    scale_page    None where scales have no pages
    shared_with   other rows that use the same value page
    value_digest  of the value bytes of the live slots in all inspected layers; None where an id is outside its pool
    scale_digest  the same of their scales; None too where one scale serves all pages, or none does
    """

    row: int
    column: int
    fill: int
    value_page: int
    scale_page: int | None
    shared_with: tuple[int, ...]
    value_digest: str | None
    scale_digest: str | None


@dataclass(frozen=True)
class RequestPages:
    """The pages of one row of the table. `kv_len` is what was asked for; pages past the table's width are missing."""

    row: int
    name: str
    kv_len: int
    pages: tuple[PageInUse, ...]


@dataclass(frozen=True)
class LayerHealth:
    """Numbers of one layer over all live slots, each page once; None where there is nothing to count.

    amax             largest finite |value|, dequantised
    saturated        share of e4m3 values with |code| = 448; a scale measured from its group puts at least one there
    sigma_min, _max  over finite positive scales
    nan_slots        slots whose row holds a NaN
    """

    layer: int
    live_slots: int
    amax: float | None
    saturated: float | None
    sigma_min: float | None
    sigma_max: float | None
    zero_scales: int
    negative_scales: int
    non_finite_scales: int
    nan_slots: int


@dataclass(frozen=True)
class PoolSummary:
    """The pools. Dead pages are those that no live table entry names, as ranges (first, last)."""

    layout: str
    scales: str
    page_size: int
    num_layers: int
    num_value_pages: int
    num_scale_pages: int | None
    dead_value_pages: tuple[tuple[int, int], ...]
    dead_scale_pages: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True)
class CacheReport:
    """Who owns which page, how healthy the scales are, and what is wrong. Made by `inspect`."""

    pool: PoolSummary
    requests: tuple[RequestPages, ...]
    layers: tuple[LayerHealth, ...]
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == WARNING)

    @property
    def ok(self) -> bool:
        """No problems; warnings don't count."""
        return not self.problems

    def pages(self) -> Iterator[PageInUse]:
        """Every live table entry, row by row."""
        for request in self.requests:
            yield from request.pages

    def to_dict(self) -> dict[str, Any]:
        """For `json.dumps`; `ok` stands first."""
        return {"ok": self.ok, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CacheReport:
        """Undo `to_dict`, lists instead of tuples included. Raises KeyError or TypeError for anything else."""
        report: CacheReport = _typed(cls, {name: value for name, value in data.items() if name != "ok"}, "report")
        return report


@cache
def _fields_of(kind: type) -> tuple[dict[str, Any], frozenset[str]]:
    """(type of each field, names of those without a default): once a class, for a report has a record a page."""
    types = get_type_hints(kind)
    return types, frozenset(each.name for each in fields(kind) if each.default is MISSING)


def _typed(kind: Any, value: Any, where: str) -> Any:
    """`value`, plain as JSON has it, as what a field's type asks for. TypeError or KeyError names the place."""
    if isinstance(kind, type) and is_dataclass(kind):
        types, needed = _fields_of(kind)
        if not isinstance(value, Mapping) or value.keys() - types.keys():
            raise TypeError(f"{where}: expected the fields of {kind}")
        given = [name for name in types if name in value or name in needed]
        return kind(**{name: _typed(types[name], value[name], f"{where}.{name}") for name in given})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:  # something or None
        return None if value is None else _typed(arguments[0], value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        parts = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        return tuple(_typed(part, each, where) for part, each in zip(parts, value, strict=True))
    if value in arguments if origin is Literal else isinstance(value, (int, float) if kind is float else kind):
        return value
    raise TypeError(f"{where}: expected {kind}; got {value!r}")
