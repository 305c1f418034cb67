"""A reliable connection to one peer: made through a TCP exchange, then moving bytes two-sided and one-sided."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address
from types import TracebackType
from typing import NoReturn

from typing_extensions import Self, Unpack

from ._args import Deadline
from ._buffer import Memory, as_bytes_view
from ._control import Control, connect_tcp
from ._engine import Arrival, Engine, Request, TemporaryMR
from ._establish import CELL, Link, Settings, establish
from ._options import Options, Tuning
from .device import Context
from .enums import AccessFlags, GIDType, LinkLayer, QPState, WCOpcode, WROpcode
from .errors import ClosedError, HandshakeError, StateError, UnsupportedError
from .mr import MR, MRSlice
from .remote import RemoteBuffer
from .wr import immediate

__all__ = ["Connection", "ConnectionInfo", "Message", "connect"]

#: The largest piece that one request moves: an SGE's length has 32 bits, and a port's max_msg_sz may be less.
_MAX_PIECE = 1 << 30
_U64 = 1 << 64


class Message(bytes):
    """A received message: its bytes, and what came with them.

    Attributes:
        imm: the 32-bit immediate in host order, or None.
        opcode: ``RECV``, or ``RECV_RDMA_WITH_IMM`` for the notice of an RDMA write, which itself has no bytes.
        byte_len: the length of the message, or of that write.
    """

    imm: int | None
    opcode: WCOpcode
    byte_len: int

    @classmethod
    def _of(cls, arrival: Arrival) -> Self:
        message = cls(arrival.view)
        message.imm, message.opcode, message.byte_len = arrival.imm, arrival.opcode, arrival.byte_len
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionInfo:
    """What a connection came to; sizes in bytes.

    Attributes:
        states: the QP states passed through, in order.
        max_send_size: the longest message that the peer's receive slots take.
        max_rd_atomic: reads and atomics that this side may have in flight; 0: none at all.
        max_dest_rd_atomic: the same for the peer.
    """

    device: str
    port_num: int
    link_layer: LinkLayer
    gid_index: int
    gid_type: GIDType
    local_gid: IPv6Address
    remote_gid: IPv6Address
    local_lid: int
    remote_lid: int
    local_qp_num: int
    remote_qp_num: int
    local_psn: int
    remote_psn: int
    path_mtu: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    max_send_size: int
    max_message_size: int
    send_depth: int
    recv_depth: int
    states: tuple[QPState, ...]


class RemoteBuffers(Mapping[str, RemoteBuffer]):
    """The peer's named buffers, current at each look."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def _now(self) -> dict[str, RemoteBuffer]:
        engine = self._link.engine
        with engine.lock:
            if not engine.failure:
                engine.read_peer()
            return self._link.peer.buffers

    def __getitem__(self, name: str) -> RemoteBuffer:
        buffers = self._now()
        if name not in buffers:
            listed = ", ".join(map(repr, sorted(buffers))) or "none"
            raise KeyError(f"the peer has no buffer named {name!r}; it has {listed}")
        return buffers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._now()))

    def __len__(self) -> int:
        return len(self._now())


class Connection:
    """An RC connection in RTS; made by ``connect`` or ``Listener.accept``.

    Each operation waits until it is complete, for at most ``timeout`` seconds (None: without limit; a peer that
    goes away ends the wait). An operation that timed out is still in flight and holds its memory until it ends.
    Threads may share a connection. ``data`` is anything with the buffer protocol, a torch CPU tensor, an ``MR`` or a
    slice of one; what is registered (``register``) moves without copy or registration.

    Attributes:
        remote: the peer's named buffers, a mapping of name to ``RemoteBuffer``.
        info: a ``ConnectionInfo``.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._engine: Engine = link.engine
        self._closed = False
        self._max_piece = min(link.agreed.max_rdma_size, _MAX_PIECE)
        self.remote = RemoteBuffers(link)
        self.info = ConnectionInfo(
            device=link.context.name,
            port_num=link.port_num,
            link_layer=link.port.link_layer,
            gid_index=link.gid.gid_index,
            gid_type=link.gid.gid_type,
            local_gid=link.gid.gid,
            remote_gid=link.remote.gid,
            local_lid=link.endpoint.lid,
            remote_lid=link.remote.lid,
            local_qp_num=link.endpoint.qp_num,
            remote_qp_num=link.remote.qp_num,
            local_psn=link.endpoint.psn,
            remote_psn=link.remote.psn,
            path_mtu=link.agreed.path_mtu.bytes,
            max_rd_atomic=link.agreed.max_rd_atomic,
            max_dest_rd_atomic=link.agreed.max_dest_rd_atomic,
            max_send_size=link.agreed.max_send_size,
            max_message_size=link.options.max_message_size,
            send_depth=link.options.send_depth,
            recv_depth=link.options.recv_depth,
            states=tuple(link.states),
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"QP {self.info.local_qp_num:#x} to {self.info.remote_qp_num:#x}"
        return f"<Connection with {self._link.peer.control.peer}, {state}>"

    # ------------------------------------------------------------ two-sided

    def send(self, data: Memory | MR | MRSlice, *, imm: int | None = None, timeout: float | None = None) -> None:
        """Send one message; it arrives whole, in order, in one ``recv`` of the peer.

        Args:
            imm: 32 bits that travel with it, in host order.

        Raises:
            ValueError: it is longer than the peer's receive slots (``info.max_send_size``); nothing was sent.
            WaitTimeout: not acknowledged in time; it may still arrive.
            CompletionError: the transfer failed; the connection is over.

        Verb: ibv_post_send (SEND, SEND_WITH_IMM)
        """
        length = _nbytes(data)
        if length > self.info.max_send_size:
            raise ValueError(
                f"a message of {length} bytes is longer than the peer receives: its max_message_size allows"
                f" {self.info.max_send_size}; write it into a registered buffer of the peer, or raise the option there"
            )
        opcode = WROpcode.SEND if imm is None else WROpcode.SEND_WITH_IMM
        self._move("send", opcode, data, Deadline(timeout), imm=imm)

    def recv(self, *, timeout: float | None = None) -> Message:
        """Return the next message.

        Raises:
            WaitTimeout: none came in time.
            PeerClosedError: the peer has closed, or its process is gone, and all that it sent was taken.
            ClosedError: this connection was closed meanwhile.

        Verb: ibv_post_recv
        """
        taken: list[Message] = []
        self._engine.receive("recv", Deadline(timeout), lambda arrival: taken.append(Message._of(arrival)))
        return taken[0]

    def recv_into(self, buffer: Memory | MR | MRSlice, *, timeout: float | None = None) -> int:
        """Copy the next message into a buffer, and return its length.

        Raises:
            ValueError: the message is longer than the buffer; it stays the next one.
            As ``recv``.

        Verb: ibv_post_recv
        """
        target = buffer.view if isinstance(buffer, (MR, MRSlice)) else as_bytes_view(buffer, writable=True)
        taken: list[int] = []

        def take(arrival: Arrival) -> None:
            length = len(arrival.view)
            if length > len(target):
                raise ValueError(
                    f"the next message has {length} bytes and the buffer only {len(target)}; it was left where it is"
                )
            target[:length] = arrival.view
            taken.append(length)

        self._engine.receive("recv_into", Deadline(timeout), take)
        return taken[0]

    # ------------------------------------------------------------ one-sided

    def register(
        self, buffer: Memory, *, name: str | None = None, access: AccessFlags | None = None, timeout: float = 10.0
    ) -> MR:
        """Register a buffer with this connection; with a name the peer finds it in its ``remote``.

        Args:
            access: by default all that the peer can be allowed: remote read, and for writable memory remote write and
                atomics too.

        Raises:
            As ``PD.reg_mr``.
            StateError: the name is taken, or the access allows the peer nothing.
        """
        self._require_open()
        return self._link.register(buffer, access, name, Deadline(timeout))

    def write(
        self,
        remote: RemoteBuffer,
        data: Memory | MR | MRSlice,
        *,
        imm: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Write into the peer's memory, from its start; ``remote[a:b]`` writes elsewhere in it.

        Args:
            imm: 32 bits that wake one ``recv`` of the peer once the bytes are there.

        Raises:
            ValueError: the data do not fit into ``remote``; nothing was written.
            StateError: the peer does not allow writing there.
            WaitTimeout, CompletionError: as ``send``.

        Verb: ibv_post_send (RDMA_WRITE, RDMA_WRITE_WITH_IMM)
        """
        length = _nbytes(data)
        self._check_remote(remote, AccessFlags.REMOTE_WRITE, "write")
        if length > remote.length:
            raise ValueError(f"{length} bytes do not fit into {remote} of {remote.length} bytes")
        opcode = WROpcode.RDMA_WRITE if imm is None else WROpcode.RDMA_WRITE_WITH_IMM
        self._move("write", opcode, data, Deadline(timeout), remote=remote[:length], imm=imm)

    def read(
        self,
        remote: RemoteBuffer,
        into: Memory | MR | MRSlice | None = None,
        *,
        timeout: float | None = None,
    ) -> bytes | int:
        """Read the whole of ``remote``: returned as bytes, or placed into a buffer of at least that size.

        Returns:
            The bytes, or with ``into`` how many there are.

        Raises:
            ValueError: ``into`` is too small.
            BufferError: ``into`` is read-only.
            StateError: the peer does not allow reading there, or one side's read depth is 0.
            WaitTimeout: not complete in time; ``into`` may still be written to.
            CompletionError: as ``send``.

        Verb: ibv_post_send (RDMA_READ)
        """
        self._check_remote(remote, AccessFlags.REMOTE_READ, "read")
        self._check_read_depth("read")
        if into is None:
            target = bytearray(remote.length)
            self._fetch(remote, target, Deadline(timeout))
            return bytes(target)
        space = _nbytes(into, writable=True)
        if space < remote.length:
            raise ValueError(f"{remote} has {remote.length} bytes, which do not fit into a buffer of {space}")
        self._fetch(remote, into, Deadline(timeout))
        return remote.length

    def fetch_add(self, remote: RemoteBuffer, value: int, *, timeout: float | None = None) -> int:
        """Add to the peer's 8 bytes in one step, and return what they were: a native-endian unsigned integer.

        Args:
            remote: 8 bytes at an address that is a multiple of 8.
            value: 64 bits; a negative number subtracts.

        Raises:
            ValueError: not 8 aligned bytes, or not 64 bits.
            StateError, UnsupportedError: the peer or the device does not allow it.
            WaitTimeout, CompletionError: as ``send``.

        Verb: ibv_post_send (ATOMIC_FETCH_AND_ADD)
        """
        return self._atomic("fetch_add", WROpcode.ATOMIC_FETCH_AND_ADD, remote, value, 0, timeout)

    def compare_swap(self, remote: RemoteBuffer, expected: int, desired: int, *, timeout: float | None = None) -> int:
        """Replace the peer's 8 bytes if they equal ``expected``, in one step; return what they were.

        The swap took place where the result equals ``expected``.

        Raises:
            As ``fetch_add``.

        Verb: ibv_post_send (ATOMIC_CMP_AND_SWP)
        """
        return self._atomic("compare_swap", WROpcode.ATOMIC_CMP_AND_SWP, remote, expected, desired, timeout)

    # ------------------------------------------------------------ how

    def _move(
        self,
        operation: str,
        opcode: WROpcode,
        data: Memory | MR | MRSlice,
        deadline: Deadline,
        *,
        remote: RemoteBuffer | None = None,
        imm: int | None = None,
    ) -> None:
        """Send or write: from registered memory as it is, small data through a cell, the rest registered meanwhile."""
        number = 0 if imm is None else immediate(imm, "imm")
        remote_addr, rkey = (remote.addr, remote.rkey) if remote else (0, 0)
        if not isinstance(data, (MR, MRSlice)):
            view = as_bytes_view(data)
            if len(view) <= CELL:
                request = Request(opcode, None, len(view), 0, remote_addr, rkey, number, staged=view)
                self._engine.run(operation, [request], (), deadline)
                return
        with _Registered(self._link, data, AccessFlags(0)) as (memory, region):
            self._engine.run(operation, self._pieces(opcode, memory, remote_addr, rkey, number), (region,), deadline)

    def _fetch(self, remote: RemoteBuffer, into: Memory | MR | MRSlice, deadline: Deadline) -> None:
        if remote.length == 0:
            self._require_open()
            return
        if remote.length <= CELL and not isinstance(into, (MR, MRSlice)):
            request = Request(WROpcode.RDMA_READ, None, remote.length, 0, remote.addr, remote.rkey)
            target = as_bytes_view(into, writable=True)[: remote.length]
            self._engine.run("read", [request], (), deadline, target)
            return
        with _Registered(self._link, into, AccessFlags.LOCAL_WRITE) as (memory, region):
            pieces = self._pieces(WROpcode.RDMA_READ, memory[: remote.length], remote.addr, remote.rkey, 0)
            self._engine.run("read", pieces, (region,), deadline)

    def _pieces(self, opcode: WROpcode, memory: MRSlice, remote_addr: int, rkey: int, imm: int) -> Iterator[Request]:
        """Cut a range into what one request may move; an immediate goes with the last piece."""
        early = WROpcode.RDMA_WRITE if opcode == WROpcode.RDMA_WRITE_WITH_IMM else opcode
        start = 0
        while memory.length - start > self._max_piece:
            yield Request(early, memory.addr + start, self._max_piece, memory.lkey, remote_addr + start, rkey)
            start += self._max_piece
        yield Request(opcode, memory.addr + start, memory.length - start, memory.lkey, remote_addr + start, rkey, imm)

    def _atomic(
        self, operation: str, opcode: WROpcode, remote: RemoteBuffer, argument: int, swap: int, timeout: float | None
    ) -> int:
        self._check_remote(remote, AccessFlags.REMOTE_ATOMIC, operation)
        self._check_read_depth(operation)
        if not self._link.remote_access & AccessFlags.REMOTE_ATOMIC:
            raise UnsupportedError(95, operation, f"{self.info.device} has no atomic operations")
        if remote.length != 8 or remote.addr % 8:
            raise ValueError(
                f"{operation} works on 8 bytes at an address that is a multiple of 8, not on {remote.length} bytes at"
                f" {remote.addr:#x}"
            )
        request = Request(opcode, None, 8, 0, remote.addr, remote.rkey, 0, _word(argument), _word(swap))
        before = bytearray(8)
        self._engine.run(operation, [request], (), Deadline(timeout), memoryview(before))
        return int(struct.unpack("=Q", before)[0])

    def _check_remote(self, remote: RemoteBuffer, flag: AccessFlags, operation: str) -> None:
        if not isinstance(remote, RemoteBuffer):
            raise TypeError(f"{operation} needs a RemoteBuffer, such as conn.remote[name], not {remote!r}")
        remote.require(flag, operation)

    def _check_read_depth(self, operation: str) -> None:
        if self.info.max_rd_atomic == 0:
            raise StateError(
                f"{operation} would never complete: this side's max_rd_atomic or the peer's max_dest_rd_atomic is 0"
            )

    # ------------------------------------------------------------ the end

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed")

    def close(self, *, timeout: float = 5.0) -> None:
        """Say goodbye, end every request, and destroy everything; safe to call again.

        Whoever waits in another thread gets ``ClosedError``; whoever waits on the peer's side gets ``PeerClosedError``
        once it has taken what had arrived.
        """
        link, engine = self._link, self._engine
        with engine.lock:
            if self._closed:
                return
            self._closed = True
            for region in link.registered:
                region.name = None  # the goodbye withdraws all of them
        with suppress(HandshakeError, StateError):
            link.peer.tell(lambda channel: channel.goodbye(), Deadline(min(timeout, 1.0)))
        with engine.lock:
            engine.fail(ClosedError(f"{self!r}"))
        engine.drain(Deadline(timeout))
        link.close()
        link.peer.control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Connection lives in one process and cannot be pickled or copied; a RemoteBuffer can")


class _Registered:
    """Data as registered memory: a region of this connection as it is, anything else for as long as it is in use."""

    def __init__(self, link: Link, data: Memory | MR | MRSlice, access: AccessFlags) -> None:
        if isinstance(data, (MR, MRSlice)):
            region = data if isinstance(data, MR) else data.mr
            region._handle  # noqa: B018 - a closed region is refused here
            if region.pd is not link.pd:
                raise ValueError(f"{region!r} was not registered with this connection: use its register()")
            if access and not region.access & access:
                raise ValueError(f"{region!r} was registered without {access!r}, so nothing can be read into it")
            self._region, self._slice = region, data[:] if isinstance(data, MR) else data
        else:
            self._region = TemporaryMR(link.pd, data, access)
            self._slice = self._region[:]

    def __enter__(self) -> tuple[MRSlice, MR]:
        return self._slice, self._region

    def __exit__(self, *exc: object) -> None:
        # What is still in flight closes it when it ends.
        if isinstance(self._region, TemporaryMR) and not self._region._in_flight:
            self._region.close()


def _nbytes(data: Memory | MR | MRSlice, *, writable: bool = False) -> int:
    return data.length if isinstance(data, (MR, MRSlice)) else len(as_bytes_view(data, writable=writable))


def _word(value: int) -> int:
    """Return a 64-bit operand as unsigned."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"an atomic's operand must be an integer, not {value!r}")
    if not -(_U64 >> 1) <= value < _U64:
        raise ValueError(f"an atomic's operand has 64 bits, and {value} has more")
    return value % _U64


def connect(
    host: str,
    port: int,
    *,
    device: str | Context | None = None,
    port_num: int | None = None,
    gid_index: int | None = None,
    gid_ip: str | None = None,
    gid_netdev: str | None = None,
    buffers: Mapping[str, Memory] | None = None,
    timeout: float | None = 10.0,
    **tuning: Unpack[Tuning],
) -> Connection:
    """Connect to a listener, and return a connection in RTS.

    Args:
        host, port: where the listener's TCP socket is; the RDMA path is found from it.
        device: a device's name, or an open ``Context`` to share; by default the one that has the TCP address.
        port_num: the device's port, from 1; by default the first that is ACTIVE.
        gid_index, gid_ip, gid_netdev: the local GID by row, by IP address or by interface, where the choice made from
            the TCP address is not the right one.
        buffers: name -> buffer: registered before the connection is made, so the peer has them from the start.
        timeout: seconds for all of it.
        tuning: see ``Options``.

    Raises:
        HandshakeTimeout: not done in time.
        HandshakeError: the peer refused, closed, or spoke another protocol.
        DeviceNotFoundError, GIDError: this machine has no usable device, port or GID.
        RouteError: no RDMA path to the peer's GID.
        OSError: the TCP connection failed, or a verb was refused.
    """
    settings = Settings(
        device=device,
        port_num=port_num,
        gid_index=gid_index,
        gid_ip=gid_ip,
        gid_netdev=gid_netdev,
        options=Options(**tuning),
    )
    deadline = Deadline(timeout)
    control = Control(connect_tcp(host, port, deadline))
    return Connection(establish(control, settings, buffers or {}, deadline, accepting=False))
