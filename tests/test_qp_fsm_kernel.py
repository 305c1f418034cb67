"""The table of ``qp_fsm`` against the kernel: every edge, every non-edge, every mask at most two bits away.

Uses the raw functions, so that nothing above the table can hide what the kernel says. For each case the verdict of
``ibv_modify_qp`` is compared with the table's, and ``ibv_query_qp`` has to show the state that the verdict implies.
The kernel may differ only where ``DIFFERENCES`` says so, and has to differ wherever it says so.

Out of sight on rxe, so left to ``test_qp_fsm``: XRC and raw packet QPs, which it cannot create; which edges take an
alternate path, as RoCE refuses it everywhere; SQE's row beyond → RTS of UC and UD, where ``cur_qp_state`` is the
only way in.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pyverbs_lite.enums import MTU, AccessFlags, MigState, QPAttrMask, QPState, QPType, WROpcode
from pyverbs_lite.errors import AttributeMaskError, InvalidTransition
from pyverbs_lite.ffi import ffi, lib
from pyverbs_lite.qp_fsm import check, check_values, edges, plan, required

pytestmark = pytest.mark.rdma

A, S, T = QPAttrMask, QPState, QPType
CREATABLE = (T.RC, T.UC, T.UD)
STATES: tuple[QPState, ...] = tuple(state for state in S if state is not S.UNKNOWN)
DRIVABLE: tuple[QPState, ...] = tuple(state for state in STATES if state is not S.SQE)
ATTRIBUTES = tuple(bit for bit in A if bit is not A.STATE)
PORT = 1


@dataclass(frozen=True)
class Case:
    """One call of ``ibv_modify_qp`` and what came of it."""

    qp_type: QPType
    actual: QPState  # what the QP is in
    current: QPState  # what the kernel is told, through CUR_STATE, or finds
    target: QPState
    mask: QPAttrMask
    table: str  # "" or the name of the exception
    rc: int
    after: QPState

    def __str__(self) -> str:
        told = f" told {self.current.name}" if self.current is not self.actual else ""
        kernel = errno.errorcode[self.rc] if self.rc else "accepts"
        return (
            f"{self.qp_type.name} {self.actual.name}{told} → {self.target.name} {self.mask!r}:"
            f" table {self.table or 'accepts'}, kernel {kernel}, then {self.after.name}"
        )


@dataclass(frozen=True)
class Difference:
    """A place where the kernel or the driver is known to judge otherwise than the table, and where from."""

    name: str
    source: str
    applies: Callable[[Case], bool]


def _in_place(case: Case) -> bool:
    return A.STATE not in case.mask


DIFFERENCES = (
    Difference(
        "the core bans alternate paths in RoCE mode",
        "drivers/infiniband/core/verbs.c: _ib_modify_qp",
        lambda c: not c.table and A.ALT_PATH in c.mask,
    ),
    Difference(
        "uverbs adds PORT to an AV that comes without it outside RTR, which SQD → SQD of a UC QP does not take",
        "drivers/infiniband/core/uverbs_cmd.c: modify_qp",
        lambda c: not c.table and c.qp_type is T.UC and A.AV in c.mask and c.target is S.SQD and not _in_place(c),
    ),
    Difference(
        "rxe consults the table only where STATE is in the mask, so in place it takes any attribute in any state",
        "drivers/infiniband/sw/rxe/rxe_qp.c: rxe_qp_from_attr",
        # What is refused all the same: by rxe_qp_chk_attr, by the core (above), and by libibverbs.
        lambda c: (
            bool(c.table)
            and _in_place(c)
            and not (c.qp_type is T.UD and A.ACCESS_FLAGS in c.mask)
            and not c.mask & (A.ALT_PATH | A.RATE_LIMIT)
        ),
    ),
)


class Machine:
    """One QP at a time on a soft-RoCE device, with valid values ready for every attribute."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.pd = lib.ibv_alloc_pd(context)
        self.cq = lib.ibv_create_cq(context, 16, ffi.NULL, ffi.NULL, 0)
        assert self.pd
        assert self.cq
        self.qp: Any = ffi.NULL
        self.found = ffi.new("struct ibv_qp_attr *")
        self.init = ffi.new("struct ibv_qp_init_attr *")
        self.attr = self._values()

    def close(self) -> None:
        self.destroy()
        assert lib.ibv_destroy_cq(self.cq) == 0
        assert lib.ibv_dealloc_pd(self.pd) == 0

    def destroy(self) -> None:
        if self.qp:
            assert lib.ibv_destroy_qp(self.qp) == 0
            self.qp = ffi.NULL

    def create(self, qp_type: QPType) -> int:
        """Make a QP; return 0 or the errno."""
        self.destroy()
        init = ffi.new("struct ibv_qp_init_attr *")
        init.send_cq = init.recv_cq = self.cq
        init.qp_type = qp_type
        init.cap = self.attr.cap
        init.sq_sig_all = 1
        self.qp = lib.ibv_create_qp(self.pd, init)
        return 0 if self.qp else ffi.errno

    def _values(self) -> Any:
        attr = ffi.new("struct ibv_qp_attr *")
        attr.path_mtu = MTU.MTU_1024
        attr.path_mig_state = MigState.MIGRATED
        attr.qkey = 0x1BADCAFE
        attr.rq_psn = 0xABCDEF
        attr.sq_psn = 0x123456
        attr.dest_qp_num = 0xFEDCBA
        attr.qp_access_flags = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
        attr.cap.max_send_wr = 5
        attr.cap.max_recv_wr = 3
        attr.cap.max_send_sge = 2
        attr.cap.max_recv_sge = 1
        index, gid = self._own_gid()
        for path in (attr.ah_attr, attr.alt_ah_attr):
            path.is_global = 1
            path.port_num = PORT
            path.grh.dgid = gid
            path.grh.sgid_index = index
            path.grh.hop_limit = 64
        attr.en_sqd_async_notify = 1
        attr.max_rd_atomic = 3
        attr.max_dest_rd_atomic = 5
        attr.min_rnr_timer = 12
        attr.port_num = attr.alt_port_num = PORT
        attr.timeout = 14
        attr.alt_timeout = 15
        attr.retry_cnt = 6
        attr.rnr_retry = 7
        attr.rate_limit = 1000
        return attr

    def _own_gid(self) -> tuple[int, Any]:
        """Find the port's IPv4-mapped GID: the path goes back to the port itself, so it always resolves."""
        gid = ffi.new("union ibv_gid *")
        for index in range(16):
            assert lib.ibv_query_gid(self.context, PORT, index, gid) == 0
            if bytes(ffi.buffer(gid)).startswith(bytes(10) + b"\xff\xff"):
                return index, gid[0]
        raise AssertionError("the port has no IPv4 GID among its first 16")

    def modify(self, mask: QPAttrMask, target: QPState = S.RESET, current: QPState = S.RESET) -> int:
        self.attr.qp_state, self.attr.cur_qp_state = target, current
        return abs(lib.ibv_modify_qp(self.qp, self.attr, mask))

    def query(self) -> Any:
        assert lib.ibv_query_qp(self.qp, self.found, A.STATE, self.init) == 0
        return self.found

    def state(self) -> QPState:
        return S(self.query().qp_state)

    def drive(self, qp_type: QPType, state: QPState) -> None:
        """Bring the QP to a state from RESET, with what the table requires, and see that it is there."""
        # A send queue that still drains lets the QP out of SQD to ERR only.
        if self.state() is S.SQD:
            assert self.modify(A.STATE, S.ERR) == 0
        assert self.modify(A.STATE, S.RESET) == 0
        for step in itertools.pairwise(plan(qp_type, S.RESET, state)):
            assert self.modify(required(qp_type, *step) | A.STATE, step[1]) == 0, step
        deadline = time.monotonic() + 5
        while state is S.SQD and self.query().sq_draining:
            assert time.monotonic() < deadline, "the empty send queue did not drain"
        assert self.state() is state


def _nearby(base: QPAttrMask, bits: tuple[QPAttrMask, ...], distance: int) -> Iterator[QPAttrMask]:
    """Yield the masks that differ from a base in at most that many bits."""
    for count in range(distance + 1):
        for flipped in itertools.combinations(bits, count):
            yield A(int(base) ^ sum(flipped))


def _questions(qp_type: QPType) -> Iterator[tuple[QPState, QPState, QPState, QPAttrMask]]:
    """Yield (actual, current, target, mask) for one type."""
    table = edges(qp_type)
    everything = A(sum(A))
    for actual in DRIVABLE:
        for target in STATES:
            edge = table.get((actual, target))
            near = _nearby(edge.required, ATTRIBUTES, 2) if edge else _nearby(A(0), ATTRIBUTES, 1)
            for mask in (*near, everything):
                yield actual, actual, target, mask | A.STATE
        for mask in _nearby(A(0), ATTRIBUTES, 1):
            yield actual, actual, actual, mask
    # The kernel takes the caller's word for the current state: the only way into SQE's row.
    others = tuple(bit for bit in ATTRIBUTES if bit is not A.CUR_STATE)
    for actual, current, target in itertools.product((S.RESET, S.RTS), STATES, STATES):
        if actual is not current:
            edge = table.get((current, target))
            for mask in _nearby(edge.required if edge else A(0), others, 1):
                yield actual, current, target, mask | A.STATE | A.CUR_STATE


def _verdict(qp_type: QPType, current: QPState, target: QPState, mask: QPAttrMask) -> str:
    try:
        check(qp_type, current, target, mask)
    except (InvalidTransition, AttributeMaskError) as error:
        return type(error).__name__
    return ""


def _compare(machine: Machine, qp_type: QPType) -> Iterator[Case]:
    assert machine.create(qp_type) == 0
    wanted: QPState | None = None  # what the QP is in, untouched since it was driven there
    for actual, current, target, mask in _questions(qp_type):
        if wanted is not actual:
            machine.drive(qp_type, actual)
        rc = machine.modify(mask, target, current)
        wanted = actual if rc else None
        yield Case(
            qp_type, actual, current, target, mask, _verdict(qp_type, current, target, mask), rc, machine.state()
        )


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    count = ffi.new("int *")
    devices = lib.ibv_get_device_list(count)
    context: Any = ffi.NULL
    if devices:
        for device in devices[0 : count[0]]:
            if ffi.string(lib.ibv_get_device_name(device)).startswith(b"rxe"):
                context = lib.ibv_open_device(device)
                break
        lib.ibv_free_device_list(devices)
    if not context:
        pytest.skip("no soft-RoCE device: the named differences are those of rdma_rxe")
    machine = Machine(context)
    yield machine
    machine.close()
    assert lib.ibv_close_device(context) == 0


@pytest.fixture(scope="module")
def cases(machine: Machine) -> dict[QPType, list[Case]]:
    return {qp_type: list(_compare(machine, qp_type)) for qp_type in CREATABLE}


def _first(cases: list[Case]) -> str:
    return "\n".join([f"{len(cases)} cases, the first of which are:", *map(str, cases[:20])])


@pytest.mark.parametrize("qp_type", CREATABLE, ids=lambda t: t.name)
def test_verdicts_differ_only_and_always_where_named(
    cases: dict[QPType, list[Case]],
    qp_type: QPType,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = cases[qp_type]
    wrong = [c for c in found if bool(c.table) == (not c.rc) and not any(d.applies(c) for d in DIFFERENCES)]
    stale = [c for c in found if bool(c.table) == bool(c.rc) and any(d.applies(c) for d in DIFFERENCES)]
    differ = sum(bool(c.table) == (not c.rc) for c in found)
    accepted = sum(not c.rc for c in found)
    record_property("comparisons", len(found))
    record_property("named_differences", differ)
    with capsys.disabled():
        print(
            f"\n{qp_type.name}: {len(found)} comparisons with the kernel, {accepted} accepted by it,"
            f" {differ} differ as named, {len(wrong)} unexplained"
        )
    assert not wrong, _first(wrong)
    assert not stale, f"a named difference did not occur: {_first(stale)}"
    # A table or a loop that had become empty would agree with everything.
    assert {(c.current, c.target) for c in found} == set(itertools.product(STATES, STATES))
    assert len(found) > 4000
    assert accepted > 100


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.source.rsplit(" ", 1)[-1])
def test_named_difference_still_occurs(cases: dict[QPType, list[Case]], difference: Difference) -> None:
    hits = [c for found in cases.values() for c in found if difference.applies(c)]
    assert any(bool(c.table) == (not c.rc) for c in hits), difference.name


@pytest.mark.parametrize("qp_type", CREATABLE, ids=lambda t: t.name)
def test_state_moves_exactly_when_accepted(cases: dict[QPType, list[Case]], qp_type: QPType) -> None:
    wrong = [c for c in cases[qp_type] if c.after is not (c.actual if c.rc else c.target)]
    assert not wrong, _first(wrong)


def test_refusals_are_einval_except_for_the_bit_that_libibverbs_stops(cases: dict[QPType, list[Case]]) -> None:
    refused = [c for found in cases.values() for c in found if c.rc]
    wrong = [c for c in refused if c.rc != (errno.EOPNOTSUPP if A.RATE_LIMIT in c.mask else errno.EINVAL)]
    assert not wrong, _first(wrong)
    assert Counter(c.rc for c in refused).keys() == {errno.EINVAL, errno.EOPNOTSUPP}


@pytest.mark.parametrize("qp_type", CREATABLE, ids=lambda t: t.name)
@pytest.mark.parametrize("state", DRIVABLE, ids=lambda s: s.name)
def test_no_state_beyond_err(machine: Machine, qp_type: QPType, state: QPState) -> None:
    """UNKNOWN has no edges, neither here nor there."""
    assert machine.create(qp_type) == 0
    machine.drive(qp_type, state)
    assert machine.modify(A.STATE, S.UNKNOWN) == errno.EINVAL
    assert machine.state() is state
    assert _verdict(qp_type, state, S.UNKNOWN, A.STATE) == "InvalidTransition"


@pytest.mark.parametrize(
    ("qp_type", "number"),
    [
        (T.RAW_PACKET, errno.EOPNOTSUPP),
        (T.XRC_SEND, errno.EOPNOTSUPP),
        (T.XRC_RECV, errno.EINVAL),
        (T.DRIVER, errno.EOPNOTSUPP),
    ],
    ids=lambda v: getattr(v, "name", None),
)
def test_other_types_cannot_be_compared_here(machine: Machine, qp_type: QPType, number: int) -> None:
    assert machine.create(qp_type) == number


def test_every_type_is_compared_or_listed() -> None:
    assert set(CREATABLE) | {T.RAW_PACKET, T.XRC_SEND, T.XRC_RECV, T.DRIVER} == set(T)


@pytest.mark.parametrize("target", STATES, ids=lambda s: s.name)
def test_a_draining_queue_holds_the_qp_in_sqd(machine: Machine, target: QPState) -> None:
    """One more difference, of rxe's __qp_chk_state: while a send is not acknowledged, SQD leads to ERR only."""
    assert machine.create(T.RC) == 0
    machine.attr.timeout = 20  # 4.3 s: nobody has the QP number, and no retry is to end within the test
    try:
        machine.drive(T.RC, S.RTS)
    finally:
        machine.attr.timeout = 14
    request = ffi.new("struct ibv_send_wr *")
    request.opcode = WROpcode.SEND
    bad = ffi.new("struct ibv_send_wr **")
    assert lib.ibv_post_send(machine.qp, request, bad) == 0
    assert machine.modify(A.STATE, S.SQD) == 0
    assert machine.query().sq_draining == 1
    accepted = machine.modify(A.STATE, target) == 0
    assert accepted == (target is S.ERR)
    assert machine.state() is (S.ERR if accepted else S.SQD)
    assert (_verdict(T.RC, S.SQD, target, A.STATE) == "") == (target in (S.RESET, S.RTS, S.SQD, S.ERR))


@pytest.mark.parametrize(
    ("member", "bad", "number"),
    [
        ("ah_attr.is_global", 0, errno.EINVAL),  # by LID, as on InfiniBand: RoCE always needs the GRH
        ("ah_attr.port_num", 2, errno.EINVAL),
        ("ah_attr.grh.sgid_index", 254, errno.ENODATA),  # an empty row of the GID table
        ("path_mtu", 6, errno.EINVAL),
    ],
)
def test_a_refused_value_costs_nothing(machine: Machine, member: str, bad: int, number: int) -> None:
    """The QP stays in INIT, and the same call with a good value works."""
    assert machine.create(T.RC) == 0
    machine.drive(T.RC, S.INIT)
    *path, name = member.split(".")
    owner = machine.attr
    for part in path:
        owner = getattr(owner, part)
    good = getattr(owner, name)
    mask = required(T.RC, S.INIT, S.RTR) | A.STATE
    setattr(owner, name, bad)
    try:
        assert machine.modify(mask, S.RTR) == number
    finally:
        setattr(owner, name, good)
    assert machine.state() is S.INIT
    assert machine.modify(mask, S.RTR) == 0
    assert machine.state() is S.RTR


def test_the_kernel_cuts_a_sequence_number_that_check_values_refuses(machine: Machine) -> None:
    attrs = {"rq_psn": 0x5ABCDEF}
    with pytest.raises(ValueError, match="rq_psn 95145455"):
        check_values(attrs)
    assert machine.create(T.RC) == 0
    machine.drive(T.RC, S.INIT)
    good, machine.attr.rq_psn = machine.attr.rq_psn, attrs["rq_psn"]
    try:
        assert machine.modify(required(T.RC, S.INIT, S.RTR) | A.STATE, S.RTR) == 0
    finally:
        machine.attr.rq_psn = good
    assert machine.query().rq_psn == 0xABCDEF
