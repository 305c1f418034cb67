"""Completion queues and channels on a real driver: sizes, events, waiting, interrupts, threads."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from support import completions, connect_qps, in_thread, make_qp

import pyverbs_lite as pvl
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

UNSIGNALED = pvl.SendFlags(0)


@pytest.fixture
def channel(context):
    return context.create_comp_channel()


@pytest.fixture
def cq(context, channel):
    return context.create_cq(300, channel)


@pytest.fixture
def quiet(context):
    """Make a CQ without a channel, for the other side's completions."""
    return context.create_cq(300)


@pytest.fixture
def pair(pd, cq, quiet):
    """Connect two QPs: the left one's completions come to ``cq``, the right one's to ``quiet``."""
    left, right = make_qp(pd, cq, depth=100), make_qp(pd, quiet, depth=100)
    connect_qps(left, right, timeout=10, retry_cnt=2, rnr_retry=1)
    return left, right


def writes(count, mr, **options):
    """Make requests of no bytes at all, which complete by themselves."""
    remote = pvl.RemoteBuffer(mr.addr, mr.rkey, mr.length)
    return [pvl.SendWR(opcode=pvl.WROpcode.RDMA_WRITE, wr_id=1000 + i, remote=remote, **options) for i in range(count)]


@pytest.fixture
def mr(pd):
    return pd.alloc(4096, pvl.AccessFlags.LOCAL_WRITE | pvl.AccessFlags.REMOTE_WRITE)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("cqe", [0, -1, 1 << 31, 1 << 32])
def test_a_size_outside_the_devices_limit(context, cqe):
    with pytest.raises(ValueError, match=f"cqe must be 1 to {context.query_device().max_cqe}, not {cqe}"):
        context.create_cq(cqe)


@pytest.mark.parametrize("cqe", ["8", 8.0, None, True])
def test_a_size_that_is_no_number(context, cqe):
    with pytest.raises(TypeError, match="cqe must be an integer"):
        context.create_cq(cqe)


@pytest.mark.parametrize("cqe", [1, 2, 3, 100, 127, 128])
def test_the_size_is_rounded_up(context, cqe):
    with context.create_cq(cqe) as cq:
        assert cqe <= cq.cqe < 2 * cqe + 2


def test_the_largest_size(context):
    limit = context.query_device().max_cqe
    with context.create_cq(limit) as cq:
        assert cq.cqe >= limit
    with pytest.raises(ValueError, match="cqe"):
        context.create_cq(limit + 1)


@pytest.mark.parametrize("vector", [-1, 1 << 20])
def test_a_completion_vector_that_is_not_there(context, vector):
    with pytest.raises(ValueError, match="comp_vector"):
        context.create_cq(8, comp_vector=vector)


def test_a_channel_of_another_context(context):
    with pvl.open_device(context.name) as other:
        channel = other.create_comp_channel()
        with pytest.raises(ValueError, match="the channel belongs to"):
            context.create_cq(8, channel)


@pytest.mark.parametrize("n", [0, -1, 1 << 31])
def test_how_many_to_take_is_checked(cq, n):
    for take in (cq.poll, lambda n: cq.wait(0, n=n)):
        with pytest.raises(ValueError, match="n must be"):
            take(n)


# ---------------------------------------------------------------- polling


def test_an_empty_queue(cq):
    assert cq.poll() == []
    assert cq.poll(1) == []


def test_up_to_n_in_their_order(cq, mr, pair):
    pair[0].post_send(*writes(90, mr))
    all_have_ended(pair, mr)
    assert [wc.wr_id for wc in cq.poll(1)] == [1000]
    assert [wc.wr_id for wc in cq.poll(3)] == [1001, 1002, 1003]
    rest = cq.poll(1000)  # more than one batch: fewer than n means that the queue is empty
    assert [wc.wr_id for wc in rest] == list(range(1004, 1090))
    assert {(wc.qp_num, wc.opcode, wc.is_recv) for wc in rest} == {(pair[0].qp_num, pvl.WCOpcode.RDMA_WRITE, False)}
    assert cq.poll() == []


def all_have_ended(pair, mr):
    """Wait until what the left QP has posted is complete, without taking a completion: a last write wakes the peer."""
    left, right = pair
    right.post_recv(pvl.RecvWR(wr_id=77))
    remote = pvl.RemoteBuffer(mr.addr, mr.rkey, mr.length)
    unsignaled = pvl.SendWR(
        opcode=pvl.WROpcode.RDMA_WRITE_WITH_IMM, imm_data=3, remote=remote, send_flags=UNSIGNALED, wr_id=78
    )
    left.post_send(unsignaled)
    assert [(wc.wr_id, wc.imm_data) for wc in completions(right.send_cq, 1)] == [(77, 3)]


@pytest.mark.parametrize("wr_id", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_wr_id_comes_back_whole(cq, mr, pair, wr_id):
    request = writes(1, mr)[0]
    request.wr_id = wr_id
    pair[0].post_send(request)
    assert completions(cq, 1)[0].wr_id == wr_id


def test_two_qps_on_one_queue(context, pd, mr):
    both = context.create_cq(64)
    left, right = make_qp(pd, both), make_qp(pd, both)
    connect_qps(left, right)
    for count, qp in ((3, left), (5, right)):
        qp.post_send(*[pvl.SendWR(opcode=w.opcode, wr_id=7, remote=w.remote) for w in writes(count, mr)])
    done = completions(both, 8)
    assert Counter(wc.qp_num for wc in done) == {left.qp_num: 3, right.qp_num: 5}
    assert {wc.wr_id for wc in done} == {7}
    assert (left.sends_in_flight, right.sends_in_flight) == (0, 0)


def test_send_and_receive_queues_of_their_own(context, pd):
    sends, recvs = context.create_cq(10), context.create_cq(20)
    cap = pvl.QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
    left, right = (pd.create_qp(pvl.QPInitAttr(send_cq=sends, recv_cq=recvs, cap=cap)) for _ in range(2))
    connect_qps(left, right)
    right.post_recv(pvl.RecvWR(wr_id=5))
    left.post_send(pvl.SendWR(wr_id=5))
    assert [(wc.qp_num, wc.is_recv) for wc in completions(sends, 1)] == [(left.qp_num, False)]
    assert [(wc.qp_num, wc.is_recv) for wc in completions(recvs, 1)] == [(right.qp_num, True)]


def test_completions_that_were_there_survive_their_qp(cq, mr, pair):
    left = pair[0]
    left.post_send(*writes(40, mr))
    all_have_ended(pair, mr)
    completions(cq, 1)
    left.close()
    assert [wc.wr_id for wc in cq.poll(100)] == list(range(1001, 1040))
    assert cq.poll() == []


def test_a_new_qp_with_an_old_number_is_not_taken_for_the_old_one(context, pd, cq, quiet, mr, pair):
    left = pair[0]
    kept = pd.alloc(64)
    left.post_send(*writes(2, mr))
    completions(cq, 2)
    number = left.qp_num
    new = make_qp(pd, cq, depth=100)
    new.qp_num = number  # as the device may choose once the old one is gone
    cq._ledgers[number] = new._ledger
    new.to_init()
    new.post_recv(pvl.RecvWR(sg_list=[kept], wr_id=1))
    left.post_send(*writes(2, mr))  # completions of the old one, under a number that is now the new one's
    done = completions(cq, 2)
    assert new.recvs_in_flight == 1
    assert new.state == pvl.QPState.INIT
    assert {wc.status for wc in done} == {pvl.WCStatus.SUCCESS}


def test_completions_of_requests_posted_through_c_pass_through(cq, mr, pair):
    wr, bad = ffi.new("struct ibv_send_wr *"), ffi.new("struct ibv_send_wr **")
    wr.wr_id, wr.opcode, wr.send_flags = 0xC0FFEE, lib.IBV_WR_RDMA_WRITE, lib.IBV_SEND_SIGNALED
    wr.wr.rdma.remote_addr, wr.wr.rdma.rkey = mr.addr, mr.rkey
    pair[0].post_send(*writes(1, mr))
    assert lib.ibv_post_send(pair[0]._handle, wr, bad) == 0
    assert [wc.wr_id for wc in completions(cq, 2)] == [1000, 0xC0FFEE]


# ---------------------------------------------------------------- events


def readable(channel, seconds=0.0):
    return bool(select.select([channel], [], [], seconds)[0])


def test_no_event_without_arming(cq, channel, mr, pair):
    pair[0].post_send(*writes(1, mr))
    completions(pair[0].send_cq, 1)
    assert not readable(channel)
    assert channel.get_events() == 0


def test_arm_poll_sleep_event_acknowledge(cq, channel, mr, pair):
    cq.req_notify()
    assert cq.poll() == []
    pair[0].post_send(*writes(3, mr))
    assert readable(channel, 5)
    assert channel.get_events() == 1  # one event for one arming, however many completions
    assert channel.get_events() == 0
    assert not readable(channel)
    assert len(completions(cq, 3)) == 3


def test_the_descriptor_never_blocks(channel):
    assert not os.get_blocking(channel.fileno())
    with pytest.raises(BlockingIOError):
        os.read(channel.fileno(), 8)


def test_destroying_with_events_that_nobody_took(context, pd, mr):
    # An event that was taken and not acknowledged would make destroying the CQ wait for ever.
    script = """
        import pyverbs_lite as pvl
        from support import *
        context = pvl.open_device()
        pd, channel = context.alloc_pd(), context.create_comp_channel()
        cq, quiet = context.create_cq(16, channel), context.create_cq(16)
        left, right = make_qp(pd, cq), make_qp(pd, quiet)
        connect_qps(left, right)
        mr = pd.alloc(64, ALL_ACCESS)
        write = pvl.SendWR(opcode=pvl.WROpcode.RDMA_WRITE, remote=pvl.RemoteBuffer(mr.addr, mr.rkey, 64))
        for taken in (False, True):
            cq.req_notify()
            left.post_send(write)
            completions(cq, 1)
            if taken:
                assert channel.get_events() == 2
        cq.req_notify()
        left.post_send(write)
        cq.close()
        channel.close()
        context.close()
        print("closed")
    """
    done = in_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def in_python(script, timeout=30):
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environ,
    )


def test_two_queues_on_one_channel(context, pd, mr, channel):
    first, second = context.create_cq(16, channel), context.create_cq(16, channel)
    left, right = make_qp(pd, first), make_qp(pd, second)
    connect_qps(left, right)
    results = [in_thread(cq.wait, 5) for cq in (first, second)]
    left.post_send(*writes(1, mr))
    right.post_send(*writes(1, mr))
    assert [result()[0].qp_num for result in results] == [left.qp_num, right.qp_num]


# ---------------------------------------------------------------- waiting


@pytest.fixture(params=["channel", "no channel"])
def any_cq(request, cq, quiet):
    return cq if request.param == "channel" else quiet


@pytest.mark.parametrize("timeout", [0, 0.0, 0.001, 0.15])
def test_nothing_comes(any_cq, timeout):
    start = time.monotonic()
    with pytest.raises(pvl.WaitTimeout, match=f"no completion within {timeout} s; the requests may still complete"):
        any_cq.wait(timeout)
    assert timeout <= time.monotonic() - start < timeout + 0.5


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_in_the_past(any_cq, timeout):
    with pytest.raises(ValueError, match="timeout"):
        any_cq.wait(timeout)


def test_timeout_zero_takes_what_is_there(cq, mr, pair):
    pair[0].post_send(*writes(2, mr))
    all_have_ended(pair, mr)
    assert [wc.wr_id for wc in cq.wait(0)] == [1000, 1001]


@pytest.mark.parametrize("index", [0, 1], ids=["channel", "no channel"])
@pytest.mark.parametrize("timeout", [None, 10])
def test_a_wait_ends_with_the_completion_and_holds_no_lock(pair, mr, index, timeout):
    qp = pair[index]
    waiting = in_thread(qp.send_cq.wait, timeout)
    count, start = 0, time.monotonic()
    while time.monotonic() - start < 0.25:  # this thread makes progress meanwhile
        count += 1
        assert qp.send_cq.poll() == []  # and may use the queue itself
    assert count > 50
    qp.post_send(*writes(1, mr))
    assert [wc.wr_id for wc in waiting()] == [1000]


def test_a_wait_uses_little_processor_time(cq):
    before = time.process_time()
    with pytest.raises(pvl.WaitTimeout):
        cq.wait(0.5)
    assert time.process_time() - before < 0.25


@pytest.mark.parametrize("what", ["cq", "channel", "context"])
def test_closing_wakes_whoever_waits(context, channel, cq, what):
    waiting = in_thread(cq.wait, None)
    time.sleep(0.05)
    {"cq": cq, "channel": channel, "context": context}[what].close()
    with pytest.raises(pvl.ClosedError):
        waiting(2)


def test_many_threads_take_each_completion_once(cq, mr, pair):
    left = pair[0]
    total, found, lock = 600, [], threading.Lock()

    def take():
        while True:
            with lock:
                if len(found) >= total:
                    return
            try:
                mine = cq.wait(0.05, n=3)
            except pvl.WaitTimeout:
                continue
            with lock:
                found.extend(mine)

    def post(first):
        for wr_id in range(first, first + 150):
            request = writes(1, mr)[0]
            request.wr_id = wr_id
            while True:
                try:
                    left.post_send(request)
                    break
                except pvl.QueueFullError:
                    time.sleep(0.001)

    threads = [in_thread(take) for _ in range(3)] + [in_thread(post, first) for first in range(0, total, 150)]
    for result in threads:
        result(30)
    assert sorted(wc.wr_id for wc in found) == list(range(total))
    assert left.sends_in_flight == 0


# ---------------------------------------------------------------- signals


@pytest.fixture
def on_alarm():
    """Install a SIGALRM handler, and take it away again."""
    before = signal.getsignal(signal.SIGALRM)

    def install(handler, first, interval=0.0):
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, first, interval)

    yield install
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_harmless_signals_do_not_end_or_prolong_a_wait(any_cq, on_alarm):
    calls = []
    on_alarm(lambda *_: calls.append(1), 0.05, 0.05)
    start = time.monotonic()
    with pytest.raises(pvl.WaitTimeout):
        any_cq.wait(0.5)
    assert 0.5 <= time.monotonic() - start < 0.8
    assert len(calls) >= 5


def test_a_completion_during_harmless_signals(pair, mr, on_alarm):
    def later():
        time.sleep(0.3)
        pair[0].post_send(*writes(1, mr))

    on_alarm(lambda *_: None, 0.02, 0.02)
    posted = in_thread(later)
    assert [wc.wr_id for wc in pair[0].send_cq.wait(5)] == [1000]
    posted()


class Interrupted(Exception):
    pass


def interrupt(*_):
    raise Interrupted


def test_an_interrupt_ends_a_wait_at_once(any_cq, on_alarm):
    on_alarm(interrupt, 0.1)
    start = time.monotonic()
    with pytest.raises(Interrupted):
        any_cq.wait(None)
    assert time.monotonic() - start < 1


def test_ctrl_c_ends_a_wait_and_everything_closes():
    script = """
        import os, signal, threading, time
        import pyverbs_lite as pvl
        with pvl.open_device() as context:
            cq = context.create_cq(8, context.create_comp_channel() if CHANNEL else None)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            start = time.monotonic()
            try:
                cq.wait()
            except KeyboardInterrupt:
                print("interrupted", time.monotonic() - start < 1.2)
    """
    for has_channel in (True, False):
        done = in_python(f"CHANNEL = {has_channel}\n{textwrap.dedent(script)}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted True\n", "")


# Hypothesis, once it has run in this process, has a callback in the garbage collector: an interrupt may end in there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_interrupt_loses_or_repeats_a_completion(cq, mr, pair, on_alarm):
    left, total = pair[0], 1500
    taken, posted, interrupts = [], 0, 0
    armed = False

    def handler(*_):
        nonlocal armed
        if armed:
            armed = False  # once for each try block: a second would land in its except clause
            raise Interrupted

    on_alarm(handler, 0.0003, 0.00037)
    end = time.monotonic() + 30
    while len(taken) < total:
        assert time.monotonic() < end
        while posted < total and left.sends_in_flight < 60:
            left.post_send(*(pvl.SendWR(opcode=w.opcode, wr_id=posted, remote=w.remote) for w in writes(1, mr)))
            posted += 1
        try:
            armed = True
            with suppress(pvl.WaitTimeout):
                taken.extend(cq.wait(0.01, n=7))
            armed = False
        except Interrupted:
            interrupts += 1
    assert [wc.wr_id for wc in taken] == list(range(total))
    assert interrupts > 5
    assert left.sends_in_flight == 0
    mr.close()


def test_a_signal_handler_may_poll_the_queue_that_it_interrupted(cq, mr, pair, on_alarm):
    left, total = pair[0], 400
    found = []
    on_alarm(lambda *_: found.extend(cq.poll(5)), 0.0005, 0.0007)
    posted = 0
    end = time.monotonic() + 20
    while len(found) < total:
        assert time.monotonic() < end
        if posted < total and left.sends_in_flight < 50:
            left.post_send(*(pvl.SendWR(opcode=w.opcode, wr_id=posted, remote=w.remote) for w in writes(1, mr)))
            posted += 1
        more = cq.poll(3)
        found.extend(more)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert sorted(wc.wr_id for wc in found) == list(range(total))
