"""A server whose handlers are tasks of any event loop that anyio knows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import ClassVar

import anyio
from anyio.abc import TaskGroup
from typing_extensions import Self

from .. import connection
from .._aio.server_face import Inner, ServerFace
from .._base.args import Deadline
from .._server.base import CLOSERS, NOTICE, close_quietly
from ..errors import ClosedError
from .connection import Connection
from .hub import HubReader
from .watch import in_thread

__all__ = ["Server"]

#: Whose handler the task runs, or a task that it has started.
_handling: ContextVar[Server | None] = ContextVar("_handling", default=None)


class Server(ServerFace[Connection]):
    """Listens on a TCP address, and runs ``await handler(conn)`` for each peer, in a task of its own.

    As ``pyverbs_lite.aio.Server``, on trio too. It accepts during its ``async with`` block, whose task group has the
    handlers; if the block is cancelled, so are they. ::

        async with pvl.anyio.Server("0.0.0.0", 18515, handler) as server:
            await server.serve_forever()
    """

    _face: ClassVar[str] = "anyio"
    _in_thread = staticmethod(in_thread)

    def _set_up(self) -> None:
        self._group: TaskGroup | None = None
        self._reader: HubReader | None = None
        self._handlers: dict[Connection, anyio.CancelScope] = {}
        self._guests: deque[tuple[connection.Connection, str]] = deque()
        self._until = Deadline(None)  # for the handlers to end, of who is in the greatest hurry

    async def serve_forever(self) -> None:
        """Accept until ``stop`` is called, by a handler or another task, and has done its work."""
        self._started()
        await self._stopped.wait()

    async def __aenter__(self) -> Self:
        if self._inner is not None:
            raise ClosedError(f"{self!r} cannot be used again")
        self._lock, self._stopped, self._changed = anyio.Lock(), anyio.Event(), anyio.Event()
        inner: Inner[Connection] = await in_thread(
            lambda: Inner(self._enter_soon, *self._args), "server", late=Inner.discard
        )
        try:
            self._reader = reader = HubReader(inner._shared.hub)
            self._group = await anyio.create_task_group().__aenter__()
        except BaseException:
            inner.discard()
            raise
        self._inner = inner
        self._group.start_soon(reader.run)
        inner._gate.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._group is not None
        try:
            with anyio.CancelScope(shield=True):
                await self.stop(5.0 if kind is None else 0.0)
        finally:
            self._group.cancel_scope.cancel()
            await self._group.__aexit__(None, None, None)  # what is raised in the block is no error of a handler's

    # ------------------------------------------------------------ handlers

    def _enter_soon(self, conn: connection.Connection, peer: str) -> None:
        self._guests.append((conn, peer))
        if self._reader is None or not self._reader.soon(self._enter):
            self._guests.pop()
            raise RuntimeError("the loop is gone")

    def _enter(self) -> None:
        inner, group = self._started(), self._group
        assert group is not None
        while self._guests:
            conn, peer = self._guests.popleft()
            ours = Connection(conn)
            self._handlers[ours] = scope = anyio.CancelScope()
            inner._enter(ours, peer)
            group.start_soon(self._handle, ours, peer, scope, name=f"pyverbs_lite {peer}")

    async def _handle(self, conn: Connection, peer: str, scope: anyio.CancelScope) -> None:
        inner = self._started()
        error: Exception | None = None
        _handling.set(self)
        try:
            with scope:
                await self._handler(conn)
            if scope.cancelled_caught and not self._closed and not conn.closed:
                error = ClosedError("its task was cancelled")
        except Exception as raised:
            error = raised
        finally:
            inner._ended(peer, error)
            with anyio.CancelScope(shield=True):
                try:
                    await self._close(conn, 5.0)
                finally:
                    inner._leave(conn)
                    del self._handlers[conn]
                    self._changed.set()

    async def _close(self, conn: Connection, timeout: float) -> None:
        conn._watch.stop()
        await in_thread(lambda: close_quietly(conn._conn, timeout), "close")

    # ------------------------------------------------------------ the end

    async def stop(self, timeout: float | None = 5.0) -> None:
        """Accept nobody any more, let the handlers end, then close what is left; safe to call again.

        A handler that takes no notice of that is cancelled. In a handler this returns at once, and the rest goes on in
        another task. Where several ask it to stop, the shortest ``timeout`` counts.
        """
        deadline = Deadline(timeout)
        self._closed = True
        if self._inner is None or self._group is None:
            return
        if deadline.left < self._until.left:
            self._until = deadline
            self._changed.set()
        self._inner._stopping = True
        if _handling.get() is self:
            self._group.start_soon(self._stop)
        else:
            await self._stop()

    async def _stop(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._lock:
                if not self._stopped.is_set():
                    await self._end(self._started())

    async def _end(self, inner: Inner[Connection]) -> None:
        assert self._reader is not None
        try:
            await in_thread(inner._gate.stop, "stop")
            self._enter()  # now whoever has arrived has a task
            await self._await_handlers(lambda: self._until)
            turns = anyio.Semaphore(CLOSERS)

            async def close(conn: Connection) -> None:
                async with turns:
                    await self._close(conn, 1.0)

            async with anyio.create_task_group() as closing:
                for conn in tuple(self._handlers):
                    closing.start_soon(close, conn)
            notice = Deadline(NOTICE)
            await self._await_handlers(lambda: notice)
            for scope in tuple(self._handlers.values()):
                scope.cancel()
            last = Deadline(NOTICE)
            await self._await_handlers(lambda: last)
        finally:
            await self._reader.close()
            try:
                await in_thread(inner._shared.close, "stop")
            finally:
                self._stopped.set()

    async def _await_handlers(self, limit: Callable[[], Deadline]) -> None:
        while self._handlers and not limit().expired:
            self._changed = anyio.Event()
            left = limit().left
            with anyio.move_on_after(None if math.isinf(left) else left):
                await self._changed.wait()
