"""RDMA for Python: verbs that are right, explained, typed and fast.

Three doors into the same house::

    import pyverbs_lite as pvl

    conn = pvl.connect("server", 18515)      # "just connect me": an RC Connection in RTS
    ctx = pvl.open_device()                  # "I know verbs": Context, PD, MR, CQ, QP …
    from pyverbs_lite.ffi import ffi, lib    # "I need the C": verbs.h and rdma_cma.h as they are
"""

from importlib import import_module
from typing import TYPE_CHECKING

from . import errors as _errors
from . import ffi as _ffi  # noqa: F401 - now, for where libibverbs is missing this is what says so
from ._homes import HOMES as _HOMES
from ._homes import find as _find
from .errors import *  # noqa: F403 - every exception, as its __all__ lists them

# Everything else is imported when it is first asked for: a program that only opens a device need not wait for the
# modules of flow steering. Each name stands here for type checkers, in __all__, and in _homes for the import.
if TYPE_CHECKING:
    from . import aio, cm, gid, qp_fsm, wire
    from . import anyio as anyio  # not in __all__, for it needs an extra
    from ._connection.many import PreparedMany
    from ._connection.prepared import Prepared
    from ._connection.stats import ConnectionStats
    from ._objects.device_attr_ex import (
        CQModerationCaps,
        DeviceAttrEx,
        ODPCaps,
        PacketPacingCaps,
        PCIAtomicCaps,
        RSSCaps,
        TMCaps,
        TSOCaps,
    )
    from .ah import AH, ah_attr_from_wc
    from .attr import AHAttr, GlobalRoute, QPAttr, QPCap
    from .backoff import Backoff
    from .connection import Connection, ConnectionInfo, LentMessage, Message, connect
    from .counters import Counters
    from .cq import CQ, CompChannel
    from .cq_ex import CQEx, PollBatch, TMInfo, WCEx, WCView
    from .device import Context, DeviceAttr, DeviceInfo, PortAttr, devices, open_device
    from .device_ex import PortSpeed
    from .dm import DM, DMMR
    from .domains import TD, ParentDomain
    from .enums import (
        MTU,
        AccessFlags,
        AdviseMRAdvice,
        AtomicCap,
        CounterDescription,
        CreateCQAttrFlags,
        CreateCQWCFlags,
        DataInOrderCaps,
        DataInOrderFlags,
        DeviceCapFlags,
        EventType,
        FlowActionESPFlags,
        FlowAttrType,
        FlowFlags,
        ForkStatus,
        GIDType,
        LinkLayer,
        MigState,
        MWType,
        NodeType,
        ODPGeneralCaps,
        ODPTransportCaps,
        PCIAtomicOpSize,
        PlacementType,
        PortState,
        QPAttrMask,
        QPCreateFlags,
        QPState,
        QPType,
        ReregMRErrCode,
        RXHashFields,
        RXHashFunction,
        SelectivityLevel,
        SendFlags,
        SendOpsFlags,
        SRQType,
        TransportType,
        WCFlags,
        WCOpcode,
        WCStatus,
        WQFlags,
        WQState,
        WQType,
        WROpcode,
    )
    from .events import AsyncEvent, CQEvent, DeviceEvent, PortEvent, QPEvent, SRQEvent, WQEvent
    from .flow import Flow, FlowAttr
    from .flow_action import AESGCM, ESPAttr, FlowActionESP, FlowActionESPAttr
    from .flow_spec import (
        FlowSpec,
        FlowSpecESP,
        FlowSpecEth,
        FlowSpecGRE,
        FlowSpecIPv4,
        FlowSpecIPv4Ext,
        FlowSpecIPv6,
        FlowSpecMPLS,
        FlowSpecTCP,
        FlowSpecUDP,
        FlowSpecVXLAN,
    )
    from .flow_spec_action import FlowSpecActionCount, FlowSpecActionDrop, FlowSpecActionHandle, FlowSpecActionTag
    from .fork import fork_init, is_fork_initialized
    from .gid import GidEntry
    from .grant import Grant
    from .grh import GRH, GRH_BYTES, split_grh
    from .listener import Listener, listen
    from .mcast import MULTICAST_QPN, Multicast, multicast_gid
    from .mr import MR, MRSlice
    from .mr_ex import DmaBufMR, ImplicitMR, IovaMR, NullMR
    from .mw import MW, MWBindInfo
    from .pd import PD
    from .pool import Pool, PoolSlice, PoolStats
    from .qp import ECE, QP, QPInitAttr
    from .regcache import CachedMR, RegistrationCache, RegistrationCacheStats
    from .remote import RemoteBuffer
    from .server import Server, ServerStats
    from .sharing import ImportedContext, ImportedDM, ImportedMR, ImportedPD, import_device
    from .srq import SRQ, SRQAttr, SRQInitAttr
    from .wq import WQ, RwqIndTable, RXHashConf, WQInitAttr
    from .wr import SGE, WC, RecvWR, SendWR
    from .wr_ex import WRBatch
    from .xrcd import XRCD, OpenedQP

    __version__: str

__all__ = [
    "AESGCM",
    "AH",
    "CQ",
    "DM",
    "DMMR",
    "ECE",
    "GRH",
    "GRH_BYTES",
    "MR",
    "MTU",
    "MULTICAST_QPN",
    "MW",
    "PD",
    "QP",
    "SGE",
    "SRQ",
    "TD",
    "WC",
    "WQ",
    "XRCD",
    "AHAttr",
    "AccessFlags",
    "AdviseMRAdvice",
    "AsyncEvent",
    "AtomicCap",
    "Backoff",
    "CQEvent",
    "CQEx",
    "CQModerationCaps",
    "CachedMR",
    "CompChannel",
    "Connection",
    "ConnectionInfo",
    "ConnectionStats",
    "Context",
    "CounterDescription",
    "Counters",
    "CreateCQAttrFlags",
    "CreateCQWCFlags",
    "DataInOrderCaps",
    "DataInOrderFlags",
    "DeviceAttr",
    "DeviceAttrEx",
    "DeviceCapFlags",
    "DeviceEvent",
    "DeviceInfo",
    "DmaBufMR",
    "ESPAttr",
    "EventType",
    "Flow",
    "FlowActionESP",
    "FlowActionESPAttr",
    "FlowActionESPFlags",
    "FlowAttr",
    "FlowAttrType",
    "FlowFlags",
    "FlowSpec",
    "FlowSpecActionCount",
    "FlowSpecActionDrop",
    "FlowSpecActionHandle",
    "FlowSpecActionTag",
    "FlowSpecESP",
    "FlowSpecEth",
    "FlowSpecGRE",
    "FlowSpecIPv4",
    "FlowSpecIPv4Ext",
    "FlowSpecIPv6",
    "FlowSpecMPLS",
    "FlowSpecTCP",
    "FlowSpecUDP",
    "FlowSpecVXLAN",
    "ForkStatus",
    "GIDType",
    "GidEntry",
    "GlobalRoute",
    "Grant",
    "ImplicitMR",
    "ImportedContext",
    "ImportedDM",
    "ImportedMR",
    "ImportedPD",
    "IovaMR",
    "LentMessage",
    "LinkLayer",
    "Listener",
    "MRSlice",
    "MWBindInfo",
    "MWType",
    "Message",
    "MigState",
    "Multicast",
    "NodeType",
    "NullMR",
    "ODPCaps",
    "ODPGeneralCaps",
    "ODPTransportCaps",
    "OpenedQP",
    "PCIAtomicCaps",
    "PCIAtomicOpSize",
    "PacketPacingCaps",
    "ParentDomain",
    "PlacementType",
    "PollBatch",
    "Pool",
    "PoolSlice",
    "PoolStats",
    "PortAttr",
    "PortEvent",
    "PortSpeed",
    "PortState",
    "Prepared",
    "PreparedMany",
    "QPAttr",
    "QPAttrMask",
    "QPCap",
    "QPCreateFlags",
    "QPEvent",
    "QPInitAttr",
    "QPState",
    "QPType",
    "RSSCaps",
    "RXHashConf",
    "RXHashFields",
    "RXHashFunction",
    "RecvWR",
    "RegistrationCache",
    "RegistrationCacheStats",
    "RemoteBuffer",
    "ReregMRErrCode",
    "RwqIndTable",
    "SRQAttr",
    "SRQEvent",
    "SRQInitAttr",
    "SRQType",
    "SelectivityLevel",
    "SendFlags",
    "SendOpsFlags",
    "SendWR",
    "Server",
    "ServerStats",
    "TMCaps",
    "TMInfo",
    "TSOCaps",
    "TransportType",
    "WCEx",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
    "WCView",
    "WQEvent",
    "WQFlags",
    "WQInitAttr",
    "WQState",
    "WQType",
    "WRBatch",
    "WROpcode",
    "__version__",
    "ah_attr_from_wc",
    "aio",
    "cm",
    "connect",
    "devices",
    "fork_init",
    "gid",
    "import_device",
    "is_fork_initialized",
    "listen",
    "multicast_gid",
    "open_device",
    "qp_fsm",
    "split_grh",
    "wire",
]
__all__ += _errors.__all__

_MODULES = frozenset({"aio", "anyio", "cm", "gid", "qp_fsm", "wire", *_HOMES.values()})


def __getattr__(name: str) -> object:
    value: object
    if name in _HOMES:
        value = _find(name)
    elif name in _MODULES:
        value = import_module(f".{name}", __name__)
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next time nobody asks here
    return value


def __dir__() -> list[str]:
    # Without what needs an extra: help() asks for all that is listed, and would end where that is not installed.
    return sorted({*globals(), *__all__, *_MODULES - {"anyio"}})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pyverbs-lite")
    except PackageNotFoundError:  # run from a tree that was never installed
        return "0+unknown"
