"""The verbs objects of one connection: built together, closed together."""

from __future__ import annotations

import errno
import warnings
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv6Address

from .._base.args import Deadline
from .._base.made import Made
from .._control.base import ControlBase
from .._control.control import Peer
from .._memory.arena import arena
from .._objects.spares import Parts
from ..attr import AHAttr, GlobalRoute, QPCap
from ..comp_channel import CompChannel
from ..device import Context, DeviceAttr, PortAttr, open_device
from ..endpoint import Endpoint, Negotiated, negotiate, random_bits
from ..enums import MTU, AccessFlags, PortState, QPType, TransportType
from ..errors import (
    ClosedError,
    DeviceNotFoundError,
    HandshakeError,
    StateError,
    UnsupportedError,
    VerbsError,
    VerbsOSError,
)
from ..gid import GidEntry
from ..mr import MR, MRSlice
from ..pd import PD
from ..qp import QP, QPInitAttr
from ..srq import SRQ
from . import moves as _moves
from .engine import CREDIT_RECEIVES, HEADER, Engine, untold
from .hub import Hub
from .options import Options
from .receives import Receives
from .registry import Registry, allowed
from .settings import Settings, owner_of

__all__ = ["CELL", "Link", "aligned", "check_transport", "dropped", "fitting", "label_of"]

#: What a receive slot starts at a multiple of, and a message in it at a quarter of that.
_ALIGNED = 64
#: Bytes of one staging cell: what is not longer is copied instead of registered.
CELL = 4096
_INLINE = 64 + HEADER
#: How long a peer may take to read the goodbye, in seconds.
_FAREWELL = 1.0
#: How many states a QP has been in, once it is connected.
_ALL_STATES = 4


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


class Link:
    """The verbs objects of one connection.

    What a connection over librdmacm does in another way has a method of its own here.

    Raises:
        DeviceNotFoundError: no such device, or its port is not ACTIVE.
        GIDError: the port has no usable GID.
        UnsupportedError: the device connects through librdmacm only (iWARP).
        VerbsOSError: the device or the kernel refused.
    """

    #: Receives beside those for messages.
    _credit_receives = CREDIT_RECEIVES
    _control_receives = 0
    #: Whether the transport is iWARP, which has no immediates and no atomics.
    iwarp = False
    _engine: type[Engine] = Engine
    engine: Engine
    #: Who reads the completion channel, where that is not this link's alone.
    _hub: Hub | None = None
    #: Whether the path to the peer is that between the two records.
    _own_path = True
    #: Whether another connection may be made of the same objects.
    _again = True
    #: Where receives come from, where that is not the QP's own queue.
    _srq: SRQ | None = None

    def __init__(self, settings: Settings, control: ControlBase, peer: Peer, remote_gid: IPv6Address | None) -> None:
        self.peer = peer
        made = self._made = Made()
        try:
            self.context, self.port_num = self._open(made, settings, control.local_address)
            self.options = self._fit(settings.options)
            self.port = self._active_port()
            self.gid = self._choose_gid(settings, control.local_address, remote_gid)
            slots = self.options.recv_depth + self._spare
            parts = self._parts = self._take(made, settings, slots)
            self.pd, self.qp = parts.pd, parts.qp
            self.states = [self.qp.state]
            self.engine = self._engine(
                self.qp,
                staging=parts.staging,
                send_slots=self.options.send_depth,
                receives=self._receives(parts.ring, slots),
                peer=peer,
                hub=self._hub,
            )
            access = self.remote_access
            self.registry = self._registry(access)
            self._use_cache()
            self._to_init(access)
            self.engine.post_receives()
            self.endpoint = self._endpoint()
        except BaseException:
            with suppress(VerbsError):  # the first error counts; what is still open is closed when it is dropped
                made.close()
            raise

    def _take(self, made: Made, settings: Settings, slots: int) -> Parts:
        """Take what a connection like this was made of, or make it anew."""
        options, key = self.options, None
        if self._again and settings.device is self.context:
            key = options.send_depth, slots, self._slot_size
            if (parts := self.context._take_spare(key, self)) is not None:
                made.things += parts.things
                return parts
        self.pd, channel = self._domain(made)
        cq = made.keep(self.context.create_cq(options.send_depth + slots, channel))
        staging, ring = self._memory(made, slots)
        init = QPInitAttr(send_cq=cq, recv_cq=cq, cap=self._cap(_INLINE), qp_type=QPType.RC, srq=self._srq)
        parts = Parts(key, self.pd, channel, cq, staging, ring, made.keep(self._create_qp(init)))
        parts.owner = self
        return parts

    def _fit(self, options: Options) -> Options:
        """Cut the options to what the device allows."""
        return fitting(options, self.context.query_device(), self._credit_receives + self._control_receives)

    def _use_cache(self) -> None:
        """Let memory stay registered from one operation to the next."""
        self.engine.cache_bytes = self.options.registration_cache

    @property
    def _spare(self) -> int:
        """How many receives are posted beside ``recv_depth``."""
        return self._credit_receives + self._control_receives + untold(self.options.recv_depth)

    @property
    def _slot_size(self) -> int:
        """How many bytes each receive takes."""
        return self.options.max_message_size + HEADER

    def _open(self, made: Made, settings: Settings, local_address: str) -> tuple[Context, int]:
        """Open the device, and find the port: those that own the TCP connection's address first."""
        if isinstance(settings.device, Context):
            context = settings.device
        elif settings.device is None and (owner := owner_of(local_address)):
            context = made.keep(owner[0])
            if settings.port_num is None:
                return context, owner[1]
        else:
            context = made.keep(open_device(settings.device))
        if settings.port_num is not None:
            return context, context.check_port(settings.port_num)
        if context.query_device().phys_port_cnt == 1:
            return context, 1
        return context, context.active_port() or 1

    def _domain(self, made: Made) -> tuple[PD, CompChannel]:
        """Return where memory is registered, and what tells of completions."""
        return made.keep(self.context.alloc_pd()), made.keep(self.context.create_comp_channel())

    def _check_transport(self) -> None:
        check_transport(self.context)

    def _active_port(self) -> PortAttr:
        self._check_transport()
        port = self.context.query_port(self.port_num)
        if port.state != PortState.ACTIVE:
            raise DeviceNotFoundError(
                f"{self.context.name} port {self.port_num} is {port.state.name}, not ACTIVE: bring its link up"
                " (ip link set … up), or choose another port"
            )
        return port

    def _choose_gid(self, settings: Settings, local_address: str, remote_gid: IPv6Address | None) -> GidEntry:
        index, ip, netdev = settings.gid_index, settings.gid_ip, settings.gid_netdev
        return self.context._choose_gid(self.port_num, local_address, remote_gid, index, ip, netdev)

    def _memory(self, made: Made, slots: int) -> tuple[MRSlice, MRSlice | None]:
        """Make the memory of the cells and of the receive slots: one region, but where they differ in access."""
        cells, ring = self.options.send_depth * (CELL + HEADER), slots * aligned(self._slot_size)
        if self.read_access != AccessFlags.LOCAL_WRITE:
            return self._alloc(made, cells, self.read_access)[:], self._alloc(made, ring, AccessFlags.LOCAL_WRITE)[:]
        start = aligned(cells)
        region = self._alloc(made, start + ring, AccessFlags.LOCAL_WRITE)
        return region[:cells], region[start:]

    def _alloc(self, made: Made, nbytes: int, access: AccessFlags) -> MR:
        try:
            memory = arena(nbytes)
        except (OSError, OverflowError) as error:
            raise VerbsOSError(
                errno.ENOMEM,
                "mmap",
                f"recv_depth × max_message_size and send_depth cells of this connection come to {nbytes} bytes",
            ) from error
        return made.keep(self.pd.reg_mr(memory, access))

    def _create_qp(self, init: QPInitAttr) -> QP:
        try:
            return self.pd.create_qp(init)
        except VerbsOSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        # Inline data is an extra that no query tells about: some devices take none.
        return self.pd.create_qp(replace(init, cap=self._cap(0)))

    def _receives(self, ring: MRSlice | None, slots: int) -> Receives:
        """Return where messages arrive."""
        assert ring is not None
        return Receives(ring, self._slot_size, slots, self.qp)

    def _registry(self, remote_access: AccessFlags) -> Registry:
        """Make what keeps the memory that the caller registers."""
        return Registry(self.pd, self.engine, self.peer, remote_access)

    def _cap(self, inline: int) -> QPCap:
        return QPCap(
            max_send_wr=self.options.send_depth,
            max_recv_wr=self.options.recv_depth + self._spare,
            max_send_sge=2,  # the header, and what it stands in front of
            max_recv_sge=1,
            max_inline_data=inline,
        )

    @property
    def remote_access(self) -> AccessFlags:
        """What the device lets a peer do at all."""
        return allowed(self.context.query_device())

    @property
    def read_access(self) -> AccessFlags:
        """What memory needs that is read into."""
        return AccessFlags.LOCAL_WRITE

    @property
    def told_domain(self) -> int:
        """What the peer knows the memory as that is registered for this connection."""
        return self.pd.domain

    @property
    def _told_qp_num(self) -> int:
        return self.qp.qp_num

    def _endpoint(self) -> Endpoint:
        options = self.options
        return Endpoint(
            qp_num=self._told_qp_num,
            psn=random_bits(24),
            lid=self.port.lid,
            gid=self.gid.gid,
            link_layer=self.port.link_layer,
            mtu=min(MTU(options.path_mtu or self.port.active_mtu), self.port.active_mtu),
            max_rd_atomic=options.max_rd_atomic,
            max_dest_rd_atomic=options.max_dest_rd_atomic,
            max_message_size=options.max_message_size,
            recv_depth=options.recv_depth + untold(options.recv_depth),
            credit_depth=self._credit_receives,
            max_msg_sz=self.port.max_msg_sz,
            nonce=random_bits(64),
        )

    def to_rts(self, remote: Endpoint) -> None:
        """Bring the QP through RTR to RTS, with what both sides can do.

        Raises:
            HandshakeError: the sides cannot talk to each other.
            RouteError: no path leads to the peer's GID.
            VerbsOSError: the verb refused.
        """
        self.agree(remote)
        self._to_rtr(remote)
        options, agreed = self.options, self.agreed
        if not _moves.to_rts(self.engine._c, self.qp, options, self.endpoint.psn, agreed):
            self.qp.to_rts(
                sq_psn=self.endpoint.psn,
                timeout=options.ack_timeout_exp,
                retry_cnt=options.retry_cnt,
                rnr_retry=options.rnr_retry,
                max_rd_atomic=agreed.max_rd_atomic,
            )
        self.states.append(self.qp.state)

    def _to_init(self, access: AccessFlags) -> None:
        """Bring the QP to INIT."""
        if not _moves.to_init(self.engine._c, self.qp, self.port_num, self.options, access):
            pkey_index = self.options.pkey_index
            self.qp.to_init(port_num=self.port_num, pkey_index=pkey_index, qp_access_flags=access)
        self.states.append(self.qp.state)

    def _to_rtr(self, remote: Endpoint) -> None:
        """Bring the QP to RTR."""
        agreed, index = self.agreed, self.gid.gid_index if self._routed else None
        if not (
            self._own_path
            and _moves.to_rtr(self.engine._c, self.qp, self.port_num, index, self.options, remote, agreed)
        ):
            self.qp.to_rtr(
                ah_attr=self._path(remote),
                dest_qp_num=remote.qp_num,
                rq_psn=remote.psn,
                path_mtu=agreed.path_mtu,
                max_dest_rd_atomic=agreed.max_dest_rd_atomic,
                min_rnr_timer=self.options.min_rnr_timer_code,
            )
        self.states.append(self.qp.state)

    def introduce(self, settings: Settings, deadline: Deadline) -> None:
        """Queue this side's record, its domain, and which buffers the peer has from the start."""
        self._greet()
        self.registry.register_all(settings, deadline)

    def _greet(self) -> None:
        self.peer.control.channel.hello(self.endpoint)
        self.peer.control.channel.domain(self.pd.domain)

    def agree(self, remote: Endpoint) -> None:
        """Work out what both sides can do, and begin to count receives.

        Raises:
            HandshakeError: they cannot talk to each other.
        """
        self.remote = remote
        self.peer.connection = remote.nonce or 1
        self.agreed: Negotiated = negotiate(self.endpoint, remote, HEADER)
        self.engine.grant(self.options.recv_depth, remote.recv_depth, immediates=not self.iwarp)

    @property
    def _routed(self) -> bool:
        """Whether its packets need a global route."""
        return self.port.grh_required

    def _path(self, remote: Endpoint) -> AHAttr:
        options, grh = self.options, None
        if self._routed:
            grh = GlobalRoute(
                dgid=remote.gid,
                sgid_index=self.gid.gid_index,
                hop_limit=options.hop_limit,
                traffic_class=options.traffic_class,
            )
        return AHAttr(port_num=self.port_num, dlid=remote.lid, sl=options.sl, grh=grh)

    # ------------------------------------------------------------ the end

    def end(self, deadline: Deadline, why: ClosedError) -> None:
        """Say goodbye, end every request, destroy everything; may be tried again after an interrupt."""
        control, news = self.peer.control, self.registry.fall_silent()
        with control.lock:  # once for all, where nobody has to be waited for: to ask for it again takes time
            said = not news or self._say_goodbye()
            rested = said and not self.registry.used and self.engine.rest(why)
        if rested:
            self.close()  # without the lock: whoever has just named a region holds that of the names, and waits for it
            control.close()
            return
        if not said:
            with suppress(HandshakeError, StateError):
                control.flush(deadline.sooner(_FAREWELL))
        self._part(deadline, why)
        if self._parts.owner is self and not (self.registry.regions_only and self.engine.rest(why)):
            self.engine.fail(why)
            if self.engine.stop_qp():  # again, in case that an interrupt came between the two
                self.engine.drain(deadline)
        self.close()
        control.close()

    def _say_goodbye(self) -> bool:
        """Queue the goodbye, which withdraws every name as well, and send it; say whether nothing is left to send."""
        with suppress(HandshakeError, StateError):
            self.peer.say(lambda channel: channel.goodbye())
            return self.peer.control.send_now()
        return True  # there is nobody to be told

    def _part(self, deadline: Deadline, why: ClosedError) -> None:
        """Do what must come between the goodbye and the end of the QP."""

    def close(self) -> None:
        """Destroy everything that belongs to this connection alone, or keep it for another; may be tried again."""
        self.registry.fall_silent()
        if not self._lay_by():
            self.qp.close()  # and the engine before it
            self.registry.close()
            self._made.close()

    def _lay_by(self) -> bool:
        """Keep what this is made of for the next connection, where this one has ended in good order; say whether."""
        parts = self._parts
        if parts.key is None:
            return False
        if parts.owner is not self:  # it was kept before an interrupt
            return True
        engine, orderly = self.engine, self.peer.control.channel.error is None  # a peer that left has said so
        if len(self.states) < _ALL_STATES or not (orderly and engine.clean and self.registry.regions_only):
            return False
        with suppress(VerbsError):
            engine.close()
            if not engine.rested:
                self.qp.to_reset()
            seen = engine.close_cache() or self.registry.used  # by what was made in it, the caller knows the PD
            self.registry.close()
            return self.context._lay_by(parts, anew=seen)
        return False


def fitting(options: Options, limits: DeviceAttr, extra: int) -> Options:
    """Cut the options to what a device allows, with so many receives beside those for messages."""
    fitted = options.within(limits)
    most = max(1, (min(limits.max_qp_wr, limits.max_cqe // 2) - extra) * 2 // 3)
    return fitted if fitted.recv_depth <= most else replace(fitted, recv_depth=most)


def check_transport(context: Context) -> None:
    """Refuse a device whose QPs cannot be connected by hand.

    Raises:
        UnsupportedError: it is iWARP.
    """
    if context.transport_type == TransportType.IWARP:
        raise UnsupportedError(
            errno.EOPNOTSUPP,
            "connect",
            f"{context.name} is iWARP, which connects through librdmacm only: use pyverbs_lite.cm",
        )


def label_of(link: Link, closed: bool = False) -> str:
    """Return how texts name a connection."""
    state = "closed" if closed else f"QP {link.qp.qp_num:#x} to {link.remote.qp_num:#x}"
    return f"<Connection with {link.peer.control.peer}, {state}>"


def dropped(link: Link) -> None:
    """Close what nobody closed, and say so; runs wherever the garbage collector does, and at exit."""
    if link.engine.foreign:
        return
    label = label_of(link)
    try:
        link.end(Deadline(0.5), ClosedError(f"{label} was dropped"))
        outcome = "it was closed now; use close() or a with block"
    except Exception as error:
        outcome = f"and could not be closed: {error}"
    # Where warnings are errors this raises, and a finaliser has nobody to raise to.
    with suppress(Exception):
        warnings.warn(f"{label} was never closed ({outcome})", ResourceWarning, stacklevel=2)
