"""The cache of registrations on a device: what moves is always what the buffer holds now."""

import errno
import gc
import os
import resource
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from support import A, completions, connect_qps, connected, counts, in_thread, make_qp

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma

SIZE = 100_000


@pytest.fixture
def cache(pd):
    with pvl.RegistrationCache(pd, max_bytes=1 << 20) as made:
        yield made


@pytest.fixture
def pair():
    with connected({"buffers": {"target": bytearray(SIZE)}}) as (left, right):
        yield left, right


def fill(nbytes, seed):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_the_kernel_sees_one_registration_for_many_uses(pd, cache):
    before, data = counts()["mr"], fill(SIZE, 1)
    for _ in range(5):
        with cache.get(data) as region:
            assert (region.length, region.addr, region.access) == (SIZE, data.ctypes.data, A.LOCAL_WRITE)
            assert region.view == data.data
            assert counts()["mr"] == before + 1
    assert cache.stats == pvl.RegistrationCacheStats(4, 1, 0, 0, 0, 1, SIZE, 0)
    del data, region
    assert counts()["mr"] == before
    assert cache.stats.invalidations == 1
    assert "0 of 1048576 bytes" in repr(cache)


def test_a_region_of_the_cache_is_an_mr_to_a_qp(context, pd, cache):
    cq = context.create_cq(16)
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right)
    out, back = fill(5000, 1), np.zeros(5000, np.uint8)
    source, target = cache.get(out[:3000]), cache.get(back)
    right.post_recv(pvl.RecvWR(wr_id=1, sg_list=[target[100:4000]]))
    with pytest.raises(pvl.BusyError, match="in flight"):
        target.close()
    with pytest.raises(pvl.BusyError, match="in flight"):
        cache.close()
    left.post_send(pvl.SendWR(wr_id=2, sg_list=[source]))
    completions(cq, 2)
    assert (back[100:3100] == out[:3000]).all()
    assert not back[:100].any()
    target.close()
    target.close()
    for use in (lambda: target.view, lambda: right.post_recv(pvl.RecvWR(sg_list=[target]))):
        with pytest.raises(pvl.ClosedError):
            use()
    source.close()
    right.close()
    left.close()


@pytest.mark.filterwarnings("ignore:CachedMR of 4096 bytes was never closed:ResourceWarning")
def test_a_dropped_region_is_held_by_its_request(context, pd, cache):
    cq = context.create_cq(16)
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right)
    right.post_recv(pvl.RecvWR(wr_id=1, sg_list=[cache.get(np.zeros(4096, np.uint8))]))
    gc.collect()
    assert (cache.stats.in_use, cache.stats.entries) == (1, 1)
    others = [np.full(4096, 0x5A, np.uint8) for _ in range(20)]
    left.post_send(pvl.SendWR(wr_id=2, sg_list=[cache.get(np.ones(4096, np.uint8))]))
    completions(cq, 2)
    gc.collect()
    assert all((other == 0x5A).all() for other in others)
    assert (cache.stats.in_use, cache.stats.entries) == (0, 0)
    right.close()
    left.close()


@pytest.mark.parametrize(
    ("access", "match"), [(A.MW_BIND, "shared"), (A.ZERO_BASED, "shared"), (A.REMOTE_WRITE, "LOCAL_WRITE")]
)
def test_access_that_a_shared_region_cannot_have(cache, access, match):
    with pytest.raises(ValueError, match=match):
        cache.get(fill(100, 1), access)


def test_what_cannot_be_registered_is_refused(cache):
    with pytest.raises(BufferError):
        cache.get(b"x" * 100, A.LOCAL_WRITE)
    with pytest.raises(ValueError, match="empty"):
        cache.get(b"")
    with pytest.raises(TypeError):
        cache.get("text")
    with cache.get(fill(10, 1)) as region, pytest.raises(pvl.StateError, match="shared"):
        region.rereg(access=A.LOCAL_WRITE)
    assert cache.stats.in_use == 0


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_the_budget_is_a_number_of_bytes(pd, value, error):
    with pytest.raises(error, match="max_bytes"):
        pvl.RegistrationCache(pd, max_bytes=value)


def test_a_key_that_the_peer_may_know_is_void_after_the_use(cache):
    data = fill(5000, 1)
    region = cache.get(data, A.LOCAL_WRITE | A.REMOTE_READ)
    rkey = region.rkey
    region.close()
    assert (cache.stats.entries, cache.stats.uncached) == (0, 1)
    assert rkey


def test_closing_the_cache_or_its_domain_ends_everything(context):
    pd = context.alloc_pd()
    before, data = counts()["mr"], [fill(5000, i) for i in range(3)]
    caches = [pvl.RegistrationCache(pd) for _ in range(2)]
    for cache in caches:
        for array in data:
            cache.get(array).close()
    assert counts()["mr"] == before + 6
    caches[0].close()
    caches[0].close()
    assert counts()["mr"] == before + 3
    with pytest.raises(pvl.ClosedError):
        caches[0].get(data[0])
    pd.close()
    assert counts()["mr"] == before
    assert caches[1].closed
    del data


def test_a_dropped_cache_is_closed_with_a_warning(pd):
    before, data = counts()["mr"], fill(5000, 1)
    with pytest.warns(ResourceWarning, match="RegistrationCache of rxe0 was never closed"):
        pvl.RegistrationCache(pd).get(data).close()
        gc.collect()
    assert counts()["mr"] == before


# On a connection


def test_writes_and_reads_of_an_array_register_it_once(pair):
    left, _ = pair
    remote, cache = left.remote["target"], left.registration_cache
    data, back = fill(SIZE, 1), np.zeros(SIZE, np.uint8)
    for seed in range(4):
        data[:] = fill(SIZE, seed)
        left.write(remote, data)
        left.read(remote, back)
        assert (back == data).all()
    left.start_write(remote[:50_000], data[SIZE - 50_000 :]).wait(10)
    left.start_read(remote[:50_000], back[7:50_007]).wait(10)
    assert (back[7:50_007] == data[SIZE - 50_000 :]).all()
    left.write_many(remote, data, [0, 60_000], [90_000, 10], [5000, 20])
    assert left.read(remote[90_000:95_000]) == data[:5000].tobytes()
    assert (cache.stats.misses, cache.stats.bytes, cache.stats.in_use) == (2, 2 * SIZE, 0)
    assert cache.stats.hits == 9


def test_a_region_of_its_cache_is_one_of_the_connection(pair):
    left, _ = pair
    data, back = fill(SIZE, 1), np.zeros(SIZE, np.uint8)
    with left.registration_cache.get(data) as region, left.registration_cache.get(back) as target:
        left.write(left.remote["target"], region)
        left.read(left.remote["target"][:100], target[7:107])
        assert (back[7:107] == data[:100]).all()
        with pytest.raises(ValueError, match="not registered with this connection"):
            pair[1].send(region)
    with pytest.raises(pvl.ClosedError):
        left.send(region)


def test_pages_that_were_never_touched_are_not_taken_for_zeros(pair):
    """Fresh memory is one shared page of zeros, which a write replaces: the region must have its own from the start."""
    left, _ = pair
    remote = left.remote["target"]
    data = np.zeros(SIZE, np.uint8)
    data.flags.writeable = False  # so it is registered without LOCAL_WRITE
    left.write(remote, data)
    data.flags.writeable = True
    data[:] = 0x77
    data.flags.writeable = False
    left.write(remote, data)
    assert left.registration_cache.stats.hits == 1
    assert left.read(remote) == b"\x77" * SIZE


def test_an_array_at_the_address_of_a_freed_one_is_registered_anew(pair):
    left, _ = pair
    remote, cache = left.remote["target"], left.registration_cache
    addresses = set()
    for round_ in range(6):
        data = np.full(4 << 20, round_, np.uint8)  # mapped and unmapped by malloc, at the same address mostly
        addresses.add(data.ctypes.data)
        left.write(remote, data[1 << 20 : (1 << 20) + SIZE])
        assert left.read(remote[:5000]) == bytes([round_]) * 5000
        del data
        assert cache.stats.entries == 0
    assert len(addresses) < 6
    assert cache.stats.hits == 0


def test_a_bytearray_can_be_resized_and_is_written_as_it_is_now(pair):
    left, _ = pair
    remote = left.remote["target"]
    data = bytearray(b"a" * 50_000)
    left.write(remote, data)
    data.extend(b"b" * 50_000)
    left.write(remote, data)
    del data[:50_000]
    left.write(remote, data)
    assert left.read(remote) == b"b" * SIZE
    assert (left.registration_cache.stats.entries, left.registration_cache.stats.hits) == (0, 0)


def test_hold_keeps_exporters_too(pair):
    left, _ = pair
    remote, cache = left.remote["target"], left.registration_cache
    assert cache.hold is False
    cache.hold = True
    data = bytearray(b"a" * SIZE)
    for mark in b"xyz":
        data[:] = bytes([mark]) * SIZE
        left.write(remote, data)
        assert left.read(remote[:10]) == bytes([mark]) * 10
    assert cache.stats.hits == 2
    with pytest.raises(BufferError):
        data.extend(b"more")
    assert cache.discard(data) == 1
    data.extend(b"more")


def test_what_is_held_stays_in_place_also_after_the_region_was_given_back(pd):
    with pvl.RegistrationCache(pd, hold=True) as cache:
        data = bytearray(SIZE)
        for _ in range(2):
            with cache.get(data) as region:
                region.view.release()
            with pytest.raises(BufferError):
                data.extend(b"more")
        assert (cache.stats.hits, cache.stats.misses) == (1, 1)


def test_a_resize_of_an_array_is_refused_while_it_is_cached(pair):
    left, _ = pair
    data = fill(SIZE, 1)
    left.write(left.remote["target"], data)
    with pytest.raises(ValueError, match="resize"):
        data.resize(2 * SIZE, refcheck=False)
    left.registration_cache.discard(data)
    data.resize(2 * SIZE, refcheck=False)


def test_none_if_it_is_turned_off():
    with connected({"buffers": {"target": bytearray(SIZE)}}, {"registration_cache": 0}) as (left, right):
        before, data = counts()["mr"], fill(SIZE, 1)
        left.write(left.remote["target"], data)
        assert counts()["mr"] == before
        assert left.registration_cache is None
        assert right.registration_cache.max_bytes == 64 << 20
        assert right.registration_cache.stats.entries == 0


@pytest.mark.parametrize("value", [-1, 1.5, None])
def test_a_budget_that_is_none_is_refused(value):
    with pytest.raises((ValueError, TypeError), match="registration_cache"):
        pvl.connect("127.0.0.1", 1, registration_cache=value)


def test_the_budget_holds_with_more_in_flight_than_it_allows():
    with connected({"buffers": {"target": bytearray(SIZE)}}, {"registration_cache": 150_000}) as (left, _):
        remote, cache = left.remote["target"], left.registration_cache
        arrays = [fill(SIZE, seed) for seed in range(6)]
        works = [left.start_write(remote, array) for array in arrays]
        assert cache.stats.bytes <= 150_000
        for work in works:
            work.wait(20)
        assert left.read(remote) == arrays[-1].tobytes()
        assert (cache.stats.bytes, cache.stats.in_use) == (SIZE, 0)


def test_a_timed_out_read_holds_its_array_and_the_next_one_is_right(pair):
    """Field report 11 with the cache: what is in flight is neither freed nor deregistered."""
    left, right = pair
    remote, cache = left.remote["target"], left.registration_cache
    right._link.qp  # noqa: B018 - the peer is this process
    target = np.zeros(SIZE, np.uint8)
    work = left.start_read(remote, target)
    assert cache.stats.in_use in (0, 1)
    address = target.ctypes.data
    del target
    gc.collect()
    others = [np.full(SIZE, 0x5A, np.uint8) for _ in range(4)]
    work.wait(20)
    del work
    gc.collect()
    assert all((other == 0x5A).all() for other in others)
    assert address
    assert cache.stats.in_use == 0


def test_threads_write_arrays_of_their_own_and_a_common_one(pair):
    left, _ = pair
    remote, common = left.remote["target"], fill(20_000, 9)

    def work(index):
        mine = remote[index * 20_000 : (index + 1) * 20_000]
        for i in range(12):
            own = np.full(20_000, index * 16 + i, np.uint8)
            left.write(mine, common)
            left.write(mine, own)
            if left.read(mine) != own.tobytes():
                return False
        return True

    for result in [in_thread(work, index) for index in range(4)]:
        assert result(60)
    assert left.registration_cache.stats.in_use == 0
    assert threading.active_count() < 20


def test_everything_is_deregistered_when_the_connection_is_closed():
    with connected({"buffers": {"target": bytearray(SIZE)}}) as (left, _):
        data = fill(SIZE, 1)
        left.write(left.remote["target"], data)
        before, cache = counts()["mr"], left.registration_cache
        left.close()
        assert cache.closed
        assert counts()["mr"] <= before - 2  # what it sends and receives through, and the array
        data.resize(10, refcheck=False)


def test_the_connections_of_a_server_have_one_cache():
    data, caches = fill(50_000, 1), []

    def handler(conn):
        conn.send(data)
        caches.append(conn.registration_cache)
        conn.recv(timeout=20)

    with pvl.Server("127.0.0.1", 0, handler, registration_cache=1 << 20) as server:
        server.start()
        for _ in range(3):
            with pvl.connect("127.0.0.1", server.port) as conn:
                assert bytes(conn.recv(timeout=20)) == data.tobytes()
                conn.send(b"end")
        (cache,) = {*caches}
        assert (cache.stats.hits, cache.stats.misses, cache.max_bytes) == (2, 1, 1 << 20)
    assert cache.closed


def test_a_failed_connection_lets_go_of_its_arrays(pair):
    left, _ = pair
    data = fill(SIZE, 1)
    with pytest.raises(pvl.VerbsError):
        left.write(pvl.RemoteBuffer(4096, 1, SIZE), data)
    assert left.registration_cache.stats.in_use == 0


FORKED = """
    import os, sys
    import numpy as np
    import pyverbs_lite as pvl
    sys.path.insert(0, "tests")
    from support import connected, counts

    {fork_init}
    with connected({{"buffers": {{"target": bytearray(100_000)}}}}) as (left, _):
        remote, data = left.remote["target"], np.full(100_000, 1, np.uint8)
        left.write(remote, data)
        assert left.registration_cache.stats.entries == 1
        if (child := os.fork()) == 0:
            code = 1
            try:
                assert (data == 1).all()  # with MADV_DONTFORK it would not be mapped here
                del data
                code = 0
            finally:
                os._exit(code)
        data[:] = 2
        assert os.waitpid(child, 0)[1] == 0
        left.write(remote, data)
        assert left.read(remote) == b"\\x02" * 100_000
        assert left.registration_cache.stats.invalidations == 1
"""


@pytest.mark.parametrize("fork_init", ["pass", "pvl.fork_init()"])
def test_a_fork_neither_takes_arrays_from_the_child_nor_moves_them_from_the_parent(fork_init):
    script = textwrap.dedent(FORKED.format(fork_init=fork_init))
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


LIMITED = """
    import os, resource
    import numpy as np
    import pyverbs_lite as pvl

    pvl.Pool  # loaded while whoever runs this may read its file
    with pvl.open_device() as context, context.alloc_pd() as pd, pvl.RegistrationCache(pd) as cache:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (400_000, 400_000))
        os.setresuid(65534, 65534, 65534)  # without CAP_IPC_LOCK
        arrays = [np.zeros(150_000, np.uint8) for _ in range(4)]
        for data in arrays:
            cache.get(data).close()
        assert cache.stats.invalidations >= 2, cache.stats
        held = [cache.get(data) for data in arrays[:2]]
        try:
            cache.get(arrays[2])
        except pvl.VerbsOSError as error:
            assert error.errno == 12 and "RLIMIT_MEMLOCK, now 400000" in str(error), error
        else:
            raise AssertionError("the limit does not hold")
        for region in held:
            region.close()
        with pvl.RegistrationCache(pd) as other:  # the limit is the process's
            other.get(arrays[2]).close()
            assert cache.stats.entries == 0, cache.stats
            pd.reg_mr(arrays[3]).close()
            pd.pool(max_bytes=1 << 18, chunk_bytes=1 << 18).close()
            assert other.stats.entries == 0, other.stats
            try:
                pd.alloc(500_000)
            except pvl.VerbsOSError as error:
                assert error.errno == 12 and "RLIMIT_MEMLOCK, now 400000" in str(error), error
            else:
                raise AssertionError("the limit does not hold")
"""


def test_the_cache_gives_way_where_pinned_memory_is_limited():
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED)], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert errno.ENOMEM == 12
