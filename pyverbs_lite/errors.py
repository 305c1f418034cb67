"""Every exception of the library; this module imports nothing of ours.

::

    VerbsError                        never raised itself; carries .operation
    ├─ VerbsOSError (OSError)         a verb refused: .errno, and a text with cause and cure
    │  ├─ UnsupportedError            the device or this libibverbs cannot
    │  ├─ QueueFullError (BlockingIOError)  recoverable after polling
    │  └─ RouteError                  RTR found no route: names gid_index and remote GID
    ├─ DeviceNotFoundError (LookupError)  lists the names that do exist
    ├─ GIDError (LookupError)         no usable row in the GID table, or the one asked for is not usable
    ├─ StateError (RuntimeError)      the caller's mistake
    │  ├─ InvalidTransition           .current .target
    │  ├─ AttributeMaskError          .missing .extra
    │  ├─ BusyError                   something that is still in use
    │  ├─ StaleBufferError            a RemoteBuffer of another connection, or withdrawn by the peer
    │  └─ ClosedError
    ├─ CompletionError (OSError)      .status .wr_id .vendor_err .qp_num; one subclass per status that users meet
    ├─ WaitTimeout (TimeoutError)     says whether the transfer may still complete
    └─ HandshakeError (ConnectionError)
       ├─ PeerProtocolError, PeerClosedError, AuthenticationError
       ├─ CMError                     an error event of librdmacm: .event .status .private_data; one subclass per event
       └─ HandshakeTimeout (TimeoutError)
"""

from __future__ import annotations

import errno as _errno
import os
from typing import Any, ClassVar

__all__ = [
    "AttributeMaskError",
    "AuthenticationError",
    "BadResponseError",
    "BusyError",
    "CMAddressError",
    "CMConnectError",
    "CMDeviceRemovedError",
    "CMError",
    "CMMulticastError",
    "CMRejectedError",
    "CMRouteError",
    "CMUnreachableError",
    "ClosedError",
    "CompletionError",
    "DeviceNotFoundError",
    "FatalError",
    "FlushError",
    "GIDError",
    "GeneralError",
    "HandshakeError",
    "HandshakeTimeout",
    "InvalidTransition",
    "LocalAccessError",
    "LocalLengthError",
    "LocalProtectionError",
    "LocalQPOperationError",
    "MWBindError",
    "PeerClosedError",
    "PeerProtocolError",
    "QueueFullError",
    "RemoteAbortedError",
    "RemoteAccessError",
    "RemoteInvalidRequestError",
    "RemoteOperationError",
    "ResponseTimeoutError",
    "RetryExceededError",
    "RnrRetryExceededError",
    "RouteError",
    "StaleBufferError",
    "StateError",
    "UnsupportedError",
    "VerbsError",
    "VerbsOSError",
    "WaitTimeout",
]


class VerbsError(Exception):
    """Root of the tree; never raised itself.

    Attributes:
        operation: the verb or method that failed, for example ``"ibv_modify_qp"``.
        failed_index: of a batch or a list, the first entry that failed; None for anything else.

    """

    operation: str = ""
    failed_index: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders, and the default would call __init__ with the text alone.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(cls: type[VerbsError], args: tuple[object, ...], attributes: dict[str, object]) -> VerbsError:
    """Make a copy of an error from what it carries, past its own ``__init__``."""
    error = cls.__new__(cls, *args)  # OSError reads them here, or in __init__ where a subclass has its own
    (OSError if issubclass(cls, OSError) else Exception).__init__(error, *args)
    error.__dict__.update(attributes)
    return error


class VerbsOSError(VerbsError, OSError):
    """A verb was refused by libibverbs, the kernel or the device; ``errno`` is always positive.

    Attributes:
        posted: after posting a list of work requests, how many were accepted before the one that was refused.
    """

    posted: int = 0

    def __init__(self, errno: int, operation: str, hint: str = "") -> None:
        errno = abs(errno) or _errno.EIO  # drivers that negate it, or do not set it at all
        name = _errno.errorcode.get(errno, str(errno))
        text = f"{operation} failed: {name} ({os.strerror(errno)})"
        super().__init__(errno, f"{text}: {hint}" if hint else text)
        self.operation = operation
        self.hint = hint

    def __str__(self) -> str:
        return str(self.strerror)


class UnsupportedError(VerbsOSError):
    """The device, its driver or this version of libibverbs cannot do it."""


class RouteError(VerbsOSError):
    """INIT → RTR found no path to the remote GID."""


class QueueFullError(VerbsOSError, BlockingIOError):
    """A work queue has no free slot; poll completions, then post again.

    Attributes:
        posted: how many requests of the list were accepted before this one.

    """

    posted: int = 0


class DeviceNotFoundError(VerbsError, LookupError):
    """No such RDMA device; the text lists those that exist."""


class GIDError(VerbsError, LookupError):
    """No usable row in a port's GID table, or the chosen one is not usable; the text shows the table."""


class StateError(VerbsError, RuntimeError):
    """The call does not fit the object's state: the caller's mistake, found before the verb was called."""


class StaleBufferError(StateError):
    """A ``RemoteBuffer`` that is good no more: of another connection than this one, or withdrawn by its owner."""


class InvalidTransition(StateError):
    """The QP state machine has no such edge.

    Attributes:
        current: the state the QP is in.
        target: the state that was asked for.

    """

    def __init__(self, message: str, *, current: object, target: object) -> None:
        super().__init__(message)
        self.operation = "ibv_modify_qp"
        self.current = current
        self.target = target


class AttributeMaskError(StateError):
    """The attributes given do not fit the edge of the QP state machine.

    Attributes:
        current, target: the edge.
        missing: attributes the edge demands and that were not given.
        extra: attributes that were given and that the edge does not take.

    """

    def __init__(self, message: str, *, current: object, target: object, missing: object, extra: object) -> None:
        super().__init__(message)
        self.operation = "ibv_modify_qp"
        self.current = current
        self.target = target
        self.missing = missing
        self.extra = extra


class BusyError(StateError):
    """Something is still in use, so it cannot be taken away now; the object stays as it was."""


class ClosedError(StateError):
    """The object was closed, or is used in a process other than the one that opened it."""


class WaitTimeout(VerbsError, TimeoutError):
    """A wait ended before its completion came; the text says whether the transfer may still complete."""

    def __init__(self, message: str, operation: str = "") -> None:
        super().__init__(message)
        self.operation = operation


class HandshakeError(VerbsError, ConnectionError):
    """The exchange over TCP did not end in a connection.

    Attributes:
        code: where the peer refused, its ``wire.RefuseCode``, such as BUSY; else None.
    """

    code: int | None = None


class PeerProtocolError(HandshakeError):
    """The peer said something that is not this protocol, or a value outside its range."""


class PeerClosedError(HandshakeError):
    """The peer closed the connection, or its process is gone."""


class AuthenticationError(HandshakeError):
    """The peer did not prove that it knows the key."""


class HandshakeTimeout(HandshakeError, TimeoutError):
    """The exchange was not over before its deadline."""


class CMError(HandshakeError):
    """The connection manager reported, by an event, that a step failed; the ``CMID`` can then only be closed.

    Attributes:
        event: the ``CMEventType``.
        status: what came with it: a negative errno, or for ``REJECTED`` on InfiniBand and RoCE the reason's number.
        private_data: what the peer sent along, as it arrived: InfiniBand and RoCE fill it up with zeros.

    """

    #: Name of the event -> class; filled as the subclasses below are defined.
    by_event: ClassVar[dict[str, type[CMError]]] = {}

    def __init_subclass__(cls, *, event: str) -> None:
        CMError.by_event[event] = cls

    def __init__(self, message: str, *, event: object, status: int, private_data: bytes = b"", operation: str) -> None:
        super().__init__(message)
        self.event = event
        self.status = status
        self.private_data = private_data
        self.operation = operation


class CMAddressError(CMError, event="ADDR_ERROR"):
    """The address belongs to no RDMA device and is reached through none, or did not answer."""


class CMRouteError(CMError, event="ROUTE_ERROR"):
    """No path to the address was found."""


class CMUnreachableError(CMError, event="UNREACHABLE"):
    """The peer's connection manager does not answer, or the peer did not go on."""


class CMRejectedError(CMError, event="REJECTED"):
    """Nobody listens there, or who listens refused; ``private_data`` is what it said."""


class CMConnectError(CMError, event="CONNECT_ERROR"):
    """The connection could not be made, for a reason on this side or of the protocol."""


class CMDeviceRemovedError(CMError, event="DEVICE_REMOVAL"):
    """The device went away; everything on it has to be closed."""


class CMMulticastError(CMError, event="MULTICAST_ERROR"):
    """The multicast group could not be joined, or the membership was lost."""


class CompletionError(VerbsError, OSError):
    """A work request completed with a status other than ``SUCCESS``.

    Attributes:
        status: the ``WCStatus``.
        wr_id, vendor_err, qp_num: from the work completion; nothing else of a failed one is valid.

    """

    #: Status name (without its prefix) -> class; filled as the subclasses below are defined.
    by_status: ClassVar[dict[str, type[CompletionError]]] = {}
    #: What the status means and what to do about it.
    cause: ClassVar[str] = "see the InfiniBand specification, section 11.6.2 (completion return status)"

    def __init_subclass__(cls, *, status: str) -> None:
        CompletionError.by_status[status] = cls

    def __init__(self, status: object, *, wr_id: int, qp_num: int, vendor_err: int = 0, operation: str = "") -> None:
        name = getattr(status, "name", str(status))
        where = f"{operation or 'work request'} on QP {qp_num:#x}"
        super().__init__(_errno.EIO, f"{where} completed with {name}: {self.cause} (vendor_err {vendor_err:#x})")
        self.status = status
        self.wr_id = wr_id
        self.qp_num = qp_num
        self.vendor_err = vendor_err
        self.operation = operation

    def __str__(self) -> str:
        return str(self.strerror)


class LocalLengthError(CompletionError, status="LOC_LEN_ERR"):
    """A message is longer than the receive buffer, or than the port's ``max_msg_sz``."""

    cause = "the message is longer than the buffers posted for it or than the port's max_msg_sz"


class LocalQPOperationError(CompletionError, status="LOC_QP_OP_ERR"):
    """The QP found an inconsistency in the request or in itself."""

    cause = "the device refused the request as inconsistent: check opcode, SGE count, alignment and QP type"


class LocalProtectionError(CompletionError, status="LOC_PROT_ERR"):
    """A local buffer is not covered by a valid memory region."""

    cause = "an SGE's lkey, range or access flags do not fit a registered MR of this PD (is it deregistered?)"


class FlushError(CompletionError, status="WR_FLUSH_ERR"):
    """The QP was in the ERR state, so the request was thrown away: a consequence, not a cause."""

    cause = "the QP was in the ERR state and the request was never carried out; an earlier error is the reason"


class MWBindError(CompletionError, status="MW_BIND_ERR"):
    """A memory window could not be bound."""

    cause = "the memory window and its MR do not allow this binding (MW_BIND access, range, PD)"


class BadResponseError(CompletionError, status="BAD_RESP_ERR"):
    """The responder returned something unexpected."""

    cause = "the responder sent an opcode that does not belong to the request"


class LocalAccessError(CompletionError, status="LOC_ACCESS_ERR"):
    """A protection error happened on a local buffer while a remote write was received."""

    cause = "a remote operation met a local buffer without the needed access"


class RemoteInvalidRequestError(CompletionError, status="REM_INV_REQ_ERR"):
    """The responder refused the request: operation not enabled on its QP, or a receive too small."""

    cause = (
        "the responder refused the request: its QP does not allow the operation (qp_access_flags,"
        " max_dest_rd_atomic), or its receive buffer is too small for the message"
    )


class RemoteAccessError(CompletionError, status="REM_ACCESS_ERR"):
    """The rkey, range or access flags do not allow the operation on the remote memory."""

    cause = "the remote MR does not allow it: wrong or stale rkey, range outside the MR, or access flag missing"


class RemoteOperationError(CompletionError, status="REM_OP_ERR"):
    """The responder could not complete the request."""

    cause = "the responder failed while carrying out the request (often a bad receive buffer on its side)"


class RetryExceededError(CompletionError, status="RETRY_EXC_ERR"):
    """The peer did not acknowledge within timeout and retries."""

    cause = (
        "no acknowledgement within timeout × retry_cnt: the peer is gone, its QP is not in RTR/RTS, or the path"
        " is wrong (GID index, VLAN, MTU, or a firewall on UDP port 4791)"
    )


class RnrRetryExceededError(CompletionError, status="RNR_RETRY_EXC_ERR"):
    """The peer had no receive posted, for longer than rnr_retry allows."""

    cause = "the peer had no receive posted (receiver not ready): post more receives, or raise rnr_retry"


class RemoteAbortedError(CompletionError, status="REM_ABORT_ERR"):
    """The responder aborted the operation."""

    cause = "the responder aborted the operation"


class FatalError(CompletionError, status="FATAL_ERR"):
    """The device failed."""

    cause = "the device reported a fatal error: close and reopen the context"


class ResponseTimeoutError(CompletionError, status="RESP_TIMEOUT_ERR"):
    """The responder did not answer in time."""

    cause = "the responder did not answer in time"


class GeneralError(CompletionError, status="GENERAL_ERR"):
    """Any other transport error."""

    cause = "the device reported an error that fits no other status"
