"""The buffer protocol seen as memory for a device: address, length in bytes, and a hold on the exporter."""

from __future__ import annotations

from typing_extensions import Buffer

from .ffi import ffi
from .ffi._verbs import CData

__all__ = ["Pinned", "as_bytes_view"]


def as_bytes_view(data: Buffer, *, writable: bool = False, what: str = "buffer") -> memoryview:
    """Return a flat view of a buffer's own bytes; never a copy.

    Raises:
        TypeError: the object has no buffer protocol.
        ValueError: it is not C-contiguous, so its bytes are not one range of memory.
        BufferError: ``writable`` is asked for and the memory is read-only.

    """
    try:
        view = memoryview(data)
    except TypeError as error:
        raise TypeError(
            f"{what} must support the buffer protocol (bytes, bytearray, memoryview, array, mmap, numpy, a torch CPU"
            f" tensor's .numpy()), not {type(data).__name__}"
        ) from error
    if not view.c_contiguous:
        raise ValueError(
            f"{what} of shape {view.shape} and strides {view.strides} is not C-contiguous: its bytes are not one"
            " range of memory, and a copy would not be the memory you passed"
        )
    if writable and view.readonly:
        raise BufferError(f"{what} is read-only ({type(data).__name__}) and cannot be a target")
    return view.cast("B") if view.nbytes else memoryview(bytearray()) if writable else memoryview(b"")


class Pinned:
    """Holds an exporter's memory in place and gives its address.

    While it lives, a ``bytearray`` cannot be resized and an ``mmap`` cannot be closed.
    """

    __slots__ = ("_cdata", "addr", "nbytes", "readonly", "view")

    def __init__(self, data: Buffer, *, writable: bool = False, what: str = "buffer") -> None:
        self.view = as_bytes_view(data, writable=writable, what=what)
        self.nbytes = self.view.nbytes
        self.readonly = self.view.readonly
        self._cdata: CData = ffi.from_buffer(self.view)
        self.addr = int(ffi.cast("uintptr_t", self._cdata))

    def release(self) -> None:
        """Let the exporter move or free its memory again."""
        ffi.release(self._cdata)
        self.view.release()
