"""Completion queues; ``comp_channel`` has what tells when they have something."""

from __future__ import annotations

import errno
import threading
import time
from contextlib import suppress

from ._base.args import Deadline, check_int
from ._base.check import check_ptr, check_rc, os_error
from ._base.resource import Resource
from ._objects.inflight import Ledger
from .comp_channel import CompChannel, Destroy
from .device import Context
from .enums import CQAttrMask, WCFlags
from .errors import VerbsError, WaitTimeout
from .ffi import CData, ffi, lib
from .mw import window_invalidated
from .wr import WC, relabel_inv, wc_from_c

__all__ = ["CQ", "CompChannel"]

#: How long a wait sleeps before it looks again by itself: a signal that comes just before the sleep starts, an event
#: that ``get_events`` took and a close in another thread are noticed after this at the latest.
SLICE = 0.1
#: How long a wait looks at the queue before it sleeps on the channel.
SPIN = 50e-6
#: Without a channel there is nothing to sleep on: a wait looks again this often.
_BLIND_SLEEP = 200e-6
_BATCH = 32
#: The vendor_id of the soft-RoCE driver, which sets the kernel's bit for WITH_INV, IP_CSUM_OK to an application.
_SOFT_ROCE = 0xFFFFFF


class CQ(Resource):
    """A completion queue; any number of threads may poll it and wait for it.

    No completion is lost: an exception that a signal handler raises inside of ``poll`` or ``wait`` (Ctrl-C) leaves them
    for the next call, and after a QP was closed those that it left can still be polled.

    Attributes:
        cqe: how many entries it has, at least as many as asked for.
        channel: its completion channel, or None.

    Verb: ibv_create_cq
    """

    #: What else must not be closed before it.
    _needs: tuple[Resource, ...] = ()

    def __init__(self, context: Context, cqe: int, channel: CompChannel | None = None, *, comp_vector: int = 0) -> None:
        check_int("cqe", cqe, 1, context.query_device().max_cqe)
        check_int("comp_vector", comp_vector, 0, max(0, context._handle.num_comp_vectors - 1))
        if channel is not None and channel.context is not context:
            raise ValueError(f"the channel belongs to {channel.context!r}, and the CQ is made on {context!r}")
        self.context = context
        self.channel = channel
        handle = self._create(cqe, ffi.NULL if channel is None else channel._handle, comp_vector)
        self.cqe: int = handle.cqe
        self._lock = threading.RLock()
        #: QP number -> what is in flight there; until the QP is destroyed.
        self._ledgers: dict[int, Ledger] = {}
        self._raw = ffi.new("struct ibv_wc[]", _BATCH)
        self._got = ffi.new("int *")
        self._woke = ffi.new("int *")
        self._ready: list[WC] = []
        self._unnoted: list[tuple[Ledger, int, int]] = []
        self._turn = 0
        self._mislabels_inv = context.query_device().vendor_id == _SOFT_ROCE
        parents = (context,) if channel is None else (context, channel)
        destroy = Destroy("ibv_destroy_cq", lib.ibv_destroy_cq, self._lock)
        self._own(handle, destroy, *parents, *self._needs, label=f"{type(self).__name__} of {context.name}")

    def _create(self, cqe: int, channel: CData, comp_vector: int) -> CData:
        """Call the verb; an extended CQ has another."""
        handle = lib.ibv_create_cq(self.context._handle, cqe, ffi.NULL, channel, comp_vector)
        return check_ptr("ibv_create_cq", handle)

    def poll(self, n: int = _BATCH) -> list[WC]:
        """Return up to ``n`` completions that are there now; failed ones too (see ``WC.raise_for_status``).

        Fewer than ``n`` means that the queue is empty.

        Verb: ibv_poll_cq
        """
        return self._take(check_int("n", n, 1, 1 << 30), 0.0)

    def req_notify(self, solicited_only: bool = False) -> None:
        """Ask for one event at the next completion; poll once more after it, then sleep on the channel.

        Verb: ibv_req_notify_cq
        """
        with self._lock:
            check_rc("ibv_req_notify_cq", lib.ibv_req_notify_cq(self._handle, int(solicited_only)))

    def resize(self, cqe: int) -> None:
        """Make room for at least ``cqe`` entries; ``CQ.cqe`` tells how many there are now. Nothing in it is lost.

        Raises:
            ValueError: ``cqe`` is not 1 to the device's ``max_cqe``.
            UnsupportedError: the device cannot.
            VerbsOSError: EINVAL, for example because more completions wait in it than would fit; it stays as it was.

        Verb: ibv_resize_cq
        """
        check_int("cqe", cqe, 1, self.context.query_device().max_cqe)
        with self._lock:
            handle = self._handle
            rc = lib.ibv_resize_cq(handle, cqe)
            self.cqe = handle.cqe
        hint = f"more completions may wait than the {cqe} entries asked for could hold: poll, then try again"
        check_rc("ibv_resize_cq", rc, hint if abs(rc) == errno.EINVAL else "")

    def moderate(self, cq_count: int, cq_period: int) -> None:
        """Let an event wait until ``cq_count`` completions came or ``cq_period`` µs passed; 16 bits each.

        Raises:
            UnsupportedError: the device cannot.

        Verb: ibv_modify_cq
        """
        attr = ffi.new("struct ibv_modify_cq_attr *")
        attr.attr_mask = CQAttrMask.MODERATE
        attr.moderate.cq_count = check_int("cq_count", cq_count, 0, 0xFFFF)
        attr.moderate.cq_period = check_int("cq_period (microseconds)", cq_period, 0, 0xFFFF)
        with self._lock:
            check_rc("ibv_modify_cq", lib.ibv_modify_cq(self._handle, attr))

    def wait(self, timeout: float | None = None, *, n: int = _BATCH) -> list[WC]:
        """Wait until there are completions, and return up to ``n``; other threads run meanwhile.

        Spins briefly, then sleeps on the channel; without a channel it looks again a few thousand times a second.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            WaitTimeout: none came in time; the requests are still in flight.
            ClosedError: the CQ was closed meanwhile.
        """
        check_int("n", n, 1, 1 << 30)
        deadline = Deadline(timeout)
        while True:
            if found := self._take(n, deadline.at_most(SPIN)):
                return found
            if deadline.expired:
                raise WaitTimeout(f"no completion within {timeout} s; the requests may still complete", "CQ.wait")
            if self.channel is None:
                time.sleep(deadline.at_most(_BLIND_SLEEP))
                continue
            seen = self.channel._taken
            self.req_notify()
            # What came between the last look and the arming raises no event.
            if found := self._take(n, 0.0):
                return found
            self.channel._sleep(deadline.at_most(SLICE), seen)

    # ------------------------------------------------------------ taking, in steps that may be interrupted anywhere

    def _take(self, n: int, spin: float) -> list[WC]:
        found: list[WC] = []
        try:
            with self._lock:
                while len(self._ready) < n and self._fetch(0.0 if self._ready else spin):
                    pass
                found, self._ready = self._ready[:n], self._ready[n:]
        except BaseException:
            with self._lock:  # an interrupt while the lock was given back: nobody has seen them yet
                self._ready[:0] = found
            raise
        return found

    def _fetch(self, spin: float) -> bool:
        """Move one batch from the device to what is ready; lock held. Says whether there was anything."""
        handle = self._handle
        if not self._settle():
            # The count comes through memory and not as the result, which an interrupt would throw away.
            rc = self._look(handle, int(spin * 1e9))
            if rc < 0:
                raise os_error("ibv_poll_cq", rc)
            return self._settle()
        return True

    def _look(self, handle: CData, spin_ns: int) -> int:
        """Let the device fill ``_raw`` and ``_got``; an extended CQ is read in another way."""
        return lib.pvl_wait(handle, ffi.NULL, -1, self._raw, _BATCH, spin_ns, spin_ns, self._got, self._woke)

    def _settle(self) -> bool:
        """Read what the device gave, and note whose requests ended; what is half done is done again."""
        turn = self._turn  # read first: see below
        count = int(self._got[0])
        if count:
            fresh, unnoted = [], []
            for i in range(count):
                raw = self._raw[i]
                wc, ledger = self._read(raw, i)
                fresh.append(wc)
                if ledger is not None:
                    unnoted.append((ledger, raw.wr_id, raw.status))
            # From here on nothing is called, so no interrupt can come between. A signal handler or a finaliser that
            # used the CQ while the lists were made has done all this already.
            if self._turn == turn:
                self._turn = turn + 1
                self._unnoted += unnoted
                self._ready += fresh
                self._got[0] = 0
        for ledger, serial, status in self._unnoted:
            ledger.completed(serial, status)
        self._unnoted = []
        return count > 0

    def _read(self, raw: CData, index: int) -> tuple[WC, Ledger | None]:
        """Make the value of what stands at an index of ``_raw``, and find whose request it was."""
        wc, ledger = self._identify(raw)
        if self._mislabels_inv and wc.wc_flags & WCFlags.IP_CSUM_OK:
            wc = relabel_inv(wc, raw)
        if wc.invalidated_rkey is not None:
            window_invalidated(self.context, wc.invalidated_rkey)
        return wc, ledger

    def _identify(self, raw: CData) -> tuple[WC, Ledger | None]:
        ledger = self._ledgers.get(raw.qp_num)
        found = None if ledger is None else ledger.find(raw.wr_id)
        if found is None:
            ledger = self._holder(raw.wr_id)
            found = None if ledger is None else ledger.find(raw.wr_id)
        if found is None:  # posted past the library, or by a QP that was dropped
            return wc_from_c(raw, raw.wr_id), None
        return wc_from_c(raw, *found), ledger

    def _holder(self, serial: int) -> Ledger | None:
        """Find a request of a queue that has no QP number, such as a WQ's: by its own number, which is unique."""
        return next((ledger for ledger in list(self._ledgers.values()) if ledger.find(serial) is not None), None)

    def _harvest(self) -> None:
        """Read every completion there is, while the requests they belong to are still known."""
        with self._lock:
            for _ in range(self.cqe // _BATCH + 1):  # others may be filling the queue meanwhile
                if not self._fetch(0.0):
                    break

    def _forget(self, number: int, ledger: Ledger) -> None:
        """Read what a queue that was destroyed has left, and know it no more."""
        with suppress(VerbsError):
            self._harvest()
        if self._ledgers.get(number) is ledger:  # else a new QP has got the number
            self._ledgers.pop(number, None)
