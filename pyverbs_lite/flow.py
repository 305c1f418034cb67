"""Flow rules: which packets of the wire go to a QP."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._base.args import check_flags, check_int
from ._base.check import check_ptr, check_rc
from ._base.resource import Resource
from .enums import FlowAttrType, FlowFlags, QPType
from .ffi import CData, ffi, lib
from .flow_spec import FlowSpec
from .flow_spec_action import FlowSpecAction

if TYPE_CHECKING:
    from .qp import QP

__all__ = ["Flow", "FlowAttr"]

_NO_FLAGS = FlowFlags(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowAttr:
    """A flow rule (``struct ibv_flow_attr`` and the parts that follow it).

    Attributes:
        specs: its parts, headers from the outside in and then actions; only ``NORMAL`` rules have some.
        type: whether the parts say what is caught, or all that no other rule catches, or everything.
        priority: rules with a lower number are tried first, 16 bits.
        port: the port whose packets are meant, counted from 1.
        flags: whether packets go on to further rules, or what is sent is meant.

    Raises:
        TypeError, ValueError: a member is of the wrong kind or out of range.

    Verb: ibv_create_flow
    """

    specs: Sequence[FlowSpec | FlowSpecAction] = ()
    type: FlowAttrType = FlowAttrType.NORMAL
    priority: int = 0
    port: int = 1
    flags: FlowFlags = _NO_FLAGS

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", tuple(self.specs))
        for spec in self.specs:
            if not isinstance(spec, (FlowSpec, FlowSpecAction)):
                raise TypeError(f"a flow rule is made of FlowSpec… values, not of {spec!r}")
        if not isinstance(self.type, FlowAttrType):
            raise TypeError(f"type must be a member of FlowAttrType, not {self.type!r}")
        if self.specs and self.type != FlowAttrType.NORMAL:
            raise ValueError(f"only a NORMAL rule has parts, and this one is {self.type.name}")
        check_int("the number of parts", len(self.specs), 0, 255)
        check_int("priority", self.priority, 0, 0xFFFF)
        check_int("port", self.port, 1, 255)
        check_flags("flags", self.flags, FlowFlags)

    def pack(self) -> bytes:
        """Return the C struct with its parts behind it, each as long as its own ``size`` says."""
        parts = b"".join(spec.pack() for spec in self.specs)
        raw = ffi.new("struct ibv_flow_attr *")
        raw.type, raw.priority, raw.port, raw.flags = self.type, self.priority, self.port, int(self.flags)
        raw.num_of_specs, raw.size = len(self.specs), ffi.sizeof(raw[0]) + len(parts)
        return bytes(ffi.buffer(raw)) + parts


class Flow(Resource):
    """A flow rule in force, made by ``QP.create_flow``; closing it takes it out of force.

    Attributes:
        qp: where the packets go.
        attr: the rule.

    Verb: ibv_create_flow
    """

    def __init__(self, qp: QP, attr: FlowAttr) -> None:
        if not isinstance(attr, FlowAttr):
            raise TypeError(f"a flow is made from a FlowAttr, not {attr!r}")
        if qp.qp_type not in (QPType.RAW_PACKET, QPType.UD):
            raise ValueError(f"packets can be steered to RAW_PACKET and UD QPs, and {qp!r} is of another type")
        needs = [thing for spec in attr.specs if (thing := spec._refers_to) is not None]
        for thing in needs:
            if (context := getattr(thing, "context", None)) is not qp.context:
                raise ValueError(f"{thing!r} belongs to {context!r}, and the QP to {qp.context!r}")
        blob = ffi.new("unsigned char[]", attr.pack())
        handle = lib.ibv_create_flow(qp._handle, ffi.cast("struct ibv_flow_attr *", blob))
        self.qp = qp
        self.attr = attr
        handle = check_ptr("ibv_create_flow", handle, _hint(ffi.errno))
        self._own(handle, _destroy_flow, qp, *dict.fromkeys(needs), label=f"Flow of {qp!r}")


def _hint(number: int) -> str:
    return "steering raw packets needs CAP_NET_RAW" if number == errno.EPERM else ""


def _destroy_flow(handle: CData) -> None:
    check_rc("ibv_destroy_flow", lib.ibv_destroy_flow(handle))
