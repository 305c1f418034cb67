"""The exception tree: its shape, its texts, and that it crosses process borders."""

import ast
import copy
import errno
import multiprocessing
import pickle
from pathlib import Path

import pytest

import pyverbs_lite
from pyverbs_lite import errors
from pyverbs_lite.enums import QPAttrMask, QPState, WCStatus
from pyverbs_lite.errors import (
    AttributeMaskError,
    BusyError,
    CMError,
    CompletionError,
    FlushError,
    GIDError,
    HandshakeError,
    HandshakeTimeout,
    InvalidTransition,
    PeerClosedError,
    QueueFullError,
    RouteError,
    VerbsError,
    VerbsOSError,
    WaitTimeout,
)

PACKAGE = Path(pyverbs_lite.__file__).parent

#: class -> its parent in the tree, and the builtin it is as well.
TREE = {
    "VerbsOSError": ("VerbsError", OSError),
    "UnsupportedError": ("VerbsOSError", OSError),
    "QueueFullError": ("VerbsOSError", BlockingIOError),
    "RouteError": ("VerbsOSError", OSError),
    "DeviceNotFoundError": ("VerbsError", LookupError),
    "GIDError": ("VerbsError", LookupError),
    "StateError": ("VerbsError", RuntimeError),
    "InvalidTransition": ("StateError", RuntimeError),
    "AttributeMaskError": ("StateError", RuntimeError),
    "BusyError": ("StateError", RuntimeError),
    "ClosedError": ("StateError", RuntimeError),
    "StaleBufferError": ("StateError", RuntimeError),
    "CompletionError": ("VerbsError", OSError),
    "WaitTimeout": ("VerbsError", TimeoutError),
    "HandshakeError": ("VerbsError", ConnectionError),
    "PeerProtocolError": ("HandshakeError", ConnectionError),
    "PeerClosedError": ("HandshakeError", ConnectionError),
    "AuthenticationError": ("HandshakeError", ConnectionError),
    "HandshakeTimeout": ("HandshakeError", TimeoutError),
    "CMError": ("HandshakeError", ConnectionError),
    "CMAddressError": ("CMError", ConnectionError),
    "CMRouteError": ("CMError", ConnectionError),
    "CMUnreachableError": ("CMError", ConnectionError),
    "CMRejectedError": ("CMError", ConnectionError),
    "CMConnectError": ("CMError", ConnectionError),
    "CMDeviceRemovedError": ("CMError", ConnectionError),
    "CMMulticastError": ("CMError", ConnectionError),
}

#: Statuses of services that this library does not offer (reliable datagram, tag matching).
WITHOUT_CLASS = {
    "SUCCESS",
    "LOC_EEC_OP_ERR",
    "LOC_RDD_VIOL_ERR",
    "REM_INV_RD_REQ_ERR",
    "INV_EECN_ERR",
    "INV_EEC_STATE_ERR",
    "TM_ERR",
    "TM_RNDV_INCOMPLETE",
}

EDGE = {"current": QPState.INIT, "target": QPState.RTS}
EXAMPLES = [
    VerbsOSError(errno.EINVAL, "ibv_modify_qp", "the hint"),
    RouteError(errno.ETIMEDOUT, "ibv_modify_qp"),
    QueueFullError(errno.ENOMEM, "ibv_post_send"),
    GIDError("no usable GID on rxe0 port 1"),
    InvalidTransition("no such edge", **EDGE),
    AttributeMaskError("AV is missing", **EDGE, missing=QPAttrMask.AV, extra=QPAttrMask(0)),
    BusyError("in use"),
    WaitTimeout("no completion after 1 s", "recv"),
    HandshakeError("refused"),
    HandshakeTimeout("too late"),
    PeerClosedError(errno.ECONNRESET, "reset"),
    CompletionError(WCStatus.TM_ERR, wr_id=1 << 63, qp_num=0xFFFFFF),
    FlushError(WCStatus.WR_FLUSH_ERR, wr_id=7, qp_num=0x11, vendor_err=0xF5, operation="send"),
]


# The tree


@pytest.mark.parametrize("name", TREE)
def test_parents(name):
    parent, builtin = TREE[name]
    cls = getattr(errors, name)
    assert getattr(errors, parent) in cls.__bases__
    assert issubclass(cls, builtin)
    assert issubclass(cls, VerbsError)


def test_nothing_else_is_in_the_tree_and_all_is_exported():
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, VerbsError)
    }
    assert defined == {"VerbsError", *TREE, *(cls.__name__ for cls in CompletionError.by_status.values())}
    assert sorted(defined) == errors.__all__


def test_every_status_that_users_meet_has_a_class():
    assert set(CompletionError.by_status) == set(WCStatus.__members__) - WITHOUT_CLASS
    for name, cls in CompletionError.by_status.items():
        assert cls.__bases__ == (CompletionError,)
        assert cls.cause != CompletionError.cause
        assert name in str(cls(WCStatus[name], wr_id=1, qp_num=2))


def test_a_subclass_must_name_its_status():
    with pytest.raises(TypeError, match="status"):
        type("Nameless", (CompletionError,), {})


def test_the_root_is_never_raised_itself():
    calls = [
        f"{path.name}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and node.exc and "VerbsError" in ast.dump(getattr(node.exc, "func", node.exc))
    ]
    assert calls == []


# What they carry and say


def test_attributes():
    full, transition, mask, timeout, completion = (EXAMPLES[i] for i in (2, 4, 5, 7, 12))
    assert (full.posted, full.errno, full.operation) == (0, errno.ENOMEM, "ibv_post_send")
    assert (transition.current, transition.target, transition.operation) == (*EDGE.values(), "ibv_modify_qp")
    assert (mask.current, mask.target, mask.missing, mask.extra) == (*EDGE.values(), QPAttrMask.AV, 0)
    assert mask.operation == "ibv_modify_qp"
    assert timeout.operation == "recv"
    assert completion.errno == errno.EIO
    assert (completion.status, completion.wr_id) == (WCStatus.WR_FLUSH_ERR, 7)
    assert (completion.qp_num, completion.vendor_err, completion.operation) == (0x11, 0xF5, "send")
    assert GIDError("x").operation == ""


def test_texts():
    assert str(EXAMPLES[0]) == "ibv_modify_qp failed: EINVAL (Invalid argument): the hint"
    assert str(VerbsOSError(99999, "ibv_x")) == "ibv_x failed: 99999 (Unknown error 99999)"
    assert str(EXAMPLES[12]).startswith("send on QP 0x11 completed with WR_FLUSH_ERR: the QP was in the ERR state")
    assert str(EXAMPLES[12]).endswith("(vendor_err 0xf5)")
    assert str(CompletionError(99, wr_id=0, qp_num=1)).startswith("work request on QP 0x1 completed with 99: ")


@pytest.mark.parametrize("number", [0, -errno.ENOMEM, errno.ENOMEM, errno.EINVAL, -errno.EINVAL])
def test_never_success_never_negative_never_the_bare_reason(number):
    error = VerbsOSError(number, "ibv_reg_mr")
    assert error.errno == (abs(number) or errno.EIO)
    assert "Success" not in str(error)
    assert str(error) not in ("Invalid argument", "Cannot allocate memory")
    assert str(error).startswith("ibv_reg_mr failed: E")


# Process borders


def _same(first, second):
    assert type(first) is type(second)
    assert (str(first), repr(first), first.args) == (str(second), repr(second), second.args)
    assert vars(first) == vars(second)
    if isinstance(first, OSError):
        assert (first.errno, first.strerror) == (second.errno, second.strerror)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_pickle_and_copy(error):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        _same(pickle.loads(pickle.dumps(error, protocol)), error)
    _same(copy.copy(error), error)
    _same(copy.deepcopy(error), error)


def test_pickle_keeps_what_was_added_later():
    full = QueueFullError(errno.ENOMEM, "ibv_post_send")
    full.posted = 3
    assert pickle.loads(pickle.dumps(full)).posted == 3


def _fail(index):
    raise EXAMPLES[index]


def test_errors_come_back_from_a_worker():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for index in (0, 5, 12):
            with pytest.raises(type(EXAMPLES[index])) as caught:
                pool.apply(_fail, (index,))
            assert str(caught.value) == str(EXAMPLES[index])


def test_the_errors_of_the_connection_manager_carry_the_event():
    assert CMError.by_event
    for name, cls in CMError.by_event.items():
        error = cls("no", event=name, status=-110, private_data=b"why", operation="rdma_connect")
        copy = pickle.loads(pickle.dumps(error))
        for one in (error, copy):
            assert (one.event, one.status, one.private_data) == (name, -110, b"why")
            assert (one.operation, str(one)) == ("rdma_connect", "no")
