from __future__ import annotations

import pytest

from pyverbs_lite import AccessFlags as A
from pyverbs_lite._base.access import check_access, pin


def test_what_lets_a_peer_write_must_be_able_to_write() -> None:
    for flags in (A.REMOTE_WRITE, A.REMOTE_ATOMIC | A.REMOTE_READ, int(A.REMOTE_WRITE)):
        with pytest.raises(ValueError, match="needs LOCAL_WRITE"):
            check_access(flags)
    assert check_access(A.REMOTE_WRITE | A.LOCAL_WRITE) == A.REMOTE_WRITE | A.LOCAL_WRITE
    assert check_access(int(A.REMOTE_READ)) is A.REMOTE_READ


@pytest.mark.parametrize("bad", [-1, 1 << 31])
def test_flags_that_the_verb_could_not_take(bad: int) -> None:
    with pytest.raises(ValueError, match="access"):
        check_access(bad)


@pytest.mark.parametrize("bad", [1.0, "LOCAL_WRITE", True])
def test_flags_that_are_none(bad: object) -> None:
    with pytest.raises(TypeError, match="access"):
        check_access(bad)  # type: ignore[arg-type]


def test_the_access_that_a_buffer_gets_unasked() -> None:
    for buffer, expected in ((bytearray(3), A.LOCAL_WRITE), (b"abc", A(0))):
        pinned, access = pin(buffer, None)
        assert (pinned.nbytes, access) == (3, expected)
        pinned.release()


def test_a_buffer_that_cannot_be_registered_is_let_go() -> None:
    empty = bytearray()
    with pytest.raises(ValueError, match="empty buffer"):
        pin(empty, None)
    empty.append(1)  # not held any more
    with pytest.raises(BufferError, match="read-only"):
        pin(b"abc", A.LOCAL_WRITE)
    pinned, access = pin(b"abc", A.REMOTE_READ)
    assert access is A.REMOTE_READ
    pinned.release()
