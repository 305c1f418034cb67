"""What a connection shows: messages, what was agreed on, and the peer's buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address

from typing_extensions import Self

from .._base.args import Deadline
from ..enums import GIDType, LinkLayer, QPState, WCOpcode
from ..errors import ClosedError, HandshakeError, WaitTimeout
from ..remote import RemoteBuffer
from .inbox import Arrival
from .link import Link
from .settings import check_name

__all__ = ["ConnectionInfo", "Message", "RemoteBuffers", "RemoteNames"]


class Message(bytes):
    """A received message: its bytes, and what came with them.

    Attributes:
        imm: the 32-bit immediate in host order, or None.
        opcode: ``RECV``, or ``RECV_RDMA_WITH_IMM`` for the notice of an RDMA write, which itself has no bytes.
        byte_len: the length of the message, or of that write.
    """

    # Most messages have only their bytes, and need no dictionary.
    __slots__ = ()

    imm: int | None = None
    opcode: WCOpcode = WCOpcode.RECV

    @property
    def byte_len(self) -> int:
        return len(self)

    @staticmethod
    def _of(arrival: Arrival) -> Message:
        if arrival.imm is None and arrival.opcode == WCOpcode.RECV:
            return Message(arrival.view)
        message = _MarkedMessage(arrival.view)
        message.imm, message.opcode, message._byte_len = arrival.imm, arrival.opcode, arrival.byte_len
        return message


class _MarkedMessage(Message):
    """A message that came with an immediate."""

    imm: int | None
    opcode: WCOpcode
    _byte_len: int

    @property
    def byte_len(self) -> int:
        return self._byte_len


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionInfo:
    """What a connection came to; sizes in bytes.

    Attributes:
        states: the QP states passed through, in order.
        max_send_size: the longest message that the peer's receive slots take.
        max_message_size: the longest message that this side's receive slots take.
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

    @classmethod
    def of(cls, link: Link) -> Self:
        """Gather it from a link in RTS."""
        return cls(
            device=link.context.name,
            port_num=link.port_num,
            link_layer=link.port.link_layer,
            gid_index=link.gid.gid_index,
            gid_type=link.gid.gid_type,
            local_gid=link.gid.gid,
            remote_gid=link.remote.gid,
            local_lid=link.endpoint.lid,
            remote_lid=link.remote.lid,
            local_qp_num=link.qp.qp_num,
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


class RemoteNames(Mapping[str, RemoteBuffer]):
    """The peer's named buffers, without the waiting for them, which threads and event loops do differently."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def _now(self, operation: str = "conn.remote") -> dict[str, RemoteBuffer]:
        engine = self._link.engine
        engine.read_peer()
        if engine.failure is not None:
            engine.refuse_late(operation)
        return self._link.peer.buffers

    def _listed(self) -> str:
        return ", ".join(map(repr, sorted(self._link.peer.buffers))) or "none"

    def _find(self, name: str) -> RemoteBuffer | None:
        """Return a buffer that is waited for, if it is there.

        Raises:
            PeerClosedError, ClosedError: it is not, and will not be.
        """
        try:
            return self._now("conn.remote.wait").get(name)
        except (HandshakeError, ClosedError) as error:
            error.args = (f"{error}; no buffer {name!r} was named before that, but: {self._listed()}",)
            raise

    def _too_late(self, name: str, deadline: Deadline) -> WaitTimeout:
        text = f"the peer has named no buffer {name!r} within {deadline.seconds} s; it has {self._listed()}"
        return WaitTimeout(text, "conn.remote.wait")

    def __getitem__(self, name: str) -> RemoteBuffer:
        buffers = self._now()
        try:
            return buffers[name]
        except KeyError:
            raise KeyError(f"the peer has no buffer named {name!r}; it has {self._listed()}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._now()))

    def __len__(self) -> int:
        return len(self._now())

    def __repr__(self) -> str:
        return f"<buffers of {self._link.peer.control.peer}: {self._listed()}>"


class RemoteBuffers(RemoteNames):
    """The peer's named buffers, current at each look.

    Raises:
        KeyError: the peer has no buffer of that name; the text lists those that it has.
        PeerClosedError, ClosedError: the connection is over, and with it every buffer.
    """

    def wait(self, name: str, timeout: float | None = None) -> RemoteBuffer:
        """Return a buffer as soon as the peer has named it, which it may have done long ago.

        Raises:
            TypeError, ValueError: it cannot be a buffer's name.
            WaitTimeout: the peer has not named it within ``timeout`` seconds; the text lists what it has named.
            PeerClosedError, ClosedError: the connection is over.
        """
        check_name(name)
        deadline, engine = Deadline(timeout), self._link.engine
        while True:
            heard = engine.heard  # before the look: what comes after it ends the wait
            if (found := self._find(name)) is not None:
                return found
            if deadline.expired:
                raise self._too_late(name, deadline)
            engine.await_news(heard, deadline)
