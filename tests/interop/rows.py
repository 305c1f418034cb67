"""The rows of the interop table, and the reasons of its holes: what the tests run, and what the page shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

OURS = ("client", "server")
DEVICES = ("rxe", "siw")


@dataclass(frozen=True)
class Row:
    """One run: a tool or library of others against a program of ours.

    Attributes:
        peer: the tool's or library's name.
        options: those that matter, of the tool as of ours.
        device: rxe or siw.
        ours: the part that we play.
        program: ours, a path in the repository.
        verdict: what has to be true in the end.
    """

    peer: str
    options: str
    device: str
    ours: str
    program: str
    verdict: str

    def __str__(self) -> str:
        words = [self.peer, *self.options.replace(",", "").split(), self.device, self.ours]
        return "-".join(word.strip("-") for word in words)


@dataclass(frozen=True)
class Hole:
    """What cannot be: a tool over a device, or in a part, and why. A test shows each."""

    peer: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.peer} {self.where}"


PINGPONG = ("rc", "uc", "ud", "srq")
_ENDS = "both end with 0, and count all bytes"
_PAGES = "the server finds the client's mark in each page"
_WRONG = "the server finds no mark, and says so"


def _pingpong() -> Iterator[Row]:
    for kind in PINGPONG:
        size = 1500 if kind == "ud" else 20000  # a datagram is one packet, here of up to 4096 bytes; else it is many
        for options, verdict in (
            (f"-c -s {size}", f"{_ENDS}; {_PAGES}"),
            ("-e", _ENDS),
            (f"-c -s {size}, wrong data", _WRONG),
        ):
            if kind == "srq" and "wrong" in options:
                continue  # see HOLES
            for ours in OURS:
                yield Row(f"ibv_{kind}_pingpong", options, "rxe", ours, f"examples/{kind}_pingpong.py", verdict)


_RPING = "examples/rping.py"


def _rping() -> Iterator[Row]:
    for device in DEVICES:
        for ours in OURS:
            yield Row("rping", "-v -V -C 10", device, ours, _RPING, "each ping comes back unchanged, and is shown")
            yield Row(
                "rping", "-V -S 60000 -C 5", device, ours, _RPING, "as many bytes as it takes come back unchanged"
            )
    for ours in OURS:
        yield Row("rping", "-q -V -C 4", "rxe", ours, _RPING, "each ping comes back unchanged, over a QP made by hand")
    yield Row("rping", "-V -C 3, over IPv6", "rxe", "client", _RPING, "each ping comes back unchanged")
    yield Row("rping", "-V -C 3, over IPv6", "rxe", "server", _RPING, "each ping comes back unchanged")
    yield Row("rping", "-V -C 3, wrong data", "rxe", "client", _RPING, "the client finds that its ping was changed")
    yield Row("rping", "-V -C 3, wrong data", "rxe", "server", _RPING, "the client finds that its ping was changed")


_HERE = "tests/interop/peers"
_STATUS = "return status 0, and every message at both ends"
_ECHO = "; what comes back is what we sent"


def _cm_tools() -> Iterator[Row]:
    for device in DEVICES:
        for ours, verdict in (("client", _STATUS), ("server", _STATUS + _ECHO)):
            yield Row("ucmatose", "-c 3 -C 7", device, ours, f"{_HERE}/ucmatose.py", verdict)
    for device in DEVICES:
        for tool, ours in (("rdma_server", "client"), ("rdma_client", "server")):
            yield Row(tool, "", device, ours, f"{_HERE}/rdma_client_server.py", "end 0, and its 16 bytes arrive")
    for ours, verdict in (("client", _STATUS + _ECHO), ("server", _STATUS)):
        yield Row("udaddy", "-c 2 -C 7", "rxe", ours, f"{_HERE}/udaddy.py", verdict)
    yield Row("mckey", "-C 6", "rxe", "client", f"{_HERE}/mckey.py", "return status 0: it got all datagrams")
    yield Row("mckey", "-s -C 6", "rxe", "server", f"{_HERE}/mckey.py", "we get all its datagrams; see below")
    yield Row("mckey", "-C 6, by mckey -s", "rxe", "neither", "", "return status 0: it got all datagrams; see below")


LIBRARIES = {"pyverbs": "by_hand_pyverbs.py", "ibverbs": "by_hand_ibverbs.py"}


def _libraries() -> Iterator[Row]:
    for name in LIBRARIES:
        for ours in OURS:
            yield Row(
                name,
                "RC by hand",
                "rxe",
                ours,
                f"{_HERE}/by_hand_pvl.py",
                "sends, writes, reads and atomics both ways; each side compares every byte",
            )


FAMILIES = {"pingpong": _pingpong, "rping": _rping, "cm_tools": _cm_tools, "libraries": _libraries}
ROWS = [row for family in FAMILIES.values() for row in family()]

_BY_HAND = "iWARP moves a QP to RTS over a TCP connection of librdmacm's; by hand there is none to give it"
_NO_DATAGRAMS = "iWARP has connections only: no UD, and so no multicast"
HOLES = [
    *(Hole(f"ibv_{kind}_pingpong", "over siw", _BY_HAND) for kind in ("rc", "srq")),
    Hole("ibv_uc_pingpong", "over siw", "siw has RC only"),
    Hole("ibv_ud_pingpong", "over siw", _NO_DATAGRAMS),
    Hole("udaddy", "over siw", _NO_DATAGRAMS),
    Hole("mckey", "over siw", _NO_DATAGRAMS),
    *(Hole(name, "over siw", _BY_HAND) for name in LIBRARIES),
    *(
        Hole("ibv_srq_pingpong", f"wrong data, we are the {ours}", "its memory is zero before it is marked with zeros")
        for ours in OURS
    ),
]


def of(family: str) -> list[Row]:
    """Return the rows of one family, for a test to be parametrised with."""
    return list(FAMILIES[family]())
