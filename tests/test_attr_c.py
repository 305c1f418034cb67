"""QP attributes on their way into C structs and back: no device needed."""

from __future__ import annotations

from ipaddress import IPv6Address

import pytest

import pyverbs_lite as pvl
from pyverbs_lite import qp_fsm
from pyverbs_lite._objects.attr_c import read_cap, read_qp_attr, write_cap, write_qp_attr
from pyverbs_lite.ffi import ffi, lib

A = pvl.AccessFlags
GID = IPv6Address("2001:db8:1:2:a:b:c:d")


def path(port_num, **route):
    grh = {"dgid": GID, "flow_label": 0xABCDE, "sgid_index": 3, "hop_limit": 61, "traffic_class": 0x68, **route}
    return pvl.AHAttr(port_num=port_num, dlid=0xBEEF, sl=5, src_path_bits=6, static_rate=7, grh=pvl.GlobalRoute(**grh))


#: Every member, each with a value that no other has.
FULL = pvl.QPAttr(
    qp_state=pvl.QPState.RTR,
    cur_qp_state=pvl.QPState.INIT,
    path_mtu=pvl.MTU.MTU_2048,
    path_mig_state=pvl.MigState.REARM,
    qkey=0x11223344,
    rq_psn=0xABCDEF,
    sq_psn=0x123456,
    dest_qp_num=0xFEDCBA,
    qp_access_flags=A.REMOTE_WRITE | A.REMOTE_ATOMIC,
    cap=pvl.QPCap(max_send_wr=101, max_recv_wr=102, max_send_sge=13, max_recv_sge=14, max_inline_data=215),
    ah_attr=path(9),
    alt_ah_attr=path(10, sgid_index=200, hop_limit=2),
    pkey_index=0x1112,
    alt_pkey_index=0x1314,
    en_sqd_async_notify=True,
    max_rd_atomic=21,
    max_dest_rd_atomic=22,
    min_rnr_timer=23,
    port_num=24,
    timeout=25,
    retry_cnt=6,
    rnr_retry=7,
    alt_port_num=28,
    alt_timeout=29,
    rate_limit=0x31323334,
)


def written(attr):
    raw = ffi.new("struct ibv_qp_attr *")
    given = attr.given()
    qp_fsm.check_values(given)
    write_qp_attr(raw, given)
    return raw


def test_every_member_there_and_back():
    assert set(FULL.given()) == set(pvl.QPAttr.__slots__)
    assert read_qp_attr(written(FULL)) == FULL


def test_the_struct_itself():
    raw = written(FULL)
    assert (raw.qp_state, raw.path_mtu, raw.path_mig_state) == (lib.IBV_QPS_RTR, lib.IBV_MTU_2048, lib.IBV_MIG_REARM)
    assert (raw.rq_psn, raw.sq_psn, raw.dest_qp_num, raw.qkey) == (0xABCDEF, 0x123456, 0xFEDCBA, 0x11223344)
    assert (raw.ah_attr.is_global, raw.ah_attr.port_num, raw.ah_attr.dlid) == (1, 9, 0xBEEF)
    assert bytes(raw.ah_attr.grh.dgid.raw) == GID.packed
    assert (raw.ah_attr.grh.sgid_index, raw.alt_ah_attr.grh.sgid_index) == (3, 200)
    assert raw.en_sqd_async_notify == 1


def test_what_is_not_given_stays_zero():
    raw = written(pvl.QPAttr(port_num=3))
    assert raw.port_num == 3
    raw.port_num = 0
    assert bytes(ffi.buffer(raw)) == bytes(ffi.sizeof("struct ibv_qp_attr"))


@pytest.mark.parametrize("nbytes", [256, 512, 1024, 2048, 4096])
def test_an_mtu_in_bytes_becomes_its_code(nbytes):
    assert written(pvl.QPAttr(path_mtu=nbytes)).path_mtu == pvl.MTU.from_bytes_size(nbytes)


def test_a_path_without_global_route():
    local = pvl.AHAttr(port_num=2, dlid=17)
    raw = written(pvl.QPAttr(ah_attr=local))
    assert raw.ah_attr.is_global == 0
    assert read_qp_attr(raw).ah_attr == local


def test_a_qp_that_has_no_path_yet():
    attr = read_qp_attr(ffi.new("struct ibv_qp_attr *"))
    assert attr.path_mtu is None
    assert attr.qp_state == pvl.QPState.RESET
    assert attr.ah_attr == pvl.AHAttr(port_num=0)


def test_sizes_of_queues_there_and_back():
    raw = ffi.new("struct ibv_qp_cap *")
    write_cap(raw, FULL.cap)
    assert (raw.max_send_wr, raw.max_recv_wr, raw.max_inline_data) == (101, 102, 215)
    assert read_cap(raw) == FULL.cap
