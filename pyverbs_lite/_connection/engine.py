"""The requests of a connection in flight, and the waiting for them; the tables are in C (``ffi/src/engine.c``).

Any number of threads may use one engine: one of them at a time polls for all. What a request reads or writes is held
from before it is posted until its completion was seen, also after a timeout or an interrupt. An interrupt may come
between any two lines here, so what must happen together happens in one C call, or is found again by ``_reap``.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from .._base.args import Deadline
from .._base.check import check_ptr, check_rc, os_error
from .._base.resource import Resource
from .._control.control import Peer
from ..cq import SLICE, SPIN
from ..endpoint import LEAST_CREDITS
from ..enums import AccessFlags, QPState, WCStatus
from ..errors import ClosedError, CompletionError, PeerProtocolError, QueueFullError, VerbsError, WaitTimeout
from ..ffi import CData, ffi, lib
from ..mr import MR, MRSlice
from ..qp import QP
from ..regcache import RegistrationCache
from ..wr import completion_error
from .hub import Hub
from .inbox import Inbox
from .operation import CachedRegion, DeviceRegion, Operation, Region, Request, Source, TemporaryMR, repeated
from .receives import Receives

if TYPE_CHECKING:
    from .._memory.accelerator import DeviceMemory

__all__ = ["CREDIT_RECEIVES", "HEADER", "Engine", "untold"]

#: Bytes in front of every two-sided message; ``ffi/src/framing.c`` has the layout.
HEADER: int = lib.PVL_HEADER_BYTES
#: So many credits, at most, can be on their way before the peer has noticed one: see ``Engine.grant``.
CREDIT_RECEIVES = LEAST_CREDITS

_SPIN_NS = int(SPIN * 1e9)
_SLICE_NS = int(SLICE * 1e9)
#: One wait of a thread that is woken for everything, in seconds.
_LONG = 3600.0
#: How long the requests of a QP in ERR may take to be flushed, before whoever waits for them is let go.
_FLUSH_TIME = 1.0
#: How long the acknowledgements of a peer that has left may be on their way.
_LAST_ACK_NS = 50_000_000
#: How a credit ends that the peer's leaving did not make fail.
_NO_FAULT = (0, int(WCStatus.WR_FLUSH_ERR))
_move, _copy, _from_buffer = lib.pvl_move, lib.pvl_move_copy, ffi.from_buffer
_PENDING = lib.PVL_PENDING
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine(Resource):
    """The slot table of one QP; a child of the QP, so it stops before the QP goes, whoever closes that; and of its hub.

    Args:
        qp: the QP; its CQ, which must have a channel, is used for nothing else.
        staging: memory with one cell of equal size for each send slot.
        receives: where messages arrive, and so many at a time.
        peer: the other side; its control connection is read whenever it has something to say.
        hub: who reads the events of the CQ's channel, where others use that too.

    Attributes:
        quick: the operation of the short way, in C, see ``limit``; one caller at a time has it, and C says who.
        inbox: the messages that have arrived.
        failure: why the connection is over, or None.
        ending: why this side is about to end the connection, while it says goodbye.
    """

    ending: VerbsError | None = None
    #: Whether its QP must have flushed its requests before it goes.
    _flushes = False
    #: Whether the QP went to RESET and not to ERR in the end.
    rested = False
    _flush_time = _FLUSH_TIME

    def __init__(
        self, qp: QP, *, staging: MRSlice, send_slots: int, receives: Receives, peer: Peer, hub: Hub | None = None
    ) -> None:
        raw = qp._handle
        # Operations that ``move`` uses over and over. All of them are kept, for C may know one that Python lost on the
        # way: to an interrupt.
        self._idle: list[Operation] = []
        self._pool: dict[Operation, None] = {}
        table = lib.pvl_engine_new(raw, raw.send_cq, raw.send_cq.channel, send_slots, receives.c, receives.slots)
        self._c: CData = ffi.gc(check_ptr("calloc", table), lib.pvl_engine_free)
        self.hub = hub
        self._flushes = self._flushes or hub is not None
        self._pd = raw.pd  # looked up now: later another thread may have destroyed the QP
        self._c.spin_ns, self._c.slice_ns = _SPIN_NS, _SLICE_NS
        self._c.cell_size = staging.length // send_slots
        self._c.cell_addr, self._c.cell_lkey = staging.addr, staging.lkey
        self._c.max_inline = min(qp.cap.max_inline_data, self._c.cell_size)
        self._qp, self._staging, self._receives, self._peer = qp, staging.mr, receives, peer
        self.quick = Operation.reusable(self._c)
        self._watching = False
        self._window = max(1, send_slots // 2)  # of one operation, so that a long one leaves slots to the others
        self._live: dict[Operation, None] = {}
        self._looking: threading.Thread | None = None
        self._temporary: dict[TemporaryMR, None] = {}
        self.cache_bytes = 0
        self._cache: RegistrationCache | None = None
        self.inbox = Inbox(self)
        # Reentrant, for a signal handler may use the connection that it interrupted.
        self._failing = threading.RLock()
        self._flushed_by: Deadline | None = None
        self.foreign = False  # a forked child's copy
        self.failure: VerbsError | None = None
        # The memory of the table is freed by ffi.gc, when no thread can be in it any more.
        parents = (qp,) if hub is None else (qp, hub)
        self._own(self._c, lib.pvl_stop, *parents, label=f"Engine of QP {qp.qp_num:#x}")
        _engines.add(self)
        if hub is not None:  # now that somebody sees to it that it leaves again, whatever interrupts
            try:
                check_rc("realloc", lib.pvl_hub_join(hub.c, self._c))
            except BaseException:
                self.close()
                raise

    def grant(self, depth: int, granted: int, *, control: int = 0, immediates: bool = True) -> None:
        """Begin to count receives; before the first message of either side.

        This side tells of those that it has posted again once they are more than ``untold``. A peer that has not
        noticed the last credit can send no more than had been posted before it, which is at most three times as many:
        so no more than ``CREDIT_RECEIVES`` are on their way to it. Those of ``control`` are told of by the half.

        Args:
            depth: receives for messages here that the peer can rely on; ``untold`` of it more are posted.
            granted: receives for messages that are posted at the peer.
            control: receives for control bytes on either side, where those come this way.
            immediates: whether the transport has any; else a message brings that of an RDMA write.
        """
        more = untold(depth)
        lib.pvl_grant(self._c, depth + more, more + 1, granted, control, control // 2, not immediates)

    def limit(self, max_piece: int, max_send: int, max_reads: int) -> None:
        """Say what the short way is for: the most bytes of a request and of a message, and the reads in flight.

        The short way is one call of C that the methods of a connection make by themselves, with ``quick`` and without
        any entry in the books here. Only where that call does not do, its caller goes on with ``settled``; with
        ``broken_off`` if an exception comes in between; and the usual way, if nothing was posted.
        """
        self._c.pd, self._c.max_piece, self._c.max_send, self._c.max_reads = self._pd, max_piece, max_send, max_reads

    def settled(self, rc: int, quick: CData, operation: str, deadline: Deadline | None) -> bool:
        """Say whether what the short way has come to is the end; False: nothing was posted. Errors as ``run``."""
        if rc == _PENDING:
            self.finish(Operation.around(quick), operation, deadline or Deadline(None))
            quick.busy = 0  # until here it was nobody else's
        elif self._live:  # C may have entered what others wait for, or nobody
            self._reap()
        return rc in (0, _PENDING)

    def broken_off(self, quick: CData, data: object) -> Operation:
        """Take care of what the short way may have left behind, in flight or failed, and have others use another."""
        region = data.mr if type(data) is MRSlice else data  # a pool's slice does not come this way
        op = Operation.around(quick, *((region,) if isinstance(region, MR) else ()))
        if quick.busy:
            if self.quick is quick:
                self.quick = Operation.reusable(self._c)
            self._live[op] = None
            self._reap()
        return op

    # ------------------------------------------------------------ sending

    def move(
        self, operation: str, opcode: int, part: MRSlice, addr: int, rkey: int, imm: int, timeout: float | None
    ) -> None:
        """Send or write registered memory, or read into it, by one request, and wait for it; errors as ``run``.

        All of it is one call of C. Only where that does not do, because it takes long or fails, Python enters the
        operation in its own books.

        Args:
            addr, rkey: of the peer's memory.
        """
        deadline = None if timeout is None else Deadline(timeout)
        mr = part.mr
        try:
            op = self._idle.pop()
        except IndexError:
            op = self._pooled()
        try:
            if part._recycled:
                op.regions = (mr,)
                mr._holders.add(op.serial)
            wait = _SLICE_NS if deadline is None else self._slice(deadline)
            rc = _move(self._c, op.c, opcode, mr._c, part.offset, part.length, addr, rkey, imm, wait)
        except BaseException:
            self._leave(op, mr)
            raise
        if rc:
            self._go_on(rc, op, operation, opcode, part, mr, addr, rkey, imm, deadline)
        else:
            if part._recycled:
                mr._holders.discard(op.serial)  # C's own, which no interrupt keeps from it
                op.regions = ()
            self._idle.append(op)
            if self._live:  # C may have entered what others wait for, or nobody
                self._reap()

    def copy(
        self, operation: str, opcode: int, data: memoryview, addr: int, rkey: int, imm: int, timeout: float | None
    ) -> None:
        """Send or write what a cell takes, as ``move`` does registered memory."""
        deadline = None if timeout is None else Deadline(timeout)
        wait = _SLICE_NS if deadline is None else self._slice(deadline)
        try:
            op = self._idle.pop()
        except IndexError:
            op = self._pooled()
        try:
            rc = _copy(self._c, op.c, opcode, _from_buffer(data), data.nbytes, addr, rkey, imm, wait)
        except BaseException:
            self._leave(op, None)
            raise
        if rc:
            self._go_on(rc, op, operation, opcode, data, None, addr, rkey, imm, deadline)
        else:
            self._idle.append(op)
            if self._live:  # C may have entered what others wait for, or nobody
                self._reap()

    def _go_on(
        self,
        rc: int,
        op: Operation,
        operation: str,
        opcode: int,
        source: Source,
        mr: MR | None,
        addr: int,
        rkey: int,
        imm: int,
        deadline: Deadline | None,
    ) -> None:
        """Finish what one call of C did not."""
        deadline = deadline or Deadline(None)
        if rc == _PENDING:
            try:
                self._live[op] = None
                self.finish(op, operation, deadline)
            finally:
                self._leave(op, mr)
        else:  # nothing was posted: the long way
            if mr is not None:
                mr._holders.discard(op.serial)
            op.regions = ()
            self._idle.append(op)
            self.run(operation, (Request.of(opcode, source, addr, rkey, imm),), deadline, region=mr)

    def _pooled(self) -> Operation:
        op = Operation.around(Operation.reusable(self._c))
        self._pool[op] = None
        return op

    def new_list(self, op: Operation) -> CData:
        """Give an operation of the pool a ``struct pvl_list`` of its own, to be used over and over."""
        entries = ffi.new("struct pvl_list *")
        entries.op, entries.window = op.c, self._window
        op.list = entries
        return entries

    def _leave(self, op: Operation, mr: MR | None) -> None:
        """Let go of an operation of the pool, which may be in flight, or have failed."""
        if mr is not None:
            op.regions = (mr,)
            if not op.ended:  # C keeps it registered; this is for whoever looks for those that use it
                mr._holders.add(op.serial)
        self._live[op] = None
        self._pool.pop(op, None)
        self._reap()

    def run(
        self,
        operation: str,
        requests: Sequence[Request],
        deadline: Deadline,
        *,
        region: Region | None = None,
        fetch: memoryview | None = None,
    ) -> int:
        """Post requests and wait for all of them; return what an atomic found.

        Args:
            region: the memory that they use.
            fetch: where the data go that a staged request fetches.

        Raises:
            WaitTimeout: they are still in flight, and go on to hold their memory.
            QueueFullError: no slot became free in time.
            CompletionError: the first that failed.
            VerbsError: the connection's failure, where that is why.
        """
        op = Operation(() if region is None else (region,), fetch)
        c = op.c
        try:
            self._begin(op, operation)
            wait = self._slice(deadline) if len(requests) == 1 else 0
            for request in requests:
                if c.posted - c.done >= self._window:
                    self.finish(op, operation, deadline, self._window - 1)
                self._post(op, request, operation, deadline, wait)
            self.finish(op, operation, deadline)
            return int(c.result)
        finally:
            op.running = False
            if c.posted != c.done:
                lib.pvl_abandon(self._c, c)
            self._reap()

    def start(
        self,
        operation: str,
        request: Request,
        deadline: Deadline,
        *,
        region: Region | None = None,
        fetch: memoryview | None = None,
    ) -> Operation:
        """Post one request and return without waiting for it; arguments and errors as ``run``."""
        op = Operation(() if region is None else (region,), fetch)
        try:
            self._begin(op, operation)
            self._post(op, request, operation, deadline, 0)
        finally:
            op.running = False
        return op

    def start_list(self, operation: str, entries: CData, regions: tuple[Region, ...], keep: object) -> Operation:
        """Start a ``struct pvl_list`` and return without waiting; C posts what there is room for, whoever polls.

        Args:
            keep: what the list points into.
        """
        op = Operation(regions, None, keep=keep)
        op.list = entries
        try:
            self._begin(op, operation)
            if lib.pvl_list_start(self._c, entries, op.c, self._window) == lib.PVL_STOPPED:
                self.refuse_late(operation)
        finally:
            op.running = False
        return op

    def _begin(self, op: Operation, operation: str) -> None:
        if self.failure is not None:
            self.refuse_late(operation)
        self._live[op] = None
        op.hold()

    def _post(self, op: Operation, request: Request, operation: str, deadline: Deadline, wait_ns: int) -> None:
        staged, waited = request.addr == 0, False
        while True:
            rc = lib.pvl_post(
                self._c,
                op.c,
                request.opcode,
                staged,
                ffi.NULL if request.source is None else ffi.from_buffer(request.source),
                request.addr,
                request.length,
                request.lkey,
                request.remote_addr,
                request.rkey,
                request.imm,
                request.argument,
                request.swap,
                wait_ns,
            )
            if rc == 0:
                return
            if rc == lib.PVL_STOPPED or self.failure is not None:
                self.refuse_late(operation)
            if rc == lib.PVL_NO_CREDIT:
                if not waited:
                    waited = True
                    lib.pvl_count_wait(self._c)
                self._await_credit(op, request, operation, deadline)
                continue
            if rc != lib.PVL_NO_SLOT:
                raise os_error("ibv_post_send", rc)
            if not self._progress(lib.PVL_UNTIL_SLOT, None, 0, deadline) and deadline.expired:
                raise QueueFullError(
                    errno.EAGAIN,
                    operation,
                    f"all {self._c.send_slots} requests that this QP may have in flight (send_depth) still are, after"
                    f" {deadline.seconds} s",
                )

    def stats(self) -> CData:
        """Return a copy of the counters, a ``struct pvl_stats *``."""
        if self.foreign:
            self.refuse_late("stats")
        copy: CData = ffi.new("struct pvl_stats *")
        lib.pvl_stats(self._c, copy)
        return copy

    def _await_credit(self, op: Operation, request: Request, operation: str, deadline: Deadline) -> None:
        """Wait until the peer has a receive for a request that is not posted yet."""
        control = int(request.opcode == lib.PVL_WR_CONTROL)
        if not self._progress(lib.PVL_UNTIL_CREDIT, None, control, deadline) and deadline.expired:
            what = "the end of it was not sent" if op.c.posted else "nothing was sent"
            raise WaitTimeout(
                f"{operation}: the peer has not taken the messages before it, within {deadline.seconds} s; {what}",
                operation,
            )

    def finish(self, op: Operation, operation: str, deadline: Deadline, few: int = 0) -> None:
        """Wait until so few of an operation's requests are in flight."""
        c = op.c
        while c.left or c.posted - c.done > few:  # in this order: see Operation.ended
            if self._progress(lib.PVL_UNTIL_FEW, op, few, deadline):
                break
            if self.failure is not None and self._flush_limit.expired:
                raise repeated(self.failure, operation)
            if deadline.expired:
                raise WaitTimeout(
                    f"{operation} did not complete within {deadline.seconds} s; it is still in flight and may"
                    " complete later: do not use its memory for anything else, or close the connection",
                    operation,
                )
        if self._live:  # what has ended may have been entered by another call
            self._reap()
        if c.status:
            self._conclude()
            if c.status == WCStatus.WR_FLUSH_ERR and self.failure is not None:  # that shows what brought it about
                raise repeated(self.failure, operation)
            raise self._completion_error(c.status, c.wr_id, c.vendor_err, operation)
        if op.list is not None and op.list.error:
            if self._c.cause:
                self._conclude()  # that is why no more was posted
            if self.failure is None:
                self.fail(os_error("ibv_post_send", op.list.error))
            self.refuse_late(operation)

    def look(self) -> None:
        """Enter the completions that are there, without waiting, and let go of what has ended."""
        self._progress(lib.PVL_UNTIL_IDLE, None, 0, Deadline(0))

    def keep_looking(self) -> None:
        """See to it that completions are noticed while nobody waits: by a thread, until no callback is due."""
        with self._failing:
            if self._looking is None or not self._looking.is_alive():
                name = f"completions of QP {self._qp.qp_num:#x}"
                self._looking = threading.Thread(target=self._look_for_callbacks, name=name, daemon=True)
                self._looking.start()

    def _look_for_callbacks(self) -> None:
        while not self.closed:
            with self._failing:
                due = next((op for op in tuple(self._live) if op.notify), None)
                if due is None and not self.inbox.due:
                    self._looking = None  # with the lock held: whoever has a callback from now on starts another
                    return
            with suppress(VerbsError):  # whoever asks for the result gets it
                if due is not None:
                    self.finish(due, "", Deadline(None))
                else:
                    self._progress(lib.PVL_UNTIL_ARRIVAL, None, 0, Deadline(None))
            self._reap()
            self.inbox.notify_ended()

    def register(self, memory: memoryview | DeviceMemory, access: AccessFlags) -> TemporaryMR:
        """Register memory for one operation; ``run`` lets it go when that has ended, and the engine's end at last."""
        if not isinstance(memory, memoryview):
            return DeviceRegion(self._c, self._pd, memory, access, self._temporary)
        if (cache := self.cache) is not None:
            return CachedRegion(self._c, self._pd, memory, access, cache._store)
        return TemporaryMR(self._c, self._pd, memory, access, self._temporary)

    @property
    def cache(self) -> RegistrationCache | None:
        """What stays registered from one operation to the next: made at its first use; None without ``cache_bytes``."""
        if self._cache is None and self.cache_bytes and not self.closed:
            with self._failing:
                if self._cache is None:
                    cache = RegistrationCache(self._qp.pd, max_bytes=self.cache_bytes)
                    cache._quiet = True  # the QP goes before it
                    self._cache = cache
        return self._cache

    def close_unused(self, region: TemporaryMR) -> None:
        """Close what no operation has come to use."""
        if not any(region in op.regions for op in tuple(self._live)):
            region.close()

    def _reap(self) -> None:
        """Let go of what was in flight when its call ended, and no longer is."""
        for op in tuple(self._live):
            if op.ended or (self.closed and not op.running):
                op.let_go()
                if (notify := op.notify) is not None:  # another thread may clear it meanwhile
                    notify()
                self._live.pop(op, None)

    # ------------------------------------------------------------ receiving

    def post_receives(self) -> None:
        """Post the whole receive ring; allowed from INIT on."""
        while (rc := lib.pvl_post_ring(self._c)) == errno.ENOBUFS and self._receives.grow():
            pass
        check_rc("ibv_post_recv", rc)

    # ------------------------------------------------------------ waiting

    def _slice(self, deadline: Deadline) -> int:
        """Return how long one wait in C may last, in ns.

        Signals are handled in the main thread only, and a hub wakes the others whatever happens.
        """
        if self.hub is not None and threading.current_thread() is not threading.main_thread():
            return int(deadline.at_most(_LONG) * 1e9)
        return _SLICE_NS if deadline.seconds is None else int(deadline.at_most(SLICE) * 1e9)

    def _progress(self, until: int, op: Operation | None, few: int, deadline: Deadline) -> bool:
        """Wait in C for one slice, see to what came up meanwhile, and say whether it is so now."""
        rc = lib.pvl_progress(self._c, until, op.c if op else ffi.NULL, few, self._slice(deadline))
        if rc < 0 and rc != -errno.ESHUTDOWN:
            raise os_error("ibv_poll_cq", rc)
        if self._live:
            self._reap()
        self.inbox.serve()
        if self._c.cause or self._c.flushed:
            self._conclude()
        framing = self._c.framing
        news = framing.control_arrived != framing.control_taken or framing.malformed
        if self._watching and (news or (rc > 0 and rc & lib.PVL_WOKE_PEER)):
            self.read_peer()
        self.check_framing()
        return bool(rc == 0)

    def check_framing(self) -> None:
        """End the connection if the peer has sent a message that is none."""
        if self._c.framing.malformed and self.failure is None:
            text = "the peer sent a message without a header that this protocol knows, or more than it was granted"
            self.fail(PeerProtocolError(text))

    def watch_peer(self) -> None:
        """From now on, wake waiters also when the peer says something, or is gone."""
        self._watching = True
        self._c.peer_fd = self._peer.control.fileno()
        self.take_news()  # what came with the end of the handshake wakes nobody

    def read_peer(self) -> None:
        """Take the peer's news."""
        heard = self._peer.heard
        if self.failure is None and (over := self._peer.read()) is not None:
            self._c.peer_fd = -1  # it would stay readable
            if self.in_flight:
                # A peer that has got its answer may leave before the acknowledgement of that answer is noticed here.
                lib.pvl_progress(self._c, lib.PVL_UNTIL_SENT, ffi.NULL, 0, _LAST_ACK_NS)
            if self._c.cause:
                self._conclude()  # that came first, and may be why the peer has left
            self.fail(over)
        if self.failure is not None:
            self._c.peer_fd = -1  # it would stay readable
        if self._peer.heard != heard:
            lib.pvl_heard(self._c)

    def take_news(self) -> None:
        """Take the peer's news that were read on the way to something else, of which its descriptor says no more."""
        if self._watching and self._peer.control.has_news:
            self.read_peer()

    def await_news(self, heard: int, deadline: Deadline) -> None:
        """Wait, for one slice of time at most, until the peer's news were taken another time than ``heard``."""
        self._progress(lib.PVL_UNTIL_NEWS, None, heard, deadline)

    @property
    def key(self) -> int:
        """What its hub calls it."""
        return int(self._c.key)

    @property
    def heard(self) -> int:
        """How often the peer's news were taken."""
        return int(self._c.heard)

    def fail(self, error: VerbsError) -> None:
        """Record why the connection is over, and move the QP to ERR, which ends every request.

        The first reason stays.
        """
        if self.failure is not None:
            return
        with self._failing:
            if self.failure is None:
                self.failure = error
                self._c.over = 1
                if not self.stop_qp():
                    self._flushed_by = Deadline(0)
                if self.hub is not None:
                    lib.pvl_nudge(self._c)

    def rest(self, why: VerbsError) -> bool:
        """Bring the QP to RESET and record why, if no request is in flight and nobody waits; say whether that is so.

        Then there was nothing to flush but receives, which are gone, and the CQ is empty.
        """
        if self._flushes or self._live or self.inbox._asked or lib.pvl_rest(self._c):
            return False
        self.failure = self.failure or why
        self._qp._moved(QPState.RESET)
        self.rested = True
        return True

    @property
    def _flush_limit(self) -> Deadline:
        """Until when whoever waits goes on to, after a failure; time counts from the first look."""
        if self._flushed_by is None:
            self._flushed_by = Deadline(self._flush_time)
        return self._flushed_by

    def stop_qp(self) -> bool:
        """Move the QP to ERR, which flushes every request.

        Where that is refused it is in RESET or gone: it moves no data either, and nothing will be flushed.
        """
        if self.closed:  # the QP may be another connection's by now
            return False
        try:
            if self._qp.closed or self._qp.state != QPState.ERR:
                if lib.pvl_to_error(self._c):  # the long way: it knows why not
                    self._qp.to_error()
                else:
                    self._qp._moved(QPState.ERR)
        except VerbsError:
            return False
        return True

    def _conclude(self) -> None:
        """After a request has failed: find the reason, which may be among the completions not seen yet."""
        c = self._c
        if self._watching and not c.cause and self.failure is None:
            # A peer that has heard the goodbye may end the connection before this side does.
            if self.ending is not None:
                self.fail(self.ending)
            # The QP may fail before the news comes that the peer has left; and it may have said why.
            self.read_peer()
        if self.failure is None:
            if not c.cause:
                self.drain(Deadline(self._flush_time))
            own = c.own
            if c.cause:
                failed = c.cause, c.cause_wr_id, c.cause_vendor_err
            elif own.status:
                failed = own.status, own.wr_id, own.vendor_err
            else:
                failed = WCStatus.WR_FLUSH_ERR, 0, 0
            self.fail(self._completion_error(*failed))

    def drain(self, deadline: Deadline) -> bool:
        """Wait until nothing is in flight, receives included; say whether that came in time."""
        wait = 0  # most often all of it is there
        while (rc := lib.pvl_progress(self._c, lib.PVL_UNTIL_IDLE, ffi.NULL, 0, wait)) > 0 and not deadline.expired:
            if rc & lib.PVL_WOKE_PEER:
                self._c.peer_fd = -1  # nobody listens to the peer from here on
            wait = self._slice(deadline)
        return bool(rc == 0)

    @property
    def in_flight(self) -> int:
        """How many requests have been posted and not completed, credits aside."""
        own = self._c.own
        return int(self._c.in_flight - (own.posted - own.done))

    # ------------------------------------------------------------ the end

    def close_cache(self) -> bool:
        """Let go of what stays registered between operations, for none follows; say whether there was a cache."""
        if self._cache is None:
            return False
        self._cache.close()
        return True

    @property
    def clean(self) -> bool:
        """Whether it has ended in good order: all requests are over, none has failed, and no message is lent."""
        c, inbox = self._c, self.inbox
        in_use = c.in_flight or c.lent or inbox._asked or inbox._returned
        return not (in_use or c.cause or c.own.status not in _NO_FAULT)

    def close(self) -> None:
        """Stop; safe to call again, and from any thread."""
        if not self.rested or self._owned.foreign:
            super().close()
        elif self._owned.cdata is not None:  # each step is the same when another thread does it, too, and none waits
            self._close(self._owned)

    def _before_destroy(self) -> None:
        self.fail(ClosedError("the QP of this connection was closed"))

    def _after_destroy(self) -> None:
        # Those of the pool too: what they use may be closed before the threads have got around to it.
        for op in (*tuple(self._live), *tuple(self._pool)):
            op.let_go()
            self._live.pop(op, None)
        for region in tuple(self._temporary):
            region.close()
        self.inbox.notify_ended()

    def _completion_error(
        self, status: int, wr_id: int, vendor_err: int, operation: str = "an earlier request"
    ) -> CompletionError:
        return completion_error(status, wr_id=wr_id, qp_num=self._qp.qp_num, vendor_err=vendor_err, operation=operation)

    def refuse_late(self, operation: str) -> NoReturn:
        """Refuse what is asked for after the connection has failed."""
        cause = self.failure or ClosedError("this connection is closed")
        if isinstance(cause, CompletionError):
            raise ClosedError(f"{operation}: this connection is over, because {cause}") from cause
        raise repeated(cause, operation)


def untold(depth: int) -> int:
    """Return how many receives may have been posted again without the peer being told, at such a depth."""
    return max(0, depth // 2 - 1)


def _forget_in_child() -> None:
    """Make the engines of a forked child refuse everything: their QPs and their locks belong to the parent."""
    for engine in tuple(_engines):
        engine.foreign = True
        engine._c.stopped = 1
        engine.failure = ClosedError(
            "this connection was made by another process, and cannot be used in a forked child"
        )


os.register_at_fork(after_in_child=_forget_in_child)
