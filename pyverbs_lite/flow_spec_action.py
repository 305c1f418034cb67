"""The parts of a flow rule that say what is done with the packets it catches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ._base.args import check_int
from ._base.resource import Resource
from .counters import Counters
from .enums import FlowSpecType
from .ffi import CData, ffi
from .flow_action import FlowActionESP

__all__ = [
    "FlowSpecAction",
    "FlowSpecActionCount",
    "FlowSpecActionDrop",
    "FlowSpecActionHandle",
    "FlowSpecActionTag",
]


class FlowSpecAction:
    """Base of what is done with the packets that a rule catches."""

    __slots__ = ()
    _type: ClassVar[FlowSpecType]
    _struct: ClassVar[str]

    def pack(self) -> bytes:
        """Return the C struct: type, size and, in host order, what the action needs."""
        raw = ffi.new(f"struct {self._struct} *")
        raw.type, raw.size = self._type, ffi.sizeof(raw[0])
        self._fill(raw)
        return bytes(ffi.buffer(raw))

    def _fill(self, raw: CData) -> None:
        """Write what the action needs."""

    @property
    def _refers_to(self) -> Resource | None:
        return None


@dataclass(frozen=True, slots=True)
class FlowSpecActionTag(FlowSpecAction):
    """Mark packets (``struct ibv_flow_spec_action_tag``): ``WCView.flow_tag`` shows ``tag_id``, 24 bits."""

    _type = FlowSpecType.ACTION_TAG
    _struct = "ibv_flow_spec_action_tag"

    tag_id: int

    def __post_init__(self) -> None:
        check_int("tag_id (24 bits)", self.tag_id, 0, (1 << 24) - 1)

    def _fill(self, raw: CData) -> None:
        raw.tag_id = self.tag_id


@dataclass(frozen=True, slots=True)
class FlowSpecActionDrop(FlowSpecAction):
    """Drop packets (``struct ibv_flow_spec_action_drop``)."""

    _type = FlowSpecType.ACTION_DROP
    _struct = "ibv_flow_spec_action_drop"


@dataclass(frozen=True, slots=True)
class FlowSpecActionCount(FlowSpecAction):
    """Count packets (``struct ibv_flow_spec_counter_action``)."""

    _type = FlowSpecType.ACTION_COUNT
    _struct = "ibv_flow_spec_counter_action"

    counters: Counters

    def __post_init__(self) -> None:
        if not isinstance(self.counters, Counters):
            raise TypeError(f"counters must be of class Counters, not {self.counters!r}")

    def _fill(self, raw: CData) -> None:
        raw.counters = self.counters._handle

    @property
    def _refers_to(self) -> Resource:
        return self.counters


@dataclass(frozen=True, slots=True)
class FlowSpecActionHandle(FlowSpecAction):
    """Apply an action that was made before, such as decryption (``struct ibv_flow_spec_action_handle``)."""

    _type = FlowSpecType.ACTION_HANDLE
    _struct = "ibv_flow_spec_action_handle"

    action: FlowActionESP

    def __post_init__(self) -> None:
        if not isinstance(self.action, FlowActionESP):
            raise TypeError(f"action must be of class FlowActionESP, not {self.action!r}")

    def _fill(self, raw: CData) -> None:
        raw.action = self.action._handle

    @property
    def _refers_to(self) -> Resource:
        return self.action
