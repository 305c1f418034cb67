"""Shared receive queues: receives that any of several QPs may take."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._base.args import check_int
from ._base.check import check_ptr, check_rc
from ._base.resource import Resource
from ._objects.inflight import InFlight, Ledger
from ._objects.posting import post
from ._objects.rules import check_recv
from .enums import QPType, SRQAttrMask, SRQInitAttrMask, SRQType
from .ffi import CData, ffi, lib
from .pd import PD
from .wr import RecvWR

if TYPE_CHECKING:
    from .cq import CQ
    from .xrcd import XRCD

__all__ = ["SRQ", "SRQAttr", "SRQInitAttr"]

_MAX32 = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SRQInitAttr:
    """What an SRQ is created with (``struct ibv_srq_init_attr_ex``).

    Attributes:
        max_wr: receives that it holds; the device rounds up.
        max_sge: scatter/gather elements of one receive.
        srq_limit: see ``SRQ.modify``; most devices take it from there only.
        srq_type: ``BASIC``; or ``XRC``, which needs ``xrcd`` and ``cq``; or ``TM`` (tag matching), which needs ``cq``.
        xrcd: the domain whose XRC_RECV QPs may take from it.
        cq: where receives that XRC_RECV QPs took, and tag operations, complete.
        max_num_tags, max_ops: of ``TM``: tags in the list, and operations on it in flight.
    """

    max_wr: int
    max_sge: int = 1
    srq_limit: int = 0
    srq_type: SRQType = SRQType.BASIC
    xrcd: XRCD | None = None
    cq: CQ | None = None
    max_num_tags: int = 0
    max_ops: int = 0


@dataclass(frozen=True, slots=True)
class SRQAttr:
    """What an SRQ is set to (``struct ibv_srq_attr``).

    Attributes:
        max_wr: receives that it holds.
        max_sge: scatter/gather elements of one receive.
        srq_limit: the limit that is armed; 0 where none is.
    """

    max_wr: int
    max_sge: int
    srq_limit: int


class SRQ(Resource):
    """A shared receive queue; make one with ``PD.create_srq``, and QPs with ``QPInitAttr(srq=…)``.

    Requests complete on the receive CQ of the QP that took them, and in any order. They hold their memory regions until
    then; those that no QP took hold them until the SRQ is closed.

    Attributes:
        max_wr, max_sge: the sizes that the device gave, at least those asked for.
        srq_type: its kind.
        grh_room: bytes that every receive needs in front of the payload: 40 once a UD QP shares the queue.

    Verb: ibv_create_srq
    """

    # Like a QP: what is posted here holds memory regions.
    _closes_early = True

    def __init__(self, pd: PD, init_attr: SRQInitAttr) -> None:
        _check_init(pd, init_attr)
        extended = init_attr.srq_type != SRQType.BASIC
        raw = ffi.new("struct ibv_srq_init_attr_ex *" if extended else "struct ibv_srq_init_attr *")
        raw.attr.max_wr, raw.attr.max_sge, raw.attr.srq_limit = init_attr.max_wr, init_attr.max_sge, init_attr.srq_limit
        parents: list[Resource] = [pd]
        if extended:
            parents += _extend(raw, pd, init_attr)
            handle = check_ptr("ibv_create_srq_ex", lib.ibv_create_srq_ex(pd.context._handle, raw))
        else:
            handle = check_ptr("ibv_create_srq", lib.ibv_create_srq(pd._handle, raw))
        self.pd = pd
        self.context = pd.context
        self.srq_type = SRQType(init_attr.srq_type)
        self.xrcd = init_attr.xrcd
        self.cq = init_attr.cq
        self.max_wr: int = raw.attr.max_wr
        self.max_sge: int = raw.attr.max_sge
        self.grh_room = 0
        self._lock = threading.RLock()
        self._queue = InFlight(in_order=False)
        ledger = Ledger(QPType.XRC_RECV, self._queue)
        destroy = _DestroySRQ(self._lock, ledger, self.cq)
        self._own(handle, destroy, *parents, label=f"SRQ of {pd.context.name}")
        if self.cq is not None:
            # XRC_RECV QPs have no receive CQ, and may be another process's: only the SRQ knows these receives.
            self.cq._ledgers[-id(ledger)] = ledger  # a key that is no QP's number

    def __repr__(self) -> str:
        return f"<{self.srq_type.name} SRQ of {self.max_wr} receives{' (closed)' if self.closed else ''}>"

    @property
    def recvs_in_flight(self) -> int:
        """How many receives wait for a message, or for their completion to be polled."""
        return len(self._queue)

    def query(self) -> SRQAttr:
        """Ask the device for the sizes and the limit.

        Verb: ibv_query_srq
        """
        raw = ffi.new("struct ibv_srq_attr *")
        with self._lock:
            check_rc("ibv_query_srq", lib.ibv_query_srq(self._handle, raw))
        return SRQAttr(raw.max_wr, raw.max_sge, raw.srq_limit)

    def modify(self, *, max_wr: int | None = None, srq_limit: int | None = None) -> None:
        """Resize the queue, or arm its limit.

        Args:
            max_wr: the new size; what is queued stays queued. Not every device can (``DeviceCapFlags.SRQ_RESIZE``).
            srq_limit: when fewer receives than this are left, the asynchronous event ``SRQ_LIMIT_REACHED`` comes, once;
                then it must be armed again. 0 disarms.

        Raises:
            ValueError: out of range, or nothing was given.
            UnsupportedError: the device cannot.
            VerbsOSError: the verb refused, for example a size below the number of receives that are queued.

        Verb: ibv_modify_srq
        """
        if max_wr is None and srq_limit is None:
            raise ValueError("modify an SRQ with max_wr=, with srq_limit=, or with both")
        raw, mask = ffi.new("struct ibv_srq_attr *"), SRQAttrMask(0)
        if max_wr is not None:
            raw.max_wr = check_int("max_wr", max_wr, 1, self.context.query_device().max_srq_wr)
            mask |= SRQAttrMask.MAX_WR
        if srq_limit is not None:
            raw.srq_limit = check_int("srq_limit", srq_limit, 0, self.max_wr if max_wr is None else max_wr)
            mask |= SRQAttrMask.LIMIT
        with self._lock:
            check_rc("ibv_modify_srq", lib.ibv_modify_srq(self._handle, raw, int(mask)))
            if max_wr is not None:
                self.max_wr = self.query().max_wr

    def get_srq_num(self) -> int:
        """Return its number, which a peer's XRC_SEND QP names it by (``SendWR.remote_srqn``).

        Raises:
            UnsupportedError: the device gives its SRQs no numbers, which only XRC needs.

        Verb: ibv_get_srq_num
        """
        raw = ffi.new("uint32_t *")
        with self._lock:
            check_rc("ibv_get_srq_num", lib.ibv_get_srq_num(self._handle, raw))
        return int(raw[0])

    def post_recv(self, *requests: RecvWR) -> None:
        """Post a list of receive buffers.

        Raises:
            TypeError, ValueError: a request cannot be right: too many SGEs, memory that may not be written, too short
                for a datagram where a UD QP shares the queue. Nothing was posted.
            QueueFullError: no free slot; ``posted`` says how many of the list were accepted.
            VerbsOSError: the verb refused the request number ``posted``.

        Verb: ibv_post_srq_recv
        """
        kept = [check_recv(wr, self.pd, self.max_sge, "this SRQ's max_sge", grh_room=self.grh_room) for wr in requests]
        with self._lock:
            post("ibv_post_srq_recv", lib.ibv_post_srq_recv, self._handle, requests, kept, self._queue)


def _check_init(pd: PD, init_attr: SRQInitAttr) -> None:
    """Check what an SRQ is asked to be; the device would say no more than EINVAL."""
    if not isinstance(init_attr, SRQInitAttr):
        raise TypeError(f"an SRQ is made from an SRQInitAttr, not {init_attr!r}")
    limits = pd.context.query_device()
    check_int("max_wr", init_attr.max_wr, 1, limits.max_srq_wr)
    check_int("max_sge", init_attr.max_sge, 1, limits.max_srq_sge)
    check_int("srq_limit", init_attr.srq_limit, 0, init_attr.max_wr)
    kind = SRQType(init_attr.srq_type)
    for member, kinds in _NEEDS.items():
        given = getattr(init_attr, member)
        if bool(given) != (kind in kinds):
            names = " or ".join(known.name for known in kinds)
            raise ValueError(f"{member} goes with an SRQ of type {names}, and with no other; this is {kind.name}")
        if isinstance(given, Resource) and getattr(given, "context", None) is not pd.context:
            raise ValueError(f"{member} belongs to {getattr(given, 'context', None)!r}, and the PD to {pd.context!r}")
    for member in ("max_num_tags", "max_ops"):
        check_int(member, getattr(init_attr, member), 0, _MAX32)


#: Member -> the types of SRQ that need it; the others cannot take it.
_NEEDS: dict[str, tuple[SRQType, ...]] = {
    "xrcd": (SRQType.XRC,),
    "cq": (SRQType.XRC, SRQType.TM),
    "max_num_tags": (SRQType.TM,),
    "max_ops": (SRQType.TM,),
}


def _extend(raw: CData, pd: PD, init_attr: SRQInitAttr) -> list[Resource]:
    """Fill what only the extended struct has; return what the SRQ then depends on."""
    mask = SRQInitAttrMask.TYPE | SRQInitAttrMask.PD
    raw.srq_type, raw.pd = SRQType(init_attr.srq_type), pd._handle
    depends: list[Resource] = []
    if init_attr.xrcd is not None:
        raw.xrcd = init_attr.xrcd._handle
        mask |= SRQInitAttrMask.XRCD
        depends.append(init_attr.xrcd)
    if init_attr.cq is not None:
        raw.cq = init_attr.cq._handle
        mask |= SRQInitAttrMask.CQ
        depends.append(init_attr.cq)
    if init_attr.srq_type == SRQType.TM:
        raw.tm_cap.max_num_tags, raw.tm_cap.max_ops = init_attr.max_num_tags, init_attr.max_ops
        mask |= SRQInitAttrMask.TM
    raw.comp_mask = int(mask)
    return depends


class _DestroySRQ:
    """Destroys an SRQ, reads the completions that it leaves behind, and lets go of what was never received."""

    __slots__ = ("cq", "ledger", "lock")

    def __init__(self, lock: threading.RLock, ledger: Ledger, cq: CQ | None) -> None:
        self.lock = lock
        self.ledger = ledger
        # Weak, because a finaliser that leads to a CQ would keep what hangs on it for ever.
        self.cq = None if cq is None else weakref.ref(cq)

    def __call__(self, handle: CData) -> None:
        with self.lock:
            check_rc("ibv_destroy_srq", lib.ibv_destroy_srq(handle))
        if self.cq is not None and (cq := self.cq()) is not None:
            cq._forget(-id(self.ledger), self.ledger)
        self.ledger.recvs.clear()
