"""Extended device attributes, clock, P_Keys and port speed, on devices that have few of them."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

import pyverbs_lite as pvl
from pyverbs_lite._objects.device_attr_ex import read_device_attr_ex
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma


@pytest.fixture
def siw():
    with pvl.Context("siw0") as context:
        yield context


# ---------------------------------------------------------------- attributes


def test_the_classic_limits_are_within(context):
    assert context.query_device_ex().orig_attr == context.query_device()


def test_what_soft_roce_has_and_has_not(context):
    attr = context.query_device_ex()
    flags = attr.device_cap_flags_ex
    assert pvl.DeviceCapFlags.MEM_WINDOW_TYPE_2B in flags
    assert pvl.DeviceCapFlags.MEM_MGT_EXTENSIONS in flags
    assert int(flags) & 0xFFFFFFFF == attr.orig_attr.device_cap_flags
    assert pvl.DeviceCapFlags.XRC not in flags
    assert attr.phys_port_cnt_ex == 1
    assert attr.odp_caps.general_caps == pvl.ODPGeneralCaps(0)
    assert attr.odp_caps.rc_odp_caps == attr.odp_caps.xrc_odp_caps == pvl.ODPTransportCaps(0)
    assert (attr.max_dm_size, attr.hca_core_clock, attr.completion_timestamp_mask) == (0, 0, 0)
    assert attr.tso_caps == pvl.TSOCaps(0, frozenset())
    assert attr.cq_mod_caps == pvl.CQModerationCaps(0, 0)
    assert attr.tm_caps.max_num_tags == attr.rss_caps.max_rwq_indirection_tables == attr.max_wq_type_rq == 0


def test_a_driver_without_extended_attributes_gives_the_classic_ones(siw):
    attr = siw.query_device_ex()
    assert attr.orig_attr == siw.query_device()
    assert pvl.DeviceCapFlags.MEM_WINDOW not in attr.device_cap_flags_ex


def test_the_value_is_frozen_and_pickles(context):
    import pickle

    attr = context.query_device_ex()
    with pytest.raises(dataclasses.FrozenInstanceError):
        attr.max_dm_size = 1
    assert pickle.loads(pickle.dumps(attr)) == attr
    assert hash(attr) == hash(context.query_device_ex())


def test_every_member_is_read_from_its_own_place():
    raw = ffi.new("struct ibv_device_attr_ex *")
    raw.orig_attr.max_qp, raw.orig_attr.phys_port_cnt = 11, 3
    raw.odp_caps.general_caps = 3
    caps = raw.odp_caps.per_transport_caps
    caps.rc_odp_caps, caps.uc_odp_caps, caps.ud_odp_caps, raw.xrc_odp_caps = 1, 2, 4, 8
    raw.completion_timestamp_mask, raw.hca_core_clock = (1 << 63) - 1, 156_250
    raw.device_cap_flags_ex = lib.IBV_DEVICE_RAW_SCATTER_FCS | lib.IBV_DEVICE_XRC
    raw.tso_caps.max_tso, raw.tso_caps.supported_qpts = 65535, 1 << lib.IBV_QPT_UD | 1 << lib.IBV_QPT_RAW_PACKET
    raw.rss_caps.supported_qpts = 1 << lib.IBV_QPT_RAW_PACKET
    raw.rss_caps.max_rwq_indirection_tables, raw.rss_caps.max_rwq_indirection_table_size = 12, 13
    raw.rss_caps.rx_hash_fields_mask, raw.rss_caps.rx_hash_function = lib.IBV_RX_HASH_DST_IPV6, 1
    raw.max_wq_type_rq = 14
    pacing = raw.packet_pacing_caps
    pacing.qp_rate_limit_min, pacing.qp_rate_limit_max, pacing.supported_qpts = 15, 16, 1 << lib.IBV_QPT_RC
    raw.raw_packet_caps = lib.IBV_RAW_PACKET_CAP_IP_CSUM
    tags = raw.tm_caps
    tags.max_rndv_hdr_size, tags.max_num_tags, tags.flags, tags.max_ops, tags.max_sge = 17, 18, 1, 19, 20
    raw.cq_mod_caps.max_cq_count, raw.cq_mod_caps.max_cq_period = 21, 22
    raw.max_dm_size = 1 << 40
    raw.pci_atomic_caps.fetch_add, raw.pci_atomic_caps.swap, raw.pci_atomic_caps.compare_swap = 1, 2, 4

    attr = read_device_attr_ex(raw)
    transports = pvl.ODPTransportCaps
    assert attr.orig_attr.max_qp == 11
    assert attr.odp_caps == pvl.ODPCaps(
        pvl.ODPGeneralCaps.SUPPORT | pvl.ODPGeneralCaps.SUPPORT_IMPLICIT,
        transports.SEND,
        transports.RECV,
        transports.WRITE,
        transports.READ,
    )
    assert (attr.completion_timestamp_mask, attr.hca_core_clock) == ((1 << 63) - 1, 156_250)
    assert attr.device_cap_flags_ex == pvl.DeviceCapFlags.RAW_SCATTER_FCS | pvl.DeviceCapFlags.XRC
    assert attr.tso_caps == pvl.TSOCaps(65535, frozenset({pvl.QPType.UD, pvl.QPType.RAW_PACKET}))
    assert dataclasses.astuple(attr.rss_caps) == (frozenset({pvl.QPType.RAW_PACKET}), 12, 13, 8, 1)
    assert attr.max_wq_type_rq == 14
    assert attr.packet_pacing_caps == pvl.PacketPacingCaps(15, 16, frozenset({pvl.QPType.RC}))
    assert attr.raw_packet_caps == lib.IBV_RAW_PACKET_CAP_IP_CSUM
    assert dataclasses.astuple(attr.tm_caps) == (17, 18, 1, 19, 20)
    assert attr.cq_mod_caps == pvl.CQModerationCaps(21, 22)
    assert attr.max_dm_size == 1 << 40
    assert [int(size) for size in dataclasses.astuple(attr.pci_atomic_caps)] == [1, 2, 4]
    assert attr.phys_port_cnt_ex == 3  # the extended member was left at 0


def test_more_ports_than_the_classic_member_can_count():
    raw = ffi.new("struct ibv_device_attr_ex *")
    raw.orig_attr.phys_port_cnt = 255
    if lib.PVL_HAS_PHYS_PORT_CNT_EX > 0:
        raw.phys_port_cnt_ex = 300
        assert read_device_attr_ex(raw).phys_port_cnt_ex == 300
    else:
        assert read_device_attr_ex(raw).phys_port_cnt_ex == 255


def test_bits_without_a_name_here_stay():
    raw = ffi.new("struct ibv_device_attr_ex *")
    raw.device_cap_flags_ex = 1 << 62
    assert int(read_device_attr_ex(raw).device_cap_flags_ex) == 1 << 62


# ---------------------------------------------------------------- the clock


@pytest.mark.parametrize("device", ["rxe0", "siw0"])
def test_a_device_without_a_clock(device):
    with pvl.Context(device) as context, pytest.raises(pvl.UnsupportedError, match="ibv_query_rt_values_ex"):
        context.query_raw_clock()


class FakeLib:
    """The real ``lib``, but for what is replaced."""

    def __init__(self, **replaced):
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(lib, name)


def test_a_clock_is_asked_for_and_read(context, monkeypatch):
    def answer(handle, values):
        assert handle == context._handle
        assert values.comp_mask == lib.IBV_VALUES_MASK_RAW_CLOCK
        values.raw_clock.tv_sec, values.raw_clock.tv_nsec = 2, 7_000_000_123
        return 0

    monkeypatch.setattr("pyverbs_lite.device_ex.lib", FakeLib(ibv_query_rt_values_ex=answer))
    assert context.query_raw_clock() == 9_000_000_123


def test_a_driver_that_ignores_the_question(context, monkeypatch):
    def answer(handle, values):
        values.comp_mask = 0
        return 0

    monkeypatch.setattr("pyverbs_lite.device_ex.lib", FakeLib(ibv_query_rt_values_ex=answer))
    with pytest.raises(pvl.UnsupportedError, match="did not fill in the raw clock"):
        context.query_raw_clock()


# ---------------------------------------------------------------- ports


@pytest.mark.parametrize(
    ("width", "speed", "gbps", "text"),
    [
        (1, 1, 2.5, "2.5 Gb/s (1X SDR)"),
        (2, 4, 40.0, "40 Gb/s (4X QDR)"),
        (2, 8, 40.0, "40 Gb/s (4X FDR10)"),
        (2, 16, 56.0, "56 Gb/s (4X FDR)"),
        (2, 32, 100.0, "100 Gb/s (4X EDR)"),
        (16, 64, 100.0, "100 Gb/s (2X HDR)"),
        (4, 64, 400.0, "400 Gb/s (8X HDR)"),
        (2, 128, 400.0, "400 Gb/s (4X NDR)"),
        (2, 256, 800.0, "800 Gb/s (4X XDR)"),
        (8, 2, 60.0, "60 Gb/s (12X DDR)"),
        (3, 32, None, "unknown"),
        (2, 0, None, "unknown"),
        (0, 0, None, "unknown"),
    ],
)
def test_codes_of_width_and_speed(width, speed, gbps, text):
    found = pvl.PortSpeed.of(width, speed)
    assert found.gbps == gbps
    assert str(found) == text


def test_the_speed_of_a_soft_port(context):
    port = context.query_port(1)
    assert (port.active_width, port.active_speed) == (1, 8)
    assert context.port_speed(1) == pvl.PortSpeed("1X", "FDR10", 10.0)


def test_the_device_names_no_effective_speed(context):
    with pytest.raises(pvl.UnsupportedError, match="ibv_query_port_speed"):
        context.query_port_speed(1)


@pytest.mark.parametrize("port_num", [0, 2, 255, -1])
@pytest.mark.parametrize("ask", ["port_speed", "query_port_speed", "pkey_table"])
def test_a_port_that_is_not_there(context, ask, port_num):
    with pytest.raises(ValueError, match="port_num"):
        getattr(context, ask)(port_num)


def test_the_pkey_table(context):
    assert context.pkey_table(1) == [0xFFFF]
    assert context.get_pkey_index(1, 0xFFFF) == 0


@pytest.mark.parametrize("pkey", [0x7FFF, 0x1234, 0])
def test_a_pkey_that_is_not_in_the_table(context, pkey):
    with pytest.raises(ValueError, match=rf"P_Key {pkey:#06x} is not in the table of port 1, which is: 0xffff"):
        context.get_pkey_index(1, pkey)


def test_an_empty_pkey_table(siw):
    assert siw.pkey_table(1) == []
    with pytest.raises(ValueError, match="which is: empty"):
        siw.get_pkey_index(1, 0xFFFF)


@pytest.mark.parametrize(
    ("pkey", "error"), [(-1, ValueError), (1 << 16, ValueError), (None, TypeError), (1.0, TypeError)]
)
def test_what_is_no_pkey(context, pkey, error):
    with pytest.raises(error, match="pkey"):
        context.get_pkey_index(1, pkey)


def test_the_kernels_number_of_a_device(context, siw):
    listed = subprocess.run(["rdma", "dev", "show"], capture_output=True, text=True, check=True).stdout
    numbers = {line.split(":")[1].strip(): int(line.split(":")[0]) for line in listed.splitlines()}
    assert context.device_index == numbers[context.name]
    assert siw.device_index == numbers["siw0"]


def test_after_close():
    context = pvl.open_device()
    context.close()
    for ask in (context.query_device_ex, context.query_raw_clock, lambda: context.port_speed(1)):
        with pytest.raises(pvl.ClosedError):
            ask()
    with pytest.raises(pvl.ClosedError):
        context.device_index  # noqa: B018
