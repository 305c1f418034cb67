"""The QP state machine without a device; ``test_qp_fsm_kernel`` compares it with a kernel."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyverbs_lite import attr, qp_fsm
from pyverbs_lite.attr import AHAttr, QPAttr
from pyverbs_lite.enums import MTU, QPAttrMask, QPState, QPType, WROpcode
from pyverbs_lite.errors import AttributeMaskError, InvalidTransition, StateError
from pyverbs_lite.qp_fsm import Edge, check, edge_of, edges, explain, mask_of, optional, plan, required

A, S, T = QPAttrMask, QPState, QPType
TYPES = (T.RC, T.UC, T.UD, T.XRC_SEND, T.XRC_RECV, T.RAW_PACKET)
REAL: tuple[QPState, ...] = tuple(state for state in S if state is not S.UNKNOWN)
ALL_EDGES = [(t, *key) for t in TYPES for key in edges(t)]

every_type = pytest.mark.parametrize("qp_type", TYPES, ids=lambda t: t.name)


def bits(mask: QPAttrMask) -> set[str]:
    return {str(bit.name) for bit in A if bit & mask}


def takes(edge: Edge) -> QPAttrMask:
    return edge.required | edge.optional


# ---------------------------------------------------------------- facts, each from the verbs' manual pages


@pytest.mark.parametrize(
    ("qp_type", "step", "members"),
    [
        (T.RC, (S.RESET, S.INIT), {"pkey_index", "port_num", "qp_access_flags"}),
        (
            T.RC,
            (S.INIT, S.RTR),
            {"ah_attr", "path_mtu", "dest_qp_num", "rq_psn", "max_dest_rd_atomic", "min_rnr_timer"},
        ),
        (T.RC, (S.RTR, S.RTS), {"sq_psn", "timeout", "retry_cnt", "rnr_retry", "max_rd_atomic"}),
        (T.UC, (S.RESET, S.INIT), {"pkey_index", "port_num", "qp_access_flags"}),
        (T.UC, (S.INIT, S.RTR), {"ah_attr", "path_mtu", "dest_qp_num", "rq_psn"}),
        (T.UC, (S.RTR, S.RTS), {"sq_psn"}),
        (T.UD, (S.RESET, S.INIT), {"pkey_index", "port_num", "qkey"}),
        (T.UD, (S.INIT, S.RTR), set()),
        (T.UD, (S.RTR, S.RTS), {"sq_psn"}),
        (T.RAW_PACKET, (S.RESET, S.INIT), {"port_num"}),
        (T.RAW_PACKET, (S.INIT, S.RTR), set()),
        (T.RAW_PACKET, (S.RTR, S.RTS), set()),
    ],
)
def test_the_way_up_requires(qp_type: QPType, step: tuple[QPState, QPState], members: set[str]) -> None:
    assert required(qp_type, *step) == mask_of(dict.fromkeys(members, 0))


@pytest.mark.parametrize(
    ("qp_type", "step", "taken"),
    [
        (T.RC, (S.INIT, S.RTR), {"ALT_PATH", "ACCESS_FLAGS", "PKEY_INDEX"}),
        (T.UD, (S.INIT, S.RTR), {"PKEY_INDEX", "QKEY"}),
        (T.RC, (S.RTS, S.RTS), {"CUR_STATE", "ACCESS_FLAGS", "ALT_PATH", "PATH_MIG_STATE", "MIN_RNR_TIMER"}),
        (T.UC, (S.RTR, S.RTS), {"CUR_STATE", "ACCESS_FLAGS", "ALT_PATH", "PATH_MIG_STATE"}),
        (T.UC, (S.SQE, S.RTS), {"CUR_STATE", "ACCESS_FLAGS"}),
        (T.UD, (S.SQE, S.RTS), {"CUR_STATE", "QKEY"}),
        (T.RC, (S.SQE, S.RTS), set()),
        (T.UC, (S.SQD, S.SQD), {"AV", "ALT_PATH", "ACCESS_FLAGS", "PKEY_INDEX", "PATH_MIG_STATE"}),
        (T.RC, (S.RTS, S.SQD), {"EN_SQD_ASYNC_NOTIFY"}),
    ],
)
def test_an_edge_takes_beyond_that(qp_type: QPType, step: tuple[QPState, QPState], taken: set[str]) -> None:
    assert bits(optional(qp_type, *step)) == taken


def test_a_reliable_qp_may_change_its_path_and_limits_while_drained() -> None:
    fixed = {"STATE", "CUR_STATE", "EN_SQD_ASYNC_NOTIFY", "QKEY", "PATH_MTU", "DEST_QPN", "RQ_PSN", "SQ_PSN"}
    assert bits(optional(T.RC, S.SQD, S.SQD)) == {str(bit.name) for bit in A} - fixed - {"CAP", "RATE_LIMIT"}


# ---------------------------------------------------------------- properties of the whole table


@every_type
def test_every_state_leads_to_reset_in_one_step_with_nothing_else(qp_type: QPType) -> None:
    for state in REAL:
        check(qp_type, state, S.RESET, A.STATE)
        assert takes(edges(qp_type)[state, S.RESET]) == A(0)


@every_type
def test_every_state_but_reset_leads_to_err(qp_type: QPType) -> None:
    assert {a for a, b in edges(qp_type) if b is S.ERR} == set(REAL) - {S.RESET}
    assert all(not takes(edge) for (_, b), edge in edges(qp_type).items() if b is S.ERR)


@every_type
def test_from_err_only_reset_revives(qp_type: QPType) -> None:
    assert {b for a, b in edges(qp_type) if a is S.ERR} == {S.ERR, S.RESET}


@every_type
def test_nobody_moves_a_qp_to_sqe_or_unknown(qp_type: QPType) -> None:
    assert not {S.SQE, S.UNKNOWN} & {b for _, b in edges(qp_type)}
    assert S.UNKNOWN not in {a for a, _ in edges(qp_type)}


@every_type
def test_rising_skips_no_state(qp_type: QPType) -> None:
    ladder = (S.RESET, S.INIT, S.RTR, S.RTS, S.SQD)
    up = {(a, b) for a, b in edges(qp_type) if a in ladder and b in ladder and ladder.index(b) > ladder.index(a)}
    assert up == set(itertools.pairwise(ladder))
    down = {(a, b) for a, b in edges(qp_type) if b not in (S.RESET, S.ERR, a)} - up
    assert down == {(S.SQD, S.RTS), (S.SQE, S.RTS)}
    assert {a for a, b in edges(qp_type) if a is b} == {S.RESET, S.INIT, S.RTS, S.SQD, S.ERR}


@pytest.mark.parametrize(("qp_type", "current", "target"), ALL_EDGES)
def test_required_and_optional_do_not_overlap(qp_type: QPType, current: QPState, target: QPState) -> None:
    edge = edges(qp_type)[current, target]
    assert not edge.required & edge.optional
    assert edge.required == required(qp_type, current, target)
    assert edge.optional == optional(qp_type, current, target)


@pytest.mark.parametrize(
    ("bit", "only"),
    [
        (A.STATE, set()),
        (A.CAP, set()),
        (A.DEST_QPN, {(S.INIT, S.RTR)}),
        (A.PATH_MTU, {(S.INIT, S.RTR)}),
        (A.RQ_PSN, {(S.INIT, S.RTR)}),
        (A.SQ_PSN, {(S.RTR, S.RTS)}),
        (A.EN_SQD_ASYNC_NOTIFY, {(S.RTS, S.SQD)}),
        (A.PORT, {(S.RESET, S.INIT), (S.INIT, S.INIT), (S.SQD, S.SQD)}),
        (A.AV, {(S.INIT, S.RTR), (S.SQD, S.SQD)}),
        (
            A.ALT_PATH,
            {(S.INIT, S.RTR), (S.RTR, S.RTS), (S.RTS, S.RTS), (S.SQD, S.RTS), (S.SQD, S.SQD)},
        ),
    ],
)
def test_an_attribute_is_taken_only_at(bit: QPAttrMask, only: set[tuple[QPState, QPState]]) -> None:
    assert {key for t in TYPES for key, edge in edges(t).items() if bit & takes(edge)} == only


@pytest.mark.parametrize(
    ("bit", "only"),
    [
        (A.QKEY, {T.UD}),
        (A.RATE_LIMIT, {T.RAW_PACKET}),
        (A.ACCESS_FLAGS, {T.RC, T.UC, T.XRC_SEND, T.XRC_RECV}),
        (A.ALT_PATH, {T.RC, T.UC, T.XRC_SEND, T.XRC_RECV}),
        (A.PATH_MIG_STATE, {T.RC, T.UC, T.XRC_SEND, T.XRC_RECV}),
        (A.TIMEOUT, {T.RC, T.XRC_SEND, T.XRC_RECV}),
        (A.RNR_RETRY, {T.RC, T.XRC_SEND}),
        (A.MIN_RNR_TIMER, {T.RC, T.XRC_RECV}),
    ],
)
def test_an_attribute_belongs_to_types(bit: QPAttrMask, only: set[QPType]) -> None:
    assert {t for t in TYPES for edge in edges(t).values() if bit & takes(edge)} == only


def test_the_current_state_can_be_named_only_where_the_kernel_looks_at_it() -> None:
    sources = {a for t in TYPES for (a, _), edge in edges(t).items() if edge.optional & A.CUR_STATE}
    assert sources == {S.RTR, S.RTS, S.SQD, S.SQE}


@pytest.mark.parametrize("key", edges(T.RC), ids=lambda key: f"{key[0].name}-{key[1].name}")
def test_xrc_is_rc_cut_in_two(key: tuple[QPState, QPState]) -> None:
    """Each end has RC's attributes without those of the side that it is not."""
    responder = A.MAX_DEST_RD_ATOMIC | A.MIN_RNR_TIMER
    requester = A.MAX_QP_RD_ATOMIC | A.RETRY_CNT | A.RNR_RETRY
    whole = edges(T.RC)[key]
    for qp_type, other in ((T.XRC_SEND, responder), (T.XRC_RECV, requester)):
        half = edges(qp_type)[key]
        assert bits(half.required) == bits(whole.required) - bits(other)
        assert bits(half.optional) == bits(whole.optional) - bits(other)


@pytest.mark.parametrize("key", edges(T.RC), ids=lambda key: f"{key[0].name}-{key[1].name}")
def test_an_alternate_path_goes_wherever_an_rc_qp_takes_it(key: tuple[QPState, QPState]) -> None:
    """A kernel on RoCE can't be asked: it refuses alternate paths everywhere."""
    assert A.ALT_PATH & edges(T.UC)[key].optional == A.ALT_PATH & edges(T.RC)[key].optional
    assert not A.ALT_PATH & edges(T.RC)[key].required


def test_raw_packets_need_a_port_and_take_a_rate() -> None:
    table = edges(T.RAW_PACKET)
    assert {key: edge.required for key, edge in table.items() if edge.required} == {(S.RESET, S.INIT): A.PORT}
    assert {key: bits(edge.optional) for key, edge in table.items() if edge.optional} == {
        (S.RTR, S.RTS): {"RATE_LIMIT"},
        (S.RTS, S.RTS): {"RATE_LIMIT"},
    }


def test_the_table_cannot_be_written_to() -> None:
    with pytest.raises(TypeError):
        edges(T.RC)[S.RESET, S.ERR] = Edge(A(0), A(0))  # type: ignore[index]


def test_driver_types_have_no_table() -> None:
    with pytest.raises(ValueError, match=r"no table for DRIVER: known are .*XRC_RECV"):
        check(T.DRIVER, S.RESET, S.INIT, A.STATE)


# ---------------------------------------------------------------- check


@given(st.sampled_from(ALL_EDGES), st.sets(st.sampled_from(list(A))), st.booleans())
def test_check_is_set_arithmetic(
    at: tuple[QPType, QPState, QPState], chosen: set[QPAttrMask], start_right: bool
) -> None:
    edge = edges(at[0])[at[1:]]
    mask = A(sum(chosen)) ^ (edge.required if start_right else A(0))
    missing = bits(edge.required) - bits(mask)
    extra = bits(mask) - bits(edge.required) - bits(edge.optional) - {"STATE"}
    if not missing and not extra:
        check(*at, mask)
        return
    with pytest.raises(AttributeMaskError) as caught:
        check(*at, mask)
    assert isinstance(caught.value.missing, A)
    assert isinstance(caught.value.extra, A)
    assert bits(caught.value.missing) == missing
    assert bits(caught.value.extra) == extra
    assert (caught.value.current, caught.value.target) == at[1:]
    for name in missing | extra:
        assert f"{name} (" in str(caught.value)


def test_state_in_the_mask_makes_no_difference() -> None:
    exact = required(T.UC, S.INIT, S.RTR)
    check(T.UC, S.INIT, S.RTR, exact)
    check(T.UC, S.INIT, S.RTR, exact | A.STATE)


def test_a_refusal_names_bits_and_members_of_both_kinds() -> None:
    given_bits = required(T.RC, S.INIT, S.RTR) ^ A.RQ_PSN ^ A.MAX_DEST_RD_ATOMIC ^ A.PORT ^ A.CAP
    with pytest.raises(AttributeMaskError) as caught:
        check(T.RC, S.INIT, S.RTR, given_bits)
    text = str(caught.value)
    assert text.startswith("RC QP: INIT → RTR: ")
    assert "missing RQ_PSN (rq_psn), MAX_DEST_RD_ATOMIC (max_dest_rd_atomic); " in text
    assert "not allowed PORT (port_num), CAP (cap)" in text
    assert "PORT is taken by RESET → INIT, INIT → INIT, SQD → SQD" in text
    assert "CAP is taken by no transition of RC" in text


def test_an_alternate_path_is_named_with_its_four_members() -> None:
    with pytest.raises(AttributeMaskError, match=r"alt_ah_attr, alt_pkey_index, alt_port_num, alt_timeout"):
        check(T.UD, S.INIT, S.RTR, A.ALT_PATH)


def test_bits_that_no_attribute_has_are_extra() -> None:
    with pytest.raises(AttributeMaskError, match=r"not allowed QKEY \(qkey\), unknown bits 0x40000000") as caught:
        check(T.RC, S.INIT, S.INIT, A((1 << 30) | A.QKEY))
    assert caught.value.missing == 0
    assert caught.value.extra == (1 << 30) | A.QKEY


@pytest.mark.parametrize(
    ("qp_type", "current", "target", "parts"),
    [
        (T.RC, S.RESET, S.RTR, ["RESET leads to RESET, INIT;", "plan: RESET → INIT → RTR"]),
        (T.UC, S.INIT, S.RTS, ["INIT leads to RESET, INIT, RTR, ERR;", "plan: INIT → RTR → RTS"]),
        (T.UD, S.RTS, S.RTR, ["plan: RTS → RESET → INIT → RTR"]),
        (T.RC, S.RESET, S.ERR, ["no work to flush", "plan: RESET → INIT → ERR"]),
        (T.RC, S.RTR, S.RTR, ["nothing can be changed"]),
        (T.RC, S.RTS, S.SQE, ["only the device"]),
        (T.RC, S.UNKNOWN, S.INIT, ["read it with ibv_query_qp"]),
        (T.RC, S.RTS, S.UNKNOWN, ["UNKNOWN is not a state to move to"]),
    ],
)
def test_a_missing_edge_says_what_there_is(
    qp_type: QPType, current: QPState, target: QPState, parts: list[str]
) -> None:
    with pytest.raises(InvalidTransition) as caught:
        check(qp_type, current, target, A.STATE)
    text = str(caught.value)
    assert text.startswith(f"{qp_type.name} QP: {current.name} → {target.name} is not a transition; ")
    for part in parts:
        assert part in text
    assert (caught.value.current, caught.value.target) == (current, target)
    assert isinstance(caught.value, StateError)


def test_a_missing_edge_without_a_way_offers_no_plan() -> None:
    for current, target in ((S.RTR, S.RTR), (S.RTS, S.SQE), (S.UNKNOWN, S.RTS), (S.ERR, S.UNKNOWN)):
        assert "plan" not in explain(T.RC, current, target)
    assert "leads to" not in explain(T.RC, S.UNKNOWN, S.RTS)


@pytest.mark.parametrize("function", [required, optional, explain, plan])
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((S.RTR, S.INIT, S.RTR), "qp_type must be a member of QPType, not <QPState.RTR: 2>"),
        ((2, S.INIT, S.RTR), "qp_type must be a member of QPType, not 2"),
        ((T.RC, T.UC, S.RTR), "current must be a member of QPState, not <QPType.UC"),
        ((T.RC, 1, S.RTR), "current must be a member of QPState, not 1"),
        ((T.RC, S.INIT, MTU.MTU_512), "target must be a member of QPState"),
        ((T.RC, S.INIT, None), "target must be a member of QPState, not None"),
        ((T.RC, S.INIT, "RTR"), "target must be a member of QPState, not 'RTR'"),
        ((T.RC, False, S.RTR), "current must be a member of QPState, not False"),
    ],
)
def test_enums_of_another_kind_find_no_row(function: object, arguments: tuple[object, ...], name: str) -> None:
    """They compare equal as integers, so the table alone would not notice."""
    assert callable(function)
    with pytest.raises(TypeError, match=name):
        function(*arguments)


@pytest.mark.parametrize("mask", [1, True, None, S.RTR])
def test_a_mask_is_an_attribute_mask(mask: object) -> None:
    with pytest.raises(TypeError, match="mask must be a member of QPAttrMask"):
        check(T.RC, S.INIT, S.INIT, mask)  # type: ignore[arg-type]


# ---------------------------------------------------------------- explain and plan


def test_explain_lists_required_then_optional() -> None:
    lines = explain(T.RC, S.RTR, S.RTS).splitlines()
    assert lines[0] == "RC QP: RTR → RTS"
    assert lines[1] == "  required:"
    middle = lines.index("  optional:")
    assert {line.split()[0] for line in lines[2:middle]} == bits(required(T.RC, S.RTR, S.RTS))
    assert {line.split()[0] for line in lines[middle + 1 :]} == bits(optional(T.RC, S.RTR, S.RTS))
    assert any("MAX_QP_RD_ATOMIC     max_rd_atomic: " in line for line in lines)


def test_explain_says_nothing_where_there_is_nothing() -> None:
    assert explain(T.UD, S.SQE, S.RESET).splitlines() == [
        "UD QP: SQE → RESET",
        "  required: nothing",
        "  optional: nothing",
    ]


def test_explain_of_a_missing_edge_gives_the_way_round() -> None:
    assert explain(T.RC, S.ERR, S.RTS).splitlines() == [
        "RC QP: ERR → RTS is not a transition",
        "  ERR leads to RESET, ERR",
        "  plan: ERR → RESET → INIT → RTR → RTS",
    ]


@every_type
def test_plans_are_legal_shortest_and_spare_the_queued_work(qp_type: QPType) -> None:
    table = edges(qp_type)
    for current, target in itertools.permutations(REAL, 2):
        between = set(REAL) - {current, target}
        legal = [
            (current, *middle, target)
            for count in range(len(between) + 1)
            for middle in itertools.permutations(between, count)
            if all(step in table for step in itertools.pairwise((current, *middle, target)))
        ]
        if not legal:
            assert target is S.SQE
            with pytest.raises(InvalidTransition, match=f"{current.name} → SQE is not a transition"):
                plan(qp_type, current, target)
            continue
        gentle = [path for path in legal if not {S.RESET, S.ERR} & set(path[1:-1])]
        found = plan(qp_type, current, target)
        assert found in (gentle or legal)
        assert len(found) == min(map(len, gentle or legal))


def test_the_plan_up_and_the_plan_down() -> None:
    assert plan(T.RC, S.RESET, S.RTS) == (S.RESET, S.INIT, S.RTR, S.RTS)
    assert plan(T.UD, S.SQE, S.SQD) == (S.SQE, S.RTS, S.SQD)
    assert plan(T.UC, S.SQD, S.INIT) == (S.SQD, S.RESET, S.INIT)


@pytest.mark.parametrize("state", REAL)
def test_a_qp_that_is_there_has_nothing_to_do(state: QPState) -> None:
    assert plan(T.RC, state, state) == (state,)


@pytest.mark.parametrize(("current", "target"), [(S.UNKNOWN, S.UNKNOWN), (S.UNKNOWN, S.RESET), (S.INIT, S.UNKNOWN)])
def test_no_plan_knows_an_unknown_state(current: QPState, target: QPState) -> None:
    with pytest.raises(InvalidTransition) as caught:
        plan(T.RC, current, target)
    assert (caught.value.current, caught.value.target) == (current, target)


# ---------------------------------------------------------------- masks and edges from members


def test_every_member_has_its_bit_and_every_bit_a_member() -> None:
    members = list(QPAttr.__dataclass_fields__)
    masks = [mask_of({name: 1}) for name in members]
    assert all(mask in tuple(A) for mask in masks)
    assert set(masks) == set(A)


@pytest.mark.parametrize(
    ("member", "bit"),
    [
        ("qp_state", A.STATE),
        ("port_num", A.PORT),
        ("ah_attr", A.AV),
        ("max_rd_atomic", A.MAX_QP_RD_ATOMIC),
        ("max_dest_rd_atomic", A.MAX_DEST_RD_ATOMIC),
        ("rq_psn", A.RQ_PSN),
        ("sq_psn", A.SQ_PSN),
        ("timeout", A.TIMEOUT),
        ("dest_qp_num", A.DEST_QPN),
        ("cap", A.CAP),
        ("rate_limit", A.RATE_LIMIT),
        ("alt_ah_attr", A.ALT_PATH),
        ("alt_port_num", A.ALT_PATH),
        ("alt_pkey_index", A.ALT_PATH),
        ("alt_timeout", A.ALT_PATH),
    ],
)
def test_a_member_sets_its_bit(member: str, bit: QPAttrMask) -> None:
    assert mask_of({member: 0}) == bit


def test_masks_add_up() -> None:
    attrs = QPAttr(qp_state=S.RTR, rq_psn=0, ah_attr=AHAttr(port_num=1), alt_timeout=9, alt_port_num=2)
    assert mask_of(attrs.given()) == A.STATE | A.RQ_PSN | A.AV | A.ALT_PATH
    assert mask_of({}) == A(0)


@pytest.mark.parametrize("name", ["psn", "QP_STATE", "sq_draining", "port", ""])
def test_unknown_members_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name!r} is not an attribute of a QP: there are .*dest_qp_num"):
        mask_of({name: 1})


def test_none_is_not_given() -> None:
    with pytest.raises(TypeError, match="pkey_index is None"):
        mask_of({"port_num": 1, "pkey_index": None})


def test_the_edge_of_a_modify() -> None:
    assert edge_of(S.INIT, {"qp_state": S.RTR, "rq_psn": 5}) == (S.INIT, S.RTR)
    assert edge_of(S.RTS, {"min_rnr_timer": 5}) == (S.RTS, S.RTS)
    assert edge_of(S.INIT, {"cur_qp_state": S.SQE, "qp_state": S.RTS}) == (S.SQE, S.RTS)
    assert edge_of(S.INIT, {"cur_qp_state": S.RTS}) == (S.RTS, S.RTS)


@pytest.mark.parametrize("attrs", [{"qp_state": 3}, {"qp_state": WROpcode.SEND}, {"cur_qp_state": None}])
def test_an_edge_is_made_of_states(attrs: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(attrs))} must be a member of QPState"):
        edge_of(S.INIT, attrs)


def test_values_are_checked_from_here_too() -> None:
    assert qp_fsm.check_values is attr.check_values
    assert qp_fsm.mtu_of is attr.mtu_of
