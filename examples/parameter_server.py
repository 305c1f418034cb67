"""A parameter server: workers share out the steps, and add up their gradients, by RDMA atomics in its memory."""

import subprocess
import sys
from array import array

import pyverbs_lite as pvl

WORKERS, STEPS = 3, 40
SCALE = 1 << 20  # atomics add integers of 64 bits: fixed point


def gradient(step: int) -> list[float]:
    return [0.5 * step, -0.25 * step * step, 3.0]


def work(port: int) -> None:
    with pvl.connect("127.0.0.1", port) as conn:
        ticket, weights = conn.remote["ticket"], conn.remote["weights"]
        while (step := conn.fetch_add(ticket, 1)) < STEPS:  # nobody else gets this step
            for i, value in enumerate(gradient(step)):
                conn.fetch_add(weights[8 * i : 8 * i + 8], round(value * SCALE))
        conn.send(b"done")


def main() -> None:
    ticket, weights = array("Q", [0]), array("q", [0] * len(gradient(0)))
    with pvl.listen("127.0.0.1", 0, buffers={"ticket": ticket, "weights": weights}) as listener:
        workers = [subprocess.Popen([sys.executable, __file__, str(listener.port)]) for _ in range(WORKERS)]
        for conn in [listener.accept(60) for _ in workers]:
            with conn:
                assert conn.recv(timeout=60) == b"done"
    found = [weight / SCALE for weight in weights]
    assert found == [sum(column) for column in zip(*map(gradient, range(STEPS)), strict=True)]
    assert [worker.wait(60) for worker in workers] == [0] * WORKERS
    print(f"{STEPS} steps by {WORKERS} workers: {found}, each added once")


work(int(sys.argv[1])) if sys.argv[1:] else main()
