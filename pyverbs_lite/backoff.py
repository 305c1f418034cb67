"""How long to wait before the next attempt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How often, and for how long, ``connect`` tries to reach a peer that is not there; all in seconds.

    The first pause is ``first``, and each is twice the one before it, up to ``most``; jitter keeps those who lost the
    same peer from coming back in step.

    Attributes:
        first: the first pause.
        most: the longest.
        total: when to give up, counted from the first attempt; None never does.
        jitter: each pause is longer or shorter by up to this part of it, 0 to 1.

    Raises:
        TypeError, ValueError: a value is no number, or outside its range.
    """

    first: float = 0.1
    most: float = 5.0
    total: float | None = 60.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        ranges = {"first": (1e-3, 3600.0), "most": (self.first, 86400.0), "total": (0.0, 1e9), "jitter": (0.0, 1.0)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if name == "total" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} of a Backoff must be a number of seconds, not {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{name} of a Backoff must be {low:g} to {high:g}, not {value}")

    def pauses(self) -> Iterator[float]:
        """Yield the pauses, without end."""
        import random  # here, for it takes long to import, and few connections need it

        pause = self.first
        while True:
            yield pause * random.uniform(1 - self.jitter, 1 + self.jitter)
            pause = min(2 * pause, self.most)
