"""What cannot be awaited: run in a thread of its own, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Call", "Closes", "Opening", "in_thread", "start_thread"]

_T = TypeVar("_T")


class Closes(Protocol):
    """What ``async with`` closes."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""


_C = TypeVar("_C", bound=Closes)


class Call(Generic[_T]):
    """A call in a thread, whose result is either handed over or undone, whoever comes too late for whom.

    Args:
        signal: called in that thread once there is a result, but not after ``give_up``; where nobody takes it, it
            raises ``RuntimeError``.
        late: called with a result that nobody takes.
    """

    def __init__(
        self, call: Callable[[], _T], signal: Callable[[], object], late: Callable[[_T], object] | None
    ) -> None:
        self._call, self._signal, self._late = call, signal, late
        self._lock = threading.Lock()
        self._given_up = False
        self._outcome: tuple[_T] | BaseException | None = None

    def run(self) -> None:
        """Make the call."""
        try:
            outcome: tuple[_T] | BaseException = (self._call(),)
        except BaseException as error:
            outcome = error
        with self._lock:
            self._outcome = outcome
            if not self._given_up:
                with suppress(RuntimeError):
                    self._signal()
                    return
        self._undo(outcome)

    def _undo(self, outcome: tuple[_T] | BaseException) -> None:
        if isinstance(outcome, tuple) and self._late is not None:
            self._late(outcome[0])

    def give_up(self) -> None:
        """Nobody waits any more: undo what comes out of it."""
        with self._lock:
            self._given_up = True
            outcome = self._outcome
        if outcome is not None:
            start_thread(lambda: self._undo(outcome), "late")

    def result(self) -> _T:
        """Return what the call returned, or raise what it raised."""
        assert self._outcome is not None
        if isinstance(self._outcome, BaseException):
            # Out of this object before it is raised, for the traceback leads back here.
            error, self._outcome = self._outcome, None
            try:
                raise error
            finally:
                del error
        return self._outcome[0]


def start_thread(run: Callable[[], None], name: str) -> None:
    """Start something in a thread."""
    # No executor: its threads are few, and at the end of asyncio.run() it waits for all of them.
    threading.Thread(target=run, name=f"pyverbs_lite {name}", daemon=True).start()


async def in_thread(
    call: Callable[[], _T],
    name: str,
    *,
    abort: Callable[[], object] | None = None,
    late: Callable[[_T], object] | None = None,
) -> _T:
    """Run a blocking call in a thread of its own.

    Args:
        abort: called if the waiting is cancelled, to make the call come to an end.
        late: called with what it returns nevertheless, in a thread too.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    work = Call(call, lambda: loop.call_soon_threadsafe(_wake, future), late)
    start_thread(work.run, name)
    try:
        await future
    except BaseException:
        if abort is not None:
            abort()
        work.give_up()
        raise
    return work.result()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Opening(Coroutine[Any, Any, _C]):
    """A connection or a listener on its way: ``await`` it, or ``async with`` it."""

    def __init__(self, making: Coroutine[Any, Any, _C]) -> None:
        self._making = making
        self._made: _C | None = None

    def __await__(self) -> Generator[Any, Any, _C]:
        return self._making.__await__()

    def send(self, value: Any) -> Any:
        """As of a coroutine."""
        return self._making.send(value)

    def throw(self, *error: Any) -> Any:
        """As of a coroutine."""
        return self._making.throw(*error)

    def close(self) -> None:
        """As of a coroutine."""
        self._making.close()

    async def __aenter__(self) -> _C:
        self._made = await self._making
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, trace)
