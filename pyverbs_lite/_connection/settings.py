"""What ``connect`` and ``listen`` are told, checked before anything is opened."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from .. import gid
from .._base.args import check_int, check_seconds
from .._control.auth import key_bytes
from .._memory.buffer import Memory, look_at
from ..backoff import Backoff
from ..device import Context, devices
from ..enums import AccessFlags, PortState, TransportType
from ..errors import VerbsError
from ..wire import MAX_NAME
from .options import Options, Tuning

__all__ = [
    "KEEP_ALIVE",
    "ConnectOptions",
    "Settings",
    "check_buffers",
    "check_name",
    "owner_of",
    "port_of",
    "spelled",
]

if TYPE_CHECKING:
    from ssl import SSLContext

    from .._control.tls import Tls

#: Seconds until a host that says nothing is taken to be gone.
KEEP_ALIVE = 10.0
_LONGEST_KEEP_ALIVE = 32767  # TCP's
#: What of ``Settings`` is no option of its own.
_NO_OPTIONS = ("options", "access")
#: What may be given as a device, and as a text.
_DEVICES, _TEXTS = (str, Context, type(None)), (str, type(None))
_PLAIN = Options()
_F = TypeVar("_F", bound=Callable[..., object])


class ConnectOptions(Tuning, total=False):
    """What ``connect`` and ``listen`` can be told, over TCP, librdmacm and in asyncio; ``connect`` explains it.

    A new option is written here and in ``Settings`` (or in ``Tuning`` and ``Options``), and nowhere else.
    """

    device: str | Context | None
    port_num: int | None
    gid_index: int | None
    gid_ip: str | None
    gid_netdev: str | None
    buffers: Mapping[str, Memory] | None
    timeout: float | None
    authkey: bytes | str | None
    ssl_context: SSLContext | None
    server_hostname: str | None
    keep_alive: float | None
    reconnect: Backoff | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which device, port and GID to use, and how; None leaves the choice to the library.

    Attributes:
        buffers: name -> buffer: what the peer is to have from the start.
        timeout: seconds for the handshake.
        authkey: what the peer must know too, as bytes.
        ssl_context: how the control channel is protected by TLS.
        server_hostname: what the certificate of who is connected to must be for; by default its ``host``.
        keep_alive: seconds after which a host that says nothing is gone; 0 or None waits for ever.
        reconnect: how to go on trying, or None to try once.
        access: name -> what the peer may do, for ``buffers`` that it may not do everything with; no option.
        options: how the connection is tuned.
    """

    device: str | Context | None = None
    port_num: int | None = None
    gid_index: int | None = None
    gid_ip: str | None = None
    gid_netdev: str | None = None
    buffers: Mapping[str, Memory] = field(default_factory=dict)
    timeout: float | None = 10.0
    authkey: bytes | str | None = field(default=None, repr=False)
    ssl_context: SSLContext | None = None
    server_hostname: str | None = None
    keep_alive: float | None = KEEP_ALIVE
    reconnect: Backoff | None = None
    access: Mapping[str, AccessFlags] = field(default_factory=dict)
    options: Options = _PLAIN

    @classmethod
    def of(cls, given: ConnectOptions) -> Settings:
        """Make the settings of a ``connect`` or ``listen``.

        Raises:
            TypeError: there is no such option, or it is not what it must be.
            ValueError, BufferError: as ``Options``, and as ``check_buffers``.
        """
        tuning: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for name, value in given.items():
            if name in Tuning.__annotations__:
                tuning[name] = value
            elif name in ConnectOptions.__annotations__:
                rest[name] = value
            else:
                from difflib import get_close_matches

                near = get_close_matches(name, [known for known, _ in _each_option()], 1)
                raise TypeError(f"there is no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return cls(options=Options(**tuning) if tuning else _PLAIN, **rest)

    def __post_init__(self) -> None:
        if not isinstance(self.device, _DEVICES):
            raise TypeError(f"device must be a name, an open Context or None, not {self.device!r}")
        # The device knows the real limits; here is found what no device can mean.
        for name, low in (("port_num", 1), ("gid_index", 0)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low, 255)
        for name in ("gid_ip", "gid_netdev"):
            if not isinstance(getattr(self, name), _TEXTS):
                raise TypeError(f"{name} must be a str or None, not {getattr(self, name)!r}")
        if self.gid_ip is not None:
            try:
                gid.parse_gid(self.gid_ip.partition("%")[0])
            except ValueError:
                raise ValueError(f"gid_ip is not an IP address: {self.gid_ip!r}") from None
        object.__setattr__(self, "buffers", check_buffers(self.buffers))
        if self.authkey is not None:
            object.__setattr__(self, "authkey", key_bytes(self.authkey))
        if not isinstance(self.server_hostname, _TEXTS):
            raise TypeError(f"server_hostname must be a str or None, not {self.server_hostname!r}")
        if self.server_hostname is not None and self.ssl_context is None:
            raise ValueError(
                "server_hostname says whose certificate is expected, and without ssl_context there is none"
            )
        check_keep_alive(self.keep_alive)
        if not isinstance(self.reconnect, Backoff | None):
            raise TypeError(f"reconnect must be a Backoff or None, not {self.reconnect!r}")
        if self.timeout is not None:
            check_seconds(self.timeout)  # refuse a bad one here rather than at the first accept()

    def tls(self, host: str | None) -> Tls | None:
        """Make a TLS session, if there is to be one: with a ``host`` for who connects to that, else for who accepts.

        Raises:
            As ``Tls``.
        """
        if self.ssl_context is None:
            return None
        from .._control.tls import Tls  # here, for ssl takes long to import

        if host is None:
            return Tls(self.ssl_context, server_side=True)
        name = self.server_hostname or host.partition("%")[0]
        return Tls(self.ssl_context, server_side=False, server_hostname=name)

    def check_connecting(self, host: object) -> None:
        """Refuse what cannot be for a side that connects.

        Raises:
            As ``Tls``.
        """
        self.tls(host if isinstance(host, str) and host else "localhost")

    def check_accepting(self) -> None:
        """Refuse what cannot be for a side that accepts.

        Raises:
            DeviceNotFoundError: no device has that name.
            ValueError: what is for one that connects.
            As ``Tls``.
        """
        if self.server_hostname is not None:
            raise ValueError("server_hostname is for the side that connects; this one shows its own certificate")
        if self.reconnect is not None:
            raise ValueError("reconnect is for the side that connects; this one waits for the peer to come again")
        self.tls(None)
        if isinstance(self.device, str):
            Context(self.device).close()


def _each_option() -> list[tuple[str, Any]]:
    """List every option as its name and its dataclass field."""
    own = [(item.name, item) for item in fields(Settings) if item.name not in _NO_OPTIONS]
    return own + [(item.name, item) for item in fields(Options)]


def spelled(function: _F) -> _F:
    """Let ``help()`` show each option with its default, where the code says ``**options``."""
    signature = inspect.signature(function)
    *named, options = signature.parameters.values()
    assert options.kind is inspect.Parameter.VAR_KEYWORD
    named += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if item.default is MISSING else item.default,
            annotation=item.type,
        )
        for name, item in _each_option()
    ]
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def check_name(name: object) -> None:
    """Refuse what cannot be a buffer's name.

    Raises:
        TypeError, ValueError: not a str, or not of 1 to 255 bytes as UTF-8.
    """
    if not isinstance(name, str):
        raise TypeError(f"a buffer's name must be a str, not {name!r}")
    try:
        length = len(name.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"a buffer's name must be text that UTF-8 can carry, not {name!r}") from error
    if not 1 <= length <= MAX_NAME:
        raise ValueError(f"a buffer's name must have 1 to {MAX_NAME} bytes as UTF-8, and {name!r} has {length}")


def check_keep_alive(seconds: object) -> None:
    """Refuse what is no number of seconds for ``keep_alive``.

    Raises:
        TypeError, ValueError: not a number, or not 0 and not 1 to 32767.
    """
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float)):
        raise TypeError(f"keep_alive must be a number of seconds or None, not {seconds!r}")
    if seconds and not 1 <= seconds <= _LONGEST_KEEP_ALIVE:
        raise ValueError(f"keep_alive must be 1 to {_LONGEST_KEEP_ALIVE} seconds, or 0 for never, not {seconds}")


def check_buffers(buffers: Mapping[str, Memory] | None) -> dict[str, Memory]:
    """Return named buffers of which each can be registered.

    Raises:
        As ``PD.reg_mr``, and as ``check_name``.
    """
    if buffers is None:
        return {}
    if type(buffers) is not dict and not isinstance(buffers, Mapping):  # mostly it is, and an ABC takes its time
        raise TypeError(f"buffers must map names to buffers, not {buffers!r}")
    for name, buffer in buffers.items():
        check_name(name)
        if not look_at(buffer, f"buffer {name!r}").nbytes:
            raise ValueError(f"buffer {name!r} is empty: it has no memory to register")
    return dict(buffers)


def owner_of(local_address: str) -> tuple[Context, int] | None:
    """Open the device that has an address in its GID table; return it, for the caller to close, and the port."""
    for info in devices():
        if info.transport_type == TransportType.IWARP:
            continue
        with suppress(VerbsError), ExitStack() as stack:  # one that cannot be opened is not the one
            context = stack.enter_context(Context(info.name))
            if port_num := port_of(context, local_address):
                stack.pop_all()
                return context, port_num
    return None


def port_of(context: Context, local_address: str) -> int | None:
    """Find the port of a device, an ACTIVE one, that has an address in its GID table."""
    address, _, scope = local_address.partition("%")
    try:
        wanted = gid.parse_gid(address)
    except ValueError:
        return None
    for port_num in range(1, context.query_device().phys_port_cnt + 1):
        if context.query_port(port_num).state == PortState.ACTIVE:
            rows = [row for row in context.gid_table(port_num) if row.gid == wanted]
            if any(not scope or scope in row.interface_names or not row.interface_names for row in rows):
                return port_num
    return None
