"""Memory windows of both types on a real driver: what they let a peer do, and how they end."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import weakref

import pytest
from support import ALL_ACCESS, completions, connect_qps, in_thread, make_qp

import pyverbs_lite as pvl
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

A, OP, S = pvl.AccessFlags, pvl.WROpcode, pvl.WCStatus
TYPE_1, TYPE_2 = pvl.MWType.TYPE_1, pvl.MWType.TYPE_2
BINDABLE = ALL_ACCESS | A.MW_BIND


@pytest.fixture
def cq(context):
    return context.create_cq(100)


@pytest.fixture
def pair(pd, cq):
    """Yield the QP that reaches for memory, and the one whose memory it is."""
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right, timeout=10, retry_cnt=2, rnr_retry=1)
    return left, right


@pytest.fixture
def region(pd):
    mr = pd.alloc(4096, BINDABLE)
    mr.view[:] = bytes(range(256)) * 16
    return mr


def done(cq, count=1):
    return [wc.status for wc in completions(cq, count)]


def bind(cq, qp, mw, memory, access=A.REMOTE_READ | A.REMOTE_WRITE):
    qp.bind_mw(mw, memory, access)
    assert done(cq) == [S.SUCCESS]


def read(cq, qp, local, addr, rkey, length=16):
    remote = pvl.RemoteBuffer(addr, rkey, length)
    qp.post_send(pvl.SendWR(opcode=OP.RDMA_READ, sg_list=[local[:length]], remote=remote))
    return done(cq)[0]


def write(cq, qp, local, addr, rkey, length=16):
    remote = pvl.RemoteBuffer(addr, rkey, length)
    qp.post_send(pvl.SendWR(opcode=OP.RDMA_WRITE, sg_list=[local[:length]], remote=remote))
    return done(cq)[0]


@pytest.fixture
def local(pd):
    mr = pd.alloc(64)
    mr.view[:] = b"\x5a" * 64
    return mr


both = pytest.mark.parametrize("mw_type", [TYPE_1, TYPE_2])


# ---------------------------------------------------------------- making them


@both
def test_a_window_has_a_key_of_its_own(pd, mw_type):
    with pd.alloc_mw(mw_type) as mw, pd.alloc_mw(mw_type) as other:
        assert mw.mw_type == mw_type
        assert mw.rkey != other.rkey
        assert mw.mr is None
        assert repr(mw) == f"<MW of {mw_type.name} {mw.rkey:#x}, free>"
        assert mw.next_rkey() ^ mw.rkey in range(1, 256)
    with pytest.raises(pvl.ClosedError):
        mw.rkey  # noqa: B018
    assert "closed" in repr(mw)


def test_type_2_is_what_one_gets(pd):
    with pd.alloc_mw() as mw:
        assert mw.mw_type == TYPE_2


@pytest.mark.parametrize("mw_type", [0, 3, None, "TYPE_1"])
def test_a_type_that_is_none(pd, mw_type):
    with pytest.raises(ValueError, match="MWType"):
        pd.alloc_mw(mw_type)


@both
def test_a_device_without_windows(mw_type):
    with pvl.Context("siw0") as context:
        pd = context.alloc_pd()
        with pytest.raises(pvl.UnsupportedError, match="ibv_alloc_mw"):
            pd.alloc_mw(mw_type)


def test_many_windows_leave_nothing_behind(pd):
    for _ in range(300):
        pd.alloc_mw().close()


# ---------------------------------------------------------------- what a window lets the peer do


@both
def test_the_peer_reaches_what_is_bound(pd, cq, pair, region, local, mw_type):
    left, right = pair
    mw = pd.alloc_mw(mw_type)
    before = mw.rkey
    mw.bind(right, region[64:128], A.REMOTE_READ, wr_id=7)
    (wc,) = completions(cq, 1)
    assert (wc.wr_id, wc.status, wc.opcode, wc.qp_num) == (7, S.SUCCESS, pvl.WCOpcode.BIND_MW, right.qp_num)
    assert (wc.is_recv, wc.byte_len) == (False, 0)
    assert mw.rkey != before
    assert mw.rkey >> 8 == before >> 8
    assert mw.mr is region
    assert read(cq, left, local, region.addr + 96, mw.rkey) == S.SUCCESS
    assert bytes(local.view[:16]) == bytes(range(96, 112))
    # A soft-RoCE device looks at the bounds of the region only, and not at those of the window.
    assert read(cq, left, local, region.addr + 120, mw.rkey) == S.SUCCESS
    assert read(cq, left, local, region.addr + 4090, mw.rkey) == S.REM_ACCESS_ERR


@both
def test_a_window_that_is_for_reading_only(pd, cq, pair, region, local, mw_type):
    left, right = pair
    mw = pd.alloc_mw(mw_type)
    bind(cq, right, mw, region[64:128], A.REMOTE_READ)
    assert write(cq, left, local, region.addr + 64, mw.rkey) == S.REM_ACCESS_ERR
    assert bytes(region.view[64:80]) == bytes(range(64, 80))


@both
def test_a_window_that_may_be_written(pd, cq, pair, region, local, mw_type):
    left, right = pair
    mw = pd.alloc_mw(mw_type)
    bind(cq, right, mw, region[64:128], A.REMOTE_WRITE)
    assert write(cq, left, local, region.addr + 64, mw.rkey) == S.SUCCESS
    assert bytes(region.view[60:84]) == bytes(range(60, 64)) + b"\x5a" * 16 + bytes(range(80, 84))


def test_a_window_that_lets_do_atomics(pd, cq, pair, region, local):
    left, right = pair
    mw = pd.alloc_mw()
    bind(cq, right, mw, region[64:72], A.REMOTE_ATOMIC)
    remote = pvl.RemoteBuffer(region.addr + 64, mw.rkey, 8)
    left.post_send(pvl.SendWR(opcode=OP.ATOMIC_FETCH_AND_ADD, sg_list=[local[:8]], remote=remote, compare_add=1 << 56))
    assert done(cq) == [S.SUCCESS]
    assert region.view[71] == 72


@both
def test_the_key_before_the_binding_is_void(pd, cq, pair, region, local, mw_type):
    left, right = pair
    mw = pd.alloc_mw(mw_type)
    old = mw.rkey
    bind(cq, right, mw, region[64:128])
    assert read(cq, left, local, region.addr + 64, old) == S.REM_ACCESS_ERR


def test_a_zero_based_window(pd, cq, pair, region, local):
    left, right = pair
    mw = pd.alloc_mw()
    bind(cq, right, mw, region[64:128], A.REMOTE_READ | A.ZERO_BASED)
    status = read(cq, left, local, 8, mw.rkey)
    assert status == S.SUCCESS
    assert bytes(local.view[:16]) == bytes(range(72, 88))


def test_a_window_of_type_2_is_for_its_qp_only(pd, cq, pair, region, local):
    left, right = pair
    other_left, other_right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(other_left, other_right, timeout=10, retry_cnt=1)
    mw = pd.alloc_mw()
    bind(cq, right, mw, region[64:128])
    assert read(cq, other_left, local, region.addr + 64, mw.rkey) == S.REM_ACCESS_ERR
    assert read(cq, left, local, region.addr + 64, mw.rkey) == S.SUCCESS


def test_a_window_of_type_1_is_for_every_qp_of_the_pd(pd, cq, pair, region, local):
    _, right = pair
    other_left, other_right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(other_left, other_right, timeout=10, retry_cnt=1)
    mw = pd.alloc_mw(TYPE_1)
    bind(cq, right, mw, region[64:128])
    assert read(cq, other_left, local, region.addr + 64, mw.rkey) == S.SUCCESS


# ---------------------------------------------------------------- bound again, unbound, invalidated


def test_type_1_moves_to_another_region(pd, cq, pair, region, local):
    left, right = pair
    other = pd.alloc(4096, BINDABLE)
    other.view[:16] = b"the other region"
    mw = pd.alloc_mw(TYPE_1)
    keys = [mw.rkey]
    for target in (region[64:128], other[:32], region[0:16], other[:16]):
        bind(cq, right, mw, target)
        keys.append(mw.rkey)
    assert len(set(keys)) == 5
    assert mw.mr is other
    assert read(cq, left, local, other.addr, mw.rkey) == S.SUCCESS
    assert bytes(local.view[:16]) == b"the other region"
    region.close()  # no window is on it any more
    with pytest.raises(pvl.BusyError, match=r"1 memory window\(s\) may be bound to it"):
        other.close()
    mw.close()
    other.close()


def test_type_1_is_unbound(pd, cq, pair, region):
    _, right = pair
    mw = pd.alloc_mw(TYPE_1)
    with pytest.raises(ValueError, match="is bound to nothing"):
        right.bind_mw(mw, None)
    bind(cq, right, mw, region[64:128])
    right.bind_mw(mw, None)
    assert mw.mr is region  # until it has completed
    assert done(cq) == [S.SUCCESS]
    assert mw.mr is None
    region.close()
    assert not mw.closed


@pytest.mark.parametrize("signaled", [True, False])
def test_type_2_is_invalidated_and_bound_again(pd, cq, pair, region, local, signaled):
    left, right = pair
    mw = pd.alloc_mw()
    bind(cq, right, mw, region[64:128])
    old = mw.rkey
    flags = pvl.SendFlags.SIGNALED if signaled else pvl.SendFlags(0)
    right.post_send(pvl.SendWR(opcode=OP.LOCAL_INV, invalidate_rkey=old, send_flags=flags, wr_id=9))
    if signaled:
        (wc,) = completions(cq, 1)
        assert (wc.wr_id, wc.status, wc.opcode) == (9, S.SUCCESS, pvl.WCOpcode.LOCAL_INV)
        assert mw.mr is None
    bind(cq, right, mw, region[256:272])
    assert mw.rkey != old
    assert read(cq, left, local, region.addr + 256, mw.rkey) == S.SUCCESS
    assert read(cq, left, local, region.addr + 64, old) == S.REM_ACCESS_ERR


def test_after_invalidation_the_region_is_free(pd, cq, pair, region):
    _, right = pair
    mw = pd.alloc_mw()
    bind(cq, right, mw, region[64:128])
    with pytest.raises(pvl.BusyError, match=r"cannot be deregistered.*invalidate, unbind or close"):
        region.close()
    assert not region.closed
    right.post_send(pvl.SendWR(opcode=OP.LOCAL_INV, invalidate_rkey=mw.rkey))
    assert done(cq) == [S.SUCCESS]
    region.close()
    assert repr(mw).endswith("free>")


def test_the_peer_invalidates_it(pd, cq, pair, region, local):
    left, right = pair
    mw = pd.alloc_mw()
    bind(cq, right, mw, region[64:128])
    target = pd.alloc(64)
    right.post_recv(pvl.RecvWR(sg_list=[target], wr_id=4))
    left.post_send(pvl.SendWR(opcode=OP.SEND_WITH_INV, sg_list=[local[:5]], invalidate_rkey=mw.rkey))
    found = {wc.is_recv: wc for wc in completions(cq, 2)}
    assert {wc.status for wc in found.values()} == {S.SUCCESS}
    arrived = found[True]
    assert (arrived.wr_id, arrived.byte_len, arrived.invalidated_rkey) == (4, 5, mw.rkey)
    assert arrived.imm_data is None
    assert found[False].invalidated_rkey is None
    assert mw.mr is None  # the library saw it, too
    region.close()
    other = pd.alloc(64, BINDABLE)
    bind(cq, right, mw, other)  # and can bind it again


def test_invalidated_by_the_peer_it_is_void(pd, cq, pair, region, local):
    left, right = pair
    mw = pd.alloc_mw()
    bind(cq, right, mw, region[64:128])
    right.post_recv(pvl.RecvWR())
    left.post_send(pvl.SendWR(opcode=OP.SEND_WITH_INV, invalidate_rkey=mw.rkey))
    assert done(cq, 2) == [S.SUCCESS] * 2
    assert read(cq, left, local, region.addr + 64, mw.rkey) == S.REM_ACCESS_ERR


def test_an_invalidation_that_the_library_cannot_see(context, pd, region):
    plain, bypassed = context.create_cq(20), context.create_cq(20)
    left, right = make_qp(pd, plain), make_qp(pd, bypassed)
    connect_qps(left, right)
    mw = pd.alloc_mw()
    bind(bypassed, right, mw, region[64:128])
    right.post_recv(pvl.RecvWR())
    left.post_send(pvl.SendWR(opcode=OP.SEND_WITH_INV, invalidate_rkey=mw.rkey))
    assert done(plain) == [S.SUCCESS]
    assert lib.ibv_poll_cq(bypassed._handle, 1, ffi.new("struct ibv_wc *")) == 1
    with pytest.raises(pvl.StateError, match="before it was invalidated"):
        right.bind_mw(mw, region[:8], A.REMOTE_READ)
    mw.assume_invalidated()
    bind(bypassed, right, mw, region[:8])


@pytest.mark.parametrize("fields", [pvl.CreateCQWCFlags.WITH_IMM, pvl.CreateCQWCFlags.WITH_BYTE_LEN])
def test_an_extended_cq_sees_it(context, pd, region, fields):
    plain = context.create_cq(20)
    seeing = context.create_cq_ex(20, wc_flags=fields)
    left, right = make_qp(pd, plain), make_qp(pd, seeing)
    connect_qps(left, right)
    mw = pd.alloc_mw()
    bind(seeing, right, mw, region[64:128])
    right.post_recv(pvl.RecvWR())
    left.post_send(pvl.SendWR(opcode=OP.SEND_WITH_INV, invalidate_rkey=mw.rkey))
    assert done(plain) == [S.SUCCESS]
    (wc,) = completions(seeing, 1)
    asked = fields == pvl.CreateCQWCFlags.WITH_IMM
    assert (wc.invalidated_rkey, wc.imm_data, mw.mr) == (mw.rkey if asked else None, None, None)


def test_a_batch_of_the_work_request_api(context, pd, cq, region, local):
    ops = pvl.SendOpsFlags
    cap = pvl.QPCap(max_send_wr=8, max_recv_wr=8, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
    flags = ops.WITH_BIND_MW | ops.WITH_LOCAL_INV | ops.WITH_SEND
    right = pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, send_ops_flags=flags))
    left = make_qp(pd, cq)
    connect_qps(left, right, timeout=10)
    mw = pd.alloc_mw()
    key = mw.next_rkey()
    with right.wr_batch() as wr:
        wr.bind_mw(mw, key, pvl.MWBindInfo.of(region[64:128], A.REMOTE_READ))
    assert done(cq) == [S.SUCCESS]
    assert (mw.rkey, mw.mr) == (key, region)
    assert read(cq, left, local, region.addr + 64, key) == S.SUCCESS
    with right.wr_batch() as wr:
        wr.local_inv(key)
    assert done(cq) == [S.SUCCESS]
    assert mw.mr is None
    in_thread(right.close)(10)
    assert not mw.closed


def test_the_request_api_of_one_list(pd, cq, pair, region, local):
    """Bind and hand over the key in one list: the message cannot be earlier than the binding."""
    left, right = pair
    mw = pd.alloc_mw()
    key = mw.next_rkey()
    info = pvl.MWBindInfo.of(region[64:128], A.REMOTE_READ)
    local.view[:4] = key.to_bytes(4, "big")
    target = pd.alloc(64)
    left.post_recv(pvl.RecvWR(sg_list=[target], wr_id=2))
    right.post_send(
        pvl.SendWR(opcode=OP.BIND_MW, mw=mw, rkey=key, bind_info=info, send_flags=pvl.SendFlags(0)),
        pvl.SendWR(sg_list=[local[:4]], wr_id=1),
    )
    assert mw.rkey == key
    assert done(cq, 2) == [S.SUCCESS] * 2
    assert read(cq, left, local, region.addr + 64, int.from_bytes(target.view[:4], "big")) == S.SUCCESS
    assert right.sends_in_flight == 0


# ---------------------------------------------------------------- bindings that fail


def poisoned(pd, cq, right, mw, region):
    """Post a binding that the device refuses: the key it is given for the region is another's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(mw), "_check_bind_2", lambda self, rkey: None)
        right.post_send(
            pvl.SendWR(
                opcode=OP.BIND_MW, mw=mw, rkey=mw.next_rkey(), bind_info=pvl.MWBindInfo.of(region, A.REMOTE_READ)
            )
        )


def test_a_binding_that_the_device_refuses_leaves_the_one_before(pd, cq, pair, region):
    _, right = pair
    mw = pd.alloc_mw()
    bind(cq, right, mw, region[64:128])
    key = mw.rkey
    other = pd.alloc(64, BINDABLE)
    poisoned(pd, cq, right, mw, other)  # bound already, so the device refuses
    assert mw.rkey != key
    assert done(cq) == [S.WR_FLUSH_ERR]  # and not MW_BIND_ERR: soft-RoCE forgets the reason
    assert (mw.rkey, mw.mr) == (key, region)
    assert right.state == pvl.QPState.ERR
    other.close()
    with pytest.raises(pvl.BusyError):
        region.close()
    mw.close()
    region.close()


def test_a_flushed_binding_of_type_1_does_not_spoil_the_next(pd, cq, pair, region, local):
    left, right = pair
    mw = pd.alloc_mw(TYPE_1)
    key = mw.rkey
    dead = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(*dead, timeout=10)
    dead[0].to_error()
    dead[0].bind_mw(mw, region[:64], A.REMOTE_READ)
    assert mw.rkey != key
    assert done(cq) == [S.WR_FLUSH_ERR]
    assert (mw.rkey, mw.mr) == (key, None)
    bind(cq, right, mw, region[64:128])  # the driver counts on from the right key
    assert read(cq, left, local, region.addr + 64, mw.rkey) == S.SUCCESS


def test_several_bindings_that_are_flushed(pd, cq, pair, region):
    _, right = pair
    mw = pd.alloc_mw(TYPE_1)
    bind(cq, right, mw, region[64:128])
    key = mw.rkey
    other = pd.alloc(64, BINDABLE)
    right.to_error()
    for target in (other, region, other):
        right.bind_mw(mw, target, A.REMOTE_READ)
    assert done(cq, 3) == [S.WR_FLUSH_ERR] * 3
    assert (mw.rkey, mw.mr) == (key, region)
    other.close()


def test_an_invalidation_that_was_flushed_leaves_it_bound(pd, cq, pair, region):
    _, right = pair
    mw = pd.alloc_mw()
    bind(cq, right, mw, region[64:128])
    right.to_error()
    right.post_send(pvl.SendWR(opcode=OP.LOCAL_INV, invalidate_rkey=mw.rkey))
    assert done(cq) == [S.WR_FLUSH_ERR]
    assert mw.mr is region
    with pytest.raises(pvl.StateError, match="before it was invalidated"):
        right.bind_mw(mw, region[:8], A.REMOTE_READ)


def test_a_key_that_is_nobodys(pd, cq, pair):
    _, right = pair
    mw = pd.alloc_mw()
    key = mw.rkey
    mw.close()
    right.post_send(pvl.SendWR(opcode=OP.LOCAL_INV, invalidate_rkey=key))
    assert done(cq) == [S.WR_FLUSH_ERR]  # and not LOC_QP_OP_ERR: soft-RoCE forgets the reason


@pytest.mark.parametrize(("number", "error"), [(errno.ENOMEM, pvl.QueueFullError), (errno.EINVAL, pvl.VerbsOSError)])
def test_a_request_that_the_verb_refuses_changes_nothing(pd, cq, pair, region, monkeypatch, number, error):
    class Full:
        def __getattr__(self, name):
            return getattr(lib, name) if name != "ibv_bind_mw" else lambda qp, mw, bind: number

    _, right = pair
    mw = pd.alloc_mw(TYPE_1)
    bind(cq, right, mw, region[64:128])
    key = mw.rkey
    other = pd.alloc(64, BINDABLE)
    with monkeypatch.context() as patch:
        patch.setattr("pyverbs_lite._memory.windows.lib", Full())
        with pytest.raises(error, match="ibv_bind_mw") as caught:
            mw.bind(right, other, A.REMOTE_READ)
    assert (caught.value.posted, caught.value.errno) == (0, number)
    assert (mw.rkey, mw.mr, right.sends_in_flight) == (key, region, 0)
    other.close()
    bind(cq, right, mw, region[:8])


# ---------------------------------------------------------------- what is refused before it is posted


def test_a_region_that_no_window_can_be_bound_to(pd, pair):
    _, right = pair
    mw = pd.alloc_mw()
    plain = pd.alloc(64, ALL_ACCESS)
    with pytest.raises(ValueError, match="registered without MW_BIND"):
        right.bind_mw(mw, plain, A.REMOTE_READ)
    read_only = pd.alloc(64, A.MW_BIND | A.REMOTE_READ)
    with pytest.raises(ValueError, match="registered without LOCAL_WRITE"):
        right.bind_mw(mw, read_only, A.REMOTE_WRITE)
    right.bind_mw(mw, read_only, A.REMOTE_READ)


@both
@pytest.mark.parametrize("access", [A.LOCAL_WRITE, A.MW_BIND | A.REMOTE_READ, A.ON_DEMAND])
def test_flags_that_a_window_does_not_take(pd, pair, region, mw_type, access):
    with pytest.raises(ValueError, match="takes remote access and ZERO_BASED only"):
        pair[1].bind_mw(pd.alloc_mw(mw_type), region, access)


def test_zero_based_is_for_type_2(pd, pair, region):
    with pytest.raises(ValueError, match="type 2 only"):
        pair[1].bind_mw(pd.alloc_mw(TYPE_1), region, A.REMOTE_READ | A.ZERO_BASED)


@both
def test_nothing_and_what_is_no_memory(pd, pair, region, mw_type):
    mw = pd.alloc_mw(mw_type)
    with pytest.raises(ValueError, match="at least one byte"):
        pair[1].bind_mw(mw, region[5:5], A.REMOTE_READ)
    with pytest.raises(TypeError, match="not to"):
        pair[1].bind_mw(mw, bytearray(8), A.REMOTE_READ)
    with pytest.raises(TypeError, match="binds an MW"):
        pair[1].bind_mw(region, region, A.REMOTE_READ)


def test_type_2_is_not_unbound_like_type_1(pd, pair, region):
    mw = pd.alloc_mw()
    with pytest.raises(ValueError, match="freed by LOCAL_INV"):
        pair[1].bind_mw(mw, None)
    info = pvl.MWBindInfo(region, region.addr, 0, A.REMOTE_READ)
    with pytest.raises(ValueError, match="freed by LOCAL_INV"):
        pair[1].post_send(pvl.SendWR(opcode=OP.BIND_MW, mw=mw, rkey=mw.next_rkey(), bind_info=info))


def test_another_pd(context, cq, pd, pair, region):
    with context.alloc_pd() as other:
        foreign = other.alloc_mw()
        with pytest.raises(ValueError, match=r"one PD|another PD"):
            pair[1].bind_mw(foreign, region, A.REMOTE_READ)
        elsewhere = other.alloc(64, BINDABLE)
        with pytest.raises(ValueError, match=r"one PD|another PD"):
            pair[1].bind_mw(pd.alloc_mw(), elsewhere, A.REMOTE_READ)


@pytest.mark.parametrize(("offset", "length"), [(-1, 8), (4090, 8), (0, 4097)])
def test_a_range_by_hand_that_is_outside(pd, pair, region, offset, length):
    mw = pd.alloc_mw()
    info = pvl.MWBindInfo(region, region.addr + offset, length, A.REMOTE_READ)
    with pytest.raises(ValueError, match="are not within"):
        pair[1].post_send(pvl.SendWR(opcode=OP.BIND_MW, mw=mw, rkey=mw.next_rkey(), bind_info=info))


def test_a_key_that_is_not_the_windows(pd, pair, region):
    mw = pd.alloc_mw()
    info = pvl.MWBindInfo.of(region, A.REMOTE_READ)
    with pytest.raises(ValueError, match="low byte only"):
        pair[1].post_send(pvl.SendWR(opcode=OP.BIND_MW, mw=mw, rkey=mw.rkey ^ 0x100, bind_info=info))


def test_type_1_by_a_request(pd, pair, region):
    mw = pd.alloc_mw(TYPE_1)
    info = pvl.MWBindInfo.of(region, A.REMOTE_READ)
    with pytest.raises(ValueError, match="type 1 is bound by"):
        pair[1].post_send(pvl.SendWR(opcode=OP.BIND_MW, mw=mw, rkey=mw.rkey, bind_info=info))


@both
def test_a_qp_that_cannot_send_yet(pd, cq, region, mw_type):
    mw = pd.alloc_mw(mw_type)
    key = mw.rkey
    with pytest.raises(pvl.StateError, match="bring it to RTS first"):
        make_qp(pd, cq).bind_mw(mw, region, A.REMOTE_READ)
    assert (mw.rkey, mw.mr) == (key, None)
    mw.close()


# ---------------------------------------------------------------- ends


@both
@pytest.mark.parametrize("first", ["mw", "mr", "qp"])
def test_closed_in_any_order(context, cq, mw_type, first):
    pd = context.alloc_pd()
    things = {"mw": pd.alloc_mw(mw_type), "mr": pd.alloc(4096, BINDABLE)}  # the window is older than its region
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right)
    things["qp"] = right
    bind(cq, right, things["mw"], things["mr"][64:128])
    if first == "mr":
        with pytest.raises(pvl.BusyError):
            things["mr"].close()
    else:
        in_thread(things[first].close)(10)
        assert things["mw"].closed == (first == "mw" or mw_type == TYPE_2)
    in_thread(pd.close)(10)
    assert all(thing.closed for thing in things.values())


@both
def test_closing_everything_with_a_window_bound(mw_type):
    context = pvl.open_device()
    pd, cq = context.alloc_pd(), context.create_cq(20)
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right)
    mr = pd.alloc(4096, BINDABLE)
    for _ in range(3):
        right.bind_mw(pd.alloc_mw(mw_type), mr[64:128], A.REMOTE_READ)  # their completions are never polled
    in_thread(context.close)(10)
    assert mr.closed


@both
def test_a_window_in_flight_does_not_close(pd, cq, pair, region, mw_type):
    _, right = pair
    mw = pd.alloc_mw(mw_type)
    right.bind_mw(mw, region[64:128], A.REMOTE_READ)
    with pytest.raises(pvl.BusyError, match=r"used by 1 request\(s\) in flight"):
        mw.close()
    with pytest.raises(pvl.BusyError, match=r"used by 1 request\(s\) in flight"):
        region.close()
    assert done(cq) == [S.SUCCESS]
    mw.close()
    region.close()


def test_closing_a_qp_with_a_binding_in_flight(pd, cq, pair, region):
    _, right = pair
    mw = pd.alloc_mw()
    right.bind_mw(mw, region[64:128], A.REMOTE_READ)
    in_thread(right.close)(10)
    assert mw.closed
    region.close()


def test_an_invalidated_window_outlives_its_qp(pd, cq, pair, region):
    _, right = pair
    mw = pd.alloc_mw()
    bind(cq, right, mw, region[64:128])
    right.post_send(pvl.SendWR(opcode=OP.LOCAL_INV, invalidate_rkey=mw.rkey))
    assert done(cq) == [S.SUCCESS]
    in_thread(right.close)(10)
    assert not mw.closed


def test_a_bound_window_keeps_its_region(pd, cq, pair, local):
    left, right = pair
    region = pd.alloc(4096, BINDABLE)
    region.view[64:80] = b"sixteen bytes it"
    watch, address = weakref.ref(region), region.addr
    mw = pd.alloc_mw()
    bind(cq, right, mw, region[64:128])
    del region
    gc.collect()
    assert watch() is not None
    assert read(cq, left, local, address + 64, mw.rkey) == S.SUCCESS
    assert bytes(local.view[:16]) == b"sixteen bytes it"
    with pytest.warns(ResourceWarning, match="MR of 4096 bytes was never closed"):
        mw.close()  # nobody else has the region
    assert watch() is None


@both
def test_dropped_together(context, cq, mw_type):
    def make():
        pd = context.alloc_pd()
        left, right = make_qp(pd, cq), make_qp(pd, cq)
        connect_qps(left, right)
        mw, mr = pd.alloc_mw(mw_type), pd.alloc(64, BINDABLE)
        bind(cq, right, mw, mr)
        mw.cycle = [mw, mr, right, left, pd]
        mr.cycle = mw.cycle

    def drop():
        make()
        with pytest.warns(ResourceWarning) as caught:
            gc.collect()
        return [str(warning.message) for warning in caught]

    messages = in_thread(drop)(20)
    assert len(messages) == 5
    assert all("it was destroyed now" in message for message in messages)


def test_left_open_until_the_program_ends():
    """A soft-RoCE device takes 50 s to destroy a QP with a window bound, so the order counts here, too."""
    code = """
import os, sys
sys.path.insert(0, os.environ["TESTS"])
import pyverbs_lite as pvl
from support import ALL_ACCESS, completions, connect_qps, make_qp

context = pvl.open_device()
pd, cq = context.alloc_pd(), context.create_cq(10)
windows = [pd.alloc_mw(kind) for kind in pvl.MWType]  # older than the QP
mr = pd.alloc(64, ALL_ACCESS | pvl.AccessFlags.MW_BIND)
left, right = make_qp(pd, cq), make_qp(pd, cq)
connect_qps(left, right)
for mw in windows:
    right.bind_mw(mw, mr, pvl.AccessFlags.REMOTE_READ)
assert all(wc.status == pvl.WCStatus.SUCCESS for wc in completions(cq, 2))
"""
    environment = {**os.environ, "TESTS": os.path.dirname(__file__)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=25, check=False, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
