"""The enums of ``infiniband/verbs.h``, valued by the compiler; names drop the C prefix."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from .ffi import lib

__all__ = [
    "MTU",
    "AccessFlags",
    "AtomicCap",
    "EventType",
    "GIDType",
    "LinkLayer",
    "MigState",
    "NodeType",
    "PortState",
    "QPAttrMask",
    "QPState",
    "QPType",
    "SendFlags",
    "TransportType",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
    "WROpcode",
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
        return int(self.name.removeprefix("MTU_"))

    @classmethod
    def from_bytes_size(cls, nbytes: int) -> MTU:
        """Return the code for a size in bytes (256, 512, 1024, 2048 or 4096).

        Raises:
            ValueError: no code stands for that size.

        """
        for member in cls:
            if member.bytes == nbytes:
                return member
        raise ValueError(f"path MTU must be one of {[m.bytes for m in cls]} bytes, not {nbytes}")


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


class GIDType(IntEnum):
    """The protocol of a GID table row (``enum ibv_gid_type``, as ``ibv_query_gid_table`` reports it)."""

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


class AccessFlags(IntFlag):
    """What a memory region or a QP allows (``enum ibv_access_flags``)."""

    LOCAL_WRITE = lib.IBV_ACCESS_LOCAL_WRITE
    REMOTE_WRITE = lib.IBV_ACCESS_REMOTE_WRITE
    REMOTE_READ = lib.IBV_ACCESS_REMOTE_READ
    REMOTE_ATOMIC = lib.IBV_ACCESS_REMOTE_ATOMIC
    MW_BIND = lib.IBV_ACCESS_MW_BIND
    ZERO_BASED = lib.IBV_ACCESS_ZERO_BASED
    ON_DEMAND = lib.IBV_ACCESS_ON_DEMAND
    HUGETLB = lib.IBV_ACCESS_HUGETLB
    RELAXED_ORDERING = lib.IBV_ACCESS_RELAXED_ORDERING


class WCStatus(IntEnum):
    """How a work request ended (``enum ibv_wc_status``)."""

    SUCCESS = lib.IBV_WC_SUCCESS
    LOC_LEN_ERR = lib.IBV_WC_LOC_LEN_ERR
    LOC_QP_OP_ERR = lib.IBV_WC_LOC_QP_OP_ERR
    LOC_EEC_OP_ERR = lib.IBV_WC_LOC_EEC_OP_ERR
    LOC_PROT_ERR = lib.IBV_WC_LOC_PROT_ERR
    WR_FLUSH_ERR = lib.IBV_WC_WR_FLUSH_ERR
    MW_BIND_ERR = lib.IBV_WC_MW_BIND_ERR
    BAD_RESP_ERR = lib.IBV_WC_BAD_RESP_ERR
    LOC_ACCESS_ERR = lib.IBV_WC_LOC_ACCESS_ERR
    REM_INV_REQ_ERR = lib.IBV_WC_REM_INV_REQ_ERR
    REM_ACCESS_ERR = lib.IBV_WC_REM_ACCESS_ERR
    REM_OP_ERR = lib.IBV_WC_REM_OP_ERR
    RETRY_EXC_ERR = lib.IBV_WC_RETRY_EXC_ERR
    RNR_RETRY_EXC_ERR = lib.IBV_WC_RNR_RETRY_EXC_ERR
    LOC_RDD_VIOL_ERR = lib.IBV_WC_LOC_RDD_VIOL_ERR
    REM_INV_RD_REQ_ERR = lib.IBV_WC_REM_INV_RD_REQ_ERR
    REM_ABORT_ERR = lib.IBV_WC_REM_ABORT_ERR
    INV_EECN_ERR = lib.IBV_WC_INV_EECN_ERR
    INV_EEC_STATE_ERR = lib.IBV_WC_INV_EEC_STATE_ERR
    FATAL_ERR = lib.IBV_WC_FATAL_ERR
    RESP_TIMEOUT_ERR = lib.IBV_WC_RESP_TIMEOUT_ERR
    GENERAL_ERR = lib.IBV_WC_GENERAL_ERR
    TM_ERR = lib.IBV_WC_TM_ERR
    TM_RNDV_INCOMPLETE = lib.IBV_WC_TM_RNDV_INCOMPLETE


class WCOpcode(IntEnum):
    """What completed (``enum ibv_wc_opcode``); valid only where the status is ``SUCCESS``."""

    SEND = lib.IBV_WC_SEND
    RDMA_WRITE = lib.IBV_WC_RDMA_WRITE
    RDMA_READ = lib.IBV_WC_RDMA_READ
    COMP_SWAP = lib.IBV_WC_COMP_SWAP
    FETCH_ADD = lib.IBV_WC_FETCH_ADD
    BIND_MW = lib.IBV_WC_BIND_MW
    LOCAL_INV = lib.IBV_WC_LOCAL_INV
    TSO = lib.IBV_WC_TSO
    RECV = lib.IBV_WC_RECV
    RECV_RDMA_WITH_IMM = lib.IBV_WC_RECV_RDMA_WITH_IMM
    TM_ADD = lib.IBV_WC_TM_ADD
    TM_DEL = lib.IBV_WC_TM_DEL
    TM_SYNC = lib.IBV_WC_TM_SYNC
    TM_RECV = lib.IBV_WC_TM_RECV
    TM_NO_TAG = lib.IBV_WC_TM_NO_TAG
    DRIVER1 = lib.IBV_WC_DRIVER1


class WCFlags(IntFlag):
    """Which optional members of a work completion are valid (``enum ibv_wc_flags``)."""

    GRH = lib.IBV_WC_GRH
    WITH_IMM = lib.IBV_WC_WITH_IMM
    IP_CSUM_OK = lib.IBV_WC_IP_CSUM_OK
    WITH_INV = lib.IBV_WC_WITH_INV
    TM_SYNC_REQ = lib.IBV_WC_TM_SYNC_REQ
    TM_MATCH = lib.IBV_WC_TM_MATCH
    TM_DATA_VALID = lib.IBV_WC_TM_DATA_VALID


class QPType(IntEnum):
    """The transport service of a QP (``enum ibv_qp_type``)."""

    RC = lib.IBV_QPT_RC
    UC = lib.IBV_QPT_UC
    UD = lib.IBV_QPT_UD
    RAW_PACKET = lib.IBV_QPT_RAW_PACKET
    XRC_SEND = lib.IBV_QPT_XRC_SEND
    XRC_RECV = lib.IBV_QPT_XRC_RECV
    DRIVER = lib.IBV_QPT_DRIVER


class QPState(IntEnum):
    """The state of a QP (``enum ibv_qp_state``)."""

    RESET = lib.IBV_QPS_RESET
    INIT = lib.IBV_QPS_INIT
    RTR = lib.IBV_QPS_RTR
    RTS = lib.IBV_QPS_RTS
    SQD = lib.IBV_QPS_SQD
    SQE = lib.IBV_QPS_SQE
    ERR = lib.IBV_QPS_ERR
    UNKNOWN = lib.IBV_QPS_UNKNOWN


class MigState(IntEnum):
    """Automatic path migration (``enum ibv_mig_state``)."""

    MIGRATED = lib.IBV_MIG_MIGRATED
    REARM = lib.IBV_MIG_REARM
    ARMED = lib.IBV_MIG_ARMED


class QPAttrMask(IntFlag):
    """The groups of QP attributes that ``ibv_modify_qp`` takes (``enum ibv_qp_attr_mask``)."""

    STATE = lib.IBV_QP_STATE
    CUR_STATE = lib.IBV_QP_CUR_STATE
    EN_SQD_ASYNC_NOTIFY = lib.IBV_QP_EN_SQD_ASYNC_NOTIFY
    ACCESS_FLAGS = lib.IBV_QP_ACCESS_FLAGS
    PKEY_INDEX = lib.IBV_QP_PKEY_INDEX
    PORT = lib.IBV_QP_PORT
    QKEY = lib.IBV_QP_QKEY
    AV = lib.IBV_QP_AV
    PATH_MTU = lib.IBV_QP_PATH_MTU
    TIMEOUT = lib.IBV_QP_TIMEOUT
    RETRY_CNT = lib.IBV_QP_RETRY_CNT
    RNR_RETRY = lib.IBV_QP_RNR_RETRY
    RQ_PSN = lib.IBV_QP_RQ_PSN
    MAX_QP_RD_ATOMIC = lib.IBV_QP_MAX_QP_RD_ATOMIC
    ALT_PATH = lib.IBV_QP_ALT_PATH
    MIN_RNR_TIMER = lib.IBV_QP_MIN_RNR_TIMER
    SQ_PSN = lib.IBV_QP_SQ_PSN
    MAX_DEST_RD_ATOMIC = lib.IBV_QP_MAX_DEST_RD_ATOMIC
    PATH_MIG_STATE = lib.IBV_QP_PATH_MIG_STATE
    CAP = lib.IBV_QP_CAP
    DEST_QPN = lib.IBV_QP_DEST_QPN
    RATE_LIMIT = lib.IBV_QP_RATE_LIMIT


class WROpcode(IntEnum):
    """What a work request asks for (``enum ibv_wr_opcode``)."""

    RDMA_WRITE = lib.IBV_WR_RDMA_WRITE
    RDMA_WRITE_WITH_IMM = lib.IBV_WR_RDMA_WRITE_WITH_IMM
    SEND = lib.IBV_WR_SEND
    SEND_WITH_IMM = lib.IBV_WR_SEND_WITH_IMM
    RDMA_READ = lib.IBV_WR_RDMA_READ
    ATOMIC_CMP_AND_SWP = lib.IBV_WR_ATOMIC_CMP_AND_SWP
    ATOMIC_FETCH_AND_ADD = lib.IBV_WR_ATOMIC_FETCH_AND_ADD
    LOCAL_INV = lib.IBV_WR_LOCAL_INV
    BIND_MW = lib.IBV_WR_BIND_MW
    SEND_WITH_INV = lib.IBV_WR_SEND_WITH_INV
    TSO = lib.IBV_WR_TSO
    DRIVER1 = lib.IBV_WR_DRIVER1


class SendFlags(IntFlag):
    """How a send request is treated (``enum ibv_send_flags``)."""

    FENCE = lib.IBV_SEND_FENCE
    SIGNALED = lib.IBV_SEND_SIGNALED
    SOLICITED = lib.IBV_SEND_SOLICITED
    INLINE = lib.IBV_SEND_INLINE
    IP_CSUM = lib.IBV_SEND_IP_CSUM
