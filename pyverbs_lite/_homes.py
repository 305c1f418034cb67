"""Which module each public name lives in, so that the package loads none before it is asked for."""

from __future__ import annotations

from importlib import import_module

__all__ = ["HOMES", "find"]

_NAMES: dict[str, tuple[str, ...]] = {
    "_device_attr_ex": (
        "CQModerationCaps",
        "DeviceAttrEx",
        "ODPCaps",
        "PacketPacingCaps",
        "PCIAtomicCaps",
        "RSSCaps",
        "TMCaps",
        "TSOCaps",
    ),
    "_prepared": ("Prepared",),
    "_stats": ("ConnectionStats",),
    "ah": (
        "AH",
        "ah_attr_from_wc",
    ),
    "attr": (
        "AHAttr",
        "GlobalRoute",
        "QPAttr",
        "QPCap",
    ),
    "backoff": ("Backoff",),
    "connection": (
        "Connection",
        "ConnectionInfo",
        "LentMessage",
        "Message",
        "connect",
    ),
    "counters": ("Counters",),
    "cq": (
        "CQ",
        "CompChannel",
    ),
    "cq_ex": (
        "CQEx",
        "PollBatch",
        "TMInfo",
        "WCEx",
        "WCView",
    ),
    "device": (
        "Context",
        "DeviceAttr",
        "DeviceInfo",
        "PortAttr",
        "devices",
        "open_device",
    ),
    "device_ex": ("PortSpeed",),
    "dm": (
        "DM",
        "DMMR",
    ),
    "domains": (
        "TD",
        "ParentDomain",
    ),
    "enums": (
        "MTU",
        "AccessFlags",
        "AdviseMRAdvice",
        "AtomicCap",
        "CounterDescription",
        "CreateCQAttrFlags",
        "CreateCQWCFlags",
        "DataInOrderCaps",
        "DataInOrderFlags",
        "DeviceCapFlags",
        "EventType",
        "FlowActionESPFlags",
        "FlowAttrType",
        "FlowFlags",
        "ForkStatus",
        "GIDType",
        "LinkLayer",
        "MigState",
        "MWType",
        "NodeType",
        "ODPGeneralCaps",
        "ODPTransportCaps",
        "PCIAtomicOpSize",
        "PlacementType",
        "PortState",
        "QPAttrMask",
        "QPCreateFlags",
        "QPState",
        "QPType",
        "ReregMRErrCode",
        "RXHashFields",
        "RXHashFunction",
        "SelectivityLevel",
        "SendFlags",
        "SendOpsFlags",
        "SRQType",
        "TransportType",
        "WCFlags",
        "WCOpcode",
        "WCStatus",
        "WQFlags",
        "WQState",
        "WQType",
        "WROpcode",
    ),
    "events": (
        "AsyncEvent",
        "CQEvent",
        "DeviceEvent",
        "PortEvent",
        "QPEvent",
        "SRQEvent",
        "WQEvent",
    ),
    "flow": (
        "Flow",
        "FlowAttr",
    ),
    "flow_action": (
        "AESGCM",
        "ESPAttr",
        "FlowActionESP",
        "FlowActionESPAttr",
    ),
    "flow_spec": (
        "FlowSpec",
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
    ),
    "flow_spec_action": (
        "FlowSpecActionCount",
        "FlowSpecActionDrop",
        "FlowSpecActionHandle",
        "FlowSpecActionTag",
    ),
    "fork": (
        "fork_init",
        "is_fork_initialized",
    ),
    "gid": ("GidEntry",),
    "grh": (
        "GRH",
        "GRH_BYTES",
        "split_grh",
    ),
    "listener": (
        "Listener",
        "listen",
    ),
    "mcast": (
        "MULTICAST_QPN",
        "Multicast",
        "multicast_gid",
    ),
    "mr": (
        "MR",
        "MRSlice",
    ),
    "mr_ex": (
        "DmaBufMR",
        "ImplicitMR",
        "IovaMR",
        "NullMR",
    ),
    "mw": (
        "MW",
        "MWBindInfo",
    ),
    "grant": ("Grant",),
    "pd": ("PD",),
    "regcache": (
        "CachedMR",
        "RegistrationCache",
        "RegistrationCacheStats",
    ),
    "pool": (
        "Pool",
        "PoolSlice",
        "PoolStats",
    ),
    "qp": (
        "ECE",
        "QP",
        "QPInitAttr",
    ),
    "remote": ("RemoteBuffer",),
    "server": (
        "Server",
        "ServerStats",
    ),
    "sharing": (
        "ImportedContext",
        "ImportedDM",
        "ImportedMR",
        "ImportedPD",
        "import_device",
    ),
    "srq": (
        "SRQ",
        "SRQAttr",
        "SRQInitAttr",
    ),
    "wq": (
        "WQ",
        "RwqIndTable",
        "RXHashConf",
        "WQInitAttr",
    ),
    "wr": (
        "SGE",
        "WC",
        "RecvWR",
        "SendWR",
    ),
    "wr_ex": ("WRBatch",),
    "xrcd": (
        "XRCD",
        "OpenedQP",
    ),
}
#: Public name -> the module that has it, below the package.
HOMES = {name: module for module, names in _NAMES.items() for name in names}


def find(name: str) -> object:
    """Return what a public name stands for; the first time its module is imported."""
    return getattr(import_module(f".{HOMES[name]}", __package__), name)
