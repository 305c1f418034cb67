"""Operations that are one call of C: what becomes of those that take long, fail, are struck, or come all at once."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from support import connected, in_thread

import pyverbs_lite
import pyverbs_lite as pvl
from pyverbs_lite._connection.engine import Engine

pytestmark = pytest.mark.rdma

PACKAGE = str(Path(pyverbs_lite.__file__).parent)
PATIENT = {"ack_timeout_exp": 23, "retry_cnt": 7}


class Struck(Exception):
    pass


class Strikes:
    """Exceptions out of a signal handler, one after another, wherever the library is just then.

    Not elsewhere: in a callback of the garbage collector's an exception ends, and in the test it says nothing.
    """

    def __init__(self) -> None:
        self.count = 0
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(random.uniform(0.0005, 0.004)):
            signal.pthread_kill(self._main, signal.SIGUSR1)

    def _strike(self, _: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_filename.startswith(PACKAGE) and not self._stop.is_set():
            self.count += 1
            raise Struck

    def __enter__(self) -> Strikes:
        self._before = signal.signal(signal.SIGUSR1, self._strike)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._before)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class TestSlow:
    @pytest.mark.parametrize("operation", ["write", "read", "send", "write a slice", "read a slice"])
    def test_a_timeout_leaves_the_region_in_use(self, operation):
        with connected({"buffers": {"data": bytearray(512)}}, PATIENT) as (left, right):
            remote = left.remote["data"]
            right._link.qp.to_reset()
            region = left.register(bytearray(512))
            calls = {
                "write": lambda: left.write(remote, region, timeout=0.05),
                "read": lambda: left.read(remote, region, timeout=0.05),
                "send": lambda: left.send(region[:100], timeout=0.05),
                "write a slice": lambda: left.write(remote, region[:], timeout=0.05),
                "read a slice": lambda: left.read(remote, region[:], timeout=0.05),
            }
            with pytest.raises(pvl.WaitTimeout, match="still in flight and may complete later"):
                calls[operation]()
            assert left._engine.in_flight == 1
            assert region._in_flight == 1
            with pytest.raises(pvl.BusyError, match="in flight"):
                region.close()
            gone, region = weakref.ref(region), None
            calls.clear()
            gc.collect()
            assert gone() is not None
            left.close()
            assert gone() is None or gone().closed

    def test_a_pool_is_closed_while_a_thread_has_not_yet_noticed_the_end(self, monkeypatch):
        going, closed, go_on = threading.Event(), threading.Event(), Engine._go_on

        def late(*args):
            going.set()
            assert closed.wait(10)
            go_on(*args)

        monkeypatch.setattr(Engine, "_go_on", late)
        with connected({"buffers": {"data": bytearray(512)}}, PATIENT) as (left, right):
            remote, part = left.remote["data"], left.pool().alloc(512)
            right._link.qp.to_reset()
            writing = in_thread(left.write, remote, part)
            assert going.wait(10)
            left.close(timeout=0.1)
            closed.set()
            with pytest.raises(pvl.ClosedError):
                writing(10)
            assert part.closed

    def test_what_timed_out_completes_later_and_lets_go(self):
        with connected({"buffers": {"data": bytearray(512)}}) as (left, _):
            remote, region, late = left.remote["data"], left.register(bytearray(512)), 0
            for number in range(2000):
                try:
                    left.write(remote, region[:] if number % 2 else region, timeout=0)
                except pvl.WaitTimeout:  # noqa: PERF203
                    late += 1
            left.write(remote, region)
            left.write(remote, region[:])
            until(lambda: left._engine.look() or not left._engine.in_flight)
            assert not left._engine._live
            assert not region._in_flight
            assert not region._holders
            assert len(left._engine._pool) <= 2  # those that were late are gone, not kept
            region.close()

    def test_a_failure_is_told_to_its_caller_and_its_cause_to_the_next(self):
        with connected({"buffers": {"data": bytearray(512)}}) as (left, _):
            remote, region = left.remote["data"], left.register(bytearray(512))
            forged = pvl.RemoteBuffer(remote.addr, remote.rkey ^ 0x5500, 512)
            with pytest.raises(pvl.RemoteAccessError, match="write"):
                left.write(forged, region)
            with pytest.raises(pvl.ClosedError, match="this connection is over, because an earlier request"):
                left.write(remote, region)
            assert not left._engine._live
            assert not region._in_flight
            region.close()

    def test_a_closed_region_is_refused_and_nothing_posted(self):
        with connected({"buffers": {"data": bytearray(512)}}) as (left, _):
            remote, region = left.remote["data"], left.register(bytearray(512))
            part = region[:64]
            region.close()
            for call in (
                lambda: left.write(remote, part),
                lambda: left.read(remote[:64], part),
                lambda: left.send(part),
            ):
                with pytest.raises(pvl.ClosedError):
                    call()
            assert left._engine.in_flight == 0
            left.write(remote, b"fine")

    def test_what_the_short_way_is_not_for_goes_the_long_one_which_says_why(self):
        with connected({"buffers": {"data": bytearray(512)}}) as (left, right):
            remote, fixed = left.remote["data"], left.register(b"fixed" * 20, access=pvl.AccessFlags(0))
            theirs = right.register(bytearray(64))
            for call in (
                lambda: left.write(remote, theirs[:]),
                lambda: left.read(remote[:64], theirs[:]),
                lambda: left.send(theirs[:]),
            ):
                with pytest.raises(ValueError, match="was not registered with this connection"):
                    call()
            with pytest.raises(BufferError, match="registered without LOCAL_WRITE"):
                left.read(remote[:64], fixed[:])
            with pytest.raises(ValueError, match="65 bytes do not fit into buffer 'data'"):
                left.write(remote[:64], fixed[:65])
            with pytest.raises(ValueError, match="has 64 bytes, which do not fit into a buffer of 63"):
                left.read(remote[:64], left.register(bytearray(64))[:63])
            with pytest.raises(ValueError, match="do not fit"):
                left.write(remote[:4], b"short")
            long = left.register(bytearray(1 << 20))
            for message in (long[:], bytes(1 << 20)):
                with pytest.raises(ValueError, match="longer than the peer receives"):
                    left.send(message)
            readable = pvl.RemoteBuffer.of(theirs, access=pvl.AccessFlags.REMOTE_READ)
            with pytest.raises(pvl.StateError, match="only REMOTE_READ"):
                left.write(readable, fixed[:1])
            for timeout, error in ((-1, ValueError), ("1", TypeError), (True, TypeError)):
                for call in (left.send, lambda data, timeout: left.write(remote, data, timeout=timeout)):
                    with pytest.raises(error, match="timeout must"):
                        call(b"x", timeout=timeout)
            assert left.stats.writes == left.stats.reads == left.stats.sends == 0
            assert left._engine.in_flight == 0
            left.send(b"")
            left.send(bytearray(b"two"))
            left.write(remote, b"")
            left.write(remote, bytearray(b"three"), timeout=5)
            left.send(fixed[:5], timeout=5)
            assert [bytes(right.recv(timeout=5)) for _ in range(3)] == [b"", b"two", b"fixed"]
            left.send(b"there")
            right.send(right.recv(timeout=5))
            assert left.recv(timeout=5) == b"there"
            left.write(remote[:100], fixed)
            whole = left.register(bytearray(101))
            assert left.read(remote[:100], whole) == 100
            assert bytes(whole.view) == b"fixed" * 20 + b"\0"
            left.send(whole)
            assert right.recv(timeout=5) == bytes(whole.view)
            left.write(remote, b"three")
            for call in (lambda: left.write(remote[:64], fixed), lambda: left.write(remote, theirs)):
                with pytest.raises(ValueError, match="do not fit|not registered with"):
                    call()
            into = left.register(bytearray(8))
            assert left.read(remote[:5], into[2:], timeout=5) == 5
            assert bytes(into.view) == b"\0\0three\0"

    def test_an_operation_that_broke_off_is_not_used_again_before_it_has_ended(self):
        with connected({"buffers": {"data": bytearray(512)}}, PATIENT) as (left, right):
            remote, region = left.remote["data"], left.register(bytearray(512))
            engine, first = left._engine, left._engine.quick
            right._link.qp.to_reset()
            for _ in range(2):
                with pytest.raises(pvl.WaitTimeout):
                    left.write(remote, region[:64], timeout=0.02)
            assert engine.quick is not first
            assert engine.in_flight == len(engine._live) == region._in_flight == 2
            assert all(op.regions == (region,) for op in engine._live)
            left.close()
            assert not engine._live

    def test_a_region_is_used_under_its_new_keys(self):
        target = bytearray(64)
        with connected({"buffers": {"data": target}}) as (left, _):
            region, other = left.register(bytearray(b"a" * 64)), bytearray(b"b" * 64)
            left.write(left.remote["data"], region)
            assert bytes(target) == b"a" * 64
            try:
                region.rereg(buffer=other)
            except pvl.UnsupportedError:  # rxe has no such verb in some kernels
                return
            left.write(left.remote["data"], region)
            assert bytes(target) == b"b" * 64


class TestOthers:
    """One call enters what others have in flight; they are let go as if they had looked themselves."""

    def test_what_nobody_waits_for_is_let_go(self):
        with connected({"buffers": {"data": bytearray(512)}}) as (left, right):
            remote, region, other = left.remote["data"], left.register(bytearray(64)), left.register(bytearray(64))
            called = threading.Event()
            left.start_write(remote, region)
            left.start_write(remote, region).add_done_callback(lambda _: called.set())
            left.write(remote, other)  # later than those, on the same queue
            assert left._engine.in_flight == 0
            region.close()
            assert called.wait(5)
            right.send(b"x")
            region = left.register(bytearray(64))
            left.start_write(remote, region)
            until(lambda: left._engine._c.in_flight == 0 or left.recv(timeout=1))
            left.write(remote, b"y")
            region.close()

    def test_a_list_that_is_complete_at_once_is_let_go_by_its_wait(self):
        with connected({"buffers": {"data": bytearray(512)}}) as (left, _):
            remote = left.remote["data"]
            for _ in range(20):
                region = left.register(bytearray(512))
                left.write_many(remote, region, [0, 100], [7, 300], [50, 60])
                region.close()
                region = left.register(bytearray(512))
                work = left.start_write_many(remote, region, [0, 100], [7, 300], [50, 60])
                until(work.done)
                region.close()


class TestStruck:
    @pytest.mark.parametrize(("length", "imm", "count"), [(4, None, 2000), (5000, None, 1000), (4, 7, 1000)])
    def test_no_message_is_lost_and_none_comes_twice(self, length, imm, count):
        with connected() as (left, right):
            sending = in_thread(lambda: [left.send(number.to_bytes(length, "big"), imm=imm) for number in range(count)])
            got: list[pvl.Message] = []
            with Strikes() as strikes:
                while len(got) < count:
                    try:
                        while len(got) < count:
                            got.append(right.recv(timeout=10))
                    except Struck:  # noqa: PERF203
                        pass
            sending(20)
            assert strikes.count > 5
            numbers = [int.from_bytes(message, "big") for message in got]
            if sys.version_info >= (3, 11):  # before, an interrupt may come between any two steps of the interpreter
                assert numbers == list(range(count))
            assert numbers == sorted(set(numbers))
            assert {(len(message), message.imm) for message in got} == {(length, imm)}

    @pytest.mark.parametrize("length", [4, 5000])
    @pytest.mark.parametrize("times", [1, 3])
    def test_a_message_with_an_immediate_survives_interrupts_while_it_is_kept(self, monkeypatch, times, length):
        strikes, data = [Struck] * times, bytes(length)

        def struck(code):
            if strikes:
                raise strikes.pop()
            return pvl.WCOpcode(code)

        struck.RECV = pvl.WCOpcode.RECV
        with connected() as (left, right):
            left.send(data, imm=5)
            monkeypatch.setattr("pyverbs_lite._connection.inbox.WCOpcode", struck)
            while strikes:
                with pytest.raises(Struck):
                    right.recv(timeout=10)
                assert right._engine.inbox.waiting == 1
            left.send(b"after")
            assert [(bytes(message), message.imm) for message in (right.recv(timeout=10), right.recv(timeout=10))] == [
                (data, 5),
                (b"after", None),
            ]

    def test_operations_end_once_and_leave_nothing(self):
        with connected({"buffers": {"data": bytearray(512)}}, {"send_depth": 2}) as (left, _):
            remote, region = left.remote["data"], left.register(bytearray(512))
            calls = (
                lambda: left.write(remote, region),
                lambda: left.write(remote, b"short"),
                lambda: left.read(remote, region),
                lambda: left.write(remote, region, timeout=5.0),
                lambda: left.write(remote, region[:]),
                lambda: left.read(remote, region[:]),
                lambda: left.write(remote, region[:], timeout=5.0),
                lambda: left.write(remote, bytearray(b"short")),
            )
            end = time.monotonic() + 3
            with Strikes() as strikes:
                while strikes.count < 200 and time.monotonic() < end:
                    with contextlib.suppress(Struck):
                        random.choice(calls)()
            assert strikes.count > 20
            until(lambda: left._engine.look() or not left._engine.in_flight)
            left.write(remote, region[:])
            assert left._engine.failure is None
            assert not left._engine.quick.busy
            assert left._engine._c.free_count == 2
            assert not left._engine._live
            assert not region._in_flight
            assert not region._holders
            region.close()


class TestThreads:
    @pytest.mark.parametrize("how", ["whole", "slice"])
    def test_reused_operations_are_never_two_callers(self, how):
        """Every thread checks that what it has written is there when its call returns, and nobody else's doing."""
        threads, turns = 6, 150
        target = bytearray(64 * threads)
        with connected({"buffers": {"data": target}}) as (left, _):
            remote, start = left.remote["data"], threading.Barrier(threads)

            def work(mine: int) -> None:
                memory = bytearray(64)
                region = left.register(memory)
                part = region if how == "whole" else region[:]
                place = remote[64 * mine : 64 * mine + 64]
                start.wait(20)
                for turn in range(turns):
                    memory[:] = bytes([mine, turn]) * 32
                    left.write(place, part, timeout=20 if turn % 2 else None)
                    memory[:] = bytes(64)
                    left.read(place, part, timeout=20)
                    assert memory == bytes([mine, turn]) * 32
                region.close()  # nothing of it is in flight

            for wait in [in_thread(work, mine) for mine in range(threads)]:
                wait(60)
            assert not left._engine._live
            assert len(left._engine._idle) <= threads

    def test_messages_go_to_one_receiver_each(self):
        count = 600
        with connected() as (left, right):
            got: list[int] = []
            big = bytes(6000)

            def receive() -> None:
                while (message := right.recv(timeout=20))[:4] != b"stop":
                    assert len(message) in (4, 4 + len(big))
                    got.append(int.from_bytes(message[:4], "big"))

            waiting = [in_thread(receive) for _ in range(4)]
            for number in range(count):
                left.send(number.to_bytes(4, "big") + (big if number % 3 == 0 else b""))
            for _ in waiting:
                left.send(b"stop")
            for wait in waiting:
                wait(20)
            assert sorted(got) == list(range(count))


class TestMessages:
    def test_boxes_grow_with_the_messages_and_are_used_again(self):
        with connected() as (left, right):
            boxes, data = right._engine.inbox.boxes, bytes(range(251)) * 17
            for lengths, room in (((0, 1, 255, 256), 256), ((257, 256, 4096, 4097, 1), 4096)):
                for length in lengths:
                    left.send(data[:length])
                    assert right.recv() == data[:length]
                    assert [box.c.room for box in boxes if box] == [room]
            assert len(boxes) == 4

    def test_who_asks_comes_before_who_waits(self):
        with connected() as (left, right):
            waiting = in_thread(right.recv, timeout=20)
            until(lambda: right._engine._c.polling)
            asked = right.start_recv()
            for number in range(2):
                left.send(b"%d" % number)
            assert (asked.result(20), waiting(20)) == (b"0", b"1")
            left.send(b"2")
            assert right.recv() == b"2"
            assert right._engine._c.reserved == 0  # the short way is open again

    def test_what_a_message_says(self):
        with connected({"buffers": {"data": bytearray(8192)}}) as (left, right):
            left.send(b"plain")
            left.send(b"with", imm=7)
            left.write(left.remote["data"], bytes(5000), imm=0xFFFFFFFF)
            left.send(bytes(5000), imm=0)
            left.send(b"")
            plain, with_imm, notice, long, empty = (right.recv(timeout=5) for _ in range(5))
        assert (plain, plain.imm, plain.byte_len, plain.opcode) == (b"plain", None, 5, pvl.WCOpcode.RECV)
        assert (with_imm, with_imm.imm, with_imm.byte_len) == (b"with", 7, 4)
        assert (notice, notice.imm, notice.byte_len) == (b"", 0xFFFFFFFF, 5000)
        assert notice.opcode == pvl.WCOpcode.RECV_RDMA_WITH_IMM
        assert (long, long.imm, long.byte_len) == (bytes(5000), 0, 5000)
        assert (empty, empty.imm, empty.byte_len) == (b"", None, 0)

    def test_a_buffer_that_is_too_short_leaves_the_message_where_it_is(self):
        with connected() as (left, right):
            for message in (b"longer", b"next"):
                left.send(message)
            for _ in range(2):
                with pytest.raises(ValueError, match="has 6 bytes and the buffer only 5"):
                    right.recv_into(bytearray(5), timeout=5)
            target = bytearray(6)
            assert right.recv_into(target, timeout=5) == 6
            assert target == b"longer"
            assert right.recv(timeout=5) == b"next"
            with pytest.raises(pvl.WaitTimeout):
                right.recv(timeout=0)
