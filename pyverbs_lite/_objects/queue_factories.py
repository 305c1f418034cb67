"""Methods by which a context makes extended completion queues, and what receive-side scaling and steering need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from .._base.resource import Resource
from ..enums import CreateCQAttrFlags, CreateCQWCFlags

if TYPE_CHECKING:
    from ..counters import Counters
    from ..cq import CompChannel
    from ..cq_ex import CQEx
    from ..flow_action import FlowActionESP, FlowActionESPAttr
    from ..pd import PD
    from ..wq import WQ, RwqIndTable, WQInitAttr

__all__ = ["QueueFactories"]


class QueueFactories(Resource):
    """The part of a ``Context`` that makes extended CQs, WQs, indirection tables, counters and flow actions."""

    def create_cq_ex(
        self,
        cqe: int,
        channel: CompChannel | None = None,
        *,
        comp_vector: int = 0,
        wc_flags: CreateCQWCFlags = CreateCQWCFlags.STANDARD_FLAGS,
        flags: CreateCQAttrFlags | None = None,
        parent_domain: PD | None = None,
    ) -> CQEx:
        """Make a completion queue whose completions carry what ``wc_flags`` ask for.

        Args:
            wc_flags: which fields; timestamps, VLAN, flow tag and tag matching only where the device has them.
            flags: ``SINGLE_THREADED`` and ``IGNORE_OVERRUN``.
            parent_domain: where it allocates from.

        Raises:
            ValueError: ``cqe`` is not 1 to the device's ``max_cqe``, or flags have no name.
            UnsupportedError: the device does not have all of the flags.

        Verb: ibv_create_cq_ex
        """
        options = {"wc_flags": wc_flags, "flags": flags, "parent_domain": parent_domain}
        return cast("CQEx", self._make("CQEx", cqe, channel, comp_vector=comp_vector, **options))

    def create_wq(self, init_attr: WQInitAttr) -> WQ:
        """Make a receive work queue, in RESET.

        Raises:
            UnsupportedError: the device has none.

        Verb: ibv_create_wq
        """
        return cast("WQ", self._make("WQ", init_attr))

    def create_rwq_ind_table(self, wqs: Sequence[WQ]) -> RwqIndTable:
        """Make an indirection table of 1, 2, 4, 8 … entries, in which a WQ may stand several times.

        Raises:
            UnsupportedError: the device has none.

        Verb: ibv_create_rwq_ind_table
        """
        return cast("RwqIndTable", self._make("RwqIndTable", wqs))

    def create_counters(self) -> Counters:
        """Make counters for flow rules.

        Raises:
            UnsupportedError: the device has none.

        Verb: ibv_create_counters
        """
        return cast("Counters", self._make("Counters"))

    def create_flow_action_esp(self, attr: FlowActionESPAttr) -> FlowActionESP:
        """Make an IPsec action for flow rules.

        Raises:
            UnsupportedError: the device has none.

        Verb: ibv_create_flow_action_esp
        """
        return cast("FlowActionESP", self._make("FlowActionESP", attr))
