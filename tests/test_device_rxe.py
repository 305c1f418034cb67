"""Devices, ports and GID tables, on a real driver."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest
from support import own_gid

import pyverbs_lite as pvl
from pyverbs_lite import gid
from pyverbs_lite._objects import gid_tables as _gid_tables
from pyverbs_lite.ffi import lib

pytestmark = pytest.mark.rdma


def test_the_list_names_what_can_be_opened(context):
    info = next(info for info in pvl.devices() if info.name == context.name)
    assert info.transport_type == context.transport_type == pvl.TransportType.IB
    assert info.node_type == pvl.NodeType.CA
    assert info.guid == context.query_device().node_guid != 0


def test_the_guid_is_what_the_kernel_prints(context):
    text = Path("/sys/class/infiniband", context.name, "node_guid").read_text().strip()
    assert int(text.replace(":", ""), 16) == context.query_device().node_guid


def test_any_device_but_iwarp_is_preferred(context):
    # In the guest siw0 stands beside rxe0, and QPs of iWARP cannot be connected by hand.
    assert context.transport_type != pvl.TransportType.IWARP
    for info in pvl.devices():
        with pvl.open_device(info.name) as opened:
            assert opened.name == info.name


def test_an_unknown_name_lists_the_others(context):
    with pytest.raises(pvl.DeviceNotFoundError, match=context.name) as caught:
        pvl.open_device("nope")
    assert all(info.name in str(caught.value) for info in pvl.devices())


def test_limits_are_read_once_and_make_sense(context):
    limits = context.query_device()
    assert context.query_device() is limits
    assert limits.phys_port_cnt >= 1
    assert limits.max_qp_wr > 16
    assert limits.max_sge >= 2
    assert limits.max_mr_size > 1 << 31
    assert limits.atomic_cap in (pvl.AtomicCap.HCA, pvl.AtomicCap.GLOB)
    assert isinstance(limits.fw_ver, str)


def test_the_port(context):
    port = context.query_port(1)
    assert port.state == pvl.PortState.ACTIVE
    assert port.link_layer == pvl.LinkLayer.ETHERNET
    assert port.grh_required
    assert port.lid == 0
    assert port.active_mtu <= port.max_mtu
    assert port.gid_tbl_len >= 3
    assert context.active_port() == 1
    assert context.describe_ports() == f"{context.name} port 1 is ACTIVE"


@pytest.mark.parametrize("port_num", [0, 2, 255, -1, 256, 257])
@pytest.mark.parametrize(
    "ask",
    [
        lambda context, port: context.query_port(port),
        lambda context, port: context.gid_table(port),
        lambda context, port: context.query_pkey(port, 0),
        lambda context, port: context.check_port(port),
    ],
)
def test_a_port_that_is_not_there(context, port_num, ask):
    with pytest.raises(ValueError, match=rf"port_num of {context.name} must be 1 to 1, not {port_num}"):
        ask(context, port_num)


@pytest.mark.parametrize("port_num", ["1", 1.0, None, True])
def test_a_port_that_is_no_number(context, port_num):
    with pytest.raises(TypeError, match="port_num"):
        context.query_port(port_num)


def test_the_partition_keys(context):
    assert context.query_pkey(1, 0) == 0xFFFF
    for index in (-1, context.query_port(1).pkey_tbl_len, 65536):
        with pytest.raises(ValueError, match="pkey_index"):
            context.query_pkey(1, index)


def test_the_gid_table_is_that_of_the_addresses(context):
    table = context.gid_table(1)
    assert [row.gid_index for row in table] == sorted({row.gid_index for row in table})
    assert not any(row.empty for row in table)
    assert {row.gid_type for row in table} <= {pvl.GIDType.ROCE_V1, pvl.GIDType.ROCE_V2}
    names = {row.netdev for row in table}
    assert len(names) == 1
    assert {row.ndev_ifindex for row in table} == {socket.if_nametoindex(names.pop())}


def test_the_default_choice_is_the_routable_ipv4_row(context):
    # The first row is link-local: whoever takes index 0 fails.
    table = context.gid_table(1)
    row = own_gid(context)
    assert (row.ipv4 is not None, row.gid_type) == (True, pvl.GIDType.ROCE_V2)
    assert row.gid_index != 0
    assert next(first for first in table if first.gid_index == 0).link_local


@pytest.mark.parametrize("index", [-1, 256, 1023, 1024])
def test_an_explicit_index_outside_what_an_address_can_hold(context, index):
    port = context.query_port(1)
    with pytest.raises((ValueError, pvl.GIDError), match="gid_index"):
        gid.choose(context.gid_table(1), link_layer=port.link_layer, gid_tbl_len=port.gid_tbl_len, gid_index=index)


def test_both_ways_to_read_the_gid_table_agree(context):
    port = context.query_port(1)
    folder = Path(context._sysfs, "ports", "1")
    assert _gid_tables.table_from_sysfs(folder, port) == context.gid_table(1)
    assert lib.PVL_HAS_GID_TABLE > 0, "this libibverbs has the verb, so the comparison means something"


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, timeout=20)


def eventually(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def addresses(context):
    return {str(row) for row in context.gid_table(1)}


def is_active(name):
    with pvl.open_device(name) as opened:
        return opened.active_port() is not None


def test_a_port_that_is_down_is_seen_and_said(context):
    row = own_gid(context)
    before = addresses(context)
    ipv6 = sorted(str(r.gid) for r in context.gid_table(1) if r.ipv4 is None and not r.link_local)
    ip("link", "set", row.netdev, "down")
    try:
        eventually(lambda: context.query_port(1).state == pvl.PortState.DOWN)
        assert context.active_port() is None
        assert context.describe_ports() == f"{context.name} port 1 is DOWN"
        if not any(is_active(info.name) for info in pvl.devices()):
            with pytest.raises(pvl.DeviceNotFoundError, match=f"{context.name} port 1 is DOWN.*ip link set"):
                pvl.open_device()
    finally:
        ip("link", "set", row.netdev, "up")
        eventually(lambda: context.query_port(1).state == pvl.PortState.ACTIVE)
        for address in ipv6:  # the kernel drops these with the link, and does not bring them back
            subprocess.run(
                ["ip", "-6", "addr", "add", f"{address}/64", "dev", row.netdev, "nodad"],
                check=False,
                capture_output=True,
                timeout=20,
            )
        eventually(lambda: addresses(context) == before)


def test_after_close_every_question_is_refused(context):
    context.close()
    for ask in (
        context.query_device,
        lambda: context.query_port(1),
        lambda: context.gid_table(1),
        context.alloc_pd,
        context.create_comp_channel,
        lambda: context.create_cq(4),
    ):
        with pytest.raises(pvl.ClosedError, match="Context is closed"):
            ask()
    assert repr(context) == f"<Context of {context.name} (closed)>"


def test_the_same_device_can_be_opened_many_times():
    contexts = [pvl.open_device() for _ in range(20)]
    for opened in contexts[::2] + contexts[1::2]:
        opened.close()
