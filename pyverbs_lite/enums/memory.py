"""Memory: regions, windows, device memory, domains."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from ..ffi import lib

__all__ = [
    "AccessFlags",
    "AdviseMRAdvice",
    "AdviseMRFlags",
    "DMAHInitAttrMask",
    "DMMask",
    "MRInitAttrMask",
    "MWType",
    "ParentDomainInitAttrMask",
    "ReregMRErrCode",
    "ReregMRFlags",
    "TPHMemType",
    "XRCDInitAttrMask",
]


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
    if lib.PVL_HAS_FLUSH > 0:
        FLUSH_GLOBAL = lib.IBV_ACCESS_FLUSH_GLOBAL
        FLUSH_PERSISTENT = lib.IBV_ACCESS_FLUSH_PERSISTENT
    RELAXED_ORDERING = lib.IBV_ACCESS_RELAXED_ORDERING


class ReregMRFlags(IntFlag):
    """What ``ibv_rereg_mr`` changes (``enum ibv_rereg_mr_flags``)."""

    CHANGE_TRANSLATION = lib.IBV_REREG_MR_CHANGE_TRANSLATION
    CHANGE_PD = lib.IBV_REREG_MR_CHANGE_PD
    CHANGE_ACCESS = lib.IBV_REREG_MR_CHANGE_ACCESS
    FLAGS_SUPPORTED = lib.IBV_REREG_MR_FLAGS_SUPPORTED


class ReregMRErrCode(IntEnum):
    """How ``ibv_rereg_mr`` failed, and so what the MR is worth now (``enum ibv_rereg_mr_err_code``)."""

    INPUT = lib.IBV_REREG_MR_ERR_INPUT
    DONT_FORK_NEW = lib.IBV_REREG_MR_ERR_DONT_FORK_NEW
    DO_FORK_OLD = lib.IBV_REREG_MR_ERR_DO_FORK_OLD
    CMD = lib.IBV_REREG_MR_ERR_CMD
    CMD_AND_DO_FORK_NEW = lib.IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW


class AdviseMRAdvice(IntEnum):
    """What ``ibv_advise_mr`` recommends (``enum ibv_advise_mr_advice``)."""

    PREFETCH = lib.IBV_ADVISE_MR_ADVICE_PREFETCH
    PREFETCH_WRITE = lib.IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE
    if lib.PVL_HAS_ADVISE_MR_NO_FAULT > 0:
        PREFETCH_NO_FAULT = lib.IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT


class AdviseMRFlags(IntFlag):
    """Whether ``ibv_advise_mr`` waits until the advice is followed (``IBV_ADVISE_MR_FLAG_*``)."""

    FLUSH = lib.IBV_ADVISE_MR_FLAG_FLUSH


class MRInitAttrMask(IntFlag):
    """Which members of ``ibv_mr_init_attr`` are valid (``enum ibv_mr_init_attr_mask``)."""

    IOVA = lib.IBV_REG_MR_MASK_IOVA if lib.PVL_HAS_REG_MR_EX > 0 else 1 << 0
    ADDR = lib.IBV_REG_MR_MASK_ADDR if lib.PVL_HAS_REG_MR_EX > 0 else 1 << 1
    FD = lib.IBV_REG_MR_MASK_FD if lib.PVL_HAS_REG_MR_EX > 0 else 1 << 2
    FD_OFFSET = lib.IBV_REG_MR_MASK_FD_OFFSET if lib.PVL_HAS_REG_MR_EX > 0 else 1 << 3
    DMAH = lib.IBV_REG_MR_MASK_DMAH if lib.PVL_HAS_REG_MR_EX > 0 else 1 << 4
    if lib.PVL_HAS_ALLOC_BUF > 0:
        BUF = lib.IBV_REG_MR_MASK_BUF


class MWType(IntEnum):
    """Memory windows (``enum ibv_mw_type``): type 1 is bound by a verb, type 2 by a work request."""

    TYPE_1 = lib.IBV_MW_TYPE_1
    TYPE_2 = lib.IBV_MW_TYPE_2


class DMMask(IntFlag):
    """Which members of ``ibv_dm`` are valid (``enum ibv_dm_mask``)."""

    HANDLE = lib.IBV_DM_MASK_HANDLE if lib.PVL_HAS_IMPORT_DM > 0 else 1 << 0


class XRCDInitAttrMask(IntFlag):
    """Which members of ``ibv_xrcd_init_attr`` are valid (``enum ibv_xrcd_init_attr_mask``)."""

    FD = lib.IBV_XRCD_INIT_ATTR_FD
    OFLAGS = lib.IBV_XRCD_INIT_ATTR_OFLAGS
    RESERVED = lib.IBV_XRCD_INIT_ATTR_RESERVED


class ParentDomainInitAttrMask(IntFlag):
    """Which members of ``ibv_parent_domain_init_attr`` are valid (``enum ibv_parent_domain_init_attr_mask``)."""

    ALLOCATORS = lib.IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
    PD_CONTEXT = lib.IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT
    if lib.PVL_HAS_CC_UNPROTECTED_ALLOC > 0:
        ALLOW_CC_UNPROTECTED_ALLOC = lib.IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC


class DMAHInitAttrMask(IntFlag):
    """Which members of ``ibv_dmah_init_attr`` are valid (``enum ibv_dmah_init_attr_mask``)."""

    CPU_ID = lib.IBV_DMAH_INIT_ATTR_MASK_CPU_ID if lib.PVL_HAS_DMAH > 0 else 1 << 0
    PH = lib.IBV_DMAH_INIT_ATTR_MASK_PH if lib.PVL_HAS_DMAH > 0 else 1 << 1
    TPH_MEM_TYPE = lib.IBV_DMAH_INIT_ATTR_MASK_TPH_MEM_TYPE if lib.PVL_HAS_DMAH > 0 else 1 << 2


class TPHMemType(IntEnum):
    """Which memory a DMA handle is for (``enum ibv_tph_mem_type``): volatile or persistent."""

    VM = lib.IBV_TPH_MEM_TYPE_VM if lib.PVL_HAS_DMAH > 0 else 0
    PM = lib.IBV_TPH_MEM_TYPE_PM if lib.PVL_HAS_DMAH > 0 else 1
