"""Queue pairs that librdmacm brings through their states."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ._objects.qp_init import create
from .attr import QPCap
from .errors import VerbsError
from .ffi import CData, ffi
from .pd import PD
from .qp import QP, QPInitAttr

if TYPE_CHECKING:
    from .cm_channel import Place
    from .cmid import CMID

__all__ = ["CMQP"]


class CMQP(QP):
    """The QP of a ``CMID``; made by ``CMID.create_qp``, and closed with either of its ``CMID`` and its PD.

    librdmacm moves it: to INIT when it is made (to RTS, if it is UD), to RTS when it is connected, to ERR when it is
    disconnected. Receives may be posted as soon as it is made.

    Verb: rdma_create_qp_ex, ibv_destroy_qp
    """

    def __init__(self, pd: PD, owner: CMID, init_attr: QPInitAttr) -> None:
        self._cm = owner._handle
        super().__init__(pd, init_attr)
        self._owned.destroy = _DestroyCMQP(self._owned.destroy, self._cm, owner._place)
        self._attach(owner)
        self.refresh()

    def _create(self, pd: PD, init_attr: QPInitAttr) -> tuple[CData, QPCap]:
        return create(pd, init_attr, self._cm)

    def refresh(self) -> None:
        """Ask for the state, which librdmacm may have changed."""
        with suppress(VerbsError):
            self._query_raw()


class _DestroyCMQP:
    """Destroys the QP once, and lets librdmacm know: ``rdma_destroy_qp`` itself would hide a refusal."""

    __slots__ = ("destroy", "id", "place")

    def __init__(self, destroy: Callable[[CData], None], handle: CData, place: Place) -> None:
        self.destroy = destroy
        self.id = handle
        self.place = place

    def __call__(self, handle: CData) -> None:
        with self.place.lock:  # librdmacm may be about to change its state
            self.destroy(handle)
            self.id.qp = ffi.NULL
