"""The verbs objects of a connection over librdmacm."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv6Address

from .._base.args import Deadline
from .._base.made import Made
from .._connection.engine import CREDIT_RECEIVES, HEADER
from .._connection.link import Link
from .._connection.options import Options
from .._connection.settings import Settings
from .._control.control import Peer
from .._control.framed import CONTROL_RECEIVES, FramedEngine
from ..attr import AHAttr
from ..cm_events import ConnParam
from ..device import Context
from ..endpoint import Endpoint
from ..enums import AccessFlags, GIDType, QPState, TransportType
from ..errors import ClosedError, DeviceNotFoundError, GIDError, HandshakeError, PeerProtocolError, VerbsError
from ..gid import GidEntry
from .control import CONTROL_CHUNK, CMControl
from .keep_alive import keep_asking

__all__ = ["CMLink"]

#: How long the peer may take to confirm the end, on iWARP.
_PARTING = 0.5
_PLAIN = Options()


class CMLink(Link):
    """The verbs objects of a connection whose addresses librdmacm has resolved; the QP is moved as any other.

    The device is opened anew, or is the caller's: the kernel knows a QP by its number. The path is the connection
    manager's, and PSNs and depths are those of the records, so everything in ``ConnectionInfo`` is as over TCP. On
    iWARP the kernel brings the QP to RTS by itself.

    Raises:
        DeviceNotFoundError, GIDError: the address is not on the device, port or GID that was asked for.
        As ``Link``.
    """

    _credit_receives = CREDIT_RECEIVES + 2  # control bytes are told of by the half
    _control_receives = CONTROL_RECEIVES
    _own_path = False
    _again = False  # a connection manager takes the number of a QP that it has just seen for one that is over
    _engine = FramedEngine
    engine: FramedEngine

    def __init__(self, settings: Settings, control: CMControl, peer: Peer) -> None:
        self.id = control.id
        self._asking: threading.Event | None = None
        super().__init__(settings, control, peer, None)
        control.attach(self.engine)

    def _open(self, made: Made, settings: Settings, local_address: str) -> tuple[Context, int]:
        borrowed, port_num = self.id.context, self.id.port_num
        self.iwarp = borrowed.transport_type == TransportType.IWARP
        asked = settings.device.name if isinstance(settings.device, Context) else settings.device
        if asked not in (None, borrowed.name) or settings.port_num not in (None, port_num):
            wanted = f"{asked or borrowed.name} port {settings.port_num or port_num}"
            raise DeviceNotFoundError(
                f"{local_address} is an address of {borrowed.name} port {port_num}, not of {wanted}: the connection"
                " manager takes the device from the address; give gid_ip=, an address of the device, to connect from"
            )
        if isinstance(settings.device, Context):
            return settings.device, port_num
        return made.keep(Context(borrowed.name)), port_num

    def _check_transport(self) -> None:
        pass  # every transport that has a connection manager

    def _fit(self, options: Options) -> Options:
        fitted = super()._fit(options)
        pkey_index = self.id.init_qp_attr(QPState.INIT).pkey_index
        return replace(
            fitted,
            send_depth=max(fitted.send_depth, 1 + self.iwarp),  # a write with an immediate is two requests on iWARP
            pkey_index=fitted.pkey_index if pkey_index is None else pkey_index,
        )

    @property
    def _slot_size(self) -> int:
        return max(self.options.max_message_size, CONTROL_CHUNK) + HEADER

    def _choose_gid(self, settings: Settings, local_address: str, remote_gid: IPv6Address | None) -> GidEntry:
        table = self.context.gid_table(self.port_num)
        if self.iwarp:  # its only row is a name of the device and no address
            return table[0]
        rows = [row for row in table if row.gid == self.id.sgid]
        rows.sort(key=lambda row: row.gid_type != GIDType.ROCE_V2)
        if not rows:
            raise GIDError(f"{self.context.name} port {self.port_num} has the GID {self.id.sgid} no more")
        index, netdev = settings.gid_index, settings.gid_netdev
        chosen = [row for row in rows if index in (None, row.gid_index) and netdev in (None, row.netdev)]
        if not chosen:
            raise GIDError(
                f"{local_address} is GID index {rows[0].gid_index} ({rows[0]}) of {self.context.name}, not gid_index"
                f" {index}, gid_netdev {netdev!r}: the connection manager takes the GID from the address; give gid_ip="
            )
        return chosen[0]

    @property
    def read_access(self) -> AccessFlags:
        """What memory needs that is read into: on iWARP the data of a read are written by the peer."""
        access = super().read_access
        return access | AccessFlags.REMOTE_WRITE if self.iwarp else access

    @property
    def _told_qp_num(self) -> int:
        # On iWARP it is no part of any packet, and may be any number of 32 bits: brought into the record's range.
        return 2 + self.qp.qp_num % 0xFFFFFD if self.iwarp else self.qp.qp_num

    def _endpoint(self) -> Endpoint:
        endpoint, path_mtu = super()._endpoint(), self.id.path_mtu
        return replace(
            endpoint,
            mtu=endpoint.mtu if path_mtu is None else min(endpoint.mtu, path_mtu),
        )

    def agree(self, remote: Endpoint) -> None:
        """Work out what both sides can do, and begin to count receives."""
        if remote.credit_depth < self._credit_receives:
            raise HandshakeError(
                f"the peer keeps {remote.credit_depth} receives for credits, and this side may send"
                f" {self._credit_receives} before the peer has noticed one"
            )
        super().agree(remote)

    def to_rts(self, remote: Endpoint) -> None:
        """Bring the QP to RTS; on iWARP only work out what both sides can do."""
        if self.iwarp:
            self.agree(remote)
        else:
            super().to_rts(remote)

    def watch(self, seconds: float | None) -> None:
        """Notice the peer's news from now on, and with ``seconds`` also that its host is gone."""
        self.engine.watch_peer()
        self.engine.read_peer()  # what came between the messages until now wakes nobody
        if seconds:
            self._asking = keep_asking(self.engine, seconds)

    def close(self) -> None:
        """Destroy everything that belongs to this connection alone; may be tried again."""
        if self._asking is not None:
            self._asking.set()
        super().close()

    def in_rts(self) -> None:
        """Take note that the connection manager has brought the QP to RTS."""
        if self.iwarp:
            self.qp.query()
            self.states.append(self.qp.state)

    def _path(self, remote: Endpoint) -> AHAttr:
        attr, options = self.id.init_qp_attr(QPState.RTR), self.options
        if attr.dest_qp_num != remote.qp_num or attr.ah_attr is None:
            raise PeerProtocolError(
                f"the peer's record names QP {remote.qp_num:#x}, and its connection manager {attr.dest_qp_num or 0:#x}"
            )
        path = attr.ah_attr
        if path.grh is not None:  # the path's own, unless something else was asked for
            names = ("hop_limit", "traffic_class")
            asked = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(_PLAIN, name)}
            grh = replace(path.grh, **asked)
            path = replace(path, grh=grh)
            rows = {row.gid_index: row for row in self.context.gid_table(self.port_num)}
            self.gid = rows.get(grh.sgid_index, self.gid)  # several rows may have the address
        return replace(path, sl=options.sl) if options.sl else path

    def conn_param(self, private_data: bytes) -> ConnParam:
        """Return what the connection manager is to tell the peer's."""
        depths = self.options if not hasattr(self, "agreed") else self.agreed
        return ConnParam(
            private_data=private_data,
            qp_num=self.qp.qp_num,
            responder_resources=depths.max_dest_rd_atomic,
            initiator_depth=depths.max_rd_atomic,
            retry_count=self.options.retry_cnt,
            rnr_retry_count=self.options.rnr_retry,
        )

    def end(self, deadline: Deadline, why: ClosedError) -> None:
        """Say goodbye, end every request, destroy everything; may be tried again after an interrupt."""
        self.engine.ending = why
        super().end(deadline, why)

    def _part(self, deadline: Deadline, why: ClosedError) -> None:
        # To end the QP resets its TCP connection, and with it goes what the peer has not read yet.
        if self.iwarp:
            self.engine.leave(why)
            with suppress(VerbsError):
                self.id.disconnect(timeout=deadline.at_most(_PARTING))
