"""What devices and ports say about themselves, as values, read from their C structs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

from ..enums import MTU, AtomicCap, LinkLayer, NodeType, PortState, TransportType
from ..ffi import CData, ffi, lib

__all__ = ["DeviceAttr", "DeviceInfo", "PortAttr", "host_order", "known", "read_struct"]

_T = TypeVar("_T")
_E = TypeVar("_E", bound=IntEnum)


def known(kind: type[_E], value: int) -> _E:
    """Return the member of an enum, or the bare number where the driver gives one that has no name here.

    A newer driver must not make a device unusable, or a completion unreadable.
    """
    try:
        return kind(value)
    except ValueError:
        return value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device as the device list shows it, without opening it.

    Attributes:
        name: for example ``"mlx5_0"`` or ``"rxe0"``.
        guid: the node GUID as an integer (the verb gives it big-endian).
    """

    name: str
    node_type: NodeType
    transport_type: TransportType
    guid: int


@dataclass(frozen=True, slots=True)
class DeviceAttr:
    """The limits of a device (``struct ibv_device_attr``); members keep their C names.

    Sizes are in bytes, depths in entries; the GUIDs are integers in host order.
    """

    fw_ver: str
    node_guid: int
    sys_image_guid: int
    max_mr_size: int
    page_size_cap: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_qp: int
    max_qp_wr: int
    device_cap_flags: int
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_res_rd_atom: int
    max_qp_init_rd_atom: int
    atomic_cap: AtomicCap
    max_mw: int
    max_mcast_grp: int
    max_mcast_qp_attach: int
    max_ah: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_pkeys: int
    local_ca_ack_delay: int
    phys_port_cnt: int


@dataclass(frozen=True, slots=True)
class PortAttr:
    """The state of a port (``struct ibv_port_attr``); members keep their C names.

    ``max_msg_sz`` is in bytes; ``lid`` is 0 on Ethernet; the MTUs are codes with a ``bytes`` property.
    """

    state: PortState
    max_mtu: MTU
    active_mtu: MTU
    gid_tbl_len: int
    port_cap_flags: int
    max_msg_sz: int
    bad_pkey_cntr: int
    qkey_viol_cntr: int
    pkey_tbl_len: int
    lid: int
    sm_lid: int
    lmc: int
    max_vl_num: int
    sm_sl: int
    subnet_timeout: int
    init_type_reply: int
    active_width: int
    active_speed: int
    phys_state: int
    link_layer: LinkLayer
    flags: int

    @property
    def grh_required(self) -> bool:
        """Whether every address vector needs a global route: on Ethernet, and where the port says so."""
        return self.link_layer == LinkLayer.ETHERNET or bool(self.flags & lib.IBV_QPF_GRH_REQUIRED)


_CONVERT: dict[str, Callable[[Any], object]] = {
    "fw_ver": lambda raw: ffi.string(raw).decode(),
    "node_guid": lambda raw: host_order(raw),  # defined below
    "sys_image_guid": lambda raw: host_order(raw),
    "atomic_cap": lambda raw: known(AtomicCap, raw),
    "state": lambda raw: known(PortState, raw),
    "max_mtu": lambda raw: known(MTU, raw),
    "active_mtu": lambda raw: known(MTU, raw),
    "link_layer": lambda raw: known(LinkLayer, raw),
}


def host_order(guid: int) -> int:
    """Turn a big-endian 64-bit member into an integer of this host."""
    return int.from_bytes(guid.to_bytes(8, sys.byteorder), "big")


def read_struct(cls: type[_T], struct: CData) -> _T:
    """Fill a dataclass from the struct members of the same names."""
    return cls(*[convert(getattr(struct, name)) for name, convert in _members(cls)])  # type: ignore[arg-type]


@cache
def _members(cls: type) -> list[tuple[str, Callable[[Any], Any]]]:
    """List a dataclass' members, each with what makes its value from the C one."""
    return [(field.name, _CONVERT.get(field.name, int)) for field in fields(cls)]
