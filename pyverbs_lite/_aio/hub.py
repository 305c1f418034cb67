"""The hub of a server, turned by an event loop."""

from __future__ import annotations

import asyncio
import weakref

from .._connection.hub import Hub
from ..errors import VerbsError
from .watch import Watch

__all__ = ["HubReader"]


class HubReader:
    """Has an event loop watch the one descriptor of a hub, and look where that says so.

    Args:
        hub: whose ``reader`` this becomes, where the watches of its engines find it.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._fd = hub.fileno()
        self.watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()
        hub.watches = self.watches
        self._loop.add_reader(self._fd, self._turn)

    def _turn(self) -> None:
        try:
            rung = self._hub.turn()
        except VerbsError as error:
            self.close()
            self._hub.fail(error)
            return
        for key, what in rung:
            if (watch := self.watches.get(key)) is not None:
                watch.rung(what)

    def close(self) -> None:
        """Leave the loop alone; safe to call again."""
        fd, self._fd = self._fd, -1
        if fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(fd)
