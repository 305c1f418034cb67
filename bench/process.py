"""What the library costs its process: memory of a connection, other threads' time, the time to import it."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import threading
import time
import tracemalloc

import pyverbs_lite as pvl

from .pair import pairs
from .worker import Case, serve

#: How long one wait for nothing lasts: short, so that many are not disturbed by what else the machine does.
WAIT = 0.06


def memory(count: int) -> int:
    """Return the bytes of Python objects that one open connection holds, with no buffer named, over so many pairs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with pvl.open_device("null0") as context:
            with pairs(1, 0, device=context):  # what is made once
                pass
            gc.collect()
            tracemalloc.start()
            try:
                before = tracemalloc.get_traced_memory()[0]
                with pairs(count, 0, device=context, max_message_size=256, recv_depth=2, send_depth=2):
                    gc.collect()
                    return (tracemalloc.get_traced_memory()[0] - before) // (2 * count)
            finally:
                tracemalloc.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def calls_of_a_life() -> int:
    """Count the Python functions that one end calls from connecting to the end: what is repeatable of its cost."""
    with pvl.open_device("null0") as context, pvl.listen("127.0.0.1", 0, device=context) as listener:

        def serve() -> None:
            for _ in range(2):
                with listener.accept(20) as conn:
                    conn.recv(timeout=20)

        server = threading.Thread(target=serve)
        server.start()
        for _ in range(2):  # the first makes what is made once
            calls = 0

            def count(frame: object, event: str, argument: object) -> None:
                nonlocal calls
                calls += event == "call"

            sys.setprofile(count)
            try:
                with pvl.connect("127.0.0.1", listener.port, device=context) as conn:
                    conn.send(b"x")
            finally:
                sys.setprofile(None)
        server.join()
        return calls


def _ticks(wait) -> int:  # type: ignore[no-untyped-def]
    """Count what a second thread gets done while this one waits: nanoseconds per thousand of its steps."""
    stop, done = threading.Event(), [0]

    def work() -> None:
        stopped, steps = stop.is_set, 0
        while not stopped():
            for _ in range(1000):
                pass
            steps += 1
        done[0] = steps

    thread = threading.Thread(target=work)
    start = time.perf_counter_ns()
    thread.start()
    wait()
    stop.set()
    thread.join()
    return (time.perf_counter_ns() - start) // max(1, done[0])


def main() -> None:
    """Serve; the counts have other meanings here, see each case."""
    with pairs(1, 4096, device="null0") as made:
        conn = made[0][0]

        def receive() -> None:
            try:
                conn.recv(timeout=WAIT)
            except pvl.WaitTimeout:
                return
            raise RuntimeError("a message came from nowhere")

        cases: dict[str, Case] = {
            "thread beside sleep": lambda n: n * _ticks(lambda: time.sleep(WAIT)),
            "thread beside recv": lambda n: n * _ticks(receive),
            "memory": memory,
            "calls of a life": lambda _: calls_of_a_life(),
        }
        serve(cases)


def import_time(what: str) -> float:
    """Return the nanoseconds of a new interpreter that runs so much."""
    start = time.perf_counter_ns()
    subprocess.run([sys.executable, "-c", what], check=True)
    return time.perf_counter_ns() - start
