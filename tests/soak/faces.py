"""One way to use both faces of a connection: the one that waits in a thread, and asyncio's.

What is written against a face is written with ``await``; over the blocking one nothing is ever suspended, and ``drive``
runs it in a thread.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import pyverbs_lite as pvl

__all__ = ["PATIENCE", "Aio", "Blocking", "Call", "Cut", "drive"]

#: Seconds after which what should come by itself never will.
PATIENCE = 120.0
#: The same for a message of a peer that may be waiting for all others to connect.
_LONG = 500.0
_T = TypeVar("_T")
_LATE = (pvl.WaitTimeout, pvl.QueueFullError)


class Cut(Exception):
    """A call was cut short; nobody knows whether it took place."""


class Call(NamedTuple):
    """A method of a connection, and what it is given."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed


class _Interrupt(BaseException):
    """What a signal handler raises, as KeyboardInterrupt is."""


class Aio:
    """A ``pyverbs_lite.aio.Connection``."""

    def __init__(self, conn: Any) -> None:
        self.conn = conn

    def _start(self, call: Call, timeout: float) -> Coroutine[Any, Any, Any]:
        made: Coroutine[Any, Any, Any] = getattr(self.conn, call.name)(*call.args, timeout=timeout, **call.options)
        return made

    async def do(self, name: str, /, *args: Any, **options: Any) -> Any:
        """Call a method, and wait until it is done."""
        return await self._start(Call(name, args, options), _LONG if name == "recv" else PATIENCE)

    async def cut(self, cut: tuple[str, float], name: str, /, *args: Any, **options: Any) -> Any:
        """Call a method, and stop it before long.

        Raises:
            Cut: it was not done by then.
        """
        how, after = cut
        call = Call(name, args, options)
        if how == "timeout":
            try:
                return await self._start(call, after)
            except _LATE as error:
                raise Cut(how) from error
        if how == "cancel":
            task = asyncio.ensure_future(self._start(call, PATIENCE))
            await asyncio.sleep(after)
            task.cancel()
            try:
                return await task
            except asyncio.CancelledError:
                raise Cut(how) from None
        try:
            return await asyncio.wait_for(self._start(call, PATIENCE), after)
        except asyncio.TimeoutError as error:
            if isinstance(error, pvl.VerbsError):
                raise
            raise Cut("wait_for") from None

    async def batch(self, rows: list[Call], timeout: float = PATIENCE) -> None:
        """Do all of them behind one doorbell."""
        try:
            async with self.conn.batch(timeout=timeout) as batch:
                for row in rows:
                    getattr(batch, row.name)(*row.args)
        except _LATE as error:
            if timeout == PATIENCE:
                raise
            raise Cut("timeout") from error

    async def together(self, calls: list[Call]) -> list[Any]:
        """Do all of them at the same time; return results and exceptions."""
        return await asyncio.gather(*(self._start(call, PATIENCE) for call in calls), return_exceptions=True)

    async def drop(self, calls: list[Call]) -> bool:
        """Start all of them and forget them; say whether they take place for certain."""
        tasks = [asyncio.ensure_future(self._start(call, PATIENCE)) for call in calls]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):  # asyncio's cancellation is none
                raise result
        return False

    async def close_under(self, calls: list[Call]) -> list[Any]:
        """Close the connection while others use it; return their results and exceptions."""
        tasks = [asyncio.ensure_future(self._start(call, PATIENCE)) for call in [*calls, Call("recv", ())]]
        await asyncio.sleep(0.001)
        await self.conn.close()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)

    async def named(self, name: str) -> Any:
        """Wait for a buffer of the peer."""
        return await self.conn.remote.wait(name, PATIENCE)

    async def pause(self, seconds: float) -> None:
        """Do nothing for a while."""
        await asyncio.sleep(seconds)

    async def reconnected(self) -> Any:
        """Connect again."""
        return await self.conn.reconnect(timeout=PATIENCE)

    async def close(self) -> None:
        """Close the connection."""
        await self.conn.close()


class Blocking:
    """A ``pyverbs_lite.Connection``; its owner may be the main thread, where it can be interrupted."""

    def __init__(self, conn: Any) -> None:
        self.conn = conn

    def _start(self, call: Call, timeout: float) -> Any:
        return getattr(self.conn, call.name)(*call.args, timeout=timeout, **call.options)

    def _work(self, call: Call, timeout: float) -> Any:
        limit = {} if call.name.endswith("_many") else {"timeout": timeout}
        return getattr(self.conn, f"start_{call.name}")(*call.args, **limit, **call.options)

    async def do(self, name: str, /, *args: Any, **options: Any) -> Any:
        """Call a method, and wait until it is done."""
        return self._start(Call(name, args, options), _LONG if name == "recv" else PATIENCE)

    async def cut(self, cut: tuple[str, float], name: str, /, *args: Any, **options: Any) -> Any:
        """Call a method, and stop it before long.

        Raises:
            Cut: it was not done by then.
        """
        how, after = cut
        call = Call(name, args, options)
        if how == "interrupt" and threading.current_thread() is threading.main_thread():
            return self._interrupted(call, after)
        try:
            return self._start(call, after)
        except _LATE as error:
            raise Cut("timeout") from error

    def _interrupted(self, call: Call, after: float) -> Any:
        armed = True

        def strike(*_: object) -> None:
            nonlocal armed
            if armed:
                armed = False
                raise _Interrupt

        signal.signal(signal.SIGALRM, strike)
        try:
            signal.setitimer(signal.ITIMER_REAL, after or 1e-5)
            result = self._start(call, PATIENCE)
            armed = False
        except _Interrupt:
            raise Cut("interrupt") from None
        finally:
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return result

    async def batch(self, rows: list[Call], timeout: float = PATIENCE) -> None:
        """Do all of them behind one doorbell."""
        with self.conn.batch() as batch:
            for row in rows:
                getattr(batch, row.name)(*row.args)
        try:
            batch.work.wait(timeout)
        except _LATE as error:
            if timeout == PATIENCE:
                raise
            raise Cut("timeout") from error

    async def together(self, calls: list[Call]) -> list[Any]:
        """Do all of them at the same time; return results and exceptions."""
        results: list[Any] = []
        ended: list[Any] = []
        for work in [self._work(call, PATIENCE) for call in calls]:
            work.add_done_callback(ended.append)
            try:
                results.append(work.result(PATIENCE))
            except pvl.VerbsError as error:
                results.append(error)
        return results

    async def drop(self, calls: list[Call]) -> bool:
        """Start all of them and forget them; say whether they take place for certain."""
        for call in calls:
            self._work(call, PATIENCE)
        return True

    async def close_under(self, calls: list[Call]) -> list[Any]:
        """Close the connection while others use it; return their results and exceptions."""
        results: list[Any] = []

        def receive() -> None:
            try:
                results.append(self.conn.recv(timeout=PATIENCE))
            except Exception as error:
                results.append(error)

        waiter = threading.Thread(target=receive)
        waiter.start()
        works = []
        for call in calls:
            with suppress(*_LATE):
                works.append(self._work(call, 0.05))
        self.conn.close()
        for work in works:
            try:
                results.append(work.result(PATIENCE))
            except pvl.VerbsError as error:  # noqa: PERF203 - each has its own
                results.append(error)
        waiter.join(PATIENCE)
        return results

    async def named(self, name: str) -> Any:
        """Wait for a buffer of the peer."""
        return self.conn.remote.wait(name, PATIENCE)

    async def pause(self, seconds: float) -> None:
        """Do nothing for a while."""
        time.sleep(seconds)

    async def reconnected(self) -> Any:
        """Connect again."""
        return self.conn.reconnect(timeout=PATIENCE)

    async def close(self) -> None:
        """Close the connection."""
        self.conn.close()


def drive(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run what is never suspended, in this thread."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    raise RuntimeError("it awaits an event loop")
