"""Resolving names to what ``CMID`` steps take, with InfiniBand's own routes where a service for them runs."""

from __future__ import annotations

from dataclasses import dataclass

from ._base.args import check_flags
from ._cm.sockaddr import Address, from_sockaddr, to_sockaddr
from .enums import QPType
from .enums.cm import AddrInfoFlags, PortSpace
from .errors import VerbsOSError
from .ffi import CData, ffi, lib

__all__ = ["AddrInfo", "getaddrinfo"]

_NO_FLAGS = AddrInfoFlags(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddrInfo:
    """One way to an address (``struct rdma_addrinfo``).

    Attributes:
        ai_src_addr, ai_dst_addr: socket addresses, or None where there is none of IP.
        ai_route: path records, for ``CMID.set_option(IBOption.PATH, …)``; empty where nobody resolved them.
        ai_connect: bytes that have to come first in the private data.
    """

    ai_flags: AddrInfoFlags
    ai_family: int
    ai_qp_type: QPType
    ai_port_space: PortSpace
    ai_src_addr: Address | None
    ai_dst_addr: Address | None
    ai_src_canonname: str
    ai_dst_canonname: str
    ai_route: bytes
    ai_connect: bytes


def getaddrinfo(
    node: str | None,
    service: str | int | None = None,
    *,
    flags: AddrInfoFlags = _NO_FLAGS,
    family: int = 0,
    qp_type: QPType | None = None,
    port_space: PortSpace | None = None,
    src: Address | None = None,
) -> list[AddrInfo]:
    """Resolve a name or an address, and a service or a port.

    Args:
        node: a host's name or address; None with ``PASSIVE`` is every address of this one.
        flags: ``PASSIVE`` for an address to bind to, ``NUMERICHOST`` for no look-up, ``NOROUTE``, ``FAMILY``.
        family: with the flag ``FAMILY``, ``socket.AF_INET`` or ``AF_INET6``.
        src: the local address to use.

    Raises:
        VerbsOSError: the name or the service is unknown, or nothing resolves them.

    Verb: rdma_getaddrinfo
    """
    hints, out = ffi.new("struct rdma_addrinfo *"), ffi.new("struct rdma_addrinfo **")
    hints.ai_flags = int(check_flags("flags", flags, AddrInfoFlags))
    hints.ai_family = family
    hints.ai_qp_type = 0 if qp_type is None else QPType(qp_type)
    hints.ai_port_space = 0 if port_space is None else PortSpace(port_space)
    if src is not None:
        raw = to_sockaddr(src, "src")
        hints.ai_src_addr, hints.ai_src_len = ffi.cast("struct sockaddr *", raw), ffi.sizeof(ffi.typeof(raw).item)
    c_node, c_service = (
        ffi.NULL if text is None else ffi.new("char[]", str(text).encode()) for text in (node, service)
    )
    ffi.errno = 0
    rc = lib.rdma_getaddrinfo(c_node, c_service, hints, out)
    if rc:
        # It returns a code of getaddrinfo(), which is no errno, or sets errno.
        raise VerbsOSError(
            ffi.errno, "rdma_getaddrinfo", f"{node!r} {service!r} cannot be resolved (code {rc}): check both names"
        )
    try:
        found, at = [], out[0]
        while at:
            found.append(_read(at))
            at = at.ai_next
        return found
    finally:
        lib.rdma_freeaddrinfo(out[0])


def _read(raw: CData) -> AddrInfo:
    return AddrInfo(
        ai_flags=AddrInfoFlags(raw.ai_flags),
        ai_family=raw.ai_family,
        ai_qp_type=QPType(raw.ai_qp_type),
        ai_port_space=PortSpace(raw.ai_port_space),
        ai_src_addr=from_sockaddr(raw.ai_src_addr),
        ai_dst_addr=from_sockaddr(raw.ai_dst_addr),
        ai_src_canonname=_text(raw.ai_src_canonname),
        ai_dst_canonname=_text(raw.ai_dst_canonname),
        ai_route=bytes(ffi.buffer(raw.ai_route, raw.ai_route_len)) if raw.ai_route else b"",
        ai_connect=bytes(ffi.buffer(raw.ai_connect, raw.ai_connect_len)) if raw.ai_connect else b"",
    )


def _text(raw: CData) -> str:
    return ffi.string(raw).decode(errors="replace") if raw else ""
