"""Connections through librdmacm: the objects of its C flow, and the ``Connection`` over them."""

from __future__ import annotations

from .cm_addrinfo import AddrInfo, getaddrinfo
from .cm_channel import EventChannel
from .cm_context import CMContext
from .cm_events import CMEvent, ConnParam, UDParam
from .cm_mcast import CMGroup
from .cm_qp import CMQP
from .cmid import CMID
from .enums.cm import AddrInfoFlags, CMEventType, IBOption, IDOption, MCJoinFlags, PortSpace

__all__ = [
    "CMID",
    "CMQP",
    "AddrInfo",
    "AddrInfoFlags",
    "CMContext",
    "CMEvent",
    "CMEventType",
    "CMGroup",
    "ConnParam",
    "EventChannel",
    "IBOption",
    "IDOption",
    "MCJoinFlags",
    "PortSpace",
    "UDParam",
    "getaddrinfo",
]
