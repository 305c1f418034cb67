"""What the connections of a server have in common, and the link of such a connection."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from ipaddress import IPv6Address

from .._base.args import Deadline
from .._base.made import Made
from .._connection.engine import HEADER, Engine, untold
from .._connection.hub import Hub
from .._connection.link import CELL, Link, aligned, check_transport, fitting
from .._connection.options import Options
from .._connection.receives import Receives
from .._connection.registry import KeepsAlive, Named, Registry, allowed, offered
from .._connection.settings import Settings, check_name, owner_of, port_of
from .._control.control import Control, Peer
from .._memory.buffer import Memory
from ..attr import QPCap
from ..comp_channel import CompChannel
from ..device import Context, open_device
from ..enums import AccessFlags
from ..errors import ClosedError, HandshakeError, PeerClosedError, StateError, VerbsError
from ..mr import MR, MRSlice
from ..pd import PD
from ..regcache import RegistrationCache
from ..remote import REMOTE, RemoteBuffer
from ..wire import Channel
from .srq_pool import SRQPool

__all__ = ["ServerLink", "Shared", "SharedMR"]


class SharedMR(MR):
    """A region that every peer of a server may know by name; they are told before it goes."""

    def __init__(self, shared: Shared, buffer: Memory, access: AccessFlags) -> None:
        super().__init__(shared.pd, buffer, access)
        self.name: str | None = None
        self._shared = shared

    def _before_destroy(self) -> None:
        super()._before_destroy()
        if self.name is not None:
            self._shared.withdraw(self.name, self)
            self.name = None


class Shared(KeepsAlive):
    """One context and one protection domain for many connections, and the buffers that all peers are offered.

    Args:
        settings: as for one connection.
        local_address: the address that is listened on, for choosing the device.
        connections: how many there may be at a time.
        flush_later: sends what a control connection does not take at once.

    Attributes:
        cache: what the connections keep registered, or None.
        naming: held while names and links change. Nothing waits with it; it is taken after a link's own lock of this
            kind, and before a control channel's.
        links: the connections, from the moment on that their peers are told of names.
        named: name -> region: what every peer is offered.

    Raises:
        DeviceNotFoundError: no such device.
        As ``PD.reg_mr``, for ``settings.buffers``.
    """

    def __init__(
        self, settings: Settings, local_address: str, connections: int, flush_later: Callable[[Control], None]
    ) -> None:
        super().__init__()
        self.settings = settings
        self._flush_later = flush_later
        self.links: set[ServerLink] = set()
        self.named: dict[str, SharedMR] = {}
        self._closed = False
        with ExitStack() as stack:
            self.context = self._open(stack, local_address)
            check_transport(self.context)
            self.limits = self.context.query_device()
            self.options = fitting(settings.options, self.limits, ServerLink._credit_receives)
            if settings.port_num is not None:
                self.context.check_port(settings.port_num)
            self.pd = stack.enter_context(self.context.alloc_pd())
            self.channel = stack.enter_context(self.context.create_comp_channel())
            self.hub = stack.enter_context(Hub(self.channel, self._all_failed))
            size = self.options.max_message_size + HEADER
            share = self.options.recv_depth + ServerLink._credit_receives + untold(self.options.recv_depth)
            self.pool = SRQPool(self.pd, size, aligned(size), share, connections)
            stack.callback(self.pool.close)
            self.cache: RegistrationCache | None = None
            if self.options.registration_cache:
                cache = RegistrationCache(self.pd, max_bytes=self.options.registration_cache)
                cache._quiet = True  # the QPs go before it
                self.cache = stack.enter_context(cache)
            for name, buffer in settings.buffers.items():
                self.register(buffer, name, None)
            self._stack = stack.pop_all()

    def _open(self, stack: ExitStack, local_address: str) -> Context:
        device = self.settings.device
        if isinstance(device, Context):
            return device
        if device is None and (owner := owner_of(local_address)):
            return stack.enter_context(owner[0])
        return stack.enter_context(open_device(device))

    def port_for(self, local_address: str) -> int:
        """Return the port that has an address, or else the first that is ACTIVE."""
        if self.settings.port_num is not None:
            return self.settings.port_num
        if self.limits.phys_port_cnt == 1:
            return 1
        return port_of(self.context, local_address) or self.context.active_port() or 1

    @property
    def remote_access(self) -> AccessFlags:
        """What the device lets a peer do at all."""
        return allowed(self.limits)

    # ------------------------------------------------------------ names

    def register(self, buffer: Memory, name: str, access: AccessFlags | None) -> SharedMR:
        """Register a buffer once, and offer it to every peer that is there or will be."""
        check_name(name)
        if access is None:
            access = offered(buffer, f"buffer {name!r}", self.remote_access)
        elif not AccessFlags(access) & REMOTE:
            raise ValueError(f"a buffer named {name!r} with {access!r} is of no use to the peers: allow remote access")
        region = SharedMR(self, buffer, access)
        try:
            with self.naming:
                if self._closed:
                    raise ClosedError("register: this server has stopped")
                self.check_free(name)
                for link in self.links:
                    if name in link.registry.named:
                        raise StateError(
                            f"the name {name!r} is taken by a buffer of the connection {link.peer.control.peer}"
                        )
                remote = RemoteBuffer.of(region, name=name, access=region.access)
                self.named[name] = region
                region.name = name
                self.keep(region)
                for link in tuple(self.links):
                    self._tell(link, lambda channel: channel.buffer(remote))
        except BaseException:
            region.close()
            raise
        return region

    def check_free(self, name: str) -> None:
        """Refuse a name that all peers know already."""
        if name in self.named:
            raise StateError(f"the name {name!r} is taken by {self.named[name]!r} of the server: close that first")

    def withdraw(self, name: str, region: SharedMR) -> None:
        """Tell every peer that a region goes away."""
        with self.naming:
            if self.named.get(name) is not region:
                return
            del self.named[name]
            for link in tuple(self.links):
                self._tell(link, lambda channel: channel.withdraw(name))

    def _tell(self, link: ServerLink, what: Callable[[Channel], None]) -> None:
        with suppress(HandshakeError, StateError):  # one that is on its way out
            link.peer.say(what)
            if not link.control.send_now():
                self._flush_later(link.control)

    def introduce(self, link: ServerLink) -> None:
        """Queue a link's record, the domain and every name; from now on the link's peer hears of changes."""
        with self.naming:
            if self._closed:
                raise ClosedError("this server has stopped")
            link._greet()
            for name, region in self.named.items():
                link.control.channel.buffer(RemoteBuffer.of(region, name=name, access=region.access))
            self.links.add(link)

    # ------------------------------------------------------------ the end

    def _all_failed(self, error: VerbsError) -> None:
        """End every connection: nobody would be told of a completion any more."""
        with self.naming:
            links = tuple(self.links)
        for link in links:
            link.engine.fail(error)

    def leave(self, link: ServerLink) -> None:
        """Tell a link's peer of nothing more."""
        with self.naming:
            self.links.discard(link)

    def close(self) -> None:
        """Destroy what was shared; the connections must be closed. May be tried again."""
        with self.naming:
            self._closed = True
            self.named.clear()
        self._stack.close()
        self._kept = []


class _Registry(Registry):
    """The registered memory of one connection of a server, whose names are not those of the server's buffers."""

    passing = True
    __slots__ = ("_shared",)

    def __init__(self, shared: Shared, engine: Engine, peer: Peer, remote_access: AccessFlags) -> None:
        super().__init__(shared.pd, engine, peer, remote_access)
        self._shared = shared

    def _enter(self, name: str, region: Named) -> None:
        with self._shared.naming:
            self._shared.check_free(name)
            super()._enter(name, region)


class ServerLink(Link):
    """The verbs objects of one connection of a server: what is shared comes from there, and stays there."""

    _again = False

    def __init__(self, shared: Shared, control: Control, peer: Peer, remote_gid: IPv6Address | None) -> None:
        self._shared, self.control, self._hub = shared, control, shared.hub
        self._share = shared.pool.take()
        self._srq = self._share.srq
        try:
            super().__init__(shared.settings, control, peer, remote_gid)
        except BaseException:
            self._share.close()
            raise

    def _open(self, made: Made, settings: Settings, local_address: str) -> tuple[Context, int]:
        return self._shared.context, self._shared.port_for(local_address)

    def _fit(self, options: Options) -> Options:
        return self._shared.options

    def _domain(self, made: Made) -> tuple[PD, CompChannel]:
        return self._shared.pd, self._shared.channel

    def _use_cache(self) -> None:
        self.engine._cache = self._shared.cache

    def _memory(self, made: Made, slots: int) -> tuple[MRSlice, None]:
        return self._alloc(made, self.options.send_depth * (CELL + HEADER), self.read_access)[:], None

    def _receives(self, ring: MRSlice | None, slots: int) -> Receives:
        return self._share

    def _cap(self, inline: int) -> QPCap:
        return replace(super()._cap(inline), max_recv_wr=0, max_recv_sge=0)  # those of the SRQ count

    @property
    def remote_access(self) -> AccessFlags:
        """What the device lets a peer do at all."""
        return self._shared.remote_access

    def introduce(self, settings: Settings, deadline: Deadline) -> None:
        """Queue this side's record, and the server's buffers."""
        self._shared.introduce(self)

    @property
    def told_domain(self) -> int:
        """What its peer knows the memory as that is registered for this connection."""
        return self.endpoint.nonce or 1

    def _registry(self, remote_access: AccessFlags) -> Registry:
        return _Registry(self._shared, self.engine, self.peer, remote_access)

    def close(self) -> None:
        """Destroy everything that belongs to this connection alone; may be tried again."""
        self._shared.leave(self)
        failure = self.engine.failure
        if isinstance(failure, PeerClosedError) and self.control.channel.error is None:
            self.engine._c.in_order = 1  # the peer said goodbye
        super().close()
        self._share.close()
