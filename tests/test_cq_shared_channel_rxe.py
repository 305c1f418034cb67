"""One completion channel for several CQs, on a real driver: every CQ gets its event, every waiter wakes."""

from __future__ import annotations

import select
import signal
import threading
import time

import pytest
from support import completions, connect_qps, in_thread, make_qp

import pyverbs_lite as pvl
import pyverbs_lite.cq

pytestmark = pytest.mark.rdma

#: Far beyond what a wake-up takes, so that one that was lost shows as a test that takes as long.
LONG = 4.0


@pytest.fixture
def slow_second_look(monkeypatch):
    """Let a waiter that lost its event sleep on: it would look again by itself after a tenth of a second."""
    monkeypatch.setattr(pyverbs_lite.cq, "SLICE", LONG)


@pytest.fixture
def channel(context):
    return context.create_comp_channel()


class Side:
    """A CQ of the shared channel, and a QP that sends empty writes to another whose CQ nobody waits for."""

    def __init__(self, context, pd, channel, mr):
        self.cq = context.create_cq(64, channel)
        self.peer_cq = context.create_cq(64)
        self.qp, self.peer = make_qp(pd, self.cq), make_qp(pd, self.peer_cq)
        connect_qps(self.qp, self.peer)
        self.remote = pvl.RemoteBuffer(mr.addr, mr.rkey, mr.length)

    def go(self, wr_id):
        self.qp.post_send(pvl.SendWR(opcode=pvl.WROpcode.RDMA_WRITE, wr_id=wr_id, remote=self.remote))


@pytest.fixture
def mr(pd):
    return pd.alloc(4096, pvl.AccessFlags.LOCAL_WRITE | pvl.AccessFlags.REMOTE_WRITE)


@pytest.fixture
def sides(context, pd, channel, mr):
    return [Side(context, pd, channel, mr) for _ in range(3)]


def readable(channel, seconds):
    return bool(select.select([channel], [], [], seconds)[0])


def until_events(channel, count):
    """Take events until there were so many."""
    taken, end = 0, time.monotonic() + 5
    while taken < count:
        assert readable(channel, end - time.monotonic())
        taken += channel.get_events()
    return taken


def raises(error, call, *args):
    with pytest.raises(error):
        call(*args)


# ---------------------------------------------------------------- events


def test_every_armed_cq_raises_an_event_of_its_own(channel, sides):
    for side in sides:
        side.cq.req_notify()
    for i, side in enumerate(sides):
        side.go(70 + i)
    assert until_events(channel, 3) == 3
    assert channel.get_events() == 0
    assert [[wc.wr_id for wc in side.cq.poll()] for side in sides] == [[70], [71], [72]]


def test_a_cq_that_was_not_armed_raises_none(channel, sides):
    sides[1].cq.req_notify()
    sides[0].go(1)
    completions(sides[0].cq, 1)
    assert not readable(channel, 0.05)
    sides[1].go(2)
    assert until_events(channel, 1) == 1
    assert [wc.wr_id for wc in sides[1].cq.poll()] == [2]


def test_one_event_for_each_arming(channel, sides):
    side = sides[2]
    side.cq.req_notify()
    for i in range(5):
        side.go(i)
    assert len(completions(side.cq, 5)) == 5
    assert until_events(channel, 1) == 1
    assert not readable(channel, 0.05)


def test_closing_one_cq_leaves_the_others_their_events(channel, sides):
    for side in sides:
        side.cq.req_notify()
        side.go(5)
    sides[0].qp.close()
    sides[0].cq.close()  # with an event that nobody took: it goes with the CQ
    assert until_events(channel, 2) == 2
    assert [wc.wr_id for wc in completions(sides[1].cq, 1)] == [5]
    assert [wc.wr_id for wc in completions(sides[2].cq, 1)] == [5]


# ---------------------------------------------------------------- waiters


@pytest.mark.usefixtures("slow_second_look")
def test_waiters_of_different_cqs_never_miss_each_others_wake_up(sides):
    """Who takes the events takes those of all CQs; the others must hear of it at once."""
    rounds = 150
    start = time.monotonic()

    def wait_for(side):
        for i in range(rounds):
            assert [wc.wr_id for wc in completions(side.cq, 1, timeout=20)] == [i]
            turn.wait(20)

    turn = threading.Barrier(len(sides) + 1)
    ended = [in_thread(wait_for, side) for side in sides]
    for i in range(rounds):
        for side in sides:
            side.go(i)
        turn.wait(20)
    for end in ended:
        end()
    assert time.monotonic() - start < LONG  # one lost wake-up alone takes as long


@pytest.mark.usefixtures("slow_second_look")
def test_an_event_that_was_taken_between_arming_and_sleeping(channel, sides, monkeypatch):
    """The worst moment: this waiter has armed its CQ and looked, another takes its event, then it sleeps."""
    mine, other = sides[0], sides[1]
    sleep = channel._sleep

    def late(*args):
        monkeypatch.setattr(channel, "_sleep", sleep)
        mine.go(9)
        assert until_events(channel, 1) == 1
        sleep(*args)

    monkeypatch.setattr(channel, "_sleep", late)
    start = time.monotonic()
    assert [wc.wr_id for wc in mine.cq.wait(2 * LONG)] == [9]
    assert time.monotonic() - start < LONG / 2
    assert other.cq.poll() == []


@pytest.mark.usefixtures("slow_second_look")
def test_who_leaves_hands_over_to_who_still_waits(sides):
    """The thread that sleeps on the descriptor gives up first: another one has to take its place."""
    first, second = sides[0], sides[1]
    start = time.monotonic()
    impatient = in_thread(raises, pvl.WaitTimeout, first.cq.wait, 0.3)
    time.sleep(0.05)  # not what is tested: only makes it likely that the impatient one sleeps on the descriptor
    patient = in_thread(second.cq.wait, 2 * LONG)
    impatient()
    second.go(31)
    assert [wc.wr_id for wc in patient()] == [31]
    assert time.monotonic() - start < LONG / 2


@pytest.mark.usefixtures("slow_second_look")
def test_a_signal_handler_waits_inside_of_a_wait(sides):
    """The thread that sleeps on the descriptor is interrupted by one that wants to: it is the same thread."""
    outer, inner = sides[0], sides[1]
    seen = []

    def handler(*_):
        inner.go(40)
        seen.extend(wc.wr_id for wc in inner.cq.wait(2 * LONG))
        outer.go(41)

    before = signal.signal(signal.SIGALRM, handler)
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert [wc.wr_id for wc in outer.cq.wait(2 * LONG)] == [41]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [40]
    assert time.monotonic() - start < LONG / 2


def test_a_waiter_ends_when_its_cq_is_closed_and_the_other_goes_on(sides):
    first, second = sides[0], sides[1]
    closed = in_thread(raises, pvl.ClosedError, first.cq.wait, 20)
    patient = in_thread(second.cq.wait, 20)
    first.qp.close()
    first.cq.close()
    closed()
    second.go(8)
    assert [wc.wr_id for wc in patient()] == [8]


def test_many_threads_wait_for_the_same_cq(sides):
    side, total, got = sides[0], 60, []

    def take():
        while True:
            try:
                got.extend(side.cq.wait(2, n=1))
            except pvl.WaitTimeout:
                return
            if len(got) >= total:
                return

    ended = [in_thread(take) for _ in range(4)]
    for i in range(total):
        while side.qp.sends_in_flight >= 16:
            time.sleep(0.001)
        side.go(i)
    for end in ended:
        end()
    assert sorted(wc.wr_id for wc in got) == list(range(total))
