"""Extended device attributes: on-demand paging, PCI atomics, raw packets, tag matching, receive hashing."""

from __future__ import annotations

from enum import IntFlag

from ..ffi import lib

__all__ = [
    "ODPGeneralCaps",
    "ODPTransportCaps",
    "PCIAtomicOpSize",
    "RXHashFields",
    "RXHashFunction",
    "RawPacketCaps",
    "TMCapFlags",
    "ValuesMask",
]


class ODPGeneralCaps(IntFlag):
    """Whether on-demand paging is there, and with an implicit MR (``enum ibv_odp_general_caps``)."""

    SUPPORT = lib.IBV_ODP_SUPPORT
    SUPPORT_IMPLICIT = lib.IBV_ODP_SUPPORT_IMPLICIT


class ODPTransportCaps(IntFlag):
    """Which operations of a transport can use on-demand paging (``enum ibv_odp_transport_cap_bits``)."""

    SEND = lib.IBV_ODP_SUPPORT_SEND
    RECV = lib.IBV_ODP_SUPPORT_RECV
    WRITE = lib.IBV_ODP_SUPPORT_WRITE
    READ = lib.IBV_ODP_SUPPORT_READ
    ATOMIC = lib.IBV_ODP_SUPPORT_ATOMIC
    SRQ_RECV = lib.IBV_ODP_SUPPORT_SRQ_RECV
    if lib.PVL_HAS_ODP_FLUSH > 0:
        FLUSH = lib.IBV_ODP_SUPPORT_FLUSH
        ATOMIC_WRITE = lib.IBV_ODP_SUPPORT_ATOMIC_WRITE


class PCIAtomicOpSize(IntFlag):
    """Which sizes of PCI atomics a device can do (``enum ibv_pci_atomic_op_size``)."""

    OPERATION_4_BYTE_SIZE_SUP = lib.IBV_PCI_ATOMIC_OPERATION_4_BYTE_SIZE_SUP
    OPERATION_8_BYTE_SIZE_SUP = lib.IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP
    OPERATION_16_BYTE_SIZE_SUP = lib.IBV_PCI_ATOMIC_OPERATION_16_BYTE_SIZE_SUP


class RawPacketCaps(IntFlag):
    """What a device can do for raw packets (``enum ibv_raw_packet_caps``)."""

    CVLAN_STRIPPING = lib.IBV_RAW_PACKET_CAP_CVLAN_STRIPPING
    SCATTER_FCS = lib.IBV_RAW_PACKET_CAP_SCATTER_FCS
    IP_CSUM = lib.IBV_RAW_PACKET_CAP_IP_CSUM
    DELAY_DROP = lib.IBV_RAW_PACKET_CAP_DELAY_DROP


class TMCapFlags(IntFlag):
    """Where a device can match tags (``enum ibv_tm_cap_flags``)."""

    RC = lib.IBV_TM_CAP_RC


class RXHashFunction(IntFlag):
    """How incoming packets are hashed (``enum ibv_rx_hash_function_flags``)."""

    TOEPLITZ = lib.IBV_RX_HASH_FUNC_TOEPLITZ


class RXHashFields(IntFlag):
    """Which fields of incoming packets are hashed (``enum ibv_rx_hash_fields``)."""

    SRC_IPV4 = lib.IBV_RX_HASH_SRC_IPV4
    DST_IPV4 = lib.IBV_RX_HASH_DST_IPV4
    SRC_IPV6 = lib.IBV_RX_HASH_SRC_IPV6
    DST_IPV6 = lib.IBV_RX_HASH_DST_IPV6
    SRC_PORT_TCP = lib.IBV_RX_HASH_SRC_PORT_TCP
    DST_PORT_TCP = lib.IBV_RX_HASH_DST_PORT_TCP
    SRC_PORT_UDP = lib.IBV_RX_HASH_SRC_PORT_UDP
    DST_PORT_UDP = lib.IBV_RX_HASH_DST_PORT_UDP
    IPSEC_SPI = lib.IBV_RX_HASH_IPSEC_SPI
    INNER = lib.IBV_RX_HASH_INNER


class ValuesMask(IntFlag):
    """Which members of ``ibv_values_ex`` are asked for (``enum ibv_values_mask``)."""

    RAW_CLOCK = lib.IBV_VALUES_MASK_RAW_CLOCK
    RESERVED = lib.IBV_VALUES_MASK_RESERVED
