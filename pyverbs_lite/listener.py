"""Waiting for peers to connect."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

from typing_extensions import Self, Unpack

from ._args import Deadline, check_int
from ._buffer import Memory
from ._control import Control
from ._establish import Settings, establish
from ._options import Options, Tuning
from .connection import Connection
from .device import Context
from .errors import ClosedError, WaitTimeout

__all__ = ["Listener", "listen"]


class Listener:
    """A TCP socket that turns those who connect into RDMA connections; made by ``listen``.

    Attributes:
        host, port: the address it is bound to.
    """

    def __init__(
        self, sock: socket.socket, settings: Settings, buffers: Mapping[str, Memory], timeout: float | None
    ) -> None:
        self._socket = sock
        self._settings = settings
        self._buffers = dict(buffers)
        self._timeout = timeout
        self.host, self.port = str(sock.getsockname()[0]), int(sock.getsockname()[1])

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
        if self.closed:
            raise ClosedError(f"{self!r} cannot accept")
        self._socket.settimeout(None if timeout is None else max(deadline.left, 1e-3))
        try:
            sock, _ = self._socket.accept()
        except TimeoutError as error:
            raise WaitTimeout(f"nobody connected within {timeout} s", "accept") from error
        except OSError as error:
            if self.closed:
                raise ClosedError(f"{self!r} was closed") from error
            raise
        limit = deadline.sooner(self._timeout)
        return Connection(establish(Control(sock), self._settings, self._buffers, limit, accepting=True))

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Stop listening; connections that were accepted go on. Safe to call again, and from another thread."""
        if not self.closed:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in accept()
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def listen(
    host: str,
    port: int,
    *,
    device: str | Context | None = None,
    port_num: int | None = None,
    gid_index: int | None = None,
    gid_ip: str | None = None,
    gid_netdev: str | None = None,
    buffers: Mapping[str, Memory] | None = None,
    timeout: float | None = 10.0,
    backlog: int = 128,
    **tuning: Unpack[Tuning],
) -> Listener:
    """Listen on a TCP address for peers that call ``connect``.

    Args:
        host: the address to bind; only that one. ``""`` binds every address.
        port: the TCP port; 0 takes a free one, see ``Listener.port``.
        timeout: seconds for one peer's handshake.
        buffers: name -> buffer: every peer has them from the start.

    The others are those of ``connect``.

    Raises:
        OSError: the address cannot be bound.
        TypeError, ValueError: an option is out of its range.
    """
    settings = Settings(
        device=device,
        port_num=port_num,
        gid_index=gid_index,
        gid_ip=gid_ip,
        gid_netdev=gid_netdev,
        options=Options(**tuning),
    )
    Deadline(timeout)  # refuse a bad one here rather than at the first accept()
    check_int("port", port, 0, 65535)
    family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    sock = socket.create_server(address, family=family, backlog=backlog, reuse_port=False)
    return Listener(sock, settings, buffers or {}, timeout)
