"""Queue pairs and their work requests."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from ..ffi import lib

__all__ = [
    "DataInOrderCaps",
    "DataInOrderFlags",
    "MigState",
    "PlacementType",
    "QPAttrMask",
    "QPCreateFlags",
    "QPInitAttrMask",
    "QPOpenAttrMask",
    "QPState",
    "QPType",
    "SelectivityLevel",
    "SendFlags",
    "SendOpsFlags",
    "WROpcode",
]


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


class QPInitAttrMask(IntFlag):
    """Which members of ``ibv_qp_init_attr_ex`` are valid (``enum ibv_qp_init_attr_mask``)."""

    PD = lib.IBV_QP_INIT_ATTR_PD
    XRCD = lib.IBV_QP_INIT_ATTR_XRCD
    CREATE_FLAGS = lib.IBV_QP_INIT_ATTR_CREATE_FLAGS
    MAX_TSO_HEADER = lib.IBV_QP_INIT_ATTR_MAX_TSO_HEADER
    IND_TABLE = lib.IBV_QP_INIT_ATTR_IND_TABLE
    RX_HASH = lib.IBV_QP_INIT_ATTR_RX_HASH
    SEND_OPS_FLAGS = lib.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS


class QPCreateFlags(IntFlag):
    """How an extended QP is made (``enum ibv_qp_create_flags``)."""

    BLOCK_SELF_MCAST_LB = lib.IBV_QP_CREATE_BLOCK_SELF_MCAST_LB
    SCATTER_FCS = lib.IBV_QP_CREATE_SCATTER_FCS
    CVLAN_STRIPPING = lib.IBV_QP_CREATE_CVLAN_STRIPPING
    SOURCE_QPN = lib.IBV_QP_CREATE_SOURCE_QPN
    PCI_WRITE_END_PADDING = lib.IBV_QP_CREATE_PCI_WRITE_END_PADDING


class SendOpsFlags(IntFlag):
    """Which ``ibv_wr_*`` calls a QP will be used with (``enum ibv_qp_create_send_ops_flags``)."""

    WITH_RDMA_WRITE = lib.IBV_QP_EX_WITH_RDMA_WRITE
    WITH_RDMA_WRITE_WITH_IMM = lib.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    WITH_SEND = lib.IBV_QP_EX_WITH_SEND
    WITH_SEND_WITH_IMM = lib.IBV_QP_EX_WITH_SEND_WITH_IMM
    WITH_RDMA_READ = lib.IBV_QP_EX_WITH_RDMA_READ
    WITH_ATOMIC_CMP_AND_SWP = lib.IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    WITH_ATOMIC_FETCH_AND_ADD = lib.IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    WITH_LOCAL_INV = lib.IBV_QP_EX_WITH_LOCAL_INV
    WITH_BIND_MW = lib.IBV_QP_EX_WITH_BIND_MW
    WITH_SEND_WITH_INV = lib.IBV_QP_EX_WITH_SEND_WITH_INV
    WITH_TSO = lib.IBV_QP_EX_WITH_TSO
    if lib.PVL_HAS_FLUSH > 0:
        WITH_FLUSH = lib.IBV_QP_EX_WITH_FLUSH
    if lib.PVL_HAS_ATOMIC_WRITE > 0:
        WITH_ATOMIC_WRITE = lib.IBV_QP_EX_WITH_ATOMIC_WRITE


class QPOpenAttrMask(IntFlag):
    """Which members of ``ibv_qp_open_attr`` are valid (``enum ibv_qp_open_attr_mask``)."""

    NUM = lib.IBV_QP_OPEN_ATTR_NUM
    XRCD = lib.IBV_QP_OPEN_ATTR_XRCD
    CONTEXT = lib.IBV_QP_OPEN_ATTR_CONTEXT
    TYPE = lib.IBV_QP_OPEN_ATTR_TYPE
    RESERVED = lib.IBV_QP_OPEN_ATTR_RESERVED


class DataInOrderFlags(IntFlag):
    """How ``ibv_query_qp_data_in_order`` answers (``enum ibv_query_qp_data_in_order_flags``)."""

    RETURN_CAPS = lib.IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS if lib.PVL_HAS_DATA_IN_ORDER_CAPS > 0 else 1 << 0
    if lib.PVL_HAS_DATA_IN_ORDER_DEVICE_ONLY > 0:
        DEVICE_ONLY = lib.IBV_QUERY_QP_DATA_IN_ORDER_DEVICE_ONLY


class DataInOrderCaps(IntFlag):
    """What arrives in order (``enum ibv_query_qp_data_in_order_caps``)."""

    WHOLE_MSG = lib.IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG if lib.PVL_HAS_DATA_IN_ORDER_CAPS > 0 else 1 << 0
    ALIGNED_128_BYTES = (
        lib.IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES if lib.PVL_HAS_DATA_IN_ORDER_CAPS > 0 else 1 << 1
    )


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
    if lib.PVL_HAS_FLUSH > 0:
        FLUSH = lib.IBV_WR_FLUSH
    if lib.PVL_HAS_ATOMIC_WRITE > 0:
        ATOMIC_WRITE = lib.IBV_WR_ATOMIC_WRITE


class SendFlags(IntFlag):
    """How a send request is treated (``enum ibv_send_flags``)."""

    FENCE = lib.IBV_SEND_FENCE
    SIGNALED = lib.IBV_SEND_SIGNALED
    SOLICITED = lib.IBV_SEND_SOLICITED
    INLINE = lib.IBV_SEND_INLINE
    IP_CSUM = lib.IBV_SEND_IP_CSUM


class PlacementType(IntFlag):
    """How far a flush takes the data (``enum ibv_placement_type``): to where all see it, or to persistent memory."""

    GLOBAL = lib.IBV_FLUSH_GLOBAL if lib.PVL_HAS_FLUSH > 0 else 1 << 0
    PERSISTENT = lib.IBV_FLUSH_PERSISTENT if lib.PVL_HAS_FLUSH > 0 else 1 << 1


class SelectivityLevel(IntEnum):
    """How much a flush covers (``enum ibv_selectivity_level``): a range, or the whole MR."""

    RANGE = lib.IBV_FLUSH_RANGE if lib.PVL_HAS_FLUSH > 0 else 0
    MR = lib.IBV_FLUSH_MR if lib.PVL_HAS_FLUSH > 0 else 1
