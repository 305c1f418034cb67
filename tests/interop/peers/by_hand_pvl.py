"""This project's end of the connection by hand."""

import by_hand

import pyverbs_lite as pvl

A, Op = pvl.AccessFlags, pvl.WROpcode
ACCESS = A.LOCAL_WRITE | A.REMOTE_WRITE | A.REMOTE_READ | A.REMOTE_ATOMIC
KINDS = {
    pvl.WCOpcode.SEND: "send",
    pvl.WCOpcode.RDMA_WRITE: "write",
    pvl.WCOpcode.RDMA_READ: "read",
    pvl.WCOpcode.FETCH_ADD: "fetch_add",
    pvl.WCOpcode.COMP_SWAP: "compare_swap",
    pvl.WCOpcode.RECV: "receive",
    pvl.WCOpcode.RECV_RDMA_WITH_IMM: "note",
}
ATOMICS = {"fetch_add": Op.ATOMIC_FETCH_AND_ADD, "compare_swap": Op.ATOMIC_CMP_AND_SWP}


class Verbs:
    def __init__(self, device, gid_index):
        self.context = pvl.open_device(device)
        self.gid_index = gid_index
        self.gid = {row.gid_index: row for row in self.context.gid_table(1)}[gid_index].gid.exploded
        pd = self.context.alloc_pd()
        self.memory = pd.alloc(by_hand.SIZE, ACCESS)
        self.addr, self.rkey = self.memory.addr, self.memory.rkey
        self.cq = self.context.create_cq(16)
        cap = pvl.QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        self.qp = pd.create_qp(pvl.QPInitAttr(send_cq=self.cq, recv_cq=self.cq, cap=cap, qp_type=pvl.QPType.RC))
        self.qpn = self.qp.qp_num

    def connect(self, gid, qpn, rq_psn, sq_psn):
        route = pvl.GlobalRoute(dgid=pvl.gid.parse_gid(gid), sgid_index=self.gid_index)
        path = pvl.AHAttr(port_num=1, grh=route)
        self.qp.to_init(qp_access_flags=ACCESS)
        self.qp.to_rtr(ah_attr=path, dest_qp_num=qpn, rq_psn=rq_psn, path_mtu=by_hand.MTU, max_dest_rd_atomic=1)
        self.qp.to_rts(sq_psn=sq_psn, max_rd_atomic=1)

    def read(self, at, length):
        return bytes(self.memory.view[at : at + length])

    def write(self, at, data):
        self.memory.view[at : at + len(data)] = data

    def post_receive(self, at, length):
        self.qp.post_recv(pvl.RecvWR(sg_list=[self.memory[at : at + length]]))

    def _post(self, opcode, at, length, **more):
        self.qp.post_send(pvl.SendWR(opcode=opcode, sg_list=[self.memory[at : at + length]], **more))

    def send(self, at, length, imm):
        self._post(Op.SEND_WITH_IMM, at, length, imm_data=imm)

    def rdma(self, kind, at, length, addr, rkey, imm=None):
        opcode = Op.RDMA_READ if kind == "read" else Op.RDMA_WRITE if imm is None else Op.RDMA_WRITE_WITH_IMM
        self._post(opcode, at, length, remote=pvl.RemoteBuffer(addr, rkey, length), imm_data=imm)

    def atomic(self, name, at, addr, rkey, compare_add, swap):
        self._post(ATOMICS[name], at, 8, remote=pvl.RemoteBuffer(addr, rkey, 8), compare_add=compare_add, swap=swap)

    def poll(self):
        for wc in self.cq.poll(1):
            wc.raise_for_status()
            return KINDS[wc.opcode], wc.byte_len, wc.imm_data
        return None

    def close(self):
        self.context.close()


by_hand.play(Verbs)
