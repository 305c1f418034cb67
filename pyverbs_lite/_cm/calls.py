"""What every call on an ``rdma_cm_id`` needs: its error, its deadline, the room for private data."""

from __future__ import annotations

import errno
import math
from typing import TYPE_CHECKING

from .._base.args import Deadline
from .._base.check import check_neg, os_error
from ..cm_events import CMEvent
from ..enums import QPType, TransportType
from ..enums.cm import CMEventType
from ..ffi import CData, ffi, lib
from .sockaddr import Address

if TYPE_CHECKING:
    from ..cm_channel import Place
    from .state import CMState

__all__ = ["DEPTHS", "DestroyID", "check", "check_answer", "check_room", "deadline", "milliseconds"]

#: Of the kernel alone; it escapes to users here and there.
_ENOTSUPP = 524
#: How much longer than the caller the kernel tries, where the caller's own deadline ends the wait.
_LONGER = 2.0
_MOST_MS = (1 << 31) - 1
_ANSWERS = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)
DEPTHS = (
    "the CMID is not in a state for this, or responder_resources, initiator_depth or the private data are more than the"
    " device or the protocol allows"
)
_NO_DEVICE = "no RDMA device has this address: give one of an interface with an RDMA device (rdma link shows them)"
_HINTS: dict[tuple[str, int], str] = {
    ("rdma_bind_addr", errno.ENODEV): _NO_DEVICE,
    ("rdma_bind_addr", errno.EADDRNOTAVAIL): "no interface of this machine has this address",
    ("rdma_bind_addr", errno.EADDRINUSE): "the port is taken, perhaps on another address too: see IDOption.REUSEADDR",
    ("rdma_bind_addr", errno.EINVAL): "it is bound already, or a link-local address came without its scope",
    ("rdma_resolve_addr", errno.ENODEV): _NO_DEVICE,
    ("rdma_resolve_addr", errno.ENETUNREACH): "no route leads to this address",
    ("rdma_resolve_addr", errno.EHOSTUNREACH): "no route leads to this address",
    ("rdma_resolve_addr", errno.EADDRNOTAVAIL): "no interface of this machine has the address src",
    ("rdma_resolve_addr", errno.EINVAL): "an address was resolved already, or a link-local one came without its scope",
    ("rdma_resolve_route", errno.EINVAL): "an address has to be resolved first, and a route is resolved once",
    ("rdma_listen", errno.EADDRINUSE): "another listener has the port",
    ("rdma_listen", errno.EINVAL): "it is bound to a peer, or listens already",
    ("rdma_accept", errno.EINVAL): DEPTHS,
    ("rdma_reject", errno.EINVAL): "nobody waits to be refused: it is accepted, refused or gone already",
    ("rdma_disconnect", errno.EINVAL): "it is not connected",
    ("rdma_establish", errno.EINVAL): "it has a QP of its own, for which librdmacm does this",
    ("rdma_join_multicast_ex", errno.EOPNOTSUPP): (
        "not on this transport: Linux has no IPv6 groups on RoCE v2, and iWARP has no multicast"
    ),
}
#: Step -> bytes of private data for a connection and for datagrams, on InfiniBand and RoCE.
_ROOM = {"connect": (56, 180), "accept": (196, 136), "reject": (148, 136)}
#: On iWARP: 255 less the 4 bytes in which the depths travel.
_MOST_IWARP = 251


def check(operation: str, rc: int, address: Address | None = None, hint: str = "") -> None:
    """Raise unless a function of librdmacm returned 0.

    Raises:
        VerbsOSError: or the subclass that fits.
    """
    if rc == 0:
        return
    number = ffi.errno if rc == -1 else abs(rc)
    number = errno.EOPNOTSUPP if number == _ENOTSUPP else number
    hint = _HINTS.get((operation, number), hint)
    if address is not None:
        hint = f"{address}: {hint}" if hint else str(address)
    raise os_error(operation, number, hint)


def check_answer(operation: str, rc: int) -> None:
    """Raise unless ``rdma_connect`` or ``rdma_accept`` returned 0; on iWARP both may bring the peer's answer at once.

    Raises:
        CMRejectedError: the peer refused, or is gone.
        VerbsOSError: as ``check``.
    """
    if rc < 0 and ffi.errno in _ANSWERS:
        CMEvent(event=CMEventType.REJECTED, status=-ffi.errno).raise_for_error(operation)
    check(operation, rc, hint=DEPTHS)


def deadline(timeout: float | Deadline | None) -> Deadline:
    """Return the deadline, or the one that so many seconds make."""
    return timeout if isinstance(timeout, Deadline) else Deadline(timeout)


def milliseconds(limit: Deadline, synchronous: bool) -> int:
    """Return how long the kernel is to try: as long as the caller waits, or a little longer than a caller who waits."""
    left = limit.left + (_LONGER if synchronous else 0.0)
    return _MOST_MS if math.isinf(left) else max(1, min(_MOST_MS, math.ceil(left * 1000)))


def check_room(step: str, owner: CMState, data: bytes) -> None:
    """Refuse private data that the protocol has no room for.

    Raises:
        ValueError: there are too many; the text says how many fit.
    """
    verbs = owner._handle.verbs
    iwarp = bool(verbs) and verbs.device.transport_type == TransportType.IWARP
    most = _MOST_IWARP if iwarp else _ROOM[step][owner.qp_type == QPType.UD]
    if len(data) > most:
        raise ValueError(
            f"{len(data)} bytes of private data do not fit into {'an' if step == 'accept' else 'a'} {step} of port"
            f" space {owner.ps.name}: at most {most} do; send the rest as a message"
        )


class DestroyID:
    """Destroys an identifier; its events were acknowledged as they were taken, so it never waits for that."""

    __slots__ = ("place",)

    def __init__(self, place: Place) -> None:
        self.place = place

    def __call__(self, handle: CData) -> None:
        with self.place.lock:
            check_neg("rdma_destroy_id", lib.rdma_destroy_id(handle))
