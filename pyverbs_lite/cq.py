"""Completion queues, and the channels that tell when they have something."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ._args import Deadline, check_int
from ._check import check_neg, check_ptr, check_rc, os_error
from ._resource import Resource
from .device import Context
from .errors import WaitTimeout
from .ffi import CData, ffi, lib
from .wr import WC, wc_from_c

if TYPE_CHECKING:
    from .qp import QP

__all__ = ["CQ", "CompChannel"]

#: How long a wait stays in C before the interpreter may run signal handlers: a signal that comes just before the
#: sleep starts is noticed after this at the latest.
SLICE = 0.1
#: How long a wait looks at the queue before it sleeps on the channel.
SPIN = 50e-6
_BATCH = 32


class CompChannel(Resource):
    """A completion channel; ``fileno()`` is readable when an armed CQ got a completion. The descriptor never blocks.

    Verb: ibv_create_comp_channel
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        handle = check_ptr("ibv_create_comp_channel", lib.ibv_create_comp_channel(context._handle))
        self._own(handle, _destroy_comp_channel, context, label=f"CompChannel of {context.name}")
        check_neg("fcntl", lib.pvl_set_nonblocking(handle.fd))

    def fileno(self) -> int:
        """Return the descriptor, for select, poll or an event loop."""
        return int(self._handle.fd)

    def get_events(self) -> int:
        """Take and acknowledge every event that waits; return how many there were.

        Which CQ an event was for does not matter: poll every CQ of the channel afterwards.

        Verb: ibv_get_cq_event
        """
        cq, context = ffi.new("struct ibv_cq **"), ffi.new("void **")
        count = 0
        while lib.ibv_get_cq_event(self._handle, cq, context) == 0:
            lib.ibv_ack_cq_events(cq[0], 1)
            count += 1
        return count


class CQ(Resource):
    """A completion queue.

    Attributes:
        cqe: how many entries it has, at least as many as asked for.
        channel: its completion channel, or None.

    Verb: ibv_create_cq
    """

    def __init__(self, context: Context, cqe: int, channel: CompChannel | None = None, *, comp_vector: int = 0) -> None:
        check_int("cqe", cqe, 1, context.query_device().max_cqe)
        self.context = context
        self.channel = channel
        raw_channel = channel._handle if channel else ffi.NULL
        handle = check_ptr("ibv_create_cq", lib.ibv_create_cq(context._handle, cqe, ffi.NULL, raw_channel, comp_vector))
        self.cqe: int = handle.cqe
        self._qps: weakref.WeakValueDictionary[int, QP] = weakref.WeakValueDictionary()
        self._wc = ffi.new("struct ibv_wc[]", _BATCH)
        self._got = ffi.new("int *")
        self._woke = ffi.new("int *")
        parents = (context, channel) if channel else (context,)
        self._own(handle, _destroy_cq, *parents, label=f"CQ of {context.name}")

    def poll(self, n: int = _BATCH) -> list[WC]:
        """Return up to ``n`` completions that are there now; failed ones too (see ``WC.raise_for_status``).

        Verb: ibv_poll_cq
        """
        return self._take(check_int("n", n, 1, 1 << 30), ffi.NULL, 0.0, 0.0)

    def req_notify(self, solicited_only: bool = False) -> None:
        """Ask for one event at the next completion; poll once more after it, then sleep on the channel.

        Verb: ibv_req_notify_cq
        """
        check_rc("ibv_req_notify_cq", lib.ibv_req_notify_cq(self._handle, int(solicited_only)))

    def wait(self, timeout: float | None = None, *, n: int = _BATCH) -> list[WC]:
        """Wait until there are completions, and return up to ``n``; other threads run meanwhile.

        Spins briefly, then sleeps on the channel; without a channel it looks again a few thousand times a second.

        Args:
            timeout: seconds; None waits without limit.

        Raises:
            WaitTimeout: none came in time; the requests are still in flight.
        """
        check_int("n", n, 1, 1 << 30)
        deadline = Deadline(timeout)
        channel = self.channel._handle if self.channel else ffi.NULL
        while True:
            found = self._take(n, channel, SPIN, deadline.at_most(SLICE))
            if found:
                return found
            if deadline.expired:
                raise WaitTimeout(f"no completion within {timeout} s; the requests may still complete", "CQ.wait")

    def _take(self, n: int, channel: CData, spin: float, timeout: float) -> list[WC]:
        """Take one batch; what an interrupt kept an earlier call from handing out comes first."""
        handle = self._handle
        if not self._got[0]:
            rc = lib.pvl_wait(
                handle,
                channel,
                -1,
                self._wc,
                min(n, _BATCH),
                int(spin * 1e9),
                int(timeout * 1e9),
                self._got,
                self._woke,
            )
            if rc < 0:
                raise os_error("ibv_poll_cq", rc)
        found = [wc_from_c(self._wc[i]) for i in range(self._got[0])]
        self._got[0] = 0
        for wc in found:
            if (qp := self._qps.get(wc.qp_num)) is not None:
                qp._completed(wc)
        return found


def _destroy_comp_channel(handle: CData) -> None:
    check_rc("ibv_destroy_comp_channel", lib.ibv_destroy_comp_channel(handle))


def _destroy_cq(handle: CData) -> None:
    check_rc("ibv_destroy_cq", lib.ibv_destroy_cq(handle))
