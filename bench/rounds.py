"""Timing in turns: every case once per round, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

#: Does so many operations; returns the nanoseconds of all.
Timed = Callable[[int], float]


@dataclass(frozen=True)
class Figure:
    """Nanoseconds per operation (or another unit, where the row says so), over all rounds."""

    minimum: float
    median: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, samples: list[float]) -> Figure:
        """Summarise samples."""
        return cls(min(samples), statistics.median(samples), tuple(samples))

    def record(self) -> dict[str, Any]:
        """Return it as it is written to the results."""
        return {
            "minimum": self.minimum,
            "median": self.median,
            "values": [float(f"{value:.6g}") for value in self.values],
        }


@dataclass(frozen=True)
class Whole:
    """A case that knows itself how much to do for one figure, which is the nanoseconds of one operation."""

    figure: Callable[[], float]

    def __call__(self, count: int) -> float:
        """Return so many times the figure."""
        return self.figure() * count


class Unmeasured(Exception):
    """A case could not be timed this once; others can."""


def calibrated(case: Timed, seconds: float) -> int:
    """Find how many operations take about so long; without a time, one.

    The fastest of three counts: one that was interrupted would leave every round with too few.
    """
    if seconds <= 0 or isinstance(case, Whole):
        return 1
    count = 16
    while (took := min(case(count) for _ in range(3)) / 1e9) < seconds / 4:
        count = min(count * 10, int(count * seconds / max(took, 1e-9)) + 1)
    return max(1, int(count * seconds / took))


def measure(
    cases: Mapping[str, Timed], rounds: int, seconds: float, told: Callable[[str], None] = lambda _: None
) -> dict[str, Figure]:
    """Time every case once per round, each for about ``seconds``.

    Args:
        told: called with the name of what has just been timed.
    """
    counts: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            with suppress(Unmeasured):
                if name not in counts:
                    counts[name] = calibrated(case, seconds)
                samples[name].append(case(counts[name]) / counts[name])
            told(name)
    return {name: Figure.of(values) for name, values in samples.items() if values}
