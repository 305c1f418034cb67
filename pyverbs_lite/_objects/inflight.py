"""What is in flight on a QP: which requests, and which memory they keep in place.

The ``wr_id`` that a device sees is not the caller's: it is a serial number of ours, unique in the process. So a
completion always finds its request: where callers use a ``wr_id`` twice, where a failed completion does not say whether
it was a send or a receive, where QPs share a CQ, and where a new QP got the number of one that is gone.

Nothing here refers to a QP or a CQ, so that a QP's finaliser may hold it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from ..enums import QPState, QPType, WCStatus
from ..ffi import CData

__all__ = ["Held", "Hold", "InFlight", "Ledger"]

#: Far from what anybody who posts through the C interface numbers requests with: counters, and pointers.
_serials = itertools.count(0xD5 << 56)


class Held(Protocol):
    """What a request in flight needs to stay: a memory region, an address handle, a memory window."""

    #: Numbers of the requests that need it; it refuses to close while there are any.
    _holders: set[int]

    @property
    def _handle(self) -> CData: ...


class Hold(NamedTuple):
    """A request in flight, and the regions and handles that it needs to stay where they are."""

    serial: int
    wr_id: int
    regions: tuple[Held, ...]

    @classmethod
    def of(cls, wr_id: int, regions: Iterable[Held]) -> Hold:
        """Give a request its serial number."""
        return cls(next(_serials), wr_id, tuple(regions))

    def tell(self, what: str) -> None:
        """Tell it to what is held, where it cares: ``"revert"`` was not carried out, ``"lost"`` nobody knows."""
        for thing in self.regions:
            if (hears := getattr(thing, what, None)) is not None:
                hears()


class InFlight:
    """The requests in flight of one queue, oldest first.

    Any line may be interrupted: by an exception (Ctrl-C), after which it is done again, or by a signal handler or a
    finaliser that uses this same queue. So regions count requests as a set of serial numbers, to let go twice is the
    same as once, and nothing is assumed to be as it was a line before.

    Args:
        in_order: whether requests complete in the order they were posted in, as they do in all queues but an SRQ. Then
            a completion also tells the end of all that were posted earlier: unsignaled ones say nothing themselves.
    """

    __slots__ = ("_held", "_in_order", "_lock", "_order")

    def __init__(self, *, in_order: bool = True) -> None:
        self._held: dict[int, Hold] = {}
        self._order: deque[int] = deque()  # may still have some at its head that are not held any more
        self._in_order = in_order
        # Reentrant: see above.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, holds: Sequence[Hold]) -> None:
        """Hold what is about to be posted."""
        with self._lock:
            for hold in holds:
                self._held[hold.serial] = hold
                if self._in_order:
                    self._order.append(hold.serial)
                for region in hold.regions:
                    region._holders.add(hold.serial)

    def wr_id(self, serial: int) -> int | None:
        """Return the caller's number of a request, or None if this queue has no such request in flight."""
        hold = self._held.get(serial)
        return None if hold is None else hold.wr_id

    def ended(self, serial: int) -> None:
        """Let go of a request that has completed, and of those that must have ended before it."""
        with self._lock:
            while serial in self._held:
                oldest = self._oldest(serial)
                if serial in self._held:  # still: else all up to it are gone, and the oldest is younger
                    self._let_go(oldest)

    def failed(self, serial: int) -> None:
        """Tell what a request holds that it was not carried out."""
        if (hold := self._held.get(serial)) is not None:
            hold.tell("revert")

    def drop(self, holds: Iterable[Hold]) -> None:
        """Let go of requests that were never posted."""
        with self._lock:
            for hold in holds:
                hold.tell("revert")
                self._let_go(hold.serial)
                with suppress(ValueError):
                    self._order.remove(hold.serial)

    def clear(self) -> None:
        """Let go of everything: the queue is empty or gone."""
        with self._lock:
            for serial, hold in list(self._held.items()):
                hold.tell("lost")
                self._let_go(serial)
            self._order.clear()

    def _oldest(self, default: int) -> int:
        try:
            return self._order[0]
        except IndexError:
            return default

    def _let_go(self, serial: int) -> None:
        hold = self._held.get(serial)
        for region in hold.regions if hold else ():
            region._holders.discard(serial)
        self._held.pop(serial, None)
        if self._order and self._order[0] == serial:
            self._order.popleft()


class Ledger:
    """Both queues of a QP, and the state that their completions tell of.

    Args:
        shared: the receives of the SRQ that the QP takes its from.
    """

    __slots__ = ("_queues", "qp_type", "shared", "state")

    def __init__(self, qp_type: QPType, shared: InFlight | None = None) -> None:
        self.qp_type = qp_type
        self.state = QPState.RESET
        #: Whether it is of receives -> the queue; made at its first request, for a connection's QP never has one here.
        self._queues: dict[bool, InFlight] = {} if shared is None else {True: shared}
        self.shared = shared is not None

    @property
    def sends(self) -> InFlight:
        """The send requests."""
        return self._queue(False)

    @property
    def recvs(self) -> InFlight:
        """The receives."""
        return self._queue(True)

    def _queue(self, is_recv: bool) -> InFlight:
        queue = self._queues.get(is_recv)
        return self._queues.setdefault(is_recv, InFlight()) if queue is None else queue

    def find(self, serial: int) -> tuple[int, bool] | None:
        """Return the caller's number of a request in flight, and whether it is a receive; None if there is none."""
        for is_recv, queue in tuple(self._queues.items()):
            if (wr_id := queue.wr_id(serial)) is not None:
                return wr_id, is_recv
        return None

    def completed(self, serial: int, status: int) -> None:
        """Take note of a completion; again and again is the same as once."""
        found = self.find(serial)
        if found is None:
            return
        is_recv = found[1]
        if status != WCStatus.SUCCESS:
            self._failed(is_recv)
            (self.recvs if is_recv else self.sends).failed(serial)
        (self.recvs if is_recv else self.sends).ended(serial)

    def _failed(self, is_recv: bool) -> None:
        """Follow the device, which moves a QP by itself when a request fails."""
        if not is_recv and self.qp_type in (QPType.UC, QPType.UD, QPType.RAW_PACKET):
            # Only the send queue stops; a QP that is in ERR already stays there.
            self.state = QPState.ERR if self.state == QPState.ERR else QPState.SQE
        else:
            self.state = QPState.ERR

    def clear(self) -> None:
        """Let go of everything that goes with the QP: what is in an SRQ stays there for the others."""
        for is_recv, queue in tuple(self._queues.items()):
            if not (is_recv and self.shared):
                queue.clear()
