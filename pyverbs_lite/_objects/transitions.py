"""The life of a QP: from RESET through INIT and RTR to RTS, and back."""

from __future__ import annotations

import threading
from contextlib import suppress

from .. import qp_fsm
from .._base.args import check_int
from .._base.check import check_rc
from .._base.resource import Resource
from ..attr import AHAttr, GlobalRoute, QPAttr
from ..cq import CQ
from ..device import Context
from ..enums import MTU, AccessFlags, QPAttrMask, QPState, QPType
from ..errors import InvalidTransition, RouteError, VerbsError, VerbsOSError
from ..ffi import CData, ffi, lib
from .attr_c import read_qp_attr, write_qp_attr
from .inflight import Ledger

__all__ = ["Transitions"]

#: The edge that each of to_init, to_rtr and to_rts is named after.
_HOME = {
    QPState.INIT: (QPState.RESET, QPState.INIT),
    QPState.RTR: (QPState.INIT, QPState.RTR),
    QPState.RTS: (QPState.RTR, QPState.RTS),
}
#: What a caller must have meant, whatever the edge takes.
_CHOSEN = int(QPAttrMask.AV | QPAttrMask.DEST_QPN | QPAttrMask.RQ_PSN | QPAttrMask.SQ_PSN)


class Transitions(Resource):
    """The part of a QP that moves it from state to state; see ``QP``."""

    context: Context
    qp_type: QPType
    qp_num: int
    send_cq: CQ | None
    recv_cq: CQ | None
    _ledger: Ledger
    #: Held around every verb on the QP, the one that destroys it too.
    _lock: threading.RLock
    #: The max_rd_atomic that was set; None where that is not known.
    _read_depth: int | None = None
    #: The port that was set; None where that is not known.
    _port_num: int | None = None

    @property
    def state(self) -> QPState:
        """The state as last seen: by ``modify``, by ``query``, or from a failed completion that was polled.

        A failed request moves a QP to ERR by itself, before anybody has polled the completion; ``query`` asks.
        """
        return self._ledger.state

    @property
    def sq_draining(self) -> bool:
        """Whether, in SQD, requests are still in flight; asks the device.

        Verb: ibv_query_qp
        """
        return bool(self._query_raw().sq_draining)

    def query(self) -> QPAttr:
        """Ask the device for every attribute; ``state`` is up to date afterwards.

        Verb: ibv_query_qp
        """
        return read_qp_attr(self._query_raw())

    def _query_raw(self) -> CData:
        raw, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
        everything = sum(bit for bit in QPAttrMask if bit is not QPAttrMask.RATE_LIMIT)  # which providers refuse
        with self._lock:
            check_rc("ibv_query_qp", lib.ibv_query_qp(self._handle, raw, everything, init))
            self._ledger.state = QPState(raw.qp_state)
        return raw

    def modify(self, attr: QPAttr) -> None:
        """Change attributes, and the state if ``attr.qp_state`` is given; the mask follows from what is given.

        The edge and every value are checked first. ``state`` moves only after the verb returned 0, so a refused
        change may be tried again. In RESET nothing is in flight any more: requests that had not completed are gone
        without completions, and so are their holds; completions that were there can still be polled.

        Raises:
            InvalidTransition: the state machine has no such edge.
            AttributeMaskError: the edge needs more, or takes less, than was given.
            TypeError, ValueError: a value is of the wrong kind or outside its range.
            RouteError: the GID index is of no use for the remote GID, or no path leads there.
            VerbsOSError: the verb refused.

        Verb: ibv_modify_qp
        """
        if not isinstance(attr, QPAttr):
            raise TypeError(f"modify takes a QPAttr, not {attr!r}")
        given = attr.given()
        qp_fsm.check_values(given)
        mask = qp_fsm.mask_of(given)
        self._check_limits(attr)
        with self._lock:
            self._check_edge(given, mask)
            current, target = qp_fsm.edge_of(self.state, given)
            raw = ffi.new("struct ibv_qp_attr *")
            write_qp_attr(raw, given)
            asked = f"{current.name} → {target.name} with {', '.join(given)}"
            try:
                check_rc("ibv_modify_qp", lib.ibv_modify_qp(self._handle, raw, mask), asked)
            except VerbsOSError as error:
                self._look_closer(error, asked, given, mask)
                raise
            if target == QPState.RESET:
                self._forget_requests()
            if attr.max_rd_atomic is not None:
                self._read_depth = attr.max_rd_atomic
            if attr.port_num is not None:
                self._port_num = attr.port_num
            self._ledger.state = target

    def _moved(self, state: QPState, port_num: int | None = None, read_depth: int | None = None) -> None:
        """Take note that a connection's engine has moved it, and of what was set."""
        if state == QPState.RESET:
            self._read_depth = None
        self._port_num = port_num or self._port_num
        self._read_depth = self._read_depth if read_depth is None else read_depth
        self._ledger.state = state

    def _check_edge(self, given: dict[str, object], mask: QPAttrMask) -> None:
        try:
            qp_fsm.check(self.qp_type, *qp_fsm.edge_of(self.state, given), mask)
        except InvalidTransition:
            # The device moves a QP to ERR without telling: perhaps what is remembered here is old.
            before = self.state
            self.query()
            if self.state == before:
                raise
            qp_fsm.check(self.qp_type, *qp_fsm.edge_of(self.state, given), mask)

    def _look_closer(self, error: VerbsOSError, asked: str, given: dict[str, object], mask: QPAttrMask) -> None:
        """Raise a better error than the device's refusal, if there is a reason to see; read the state anew."""
        before = self.state
        with suppress(VerbsOSError):
            self.query()  # the device knows best which state a refusal left behind
        if self.state != before:
            qp_fsm.check(self.qp_type, *qp_fsm.edge_of(self.state, given), mask)
        if before == QPState.SQD and self.sq_draining:
            hint = f"{asked}: requests are still in flight; wait until sq_draining is False, or go to ERR"
            raise VerbsOSError(error.errno or 0, error.operation, hint) from error
        path = given.get("ah_attr")
        if not isinstance(path, AHAttr) or path.grh is None:
            return
        reason = ""
        with suppress(VerbsError):  # what the table cannot tell is not worth another error
            reason = self._wrong_gid(path.port_num, path.grh)
        if reason or isinstance(error, RouteError):
            reason = reason or (f"no path leads from GID index {path.grh.sgid_index} to the remote GID {path.grh.dgid}")
            raise RouteError(error.errno or 0, error.operation, f"{asked}: {reason}") from error

    def _wrong_gid(self, port_num: int, grh: GlobalRoute) -> str:
        """Say what is wrong with a GID index; empty if nothing is to see."""
        table = {row.gid_index: row for row in self.context.gid_table(port_num)}
        row = table.get(grh.sgid_index)
        listed = ", ".join(f"{index} ({row})" for index, row in table.items()) or "none"
        if row is None:
            return f"GID index {grh.sgid_index} of {self.context.name} port {port_num} is empty; in use: {listed}"
        if (row.ipv4 is None) != (grh.dgid.ipv4_mapped is None):
            return (
                f"GID index {grh.sgid_index} is {row}, and the remote GID is {grh.dgid}: one is an IPv4 address and the"
                f" other is none; in use: {listed}"
            )
        return ""

    def _check_limits(self, attr: QPAttr) -> None:
        """Check what only this device can know: its ports, its depths, whether its port needs a GRH."""
        limits = self.context.query_device()
        if attr.port_num is not None:
            self.context.check_port(attr.port_num)
        if attr.max_rd_atomic is not None:
            check_int("max_rd_atomic", attr.max_rd_atomic, 0, limits.max_qp_init_rd_atom)
        if attr.max_dest_rd_atomic is not None:
            check_int("max_dest_rd_atomic", attr.max_dest_rd_atomic, 0, limits.max_qp_rd_atom)
        for path in (attr.ah_attr, attr.alt_ah_attr):
            if path is None:
                continue
            port = self.context._port(path.port_num)
            if port.grh_required and path.grh is None:
                raise ValueError(
                    f"{self.context.name} port {path.port_num} is {port.link_layer.name}: its address vectors need a"
                    " global route (grh with dgid and sgid_index), a LID does not do"
                )
            if path.grh is not None:
                check_int("sgid_index", path.grh.sgid_index, 0, port.gid_tbl_len - 1)

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
        if path_mtu is None and isinstance(ah_attr, AHAttr):
            path_mtu = self.context.query_port(ah_attr.port_num).active_mtu
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
        """Move from RTR to RTS: ready to send; or back there from SQD or SQE, with no argument then.

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

    def to_sqd(self) -> None:
        """Move from RTS to SQD: what is in flight completes, what is posted from now on waits for ``to_rts``.

        Leaving it again is possible once ``sq_draining`` is False.

        Verb: ibv_modify_qp
        """
        self.modify(QPAttr(qp_state=QPState.SQD))

    def to_reset(self) -> None:
        """Move to RESET from any state; queued requests are gone without completions, and so are their holds.

        Verb: ibv_modify_qp
        """
        reset = QPAttr(qp_state=QPState.RESET)
        try:
            self.modify(reset)
        except VerbsOSError:
            if self.state != QPState.SQD:
                raise
            self.to_error()  # some drivers let a send queue that is draining go nowhere else
            self.modify(reset)

    def to_error(self) -> None:
        """Move to ERR: every request in flight completes with ``WR_FLUSH_ERR``.

        Verb: ibv_modify_qp
        """
        self.modify(QPAttr(qp_state=QPState.ERR))

    def _step(self, target: QPState, values: dict[str, object]) -> None:
        """Modify with those of the values that the QP's type takes.

        From another state than the usual one (SQD → RTS) the defaults are left out that the edge does not take, and
        what the caller gave is not: it is refused rather than ignored.
        """
        table = qp_fsm.edges(self.qp_type)
        home = table[_HOME[target]].required
        edge = table.get((self.state, target))
        takes = home if edge is None or self.state in (target, _HOME[target][0]) else edge.required | edge.optional
        wanted = takes.value | home.value & _CHOSEN
        kept = {
            name: value
            for name, value in values.items()
            if value is not None and qp_fsm.mask_of({name: value}).value & wanted
        }
        self.modify(QPAttr(qp_state=target, **kept))  # type: ignore[arg-type]

    def _forget_requests(self) -> None:
        """Take note that nothing is in flight any more, once the completions that are there have been read."""
        for cq in (self.send_cq, self.recv_cq):
            if cq is not None:
                with suppress(VerbsError):
                    cq._harvest()
        self._ledger.clear()
        self._read_depth = None
