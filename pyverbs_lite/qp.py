"""Queue pairs: their life through the state machine, and posting to them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from . import qp_fsm
from ._args import check_int
from ._attr_c import read_cap, read_qp_attr, write_cap, write_qp_attr
from ._check import check_ptr, check_rc, os_error
from ._resource import Resource
from .attr import AHAttr, QPAttr, QPCap
from .cq import CQ
from .enums import MTU, AccessFlags, QPAttrMask, QPState, QPType, SendFlags, WCStatus, WROpcode
from .errors import InvalidTransition, StateError, VerbsOSError
from .ffi import CData, ffi, lib
from .mr import MR, MRSlice
from .pd import PD
from .wr import SGE, WC, RecvWR, SendWR, immediate

__all__ = ["QP", "QPInitAttr"]

_ATOMICS = (WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD)
_REMOTE = (WROpcode.RDMA_WRITE, WROpcode.RDMA_WRITE_WITH_IMM, WROpcode.RDMA_READ, *_ATOMICS)
_WITH_IMM = (WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE_WITH_IMM)
_NOT_YET = (QPState.RESET, QPState.INIT, QPState.RTR)
#: Device limits that bound what a QP is created with.
_CAP_LIMITS = {
    "max_send_wr": "max_qp_wr",
    "max_recv_wr": "max_qp_wr",
    "max_send_sge": "max_sge",
    "max_recv_sge": "max_sge",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QPInitAttr:
    """What a QP is created with (``struct ibv_qp_init_attr``).

    Attributes:
        sq_sig_all: whether every send request completes visibly, not only those with ``SendFlags.SIGNALED``.
    """

    send_cq: CQ
    recv_cq: CQ
    cap: QPCap
    qp_type: QPType = QPType.RC
    sq_sig_all: bool = False


class _Held(NamedTuple):
    """A request in flight: what it needs to stay where it is."""

    wr_id: int
    signaled: bool
    regions: tuple[MR, ...]


class QP(Resource):
    """A queue pair; made in RESET by ``PD.create_qp``.

    ``modify`` moves it along the edges of ``qp_fsm``; ``to_init``, ``to_rtr`` and ``to_rts`` know which attributes
    each edge needs. Requests in flight hold their memory regions until their completion was polled.

    Attributes:
        qp_num: its number, 24 bits.
        cap: the sizes that the device gave, at least those asked for.

    Verb: ibv_create_qp
    """

    _closes_early = True

    def __init__(self, pd: PD, init_attr: QPInitAttr) -> None:
        limits = pd.context.query_device()
        for member in QPCap.__slots__:
            limit = getattr(limits, _CAP_LIMITS[member]) if member in _CAP_LIMITS else (1 << 31) - 1
            check_int(f"cap.{member}", getattr(init_attr.cap, member), 0, limit)
        raw = ffi.new("struct ibv_qp_init_attr *")
        raw.send_cq, raw.recv_cq = init_attr.send_cq._handle, init_attr.recv_cq._handle
        raw.qp_type, raw.sq_sig_all = QPType(init_attr.qp_type), int(init_attr.sq_sig_all)
        write_cap(raw.cap, init_attr.cap)
        handle = check_ptr("ibv_create_qp", lib.ibv_create_qp(pd._handle, raw))
        self.pd = pd
        self.context = pd.context
        self.qp_type = QPType(init_attr.qp_type)
        self.qp_num: int = handle.qp_num
        self.cap = read_cap(raw.cap)
        self._sq_sig_all = bool(init_attr.sq_sig_all)
        self._state = QPState.RESET
        self._lock = threading.RLock()
        self._sends: deque[_Held] = deque()
        self._recvs: deque[_Held] = deque()
        self._own(handle, _destroy_qp, pd, init_attr.send_cq, init_attr.recv_cq, label=f"QP {self.qp_num:#x}")
        for cq in (init_attr.send_cq, init_attr.recv_cq):
            cq._qps[self.qp_num] = self

    def __repr__(self) -> str:
        return f"<{self.qp_type.name} QP {self.qp_num:#x} in {'CLOSED' if self.closed else self._state.name}>"

    # ------------------------------------------------------------ the state machine

    @property
    def state(self) -> QPState:
        """The state that the last ``modify`` or ``query`` left or saw; a failed request moves a QP to ERR by itself."""
        return self._state

    def query(self) -> QPAttr:
        """Ask the device for every attribute; ``state`` is up to date afterwards.

        Verb: ibv_query_qp
        """
        raw, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
        everything = QPAttrMask(0)
        for bit in QPAttrMask:
            if bit is not QPAttrMask.RATE_LIMIT:  # providers refuse to be asked for it
                everything |= bit
        check_rc("ibv_query_qp", lib.ibv_query_qp(self._handle, raw, everything, init))
        attr = read_qp_attr(raw)
        self._state = attr.qp_state or QPState.RESET
        return attr

    def modify(self, attr: QPAttr) -> None:
        """Change attributes, and the state if ``attr.qp_state`` is given; the mask follows from what is given.

        The edge and every value are checked first. ``state`` moves only after the verb returned 0, so a refused
        change may be tried again.

        Raises:
            InvalidTransition: the state machine has no such edge.
            AttributeMaskError: the edge needs more, or takes less, than was given.
            TypeError, ValueError: a value is of the wrong kind or outside its range.
            RouteError: no path leads to the remote GID.
            VerbsOSError: the verb refused.

        Verb: ibv_modify_qp
        """
        given = attr.given()
        qp_fsm.check_values(given)
        mask = qp_fsm.mask_of(given)
        self._check_limits(attr)
        with self._lock:
            self._check_edge(given, mask)
            raw = ffi.new("struct ibv_qp_attr *")
            write_qp_attr(raw, given)
            current, target = qp_fsm.edge_of(self._state, given)
            try:
                check_rc("ibv_modify_qp", lib.ibv_modify_qp(self._handle, raw, mask), _refusal(current, target, attr))
            except VerbsOSError:
                with suppress(VerbsOSError):
                    self.query()  # the device knows best which state a refusal left behind
                raise
            self._state = target

    def _check_edge(self, given: dict[str, object], mask: QPAttrMask) -> None:
        try:
            qp_fsm.check(self.qp_type, *qp_fsm.edge_of(self._state, given), mask)
        except InvalidTransition:
            # The device moves a QP to ERR without telling: perhaps what is remembered here is old.
            before = self._state
            self.query()
            if self._state == before:
                raise
            qp_fsm.check(self.qp_type, *qp_fsm.edge_of(self._state, given), mask)

    def _check_limits(self, attr: QPAttr) -> None:
        """Check what only this device can know: its ports, its depths, whether its port needs a GRH."""
        limits = self.context.query_device()
        if attr.port_num is not None:
            self.context.check_port(attr.port_num)
        if attr.max_rd_atomic is not None:
            check_int("max_rd_atomic", attr.max_rd_atomic, 0, limits.max_qp_init_rd_atom)
        if attr.max_dest_rd_atomic is not None:
            check_int("max_dest_rd_atomic", attr.max_dest_rd_atomic, 0, limits.max_qp_rd_atom)
        if attr.ah_attr is not None:
            port = self.context.query_port(self.context.check_port(attr.ah_attr.port_num))
            if port.grh_required and attr.ah_attr.grh is None:
                raise ValueError(
                    f"{self.context.name} port {attr.ah_attr.port_num} is {port.link_layer.name}: its address vectors"
                    " need a global route (ah_attr.grh with dgid and sgid_index), a LID does not do"
                )
            if attr.ah_attr.grh is not None:
                check_int("sgid_index", attr.ah_attr.grh.sgid_index, 0, port.gid_tbl_len - 1)

    def to_init(
        self,
        *,
        port_num: int = 1,
        pkey_index: int = 0,
        qp_access_flags: AccessFlags = AccessFlags(0),
        qkey: int = 0,
    ) -> None:
        """Move from RESET to INIT; receives can be posted from then on.

        Of the arguments, those are used that the QP's type takes: ``qkey`` for UD, ``qp_access_flags`` for RC and UC.

        Raises:
            As ``modify``.

        Verb: ibv_modify_qp
        """
        self._step(
            QPState.INIT,
            {"port_num": port_num, "pkey_index": pkey_index, "qp_access_flags": qp_access_flags, "qkey": qkey},
        )

    def to_rtr(
        self,
        *,
        ah_attr: AHAttr | None = None,
        dest_qp_num: int | None = None,
        rq_psn: int | None = None,
        path_mtu: MTU | int | None = None,
        max_dest_rd_atomic: int = 1,
        min_rnr_timer: int = 12,
    ) -> None:
        """Move from INIT to RTR: ready to receive from one peer.

        Args:
            ah_attr: the path to the peer.
            dest_qp_num: the peer's QP number, 24 bits.
            rq_psn: the peer's ``sq_psn``, 24 bits.
            path_mtu: by default the port's ``active_mtu``.
            max_dest_rd_atomic: reads and atomics of the peer answered at a time; 0 forbids them.
            min_rnr_timer: 5-bit code; 12 is 0.64 ms, and 0 is the longest, 655.36 ms.

        Raises:
            As ``modify``.

        Verb: ibv_modify_qp
        """
        if path_mtu is None and ah_attr is not None:
            path_mtu = self.context.query_port(self.context.check_port(ah_attr.port_num)).active_mtu
        self._step(
            QPState.RTR,
            {
                "ah_attr": ah_attr,
                "dest_qp_num": dest_qp_num,
                "rq_psn": rq_psn,
                "path_mtu": path_mtu,
                "max_dest_rd_atomic": max_dest_rd_atomic,
                "min_rnr_timer": min_rnr_timer,
            },
        )

    def to_rts(
        self,
        *,
        sq_psn: int | None = None,
        timeout: int = 14,
        retry_cnt: int = 7,
        rnr_retry: int = 7,
        max_rd_atomic: int = 1,
    ) -> None:
        """Move from RTR to RTS: ready to send.

        Args:
            sq_psn: the first PSN sent, 24 bits; the peer's ``rq_psn``.
            timeout: 5-bit code, 4.096 µs × 2^timeout for an acknowledgement; 14 is 67 ms; 0 waits for ever.
            retry_cnt: 3 bits.
            rnr_retry: 3 bits; 7 retries for ever.
            max_rd_atomic: reads and atomics of ours in flight at a time; 0 forbids them.

        Raises:
            As ``modify``.

        Verb: ibv_modify_qp
        """
        self._step(
            QPState.RTS,
            {
                "sq_psn": sq_psn,
                "timeout": timeout,
                "retry_cnt": retry_cnt,
                "rnr_retry": rnr_retry,
                "max_rd_atomic": max_rd_atomic,
            },
        )

    def to_reset(self) -> None:
        """Move to RESET from any state; queued requests are gone without completions, and so are their holds.

        Verb: ibv_modify_qp
        """
        self.modify(QPAttr(qp_state=QPState.RESET))
        self._release_holds()

    def to_error(self) -> None:
        """Move to ERR: every request in flight completes with ``WR_FLUSH_ERR``.

        Verb: ibv_modify_qp
        """
        self.modify(QPAttr(qp_state=QPState.ERR))

    def _step(self, target: QPState, values: dict[str, object]) -> None:
        """Modify with those of the values that the type demands on this edge."""
        with suppress(InvalidTransition):  # modify() says it, and after looking whether the state is still that
            needed = qp_fsm.required(self.qp_type, self._state, target)
            values = {name: value for name, value in values.items() if qp_fsm.mask_of({name: 0}) & needed}
        self.modify(replace(QPAttr(qp_state=target), **values))  # type: ignore[arg-type]

    # ------------------------------------------------------------ posting

    def post_send(self, *requests: SendWR) -> None:
        """Post a list of requests behind one doorbell.

        Raises:
            StateError: the QP is not in RTS yet.
            TypeError, ValueError: a request cannot be right: too many SGEs, too long for inline, an atomic that is not
                8 bytes or not aligned, an immediate outside 32 bits, memory missing. Nothing was posted.
            QueueFullError: no free slot; ``posted`` says how many of the list were accepted.
            VerbsOSError: the verb refused the request number ``posted``.

        Verb: ibv_post_send
        """
        if not requests:
            return
        for wr in requests:
            self._check_send(wr)
        if self._state in _NOT_YET:
            raise StateError(f"{self!r} cannot send: bring it to RTS first")
        wrs, _sges = self._chain("struct ibv_send_wr", requests)
        for i, wr in enumerate(requests):
            _fill_send(wrs[i], wr)
        bad = ffi.new("struct ibv_send_wr **")
        held = [
            _Held(wr.wr_id, self._sq_sig_all or bool(wr.send_flags & SendFlags.SIGNALED), _regions(wr.sg_list))
            for wr in requests
        ]
        self._post("ibv_post_send", lambda qp: lib.ibv_post_send(qp, wrs, bad), wrs, bad, held, self._sends)

    def post_recv(self, *requests: RecvWR) -> None:
        """Post a list of receive buffers; allowed from INIT on.

        Raises:
            As ``post_send``; the QP must have left RESET.

        Verb: ibv_post_recv
        """
        if not requests:
            return
        for wr in requests:
            _check_sges(wr.sg_list, self.cap.max_recv_sge, "max_recv_sge")
            _check_writable(wr.sg_list, "a receive")
        if self._state == QPState.RESET:
            raise StateError(f"{self!r} cannot take receives: bring it to INIT first")
        wrs, _sges = self._chain("struct ibv_recv_wr", requests)
        bad = ffi.new("struct ibv_recv_wr **")
        held = [_Held(wr.wr_id, True, _regions(wr.sg_list)) for wr in requests]
        self._post("ibv_post_recv", lambda qp: lib.ibv_post_recv(qp, wrs, bad), wrs, bad, held, self._recvs)

    @staticmethod
    def _chain(struct: str, requests: Sequence[SendWR | RecvWR]) -> tuple[CData, CData]:
        """Lay out requests and SGEs in two arrays; both must be referenced until the verb has returned."""
        wrs = ffi.new(f"{struct}[]", len(requests))
        sges = ffi.new("struct ibv_sge[]", max(1, sum(len(wr.sg_list) for wr in requests)))
        used = 0
        for i, wr in enumerate(requests):
            raw = wrs[i]
            raw.wr_id = check_int("wr_id", wr.wr_id, 0, (1 << 64) - 1)
            raw.next = ffi.addressof(wrs, i + 1) if i + 1 < len(requests) else ffi.NULL
            raw.sg_list, raw.num_sge = ffi.addressof(sges, used), len(wr.sg_list)
            for memory in wr.sg_list:
                sge = sges[used]
                sge.addr, sge.length, sge.lkey = memory.addr, memory.length, memory.lkey
                used += 1
        return wrs, sges

    def _post(self, verb: str, call: object, wrs: CData, bad: CData, held: list[_Held], queue: deque[_Held]) -> None:
        assert callable(call)
        with self._lock:
            rc = call(self._handle)
            posted = len(held)
            if rc:
                # Some drivers leave bad_wr alone when they refuse the first request.
                posted = bad[0] - wrs if bad[0] else 0
            for hold in held[:posted]:
                queue.append(hold)
                for region in hold.regions:
                    region._in_flight += 1
        if rc:
            error = os_error(verb, rc)
            error.posted = posted
            raise error

    def _check_send(self, wr: SendWR) -> None:
        opcode = WROpcode(wr.opcode)
        _check_sges(wr.sg_list, self.cap.max_send_sge, "max_send_sge")
        total = sum(memory.length for memory in wr.sg_list)
        if wr.send_flags & SendFlags.INLINE and total > self.cap.max_inline_data:
            raise ValueError(
                f"{total} bytes do not fit inline: this QP's max_inline_data is {self.cap.max_inline_data}"
            )
        if opcode in _WITH_IMM:
            immediate(wr.imm_data)
        elif wr.imm_data is not None:
            raise ValueError(f"{opcode.name} carries no immediate: use its _WITH_IMM opcode")
        if opcode in _REMOTE and wr.remote is None:
            raise ValueError(f"{opcode.name} needs remote=, the peer's memory")
        if opcode in (WROpcode.RDMA_READ, *_ATOMICS):
            _check_writable(wr.sg_list, opcode.name)
        if opcode in _ATOMICS:
            assert wr.remote is not None
            if total != 8 or wr.remote.addr % 8:
                raise ValueError(
                    f"an atomic works on 8 bytes at an address that is a multiple of 8, not on {total} bytes at"
                    f" {wr.remote.addr:#x}"
                )
            check_int("compare_add", wr.compare_add, 0, (1 << 64) - 1)
            check_int("swap", wr.swap, 0, (1 << 64) - 1)

    # ------------------------------------------------------------ what is in flight

    def _completed(self, wc: WC) -> None:
        """Let go of what a polled completion no longer needs."""
        with self._lock:
            if wc.is_recv or (wc.is_recv is None and not any(h.wr_id == wc.wr_id for h in self._sends)):
                _release_until(self._recvs, wc.wr_id)
            else:
                _release_until(self._sends, wc.wr_id)
            if wc.status != WCStatus.SUCCESS and self.qp_type == QPType.RC:
                self._state = QPState.ERR

    def _release_holds(self) -> None:
        with self._lock:
            for queue in (self._sends, self._recvs):
                while queue:
                    _let_go(queue.popleft())

    def _after_destroy(self) -> None:
        self._release_holds()


def _let_go(hold: _Held) -> None:
    for region in hold.regions:
        region._in_flight -= 1


def _release_until(queue: deque[_Held], wr_id: int) -> None:
    """Release the first request with this wr_id and all before it: a queue completes in order, and not all say so."""
    if any(hold.wr_id == wr_id for hold in queue):
        while True:
            hold = queue.popleft()
            _let_go(hold)
            if hold.wr_id == wr_id:
                return


def _regions(sg_list: Sequence[SGE | MR | MRSlice]) -> tuple[MR, ...]:
    return tuple(memory if isinstance(memory, MR) else memory.mr for memory in sg_list if not isinstance(memory, SGE))


def _check_sges(sg_list: Sequence[SGE | MR | MRSlice], limit: int, member: str) -> None:
    if len(sg_list) > limit:
        raise ValueError(f"{len(sg_list)} SGEs are more than this QP's {member}, {limit}")
    for memory in sg_list:
        if not isinstance(memory, (SGE, MR, MRSlice)):
            raise TypeError(f"an SGE is an MR, a slice of one, or an SGE, not {memory!r}")
        check_int("the length of an SGE", memory.length, 0, (1 << 32) - 1)
    for region in _regions(sg_list):
        region._handle  # noqa: B018 - a deregistered region is refused here, not by a failed completion


def _check_writable(sg_list: Sequence[SGE | MR | MRSlice], what: str) -> None:
    for region in _regions(sg_list):
        if not region.access & AccessFlags.LOCAL_WRITE:
            raise ValueError(f"{what} writes into {region!r}, which was registered without LOCAL_WRITE")


def _fill_send(raw: CData, wr: SendWR) -> None:
    raw.opcode, raw.send_flags = WROpcode(wr.opcode), int(wr.send_flags)
    if wr.imm_data is not None:
        ffi.buffer(ffi.addressof(raw, "imm_data"))[:] = wr.imm_data.to_bytes(4, "big")
    if wr.remote is None:
        return
    if wr.opcode in _ATOMICS:
        raw.wr.atomic.remote_addr, raw.wr.atomic.rkey = wr.remote.addr, wr.remote.rkey
        raw.wr.atomic.compare_add, raw.wr.atomic.swap = wr.compare_add, wr.swap
    else:
        raw.wr.rdma.remote_addr, raw.wr.rdma.rkey = wr.remote.addr, wr.remote.rkey


def _refusal(current: QPState, target: QPState, attr: QPAttr) -> str:
    """Say what was asked for, for the text of a refusal."""
    text = f"{current.name} → {target.name} with {', '.join(attr.given())}"
    if attr.ah_attr is not None and attr.ah_attr.grh is not None:
        grh = attr.ah_attr.grh
        text += (
            f"; check that GID index {grh.sgid_index} is in use and of the peer's type, and that it reaches the remote"
            f" GID {grh.dgid}"
        )
    return text


def _destroy_qp(handle: CData) -> None:
    check_rc("ibv_destroy_qp", lib.ibv_destroy_qp(handle))
