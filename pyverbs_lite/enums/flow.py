"""Flow steering, flow actions, counters."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from ..ffi import lib

__all__ = [
    "CounterDescription",
    "FlowActionESPFlags",
    "FlowActionESPIVAlgo",
    "FlowActionESPKeymat",
    "FlowActionESPMask",
    "FlowActionESPReplay",
    "FlowAttrType",
    "FlowFlags",
    "FlowSpecType",
    "ReadCountersFlags",
]


class FlowFlags(IntFlag):
    """How a flow rule is applied (``enum ibv_flow_flags``)."""

    DONT_TRAP = lib.IBV_FLOW_ATTR_FLAGS_DONT_TRAP
    EGRESS = lib.IBV_FLOW_ATTR_FLAGS_EGRESS


class FlowAttrType(IntEnum):
    """What a flow rule catches (``enum ibv_flow_attr_type``)."""

    NORMAL = lib.IBV_FLOW_ATTR_NORMAL
    ALL_DEFAULT = lib.IBV_FLOW_ATTR_ALL_DEFAULT
    MC_DEFAULT = lib.IBV_FLOW_ATTR_MC_DEFAULT
    SNIFFER = lib.IBV_FLOW_ATTR_SNIFFER


class FlowSpecType(IntEnum):
    """The parts of a flow rule (``enum ibv_flow_spec_type``); ``INNER`` is or-ed to those inside a tunnel."""

    ETH = lib.IBV_FLOW_SPEC_ETH
    IPV4 = lib.IBV_FLOW_SPEC_IPV4
    IPV6 = lib.IBV_FLOW_SPEC_IPV6
    IPV4_EXT = lib.IBV_FLOW_SPEC_IPV4_EXT
    ESP = lib.IBV_FLOW_SPEC_ESP
    TCP = lib.IBV_FLOW_SPEC_TCP
    UDP = lib.IBV_FLOW_SPEC_UDP
    VXLAN_TUNNEL = lib.IBV_FLOW_SPEC_VXLAN_TUNNEL
    GRE = lib.IBV_FLOW_SPEC_GRE
    MPLS = lib.IBV_FLOW_SPEC_MPLS
    INNER = lib.IBV_FLOW_SPEC_INNER
    ACTION_TAG = lib.IBV_FLOW_SPEC_ACTION_TAG
    ACTION_DROP = lib.IBV_FLOW_SPEC_ACTION_DROP
    ACTION_HANDLE = lib.IBV_FLOW_SPEC_ACTION_HANDLE
    ACTION_COUNT = lib.IBV_FLOW_SPEC_ACTION_COUNT


class FlowActionESPMask(IntFlag):
    """Which optional members of ``ibv_flow_action_esp_attr`` are valid (``enum ibv_flow_action_esp_mask``)."""

    ESN = lib.IBV_FLOW_ACTION_ESP_MASK_ESN


class FlowActionESPFlags(IntFlag):
    """How ESP is processed (``enum ibv_flow_action_esp_flags``); some are 0, the default of their bit."""

    INLINE_CRYPTO = lib.IBV_FLOW_ACTION_ESP_FLAGS_INLINE_CRYPTO
    FULL_OFFLOAD = lib.IBV_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD
    TUNNEL = lib.IBV_FLOW_ACTION_ESP_FLAGS_TUNNEL
    TRANSPORT = lib.IBV_FLOW_ACTION_ESP_FLAGS_TRANSPORT
    DECRYPT = lib.IBV_FLOW_ACTION_ESP_FLAGS_DECRYPT
    ENCRYPT = lib.IBV_FLOW_ACTION_ESP_FLAGS_ENCRYPT
    ESN_NEW_WINDOW = lib.IBV_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW


class FlowActionESPKeymat(IntEnum):
    """The key material of ESP (``enum ibv_flow_action_esp_keymat``)."""

    AES_GCM = lib.IBV_FLOW_ACTION_ESP_KEYMAT_AES_GCM


class FlowActionESPIVAlgo(IntEnum):
    """How the initialization vectors of AES-GCM are made (``enum ibv_flow_action_esp_keymat_aes_gcm_iv_algo``)."""

    SEQ = lib.IBV_FLOW_ACTION_IV_ALGO_SEQ


class FlowActionESPReplay(IntEnum):
    """How replayed packets are recognized (``enum ibv_flow_action_esp_replay``)."""

    NONE = lib.IBV_FLOW_ACTION_ESP_REPLAY_NONE
    BMP = lib.IBV_FLOW_ACTION_ESP_REPLAY_BMP


class CounterDescription(IntEnum):
    """What a counter counts (``enum ibv_counter_description``)."""

    PACKETS = lib.IBV_COUNTER_PACKETS
    BYTES = lib.IBV_COUNTER_BYTES


class ReadCountersFlags(IntFlag):
    """How counters are read (``enum ibv_read_counters_flags``)."""

    PREFER_CACHED = lib.IBV_READ_COUNTERS_ATTR_PREFER_CACHED
