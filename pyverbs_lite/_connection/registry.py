"""What a connection keeps for its caller: registered memory, and which of it the peer knows by a name."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from .._base.args import Deadline
from .._control.control import Peer
from .._memory.buffer import Memory, look_at
from ..device import DeviceAttr
from ..enums import AccessFlags, AtomicCap
from ..errors import ClosedError, HandshakeError, StateError
from ..ffi import lib
from ..mr import MR
from ..pd import PD
from ..remote import REMOTE, RemoteBuffer
from .engine import Engine
from .settings import Settings, check_name

if TYPE_CHECKING:
    from ..pool import Pool

__all__ = ["KeepsAlive", "Named", "NamedMR", "Registry", "allowed", "offered"]

#: So many things are kept before it is looked whether some of them are closed.
_FEW = 16


class Kept(Protocol):
    """What lives as long as the connection: a region, a grant, a window, a pool."""

    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...


class Named(Protocol):
    """What the peer may know by name: a region, or a grant."""

    access: AccessFlags
    name: str | None

    @property
    def addr(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    @property
    def length(self) -> int: ...


class NamedMR(MR):
    """A region that the peer may know by name; the peer is told before it goes."""

    def __init__(self, registry: Registry, buffer: Memory, access: AccessFlags) -> None:
        super().__init__(registry.pd, buffer, access)
        self.source = buffer
        self.name: str | None = None
        self._registry = registry

    def _before_destroy(self) -> None:
        super()._before_destroy()
        if self.name is not None:
            self._registry.withdraw(self.name, self)
            self.name = None

    def _after_destroy(self) -> None:
        self.__dict__.pop("source", None)  # the buffer is nobody's concern here any more


class KeepsAlive:
    """Keeps things alive until they are closed.

    Attributes:
        naming: the lock of it.
    """

    __slots__ = ("_kept", "_room", "naming")

    def __init__(self) -> None:
        self.naming = threading.RLock()
        self._kept: list[Kept] = []
        self._room = _FEW

    def keep(self, thing: Kept) -> None:
        """Keep something alive until it is closed."""
        with self.naming:
            if len(self._kept) >= self._room:  # so seldom that each of many thousands costs the same
                self._kept = [kept for kept in self._kept if not kept.closed]
                self._room = max(_FEW, 2 * len(self._kept))
            self._kept.append(thing)


def allowed(limits: DeviceAttr) -> AccessFlags:
    """Return what a device lets a peer do at all."""
    return REMOTE if limits.atomic_cap != AtomicCap.NONE else REMOTE & ~AccessFlags.REMOTE_ATOMIC


def offered(buffer: Memory, what: str, remote_access: AccessFlags) -> AccessFlags:
    """Return how to register a buffer whose peer may do all that can be: what the device lets it, and the memory."""
    if look_at(buffer, what).readonly:
        return AccessFlags.REMOTE_READ
    return AccessFlags.LOCAL_WRITE | remote_access


class Registry(KeepsAlive):
    """The registered memory of one connection; it knows nothing of the link, so the two are no loop.

    Args:
        engine: whose QP the memory is for.
        remote_access: what the device lets a peer do at all.

    Attributes:
        remote_access: the same.
        naming: held while names change, and while something is made that needs the domain.
        makers: one for each thread that is about to take ``naming`` to make something; who closes waits for it only
            where there is one.
        named: name -> region or grant: what the peer knows.
    """

    #: Whether what is registered here ends before the domain does.
    passing = False
    __slots__ = ("_engine", "_peer", "_silent", "makers", "named", "pd", "remote_access")

    def __init__(self, pd: PD, engine: Engine, peer: Peer, remote_access: AccessFlags) -> None:
        super().__init__()  # a region lives until it or the connection is closed, also where nobody else keeps it
        self.pd, self.remote_access = pd, remote_access
        self._engine, self._peer = engine, peer
        self.named: dict[str, Named] = {}
        self._silent = False
        self.makers: list[None] = []

    # ------------------------------------------------------------ making

    def register(self, buffer: Memory, access: AccessFlags | None, name: str | None, deadline: Deadline) -> NamedMR:
        """Register a buffer, and tell the peer if it has a name."""
        if name is not None:
            check_name(name)
        if access is None:
            access = offered(buffer, "a buffer to register", self.remote_access)
        elif name is not None and not AccessFlags(access) & REMOTE:
            raise ValueError(f"a buffer named {name!r} with {access!r} is of no use to the peer: allow remote access")
        self.makers.append(None)
        try:
            with self.naming:  # against a thread that closes: the PD must not go while a region is being made
                self.check_open("register")
                region = NamedMR(self, buffer, access)
        finally:
            self.makers.pop()
        lib.pvl_count_registration(self._engine._c)
        try:
            if name is not None:
                self.announce(region, name, deadline)
            self.keep(region)
        except BaseException:
            region.close()
            raise
        return region

    def register_all(self, settings: Settings, deadline: Deadline) -> None:
        """Register the buffers that the peer has from the start."""
        for name, buffer in settings.buffers.items():
            self.register(buffer, settings.access.get(name), name, deadline)

    def pool(self, **options: Any) -> Pool:
        """Make a pool that ends with the connection; arguments as ``PD.pool``."""
        self.makers.append(None)
        try:
            with self.naming:
                self.check_open("pool")
                pool = self.pd.pool(**options)
                self.keep(pool)
        finally:
            self.makers.pop()
        return pool

    def check_open(self, operation: str) -> None:
        """Refuse what comes after the goodbye; lock ``naming`` held, and entered in ``makers``."""
        if self._silent:
            raise ClosedError(f"{operation}: this connection is closed")

    # ------------------------------------------------------------ names

    @property
    def local_regions(self) -> dict[str, NamedMR]:
        """The registered buffers that the peer knows by a name; grants are none."""
        with self.naming:
            return {name: region for name, region in self.named.items() if isinstance(region, NamedMR)}

    def announce(self, region: Named, name: str, deadline: Deadline) -> None:
        """Tell the peer of a region or a grant by a name.

        Raises:
            StateError: the name is taken.
            PeerClosedError, HandshakeTimeout: the peer is gone, or was not told in time.
        """
        remote = RemoteBuffer.of(region, name=name, access=region.access)
        with self.naming:
            region.name = name  # before it is entered, for whoever closes it after an interrupt to take that back
            self._enter(name, region)
            self._peer.say(lambda channel: channel.buffer(remote, passing=self.passing))
        self._peer.control.flush(deadline)
        self._engine.take_news()

    def _enter(self, name: str, region: Named) -> None:
        if name in self.named:
            raise StateError(f"the name {name!r} is taken by {self.named[name]!r}: close that first")
        self.named[name] = region

    def withdraw(self, name: str, region: Named) -> None:
        """Tell the peer that a region goes away."""
        with suppress(HandshakeError, StateError):  # if it, or this side, is gone, it need not be told
            with self.naming:
                if self.named.get(name) is not region:
                    return
                del self.named[name]
                if not self._silent:
                    self._peer.say(lambda channel: channel.withdraw(name))
            # Without the lock: a peer that does not read holds up only who waits for it.
            self._peer.control.flush(Deadline(0.0 if self._silent else 1.0))
            self._engine.take_news()

    # ------------------------------------------------------------ the end

    def fall_silent(self) -> bool:
        """Make nothing and say nothing from now on; say whether that is news."""
        if self._silent:
            return False
        self._silent = True
        if self.makers:  # those who come from now on find that it is too late
            with self.naming:
                pass
        return True

    @property
    def used(self) -> bool:
        """Whether anything was made here; before ``close``."""
        return bool(self._kept)

    @property
    def regions_only(self) -> bool:
        """Whether there is nothing but regions, which have no part in a QP's state as windows have."""
        return all(isinstance(thing, MR) or thing.closed for thing in self._kept)

    def close(self) -> None:
        """Close what is kept; may be tried again."""
        self.fall_silent()
        for thing in reversed(self._kept):
            thing.close()
        self._kept = []
