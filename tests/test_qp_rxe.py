"""Queue pairs on a real driver: states, posting, access, immediates, inline data, atomics, failures."""

from __future__ import annotations

import errno
import gc
import select
import struct
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

import pytest
from support import (
    ALL_ACCESS,
    LEFT_PSN,
    RIGHT_PSN,
    completions,
    connect_qps,
    in_thread,
    make_qp,
    own_gid,
    path_to,
)

import pyverbs_lite as pvl
from pyverbs_lite import qp_fsm
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

A, M, Op, S, W = pvl.AccessFlags, pvl.QPAttrMask, pvl.WROpcode, pvl.QPState, pvl.WCStatus
RC, UC, UD = pvl.QPType.RC, pvl.QPType.UC, pvl.QPType.UD
INLINE, SIGNALED, QUIET = pvl.SendFlags.INLINE, pvl.SendFlags.SIGNALED, pvl.SendFlags(0)
#: Short enough for tests of failure: 4.096 µs × 2^8 for an acknowledgement, tried twice.
IMPATIENT = {"timeout": 8, "retry_cnt": 1, "rnr_retry": 0}


@pytest.fixture
def cq(context):
    return context.create_cq(500, context.create_comp_channel())


@pytest.fixture
def qp(pd, cq):
    return make_qp(pd, cq)


@pytest.fixture
def pair(pd, cq):
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right, **IMPATIENT)
    return left, right


@pytest.fixture
def mr(pd):
    return pd.alloc(8192, ALL_ACCESS)


def remote_of(memory):
    return pvl.RemoteBuffer(memory.addr, memory.rkey, memory.length)


def rtr_values(qp, **changes):
    row = own_gid(qp.context)
    return {"ah_attr": path_to(qp.context, row), "dest_qp_num": qp.qp_num, "rq_psn": 0x00BEEF, **changes}


def attr_for(target, qp):
    """Give the attributes of one step, with its state."""
    given = {
        S.INIT: {"port_num": 1, "pkey_index": 0, "qp_access_flags": A.REMOTE_READ},
        S.RTR: {**rtr_values(qp), "path_mtu": pvl.MTU.MTU_1024, "max_dest_rd_atomic": 3, "min_rnr_timer": 14},
        S.RTS: {"sq_psn": 0xFEDCBA, "timeout": 15, "retry_cnt": 5, "rnr_retry": 6, "max_rd_atomic": 2},
    }
    return {"qp_state": target, **given[target]}


def bring(qp, target):
    for state in (S.INIT, S.RTR, S.RTS):
        qp.modify(pvl.QPAttr(**attr_for(state, qp)))
        if state == target:
            return
    assert target in (S.SQD, S.ERR)
    qp.modify(pvl.QPAttr(qp_state=target))


# ---------------------------------------------------------------- the state machine


def test_the_way_to_rts_and_what_the_device_then_says(qp):
    assert (qp.state, qp.query().qp_state) == (S.RESET, S.RESET)
    qp.to_init(qp_access_flags=A.REMOTE_READ | A.REMOTE_WRITE)
    assert (qp.state, qp.query().qp_state) == (S.INIT, S.INIT)
    qp.to_rtr(**rtr_values(qp), path_mtu=512, max_dest_rd_atomic=7, min_rnr_timer=13)
    assert (qp.state, qp.query().qp_state) == (S.RTR, S.RTR)
    qp.to_rts(sq_psn=0xABCDEF, timeout=17, retry_cnt=3, rnr_retry=4, max_rd_atomic=9)
    attr = qp.query()
    assert (qp.state, attr.qp_state) == (S.RTS, S.RTS)
    assert (attr.rq_psn, attr.sq_psn, attr.dest_qp_num) == (0x00BEEF, 0xABCDEF, qp.qp_num)
    assert (attr.path_mtu, attr.min_rnr_timer) == (pvl.MTU.MTU_512, 13)
    assert (attr.timeout, attr.retry_cnt, attr.rnr_retry) == (17, 3, 4)
    assert attr.max_dest_rd_atomic == 8  # rxe rounds it up to a power of two
    assert attr.max_rd_atomic == 16
    assert attr.qp_access_flags == A.REMOTE_READ | A.REMOTE_WRITE
    assert attr.port_num == 1


def test_the_path_is_global_and_leaves_the_subnet(qp):
    row = own_gid(qp.context)
    qp.to_init()
    qp.to_rtr(**rtr_values(qp))
    address = qp.query().ah_attr
    assert address.is_global
    assert (address.grh.dgid, address.grh.sgid_index, address.grh.hop_limit) == (row.gid, row.gid_index, 64)
    assert address.port_num == 1


def test_a_local_path_is_refused_on_ethernet(qp):
    qp.to_init()
    with pytest.raises(ValueError, match="need a global route"):
        qp.to_rtr(**rtr_values(qp, ah_attr=pvl.AHAttr(port_num=1, dlid=0)))
    assert qp.state == qp.query().qp_state == S.INIT
    qp.to_rtr(**rtr_values(qp))


@pytest.mark.parametrize("target", [S.INIT, S.RTR, S.RTS])
def test_each_required_attribute_left_out_in_turn(qp, target):
    before = {S.INIT: S.RESET, S.RTR: S.INIT, S.RTS: S.RTR}[target]
    if before != S.RESET:
        bring(qp, before)
    full = attr_for(target, qp)
    needed = qp_fsm.required(RC, before, target)
    names = [name for name in full if qp_fsm.mask_of({name: 0}) & needed]
    assert len(names) >= 3
    for name in names:
        rest = {other: value for other, value in full.items() if other != name}
        with pytest.raises(pvl.AttributeMaskError, match=name) as caught:
            qp.modify(pvl.QPAttr(**rest))
        assert caught.value.missing == qp_fsm.mask_of({name: 0})
        assert (caught.value.current, caught.value.target) == (before, target)
        assert qp.state == qp.query().qp_state == before
    qp.modify(pvl.QPAttr(**full))
    assert qp.state == qp.query().qp_state == target


def test_an_attribute_that_does_not_belong(qp):
    with pytest.raises(pvl.AttributeMaskError, match="SQ_PSN") as caught:
        qp.modify(pvl.QPAttr(**attr_for(S.INIT, qp), sq_psn=1))
    assert caught.value.extra == M.SQ_PSN
    assert qp.state == S.RESET


@pytest.mark.parametrize(
    ("before", "step"), [(None, "to_rtr"), (None, "to_rts"), (S.INIT, "to_rts"), (S.RTR, "to_rtr"), (S.RTS, "to_rtr")]
)
def test_steps_in_the_wrong_order(qp, before, step):
    if before:
        bring(qp, before)
    values = rtr_values(qp) if step == "to_rtr" else {"sq_psn": 3}
    with pytest.raises(pvl.InvalidTransition, match=f"{(before or S.RESET).name} → {step[3:].upper()}"):
        getattr(qp, step)(**values)
    assert qp.state == qp.query().qp_state == (before or S.RESET)


@pytest.mark.parametrize("values", [{"sq_psn": 3}, {}, {"timeout": 20}])
def test_a_step_that_was_made_already_is_not_ignored(qp, values):
    bring(qp, S.RTS)
    with pytest.raises(pvl.AttributeMaskError, match="TIMEOUT"):
        qp.to_rts(**values)


def test_init_may_be_changed_in_init(qp):
    qp.to_init(qp_access_flags=A.REMOTE_READ)
    qp.to_init(qp_access_flags=A.REMOTE_WRITE)
    assert qp.query().qp_access_flags == A.REMOTE_WRITE


@pytest.mark.parametrize("index", [77, 255])
def test_an_empty_gid_row_leaves_everything_as_it_was(qp, index):
    row = own_gid(qp.context)
    qp.to_init()
    path = pvl.AHAttr(port_num=1, grh=pvl.GlobalRoute(dgid=row.gid, sgid_index=index))
    with pytest.raises(
        pvl.RouteError, match=f"INIT → RTR with .*: GID index {index} of rxe0 port 1 is empty"
    ) as caught:
        qp.to_rtr(**rtr_values(qp, ah_attr=path))
    assert caught.value.errno > 0
    assert f"{row.gid_index} ({row})" in str(caught.value)  # what is in use
    assert qp.state == qp.query().qp_state == S.INIT
    qp.to_rtr(**rtr_values(qp))
    qp.to_rts(sq_psn=1)
    assert qp.state == qp.query().qp_state == S.RTS


@pytest.mark.parametrize("index", [-1, 256, 1023, 1 << 31])
def test_a_gid_index_is_never_cut_to_8_bits(qp, index):
    qp.to_init()
    path = pvl.AHAttr(port_num=1, grh=pvl.GlobalRoute(dgid="::ffff:192.0.2.1", sgid_index=index))
    with pytest.raises(ValueError, match="sgid_index"):
        qp.to_rtr(**rtr_values(qp, ah_attr=path))
    assert qp.state == S.INIT


@pytest.mark.parametrize("dgid", ["2001:db8:ffff::9", "fe80::9"])
def test_an_ipv6_peer_by_an_ipv4_row(qp, dgid):
    row = own_gid(qp.context)
    qp.to_init()
    path = pvl.AHAttr(port_num=1, grh=pvl.GlobalRoute(dgid=dgid, sgid_index=row.gid_index))
    with pytest.raises(pvl.RouteError, match="one is an IPv4 address and the other is none"):
        qp.to_rtr(**rtr_values(qp, ah_attr=path))
    assert qp.state == S.INIT


def test_no_route_to_the_peer(qp):
    row = own_gid(qp.context)
    qp.to_init()
    path = pvl.AHAttr(port_num=1, grh=pvl.GlobalRoute(dgid="::ffff:198.51.100.9", sgid_index=row.gid_index))
    with pytest.raises(pvl.RouteError, match=f"no path leads from GID index {row.gid_index} to the remote GID"):
        qp.to_rtr(**rtr_values(qp, ah_attr=path))
    assert qp.state == qp.query().qp_state == S.INIT


@pytest.mark.parametrize("port_num", [0, 2, 255])
def test_a_port_that_is_not_there(qp, port_num):
    with pytest.raises(ValueError, match="port_num"):
        qp.to_init(port_num=port_num)
    qp.to_init()
    row = own_gid(qp.context)
    path = pvl.AHAttr(port_num=port_num, grh=pvl.GlobalRoute(dgid=row.gid, sgid_index=row.gid_index))
    with pytest.raises(ValueError, match="port_num"):
        qp.to_rtr(**rtr_values(qp, ah_attr=path))


@pytest.mark.parametrize("psn", [1 << 24, -1, 0xFFFFFFFF])
def test_a_psn_outside_24_bits(qp, psn):
    qp.to_init()
    with pytest.raises(ValueError, match=r"rq_psn .* 24 bits"):
        qp.to_rtr(**rtr_values(qp, rq_psn=psn))
    assert qp.state == S.INIT
    qp.to_rtr(**rtr_values(qp))
    with pytest.raises(ValueError, match=r"sq_psn .* 24 bits"):
        qp.to_rts(sq_psn=psn)
    assert qp.state == qp.query().qp_state == S.RTR


@pytest.mark.parametrize("psn", [1.0, True, "1", b"\0\0\1", 3 + 0j])
def test_a_psn_that_is_no_number(qp, psn):
    qp.to_init()
    with pytest.raises(TypeError, match="rq_psn"):
        qp.to_rtr(**rtr_values(qp, rq_psn=psn))
    qp.to_rtr(**rtr_values(qp))
    with pytest.raises(TypeError, match="sq_psn"):
        qp.to_rts(sq_psn=psn)


def test_a_psn_that_was_not_given(qp):
    qp.to_init()
    with pytest.raises(pvl.AttributeMaskError, match="missing RQ_PSN"):
        qp.to_rtr(**rtr_values(qp, rq_psn=None))
    qp.to_rtr(**rtr_values(qp))
    with pytest.raises(pvl.AttributeMaskError, match="missing SQ_PSN"):
        qp.to_rts()


@pytest.mark.parametrize("depth", [129, 255])
def test_read_depths_beyond_the_device(qp, depth):
    limit = qp.context.query_device().max_qp_rd_atom
    assert depth > limit
    qp.to_init()
    with pytest.raises(ValueError, match=f"max_dest_rd_atomic must be 0 to {limit}"):
        qp.to_rtr(**rtr_values(qp, max_dest_rd_atomic=depth))
    qp.to_rtr(**rtr_values(qp))
    with pytest.raises(ValueError, match="max_rd_atomic"):
        qp.to_rts(sq_psn=1, max_rd_atomic=depth)


def test_reset_is_a_home_that_can_be_gone_to_from_anywhere(qp):
    qp.to_reset()
    qp.to_reset()
    for state in (S.INIT, S.RTR, S.RTS, S.SQD, S.ERR):
        bring(qp, state)
        assert qp.state == state
        qp.to_reset()
        assert qp.state == qp.query().qp_state == S.RESET


def test_error_from_every_state_that_has_work(qp):
    with pytest.raises(pvl.InvalidTransition, match="no work to flush"):
        qp.to_error()
    for state in (S.INIT, S.RTR, S.RTS, S.SQD, S.ERR):
        bring(qp, state)
        qp.to_error()
        assert qp.state == qp.query().qp_state == S.ERR
        qp.to_reset()


def wait_until_drained(qp, seconds=5):
    end = time.monotonic() + seconds
    while qp.sq_draining:
        assert time.monotonic() < end


def test_a_queue_that_is_still_draining(pd, cq, mr):
    left = stuck(pd, cq, 5)[0]
    left.post_send(pvl.SendWR(wr_id=1, sg_list=[mr[:8]]))
    left.to_sqd()
    assert left.sq_draining  # for ever: in SQD rxe does not send again what was not received
    with pytest.raises(pvl.VerbsOSError, match=r"SQD → RTS .* requests are still in flight; wait until sq_draining"):
        left.to_rts()
    assert left.state == left.query().qp_state == S.SQD
    left.to_reset()  # whatever is in flight; rxe itself would refuse it
    assert left.state == left.query().qp_state == S.RESET
    assert left.sends_in_flight == 0
    mr.close()


def test_sqd_and_back(pair, cq, mr):
    left, right = pair
    left.to_sqd()
    assert left.state == S.SQD
    right.post_recv(pvl.RecvWR(wr_id=2))
    left.post_send(pvl.SendWR(wr_id=1))
    wait_until_drained(left)
    assert cq.poll() == []
    left.to_rts()
    assert left.state == left.query().qp_state == S.RTS
    right.post_recv(pvl.RecvWR(wr_id=4))
    left.post_send(pvl.SendWR(wr_id=3))  # rxe goes on with the queue at the next doorbell only
    assert {(wc.wr_id, wc.status) for wc in completions(cq, 4)} == {(n, W.SUCCESS) for n in (1, 2, 3, 4)}
    left.to_sqd()
    with pytest.raises(pvl.AttributeMaskError, match="SQ_PSN"):  # refused rather than ignored
        left.to_rts(sq_psn=5)


def force(qp, state):
    """Move a QP past the library."""
    raw = ffi.new("struct ibv_qp_attr *")
    raw.qp_state = state
    assert lib.ibv_modify_qp(qp._handle, raw, lib.IBV_QP_STATE) == 0


def test_what_was_done_behind_the_library_is_read_again(qp):
    bring(qp, S.RTS)
    force(qp, S.ERR)
    assert qp.state == S.RTS  # nobody has asked
    assert qp.query().qp_state == qp.state == S.ERR
    qp.to_reset()

    bring(qp, S.RTS)
    force(qp, S.ERR)
    with pytest.raises(pvl.InvalidTransition, match="ERR → SQD"):  # it was refused, so the state was asked for
        qp.to_sqd()
    assert qp.state == S.ERR
    qp.to_reset()

    bring(qp, S.RTR)
    force(qp, S.RESET)
    qp.to_init()  # RTR → INIT is no edge, RESET → INIT is
    assert qp.state == qp.query().qp_state == S.INIT


def test_posting_looks_again_before_it_refuses(qp):
    bring(qp, S.RTS)
    qp._ledger.state = S.INIT
    qp.post_send(pvl.SendWR())
    assert qp.state == S.RTS


def test_modify_takes_attributes(qp):
    for bad in ("INIT", S.INIT, None, {"qp_state": S.INIT}):
        with pytest.raises(TypeError, match="modify takes a QPAttr"):
            qp.modify(bad)


@pytest.mark.parametrize("qp_type", [UC, UD])
def test_the_other_types_through_their_states(pd, cq, qp_type):
    qp = make_qp(pd, cq, qp_type=qp_type)
    assert repr(qp) == f"<{qp_type.name} QP {qp.qp_num:#x} in RESET>"
    qp.to_init(qp_access_flags=A.REMOTE_WRITE, qkey=0x11223344)
    if qp_type == UC:
        qp.to_rtr(**rtr_values(qp))
    else:
        qp.to_rtr()
    qp.to_rts(sq_psn=0x654321)
    attr = qp.query()
    assert (qp.state, attr.qp_state, attr.sq_psn) == (S.RTS, S.RTS, 0x654321)
    if qp_type == UD:
        assert attr.qkey == 0x11223344
        with pytest.raises(ValueError, match="ah is missing"):  # a driver would follow the null pointer
            qp.post_send(pvl.SendWR())
    qp.to_error()
    qp.to_reset()


def test_an_unreliable_connection_moves_bytes(pd, cq, mr):
    row = own_gid(pd.context)
    left, right = make_qp(pd, cq, qp_type=UC), make_qp(pd, cq, qp_type=UC)
    for mine, other, my_psn, its_psn in ((left, right, LEFT_PSN, RIGHT_PSN), (right, left, RIGHT_PSN, LEFT_PSN)):
        mine.to_init(qp_access_flags=A.REMOTE_WRITE)
        mine.to_rtr(ah_attr=path_to(mine.context, row), dest_qp_num=other.qp_num, rq_psn=its_psn)
        mine.to_rts(sq_psn=my_psn)
    right.post_recv(pvl.RecvWR(sg_list=[mr[100:200]]))
    mr.view[:5] = b"hello"
    left.post_send(pvl.SendWR(sg_list=[mr[:5]]))
    assert {wc.status for wc in completions(cq, 2)} == {W.SUCCESS}
    assert bytes(mr.view[100:106]) == b"hello\0"


# ---------------------------------------------------------------- creation


def test_the_device_rounds_up_and_says_so(pd, cq):
    for depth in (1, 3, 16, 100):
        with make_qp(pd, cq, depth=depth, sge=2, inline=17) as qp:
            assert depth <= qp.cap.max_send_wr < 2 * depth + 2
            assert depth <= qp.cap.max_recv_wr < 2 * depth + 2
            assert qp.cap.max_send_sge >= 2
            assert qp.cap.max_inline_data >= 17
            assert qp.query().cap.max_send_wr == qp.cap.max_send_wr


@pytest.mark.parametrize(
    "change",
    [
        {"depth": -1},
        {"depth": 1 << 21},
        {"depth": 1 << 32},
        {"sge": 33},
        {"sge": -1},
        {"inline": -1},
        {"inline": 1 << 31},
    ],
)
def test_sizes_outside_the_devices_limits(pd, cq, change):
    with pytest.raises(ValueError, match=r"cap\.max_"):
        make_qp(pd, cq, **change)


@pytest.mark.parametrize("inline", [1 << 12, 1 << 20, (1 << 31) - 1])
def test_a_size_that_only_the_device_can_judge(pd, cq, inline):
    with pytest.raises(pvl.VerbsOSError, match="ibv_create_qp failed: E") as caught:
        make_qp(pd, cq, inline=inline)
    assert caught.value.errno > 0
    assert "Success" not in str(caught.value)


def test_what_a_qp_is_made_from(context, pd, cq):
    cap = pvl.QPCap(max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
    with pytest.raises(TypeError, match="QPInitAttr"):
        pd.create_qp(cap)
    with pytest.raises(TypeError, match="recv_cq must be a CQ, not None"):
        pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=None, cap=cap))
    with pytest.raises(TypeError, match="cap must be a QPCap"):
        pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=None))
    with pvl.open_device(context.name) as other:
        foreign = other.create_cq(4)
        with pytest.raises(ValueError, match="send_cq belongs to"):
            pd.create_qp(pvl.QPInitAttr(send_cq=foreign, recv_cq=cq, cap=cap))


def test_qp_numbers_differ(pd, cq):
    qps = [make_qp(pd, cq, depth=1) for _ in range(10)]
    assert len({qp.qp_num for qp in qps}) == 10
    assert all(0 < qp.qp_num < 1 << 24 for qp in qps)


# ---------------------------------------------------------------- posting


def test_too_early(qp, mr):
    with pytest.raises(pvl.StateError, match="cannot take receives: bring it to INIT first"):
        qp.post_recv(pvl.RecvWR(sg_list=[mr[:8]]))
    for state in (None, S.INIT, S.RTR):
        if state:
            qp.modify(pvl.QPAttr(**attr_for(state, qp)))
            qp.post_recv(pvl.RecvWR(sg_list=[mr[:8]]))
        with pytest.raises(pvl.StateError, match="cannot send: bring it to RTS first"):
            qp.post_send(pvl.SendWR(sg_list=[mr[:8]]))
    assert (qp.sends_in_flight, qp.recvs_in_flight) == (0, 2)


def stuck(pd, cq, depth):
    """Connect two QPs whose sends stay in flight, because the right one has posted no receive."""
    left, right = make_qp(pd, cq, depth=depth), make_qp(pd, cq, depth=200)
    connect_qps(left, right, rnr_retry=7)
    return left, right, left.cap.max_send_wr


def test_a_full_send_queue_is_recoverable(pd, cq, mr):
    left, right, depth = stuck(pd, cq, 5)
    for i in range(depth):
        left.post_send(pvl.SendWR(wr_id=i, sg_list=[mr[:16]]))
    assert left.sends_in_flight == depth
    for _ in range(3):
        with pytest.raises(pvl.QueueFullError, match="poll completions and post again") as caught:
            left.post_send(pvl.SendWR(wr_id=99, sg_list=[mr[:16]]))
        assert (caught.value.posted, caught.value.errno) == (0, errno.ENOMEM)
        assert left.sends_in_flight == depth  # the refused one is not counted
        assert cq.poll() == []
    assert isinstance(caught.value, BlockingIOError)
    receive = pvl.RecvWR(wr_id=1000, sg_list=[mr[4096:4112]])
    right.post_recv(receive, receive)
    assert sorted(wc.wr_id for wc in completions(cq, 4)) == [0, 1, 1000, 1000]
    left.post_send(pvl.SendWR(wr_id=50), pvl.SendWR(wr_id=51))
    with pytest.raises(pvl.QueueFullError):
        left.post_send(pvl.SendWR())
    right.post_recv(*[receive] * depth)
    done = completions(cq, 2 * depth)
    assert {wc.status for wc in done} == {W.SUCCESS}
    assert [wc.wr_id for wc in done if not wc.is_recv] == [*range(2, depth), 50, 51]
    assert left.sends_in_flight == 0
    mr.close()


def test_a_full_receive_queue(pd, cq, mr):
    qp = make_qp(pd, cq, depth=5)
    qp.to_init()
    depth = qp.cap.max_recv_wr
    with pytest.raises(pvl.QueueFullError) as caught:
        qp.post_recv(*[pvl.RecvWR(sg_list=[mr[:8]])] * (depth + 2))
    assert caught.value.posted == qp.recvs_in_flight == depth
    with pytest.raises(pvl.BusyError, match=rf"used by {depth} request"):
        mr.close()


def test_a_list_that_does_not_fit_says_how_many_did(pd, cq, mr):
    left, right, depth = stuck(pd, cq, 5)
    left.post_send(pvl.SendWR(wr_id=7))
    requests = [pvl.SendWR(wr_id=50 + i, sg_list=[mr[i : i + 1]]) for i in range(depth + 3)]
    mr.view[: depth + 3] = bytes(range(1, depth + 4))
    with pytest.raises(pvl.QueueFullError) as caught:
        left.post_send(*requests)
    accepted = caught.value.posted
    assert accepted == depth - 1
    assert left.sends_in_flight == depth
    right.post_recv(*[pvl.RecvWR(wr_id=i, sg_list=[mr[100 + i : 101 + i]]) for i in range(depth + 4)])
    assert [wc.wr_id for wc in completions(cq, 2 * depth) if not wc.is_recv] == [7, *range(50, 50 + accepted)]
    left.post_send(*requests[accepted:])
    assert [wc.wr_id for wc in completions(cq, 8) if not wc.is_recv] == list(range(50 + accepted, 50 + depth + 3))
    assert bytes(mr.view[100 : 105 + depth]) == bytes([0, *range(1, depth + 4), 0])


def test_a_list_with_a_request_that_cannot_be_right_posts_nothing(pair, cq, mr):
    left = pair[0]
    good = pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[mr[:8]], remote=remote_of(mr[64:72]))
    bad = pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[mr[:8]] * 40, remote=remote_of(mr))
    with pytest.raises(ValueError, match="40 SGEs are more than this QP's max_send_sge"):
        left.post_send(good, bad, good)
    assert left.sends_in_flight == 0
    assert cq.poll() == []


def test_unsignaled_sends_end_with_the_next_that_says_so(pd, cq, mr):
    left, right = make_qp(pd, cq, depth=15), make_qp(pd, cq, depth=15)
    connect_qps(left, right)
    target = pd.alloc(64, ALL_ACCESS)

    def write(flags):
        return pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[target[:4]], remote=remote_of(mr[:4]), send_flags=flags)

    for _ in range(10):  # ten times the depth in all, and wr_id is the same throughout
        left.post_send(*[write(QUIET)] * 14, write(SIGNALED))
        assert left.sends_in_flight == 15
        assert [wc.wr_id for wc in completions(cq, 1)] == [0]
        assert left.sends_in_flight == 0
    left.post_send(*[write(QUIET)] * 3)
    with pytest.raises(pvl.BusyError, match="3 request"):
        target.close()  # whether they have ended, nobody has said
    left.post_send(pvl.SendWR(opcode=Op.RDMA_WRITE, remote=remote_of(mr[:4])))
    completions(cq, 1)
    target.close()


def test_nothing_said_for_many_times_the_depth(pd, cq, mr):
    left, right = make_qp(pd, cq, depth=3), make_qp(pd, cq, depth=3)
    connect_qps(left, right)
    write = pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[mr[:4]], remote=remote_of(mr[8:12]), send_flags=QUIET)
    posted, end = 0, time.monotonic() + 0.5
    while posted < 30 and time.monotonic() < end:
        with suppress(pvl.QueueFullError):  # hardware gives no slot back until something signaled is polled; rxe does
            left.post_send(write)
            posted += 1
    assert cq.poll() == []
    assert left.sends_in_flight == posted
    assert posted >= left.cap.max_send_wr


def test_every_send_says_so_with_sq_sig_all(pd, cq, mr):
    cap = pvl.QPCap(max_send_wr=8, max_recv_wr=8, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
    init = pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, sq_sig_all=True)
    left, right = pd.create_qp(init), pd.create_qp(init)
    connect_qps(left, right)
    left.post_send(
        *[pvl.SendWR(opcode=Op.RDMA_WRITE, wr_id=i, remote=remote_of(mr), send_flags=QUIET) for i in range(3)]
    )
    assert [wc.wr_id for wc in completions(cq, 3)] == [0, 1, 2]


def test_posting_nothing(pair):
    pair[0].post_send()
    pair[0].post_recv()
    assert (pair[0].sends_in_flight, pair[0].recvs_in_flight) == (0, 0)


def test_a_chain_survives_the_garbage_collector(pd, cq):
    left, right = make_qp(pd, cq, depth=32, sge=2), make_qp(pd, cq, depth=32, sge=2)
    connect_qps(left, right)
    requests, targets, kept = [], [], []
    for i in range(32):
        source, target = pd.reg_mr(bytearray([i + 1] * (i + 2))), pd.reg_mr(bytearray(40))
        kept += [source, target]
        requests.append(pvl.SendWR(wr_id=i, sg_list=[source[:1], source[1:]]))
        targets.append(pvl.RecvWR(wr_id=100 + i, sg_list=[target[: i // 2], target[i // 2 :]]))
        gc.collect()
    right.post_recv(*targets)
    gc.collect()
    left.post_send(*requests)
    del requests, targets
    gc.collect()
    done = completions(cq, 64)
    assert {wc.status for wc in done} == {W.SUCCESS}
    assert {wc.wr_id - 100: wc.byte_len for wc in done if wc.is_recv} == {i: i + 2 for i in range(32)}
    for i in range(32):
        assert bytes(kept[2 * i + 1].view) == bytes([i + 1] * (i + 2) + [0] * (38 - i))


def test_threads_share_a_qp(pd, cq, mr):
    left, right = make_qp(pd, cq, depth=200), make_qp(pd, cq, depth=200)
    connect_qps(left, right)
    barrier = threading.Barrier(4)

    def post(thread):
        barrier.wait(10)
        for i in range(25):
            offset = 2 * (25 * thread + i)
            write = pvl.SendWR(
                opcode=Op.RDMA_WRITE,
                wr_id=offset,
                sg_list=[mr[offset : offset + 2]],
                remote=remote_of(mr[4096 + offset : 4098 + offset]),
            )
            left.post_send(write, write)

    mr.view[:200] = bytes(range(200))
    for result in [in_thread(post, thread) for thread in range(4)]:
        result(20)
    done = completions(cq, 200)
    assert Counter(wc.wr_id for wc in done) == dict.fromkeys(range(0, 200, 2), 2)
    assert bytes(mr.view[4096:4296]) == bytes(range(200))
    assert left.sends_in_flight == 0


def test_closing_while_another_thread_posts(context, pd, cq, mr):
    for _ in range(20):
        left, right = make_qp(pd, cq), make_qp(pd, cq)
        connect_qps(left, right)
        write = pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[mr[:64]], remote=remote_of(mr[64:128]))

        def post(qp=left, write=write):
            while True:
                with suppress(pvl.QueueFullError):
                    qp.post_send(write)
                cq.poll(8)

        result = in_thread(post)
        cq.wait(5)
        left.close()
        with pytest.raises(pvl.ClosedError, match="QP is closed"):
            result(5)
        right.close()
    mr.close()


# ---------------------------------------------------------------- messages


def test_gather_and_scatter(pair, cq, mr):
    left, right = pair
    mr.view[:20] = bytes(range(20))
    right.post_recv(pvl.RecvWR(wr_id=8, sg_list=[mr[100:103], mr[200:230]]))
    left.post_send(pvl.SendWR(wr_id=9, sg_list=[mr[:5], mr[10:20]]))
    done = {wc.wr_id: wc for wc in completions(cq, 2)}
    assert (done[8].byte_len, done[8].opcode, done[8].qp_num) == (15, pvl.WCOpcode.RECV, right.qp_num)
    assert (done[9].byte_len, done[9].opcode, done[9].qp_num) == (0, pvl.WCOpcode.SEND, left.qp_num)
    assert bytes(mr.view[100:103]) + bytes(mr.view[200:213]) == bytes([*range(5), *range(10, 20), 0])


@pytest.mark.parametrize("sg_list", [[], "empty slice"])
def test_a_message_of_no_bytes(pair, cq, mr, sg_list):
    left, right = pair
    right.post_recv(pvl.RecvWR(wr_id=8, sg_list=[mr[:16]]), pvl.RecvWR(wr_id=9))
    left.post_send(pvl.SendWR(sg_list=[mr[5:5]] if sg_list else []), pvl.SendWR())
    done = [wc for wc in completions(cq, 4) if wc.is_recv]
    assert [(wc.wr_id, wc.byte_len, wc.imm_data, wc.status) for wc in done] == [
        (8, 0, None, W.SUCCESS),
        (9, 0, None, W.SUCCESS),
    ]


@pytest.mark.parametrize("imm", [0, 1, 0x89ABCDEF, 0xFFFFFFFF])
@pytest.mark.parametrize("opcode", [Op.SEND_WITH_IMM, Op.RDMA_WRITE_WITH_IMM])
def test_immediates_in_host_order(pair, cq, mr, opcode, imm):
    left, right = pair
    right.post_recv(pvl.RecvWR(wr_id=8, sg_list=[mr[:16]]))
    remote = remote_of(mr[512:1024]) if opcode == Op.RDMA_WRITE_WITH_IMM else None
    left.post_send(pvl.SendWR(wr_id=9, opcode=opcode, sg_list=[mr[1024:1033]], imm_data=imm, remote=remote))
    done = {wc.wr_id: wc for wc in completions(cq, 2)}
    expected = pvl.WCOpcode.RECV_RDMA_WITH_IMM if remote else pvl.WCOpcode.RECV
    assert (done[8].imm_data, done[8].byte_len, done[8].opcode) == (imm, 9, expected)
    assert done[9].imm_data is None


def test_the_wire_has_the_immediate_big_endian(context, pd, cq, mr):
    quiet = context.create_cq(8)
    left, right = make_qp(pd, cq), make_qp(pd, quiet)
    connect_qps(left, right)
    right.post_recv(pvl.RecvWR())
    left.post_send(pvl.SendWR(opcode=Op.SEND_WITH_IMM, imm_data=0x89ABCDEF))
    completions(cq, 1)
    raw = ffi.new("struct ibv_wc *")
    end = time.monotonic() + 5
    while lib.ibv_poll_cq(quiet._handle, 1, raw) == 0:
        assert time.monotonic() < end
    assert bytes(ffi.buffer(ffi.addressof(raw, "imm_data"))) == b"\x89\xab\xcd\xef"
    assert raw.imm_data == int.from_bytes(b"\x89\xab\xcd\xef", sys.byteorder)


@pytest.mark.parametrize("imm", [1 << 32, -1])
def test_an_immediate_outside_32_bits_is_not_posted(pair, imm):
    with pytest.raises(ValueError, match="imm_data"):
        pair[0].post_send(pvl.SendWR(opcode=Op.SEND_WITH_IMM, imm_data=imm))
    assert pair[0].sends_in_flight == 0


def test_sequence_numbers_wrap_and_are_not_mixed_up(pd, cq, mr):
    row = own_gid(pd.context)
    left, right = make_qp(pd, cq, depth=128), make_qp(pd, cq, depth=128)
    for mine, other, my_psn, its_psn in ((left, right, 0xFFFFFF, 0xFFFFF0), (right, left, 0xFFFFF0, 0xFFFFFF)):
        mine.to_init()
        mine.to_rtr(ah_attr=path_to(mine.context, row), dest_qp_num=other.qp_num, rq_psn=its_psn)
        mine.to_rts(sq_psn=my_psn, **IMPATIENT)
    assert (left.query().sq_psn, right.query().sq_psn) == (0xFFFFFF, 0xFFFFF0)
    for sender, receiver in ((left, right), (right, left)):
        receiver.post_recv(*[pvl.RecvWR(wr_id=1000 + i, sg_list=[mr[i : i + 1]]) for i in range(100)])
        for i in range(100):
            sender.post_send(pvl.SendWR(wr_id=i, sg_list=[mr[4096 + i : 4097 + i]]))
        done = completions(cq, 200)
        assert {wc.status for wc in done} == {W.SUCCESS}
        assert [wc.wr_id for wc in done if wc.is_recv] == list(range(1000, 1100))


# ---------------------------------------------------------------- inline


def test_inline_data_are_taken_at_once(context, pd, cq):
    quiet = context.create_cq(8)
    left, right = make_qp(pd, cq, inline=100), make_qp(pd, quiet, inline=100)
    connect_qps(left, right)
    most = left.cap.max_inline_data
    assert most >= 100
    buffer = bytearray(b"\x11" * (most + 1))
    source, target = pd.reg_mr(buffer), pd.reg_mr(bytearray(most + 1))
    right.post_recv(pvl.RecvWR(sg_list=[target]))
    left.post_send(pvl.SendWR(sg_list=[source[:most]], send_flags=INLINE | SIGNALED))
    buffer[:] = b"\x22" * (most + 1)
    source.close()  # nothing in flight needs it
    assert completions(cq, 1)[0].status == W.SUCCESS
    assert completions(quiet, 1)[0].byte_len == most
    assert bytes(target.view) == b"\x11" * most + b"\0"


def test_inline_data_need_no_registration(pair, cq, mr):
    left, right = pair
    text = ffi.new("char[]", b"not registered")
    right.post_recv(pvl.RecvWR(wr_id=5, sg_list=[mr[:64]]))
    address = int(ffi.cast("uintptr_t", text))
    left.post_send(pvl.SendWR(sg_list=[pvl.SGE(address, 14, 0)], send_flags=INLINE | SIGNALED))
    completions(cq, 2)
    assert bytes(mr.view[:15]) == b"not registered\0"


def test_one_byte_more_than_fits_inline(pair, mr):
    most = pair[0].cap.max_inline_data
    with pytest.raises(ValueError, match=f"{most + 1} bytes do not fit inline"):
        pair[0].post_send(pvl.SendWR(sg_list=[mr[: most + 1]], send_flags=INLINE))
    assert pair[0].sends_in_flight == 0


# ---------------------------------------------------------------- one-sided


def test_write_and_read(pair, cq, pd):
    left = pair[0]
    near, far = pd.reg_mr(bytearray(range(100))), pd.reg_mr(bytearray(300), ALL_ACCESS)
    left.post_send(pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[near[10:20], near[50:57]], remote=remote_of(far[33:133])))
    assert completions(cq, 1)[0].opcode == pvl.WCOpcode.RDMA_WRITE
    assert bytes(far.view[32:51]) == bytes([0, *range(10, 20), *range(50, 57), 0])
    far.view[200:209] = b"far away!"
    left.post_send(pvl.SendWR(opcode=Op.RDMA_READ, sg_list=[near[0:4], near[90:95]], remote=remote_of(far[200:209])))
    wc = completions(cq, 1)[0]
    assert (wc.opcode, wc.status) == (pvl.WCOpcode.RDMA_READ, W.SUCCESS)
    assert bytes(near.view[0:5]) + bytes(near.view[89:96]) == b"far \x04\x59away!\x5f"


def word(mr, offset):
    return struct.unpack_from("=Q", mr.view, offset)[0]


def test_atomics(pair, cq, mr):
    left = pair[0]
    struct.pack_into("=QQ", mr.view, 1024, 0xFFFFFFFFFFFFFFF0, 0x1122334455667788)
    left.post_send(
        pvl.SendWR(opcode=Op.ATOMIC_FETCH_AND_ADD, sg_list=[mr[:8]], remote=remote_of(mr[1024:1032]), compare_add=0x21),
        pvl.SendWR(
            opcode=Op.ATOMIC_CMP_AND_SWP, sg_list=[mr[8:16]], remote=remote_of(mr[1032:1040]),
            compare_add=0x1122334455667788, swap=0x99,
        ),
        pvl.SendWR(
            opcode=Op.ATOMIC_CMP_AND_SWP, sg_list=[mr[16:24]], remote=remote_of(mr[1032:1040]), compare_add=0, swap=0x77
        ),
    )  # fmt: skip
    done = completions(cq, 3)
    assert [wc.opcode for wc in done] == [pvl.WCOpcode.FETCH_ADD, pvl.WCOpcode.COMP_SWAP, pvl.WCOpcode.COMP_SWAP]
    assert [word(mr, offset) for offset in (0, 8, 16)] == [0xFFFFFFFFFFFFFFF0, 0x1122334455667788, 0x99]
    assert [word(mr, offset) for offset in (1024, 1032)] == [0x11, 0x99]


@pytest.mark.parametrize(("size", "offset"), [(4, 0), (16, 0), (8, 4), (8, 1)])
def test_atomics_that_no_device_does(pair, mr, size, offset):
    with pytest.raises(ValueError, match="an atomic works on 8 bytes"):
        pair[0].post_send(
            pvl.SendWR(
                opcode=Op.ATOMIC_FETCH_AND_ADD, sg_list=[mr[:size]], remote=remote_of(mr[64 + offset : 96 + offset])
            )
        )
    assert pair[0].sends_in_flight == 0


def test_reads_beyond_the_depth_wait_their_turn(pd, cq, mr):
    left, right = make_qp(pd, cq, depth=64), make_qp(pd, cq, depth=64)
    connect_qps(left, right, depth=1)
    mr.view[4096:4160] = bytes(range(64))
    left.post_send(
        *[
            pvl.SendWR(opcode=Op.RDMA_READ, wr_id=i, sg_list=[mr[i : i + 1]], remote=remote_of(mr[4096 + i : 4097 + i]))
            for i in range(64)
        ]
    )
    assert [wc.wr_id for wc in completions(cq, 64)] == list(range(64))
    assert bytes(mr.view[:64]) == bytes(range(64))


def test_a_read_that_would_never_start_is_refused(pd, cq, mr):
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right, depth=0)
    for opcode in (Op.RDMA_READ, Op.ATOMIC_FETCH_AND_ADD):
        with pytest.raises(ValueError, match="max_rd_atomic is 0"):
            left.post_send(pvl.SendWR(opcode=opcode, sg_list=[mr[:8]], remote=remote_of(mr[8:16])))


def test_memory_that_a_request_may_not_write(pair, pd, mr):
    with pd.reg_mr(b"constant", A.REMOTE_READ) as frozen:
        with pytest.raises(ValueError, match="registered without LOCAL_WRITE"):
            pair[0].post_recv(pvl.RecvWR(sg_list=[frozen]))
        with pytest.raises(ValueError, match="RDMA_READ writes into"):
            pair[0].post_send(pvl.SendWR(opcode=Op.RDMA_READ, sg_list=[frozen], remote=remote_of(mr)))


# ---------------------------------------------------------------- access rights

OPERATIONS = {"write": Op.RDMA_WRITE, "read": Op.RDMA_READ, "atomic": Op.ATOMIC_FETCH_AND_ADD}
NEEDED = {"write": A.REMOTE_WRITE, "read": A.REMOTE_READ, "atomic": A.REMOTE_ATOMIC}
MR_FLAGS = [A(0), A.REMOTE_READ, A.LOCAL_WRITE, *(A.LOCAL_WRITE | flag for flag in NEEDED.values()), ALL_ACCESS]
QP_FLAGS = [A(0), *NEEDED.values(), ALL_ACCESS & ~A.LOCAL_WRITE]


def attempt(pd, cq, qp_flags, request):
    """Send one request to a QP with those flags; return how it ended."""
    left, right = make_qp(pd, cq, depth=2), make_qp(pd, cq, depth=2)
    with left, right:
        connect_qps(left, right, access=qp_flags, **IMPATIENT)
        left.post_send(request)
        return completions(cq, 1)[0].status


@pytest.mark.parametrize("qp_flags", QP_FLAGS, ids=str)
@pytest.mark.parametrize("mr_flags", MR_FLAGS, ids=str)
def test_the_qp_and_the_region_both_have_to_allow_it(pd, cq, mr, mr_flags, qp_flags):
    far = pd.reg_mr(bytearray(b"\x07" * 64), mr_flags)
    start = far.addr + -far.addr % 8
    for name, opcode in OPERATIONS.items():
        request = pvl.SendWR(opcode=opcode, sg_list=[mr[:8]], remote=pvl.RemoteBuffer(start, far.rkey or 1, 8))
        if not NEEDED[name] & qp_flags:
            expected = W.REM_INV_REQ_ERR
        elif not NEEDED[name] & mr_flags:
            expected = W.REM_ACCESS_ERR
        else:
            expected = W.SUCCESS
        before = bytes(far.view)
        assert attempt(pd, cq, qp_flags, request) == expected, name
        if expected != W.SUCCESS:
            assert bytes(far.view) == before


@pytest.mark.parametrize("mr_flags", [A(0), A.REMOTE_READ, A.LOCAL_WRITE])
def test_a_receive_needs_local_write(pair, cq, pd, mr, mr_flags):
    left, right = pair
    far = pd.reg_mr(bytearray(64), mr_flags)
    right.post_recv(pvl.RecvWR(wr_id=8, sg_list=[pvl.SGE(far.addr, 64, far.lkey)]))  # an MR would be refused at once
    mr.view[:3] = b"abc"
    left.post_send(pvl.SendWR(wr_id=9, sg_list=[mr[:3]]))
    statuses = {wc.wr_id: wc.status for wc in completions(cq, 2)}
    if mr_flags & A.LOCAL_WRITE:
        assert statuses == {8: W.SUCCESS, 9: W.SUCCESS}
    else:  # hardware says LOC_PROT_ERR on the receiver's side
        assert statuses == {8: W.LOC_QP_OP_ERR, 9: W.REM_OP_ERR}
        assert bytes(far.view) == bytes(64)


def test_a_local_key_of_nobody(pair, cq, mr):
    left = pair[0]
    left.post_send(pvl.SendWR(wr_id=5, sg_list=[pvl.SGE(mr.addr, 8, mr.lkey ^ 0x5A5A00)]))
    wc = completions(cq, 1)[0]
    assert wc.status in (W.LOC_PROT_ERR, W.WR_FLUSH_ERR)  # hardware says the first, rxe flushes over it
    assert (wc.wr_id, wc.is_recv, left.state, left.query().qp_state) == (5, False, S.ERR, S.ERR)


def test_a_stale_key_harms_nobody(pair, cq, pd, mr):
    left = pair[0]
    gone, other = pd.reg_mr(bytearray(64), ALL_ACCESS), pd.reg_mr(bytearray(b"\x33" * 64), ALL_ACCESS)
    remote = remote_of(gone)
    gone.close()
    left.post_send(pvl.SendWR(opcode=Op.RDMA_WRITE, wr_id=6, sg_list=[mr[:64]], remote=remote))
    wc = completions(cq, 1)[0]
    with pytest.raises(pvl.RemoteAccessError, match="stale rkey") as caught:
        wc.raise_for_status()
    assert (caught.value.wr_id, caught.value.qp_num) == (6, left.qp_num)
    assert bytes(other.view) == b"\x33" * 64


@pytest.mark.parametrize("shift", [-8, 57, 64, 1 << 20])
def test_a_range_outside_the_remote_region(pair, cq, pd, mr, shift):
    far = pd.reg_mr(bytearray(64), ALL_ACCESS)
    pair[0].post_send(
        pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[mr[:8]], remote=pvl.RemoteBuffer(far.addr + shift, far.rkey, 8))
    )
    assert completions(cq, 1)[0].status == W.REM_ACCESS_ERR
    assert bytes(far.view) == bytes(64)


def test_a_write_of_no_bytes_looks_at_no_key(pair, cq, mr):
    pair[0].post_send(pvl.SendWR(opcode=Op.RDMA_WRITE, remote=pvl.RemoteBuffer(mr.addr, 0xBAD000, 8)))
    assert completions(cq, 1)[0].status == W.SUCCESS


# ---------------------------------------------------------------- failures


def test_a_message_longer_than_the_receive(pair, cq, mr):
    left, right = pair
    right.post_recv(pvl.RecvWR(wr_id=8, sg_list=[mr[:16]]))
    left.post_send(pvl.SendWR(wr_id=9, sg_list=[mr[64:81]]))
    statuses = {wc.wr_id: wc.status for wc in completions(cq, 2)}
    # Hardware says REM_INV_REQ_ERR to the sender and LOC_LEN_ERR to the receiver.
    assert statuses == {8: W.LOC_QP_OP_ERR, 9: W.REM_OP_ERR}
    assert bytes(mr.view[:17]) == bytes(17)
    assert (left.state, right.state) == (S.ERR, S.ERR)


def test_nobody_receives(pair, cq, mr):
    left = pair[0]
    left.post_send(pvl.SendWR(wr_id=9, sg_list=[mr[:4]]))
    wc = completions(cq, 1)[0]
    assert wc.status == W.RNR_RETRY_EXC_ERR
    with pytest.raises(pvl.RnrRetryExceededError, match="post more receives"):
        wc.raise_for_status()


def test_the_peer_is_gone(pair, cq, mr):
    left, right = pair
    left.post_recv(*[pvl.RecvWR(wr_id=7, sg_list=[mr[64 * i : 64 * i + 64]]) for i in range(8)])
    right.close()
    left.post_send(pvl.SendWR(wr_id=7, sg_list=[mr[:4]], send_flags=QUIET), pvl.SendWR(wr_id=7), pvl.SendWR(wr_id=7))
    done = completions(cq, 11)
    # First the cause, also of one that was to say nothing; then what it brought about. Only valid members are read.
    assert done[0] == pvl.WC(7, W.RETRY_EXC_ERR, left.qp_num, done[0].vendor_err, is_recv=False)
    assert {wc.status for wc in done[1:]} == {W.WR_FLUSH_ERR}
    assert Counter(wc.is_recv for wc in done) == {False: 3, True: 8}  # told apart although every number is 7
    assert all((wc.opcode, wc.imm_data, wc.byte_len) == (None, None, 0) for wc in done)
    assert left.state == left.query().qp_state == S.ERR
    assert (left.sends_in_flight, left.recvs_in_flight) == (0, 0)
    assert cq.poll() == []
    mr.close()


def test_posting_to_a_qp_in_error_flushes(pair, cq, mr):
    left = pair[0]
    left.to_error()
    left.post_send(pvl.SendWR(wr_id=5, sg_list=[mr[:4]]))
    left.post_recv(pvl.RecvWR(wr_id=6, sg_list=[mr[:4]]))
    assert {(wc.wr_id, wc.status) for wc in completions(cq, 2)} == {(5, W.WR_FLUSH_ERR), (6, W.WR_FLUSH_ERR)}
    with pytest.raises(pvl.FlushError, match="an earlier error is the reason"):
        raise_all(cq, left)


def raise_all(cq, qp):
    qp.post_send(pvl.SendWR())
    for wc in completions(cq, 1):
        wc.raise_for_status()


def test_a_qp_can_be_used_again_after_an_error(pd, cq, mr):
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    for turn in range(3):
        connect_qps(left, right, **IMPATIENT)
        right.post_recv(pvl.RecvWR(wr_id=turn, sg_list=[mr[:8]]))
        left.post_send(pvl.SendWR(wr_id=turn))
        done = [(wc.wr_id, wc.status) for wc in completions(cq, 2 if turn == 0 else 3)]
        # What the turn before left in the queue is not lost, and does not make the QP look broken.
        assert done[-2:] == [(turn, W.SUCCESS)] * 2
        assert done[:-2] == [(39 + turn, W.WR_FLUSH_ERR)] * (turn > 0)
        assert (left.state, right.state) == (S.RTS, S.RTS)
        right.post_recv(pvl.RecvWR(wr_id=40 + turn, sg_list=[mr[:8]]))
        cq.req_notify()
        right.to_error()
        left.to_error()
        assert select.select([cq.channel], [], [], 5)[0]  # the flushed receive is in the queue, and nobody polls it
        cq.channel.get_events()
        left.to_reset()
        right.to_reset()
        assert (left.state, right.state) == (S.RESET, S.RESET)
        assert right.recvs_in_flight == 0


def test_after_close_everything_is_refused(pair, mr):
    left = pair[0]
    left.close()
    left.close()
    for use in (
        left.query,
        left.to_error,
        left.to_reset,
        lambda: left.post_send(pvl.SendWR(sg_list=[mr[:4]])),
        lambda: left.post_recv(pvl.RecvWR(sg_list=[mr[:4]])),
    ):
        with pytest.raises(pvl.ClosedError, match="QP is closed"):
            use()
    assert "CLOSED" in repr(left)


def test_a_closed_region_is_refused_at_once(pair, mr):
    part = mr[:8]
    mr.close()
    for request in (pvl.SendWR(sg_list=[part]), pvl.SendWR(sg_list=[mr])):
        with pytest.raises(pvl.ClosedError, match="MR is closed"):
            pair[0].post_send(request)
    with pytest.raises(pvl.ClosedError, match="MR is closed"):
        pair[1].post_recv(pvl.RecvWR(sg_list=[part]))
