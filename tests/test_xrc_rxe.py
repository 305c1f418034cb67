"""XRC: soft-RoCE and siw have none, so what is tested is the refusal, the checks, and the structs that C would get."""

from __future__ import annotations

import os

import pytest
from support import make_qp

import pyverbs_lite as pvl
from pyverbs_lite import srq, xrcd
from pyverbs_lite._base import check as _check
from pyverbs_lite._objects import qp_init as _qp_init
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

T = pvl.QPType
CAP = pvl.QPCap(max_send_wr=4, max_recv_wr=0, max_send_sge=1, max_recv_sge=0, max_inline_data=0)


def test_the_device_says_so(context):
    assert not context.query_device().device_cap_flags & pvl.DeviceCapFlags.XRC


def test_there_is_no_domain(context):
    with pytest.raises(pvl.UnsupportedError, match="ibv_open_xrcd") as caught:
        context.open_xrcd()
    assert caught.value.operation == "ibv_open_xrcd"
    with open(__file__) as file, pytest.raises(pvl.UnsupportedError):
        context.open_xrcd(file.fileno(), os.O_CREAT | os.O_EXCL)


def test_there_is_no_domain_on_iwarp():
    with pvl.open_device("siw0") as context, pytest.raises(pvl.UnsupportedError):
        context.open_xrcd()


@pytest.mark.parametrize("oflags", [os.O_TRUNC, os.O_CREAT | os.O_RDWR])
def test_flags_that_mean_nothing_here(context, oflags):
    with pytest.raises(ValueError, match=r"oflags are os\.O_CREAT and os\.O_EXCL"):
        context.open_xrcd(0, oflags)


def test_a_domain_without_a_file_is_made(context):
    with pytest.raises(ValueError, match=r"give os\.O_CREAT"):
        context.open_xrcd(oflags=0)


@pytest.mark.parametrize("fd", [-1, 1 << 31])
def test_a_descriptor_is_a_number_from_0_on(context, fd):
    with pytest.raises(ValueError, match="fd must be"):
        context.open_xrcd(fd)


def test_a_sending_qp_is_refused_by_the_device(context, pd):
    cq = context.create_cq(4)
    with pytest.raises(pvl.VerbsOSError, match="ibv_create_qp"):
        pd.create_qp(pvl.QPInitAttr(send_cq=cq, cap=CAP, qp_type=T.XRC_SEND))


@pytest.mark.parametrize(
    ("qp_type", "given", "error", "text"),
    [
        (T.XRC_RECV, {}, ValueError, "XRC_RECV QP needs xrcd="),
        (T.XRC_SEND, {}, TypeError, "send_cq must be a CQ"),
        (T.RC, {}, TypeError, "send_cq must be a CQ"),
        (T.RC, {"xrcd": object()}, TypeError, "send_cq must be a CQ"),
        (T.XRC_RECV, {"xrcd": object()}, TypeError, "xrcd must be an XRCD"),
    ],
)
def test_what_each_type_needs(pd, qp_type, given, error, text):
    with pytest.raises(error, match=text):
        pd.create_qp(pvl.QPInitAttr(cap=CAP, qp_type=qp_type, **given))


# ---------------------------------------------------------------- with a driver that could


class FakeLib:
    """The verbs of XRC, which note what they are given; the other names are the real ones."""

    def __init__(self, real_qp=None):
        self.given = {}
        self.keep = []
        self.real_qp = real_qp

    def __getattr__(self, name):
        return getattr(lib, name)

    def ibv_open_xrcd(self, context, attr):
        self.given["open"] = (attr.comp_mask, attr.fd, attr.oflags)
        return self._made("struct ibv_xrcd *")

    def ibv_close_xrcd(self, handle):
        self.given["close"] = handle
        return 0

    def ibv_create_srq_ex(self, context, attr):
        self.given["srq"] = (attr.comp_mask, attr.srq_type, attr.pd, attr.xrcd, attr.cq, attr.attr.max_wr)
        return self._made("struct ibv_srq *")

    def ibv_destroy_srq(self, handle):
        return 0

    def ibv_get_srq_num(self, handle, number):
        number[0] = 0xABCDEF
        return 0

    def ibv_create_qp_ex(self, context, attr):
        self.given["qp"] = (attr.comp_mask, attr.qp_type, attr.pd, attr.xrcd, attr.send_cq, attr.recv_cq)
        qp = self._made("struct ibv_qp *")
        qp.qp_num = 0x123456
        return qp

    def ibv_open_qp(self, context, attr):
        self.given["open_qp"] = (attr.comp_mask, attr.qp_num, attr.qp_type, attr.xrcd)
        return self.real_qp or ffi.NULL

    def ibv_destroy_qp(self, handle):
        return 0

    def _made(self, kind):
        self.keep.append(ffi.new(kind))
        return self.keep[-1]


@pytest.fixture
def fake(monkeypatch):
    import pyverbs_lite.qp

    made = FakeLib()
    for module in (xrcd, srq, _qp_init, pyverbs_lite.qp):
        monkeypatch.setattr(module, "lib", made)
    return made


def test_the_structs_that_c_gets(context, pd, fake):
    cq = context.create_cq(4)
    with open(__file__) as file, context.open_xrcd(file.fileno(), os.O_CREAT) as domain:
        assert fake.given["open"] == (3, file.fileno(), os.O_CREAT)
        shared = pd.create_srq(pvl.SRQInitAttr(max_wr=5, srq_type=pvl.SRQType.XRC, xrcd=domain, cq=cq))
        mask = lib.IBV_SRQ_INIT_ATTR_TYPE | lib.IBV_SRQ_INIT_ATTR_PD | lib.IBV_SRQ_INIT_ATTR_XRCD
        mask |= lib.IBV_SRQ_INIT_ATTR_CQ
        assert fake.given["srq"] == (mask, lib.IBV_SRQT_XRC, pd._handle, domain._handle, cq._handle, 5)
        assert shared.get_srq_num() == 0xABCDEF
        qp = pd.create_qp(pvl.QPInitAttr(cap=CAP, qp_type=T.XRC_RECV, xrcd=domain))
        assert fake.given["qp"] == (
            lib.IBV_QP_INIT_ATTR_XRCD,
            lib.IBV_QPT_XRC_RECV,
            ffi.NULL,
            domain._handle,
            ffi.NULL,
            ffi.NULL,
        )
        with pytest.raises(ValueError, match="an XRC SRQ is named by each request's remote_srqn"):
            make = pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=CAP, srq=shared)
            pd.create_qp(make)
        with pytest.raises(ValueError, match="cannot be posted to a XRC_RECV QP"):
            qp.post_send(pvl.SendWR())
    assert (shared.closed, qp.closed, "close" in fake.given) == (True, True, True)


def test_receives_of_a_domain_find_their_completions(context, pd, fake):
    """They complete under the number of a QP that another process may have made."""
    cq = context.create_cq(4)
    domain = context.open_xrcd()
    assert fake.given["open"][1:] == (-1, os.O_CREAT)
    shared = pd.create_srq(pvl.SRQInitAttr(max_wr=5, srq_type=pvl.SRQType.XRC, xrcd=domain, cq=cq))
    mr = pd.alloc(16)
    hold = pvl.srq.InFlight  # the queue's own class
    assert isinstance(shared._queue, hold)
    from pyverbs_lite._objects.inflight import Hold

    request = Hold.of(77, [mr])
    shared._queue.add([request])
    raw = ffi.new("struct ibv_wc *")
    raw.wr_id, raw.qp_num, raw.opcode, raw.byte_len = request.serial, 0x654321, lib.IBV_WC_RECV, 5
    wc, ledger = cq._read(raw, 0)
    assert (wc.wr_id, wc.qp_num, wc.is_recv, wc.byte_len) == (77, 0x654321, True, 5)
    ledger.completed(request.serial, lib.IBV_WC_SUCCESS)
    mr.close()
    shared.close()
    domain.close()


def test_another_processs_qp(context, pd, fake, monkeypatch):
    cq = context.create_cq(4)
    real = make_qp(pd, cq)  # made before its verbs are faked below: it stands for the other process's
    domain = context.open_xrcd()
    with pytest.raises(ValueError, match="qp_num must be 0 to 16777215"):
        domain.open_qp(1 << 24)
    monkeypatch.setattr(_check, "ffi", type("FFI", (), {"errno": 22}))
    with pytest.raises(pvl.VerbsOSError, match="ibv_open_qp failed: EINVAL"):
        domain.open_qp(0xABCDEF)
    mask = lib.IBV_QP_OPEN_ATTR_NUM | lib.IBV_QP_OPEN_ATTR_XRCD | lib.IBV_QP_OPEN_ATTR_TYPE
    assert fake.given["open_qp"] == (mask, 0xABCDEF, lib.IBV_QPT_XRC_RECV, domain._handle)
    real.to_init()
    fake.real_qp = real._handle
    opened = domain.open_qp(real.qp_num)
    assert (opened.qp_num, opened.state) == (real.qp_num, pvl.QPState.INIT)
    domain.close()
    assert opened.closed
    monkeypatch.undo()
    real.close()
