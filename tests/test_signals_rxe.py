"""Every wait of a connection and around it: an exception out of a signal handler ends it, a harmless signal does not.

The waits here can come to no end by themselves, for the peer's QP answers nothing any more. Each is struck until it has
ended; afterwards everything is still whole.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from support import connected

import pyverbs_lite as pvl

pytestmark = [
    pytest.mark.rdma,
    # Hypothesis, once it has run in this process, has a callback in the garbage collector: a strike may end in there.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Struck(BaseException):
    """What the signal handler raises."""


@contextmanager
def strikes(handler: Callable[..., object], every: float = 0.03) -> Iterator[threading.Event]:
    """Send this thread one signal after the other, until the block or the event says that it is enough."""
    enough, target = threading.Event(), threading.get_ident()

    def run() -> None:
        while not enough.wait(every):
            signal.pthread_kill(target, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield enough
    finally:
        enough.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def is_ended_by_a_strike(call: Callable[[], object]) -> float:
    """Call what never returns, strike it, and return how long it took from the first strike on."""
    struck: list[float] = []

    def strike(*_: object) -> None:
        struck.append(time.monotonic())
        raise Struck

    with suppress(Struck), strikes(strike) as enough:  # the one may come within the end of the other
        try:
            call()
        finally:
            enough.set()
        pytest.fail("it returned")
    return time.monotonic() - struck[0]


Waits = dict[str, Callable[[], object]]


def transfers(conn: pvl.Connection, far: pvl.RemoteBuffer) -> Waits:
    region, into = conn.register(bytearray(9000)), bytearray(9000)
    rows = [array("Q", range(0, 5000, 50))] * 2 + [array("Q", [7] * 100)]

    def batch() -> None:
        with conn.batch() as gathered:
            gathered.write(far, region)
        gathered.work.wait()

    return {
        "write": lambda: conn.write(far, b"small"),
        "write, registered": lambda: conn.write(far, region),
        "write, registered for it": lambda: conn.write(far, into),
        "write, with an immediate": lambda: conn.write(far, b"x", imm=1),
        "read": lambda: conn.read(far[:9]),
        "read into": lambda: conn.read(far, into),
        "read into registered": lambda: conn.read(far, region),
        "fetch_add": lambda: conn.fetch_add(far[:8], 1),
        "compare_swap": lambda: conn.compare_swap(far[:8], 1, 2),
        "send": lambda: conn.send(b"hello"),
        "send, registered": lambda: conn.send(region[:5]),
        "work": lambda: conn.start_write(far, b"x").wait(),
        "result": lambda: conn.start_read(far).result(),
        "write_many": lambda: conn.write_many(far, region, *rows),
        "read_many": lambda: conn.read_many(far, region, *rows),
        "batch": batch,
        "recv": conn.recv,
        "recv_into": lambda: conn.recv_into(into),
        "remote.wait": lambda: conn.remote.wait("never"),
    }


@pytest.mark.parametrize(
    ("via", "host", "busy"), [(pvl, "127.0.0.1", False), (pvl, "127.0.0.1", True), (pvl.cm, "192.0.2.1", False)]
)
def test_a_strike_ends_every_wait_of_a_connection(via: Any, host: str, busy: bool) -> None:
    options = {"ack_timeout_exp": 23, "send_depth": 64}
    with connected({"buffers": {"far": bytearray(9000)}}, options, host, via=via) as (left, right):
        calls = transfers(left, left.remote["far"])
        right._link.qp.to_reset()  # answers nothing any more
        if busy:  # then another thread polls, and this one waits for it

            def poll() -> None:
                with suppress(pvl.VerbsError):
                    left.recv()

            polling = threading.Thread(target=poll)
            polling.start()
            while not left._engine._c.polling:
                time.sleep(0.001)
        late = {name: is_ended_by_a_strike(call) for name, call in calls.items()}
        assert {name: seconds for name, seconds in late.items() if seconds > 3} == {}
        assert left._engine.failure is None
        assert left._engine.in_flight > len(calls) / 2  # what was posted goes on, and holds its memory
        left.close()
        if busy:
            polling.join(20)
            assert not polling.is_alive()
    assert left._engine.in_flight == 0
    assert not left._engine._live
    assert not left._engine._temporary


def test_a_strike_ends_every_wait_for_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pvl.listen("127.0.0.1", 0) as listener:
        port = silent.getsockname()[1]
        with pvl.cm.listen("192.0.2.1", 0) as cm_listener:
            calls: Waits = {
                "accept": listener.accept,
                "connect": lambda: pvl.connect("127.0.0.1", port, timeout=None),
                "cm.accept": cm_listener.accept,
            }
            late = {name: is_ended_by_a_strike(call) for name, call in calls.items()}
    assert {name: seconds for name, seconds in late.items() if seconds > 3} == {}


def test_harmless_signals_neither_end_nor_prolong_a_wait() -> None:
    calls: list[Any] = []
    with connected({"buffers": {"far": bytearray(9000)}}, {"ack_timeout_exp": 23}) as (left, right):
        far = left.remote["far"]
        right._link.qp.to_reset()
        waits: Waits = {
            "write": lambda: left.write(far, b"x", timeout=0.2),
            "read": lambda: left.read(far, timeout=0.2),
            "work": lambda: left.start_write(far, b"x").wait(0.2),
            "recv": lambda: left.recv(timeout=0.2),
            "remote.wait": lambda: left.remote.wait("never", 0.2),
        }
        with strikes(lambda *_: calls.append(1), 0.01):
            for name, wait in waits.items():
                start, count = time.monotonic(), len(calls)
                with pytest.raises(pvl.WaitTimeout):
                    wait()
                assert 0.2 <= time.monotonic() - start < 3, name
                assert len(calls) > count, name  # handlers run meanwhile


def test_a_result_comes_through_harmless_signals() -> None:
    with connected({"buffers": {"far": bytearray(100)}}) as (left, right):
        with strikes(lambda *_: None, 0.002):
            for i in range(100):
                left.send(str(i).encode(), timeout=20)
                assert right.recv(timeout=20) == str(i).encode()
                assert left.fetch_add(left.remote["far"][:8], 3, timeout=20) == 3 * i
