"""Operations that are started and not waited for, one at a time or gathered."""

from __future__ import annotations

from types import TracebackType
from typing import overload

from typing_extensions import Self

from .._base.args import Deadline
from .._memory.buffer import Memory
from ..enums import AccessFlags, WROpcode
from ..errors import StateError
from ..ffi import CData, ffi, lib
from ..mr import MR, MRSlice
from ..remote import RemoteBuffer
from ..wr import immediate
from .link import CELL
from .operation import Operation, Region, Request, Source, TemporaryMR
from .requests import Mover
from .work import Work

__all__ = ["Batch", "Starter", "nothing"]

_READ_ONLY = AccessFlags(0)
_REQUESTS = ffi.typeof("struct pvl_request[]")
_put = lib.pvl_request_put


class Starter(Mover):
    """The part of a connection that starts operations; each ``start_`` method is its namesake without the wait."""

    # ------------------------------------------------------------ one at a time

    def start_send(
        self, data: Memory | MR | MRSlice, *, imm: int | None = None, timeout: float | None = None
    ) -> Work[None]:
        """Start what ``send`` does.

        Args:
            timeout: seconds to wait for a free place in the send queue, and for a receive of the peer's.

        Raises:
            QueueFullError: no place became free in time; nothing was started.
            WaitTimeout: the peer has not taken the messages before it; nothing was started.
            As ``send``, for what is wrong with the arguments.
        """
        source = self._to_send(data)
        opcode = WROpcode.SEND if imm is None else WROpcode.SEND_WITH_IMM
        op = self._start("send", opcode, source, Deadline(timeout), imm=imm)
        return Work(self._engine, op, "send", nothing)

    def start_write(
        self,
        remote: RemoteBuffer,
        data: Memory | MR | MRSlice,
        *,
        imm: int | None = None,
        timeout: float | None = None,
    ) -> Work[None]:
        """Start what ``write`` does; ``timeout`` and errors as ``start_send``."""
        source = self._to_write(remote, data)
        opcode = WROpcode.RDMA_WRITE if imm is None else WROpcode.RDMA_WRITE_WITH_IMM
        op = self._start("write", opcode, source, Deadline(timeout), remote=remote, imm=imm)
        return Work(self._engine, op, "write", nothing)

    @overload
    def start_read(self, remote: RemoteBuffer, into: None = None, *, timeout: float | None = None) -> Work[bytes]: ...

    @overload
    def start_read(
        self, remote: RemoteBuffer, into: Memory | MR | MRSlice, *, timeout: float | None = None
    ) -> Work[int]: ...

    def start_read(
        self, remote: RemoteBuffer, into: Memory | MR | MRSlice | None = None, *, timeout: float | None = None
    ) -> Work[bytes] | Work[int]:
        """Start what ``read`` does; ``timeout`` and errors as ``start_send``."""
        target, length = self._to_read(remote, into)[: remote.length], remote.length
        if isinstance(target, memoryview) and length <= CELL:
            request = Request(WROpcode.RDMA_READ, length, remote.addr, remote.rkey)
            op = self._engine.start("read", request, Deadline(timeout), fetch=target)
        else:
            op = self._start("read", WROpcode.RDMA_READ, target, Deadline(timeout), remote=remote)
        if into is None:
            return Work(self._engine, op, "read", lambda _: bytes(target))  # type: ignore[arg-type]
        return Work(self._engine, op, "read", lambda _: length)

    def start_fetch_add(self, remote: RemoteBuffer, value: int, *, timeout: float | None = None) -> Work[int]:
        """Start what ``fetch_add`` does; ``timeout`` and errors as ``start_send``."""
        request = self._to_atomic("fetch_add", WROpcode.ATOMIC_FETCH_AND_ADD, remote, value)
        return Work(self._engine, self._engine.start("fetch_add", request, Deadline(timeout)), "fetch_add", _found)

    def start_compare_swap(
        self, remote: RemoteBuffer, expected: int, desired: int, *, timeout: float | None = None
    ) -> Work[int]:
        """Start what ``compare_swap`` does; ``timeout`` and errors as ``start_send``."""
        request = self._to_atomic("compare_swap", WROpcode.ATOMIC_CMP_AND_SWP, remote, expected, desired)
        op = self._engine.start("compare_swap", request, Deadline(timeout))
        return Work(self._engine, op, "compare_swap", _found)

    def _start(
        self,
        operation: str,
        opcode: WROpcode,
        source: Source,
        deadline: Deadline,
        *,
        remote: RemoteBuffer | None = None,
        imm: int | None = None,
    ) -> Operation:
        number = 0 if imm is None else immediate(imm, "imm")
        remote_addr, rkey = (remote.addr, remote.rkey) if remote else (0, 0)
        if isinstance(source, memoryview) and len(source) <= CELL and opcode != WROpcode.RDMA_READ:
            request = Request(opcode, len(source), remote_addr, rkey, number, source=source)
            return self._engine.start(operation, request, deadline)
        part, region = self._as_registered(operation, opcode, source)
        try:
            if part.length <= self._max_piece:
                request = Request(opcode, part.length, remote_addr, rkey, number, addr=part.addr, lkey=part.lkey)
                return self._engine.start(operation, request, deadline, region=region)
            rows = ffi.new(_REQUESTS, 1)
            _put(rows, 0, opcode, part.addr, part.length, part.lkey, remote_addr, rkey, number)
            return self._engine.start_list(operation, self._list(rows, 1), (region,), rows)
        finally:
            if isinstance(region, TemporaryMR):
                self._engine.close_unused(region)

    def _as_registered(self, operation: str, opcode: WROpcode, source: Source) -> tuple[MRSlice | TemporaryMR, Region]:
        if isinstance(source, MRSlice):
            return source, source.mr
        if self._engine.failure is not None:
            self._engine.refuse_late(operation)
        access = AccessFlags.LOCAL_WRITE if opcode == WROpcode.RDMA_READ else _READ_ONLY
        region = self._engine.register(source, access)
        return region, region

    def _list(self, rows: CData, count: int) -> CData:
        entries = ffi.new("struct pvl_list *")
        entries.requests, entries.count, entries.max_piece = rows, count, self._max_piece
        return entries

    # ------------------------------------------------------------ gathered

    def batch(self) -> Batch:
        """Gather writes and reads; at the end of the ``with`` block they go behind as few doorbells as they can.

        ::

            with conn.batch() as batch:
                batch.write(remote[:64], slice_a)
                batch.read(remote[64:128], slice_b)
            batch.work.wait()
        """
        return Batch(self)


class Batch:
    """Writes and reads gathered by ``Connection.batch``.

    Attributes:
        work: the ``Work`` of all of them, once the block has ended.
    """

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self._gathered: list[tuple[WROpcode, MRSlice, RemoteBuffer]] = []
        self._work: Work[None] | None = None

    def write(self, remote: RemoteBuffer, data: MR | MRSlice) -> None:
        """Gather a write of registered memory; checked as ``Connection.write``."""
        self._gather(WROpcode.RDMA_WRITE, self._starter._to_write(remote, data), remote)

    def read(self, remote: RemoteBuffer, into: MR | MRSlice) -> None:
        """Gather a read into registered memory; checked as ``Connection.read``."""
        target = self._starter._to_read(remote, into)
        self._gather(WROpcode.RDMA_READ, target[: remote.length], remote)

    def _gather(self, opcode: WROpcode, part: Source, remote: RemoteBuffer) -> None:
        if not isinstance(part, MRSlice):
            raise TypeError("a batch takes registered memory: conn.register(buffer), or a slice of that")
        if self._work is not None:
            raise StateError("this batch has been started; make another")
        self._gathered.append((opcode, part, remote))

    @property
    def work(self) -> Work[None]:
        """The work of the batch.

        Raises:
            StateError: the block has not ended, or ended with an exception, so nothing was started.
        """
        if self._work is None:
            raise StateError("the batch was not started: its with block has not ended, or an exception ended it")
        return self._work

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        count = len(self._gathered)
        rows = ffi.new(_REQUESTS, max(count, 1))  # a list without any would be one of arrays
        regions: dict[int, MR] = {}
        for i, (opcode, part, remote) in enumerate(self._gathered):
            mr = part.mr
            regions[id(mr)] = mr
            _put(rows, i, opcode, mr.addr + part.offset, part.length, mr.lkey, remote.addr, remote.rkey, 0)
        engine = self._starter._engine
        op = engine.start_list("batch", self._starter._list(rows, count), tuple(regions.values()), rows)
        self._work = Work(engine, op, "batch", nothing, count)


def nothing(_: Operation) -> None:
    """Return the result of what has none."""


def _found(op: Operation) -> int:
    return int(op.c.result)
