"""The end of PyPI's ibverbs."""

import ctypes
import ipaddress

import by_hand
import ibverbs as ib

A, Op = ib.AccessFlags, ib.WROpcode
ACCESS = A.LOCAL_WRITE | A.REMOTE_WRITE | A.REMOTE_READ | A.REMOTE_ATOMIC
KINDS = {
    ib.WCOpcode.SEND: "send",
    ib.WCOpcode.RDMA_WRITE: "write",
    ib.WCOpcode.RDMA_READ: "read",
    ib.WCOpcode.FETCH_ADD: "fetch_add",
    ib.WCOpcode.COMP_SWAP: "compare_swap",
    ib.WCOpcode.RECV: "receive",
    ib.WCOpcode.RECV_RDMA_WITH_IMM: "note",
}
ATOMICS = {"fetch_add": Op.ATOMIC_FETCH_AND_ADD, "compare_swap": Op.ATOMIC_CMP_AND_SWP}


class Verbs:
    def __init__(self, device, gid_index):
        self.context = {dev.name: dev for dev in ib.get_device_list()}[device].open()
        self.gid_index = gid_index
        self.gid = str(ipaddress.IPv6Address(bytes(self.context.query_gid(1, gid_index).raw)))
        self.pd = self.context.alloc_pd()
        self.buffer = ctypes.create_string_buffer(by_hand.SIZE)
        self.addr = ctypes.addressof(self.buffer)
        self.memory = self.pd.reg_mr(self.addr, by_hand.SIZE, ACCESS)
        self.rkey = self.memory.rkey
        self.cq = self.context.create_cq(16)
        attr = ib.QPInitAttr(self.cq, self.cq, ib.QPType.RC, max_send_wr=4, max_recv_wr=4)
        self.qp = self.pd.create_qp(attr)
        self.qpn = self.qp.qp_num

    def connect(self, gid, qpn, rq_psn, sq_psn):
        raw = ipaddress.IPv6Address(gid).packed
        remote = ib.QPInfo(qp_num=qpn, psn=rq_psn, lid=0, gid=raw, port=1, mtu=ib.MTU.MTU_1024)
        self.qp.to_init(1, ACCESS)
        self.qp.to_rtr(remote, sgid_index=self.gid_index, mtu=ib.MTU.MTU_1024, hop_limit=64)
        self.qp.to_rts(sq_psn)

    def read(self, at, length):
        return ctypes.string_at(self.addr + at, length)

    def write(self, at, data):
        ctypes.memmove(self.addr + at, data, len(data))

    def _sge(self, at, length):
        return [ib.SGE(self.memory, length, offset=at)]

    def post_receive(self, at, length):
        self.qp.post_recv(ib.RecvWR(sg_list=self._sge(at, length)))

    def _post(self, opcode, at, length, **more):
        wr = ib.SendWR(sg_list=self._sge(at, length), opcode=opcode, send_flags=ib.SendFlags.SIGNALED, **more)
        self.qp.post_send(wr)

    def send(self, at, length, imm):
        self._post(Op.SEND_WITH_IMM, at, length, imm_data=imm)

    def rdma(self, kind, at, length, addr, rkey, imm=None):
        opcode = Op.RDMA_READ if kind == "read" else Op.RDMA_WRITE if imm is None else Op.RDMA_WRITE_WITH_IMM
        self._post(opcode, at, length, remote_addr=addr, rkey=rkey, imm_data=imm or 0)

    def atomic(self, name, at, addr, rkey, compare_add, swap):
        self._post(ATOMICS[name], at, 8, remote_addr=addr, rkey=rkey, compare_add=compare_add, swap=swap)

    def poll(self):
        for wc in self.cq.poll(1):
            wc.raise_for_status()
            return KINDS[wc.opcode], wc.byte_len, wc.imm_data
        return None

    def close(self):
        for thing in (self.qp, self.cq, self.memory, self.pd, self.context):
            thing.close()


by_hand.play(Verbs)
