"""The first steps over librdmacm: one process serves, the other connects. Run it as ``cm_hello.py [ADDRESS]``."""

import os
import sys

import pyverbs_lite as pvl
from pyverbs_lite import cm


def client(host: str, port: int) -> None:
    """Greet the server, and use its memory."""
    with cm.connect(host, port) as conn:
        conn.send(b"hello", imm=41)
        answer = conn.recv(timeout=10)
        print("the answer:", bytes(answer), answer.imm)
        cache = conn.remote["cache"]
        conn.write(cache[3:], b"one-sided", imm=7)
        print("read back:", conn.read(cache[3:12]))


def main() -> None:
    """Serve one client, a child of this process, over the address of an RDMA device."""
    host = sys.argv[1] if len(sys.argv) > 1 else "192.0.2.1"
    cache = bytearray(4096)
    with cm.listen(host, 0, buffers={"cache": cache}) as listener:
        child = os.spawnl(os.P_NOWAIT, sys.executable, "python", __file__, host, str(listener.port))
        with listener.accept(timeout=30) as conn:
            message = conn.recv(timeout=10)
            conn.send(message.upper(), imm=(message.imm or 0) + 1)
            notice = conn.recv(timeout=10)
            print("written by RDMA:", bytes(cache[3 : 3 + notice.byte_len]), notice.imm)
            assert notice.opcode == pvl.WCOpcode.RECV_RDMA_WITH_IMM
        sys.exit(os.waitpid(child, 0)[1])


client(sys.argv[1], int(sys.argv[2])) if sys.argv[2:] else main()
