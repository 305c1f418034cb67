"""The face of ``pyverbs_lite.aio`` for anyio: the same words on trio as on asyncio. Needs the extra ``anyio``.

::

    from pyverbs_lite import anyio as pvl_anyio

    async with pvl_anyio.connect("server", 18515) as conn:
        with anyio.move_on_after(1):
            await conn.send(b"hello")

What is cancelled, by a scope or by a timeout, has the rules of ``pyverbs_lite.aio``. Nothing runs in the background,
and no task group is needed: those who wait watch the descriptors by turns. The end of an ``async with`` block closes
the connection also where the block was cancelled.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import ClassVar

import anyio
from typing_extensions import Unpack

from . import cm, connection, listener
from ._aio.connection import Batch
from ._aio.listener import ListenerBase, dial, listen_by
from ._aio.prepared import Prepared
from ._aio.thread import Opening
from ._anyio.connection import Connection
from ._anyio.server import Server
from ._base.args import Deadline
from ._connection.settings import ConnectOptions, spelled

__all__ = ["Batch", "Connection", "Listener", "Prepared", "Server", "cm_connect", "cm_listen", "connect", "listen"]


class Listener(ListenerBase):
    """Turns those who connect into connections; made by ``anyio.listen`` or ``anyio.cm_listen``.

    Attributes:
        host, port: the address it is bound to.
    """

    _face: ClassVar[str] = "anyio"

    def __init__(self, inner: listener.Listener | cm.Listener) -> None:
        super().__init__(inner)
        self._door = anyio.Lock()
        self._watched = -1

    async def accept(self, timeout: float | None = None) -> Connection:
        """Wait for a peer and return the connection to it, in RTS; as ``pyverbs_lite.Listener.accept``.

        Tasks may wait here together, so that a peer whose handshake is slow holds up nobody else.
        """
        making, abort = await self._next(Deadline(timeout))
        return await Connection._make(making, "accept", abort)

    async def _knock(self, deadline: Deadline) -> None:
        with anyio.move_on_after(deadline.left):
            async with self._door:
                if self.closed:
                    return
                fd = self._watched = self._fd
                try:
                    with suppress(anyio.ClosedResourceError):
                        await anyio.wait_readable(fd)
                finally:
                    self._watched = -1
                    if self.closed:
                        os.close(fd)

    async def close(self) -> None:
        """Stop listening; connections that were accepted go on. Safe to call again; tasks that wait are told."""
        fd, self._fd = self._fd, -1
        if fd >= 0 and self._watched < 0:
            os.close(fd)
        elif fd >= 0:  # who watches it closes it: loops mix up a descriptor and the next of its number
            anyio.notify_closing(fd)
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
