"""Datagrams on a real driver: where they go, the 40 bytes in front, what is lost without a word."""

from __future__ import annotations

import pytest
from support import completions, make_qp, own_gid, path_to

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma

UD = pvl.QPType.UD
LEFT_KEY, RIGHT_KEY = 0x11223344, 0x55667788
F, Op = pvl.SendFlags, pvl.WROpcode


@pytest.fixture
def cq(context):
    return context.create_cq(256)


@pytest.fixture
def mr(pd):
    return pd.alloc(16384)


def datagram_qp(pd, cq, qkey, psn=0x123456, **options):
    qp = make_qp(pd, cq, qp_type=UD, **options)
    qp.to_init(qkey=qkey)
    qp.to_rtr()
    qp.to_rts(sq_psn=psn)
    return qp


@pytest.fixture
def ah(context, pd):
    return pd.create_ah(path_to(context, own_gid(context)))


@pytest.fixture
def pair(pd, cq):
    return datagram_qp(pd, cq, LEFT_KEY), datagram_qp(pd, cq, RIGHT_KEY)


def to(qp, ah, key=RIGHT_KEY, **options):
    return pvl.SendWR(ah=ah, remote_qpn=qp.qp_num, remote_qkey=key, **options)


def by_side(wcs):
    return next(wc for wc in wcs if not wc.is_recv), next(wc for wc in wcs if wc.is_recv)


def test_the_states_take_what_ud_has(pair):
    left, right = pair
    assert (left.query().qkey, right.query().qkey) == (LEFT_KEY, RIGHT_KEY)
    assert (left.state, left.query().sq_psn) == (pvl.QPState.RTS, 0x123456)


@pytest.mark.parametrize("given", [{"dest_qp_num": 5}, {"rq_psn": 7}])
def test_a_datagram_qp_has_no_peer(pd, cq, given):
    qp = make_qp(pd, cq, qp_type=UD)
    qp.to_init(qkey=LEFT_KEY)
    with pytest.raises(pvl.AttributeMaskError):
        qp.modify(pvl.QPAttr(qp_state=pvl.QPState.RTR, **given))


def test_a_datagram_and_its_header(context, pair, cq, mr, ah):
    left, right = pair
    mr.view[8192:8197] = b"hello"
    right.post_recv(pvl.RecvWR(sg_list=[mr[0:200]], wr_id=5))
    left.post_send(to(right, ah, sg_list=[mr[8192:8197]], wr_id=3))
    sent, got = by_side(completions(cq, 2))
    assert (sent.wr_id, sent.status, sent.qp_num) == (3, pvl.WCStatus.SUCCESS, left.qp_num)
    assert (got.wr_id, got.byte_len, got.src_qp, got.qp_num) == (5, 45, left.qp_num, right.qp_num)
    grh, payload = pvl.split_grh(mr[0:200], got)
    assert bytes(payload) == b"hello"
    gid = own_gid(context).gid
    assert (grh.sgid, grh.dgid, grh.version) == (gid, gid, 4)
    assert grh.hop_limit == 64


def test_the_room_is_a_number_of_the_qp(pd, cq, pair):
    assert pair[0].grh_room == 40
    assert make_qp(pd, cq).grh_room == 0


def test_a_header_of_ipv6(context, pd, pair, cq, mr):
    left, right = pair
    row = next(row for row in context.gid_table(1) if row.ipv4 is None and not row.link_local)
    route = pvl.GlobalRoute(dgid=row.gid, sgid_index=row.gid_index, traffic_class=0x48, flow_label=0x12345, hop_limit=9)
    ah = pd.create_ah(pvl.AHAttr(port_num=1, grh=route))
    right.post_recv(pvl.RecvWR(sg_list=[mr[0:200]]))
    left.post_send(to(right, ah, opcode=Op.SEND_WITH_IMM, imm_data=0x89ABCDEF))
    _sent, got = by_side(completions(cq, 2))
    grh, payload = pvl.split_grh(mr, got)
    assert (got.imm_data, got.byte_len, len(payload)) == (0x89ABCDEF, 40, 0)
    assert (grh.version, grh.sgid, grh.dgid, grh.traffic_class) == (6, row.gid, row.gid, 0x48)
    assert grh.hop_limit == 64  # on RoCE the kernel takes the route's, whatever the address says


def test_the_answer_goes_where_the_question_came_from(pd, pair, cq, mr, ah):
    left, right = pair
    right.post_recv(pvl.RecvWR(sg_list=[mr[0:100]]))
    left.post_recv(pvl.RecvWR(sg_list=[mr[4096:4200]], wr_id=77))
    left.post_send(to(right, ah, sg_list=[mr[8192:8193]]))
    _sent, question = by_side(completions(cq, 2))
    grh, _payload = pvl.split_grh(mr, question)
    back = pvl.AH.from_wc(pd, question, grh)
    mr.view[8192:8198] = b"answer"
    answer = pvl.SendWR(ah=back, remote_qpn=question.src_qp, remote_qkey=LEFT_KEY, sg_list=[mr[8192:8198]])
    right.post_send(answer)
    _sent, got = by_side(completions(cq, 2))
    assert (got.wr_id, got.src_qp) == (77, right.qp_num)
    assert bytes(pvl.split_grh(mr[4096:4200], got)[1]) == b"answer"


def test_one_address_handle_leads_to_many_qps(pd, cq, mr, ah):
    left = datagram_qp(pd, cq, LEFT_KEY)
    rights = [datagram_qp(pd, cq, 1000 + i) for i in range(3)]
    for i, right in enumerate(rights):
        right.post_recv(pvl.RecvWR(sg_list=[mr[i * 100 : i * 100 + 90]], wr_id=i))
        mr.view[8192 + i] = 65 + i
    left.post_send(*(to(right, ah, 1000 + i, sg_list=[mr[8192 + i : 8193 + i]]) for i, right in enumerate(rights)))
    got = {wc.wr_id: wc.qp_num for wc in completions(cq, 6) if wc.is_recv}
    assert got == {i: right.qp_num for i, right in enumerate(rights)}
    assert [mr.view[i * 100 + 40] for i in range(3)] == [65, 66, 67]


def test_inline_datagrams_hold_no_memory(pair, cq, pd, mr, ah):
    left, right = pair
    right.post_recv(pvl.RecvWR(sg_list=[mr[0:100]]))
    with pd.alloc(16) as scratch:
        scratch.view[:3] = b"abc"
        left.post_send(to(right, ah, sg_list=[scratch[0:3]], send_flags=F.INLINE | F.SIGNALED))
    _sent, got = by_side(completions(cq, 2))
    assert bytes(pvl.split_grh(mr, got)[1]) == b"abc"


# ---------------------------------------------------------------- what is lost, and what is refused instead


def test_the_wrong_key_is_silence(pair, cq, mr, ah):
    left, right = pair
    right.post_recv(pvl.RecvWR(sg_list=[mr[0:100]], wr_id=9))
    left.post_send(to(right, ah, key=RIGHT_KEY ^ 1, wr_id=1))
    left.post_send(to(right, ah, wr_id=2, opcode=Op.SEND_WITH_IMM, imm_data=5))
    wcs = completions(cq, 3)
    assert [wc.wr_id for wc in wcs if not wc.is_recv] == [1, 2]  # both "succeeded"
    assert [wc.imm_data for wc in wcs if wc.is_recv] == [5]


def test_without_a_receive_a_datagram_is_gone(pd, pair, cq, mr, ah):
    left, right = pair
    witness = datagram_qp(pd, cq, 9)
    witness.post_recv(pvl.RecvWR(sg_list=[mr[200:300]]))
    left.post_send(to(right, ah, opcode=Op.SEND_WITH_IMM, imm_data=1), to(witness, ah, key=9))
    assert {wc.status for wc in completions(cq, 3)} == {pvl.WCStatus.SUCCESS}
    right.post_recv(pvl.RecvWR(sg_list=[mr[0:100]]))
    left.post_send(to(right, ah, opcode=Op.SEND_WITH_IMM, imm_data=2))
    assert [wc.imm_data for wc in completions(cq, 2) if wc.is_recv] == [2]


def test_a_receive_without_room_for_the_payload_keeps_waiting(pair, cq, mr, ah):
    """40 bytes are accepted: they do for an empty datagram. The driver drops what does not fit, and waits on."""
    left, right = pair
    right.post_recv(pvl.RecvWR(sg_list=[mr[0:40]]))
    left.post_send(to(right, ah, sg_list=[mr[8192:8200]]))
    left.post_send(to(right, ah))
    wcs = completions(cq, 3)
    assert [wc.byte_len for wc in wcs if wc.is_recv] == [40]


def test_a_receive_without_room_for_the_header_is_refused(pair, mr):
    _left, right = pair
    with pytest.raises(ValueError, match="needs room for the GRH: 40 bytes"):
        right.post_recv(pvl.RecvWR(sg_list=[mr[0:100]]), pvl.RecvWR(sg_list=[mr[0:20], mr[0:19]]))
    assert right.recvs_in_flight == 0


def test_what_is_longer_than_the_mtu_is_refused_and_not_lost(context, pair, cq, mr, ah):
    left, right = pair
    mtu = context.query_port(1).active_mtu.bytes
    with pytest.raises(
        ValueError, match=f"{mtu + 1} bytes is longer than the port's active_mtu, {mtu}: it would vanish"
    ):
        left.post_send(to(right, ah, sg_list=[mr[0 : mtu + 1]]))
    right.post_recv(pvl.RecvWR(sg_list=[mr[0 : mtu + 40]]))
    left.post_send(to(right, ah, sg_list=[mr[8192 : 8192 + mtu]]))
    _sent, got = by_side(completions(cq, 2))
    assert got.byte_len == mtu + 40


# ---------------------------------------------------------------- what requests hold


def test_a_request_in_flight_holds_its_address_handle(pair, cq, pd, mr, context):
    left, right = pair
    ah = pd.create_ah(path_to(context, own_gid(context)))
    left.post_send(to(right, ah))
    with pytest.raises(pvl.BusyError, match=r"the AH is used by 1 request\(s\) in flight"):
        ah.close()
    left.post_send(to(right, ah, wr_id=4))
    completions(cq, 2)
    ah.close()
    with pytest.raises(pvl.ClosedError):
        left.post_send(to(right, ah))
    assert left.sends_in_flight == 0


def test_unsignaled_datagrams_end_with_the_next_signaled_one(pair, cq, ah):
    left, right = pair
    left.post_send(*(to(right, ah, send_flags=F(0)) for _ in range(3)), to(right, ah, wr_id=8))
    assert [wc.wr_id for wc in completions(cq, 1)] == [8]
    ah.close()


def test_closing_the_domain_closes_qps_before_address_handles(context, cq):
    pd = context.alloc_pd()
    qp, ah = datagram_qp(pd, cq, 5), pd.create_ah(path_to(context, own_gid(context)))
    qp.post_send(to(qp, ah, key=5))
    pd.close()
    assert ah.closed


def test_an_address_handle_of_another_domain(context, pair, ah):
    left, right = pair
    with context.alloc_pd() as other, pytest.raises(ValueError, match="belongs to another PD than the QP"):
        left.post_send(to(right, other.create_ah(path_to(context, own_gid(context)))))


def test_datagrams_of_one_queue_and_rc_messages_of_another(context, pair, cq, mr, ah):
    """A shared CQ tells them apart by their numbers alone."""
    left, right = pair
    for i in range(8):
        right.post_recv(pvl.RecvWR(sg_list=[mr[i * 64 : i * 64 + 64]], wr_id=i))
    left.post_send(*(to(right, ah, wr_id=100 + i) for i in range(8)))
    wcs = completions(cq, 16)
    assert [wc.wr_id for wc in wcs if wc.is_recv] == list(range(8))
    assert [wc.wr_id for wc in wcs if not wc.is_recv] == [100 + i for i in range(8)]
