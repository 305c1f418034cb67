"""The three return-code conventions, with made-up return values: which number is believed, and what is said."""

import errno
import resource
from types import SimpleNamespace

import pytest

from pyverbs_lite._base import check as _check
from pyverbs_lite._base.check import check_neg, check_ptr, check_rc, os_error, require
from pyverbs_lite.errors import QueueFullError, RouteError, UnsupportedError, VerbsOSError
from pyverbs_lite.ffi import ffi

STALE = (0, 99, errno.EINTR)


@pytest.fixture(autouse=True)
def _clean_errno():
    yield
    ffi.errno = 0


# rc: the number is in the return value


@pytest.mark.parametrize("stale", STALE)
@pytest.mark.parametrize("rc", [22, -22])
def test_rc_believes_the_return_value(rc, stale):
    ffi.errno = stale
    with pytest.raises(VerbsOSError) as caught:
        check_rc("ibv_destroy_cq", rc)
    assert caught.value.errno == errno.EINVAL
    assert caught.value.operation == "ibv_destroy_cq"


def test_rc_minus_one_with_errno():
    ffi.errno = errno.ENOMEM
    with pytest.raises(VerbsOSError) as caught:
        check_rc("ibv_resize_cq", -1)
    assert caught.value.errno == errno.ENOMEM


def test_rc_minus_one_without_errno_is_eperm_negated():
    ffi.errno = 0
    with pytest.raises(VerbsOSError) as caught:
        check_rc("ibv_attach_mcast", -1)
    assert caught.value.errno == errno.EPERM


@pytest.mark.parametrize("stale", STALE)
def test_success_whatever_errno_says(stale):
    ffi.errno = stale
    check_rc("ibv_dereg_mr", 0)
    pointer = ffi.new("int *")
    assert check_ptr("ibv_alloc_pd", pointer) is pointer
    assert check_neg("ibv_query_gid_table", 0) == 0
    assert check_neg("ibv_query_gid_table", 7) == 7


# ptr and neg: the number is in errno


def test_null_with_errno():
    ffi.errno = errno.ENOMEM
    with pytest.raises(VerbsOSError) as caught:
        check_ptr("ibv_alloc_pd", ffi.NULL)
    assert caught.value.errno == errno.ENOMEM


def test_minus_one_with_errno():
    ffi.errno = errno.ENOMEM
    with pytest.raises(VerbsOSError) as caught:
        check_neg("ibv_get_cq_event", -1)
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.parametrize("stale", STALE)
def test_neg_believes_a_negated_number(stale):
    ffi.errno = stale
    with pytest.raises(VerbsOSError) as caught:
        check_neg("ibv_query_gid_table", -errno.EINVAL)
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize(
    "call",
    [lambda: check_ptr("ibv_alloc_pd", ffi.NULL), lambda: check_neg("rdma_x", -1), lambda: check_rc("ibv_x", -1)],
)
def test_never_success(call):
    ffi.errno = 0
    with pytest.raises(VerbsOSError) as caught:
        call()
    assert caught.value.errno > 0
    assert "Success" not in str(caught.value)


# errno -> class, one table


@pytest.mark.parametrize(
    ("operation", "number", "cls"),
    [
        ("ibv_reg_mr", errno.EOPNOTSUPP, UnsupportedError),
        ("ibv_alloc_mw", errno.ENOSYS, UnsupportedError),
        ("ibv_create_qp", errno.EPROTONOSUPPORT, UnsupportedError),
        ("ibv_post_send", errno.ENOMEM, QueueFullError),
        ("ibv_post_recv", errno.ENOMEM, QueueFullError),
        ("ibv_modify_qp", errno.ETIMEDOUT, RouteError),
        ("ibv_modify_qp", errno.ENETUNREACH, RouteError),
        ("ibv_modify_qp", errno.EHOSTUNREACH, RouteError),
        ("ibv_modify_qp", errno.EINVAL, VerbsOSError),
        ("ibv_reg_mr", errno.ENOMEM, VerbsOSError),
        ("rdma_resolve_addr", errno.ETIMEDOUT, VerbsOSError),
        ("ibv_x", 99999, VerbsOSError),
        ("ibv_x", 0, VerbsOSError),
    ],
)
def test_class_by_errno(operation, number, cls):
    for sign in (1, -1):
        error = os_error(operation, sign * number)
        assert type(error) is cls
        assert error.errno == (number or errno.EIO)


# The texts


@pytest.mark.parametrize("number", sorted(_check._GENERAL_HINTS))
def test_no_operation_is_left_with_a_bare_reason(number):
    error = os_error("ibv_anything", number)
    assert error.hint
    assert str(error).endswith(error.hint)


@pytest.mark.parametrize(("operation", "number"), sorted(_check._HINTS))
def test_operations_say_more(operation, number):
    assert _check._HINTS[operation, number] in str(os_error(operation, number))


def test_unsupported_says_who_lacks_it():
    assert "does not have it" in str(os_error("ibv_alloc_mw", errno.EOPNOTSUPP))


def test_a_hint_of_the_caller_comes_first():
    assert os_error("ibv_reg_mr", errno.ENOMEM, "mine").hint == "mine"
    for call in (lambda: check_rc("x", 22, "mine"), lambda: check_ptr("x", ffi.NULL, "mine")):
        with pytest.raises(VerbsOSError, match="mine"):
            call()
    with pytest.raises(VerbsOSError, match="mine"):
        check_neg("x", -22, "mine")


@pytest.mark.parametrize(
    ("limit", "shown"), [(65536, "now 65536 bytes"), (resource.RLIM_INFINITY, "now unlimited"), (0, "now 0 bytes")]
)
@pytest.mark.parametrize("operation", ["ibv_reg_mr", "ibv_reg_dmabuf_mr", "ibv_create_qp", "ibv_create_cq"])
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN])
def test_memlock(monkeypatch, limit, shown, operation, number):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    text = str(os_error(operation, number))
    assert "RLIMIT_MEMLOCK" in text
    assert shown in text
    assert "ulimit -l" in text


def test_memlock_is_not_blamed_for_all():
    assert "MEMLOCK" not in str(os_error("ibv_reg_mr", errno.EINVAL))
    assert "MEMLOCK" not in str(os_error("ibv_alloc_pd", errno.ENOMEM))


def test_memlock_shows_the_real_limit():
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert ("unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes") in str(
        os_error("ibv_reg_mr", errno.ENOMEM)
    )


# What the headers of the build are too old for


def test_require(monkeypatch):
    monkeypatch.setattr(_check, "lib", SimpleNamespace(PVL_HAS_OLD=31, PVL_HAS_NEW=-45))
    require("OLD", "ibv_set_ece")
    with pytest.raises(UnsupportedError) as caught:
        require("NEW", "ibv_wr_flush")
    assert (caught.value.errno, caught.value.operation) == (errno.EOPNOTSUPP, "ibv_wr_flush")
    wanted = "(Operation not supported): needs rdma-core 45 or newer; this build was made against an older one"
    assert str(caught.value).endswith(wanted)
    with pytest.raises(AttributeError, match="PVL_HAS_MISSPELT"):
        require("MISSPELT", "ibv_open_device")
