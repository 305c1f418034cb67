"""Programs that talk to each other: started, read, waited for with a limit, and ended whatever happens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).with_name("peers")
#: Debian's pyverbs is for Debian's Python; PyPI's ibverbs is in this environment.
PYTHON = {"pyverbs": "/usr/bin/python3", "ibverbs": sys.executable}
#: Seconds after which a program that has not done its part never will.
PATIENCE = 30.0
_ASK_AGAIN = 0.01
_ASK_RDMA_AGAIN = 0.1  # each look is a process


class Program:
    """A running program; what it writes to either stream is read as it comes.

    Args:
        held: bytes of output after which it is to stop, in the middle of a write, until `release`.
    """

    def __init__(self, *argv: str | Path | int, group: list[Program], held: int | None = None) -> None:
        self.argv = [str(word) for word in argv]
        source, sink = os.pipe()
        self._stream = os.fdopen(source, errors="backslashreplace")
        if held is not None:
            _fill(sink)
        # A tool that buffers its output whole would tell a test that times out nothing.
        buffered = ["stdbuf", f"-o{'L' if held is None else held}"] if self.argv[0][0] != "/" else []
        self.process = subprocess.Popen(
            [*buffered, *self.argv],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        os.close(sink)
        self.pid = self.process.pid
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        group.append(self)
        self._group = group
        if held is None:
            self._reader.start()

    def release(self) -> None:
        """Let a program that is held go on."""
        self._reader.start()

    def _read(self) -> None:
        for line in self._stream:
            with self._news:
                self._lines.append(line.lstrip("\0"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def output(self) -> str:
        with self._news:
            return "".join(self._lines)

    def line(self, start: str, timeout: float = PATIENCE) -> str:
        """Wait until it writes a line that starts so, and return what follows on that line."""

        def found() -> str | None:
            return next((line[len(start) :].strip() for line in self._lines if line.startswith(start)), None)

        with self._news:
            self._news.wait_for(lambda: found() is not None or not self._reader.is_alive(), timeout)
            rest = found()
        assert rest is not None, f"no line {start!r} from {self.all()}"
        return rest

    def end(self, status: int | None = 0, timeout: float = PATIENCE) -> str:
        """Wait until it ends, with that exit status (None: not 0), and return what it wrote."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:.0f} s: {self.all()}") from None
        self._reader.join(5)
        good = self.process.returncode == status if status is not None else self.process.returncode > 0
        assert good, f"not status {status}: {self.all()}"
        return self.output

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._reader.is_alive():
            self._reader.join(5)
        self._stream.close()

    def all(self) -> str:
        """Show this program, and those that it has to do with."""
        return "\n".join(map(str, [self, *(program for program in self._group if program is not self)]))

    def __str__(self) -> str:
        status = self.process.poll()
        state = "running" if status is None else f"ended with {status}"
        return f"{' '.join(self.argv)} ({state})\n{self.output}"


def _fill(sink: int) -> None:
    """Write to a pipe until nothing more goes in; who writes next waits for a reader."""
    os.set_blocking(sink, False)
    with suppress(BlockingIOError):
        while True:
            os.write(sink, bytes(4096))
    os.set_blocking(sink, True)


def wait_until(
    condition: Callable[[], bool],
    what: str,
    *programs: Program,
    timeout: float = PATIENCE,
    pause: float = _ASK_AGAIN,
) -> None:
    """Ask until something is so; not longer than the programs it depends on are running."""
    limit = time.monotonic() + timeout
    while not condition():
        for program in programs:
            assert program.process.poll() is None, f"{what}: not any more, {program.all()}"
        assert time.monotonic() < limit, "\n".join([f"not within {timeout:.0f} s: {what}", *map(str, programs)])
        time.sleep(pause)


# ---------------------------------------------------------------- listeners


def free_port() -> int:
    """Return a TCP port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _listens_on_tcp(port: int) -> bool:
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port for row in rows)


def until_tcp_listens(port: int, program: Program) -> None:
    """Wait until somebody listens on a TCP port: a look, as a connection would be taken for the peer's."""
    wait_until(lambda: _listens_on_tcp(port), f"listening on TCP port {port}", program)


def cm_listeners() -> list[int]:
    """Return the pids of those who wait for connections through librdmacm."""
    shown = subprocess.run(["rdma", "-j", "resource", "show", "cm_id"], capture_output=True, text=True, check=True)
    return [row["pid"] for row in json.loads(shown.stdout or "[]") if row.get("state") == "LISTEN" and "pid" in row]


def until_cm_listens(program: Program) -> None:
    """Wait until a program listens through librdmacm."""
    listens = "listening through librdmacm"
    wait_until(lambda: program.pid in cm_listeners(), listens, program, pause=_ASK_RDMA_AGAIN)


def until_in_group(address: str, program: Program) -> None:
    """Wait until some interface is in an IPv4 multicast group."""
    raw = socket.inet_aton(address)
    shown = f"{int.from_bytes(raw, sys.byteorder):08X}"
    wait_until(lambda: shown in Path("/proc/net/igmp").read_text(), f"joining {address}", program)


# ---------------------------------------------------------------- what must not stay behind


def kernel_objects() -> dict[str, dict[str, int]]:
    """Count the RDMA objects of each device that the kernel holds for anybody."""
    shown = subprocess.run(["rdma", "-j", "resource", "show"], capture_output=True, text=True, check=True)
    counted = ("pd", "cq", "qp", "mr", "cm_id")
    return {row["ifname"]: {kind: row.get(kind, 0) for kind in counted} for row in json.loads(shown.stdout)}
