"""Ownership of verbs objects.

1. A child holds its parents strongly; a parent knows its children weakly. Children register themselves.
2. ``close()`` is idempotent and closes children youngest first, then destroys. A dependant is always younger than what
   it depends on, so that order is always legal. If destroying fails the handle stays, and a retry is possible.
3. A finaliser is the net under it, also at exit: it destroys, then warns; it never raises, and it does nothing in a
   forked child, whose handles belong to the parent process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, NoReturn, cast

from typing_extensions import Self

from .._homes import find
from ..errors import ClosedError, VerbsError
from ..ffi import CData

__all__ = ["Resource"]

_serials = itertools.count()
#: How many forks lie between the first process and this one: cheaper to compare at each use than a process id, which
#: is a system call.
_forks = 0
_pid = os.getpid()


def _count_fork() -> None:
    global _forks, _pid
    _forks += 1
    _pid = os.getpid()


os.register_at_fork(after_in_child=_count_fork)


class _Handle:
    """A C handle and what destroys it; shared by an object and its finaliser, and never copied.

    Handles know each other and never the objects that own them: a finaliser lives as long as the program, so an object
    that it could reach, such as a parent with an attribute that leads back to the child, would never be collected.
    """

    __slots__ = (
        "cdata",
        "children",
        "closing",
        "destroy",
        "dropped",
        "forks",
        "label",
        "lock",
        "parents",
        "pid",
        "quiet",
    )

    def __init__(
        self, cdata: CData | None, destroy: Callable[[CData], None], parents: tuple[_Handle, ...], label: str
    ) -> None:
        self.cdata = cdata
        self.destroy = destroy
        self.parents = parents
        #: Each child, and where the object is that is to be closed before this one; None for one that need not be.
        self.children: dict[_Handle, _Net | None] = {}
        self.dropped = False
        #: Whether nobody is told that it, or what was made of it, was never closed: the caller does not know of it.
        self.quiet = False
        self.label = label
        self.pid = _pid
        self.forks = _forks
        # Reentrant, with a flag, because a signal handler may close what it interrupted the closing of.
        self.lock = threading.RLock()
        self.closing = False

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child's copy; the lock may then be held by a thread that is not there."""
        return self.forks != _forks

    def close(self) -> None:
        # Taken away before the call: if an interrupt lands after it (Ctrl-C, or whatever else a signal handler raises),
        # a leak at exit is better than destroying twice. Only a refused verb gives the handle back.
        cdata, self.cdata = self.cdata, None
        if cdata is not None:
            try:
                self.destroy(cdata)
            except VerbsError:
                self.cdata = cdata
                raise
        self.leave()

    def leave(self) -> None:
        """Stop being a child."""
        for parent in self.parents:
            parent.children.pop(self, None)
        self.parents = ()


#: What an object has that gave its handle away.
_NOTHING = _Handle(None, lambda _: None, (), "nothing")


class _Net(weakref.ref["Resource"]):
    """Calls ``_abandoned`` when its object is collected, or at exit: a ``weakref.finalize`` of a third the size."""

    __slots__ = ("atexit", "handle")

    atexit: bool
    handle: _Handle

    def __new__(cls, owner: Resource, handle: _Handle) -> Self:
        net = super().__new__(cls, owner, _fallen)
        net.handle = handle
        net.atexit = True
        _nets[net] = None
        return net

    # Not those of the object, and not after it is gone: each is itself.
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    @property
    def alive(self) -> bool:
        """Whether it has still something to do."""
        return self in _nets

    def detach(self) -> None:
        """Have nothing to do any more."""
        _nets.pop(self, None)


#: Those that have something to do, oldest first.
_nets: dict[_Net, None] = {}


def _fallen(net: _Net, nets: dict[_Net, None] = _nets) -> None:
    # By its own reference: when the interpreter ends the name may be gone, and then nothing is left to do.
    if nets.pop(net, False) is None:
        _abandoned(net.handle)


def _at_exit(nets: dict[_Net, None] = _nets) -> None:
    """Destroy what is left, youngest first."""
    for net in reversed(list(nets)):
        if net.atexit:
            _fallen(net, nets)
    nets.clear()


# Among the finalisers of everything else it is the oldest, so connections are closed before what they are made of.
weakref.finalize(_Net, _at_exit)


def _abandoned(handle: _Handle) -> None:
    """Destroy what was dropped without ``close()``, then say so."""
    if handle.cdata is None or handle.foreign:
        return
    handle.dropped = True
    if handle.children:
        return  # collected together, in an order that is anybody's guess: the last child calls this again
    parents = handle.parents
    try:
        with handle.lock:
            handle.close()
    except Exception as error:
        outcome = f"and could not be destroyed: {error}"
        handle.leave()
    else:
        outcome = "it was destroyed now; use close() or a with block"
    if not (handle.quiet or any(parent.quiet for parent in parents)):
        # Where warnings are errors this raises, and a finaliser has nobody to raise to.
        with contextlib.suppress(Exception):
            warnings.warn(f"{handle.label} was never closed ({outcome})", ResourceWarning, stacklevel=2)
    for parent in parents:
        if parent.dropped:
            _abandoned(parent)


class Resource:
    """Base of every object that owns a verbs handle.

    A context manager; ``closed`` tells its state. Handles cannot be pickled or copied: they mean nothing elsewhere.
    """

    #: Class name -> class, so that a parent can make a child without importing its module.
    _kinds: ClassVar[dict[str, type[Resource]]] = {}
    #: Whether a parent closes this before its other children: a QP, whose requests in flight hold memory regions.
    _closes_early: ClassVar[bool] = False
    _owned: _Handle

    def __init_subclass__(cls) -> None:
        Resource._kinds.setdefault(cls.__name__, cls)

    def _own(
        self, cdata: CData, destroy: Callable[[CData], None], *parents: Resource, label: str | None = None
    ) -> None:
        """Take ownership of a handle, and become a child of ``parents``; ``destroy`` must not lead to this object."""
        self._serial = next(_serials)
        self._parents = parents
        owners = tuple(parent._owned for parent in parents)
        self._owned = _Handle(cdata, destroy, owners, label or f"{type(self).__name__} object")
        self._finalizer = _Net(self, self._owned)
        for owner in owners:
            owner.children[self._owned] = self._finalizer

    @property
    def _children(self) -> list[Resource]:
        """The children that are there."""
        # A list of the references first, because another thread may add a child meanwhile.
        references = list(self._owned.children.values())
        return [child for ref in references if ref is not None and (child := ref()) is not None]

    def _attach(self, parent: Resource, *, closed_with: bool = True) -> None:
        """Become a child of one more object; with ``closed_with`` False only in the order of collection."""
        self._owned.parents += (parent._owned,)
        parent._owned.children[self._owned] = self._finalizer if closed_with else None
        if closed_with:
            self._parents += (parent,)

    def _detach(self, parent: Resource) -> None:
        """Stop being a child of an object, which need not be open any more."""
        self._owned.parents = tuple(owner for owner in self._owned.parents if owner is not parent._owned)
        parent._owned.children.pop(self._owned, None)
        self._parents = tuple(other for other in self._parents if other is not parent)

    def _hand_over(self, heir: Resource) -> None:
        """Give the handle, with all that was made of it, to an object of the same kind; this one is closed then."""
        owned, net = self._owned, self._finalizer
        # At each point here the two share one handle, which is destroyed once, whichever of them is closed.
        heir._serial, heir._parents, heir._owned = self._serial, self._parents, owned
        heir._finalizer = _Net(heir, owned)
        for parent in owned.parents:
            parent.children[owned] = heir._finalizer
        for child in self._children:
            child._parents = tuple([heir if parent is self else parent for parent in child._parents])
        self._owned = _NOTHING
        net.detach()
        self._parents = ()

    def _make(self, kind: str, *args: object, **options: object) -> Resource:
        """Make a child of a class that this module cannot import, because it imports this one."""
        cls = Resource._kinds.get(kind) or cast("type[Resource]", find(kind))
        return cls(self, *args, **options)  # type: ignore[call-arg]

    @property
    def closed(self) -> bool:
        """Whether the handle is gone."""
        owned = getattr(self, "_owned", None)
        return owned is None or owned.cdata is None

    @property
    def _handle(self) -> CData:
        """The C pointer; the one way to it, so that a closed object never reaches a verb.

        Raises:
            ClosedError: the object was closed, or belongs to another process.

        """
        owned = getattr(self, "_owned", None)
        if owned is None or owned.cdata is None:
            self._raise_closed()
        if owned.foreign:
            raise ClosedError(
                f"this {type(self).__name__} was opened by process {owned.pid}; verbs objects cannot be used"
                " in a forked child: open the device there anew"
            )
        cdata: CData = owned.cdata
        return cdata

    def _raise_closed(self) -> NoReturn:
        raise ClosedError(f"this {type(self).__name__} is closed")

    def close(self) -> None:
        """Close the children, youngest first, then destroy this object; safe to call again, and from any thread.

        In a forked child the object is only marked as closed: the handle belongs to the parent process.

        Raises:
            VerbsOSError: the verb refused; the object stays open, and ``close()`` may be called again.

        """
        owned: _Handle | None = getattr(self, "_owned", None)
        if owned is None:
            return
        if owned.foreign:
            owned.cdata = None
            return
        with owned.lock:
            if owned.cdata is None or owned.closing:
                return
            owned.closing = True
            try:
                self._close(owned)
            finally:
                owned.closing = False

    def _close(self, owned: _Handle) -> None:
        for child in sorted(self._children, key=lambda c: (c._closes_early, c._serial), reverse=True):
            child.close()
        self._before_destroy()
        owned.close()
        self._finalizer.detach()
        self._parents = ()
        self._after_destroy()

    def _before_destroy(self) -> None:
        """Do what must precede the destroying verb; may raise to refuse it."""

    def _after_destroy(self) -> None:
        """Let go of what the handle needed, such as exported buffers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except VerbsError:
            if error is None:
                raise
            # The first error counts. The object is still open, so its finaliser tries again, and warns.

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} holds a handle of this process and cannot be pickled or copied;"
            " send plain values instead, such as RemoteBuffer"
        )
