"""What the connection manager tells: its events as plain values, and the errors that some of them mean."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._base.args import check_int
from ._memory.buffer import as_bytes_view
from ._objects.attr_c import read_ah_attr
from ._objects.device_attr import known
from .attr import AHAttr
from .enums.cm import CMEventType
from .errors import CMError, HandshakeError, PeerClosedError
from .ffi import CData, ffi

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .cm_mcast import CMGroup
    from .cmid import CMID

__all__ = ["CMEvent", "ConnParam", "UDParam", "error_of", "event_of", "write_conn_param"]

_U8 = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnParam:
    """What the sides of a connection tell each other (``struct rdma_conn_param``).

    In ``CMID.connect`` and ``accept`` it is this side's; in an event it is the peer's, seen from this side.

    Attributes:
        private_data: bytes for the peer. On InfiniBand and RoCE 56 fit into a connect (180 where the port space is UDP)
            and 196 into an accept (136), and what arrives is filled up with zeros to that length; on iWARP 251 fit.
        responder_resources: reads and atomics that this side serves at a time; 255 is as many as both can.
        initiator_depth: reads and atomics that this side has in flight; 255 is as many as both can.
        flow_control: whether the device has end-to-end flow control, 0 or 1.
        retry_count, rnr_retry_count: 3 bits each; 7 rnr retries are for ever.
        srq: whether the QP has one; the QP of the ``CMID`` knows by itself.
        qp_num: 24 bits, on iWARP 32; the QP of the ``CMID`` knows by itself.
    """

    private_data: bytes = b""
    responder_resources: int = 255
    initiator_depth: int = 255
    flow_control: int = 1
    retry_count: int = 7
    rnr_retry_count: int = 7
    srq: int = 0
    qp_num: int = 0

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            private_data: Buffer = b"",
            responder_resources: int = 255,
            initiator_depth: int = 255,
            flow_control: int = 1,
            retry_count: int = 7,
            rnr_retry_count: int = 7,
            srq: int = 0,
            qp_num: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "private_data", bytes(as_bytes_view(self.private_data, what="private_data")))
        for name, most in _RANGES.items():
            check_int(name, getattr(self, name), 0, most)


_E = CMEventType
#: The events that have parameters.
_CARRIERS = (
    *(_E.CONNECT_REQUEST, _E.CONNECT_RESPONSE, _E.CONNECT_ERROR, _E.UNREACHABLE, _E.REJECTED, _E.ESTABLISHED),
    *(_E.DISCONNECTED, _E.MULTICAST_JOIN, _E.MULTICAST_ERROR),
)
_RANGES = {
    "responder_resources": _U8,
    "initiator_depth": _U8,
    "flow_control": 1,
    "retry_count": 7,
    "rnr_retry_count": 7,
    "srq": 1,
    "qp_num": (1 << 32) - 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UDParam:
    """Where datagrams go (``struct rdma_ud_param``).

    Attributes:
        private_data: what the peer sent along, filled up with zeros.
        ah_attr: the address for ``PD.create_ah``, or None where the event has none, as a CONNECT_REQUEST.
        qp_num, qkey: for ``SendWR``.
    """

    private_data: bytes = b""
    ah_attr: AHAttr | None = None
    qp_num: int = 0
    qkey: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CMEvent:
    """An event of the connection manager, copied and already acknowledged (``struct rdma_cm_event``).

    Attributes:
        event: a plain number where librdmacm gives one that has no name here.
        status: 0, a negative errno, or for ``REJECTED`` on InfiniBand and RoCE the number of the reason.
        id: whose event it is, for a ``CONNECT_REQUEST`` a new ``CMID``; None where it was closed meanwhile.
        listen_id: the listener that a ``CONNECT_REQUEST`` came to.
        conn: the parameters of a connection, where the event is of one.
        ud: the parameters of datagrams, where the event is of those.
        group: the multicast group that a ``MULTICAST_JOIN`` or ``MULTICAST_ERROR`` is about.
    """

    event: CMEventType
    status: int = 0
    id: CMID | None = None
    listen_id: CMID | None = None
    conn: ConnParam | None = None
    ud: UDParam | None = None
    group: CMGroup | None = None

    @property
    def private_data(self) -> bytes:
        """What the peer sent along; InfiniBand and RoCE fill it up with zeros."""
        param = self.conn or self.ud
        return param.private_data if param else b""

    @property
    def name(self) -> str:
        """The name of the event, without its prefix."""
        return getattr(self.event, "name", str(self.event))

    def raise_for_error(self, operation: str = "") -> None:
        """Raise the error that the event means, if it means one.

        Raises:
            CMError: the subclass of the event.
        """
        if (error := error_of(self, operation)) is not None:
            raise error


def event_of(raw: CData, owner: CMID | None, listen_id: CMID | None, group: CMGroup | None) -> CMEvent:
    """Make a value of a ``struct pvl_cm_event``."""
    private_data = bytes(ffi.buffer(raw.private_data, raw.private_data_len))
    conn = ud = None
    if raw.event not in _CARRIERS:
        pass
    elif raw.is_ud:
        ah_attr = read_ah_attr(raw.ah_attr) if raw.ah_attr.port_num else None
        ud = UDParam(private_data=private_data, ah_attr=ah_attr, qp_num=raw.qp_num, qkey=raw.qkey)
    else:
        values = {name: getattr(raw, name) & most for name, most in _RANGES.items()}
        conn = ConnParam(private_data=private_data, **values)
    kind = known(CMEventType, raw.event)
    return CMEvent(event=kind, status=raw.status, id=owner, listen_id=listen_id, conn=conn, ud=ud, group=group)


# ---------------------------------------------------------------- errors

#: Event -> what it means, and what to do about it; an errno of the table below says it better.
_CAUSES: dict[int, str] = {
    _E.ADDR_ERROR: "the address cannot be resolved",
    _E.ROUTE_ERROR: "no path to the address was found: is the subnet manager there, is the link up?",
    _E.UNREACHABLE: "the peer's connection manager does not answer: is the host up, is UDP port 4791 open?",
    _E.REJECTED: "the peer refused",
    _E.CONNECT_ERROR: "the connection could not be made",
    _E.DEVICE_REMOVAL: "the device was removed: close everything that was made on it",
    _E.MULTICAST_ERROR: "the multicast group could not be joined, or the membership was lost",
}
_NO_DEVICE = (
    "no RDMA device has or reaches this address: give the address of an interface with an RDMA device (rdma link),"
    " or bind to one first"
)
_BY_STATUS: dict[tuple[int, int], str] = {
    (_E.ADDR_ERROR, errno.ENODEV): _NO_DEVICE,
    (_E.ADDR_ERROR, errno.EADDRNOTAVAIL): _NO_DEVICE,
    (_E.ADDR_ERROR, errno.ENETUNREACH): "no route leads to this address",
    (_E.ADDR_ERROR, errno.EHOSTUNREACH): "nobody has this address: no neighbour answers for it",
    (_E.ADDR_ERROR, errno.ETIMEDOUT): "nobody has this address: no neighbour answered in time",
    (_E.ROUTE_ERROR, errno.ETIMEDOUT): "the subnet manager did not answer in time",
    (_E.UNREACHABLE, errno.ETIMEDOUT): "the peer did not answer in time: is its host up, is its program still there?",
    (_E.REJECTED, errno.ECONNREFUSED): "nobody listens on that port, or who listens refused",
    (_E.REJECTED, errno.ECONNRESET): "the peer refused, or its program is gone",
}
_BY_REASON = {
    1: "the peer has no QP for it",
    3: "the peer has no memory or no QP left for another connection",
    4: "the peer gave up waiting for this side's answer",
    8: "nobody listens on that port",
    10: "the peer still holds a connection of this QP's number: try again with a new QP",
    26: "the peer cannot use this path MTU",
    27: "the peer serves fewer reads and atomics than were asked for (initiator_depth)",
    28: "the peer's program refused",
}


def error_of(event: CMEvent, operation: str = "") -> HandshakeError | None:
    """Make the exception that an event means; None where it is good or neutral news.

    ``DISCONNECTED`` is ``PeerClosedError``. An event of good news with a status is an error of the step.
    """
    where = operation or "rdma_cm"
    if event.event == CMEventType.DISCONNECTED:
        closed = PeerClosedError(f"{where}: the peer has disconnected, or its process is gone")
        closed.operation = operation
        return closed
    if event.name not in CMError.by_event and (not event.status or event.event == CMEventType.TIMEWAIT_EXIT):
        return None
    reason, cause = "", _CAUSES.get(event.event, "the step failed")
    if event.status < 0:
        number = -event.status
        reason = f" {errno.errorcode.get(number, number)} ({os.strerror(number)})"
        cause = _BY_STATUS.get((event.event, number), cause)
    elif event.status:
        reason = f" (reason {event.status})"
        cause = _BY_REASON.get(event.status, cause)
    said = event.private_data.rstrip(b"\0")
    if said and event.event == CMEventType.REJECTED:
        cause += f", and said {said!r}"
    cls = CMError.by_event.get(event.name, CMError.by_event["CONNECT_ERROR"])
    return cls(
        f"{where}: {event.name}{reason}: {cause}",
        event=event.event,
        status=event.status,
        private_data=event.private_data,
        operation=operation,
    )


def write_conn_param(param: ConnParam) -> tuple[CData, CData]:
    """Return the C struct of connection parameters, and the memory that it points to."""
    raw = ffi.new("struct rdma_conn_param *")
    kept = ffi.new("char[]", param.private_data)
    if param.private_data:
        raw.private_data, raw.private_data_len = kept, len(param.private_data)
    for name in _RANGES:
        setattr(raw, name, getattr(param, name))
    return raw, kept
