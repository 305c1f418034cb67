"""The asyncio face: ``connect`` and ``listen`` as in the package itself, with ``await`` in front of every wait.

::

    async with pvl.aio.connect("server", 18515) as conn:
        await conn.send(b"hello")
        async for message in conn:
            ...

It sleeps on the descriptors of the completion channel and of the control connection. The handshake, registering memory
and closing run in threads of their own. Any event loop that has ``add_reader`` will do, uvloop's too.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque

from typing_extensions import Unpack

from . import cm, connection, listener
from ._aio.connection import Batch, Connection
from ._aio.listener import ListenerBase, dial, listen_by
from ._aio.prepared import Prepared
from ._aio.server import Server
from ._aio.thread import Opening
from ._aio.watch import sleep_until, wake
from ._base.args import Deadline
from ._connection.settings import ConnectOptions, spelled

__all__ = ["Batch", "Connection", "Listener", "Prepared", "Server", "cm_connect", "cm_listen", "connect", "listen"]


class Listener(ListenerBase):
    """Turns those who connect into connections; made by ``aio.listen`` or ``aio.cm_listen``.

    Attributes:
        host, port: the address it is bound to.
    """

    def __init__(self, inner: listener.Listener | cm.Listener) -> None:
        super().__init__(inner)
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def accept(self, timeout: float | None = None) -> Connection:
        """Wait for a peer and return the connection to it, in RTS; as ``pyverbs_lite.Listener.accept``.

        Tasks may wait here together, so that a peer whose handshake is slow holds up nobody else.
        """
        making, abort = await self._next(Deadline(timeout))
        return await Connection._make(making, "accept", abort)

    async def _knock(self, deadline: Deadline) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(future)
        if len(self._waiting) == 1:
            self._loop.add_reader(self._fd, self._readable)
        try:
            await sleep_until(future, deadline)
        finally:
            self._waiting.remove(future)
            if not self._waiting and not self.closed and not self._loop.is_closed():
                self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        wake(self._waiting[0])

    async def close(self) -> None:
        """Stop listening; connections that were accepted go on. Safe to call again; tasks that wait are told."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(fd)
            os.close(fd)
        for future in tuple(self._waiting):
            wake(future)
        self._inner.close()


@spelled
def connect(host: str, port: int, **options: Unpack[ConnectOptions]) -> Opening[Connection]:
    """Connect to a listener: ``await`` it, or ``async with`` it; arguments and errors as ``pyverbs_lite.connect``.

    If it is cancelled, what there is of the connection is closed in the background.
    """
    return Opening(dial(Connection, lambda: connection.dial(host, port, options)))


@spelled
def listen(host: str, port: int, *, backlog: int = 128, **options: Unpack[ConnectOptions]) -> Opening[Listener]:
    """Listen on a TCP address: ``await`` it, or ``async with`` it; arguments and errors as ``pyverbs_lite.listen``."""
    return Opening(listen_by(Listener, Connection, lambda: listener.listen(host, port, backlog=backlog, **options)))


@spelled
def cm_connect(host: str, port: int, **options: Unpack[ConnectOptions]) -> Opening[Connection]:
    """Connect through librdmacm: arguments and errors as ``pyverbs_lite.cm.connect``, otherwise as ``connect``."""
    return Opening(dial(Connection, lambda: cm.dial(host, port, options)))


@spelled
def cm_listen(host: str, port: int, *, backlog: int = 128, **options: Unpack[ConnectOptions]) -> Opening[Listener]:
    """Listen through librdmacm: arguments and errors as ``pyverbs_lite.cm.listen``, otherwise as ``listen``."""
    return Opening(listen_by(Listener, Connection, lambda: cm.listen(host, port, backlog=backlog, **options)))
