"""A connection's completions, noticed by any event loop that anyio knows, asyncio's and trio's.

In a loop of asyncio's ``_aio.watch`` does that. Elsewhere there is no task in the background: of those who sleep, one
leads. It waits for the descriptors, all three behind one epoll, and wakes the others; when it has what it waits for, or
is cancelled, another takes its place.
"""

from __future__ import annotations

import asyncio
import os
import select
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio
import anyio.lowlevel

from .._aio import watch as _aio_watch
from .._aio.thread import Call, start_thread
from .._aio.turns import WatchBase
from .._base.args import Deadline
from .._connection.engine import Engine
from ..ffi import lib
from .base import AnyioWatch
from .hub import HubWatch

__all__ = ["Watch", "in_thread", "watch"]

_T = TypeVar("_T")


class _Place:
    __slots__ = ("event", "woken")

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.woken = False


def watch(engine: Engine, peer_fd: int) -> WatchBase:
    """Make the watch of an engine for the event loop that runs."""
    try:
        of_asyncio = asyncio.current_task() is not None  # a loop that only hosts trio's has none
    except RuntimeError:
        of_asyncio = False
    if of_asyncio:
        return _aio_watch.Watch(engine, peer_fd)
    return Watch(engine, peer_fd) if engine.hub is None else HubWatch(engine)


class Watch(AnyioWatch):
    """A watch that those who sleep see to by turns."""

    in_order = False  # trio shuffles

    def __init__(self, engine: Engine, peer_fd: int) -> None:
        super().__init__(engine)
        self._sleepers: deque[_Place] = deque()
        self._leader: _Place | None = None
        self._dozing = False  # it waits for the descriptors
        self._late: deque[_Place] = deque()  # by other threads
        self._finalizer = weakref.finalize(self, _release, engine, self._fds)
        try:
            self._epoll = select.epoll()
            self._open(peer_fd)
            for fd in self._fds:
                self._epoll.register(fd, select.EPOLLIN)
        except BaseException:
            self.stop()
            raise

    # ------------------------------------------------------------ looking

    def _hear(self) -> bool:
        """See which descriptors have something to say; return whether the channel has an event."""
        event = False
        for fd, _ in self._epoll.poll(0):
            if fd == self._channel_fd:
                event = True
            elif fd == self._poke_fd:
                with suppress(BlockingIOError):
                    os.eventfd_read(fd)
                self.armed = False  # the thread may have taken the event
            else:
                self.engine.read_peer()
        return event

    def _look(self, event: bool) -> bool:
        """Look for completions and for those whom other threads want woken; return whether there may be more."""
        more = self.look(event=event)
        while self._late:
            self.rouse(self._late.popleft())
        if self._failed and self.over:
            self._wake_all()
        return more

    def _deaf(self) -> None:
        self._epoll.unregister(self._peer_fd)
        self._poke()  # so that the leader looks at the clock

    def _unwatch(self) -> None:
        for fd in self._fds:
            with suppress(FileNotFoundError):
                self._epoll.unregister(fd)

    def _poke(self) -> None:
        """Make the leader look."""
        if not self.closed:
            os.eventfd_write(self._poke_fd, 1)

    _look_soon = _poke

    # ------------------------------------------------------------ waiting

    def place(self) -> _Place:
        """Make something that a task sleeps on, once."""
        return _Place()

    async def sleep(self, place: _Place, deadline: Deadline) -> None:
        """Sleep until ``rouse``, or the deadline; lead while nobody else does."""
        self._sleepers.append(place)
        self.asleep.add(place)
        try:
            if deadline.seconds is None:  # a scope of its own would only cost time
                await self._sleep(place)
            else:
                with anyio.move_on_after(deadline.left):
                    await self._sleep(place)
        finally:
            self._sleepers.remove(place)
            self.asleep.discard(place)
            if self._leader is None and self._sleepers:
                self._sleepers[0].event.set()

    async def _sleep(self, place: _Place) -> None:
        while not (place.woken or self.closed or self._stopped):
            if self._leader is None:
                await self._lead(place)
            else:
                self.burst = 0
                await place.event.wait()
                place.event = anyio.Event()

    async def _lead(self, place: _Place) -> None:
        self._leader = place
        event = False
        try:
            while True:
                more = self._look(event)
                if place.woken or self.closed or self._stopped:
                    break
                event = False
                if more:
                    await anyio.lowlevel.checkpoint()
                    continue
                self.burst, self._dozing = 0, True
                if self._failed:  # then not for ever
                    with anyio.move_on_after(self.engine._flush_limit.left + 1e-3):
                        await anyio.wait_readable(self._epoll)
                else:
                    await anyio.wait_readable(self._epoll)
                self._dozing = False
                if self.closed:
                    break
                event = self._hear()
        finally:
            self._leader, self._dozing = None, False
            if self.closed:
                self._close_fds()

    def rouse(self, place: _Place) -> None:
        """Wake who sleeps there, or will."""
        if not place.woken:
            place.woken = True
            self.asleep.discard(place)
            if place is not self._leader:
                place.event.set()
            elif self._dozing:
                self._poke()

    def rouse_from_thread(self, place: _Place) -> None:
        """Do that in another thread than the loop's."""
        self._late.append(place)
        with suppress(OSError):  # it was closed meanwhile: everybody has been woken
            self._poke()

    def stop(self) -> None:
        """Leave the loop alone and wake whoever waits; before the connection is closed. Safe to call again."""
        if self.closed:
            return
        for place in self._sleepers:
            self.rouse(place)
        self.closed = True
        self._wake_all()
        self._finalizer.detach()
        if not self.engine.closed:  # nobody but this object pokes from here on
            lib.pvl_poke_at(self.engine._c, -1)
        if (
            self._leader is None
        ):  # else it does that when it leaves: loops mix up a descriptor and the next of its number
            self._close_fds()

    def _close_fds(self) -> None:
        _release(self.engine, self._fds)
        self._epoll.close()


def _release(engine: Engine, fds: list[int]) -> None:
    if not engine.closed:  # else nobody pokes, and at the interpreter's end its memory may be gone as well
        lib.pvl_poke_at(engine._c, -1)
    while fds:
        os.close(fds.pop())


async def in_thread(
    call: Callable[[], _T],
    name: str,
    *,
    abort: Callable[[], object] | None = None,
    late: Callable[[_T], object] | None = None,
) -> _T:
    """Run a blocking call in a thread of its own; as ``_aio.thread.in_thread``."""
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    work = Call(call, lambda: os.eventfd_write(fd, 1), late)
    try:
        start_thread(work.run, name)
        try:
            await anyio.wait_readable(fd)
        except BaseException:
            if abort is not None:
                abort()
            work.give_up()
            raise
    finally:
        os.close(fd)
    return work.result()
