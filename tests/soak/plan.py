"""What every peer is going to do: a pure function of the seed, so that a run can be had again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AUTHKEY", "DATA", "HOME", "MESSAGE", "WORDS", "Life", "Settings", "Step", "life_of", "way_of"]

#: Of a peer's home, the range of the server's memory that is its own: the whole, words for atomics, what is checked.
HOME, WORDS, DATA = 64 << 10, 8, 56 << 10
#: What the peers of one of the servers must know.
AUTHKEY = b"known to every peer"
#: The longest message, header included.
MESSAGE = 4096

#: How a call is cut short, and after how many seconds.
_CUTS = ("timeout", "cancel", "interrupt")
_AFTER = (0.0, 0.0, 0.0002, 0.001, 0.003, 0.008)
_STEPS = {
    "note": 6,
    "echo": 12,
    "take": 8,
    "write": 14,
    "write_imm": 4,
    "read": 14,
    "fetch_add": 7,
    "compare_swap": 5,
    "write_many": 4,
    "read_many": 4,
    "batch": 4,
    "burst": 6,
    "drop": 4,
    "grant": 2,
    "lend": 2,
    "renew_desk": 2,
    "refuse": 2,
    "check": 2,
    "pause": 2,
}
_ENDS = {"orderly": 8, "asked": 3, "again": 4, "traffic": 5, "trespass": 2, "forgotten": 2}


#: Whom a peer connects to, by the last hexadecimal digit of its number.
_WAYS = {0: "server", 8: "server", 1: "aio", 5: "aio", 9: "threads", 3: "cm", 6: "cm", 13: "cm"}


def way_of(peer: int) -> str:
    """Say which of the server's faces a peer connects to."""
    return _WAYS.get(peer % 16, "aio_server")


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for."""

    seed: int
    seconds: float
    peers: int

    def groups(self) -> dict[str, list[list[int]]]:
        """Say which peers live in which process: with an event loop, with threads, and in one that is to be killed."""
        threads = max(2, self.peers // 12)
        mortal = max(2, self.peers // 14)
        ids = list(range(self.peers))
        rest, killers = ids[threads + mortal :], ids[threads : threads + mortal]
        processes = max(1, -(-len(rest) // 40))
        return {
            "threads": [ids[:threads]],
            "mortal": [part for part in (killers[::2], killers[1::2]) if part],
            "aio": [rest[i::processes] for i in range(processes)],
        }


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do."""

    number: int
    kind: str
    args: dict[str, Any]
    cut: tuple[str, float] | None = None

    def __str__(self) -> str:
        args = ", ".join(f"{name}={value!r}" for name, value in self.args.items())
        return f"step {self.number}: {self.kind}({args})" + (f" cut by {self.cut}" if self.cut else "")


@dataclass(frozen=True, slots=True)
class Life:
    """What a peer does between connecting and the end of that connection."""

    peer: int
    number: int
    own_context: bool
    tuning: dict[str, int]
    connect_cut: float | None
    end: str
    steps: list[Step] = field(repr=False)


def _choose(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _size(rng: random.Random, most: int) -> int:
    """Draw a size: inline, of a cell, or more than one."""
    return rng.randint(1, min(most, rng.choice((8, 64, 600, 4096, 4097, 16384, 40000))))


def _range(rng: random.Random) -> tuple[int, int]:
    size = _size(rng, DATA)
    return rng.randint(0, DATA - size), size


def _pieces(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Draw ranges that do not overlap, in any order; some continue each other."""
    slot = DATA // count
    found = [(i * slot, slot if rng.random() < 0.3 else rng.randint(1, slot)) for i in range(count)]
    rng.shuffle(found)
    return found


def _args(rng: random.Random, kind: str) -> dict[str, Any]:
    if kind in ("write", "write_imm", "read"):
        at, size = _range(rng)
        into = {"into": rng.choice(("none", "buffer", "desk", "array"))} if kind == "read" else {}
        source = {"source": rng.choice(("bytes", "bytes", "desk", "array"))} if kind == "write" else {}
        return {"at": at, "size": size, **into, **source}
    if kind == "note":
        return {"size": rng.randint(0, min(MESSAGE - 64, rng.choice((16, 500, 4000))))}
    if kind == "echo":
        return {name: rng.randint(0, min(MESSAGE - 64, rng.choice((16, 500, 4000)))) for name in ("size", "reply")}
    if kind in ("fetch_add", "compare_swap"):
        return {"word": rng.randrange(WORDS), "value": rng.getrandbits(rng.choice((3, 40, 64)))}
    if kind in ("write_many", "read_many"):
        return {"pieces": _pieces(rng, rng.choice((1, 3, 30, 200)))}
    if kind == "batch":
        return {"pieces": [(at, size, rng.random() < 0.5) for at, size in _pieces(rng, rng.choice((1, 4, 24)))]}
    if kind in ("burst", "drop"):
        return {"pieces": [(at, size, rng.random() < 0.5) for at, size in _pieces(rng, rng.randint(2, 12))]}
    if kind in ("grant", "lend"):
        window = {"window": rng.random() < 0.5} if kind == "lend" else {}
        return {"size": rng.choice((8, 5000, 20000)), **window}
    if kind == "pause":
        return {"seconds": rng.choice((0.001, 0.01, 0.05))}
    return {}


def life_of(settings: Settings, peer: int, number: int) -> Life:
    """Return what a peer does in one of its lives."""
    rng = random.Random(f"{settings.seed}/{peer}/{number}")
    steps = []
    for i in range(rng.randint(20, 160)):
        kind = _choose(rng, _STEPS)
        cut = (rng.choice(_CUTS), rng.choice(_AFTER)) if rng.random() < 0.15 else None
        steps.append(Step(i, kind, _args(rng, kind), cut))
    return Life(
        peer,
        number,
        own_context=rng.random() < 0.1,
        tuning={
            "send_depth": rng.choice((4, 16, 64)),
            "recv_depth": rng.choice((6, 8, 16)),
            "max_message_size": MESSAGE,
        },
        connect_cut=rng.choice((0.0, 0.002, 0.01, 0.05)) if rng.random() < 0.08 else None,
        end=_choose(rng, _ENDS),
        steps=steps,
    )
