"""Multicast groups that a UD QP receives from, and the GIDs that stand for multicast addresses."""

from __future__ import annotations

import threading
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING

from ._base.args import check_int
from ._base.check import check_rc
from ._base.resource import Resource
from .enums import GIDType, QPType
from .errors import StateError
from .ffi import CData, ffi, lib
from .gid import parse_gid

if TYPE_CHECKING:
    from ._objects.transitions import Transitions

__all__ = ["MULTICAST_QPN", "Multicast", "multicast_gid"]

#: The number that a datagram to a group is sent to.
MULTICAST_QPN = 0xFFFFFF
#: Signatures by which the MGIDs of IP over InfiniBand are known.
_IPOIB_IPV4, _IPOIB_IPV6 = 0x401B, 0x601B


class Multicast(Resource):
    """A UD QP's place in a multicast group; closing it leaves the group. Make one with ``QP.attach_mcast``.

    On InfiniBand the subnet manager must have the port in the group as well (``rdma_join_multicast``), or nothing
    arrives; on RoCE the host must have joined the IP group for the switch to forward its packets.

    Attributes:
        gid: the group.
        lid: its LID, on InfiniBand; 0 on RoCE.

    Raises:
        ValueError: the QP is not UD, or the GID is no multicast GID.
        StateError: the QP is in the group already; the kernel would count it once, and one detach would undo both.
        VerbsOSError: the verb refused.

    Verb: ibv_attach_mcast
    """

    def __init__(self, qp: Transitions, gid: str | bytes | IPv4Address | IPv6Address, lid: int = 0) -> None:
        if qp.qp_type != QPType.UD:
            raise ValueError(f"a {qp.qp_type.name} QP has one peer and cannot be in a multicast group: only UD can")
        group = parse_gid(gid)
        if not _is_multicast(group):
            raise ValueError(
                f"{group} is no multicast GID: those are ff00::/8, and ::ffff:224.0.0.0 to 239.255.255.255"
            )
        check_int("lid", lid, 0, 0xFFFF)
        raw = ffi.new("union ibv_gid *")
        raw.raw = group.packed
        self.qp = qp
        self.gid: IPv6Address = group
        self.lid: int = lid
        with qp._lock:
            handle = qp._handle
            for other in qp._children:
                if isinstance(other, Multicast) and (other.gid, other.lid, other.closed) == (group, lid, False):
                    raise StateError(f"{qp!r} is in the multicast group {group} already")
            check_rc("ibv_attach_mcast", lib.ibv_attach_mcast(handle, raw, lid))
            self._own(raw, _Detach(qp._lock, handle, lid), qp, label=f"Multicast {group} of QP {qp.qp_num:#x}")

    def __repr__(self) -> str:
        return f"<Multicast {self.gid} of {self.qp!r}{' (left)' if self.closed else ''}>"


class _Detach:
    """Leaves the group; the QP is still there, for it cannot be destroyed before its children."""

    __slots__ = ("lid", "lock", "qp")

    def __init__(self, lock: threading.RLock, qp: CData, lid: int) -> None:
        self.lock = lock
        self.qp = qp
        self.lid = lid

    def __call__(self, gid: CData) -> None:
        with self.lock:
            check_rc("ibv_detach_mcast", lib.ibv_detach_mcast(self.qp, gid, self.lid))


def _is_multicast(gid: IPv6Address) -> bool:
    return (gid.ipv4_mapped or gid).is_multicast


def multicast_gid(
    address: str | IPv4Address | IPv6Address,
    gid_type: GIDType = GIDType.ROCE_V2,
    *,
    pkey: int = 0xFFFF,
    scope: int = 2,
) -> IPv6Address:
    """Return the GID that stands for the multicast group of an IP address, as librdmacm maps it.

    ============  ==========================================  ============================
    ``gid_type``  IPv4                                        IPv6
    ============  ==========================================  ============================
    ``ROCE_V2``   ``::ffff:a.b.c.d``                          the address itself
    ``ROCE_V1``   ``ff0e::ffff:a.b.c.d``                      the address itself
    ``IB``        ``ff1S:401b:PKEY::`` and its low 28 bits    ``ff1S:601b:PKEY:…``: 80 bits
    ============  ==========================================  ============================

    Args:
        gid_type: that of the GID table row that the group is reached from.
        pkey, scope: of the IPoIB interface; ``IB`` only. The scope (S) is 4 bits, 2 is link-local. These are the groups
            of IP over InfiniBand; what ``rdma_join_multicast`` joins in ``PortSpace.UDP`` has 01 for 1b.

    Raises:
        ValueError: it is no multicast address.
    """
    ip = ip_address(address)
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if not ip.is_multicast:
        raise ValueError(f"{ip} is no multicast address: those are 224.0.0.0/4 and ff00::/8")
    check_int("pkey", pkey, 0, 0xFFFF)
    check_int("scope", scope, 0, 0xF)
    if gid_type == GIDType.IB:
        signature, group = (_IPOIB_IPV4, 0x0FFFFFFF) if ip.version == 4 else (_IPOIB_IPV6, (1 << 80) - 1)
        return IPv6Address((0xFF10 | scope) << 112 | signature << 96 | (pkey | 0x8000) << 80 | int(ip) & group)
    if isinstance(ip, IPv6Address):
        return IPv6Address(ip.packed)  # a GID has no zone
    prefix = 0 if gid_type == GIDType.ROCE_V2 else 0xFF0E << 112
    return IPv6Address(prefix | 0xFFFF << 32 | int(ip))
