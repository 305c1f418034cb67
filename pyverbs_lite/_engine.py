"""The requests of a connection in flight, and the waiting for them; the tables are in C (``ffi/src/engine.c``).

Any number of threads may use one engine. One of them polls at a time, and enters what it finds into the tables for
all; the others sleep until it has news. A request holds its memory regions until its completion was seen, also after a
timeout or an interrupt.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ._args import Deadline
from ._check import check_ptr, check_rc, os_error
from ._control import Peer
from .cq import SLICE, SPIN
from .enums import WCOpcode, WCStatus, WROpcode
from .errors import ClosedError, CompletionError, QueueFullError, VerbsError, WaitTimeout
from .ffi import CData, ffi, lib
from .mr import MR
from .qp import QP
from .wr import completion_error

__all__ = ["Arrival", "Engine", "Request", "TemporaryMR"]


class TemporaryMR(MR):
    """A region made for one operation; it goes when the last request that uses it has ended."""


@dataclass(slots=True)
class Request:
    """One work request to post: see ``pvl_post_send``. ``addr`` None stands for the slot's own staging cell."""

    opcode: WROpcode
    addr: int | None
    length: int
    lkey: int
    remote_addr: int = 0
    rkey: int = 0
    imm: int = 0
    argument: int = 0
    swap: int = 0
    #: What to copy into the staging cell before posting.
    staged: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """What came in: a message in the receive ring, or the immediate of an RDMA write."""

    view: memoryview
    byte_len: int
    imm: int | None
    opcode: WCOpcode


class Engine:
    """The slot table of one QP.

    Args:
        qp: the QP; its CQ, which must have a channel, is used for nothing else.
        staging: a region with one cell of ``cell`` bytes for each send slot.
        ring: a region with ``recv_slots`` receive buffers of equal size.
        peer: the other side; its control connection is read whenever it has something to say.
    """

    def __init__(
        self, qp: QP, *, staging: MR, cell: int, send_slots: int, ring: MR, recv_slots: int, peer: Peer
    ) -> None:
        raw = qp._handle
        table = lib.pvl_engine_new(raw, raw.send_cq, raw.send_cq.channel, send_slots, recv_slots)
        self._c: CData = ffi.gc(check_ptr("calloc", table), lib.pvl_engine_free)
        self._c.recv_size = ring.length // recv_slots
        self._c.recv_addr, self._c.recv_lkey = ring.addr, ring.lkey
        self._qp, self._staging, self._cell, self._ring = qp, staging, cell, ring
        self._peer = peer
        self._inline = min(qp.cap.max_inline_data, cell)
        # A plain lock: its ``with`` cannot be interrupted between taking it and the block, unlike a Condition's.
        self.lock = threading.Lock()
        self._news = threading.Condition(self.lock)
        self._polling = False
        self._free = list(range(send_slots))
        self._holds: list[tuple[MR, ...]] = [()] * send_slots
        self._abandoned: set[int] = set()
        self._window = max(1, send_slots // 2)
        self.failure: VerbsError | None = None

    # ------------------------------------------------------------ sending

    def run(
        self,
        operation: str,
        requests: Iterable[Request],
        regions: tuple[MR, ...],
        deadline: Deadline,
        fetch: memoryview | None = None,
    ) -> None:
        """Post requests and wait for all of them; ``fetch`` receives what the last staging cell then holds.

        Raises:
            WaitTimeout: they are still in flight, and go on to hold their regions.
            QueueFullError: no slot became free in time.
            CompletionError: the first that failed.
            VerbsError: the connection's failure, where that is why.
        """
        posted: deque[int] = deque()
        try:
            for request in requests:
                if len(posted) >= self._window:
                    self._finish(posted, operation, deadline, None)
                with self.lock:
                    self._post(operation, request, regions, posted, deadline)
            while posted:
                self._finish(posted, operation, deadline, fetch)
        except BaseException:
            with self.lock:
                for slot in posted:
                    self._abandoned.add(slot)
                self._reap()
            raise

    def _post(
        self, operation: str, request: Request, regions: tuple[MR, ...], posted: deque[int], deadline: Deadline
    ) -> None:
        while not self._free:
            self._refuse_late(operation)
            if deadline.expired:
                raise QueueFullError(
                    errno.EAGAIN, operation, f"all {len(self._holds)} requests that this QP may have in flight are"
                )
            self._step(deadline)
        self._refuse_late(operation)
        slot = self._free.pop()
        posted.append(slot)  # from here on an interrupt finds it, and puts it back if it was never posted
        flags = 0
        addr, lkey = request.addr, request.lkey
        if addr is None:
            offset = slot * self._cell
            addr, lkey = self._staging.addr + offset, self._staging.lkey
            if request.staged is not None:
                self._staging.view[offset : offset + request.length] = request.staged
                if request.length <= self._inline:
                    flags = lib.IBV_SEND_INLINE
        self._holds[slot] = regions
        for region in regions:
            region._in_flight += 1
        rc = lib.pvl_post_send(
            self._c,
            slot,
            request.opcode,
            flags,
            addr,
            request.length,
            lkey,
            request.remote_addr,
            request.rkey,
            request.imm,
            request.argument,
            request.swap,
        )
        if rc:
            raise os_error("ibv_post_send", rc)

    def _finish(self, posted: deque[int], operation: str, deadline: Deadline, fetch: memoryview | None) -> None:
        """Wait for the oldest of the posted requests and give its slot back."""
        slot = posted[0]
        with self.lock:
            while (status := self._c.slots[slot].status) == lib.PVL_PENDING:
                if deadline.expired:
                    raise WaitTimeout(
                        f"{operation} did not complete within {deadline.seconds} s; it is still in flight and may"
                        " complete later: do not use its memory for anything else, or close the connection",
                        operation,
                    )
                self._step(deadline)
            vendor_err = self._c.slots[slot].vendor_err
            if fetch is not None and status == WCStatus.SUCCESS:
                offset = slot * self._cell
                fetch[:] = self._staging.view[offset : offset + len(fetch)]
            posted.popleft()
            self._release(slot)
            if status != WCStatus.SUCCESS:
                raise self._request_failed(operation, slot, status, vendor_err)

    def _request_failed(self, operation: str, slot: int, status: int, vendor_err: int) -> VerbsError:
        """Make the error for a request that ended badly; a flush shows what brought it about."""
        if status == WCStatus.WR_FLUSH_ERR and self.failure:
            return repeated(self.failure, operation)
        return self._completion_error(status, slot, vendor_err, operation)

    # ------------------------------------------------------------ receiving

    def post_receives(self) -> None:
        """Post the whole receive ring; allowed from INIT on."""
        for slot in range(self._c.recv_slots):
            check_rc("ibv_post_recv", lib.pvl_post_recv(self._c, slot))

    def receive(self, operation: str, deadline: Deadline, take: Callable[[Arrival], None]) -> None:
        """Wait for a message and give it to ``take``; if that raises, the message stays the next one.

        Raises:
            WaitTimeout: none came in time.
            VerbsError: the connection's failure, once all that had arrived was taken.
        """
        with self.lock:
            c = self._c
            if c.arrived == c.taken:
                self._refuse_late(operation)
            while c.arrived == c.taken:
                if self.failure:
                    raise repeated(self.failure, operation)
                if deadline.expired:
                    raise WaitTimeout(f"no message arrived within {deadline.seconds} s", operation)
                self._step(deadline)
            raw = c.arrivals[c.taken % c.recv_slots]
            opcode = WCOpcode(raw.opcode)
            start = raw.slot * c.recv_size
            length = raw.byte_len if opcode == WCOpcode.RECV else 0  # an RDMA write went elsewhere
            view = self._ring.view[start : start + length]
            take(Arrival(view, raw.byte_len, raw.imm if raw.has_imm else None, opcode))
            rc = lib.pvl_take_arrival(c)
            if rc and not self.failure:
                raise os_error("ibv_post_recv", rc)

    # ------------------------------------------------------------ waiting

    def watch_peer(self) -> None:
        """From now on, wake waiters also when the peer says something, or is gone."""
        self._c.peer_fd = self._peer.control.fileno()

    def read_peer(self) -> None:
        """Take the peer's news; lock held."""
        if (over := self._peer.read()) is not None:
            self._c.peer_fd = -1  # it would stay readable
            self.fail(over)

    def fail(self, error: VerbsError) -> None:
        """Record why the connection is over and move the QP to ERR, which ends every request; lock held.

        The first reason stays.
        """
        if self.failure is None:
            self.failure = error
            self._qp.to_error()
            self._news.notify_all()

    def drain(self, deadline: Deadline) -> bool:
        """Wait until every request has ended and no thread is in the table; say whether that came in time."""
        with self.lock:
            while self._c.in_flight or self._c.recv_posted or self._polling:
                if deadline.expired:
                    return False
                self._step(deadline)
            return True

    @property
    def in_flight(self) -> int:
        """How many requests have been posted and not completed."""
        return int(self._c.in_flight)

    def _step(self, deadline: Deadline) -> None:
        """Poll, or sleep until the thread that polls has news; lock held before and after, not meanwhile."""
        if self._polling:
            self._news.wait(deadline.at_most(SLICE))
            return
        rc = 0
        try:
            self._polling = True
            self.lock.release()
            rc = lib.pvl_progress(self._c, int(SPIN * 1e9), int(deadline.at_most(SLICE) * 1e9))
        finally:
            self.lock.acquire()
            self._polling = False
            self._reap()
            self._news.notify_all()
        if rc < 0:
            raise os_error("ibv_poll_cq", rc)
        if self._c.cause and self.failure is None:
            self.fail(self._completion_error(self._c.cause, self._c.cause_wr_id, self._c.cause_vendor_err))
        if self._c.woke & lib.PVL_WOKE_PEER:
            self.read_peer()

    def _reap(self) -> None:
        """Give back the slots of requests that nobody waits for any more and that have ended."""
        for slot in [slot for slot in self._abandoned if self._c.slots[slot].status != lib.PVL_PENDING]:
            self._abandoned.discard(slot)
            self._release(slot)

    def _release(self, slot: int) -> None:
        regions, self._holds[slot] = self._holds[slot], ()
        self._c.slots[slot].status = lib.PVL_FREE
        self._free.append(slot)
        for region in regions:
            region._in_flight -= 1
            if isinstance(region, TemporaryMR) and not region._in_flight:
                region.close()

    # ------------------------------------------------------------ errors

    def _completion_error(
        self, status: int, wr_id: int, vendor_err: int, operation: str = "an earlier request"
    ) -> CompletionError:
        return completion_error(status, wr_id=wr_id, qp_num=self._qp.qp_num, vendor_err=vendor_err, operation=operation)

    def _refuse_late(self, operation: str) -> None:
        """Refuse what is asked for after the connection has failed."""
        if isinstance(self.failure, CompletionError):
            raise ClosedError(f"{operation}: this connection is over, because {self.failure}") from self.failure
        if self.failure:
            raise repeated(self.failure)


def repeated(cause: VerbsError, operation: str = "") -> VerbsError:
    """Return an error of the same meaning for one more caller: a raised one belongs to the thread that raised it."""
    if isinstance(cause, CompletionError):
        return completion_error(
            cause.status,  # type: ignore[arg-type]
            wr_id=cause.wr_id,
            qp_num=cause.qp_num,
            vendor_err=cause.vendor_err,
            operation=f"{operation or 'this connection'}: {cause.operation}",
        )
    return type(cause)(str(cause))
