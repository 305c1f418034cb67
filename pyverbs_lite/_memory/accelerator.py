"""Memory of accelerators, which no CPU may touch: what it is, and the dma-buf by which an RDMA device reaches it.

Nothing of CUDA or ROCm is needed to import this, and neither is torch: a tensor says itself where it is, and the
accelerator's driver is loaded when the first of its memory is to be registered.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .._base.check import require
from ..errors import UnsupportedError
from .dlpack import HOST, NAMES, Export, device_type, is_torch

__all__ = ["DeviceMemory", "export_dmabuf", "find"]

_CUDA_DMA_BUF_FD = 1
_CUDA_CONTEXT = 1


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A range of an accelerator's memory.

    Attributes:
        addr: where it is, in the accelerator's addresses.
        nbytes: its length.
        kind: whose it is: "CUDA", "ROCm", or another of DLPack's names.
        owner: what keeps it.
    """

    addr: int
    nbytes: int
    readonly: bool
    kind: str
    owner: object

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, key: slice) -> DeviceMemory:
        part = range(self.nbytes)[key]
        return replace(self, addr=self.addr + part.start, nbytes=len(part))

    def release(self) -> None:
        """Nothing: it is let go of with this object."""


def find(data: Any, what: str = "buffer") -> DeviceMemory | None:
    """Return an accelerator's memory that something stands for; None if it stands for none.

    Raises:
        ValueError: it is not C-contiguous, or holds no values as they are.
    """
    where = device_type(data)
    kind = "CUDA" if where is None else NAMES.get(where, f"device {where}")
    if is_torch(data):
        if data.device.type == "cpu":
            return None
        if where is None or where in HOST:
            kind = data.device.type
        if not data.is_contiguous():
            raise ValueError(f"{what} is a {type(data).__name__} that is not contiguous: not one range of memory")
        for lazy in ("is_conj", "is_neg"):
            if getattr(data, lazy, bool)():
                raise ValueError(f"{what} is a {type(data).__name__} whose memory does not hold its values ({lazy})")
        return DeviceMemory(int(data.data_ptr()), int(data.nbytes), False, kind, data)
    if where is not None:
        if where in HOST:
            return None
        export = Export(data, what)
        return DeviceMemory(export.addr, export.nbytes, export.readonly, kind, export)
    if (interface := getattr(data, "__cuda_array_interface__", None)) is None:
        return None
    return _from_interface(data, interface, what)


def _from_interface(data: object, interface: dict[str, Any], what: str) -> DeviceMemory:
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or (None,) * len(shape)  # None: C-contiguous
    nbytes = int(interface["typestr"][2:])  # such as "<f4"
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride is not None and length != 1 and stride != nbytes:
            raise ValueError(f"{what} is a {type(data).__name__} that is not C-contiguous: not one range of memory")
        nbytes *= length
    addr, readonly = interface["data"]
    return DeviceMemory(int(addr or 0), nbytes, bool(readonly), "CUDA", data)


def export_dmabuf(memory: DeviceMemory) -> tuple[int, int]:
    """Return a dma-buf that has the memory, and where in it the memory starts; the descriptor is the caller's to close.

    What the accelerator was told to do with the memory may still be under way: that is the caller's to wait for.

    Raises:
        UnsupportedError: the text says what lacks.
    """
    require("DMABUF_MR", "ibv_reg_dmabuf_mr")
    exporter = _EXPORTERS.get(memory.kind)
    if exporter is None:
        raise _lacks(memory, f"no way is known to get a dma-buf of {memory.kind} memory: copy it to the host first")
    return exporter(memory)


def _export_cuda(memory: DeviceMemory) -> tuple[int, int]:
    driver = _load("libcuda.so.1", memory)
    _check(driver, "cuInit", driver.cuInit(0), memory)
    entered = _enter_context(driver, memory)
    try:
        get = getattr(driver, "cuMemGetHandleForAddressRange", None)
        if get is None:
            raise _lacks(memory, "the CUDA driver is older than 11.7, and exports no dma-buf")
        # The driver exports whole pages of the host.
        start = memory.addr // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(memory.addr + memory.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = ctypes.c_int(-1)
        range_ = ctypes.c_uint64(start), ctypes.c_size_t(end - start)
        rc = get(ctypes.byref(fd), *range_, ctypes.c_int(_CUDA_DMA_BUF_FD), ctypes.c_uint64(0))
        _check(driver, "cuMemGetHandleForAddressRange", rc, memory)
        return fd.value, memory.addr - start
    finally:
        if entered:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _enter_context(driver: Any, memory: DeviceMemory) -> bool:
    """Make the context of the memory current: this thread may never have used CUDA."""
    context = ctypes.c_void_p()
    pointer = ctypes.c_uint64(memory.addr)
    if driver.cuPointerGetAttribute(ctypes.byref(context), ctypes.c_int(_CUDA_CONTEXT), pointer) or not context:
        return False
    return bool(driver.cuCtxPushCurrent_v2(context) == 0)


def _check(driver: Any, call: str, rc: int, memory: DeviceMemory) -> None:
    if rc == 0:
        return
    name = ctypes.c_char_p()
    driver.cuGetErrorName(ctypes.c_int(rc), ctypes.byref(name))
    shown = name.value.decode() if name.value else f"error {rc}"
    raise _lacks(
        memory,
        f"{call} gave {shown}: the GPU, its driver or this kind of allocation has no dma-buf (it takes the open kernel"
        " modules, and not managed memory nor torch's expandable segments)",
    )


def _export_rocm(memory: DeviceMemory) -> tuple[int, int]:
    runtime = _load("libhsa-runtime64.so.1", memory)
    export = getattr(runtime, "hsa_amd_portable_export_dmabuf", None)
    if export is None:
        raise _lacks(memory, "the ROCm runtime is older than 5.6, and exports no dma-buf")
    fd, offset = ctypes.c_int(-1), ctypes.c_uint64()
    where = ctypes.c_void_p(memory.addr), ctypes.c_size_t(memory.nbytes)
    rc = export(*where, ctypes.byref(fd), ctypes.byref(offset))
    if rc:
        raise _lacks(memory, f"hsa_amd_portable_export_dmabuf gave status {rc:#x}")
    return fd.value, offset.value


_EXPORTERS: dict[str, Callable[[DeviceMemory], tuple[int, int]]] = {
    "CUDA": _export_cuda,
    "cuda": _export_cuda,  # torch's own word, where the tensor does not say more
    "ROCm": _export_rocm,
}


def _load(library: str, memory: DeviceMemory) -> Any:
    try:
        return ctypes.CDLL(library)
    except OSError as error:
        raise _lacks(memory, f"{library} is not there to export it as a dma-buf ({error})") from error


def _lacks(memory: DeviceMemory, why: str) -> UnsupportedError:
    return UnsupportedError(errno.EOPNOTSUPP, f"registering {memory.nbytes} bytes of {memory.kind} memory", why)
