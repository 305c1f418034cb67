"""Operations that are checked once and run again and again, each time by one call of C with one pointer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .._base.args import Deadline
from ..enums import WROpcode
from ..errors import BusyError
from ..ffi import CData, ffi, lib
from ..mr import MR, MRSlice
from ..wr import immediate
from .engine import Engine
from .operation import Operation, Request
from .requests import Mover
from .starter import nothing
from .work import Work

if TYPE_CHECKING:
    from ..remote import RemoteBuffer

__all__ = ["Prepared", "Preparer"]

_again, _again_within = lib.pvl_again, lib.pvl_again_within


class Prepared:
    """A write, read or send that was checked once; ``Connection.prepare_write`` and its like make one.

    ::

        tick = conn.prepare_write(conn.remote["state"], region[:64])
        while True:
            fill(region.view)
            tick()

    It belongs to one thread at a time. It needs no closing: dropped while in flight, it holds its memory until that has
    ended.

    Attributes:
        operation: ``"write"``, ``"read"`` or ``"send"``, as errors call it.
        part: the registered memory that it moves.
    """

    __slots__ = (
        "__weakref__",
        "_c",
        "_check",
        "_engine",
        "_keep",
        "_live",
        "_mr",
        "_op",
        "_recycled",
        "_waiting",
        "operation",
        "part",
    )

    def __init__(
        self,
        engine: Engine,
        operation: str,
        opcode: int,
        part: MRSlice,
        check: Callable[[], object],
        remote_addr: int = 0,
        rkey: int = 0,
        imm: int = 0,
    ) -> None:
        self.operation, self.part = operation, part
        self._engine, self._check, self._mr = engine, check, part.mr
        self._live = engine._live
        self._recycled, self._waiting = part._recycled, False
        self._keep: object = part  # what C uses as long as it is in flight
        try:
            op = engine._idle.pop()
        except IndexError:
            op = engine._pooled()  # which keeps it, for C may know it longer than this object lives
        self._c: CData = ffi.new("struct pvl_prepared *")
        c = self._c
        c.engine, c.op, c.memory = engine._c, op.c, self._mr._c
        c.opcode, c.offset, c.length = opcode, part.offset, part.length
        c.remote_addr, c.rkey, c.imm = remote_addr, rkey, imm
        c.within = self._recycled  # for Python counts who uses its memory
        self._op: Operation = op
        self._examine()

    def run(self, timeout: float | None = None) -> None:
        """Post it, and wait until it is complete; so often as is wanted, also by calling the object.

        An earlier run that timed out or was interrupted is waited for first.

        Raises:
            BusyError: another thread is in it.
            ClosedError: the memory was deregistered or given back to its pool, or the connection is over.
            StaleBufferError: the peer has withdrawn its buffer.
            WaitTimeout, QueueFullError, CompletionError: as ``Connection.write`` and its like.

        Verb: ibv_post_send
        """
        if timeout is None:
            try:
                rc = _again(self._c)
                if not (rc or self._live):
                    return
            except BaseException:
                self._leave()
                raise
            if rc:
                self._go_on(rc, Deadline(None))
            else:  # C may have entered what others wait for, or nobody
                self._engine._reap()
        else:
            self._run_within(Deadline(timeout))

    __call__ = run

    def _run_within(self, deadline: Deadline) -> None:
        mr = self.part.mr  # of a pool's slice only as long as that was not given back
        try:
            if self._recycled:
                mr._holders.add(self._op.serial)
            rc = _again_within(self._c, self._engine._slice(deadline))
        except BaseException:
            self._leave()
            raise
        if rc:
            self._go_on(rc, deadline)
        else:
            mr._holders.discard(self._op.serial)
            if self._engine._live:
                self._engine._reap()

    def _go_on(self, rc: int, deadline: Deadline) -> None:
        """Finish what one call of C did not."""
        if rc == lib.PVL_UNUSUAL:
            self._run_within(deadline)
            return
        if self._waiting or rc == lib.PVL_BUSY:
            self._refuse_busy()
        engine, op = self._engine, self._op
        self._waiting = True
        try:
            while rc in (lib.PVL_LATE, lib.PVL_CHECK):
                if rc == lib.PVL_LATE:
                    self._finish(deadline)
                else:
                    self._examine()
                if self._recycled:
                    self._mr._holders.add(op.serial)
                rc = _again_within(self._c, engine._slice(deadline))
            if rc == lib.PVL_PENDING:
                self._finish(deadline)
            elif rc == lib.PVL_BUSY:
                self._refuse_busy()
            elif rc:  # nothing was posted
                self._take_long_way(deadline)
        finally:
            self._waiting = False
            self._leave()

    def _finish(self, deadline: Deadline) -> None:
        self._engine._live[self._op] = None
        self._engine.finish(self._op, self.operation, deadline)

    def _take_long_way(self, deadline: Deadline) -> None:
        c = self._c
        request = Request.of(c.opcode, self.part, c.remote_addr, c.rkey, c.imm)
        self._engine.run(self.operation, (request,), deadline, region=self._mr)

    def _start(self) -> Work[None]:
        """Start it as any other operation, for an event loop; errors as of ``start_write`` with a timeout of 0."""
        c = self._c
        request = Request.of(c.opcode, self.part, c.remote_addr, c.rkey, c.imm)
        op = self._engine.start(self.operation, request, Deadline(0), region=self._mr)
        return Work(self._engine, op, self.operation, nothing)

    def _examine(self) -> None:
        """Check all that may have changed since the last time."""
        c, part = self._c, self.part
        heard, changes = self._engine._c.heard, self._mr._c.changes  # first: what changes meanwhile shows next time
        self._check()
        if part.offset + part.length > self._mr.length:
            raise ValueError(f"{self.operation}: {part!r} reaches outside of it since it was registered anew")
        c.heard, c.changes = heard, changes

    def _refuse_busy(self) -> None:
        raise BusyError(f"{self.operation}: another thread or task runs this prepared operation; prepare one for each")

    def _leave(self) -> None:
        """Hand the operation to the engine's care if it is in flight."""
        op, mr = self._op, self._mr
        if not op.ended:
            op.regions, op.keep = (mr,), self._keep
            mr._holders.add(op.serial)  # C keeps it registered; this is for whoever looks for those that use it
            self._engine._live[op] = None
        elif self._recycled:
            mr._holders.discard(op.serial)
        self._engine._reap()

    def __del__(self) -> None:
        op: Operation | None = getattr(self, "_op", None)
        if op is None:
            return
        if op.ended and not op.c.status:
            op.regions, op.keep = (), None
            self._engine._idle.append(op)
        else:
            self._leave()
            self._engine._pool.pop(op, None)

    def __repr__(self) -> str:
        return f"<prepared {self.operation} of {self.part!r}>"


class Preparer(Mover):
    """The part of a connection that prepares operations."""

    def prepare_write(self, remote: RemoteBuffer, data: MR | MRSlice, *, imm: int | None = None) -> Prepared:
        """Check a write of registered memory once, to run it as often as is wanted; arguments as ``write``.

        What the memory holds when it runs is written. Nothing is posted here.

        Raises:
            TypeError: ``data`` is not registered memory.
            ValueError: the data do not fit into ``remote``, or are more than one request moves.
            StateError, StaleBufferError, ClosedError: as ``write``.

        Verb: ibv_post_send (RDMA_WRITE, RDMA_WRITE_WITH_IMM)
        """
        part = self._in_one("prepare_write", data)
        number = 0 if imm is None else immediate(imm, "imm")
        self._to_write(remote, part)
        opcode = WROpcode.RDMA_WRITE if imm is None else WROpcode.RDMA_WRITE_WITH_IMM
        return Prepared(
            self._engine,
            "write",
            opcode,
            part,
            lambda: self._to_write(remote, part),
            remote.addr,
            remote.rkey,
            number,
        )

    def prepare_read(self, remote: RemoteBuffer, into: MR | MRSlice) -> Prepared:
        """Check a read of the whole of ``remote`` once, to run it as often as is wanted; arguments as ``read``.

        Raises:
            TypeError: ``into`` is not registered memory.
            ValueError: ``into`` is too small, or this is more than one request moves.
            BufferError: ``into`` was registered without LOCAL_WRITE.
            StateError, StaleBufferError, ClosedError: as ``read``.

        Verb: ibv_post_send (RDMA_READ)
        """
        whole = self._in_one("prepare_read", into)
        self._to_read(remote, whole)
        part = whole[: remote.length]
        return Prepared(
            self._engine,
            "read",
            WROpcode.RDMA_READ,
            part,
            lambda: self._to_read(remote, part),
            remote.addr,
            remote.rkey,
        )

    def prepare_send(self, data: MR | MRSlice, *, imm: int | None = None) -> Prepared:
        """Check a message in registered memory once, to send it as often as is wanted; arguments as ``send``.

        Raises:
            TypeError: ``data`` is not registered memory.
            ValueError, ClosedError: as ``send``.

        Verb: ibv_post_send (SEND, SEND_WITH_IMM)
        """
        part = self._in_one("prepare_send", data)
        number = 0 if imm is None else immediate(imm, "imm")
        self._to_send(part)
        opcode = WROpcode.SEND if imm is None else WROpcode.SEND_WITH_IMM
        return Prepared(self._engine, "send", opcode, part, lambda: self._to_send(part), imm=number)

    def _registered(self, operation: str, data: MR | MRSlice) -> MRSlice:
        if not isinstance(data, (MR, MRSlice)):
            raise TypeError(f"{operation} needs registered memory, conn.register(buffer) or a slice, not {data!r}")
        if self._engine.failure is not None:
            self._engine.refuse_late(operation)
        return data[:] if isinstance(data, MR) else data

    def _in_one(self, operation: str, data: MR | MRSlice) -> MRSlice:
        part = self._registered(operation, data)
        if part.length > self._max_piece:
            raise ValueError(f"{operation}: one request moves {self._max_piece} bytes at most, and not {part.length}")
        return part
