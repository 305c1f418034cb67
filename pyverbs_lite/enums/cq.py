"""Completions."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from ..ffi import lib

__all__ = [
    "CQAttrMask",
    "CQInitAttrMask",
    "CreateCQAttrFlags",
    "CreateCQWCFlags",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
]


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
    if lib.PVL_HAS_FLUSH > 0:
        FLUSH = lib.IBV_WC_FLUSH
    if lib.PVL_HAS_ATOMIC_WRITE > 0:
        ATOMIC_WRITE = lib.IBV_WC_ATOMIC_WRITE
    RECV = lib.IBV_WC_RECV
    RECV_RDMA_WITH_IMM = lib.IBV_WC_RECV_RDMA_WITH_IMM
    TM_ADD = lib.IBV_WC_TM_ADD
    TM_DEL = lib.IBV_WC_TM_DEL
    TM_SYNC = lib.IBV_WC_TM_SYNC
    TM_RECV = lib.IBV_WC_TM_RECV
    TM_NO_TAG = lib.IBV_WC_TM_NO_TAG
    DRIVER1 = lib.IBV_WC_DRIVER1
    if lib.PVL_HAS_WC_DRIVER2 > 0:
        DRIVER2 = lib.IBV_WC_DRIVER2
    if lib.PVL_HAS_WC_DRIVER3 > 0:
        DRIVER3 = lib.IBV_WC_DRIVER3


class WCFlags(IntFlag):
    """Which optional members of a work completion are valid (``enum ibv_wc_flags``)."""

    GRH = lib.IBV_WC_GRH
    WITH_IMM = lib.IBV_WC_WITH_IMM
    IP_CSUM_OK = lib.IBV_WC_IP_CSUM_OK
    WITH_INV = lib.IBV_WC_WITH_INV
    TM_SYNC_REQ = lib.IBV_WC_TM_SYNC_REQ
    TM_MATCH = lib.IBV_WC_TM_MATCH
    TM_DATA_VALID = lib.IBV_WC_TM_DATA_VALID


class CreateCQWCFlags(IntFlag):
    """Which fields an extended CQ can read (``enum ibv_create_cq_wc_flags``)."""

    WITH_BYTE_LEN = lib.IBV_WC_EX_WITH_BYTE_LEN
    WITH_IMM = lib.IBV_WC_EX_WITH_IMM
    WITH_QP_NUM = lib.IBV_WC_EX_WITH_QP_NUM
    WITH_SRC_QP = lib.IBV_WC_EX_WITH_SRC_QP
    WITH_SLID = lib.IBV_WC_EX_WITH_SLID
    WITH_SL = lib.IBV_WC_EX_WITH_SL
    WITH_DLID_PATH_BITS = lib.IBV_WC_EX_WITH_DLID_PATH_BITS
    WITH_COMPLETION_TIMESTAMP = lib.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    WITH_CVLAN = lib.IBV_WC_EX_WITH_CVLAN
    WITH_FLOW_TAG = lib.IBV_WC_EX_WITH_FLOW_TAG
    WITH_TM_INFO = lib.IBV_WC_EX_WITH_TM_INFO
    WITH_COMPLETION_TIMESTAMP_WALLCLOCK = lib.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK
    STANDARD_FLAGS = lib.IBV_WC_STANDARD_FLAGS


class CreateCQAttrFlags(IntFlag):
    """How an extended CQ is made (``enum ibv_create_cq_attr_flags``)."""

    SINGLE_THREADED = lib.IBV_CREATE_CQ_ATTR_SINGLE_THREADED
    IGNORE_OVERRUN = lib.IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN


class CQInitAttrMask(IntFlag):
    """Which members of ``ibv_cq_init_attr_ex`` are valid (``enum ibv_cq_init_attr_mask``)."""

    FLAGS = lib.IBV_CQ_INIT_ATTR_MASK_FLAGS
    if lib.PVL_HAS_CQ_PARENT_DOMAIN > 0:
        PD = lib.IBV_CQ_INIT_ATTR_MASK_PD


class CQAttrMask(IntFlag):
    """What ``ibv_modify_cq`` changes (``enum ibv_cq_attr_mask``)."""

    MODERATE = lib.IBV_CQ_ATTR_MODERATE
    RESERVED = lib.IBV_CQ_ATTR_RESERVED
