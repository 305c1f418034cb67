"""What a device can do beyond its classic limits, as values, read from ``struct ibv_device_attr_ex``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ..enums import (
    DeviceCapFlags,
    ODPGeneralCaps,
    ODPTransportCaps,
    PCIAtomicOpSize,
    QPType,
    RawPacketCaps,
    RXHashFields,
    RXHashFunction,
    TMCapFlags,
)
from ..ffi import CData, lib
from .device_attr import DeviceAttr, read_struct

__all__ = [
    "CQModerationCaps",
    "DeviceAttrEx",
    "ODPCaps",
    "PCIAtomicCaps",
    "PacketPacingCaps",
    "RSSCaps",
    "TMCaps",
    "TSOCaps",
    "read_device_attr_ex",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ODPCaps:
    """On-demand paging (``struct ibv_odp_caps``): registering memory without pinning it."""

    general_caps: ODPGeneralCaps
    rc_odp_caps: ODPTransportCaps
    uc_odp_caps: ODPTransportCaps
    ud_odp_caps: ODPTransportCaps
    xrc_odp_caps: ODPTransportCaps


@dataclass(frozen=True, slots=True)
class TSOCaps:
    """TCP segmentation by the device (``struct ibv_tso_caps``); ``max_tso`` is in bytes, 0 where it cannot."""

    max_tso: int
    supported_qpts: frozenset[QPType]


@dataclass(frozen=True, slots=True)
class RSSCaps:
    """Spreading of incoming packets over work queues (``struct ibv_rss_caps``)."""

    supported_qpts: frozenset[QPType]
    max_rwq_indirection_tables: int
    max_rwq_indirection_table_size: int
    rx_hash_fields_mask: RXHashFields
    rx_hash_function: RXHashFunction


@dataclass(frozen=True, slots=True)
class PacketPacingCaps:
    """Rate limits of a QP (``struct ibv_packet_pacing_caps``), in kbit/s; both 0 where the device cannot."""

    qp_rate_limit_min: int
    qp_rate_limit_max: int
    supported_qpts: frozenset[QPType]


@dataclass(frozen=True, slots=True)
class TMCaps:
    """Tag matching (``struct ibv_tm_caps``); all 0 where the device cannot."""

    max_rndv_hdr_size: int
    max_num_tags: int
    flags: TMCapFlags
    max_ops: int
    max_sge: int


@dataclass(frozen=True, slots=True)
class CQModerationCaps:
    """How far ``ibv_modify_cq`` can hold events back (``struct ibv_cq_moderation_caps``): completions, and µs."""

    max_cq_count: int
    max_cq_period: int


@dataclass(frozen=True, slots=True)
class PCIAtomicCaps:
    """Which atomics the device can do over PCI (``struct ibv_pci_atomic_caps``)."""

    fetch_add: PCIAtomicOpSize
    swap: PCIAtomicOpSize
    compare_swap: PCIAtomicOpSize


@dataclass(frozen=True, slots=True)
class DeviceAttrEx:
    """The extended attributes of a device (``struct ibv_device_attr_ex``); members keep their C names.

    What a device lacks is 0 or empty.

    Attributes:
        orig_attr: the classic limits.
        completion_timestamp_mask: which bits of a completion's raw timestamp count.
        hca_core_clock: ticks of the device's clock, in kHz.
        device_cap_flags_ex: all capabilities, those of ``orig_attr.device_cap_flags`` among them.
        max_wq_type_rq: how many work queues for receiving there can be.
        max_dm_size: bytes of memory on the device.
        phys_port_cnt_ex: how many ports, also where they are more than 255.
    """

    orig_attr: DeviceAttr
    odp_caps: ODPCaps
    completion_timestamp_mask: int
    hca_core_clock: int
    device_cap_flags_ex: DeviceCapFlags
    tso_caps: TSOCaps
    rss_caps: RSSCaps
    max_wq_type_rq: int
    packet_pacing_caps: PacketPacingCaps
    raw_packet_caps: RawPacketCaps
    tm_caps: TMCaps
    cq_mod_caps: CQModerationCaps
    max_dm_size: int
    pci_atomic_caps: PCIAtomicCaps
    phys_port_cnt_ex: int


def _qp_types(bits: int) -> frozenset[QPType]:
    """Read a mask in which bit n stands for the QP type numbered n."""
    return frozenset(kind for kind in QPType if bits >> kind & 1)


#: Member -> how to read it; all others are plain integers.
_CONVERT: dict[str, Callable[[Any], object]] = {
    "orig_attr": lambda raw: read_struct(DeviceAttr, raw),
    "device_cap_flags_ex": DeviceCapFlags,
    "tso_caps": lambda raw: _read(TSOCaps, raw),
    "rss_caps": lambda raw: _read(RSSCaps, raw),
    "packet_pacing_caps": lambda raw: _read(PacketPacingCaps, raw),
    "raw_packet_caps": RawPacketCaps,
    "tm_caps": lambda raw: _read(TMCaps, raw),
    "cq_mod_caps": lambda raw: _read(CQModerationCaps, raw),
    "pci_atomic_caps": lambda raw: _read(PCIAtomicCaps, raw),
    "supported_qpts": _qp_types,
    "rx_hash_fields_mask": RXHashFields,
    "rx_hash_function": RXHashFunction,
    "flags": TMCapFlags,
    "fetch_add": PCIAtomicOpSize,
    "swap": PCIAtomicOpSize,
    "compare_swap": PCIAtomicOpSize,
}


def _read(cls: type[_T], struct: CData, **known: object) -> _T:
    """Fill a dataclass from the struct members of the same names, but for those that are known already."""
    names = [field.name for field in fields(cls) if field.name not in known]  # type: ignore[arg-type]
    return cls(**known, **{name: _CONVERT.get(name, int)(getattr(struct, name)) for name in names})


def read_device_attr_ex(raw: CData) -> DeviceAttrEx:
    """Read a ``struct ibv_device_attr_ex``."""
    per_transport = raw.odp_caps.per_transport_caps
    odp = ODPCaps(
        ODPGeneralCaps(raw.odp_caps.general_caps),
        ODPTransportCaps(per_transport.rc_odp_caps),
        ODPTransportCaps(per_transport.uc_odp_caps),
        ODPTransportCaps(per_transport.ud_odp_caps),
        ODPTransportCaps(raw.xrc_odp_caps),
    )
    # An old library lacks the member, and some drivers leave it at 0.
    ports = (raw.phys_port_cnt_ex if lib.PVL_HAS_PHYS_PORT_CNT_EX > 0 else 0) or raw.orig_attr.phys_port_cnt
    return _read(DeviceAttrEx, raw, odp_caps=odp, phys_port_cnt_ex=ports)
