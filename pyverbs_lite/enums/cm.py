"""The connection manager (librdmacm)."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from ..ffi import lib

__all__ = [
    "AddrInfoFlags",
    "CMEventType",
    "IBOption",
    "IDOption",
    "JoinMCAttrMask",
    "MCJoinFlags",
    "OptionLevel",
    "PathFlags",
    "PortSpace",
]


class CMEventType(IntEnum):
    """What happened to an ``rdma_cm_id`` (``enum rdma_cm_event_type``)."""

    ADDR_RESOLVED = lib.RDMA_CM_EVENT_ADDR_RESOLVED
    ADDR_ERROR = lib.RDMA_CM_EVENT_ADDR_ERROR
    ROUTE_RESOLVED = lib.RDMA_CM_EVENT_ROUTE_RESOLVED
    ROUTE_ERROR = lib.RDMA_CM_EVENT_ROUTE_ERROR
    CONNECT_REQUEST = lib.RDMA_CM_EVENT_CONNECT_REQUEST
    CONNECT_RESPONSE = lib.RDMA_CM_EVENT_CONNECT_RESPONSE
    CONNECT_ERROR = lib.RDMA_CM_EVENT_CONNECT_ERROR
    UNREACHABLE = lib.RDMA_CM_EVENT_UNREACHABLE
    REJECTED = lib.RDMA_CM_EVENT_REJECTED
    ESTABLISHED = lib.RDMA_CM_EVENT_ESTABLISHED
    DISCONNECTED = lib.RDMA_CM_EVENT_DISCONNECTED
    DEVICE_REMOVAL = lib.RDMA_CM_EVENT_DEVICE_REMOVAL
    MULTICAST_JOIN = lib.RDMA_CM_EVENT_MULTICAST_JOIN
    MULTICAST_ERROR = lib.RDMA_CM_EVENT_MULTICAST_ERROR
    ADDR_CHANGE = lib.RDMA_CM_EVENT_ADDR_CHANGE
    TIMEWAIT_EXIT = lib.RDMA_CM_EVENT_TIMEWAIT_EXIT
    if lib.PVL_HAS_RESOLVE_ADDRINFO > 0:
        ADDRINFO_RESOLVED = lib.RDMA_CM_EVENT_ADDRINFO_RESOLVED
        ADDRINFO_ERROR = lib.RDMA_CM_EVENT_ADDRINFO_ERROR
    if lib.PVL_HAS_WRITE_CM_EVENT > 0:
        USER = lib.RDMA_CM_EVENT_USER
        INTERNAL = lib.RDMA_CM_EVENT_INTERNAL


class PortSpace(IntEnum):
    """The port space of an ``rdma_cm_id`` (``enum rdma_port_space``): TCP for RC, UDP for UD."""

    IPOIB = lib.RDMA_PS_IPOIB
    TCP = lib.RDMA_PS_TCP
    UDP = lib.RDMA_PS_UDP
    IB = lib.RDMA_PS_IB


class AddrInfoFlags(IntFlag):
    """How ``rdma_getaddrinfo`` resolves (``RAI_*``)."""

    PASSIVE = lib.RAI_PASSIVE
    NUMERICHOST = lib.RAI_NUMERICHOST
    NOROUTE = lib.RAI_NOROUTE
    FAMILY = lib.RAI_FAMILY
    if lib.PVL_HAS_RAI_SA > 0:
        SA = lib.RAI_SA
        DNS = lib.RAI_DNS


class JoinMCAttrMask(IntFlag):
    """Which members of ``rdma_cm_join_mc_attr_ex`` are valid (``enum rdma_cm_join_mc_attr_mask``)."""

    ADDRESS = lib.RDMA_CM_JOIN_MC_ATTR_ADDRESS
    JOIN_FLAGS = lib.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
    RESERVED = lib.RDMA_CM_JOIN_MC_ATTR_RESERVED


class MCJoinFlags(IntEnum):
    """How a multicast group is joined (``enum rdma_cm_mc_join_flags``)."""

    FULLMEMBER = lib.RDMA_MC_JOIN_FLAG_FULLMEMBER
    SENDONLY_FULLMEMBER = lib.RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER
    RESERVED = lib.RDMA_MC_JOIN_FLAG_RESERVED


class OptionLevel(IntEnum):
    """The level of an option of ``rdma_set_option`` (``RDMA_OPTION_*``)."""

    ID = lib.RDMA_OPTION_ID
    IB = lib.RDMA_OPTION_IB


class IDOption(IntEnum):
    """The options of level ``ID`` (``RDMA_OPTION_ID_*``)."""

    TOS = lib.RDMA_OPTION_ID_TOS
    REUSEADDR = lib.RDMA_OPTION_ID_REUSEADDR
    AFONLY = lib.RDMA_OPTION_ID_AFONLY
    ACK_TIMEOUT = lib.RDMA_OPTION_ID_ACK_TIMEOUT


class IBOption(IntEnum):
    """The options of level ``IB`` (``RDMA_OPTION_IB_*``)."""

    PATH = lib.RDMA_OPTION_IB_PATH


class PathFlags(IntFlag):
    """What a path record is for (``IBV_PATH_FLAG_*``)."""

    GMP = lib.IBV_PATH_FLAG_GMP
    PRIMARY = lib.IBV_PATH_FLAG_PRIMARY
    ALTERNATE = lib.IBV_PATH_FLAG_ALTERNATE
    OUTBOUND = lib.IBV_PATH_FLAG_OUTBOUND
    INBOUND = lib.IBV_PATH_FLAG_INBOUND
    INBOUND_REVERSE = lib.IBV_PATH_FLAG_INBOUND_REVERSE
    BIDIRECTIONAL = lib.IBV_PATH_FLAG_BIDIRECTIONAL
