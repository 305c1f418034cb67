"""The TCP side of a connection: a socket under the sans-I/O ``wire.Channel``, every wait with a deadline."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ._args import Deadline
from .errors import (
    AuthenticationError,
    HandshakeError,
    HandshakeTimeout,
    PeerClosedError,
    PeerProtocolError,
    VerbsError,
)
from .remote import RemoteBuffer
from .wire import BufferAdded, BufferWithdrawn, Channel, Event, GoodbyeReceived, RefuseCode, Refused

__all__ = ["Control", "Peer", "connect_tcp"]

_E = TypeVar("_E", bound=Event)
_CHUNK = 65536
#: After these the peer says nothing more.
LAST_WORDS = (GoodbyeReceived, Refused)


def connect_tcp(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Open a TCP connection; every address of the name is tried, and their scope ids are kept.

    Raises:
        HandshakeTimeout: nobody answered in time.
        OSError: the name is unknown, or every address refused.
    """
    refusal: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(None if deadline.seconds is None else max(deadline.left, 1e-3))
            sock.connect(address)
        except OSError as error:
            sock.close()
            if isinstance(error, TimeoutError):
                raise HandshakeTimeout(f"no TCP answer from {host} port {port} within {deadline.seconds} s") from error
            refusal = refusal or error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    assert refusal is not None  # getaddrinfo returns at least one address, or raises
    raise refusal


class Control:
    """A connected TCP socket that speaks the handshake.

    Attributes:
        local_address: this side's IP address, scope included.
        peer: who is on the other side, for the texts of errors.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.channel = Channel()
        self._events: deque[Event] = deque()
        self._asked_for = "HELLO"
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.local_address = str(sock.getsockname()[0])
        self.peer = "{} port {}".format(*sock.getpeername()[:2])

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once it is closed."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close the socket; safe to call again."""
        self.socket.close()

    def flush(self, deadline: Deadline) -> None:
        """Send what the channel has queued.

        Raises:
            PeerClosedError: the peer has closed the connection.
            HandshakeTimeout: the peer does not read.
        """
        data = memoryview(self.channel.data_to_send())
        while data:
            data = data[self._send_some(data, deadline) :]

    def _send_some(self, data: memoryview, deadline: Deadline) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            self._wait(select.POLLOUT, deadline)
            return 0
        except OSError as error:
            # A peer that leaves may have said why before: what it said comes first.
            with suppress(PeerClosedError, PeerProtocolError):
                self._events.extend(self.receive_now())
            if self._events and isinstance(last := self._events[-1], Refused):
                raise refusal(self.peer, last) from error
            raise PeerClosedError(f"{self.peer} closed the control connection: {error}") from error

    def receive_now(self) -> list[Event]:
        """Return the events of what has arrived, without waiting; an error waits until what came before it was taken.

        Raises:
            PeerProtocolError, PeerClosedError: what the peer sent, or that it went away.
        """
        events = list(self._events)
        self._events.clear()
        while self.channel.error is None and not (events and isinstance(events[-1], LAST_WORDS)):
            try:
                data = self.socket.recv(_CHUNK)
            except BlockingIOError:
                return events
            except OSError:
                data = b""  # a reset; the channel knows best what the end means at this point
            try:
                events += self.channel.receive_data(data) if data else self.channel.receive_eof()
            except HandshakeError:
                break
        if not events and self.channel.error is not None:
            raise self.channel.error
        return events

    def expect(self, kind: type[_E], deadline: Deadline, buffers: list[BufferAdded | BufferWithdrawn]) -> _E:
        """Wait for an event of one kind; news of buffers on the way are put aside.

        Raises:
            HandshakeTimeout: it did not come in time.
            HandshakeError: the peer refused; the text says why.
            PeerProtocolError, PeerClosedError: what the peer sent instead, or that it went away.
        """
        self._asked_for = kind.__name__.removesuffix("Received").upper()
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, kind):
                    return event
                if isinstance(event, Refused):
                    raise refusal(self.peer, event)
                if isinstance(event, (BufferAdded, BufferWithdrawn)):
                    buffers.append(event)
                else:
                    raise PeerClosedError(f"{self.peer} closed in the middle of the handshake")
            if self.channel.error is not None:
                raise self.channel.error
            self._wait(select.POLLIN, deadline)
            self._events.extend(self.receive_now())

    def _wait(self, what: int, deadline: Deadline) -> None:
        poller = select.poll()
        poller.register(self.socket, what)
        # poll() rounds towards zero, and would spin through the last millisecond.
        left = None if deadline.seconds is None else int(deadline.left * 1000) + 1
        if deadline.expired or not poller.poll(left):
            raise HandshakeTimeout(
                f"{self.peer} did not get through the handshake within {deadline.seconds} s (waiting for its"
                f" {self._asked_for})"
            )


class Peer:
    """What is known of the other side after the handshake: its named buffers, and whether it is still there.

    Attributes:
        buffers: the peer's named buffers, as of the last ``read``.
    """

    def __init__(self, control: Control) -> None:
        self.control = control
        self.buffers: dict[str, RemoteBuffer] = {}
        self._sending = threading.Lock()
        self._over: VerbsError | None = None

    def read(self) -> VerbsError | None:
        """Take the news that have arrived; return why the peer is gone, once it is."""
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
        if isinstance(event, BufferAdded):
            self.buffers[event.buffer.name] = event.buffer
        elif isinstance(event, BufferWithdrawn):
            self.buffers.pop(event.name, None)
        elif isinstance(event, Refused):
            self._over = refusal(self.control.peer, event)
        else:
            self._over = PeerClosedError(f"{self.control.peer} closed the connection")

    def tell(self, say: Callable[[Channel], None], deadline: Deadline) -> None:
        """Say something over the control connection.

        Raises:
            PeerClosedError, HandshakeTimeout: the peer is gone, or does not read.
        """
        with self._sending:
            say(self.control.channel)
            self.control.flush(deadline)


def refusal(peer: str, event: Refused) -> HandshakeError:
    """Make the exception for a peer's refusal."""
    cls = AuthenticationError if event.code == RefuseCode.AUTHENTICATION else HandshakeError
    return cls(f"{peer} refused the connection: {event.reason}")
