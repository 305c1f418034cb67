"""RDMA ping through the connection manager, step by step; speaks with C's rping, in either role.

python examples/rping.py -s [-a ADDRESS] [-p PORT] [-C COUNT] [-S SIZE] [-v] [-d] [-P] [-q]
python examples/rping.py -c  -a ADDRESS  [-p PORT] [-C COUNT] [-S SIZE] [-v] [-V] [-d] [-I ADDRESS] [-q]

The client tells where its ping is; the server reads it, and writes it back to where the client says next.
"""

from __future__ import annotations

import argparse
import itertools
import struct
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace

import pyverbs_lite as pvl
from pyverbs_lite import cm

#: Where a buffer is: address, rkey and size, as rping sends them.
WHERE = struct.Struct("!QII")
FIRST, LAST = ord("A"), ord("z")
REMOTE = pvl.AccessFlags.LOCAL_WRITE | pvl.AccessFlags.REMOTE_READ | pvl.AccessFlags.REMOTE_WRITE


class End:
    """One side of a connection: its QP, three regions, and the steps of the protocol."""

    def __init__(self, cmid: cm.CMID, args: argparse.Namespace, stack: ExitStack) -> None:
        self.id = stack.enter_context(cmid)
        self.args = args
        pd = stack.enter_context(cmid.context.alloc_pd())
        channel = stack.enter_context(cmid.context.create_comp_channel())
        self.cq = stack.enter_context(cmid.context.create_cq(32, channel))
        cap = pvl.QPCap(max_send_wr=16, max_recv_wr=2, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        init = pvl.QPInitAttr(send_cq=self.cq, recv_cq=self.cq, cap=cap)
        # With -q the QP is ours: nobody but us moves it, and the peer is told its number.
        self.qp = pd.create_qp(init) if args.own_qp else cmid.create_qp(pd, init)
        self.param = cm.ConnParam(responder_resources=1, initiator_depth=1, qp_num=self.qp.qp_num if args.own_qp else 0)
        self.move(pvl.QPState.INIT)
        self.control = pd.alloc(2 * WHERE.size)  # what is sent, and behind it what is received
        self.ping, self.echo = pd.alloc(args.size, REMOTE), pd.alloc(args.size, REMOTE)
        self.received: list[bytes] = []
        self.post_recv()

    def move(self, *states: pvl.QPState) -> None:
        """With -q, move the QP with the attributes that the connection manager knows."""
        for state in states if self.args.own_qp else ():
            attr = self.id.init_qp_attr(state)
            if state == pvl.QPState.INIT:  # what the connection will allow is not known to it yet
                attr = replace(attr, qp_access_flags=REMOTE)
            self.qp.modify(attr)

    def debug(self, text: str) -> None:
        """Say what is going on, with -d."""
        if self.args.debug:
            print(text, file=sys.stderr)

    def post_recv(self) -> None:
        """Make room for the peer's next word."""
        self.qp.post_recv(pvl.RecvWR(wr_id=0, sg_list=[self.control[WHERE.size :]]))

    def post(self, opcode: pvl.WROpcode, part: pvl.MRSlice, remote: pvl.RemoteBuffer | None = None) -> None:
        """Post a request and wait for its completion; what the peer says meanwhile is kept."""
        signaled = pvl.SendFlags.SIGNALED
        self.qp.post_send(pvl.SendWR(wr_id=1, opcode=opcode, sg_list=[part], send_flags=signaled, remote=remote))
        while not self.take():
            pass

    def take(self) -> bool:
        """Wait for completions; say whether one was of a request of ours."""
        done = False
        for wc in self.wait():
            wc.raise_for_status()
            if not wc.is_recv:
                done = True
                continue
            if wc.byte_len != WHERE.size:
                raise ValueError(f"the peer sent {wc.byte_len} bytes and not {WHERE.size}: is this rping?")
            self.received.append(bytes(self.control.view[WHERE.size :]))
            self.post_recv()
        return done

    def wait(self) -> list[pvl.WC]:
        """Wait for completions, or for the end of the connection."""
        found: list[pvl.WC] = []
        while not found:
            with suppress(pvl.WaitTimeout):
                found = self.cq.wait(0.1)
            with suppress(pvl.WaitTimeout):
                if not found:
                    self.id.get_event(0).raise_for_error("rping")
        return found

    def hear(self) -> pvl.RemoteBuffer:
        """Wait for the peer's next word: where a buffer of its is."""
        while not self.received:
            self.take()
        where = pvl.RemoteBuffer(*WHERE.unpack(self.received.pop(0)))
        self.debug(f"received addr {where.addr:#x} rkey {where.rkey:#x} len {where.length}")
        return where

    def tell(self, region: pvl.MR | None = None) -> None:
        """Tell where a buffer is, or without one only that it is the peer's turn."""
        word = WHERE.pack(region.addr, region.rkey, region.length) if region else bytes(WHERE.size)
        self.control.view[: WHERE.size] = word
        self.post(pvl.WROpcode.SEND, self.control[: WHERE.size])


def text_of(memory: memoryview) -> str:
    """Return the text in front of the first zero."""
    return bytes(memory).partition(b"\0")[0].decode("ascii")


def serve(request: cm.CMID, args: argparse.Namespace) -> None:
    """Read each ping of a client, and write it back, until the client disconnects."""
    with ExitStack() as stack:
        end = End(request, args, stack)
        end.move(pvl.QPState.RTR, pvl.QPState.RTS)
        end.id.accept(end.param)
        end.debug(f"accepted {end.id}")
        rounds = range(args.count) if args.count else itertools.count()
        try:
            for _ in rounds:
                source = end.hear()
                end.post(pvl.WROpcode.RDMA_READ, end.ping[: source.length], source)
                text = text_of(end.ping.view)
                if args.verbose:
                    print(f"server ping data: {text}", flush=True)
                end.tell()
                end.post(pvl.WROpcode.RDMA_WRITE, end.ping[: len(text) + 1], end.hear())
                end.tell()
            end.id.expect(cm.CMEventType.DISCONNECTED, timeout=None)
        except (pvl.PeerClosedError, pvl.FlushError):
            end.debug("the client has disconnected")
        end.id.disconnect()


def ping(args: argparse.Namespace) -> None:
    """Send pings, and check what comes back."""
    with ExitStack() as stack:
        cmid = stack.enter_context(cm.CMID())
        cmid.resolve_addr((args.address, args.port), src=(args.source, 0) if args.source else None)
        cmid.resolve_route()
        end = End(cmid, args, stack)
        cmid.connect(end.param)
        if args.own_qp:
            end.move(pvl.QPState.RTR, pvl.QPState.RTS)
            cmid.establish()
        end.debug(f"connected {cmid}")
        for number in range(args.count) if args.count else itertools.count():
            letters = itertools.cycle(range(FIRST, LAST + 1))
            start = itertools.islice(letters, number % (LAST - FIRST + 1), None)
            content = f"rdma-ping-{number}: ".encode()
            content += bytes(itertools.islice(start, max(0, args.size - len(content))))
            end.ping.view[:] = content[: args.size - 1] + b"\0"
            end.tell(end.ping)
            end.hear()  # it was read
            end.tell(end.echo)
            end.hear()  # it was written
            if args.validate and end.echo.view != end.ping.view:
                raise ValueError("data mismatch!")
            if args.verbose:
                print(f"ping data: {text_of(end.echo.view)}", flush=True)
        cmid.disconnect(timeout=2)


def main() -> None:
    """Read the options of rping, and do what they say."""
    parser = argparse.ArgumentParser(description="RDMA ping through the connection manager")
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("-s", action="store_true", dest="server", help="server side")
    role.add_argument("-c", action="store_true", dest="client", help="client side")
    parser.add_argument("-a", dest="address", default="", help="address to bind or to connect to")
    parser.add_argument("-I", dest="source", default="", help="the client's own address")
    parser.add_argument("-p", dest="port", type=int, default=7174, help="port (7174)")
    parser.add_argument("-C", dest="count", type=int, default=0, help="how many pings; 0: until the end")
    parser.add_argument("-S", dest="size", type=int, default=64, help="bytes of a ping (64)")
    parser.add_argument("-v", dest="verbose", action="store_true", help="show the ping data")
    parser.add_argument("-V", dest="validate", action="store_true", help="check what comes back")
    parser.add_argument("-d", dest="debug", action="store_true", help="say what is going on")
    parser.add_argument("-P", dest="persistent", action="store_true", help="serve one client after the other")
    parser.add_argument("-q", dest="own_qp", action="store_true", help="make and move the QP by hand")
    args = parser.parse_args()
    if not 28 <= args.size <= 65535:
        parser.error("-S must be 28 to 65535")
    if args.client:
        if not args.address:
            parser.error("-c needs -a")
        ping(args)
        return
    with cm.CMID() as listener:
        listener.bind_addr((args.address, args.port))
        listener.listen(3)
        while True:
            serve(listener.get_request(), args)
            if not args.persistent:
                break


if __name__ == "__main__":
    try:
        main()
    except (pvl.VerbsError, ValueError) as error:
        sys.exit(f"rping: {error}")
