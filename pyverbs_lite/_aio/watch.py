"""A connection's completions, noticed by an asyncio event loop: it watches the descriptors with ``add_reader``."""

from __future__ import annotations

import asyncio
import math
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

from .._base.args import Deadline
from .._connection.engine import Engine
from ..ffi import lib
from .turns import WatchBase

__all__ = ["Watch", "sleep_until", "wake"]


class Watch(WatchBase):
    """A watch of an asyncio loop, which knows it weakly: the garbage collector finds what nobody closed."""

    def __init__(self, engine: Engine, peer_fd: int) -> None:
        super().__init__(engine)
        self.loop = asyncio.get_running_loop()
        self._looking = False
        self._alarm: asyncio.TimerHandle | None = None
        self._finalizer = weakref.finalize(self, _release, self.loop, engine, self._fds)
        self._poke_fd = self._channel_fd = self._peer_fd = -1
        if engine.hub is not None:
            engine.hub.watches[engine.key] = self
            lib.pvl_poke_at(engine._c, engine.hub.c.call_fd)
            lib.pvl_hub_listen(engine._c)
            self._look_soon()
            return
        try:
            self._open(peer_fd)
            for fd, method in (
                (self._poke_fd, Watch._poked),
                (self._channel_fd, Watch._ring),
                (self._peer_fd, Watch._hear),
            ):
                self.loop.add_reader(fd, _call, method, weakref.ref(self))
        except BaseException:
            self.stop()
            raise
        self._look_soon()  # what came before raises no event

    def _unwatch(self) -> None:
        self._remove_readers(self._poke_fd, self._channel_fd, self._peer_fd)

    def _remove_readers(self, *fds: int) -> None:
        for fd in fds:
            if fd >= 0 and not self.loop.is_closed():
                self.loop.remove_reader(fd)

    # ------------------------------------------------------------ looking

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self.loop.call_soon(_call, Watch._look, weakref.ref(self))

    def _poked(self) -> None:
        if not self.closed:
            with suppress(BlockingIOError):
                os.eventfd_read(self._poke_fd)
            self.armed = False  # the thread may have taken the event
            self._look()

    def _hear(self) -> None:
        if not self.closed:
            self.engine.read_peer()
            self._look()

    def _ring(self) -> None:
        if self.look(event=True):
            self._look_soon()

    def _look(self) -> None:
        self._looking = False
        if self.look():
            self._look_soon()

    def _deaf(self) -> None:
        if self.loop.is_closed():
            return
        self._remove_readers(self._peer_fd)
        self._alarm = self.loop.call_later(
            self.engine._flush_limit.left + 1e-3, _call, Watch._wake_all, weakref.ref(self)
        )
        self._look_soon()

    # ------------------------------------------------------------ waiting

    def place(self) -> asyncio.Future[None]:
        """Make something that a task sleeps on, once."""
        return self.loop.create_future()

    async def sleep(self, place: asyncio.Future[None], deadline: Deadline) -> None:
        """Sleep until ``rouse``, or the deadline."""
        self.asleep.add(place)
        try:
            self.arm()
            if not place.done():
                self.burst = 0
                if deadline.seconds is None:
                    await place
                else:
                    await sleep_until(place, deadline)
        finally:
            self.asleep.discard(place)

    def rouse(self, place: asyncio.Future[None]) -> None:
        """Wake who sleeps there."""
        self.asleep.discard(place)
        if not place.done() and not self.loop.is_closed():
            place.set_result(None)

    def rouse_from_thread(self, place: asyncio.Future[None]) -> None:
        """Do that in another thread than the loop's."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(wake, place)

    async def give_way(self) -> None:
        """Let the other tasks run."""
        await asyncio.sleep(0)

    @property
    def loop_is_over(self) -> bool:
        """Whether nothing can be awaited here any more."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return True
        return False

    def stop(self) -> None:
        """Leave the loop alone and wake whoever waits; before the connection is closed. Safe to call again."""
        self.closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._finalizer.detach()
        _remove(self.loop, self.engine, self._fds)
        self._wake_all()


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


def _call(method: Callable[[Watch], object], ref: weakref.ref[Watch]) -> None:
    if (watch := ref()) is not None:
        method(watch)


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
