"""The soak for a few seconds, and that it sees what it is there to see. ``make soak`` is the long one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from soak import resources
from soak.faces import Blocking, drive
from soak.letters import Wrong
from soak.life import Home, Living
from soak.plan import Life, Settings, Step, life_of
from soak.server import Host
from soak.tally import Tally

import pyverbs_lite as pvl

pytestmark = pytest.mark.rdma


def test_a_short_soak_ends_as_it_began():
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "SOAK_SEED": "20",
        "SOAK_SECONDS": "3",
        "SOAK_PEERS": "12",
    }
    done = subprocess.run([sys.executable, "-m", "soak"], env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unexpected errors: 0" in done.stdout


def test_a_seed_is_a_plan():
    lives = [life_of(Settings(seed, 1, 20), peer, number) for seed in (1, 2) for peer in (3, 4) for number in (0, 1)]
    assert len({str(life.steps) for life in lives}) == 8
    again = life_of(Settings(2, 99, 50), 4, 1)
    assert (again, again.steps) == (lives[-1], lives[-1].steps)


@pytest.fixture
def server() -> Iterator[tuple[Host, pvl.Listener]]:
    made = Host(2, frozenset())
    with pvl.listen("127.0.0.1", 0) as listener:
        accepting = threading.Thread(target=made.accept, args=(listener,))
        accepting.start()
        yield made, listener
    accepting.join(10)


def live(listener: pvl.Listener, home: Home, number: int, steps: list[Step]) -> None:
    life = Life(1, number, own_context=True, tuning={}, connect_cut=None, end="orderly", steps=steps)
    with pvl.connect("127.0.0.1", listener.port) as conn:
        drive(Living(life, Blocking(conn), home, Tally(), itertools.count()).run(lambda: False))


def test_a_byte_that_is_not_what_it_must_be_is_found(server):
    made, listener = server
    home = Home()
    live(listener, home, 0, [Step(0, "write", {"at": 1000, "size": 500})])
    live(listener, home, 1, [Step(0, "read", {"at": 900, "size": 5000, "into": "desk"})])
    place = (64 << 10) + 64 + 1234
    made._arena[place] ^= 1
    with pytest.raises(Wrong, match="at 0: byte 1234 is "):
        live(listener, home, 2, [])


def test_what_is_not_given_back_is_found(context):
    before = resources.kernel()
    pd = context.alloc_pd()
    region = pd.alloc(8192)
    left = resources.settled(before, resources.kernel, 0.1)
    assert {name: after - was for name, (was, after) in left.items()} == {"pd": 1, "mr": 1, "mrlen": 8192}
    region.close()
    pd.close()
    assert resources.settled(before, resources.kernel) == {}
