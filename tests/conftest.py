"""How every test runs: one thread a worker, and the same hypothesis examples on every machine.

`pytest --hypothesis-profile=default` draws new examples instead.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Workers share the cores; torch's own threads on top of them would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# No deadline and no complaint about slow examples: on a loaded machine both fail tests that are right.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No parameter is a set: it prints in another order in each process, so two workers collect tests of other names,
    and xdist stops, one time in two."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        for name, value in callspec.params.items() if callspec else ():
            if isinstance(value, set | frozenset):
                raise pytest.UsageError(f"{item.nodeid}: parameter {name} is a {type(value).__name__}; pass a tuple")
