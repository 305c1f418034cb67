"""What each side tells the other of its QP, ``Endpoint``, and what both can do, ``Negotiated``."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from ipaddress import IPv6Address

from ._base.random import random_64
from .enums import MTU, LinkLayer
from .errors import HandshakeError
from .remote import checked_int

__all__ = ["LEAST_CREDITS", "Endpoint", "Negotiated", "negotiate", "random_bits"]

#: How many credits a side may send before its peer has noticed one, at least.
LEAST_CREDITS = 3
_LINK_LAYER_NAMES = {LinkLayer.INFINIBAND: "InfiniBand", LinkLayer.ETHERNET: "Ethernet"}
#: What a multicast address begins with.
_MULTICAST = 0xFF
_RANGES: dict[str, tuple[int, int, str]] = {
    "nonce": (0, 2**64 - 1, "64 bits"),
    "qp_num": (2, 0xFFFFFE, "a QP number has 24 bits; 0, 1 and 0xffffff are never an RC QP"),
    "psn": (0, 0xFFFFFF, "a packet sequence number has 24 bits"),
    "lid": (0, 0xFFFF, "a LID has 16 bits"),
    "max_rd_atomic": (0, 0xFF, "8 bits"),
    "max_dest_rd_atomic": (0, 0xFF, "8 bits"),
    "max_message_size": (0, 2**31, "a message has at most 2**31 bytes"),
    "recv_depth": (0, 2**31 - 1, "31 bits"),
    "credit_depth": (LEAST_CREDITS, 0xFF, "so many credits may be on their way at once, and 8 bits"),
    "max_msg_sz": (1, 2**32 - 1, "32 bits"),
}


_KINDS = {"gid": IPv6Address, "link_layer": LinkLayer, "mtu": MTU}
_numbers, _enums = operator.attrgetter(*_RANGES), operator.attrgetter(*_KINDS)
_INT = functools.partial(operator.is_, int)
_LEAST, _MOST, _ = zip(*_RANGES.values(), strict=True)


def random_bits(bits: int) -> int:
    """Return so many random bits, at most 64, that nobody can guess."""
    return random_64() >> (64 - bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One side's QP and what that side can do, as its HELLO says it.

    Attributes:
        qp_num, lid, gid, link_layer: where the QP is. A LID matters on InfiniBand only.
        psn: the sender's own ``sq_psn``; the receiver sets it as ``rq_psn``.
        mtu: the largest path MTU the sender's port can do.
        max_rd_atomic: RDMA reads and atomics that the sender wants in flight.
        max_dest_rd_atomic: RDMA reads and atomics that it can serve at once.
        max_message_size: the longest message that each of its posted receives takes, in bytes.
        recv_depth: how many receives for messages it has posted.
        credit_depth: how many more it keeps for credits.
        max_msg_sz: the largest message of its port.
        nonce: 64 random bits, so that no two records are the same.

    Raises:
        TypeError, ValueError: a field is not what it must be; the text names it, its value and its range.

    """

    qp_num: int
    psn: int
    lid: int
    gid: IPv6Address
    link_layer: LinkLayer
    mtu: MTU
    max_rd_atomic: int
    max_dest_rd_atomic: int
    max_message_size: int
    recv_depth: int
    max_msg_sz: int
    credit_depth: int = LEAST_CREDITS
    nonce: int = field(default_factory=lambda: random_bits(64))

    def __post_init__(self) -> None:
        # All at a time, and one by one only where one is not as it should be: most records are read from the wire.
        numbers = _numbers(self)
        plain = all(map(_INT, map(type, numbers)))
        if not (plain and all(map(operator.le, _LEAST, numbers)) and all(map(operator.le, numbers, _MOST))):
            for name, (low, high, why) in _RANGES.items():
                object.__setattr__(self, name, checked_int(getattr(self, name), low, high, name, why))
        if not all(map(isinstance, _enums(self), _KINDS.values())):
            name = next(name for name, kind in _KINDS.items() if not isinstance(getattr(self, name), kind))
            raise TypeError(f"{name} must be of type {_KINDS[name].__name__}, not {getattr(self, name)!r}")
        if self.link_layer not in _LINK_LAYER_NAMES:
            raise ValueError("link_layer is UNSPECIFIED: it must be INFINIBAND or ETHERNET")
        if self.link_layer is LinkLayer.INFINIBAND:
            checked_int(self.lid, 1, 0xBFFF, "lid", "a unicast LID on InfiniBand")
        number = int(self.gid)
        if not number and self.link_layer is LinkLayer.ETHERNET:
            raise ValueError("gid is ::, outside the unicast GIDs: on Ethernet the GID is the address")
        if number >> 120 == _MULTICAST:
            raise ValueError(f"gid is {self.gid}, outside the unicast GIDs: it is a multicast address")


@dataclass(frozen=True, slots=True, kw_only=True)
class Negotiated:
    """What both sides can do, seen from one of them; see ``negotiate``."""

    path_mtu: MTU
    max_rd_atomic: int
    max_dest_rd_atomic: int
    max_send_size: int
    max_rdma_size: int
    send_depth_limit: int


def negotiate(local: Endpoint, remote: Endpoint, header: int = 0) -> Negotiated:
    """Return what the two sides have in common.

    Reads and atomics in flight are bounded by what the other side serves, sends by what it has posted.

    Args:
        header: bytes that stand in front of every message, beside what its receive takes of it.

    Raises:
        HandshakeError: the two cannot be connected.

    """
    if local.link_layer is not remote.link_layer:
        mine, theirs = (_LINK_LAYER_NAMES[side.link_layer] for side in (local, remote))
        raise HandshakeError(f"one side is {mine}, the other {theirs}: this side is {mine}; choose other ports")
    if local == remote:
        raise HandshakeError("the peer sent this side's own record back: is it an echo service?")
    max_rdma_size = min(local.max_msg_sz, remote.max_msg_sz)
    return Negotiated(
        path_mtu=min(local.mtu, remote.mtu),
        max_rd_atomic=min(local.max_rd_atomic, remote.max_dest_rd_atomic),
        max_dest_rd_atomic=min(local.max_dest_rd_atomic, remote.max_rd_atomic),
        max_send_size=min(remote.max_message_size, max_rdma_size - header),
        max_rdma_size=max_rdma_size,
        send_depth_limit=remote.recv_depth,
    )
