"""Devices, their ports and GID tables, and the context that everything else is made from."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ._args import check_int
from ._check import check_neg, check_ptr, check_rc, os_error
from ._resource import Resource
from .enums import MTU, AtomicCap, GIDType, LinkLayer, NodeType, PortState, TransportType
from .errors import DeviceNotFoundError
from .ffi import CData, ffi, lib
from .gid import GidEntry, parse_gid

if TYPE_CHECKING:
    from .cq import CQ, CompChannel
    from .pd import PD

__all__ = ["Context", "DeviceAttr", "DeviceInfo", "PortAttr", "devices", "open_device"]

_T = TypeVar("_T")


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
    "node_guid": lambda raw: _host_order(raw),
    "sys_image_guid": lambda raw: _host_order(raw),
    "atomic_cap": AtomicCap,
    "state": PortState,
    "max_mtu": MTU,
    "active_mtu": MTU,
    "link_layer": LinkLayer,
}


def _host_order(guid: int) -> int:
    """Turn a big-endian 64-bit member into an integer of this host."""
    return int.from_bytes(guid.to_bytes(8, sys.byteorder), "big")


def _read_struct(cls: type[_T], struct: CData) -> _T:
    """Fill a dataclass from the struct members of the same names."""
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: _CONVERT.get(name, int)(getattr(struct, name)) for name in names})


@contextmanager
def _device_list() -> Iterator[list[CData]]:
    """Hold the device list: its pointers are dangling as soon as it is freed."""
    count = ffi.new("int *")
    array = lib.ibv_get_device_list(count)
    if not array:
        # No InfiniBand support in this kernel is the plain case of "no device".
        if ffi.errno in (errno.ENOSYS, errno.ENOENT):
            yield []
            return
        raise os_error("ibv_get_device_list", ffi.errno)
    try:
        yield [array[i] for i in range(count[0])]
    finally:
        lib.ibv_free_device_list(array)


def _name_of(device: CData) -> str:
    return ffi.string(lib.ibv_get_device_name(device)).decode()


def devices() -> list[DeviceInfo]:
    """List the RDMA devices of this machine; empty where there is none.

    Verb: ibv_get_device_list
    """
    with _device_list() as found:
        return [
            DeviceInfo(
                _name_of(device),
                NodeType(device.node_type),
                TransportType(device.transport_type),
                _host_order(lib.ibv_get_device_guid(device)),
            )
            for device in found
        ]


def open_device(name: str | None = None) -> Context:
    """Open a device by name; without a name, the first that has an ACTIVE port, and iWARP only if nothing else has.

    Raises:
        DeviceNotFoundError: no such device, no device at all, or none with an ACTIVE port.
        VerbsOSError: the device could not be opened.

    Verb: ibv_open_device
    """
    if name is not None:
        return Context(name)
    seen = []
    for info in sorted(devices(), key=lambda info: info.transport_type == TransportType.IWARP):
        context = Context(info.name)
        try:
            if context.active_port() is not None:
                return context
        except BaseException:
            context.close()
            raise
        seen.append(context.describe_ports())
        context.close()
    if seen:
        raise DeviceNotFoundError(
            f"no RDMA device has an ACTIVE port: {'; '.join(seen)}. Bring its link up (ip link set … up)"
        )
    raise DeviceNotFoundError(
        "this machine has no RDMA device: load its driver, or make a soft-RoCE one"
        " (modprobe rdma_rxe; rdma link add rxe0 type rxe netdev …)"
    )


class Context(Resource):
    """An open device: the root of every other object.

    Closing it closes all that was made from it, youngest first.

    Raises:
        DeviceNotFoundError: no device has that name; the text lists those that exist.
        VerbsOSError: the device could not be opened.

    Verb: ibv_open_device
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a device is opened by its name, not by {name!r}")
        with _device_list() as found:
            names = [_name_of(device) for device in found]
            if name not in names:
                listed = ", ".join(names) if names else "this machine has none"
                raise DeviceNotFoundError(f"no RDMA device is named {name!r}; the devices are: {listed}")
            device = check_ptr("ibv_open_device", lib.ibv_open_device(found[names.index(name)]))
        self.name = name
        self.transport_type = TransportType(device.device.transport_type)
        self._own(device, _close_device, label=f"Context of {name}")
        self._device_attr: DeviceAttr | None = None

    def __repr__(self) -> str:
        return f"<Context of {self.name}{' (closed)' if self.closed else ''}>"

    def query_device(self) -> DeviceAttr:
        """Return the limits of the device; they do not change, so they are read once.

        Verb: ibv_query_device
        """
        if self._device_attr is None:
            raw = ffi.new("struct ibv_device_attr *")
            check_rc("ibv_query_device", lib.ibv_query_device(self._handle, raw))
            self._device_attr = _read_struct(DeviceAttr, raw)
        return self._device_attr

    def check_port(self, port_num: int) -> int:
        """Return a port number that the device has; ports count from 1.

        Raises:
            TypeError, ValueError: it is no such number.
        """
        return check_int(f"port_num of {self.name}", port_num, 1, self.query_device().phys_port_cnt)

    def query_port(self, port_num: int) -> PortAttr:
        """Return the state of a port, as it is now.

        Raises:
            ValueError: the device has no such port.

        Verb: ibv_query_port
        """
        self.check_port(port_num)
        raw = ffi.new("struct ibv_port_attr *")
        check_rc("ibv_query_port", lib.ibv_query_port(self._handle, port_num, raw))
        return _read_struct(PortAttr, raw)

    def active_port(self) -> int | None:
        """Return the number of the first ACTIVE port, or None."""
        ports = range(1, self.query_device().phys_port_cnt + 1)
        return next((n for n in ports if self.query_port(n).state == PortState.ACTIVE), None)

    def describe_ports(self) -> str:
        """Say in one line in which state each port is."""
        ports = range(1, self.query_device().phys_port_cnt + 1)
        return ", ".join(f"{self.name} port {n} is {self.query_port(n).state.name}" for n in ports)

    def gid_table(self, port_num: int) -> list[GidEntry]:
        """Return the GID table rows of a port that are in use, by index.

        Verb: ibv_query_gid_table
        """
        length = self.query_port(port_num).gid_tbl_len
        if lib.PVL_HAS_GID_TABLE < 0:
            return _gid_table_from_sysfs(Path(self._sysfs, "ports", str(port_num)), length)
        # The verb lists the rows of all ports at once.
        room = sum(self.query_port(n).gid_tbl_len for n in range(1, self.query_device().phys_port_cnt + 1))
        rows = ffi.new("struct ibv_gid_entry[]", max(room, 1))
        found = check_neg("ibv_query_gid_table", lib.ibv_query_gid_table(self._handle, rows, room, 0))
        return [
            GidEntry(
                row.gid_index,
                parse_gid(bytes(row.gid.raw)),
                GIDType(row.gid_type),
                row.ndev_ifindex,
                _netdev_name(row.ndev_ifindex),
            )
            for row in (rows[i] for i in range(found))
            if row.port_num == port_num
        ]

    def query_pkey(self, port_num: int, index: int) -> int:
        """Return a row of a port's P_Key table as a host integer; bit 15 is full membership.

        Raises:
            ValueError: the port has no such row.

        Verb: ibv_query_pkey
        """
        check_int("pkey_index", index, 0, self.query_port(port_num).pkey_tbl_len - 1)
        raw = ffi.new("__be16 *")
        check_neg("ibv_query_pkey", lib.ibv_query_pkey(self._handle, port_num, index, raw))
        return socket.ntohs(raw[0])

    def alloc_pd(self) -> PD:
        """Make a protection domain.

        Verb: ibv_alloc_pd
        """
        return cast("PD", self._make("PD"))

    def create_comp_channel(self) -> CompChannel:
        """Make a completion channel: a descriptor that becomes readable when an armed CQ has completions.

        Verb: ibv_create_comp_channel
        """
        return cast("CompChannel", self._make("CompChannel"))

    def create_cq(self, cqe: int, channel: CompChannel | None = None, *, comp_vector: int = 0) -> CQ:
        """Make a completion queue of at least ``cqe`` entries (``CQ.cqe`` tells how many it has).

        Raises:
            ValueError: ``cqe`` is not 1 to the device's ``max_cqe``.

        Verb: ibv_create_cq
        """
        return cast("CQ", self._make("CQ", cqe, channel, comp_vector=comp_vector))

    @property
    def _sysfs(self) -> str:
        return str(ffi.string(self._handle.device.ibdev_path).decode())


def _close_device(handle: CData) -> None:
    check_neg("ibv_close_device", lib.ibv_close_device(handle))


def _netdev_name(ifindex: int) -> str:
    """Name a network interface; empty where it is gone or in another namespace."""
    try:
        return socket.if_indextoname(ifindex) if ifindex else ""
    except OSError:
        return ""


def _gid_table_from_sysfs(port: Path, length: int) -> list[GidEntry]:
    """Read the table as rdma-core did before it had a verb for it."""
    types = {"IB/RoCE v1": GIDType.ROCE_V1, "RoCE v2": GIDType.ROCE_V2}
    rows = []
    for index in range(length):
        try:
            gid = parse_gid((port / "gids" / str(index)).read_text().strip())
            kind = types.get((port / "gid_attrs" / "types" / str(index)).read_text().strip(), GIDType.IB)
            netdev = (port / "gid_attrs" / "ndevs" / str(index)).read_text().strip()
        except OSError:
            continue  # the kernel refuses to read the attributes of an empty row
        rows.append(GidEntry(index, gid, kind, socket.if_nametoindex(netdev), netdev))
    return rows
