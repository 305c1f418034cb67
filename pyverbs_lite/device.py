"""Devices, their ports and GID tables, and the context that everything else is made from."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from ._base.args import check_int
from ._base.check import check_neg, check_ptr, check_rc, os_error
from ._objects.device_attr import DeviceAttr, DeviceInfo, PortAttr, host_order, known, read_struct
from ._objects.factories import ContextFactories
from ._objects.gid_tables import GidTables
from ._objects.queue_factories import QueueFactories
from ._objects.spares import SpareKeeper
from .device_ex import DeviceQueries
from .enums import NodeType, PortState, TransportType
from .errors import DeviceNotFoundError, VerbsOSError
from .events import EventSource
from .ffi import CData, ffi, lib

if TYPE_CHECKING:
    from .cq import CQ, CompChannel
    from .pd import PD
    from .xrcd import XRCD

__all__ = ["Context", "DeviceAttr", "DeviceInfo", "PortAttr", "devices", "open_device"]


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
                known(NodeType, device.node_type),
                known(TransportType, device.transport_type),
                host_order(lib.ibv_get_device_guid(device)),
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
    seen: list[str] = []
    refusal: VerbsOSError | None = None
    for info in sorted(devices(), key=lambda info: info.transport_type == TransportType.IWARP):
        try:
            context = Context(info.name)
        except DeviceNotFoundError:
            continue  # it went away meanwhile
        except VerbsOSError as error:  # one that may not be opened must not hide the others
            refusal = refusal or error
            seen.append(f"{info.name} cannot be opened ({error})")
            continue
        try:
            if context.active_port() is not None:
                return context
            seen.append(context.describe_ports())
        except BaseException:
            context.close()
            raise
        context.close()
    if refusal is not None and len(seen) == 1:
        raise refusal
    if seen:
        raise DeviceNotFoundError(
            f"no RDMA device has an ACTIVE port: {'; '.join(seen)}. Bring its link up (ip link set … up)"
        ) from refusal
    raise DeviceNotFoundError(
        "this machine has no RDMA device: load its driver, or make a soft-RoCE one"
        " (modprobe rdma_rxe; rdma link add rxe0 type rxe netdev …)"
    )


class Context(EventSource, DeviceQueries, GidTables, ContextFactories, QueueFactories, SpareKeeper):
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
        self.transport_type = known(TransportType, device.device.transport_type)
        self._own(device, close_device, label=f"Context of {name}")
        self._begin()

    def _begin(self) -> None:
        """Know nothing of the device yet."""
        self._device_attr: DeviceAttr | None = None
        #: Number of a port -> what the verb has said last, and what that means.
        self._ports: dict[int, tuple[bytes, PortAttr]] = {}
        self._forget_gids()
        self._keep_spares()

    def __repr__(self) -> str:
        return f"<Context of {self.name}{' (closed)' if self.closed else ''}>"

    def query_device(self) -> DeviceAttr:
        """Return the limits of the device; they do not change, so they are read once.

        Verb: ibv_query_device
        """
        handle = self._handle
        if self._device_attr is None:
            raw = ffi.new("struct ibv_device_attr *")
            check_rc("ibv_query_device", lib.ibv_query_device(handle, raw))
            self._device_attr = read_struct(DeviceAttr, raw)
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
        if type(port_num) is not int or port_num not in self._ports:
            self.check_port(port_num)
        raw = ffi.new("struct ibv_port_attr *")
        if rc := lib.ibv_query_port(self._handle, port_num, raw):
            check_rc("ibv_query_port", rc)
        said, known_ = bytes(ffi.buffer(raw)), self._ports.get(port_num)
        if known_ is None or known_[0] != said:  # to read it takes as long as to ask
            known_ = self._ports[port_num] = said, read_struct(PortAttr, raw)
        return known_[1]

    def _port(self, port_num: int) -> PortAttr:
        """Return a port as it was when last asked: good for what does not change, its kind and its tables' sizes."""
        known_ = self._ports.get(port_num)
        return self.query_port(port_num) if known_ is None else known_[1]

    def active_port(self) -> int | None:
        """Return the number of the first ACTIVE port, or None."""
        ports = range(1, self.query_device().phys_port_cnt + 1)
        return next((n for n in ports if self.query_port(n).state == PortState.ACTIVE), None)

    def describe_ports(self) -> str:
        """Say in one line in which state each port is."""
        ports = range(1, self.query_device().phys_port_cnt + 1)
        return ", ".join(f"{self.name} port {n} is {self.query_port(n).state.name}" for n in ports)

    def query_pkey(self, port_num: int, index: int) -> int:
        """Return a row of a port's P_Key table as a host integer; bit 15 is full membership.

        Raises:
            ValueError: the port has no such row.

        Verb: ibv_query_pkey
        """
        check_int("pkey_index", index, 0, self._port(port_num).pkey_tbl_len - 1)
        raw = ffi.new("__be16 *")
        check_neg("ibv_query_pkey", lib.ibv_query_pkey(self._handle, port_num, index, raw))
        return socket.ntohs(raw[0])

    def alloc_pd(self) -> PD:
        """Make a protection domain.

        Verb: ibv_alloc_pd
        """
        return cast("PD", self._make("PD"))

    def open_xrcd(self, fd: int | None = None, oflags: int = os.O_CREAT) -> XRCD:
        """Open an XRC domain, which processes may share by a file; without one it is this process's own.

        Raises:
            UnsupportedError: the device has no XRC.

        Verb: ibv_open_xrcd
        """
        return cast("XRCD", self._make("XRCD", fd, oflags))

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


def close_device(handle: CData) -> None:
    """Close a context."""
    check_neg("ibv_close_device", lib.ibv_close_device(handle))
