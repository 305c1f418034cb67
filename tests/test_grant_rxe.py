"""Grants: access that the peer has until it is taken back, and nobody else, and nothing more."""

import gc
import threading

import pytest
from support import A, connected, counts, in_thread

import pyverbs_lite as pvl
from pyverbs_lite import aio

pytestmark = pytest.mark.rdma

BINDABLE = A.LOCAL_WRITE | A.MW_BIND
RW = A.REMOTE_READ | A.REMOTE_WRITE


@pytest.fixture
def pair():
    with connected() as (left, right):
        yield left, right


@pytest.fixture
def region(pair):
    return pair[1].register(bytearray(range(256)) * 64, access=BINDABLE)


def test_the_peer_reaches_what_was_granted(pair, region):
    left, right = pair
    with right.grant(region[4096:4160], access=RW) as grant:
        assert (grant.remote.addr, grant.remote.length) == (region.addr + 4096, 64)
        assert grant.remote.rkey != region.rkey
        assert grant.remote.access == RW
        assert not grant.closed
        assert left.read(grant.remote) == bytes(range(64))
        left.write(grant.remote[8:12], b"\x77\x66\x55\x44")
        assert region.view[4104:4108] == b"\x77\x66\x55\x44"
        with pytest.raises(pvl.BusyError, match=r"memory\s+window"):
            region.close()
    assert grant.closed
    assert "revoked" in repr(grant)
    region.view[0] = 9  # as valid as before
    region.close()


def test_a_revoked_grant_is_of_no_use_and_ends_the_peer_s_connection(pair, region):
    left, right = pair
    grant = right.grant(region[:64])
    remote = grant.remote
    assert left.read(remote) == bytes(range(64))
    grant.revoke()
    grant.revoke()
    right.send(region[:3])  # the owner's side goes on
    assert bytes(left.recv(timeout=10)) == b"\x00\x01\x02"
    with pytest.raises(pvl.RemoteAccessError):
        left.read(remote)
    with pytest.raises(pvl.ClosedError):
        left.send(b"x")
    assert bytes(region.view[:64]) == bytes(range(64))


@pytest.mark.parametrize("what", ["before", "after", "write"])
def test_no_more_than_what_was_granted(pair, what):
    """A soft-RoCE device looks at the bounds of the region only, and not at those of the window: so all is granted."""
    left, right = pair
    region = right.register(bytearray(b"r" * 1024), access=BINDABLE)
    remote = right.grant(region).remote
    wide = {
        "before": pvl.RemoteBuffer(remote.addr - 8, remote.rkey, 16),
        "after": pvl.RemoteBuffer(remote.addr + 1020, remote.rkey, 8),
        "write": pvl.RemoteBuffer(remote.addr, remote.rkey, 8),
    }[what]
    with pytest.raises(IndexError):
        remote[1020:1028]
    with pytest.raises(pvl.RemoteAccessError):
        left.write(wide, b"w" * 8) if what == "write" else left.read(wide)
    assert bytes(region.view) == b"r" * 1024


def test_the_peer_is_refused_before_it_harms_itself(pair, region):
    left, right = pair
    remote = right.grant(region[:64]).remote
    with pytest.raises(pvl.StateError, match="REMOTE_READ"):
        left.write(remote, b"x")
    assert len(left.read(remote)) == 64


def test_only_the_peer_of_that_connection_has_it(pair, region):
    left, right = pair
    remote = right.grant(region[:64]).remote
    with connected() as (other, _):
        with pytest.raises(pvl.StateError):
            other.read(remote)  # it knows that it is another's
        with pytest.raises(pvl.RemoteAccessError):
            other.read(pvl.RemoteBuffer(remote.addr, remote.rkey, 64))
    assert len(left.read(remote)) == 64


def test_a_grant_with_a_name_comes_and_goes(pair, region):
    left, right = pair
    with right.grant(region[:64], name="answer", access=A.REMOTE_WRITE) as grant:
        remote = left.remote.wait("answer", 10)
        assert (remote.addr, remote.rkey, remote.length, remote.access) == (
            region.addr,
            grant.remote.rkey,
            64,
            A.REMOTE_WRITE,
        )
        assert grant.remote == remote
        assert "'answer'" in repr(grant)
        left.write(remote[:3], b"abc")
        with pytest.raises(pvl.StateError, match="taken"):
            right.grant(region[64:128], name="answer")
        with pytest.raises(pvl.StateError, match="taken"):
            right.register(bytearray(8), name="answer")
    assert bytes(region.view[:3]) == b"abc"
    right.send(b"now")
    left.recv(timeout=10)
    assert "answer" not in left.remote
    with pytest.raises(pvl.StateError, match="withdrawn"):
        left.write(remote, b"late")
    assert right.grant(region[:64], name="answer").remote.rkey
    left.remote.wait("answer", 10)


def test_the_error_of_a_name_is_not_hidden_by_that_of_taking_the_grant_back(pair, region, monkeypatch):
    _, right = pair

    def late(grant):
        raise pvl.WaitTimeout("revoke: the send queue is full", "revoke")

    with right.grant(region[:64], name="part"):
        with monkeypatch.context() as patch:
            patch.setattr(pvl.Grant, "revoke", late)
            with pytest.raises(pvl.StateError, match="taken"):
                right.grant(region[64:160], name="part")
    right.close()  # closes the window that was left, too
    region.close()


def test_an_atomic_may_be_granted(pair):
    left, right = pair
    region = right.register(bytearray(64), access=BINDABLE)
    with right.grant(region, access=A.REMOTE_ATOMIC) as grant:
        assert left.fetch_add(grant.remote[8:16], 5) == 0
    assert region.view[8] == 5


def test_many_grants_beside_each_other_and_traffic(pair, region):
    left, right = pair
    stop = threading.Event()

    def traffic():
        count = 0
        while not stop.is_set():
            right.send(b"m", timeout=20)
            left.recv(timeout=20)
            count += 1
        return count

    running = in_thread(traffic)
    try:
        for _ in range(5):
            grants = [right.grant(region[i * 64 : i * 64 + 64]) for i in range(8)]
            assert len({grant.remote.rkey for grant in grants}) == 8
            for i, grant in enumerate(grants):
                assert left.read(grant.remote) == bytes(region.view[i * 64 : i * 64 + 64])
            for grant in grants:
                grant.revoke()
    finally:
        stop.set()
    assert running(30) > 0


def test_a_grant_waits_for_a_place_in_a_full_send_queue(region, pair):
    with connected({"send_depth": 2}, {"buffers": {"target": bytearray(1 << 20)}}) as (left, right):
        mine = right.register(bytearray(1 << 20), access=BINDABLE)
        works = [right.start_write(right.remote["target"], mine, timeout=10) for _ in range(2)]
        with right.grant(mine[:8]) as grant:
            assert left.read(grant.remote) == bytes(8)
        for work in works:
            work.wait(10)
        table = right._engine._c
        table.in_flight += table.send_slots  # as if they were in flight for long
        with pytest.raises((pvl.QueueFullError, pvl.WaitTimeout)):
            right.grant(mine[:8], timeout=0)
        table.in_flight -= table.send_slots
        right.send(b"it goes on")
        assert bytes(left.recv(timeout=10)) == b"it goes on"


def test_nobody_has_to_keep_a_grant_and_it_keeps_its_memory(pair):
    left, right = pair
    with right.pool(access=BINDABLE) as pool:
        part = pool.alloc(64)
        part.view[:] = b"p" * 64
        remote = right.grant(part).remote
        del part
        gc.collect()
        assert pool.stats.in_use == 64
        assert left.read(remote) == b"p" * 64
        right.close()


def test_closing_the_connection_ends_grants_and_leaves_nothing():
    before = counts()
    with connected() as (left, right):
        region = right.register(bytearray(4096), access=BINDABLE)
        grant = right.grant(region[:64], name="answer")
        left.remote.wait("answer", 10)
        right.close()
        assert grant.closed
        grant.revoke()
        with pytest.raises(pvl.ClosedError):
            right.grant(region)
    assert counts() == before


def test_a_grant_is_revoked_quietly_after_the_connection_has_failed(pair, region):
    left, right = pair
    grant = right.grant(region[:64])
    with pytest.raises(pvl.VerbsError):
        right.write(pvl.RemoteBuffer(4096, 1, 8), b"x" * 8)
    grant.revoke()
    assert grant.closed
    with pytest.raises(pvl.VerbsError):
        right.grant(region[:64])
    assert left


def test_a_refused_bind_leaves_the_connection_usable(pair, region):
    left, right = pair
    plain = right.register(bytearray(64))
    readonly = right.register(b"x" * 64, access=A.MW_BIND)
    mine = left.register(bytearray(64), access=BINDABLE)
    closed = right.register(bytearray(64), access=BINDABLE)
    closed.close()
    before = counts()["mr"]
    for memory, access, error, match in (
        (plain, A.REMOTE_READ, ValueError, "without MW_BIND"),
        (readonly, A.REMOTE_WRITE, ValueError, "without LOCAL_WRITE"),
        (mine, A.REMOTE_READ, ValueError, "one PD"),
        (closed, A.REMOTE_READ, pvl.ClosedError, "closed"),
        (region, A(0), ValueError, "a grant is for REMOTE_READ"),
        (region, A.LOCAL_WRITE, ValueError, "a grant is for REMOTE_READ"),
        (region[5:5], A.REMOTE_READ, ValueError, "at least one byte"),
        (bytearray(64), A.REMOTE_READ, TypeError, "registered memory"),
    ):
        with pytest.raises(error, match=match):
            right.grant(memory, access=access)
    for name, error in (("", ValueError), (5, TypeError), ("x" * 300, ValueError)):
        with pytest.raises(error):
            right.grant(region, name=name)
    assert counts()["mr"] == before
    with right.grant(readonly) as grant:
        assert left.read(grant.remote) == b"x" * 64


def test_over_librdmacm_too():
    with connected(host="192.0.2.1", via=pvl.cm) as (left, right):
        region = right.register(bytearray(b"z" * 64), access=BINDABLE)
        with right.grant(region[:8], name="cm") as grant:
            assert left.read(left.remote.wait("cm", 10)) == b"z" * 8
        assert grant.closed


def test_a_device_without_windows_says_so():
    """siw has none."""
    with connected(host="198.51.100.1", via=pvl.cm) as (left, right):
        region = right.register(bytearray(64))
        with pytest.raises(pvl.UnsupportedError):
            right.grant(region, access=A.REMOTE_READ)
        right.send(b"it goes on")
        assert bytes(left.recv(timeout=10)) == b"it goes on"


def test_from_an_event_loop():
    import asyncio

    async def main():
        async with await aio.listen("127.0.0.1", 0) as listener:
            left, right = await asyncio.gather(aio.connect("127.0.0.1", listener.port), listener.accept())
            async with left, right:
                region = await right.register(bytearray(b"q" * 64), access=BINDABLE)
                with await right.grant(region[:16]) as grant:
                    assert await left.read(grant.remote) == b"q" * 16
                assert grant.closed

    asyncio.run(main())
