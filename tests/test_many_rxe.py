"""Many pieces by one call: what the short way for registered memory notices, and lists that are prepared."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from array import array

import numpy as np
import pytest
from support import connected, in_thread
from test_short_way_rxe import Strikes, Struck, until

import pyverbs_lite as pvl
from pyverbs_lite._base.args import Deadline

pytestmark = pytest.mark.rdma

PATIENT = {"ack_timeout_exp": 23, "retry_cnt": 7}
SIZE = 30_000
WORDS = {"list": list, "array": lambda v: array("Q", v), "numpy": lambda v: np.array(v, dtype=np.int64)}


def pieces(count: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Return disjoint pieces in a random order, with other places here than there."""
    chosen, step = random.Random(seed), SIZE // count
    here, there = list(range(count)), list(range(count))
    chosen.shuffle(here)
    chosen.shuffle(there)
    return [i * step for i in here], [i * step for i in there], [chosen.randrange(step) for _ in range(count)]


def moved(data: bytes, rows: tuple[list[int], list[int], list[int]]) -> bytes:
    """Return what is there once the pieces were written into zeros."""
    target = bytearray(SIZE)
    for here, there, length in zip(*rows, strict=True):
        target[there : there + length] = data[here : here + length]
    return bytes(target)


def arrays(*rows: list[int]) -> list[array]:
    return [array("Q", row) for row in rows]


class TestShortWay:
    @pytest.mark.parametrize("kind", WORDS)
    def test_a_part_of_a_region_is_what_the_offsets_are_in(self, kind):
        target, data = bytearray(SIZE), random.Random(2).randbytes(SIZE)
        with connected({"buffers": {"far": target}}, {"send_depth": 6}) as (left, _):
            region, rows = left.register(bytearray(b"?" * 77 + data)), pieces(250, 3)
            assert left.write_many(left.remote["far"], region[77:], *map(WORDS[kind], rows), timeout=30) is None
            assert bytes(target) == moved(data, rows)
            back = left.register(bytearray(SIZE + 11))
            left.read_many(left.remote["far"], back[11:], *map(WORDS[kind], (rows[1], rows[1], rows[2])))
            assert bytes(back.view[11:]) == moved(data, rows)
            assert left._engine.in_flight == 0
            assert not left._engine._live
            assert not region._in_flight
            assert all(op.keep is None for op in left._engine._pool)
            assert len(left._engine._pool) == 1

    def test_the_arrays_are_let_go(self):
        with connected({"buffers": {"far": bytearray(SIZE)}}) as (left, _):
            region, row = left.register(bytearray(100)), array("Q", [1, 50])
            left.write_many(left.remote["far"], region, row, row, row)
            row.append(3)  # refused while somebody looks at it
            with pytest.raises(ValueError, match="entry 2 of write_many reaches outside: {'offsets': 99,"):
                left.write_many(left.remote["far"], region, array("Q", [1, 50, 99]), row, row)
            row.append(4)

    def test_what_is_wrong_is_said_as_by_the_long_way(self):
        with connected({"buffers": {"far": bytearray(SIZE)}}) as (left, right):
            remote, region, row = left.remote["far"], left.register(bytearray(100)), array("Q", [1])
            fixed = left.register(bytes(100))
            foreign = right.register(bytearray(100))
            for data, args, error, match in (
                (region, (row, row, array("Q", [1, 2])), ValueError, "as many offsets as lengths"),
                (region, (row, row, array("I", [1])), TypeError, "lengths must be one contiguous row of 64-bit"),
                (region, (row, row, array("d", [1])), TypeError, "lengths must be one contiguous row of 64-bit"),
                (foreign, (row, row, row), ValueError, "not registered with this connection"),
                (region[5:50], (row, row, array("Q", [45])), ValueError, "with 45 bytes here and 30000 in"),
            ):
                with pytest.raises(error, match=match):
                    left.write_many(remote, data, *args)
            with pytest.raises(ValueError, match="timeout"):
                left.write_many(remote, region, row, row, row, timeout=-1)
            with pytest.raises(BufferError, match="without LOCAL_WRITE"):
                left.read_many(remote, fixed, row, row, row)
            left.write_many(remote, fixed, row, row, row)
            with pytest.raises(pvl.StateError, match="write_many needs REMOTE_WRITE"):
                left.write_many(pvl.RemoteBuffer(1, 2, 3, access=pvl.AccessFlags.REMOTE_READ), region, row, row, row)
            region.close()
            with pytest.raises(pvl.ClosedError):
                left.write_many(remote, region, row, row, row)
            assert left._engine.in_flight == 0
            left._read_depth = left._engine._c.max_reads = 0
            with pytest.raises(pvl.StateError, match="read_many would never complete"):
                left.read_many(remote, left.register(bytearray(9)), row, row, row)
            left.close()
            with pytest.raises(pvl.ClosedError):
                left.write_many(remote, fixed, row, row, row)

    def test_memory_of_a_pool_and_memory_that_is_not_registered(self):
        target = bytearray(SIZE)
        with connected({"buffers": {"far": target}}) as (left, _), left.pool() as pool:
            part = pool.alloc(64)
            part.view[:] = b"p" * 64
            left.write_many(left.remote["far"], part, [0, 40], [5, 100], [3, 24])
            left.write_many(left.remote["far"], b"q" * 64, [0, 40], [200, 300], [3, 24])
            assert target[:8] == bytes(5) + b"ppp"
            assert target[300:325] == b"q" * 24 + b"\0"
            part.close()

    def test_a_timeout_leaves_everything_held(self):
        with connected({"buffers": {"far": bytearray(SIZE)}}, {**PATIENT, "send_depth": 8}) as (left, right):
            region, rows = left.register(bytearray(SIZE)), arrays(*pieces(100, 4))
            right._link.qp.to_reset()
            with pytest.raises(pvl.WaitTimeout, match="write_many did not complete within 0.05 s; it is still in") as e:
                left.write_many(left.remote["far"], region, *rows, timeout=0.05)
            assert e.value.failed_index is None
            assert left._engine.in_flight == 4  # half of the queue
            with pytest.raises(BufferError):
                rows[0].append(1)  # C goes on with it
            with pytest.raises(pvl.BusyError, match="in flight"):
                region.close()
            left.close()
            assert region.closed
            assert not left._engine._live
            del e  # with the frames of the call
            rows[0].append(1)

    def test_a_failure_says_where(self):
        with connected({"buffers": {"far": bytearray(SIZE)}}, {"send_depth": 20}) as (left, right):
            right.register(bytearray(100), name="short")
            until(lambda: "short" in left.remote)
            short = left.remote["short"]
            forged = pvl.RemoteBuffer(short.addr, short.rkey, 1 << 20)
            region, rows = left.register(bytearray(100)), arrays([0, 50, 0, 0], [0, 9, 1 << 18, 3], [3, 4, 5, 6])
            with pytest.raises(pvl.RemoteAccessError, match="write_many") as caught:
                left.write_many(forged, region, *rows)
            assert caught.value.failed_index == 2
            del caught  # with the frames of the call
            rows[0].append(1)
            with pytest.raises(pvl.ClosedError, match="this connection is over, because"):
                left.write_many(forged, region, *arrays([0], [0], [1]))
            region.close()

    @pytest.mark.parametrize("prepared", [False, True])
    def test_a_failure_that_only_c_has_seen_is_the_reason(self, prepared):
        with connected({"buffers": {"far": bytearray(SIZE)}}) as (left, _):
            region, row = left.register(bytearray(100)), array("Q", [1, 3])
            run = left.prepare_write_many(left.remote["far"], region, row, row, row).run
            left._engine._c.cause = pvl.WCStatus.REM_ACCESS_ERR  # of a request that another thread waits for
            with pytest.raises(pvl.ClosedError, match="this connection is over, because an earlier request.* REM_ACC"):
                run() if prepared else left.write_many(left.remote["far"], region, row, row, row)

    def test_interrupts(self):
        target = bytearray(SIZE)
        with connected({"buffers": {"far": target}}, {"send_depth": 4}) as (left, _):
            region, rows, remote = left.register(bytearray(SIZE)), pieces(60, 5), left.remote["far"]
            with Strikes() as strikes:
                while strikes.count < 60:
                    with contextlib.suppress(Struck):
                        left.write_many(remote, region, *arrays(*rows))
            until(lambda: left._engine.look() or not left._engine.in_flight)
            region.view[:] = data = random.Random(6).randbytes(SIZE)
            left.write_many(remote, region, *arrays(*rows))
            assert bytes(target) == moved(data, rows)
            assert left._engine._c.free_count == 4
            assert not region._in_flight


class TestPrepared:
    def test_each_run_moves_what_is_there(self):
        target, rows = bytearray(SIZE), pieces(300, 7)
        with connected({"buffers": {"far": target}}, {"send_depth": 16}) as (left, _):
            region, given = left.register(bytearray(SIZE + 9)), arrays(*rows)
            prepared = left.prepare_write_many(left.remote["far"], region[9:], *given)
            for row in given:
                row[:] = array("Q", [2**63]) * 300  # it has its own
                row.append(1)
            for seed in range(3):
                region.view[9:] = data = random.Random(seed).randbytes(SIZE)
                assert prepared.run(None if seed else 30) is None
                assert bytes(target) == moved(data, rows)
            prepared()
            assert (prepared.operation, prepared.count) == ("write_many", 300)
            assert (prepared.part.offset, len(prepared.part)) == (9, SIZE)
            assert repr(prepared).startswith("<prepared write_many of 300 pieces of <30000 bytes at offset 9")
            assert isinstance(prepared, pvl.PreparedMany)
            assert isinstance(prepared, pvl.Prepared)
            back = left.register(bytearray(SIZE))
            reading = left.prepare_read_many(left.remote["far"], back, rows[1], rows[1], rows[2])
            for letter in (b"r", b"s"):
                target[:] = letter * SIZE
                reading.run()
                assert bytes(back.view) == moved(letter * SIZE, (rows[1], rows[1], rows[2]))
            assert left._engine.in_flight == 0
            assert not left._engine._live

    def test_neighbours_travel_as_one_and_long_ones_are_cut(self):
        target = bytearray(SIZE)
        with connected({"buffers": {"far": target}}) as (left, _):
            left._max_piece = 1000
            region = left.register(bytearray(random.Random(8).randbytes(SIZE)))
            before = left.stats.writes
            left.prepare_write_many(left.remote["far"], region, [0, 10, 20], [5, 15, 25], [10, 10, 10]).run()
            assert left.stats.writes == before + 1
            left.prepare_write_many(left.remote["far"], region, [100], [107], [2500]).run(10)
            assert left.stats.writes == before + 4
            assert target[107:2607] == region.view[100:2600]

    def test_nothing_to_do(self):
        with connected({"buffers": {"far": bytearray(8)}}) as (left, _):
            prepared = left.prepare_write_many(left.remote["far"], left.register(bytearray(9)), [], [], [])
            prepared.run()
            assert left.stats.writes == 0

    def test_what_is_refused(self):
        with connected({"buffers": {"far": bytearray(64)}}) as (left, _):
            remote, region, row = left.remote["far"], left.register(bytearray(100)), [1, 2]
            for prepare in (left.prepare_write_many, left.prepare_read_many):
                with pytest.raises(TypeError, match=f"{prepare.__name__} needs registered memory"):
                    prepare(remote, bytearray(8), row, row, row)
                with pytest.raises(ValueError, match="entry 1 of .*_many reaches outside: {'offsets': 99,"):
                    prepare(remote, region, [1, 99], row, row)
                with pytest.raises(ValueError, match="as many offsets as lengths"):
                    prepare(remote, region, row, row, [1])
                with pytest.raises(TypeError, match="remote_offsets must be"):
                    prepare(remote, region, row, array("H", [1, 2]), row)
                with pytest.raises(TypeError, match="needs a RemoteBuffer"):
                    prepare(object(), region, row, row, row)
            with pytest.raises(BufferError, match="without LOCAL_WRITE"):
                left.prepare_read_many(remote, left.register(bytes(9)), row, row, row)
            gc.collect()
            assert len(left._engine._idle) == len(left._engine._pool) <= 1
            left.close()
            with pytest.raises(pvl.ClosedError):
                left.prepare_write_many(remote, region, row, row, row)

    def test_an_operation_that_is_dropped_leaves_its_place_to_the_next(self):
        with connected({"buffers": {"far": bytearray(64)}}) as (left, _):
            remote, region, row = left.remote["far"], left.register(bytearray(64)), [1, 3]
            for _ in range(5):
                left.prepare_write_many(remote, region, row, row, row).run()
                left.write_many(remote, region, row, row, row)
                left.prepare_write(remote, region).run()
                left.write(remote, region)
            gc.collect()
            assert len(left._engine._pool) == 1
            assert all(op.keep is None for op in left._engine._pool)
            region.close()

    def test_what_has_changed_since(self):
        with connected() as (left, right):
            target = right.register(bytearray(64), name="lent")
            until(lambda: "lent" in left.remote)
            region, row = left.register(bytearray(64)), [1, 30]
            prepared = left.prepare_write_many(left.remote["lent"], region, row, row, row)
            reading = left.prepare_read_many(left.remote["lent"], region, row, row, row)
            prepared.run()
            other = right.register(bytearray(8), name="other")
            until(lambda: "other" in left.remote)
            prepared.run()  # news, but not of this buffer
            target.close()
            until(lambda: "lent" not in left.remote)
            for run in (prepared.run, reading.run) * 2:
                with pytest.raises(pvl.StaleBufferError, match="withdrawn 'lent'"):
                    run()
            again = left.prepare_write_many(left.remote["other"], region, [0], [0], [8])
            region.close()
            with pytest.raises(pvl.ClosedError, match="is closed"):
                again.run()
            other.close()
            assert left._engine.in_flight == 0
            assert not left._engine._live

    def test_a_region_that_is_being_closed_meanwhile_and_stays(self):
        target = bytearray(64)
        with connected({"buffers": {"far": target}}) as (left, _):
            region = left.register(bytearray(b"k" * 64))
            prepared = left.prepare_write_many(left.remote["far"], region[8:], [0, 20], [3, 30], [4, 5])
            pvl.ffi.lib.pvl_memory_close(region._c, 1)  # as a thread does that finds it in use, and then gives way
            prepared.run(10)
            left.write_many(left.remote["far"], region, [0], [50], [9])
            pvl.ffi.lib.pvl_memory_close(region._c, 0)
            assert bytes(target) == bytes(3) + b"kkkk" + bytes(23) + b"k" * 5 + bytes(15) + b"k" * 9 + bytes(5)

    def test_memory_of_a_pool(self):
        target = bytearray(64)
        with connected({"buffers": {"far": target}}) as (left, _), left.pool() as pool:
            part = pool.alloc(64)
            part.view[:] = b"p" * 64
            prepared = left.prepare_write_many(left.remote["far"], part, [0, 30], [1, 32], [2, 2])
            prepared.run()
            prepared.run(5)
            assert target[:4] == b"\0pp\0"
            assert not part.mr._holders
            part.close()
            with pytest.raises(pvl.ClosedError, match="given back"):
                prepared.run()

    def test_a_failure_says_where_and_ends_the_connection(self):
        with connected({"buffers": {"far": bytearray(SIZE)}}, {"send_depth": 20}) as (left, _):
            remote, region = left.remote["far"], left.register(bytearray(100))
            forged = pvl.RemoteBuffer(remote.addr, remote.rkey, 1 << 30)
            prepared = left.prepare_write_many(forged, region, [0, 50, 0, 0], [0, 9, 1 << 29, 3], [3, 4, 5, 6])
            with pytest.raises(pvl.RemoteAccessError, match="write_many") as caught:
                prepared.run()
            assert caught.value.failed_index == 2
            with pytest.raises(pvl.ClosedError, match="this connection is over, because an earlier") as caught:
                prepared.run()
            assert caught.value.failed_index is None
            region.close()

    def test_a_timeout_leaves_everything_held_and_the_next_run_waits(self):
        with connected({"buffers": {"far": bytearray(SIZE)}}, {**PATIENT, "send_depth": 8}) as (left, right):
            region = left.register(bytearray(SIZE))
            prepared = left.prepare_write_many(left.remote["far"], region, *pieces(100, 9))
            right._link.qp.to_reset()
            for _ in range(2):
                with pytest.raises(pvl.WaitTimeout, match="write_many did not .* still in flight"):
                    prepared.run(0.05)
                assert left._engine.in_flight == 4  # the second run has posted nothing
            del prepared
            gc.collect()
            with pytest.raises(pvl.BusyError, match="in flight"):
                region.close()
            left.close()
            assert region.closed
            assert not left._engine._live
            assert not left._engine._pool

    def test_what_timed_out_completes_later_and_it_runs_on(self):
        target, rows = bytearray(SIZE), pieces(50, 10)
        with connected({"buffers": {"far": target}}, {"send_depth": 8}) as (left, _):
            region, late = left.register(bytearray(SIZE)), 0
            prepared = left.prepare_write_many(left.remote["far"], region, *rows)
            for _ in range(100):
                try:
                    prepared.run(0)
                except pvl.WaitTimeout:  # noqa: PERF203
                    late += 1
            assert late
            region.view[:] = data = random.Random(11).randbytes(SIZE)
            prepared.run()
            prepared.run()
            assert bytes(target) == moved(data, rows)
            assert left._engine.in_flight == 0
            del prepared
            assert not left._engine._live
            region.close()

    def test_a_second_thread_is_refused(self):
        with connected({"buffers": {"far": bytearray(SIZE)}}, PATIENT) as (left, right):
            prepared = left.prepare_write_many(left.remote["far"], left.register(bytearray(SIZE)), *pieces(40, 12))
            right._link.qp.to_reset()
            ended = in_thread(prepared.run)
            until(lambda: left._engine.in_flight)
            for timeout in (None, 0.01):
                with pytest.raises(pvl.BusyError, match="another thread"):
                    prepared.run(timeout)
            left.close()
            with pytest.raises(pvl.VerbsError):
                ended(10)

    def test_threads_with_their_own_beside_others(self):
        """Lists of several threads share one queue, and each thread finds its own written."""
        targets = {f"far{i}": bytearray(SIZE) for i in range(4)}
        with connected({"buffers": targets}, {"send_depth": 12}) as (left, _):
            errors: list[BaseException] = []

            def work(i: int) -> None:
                region, rows = left.register(bytearray(SIZE)), pieces(40, i)
                remote, given = left.remote[f"far{i}"], arrays(*rows)
                prepared = left.prepare_write_many(remote, region, *given)
                for turn in range(12):
                    data = random.Random(100 * i + turn).randbytes(SIZE)
                    region.view[:] = data
                    prepared.run(30) if turn % 2 else left.write_many(remote, region, *given, timeout=30)
                    assert bytes(targets[f"far{i}"]) == moved(data, rows)
                region.close()

            def kept(i: int) -> None:
                try:
                    work(i)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=kept, args=(i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not errors
            assert left._engine._c.free_count == 12

    def test_interrupts(self):
        target, rows = bytearray(SIZE), pieces(60, 13)
        with connected({"buffers": {"far": target}}, {"send_depth": 4}) as (left, _):
            region = left.register(bytearray(SIZE))
            prepared = left.prepare_write_many(left.remote["far"], region, *rows)
            with Strikes() as strikes:
                while strikes.count < 60:
                    with contextlib.suppress(Struck):
                        prepared.run()
            prepared.run()
            region.view[:] = data = random.Random(14).randbytes(SIZE)
            prepared.run()
            assert bytes(target) == moved(data, rows)
            assert left._engine.in_flight == 0
            assert left._engine._c.free_count == 4
            del prepared
            left._engine.look()
            region._holders.clear()  # a strike in the middle of the bookkeeping may leave its number
            region.close()


def test_the_long_way_of_a_prepared_list_keeps_to_a_timeout_of_zero():
    with connected({"buffers": {"far": bytearray(64)}}, PATIENT) as (left, right):
        prepared = left.prepare_write_many(left.remote["far"], left.register(bytearray(64)), [0], [0], [64])
        right._link.qp.to_reset()
        waits = in_thread(prepared._take_long_way, Deadline(0))
        with pytest.raises(pvl.WaitTimeout):
            waits(5)
