"""Extended completion queues against a driver made of callbacks: fields that no soft device has; no device."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

import pyverbs_lite as pvl
import pyverbs_lite.cq
import pyverbs_lite.cq_ex
from pyverbs_lite._base.resource import Resource
from pyverbs_lite.ffi import ffi, lib

F = pvl.CreateCQWCFlags
EVERYTHING = F((1 << 12) - 1)
#: Reader -> its type in C, and what it answers.
READERS = {
    "opcode": ("enum ibv_wc_opcode", lib.IBV_WC_RECV),
    "vendor_err": ("uint32_t", 0x51),
    "byte_len": ("uint32_t", 0xF0000001),
    "imm_data": ("uint32_t", int.from_bytes((0xA1B2C3D4).to_bytes(4, "big"), "little")),
    "qp_num": ("uint32_t", 0xABCDEF),
    "src_qp": ("uint32_t", 0x123456),
    "wc_flags": ("unsigned int", lib.IBV_WC_WITH_IMM),
    "slid": ("uint32_t", 0x00FEDCBA),  # more bits than struct ibv_wc has for it
    "sl": ("uint8_t", 9),
    "dlid_path_bits": ("uint8_t", 0x7F),
    "completion_ts": ("uint64_t", 0xFFFF_FFFF_0000_0001),
    "cvlan": ("uint16_t", 0x2ABC),
    "flow_tag": ("uint32_t", 0xABCDE0),
    "completion_wallclock_ns": ("uint64_t", 1_700_000_000_123_456_789),
}
NEEDS = {
    "byte_len": F.WITH_BYTE_LEN,
    "imm_data": F.WITH_IMM,
    "qp_num": F.WITH_QP_NUM,
    "src_qp": F.WITH_SRC_QP,
    "slid": F.WITH_SLID,
    "sl": F.WITH_SL,
    "dlid_path_bits": F.WITH_DLID_PATH_BITS,
    "completion_ts": F.WITH_COMPLETION_TIMESTAMP,
    "cvlan": F.WITH_CVLAN,
    "flow_tag": F.WITH_FLOW_TAG,
    "completion_wallclock_ns": F.WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
}


class Driver:
    """A CQ whose functions are written here. Those for fields that were not asked for are NULL, as in real drivers."""

    def __init__(self):
        self.calls = []  # what was called, in order
        self.waiting = []  # (wr_id, status)
        self.answers = {name: value for name, (_, value) in READERS.items()}
        self.error = errno.ENOENT  # what an empty queue answers
        self.cq = ffi.new("struct ibv_cq_ex *", {"cqe": 15})
        self.attr = None
        self.keep = []

    def made_with(self, attr):
        """Answer ibv_create_cq_ex."""
        self.attr = {name: getattr(attr, name) for name, _ in ffi.typeof(attr[0]).fields}
        self._set("int(struct ibv_cq_ex *, struct ibv_poll_cq_attr *)", "start_poll", lambda cq, attr: self._start())
        self._set("void(struct ibv_cq_ex *)", "end_poll", lambda cq: self.calls.append("end"))
        for name, (ctype, _) in READERS.items():
            if name not in NEEDS or attr.wc_flags & NEEDS[name]:
                self._set(f"{ctype}(struct ibv_cq_ex *)", f"read_{name}", lambda cq, name=name: self._read(name))
        if attr.wc_flags & F.WITH_TM_INFO:
            self._set("void(struct ibv_cq_ex *, struct ibv_wc_tm_info *)", "read_tm_info", self._tm_info)
        return self.cq

    def _set(self, ctype, name, function):
        self.keep.append(ffi.callback(ctype, function))
        setattr(self.cq, name, self.keep[-1])

    def _start(self):
        if not self.waiting:
            return self.error
        self.calls.append("start")
        self.cq.wr_id, self.cq.status = self.waiting.pop(0)
        return 0

    def _read(self, name):
        self.calls.append(name)
        return self.answers[name]

    def _tm_info(self, cq, tm):
        self.calls.append("tm_info")
        tm.tag, tm.priv = 0xFEDC_BA98_7654_3210, 0x1234


class FakeContext(Resource):
    """A context with no device behind it."""

    name = "fake0"

    def __init__(self):
        self._own(ffi.new("struct ibv_context *", {"num_comp_vectors": 2}), lambda _: None)

    def query_device(self):
        return SimpleNamespace(max_cqe=100, vendor_id=0x15B3)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()

    class FakeLib:
        def __getattr__(self, name):
            return getattr(lib, name)

        def ibv_create_cq_ex(self, context, attr):
            return driver.made_with(attr)

        def ibv_destroy_cq(self, cq):
            driver.calls.append("destroy")
            return 0

    monkeypatch.setattr(pyverbs_lite.cq, "lib", FakeLib())
    monkeypatch.setattr(pyverbs_lite.cq_ex, "lib", FakeLib())
    return driver


@pytest.fixture
def context(driver):
    with FakeContext() as made:
        yield made


def test_what_the_verb_gets(context, driver):
    flags = pvl.CreateCQAttrFlags.SINGLE_THREADED | pvl.CreateCQAttrFlags.IGNORE_OVERRUN
    domain = pvl.PD.__new__(pvl.PD)
    domain.context = context
    domain._own(ffi.new("struct ibv_pd *"), lambda _: None, context)
    wc_flags = F.WITH_BYTE_LEN | F.WITH_COMPLETION_TIMESTAMP
    cq = pvl.CQEx(context, 10, comp_vector=1, wc_flags=wc_flags, flags=flags, parent_domain=domain)
    assert {name: driver.attr[name] for name in ("cqe", "comp_vector", "wc_flags", "comp_mask", "flags")} == {
        "cqe": 10,
        "comp_vector": 1,
        "wc_flags": wc_flags | F.WITH_QP_NUM | F.WITH_IMM,  # the library itself needs these
        "comp_mask": lib.IBV_CQ_INIT_ATTR_MASK_FLAGS | lib.IBV_CQ_INIT_ATTR_MASK_PD,
        "flags": flags,
    }
    assert driver.attr["parent_domain"] == domain._handle
    assert driver.attr["channel"] == ffi.NULL
    assert (cq.cqe, cq.wc_flags) == (15, wc_flags)
    domain.close()
    assert cq.closed
    assert driver.calls == ["destroy"]


def test_nothing_is_said_that_is_not_meant(context, driver):
    with pvl.CQEx(context, 3):
        assert (driver.attr["comp_mask"], driver.attr["flags"]) == (0, 0)
        assert driver.attr["wc_flags"] == lib.IBV_WC_STANDARD_FLAGS


def test_every_field(context, driver):
    with pvl.CQEx(context, 10, wc_flags=EVERYTHING) as cq:
        driver.waiting = [(0xFFFF_0000_0000_0001, lib.IBV_WC_SUCCESS)]
        with cq.poll_batch() as batch:
            (wc,) = batch
            assert (wc.wr_id, wc.status, wc.opcode) == (0xFFFF_0000_0000_0001, pvl.WCStatus.SUCCESS, pvl.WCOpcode.RECV)
            assert (wc.byte_len, wc.imm_data, wc.invalidated_rkey) == (0xF0000001, 0xA1B2C3D4, None)
            assert (wc.qp_num, wc.src_qp, wc.vendor_err) == (0xABCDEF, 0x123456, 0x51)
            assert (wc.slid, wc.sl, wc.dlid_path_bits) == (0x00FEDCBA, 9, 0x7F)
            assert wc.completion_ts == 0xFFFF_FFFF_0000_0001
            assert wc.completion_wallclock_ns == 1_700_000_000_123_456_789
            assert (wc.cvlan, wc.flow_tag) == (0x2ABC, 0xABCDE0)
            assert wc.tm_info == pvl.TMInfo(tag=0xFEDC_BA98_7654_3210, priv=0x1234)
        assert driver.calls[0] == "start"
        assert driver.calls[-1] == "end"
        assert sorted(driver.calls[1:-1]) == sorted([*READERS, "tm_info"])  # each once


@pytest.mark.parametrize("name", [*NEEDS, "tm_info"])
def test_a_field_alone(context, driver, name):
    """Only what was asked for is read: the driver has no function for the rest."""
    flag = NEEDS.get(name, F.WITH_TM_INFO)
    with pvl.CQEx(context, 10, wc_flags=flag) as cq:
        driver.waiting = [(1, 0)]
        (wc,) = cq.poll()
        assert getattr(wc, name) not in (None, 0)
        assert set(driver.calls) - {"start", "end"} == {"opcode", "vendor_err", "wc_flags", "qp_num", "imm_data", name}
        for other in ("completion_ts", "completion_wallclock_ns", "cvlan", "flow_tag", "tm_info", "imm_data"):
            assert (getattr(wc, other) is None) == (other != name)


def test_an_invalidated_rkey(context, driver):
    driver.answers |= {"wc_flags": lib.IBV_WC_WITH_INV, "imm_data": 0x00C0FFEE}
    with pvl.CQEx(context, 10, wc_flags=F.WITH_IMM) as cq:
        driver.waiting = [(1, 0)]
        with cq.poll_batch() as batch:
            (wc,) = batch
            assert (wc.invalidated_rkey, wc.imm_data) == (0x00C0FFEE, None)  # host order, and no immediate


def test_of_a_failed_completion_nothing_more_is_read(context, driver):
    with pvl.CQEx(context, 10, wc_flags=EVERYTHING) as cq:
        driver.waiting = [(7, lib.IBV_WC_REM_ACCESS_ERR)]
        (wc,) = cq.poll()
        assert (wc.wr_id, wc.status, wc.vendor_err, wc.qp_num) == (7, pvl.WCStatus.REM_ACCESS_ERR, 0x51, 0xABCDEF)
        assert (wc.completion_ts, wc.tm_info, wc.opcode, wc.slid) == (None, None, None, 0)
        assert driver.calls == ["start", "vendor_err", "qp_num", "end"]


def test_every_start_has_its_end_before_python_sees_anything(context, driver):
    with pvl.CQEx(context, 10, wc_flags=F(0)) as cq:
        driver.waiting = [(i, 0) for i in range(70)]
        with cq.poll_batch() as batch:
            seen = []
            for wc in batch:
                assert driver.calls.count("start") == driver.calls.count("end")
                seen.append(wc.wr_id)
        assert seen == list(range(70))
        order = [call for call in driver.calls if call in ("start", "end")]
        assert order == ["start", "end"] * 70


def test_a_driver_that_fails(context, driver):
    with pvl.CQEx(context, 10) as cq:
        for error, name in ((errno.EINVAL, "EINVAL"), (-1, "EIO"), (-errno.EFAULT, "EFAULT")):
            driver.error = error
            with pytest.raises(pvl.VerbsOSError, match=f"ibv_poll_cq failed: {name}"):
                cq.poll()
            driver.waiting = [(3, 0)]  # what comes before the error is not lost
            assert [wc.wr_id for wc in cq.poll(1)] == [3]
        driver.error = errno.ENOENT
        assert cq.poll() == []


def test_waiting_spins_and_ends(context, driver):
    with pvl.CQEx(context, 10) as cq:
        with pytest.raises(pvl.WaitTimeout):
            cq.wait(0.02)
        driver.waiting = [(4, 0)]
        assert [wc.wr_id for wc in cq.wait(1)] == [4]
