"""The enums say what the compiler says, no more and no less; also where it knows less, or more, than this one."""

import importlib
import importlib.util
import sys
from enum import Enum, IntFlag
from pathlib import Path

import pytest
from cffi import FFI

from pyverbs_lite import enums
from pyverbs_lite.enums import MTU, AccessFlags, GIDType, Rate, SendFlags, WCStatus
from pyverbs_lite.ffi import ffi, lib

ROOT = Path(__file__).resolve().parent.parent

#: class -> C enum, and the prefix that names lose.
C_ENUMS = {
    "AccessFlags": ("ibv_access_flags", "IBV_ACCESS_"),
    "AdviseMRAdvice": ("ibv_advise_mr_advice", "IBV_ADVISE_MR_ADVICE_"),
    "AtomicCap": ("ibv_atomic_cap", "IBV_ATOMIC_"),
    "CMEventType": ("rdma_cm_event_type", "RDMA_CM_EVENT_"),
    "CQAttrMask": ("ibv_cq_attr_mask", "IBV_CQ_ATTR_"),
    "CQInitAttrMask": ("ibv_cq_init_attr_mask", "IBV_CQ_INIT_ATTR_MASK_"),
    "CounterDescription": ("ibv_counter_description", "IBV_COUNTER_"),
    "CreateCQAttrFlags": ("ibv_create_cq_attr_flags", "IBV_CREATE_CQ_ATTR_"),
    "CreateCQWCFlags": ("ibv_create_cq_wc_flags", "IBV_WC_EX_"),
    "DMAHInitAttrMask": ("ibv_dmah_init_attr_mask", "IBV_DMAH_INIT_ATTR_MASK_"),
    "DMMask": ("ibv_dm_mask", "IBV_DM_MASK_"),
    "DataInOrderCaps": ("ibv_query_qp_data_in_order_caps", "IBV_QUERY_QP_DATA_IN_ORDER_"),
    "DataInOrderFlags": ("ibv_query_qp_data_in_order_flags", "IBV_QUERY_QP_DATA_IN_ORDER_"),
    "DeviceCapFlags": ("ibv_device_cap_flags", "IBV_DEVICE_"),
    "EventType": ("ibv_event_type", "IBV_EVENT_"),
    "FlowActionESPFlags": ("ibv_flow_action_esp_flags", "IBV_FLOW_ACTION_ESP_FLAGS_"),
    "FlowActionESPIVAlgo": ("ibv_flow_action_esp_keymat_aes_gcm_iv_algo", "IBV_FLOW_ACTION_IV_ALGO_"),
    "FlowActionESPKeymat": ("ibv_flow_action_esp_keymat", "IBV_FLOW_ACTION_ESP_KEYMAT_"),
    "FlowActionESPMask": ("ibv_flow_action_esp_mask", "IBV_FLOW_ACTION_ESP_MASK_"),
    "FlowActionESPReplay": ("ibv_flow_action_esp_replay", "IBV_FLOW_ACTION_ESP_REPLAY_"),
    "FlowAttrType": ("ibv_flow_attr_type", "IBV_FLOW_ATTR_"),
    "FlowFlags": ("ibv_flow_flags", "IBV_FLOW_ATTR_FLAGS_"),
    "FlowSpecType": ("ibv_flow_spec_type", "IBV_FLOW_SPEC_"),
    "ForkStatus": ("ibv_fork_status", "IBV_FORK_"),
    "GIDType": ("ibv_gid_type", "IBV_GID_TYPE_"),
    "IndTableInitAttrMask": ("ibv_ind_table_init_attr_mask", "IBV_CREATE_IND_TABLE_"),
    "JoinMCAttrMask": ("rdma_cm_join_mc_attr_mask", "RDMA_CM_JOIN_MC_ATTR_"),
    "MCJoinFlags": ("rdma_cm_mc_join_flags", "RDMA_MC_JOIN_FLAG_"),
    "MRInitAttrMask": ("ibv_mr_init_attr_mask", "IBV_REG_MR_MASK_"),
    "MTU": ("ibv_mtu", "IBV_"),
    "MWType": ("ibv_mw_type", "IBV_MW_"),
    "MigState": ("ibv_mig_state", "IBV_MIG_"),
    "NodeType": ("ibv_node_type", "IBV_NODE_"),
    "ODPGeneralCaps": ("ibv_odp_general_caps", "IBV_ODP_"),
    "ODPTransportCaps": ("ibv_odp_transport_cap_bits", "IBV_ODP_SUPPORT_"),
    "OpsFlags": ("ibv_ops_flags", "IBV_OPS_"),
    "OpsWROpcode": ("ibv_ops_wr_opcode", "IBV_WR_"),
    "PCIAtomicOpSize": ("ibv_pci_atomic_op_size", "IBV_PCI_ATOMIC_"),
    "ParentDomainInitAttrMask": ("ibv_parent_domain_init_attr_mask", "IBV_PARENT_DOMAIN_INIT_ATTR_"),
    "PlacementType": ("ibv_placement_type", "IBV_FLUSH_"),
    "PortCapFlags": ("ibv_port_cap_flags", "IBV_PORT_"),
    "PortCapFlags2": ("ibv_port_cap_flags2", "IBV_PORT_"),
    "PortSpace": ("rdma_port_space", "RDMA_PS_"),
    "PortState": ("ibv_port_state", "IBV_PORT_"),
    "QPAttrMask": ("ibv_qp_attr_mask", "IBV_QP_"),
    "QPCreateFlags": ("ibv_qp_create_flags", "IBV_QP_CREATE_"),
    "QPInitAttrMask": ("ibv_qp_init_attr_mask", "IBV_QP_INIT_ATTR_"),
    "QPOpenAttrMask": ("ibv_qp_open_attr_mask", "IBV_QP_OPEN_ATTR_"),
    "QPState": ("ibv_qp_state", "IBV_QPS_"),
    "QPType": ("ibv_qp_type", "IBV_QPT_"),
    "RXHashFields": ("ibv_rx_hash_fields", "IBV_RX_HASH_"),
    "RXHashFunction": ("ibv_rx_hash_function_flags", "IBV_RX_HASH_FUNC_"),
    "Rate": ("ibv_rate", "IBV_"),
    "RawPacketCaps": ("ibv_raw_packet_caps", "IBV_RAW_PACKET_CAP_"),
    "ReadCountersFlags": ("ibv_read_counters_flags", "IBV_READ_COUNTERS_ATTR_"),
    "ReregMRErrCode": ("ibv_rereg_mr_err_code", "IBV_REREG_MR_ERR_"),
    "ReregMRFlags": ("ibv_rereg_mr_flags", "IBV_REREG_MR_"),
    "SRQAttrMask": ("ibv_srq_attr_mask", "IBV_SRQ_"),
    "SRQInitAttrMask": ("ibv_srq_init_attr_mask", "IBV_SRQ_INIT_ATTR_"),
    "SRQType": ("ibv_srq_type", "IBV_SRQT_"),
    "SelectivityLevel": ("ibv_selectivity_level", "IBV_FLUSH_"),
    "SendFlags": ("ibv_send_flags", "IBV_SEND_"),
    "SendOpsFlags": ("ibv_qp_create_send_ops_flags", "IBV_QP_EX_"),
    "TMCapFlags": ("ibv_tm_cap_flags", "IBV_TM_CAP_"),
    "TPHMemType": ("ibv_tph_mem_type", "IBV_TPH_MEM_TYPE_"),
    "TransportType": ("ibv_transport_type", "IBV_TRANSPORT_"),
    "ValuesMask": ("ibv_values_mask", "IBV_VALUES_MASK_"),
    "WCFlags": ("ibv_wc_flags", "IBV_WC_"),
    "WCOpcode": ("ibv_wc_opcode", "IBV_WC_"),
    "WCStatus": ("ibv_wc_status", "IBV_WC_"),
    "WQAttrMask": ("ibv_wq_attr_mask", "IBV_WQ_ATTR_"),
    "WQFlags": ("ibv_wq_flags", "IBV_WQ_FLAGS_"),
    "WQInitAttrMask": ("ibv_wq_init_attr_mask", "IBV_WQ_INIT_ATTR_"),
    "WQState": ("ibv_wq_state", "IBV_WQS_"),
    "WQType": ("ibv_wq_type", "IBV_WQT_"),
    "WROpcode": ("ibv_wr_opcode", "IBV_WR_"),
    "XRCDInitAttrMask": ("ibv_xrcd_init_attr_mask", "IBV_XRCD_INIT_ATTR_"),
}
#: class -> prefix, and the members that are no enumerators of a named enum, but macros or of an enum without a name.
C_CONSTANTS = {
    "AddrInfoFlags": ("RAI_", {"PASSIVE", "NUMERICHOST", "NOROUTE", "FAMILY", "SA", "DNS"}),
    "AdviseMRFlags": ("IBV_ADVISE_MR_FLAG_", {"FLUSH"}),
    "CreateCQWCFlags": ("IBV_WC_", {"STANDARD_FLAGS"}),
    "DeviceCapFlags": ("IBV_DEVICE_", {"RAW_SCATTER_FCS", "PCI_WRITE_END_PADDING", "CC_DMA_BOUNCE"}),
    "IBOption": ("RDMA_OPTION_IB_", {"PATH"}),
    "IDOption": ("RDMA_OPTION_ID_", {"TOS", "REUSEADDR", "AFONLY", "ACK_TIMEOUT"}),
    "LinkLayer": ("IBV_LINK_LAYER_", {"UNSPECIFIED", "INFINIBAND", "ETHERNET"}),
    "OptionLevel": ("RDMA_OPTION_", {"ID", "IB"}),
    "PathFlags": (
        "IBV_PATH_FLAG_",
        {"GMP", "PRIMARY", "ALTERNATE", "OUTBOUND", "INBOUND", "INBOUND_REVERSE", "BIDIRECTIONAL"},
    ),
    "PortFlags": ("IBV_QPF_", {"GRH_REQUIRED"}),
}
#: class -> members and their values, for the enums that are newer than rdma-core 28 as a whole.
LITERALS = {
    "DMAHInitAttrMask": {"CPU_ID": 1, "PH": 2, "TPH_MEM_TYPE": 4},
    "DMMask": {"HANDLE": 1},
    "DataInOrderCaps": {"WHOLE_MSG": 1, "ALIGNED_128_BYTES": 2},
    "DataInOrderFlags": {"RETURN_CAPS": 1},
    "ForkStatus": {"DISABLED": 0, "ENABLED": 1, "UNNEEDED": 2},
    "GIDType": {"IB": 0, "ROCE_V1": 1, "ROCE_V2": 2},
    "MRInitAttrMask": {"IOVA": 1, "ADDR": 2, "FD": 4, "FD_OFFSET": 8, "DMAH": 16},
    "PlacementType": {"GLOBAL": 1, "PERSISTENT": 2},
    "SelectivityLevel": {"RANGE": 0, "MR": 1},
    "TPHMemType": {"VM": 0, "PM": 1},
}
#: Members that are not one bit: the default of a bit, or several bits together.
NOT_ONE_BIT = {
    *("FlowActionESPFlags.INLINE_CRYPTO", "FlowActionESPFlags.TUNNEL", "FlowActionESPFlags.DECRYPT"),
    *("CreateCQWCFlags.STANDARD_FLAGS", "PathFlags.BIDIRECTIONAL", "ReregMRFlags.FLAGS_SUPPORTED"),
}


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


build_verbs = _load("build_verbs", ROOT / "build_verbs.py")
CDEF = build_verbs.read_cdef(ROOT)
FEATURES = build_verbs.features(CDEF)


def expected(present):
    """Say which members the declarations of some features make: class -> {member: C name}."""
    parser = FFI()
    parser.cdef(build_verbs.resolve(CDEF, present))
    declared = parser._parser._declarations
    members = {}
    for name, (c_name, prefix) in C_ENUMS.items():
        enumerators = declared[f"enum {c_name}"][0].enumerators if f"enum {c_name}" in declared else ()
        assert all(enumerator.startswith(prefix) for enumerator in enumerators)
        members[name] = {enumerator.removeprefix(prefix): enumerator for enumerator in enumerators}
    for name, (prefix, constants) in C_CONSTANTS.items():
        here = {constant: prefix + constant for constant in constants if f"macro {prefix}{constant}" in declared}
        members[name] = members.get(name, {}) | here
    return members


def members(module):
    """Say which members there are: class -> {member: value}."""
    return {name: {k: int(v) for k, v in getattr(module, name).__members__.items()} for name in module.__all__}


def test_complete_and_no_drift():
    present = {feature.name for feature in FEATURES if getattr(lib, f"PVL_HAS_{feature.name}") > 0}
    wanted = {
        name: {member: getattr(lib, c_name) for member, c_name in of.items()} or LITERALS[name]
        for name, of in expected(present).items()
    }
    assert members(enums) == wanted


def test_literals_are_those_of_every_version():
    # So a wrong one fails in the first build against headers that have the enum.
    found = members(enums)
    assert [name for name, of in LITERALS.items() if not found[name].items() >= of.items()] == []
    assert set(LITERALS) == {name for name, of in expected(set()).items() if not of}


@pytest.mark.parametrize("name", sorted(C_ENUMS))
def test_the_compiler_agrees_with_itself(name):
    c_name, prefix = C_ENUMS[name]
    try:
        values = ffi.typeof(f"enum {c_name}").relements
    except ffi.error:
        values = {}  # newer than these headers
    assert {
        prefix + key: int(value) for key, value in getattr(enums, name).__members__.items()
    }.items() >= values.items()


def test_every_enum_of_the_declarations_has_a_class():
    parser = FFI()
    parser.cdef(build_verbs.resolve(CDEF, {feature.name for feature in FEATURES}))
    declared = {key.removeprefix("enum ") for key in parser._parser._declarations if key.startswith("enum ")}
    assert declared == {c_name for c_name, _ in C_ENUMS.values()}


def test_every_class_is_exported():
    defined = {name for name, value in vars(enums).items() if isinstance(value, type) and issubclass(value, Enum)}
    assert defined == {*C_ENUMS, *C_CONSTANTS} == set(enums.__all__)
    assert sorted(enums.__all__, key=str.lower) == sorted(set(enums.__all__), key=str.lower)


class OtherLib:
    """A ``lib`` of the headers of another version."""

    def __init__(self, version):
        self.version = version
        self.made_up = 1 << 40

    def __getattr__(self, name):
        if name.startswith("PVL_HAS_"):
            since = abs(getattr(lib, name))
            return since if since <= self.version else -since
        if not hasattr(lib, name):
            self.made_up <<= 1
            return self.made_up
        return getattr(lib, name)


@pytest.mark.parametrize("version", sorted({28, *(feature.since for feature in FEATURES)}))
def test_members_follow_the_headers(monkeypatch, version):
    monkeypatch.setattr("pyverbs_lite.ffi.lib", OtherLib(version))
    present = {feature.name for feature in FEATURES if feature.since <= version}
    wanted = {name: set(of or LITERALS[name]) for name, of in expected(present).items()}
    found = {}
    for path in sorted(Path(enums.__file__).parent.glob("[a-z]*.py")):
        name = f"pyverbs_lite.enums._other_{path.stem}"
        monkeypatch.setitem(sys.modules, name, None)
        found |= members(_load(name, path))
    assert {name: set(of) for name, of in found.items()} == wanted
    if version == 28:
        assert {name: found[name] for name in LITERALS} == LITERALS


def test_values_that_the_wire_and_the_kernel_fix():
    # Literals on purpose: the declarations could be complete and the prefix still name the wrong thing.
    assert (WCStatus.SUCCESS, WCStatus.WR_FLUSH_ERR, WCStatus.RETRY_EXC_ERR) == (0, 5, 12)
    assert AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ == 7
    assert SendFlags.SIGNALED == 2
    assert [(m.name, m.value) for m in GIDType] == [("IB", 0), ("ROCE_V1", 1), ("ROCE_V2", 2)]
    assert enums.LinkLayer.ETHERNET == 2
    assert enums.PortSpace.TCP == 0x106
    assert enums.CMEventType.ESTABLISHED == 9
    assert (Rate.RATE_5_GBPS, Rate.RATE_100_GBPS) == (5, 16)
    assert enums.DeviceCapFlags.RAW_SCATTER_FCS == 1 << 34
    assert enums.RXHashFields.INNER == 1 << 31


def test_rates_as_the_library_reads_them():
    assert lib.ibv_rate_to_mbps(Rate.RATE_MAX) == -1
    for rate in set(Rate) - {Rate.RATE_MAX}:
        mbps = 1000 * float(rate.name.removeprefix("RATE_").removesuffix("_GBPS").replace("_", "."))
        # The library knows the true rates, which the names round: 50 stands for 53.125 Gb/s.
        assert lib.ibv_rate_to_mbps(rate) == pytest.approx(mbps, rel=0.07)


@pytest.mark.parametrize("name", [name for name in enums.__all__ if issubclass(getattr(enums, name), IntFlag)])
def test_flags_are_single_bits(name):
    flags = getattr(enums, name).__members__
    assert [
        key for key, flag in flags.items() if f"{name}.{key}" not in NOT_ONE_BIT and flag.value.bit_count() != 1
    ] == []


def test_mtu_bytes():
    assert [mtu.bytes for mtu in MTU] == [256, 512, 1024, 2048, 4096]
    for mtu in MTU:
        assert MTU.from_bytes_size(mtu.bytes) is mtu
        assert mtu.bytes == 128 << mtu


@pytest.mark.parametrize("size", [0, 1, 5, 1500, 4095, 8192, -256])
def test_mtu_of_no_such_size(size):
    with pytest.raises(ValueError, match=r"256, 512, 1024, 2048, 4096.*not " + str(size)):
        MTU.from_bytes_size(size)
