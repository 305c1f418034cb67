"""Who owns what, on a real driver: half-built objects, any order of closing, cycles, exit, forks."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import ALL_ACCESS, completions, connect_qps, make_qp

import pyverbs_lite as pvl
from pyverbs_lite.ffi import lib

pytestmark = pytest.mark.rdma

NAMES = ("context", "pd", "cq", "mr", "qp")


@contextmanager
def nothing_unraisable(monkeypatch):
    """Check that no finaliser had anything to complain of."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    yield
    gc.collect()
    assert seen == []


def build():
    context = pvl.open_device()
    pd = context.alloc_pd()
    cq = context.create_cq(16)
    mr = pd.reg_mr(bytearray(64), ALL_ACCESS)
    qp = make_qp(pd, cq)
    return {"context": context, "pd": pd, "cq": cq, "mr": mr, "qp": qp}


def dropped(holder):
    """Let go of all that a dict holds, and collect it."""
    holder.clear()
    for _ in range(3):  # what a finaliser lets go of may be the next one's turn
        gc.collect()


def in_python(script, *, warnings="error", timeout=30):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    head = "import pyverbs_lite as pvl\nfrom support import *\n"
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", warnings, "-c", head + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


# ---------------------------------------------------------------- half-built


@pytest.mark.parametrize(
    "attempt",
    [
        lambda pd, cq: pvl.Context("nope"),
        lambda pd, cq: pvl.Context(None),
        lambda pd, cq: pd.reg_mr(bytearray(8), pvl.AccessFlags.REMOTE_WRITE),
        lambda pd, cq: pd.reg_mr(bytearray(8), 1 << 19),
        lambda pd, cq: pd.reg_mr("text"),
        lambda pd, cq: pvl.MR(None, bytearray(8)),
        lambda pd, cq: make_qp(pd, cq, depth=1 << 21),
        lambda pd, cq: make_qp(pd, cq, inline=1 << 20),
        lambda pd, cq: make_qp(pd, None),
        lambda pd, cq: pd.context.create_cq(0),
        lambda pd, cq: pd.context.create_cq(8, comp_vector=-1),
        lambda pd, cq: pvl.QP.__new__(pvl.QP).post_send(pvl.SendWR()),
        lambda pd, cq: pvl.PD(None),
    ],
)
def test_a_failed_attempt_leaves_nothing_behind(context, monkeypatch, attempt):
    pd, cq = context.alloc_pd(), context.create_cq(8)
    refusals = (pvl.VerbsError, TypeError, ValueError, AttributeError)
    with nothing_unraisable(monkeypatch), pytest.raises(refusals):
        attempt(pd, cq)
    pd.close()  # a handle that was left over would keep it busy
    cq.close()


def test_a_qp_as_large_as_can_be_asked_for(context, monkeypatch):
    pd, cq = context.alloc_pd(), context.create_cq(8)
    refusal = None
    with nothing_unraisable(monkeypatch):
        try:
            make_qp(pd, cq, depth=1 << 20, sge=32).close()
        except pvl.VerbsOSError as error:
            refusal = error.errno, str(error)
    assert refusal is None or (refusal[0] > 0 and "Success" not in refusal[1])
    pd.close()


# ---------------------------------------------------------------- any order


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)), ids=lambda order: "-".join(order))
def test_every_order_of_closing(order):
    objects = build()
    for _ in range(2):
        for name in order:
            objects[name].close()
            assert objects[name].closed
    assert all(thing.closed for thing in objects.values())


def test_closing_a_cq_closes_its_qps_first(context):
    pd, cq = context.alloc_pd(), context.create_cq(16)
    left, right = make_qp(pd, cq), make_qp(pd, cq)
    connect_qps(left, right)
    mr = pd.alloc(64)
    right.post_recv(pvl.RecvWR(sg_list=[mr]))
    cq.close()
    assert (left.closed, right.closed, mr.closed, pd.closed) == (True, True, False, False)
    mr.close()


def test_a_handle_that_is_in_use_stays_open_and_can_be_closed_later(context):
    pd, cq = context.alloc_pd(), context.create_cq(16)
    qp = make_qp(pd, cq)
    assert lib.ibv_destroy_cq(cq._handle) == errno.EBUSY  # past the library: it changes nothing
    qp.close()
    cq.close()
    assert cq.closed


def test_use_after_close_is_a_typed_error():
    objects = build()
    objects["context"].close()
    uses = {
        "context": lambda context: context.query_port(1),
        "pd": lambda pd: pd.alloc(64),
        "cq": lambda cq: cq.poll(),
        "mr": lambda mr: mr.view,
        "qp": lambda qp: qp.query(),
    }
    for name, use in uses.items():
        with pytest.raises(pvl.ClosedError, match="is closed"):
            use(objects[name])
    for call in (
        lambda: objects["cq"].wait(1),
        lambda: objects["cq"].req_notify(),
        lambda: objects["pd"].create_qp(None),
        lambda: objects["context"].create_cq(4),
        lambda: make_qp(objects["pd"], objects["cq"]),
    ):
        with pytest.raises((pvl.ClosedError, TypeError)):
            call()


def test_a_channel_and_its_cq(context):
    channel = context.create_comp_channel()
    cq = context.create_cq(8, channel)
    descriptor = channel.fileno()
    channel.close()
    assert cq.closed
    with pytest.raises(pvl.ClosedError, match="CompChannel is closed"):
        channel.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_with_blocks_close_from_the_inside_out():
    with pvl.open_device() as context, context.alloc_pd() as pd, context.create_cq(8) as cq:
        with pd.alloc(64) as mr, make_qp(pd, cq) as qp:
            assert not qp.closed
        assert (mr.closed, qp.closed, pd.closed) == (True, True, False)
    assert context.closed


def test_nothing_is_leaked_by_rounds_of_everything():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    for turn in range(25):
        context = pvl.open_device()
        pd, channel = context.alloc_pd(), context.create_comp_channel()
        cq = context.create_cq(32, channel)
        left, right = make_qp(pd, cq), make_qp(pd, cq)
        connect_qps(left, right)
        mr = pd.alloc(4096, ALL_ACCESS)
        right.post_recv(pvl.RecvWR(sg_list=[mr[:64]]))
        left.post_send(pvl.SendWR(sg_list=[mr[64:128]]))
        completions(cq, 2)
        right.post_recv(pvl.RecvWR(sg_list=[mr[:64]]))
        context.close()
        if turn == 2:
            before = descriptors()
    assert descriptors() == before


# ---------------------------------------------------------------- dropped


@pytest.mark.parametrize("in_flight", [False, True])
def test_everything_dropped_in_a_cycle(monkeypatch, in_flight):
    objects = build()
    # Every object leads to every other; a region in flight, and what it leads to, must not lead to its QP.
    for name in ("qp", "cq") if in_flight else NAMES:
        objects[name].friends = list(objects.values())
    if in_flight:
        objects["qp"].to_init()
        objects["qp"].post_recv(pvl.RecvWR(sg_list=[objects["mr"]]))
    watch = [weakref.ref(thing) for thing in objects.values()]
    with nothing_unraisable(monkeypatch):
        with pytest.warns(ResourceWarning) as warned:
            dropped(objects)
        texts = " ".join(str(warning.message) for warning in warned)
        assert all(word in texts for word in ("Context of", "PD of", "CQ of", "MR of", "QP 0x"))
        assert "could not be destroyed" not in texts
    assert [reference() for reference in watch] == [None] * 5


def test_a_dropped_qp_leaves_its_completions(context):
    pd, cq = context.alloc_pd(), context.create_cq(16)
    qp = make_qp(pd, cq)
    qp.to_init()
    mr = pd.alloc(64)
    qp.post_recv(*[pvl.RecvWR(wr_id=30 + i, sg_list=[mr]) for i in range(3)])
    qp.to_error()
    first = completions(cq, 1)
    number = qp.qp_num
    with pytest.warns(ResourceWarning, match=r"QP 0x.* was never closed"):
        del qp
    rest = cq.poll()
    assert [wc.wr_id for wc in first + rest] == [30, 31, 32][: 1 + len(rest)]
    assert {wc.qp_num for wc in rest} <= {number}
    mr.close()


def test_parents_live_as_long_as_their_children():
    objects = build()
    qp, mr = objects["qp"], objects["mr"]
    del objects
    gc.collect()
    assert not qp.closed
    qp.to_init()
    qp.post_recv(pvl.RecvWR(sg_list=[mr]))
    qp.pd.context.close()
    assert (qp.closed, mr.closed) == (True, True)


# ---------------------------------------------------------------- exit and fork


@pytest.mark.parametrize("state", ["idle", "in flight", "cycle"])
def test_what_is_left_at_exit(state):
    script = f"""
        context = pvl.open_device()
        pd, channel = context.alloc_pd(), context.create_comp_channel()
        cq = context.create_cq(32, channel)
        mr = pd.alloc(4096, ALL_ACCESS)
        left, right = make_qp(pd, cq), make_qp(pd, cq)
        connect_qps(left, right)
        if {state!r} != "idle":
            right.post_recv(*[pvl.RecvWR(sg_list=[mr])] * 5)
            cq.req_notify()
            left.post_send(pvl.SendWR(sg_list=[mr[:64]]))
        if {state!r} == "cycle":
            for thing in (context, pd, channel, cq, mr, left, right):
                thing.friends = [context, pd, channel, cq, mr, left, right]
        print("ready")
    """
    done = in_python(script, warnings="ignore")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")


def test_an_exception_at_the_top_is_the_only_thing_shown():
    script = """
        with pvl.open_device() as context:
            pd, cq = context.alloc_pd(), context.create_cq(8)
            qp = make_qp(pd, cq)
            qp.to_init()
            qp.post_recv(pvl.RecvWR(sg_list=[pd.alloc(64)]))
            raise SystemExit(3)
    """
    done = in_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_a_forked_child_neither_uses_nor_destroys():
    script = """
        import os, sys
        context = pvl.open_device()
        pd, cq = context.alloc_pd(), context.create_cq(32)
        left, right = make_qp(pd, cq), make_qp(pd, cq)
        connect_qps(left, right)
        mr = pd.alloc(4096, ALL_ACCESS)
        right.post_recv(pvl.RecvWR(wr_id=8, sg_list=[mr[:64]]))
        child = os.fork()
        if child == 0:
            status = 0
            for use in (lambda: left.post_send(pvl.SendWR()), cq.poll, left.query, lambda: context.query_port(1)):
                try:
                    use()
                    status = 1
                except pvl.ClosedError as error:
                    assert "forked child" in str(error)
            context.close()
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        left.post_send(pvl.SendWR(wr_id=9, sg_list=[mr[64:70]]))
        assert {wc.status for wc in completions(cq, 2)} == {pvl.WCStatus.SUCCESS}
        context.close()
        print("alive")
    """
    done = in_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")
