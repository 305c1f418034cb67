"""Make docs/coverage.md from coverage.toml: which case of rdma-core is checked by which test here, or why by none.

Run as a program it writes the page. With ``--against DIR`` it compares the list with the cases in rdma-core's own
``tests/`` folder instead, and says what is new there and what is gone.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
DATA = HERE / "coverage.toml"
PAGE = TESTS.parent / "docs" / "coverage.md"


class Case(NamedTuple):
    """A case of rdma-core: the tests here that check the same, or the reason why there is none."""

    file: str
    name: str
    tests: tuple[str, ...]
    reason: str | None


def load(path: Path = DATA) -> dict[str, Any]:
    """Read the list."""
    return tomllib.loads(path.read_text())


def cases(data: dict[str, Any]) -> list[Case]:
    """List every case once, as the file has them."""
    found = []
    for file, entries in data["files"].items():
        for name, what in entries.items():
            is_reason = isinstance(what, str)
            found.append(Case(file, name, () if is_reason else tuple(what), what if is_reason else None))
    for file, entry in data["provider"].items():
        found += [Case(file, name, (), entry["reason"]) for name in entry["cases"]]
    return found


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    """Yield the test functions of a module, wherever in it they are."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield node


def our_tests() -> set[str]:
    """Name every test that is here, as the list does."""
    return {
        f"{path.relative_to(TESTS)}::{function.name}"
        for path in TESTS.rglob("test_*.py")
        for function in functions(path)
    }


def their_cases(folder: Path) -> set[tuple[str, str]]:
    """Name every case in a ``tests/`` folder of rdma-core."""
    return {
        (path.name, f"{node.name}.{item.name}")
        for path in folder.glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name.startswith("test")
    }


def page(data: dict[str, Any]) -> str:
    """Write the page."""
    every = cases(data)
    covered = [case for case in every if case.tests]
    reasons = data["reasons"]
    counts = {key: sum(case.reason == key for case in every) for key in reasons}

    def show(test: str) -> str:
        since = data["since"].get(test)
        return f"`{test}`" + (f" (rdma-core {since})" if since else "")

    lines = [
        "# rdma-core's cases",
        "",
        "<!-- made by tests/cases/coverage_page.py from tests/cases/coverage.toml -->",
        "",
        f"rdma-core's own `tests/` has {len(every)} cases at commit {data['commit'][:12]}. Each is listed once: with"
        " the tests of this project that check the same behaviour on soft devices, or with what keeps rxe and siw from"
        " running it. That something is missing is tested as well: it has to be refused, and with `UnsupportedError`"
        " where the library has a face for it.",
        "",
        "Paths are below `tests/`. A version in brackets is the rdma-core that a test needs to run whole; with an older"
        " one it checks that the library names that version, or that `lib` has no such function.",
        "",
        "`python tests/cases/coverage_page.py --against DIR` compares the list with another `tests/` of rdma-core.",
        "",
        "| | cases |",
        "|---|---:|",
        f"| checked here | {len(covered)} |",
        *(f"| not here: [{key.replace('_', ' ')}](#{key.replace('_', '-')}) | {n} |" for key, n in counts.items()),
        f"| **together** | **{len(every)}** |",
        "",
        "## Checked here",
        "",
        "| case | by |",
        "|---|---|",
        *(f"| `{case.file}` `{case.name}` | {'<br>'.join(show(test) for test in case.tests)} |" for case in covered),
        "",
        "## Not here",
    ]
    for key, reason in reasons.items():
        lines += [
            "",
            f"### {key.replace('_', ' ')}",
            "",
            f"{reason['text']} {counts[key]} case{'s' if counts[key] > 1 else ''}.",
        ]
        if reason["proof"]:
            lines += ["", "Shown by " + ", ".join(show(test) for test in reason["proof"]) + "."]
        lines.append("")
        by_file: dict[str, list[str]] = {}
        for case in every:
            if case.reason == key:
                by_file.setdefault(case.file, []).append(case.name)
        for file, names in by_file.items():
            needs = data["provider"].get(file, {}).get("needs")
            what = f" ({needs})" if needs else ""
            lines.append(f"* `{file}`{what}, {len(names)}: {', '.join(f'`{name}`' for name in names)}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or compare the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, metavar="DIR", help="rdma-core's tests/ folder")
    against = parser.parse_args().against
    data = load()
    if against is None:
        PAGE.write_text(page(data))
        return 0
    ours, theirs = {case[:2] for case in cases(data)}, their_cases(against)
    for sign, which in (("+", theirs - ours), ("-", ours - theirs)):
        for file, name in sorted(which):
            print(sign, file, name)
    return ours != theirs


if __name__ == "__main__":
    sys.exit(main())
