"""What every kind of event loop has in common: completions noticed without a thread, and tasks that wait their turn.

Most operations are complete when they are looked at for the first time, and the event loop hears nothing of them. Where
a task has to sleep, the next completion is asked to raise an event of the channel. That leads to one look, which enters
what has completed, wakes whom that is for, and asks for another event if somebody still sleeps: asking for it, hearing
of it and taking it are a system call each. A thread that polls as well, to close the connection for example, says so
through an eventfd. Nothing is polled on a timer. How a task sleeps is the loop's matter: see ``_aio.watch`` and
``_anyio.watch``.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Protocol, TypeVar

from .._base.args import Deadline
from .._base.check import os_error
from .._connection.engine import Engine
from .._connection.operation import Operation
from ..errors import ClosedError, QueueFullError, WaitTimeout
from ..ffi import lib

__all__ = ["BURST", "EVERYBODY", "LATER", "Turns", "Wakes", "WatchBase"]

_T = TypeVar("_T")
#: What an attempt raises that may go well later.
LATER = (QueueFullError, WaitTimeout)
#: So many operations of a connection may follow each other without a task's giving way to the others.
BURST = 64
#: So many turns are due where nothing will come any more.
EVERYBODY = sys.maxsize


class Wakes(Protocol):
    """Who looks, after each look of the watch, whether those who wait have what they wait for."""

    def wake(self) -> None:
        """Wake them."""


class Due(Protocol):
    """What there are few of."""

    def __call__(self) -> int:
        """Say how many there are just now."""

    def late(self, operation: str) -> Exception:
        """Return the error of who was not in front in time."""


class WatchBase(ABC):
    """Looks after the engine of one connection for one event loop; all of it runs in the loop's thread.

    The descriptors are copies, so that their numbers stay this object's, whoever closes the connection.

    Attributes:
        closed: whether ``stop`` was called.
        turns: those who have somebody waiting, to be woken after each look.
        asleep: the places that somebody sleeps on, and has not been woken.
        armed: whether the next completion raises an event, or has done so.
    """

    #: Whether tasks that are woken one after the other run in that order.
    in_order = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.closed = False
        self.turns: list[Wakes] = []
        self.asleep: set[Any] = set()
        self.armed = False
        # Where the peer's news come as messages, they have to be heard also while nobody waits for anything.
        self._listens = bool(engine._c.framing.control_worth_telling)
        self._thread = threading.get_ident()
        self._pending: set[Any] = set()
        self._stopped = self._failed = False
        self.burst = 0  # how many operations began since a task last gave way to the others
        self._fds: list[int] = []

    def _open(self, peer_fd: int) -> None:
        """Make the descriptors: where threads poke, the completion channel's, and that on which the peer is heard."""
        self._poke_fd = self._keep(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._channel_fd = self._keep(os.dup(self.engine._qp._handle.send_cq.channel.fd))
        self._peer_fd = self._keep(os.dup(peer_fd))
        lib.pvl_poke_at(self.engine._c, self._poke_fd)

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    # ------------------------------------------------------------ what a loop does in its own way

    @abstractmethod
    def place(self) -> Any:
        """Make something that a task sleeps on, once."""

    @abstractmethod
    async def sleep(self, place: Any, deadline: Deadline) -> None:
        """Sleep until ``rouse``, or the deadline."""

    @abstractmethod
    def rouse(self, place: Any) -> None:
        """Wake who sleeps there, or will."""

    @abstractmethod
    def rouse_from_thread(self, place: Any) -> None:
        """Do that in another thread than the loop's."""

    @abstractmethod
    async def give_way(self) -> None:
        """Let the other tasks run."""

    @abstractmethod
    def stop(self) -> None:
        """Leave the loop alone and wake whoever waits; before the connection is closed. Safe to call again."""

    @property
    @abstractmethod
    def loop_is_over(self) -> bool:
        """Whether nothing can be awaited here any more, as where a coroutine is closed after its loop."""

    @abstractmethod
    def _look_soon(self) -> None:
        """Have the loop look once more."""

    @abstractmethod
    def _deaf(self) -> None:
        """Hear the peer no more: its descriptor would stay readable. And wake all once the flush has its time over."""

    @abstractmethod
    def _unwatch(self) -> None:
        """Watch no descriptor any more."""

    # ------------------------------------------------------------ looking

    def look(self, *, event: bool = False) -> bool:
        """Enter what has completed and wake whom that is for; return whether there may be more.

        Args:
            event: take an event of the channel, which has one.
        """
        if self.closed or self._stopped:
            return False
        if event:
            self.armed = False
        rc = self._look_in_c(event, False)
        if self._stopped:
            return False
        self.see_to()
        if rc & lib.PVL_LOOKED_PART:
            return True
        if self.asleep or self._listens or self.engine._live:
            self.arm()
        return False

    def rung(self, what: int) -> None:
        """Look at what a hub has rung for."""
        if what & lib.PVL_WOKE_PEER and not (self.closed or self._stopped):
            self.engine.read_peer()
            lib.pvl_hub_listen(self.engine._c)  # if that is not over now
        if what & lib.PVL_WOKE_EVENT:
            self.armed = False
        if self.look():
            self._look_soon()

    def arm(self) -> None:
        """Have the next completion raise an event, and see to what has come before."""
        if self.armed or self.closed or self._stopped:
            return
        rc = self._look_in_c(False, True)
        if rc & lib.PVL_LOOKED_PART:
            self._look_soon()
        elif not rc & lib.PVL_LOOKED_BUSY:  # else that thread pokes
            self.armed = True
        if rc & lib.PVL_LOOKED_FOUND:
            self.see_to()

    def _look_in_c(self, event: bool, arm: bool) -> int:
        engine = self.engine
        rc = int(lib.pvl_look(engine._c, event, arm))
        if rc == -errno.ESHUTDOWN or engine.foreign:  # somebody else has closed it, or what it is made of
            self._stopped = True
            self._unwatch()
            self._wake_all()
            return 0
        if rc < 0:
            engine.fail(os_error("ibv_poll_cq", -rc))
            return lib.PVL_LOOKED_FOUND
        return rc

    def glance(self) -> None:
        """Enter what has completed by now and wake whom that is for, without any system call."""
        if not (self.closed or self._stopped or self.engine.foreign) and lib.pvl_peek(self.engine._c) > 0:
            self.see_to()

    def see_to(self) -> None:
        """See to what was entered."""
        engine = self.engine
        if engine._live:
            engine._reap()
        engine.inbox.serve()
        c, framing = engine._c, engine._c.framing
        # Without a cause among them it is searched for, with patience: not before all are there.
        if engine.failure is None and (c.cause or (c.flushed and not c.in_flight and not c.recv_posted)):
            engine._conclude()
        if framing.control_arrived != framing.control_taken or framing.malformed:
            engine.read_peer()
            engine.check_framing()
        if engine.failure is not None:
            self.note_failure()
        for turns in self.turns:
            turns.wake()

    def note_failure(self) -> None:
        """Once the connection is over: hear the peer no more, and wait for the end of the rest only for so long."""
        if self.engine.failure is not None and not (self._failed or self.closed or self._stopped):
            self._failed = True
            self._deaf()

    # ------------------------------------------------------------ waiting

    @property
    def over(self) -> bool:
        """Whether nothing more will come: what has not ended by now is not going to."""
        engine = self.engine
        return self.closed or self._stopped or (engine.failure is not None and engine._flush_limit.expired)

    async def follow(self) -> None:
        """Count what is begun without a turn; after so many, let the other tasks run first."""
        self.burst += 1
        if self.burst > BURST:
            self.burst = 0
            await self.give_way()

    async def ended(self, op: Operation, deadline: Deadline) -> None:
        """Wait until an operation has ended, or the deadline has passed, or nothing more will come."""
        if not op.ended:
            self.glance()  # often it has by now, and the event loop has nothing to do with it
        while not (op.ended or self.over or deadline.expired):
            place = self.place()
            op.notify = functools.partial(self._notified, place)
            self._pending.add(place)
            try:
                if not op.ended:  # it may have been noticed before that could be notified
                    await self.sleep(place, deadline)
            finally:
                op.notify = None
                self._pending.discard(place)

    def _notified(self, place: Any) -> None:
        if threading.get_ident() == self._thread:
            self.rouse(place)
        else:
            self.rouse_from_thread(place)

    def _wake_all(self) -> None:
        for place in tuple(self._pending):
            self.rouse(place)
        for turns in self.turns:
            turns.wake()


class Turns:
    """Tasks that want what there are few of, first come first served.

    Args:
        due: how many there are just now.
        waits: called when one has to wait.

    Attributes:
        waiting: those who do.
    """

    def __init__(self, watch: WatchBase, due: Due, waits: Callable[[], object] | None = None) -> None:
        self._watch = watch
        self._due = due
        self._waits = waits
        self.waiting: deque[_Turn] = deque()

    async def take(self, operation: str, attempt: Callable[[], _T], deadline: Deadline, *, looked: bool = False) -> _T:
        """Wait for a turn, and return what ``attempt`` returns.

        That must not wait, nor may a task be cancelled after it: a message that was taken is returned. If it raises one
        of ``LATER``, the turn is kept for the next time.

        Args:
            looked: whether the caller has just looked at what has completed.

        Raises:
            ClosedError: the connection was closed.
        """
        watch, turn = self._watch, None
        watch.burst += 1
        try:
            if watch.burst > BURST:
                watch.burst = 0
                turn = self._join()  # before it gives way, for those who come meanwhile are behind it
                await watch.give_way()
            if watch.closed:
                raise ClosedError(f"{operation}: this connection is closed")
            if not self.waiting or self.waiting[0] is turn:
                due = self._due()
                if due <= 0 and not looked:
                    watch.glance()
                    due = self._due()
                if due > 0:
                    try:
                        return attempt()
                    except LATER:
                        if deadline.expired:
                            raise
            if self._waits is not None:
                self._waits()
            turn = turn or self._join()
            return await self._wait(turn, operation, attempt, deadline)
        finally:
            if turn is not None:
                self._part(turn)
            watch.note_failure()

    def _join(self) -> _Turn:
        """Take a place in the row; it is kept until the task is through, so nobody overtakes one that was woken."""
        turn = _Turn()
        if not self.waiting:
            self._watch.turns.append(self)
        self.waiting.append(turn)
        return turn

    def _part(self, turn: _Turn) -> None:
        self.waiting.remove(turn)
        if not self.waiting:
            self._watch.turns.remove(self)
        elif self._due() > 0 and (place := self.waiting[0].place) is not None:
            self._watch.rouse(place)

    async def _wait(self, turn: _Turn, operation: str, attempt: Callable[[], _T], deadline: Deadline) -> _T:
        watch = self._watch
        while True:
            turn.place = watch.place()
            await watch.sleep(turn.place, deadline)
            if watch.closed:
                raise ClosedError(f"{operation}: this connection was closed")
            if self.waiting[0] is not turn:
                # The place of one in front was taken meanwhile. What this one found now, it would take before that one;
                # whoever parts wakes the next.
                if deadline.expired:
                    raise self._due.late(operation)
                continue
            try:
                return attempt()
            except LATER:
                if deadline.expired:
                    raise

    def wake(self) -> None:
        """Wake those whose turn it is; where they could overtake each other, the first, who wakes the next."""
        most = len(self.waiting) if self._watch.in_order else 1
        for turn in islice(self.waiting, min(self._due(), most)):
            if turn.place is not None:
                self._watch.rouse(turn.place)


class _Turn:
    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place: Any = None
