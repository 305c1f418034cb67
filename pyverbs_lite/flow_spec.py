"""The parts of a flow rule as values: which packets it catches, by layer, and what is done with them.

Numbers are host integers, addresses are ``ipaddress`` objects or text, MACs are text or six bytes; ``pack`` makes the C
struct with its big-endian members. A member that is None was not given: any value matches. With a value, and no mask,
every bit of it counts; with a mask, those bits that the mask has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ._base.resource import Resource
from ._objects.flow_members import (
    BE16,
    BE32,
    FLOW_LABEL,
    IPV4_MEMBER,
    IPV6_MEMBER,
    MAC,
    MAC_MEMBER,
    U8,
    VNI,
    IPv4,
    IPv6,
    Member,
)
from .enums import FlowSpecType
from .ffi import CData, ffi

__all__ = [
    "FlowSpec",
    "FlowSpecESP",
    "FlowSpecEth",
    "FlowSpecGRE",
    "FlowSpecIPv4",
    "FlowSpecIPv4Ext",
    "FlowSpecIPv6",
    "FlowSpecMPLS",
    "FlowSpecTCP",
    "FlowSpecUDP",
    "FlowSpecVXLAN",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpec:
    """Base of the parts of a flow rule that match a header.

    Attributes:
        inner: whether the header inside of a tunnel is meant, and not the outer one.
    """

    _type: ClassVar[FlowSpecType]
    _struct: ClassVar[str]
    _members: ClassVar[dict[str, Member]]

    inner: bool = False

    def __post_init__(self) -> None:
        self.pack()  # a value that cannot be packed is refused where it was written

    def pack(self) -> bytes:
        """Return the C struct: type, size, the filter's values, the filter's masks.

        Raises:
            TypeError, ValueError: a member is of the wrong kind or out of range, or has a mask and no value.
        """
        raw = ffi.new(f"struct {self._struct} *")
        raw.type = self._type | (FlowSpecType.INNER if self.inner else 0)
        raw.size = ffi.sizeof(raw[0])
        for name, member in self._members.items():
            value, mask = getattr(self, name), getattr(self, f"{name}_mask")
            if value is None:
                if mask is not None:
                    raise ValueError(f"{name}_mask is given without {name}")
                continue
            bits = member.full if mask is None else member.encode(f"{name}_mask", mask)
            octets = member.encode(name, value)
            _write(raw, "mask", name, bits)
            # Drivers differ in what they make of bits that do not count, so they are zero.
            _write(raw, "val", name, bytes(a & b for a, b in zip(octets, bits, strict=True)))
        return bytes(ffi.buffer(raw))

    @property
    def _refers_to(self) -> Resource | None:
        """What the struct has a pointer to, and must outlive the rule."""
        return None


def _write(raw: CData, half: str, name: str, octets: bytes) -> None:
    ffi.buffer(ffi.addressof(raw[0], half, name))[:] = octets


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpecEth(FlowSpec):
    """An Ethernet header (``struct ibv_flow_spec_eth``).

    Attributes:
        dst_mac, src_mac: MACs.
        ether_type: 16 bits, such as 0x0800.
        vlan_tag: the 16 bits of the 802.1Q tag: priority, DEI, 12 bits of VLAN id.
    """

    _type = FlowSpecType.ETH
    _struct = "ibv_flow_spec_eth"
    _members = {"dst_mac": MAC_MEMBER, "src_mac": MAC_MEMBER, "ether_type": BE16, "vlan_tag": BE16}  # noqa: RUF012

    dst_mac: MAC | None = None
    dst_mac_mask: MAC | None = None
    src_mac: MAC | None = None
    src_mac_mask: MAC | None = None
    ether_type: int | None = None
    ether_type_mask: int | None = None
    vlan_tag: int | None = None
    vlan_tag_mask: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpecIPv4(FlowSpec):
    """The addresses of an IPv4 header (``struct ibv_flow_spec_ipv4``)."""

    _type = FlowSpecType.IPV4
    _struct = "ibv_flow_spec_ipv4"
    _members = {"src_ip": IPV4_MEMBER, "dst_ip": IPV4_MEMBER}  # noqa: RUF012

    src_ip: IPv4 | None = None
    src_ip_mask: IPv4 | None = None
    dst_ip: IPv4 | None = None
    dst_ip_mask: IPv4 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpecIPv4Ext(FlowSpec):
    """An IPv4 header (``struct ibv_flow_spec_ipv4_ext``).

    Attributes:
        proto, tos, ttl: 8 bits each.
        flags: don't-fragment and more-fragments, 8 bits.
    """

    _type = FlowSpecType.IPV4_EXT
    _struct = "ibv_flow_spec_ipv4_ext"
    _members = {  # noqa: RUF012
        "src_ip": IPV4_MEMBER,
        "dst_ip": IPV4_MEMBER,
        "proto": U8,
        "tos": U8,
        "ttl": U8,
        "flags": U8,
    }

    src_ip: IPv4 | None = None
    src_ip_mask: IPv4 | None = None
    dst_ip: IPv4 | None = None
    dst_ip_mask: IPv4 | None = None
    proto: int | None = None
    proto_mask: int | None = None
    tos: int | None = None
    tos_mask: int | None = None
    ttl: int | None = None
    ttl_mask: int | None = None
    flags: int | None = None
    flags_mask: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpecIPv6(FlowSpec):
    """An IPv6 header (``struct ibv_flow_spec_ipv6``).

    Attributes:
        flow_label: 20 bits.
        next_hdr, traffic_class, hop_limit: 8 bits each.
    """

    _type = FlowSpecType.IPV6
    _struct = "ibv_flow_spec_ipv6"
    _members = {  # noqa: RUF012
        "src_ip": IPV6_MEMBER,
        "dst_ip": IPV6_MEMBER,
        "flow_label": FLOW_LABEL,
        "next_hdr": U8,
        "traffic_class": U8,
        "hop_limit": U8,
    }

    src_ip: IPv6 | None = None
    src_ip_mask: IPv6 | None = None
    dst_ip: IPv6 | None = None
    dst_ip_mask: IPv6 | None = None
    flow_label: int | None = None
    flow_label_mask: int | None = None
    next_hdr: int | None = None
    next_hdr_mask: int | None = None
    traffic_class: int | None = None
    traffic_class_mask: int | None = None
    hop_limit: int | None = None
    hop_limit_mask: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpecTCP(FlowSpec):
    """The ports of a TCP header (``struct ibv_flow_spec_tcp_udp``), 16 bits each."""

    _type = FlowSpecType.TCP
    _struct = "ibv_flow_spec_tcp_udp"
    _members = {"dst_port": BE16, "src_port": BE16}  # noqa: RUF012

    dst_port: int | None = None
    dst_port_mask: int | None = None
    src_port: int | None = None
    src_port_mask: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpecUDP(FlowSpecTCP):
    """The ports of a UDP header (``struct ibv_flow_spec_tcp_udp``), 16 bits each."""

    _type = FlowSpecType.UDP


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpecVXLAN(FlowSpec):
    """A VXLAN header (``struct ibv_flow_spec_tunnel``); ``tunnel_id`` is the VNI, 24 bits."""

    _type = FlowSpecType.VXLAN_TUNNEL
    _struct = "ibv_flow_spec_tunnel"
    _members = {"tunnel_id": VNI}  # noqa: RUF012

    tunnel_id: int | None = None
    tunnel_id_mask: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpecGRE(FlowSpec):
    """A GRE header (``struct ibv_flow_spec_gre``).

    Attributes:
        c_ks_res0_ver: its first 16 bits: flags and version.
        protocol: the EtherType of what is inside, 16 bits.
        key: 32 bits.
    """

    _type = FlowSpecType.GRE
    _struct = "ibv_flow_spec_gre"
    _members = {"c_ks_res0_ver": BE16, "protocol": BE16, "key": BE32}  # noqa: RUF012

    c_ks_res0_ver: int | None = None
    c_ks_res0_ver_mask: int | None = None
    protocol: int | None = None
    protocol_mask: int | None = None
    key: int | None = None
    key_mask: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpecMPLS(FlowSpec):
    """An entry of an MPLS label stack (``struct ibv_flow_spec_mpls``); its place among the parts counts.

    Attributes:
        label: the whole entry, 32 bits: label << 12 | traffic class << 9 | bottom of stack << 8 | TTL.
    """

    _type = FlowSpecType.MPLS
    _struct = "ibv_flow_spec_mpls"
    _members = {"label": BE32}  # noqa: RUF012

    label: int | None = None
    label_mask: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpecESP(FlowSpec):
    """An IPsec ESP header (``struct ibv_flow_spec_esp``); ``spi`` and ``seq`` have 32 bits."""

    _type = FlowSpecType.ESP
    _struct = "ibv_flow_spec_esp"
    _members = {"spi": BE32, "seq": BE32}  # noqa: RUF012

    spi: int | None = None
    spi_mask: int | None = None
    seq: int | None = None
    seq_mask: int | None = None
