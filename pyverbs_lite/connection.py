"""A reliable connection to one peer: made through a TCP exchange, then moving bytes two-sided and one-sided."""

from __future__ import annotations

import functools
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, overload

from typing_extensions import Self, Unpack

from ._base.args import Deadline, LateDeadline
from ._connection.dial import Attempt, Dial, over_tcp
from ._connection.lent import LentMessage
from ._connection.link import Link, dropped, label_of
from ._connection.many import Many
from ._connection.receiver import Receiver
from ._connection.settings import ConnectOptions, Settings, spelled
from ._connection.stats import ConnectionStats
from ._connection.views import ConnectionInfo, Message, RemoteBuffers
from ._memory.buffer import Memory
from .cq import SLICE
from .enums import AccessFlags, WROpcode
from .errors import ClosedError, StateError
from .ffi import ffi, lib
from .grant import Grant, make_grant
from .mr import MR, MRSlice
from .regcache import RegistrationCache
from .remote import RemoteBuffer

if TYPE_CHECKING:
    from .pool import Pool

__all__ = ["BYTES", "Connection", "ConnectionInfo", "LentMessage", "Message", "connect"]


_REMOTE_READ, _REMOTE_WRITE = int(AccessFlags.REMOTE_READ), int(AccessFlags.REMOTE_WRITE)
_SEND, _SEND_WITH_IMM, _WRITE, _WRITE_WITH_IMM = map(
    int, (WROpcode.SEND, WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE, WROpcode.RDMA_WRITE_WITH_IMM)
)
# The short way of what most calls are: see ``Engine.limit``.
_send, _send_copy, _write, _write_copy, _read = (
    lib.pvl_send,
    lib.pvl_send_copy,
    lib.pvl_write,
    lib.pvl_write_copy,
    lib.pvl_read,
)
_from_buffer, _UNUSUAL, _SLICE_NS = ffi.from_buffer, lib.PVL_UNUSUAL, int(SLICE * 1e9)
#: What is bytes and nothing but bytes.
BYTES = frozenset((bytes, bytearray, Message))


class Connection(Receiver, Many):
    """An RC connection in RTS; made by ``connect`` or ``Listener.accept``.

    Each operation waits until it is complete, for at most ``timeout`` seconds (None: without limit; a peer that
    goes away ends the wait). An operation that timed out is still in flight and holds its memory until it ends.
    Threads may share a connection. ``data`` is anything with the buffer protocol, a torch CPU tensor, an ``MR`` or a
    slice of one; what is registered (``register``) moves without copy or registration.

    Attributes:
        remote: the peer's named buffers, a mapping of name to ``RemoteBuffer``.
    """

    def __init__(self, link: Link, dial: Dial | None = None) -> None:
        super().__init__(link)
        self._dial = dial  # how this side has connected
        self._renewed = False
        self._closed = False
        self._closing = threading.RLock()
        self._destroyed = False
        self.remote = RemoteBuffers(link)
        # The net under close(): the link knows nothing of this object, so it is whole when this runs.
        self._finalizer = weakref.finalize(self, dropped, link)

    def __repr__(self) -> str:
        return label_of(self._link, self._closed)

    @functools.cached_property
    def info(self) -> ConnectionInfo:
        """What the connection came to."""
        return ConnectionInfo.of(self._link)

    # ------------------------------------------------------------ two-sided

    def send(self, data: Memory | MR | MRSlice, *, imm: int | None = None, timeout: float | None = None) -> None:
        """Send one message; it arrives whole, in order, in one ``recv`` of the peer.

        Args:
            imm: 32 bits that travel with it, in host order.

        Raises:
            ValueError: it is longer than the peer's receive slots (``info.max_send_size``); nothing was sent.
            WaitTimeout: the peer has not taken the messages before it, so that nothing was sent; or it was
                not acknowledged in time, and may still arrive.
            CompletionError: the transfer failed; the connection is over.

        Verb: ibv_post_send (SEND, SEND_WITH_IMM)
        """
        if imm is None:
            quick = self._engine.quick
            wait = _SLICE_NS
            if timeout is not None:
                deadline, wait = Deadline.with_slice(timeout, SLICE)
            try:
                if type(data) is MRSlice:
                    rc = _send(quick, data.mr._c, data.offset, data.length, wait)
                elif type(data) in BYTES:
                    memory: Any = data if type(data) is bytes else _from_buffer(data)
                    rc = _send_copy(quick, memory, len(memory), wait)
                elif isinstance(data, MR):
                    rc = _send(quick, data._c, 0, data.length, wait)
                else:
                    rc = _UNUSUAL
                if not (rc or self._live):
                    return
                if rc != _UNUSUAL and self._engine.settled(
                    rc, quick, "send", deadline if timeout is not None else None
                ):
                    return
            except BaseException:
                self._engine.broken_off(quick, data)
                raise
        opcode = _SEND if imm is None else _SEND_WITH_IMM
        self._move("send", opcode, self._to_send(data), timeout, 0, 0, imm)

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
            TypeError, ValueError: the name is no name, or the access is of no use to the peer.
            StateError: the name is taken.
            PeerClosedError, HandshakeTimeout: the peer is gone, or was not told in time.
        """
        if self._engine.failure is not None:
            self._engine.refuse_late("register")
        return self._link.registry.register(buffer, access, name, Deadline(timeout))

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
        if (
            imm is None
            and type(remote) is RemoteBuffer
            and (remote._standing.writes is self._token or self._known(remote, _REMOTE_WRITE))
        ):
            quick = self._engine.quick
            wait = _SLICE_NS
            if timeout is not None:
                deadline, wait = Deadline.with_slice(timeout, SLICE)
            try:
                if type(data) is MRSlice:
                    rc = _write(
                        quick, data.mr._c, data.offset, data.length, remote.addr, remote.rkey, remote.length, wait
                    )
                elif type(data) in BYTES:
                    memory: Any = data if type(data) is bytes else _from_buffer(data)
                    rc = _write_copy(quick, memory, len(memory), remote.addr, remote.rkey, remote.length, wait)
                elif isinstance(data, MR):
                    rc = _write(quick, data._c, 0, data.length, remote.addr, remote.rkey, remote.length, wait)
                else:
                    rc = _UNUSUAL
                if not (rc or self._live):
                    return
                if rc != _UNUSUAL and self._engine.settled(
                    rc, quick, "write", deadline if timeout is not None else None
                ):
                    return
            except BaseException:
                self._engine.broken_off(quick, data)
                raise
        source = self._to_write(remote, data)
        opcode = _WRITE if imm is None else _WRITE_WITH_IMM
        self._move("write", opcode, source, timeout, remote.addr, remote.rkey, imm)

    @overload
    def read(self, remote: RemoteBuffer, into: None = None, *, timeout: float | None = None) -> bytes: ...

    @overload
    def read(self, remote: RemoteBuffer, into: Memory | MR | MRSlice, *, timeout: float | None = None) -> int: ...

    def read(
        self, remote: RemoteBuffer, into: Memory | MR | MRSlice | None = None, *, timeout: float | None = None
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
        if type(remote) is RemoteBuffer and (
            remote._standing.reads is self._token or self._known(remote, _REMOTE_READ)
        ):
            quick = self._engine.quick
            wait = _SLICE_NS
            if timeout is not None:
                deadline, wait = Deadline.with_slice(timeout, SLICE)
            try:
                if type(into) is MRSlice:
                    rc = _read(
                        quick, into.mr._c, into.offset, into.length, remote.addr, remote.rkey, remote.length, wait
                    )
                elif isinstance(into, MR):
                    rc = _read(quick, into._c, 0, into.length, remote.addr, remote.rkey, remote.length, wait)
                else:
                    rc = _UNUSUAL
                if not (rc or self._live):
                    return remote.length
                if rc != _UNUSUAL and self._engine.settled(
                    rc, quick, "read", deadline if timeout is not None else None
                ):
                    return remote.length
            except BaseException:
                self._engine.broken_off(quick, into)
                raise
        target = self._to_read(remote, into)
        self._fetch(remote, target, timeout)
        return remote.length if into is not None else bytes(target)  # type: ignore[arg-type]

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
        request = self._to_atomic("fetch_add", WROpcode.ATOMIC_FETCH_AND_ADD, remote, value)
        return self._engine.run("fetch_add", (request,), Deadline(timeout))

    def compare_swap(self, remote: RemoteBuffer, expected: int, desired: int, *, timeout: float | None = None) -> int:
        """Replace the peer's 8 bytes if they equal ``expected``, in one step; return what they were.

        The swap took place where the result equals ``expected``.

        Raises:
            As ``fetch_add``.

        Verb: ibv_post_send (ATOMIC_CMP_AND_SWP)
        """
        request = self._to_atomic("compare_swap", WROpcode.ATOMIC_CMP_AND_SWP, remote, expected, desired)
        return self._engine.run("compare_swap", (request,), Deadline(timeout))

    def pool(
        self,
        *,
        max_bytes: int = 64 << 20,
        chunk_bytes: int | None = None,
        access: AccessFlags | None = None,
        huge: bool = False,
    ) -> Pool:
        """Make a pool of registered memory for this connection: ``pool.alloc(n)`` is a slice that goes back by itself.

        It lives until it or the connection is closed. Arguments and errors as ``PD.pool``.

        Verb: ibv_reg_mr
        """
        if self._engine.failure is not None:
            self._engine.refuse_late("pool")
        return self._link.registry.pool(max_bytes=max_bytes, chunk_bytes=chunk_bytes, access=access, huge=huge)

    def grant(
        self,
        memory: MR | MRSlice,
        *,
        access: AccessFlags = AccessFlags.REMOTE_READ,
        name: str | None = None,
        timeout: float | None = 10.0,
    ) -> Grant:
        """Let the peer reach a part of registered memory until the grant is revoked; the region stays as it is.

        ::

            region = conn.register(buffer, access=AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND)
            with conn.grant(region[4096:8192], access=AccessFlags.REMOTE_WRITE, name="answer"):
                ...

        Args:
            memory: a region registered with ``MW_BIND``, and without remote access of its own, which would outlast
                the grant; with ``LOCAL_WRITE`` where the peer is to write.
            access: what the peer may do: ``REMOTE_READ``, ``REMOTE_WRITE``, ``REMOTE_ATOMIC``.
            name: by which the peer finds it in its ``remote``, until it is revoked.

        Raises:
            TypeError, ValueError: no registered memory, or not registered for this; the access or the name is none.
            UnsupportedError: the device has no memory windows of type 2.
            StateError: the name is taken.
            WaitTimeout, QueueFullError: what is in front of it in the send queue took longer than ``timeout`` seconds.

        Verb: ibv_alloc_mw, ibv_post_send (BIND_MW)
        """
        return make_grant(self._link, memory, access, name, Deadline(timeout))

    @property
    def registration_cache(self) -> RegistrationCache | None:
        """What keeps memory registered between operations, with its ``stats``; None if that was turned off."""
        return self._engine.cache

    @property
    def stats(self) -> ConnectionStats:
        """What the connection has done so far, also once it is closed: a copy of its counters.

        Raises:
            ClosedError: in a forked child.
        """
        return ConnectionStats.of(self._engine.stats())

    @property
    def local(self) -> dict[str, MR]:
        """Of this side, the buffers that have a name, as of now: name -> ``MR``."""
        return dict(self._link.registry.local_regions)

    # ------------------------------------------------------------ the end

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self, *, timeout: float = 5.0) -> None:
        """Say goodbye, end every request, and destroy everything; safe to call again.

        Whoever waits in another thread gets ``ClosedError``; whoever waits on the peer's side gets ``PeerClosedError``
        once it has taken what had arrived.
        """
        limit = LateDeadline(timeout)
        if self._engine.foreign:  # a forked child: everything belongs to the parent, but for the descriptor
            self._closed = True
            self._finalizer.detach()
            self._link.peer.control.drop()
            return
        with self._closing:
            self._closed = True
            if self._destroyed:
                return
            self._link.end(limit, ClosedError(f"{self!r}"))
            self._destroyed = True
            self._finalizer.detach()

    def reconnect(self, *, timeout: float | None = None) -> Connection:
        """Connect to the same listener anew, with the same arguments and the buffers that have a name by now.

        This connection is closed. Nothing is sent a second time: what was in flight has raised, and only the caller
        knows what it would mean to do it again. Of the peer, take new ``RemoteBuffer`` values from the new ``remote``:
        the old ones are refused. Regions are made anew too, see ``local``; grants are not. If this fails, it may be
        called again.

        Args:
            timeout: seconds for each attempt, by default as ``connect`` was told. How many there are, and for how long,
                says the ``reconnect=`` of ``connect``; without that there is one.

        Raises:
            StateError: this side has accepted the connection: the peer has to connect, and ``accept`` returns it.
            ClosedError: it was closed by ``close`` before.
            As ``connect``.
        """
        dial = self._to_dial_again(timeout)
        self.close()
        return self._dialled(dial)

    def _to_dial_again(self, timeout: float | None) -> Dial:
        Deadline(timeout)
        if self._engine.foreign:
            self._engine.refuse_late("reconnect")
        if self._dial is None:
            raise StateError(
                "reconnect: this side has accepted the connection; the peer connects again, and accept() returns that"
            )
        if self._closed and not self._renewed:
            raise ClosedError("reconnect: this connection was closed by this side; use connect")
        if not self._closed:
            regions = self._link.registry.local_regions
            buffers = {name: region.source for name, region in regions.items()}
            access = {name: region.access for name, region in regions.items()}
            self._dial = self._dial.again(buffers, access, None)
            self._renewed = True
        settings = self._dial.settings
        return self._dial.again(settings.buffers, settings.access, timeout)

    @classmethod
    def _dialled(cls, dial: Dial, attempt: Attempt | None = None) -> Self:
        return cls(dial.link(attempt), dial)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Connection lives in one process and cannot be pickled or copied; a RemoteBuffer can")


@spelled
def connect(host: str, port: int, **options: Unpack[ConnectOptions]) -> Connection:
    """Connect to a listener, and return a connection in RTS.

    Args:
        host, port: where the listener's TCP socket is; the RDMA path is found from it.
        device: a device's name, or an open ``Context`` to share; by default the one that has the TCP address.
        port_num: the device's port, from 1; by default the first that is ACTIVE.
        gid_index, gid_ip, gid_netdev: the local GID by row, by IP address or by interface, where the choice made from
            the TCP address is not the right one.
        buffers: name -> buffer: registered before the connection is made, so the peer has them from the start.
        timeout: seconds for all of it.
        authkey: a key that both sides must have, bytes or text; each proves it to the other before anything else, and
            it never travels. Without one, whoever reaches the port gets a connection. See docs/security.md.
        ssl_context: TLS for the TCP connection: names, addresses and remote keys travel on it, but none of the data.
        server_hostname: whose certificate is expected, by default ``host``'s.
        keep_alive: seconds until a peer whose host says nothing is taken to be gone, and whoever waits gets
            ``PeerClosedError``; at least 1, or 0 or None for never. A process that is busy or stopped is not gone; one
            that died shows at once, whatever this is.
        reconnect: a ``Backoff``: go on trying while nobody listens there, no route leads there or there is no room;
            ``timeout`` is then that of one attempt. See ``Connection.reconnect``.
        The others tune the connection: see ``Options``.

    Raises:
        HandshakeTimeout: not done in time.
        AuthenticationError: the peer has another key, or only one side has one.
        HandshakeError: the peer refused, closed, or spoke another protocol.
        DeviceNotFoundError, GIDError: this machine has no usable device, port or GID.
        RouteError: no RDMA path to the peer's GID.
        OSError: the TCP connection failed, or a verb was refused.
    """
    return Connection._dialled(dial(host, port, options))


def dial(host: str, port: int, options: ConnectOptions) -> Dial:
    """Judge the arguments of ``connect``, and return how to do it."""
    settings = Settings.of(options)
    settings.check_connecting(host)
    return Dial(over_tcp, host, port, settings)
