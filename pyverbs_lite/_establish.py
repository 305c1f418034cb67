"""From a connected TCP socket to a QP in RTS on both sides.

The order is the same on both sides: create QP → INIT → post receives → swap records → RTR → RTS → swap "ready". So
the first message never meets an empty receive queue. The side that accepted reads the other's record before it
makes anything, so a stranger costs it nothing, and it can pick a GID of the same kind.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from ipaddress import IPv6Address

from . import gid
from ._args import Deadline
from ._buffer import Memory, as_bytes_view
from ._control import Control, Peer
from ._engine import Engine
from ._options import Options
from .attr import AHAttr, GlobalRoute, QPCap
from .device import Context, PortAttr, devices, open_device
from .endpoint import Endpoint, Negotiated, negotiate
from .enums import AccessFlags, AtomicCap, LinkLayer, PortState, QPType, TransportType
from .errors import DeviceNotFoundError, HandshakeError, RouteError, StateError, UnsupportedError, VerbsOSError
from .gid import GidEntry
from .mr import MR
from .qp import QPInitAttr
from .remote import RemoteBuffer
from .wire import (
    BufferAdded,
    BufferWithdrawn,
    HelloReceived,
    ReadyReceived,
    RefuseCode,
)

__all__ = ["CELL", "Link", "NamedMR", "Settings", "establish"]

#: Bytes of one staging cell: what is not longer is copied instead of registered.
CELL = 4096
_INLINE = 64
_REMOTE = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which device, port and GID to use, and how; None leaves the choice to the library."""

    device: str | Context | None = None
    port_num: int | None = None
    gid_index: int | None = None
    gid_ip: str | None = None
    gid_netdev: str | None = None
    options: Options


class NamedMR(MR):
    """A region that the peer knows by name; the peer is told before it goes."""

    def __init__(self, link: Link, buffer: Memory, access: AccessFlags | None, name: str | None) -> None:
        super().__init__(link.pd, buffer, access)
        self.name = name
        self._peer = link.peer

    def _before_destroy(self) -> None:
        super()._before_destroy()
        if self.name is not None:
            name, self.name = self.name, None
            with suppress(HandshakeError):  # whoever is gone need not be told
                self._peer.tell(lambda channel: channel.withdraw(name), Deadline(1.0))


class Link:
    """The verbs objects of one connection: built together, closed together.

    Raises:
        DeviceNotFoundError: no such device, or its port is not ACTIVE.
        GIDError: the port has no usable GID.
        UnsupportedError: the device connects through librdmacm only (iWARP).
        VerbsOSError: the device or the kernel refused.
    """

    def __init__(self, settings: Settings, control: Control, remote_gid: IPv6Address | None) -> None:
        self._settings = settings
        self._stack = ExitStack()
        #: What was registered for the peer; a region lives until it or the connection is closed.
        self.registered: list[NamedMR] = []
        with ExitStack() as stack:  # unwinds what was built if the rest fails
            self.context, self.port_num = self._open(stack, settings, control.local_address)
            self.options = settings.options.within(self.context.query_device())
            self.port = self._active_port()
            self.gid = self._choose_gid(control.local_address, remote_gid)
            self.peer = Peer(control)
            self.pd = stack.enter_context(self.context.alloc_pd())
            channel = stack.enter_context(self.context.create_comp_channel())
            depth = self.options.send_depth + self.options.recv_depth
            cq = stack.enter_context(self.context.create_cq(depth, channel))
            ring = self.pd.alloc(self.options.recv_depth * self.options.max_message_size, AccessFlags.LOCAL_WRITE)
            staging = self.pd.alloc(self.options.send_depth * CELL, AccessFlags.LOCAL_WRITE)
            init = QPInitAttr(send_cq=cq, recv_cq=cq, cap=self._cap(_INLINE), qp_type=QPType.RC)
            try:
                self.qp = self.pd.create_qp(init)
            except VerbsOSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                # Inline data is an extra that no query tells about: some devices take none.
                init = QPInitAttr(send_cq=cq, recv_cq=cq, cap=self._cap(0), qp_type=QPType.RC)
                self.qp = self.pd.create_qp(init)
            self.states = [self.qp.state]
            self.engine = Engine(
                self.qp,
                staging=staging,
                cell=CELL,
                send_slots=self.options.send_depth,
                ring=ring,
                recv_slots=self.options.recv_depth,
                peer=self.peer,
            )
            self.qp.to_init(
                port_num=self.port_num, pkey_index=self.options.pkey_index, qp_access_flags=self.remote_access
            )
            self.states.append(self.qp.state)
            self.engine.post_receives()
            self.endpoint = self._endpoint()
            self._stack = stack.pop_all()

    @staticmethod
    def _open(stack: ExitStack, settings: Settings, local_address: str) -> tuple[Context, int]:
        """Open the device, and find the port: those that own the TCP connection's address first."""
        if isinstance(settings.device, Context):
            context = settings.device
        elif settings.device is None and (owner := _owner_of(local_address)):
            context = stack.enter_context(Context(owner[0]))
            if settings.port_num is None:
                return context, owner[1]
        else:
            context = stack.enter_context(open_device(settings.device))
        if settings.port_num is not None:
            return context, context.check_port(settings.port_num)
        return context, context.active_port() or 1

    def _active_port(self) -> PortAttr:
        if self.context.transport_type == TransportType.IWARP:
            raise UnsupportedError(
                errno.EOPNOTSUPP, "connect", f"{self.context.name} is iWARP, which connects through librdmacm only"
            )
        port = self.context.query_port(self.port_num)
        if port.state != PortState.ACTIVE:
            raise DeviceNotFoundError(
                f"{self.context.name} port {self.port_num} is {port.state.name}, not ACTIVE: bring its link up"
                " (ip link set … up), or choose another port"
            )
        return port

    def _choose_gid(self, local_address: str, remote_gid: IPv6Address | None) -> GidEntry:
        settings = self._settings
        return gid.choose(
            self.context.gid_table(self.port_num),
            link_layer=self.port.link_layer,
            device=self.context.name,
            port_num=self.port_num,
            gid_tbl_len=self.port.gid_tbl_len,
            local_address=local_address,
            remote_gid=remote_gid,
            gid_index=settings.gid_index,
            gid_ip=settings.gid_ip,
            gid_netdev=settings.gid_netdev,
        )

    def _cap(self, inline: int) -> QPCap:
        return QPCap(
            max_send_wr=self.options.send_depth,
            max_recv_wr=self.options.recv_depth,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=inline,
        )

    @property
    def remote_access(self) -> AccessFlags:
        """What the device lets a peer do at all."""
        atomics = self.context.query_device().atomic_cap != AtomicCap.NONE
        return _REMOTE if atomics else _REMOTE & ~AccessFlags.REMOTE_ATOMIC

    def _endpoint(self) -> Endpoint:
        options = self.options
        return Endpoint(
            qp_num=self.qp.qp_num,
            psn=secrets.randbits(24),
            lid=self.port.lid,
            gid=self.gid.gid,
            link_layer=self.port.link_layer,
            mtu=options.path_mtu or self.port.active_mtu,  # type: ignore[arg-type]
            max_rd_atomic=options.max_rd_atomic,
            max_dest_rd_atomic=options.max_dest_rd_atomic,
            max_message_size=options.max_message_size,
            recv_depth=options.recv_depth,
            max_msg_sz=self.port.max_msg_sz,
            nonce=secrets.randbits(64),
        )

    def to_rts(self, remote: Endpoint) -> None:
        """Bring the QP through RTR to RTS, with what both sides can do.

        Raises:
            HandshakeError: the sides cannot talk to each other.
            RouteError: no path leads to the peer's GID.
            VerbsOSError: the verb refused.
        """
        self.remote = remote
        self.agreed: Negotiated = negotiate(self.endpoint, remote)
        options = self.options
        grh = None
        if self.port.grh_required or self.port.link_layer == LinkLayer.ETHERNET:
            grh = GlobalRoute(
                dgid=remote.gid,
                sgid_index=self.gid.gid_index,
                hop_limit=options.hop_limit,
                traffic_class=options.traffic_class,
            )
        self.qp.to_rtr(
            ah_attr=AHAttr(port_num=self.port_num, dlid=remote.lid, sl=options.sl, grh=grh),
            dest_qp_num=remote.qp_num,
            rq_psn=remote.psn,
            path_mtu=self.agreed.path_mtu,
            max_dest_rd_atomic=self.agreed.max_dest_rd_atomic,
            min_rnr_timer=options.min_rnr_timer_code,
        )
        self.states.append(self.qp.state)
        self.qp.to_rts(
            sq_psn=self.endpoint.psn,
            timeout=options.ack_timeout_exp,
            retry_cnt=options.retry_cnt,
            rnr_retry=options.rnr_retry,
            max_rd_atomic=self.agreed.max_rd_atomic,
        )
        self.states.append(self.qp.state)

    def register(self, buffer: Memory, access: AccessFlags | None, name: str | None, deadline: Deadline) -> NamedMR:
        """Register a buffer, and tell the peer if it has a name."""
        if access is None:
            access = AccessFlags.REMOTE_READ
            if not _is_readonly(buffer):
                access = AccessFlags.LOCAL_WRITE | self.remote_access
        region = NamedMR(self, buffer, access, None)
        try:
            if name is not None:
                remote = RemoteBuffer.of(region, name=name, access=region.access)
                self.peer.tell(lambda channel: channel.buffer(remote), deadline)
                region.name = name
        except BaseException:
            region.close()
            raise
        self.registered = [*(kept for kept in self.registered if not kept.closed), region]
        return region

    def close(self) -> None:
        """Destroy everything that belongs to this connection alone."""
        self.qp.close()
        self._stack.close()


def _owner_of(local_address: str) -> tuple[str, int] | None:
    """Find the device and the port that have an address in their GID table."""
    try:
        wanted = gid.parse_gid(local_address.partition("%")[0])
    except ValueError:
        return None
    for info in devices():
        if info.transport_type == TransportType.IWARP:
            continue
        with Context(info.name) as context:
            for port_num in range(1, context.query_device().phys_port_cnt + 1):
                active = context.query_port(port_num).state == PortState.ACTIVE
                if active and any(row.gid == wanted for row in context.gid_table(port_num)):
                    return info.name, port_num
    return None


def _is_readonly(buffer: Memory) -> bool:
    return as_bytes_view(buffer, what="a buffer to register").readonly


def establish(
    control: Control,
    settings: Settings,
    buffers: Mapping[str, Memory],
    deadline: Deadline,
    *,
    accepting: bool,
) -> Link:
    """Run the handshake; on any failure the peer is told why, and everything is closed again.

    Raises:
        HandshakeError: or the subclass that says what the peer did, or did not do in time.
        As ``Link``, for what this side lacks.
    """
    channel = control.channel
    news: list[BufferAdded | BufferWithdrawn] = []
    link: Link | None = None
    try:
        hello = control.expect(HelloReceived, deadline, news) if accepting else None
        link = Link(settings, control, hello.endpoint.gid if hello else None)
        channel.hello(link.endpoint)
        for name, buffer in buffers.items():
            link.register(buffer, None, name, deadline)
        control.flush(deadline)
        hello = hello or control.expect(HelloReceived, deadline, news)
        link.to_rts(hello.endpoint)
        channel.ready()
        control.flush(deadline)
        control.expect(ReadyReceived, deadline, news)
        for event in news:
            link.peer.note(event)
        link.engine.watch_peer()
    except BaseException as error:
        _tell_why(control, error)
        if link is not None:
            link.close()
        control.close()
        raise
    return link


def _tell_why(control: Control, error: BaseException) -> None:
    """Let the peer's error say what went wrong here, if it is still there to hear it."""
    codes = ((RouteError, RefuseCode.ROUTE), (HandshakeError, RefuseCode.PROTOCOL), (OSError, RefuseCode.RESOURCES))
    code = next((code for kind, code in codes if isinstance(error, kind)), RefuseCode.OTHER)
    text = str(error) if isinstance(error, Exception) else "it was interrupted"
    with suppress(HandshakeError, StateError):
        if control.channel.error is None:  # else the channel has queued its own refusal
            control.channel.refuse(code, text)
        control.flush(Deadline(1.0))
