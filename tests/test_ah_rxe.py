"""Address handles on a real driver."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from support import own_gid, path_to

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma

NO_GRH, HAS_GRH = pvl.WCFlags(0), pvl.WCFlags.GRH


def wc_of_a_datagram(flags=HAS_GRH, **members):
    return pvl.WC(1, pvl.WCStatus.SUCCESS, 17, 0, pvl.WCOpcode.RECV, 40, wc_flags=flags, is_recv=True, **members)


def header_to(gid, sender):
    return pvl.GRH(sgid=sender, dgid=gid, version=4, hop_limit=64, next_hdr=17, traffic_class=0x24)


@pytest.fixture
def row(context):
    return own_gid(context)


def test_an_address_handle_is_owned(context, pd, row):
    attr = path_to(context, row)
    with pd.create_ah(attr) as ah:
        assert (ah.attr, ah.pd, ah.closed) == (attr, pd, False)
    assert ah.closed
    ah.close()
    with pytest.raises(TypeError, match="AH holds a handle"):
        copy.copy(ah)


def test_it_goes_with_its_domain(context, row):
    pd = context.alloc_pd()
    handles = [pd.create_ah(path_to(context, row)) for _ in range(3)]
    pd.close()
    assert all(ah.closed for ah in handles)


def test_a_dropped_one_warns(context, pd, row):
    ah = pd.create_ah(path_to(context, row))
    with pytest.warns(ResourceWarning, match=f"AH of {context.name} was never closed"):
        del ah


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"grh": None, "is_global": False, "dlid": 5}, "need a global route .* a LID does not do"),
        ({"port_num": 2}, "port_num of .* must be 1 to 1, not 2"),
        ({"port_num": 0}, "port_num 0"),
        ({"sl": 16}, "sl 16"),
        ({"is_global": False}, "is_global is False but grh is"),
    ],
)
def test_what_cannot_be_an_address(context, pd, row, change, text):
    attr = dataclasses.replace(path_to(context, row), **change)
    with pytest.raises(ValueError, match=text):
        pd.create_ah(attr)


@pytest.mark.parametrize("bad", [None, "::1", b"\0" * 16, pvl.GlobalRoute(dgid="::1")])
def test_what_is_no_address(pd, bad):
    with pytest.raises(TypeError, match="ah_attr must be of class AHAttr"):
        pd.create_ah(bad)


def test_a_gid_index_outside_the_table(context, pd, row):
    size = context.query_port(1).gid_tbl_len
    route = pvl.GlobalRoute(dgid=row.gid, sgid_index=255)
    if size > 255:
        with pytest.raises(pvl.VerbsOSError, match="no address handle for port 1, GlobalRoute"):
            pd.create_ah(pvl.AHAttr(port_num=1, grh=route))
    else:
        with pytest.raises(ValueError, match="sgid_index must be 0 to"):
            pd.create_ah(pvl.AHAttr(port_num=1, grh=route))


def test_an_address_that_no_route_leads_to(pd, row):
    route = pvl.GlobalRoute(dgid="2001:db8:dead::1", sgid_index=row.gid_index)
    with pytest.raises(pvl.VerbsOSError, match="ibv_create_ah failed"):
        pd.create_ah(pvl.AHAttr(port_num=1, grh=route))


# ---------------------------------------------------------------- from a completion


def test_the_way_back(context, pd, row):
    sender = row.gid  # the one address that is reachable here
    with pvl.AH.from_wc(pd, wc_of_a_datagram(), header_to(row.gid, sender)) as ah:
        assert (ah.attr.grh.dgid, ah.attr.grh.sgid_index, ah.attr.port_num) == (sender, row.gid_index, 1)
        assert ah.attr.grh.traffic_class == 0x24


def test_the_header_may_be_the_receives_own_bytes(context, pd, row):
    raw = header_to(row.gid, row.gid).to_bytes()
    for buffer in (raw, bytearray(raw + b"payload"), memoryview(raw)):
        assert pvl.ah_attr_from_wc(context, wc_of_a_datagram(), buffer).grh.sgid_index == row.gid_index


def test_the_way_back_without_a_header_is_by_lid(context):
    """RoCE has no such datagram, InfiniBand has: only the address is made here."""
    attr = pvl.ah_attr_from_wc(context, wc_of_a_datagram(NO_GRH, slid=0x1234, sl=3, dlid_path_bits=5))
    assert (attr.grh, attr.is_global, attr.dlid, attr.sl, attr.src_path_bits) == (None, False, 0x1234, 3, 5)


def test_a_header_that_the_completion_tells_of_must_be_given(pd):
    with pytest.raises(ValueError, match="give the receive's first 40 bytes"):
        pvl.AH.from_wc(pd, wc_of_a_datagram())


def test_a_datagram_that_was_sent_to_somebody_else(context, pd, row):
    header = header_to(pvl.gid.parse_gid("203.0.113.9"), row.gid)
    with pytest.raises(pvl.VerbsOSError, match=r"203\.0\.113\.9|::ffff:cb00:7109") as caught:
        pvl.AH.from_wc(pd, wc_of_a_datagram(), header)
    assert caught.value.operation == "ibv_init_ah_from_wc"
    assert f"is no GID of {context.name} port 1" in str(caught.value)


def test_a_failed_completion_leads_nowhere(pd):
    with pytest.raises(pvl.FlushError):
        pvl.AH.from_wc(pd, pvl.WC(1, pvl.WCStatus.WR_FLUSH_ERR, 17, 0), bytes(40))


@pytest.mark.parametrize("port_num", [0, 2])
def test_a_port_that_is_not_there(pd, port_num):
    with pytest.raises(ValueError, match="port_num"):
        pvl.AH.from_wc(pd, wc_of_a_datagram(), bytes(40), port_num)
