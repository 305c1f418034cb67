"""The layer table: what each library costs above a device that takes no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .build import BUILD, HERE
from .rounds import Figure, Timed, measure

#: Where Debian's packages for its own Python are.
_DEBIAN = Path("/usr/lib/python3/dist-packages")


class Worker:
    """A process with an environment of its own that runs cases when told to; see ``worker.py``."""

    def __init__(self, module: str, python: str = sys.executable, **environment: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "bench.worker", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parent,
            env={**os.environ, **environment},
        )
        self.names: list[str] = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended, with status {self._process.wait()}; its own words are above")
        return json.loads(line)

    def run(self, name: str, count: int) -> float:
        """Run a case; return its nanoseconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, count]) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def cases(self, prefix: str) -> dict[str, Timed]:
        """Return every case of it, under a name that says whose it is."""
        return {f"{prefix}: {name}": partial(self.run, name) for name in self.names}

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: Into so many slices the time of a round is cut.
_SLICES = 10


def peers() -> dict[str, str]:
    """Return which peers are missing here, and how to get them."""
    missing = {}
    if find_spec("ibverbs") is None:
        missing["ibverbs"] = "pip install ibverbs"
    if not (_DEBIAN / "pyverbs").is_dir():
        missing["pyverbs"] = "apt-get install python3-pyverbs"
    return missing


def _pyverbs(stack: ExitStack, environment: dict[str, str]) -> Worker:
    """Start pyverbs under our interpreter, if it was built for that one, and else under Debian's."""
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    ours = any(tag in path.name for path in (_DEBIAN / "pyverbs").glob("*.so"))
    link = BUILD / "peers" / "pyverbs"
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(_DEBIAN / "pyverbs")
    python = sys.executable if ours else "/usr/bin/python3"
    environment = {**environment, "PYTHONPATH": str(link.parent) if ours else ""}
    return stack.enter_context(Worker("bench.peer_pyverbs", python, **environment))


def peer_workers(stack: ExitStack, device: str = "", gid_index: int = 0) -> dict[str, Worker]:
    """Start the workers of the peers that are installed: on a real device, or without one on the null provider."""
    real = {"BENCH_DEVICE": device, "BENCH_GID_INDEX": str(gid_index)} if device else None
    missing, workers = peers(), {}
    if "ibverbs" not in missing:
        environment = real or {"LD_LIBRARY_PATH": str(BUILD / "null")}  # for it, found first is all it takes
        workers["ibverbs"] = stack.enter_context(Worker("bench.peer_ibverbs", **environment))
    if "pyverbs" not in missing:
        workers["pyverbs"] = _pyverbs(stack, real or {"LD_PRELOAD": str(BUILD / "libnull.so")})
    return workers


def run(rounds: int, seconds: float, told: Callable[[str], None] = lambda _: None) -> dict[str, Figure]:
    """Time everything on the null provider; the peers that are installed, too."""
    with ExitStack() as stack:
        own = stack.enter_context(Worker("bench.ours", LD_PRELOAD=str(BUILD / "libnull.so")))
        cases = own.cases("pvl")
        for peer, worker in peer_workers(stack).items():
            cases |= worker.cases(peer)
        # In slices so short that many of them are not interrupted; a batch takes longer than that.
        batches = {name: case for name, case in cases.items() if "write_many" in name}
        others = {name: case for name, case in cases.items() if name not in batches}
        return measure(batches, rounds, seconds, told) | measure(others, _SLICES * rounds, seconds / _SLICES, told)
