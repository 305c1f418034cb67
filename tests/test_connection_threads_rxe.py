"""Many threads on one connection: nothing mixed up, nobody stuck, and the interpreter free while they wait."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from support import connected, in_thread

import pyverbs_lite as pvl
from pyverbs_lite._connection.registry import Registry

pytestmark = pytest.mark.rdma


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed * 7919 + size).randbytes(size)


@pytest.mark.parametrize("depth", [1, 2, 3, 64])
def test_posting_beyond_the_depth_never_wedges(depth: int) -> None:
    """Each thread posts many times the depth; slots come back as requests complete (report 8)."""
    threads, rounds, size = 5, 40, 500
    data = bytearray(threads * size)
    with connected({"buffers": {"data": data}}, {"send_depth": depth}) as (left, _):
        remote = left.remote["data"]

        def hammer(number: int) -> None:
            part = remote[number * size : (number + 1) * size]
            for i in range(rounds):
                expected = noise(size, number * 1000 + i)
                left.write(part, expected, timeout=20)
                assert left.read(part, timeout=20) == expected

        for wait in [in_thread(hammer, number) for number in range(threads)]:
            wait(30)
        assert data == b"".join(noise(size, number * 1000 + rounds - 1) for number in range(threads))
        assert left._engine.in_flight == 0
        assert left._engine._c.free_count == depth


@pytest.mark.parametrize("depth", [1, 2])
def test_long_transfers_share_a_shallow_queue(depth: int) -> None:
    size = 200_000
    data = bytearray(4 * size)
    with connected({"buffers": {"data": data}}, {"send_depth": depth, "max_rd_atomic": 1}) as (left, _):
        left._max_piece = 7000
        remote = left.remote["data"]

        def carry(number: int) -> None:
            part = remote[number * size : (number + 1) * size]
            left.write(part, noise(size, number))
            assert left.read(part) == noise(size, number)

        for wait in [in_thread(carry, number) for number in range(4)]:
            wait(30)


def test_four_senders_and_four_receivers_each_way() -> None:
    """Every message arrives once and whole, whoever takes it (report 33)."""
    count = 60
    options = {"recv_depth": 4, "max_message_size": 6000, "send_depth": 3}
    with connected(options, {**options, "recv_depth": 6}) as (left, right):

        def send(conn: pvl.Connection, number: int) -> None:
            for i in range(count):
                body = noise(random.Random(i).choice([0, 60, 4090, 5900]), number * 1000 + i)
                conn.send(struct.pack("!II", number, i) + body, imm=number * 1000 + i)

        def receive(conn: pvl.Connection, got: list[pvl.Message]) -> None:
            got.extend(conn.recv(timeout=30) for _ in range(count))

        received: dict[pvl.Connection, list[pvl.Message]] = {left: [], right: []}
        waits = [in_thread(receive, conn, received[conn]) for conn in (left, right) for _ in range(4)]
        waits += [in_thread(send, conn, number) for conn in (left, right) for number in range(4)]
        for wait in waits:
            wait(40)
        for got in received.values():
            assert len(got) == 4 * count
            seen = Counter()
            for message in got:
                number, i = struct.unpack_from("!II", message)
                seen[number, i] += 1
                assert message.imm == number * 1000 + i
                size = random.Random(i).choice([0, 60, 4090, 5900])
                assert message[8:] == noise(size, number * 1000 + i)
            assert set(seen.values()) == {1}


def test_everything_at_once() -> None:
    data, counter = bytearray(4 * 9000), bytearray(8)
    with connected({"buffers": {"data": data, "counter": counter}}, {"send_depth": 4}) as (left, right):
        remote, words = left.remote["data"], left.remote["counter"]
        region = left.register(bytearray(noise(9000, 5)))

        def add() -> None:
            for _ in range(100):
                left.fetch_add(words, 3)

        def write() -> None:
            for _ in range(30):
                left.write(remote[:9000], region)
                assert left.read(remote[:9000]) == noise(9000, 5)

        def name() -> None:
            for i in range(30):
                with right.register(bytearray(i + 1), name=f"n{i}"):
                    assert left.remote[f"n{i}"].length == i + 1

        def talk() -> None:
            for i in range(60):
                left.send(b"%d" % i)
                assert right.recv(timeout=20) == b"%d" % i

        for wait in [in_thread(job) for job in (add, add, write, name, talk)]:
            wait(40)
        assert struct.unpack("=Q", counter) == (600,)


@pytest.mark.parametrize("waiter", ["recv", "recv_into", "write", "send", "read"])
def test_the_interpreter_runs_while_a_thread_waits(waiter: str) -> None:
    server = {"buffers": {"data": bytearray(9000)}, "recv_depth": 1}
    with connected(server, {"ack_timeout_exp": 23}) as (left, right):
        remote = left.remote["data"]
        if waiter in ("write", "read"):
            right._link.qp.to_reset()
        elif waiter == "send":
            left.send(b"fills the ring")
        calls: dict[str, Any] = {
            "recv": left.recv,
            "recv_into": lambda: left.recv_into(bytearray(5)),
            "write": lambda: left.write(remote, bytes(9000)),
            "read": lambda: left.read(remote),
            "send": lambda: left.send(b"one too many"),
        }
        waiting = in_thread(calls[waiter])
        while not left._engine._c.polling:
            time.sleep(0.001)
        count, end = 0, time.monotonic() + 0.3
        while time.monotonic() < end:
            count += 1
        assert count > 1000
        closing = time.monotonic()
        left.close()
        with pytest.raises(pvl.ClosedError):
            waiting(5)
        assert time.monotonic() - closing < 2


def test_closing_wakes_every_waiter() -> None:
    with connected({"recv_depth": 1}, {"send_depth": 2}) as (left, right):
        left.send(b"fills the ring")
        waits = [in_thread(left.recv) for _ in range(3)]
        waits += [in_thread(left.send, b"no room") for _ in range(4)]
        while not left._engine._c.polling:
            time.sleep(0.001)
        left.close()
        for wait in waits:
            with pytest.raises(pvl.ClosedError):
                wait(5)
        assert right.recv(timeout=5) == b"fills the ring"


@pytest.mark.parametrize("seed", range(6))
def test_closing_while_others_post(seed: int) -> None:
    """Wherever the close strikes, the others end with an error that says so, and nothing crashes."""
    rng = random.Random(seed)
    server = {"buffers": {"data": bytearray(20_000)}, "recv_depth": 3}
    with connected(server, {"send_depth": 3}) as (left, right):
        remote = left.remote["data"]
        region = left.register(bytearray(9000))
        jobs = [
            lambda: left.write(remote, bytes(20_000)),
            lambda: left.write(remote, b"short"),
            lambda: left.read(remote[:5000]),
            lambda: left.write(remote, region),
            lambda: left.register(bytearray(10), name=f"{threading.get_ident()}").close(),
            lambda: left.remote["data"],
            lambda: left.recv(timeout=0.01) if rng.random() < 0.5 else left.fetch_add(remote[:8], 1),
        ]

        def hammer(job: Any) -> None:
            while True:
                with suppress(pvl.WaitTimeout):
                    job()

        waits = [in_thread(hammer, job) for job in jobs]
        time.sleep(rng.uniform(0.01, 0.1))
        (left if seed % 2 else right).close()
        for wait in waits:
            with pytest.raises((pvl.ClosedError, pvl.PeerClosedError, pvl.CompletionError, pvl.StateError)):
                wait(10)


def test_two_threads_close() -> None:
    for _ in range(5):
        with connected() as (left, _):
            for wait in [in_thread(left.close) for _ in range(3)]:
                wait(10)
            assert left.closed


def test_both_sides_close_at_once() -> None:
    for _ in range(10):
        with connected() as (left, right):
            for wait in [in_thread(left.close), in_thread(right.close)]:
                start = time.monotonic()
                wait(10)
                assert time.monotonic() - start < 2


def test_a_region_closed_while_others_use_it() -> None:
    """Either the request holds it, and closing is refused, or it is closed, and the request is refused."""
    with connected({"buffers": {"data": bytearray(9000)}}) as (left, _):
        remote = left.remote["data"]
        for _ in range(30):
            region = left.register(bytearray(9000))

            def use(region: pvl.MR = region) -> None:
                while True:
                    left.write(remote, region)
                    time.sleep(0)  # a moment at which nothing is in flight

            using = in_thread(use)
            while not region.closed:
                with suppress(pvl.BusyError):
                    region.close()
                time.sleep(0)
            with pytest.raises(pvl.ClosedError):
                using(10)
        assert left._engine.failure is None
        left.write(remote, b"fine")


def test_a_timeout_counts_from_the_call_although_others_poll() -> None:
    with connected() as (left, right):
        busy = in_thread(left.recv)
        for limit in (0.0, 0.05, 0.25):
            start = time.monotonic()
            with pytest.raises(pvl.WaitTimeout):
                left.recv(timeout=limit)
            assert limit <= time.monotonic() - start < limit + 0.3
        right.send(b"end")
        assert busy(5) == b"end"


def test_news_reach_a_thread_that_only_waits() -> None:
    """While one thread polls, what it finds for another wakes that one at once."""
    with connected({"buffers": {"data": bytearray(64)}}) as (left, right):
        receiving = in_thread(left.recv)
        while not left._engine._c.polling:
            time.sleep(0.001)
        start = time.monotonic()
        for _ in range(100):
            left.write(left.remote["data"], bytes(64))
        assert time.monotonic() - start < 2
        right.send(b"end")
        assert receiving(5) == b"end"


def test_naming_a_region_and_closing_wait_for_each_other_at_no_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names has the lock of the names, and waits for that of the control connection, which a close takes."""
    resting, named = threading.Event(), threading.Event()
    announce, enter = Registry.announce, Registry._enter

    def announce_late(*args: Any) -> None:
        assert resting.wait(10)
        announce(*args)

    def enter_early(*args: Any) -> None:
        enter(*args)
        named.set()

    with connected() as (left, right):
        rest = left._engine.rest

        def rest_late(why: pvl.VerbsError) -> bool:
            resting.set()
            assert named.wait(10)
            return rest(why)

        monkeypatch.setattr(Registry, "announce", announce_late)
        monkeypatch.setattr(Registry, "_enter", enter_early)
        monkeypatch.setattr(left._engine, "rest", rest_late)
        naming = in_thread(left.register, bytearray(100), name="late")
        while not left._link.pd._children:
            time.sleep(0.001)
        closing = in_thread(left.close)
        closing(10)
        with pytest.raises((pvl.StateError, pvl.PeerClosedError)):
            naming(10)
        with pytest.raises(pvl.PeerClosedError):
            right.recv(timeout=5)
