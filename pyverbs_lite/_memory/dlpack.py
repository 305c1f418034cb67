"""Tensors of any library through DLPack: the capsule of ``__dlpack__`` read as what it is, a C struct.

Both kinds of capsule are taken, with a version (since DLPack 1.0) and without. A capsule is used up by taking it: its
deleter is called once, when nobody uses the memory any more.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import suppress
from ctypes import c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object
from typing import Any

__all__ = ["HOST", "NAMES", "Export", "device_type", "is_torch", "view"]

#: Device type -> its name, as in ``DLDeviceType``.
NAMES = {
    1: "CPU",
    2: "CUDA",
    3: "CUDAHost",
    4: "OpenCL",
    7: "Vulkan",
    8: "Metal",
    9: "VPI",
    10: "ROCm",
    11: "ROCmHost",
    13: "CUDAManaged",
    14: "oneAPI",
    15: "WebGPU",
    16: "Hexagon",
    17: "MAIA",
}
#: Those whose memory is this host's, for the CPU to use as any other.
HOST = (1, 3, 11)
_MAJOR = 1
_READ_ONLY, _IS_COPIED = 1, 2


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    ]


_DELETER = ctypes.CFUNCTYPE(None, c_void_p)
#: Name of a capsule -> what it points to, and its name once it is used up.
_KINDS: dict[bytes, tuple[type[_Managed] | type[_ManagedVersioned], bytes]] = {
    b"dltensor_versioned": (_ManagedVersioned, b"used_dltensor_versioned"),
    b"dltensor": (_Managed, b"used_dltensor"),
}
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, py_object, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, py_object, c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))


class Export:
    """Memory that a tensor's library has handed out; it is given back when this is dropped.

    Attributes:
        addr, nbytes: where it is, and how long.
        readonly: whether it must not be written to.
        device_type: a key of ``NAMES``.
    """

    def __init__(self, tensor: Any, what: str) -> None:
        self._give_back: list[tuple[int, int]] = []
        capsule = _capsule_of(tensor)
        name = next((name for name in _KINDS if _is_valid(capsule, name)), None)
        if name is None:
            kind = type(tensor).__name__
            raise TypeError(f"{what}: __dlpack__ of {kind} returned no DLPack capsule, but {capsule!r}")
        struct, used = _KINDS[name]
        address = _pointer(capsule, name)
        managed = struct.from_address(address)
        # From here on it is ours to give back. A name of a capsule has to live as long: these are constants.
        _rename(capsule, used)
        if managed.deleter:
            self._give_back.append((managed.deleter, address))
        flags = 0
        if isinstance(managed, _ManagedVersioned):
            if managed.major != _MAJOR:
                raise BufferError(f"{what} speaks DLPack {managed.major}.{managed.minor}, which this library does not")
            flags = managed.flags
        if flags & _IS_COPIED:
            raise BufferError(f"{what}: {type(tensor).__name__} exports a copy of its memory, not the memory itself")
        layout = managed.tensor
        shape = [layout.shape[i] for i in range(layout.ndim)]
        if layout.strides and 0 not in shape:
            _check_contiguous(shape, [layout.strides[i] for i in range(layout.ndim)], what)
        self.nbytes = (math.prod(shape) * layout.bits * layout.lanes + 7) // 8
        self.addr = (layout.data or 0) + layout.byte_offset
        self.readonly = bool(flags & _READ_ONLY)
        self.device_type = int(layout.device_type)

    def __del__(self) -> None:
        while self._give_back:
            deleter, address = self._give_back.pop()
            _DELETER(deleter)(address)


def is_torch(data: object) -> bool:
    """Say whether something answers as a tensor of torch does; others have some of its words only."""
    return all(hasattr(data, word) for word in ("data_ptr", "is_contiguous", "nbytes", "device"))


def device_type(tensor: Any) -> int | None:
    """Return where a tensor's memory is, a key of ``NAMES``; None if it does not speak DLPack."""
    if not (hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__")):
        return None
    return int(tensor.__dlpack_device__()[0])


def view(tensor: Any, what: str) -> memoryview:
    """View the memory of a tensor on the host; the view keeps it."""
    export = Export(tensor, what)
    if not export.nbytes:
        return memoryview(b"" if export.readonly else bytearray())
    memory = (ctypes.c_ubyte * export.nbytes).from_address(export.addr)
    memory._export = export
    seen = memoryview(memory)
    return seen.toreadonly() if export.readonly else seen


def _capsule_of(tensor: Any) -> Any:
    """Ask for a capsule as new as the tensor's library knows, and for no copy."""
    with suppress(TypeError):  # an argument that it does not know
        return tensor.__dlpack__(max_version=(_MAJOR, 1), copy=False)
    with suppress(TypeError):
        return tensor.__dlpack__(max_version=(_MAJOR, 1))
    return tensor.__dlpack__()


def _check_contiguous(shape: list[int], strides: list[int], what: str) -> None:
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            raise ValueError(
                f"{what} of shape {tuple(shape)} and strides {tuple(strides)} is not C-contiguous: its bytes are not"
                " one range of memory, and a copy would not be the memory you passed"
            )
        expected *= length
