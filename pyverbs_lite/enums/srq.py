"""Shared receive queues, and work queues outside a QP."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from ..ffi import lib

__all__ = [
    "IndTableInitAttrMask",
    "OpsFlags",
    "OpsWROpcode",
    "SRQAttrMask",
    "SRQInitAttrMask",
    "SRQType",
    "WQAttrMask",
    "WQFlags",
    "WQInitAttrMask",
    "WQState",
    "WQType",
]


class SRQType(IntEnum):
    """The kind of an SRQ (``enum ibv_srq_type``): basic, for XRC, or one that matches tags."""

    BASIC = lib.IBV_SRQT_BASIC
    XRC = lib.IBV_SRQT_XRC
    TM = lib.IBV_SRQT_TM


class SRQAttrMask(IntFlag):
    """What ``ibv_modify_srq`` changes (``enum ibv_srq_attr_mask``)."""

    MAX_WR = lib.IBV_SRQ_MAX_WR
    LIMIT = lib.IBV_SRQ_LIMIT


class SRQInitAttrMask(IntFlag):
    """Which members of ``ibv_srq_init_attr_ex`` are valid (``enum ibv_srq_init_attr_mask``)."""

    TYPE = lib.IBV_SRQ_INIT_ATTR_TYPE
    PD = lib.IBV_SRQ_INIT_ATTR_PD
    XRCD = lib.IBV_SRQ_INIT_ATTR_XRCD
    CQ = lib.IBV_SRQ_INIT_ATTR_CQ
    TM = lib.IBV_SRQ_INIT_ATTR_TM
    RESERVED = lib.IBV_SRQ_INIT_ATTR_RESERVED


class OpsWROpcode(IntEnum):
    """What is done to the tag list of an SRQ (``enum ibv_ops_wr_opcode``)."""

    TAG_ADD = lib.IBV_WR_TAG_ADD
    TAG_DEL = lib.IBV_WR_TAG_DEL
    TAG_SYNC = lib.IBV_WR_TAG_SYNC


class OpsFlags(IntFlag):
    """How an operation on the tag list is treated (``enum ibv_ops_flags``)."""

    SIGNALED = lib.IBV_OPS_SIGNALED
    TM_SYNC = lib.IBV_OPS_TM_SYNC


class WQType(IntEnum):
    """The kind of a work queue (``enum ibv_wq_type``)."""

    RQ = lib.IBV_WQT_RQ


class WQState(IntEnum):
    """The state of a work queue (``enum ibv_wq_state``)."""

    RESET = lib.IBV_WQS_RESET
    RDY = lib.IBV_WQS_RDY
    ERR = lib.IBV_WQS_ERR
    UNKNOWN = lib.IBV_WQS_UNKNOWN


class WQFlags(IntFlag):
    """How a work queue treats packets (``enum ibv_wq_flags``)."""

    CVLAN_STRIPPING = lib.IBV_WQ_FLAGS_CVLAN_STRIPPING
    SCATTER_FCS = lib.IBV_WQ_FLAGS_SCATTER_FCS
    DELAY_DROP = lib.IBV_WQ_FLAGS_DELAY_DROP
    PCI_WRITE_END_PADDING = lib.IBV_WQ_FLAGS_PCI_WRITE_END_PADDING
    RESERVED = lib.IBV_WQ_FLAGS_RESERVED


class WQInitAttrMask(IntFlag):
    """Which members of ``ibv_wq_init_attr`` are valid (``enum ibv_wq_init_attr_mask``)."""

    FLAGS = lib.IBV_WQ_INIT_ATTR_FLAGS
    RESERVED = lib.IBV_WQ_INIT_ATTR_RESERVED


class WQAttrMask(IntFlag):
    """Which members of ``ibv_wq_attr`` are valid (``enum ibv_wq_attr_mask``)."""

    STATE = lib.IBV_WQ_ATTR_STATE
    CURR_STATE = lib.IBV_WQ_ATTR_CURR_STATE
    FLAGS = lib.IBV_WQ_ATTR_FLAGS
    RESERVED = lib.IBV_WQ_ATTR_RESERVED


class IndTableInitAttrMask(IntFlag):
    """Which members of ``ibv_rwq_ind_table_init_attr`` are valid (``enum ibv_ind_table_init_attr_mask``)."""

    RESERVED = lib.IBV_CREATE_IND_TABLE_RESERVED
