"""The work request API on a real driver: batches that are posted whole, or not at all."""

from __future__ import annotations

import gc
import threading

import pytest
from support import completions, connect_qps, in_thread, own_gid, path_to

import pyverbs_lite as pvl
from pyverbs_lite.ffi import lib

pytestmark = pytest.mark.rdma

A, Ops, Op, T = pvl.AccessFlags, pvl.SendOpsFlags, pvl.WROpcode, pvl.QPType
ACCESS = A.LOCAL_WRITE | A.REMOTE_WRITE | A.REMOTE_READ | A.REMOTE_ATOMIC
#: All that soft-RoCE has for RC.
RC_OPS = (
    Ops.WITH_SEND
    | Ops.WITH_SEND_WITH_IMM
    | Ops.WITH_SEND_WITH_INV
    | Ops.WITH_RDMA_WRITE
    | Ops.WITH_RDMA_WRITE_WITH_IMM
    | Ops.WITH_RDMA_READ
    | Ops.WITH_ATOMIC_CMP_AND_SWP
    | Ops.WITH_ATOMIC_FETCH_AND_ADD
    | Ops.WITH_LOCAL_INV
    | Ops.WITH_BIND_MW
)


@pytest.fixture
def cq(context):
    return context.create_cq(256)


@pytest.fixture
def quiet(context):
    return context.create_cq(256)


@pytest.fixture
def mr(pd):
    return pd.alloc(16384, ACCESS)


def qp_for(pd, cq, ops, qp_type=T.RC, depth=16, **options):
    cap = pvl.QPCap(max_send_wr=depth, max_recv_wr=16, max_send_sge=4, max_recv_sge=2, max_inline_data=64)
    init = pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, qp_type=qp_type, send_ops_flags=ops, **options)
    return pd.create_qp(init)


@pytest.fixture
def pair(pd, cq, quiet):
    left, right = qp_for(pd, cq, RC_OPS), qp_for(pd, quiet, Ops.WITH_SEND)
    connect_qps(left, right, timeout=10, retry_cnt=2, rnr_retry=1)
    return left, right


def remote(mr, start, stop):
    return pvl.RemoteBuffer(mr.addr + start, mr.rkey, stop - start)


def receives(right, mr, count=4):
    right.post_recv(*(pvl.RecvWR(sg_list=[mr[i * 256 : (i + 1) * 256]], wr_id=i) for i in range(count)))


# ---------------------------------------------------------------- the operations


def test_a_batch_of_sends(pair, cq, quiet, mr):
    left, right = pair
    receives(right, mr)
    mr.view[8192:8200] = b"abcdefgh"
    with left.wr_batch() as wr:
        wr.send(sg_list=[mr[8192:8195]], wr_id=7)
        wr.send(sg_list=[mr[8195:8196]], wr_id=8, imm=0x89ABCDEF)
        wr.send(wr_id=9)
        assert len(wr) == 3
        assert left.sends_in_flight == 0  # not posted yet
    assert [wc.wr_id for wc in completions(cq, 3)] == [7, 8, 9]
    got = completions(quiet, 3)
    assert [(wc.wr_id, wc.byte_len, wc.imm_data) for wc in got] == [(0, 3, None), (1, 1, 0x89ABCDEF), (2, 0, None)]
    assert bytes(mr.view[0:3]) == b"abc"
    assert mr.view[256] == ord("d")


def test_one_sided_operations(pair, cq, mr):
    left, _right = pair
    mr.view[8192:8200] = b"abcdefgh"
    mr.view[0:8] = (100).to_bytes(8, "little")
    with left.wr_batch() as wr:
        wr.rdma_write(remote(mr, 64, 72), sg_list=[mr[8192:8200]], wr_id=1)
        wr.rdma_read(remote(mr, 64, 72), sg_list=[mr[9000:9008]], wr_id=2)
        wr.atomic_fetch_add(remote(mr, 0, 8), 5, sg_list=[mr[9100:9108]], wr_id=3)
        wr.atomic_cmp_swp(remote(mr, 0, 8), 105, 0xFFEEDDCCBBAA9988, sg_list=[mr[9200:9208]], wr_id=4)
    wcs = completions(cq, 4)
    assert [(wc.wr_id, wc.status) for wc in wcs] == [(i, pvl.WCStatus.SUCCESS) for i in (1, 2, 3, 4)]
    assert bytes(mr.view[9000:9008]) == b"abcdefgh"
    assert [int.from_bytes(mr.view[at : at + 8], "little") for at in (9100, 9200, 0)] == [100, 105, 0xFFEEDDCCBBAA9988]


def test_a_write_that_notifies(pair, cq, quiet, mr):
    left, right = pair
    right.post_recv(pvl.RecvWR(wr_id=6))
    with left.wr_batch() as wr:
        wr.rdma_write(remote(mr, 64, 67), sg_list=[mr[8192:8195]], imm=0x01020304)
    (got,) = completions(quiet, 1)
    assert (got.wr_id, got.imm_data, got.byte_len) == (6, 0x01020304, 3)


def test_sges_of_one_length(pair, quiet, mr):
    left, right = pair
    receives(right, mr)
    mr.view[8192:8204] = b"abcdefghijkl"
    with left.wr_batch() as wr:
        wr.send(sg_list=[mr[8200:8204], mr[8192:8196], mr[8196:8200]])
    (got,) = completions(quiet, 1)
    assert (got.byte_len, bytes(mr.view[0:12])) == (12, b"ijklabcdefgh")


def test_sges_of_several_lengths(pair, quiet, mr):
    """Before rdma-core 64 the provider would send as many bytes as if all were as long as the first."""
    left, right = pair
    receives(right, mr)
    if lib.PVL_HAS_ALLOC_BUF < 0:
        with pytest.raises(pvl.UnsupportedError, match="SGEs of different lengths on soft-RoCE"), left.wr_batch() as wr:
            wr.send(sg_list=[mr[8200:8204], mr[8192:8199]])
        assert left.sends_in_flight == 0
    else:
        with left.wr_batch() as wr:
            wr.send(sg_list=[mr[8200:8204], mr[8192:8199]])
        assert completions(quiet, 1)[0].byte_len == 11


def test_inline_bytes_are_copied_at_once(pair, quiet, mr):
    left, right = pair
    receives(right, mr)
    scratch = bytearray(b"hello")
    with left.wr_batch() as wr:
        wr.send(inline=scratch)
        wr.send(inline=[scratch, b", ", memoryview(b"world")])
        wr.send(inline=b"")
        scratch[:] = b"XXXXX"
        scratch.append(1)  # nothing holds it
    got = completions(quiet, 3)
    assert [wc.byte_len for wc in got] == [5, 12, 0]
    assert bytes(mr.view[0:5]) == b"hello"
    assert bytes(mr.view[256:268]) == b"hello, world"


def test_unsignaled_requests_are_silent(pair, cq, mr):
    left, _right = pair
    with left.wr_batch() as wr:
        for i in range(5):
            wr.rdma_write(remote(mr, 0, 8), wr_id=i, signaled=False)
        wr.rdma_write(remote(mr, 0, 8), wr_id=99, fence=True)
    assert [wc.wr_id for wc in completions(cq, 1)] == [99]
    assert left.sends_in_flight == 0


def test_a_solicited_event(context, pd, cq, mr):
    channel = context.create_comp_channel()
    watched = context.create_cq(16, channel)
    left, right = qp_for(pd, cq, RC_OPS), qp_for(pd, watched, Ops.WITH_SEND)
    connect_qps(left, right)
    receives(right, mr)
    watched.req_notify(solicited_only=True)
    with left.wr_batch() as wr:
        wr.send()
    completions(cq, 1)
    assert channel.get_events() == 0
    with left.wr_batch() as wr:
        wr.send(solicited=True)
    completions(cq, 1)
    completions(watched, 2)
    assert channel.get_events() == 1


def test_8_bytes_written_as_one(pd, cq, quiet, mr):
    if lib.PVL_HAS_ATOMIC_WRITE < 0:
        left = qp_for(pd, cq, RC_OPS)
        with pytest.raises(pvl.UnsupportedError, match="needs rdma-core 44"), left.wr_batch() as wr:
            wr.atomic_write(remote(mr, 0, 8), bytes(8))
        return
    left, right = qp_for(pd, cq, Ops.WITH_ATOMIC_WRITE), qp_for(pd, quiet, Ops.WITH_SEND)
    connect_qps(left, right)
    value = bytearray(b"12345678")
    with left.wr_batch() as wr:
        wr.atomic_write(remote(mr, 64, 72), value, wr_id=3)
        value[:] = b"XXXXXXXX"
        with pytest.raises(ValueError, match="8 bytes at an address that is a multiple of 8"):
            wr.atomic_write(remote(mr, 68, 76), value)
        with pytest.raises(ValueError, match="an atomic works on 8 bytes"):
            wr.atomic_write(remote(mr, 64, 72), b"1234567")
        with pytest.raises(ValueError, match="sg_list cannot be given here"):
            wr.atomic_write(remote(mr, 64, 72), value, sg_list=[])
    (done,) = completions(cq, 1)
    assert (done.wr_id, done.status) == (3, pvl.WCStatus.SUCCESS)
    assert bytes(mr.view[64:72]) == b"12345678"


def test_a_flush_of_what_was_written(pair, mr):
    left, _right = pair
    text = "was not created for FLUSH" if lib.PVL_HAS_FLUSH > 0 else "needs rdma-core 45"
    with pytest.raises((pvl.UnsupportedError, ValueError), match=text), left.wr_batch() as wr:
        wr.flush(remote(mr, 0, 8), 1, 0)


def test_memory_windows(pd, pair, cq, quiet):
    """Bound, used, and taken away by the peer; bound again, and taken away by ourselves."""
    left, right = pair
    region = pd.alloc(4096, ACCESS | A.MW_BIND)
    with pd.alloc_mw() as mw:
        first = mw.next_rkey()
        with left.wr_batch() as wr:
            wr.bind_mw(mw, first, pvl.MWBindInfo.of(region[1024:1032], A.REMOTE_WRITE | A.REMOTE_READ), wr_id=1)
        assert [(wc.wr_id, wc.opcode) for wc in completions(cq, 1)] == [(1, pvl.WCOpcode.BIND_MW)]
        assert mw.rkey == first
        window = pvl.RemoteBuffer(region.addr + 1024, first, 8)
        right.post_send(pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[region[0:8]], remote=window))
        completions(quiet, 1)[0].raise_for_status()
        with left.wr_batch() as wr:
            wr.local_inv(first, wr_id=2)
            wr.rdma_read(remote(region, 0, 8), sg_list=[region[8:16]], wr_id=3)
        assert [(wc.wr_id, wc.status) for wc in completions(cq, 2)] == [(i, pvl.WCStatus.SUCCESS) for i in (2, 3)]
        second = mw.next_rkey()
        with left.wr_batch() as wr:
            wr.bind_mw(mw, second, pvl.MWBindInfo.of(region[0:8], A.REMOTE_READ))
        completions(cq, 1)[0].raise_for_status()


def test_a_message_that_takes_a_key_away(pd, cq, quiet):
    left, right = qp_for(pd, cq, RC_OPS), qp_for(pd, quiet, RC_OPS)
    connect_qps(left, right)
    region = pd.alloc(4096, ACCESS | A.MW_BIND)
    with pd.alloc_mw() as mw:
        with left.wr_batch() as wr:
            wr.bind_mw(mw, mw.next_rkey(), pvl.MWBindInfo.of(region[0:8], A.REMOTE_READ))
        completions(cq, 1)[0].raise_for_status()
        left.post_recv(pvl.RecvWR(wr_id=9))
        with right.wr_batch() as wr:
            wr.send_inv(mw.rkey)
        (got,) = completions(cq, 1)
        assert (got.wr_id, got.invalidated_rkey) == (9, mw.rkey)
        assert mw.mr is None


def test_datagrams(context, pd, cq, mr):
    left, right = (qp_for(pd, cq, Ops.WITH_SEND | Ops.WITH_SEND_WITH_IMM, T.UD) for _ in range(2))
    for qp, key in ((left, 5), (right, 6)):
        qp.to_init(qkey=key)
        qp.to_rtr()
        qp.to_rts(sq_psn=9)
    ah = pd.create_ah(path_to(context, own_gid(context)))
    receives(right, mr)
    mr.view[8192:8195] = b"abc"
    with left.wr_batch() as wr:
        wr.send(sg_list=[mr[8192:8195]], ah=ah, remote_qpn=right.qp_num, remote_qkey=6, wr_id=20)
        wr.send(inline=b"xy", imm=77, ah=ah, remote_qpn=right.qp_num, remote_qkey=6, wr_id=21)
        with pytest.raises(ValueError, match="ah is missing"):
            wr.send()
    wcs = completions(cq, 4)
    assert [wc.wr_id for wc in wcs if not wc.is_recv] == [20, 21]
    payloads = [bytes(pvl.split_grh(mr[wc.wr_id * 256 :], wc)[1]) for wc in wcs if wc.is_recv]
    assert payloads == [b"abc", b"xy"]


def test_unreliable_connections(pd, cq, quiet, mr):
    left, right = qp_for(pd, cq, Ops.WITH_SEND | Ops.WITH_RDMA_WRITE, T.UC), qp_for(pd, quiet, Ops.WITH_SEND, T.UC)
    row = own_gid(pd.context)
    for mine, other in ((left, right), (right, left)):
        mine.to_init(qp_access_flags=A.REMOTE_WRITE)
        mine.to_rtr(ah_attr=path_to(pd.context, row), dest_qp_num=other.qp_num, rq_psn=5)
        mine.to_rts(sq_psn=5)
    receives(right, mr)
    with left.wr_batch() as wr:
        wr.rdma_write(remote(mr, 4096, 4099), inline=b"one")
        wr.send(inline=b"two")
    assert completions(quiet, 1)[0].byte_len == 3
    assert bytes(mr.view[4096:4099]) == b"one"


# ---------------------------------------------------------------- all or nothing


def test_an_exception_in_the_block_posts_nothing(pair, cq, quiet, mr):
    left, right = pair
    receives(right, mr)
    with pytest.raises(ZeroDivisionError), left.wr_batch() as wr:
        wr.send(wr_id=1)
        wr.send(wr_id=1 // 0)
    assert left.sends_in_flight == 0
    with left.wr_batch() as wr:
        wr.send(wr_id=2)
    assert [wc.wr_id for wc in completions(cq, 1)] == [2]
    assert [wc.wr_id for wc in completions(quiet, 1)] == [0]


def test_an_empty_batch_is_nothing(pair, cq):
    with pair[0].wr_batch():
        pass
    assert cq.poll() == []


def test_a_bad_request_can_be_left_out(pair, cq, mr):
    left, _right = pair
    with left.wr_batch() as wr:
        wr.rdma_write(remote(mr, 0, 4), wr_id=1)
        with pytest.raises(ValueError, match="reaches beyond"):
            wr.rdma_write(remote(mr, 0, 4), sg_list=[mr[0:5]], wr_id=2)
        wr.rdma_write(remote(mr, 0, 4), wr_id=3)
    assert [wc.wr_id for wc in completions(cq, 2)] == [1, 3]


def test_a_full_queue_takes_none_of_them(pd, cq, quiet, mr):
    left, right = qp_for(pd, cq, RC_OPS, depth=8), qp_for(pd, quiet, Ops.WITH_SEND)
    connect_qps(left, right)
    room = left.cap.max_send_wr
    with left.wr_batch() as wr:
        for i in range(room - 2):
            wr.rdma_write(remote(mr, 0, 8), wr_id=i, signaled=i == room - 3)
    completions(cq, 1)
    # All slots are free again; now fill some of them with requests that cannot end: the peer has no receive.
    for _attempt in range(2):
        with left.wr_batch() as wr:
            for i in range(room):
                wr.rdma_write(remote(mr, 0, 8), wr_id=i)
        assert [wc.wr_id for wc in completions(cq, room)] == list(range(room))


def test_a_batch_that_finds_too_few_free_slots(pd, cq, quiet, mr):
    left, right = qp_for(pd, cq, RC_OPS, depth=8), qp_for(pd, quiet, Ops.WITH_SEND)
    connect_qps(left, right, rnr_retry=7)
    room = left.cap.max_send_wr
    left.post_send(*(pvl.SendWR(wr_id=i) for i in range(3)))  # they wait for receives
    with pytest.raises(pvl.QueueFullError, match="ibv_wr_complete") as caught, left.wr_batch() as wr:
        for i in range(room):
            wr.send(sg_list=[mr[0:8]], wr_id=100 + i)
    assert caught.value.posted == 0
    assert left.sends_in_flight == 3
    receives(right, mr, 4)
    with left.wr_batch() as wr:
        wr.send(wr_id=200)
    assert [wc.wr_id for wc in completions(cq, 4)] == [0, 1, 2, 200]
    assert left.sends_in_flight == 0


def test_a_batch_longer_than_the_queue_is_refused_at_once(pair, mr):
    left, _right = pair
    text = f"a batch is posted whole, and this QP's max_send_wr is {left.cap.max_send_wr}"
    with pytest.raises(ValueError, match=text), left.wr_batch() as wr:
        for _ in range(left.cap.max_send_wr + 1):
            wr.send()
    assert left.sends_in_flight == 0


# ---------------------------------------------------------------- what is refused


def test_operations_that_the_qp_was_not_made_for(pd, cq, quiet, mr):
    left, right = qp_for(pd, cq, Ops.WITH_RDMA_WRITE), qp_for(pd, quiet, Ops.WITH_SEND)
    connect_qps(left, right)
    with left.wr_batch() as wr:
        with pytest.raises(ValueError, match="not created for SEND: give WITH_SEND in its send_ops_flags"):
            wr.send()
        with pytest.raises(ValueError, match="give WITH_RDMA_WRITE_WITH_IMM"):
            wr.rdma_write(remote(mr, 0, 8), imm=5)
        with pytest.raises(ValueError, match="give WITH_BIND_MW"):
            wr.bind_mw(None, 5, None)
        with pytest.raises(ValueError, match="give WITH_LOCAL_INV"):
            wr.local_inv(5)
        with pytest.raises(ValueError, match="give WITH_SEND_WITH_INV"):
            wr.send_inv(5)
        wr.rdma_write(remote(mr, 0, 8))
    completions(cq, 1)


def test_a_qp_without_the_api(pd, cq, quiet, mr):
    plain, peer = qp_for(pd, cq, Ops(0)), qp_for(pd, quiet, Ops.WITH_SEND)
    connect_qps(plain, peer)
    with pytest.raises(pvl.StateError, match="was made without send_ops_flags"):
        plain.wr_batch()


def test_what_the_device_has_not(pd, cq):
    with pytest.raises(pvl.UnsupportedError, match="ibv_create_qp_ex"):
        qp_for(pd, cq, Ops.WITH_TSO, T.UD, max_tso_header=64)
    with pytest.raises(pvl.UnsupportedError):
        qp_for(pd, cq, Ops.WITH_RDMA_READ, T.UC)
    with pytest.raises(pvl.UnsupportedError):
        qp_for(pd, cq, Ops(0), create_flags=pvl.QPCreateFlags.BLOCK_SELF_MCAST_LB)
    with pytest.raises(pvl.UnsupportedError):
        qp_for(pd, cq, Ops(0), T.UD, source_qpn=5)
    assert not [child for child in pd._children if isinstance(child, pvl.QP)]


def test_iwarp_here_has_no_such_api():
    with pvl.open_device("siw0") as context:
        pd, cq = context.alloc_pd(), context.create_cq(16)
        with pytest.raises(pvl.UnsupportedError):
            qp_for(pd, cq, Ops.WITH_SEND)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"source_qpn": 5}, "a RC QP takes no source_qpn: UD do"),
        ({"max_tso_header": 64}, "a RC QP takes no max_tso_header"),
        ({"rx_hash": object()}, "a RC QP takes no rx_hash"),
    ],
)
def test_members_that_another_type_has(pd, cq, given, text):
    with pytest.raises(ValueError, match=text):
        qp_for(pd, cq, Ops(0), **given)


def test_batches_do_not_nest(pair, cq, mr):
    left, _right = pair
    with left.wr_batch() as outer:
        with pytest.raises(pvl.StateError, match="open in this thread already: they cannot be nested"):
            left.wr_batch().__enter__()
        with pytest.raises(pvl.StateError, match="add the request to it, or end it first"):
            left.post_send(pvl.SendWR(opcode=Op.RDMA_WRITE, remote=remote(mr, 0, 8)))
        outer.rdma_write(remote(mr, 0, 8), wr_id=5)
    assert [wc.wr_id for wc in completions(cq, 1)] == [5]


def test_a_batch_is_of_its_block(pair, mr):
    left, _right = pair
    batch = left.wr_batch()
    with pytest.raises(pvl.StateError, match="inside of the batch's own with block"):
        batch.send()
    with batch:
        pass
    with pytest.raises(pvl.StateError, match="inside of the batch's own with block"):
        batch.send()
    with pytest.raises(pvl.StateError, match="was used already"), batch:
        pass


def test_a_batch_is_of_its_thread(pair, cq, mr):
    left, _right = pair
    with left.wr_batch() as wr:
        with pytest.raises(pvl.StateError, match="by its own thread"):
            in_thread(wr.rdma_write, remote(mr, 0, 8))(5.0)
        # Another thread's posts do not wait for this block.
        other = pvl.SendWR(opcode=Op.RDMA_WRITE, remote=remote(mr, 0, 8), wr_id=1)
        in_thread(left.post_send, other)(5.0)
        wr.rdma_write(remote(mr, 0, 8), wr_id=2)
    assert [wc.wr_id for wc in completions(cq, 2)] == [1, 2]


def test_too_early_to_send(pd, cq, mr):
    qp = qp_for(pd, cq, RC_OPS)
    with pytest.raises(pvl.StateError, match="cannot send: bring it to RTS first"), qp.wr_batch() as wr:
        wr.send(sg_list=[mr])
    assert qp.sends_in_flight == 0
    mr.close()


def test_a_qp_that_was_closed_meanwhile(pair, mr):
    left, _right = pair
    with pytest.raises(pvl.ClosedError), left.wr_batch() as wr:
        wr.send(sg_list=[mr[0:8]])
        left.close()
    mr.close()


def test_a_region_that_was_closed_meanwhile(pd, pair):
    left, _right = pair
    scratch = pd.alloc(64)
    with pytest.raises(pvl.ClosedError), left.wr_batch() as wr:
        wr.send(sg_list=[scratch[0:8]])
        scratch.close()
    assert left.sends_in_flight == 0


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"wr_id": -1}, ValueError, "wr_id must be"),
        ({"imm": 1 << 32}, ValueError, "imm_data"),
        ({"inline": bytes(65)}, ValueError, "65 bytes do not fit inline: this QP's max_inline_data is"),
        ({"inline": "text"}, TypeError, "inline data must support the buffer protocol"),
        ({"sg_list": [], "inline": b""}, ValueError, "sg_list cannot be given here"),
        ({"remote_srqn": 5}, ValueError, "takes no remote_srqn"),
        ({"nonsense": 5}, TypeError, "nonsense"),
    ],
)
def test_requests_that_cannot_be_right(pair, options, error, text):
    left, _right = pair
    if "inline" in options and options["inline"] == bytes(65):
        options = {"inline": bytes(left.cap.max_inline_data + 1)}
        text = "do not fit inline"
    with pytest.raises(error, match=text), left.wr_batch() as wr:
        wr.send(**options)
    assert left.sends_in_flight == 0


# ---------------------------------------------------------------- holds and threads


def test_requests_hold_their_memory(pd, cq, quiet, mr):
    left, right = qp_for(pd, cq, RC_OPS), qp_for(pd, quiet, Ops.WITH_SEND)
    connect_qps(left, right, rnr_retry=7)
    with left.wr_batch() as wr:
        wr.send(sg_list=[mr[0:8]])
    assert left.sends_in_flight == 1
    with pytest.raises(pvl.BusyError):
        mr.close()
    other = pd.alloc(64)
    right.post_recv(pvl.RecvWR(sg_list=[other]))
    completions(cq, 1)
    mr.close()


def test_a_batch_that_was_forgotten_holds_nothing(pair, mr):
    left, _right = pair
    batch = left.wr_batch()
    batch.__enter__().send(sg_list=[mr[0:8]])
    del batch
    gc.collect()
    mr.close()
    with left.wr_batch() as wr:  # this thread is free again
        assert len(wr) == 0


def test_threads_post_whole_batches(pair, cq, mr):
    left, _right = pair
    failures = []

    def work(number):
        try:
            for _ in range(10):
                while True:
                    try:
                        with left.wr_batch() as wr:
                            for i in range(3):
                                wr.rdma_write(remote(mr, 0, 8), wr_id=number * 10 + i)
                        break
                    except pvl.QueueFullError:
                        arrived.wait(0.01)
        except BaseException as error:
            failures.append(error)

    arrived = threading.Event()
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    ids = [wc.wr_id for wc in completions(cq, 4 * 10 * 3)]
    for thread in threads:
        thread.join(10)
    assert failures == []
    for at in range(0, len(ids), 3):
        first = ids[at]
        assert ids[at : at + 3] == [first, first + 1, first + 2]
