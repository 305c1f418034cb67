"""Event channels: where the events of ``CMID`` objects arrive.

An event is taken, copied and acknowledged in one step, so one that nobody looks at never keeps its ``CMID`` from being
closed. One lock per channel is held around every verb on its identifiers, the destroying ones too: librdmacm itself
touches an identifier and its QP while it reads an event.
"""

from __future__ import annotations

import errno
import itertools
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ._base.args import Deadline
from ._base.check import check_neg, check_ptr, os_error
from ._base.resource import Resource
from .cm_events import CMEvent, event_of
from .enums.cm import CMEventType, PortSpace
from .errors import WaitTimeout
from .ffi import CData, ffi, lib

if TYPE_CHECKING:
    from .cm_mcast import CMGroup
    from .cmid import CMID

__all__ = ["EventChannel", "Place"]

#: One sleep of a wait: a close in another thread is noticed after this at the latest.
_SLICE = 0.1
_NO_CM = "is the rdma_ucm module loaded, and may this process open /dev/infiniband/rdma_cm?"

#: Numbers by which librdmacm tells whose event it is: an address may be another identifier's meanwhile.
serials = itertools.count(1)
ids: weakref.WeakValueDictionary[int, CMID] = weakref.WeakValueDictionary()
groups: weakref.WeakValueDictionary[int, CMGroup] = weakref.WeakValueDictionary()


class Place:
    """Which channel's lock guards an identifier now; shared with what destroys the identifier and its QP."""

    __slots__ = ("lock",)

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock


class EventChannel(Resource):
    """A channel for the events of any number of ``CMID`` objects; ``fileno()`` is readable while one waits.

    The descriptor never blocks. Threads may share a channel: each event goes to one of them.

    Verb: rdma_create_event_channel
    """

    def __init__(self) -> None:
        handle = check_ptr("rdma_create_event_channel", lib.rdma_create_event_channel(), _NO_CM)
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._events: deque[CMEvent] = deque()
        self._arrived = 0
        self._reader: tuple[int, object] | None = None
        self._raw = ffi.new("struct pvl_cm_event *")
        #: A new identifier of an event that was not wholly read yet.
        self._unborn: CMID | None = None
        self._own(handle, _DestroyChannel(self._lock), label="EventChannel")
        check_neg("fcntl", lib.pvl_set_nonblocking(handle.fd))

    def __repr__(self) -> str:
        return f"<EventChannel{' (closed)' if self.closed else ''}>"

    def fileno(self) -> int:
        """Return the descriptor, for select, poll or an event loop; then call ``get_events``.

        An event that a wait for another identifier's has read on its way does not make it readable.
        """
        return int(self._handle.fd)

    def create_id(self, ps: PortSpace = PortSpace.TCP) -> CMID:
        """Make a ``CMID`` whose calls return at once, and whose events arrive here.

        Verb: rdma_create_id
        """
        return cast("CMID", self._make("CMID", ps))

    def get_event(self, timeout: float | None = None) -> CMEvent:
        """Wait for the next event of any of the channel's identifiers; other threads run meanwhile.

        Error events are returned as any other: see ``CMEvent.raise_for_error``.

        Args:
            timeout: seconds; None waits without limit, 0 only looks.

        Raises:
            WaitTimeout: none came in time.
            ClosedError: the channel was closed meanwhile.

        Verb: rdma_get_cm_event, rdma_ack_cm_event
        """
        return self._await(lambda event: True, Deadline(timeout), self)

    def get_events(self) -> list[CMEvent]:
        """Return every event that waits, oldest first; an empty list where there is none.

        Verb: rdma_get_cm_event, rdma_ack_cm_event
        """
        with self._lock:
            while self._fetch():
                pass
            events = list(self._events)
            self._events.clear()
            return events

    # ------------------------------------------------------------ waiting

    def _await(self, match: Callable[[CMEvent], bool], deadline: Deadline, who: Resource) -> CMEvent:
        """Wait for the first event that matches, as long as who waits is open; the others stay, in their order."""
        while True:
            who._handle  # noqa: B018 - raises ClosedError
            with self._lock:
                # No more than needed is read, so that the descriptor tells of what was not.
                while (found := next((event for event in self._events if match(event)), None)) is None:
                    if not self._fetch():
                        break
                if found is not None:
                    self._events.remove(found)
                    return found
                seen = self._arrived
            if deadline.expired:
                raise WaitTimeout(
                    f"no event of the connection manager within {deadline.seconds} s", "rdma_get_cm_event"
                )
            self._sleep(deadline.at_most(_SLICE), seen)

    def _sleep(self, seconds: float, seen: int) -> None:
        """Sleep until an event came, or until another thread took one since ``_arrived`` was ``seen``."""
        before, me = self._reader, (threading.get_ident(), object())
        try:
            with self._news:
                if self._arrived != seen:
                    return
                if self._reader is not None and self._reader[0] != me[0]:  # a signal handler may sleep in our sleep
                    self._news.wait(seconds)
                    return
                before, self._reader = self._reader, me
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            poll.poll(int(seconds * 1000) + 1)
        finally:
            if self._reader is me:
                self._reader = before
                with self._news:  # somebody else has to take over
                    self._news.notify_all()

    def _fetch(self) -> bool:
        """Read one event, if there is one; lock held."""
        raw = self._raw
        rc = lib.pvl_cm_take(self._handle, raw)
        if rc == -errno.EAGAIN:
            return False
        if rc:
            raise os_error("rdma_get_cm_event", rc)
        # It stays marked as taken until the end, so an interrupt leaves it for the next call.
        event = self._read(raw)
        if event is not None:
            self._events.append(event)
            self._arrived += 1
            self._news.notify_all()
        self._unborn = None
        raw.taken = 0
        return True

    def _read(self, raw: CData) -> CMEvent | None:
        """Make the value of an event; None where what it is for was closed meanwhile, for that nobody waits."""
        owner, group = ids.get(raw.context), groups.get(raw.group)
        if raw.event == CMEventType.CONNECT_REQUEST:
            fresh = cast("CMID", Resource._kinds["CMID"]._adopt(self, raw.request))  # type: ignore[attr-defined]
            if owner is None or owner.closed:
                fresh.close()
                return None
            event = event_of(raw, fresh, owner, None)
            fresh.event = event
            return event
        if owner is None and group is not None:
            owner = group.id
        if owner is None:
            return None
        event = event_of(raw, owner, None, group)
        owner._notice(event)
        return event

    def _forget(self, owner: CMID) -> None:
        """Drop the events of an identifier that is gone, and the identifiers that nobody asked it for."""
        with self._lock:
            dropped = [event for event in self._events if owner in (event.id, event.listen_id)]
            self._events = deque(event for event in self._events if owner not in (event.id, event.listen_id))
        for event in dropped:
            if event.id is not owner and event.id is not None:
                event.id.close()


class _DestroyChannel:
    __slots__ = ("lock",)

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock

    def __call__(self, handle: CData) -> None:
        with self.lock:
            lib.rdma_destroy_event_channel(handle)
