"""The TCP side of a connection: a socket under the sans-I/O ``wire.Channel``, every wait with a deadline."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from .._base.args import Deadline
from .._connection.settings import KEEP_ALIVE, Settings
from ..errors import ClosedError, HandshakeError, HandshakeTimeout, PeerClosedError, VerbsError
from ..remote import RemoteBuffer
from ..wire import MAX_BUFFERS, BufferAdded, BufferWithdrawn, Channel, DomainNamed, Event, Refused
from .base import MOST_CHUNKS, ControlBase, refusal
from .tcp import address_text, await_fd, tune

if TYPE_CHECKING:
    from .tls import Tls

__all__ = ["CHUNK", "Control", "Peer"]

#: Bytes of one read.
CHUNK = 65536
#: Neither does the socket's own mode matter, nor is a signal sent.
_SENDING = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
#: One sleep of a wait: a descriptor's number may be another file's by the time one sleeps on it, but not for long.
_SLICE = 1.0
#: So many buffers that were taken back are remembered, to name them in errors.
_MOST_WITHDRAWN = 4096
#: With so many pieces of news that nobody has taken, no more are read: a peer may have named all it can, twice.
_MOST_EVENTS = 2 * MAX_BUFFERS
#: What TCP says when it has given up waiting for the peer's host.
_UNHEARD = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class Control(ControlBase):
    """A connected TCP socket that speaks the handshake; owns the socket, also where making this fails.

    Args:
        tls: what the bytes go through; by default they go as they are.
        keep_alive: seconds after which a host that says nothing is gone; 0 or None waits for ever.
        tuned: whether the socket has what it needs: one that was accepted has it from the listening one.
        local_address: this side's IP address, where it is known.
        address: the peer's address as of a socket, where it is known.

    Attributes:
        chunk: how many bytes one read takes.

    Raises:
        PeerClosedError: the peer is gone already.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        tls: Tls | None = None,
        keep_alive: float | None = KEEP_ALIVE,
        tuned: bool = False,
        local_address: str = "",
        address: tuple[Any, ...] | None = None,
    ) -> None:
        super().__init__()
        self.socket = sock
        self.chunk = CHUNK
        self._tls = tls
        self._keep_alive = keep_alive
        self._waiting: list[int] = []  # once for each thread that does
        try:
            if not tuned:
                tune(sock, keep_alive)
            self.local_address = local_address or address_text(sock.getsockname())
            peer = address or sock.getpeername()
            self.peer = f"{address_text(peer)} port {peer[1]}"
        except OSError as error:
            sock.close()
            raise PeerClosedError(f"the peer closed the connection before it said anything: {error}") from error
        except BaseException:
            sock.close()
            raise

    @classmethod
    def of(cls, sock: socket.socket, settings: Settings, host: str | None = None, **known: Any) -> Self:
        """Make it as the settings have it; a side that connects knows the peer as ``host``.

        Args:
            known: as of the class.
        """
        try:
            tls = settings.tls(host)
        except BaseException:
            sock.close()
            raise
        return cls(sock, tls=tls, keep_alive=settings.keep_alive, **known)

    @classmethod
    def accepted(cls, listening: socket.socket, settings: Settings, local_address: str) -> Self:
        """Take who has connected to a listening socket that was tuned.

        Args:
            local_address: as ``own_address`` says of that socket.

        Raises:
            OSError: as ``socket.accept``.
            As the class.
        """
        sock, address = listening.accept()
        return cls.of(sock, settings, tuned=True, local_address=local_address, address=address)

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once it is closed."""
        return self.socket.fileno()

    def close(self, linger: float = 0.0) -> None:
        """Close the socket; safe to call again.

        Args:
            linger: seconds to wait for the peer to have read what was sent. What arrives here and is not read before
                closing makes TCP throw away what the peer has not read yet, such as why it was refused.
        """
        if linger:
            with suppress(OSError, ClosedError):
                self._linger(Deadline(linger))
        with self.lock:
            if self.socket.fileno() < 0:
                return
            said, heard = self.channel.parted
            with suppress(OSError):
                for _ in range(0 if heard else MOST_CHUNKS):
                    self._read()
                    if not self._more:
                        break
                # Wakes a thread that waits in _ready(), and tells a peer that has not been told, though a forked child
                # may still have the descriptor.
                if self._waiting or self._unsent or not said:
                    self.socket.shutdown(socket.SHUT_RDWR)
            self.socket.close()

    def _linger(self, deadline: Deadline) -> None:
        with self.lock:
            self.socket.shutdown(socket.SHUT_WR)
        for _ in range(MOST_CHUNKS):
            if self._read() in (b"", None) and (self._ended or deadline.expired):
                break
            self._ready(select.POLLIN, deadline)

    def drop(self) -> None:
        """Let go of the descriptor in a forked child; the connection belongs to the parent."""
        self.socket.close()

    def flush(self, deadline: Deadline) -> None:
        """Send what the channel has queued; what could not be sent in time goes with the next flush.

        Raises:
            PeerClosedError: the peer has closed the connection.
            HandshakeTimeout: the peer does not read.
            ClosedError: another thread closed it.
        """
        while not self.send_now() or (self._tls is not None and self._tls.waiting):
            # Reading meanwhile, because the peer may be waiting for just that before it reads; but not without end.
            reading = len(self._events) < _MOST_EVENTS
            what = (select.POLLIN if reading else 0) | (select.POLLOUT if self._unsent else 0)
            if not self._ready(what, deadline):
                raise HandshakeTimeout(f"{self.peer} did not read what it was sent within {deadline.seconds} s")
            if reading:
                with self.lock:
                    self._events.extend(self._receive())

    def send_now(self) -> bool:
        """Send as much as the socket takes now; say whether that is all.

        Raises:
            PeerClosedError, HandshakeError: the peer has closed the connection; it may have said why.
            ClosedError: another thread closed it.
        """
        with self.lock:
            self._check_whole()
            if self.socket.fileno() < 0:
                raise ClosedError(f"the control connection with {self.peer} is closed")
            self._torn = True
            data = self.channel.data_to_send()
            try:
                if self._tls is None:
                    self._unsent += data
                else:
                    self._tls.send(data)
                self._push()
            except HandshakeError as error:
                self._torn = False
                self.channel.fail(error)
                raise
            except OSError as error:
                self._torn = False
                self._unsent.clear()
                if said := self._last_word():
                    raise said from error
                raise PeerClosedError(f"{self.peer} closed the control connection: {error}") from error
            self._torn = False
            return not self._unsent

    def _push(self) -> None:
        """Hand to the socket what it takes."""
        if self._tls is not None:
            self._unsent += self._tls.data_to_send()
        if self._unsent:
            try:
                sent = self.socket.send(self._unsent, _SENDING)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def _read(self) -> bytes | None:
        """Return what has arrived, empty at the end, or None if nothing has."""
        with self.lock:
            self._more = False
            if self._tls is not None and self._tls.ended:
                self._ended = True
                return b""
            try:
                data = self.socket.recv(self.chunk, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno in _UNHEARD:
                    self.channel.fail(
                        PeerClosedError(
                            f"nothing was heard of {self.peer} for {self._keep_alive} s (keep_alive=): its host or the"
                            f" network is gone ({error.strerror})"
                        )
                    )
                    return None
                data = b""  # a reset; the channel knows best what the end means at this point
            self._more = len(data) == self.chunk
            if self._tls is None:
                self._ended = self._ended or not data
                return data
            return self._decrypt(self._tls, data)

    def _decrypt(self, tls: Tls, data: bytes) -> bytes | None:
        try:
            plain = tls.receive(data)
        except HandshakeError as error:
            self.channel.fail(error)
            return None
        finally:
            with suppress(OSError):  # what is not sent now goes with the next flush, which will notice
                self._push()
        if not plain and tls.ended:
            self._ended = True
            return b""
        return plain or None

    def discard_some(self) -> bool:
        """Throw away one piece of what has arrived; say whether that was all there will be."""
        return self._read() == b""

    def _await_input(self, deadline: Deadline) -> bool:
        return self._ready(select.POLLIN, deadline)

    def _ready(self, what: int, deadline: Deadline) -> bool:
        """Wait until the socket can be read or written, or has failed; False once the deadline has passed."""
        while left := deadline.left:
            if (fd := self.fileno()) < 0:
                raise ClosedError(f"the control connection with {self.peer} is closed")
            self._waiting.append(fd)
            try:
                if await_fd(fd, what, min(left, _SLICE)):
                    return True
            finally:
                self._waiting.pop()
        return False


class Peer:
    """What is known of the other side after the handshake: its named buffers, and whether it is still there.

    Attributes:
        buffers: the peer's named buffers, as of the last ``read``.
        withdrawn: the remote keys that it took back, each with its buffer's name; only the last, of very many.
        domain: which protection domain it registers its memory in, or 0 where it has not said.
        connection: the same for what it registers for this connection alone.
        token: what the standing of its buffers is compared with.
        heard: how many pieces of news there were.
    """

    def __init__(self, control: ControlBase) -> None:
        self.control = control
        self.buffers: dict[str, RemoteBuffer] = {}
        self.withdrawn: dict[int, str] = {}
        self.domain = self.connection = 0
        self.token = object()  # and not this object, which a buffer would keep alive
        self.heard = 0
        self._over: VerbsError | None = None

    def read(self) -> VerbsError | None:
        """Take the news that have arrived; return why the peer is gone, once it is."""
        with self.control.lock:
            if self._over is None:
                try:
                    for event in self.control.receive_now():
                        self.note(event)
                    if self.control.channel.error is not None:
                        self._over = self._over or self.control.channel.error
                except HandshakeError as error:
                    self._over = error
            return self._over

    def note(self, event: Event) -> None:
        """Take in one piece of news."""
        self.heard += 1
        if isinstance(event, BufferAdded):
            self._forget(event.buffer.name)
            self.withdrawn.pop(event.buffer.rkey, None)
            domain = self.connection if event.passing else self.domain
            self.buffers[event.buffer.name] = event.buffer.of_peer(self.token, domain, self.control.peer)
        elif isinstance(event, BufferWithdrawn):
            self._forget(event.name)
        elif isinstance(event, DomainNamed):
            self.domain = event.domain
        elif isinstance(event, Refused):
            self._over = refusal(self.control.peer, event)
        else:
            self._over = PeerClosedError(f"{self.control.peer} closed the connection")

    def _forget(self, name: str) -> None:
        """Take note that a name means nothing any more, or something else."""
        if (old := self.buffers.pop(name, None)) is not None:
            old._standing.end()
            self.withdrawn[old.rkey] = name
            if len(self.withdrawn) > _MOST_WITHDRAWN:
                del self.withdrawn[next(iter(self.withdrawn))]

    def say(self, what: Callable[[Channel], None]) -> None:
        """Queue something to say; ``control.flush`` sends it.

        Raises:
            PeerClosedError, PeerProtocolError: the peer is gone.
            StateError: this side has said goodbye.
        """
        with self.control.lock:
            what(self.control.channel)
