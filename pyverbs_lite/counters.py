"""Counters of what flow rules let through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._base.args import check_int
from ._base.check import check_ptr, check_rc
from ._base.resource import Resource
from .device import Context
from .enums import CounterDescription, ReadCountersFlags
from .errors import StateError
from .ffi import CData, ffi, lib

if TYPE_CHECKING:
    from .flow import Flow

__all__ = ["Counters"]

_MAX32 = (1 << 32) - 1


class Counters(Resource):
    """A set of counters, made by ``Context.create_counters``: attach its points, then put it into flow rules.

    ::

        counters = context.create_counters()
        counters.attach(CounterDescription.PACKETS, 0)
        counters.attach(CounterDescription.BYTES, 1)
        flow = qp.create_flow(FlowAttr(specs=[FlowSpecEth(dst_mac=mac), FlowSpecActionCount(counters)]))
        packets, octets = counters.read()

    Attributes:
        points: index -> what is counted there.

    Verb: ibv_create_counters
    """

    def __init__(self, context: Context) -> None:
        raw = ffi.new("struct ibv_counters_init_attr *")
        handle = check_ptr("ibv_create_counters", lib.ibv_create_counters(context._handle, raw))
        self.context = context
        self.points: dict[int, CounterDescription] = {}
        self._own(handle, _destroy_counters, context, label=f"Counters of {context.name}")

    def attach(self, counter_desc: CounterDescription, index: int, flow: Flow | None = None) -> None:
        """Say what to count, and where in the result it stands.

        Args:
            flow: the rule whose packets count. None for the usual case: every rule that is made afterwards with a
                ``FlowSpecActionCount`` of these counters.

        Raises:
            StateError: the index is taken.
            VerbsOSError: the verb refused, for example because a rule uses the counters already.

        Verb: ibv_attach_counters_point_flow
        """
        if not isinstance(counter_desc, CounterDescription):
            raise TypeError(f"counter_desc must be a member of CounterDescription, not {counter_desc!r}")
        check_int("index", index, 0, _MAX32 - 1)
        if index in self.points:
            raise StateError(f"index {index} counts {self.points[index].name} already")
        raw = ffi.new("struct ibv_counter_attach_attr *")
        raw.counter_desc, raw.index = counter_desc, index
        pointer = ffi.NULL if flow is None else flow._handle
        with self._owned.lock:  # nobody closes it meanwhile
            rc = lib.ibv_attach_counters_point_flow(self._handle, raw, pointer)
            check_rc("ibv_attach_counters_point_flow", rc)
            self.points[index] = counter_desc

    def read(self, ncounters: int | None = None, *, prefer_cached: bool = False) -> list[int]:
        """Return the counters by index, 64 bits each.

        Args:
            ncounters: how many; by default up to the highest index that was attached.
            prefer_cached: take what the driver read last, where it keeps that, and do not ask the device.

        Raises:
            StateError: nothing was attached, so that there is nothing to read.

        Verb: ibv_read_counters
        """
        self._handle  # noqa: B018 - closed counters say so first
        if not self.points:
            raise StateError("these counters have no points: attach() says what to count")
        count = max(self.points) + 1 if ncounters is None else check_int("ncounters", ncounters, 1, _MAX32)
        values = ffi.new("uint64_t[]", count)
        flags = ReadCountersFlags.PREFER_CACHED if prefer_cached else ReadCountersFlags(0)
        with self._owned.lock:  # nobody closes it meanwhile
            check_rc("ibv_read_counters", lib.ibv_read_counters(self._handle, values, count, int(flags)))
        return list(ffi.unpack(values, count))


def _destroy_counters(handle: CData) -> None:
    check_rc("ibv_destroy_counters", lib.ibv_destroy_counters(handle))
