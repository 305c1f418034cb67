"""Operations that are not waited for at once, batches, and lists by the thousand."""

from __future__ import annotations

import os
import queue
import random
import subprocess
import sys
import textwrap
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support import connected, in_thread

import pyverbs_lite as pvl
from pyverbs_lite._connection.inbox import Inbox

pytestmark = pytest.mark.rdma

SIZE = 300_000


@pytest.fixture
def far() -> bytearray:
    return bytearray(SIZE)


@pytest.fixture
def pair(far: bytearray):
    with connected({"buffers": {"far": far, "word": bytearray(8)}}, {"send_depth": 24}) as (left, right):
        yield left, right


def pieces(count: int, seed: int, most: int = 900) -> tuple[list[int], list[int], list[int]]:
    """Return disjoint pieces in a random order, with other places here than there."""
    chosen = random.Random(seed)
    step = SIZE // count
    lengths = [chosen.randrange(0, min(most, step)) for _ in range(count)]
    here, there = list(range(count)), list(range(count))
    chosen.shuffle(here)
    chosen.shuffle(there)
    return [i * step for i in here], [i * step for i in there], lengths


class TestWork:
    def test_started_operations_end_and_give_their_results(self, pair, far):
        left, right = pair
        region = left.register(bytearray(b"abcdef" * 2000))
        remote, word = left.remote["far"], left.remote["word"]
        writes = [left.start_write(remote[i * 100 :], region[i : i + 70]) for i in range(20)]
        assert [work.result(10) for work in writes] == [None] * 20
        assert all(work.done() for work in writes)
        assert bytes(far[1900:1970]) == (b"abcdef" * 2000)[19:89]
        assert left.start_fetch_add(word, 41).result(10) == 0
        assert left.start_compare_swap(word, 41, 7).result(10) == 41
        assert left.start_read(remote[1900:1903]).result(10) == b"bcd"
        assert left.start_read(remote[:9000]).result(10) == bytes(far[:9000])
        target = bytearray(5000)
        assert left.start_read(remote[1900:1970], target).result(10) == 70
        assert target[:3] == b"bcd"
        message = left.start_send(b"m" * 9000, imm=0x89ABCDEF)
        assert right.recv(timeout=10).imm == 0x89ABCDEF
        assert message.exception(10) is None
        assert left._engine.in_flight == 0

    def test_more_starts_than_the_queue_holds(self, pair, far):
        left, _ = pair
        region = left.register(bytearray(range(256)) * 20)
        remote = left.remote["far"]
        works = [left.start_write(remote[i * 16 :], region[i : i + 16], timeout=10) for i in range(300)]
        for work in reversed(works):
            work.wait(10)
        assert all(far[i * 16 : i * 16 + 16] == region.view[i : i + 16] for i in range(300))

    def test_a_full_queue_says_so_before_the_driver_does(self, pair, far):
        left, right = pair
        right._link.qp.to_reset()  # answers nothing any more
        region = left.register(bytearray(64))
        works = []
        with pytest.raises(pvl.QueueFullError, match="send_depth"):
            for _ in range(1000):
                works.append(left.start_write(left.remote["far"], region[:8], timeout=0.05))
        assert len(works) == 24
        assert not works[0].done()
        with pytest.raises(pvl.WaitTimeout):
            works[0].wait(0.05)
        with pytest.raises(pvl.BusyError):
            region.close()
        left.close()
        assert all(isinstance(work.exception(1), pvl.ClosedError) for work in works)

    def test_a_work_holds_its_memory_and_lets_go(self, pair):
        left, _ = pair
        region = left.register(bytearray(100))
        work = left.start_write(left.remote["far"], region)
        del work
        left.start_write(left.remote["far"], region).wait(10)
        region.close()

    def test_callbacks_come_without_anybody_waiting(self, pair):
        left, _ = pair
        region, called, seen = left.register(bytearray(4000)), threading.Event(), []

        def call(work):
            seen.append((work, threading.current_thread()))
            called.set()

        work = left.start_write(left.remote["far"], region)
        work.add_done_callback(call)
        assert called.wait(10)
        assert seen[0][0] is work
        assert work.done()
        work.add_done_callback(call)  # at once, and here
        assert seen[1] == (work, threading.current_thread())

    def test_a_failing_callback_is_logged_and_does_no_harm(self, pair, caplog):
        left, _ = pair
        work = left.start_write(left.remote["far"], b"12345678")
        work.wait(10)
        work.add_done_callback(lambda work: 1 / 0)
        assert "ZeroDivisionError" in caplog.text
        left.write(left.remote["far"], b"still here", timeout=10)

    def test_many_threads_start_and_wait(self, pair, far):
        left, _ = pair
        remote = left.remote["far"]

        def move(k: int) -> None:
            for i in range(60):
                place = (k * 60 + i) * 40
                left.start_write(remote[place:], bytes([k + 1]) * 40, timeout=10).wait(10)

        with ThreadPoolExecutor(5) as pool:
            list(pool.map(move, range(5)))
        assert all(far[k * 2400 : (k + 1) * 2400] == bytes([k + 1]) * 2400 for k in range(5))


class TestLists:
    @pytest.mark.parametrize("kind", [list, lambda v: array("Q", v), lambda v: np.array(v, dtype=np.int64)])
    def test_write_many(self, pair, far, kind):
        left, _ = pair
        data = random.Random(3).randbytes(SIZE)
        region = left.register(bytearray(data))
        offsets, places, lengths = pieces(300, 11)
        left.write_many(left.remote["far"], region, kind(offsets), kind(places), kind(lengths), timeout=30)
        expected = bytearray(SIZE)
        for here, there, length in zip(offsets, places, lengths, strict=True):
            expected[there : there + length] = data[here : here + length]
        assert far == expected
        assert left._engine.in_flight == 0

    def test_read_many_into_plain_memory(self, pair, far):
        left, _ = pair
        far[:] = random.Random(5).randbytes(SIZE)
        offsets, places, lengths = pieces(200, 13)
        target = bytearray(SIZE)
        left.read_many(left.remote["far"], target, offsets, places, lengths, timeout=30)
        for here, there, length in zip(offsets, places, lengths, strict=True):
            assert target[here : here + length] == far[there : there + length]

    def test_twenty_thousand_at_once(self, pair, far):
        left, _ = pair
        region = left.register(bytearray(random.Random(7).randbytes(SIZE)))
        order = np.random.default_rng(1).permutation(20_000).astype(np.uint64)
        offsets, lengths = order * 15, np.full(20_000, 15, dtype=np.uint64)
        work = left.start_write_many(left.remote["far"], region, offsets, offsets, lengths)
        work.wait(60)
        assert (work.posted, work.count) == (20_000, 20_000)
        assert far == region.view

    def test_neighbours_travel_as_one(self, pair, far):
        left, _ = pair
        region = left.register(bytearray(b"x" * 6400))
        offsets = list(range(0, 6400, 64))
        work = left.start_write_many(left.remote["far"], region, offsets, offsets, [64] * 100)
        work.wait(10)
        assert work._op.c.posted == 1
        assert far[:6400] == b"x" * 6400

    def test_long_entries_are_cut(self, pair, far):
        left, _ = pair
        left._max_piece = 1000
        data = random.Random(9).randbytes(SIZE)
        region = left.register(bytearray(data))
        left.write_many(left.remote["far"], region, [0, 150_001], [5, 200_000], [140_000, 9_999], timeout=30)
        assert far[5:140_005] == data[:140_000]
        assert far[200_000:209_999] == data[150_001:160_000]
        left.start_write(left.remote["far"], region).wait(30)
        assert far == data

    @pytest.mark.parametrize(
        ("offsets", "places", "lengths", "entry"),
        [
            ([0, 90], [0, 0], [10, 11], 1),
            ([0], [SIZE - 3], [4], 0),
            ([2**64 - 1], [0], [2], 0),
            ([0], [0], [2**63], 0),
        ],
    )
    def test_an_entry_outside_is_refused_before_anything_moves(self, pair, far, offsets, places, lengths, entry):
        left, _ = pair
        region = left.register(bytearray(b"y" * 100))
        with pytest.raises(ValueError, match=f"entry {entry} of write_many reaches outside"):
            left.write_many(left.remote["far"], region, offsets, places, lengths)
        assert far == bytes(SIZE)
        left.write(left.remote["far"], b"usable", timeout=10)

    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            (np.zeros(3, dtype=np.int32), TypeError),
            (np.zeros((3, 1), dtype=np.int64), TypeError),
            (np.zeros(6, dtype=np.int64)[::2], TypeError),
            (np.zeros(3), TypeError),
            ([0, 1], ValueError),
            ([0, 1, -1], ValueError),
            ([0, 1, 2.5], TypeError),
        ],
    )
    def test_arrays_of_the_wrong_kind(self, pair, bad, error):
        left, _ = pair
        with pytest.raises(error):
            left.write_many(left.remote["far"], bytearray(10), bad, [0, 1, 2], [1, 1, 1])

    def test_nothing_to_do(self, pair):
        left, _ = pair
        left.write_many(left.remote["far"], bytearray(10), [], [], [], timeout=5)

    def test_a_list_that_fails_half_way_says_where(self, pair, far):
        left, right = pair
        victim = right.register(bytearray(1000), name="victim")
        while "victim" not in left.remote:
            pass
        region = left.register(bytearray(b"z" * 1000))
        good, gone = left.remote["far"], left.remote["victim"]
        victim.close()
        with left.batch() as batch:
            for i in range(10):
                batch.write(good[i * 50 :], region[i : i + 30])
            batch.write(gone[10:20], region[:10])
            batch.write(good[5000:], region[:10])
        with pytest.raises(pvl.RemoteAccessError) as caught:
            batch.work.wait(10)
        assert caught.value.failed_index == 10
        assert far[450:480] == b"z" * 30
        with pytest.raises(pvl.ClosedError):
            left.write(good, b"later", timeout=5)
        assert left._engine.in_flight == 0
        region.close()


def test_a_loop_through_the_arrays_of_a_list_is_collected():
    """Up to Python 3.13 the garbage collector crashes on one with a memoryview and what cffi makes of it."""
    program = """
        import gc
        import numpy as np
        from support import connected

        class Row(np.ndarray):
            pass

        class Other:
            pass

        with connected({"buffers": {"far": bytearray(1000)}}) as (left, _):
            remote, region = left.remote["far"], left.register(bytearray(1000))
            gc.disable()
            for turn in range(20):
                row = np.full(1, 8, np.uint64).view(Row)
                work = left.start_write_many(remote, region, row, row, row)
                work.wait(10)
                row.work, other = work, Other()
                other.works, other.loop = [work], other
                work.other = other
                del row, work, other
                gc.collect()
        print("collected")
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    tests = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=tests)
    assert (done.returncode, done.stdout, done.stderr) == (0, "collected\n", "")


def test_a_callback_that_comes_as_the_thread_for_callbacks_leaves_is_called(pair, monkeypatch):
    left, right = pair
    looked, added, called = threading.Event(), threading.Event(), queue.SimpleQueue()
    due = Inbox.due.fget

    def slowly(inbox):
        found = due(inbox)
        if not found and not looked.is_set() and threading.current_thread() is not threading.main_thread():
            looked.set()
            added.wait(0.3)  # not for ever, for the other has to wait for this
        return found

    monkeypatch.setattr(Inbox, "due", property(slowly))
    works = [left.start_recv(), left.start_recv()]
    works[0].add_done_callback(called.put)
    right.send(b"first")
    assert called.get(timeout=10) is works[0]
    assert looked.wait(10)
    works[1].add_done_callback(called.put)
    added.set()
    right.send(b"second")
    assert called.get(timeout=10) is works[1]
    assert works[1].result() == b"second"


def test_a_signal_handler_may_end_the_work_whose_callback_is_being_added(pair, far):
    left, _ = pair
    work = left.start_read(left.remote["far"][:10])
    work.wait(10)
    called = []

    class Struck(list):
        def append(self, call):
            super().append(call)
            work.wait(10)  # as a handler would, that came just now

    work._callbacks = Struck()
    adding = in_thread(work.add_done_callback, called.append)
    adding(10)
    assert called == [work]


class TestBatch:
    def test_writes_and_reads_behind_one_doorbell(self, pair, far):
        left, _ = pair
        far[1000:1100] = b"q" * 100
        region = left.register(bytearray(b"w" * 500 + bytes(500)))
        with left.batch() as batch:
            batch.write(left.remote["far"][:30], region[:30])
            batch.read(left.remote["far"][1000:1100], region[700:])
            batch.write(left.remote["far"][30:], region[30:300])
            with pytest.raises(pvl.StateError, match="not started"):
                batch.work.done()
        batch.work.wait(10)
        assert far[:300] == b"w" * 300
        assert region.view[700:800] == b"q" * 100
        with pytest.raises(pvl.StateError):
            batch.write(left.remote["far"], region)

    def test_an_exception_in_the_block_starts_nothing(self, pair, far):
        left, _ = pair
        region = left.register(bytearray(b"w" * 500))
        with pytest.raises(KeyError), left.batch() as batch:
            batch.write(left.remote["far"], region)
            raise KeyError
        with pytest.raises(pvl.StateError):
            batch.work.wait()
        left.read(left.remote["far"][:1], timeout=10)
        assert far == bytes(SIZE)

    def test_what_a_batch_refuses(self, pair):
        left, _ = pair
        region = left.register(bytearray(500))
        with left.batch() as batch:
            with pytest.raises(TypeError, match="registered"):
                batch.write(left.remote["far"], b"plain")
            with pytest.raises(ValueError, match="fit"):
                batch.write(left.remote["far"][:10], region)
        assert batch.work.result(5) is None
