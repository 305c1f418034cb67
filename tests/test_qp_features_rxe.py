"""What few devices can: refused with a reason here, and the structs that C gets where they could."""

from __future__ import annotations

import pytest
from support import make_qp

import pyverbs_lite as pvl
from pyverbs_lite._objects import qp_features as _qp_features
from pyverbs_lite._objects import qp_init as _qp_init
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

T, Op = pvl.QPType, pvl.WROpcode
CAP = pvl.QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1, max_inline_data=0)


@pytest.fixture
def cq(context):
    return context.create_cq(16)


@pytest.fixture
def qp(pd, cq):
    return make_qp(pd, cq)


class FakeLib:
    """Verbs that note what they are given, and answer; the other names are the real ones."""

    def __init__(self):
        self.given = None

    def __getattr__(self, name):
        return getattr(lib, name)

    def ibv_query_ece(self, qp, ece):
        ece.vendor_id, ece.options = 0x02C9, 0x89ABCDEF
        return 0

    def ibv_set_ece(self, qp, ece):
        self.given = (ece.vendor_id, ece.options, ece.comp_mask)
        return 0

    def ibv_modify_qp_rate_limit(self, qp, attr):
        self.given = (attr.rate_limit, attr.max_burst_sz, attr.typical_pkt_sz, attr.comp_mask)
        return 0

    def ibv_query_qp_data_in_order(self, qp, opcode, flags):
        self.given = (opcode, flags)
        return 3

    def ibv_create_qp_ex(self, context, attr):
        conf = attr.rx_hash_conf
        key = bytes(ffi.buffer(conf.rx_hash_key, conf.rx_hash_key_len)) if conf.rx_hash_key else None
        self.given = {
            "comp_mask": attr.comp_mask,
            "create_flags": attr.create_flags,
            "send_ops_flags": attr.send_ops_flags,
            "source_qpn": attr.source_qpn,
            "max_tso_header": attr.max_tso_header,
            "rx_hash": (conf.rx_hash_function, key, conf.rx_hash_fields_mask),
            "pd": attr.pd,
        }
        ffi.errno = 95
        return ffi.NULL


@pytest.fixture
def fake(monkeypatch):
    made = FakeLib()
    for module in (_qp_features, _qp_init):
        monkeypatch.setattr(module, "lib", made)
    return made


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("ibv_query_ece", lambda qp: qp.query_ece()),
        ("ibv_set_ece", lambda qp: qp.set_ece(pvl.ECE(0x02C9, 1))),
        ("ibv_modify_qp_rate_limit", lambda qp: qp.modify_rate_limit(1000)),
    ],
)
def test_what_the_device_has_not(qp, operation, call):
    with pytest.raises(pvl.UnsupportedError) as caught:
        call(qp)
    assert caught.value.operation == operation
    qp.to_init()  # nothing is the worse for it


def test_order_of_data_is_not_promised(qp):
    assert qp.query_data_in_order(Op.RDMA_WRITE) is False


def test_a_closed_qp(qp):
    qp.close()
    with pytest.raises(pvl.ClosedError):
        qp.query_ece()


# ---------------------------------------------------------------- with a driver that could


def test_ece_in_c(qp, fake):
    assert qp.query_ece() == pvl.ECE(0x02C9, 0x89ABCDEF)
    qp.set_ece(pvl.ECE(0x02C9, 0x80000001))
    assert fake.given == (0x02C9, 0x80000001, 0)
    with pytest.raises(ValueError, match="options must be"):
        qp.set_ece(pvl.ECE(1, 1 << 32))


def test_the_rate_limit_in_c(qp, fake):
    qp.modify_rate_limit(0x89ABCDEF, max_burst_sz=0x12345678, typical_pkt_sz=0x9ABC)
    assert fake.given == (0x89ABCDEF, 0x12345678, 0x9ABC, 0)
    for given in ({"rate_limit": -1}, {"rate_limit": 1 << 32}, {"rate_limit": 1, "typical_pkt_sz": 1 << 16}):
        with pytest.raises(ValueError, match="must be 0 to"):
            qp.modify_rate_limit(**given)


def test_order_of_data_in_c(qp, fake):
    assert qp.query_data_in_order(Op.SEND) is True
    assert fake.given == (lib.IBV_WR_SEND, 0)
    if lib.PVL_HAS_DATA_IN_ORDER_CAPS > 0:
        both = pvl.DataInOrderCaps.WHOLE_MSG | pvl.DataInOrderCaps.ALIGNED_128_BYTES
        assert qp.query_data_in_order(Op.SEND, pvl.DataInOrderFlags.RETURN_CAPS) == both


def create(pd, cq, **options):
    with pytest.raises(pvl.UnsupportedError, match="ibv_create_qp_ex failed"):
        pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=CAP, **options))


def test_extended_members_in_c(pd, cq, fake):
    create(
        pd,
        cq,
        qp_type=T.UD,
        source_qpn=0xABCDEF,
        max_tso_header=0x0102,
        create_flags=pvl.QPCreateFlags.BLOCK_SELF_MCAST_LB,
        send_ops_flags=pvl.SendOpsFlags.WITH_TSO | pvl.SendOpsFlags.WITH_SEND,
    )
    given = fake.given
    assert given["comp_mask"] == (
        lib.IBV_QP_INIT_ATTR_PD
        | lib.IBV_QP_INIT_ATTR_CREATE_FLAGS
        | lib.IBV_QP_INIT_ATTR_MAX_TSO_HEADER
        | lib.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
    )
    assert given["create_flags"] == lib.IBV_QP_CREATE_BLOCK_SELF_MCAST_LB | lib.IBV_QP_CREATE_SOURCE_QPN
    assert given["send_ops_flags"] == lib.IBV_QP_EX_WITH_TSO | lib.IBV_QP_EX_WITH_SEND
    assert (given["source_qpn"], given["max_tso_header"], given["pd"]) == (0xABCDEF, 0x0102, pd._handle)


def test_what_was_not_given_is_not_asked_for(pd, cq, fake):
    create(pd, cq, send_ops_flags=pvl.SendOpsFlags.WITH_SEND)
    assert fake.given["comp_mask"] == lib.IBV_QP_INIT_ATTR_PD | lib.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS


class Table:
    """Stands for an indirection table."""

    _handle = ffi.NULL


def test_a_hash_and_its_table_in_c(pd, fake):
    fields = pvl.RXHashFields.SRC_IPV4 | pvl.RXHashFields.DST_PORT_UDP
    conf = pvl.RXHashConf(rx_hash_fields_mask=fields, rx_hash_key=bytes(range(40)))
    with pytest.raises(pvl.UnsupportedError):  # it has no receives, so it needs no CQ
        pd.create_qp(pvl.QPInitAttr(cap=CAP, qp_type=T.UD, ind_table=Table(), rx_hash=conf))
    function = lib.IBV_RX_HASH_FUNC_TOEPLITZ
    assert fake.given["rx_hash"] == (function, bytes(range(40)), int(fields))
    mask = lib.IBV_QP_INIT_ATTR_PD | lib.IBV_QP_INIT_ATTR_IND_TABLE | lib.IBV_QP_INIT_ATTR_RX_HASH
    assert fake.given["comp_mask"] == mask


@pytest.mark.parametrize("given", [{"ind_table": Table()}, {"rx_hash": object()}])
def test_a_hash_and_its_table_go_together(pd, cq, given):
    with pytest.raises(ValueError, match="ind_table and rx_hash go together"):
        pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=CAP, qp_type=T.UD, **given))


@pytest.mark.parametrize(
    ("given", "text"),
    [({"source_qpn": 1 << 24}, "source_qpn must be"), ({"max_tso_header": 1 << 16}, "max_tso_header must be")],
)
def test_members_that_do_not_fit(pd, cq, given, text):
    with pytest.raises(ValueError, match=text):
        pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=CAP, qp_type=T.UD, **given))
