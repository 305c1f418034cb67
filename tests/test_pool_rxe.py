"""Pools of registered memory: what is handed out, what comes back and when, and the limits."""

import asyncio
import errno
import gc
import threading

import pytest
from support import ALL_ACCESS, A, completions, connect_qps, connected, counts, in_thread, make_qp

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma


@pytest.fixture
def pool(pd):
    with pd.pool(max_bytes=16384, chunk_bytes=8192) as made:
        yield made


def test_slices_are_registered_memory_with_a_place_of_their_own(pool):
    one, two = pool.alloc(100), pool.alloc(8000 - 4096)
    assert (len(one), one.length, two.length) == (100, 100, 3904)
    assert one.addr % 128 == 0
    assert two.addr % 4096 == 0
    assert one.lkey == two.lkey == one.mr.lkey
    one.view[:] = b"\x11" * 100
    two.view[:] = b"\x22" * 3904
    assert bytes(one.view) == b"\x11" * 100
    assert bytes(one[10:20].view) == b"\x11" * 10
    assert one[10:20].addr == one.addr + 10
    assert one[10:20][2:5].addr == one.addr + 12
    assert "100 bytes" in repr(one)
    assert pool.stats == pvl.PoolStats(hits=2, misses=0, in_use=128 + 4096, registered=8192, chunks=1)
    assert pool.huge_pages is False


def test_it_grows_by_chunks_up_to_its_limit(pool):
    held = [pool.alloc(4096) for _ in range(4)]
    assert pool.stats == pvl.PoolStats(hits=3, misses=1, in_use=16384, registered=16384, chunks=2)
    with pytest.raises(pvl.VerbsOSError, match=r"no 64 bytes are free of the 16384 \(max_bytes\)") as caught:
        pool.alloc(1)
    assert caught.value.errno == errno.ENOMEM
    address = held.pop(1).addr  # dropped
    assert pool.alloc(4096).addr == address


@pytest.mark.parametrize("end", ["close", "with", "drop"])
def test_a_slice_goes_back_once(pool, end):
    part = pool.alloc(5000)
    address = part.addr
    if end == "with":
        with part:
            assert pool.stats.in_use == 8192
    elif end == "close":
        part.close()
        part.close()
    else:
        del part
    assert pool.stats.in_use == 0
    assert pool.alloc(5000).addr == address


def test_a_slice_that_was_given_back_is_refused(pool):
    part = pool.alloc(100)
    inner = part[5:10]
    part.close()
    assert part.closed
    for use in (lambda: part.addr, lambda: part.lkey, lambda: part.view, lambda: part[1:2], lambda: inner.view):
        with pytest.raises(pvl.ClosedError, match="given back to its pool"):
            use()
    assert "closed" in repr(part)


def test_a_view_or_a_part_keeps_a_dropped_slice(pool):
    view = pool.alloc(8192).view
    view[8191] = 9
    gc.collect()
    assert pool.stats.in_use == 8192
    del view
    part = pool.alloc(8192)[1:2]
    gc.collect()
    assert pool.stats.in_use == 8192
    deeper = part[0:1]
    del part
    assert pool.stats.in_use == 8192
    assert len(deeper.view) == 1
    del deeper
    assert pool.stats.in_use == 0


def test_a_block_is_not_handed_out_again_before_the_requests_on_it_have_ended(context, pd):
    """A receive that is still posted writes into it, whoever has it by then."""
    with pd.pool(max_bytes=8192, chunk_bytes=4096) as pool:
        cq = context.create_cq(16)
        left, right = make_qp(pd, cq), make_qp(pd, cq)
        connect_qps(left, right)
        target = pool.alloc(4096)
        address = target.addr
        right.post_recv(pvl.RecvWR(wr_id=1, sg_list=[target]))
        target.close()
        other = pool.alloc(4096)
        assert other.addr != address
        other.view[:] = b"\x5a" * 4096
        assert pool.stats.in_use == 8192
        with pytest.raises(pvl.VerbsOSError, match="max_bytes"):
            pool.alloc(1)
        left.post_send(pvl.SendWR(wr_id=2, sg_list=[other[:64]]))
        completions(cq, 2)
        assert bytes(other.view) == b"\x5a" * 4096
        assert pool.stats.in_use == 4096
        assert pool.alloc(4096).addr == address
        right.close()
        left.close()


def test_a_dropped_slice_of_a_started_operation_stays_taken():
    with connected({"buffers": {"target": bytearray(8192)}}) as (left, _), left.pool() as pool:
        part = pool.alloc(8192)
        part.view[:] = b"\x37" * 8192
        work = left.start_write(left.remote["target"], part)
        del part
        stirred = pool.alloc(8192)
        stirred.view[:] = b"\x00" * 8192
        work.wait(10)
        assert left.read(left.remote["target"]) == b"\x37" * 8192
        del stirred
        assert pool.stats.in_use == 0


def test_an_interrupt_before_the_request_leaves_no_holder():
    class Struck(Exception):
        pass

    class Holders(set):
        def add(self, number):
            super().add(number)
            raise Struck

    with connected() as (left, right), left._link.pd.pool() as pool:
        part = pool.alloc(100)
        region = part.mr
        region._holders = holders = Holders()
        with pytest.raises(Struck):
            left.send(part)
        assert not holders
        region._holders = region._destroy.holders
        left.send(part)
        assert len(right.recv(timeout=10)) == 100


def test_an_interrupt_costs_the_pool_nothing_but_what_it_was_about(pd, monkeypatch):
    class Struck(Exception):
        pass

    def struck(*_):
        raise Struck

    with pd.pool(max_bytes=65536, chunk_bytes=65536) as pool:
        with monkeypatch.context() as patch:
            patch.setattr("pyverbs_lite.pool.PoolSlice", struck)
            for _ in range(100):
                with pytest.raises(Struck):
                    pool.alloc(4096)
        assert pool.stats.in_use == 0
        slices = [pool.alloc(4096) for _ in range(8)]
        del slices
        with monkeypatch.context() as patch:
            patch.setattr("pyverbs_lite._memory.buddy.Buddy.give_back", struck)
            with pytest.raises(Struck):
                pool.alloc(64)
        assert pool.stats.in_use <= 4096


def test_slices_are_data_and_targets_of_a_connection():
    with connected({"buffers": {"cell": bytearray(5000)}}) as (left, right), left.pool() as pool:
        remote = left.remote["cell"]
        with pool.alloc(5000) as out, pool.alloc(6000) as back:
            out.view[:] = bytes(i % 251 for i in range(5000))
            left.write(remote, out)
            assert left.read(remote, back) == 5000
            assert back.view[:5000] == out.view
            left.send(out[10:20])
            assert bytes(right.recv(timeout=10)) == bytes(out.view[10:20])
            right.send(b"abc")
            assert left.recv_into(back[100:200], timeout=10) == 3
            assert bytes(back.view[100:103]) == b"abc"
        with pytest.raises(pvl.ClosedError):
            left.write(remote, out)


def test_a_pool_of_a_connection_ends_with_it():
    before = counts()
    with connected() as (left, right):
        pools = [left.pool(), left.pool(max_bytes=8192, chunk_bytes=4096, access=ALL_ACCESS)]
        part = pools[1].alloc(10)
        assert part.mr.access == ALL_ACCESS
        pools[0].close()
        with pytest.raises(ValueError, match="not registered with this connection"):
            right.send(part)
        left.close()
        assert pools[1].closed
        assert part.closed
        with pytest.raises(pvl.ClosedError):
            left.pool()
    assert counts() == before


def test_a_pool_of_a_server_s_connection_ends_with_it():
    pools = []

    def handler(conn):
        pools.append(conn.pool())
        conn.send(pools[-1].alloc(3))
        conn.recv(timeout=20)

    with pvl.Server("127.0.0.1", 0, handler) as server:
        server.start()
        with pvl.connect("127.0.0.1", server.port) as conn:
            assert len(conn.recv(timeout=20)) == 3
            before = counts()["mr"]
            conn.send(b"end")
        with pvl.connect("127.0.0.1", server.port) as conn:  # the first is gone by the time that this one is served
            conn.recv(timeout=20)
            assert pools[0].closed
            assert counts()["mr"] == before
            conn.send(b"end")


def test_a_pool_from_an_event_loop():
    async def main():
        async with await pvl.aio.listen("127.0.0.1", 0) as listener:
            left, right = await asyncio.gather(pvl.aio.connect("127.0.0.1", listener.port), listener.accept())
            async with left, right:
                with await left.pool() as pool, pool.alloc(5) as part:
                    part.view[:] = b"hello"
                    await left.send(part)
                assert bytes(await right.recv()) == b"hello"
                assert left.registration_cache.stats.entries == 0

    asyncio.run(main())


def test_a_region_of_the_pool_allows_what_was_asked_for(pd):
    with pd.pool(access=ALL_ACCESS) as pool, pd.pool() as plain:
        assert pool.alloc(8).mr.access == ALL_ACCESS
        assert plain.alloc(8).mr.access == A.LOCAL_WRITE


def test_threads_share_a_pool(pd):
    with pd.pool(max_bytes=1 << 20, chunk_bytes=65536) as pool:
        overlaps = []

        def work(mark):
            for i in range(150):
                with pool.alloc(64 + 37 * i % 3000) as part:
                    part.view[:] = bytes([mark]) * len(part)
                    if bytes(part.view) != bytes([mark]) * len(part):
                        overlaps.append(mark)

        for result in [in_thread(work, mark) for mark in range(1, 6)]:
            result(60)
        assert not overlaps
        assert pool.stats.in_use == 0
        assert threading.active_count() < 20


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_bytes": 100}, ValueError, "max_bytes must be 4096 to"),
        ({"chunk_bytes": 5000}, ValueError, "a power of two, not 5000"),
        ({"max_bytes": 8192, "chunk_bytes": 16384}, ValueError, "chunk_bytes must be 4096 to 8192"),
        ({"max_bytes": 8192.0}, TypeError, "max_bytes must be an integer"),
        ({"access": A.REMOTE_WRITE}, ValueError, "LOCAL_WRITE"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(pd, options, error, match):
    before = counts()["mr"]
    with pytest.raises(error, match=match):
        pd.pool(**options)
    assert counts()["mr"] == before


@pytest.mark.parametrize(
    ("nbytes", "error"), [(0, ValueError), (8193, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_a_slice_has_1_to_chunk_bytes(pool, nbytes, error):
    with pytest.raises(error, match="nbytes must be"):
        pool.alloc(nbytes)


def test_closing_the_pool_deregisters_and_ends_its_slices(pd):
    before = counts()["mr"]
    pool = pd.pool(chunk_bytes=4096)
    part = pool.alloc(10)
    assert counts()["mr"] == before + 1
    pool.close()
    pool.close()
    assert counts()["mr"] == before
    assert part.closed
    with pytest.raises(pvl.ClosedError):
        part.view  # noqa: B018
    with pytest.raises(pvl.ClosedError):
        pool.alloc(1)
    assert "closed" in repr(pool)
    part.close()


def test_a_pool_in_use_refuses_to_close_and_stays_usable(context, pd):
    cq = context.create_cq(16)
    qp = make_qp(pd, cq)
    qp.to_init()
    with pd.pool(chunk_bytes=4096) as pool:
        qp.post_recv(pvl.RecvWR(wr_id=1, sg_list=[pool.alloc(64)]))
        with pytest.raises(pvl.BusyError, match="in flight"):
            pool.close()
        pool.alloc(8).view[0] = 1
        qp.close()


def test_a_dropped_pool_is_closed_with_a_warning(pd):
    before = counts()["mr"]
    with pytest.warns(ResourceWarning, match="Pool of rxe0 was never closed"):
        pd.pool()
        gc.collect()
    assert counts()["mr"] == before


def test_the_domain_closes_its_pools(context):
    pd = context.alloc_pd()
    pool = pd.pool()
    part = pool.alloc(1)
    pd.close()
    assert pool.closed
    assert part.closed


@pytest.mark.parametrize("huge", [False, True])
def test_memory_of_the_domain_s_own(pd, huge):
    """The guest has no huge pages, and says so."""
    with pd.alloc(5000, huge=huge) as region:
        assert region.length == len(region.view) == 5000
        assert region.huge_pages is False
    with pd.pool(huge=huge) as pool:
        assert pool.huge_pages is False


def test_huge_pages_are_reported_where_they_were_given(pd, monkeypatch):
    from pyverbs_lite import pd as module
    from pyverbs_lite._memory import pages as _pages

    monkeypatch.setattr(module, "map_huge", lambda nbytes: _pages.map_pages(-(-nbytes // 8192) * 8192))
    with pd.alloc(5000, huge=True) as region, pd.alloc(5000) as plain, pd.pool(huge=True) as pool:
        assert (region.length, region.huge_pages, plain.huge_pages, pool.huge_pages) == (5000, True, False, True)
