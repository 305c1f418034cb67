"""The cases of rdma-core's ``pyverbs``, on the device that the worker is told of."""

from __future__ import annotations

import os
from functools import partial
from itertools import pairwise

from pyverbs import enums as e  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.addr import AHAttr, GlobalRoute  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.cq import CQ  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.device import Context  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.mr import MR  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.pd import PD  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.wr import SGE, RecvWR, SendWR  # type: ignore[import-not-found,import-untyped,unused-ignore]

from .worker import LISTS, WINDOW, Case, device, listed, repeated, serve, windowed

SIZE = 64
_ROOM = 1 << 20


def main() -> None:
    """Make two QPs in RTS and serve."""
    name, gid_index = device()
    context = Context(name=name)
    pd = PD(context)
    cq = CQ(context, 256)
    mr = MR(pd, _ROOM, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
    cap = QPCap(max_send_wr=128, max_recv_wr=128, max_send_sge=1, max_recv_sge=1)
    left, right = (QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap)) for _ in "lr")
    for mine, other in ((left, right), (right, left)):
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        attr.dest_qp_num = other.qp_num
        attr.path_mtu = e.IBV_MTU_1024
        route = GlobalRoute(dgid=context.query_gid(1, gid_index), sgid_index=gid_index)
        attr.ah_attr = AHAttr(gr=route, is_global=1, dlid=1, port_num=1)
        mine.to_rts(attr)

    def build(opcode: int, size: int = SIZE) -> SendWR:
        wr = SendWR(wr_id=7, opcode=opcode, num_sge=1, sg=[SGE(mr.buf, size, mr.lkey)])
        if opcode == e.IBV_WR_RDMA_WRITE:
            wr.set_wr_rdma(mr.rkey, mr.buf)
        return wr

    ready = build(e.IBV_WR_RDMA_WRITE)
    message = build(e.IBV_WR_SEND)
    receive = RecvWR(wr_id=9, num_sge=1, sg=[SGE(mr.buf, SIZE, mr.lkey)])
    chains = {count: [build(e.IBV_WR_RDMA_WRITE) for _ in range(count)] for count in LISTS}
    for chain in chains.values():
        for one, following in pairwise(chain):
            one.next_wr = following

    def reap(count: int) -> int:
        found, completions = cq.poll(count)
        for wc in completions:
            if wc.status != e.IBV_WC_SUCCESS:
                raise RuntimeError(f"status {wc.status}")
        return int(found)

    def reap_all(count: int) -> None:
        while (count := count - reap(count)) > 0:
            os.sched_yield()

    def prepared() -> None:
        left.post_send(ready)
        reap_all(1)

    def whole() -> None:
        left.post_send(build(e.IBV_WR_RDMA_WRITE))
        reap_all(1)

    def lists(count: int) -> None:
        left.post_send(chains[count][0])
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
        large = build(e.IBV_WR_RDMA_WRITE, size)
        cases[f"window {size}"] = windowed(partial(left.post_send, large), partial(reap, WINDOW))
    serve(cases)
