"""Ownership, with made-up handles: closing, finalisers, forks, threads and the interpreter's exit."""

import copy
import errno
import gc
import itertools
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref

import pytest

from pyverbs_lite._base import resource as _resource
from pyverbs_lite._base.resource import Resource
from pyverbs_lite.errors import BusyError, ClosedError, VerbsOSError
from pyverbs_lite.ffi import ffi


class Thing(Resource):
    """Owns a made-up handle; its destroying is written to a log and can be made to fail."""

    def __init__(self, log, name, *parents, failures=0, slow=0.0):
        self.name = name
        self.log = log
        left = [failures]

        def destroy(handle):
            time.sleep(slow)
            if left[0]:
                left[0] -= 1
                raise VerbsOSError(errno.EBUSY, "ibv_destroy_thing")
            log.append(name)

        self._own(ffi.new("int *", len(log)), destroy, *parents)


class Early(Thing):
    _closes_early = True


def family(log):
    """A context with what hangs from it, as in verbs: the MR and the QP are of the PD, the QP of the CQ too."""
    context = Thing(log, "context")
    pd = Thing(log, "pd", context)
    cq = Thing(log, "cq", context)
    mr = Thing(log, "mr", pd)
    qp = Thing(log, "qp", pd, cq)
    return [context, pd, cq, mr, qp]


@pytest.fixture
def unraisable(monkeypatch):
    """What a finaliser or a ``__del__`` raised."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    yield seen
    gc.collect()
    assert seen == []


# Closing


def test_close_is_idempotent():
    log = []
    thing = Thing(log, "pd")
    assert not thing.closed
    assert thing._handle[0] == 0
    thing.close()
    thing.close()
    assert thing.closed
    assert log == ["pd"]
    with pytest.raises(ClosedError, match="this Thing is closed"):
        thing._handle  # noqa: B018


def test_a_context_manager():
    log = []
    with Thing(log, "pd") as thing:
        assert log == []
    assert thing.closed
    assert log == ["pd"]


def test_children_go_youngest_first():
    log = []
    context, *others = family(log)
    context.close()
    assert log == ["qp", "cq", "mr", "pd", "context"]
    assert all(other.closed for other in others)


def test_some_children_go_before_all_others():
    log = []
    pd = Thing(log, "pd")
    kept = [Early(log, "qp 1", pd), Early(log, "qp 2", pd), Thing(log, "mr", pd)]
    pd.close()
    assert log == ["qp 2", "qp 1", "mr", "pd"]
    assert len(kept) == 3


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))), ids=lambda order: "".join(map(str, order)))
def test_every_order(order):
    log = []
    things = family(log)
    for index in (*order, *order):
        things[index].close()
    assert sorted(log) == ["context", "cq", "mr", "pd", "qp"]
    assert log.index("qp") < min(log.index("pd"), log.index("cq"))
    assert log.index("mr") < log.index("pd") < log.index("context")
    assert log.index("cq") < log.index("context")


def test_a_child_of_two_parents_is_closed_once_and_forgotten_by_both():
    log = []
    context, pd, cq, mr, qp = family(log)
    cq.close()
    assert qp.closed
    assert pd._children == [mr]
    context.close()
    assert log == ["qp", "cq", "mr", "pd", "context"]


def test_a_child_holds_its_parents_and_not_the_other_way_round(recwarn):
    warnings.simplefilter("always")
    log = []
    pd = Thing(log, "pd")
    mr = Thing(log, "mr", pd)
    parent = weakref.ref(pd)
    del pd
    gc.collect()
    assert parent() is not None
    child = weakref.ref(mr)
    del mr
    gc.collect()
    assert child() is None
    assert parent() is None
    assert log == ["mr", "pd"]
    assert [warning.category for warning in recwarn] == [ResourceWarning] * 2


def test_closing_lets_the_parents_go():
    log = []
    pd = Thing(log, "pd")
    mr = Thing(log, "mr", pd)
    mr.close()
    assert mr._parents == mr._owned.parents == ()
    assert len(pd._children) == len(pd._owned.children) == 0
    pd.close()


def test_a_failure_leaves_it_open_and_a_retry_works():
    log = []
    pd = Thing(log, "pd", failures=1)
    mr = Thing(log, "mr", pd, failures=1)
    for _ in range(2):
        with pytest.raises(VerbsOSError, match="EBUSY"):
            pd.close()
        assert not pd.closed
        assert pd._handle
    assert mr.closed
    pd.close()
    assert log == ["mr", "pd"]


def test_a_child_that_cannot_be_closed_keeps_its_parent_open():
    log = []
    pd = Thing(log, "pd")
    mr = Thing(log, "mr", pd, failures=1)
    with pytest.raises(VerbsOSError):
        pd.close()
    assert not pd.closed
    assert not mr.closed
    pd.close()
    assert log == ["mr", "pd"]


def test_refusing_before_and_letting_go_after():
    class Guarded(Thing):
        busy = True
        calls = ()

        def _before_destroy(self):
            assert self._handle
            if self.busy:
                raise BusyError("in use")

        def _after_destroy(self):
            assert self.closed
            self.calls += ("after",)

    log = []
    thing = Guarded(log, "mr")
    with pytest.raises(BusyError):
        thing.close()
    assert not thing.closed
    assert log == []
    thing.busy = False
    thing.close()
    thing.close()
    assert thing.calls == ("after",)


def test_the_first_error_is_not_hidden_by_that_of_closing():
    log = []
    thing = Thing(log, "pd", failures=2)
    with pytest.raises(ZeroDivisionError), thing:
        _ = 1 / 0
    assert not thing.closed
    with pytest.raises(VerbsOSError), thing:
        pass
    thing.close()
    with pytest.raises(KeyError), thing:
        raise KeyError


def test_an_interrupted_destroying_is_never_repeated():
    calls = []

    def destroy(handle):
        calls.append(handle)
        raise KeyboardInterrupt

    thing = Resource()
    thing._own(ffi.new("int *"), destroy)
    with pytest.raises(KeyboardInterrupt):
        thing.close()
    thing.close()
    assert thing.closed
    assert len(calls) == 1


def test_closing_again_from_within():
    log = []

    class Nested(Thing):
        def _before_destroy(self):
            self.close()  # as a signal handler might

    thing = Nested(log, "cq")
    thing.close()
    assert log == ["cq"]


def test_children_are_made_by_the_name_of_their_class():
    log = []
    parent = Thing(log, "pd")

    class NamedChild(Resource):
        def __init__(self, parent, size, *, depth):
            self.made = parent, size, depth

    assert parent._make("NamedChild", 3, depth=4).made == (parent, 3, 4)
    first = Resource._kinds["NamedChild"]
    type("NamedChild", (NamedChild,), {})  # a user's subclass of the same name does not take its place
    assert Resource._kinds["NamedChild"] is first
    parent.close()


# Half-built


def test_half_built_objects_are_silent(unraisable):
    class Failing(Resource):
        def __init__(self):
            raise ValueError("bad flags")

    with pytest.raises(ValueError, match="bad flags"):
        Failing()
    half = Failing.__new__(Failing)
    assert half.closed
    half.close()
    with half:
        pass
    with pytest.raises(ClosedError):
        half._handle  # noqa: B018
    del half
    gc.collect()


# Dropped without close()


@pytest.mark.parametrize("action", ["always", "error"])
def test_the_finaliser_destroys_then_warns(unraisable, action):
    log = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        Thing(log, "qp")
        gc.collect()
    assert log == ["qp"]
    if action == "always":
        assert [w.category for w in caught] == [ResourceWarning]
        assert "Thing object was never closed (it was destroyed now" in str(caught[0].message)


def test_the_finaliser_reports_what_it_cannot_destroy(unraisable):
    log = []
    with pytest.warns(ResourceWarning, match="could not be destroyed: ibv_destroy_thing failed: EBUSY"):
        Thing(log, "pd", failures=1)
    assert log == []


def test_the_finaliser_survives_a_broken_warning_hook(unraisable, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError

    monkeypatch.setattr(warnings, "warn", broken)
    log = []
    Thing(log, "pd")
    assert log == ["pd"]


def test_nothing_is_left_to_finalise_after_close(unraisable):
    log = []
    thing = Thing(log, "pd")
    finaliser = thing._finalizer
    thing.close()
    assert not finaliser.alive
    del thing
    gc.collect()
    assert log == ["pd"]


def test_a_child_whose_module_was_not_imported_yet(monkeypatch):
    monkeypatch.delitem(Resource._kinds, "Thing")
    monkeypatch.setattr("pyverbs_lite._base.resource.find", {"Thing": lambda parent, log: Thing(log, "mr", parent)}.get)
    log = []
    pd = Thing(log, "pd")
    mr = pd._make("Thing", log)
    pd.close()
    assert mr.closed
    assert log == ["mr", "pd"]


def test_at_exit_the_youngest_goes_first_and_what_is_borrowed_stays(unraisable):
    from pyverbs_lite._base import resource as _resource

    log = []
    pd, borrowed = Thing(log, "pd"), Thing(log, "borrowed")
    mr = Thing(log, "mr", pd)
    borrowed._finalizer.atexit = False
    waiting = dict.fromkeys(thing._finalizer for thing in (pd, borrowed, mr))
    _resource._at_exit(waiting)
    assert log == ["mr", "pd"]
    assert waiting == {}
    borrowed.close()


def test_dropped_in_a_reference_cycle(unraisable):
    log = []
    things = family(log)
    for thing in things:
        thing.others = things
    del things, thing
    with pytest.warns(ResourceWarning, match="never closed"):
        gc.collect()
    assert sorted(log) == ["context", "cq", "mr", "pd", "qp"]
    assert log.index("qp") < min(log.index("pd"), log.index("cq"))
    assert log.index("mr") < log.index("pd") < log.index("context")


def test_dropped_with_a_parent_that_leads_to_its_child(unraisable):
    # The finaliser of the child must not be what keeps its parent, and so the child, alive.
    log = []
    pd = Thing(log, "pd")
    pd.favourite = Thing(log, "mr", pd)
    del pd
    with pytest.warns(ResourceWarning):
        gc.collect()
    assert log == ["mr", "pd"]


def test_dropped_together_and_one_cannot_be_destroyed(unraisable):
    log = []
    pd = Thing(log, "pd")
    pd.favourite = Thing(log, "mr", pd, failures=1)
    del pd
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    assert log == ["pd"]
    assert ["could not be destroyed" in str(warning.message) for warning in caught] == [True, False]


def test_the_finaliser_leaves_what_was_closed_alone():
    from pyverbs_lite._base import resource as _resource

    log = []
    thing = Thing(log, "pd")
    thing.close()
    _resource._abandoned(thing._owned)
    thing._owned.close()
    assert log == ["pd"]


# Threads


def test_many_threads_close_once():
    log = []
    for round_number in range(20):
        thing = Thing(log, round_number, slow=0.001)
        barrier = threading.Barrier(8)
        after = []

        def close(thing=thing, barrier=barrier, after=after, expected=round_number + 1):
            barrier.wait()
            thing.close()
            after.append(len(log) >= expected)  # who comes second returns when it is done, not before

        threads = [threading.Thread(target=close) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert after == [True] * 8
    assert log == list(range(20))


def test_parents_and_children_from_all_sides_do_not_deadlock():
    for _ in range(30):
        log = []
        things = family(log)
        threads = [threading.Thread(target=thing.close, daemon=True) for thing in (*things, *reversed(things))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert sorted(log) == ["context", "cq", "mr", "pd", "qp"]


def test_children_may_be_born_while_the_parent_closes():
    log = []
    parent = Thing(log, "parent")
    kept = []
    stop = threading.Event()

    def breed():
        while not stop.is_set():
            kept.append(Thing(log, "child", parent))
            time.sleep(0)

    breeder = threading.Thread(target=breed)
    breeder.start()
    while len(kept) < 50:
        time.sleep(0)
    parent.close()
    stop.set()
    breeder.join(10)
    assert not breeder.is_alive()
    for child in kept:
        child.close()
    assert log.count("parent") == 1


# Pickle and copy


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_handles_do_not_pickle(protocol):
    with Thing([], "pd") as thing, pytest.raises(TypeError, match="cannot be pickled or copied"):
        pickle.dumps(thing, protocol)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_handles_do_not_copy(how):
    with Thing([], "pd") as thing, pytest.raises(TypeError, match="Thing holds a handle"):
        how(thing)


# Other processes

PRELUDE = """
import gc, os, sys, threading, time, warnings
from pyverbs_lite._base.resource import Resource
from pyverbs_lite.errors import ClosedError
from pyverbs_lite.ffi import ffi

class Thing(Resource):
    def __init__(self, name, *parents, slow=0):
        def destroy(handle):
            time.sleep(slow)
            print("destroyed", name, os.getpid() == main, flush=True)
        self._own(ffi.new("int *"), destroy, *parents)

main = os.getpid()
"""


def run(script, *options):
    done = subprocess.run(
        [sys.executable, *options, "-c", PRELUDE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done
    return done.stdout.splitlines(), done.stderr


def test_open_at_exit():
    script = """
        context = Thing("context")
        pd = Thing("pd", context)
        cq = Thing("cq", context)
        qp = Thing("qp", pd, cq)
        cycle = [qp]
        cycle.append(cycle)
    """
    expected = ["destroyed qp True", "destroyed cq True", "destroyed pd True", "destroyed context True"]
    assert run(script, "-W", "ignore") == (expected, "")
    for action in ("error", "always"):
        lines, stderr = run(script, "-W", action)
        assert lines == expected
        assert "Exception" not in stderr
        assert "Traceback" not in stderr
        assert stderr.count("ResourceWarning") == (4 if action == "always" else 0)


def test_a_forked_child_neither_uses_nor_destroys():
    lines, stderr = run(
        """
        parent = Thing("parent")
        child = Thing("child", parent)
        dropped = Thing("dropped")
        pid = os.fork()
        if pid == 0:
            try:
                child._handle
            except ClosedError as error:
                print("refused", f"by process {main};" in str(error), "anew" in str(error), flush=True)
            del dropped
            gc.collect()
            parent.close()
            print(parent.closed, flush=True)
            with child:
                pass
            sys.exit(0)   # with the finalisers that run at exit
        print("status", os.waitpid(pid, 0)[1], flush=True)
        assert child._handle and not parent.closed
        dropped.close()
        parent.close()
        """,
        "-W",
        "always",
    )
    assert lines == [
        "refused True True",
        "True",
        "status 0",
        "destroyed dropped True",
        "destroyed child True",
        "destroyed parent True",
    ]
    assert stderr == ""


def test_a_child_may_gain_and_lose_a_parent():
    log = []
    with Thing(log, "first") as first, Thing(log, "second") as second, Thing(log, "watcher") as watcher:
        child = Thing(log, "child", first)
        child._attach(second)
        child._attach(watcher, closed_with=False)
        watcher.close()
        assert not child.closed
        second.close()
        assert log == ["watcher", "child", "second"]
        other = Thing(log, "other", first)
        third = Thing(log, "third")
        other._attach(third)
        other._detach(third)
        third.close()
        assert not other.closed
    assert log == ["watcher", "child", "second", "third", "other", "first"]


def test_in_another_process(monkeypatch):
    log = []
    with Thing(log, "kept") as kept:
        thing = Thing(log, "thing")
        with monkeypatch.context() as patch:
            patch.setattr(_resource, "_forks", _resource._forks)  # puts it back
            _resource._count_fork()
            with pytest.raises(ClosedError, match=rf"opened by process {kept._owned.pid};.*forked child"):
                kept._handle  # noqa: B018
            thing.close()
            assert thing.closed
    assert log == ["kept"]


def test_forked_while_a_thread_is_closing():
    # The child's copy of the lock is held by a thread that does not exist there.
    lines, _ = run(
        """
        thing = Thing("thing", slow=1)
        thread = threading.Thread(target=thing.close)
        thread.start()
        while not thing._owned.closing:
            time.sleep(0)
        time.sleep(0.1)
        pid = os.fork()
        if pid == 0:
            thing.close()
            sys.exit(0)
        print("status", os.waitpid(pid, 0)[1], flush=True)
        thread.join()
        """,
        "-W",
        "ignore::DeprecationWarning",
    )
    assert lines == ["status 0", "destroyed thing True"]


def test_a_signal_handler_may_close_what_it_interrupted():
    log = []
    started = threading.Event()

    class Slow(Thing):
        def _before_destroy(self):
            started.set()
            signal.raise_signal(signal.SIGUSR1)

    thing = Slow(log, "qp")
    before = signal.signal(signal.SIGUSR1, lambda *_: thing.close())
    try:
        thing.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert started.is_set()
    assert log == ["qp"]


# Handing on


def test_a_handle_is_handed_over_with_all_that_was_made_of_it():
    log = []
    context, pd, cq, mr, qp = family(log)
    heir = Thing.__new__(Thing)
    pd._hand_over(heir)
    assert pd.closed
    assert not heir.closed
    with pytest.raises(ClosedError, match="this Thing is closed"):
        pd._handle  # noqa: B018
    pd.close()
    assert log == []
    assert sorted(thing.name for thing in heir._children) == ["mr", "qp"]
    assert mr._parents == (heir,)
    assert qp._parents == (heir, cq)
    assert set(context._children) == {heir, cq}
    context.close()
    assert log == ["qp", "cq", "mr", "pd", "context"]
    assert heir.closed


def test_who_gave_its_handle_away_destroys_nothing_when_dropped():
    log = []
    context, heir = Thing(log, "context"), Thing.__new__(Thing)
    old = Thing(log, "pd", context)
    old._hand_over(heir)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del old
        gc.collect()
    assert log == []
    with pytest.warns(ResourceWarning, match="Thing object was never closed"):
        del heir
    assert log == ["pd"]
    context.close()


def test_nobody_is_told_of_what_the_caller_does_not_know():
    log = []
    context, pd, cq, mr, qp = family(log)
    pd._owned.quiet = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del mr, qp, pd
    assert sorted(log) == ["mr", "pd", "qp"]
    with pytest.warns(ResourceWarning, match="never closed"):
        del cq
    context.close()
