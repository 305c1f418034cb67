"""Tensors for tests: of the host through DLPack, and of accelerators that are not there."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from pyverbs_lite._memory import dlpack as _dlpack

_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Bare:
    """An array of numpy that shows nothing but its ``__dlpack__``.

    Args:
        known: the arguments that its ``__dlpack__`` knows; what it is given is noted in ``asked``.
    """

    def __init__(self, array: Any, known: tuple[str, ...] = ("max_version", "copy"), **forced: Any) -> None:
        self.array, self.known, self.forced = array, known, forced
        self.asked: list[dict[str, Any]] = []

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        if unknown := set(options) - set(self.known):
            raise TypeError(f"unexpected {unknown}")
        return self.array.__dlpack__(**{**options, **self.forced})

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Made:
    """A tensor whose capsule is written here, member by member; ``deleted`` counts the calls of its deleter."""

    def __init__(
        self,
        *,
        addr: int = 0,
        shape: tuple[int, ...] = (64,),
        strides: tuple[int, ...] | None = None,
        bits: int = 8,
        lanes: int = 1,
        offset: int = 0,
        device: int = 2,
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
        deleter: bool = True,
    ) -> None:
        self.deleted: list[int] = []
        self.device = device
        self._call = _dlpack._DELETER(self.deleted.append)
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides) if strides is not None else None
        self.managed: Any = _dlpack._Managed() if version is None else _dlpack._ManagedVersioned()
        if version is not None:
            self.managed.major, self.managed.minor = version
            self.managed.flags = flags
        if deleter:
            self.managed.deleter = ctypes.cast(self._call, ctypes.c_void_p)
        tensor = self.managed.tensor
        tensor.data, tensor.byte_offset, tensor.ndim = addr, offset, len(shape)
        tensor.shape = ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64))
        if self._strides is not None:
            tensor.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
        tensor.device_type, tensor.bits, tensor.lanes = device, bits, lanes
        self._name = b"dltensor" if version is None else b"dltensor_versioned"

    def __dlpack__(self, **_: Any) -> Any:
        return _new(ctypes.addressof(self.managed), self._name, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


class CUDAArray:
    """What has a ``__cuda_array_interface__`` and nothing else."""

    def __init__(self, addr: int, nbytes: int, *, readonly: bool = False, **more: Any) -> None:
        shown = {"shape": (nbytes,), "typestr": "|u1", "data": (addr, readonly), "version": 3}
        self.__cuda_array_interface__ = {**shown, **more}


class FakeCUDA:
    """A CUDA driver that exports files that are no dma-bufs, and notes what it is asked."""

    def __init__(self, *, init: int = 0, export: int = 0, context: int = 0xC0, push: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fds: list[int] = []
        self._init, self._export, self._context, self._push = init, export, context, push

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuPointerGetAttribute(self, out: Any, which: Any, pointer: Any) -> int:
        self.calls.append(("context of", which.value, pointer.value))
        out._obj.value = self._context
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.calls.append(("push", context.value))
        return self._push

    def cuCtxPopCurrent_v2(self, out: Any) -> int:
        self.calls.append(("pop",))
        return 0

    def cuMemGetHandleForAddressRange(self, out: Any, addr: Any, size: Any, kind: Any, flags: Any) -> int:
        self.calls.append(("export", addr.value, size.value, kind.value, flags.value))
        if not self._export:
            out._obj.value = os.memfd_create("no dma-buf")
            self.fds.append(out._obj.value)
        return self._export

    def cuGetErrorName(self, rc: Any, out: Any) -> int:
        if rc.value == 801:
            out._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"
        return 0
