"""Completion channels: descriptors that tell when a completion queue has something."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable

from ._base.check import check_neg, check_ptr, check_rc
from ._base.resource import Resource
from .device import Context
from .ffi import CData, lib

__all__ = ["CompChannel", "Destroy"]


class CompChannel(Resource):
    """A completion channel; ``fileno()`` is readable when an armed CQ got a completion. The descriptor never blocks.

    Several CQs may share one, and threads may wait for different ones: whichever takes the events wakes the others. Who
    calls ``get_events`` beside waiting threads may delay one of them by up to 0.1 s.

    Verb: ibv_create_comp_channel
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._lock = threading.RLock()
        #: Who sleeps here is told when somebody took events, or stopped sleeping on the descriptor; made for the first
        #: who waits for that, with the lock held, for few channels are shared and there may be thousands.
        self._news: threading.Condition | None = None
        self._taken = 0
        self._reader: tuple[int, object] | None = None
        handle = check_ptr("ibv_create_comp_channel", lib.ibv_create_comp_channel(context._handle))
        destroy = Destroy("ibv_destroy_comp_channel", lib.ibv_destroy_comp_channel, self._lock)
        self._own(handle, destroy, context, label=f"CompChannel of {context.name}")
        check_neg("fcntl", lib.pvl_set_nonblocking(handle.fd))

    def fileno(self) -> int:
        """Return the descriptor, for select, poll or an event loop."""
        return int(self._handle.fd)

    def get_events(self) -> int:
        """Take and acknowledge every event that waits; return how many there were, 0 too.

        Which CQ an event was for does not matter: poll every CQ of the channel afterwards.

        Verb: ibv_get_cq_event, ibv_ack_cq_events
        """
        with self._lock:
            count = check_neg("ibv_get_cq_event", lib.pvl_drain_events(self._handle))
            if count:
                self._taken += count
                self._tell()
            return count

    def _tell(self) -> None:
        if self._news is not None:
            self._news.notify_all()

    def _sleep(self, seconds: float, seen: int) -> None:
        """Sleep until events came, or until any thread took some since ``_taken`` was ``seen``; signal handlers run.

        One thread at a time sleeps on the descriptor and takes the events of all CQs. The others wait to be told: an
        event that was taken does not make the descriptor readable for them.
        """
        before, me = self._reader, (threading.get_ident(), object())
        try:
            with self._lock:
                if self._taken != seen:
                    return
                if self._reader is not None and self._reader[0] != me[0]:  # a signal handler may sleep in our sleep
                    self._news = self._news or threading.Condition(self._lock)
                    self._news.wait(seconds)
                    return
                before, self._reader = self._reader, me
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            if poll.poll(seconds * 1000):
                self.get_events()
        finally:
            if self._reader is me:
                self._reader = before
                with self._lock:  # somebody else has to take over
                    self._tell()


class Destroy:
    """Calls the verb that destroys, once no thread is inside of another verb on the same handle."""

    __slots__ = ("call", "lock", "verb")

    def __init__(self, verb: str, call: Callable[[CData], int], lock: threading.RLock) -> None:
        self.verb = verb
        self.call = call
        self.lock = lock

    def __call__(self, handle: CData) -> None:
        """Destroy the handle.

        Raises:
            VerbsOSError: the verb refused.
        """
        with self.lock:
            check_rc(self.verb, self.call(handle))
