"""Checks of plain arguments, and the deadline that every wait has."""

from __future__ import annotations

import functools
import math
import operator
import time
from enum import Enum, IntFlag
from numbers import Real
from typing import SupportsIndex, TypeVar

__all__ = ["Deadline", "LateDeadline", "check_flags", "check_int", "check_seconds"]


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Return an argument that must be an integer in a closed range, as a plain ``int``.

    Raises:
        TypeError: it is not an integer; a bool, a float and a member of some enum are none here.
        ValueError: it is outside the range.
    """
    if type(value) is int:  # nearly always, and asking whether it is a SupportsIndex takes fifty times as long
        number = value
    elif isinstance(value, (bool, Enum)) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    else:
        number = operator.index(value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be {low} to {high}, not {number}")
    return number


_F = TypeVar("_F", bound=IntFlag)


def check_flags(name: str, value: object, kind: type[_F]) -> _F:
    """Return an argument that must be flags of one kind, or a plain number with no bits but theirs.

    Raises:
        TypeError: it is a member of some other enum, or no integer.
        ValueError: it has bits that have no name.
    """
    if not isinstance(value, kind):
        value = check_int(f"{name} ({kind.__name__})", value, 0, (1 << 64) - 1)
    every = functools.reduce(operator.or_, map(int, kind.__members__.values()), 0)
    if int(value) & ~every:
        raise ValueError(f"{name} {int(value):#x} has bits beyond {kind.__name__}, which are {every:#x}")
    return kind(value)


def check_seconds(seconds: object) -> float:
    """Return how long something may take as a ``float``, which counts in no other precision.

    Raises:
        TypeError, ValueError: not a number, or a negative one.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float, Real)):
        raise TypeError(f"timeout must be a number of seconds or None, not {seconds!r}")
    seconds = float(seconds)
    if not seconds >= 0:  # nor is it NaN
        raise ValueError(f"timeout must not be negative, and is {seconds}")
    return seconds


class Deadline:
    """A point in time up to which several waits may take together; ``None`` seconds: no limit.

    Without a limit, and where it is now, the clock is not read: on some machines that takes as long as a transfer.
    """

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float | None) -> None:
        # What nearly everybody passes is told by its type: to ask whether it is a kind of number takes longer.
        if seconds is not None and not (type(seconds) is float and seconds >= 0):
            seconds = check_seconds(seconds)
        self.seconds = seconds
        self._end = math.inf if seconds is None else time.monotonic() + seconds if seconds else -math.inf

    def end(self) -> None:
        """Let it be now: whoever waits with it, in another thread, finds that no time is left."""
        self.seconds, self._end = 0.0, -math.inf

    @property
    def left(self) -> float:
        """Seconds left, never negative; ``inf`` without a limit."""
        if not self.seconds:
            return math.inf if self.seconds is None else 0.0
        return max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether nothing is left."""
        return self.seconds is not None and (not self.seconds or time.monotonic() >= self._end)

    @classmethod
    def with_slice(cls, seconds: float, most: float) -> tuple[Deadline, int]:
        """Return a deadline, and the nanoseconds of its first slice: all of it, or ``most`` seconds if that is less."""
        deadline = cls(seconds)
        return deadline, int((deadline.seconds if deadline.seconds < most else most) * 1e9)  # type: ignore[operator]

    def at_most(self, seconds: float) -> float:
        """Return the time left, or ``seconds`` if that is less: one slice of a longer wait."""
        return min(self.left, seconds)

    def sooner(self, seconds: float | None) -> Deadline:
        """Return the earlier of this deadline and one ``seconds`` from now."""
        other = Deadline(seconds)
        return other if other._end < self._end else self


class LateDeadline(Deadline):
    """A deadline that begins at the first look at it: for what hardly ever waits, and then need not read the clock."""

    __slots__ = ("_begun",)

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not (type(seconds) is float and seconds >= 0):
            seconds = check_seconds(seconds)
        self.seconds = seconds
        self._begun: Deadline | None = None

    def end(self) -> None:
        """Let it be now, as ``Deadline.end`` does."""
        self.seconds, self._begun = 0.0, Deadline(0)

    @property
    def left(self) -> float:
        """Seconds left, never negative; ``inf`` without a limit."""
        if self._begun is None and self.seconds:
            self._begun = Deadline(self.seconds)
            return self.seconds
        return super().left

    @property
    def _end(self) -> float:  # type: ignore[override]
        if self._begun is None:
            self._begun = Deadline(self.seconds)
        return self._begun._end
