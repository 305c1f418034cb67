"""The hub of a server, turned by an event loop that anyio knows, and how connections of such a server sleep on trio."""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from collections.abc import Callable

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from .._aio.turns import WatchBase
from .._base.args import Deadline
from .._connection.engine import Engine
from .._connection.hub import Hub
from ..errors import VerbsError
from ..ffi import lib
from .base import AnyioWatch

__all__ = ["HubReader", "HubWatch"]


class HubReader:
    """A task that waits for the one descriptor of a hub, and looks where that says so.

    Args:
        hub: whose ``reader`` this becomes, where the watches of its engines find it.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._group: TaskGroup | None = None
        self._calls: deque[Callable[[], object]] = deque()
        self._scope = anyio.CancelScope(shield=True)  # connections need it until they are closed
        self._over = False
        self._ended = anyio.Event()
        self.watches: weakref.WeakValueDictionary[int, WatchBase] = weakref.WeakValueDictionary()
        hub.watches = self.watches
        hub.reader = self

    async def run(self) -> None:
        """Turn until ``close``."""
        try:
            with self._scope:
                async with anyio.create_task_group() as self._group:
                    await self._turn()
        finally:
            self._over, self._group = True, None
            self._ended.set()

    async def _turn(self) -> None:
        while not self._over:
            await anyio.wait_readable(self._hub.fileno())
            try:
                rung = self._hub.turn()
            except VerbsError as error:
                self._hub.fail(error)
                return
            for key, what in rung:
                if (watch := self.watches.get(key)) is not None:
                    watch.rung(what)
            while self._calls:
                self._calls.popleft()()

    def soon(self, call: Callable[[], object]) -> bool:
        """Call something in the loop, from any thread; False where nothing is called any more."""
        if self._over:
            return False
        self._calls.append(call)
        os.eventfd_write(self._hub.c.call_fd, 1)
        return True

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call something after so many seconds, if this is not over by then."""

        async def wait() -> None:
            await anyio.sleep(seconds)
            call()

        if self._group is not None:
            self._group.start_soon(wait)

    async def close(self) -> None:
        """End the task, and wait until it has left the descriptor alone; safe to call again."""
        self._over = True
        self._scope.cancel()
        await self._ended.wait()


class HubWatch(AnyioWatch):
    """The watch of an engine whose hub a task turns; each who sleeps has an event."""

    in_order = False  # trio shuffles

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert engine.hub is not None
        self._reader: HubReader = engine.hub.reader
        self._reader.watches[engine.key] = self
        lib.pvl_poke_at(engine._c, engine.hub.c.call_fd)
        lib.pvl_hub_listen(engine._c)
        self._look_soon()  # what came before raises no event

    def _soon(self, method: Callable[[HubWatch], object]) -> None:
        ref = weakref.ref(self)

        def call() -> None:
            if (watch := ref()) is not None:
                method(watch)

        self._reader.soon(call)

    def _look_soon(self) -> None:
        self._soon(lambda watch: watch.rung(0))

    def _deaf(self) -> None:
        limit = self.engine._flush_limit.left + 1e-3
        self._reader.later(limit, lambda: self._soon(HubWatch._wake_all))
        self._look_soon()

    def _unwatch(self) -> None:
        pass

    def place(self) -> anyio.Event:
        """Make something that a task sleeps on, once."""
        return anyio.Event()

    async def sleep(self, place: anyio.Event, deadline: Deadline) -> None:
        """Sleep until ``rouse``, or the deadline."""
        self.asleep.add(place)
        try:
            self.arm()
            if not place.is_set():
                self.burst = 0
                with anyio.move_on_after(None if math.isinf(deadline.left) else deadline.left):
                    await place.wait()
        finally:
            self.asleep.discard(place)

    def rouse(self, place: anyio.Event) -> None:
        """Wake who sleeps there, or will."""
        self.asleep.discard(place)
        place.set()

    def rouse_from_thread(self, place: anyio.Event) -> None:
        """Do that in another thread than the loop's."""
        self._reader.soon(lambda: self.rouse(place))

    def stop(self) -> None:
        """Leave the hub alone and wake whoever waits; before the connection is closed. Safe to call again."""
        if self.closed:
            return
        self.closed = True
        if not self.engine.closed:
            lib.pvl_poke_at(self.engine._c, -1)
        for place in tuple(self.asleep):
            self.rouse(place)
        self._wake_all()
