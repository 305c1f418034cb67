"""Pictures of the results, for the page."""

from __future__ import annotations

import re
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
    for name, picture in (("bandwidth", _bandwidth), ("batches", _batches), ("queue-pairs", _queue_pairs)):
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
    if not _points(figures, r"write (\d+) window: pvl"):
        return None
    picture, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True)
    for column, word in enumerate(("write", "read")):
        for who, (label, style) in _WHO.items():
            points = _points(figures, rf"{word} (\d+) window: {who}")
            sizes = [size for size, _ in points]
            axes[0][column].plot(sizes, [size / ns * 1000 for size, ns in points], style, label=label)
            axes[1][column].plot(sizes, [ns / 1000 for _, ns in points], style, label=label)
        axes[0][column].set_title(f"{word}s on rxe, 64 in flight")
        axes[0][column].set_ylabel("MB/s")
        axes[1][column].set_ylabel("µs per operation")
        axes[1][column].set_xlabel("bytes")
        for ax in (axes[0][column], axes[1][column]):
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.legend()
    return picture


def _batches(figures: Figures) -> Any:
    points = _points(figures, r"pvl: write_many (\d+)")
    if not points:
        return None
    picture, ax = pyplot.subplots(figsize=(7, 4.5))
    ax.plot(*zip(*points, strict=True), "o-", label="pyverbs_lite, write_many")
    for name, label, marker in (
        ("pvl: c list 64", "C, lists of 64", "s"),
        ("ibverbs: list 64", "PyPI ibverbs, lists of 64", "^"),
        ("pyverbs: list 64", "pyverbs, lists of 64", "v"),
    ):
        if name in figures:
            ax.plot([64], [figures[name]["median"]], marker, label=label)
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
