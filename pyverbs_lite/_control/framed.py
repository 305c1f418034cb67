"""An engine for connections that have no socket beside them: the control channel's bytes travel between messages."""

from __future__ import annotations

import errno

from .._base.args import Deadline
from .._base.check import os_error
from .._connection.engine import HEADER, Engine
from .._connection.operation import Operation, Request
from ..enums import WROpcode
from ..errors import PeerProtocolError, VerbsError, WaitTimeout
from ..ffi import ffi, lib

__all__ = ["CONTROL_RECEIVES", "FramedEngine"]

#: What is posted to a QP that the peer has just ended is not flushed by every iWARP driver: no use to wait for long.
_FLUSH_TIME_IWARP = 0.1
#: Receives for control bytes, on both sides.
CONTROL_RECEIVES = 8


class FramedEngine(Engine):
    """An engine whose messages have the control channel's bytes between them."""

    _flushes = True

    def grant(self, depth: int, granted: int, *, control: int = CONTROL_RECEIVES, immediates: bool = True) -> None:
        """Begin to count receives, as ``Engine.grant`` does."""
        super().grant(depth, granted, control=control, immediates=immediates)
        if not immediates:
            self._flush_time = _FLUSH_TIME_IWARP

    def leave(self, why: VerbsError) -> None:
        """Record why the connection is over, as ``fail`` does, but let what is in flight go on."""
        with self._failing:
            if self.failure is None:
                self.failure = why
                self._c.over = 1

    def drain(self, deadline: Deadline) -> bool:
        """Wait until nothing is in flight, but not for what is never flushed."""
        return super().drain(deadline.sooner(self._flush_time))

    def listen_to(self, fd: int) -> None:
        """Wake waits when a descriptor is readable."""
        self._c.peer_fd = fd

    def await_control_credit(self, deadline: Deadline) -> None:
        """Wait until the peer has a receive for control bytes.

        Raises:
            WaitTimeout: not in time.
            VerbsError: the connection's failure.
        """
        while not self._progress(lib.PVL_UNTIL_CREDIT, None, 1, deadline):
            if self.failure is not None:
                self.refuse_late("control")
            if deadline.expired:
                raise WaitTimeout(f"the peer does not read, within {deadline.seconds} s", "control")

    def start_control(self, chunk: bytes, deadline: Deadline) -> Operation:
        """Post a piece of the control channel's bytes; ``finish`` waits until it is there.

        Raises:
            As ``start``.
        """
        opcode: WROpcode = lib.PVL_WR_CONTROL  # type: ignore[assignment]
        return self.start("control", Request(opcode, len(chunk), source=memoryview(chunk)), deadline)

    def wait_control(self, deadline: Deadline) -> bool:
        """Wait for control bytes, for a slice of time at most; say whether there is something to look at."""
        if self.closed or self._c.framing.malformed:
            return True
        rc = lib.pvl_progress(self._c, lib.PVL_UNTIL_CONTROL, ffi.NULL, 0, self._slice(deadline))
        if rc < 0 and rc != -errno.ESHUTDOWN:
            raise os_error("ibv_poll_cq", rc)
        return rc <= 0 or bool(rc & lib.PVL_WOKE_PEER) or self.broken

    def take_control(self) -> list[bytes]:
        """Return the control bytes that have arrived.

        Raises:
            PeerProtocolError: a message came that has no header.
        """
        c, framing, found = self._c, self._c.framing, []
        while framing.control_arrived != framing.control_taken:
            index = framing.control_taken
            raw = framing.control[index & c.ring_mask]
            found.append(bytes(self._receives.view(raw.slot, HEADER, raw.byte_len)))
            if rc := lib.pvl_take_control(c, index):
                raise os_error("ibv_post_recv", rc)
        if framing.malformed and not found:
            raise PeerProtocolError("the peer sent a message without a header that this protocol knows")
        return found

    @property
    def broken(self) -> bool:
        """Whether a request has failed, so that no more control bytes can come."""
        return bool(self._c.cause or self._c.flushed)

    @property
    def left(self) -> bool:
        """Whether it is broken by no fault of a request: the peer has ended the connection."""
        return self.broken and not (self._c.cause and self._watching)

    @property
    def polled_elsewhere(self) -> bool:
        """Whether another thread is polling just now."""
        return bool(self._c.polling)
