"""Connections made in an event loop of any kind: the handshake runs in a thread, and may be put an end to."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, TypeAlias, TypeVar

from typing_extensions import Self

from .. import cm, connection, listener
from .._base.args import Deadline
from .._cm.establish import establish_accepting
from .._connection.dial import Dial
from .._connection.establish import establish
from ..errors import ClosedError, WaitTimeout
from .connection import Connection

__all__ = ["ListenerBase", "dial", "listen_by"]

Making: TypeAlias = Callable[[], connection.Connection]


class ListenerBase(ABC):
    """A listener, but for how one sleeps until somebody connects."""

    _face: ClassVar[str] = "aio"

    def __init__(self, inner: listener.Listener | cm.Listener) -> None:
        self._inner = inner
        self._fd = os.dup(inner.fileno())
        self.host, self.port = inner.host, inner.port

    def __repr__(self) -> str:
        return f"<{self._face}.{repr(self._inner)[1:]}"

    @abstractmethod
    async def _knock(self, deadline: Deadline) -> None:
        """Sleep until somebody may have connected, the listener is closed, or the deadline has passed."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening; connections that were accepted go on. Safe to call again; tasks that wait are told."""

    async def _next(self, deadline: Deadline) -> tuple[Making, Callable[[], object] | None]:
        """Wait for somebody to connect."""
        while not self.closed:
            await self._knock(deadline)
            if self.closed:
                break
            try:
                return self._take(deadline)
            except WaitTimeout:  # it is gone again, or another process has it
                if deadline.expired:
                    raise WaitTimeout(f"nobody connected within {deadline.seconds} s", "accept") from None
        raise ClosedError(f"{self!r} cannot accept")

    def _take(self, deadline: Deadline) -> tuple[Making, Callable[[], object] | None]:
        """Take who has connected; return what makes the connection, and what puts an end to that."""
        inner = self._inner
        settings, limit = inner._settings, deadline.sooner(inner._settings.timeout)
        if isinstance(inner, cm.Listener):
            request = inner._next(Deadline(0))
            return lambda: connection.Connection(establish_accepting(request, settings, limit)), limit.end
        control = inner._next(Deadline(0))
        making = functools.partial(establish, control, settings, limit, accepting=True, alone=False)
        return lambda: connection.Connection(making()), control.close

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._fd < 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


_C = TypeVar("_C", bound=Connection)
_L = TypeVar("_L", bound=ListenerBase)


async def dial(cls: type[_C], judge: Callable[[], Dial]) -> _C:
    """Connect; ``judge`` says how, or raises for bad arguments."""
    return await cls._dial(judge(), "connect")


async def listen_by(cls: type[_L], made: type[Connection], making: Callable[[], listener.Listener | cm.Listener]) -> _L:
    """Make a listener, in a thread as connections of the class ``made`` do."""
    inner = await made._in_thread(making, "listen", late=lambda late: late.close())
    try:
        return cls(inner)
    except BaseException:
        inner.close()
        raise
