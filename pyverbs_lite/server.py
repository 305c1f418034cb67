"""A server: connections with many peers, which share what they can, and a handler for each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from typing_extensions import Self, Unpack

from ._base.args import Deadline
from ._connection.link import Link
from ._connection.settings import ConnectOptions, spelled
from ._memory.buffer import Memory
from ._server.base import CLOSERS, NOTICE, ServerBase, ServerStats, close_quietly
from ._server.gate import Guest
from .connection import Connection
from .enums import AccessFlags
from .mr import MR

__all__ = ["Server", "ServerStats"]


class Server(ServerBase[Connection]):
    """Listens on a TCP address, and runs a handler for each peer that calls ``connect``, in a thread of its own.

    All connections share one context and one protection domain. A peer that is slow or hostile in its handshake holds
    up nobody else. When ``handler(conn)`` returns or raises, its connection is closed; an exception is logged (logger
    ``pyverbs_lite.server``) with the peer's address, but for the one that says that the peer or this side has closed,
    and the server goes on. ::

        with pvl.Server("0.0.0.0", 18515, handler, buffers={"cache": cache}) as server:
            server.serve_forever()

    A region of the shared protection domain can be reached by every peer that knows its rkey, also one that was
    registered with a connection.

    Args:
        host: the address to bind; only that one. ``""`` binds every address, IPv4 and IPv6.
        port: the TCP port; 0 takes a free one.
        handler: called with a ``Connection``.
        max_connections: so many peers at a time; one more is refused as BUSY.
        max_handshakes: how many QPs are made at a time.
        backlog: how many may wait for TCP to accept them.
        buffers: name -> buffer: registered once, and offered to every peer.
        timeout: seconds for one peer's handshake.

    The others are those of ``connect``.

    Attributes:
        host, port: the address it is bound to.

    Raises:
        OSError: the address cannot be bound, or a verb was refused.
        DeviceNotFoundError: there is no such device.
        TypeError, ValueError, BufferError: an option or a buffer is not what it must be.
    """

    def __init__(
        self,
        host: str,
        port: int,
        handler: Callable[[Connection], object],
        *,
        max_connections: int = 500,
        max_handshakes: int = 32,
        backlog: int = 512,
        **options: Unpack[ConnectOptions],
    ) -> None:
        if not callable(handler):
            raise TypeError(f"handler must be callable with a Connection, not {handler!r}")
        super().__init__(host, port, max_connections, max_handshakes, backlog, options)
        self._handler = handler
        self._threads: set[threading.Thread] = set()
        self._stopped = threading.Event()
        self._stop_lock = threading.RLock()
        self._until = Deadline(None)  # for the handlers to end, of who is in the greatest hurry

    # ------------------------------------------------------------ running

    def start(self) -> None:
        """Begin to accept, in threads; safe to call again.

        Raises:
            ClosedError: it was stopped.
        """
        with self._changed:
            self._check_running("start")
            if not self._started:
                self._started = True
                self._shared.hub.start()
                self._gate.start()

    def serve_forever(self) -> None:
        """Accept until ``stop`` is called, by a handler or another thread, and has done its work.

        An exception that a signal handler raises (Ctrl-C) gets out at once, and leaves the server running.
        """
        if not self._started:
            self.start()
        self._stopped.wait()

    def register(self, buffer: Memory, *, name: str, access: AccessFlags | None = None) -> MR:
        """Register a buffer once, and offer it to every peer, those that are connected now and those that come.

        Closing the region withdraws it from all of them.

        Args:
            access: by default all that a peer can be allowed: remote read, and for writable memory remote write and
                atomics too.

        Raises:
            As ``Connection.register``.
        """
        return self._register(buffer, name, access)

    def arrived(self, guest: Guest, link: Link) -> None:
        """Run the handler of a connection."""
        conn = Connection(link)
        thread = threading.Thread(
            target=self._handle, args=(conn, guest.control.peer), name=f"pyverbs_lite {guest.control.peer}", daemon=True
        )
        with self._changed:
            self._enter(conn, guest.control.peer)
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be had
            self._ended(guest.control.peer, error)
            self._threads.discard(thread)
            close_quietly(conn, 0.0)
            self._leave(conn)

    def _handle(self, conn: Connection, peer: str) -> None:
        error: BaseException | None = None
        try:
            self._handler(conn)
        except BaseException as raised:
            error = raised
        try:
            self._ended(peer, error)
            close_quietly(conn)
        finally:
            self._leave(conn)
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    # ------------------------------------------------------------ the end

    @property
    def closed(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopping

    def stop(self, timeout: float | None = 5.0) -> None:
        """Accept nobody any more, let the handlers end, then close what is left; safe to call again.

        In a handler this returns at once, and the rest goes on in a thread.

        Args:
            timeout: seconds for the handlers to end by themselves; None: without limit. Where several ask it to stop,
                the shortest counts.
        """
        deadline = Deadline(timeout)
        if os.getpid() != self._pid:  # a forked child: everything belongs to the parent, but for the descriptor
            self._stopping = True
            self._gate.drop()
            return
        with self._changed:
            self._stopping = True
            if deadline.left < self._until.left:
                self._until = deadline
                self._changed.notify_all()
        if threading.current_thread() in self._threads:
            threading.Thread(target=self._stop, name="pyverbs_lite stop", daemon=True).start()
        else:
            self._stop()

    def _stop(self) -> None:
        with self._stop_lock:
            if self._stopped.is_set():
                return
            self._gate.stop()
            with self._changed:
                while self._threads and not self._until.expired:
                    self._changed.wait(self._until.at_most(threading.TIMEOUT_MAX))
            left = self.connections
            if left:
                with ThreadPoolExecutor(min(CLOSERS, len(left)), thread_name_prefix="pyverbs_lite stop") as closers:
                    tuple(closers.map(lambda conn: close_quietly(conn, 1.0), left))
            notice = Deadline(NOTICE)
            with self._changed:
                while self._threads and not notice.expired:
                    self._changed.wait(notice.left)
            try:
                self._shared.close()
            finally:
                self._stopped.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(5.0 if kind is None else 0.0)


spelled(Server.__init__)
