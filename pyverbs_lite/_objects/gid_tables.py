"""The GID tables of a device, and what is chosen from them again and again."""

from __future__ import annotations

import os
import socket
from ipaddress import IPv6Address
from typing import TYPE_CHECKING

from .. import gid
from .._base.check import check_neg
from .._base.resource import Resource
from ..enums import GIDType, LinkLayer
from ..ffi import CData, ffi, lib
from ..gid import GidEntry, parse_gid
from .device_attr import DeviceAttr, PortAttr, known

__all__ = ["GidTables", "table_from_sysfs"]

#: So many choices are remembered for one state of the table.
_MOST_CHOICES = 64
_FEW_ROWS = 8


class GidTables(Resource):
    """The part of a ``Context`` that reads GID tables."""

    if TYPE_CHECKING:  # from Context
        name: str

        def query_device(self) -> DeviceAttr: ...
        def _port(self, port_num: int) -> PortAttr: ...

    def _forget_gids(self) -> None:
        """Know no rows yet."""
        #: For how many rows there is room at first.
        self._rows = _FEW_ROWS
        #: What the verb has said last, and which row of that was chosen for whom.
        self._chosen: tuple[bytes, dict[object, GidEntry]] = b"", {}

    def gid_table(self, port_num: int) -> list[GidEntry]:
        """Return the GID table rows of a port that are in use, by index.

        Verb: ibv_query_gid_table
        """
        port = self._port(port_num)
        if lib.PVL_HAS_GID_TABLE < 0:
            return table_from_sysfs(f"{self._sysfs}/ports/{port_num}", port)
        return _read(*self._query_gids(), port_num)

    def _choose_gid(
        self,
        port_num: int,
        local_address: str,
        remote_gid: IPv6Address | None,
        gid_index: int | None,
        gid_ip: str | None,
        gid_netdev: str | None,
    ) -> GidEntry:
        """Return the row to send from, by ``gid.choose``; the same again as long as the table is what it was."""
        key, said = None, b""
        if lib.PVL_HAS_GID_TABLE < 0 or gid_netdev is not None:  # an interface may get another name, and keep its rows
            rows = self.gid_table(port_num)
        else:
            raw, found = self._query_gids()
            said = bytes(ffi.buffer(raw, found * ffi.sizeof(raw[0])))
            key = port_num, local_address, remote_gid and remote_gid.packed, gid_index, gid_ip
            before, chosen = self._chosen
            if before == said and (row := chosen.get(key)) is not None:
                return row
            rows = _read(raw, found, port_num)
        port = self._port(port_num)
        row = gid.choose(
            rows,
            link_layer=port.link_layer,
            device=self.name,
            port_num=port_num,
            gid_tbl_len=port.gid_tbl_len,
            local_address=local_address,
            remote_gid=remote_gid,
            gid_index=gid_index,
            gid_ip=gid_ip,
            gid_netdev=gid_netdev,
        )
        if key is not None:
            before, chosen = self._chosen
            if before != said or len(chosen) >= _MOST_CHOICES:
                self._chosen = said, chosen = said, {}
            chosen[key] = row
        return row

    def _query_gids(self) -> tuple[CData, int]:
        """Ask for the rows of all ports: the verb lists them at once."""
        # A table has many rows more than are in use: first with room for some more than there were.
        rows, room = ffi.new("struct ibv_gid_entry[]", self._rows), self._rows
        found = lib.ibv_query_gid_table(self._handle, rows, room, 0)
        if found < 0:
            room = sum([self._port(n).gid_tbl_len for n in range(1, self.query_device().phys_port_cnt + 1)])
            rows = ffi.new("struct ibv_gid_entry[]", max(room, 1))
            found = check_neg("ibv_query_gid_table", lib.ibv_query_gid_table(self._handle, rows, room, 0))
            self._rows = found + _FEW_ROWS
        return rows, found

    @property
    def _sysfs(self) -> str:
        return str(ffi.string(self._handle.device.ibdev_path).decode())


def _read(rows: CData, found: int, port_num: int) -> list[GidEntry]:
    own = [row for row in (rows[i] for i in range(found)) if row.port_num == port_num]
    netdevs = {index: _netdev_name(index) for index in {row.ndev_ifindex for row in own}}
    return [
        GidEntry(
            row.gid_index,
            IPv6Address(bytes(row.gid.raw)),
            known(GIDType, row.gid_type),
            row.ndev_ifindex,
            netdevs[row.ndev_ifindex],
        )
        for row in own
    ]


def _netdev_name(ifindex: int) -> str:
    """Name a network interface; empty where it is gone or in another namespace."""
    try:
        return socket.if_indextoname(ifindex) if ifindex else ""
    except OSError:
        return ""


def _netdev_index(name: str) -> int:
    """Find the number of a network interface; 0 where it is gone or in another namespace."""
    try:
        return socket.if_nametoindex(name) if name else 0
    except OSError:
        return 0


def table_from_sysfs(folder: str | os.PathLike[str], port: PortAttr) -> list[GidEntry]:
    """Read the table as rdma-core did before it had a verb for it."""
    # One name for two things, which the link layer tells apart.
    first = GIDType.ROCE_V1 if port.link_layer == LinkLayer.ETHERNET else GIDType.IB
    rows = []
    for index in range(port.gid_tbl_len):
        gid = parse_gid(_line(f"{folder}/gids/{index}") or "::")
        if int(gid) == 0:
            continue
        kind = GIDType.ROCE_V2 if _line(f"{folder}/gid_attrs/types/{index}") == "RoCE v2" else first
        netdev = _line(f"{folder}/gid_attrs/ndevs/{index}")
        rows.append(GidEntry(index, gid, kind, _netdev_index(netdev), netdev))
    return rows


def _line(path: str) -> str:
    """Read a line of sysfs; empty where the kernel refuses, as for the attributes of empty rows and of InfiniBand."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
