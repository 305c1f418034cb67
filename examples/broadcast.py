"""Broadcast a numpy array to several processes: one RDMA write to each, all of them in flight at once."""

import hashlib
import subprocess
import sys
from typing import Any

import numpy as np

import pyverbs_lite as pvl

PEERS, SHAPE = 3, (300, 700)


def receive(port: int) -> None:
    array: Any = np.zeros(SHAPE, np.float32)
    with pvl.connect("127.0.0.1", port, buffers={"array": array}) as conn:
        notice = conn.recv(timeout=60)  # of the write's immediate: now the array is there
        assert (notice.imm, notice.byte_len) == (7, array.nbytes)
        conn.send(hashlib.sha256(array).digest())


def main() -> None:
    array: Any = np.random.default_rng(5).random(SHAPE, np.float32)
    with pvl.listen("127.0.0.1", 0) as listener:
        processes = [subprocess.Popen([sys.executable, __file__, str(listener.port)]) for _ in range(PEERS)]
        peers = [listener.accept(60) for _ in processes]
    works = [peer.start_write(peer.remote["array"], array, imm=7) for peer in peers]
    for peer, work in zip(peers, works, strict=True):
        work.wait(60)
        assert peer.recv(timeout=60) == hashlib.sha256(array).digest()
        peer.close()
    assert [process.wait(60) for process in processes] == [0] * PEERS
    print(f"{array.nbytes} bytes of {array.dtype} to each of {PEERS} peers, whose SHA-256 is right")


receive(int(sys.argv[1])) if sys.argv[1:] else main()
