"""RDMA for Python: verbs that are right, explained, typed and fast.

Three doors into the same house::

    import pyverbs_lite as pvl

    conn = pvl.connect("server", 18515)      # "just connect me": an RC Connection in RTS
    ctx = pvl.open_device()                  # "I know verbs": Context, PD, MR, CQ, QP …
    from pyverbs_lite.ffi import ffi, lib    # "I need the C": verbs.h and rdma_cma.h as they are
"""

from importlib.metadata import PackageNotFoundError, version

from . import errors as _errors
from . import gid, qp_fsm, wire
from .attr import AHAttr, GlobalRoute, QPAttr, QPCap
from .connection import Connection, ConnectionInfo, Message, connect
from .cq import CQ, CompChannel
from .device import Context, DeviceAttr, DeviceInfo, PortAttr, devices, open_device
from .enums import (
    MTU,
    AccessFlags,
    AtomicCap,
    EventType,
    GIDType,
    LinkLayer,
    MigState,
    NodeType,
    PortState,
    QPAttrMask,
    QPState,
    QPType,
    SendFlags,
    TransportType,
    WCFlags,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from .errors import *  # noqa: F403 - every exception, as its __all__ lists them
from .gid import GidEntry
from .listener import Listener, listen
from .mr import MR, MRSlice
from .pd import PD
from .qp import QP, QPInitAttr
from .remote import RemoteBuffer
from .wr import SGE, WC, RecvWR, SendWR

try:
    __version__ = version("pyverbs-lite")
except PackageNotFoundError:  # run from a tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "CQ",
    "MR",
    "MTU",
    "PD",
    "QP",
    "SGE",
    "WC",
    "AHAttr",
    "AccessFlags",
    "AtomicCap",
    "CompChannel",
    "Connection",
    "ConnectionInfo",
    "Context",
    "DeviceAttr",
    "DeviceInfo",
    "EventType",
    "GIDType",
    "GidEntry",
    "GlobalRoute",
    "LinkLayer",
    "Listener",
    "MRSlice",
    "Message",
    "MigState",
    "NodeType",
    "PortAttr",
    "PortState",
    "QPAttr",
    "QPAttrMask",
    "QPCap",
    "QPInitAttr",
    "QPState",
    "QPType",
    "RecvWR",
    "RemoteBuffer",
    "SendFlags",
    "SendWR",
    "TransportType",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
    "WROpcode",
    "__version__",
    "connect",
    "devices",
    "gid",
    "listen",
    "open_device",
    "qp_fsm",
    "wire",
]
__all__ += _errors.__all__
