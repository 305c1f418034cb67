"""Messages that are lent where they arrived, and messages that are asked for and not waited for."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
import time
import warnings
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
from support import connected, in_thread

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma


@pytest.fixture
def pair():
    with connected({"recv_depth": 4, "buffers": {"data": bytearray(100)}}, {"rnr_retry": 0}) as (left, right):
        yield left, right


class TestLent:
    def test_a_message_is_seen_where_it_arrived(self, pair):
        left, right = pair
        left.send(b"lent to you", imm=7)
        with right.recv(lend=True, timeout=5) as message:
            assert (message.view, len(message), bytes(message)) == (b"lent to you", 11, b"lent to you")
            assert (message.imm, message.opcode, message.byte_len) == (7, pvl.WCOpcode.RECV, 11)
            assert message.view.readonly
            assert (message.view.format, message.view.ndim) == ("B", 1)
            ring = right._engine._receives.c
            start = np.frombuffer(message.view, "u1").ctypes.data
            assert ring.addr <= start < ring.addr + ring.slots * ring.stride
            assert start % 16 == 0
            assert right._engine._c.lent == 1
            assert not message.released
        assert message.released
        assert right._engine._c.lent == 0
        with pytest.raises(pvl.StateError, match="released"):
            _ = message.view
        with pytest.raises(pvl.StateError, match="released"):
            bytes(message)
        message.release()
        assert repr(message) == "<LentMessage of 11 bytes, released>"

    def test_empty_messages_and_notices(self, pair):
        left, right = pair
        left.send(b"")
        left.write(left.remote["data"], b"12345", imm=9)
        for imm, byte_len in ((None, 0), (9, 5)):
            with right.recv(lend=True, timeout=5) as message:
                assert (message.view, len(message), message.imm, message.byte_len) == (b"", 0, imm, byte_len)
        assert right._engine._c.lent == 0

    def test_several_at_once_in_any_order(self, pair):
        left, right = pair
        for round in range(20):
            for i in range(3):
                left.send(b"%d-%d" % (round, i), timeout=5)
            lent = [right.recv(lend=True, timeout=5) for _ in range(3)]
            assert [bytes(message) for message in lent] == [b"%d-%d" % (round, i) for i in range(3)]
            for message in lent[:: 1 if round % 2 else -1]:
                message.release()

    def test_what_is_lent_leaves_the_ring_alive(self, pair):
        left, right = pair
        for i in range(4):
            left.send(b"%d" % i, timeout=5)
        lent = [right.recv(lend=True, timeout=5) for _ in range(3)]
        with pytest.raises(pvl.StateError, match="all 3 messages that can be lent at a time"):
            right.recv(lend=True, timeout=5)
        assert right.recv(timeout=5) == b"3"  # it stayed the next one
        for i in range(30):  # and with all that is lent messages still flow, one at a time
            left.send(b"flows %d" % i, timeout=5)
            assert right.recv(timeout=5) == b"flows %d" % i
        assert [bytes(message) for message in lent] == [b"0", b"1", b"2"]
        for message in lent:
            message.release()
        for i in range(4):  # what it can rely on is there again
            left.send(b"%d" % i, timeout=5)

    @pytest.mark.parametrize("depth", [2, 3, 5, 16])
    def test_it_flows_at_every_depth(self, depth):
        with connected({"recv_depth": depth}, {"rnr_retry": 0}) as (left, right):
            lent = []
            for i in range(depth - 1):
                left.send(b"%d" % i, timeout=5)
                lent.append(right.recv(lend=True, timeout=5))
            for i in range(40):
                left.send(b"%d" % i, timeout=5)
                assert right.recv(timeout=5) == b"%d" % i
            for message in lent:
                message.release()

    def test_a_ring_of_one_lends_nothing(self):
        with connected({"recv_depth": 1}) as (left, right):
            left.send(b"only")
            with pytest.raises(pvl.StateError, match="recv_depth of 1.*raise recv_depth"):
                right.recv(lend=True, timeout=5)
            assert right.recv(timeout=5) == b"only"

    def test_nobody_sees_a_message_change(self, pair):
        """What is left over of a view keeps the slot from the peer, and gives it back in the end."""
        left, right = pair
        left.send(b"abcdefgh")
        with right.recv(lend=True, timeout=5) as message:
            part, array = message.view[2:4], np.frombuffer(message.view, "<u4")
        assert message.released
        assert right._engine._c.lent == 1
        for i in range(20):
            left.send(b"other %d" % i, timeout=5)
            right.recv(timeout=5)
        assert (part, array.tobytes()) == (b"cd", b"abcdefgh")
        del array
        assert right._engine._c.lent == 1
        del part
        assert right._engine._c.lent == 0

    def test_a_dropped_one_is_given_back_with_a_warning(self, pair):
        left, right = pair
        left.send(b"dropped")
        message = right.recv(lend=True, timeout=5)
        with pytest.warns(ResourceWarning, match="LentMessage of 7 bytes.*never released"):
            del message
            gc.collect()
        assert right._engine._c.lent == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            left.send(b"released")
            right.recv(lend=True, timeout=5).release()

    def test_a_closed_connection_is_an_error_and_no_crash(self):
        with connected({"recv_depth": 4}) as (left, right):
            for i in range(2):
                left.send(b"message %d" % i)
            messages = [right.recv(lend=True, timeout=5) for _ in range(2)]
            view = messages[0].view
            right.close()
            gc.collect()
            assert view == b"message 0"  # the memory stays for as long as somebody looks
            for message in messages:
                with pytest.raises(pvl.ClosedError):
                    _ = message.view
            messages[0].release()
            with pytest.raises(ValueError, match="released"):
                bytes(view)
        with connected() as (left, right):  # in the memory of those before, if that were free
            left.send(b"x" * 1000)
            right.recv(timeout=5)
            messages[1].release()

    def test_a_peer_that_left(self, pair):
        left, right = pair
        left.send(b"last words")
        left.close()
        with right.recv(lend=True, timeout=5) as message:
            assert message.view == b"last words"
        with pytest.raises(pvl.PeerClosedError):
            right.recv(lend=True, timeout=5)

    def test_timeouts(self, pair):
        with pytest.raises(pvl.WaitTimeout, match="no message"):
            pair[1].recv(lend=True, timeout=0.01)
        assert pair[1]._engine._c.lent == 0

    def test_no_copies_of_the_object(self, pair):
        left, right = pair
        left.send(b"x")
        with right.recv(lend=True, timeout=5) as message, pytest.raises(TypeError, match=r"bytes\(message\)"):
            pickle.dumps(message)

    def test_a_forked_child_gives_nothing_back(self, pair):
        left, right = pair
        left.send(b"parent's")
        message = right.recv(lend=True, timeout=5)
        if (child := os.fork()) == 0:
            message.release()
            os._exit(right._engine._c.lent)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        message.release()
        assert right._engine._c.lent == 0

    def test_in_an_event_loop(self):
        async def main() -> None:
            async with pvl.aio.listen("127.0.0.1", 0, recv_depth=2) as listener:
                accepting = asyncio.create_task(listener.accept())
                async with pvl.aio.connect("127.0.0.1", listener.port) as left, await accepting as right:
                    for i in range(10):
                        await left.send(b"%d" % i, timeout=5)
                        with await right.recv(lend=True, timeout=5) as message:
                            assert message.view == b"%d" % i
                    waiting = asyncio.create_task(right.recv(lend=True))
                    await asyncio.sleep(0)
                    waiting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await waiting
                    await left.send(b"kept")
                    assert await right.recv(timeout=5) == b"kept"

        asyncio.run(main())


class TestAskedFor:
    def test_several_are_served_in_order(self, pair):
        left, right = pair
        works = [right.start_recv() for _ in range(3)]
        assert not any(work.done() for work in works)
        assert repr(works[0]) == "<Work: recv, waiting>"
        for i in range(3):
            left.send(b"%d" % i, imm=i)
        assert [bytes(work.result(5)) for work in reversed(works)] == [b"2", b"1", b"0"]
        assert [work.result().imm for work in works] == [0, 1, 2]
        assert all(work.done() for work in works)
        assert works[0].result() is works[0].result()
        assert works[0].exception() is None
        assert (works[0].posted, works[0].count) == (1, 1)

    def test_what_is_there_already_is_taken(self, pair):
        left, right = pair
        left.send(b"there")
        work, other = right.start_recv(), right.start_recv()
        work.wait(5)
        with pytest.raises(pvl.WaitTimeout):
            other.wait(0)
        del work
        assert other.result(5) == b"there"  # of the work that was dropped

    def test_recv_takes_what_works_leave(self, pair):
        left, right = pair
        first = right.start_recv()
        waiting = in_thread(right.recv, timeout=10)
        second = right.start_recv()
        for i in range(3):
            left.send(b"%d" % i)
        assert (first.result(5), second.result(5), waiting()) == (b"0", b"1", b"2")
        with pytest.raises(pvl.WaitTimeout):
            right.recv(timeout=0)

    def test_timeouts_leave_it_asked_for(self, pair):
        left, right = pair
        work = right.start_recv()
        with pytest.raises(pvl.WaitTimeout, match="still asked for"):
            work.result(0.01)
        with pytest.raises(pvl.WaitTimeout):
            work.exception(0)
        left.send(b"late")
        assert work.result(5) == b"late"

    def test_a_cancelled_one_loses_nothing(self, pair):
        left, right = pair
        works = [right.start_recv() for _ in range(3)]
        assert works[1].cancel()
        assert works[1].cancel()
        assert works[1].done()
        assert repr(works[1]) == "<Work: recv, cancelled>"
        with pytest.raises(CancelledError):
            works[1].result(5)
        for i in range(3):
            left.send(b"%d" % i)
        assert (works[0].result(5), works[2].result(5), right.recv(timeout=5)) == (b"0", b"1", b"2")
        assert not works[0].cancel()
        assert works[0].result() == b"0"
        assert not left.start_send(b"x").cancel()

    def test_a_dropped_one_loses_nothing(self, pair):
        left, right = pair
        unserved, served, other = (right.start_recv() for _ in range(3))
        del unserved
        for i in range(3):
            left.send(b"%d" % i)
        other.wait(5)
        del served
        assert right.recv(timeout=5) == b"0"  # older than what is in the ring
        assert other.result() == b"1"
        del other
        assert right.recv(timeout=5) == b"2"

    def test_messages_that_nobody_used_come_first_and_in_order(self, pair):
        left, right = pair
        for i in range(4):
            left.send(b"%d" % i, imm=i)
        works = [right.start_recv() for _ in range(3)]
        works[2].wait(5)
        del works
        target = bytearray(1)
        assert right.recv_into(target, timeout=5) == 1
        with right.recv(lend=True, timeout=5) as lent:
            assert (target, lent.view, lent.imm) == (b"0", b"1", 1)
        assert right._engine._c.lent == 0
        assert [right.start_recv().result(5).imm for _ in range(2)] == [2, 3]

    def test_callbacks_come_without_anybody_waiting(self, pair):
        left, right = pair
        seen, called = [], threading.Event()

        def call(work: Any) -> None:
            seen.append((bytes(work.result()), threading.current_thread()))
            called.set()

        right.start_recv().add_done_callback(call)  # and nobody keeps it
        left.send(b"called")
        assert called.wait(10)
        assert seen[0][0] == b"called"
        left.send(b"next")
        assert right.recv(timeout=5) == b"next"
        cancelled = right.start_recv()
        cancelled.add_done_callback(lambda work: seen.append(work))
        assert cancelled.cancel()
        assert seen[1] is cancelled

    def test_many_threads_ask(self, pair):
        left, right = pair
        found: list[bytes] = []

        def ask() -> None:
            for _ in range(30):
                found.append(bytes(right.start_recv().result(20)))

        def take() -> None:
            for _ in range(30):
                found.append(bytes(right.recv(timeout=20)))

        calls = [in_thread(call) for call in (ask, ask, ask, take)]
        for i in range(120):
            left.send(b"%d" % i, timeout=20)
        for call in calls:
            call(30)
        assert sorted(map(int, found)) == list(range(120))

    def test_the_end_ends_them(self, pair):
        left, right = pair
        works, called = [right.start_recv() for _ in range(3)], threading.Event()
        works[2].add_done_callback(lambda work: called.set())
        left.send(b"last")
        left.close()
        assert works[0].result(5) == b"last"
        assert isinstance(works[1].exception(5), pvl.PeerClosedError)
        assert called.wait(10)
        with pytest.raises(pvl.PeerClosedError):
            works[2].result(5)
        with pytest.raises(pvl.VerbsError):
            right.start_recv()

    def test_a_close_ends_them(self):
        with connected() as (_, right):
            work, called = right.start_recv(), threading.Event()
            other = right.start_recv()
            other.add_done_callback(lambda work: called.set())
            waiting = in_thread(work.wait)
            while not right._engine._c.polling:
                time.sleep(0.001)
            right.close()
            with pytest.raises(pvl.ClosedError):
                waiting()
            assert called.wait(10)
            assert isinstance(work.exception(0), pvl.ClosedError)
            assert work.done()
