"""The enums say what the compiler says, no more and no less."""

import importlib.util
from enum import Enum, IntEnum, IntFlag

import pytest

from pyverbs_lite import enums
from pyverbs_lite.enums import MTU, AccessFlags, GIDType, LinkLayer, SendFlags, WCStatus
from pyverbs_lite.ffi import ffi, lib

#: class -> C enum, and the prefix that names lose.
C_ENUMS = {
    "AccessFlags": ("ibv_access_flags", "IBV_ACCESS_"),
    "AtomicCap": ("ibv_atomic_cap", "IBV_ATOMIC_"),
    "EventType": ("ibv_event_type", "IBV_EVENT_"),
    "GIDType": ("ibv_gid_type", "IBV_GID_TYPE_"),
    "MTU": ("ibv_mtu", "IBV_"),
    "MigState": ("ibv_mig_state", "IBV_MIG_"),
    "NodeType": ("ibv_node_type", "IBV_NODE_"),
    "PortState": ("ibv_port_state", "IBV_PORT_"),
    "QPAttrMask": ("ibv_qp_attr_mask", "IBV_QP_"),
    "QPState": ("ibv_qp_state", "IBV_QPS_"),
    "QPType": ("ibv_qp_type", "IBV_QPT_"),
    "SendFlags": ("ibv_send_flags", "IBV_SEND_"),
    "TransportType": ("ibv_transport_type", "IBV_TRANSPORT_"),
    "WCFlags": ("ibv_wc_flags", "IBV_WC_"),
    "WCOpcode": ("ibv_wc_opcode", "IBV_WC_"),
    "WCStatus": ("ibv_wc_status", "IBV_WC_"),
    "WROpcode": ("ibv_wr_opcode", "IBV_WR_"),
}


@pytest.mark.parametrize("name", C_ENUMS)
def test_complete_and_no_drift(name):
    c_name, prefix = C_ENUMS[name]
    declared = ffi.typeof(f"enum {c_name}").relements
    members = getattr(enums, name).__members__
    assert {key: int(value) for key, value in members.items()} == {
        key.removeprefix(prefix): value for key, value in declared.items()
    }
    assert all(key.startswith(prefix) for key in declared)


def test_every_enum_is_checked_and_exported():
    defined = {
        name
        for name, value in vars(enums).items()
        if isinstance(value, type) and issubclass(value, Enum) and value not in (IntEnum, IntFlag)
    }
    assert defined == {*C_ENUMS, "LinkLayer"}
    assert sorted(defined) == sorted(enums.__all__)
    assert {m.name: m.value for m in LinkLayer} == {
        "UNSPECIFIED": lib.IBV_LINK_LAYER_UNSPECIFIED,
        "INFINIBAND": lib.IBV_LINK_LAYER_INFINIBAND,
        "ETHERNET": lib.IBV_LINK_LAYER_ETHERNET,
    }


def test_values_that_the_wire_and_the_kernel_fix():
    # Literals on purpose: the declarations could be complete and the prefix still name the wrong thing.
    assert (WCStatus.SUCCESS, WCStatus.WR_FLUSH_ERR, WCStatus.RETRY_EXC_ERR) == (0, 5, 12)
    assert AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ == 7
    assert SendFlags.SIGNALED == 2
    assert [(m.name, m.value) for m in GIDType] == [("IB", 0), ("ROCE_V1", 1), ("ROCE_V2", 2)]


@pytest.mark.parametrize("flags", [getattr(enums, n) for n in ("AccessFlags", "QPAttrMask", "SendFlags", "WCFlags")])
def test_flags_are_single_bits(flags):
    assert all(member.value.bit_count() == 1 for member in flags)


def test_mtu_bytes():
    assert [mtu.bytes for mtu in MTU] == [256, 512, 1024, 2048, 4096]
    for mtu in MTU:
        assert MTU.from_bytes_size(mtu.bytes) is mtu
        assert mtu.bytes == 128 << mtu


@pytest.mark.parametrize("size", [0, 1, 5, 1500, 4095, 8192, -256])
def test_mtu_of_no_such_size(size):
    with pytest.raises(ValueError, match=r"256, 512, 1024, 2048, 4096.*not " + str(size)):
        MTU.from_bytes_size(size)


def test_gid_types_without_the_gid_table(monkeypatch):
    class OldLib:
        PVL_HAS_GID_TABLE = -33

        def __getattr__(self, name):
            assert not name.startswith("IBV_GID_TYPE")
            return getattr(lib, name)

    monkeypatch.setattr("pyverbs_lite.ffi.lib", OldLib())
    spec = importlib.util.spec_from_file_location("pyverbs_lite._old_enums", enums.__file__)
    old = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(old)
    assert {m.name: m.value for m in old.GIDType} == {m.name: m.value for m in GIDType}
