"""The cases of PyPI's ``ibverbs``; runs in a worker that finds ``null/libibverbs.so.1`` first."""

from __future__ import annotations

import ctypes

import ibverbs as ib  # type: ignore[import-not-found,import-untyped,unused-ignore]

from .worker import Case, repeated, serve

SIZE = 64


def main() -> None:
    """Make a QP in RTS and serve."""
    context = next(d for d in ib.get_device_list()).open()
    pd = context.alloc_pd()
    cq = context.create_cq(256)
    room = {"max_send_wr": 128, "max_recv_wr": 128, "max_send_sge": 1, "max_recv_sge": 1}
    memory = ctypes.create_string_buffer(1 << 16)
    access = ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_WRITE
    mr = pd.reg_mr(ctypes.addressof(memory), 1 << 16, access)
    left, right = (pd.create_qp(ib.QPInitAttr(cq, cq, **room)) for _ in "lr")
    port, gid = context.query_port(1), context.query_gid(1, 0)
    for mine, other in ((left, right), (right, left)):
        info = ib.local_qp_info(other, port, gid, port=1)
        ib.connect_rc(mine, info, port=1, sgid_index=0, access=access)

    def build(opcode: object) -> object:
        return ib.SendWR(
            wr_id=7,
            sg_list=[ib.SGE(mr, SIZE)],
            opcode=opcode,
            send_flags=ib.SendFlags.SIGNALED,
            remote_addr=mr.addr,
            rkey=mr.rkey,
        )

    ready = build(ib.WROpcode.RDMA_WRITE)
    message = build(ib.WROpcode.SEND)
    receive = ib.RecvWR(wr_id=9, sg_list=[ib.SGE(mr, SIZE)])
    writes = [build(ib.WROpcode.RDMA_WRITE) for _ in range(64)]

    def prepared() -> None:
        left.post_send(ready)
        cq.poll(1)[0].raise_for_status()

    def whole() -> None:
        left.post_send(build(ib.WROpcode.RDMA_WRITE))
        cq.poll(1)[0].raise_for_status()

    def lists() -> None:
        left.post_send(writes)
        for wc in cq.poll(64):
            wc.raise_for_status()

    def two_sided() -> None:
        right.post_recv(receive)
        left.post_send(message)
        for wc in cq.poll(2):
            wc.raise_for_status()

    of_64 = repeated(lists)
    cases: dict[str, Case] = {
        "prepared": repeated(prepared),
        "built": repeated(whole),
        "list 64": lambda n: of_64(max(1, n // 64)),
        "two-sided": repeated(two_sided),
    }
    serve(cases)
