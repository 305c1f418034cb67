"""Programs for the tests, and the table that the run makes: PVL_WRITE_DOCS=1 writes docs/interop.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from . import page
from .processes import Program, kernel_objects, wait_until

#: Row -> whether its test passed. One whose test did not run is not here.
OUTCOMES: dict[str, bool] = {}


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Start programs; those still running in the end are ended, and none may leave anything in the kernel."""
    before = kernel_objects()
    programs: list[Program] = []

    def run(*argv: Any, held: int | None = None) -> Program:
        return Program(*argv, group=programs, held=held)

    yield run
    for program in programs:
        program.kill()
    # A connection's identifier lives a moment longer than its process.
    wait_until(lambda: kernel_objects() == before, f"the kernel to hold no more than {before}", timeout=10)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    for name in ("row", "hole"):
        if (case := getattr(item, "callspec", None)) and name in case.params:
            key = str(case.params[name])
            OUTCOMES[key] = OUTCOMES.get(key, True) and bool(report.passed)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("PVL_WRITE_DOCS") == "1":
        page.write(OUTCOMES)
