"""The gate of a server, with peers that want no connection: what strangers may cost, and what may lack."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from support import endpoint

import pyverbs_lite as pvl
from pyverbs_lite._connection.settings import Settings
from pyverbs_lite._control.tcp import bind_tcp
from pyverbs_lite._server.gate import Gate, Guest
from pyverbs_lite.wire import Channel, HelloReceived, ReadyReceived

LOOPBACK = "127.0.0.1"


class House:
    """Takes HELLO, says ``answer`` bytes of names, and waits for a READY."""

    full = "BUSY: nobody lives here"

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.failures: list[BaseException] = []
        self.changed = threading.Condition()

    def begin(self, guest: Guest) -> Any:
        yield HelloReceived
        guest.control.channel.hello(endpoint(0x31))
        for number in range(self.answer // 200):
            guest.control.channel.buffer(pvl.RemoteBuffer(0x1000, 5, 8, name=f"{number:0200}"))
        yield ReadyReceived

    def admit(self) -> bool:
        return True

    def vacate(self) -> None:
        pass

    def arrived(self, guest: Guest, link: Any) -> None:
        raise AssertionError("nobody gets that far")

    def failed(self, guest: Guest, error: BaseException, busy: bool) -> None:
        with self.changed:
            self.failures.append(error)
            self.changed.notify_all()

    def await_failures(self, count: int) -> list[BaseException]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.failures) >= count, 30), self.failures
            return self.failures


@contextmanager
def gate(house: House, **options: Any) -> Iterator[Gate]:
    made = Gate(bind_tcp(LOOPBACK, 0, 64), house, Settings.of(options), workers=2, waiting=50)
    made.port = made._socket.getsockname()[1]
    made.start()
    try:
        yield made
    finally:
        made.stop()


def hello() -> bytes:
    channel = Channel()
    channel.hello(endpoint(0x57))
    return channel.data_to_send()


def test_who_has_left_is_not_kept_until_its_time_would_be_up():
    house = House()
    with gate(house, timeout=3600) as made:
        for _ in range(300):
            with closing(socket.create_connection((LOOPBACK, made.port), 10)) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        house.await_failures(300)
        assert len(made._alarms) < 150


def test_a_refused_peer_that_does_not_read_costs_no_processor_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyverbs_lite._server.gate.LAST_WORD", 1.5)
    house = House(answer=8 << 20)
    with gate(house, timeout=30) as made, closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((LOOPBACK, made.port))
        sock.sendall(hello())
        sock.recv(100, socket.MSG_WAITALL)
        clock = time.pthread_getcpuclockid(made._thread.ident)
        sock.sendall(b"\xff" * 8)  # no frame: it is turned away
        house.await_failures(1)
        before = time.clock_gettime(clock)
        time.sleep(1.0)
        assert time.clock_gettime(clock) - before < 0.3


def test_it_goes_on_where_no_more_threads_can_be_had(monkeypatch: pytest.MonkeyPatch):
    house, start = House(), threading.Thread.start

    def failing(thread: threading.Thread) -> None:
        if "handshake" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with gate(house, timeout=30) as made:
        monkeypatch.setattr(threading.Thread, "start", failing)
        for number in range(1, 4):
            with closing(socket.create_connection((LOOPBACK, made.port), 10)) as sock:
                sock.sendall(hello() + b"\xff" * 8)
                sock.recv(1 << 16)
            house.await_failures(number)
        monkeypatch.undo()


@pytest.mark.timeout(30)
def test_a_signal_handler_may_stop_what_it_interrupted():
    with gate(House()) as made:
        with made._lock:  # as where another request for its thread was being made
            made.stop(wait=False)
        made._thread.join(20)
        assert not made._thread.is_alive()
