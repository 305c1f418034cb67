"""A server whose handlers are coroutines of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from typing_extensions import Self

from .. import connection
from .._base.args import Deadline
from .._server.base import CLOSERS, NOTICE, close_quietly
from ..errors import ClosedError
from .connection import Connection
from .hub import HubReader
from .server_face import Inner, ServerFace
from .thread import in_thread, start_thread

__all__ = ["Server"]


class Server(ServerFace[Connection]):
    """Listens on a TCP address, and runs ``await handler(conn)`` for each peer, in a task of its own.

    As ``pyverbs_lite.Server``, awaitable; it is bound when it is started, which ``async with`` does. The loop watches
    one descriptor for all connections. Handshakes run in threads. ::

        async with pvl.aio.Server("0.0.0.0", 18515, handler) as server:
            await server.serve_forever()
    """

    def _set_up(self) -> None:
        self._reader: HubReader | None = None
        self._tasks: dict[asyncio.Task[None], Connection] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._stopped = asyncio.Event()
        self._until = Deadline(None)  # for the handlers to end, of who is in the greatest hurry
        self._changed = asyncio.Event()  # that, or the last task is gone

    # ------------------------------------------------------------ running

    async def start(self) -> None:
        """Bind the address and begin to accept; safe to call again.

        Raises:
            ClosedError: it was stopped.
            As ``pyverbs_lite.Server`` itself.
        """
        async with self._lock:
            if self._closed:
                raise ClosedError(f"start: {self!r} cannot be used any more")
            if self._inner is not None:
                return
            loop = asyncio.get_running_loop()

            def enter(conn: connection.Connection, peer: str) -> None:
                loop.call_soon_threadsafe(self._arrived, conn, peer)

            inner: Inner[Connection] = await in_thread(lambda: Inner(enter, *self._args), "server", late=Inner.discard)
            try:
                self._reader = HubReader(inner._shared.hub)
            except BaseException:
                inner.discard()
                raise
            self._inner = inner
            inner._gate.start()

    async def serve_forever(self) -> None:
        """Accept until ``stop`` is called, by a handler or another task, and has done its work."""
        if self._inner is None:
            await self.start()
        await self._stopped.wait()

    # ------------------------------------------------------------ handlers

    def _arrived(self, conn: connection.Connection, peer: str) -> None:
        inner = self._started()
        ours = Connection(conn)
        inner._enter(ours, peer)
        task = asyncio.get_running_loop().create_task(self._handle(ours, peer), name=f"pyverbs_lite {peer}")
        self._tasks[task] = ours
        task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        conn = self._tasks[task]
        if conn.closed:
            del self._tasks[task]
            if not self._tasks:
                self._changed.set()
            return
        # It was cancelled before its first step, so nothing of it has run.
        inner, loop = self._started(), asyncio.get_running_loop()

        def close() -> None:
            close_quietly(conn._conn, 1.0)
            inner._leave(conn)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._gone, task)

        conn._watch.stop()
        inner._ended(inner._open.get(conn, ""), None)
        start_thread(close, "close")

    async def _handle(self, conn: Connection, peer: str) -> None:
        inner = self._started()
        error: Exception | None = None
        try:
            await self._handler(conn)
        except asyncio.CancelledError:
            if not self._closed and not conn.closed:
                error = ClosedError("its task was cancelled")
        except Exception as raised:
            error = raised
        finally:
            inner._ended(peer, error)
            try:
                await self._close(conn, 5.0)
            finally:
                inner._leave(conn)

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
        if deadline.left < self._until.left:
            self._until = deadline
            self._changed.set()
        if self._inner is not None:
            self._inner._stopping = True
        task = asyncio.current_task()
        if task in self._tasks:
            ending = asyncio.get_running_loop().create_task(self._stop())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        else:
            await self._stop()

    async def _stop(self) -> None:
        async with self._lock:
            if (inner := self._inner) is not None and not self._stopped.is_set():
                await in_thread(inner._gate.stop, "stop")  # after it, whoever has arrived has a task
                await self._await_handlers(lambda: self._until)
                turns = asyncio.Semaphore(CLOSERS)

                async def close(conn: Connection) -> None:
                    async with turns:
                        await self._close(conn, 1.0)

                await asyncio.gather(*(close(conn) for conn in tuple(self._tasks.values())))
                notice = Deadline(NOTICE)
                await self._await_handlers(lambda: notice)
                for task in tuple(self._tasks):
                    task.cancel()
                last = Deadline(NOTICE)
                await self._await_handlers(lambda: last)
                if self._reader is not None:
                    self._reader.close()
                try:
                    await in_thread(inner._shared.close, "stop")
                finally:
                    self._stopped.set()
            self._stopped.set()

    async def _await_handlers(self, limit: Callable[[], Deadline]) -> None:
        while self._tasks and not limit().expired:
            self._changed.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), limit().left if limit().seconds is not None else None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(5.0 if kind is None else 0.0)
