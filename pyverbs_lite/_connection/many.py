"""Many pieces of one buffer by one call: packed arrays of offsets and lengths, and the loop over them in C."""

from __future__ import annotations

from collections.abc import Callable

from .._base.args import Deadline
from .._memory.buffer import Memory
from ..cq import SLICE
from ..enums import AccessFlags, WROpcode
from ..errors import VerbsError
from ..ffi import CData, ffi, lib
from ..mr import MR, MRSlice
from ..remote import RemoteBuffer
from .engine import _SLICE_NS, Engine
from .operation import Operation, Source, TemporaryMR
from .packed import U64S, Integers, Rows, alike, pack, pointers
from .prepared import Prepared, Preparer
from .starter import Starter, nothing
from .work import Work

__all__ = ["Many", "PreparedMany"]

# As plain numbers, for the operators of an IntFlag are written in Python.
_LOCAL_WRITE, _REMOTE_WRITE, _REMOTE_READ = map(
    int, (AccessFlags.LOCAL_WRITE, AccessFlags.REMOTE_WRITE, AccessFlags.REMOTE_READ)
)
_WRITE, _READ = int(WROpcode.RDMA_WRITE), int(WROpcode.RDMA_READ)
_move, _from_buffer, _PENDING = lib.pvl_list_move, ffi.from_buffer, lib.PVL_PENDING


def _indexed(error: VerbsError, op: Operation) -> None:
    """Say which entry has failed, once that is certain."""
    if op.ended:
        error.failed_index = op.failed_index


class PreparedMany(Prepared):
    """Many pieces that were checked once; ``Connection.prepare_write_many`` and ``prepare_read_many`` make one.

    As ``Prepared``: each run is one call of C, and posts and waits for all pieces.

    Attributes:
        operation: ``"write_many"`` or ``"read_many"``, as errors call it.
        part: the registered memory that the pieces are of.
        count: how many pieces there are.
    """

    __slots__ = ("count",)

    def __init__(
        self,
        engine: Engine,
        operation: str,
        opcode: int,
        part: MRSlice,
        check: Callable[[], object],
        remote: RemoteBuffer,
        rows: Rows,
        most: int,
    ) -> None:
        self.count = count = len(rows[0])
        copies: CData = ffi.new(U64S, 3 * count)
        for i, row in enumerate(rows):
            ffi.memmove(copies + i * count, row, row.nbytes)
        super().__init__(engine, operation, opcode, part, check, remote.addr, remote.rkey)
        entries = self._op.list = self._op.list or engine.new_list(self._op)
        own = copies, copies + count, copies + 2 * count
        pack(operation, entries, opcode, most, count, own, part.length, remote)
        entries.memory, self._c.list = self._mr._c, entries
        self._op.keep = self._keep = (part, copies)

    def _finish(self, deadline: Deadline) -> None:
        try:
            super()._finish(deadline)
        except VerbsError as error:
            _indexed(error, self._op)
            raise

    def _take_long_way(self, deadline: Deadline) -> None:
        self._start().wait(None if deadline.seconds is None else deadline.left)

    def _start(self) -> Work[None]:
        entries = ffi.new("struct pvl_list *", self._c.list[0])
        entries.memory = ffi.NULL  # Python holds the region
        entries.base.addr, entries.base.lkey = self.part.addr, self.part.lkey
        op = self._engine.start_list(self.operation, entries, (self._mr,), (entries, self._keep))
        return Work(self._engine, op, self.operation, nothing, self.count)

    def __repr__(self) -> str:
        return f"<prepared {self.operation} of {self.count} pieces of {self.part!r}>"


class Many(Starter, Preparer):
    """The part of a connection that moves many pieces by one call."""

    def start_write_many(
        self,
        remote: RemoteBuffer,
        data: Memory | MR | MRSlice,
        offsets: Integers,
        remote_offsets: Integers,
        lengths: Integers,
    ) -> Work[None]:
        """Start what ``write_many`` does."""
        source = self._to_write_many(remote, data)
        return self._start_many("write_many", WROpcode.RDMA_WRITE, remote, source, offsets, remote_offsets, lengths)

    def start_read_many(
        self,
        remote: RemoteBuffer,
        into: Memory | MR | MRSlice,
        offsets: Integers,
        remote_offsets: Integers,
        lengths: Integers,
    ) -> Work[None]:
        """Start what ``read_many`` does."""
        target = self._to_read_many(remote, into)
        return self._start_many("read_many", WROpcode.RDMA_READ, remote, target, offsets, remote_offsets, lengths)

    def write_many(
        self,
        remote: RemoteBuffer,
        data: Memory | MR | MRSlice,
        offsets: Integers,
        remote_offsets: Integers,
        lengths: Integers,
        *,
        timeout: float | None = None,
    ) -> None:
        """Write many pieces of one buffer to as many places in the peer's, wholly in C.

        Args:
            data: the local buffer.
            offsets, remote_offsets, lengths: of each piece, in bytes: packed 64-bit integers (numpy, array, memoryview)
                or sequences, all of one length. Pieces that continue each other on both sides travel as one.

        Raises:
            ValueError: a piece reaches outside of one of the buffers (the text says which); nothing was written.
            WaitTimeout: not all within ``timeout`` seconds; they go on.
            CompletionError: ``failed_index`` is the first piece that failed; the connection is over.

        Verb: ibv_post_send (RDMA_WRITE)
        """
        rows = offsets, remote_offsets, lengths
        if (
            type(remote) is RemoteBuffer
            and (remote._standing.writes is self._token or self._known(remote, _REMOTE_WRITE))
            and self._move_many("write_many", _WRITE, remote, data, rows, timeout)
        ):
            return
        self.start_write_many(remote, data, *rows).wait(timeout)

    def read_many(
        self,
        remote: RemoteBuffer,
        into: Memory | MR | MRSlice,
        offsets: Integers,
        remote_offsets: Integers,
        lengths: Integers,
        *,
        timeout: float | None = None,
    ) -> None:
        """Read many pieces of the peer's buffer to as many places in a local one; arguments as ``write_many``.

        Verb: ibv_post_send (RDMA_READ)
        """
        rows = offsets, remote_offsets, lengths
        if (
            type(remote) is RemoteBuffer
            and (remote._standing.reads is self._token or self._known(remote, _REMOTE_READ))
            and self._move_many("read_many", _READ, remote, into, rows, timeout)
        ):
            return
        self.start_read_many(remote, into, *rows).wait(timeout)

    def prepare_write_many(
        self,
        remote: RemoteBuffer,
        data: MR | MRSlice,
        offsets: Integers,
        remote_offsets: Integers,
        lengths: Integers,
    ) -> PreparedMany:
        """Check a ``write_many`` of registered memory once, to run it as often as is wanted; arguments as there.

        What the memory holds when it runs is written. The arrays are copied, 24 bytes a piece, so they may change.

        Raises:
            TypeError: ``data`` is not registered memory, or an array has no 64-bit integers.
            ValueError: a piece reaches outside of one of the buffers (the text says which).
            StateError, StaleBufferError, ClosedError: as ``write``.

        Verb: ibv_post_send (RDMA_WRITE)
        """
        part = self._registered("prepare_write_many", data)
        rows = offsets, remote_offsets, lengths
        return self._prepare_many("write_many", _WRITE, part, lambda: self._to_write_many(remote, part), remote, rows)

    def prepare_read_many(
        self,
        remote: RemoteBuffer,
        into: MR | MRSlice,
        offsets: Integers,
        remote_offsets: Integers,
        lengths: Integers,
    ) -> PreparedMany:
        """Check a ``read_many`` into registered memory once, to run it as often as is wanted.

        Raises:
            BufferError: ``into`` was registered without LOCAL_WRITE.
            As ``prepare_write_many``.

        Verb: ibv_post_send (RDMA_READ)
        """
        part = self._registered("prepare_read_many", into)
        rows = offsets, remote_offsets, lengths
        return self._prepare_many("read_many", _READ, part, lambda: self._to_read_many(remote, part), remote, rows)

    def _to_write_many(self, remote: RemoteBuffer, data: Memory | MR | MRSlice) -> Source:
        source = self._source(data)
        if not self._known(remote, _REMOTE_WRITE):
            self._check_remote(remote, AccessFlags.REMOTE_WRITE, "write_many")
        return source

    def _to_read_many(self, remote: RemoteBuffer, into: Memory | MR | MRSlice) -> Source:
        if not self._known(remote, _REMOTE_READ):
            self._check_remote(remote, AccessFlags.REMOTE_READ, "read_many")
        self._check_read_depth("read_many")
        return self._to_fill(into)

    def _prepare_many(
        self,
        operation: str,
        opcode: int,
        part: MRSlice,
        check: Callable[[], object],
        remote: RemoteBuffer,
        rows: tuple[Integers, Integers, Integers],
    ) -> PreparedMany:
        check()
        packed = alike(operation, *rows)
        return PreparedMany(self._engine, operation, opcode, part, check, remote, packed, self._max_piece)

    def _move_many(
        self,
        operation: str,
        opcode: int,
        remote: RemoteBuffer,
        data: Memory | MR | MRSlice,
        rows: tuple[Integers, Integers, Integers],
        timeout: float | None,
    ) -> bool:
        """Move pieces of registered memory and wait for them, all in one call of C.

        Only where that does not do, because it takes long or fails, Python enters the operation in its own books.

        Returns:
            Whether that was done; else nothing was posted, and the long way does it or says why not.
        """
        if type(data) is MRSlice:
            mr, start, size = data.mr, data.offset, data.length
        elif isinstance(data, MR):
            mr, start, size = data, 0, data.length
        else:
            return False
        engine, deadline, wait = self._engine, None, _SLICE_NS
        if timeout is not None:
            deadline, wait = Deadline.with_slice(timeout, SLICE)
        packed = offsets, places, lengths = alike(operation, *rows)
        try:
            op = engine._idle.pop()
        except IndexError:
            op = engine._pooled()
        try:
            op.keep = packed  # from before C knows of them until it does no longer, whatever interrupts
            rc = _move(
                op.list or engine.new_list(op),
                opcode,
                mr._c,
                start,
                size,
                len(offsets),
                _from_buffer(U64S, offsets),
                _from_buffer(U64S, places),
                _from_buffer(U64S, lengths),
                remote.addr,
                remote.rkey,
                remote.length,
                self._max_piece,
                wait,
            )
            if rc == _PENDING:
                engine._live[op] = None
                engine.finish(op, operation, deadline or Deadline(None))
                rc = 0
        except BaseException as error:
            engine._leave(op, mr)
            if isinstance(error, VerbsError):
                _indexed(error, op)
            raise
        op.keep = None
        engine._idle.append(op)
        if engine._live:  # C may have entered what others wait for, or nobody
            engine._reap()
        return bool(rc == 0)

    def _start_many(
        self,
        operation: str,
        opcode: WROpcode,
        remote: RemoteBuffer,
        source: Source,
        offsets: Integers,
        remote_offsets: Integers,
        lengths: Integers,
    ) -> Work[None]:
        rows = alike(operation, offsets, remote_offsets, lengths)
        entries, count = ffi.new("struct pvl_list *"), len(rows[0])
        pack(operation, entries, opcode, self._max_piece, count, pointers(rows), source.nbytes, remote)
        part, region = self._as_registered(operation, opcode, source)
        try:
            entries.base.addr, entries.base.lkey = part.addr, part.lkey
            op = self._engine.start_list(operation, entries, (region,), (entries, rows))
        finally:
            if isinstance(region, TemporaryMR):
                self._engine.close_unused(region)
        return Work(self._engine, op, operation, nothing, count)
