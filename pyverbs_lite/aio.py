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
import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from typing_extensions import Self, Unpack

from . import cm, connection, listener
from ._aio_connection import Batch, Connection
from ._aio_thread import Opening, in_thread
from ._aio_watch import sleep_until, wake
from ._args import Deadline
from ._cm_establish import establish_accepting
from ._control import Control
from ._establish import establish
from ._settings import ConnectOptions, Settings, spelled
from ._tcp import connect_tcp
from .errors import ClosedError, WaitTimeout

__all__ = ["Batch", "Connection", "Listener", "cm_connect", "cm_listen", "connect", "listen"]

_Making = Callable[[], connection.Connection]


class Listener:
    """Turns those who connect into connections; made by ``aio.listen`` or ``aio.cm_listen``.

    Attributes:
        host, port: the address it is bound to.
    """

    def __init__(self, inner: listener.Listener | cm.Listener) -> None:
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._fd = os.dup(inner.fileno())
        self.host, self.port = inner.host, inner.port

    def __repr__(self) -> str:
        return f"<aio.{repr(self._inner)[1:]}"

    async def accept(self, timeout: float | None = None) -> Connection:
        """Wait for a peer and return the connection to it, in RTS; as ``pyverbs_lite.Listener.accept``.

        Tasks may wait here together, so that a peer whose handshake is slow holds up nobody else.
        """
        deadline = Deadline(timeout)
        making, abort = await self._next(deadline)
        return await _make(making, "accept", abort)

    async def _next(self, deadline: Deadline) -> tuple[_Making, Callable[[], object] | None]:
        """Wait for somebody to connect."""
        while not self.closed:
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
            if self.closed:
                break
            try:
                return self._take(deadline)
            except WaitTimeout:  # it is gone again, or another process has it
                if deadline.expired:
                    raise WaitTimeout(f"nobody connected within {deadline.seconds} s", "accept") from None
        raise ClosedError(f"{self!r} cannot accept")

    def _readable(self) -> None:
        wake(self._waiting[0])

    def _take(self, deadline: Deadline) -> tuple[_Making, Callable[[], object] | None]:
        """Take who has connected; return what makes the connection, and what puts an end to that."""
        inner = self._inner
        settings, limit = inner._settings, deadline.sooner(inner._settings.timeout)
        if isinstance(inner, cm.Listener):
            request = inner._next(Deadline(0))
            return lambda: connection.Connection(establish_accepting(request, settings, limit)), None
        control = Control(inner._next(Deadline(0)))
        making = functools.partial(establish, control, settings, limit, accepting=True)
        return lambda: connection.Connection(making()), control.close

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._fd < 0

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Dialling:
    """A TCP handshake on its way, which may be put an end to from outside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: Control | None = None
        self._aborted = False

    def dial(self, host: str, port: int, settings: Settings, deadline: Deadline) -> connection.Connection:
        control = Control(connect_tcp(host, port, deadline))
        with self._lock:
            self._control = control
            aborted = self._aborted
        if aborted:
            control.close()
        return connection.Connection(establish(control, settings, deadline, accepting=False))

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
        if self._control is not None:
            self._control.close()


async def _make(making: _Making, name: str, abort: Callable[[], object] | None = None) -> Connection:
    """Make a connection in a thread; one that nobody waits for any more is closed."""
    conn = await in_thread(making, name, abort=abort, late=connection.Connection.close)
    try:
        return Connection(conn)
    except BaseException:
        await in_thread(conn.close, "close")
        raise


@spelled
def connect(host: str, port: int, **options: Unpack[ConnectOptions]) -> Opening[Connection]:
    """Connect to a listener: ``await`` it, or ``async with`` it; arguments and errors as ``pyverbs_lite.connect``.

    If it is cancelled, what there is of the connection is closed in the background.
    """

    async def dial() -> Connection:
        settings, dialling = Settings.of(options), _Dialling()
        making = functools.partial(dialling.dial, host, port, settings, Deadline(settings.timeout))
        return await _make(making, "connect", dialling.abort)

    return Opening(dial())


@spelled
def listen(host: str, port: int, *, backlog: int = 128, **options: Unpack[ConnectOptions]) -> Opening[Listener]:
    """Listen on a TCP address: ``await`` it, or ``async with`` it; arguments and errors as ``pyverbs_lite.listen``."""
    return Opening(_listen(lambda: listener.listen(host, port, backlog=backlog, **options)))


async def _listen(making: Callable[[], listener.Listener | cm.Listener]) -> Listener:
    inner = await in_thread(making, "listen", late=lambda late: late.close())
    try:
        return Listener(inner)
    except BaseException:
        inner.close()
        raise


@spelled
def cm_connect(host: str, port: int, **options: Unpack[ConnectOptions]) -> Opening[Connection]:
    """Connect through librdmacm: arguments and errors as ``pyverbs_lite.cm.connect``, otherwise as ``connect``."""
    return Opening(_make(lambda: cm.connect(host, port, **options), "connect"))


@spelled
def cm_listen(host: str, port: int, *, backlog: int = 128, **options: Unpack[ConnectOptions]) -> Opening[Listener]:
    """Listen through librdmacm: arguments and errors as ``pyverbs_lite.cm.listen``, otherwise as ``listen``."""
    return Opening(_listen(lambda: cm.listen(host, port, backlog=backlog, **options)))
