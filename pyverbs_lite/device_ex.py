"""What a device can do beyond its classic limits: extended attributes, its clock, its P_Key table, port speeds."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from ._args import check_int
from ._check import check_neg, check_rc, os_error, require
from ._device_attr import DeviceAttr, PortAttr, read_struct
from ._resource import Resource
from .enums import (
    DeviceCapFlags,
    ODPGeneralCaps,
    ODPTransportCaps,
    PCIAtomicOpSize,
    QPType,
    RawPacketCaps,
    RXHashFields,
    RXHashFunction,
    TMCapFlags,
    ValuesMask,
)
from .ffi import CData, ffi, lib

__all__ = [
    "CQModerationCaps",
    "DeviceAttrEx",
    "DeviceQueries",
    "ODPCaps",
    "PCIAtomicCaps",
    "PacketPacingCaps",
    "PortSpeed",
    "RSSCaps",
    "TMCaps",
    "TSOCaps",
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


#: Width code -> lanes, and speed code -> Gb/s of a lane, as the specification and the kernel code them.
_LANES = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
_LANE_SPEEDS = {
    1: ("SDR", 2.5),
    2: ("DDR", 5.0),
    4: ("QDR", 10.0),
    8: ("FDR10", 10.0),
    16: ("FDR", 14.0),
    32: ("EDR", 25.0),
    64: ("HDR", 50.0),
    128: ("NDR", 100.0),
    256: ("XDR", 200.0),
}


@dataclass(frozen=True, slots=True)
class PortSpeed:
    """How fast a port's link is now; ``str()`` of it is for people: ``"100 Gb/s (4X EDR)"``.

    Attributes:
        width: for example ``"4X"``; empty for a code that has no name here.
        speed: the name of a lane's speed, for example ``"EDR"``; empty likewise.
        gbps: lanes times the speed of a lane, in Gb/s, before any overhead; None where a code is not known.
    """

    width: str
    speed: str
    gbps: float | None

    @classmethod
    def of(cls, active_width: int, active_speed: int) -> PortSpeed:
        """Read the codes of ``struct ibv_port_attr``."""
        lanes = _LANES.get(active_width)
        name, lane = _LANE_SPEEDS.get(active_speed, ("", None))
        known = lanes is not None and lane is not None
        return cls(f"{lanes}X" if lanes else "", name, lanes * lane if known else None)  # type: ignore[operator]

    def __str__(self) -> str:
        if self.gbps is None:
            return "unknown"
        return f"{self.gbps:g} Gb/s ({self.width} {self.speed})"


class DeviceQueries(Resource):
    """The part of a ``Context`` that asks the device about itself."""

    if TYPE_CHECKING:  # from Context

        def check_port(self, port_num: int) -> int: ...  # noqa: D102
        def query_port(self, port_num: int) -> PortAttr: ...  # noqa: D102
        def query_pkey(self, port_num: int, index: int) -> int: ...  # noqa: D102

    def query_device_ex(self) -> DeviceAttrEx:
        """Return the extended attributes; from a driver that has none, the classic ones and zeros.

        Verb: ibv_query_device_ex
        """
        raw = ffi.new("struct ibv_device_attr_ex *")
        check_rc("ibv_query_device_ex", lib.ibv_query_device_ex(self._handle, ffi.NULL, raw))
        return read_device_attr_ex(raw)

    def query_raw_clock(self) -> int:
        """Return the device's clock as it is now, in its own ticks (see ``DeviceAttrEx.hca_core_clock``).

        Raises:
            UnsupportedError: the device has no clock that can be read.

        Verb: ibv_query_rt_values_ex
        """
        raw = ffi.new("struct ibv_values_ex *")
        raw.comp_mask = ValuesMask.RAW_CLOCK
        check_rc("ibv_query_rt_values_ex", lib.ibv_query_rt_values_ex(self._handle, raw))
        if not raw.comp_mask & ValuesMask.RAW_CLOCK:
            raise os_error("ibv_query_rt_values_ex", errno.EOPNOTSUPP, "the driver did not fill in the raw clock")
        # Drivers put the ticks into a timespec: what is above the nanoseconds' member counts seconds of 10^9 ticks.
        return int(raw.raw_clock.tv_sec) * 10**9 + int(raw.raw_clock.tv_nsec)

    def port_speed(self, port_num: int) -> PortSpeed:
        """Return how fast a port's link is now, from its width and its lanes' speed.

        Raises:
            ValueError: the device has no such port.

        Verb: ibv_query_port
        """
        self.check_port(port_num)
        raw = ffi.new("struct ibv_port_attr *")
        check_rc("ibv_query_port", lib.ibv_query_port(self._handle, port_num, raw))
        # Since XDR a speed does not fit into the old member.
        extended = raw.active_speed_ex if lib.PVL_HAS_ACTIVE_SPEED_EX > 0 else 0
        return PortSpeed.of(raw.active_width, extended or raw.active_speed)

    def query_port_speed(self, port_num: int) -> float:
        """Return the bandwidth in Gb/s that the device itself names as effective, of bonded ports the sum.

        Raises:
            ValueError: the device has no such port.
            UnsupportedError: the device does not say, or this libibverbs is older than 62.

        Verb: ibv_query_port_speed
        """
        self.check_port(port_num)
        require("PORT_SPEED", "ibv_query_port_speed")
        raw = ffi.new("uint64_t *")
        check_rc("ibv_query_port_speed", lib.ibv_query_port_speed(self._handle, port_num, raw))
        return int(raw[0]) / 10

    def pkey_table(self, port_num: int) -> list[int]:
        """Return a port's P_Keys in the order of their index, as host integers; an unused row is 0.

        Verb: ibv_query_pkey
        """
        return [self.query_pkey(port_num, index) for index in range(self.query_port(port_num).pkey_tbl_len)]

    def get_pkey_index(self, port_num: int, pkey: int) -> int:
        """Return the row of a port's P_Key table that holds a P_Key; bit 15, full membership, counts.

        Raises:
            ValueError: no row holds it; the text shows the table.

        Verb: ibv_get_pkey_index
        """
        check_int("pkey", pkey, 0, 0xFFFF)
        self.check_port(port_num)
        index = int(lib.ibv_get_pkey_index(self._handle, port_num, socket.htons(pkey)))
        if index < 0:
            table = ", ".join(f"{value:#06x}" for value in self.pkey_table(port_num)) or "empty"
            raise ValueError(f"P_Key {pkey:#06x} is not in the table of port {port_num}, which is: {table}")
        return index

    @property
    def device_index(self) -> int:
        """The kernel's number of the device, which stays the same while the device is there.

        Raises:
            UnsupportedError: the kernel does not tell, or this libibverbs is older than 30.

        Verb: ibv_get_device_index
        """
        require("DEVICE_INDEX", "ibv_get_device_index")
        index = lib.ibv_get_device_index(self._handle.device)
        return check_neg("ibv_get_device_index", index if index >= 0 else -errno.EOPNOTSUPP)
