"""Counters: the error where a driver has none, and what the verbs get where it has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import pyverbs_lite as pvl
import pyverbs_lite.counters
from pyverbs_lite.enums import ReadCountersFlags
from pyverbs_lite.ffi import ffi, lib

pytestmark = pytest.mark.rdma

PACKETS, BYTES = pvl.CounterDescription.PACKETS, pvl.CounterDescription.BYTES


def test_rxe_has_none(context):
    with pytest.raises(pvl.UnsupportedError, match="ibv_create_counters failed"):
        context.create_counters()


@pytest.fixture
def verbs(monkeypatch, context):
    """Stand in for a device that has counters."""
    calls, answers = [], SimpleNamespace(rc=0)
    handle = ffi.new("struct ibv_counters *")

    class FakeLib:
        def __getattr__(self, name):
            return getattr(lib, name)

        def ibv_create_counters(self, context, attr):
            calls.append(("create", attr.comp_mask))
            return handle

        def ibv_destroy_counters(self, counters):
            calls.append(("destroy",))
            return answers.rc

        def ibv_attach_counters_point_flow(self, counters, attr, flow):
            calls.append(("attach", attr.counter_desc, attr.index, attr.comp_mask, flow == ffi.NULL))
            return answers.rc

        def ibv_read_counters(self, counters, values, count, flags):
            calls.append(("read", count, flags))
            for i in range(count):
                values[i] = 0xFEDC_BA98_0000_0000 + i
            return answers.rc

    monkeypatch.setattr(pyverbs_lite.counters, "lib", FakeLib())
    yield SimpleNamespace(calls=calls, answers=answers)
    answers.rc = 0
    context.close()  # while the verbs are still these: the real ones would take the handles for theirs


def test_points_and_values(context, verbs):
    with context.create_counters() as counters:
        counters.attach(PACKETS, 0)
        counters.attach(BYTES, 3)
        assert counters.points == {0: PACKETS, 3: BYTES}
        assert counters.read() == [0xFEDC_BA98_0000_0000 + i for i in range(4)]
        assert counters.read(1, prefer_cached=True) == [0xFEDC_BA98_0000_0000]
    assert verbs.calls == [
        ("create", 0),
        ("attach", PACKETS, 0, 0, True),
        ("attach", BYTES, 3, 0, True),
        ("read", 4, 0),
        ("read", 1, ReadCountersFlags.PREFER_CACHED),
        ("destroy",),
    ]


def test_what_is_refused(context, verbs):
    counters = context.create_counters()
    with pytest.raises(pvl.StateError, match="have no points"):
        counters.read()
    for arguments, error in (((0, 0), TypeError), ((PACKETS, -1), ValueError), ((PACKETS, "0"), TypeError)):
        with pytest.raises(error):
            counters.attach(*arguments)
    counters.attach(BYTES, 2)
    with pytest.raises(pvl.StateError, match="index 2 counts BYTES already"):
        counters.attach(PACKETS, 2)
    with pytest.raises(ValueError, match="ncounters"):
        counters.read(0)
    assert verbs.calls == [("create", 0), ("attach", BYTES, 2, 0, True)]


def test_a_refused_attach_leaves_the_index_free(context, verbs):
    counters = context.create_counters()
    verbs.answers.rc = 95
    with pytest.raises(pvl.UnsupportedError, match="ibv_attach_counters_point_flow"):
        counters.attach(PACKETS, 1)
    assert counters.points == {}
    verbs.answers.rc = 0
    counters.attach(BYTES, 1)
    verbs.answers.rc = 5
    with pytest.raises(pvl.VerbsOSError, match="ibv_read_counters failed: EIO"):
        counters.read()
    verbs.answers.rc = 16
    with pytest.raises(pvl.VerbsOSError, match="ibv_destroy_counters failed: EBUSY"):
        counters.close()
    assert not counters.closed
    verbs.answers.rc = 0
    counters.close()
    for use in (counters.read, lambda: counters.attach(PACKETS, 2)):
        with pytest.raises(pvl.ClosedError):
            use()
