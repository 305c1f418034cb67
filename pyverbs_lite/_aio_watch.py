"""A connection's completions, noticed by an event loop: it sleeps on descriptors, and nothing is polled on a timer.

An event of the completion channel leads to one look, which enters what has completed, wakes whom that is for, and asks
for the next event. A thread that polls as well, to close the connection for example, says so through an eventfd.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol, TypeVar

from ._args import Deadline
from ._check import os_error
from ._engine import Engine
from ._operation import Operation
from .errors import ClosedError, QueueFullError, WaitTimeout
from .ffi import lib

__all__ = ["EVERYBODY", "LATER", "Turns", "Watch", "sleep_until", "wake"]

_T = TypeVar("_T")
#: What an attempt raises that may go well later.
LATER = (QueueFullError, WaitTimeout)
#: So many turns are due where nothing will come any more.
EVERYBODY = sys.maxsize


class Watch:
    """Looks after the engine of one connection for one event loop; all of it runs in the loop's thread.

    The descriptors are copies, so that their numbers stay this object's, whoever closes the connection. The loop knows
    it weakly, so that the garbage collector finds a connection that nobody closed.

    Attributes:
        closed: whether ``stop`` was called.
        turns: the queues of those who wait, to be woken after each look.
    """

    def __init__(self, engine: Engine, peer_fd: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = engine
        self.closed = False
        self.turns: list[Wakes] = []
        self._thread = threading.get_ident()
        self._pending: set[asyncio.Future[None]] = set()
        self._looking = self._stopped = self._failed = False
        self._alarm: asyncio.TimerHandle | None = None
        self._fds: list[int] = []
        self._finalizer = weakref.finalize(self, _release, self.loop, engine, self._fds)
        try:
            self._poke_fd = self._keep(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            self._channel_fd = self._keep(os.dup(engine._qp._handle.send_cq.channel.fd))
            self._peer_fd = self._keep(os.dup(peer_fd))
            lib.pvl_poke_at(engine._c, self._poke_fd)
            for fd, method in (
                (self._poke_fd, self._poked),
                (self._channel_fd, self._look),
                (self._peer_fd, self._hear),
            ):
                self.loop.add_reader(fd, _call, weakref.WeakMethod(method))
        except BaseException:
            self.stop()
            raise
        self._look_soon()  # what came before raises no event

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _unwatch(self, *fds: int) -> None:
        for fd in fds:
            if not self.loop.is_closed():
                self.loop.remove_reader(fd)

    # ------------------------------------------------------------ looking

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self.loop.call_soon(_call, weakref.WeakMethod(self._look))

    def _poked(self) -> None:
        if not self.closed:
            with suppress(BlockingIOError):
                os.eventfd_read(self._poke_fd)
            self._look()

    def _hear(self) -> None:
        if not self.closed:
            self.engine.read_peer()
            self._look()

    def _look(self) -> None:
        self._looking = False
        if self.closed or self._stopped:
            return
        engine = self.engine
        rc = lib.pvl_look(engine._c)
        if rc == -errno.ESHUTDOWN or engine.foreign:  # somebody else has closed it, or what it is made of
            self._stopped = True
            self._unwatch(self._poke_fd, self._channel_fd, self._peer_fd)
            self._wake_all()
            return
        if rc < 0:
            engine.fail(os_error("ibv_poll_cq", -rc))
        elif rc == lib.PVL_LOOKED_PART:
            self._look_soon()
        if engine._live:
            engine._reap()
        c, framing = engine._c, engine._c.framing
        # Without a cause among them it is searched for, with patience: not before all are there.
        if engine.failure is None and (c.cause or (c.flushed and not c.in_flight and not c.recv_posted)):
            engine._conclude()
        if framing.control_arrived != framing.control_taken or framing.malformed:
            engine.read_peer()
            engine.check_framing()
        self.note_failure()
        for turns in self.turns:
            turns.wake()

    def note_failure(self) -> None:
        """Once the connection is over: hear the peer no more, and wait for the end of the rest only for so long."""
        done = self._failed or self.closed or self._stopped or self.loop.is_closed()
        if self.engine.failure is not None and not done:
            self._failed = True
            self._unwatch(self._peer_fd)  # it would stay readable
            self._alarm = self.loop.call_later(
                self.engine._flush_limit.left + 1e-3, _call, weakref.WeakMethod(self._wake_all)
            )
            self._look_soon()

    # ------------------------------------------------------------ waiting

    def place(self) -> asyncio.Future[None]:
        """Make something that a task sleeps on."""
        return self.loop.create_future()

    @staticmethod
    async def sleep(place: asyncio.Future[None], deadline: Deadline) -> None:
        """Sleep until ``rouse``, or the deadline."""
        await sleep_until(place, deadline)

    @staticmethod
    def rouse(place: asyncio.Future[None]) -> None:
        """Wake who sleeps there."""
        wake(place)

    @property
    def over(self) -> bool:
        """Whether nothing more will come: what has not ended by now is not going to."""
        engine = self.engine
        return self.closed or self._stopped or (engine.failure is not None and engine._flush_limit.expired)

    async def ended(self, op: Operation, deadline: Deadline) -> None:
        """Wait until an operation has ended, or the deadline has passed, or nothing more will come."""
        while not (op.ended or self.over or deadline.expired):
            future: asyncio.Future[None] = self.loop.create_future()
            op.notify = functools.partial(self._notified, future)
            self._pending.add(future)
            try:
                if not op.ended:  # it may have been noticed before that could be notified
                    await sleep_until(future, deadline)
            finally:
                op.notify = None
                self._pending.discard(future)

    def _notified(self, future: asyncio.Future[None]) -> None:
        if threading.get_ident() == self._thread:
            wake(future)
        else:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self.loop.call_soon_threadsafe(wake, future)

    def _wake_all(self) -> None:
        for future in tuple(self._pending):
            wake(future)
        for turns in self.turns:
            turns.wake()

    def stop(self) -> None:
        """Leave the loop alone and wake whoever waits; before the connection is closed. Safe to call again."""
        self.closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._finalizer.detach()
        _remove(self.loop, self.engine, self._fds)
        self._wake_all()


class Wakes(Protocol):
    """Who looks, after each look of the watch, whether those who wait have what they wait for."""

    def wake(self) -> None:
        """Wake them."""


class Turns:
    """Tasks that want what there are few of, first come first served.

    Args:
        due: how many there are just now.
    """

    def __init__(self, watch: Watch, due: Callable[[], int]) -> None:
        self._watch = watch
        self._due = due
        self._waiting: deque[_Place] = deque()
        watch.turns.append(self)

    async def take(self, operation: str, attempt: Callable[[], _T], deadline: Deadline) -> _T:
        """Wait for a turn, and return what ``attempt`` returns.

        That must not wait, nor may a task be cancelled after it: a message that was taken is returned. If it raises one
        of ``LATER``, the turn is kept for the next time.

        Raises:
            ClosedError: the connection was closed.
        """
        watch = self._watch
        if watch.closed:
            raise ClosedError(f"{operation}: this connection is closed")
        try:
            if not self._waiting and self._due() > 0:
                try:
                    return attempt()
                except LATER:
                    if deadline.expired:
                        raise
            return await self._wait(operation, attempt, deadline)
        finally:
            watch.note_failure()

    async def _wait(self, operation: str, attempt: Callable[[], _T], deadline: Deadline) -> _T:
        place = _Place()
        self._waiting.append(place)  # and there it stays until it is through, so nobody overtakes one that was woken
        try:
            while True:
                place.future = self._watch.loop.create_future()
                await sleep_until(place.future, deadline)
                if self._watch.closed:
                    raise ClosedError(f"{operation}: this connection was closed")
                try:
                    return attempt()
                except LATER:
                    if deadline.expired:
                        raise
        finally:
            self._waiting.remove(place)
            if self._waiting and self._due() > 0 and (future := self._waiting[0].future) is not None:
                wake(future)

    def wake(self) -> None:
        """Wake those whose turn it is."""
        if self._waiting:
            for place in islice(self._waiting, min(self._due(), len(self._waiting))):
                if place.future is not None:
                    wake(place.future)


class _Place:
    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] | None = None


async def sleep_until(future: asyncio.Future[None], deadline: Deadline) -> None:
    """Wait for a future; at the deadline it gets its result all the same."""
    if math.isinf(deadline.left):
        await future
        return
    alarm = future.get_loop().call_later(deadline.left + 1e-3, wake, future)
    try:
        await future
    finally:
        alarm.cancel()


def wake(future: asyncio.Future[None]) -> None:
    if not future.done() and not future.get_loop().is_closed():
        future.set_result(None)


def _call(method: weakref.WeakMethod[Callable[[], Any]]) -> None:
    if (call := method()) is not None:
        call()


def _remove(loop: asyncio.AbstractEventLoop, engine: Engine, fds: list[int]) -> None:
    """Take the descriptors from the loop, then close them: their numbers are soon another's."""
    if not engine.closed:  # else nobody pokes, and at the interpreter's end its memory may be gone as well
        lib.pvl_poke_at(engine._c, -1)
    while fds:
        fd = fds.pop()
        if not loop.is_closed():
            loop.remove_reader(fd)
        os.close(fd)


def _release(loop: asyncio.AbstractEventLoop, engine: Engine, fds: list[int]) -> None:
    """Do that wherever the garbage collector runs."""
    try:
        loop.call_soon_threadsafe(_remove, loop, engine, fds)
    except RuntimeError:  # it is closed
        _remove(loop, engine, fds)
