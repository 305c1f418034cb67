"""How an operation of a connection runs in an event loop: when there is room for it, and until it has ended."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from .. import connection
from .._base.args import Deadline
from .._connection.link import CELL
from .._connection.operation import Operation, Source, repeated
from .._connection.stats import ConnectionStats
from .._connection.work import Work
from ..connection import BYTES
from ..enums import WROpcode
from ..errors import ClosedError, QueueFullError, WaitTimeout
from ..ffi import ffi, lib
from ..mr import MR, MRSlice
from ..wr import immediate
from .remote import RemoteBuffers
from .thread import in_thread
from .turns import BURST, EVERYBODY, LATER, Turns, WatchBase
from .watch import Watch

__all__ = ["LARGE", "Runner", "is_large"]

_T = TypeVar("_T")
#: To register this much memory, or to copy it, takes long enough for a thread.
LARGE = 1 << 20
_move, _copy, _from_buffer = lib.pvl_move, lib.pvl_move_copy, ffi.from_buffer
_NOW, _PENDING = lib.PVL_NOW, lib.PVL_PENDING


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
        watch, engine = self._watch, self._watch.engine
        if engine.failure is None and not (watch.closed or watch._stopped):
            return engine.inbox.waiting
        if engine.closed:
            return EVERYBODY  # to be told so
        # Looked at first: where no receive is posted, all that arrived is there.
        ended = watch.over or (engine.failure is not None and not engine._c.recv_posted)
        return engine.inbox.waiting or (EVERYBODY if ended else 0)

    def late(self, operation: str) -> Exception:
        return WaitTimeout("the messages went to those in front", operation)


class _Room:
    """How many requests of a kind may be posted."""

    def __init__(self, watch: WatchBase, opcode: WROpcode) -> None:
        self._watch, self._opcode = watch, opcode

    def __call__(self) -> int:
        engine = self._watch.engine
        if engine.failure is not None or self._watch.over:
            return EVERYBODY  # to be told so
        return int(lib.pvl_room(engine._c, self._opcode))

    def late(self, operation: str) -> Exception:
        if self._opcode == WROpcode.SEND and lib.pvl_room(self._watch.engine._c, WROpcode.RDMA_WRITE) > 0:
            return WaitTimeout("those in front wait for the peer to take messages", operation)
        return QueueFullError(errno.EAGAIN, operation, "the places went to those in front")


class Runner:
    """The part of a connection that runs its operations.

    Attributes:
        remote: as of ``pyverbs_lite.Connection``.
    """

    _face: ClassVar[str] = "aio"
    #: What sleeps in the event loop, and what runs what cannot be awaited.
    _make_watch: ClassVar[Callable[..., WatchBase]] = Watch
    _in_thread: ClassVar[Callable[..., Any]] = staticmethod(in_thread)

    def __init__(self, conn: connection.Connection) -> None:
        self._conn = conn
        self._engine = conn._engine
        self._watch: WatchBase = self._make_watch(conn._engine, conn._link.peer.control.fileno())
        self.remote = RemoteBuffers(conn.remote, self._watch)
        self._receivers = Turns(self._watch, _Messages(self._watch))
        # A message may have to wait for the peer to take others; what needs no receive there does not wait with it.
        raw = conn._engine._c
        self._messages = Turns(self._watch, _Room(self._watch, WROpcode.SEND), lambda: lib.pvl_count_wait(raw))
        self._transfers = Turns(self._watch, _Room(self._watch, WROpcode.RDMA_WRITE))

    @property
    def info(self) -> connection.ConnectionInfo:
        """What the connection came to; as of ``pyverbs_lite.Connection``."""
        return self._conn.info

    @property
    def stats(self) -> ConnectionStats:
        """What the connection has done so far; as of ``pyverbs_lite.Connection``."""
        return self._conn.stats

    def _check_open(self, operation: str) -> None:
        if self._watch.closed:
            raise ClosedError(f"{operation}: this connection is closed")

    def _quick(
        self,
        turns: Turns,
        data: object,
        slice_by: Callable[..., int],
        copy_by: Callable[..., int],
        *where: int,
    ) -> Operation | bool:
        """Do what most calls are, by one call of C, see ``Engine.limit``; else as ``_begin``, which looks at more.

        Args:
            slice_by, copy_by: the functions of C for a slice of registered memory, and for bytes.
            where: in the peer's memory, and how much there is.
        """
        watch, engine = self._watch, self._engine
        if turns.waiting or watch.closed or watch.burst >= BURST:
            return False
        quick = engine.quick
        try:
            if type(data) is MRSlice:
                rc = slice_by(quick, data.mr._c, data.offset, data.length, *where, _NOW)
            elif type(data) in BYTES:
                memory: Any = data if type(data) is bytes else _from_buffer(data)
                rc = copy_by(quick, memory, len(memory), *where, _NOW)
            else:
                return False
            if rc == _PENDING:
                watch.burst += 1
                return engine.broken_off(quick, data)  # from here on it is nobody else's
        except BaseException:
            engine.broken_off(quick, data)
            raise
        if rc:
            return False
        watch.burst += 1
        if engine._live or watch.turns:  # C may have entered what others wait for
            watch.see_to()
        return True

    def _begin(
        self, turns: Turns, opcode: int, source: Source, addr: int, rkey: int, imm: int | None
    ) -> Operation | bool:
        """Post one request if nobody waits in front, and look once whether it is complete: most often by one C call.

        Returns:
            True: it is complete. False: nothing was posted. Else the operation is in flight, or has failed.
        """
        watch, engine = self._watch, self._engine
        if turns.waiting or watch.closed or watch.burst >= BURST:
            return False
        mr: MR | None = None
        if isinstance(source, MRSlice):
            mr, fits = source.mr, source.length <= self._conn._max_piece
        else:
            fits = isinstance(source, memoryview) and source.nbytes <= CELL
        if not fits:
            return False
        number = 0 if imm is None else immediate(imm, "imm")
        watch.burst += 1
        try:
            op = engine._idle.pop()
        except IndexError:
            op = engine._pooled()
        try:
            if isinstance(source, MRSlice):
                assert mr is not None
                if source._recycled:
                    op.regions = (mr,)
                    mr._holders.add(op.serial)
                rc = _move(engine._c, op.c, opcode, mr._c, source.offset, source.length, addr, rkey, number, _NOW)
            else:
                rc = _copy(engine._c, op.c, opcode, _from_buffer(source), len(source), addr, rkey, number, _NOW)
        except BaseException:
            engine._leave(op, mr)
            raise
        if rc == _PENDING:
            engine._leave(op, mr)
            return op
        if mr is not None and op.regions:
            mr._holders.discard(op.serial)
            op.regions = ()
        engine._idle.append(op)
        if rc:
            return False
        if engine._live or watch.turns:  # C may have entered what others wait for
            watch.see_to()
        return True

    async def _await(self, op: Operation, operation: str, deadline: Deadline) -> None:
        """Wait for an operation that was begun."""
        try:
            await self._finish(op, operation, deadline)
            if op.c.status:
                self._engine.finish(op, operation, Deadline(0))  # which says why
        finally:
            self._watch.note_failure()

    async def _receive(
        self, operation: str, attempt: Callable[[], _T], timeout: float | None, *, looked: bool = False
    ) -> _T:
        deadline, engine = Deadline(timeout), self._engine
        late = engine.failure is not None
        try:
            return await self._receivers.take(operation, attempt, deadline, looked=looked)
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
        timeout: float | Deadline | None,
        large: bool = False,
    ) -> _T:
        """Start an operation when there is room for it, and wait until it has ended."""
        deadline = timeout if isinstance(timeout, Deadline) else Deadline(timeout)
        if turns is None:
            await self._watch.follow()
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
        await self._finish(work._op, operation, deadline)
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

    async def _finish(self, op: Operation, operation: str, deadline: Deadline) -> None:
        """Wait until it has ended, well or badly; raise if it cannot be waited for any longer."""
        engine = self._engine
        try:
            await self._watch.ended(op, deadline)
            if not op.ended:
                if self._watch.closed:
                    raise ClosedError(f"{operation}: this connection was closed")
                engine.finish(op, operation, deadline if deadline.expired else Deadline(0))
        finally:  # not before the last look, which may find that it has just ended
            if not (engine.closed or op.ended):
                lib.pvl_abandon(engine._c, op.c)  # what it still fetches goes nowhere
                self._watch.arm()  # its memory is let go when it ends
