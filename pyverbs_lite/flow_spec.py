"""The parts of a flow rule as values: which packets it catches, by layer, and what is done with them.

Numbers are host integers, addresses are ``ipaddress`` objects or text, MACs are text or six bytes; ``pack`` makes the C
struct with its big-endian members. A member that is None was not given: any value matches. With a value, and no mask,
every bit of it counts; with a mask, those bits that the mask has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import ClassVar, NamedTuple

from ._args import check_int
from ._resource import Resource
from .counters import Counters
from .enums import FlowSpecType
from .ffi import CData, ffi
from .flow_action import FlowActionESP

__all__ = [
    "FlowSpec",
    "FlowSpecActionCount",
    "FlowSpecActionDrop",
    "FlowSpecActionHandle",
    "FlowSpecActionTag",
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

MAC = str | bytes
IPv4 = str | bytes | IPv4Address
IPv6 = str | bytes | IPv6Address


def _mac(name: str, value: object) -> bytes:
    octets = value
    if isinstance(value, str):
        try:
            octets = bytes.fromhex(value.replace(":", "").replace("-", ""))
        except ValueError:
            octets = b""
    if not isinstance(octets, bytes):
        raise TypeError(f"{name} must be a MAC: text such as 02:00:c0:00:02:01, or six bytes; not {value!r}")
    if len(octets) != 6 or (isinstance(value, str) and len(value) not in (12, 17)):
        raise ValueError(f"{name} {value!r} is not a MAC: six bytes, or text such as 02:00:c0:00:02:01")
    return octets


def _address(kind: type[IPv4Address] | type[IPv6Address]) -> Callable[[str, object], bytes]:
    def encode(name: str, value: object) -> bytes:
        if not isinstance(value, (str, bytes, kind)):  # an int would be accepted, and be in doubtful order
            raise TypeError(f"{name} must be an {kind.__name__}, its text or its bytes, not {value!r}")
        try:
            address = kind(value)
            if getattr(address, "scope_id", None) is not None:
                raise ValueError("packets carry no zone")
            return address.packed
        except ValueError as error:
            raise ValueError(f"{name} {value!r} is not an {kind.__name__}: {error}") from None

    return encode


def _number(bits: int, width: int = 0) -> Callable[[str, object], bytes]:
    def encode(name: str, value: object) -> bytes:
        return check_int(f"{name} ({width or bits} bits)", value, 0, (1 << (width or bits)) - 1).to_bytes(
            bits // 8, "big"
        )

    return encode


class _Member(NamedTuple):
    """How a member of a filter is written: ``encode`` gives its bytes, and ``full`` is the mask of all its bits."""

    encode: Callable[[str, object], bytes]
    full: bytes


_MAC = _Member(_mac, b"\xff" * 6)
_IPV4 = _Member(_address(IPv4Address), b"\xff" * 4)
_IPV6 = _Member(_address(IPv6Address), b"\xff" * 16)
_U8, _BE16, _BE32 = (_Member(_number(bits), b"\xff" * (bits // 8)) for bits in (8, 16, 32))
_FLOW_LABEL = _Member(_number(32, 20), b"\x00\x0f\xff\xff")
_VNI = _Member(_number(32, 24), b"\x00\xff\xff\xff")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpec:
    """Base of the parts of a flow rule that match a header.

    Attributes:
        inner: whether the header inside of a tunnel is meant, and not the outer one.
    """

    _type: ClassVar[FlowSpecType]
    _struct: ClassVar[str]
    _members: ClassVar[dict[str, _Member]]

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
    _members = {"dst_mac": _MAC, "src_mac": _MAC, "ether_type": _BE16, "vlan_tag": _BE16}  # noqa: RUF012

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
    _members = {"src_ip": _IPV4, "dst_ip": _IPV4}  # noqa: RUF012

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
        "src_ip": _IPV4,
        "dst_ip": _IPV4,
        "proto": _U8,
        "tos": _U8,
        "ttl": _U8,
        "flags": _U8,
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
        "src_ip": _IPV6,
        "dst_ip": _IPV6,
        "flow_label": _FLOW_LABEL,
        "next_hdr": _U8,
        "traffic_class": _U8,
        "hop_limit": _U8,
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
    _members = {"dst_port": _BE16, "src_port": _BE16}  # noqa: RUF012

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
    _members = {"tunnel_id": _VNI}  # noqa: RUF012

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
    _members = {"c_ks_res0_ver": _BE16, "protocol": _BE16, "key": _BE32}  # noqa: RUF012

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
    _members = {"label": _BE32}  # noqa: RUF012

    label: int | None = None
    label_mask: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSpecESP(FlowSpec):
    """An IPsec ESP header (``struct ibv_flow_spec_esp``); ``spi`` and ``seq`` have 32 bits."""

    _type = FlowSpecType.ESP
    _struct = "ibv_flow_spec_esp"
    _members = {"spi": _BE32, "seq": _BE32}  # noqa: RUF012

    spi: int | None = None
    spi_mask: int | None = None
    seq: int | None = None
    seq_mask: int | None = None


# ---------------------------------------------------------------- actions


class _Action:
    """Base of what is done with the packets that a rule catches."""

    __slots__ = ()
    _type: ClassVar[FlowSpecType]
    _struct: ClassVar[str]

    def pack(self) -> bytes:
        """Return the C struct: type, size and, in host order, what the action needs."""
        raw = ffi.new(f"struct {self._struct} *")
        raw.type, raw.size = self._type, ffi.sizeof(raw[0])
        self._fill(raw)
        return bytes(ffi.buffer(raw))

    def _fill(self, raw: CData) -> None:
        """Write what the action needs."""

    @property
    def _refers_to(self) -> Resource | None:
        return None


@dataclass(frozen=True, slots=True)
class FlowSpecActionTag(_Action):
    """Mark packets (``struct ibv_flow_spec_action_tag``): ``WCView.flow_tag`` shows ``tag_id``, 24 bits."""

    _type = FlowSpecType.ACTION_TAG
    _struct = "ibv_flow_spec_action_tag"

    tag_id: int

    def __post_init__(self) -> None:
        check_int("tag_id (24 bits)", self.tag_id, 0, (1 << 24) - 1)

    def _fill(self, raw: CData) -> None:
        raw.tag_id = self.tag_id


@dataclass(frozen=True, slots=True)
class FlowSpecActionDrop(_Action):
    """Drop packets (``struct ibv_flow_spec_action_drop``)."""

    _type = FlowSpecType.ACTION_DROP
    _struct = "ibv_flow_spec_action_drop"


@dataclass(frozen=True, slots=True)
class FlowSpecActionCount(_Action):
    """Count packets (``struct ibv_flow_spec_counter_action``)."""

    _type = FlowSpecType.ACTION_COUNT
    _struct = "ibv_flow_spec_counter_action"

    counters: Counters

    def __post_init__(self) -> None:
        if not isinstance(self.counters, Counters):
            raise TypeError(f"counters must be of class Counters, not {self.counters!r}")

    def _fill(self, raw: CData) -> None:
        raw.counters = self.counters._handle

    @property
    def _refers_to(self) -> Resource:
        return self.counters


@dataclass(frozen=True, slots=True)
class FlowSpecActionHandle(_Action):
    """Apply an action that was made before, such as decryption (``struct ibv_flow_spec_action_handle``)."""

    _type = FlowSpecType.ACTION_HANDLE
    _struct = "ibv_flow_spec_action_handle"

    action: FlowActionESP

    def __post_init__(self) -> None:
        if not isinstance(self.action, FlowActionESP):
            raise TypeError(f"action must be of class FlowActionESP, not {self.action!r}")

    def _fill(self, raw: CData) -> None:
        raw.action = self.action._handle

    @property
    def _refers_to(self) -> Resource:
        return self.action


AnySpec = FlowSpec | _Action
