"""Receive work queues outside of a QP, and the tables by which a QP spreads what it receives over them (RSS)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ._base.args import check_flags, check_int
from ._base.check import check_ptr, check_rc
from ._base.resource import Resource
from ._objects.device_attr import known
from ._objects.inflight import Ledger
from ._objects.posting import post
from ._objects.rules import check_recv
from .cq import CQ
from .device import Context
from .enums import QPState, QPType, RXHashFields, RXHashFunction, WQAttrMask, WQFlags, WQInitAttrMask, WQState, WQType
from .errors import InvalidTransition, StateError
from .ffi import CData, ffi, lib
from .pd import PD
from .wr import RecvWR

__all__ = ["WQ", "RXHashConf", "RwqIndTable", "WQInitAttr"]

_MAX32 = (1 << 32) - 1
_NO_FLAGS = WQFlags(0)
#: State -> the states that a WQ can be moved to from there. An error is left through RESET only.
_EDGES = {
    WQState.RESET: (WQState.RESET, WQState.RDY),
    WQState.RDY: (WQState.RDY, WQState.RESET, WQState.ERR),
    WQState.ERR: (WQState.ERR, WQState.RESET),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WQInitAttr:
    """What a WQ is created with (``struct ibv_wq_init_attr``).

    Attributes:
        pd: whose memory regions its receives are of.
        cq: where its receives complete.
        max_wr: receives that it holds.
        max_sge: scatter/gather elements of one receive.
        create_flags: what the device does to packets on the way.
    """

    pd: PD
    cq: CQ
    max_wr: int
    max_sge: int = 1
    wq_type: WQType = WQType.RQ
    create_flags: WQFlags = _NO_FLAGS


@dataclass(frozen=True, slots=True, kw_only=True)
class RXHashConf:
    """The hash by which a QP spreads packets over a table of WQs (``struct ibv_rx_hash_conf``): ``QPInitAttr.rx_hash``.

    Attributes:
        rx_hash_fields_mask: the header fields that it is computed from.
        rx_hash_key: its key; Toeplitz takes 40 bytes on most devices.
        rx_hash_function: which one.
    """

    rx_hash_fields_mask: RXHashFields
    rx_hash_key: bytes
    rx_hash_function: RXHashFunction = RXHashFunction.TOEPLITZ

    def __post_init__(self) -> None:
        check_flags("rx_hash_fields_mask", self.rx_hash_fields_mask, RXHashFields)
        if not isinstance(self.rx_hash_key, bytes):
            raise TypeError(f"rx_hash_key must be bytes, not {self.rx_hash_key!r}")
        check_int("the length of rx_hash_key", len(self.rx_hash_key), 1, 255)
        if not isinstance(self.rx_hash_function, RXHashFunction):
            raise TypeError(f"rx_hash_function must be a member of RXHashFunction, not {self.rx_hash_function!r}")


class WQ(Resource):
    """A receive work queue; made in RESET by ``Context.create_wq``, and posted to from RDY on.

    Its receives hold their memory regions until their completions were polled.

    Attributes:
        wq_num: its number.
        max_wr, max_sge: the sizes asked for.

    Verb: ibv_create_wq
    """

    # Like a QP: what is posted here holds memory regions.
    _closes_early = True

    def __init__(self, context: Context, init_attr: WQInitAttr) -> None:
        _check_init(context, init_attr)
        raw = ffi.new("struct ibv_wq_init_attr *")
        raw.wq_type, raw.max_wr, raw.max_sge = WQType(init_attr.wq_type), init_attr.max_wr, init_attr.max_sge
        raw.pd, raw.cq = init_attr.pd._handle, init_attr.cq._handle
        if flags := check_flags("create_flags", init_attr.create_flags, WQFlags):
            raw.comp_mask, raw.create_flags = WQInitAttrMask.FLAGS, int(flags)
        handle = check_ptr("ibv_create_wq", lib.ibv_create_wq(context._handle, raw))
        self.context = context
        self.pd, self.cq = init_attr.pd, init_attr.cq
        self.wq_num: int = handle.wq_num
        self.max_wr, self.max_sge = init_attr.max_wr, init_attr.max_sge
        self._lock = threading.RLock()
        self._ledger = Ledger(QPType.RAW_PACKET)
        destroy = _DestroyWQ(self._lock, self._ledger, self.cq)
        self._own(handle, destroy, context, self.pd, self.cq, label=f"WQ {self.wq_num:#x}")
        self.cq._ledgers[-id(self._ledger)] = self._ledger  # a key that is no QP's number

    def __repr__(self) -> str:
        return f"<WQ {self.wq_num:#x} {'(closed)' if self.closed else f'in {self.state.name}'}>"

    @property
    def state(self) -> WQState:
        """The state that the library last moved it to, or the device, where a receive failed."""
        state = known(WQState, self._handle.state)
        return WQState.ERR if state == WQState.RDY and self._ledger.state == QPState.ERR else state

    @property
    def recvs_in_flight(self) -> int:
        """How many receives wait for a packet, or for their completion to be polled."""
        return len(self._ledger.recvs)

    def modify(
        self,
        wq_state: WQState | None = None,
        *,
        curr_wq_state: WQState | None = None,
        flags: WQFlags = _NO_FLAGS,
        flags_mask: WQFlags = _NO_FLAGS,
    ) -> None:
        """Move the WQ to another state, or change its flags.

        RESET forgets what was posted; its completions are kept for ``CQ.poll``.

        Args:
            curr_wq_state: the state that it is taken to be in; by default the one that it is in.
            flags, flags_mask: new values, and which flags get them.

        Raises:
            InvalidTransition: there is no such edge: from ERR a WQ goes to RESET, from RESET to RDY.
            ValueError: nothing was given, or flags that are not in the mask.
            VerbsOSError: the verb refused; the WQ stays as it was.

        Verb: ibv_modify_wq
        """
        raw = ffi.new("struct ibv_wq_attr *")
        with self._lock:
            handle = self._handle
            if wq_state is not None:
                current = self.state if curr_wq_state is None else WQState(curr_wq_state)
                _check_edge(self, current, wq_state)
                raw.attr_mask |= WQAttrMask.STATE | WQAttrMask.CURR_STATE
                raw.wq_state, raw.curr_wq_state = wq_state, current
            if mask := check_flags("flags_mask", flags_mask, WQFlags):
                raw.attr_mask |= WQAttrMask.FLAGS
                raw.flags_mask = int(mask)
            raw.flags = int(check_flags("flags", flags, WQFlags))
            if raw.flags & ~raw.flags_mask:
                raise ValueError(f"flags {flags!r} are not all in flags_mask {flags_mask!r}")
            if not raw.attr_mask:
                raise ValueError("modify a WQ with wq_state=, with flags= and flags_mask=, or with all")
            if wq_state == WQState.RESET:
                self.cq._harvest()  # the driver drops them from the CQ
            check_rc("ibv_modify_wq", lib.ibv_modify_wq(handle, raw))
            if wq_state == WQState.RESET:
                self._ledger.clear()
                self._ledger.state = QPState.RESET

    def post_recv(self, *requests: RecvWR) -> None:
        """Post a list of receive buffers; allowed in RDY.

        Raises:
            StateError: the WQ is not in RDY.
            TypeError, ValueError: a request cannot be right: too many SGEs, memory that may not be written. Nothing was
                posted.
            QueueFullError: no free slot; ``posted`` says how many of the list were accepted.
            VerbsOSError: the verb refused the request number ``posted``.

        Verb: ibv_post_wq_recv
        """
        kept = [check_recv(wr, self.pd, self.max_sge, "this WQ's max_sge") for wr in requests]
        with self._lock:
            handle = self._handle
            if self.state != WQState.RDY:
                raise StateError(f"{self!r} cannot take receives: bring it to RDY first")
            post("ibv_post_wq_recv", lib.ibv_post_wq_recv, handle, requests, kept, self._ledger.recvs)


class RwqIndTable(Resource):
    """An indirection table: the hash of a packet picks an entry, and so the WQ that receives it.

    Attributes:
        wqs: its entries; a WQ may be in it several times.
        ind_tbl_num: the number that the device gave it.

    Verb: ibv_create_rwq_ind_table
    """

    # It keeps its WQs from closing, and QPs keep it.
    _closes_early = True

    def __init__(self, context: Context, wqs: Sequence[WQ]) -> None:
        self.wqs = tuple(wqs)
        for wq in self.wqs:
            if not isinstance(wq, WQ):
                raise TypeError(f"an indirection table is made of WQs, not of {wq!r}")
            if wq.context is not context:
                raise ValueError(f"{wq!r} belongs to {wq.context!r}, and the table to {context!r}")
        size = len(self.wqs)
        if not size or size & (size - 1):
            raise ValueError(f"an indirection table has 1, 2, 4, 8 … entries, and not {size}: repeat WQs to fill it up")
        table = ffi.new("struct ibv_wq *[]", [wq._handle for wq in self.wqs])
        raw = ffi.new("struct ibv_rwq_ind_table_init_attr *")
        raw.log_ind_tbl_size, raw.ind_tbl = size.bit_length() - 1, table
        handle = lib.ibv_create_rwq_ind_table(context._handle, raw)
        self.context = context
        handle = check_ptr("ibv_create_rwq_ind_table", handle)
        self.ind_tbl_num: int = handle.ind_tbl_num
        owners = dict.fromkeys(self.wqs)  # each once
        self._own(handle, _destroy_table, context, *owners, label=f"RwqIndTable of {context.name}")


class _DestroyWQ:
    """Destroys a WQ, reads the completions that it leaves behind, and lets go of its memory regions."""

    __slots__ = ("cq", "ledger", "lock")

    def __init__(self, lock: threading.RLock, ledger: Ledger, cq: CQ) -> None:
        self.lock = lock
        self.ledger = ledger
        self.cq = weakref.ref(cq)  # weak: see a QP's

    def __call__(self, handle: CData) -> None:
        with self.lock:
            check_rc("ibv_destroy_wq", lib.ibv_destroy_wq(handle))
        if (cq := self.cq()) is not None:
            cq._forget(-id(self.ledger), self.ledger)
        self.ledger.clear()


def _destroy_table(handle: CData) -> None:
    check_rc("ibv_destroy_rwq_ind_table", lib.ibv_destroy_rwq_ind_table(handle))


def _check_init(context: Context, init_attr: WQInitAttr) -> None:
    if not isinstance(init_attr, WQInitAttr):
        raise TypeError(f"a WQ is made from a WQInitAttr, not {init_attr!r}")
    for member, kind in (("pd", PD), ("cq", CQ)):
        parent = getattr(init_attr, member)
        if not isinstance(parent, kind):
            raise TypeError(f"{member} must be a {kind.__name__}, not {parent!r}")
        if parent.context is not context:
            raise ValueError(f"{member} belongs to {parent.context!r}, and the WQ is made on {context!r}")
    check_int("max_wr", init_attr.max_wr, 1, _MAX32)
    check_int("max_sge", init_attr.max_sge, 1, _MAX32)
    if not isinstance(init_attr.wq_type, WQType):
        raise TypeError(f"wq_type must be a member of WQType, not {init_attr.wq_type!r}")


def _check_edge(wq: WQ, current: WQState, target: WQState) -> None:
    if not isinstance(target, WQState):
        raise TypeError(f"wq_state must be a member of WQState, not {target!r}")
    reachable = _EDGES.get(current, ())
    if target not in reachable:
        names = ", ".join(state.name for state in reachable) or "nowhere"
        text = f"{wq!r}: a WQ cannot go from {current.name} to {target.name}; from there it goes to {names}"
        error = InvalidTransition(text, current=current, target=target)
        error.operation = "ibv_modify_wq"
        raise error
