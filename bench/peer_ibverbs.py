"""The cases of PyPI's ``ibverbs``, on the device that the worker is told of."""

from __future__ import annotations

import ctypes
import os
from functools import partial

import ibverbs as ib  # type: ignore[import-not-found,import-untyped,unused-ignore]

from .worker import LISTS, WINDOW, Case, device, listed, repeated, serve, windowed

SIZE = 64
_ROOM = 1 << 20


def main() -> None:
    """Make a QP in RTS and serve."""
    name, gid_index = device()
    context = next(d for d in ib.get_device_list() if d.name == name).open()
    pd = context.alloc_pd()
    cq = context.create_cq(256)
    room = {"max_send_wr": 128, "max_recv_wr": 128, "max_send_sge": 1, "max_recv_sge": 1}
    memory = ctypes.create_string_buffer(_ROOM)
    access = ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_WRITE
    mr = pd.reg_mr(ctypes.addressof(memory), _ROOM, access)
    left, right = (pd.create_qp(ib.QPInitAttr(cq, cq, **room)) for _ in "lr")
    port, gid = context.query_port(1), context.query_gid(1, gid_index)
    for mine, other in ((left, right), (right, left)):
        info = ib.local_qp_info(other, port, gid, port=1)
        ib.connect_rc(mine, info, port=1, sgid_index=gid_index, access=access)

    def build(opcode: object, size: int = SIZE) -> object:
        return ib.SendWR(
            wr_id=7,
            sg_list=[ib.SGE(mr, size)],
            opcode=opcode,
            send_flags=ib.SendFlags.SIGNALED,
            remote_addr=mr.addr,
            rkey=mr.rkey,
        )

    ready = build(ib.WROpcode.RDMA_WRITE)
    message = build(ib.WROpcode.SEND)
    receive = ib.RecvWR(wr_id=9, sg_list=[ib.SGE(mr, SIZE)])
    writes = {count: [build(ib.WROpcode.RDMA_WRITE) for _ in range(count)] for count in LISTS}

    def reap(count: int) -> int:
        found = cq.poll(count)
        for wc in found:
            wc.raise_for_status()
        return len(found)

    def reap_all(count: int) -> None:
        while (count := count - reap(count)) > 0:
            os.sched_yield()

    def prepared() -> None:
        left.post_send(ready)
        reap_all(1)

    def whole() -> None:
        left.post_send(build(ib.WROpcode.RDMA_WRITE))
        reap_all(1)

    def lists(count: int) -> None:
        left.post_send(writes[count])
        reap_all(count)

    def two_sided() -> None:
        right.post_recv(receive)
        left.post_send(message)
        reap_all(2)

    cases: dict[str, Case] = {
        "prepared": repeated(prepared),
        "built": repeated(whole),
        "two-sided": repeated(two_sided),
    }
    cases |= {f"list {count}": listed(partial(lists, count), count) for count in LISTS}
    for size in (1 << 16, 1 << 20):
        large = build(ib.WROpcode.RDMA_WRITE, size)
        cases[f"window {size}"] = windowed(partial(left.post_send, large), partial(reap, WINDOW))
    serve(cases)
