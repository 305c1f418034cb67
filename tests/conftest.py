"""What every test module shares: where a test may run, and fixtures for a device."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from support import connected, nothing_left

import pyverbs_lite as pvl

IN_GUEST = os.environ.get("PVL_RXE_GUEST") == "1"


def active_device() -> str | None:
    """Name the first device with an ACTIVE port that QPs can be connected on by hand, as the library chooses it."""
    try:
        with pvl.open_device() as context:
            return None if context.transport_type == pvl.TransportType.IWARP else context.name
    except pvl.DeviceNotFoundError:
        return None


def pytest_report_header() -> list[str]:
    name = active_device()
    place = "in the soft-RoCE guest" if IN_GUEST else "on the host"
    return [f"RDMA device: {name or 'none'} ({place})"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what can run here; a device test without a device is an error and never a skip."""
    if IN_GUEST:  # a guest does not boot guests: those tests are for the host
        here = [item for item in items if item.get_closest_marker("boots") is None]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(here)])
        items[:] = here


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say once, and clearly, that device tests were chosen on a machine without a device."""
    chosen = [item for item in session.items if item.get_closest_marker("rdma")]
    if chosen and not session.config.option.collectonly and active_device() is None:
        raise pytest.UsageError(
            f"{len(chosen)} of the chosen tests need an ACTIVE RDMA device, and this machine has none: run them with"
            " rxe/run --guest python -m pytest, or leave them out with -m 'not rdma'"
        )


@pytest.fixture
def context() -> Iterator[pvl.Context]:
    """Open the device under test, and close it with all that was made from it."""
    with pvl.open_device() as opened:
        yield opened


@pytest.fixture
def pd(context: pvl.Context) -> pvl.PD:
    """Make a protection domain that goes with its context."""
    return context.alloc_pd()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Check that a test of connections leaves nothing behind."""
    with connected():
        pass  # whatever is opened once and for all is open now
    with nothing_left():
        yield


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        yield near, far
