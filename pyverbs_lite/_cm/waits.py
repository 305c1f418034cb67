"""The events of one ``rdma_cm_id``: waiting for them, and where they arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._base.args import Deadline
from ..cm_channel import EventChannel
from ..cm_events import CMEvent, error_of
from ..enums.cm import CMEventType
from ..errors import HandshakeTimeout, WaitTimeout
from ..ffi import lib
from . import calls
from .state import CMState

if TYPE_CHECKING:
    from ..cm_qp import CMQP

__all__ = ["CMWaits"]

_E = CMEventType
#: After these librdmacm may have moved the QP.
_MOVES = (_E.ESTABLISHED, _E.CONNECT_ERROR, _E.REJECTED, _E.UNREACHABLE, _E.DISCONNECTED)
#: What silence means.
_SILENCE = {
    "rdma_resolve_addr": ": nobody answers for this address on its network",
    "rdma_resolve_route": ": the subnet manager does not answer",
    "rdma_connect": ": the peer does not answer, or its program does not accept",
    "rdma_accept": ": the peer does not go on",
    "rdma_disconnect": ": the peer does not confirm; it is ended all the same",
}


class CMWaits(CMState):
    """The part of a ``CMID`` that waits."""

    channel: EventChannel
    qp: CMQP | None
    disconnected: bool
    _sync: bool

    def get_event(self, timeout: float | Deadline | None = None) -> CMEvent:
        """Wait for the next event of this identifier, good or bad, and return it.

        Raises:
            WaitTimeout: none came in time.

        Verb: rdma_get_cm_event, rdma_ack_cm_event
        """
        return self.channel._await(lambda event: self in (event.id, event.listen_id), calls.deadline(timeout), self)

    def expect(self, *wanted: CMEventType, timeout: float | Deadline | None = 10.0, operation: str = "") -> CMEvent:
        """Wait for an event of one of these kinds and return it; neutral ones on the way are dropped.

        Raises:
            CMError: an error event ended the wait; each has its own class.
            PeerClosedError: the peer has disconnected.
            HandshakeTimeout: it did not come in time.

        Verb: rdma_get_cm_event, rdma_ack_cm_event
        """
        limit = calls.deadline(timeout)
        names = " or ".join(kind.name for kind in wanted)
        while True:
            try:
                event = self.channel._await(lambda event: event.id is self, limit, self)
            except WaitTimeout as late:
                text = f"{operation or 'rdma_cm'}: no {names} within {limit.seconds} s"
                error = HandshakeTimeout(f"{text}{_SILENCE.get(operation, '')}")
                error.operation = operation
                raise error from late
            if event.event in wanted and (not event.status or event.event == _E.DISCONNECTED):
                return event
            if (failure := error_of(event, operation)) is not None:
                raise failure

    def _done(self, limit: Deadline, operation: str, *wanted: CMEventType) -> CMEvent | None:
        """End a step: wait for its event, if this is synchronous."""
        return self.expect(*wanted, timeout=limit, operation=operation) if self._sync else None

    def _notice(self, event: CMEvent) -> None:
        """Take note of an event as it arrives; the channel's lock is held."""
        if event.event == _E.DISCONNECTED:
            self.disconnected = True
        if event.event in _MOVES:
            self._refresh()
        if event.group is not None:
            event.group._notice(event)

    def _refresh(self) -> None:
        if self.qp is not None and not self.qp.closed:
            self.qp.refresh()

    def migrate(self, channel: EventChannel | None) -> None:
        """Let its events arrive on another channel, also those that wait; None is a channel of its own.

        With None it is synchronous from then on, else it is not.

        Verb: rdma_migrate_id
        """
        self._migrate(channel, listening=True)

    def _migrate(self, channel: EventChannel | None, *, listening: bool) -> None:
        """Do that; where this does not listen, what waits for others on the old channel is left unread.

        A descriptor tells of what was not read, and some sleep on that.
        """
        old, target = self.channel, EventChannel() if channel is None else channel
        first, second = sorted((old._lock, target._lock), key=id)
        with first, second:
            handle = self._handle
            while listening and old._fetch():  # who asks for a connection moves with whom it asks
                pass
            calls.check("rdma_migrate_id", lib.rdma_migrate_id(handle, target._handle))
            moved = [event for event in old._events if self in (event.id, event.listen_id) and event.id is not None]
            for event in moved:
                old._events.remove(event)
                if event.id is not self and event.id is not None:  # a request goes where its listener is
                    event.id.migrate(target)
            target._events.extend(moved)
            target._arrived += len(moved)
            target._news.notify_all()
            self.channel, self._place.lock = target, target._lock
            self._attach(target)
            self._detach(old)
        was_own, self._sync = self._sync, channel is None
        if was_own:
            old.close()
