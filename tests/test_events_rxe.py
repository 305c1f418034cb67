"""Asynchronous events: told, and never in the way of closing what they are for."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import time
from contextlib import contextmanager

import pytest
from support import ALL_ACCESS, completions, connect_qps, in_thread, make_qp, own_gid, path_to

import pyverbs_lite as pvl
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma
E = pvl.EventType


@pytest.fixture
def cq(context):
    return context.create_cq(100)


def srq_and_qp(pd, cq):
    srq = pd.create_srq(pvl.SRQInitAttr(max_wr=8, max_sge=1))
    cap = pvl.QPCap(max_send_wr=4, max_recv_wr=0, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
    return srq, pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, srq=srq))


def wait_for(context, kind, timeout=10.0):
    """Return the next event of a kind, past others that may come with it."""
    end = time.monotonic() + timeout
    while (event := context.get_async_event(end - time.monotonic())).event_type != kind:
        pass
    return event


def readable(fd):
    return bool(select.select([fd], [], [], 0)[0])


# ---------------------------------------------------------------- waiting


@pytest.mark.parametrize("timeout", [0, 0.15])
def test_nothing_happens(context, timeout):
    start = time.monotonic()
    with pytest.raises(pvl.WaitTimeout, match=f"no asynchronous event within {timeout} s") as caught:
        context.get_async_event(timeout)
    assert timeout <= time.monotonic() - start < timeout + 1
    assert caught.value.operation == "ibv_get_async_event"
    assert context.get_async_events() == []


@pytest.mark.parametrize(("timeout", "error"), [(-1, ValueError), ("1", TypeError), (True, TypeError)])
def test_what_is_no_timeout(context, timeout, error):
    with pytest.raises(error, match="timeout"):
        context.get_async_event(timeout)


def test_the_descriptor_does_not_block(context):
    fd = context.async_fd
    assert fd == context._handle.async_fd
    assert not os.get_blocking(fd)
    assert not readable(fd)


def test_closing_ends_a_wait():
    for delay in (0, 0.001, 0.01, 0.15):  # before, while and after it begins to sleep
        context = pvl.open_device()
        result = in_thread(context.get_async_event)
        time.sleep(delay)
        context.close()
        with pytest.raises(pvl.ClosedError):
            result(5)


def test_one_event_goes_to_one_of_many_waiters(context, pd, cq):
    def wait():
        try:
            return context.get_async_event(1.0)
        except pvl.WaitTimeout:
            return None

    waiters = [in_thread(wait) for _ in range(4)]
    _, qp = srq_and_qp(pd, cq)
    qp.to_init()
    qp.to_error()
    found = [result(10) for result in waiters]
    assert [event.qp for event in found if event is not None] == [qp]


def test_after_close():
    context = pvl.open_device()
    context.close()
    for use in (lambda: context.async_fd, lambda: context.get_async_event(0), context.get_async_events):
        with pytest.raises(pvl.ClosedError):
            use()


class Interrupt(Exception):
    pass


@contextmanager
def alarm(handler, first, every=0.0):
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, first, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_ends_a_wait_and_loses_nothing(context, pd, cq):
    def interrupt(number, frame):
        raise Interrupt

    with alarm(interrupt, 0.1), pytest.raises(Interrupt):
        context.get_async_event(30)
    _, qp = srq_and_qp(pd, cq)
    qp.to_init()
    qp.to_error()
    assert wait_for(context, E.QP_LAST_WQE_REACHED).qp is qp


def test_harmless_signals_do_not_prolong_a_wait(context):
    start = time.monotonic()
    with alarm(lambda number, frame: None, 0.02, 0.02), pytest.raises(pvl.WaitTimeout):
        context.get_async_event(0.4)
    assert 0.4 <= time.monotonic() - start < 1.4


def test_an_event_that_an_interrupt_left_behind_is_the_next(context, pd, cq, monkeypatch):
    _, qp = srq_and_qp(pd, cq)
    qp.to_init()
    qp.to_error()
    select.select([context.async_fd], [], [], 10)

    def interrupted(root, raw):
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr("pyverbs_lite.events._event", interrupted)
        with pytest.raises(Interrupt):
            context.get_async_event(5)
    assert not readable(context.async_fd)
    assert context.get_async_event(0).qp is qp
    assert context.get_async_events() == []


def test_an_event_loop_can_wait(context, pd, cq):
    _, qp = srq_and_qp(pd, cq)
    qp.to_init()

    async def first_event():
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        loop.add_reader(context.async_fd, lambda: arrived.done() or arrived.set_result(context.get_async_events()))
        loop.call_later(0.05, qp.to_error)
        try:
            return await asyncio.wait_for(arrived, 10)
        finally:
            loop.remove_reader(context.async_fd)

    events = asyncio.run(first_event())
    assert [(event.event_type, event.qp) for event in events] == [(E.QP_LAST_WQE_REACHED, qp)]


# ---------------------------------------------------------------- queues that overflow


@pytest.fixture
def overflowed(context, pd):
    """Yield a CQ that more completions came for than it holds."""
    small, other = context.create_cq(2), context.create_cq(100)
    left, right = make_qp(pd, small), make_qp(pd, other)
    connect_qps(left, right)
    target = pd.alloc(64, ALL_ACCESS)
    remote = pvl.RemoteBuffer.of(target)
    for number in range(small.cqe + 3):
        left.post_send(pvl.SendWR(opcode=pvl.WROpcode.RDMA_WRITE, sg_list=[target[:8]], remote=remote, wr_id=number))
    yield small
    right.close()  # like the writer's, it had to live until now: without a name it would have been destroyed at once


def test_a_cq_overflows(context, overflowed):
    event = wait_for(context, E.CQ_ERR)
    assert isinstance(event, pvl.CQEvent)
    assert event.cq is overflowed
    assert "overflowed" in str(event)
    assert str(event).startswith("CQ_ERR: ")
    in_thread(overflowed.close)(10)  # with its QP; waits for no acknowledgement


def test_a_cq_closes_with_its_events_unread(context, overflowed):
    select.select([context.async_fd], [], [], 10)
    assert readable(context.async_fd)
    in_thread(overflowed.close)(10)
    assert context.get_async_events() == []  # they went with it


def test_everything_closes_with_events_unread(pd, overflowed):
    in_thread(pd.context.close)(10)


# ---------------------------------------------------------------- queue pairs


def test_the_last_receive_of_an_srq(context, pd, cq):
    _, qp = srq_and_qp(pd, cq)
    qp.to_init()
    qp.to_error()
    event = context.get_async_event(10)
    assert event == pvl.QPEvent(E.QP_LAST_WQE_REACHED, qp, qp.qp_num)
    in_thread(qp.close)(10)


def test_a_qp_closes_with_its_event_unread(context, pd, cq):
    _, qp = srq_and_qp(pd, cq)
    qp.to_init()
    qp.to_error()
    select.select([context.async_fd], [], [], 10)
    in_thread(qp.close)(10)
    with pytest.raises(pvl.WaitTimeout):
        context.get_async_event(0.1)


def test_an_event_outlives_its_qp(context, pd, cq):
    _, qp = srq_and_qp(pd, cq)
    number = qp.qp_num
    qp.to_init()
    qp.to_error()
    event = context.get_async_event(10)
    qp.close()
    assert event.qp.closed
    assert event.qp_num == number


def test_a_qp_that_was_made_past_the_library(context, pd, cq):
    srq, known = srq_and_qp(pd, cq)
    init = ffi.new("struct ibv_qp_init_attr *")
    init.send_cq = init.recv_cq = cq._handle
    init.srq, init.qp_type = srq._handle, lib.IBV_QPT_RC
    init.cap.max_send_wr = init.cap.max_send_sge = 1
    raw = lib.ibv_create_qp(pd._handle, init)
    assert raw
    number = raw.qp_num
    try:
        attr = ffi.new("struct ibv_qp_attr *")
        attr.qp_state, attr.port_num = lib.IBV_QPS_INIT, 1
        mask = lib.IBV_QP_STATE | lib.IBV_QP_PORT | lib.IBV_QP_PKEY_INDEX | lib.IBV_QP_ACCESS_FLAGS
        assert lib.ibv_modify_qp(raw, attr, mask) == 0
        attr.qp_state = lib.IBV_QPS_ERR
        assert lib.ibv_modify_qp(raw, attr, lib.IBV_QP_STATE) == 0
        event = context.get_async_event(10)
    finally:
        assert lib.ibv_destroy_qp(raw) == 0
    assert event == pvl.QPEvent(E.QP_LAST_WQE_REACHED, None, number)
    assert number != known.qp_num


def test_each_event_names_its_own_qp(context, pd, cq):
    pairs = [srq_and_qp(pd, cq)[1] for _ in range(4)]
    for qp in pairs:
        qp.to_init()
    for qp in reversed(pairs):
        qp.to_error()
    assert [context.get_async_event(10).qp for _ in pairs] == pairs[::-1]


def test_a_send_queue_drains(context, pd, cq):
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right)
    left.modify(pvl.QPAttr(qp_state=pvl.QPState.SQD, en_sqd_async_notify=True))
    event = context.get_async_event(10)
    assert (event.event_type, event.qp) == (E.SQ_DRAINED, left)


def test_soft_roce_does_not_tell_of_the_first_message_in_rtr(context, pd, cq):
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    row = own_gid(context)
    for mine, other in ((left, right), (right, left)):
        mine.to_init(qp_access_flags=ALL_ACCESS)
        mine.to_rtr(ah_attr=path_to(context, row), dest_qp_num=other.qp_num, rq_psn=77, max_dest_rd_atomic=1)
    left.to_rts(sq_psn=77, max_rd_atomic=1)
    buffer = pd.alloc(64)
    right.post_recv(pvl.RecvWR(sg_list=[buffer[32:]]))
    left.post_send(pvl.SendWR(sg_list=[buffer[:5]]))
    assert all(wc.status == pvl.WCStatus.SUCCESS for wc in completions(cq, 2))
    assert right.state == pvl.QPState.RTR
    assert context.get_async_events() == []  # COMM_EST, were it another device


def test_an_srq_runs_low(context, pd, cq):
    srq, right = srq_and_qp(pd, cq)
    left = make_qp(pd, cq)
    connect_qps(left, right)
    buffer = pd.alloc(64)
    srq.post_recv(*[pvl.RecvWR(sg_list=[buffer[32:]]) for _ in range(3)])
    srq.modify(srq_limit=3)
    left.post_send(pvl.SendWR(sg_list=[buffer[:5]]))
    event = context.get_async_event(10)
    assert event == pvl.SRQEvent(E.SRQ_LIMIT_REACHED, srq)
    right.close()
    in_thread(srq.close)(10)


# ---------------------------------------------------------------- ports


@pytest.fixture
def second_device():
    """Make a soft-RoCE device of its own, whose link may go down without harm to others."""

    def run(*command):
        subprocess.run(command, check=True, capture_output=True, timeout=30)

    run("ip", "link", "add", "pvlev0", "type", "veth", "peer", "name", "pvlev1")
    try:
        run("ip", "link", "set", "pvlev0", "up")
        run("ip", "link", "set", "pvlev1", "up")
        run("rdma", "link", "add", "rxeev0", "type", "rxe", "netdev", "pvlev0")
        try:
            with pvl.Context("rxeev0") as context:
                yield context, lambda state: run("ip", "link", "set", "pvlev0", state)
        finally:
            run("rdma", "link", "delete", "rxeev0")
    finally:
        run("ip", "link", "delete", "pvlev0")


def test_a_port_goes_down_and_comes_up(second_device):
    context, set_link = second_device
    set_link("down")
    event = wait_for(context, E.PORT_ERR)
    assert event == pvl.PortEvent(E.PORT_ERR, 1)
    assert context.query_port(event.port_num).state == pvl.PortState.DOWN
    assert "PORT_ERR: the port went down" in str(event)
    set_link("up")
    assert wait_for(context, E.PORT_ACTIVE) == pvl.PortEvent(E.PORT_ACTIVE, 1)
    assert context.query_port(1).state == pvl.PortState.ACTIVE


def test_the_shared_device_knows_nothing_of_it(context, second_device):
    other, set_link = second_device
    set_link("down")
    wait_for(other, E.PORT_ERR)
    assert context.get_async_events() == []


def test_a_gid_table_changes(second_device):
    context, _ = second_device
    before = {entry.gid for entry in context.gid_table(1)}
    subprocess.run(["ip", "address", "add", "203.0.113.9/24", "dev", "pvlev0"], check=True, timeout=30)
    event = wait_for(context, E.GID_CHANGE)
    assert event.port_num == 1
    assert {entry.gid for entry in context.gid_table(1)} > before


# ---------------------------------------------------------------- kinds that no device here has


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (lib.IBV_EVENT_DEVICE_FATAL, pvl.DeviceEvent(E.DEVICE_FATAL)),
        (lib.IBV_EVENT_LID_CHANGE, pvl.PortEvent(E.LID_CHANGE, 7)),
        (lib.IBV_EVENT_WQ_FATAL, pvl.WQEvent(E.WQ_FATAL, None, 0xABC)),
        (lib.IBV_EVENT_QP_ACCESS_ERR, pvl.QPEvent(E.QP_ACCESS_ERR, None, 0xABC)),
        (lib.IBV_EVENT_SRQ_ERR, pvl.SRQEvent(E.SRQ_ERR, None)),
        (99, pvl.PortEvent(99, 7)),
    ],
)
def test_what_becomes_of_each_kind(context, monkeypatch, number, expected):
    from pyverbs_lite.events import _event

    raw = ffi.new("struct pvl_event *")
    raw.event_type, raw.element, raw.handle, raw.number = number, 7, 3, 0xABC
    event = _event(context, raw)
    assert event == expected
    assert type(event) is type(expected)
    assert str(event)


def test_every_type_has_a_meaning():
    from pyverbs_lite.events import _MEANINGS

    assert set(_MEANINGS) == set(E)


def test_an_address_that_was_used_again_is_not_mistaken(context, pd, cq):
    from pyverbs_lite.events import _event

    qp = make_qp(pd, cq)
    raw = ffi.new("struct pvl_event *")
    raw.event_type = E.QP_FATAL
    raw.element = int(ffi.cast("uintptr_t", qp._handle))
    raw.handle, raw.number = qp._handle.handle, qp.qp_num
    assert _event(context, raw).qp is qp
    raw.number += 1
    assert _event(context, raw) == pvl.QPEvent(E.QP_FATAL, None, qp.qp_num + 1)
    raw.number, raw.handle = qp.qp_num, raw.handle + 1
    assert _event(context, raw).qp is None
