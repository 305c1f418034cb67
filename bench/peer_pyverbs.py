"""The cases of rdma-core's ``pyverbs``; runs in a worker with ``libnull.so`` preloaded."""

from __future__ import annotations

from itertools import pairwise

from pyverbs import enums as e  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.addr import AHAttr  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.cq import CQ  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.device import Context  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.mr import MR  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.pd import PD  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # type: ignore[import-not-found,import-untyped,unused-ignore]
from pyverbs.wr import SGE, RecvWR, SendWR  # type: ignore[import-not-found,import-untyped,unused-ignore]

from .worker import Case, repeated, serve

SIZE = 64


def main() -> None:
    """Make two QPs in RTS and serve."""
    context = Context(name="null0")
    pd = PD(context)
    cq = CQ(context, 256)
    mr = MR(pd, 1 << 16, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
    cap = QPCap(max_send_wr=128, max_recv_wr=128, max_send_sge=1, max_recv_sge=1)
    left, right = (QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap)) for _ in "lr")
    for mine, other in ((left, right), (right, left)):
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        attr.dest_qp_num = other.qp_num
        attr.path_mtu = e.IBV_MTU_1024
        attr.ah_attr = AHAttr(dlid=1, port_num=1)
        mine.to_rts(attr)

    def build(opcode: int) -> SendWR:
        wr = SendWR(wr_id=7, opcode=opcode, num_sge=1, sg=[SGE(mr.buf, SIZE, mr.lkey)])
        if opcode == e.IBV_WR_RDMA_WRITE:
            wr.set_wr_rdma(mr.rkey, mr.buf)
        return wr

    ready = build(e.IBV_WR_RDMA_WRITE)
    message = build(e.IBV_WR_SEND)
    receive = RecvWR(wr_id=9, num_sge=1, sg=[SGE(mr.buf, SIZE, mr.lkey)])
    chain = [build(e.IBV_WR_RDMA_WRITE) for _ in range(64)]
    for one, following in pairwise(chain):
        one.next_wr = following

    def reap(count: int) -> None:
        for wc in cq.poll(count)[1]:
            if wc.status != e.IBV_WC_SUCCESS:
                raise RuntimeError(f"status {wc.status}")

    def prepared() -> None:
        left.post_send(ready)
        reap(1)

    def whole() -> None:
        left.post_send(build(e.IBV_WR_RDMA_WRITE))
        reap(1)

    def lists() -> None:
        left.post_send(chain[0])
        reap(64)

    def two_sided() -> None:
        right.post_recv(receive)
        left.post_send(message)
        reap(2)

    of_64 = repeated(lists)
    cases: dict[str, Case] = {
        "prepared": repeated(prepared),
        "built": repeated(whole),
        "list 64": lambda n: of_64(max(1, n // 64)),
        "two-sided": repeated(two_sided),
    }
    serve(cases)
