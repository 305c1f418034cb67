"""The global routing header that comes in front of every datagram.

A UD receive begins with 40 bytes that the sender did not send, whether there was a header or not, and ``byte_len``
counts them. On InfiniBand, RoCE v1 and RoCE v2 over IPv6 they hold the header itself, which has the layout of IPv6's.
RoCE v2 over IPv4 puts its IPv4 header into the last 20 of them, and whatever it likes into the first 20.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Any

from ._base.args import check_int
from ._memory.buffer import as_bytes_view
from .enums import WCFlags

if TYPE_CHECKING:
    from ._memory.buffer import Memory
    from .mr import MR, MRSlice
    from .wr import WC

__all__ = ["GRH", "GRH_BYTES", "split_grh"]

#: The room that a UD receive needs in front of the payload, in bytes.
GRH_BYTES = 40
#: Where the IPv4 header of RoCE v2 begins.
_IPV4_AT = 20
_IPV6 = struct.Struct("!IHBB16s16s")
_IPV4 = struct.Struct("!BBHHHBBH4s4s")
_PLAIN_IPV4 = 0x45  # version 4, five words: RoCE v2 has no options


@dataclass(frozen=True, slots=True, kw_only=True)
class GRH:
    """Where a datagram came from and was sent to (``struct ibv_grh``).

    Attributes:
        sgid, dgid: the sender's GID, and the one that was sent to: a port's of ours, or a multicast group's. IPv4
            addresses are mapped, as they are in the GID table.
        version: 6, or 4 where it was an IPv4 header.
        traffic_class: 8 bits; of IPv4 its type of service.
        flow_label: 20 bits; 0 for IPv4, which has none.
        paylen: bytes after the header; of IPv4 its total length, with the header.
        next_hdr: what follows: 0x1B is InfiniBand's transport, 17 is UDP (RoCE v2).
        hop_limit: what was left of it.
    """

    sgid: IPv6Address
    dgid: IPv6Address
    version: int = 6
    traffic_class: int = 0
    flow_label: int = 0
    paylen: int = 0
    next_hdr: int = 0x1B
    hop_limit: int = 0

    @classmethod
    def from_bytes(cls, data: Memory) -> GRH:
        """Read the first 40 bytes of a UD receive, in whichever of the two layouts they are.

        Raises:
            ValueError: there are fewer, or neither layout's version is there.
        """
        raw = bytes(as_bytes_view(data, what="a GRH")[:GRH_BYTES])
        if len(raw) < GRH_BYTES:
            raise ValueError(f"a GRH has {GRH_BYTES} bytes, not {len(raw)}")
        if _holds_ipv4(raw):
            _, tos, total, _, _, ttl, protocol, _, source, target = _IPV4.unpack_from(raw, _IPV4_AT)
            return cls(
                sgid=_mapped(source),
                dgid=_mapped(target),
                version=4,
                traffic_class=tos,
                paylen=total,
                next_hdr=protocol,
                hop_limit=ttl,
            )
        first, paylen, next_hdr, hop_limit, sgid, dgid = _IPV6.unpack(raw)
        if first >> 28 != 6:
            raise ValueError(
                f"there is no GRH: neither {raw[0]:#04x} at byte 0 begins an IPv6 header nor {raw[_IPV4_AT]:#04x} at"
                f" byte {_IPV4_AT} an IPv4 one; look at WC.wc_flags first"
            )
        return cls(
            sgid=IPv6Address(sgid),
            dgid=IPv6Address(dgid),
            traffic_class=first >> 20 & 0xFF,
            flow_label=first & 0xFFFFF,
            paylen=paylen,
            next_hdr=next_hdr,
            hop_limit=hop_limit,
        )

    def to_bytes(self) -> bytes:
        """Return the 40 bytes in the layout of ``version``, with what this value does not hold as zero.

        Raises:
            ValueError: a member does not fit, or a GID is no IPv4 address though ``version`` is 4.
        """
        for name, high in (("traffic_class", 0xFF), ("paylen", 0xFFFF), ("next_hdr", 0xFF), ("hop_limit", 0xFF)):
            check_int(name, getattr(self, name), 0, high)
        if self.version == 4:
            source, target = self.sgid.ipv4_mapped, self.dgid.ipv4_mapped
            if source is None or target is None:
                raise ValueError(f"a GRH of version 4 goes between IPv4 addresses, not {self.sgid} and {self.dgid}")
            members = (_PLAIN_IPV4, self.traffic_class, self.paylen, 0, 0, self.hop_limit, self.next_hdr)
            bare = _IPV4.pack(*members, 0, source.packed, target.packed)
            return bytes(_IPV4_AT) + _IPV4.pack(*members, _checksum(bare), source.packed, target.packed)
        check_int("version", self.version, 6, 6)
        first = 6 << 28 | self.traffic_class << 20 | check_int("flow_label", self.flow_label, 0, 0xFFFFF)
        return _IPV6.pack(first, self.paylen, self.next_hdr, self.hop_limit, self.sgid.packed, self.dgid.packed)


def _mapped(address: bytes) -> IPv6Address:
    return IPv6Address(f"::ffff:{IPv4Address(address)}")


def _holds_ipv4(raw: bytes) -> bool:
    """Tell the layouts apart; bytes of an IPv6 header, or of old memory, may look like the other's version."""
    if raw[0] >> 4 != 6:
        return raw[_IPV4_AT] >> 4 == 4
    return raw[_IPV4_AT] == _PLAIN_IPV4 and _checksum(raw[_IPV4_AT:]) == 0


def _checksum(header: bytes) -> int:
    """Compute the checksum of an IPv4 header: over one that has its own, it is 0."""
    total: int = sum(struct.unpack("!10H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _memory(buffer: Any) -> Memory:
    """Return what can be viewed: of a region or a slice of one, its own view."""
    memory: Memory = buffer.view if hasattr(buffer, "lkey") else buffer
    return memory


def split_grh(buffer: Memory | MR | MRSlice, wc: WC) -> tuple[GRH | None, memoryview]:
    """Split what a UD receive brought into its header and its payload; the payload is a view, not a copy.

    Args:
        buffer: what the receive was posted with, from its first byte on.
        wc: its completion. ``wc.byte_len`` counts the 40 bytes, so a payload of 5 bytes has 45.

    Returns:
        The header, or None where the datagram had none (possible on InfiniBand, within a subnet), and the payload.

    Raises:
        CompletionError: the receive failed.
        ValueError: the completion is not that of a datagram received into this buffer.
    """
    wc.raise_for_status()
    view = as_bytes_view(_memory(buffer), what="the buffer of a UD receive")
    if wc.is_recv is False or not GRH_BYTES <= wc.byte_len <= len(view):
        raise ValueError(
            f"a datagram in these {len(view)} bytes has {GRH_BYTES} to {len(view)} of them, and this completion"
            f" ({'of a send' if wc.is_recv is False else 'of a receive'}) has byte_len {wc.byte_len}"
        )
    header = GRH.from_bytes(view[:GRH_BYTES]) if wc.wc_flags & WCFlags.GRH else None
    return header, view[GRH_BYTES : wc.byte_len]
