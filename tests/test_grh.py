"""The header in front of a datagram: both layouts, what is no header, and the split from the payload. No device."""

from __future__ import annotations

import struct
from ipaddress import IPv6Address

import pytest

import pyverbs_lite as pvl
from pyverbs_lite.grh import GRH_BYTES

SUCCESS, RECV = pvl.WCStatus.SUCCESS, pvl.WCOpcode.RECV
HAS_GRH = pvl.WCFlags.GRH
LEFT, RIGHT = IPv6Address("2001:db8::17"), IPv6Address("ff0e::ffff:239.1.2.3")
#: Of a real datagram: 192.0.2.1 to 192.0.2.9, time to live 64, UDP.
IPV4 = bytes.fromhex("4502003c1c4640004011") + b"\x9a\x60" + bytes([192, 0, 2, 1, 192, 0, 2, 9])


def ipv6(traffic_class=0xA5, flow_label=0x12345, paylen=0x0102, next_hdr=0x1B, hop_limit=63):
    first = 6 << 28 | traffic_class << 20 | flow_label
    return struct.pack("!IHBB", first, paylen, next_hdr, hop_limit) + LEFT.packed + RIGHT.packed


def wc(byte_len, flags=HAS_GRH, status=SUCCESS, is_recv=True):
    return pvl.WC(1, status, 17, 0, RECV, byte_len, wc_flags=flags, is_recv=is_recv)


def checksum(header):
    total = sum(struct.unpack("!10H", header))
    return ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF


def test_the_layout_of_ipv6():
    grh = pvl.GRH.from_bytes(ipv6())
    assert grh == pvl.GRH(
        sgid=LEFT,
        dgid=RIGHT,
        version=6,
        traffic_class=0xA5,
        flow_label=0x12345,
        paylen=0x0102,
        next_hdr=0x1B,
        hop_limit=63,
    )
    assert grh.to_bytes() == ipv6()


@pytest.mark.parametrize("front", [bytes(20), b"\xee" * 20, b"\x45" * 20])
def test_the_layout_of_ipv4_is_in_the_last_20_bytes(front):
    grh = pvl.GRH.from_bytes(front + IPV4)
    assert (grh.version, str(grh.sgid.ipv4_mapped), str(grh.dgid.ipv4_mapped)) == (4, "192.0.2.1", "192.0.2.9")
    assert (grh.traffic_class, grh.paylen, grh.hop_limit, grh.next_hdr, grh.flow_label) == (2, 60, 64, 17, 0)


def test_old_bytes_in_front_may_look_like_ipv6():
    """Whoever does not write the first 20 bytes leaves there what was there: the checksum decides."""
    good = IPV4[:10] + struct.pack("!H", checksum(IPV4[:10] + b"\0\0" + IPV4[12:])) + IPV4[12:]
    assert pvl.GRH.from_bytes(ipv6()[:20] + good).version == 4
    spoiled = bytearray(good)
    spoiled[10] ^= 1
    assert pvl.GRH.from_bytes(ipv6()[:20] + bytes(spoiled)).version == 6


def test_an_ipv6_address_may_look_like_an_ipv4_header():
    raw = bytearray(ipv6())
    raw[20] = 0x45
    assert pvl.GRH.from_bytes(raw).version == 6


def test_what_is_written_can_be_read():
    grh = pvl.GRH(sgid=IPv6Address("::ffff:10.1.2.3"), dgid=IPv6Address("::ffff:239.4.5.6"), version=4, hop_limit=7)
    raw = grh.to_bytes()
    assert len(raw) == GRH_BYTES
    assert checksum(raw[20:]) == 0
    # The checksum is right, so it is IPv4 even behind bytes that look like IPv6.
    assert pvl.GRH.from_bytes(b"\x60" + raw[1:]) == pvl.GRH.from_bytes(raw)
    assert pvl.GRH.from_bytes(raw).dgid == grh.dgid


@pytest.mark.parametrize("data", [bytes(39), b"", bytes(40), b"\x50" * 40])
def test_what_is_no_header(data):
    with pytest.raises(ValueError, match="GRH"):
        pvl.GRH.from_bytes(data)


@pytest.mark.parametrize("data", [None, 5, "x" * 40])
def test_what_is_no_buffer(data):
    with pytest.raises(TypeError, match="a GRH must support the buffer protocol"):
        pvl.GRH.from_bytes(data)


@pytest.mark.parametrize(
    ("member", "value"),
    [("flow_label", 1 << 20), ("traffic_class", 256), ("paylen", -1), ("hop_limit", 256), ("version", 5)],
)
def test_members_that_do_not_fit(member, value):
    with pytest.raises(ValueError, match=f"{member} must be"):
        pvl.GRH(sgid=LEFT, dgid=RIGHT, **{member: value}).to_bytes()


def test_version_4_is_for_ipv4():
    with pytest.raises(ValueError, match="between IPv4 addresses"):
        pvl.GRH(sgid=LEFT, dgid=RIGHT, version=4).to_bytes()


# ---------------------------------------------------------------- from the payload


def test_byte_len_counts_the_40_bytes():
    room = bytearray(ipv6() + b"hello, world" + b"old")
    grh, payload = pvl.split_grh(room, wc(40 + 12))
    assert (grh.sgid, bytes(payload)) == (LEFT, b"hello, world")
    payload[0] = ord("J")  # a view, not a copy
    assert room[40:45] == b"Jello"


def test_a_datagram_without_payload():
    _grh, payload = pvl.split_grh(bytearray(ipv6()), wc(40))
    assert len(payload) == 0


def test_a_datagram_without_header_still_has_its_room():
    grh, payload = pvl.split_grh(bytearray(40) + b"abc", wc(43, flags=pvl.WCFlags(0)))
    assert (grh, bytes(payload)) == (None, b"abc")


@pytest.mark.parametrize("byte_len", [0, 12, 39, 53])
def test_a_completion_that_is_not_of_this_buffer(byte_len):
    with pytest.raises(ValueError, match=f"40 to 52 of them, and this completion .* byte_len {byte_len}"):
        pvl.split_grh(bytearray(ipv6() + b"hello, world"), wc(byte_len))


def test_the_completion_of_a_send():
    with pytest.raises(ValueError, match="of a send"):
        pvl.split_grh(bytearray(100), wc(50, is_recv=False))


def test_a_failed_completion_has_no_payload():
    with pytest.raises(pvl.FlushError):
        pvl.split_grh(bytearray(100), wc(0, status=pvl.WCStatus.WR_FLUSH_ERR))
