"""What a connection may be tuned by."""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import TypedDict

from .._base.args import check_int
from ..device import DeviceAttr
from ..enums import MTU
from ..qp_fsm import mtu_of

__all__ = ["Options", "Tuning"]


class Tuning(TypedDict, total=False):
    """The tuning options of ``connect`` and ``listen``; ``Options`` explains them."""

    max_message_size: int
    recv_depth: int
    send_depth: int
    path_mtu: MTU | int | None
    max_rd_atomic: int
    max_dest_rd_atomic: int
    ack_timeout_exp: int
    retry_cnt: int
    rnr_retry: int
    min_rnr_timer_code: int
    pkey_index: int
    sl: int
    traffic_class: int
    hop_limit: int
    registration_cache: int


#: Option -> the least and the most it may be; the device may allow less.
_RANGES = {
    "max_message_size": (1, 1 << 30),
    "recv_depth": (1, 1 << 16),
    "send_depth": (1, 1 << 16),
    "max_rd_atomic": (0, 255),
    "max_dest_rd_atomic": (0, 255),
    "ack_timeout_exp": (0, 31),
    "retry_cnt": (0, 7),
    "rnr_retry": (0, 7),
    "min_rnr_timer_code": (0, 31),
    "pkey_index": (0, 0xFFFF),
    "sl": (0, 15),
    "traffic_class": (0, 255),
    "hop_limit": (0, 255),
    "registration_cache": (0, 1 << 62),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a connection is built; the peers agree on what both can do.

    Attributes:
        max_message_size: bytes of one receive slot, so the longest message that the peer may send here.
        recv_depth: how many receive slots are posted.
        send_depth: how many requests may be in flight.
        path_mtu: an ``MTU`` or its size in bytes; by default the port's active MTU. The smaller side's is used.
        max_rd_atomic: reads and atomics in flight that this side starts; 0 starts none.
        max_dest_rd_atomic: reads and atomics in flight that this side serves; 0 serves none.
        ack_timeout_exp: a 5-bit code: 4.096 µs × 2^n until a packet is sent again; 0 waits for ever.
        retry_cnt: how often it is sent again, 0 to 7.
        rnr_retry: how often a message is sent again that met no receive, 0 to 7; 7 is for ever.
        min_rnr_timer_code: a 5-bit code: how long the peer waits then; 12 is 0.64 ms, and 0 is the longest.
        pkey_index: the row of the port's P_Key table.
        sl, traffic_class, hop_limit: what the packets carry.
        registration_cache: bytes that stay registered from one operation to the next; 0 for none. See
            ``RegistrationCache`` for what does.
    """

    max_message_size: int = 64 * 1024
    recv_depth: int = 16
    send_depth: int = 64
    path_mtu: MTU | int | None = None
    max_rd_atomic: int = 16
    max_dest_rd_atomic: int = 16
    ack_timeout_exp: int = 14
    retry_cnt: int = 7
    rnr_retry: int = 7
    min_rnr_timer_code: int = 12
    pkey_index: int = 0
    sl: int = 0
    traffic_class: int = 0
    hop_limit: int = 64
    registration_cache: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            check_int(name, getattr(self, name), low, high)
        if self.path_mtu is not None:
            object.__setattr__(self, "path_mtu", mtu_of(self.path_mtu))

    def within(self, limits: DeviceAttr) -> Options:
        """Return these options with the depths cut to what a device allows."""
        most = {
            "send_depth": min(limits.max_qp_wr, limits.max_cqe // 2),
            "recv_depth": min(limits.max_qp_wr, limits.max_cqe // 2),
            "max_rd_atomic": limits.max_qp_init_rd_atom,
            "max_dest_rd_atomic": limits.max_qp_rd_atom,
        }
        cut = {name: limit for name, limit in most.items() if getattr(self, name) > limit}
        return replace(self, **cut) if cut else self
