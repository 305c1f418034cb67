"""From what a caller wants moved to the work requests that move it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from .._base.args import Deadline
from .._memory.buffer import Memory, as_bytes_view, look_at
from ..enums import AccessFlags, WROpcode
from ..errors import StaleBufferError, StateError, UnsupportedError
from ..mr import MR, MRSlice
from ..remote import RemoteBuffer
from ..wr import immediate
from .engine import Engine
from .link import CELL, Link
from .operation import Request, Source, TemporaryMR

if TYPE_CHECKING:
    from .._memory.accelerator import DeviceMemory

__all__ = ["Mover", "as_target"]

#: The largest piece that one request moves: an SGE's length has 32 bits, and a port's max_msg_sz may be less.
_MAX_PIECE = 1 << 30
_U64 = 1 << 64
_READ_ONLY = AccessFlags(0)
# As plain numbers, for the operators of an IntFlag are written in Python.
_LOCAL_WRITE, _REMOTE_WRITE, _REMOTE_READ = map(
    int, (AccessFlags.LOCAL_WRITE, AccessFlags.REMOTE_WRITE, AccessFlags.REMOTE_READ)
)
_READ = int(WROpcode.RDMA_READ)


class Mover:
    """The transfers of one connection, under what its methods check."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._engine: Engine = link.engine
        self._pd = link.pd
        self._max_send_size = link.agreed.max_send_size
        self._max_piece = min(link.agreed.max_rdma_size, _MAX_PIECE)
        self._read_depth = link.agreed.max_rd_atomic
        self._domains = {link.peer.domain, link.peer.connection}
        self._token = link.peer.token
        self._live = link.engine._live
        self._engine.limit(self._max_piece, self._max_send_size, self._read_depth)
        self._withdrawn = link.peer.withdrawn

    def _source(self, data: Memory | MR | MRSlice) -> Source:
        """Look at data to be sent or to be filled, before anything is done with them."""
        if isinstance(data, MRSlice) and (mr := data.mr).pd is self._pd and mr._owned.cdata is not None:
            return data  # as below
        if not isinstance(data, (MR, MRSlice)):
            try:
                return as_bytes_view(data, what="data")
            except UnsupportedError:
                return look_at(data, "data")  # in the memory of an accelerator
        part = MRSlice(data, 0, data.length) if isinstance(data, MR) else data
        if part.mr.closed:
            part.mr._raise_closed()
        if part.mr.pd is not self._pd:
            raise ValueError(f"{part.mr!r} was not registered with this connection: use its register()")
        return part

    def _to_send(self, data: Memory | MR | MRSlice) -> Source:
        """Look at a message to be sent."""
        source = self._source(data)
        most = self._max_send_size
        if source.nbytes > most:
            raise ValueError(
                f"a message of {len(source)} bytes is longer than the peer receives: its max_message_size allows"
                f" {most}; write it into a registered buffer of the peer, or raise the option there"
            )
        return source

    def _to_write(self, remote: RemoteBuffer, data: Memory | MR | MRSlice) -> Source:
        """Look at data to be written into the peer's memory."""
        source = self._source(data)
        if not self._known(remote, _REMOTE_WRITE):
            self._check_remote(remote, AccessFlags.REMOTE_WRITE, "write")
        if source.nbytes > remote.length:
            raise ValueError(f"{len(source)} bytes do not fit into {remote}, which has {remote.length}")
        return source

    def _to_fill(self, into: Memory | MR | MRSlice) -> Source:
        """Look at memory that is to be read into."""
        target = self._source(into)
        if isinstance(target, memoryview):
            return as_target(into)
        if not isinstance(target, MRSlice):
            if target.readonly:
                raise BufferError(f"into is read-only {target.kind} memory and cannot be a target")
            return target
        if not target.mr.access._value_ & _LOCAL_WRITE:
            raise BufferError(f"{target.mr!r} was registered without LOCAL_WRITE, so nothing can be read into it")
        return target

    def _to_read(self, remote: RemoteBuffer, into: Memory | MR | MRSlice | None) -> Source:
        """Look at memory that the peer's is read into, or make some."""
        if not self._known(remote, _REMOTE_READ):
            self._check_remote(remote, AccessFlags.REMOTE_READ, "read")
        if self._read_depth == 0:
            self._check_read_depth("read")
        if into is None:
            return memoryview(bytearray(remote.length))
        target = self._to_fill(into)
        if target.nbytes < remote.length:
            raise ValueError(f"{remote} has {remote.length} bytes, which do not fit into a buffer of {len(target)}")
        return target

    def _move(
        self,
        operation: str,
        opcode: int,
        source: Source,
        timeout: float | None,
        remote_addr: int = 0,
        rkey: int = 0,
        imm: int | None = None,
    ) -> None:
        """Send or write: from registered memory as it is, small data through a cell, the rest registered meanwhile."""
        number = 0 if imm is None else immediate(imm, "imm")
        if isinstance(source, MRSlice):
            if source.length <= self._max_piece:
                self._engine.move(operation, opcode, source, remote_addr, rkey, number, timeout)
                return
        elif source.nbytes <= CELL and isinstance(source, memoryview):
            self._engine.copy(operation, opcode, source, remote_addr, rkey, number, timeout)
            return
        deadline = Deadline(timeout)
        if isinstance(source, MRSlice):
            pieces = self._pieces(opcode, source, remote_addr, rkey, number)
            self._engine.run(operation, pieces, deadline, region=source.mr)
            return
        self._run_registered(operation, opcode, source, _READ_ONLY, deadline, remote_addr, rkey, number)

    def _fetch(self, remote: RemoteBuffer, target: Source, timeout: float | None) -> None:
        """Read the whole of a remote range to the start of a target that has the room."""
        if remote.length == 0:
            if self._engine.failure is not None:
                self._engine.refuse_late("read")
            return
        if target.nbytes != remote.length:
            target = target[: remote.length]
        if isinstance(target, MRSlice) and target.length <= self._max_piece:
            self._engine.move("read", _READ, target, remote.addr, remote.rkey, 0, timeout)
            return
        deadline = Deadline(timeout)
        if isinstance(target, memoryview) and remote.length <= CELL:
            request = Request(WROpcode.RDMA_READ, remote.length, remote.addr, remote.rkey)
            self._engine.run("read", (request,), deadline, fetch=target)
            return
        if isinstance(target, MRSlice):
            pieces = self._pieces(WROpcode.RDMA_READ, target, remote.addr, remote.rkey)
            self._engine.run("read", pieces, deadline, region=target.mr)
            return
        access = self._link.read_access
        self._run_registered("read", WROpcode.RDMA_READ, target, access, deadline, remote.addr, remote.rkey)

    def _run_registered(
        self,
        operation: str,
        opcode: int,
        memory: memoryview | DeviceMemory,
        access: AccessFlags,
        deadline: Deadline,
        *remote: int,
    ) -> None:
        """Move memory that is registered for as long as it is in use."""
        if self._engine.failure is not None:
            self._engine.refuse_late(operation)
        region = self._engine.register(memory, access)
        try:
            self._engine.run(operation, self._pieces(opcode, region, *remote), deadline, region=region)
        finally:
            # The engine closes it when the last request has ended, which may be later; this is for what never began.
            self._engine.close_unused(region)

    def _pieces(
        self, opcode: int, part: MRSlice | TemporaryMR, remote_addr: int, rkey: int, imm: int = 0
    ) -> list[Request]:
        """Cut a range into what one request may move; an immediate goes with the last piece."""
        early = WROpcode.RDMA_WRITE if opcode == WROpcode.RDMA_WRITE_WITH_IMM else opcode
        addr, lkey, most = part.addr, part.lkey, self._max_piece
        if part.length <= most:
            return [Request(opcode, part.length, remote_addr, rkey, imm, addr=addr, lkey=lkey)]
        last = max(0, part.length - 1) // most * most  # where the last piece starts
        pieces = [
            Request(early, most, remote_addr + start, rkey, addr=addr + start, lkey=lkey)
            for start in range(0, last, most)
        ]
        pieces.append(Request(opcode, part.length - last, remote_addr + last, rkey, imm, addr=addr + last, lkey=lkey))
        return pieces

    def _to_atomic(
        self, operation: str, opcode: WROpcode, remote: RemoteBuffer, argument: int, swap: int = 0
    ) -> Request:
        """Look at the 8 bytes of an atomic and at its operands."""
        words = _word(argument), _word(swap)
        self._check_remote(remote, AccessFlags.REMOTE_ATOMIC, operation)
        self._check_read_depth(operation)
        if not self._link.registry.remote_access & AccessFlags.REMOTE_ATOMIC:
            raise UnsupportedError(errno.EOPNOTSUPP, operation, f"{self._link.context.name} has no atomic operations")
        if remote.length != 8 or remote.addr % 8:
            raise ValueError(
                f"{operation} works on 8 bytes at an address that is a multiple of 8, not on {remote.length} bytes at"
                f" {remote.addr:#x}"
            )
        return Request(opcode, 8, remote.addr, remote.rkey, 0, *words)

    def _known(self, remote: RemoteBuffer, bit: int) -> bool:
        """Say whether ``_check_remote`` need not be asked: the quick form of what it looks at."""
        return (
            type(remote) is RemoteBuffer
            and remote._bits & bit != 0
            and (remote.domain == 0 or (remote.domain in self._domains and remote.rkey not in self._withdrawn))
        )

    def _check_remote(self, remote: RemoteBuffer, flag: AccessFlags, operation: str) -> None:
        if not isinstance(remote, RemoteBuffer):
            raise TypeError(f"{operation} needs a RemoteBuffer, such as conn.remote[name], not {remote!r}")
        remote.require(flag, operation)
        if remote.domain and (remote.domain not in self._domains or remote.rkey in self._withdrawn):
            self._refuse_stale(remote, operation)

    def _refuse_stale(self, remote: RemoteBuffer, operation: str) -> None:
        if remote.domain not in self._domains:
            this = self._link.peer.control.peer
            why = f"the connection that it came from is over, or another than this one with {this}"
        elif self._withdrawn.get(remote.rkey) == remote.name:
            why = f"the peer has withdrawn {remote.name!r}"
        else:  # the key is in use again, for a buffer that came over another connection of the same domain
            return
        error = StaleBufferError(
            f"{operation}: {remote} is stale: {why}; nothing was posted, take it anew from conn.remote"
        )
        error.operation = operation
        raise error

    def _check_read_depth(self, operation: str) -> None:
        if self._read_depth == 0:
            raise StateError(
                f"{operation} would never complete: this side's max_rd_atomic or the peer's max_dest_rd_atomic is 0"
            )


def as_target(buffer: Memory | MR | MRSlice) -> memoryview:
    """View a buffer that a message is copied into.

    Raises:
        As ``as_bytes_view`` for a target.
    """
    memory = buffer.view if isinstance(buffer, (MR, MRSlice)) else buffer
    return as_bytes_view(memory, writable=True, what="buffer")


def _word(value: int) -> int:
    """Return a 64-bit operand as unsigned."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"an atomic's operand must be an integer, not {value!r}")
    if not -(_U64 >> 1) <= value < _U64:
        raise ValueError(f"an atomic's operand has 64 bits, and {value} has more")
    return value % _U64
