"""The figures of a soak."""

from __future__ import annotations

from .plan import Settings
from .tally import Tally

__all__ = ["table"]

_MIB = 1 << 20


def _rows(tally: Tally, first: str) -> list[tuple[str, int]]:
    return sorted(
        (name.removeprefix(f"{first} "), count) for name, count in tally.items() if name.startswith(f"{first} ")
    )


def table(settings: Settings, tally: Tally, server: Tally, memory: tuple[int, int, int], seconds: float) -> str:
    """Lay them out."""
    lines = [f"{'operation':<16}{'by the peers':>14}{'MiB':>10}{'by the server':>16}{'MiB':>10}"]
    kinds = sorted({name[3:] for name in (*tally, *server) if name.startswith("op ")})
    for kind in kinds:
        cells = [(each[f"op {kind}"], each[f"bytes {kind}"] / _MIB) for each in (tally, server)]
        lines.append(f"{kind:<16}{cells[0][0]:>14}{cells[0][1]:>10.1f}{cells[1][0]:>16}{cells[1][1]:>10.1f}")
    total = sum(tally[f"op {kind}"] for kind in kinds)
    size = sum(tally[f"bytes {kind}"] for kind in kinds)
    lines += [f"{'all':<16}{total:>14}{size / _MIB:>10.1f}", ""]
    lines.append(
        f"{seconds:.0f} s: {total / seconds:.0f} operations/s, {size / 1e6 / seconds:.1f} MB/s; every byte checked"
    )
    made, killed = tally["connections made"], tally["peers killed"]
    ends = ", ".join(f"{count} {name}" for name, count in _rows(tally, "end"))
    lines.append(
        f"connections: {made} made, {server['connections at a time']} at a time at most; ends: {ends}, {killed} peers"
        f" killed with {tally['processes killed']} processes"
    )
    lines.append("served by: " + ", ".join(f"{count} {name}" for name, count in _rows(tally, "way")))
    lines.append("cuts: " + ", ".join(f"{count} by {name}" for name, count in _rows(tally, "cut")))
    for who, each in (("peers", tally), ("server", server)):
        lines.append(f"expected errors of the {who}: " + ", ".join(f"{n} {name}" for name, n in _rows(each, "error")))
    lines.append(f"no good peers: {tally['vandals']}; unexpected errors: 0")
    peak, pinned, growth = memory
    lines.append(
        f"server: {peak / 1024:.0f} MiB resident and {pinned / 1024:.0f} MiB pinned at most, {growth / 1024:+.1f} MiB"
        " from the second quarter to the last; descriptors, threads, pinned memory, contexts, PDs, CQs, QPs and MRs are"
        " back to where they began, here and in the peers' processes"
    )
    return "\n".join(lines)
