"""An engine whose messages carry a header, so that the control channel's bytes travel between them."""

from __future__ import annotations

import errno

from ._args import Deadline
from ._check import check_rc, os_error
from ._engine import SPIN_NS, Engine
from ._operation import Request
from .enums import WROpcode
from .errors import PeerProtocolError
from .ffi import ffi, lib

__all__ = ["CONTROL_RECEIVES", "HEADER", "FramedEngine"]

#: Bytes in front of every two-sided message; ``ffi/src/framing.c`` has the layout.
HEADER = ffi.sizeof("struct pvl_header")
#: Receives for control bytes, on both sides.
CONTROL_RECEIVES = 8


class FramedEngine(Engine):
    """An engine that tells messages from control bytes, and sends neither without a receive at the peer."""

    def frame_on(self, offered: int, granted: int) -> None:
        """Put a header in front of every message; before the first message of either side.

        Args:
            offered: receives for messages that are posted here.
            granted: receives for messages that are posted at the peer.
        """
        check_rc("calloc", lib.pvl_frame_on(self._c, offered, granted, CONTROL_RECEIVES))
        self._header = HEADER

    def send_control(self, chunk: memoryview, deadline: Deadline) -> None:
        """Send a piece of the control channel's bytes, and wait until it is there.

        Raises:
            As ``run``.
        """
        opcode: WROpcode = lib.PVL_WR_CONTROL  # type: ignore[assignment]
        self.run("control", (Request(opcode, len(chunk), source=chunk),), deadline)

    def control_bytes(self, deadline: Deadline) -> list[bytes]:
        """Wait for control bytes, for a slice of time at most, and return all that have arrived.

        Raises:
            PeerProtocolError: a message came that has no header.
        """
        c, framing, found = self._c, self._c.framing, []
        if not self.closed:
            rc = lib.pvl_progress(c, lib.PVL_UNTIL_CONTROL, ffi.NULL, 0, SPIN_NS, self._slice(deadline))
            if rc < 0 and rc != -errno.ESHUTDOWN:
                raise os_error("ibv_poll_cq", rc)
        while framing.control_arrived != framing.control_taken:
            index = framing.control_taken
            raw = framing.control[index % c.recv_slots]
            start = raw.slot * c.recv_size + self._header
            found.append(bytes(self._ring.view[start : start + raw.byte_len]))
            if rc := lib.pvl_take_control(c, index):
                raise os_error("ibv_post_recv", rc)
        if framing.malformed:
            raise PeerProtocolError("the peer sent a message without a header that this protocol knows")
        return found

    @property
    def polled_elsewhere(self) -> bool:
        """Whether another thread is polling just now."""
        return bool(self._c.polling)
