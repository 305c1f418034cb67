"""Devices, ports, GIDs, protection domains, and sizes of completion queues: the plain questions, to both drivers."""

from __future__ import annotations

import errno
import itertools
import mmap
from pathlib import Path

import pytest
from support import own_gid, path_to

import pyverbs_lite as pvl
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma


@pytest.fixture(params=["rxe0", "siw0"])
def any_context(request):
    with pvl.open_device(request.param) as opened:
        yield opened


# ---------------------------------------------------------------- devices and ports


def test_every_listed_device_opens():
    names = [info.name for info in pvl.devices()]
    assert {"rxe0", "siw0"} <= set(names)
    for name in names:
        with pvl.open_device(name) as opened:
            assert (opened.name, opened.closed) == (name, False)
        assert opened.closed


def test_limits_of_any_device_can_be_worked_with(any_context):
    info = next(info for info in pvl.devices() if info.name == any_context.name)
    attr = any_context.query_device()
    if info.node_type == pvl.NodeType.CA:
        assert attr.max_pkeys > 0
    assert attr.node_guid != 0
    assert attr.vendor_id != 0
    assert attr.max_mr_size > mmap.PAGESIZE
    assert attr.page_size_cap & mmap.PAGESIZE or not attr.page_size_cap  # siw leaves it 0
    for name in ("max_qp", "max_qp_wr", "max_sge", "max_cq", "max_cqe", "max_mr", "max_pd", "phys_port_cnt"):
        assert getattr(attr, name) > 0, name
    assert attr.max_sge_rd >= 0


def test_the_extended_limits_hold_the_classic_ones(any_context):
    extended = any_context.query_device_ex()
    assert extended.orig_attr == any_context.query_device()
    # The classic member counts to 255 and stays there.
    assert extended.orig_attr.phys_port_cnt == min(extended.phys_port_cnt_ex or 1, 255)


def test_a_port_of_any_device(any_context):
    port = any_context.query_port(1)
    assert port.state == pvl.PortState.ACTIVE
    assert pvl.MTU.MTU_256 <= port.active_mtu <= port.max_mtu <= pvl.MTU.MTU_4096
    assert port.link_layer in (pvl.LinkLayer.ETHERNET, pvl.LinkLayer.UNSPECIFIED)
    assert port.max_msg_sz > 4096
    assert "Unknown" not in str(any_context.port_speed(1)) or any_context.name == "siw0"
    assert port.phys_state == 5


@pytest.mark.parametrize("beyond", [1, 2, 10, 200])
def test_the_kernel_knows_no_port_beyond_the_last(any_context, beyond):
    number = any_context.query_device().phys_port_cnt + beyond
    with pytest.raises(ValueError, match=f"port_num of {any_context.name} must be 1 to 1, not {number}"):
        any_context.query_port(number)
    raw = ffi.new("struct ibv_port_attr *")
    assert lib.ibv_query_port(any_context._handle, number, raw) == errno.EINVAL  # and without the library's check


# ---------------------------------------------------------------- P_Keys and GIDs


def test_a_pkey_is_found_where_the_kernel_has_it(context):
    folder = Path("/sys/class/infiniband", context.name, "ports/1/pkeys")
    for index in range(context.query_port(1).pkey_tbl_len):
        pkey = int((folder / str(index)).read_text(), 0)
        assert context.query_pkey(1, index) == pkey
        assert context.get_pkey_index(1, pkey) == index


def query_gid(context, index):
    raw = ffi.new("union ibv_gid *")
    rc = lib.ibv_query_gid(context._handle, 1, index, raw)
    return rc, bytes(raw.raw)


def test_the_verb_for_one_gid_agrees_with_the_table(any_context):
    table = any_context.gid_table(1)
    assert table
    for row in table:
        assert query_gid(any_context, row.gid_index) == (0, row.gid.packed)


def test_one_entry_of_the_gid_table(context):
    for row in context.gid_table(1):
        raw = ffi.new("struct ibv_gid_entry *")
        assert lib.ibv_query_gid_ex(context._handle, 1, row.gid_index, raw, 0) == 0
        assert (bytes(raw.gid.raw), raw.gid_index, raw.port_num) == (row.gid.packed, row.gid_index, 1)
        assert (raw.gid_type, raw.ndev_ifindex) == (row.gid_type, row.ndev_ifindex)


def test_an_empty_row_of_the_gid_table(context):
    """The library's table leaves such rows out, so that nobody takes one; the verb says that nothing is there."""
    length = context.query_port(1).gid_tbl_len
    used = {row.gid_index for row in context.gid_table(1)}
    unused = min(set(range(length)) - used)
    raw = ffi.new("struct ibv_gid_entry *")
    assert lib.ibv_query_gid_ex(context._handle, 1, unused, raw, 0) == errno.ENODATA
    assert lib.ibv_query_gid_ex(context._handle, 1, length + 7, raw, 0) == errno.EINVAL
    assert lib.ibv_query_gid_ex(context._handle, 9, 0, raw, 0) == errno.EINVAL


def test_room_for_the_whole_gid_table_or_nothing(context):
    """A table that does not fit is refused whole; the library asks for as many entries as the ports can have."""
    entries = len(context.gid_table(1))
    raw = ffi.new("struct ibv_gid_entry[]", entries + 3)
    assert lib.ibv_query_gid_table(context._handle, raw, entries + 3, 0) == entries
    for room in (0, entries - 1):
        assert lib.ibv_query_gid_table(context._handle, raw, room, 0) == -errno.EINVAL
    assert lib.ibv_query_gid_table(context._handle, raw, entries, 1) < 0  # no flag has a meaning yet


# ---------------------------------------------------------------- protection domains


def test_a_domain_is_made_and_given_back(any_context):
    with any_context.alloc_pd() as pd:
        assert pd.context is any_context
        assert not pd.closed
    assert pd.closed
    with pytest.raises(pvl.ClosedError):
        pd.alloc(64)


def test_a_domain_is_closed_as_often_as_one_likes(any_context):
    pd = any_context.alloc_pd()
    for _ in range(3):
        pd.close()
        assert pd.closed
    with any_context.alloc_pd() as again:
        again.close()


def test_domains_come_and_go_and_live_side_by_side(any_context):
    for _ in range(100):
        any_context.alloc_pd().close()
    together = [any_context.alloc_pd() for _ in range(30)]
    assert len({pd.handle for pd in together}) == 30
    for pd in together[::2] + together[1::2]:
        pd.close()


# ---------------------------------------------------------------- completion queues


def test_every_size_on_every_vector(any_context):
    limit = any_context.query_device().max_cqe
    vectors = any_context._handle.num_comp_vectors
    for cqe, vector in itertools.product((1, limit // 2, limit), {0, min(1, vectors - 1), vectors - 1}):
        with any_context.create_cq(cqe, comp_vector=vector) as cq:
            assert cq.cqe >= cqe


def test_sizes_and_vectors_that_are_not_there(any_context):
    limit = any_context.query_device().max_cqe
    vectors = any_context._handle.num_comp_vectors
    with pytest.raises(ValueError, match=f"cqe must be 1 to {limit}, not {limit + 1}"):
        any_context.create_cq(limit + 1)
    for vector in (vectors, vectors + 1, -1):
        with pytest.raises(ValueError, match="comp_vector"):
            any_context.create_cq(100, comp_vector=vector)
    # The verb itself refuses both as well.
    for cqe, vector in ((limit + 1, 0), (100, vectors + 1)):
        assert not lib.ibv_create_cq(any_context._handle, cqe, ffi.NULL, ffi.NULL, vector)
        assert ffi.errno == errno.EINVAL


def test_every_size_with_a_channel(any_context):
    limit = any_context.query_device().max_cqe
    for cqe in (1, limit // 2, limit):
        with any_context.create_comp_channel() as channel:
            cq = any_context.create_cq(cqe, channel)
            cq.req_notify()
            assert cq.poll() == []
            assert channel.get_events() == 0
        assert cq.closed  # a channel closes its queues first


# ---------------------------------------------------------------- address handles


def test_an_address_handle_of_every_row_that_an_address_can_have(context, pd):
    for row in context.gid_table(1):
        attr = path_to(context, own_gid(context) if row.link_local else row)
        with pd.create_ah(attr) as ah:
            assert ah.attr == attr
        assert ah.closed
        ah.close()


def test_an_address_without_a_global_route_on_ethernet(context, pd):
    with pytest.raises(ValueError, match="need a global route"):
        pd.create_ah(pvl.AHAttr(port_num=1, dlid=0))
    raw = ffi.new("struct ibv_ah_attr *", {"port_num": 1, "is_global": 0})
    assert not lib.ibv_create_ah(pd._handle, raw)  # and without the library's check
    assert ffi.errno > 0


# ---------------------------------------------------------------- what neither driver has

LACKS = {
    "tag matching": lambda pd: pd.create_srq(
        pvl.SRQInitAttr(max_wr=8, srq_type=pvl.SRQType.TM, cq=pd.context.create_cq(8), max_num_tags=4, max_ops=2)
    ),
    "timestamps": lambda pd: pd.context.create_cq_ex(8, wc_flags=pvl.CreateCQWCFlags.WITH_COMPLETION_TIMESTAMP),
    "wall clock": lambda pd: pd.context.create_cq_ex(
        8, wc_flags=pvl.CreateCQWCFlags.WITH_COMPLETION_TIMESTAMP_WALLCLOCK
    ),
    "on-demand paging": lambda pd: pd.alloc(4096, pvl.AccessFlags.LOCAL_WRITE | pvl.AccessFlags.ON_DEMAND),
    "port speed": lambda pd: pd.context.query_port_speed(1),
}


@pytest.mark.parametrize("what", LACKS)
def test_what_neither_driver_has(any_context, what):
    with pytest.raises(pvl.UnsupportedError):
        LACKS[what](any_context.alloc_pd())


def test_neither_driver_changes_a_region_in_place(any_context):
    """The region is as it was, and of use."""
    pd, other = any_context.alloc_pd(), any_context.alloc_pd()
    mr = pd.alloc(4096, pvl.AccessFlags.LOCAL_WRITE)
    before = (mr.addr, mr.length, mr.lkey, mr.access, mr.pd)
    for change in ({"buffer": bytearray(64)}, {"access": pvl.AccessFlags(0)}, {"pd": other}):
        with pytest.raises(pvl.UnsupportedError, match="ibv_rereg_mr"):
            mr.rereg(**change)
        assert (mr.addr, mr.length, mr.lkey, mr.access, mr.pd) == before
    mr.view[:4] = b"used"
    mr.close()
