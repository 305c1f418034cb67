"""Receives that are granted: a sender far ahead waits, and no message ever meets a peer without a receive."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import connected, in_thread

import pyverbs_lite as pvl
from pyverbs_lite._connection import engine as _engine
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
#: With 7 and no pause to speak of, a message without a receive is sent again for ever: only the counters would tell.
EAGER = {"rnr_retry": 7, "min_rnr_timer_code": 1}


def rnr() -> dict[str, int]:
    names = "rcvd_rnr_err", "send_rnr_err", "retry_rnr_exceeded_err"
    return {name: int((COUNTERS / name).read_text()) for name in names}


@pytest.fixture(autouse=True)
def no_rnr(request: pytest.FixtureRequest) -> Iterator[None]:
    before = rnr()
    yield
    if "meets_rnr" not in request.node.name:
        assert rnr() == before


def numbered(i: int) -> bytes:
    return struct.pack("<I", i) + bytes(i % 900)


def number(message: bytes) -> int:
    assert len(message) == 4 + struct.unpack("<I", message[:4])[0] % 900
    return int(struct.unpack("<I", message[:4])[0])


# ------------------------------------------------------------ far ahead


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 16])
def test_a_sender_far_ahead_waits(depth: int) -> None:
    """Of sends, starts and writes with an immediate no more are out than the peer has receives for."""
    count, data = 60, bytearray(8)
    with connected({"recv_depth": depth, "buffers": {"data": data}, **EAGER}, EAGER) as (left, right):
        remote = left.remote["data"]

        def send() -> None:
            for i in range(0, count, 3):
                left.send(numbered(i), timeout=20)
                left.start_send(numbered(i + 1), timeout=20)
                left.write(remote, b"%8d" % i, imm=i + 2, timeout=20)

        sending = in_thread(send)
        for i in range(count):
            if i < 6:
                time.sleep(0.02)  # the sender runs into the end of what it was granted
            message = right.recv(timeout=20)
            assert message.imm == i if i % 3 == 2 else number(message) == i
        sending()
        told, deadline = left._engine._c.framing, time.monotonic() + 10
        while told.granted - told.sent < depth:  # what it can rely on
            assert time.monotonic() < deadline
            left._engine.look()
        assert told.sent == count


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("send_depth", [1, 3, 64])
def test_streams_both_ways_at_once(depth: int, send_depth: int) -> None:
    count = 150
    tuning = {"recv_depth": depth, "send_depth": send_depth, "max_message_size": 1000, **EAGER}
    with connected(dict(tuning), dict(tuning)) as (left, right):

        def receive(conn: pvl.Connection) -> list[int]:
            return [number(conn.recv(timeout=30)) for _ in range(count)]

        def send(conn: pvl.Connection) -> None:
            for i in range(count):
                conn.send(numbered(i), timeout=30)

        calls = [in_thread(call, conn) for call in (receive, send) for conn in (left, right)]
        assert [call(60) for call in calls] == [list(range(count))] * 2 + [None] * 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_streams_both_ways_in_an_event_loop(depth: int) -> None:
    count, tuning = 120, {"recv_depth": depth, "max_message_size": 1000, **EAGER}

    async def main() -> list[list[int]]:
        async with pvl.aio.listen("127.0.0.1", 0, **tuning) as listener:
            accepting = asyncio.create_task(listener.accept())
            async with pvl.aio.connect("127.0.0.1", listener.port, **tuning) as left, await accepting as right:

                async def receive(conn: pvl.aio.Connection) -> list[int]:
                    return [number(await conn.recv(timeout=30)) for _ in range(count)]

                async def send(conn: pvl.aio.Connection) -> None:
                    for i in range(count):
                        await conn.send(numbered(i), timeout=30)

                found = await asyncio.gather(receive(left), receive(right), send(left), send(right))
                return list(found[:2])

    assert asyncio.run(main()) == [list(range(count))] * 2


def test_many_at_once_over_few_receives() -> None:
    """Threads of one sender share what is granted, and nothing is lost or doubled."""
    with connected({"recv_depth": 2, **EAGER}, {"send_depth": 4, **EAGER}) as (left, right):

        def send(start: int) -> None:
            for i in range(start, start + 40):
                left.send(struct.pack("<I", i), timeout=30)

        calls = [in_thread(send, 40 * k) for k in range(4)]
        found = [struct.unpack("<I", right.recv(timeout=30))[0] for _ in range(160)]
        for call in calls:
            call(30)
        assert sorted(found) == list(range(160))
        for k in range(4):
            assert [i for i in found if i // 40 == k] == list(range(40 * k, 40 * k + 40))


# ------------------------------------------------------------ starved


@pytest.mark.parametrize("depth", [1, 2, 3, 16])
def test_a_timeout_while_starved_sends_nothing_and_harms_nothing(depth: int) -> None:
    data = bytearray(9000)
    with connected({"recv_depth": depth, "buffers": {"data": data}}, EAGER) as (left, right):
        granted = left._engine._c.framing.granted
        assert granted == depth + _engine.untold(depth)
        for i in range(granted):
            left.send(b"%d" % i, timeout=5)
        remote = left.remote["data"]
        attempts = {
            "send": lambda: left.send(b"late", timeout=0.02),
            "start_send": lambda: left.start_send(b"late", timeout=0),
            "write": lambda: left.write(remote, bytes(9000), imm=7, timeout=0.02),
            "start_write": lambda: left.start_write(remote, b"late", imm=7, timeout=0.02),
        }
        for name, attempt in attempts.items():
            text = f"{name.removeprefix('start_')}: the peer has not taken .*nothing was sent"
            with pytest.raises(pvl.WaitTimeout, match=text):
                attempt()
        assert not any(data)
        left.write(remote, b"needs no receive", timeout=5)  # nor does it wait behind those that do
        assert left.read(remote[:16], timeout=5) == b"needs no receive"
        for i in range(granted):
            assert right.recv(timeout=5) == b"%d" % i
        left.send(b"on time", timeout=5)
        assert right.recv(timeout=5) == b"on time"
        with pytest.raises(pvl.WaitTimeout):
            right.recv(timeout=0)
        assert left._engine.in_flight == 0


def test_a_starved_task_can_be_cancelled() -> None:
    async def main() -> None:
        async with pvl.aio.listen("127.0.0.1", 0, recv_depth=1) as listener:
            accepting = asyncio.create_task(listener.accept())
            async with pvl.aio.connect("127.0.0.1", listener.port) as left, await accepting as right:
                await left.send(b"1")
                late = asyncio.create_task(left.send(b"cancelled"))
                with pytest.raises(pvl.WaitTimeout, match="nothing was sent"):
                    await left.send(b"timed out", timeout=0.05)
                late.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await late
                assert await right.recv(timeout=5) == b"1"
                await left.send(b"2", timeout=5)
                assert await right.recv(timeout=5) == b"2"

    asyncio.run(main())


def test_a_starved_sender_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timer wakes it, but for the slices in which signals are looked for: a credit raises an event."""
    monkeypatch.setattr(_engine, "_SLICE_NS", 30 * 10**9)
    with connected({"recv_depth": 1}) as (left, right):
        left.send(b"1")
        sending = in_thread(left.send, b"2")
        while not left._engine._c.polling:
            time.sleep(0.001)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.15
        start = time.monotonic()
        assert right.recv(timeout=5) == b"1"
        sending(10)
        assert time.monotonic() - start < 10


def test_closing_and_losing_the_peer_wake_who_is_starved() -> None:
    with connected({"recv_depth": 1}) as (left, right):
        left.send(b"1")
        sending = in_thread(left.send, b"2")
        while not left._engine._c.polling:
            time.sleep(0.001)
        right.close()
        with pytest.raises(pvl.PeerClosedError):
            sending(10)
    with connected({"recv_depth": 1}) as (left, _):
        left.send(b"1")
        sending = in_thread(left.send, b"2")
        while not left._engine._c.polling:
            time.sleep(0.001)
        left.close()
        with pytest.raises(pvl.ClosedError):
            sending(10)


# ------------------------------------------------------------ credits


def test_whoever_seldom_takes_a_message_still_tells_of_it() -> None:
    """One call of recv is enough: nobody polls for the receiver in between."""
    with connected({"recv_depth": 2}, EAGER) as (left, right):
        for i in range(2):
            left.send(b"%d" % i)
        for i in range(2, 12):
            sending = in_thread(left.send, b"%d" % i, timeout=20)
            assert right.recv(timeout=5) == b"%d" % (i - 2)
            sending()


def test_a_credit_to_a_peer_that_has_left_is_no_failure_of_its_own() -> None:
    tuning = {"ack_timeout_exp": 8, "retry_cnt": 1}
    with connected({"recv_depth": 4, **tuning}) as (left, right):
        for i in range(4):
            left.send(b"%d" % i)
        left.close()
        for i in range(4):
            assert right.recv(timeout=5) == b"%d" % i
            time.sleep(0.05)  # the credit's retries come to an end
        with pytest.raises(pvl.PeerClosedError, match="closed the connection"):
            right.recv(timeout=5)


def test_credits_are_few() -> None:
    """Of 64 messages and as many answers, the answers tell what has to be told."""
    with connected({"recv_depth": 16}, {"recv_depth": 16}) as (left, right):
        for _ in range(64):
            left.send(b"ping")
            right.recv(timeout=5)
            right.send(b"pong")
            left.recv(timeout=5)
        assert (left._engine._c.own.posted, right._engine._c.own.posted) == (0, 0)
        for _ in range(64):
            left.send(b"ping")
            right.recv(timeout=5)
        assert right._engine._c.own.posted == 64 // 8


@pytest.mark.parametrize("depth", [*range(1, 40), 1000, 1001, 65536])
def test_no_more_credits_are_on_their_way_than_receives_are_kept_for(depth: int) -> None:
    """The reckoning of docs/handshake.md, for whatever a peer does that takes no notice for as long as it can."""
    posted, told_after = depth + _engine.untold(depth), _engine.untold(depth) + 1
    assert posted // told_after <= _engine.CREDIT_RECEIVES
    assert posted - (told_after - 1) >= depth


def test_a_peer_that_takes_more_than_it_was_granted_meets_rnr() -> None:
    """The counters of the other tests do count."""
    before = rnr()
    with connected({"recv_depth": 1}, {"rnr_retry": 0}) as (left, _):
        left._engine._c.framing.granted += 10
        with pytest.raises(pvl.RnrRetryExceededError):
            for _ in range(6):
                left.send(b"x", timeout=5)
    assert rnr()["send_rnr_err"] > before["send_rnr_err"]


@pytest.mark.parametrize(
    "raw",
    [
        b"short",
        struct.pack("!BBHIII", 9, 0, 0, 9, 0, 0),  # no kind
        struct.pack("!BBHIII", 2, 0, 0, 9, 0, 0) + b"control",  # the TCP connection is there for that
    ],
    ids=["short", "kind", "control"],
)
def test_what_is_no_message_ends_the_connection(raw: bytes) -> None:
    with connected() as (left, right):
        sge, wr, bad = ffi.new("struct ibv_sge *"), ffi.new("struct ibv_send_wr *"), ffi.new("struct ibv_send_wr **")
        data = ffi.new("char[]", raw)
        sge.addr, sge.length = int(ffi.cast("uintptr_t", data)), len(raw)
        wr.sg_list, wr.num_sge, wr.opcode = sge, 1, lib.IBV_WR_SEND
        wr.send_flags = lib.IBV_SEND_INLINE  # and unsignaled, past the engine
        assert lib.ibv_post_send(left._link.qp._handle, wr, bad) == 0
        with pytest.raises(pvl.PeerProtocolError, match="without a header that this protocol knows"):
            right.recv(timeout=5)


def test_what_a_message_may_have_is_what_was_said() -> None:
    """Header and alignment are on top of ``max_message_size``."""
    for size in (1, 15, 16, 17, 4096, 16384, 16385):
        with connected({"max_message_size": size}) as (left, right):
            assert left.info.max_send_size == right.info.max_message_size == size
            region = left.register(bytearray(b"r" * size))
            for data in (b"d" * size, region):
                left.send(data, timeout=5)
            assert [bytes(right.recv(timeout=5)) for _ in range(2)] == [b"d" * size, b"r" * size]
            with pytest.raises(ValueError, match="longer than the peer receives"):
                left.send(bytes(size + 1))


def test_a_forked_child_and_a_killed_one_leave_the_counts_alone() -> None:
    with connected({"recv_depth": 1}) as (left, right):
        left.send(b"1")
        if (child := os.fork()) == 0:
            try:
                left.send(b"2", timeout=1)
            except pvl.ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert right.recv(timeout=5) == b"1"
        left.send(b"2", timeout=5)
        assert right.recv(timeout=5) == b"2"


def test_ctrl_c_ends_the_wait_for_credit() -> None:
    code = """
        import os, signal, threading
        import pyverbs_lite as pvl
        with pvl.listen("127.0.0.1", 0, recv_depth=1) as listener:
            got = []
            thread = threading.Thread(target=lambda: got.append(listener.accept(10))); thread.start()
            left = pvl.connect("127.0.0.1", listener.port); thread.join()
            left.send(b"1")
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                left.send(b"2")
            except KeyboardInterrupt:
                print(bytes(got[0].recv(timeout=5)))
                left.send(b"3", timeout=5)
                print(bytes(got[0].recv(timeout=5)))
            left.close(); got[0].close()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'1'\nb'3'\n", "")
