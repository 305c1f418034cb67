"""Checks of plain arguments, and the deadline that every wait has."""

from __future__ import annotations

import math
import time

__all__ = ["Deadline", "check_int"]


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Return an argument that must be an integer in a closed range.

    Raises:
        TypeError: it is not an integer (a bool is none here).
        ValueError: it is outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be {low} to {high}, not {value}")
    return int(value)


class Deadline:
    """A point in time up to which several waits may take together; ``None`` seconds: no limit."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None:
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
                raise TypeError(f"timeout must be a number of seconds or None, not {seconds!r}")
            if math.isnan(seconds) or seconds < 0:
                raise ValueError(f"timeout must not be negative, and is {seconds}")
        self.seconds = seconds
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, never negative; ``inf`` without a limit, and then the clock is not read."""
        return math.inf if self.seconds is None else max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether nothing is left."""
        return self.seconds is not None and time.monotonic() >= self._end

    def at_most(self, seconds: float) -> float:
        """Return the time left, or ``seconds`` if that is less: one slice of a longer wait."""
        return min(self.left, seconds)

    def sooner(self, seconds: float | None) -> Deadline:
        """Return the earlier of this deadline and one ``seconds`` from now."""
        other = Deadline(seconds)
        return other if other._end < self._end else self
