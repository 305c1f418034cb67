"""Asynchronous events: what happens to a device, its ports and its objects without anybody asking.

An event is copied and acknowledged in one step, so one that nobody looks at never keeps its object from being closed.
"""

from __future__ import annotations

import errno
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ._base.args import Deadline
from ._base.check import check_neg, os_error
from ._base.resource import Resource, _Handle
from ._objects.device_attr import known
from .enums import EventType
from .errors import WaitTimeout
from .ffi import CData, ffi, lib

if TYPE_CHECKING:
    from .cq import CQ
    from .qp import QP

__all__ = [
    "AsyncEvent",
    "CQEvent",
    "DeviceEvent",
    "EventSource",
    "PortEvent",
    "QPEvent",
    "SRQEvent",
    "WQEvent",
]

#: How long a wait sleeps before it looks whether the context was closed meanwhile.
_SLICE = 0.1


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """What every asynchronous event says; its class says which members come with it.

    Attributes:
        event_type: a plain number where the driver gives one that has no name here.
    """

    event_type: EventType

    @property
    def name(self) -> str:
        """The name of the type, without its prefix."""
        return getattr(self.event_type, "name", str(self.event_type))

    def __str__(self) -> str:
        return f"{self.name}: {_MEANINGS.get(self.event_type, 'an event that has no description here')}"


@dataclass(frozen=True, slots=True)
class QPEvent(AsyncEvent):
    """An event of a queue pair.

    Attributes:
        qp: the QP, or None where it was closed meanwhile or made past the library.
        qp_num: its number, known also then.
    """

    qp: QP | None
    qp_num: int


@dataclass(frozen=True, slots=True)
class CQEvent(AsyncEvent):
    """An event of a completion queue: ``CQ_ERR``, it overflowed and completions are lost.

    Attributes:
        cq: the CQ, or None where it was closed meanwhile or made past the library.
    """

    cq: CQ | None


@dataclass(frozen=True, slots=True)
class SRQEvent(AsyncEvent):
    """An event of a shared receive queue.

    Attributes:
        srq: the SRQ, or None where it was closed meanwhile or made past the library.
    """

    srq: Resource | None


@dataclass(frozen=True, slots=True)
class WQEvent(AsyncEvent):
    """An event of a work queue.

    Attributes:
        wq: the WQ, or None where it was closed meanwhile or made past the library.
        wq_num: its number, known also then.
    """

    wq: Resource | None
    wq_num: int


@dataclass(frozen=True, slots=True)
class PortEvent(AsyncEvent):
    """An event of a port; ask ``Context.query_port`` for its state now, which may have changed again.

    Attributes:
        port_num: counted from 1.
    """

    port_num: int


@dataclass(frozen=True, slots=True)
class DeviceEvent(AsyncEvent):
    """An event of the whole device: ``DEVICE_FATAL``, nothing works any more; close the context."""


_MEANINGS: dict[int, str] = {
    EventType.CQ_ERR: "the CQ overflowed, and completions are lost: make it as deep as its QPs' queues together",
    EventType.QP_FATAL: "the QP failed and is in ERR",
    EventType.QP_REQ_ERR: "the QP received a request that it must refuse, and is in ERR",
    EventType.QP_ACCESS_ERR: "the peer reached for memory that it may not, and the QP is in ERR",
    EventType.COMM_EST: "the first message came while the QP was still in RTR",
    EventType.SQ_DRAINED: "the QP is in SQD and its send queue has stopped",
    EventType.PATH_MIG: "the connection moved to its alternate path",
    EventType.PATH_MIG_ERR: "the connection could not move to its alternate path",
    EventType.DEVICE_FATAL: "the device failed: close its context",
    EventType.PORT_ACTIVE: "the port came up",
    EventType.PORT_ERR: "the port went down",
    EventType.LID_CHANGE: "the port has another LID",
    EventType.PKEY_CHANGE: "the port's P_Key table changed",
    EventType.SM_CHANGE: "the port has another subnet manager",
    EventType.SRQ_ERR: "the SRQ failed",
    EventType.SRQ_LIMIT_REACHED: "fewer receives are posted to the SRQ than its limit; the limit is disarmed",
    EventType.QP_LAST_WQE_REACHED: "the QP is in ERR and takes no more receives from its SRQ",
    EventType.CLIENT_REREGISTER: "the subnet manager asks for all subscriptions anew",
    EventType.GID_CHANGE: "the port's GID table changed",
    EventType.WQ_FATAL: "the WQ failed and is in ERR",
}
if lib.PVL_HAS_DEVICE_SPEED_CHANGE > 0:
    _MEANINGS[EventType.DEVICE_SPEED_CHANGE] = "the effective speed of the port changed"

#: What kind of element an event has; all that are not listed are for a port.
_OF_QP = (
    EventType.QP_FATAL,
    EventType.QP_REQ_ERR,
    EventType.QP_ACCESS_ERR,
    EventType.COMM_EST,
    EventType.SQ_DRAINED,
    EventType.PATH_MIG,
    EventType.PATH_MIG_ERR,
    EventType.QP_LAST_WQE_REACHED,
)
_BUILD: dict[int, Callable[[EventType, Resource, CData], AsyncEvent]] = {
    EventType.CQ_ERR: lambda kind, root, raw: CQEvent(kind, cast("CQ | None", _find(root, raw))),
    EventType.SRQ_ERR: lambda kind, root, raw: SRQEvent(kind, _find(root, raw)),
    EventType.SRQ_LIMIT_REACHED: lambda kind, root, raw: SRQEvent(kind, _find(root, raw)),
    EventType.WQ_FATAL: lambda kind, root, raw: WQEvent(kind, _find(root, raw), raw.number),
    EventType.DEVICE_FATAL: lambda kind, root, raw: DeviceEvent(kind),
    **dict.fromkeys(
        _OF_QP, lambda kind, root, raw: QPEvent(kind, cast("QP | None", _find(root, raw, "qp_num")), raw.number)
    ),
}


def _event(root: Resource, raw: CData) -> AsyncEvent:
    """Make a value of a ``struct pvl_event``."""
    kind = known(EventType, raw.event_type)
    build = _BUILD.get(kind)
    return build(kind, root, raw) if build is not None else PortEvent(kind, raw.element)


def _descendants(root: Resource) -> Iterator[Resource]:
    for child in root._children:
        yield child
        yield from _descendants(child)


def _find(root: Resource, raw: CData, number: str = "") -> Resource | None:
    """Find the object that an event is for, by its address; its numbers tell it from one that was made there since."""
    for candidate in _descendants(root):
        handle = candidate._owned.cdata
        if handle is None or int(ffi.cast("uintptr_t", handle)) != raw.element:
            continue
        if number and getattr(candidate, number, None) != raw.number:
            continue
        with suppress(AttributeError):  # not every struct's declaration has it
            if handle.handle != raw.handle:
                continue
        return candidate
    return None


class EventSource(Resource):
    """The part of a ``Context`` that tells of asynchronous events."""

    def _own(
        self, cdata: CData, destroy: Callable[[CData], None], *parents: Resource, label: str | None = None
    ) -> None:
        #: One thread takes an event, and none while the device is closed. Reentrant, as signal handlers may take one.
        self._event_lock = threading.RLock()
        self._raw_event = ffi.new("struct pvl_event *")
        super()._own(cdata, destroy, *parents, label=label)
        check_neg("fcntl", lib.pvl_set_nonblocking(cdata.async_fd))

    def _close(self, owned: _Handle) -> None:
        with self._event_lock:
            super()._close(owned)

    @property
    def async_fd(self) -> int:
        """The descriptor that is readable while an event waits; it never blocks.

        For select, poll or an event loop: ``loop.add_reader(context.async_fd, …)``; then call ``get_async_events``.
        """
        self._handle  # noqa: B018 - in a forked child the lock may be held by a thread that is not there
        with self._event_lock:
            return int(self._handle.async_fd)

    def get_async_event(self, timeout: float | None = None) -> AsyncEvent:
        """Wait for an asynchronous event and return it, already acknowledged; other threads run meanwhile.

        Args:
            timeout: seconds; None waits without limit, 0 only looks.

        Raises:
            WaitTimeout: none came in time.
            ClosedError: the context was closed meanwhile.

        Verb: ibv_get_async_event, ibv_ack_async_event
        """
        deadline = Deadline(timeout)
        while True:
            fd = self.async_fd
            if (event := self._take_event()) is not None:
                return event
            if deadline.expired:
                raise WaitTimeout(f"no asynchronous event within {timeout} s", "ibv_get_async_event")
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(deadline.at_most(_SLICE) * 1000)

    def get_async_events(self) -> list[AsyncEvent]:
        """Return every asynchronous event that waits, oldest first; an empty list where there is none.

        Verb: ibv_get_async_event, ibv_ack_async_event
        """
        return list(iter(self._take_event, None))

    def _take_event(self) -> AsyncEvent | None:
        raw = self._raw_event
        self._handle  # noqa: B018 - as above
        with self._event_lock:
            rc = lib.pvl_take_event(self._handle, raw)
            if rc == -errno.EAGAIN:
                return None
            if rc:
                raise os_error("ibv_get_async_event", rc)
            # It stays marked as taken until here, so an interrupt leaves it for the next call.
            event = _event(self, raw)
            raw.taken = 0
        return event
