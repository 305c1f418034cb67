"""What servers of every kind of event loop have in common: what is made in a thread, and what they show."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

from typing_extensions import Unpack

from .. import connection
from .._connection.link import Link
from .._connection.settings import ConnectOptions, spelled
from .._memory.buffer import Memory
from .._server.base import ServerBase, ServerStats, close_quietly
from .._server.gate import Guest
from ..enums import AccessFlags
from ..errors import ClosedError
from ..mr import MR
from .connection import Connection
from .thread import in_thread

__all__ = ["Inner", "ServerFace"]

_C = TypeVar("_C", bound=Connection)


class Inner(ServerBase[_C]):
    """The part that is made in a thread, and what the gate's thread calls.

    Args:
        enter: called in the gate's thread with a connection and its peer's name; where the loop is gone, it raises
            ``RuntimeError``.
    """

    def __init__(self, enter: Callable[[connection.Connection, str], object], *args: Any) -> None:
        self._enter_soon = enter
        super().__init__(*args)

    def arrived(self, guest: Guest, link: Link) -> None:
        conn = connection.Connection(link)
        try:
            self._enter_soon(conn, guest.control.peer)
        except RuntimeError:
            close_quietly(conn, 0.0)
            self.vacate()

    def discard(self) -> None:
        """Let go of everything; nobody has come yet, or everybody has gone."""
        self._stopping = True
        self._gate.stop()
        self._shared.close()


class ServerFace(ABC, Generic[_C]):
    """The part of a server that shows what it is and does."""

    _face: ClassVar[str] = "aio"
    _in_thread: ClassVar[Callable[..., Any]] = staticmethod(in_thread)

    def __init__(
        self,
        host: str,
        port: int,
        handler: Callable[[_C], Awaitable[object]],
        *,
        max_connections: int = 500,
        max_handshakes: int = 32,
        backlog: int = 512,
        **options: Unpack[ConnectOptions],
    ) -> None:
        if not callable(handler):
            raise TypeError(f"handler must be callable with a Connection, not {handler!r}")
        self._handler = handler
        self._args = (host, port, max_connections, max_handshakes, backlog, options)
        self._inner: Inner[_C] | None = None
        self._closed = False
        self._set_up()

    @abstractmethod
    def _set_up(self) -> None:
        """Make what the loop needs."""

    def __repr__(self) -> str:
        if self._inner is None:
            return f"<{self._face}.Server for {self._args[0]} port {self._args[1]} (not started)>"
        return f"<{self._face}.{repr(self._inner).replace('Inner', 'Server', 1)[1:]}"

    def _started(self) -> Inner[_C]:
        if self._inner is None:
            raise ClosedError(f"{self!r}: use async with, or await start() first")
        return self._inner

    @property
    def host(self) -> str:
        """The address it is bound to."""
        return self._started().host

    @property
    def port(self) -> int:
        """The TCP port it is bound to."""
        return self._started().port

    @property
    def connections(self) -> tuple[_C, ...]:
        """The connections that are open now."""
        return self._started().connections

    @property
    def stats(self) -> ServerStats:
        """What has become of those who came, up to now."""
        return self._started().stats

    @property
    def closed(self) -> bool:
        """Whether ``stop`` was called."""
        return self._closed

    async def register(self, buffer: Memory, *, name: str, access: AccessFlags | None = None) -> MR:
        """Register a buffer once, and offer it to every peer, in a thread; as ``pyverbs_lite.Server.register``."""
        inner = self._started()
        region: MR = await self._in_thread(lambda: inner._register(buffer, name, access), "register", late=MR.close)
        return region


spelled(ServerFace.__init__)
