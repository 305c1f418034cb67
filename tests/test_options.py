"""Options and settings: what is refused before anything is opened, and what a device cuts down."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest

import pyverbs_lite as pvl
from pyverbs_lite._connection.options import _RANGES, Options, Tuning
from pyverbs_lite._connection.settings import ConnectOptions, Settings, check_buffers, check_name

#: Everything that takes the options of a connection.
TAKERS = (pvl.connect, pvl.listen, pvl.cm.connect, pvl.cm.listen, pvl.aio.connect, pvl.aio.listen)
TAKERS += (pvl.aio.cm_connect, pvl.aio.cm_listen)


def limits(**changes: int) -> pvl.DeviceAttr:
    values: dict[str, Any] = {field.name: 1000 for field in dataclasses.fields(pvl.DeviceAttr)}
    return pvl.DeviceAttr(**{**values, **changes})


def test_every_option_has_a_range_a_type_and_a_default():
    names = {field.name for field in dataclasses.fields(Options)}
    assert set(_RANGES) | {"path_mtu"} == names == set(Tuning.__annotations__)
    for name, (low, high) in _RANGES.items():
        assert low <= getattr(Options(), name) <= high
        assert name in (Options.__doc__ or "")


@pytest.mark.parametrize("name", sorted(_RANGES))
def test_a_value_is_in_its_range_or_named(name):
    low, high = _RANGES[name]
    assert getattr(Options(**{name: low}), name) == low
    assert getattr(Options(**{name: high}), name) == high
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match=rf"{name} must be {low} to {high}, not {value}"):
            Options(**{name: value})
    for value in (None, True, 1.0, "1", math.nan):
        with pytest.raises(TypeError, match=name):
            Options(**{name: value})


@pytest.mark.parametrize(("given", "mtu"), [(1024, pvl.MTU.MTU_1024), (pvl.MTU.MTU_256, pvl.MTU.MTU_256), (None, None)])
def test_a_path_mtu_is_bytes_or_an_mtu(given, mtu):
    assert Options(path_mtu=given).path_mtu == mtu


@pytest.mark.parametrize("given", [0, 1000, 8192, -1])
def test_what_is_no_mtu_is_named(given):
    with pytest.raises(ValueError, match=str(given)):
        Options(path_mtu=given)


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="recv_dept"):
        Options(recv_dept=4)


def test_a_device_cuts_what_is_too_deep_and_nothing_else():
    asked = Options(send_depth=4000, recv_depth=3000, max_rd_atomic=40, max_dest_rd_atomic=50, max_message_size=777)
    cut = asked.within(limits(max_qp_wr=900, max_cqe=1400, max_qp_init_rd_atom=7, max_qp_rd_atom=5))
    assert (cut.send_depth, cut.recv_depth) == (700, 700)  # both must fit into one CQ
    assert (cut.max_rd_atomic, cut.max_dest_rd_atomic) == (7, 5)
    rest = {"send_depth": 0, "recv_depth": 0, "max_rd_atomic": 0, "max_dest_rd_atomic": 0}
    before, after = dataclasses.asdict(asked), dataclasses.asdict(cut)
    assert {k: v for k, v in before.items() if k not in rest} == {k: v for k, v in after.items() if k not in rest}
    assert asked.within(limits(max_qp_wr=5000, max_cqe=20000)) == asked


def test_a_device_without_reads_leaves_none():
    cut = Options().within(limits(max_qp_init_rd_atom=0, max_qp_rd_atom=0))
    assert (cut.max_rd_atomic, cut.max_dest_rd_atomic) == (0, 0)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"device": 1}, TypeError),
        ({"device": b"rxe0"}, TypeError),
        ({"port_num": 0}, ValueError),
        ({"port_num": 256}, ValueError),
        ({"port_num": "1"}, TypeError),
        ({"gid_index": -1}, ValueError),
        ({"gid_index": 256}, ValueError),
        ({"gid_index": True}, TypeError),
        ({"gid_ip": "300.1.1.1"}, ValueError),
        ({"gid_ip": 5}, TypeError),
        ({"gid_netdev": 5}, TypeError),
    ],
)
def test_settings_are_checked_at_once(given, error):
    with pytest.raises(error, match=next(iter(given)).partition("_")[0]):
        Settings(options=Options(), **given)


@pytest.mark.parametrize("given", [{"gid_ip": "fe80::1%eth0"}, {"gid_ip": "10.0.0.1"}, {"gid_index": 255}, {}])
def test_good_settings_pass(given):
    assert Settings(options=Options(), **given).port_num is None


def test_every_setting_has_a_type_and_the_other_way_round():
    own = {field.name for field in dataclasses.fields(Settings)} - {"options", "access"}
    assert own | set(Tuning.__annotations__) == set(ConnectOptions.__annotations__)


@pytest.mark.parametrize("taker", TAKERS, ids=lambda taker: f"{taker.__module__}.{taker.__name__}")
def test_help_shows_every_option_with_its_default(taker):
    shown = inspect.signature(taker).parameters
    assert set(ConnectOptions.__annotations__) == set(shown) - {"host", "port", "backlog"}
    assert shown["timeout"].default == 10.0
    assert shown["buffers"].default is None
    assert shown["recv_depth"].default == Options().recv_depth
    assert all(isinstance(one.annotation, str) for one in shown.values())


def test_settings_take_what_they_are_given_to_its_place():
    made = Settings.of({"recv_depth": 5, "gid_index": 3, "timeout": None, "buffers": {"a": b"xy"}})
    assert made == Settings(gid_index=3, timeout=None, buffers={"a": b"xy"}, options=Options(recv_depth=5))
    assert Settings.of({"buffers": None}) == Settings()


@pytest.mark.parametrize(
    ("given", "near"), [("recv_dept", "recv_depth"), ("option", "options"), ("gidindex", "gid_index")]
)
def test_an_option_that_does_not_exist_is_named_and_the_nearest_offered(given, near):
    with pytest.raises(TypeError, match=f"no option '{given}'"):
        pvl.connect("host", 1, **{given: 1})
    if near != "options":  # a field of Settings, and not an option
        with pytest.raises(TypeError, match=f"did you mean '{near}'"):
            pvl.listen("host", 1, **{given: 1})
    with pytest.raises(TypeError, match="no option 'options'"):
        pvl.cm.listen("host", 1, options=Options())


@pytest.mark.parametrize(("timeout", "error"), [(-1, ValueError), ("1", TypeError), (math.nan, ValueError)])
def test_a_bad_timeout_is_refused_at_once(timeout, error):
    with pytest.raises(error, match="timeout"):
        pvl.listen("127.0.0.1", 0, timeout=timeout)


def test_named_buffers_are_checked_at_once():
    buffers = {"a": bytearray(3), "é": b"constant"}
    assert check_buffers(buffers) == buffers
    assert check_buffers(None) == {}
    for bad, error in (
        ([("a", b"x")], TypeError),
        ({"a": b""}, ValueError),
        ({"a": "text"}, TypeError),
        ({"": b"x"}, ValueError),
        ({1: b"x"}, TypeError),
        ({"a": memoryview(b"abcd")[::2]}, ValueError),
    ):
        with pytest.raises(error):
            check_buffers(bad)


def test_names_have_1_to_255_bytes():
    check_name("x" * 255)
    check_name("é" * 127)
    for bad in ("", "x" * 256, "é" * 128, "\udc80"):
        with pytest.raises(ValueError, match="name"):
            check_name(bad)
