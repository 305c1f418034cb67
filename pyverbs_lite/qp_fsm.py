"""The QP state machine as data: every state, every edge, what each edge demands and what it takes.

The rows are those of the kernel's InfiniBand core (``qp_state_table``, ``ib_modify_qp_is_ok``), which every
driver's ``modify_qp`` is measured by. Rules of this file:

* The table is the only place that knows an edge; all questions are answered by looking it up.
* Nothing here calls a verb. The check runs first, so a refusal leaves the QP as it was.
* ``STATE`` is always tolerated. A modify that names no new state is the edge from the current state to itself.
* What drivers and uverbs refuse beyond the table (RoCE has no alternate path, say) is not in the table. Nor is
  what uverbs drops unread: the responder's attributes on XRC_SEND, the requester's on XRC_RECV.

Values are checked beside the table, by ``check_values`` and ``mtu_of``; their ranges live in ``attr``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .attr import _member, check_values, mtu_of
from .enums import QPAttrMask, QPState, QPType
from .errors import AttributeMaskError, InvalidTransition

__all__ = [
    "Edge",
    "check",
    "check_values",
    "edge_of",
    "edges",
    "explain",
    "mask_of",
    "mtu_of",
    "optional",
    "plan",
    "required",
]

A, S, T = QPAttrMask, QPState, QPType
Key = tuple[QPState, QPState]


@dataclass(frozen=True, slots=True)
class Edge:
    """Attributes that one edge demands, and those it takes as well; ``STATE`` itself is always allowed."""

    required: QPAttrMask
    optional: QPAttrMask


# ---------------------------------------------------------------- the table

_0 = A(0)
_STATE = A.STATE.value
_HOME = A.PKEY_INDEX | A.PORT | A.ACCESS_FLAGS  # connected types: where the QP lives and what it grants
_HOME_UD = A.PKEY_INDEX | A.PORT | A.QKEY
_PATH = A.AV | A.PATH_MTU | A.DEST_QPN | A.RQ_PSN
_ANSWER = A.MAX_DEST_RD_ATOMIC | A.MIN_RNR_TIMER  # the responder's side of a reliable connection
_ASK = A.RETRY_CNT | A.RNR_RETRY | A.MAX_QP_RD_ATOMIC  # the requester's
_ROUTED = A.PKEY_INDEX | A.ACCESS_FLAGS | A.ALT_PATH
_LIVE = A.ACCESS_FLAGS | A.ALT_PATH | A.PATH_MIG_STATE
_RUN = A.CUR_STATE | _LIVE
_RUN_RNR = _RUN | A.MIN_RNR_TIMER
_RUN_UD = A.CUR_STATE | A.QKEY
_MOVE = _LIVE | A.AV | A.PKEY_INDEX
_MOVE_R = _MOVE | A.PORT | A.TIMEOUT
_SQD = A.EN_SQD_ASYNC_NOTIFY

_TYPES = (T.UD, T.UC, T.RC, T.XRC_SEND, T.XRC_RECV, T.RAW_PACKET)
_NONE = (_0,) * len(_TYPES)
_RUNNING = (_RUN_UD, _RUN, _RUN_RNR, _RUN, _RUN_RNR)

#: Edge -> (required, optional), one column for each of ``_TYPES``.
_ROWS: dict[Key, tuple[tuple[QPAttrMask, ...], tuple[QPAttrMask, ...]]] = {
    (S.RESET, S.INIT): ((_HOME_UD, _HOME, _HOME, _HOME, _HOME, A.PORT), _NONE),
    (S.INIT, S.INIT): (_NONE, (_HOME_UD, _HOME, _HOME, _HOME, _HOME, _0)),
    (S.INIT, S.RTR): (
        (_0, _PATH, _PATH | _ANSWER, _PATH, _PATH | _ANSWER, _0),
        (A.PKEY_INDEX | A.QKEY, _ROUTED, _ROUTED, _ROUTED, _ROUTED, _0),
    ),
    (S.RTR, S.RTS): (
        (
            A.SQ_PSN,
            A.SQ_PSN,
            A.SQ_PSN | A.TIMEOUT | _ASK,
            A.SQ_PSN | A.TIMEOUT | _ASK,
            A.SQ_PSN | A.TIMEOUT,
            _0,
        ),
        (*_RUNNING, A.RATE_LIMIT),
    ),
    (S.RTS, S.RTS): (_NONE, (*_RUNNING, A.RATE_LIMIT)),
    (S.RTS, S.SQD): (_NONE, (_SQD, _SQD, _SQD, _SQD, _SQD, _0)),
    (S.SQD, S.RTS): (_NONE, (*_RUNNING, _0)),
    (S.SQD, S.SQD): (
        _NONE,
        (A.PKEY_INDEX | A.QKEY, _MOVE, _MOVE_R | _ASK | _ANSWER, _MOVE_R | _ASK, _MOVE_R | _ANSWER, _0),
    ),
    (S.SQE, S.RTS): (_NONE, (_RUN_UD, A.CUR_STATE | A.ACCESS_FLAGS, _0, _0, _0, _0)),
    **{(state, S.RESET): (_NONE, _NONE) for state in S if state is not S.UNKNOWN},
    **{(state, S.ERR): (_NONE, _NONE) for state in S if state not in (S.RESET, S.UNKNOWN)},
}

_EDGES: Mapping[QPType, Mapping[Key, Edge]] = {
    qp_type: MappingProxyType({key: Edge(need[i], may[i]) for key, (need, may) in _ROWS.items()})
    for i, qp_type in enumerate(_TYPES)
}

#: Why an edge that people try is not there; the key's ``None`` is any state.
_WHY: dict[tuple[QPState | None, QPState | None], str] = {
    (None, S.UNKNOWN): "UNKNOWN is not a state to move to",
    (S.UNKNOWN, None): "the state is not known: read it with ibv_query_qp",
    (None, S.SQE): "only the device moves a QP to SQE, after a failed send",
    (S.RESET, S.ERR): "a QP in RESET has no work to flush",
    (S.RTR, S.RTR): "nothing can be changed while a QP stays in RTR",
}

#: Bit -> (the members of struct ibv_qp_attr that it covers, what they are).
_ATTRIBUTES: dict[QPAttrMask, tuple[tuple[str, ...], str]] = {
    A.STATE: (("qp_state",), "the state to move to"),
    A.CUR_STATE: (("cur_qp_state",), "the state that the QP is taken to be in"),
    A.EN_SQD_ASYNC_NOTIFY: (("en_sqd_async_notify",), "tell by an event that the send queue is drained"),
    A.ACCESS_FLAGS: (("qp_access_flags",), "what the remote side may do"),
    A.PKEY_INDEX: (("pkey_index",), "row of the port's P_Key table"),
    A.PORT: (("port_num",), "the local port, from 1"),
    A.QKEY: (("qkey",), "the key that datagrams must carry"),
    A.AV: (("ah_attr",), "the remote port's address; on RoCE with its GID"),
    A.PATH_MTU: (("path_mtu",), "largest packet payload on the path"),
    A.TIMEOUT: (("timeout",), "wait for an acknowledgement, 4.096 µs × 2^timeout"),
    A.RETRY_CNT: (("retry_cnt",), "sends again after a timeout"),
    A.RNR_RETRY: (("rnr_retry",), "sends again after receiver-not-ready; 7 is for ever"),
    A.RQ_PSN: (("rq_psn",), "first sequence number expected: the remote side's sq_psn"),
    A.MAX_QP_RD_ATOMIC: (("max_rd_atomic",), "reads and atomics in flight, started here"),
    A.ALT_PATH: (
        ("alt_ah_attr", "alt_pkey_index", "alt_port_num", "alt_timeout"),
        "the alternate path, InfiniBand only",
    ),
    A.MIN_RNR_TIMER: (("min_rnr_timer",), "code of the pause asked for when no receive is posted"),
    A.SQ_PSN: (("sq_psn",), "first sequence number sent: the remote side's rq_psn"),
    A.MAX_DEST_RD_ATOMIC: (("max_dest_rd_atomic",), "reads and atomics in flight, answered here"),
    A.PATH_MIG_STATE: (("path_mig_state",), "automatic path migration, InfiniBand only"),
    A.CAP: (("cap",), "sizes of the queues"),
    A.DEST_QPN: (("dest_qp_num",), "the remote QP's number"),
    A.RATE_LIMIT: (("rate_limit",), "kilobits per second, raw packet only"),
}
_BIT_OF = {member: bit.value for bit, (members, _) in _ATTRIBUTES.items() for member in members}


# ---------------------------------------------------------------- questions


def _bits(mask: QPAttrMask) -> Iterable[QPAttrMask]:
    return (bit for bit in QPAttrMask if bit & mask)


def _names(mask: QPAttrMask) -> str:
    """Name each bit with the C members that supply it; bits without a name are shown as numbers."""
    known = [f"{bit.name} ({', '.join(_ATTRIBUTES[bit][0])})" for bit in _bits(mask)]
    rest = int(mask) & ~sum(_ATTRIBUTES)
    return ", ".join([*known, f"unknown bits {rest:#x}"] if rest else known)


def edges(qp_type: QPType) -> Mapping[Key, Edge]:
    """Return the whole table of a QP type: ``(current, target)`` -> ``Edge``; read-only.

    Raises:
        ValueError: the type's state machine is its driver's own (``DRIVER``).

    Verb: ibv_modify_qp

    """
    table = _EDGES.get(_member(T, "qp_type", qp_type))
    if table is None:
        raise ValueError(f"no table for {qp_type.name}: known are {', '.join(known.name for known in _TYPES)}")
    return table


def _path(table: Mapping[Key, Edge], current: QPState, target: QPState) -> tuple[QPState, ...]:
    """Find the shortest path, breadth first; one that keeps out of RESET and ERR is preferred."""
    for avoided in ((S.RESET, S.ERR), ()):
        paths: list[tuple[QPState, ...]] = [(current,)]
        seen = {current}
        for path in paths:  # grows while it is walked
            for state in S:
                if state not in seen and (path[-1], state) in table:
                    if state is target:
                        return (*path, state)
                    seen.add(state)
                    paths += [] if state in avoided else [(*path, state)]
    return ()


def _why_not(qp_type: QPType, current: QPState, target: QPState) -> list[str]:
    """Say what is wrong with an edge that is not there, what there is, and how to get to the target."""
    table = edges(qp_type)
    found = [f"{qp_type.name} QP: {current.name} → {target.name} is not a transition"]
    found += [_WHY[key] for key in ((current, None), (None, target), (current, target)) if key in _WHY]
    if near := [state.name for state in S if (current, state) in table]:
        found.append(f"{current.name} leads to {', '.join(near)}")
    if path := _path(table, current, target):
        found.append(f"plan: {' → '.join(state.name for state in path)}")
    return found


def _edge(qp_type: QPType, current: QPState, target: QPState) -> Edge:
    edge = edges(qp_type).get((_member(S, "current", current), _member(S, "target", target)))
    if edge is None:
        text = "; ".join(_why_not(qp_type, current, target))
        raise InvalidTransition(text, current=current, target=target)
    return edge


def required(qp_type: QPType, current: QPState, target: QPState) -> QPAttrMask:
    """Return the attributes that an edge demands, without ``STATE``.

    Raises:
        InvalidTransition: there is no such edge.

    Verb: ibv_modify_qp

    """
    return _edge(qp_type, current, target).required


def optional(qp_type: QPType, current: QPState, target: QPState) -> QPAttrMask:
    """Return the attributes that an edge takes beyond those it demands, without ``STATE``.

    Raises:
        InvalidTransition: there is no such edge.

    Verb: ibv_modify_qp

    """
    return _edge(qp_type, current, target).optional


def check(qp_type: QPType, current: QPState, target: QPState, mask: QPAttrMask) -> None:
    """Raise unless the kernel's table has the edge and takes exactly these attributes on it.

    ``STATE`` in the mask is ignored. With ``CUR_STATE`` in it, ``current`` is the ``cur_qp_state`` given.

    Raises:
        InvalidTransition: there is no such edge; the text says what there is, and the way to the target.
        AttributeMaskError: attributes are missing or not allowed; the text lists both.

    Verb: ibv_modify_qp

    """
    edge = _edge(qp_type, current, target)
    given = _member(A, "mask", mask).value
    # As plain numbers: the operators of flags take long.
    required, optional = edge.required.value, edge.optional.value
    lacking, beyond = required & ~given, given & ~(required | optional | _STATE)
    if not lacking and not beyond:
        return
    missing, extra = A(lacking), A(beyond)
    found = [f"missing {_names(missing)}"] if missing else []
    found += [f"not allowed {_names(extra)}"] if extra else []
    for bit in _bits(extra):
        takers = [k for k, e in edges(qp_type).items() if bit & (e.required | e.optional)]
        where = ", ".join(f"{a.name} → {b.name}" for a, b in takers) or f"no transition of {qp_type.name}"
        found.append(f"{bit.name} is taken by {where}")
    text = f"{qp_type.name} QP: {current.name} → {target.name}: {'; '.join(found)}"
    raise AttributeMaskError(text, current=current, target=target, missing=missing, extra=extra)


def explain(qp_type: QPType, current: QPState, target: QPState) -> str:
    """Describe an edge in several lines: what it demands and takes; or why it is not there, and the way round.

    Verb: ibv_modify_qp

    """
    try:
        edge = _edge(qp_type, current, target)
    except InvalidTransition:
        return "\n  ".join(_why_not(qp_type, current, target))
    lines = [f"{qp_type.name} QP: {current.name} → {target.name}"]
    for title, mask in (("required", edge.required), ("optional", edge.optional)):
        lines.append(f"  {title}:" if mask else f"  {title}: nothing")
        for bit in _bits(mask):
            members, meaning = _ATTRIBUTES[bit]
            lines.append(f"    {bit.name:<20} {', '.join(members)}: {meaning}")
    return "\n".join(lines)


def plan(qp_type: QPType, current: QPState, target: QPState) -> tuple[QPState, ...]:
    """Return the shortest legal path, both ends included; ``(current,)`` where the QP is there already.

    A path through RESET or ERR, which loses the work queued, is given only where there is no other.

    Raises:
        InvalidTransition: no path leads there.

    Verb: ibv_modify_qp

    """
    table = edges(qp_type)
    if _member(S, "current", current) is _member(S, "target", target) and current is not S.UNKNOWN:
        return (current,)
    if path := _path(table, current, target):
        return path
    text = "; ".join(_why_not(qp_type, current, target))
    raise InvalidTransition(text, current=current, target=target)


# ---------------------------------------------------------------- from the members given


def mask_of(attrs: Mapping[str, object]) -> QPAttrMask:
    """Return the mask for the members given, by their C names.

    Raises:
        TypeError: a name is not a member that ``ibv_modify_qp`` takes, or its value is ``None``.

    Verb: ibv_modify_qp

    """
    mask = 0
    for name, value in attrs.items():
        if name not in _BIT_OF:
            raise TypeError(f"{name!r} is not an attribute of a QP: there are {', '.join(_BIT_OF)}")
        if value is None:
            raise TypeError(f"{name} is None: leave out what is not given")
        mask |= _BIT_OF[name]
    return A(mask)


def edge_of(state: QPState, attrs: Mapping[str, object]) -> Key:
    """Return the edge that a modify takes: from ``cur_qp_state`` or ``state``, to ``qp_state`` or back to itself.

    Verb: ibv_modify_qp

    """
    current = _member(S, "cur_qp_state", attrs.get("cur_qp_state", state))
    return current, _member(S, "qp_state", attrs.get("qp_state", current))
