"""Which row of a port's GID table a QP should use: a pure ranking, no verb is called.

On RoCE every IP address of the network interface is a GID, once per RoCE version, and ``sgid_index`` names the row to
send from. Taking index 0 is the classic mistake: it is often link-local, RoCE v1, or empty.

Without an explicit choice the rows are ordered by, first to last:

1. the peer's GID, where it is known: IPv4-mapped rows for an IPv4-mapped GID, IPv6 rows of the same scope for an IPv6
   one, for no route leads from one family to the other;
2. the TCP connection to the peer: the row with the socket's own address, then rows of the same network interface;
3. RoCE v2 before v1: v2 is UDP, so it can be routed;
4. IPv4-mapped before global IPv6 before link-local, and loopback last;
5. the lower index.

On InfiniBand the lowest usable index is taken: the default GID. Rows that are all zero or multicast cannot be a
source and are never chosen, nor are rows above 255: ``sgid_index`` has 8 bits, and a larger index would wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, ip_address

from .enums import GIDType, LinkLayer
from .errors import GIDError

__all__ = ["GidEntry", "Scope", "choose", "format_table", "parse_gid"]

#: ``sgid_index`` is a uint8 in ``struct ibv_global_route``.
_NAMEABLE = 256
_Key = Callable[["GidEntry"], tuple[int, ...]]
_Test = Callable[["GidEntry"], bool]
_BROADCAST = IPv4Address("255.255.255.255")
_TYPE_TEXT = {GIDType.IB: "IB", GIDType.ROCE_V1: "RoCE v1", GIDType.ROCE_V2: "RoCE v2"}
_TYPE_RANK = {GIDType.ROCE_V2: 0, GIDType.ROCE_V1: 1, GIDType.IB: 2}  # IB on Ethernet: what iWARP reports


class Scope(IntEnum):
    """How far a GID reaches; the lower, the better."""

    IPV4 = 0
    GLOBAL = 1
    LINK_LOCAL = 2
    LOOPBACK = 3


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One row of a port's GID table.

    Attributes:
        gid_index: its place in the table.
        gid: its 16 bytes, as an IPv6 address without a scope.
        gid_type: the protocol that it stands for.
        ndev_ifindex, netdev: the network interface it comes from; 0 and ``""`` where that is not known.

    """

    gid_index: int
    gid: IPv6Address
    gid_type: GIDType
    ndev_ifindex: int = 0
    netdev: str = ""

    @property
    def empty(self) -> bool:
        """Whether the row is all zero: nothing is there."""
        return int(self.gid) == 0

    @property
    def ipv4(self) -> IPv4Address | None:
        """The IPv4 address that the GID maps, or None."""
        return self.gid.ipv4_mapped

    @property
    def link_local(self) -> bool:
        """Whether the address is valid on one link only (fe80::/10, or 169.254.0.0/16 mapped)."""
        return (self.ipv4 or self.gid).is_link_local

    @property
    def usable(self) -> bool:
        """Whether the address can be a source: neither zero, nor multicast, nor broadcast."""
        address = self.ipv4 or self.gid  # Python before 3.13 does not look through the mapping
        return not (address.is_unspecified or address.is_multicast or address == _BROADCAST)

    @property
    def scope(self) -> Scope:
        """How far the address reaches."""
        if (self.ipv4 or self.gid).is_loopback:
            return Scope.LOOPBACK
        if self.link_local:
            return Scope.LINK_LOCAL
        return Scope.GLOBAL if self.ipv4 is None else Scope.IPV4

    @property
    def interface_names(self) -> set[str]:
        """Its interface's name, and number as text, where they are known."""
        return {self.netdev, str(self.ndev_ifindex)} - {"", "0"}

    def __str__(self) -> str:
        return str(self.gid) if self.ipv4 is None else f"::ffff:{self.ipv4}"


def parse_gid(gid: str | bytes | bytearray | memoryview | IPv4Address | IPv6Address) -> IPv6Address:
    """Read a GID: 16 bytes as in ``ibv_gid.raw``, or text as in sysfs; IPv4 text gives the mapped GID.

    Raises TypeError or ValueError for what is not a GID.
    """
    if isinstance(gid, (bytes, bytearray, memoryview)):
        return IPv6Address(bytes(gid))  # says itself that there must be 16
    address, scope = _parse_ip(gid, "GID")
    if scope is not None:
        raise ValueError(f"a GID has no scope: leave out %{scope}")
    return address


def _parse_ip(text: object, what: str) -> tuple[IPv6Address, str | None]:
    """Read an IP address as the GID it becomes, and the scope after its ``%``; numbers are not guessed at."""
    if not isinstance(text, (str, IPv4Address, IPv6Address)):
        raise TypeError(f"{what} must be an IP address, as text or from ipaddress, not {type(text).__name__}")
    try:
        address = ip_address(text)
    except ValueError:
        raise ValueError(f"{what} is not an IP address: {text!r}") from None
    if isinstance(address, IPv4Address):
        return IPv6Address(0xFFFF << 32 | int(address)), None
    return IPv6Address(int(address)), address.scope_id


def _has_address(address: IPv6Address, scope: str | None) -> _Test:
    """Make a test for rows with that address, on the interface that the scope names."""

    def test(row: GidEntry) -> bool:
        names = row.interface_names
        return row.gid == address and (scope is None or not names or scope in names)

    return test


def format_table(rows: Iterable[GidEntry]) -> str:
    """Return the rows that are not empty as an aligned table, in the order of their index."""
    lines = [("index", "GID", "type", "netdev")]
    for row in sorted(rows, key=lambda row: row.gid_index):
        if not row.empty:
            netdev = row.netdev or (f"ifindex {row.ndev_ifindex}" if row.ndev_ifindex else "-")
            lines.append((str(row.gid_index), str(row), _TYPE_TEXT[row.gid_type], netdev))
    if len(lines) == 1:
        return "the GID table is empty: every row is zero"
    a, b, c, _ = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(f"{line[0]:>{a}}  {line[1]:<{b}}  {line[2]:<{c}}  {line[3]}" for line in lines)


def choose(
    rows: Iterable[GidEntry],
    *,
    link_layer: int,
    device: str = "",
    port_num: int = 1,
    gid_tbl_len: int | None = None,
    local_address: str | IPv4Address | IPv6Address | None = None,
    remote_gid: str | bytes | IPv6Address | None = None,
    gid_index: int | None = None,
    gid_ip: str | IPv4Address | IPv6Address | None = None,
    gid_netdev: str | None = None,
) -> GidEntry:
    """Return the row to send from.

    ``rows`` is the port's table in any order; empty rows may be left out. ``device`` and ``port_num`` are for the
    texts of errors only. ``local_address`` is the TCP socket's own, ``getsockname()[0]``; it is a hint, so loopback,
    unspecified or what is no IP address tells nothing.

    ``gid_index``, ``gid_ip`` and ``gid_netdev`` choose explicitly: a row must fit all that are given, and the best of
    those that do is taken. ``gid_ip`` may name the interface too: ``fe80::1%eth0``.

    Raises:
        GIDError: no usable row, or none that fits the explicit choice; the text shows the table.
        TypeError: an explicit choice of the wrong type.
        ValueError: ``gid_index`` outside the table or above 255; not an address.

    """
    rows = list(rows)
    where = f"{device or 'device'} port {port_num}"
    limit = _NAMEABLE if gid_tbl_len is None else min(gid_tbl_len, _NAMEABLE)
    ethernet = link_layer == LinkLayer.ETHERNET
    tests: dict[str, _Test] = {}
    if gid_index is not None:
        if isinstance(gid_index, bool) or not isinstance(gid_index, int):
            raise TypeError(f"gid_index must be an int, not {type(gid_index).__name__}")
        if not 0 <= gid_index < limit:
            raise ValueError(
                f"gid_index {gid_index} is out of range on {where}: it must be at least 0 and below {limit}"
                f" (gid_tbl_len {gid_tbl_len}, and 8 bits of sgid_index)\n{format_table(rows)}"
            )
        tests[f"gid_index={gid_index}"] = lambda row: row.gid_index == gid_index
    if gid_ip is not None:
        tests[f"gid_ip={gid_ip}"] = _has_address(*_parse_ip(gid_ip, "gid_ip"))
    if gid_netdev is not None:
        if not isinstance(gid_netdev, str) or not gid_netdev:
            raise TypeError(f"gid_netdev must be the name of a network interface, not {gid_netdev!r}")
        tests[f"gid_netdev={gid_netdev}"] = lambda row: row.netdev == gid_netdev

    fitting = [row for row in rows if all(test(row) for test in tests.values()) and not row.empty]
    valid = [row for row in fitting if row.usable and (ethernet or row.gid_type == GIDType.IB)]
    choices = [row for row in valid if 0 <= row.gid_index < limit]
    if not choices:
        problem = _explain(", ".join(tests), fitting, valid, ethernet)
        raise GIDError(f"no usable GID on {where}: {problem}\n{format_table(rows)}")
    if not ethernet:
        return min(choices, key=lambda row: (row.gid_index, row.gid))
    return min(choices, key=_ranking(rows, local_address, None if remote_gid is None else parse_gid(remote_gid)))


def _explain(asked: str, fitting: list[GidEntry], valid: list[GidEntry], ethernet: bool) -> str:
    """Say why no row is left, and what to do about it."""
    if valid:
        return (
            f"row {', '.join(str(row.gid_index) for row in valid)} would do, but sgid_index cannot name it (8 bits,"
            " below gid_tbl_len); remove addresses from the network interface until a usable row has a lower index"
        )
    if fitting:
        return "what is there is multicast, unspecified or of a type that this link layer does not use"
    if asked:
        return f"nothing fits {asked}, or that row is empty; choose a filled row, or leave the choice out"
    if ethernet:
        return "give the netdev an IP address (ip addr add ADDRESS/PREFIX dev NETDEV; ip link set NETDEV up)"
    return "the port has no GID yet: is its link up, and does a subnet manager run on the fabric?"


def _ranking(rows: list[GidEntry], local_address: object, peer: IPv6Address | None) -> _Key:
    """Make the sort key of an Ethernet port's rows; see the head of this module."""
    local: set[GidEntry] = set()
    with suppress(TypeError, ValueError):
        is_local = _has_address(*_parse_ip(local_address, "local_address"))
        local = {row for row in rows if is_local(row) and row.usable and row.scope < Scope.LOOPBACK}
    interfaces = {name for row in local for name in row.interface_names}
    other = GidEntry(0, peer, GIDType.ROCE_V2) if peer else None

    def key(row: GidEntry) -> tuple[int, ...]:
        strange = 0  # how unlike the peer's: of another scope, or even of another family
        if other and not other.empty:
            strange = 2 if bool(row.ipv4) != bool(other.ipv4) else int(row.scope != other.scope)
        far = 0 if row in local else 1 if row.interface_names & interfaces else 2
        # The address is last, so that the order of the rows decides nothing, even where an index comes twice.
        return strange, far, _TYPE_RANK[row.gid_type], row.scope, row.gid_index, int(row.gid)

    return key
