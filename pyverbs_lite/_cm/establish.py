"""From a resolved address, or from somebody who wants to connect, to a connection over librdmacm.

The records travel as private data of the connection manager's own exchange, and so the first message never meets an
empty receive queue: the side that accepts is in RTS before it answers. What has no room there (named buffers, READY)
follows in messages. The side that connected speaks first, as iWARP demands.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from .._base.args import Deadline
from .._connection.establish import LAST_WORD, demand_key, drive, reason_for, swap_proofs, tell_why
from .._connection.settings import Settings
from .._control.base import refusal
from .._control.control import Peer
from ..cmid import CMID
from ..enums.cm import CMEventType
from ..errors import ClosedError, CMRejectedError, HandshakeTimeout, PeerClosedError, VerbsError, VerbsOSError
from ..wire import HelloReceived, ReadyReceived
from .control import CMControl
from .link import CMLink
from .private_data import pack_refusal, read_refusal

__all__ = ["establish_accepting", "establish_connecting"]


class _Attempt:
    """One connection on its way; whatever fails, everything is closed again, and the peer told why."""

    def __init__(self, cmid: CMID, settings: Settings, deadline: Deadline, *, accepting: bool) -> None:
        try:
            self.control = CMControl(cmid)
        except BaseException:
            cmid.close()
            raise
        self.peer = Peer(self.control)
        self.id = cmid
        self.settings = settings
        self.accepting = accepting
        self.keyed = demand_key(self.control, settings, accepting=accepting, hello_first=True)
        self.deadline = deadline
        self.link: CMLink | None = None
        self.connected = False
        self.answer_due = False  # the peer was asked for a connection, and has not answered

    def hello(self) -> HelloReceived:
        return self.control.expect(HelloReceived, self.deadline, self.peer.note)

    def make_link(self) -> tuple[CMLink, bytes]:
        link = self.link = CMLink(self.settings, self.control, self.peer)
        self.control.channel.hello(link.endpoint)
        return link, self.control.hello_data()

    def authenticate(self) -> None:
        """Swap proofs of the key, which cover both records, before anything that is named."""
        if self.keyed:
            drive(self.control, swap_proofs(self.control, accepting=self.accepting), self.peer, self.deadline)
            self.control.flush(self.deadline)

    def greet(self, link: CMLink) -> None:
        """Say which buffers there are, and that this side is ready."""
        self.control.channel.domain(link.pd.domain)
        link.registry.register_all(self.settings, self.deadline)
        self.control.channel.ready()
        self.control.flush(self.deadline)

    def expect_ready(self) -> None:
        self.control.expect(ReadyReceived, self.deadline, self.peer.note)

    def give_up(self, error: BaseException) -> None:
        """Tell the peer why, and close everything."""
        with suppress(VerbsError):
            if self.connected:
                tell_why(self.control, error)
            elif not self.answer_due:
                self.id.reject(pack_refusal(*reason_for(error)))
        if self.link is not None and self.link.iwarp and self.answer_due:
            # The kernel waits for the peer's answer before it lets go of both: longer than the caller does.
            threading.Thread(target=self.close, args=(error,), name=f"end of {self.id!r}", daemon=True).start()
        else:
            self.close(error)

    def close(self, error: BaseException) -> None:
        """Close everything; who has been told why is given time to hear it."""
        try:
            if self.link is not None:
                if self.connected and isinstance(error, Exception) and not isinstance(error, HandshakeTimeout):
                    self.link._part(Deadline(LAST_WORD), ClosedError(f"the handshake failed: {error}"))
                self.link.close()
        finally:
            self.control.close()


def establish_connecting(cmid: CMID, settings: Settings, deadline: Deadline) -> CMLink:
    """Connect an identifier whose route is resolved; it is closed if that fails.

    Raises:
        HandshakeError: or the subclass that says what the peer or the network did.
        As ``CMLink``, for what this side lacks.
    """
    attempt = _Attempt(cmid, settings, deadline, accepting=False)
    try:
        link, private_data = attempt.make_link()
        attempt.answer_due = True
        try:
            event = cmid.connect(link.conn_param(private_data), timeout=deadline)
        except CMRejectedError as error:
            attempt.answer_due = False
            if (said := read_refusal(error.private_data)) is None:
                raise
            raise refusal(attempt.control.peer, said) from error
        attempt.answer_due = False
        assert event is not None
        attempt.control.take_hello(event.private_data)
        link.to_rts(attempt.hello().endpoint)
        if event.event == CMEventType.CONNECT_RESPONSE:
            cmid.establish()
        link.in_rts()
        attempt.connected = True
        attempt.authenticate()
        attempt.greet(link)
        attempt.expect_ready()
        link.watch(settings.keep_alive)
    except BaseException as error:
        attempt.give_up(error)
        raise
    return link


def establish_accepting(cmid: CMID, settings: Settings, deadline: Deadline) -> CMLink:
    """Accept an identifier that wants to connect; it is refused and closed if that fails.

    Raises:
        As ``establish_connecting``.
    """
    attempt = _Attempt(cmid, settings, deadline, accepting=True)
    try:
        assert cmid.event is not None
        attempt.control.take_hello(cmid.event.private_data)
        remote = attempt.hello().endpoint
        try:
            link, private_data = attempt.make_link()
            link.to_rts(remote)
            cmid.accept(link.conn_param(private_data), timeout=deadline)
        except CMRejectedError as error:
            if (said := read_refusal(error.private_data)) is None:
                raise
            raise refusal(attempt.control.peer, said) from error
        except VerbsOSError as error:
            if not error.operation.startswith("rdma_"):
                raise
            # The kernel tells nobody of a request that was taken back, but refuses everything on it.
            raise PeerClosedError(f"{attempt.control.peer} gave up before it was accepted: {error}") from error
        link.in_rts()
        attempt.connected = True
        attempt.authenticate()
        attempt.expect_ready()
        attempt.greet(link)
        link.watch(settings.keep_alive)
    except BaseException as error:
        attempt.give_up(error)
        raise
    return link
