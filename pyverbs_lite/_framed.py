"""An engine whose messages carry a header, so that the control channel's bytes travel between them."""

from __future__ import annotations

import errno

from ._args import Deadline
from ._check import check_rc, os_error
from ._engine import Engine
from ._operation import Operation, Request
from .enums import WROpcode
from .errors import PeerProtocolError, VerbsError, WaitTimeout
from .ffi import ffi, lib

__all__ = ["CONTROL_RECEIVES", "HEADER", "FramedEngine", "untold"]

#: What is posted to a QP that the peer has just ended is not flushed by every iWARP driver: no use to wait for long.
_FLUSH_TIME_IWARP = 0.1
#: Bytes in front of every two-sided message; ``ffi/src/framing.c`` has the layout.
HEADER: int = lib.PVL_HEADER_BYTES
#: Receives for control bytes, on both sides.
CONTROL_RECEIVES = 8


def untold(depth: int) -> int:
    """Return how many receives may have been posted again without the peer being told, at such a depth."""
    return max(0, depth // 2 - 1)


class FramedEngine(Engine):
    """An engine that tells messages from control bytes, and sends neither without a receive at the peer.

    Attributes:
        ending: why this side is about to end the connection, while it says goodbye.
    """

    ending: VerbsError | None = None

    def frame_on(self, depth: int, granted: int, *, immediates: bool) -> None:
        """Put a header in front of every message; before the first message of either side.

        Args:
            depth: receives for messages here that the peer can rely on; ``untold`` of it more are posted.
            granted: receives for messages that are posted at the peer.
            immediates: whether the transport has any; else a message brings that of an RDMA write.
        """
        more = untold(depth)
        rc = lib.pvl_frame_on(self._c, depth + more, more + 1, granted, CONTROL_RECEIVES, not immediates)
        check_rc("calloc", rc)
        self._header = HEADER
        if not immediates:
            self._flush_time = _FLUSH_TIME_IWARP

    def leave(self, why: VerbsError) -> None:
        """Record why the connection is over, as ``fail`` does, but let what is in flight go on."""
        with self._failing:
            if self.failure is None:
                self._flush_limit = Deadline(self._flush_time)
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
            raw = framing.control[index % c.recv_slots]
            start = raw.slot * c.recv_size + self._header
            found.append(bytes(self._ring.view[start : start + raw.byte_len]))
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

    def _conclude(self) -> None:
        if self._watching and not self._c.cause:
            # A peer that has heard the goodbye may end the connection before this side does.
            if self.ending is not None:
                self.fail(self.ending)
            # The transport may flush before the news comes that the peer has left; and it may have said why.
            self.read_peer()
        super()._conclude()

    @property
    def polled_elsewhere(self) -> bool:
        """Whether another thread is polling just now."""
        return bool(self._c.polling)
