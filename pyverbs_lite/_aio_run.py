"""How an operation of a connection runs in an event loop: when there is room for it, and until it has ended."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from . import connection
from ._aio_remote import RemoteBuffers
from ._aio_thread import in_thread
from ._aio_turns import EVERYBODY, LATER, Turns, WatchBase
from ._aio_watch import Watch
from ._args import Deadline
from ._operation import repeated
from ._stats import ConnectionStats
from ._work import Work
from .enums import WROpcode
from .errors import ClosedError, QueueFullError, WaitTimeout
from .ffi import lib
from .mr import MR, MRSlice

__all__ = ["LARGE", "Runner", "is_large"]

_T = TypeVar("_T")
#: To register this much memory, or to copy it, takes long enough for a thread.
LARGE = 1 << 20


def is_large(data: object) -> bool:
    """Say whether to move these data means to register a lot of memory."""
    if isinstance(data, (MR, MRSlice)):
        return False
    try:
        return memoryview(data).nbytes > LARGE  # type: ignore[arg-type]
    except TypeError:  # a tensor, or a mistake that is found later
        size = getattr(data, "nbytes", 0)
        return isinstance(size, int) and size > LARGE


class _Messages:
    """How many messages are there to be taken."""

    def __init__(self, watch: WatchBase) -> None:
        self._watch = watch

    def __call__(self) -> int:
        engine = self._watch.engine
        if engine.closed:
            return EVERYBODY  # to be told so
        # Looked at first: where no receive is posted, all that arrived is there.
        ended = self._watch.over or (engine.failure is not None and not engine._c.recv_posted)
        return engine.inbox.waiting or (EVERYBODY if ended else 0)


class _Room:
    """How many requests of a kind may be posted."""

    def __init__(self, watch: WatchBase, opcode: WROpcode) -> None:
        self._watch, self._opcode = watch, opcode

    def __call__(self) -> int:
        engine = self._watch.engine
        if engine.failure is not None or self._watch.over:
            return EVERYBODY  # to be told so
        return int(lib.pvl_room(engine._c, self._opcode))


class Runner:
    """The part of a connection that runs its operations.

    Attributes:
        remote, info: as of ``pyverbs_lite.Connection``.
    """

    #: What sleeps in the event loop, and what runs what cannot be awaited.
    _watch_class: ClassVar[type[Any]] = Watch
    _in_thread: ClassVar[Callable[..., Any]] = staticmethod(in_thread)

    def __init__(self, conn: connection.Connection) -> None:
        self._conn = conn
        self._engine = conn._engine
        self.info = conn.info
        self._watch: WatchBase = self._watch_class(conn._engine, conn._link.peer.control.fileno())
        self.remote = RemoteBuffers(conn.remote, self._watch)
        self._receivers = Turns(self._watch, _Messages(self._watch))
        # A message may have to wait for the peer to take others; what needs no receive there does not wait with it.
        raw = conn._engine._c
        self._messages = Turns(self._watch, _Room(self._watch, WROpcode.SEND), lambda: lib.pvl_count_wait(raw))
        self._transfers = Turns(self._watch, _Room(self._watch, WROpcode.RDMA_WRITE))

    @property
    def stats(self) -> ConnectionStats:
        """What the connection has done so far; as of ``pyverbs_lite.Connection``."""
        return self._conn.stats

    def _check_open(self, operation: str) -> None:
        if self._watch.closed:
            raise ClosedError(f"{operation}: this connection is closed")

    async def _receive(self, operation: str, attempt: Callable[[], _T], timeout: float | None) -> _T:
        deadline, engine = Deadline(timeout), self._engine
        late = engine.failure is not None
        try:
            return await self._receivers.take(operation, attempt, deadline)
        except WaitTimeout:
            raise WaitTimeout(f"no message arrived within {deadline.seconds} s", operation) from None
        except ClosedError:
            if late or self._watch.closed or engine.failure is None:
                raise
            raise repeated(engine.failure, operation) from None  # it came while this waited

    async def _do(
        self,
        operation: str,
        turns: Turns | None,
        start: Callable[[], Work[_T]],
        timeout: float | None,
        large: bool = False,
    ) -> _T:
        """Start an operation when there is room for it, and wait until it has ended."""
        deadline = Deadline(timeout)
        self._check_open(operation)
        try:
            if large:
                work = await self._start_large(operation, turns, start, deadline)
            elif turns is None:
                work = start()
            else:
                work = await turns.take(operation, start, deadline)
        except QueueFullError as error:
            text = f"no request of this QP (send_depth) has ended within {deadline.seconds} s; nothing was started"
            raise QueueFullError(errno.EAGAIN, operation, text) from error
        except WaitTimeout as error:
            raise WaitTimeout(
                f"{operation}: the peer has not taken the messages before it, within {deadline.seconds} s; nothing was"
                " sent",
                operation,
            ) from error
        await self._finish(work, deadline)
        try:
            if large and operation == "read":  # it may be a copy
                result: _T = await self._in_thread(lambda: work.result(0), operation)
                return result
            return work.result(0)
        finally:
            self._watch.note_failure()

    async def _start_large(
        self, operation: str, turns: Turns | None, start: Callable[[], Work[_T]], deadline: Deadline
    ) -> Work[_T]:
        while True:
            if turns is not None:
                await turns.take(operation, lambda: None, deadline)
            try:
                work: Work[_T] = await self._in_thread(start, operation)
                return work
            except LATER:
                if deadline.expired:
                    raise

    async def _finish(self, work: Work[_T], deadline: Deadline) -> None:
        """Wait until it has ended, well or badly; raise if it cannot be waited for any longer."""
        op, engine = work._op, self._engine
        try:
            await self._watch.ended(op, deadline)
            if not op.ended:
                if self._watch.closed:
                    raise ClosedError(f"{work.operation}: this connection was closed")
                engine.finish(op, work.operation, deadline if deadline.expired else Deadline(0))
        finally:  # not before the last look, which may find that it has just ended
            if not (engine.closed or op.ended):
                lib.pvl_abandon(engine._c, op.c)  # what it still fetches goes nowhere
