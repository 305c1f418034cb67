"""Devices as librdmacm has opened them: borrowed, and never closed here."""

from __future__ import annotations

import threading

from ._base.check import check_ptr
from ._objects.device_attr import known
from .device import Context
from .enums import TransportType
from .ffi import CData, ffi, lib

__all__ = ["CMContext", "borrow_context"]

_contexts: dict[int, CMContext] = {}
_lock = threading.RLock()


class CMContext(Context):
    """A device that librdmacm has opened; all ``CMID`` objects on the device share it.

    It is a ``Context`` like any other, but librdmacm's: closing it closes what was made from it, and leaves the device
    open. Nobody needs to close it.

    Verb: rdma_get_devices, rdma_free_devices
    """

    def __init__(self, verbs: CData) -> None:
        # Having the list keeps librdmacm from closing a device that was unplugged.
        held = check_ptr("rdma_get_devices", lib.rdma_get_devices(ffi.NULL))
        self.name = ffi.string(lib.ibv_get_device_name(verbs.device)).decode()
        self.transport_type = known(TransportType, verbs.device.transport_type)
        self._own(verbs, _Release(held), label=f"CMContext of {self.name}")
        self._finalizer.atexit = False  # borrowed for as long as the process lives
        self._begin()

    def _after_destroy(self) -> None:
        with _lock:
            for key in [key for key, context in _contexts.items() if context is self]:
                del _contexts[key]


class _Release:
    """Gives the list back; the device itself is librdmacm's to close."""

    __slots__ = ("held",)

    def __init__(self, held: CData) -> None:
        self.held = held

    def __call__(self, verbs: CData) -> None:
        lib.rdma_free_devices(self.held)


def borrow_context(verbs: CData) -> CMContext:
    """Return the one object for a ``struct ibv_context *`` of librdmacm's."""
    key = int(ffi.cast("uintptr_t", verbs))
    with _lock:
        context = _contexts.get(key)
        if context is None or context.closed or context._owned.foreign:
            context = _contexts[key] = CMContext(verbs)
        return context
