"""What our parts opposite librdmacm's tools share: an end with its QP and memory, and waiting with a limit."""

import argparse
import random
import time
from contextlib import ExitStack

import pyverbs_lite as pvl
from pyverbs_lite import cm

PATIENCE = 20.0


def options(letters, **defaults):
    """Read a command line that has the tools' own letters."""
    known = {
        "s": ("server", {}),
        "b": ("bind", {"default": ""}),
        "p": ("port", {"type": int, "default": 7471}),
        "c": ("connections", {"type": int, "default": 1}),
        "C": ("count", {"type": int, "default": 10}),
        "S": ("size", {"type": int, "default": 100}),
        "m": ("group", {"required": True}),
    }
    parser = argparse.ArgumentParser()
    for letter in letters:
        name, how = known[letter]
        parser.add_argument(f"-{letter}", dest=name, **how)
    parser.set_defaults(**defaults)
    return parser.parse_args()


def pattern(number, length):
    """Return the bytes of one of our messages."""
    return random.Random(number).randbytes(length)


class End:
    """A CMID with a QP, and memory: one place for what is sent, and one for each receive."""

    def __init__(self, cmid, count, size, qp_type=pvl.QPType.RC):
        self.cmid, self.count, self.size = cmid, count, size
        self.stack = ExitStack()
        context = cmid.context
        pd = self.stack.enter_context(context.alloc_pd())
        self.send_cq, self.recv_cq = (
            self.stack.enter_context(context.create_cq(count, self.stack.enter_context(context.create_comp_channel())))
            for _ in range(2)
        )
        cap = pvl.QPCap(max_send_wr=count, max_recv_wr=count, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        attr = pvl.QPInitAttr(send_cq=self.send_cq, recv_cq=self.recv_cq, cap=cap, qp_type=qp_type)
        self.qp = self.stack.enter_context(cmid.create_qp(pd, attr))
        self.pd = pd
        self.room = size + self.qp.grh_room
        # 0xFF, so that zeros that arrive can be seen.
        self.memory = pd.reg_mr(bytearray(b"\xff" * (size + count * self.room)))
        for slot in range(count):
            start = size + slot * self.room
            self.qp.post_recv(pvl.RecvWR(wr_id=slot, sg_list=[self.memory[start : start + self.room]]))

    def send(self, number, **where):
        """Send one message, and wait until it has left: its memory is that of the next."""
        self.memory.view[: self.size] = pattern(number, self.size)
        opcode = pvl.WROpcode.SEND_WITH_IMM if "imm_data" in where else pvl.WROpcode.SEND
        self.qp.post_send(pvl.SendWR(opcode=opcode, sg_list=[self.memory[: self.size]], **where))
        (wc,) = self.send_cq.wait(PATIENCE, n=1)
        wc.raise_for_status()

    def receive(self):
        """Wait for all messages; return each one's completion and payload."""
        limit = time.monotonic() + PATIENCE
        found = []
        while len(found) < self.count:
            for wc in self.recv_cq.wait(limit - time.monotonic()):
                wc.raise_for_status()
                assert wc.byte_len == self.room, f"{wc.byte_len} bytes instead of {self.room}"
                start = self.size + wc.wr_id * self.room
                found.append((wc, bytes(self.memory.view[start : start + self.room])))
        return found

    def close(self):
        self.stack.close()
        self.cmid.close()


def listener(args, ps=cm.PortSpace.TCP):
    """Listen; the line tells that it does."""
    cmid = cm.CMID(ps=ps)
    cmid.bind_addr((args.bind, args.port))
    cmid.listen()
    print("listening", flush=True)
    return cmid


def resolved(args, ps=cm.PortSpace.TCP):
    """Return a CMID that knows its device and path."""
    cmid = cm.CMID(ps=ps)
    cmid.resolve_addr((args.server, args.port))
    cmid.resolve_route()
    return cmid
