"""What a server is, however its handlers run: an address, what its connections share, the gate, and the accounts."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from .._base.args import check_int
from .._connection.establish import Steps, handshake
from .._connection.link import Link
from .._connection.settings import ConnectOptions, Settings
from .._connection.stats import ConnectionStats
from .._control.tcp import address_text, bind_tcp
from .._memory.buffer import Memory
from ..connection import Connection
from ..enums import AccessFlags
from ..errors import ClosedError, PeerClosedError, VerbsError
from ..mr import MR
from .gate import Gate, Guest
from .shared import ServerLink, Shared

__all__ = ["CLOSERS", "NOTICE", "ServerBase", "ServerStats", "close_quietly"]


class _Counts(Hashable, Protocol):
    @property
    def stats(self) -> ConnectionStats: ...


_C = TypeVar("_C", bound=_Counts)
#: The most that may be asked for: each needs a descriptor at least.
_MOST = 1 << 20
#: How long handlers whose connections were closed may take to notice, in seconds.
NOTICE = 5.0
#: How many connections are closed at a time: a peer that does not read takes its second.
CLOSERS = 32
_INFO, _ERROR = 20, 40  # of the logging module


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStats:
    """What has become of those who came, up to now.

    Attributes:
        accepted: connections that were made.
        refused: peers that were told that the server is BUSY: it had ``max_connections``, or was stopping.
        failed: handshakes that came to nothing for another reason.
        handler_errors: handlers that raised.
        open: connections that are there now.
        peers: of each of these, its peer's address and port -> what it has done.
        total: what all connections have done, those that have ended included.
    """

    accepted: int
    refused: int
    failed: int
    handler_errors: int
    open: int
    peers: Mapping[str, ConnectionStats]
    total: ConnectionStats


class ServerBase(ABC, Generic[_C]):
    """The part of a server that does not run handlers.

    Attributes:
        host, port: the address it is bound to.
    """

    def __init__(
        self, host: str, port: int, max_connections: int, max_handshakes: int, backlog: int, options: ConnectOptions
    ) -> None:
        self._most = check_int("max_connections", max_connections, 1, _MOST)
        workers = check_int("max_handshakes", max_handshakes, 1, _MOST)
        settings = Settings.of(options)
        settings.check_accepting()
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.RLock())
        self._places = 0  # taken: by connections, and by peers whose QP is being made
        self._accepted = self._refused = self._failed = self._handler_errors = 0
        self._open: dict[_C, str] = {}
        self._past = ConnectionStats.total(())
        self._started = self._stopping = False
        sock = bind_tcp(host, port, backlog)
        try:
            address = sock.getsockname()
            self.host, self.port = address_text(address), int(address[1])
            self._shared = Shared(settings, self.host, self._most, self._flush_later)
            self._most = self._shared.pool.shares  # the device may have no room for all
            try:
                # Whoever is about to get a place may wait for it in line.
                self._gate = Gate(sock, self, settings, workers, self._most + workers + 64)
            except BaseException:
                self._shared.close()
                raise
        except BaseException:
            sock.close()
            raise

    def __repr__(self) -> str:
        state = " (stopped)" if self._stopping else f", {len(self._open)} connections"
        return f"<{type(self).__name__} on {self.host} port {self.port}{state}>"

    @property
    def connections(self) -> tuple[_C, ...]:
        """The connections that are open now."""
        with self._changed:
            return tuple(self._open)

    @property
    def stats(self) -> ServerStats:
        """What has become of those who came, up to now."""
        with self._changed:
            peers = {peer: conn.stats for conn, peer in self._open.items()}
            return ServerStats(
                accepted=self._accepted,
                refused=self._refused,
                failed=self._failed,
                handler_errors=self._handler_errors,
                open=len(peers),
                peers=peers,
                total=ConnectionStats.total((self._past, *peers.values())),
            )

    def _register(self, buffer: Memory, name: str, access: AccessFlags | None) -> MR:
        self._check_running("register")
        return self._shared.register(buffer, name, access)

    def _check_running(self, operation: str) -> None:
        if self._stopping or os.getpid() != self._pid:
            raise ClosedError(f"{operation}: {self!r} cannot be used any more")

    def _flush_later(self, control: Any) -> None:
        self._gate.flush_later(control)

    # ------------------------------------------------------------ for the gate

    def begin(self, guest: Guest) -> Steps:
        """Return the handshake with a peer."""

        def make_link(remote_gid: Any) -> Link:
            return ServerLink(self._shared, guest.control, guest.peer, remote_gid)

        return handshake(guest.control, make_link, self._shared.settings, guest.deadline, accepting=True)

    def admit(self) -> bool:
        """Take a place for a connection, if there is one."""
        with self._changed:
            free = self._places < self._most
            self._places += free
            return free

    def vacate(self) -> None:
        """Give a place back."""
        with self._changed:
            self._places -= 1
            self._changed.notify_all()

    @property
    def full(self) -> str:
        """Why there is no place."""
        return f"BUSY: this server takes {self._most} connections (max_connections) and has them; try again later"

    def failed(self, guest: Guest, error: BaseException, busy: bool) -> None:
        """Take note of a peer that did not get in."""
        with self._changed:
            self._refused += busy
            self._failed += not busy
        expected = isinstance(error, VerbsError)
        _log().log(
            _INFO if expected else _ERROR, "%s did not get in: %s", guest.control.peer, error, exc_info=not expected
        )

    @abstractmethod
    def arrived(self, guest: Guest, link: Link) -> None:
        """Run the handler of a connection, which has a place; in the gate's thread."""

    # ------------------------------------------------------------ connections

    def _enter(self, conn: _C, peer: str) -> None:
        with self._changed:
            self._accepted += 1
            self._open[conn] = peer

    def _leave(self, conn: _C) -> None:
        with self._changed:
            if self._open.pop(conn, None) is not None:
                self._past = ConnectionStats.total((self._past, conn.stats))
                self.vacate()

    def _ended(self, peer: str, error: BaseException | None) -> None:
        """Take note of how a handler ended."""
        if error is None or isinstance(error, (ClosedError, PeerClosedError)):
            _log().debug("the connection with %s ended: %s", peer, error or "its handler returned")
            return
        with self._changed:
            self._handler_errors += 1
        _log().error("the handler of the connection with %s failed", peer, exc_info=error)


def close_quietly(conn: Connection, timeout: float = 5.0) -> None:
    """Close a connection; what cannot be destroyed now is tried again with what it belongs to."""
    try:
        conn.close(timeout=timeout)
    except Exception as error:
        _log().error("the connection with %s could not be closed: %s", conn._link.peer.control.peer, error)


def _log() -> Any:
    import logging  # a program without a server need not wait for its import

    return logging.getLogger("pyverbs_lite.server")
