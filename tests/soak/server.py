"""The server of a soak: it owns every peer's home, and answers what they say; some in tasks, some in threads."""

from __future__ import annotations

import asyncio
import mmap
import threading
import zlib
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

import pyverbs_lite as pvl

from . import resources
from .faces import PATIENCE, Aio, Blocking, drive
from .letters import Letter, Said, Wrong, pattern
from .plan import AUTHKEY, DATA, HOME, MESSAGE, WORDS
from .tally import Tally, await_word, tell, tell_failure

#: How many handshakes with a listener may go on at a time: in tasks, and in threads. Some never end by themselves.
_TASKS, _THREADS = 48, 16
#: Seconds for one: all peers come at once, to a guest that may be slow.
_HANDSHAKE = 60.0
_TUNING: Any = {"backlog": 512, "timeout": _HANDSHAKE, "max_message_size": MESSAGE, "recv_depth": 8, "send_depth": 16}


class Desk:
    """What serves one connection."""

    def __init__(self, face: Any, arena: memoryview, mortals: frozenset[int], tally: Tally) -> None:
        self._face, self._arena, self._mortals, self._tally = face, arena, mortals, tally
        self._last, self._missing = -1, 0
        self._added: dict[str, tuple[Any, bytearray]] = {}
        self._may_be_lost = True
        self._done = False
        self.peer = self.life = -1

    def __str__(self) -> str:
        return f"the server's side of peer {self.peer}, life {self.life}, after message {self._last}"

    def _key(self, seq: int, up: bool) -> int:
        return (self.peer << 40 | self.life << 20 | seq) << 1 | up

    async def serve(self) -> None:
        """Answer until the peer is gone, and close."""
        try:
            while True:
                message = await self._face.do("recv")
                if message.imm is not None:
                    self._follow(message.imm)
                    self._tally.op("notice", message.byte_len)
                    continue
                letter = Letter.read(message)
                self._tally.op("recv", len(message))
                if letter.kind is Said.HELLO:
                    self.peer, self.life = letter.argument & 0xFFFF, letter.argument >> 16
                    self._may_be_lost = self.peer in self._mortals
                self._follow(letter.seq)
                if self._missing > letter.uncertain:
                    raise Wrong(f"{self._missing} messages are missing, and only {letter.uncertain} were cut")
                if letter.kind is Said.CLOSE:
                    break
                await self._take(letter)
        except (pvl.HandshakeError, pvl.CompletionError, pvl.ClosedError) as error:
            if not (self._may_be_lost or (type(error) is pvl.PeerClosedError and self._done)):
                raise
            self._tally.expected(error, "after its last word" if self._done else "without a last word")
        finally:
            await self._face.close()

    def _follow(self, seq: int) -> None:
        if seq <= self._last:
            raise Wrong(f"message {seq} came after {self._last}")
        self._missing += seq - self._last - 1
        self._last = seq

    async def _take(self, letter: Letter) -> None:
        if letter.kind in (Said.NOTE, Said.ECHO, Said.HELLO):
            letter.expect(self._key(letter.seq, True))
        answer = getattr(self, f"_{letter.kind.name.lower()}", None)
        if answer is not None:
            await answer(letter)
        if letter.kind is not Said.NOTE:
            body = pattern(self._key(letter.seq, False), letter.reply)
            data = Letter(Said.ANSWER, letter.seq, body=body).pack()
            await self._face.do("send", data)
            self._tally.op("send", len(data))

    async def _hello(self, letter: Letter) -> None:
        home = self._arena[self.peer * HOME : (self.peer + 1) * HOME]
        await self._face.do("register", home, name="home")

    async def _check(self, letter: Letter) -> None:
        start = self.peer * HOME + WORDS * 8
        if zlib.crc32(self._arena[start : start + DATA]) != letter.argument:
            raise Wrong("the peer's picture of its home is not what is there")

    async def _add(self, letter: Letter) -> None:
        memory = bytearray(pattern(letter.argument >> 20, letter.argument & 0xFFFFF))
        name = letter.body.decode()
        self._added[name] = await self._face.do("register", memory, name=name), memory

    async def _check_added(self, letter: Letter) -> None:
        memory = self._added[letter.body.decode()][1]
        if memory != pattern(letter.argument, len(memory)):
            raise Wrong(f"{letter.body.decode()} is not what the peer has written there")

    async def _drop(self, letter: Letter) -> None:
        self._added.pop(letter.body.decode())[0].close()

    async def _pull(self, letter: Letter) -> None:
        remote = await self._face.named(letter.body.decode())
        if await self._face.do("read", remote) != pattern(letter.argument, remote.length):
            raise Wrong(f"{remote} does not have the bytes of its key")
        self._tally.op("read", remote.length)

    async def _push(self, letter: Letter) -> None:
        remote = await self._face.named(letter.body.decode())
        await self._face.do("write", remote, pattern(letter.argument, remote.length))
        self._tally.op("write", remote.length)

    async def _fin(self, letter: Letter) -> None:
        self._done = True
        self._may_be_lost = self._may_be_lost or bool(letter.argument)


class Host:
    """All who serve peers, and whom they serve."""

    def __init__(self, peers: int, mortals: frozenset[int]) -> None:
        self._arena = memoryview(mmap.mmap(-1, peers * HOME))
        self._mortals = mortals
        self.tally = Tally()
        self._lock = threading.Lock()
        self._serving = 0

    def _count(self, change: int) -> None:
        with self._lock:
            self._serving += change
            self.tally["connections accepted"] += change > 0
            self.tally["connections at a time"] = max(self.tally["connections at a time"], self._serving)

    async def serve(self, face: Any) -> None:
        desk = Desk(face, self._arena, self._mortals, self.tally)
        self._count(1)
        try:
            await desk.serve()
        except Exception as error:
            tell_failure(error, str(desk))
        finally:
            self._count(-1)

    def account(self, stats: pvl.ServerStats) -> None:
        """Check and enter what a server says of itself."""
        if stats.handler_errors or stats.open:
            raise Wrong(f"{stats}")
        self.tally["error (turned away by a Server)"] += stats.failed + stats.refused

    # ------------------------------------------------------------ threads

    def handle(self, conn: pvl.Connection) -> None:
        """Serve one peer in this thread."""
        drive(self.serve(Blocking(conn)))

    def accept(self, listener: pvl.Listener) -> None:
        """Accept peers in this thread, and serve each in a thread of its own."""
        while True:
            try:
                conn = listener.accept()
            except pvl.ClosedError:
                return
            except pvl.HandshakeError as error:
                self.tally.expected(error, "handshake")
                continue
            except Exception as error:
                tell_failure(error, "accept")
                return
            threading.Thread(target=self.handle, args=(conn,)).start()

    # ------------------------------------------------------------ tasks

    async def accept_all(self, listener: Any) -> None:
        """Accept peers in tasks, until the listener is closed."""
        tasks: set[asyncio.Task[None]] = set()

        def keep(work: Coroutine[Any, Any, None]) -> None:
            task = asyncio.ensure_future(work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def accept() -> None:
            while True:
                try:
                    conn = await listener.accept()
                except pvl.ClosedError:
                    return
                except pvl.HandshakeError as error:
                    self.tally.expected(error, "handshake")
                    continue
                except Exception as error:
                    tell_failure(error, "aio accept")
                    return
                keep(self.serve(Aio(conn)))

        await asyncio.gather(*(accept() for _ in range(_TASKS)))
        while tasks:
            await asyncio.sleep(0.02)


async def _main(host: Host, context: pvl.Context, **ports: int) -> None:
    async def handle(conn: pvl.aio.Connection) -> None:
        await host.serve(Aio(conn))

    async with (
        pvl.aio.listen("127.0.0.1", 0, device=context, **_TUNING) as listener,
        pvl.aio.Server("127.0.0.1", 0, handle, **_TUNING) as server,
    ):
        listeners = [listener]
        address = resources.address(context)
        if address is not None:
            listeners.append(await pvl.aio.cm_listen(address, 0, **_TUNING))
        cm = {"cm_host": address, "cm": listeners[1].port if address else 0}
        tell("listening", aio=listener.port, aio_server=server.port, **cm, **ports)
        accepting = asyncio.gather(*map(host.accept_all, listeners))
        await asyncio.get_running_loop().run_in_executor(None, await_word, "stop")
        for listening in listeners:
            await listening.close()
        await accepting
        await server.stop(PATIENCE)
        host.account(server.stats)
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            raise Wrong(f"tasks are left: {left}")


def main(peers: int, mortals: list[int]) -> None:
    """Serve until told to stop, and give everything back."""
    with pvl.open_device() as context:
        address = resources.address(context)
    if address is not None:
        resources.warm(address)
    before = resources.of_process()
    host = Host(peers, frozenset(mortals))
    with ExitStack() as stack:
        context = stack.enter_context(pvl.open_device())
        context.max_spares = 0  # what is left of connections is counted while this lives; the clients keep some
        server = stack.enter_context(pvl.Server("127.0.0.1", 0, host.handle, authkey=AUTHKEY, **_TUNING))
        server.start()
        listener = stack.enter_context(pvl.listen("127.0.0.1", 0, device=context, **_TUNING))
        acceptors = [threading.Thread(target=host.accept, args=(listener,)) for _ in range(_THREADS)]
        for thread in acceptors:
            thread.start()
        asyncio.run(_main(host, context, server=server.port, threads=listener.port))
        server.stop(PATIENCE)
        host.account(server.stats)
        listener.close()
        for thread in acceptors:
            thread.join(PATIENCE)
    if left := resources.settled(before, resources.of_process):
        raise Wrong(f"the server's process is not as before: {left}")
    tell("tally", counts=host.tally)
    tell("idle")
    await_word("leave")
