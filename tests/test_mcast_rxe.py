"""Multicast: the GIDs of groups (no device is asked), and groups on a real driver."""

from __future__ import annotations

import ipaddress
import socket
import struct
from contextlib import contextmanager

import pytest
from support import completions, make_qp, own_gid

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma

G = pvl.GIDType
KEY = 0x0BADCAFE
GROUP, OTHER = "239.1.2.3", "239.1.2.4"


# ---------------------------------------------------------------- the GIDs of groups


@pytest.mark.parametrize(
    ("address", "gid_type", "expected"),
    [
        ("239.1.2.3", G.ROCE_V2, "::ffff:239.1.2.3"),
        ("239.1.2.3", G.ROCE_V1, "ff0e::ffff:239.1.2.3"),
        ("239.1.2.3", G.IB, "ff12:401b:ffff::f01:203"),
        ("224.0.0.251", G.IB, "ff12:401b:ffff::fb"),
        ("ff0e::1234", G.ROCE_V2, "ff0e::1234"),
        ("ff0e::1234", G.ROCE_V1, "ff0e::1234"),
        ("ff15:aaaa:bbbb:1:2:3:4:5", G.IB, "ff12:601b:ffff:1:2:3:4:5"),
        ("::ffff:239.1.2.3", G.ROCE_V2, "::ffff:239.1.2.3"),
        ("ff02::1%3", G.ROCE_V2, "ff02::1"),
    ],
)
def test_the_gid_of_an_address(address, gid_type, expected):
    assert pvl.multicast_gid(address, gid_type) == ipaddress.IPv6Address(expected)


def test_the_gid_on_infiniband_has_key_and_scope():
    gid = pvl.multicast_gid("239.1.2.3", G.IB, pkey=0x1234, scope=5)
    assert gid == ipaddress.IPv6Address("ff15:401b:9234::f01:203")  # full membership is implied


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "::", "255.255.255.255"])
def test_what_is_no_group(address):
    with pytest.raises(ValueError, match="is no multicast address"):
        pvl.multicast_gid(address)


@pytest.mark.parametrize("options", [{"pkey": 1 << 16}, {"scope": 16}, {"scope": -1}])
def test_key_and_scope_that_do_not_fit(options):
    with pytest.raises(ValueError, match="must be 0 to"):
        pvl.multicast_gid("239.1.2.3", G.IB, **options)


# ---------------------------------------------------------------- groups


@pytest.fixture
def cq(context):
    return context.create_cq(256)


@pytest.fixture
def mr(pd):
    return pd.alloc(8192)


def datagram_qp(pd, cq):
    qp = make_qp(pd, cq, qp_type=pvl.QPType.UD)
    qp.to_init(qkey=KEY)
    qp.to_rtr()
    qp.to_rts(sq_psn=0x123456)
    return qp


@contextmanager
def joined(*groups):
    """Let the host be in IP groups on the device's interface, so that what it sends to them comes back to itself."""
    index = socket.if_nametoindex("veth0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for group in groups:
            member = struct.pack("=4s4si", socket.inet_aton(group), bytes(4), index)
            udp.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        yield


@pytest.fixture
def to_group(context, pd):
    row = own_gid(context)

    def make(group):
        route = pvl.GlobalRoute(dgid=pvl.multicast_gid(group), sgid_index=row.gid_index, hop_limit=1)
        return pd.create_ah(pvl.AHAttr(port_num=1, grh=route))

    return make


def to(ah, imm):
    return pvl.SendWR(
        ah=ah,
        remote_qpn=pvl.MULTICAST_QPN,
        remote_qkey=KEY,
        opcode=pvl.WROpcode.SEND_WITH_IMM,
        imm_data=imm,
        send_flags=pvl.SendFlags(0),
    )


def post_receives(mr, *qps, count=4):
    for qp in qps:
        qp.post_recv(*(pvl.RecvWR(sg_list=[mr[i * 64 : i * 64 + 64]], wr_id=i) for i in range(count)))


def test_who_is_in_the_group_gets_it_and_nobody_else(pd, cq, mr, to_group):
    first, second, third, sender = (datagram_qp(pd, cq) for _ in range(4))
    post_receives(mr, first, second, third)
    places = first.attach_mcast(pvl.multicast_gid(GROUP)), second.attach_mcast(f"::ffff:{GROUP}")
    with joined(GROUP, OTHER), third.attach_mcast(pvl.multicast_gid(OTHER)):
        sender.post_send(to(to_group(GROUP), 5))
        got = completions(cq, 2)
        assert {wc.qp_num for wc in got} == {first.qp_num, second.qp_num}
        assert {(wc.imm_data, wc.src_qp, wc.byte_len) for wc in got} == {(5, sender.qp_num, 40)}
        sender.post_send(to(to_group(OTHER), 6))
        assert [(wc.imm_data, wc.qp_num) for wc in completions(cq, 1)] == [(6, third.qp_num)]
    assert not any(place.closed for place in places)


def test_the_header_names_the_group(context, pd, cq, mr, to_group):
    qp = datagram_qp(pd, cq)
    post_receives(mr, qp, count=1)
    with joined(GROUP), qp.attach_mcast(pvl.multicast_gid(GROUP)):
        qp.post_send(to(to_group(GROUP), 1))
        (got,) = completions(cq, 1)
    grh, _payload = pvl.split_grh(mr[0:64], got)
    assert (grh.dgid, grh.sgid) == (pvl.multicast_gid(GROUP), own_gid(context).gid)
    # The group is no address of ours to answer from; the sender's own GID index has to be chosen.
    with pytest.raises(pvl.VerbsOSError, match="is no GID of"):
        pvl.AH.from_wc(pd, got, grh)


def test_who_left_gets_nothing_more(pd, cq, mr, to_group):
    leaver, stayer = datagram_qp(pd, cq), datagram_qp(pd, cq)
    post_receives(mr, leaver, stayer)
    ah = to_group(GROUP)
    with joined(GROUP), stayer.attach_mcast(pvl.multicast_gid(GROUP)):
        with leaver.attach_mcast(pvl.multicast_gid(GROUP)) as place:
            stayer.post_send(to(ah, 1))
            completions(cq, 2)
        assert place.closed
        stayer.post_send(to(ah, 2), to(ah, 3))
        got = completions(cq, 2)
        assert {(wc.qp_num, wc.imm_data) for wc in got} == {(stayer.qp_num, 2), (stayer.qp_num, 3)}


def test_a_qp_is_in_a_group_once(pd, cq):
    qp = datagram_qp(pd, cq)
    place = qp.attach_mcast(pvl.multicast_gid(GROUP))
    with pytest.raises(pvl.StateError, match=r"is in the multicast group .* already"):
        qp.attach_mcast(pvl.multicast_gid(GROUP))
    qp.attach_mcast(pvl.multicast_gid(OTHER)).close()
    assert not place.closed
    place.close()
    place.close()
    qp.attach_mcast(pvl.multicast_gid(GROUP)).close()


def test_closing_the_qp_leaves_its_groups(pd, cq):
    qp = datagram_qp(pd, cq)
    places = [qp.attach_mcast(pvl.multicast_gid(group)) for group in (GROUP, OTHER)]
    qp.close()  # the kernel refuses it as long as the QP is in a group
    assert all(place.closed for place in places)


def test_a_dropped_place_is_left(pd, cq):
    qp = datagram_qp(pd, cq)
    place = qp.attach_mcast(pvl.multicast_gid(GROUP))
    with pytest.warns(ResourceWarning, match=r"Multicast .* was never closed"):
        del place
    qp.attach_mcast(pvl.multicast_gid(GROUP)).close()


def test_qp_and_place_dropped_together(pd, cq):
    qp = datagram_qp(pd, cq)
    place = qp.attach_mcast(pvl.multicast_gid(GROUP))
    with pytest.warns(ResourceWarning, match="was never closed") as caught:
        del qp, place
    assert all("it was destroyed now" in str(warning.message) for warning in caught)
    assert len(caught) == 2


@pytest.mark.parametrize("qp_type", [pvl.QPType.RC, pvl.QPType.UC])
def test_a_connected_qp_has_one_peer(pd, cq, qp_type):
    with pytest.raises(ValueError, match=f"a {qp_type.name} QP has one peer"):
        make_qp(pd, cq, qp_type=qp_type).attach_mcast(pvl.multicast_gid(GROUP))


@pytest.mark.parametrize("gid", ["192.0.2.1", "fe80::1", bytes(16)])
def test_a_gid_that_is_no_group(pd, cq, gid):
    with pytest.raises(ValueError, match="is no multicast GID"):
        datagram_qp(pd, cq).attach_mcast(gid)


@pytest.mark.parametrize("lid", [-1, 1 << 16])
def test_a_lid_has_16_bits(pd, cq, lid):
    with pytest.raises(ValueError, match="lid must be"):
        datagram_qp(pd, cq).attach_mcast(pvl.multicast_gid(GROUP), lid)
