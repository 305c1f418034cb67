"""Random numbers come many at a time, and no two are the same: not in a forked child either."""

import os

import pytest

from pyverbs_lite._base import random as _random
from pyverbs_lite._base.random import random_64


def test_numbers_are_64_bits_and_no_two_are_equal():
    found = [random_64() for _ in range(1000)]
    assert len(set(found)) == 1000
    assert all(0 <= number < 1 << 64 for number in found)
    assert max(found) > 1 << 63
    assert min(found) < 1 << 61


def test_the_kernel_is_asked_seldom(monkeypatch):
    asked = []
    urandom = os.urandom

    def look(count):
        asked.append(count)
        return urandom(count)

    monkeypatch.setattr(_random.os, "urandom", look)
    for _ in range(64):
        random_64()
    assert 1 <= len(asked) <= 3


def test_a_forked_child_has_others():
    random_64()
    near, far = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(far, repr([random_64() for _ in range(5)]).encode())
        os._exit(0)
    os.close(far)
    with open(near, "rb") as pipe:
        theirs = pipe.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not set(eval(theirs)) & {random_64() for _ in range(100)}


@pytest.mark.parametrize("bits", [1, 24, 64])
def test_fewer_bits(bits):
    from pyverbs_lite.endpoint import random_bits

    found = {random_bits(bits) for _ in range(200)}
    assert all(0 <= number < 1 << bits for number in found)
    assert len(found) > 1
