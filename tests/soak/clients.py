"""A process of peers: with an event loop, or with a thread for each."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import warnings
from contextlib import suppress
from typing import Any

import pyverbs_lite as pvl

from . import resources
from .faces import PATIENCE, Aio, Blocking, drive
from .life import AGAIN, Home, Living
from .plan import AUTHKEY, Life, Settings, life_of, way_of
from .tally import Tally, await_word, tell, tell_failure

#: Seconds between two accounts of a process that may be killed at any time.
_ACCOUNT = 0.25
#: How many of a process's peers may be in their handshake at a time.
_DIALLING = 8


class Clients:
    """The peers of one process.

    Args:
        first: the number of their first life.
        ports: where the server's faces listen.
    """

    def __init__(
        self, settings: Settings, peers: list[int], ports: dict[str, Any], first: int, context: pvl.Context
    ) -> None:
        self._settings, self.peers, self._ports, self._first = settings, peers, ports, first
        self._context = context
        self.tally = Tally()
        self._keys = itertools.count(first * 1_000_003 + peers[0] * 10_000_019)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._missing = set(peers)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._go = threading.Event()

    async def _arrived(self, peer: int) -> None:
        """Note that a peer has reached the server, and wait until all of every process have."""
        with self._lock:
            last = self._missing == {peer}
            self._missing.discard(peer)
        if last:
            tell("begun")
        if self._loop is None:
            self._go.wait()
        else:
            await self._all_are_there.wait()

    def go(self) -> None:
        """Let the peers begin."""
        self._go.set()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._all_are_there.set)

    def stop(self) -> None:
        """Let every peer come to its end."""
        self._stopped.set()

    def _dial(self, face: Any, life: Life, timeout: float) -> Any:
        """Call ``connect`` of a face: ``pvl`` or ``pvl.aio``."""
        way = way_of(life.peer)
        options: dict[str, Any] = {**life.tuning, "timeout": timeout}
        if way == "cm" and self._ports["cm"]:
            dial = pvl.cm.connect if face is pvl else face.cm_connect
            return dial(self._ports["cm_host"], self._ports["cm"], **options)
        if way == "server":
            options["authkey"] = AUTHKEY
        if not life.own_context:
            options["device"] = self._context
        return face.connect("127.0.0.1", self._ports["aio" if way == "cm" else way], **options)

    def _lives(self, peer: int) -> Any:
        for number in itertools.count(self._first):
            if self._stopped.is_set():
                return
            yield life_of(self._settings, peer, number)

    async def _live(self, life: Life, face: Any, home: Home) -> None:
        self.tally["connections made"] += 1
        self.tally[f"way {way_of(life.peer)}"] += 1
        living = Living(life, face, home, self.tally, self._keys, self._arrived)
        try:
            await living.run(self._stopped.is_set)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                self._fail(error, f"{life}, {living.step}")
            raise
        finally:
            if face.conn is not None and (life.end != "again" or living.step != AGAIN):
                await face.close()
                face.conn = None

    def _fail(self, error: BaseException, where: str) -> None:
        self.stop()
        tell_failure(error, where)

    # ------------------------------------------------------------ one thread each

    def run_peer(self, peer: int) -> None:
        """Live one life after the other in this thread."""
        home, life, face = Home(), None, Blocking(None)
        try:
            for life in self._lives(peer):
                if face.conn is None and life.connect_cut is not None:
                    try:
                        self._dial(pvl, life, life.connect_cut).close()
                    except pvl.HandshakeTimeout as error:
                        self.tally.expected(error, "connect cut")
                if face.conn is None:
                    face.conn = self._dial(pvl, life, PATIENCE)
                drive(self._live(life, face, home))
            if face.conn is not None:
                drive(face.close())
        except Exception as error:
            if not self._stopped.is_set():
                self._fail(error, f"{life}, connecting")

    def run_threads(self) -> None:
        """Run a thread for each peer; the first has the main thread, where signals come."""
        threads = [threading.Thread(target=self.run_peer, args=(peer,)) for peer in self.peers[1:]]
        for thread in threads:
            thread.start()
        self.run_peer(self.peers[0])
        for thread in threads:
            thread.join()

    # ------------------------------------------------------------ one loop for all

    async def _run_peer(self, peer: int) -> None:
        home, life, face = Home(), None, Aio(None)
        try:
            for life in self._lives(peer):
                if face.conn is None:
                    if life.connect_cut is not None:
                        await self._cut_connect(life)
                    async with self._dialling:
                        face.conn = await self._dial(pvl.aio, life, PATIENCE)
                await self._live(life, face, home)
            if face.conn is not None:
                await face.close()
        except Exception as error:
            if not self._stopped.is_set():
                self._fail(error, f"{life}, connecting")

    async def _cut_connect(self, life: Life) -> None:
        opening = self._dial(pvl.aio, life, PATIENCE)

        async def connect() -> None:
            await (await opening).close()

        task = asyncio.ensure_future(connect())
        await asyncio.sleep(life.connect_cut or 0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self.tally["cut connect"] += task.cancelled()

    async def run_loop(self) -> None:
        """Run a task for each peer."""
        self._dialling = asyncio.Semaphore(_DIALLING)
        self._all_are_there = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._go.is_set():
            self._all_are_there.set()
        await asyncio.gather(*(self._run_peer(peer) for peer in self.peers))


def main(seed: int, seconds: float, peers: int, kind: str, ids: list[int], ports: dict[str, Any], first: int) -> None:
    """Run one process of peers until told to stop, and give everything back."""
    warnings.simplefilter("ignore", ResourceWarning)  # some connections are dropped on purpose
    signal.signal(signal.SIGALRM, lambda *_: None)
    if ports["cm"]:
        resources.warm(ports["cm_host"])
    before = resources.of_process()
    tell("warm")
    await_word("connect")
    settings = Settings(seed, seconds, peers)
    with pvl.open_device() as context:
        clients = Clients(settings, ids, ports, first, context)

        def obey() -> None:
            await_word("go")
            clients.go()
            await_word("stop")
            clients.stop()

        listening = threading.Thread(target=obey)
        listening.start()

        def account() -> None:
            while not ended.wait(_ACCOUNT):
                tell("tally", counts=clients.tally)

        ended = threading.Event()
        if kind == "mortal":
            threading.Thread(target=account, daemon=True).start()
        if kind == "threads":
            clients.run_threads()
        else:
            asyncio.run(clients.run_loop())
        ended.set()
        tell("ended")
        listening.join()
    if left := resources.settled(before, resources.of_process):
        tell("failure", where=f"the end of {kind} peers {ids}", trace=f"not as before: {left}")
    tell("tally", counts=clients.tally)
    tell("idle")
    await_word("leave")
