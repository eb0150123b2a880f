"""Whether a case fits memory, from its numbers alone: a system that runs out ends the process and says nothing.

On a CPU all contenders are held at once, and dense attention's rows are most of it: about 15 KB a key measured, in
every layout. A GPU says when it is full, so there only what the host holds is estimated.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pagedmla.bench.cases import PAGE_SIZE, UNIFORM, Case
from pagedmla.kv_cache.checks import ceildiv

_A_KEY = 16_000  # bytes
_A_LOGIT = 24  # of a head, query token and key
_A_QUERY = 576 * 32  # of a head and query token
_HOST_OBJECTS = 512  # of a request, and of a page: its ids in tables
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (  # limit and use of a container, versions 2 and 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def refusal(case: Case, device: torch.device) -> str | None:
    """Why the case isn't even built here; None: it should fit."""
    needed, free = needed_bytes(case, device), free_bytes()
    if needed <= free:
        return None
    return f"needs about {needed / 1e9:,.1f} GB of memory; {free / 1e9:,.1f} GB are free"


def needed_bytes(case: Case, device: torch.device) -> int:
    """About what the host must hold at once. It draws no lengths: there may be more requests than memory holds."""
    pages = case.batch * ceildiv(case.kv_len, PAGE_SIZE)
    host = _HOST_OBJECTS * (case.batch + pages)
    if device.type == "cuda":
        return host
    padded = 1 if case.lengths == UNIFORM or case.batch == 1 else 2  # dense rows are as long as the longest request
    keys = padded * case.batch * case.kv_len
    rows = case.heads * case.q_len
    return host + keys * (_A_KEY + _A_LOGIT * rows) + case.batch * rows * _A_QUERY


def free_bytes() -> int:
    """What this process may still take: of the machine, and of its container."""
    free = _available()
    for limit, used in _CGROUPS:
        try:
            room = int(limit.read_text()) - int(used.read_text())
        except (OSError, ValueError):  # no such limit, or "max"
            continue
        free = min(free, room + _files_in_memory(limit.parent))
    return max(free, 0)


def _available() -> int:
    """MemAvailable of Linux; elsewhere all that the machine has."""
    try:
        return 1024 * _field(_MEMINFO, "MemAvailable:")
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _files_in_memory(cgroup: Path) -> int:
    """What counts as used and is given back on demand."""
    try:
        return _field(cgroup / "memory.stat", "inactive_file")
    except (OSError, KeyError):
        return 0


def _field(path: Path, name: str) -> int:
    """The number after `name` in a file of such lines. KeyError where there is none."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise KeyError(name)


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch's CPU allocator raises a plain RuntimeError."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    texts = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
