"""Queue pairs: made, posted to, and moved through their states (``_objects.transitions``)."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from ._base.check import check_rc
from ._memory.windows import Windows
from ._objects.inflight import Held, Ledger
from ._objects.posting import post
from ._objects.qp_features import ECE
from ._objects.qp_init import QPInitAttr, check_init, create
from ._objects.rules import Rules
from .attr import QPCap
from .cq import CQ
from .enums import QPState, QPType
from .errors import StateError, VerbsError
from .ffi import CData, lib
from .pd import PD
from .wr import RecvWR, SendWR
from .wr_ex import WRBatch, post_batch

if TYPE_CHECKING:
    from .flow import Flow, FlowAttr

__all__ = ["ECE", "QP", "QPInitAttr"]


_NO_BATCHES: weakref.WeakValueDictionary[int, WRBatch] = weakref.WeakValueDictionary()


class QP(Windows):
    """A queue pair; made in RESET by ``PD.create_qp``.

    ``modify`` moves it along the edges of ``qp_fsm``; ``to_init``, ``to_rtr`` and ``to_rts`` know which attributes
    each edge needs. Requests in flight hold their memory regions until their completion was polled. Poll with
    ``CQ.poll`` or ``CQ.wait``: the ``wr_id`` in the C struct is a number of the library's, that in ``WC`` is yours.

    Threads may share a QP: each list of requests is posted in one piece.

    Attributes:
        qp_num: its number, 24 bits.
        cap: the sizes that the device gave, at least those asked for.
        srq: where its receives come from, or None if it has a queue of its own.
        send_ops_flags: what ``wr_batch`` can post.

    Verb: ibv_create_qp, ibv_create_qp_ex
    """

    _closes_early = True
    #: The open batch of each thread; the first batch gives the QP a dictionary of its own.
    _batches = _NO_BATCHES

    def __init__(self, pd: PD, init_attr: QPInitAttr) -> None:
        check_init(pd, init_attr)
        handle, self.cap = self._create(pd, init_attr)
        self.pd = pd
        self.context = pd.context
        self.send_cq, self.recv_cq = init_attr.send_cq, init_attr.recv_cq
        self.qp_type = QPType(init_attr.qp_type)
        self.qp_num: int = handle.qp_num
        self.srq, self.xrcd = init_attr.srq, init_attr.xrcd
        self.send_ops_flags = init_attr.send_ops_flags
        self._rules = Rules(self.qp_type, self.cap, pd)
        self._max_tso_header = init_attr.max_tso_header
        self._datagram: int | None = None
        self._lock = threading.RLock()
        self._ledger = Ledger(self.qp_type, None if self.srq is None else self.srq._queue)
        cqs = [cq for cq in (self.send_cq, self.recv_cq) if cq is not None]
        needs = [thing for thing in (self.srq, self.xrcd, init_attr.ind_table) if thing is not None]
        destroy = _DestroyQP(self._lock, self.qp_num, self._ledger, *cqs)
        self._own(handle, destroy, pd, *cqs, *needs, label=f"QP {self.qp_num:#x}")
        for cq in cqs:
            cq._ledgers[self.qp_num] = self._ledger
        if self.srq is not None:
            self.srq.grh_room = max(self.srq.grh_room, self.grh_room)

    def _create(self, pd: PD, init_attr: QPInitAttr) -> tuple[CData, QPCap]:
        """Call the verb; librdmacm has another."""
        return create(pd, init_attr)

    def __repr__(self) -> str:
        return f"<{self.qp_type.name} QP {self.qp_num:#x} in {'CLOSED' if self.closed else self.state.name}>"

    @property
    def sends_in_flight(self) -> int:
        """How many send requests are not known to have ended; unsignaled ones end with the next one that says so."""
        return len(self._ledger.sends)

    @property
    def recvs_in_flight(self) -> int:
        """How many receives wait for a message, or for their completion to be polled; with an SRQ all of the SRQ's."""
        return len(self._ledger.recvs)

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
        kept = [self._check_send(wr) for wr in requests]
        with self._lock:
            handle = self._ready_to_send()
            post("ibv_post_send", lib.ibv_post_send, handle, requests, kept, self._ledger.sends)

    def post_recv(self, *requests: RecvWR) -> None:
        """Post a list of receive buffers; allowed from INIT on, and flushed at once in ERR.

        Raises:
            As ``post_send``; the QP must have left RESET.

        Verb: ibv_post_recv
        """
        if self.srq is not None:
            raise StateError(f"{self!r} takes its receives from an SRQ: post them with SRQ.post_recv")
        kept = [self._rules.check_recv(wr) for wr in requests]
        with self._lock:
            handle = self._handle
            self._require_state(False)
            post("ibv_post_recv", lib.ibv_post_recv, handle, requests, kept, self._ledger.recvs)
        if self.state == QPState.ERR:
            # They are to complete with WR_FLUSH_ERR. A soft-RoCE device looks at its receives only when told to.
            with suppress(VerbsError):
                self.to_error()

    def wr_batch(self) -> WRBatch:
        """Post requests through the work request API: ``with qp.wr_batch() as wr: wr.send(…); wr.rdma_write(…)``.

        All of them are posted when the block ends, behind one doorbell; none is if it ends in an exception, or if the
        verb refuses any.

        Raises:
            StateError: the QP was made without ``send_ops_flags``. And at the end of the block: it is not in RTS.
            QueueFullError: at the end of the block: not all of them have room; nothing was posted.
            VerbsOSError: at the end of the block: the verb refused; nothing was posted.

        Verb: ibv_wr_start, ibv_wr_complete
        """
        if not self.send_ops_flags:
            raise StateError(
                f"{self!r} was made without send_ops_flags: QPInitAttr(send_ops_flags=…) says what it will post"
            )
        return WRBatch(self, self.send_ops_flags)

    def create_flow(self, attr: FlowAttr) -> Flow:
        """Let packets of the wire come to this QP, which must be of type RAW_PACKET or UD.

        Raises:
            UnsupportedError: the device steers no packets.

        Verb: ibv_create_flow
        """
        return cast("Flow", self._make("Flow", attr))

    def _post_batch(self, batch: WRBatch) -> None:
        with self._lock:
            self._ready_to_send()
            post_batch(batch, self)

    def _check_send(self, wr: SendWR, *, batch: bool = False) -> list[Held]:
        longest = self._max_datagram if self.qp_type == QPType.UD else None
        return self._with_window(wr, self._rules.check_send(wr, self._read_depth, longest, batch=batch))

    def _max_datagram(self, length: int) -> int:
        """Return how long a datagram may be, by the port's MTU; asked again before one is refused."""
        if self._port_num is None:
            return length  # not in INIT yet, so it is refused for that
        if self._datagram is None or length > self._datagram:
            self._datagram = self.context.query_port(self._port_num).active_mtu.bytes
        return self._datagram

    def _ready_to_send(self) -> CData:
        """Return the handle if a request may be posted now; lock held."""
        handle = self._handle
        if threading.get_ident() in self._batches:
            raise StateError(f"a batch of {self!r} is open in this thread: add the request to it, or end it first")
        self._require_state(True)
        return handle

    def _require_state(self, sending: bool) -> None:
        """Refuse to post too early: drivers do not look, or leave the request on the queue all the same."""
        too_early = (QPState.RESET, QPState.INIT, QPState.RTR) if sending else (QPState.RESET,)
        if self.state in too_early:
            self.query()  # it may have been moved past the library
            if self.state in too_early:
                need = "send: bring it to RTS first" if sending else "take receives: bring it to INIT first"
                raise StateError(f"{self!r} cannot {need}")


class _DestroyQP:
    """Destroys a QP, reads the completions that it leaves behind, and lets go of its memory regions."""

    __slots__ = ("cqs", "ledger", "lock", "number")

    def __init__(self, lock: threading.RLock, number: int, ledger: Ledger, *cqs: CQ) -> None:
        self.lock = lock
        self.number = number
        self.ledger = ledger
        # Weak, because a finaliser that leads to a CQ would keep what hangs on it, perhaps the QP, for ever.
        self.cqs = tuple(weakref.ref(cq) for cq in dict.fromkeys(cqs))

    def __call__(self, handle: CData) -> None:
        with self.lock:
            check_rc("ibv_destroy_qp", lib.ibv_destroy_qp(handle))
        for reference in self.cqs:
            if (cq := reference()) is not None:
                cq._forget(self.number, self.ledger)
        self.ledger.clear()
