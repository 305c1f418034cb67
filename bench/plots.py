"""Pictures of the results, for the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from .goals import Figures

_WHO = {"c": ("C loop", "s--"), "pvl": ("pyverbs_lite", "o-"), "perftest": ("perftest", "^:")}


def draw(figures: Figures, folder: Path) -> list[str]:
    """Write those that there are figures for; return the names of the files, relative to the page's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams.update({"svg.hashsalt": "pyverbs_lite", "axes.grid": True, "grid.alpha": 0.3})
    drawn = []
    for name, picture in (
        ("latency", _latency),
        ("bandwidth", _bandwidth),
        ("batches", _batches),
        ("queue-pairs", _queue_pairs),
    ):
        figure = picture(figures)
        if figure is not None:
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
            pyplot.close(figure)
            drawn.append(f"{folder.name}/{name}.svg")
    return drawn


def _points(figures: Figures, pattern: str) -> list[tuple[int, float]]:
    found = ((re.fullmatch(pattern, name), figure) for name, figure in figures.items())
    return sorted((int(match[1]), figure["median"]) for match, figure in found if match)


def _bandwidth(figures: Figures) -> Any:
    return _by_size(figures, "window", "64 in flight", "MB/s", lambda size, ns: size / ns * 1000)


def _latency(figures: Figures) -> Any:
    return _by_size(figures, "one", "one at a time", "µs", lambda _, ns: ns / 1000)


def _by_size(figures: Figures, case: str, said: str, unit: str, value: Callable[[int, float], float]) -> Any:
    """Draw writes and reads against their size, beside C and perftest."""
    if not _points(figures, rf"write (\d+) {case}: pvl"):
        return None
    picture, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharex=True, sharey=True)
    for ax, word in zip(axes, ("write", "read"), strict=True):
        for who, (label, style) in _WHO.items():
            if not (points := _points(figures, rf"{word} (\d+) {case}: {who}")):
                continue
            tool = f"ib_{word}_{'bw' if case == 'window' else 'lat'}" if who == "perftest" else label
            ax.plot([size for size, _ in points], [value(*point) for point in points], style, label=tool)
        ax.set(title=f"{word}s on rxe, {said}", xlabel="bytes", ylabel=unit, yscale="log")
        ax.set_xscale("log", base=2)
        ax.legend()
    return picture


def _batches(figures: Figures) -> Any:
    points = _points(figures, r"pvl: write_many (\d+)")
    if not points:
        return None
    picture, ax = pyplot.subplots(figsize=(7, 4.5))
    if prepared := _points(figures, r"pvl: prepared write_many (\d+)"):
        ax.plot(*zip(*prepared, strict=True), "o-", label="pyverbs_lite, prepared write_many")
    ax.plot(*zip(*points, strict=True), "D-", label="pyverbs_lite, write_many")
    for who, label, marker in (
        ("pvl: c", "C, lists", "s--"),
        ("ibverbs:", "PyPI ibverbs, lists", "^:"),
        ("pyverbs:", "pyverbs, lists", "v:"),
    ):
        if lists := _points(figures, rf"{who} list (\d+)"):
            ax.plot(*zip(*lists, strict=True), marker, label=label)
    ax.set(xscale="log", yscale="log", xlabel="operations in a batch", ylabel="ns per operation, layer only")
    ax.legend()
    return picture


def _queue_pairs(figures: Figures) -> Any:
    points = _points(figures, r"pvl: qps (\d+)")
    if not points:
        return None
    picture, ax = pyplot.subplots(figsize=(7, 3.5))
    ax.plot(*zip(*points, strict=True), "o-")
    ax.set(xlabel="queue pairs, in turns", ylabel="ns per write, layer only", ylim=(0, None))
    ax.set_xscale("log", base=2)
    return picture
