"""Shared receive queues on a real driver."""

from __future__ import annotations

import pytest
from support import completions, connect_qps, make_qp, own_gid, path_to

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma

T = pvl.SRQType
SUCCESS, FLUSHED = pvl.WCStatus.SUCCESS, pvl.WCStatus.WR_FLUSH_ERR


@pytest.fixture
def cq(context):
    return context.create_cq(256)


@pytest.fixture
def quiet(context):
    return context.create_cq(256)


@pytest.fixture
def mr(pd):
    return pd.alloc(8192)


@pytest.fixture
def srq(pd):
    return pd.create_srq(pvl.SRQInitAttr(max_wr=20, max_sge=2))


def srq_qp(pd, cq, srq, qp_type=pvl.QPType.RC):
    cap = pvl.QPCap(max_send_wr=8, max_recv_wr=0, max_send_sge=1, max_recv_sge=0, max_inline_data=0)
    return pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, qp_type=qp_type, srq=srq))


def pairs(pd, cq, quiet, srq, count):
    """Connect QPs that share a queue with as many that have their own."""
    made = []
    for _ in range(count):
        sharer, peer = srq_qp(pd, cq, srq), make_qp(pd, quiet)
        connect_qps(sharer, peer, timeout=10, retry_cnt=2, rnr_retry=1)
        made.append((sharer, peer))
    return made


def receives(mr, count, size=64, first=0):
    return [pvl.RecvWR(sg_list=[mr[i * size : (i + 1) * size]], wr_id=first + i) for i in range(count)]


# ---------------------------------------------------------------- sizes


def test_the_sizes_that_the_device_gave(pd):
    with pd.create_srq(pvl.SRQInitAttr(max_wr=20, max_sge=3)) as srq:
        asked = srq.query()
        assert (srq.max_wr, srq.max_sge) == (asked.max_wr, asked.max_sge)
        assert asked.max_wr >= 20
        assert asked.max_sge >= 3
        assert asked.srq_limit == 0
        assert repr(srq) == f"<BASIC SRQ of {srq.max_wr} receives>"
    assert srq.closed
    with pytest.raises(pvl.ClosedError):
        srq.query()


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"max_wr": 0}, "max_wr must be 1 to"),
        ({"max_wr": 1 << 31}, "max_wr must be 1 to"),
        ({"max_wr": 8, "max_sge": 0}, "max_sge must be 1 to"),
        ({"max_wr": 8, "max_sge": 1000}, "max_sge must be 1 to"),
        ({"max_wr": 8, "srq_limit": 9}, "srq_limit must be 0 to 8, not 9"),
        ({"max_wr": 8, "max_num_tags": 4}, "max_num_tags goes with an SRQ of type TM"),
        ({"max_wr": 8, "srq_type": T.TM}, "cq goes with an SRQ of type XRC or TM"),
        ({"max_wr": 8, "srq_type": T.XRC}, "xrcd goes with an SRQ of type XRC, and with no other; this is XRC"),
    ],
)
def test_what_cannot_be_a_shared_queue(pd, sizes, text):
    with pytest.raises(ValueError, match=text):
        pd.create_srq(pvl.SRQInitAttr(**sizes))


@pytest.mark.parametrize("bad", [None, 16, {"max_wr": 16}])
def test_what_is_no_init_attr(pd, bad):
    with pytest.raises(TypeError, match="an SRQ is made from an SRQInitAttr"):
        pd.create_srq(bad)


def test_a_completion_queue_goes_with_other_types(pd, cq):
    with pytest.raises(ValueError, match="cq goes with an SRQ of type XRC or TM, and with no other; this is BASIC"):
        pd.create_srq(pvl.SRQInitAttr(max_wr=8, cq=cq))


def test_tag_matching_is_not_there(pd, cq):
    with pytest.raises(pvl.UnsupportedError) as caught:
        pd.create_srq(pvl.SRQInitAttr(max_wr=8, srq_type=T.TM, cq=cq, max_num_tags=4, max_ops=2))
    assert caught.value.operation == "ibv_create_srq_ex"


def test_a_plain_queue_has_no_number(srq):
    with pytest.raises(pvl.UnsupportedError, match="ibv_get_srq_num"):
        srq.get_srq_num()


# ---------------------------------------------------------------- resizing, and the limit


def test_resizing_keeps_what_is_queued(pd, cq, quiet, srq, mr):
    ((sharer, peer),) = pairs(pd, cq, quiet, srq, 1)
    srq.post_recv(*receives(mr, 3))
    srq.modify(max_wr=100)
    assert srq.max_wr == srq.query().max_wr >= 100
    srq.post_recv(*receives(mr, 90, size=16, first=3))
    peer.post_send(*(pvl.SendWR(sg_list=[mr[i : i + 7]]) for i in range(4)))
    got = completions(cq, 4)
    assert [(wc.wr_id, wc.byte_len, wc.qp_num) for wc in got] == [(i, 7, sharer.qp_num) for i in range(4)]
    assert srq.recvs_in_flight == 89


def test_a_size_below_what_is_queued_is_refused(srq, mr):
    srq.post_recv(*receives(mr, 20))
    before = srq.query()
    with pytest.raises(pvl.VerbsOSError, match="ibv_modify_srq failed"):
        srq.modify(max_wr=2)
    assert srq.query() == before
    assert srq.recvs_in_flight == 20


def test_the_limit_is_armed_and_disarmed(srq):
    srq.modify(srq_limit=7)
    assert srq.query().srq_limit == 7
    srq.modify(srq_limit=0)
    assert srq.query().srq_limit == 0


def test_the_limit_goes_off_once(pd, cq, quiet, srq, mr):
    ((_sharer, peer),) = pairs(pd, cq, quiet, srq, 1)
    srq.post_recv(*receives(mr, 3))
    srq.modify(srq_limit=2)
    for left in (2, 1):
        peer.post_send(pvl.SendWR())
        completions(cq, 1)
        completions(quiet, 1)
        assert srq.recvs_in_flight == left
        # With two left it is still armed; with fewer the event came, and disarmed it.
        assert srq.query().srq_limit == (2 if left == 2 else 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "modify an SRQ with max_wr="),
        ({"max_wr": 0}, "max_wr must be 1 to"),
        ({"srq_limit": -1}, "srq_limit must be"),
        ({"srq_limit": 1 << 20}, "srq_limit must be"),
        ({"max_wr": 40, "srq_limit": 41}, "srq_limit must be 0 to 40"),
    ],
)
def test_changes_that_cannot_be(srq, change, text):
    with pytest.raises(ValueError, match=text):
        srq.modify(**change)


# ---------------------------------------------------------------- receives


def test_several_qps_share_one_queue(pd, cq, quiet, srq, mr):
    made = pairs(pd, cq, quiet, srq, 3)
    srq.post_recv(*receives(mr, 9))
    for i, (_sharer, peer) in enumerate(made):
        mr.view[4096 + i] = 65 + i
        peer.post_send(*(pvl.SendWR(sg_list=[mr[4096 + i : 4096 + i + 1 + n]]) for n in range(3)))
    got = completions(cq, 9)
    assert {wc.wr_id for wc in got} == set(range(9))
    for i, (sharer, _peer) in enumerate(made):
        mine = [wc for wc in got if wc.qp_num == sharer.qp_num]
        assert [wc.byte_len for wc in mine] == [1, 2, 3]
        assert {mr.view[wc.wr_id * 64] for wc in mine} == {65 + i}
        assert all(wc.is_recv for wc in mine)
    assert srq.recvs_in_flight == 0


def test_a_qp_with_a_shared_queue_has_none_of_its_own(pd, cq, srq, mr):
    qp = srq_qp(pd, cq, srq)
    assert qp.srq is srq
    qp.to_init()
    with pytest.raises(pvl.StateError, match="takes its receives from an SRQ: post them with SRQ"):
        qp.post_recv(*receives(mr, 1))


def test_receives_can_be_posted_before_any_qp_is_there(srq, mr):
    srq.post_recv()
    srq.post_recv(*receives(mr, 2))
    assert srq.recvs_in_flight == 2


def test_a_full_queue_says_how_many_it_took(srq, mr):
    with pytest.raises(pvl.QueueFullError, match="ibv_post_srq_recv failed: ENOMEM") as caught:
        srq.post_recv(*receives(mr, srq.max_wr + 5, size=4))
    assert caught.value.posted == srq.max_wr
    assert srq.recvs_in_flight == srq.max_wr


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (lambda mr: pvl.RecvWR(sg_list=[mr, mr, mr, mr]), ValueError, "4 SGEs are more than this SRQ's max_sge"),
        (lambda mr: pvl.RecvWR(sg_list=mr), TypeError, "sg_list is a list of SGEs"),
        (lambda mr: pvl.RecvWR(wr_id=-1), ValueError, "wr_id must be"),
        (lambda mr: pvl.SendWR(), TypeError, "post_recv takes RecvWR"),
    ],
)
def test_requests_that_cannot_be_right(srq, mr, bad, error, text):
    with pytest.raises(error, match=text):
        srq.post_recv(pvl.RecvWR(sg_list=[mr]), bad(mr))
    assert srq.recvs_in_flight == 0


def test_memory_that_may_not_be_written(pd, srq):
    with pd.reg_mr(b"constant") as mr, pytest.raises(ValueError, match="without LOCAL_WRITE"):
        srq.post_recv(pvl.RecvWR(sg_list=[mr]))


# ---------------------------------------------------------------- what receives hold


def test_a_receive_holds_its_memory_until_it_completes(pd, cq, quiet, srq, mr):
    ((_sharer, peer),) = pairs(pd, cq, quiet, srq, 1)
    other = pd.alloc(64)
    srq.post_recv(pvl.RecvWR(sg_list=[mr[0:10]], wr_id=1), pvl.RecvWR(sg_list=[other], wr_id=2))
    peer.post_send(pvl.SendWR())
    completions(cq, 1)
    mr.close()
    with pytest.raises(pvl.BusyError, match="used by 1 request"):
        other.close()


def test_closing_the_queue_lets_go_of_what_was_never_received(pd, mr):
    srq = pd.create_srq(pvl.SRQInitAttr(max_wr=8))
    srq.post_recv(*receives(mr, 4))
    srq.close()
    mr.close()


def test_a_dropped_queue_lets_go_as_well(pd, mr):
    srq = pd.create_srq(pvl.SRQInitAttr(max_wr=8))
    srq.post_recv(*receives(mr, 4))
    with pytest.warns(ResourceWarning, match="SRQ of .* was never closed"):
        del srq
    mr.close()


def test_closing_a_qp_leaves_the_queue_to_the_others(pd, cq, quiet, srq, mr):
    (first, first_peer), (second, second_peer) = pairs(pd, cq, quiet, srq, 2)
    srq.post_recv(*receives(mr, 3))
    first_peer.post_send(pvl.SendWR())
    completions(quiet, 1)
    first.close()  # with a completion that nobody has polled
    assert [(wc.wr_id, wc.status, wc.is_recv) for wc in completions(cq, 1)] == [(0, SUCCESS, True)]
    assert srq.recvs_in_flight == 2
    second_peer.post_send(pvl.SendWR())
    assert [(wc.wr_id, wc.qp_num) for wc in completions(cq, 1)] == [(1, second.qp_num)]


def test_resetting_a_qp_leaves_the_queue_alone(pd, cq, quiet, srq, mr):
    ((sharer, _peer),) = pairs(pd, cq, quiet, srq, 1)
    srq.post_recv(*receives(mr, 3))
    sharer.to_error()
    assert cq.poll() == []  # nothing of a shared queue is flushed
    sharer.to_reset()
    assert srq.recvs_in_flight == 3
    with pytest.raises(pvl.BusyError):
        mr.close()


def test_the_queue_closes_its_qps_first(pd, cq, mr):
    srq = pd.create_srq(pvl.SRQInitAttr(max_wr=8))
    qp = srq_qp(pd, cq, srq)
    srq.post_recv(*receives(mr, 2))
    srq.close()
    assert qp.closed
    mr.close()


def test_the_domain_closes_in_the_one_order_that_works(context, cq, quiet):
    pd = context.alloc_pd()
    srq = pd.create_srq(pvl.SRQInitAttr(max_wr=8))
    ((sharer, _peer),) = pairs(pd, cq, quiet, srq, 1)
    mr = pd.alloc(256)  # the youngest, and in use
    srq.post_recv(*receives(mr, 2))
    pd.close()
    assert (srq.closed, sharer.closed, mr.closed) == (True, True, True)


def test_a_queue_of_another_device_or_kind(pd, cq, srq):
    with pytest.raises(TypeError, match="srq must be an SRQ"):
        srq_qp(pd, cq, cq)
    with pvl.open_device("rxe0") as other, pytest.raises(ValueError, match="srq belongs to"):
        srq_qp(pd, cq, other.alloc_pd().create_srq(pvl.SRQInitAttr(max_wr=4)))


# ---------------------------------------------------------------- datagrams


def test_datagrams_from_a_shared_queue_need_room_for_the_header(context, pd, cq, srq, mr):
    assert srq.grh_room == 0
    qp = srq_qp(pd, cq, srq, pvl.QPType.UD)
    assert srq.grh_room == 40
    with pytest.raises(ValueError, match="needs room for the GRH"):
        srq.post_recv(*receives(mr, 1, size=39))
    qp.to_init(qkey=7)
    qp.to_rtr()
    qp.to_rts(sq_psn=1)
    srq.post_recv(*receives(mr, 1, size=60, first=5))
    ah = pd.create_ah(path_to(context, own_gid(context)))
    mr.view[4096:4100] = b"data"
    qp.post_send(pvl.SendWR(sg_list=[mr[4096:4100]], ah=ah, remote_qpn=qp.qp_num, remote_qkey=7))
    got = next(wc for wc in completions(cq, 2) if wc.is_recv)
    assert (got.wr_id, bytes(pvl.split_grh(mr[0:60], got)[1])) == (5, b"data")
