"""Extended completion queues, sizes and moderation on a real driver."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import pytest
from support import ALL_ACCESS, completions, connect_qps, in_thread, make_qp

import pyverbs_lite as pvl
from pyverbs_lite.ffi import lib

pytestmark = pytest.mark.rdma

F = pvl.CreateCQWCFlags
RXE_HAS = F.WITH_BYTE_LEN | F.WITH_IMM | F.WITH_QP_NUM | F.WITH_SRC_QP | F.WITH_SLID | F.WITH_SL | F.WITH_DLID_PATH_BITS
RXE_LACKS = [
    F.WITH_COMPLETION_TIMESTAMP,
    F.WITH_CVLAN,
    F.WITH_FLOW_TAG,
    F.WITH_TM_INFO,
    F.WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
]


@pytest.fixture
def mr(pd):
    return pd.alloc(4096, ALL_ACCESS)


class Pair:
    """Two connected QPs: what completes at the left one comes to the extended CQ, the rest to plain ones."""

    def __init__(self, context, pd, mr, cq=None, **options):
        self.cq = cq or context.create_cq_ex(256, **options)
        self.peer_cq = context.create_cq(256)
        self.left, self.right = make_qp(pd, self.cq, depth=64), make_qp(pd, self.peer_cq, depth=64)
        connect_qps(self.left, self.right, timeout=10, retry_cnt=2, rnr_retry=1)
        self.mr, self.peer_sends = mr, 0
        self.remote = pvl.RemoteBuffer(mr.addr, mr.rkey, mr.length)

    def write(self, count, first=0, **options):
        for i in range(first, first + count):
            wr = pvl.SendWR(opcode=pvl.WROpcode.RDMA_WRITE, wr_id=i, remote=self.remote, **options)
            self.left.post_send(wr)
        return self

    def receive(self, length, wr_id, imm=None):
        """Let the left side receive a message."""
        self.left.post_recv(pvl.RecvWR(sg_list=[self.mr[1000:2000]], wr_id=wr_id))
        opcode = pvl.WROpcode.SEND if imm is None else pvl.WROpcode.SEND_WITH_IMM
        self.right.post_send(pvl.SendWR(opcode=opcode, sg_list=[self.mr[:length]], imm_data=imm))
        self.peer_sends += 1
        return self

    def settle(self):
        """Wait until all that was started has left its completions on the device, without looking there.

        What this reads last arrives after everything before it has completed, and says nothing itself.
        """
        completions(self.peer_cq, self.peer_sends)  # sent: so they were received, too
        self.peer_sends = 0
        here, there = self.mr[3000:3008], self.mr[2000:2008]
        mark = os.urandom(8)
        self.mr.view[2000:2008] = mark
        remote = pvl.RemoteBuffer(there.addr, self.mr.rkey, 8)
        self.left.post_send(
            pvl.SendWR(opcode=pvl.WROpcode.RDMA_READ, sg_list=[here], remote=remote, send_flags=pvl.SendFlags(0))
        )
        end = time.monotonic() + 5
        while self.mr.view[3000:3008] != mark:
            assert time.monotonic() < end
            time.sleep(0.0005)
        return self


@pytest.fixture
def pair(context, pd, mr):
    return Pair(context, pd, mr)


# ---------------------------------------------------------------- making


@pytest.mark.parametrize("flag", [F(0), *(F(1 << bit) for bit in range(7)), RXE_HAS])
def test_fields_that_rxe_has(context, flag):
    with context.create_cq_ex(10, wc_flags=flag) as cq:
        assert cq.wc_flags == flag
        assert isinstance(cq, pvl.CQ)
        assert cq.cqe >= 10
        assert cq.poll() == []


@pytest.mark.parametrize("flag", RXE_LACKS)
def test_fields_that_rxe_lacks(context, flag):
    with pytest.raises(pvl.UnsupportedError, match=f"ibv_create_cq_ex failed.*{flag.name}"):
        context.create_cq_ex(10, wc_flags=flag | F.WITH_BYTE_LEN)


def test_flags(context):
    with context.create_cq_ex(10, flags=pvl.CreateCQAttrFlags.SINGLE_THREADED) as cq:
        assert cq.flags == pvl.CreateCQAttrFlags.SINGLE_THREADED
    with pytest.raises(pvl.UnsupportedError, match="IGNORE_OVERRUN"):
        context.create_cq_ex(10, flags=pvl.CreateCQAttrFlags.IGNORE_OVERRUN)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"wc_flags": 1 << 40}, ValueError, "wc_flags 0x10000000000 has bits beyond CreateCQWCFlags"),
        ({"wc_flags": -1}, ValueError, "wc_flags"),
        ({"wc_flags": pvl.WCFlags.WITH_IMM}, TypeError, "wc_flags"),
        ({"wc_flags": "all"}, TypeError, "wc_flags"),
        ({"flags": 4}, ValueError, "flags 0x4 has bits beyond CreateCQAttrFlags"),
        ({"flags": F.WITH_IMM}, TypeError, "flags"),
        ({"parent_domain": 7}, TypeError, "parent_domain"),
        ({"comp_vector": 1 << 20}, ValueError, "comp_vector"),
    ],
)
def test_options_that_cannot_be_right(context, options, error, match):
    with pytest.raises(error, match=match):
        context.create_cq_ex(10, **options)
    gc.collect()


@pytest.mark.parametrize("cqe", [0, -3, 1 << 31])
def test_a_size_outside_the_devices_limit(context, cqe):
    with pytest.raises(ValueError, match="cqe must be 1 to"):
        context.create_cq_ex(cqe)


def test_a_domain_of_another_context(context):
    with pvl.open_device(context.name) as other, pytest.raises(ValueError, match="parent_domain belongs to"):
        context.create_cq_ex(10, parent_domain=other.alloc_pd())


def test_the_domain_outlives_the_cq(context):
    domain = context.alloc_pd()
    cq = context.create_cq_ex(10, parent_domain=domain)
    domain.close()
    assert cq.closed


# ---------------------------------------------------------------- batches


def test_the_fields_of_a_receive(pair):
    pair.receive(613, wr_id=0xFEDC_BA98_7654_3210, imm=0xA1B2C3D4).settle()
    with pair.cq.poll_batch() as batch:
        (wc,) = batch
        assert (wc.wr_id, wc.status, wc.opcode) == (0xFEDC_BA98_7654_3210, pvl.WCStatus.SUCCESS, pvl.WCOpcode.RECV)
        assert (wc.byte_len, wc.imm_data, wc.qp_num) == (613, 0xA1B2C3D4, pair.left.qp_num)
        assert wc.wc_flags & pvl.WCFlags.WITH_IMM
        assert (wc.is_recv, wc.invalidated_rkey, wc.sl, wc.slid, wc.dlid_path_bits) == (True, None, 0, 0, 0)
        assert wc.src_qp in (0, pair.right.qp_num)  # an RC completion need not say it
        assert pair.left.recvs_in_flight == 0
        wc.raise_for_status()


def test_no_immediate_is_none_and_not_zero(pair):
    pair.receive(5, wr_id=1).receive(6, wr_id=2, imm=0).settle()
    with pair.cq.poll_batch() as batch:
        assert [(wc.wr_id, wc.byte_len, wc.imm_data) for wc in batch] == [(1, 5, None), (2, 6, 0)]


def test_an_empty_queue_is_an_empty_batch(pair):
    with pair.cq.poll_batch() as batch:
        assert list(batch) == []
        pair.write(1).settle()
        assert [wc.wr_id for wc in batch] == [0]  # it looks again
    assert pair.cq.poll() == []


def test_at_most_n(pair):
    pair.write(9).settle()
    for n, expected in ((0, []), (4, [0, 1, 2, 3]), (1, [4]), (None, [5, 6, 7, 8])):
        with pair.cq.poll_batch(n) as batch:
            assert [wc.wr_id for wc in batch] == expected
    with pytest.raises(ValueError, match="n must be"):
        pair.cq.poll_batch(-1).__enter__()


@pytest.mark.parametrize("ending", ["break", "exception", "interrupted generator"])
def test_what_was_not_iterated_over_comes_later(pair, ending):
    pair.write(40).settle()
    seen = []
    if ending == "break":
        with pair.cq.poll_batch() as batch:
            for wc in batch:
                seen.append(wc.wr_id)
                if len(seen) == 3:
                    break
    elif ending == "exception":
        with suppress(KeyError), pair.cq.poll_batch() as batch:
            for wc in batch:
                seen.append(wc.wr_id)
                if len(seen) == 3:
                    raise KeyError
    else:

        def generate():
            with pair.cq.poll_batch() as batch:
                yield from (wc.wr_id for wc in batch)

        running = generate()
        seen = [next(running) for _ in range(3)]
        running.close()
    assert seen + [wc.wr_id for wc in pair.cq.poll(100)] == list(range(40))
    # The driver's own position is right, too: what comes now is seen, once and in order.
    assert [wc.wr_id for wc in completions(pair.write(5, first=50).cq, 5)] == list(range(50, 55))


def test_many_times_around_the_ring(context, pd, mr):
    """A driver that lost count at the end of a batch would repeat or skip one after the first time around."""
    pair = Pair(context, pd, mr, cq=context.create_cq_ex(16))
    got = []
    for i in range(0, 400, 5):
        pair.write(5, first=i).settle()
        with pair.cq.poll_batch() as batch:
            got += [wc.wr_id for wc in batch]
    assert got == list(range(400))


def test_batches_polls_and_waits_may_be_mixed(pair):
    pair.write(12).settle()
    with pair.cq.poll_batch() as batch:
        order = [next(batch).wr_id, pair.cq.poll(1)[0].wr_id, pair.cq.wait(1, n=1)[0].wr_id]
        with pair.cq.poll_batch(2) as inner:
            order += [wc.wr_id for wc in inner]
        order += [wc.wr_id for wc in batch]
    assert order == list(range(12))


def test_a_view_ends_with_its_batch(pair):
    pair.write(2).settle()
    with pair.cq.poll_batch() as batch:
        first, second = batch
        kept = second.snapshot()
        assert "wr_id=0" in repr(first)
    for use in (lambda: first.wr_id, lambda: first.status, first.raise_for_status, first.snapshot, lambda: next(batch)):
        with pytest.raises(pvl.StateError, match=r"ended"):
            use()
    assert "ended" in repr(first)
    assert (kept.wr_id, kept.status) == (1, pvl.WCStatus.SUCCESS)
    assert dataclasses.replace(kept, wr_id=9).wr_id == 9


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("byte_len", "WITH_BYTE_LEN"),
        ("imm_data", "WITH_IMM"),
        ("invalidated_rkey", "WITH_IMM"),
        ("qp_num", "WITH_QP_NUM"),
        ("src_qp", "WITH_SRC_QP"),
        ("slid", "WITH_SLID"),
        ("sl", "WITH_SL"),
        ("dlid_path_bits", "WITH_DLID_PATH_BITS"),
        ("completion_ts", "WITH_COMPLETION_TIMESTAMP"),
        ("completion_wallclock_ns", "WITH_COMPLETION_TIMESTAMP_WALLCLOCK"),
        ("cvlan", "WITH_CVLAN"),
        ("flow_tag", "WITH_FLOW_TAG"),
        ("tm_info", "WITH_TM_INFO"),
    ],
)
def test_a_field_that_was_not_asked_for(context, pd, mr, name, flag):
    pair = Pair(context, pd, mr, wc_flags=RXE_HAS & ~F[flag])
    pair.receive(77, wr_id=3, imm=4).settle()
    with pair.cq.poll_batch() as batch:
        (wc,) = batch
        with pytest.raises(pvl.StateError, match=rf"{name} was not asked for.* {flag}$"):
            getattr(wc, name)
        assert wc.wr_id == 3


def test_a_field_that_does_not_exist(pair):
    pair.write(1).settle()
    with pair.cq.poll_batch() as batch, pytest.raises(AttributeError, match="no field 'length'"):
        next(batch).length  # noqa: B018


def test_nothing_asked_for(context, pd, mr):
    """The holds are released, the caller's number is found and the QP is known, without the QP's number."""
    pair = Pair(context, pd, mr, wc_flags=F(0))
    other = Pair(context, pd, mr, cq=pair.cq)
    pair.receive(5, wr_id=71, imm=6)
    other.receive(9, wr_id=72)
    found = {wc.wr_id: wc for wc in completions(pair.cq, 2)}
    assert {wr_id: wc.qp_num for wr_id, wc in found.items()} == {71: pair.left.qp_num, 72: other.left.qp_num}
    assert (found[71].imm_data, found[71].byte_len, found[71].is_recv) == (None, 0, True)
    assert (pair.left.recvs_in_flight, other.left.recvs_in_flight) == (0, 0)


def first_of(batch):
    end = time.monotonic() + 10
    while (wc := next(batch, None)) is None:
        assert time.monotonic() < end
    return wc


def test_of_a_failed_completion_only_what_is_valid(pair):
    pair.left.post_send(pvl.SendWR(opcode=pvl.WROpcode.SEND, wr_id=13))  # no receive is posted there
    with pair.cq.poll_batch() as batch:
        wc = first_of(batch)
        assert wc.status == pvl.WCStatus.RNR_RETRY_EXC_ERR
        assert (wc.wr_id, wc.qp_num, wc.is_recv) == (13, pair.left.qp_num, False)
        assert isinstance(wc.vendor_err, int)
        for name in ("opcode", "byte_len", "imm_data", "wc_flags", "src_qp", "sl", "invalidated_rkey"):
            with pytest.raises(pvl.StateError, match=f"{name} means nothing in a completion that failed with .*RNR"):
                getattr(wc, name)
        with pytest.raises(pvl.RnrRetryExceededError):
            wc.raise_for_status()
    assert pair.left.state == pvl.QPState.ERR


def test_polling_lets_memory_go(pair):
    pair.receive(100, wr_id=1).write(1).settle()
    with pytest.raises(pvl.StateError):
        pair.mr.close()
    with pair.cq.poll_batch() as batch:
        assert len(list(batch)) == 2
    # The read that settle() ends with is unsignaled: it ends with the next request that says so.
    assert [wc.wr_id for wc in completions(pair.write(1, first=8).cq, 1)] == [8]
    pair.mr.close()


def test_a_qp_may_be_closed_inside_of_a_batch(pair):
    """Drivers hold the CQ's lock from start_poll to end_poll, and destroying a QP takes it."""
    pair.write(3).settle()
    pair.left.post_recv(pvl.RecvWR(sg_list=[pair.mr[:8]], wr_id=60))
    with pair.cq.poll_batch() as batch:
        assert next(batch).wr_id == 0
        pair.left.close()
        assert [wc.wr_id for wc in batch] == [1, 2]
    pair.mr.close()


def test_closing_the_cq_inside_of_a_batch(pair):
    pair.write(1).settle()
    with pair.cq.poll_batch() as batch:
        wc = next(batch)
        pair.left.close()
        pair.cq.close()
        assert wc.wr_id == 0
        with pytest.raises(pvl.ClosedError):
            next(batch)


def test_threads_share_the_completions(pair):
    total, got = 300, []

    def take():
        end = time.monotonic() + 10
        while len(got) < total and time.monotonic() < end:
            with pair.cq.poll_batch(3) as batch:
                got.extend(wc.wr_id for wc in batch)

    ended = [in_thread(take) for _ in range(3)]
    for i in range(total):
        while pair.left.sends_in_flight >= 60:
            time.sleep(0.0005)
        pair.write(1, first=i)
    for end in ended:
        end()
    assert sorted(got) == list(range(total))


def test_waiting_sleeps_on_the_channel(context, pd, mr):
    pair = Pair(context, pd, mr, channel=context.create_comp_channel())
    waiting = in_thread(pair.cq.wait, 10)
    pair.receive(33, wr_id=5, imm=6)
    (wc,) = waiting()
    assert isinstance(wc, pvl.WCEx)
    assert (wc.wr_id, wc.byte_len, wc.imm_data, wc.completion_ts, wc.tm_info) == (5, 33, 6, None, None)
    with pytest.raises(pvl.WaitTimeout):
        pair.cq.wait(0.01)


class Interrupted(BaseException):
    pass


def test_no_interrupt_loses_or_repeats_a_completion(pair):
    taken, posted, interrupts, armed = [], 0, 0, False

    def handler(*_):
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    def step():
        nonlocal armed, posted
        while posted < 600 and pair.left.sends_in_flight < 50:
            pair.write(1, first=posted)
            posted += 1
        try:
            armed = True
            taken.extend(pair.cq.wait(0.01, n=7))
            armed = False
        except pvl.WaitTimeout:
            armed = False

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0004, 0.00043)
    end = time.monotonic() + 20
    try:
        while len(taken) < 600:
            assert time.monotonic() < end
            try:
                step()
            except Interrupted:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [wc.wr_id for wc in taken] == list(range(600))
    assert interrupts > 3


def test_an_extended_cq_that_is_dropped_is_destroyed_with_a_warning():
    script = """
        import gc, warnings
        import pyverbs_lite as pvl
        warnings.simplefilter("always")
        with pvl.open_device() as context:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                cq = context.create_cq_ex(10)
                del cq
                gc.collect()
            print([str(w.message).split(" was never closed")[0] for w in caught])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("['CQEx of ")


@pytest.mark.parametrize("wc_flags", [F.STANDARD_FLAGS, F(0)])
def test_the_peer_invalidates_a_window(context, pd, wc_flags):
    cq, quiet = context.create_cq_ex(32, wc_flags=wc_flags), context.create_cq(32)
    left, right = make_qp(pd, cq), make_qp(pd, quiet)
    connect_qps(left, right)
    region, mw = pd.alloc(256, ALL_ACCESS | pvl.AccessFlags.MW_BIND), pd.alloc_mw()
    left.bind_mw(mw, region[64:128], pvl.AccessFlags.REMOTE_READ)
    completions(cq, 1)
    left.post_recv(pvl.RecvWR(wr_id=4))
    right.post_send(pvl.SendWR(opcode=pvl.WROpcode.SEND_WITH_INV, invalidate_rkey=mw.rkey))
    completions(quiet, 1)
    with cq.poll_batch() as batch:
        wc = first_of(batch)
        assert (wc.wr_id, wc.snapshot().invalidated_rkey) == (4, mw.rkey if wc_flags else None)
        assert wc.snapshot().imm_data is None
    assert mw.mr is None  # the library saw it, whether the caller wanted to know or not
    region.close()


def test_a_parent_domain(context, pd):
    """Whatever is a PD will do; rxe has no thread domains, and says so."""
    with pytest.raises(pvl.UnsupportedError):
        context.create_cq_ex(10, parent_domain=pd.alloc_parent_domain())
    with context.create_cq_ex(10, parent_domain=pd) as cq:
        assert cq.parent_domain is pd


# ---------------------------------------------------------------- sizes and moderation, of both kinds


@pytest.fixture(params=["create_cq", "create_cq_ex"])
def any_pair(request, context, pd, mr):
    return Pair(context, pd, mr, cq=getattr(context, request.param)(10))


def test_resize_keeps_what_is_inside(any_pair):
    cq = any_pair.cq
    before = cq.cqe
    any_pair.write(6).settle()
    cq.resize(200)
    assert 200 <= cq.cqe < 512
    assert cq.cqe > before
    any_pair.write(50, first=6)
    assert [wc.wr_id for wc in completions(cq, 56)] == list(range(56))
    cq.resize(3)
    assert 3 <= cq.cqe < 200
    assert [wc.wr_id for wc in completions(any_pair.write(2, first=90).cq, 2)] == [90, 91]


def test_resize_below_what_waits(any_pair):
    cq = any_pair.cq
    cq.resize(60)
    before = cq.cqe
    any_pair.write(40).settle()
    with pytest.raises(pvl.VerbsOSError, match=r"ibv_resize_cq failed: EINVAL.*poll, then try again") as caught:
        cq.resize(2)
    assert caught.value.errno == errno.EINVAL
    assert cq.cqe == before
    assert [wc.wr_id for wc in completions(cq, 40)] == list(range(40))
    cq.resize(2)


@pytest.mark.parametrize("cqe", [0, -1, 1 << 31])
def test_resize_outside_the_devices_limit(any_pair, cqe):
    with pytest.raises(ValueError, match="cqe must be 1 to"):
        any_pair.cq.resize(cqe)


def test_resize_of_a_closed_cq(context):
    cq = context.create_cq_ex(4)
    cq.close()
    for call in (lambda: cq.resize(8), lambda: cq.moderate(1, 1), cq.poll):
        with pytest.raises(pvl.ClosedError):
            call()
    with cq.poll_batch() as batch, pytest.raises(pvl.ClosedError):
        next(batch)


def test_moderation_is_not_for_rxe(any_pair):
    with pytest.raises(pvl.UnsupportedError, match="ibv_modify_cq"):
        any_pair.cq.moderate(16, 50)
    for arguments in ((-1, 0), (0, 65536), (65536, 0)):
        with pytest.raises(ValueError, match="cq_"):
            any_pair.cq.moderate(*arguments)


def test_siw_has_neither():
    with pvl.open_device("siw0") as siw:
        with pytest.raises(pvl.UnsupportedError, match="ibv_create_cq_ex"):
            siw.create_cq_ex(10)
        cq = siw.create_cq(10)
        with pytest.raises(pvl.UnsupportedError, match="ibv_resize_cq"):
            cq.resize(20)
        with pytest.raises(pvl.UnsupportedError, match="ibv_modify_cq"):
            cq.moderate(1, 1)
    assert lib.IBV_CQ_ATTR_MODERATE == 1
