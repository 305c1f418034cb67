"""Measure, and write ``bench/results.json``, ``docs/performance.md`` and its pictures; ``--quick``: the layer table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import layer, machine, report
from .build import BUILD, HERE, build
from .goals import ROWS, Figures
from .layer import Worker
from .process import import_time
from .rounds import measure

ROOT = HERE.parent
_RESULTS = HERE / "results.json"
_DOCS = ROOT / "docs"
#: Seconds after which the guest is given up.
_LIMIT = 540
#: What is counted and not timed, so once is enough: with so many connections.
_COUNTED = {"memory": 500, "calls of a life": 1}


def process_figures(rounds: int, told: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Measure what does not depend on a device's speed: memory, threads, import."""
    figures: dict[str, dict[str, Any]] = {}
    with Worker("bench.process", LD_PRELOAD=str(BUILD / "libnull.so")) as worker:
        names = {f"process: {name}": partial(worker.run, name) for name in worker.names if name not in _COUNTED}
        figures |= _once(names, 15 * rounds, told)
        counted = {f"process: {name}": partial(_counted, worker, name) for name in _COUNTED}
        figures |= _once(counted, 1, told)
    statements = {"import: nothing": "pass", "import: pyverbs_lite": "import pyverbs_lite"}
    return figures | _once({name: partial(_import, text) for name, text in statements.items()}, 3 * rounds, told)


def _counted(worker: Worker, name: str, _: int) -> float:
    return worker.run(name, _COUNTED[name])


def _import(text: str, count: int) -> float:
    return sum(import_time(text) for _ in range(count))


def _once(cases: dict[str, Any], rounds: int, told: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Time cases of which one operation takes long."""
    found = measure(cases, rounds, 0, told)
    return {name: figure.record() for name, figure in found.items()}


def wire_figures(rounds: int, seconds: float, told: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Measure on a device: in the guest."""
    words = [str(ROOT / "rxe/run"), "--guest", "--timeout", str(_LIMIT), sys.executable, "-m", "bench.wire", "--sizes"]
    words += ["--rounds", str(rounds), "--seconds", str(seconds)]
    figures: dict[str, dict[str, Any]] = {}
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as guest:
        assert guest.stdout is not None
        for line in guest.stdout:
            said = json.loads(line)
            if "done" in said:
                told(said["done"])
            figures |= said.get("figures", {})
    if guest.returncode:
        raise SystemExit(f"the measurements on rxe ended with status {guest.returncode}")
    return figures


def table(figures: Figures, *, measured_only: bool) -> Table:
    """Return the table for a terminal."""
    shown = Table(*report.COLUMNS, title="beside C and the peers", show_lines=False)
    for row in ROWS:
        if measured_only and row.met(figures) is None:
            continue
        shown.add_row(*report.cells(row, figures))
    return shown


def main() -> None:
    """Do it."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the layer table only; writes nothing")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of every case")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long one case takes in one round")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="where the results go (default: %(default)s)")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from the results anew")
    options = parser.parse_args()
    if options.page:
        write_page(json.loads(options.out.read_text()))
        return
    console = Console(width=None if sys.stdout.isatty() else 200)
    build()
    for peer, cure in layer.peers().items():
        console.print(f"without {peer}, which is not installed here: {cure}")
    rounds, seconds = options.rounds or 7, options.seconds or 0.1
    start = time.monotonic()
    described = machine.describe()
    columns = TextColumn("{task.description:<45}"), BarColumn(), TextColumn("{task.completed:.0f}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("layer", total=None)

        group = ""

        def told(name: str) -> None:
            nonlocal group
            progress.update(task, advance=1, description=name)
            if not console.is_terminal and name.rpartition(":")[0] != group:  # a log file gets a line for each group
                group = name.rpartition(":")[0]
                print(f"{time.monotonic() - start:5.0f} s  {group}", flush=True)

        figures: dict[str, Any] = {name: figure.record() for name, figure in layer.run(rounds, seconds, told).items()}
        if not options.quick:
            figures |= process_figures(rounds, told)
            figures |= wire_figures(rounds, 3 * seconds, told)
    console.print(table(figures, measured_only=options.quick))
    if options.quick:
        return
    results = {
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "seconds": time.monotonic() - start,
        "machine": described,
        "figures": figures,
    }
    options.out.write_text(_spread(results))
    if options.out == _RESULTS:
        write_page(results)
    console.print(f"written: {options.out}")


def _spread(results: dict[str, Any]) -> str:
    """Write the results as JSON with one figure a line."""
    figures = ",\n".join(f"  {json.dumps(name)}: {json.dumps(figure)}" for name, figure in results["figures"].items())
    rest = json.dumps({name: value for name, value in results.items() if name != "figures"}, indent=1)
    return f'{rest[:-2]},\n "figures": {{\n{figures}\n }}\n}}\n'


def write_page(results: dict[str, Any]) -> None:
    """Write the page and its pictures from results."""
    from .plots import draw

    names = draw(results["figures"], _DOCS / "performance")
    (_DOCS / "performance.md").write_text(report.page(results, names))


if __name__ == "__main__":
    main()
