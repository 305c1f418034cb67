"""What a connection keeps until it is closed, without a device."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from support import in_thread

from pyverbs_lite._connection.registry import Registry
from pyverbs_lite.remote import REMOTE


class Thing:
    looks = 0

    def __init__(self, log: list[Thing] | None = None) -> None:
        self.over, self.log = False, log

    @property
    def closed(self) -> bool:
        Thing.looks += 1
        return self.over

    def close(self) -> None:
        self.over = True
        if self.log is not None:
            self.log.append(self)


def registry() -> Registry:
    nothing: Any = Mock()
    return Registry(nothing, nothing, nothing, REMOTE)


def test_to_keep_one_of_many_thousands_costs_what_the_first_did() -> None:
    kept, Thing.looks = registry(), 0
    for _ in range(5000):
        kept.keep(Thing())
    assert Thing.looks <= 2 * 5000


def test_what_is_closed_is_forgotten_in_time() -> None:
    kept, stays = registry(), Thing()
    kept.keep(stays)
    for _ in range(1000):
        thing = Thing()
        kept.keep(thing)
        thing.close()
    assert len(kept._kept) < 50
    assert kept._kept[0] is stays


def test_threads_that_register_lose_nothing() -> None:
    kept = registry()
    waits = [in_thread(lambda: [kept.keep(Thing()) for _ in range(2000)]) for _ in range(4)]
    for wait in waits:
        wait(30)
    assert len(kept._kept) == 8000


def test_the_youngest_is_closed_first_and_a_refusal_can_be_tried_again() -> None:
    kept, log = registry(), []
    things = [Thing(log) for _ in range(3)]
    for thing in things:
        kept.keep(thing)
    refused = Mock(side_effect=[ValueError, None])
    things[1].close = refused  # type: ignore[method-assign]
    try:
        kept.close()
    except ValueError:
        kept.close()
    assert refused.call_count == 2
    assert (log[0], log[-1]) == (things[2], things[0])
    assert not kept.fall_silent()
