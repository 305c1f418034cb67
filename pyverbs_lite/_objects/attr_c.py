"""The attribute values of ``attr.py`` written into, and read from, their C structs."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv6Address

from ..attr import AHAttr, GlobalRoute, QPAttr, QPCap
from ..enums import MTU, AccessFlags, MigState, QPState
from ..ffi import CData
from ..qp_fsm import mtu_of
from .device_attr import known

__all__ = ["read_cap", "read_qp_attr", "write_cap", "write_qp_attr"]

_CAP = ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")
_AH = ("dlid", "sl", "src_path_bits", "static_rate", "is_global", "port_num")
_ROUTE = ("flow_label", "sgid_index", "hop_limit", "traffic_class")
#: Members of struct ibv_qp_attr that are no plain integers. Some drivers (siw) leave members as they were: any number.
_READ: dict[str, Callable[[int], object]] = {
    "qp_state": lambda code: known(QPState, code),
    "cur_qp_state": lambda code: known(QPState, code),
    "path_mtu": lambda code: known(MTU, code) if code else None,  # 0 until a path was set
    "path_mig_state": lambda code: known(MigState, code),
    "qp_access_flags": AccessFlags,
    "en_sqd_async_notify": bool,
}


def write_cap(raw: CData, cap: QPCap) -> None:
    """Fill a ``struct ibv_qp_cap``."""
    for name in _CAP:
        setattr(raw, name, getattr(cap, name))


def read_cap(raw: CData) -> QPCap:
    """Read a ``struct ibv_qp_cap``."""
    return QPCap(**{name: getattr(raw, name) for name in _CAP})


def write_ah_attr(raw: CData, attr: AHAttr) -> None:
    """Fill a ``struct ibv_ah_attr``; the GID goes in as its 16 bytes in network order."""
    for name in _AH:
        setattr(raw, name, getattr(attr, name))
    if attr.grh is not None:
        for name in _ROUTE:
            setattr(raw.grh, name, getattr(attr.grh, name))
        raw.grh.dgid.raw = attr.grh.dgid.packed


def read_ah_attr(raw: CData) -> AHAttr:
    """Read a ``struct ibv_ah_attr``."""
    grh = None
    if raw.is_global:
        dgid = IPv6Address(bytes(raw.grh.dgid.raw))
        grh = GlobalRoute(dgid=dgid, **{name: getattr(raw.grh, name) for name in _ROUTE})
    values = {name: getattr(raw, name) for name in _AH if name != "is_global"}
    return AHAttr(grh=grh, **values)


def write_qp_attr(raw: CData, given: dict[str, object]) -> None:
    """Fill a ``struct ibv_qp_attr`` from checked members."""
    for name, value in given.items():
        if isinstance(value, QPCap):
            write_cap(raw.cap, value)
        elif isinstance(value, AHAttr):
            write_ah_attr(getattr(raw, name), value)
        elif name == "path_mtu":
            raw.path_mtu = mtu_of(value)
        else:
            setattr(raw, name, value)


def read_qp_attr(raw: CData) -> QPAttr:
    """Read a ``struct ibv_qp_attr`` that ``ibv_query_qp`` filled."""
    values: dict[str, object] = {
        "cap": read_cap(raw.cap),
        "ah_attr": read_ah_attr(raw.ah_attr),
        "alt_ah_attr": read_ah_attr(raw.alt_ah_attr),
    }
    for name in QPAttr.__slots__:
        if name not in values:
            values[name] = _READ.get(name, int)(getattr(raw, name))
    return QPAttr(**values)  # type: ignore[arg-type]
