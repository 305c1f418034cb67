"""What a connection was made of serves the next one on the same context, and nothing of the old one is left in it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import connected, counts, in_thread, nothing_left

import pyverbs_lite as pvl
from pyverbs_lite._base.args import Deadline
from pyverbs_lite._objects import spares as _spares

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(120)]

A = pvl.AccessFlags
IMPATIENT = {"ack_timeout_exp": 8, "retry_cnt": 1, "rnr_retry": 0}


@contextmanager
def pair(context: pvl.Context, **options: Any) -> Iterator[tuple[pvl.Connection, pvl.Connection]]:
    """Connect two ends that are both on one context."""
    options["device"] = context
    with connected(server=options, client=options) as both:
        yield both


def numbers(*conns: pvl.Connection) -> set[int]:
    return {conn.info.local_qp_num for conn in conns}


def waiting(context: pvl.Context) -> int:
    return len(context._spares)


def test_the_next_connection_is_made_of_the_same_objects_and_works(context: pvl.Context) -> None:
    seen = []
    for turn in range(6):
        with pair(context) as (left, right):
            seen.append(numbers(left, right))
            region = right.register(bytearray(b"%03d" % turn * 700), name="memory")
            for length in (1, 5000, 60000):
                data = bytes([turn + length % 7]) * length
                left.send(data)
                assert right.recv(timeout=10) == data
                right.send(data[::-1])
                assert left.recv(timeout=10) == data[::-1]
            assert left.read(left.remote["memory"])[:3] == b"%03d" % turn
            assert region.length == 2100
        assert waiting(context) == 2
    assert seen == [seen[0]] * 6


def test_they_go_with_the_context() -> None:
    with nothing_left():
        with pvl.open_device() as context:
            with pair(context):
                pass
            assert waiting(context) == 2
        assert context._spares == []


def test_trim_destroys_them(context: pvl.Context) -> None:
    before = counts()
    with pair(context):
        pass
    assert counts()["qp"] == before["qp"] + 2
    assert context.trim() == 2
    assert context.trim() == 0
    assert counts() == before


def test_a_context_that_keeps_none(context: pvl.Context) -> None:
    assert context.max_spares == 4
    with pair(context):
        pass
    before = counts()
    context.max_spares = 1
    assert counts()["qp"] == before["qp"] - 1
    context.max_spares = 0
    with pair(context) as (left, right):
        left.send(b"one")
        assert right.recv(timeout=10) == b"one"
    assert counts()["qp"] == before["qp"] - 2
    for wrong, kind in ((-1, ValueError), (5, ValueError), (True, TypeError), ("2", TypeError)):
        with pytest.raises(kind, match="max_spares"):
            context.max_spares = wrong  # type: ignore[assignment]
    assert context.max_spares == 0


def test_there_are_no_more_than_a_few_and_not_of_much_memory(context: pvl.Context) -> None:
    with pair(context), pair(context), pair(context), pair(context):
        pass
    assert 0 < sum(parts.nbytes for parts in context._spares) <= _spares.MOST_BYTES
    assert waiting(context) == 4 or sum(parts.nbytes for parts in context._spares) > _spares.MOST_BYTES * 3 // 4
    context.trim()
    with pair(context, max_message_size=1 << 20):
        pass
    assert waiting(context) == 0


def test_other_sizes_are_other_objects(context: pvl.Context) -> None:
    with pair(context, recv_depth=8) as (left, right):
        first = numbers(left, right)
    for options in ({"recv_depth": 9}, {"send_depth": 7}, {"max_message_size": 1000}):
        with (
            pair(context, recv_depth=8, **options) if "recv_depth" not in options else pair(context, **options) as ends
        ):
            assert not numbers(*ends) & first
    with pair(context, recv_depth=8, retry_cnt=3, max_rd_atomic=2) as ends:
        ends[0].send(b"two")
        assert ends[1].recv(timeout=10) == b"two"


def test_a_buffer_of_an_old_connection_is_refused_and_so_is_its_region(context: pvl.Context) -> None:
    with pair(context) as (left, right):
        right.register(bytearray(4096), name="memory")
        right.send(b"named")
        left.recv(timeout=10)
        stale, domain = left.remote["memory"], left.info.local_qp_num
        region = left.register(bytearray(100))
        part = region[:50]
        old = region.pd
    assert old.closed
    assert region.closed
    with pytest.raises(pvl.ClosedError):
        old.reg_mr(bytearray(10))
    with pair(context) as (left, right):
        assert left.info.local_qp_num == domain
        with pytest.raises(pvl.StateError):
            left.write(stale, b"x")
        with pytest.raises((pvl.ClosedError, ValueError)):
            left.send(part)
        left.send(b"well")
        assert right.recv(timeout=10) == b"well"


def test_objects_of_the_caller_in_its_domain_are_no_part_of_the_next(context: pvl.Context) -> None:
    with pair(context) as (left, right):
        pd = left.register(bytearray(10)).pd
        own = pd.reg_mr(bytearray(100))
        number = left.info.local_qp_num
    assert own.closed
    assert pd.closed
    assert waiting(context) == 1
    with pair(context) as (left, right):
        assert number not in numbers(left, right)


def test_a_connection_that_failed_leaves_nothing(context: pvl.Context) -> None:
    with pair(context, **IMPATIENT) as (left, right):
        right._link.qp.to_error()
        with pytest.raises(pvl.CompletionError):
            left.send(b"to nobody")
        number = left.info.local_qp_num
    assert number not in {parts.qp.qp_num for parts in context._spares}
    with pair(context) as (left, right):
        left.send(b"again")
        assert right.recv(timeout=10) == b"again"


def test_a_peer_that_is_gone_without_a_word_leaves_nothing(context: pvl.Context) -> None:
    with pair(context) as (left, right):
        right._link.peer.control.close()
        with pytest.raises(pvl.PeerClosedError):
            left.recv(timeout=10)
    assert waiting(context) == 1  # the one that went knows of no fault


def test_a_lent_message_stays_as_it_is(context: pvl.Context) -> None:
    with pair(context) as (left, right):
        left.send(b"keep this")
        message = right.recv(timeout=10, lend=True)
        view = message.view
    assert waiting(context) == 1
    with pair(context) as (left, right):
        for _ in range(40):
            left.send(b"OVERWRITE")
            right.recv(timeout=10)
    assert bytes(view) == b"keep this"
    message.release()


def test_messages_that_nobody_took_are_not_the_next_connections(context: pvl.Context) -> None:
    for turn in range(3):
        with pair(context) as (left, right):
            right.send(b"first %d" % turn)
            assert left.recv(timeout=10) == b"first %d" % turn
            for _ in range(5):
                left.send(b"not taken")
    assert waiting(context) == 2


def test_closing_while_another_thread_waits(context: pvl.Context) -> None:
    for _ in range(5):
        with pair(context) as (left, right):
            result = in_thread(left.recv)
            right.send(b"x")
            assert result(10) == b"x"
            result = in_thread(left.recv)
            time.sleep(0.01)
            left.close()
            with pytest.raises(pvl.ClosedError):
                result(10)


def test_an_end_that_is_tried_again_leaves_the_next_connection_alone(context: pvl.Context) -> None:
    """An interrupt may come right after the objects were kept, and before the end is over."""
    with pair(context) as old:
        pass
    with pair(context) as (left, right):
        assert numbers(left, right) == numbers(*old)
        for conn in old:
            conn._link.end(Deadline(1), pvl.ClosedError("once more"))
            conn._link.engine.fail(pvl.ClosedError("once more"))
            assert not conn._link.engine.stop_qp()
        left.send(b"untouched")
        assert right.recv(timeout=10) == b"untouched"
    assert waiting(context) == 2


def test_where_memory_cannot_be_pinned_they_make_room(context: pvl.Context) -> None:
    from pyverbs_lite._memory.registrations import relieve

    with pair(context):
        pass
    assert relieve() >= 2
    assert waiting(context) == 0


def test_a_forked_child_leaves_them_alone(context: pvl.Context) -> None:
    with pair(context):
        pass
    child = os.fork()
    if child == 0:
        status = 1
        try:
            context.close()
            with pvl.open_device(context.name) as own, pair(own) as (left, right):
                left.send(b"child")
                status = 0 if right.recv(timeout=10) == b"child" else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pair(context) as (left, right):
        left.send(b"parent")
        assert right.recv(timeout=10) == b"parent"


def test_nobody_is_told_that_they_were_never_closed() -> None:
    program = """
        import gc, sys, warnings
        import pyverbs_lite as pvl
        sys.path.insert(0, "tests")
        from support import connected

        def use():
            context = pvl.open_device()
            with connected(server={"device": context}, client={"device": context}):
                pass
            assert len(context._spares) == 2
            return context

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use()
            gc.collect()
        print([str(warning.message).split(" was")[0] for warning in caught])
        kept = use()
    """
    command = [sys.executable, "-W", "always", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("['Context of ")
    assert done.stdout.count("of") == 1
    assert "PD of" not in done.stderr
    assert "QP 0x" not in done.stderr
    assert done.stderr.count("was never closed") == 1


def test_what_waits_is_not_destroyed_because_something_else_could_not_be(
    context: pvl.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck:
        nbytes, key = 0, None

        def close(self) -> None:
            raise pvl.VerbsOSError(5, "ibv_destroy_qp", "out of order")

    hush = _spares.Parts.hush

    def meanwhile(parts: Any, quiet: bool) -> None:
        hush(parts, quiet)
        if quiet and context._most_spares != 1:
            context._most_spares = 1
            context._spares.append(Stuck())  # type: ignore[arg-type]

    with pair(context) as (left, right):
        with monkeypatch.context() as patch:
            patch.setattr(_spares.Parts, "hush", meanwhile)
            left.close()
        context._most_spares = 4
    assert waiting(context) == 2
    with pair(context) as (left, right):
        assert waiting(context) == 0
        left.send(b"still good")
        assert right.recv(timeout=10) == b"still good"
