"""The queues under a connection: they are never wedged, never overrun, and what is inline is on its way at once."""

from __future__ import annotations

import pytest
from support import connected

import pyverbs_lite as pvl
from pyverbs_lite._connection import engine as _engine
from pyverbs_lite._connection import link as _link

pytestmark = pytest.mark.rdma

HEADER = _engine.HEADER


# ------------------------------------------------------------ unsignalled requests (report 8)


@pytest.mark.parametrize("depth", [1, 2, 5, 16])
def test_many_times_the_depth_while_nobody_waits(depth: int) -> None:
    """Lists are signalled once in a while, and single starts each: neither fills the queue for good."""
    data = bytearray(4000)
    with connected({"buffers": {"data": data}}, {"send_depth": depth}) as (left, _):
        remote, region = left.remote["data"], left.register(bytearray(range(250)) * 16)
        offsets = [8 * i for i in range(10 * 16)]
        for turn in range(3):
            data[:] = bytes(4000)
            works = [left.start_write_many(remote, region, offsets, offsets[::-1], [5] * 160) for _ in range(2)]
            singles = [left.start_write(remote[3000 + i :], b"%d" % turn, timeout=10) for i in range(3 * depth)]
            for work in works + singles:
                work.wait(20)
            assert all(data[8 * (159 - i) : 8 * (159 - i) + 5] == region.view[8 * i : 8 * i + 5] for i in range(160))
            assert data[3000 : 3000 + 3 * depth] == b"%d" % turn * (3 * depth)
            assert (left._engine.in_flight, left._engine._c.free_count) == (0, left.info.send_depth)


def test_a_post_that_the_driver_refuses_counts_nowhere() -> None:
    with connected({"buffers": {"data": bytearray(9000)}}) as (left, right):
        left.send(b"1")
        counts = left._engine._c.framing.sent, left._engine._c.free_count
        remote = left.remote["data"]
        left._link.qp.to_reset()  # where nothing can be posted
        for post in (
            lambda: left.send(b"refused", timeout=1),
            lambda: left.start_send(b"refused", timeout=1),
            lambda: left.write(remote, b"refused", imm=1, timeout=1),
            lambda: left.send(bytes(9000), timeout=1),
        ):
            with pytest.raises(pvl.VerbsOSError, match="ibv_post_send failed: EINVAL"):
                post()
            assert (left._engine._c.framing.sent, left._engine._c.free_count) == counts
            assert left._engine.in_flight == 0
        assert right.recv(timeout=5) == b"1"


# ------------------------------------------------------------ the size of queues (report 22)


@pytest.mark.parametrize(("send_depth", "recv_depth"), [(1, 1), (3, 2), (7, 5), (64, 16), (100, 300)])
def test_completions_of_both_queues_at_once_have_room(send_depth: int, recv_depth: int) -> None:
    """Everything that can be in flight completes before anybody looks."""
    data = bytearray(8 * send_depth)
    tuning = {"send_depth": send_depth, "recv_depth": recv_depth, "max_message_size": 64}
    with connected({"buffers": {"data": data}, "max_message_size": 64}, tuning) as (left, right):
        qp = left._link.qp
        granted = right._engine._c.framing.granted
        assert qp.send_cq.cqe >= send_depth + granted + _engine.CREDIT_RECEIVES
        remote = left.remote["data"]
        works = [left.start_write(remote[8 * i :], b"%8d" % i) for i in range(send_depth)]
        for i in range(granted):  # without a look at the left side's queue
            right.send(b"%d" % i, timeout=10)
        for work in works:
            work.wait(10)
        assert [bytes(left.recv(timeout=10)) for _ in range(granted)] == [b"%d" % i for i in range(granted)]
        assert data == b"".join(b"%8d" % i for i in range(send_depth))
        right.send(b"and on", timeout=10)
        assert left.recv(timeout=10) == b"and on"


def test_depths_beyond_the_device_are_cut_to_what_fits() -> None:
    tuning = {"send_depth": 65536, "recv_depth": 65536, "max_message_size": 8}
    with connected(tuning) as (left, right):
        limits = right._link.context.query_device()
        depth = right.info.recv_depth
        posted = depth + _engine.untold(depth) + _engine.CREDIT_RECEIVES
        assert depth < 65536
        assert posted <= min(limits.max_qp_wr, limits.max_cqe // 2)
        assert right.info.send_depth <= min(limits.max_qp_wr, limits.max_cqe // 2)
        for i in range(100):
            left.send(b"%d" % i)
        assert [int(right.recv(timeout=5)) for _ in range(100)] == list(range(100))


# ------------------------------------------------------------ inline data (report 29)


def around(most: int) -> list[int]:
    return [0, 1, most - HEADER - 1, most - HEADER, most - HEADER + 1, most - 1, most, most + 1]


def test_what_is_started_may_be_overwritten_at_once_if_it_is_short() -> None:
    """Inline or in a cell: a copy was made of it, at every size around what the device takes inline."""
    data = bytearray(4096)
    with connected({"buffers": {"data": data}}) as (left, right):
        most = left._engine._c.max_inline
        assert 64 + HEADER <= most <= left._link.qp.cap.max_inline_data
        for size in (*around(most), 4095, 4096):
            source = bytearray(b"s" * size)
            works = [left.start_send(source, imm=size), left.start_write(left.remote["data"][:size], source)]
            source[:] = b"x" * size
            for work in works:
                work.wait(10)
            message = right.recv(timeout=10)
            assert (message, message.imm) == (b"s" * size, size)
            assert data[:size] == b"s" * size


def test_a_device_that_takes_nothing_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some drivers refuse any: then nothing is."""
    found = pvl.PD.create_qp

    def create_qp(pd: pvl.PD, init: pvl.QPInitAttr) -> pvl.QP:
        if init.cap.max_inline_data:
            raise pvl.VerbsOSError(22, "ibv_create_qp", "no inline data here")
        return found(pd, init)

    monkeypatch.setattr(pvl.PD, "create_qp", create_qp)
    data = bytearray(200)
    with connected({"buffers": {"data": data}}) as (left, right):
        # Soft-RoCE gives some all the same; what was asked for is what counts for the others.
        left._engine._c.max_inline = right._engine._c.max_inline = 0
        for size in (0, 1, 64, 65, 200):
            left.send(b"s" * size)
            assert right.recv(timeout=5) == b"s" * size
            left.write(left.remote["data"], b"w" * size)
            assert data[:size] == b"w" * size
        for _ in range(40):  # credits are short messages too
            left.send(b"more", timeout=5)
            right.recv(timeout=5)


def test_the_length_of_a_header_is_asked_for_as_well() -> None:
    assert _link._INLINE == 64 + HEADER


def test_an_idle_connection_stays_idle() -> None:
    """Neither side answers a credit with a credit."""
    with connected({"recv_depth": 1}, {"recv_depth": 1}) as (left, right):
        for i in range(10):
            left.send(b"%d" % i, timeout=5)
            assert right.recv(timeout=5) == b"%d" % i
        before = left._engine._c.own.posted, right._engine._c.own.posted
        assert before == (0, 10)
        for conn in (left, right):
            with pytest.raises(pvl.WaitTimeout):
                conn.recv(timeout=0.1)
        assert (left._engine._c.own.posted, right._engine._c.own.posted) == before
