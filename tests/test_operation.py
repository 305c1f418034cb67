"""What Python makes of an operation that C changes meanwhile, in other threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from pyverbs_lite._base.args import Deadline
from pyverbs_lite._connection.engine import Engine
from pyverbs_lite._connection.operation import Operation


class Between:
    """A list in C, of which the last request is posted between the second look of somebody and the third."""

    status = 0

    def __init__(self) -> None:
        self.looks = 0

    def _look(self, before: int, after: int) -> int:
        self.looks += 1
        return before if self.looks <= 2 else after

    @property
    def posted(self) -> int:
        return self._look(4, 5)

    @property
    def done(self) -> int:
        return self._look(4, 4)

    @property
    def left(self) -> int:
        return self._look(1, 0)


def test_an_operation_has_not_ended_while_its_last_request_is_posted() -> None:
    op = Operation.around(cast(Any, Between()))
    assert not op.ended
    assert not op.ended  # in flight now
    op.c = cast(Any, SimpleNamespace(posted=5, done=5, left=0))
    assert op.ended


def test_whoever_waits_goes_on_to_while_the_last_request_is_posted() -> None:
    waits: list[tuple[object, ...]] = []

    def progress(*args: object) -> bool:
        waits.append(args)
        return True

    engine = SimpleNamespace(_progress=progress, _live={})
    op = SimpleNamespace(c=Between(), list=None)
    Engine.finish(cast(Any, engine), cast(Any, op), "write_many", Deadline(0))
    assert len(waits) == 1
