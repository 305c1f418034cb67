"""A whole soak: starts the server and the processes of peers, kills some, and compares the end with the beginning."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

import pyverbs_lite as pvl

from . import resources
from .clients import main as clients_main
from .faces import PATIENCE
from .plan import Settings
from .server import main as server_main
from .tally import Tally, tell_failure

__all__ = ["Failed", "soak"]

#: A process's resident memory may grow by so many KiB while it goes on with the same work.
_GROWTH = 24 << 10
#: Seconds for all peers to connect, on a slow machine.
_ARRIVAL = 400.0


class Failed(Exception):
    """The soak has failed; the text says why."""


class Program:
    """A process of the soak, and what it says; forked, for to start Python anew takes a guest a second.

    Args:
        main: what it does; ``facts`` are its arguments.
        not_mine: descriptors that are none of its business.
    """

    def __init__(self, name: str, main: Callable[..., None], not_mine: Iterable[int], facts: dict[str, Any]) -> None:
        self.name, self.facts = name, facts
        self.counts: dict[str, int] = {}
        self._heard = b""
        read, self._write = os.pipe()
        self.fd, write = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run(main, read, write, {self.fd, self._write, *not_mine})
        os.close(read)
        os.close(write)

    def _run(self, main: Callable[..., None], read: int, write: int, not_mine: set[int]) -> NoReturn:
        status = 1
        try:
            for fd in not_mine:
                os.close(fd)
            for fd, place in ((read, 0), (write, 1)):
                os.dup2(fd, place)
                os.close(fd)
            sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
            faulthandler.enable()
            main(**self.facts)
            status = 0
        except BaseException as error:
            tell_failure(error, str(self))
        finally:
            sys.stdout.flush()
            os._exit(status)

    def __str__(self) -> str:
        return f"{self.name} {self.facts.get('ids', '')}"

    def hear(self) -> list[dict[str, Any]]:
        """Return what it has said since, the end of its process included."""
        data = os.read(self.fd, 1 << 20)
        if not data:
            self._close()
            return [{"event": "gone", "status": os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])}]
        *lines, self._heard = (self._heard + data).split(b"\n")
        found: list[dict[str, Any]] = list(map(json.loads, lines))
        for said in found:
            if said["event"] == "tally":
                self.counts = said["counts"]
        return [said for said in found if said["event"] != "tally"]

    def say(self, word: str) -> None:
        """Say a word to it."""
        with suppress(BrokenPipeError):
            os.write(self._write, word.encode() + b"\n")

    def _close(self) -> None:
        os.close(self.fd)
        os.close(self._write)
        self.fd = self._write = -1

    def end(self) -> None:
        """End it, whatever it does."""
        if self.fd >= 0:
            os.kill(self.pid, signal.SIGKILL)
            while self.fd >= 0:
                self.hear()


class _Soak:
    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._settings, self._stack = settings, stack
        self._programs: set[Program] = set()
        self._news: deque[tuple[Program, dict[str, Any]]] = deque()
        self._vandals: list[socket.socket] = []
        self.tally = Tally()
        self.server_memory: list[dict[str, int]] = []
        self._rng = random.Random(settings.seed)
        self.seconds = 0.0

    def start(self, name: str, main: Callable[..., None], **facts: Any) -> Program:
        pipes = [fd for program in self._programs for fd in (program.fd, program._write)]
        not_mine = [*pipes, *(sock.fileno() for sock in self._vandals)]
        program = Program(name, main, not_mine, facts)
        self._stack.callback(program.end)
        self._programs.add(program)
        return program

    def hear(self, timeout: float) -> tuple[Program, dict[str, Any]] | None:
        """Return the next thing said.

        Raises:
            Failed: it is a failure.
        """
        end = time.monotonic() + timeout
        while not self._news:
            poller = select.poll()
            by_fd = {program.fd: program for program in self._programs}
            for fd in by_fd:
                poller.register(fd, select.POLLIN)
            ready = poller.poll(max(0.0, end - time.monotonic()) * 1000)
            for fd, _ in ready:
                self._news.extend((by_fd[fd], said) for said in by_fd[fd].hear())
            if not ready:
                return None
        program, said = self._news.popleft()
        if said["event"] == "failure":
            raise Failed(f"{said['where']}\n{said['trace']}")
        if said["event"] == "gone":
            self._programs.discard(program)
            if said["status"]:
                raise Failed(f"{program} ended with status {said['status']}")
        return program, said

    def kill(self, program: Program) -> None:
        """Kill one, in the middle of whatever it does."""
        program.end()
        self._programs.discard(program)
        self.tally["processes killed"] += 1
        self.tally["peers killed"] += len(program.facts["ids"])
        self.tally.update(program.counts)

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
            self._vandals.append(sock)
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
        for name in pvl.__all__:  # imported before there are children
            getattr(pvl, name)
        gc.collect()
        gc.freeze()  # not looked at by each child again
        server = self.start("server", server_main, peers=settings.peers, mortals=mortal_ids)
        ports = self.await_all("listening", [server], PATIENCE)[0]
        ports.pop("event")
        common = {"seed": settings.seed, "seconds": settings.seconds, "peers": settings.peers, "ports": ports}
        programs: dict[tuple[str, int], Program] = {
            (kind, i): self.start(kind, clients_main, kind=kind, ids=ids, first=0, **common)
            for kind, parts in groups.items()
            for i, ids in enumerate(parts)
        }
        self.await_all("warm", list(programs.values()), _ARRIVAL)
        before, before_process = resources.kernel(), resources.process(server.pid)
        for program in programs.values():
            program.say("connect")
        self.await_all("begun", list(programs.values()), _ARRIVAL)
        for program in programs.values():
            program.say("go")
        began = time.monotonic()
        try:
            self._soak(server, programs, common)
        finally:
            while self._vandals:
                self._vandals.pop().close()
        self.seconds = time.monotonic() - began
        living = list(programs.values())
        for program in living:
            program.say("stop")
        self.await_all("idle", living, 2 * PATIENCE)
        for name, was, take in (
            ("the kernel's objects", before, resources.kernel),
            ("the server's process", before_process, lambda: resources.process(server.pid)),
        ):
            for kept in ("VmRSS", "VmPin", "Threads", "mr", "mrlen"):  # a server keeps some until it stops
                was.pop(kept, None)
            if left := resources.settled(was, take):
                raise Failed(f"{name}, with every connection closed and every process alive, are not as before: {left}")
        server.say("stop")
        self.await_all("idle", [server], PATIENCE)
        # librdmacm keeps its contexts, each with a PD, for as long as a process lives.
        objects = {kind: count for kind, count in clean.items() if kind not in ("ctx", "pd")}
        if left := resources.settled(objects, resources.kernel):
            raise Failed(f"the kernel's objects, with every process alive, are not those of the beginning: {left}")
        for program in (*living, server):
            program.say("leave")
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
                self.server_memory.append(resources.process(server.pid))
                if len(self.server_memory) % 2:
                    self.vandalise(common["ports"][self._rng.choice(("aio", "threads"))])
            if now >= kill_at:
                lives += 1
                kill_at = now + self._rng.uniform(1.5, 5)
                key = self._rng.choice([key for key in programs if key[0] == "mortal"])
                old = programs[key]
                self.kill(old)
                programs[key] = self.start(old.name, clients_main, **{**old.facts, "first": lives * 1000})
                for word in ("connect", "go"):
                    programs[key].say(word)

    def memory(self) -> tuple[int, int, int]:
        """Return the server's peak of resident and of pinned memory, and its growth once all had begun; in KiB."""
        samples = self.server_memory
        quarter = max(1, len(samples) // 4)
        early, late = (
            sorted(row["VmRSS"] for row in part)[quarter // 2]
            for part in (samples[quarter : 2 * quarter], samples[-quarter:])
        )
        return max(row["VmRSS"] for row in samples), max(row["VmPin"] for row in samples), late - early


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
