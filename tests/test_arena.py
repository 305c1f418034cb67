"""Memory that connections use again."""

import gc
import mmap
import os

import pytest

from pyverbs_lite._memory import arena as _arena
from pyverbs_lite._memory.arena import arena

SIZE = 3 * mmap.PAGESIZE


@pytest.fixture(autouse=True)
def nothing_unused(monkeypatch):
    monkeypatch.setattr(_arena, "_unused", {})


def unused():
    return {size: len(found) for size, found in _arena._unused.items() if found}


def test_it_is_bytes_of_that_length_zeroed_the_first_time():
    memory = arena(SIZE)
    assert (memory.nbytes, memory.format, memory.readonly, memory.contiguous) == (SIZE, "B", False, True)
    assert memory == bytes(SIZE)


def test_what_nobody_sees_any_more_is_used_again():
    memory = arena(SIZE)
    memory[:4] = b"mine"
    part = memory[1:3]
    memory.release()
    assert unused() == {}
    del part
    gc.collect()
    assert unused() == {SIZE: 1}
    again, other = arena(SIZE), arena(SIZE)
    assert bytes(again[:4]) == b"mine"
    assert bytes(other[:4]) == bytes(4)
    assert unused() == {}


def test_another_length_is_other_memory():
    arena(SIZE).release()
    assert arena(SIZE + 1).nbytes == SIZE + 1
    assert unused() == {SIZE: 1, SIZE + 1: 1}


def test_no_more_lies_unused_than_the_budget(monkeypatch):
    monkeypatch.setattr(_arena, "BUDGET", 2 * SIZE)
    held = [arena(SIZE) for _ in range(5)]
    del held
    gc.collect()
    assert unused() == {SIZE: 2}


def test_a_forked_child_uses_none_of_its_parents():
    shown = arena(SIZE)
    arena(SIZE).release()
    pid = os.fork()
    if pid == 0:
        try:
            clean = unused() == {}
            shown.release()
            del shown  # the parent's: it must not come to the child's
            gc.collect()
            os._exit(0 if clean and unused() == {} else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert unused() == {SIZE: 1}


def test_what_was_handed_out_before_a_fork_comes_back_to_nobody():
    memory = arena(SIZE)
    _arena._forget()  # as in a child
    del memory
    gc.collect()
    assert unused() == {}


def test_more_than_there_is_is_refused():
    with pytest.raises((OSError, OverflowError)):
        arena(1 << 62)
