"""The results as a page and as a table."""

from __future__ import annotations

from typing import Any

from .goals import ROWS, Figures, Row

_HEAD = """# Performance

How fast this library is beside C and beside its peers. This page is written by `make bench` from `bench/results.json`;
nothing on it was typed.

A row compares two figures that were taken in turns, in one run, on one machine. *By medians* is the median of the
comparison over the rounds, *by minima* compares the best rounds of the two; the goal is held against the former.
*Layer only* means a stand-in for libibverbs that completes every request at once (`bench/null_provider/`), so that
nothing but the software above the device is timed. *On rxe* is the soft-RoCE device of `rxe/run`, a guest with one CPU,
in which a system call, and reading the clock is one, costs about a hundred times what it does elsewhere. The C loops
are in `bench/floor/floor.c`; they run over the very QP, CQ and channel that the library's own operations use.
"""


def cells(row: Row, figures: Figures) -> list[str]:
    """Return one row's cells: what, goal, by medians, by minima, its own median, the floor's, the peers', verdict."""
    own, floor = (figures.get(name) for name in (row.own, row.floor))
    peers = [f"{peer} {figures[name]['median'] / row.scale:.4g}" for peer, name in row.beside if name in figures]
    met = row.met(figures)
    return [
        row.what,
        row.goal_text,
        row.show(row.value(figures, "median")),
        row.show(row.value(figures, "minimum")),
        _amount(row, own),
        "" if row.own == row.floor else _amount(row, floor),
        ", ".join(peers),
        "not measured" if met is None else "met" if met else "missed",
    ]


def _amount(row: Row, figure: Any) -> str:
    return "–" if figure is None else f"{figure['median'] / row.scale:.4g} {row.unit}"


COLUMNS = ("what", "goal", "by medians", "by minima", "ours", "against", "peers", "")


def _table(rows: list[list[str]], head: tuple[str, ...]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(results: dict[str, Any], pictures: list[str]) -> str:
    """Write the page."""
    figures = results["figures"]
    machine = [[name, value] for name, value in results["machine"].items()]
    raw = [
        [name, f"{figure['median']:.5g}", f"{figure['minimum']:.5g}", str(len(figure["values"]))]
        for name, figure in sorted(figures.items())
    ]
    parts = [
        _HEAD,
        _table([cells(row, figures) for row in ROWS], COLUMNS),
        *(f"![{name}]({name})" for name in pictures),
        f"## The machine\n\nMeasured on {results['when']}, in {results['seconds']:.0f} s.",
        _table(machine, ("", "")),
        "## Every figure\n\nNanoseconds of one operation; of `process: memory`, bytes.",
        _table(raw, ("what", "median", "minimum", "samples")),
    ]
    return "\n\n".join(parts) + "\n"
