"""What QPs of every type are created as, what they say of themselves, and how sizes and states are refused."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
from support import connect_qps, make_qp, own_gid, path_to

import pyverbs_lite as pvl
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

A, Ops, S, T = pvl.AccessFlags, pvl.SendOpsFlags, pvl.QPState, pvl.QPType
CAP = pvl.QPCap(max_send_wr=11, max_recv_wr=13, max_send_sge=2, max_recv_sge=3, max_inline_data=20)

types = pytest.mark.parametrize("qp_type", [T.RC, T.UC, T.UD])
#: ``ibv_create_qp``, and ``ibv_create_qp_ex`` with what the type can post.
verbs = pytest.mark.parametrize("extended", [False, True], ids=["create_qp", "create_qp_ex"])


@pytest.fixture
def cq(context):
    return context.create_cq(100)


def create(pd, cq, qp_type, extended, cap=CAP):
    ops = Ops.WITH_SEND | Ops.WITH_SEND_WITH_IMM if extended else Ops(0)
    return pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, qp_type=qp_type, send_ops_flags=ops))


# ---------------------------------------------------------------- creation


@types
@verbs
def test_a_new_qp_is_in_reset(pd, cq, qp_type, extended):
    qp = create(pd, cq, qp_type, extended)
    assert (qp.qp_type, qp.state, qp.query().qp_state) == (qp_type, S.RESET, S.RESET)
    assert qp.send_ops_flags == (Ops.WITH_SEND | Ops.WITH_SEND_WITH_IMM if extended else Ops(0))
    assert 0 < qp.qp_num < 1 << 24


@types
@verbs
def test_a_new_qp_goes_as_far_as_it_can_without_a_peer(pd, cq, qp_type, extended):
    """A connected QP waits in INIT for whom to connect to; one for datagrams is ready to send."""
    qp = create(pd, cq, qp_type, extended)
    qp.to_init(qkey=0x111) if qp_type == T.UD else qp.to_init(qp_access_flags=A.REMOTE_WRITE)
    if qp_type == T.UD:
        qp.to_rtr()
        qp.to_rts(sq_psn=7)
    expected = S.RTS if qp_type == T.UD else S.INIT
    assert (qp.state, qp.query().qp_state) == (expected, expected)


@types
@verbs
def test_a_qp_is_at_least_as_large_as_asked(pd, cq, qp_type, extended):
    qp = create(pd, cq, qp_type, extended)
    attr = qp.query()
    assert attr.qp_state == S.RESET
    for name in pvl.QPCap.__slots__:
        assert getattr(CAP, name) <= getattr(qp.cap, name) == getattr(attr.cap, name), name


def test_a_qp_of_iwarp_is_at_least_as_large_as_asked():
    with pvl.open_device("siw0") as siw:
        pd, cq = siw.alloc_pd(), siw.create_cq(100)
        qp = create(pd, cq, T.RC, False, replace(CAP, max_inline_data=0))
        attr = qp.query()
        # siw has one state in front of being connected, which it gives as INIT or RESET.
        assert attr.qp_state in (S.RESET, S.INIT)
        assert attr.cap.max_send_wr >= 11
        assert attr.cap.max_recv_wr >= 13
        for qp_type in (T.UC, T.UD):
            with pytest.raises(pvl.UnsupportedError, match="ibv_create_qp"):
                create(pd, cq, qp_type, False)


@pytest.mark.parametrize(
    ("member", "value"),
    [("max_send_wr", 0xFFFFFFFF), ("max_recv_wr", 0xFFFFFFFF), ("max_send_sge", 0xFFFF), ("max_recv_sge", 0xFFFF)],
)
@pytest.mark.parametrize("qp_type", [T.UD, T.RC])
def test_a_queue_beyond_the_device(pd, cq, qp_type, member, value):
    cap = replace(CAP, **{member: value})
    with pytest.raises(ValueError, match=rf"cap\.{member} must be 0 to \d+, not {value}"):
        create(pd, cq, qp_type, False, cap)
    # The verb refuses it, too.
    raw = ffi.new("struct ibv_qp_init_attr *", {"send_cq": cq._handle, "recv_cq": cq._handle, "qp_type": qp_type})
    for name in pvl.QPCap.__slots__:
        setattr(raw.cap, name, getattr(cap, name))
    assert not lib.ibv_create_qp(pd._handle, raw)
    assert ffi.errno > 0


@verbs
def test_raw_packets_are_not_for_soft_devices(pd, cq, extended):
    with pytest.raises(pvl.UnsupportedError, match="ibv_create_qp"):
        create(pd, cq, T.RAW_PACKET, extended)
    with pvl.open_device("siw0") as siw, pytest.raises(pvl.UnsupportedError, match="ibv_create_qp"):
        create(siw.alloc_pd(), siw.create_cq(10), T.RAW_PACKET, extended)


@pytest.mark.parametrize("device", ["rxe0", "siw0"])
def test_qps_of_a_drivers_own_are_not_for_soft_devices(device):
    with pvl.open_device(device) as context, pytest.raises(pvl.UnsupportedError, match="ibv_create_qp"):
        create(context.alloc_pd(), context.create_cq(10), T.DRIVER, False)


# ---------------------------------------------------------------- attributes


@verbs
def test_a_datagram_qp_says_what_it_was_given(pd, cq, extended):
    qp = create(pd, cq, T.UD, extended)
    qp.to_init(qkey=0x123)
    assert qp.query().qkey == 0x123
    qp.to_rtr()
    qp.to_rts(sq_psn=0x45)
    assert (qp.query().sq_psn, qp.query().qkey) == (0x45, 0x123)
    qp.to_reset()
    assert (qp.state, qp.query().qp_state) == (S.RESET, S.RESET)


@verbs
@pytest.mark.parametrize("qkey", [0x80000000, 0x80010000, 0xFFFFFFFF])
def test_a_qkey_for_the_privileged(pd, cq, extended, qkey):
    """The highest bit makes a key that only a privileged process may use; the guest's root is one."""
    qp = create(pd, cq, T.UD, extended)
    qp.to_init(qkey=qkey)
    assert qp.query().qkey == qkey
    qp.to_rtr()
    qp.to_rts(sq_psn=1)
    assert qp.query().qkey == qkey


@pytest.mark.parametrize("depth", [1, 12, 16, 100])
def test_the_depths_are_at_least_those_asked_for(pd, cq, depth):
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right, depth=depth)
    for qp in (left, right):
        attr = qp.query()
        assert attr.max_rd_atomic >= depth
        assert attr.max_dest_rd_atomic >= depth


@types
def test_whether_the_last_byte_comes_last(pd, cq, qp_type):
    """A device that does not know better promises nothing."""
    qp = create(pd, cq, qp_type, False)
    for opcode in (pvl.WROpcode.SEND, pvl.WROpcode.RDMA_WRITE, pvl.WROpcode.RDMA_READ):
        assert qp.query_data_in_order(opcode) is False
    if lib.PVL_HAS_DATA_IN_ORDER_CAPS > 0:
        asked = qp.query_data_in_order(pvl.WROpcode.SEND, pvl.DataInOrderFlags.RETURN_CAPS)
        assert asked == pvl.DataInOrderCaps(0)


@types
def test_a_soft_device_does_not_pace(pd, cq, qp_type):
    qp = create(pd, cq, qp_type, False)
    for limit in (5000, 0):
        with pytest.raises(pvl.UnsupportedError, match="ibv_modify_qp_rate_limit"):
            qp.modify_rate_limit(limit)
    caps = pd.context.query_device_ex().packet_pacing_caps
    assert caps.qp_rate_limit_max == 0


# ---------------------------------------------------------------- posting in the wrong state, and too much


def ready_datagram_qp(pd, cq, depth=16, sge=2):
    qp = create(pd, cq, T.UD, True, replace(CAP, max_recv_wr=depth, max_recv_sge=sge))
    qp.to_init(qkey=0x77)
    qp.to_rtr()
    qp.to_rts(sq_psn=3)
    return qp


def test_a_receive_after_going_back_to_reset(pd, cq):
    qp, mr = ready_datagram_qp(pd, cq), pd.alloc(256)
    qp.post_recv(pvl.RecvWR(sg_list=[mr]))
    qp.modify(pvl.QPAttr(qp_state=S.RESET))
    assert qp.recvs_in_flight == 0
    with pytest.raises(pvl.StateError, match="cannot take receives: bring it to INIT first"):
        qp.post_recv(pvl.RecvWR(sg_list=[mr]))
    assert qp.recvs_in_flight == 0
    mr.close()


def test_a_send_after_going_back_to_reset(context, pd, cq):
    qp, mr, ah = ready_datagram_qp(pd, cq), pd.alloc(256), pd.create_ah(path_to(context, own_gid(context)))
    qp.modify(pvl.QPAttr(qp_state=S.RESET))
    to = {"ah": ah, "remote_qpn": qp.qp_num, "remote_qkey": 0x77, "sg_list": [mr[:8]]}
    with pytest.raises(pvl.StateError, match="cannot send: bring it to RTS first"):
        qp.post_send(pvl.SendWR(**to))
    with pytest.raises(pvl.StateError, match="cannot send: bring it to RTS first"), qp.wr_batch() as wr:
        wr.send(**to)
    assert qp.sends_in_flight == 0
    mr.close()
    ah.close()


def test_one_receive_more_than_the_queue_holds(pd, cq):
    qp, mr = ready_datagram_qp(pd, cq, depth=5), pd.alloc(64)
    depth = qp.query().cap.max_recv_wr
    for _ in range(depth):
        qp.post_recv(pvl.RecvWR(sg_list=[mr]))
    with pytest.raises(pvl.QueueFullError) as caught:
        qp.post_recv(pvl.RecvWR(sg_list=[mr]))
    assert (caught.value.errno, caught.value.posted, qp.recvs_in_flight) == (errno.ENOMEM, 0, depth)


def test_one_sge_more_than_the_queue_takes(pd, cq):
    qp, mr = ready_datagram_qp(pd, cq, sge=3), pd.alloc(256)
    most = qp.query().cap.max_recv_sge
    assert most >= 3
    qp.post_recv(pvl.RecvWR(sg_list=[mr[i * 60 : i * 60 + 60] for i in range(most)]))
    with pytest.raises(ValueError, match=f"{most + 1} .*at most {most}|max_recv_sge"):
        qp.post_recv(pvl.RecvWR(sg_list=[mr[i * 50 : i * 50 + 50] for i in range(most + 1)]))
    assert qp.recvs_in_flight == 1
    # The verb refuses it, too.
    sges = ffi.new("struct ibv_sge[]", [{"addr": mr.addr, "length": 8, "lkey": mr.lkey}] * (most + 1))
    raw, bad = ffi.new("struct ibv_recv_wr *"), ffi.new("struct ibv_recv_wr **")
    raw.sg_list, raw.num_sge = sges, most + 1
    assert lib.ibv_post_recv(qp._handle, raw, bad) == errno.EINVAL
    assert bad[0] == raw
