"""Flow rules and actions on drivers that steer no packets: the error, and nothing left behind."""

from __future__ import annotations

import pytest
from support import make_qp

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma

ATTR = pvl.FlowAttr(specs=[pvl.FlowSpecEth(dst_mac="02:00:c0:00:02:01"), pvl.FlowSpecUDP(dst_port=4791)])
ESP = pvl.FlowActionESPAttr(esp_attr=pvl.ESPAttr(spi=3), keymat=pvl.AESGCM(key=b"0123456789abcdef", salt=1))


@pytest.fixture
def cq(context):
    return context.create_cq(8)


def test_rxe_steers_no_packets(pd, cq):
    qp = make_qp(pd, cq, qp_type=pvl.QPType.UD)
    for attr in (ATTR, pvl.FlowAttr(), pvl.FlowAttr(type=pvl.FlowAttrType.SNIFFER)):
        with pytest.raises(pvl.UnsupportedError, match="ibv_create_flow failed"):
            qp.create_flow(attr)
    qp.close()


def test_only_qps_that_packets_can_go_to(pd, cq):
    with pytest.raises(ValueError, match=r"RAW_PACKET and UD QPs, and <RC QP"):
        make_qp(pd, cq).create_flow(ATTR)


def test_rxe_has_no_esp(context):
    with pytest.raises(pvl.UnsupportedError, match="ibv_create_flow_action_esp failed"):
        context.create_flow_action_esp(ESP)
    with pytest.raises(TypeError, match="FlowActionESPAttr"):
        context.create_flow_action_esp({"spi": 3})


def test_siw_has_neither():
    with pvl.open_device("siw0") as siw:
        with pytest.raises(pvl.UnsupportedError):
            siw.create_flow_action_esp(ESP)
        with pytest.raises(pvl.UnsupportedError):
            siw.create_counters()
