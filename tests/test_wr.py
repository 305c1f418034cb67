"""Work requests and completions as values: C structs filled by hand, no device needed."""

from __future__ import annotations

import copy
import errno
import pickle

import pytest

import pyverbs_lite as pvl
from pyverbs_lite._objects.inflight import Hold, InFlight, Ledger
from pyverbs_lite._objects.posting import lay_out
from pyverbs_lite._objects.rules import Rules
from pyverbs_lite.ffi import ffi, lib
from pyverbs_lite.wr import completion_error, immediate, wc_from_c

RC, UC, UD = pvl.QPType.RC, pvl.QPType.UC, pvl.QPType.UD
Op, F = pvl.WROpcode, pvl.SendFlags
CAP = pvl.QPCap(max_send_wr=9, max_recv_wr=7, max_send_sge=3, max_recv_sge=2, max_inline_data=24)
REMOTE = pvl.RemoteBuffer(0x7F0000001000, 0xA1B2C3D4, 4096)


def rules(qp_type=RC):
    return Rules(qp_type, CAP, None)


def check(wr, depth=4, qp_type=RC):
    return rules(qp_type).check_send(wr, depth)


def sge(length, addr=0x10000, lkey=0x55):
    return pvl.SGE(addr, length, lkey)


# ---------------------------------------------------------------- immediates


@pytest.mark.parametrize("value", [0, 1, 0x89ABCDEF, 0xFFFFFFFF])
def test_an_immediate_is_32_bits(value):
    assert immediate(value) == value


@pytest.mark.parametrize("value", [1 << 32, -1, -(1 << 31)])
def test_an_immediate_outside_32_bits(value):
    with pytest.raises(ValueError, match="imm_data"):
        check(pvl.SendWR(opcode=Op.SEND_WITH_IMM, imm_data=value))


@pytest.mark.parametrize("value", [None, True, 1.0, "1", b"\0\0\0\1"])
def test_an_immediate_is_an_integer(value):
    with pytest.raises(TypeError, match="imm_data"):
        check(pvl.SendWR(opcode=Op.SEND_WITH_IMM, imm_data=value))


def test_an_immediate_needs_an_opcode_that_carries_it():
    with pytest.raises(ValueError, match="SEND carries no immediate"):
        check(pvl.SendWR(imm_data=0))


@pytest.mark.parametrize("value", [0, 0x89ABCDEF, 0xFFFFFFFF])
def test_the_struct_has_the_immediate_big_endian(value):
    wr = pvl.SendWR(opcode=Op.SEND_WITH_IMM, imm_data=value)
    wrs, _sges, _bad = lay_out("struct ibv_send_wr", [wr], [Hold.of(0, ())])
    assert bytes(ffi.buffer(ffi.addressof(wrs[0], "imm_data"))) == value.to_bytes(4, "big")


# ---------------------------------------------------------------- requests that cannot be right


@pytest.mark.parametrize(
    ("addr", "length", "lkey"), [(-1, 1, 1), (1 << 64, 1, 1), (1, 1 << 32, 1), (1, -1, 1), (1, 1, 1 << 32)]
)
def test_an_sge_has_the_ranges_of_its_struct(addr, length, lkey):
    with pytest.raises(ValueError, match="of an SGE must be"):
        pvl.SGE(addr, length, lkey)


@pytest.mark.parametrize("wr_id", [-1, 1 << 64])
def test_a_wr_id_has_64_bits(wr_id):
    with pytest.raises(ValueError, match="wr_id"):
        check(pvl.SendWR(wr_id=wr_id))
    with pytest.raises(ValueError, match="wr_id"):
        rules().check_recv(pvl.RecvWR(wr_id=wr_id))


def test_too_many_sges_are_counted():
    with pytest.raises(ValueError, match="4 SGEs are more than this QP's max_send_sge, 3"):
        check(pvl.SendWR(sg_list=[sge(1)] * 4))
    with pytest.raises(ValueError, match="3 SGEs are more than this QP's max_recv_sge, 2"):
        rules().check_recv(pvl.RecvWR(sg_list=[sge(1)] * 3))
    assert check(pvl.SendWR(sg_list=[sge(1)] * 3)) == []


def test_inline_data_are_summed_in_whole_numbers():
    check(pvl.SendWR(sg_list=[sge(8), sge(9), sge(7)], send_flags=F.INLINE))
    with pytest.raises(ValueError, match="25 bytes do not fit inline: this QP's max_inline_data is 24"):
        check(pvl.SendWR(sg_list=[sge(8), sge(9), sge(8)], send_flags=F.INLINE))
    # In 32 bits these come to 16.
    with pytest.raises(ValueError, match="at most 2147483648 bytes"):
        check(pvl.SendWR(sg_list=[sge(0xFFFFFFF0), sge(0x20)], send_flags=F.INLINE))


@pytest.mark.parametrize("opcode", [Op.RDMA_READ, Op.ATOMIC_FETCH_AND_ADD])
def test_nothing_that_fetches_goes_inline(opcode):
    with pytest.raises(ValueError, match="nothing can go inline"):
        check(pvl.SendWR(opcode=opcode, sg_list=[sge(8)], remote=REMOTE, send_flags=F.INLINE))


@pytest.mark.parametrize("opcode", [Op.RDMA_WRITE, Op.RDMA_WRITE_WITH_IMM, Op.RDMA_READ, Op.ATOMIC_CMP_AND_SWP])
def test_what_is_remote_says_where(opcode):
    imm = 1 if opcode == Op.RDMA_WRITE_WITH_IMM else None
    with pytest.raises(ValueError, match=f"{opcode.name} needs remote="):
        check(pvl.SendWR(opcode=opcode, sg_list=[sge(8)], imm_data=imm))


def test_what_reaches_beyond_the_remote_range():
    with pytest.raises(ValueError, match="4097 bytes reaches beyond"):
        check(pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[sge(4000), sge(97)], remote=REMOTE))
    check(pvl.SendWR(opcode=Op.RDMA_WRITE, sg_list=[sge(4000), sge(96)], remote=REMOTE))


@pytest.mark.parametrize(("length", "offset"), [(7, 0), (9, 0), (16, 0), (0, 0), (8, 4), (8, 1)])
def test_an_atomic_is_8_aligned_bytes(length, offset):
    with pytest.raises(ValueError, match="8 bytes at an address that is a multiple of 8"):
        check(pvl.SendWR(opcode=Op.ATOMIC_FETCH_AND_ADD, sg_list=[sge(length)], remote=REMOTE[offset : offset + 32]))


@pytest.mark.parametrize("operands", [{"compare_add": 1 << 64}, {"compare_add": -1}, {"swap": 1 << 64}, {"swap": -1}])
def test_the_operands_of_an_atomic_have_64_bits(operands):
    with pytest.raises(ValueError, match=next(iter(operands))):
        check(pvl.SendWR(opcode=Op.ATOMIC_CMP_AND_SWP, sg_list=[sge(8)], remote=REMOTE, **operands))


@pytest.mark.parametrize("opcode", [Op.RDMA_READ, Op.ATOMIC_CMP_AND_SWP])
def test_a_read_that_would_never_start(opcode):
    wr = pvl.SendWR(opcode=opcode, sg_list=[sge(8)], remote=REMOTE)
    with pytest.raises(ValueError, match="max_rd_atomic is 0"):
        check(wr, depth=0)
    check(wr, depth=None)  # nobody knows


@pytest.mark.parametrize(
    ("opcode", "text"),
    [
        (Op.LOCAL_INV, "LOCAL_INV needs invalidate_rkey="),
        (Op.SEND_WITH_INV, "SEND_WITH_INV needs invalidate_rkey="),
        (Op.BIND_MW, "BIND_MW needs mw="),
        (Op.TSO, "TSO cannot be posted to a RC QP"),
    ],
)
def test_an_opcode_without_its_members_never_reaches_the_driver(opcode, text):
    # A driver would follow the zeros: the address of a memory window, the key 0.
    with pytest.raises(ValueError, match=text):
        check(pvl.SendWR(opcode=opcode))


@pytest.mark.parametrize("opcode", [Op.RDMA_READ, Op.ATOMIC_FETCH_AND_ADD])
def test_an_unreliable_connection_fetches_nothing(opcode):
    with pytest.raises(ValueError, match="cannot be posted to a UC QP"):
        check(pvl.SendWR(opcode=opcode, sg_list=[sge(8)], remote=REMOTE), qp_type=UC)


def test_a_datagram_without_address_handle_never_reaches_the_driver():
    with pytest.raises(ValueError, match="ah is missing"):
        check(pvl.SendWR(), qp_type=UD)


@pytest.mark.parametrize("bad", [None, b"data", [sge(1)], 5, pvl.RecvWR()])
def test_post_send_takes_send_requests(bad):
    with pytest.raises(TypeError, match="post_send takes SendWR"):
        check(bad)


@pytest.mark.parametrize("bad", [None, b"data", pvl.SendWR()])
def test_post_recv_takes_receive_requests(bad):
    with pytest.raises(TypeError, match="post_recv takes RecvWR"):
        rules().check_recv(bad)


def test_a_list_of_sges_is_a_list():
    with pytest.raises(TypeError, match="sg_list is a list of SGEs"):
        check(pvl.SendWR(sg_list=sge(3)))
    with pytest.raises(TypeError, match="an SGE is an MR, a slice of one, or an SGE"):
        check(pvl.SendWR(sg_list=[b"bytes"]))


# ---------------------------------------------------------------- the layout in C


def test_a_chain_is_linked_and_its_sges_follow_each_other():
    first = pvl.SendWR(wr_id=5, opcode=Op.RDMA_WRITE, sg_list=[sge(11, 0xA000, 1), sge(13, 0xB000, 2)], remote=REMOTE)
    second = pvl.SendWR(wr_id=6, send_flags=F(0))
    swap = pvl.SendWR(
        wr_id=7,
        opcode=Op.ATOMIC_CMP_AND_SWP,
        sg_list=[sge(8, 0xC000, 3)],
        remote=REMOTE[16:24],
        compare_add=21,
        swap=34,
    )
    holds = [Hold.of(wr.wr_id, ()) for wr in (first, second, swap)]
    wrs, sges, bad = lay_out("struct ibv_send_wr", [first, second, swap], holds)
    assert bad[0] == ffi.NULL
    assert [wrs[i].wr_id for i in range(3)] == [hold.serial for hold in holds]
    assert len({hold.serial for hold in holds}) == 3
    assert wrs[0].next == ffi.addressof(wrs, 1)
    assert wrs[1].next == ffi.addressof(wrs, 2)
    assert wrs[2].next == ffi.NULL
    assert [wrs[i].num_sge for i in range(3)] == [2, 0, 1]
    assert wrs[0].sg_list == sges
    assert wrs[2].sg_list == ffi.addressof(sges, 2)
    assert [(s.addr, s.length, s.lkey) for s in (sges[i] for i in range(3))] == [
        (0xA000, 11, 1),
        (0xB000, 13, 2),
        (0xC000, 8, 3),
    ]
    assert (wrs[0].opcode, wrs[0].send_flags) == (lib.IBV_WR_RDMA_WRITE, lib.IBV_SEND_SIGNALED)
    assert (wrs[0].wr.rdma.remote_addr, wrs[0].wr.rdma.rkey) == (REMOTE.addr, REMOTE.rkey)
    assert wrs[1].send_flags == 0
    atomic = wrs[2].wr.atomic
    assert (atomic.remote_addr, atomic.rkey) == (REMOTE.addr + 16, REMOTE.rkey)
    assert (atomic.compare_add, atomic.swap) == (21, 34)


# ---------------------------------------------------------------- completions


def raw_wc(**members):
    raw = ffi.new("struct ibv_wc *")
    for name, value in members.items():
        setattr(raw, name, value)
    return raw


def filled(**members):
    """Fill everything with something, as drivers leave it behind."""
    base = {"wr_id": 1, "opcode": lib.IBV_WC_RECV, "vendor_err": 0x3C, "byte_len": 77, "qp_num": 0x1234, "src_qp": 9}
    flags = lib.IBV_WC_WITH_IMM
    raw = raw_wc(**{**base, "wc_flags": flags, "pkey_index": 3, "slid": 4, "sl": 5, "dlid_path_bits": 6, **members})
    ffi.buffer(ffi.addressof(raw, "imm_data"))[:] = b"\x89\xab\xcd\xef"
    return raw


def test_a_receive_with_an_immediate():
    wc = wc_from_c(filled(), 42)
    assert wc == pvl.WC(
        42, pvl.WCStatus.SUCCESS, 0x1234, 0x3C, pvl.WCOpcode.RECV, 77, 0x89ABCDEF, None, 9, pvl.WCFlags.WITH_IMM, 3, 4,
        5, 6, True,
    )  # fmt: skip
    wc.raise_for_status()


def test_without_the_flag_there_is_no_immediate():
    assert wc_from_c(filled(wc_flags=0), 0).imm_data is None


def test_a_sender_gets_no_immediate_back():
    wc = wc_from_c(filled(opcode=lib.IBV_WC_SEND), 0)
    assert (wc.imm_data, wc.is_recv, wc.byte_len) == (None, False, 0)


@pytest.mark.parametrize(
    ("opcode", "length", "is_recv"),
    [
        ("SEND", 0, False),
        ("RDMA_WRITE", 0, False),
        ("RDMA_READ", 77, False),
        ("FETCH_ADD", 77, False),
        ("RECV", 77, True),
    ],
)
def test_the_length_only_where_the_verb_gives_one(opcode, length, is_recv):
    wc = wc_from_c(filled(opcode=getattr(lib, f"IBV_WC_{opcode}")), 0)
    assert (wc.byte_len, wc.is_recv) == (length, is_recv)


def test_an_invalidated_rkey():
    raw = filled(wc_flags=lib.IBV_WC_WITH_INV)
    raw.invalidated_rkey = 0xCAFE
    wc = wc_from_c(raw, 0)
    assert (wc.invalidated_rkey, wc.imm_data) == (0xCAFE, None)


@pytest.mark.parametrize("status", [status for status in pvl.WCStatus if status != pvl.WCStatus.SUCCESS])
@pytest.mark.parametrize("is_recv", [True, False, None])
def test_of_a_failed_completion_only_what_is_valid(status, is_recv):
    wc = wc_from_c(filled(status=status), 42, is_recv)
    assert wc == pvl.WC(42, status, 0x1234, 0x3C, is_recv=is_recv)
    with pytest.raises(pvl.CompletionError, match=status.name) as caught:
        wc.raise_for_status()
    error = caught.value
    assert (error.status, error.wr_id, error.qp_num, error.vendor_err) == (status, 42, 0x1234, 0x3C)


def test_a_status_and_an_opcode_that_are_newer_than_we_are():
    assert wc_from_c(filled(opcode=0x7F00), 0).opcode == 0x7F00
    wc = wc_from_c(filled(status=0x77), 0)
    assert wc.status == 0x77
    with pytest.raises(pvl.CompletionError, match="119"):
        wc.raise_for_status()
    assert completion_error(0x77, wr_id=1, qp_num=2, vendor_err=3).errno == errno.EIO


def test_completions_are_plain_values():
    wc = wc_from_c(filled(), 42)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(wc, protocol)) == wc
    assert copy.copy(wc) == wc
    with pytest.raises(AttributeError):
        wc.status = 0


# ---------------------------------------------------------------- what is in flight


class Region:
    def __init__(self):
        self._holders = set()


def holds_of(*wr_ids):
    return [Hold.of(wr_id, (Region(),)) for wr_id in wr_ids]


def busy(holds):
    return [len(hold.regions[0]._holders) for hold in holds]


def test_a_completion_ends_those_before_it_also_with_equal_wr_ids():
    queue, holds = InFlight(), holds_of(0, 0, 0, 0)
    queue.add(holds)
    assert busy(holds) == [1, 1, 1, 1]
    queue.ended(holds[2].serial)
    assert (busy(holds), len(queue)) == ([0, 0, 0, 1], 1)
    queue.ended(holds[2].serial)  # once more changes nothing
    assert (busy(holds), len(queue)) == ([0, 0, 0, 1], 1)


def test_a_shared_receive_queue_completes_in_any_order():
    queue, holds = InFlight(in_order=False), holds_of(8, 8, 8)
    queue.add(holds)
    queue.ended(holds[1].serial)
    assert busy(holds) == [1, 0, 1]


def test_a_region_in_two_requests_is_busy_until_both_have_ended():
    region = Region()
    queue, holds = InFlight(), [Hold.of(1, (region, region)), Hold.of(2, (region,))]
    queue.add(holds)
    queue.ended(holds[0].serial)
    assert region._holders == {holds[1].serial}
    queue.clear()
    assert region._holders == set()


def test_what_was_never_posted_is_dropped():
    queue, holds = InFlight(), holds_of(1, 2, 3)
    queue.add(holds)
    queue.drop(holds[1:])
    assert (busy(holds), [queue.wr_id(hold.serial) for hold in holds]) == ([1, 0, 0], [1, None, None])


def test_nobodys_completion_changes_nothing():
    ledger, holds = Ledger(RC), holds_of(7)
    ledger.sends.add(holds)
    ledger.state = pvl.QPState.RTS
    ledger.completed(7, pvl.WCStatus.WR_FLUSH_ERR)  # a wr_id is not a serial number
    assert (busy(holds), ledger.state) == ([1], pvl.QPState.RTS)


@pytest.mark.parametrize(
    ("qp_type", "side", "after"),
    [(RC, "sends", "ERR"), (RC, "recvs", "ERR"), (UC, "sends", "SQE"), (UC, "recvs", "ERR"), (UD, "sends", "SQE")],
)
def test_the_state_follows_a_failed_completion(qp_type, side, after):
    ledger, holds = Ledger(qp_type), holds_of(3, 4)
    ledger.state = pvl.QPState.RTS
    getattr(ledger, side).add(holds)
    ledger.completed(holds[0].serial, pvl.WCStatus.SUCCESS)
    assert ledger.state == pvl.QPState.RTS
    ledger.completed(holds[1].serial, pvl.WCStatus.LOC_PROT_ERR)
    assert ledger.state == pvl.QPState[after]


def test_a_flushed_datagram_does_not_bring_a_qp_back_from_err():
    ledger, holds = Ledger(UD), holds_of(3)
    ledger.sends.add(holds)
    ledger.state = pvl.QPState.ERR
    ledger.completed(holds[0].serial, pvl.WCStatus.WR_FLUSH_ERR)
    assert ledger.state == pvl.QPState.ERR
