"""Unreliable connections on a real driver: in order, unacknowledged, and what is lost is lost without a word."""

from __future__ import annotations

import pytest
from support import completions, make_qp, own_gid, path_to

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma

UC = pvl.QPType.UC
A, F, Op, S = pvl.AccessFlags, pvl.SendFlags, pvl.WROpcode, pvl.QPState
LEFT_PSN, RIGHT_PSN = 0x00ABCD, 0xFEDC01
UNSIGNALED = F(0)


@pytest.fixture
def cq(context):
    return context.create_cq(256)


@pytest.fixture
def quiet(context):
    return context.create_cq(256)


@pytest.fixture
def mr(pd):
    return pd.alloc(65536, A.LOCAL_WRITE | A.REMOTE_WRITE | A.REMOTE_READ)


def connect(left, right, access=A.REMOTE_WRITE):
    row = own_gid(left.context)
    for mine, other, my_psn, its_psn in ((left, right, LEFT_PSN, RIGHT_PSN), (right, left, RIGHT_PSN, LEFT_PSN)):
        mine.to_init(qp_access_flags=access)
        mine.to_rtr(ah_attr=path_to(mine.context, row), dest_qp_num=other.qp_num, rq_psn=its_psn)
        mine.to_rts(sq_psn=my_psn)


@pytest.fixture
def pair(pd, cq, quiet):
    left, right = make_qp(pd, cq, qp_type=UC), make_qp(pd, quiet, qp_type=UC)
    connect(left, right)
    return left, right


def remote(mr, start, stop):
    return pvl.RemoteBuffer(mr.addr + start, mr.rkey, stop - start)


def test_the_states_take_what_uc_has(pair):
    left, right = pair
    asked = left.query()
    assert (asked.dest_qp_num, asked.sq_psn, asked.rq_psn) == (right.qp_num, LEFT_PSN, RIGHT_PSN)
    assert (left.state, left.grh_room) == (S.RTS, 0)


@pytest.mark.parametrize(
    "given", [{"timeout": 14}, {"retry_cnt": 7}, {"rnr_retry": 7}, {"max_rd_atomic": 1}, {"min_rnr_timer": 12}]
)
def test_nothing_is_acknowledged_so_nothing_says_how(pair, given):
    with pytest.raises(pvl.AttributeMaskError, match="not allowed"):
        pair[0].modify(pvl.QPAttr(**given))


def test_messages_in_order(pair, cq, quiet, mr):
    left, right = pair
    for i in range(5):
        right.post_recv(pvl.RecvWR(sg_list=[mr[i * 10000 : i * 10000 + 9000]], wr_id=i))
    for i in range(5):
        mr.view[60000] = 65 + i
        left.post_send(
            pvl.SendWR(opcode=Op.SEND_WITH_IMM, imm_data=1 << i, sg_list=[mr[60000 : 60001 + i]], wr_id=50 + i)
        )
        assert [wc.wr_id for wc in completions(cq, 1)] == [50 + i]
    got = completions(quiet, 5)
    assert [(wc.wr_id, wc.byte_len, wc.imm_data) for wc in got] == [(i, 1 + i, 1 << i) for i in range(5)]
    assert [mr.view[i * 10000] for i in range(5)] == [65, 66, 67, 68, 69]


def test_a_message_of_several_packets(pair, cq, quiet, mr):
    left, right = pair
    mr.view[40000:53000] = bytes(i % 251 for i in range(13000))
    right.post_recv(pvl.RecvWR(sg_list=[mr[0:13000]]))
    left.post_send(pvl.SendWR(sg_list=[mr[40000:53000]]))
    (got,) = completions(quiet, 1)
    assert got.byte_len == 13000
    assert mr.view[0:13000] == mr.view[40000:53000]


def test_writes_and_writes_that_notify(pair, cq, quiet, mr):
    left, right = pair
    right.post_recv(pvl.RecvWR(wr_id=3))
    mr.view[40000:40006] = b"abcdef"
    left.post_send(
        pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[mr[40000:40003]], remote=remote(mr, 10, 20), send_flags=UNSIGNALED),
        pvl.SendWR(
            opcode=Op.RDMA_WRITE_WITH_IMM, sg_list=[mr[40003:40006]], remote=remote(mr, 13, 20), imm_data=0x89ABCDEF
        ),
    )
    (got,) = completions(quiet, 1)
    assert (got.wr_id, got.imm_data, got.byte_len) == (3, 0x89ABCDEF, 3)
    assert bytes(mr.view[10:16]) == b"abcdef"
    completions(cq, 1)
    assert left.sends_in_flight == 0


@pytest.mark.parametrize("opcode", [Op.RDMA_READ, Op.ATOMIC_FETCH_AND_ADD])
def test_nothing_comes_back(pair, mr, opcode):
    with pytest.raises(ValueError, match=f"{opcode.name} cannot be posted to a UC QP"):
        pair[0].post_send(pvl.SendWR(opcode=opcode, sg_list=[mr[0:8]], remote=remote(mr, 8, 16)))


# ---------------------------------------------------------------- loss


def witness(left, right, quiet, imm):
    """Show that the pair still works: one more message arrives."""
    right.post_recv(pvl.RecvWR(wr_id=900 + imm))
    left.post_send(pvl.SendWR(opcode=Op.SEND_WITH_IMM, imm_data=imm, send_flags=UNSIGNALED))
    return completions(quiet, 1)[0]


def fence(left, pd, cq, mr):
    """Wait until what was sent before has been looked at: a message to a third QP went the same way behind it."""
    near, far = make_qp(pd, cq, qp_type=UC), make_qp(pd, cq, qp_type=UC)
    connect(near, far)
    far.post_recv(pvl.RecvWR())
    near.post_send(pvl.SendWR(send_flags=UNSIGNALED))
    assert completions(cq, 1)[0].is_recv


def test_without_a_receive_a_message_is_gone(pd, context, pair, cq, quiet, mr):
    left, right = pair
    left.post_send(pvl.SendWR(opcode=Op.SEND_WITH_IMM, imm_data=1, wr_id=8))
    (sent,) = completions(cq, 1)
    assert (sent.wr_id, sent.status) == (8, pvl.WCStatus.SUCCESS)  # it was sent; no more is known
    fence(left, pd, context.create_cq(8), mr)
    assert witness(left, right, quiet, 2).imm_data == 2
    assert (left.state, right.query().qp_state) == (S.RTS, S.RTS)


@pytest.mark.parametrize("what", ["rkey", "range", "access"])
def test_a_write_that_is_not_allowed_is_gone(pd, context, cq, quiet, mr, what):
    left, right = make_qp(pd, cq, qp_type=UC), make_qp(pd, quiet, qp_type=UC)
    connect(left, right, A(0) if what == "access" else A.REMOTE_WRITE)
    target = {
        "rkey": pvl.RemoteBuffer(mr.addr, mr.rkey ^ 0x100, 8),
        "range": pvl.RemoteBuffer(mr.addr + mr.length, mr.rkey, 8),
        "access": remote(mr, 0, 8),
    }[what]
    mr.view[4000:4008] = b"unwanted"
    left.post_send(pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[mr[4000:4008]], remote=target))
    assert completions(cq, 1)[0].status == pvl.WCStatus.SUCCESS
    fence(left, pd, context.create_cq(8), mr)
    assert bytes(mr.view[0:8]) == bytes(8)
    assert witness(left, right, quiet, 7).imm_data == 7


def test_many_unsignaled_messages_and_the_one_that_ends_them(pair, cq, quiet, mr):
    """The peer's receives are too few, which on UC is nobody's error: half of the messages are gone."""
    left, right = pair
    for i in range(4):
        right.post_recv(pvl.RecvWR(wr_id=i))
    for _round in range(8):
        left.post_send(*[pvl.SendWR(send_flags=UNSIGNALED)] * 7, pvl.SendWR(wr_id=5))
        assert [wc.wr_id for wc in completions(cq, 1)] == [5]
        assert left.sends_in_flight == 0
    assert {wc.wr_id for wc in completions(quiet, 4)} == {0, 1, 2, 3}


def test_a_failed_send_stops_the_send_queue_only(pd, pair, cq, quiet, mr):
    left, right = pair
    left.post_send(pvl.SendWR(sg_list=[pvl.SGE(mr.addr, 8, mr.lkey ^ 0x100)], wr_id=6))
    (failed,) = completions(cq, 1)
    assert (failed.wr_id, failed.is_recv) == (6, False)
    with pytest.raises(pvl.CompletionError):
        failed.raise_for_status()
    assert left.state in (S.SQE, S.ERR)
    asked = left.query().qp_state
    if asked == S.SQE:
        left.to_rts()
        assert witness(left, right, quiet, 3).imm_data == 3
    else:  # soft-RoCE knows no SQE
        assert asked == left.state == S.ERR
