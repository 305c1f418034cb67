"""Everything a connection can do, between two processes, with every byte checked.

Run without arguments it starts both sides here, over the loopback address; or run the sides by hand:

    python examples/quickstart.py server 0.0.0.0 18515
    python examples/quickstart.py client HOST 18515
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import pyverbs_lite as pvl

PAYLOAD = bytes(range(256)) * 40  # 10240 bytes: more than one packet, and every byte value
ROUNDS = 200
SIZES = (8, 64, 4096, 65536, 1 << 20)


def serve(host: str, port: int) -> None:
    """Wait for one client, answer it, and lend it two buffers."""
    data, counter = bytearray(max(SIZES)), bytearray(8)
    with pvl.listen(host, port, buffers={"data": data, "counter": counter}) as listener:
        print(f"listening on {listener.port}", flush=True)
        with listener.accept(timeout=60) as conn:
            question = conn.recv(timeout=10)
            assert question == b"what is there?", question
            conn.send(PAYLOAD, imm=len(PAYLOAD))
            notice = conn.recv(timeout=10)  # the client's write with immediate
            assert (notice.imm, notice.byte_len) == (0x89ABCDEF, 5), (notice.imm, notice.byte_len)
            assert data[100:105] == b"hello", data[100:105]
            assert data[200 : 200 + len(PAYLOAD)] == PAYLOAD
            conn.send(b"all of it is here")
            assert conn.recv(timeout=60) == b"done"
            assert int.from_bytes(counter, sys.byteorder) == 42, counter


def report(what: str, size: int) -> None:
    """Say that an operation completed; anything but SUCCESS would have raised."""
    print(f"  {what:<28} {size:>8} bytes   SUCCESS")


def run_client(host: str, port: int) -> None:
    """Do one of everything, then measure."""
    with pvl.connect(host, port) as conn:
        info = conn.info
        print(f"device        {info.device}, port {info.port_num}, {info.link_layer.name}")
        gid = info.local_gid.ipv4_mapped or info.local_gid
        print(f"GID           index {info.gid_index}, {gid} ({info.gid_type.name})")
        print(f"path          MTU {info.path_mtu}, QP {info.local_qp_num:#x} to {info.remote_qp_num:#x}")
        print(f"QP states     {' → '.join(state.name for state in info.states)}")
        print("operations")

        conn.send(b"what is there?")
        report("send", 14)
        answer = conn.recv(timeout=10)
        assert (answer, answer.imm) == (PAYLOAD, len(PAYLOAD))
        report("recv with immediate", len(answer))

        data, counter = conn.remote["data"], conn.remote["counter"]
        conn.write(data[200:], PAYLOAD)
        report("RDMA write", len(PAYLOAD))
        conn.write(data[100:], b"hello", imm=0x89ABCDEF)
        report("RDMA write with immediate", 5)
        assert conn.recv(timeout=10) == b"all of it is here"
        report("recv", 17)
        assert conn.read(data[200 : 200 + len(PAYLOAD)]) == PAYLOAD
        report("RDMA read", len(PAYLOAD))
        assert conn.fetch_add(counter, 40) == 0
        report("fetch and add", 8)
        assert conn.compare_swap(counter, expected=40, desired=42) == 40
        report("compare and swap", 8)
        assert int.from_bytes(conn.read(counter), sys.byteorder) == 42
        report("RDMA read", 8)

        measure(conn)
        conn.send(b"done")


def measure(conn: pvl.Connection) -> None:
    """Time RDMA writes from registered memory: each waits for its completion before the next starts."""
    region = conn.register(bytearray(max(SIZES)))
    print(f"RDMA write on {conn.info.device}, GID index {conn.info.gid_index}, one at a time")
    print(f"  {'bytes':>8} {'median µs':>10} {'minimum µs':>11} {'MB/s':>8}")
    for size in SIZES:
        source, target, times = region[:size], conn.remote["data"][:size], []
        for _ in range(ROUNDS if size < 1 << 20 else ROUNDS // 10):
            start = time.perf_counter()
            conn.write(target, source)
            times.append(time.perf_counter() - start)
        median = statistics.median(times)
        print(f"  {size:>8} {median * 1e6:>10.1f} {min(times) * 1e6:>11.1f} {size / median / 1e6:>8.1f}")


def run_both() -> None:
    """Start the server as a process of its own, and be the client."""
    server = subprocess.Popen([sys.executable, __file__, "server", "127.0.0.1", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        run_client("127.0.0.1", int(server.stdout.readline().split()[-1]))
        if server.wait(timeout=30) != 0:
            sys.exit("the server failed")
    finally:
        server.kill()
        server.communicate()
    print("both processes checked every byte: all right")


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            run_both()
        case ["server", host, port]:
            serve(host, int(port))
        case ["client", host, port]:
            run_client(host, int(port))
        case _:
            sys.exit(__doc__)
