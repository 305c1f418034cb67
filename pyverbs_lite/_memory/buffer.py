"""Buffers seen as memory for a device: address, length in bytes, and a hold on the exporter.

Anything with the buffer protocol will do, and so will a CPU tensor of torch, which has none: it is known by its
``data_ptr()``, so torch itself is never imported. Other tensors come through DLPack. What is in the memory of an
accelerator has no view; it can be registered, see ``_memory.accelerator``.
"""

from __future__ import annotations

import contextlib
import errno
import re
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from typing_extensions import Buffer

from ..errors import UnsupportedError
from ..ffi import ffi

if TYPE_CHECKING:
    from .accelerator import DeviceMemory

__all__ = ["CPUTensor", "Memory", "Pinned", "as_bytes_view", "look_at"]


class CPUTensor(Protocol):
    """What is asked of a tensor: ``torch.Tensor`` fits, of any dtype."""

    @property
    def device(self) -> Any:
        """Where it lives; ``device.type`` must be ``"cpu"``."""

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""

    def data_ptr(self) -> int:
        """Return the address of its first element."""

    def is_contiguous(self) -> bool:
        """Tell whether its elements are one range of memory, in order."""


class DLPackTensor(Protocol):
    """What is asked of a tensor of any other library."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class CUDAArray(Protocol):
    """What is asked of CUDA memory that does not speak DLPack."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


#: What can be sent, received into or registered.
Memory: TypeAlias = Buffer | CPUTensor | DLPackTensor | CUDAArray

_DEVICE_MEMORY = (
    "{what} is a {kind} in the memory of an accelerator, which the CPU must not touch: give it to send, write or read"
    " as it is, register it, or copy it to the host first"
)


def as_bytes_view(data: Memory, *, writable: bool = False, what: str = "buffer") -> memoryview:
    """Return a flat view of a buffer's own bytes; never a copy.

    Raises:
        TypeError: the object is neither a buffer nor a tensor, or holds references to Python objects.
        ValueError: it is not C-contiguous, so its bytes are not one range of memory.
        BufferError: ``writable`` is asked for and the memory is read-only; or what DLPack exports is no such memory.
        UnsupportedError: it is in the memory of an accelerator.

    """
    try:
        view = memoryview(data)  # type: ignore[arg-type]  # a tensor is told from a buffer by trying
    except TypeError as error:
        view = _without_buffer(data, what, error)
    if not view.c_contiguous:
        raise ValueError(
            f"{what} of shape {view.shape} and strides {view.strides} is not C-contiguous: its bytes are not one"
            " range of memory, and a copy would not be the memory you passed"
        )
    # The names of a struct's members stand between colons in its format.
    if "O" in view.format and "O" in re.sub(":[^:]*:", "", view.format):
        raise TypeError(f"{what} holds references to Python objects, which mean nothing in another process")
    if writable and view.readonly:
        raise BufferError(f"{what} is read-only ({type(data).__name__}) and cannot be a target")
    return view.cast("B") if view.nbytes else memoryview(bytearray()) if writable else memoryview(b"")


def look_at(data: Memory, what: str) -> memoryview | DeviceMemory:
    """Return a view of a buffer's bytes, or the accelerator's memory that it stands for.

    Raises:
        As ``as_bytes_view``, but for what is in the memory of an accelerator.
    """
    with contextlib.suppress(UnsupportedError):
        return as_bytes_view(data, what=what)
    from .accelerator import find

    if (found := find(data, what)) is None:
        return as_bytes_view(data, what=what)
    return found if found.nbytes else memoryview(b"" if found.readonly else bytearray())


def _without_buffer(data: Any, what: str, error: TypeError) -> memoryview:
    from . import dlpack as _dlpack

    kind = type(data).__name__
    if _dlpack.is_torch(data):
        return _tensor_view(data, what)
    if hasattr(data, "__dlpack__") and hasattr(data, "__dlpack_device__"):
        if (where := _dlpack.device_type(data)) in _dlpack.HOST:
            return _dlpack.view(data, what)
        raise _on_device(what, f"{kind} on {_dlpack.NAMES.get(where or 0, where)}")
    if hasattr(data, "__cuda_array_interface__"):
        raise _on_device(what, kind)
    raise TypeError(
        f"{what} must support the buffer protocol (bytes, bytearray, memoryview, array, mmap, numpy) or be a"
        f" torch CPU tensor, or speak DLPack, not {kind}"
    ) from error


def _on_device(what: str, kind: str) -> UnsupportedError:
    return UnsupportedError(errno.EOPNOTSUPP, "access", _DEVICE_MEMORY.format(what=what, kind=kind))


def _tensor_view(tensor: Any, what: str) -> memoryview:
    """View the memory of a tensor; the view keeps the tensor alive.

    A tensor cannot be pinned as a ``bytearray`` is: whoever resizes it in place moves its memory.
    """
    kind = type(tensor).__name__
    if tensor.device.type != "cpu":
        raise _on_device(what, f"{kind} on {tensor.device.type!r}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what} is a {kind} that is not contiguous: its bytes are not one range of memory, and a copy would not"
            " be the memory you passed"
        )
    for lazy in ("is_conj", "is_neg"):  # torch conjugates and negates on reading: memory holds the values before
        if getattr(tensor, lazy, bool)():
            raise ValueError(f"{what} is a {kind} whose memory does not hold its values ({lazy}); resolve it first")
    if not tensor.nbytes:
        return memoryview(bytearray())  # it has no address
    import ctypes  # for tensors only, and its import takes a while

    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    # set_() gives a tensor other storage and frees the old one, so the storage is held too where there is one.
    memory._owners = tensor, getattr(tensor, "untyped_storage", bool)()
    return memoryview(memory)


class Pinned:
    """Holds an exporter's memory in place and gives its address.

    While it lives, a ``bytearray`` cannot be resized and an ``mmap`` cannot be closed.

    Attributes:
        view: for anybody; whoever releases it lets nothing go.
    """

    __slots__ = ("_held", "addr", "nbytes", "readonly", "view")

    def __init__(self, data: Memory, *, writable: bool = False, what: str = "buffer") -> None:
        # Nothing of cffi may stay on a memoryview: up to Python 3.13 the garbage collector crashes on a loop with both.
        self._held = as_bytes_view(data, writable=writable, what=what)
        self.view = self._held[:]
        self.nbytes = self._held.nbytes
        self.readonly = self._held.readonly
        self.addr = int(ffi.cast("uintptr_t", ffi.from_buffer(self._held)))

    def release(self) -> None:
        """Let the exporter move or free its memory again; never fails, and safe to call again."""
        self._held.release()
        # Somebody's array over the view keeps the memory in place for as long as it lives: theirs to decide.
        with contextlib.suppress(BufferError):
            self.view.release()
