"""Devices and ports: what they are, what they can do, what happens to them."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from ..ffi import lib

__all__ = [
    "MTU",
    "AtomicCap",
    "DeviceCapFlags",
    "EventType",
    "ForkStatus",
    "GIDType",
    "LinkLayer",
    "NodeType",
    "PortCapFlags",
    "PortCapFlags2",
    "PortFlags",
    "PortState",
    "Rate",
    "TransportType",
]


class NodeType(IntEnum):
    """What kind of RDMA node a device is (``enum ibv_node_type``)."""

    UNKNOWN = lib.IBV_NODE_UNKNOWN
    CA = lib.IBV_NODE_CA
    SWITCH = lib.IBV_NODE_SWITCH
    ROUTER = lib.IBV_NODE_ROUTER
    RNIC = lib.IBV_NODE_RNIC
    USNIC = lib.IBV_NODE_USNIC
    USNIC_UDP = lib.IBV_NODE_USNIC_UDP
    UNSPECIFIED = lib.IBV_NODE_UNSPECIFIED


class TransportType(IntEnum):
    """What a device speaks (``enum ibv_transport_type``): RoCE counts as IB."""

    UNKNOWN = lib.IBV_TRANSPORT_UNKNOWN
    IB = lib.IBV_TRANSPORT_IB
    IWARP = lib.IBV_TRANSPORT_IWARP
    USNIC = lib.IBV_TRANSPORT_USNIC
    USNIC_UDP = lib.IBV_TRANSPORT_USNIC_UDP
    UNSPECIFIED = lib.IBV_TRANSPORT_UNSPECIFIED


class DeviceCapFlags(IntFlag):
    """What a device can do (``enum ibv_device_cap_flags``); bits above 31 are only in ``device_cap_flags_ex``."""

    RESIZE_MAX_WR = lib.IBV_DEVICE_RESIZE_MAX_WR
    BAD_PKEY_CNTR = lib.IBV_DEVICE_BAD_PKEY_CNTR
    BAD_QKEY_CNTR = lib.IBV_DEVICE_BAD_QKEY_CNTR
    RAW_MULTI = lib.IBV_DEVICE_RAW_MULTI
    AUTO_PATH_MIG = lib.IBV_DEVICE_AUTO_PATH_MIG
    CHANGE_PHY_PORT = lib.IBV_DEVICE_CHANGE_PHY_PORT
    UD_AV_PORT_ENFORCE = lib.IBV_DEVICE_UD_AV_PORT_ENFORCE
    CURR_QP_STATE_MOD = lib.IBV_DEVICE_CURR_QP_STATE_MOD
    SHUTDOWN_PORT = lib.IBV_DEVICE_SHUTDOWN_PORT
    INIT_TYPE = lib.IBV_DEVICE_INIT_TYPE
    PORT_ACTIVE_EVENT = lib.IBV_DEVICE_PORT_ACTIVE_EVENT
    SYS_IMAGE_GUID = lib.IBV_DEVICE_SYS_IMAGE_GUID
    RC_RNR_NAK_GEN = lib.IBV_DEVICE_RC_RNR_NAK_GEN
    SRQ_RESIZE = lib.IBV_DEVICE_SRQ_RESIZE
    N_NOTIFY_CQ = lib.IBV_DEVICE_N_NOTIFY_CQ
    MEM_WINDOW = lib.IBV_DEVICE_MEM_WINDOW
    UD_IP_CSUM = lib.IBV_DEVICE_UD_IP_CSUM
    XRC = lib.IBV_DEVICE_XRC
    MEM_MGT_EXTENSIONS = lib.IBV_DEVICE_MEM_MGT_EXTENSIONS
    MEM_WINDOW_TYPE_2A = lib.IBV_DEVICE_MEM_WINDOW_TYPE_2A
    MEM_WINDOW_TYPE_2B = lib.IBV_DEVICE_MEM_WINDOW_TYPE_2B
    RC_IP_CSUM = lib.IBV_DEVICE_RC_IP_CSUM
    RAW_IP_CSUM = lib.IBV_DEVICE_RAW_IP_CSUM
    MANAGED_FLOW_STEERING = lib.IBV_DEVICE_MANAGED_FLOW_STEERING
    RAW_SCATTER_FCS = lib.IBV_DEVICE_RAW_SCATTER_FCS
    PCI_WRITE_END_PADDING = lib.IBV_DEVICE_PCI_WRITE_END_PADDING
    if lib.PVL_HAS_CC_DMA_BOUNCE > 0:
        CC_DMA_BOUNCE = lib.IBV_DEVICE_CC_DMA_BOUNCE


class AtomicCap(IntEnum):
    """How far a device's atomics reach (``enum ibv_atomic_cap``)."""

    NONE = lib.IBV_ATOMIC_NONE
    HCA = lib.IBV_ATOMIC_HCA
    GLOB = lib.IBV_ATOMIC_GLOB


class MTU(IntEnum):
    """The path MTU as the verbs code it (``enum ibv_mtu``); ``bytes`` is the size it stands for."""

    MTU_256 = lib.IBV_MTU_256
    MTU_512 = lib.IBV_MTU_512
    MTU_1024 = lib.IBV_MTU_1024
    MTU_2048 = lib.IBV_MTU_2048
    MTU_4096 = lib.IBV_MTU_4096

    @property
    def bytes(self) -> int:
        """The payload size in bytes that this code stands for."""
        return _MTU_BYTES[self]

    @classmethod
    def from_bytes_size(cls, nbytes: int) -> MTU:
        """Return the code for a size in bytes (256, 512, 1024, 2048 or 4096).

        Raises:
            ValueError: no code stands for that size.

        """
        try:
            return _MTU_OF[nbytes]
        except KeyError:
            raise ValueError(f"path MTU must be one of {[*_MTU_OF]} bytes, not {nbytes}") from None


_MTU_BYTES = {member: int(member.name.removeprefix("MTU_")) for member in MTU}
_MTU_OF = {size: member for member, size in _MTU_BYTES.items()}


class PortState(IntEnum):
    """The logical state of a port (``enum ibv_port_state``)."""

    NOP = lib.IBV_PORT_NOP
    DOWN = lib.IBV_PORT_DOWN
    INIT = lib.IBV_PORT_INIT
    ARMED = lib.IBV_PORT_ARMED
    ACTIVE = lib.IBV_PORT_ACTIVE
    ACTIVE_DEFER = lib.IBV_PORT_ACTIVE_DEFER


class LinkLayer(IntEnum):
    """What lies under a port: InfiniBand, or Ethernet (RoCE and iWARP)."""

    UNSPECIFIED = lib.IBV_LINK_LAYER_UNSPECIFIED
    INFINIBAND = lib.IBV_LINK_LAYER_INFINIBAND
    ETHERNET = lib.IBV_LINK_LAYER_ETHERNET


class PortFlags(IntFlag):
    """What a port asks of its users (``ibv_port_attr.flags``)."""

    GRH_REQUIRED = lib.IBV_QPF_GRH_REQUIRED


class PortCapFlags(IntFlag):
    """What an InfiniBand port can do (``enum ibv_port_cap_flags``)."""

    SM = lib.IBV_PORT_SM
    NOTICE_SUP = lib.IBV_PORT_NOTICE_SUP
    TRAP_SUP = lib.IBV_PORT_TRAP_SUP
    OPT_IPD_SUP = lib.IBV_PORT_OPT_IPD_SUP
    AUTO_MIGR_SUP = lib.IBV_PORT_AUTO_MIGR_SUP
    SL_MAP_SUP = lib.IBV_PORT_SL_MAP_SUP
    MKEY_NVRAM = lib.IBV_PORT_MKEY_NVRAM
    PKEY_NVRAM = lib.IBV_PORT_PKEY_NVRAM
    LED_INFO_SUP = lib.IBV_PORT_LED_INFO_SUP
    SYS_IMAGE_GUID_SUP = lib.IBV_PORT_SYS_IMAGE_GUID_SUP
    PKEY_SW_EXT_PORT_TRAP_SUP = lib.IBV_PORT_PKEY_SW_EXT_PORT_TRAP_SUP
    EXTENDED_SPEEDS_SUP = lib.IBV_PORT_EXTENDED_SPEEDS_SUP
    CAP_MASK2_SUP = lib.IBV_PORT_CAP_MASK2_SUP
    CM_SUP = lib.IBV_PORT_CM_SUP
    SNMP_TUNNEL_SUP = lib.IBV_PORT_SNMP_TUNNEL_SUP
    REINIT_SUP = lib.IBV_PORT_REINIT_SUP
    DEVICE_MGMT_SUP = lib.IBV_PORT_DEVICE_MGMT_SUP
    VENDOR_CLASS_SUP = lib.IBV_PORT_VENDOR_CLASS_SUP
    DR_NOTICE_SUP = lib.IBV_PORT_DR_NOTICE_SUP
    CAP_MASK_NOTICE_SUP = lib.IBV_PORT_CAP_MASK_NOTICE_SUP
    BOOT_MGMT_SUP = lib.IBV_PORT_BOOT_MGMT_SUP
    LINK_LATENCY_SUP = lib.IBV_PORT_LINK_LATENCY_SUP
    CLIENT_REG_SUP = lib.IBV_PORT_CLIENT_REG_SUP
    IP_BASED_GIDS = lib.IBV_PORT_IP_BASED_GIDS


class PortCapFlags2(IntFlag):
    """What a port can do, where ``PortCapFlags.CAP_MASK2_SUP`` is set (``enum ibv_port_cap_flags2``)."""

    SET_NODE_DESC_SUP = lib.IBV_PORT_SET_NODE_DESC_SUP
    INFO_EXT_SUP = lib.IBV_PORT_INFO_EXT_SUP
    VIRT_SUP = lib.IBV_PORT_VIRT_SUP
    SWITCH_PORT_STATE_TABLE_SUP = lib.IBV_PORT_SWITCH_PORT_STATE_TABLE_SUP
    LINK_WIDTH_2X_SUP = lib.IBV_PORT_LINK_WIDTH_2X_SUP
    LINK_SPEED_HDR_SUP = lib.IBV_PORT_LINK_SPEED_HDR_SUP
    if lib.PVL_HAS_PORT_NDR > 0:
        LINK_SPEED_NDR_SUP = lib.IBV_PORT_LINK_SPEED_NDR_SUP
    if lib.PVL_HAS_PORT_XDR > 0:
        LINK_SPEED_XDR_SUP = lib.IBV_PORT_LINK_SPEED_XDR_SUP


class GIDType(IntEnum):
    """The protocol of a GID table row (``enum ibv_gid_type``, as ``ibv_query_gid_table`` reports it)."""

    # Named by literals where the headers are older than the enum: sysfs tells the type by other means.
    IB = 0 if lib.PVL_HAS_GID_TABLE < 0 else lib.IBV_GID_TYPE_IB
    ROCE_V1 = 1 if lib.PVL_HAS_GID_TABLE < 0 else lib.IBV_GID_TYPE_ROCE_V1
    ROCE_V2 = 2 if lib.PVL_HAS_GID_TABLE < 0 else lib.IBV_GID_TYPE_ROCE_V2


class EventType(IntEnum):
    """Asynchronous events (``enum ibv_event_type``)."""

    CQ_ERR = lib.IBV_EVENT_CQ_ERR
    QP_FATAL = lib.IBV_EVENT_QP_FATAL
    QP_REQ_ERR = lib.IBV_EVENT_QP_REQ_ERR
    QP_ACCESS_ERR = lib.IBV_EVENT_QP_ACCESS_ERR
    COMM_EST = lib.IBV_EVENT_COMM_EST
    SQ_DRAINED = lib.IBV_EVENT_SQ_DRAINED
    PATH_MIG = lib.IBV_EVENT_PATH_MIG
    PATH_MIG_ERR = lib.IBV_EVENT_PATH_MIG_ERR
    DEVICE_FATAL = lib.IBV_EVENT_DEVICE_FATAL
    PORT_ACTIVE = lib.IBV_EVENT_PORT_ACTIVE
    PORT_ERR = lib.IBV_EVENT_PORT_ERR
    LID_CHANGE = lib.IBV_EVENT_LID_CHANGE
    PKEY_CHANGE = lib.IBV_EVENT_PKEY_CHANGE
    SM_CHANGE = lib.IBV_EVENT_SM_CHANGE
    SRQ_ERR = lib.IBV_EVENT_SRQ_ERR
    SRQ_LIMIT_REACHED = lib.IBV_EVENT_SRQ_LIMIT_REACHED
    QP_LAST_WQE_REACHED = lib.IBV_EVENT_QP_LAST_WQE_REACHED
    CLIENT_REREGISTER = lib.IBV_EVENT_CLIENT_REREGISTER
    GID_CHANGE = lib.IBV_EVENT_GID_CHANGE
    WQ_FATAL = lib.IBV_EVENT_WQ_FATAL
    if lib.PVL_HAS_DEVICE_SPEED_CHANGE > 0:
        DEVICE_SPEED_CHANGE = lib.IBV_EVENT_DEVICE_SPEED_CHANGE


class Rate(IntEnum):
    """Static rates of an address vector (``enum ibv_rate``); the codes are not in the order of the rates."""

    RATE_MAX = lib.IBV_RATE_MAX
    RATE_2_5_GBPS = lib.IBV_RATE_2_5_GBPS
    RATE_10_GBPS = lib.IBV_RATE_10_GBPS
    RATE_30_GBPS = lib.IBV_RATE_30_GBPS
    RATE_5_GBPS = lib.IBV_RATE_5_GBPS
    RATE_20_GBPS = lib.IBV_RATE_20_GBPS
    RATE_40_GBPS = lib.IBV_RATE_40_GBPS
    RATE_60_GBPS = lib.IBV_RATE_60_GBPS
    RATE_80_GBPS = lib.IBV_RATE_80_GBPS
    RATE_120_GBPS = lib.IBV_RATE_120_GBPS
    RATE_14_GBPS = lib.IBV_RATE_14_GBPS
    RATE_56_GBPS = lib.IBV_RATE_56_GBPS
    RATE_112_GBPS = lib.IBV_RATE_112_GBPS
    RATE_168_GBPS = lib.IBV_RATE_168_GBPS
    RATE_25_GBPS = lib.IBV_RATE_25_GBPS
    RATE_100_GBPS = lib.IBV_RATE_100_GBPS
    RATE_200_GBPS = lib.IBV_RATE_200_GBPS
    RATE_300_GBPS = lib.IBV_RATE_300_GBPS
    RATE_28_GBPS = lib.IBV_RATE_28_GBPS
    RATE_50_GBPS = lib.IBV_RATE_50_GBPS
    RATE_400_GBPS = lib.IBV_RATE_400_GBPS
    RATE_600_GBPS = lib.IBV_RATE_600_GBPS
    if lib.PVL_HAS_RATE_800 > 0:
        RATE_800_GBPS = lib.IBV_RATE_800_GBPS
        RATE_1200_GBPS = lib.IBV_RATE_1200_GBPS


class ForkStatus(IntEnum):
    """Whether ``fork`` is safe beside registered memory (``enum ibv_fork_status``)."""

    DISABLED = lib.IBV_FORK_DISABLED if lib.PVL_HAS_FORK_STATUS > 0 else 0
    ENABLED = lib.IBV_FORK_ENABLED if lib.PVL_HAS_FORK_STATUS > 0 else 1
    UNNEEDED = lib.IBV_FORK_UNNEEDED if lib.PVL_HAS_FORK_STATUS > 0 else 2
