"""One life of a peer: it connects, takes its steps, checks what came of each, and ends the connection in some way."""

from __future__ import annotations

import gc
import itertools
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np

import pyverbs_lite as pvl

from .faces import PATIENCE, Call, Cut
from .letters import Letter, Said, Wrong, pattern
from .plan import DATA, HOME, MESSAGE, WORDS, Life
from .tally import Tally

__all__ = ["AGAIN", "Home", "Living"]

#: Where the checked bytes start: after the words.
_DATA = WORDS * 8
_MASK = (1 << 64) - 1
_A = pvl.AccessFlags
#: The step of a life whose connection is the next one's.
AGAIN = "the end: connected again"
#: Answers that may be on their way: fewer than any peer has receives, so that the server never waits for long.
_OWED = 4


class Home:
    """What a peer knows of its range of the server's memory: the bytes, and what each word may be."""

    def __init__(self) -> None:
        self.known = False
        self.data = bytearray(DATA)
        self.words: list[set[int]] = [{0} for _ in range(WORDS)]
        self.stale: Any = None  # what it was called in the life before


class Living:
    """A peer during one life.

    Args:
        keys: numbers that are never used twice, for the contents of what is written.
        arrived: awaited with the peer once the server has answered.
    """

    def __init__(
        self,
        life: Life,
        face: Any,
        home: Home,
        tally: Tally,
        keys: itertools.count[int],
        arrived: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self.life, self.face, self.tally, self._home, self._keys = life, face, tally, home, keys
        self.step: object = "hello"
        self._arrived = arrived
        self._seq = itertools.count()
        self._uncertain = 0
        #: Letters that are or may be answered: number, kind, bytes of the answer, whether it was sent for certain.
        self._owed: deque[tuple[int, Said, int, bool]] = deque()
        self._desk_memory = bytearray(DATA)
        self._desk: Any = None
        self._array = np.zeros(DATA, np.uint8)
        self._remote: Any = None

    # ------------------------------------------------------------ letters

    def _key(self, seq: int, up: bool) -> int:
        return (self.life.peer << 40 | self.life.number << 20 | seq) << 1 | up

    async def _send(
        self,
        kind: Said,
        *,
        size: int = 0,
        body: bytes | None = None,
        argument: int = 0,
        reply: int = 0,
        cut: tuple[str, float] | None = None,
    ) -> int:
        seq = next(self._seq)
        if body is None:
            body = pattern(self._key(seq, True), size)
        data = Letter(kind, seq, self._uncertain, argument, reply, body).pack()
        answered = kind not in (Said.NOTE, Said.CLOSE)
        if cut is None:
            await self.face.do("send", data)
            self.tally.op("send", len(data))
        else:
            try:
                await self.face.cut(cut, "send", data)
                self.tally.op("send", len(data))
                cut = None
            except Cut as how:
                self._note_cut(how)
                self._uncertain += 1
        if answered:
            self._owed.append((seq, kind, reply, cut is None))
        return seq

    def _note_cut(self, how: Cut) -> None:
        self.tally[f"cut {how}"] += 1

    async def _answer(self, cut: tuple[str, float] | None = None) -> Letter:
        """Take the next answer, and check that it is the next."""
        how: tuple[Any, ...] = (self.face.do,) if cut is None else (self.face.cut, cut)
        kind = next(self._keys) % 3
        if kind == 0:
            data = bytes(await how[0](*how[1:], "recv"))
        elif kind == 1:
            buffer = bytearray(MESSAGE)
            length = await how[0](*how[1:], "recv_into", buffer)
            data = bytes(buffer[:length])
        else:
            with await how[0](*how[1:], "recv", lend=True) as message:
                data = bytes(message)
        letter = Letter.read(data)
        self.tally.op("recv", len(data))
        while True:
            if not self._owed:
                raise Wrong(f"an answer to {letter.seq}, and none is owed")
            seq, kind, size, certain = self._owed.popleft()
            if seq == letter.seq:
                break
            if certain:
                raise Wrong(f"{kind.name} {seq} was sent and not answered: the next answer is to {letter.seq}")
        letter.expect(self._key(seq, False), size)
        return letter

    async def _ask(self, kind: Said, **what: Any) -> Letter:
        seq = await self._send(kind, **what)
        while (letter := await self._answer()).seq != seq:
            pass
        return letter

    async def _make_room(self) -> None:
        while len(self._owed) >= _OWED:
            if any(certain for *_, certain in self._owed):
                await self._answer()
            else:
                await self._check()

    # ------------------------------------------------------------ the way in and through

    async def run(self, stop: Any) -> None:
        """Live, and end the connection."""
        await self._ask(Said.HELLO, argument=self.life.peer | self.life.number << 16)
        if self._arrived is not None:
            await self._arrived(self.life.peer)
        self._remote = await self.face.named("home")
        if len(self._remote) != HOME:
            raise Wrong(f"a home of {len(self._remote)} bytes")
        stale = self._home.stale
        if stale is not None and stale.domain != self._remote.domain:  # those of a Server have one domain
            with self._expecting(pvl.StaleBufferError):
                await self.face.do("write", stale, b"stale")
        self._home.stale = self._remote
        await self._renew_desk()
        if self._home.known:
            await self._look_at_all()
        else:
            self._home.data[:] = pattern(next(self._keys), DATA)
            await self.face.do("write", self._remote[: _DATA + DATA], bytes(_DATA) + self._home.data)
            self._home.known = True
        for step in self.life.steps:
            if stop():
                break
            self.step = step
            await getattr(self, f"_{step.kind}")(cut=step.cut, **step.args)
        self.step = f"the end: {self.life.end}"
        await self._look_at_all()
        await self._check()
        await self._ask(Said.FIN, argument=self.life.end == "trespass")
        if self._owed:
            raise Wrong(f"answers that never came: {self._owed}")
        await getattr(self, f"_end_{self.life.end}")()
        self.tally[f"end {self.life.end}"] += 1

    async def _withdrawn(self, name: str) -> None:
        """Wait until the peer no longer has a buffer: the news travel on another way than messages."""
        end = time.monotonic() + PATIENCE
        while name in self.face.conn.remote:
            if time.monotonic() > end:
                raise Wrong(f"{name!r} is still among {self.face.conn.remote}")
            await self.face.pause(0.002)

    def _at(self, at: int, size: int) -> Any:
        return self._remote[_DATA + at : _DATA + at + size]

    def _same(self, at: int, found: Any, what: str) -> None:
        known = self._home.data[at : at + len(found)]
        if found != known:
            bad = next(i for i, (one, other) in enumerate(zip(found, known, strict=True)) if one != other)
            raise Wrong(f"{what} at {at}: byte {at + bad} is {found[bad]}, not {known[bad]}")

    async def _look_at_all(self) -> None:
        """Check every byte of the home."""
        whole = await self.face.do("read", self._remote[: _DATA + DATA])
        self.tally.op("read", len(whole))
        for i, possible in enumerate(self._home.words):
            word = int.from_bytes(whole[i * 8 : i * 8 + 8], "little")
            if word not in possible:
                raise Wrong(f"word {i} is {word:#x}, not one of {possible}")
            self._home.words[i] = {word}
        self._same(0, whole[_DATA:], "the whole")

    # ------------------------------------------------------------ two-sided

    async def _note(self, size: int, cut: tuple[str, float] | None) -> None:
        await self._send(Said.NOTE, size=size, cut=cut)

    async def _echo(self, size: int, reply: int, cut: tuple[str, float] | None) -> None:
        await self._make_room()
        await self._send(Said.ECHO, size=size, reply=reply, cut=cut)

    async def _take(self, cut: tuple[str, float] | None) -> None:
        if any(certain for *_, certain in self._owed):
            try:
                await self._answer(cut)
            except Cut as how:
                self._note_cut(how)

    async def _check(self, cut: object = None) -> None:
        await self._ask(Said.CHECK, argument=zlib.crc32(self._home.data))

    async def _pause(self, seconds: float, cut: object) -> None:
        await self.face.pause(seconds)

    # ------------------------------------------------------------ one-sided

    def _fresh(self, size: int) -> bytes:
        return pattern(next(self._keys), size)

    async def _settle(self, at: int, body: bytes) -> None:
        """After a write that was cut: it has taken place wholly by now, or not at all and never will."""
        found = await self.face.do("read", self._at(at, len(body)))
        if found == body:
            self._home.data[at : at + len(body)] = body
        else:
            self._same(at, found, "a write that was cut has not left all as it was:")

    async def _settle_list(self, writes: list[tuple[int, bytes]]) -> None:
        """After a list that was cut: it goes on."""
        end = time.monotonic() + PATIENCE
        for at, body in writes:
            while await self.face.do("read", self._at(at, len(body))) != body:
                if time.monotonic() > end:
                    raise Wrong(f"a list that timed out has not gone on: at {at}")
                await self.face.pause(0.001)
            self._home.data[at : at + len(body)] = body

    async def _write(
        self, at: int, size: int, cut: tuple[str, float] | None, source: str = "bytes", **options: int
    ) -> bool:
        body = self._fresh(size)
        data: Any = body
        if source == "desk":
            self._desk_memory[:size] = body
            data = self._desk[:size]
        elif source == "array":  # which stays registered from one operation to the next
            self._array[:size] = np.frombuffer(body, np.uint8)
            data = self._array[:size]
        try:
            if cut is None:
                await self.face.do("write", self._at(at, size), data, **options)
            else:
                await self.face.cut(cut, "write", self._at(at, size), data, **options)
        except Cut as how:
            self._note_cut(how)
            await self._settle(at, body)
            return False
        self.tally.op("write", size)
        self._home.data[at : at + size] = body
        return True

    async def _write_imm(self, at: int, size: int, cut: tuple[str, float] | None) -> None:
        if not await self._write(at, size, cut, imm=next(self._seq)):
            self._uncertain += 1

    async def _read(self, at: int, size: int, into: str, cut: tuple[str, float] | None) -> None:
        memory: Any = {"none": None, "buffer": bytearray(size), "desk": self._desk, "array": self._array[:size]}[into]
        args = (self._at(at, size), *(() if memory is None else (memory,)))
        try:
            found = await (self.face.do("read", *args) if cut is None else self.face.cut(cut, "read", *args))
        except Cut as how:
            self._note_cut(how)
            if into == "desk":
                await self._renew_desk()
            elif into == "array":
                self._array = np.zeros(DATA, np.uint8)
            return
        if memory is not None:
            if found != size:
                raise Wrong(f"read says {found} bytes instead of {size}")
            found = bytes(self._desk_memory[:size] if into == "desk" else memory)
        self.tally.op("read", size)
        self._same(at, found, "a read")

    async def _atomic(self, name: str, word: int, cut: tuple[str, float] | None, *operands: int) -> None:
        possible = self._home.words[word]

        def after(value: int) -> int:
            if name == "fetch_add":
                return (value + operands[0]) & _MASK
            return operands[1] if value == operands[0] else value

        args = (self._remote[word * 8 : word * 8 + 8], *operands)
        try:
            found = await (self.face.do(name, *args) if cut is None else self.face.cut(cut, name, *args))
        except Cut as how:
            self._note_cut(how)
            self._home.words[word] = possible | {after(value) for value in possible}
            return
        if found not in possible:
            raise Wrong(f"{name} found {found:#x} in word {word}, which is one of {possible}")
        self.tally.op(name, 8)
        self._home.words[word] = {after(found)}

    async def _fetch_add(self, word: int, value: int, cut: tuple[str, float] | None) -> None:
        await self._atomic("fetch_add", word, cut, value)

    async def _compare_swap(self, word: int, value: int, cut: tuple[str, float] | None) -> None:
        expected = min(self._home.words[word]) if value % 4 else value
        await self._atomic("compare_swap", word, cut, expected, value * 3 & _MASK)

    # ------------------------------------------------------------ many

    async def _write_many(self, pieces: list[tuple[int, int]], cut: tuple[str, float] | None) -> None:
        memory, writes = bytearray(DATA), []
        for at, size in pieces:
            memory[at : at + size] = body = self._fresh(size)
            writes.append((at, body))
        try:
            await self._many("write_many", memory, pieces, cut)
        except Cut as how:
            self._note_cut(how)
            await self._settle_list(writes)
            return
        self.tally.op("write_many", sum(size for _, size in pieces))
        for at, body in writes:
            self._home.data[at : at + len(body)] = body

    async def _read_many(self, pieces: list[tuple[int, int]], cut: tuple[str, float] | None) -> None:
        memory = bytearray(DATA)
        try:
            await self._many("read_many", memory, pieces, cut)
        except Cut as how:
            self._note_cut(how)
            return
        self.tally.op("read_many", sum(size for _, size in pieces))
        for at, size in pieces:
            self._same(at, memory[at : at + size], "a piece of read_many")

    async def _many(
        self, name: str, memory: bytearray, pieces: list[tuple[int, int]], cut: tuple[str, float] | None
    ) -> None:
        offsets, lengths = [at for at, _ in pieces], [size for _, size in pieces]
        args = (self._at(0, DATA), memory, offsets, offsets, lengths)
        # An interrupt may come before a list has been started, and then nobody knows whether it goes on.
        if cut is None:
            await self.face.do(name, *args)
        else:
            await self.face.cut(("timeout" if cut[0] == "interrupt" else cut[0], cut[1]), name, *args)

    async def _batch(self, pieces: list[tuple[int, int, bool]], cut: tuple[str, float] | None) -> None:
        rows, writes = [], []
        for at, size, writing in pieces:
            if writing:
                self._desk_memory[at : at + size] = body = self._fresh(size)
                writes.append((at, body))
            rows.append(Call("write" if writing else "read", (self._at(at, size), self._desk[at : at + size])))
        try:
            await self.face.batch(rows, *(() if cut is None else (cut[1],)))
        except Cut as how:
            self._note_cut(how)
            await self._settle_list(writes)
            await self._renew_desk()
            return
        self.tally.op("batch", sum(size for _, size, _ in pieces))
        for at, body in writes:
            self._home.data[at : at + len(body)] = body
        for at, size, writing in pieces:
            if not writing:
                self._same(at, self._desk_memory[at : at + size], "a read of a batch")

    async def _burst(self, pieces: list[tuple[int, int, bool]], cut: object) -> None:
        calls: list[Call] = []
        for at, size, writing in pieces:
            calls.append(Call("write", (self._at(at, size), self._fresh(size))) if writing else self._reading(at, size))
        value = next(self._keys)
        calls.append(Call("fetch_add", (self._remote[:8], value)))
        for size in (10, 2000):
            seq = next(self._seq)
            note = Letter(Said.NOTE, seq, self._uncertain, body=pattern(self._key(seq, True), size)).pack()
            calls.append(Call("send", (note,)))
        results = await self.face.together(calls)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if results[len(pieces)] not in self._home.words[0]:
            raise Wrong(f"fetch_add found {results[len(pieces)]:#x} in word 0, which is one of {self._home.words[0]}")
        self._home.words[0] = {(results[len(pieces)] + value) & _MASK}
        for call, result, (at, size, writing) in zip(calls, results, pieces, strict=False):
            if writing:
                self._home.data[at : at + size] = call.args[1]
            else:
                self._same(at, result, "a read of a burst")
        self.tally.op("started", sum(size for _, size, _ in pieces), len(calls))

    def _reading(self, at: int, size: int) -> Call:
        return Call("read", (self._at(at, size),))

    async def _drop(self, pieces: list[tuple[int, int, bool]], cut: object) -> None:
        writes = [(at, self._fresh(size)) for at, size, writing in pieces if writing]
        calls = [Call("write", (self._at(at, len(body)), body)) for at, body in writes]
        calls += [self._reading(at, size) for at, size, writing in pieces if not writing]
        certain = await self.face.drop(calls)
        self.tally.op("dropped", sum(size for _, size, _ in pieces), len(calls))
        for at, body in writes:
            if certain:
                self._home.data[at : at + len(body)] = body
            else:
                await self._settle(at, body)

    # ------------------------------------------------------------ memory

    async def _renew_desk(self, cut: object = None) -> None:
        """Register the local memory anew: what was in flight may still use the old one, which can't be closed then."""
        if self._desk is not None:
            end = time.monotonic() + PATIENCE
            while True:
                try:
                    self._desk.close()
                    break
                except pvl.StateError as error:
                    if time.monotonic() > end:
                        raise
                    self.tally.expected(error, "memory in use")
                await self.face.do("read", self._at(0, 1))
        self._desk_memory = bytearray(DATA)
        self._desk = await self.face.do("register", self._desk_memory)

    async def _grant(self, size: int, cut: object) -> None:
        remote, name = await self._added(size)
        await self._ask(Said.DROP, body=name.encode())
        await self._withdrawn(name)
        if remote.length != size:
            raise Wrong(f"{remote} has {remote.length} bytes instead of {size}")

    async def _added(self, size: int) -> tuple[Any, str]:
        """Let the server add a buffer; read it, write it, and let the server look at it."""
        key, name = next(self._keys), f"added {next(self._keys)}"
        await self._ask(Said.ADD, body=name.encode(), argument=key << 20 | size)
        remote = await self.face.named(name)
        if await self.face.do("read", remote) != pattern(key, size):
            raise Wrong(f"{name} does not have the bytes of its key")
        key = next(self._keys)
        await self.face.do("write", remote, pattern(key, size))
        await self._ask(Said.CHECK_ADDED, body=name.encode(), argument=key)
        self.tally.op("grant", 2 * size)
        return remote, name

    async def _lend(self, size: int, window: bool, cut: object) -> None:
        """Let the server read and write memory of this side, by a region of its own or through a window."""
        key, name = next(self._keys), f"lent {next(self._keys)}"
        memory = bytearray(pattern(key, size))
        if window:
            region = await self.face.do("register", memory, access=_A.LOCAL_WRITE | _A.MW_BIND)
            grant = await self.face.do("grant", region, access=_A.REMOTE_READ | _A.REMOTE_WRITE, name=name)
            await self._borrowed(name, key, memory)
            grant.revoke()
            region.close()
        else:
            with await self.face.do("register", memory, name=name):
                await self._borrowed(name, key, memory)
        self.tally.op("lend by window" if window else "lend", 2 * size)

    async def _borrowed(self, name: str, key: int, memory: bytearray) -> None:
        await self._ask(Said.PULL, body=name.encode(), argument=key)
        key = next(self._keys)
        await self._ask(Said.PUSH, body=name.encode(), argument=key)
        if memory != pattern(key, len(memory)):
            raise Wrong(f"{name} is not what the server has written there")

    async def _refuse(self, cut: object) -> None:
        """Ask for what cannot be: it costs nothing."""
        with suppress(ValueError):
            await self.face.do("send", bytes(MESSAGE + 1))
            raise Wrong("a message of more than the peer receives was sent")
        with suppress(ValueError):
            await self.face.do("write", self._at(0, 8), bytes(9))
            raise Wrong("more bytes were written than there is room for")
        with suppress(ValueError):
            await self.face.do("fetch_add", self._at(1, 8), 1)
            raise Wrong("an atomic took place at an odd address")
        with suppress(IndexError):
            raise Wrong(f"there is {self._remote[HOME - 1 : HOME + 1]}")
        self.tally.op("refused", count=4)

    # ------------------------------------------------------------ ends

    async def _end_orderly(self) -> None:
        await self.face.close()

    async def _end_asked(self) -> None:
        """Have the server close."""
        await self._send(Said.CLOSE)
        with self._expecting(pvl.PeerClosedError):
            await self.face.do("recv")
        with self._expecting(pvl.PeerClosedError):
            await self.face.do("write", self._at(0, 1), b"x")
        await self.face.close()

    async def _end_again(self) -> None:
        """Have the server close, and connect again; the next life goes on with that."""
        await self._send(Said.CLOSE)
        with self._expecting(pvl.PeerClosedError):
            await self.face.do("recv")
        self.face.conn = await self.face.reconnected()
        self.step = AGAIN

    async def _end_traffic(self) -> None:
        """Close while others use the connection; what they write goes where nobody looks."""
        scratch = self._remote[_DATA + DATA :]
        calls = [Call("write", (scratch[:4097], bytes(4097))), Call("read", (scratch,))] * 3
        results = await self.face.close_under(calls)
        for result in results:
            if isinstance(result, pvl.ClosedError):
                self.tally.expected(result, "closed under traffic")
            elif isinstance(result, BaseException):
                raise result

    async def _end_trespass(self) -> None:
        """Use a buffer that has been withdrawn."""
        remote, name = await self._added(5000)
        await self._ask(Said.DROP, body=name.encode())
        await self._withdrawn(name)
        with self._expecting(pvl.StaleBufferError):
            await self.face.do("write", remote, b"trespass")
        with self._expecting(pvl.RemoteAccessError):
            await self.face.do("write", pvl.RemoteBuffer(remote.addr, remote.rkey, remote.length), b"trespass")
        with self._expecting(pvl.ClosedError):
            await self.face.do("read", self._at(0, 1))
        await self.face.close()

    async def _end_forgotten(self) -> None:
        """Leave the connection to the garbage collector."""
        self._desk = None
        self.face.conn = None
        gc.collect()

    def _expecting(self, kind: type[BaseException]) -> _Expecting:
        return _Expecting(self, kind)


class _Expecting:
    """What is done inside fails in one way; anything else is a failure of the soak."""

    def __init__(self, living: Living, kind: type[BaseException]) -> None:
        self._living, self._kind = living, kind

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None:
            raise Wrong(f"no {self._kind.__name__} came")
        if type(error) is not self._kind:
            return False
        self._living.tally.expected(error, "on purpose")
        return True
