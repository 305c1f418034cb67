"""Plain arguments and deadlines: no device needed."""

from __future__ import annotations

import math
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

import pyverbs_lite as pvl
from pyverbs_lite._base import args as _args
from pyverbs_lite._base.args import Deadline, LateDeadline, check_int


@pytest.mark.parametrize("value", [3, 7, np.int64(5), np.uint8(4)])
def test_integers_come_back_as_plain_ints(value):
    result = check_int("depth", value, 3, 7)
    assert (type(result), result) == (int, value)


@pytest.mark.parametrize("value", [2, 8, -1, 1 << 64, np.int64(-9)])
def test_a_number_outside_the_range_is_named_with_it(value):
    with pytest.raises(ValueError, match=rf"^depth must be 3 to 7, not {value}$"):
        check_int("depth", value, 3, 7)


@pytest.mark.parametrize("value", [True, False, 4.0, math.nan, None, "4", b"4", pvl.MTU.MTU_1024, np.float64(4)])
def test_what_is_no_integer_is_not_taken_for_one(value):
    with pytest.raises(TypeError, match="depth must be an integer, not"):
        check_int("depth", value, 0, 7)


@pytest.mark.parametrize("seconds", [0, 0.25, 5, math.inf, np.float32(0.5), np.int64(3), Fraction(1, 2)])
def test_a_deadline_takes_any_real_number(seconds):
    deadline = Deadline(seconds)
    assert deadline.seconds == seconds
    assert deadline.left <= seconds
    assert deadline.expired == (seconds == 0)


def test_a_deadline_of_low_precision_is_still_exact():
    # The sum of the clock and a float32 would be a float32, which counts in steps of many seconds on a machine that
    # has been up for long.
    assert 0.2 < Deadline(np.float32(0.25)).left <= 0.25


@pytest.mark.parametrize("seconds", [-1, -0.001, math.nan, -math.inf])
def test_a_deadline_is_not_in_the_past(seconds):
    with pytest.raises(ValueError, match="timeout must not be negative"):
        Deadline(seconds)


@pytest.mark.parametrize("seconds", [True, "1", b"", [1], 1j])
def test_a_deadline_is_a_number(seconds):
    with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
        Deadline(seconds)


def test_no_deadline_never_expires():
    deadline = Deadline(None)
    assert (deadline.seconds, deadline.left, deadline.expired) == (None, math.inf, False)
    assert deadline.at_most(0.1) == 0.1
    assert deadline.sooner(None) is deadline
    assert deadline.sooner(2).left <= 2


def test_the_sooner_of_two_deadlines():
    deadline = Deadline(60)
    assert deadline.sooner(90) is deadline
    assert deadline.sooner(30).seconds == 30
    assert deadline.at_most(0.25) == 0.25
    assert 59 < deadline.at_most(1000) <= 60


@pytest.mark.parametrize("seconds", [None, 60, 0])
def test_another_thread_may_end_a_deadline(seconds: float | None):
    deadline = Deadline(seconds)
    deadline.end()
    assert deadline.expired
    assert (deadline.left, deadline.at_most(5)) == (0.0, 0.0)
    assert deadline.sooner(3) is deadline


def test_a_deadline_comes_with_its_first_slice():
    for seconds, slice_ns in (
        (60, 100_000_000),
        (0.1, 100_000_000),
        (0.05, 50_000_000),
        (0, 0),
        (math.inf, 100_000_000),
    ):
        deadline, first = Deadline.with_slice(seconds, 0.1)
        assert (deadline.seconds, first) == (seconds, slice_ns)
    with pytest.raises(ValueError, match="must not be negative, and is nan"):
        Deadline.with_slice(math.nan, 0.1)


def test_time_left_is_never_negative():
    deadline = Deadline(0.001)
    while not deadline.expired:
        time.sleep(0.0005)
    assert deadline.left == 0.0
    assert deadline.at_most(5) == 0.0


def test_a_late_deadline_begins_at_the_first_look(monkeypatch):
    now = [100.0]
    clock = SimpleNamespace(monotonic=now.pop)  # one look is one number, and no more
    monkeypatch.setattr(_args, "time", clock)
    deadline = LateDeadline(5)
    now[:] = [200.0]  # it begins
    assert deadline.left == 5
    now[:] = [203.0]
    assert deadline.left == 2
    now[:] = [204.0]
    assert deadline.at_most(3) == 1
    now[:] = [205.0]
    assert deadline.expired
    now[:] = [210.0]
    assert deadline.sooner(60) is deadline
    later = LateDeadline(5)
    now[:] = [300.0, 300.1]
    assert not later.expired
    now[:] = [305.1]
    assert later.expired
    now[:] = [70.0] * 4  # for those that are compared with
    for ended in (later, LateDeadline(5), LateDeadline(None)):
        ended.end()
        assert (ended.expired, ended.left, ended.sooner(1)) == (True, 0.0, ended)
    assert now == [70.0]


def test_a_late_deadline_is_checked_at_once():
    assert LateDeadline(None).left == math.inf
    assert LateDeadline(0).expired
    with pytest.raises(ValueError, match="must not be negative"):
        LateDeadline(-1)
    with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
        LateDeadline("1")
