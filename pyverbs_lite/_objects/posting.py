"""Work requests laid out as the verbs take them, held, and posted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._base.check import os_error
from ..enums import SendFlags, WROpcode
from ..errors import StateError
from ..ffi import CData, ffi
from ..wr import SGE, RecvWR, SendWR, immediate
from .inflight import Held, Hold, InFlight
from .rules import ATOMICS

__all__ = ["hold_and_run", "lay_out", "post"]


def lay_out(struct: str, requests: Sequence[SendWR | RecvWR], holds: Sequence[Hold]) -> tuple[CData, CData, CData]:
    """Lay out requests and their SGEs in two arrays; return them, and room for ``bad_wr``.

    All three must be referenced until the verb has returned: a pointer in a C struct keeps nothing alive.
    """
    wrs = ffi.new(f"{struct}[]", len(requests))
    sges = ffi.new("struct ibv_sge[]", max(1, sum(len(wr.sg_list) for wr in requests)))
    used = 0
    for i, (wr, hold) in enumerate(zip(requests, holds, strict=True)):
        raw = wrs[i]
        raw.wr_id = hold.serial
        raw.next = ffi.addressof(wrs, i + 1) if i + 1 < len(requests) else ffi.NULL
        raw.sg_list, raw.num_sge = ffi.addressof(sges, used), len(wr.sg_list)
        inline = isinstance(wr, SendWR) and wr.send_flags & SendFlags.INLINE
        for memory in wr.sg_list:
            sge = sges[used]
            sge.addr, sge.length, sge.lkey = memory.addr, memory.length, memory.lkey
            if inline and not isinstance(memory, SGE):
                sge.addr = memory._host_addr  # the driver itself reads it now
            used += 1
        if isinstance(wr, SendWR):
            _fill_send(raw, wr)
    return wrs, sges, ffi.new(f"{struct} **")


def _fill_send(raw: CData, wr: SendWR) -> None:
    raw.opcode, raw.send_flags = WROpcode(wr.opcode), int(wr.send_flags)
    if wr.imm_data is not None:
        ffi.buffer(ffi.addressof(raw, "imm_data"))[:] = immediate(wr.imm_data).to_bytes(4, "big")
    if wr.invalidate_rkey is not None:
        raw.invalidate_rkey = wr.invalidate_rkey
    if wr.remote_srqn is not None:
        raw.qp_type.xrc.remote_srqn = wr.remote_srqn
    if wr.ah is not None:
        raw.wr.ud.ah, raw.wr.ud.remote_qpn, raw.wr.ud.remote_qkey = wr.ah._handle, wr.remote_qpn, wr.remote_qkey
    if wr.mw is not None and wr.bind_info is not None:
        raw.bind_mw.mw, raw.bind_mw.rkey = wr.mw._handle, wr.rkey
        info = raw.bind_mw.bind_info
        info.mr, info.addr, info.length = wr.bind_info.mr._handle, wr.bind_info.addr, wr.bind_info.length
        info.mw_access_flags = int(wr.bind_info.mw_access_flags)
    if wr.remote is None:
        return
    if wr.opcode in ATOMICS:
        raw.wr.atomic.remote_addr, raw.wr.atomic.rkey = wr.remote.addr, wr.remote.rkey
        raw.wr.atomic.compare_add, raw.wr.atomic.swap = wr.compare_add, wr.swap
    else:
        raw.wr.rdma.remote_addr, raw.wr.rdma.rkey = wr.remote.addr, wr.remote.rkey


def post(
    verb: str,
    call: Callable[[CData, CData, CData], int],
    handle: CData,
    requests: Sequence[SendWR | RecvWR],
    kept: Sequence[Sequence[Held]],
    queue: InFlight,
) -> None:
    """Post a list of checked requests, held from before the verb runs until they have completed; lock held.

    Raises:
        VerbsOSError: the verb refused one; ``posted`` says how many were accepted before it.
    """
    if not requests:
        return
    holds = [Hold.of(wr.wr_id, things) for wr, things in zip(requests, kept, strict=True)]
    struct = "struct ibv_send_wr" if isinstance(requests[0], SendWR) else "struct ibv_recv_wr"
    wrs, _sges, bad = lay_out(struct, requests, holds)

    def run() -> tuple[int, int]:
        rc = call(handle, wrs, bad)
        # Some drivers leave bad_wr alone when they refuse the first request.
        return rc, len(holds) if rc == 0 else bad[0] - wrs if bad[0] else 0

    hold_and_run(verb, run, holds, queue)


def hold_and_run(verb: str, run: Callable[[], tuple[int, int]], holds: Sequence[Hold], queue: InFlight) -> None:
    """Hold what requests need, run the verb that posts them, and let go of what it did not accept.

    Args:
        run: returns the verb's result, and how many of the requests it accepted.
    """
    # Held before the verb runs: an interrupt right after it must not find memory in use and not held.
    queue.add(holds)
    try:
        for hold in holds:
            for thing in hold.regions:
                thing._handle  # noqa: B018 - raises if another thread closed it before it was held
        rc, accepted = run()
    except StateError:
        queue.drop(holds)
        raise
    queue.drop(holds[accepted:])
    if rc:
        error = os_error(verb, rc)
        error.posted = accepted
        raise error
