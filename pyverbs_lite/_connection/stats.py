"""What a connection has done, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from typing_extensions import Self

from ..ffi import CData

__all__ = ["ConnectionStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStats:
    """Counters of one connection since it was made; a snapshot, which the next look does not change.

    They are kept in C, where an operation is posted or completed, so that they cost nothing. What is counted are
    requests as the device sees them: a transfer longer than the port's ``max_msg_sz`` is several, and pieces of a list
    or a batch that continue each other are one. What the library sends for itself is in ``in_flight`` only.

    Attributes:
        sends, send_bytes: messages.
        recvs, recv_bytes: messages that arrived, and without bytes the notices of RDMA writes, taken or not.
        writes, write_bytes: RDMA writes.
        reads, read_bytes: RDMA reads.
        atomics: ``fetch_add`` and ``compare_swap``.
        errors: requests that failed, but for those that were flushed because of that.
        polls: how often a thread, or an event loop, began to look for completions.
        sleeps: how often a thread slept until there was something; an event loop sleeps elsewhere.
        credit_waits: messages that had to wait because the peer had no receive for them.
        registrations: how often this connection registered memory, with a name or without.
        in_flight, in_flight_peak: requests in flight now, and most of all so far.
    """

    sends: int
    send_bytes: int
    recvs: int
    recv_bytes: int
    writes: int
    write_bytes: int
    reads: int
    read_bytes: int
    atomics: int
    errors: int
    polls: int
    sleeps: int
    credit_waits: int
    registrations: int
    in_flight: int
    in_flight_peak: int

    @classmethod
    def of(cls, c: CData) -> Self:
        """Take the values of a ``struct pvl_stats *``."""
        return cls(**{field.name: int(getattr(c, field.name)) for field in fields(cls)})

    @classmethod
    def total(cls, several: Iterable[Self]) -> Self:
        """Add up those of several connections; of the peaks, the highest counts."""
        each = tuple(several)
        sums = {field.name: sum(getattr(stats, field.name) for stats in each) for field in fields(cls)}
        return cls(**{**sums, "in_flight_peak": max((stats.in_flight_peak for stats in each), default=0)})
