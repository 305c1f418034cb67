"""Prepared operations: what is checked once, what each run still notices, and what becomes of those that take long."""

from __future__ import annotations

import gc
import threading

import pytest
from support import connected, in_thread
from test_short_way_rxe import Strikes, Struck, until

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma

PATIENT = {"ack_timeout_exp": 23, "retry_cnt": 7}


class TestRuns:
    def test_a_write_moves_what_is_there_when_it_runs(self):
        target = bytearray(300)
        with connected({"buffers": {"data": target}}) as (left, _):
            region = left.register(bytearray(b"a" * 100))
            prepared = left.prepare_write(left.remote["data"][7:107], region[20:60])
            assert prepared.run() is None
            assert bytes(target) == bytes(7) + b"a" * 40 + bytes(253)
            region.view[20:60] = b"b" * 40
            prepared(timeout=5)
            assert bytes(target[7:47]) == b"b" * 40
            assert repr(prepared).startswith("<prepared write of <40 bytes at offset 20")

    def test_an_immediate_goes_with_each_run(self):
        with connected({"buffers": {"data": bytearray(300)}}) as (left, right):
            prepared = left.prepare_write(left.remote["data"], left.register(bytearray(33)), imm=0x01020304)
            for _ in range(40):  # more than there are receives
                prepared.run(5)
                message = right.recv(timeout=5)
                assert (message.imm, message.byte_len) == (0x01020304, 33)

    def test_a_read_takes_what_is_there_when_it_runs(self):
        source = bytearray(b"c" * 50)
        with connected({"buffers": {"data": source}}) as (left, _):
            region = left.register(bytearray(90))
            prepared = left.prepare_read(left.remote["data"], region[10:80])
            assert len(prepared.part) == 50
            prepared.run()
            source[:] = b"d" * 50
            prepared.run()
            assert bytes(region.view) == bytes(10) + b"d" * 50 + bytes(30)

    def test_a_message_is_sent_each_time_also_where_it_has_to_wait_for_a_receive(self):
        with connected({"recv_depth": 2}, {"recv_depth": 2}) as (left, right):
            region = left.register(bytearray(b"hello"))
            prepared, told = left.prepare_send(region[1:4]), left.prepare_send(region, imm=9)
            with pytest.raises(pvl.WaitTimeout, match="has not taken the messages before it"):
                for _ in range(20):
                    prepared.run(0.05)
            while (message := right.recv(timeout=5)).imm is None:
                assert bytes(message) == b"ell"
                if right._engine.inbox.waiting == 0:
                    told.run(5)
            assert bytes(message) == b"hello"

    def test_an_operation_that_is_dropped_leaves_its_place_to_the_next(self):
        with connected({"buffers": {"data": bytearray(64)}}) as (left, _):
            remote, region = left.remote["data"], left.register(bytearray(64))
            for _ in range(5):
                left.prepare_write(remote, region).run()
                left.write(remote, region)
            gc.collect()
            assert len(left._engine._pool) <= 2
            assert not left._engine._live
            region.close()

    def test_memory_of_a_pool(self):
        target = bytearray(64)
        with connected({"buffers": {"data": target}}) as (left, _), left.pool() as pool:
            part = pool.alloc(64)
            part.view[:] = b"p" * 64
            prepared = left.prepare_write(left.remote["data"], part)
            prepared.run()
            prepared.run(5)
            assert bytes(target) == b"p" * 64
            assert not part.mr._holders
            part.close()
            with pytest.raises(pvl.ClosedError, match="given back"):
                prepared.run()


class TestRefused:
    @pytest.mark.parametrize("data", [b"bytes", bytearray(8), None], ids=["bytes", "bytearray", "None"])
    def test_what_is_not_registered(self, data):
        with connected({"buffers": {"data": bytearray(64)}}) as (left, _):
            for prepare in (
                lambda: left.prepare_write(left.remote["data"], data),
                lambda: left.prepare_read(left.remote["data"], data),
                lambda: left.prepare_send(data),
            ):
                with pytest.raises(TypeError, match="needs registered memory"):
                    prepare()

    def test_what_does_not_fit(self):
        with connected({"buffers": {"data": bytearray(64)}}) as (left, _):
            remote, region = left.remote["data"], left.register(bytearray(100_000))
            with pytest.raises(ValueError, match="do not fit"):
                left.prepare_write(remote, region[:65])
            with pytest.raises(ValueError, match="do not fit"):
                left.prepare_read(remote, region[:63])
            with pytest.raises(ValueError, match="longer than the peer receives"):
                left.prepare_send(region)
            with pytest.raises(ValueError, match="imm"):
                left.prepare_write(remote, region[:64], imm=1 << 32)
            left._max_piece = 50
            with pytest.raises(ValueError, match="one request moves 50 bytes"):
                left.prepare_write(remote, region[:51])
            assert not left._engine._live

    def test_memory_that_was_closed_since(self):
        with connected({"buffers": {"data": bytearray(64)}}) as (left, _):
            remote, region = left.remote["data"], left.register(bytearray(64))
            all_of_them = [
                left.prepare_write(remote, region),
                left.prepare_read(remote, region),
                left.prepare_send(region),
            ]
            region.close()
            for prepared in all_of_them:
                with pytest.raises(pvl.ClosedError, match="is closed"):
                    prepared.run()
            assert left._engine.in_flight == 0
            assert not left._engine._live
            left.write(remote, b"fine")

    def test_a_buffer_that_the_peer_has_withdrawn(self):
        with connected() as (left, right):
            target = right.register(bytearray(64), name="lent")
            until(lambda: "lent" in left.remote)
            prepared = left.prepare_write(left.remote["lent"], left.register(bytearray(64)))
            prepared.run()
            other = right.register(bytearray(8), name="other")
            until(lambda: "other" in left.remote)
            prepared.run()  # news, but not of this buffer
            target.close()
            until(lambda: "lent" not in left.remote)
            for _ in range(2):
                with pytest.raises(pvl.StaleBufferError, match="withdrawn 'lent'"):
                    prepared.run()
            assert left._engine.in_flight == 0
            left.write(left.remote["other"], b"fine")
            other.close()

    def test_memory_that_was_registered_anew(self):
        target = bytearray(64)
        with connected({"buffers": {"data": target}}) as (left, _):
            region = left.register(bytearray(b"a" * 64))
            prepared = left.prepare_write(left.remote["data"], region[:64])
            prepared.run()
            try:
                region.rereg(buffer=bytearray(b"b" * 64))
            except pvl.UnsupportedError:  # rxe has no such verb in some kernels
                return
            prepared.run()
            assert bytes(target) == b"b" * 64
            region.rereg(buffer=bytearray(63))
            with pytest.raises(ValueError, match="registered anew"):
                prepared.run()
            assert left._engine.in_flight == 0

    def test_a_connection_that_is_closed(self):
        with connected({"buffers": {"data": bytearray(64)}}) as (left, right):
            remote, region = left.remote["data"], left.register(bytearray(64))
            prepared = left.prepare_write(remote, region)
            right.close()
            with pytest.raises(pvl.PeerClosedError):
                left.recv(timeout=10)
            with pytest.raises(pvl.PeerClosedError):
                prepared.run()
            left.close()
            with pytest.raises((pvl.PeerClosedError, pvl.ClosedError)):
                prepared.run(1)
            with pytest.raises((pvl.PeerClosedError, pvl.ClosedError)):
                left.prepare_write(remote, region)

    def test_a_failure_ends_the_connection(self):
        with connected({"buffers": {"data": bytearray(64)}}) as (left, _):
            remote, region = left.remote["data"], left.register(bytearray(64))
            forged = pvl.RemoteBuffer(remote.addr, remote.rkey ^ 0x5500, 64)
            prepared = left.prepare_write(forged, region)
            with pytest.raises(pvl.RemoteAccessError, match="write"):
                prepared.run()
            with pytest.raises(pvl.ClosedError, match="this connection is over, because an earlier request"):
                prepared.run()
            region.close()


class TestSlow:
    def test_a_timeout_leaves_the_region_in_use_and_the_next_run_waits(self):
        with connected({"buffers": {"data": bytearray(64)}}, PATIENT) as (left, right):
            region = left.register(bytearray(64))
            prepared = left.prepare_write(left.remote["data"], region)
            right._link.qp.to_reset()
            for _ in range(2):
                with pytest.raises(pvl.WaitTimeout, match="still in flight and may complete later"):
                    prepared.run(0.05)
                assert left._engine.in_flight == 1  # the second run has posted nothing
            with pytest.raises(pvl.BusyError, match="in flight"):
                region.close()
            del prepared
            gc.collect()
            assert left._engine.in_flight == 1
            assert region._in_flight == 1
            left.close()
            assert region.closed
            assert not left._engine._live
            assert not left._engine._pool

    def test_what_timed_out_completes_later_and_it_runs_on(self):
        target = bytearray(64)
        with connected({"buffers": {"data": target}}) as (left, _):
            region = left.register(bytearray(64))
            prepared, late = left.prepare_write(left.remote["data"], region), 0
            for _ in range(1000):
                try:
                    prepared.run(0)
                except pvl.WaitTimeout:  # noqa: PERF203
                    late += 1
            region.view[:] = b"z" * 64
            prepared.run()
            assert bytes(target) == b"z" * 64
            assert left._engine.in_flight == 0
            assert not region._holders
            del prepared
            assert not left._engine._live
            region.close()

    def test_a_second_thread_is_refused(self):
        with connected({"buffers": {"data": bytearray(64)}}, PATIENT) as (left, right):
            prepared = left.prepare_write(left.remote["data"], left.register(bytearray(64)))
            right._link.qp.to_reset()
            ended = in_thread(prepared.run)
            until(lambda: left._engine.in_flight)
            for timeout in (None, 0.01):
                with pytest.raises(pvl.BusyError, match="another thread"):
                    prepared.run(timeout)
            left.close()
            with pytest.raises(pvl.VerbsError):
                ended(10)

    def test_each_thread_with_its_own(self):
        targets = {f"data{i}": bytearray(64) for i in range(4)}
        with connected({"buffers": targets}) as (left, _):
            region = left.register(bytearray(b"".join(bytes([i + 1]) * 64 for i in range(4))))

            def work(i: int) -> None:
                prepared = left.prepare_write(left.remote[f"data{i}"], region[64 * i : 64 * i + 64])
                for _ in range(200):
                    prepared.run()

            threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert [bytes(targets[f"data{i}"]) for i in range(4)] == [bytes([i + 1]) * 64 for i in range(4)]
            assert not region._in_flight
            assert not region._holders

    def test_interrupts(self):
        target = bytearray(8)
        with connected({"buffers": {"data": target}}) as (left, _):
            region = left.register(bytearray(8))
            prepared, struck, count = left.prepare_write(left.remote["data"], region), 0, 0
            with Strikes():
                while struck < 60:
                    count += 1
                    try:
                        prepared.run()
                    except Struck:
                        struck += 1
            region.view[:] = count.to_bytes(8, "little")
            prepared.run()
            assert int.from_bytes(target, "little") == count
            assert left._engine.in_flight == 0
            left._engine.look()
            assert not left._engine._live
            del prepared
            region._holders.clear()  # a strike in the middle of the bookkeeping may leave its number
            region.close()
