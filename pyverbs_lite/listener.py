"""Waiting for peers to connect."""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from types import TracebackType

from typing_extensions import Self, Unpack

from ._base.args import Deadline, LateDeadline
from ._connection.establish import establish
from ._connection.settings import ConnectOptions, Settings, spelled
from ._control.control import Control
from ._control.tcp import address_text, await_fd, bind_tcp, own_address, tune
from .connection import Connection
from .errors import ClosedError, PeerClosedError, WaitTimeout

__all__ = ["Listener", "listen"]

#: One sleep of accept(), in seconds.
_SLICE = 0.2


class Listener:
    """A TCP socket that turns those who connect into RDMA connections; made by ``listen``.

    Attributes:
        host, port: the address it is bound to.
    """

    def __init__(self, sock: socket.socket, settings: Settings) -> None:
        self._socket = sock
        self._settings = settings
        self._closing = False
        sock.setblocking(False)
        tune(sock, settings.keep_alive)
        self._own_address = own_address(sock)
        address = sock.getsockname()
        self.host, self.port = address_text(address), int(address[1])

    def __repr__(self) -> str:
        return f"<Listener on {self.host} port {self.port}{' (closed)' if self.closed else ''}>"

    def fileno(self) -> int:
        """Return the TCP socket's descriptor: readable when somebody wants to connect."""
        return self._socket.fileno()

    def accept(self, timeout: float | None = None) -> Connection:
        """Wait for a peer and return the connection to it, in RTS.

        A peer that does not get through the handshake raises here and costs nothing more: the listener stays usable.

        Args:
            timeout: seconds to wait for somebody, the handshake included; None waits without limit for somebody. The
                handshake alone may take no longer than the listener's ``timeout``.

        Raises:
            WaitTimeout: nobody came.
            HandshakeTimeout, PeerProtocolError, PeerClosedError, HandshakeError: what came was no good peer.
            DeviceNotFoundError, GIDError, VerbsOSError: this side could not make its end.
            ClosedError: the listener is closed.
        """
        deadline = Deadline(timeout)
        control = self._next(deadline)
        limit = LateDeadline(self._settings.timeout) if timeout is None else deadline.sooner(self._settings.timeout)
        return Connection(establish(control, self._settings, limit, accepting=True, alone=True))

    def _next(self, deadline: Deadline) -> Control:
        """Wait for somebody to connect; several threads may."""
        while (fd := self.fileno()) >= 0:
            try:
                return Control.accepted(self._socket, self._settings, self._own_address)
            except PeerClosedError:
                raise
            except (BlockingIOError, ConnectionAbortedError):
                pass
            except OSError:
                if not self._closing:
                    raise
                break
            if not (left := deadline.left) and not self.closed:
                raise WaitTimeout(f"nobody connected within {deadline.seconds} s", "accept")
            # The socket never blocks, so that each thread has its own deadline, and a client that is gone again holds
            # up nobody. In slices, because the descriptor of a socket that was closed may soon be another file's.
            await_fd(fd, select.POLLIN, min(left, _SLICE))
        raise ClosedError(f"{self!r} cannot accept")

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Stop listening; connections that were accepted go on. Safe to call again, and from another thread."""
        if not self.closed:
            self._closing = True
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in accept()
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@spelled
def listen(host: str, port: int, *, backlog: int = 128, **options: Unpack[ConnectOptions]) -> Listener:
    """Listen on a TCP address for peers that call ``connect``.

    Args:
        host: the address to bind; only that one. ``""`` binds every address, IPv4 and IPv6.
        port: the TCP port; 0 takes a free one, see ``Listener.port``.
        timeout: seconds for one peer's handshake.
        buffers: name -> buffer: every peer has them from the start.
        backlog: how many may be waiting for ``accept``.

    The others are those of ``connect``.

    Raises:
        OSError: the address cannot be bound.
        DeviceNotFoundError: no device has that name.
        TypeError, ValueError, BufferError: an option or a buffer is not what it must be.
    """
    settings = Settings.of(options)
    settings.check_accepting()
    return Listener(bind_tcp(host, port, backlog), settings)
