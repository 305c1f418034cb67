"""docs/interop.md: made by the run of these tests, from its rows, its holes, and what came of them."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version

from .processes import ROOT
from .rows import HOLES, ROWS, Hole, Row

PAGE = ROOT / "docs" / "interop.md"
RUN = "PVL_WRITE_DOCS=1 rxe/run --guest python -m pytest -q tests/interop"
_HEAD = f"""\
# Who we speak with

<!-- made by: {RUN} -->

Each row was run as two processes on soft devices: a program of others, as its package installs it, and one of ours,
which plays the part in the column "we are". The tool's own verdict counts, and its exit status. The tests are in
`tests/interop/`.

"""
_MCKEY = """
## mckey -s

Its receiver may wait for ever, whoever is at the other end. The sender posts its datagrams without asking for
completions, and destroys their address handle right after. rxe sends in a worker of the kernel; what the worker has not
come to by then has no address any more, and is dropped without a word. How much that is depends on the scheduler: on
one CPU all, some and none of it were seen. If the tool is stopped between the two, everything arrives, and so it is run
here: the pipe that it writes to is full, it waits in the line that it prints after posting, and nobody reads until the
receiver has all. A program of ours asks for the completions, and the library refuses to destroy an address handle that
a request still needs.
"""


def line(row: Row) -> str:
    """Return a row's line, but for what came of it."""
    program = f"`{row.program}`" if row.program else "–"
    options, _, what = row.options.partition(", ")
    asked = ", ".join(
        [f"`{options}`"] * bool(options and options[0] == "-") + [what or ("" if options[:1] == "-" else options)]
    )
    return f"| `{row.peer}` | {asked.strip(', ') or '–'} | {row.device} | {row.ours} | {program} | {row.verdict} |"


def hole_line(hole: Hole) -> str:
    return f"| `{hole.peer}` | {hole.where} | {hole.reason} |"


def versions() -> str:
    """Say what this machine has of those that are talked with."""
    packages = ("ibverbs-utils", "rdmacm-utils", "python3-pyverbs")
    asked = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *packages]
    shown = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\n")
    return ", ".join([*filter(None, shown), f"ibverbs {version('ibverbs')}", f"Linux {platform.release()}"])


def page(outcomes: Mapping[str, bool]) -> str:
    """Return the page."""
    missing = [str(case) for case in [*ROWS, *HOLES] if str(case) not in outcomes]
    if missing:
        raise ValueError(f"the page is made of a whole run; these were not run: {', '.join(missing)}")
    said = {True: "yes", False: "**no**"}
    lines = [
        "| peer | options | device | we are | our program | verdict | holds |",
        "|---|---|---|---|---|---|---|",
        *(f"{line(row)} {said[outcomes[str(row)]]} |" for row in ROWS),
        "",
        "## Holes",
        "",
        "What has no row above, and why; a test shows each.",
        "",
        "| peer | what | reason |",
        "|---|---|---|",
        *map(hole_line, HOLES),
    ]
    return _HEAD + "\n".join(lines) + "\n" + _MCKEY + f"\nMade with {versions()}.\n"


def write(outcomes: Mapping[str, bool]) -> None:
    PAGE.write_text(page(outcomes))
