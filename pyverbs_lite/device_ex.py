"""A device asked about itself: extended attributes, its clock, its P_Key table, port speeds."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._base.args import check_int
from ._base.check import check_neg, check_rc, os_error, require
from ._base.resource import Resource
from ._objects.device_attr import PortAttr
from .enums import ValuesMask
from .ffi import ffi, lib

if TYPE_CHECKING:
    from ._objects.device_attr_ex import DeviceAttrEx

__all__ = ["DeviceQueries", "PortSpeed"]

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
        from ._objects.device_attr_ex import read_device_attr_ex  # few ask, and many kinds of value take long to import

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
