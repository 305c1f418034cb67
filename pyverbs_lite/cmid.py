"""Identifiers of the connection manager: the C flow of librdmacm, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ._base.args import Deadline, check_int
from ._base.resource import Resource
from ._cm import calls
from ._cm.addresses import CMAddresses
from ._cm.sockaddr import Address
from .cm_channel import EventChannel, Place, ids, serials
from .cm_events import CMEvent, ConnParam, write_conn_param
from .enums import QPType
from .enums.cm import CMEventType, MCJoinFlags, PortSpace
from .errors import StateError
from .ffi import CData, ffi, lib

if TYPE_CHECKING:
    from .cm_mcast import CMGroup
    from .cm_qp import CMQP
    from .pd import PD
    from .qp import QPInitAttr

__all__ = ["CMID"]

_E = CMEventType


class CMID(CMAddresses):
    """One end of a connection, a listener, or a port for datagrams, as librdmacm sees it (``struct rdma_cm_id``).

    As in C there are two manners. Made without a channel it is synchronous: each step waits for its event, raises what
    an error event means, and returns the good one. Made with a channel each step returns at once, and the events are
    ``EventChannel.get_event``'s, or ``expect``'s; a ``timeout`` then is how long the kernel tries. After a failed step
    it can only be closed.

    ``timeout`` is in seconds, or a deadline that several steps share; None waits without limit.

    Attributes:
        channel: where its events arrive.
        qp: the QP made by ``create_qp``, or None.
        event: of a new one that wants to connect, its ``CONNECT_REQUEST``.
        disconnected: whether the connection was and is no more.

    Verb: rdma_create_id
    """

    def __init__(self, channel: EventChannel | None = None, ps: PortSpace = PortSpace.TCP) -> None:
        self._sync = channel is None
        self.channel = EventChannel() if channel is None else channel
        try:
            out = ffi.new("struct rdma_cm_id **")
            serial = next(serials)
            with self.channel._lock:
                calls.check(
                    "rdma_create_id",
                    lib.rdma_create_id(self.channel._handle, out, ffi.cast("void *", serial), PortSpace(ps)),
                )
                self._take(out[0], serial)
        except BaseException:
            if channel is None:
                self.channel.close()
            raise

    @classmethod
    def _adopt(cls, channel: EventChannel, handle: CData) -> CMID:
        """Take over the new identifier of a CONNECT_REQUEST; again, where that was interrupted."""
        self = channel._unborn
        if self is None:
            self = channel._unborn = cls.__new__(cls)
        if getattr(self, "_owned", None) is None:
            self._sync = False
            self.channel = channel
            serial = next(serials)
            handle.context = ffi.cast("void *", serial)
            self._take(handle, serial)
        return self

    def _take(self, handle: CData, serial: int) -> None:
        self.qp: CMQP | None = None
        self.event: CMEvent | None = None
        self.disconnected = False
        self.ps = PortSpace(handle.ps)
        self.qp_type = QPType(handle.qp_type)
        self._place = Place(self.channel._lock)
        self._own(handle, calls.DestroyID(self._place), self.channel, label="CMID")
        ids[serial] = self

    def __repr__(self) -> str:
        if self.closed:
            return "<CMID (closed)>"
        return f"<CMID {self.ps.name} {self.local_address} to {self.peer_address}>"

    # ------------------------------------------------------------ the QP

    def create_qp(self, pd: PD, init_attr: QPInitAttr) -> CMQP:
        """Make its QP, which librdmacm then brings through its states; receives may be posted at once.

        Args:
            pd: of ``context``, as the CQs of ``init_attr``.

        Raises:
            TypeError, ValueError: as ``PD.create_qp``, or the PD is of another device.
            StateError: it has a QP already.
            VerbsOSError: the verb refused.

        Verb: rdma_create_qp_ex
        """
        if pd.context is not self.context:
            raise ValueError(f"the PD belongs to {pd.context!r}, and the CMID to {self.context!r}: use its context")
        kind = QPType(init_attr.qp_type)
        if kind != self.qp_type:
            raise ValueError(
                f"a CMID of port space {self.ps.name} has a QP of type {self.qp_type.name}, not {kind.name}"
            )
        with self._place.lock:
            if self.qp is not None and not self.qp.closed:
                raise StateError(f"it has a QP already: {self.qp!r}")
            self.qp = cast("CMQP", Resource._kinds["CMQP"](pd, self, init_attr))  # type: ignore[call-arg]
            return self.qp

    # ------------------------------------------------------------ connecting

    def listen(self, backlog: int = 0) -> None:
        """Wait for others to connect to the address that it is bound to; 0 is the kernel's default backlog.

        Verb: rdma_listen
        """
        check_int("backlog", backlog, 0, (1 << 31) - 1)
        with self._place.lock:
            calls.check("rdma_listen", lib.rdma_listen(self._handle, backlog))

    def get_request(self, *, timeout: float | Deadline | None = None) -> CMID:
        """Wait for somebody who wants to connect; ``accept`` or ``reject`` the ``CMID`` returned.

        That of a synchronous listener is synchronous and has a channel of its own. Its ``event`` says what the peer
        sent along; closing it refuses as well.

        Raises:
            WaitTimeout: nobody came.

        Verb: rdma_get_request
        """
        limit = calls.deadline(timeout)
        event = self.channel._await(lambda event: event.listen_id is self, limit, self)
        fresh = event.id
        assert fresh is not None
        if self._sync:
            try:
                fresh.migrate(None)
            except BaseException:
                fresh.close()
                raise
        return fresh

    def connect(self, param: ConnParam | None = None, *, timeout: float | Deadline | None = 10.0) -> CMEvent | None:
        """Ask the listener at the resolved address for a connection, or where its datagrams go.

        Without a QP of its own (``create_qp``) the good event is ``CONNECT_RESPONSE``, and after the QP named in
        ``param`` was moved to RTS, ``establish`` is the last step; iWARP knows only ``ESTABLISHED``.

        Raises:
            CMRejectedError: nobody listens there, or who does refused; see ``private_data``.
            CMUnreachableError: the peer does not answer.
            CMConnectError: the connection could not be made.
            HandshakeTimeout: not done in time.

        Verb: rdma_connect
        """
        limit = calls.deadline(timeout)
        with self._place.lock:
            self._require_device("connect")
            raw, kept = self._conn_param("connect", param)
            rc = lib.rdma_connect(self._handle, raw)
            calls.check_answer("rdma_connect", rc)
            del kept
        return self._done(limit, "rdma_connect", _E.ESTABLISHED, _E.CONNECT_RESPONSE)

    def accept(self, param: ConnParam | None = None, *, timeout: float | Deadline | None = 10.0) -> CMEvent | None:
        """Accept who wants to connect. There is no event for datagrams, so None is returned then.

        Raises:
            CMUnreachableError, CMRejectedError, CMConnectError, PeerClosedError: the peer did not go on.
            HandshakeTimeout: not done in time.

        Verb: rdma_accept
        """
        limit = calls.deadline(timeout)
        with self._place.lock:
            raw, kept = self._conn_param("accept", param)
            calls.check_answer("rdma_accept", lib.rdma_accept(self._handle, raw))
            del kept
        self._refresh()
        return None if self.qp_type == QPType.UD else self._done(limit, "rdma_accept", _E.ESTABLISHED)

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse who wants to connect, with up to 148 bytes that say why (UDP: 136, iWARP: 251).

        Verb: rdma_reject
        """
        data = ConnParam(private_data=private_data).private_data
        calls.check_room("reject", self, data)
        with self._place.lock:
            calls.check("rdma_reject", lib.rdma_reject(self._handle, ffi.new("char[]", data), len(data)))

    def establish(self) -> None:
        """Tell the peer that the QP named in ``connect`` is in RTS.

        Verb: rdma_establish
        """
        with self._place.lock:
            calls.check("rdma_establish", lib.rdma_establish(self._handle))

    def disconnect(self, *, timeout: float | Deadline | None = 0.0) -> None:
        """End the connection: the QP goes to ERR (SQD on iWARP), and the peer gets ``DISCONNECTED``.

        The peer answers by the same call.

        Args:
            timeout: how long to wait for the answer; by default not at all.

        Raises:
            HandshakeTimeout: a wait was asked for, and the peer did not answer in time; it is ended all the same.

        Verb: rdma_disconnect
        """
        limit = calls.deadline(timeout)
        with self._place.lock:
            rc = lib.rdma_disconnect(self._handle)
            if not (rc < 0 and self.disconnected):  # there may be nothing left to end
                calls.check("rdma_disconnect", rc)
        self._refresh()
        if not self.disconnected and not limit.expired:
            self._done(limit, "rdma_disconnect", _E.DISCONNECTED)

    def join_multicast(
        self,
        address: Address,
        *,
        join_flags: MCJoinFlags = MCJoinFlags.FULLMEMBER,
        timeout: float | Deadline | None = 10.0,
    ) -> CMGroup:
        """Join a multicast group; its QP, if it has one, is attached to it. Closing the group leaves it.

        Args:
            address: the group's IP address; the port is of no meaning.
            join_flags: ``SENDONLY_FULLMEMBER`` only sends.

        Raises:
            CMMulticastError: it could not be joined.
            UnsupportedError: not on this transport; Linux has no IPv6 groups on RoCE v2.

        Verb: rdma_join_multicast_ex
        """
        kind = "CMGroup"
        limit = calls.deadline(timeout)
        group = cast("CMGroup", self._make(kind, address, join_flags))
        try:
            self._done(limit, "rdma_join_multicast", _E.MULTICAST_JOIN)
        except BaseException:
            group.close()
            raise
        return group

    def _conn_param(self, step: str, param: ConnParam | None) -> tuple[CData, CData]:
        param = ConnParam() if param is None else param
        if not isinstance(param, ConnParam):
            raise TypeError(f"{step} takes a ConnParam, not {param!r}")
        calls.check_room(step, self, param.private_data)
        if not param.qp_num and (self.qp is None or self.qp.closed) and (step, self.ps) != ("connect", PortSpace.UDP):
            raise StateError(f"{step}: there is no QP: call create_qp first, or name one with ConnParam(qp_num=…)")
        return write_conn_param(param)

    def _after_destroy(self) -> None:
        self.channel._forget(self)
        if self._sync:
            self.channel.close()
