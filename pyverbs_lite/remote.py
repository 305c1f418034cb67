"""The peer's memory as plain values: ``RemoteBuffer``.

``slice_range`` is the one rule for ranges, shared by local and remote memory: a range that is not wholly inside
raises. Python's own slices clamp, and a transfer that silently moves fewer bytes than asked for is a bug that shows
up on the other host.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Protocol, SupportsIndex

from typing_extensions import Self

from .enums import AccessFlags
from .errors import StateError

__all__ = ["REMOTE", "REMOTE_ACCESS", "Advertisable", "RemoteBuffer", "Standing", "checked_int", "slice_range"]

#: The flags that say anything to a peer.
REMOTE_ACCESS = (AccessFlags.REMOTE_READ, AccessFlags.REMOTE_WRITE, AccessFlags.REMOTE_ATOMIC)
#: All of them: all that a peer can be allowed.
REMOTE = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
_SPACE = 1 << 64
_REMOTE_READ, _REMOTE_WRITE = int(AccessFlags.REMOTE_READ), int(AccessFlags.REMOTE_WRITE)


def _integer(value: object, what: str) -> int:
    if type(value) is int:  # nearly always, and asking whether it is a SupportsIndex takes fifty times as long
        return value
    # A bool is an int to Python and a mistake to everybody else; a float that happens to be whole is one, too.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{what} must be an integer, not {type(value).__name__} ({value!r})")
    return int(operator.index(value))


def _show(value: int) -> str:
    return str(value) if -4096 < value < 4096 else f"{value} ({value:#x})"


def checked_int(value: object, low: int, high: int, what: str, why: str = "") -> int:
    """Return the value as an ``int`` within ``low..high``.

    Raises:
        TypeError: it is no integer; a bool or a float is none.
        ValueError: it is outside; the text names the field, the value and the range.

    """
    number = value if type(value) is int else _integer(value, what)  # nearly always, and a call takes longer
    if not low <= number <= high:
        note = f": {why}" if why else ""
        raise ValueError(f"{what} is {_show(number)}, outside {_show(low)}..{_show(high)}{note}")
    return number


def slice_range(key: object, length: int, what: object) -> tuple[int, int]:
    """Return ``(start, stop)`` of a slice over ``length`` bytes; never clamps.

    Negative bounds count from the end, as everywhere in Python. ``what`` is the subject of the error texts, and is
    looked at only for those.

    Raises:
        TypeError: not a slice, or a bound is no integer.
        IndexError: a bound is outside.
        ValueError: the range ends before it starts, or has a step.

    """
    if not isinstance(key, slice):
        hint = f"one byte is [{key}:{key + 1}]" if type(key) is int and key >= 0 else "such as [0:8]"
        raise TypeError(f"{what} takes ranges only, {hint}; not [{key!r}]")
    if key.step is not None and _integer(key.step, f"{what}: the step of a range") != 1:
        raise ValueError(f"{what}: a range is contiguous, so its step must be 1, not {key.step}")
    ends = []
    for bound, default in ((key.start, 0), (key.stop, length)):
        if bound is None:
            end = default
        else:
            end = bound if type(bound) is int else _integer(bound, f"{what}: the bound of a range")
        ends.append(end + length if end < 0 else end)
    start, stop = ends
    if 0 <= start <= stop <= length:
        return start, stop
    shown = f"{what} ({length} bytes): range " + ":".join(
        "" if end is None else str(end) for end in (key.start, key.stop)
    )
    if 0 <= stop < start <= length:
        raise ValueError(f"{shown} ends before it starts")
    raise IndexError(f"{shown} is outside")


class Advertisable(Protocol):
    """Anything with a remote key: an ``MR``, or a slice of one."""

    @property
    def addr(self) -> int:
        """Where it starts, in the owner's address space."""

    @property
    def rkey(self) -> int:
        """The key that the peer uses."""

    @property
    def length(self) -> int:
        """Its size in bytes."""


class Standing:
    """What a connection knows of a buffer that came over it; all slices of the buffer share it.

    Attributes:
        reads, writes: the ``token`` of the ``Peer`` that it is of, while that allows reading, or writing; else None.
    """

    __slots__ = ("reads", "writes")

    def __init__(self, reads: object, writes: object) -> None:
        self.reads = reads
        self.writes = writes

    def end(self) -> None:
        """Take note that the owner has withdrawn the buffer."""
        self.reads = self.writes = None


#: Of a buffer that is a plain value: its other fields have to be looked at.
_PLAIN = Standing(None, None)


@dataclass(frozen=True, slots=True, repr=False)
class RemoteBuffer:
    """A range of a peer's registered memory; immutable, hashable, and pickles to any process or host.

    ``buf[a:b]`` is a part of it, with Python's negative bounds; a bound outside raises, never clamps.

    Attributes:
        addr: 64-bit address in the owner's address space.
        rkey: 32-bit remote key.
        length: size in bytes; ``addr + length`` is at most 2**64. (``len()`` of 2**63 and more is Python's limit.)
        name: what the owner calls it; empty if it has no name.
        access: the remote accesses the owner allows, or None where that is not known. Local flags are dropped.
        offset, extent: where in the named buffer this range starts, and the size of that whole buffer: for error
            texts, and not compared.
        domain: the ``PD.domain`` of its owner, or 0 where that is not known. Those of ``conn.remote`` have one, and
            only a connection to that domain takes them.
        owner: the peer's address, for error texts, and not compared.

    Raises:
        TypeError: a number is no integer (a bool or a float is none), or the name or the access has a wrong type.
        ValueError: a number is outside its range.

    """

    addr: int
    rkey: int
    length: int
    name: str = ""
    access: AccessFlags | None = None
    offset: int = field(default=0, compare=False, kw_only=True)
    extent: int = field(default=-1, compare=False, kw_only=True)
    domain: int = field(default=0, kw_only=True)
    owner: str = field(default="", compare=False, kw_only=True)
    #: The accesses as a plain number, and all of them where they are not known: the operators of flags take long.
    _bits: int = field(default=0, init=False, compare=False)
    _standing: Standing = field(default=_PLAIN, init=False, compare=False)

    def __post_init__(self) -> None:
        for text in ("name", "owner"):
            if not isinstance(value := getattr(self, text), str):
                raise TypeError(f"{text} must be a str, not {type(value).__name__}")
        if not isinstance(self.access, AccessFlags | None):
            raise TypeError(f"access must be AccessFlags or None (not known), not {self.access!r}")
        addr = checked_int(self.addr, 0, _SPACE - 1, "addr", "an address has 64 bits")
        room = min(_SPACE - addr, _SPACE - 1)  # a length has 64 bits as well
        length = checked_int(self.length, 0, room, "length", "addr + length is at most 2**64")
        offset = checked_int(self.offset, 0, addr, "offset", "the named buffer starts at addr - offset")
        whole = offset + length if self.extent == -1 else self.extent
        plain = {
            "addr": addr,
            "rkey": checked_int(self.rkey, 0, (1 << 32) - 1, "rkey", "an rkey has 32 bits"),
            "length": length,
            "offset": offset,
            "domain": checked_int(self.domain, 0, _SPACE - 1, "domain", "64 bits"),
            "extent": checked_int(whole, offset + length, _SPACE - addr + offset, "extent"),
            "access": None if self.access is None else self.access & REMOTE,
            "_bits": int(REMOTE if self.access is None else self.access & REMOTE),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, mr: Advertisable, *, name: str = "", access: AccessFlags | None = None) -> Self:
        """Return what a peer may know of an ``MR`` or a slice of one: its rkey, never its lkey."""
        return cls(mr.addr, mr.rkey, mr.length, name, access)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: slice) -> Self:
        start, stop = slice_range(key, self.length, self)
        part = object.__new__(type(self))  # every field is right, as this one's are: no need to look again
        put = object.__setattr__
        put(part, "addr", self.addr + start)
        put(part, "rkey", self.rkey)
        put(part, "length", stop - start)
        put(part, "name", self.name)
        put(part, "access", self.access)
        put(part, "offset", self.offset + start)
        put(part, "extent", self.extent)
        put(part, "domain", self.domain)
        put(part, "_bits", self._bits)
        put(part, "_standing", self._standing)
        put(part, "owner", self.owner)
        return part

    def of_peer(self, token: object, domain: int, owner: str) -> Self:
        """Return it as a connection shows it whose peer has that token: with where it comes from, and its standing."""
        shown = replace(self, domain=domain, owner=owner)
        bits = shown._bits
        standing = Standing(token if bits & _REMOTE_READ else None, token if bits & _REMOTE_WRITE else None)
        object.__setattr__(shown, "_standing", standing)
        return shown

    def require(self, flag: AccessFlags, operation: str) -> None:
        """Refuse an operation that the owner does not allow; passes where the access is not known.

        Args:
            flag: the remote access that the operation needs; of several, all.
            operation: what was asked for, to begin the error text.

        Raises:
            StateError: the owner does not allow it; the text says what it allows.

        """
        if self.access is None or flag & self.access == flag:
            return
        allowed = f"only {_names(self.access)}" if self.access else "no remote access"
        error = StateError(f"{operation} needs {_names(flag)}, but the owner of {self} allows {allowed}")
        error.operation = operation
        raise error

    def __str__(self) -> str:
        """Name it as error texts do: ``buffer 'kv'[16:32] at 192.0.2.1 port 18515``, as far as all that is known."""
        text = f"buffer {self.name!r}" if self.name else f"remote buffer {self.addr - self.offset:#x}"
        if self.length != self.extent:
            text += f"[{self.offset}:{self.offset + self.length}]"
        return f"{text} at {self.owner}" if self.owner else text

    def __repr__(self) -> str:
        extra = f", name={self.name!r}" if self.name else ""
        if self.access is not None:
            extra += f", access={_names(self.access) or 'none'}"
        return f"{type(self).__name__}(addr={self.addr:#x}, rkey={self.rkey:#x}, length={self.length}{extra})"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Through the constructor under every protocol, so that a forged pickle is range-checked like anything else.
        access = None if self.access is None else int(self.access)
        fields = (
            self.addr,
            self.rkey,
            self.length,
            self.name,
            access,
            self.offset,
            self.extent,
            self.domain,
            self.owner,
        )
        return _rebuild, (type(self), *fields)


def _rebuild(
    cls: type[RemoteBuffer],
    addr: int,
    rkey: int,
    length: int,
    name: str,
    access: int | None,
    offset: int,
    extent: int,
    domain: int,
    owner: str,
) -> RemoteBuffer:
    allowed = None if access is None else AccessFlags(access)
    return cls(addr, rkey, length, name, allowed, offset=offset, extent=extent, domain=domain, owner=owner)


def _names(flags: AccessFlags) -> str:
    return " and ".join(str(flag.name) for flag in REMOTE_ACCESS if flag in flags)
