"""Messages both ways over each kind of QP, queue and region, and what must not get through."""

from __future__ import annotations

import select

import pytest
from support import ALL_ACCESS, completions, connect_qps, own_gid, path_to

import pyverbs_lite as pvl
from pyverbs_lite.ffi import lib

pytestmark = pytest.mark.rdma

A, Op, Ops, S, T = pvl.AccessFlags, pvl.WROpcode, pvl.SendOpsFlags, pvl.WCStatus, pvl.QPType
LEFT_KEY, RIGHT_KEY = 0x00C0FFEE, 0x0BADCAFE
OPS = (
    Ops.WITH_SEND
    | Ops.WITH_SEND_WITH_IMM
    | Ops.WITH_RDMA_WRITE
    | Ops.WITH_RDMA_WRITE_WITH_IMM
    | Ops.WITH_RDMA_READ
    | Ops.WITH_ATOMIC_CMP_AND_SWP
    | Ops.WITH_ATOMIC_FETCH_AND_ADD
    | Ops.WITH_BIND_MW
)
TO_RTS = {"timeout": 10, "retry_cnt": 2, "rnr_retry": 1}
connected = pytest.mark.parametrize("qp_type", [T.RC, T.UC, T.UD])


class Side:
    """A QP with its own CQ and memory: requests come from the first half, what arrives goes into the second."""

    def __init__(self, context, pd, qp_type, qkey, *, cq=None, access=ALL_ACCESS, ops=None):
        self.cq = cq or context.create_cq(64)
        self.mr = pd.alloc(4096, access)
        if ops is None:
            ops = {T.RC: OPS, T.UC: Ops.WITH_SEND | Ops.WITH_SEND_WITH_IMM | Ops.WITH_RDMA_WRITE}.get(
                qp_type, Ops.WITH_SEND | Ops.WITH_SEND_WITH_IMM
            )
        cap = pvl.QPCap(max_send_wr=32, max_recv_wr=32, max_send_sge=2, max_recv_sge=2, max_inline_data=0)
        self.qp = pd.create_qp(
            pvl.QPInitAttr(send_cq=self.cq, recv_cq=self.cq, cap=cap, qp_type=qp_type, send_ops_flags=ops)
        )
        self.qkey = qkey
        self.to = {}

    def post_recv(self, wr_id=0):
        self.qp.post_recv(pvl.RecvWR(sg_list=[self.mr[2048:]], wr_id=wr_id))

    def payload(self, wc):
        """Return what a receive brought."""
        start = 2048 + self.qp.grh_room
        return bytes(self.mr.view[start : 2048 + wc.byte_len])

    def send(self, data, *, batch=False, imm=None):
        """Send some bytes, by a request or by a batch."""
        self.mr.view[: len(data)] = data
        sg_list = [self.mr[: len(data)]] if data else []
        if batch:
            with self.qp.wr_batch() as wr:
                wr.send(sg_list=sg_list, imm=imm, **self.to)
        else:
            opcode = Op.SEND if imm is None else Op.SEND_WITH_IMM
            self.qp.post_send(pvl.SendWR(opcode=opcode, sg_list=sg_list, imm_data=imm, **self.to))


def connect(context, pd, left, right):
    """Bring two QPs of one type to RTS, each the other's peer."""
    kind = left.qp.qp_type
    if kind == T.RC:
        return connect_qps(left.qp, right.qp, **TO_RTS)
    row = own_gid(context)
    for mine, other, psn in ((left, right, 0x111111), (right, left, 0x222222)):
        if kind == T.UD:
            mine.qp.to_init(qkey=mine.qkey)
            mine.qp.to_rtr()
            mine.to = {"ah": pd.create_ah(path_to(context, row)), "remote_qpn": other.qp.qp_num}
            mine.to["remote_qkey"] = other.qkey
        else:
            mine.qp.to_init(qp_access_flags=A.REMOTE_WRITE)
            mine.qp.to_rtr(ah_attr=path_to(context, row), dest_qp_num=other.qp.qp_num, rq_psn=0x333333 - psn)
        mine.qp.to_rts(sq_psn=psn)
    return None


@pytest.fixture
def sides(context, pd):
    """Return a function that makes two connected sides."""

    def make(qp_type, *, cqs=(None, None), **options):
        left = Side(context, pd, qp_type, LEFT_KEY, cq=cqs[0], **options)
        right = Side(context, pd, qp_type, RIGHT_KEY, cq=cqs[1], **options)
        connect(context, pd, left, right)
        return left, right

    return make


def ping_pong(left, right, rounds, wait=completions, **how):
    """Send to and fro, a new length each time; every byte, length and immediate is checked on the other side."""
    for i in range(rounds):
        for sender, receiver, letter in ((left, right, b"c"), (right, left, b"s")):
            receiver.post_recv(wr_id=100 + i)
            imm = None if how.get("imm") is None else how["imm"] + i
            text = letter * (1 + 37 * i)
            sender.send(text, batch=how.get("batch", False), imm=imm)
            (sent,) = wait(sender.cq, 1)
            assert (sent.status, sent.is_recv) == (S.SUCCESS, False)
            (got,) = wait(receiver.cq, 1)
            assert (got.status, got.wr_id, got.imm_data) == (S.SUCCESS, 100 + i, imm)
            assert receiver.payload(got) == text


# ---------------------------------------------------------------- two-sided


@connected
@pytest.mark.parametrize("imm", [None, 0x89ABCDE0])
@pytest.mark.parametrize("batch", [False, True], ids=["post_send", "wr_batch"])
def test_messages_both_ways(sides, qp_type, batch, imm):
    ping_pong(*sides(qp_type), rounds=10, batch=batch, imm=imm)


@connected
@pytest.mark.parametrize("batch", [False, True], ids=["post_send", "wr_batch"])
def test_messages_of_nothing_both_ways(sides, qp_type, batch):
    left, right = sides(qp_type)
    for sender, receiver in ((left, right), (right, left)) * 3:
        receiver.post_recv(wr_id=5)
        sender.send(b"", batch=batch)
        assert completions(sender.cq, 1)[0].status == S.SUCCESS
        (got,) = completions(receiver.cq, 1)
        # Of an empty datagram, too, the 40 bytes in front are counted.
        assert (got.wr_id, got.byte_len) == (5, receiver.qp.grh_room)


@connected
def test_every_completion_wakes_a_sleeper(context, sides, qp_type):
    """Arm, look, sleep on the descriptor, take the event, look again: for each completion of both sides."""
    channels = [context.create_comp_channel() for _ in range(2)]
    cqs = [context.create_cq(64, channel) for channel in channels]
    events = dict.fromkeys(cqs, 0)

    def sleep(cq, count):
        assert count == 1
        channel = channels[cqs.index(cq)]
        cq.req_notify()
        found = cq.poll(1)
        if not found:
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            assert poll.poll(10_000)
            events[cq] += channel.get_events()
            found = cq.poll(1)
        return found or completions(cq, 1)

    ping_pong(*sides(qp_type, cqs=cqs), rounds=20, wait=sleep)
    for cq, channel in zip(cqs, channels, strict=True):
        # An arming whose completion was found without sleeping may have left its event.
        assert events[cq] + channel.get_events() > 0
        assert cq.poll() == []


@connected
@pytest.mark.parametrize("batch", [False, True], ids=["post_send", "wr_batch"])
def test_messages_both_ways_by_extended_queues(context, sides, qp_type, batch):
    def look(cq, count):
        found = []
        while len(found) < count:
            with cq.poll_batch(count - len(found)) as views:
                found += [view.snapshot() for view in views]
        return found

    cqs = [context.create_cq_ex(40), context.create_cq_ex(60)]
    ping_pong(*sides(qp_type, cqs=cqs), rounds=10, wait=look, batch=batch, imm=7)


@connected
def test_messages_both_ways_with_relaxed_ordering(sides, qp_type):
    """A wish that a device may ignore, so any driver takes it, and the bytes still arrive."""
    left, right = sides(qp_type, access=A.LOCAL_WRITE | A.RELAXED_ORDERING)
    ping_pong(left, right, rounds=10)


def test_writes_into_memory_with_relaxed_ordering(sides):
    left, right = sides(T.RC, access=A.LOCAL_WRITE | A.REMOTE_WRITE | A.RELAXED_ORDERING)
    left.mr.view[:300] = b"relaxed in order "[:15] * 20
    left.qp.post_send(
        pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[left.mr[:300]], remote=pvl.RemoteBuffer.of(right.mr)[1000:1300])
    )
    assert completions(left.cq, 1)[0].status == S.SUCCESS
    assert bytes(right.mr.view[1000:1300]) == bytes(left.mr.view[:300])


def test_two_qps_share_one_receive_queue_both_ways(context, pd):
    """Client and server have two QPs each, and one shared receive queue each."""
    ends = []
    for _ in range(2):
        cq, mr = context.create_cq(64), pd.alloc(8192, ALL_ACCESS)
        srq = pd.create_srq(pvl.SRQInitAttr(max_wr=32))
        cap = pvl.QPCap(max_send_wr=8, max_recv_wr=0, max_send_sge=1, max_recv_sge=0, max_inline_data=0)
        qps = [pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, srq=srq)) for _ in range(2)]
        ends.append((cq, mr, srq, qps))
    (client_cq, client_mr, client_srq, clients), (server_cq, server_mr, server_srq, servers) = ends
    for client, server in zip(clients, servers, strict=True):
        connect_qps(client, server, **TO_RTS)
    for i in range(24):
        ways = (clients, client_cq, client_mr, server_srq, server_cq, server_mr, servers)
        if i % 3 == 2:
            ways = (servers, server_cq, server_mr, client_srq, client_cq, client_mr, clients)
        senders, cq, mr, srq, other_cq, other_mr, receivers = ways
        srq.post_recv(pvl.RecvWR(sg_list=[other_mr[4096:]], wr_id=i))
        text = b"%02d " % i * (i + 1)
        mr.view[: len(text)] = text
        senders[i % 2].post_send(pvl.SendWR(sg_list=[mr[: len(text)]]))
        assert completions(cq, 1)[0].status == S.SUCCESS
        (got,) = completions(other_cq, 1)
        assert (got.wr_id, got.byte_len, got.qp_num) == (i, len(text), receivers[i % 2].qp_num)
        assert bytes(other_mr.view[4096 : 4096 + len(text)]) == text


# ---------------------------------------------------------------- one-sided, by the work request API


def remote(side, start, stop):
    return pvl.RemoteBuffer(side.mr.addr + start, side.mr.rkey, stop - start)


def test_one_sided_batches_both_ways(sides):
    left, right = sides(T.RC)
    for i in range(8):
        for mine, other, letter in ((left, right, b"c"), (right, left, b"s")):
            mine.mr.view[:64], other.mr.view[1024:1088] = letter * 64, b"-" * 64
            with mine.qp.wr_batch() as wr:
                wr.rdma_write(remote(other, 1024, 1024 + 7 * i), sg_list=[mine.mr[: 7 * i]] if i else [])
                wr.rdma_read(remote(other, 1024, 1088), sg_list=[mine.mr[512:576]])
            assert [wc.status for wc in completions(mine.cq, 2)] == [S.SUCCESS] * 2
            expected = letter * (7 * i) + b"-" * (64 - 7 * i)
            assert bytes(other.mr.view[1024:1088]) == expected
            assert bytes(mine.mr.view[512:576]) == expected


def test_writes_that_notify_both_ways(sides):
    left, right = sides(T.RC)
    for i in range(8):
        for mine, other in ((left, right), (right, left)):
            other.post_recv(wr_id=i)
            mine.mr.view[:16] = bytes(range(i, i + 16))
            with mine.qp.wr_batch() as wr:
                wr.rdma_write(remote(other, 64, 80), sg_list=[mine.mr[:16]], imm=0xF0000000 + i)
            assert completions(mine.cq, 1)[0].status == S.SUCCESS
            (got,) = completions(other.cq, 1)
            assert (got.wr_id, got.imm_data, got.byte_len) == (i, 0xF0000000 + i, 16)
            assert bytes(other.mr.view[64:80]) == bytes(range(i, i + 16))


@pytest.mark.parametrize("opcode", [Op.RDMA_WRITE, Op.RDMA_READ])
@pytest.mark.parametrize("batch", [False, True], ids=["post_send", "wr_batch"])
def test_one_sided_operations_of_nothing_both_ways(sides, opcode, batch):
    left, right = sides(T.RC)
    for mine, other in ((left, right), (right, left)):
        before = bytes(mine.mr.view), bytes(other.mr.view)
        if batch:
            with mine.qp.wr_batch() as wr:
                operation = wr.rdma_write if opcode == Op.RDMA_WRITE else wr.rdma_read
                operation(remote(other, 8, 8))
        else:
            mine.qp.post_send(pvl.SendWR(opcode=opcode, remote=remote(other, 8, 8)))
        assert completions(mine.cq, 1)[0].status == S.SUCCESS
        assert (bytes(mine.mr.view), bytes(other.mr.view)) == before


@pytest.mark.parametrize("batch", [False, True], ids=["post_send", "wr_batch"])
def test_atomics_both_ways(sides, batch):
    """An addition, a swap whose comparison holds, and one whose does not; each returns what was there."""
    left, right = sides(T.RC)
    for mine, other in ((left, right), (right, left)):
        other.mr.view[64:72] = (1000).to_bytes(8, "little")
        target = remote(other, 64, 72)
        if batch:
            with mine.qp.wr_batch() as wr:
                wr.atomic_fetch_add(target, 234, sg_list=[mine.mr[0:8]])
                wr.atomic_cmp_swp(target, 1234, 0xFEDCBA9876543210, sg_list=[mine.mr[8:16]])
                wr.atomic_cmp_swp(target, 1234, 5, sg_list=[mine.mr[16:24]])
        else:
            add, swap = Op.ATOMIC_FETCH_AND_ADD, Op.ATOMIC_CMP_AND_SWP
            mine.qp.post_send(
                pvl.SendWR(opcode=add, sg_list=[mine.mr[0:8]], remote=target, compare_add=234),
                pvl.SendWR(
                    opcode=swap, sg_list=[mine.mr[8:16]], remote=target, compare_add=1234, swap=0xFEDCBA9876543210
                ),
                pvl.SendWR(opcode=swap, sg_list=[mine.mr[16:24]], remote=target, compare_add=1234, swap=5),
            )
        assert [wc.status for wc in completions(mine.cq, 3)] == [S.SUCCESS] * 3
        found = [int.from_bytes(mine.mr.view[at : at + 8], "little") for at in (0, 8, 16)]
        assert found == [1000, 1234, 0xFEDCBA9876543210]
        assert int.from_bytes(other.mr.view[64:72], "little") == 0xFEDCBA9876543210


# ---------------------------------------------------------------- what must not get through

ATOMICS = pytest.mark.parametrize("opcode", [Op.ATOMIC_FETCH_AND_ADD, Op.ATOMIC_CMP_AND_SWP])


@ATOMICS
def test_an_atomic_with_a_local_key_of_nobody(sides, opcode):
    left, right = sides(T.RC)
    sge = pvl.SGE(left.mr.addr, 8, left.mr.lkey ^ 0x00ABC000)
    left.qp.post_send(pvl.SendWR(opcode=opcode, sg_list=[sge], remote=remote(right, 0, 8), compare_add=1, wr_id=4))
    (wc,) = completions(left.cq, 1)
    assert wc.wr_id == 4
    # Hardware says the first; soft-RoCE finds out when the answer is there, and has another word.
    assert wc.status in (S.LOC_PROT_ERR, S.LOC_QP_OP_ERR, S.WR_FLUSH_ERR)
    assert left.qp.query().qp_state == pvl.QPState.ERR
    assert bytes(left.mr.view[:8]) == bytes(8)


@ATOMICS
def test_an_atomic_with_a_remote_key_of_nobody(sides, opcode):
    left, right = sides(T.RC)
    nobody = pvl.RemoteBuffer(right.mr.addr, right.mr.rkey ^ 0x00ABC000, 8)
    left.qp.post_send(pvl.SendWR(opcode=opcode, sg_list=[left.mr[:8]], remote=nobody, compare_add=1, wr_id=5))
    (wc,) = completions(left.cq, 1)
    assert (wc.wr_id, wc.status) == (5, S.REM_ACCESS_ERR)
    with pytest.raises(pvl.RemoteAccessError, match="rkey"):
        wc.raise_for_status()
    assert bytes(right.mr.view[:8]) == bytes(8)


def test_an_atomic_on_bytes_that_are_no_word(sides):
    """The library refuses it; a driver that is asked all the same must not touch the memory."""
    left, right = sides(T.RC)
    with pytest.raises(ValueError, match="an atomic works on 8 bytes at an address that is a multiple of 8"):
        left.qp.post_send(pvl.SendWR(opcode=Op.ATOMIC_FETCH_AND_ADD, sg_list=[left.mr[:8]], remote=remote(right, 1, 9)))
    with pytest.raises(ValueError, match="an atomic works on 8 bytes"), left.qp.wr_batch() as wr:
        wr.atomic_fetch_add(remote(right, 1, 9), 1, sg_list=[left.mr[:8]])
    assert left.qp.sends_in_flight == 0
    # The key of a window whose addresses start at 1 makes an aligned address of a misaligned word.
    region = right.qp.pd.alloc(64, ALL_ACCESS | A.MW_BIND)
    window = right.qp.pd.alloc_mw()
    right.qp.bind_mw(window, region[1:17], A.REMOTE_ATOMIC | A.ZERO_BASED)
    assert completions(right.cq, 1)[0].status == S.SUCCESS
    askew = pvl.RemoteBuffer(0, window.rkey, 8)
    left.qp.post_send(
        pvl.SendWR(opcode=Op.ATOMIC_FETCH_AND_ADD, sg_list=[left.mr[:8]], remote=askew, compare_add=0xFFFF)
    )
    assert completions(left.cq, 1)[0].status in (S.REM_INV_REQ_ERR, S.REM_ACCESS_ERR, S.REM_OP_ERR)
    assert bytes(region.view) == bytes(64)


def test_a_window_without_the_right_to_write_that_a_batch_has_bound(context, pd, sides):
    left, right = sides(T.RC, access=ALL_ACCESS | A.MW_BIND)
    window = pd.alloc_mw()
    key = window.next_rkey()
    with right.qp.wr_batch() as wr:
        wr.bind_mw(window, key, pvl.MWBindInfo.of(right.mr, A.REMOTE_READ), wr_id=0x123)
    assert [(wc.wr_id, wc.status) for wc in completions(right.cq, 1)] == [(0x123, S.SUCCESS)]
    right.mr.view[:4] = b"kept"
    with left.qp.wr_batch() as wr:
        wr.rdma_write(pvl.RemoteBuffer(right.mr.addr, key, 4096), sg_list=[left.mr], wr_id=0x124)
    assert [(wc.wr_id, wc.status) for wc in completions(left.cq, 1)] == [(0x124, S.REM_ACCESS_ERR)]
    assert bytes(right.mr.view[:4]) == b"kept"


# ---------------------------------------------------------------- operations of newer versions


def test_8_bytes_written_as_one_both_ways(sides):
    if lib.PVL_HAS_ATOMIC_WRITE < 0:
        left, right = sides(T.RC)
        with pytest.raises(pvl.UnsupportedError, match="needs rdma-core 44"), left.qp.wr_batch() as wr:
            wr.atomic_write(remote(right, 0, 8), bytes(8))
        return
    left, right = sides(T.RC, ops=Ops.WITH_ATOMIC_WRITE)
    for i in range(10):
        for mine, other in ((left, right), (right, left)):
            word = bytes(range(i, i + 8))
            with mine.qp.wr_batch() as wr:
                wr.atomic_write(remote(other, 64, 72), word)
            assert completions(mine.cq, 1)[0].status == S.SUCCESS
            assert bytes(other.mr.view[56:80]) == bytes(8) + word + bytes(8)


def test_a_flush_is_refused_before_rdma_core_45(sides):
    left, right = sides(T.RC)
    text = "needs rdma-core 45" if lib.PVL_HAS_FLUSH < 0 else "was not created for FLUSH"
    with pytest.raises((pvl.UnsupportedError, ValueError), match=text), left.qp.wr_batch() as wr:
        wr.flush(remote(right, 0, 8), pvl.PlacementType.GLOBAL, pvl.SelectivityLevel.RANGE)


if lib.PVL_HAS_FLUSH > 0:  # with an older rdma-core there is nothing more to ask than the test above does
    FLUSHABLE = A.LOCAL_WRITE | A.REMOTE_WRITE | A.FLUSH_GLOBAL

    @pytest.fixture
    def flushing(context, pd, sides):
        left = Side(context, pd, T.RC, 0, access=FLUSHABLE, ops=Ops.WITH_FLUSH | Ops.WITH_RDMA_WRITE)
        right = Side(context, pd, T.RC, 0, access=FLUSHABLE, ops=Ops.WITH_FLUSH | Ops.WITH_RDMA_WRITE)
        for side in (left, right):
            side.qp.to_init(qp_access_flags=A.REMOTE_WRITE | A.FLUSH_GLOBAL | A.FLUSH_PERSISTENT)
        for mine, other, psn in ((left, right, 0x111111), (right, left, 0x222222)):
            mine.qp.to_rtr(
                ah_attr=path_to(context, own_gid(context)), dest_qp_num=other.qp.qp_num, rq_psn=0x333333 - psn
            )
            mine.qp.to_rts(sq_psn=psn, **TO_RTS)
        return left, right

    @pytest.mark.parametrize("level", [pvl.SelectivityLevel.RANGE, pvl.SelectivityLevel.MR])
    def test_a_flush_of_what_was_written_both_ways(flushing, level):
        left, right = flushing
        for mine, other, letter in ((left, right, b"c"), (right, left, b"s")) * 3:
            mine.mr.view[:96] = letter * 96
            with mine.qp.wr_batch() as wr:
                wr.rdma_write(remote(other, 1024, 1120), sg_list=[mine.mr[:96]])
                wr.flush(remote(other, 1024, 1120), pvl.PlacementType.GLOBAL, level, wr_id=9)
            wcs = completions(mine.cq, 2)
            assert [wc.status for wc in wcs] == [S.SUCCESS] * 2
            assert wcs[1].wr_id == 9
            assert bytes(other.mr.view[1024:1120]) == letter * 96

    def test_a_flush_to_a_memory_that_forgets(flushing):
        """Ordinary memory is not persistent, and was not registered as if it were."""
        left, right = flushing
        with left.qp.wr_batch() as wr:
            wr.flush(remote(right, 0, 64), pvl.PlacementType.PERSISTENT, pvl.SelectivityLevel.RANGE, wr_id=8)
        (wc,) = completions(left.cq, 1)
        assert (wc.wr_id, wc.status) == (8, S.REM_ACCESS_ERR)
