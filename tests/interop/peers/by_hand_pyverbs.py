"""The end of rdma-core's pyverbs; it runs on the system's Python."""

import ipaddress
import socket

import by_hand
from pyverbs import enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
KINDS = {
    e.IBV_WC_SEND: "send",
    e.IBV_WC_RDMA_WRITE: "write",
    e.IBV_WC_RDMA_READ: "read",
    e.IBV_WC_FETCH_ADD: "fetch_add",
    e.IBV_WC_COMP_SWAP: "compare_swap",
    e.IBV_WC_RECV: "receive",
    e.IBV_WC_RECV_RDMA_WITH_IMM: "note",
}
ATOMICS = {"fetch_add": e.IBV_WR_ATOMIC_FETCH_AND_ADD, "compare_swap": e.IBV_WR_ATOMIC_CMP_AND_SWP}


class Verbs:
    def __init__(self, device, gid_index):
        self.context = Context(name=device)
        self.gid_index = gid_index
        self.gid = str(self.context.query_gid(1, gid_index)).split()[-1]
        self.pd = PD(self.context)
        self.memory = MR(self.pd, by_hand.SIZE, ACCESS)
        self.addr, self.rkey = self.memory.buf, self.memory.rkey
        self.cq = CQ(self.context, 16)
        cap = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))
        self.qpn = self.qp.qp_num

    def connect(self, gid, qpn, rq_psn, sq_psn):
        attr = QPAttr(port_num=1, path_mtu=e.IBV_MTU_1024)
        attr.qp_access_flags = ACCESS
        groups = ipaddress.IPv6Address(gid).packed.hex(":", 2)  # exploded has an IPv4 tail, since Python 3.13
        route = GlobalRoute(dgid=GID(groups), sgid_index=self.gid_index, hop_limit=64)
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = qpn, rq_psn, sq_psn
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        self.qp.to_init(attr)
        self.qp.to_rtr(attr)
        self.qp.to_rts(attr)

    def read(self, at, length):
        return self.memory.read(length, at)

    def write(self, at, data):
        self.memory.write(data, len(data), at)

    def _sge(self, at, length):
        return [SGE(self.addr + at, length, self.memory.lkey)]

    def post_receive(self, at, length):
        self.qp.post_recv(RecvWR(num_sge=1, sg=self._sge(at, length)))

    # An immediate is given and got here as the bytes that travel, which are big-endian.
    def send(self, at, length, imm):
        wr = SendWR(opcode=e.IBV_WR_SEND_WITH_IMM, num_sge=1, sg=self._sge(at, length), imm_data=socket.htonl(imm))
        self.qp.post_send(wr)

    def rdma(self, kind, at, length, addr, rkey, imm=None):
        write = e.IBV_WR_RDMA_WRITE if imm is None else e.IBV_WR_RDMA_WRITE_WITH_IMM
        opcode = e.IBV_WR_RDMA_READ if kind == "read" else write
        wr = SendWR(opcode=opcode, num_sge=1, sg=self._sge(at, length), imm_data=socket.htonl(imm or 0))
        wr.set_wr_rdma(rkey, addr)
        self.qp.post_send(wr)

    def atomic(self, name, at, addr, rkey, compare_add, swap):
        wr = SendWR(opcode=ATOMICS[name], num_sge=1, sg=self._sge(at, 8))
        wr.set_wr_atomic(rkey, addr, compare_add, swap)
        self.qp.post_send(wr)

    def poll(self):
        count, found = self.cq.poll(1)
        if not count:
            return None
        wc = found[0]
        assert wc.status == e.IBV_WC_SUCCESS, f"status {wc.status}, vendor_err {wc.vendor_err:#x}"
        return KINDS[wc.opcode], wc.byte_len, socket.ntohl(wc.imm_data)

    def close(self):
        for thing in (self.qp, self.cq, self.memory, self.pd, self.context):
            thing.close()


by_hand.play(Verbs)
