"""A whole soak: starts the server and the processes of peers, kills some, and compares the end with the beginning."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import Any

from . import resources
from .faces import PATIENCE
from .plan import Settings
from .tally import Tally

__all__ = ["Failed", "soak"]

#: A process's resident memory may grow by so many KiB while it goes on with the same work.
_GROWTH = 24 << 10


class Failed(Exception):
    """The soak has failed; the text says why."""


class Program:
    """A process of the soak, and what it says."""

    def __init__(self, module: str, news: queue.Queue[tuple[Program, dict[str, Any]]], **facts: Any) -> None:
        self.module, self.facts = module, facts
        self.counts: dict[str, int] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", f"soak.{module}", json.dumps(facts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        threading.Thread(target=self._listen, args=(news,), daemon=True).start()

    def __str__(self) -> str:
        return f"{self.module} {self.facts.get('kind', '')}{self.facts.get('ids', '')}"

    def _listen(self, news: queue.Queue[tuple[Program, dict[str, Any]]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                said = {"event": "failure", "where": str(self), "trace": line}
            if said["event"] == "tally":
                self.counts = said["counts"]
            else:
                news.put((self, said))
        news.put((self, {"event": "gone", "status": self.process.wait()}))

    def say(self, word: str) -> None:
        """Say a word to it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class _Soak:
    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._settings, self._stack = settings, stack
        self._news: queue.Queue[tuple[Program, dict[str, Any]]] = queue.Queue()
        self._killed: set[int] = set()
        self.tally = Tally()
        self.server_memory: deque[tuple[float, dict[str, int]]] = deque()
        self._rng = random.Random(settings.seed)
        self._began, self.seconds = 0.0, 0.0

    def start(self, module: str, **facts: Any) -> Program:
        program = Program(module, self._news, **facts)
        self._stack.callback(program.end)
        return program

    def hear(self, timeout: float) -> tuple[Program, dict[str, Any]] | None:
        """Return the next thing said.

        Raises:
            Failed: it is a failure.
        """
        try:
            program, said = self._news.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None
        if said["event"] == "failure":
            raise Failed(f"{said['where']}\n{said['trace']}")
        if said["event"] == "gone" and said["status"] and program.pid not in self._killed:
            raise Failed(f"{program} ended with status {said['status']}")
        return program, said

    def await_all(self, event: str, programs: list[Program], seconds: float) -> list[dict[str, Any]]:
        """Wait until all programs have said one thing."""
        end, missing, found = time.monotonic() + seconds, set(programs), []
        while missing:
            heard = self.hear(end - time.monotonic())
            if heard is None:
                for program in missing:
                    with suppress(ProcessLookupError):
                        os.kill(program.pid, signal.SIGABRT)  # faulthandler shows where each thread is
                time.sleep(1)
                raise Failed(f"{', '.join(map(str, missing))} did not say {event!r} within {seconds:.0f} s")
            program, said = heard
            if said["event"] == event and program in missing:
                missing.remove(program)
                found.append(said)
        return found

    def vandalise(self, port: int) -> None:
        """Connect and be no good peer: silent, or of another protocol, or gone at once."""
        sock = socket.create_connection(("127.0.0.1", port))
        with suppress(OSError):
            sock.sendall(self._rng.choice((b"", b"GET / HTTP/1.0\r\n\r\n", b"PVL", self._rng.randbytes(300))))
        if self._rng.random() < 0.5:
            sock.close()
        else:
            self._stack.callback(sock.close)
        self.tally["vandals"] += 1

    def run(self) -> None:
        """Run all of it.

        Raises:
            Failed: anything is not as it must be.
        """
        settings = self._settings
        groups = settings.groups()
        clean = resources.kernel()
        mortal_ids = [peer for ids in groups["mortal"] for peer in ids]
        server = self.start("server", peers=settings.peers, mortals=mortal_ids)
        ports = self.await_all("listening", [server], PATIENCE)[0]
        ports.pop("event")
        before, before_process = resources.kernel(), resources.process(server.pid)
        common = {"seed": settings.seed, "seconds": settings.seconds, "peers": settings.peers, "ports": ports}
        programs: dict[tuple[str, int], Program] = {
            (kind, i): self.start("clients", kind=kind, ids=ids, first=0, **common)
            for kind, parts in groups.items()
            for i, ids in enumerate(parts)
        }
        self.await_all("begun", list(programs.values()), 2 * PATIENCE)
        self._began = time.monotonic()
        self._soak(server, programs, common)
        self.seconds = time.monotonic() - self._began
        living = list(programs.values())
        for program in living:
            program.say("stop")
        self.await_all("idle", living, 2 * PATIENCE)
        for name, was, take in (
            ("the kernel's objects", before, resources.kernel),
            ("the server's process", before_process, lambda: resources.process(server.pid)),
        ):
            was.pop("VmRSS", None)
            if left := resources.settled(was, take):
                raise Failed(f"{name}, with every connection closed and every process alive, are not as before: {left}")
        for program in living:
            program.say("leave")
        server.say("stop")
        self.await_all("gone", [*living, server], PATIENCE)
        if left := resources.settled(clean, resources.kernel):
            raise Failed(f"the kernel's objects at the end are not those of the beginning: {left}")
        for program in living:
            self.tally.update(program.counts)
        self.server = Tally(server.counts)

    def _soak(self, server: Program, programs: dict[tuple[str, int], Program], common: dict[str, Any]) -> None:
        """Let them do their work, and disturb it."""
        end = time.monotonic() + self._settings.seconds
        lives, kill_at, look_at = 0, time.monotonic() + min(5.0, self._settings.seconds / 3), 0.0
        while (now := time.monotonic()) < end:
            self.hear(min(0.2, end - now))
            if now >= look_at:
                look_at = now + 0.5
                self.server_memory.append((now - self._began, resources.process(server.pid)))
                self.vandalise(common["ports"][self._rng.choice(("aio", "threads"))])
            if now >= kill_at:
                lives += 1
                kill_at = now + self._rng.uniform(1.5, 5)
                key = self._rng.choice([key for key in programs if key[0] == "mortal"])
                old = programs[key]
                self._killed.add(old.pid)
                old.end()
                self.tally["processes killed"] += 1
                self.tally["peers killed"] += len(old.facts["ids"])
                self.tally.update(old.counts)
                programs[key] = self.start("clients", **{**old.facts, "first": lives * 1000})

    def memory(self) -> tuple[int, int, int]:
        """Return the server's peak of resident and of pinned memory, and its growth once all had begun; in KiB."""
        samples = list(self.server_memory)
        quarter = max(1, len(samples) // 4)
        early, late = (
            sorted(row["VmRSS"] for _, row in part)[quarter // 2]
            for part in (samples[quarter : 2 * quarter], samples[-quarter:])
        )
        return max(row["VmRSS"] for _, row in samples), max(row["VmPin"] for _, row in samples), late - early


def soak(settings: Settings) -> str:
    """Run a soak, and return its figures as a table.

    Raises:
        Failed: anything is not as it must be.
    """
    from .report import table

    with ExitStack() as stack:
        run = _Soak(settings, stack)
        run.run()
        if len(run.server_memory) > 40 and run.memory()[2] > _GROWTH:
            raise Failed(f"the server's memory has grown by {run.memory()[2]} KiB while the work stayed the same")
        return table(settings, run.tally, run.server, run.memory(), run.seconds)
