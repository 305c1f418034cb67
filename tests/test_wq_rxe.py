"""Work queues and indirection tables: the error where a driver has none, and what the verbs get where it has."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
from support import make_qp

import pyverbs_lite as pvl
import pyverbs_lite.wq
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

RESET, RDY, ERR = pvl.WQState.RESET, pvl.WQState.RDY, pvl.WQState.ERR
ALL = {"max_wr": 7, "max_sge": 2}


@pytest.fixture(params=["create_cq", "create_cq_ex"])
def cq(context, request):
    return getattr(context, request.param)(64)


def test_rxe_has_no_wqs(context, pd, cq):
    with pytest.raises(pvl.UnsupportedError, match="ibv_create_wq failed"):
        context.create_wq(pvl.WQInitAttr(pd=pd, cq=cq, **ALL))


def test_siw_has_no_wqs():
    with pvl.open_device("siw0") as siw, pytest.raises(pvl.UnsupportedError, match="ibv_create_wq failed"):
        siw.create_wq(pvl.WQInitAttr(pd=siw.alloc_pd(), cq=siw.create_cq(4), **ALL))


@pytest.fixture
def verbs(monkeypatch, context):
    """Stand in for a device that has WQs; ``order`` is what was called, ``posted`` the requests as C saw them."""
    fake = SimpleNamespace(order=[], posted=[], rc=0, accepts=1 << 30, wqs=[], attr=None, table=None)

    class FakeLib:
        def __getattr__(self, name):
            return getattr(lib, name)

        def ibv_create_wq(self, context, attr):
            fake.order.append("create")
            fake.attr = {name: getattr(attr, name) for name, _ in ffi.typeof(attr[0]).fields}
            wq = ffi.new("struct ibv_wq *", {"wq_num": 0xABC0 + len(fake.wqs), "state": RESET})
            fake.wqs.append(wq)
            return wq

        def ibv_modify_wq(self, wq, attr):
            fake.order.append(
                ("modify", attr.attr_mask, attr.wq_state, attr.curr_wq_state, attr.flags, attr.flags_mask)
            )
            if not fake.rc and attr.attr_mask & 1:
                wq.state = attr.wq_state
            return fake.rc

        def ibv_destroy_wq(self, wq):
            fake.order.append(("destroy", fake.wqs.index(wq)))
            return fake.rc

        def ibv_post_wq_recv(self, wq, wr, bad):
            wr = ffi.cast("struct ibv_recv_wr *", wr)
            while wr:
                if len(fake.posted) >= fake.accepts:
                    bad[0] = wr
                    return errno.ENOMEM
                sges = [(wr.sg_list[i].addr, wr.sg_list[i].length, wr.sg_list[i].lkey) for i in range(wr.num_sge)]
                fake.posted.append((wr.wr_id, sges))
                wr = wr.next
            return 0

        def ibv_create_rwq_ind_table(self, context, attr):
            fake.order.append("table")
            fake.entries = [fake.wqs.index(attr.ind_tbl[i]) for i in range(1 << attr.log_ind_tbl_size)]
            fake.table = ffi.new("struct ibv_rwq_ind_table *", {"ind_tbl_num": 0x5A})
            return fake.table

        def ibv_destroy_rwq_ind_table(self, table):
            fake.order.append("destroy table")
            return fake.rc

    monkeypatch.setattr(pyverbs_lite.wq, "lib", FakeLib())
    yield fake
    fake.rc = 0
    context.close()  # while the verbs are still these: the real ones would take the handles for theirs


@pytest.fixture
def wq(context, pd, cq, verbs):
    return context.create_wq(pvl.WQInitAttr(pd=pd, cq=cq, **ALL))


@pytest.fixture
def mr(pd):
    return pd.alloc(4096)


def complete(cq, *found):
    """Let the CQ find completions as a driver would write them: of a QP number that no QP here has."""

    def look(handle, spin_ns):
        del cq._look
        for i, (serial, status) in enumerate(found):
            raw = cq._raw[i]
            ffi.buffer(ffi.addressof(raw))[:] = bytes(ffi.sizeof("struct ibv_wc"))
            raw.wr_id, raw.status, raw.qp_num, raw.opcode = serial, status, 0x777777, lib.IBV_WC_RECV
            raw.byte_len = 60 + i
        cq._got[0] = len(found)
        return 0

    cq._look = look
    return cq.poll()


# ---------------------------------------------------------------- making


def test_what_a_wq_is_made_from(context, pd, cq, verbs, wq):
    assert (verbs.attr["wq_type"], verbs.attr["max_wr"], verbs.attr["max_sge"]) == (lib.IBV_WQT_RQ, 7, 2)
    assert (verbs.attr["pd"], verbs.attr["cq"]) == (pd._handle, cq._handle)
    assert (verbs.attr["comp_mask"], verbs.attr["create_flags"]) == (0, 0)
    assert (wq.wq_num, wq.state, wq.pd, wq.cq) == (0xABC0, RESET, pd, cq)
    flags = pvl.WQFlags.CVLAN_STRIPPING | pvl.WQFlags.DELAY_DROP
    with context.create_wq(pvl.WQInitAttr(pd=pd, cq=cq, create_flags=flags, **ALL)) as other:
        assert (verbs.attr["comp_mask"], verbs.attr["create_flags"]) == (lib.IBV_WQ_INIT_ATTR_FLAGS, flags)
        assert repr(other) == "<WQ 0xabc1 in RESET>"
    assert repr(other) == "<WQ 0xabc1 (closed)>"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"pd": 1}, TypeError, "pd must be a PD"),
        ({"cq": None}, TypeError, "cq must be a CQ"),
        ({"max_wr": 0}, ValueError, "max_wr"),
        ({"max_sge": 1 << 32}, ValueError, "max_sge"),
        ({"create_flags": 1 << 20}, ValueError, "create_flags"),
        ({"wq_type": 0}, TypeError, "wq_type"),
    ],
)
def test_a_wq_that_cannot_be(context, pd, cq, verbs, options, error, match):
    with pytest.raises(error, match=match):
        context.create_wq(pvl.WQInitAttr(**{"pd": pd, "cq": cq, **ALL, **options}))
    with pytest.raises(TypeError, match="WQInitAttr"):
        context.create_wq(ALL)
    with pvl.open_device(context.name) as other, pytest.raises(ValueError, match="cq belongs to"):
        context.create_wq(pvl.WQInitAttr(pd=pd, cq=other.create_cq(4), **ALL))
    assert verbs.order == []


# ---------------------------------------------------------------- states

EDGES = {(RESET, RESET), (RESET, RDY), (RDY, RDY), (RDY, RESET), (RDY, ERR), (ERR, ERR), (ERR, RESET)}


@pytest.mark.parametrize("target", [RESET, RDY, ERR])
@pytest.mark.parametrize("current", [RESET, RDY, ERR])
def test_every_edge(verbs, wq, current, target):
    verbs.wqs[0].state = current
    if (current, target) in EDGES:
        wq.modify(target)
        assert verbs.order[-1] == ("modify", lib.IBV_WQ_ATTR_STATE | lib.IBV_WQ_ATTR_CURR_STATE, target, current, 0, 0)
        assert wq.state == target
    else:
        with pytest.raises(pvl.InvalidTransition, match=f"from {current.name} to {target.name}") as caught:
            wq.modify(target)
        assert (caught.value.current, caught.value.target) == (current, target)
        assert caught.value.operation == "ibv_modify_wq"
        assert verbs.order == ["create"]
        assert wq.state == current


def test_flags(verbs, wq):
    strip, fcs = pvl.WQFlags.CVLAN_STRIPPING, pvl.WQFlags.SCATTER_FCS
    wq.modify(flags=strip, flags_mask=strip | fcs)
    assert verbs.order[-1] == ("modify", lib.IBV_WQ_ATTR_FLAGS, 0, 0, strip, strip | fcs)
    wq.modify(RDY, flags_mask=fcs)
    assert verbs.order[-1][1:4] == (7, RDY, RESET)


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((), {}, ValueError),
        ((), {"flags": pvl.WQFlags.DELAY_DROP}, ValueError),
        ((1,), {}, TypeError),
        ((pvl.QPState.RTS,), {}, TypeError),
        ((RDY,), {"curr_wq_state": ERR}, pvl.InvalidTransition),
        ((pvl.WQState.UNKNOWN,), {}, pvl.InvalidTransition),
    ],
)
def test_a_change_that_cannot_be(verbs, wq, arguments, options, error):
    with pytest.raises(error):
        wq.modify(*arguments, **options)
    assert verbs.order == ["create"]


def test_a_refused_change_leaves_the_state(verbs, wq):
    verbs.rc = errno.EINVAL
    with pytest.raises(pvl.VerbsOSError, match="ibv_modify_wq failed: EINVAL"):
        wq.modify(RDY)
    assert wq.state == RESET
    verbs.rc = 0
    wq.modify(RDY)


# ---------------------------------------------------------------- receives


def test_posting(verbs, wq, mr):
    wq.modify(RDY)
    wq.post_recv(pvl.RecvWR(sg_list=[mr[8:20], mr[100:101]], wr_id=5), pvl.RecvWR(sg_list=[mr], wr_id=5))
    assert [sges for _, sges in verbs.posted] == [
        [(mr.addr + 8, 12, mr.lkey), (mr.addr + 100, 1, mr.lkey)],
        [(mr.addr, 4096, mr.lkey)],
    ]
    assert wq.recvs_in_flight == 2
    with pytest.raises(pvl.StateError):
        mr.close()


@pytest.mark.parametrize("state", [RESET, ERR])
def test_posting_in_the_wrong_state(verbs, wq, mr, state):
    verbs.wqs[0].state = state
    with pytest.raises(pvl.StateError, match=f"in {state.name}> cannot take receives"):
        wq.post_recv(pvl.RecvWR(sg_list=[mr]))
    assert wq.recvs_in_flight == 0
    mr.close()


def test_requests_that_cannot_be_right(context, pd, verbs, wq, mr):
    wq.modify(RDY)
    with pytest.raises(ValueError, match="3 SGEs are more than this WQ's max_sge, 2"):
        wq.post_recv(pvl.RecvWR(sg_list=[mr[:1]] * 3))
    with pytest.raises(ValueError, match="without LOCAL_WRITE"):
        wq.post_recv(pvl.RecvWR(sg_list=[pd.reg_mr(b"read only")]))
    with pytest.raises(ValueError, match="another PD"):
        wq.post_recv(pvl.RecvWR(sg_list=[context.alloc_pd().alloc(8)]))
    with pytest.raises(TypeError, match="RecvWR"):
        wq.post_recv(pvl.SendWR())
    assert verbs.posted == []


def test_a_full_queue(verbs, wq, mr):
    wq.modify(RDY)
    verbs.accepts = 2
    with pytest.raises(pvl.VerbsOSError, match="ibv_post_wq_recv failed: ENOMEM") as caught:
        wq.post_recv(*[pvl.RecvWR(sg_list=[mr[i : i + 1]], wr_id=i) for i in range(5)])
    assert caught.value.posted == 2
    assert wq.recvs_in_flight == 2


def test_completions_find_their_receives_without_a_qp_number(pd, cq, verbs, wq, mr):
    make_qp(pd, cq)  # a real QP on the same CQ does not claim them
    wq.modify(RDY)
    wq.post_recv(*[pvl.RecvWR(sg_list=[mr[i : i + 1]], wr_id=90 + i) for i in range(3)])
    serials = [serial for serial, _ in verbs.posted]
    found = complete(cq, (serials[0], 0), (serials[1], 0))
    assert [(wc.wr_id, wc.byte_len, wc.is_recv) for wc in found] == [(90, 60, True), (91, 61, True)]
    assert wq.recvs_in_flight == 1
    (failed,) = complete(cq, (serials[2], lib.IBV_WC_LOC_PROT_ERR))
    assert (failed.wr_id, failed.status, failed.is_recv) == (92, pvl.WCStatus.LOC_PROT_ERR, True)
    assert (wq.recvs_in_flight, wq.state) == (0, ERR)
    wq.modify(RESET)
    assert wq.state == RESET
    mr.close()


def test_reset_lets_go_of_the_receives(verbs, wq, mr):
    wq.modify(RDY)
    wq.post_recv(pvl.RecvWR(sg_list=[mr]))
    wq.modify(ERR)
    assert wq.recvs_in_flight == 1  # their flush has not been polled
    wq.modify(RESET)
    assert wq.recvs_in_flight == 0
    mr.close()


def test_closing_lets_go_of_the_receives(verbs, wq, mr):
    wq.modify(RDY)
    wq.post_recv(pvl.RecvWR(sg_list=[mr]))
    verbs.rc = errno.EBUSY
    with pytest.raises(pvl.VerbsOSError, match="ibv_destroy_wq failed: EBUSY"):
        wq.close()
    assert wq.recvs_in_flight == 1
    verbs.rc = 0
    wq.close()
    wq.close()
    mr.close()
    with pytest.raises(pvl.ClosedError):
        wq.post_recv()


def test_the_pd_closes_its_wqs_first(pd, verbs, wq, mr):
    wq.modify(RDY)
    wq.post_recv(pvl.RecvWR(sg_list=[mr]))
    pd.close()
    assert (wq.closed, mr.closed) == (True, True)
    assert verbs.order[-1] == ("destroy", 0)


# ---------------------------------------------------------------- tables


def test_a_table_with_a_wq_in_it_twice(context, pd, cq, verbs, wq):
    other = context.create_wq(pvl.WQInitAttr(pd=pd, cq=cq, **ALL))
    table = context.create_rwq_ind_table([wq, other, other, wq])
    assert verbs.entries == [0, 1, 1, 0]
    assert (table.ind_tbl_num, table.wqs) == (0x5A, (wq, other, other, wq))
    other.close()  # the table goes first
    assert table.closed
    assert verbs.order[-2:] == ["destroy table", ("destroy", 1)]


@pytest.mark.parametrize("size", [0, 3, 5, 12])
def test_a_table_has_a_power_of_two_of_entries(context, verbs, wq, size):
    with pytest.raises(ValueError, match=f"1, 2, 4, 8 … entries, and not {size}"):
        context.create_rwq_ind_table([wq] * size)
    assert "table" not in verbs.order


def test_a_table_of_the_wrong_things(context, verbs, wq):
    with pytest.raises(TypeError, match="made of WQs"):
        context.create_rwq_ind_table([wq, 7])
    wq.close()
    with pytest.raises(pvl.ClosedError):
        context.create_rwq_ind_table([wq])


def test_a_refused_destroy_keeps_table_and_wq(context, verbs, wq):
    table = context.create_rwq_ind_table([wq])
    verbs.rc = errno.EBUSY
    with pytest.raises(pvl.VerbsOSError, match="ibv_destroy_rwq_ind_table failed: EBUSY"):
        wq.close()
    assert not wq.closed
    assert not table.closed
    verbs.rc = 0


def test_rxe_makes_no_qp_of_a_table(context, pd, verbs, wq):
    """The table is not real, and the QP is: the driver refuses before it looks at the table."""
    table = context.create_rwq_ind_table([wq])
    fields = pvl.RXHashFields.SRC_IPV4 | pvl.RXHashFields.DST_IPV4
    conf = pvl.RXHashConf(rx_hash_fields_mask=fields, rx_hash_key=bytes(range(40)))
    cap = pvl.QPCap(max_send_wr=0, max_recv_wr=0, max_send_sge=0, max_recv_sge=0, max_inline_data=0)
    attr = pvl.QPInitAttr(cap=cap, qp_type=pvl.QPType.RAW_PACKET, ind_table=table, rx_hash=conf)
    with pytest.raises(pvl.UnsupportedError):
        pd.create_qp(attr)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rx_hash_key": b""}, ValueError),
        ({"rx_hash_key": "k" * 40}, TypeError),
        ({"rx_hash_fields_mask": 1 << 40}, ValueError),
        ({"rx_hash_function": 1}, TypeError),
    ],
)
def test_a_hash_that_cannot_be(options, error):
    with pytest.raises(error):
        pvl.RXHashConf(**{"rx_hash_fields_mask": pvl.RXHashFields.SRC_IPV6, "rx_hash_key": bytes(40), **options})
