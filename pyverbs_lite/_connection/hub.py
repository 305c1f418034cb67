"""One completion channel for many connections: who reads it, and tells theirs (``ffi/src/hub.c``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from typing import Any

from .._base.check import check_ptr, os_error
from .._base.resource import Resource
from ..comp_channel import CompChannel
from ..errors import VerbsError
from ..ffi import CData, ffi, lib

__all__ = ["Hub"]


class Hub(Resource):
    """Reads the events of a channel, which engines share, and those of their control connections.

    Either in a thread, which ``start`` starts, and which sleeps until there is something; or in an event loop, which
    watches ``fileno()`` and calls ``turn``.

    Args:
        channel: of which no CQ has been made yet: they are closed before this is, and with them their engines.
        failed: called with the error that it failed of: nobody is told of anything any more.

    Attributes:
        watches: of an event loop's: engine key -> who looks after the engine there.
        reader: what has the loop watch it, if that is one of anyio's.
    """

    def __init__(self, channel: CompChannel, failed: Callable[[VerbsError], None]) -> None:
        self.c: CData = check_ptr("epoll_create1", lib.pvl_hub_new(channel._handle))
        self.fail = failed
        self.watches: MutableMapping[int, Any] = {}
        self.reader: Any = None
        self._thread: threading.Thread | None = None
        self._own(self.c, _stop_and_free, channel, label="Hub")

    def start(self) -> None:
        """Turn in a thread from now on."""
        thread = threading.Thread(target=self._run, args=(self._handle,), name="pyverbs_lite hub", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self, hub: CData) -> None:
        if rc := lib.pvl_hub_run(hub):
            self.fail(os_error("ibv_get_cq_event", -rc))

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``turn`` has something to do."""
        return int(self._handle.epoll_fd)

    def turn(self) -> list[tuple[int, int]]:
        """Return which engines there is something for, by their ``key``, and ``PVL_WOKE_*``; without waiting."""
        if rc := lib.pvl_hub_turn(self._handle, 0):
            raise os_error("ibv_get_cq_event", -rc)
        found, what = [], ffi.new("int *")
        while key := lib.pvl_hub_next(self._handle, what):
            found.append((int(key), int(what[0])))
        return found

    def _before_destroy(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            lib.pvl_hub_stop(self._handle)
            thread.join()


def _stop_and_free(hub: CData) -> None:
    lib.pvl_hub_free(hub)
