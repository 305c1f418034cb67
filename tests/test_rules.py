"""Requests of UD, XRC and the extended opcodes: what they must have, what they must not, and where it goes in C."""

from __future__ import annotations

import pytest

import pyverbs_lite as pvl
from pyverbs_lite._objects.inflight import Hold
from pyverbs_lite._objects.posting import lay_out
from pyverbs_lite._objects.rules import Rules, check_recv

T, Op, F = pvl.QPType, pvl.WROpcode, pvl.SendFlags
CAP = pvl.QPCap(max_send_wr=9, max_recv_wr=7, max_send_sge=3, max_recv_sge=2, max_inline_data=24)
REMOTE = pvl.RemoteBuffer(0x7F0000001000, 0xA1B2C3D4, 4096)


def rules(qp_type=T.RC):
    return Rules(qp_type, CAP, None)


def check(wr, qp_type=T.RC, **options):
    return rules(qp_type).check_send(wr, 4, **options)


def sge(length, addr=0x10000, lkey=0x55):
    return pvl.SGE(addr, length, lkey)


def in_c(wr):
    wrs, _sges, _bad = kept = lay_out("struct ibv_send_wr", [wr], [Hold.of(0, ())])
    return wrs[0], kept


@pytest.mark.parametrize("member", ["remote_qpn", "remote_qkey", "remote_srqn", "invalidate_rkey", "rkey"])
@pytest.mark.parametrize("qp_type", [T.RC, T.UC])
def test_members_of_another_kind_of_request(qp_type, member):
    with pytest.raises(ValueError, match=f"takes no {member}"):
        check(pvl.SendWR(**{member: 0}), qp_type)


@pytest.mark.parametrize("qp_type", [T.RC, T.UC, T.XRC_SEND])
def test_a_connected_qp_has_its_peer(qp_type):
    options = {"remote_srqn": 5} if qp_type == T.XRC_SEND else {}
    with pytest.raises(ValueError, match=f"a request on a {qp_type.name} QP takes no ah"):
        check(pvl.SendWR(ah=object(), **options), qp_type)


@pytest.mark.parametrize("given", [{}, {"remote_qpn": 5}, {"remote_qpn": 5, "remote_qkey": 6}])
def test_a_datagram_says_where_it_goes(given):
    with pytest.raises(ValueError, match="a request on a UD QP needs ah=, remote_qpn=, remote_qkey=; ah is missing"):
        check(pvl.SendWR(**given), T.UD)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"remote_qpn": 1 << 24, "remote_qkey": 0}, "remote_qpn must be 0 to 16777215"),
        ({"remote_qpn": -1, "remote_qkey": 0}, "remote_qpn must be"),
        ({"remote_qpn": 0, "remote_qkey": 1 << 32}, "remote_qkey must be"),
        ({"remote_qpn": 0}, "remote_qkey is missing"),
        ({"remote_qkey": 0}, "remote_qpn is missing"),
    ],
)
def test_where_a_datagram_goes_is_in_range(given, text):
    with pytest.raises(ValueError, match=text):
        check(pvl.SendWR(ah=object(), **given), T.UD)


def test_an_address_handle_is_one():
    with pytest.raises(TypeError, match="ah must be an AH, not b'10"):
        check(pvl.SendWR(ah=b"10.0.0.1", remote_qpn=1, remote_qkey=2), T.UD)


@pytest.mark.parametrize("opcode", [Op.RDMA_WRITE, Op.RDMA_READ, Op.ATOMIC_FETCH_AND_ADD, Op.SEND_WITH_INV, Op.TSO])
def test_datagrams_are_sent_and_no_more(opcode):
    with pytest.raises(ValueError, match=f"{opcode.name} cannot be posted to a UD QP; its opcodes here: SEND, SEND_W"):
        check(pvl.SendWR(opcode=opcode, remote=REMOTE), T.UD)


def test_a_stream_in_segments_is_for_the_work_request_api():
    with pytest.raises(ValueError, match="ah is missing"):
        check(pvl.SendWR(opcode=Op.TSO), T.UD, batch=True)
    with pytest.raises(ValueError, match="TSO cannot be posted to a RC QP"):
        check(pvl.SendWR(opcode=Op.TSO), T.RC, batch=True)


@pytest.mark.parametrize("qp_type", [T.XRC_RECV, T.DRIVER])
def test_types_that_send_nothing(qp_type):
    with pytest.raises(ValueError, match=f"cannot be posted to a {qp_type.name} QP; its opcodes here: none"):
        check(pvl.SendWR(), qp_type)


def test_every_request_on_an_xrc_qp_names_an_srq():
    with pytest.raises(ValueError, match="remote_srqn is missing"):
        check(pvl.SendWR(), T.XRC_SEND)
    wr = pvl.SendWR(opcode=Op.RDMA_READ, sg_list=[sge(8)], remote=REMOTE, remote_srqn=0xABCDEF)
    with pytest.raises(ValueError, match="remote_srqn must be"):
        check(pvl.SendWR(remote_srqn=1 << 32), T.XRC_SEND)
    check(wr, T.XRC_SEND)
    raw, _kept = in_c(wr)
    assert (raw.qp_type.xrc.remote_srqn, raw.wr.rdma.rkey) == (0xABCDEF, REMOTE.rkey)


@pytest.mark.parametrize("key", [-1, 1 << 32])
def test_a_key_to_invalidate_has_32_bits(key):
    with pytest.raises(ValueError, match="invalidate_rkey must be"):
        check(pvl.SendWR(opcode=Op.SEND_WITH_INV, invalidate_rkey=key))


def test_the_key_to_invalidate_is_in_host_order():
    raw, _kept = in_c(pvl.SendWR(opcode=Op.SEND_WITH_INV, invalidate_rkey=0x12345678))
    assert raw.invalidate_rkey == 0x12345678


def test_what_moves_no_data_has_no_sge():
    with pytest.raises(ValueError, match="LOCAL_INV moves no data"):
        check(pvl.SendWR(opcode=Op.LOCAL_INV, invalidate_rkey=5, sg_list=[sge(1)]))
    check(pvl.SendWR(opcode=Op.LOCAL_INV, invalidate_rkey=5))


# ---------------------------------------------------------------- receives


def test_a_receive_of_datagrams_has_room_for_the_header():
    with pytest.raises(ValueError, match=r"40 bytes in front of the payload \(QP.grh_room\), and this one has 39"):
        rules(T.UD).check_recv(pvl.RecvWR(sg_list=[sge(30), sge(9)]))
    rules(T.UD).check_recv(pvl.RecvWR(sg_list=[sge(30), sge(10)]))
    with pytest.raises(ValueError, match="has 0 in all"):
        rules(T.UD).check_recv(pvl.RecvWR())
    rules(T.UC).check_recv(pvl.RecvWR())


def test_the_limit_of_a_shared_queue_has_its_own_name():
    with pytest.raises(ValueError, match="4 SGEs are more than this SRQ's max_sge, 3"):
        check_recv(pvl.RecvWR(sg_list=[sge(1)] * 4), None, 3, "this SRQ's max_sge")
