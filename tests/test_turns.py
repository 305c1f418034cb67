"""Tasks that wait their turn: nobody overtakes one that came before, whatever was found meanwhile."""

import asyncio
import errno

import pytest

import pyverbs_lite as pvl
from pyverbs_lite._aio.turns import Turns
from pyverbs_lite._base.args import Deadline


class Watch:
    """A watch of nothing; its places are futures of asyncio's."""

    in_order, closed = True, False

    def __init__(self):
        self.burst, self.turns = 0, []

    def glance(self):
        pass

    def note_failure(self):
        pass

    def place(self):
        return asyncio.get_running_loop().create_future()

    def rouse(self, place):
        if not place.done():
            place.set_result(None)

    async def sleep(self, place, deadline):
        await asyncio.wait([place], timeout=None if deadline.seconds is None else deadline.left)


class Few:
    """What there are few of, as far as was said before."""

    def __init__(self):
        self.said = 0

    def __call__(self):
        return self.said

    def late(self, operation):
        return pvl.WaitTimeout("too late", operation)


def full():
    raise pvl.QueueFullError(errno.EAGAIN, "send", "somebody else has the place")


def test_who_finds_room_that_one_in_front_did_not_find_lets_that_one_go_first():
    async def main():
        watch, few, done, found = Watch(), Few(), [], iter([full, lambda: None])
        turns = Turns(watch, few)

        def first():
            next(found)()
            done.append("first")

        tasks = [asyncio.ensure_future(turns.take("send", first, Deadline(None)))]
        tasks.append(asyncio.ensure_future(turns.take("send", lambda: done.append("second"), Deadline(None))))
        await asyncio.sleep(0)
        few.said = 2
        turns.wake()
        for _ in range(10):
            await asyncio.sleep(0)
        assert done == []
        turns.wake()
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert done == ["first", "second"]
        assert not turns.waiting
        assert not watch.turns

    asyncio.run(main())


def test_who_is_not_in_front_in_time_is_told_so_and_takes_nothing():
    async def main():
        watch, few = Watch(), Few()
        turns = Turns(watch, few)
        front = asyncio.ensure_future(turns.take("send", full, Deadline(None)))
        behind = asyncio.ensure_future(turns.take("send", lambda: pytest.fail("it overtook"), Deadline(0.02)))
        with pytest.raises(pvl.WaitTimeout, match="too late"):
            await asyncio.wait_for(behind, 5)
        front.cancel()
        with pytest.raises(asyncio.CancelledError):
            await front
        assert not turns.waiting

    asyncio.run(main())


def test_who_gives_up_in_front_lets_the_next_go():
    async def main():
        watch, few, done = Watch(), Few(), []
        turns = Turns(watch, few)
        front = asyncio.ensure_future(turns.take("send", full, Deadline(None)))
        behind = asyncio.ensure_future(turns.take("send", lambda: done.append(1), Deadline(None)))
        await asyncio.sleep(0)
        few.said = 1
        front.cancel()
        await asyncio.wait_for(behind, 5)
        assert done == [1]

    asyncio.run(main())
