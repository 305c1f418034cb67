"""What a connection counts: every operation in its own counter, by threads and in event loops, and after its end."""

from __future__ import annotations

import asyncio
import os
from array import array
from dataclasses import FrozenInstanceError, asdict, fields
from typing import Any

import pytest
from support import connected, in_thread

import pyverbs_lite as pvl
from pyverbs_lite import aio

pytestmark = pytest.mark.rdma

WAYS = {"tcp": (pvl, "127.0.0.1"), "cm": (pvl.cm, "192.0.2.1"), "iwarp": (pvl.cm, "198.51.100.1")}
#: Counters that depend on how the machine is busy.
LOOSE = {"polls", "sleeps", "in_flight", "in_flight_peak", "credit_waits"}


def change(before: pvl.ConnectionStats, after: pvl.ConnectionStats) -> dict[str, int]:
    """Return what has changed between two snapshots."""
    pairs = ((name, value - getattr(before, name)) for name, value in asdict(after).items() if name not in LOOSE)
    return {name: grown for name, grown in pairs if grown}


@pytest.mark.parametrize("way", WAYS)
def test_every_operation_is_counted_as_what_it_is(way: str) -> None:
    via, host = WAYS[way]
    with connected({"buffers": {"data": bytearray(100_000)}}, None, host, via=via) as (left, right):
        data = left.remote["data"]
        region = left.register(bytearray(1000))
        row = [array("Q", values) for values in ([0, 300, 500], [0, 300, 600], [300, 200, 7])]

        def both(act: Any) -> tuple[dict[str, int], dict[str, int]]:
            before = left.stats, right.stats
            act()
            return change(before[0], left.stats), change(before[1], right.stats)

        def message() -> None:
            left.send(b"hello", imm=1)
            right.recv(timeout=20)

        def notice() -> None:
            left.write(data, b"abc", imm=1)
            right.recv(timeout=20)

        def batch() -> None:
            with left.batch() as gathered:
                gathered.write(data[:10], region[:10])
                gathered.write(data[10:30], region[10:30])
                gathered.read(data[50:55], region[50:55])
            gathered.work.wait(20)

        assert both(message) == ({"sends": 1, "send_bytes": 5}, {"recvs": 1, "recv_bytes": 5})
        assert both(notice) == ({"writes": 1, "write_bytes": 3}, {"recvs": 1})
        assert both(lambda: left.write(data, region[:99])) == ({"writes": 1, "write_bytes": 99}, {})
        assert both(lambda: left.read(data[:77])) == ({"reads": 1, "read_bytes": 77}, {})
        assert both(lambda: left.start_read(data[:7]).result(20)) == ({"reads": 1, "read_bytes": 7}, {})
        assert both(lambda: left.write_many(data, region, *row)) == ({"writes": 2, "write_bytes": 507}, {})
        assert both(batch) == ({"writes": 1, "write_bytes": 30, "reads": 1, "read_bytes": 5}, {})
        assert both(lambda: left.register(bytearray(9), name="mine")) == ({"registrations": 1}, {})
        if way != "iwarp":
            words = data[8:16]
            assert both(lambda: (left.fetch_add(words, 1), left.compare_swap(words, 1, 2))) == ({"atomics": 2}, {})
        with pytest.raises(ValueError, match="do not fit"):
            left.write(data[:2], b"abc")
        assert left.stats.errors == 0
        assert left.stats.in_flight_peak >= 1
        assert left.stats.polls > 0


def test_memory_that_is_registered_for_one_operation_is_counted() -> None:
    with connected({"buffers": {"data": bytearray(100_000)}}) as (left, _):
        before = left.stats
        left.write(left.remote["data"], bytes(50_000))
        assert change(before, left.stats) == {"writes": 1, "write_bytes": 50_000, "registrations": 1}


def test_a_long_transfer_is_several_requests() -> None:
    with connected({"buffers": {"data": bytearray(1000)}}) as (left, _):
        left._max_piece = left._engine._c.max_piece = 400
        before = left.stats
        left.write(left.remote["data"], left.register(bytearray(1000)))
        assert change(before, left.stats) == {"writes": 3, "write_bytes": 1000, "registrations": 1}


def test_what_is_in_flight_and_what_fails() -> None:
    with connected({"buffers": {"data": bytearray(100)}}, {"ack_timeout_exp": 14, "retry_cnt": 0}) as (left, right):
        data = left.remote["data"]
        right._link.qp.to_reset()
        works = [left.start_write(data, b"x") for _ in range(5)]
        assert left.stats.in_flight_peak >= 5
        for work in works:
            with pytest.raises((pvl.CompletionError, pvl.ClosedError)):
                work.wait(20)
        assert (left.stats.errors, left.stats.in_flight, left.stats.writes) == (1, 0, 5)


def test_sleeping_and_waiting_for_the_peer_are_counted() -> None:
    with connected({"recv_depth": 2}) as (left, right):
        receiving = in_thread(right.recv)
        while not right.stats.sleeps:
            pass
        left.send(b"x")
        receiving()
        sending = in_thread(lambda: [left.send(b"y", timeout=20) for _ in range(9)])
        while not left.stats.credit_waits:
            pass
        assert [bytes(right.recv(timeout=20)) for _ in range(9)] == [b"y"] * 9
        sending()
        assert 1 <= left.stats.credit_waits <= 9


def test_in_an_event_loop() -> None:
    async def main() -> None:
        async with aio.listen("127.0.0.1", 0, recv_depth=2) as listener:
            accepting = asyncio.ensure_future(listener.accept(20))
            async with aio.connect("127.0.0.1", listener.port) as left, await accepting as right:
                sending = asyncio.gather(*(left.send(bytes(i)) for i in range(9)))
                while not left.stats.credit_waits:
                    await asyncio.sleep(0)
                for _ in range(9):
                    await right.recv()
                await sending
                assert (left.stats.sends, left.stats.send_bytes, left.stats.sleeps) == (9, 36, 0)
                assert (right.stats.recvs, right.stats.recv_bytes) == (9, 36)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_snapshot_stays_what_it_was_and_outlives_the_connection() -> None:
    with connected() as (left, right):
        left.send(b"once")
        first = left.stats
        left.send(b"twice")
        assert (first.sends, left.stats.sends) == (1, 2)
        with pytest.raises(FrozenInstanceError):
            first.sends = 5  # type: ignore[misc]
        right.recv(timeout=20)
    assert left.stats.send_bytes == 9
    assert left.stats.in_flight == 0
    assert {field.name for field in fields(pvl.ConnectionStats)} == set(asdict(first))


def test_a_forked_child_has_none() -> None:
    with connected() as (left, _):
        if not (child := os.fork()):
            try:
                left.stats  # noqa: B018
            except pvl.ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
