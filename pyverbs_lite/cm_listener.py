"""Waiting for peers to connect through librdmacm."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import cast

from typing_extensions import Self

from ._base.args import Deadline
from ._cm.establish import establish_accepting
from ._cm.sockaddr import Address
from ._connection.settings import Settings
from ._control.tcp import address_text
from .cm_channel import EventChannel
from .cmid import CMID
from .connection import Connection
from .enums.cm import IDOption
from .errors import ClosedError, VerbsError, WaitTimeout

__all__ = ["Listener", "listening"]


class Listener:
    """Identifiers of librdmacm that turn those who connect into connections; made by ``cm.listen``.

    Attributes:
        host, port: the address it is bound to.
    """

    def __init__(self, channel: EventChannel, ids: list[CMID], settings: Settings) -> None:
        self._channel = channel
        self._ids = ids
        self._settings = settings
        address = ids[-1].local_address
        self.host, self.port = address_text(address) if address else "", ids[-1].src_port

    def __repr__(self) -> str:
        return f"<cm.Listener on {self.host} port {self.port}{' (closed)' if self.closed else ''}>"

    def fileno(self) -> int:
        """Return a descriptor that is readable when somebody wants to connect."""
        return self._channel.fileno()

    def accept(self, timeout: float | None = None) -> Connection:
        """Wait for a peer and return the connection to it, in RTS; as ``pyverbs_lite.Listener.accept``.

        Raises:
            WaitTimeout: nobody came.
            CMError, HandshakeTimeout, PeerProtocolError, PeerClosedError, HandshakeError: what came was no good peer.
            DeviceNotFoundError, GIDError, VerbsOSError: this side could not make its end.
            ClosedError: the listener is closed.
        """
        deadline = Deadline(timeout)
        request, limit = self._next(deadline), deadline.sooner(self._settings.timeout)
        return Connection(establish_accepting(request, self._settings, limit))

    def _next(self, deadline: Deadline) -> CMID:
        """Wait for somebody to connect; several threads may."""
        try:
            event = self._channel._await(lambda event: event.listen_id in self._ids, deadline, self._channel)
        except WaitTimeout:
            raise WaitTimeout(f"nobody connected within {deadline.seconds} s", "accept") from None
        except ClosedError:
            raise ClosedError(f"{self!r} cannot accept") from None
        request = event.id
        assert request is not None
        try:
            request._migrate(None, listening=False)
        except BaseException:
            request.close()
            raise
        return request

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._channel.closed

    def close(self) -> None:
        """Stop listening; connections that were accepted go on. Safe to call again, and from another thread."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def listening(channel: EventChannel, host: str, port: int, backlog: int) -> list[CMID]:
    """Make the identifiers that listen on an address; two on every address, for iWARP keeps the families apart."""
    if host:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        cmid = channel.create_id()
        cmid.bind_addr(cast("Address", found[0][4]))
        cmid.listen(backlog)
        return [cmid]
    made = []
    for everywhere, needed in (("", True), ("::", False)):
        cmid = channel.create_id()
        try:
            if not needed:
                cmid.set_option(IDOption.AFONLY, 1)
            cmid.bind_addr((everywhere, port))
            cmid.listen(backlog)
        except VerbsError:
            cmid.close()
            if needed:
                raise
        else:
            port = cmid.src_port
            made.append(cmid)
    return made
