"""IP socket addresses: Python's tuples, and the C structs of librdmacm."""

from __future__ import annotations

import ipaddress
import socket
from typing import TypeAlias

from .._base.args import check_int
from ..ffi import CData, ffi

__all__ = ["Address", "from_sockaddr", "to_sockaddr"]

#: ``(host, port)``, or ``(host, port, flowinfo, scope_id)`` of IPv6, as the ``socket`` module has them.
Address: TypeAlias = tuple[str, int] | tuple[str, int, int, int]

_SHAPE = "an address must be (host, port) or, for IPv6, (host, port, flowinfo, scope_id)"


def to_sockaddr(address: Address, what: str = "address") -> CData:
    """Return the struct of an IP address; it owns its memory. ``""`` is any IPv4 address, ``"::"`` any IPv6 one.

    A link-local address needs its scope: ``"fe80::1%eth0"``, or the number as the tuple's last member.

    Raises:
        TypeError, ValueError: it is no such tuple, or the host is a name: resolve it first (``socket.getaddrinfo``).
    """
    if not isinstance(address, tuple) or len(address) not in (2, 4) or not isinstance(address[0], str):
        raise TypeError(f"{what} is {address!r}: {_SHAPE}")
    host, zone, port = *_split(address[0] or "0.0.0.0", what), check_int(f"port of {what}", address[1], 0, 0xFFFF)
    if host.version == 4:
        if len(address) != 2:
            raise ValueError(f"{what} is {address!r}: an IPv4 address is (host, port)")
        raw = ffi.new("struct sockaddr_in *")
        raw.sin_family, raw.sin_port = socket.AF_INET, socket.htons(port)
        ffi.memmove(ffi.addressof(raw, "sin_addr"), host.packed, 4)
        return raw
    flowinfo, scope = (address[2], address[3]) if len(address) == 4 else (0, 0)
    raw = ffi.new("struct sockaddr_in6 *")
    raw.sin6_family, raw.sin6_port = socket.AF_INET6, socket.htons(port)
    raw.sin6_flowinfo = socket.htonl(check_int(f"flowinfo of {what}", flowinfo, 0, (1 << 20) - 1))
    raw.sin6_scope_id = check_int(f"scope_id of {what}", scope, 0, (1 << 32) - 1) or zone
    ffi.memmove(ffi.addressof(raw, "sin6_addr"), host.packed, 16)
    return raw


def _split(host: str, what: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    text, _, zone = host.partition("%")
    try:
        ip = ipaddress.ip_address(text)
    except ValueError as error:
        raise ValueError(
            f"{what} is {host!r}, which is no IP address; for a name use socket.getaddrinfo or pyverbs_lite.cm.connect"
        ) from error
    if not zone:
        return ip, 0
    try:
        return ip, int(zone) if zone.isdecimal() else socket.if_nametoindex(zone)
    except OSError as error:
        raise ValueError(f"{what} is {host!r}, and no network interface is named {zone!r}") from error


def from_sockaddr(raw: CData) -> Address | None:
    """Read a ``struct sockaddr *``; None where there is no address, or one of another family."""
    if not raw:
        return None
    if raw.sa_family == socket.AF_INET:
        v4 = ffi.cast("struct sockaddr_in *", raw)
        packed = bytes(ffi.buffer(ffi.addressof(v4, "sin_addr"), 4))
        return str(ipaddress.IPv4Address(packed)), socket.ntohs(v4.sin_port)
    if raw.sa_family == socket.AF_INET6:
        v6 = ffi.cast("struct sockaddr_in6 *", raw)
        packed = bytes(ffi.buffer(ffi.addressof(v6, "sin6_addr"), 16))
        ip = str(ipaddress.IPv6Address(packed))
        return ip, socket.ntohs(v6.sin6_port), socket.ntohl(v6.sin6_flowinfo), v6.sin6_scope_id
    return None
