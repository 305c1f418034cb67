"""Thread domains and parent domains, which no device here has: the errors, the structs, and what they would do."""

from __future__ import annotations

import pytest
from support import ALL_ACCESS, completions, connect_qps, make_qp

import pyverbs_lite as pvl
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma


class FakeDomains:
    """Stands in for ``lib``: thread domains that are numbers, and parent domains that are PDs of their own.

    A parent domain that stands for its inner one is made by lending the inner one's handle, so that requests work.
    """

    def __init__(self):
        self.calls = []
        self.tds = []
        self.inner = None

    def __getattr__(self, name):
        return getattr(lib, name)

    def ibv_alloc_td(self, context, attr):
        self.calls.append(("alloc_td", context, attr.comp_mask))
        self.tds.append(ffi.new("char *"))
        return ffi.cast("struct ibv_td *", self.tds[-1])

    def ibv_dealloc_td(self, td):
        self.calls.append(("dealloc_td", td))
        return 0

    def ibv_alloc_parent_domain(self, context, attr):
        self.calls.append(("alloc_parent_domain", context, attr.pd, attr.td, attr.comp_mask))
        return attr.pd

    def ibv_dealloc_pd(self, pd):
        self.calls.append(("dealloc_pd", pd))
        return 0

    def names(self):
        return [call[0] for call in self.calls]


@pytest.fixture
def fake(monkeypatch):
    fake = FakeDomains()
    monkeypatch.setattr("pyverbs_lite.domains.lib", fake)
    monkeypatch.setattr("pyverbs_lite.domains.dealloc_pd", fake.ibv_dealloc_pd)
    return fake


# ---------------------------------------------------------------- on devices that have none


@pytest.mark.parametrize("device", ["rxe0", "siw0"])
def test_soft_devices_have_none(device):
    with pvl.Context(device) as context:
        pd = context.alloc_pd()
        with pytest.raises(pvl.UnsupportedError, match="ibv_alloc_td"):
            context.alloc_td()
        with pytest.raises(pvl.UnsupportedError, match="ibv_alloc_parent_domain"):
            pd.alloc_parent_domain()
        pd.close()  # nothing is left of it


def test_an_option_that_is_newer(pd):
    kind = pvl.UnsupportedError
    with pytest.raises(kind):
        pd.alloc_parent_domain(allow_cc_unprotected_alloc=True)
    if lib.PVL_HAS_CC_UNPROTECTED_ALLOC < 0:
        with pytest.raises(kind, match="needs rdma-core 64 or newer"):
            pd.alloc_parent_domain(allow_cc_unprotected_alloc=True)


# ---------------------------------------------------------------- arguments


def test_what_a_parent_domain_cannot_be_made_of(context, pd, fake):
    td, parent = context.alloc_td(), pd.alloc_parent_domain()
    with pytest.raises(TypeError, match="no ParentDomain"):
        parent.alloc_parent_domain()
    with pytest.raises(TypeError, match="td must be a TD"):
        pd.alloc_parent_domain(pd)
    with pytest.raises(TypeError, match="must be a PD"):
        pvl.ParentDomain(context, td)
    with pvl.Context("siw0") as other, pytest.raises(ValueError, match="thread domain belongs to"):
        other.alloc_pd().alloc_parent_domain(td)
    td.close()
    with pytest.raises(pvl.ClosedError, match="TD is closed"):
        pd.alloc_parent_domain(td)
    assert fake.names() == ["alloc_td", "alloc_parent_domain", "dealloc_td"]


# ---------------------------------------------------------------- what the verbs are given


def test_the_struct(context, pd, fake):
    td = context.alloc_td()
    parent = pd.alloc_parent_domain(td)
    assert fake.calls == [
        ("alloc_td", context._handle, 0),
        ("alloc_parent_domain", context._handle, pd._handle, td._handle, 0),
    ]
    assert (parent.pd, parent.td, parent.root, parent.context) == (pd, td, pd, context)
    assert pd.root is pd
    without = pd.alloc_parent_domain()
    assert fake.calls[-1] == ("alloc_parent_domain", context._handle, pd._handle, ffi.NULL, 0)
    assert without.td is None


# ---------------------------------------------------------------- ownership


def test_closed_before_what_it_is_around(context, fake):
    pd, td = context.alloc_pd(), context.alloc_td()
    parent = pd.alloc_parent_domain(td)
    pd.close()
    assert (parent.closed, td.closed) == (True, False)
    td.close()
    assert fake.names()[-2:] == ["dealloc_pd", "dealloc_td"]


def test_a_thread_domain_closes_its_parent_domains(context, pd, fake):
    td = context.alloc_td()
    parent = pd.alloc_parent_domain(td)
    td.close()
    assert parent.closed
    assert not pd.closed
    assert fake.names()[-2:] == ["dealloc_pd", "dealloc_td"]


def test_dropped(context, fake):
    def make():
        context.alloc_pd().alloc_parent_domain(context.alloc_td())

    with pytest.warns(ResourceWarning) as caught:
        make()
    assert {str(warning.message).split(" of ")[0] for warning in caught} == {"ParentDomain", "TD", "PD"}
    assert fake.names()[-2:] == ["dealloc_pd", "dealloc_td"]


# ---------------------------------------------------------------- used like a PD


def test_usable_wherever_a_pd_is(context, pd, fake):
    cq = context.create_cq(20)
    parent = pd.alloc_parent_domain(context.alloc_td())
    assert isinstance(parent, pvl.PD)
    left, right = make_qp(parent, cq), make_qp(pd, cq)
    connect_qps(left, right)
    inside, outside = parent.alloc(64, ALL_ACCESS), pd.alloc(64, ALL_ACCESS)
    assert (left.pd, inside.pd, inside.pd.root, outside.pd.root) == (parent, parent, pd, pd)
    inside.view[:5] = b"hello"
    right.post_recv(pvl.RecvWR(sg_list=[outside]))
    left.post_send(pvl.SendWR(sg_list=[inside[:3], outside[40:42]]))  # a QP of the one, a region of the other
    assert [wc.status for wc in completions(cq, 2)] == [pvl.WCStatus.SUCCESS] * 2
    assert bytes(outside.view[:6]) == b"hel\0\0\0"
    parent.close()
    assert (left.closed, inside.closed) == (True, True)
    assert (right.closed, outside.closed) == (False, False)


def test_two_inner_domains_stay_apart(context, pd, fake):
    cq = context.create_cq(20)
    mine, theirs = pd.alloc_parent_domain(), context.alloc_pd()
    left, right = make_qp(mine, cq), make_qp(mine, cq)
    connect_qps(left, right)
    with pytest.raises(ValueError, match="belongs to another PD"):
        left.post_send(pvl.SendWR(sg_list=[theirs.alloc(64)]))
