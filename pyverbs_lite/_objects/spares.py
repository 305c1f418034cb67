"""What a connection was made of, kept for the next one of the same open device.

To make a QP and what goes with it takes the kernel much longer than to connect it. So where a connection on a
``Context`` of the caller's has ended in good order, its QP goes to RESET, and all of it waits there. Nothing that a
peer could know of outlasts the connection: what its caller has registered is gone before, the numbers of its packets
are random ones, and the protection domain has another ``domain``, and another ``PD`` where a caller has seen one.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from .._base.args import check_int
from .._base.resource import Resource
from ..errors import VerbsError

if TYPE_CHECKING:
    from ..comp_channel import CompChannel
    from ..cq import CQ
    from ..mr import MR, MRSlice
    from ..pd import PD
    from ..qp import QP

__all__ = ["Parts", "SpareKeeper", "relieve_spares"]

#: Connections' worth of objects that may wait on one context, and bytes of registered memory in all of them, which
#: count against RLIMIT_MEMLOCK.
MOST_SPARES, MOST_BYTES = 4, 8 << 20
_keepers: weakref.WeakSet[SpareKeeper] = weakref.WeakSet()


class Parts:
    """The verbs objects that one connection is made of, the oldest first.

    Attributes:
        key: what another connection must be like, to be made of the same; None where these are for one only.
        owner: whose they are; nobody's while they wait.
    """

    __slots__ = ("channel", "cq", "key", "owner", "pd", "qp", "ring", "staging")

    def __init__(
        self, key: object, pd: PD, channel: CompChannel, cq: CQ, staging: MRSlice, ring: MRSlice | None, qp: QP
    ) -> None:
        self.key = key
        self.owner: object = None
        self.pd, self.channel, self.cq, self.staging, self.ring, self.qp = pd, channel, cq, staging, ring, qp

    @property
    def things(self) -> list[Resource]:
        """All of them, the oldest first."""
        return [self.pd, self.channel, self.cq, *self._regions, self.qp]

    @property
    def _regions(self) -> list[MR]:
        memory, ring = self.staging.mr, self.ring
        return [memory] if ring is None or ring.mr is memory else [memory, ring.mr]

    @property
    def nbytes(self) -> int:
        """How much memory is registered."""
        return sum([region.length for region in self._regions])

    @property
    def alone(self) -> bool:
        """Whether all are there, and nothing else that was made of any of them."""
        handles = [thing._owned for thing in self.things]
        for handle in handles:
            if handle.cdata is None:
                return False
            for child in handle.children:
                if child not in handles:
                    return False
        return True

    def hand_on(self) -> None:
        """Put another ``PD`` in place of the present one, which is closed to whoever has it."""
        old, new = self.pd, type(self.pd).__new__(type(self.pd))
        new.context = old.context
        old._hand_over(new)
        self.pd = self.qp.pd = self.staging.mr.pd = new
        if self.ring is not None:
            self.ring.mr.pd = new
        self.qp._rules = self.qp._rules._replace(pd=new)

    def hush(self, quiet: bool) -> None:
        """Say whether these are the library's own: then nobody is told that they were never closed."""
        self.pd._owned.quiet = self.channel._owned.quiet = quiet

    def close(self) -> None:
        """Destroy all of them."""
        for thing in reversed(self.things):
            thing.close()


class SpareKeeper(Resource):
    """The part of a ``Context`` that keeps what its connections were made of."""

    def _keep_spares(self) -> None:
        """Begin to."""
        #: Changed by one step at a time, each of which is whole: any thread, and any signal handler, may come between.
        self._spares: list[Parts] = []
        self._most_spares = MOST_SPARES
        _keepers.add(self)

    @property
    def max_spares(self) -> int:
        """How many connections' worth of objects (PD, channel, CQ, QP, receive ring) wait here for the next: at most 4.

        A ``connect`` or ``accept`` with this context as its ``device`` takes them, if it asks for the same sizes. They
        hold up to 8 MiB of registered memory in all; where memory to register runs out they are let go of. 0 keeps
        none.
        """
        return self._most_spares

    @max_spares.setter
    def max_spares(self, count: int) -> None:
        self._most_spares = check_int("max_spares", count, 0, MOST_SPARES)
        self._drop_spares(count)

    def trim(self) -> int:
        """Destroy what waits for the next connection; return for how many that was (see ``max_spares``).

        Verb: ibv_destroy_qp, ibv_dereg_mr, ibv_destroy_cq, ibv_destroy_comp_channel, ibv_dealloc_pd
        """
        return self._drop_spares(0)

    def _drop_spares(self, left: int) -> int:
        count = 0
        while len(self._spares) > left:
            with suppress(IndexError):  # another was faster
                self._spares.pop(0).close()
                count += 1
        return count

    def _take_spare(self, key: object, owner: object) -> Parts | None:
        """Return what fits a connection, now of that owner."""
        for parts in self._spares[::-1]:
            if parts.key == key:
                with suppress(ValueError):  # another was faster
                    self._spares.remove(parts)
                    parts.owner = owner
                    parts.hush(quiet=False)
                    return parts
        return None

    def _lay_by(self, parts: Parts, *, anew: bool) -> bool:
        """Keep what a connection is made of no more, if there is room; say whether.

        Args:
            anew: whether there must be another ``PD``, because the caller has seen this one.
        """
        waiting = sum([other.nbytes for other in self._spares])
        full = len(self._spares) >= self._most_spares or waiting + parts.nbytes > MOST_BYTES
        if full or self.closed or not parts.alone:
            return False
        if anew:
            parts.hand_on()
        parts.pd.__dict__.pop("_domain", None)
        parts.hush(quiet=True)
        parts.owner = None
        self._spares.append(parts)
        with suppress(VerbsError):  # whatever becomes of others, these wait
            self._drop_spares(self._most_spares)  # where others did the same meanwhile
        return True

    def _after_destroy(self) -> None:
        super()._after_destroy()
        self._spares = []


def relieve_spares() -> int:
    """Let go of what waits anywhere, for pinned memory is limited; return how much that was."""
    count = 0
    for keeper in tuple(_keepers):
        if not (keeper.closed or keeper._owned.foreign):
            with suppress(VerbsError):
                count += keeper.trim()
    return count
