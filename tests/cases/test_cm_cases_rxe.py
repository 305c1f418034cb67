"""The connection manager's own flow, step by step: both ends in one process, over RoCE and over iWARP."""

from __future__ import annotations

import pytest
from support import completions, in_thread

import pyverbs_lite as pvl
from pyverbs_lite import cm
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

A, E, Op, S, T = pvl.AccessFlags, cm.CMEventType, pvl.WROpcode, pvl.WCStatus, pvl.QPType
ROCE, IWARP = "192.0.2.1", "198.51.100.1"
GROUP = ("239.77.1.9", 0)
REASON = b"not today, thank you"

anywhere = pytest.mark.parametrize("address", [ROCE, IWARP], ids=["roce", "iwarp"])


class End:
    """A CMID with a QP, a queue and memory of its own."""

    def __init__(self, cmid):
        self.id = cmid
        self.pd, self.cq = cmid.context.alloc_pd(), cmid.context.create_cq(32)
        cap = pvl.QPCap(max_send_wr=8, max_recv_wr=8, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        init = pvl.QPInitAttr(send_cq=self.cq, recv_cq=self.cq, cap=cap, qp_type=cmid.qp_type)
        self.qp = cmid.create_qp(self.pd, init)
        self.mr = self.pd.alloc(4096, A.LOCAL_WRITE | A.REMOTE_WRITE | A.REMOTE_READ)

    def close(self):
        self.id.close()
        self.cq.close()
        self.pd.close()


@pytest.fixture
def ends():
    """Collect the ends that a test has made, and close them."""
    made = []
    yield made
    for end in reversed(made):
        end.close()


def listener(address, ps=cm.PortSpace.TCP, channel=None):
    cmid = channel.create_id(ps) if channel else cm.CMID(ps=ps)
    cmid.bind_addr((address, 0))
    cmid.listen()
    return cmid


def ping_pong(left, right, rounds=10):
    """Send to and fro and check every byte; receives are there before what they are for."""
    for i in range(rounds):
        for sender, receiver, letter in ((left, right, b"c"), (right, left, b"s")):
            receiver.qp.post_recv(pvl.RecvWR(sg_list=[receiver.mr[2048:]], wr_id=i))
            text = letter * (50 * i + 1)
            sender.mr.view[: len(text)] = text
            sender.qp.post_send(pvl.SendWR(sg_list=[sender.mr[: len(text)]]))
            assert completions(sender.cq, 1)[0].status == S.SUCCESS
            (got,) = completions(receiver.cq, 1)
            assert (got.status, got.wr_id, got.byte_len) == (S.SUCCESS, i, len(text))
            assert bytes(receiver.mr.view[2048 : 2048 + len(text)]) == text


def synchronously(address, ends, param=None):
    """Connect two ends, each step waiting for its end."""
    server = listener(address)

    def accept():
        right = End(server.get_request(timeout=10))
        ends.append(right)
        right.id.accept(param)
        return right

    accepting = in_thread(accept)
    client = cm.CMID()
    client.resolve_addr(server.local_address)
    client.resolve_route()
    left = End(client)
    ends.append(left)
    client.connect(param)
    right = accepting()
    server.close()
    return left, right


def event(channel, kind):
    found = channel.get_event(10)
    assert (found.event, found.status) == (kind, 0)
    return found


class Asynchronous:
    """Two channels, on which every step is followed by its event."""

    def __init__(self, address, ps=cm.PortSpace.TCP):
        self.passive, self.active = cm.EventChannel(), cm.EventChannel()
        self.listener = listener(address, ps, self.passive)
        self.client = self.active.create_id(ps)
        self.client.resolve_addr(self.listener.local_address)
        event(self.active, E.ADDR_RESOLVED)
        self.client.resolve_route()
        event(self.active, E.ROUTE_RESOLVED)

    def request(self):
        found = event(self.passive, E.CONNECT_REQUEST)
        assert found.listen_id is self.listener
        return found.id

    def close(self):
        self.passive.close()
        self.active.close()


@pytest.fixture
def asynchronous():
    made = []

    def make(*arguments):
        made.append(Asynchronous(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ---------------------------------------------------------------- connections


@anywhere
def test_messages_over_a_synchronous_connection(address, ends):
    left, right = synchronously(address, ends)
    assert (left.qp.state, right.qp.state) == (pvl.QPState.RTS, pvl.QPState.RTS)
    ping_pong(left, right)
    leaving = in_thread(right.id.expect, E.DISCONNECTED)
    left.id.disconnect()
    assert leaving().event == E.DISCONNECTED


@anywhere
def test_messages_over_an_asynchronous_connection(address, asynchronous, ends):
    flow = asynchronous(address)
    left = End(flow.client)
    ends.append(left)
    flow.client.connect(cm.ConnParam(private_data=b"let me in"))
    child = flow.request()
    assert child.event.private_data.startswith(b"let me in")
    right = End(child)
    ends.append(right)
    child.accept(cm.ConnParam(private_data=b"welcome"))
    assert event(flow.active, E.ESTABLISHED).private_data.startswith(b"welcome")
    event(flow.passive, E.ESTABLISHED)
    ping_pong(left, right)
    flow.client.disconnect()
    event(flow.passive, E.DISCONNECTED)
    child.disconnect()
    event(flow.active, E.DISCONNECTED)


def test_the_timeout_of_the_qp_is_an_option(asynchronous, ends):
    """The code of the acknowledgement timeout is given before connecting, on both sides, and the QPs have it then."""
    flow = asynchronous(ROCE)
    flow.client.set_option(cm.IDOption.ACK_TIMEOUT, 21)
    left = End(flow.client)
    ends.append(left)
    flow.client.connect()
    child = flow.request()
    child.set_option(cm.IDOption.ACK_TIMEOUT, 17)
    right = End(child)
    ends.append(right)
    child.accept()
    event(flow.active, E.ESTABLISHED)
    event(flow.passive, E.ESTABLISHED)
    assert (left.qp.query().timeout, right.qp.query().timeout) == (21, 17)
    ping_pong(left, right, rounds=2)


@anywhere
def test_who_is_refused_is_told_why(address, asynchronous, ends):
    flow = asynchronous(address)
    left = End(flow.client)
    ends.append(left)
    flow.client.connect()
    child = flow.request()
    child.reject(REASON)
    refused = flow.active.get_event(10)
    assert refused.event == E.REJECTED
    assert refused.status != 0
    assert refused.private_data[: len(REASON)] == REASON
    with pytest.raises(pvl.CMRejectedError) as caught:
        refused.raise_for_error("rdma_connect")
    assert caught.value.private_data[: len(REASON)] == REASON
    assert left.qp.query().qp_state != pvl.QPState.RTS
    child.close()


def test_a_qp_that_librdmacm_does_not_move(asynchronous):
    """Both ends have QPs made by hand, named in the parameters, and moved by what the connection says."""
    flow = asynchronous(ROCE)

    class ByHand:
        def __init__(self, cmid):
            self.id = cmid
            self.pd, self.cq = cmid.context.alloc_pd(), cmid.context.create_cq(32)
            cap = pvl.QPCap(max_send_wr=8, max_recv_wr=8, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
            self.qp = self.pd.create_qp(pvl.QPInitAttr(send_cq=self.cq, recv_cq=self.cq, cap=cap))
            self.mr = self.pd.alloc(4096)
            self.param = cm.ConnParam(qp_num=self.qp.qp_num, responder_resources=2, initiator_depth=3)

        def move(self, *states):
            for state in states:
                self.qp.modify(self.id.init_qp_attr(state))

    left = ByHand(flow.client)
    left.move(pvl.QPState.INIT)
    flow.client.connect(left.param)
    right = ByHand(flow.request())
    right.move(pvl.QPState.INIT, pvl.QPState.RTR, pvl.QPState.RTS)
    right.id.accept(right.param)
    response = event(flow.active, E.CONNECT_RESPONSE)
    assert response.conn.qp_num == right.qp.qp_num
    left.move(pvl.QPState.RTR, pvl.QPState.RTS)
    flow.client.establish()
    event(flow.passive, E.ESTABLISHED)
    assert (left.qp.query().dest_qp_num, right.qp.query().dest_qp_num) == (right.qp.qp_num, left.qp.qp_num)
    ping_pong(left, right)
    for side in (left, right):
        side.qp.close()
        side.cq.close()
        side.pd.close()


@anywhere
@pytest.mark.parametrize("opcode", [Op.RDMA_WRITE, Op.RDMA_READ])
def test_one_sided_operations_over_a_connection(address, ends, opcode):
    """The passive side says by private data where its memory is, and does nothing more."""
    server = listener(address)

    def accept():
        right = End(server.get_request(timeout=10))
        ends.append(right)
        right.mr.view[:1000] = b"s" * 1000
        where = right.mr.addr.to_bytes(8, "big") + right.mr.rkey.to_bytes(4, "big")
        right.id.accept(cm.ConnParam(private_data=where))
        return right

    accepting = in_thread(accept)
    client = cm.CMID()
    client.resolve_addr(server.local_address)
    client.resolve_route()
    left = End(client)
    ends.append(left)
    told = client.connect().private_data
    right = accepting()
    remote = pvl.RemoteBuffer(int.from_bytes(told[:8], "big"), int.from_bytes(told[8:12], "big"), 1000)
    assert remote == pvl.RemoteBuffer(right.mr.addr, right.mr.rkey, 1000)
    left.mr.view[:1000] = b"c" * 1000
    for i in range(1, 11):
        left.qp.post_send(pvl.SendWR(opcode=opcode, sg_list=[left.mr[: 100 * i]], remote=remote[: 100 * i]))
        assert completions(left.cq, 1)[0].status == S.SUCCESS
        here, there = (bytes(side.mr.view[:1000]) for side in (left, right))
        if opcode == Op.RDMA_WRITE:
            assert there == b"c" * (100 * i) + b"s" * (1000 - 100 * i)
        else:
            assert here == b"s" * (100 * i) + b"c" * (1000 - 100 * i)
    server.close()


# ---------------------------------------------------------------- datagrams


def test_datagrams_to_whom_the_connection_manager_names(asynchronous, ends):
    flow = asynchronous(ROCE, cm.PortSpace.UDP)
    left = End(flow.client)
    ends.append(left)
    assert left.qp.qp_type == T.UD
    flow.client.connect()
    child = flow.request()
    right = End(child)
    ends.append(right)
    child.accept()
    ud = event(flow.active, E.ESTABLISHED).ud
    assert ud.qp_num == right.qp.qp_num
    there = {"ah": left.pd.create_ah(ud.ah_attr), "remote_qpn": ud.qp_num, "remote_qkey": ud.qkey}
    for i in range(1, 6):
        right.qp.post_recv(pvl.RecvWR(sg_list=[right.mr[2048:]]))
        left.mr.view[:5] = b"to %02d" % i
        left.qp.post_send(pvl.SendWR(sg_list=[left.mr[:5]], **there))
        completions(left.cq, 1)
        (got,) = completions(right.cq, 1)
        grh, text = pvl.split_grh(right.mr[2048:], got)
        assert bytes(text) == b"to %02d" % i
        # The answer goes where the question came from.
        with pvl.AH.from_wc(right.pd, got, grh) as back:
            left.qp.post_recv(pvl.RecvWR(sg_list=[left.mr[2048:]]))
            right.mr.view[:7] = b"from %02d" % i
            right.qp.post_send(pvl.SendWR(sg_list=[right.mr[:7]], ah=back, remote_qpn=got.src_qp, remote_qkey=ud.qkey))
            completions(right.cq, 1)
            (got,) = completions(left.cq, 1)
        assert bytes(pvl.split_grh(left.mr[2048:], got)[1]) == b"from %02d" % i


def join(ends, **options):
    cmid = cm.CMID(ps=cm.PortSpace.UDP)
    cmid.bind_addr((ROCE, 0))
    cmid.resolve_addr(GROUP)
    end = End(cmid)
    ends.append(end)
    return end, cmid.join_multicast(GROUP, **options)


def send_to(end, group, ah, text):
    end.mr.view[: len(text)] = text
    to = {"ah": ah, "remote_qpn": pvl.MULTICAST_QPN, "remote_qkey": group.ud.qkey}
    end.qp.post_send(pvl.SendWR(sg_list=[end.mr[: len(text)]], **to))
    assert [wc.status for wc in completions(end.cq, 1)] == [S.SUCCESS]


@pytest.mark.parametrize("options", [{}, {"join_flags": cm.MCJoinFlags.FULLMEMBER}], ids=["join", "join_ex"])
def test_datagrams_to_a_group(ends, options):
    sender, group = join(ends, **options)
    receiver, _place = join(ends, **options)
    assert group.ud.qp_num == pvl.MULTICAST_QPN
    with sender.pd.create_ah(group.ud.ah_attr) as ah:
        for i in range(5):
            for end in (receiver, sender):  # soft-RoCE brings it back to the sender as well
                end.qp.post_recv(pvl.RecvWR(sg_list=[end.mr[2048:]]))
            text = b"message %d to all" % i
            sender.mr.view[: len(text)] = text
            to = {"ah": ah, "remote_qpn": pvl.MULTICAST_QPN, "remote_qkey": group.ud.qkey}
            sender.qp.post_send(pvl.SendWR(sg_list=[sender.mr[: len(text)]], **to))
            (got,) = completions(receiver.cq, 1)
            assert bytes(pvl.split_grh(receiver.mr[2048:], got)[1]) == text
            completions(sender.cq, 2)


def test_who_has_left_a_group_hears_no_more_of_it(ends):
    """Whoever stays is the witness that what was sent has arrived."""
    sender, group = join(ends, join_flags=cm.MCJoinFlags.SENDONLY_FULLMEMBER)
    leaver, place = join(ends)
    witness, _place = join(ends)
    for end in (leaver, witness):
        end.qp.post_recv(*[pvl.RecvWR(sg_list=[end.mr[2048:]])] * 2)
    with sender.pd.create_ah(group.ud.ah_attr) as ah:
        send_to(sender, group, ah, b"one")
        for end in (leaver, witness):
            assert [wc.byte_len for wc in completions(end.cq, 1)] == [pvl.GRH_BYTES + 3]
        place.close()
        send_to(sender, group, ah, b"three")
        assert [wc.byte_len for wc in completions(witness.cq, 1)] == [pvl.GRH_BYTES + 5]
    with pytest.raises(pvl.WaitTimeout):
        leaver.cq.wait(0.05)
    assert leaver.qp.recvs_in_flight == 1


# ---------------------------------------------------------------- addresses


def test_addresses_are_resolved_by_name_and_service(ends):
    """The ends find each other by what ``rdma_getaddrinfo`` says."""
    (passive,) = cm.getaddrinfo(ROCE, "0", flags=cm.AddrInfoFlags.PASSIVE, port_space=cm.PortSpace.TCP)
    server = cm.CMID()
    server.bind_addr(passive.ai_src_addr)
    server.listen()
    (active,) = cm.getaddrinfo(ROCE, server.src_port, port_space=cm.PortSpace.TCP)
    assert active.ai_dst_addr[:2] == (ROCE, server.src_port)

    def accept():
        right = End(server.get_request(timeout=10))
        ends.append(right)
        right.id.accept()
        return right

    accepting = in_thread(accept)
    client = cm.CMID()
    client.resolve_addr(active.ai_dst_addr, src=active.ai_src_addr)
    client.resolve_route()
    left = End(client)
    ends.append(left)
    client.connect()
    ping_pong(left, accepting(), rounds=2)
    server.close()


def test_this_kernel_does_not_resolve_addresses_in_the_background():
    """The newer verb reports its end by an event that it asks the kernel to write, and this kernel does not."""
    if lib.PVL_HAS_RESOLVE_ADDRINFO < 0:
        assert not hasattr(lib, "rdma_resolve_addrinfo")
        return
    with cm.EventChannel() as channel:
        cmid = channel.create_id()
        hints = ffi.new("struct rdma_addrinfo *", {"ai_port_space": cm.PortSpace.TCP})
        assert lib.rdma_resolve_addrinfo(cmid._handle, ROCE.encode(), b"7471", hints) != 0
        assert ffi.errno != 0
