"""The rows of the table: what each is made from, and its goal.

A row names its own figure and the one that it is compared with. The comparison is a ratio of the two, or a difference
in the figure's unit: the median over the rounds, and that of the two minima.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Mapping[str, Any]]

#: How a row is compared with its floor: own, floor -> value.
_COMPARE: dict[str, Callable[[float, float], float]] = {
    "ratio": lambda own, floor: own / floor,
    "speed": lambda own, floor: floor / own,  # of what is better when it is faster
    "above": lambda own, floor: own - floor,
    "apart": lambda own, floor: (own / floor - 1) * 100,
    "alone": lambda own, _: own,
}
_SHOWN = {
    "ratio": "{:.2f} ×",
    "speed": "{:.2f} ×",
    "above": "{:.0f} {unit} above",
    "apart": "{:.1f} %",
    "alone": "{:.1f} {unit}",
}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: in words.
        own, floor: names of figures; the floor is what the goal is relative to.
        how: a key of ``_COMPARE``.
        goal: at most this, or for ``speed`` at least.
        unit, scale: of what is shown: figures are divided by ``scale``.
        beside: figures of peers for the same, by the peer's name.
    """

    what: str
    own: str
    floor: str
    how: str
    goal: float
    unit: str = "ns"
    scale: float = 1
    beside: tuple[tuple[str, str], ...] = ()

    def value(self, figures: Figures, which: str) -> float | None:
        """Compare round by round, or the minima; None where one of the two was not measured."""
        if self.own not in figures or self.floor not in figures:
            return None
        pair = figures[self.own], figures[self.floor]
        compare = _COMPARE[self.how]
        if which == "minimum":
            return self._size(compare(*(figure["minimum"] / self.scale for figure in pair)))
        # Round by round, as they were taken in turns: what disturbed a whole round disturbed both.
        rounds = zip(*(figure["values"] for figure in pair), strict=False)
        return self._size(statistics.median(compare(own / self.scale, floor / self.scale) for own, floor in rounds))

    def _size(self, value: float) -> float:
        # Only now: noise to both sides goes out of a median, and not out of that of its amounts.
        return abs(value) if self.how == "apart" else value

    def met(self, figures: Figures) -> bool | None:
        """Say whether the medians meet the goal."""
        value = self.value(figures, "median")
        if value is None:
            return None
        return value >= self.goal if self.how == "speed" else value <= self.goal

    def show(self, value: float | None) -> str:
        """Write a value of this row."""
        return "–" if value is None else _SHOWN[self.how].format(value, unit=self.unit)

    @property
    def goal_text(self) -> str:
        """The goal in words."""
        return f"{'≥' if self.how == 'speed' else '≤'} {self.show(self.goal)}"


def _bandwidth(word: str, size: int, label: str) -> tuple[Row, ...]:
    name = f"{word} {size} window"
    return tuple(
        Row(
            f"{label} {word}s on rxe, window 64, against {said}",
            f"{name}: pvl",
            f"{name}: {against}",
            "speed",
            1.0,
            unit="µs",
            scale=1000,
            beside=tuple((peer, f"{name}: {peer}") for peer in ("ibverbs", "pyverbs") if word == "write"),
        )
        for against, said in (("c", "the C loop"), ("perftest", f"`ib_{word}_bw`"))
    )


def _one_write(said: str, how: str) -> tuple[Row, ...]:
    """Return the rows of a write that is prepared once, and of one through ``Connection.write``, which builds it."""
    return tuple(
        Row(
            f"one 64 B write + wait on rxe, {said}, {word}",
            f"write 64 {how}: {own}",
            f"write 64 {how}: c",
            "ratio",
            1.03,
            unit="µs",
            scale=1000,
            beside=tuple((peer, f"write 64 {how}: {peer}{more}") for peer in ("ibverbs", "pyverbs") if how == "yield"),
        )
        for word, own, more in (("prepared", "pvl", ""), ("through `Connection.write`", "pvl write", " built"))
    )


def _peers(case: str) -> tuple[tuple[str, str], ...]:
    return (("ibverbs", f"ibverbs: {case}"), ("pyverbs", f"pyverbs: {case}"))


_BATCHES = ((64, "64"), (1024, "1024"), (1000000, "a million"))


def _batch(count: int, what: str, case: str) -> Row:
    name = f"pvl: {case} {count}"
    return Row(what, name, name, "alone", 12, beside=_peers(f"list {count}"))


ROWS = (
    Row(
        "one post + wait + status in one C call, prepared 64 B write, layer only",
        "pvl: fused",
        "pvl: c write",
        "above",
        150,
        beside=_peers("prepared"),
    ),
    Row(
        "the same through `Connection.write` of a registered slice",
        "pvl: write",
        "pvl: write",
        "alone",
        600,
        beside=_peers("built"),
    ),
    *(
        _batch(count, f"packed batch of {said}, prepared, per operation", "prepared write_many")
        for count, said in _BATCHES
    ),
    *(
        _batch(count, f"packed batch of {said} through `write_many`, per operation", "write_many")
        for count, said in _BATCHES
    ),
    Row(
        "two-sided: recv + repost + prepared send, layer only",
        "pvl: two-sided",
        "pvl: two-sided",
        "alone",
        800,
        beside=_peers("two-sided"),
    ),
    Row(
        "the same through `Connection.send` of a registered slice",
        "pvl: two-sided send",
        "pvl: two-sided send",
        "alone",
        800,
    ),
    *_one_write("spinning", "yield"),
    *_one_write("events", "events"),
    *_bandwidth("write", 1 << 16, "64 KiB"),
    *_bandwidth("read", 1 << 16, "64 KiB"),
    *_bandwidth("write", 1 << 20, "1 MiB"),
    *_bandwidth("read", 1 << 20, "1 MiB"),
    *(
        Row(
            f"64 B ping-pong on rxe, {what}",
            f"ping-pong 64 events: {own}",
            "ping-pong 64 events: c",
            "ratio",
            1.05,
            unit="µs",
            scale=1000,
        )
        for what, own in (
            ("prepared, waiting on events", "pvl"),
            ("through `Connection.send`, waiting on events", "pvl send"),
        )
    ),
    Row(
        "asyncio round trip of 64 B on rxe, against the blocking one",
        "round trip 64: asyncio",
        "round trip 64: blocking",
        "ratio",
        1.5,
        unit="µs",
        scale=1000,
    ),
    Row(
        "connect + first byte + close, against `cmtime`'s life of a connection",
        "life: pvl",
        "life: cmtime",
        "ratio",
        1.2,
        unit="ms",
        scale=1e6,
    ),
    Row(
        "Python memory of one open connection, 500 peers",
        "process: memory",
        "process: memory",
        "alone",
        16,
        unit="KiB",
        scale=1024,
    ),
    Row("cost per operation with 8 QPs, against 1", "pvl: qps 8", "pvl: qps 1", "apart", 10),
    Row("cost per operation with 64 QPs, against 1", "pvl: qps 64", "pvl: qps 1", "apart", 10),
    Row(
        "another thread's step during a blocking wait, against an idle process",
        "process: thread beside recv",
        "process: thread beside sleep",
        "apart",
        2,
        unit="µs",
        scale=1000,
    ),
    Row(
        "`import pyverbs_lite`, above bare Python",
        "import: pyverbs_lite",
        "import: nothing",
        "above",
        40,
        unit="ms",
        scale=1e6,
    ),
)
