"""Thread domains and parent domains: what lets a driver leave out the locks of objects that one thread uses."""

from __future__ import annotations

from ._base.check import check_ptr, check_rc, require
from ._base.resource import Resource
from .device import Context
from .enums import ParentDomainInitAttrMask
from .ffi import CData, ffi, lib
from .pd import PD, dealloc_pd

__all__ = ["TD", "ParentDomain"]


class TD(Resource):
    """A thread domain: the promise that what is made in it is used by one thread at a time.

    Use it by way of a ``ParentDomain``. The library keeps its own locks all the same.

    Verb: ibv_alloc_td
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        raw = ffi.new("struct ibv_td_init_attr *")
        handle = check_ptr("ibv_alloc_td", lib.ibv_alloc_td(context._handle, raw))
        self._own(handle, _dealloc_td, context, label=f"TD of {context.name}")


class ParentDomain(PD):
    """A protection domain around another, with a thread domain; usable wherever a ``PD`` is.

    What it protects is what the inner one does: QPs of the one reach memory regions of the other.

    Args:
        pd: the inner domain; None of another parent domain.
        td: the thread domain, or None.
        allow_cc_unprotected_alloc: in a confidential virtual machine, let the driver use unprotected memory for its
            queues (rdma-core 64 and newer).

    Attributes:
        pd, td: the same.

    Raises:
        TypeError, ValueError: ``pd`` or ``td`` is none, or of another context.
        UnsupportedError: the driver has no parent domains.

    Verb: ibv_alloc_parent_domain
    """

    def __init__(self, pd: PD, td: TD | None = None, *, allow_cc_unprotected_alloc: bool = False) -> None:
        if isinstance(pd, ParentDomain) or not isinstance(pd, PD):
            raise TypeError(f"the inner domain must be a PD and no ParentDomain, not {pd!r}")
        if td is not None and not isinstance(td, TD):
            raise TypeError(f"td must be a TD, not {td!r}")
        if td is not None and td.context is not pd.context:
            raise ValueError(f"the thread domain belongs to {td.context!r}, and the PD to {pd.context!r}")
        raw = ffi.new("struct ibv_parent_domain_init_attr *")
        raw.pd, raw.td = pd._handle, ffi.NULL if td is None else td._handle
        if allow_cc_unprotected_alloc:
            require("CC_UNPROTECTED_ALLOC", "ibv_alloc_parent_domain(allow_cc_unprotected_alloc=True)")
            raw.comp_mask = ParentDomainInitAttrMask.ALLOW_CC_UNPROTECTED_ALLOC
        self.context = pd.context
        self.pd = pd
        self.td = td
        handle = check_ptr("ibv_alloc_parent_domain", lib.ibv_alloc_parent_domain(pd.context._handle, raw))
        parents = (pd,) if td is None else (pd, td)
        self._own(handle, dealloc_pd, *parents, label=f"ParentDomain of {self.context.name}")

    @property
    def root(self) -> PD:
        """The domain that decides what may touch which memory: the inner one."""
        return self.pd


def _dealloc_td(handle: CData) -> None:
    check_rc("ibv_dealloc_td", lib.ibv_dealloc_td(handle))
