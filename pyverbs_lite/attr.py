"""The attributes of a QP and its addresses, as plain values under their C names.

Values only: they are frozen, compare, hash, copy and pickle, and know no device. A member that is ``None`` was not
given; so a value given is never mistaken for the zero that C would put there. Numbers are host integers:
byte order is the business of whoever fills the C struct. ``check_values`` knows the range of each member, as one
table; C would cut a number that is too large, or take it for something else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from ipaddress import IPv6Address
from numbers import Integral
from typing import TYPE_CHECKING, TypeVar

from .enums import MTU, AccessFlags, MigState, QPState

__all__ = ["AHAttr", "GlobalRoute", "QPAttr", "QPCap", "check_values", "mtu_of"]

_E = TypeVar("_E", bound=Enum)


def _gid(value: object) -> IPv6Address:
    """Read a GID from an ``IPv6Address``, its 16 bytes or its text."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        raw = bytes(value)
        if len(raw) != 16:
            raise ValueError(f"dgid must be 16 bytes in network byte order, not {len(raw)}")
        return IPv6Address(raw)
    if isinstance(value, str):
        text = value
        try:
            value = IPv6Address(text)
        except ValueError as error:
            raise ValueError(
                f"dgid {text!r} is not a GID ({error}); that of an IPv4 address a.b.c.d is ::ffff:a.b.c.d"
            ) from None
    # An int would be accepted by IPv6Address, and means nothing here.
    if not isinstance(value, IPv6Address):
        raise TypeError(f"dgid must be an IPv6Address, 16 bytes or str, not {type(value).__name__}")
    if value.scope_id is not None:
        raise ValueError(f"dgid {value} has a zone (%{value.scope_id}); a GID has none: sgid_index picks the port")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class QPCap:
    """Sizes of a QP's queues (``struct ibv_qp_cap``).

    Attributes:
        max_send_wr: work requests that the send queue holds, 32 bits.
        max_recv_wr: work requests that the receive queue holds, 32 bits; 0 with an SRQ.
        max_send_sge: scatter/gather elements of one send request, 32 bits.
        max_recv_sge: scatter/gather elements of one receive request, 32 bits.
        max_inline_data: bytes that a send request may carry in itself, 32 bits.

    The device rounds up: use the numbers that came back from creating the QP.

    Verb: ibv_create_qp

    """

    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalRoute:
    """The global part of an address (``struct ibv_global_route``): the GRH, or the IP header on RoCE v2.

    Attributes:
        dgid: the remote port's GID; an ``IPv6Address``, 16 bytes in network byte order, or text.
        flow_label: IPv6 flow label, 20 bits; RoCE v2 derives its UDP source port from it.
        sgid_index: row of the local port's GID table, 0 to 255; on RoCE it picks address, VLAN and version.
        hop_limit: routers on the way, 8 bits; the default lets packets leave the subnet, C's zero does not.
        traffic_class: 8 bits; on RoCE v2 the IP header's DSCP (upper six) and ECN.

    Raises:
        TypeError: ``dgid`` is none of the three.
        ValueError: ``dgid`` is not 16 bytes, not an IPv6 address, or carries a zone such as ``%eth0``.

    Verb: ibv_modify_qp

    """

    dgid: IPv6Address
    flow_label: int = 0
    sgid_index: int = 0
    hop_limit: int = 64
    traffic_class: int = 0

    if TYPE_CHECKING:  # what the constructor takes is wider than what the member holds

        def __init__(
            self,
            *,
            dgid: IPv6Address | bytes | bytearray | memoryview | str,
            flow_label: int = 0,
            sgid_index: int = 0,
            hop_limit: int = 64,
            traffic_class: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "dgid", _gid(self.dgid))


@dataclass(frozen=True, slots=True, kw_only=True)
class AHAttr:
    """The address of a remote port (``struct ibv_ah_attr``).

    Attributes:
        grh: the global route; always needed on RoCE, and on InfiniBand beyond the subnet.
        dlid: the remote port's LID, 16 bits; 0 on RoCE.
        sl: service level, 4 bits; on RoCE the VLAN priority.
        src_path_bits: low bits of the source LID where the port has several, 7 bits.
        static_rate: an ``enum ibv_rate`` code that limits the sender, 8 bits; 0 is no limit.
        is_global: whether ``grh`` is used; follows from ``grh`` where it is not given.
        port_num: the local port, 1 to 255.

    Verb: ibv_modify_qp

    """

    grh: GlobalRoute | None = None
    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0
    is_global: bool = None  # type: ignore[assignment]  # only until __post_init__
    port_num: int

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            port_num: int,
            grh: GlobalRoute | None = None,
            dlid: int = 0,
            sl: int = 0,
            src_path_bits: int = 0,
            static_rate: int = 0,
            is_global: bool | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if self.is_global is None:
            object.__setattr__(self, "is_global", self.grh is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QPAttr:
    """What to change about a QP, or what it is set to (``struct ibv_qp_attr``); ``None`` is not given.

    Attributes:
        qp_state: the state to move to.
        cur_qp_state: the state that the caller takes the QP to be in.
        path_mtu: largest packet payload on the path, an ``MTU`` or its size in bytes.
        path_mig_state: automatic path migration, InfiniBand only.
        qkey: the key that UD datagrams must carry, 32 bits; the top bit marks a privileged one.
        rq_psn: first packet sequence number that is expected, 24 bits: the remote side's ``sq_psn``.
        sq_psn: first packet sequence number that is sent, 24 bits: the remote side's ``rq_psn``.
        dest_qp_num: the remote QP's number, 24 bits.
        qp_access_flags: what the remote side may do over this QP (RC, UC, XRC).
        cap: new sizes of the queues; no edge of the state machine takes them.
        ah_attr: the primary path.
        alt_ah_attr: the alternate path, InfiniBand only; goes with the three ``alt_`` members below.
        pkey_index: row of the port's P_Key table, 16 bits.
        alt_pkey_index: the same for the alternate path.
        en_sqd_async_notify: whether an event tells that the send queue is drained.
        max_rd_atomic: reads and atomics in flight that this side starts, 8 bits; 0 forbids them.
        max_dest_rd_atomic: reads and atomics in flight that this side answers, 8 bits; 0 forbids them.
        min_rnr_timer: 5-bit code of the pause asked for when no receive is posted: 1 is 10 µs, 12 is 640 µs,
            31 is 491.52 ms, and 0 is the longest, 655.36 ms.
        port_num: the local port, 1 to 255.
        timeout: 5-bit code of the wait for an acknowledgement, 4.096 µs × 2^timeout; 0 waits for ever.
        retry_cnt: sends again after that, 3 bits.
        rnr_retry: sends again after "receiver not ready", 3 bits; 7 is for ever.
        alt_port_num: the local port of the alternate path, 1 to 255.
        alt_timeout: 5-bit code, as ``timeout``.
        rate_limit: kilobits per second, 32 bits; raw packet QPs only, 0 is no limit.

    Verb: ibv_modify_qp

    """

    qp_state: QPState | None = None
    cur_qp_state: QPState | None = None
    path_mtu: MTU | int | None = None
    path_mig_state: MigState | None = None
    qkey: int | None = None
    rq_psn: int | None = None
    sq_psn: int | None = None
    dest_qp_num: int | None = None
    qp_access_flags: AccessFlags | int | None = None
    cap: QPCap | None = None
    ah_attr: AHAttr | None = None
    alt_ah_attr: AHAttr | None = None
    pkey_index: int | None = None
    alt_pkey_index: int | None = None
    en_sqd_async_notify: bool | None = None
    max_rd_atomic: int | None = None
    max_dest_rd_atomic: int | None = None
    min_rnr_timer: int | None = None
    port_num: int | None = None
    timeout: int | None = None
    retry_cnt: int | None = None
    rnr_retry: int | None = None
    alt_port_num: int | None = None
    alt_timeout: int | None = None
    rate_limit: int | None = None

    def given(self) -> dict[str, object]:
        """Return the members that are not ``None``, by name; zero and ``False`` count as given."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


# ---------------------------------------------------------------- ranges


def _member(kind: type[_E], name: str, value: object) -> _E:
    # IntEnums of different kinds compare equal, so a swapped argument would find a row: the wrong one.
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a member of {kind.__name__}, not {value!r}")
    return value


def _integer(name: str, value: object) -> int:
    if type(value) is int:
        return value
    # bool and the enums are ints to Python; here they are another attribute's value in the wrong place.
    if isinstance(value, (bool, Enum)) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, not {value!r}")
    return operator.index(value)


def mtu_of(value: object) -> MTU:
    """Return the path MTU for an ``MTU`` member or a size in bytes (256, 512, 1024, 2048, 4096).

    Raises:
        TypeError: a ``bool``, another enum, or no integer.
        ValueError: no MTU, or one of the bare codes 1 to 5, which might be meant as either.

    Verb: ibv_modify_qp

    """
    if isinstance(value, MTU):
        return value
    number = _integer("path_mtu", value)
    if number in tuple(MTU):
        code = MTU(number)
        raise ValueError(f"path_mtu {number} is ambiguous, code or bytes: give MTU.{code.name} or {code.bytes} bytes")
    return MTU.from_bytes_size(number)


_Check = Callable[[str, object], object]


def _within(low: int, high: int, why: str) -> _Check:
    def verify(name: str, value: object) -> None:
        if not low <= (number := _integer(name, value)) <= high:
            raise ValueError(f"{name} {number} ({number:#x}) is not in {low}..{high} ({low:#x}..{high:#x}): {why}")

    return verify


def _width(bits: int, what: str) -> _Check:
    return _within(0, 2**bits - 1, f"{what} has {bits} bits")


def _kind(kind: type[Enum]) -> _Check:
    return lambda name, value: _member(kind, name, value)


def _path_mtu(_name: str, value: object) -> None:
    mtu_of(value)


def _state(name: str, value: object) -> None:
    if _member(QPState, name, value) is QPState.UNKNOWN:
        raise ValueError(f"{name} UNKNOWN is not a state that a QP can be in")


def _switch(name: str, value: object) -> None:
    if not isinstance(value, bool) and _integer(name, value) not in (0, 1):
        raise ValueError(f"{name} must be False or True, not {value!r}")


_REGION = int(AccessFlags.ZERO_BASED | AccessFlags.ON_DEMAND | AccessFlags.HUGETLB | AccessFlags.RELAXED_ORDERING)
_EVERY_ACCESS = sum(AccessFlags)


def _access(name: str, value: object) -> None:
    bits = int(value) if isinstance(value, AccessFlags) else _integer(name, value)
    if bits < 0 or bits & ~_EVERY_ACCESS:
        raise ValueError(f"{name} {bits:#x} has bits beyond AccessFlags, which are {_EVERY_ACCESS:#x}")
    if bits & _REGION:
        wrong = ", ".join(str(flag.name) for flag in AccessFlags if flag & _REGION & bits)
        raise ValueError(f"{name} {bits:#x}: {wrong} is for a memory region, not for a QP")


def _struct(kind: type, checks: Mapping[str, _Check]) -> _Check:
    def verify(name: str, value: object) -> None:
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be of class {kind.__name__}, not {value!r}")
        for member, verify_member in checks.items():
            verify_member(f"{name}.{member}", getattr(value, member))

    return verify


def _grh(name: str, value: object) -> None:
    if value is not None:
        _ROUTE(name, value)


def _address(name: str, value: object) -> None:
    _AH(name, value)
    if isinstance(value, AHAttr) and value.is_global != (value.grh is not None):
        raise ValueError(
            f"{name}.is_global is {value.is_global} but grh is {value.grh}: leave is_global to follow from grh"
        )


def _not_zero(name: str, value: object) -> None:
    if value == IPv6Address(0):
        raise ValueError(f"{name} is all zero, so it was never filled in: no port has that GID")


_PORT = _within(1, 255, "ports are counted from 1, and a port number has 8 bits")
_TIMEOUT = _width(5, "it is the code of 4.096 µs × 2^code, not a time, and")
_NUMBER = _width(32, "the number")
_DEPTH = _width(8, "a count of reads and atomics in flight")
_PKEY = _width(16, "a P_Key index")
_PSN = _width(24, "a packet sequence number")
_ROUTE = _struct(
    GlobalRoute,
    {
        "dgid": _not_zero,
        "flow_label": _width(20, "a flow label"),
        "sgid_index": _width(8, "the GID index of an address"),
        "hop_limit": _width(8, "a hop limit"),
        "traffic_class": _width(8, "a traffic class"),
    },
)
_AH = _struct(
    AHAttr,
    {
        "grh": _grh,
        "dlid": _width(16, "a LID"),
        "sl": _width(4, "a service level"),
        "src_path_bits": _width(7, "the free part of a LID"),
        "static_rate": _width(8, "a rate code"),
        "is_global": _switch,
        "port_num": _PORT,
    },
)
_CHECKS: dict[str, _Check] = {
    "qp_state": _state,
    "cur_qp_state": _state,
    "path_mtu": _path_mtu,
    "path_mig_state": _kind(MigState),
    "qkey": _width(32, "a Q_Key"),
    "rq_psn": _PSN,
    "sq_psn": _PSN,
    "dest_qp_num": _width(24, "a QP number"),
    "qp_access_flags": _access,
    "cap": _struct(QPCap, {field.name: _NUMBER for field in fields(QPCap)}),
    "ah_attr": _address,
    "alt_ah_attr": _address,
    "pkey_index": _PKEY,
    "alt_pkey_index": _PKEY,
    "en_sqd_async_notify": _switch,
    "max_rd_atomic": _DEPTH,
    "max_dest_rd_atomic": _DEPTH,
    "min_rnr_timer": _width(5, "it is the code of a pause, not a time, and"),
    "port_num": _PORT,
    "timeout": _TIMEOUT,
    "retry_cnt": _width(3, "a retry count"),
    "rnr_retry": _width(3, "a retry count (7 is for ever)"),
    "alt_port_num": _PORT,
    "alt_timeout": _TIMEOUT,
    "rate_limit": _NUMBER,
}
_ALT = frozenset(name for name in _CHECKS if name.startswith("alt_"))


def check_values(attrs: Mapping[str, object]) -> None:
    """Raise unless each value given is of its member's kind and within its range.

    Raises:
        TypeError: a value of the wrong kind (``None``, ``bool``, ``float``, text, another enum), or no such member.
        ValueError: out of range; the text names member, value, range and why. Or a part of the alternate path
            only: the kernel takes its four members as one.

    Verb: ibv_modify_qp

    """
    for name, value in attrs.items():
        if name not in _CHECKS:
            raise TypeError(f"{name!r} is not an attribute of a QP: there are {', '.join(_CHECKS)}")
        _CHECKS[name](name, value)
    if (alt := _ALT & attrs.keys()) and alt != _ALT:
        raise ValueError(f"an alternate path needs {', '.join(sorted(_ALT - alt))} as well")
