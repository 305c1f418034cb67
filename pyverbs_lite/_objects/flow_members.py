"""How the members of a flow rule's headers are checked, and written in network byte order."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from .._base.args import check_int

__all__ = [
    "BE16",
    "BE32",
    "FLOW_LABEL",
    "IPV4_MEMBER",
    "IPV6_MEMBER",
    "MAC",
    "MAC_MEMBER",
    "U8",
    "VNI",
    "IPv4",
    "IPv6",
    "Member",
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


class Member(NamedTuple):
    """How a member of a filter is written: ``encode`` gives its bytes, and ``full`` is the mask of all its bits."""

    encode: Callable[[str, object], bytes]
    full: bytes


MAC_MEMBER = Member(_mac, b"\xff" * 6)
IPV4_MEMBER = Member(_address(IPv4Address), b"\xff" * 4)
IPV6_MEMBER = Member(_address(IPv6Address), b"\xff" * 16)
U8, BE16, BE32 = (Member(_number(bits), b"\xff" * (bits // 8)) for bits in (8, 16, 32))
FLOW_LABEL = Member(_number(32, 20), b"\x00\x0f\xff\xff")
VNI = Member(_number(32, 24), b"\x00\xff\xff\xff")
