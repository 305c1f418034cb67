"""Attributes as values: what they hold, and what is refused before it could reach C."""

from __future__ import annotations

import dataclasses
import pickle
import re
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyverbs_lite.attr import AHAttr, GlobalRoute, QPAttr, QPCap, check_values, mtu_of
from pyverbs_lite.enums import MTU, AccessFlags, LinkLayer, MigState, PortState, QPState, QPType, WCStatus
from pyverbs_lite.ffi import ffi

GID = IPv6Address("2001:db8:1:2::aa55")
ROUTE = GlobalRoute(dgid=GID, flow_label=0xABCDE, sgid_index=3, hop_limit=9, traffic_class=0x68)
CAP = QPCap(max_send_wr=7, max_recv_wr=5, max_send_sge=3, max_recv_sge=2, max_inline_data=64)

#: Member -> its width in bits; ports are apart, as they start at 1.
WIDTHS = {
    "qkey": 32,
    "rq_psn": 24,
    "sq_psn": 24,
    "dest_qp_num": 24,
    "pkey_index": 16,
    "alt_pkey_index": 16,
    "max_rd_atomic": 8,
    "max_dest_rd_atomic": 8,
    "min_rnr_timer": 5,
    "timeout": 5,
    "alt_timeout": 5,
    "retry_cnt": 3,
    "rnr_retry": 3,
    "rate_limit": 32,
}
AH_WIDTHS = {"dlid": 16, "sl": 4, "src_path_bits": 7, "static_rate": 8}
ROUTE_WIDTHS = {"flow_label": 20, "sgid_index": 8, "hop_limit": 8, "traffic_class": 8}
PORTS = ("port_num", "alt_port_num")
NOT_INTEGERS = [True, False, 1.0, None, "1", b"\x01", [1], np.True_, np.float32(1), QPState.INIT, WCStatus.SUCCESS]


def with_alt(name: str, value: object) -> dict[str, object]:
    """Complete the alternate path, which is given whole or not at all."""
    if not name.startswith("alt_"):
        return {name: value}
    whole = {"alt_ah_attr": AHAttr(port_num=1), "alt_pkey_index": 0, "alt_port_num": 1, "alt_timeout": 9}
    return {**whole, name: value}


def accepts(name: str, value: object) -> None:
    check_values(with_alt(name, value))


def refuses(error: type[Exception], name: str, value: object, match: str = "") -> None:
    with pytest.raises(error, match=re.escape(match or name)):
        check_values(with_alt(name, value))


# ---------------------------------------------------------------- the values


@pytest.mark.parametrize("struct", [QPAttr, AHAttr, QPCap, GlobalRoute])
def test_members_are_those_of_the_c_struct(struct: type) -> None:
    name = {QPAttr: "ibv_qp_attr", AHAttr: "ibv_ah_attr", QPCap: "ibv_qp_cap", GlobalRoute: "ibv_global_route"}
    members = {field[0] for field in ffi.typeof(f"struct {name[struct]}").fields}
    # Whether the queue still drains can be read, not set.
    assert {field.name for field in dataclasses.fields(struct)} == members - {"sq_draining"}


@pytest.mark.parametrize("value", [QPAttr(timeout=14, cap=CAP), AHAttr(port_num=2, grh=ROUTE), CAP, ROUTE])
def test_values_are_values(value: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(value, protocol))
        assert copy == value
        assert hash(copy) == hash(value)
    assert not hasattr(value, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, 1)
    with pytest.raises(TypeError, match="positional"):
        type(value)(1)


def test_given_leaves_out_none_and_keeps_zero_and_false() -> None:
    attr = QPAttr(rq_psn=0, en_sqd_async_notify=False, qp_state=QPState.RESET, timeout=None)
    assert attr.given() == {"qp_state": QPState.RESET, "rq_psn": 0, "en_sqd_async_notify": False}
    assert QPAttr().given() == {}


def test_given_keeps_structs_whole() -> None:
    assert QPAttr(cap=CAP).given()["cap"] is CAP


def test_is_global_follows_from_grh_unless_given() -> None:
    assert AHAttr(port_num=1).is_global is False
    assert AHAttr(port_num=1, grh=ROUTE).is_global is True
    assert AHAttr(port_num=1, grh=ROUTE, is_global=False).is_global is False
    assert AHAttr(port_num=1, is_global=True).is_global is True


def test_an_address_leaves_the_subnet_unless_told_otherwise() -> None:
    assert GlobalRoute(dgid=GID).hop_limit == 64
    assert (GlobalRoute(dgid=GID).flow_label, GlobalRoute(dgid=GID).sgid_index) == (0, 0)


# ---------------------------------------------------------------- GIDs


@pytest.mark.parametrize(
    "dgid",
    [
        GID,
        GID.packed,
        bytearray(GID.packed),
        memoryview(GID.packed),
        "2001:db8:1:2::aa55",
        "2001:0DB8:0001:0002:0000:0000:0000:AA55",
    ],
)
def test_a_gid_is_normalised(dgid: IPv6Address | bytes | bytearray | memoryview | str) -> None:
    assert GlobalRoute(dgid=dgid).dgid == GID
    assert type(GlobalRoute(dgid=dgid).dgid) is IPv6Address


@given(st.binary(min_size=16, max_size=16))
def test_bytes_of_a_gid_keep_their_order(raw: bytes) -> None:
    assert GlobalRoute(dgid=raw).dgid.packed == raw
    assert GlobalRoute(dgid=str(IPv6Address(raw))).dgid.packed == raw


def test_an_ipv4_gid_is_a_mapped_address() -> None:
    assert GlobalRoute(dgid="::ffff:192.0.2.1").dgid.ipv4_mapped == IPv4Address("192.0.2.1")


@pytest.mark.parametrize(
    ("dgid", "error", "text"),
    [
        (bytes(15), ValueError, "dgid must be 16 bytes in network byte order, not 15"),
        (b"", ValueError, "not 0"),
        (bytes(17), ValueError, "not 17"),
        ("192.0.2.1", ValueError, "::ffff:a.b.c.d"),
        ("", ValueError, "dgid '' is not a GID"),
        ("::g", ValueError, "dgid '::g' is not a GID"),
        ("fe80::1%eth0", ValueError, "has a zone (%eth0)"),
        (IPv6Address("fe80::1%2"), ValueError, "has a zone (%2)"),
        (5, TypeError, "not int"),
        (True, TypeError, "not bool"),
        (None, TypeError, "not NoneType"),
        (IPv4Address("192.0.2.1"), TypeError, "not IPv4Address"),
        ([0] * 16, TypeError, "not list"),
    ],
)
def test_what_is_no_gid_is_refused(dgid: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        GlobalRoute(dgid=dgid)


def test_a_gid_that_was_never_filled_in_is_refused() -> None:
    refuses(ValueError, "ah_attr", AHAttr(port_num=1, grh=GlobalRoute(dgid=bytes(16))), "grh.dgid is all zero")


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(("name", "width"), WIDTHS.items())
def test_ranges_end_where_the_bits_end(name: str, width: int) -> None:
    for value in (0, 1, 2**width - 1):
        accepts(name, value)
    for value in (-1, 2**width, 2**64, -(2**width)):
        refuses(ValueError, name, value, f"{name} {value} ({value:#x}) is not in 0..{2**width - 1} (")
        refuses(ValueError, name, value, f"has {width} bits")


@pytest.mark.parametrize("name", PORTS)
def test_ports_are_counted_from_one(name: str) -> None:
    for value in (1, 2, 255):
        accepts(name, value)
    for value in (0, -1, 256):
        refuses(ValueError, name, value, f"{name} {value} ({value:#x}) is not in 1..255 (")


@pytest.mark.parametrize("name", ["rq_psn", "sq_psn"])
@given(value=st.integers(0, 2**32 - 1))
def test_sequence_numbers_have_24_bits(name: str, value: int) -> None:
    if value < 1 << 24:
        accepts(name, value)
    else:
        refuses(ValueError, name, value, "a packet sequence number has 24 bits")


@pytest.mark.parametrize("name", ["timeout", "alt_timeout", "min_rnr_timer"])
def test_a_time_in_place_of_a_code_is_told_so(name: str) -> None:
    refuses(ValueError, name, 1000, "not a time")


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
@pytest.mark.parametrize("name", [*WIDTHS, *PORTS])
def test_only_integers_are_numbers(name: str, value: object) -> None:
    refuses(TypeError, name, value, f"{name} must be an int, not {value!r}")


@pytest.mark.parametrize("value", [np.int64(5), np.uint8(5)])
def test_integers_of_numpy_are_integers(value: object) -> None:
    accepts("retry_cnt", value)
    accepts("en_sqd_async_notify", np.int8(1))
    assert mtu_of(np.int32(2048)) is MTU.MTU_2048


def test_an_integer_of_numpy_is_ranged_too() -> None:
    refuses(ValueError, "retry_cnt", np.int64(8), "retry_cnt 8 (0x8) is not in 0..7")


# ---------------------------------------------------------------- structs


@pytest.mark.parametrize("path", ["ah_attr", "alt_ah_attr"])
@pytest.mark.parametrize(("member", "width"), AH_WIDTHS.items())
def test_members_of_an_address_have_ranges(path: str, member: str, width: int) -> None:
    def address(value: Any) -> AHAttr:
        return dataclasses.replace(AHAttr(port_num=1), **{member: value})

    accepts(path, address(2**width - 1))
    for value in (-1, 2**width):
        refuses(ValueError, path, address(value), f"{path}.{member} {value} (")
    refuses(TypeError, path, address(True), f"{path}.{member} must be an int, not True")


@pytest.mark.parametrize(("member", "width"), ROUTE_WIDTHS.items())
def test_members_of_a_route_have_ranges(member: str, width: int) -> None:
    def address(value: Any) -> AHAttr:
        return AHAttr(port_num=1, grh=dataclasses.replace(ROUTE, **{member: value}))

    accepts("ah_attr", address(2**width - 1))
    for value in (-1, 2**width):
        refuses(ValueError, "ah_attr", address(value), f"ah_attr.grh.{member} {value} (")
    refuses(TypeError, "ah_attr", address(None), f"ah_attr.grh.{member} must be an int, not None")


@pytest.mark.parametrize("port", [0, 256, -1])
def test_the_port_of_an_address_has_a_range(port: int) -> None:
    refuses(ValueError, "ah_attr", AHAttr(port_num=port), f"ah_attr.port_num {port} (")


@pytest.mark.parametrize("value", [ROUTE, GID, {"dlid": 1}, None, 0])
def test_an_address_is_an_ahattr(value: object) -> None:
    refuses(TypeError, "ah_attr", value, "ah_attr must be of class AHAttr, not ")


def test_a_route_is_a_globalroute() -> None:
    refuses(TypeError, "ah_attr", AHAttr(port_num=1, grh=GID), "ah_attr.grh must be of class GlobalRoute")  # type: ignore[arg-type]


def test_is_global_and_grh_go_together() -> None:
    accepts("ah_attr", AHAttr(port_num=1, dlid=9))
    accepts("ah_attr", AHAttr(port_num=1, grh=ROUTE))
    accepts("ah_attr", AHAttr(port_num=1, grh=ROUTE, is_global=True))
    refuses(ValueError, "ah_attr", AHAttr(port_num=1, is_global=True), "ah_attr.is_global is True but grh is None")
    refuses(ValueError, "ah_attr", AHAttr(port_num=1, grh=ROUTE, is_global=False), "is_global is False but grh is Glo")


@pytest.mark.parametrize("name", ["ah_attr.is_global", "en_sqd_async_notify"])
@pytest.mark.parametrize(("value", "error"), [(2, ValueError), (-1, ValueError), ("no", TypeError), (0.0, TypeError)])
def test_switches_are_on_or_off(name: str, value: Any, error: type[Exception]) -> None:
    if name == "en_sqd_async_notify":
        refuses(error, name, value)
    else:
        refuses(error, "ah_attr", AHAttr(port_num=1, is_global=value), name)


@pytest.mark.parametrize("value", [True, False, 0, 1])
def test_a_switch_takes_what_c_takes(value: bool) -> None:
    accepts("en_sqd_async_notify", value)
    accepts("ah_attr", AHAttr(port_num=1, grh=ROUTE if value else None, is_global=value))


@pytest.mark.parametrize("field", dataclasses.fields(QPCap), ids=lambda f: f.name)
def test_capacities_have_32_bits(field: dataclasses.Field[int]) -> None:
    accepts("cap", dataclasses.replace(CAP, **{field.name: 2**32 - 1}))
    for value in (-1, 2**32):
        refuses(ValueError, "cap", dataclasses.replace(CAP, **{field.name: value}), f"cap.{field.name} {value} (")


def test_capacities_are_a_qpcap() -> None:
    refuses(TypeError, "cap", 5, "cap must be of class QPCap, not 5")


# ---------------------------------------------------------------- enums


@pytest.mark.parametrize("name", ["qp_state", "cur_qp_state"])
def test_states_are_states(name: str) -> None:
    accepts(name, QPState.SQE)
    refuses(ValueError, name, QPState.UNKNOWN, f"{name} UNKNOWN")
    for value in (3, True, None, "RTS", QPType.UD, MTU.MTU_1024):
        refuses(TypeError, name, value, f"{name} must be a member of QPState, not ")


def test_path_migration_is_a_migstate() -> None:
    accepts("path_mig_state", MigState.REARM)
    for value in (1, True, PortState.DOWN):
        refuses(TypeError, "path_mig_state", value, "path_mig_state must be a member of MigState, not ")


@pytest.mark.parametrize("value", [0, 0x1, 0x1F, AccessFlags(0), AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC])
def test_access_flags(value: int) -> None:
    accepts("qp_access_flags", value)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (1 << 29, ValueError, "0x20000000 has bits beyond AccessFlags"),
        (AccessFlags(1 << 29), ValueError, "0x20000000 has bits beyond AccessFlags"),
        (1 << 40, ValueError, "beyond AccessFlags"),
        (-1, ValueError, "beyond AccessFlags"),
        (AccessFlags.HUGETLB | AccessFlags.LOCAL_WRITE, ValueError, "HUGETLB is for a memory region, not for a QP"),
        (
            AccessFlags.ZERO_BASED | AccessFlags.ON_DEMAND | AccessFlags.RELAXED_ORDERING,
            ValueError,
            "ZERO_BASED, ON_DEMAND, RELAXED_ORDERING is for a memory region",
        ),
        (True, TypeError, "qp_access_flags must be an int, not True"),
        (None, TypeError, "not None"),
        (1.0, TypeError, "not 1.0"),
        (LinkLayer.ETHERNET, TypeError, "not <LinkLayer.ETHERNET"),
    ],
)
def test_access_flags_that_are_none(value: object, error: type[Exception], text: str) -> None:
    refuses(error, "qp_access_flags", value, text)


@pytest.mark.parametrize(
    ("nbytes", "mtu"),
    [(256, MTU.MTU_256), (512, MTU.MTU_512), (1024, MTU.MTU_1024), (2048, MTU.MTU_2048), (4096, MTU.MTU_4096)],
)
def test_an_mtu_is_a_code_or_bytes(nbytes: int, mtu: MTU) -> None:
    assert mtu_of(nbytes) is mtu
    assert mtu_of(mtu) is mtu
    assert mtu.bytes == nbytes
    accepts("path_mtu", nbytes)
    accepts("path_mtu", mtu)


@pytest.mark.parametrize(("code", "nbytes"), [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)])
def test_a_bare_code_might_be_either(code: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"path_mtu {code} is ambiguous.* give MTU.MTU_{nbytes} or {nbytes} bytes"):
        mtu_of(code)
    refuses(ValueError, "path_mtu", code, "ambiguous")


@given(st.integers(-10, 70000).filter(lambda n: n not in (1, 2, 3, 4, 5, 256, 512, 1024, 2048, 4096)))
def test_other_sizes_are_no_mtu(size: int) -> None:
    with pytest.raises(ValueError, match=rf"must be one of \[256, 512, 1024, 2048, 4096\] bytes, not {size}"):
        mtu_of(size)


@pytest.mark.parametrize("value", [True, False, None, 1024.0, "1024", PortState.ACTIVE, QPState.RTS])
def test_what_only_looks_like_an_mtu(value: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"path_mtu must be an int, not {value!r}")):
        mtu_of(value)
    refuses(TypeError, "path_mtu", value)


# ---------------------------------------------------------------- together


@pytest.mark.parametrize("name", ["psn", "sq_draining", "PORT", ""])
def test_unknown_members_are_refused(name: str) -> None:
    refuses(TypeError, name, 1, f"{name!r} is not an attribute of a QP: there are qp_state, ")


def test_an_alternate_path_is_given_whole() -> None:
    whole = with_alt("alt_timeout", 3)
    check_values(whole)
    for name in whole:
        rest = {other: value for other, value in whole.items() if other != name}
        with pytest.raises(ValueError, match=f"an alternate path needs {name} as well"):
            check_values(rest)
    with pytest.raises(ValueError, match="needs alt_ah_attr, alt_pkey_index, alt_timeout as well"):
        check_values({"alt_port_num": 1})


def test_a_set_of_attributes_is_checked_to_the_last() -> None:
    good = QPAttr(qp_state=QPState.RTR, path_mtu=1024, dest_qp_num=0xABCDE, rq_psn=0xFFFFFF, min_rnr_timer=12)
    check_values(good.given())
    check_values({})
    refuses(ValueError, "min_rnr_timer", 32)
    with pytest.raises(ValueError, match="min_rnr_timer 32"):
        check_values(dataclasses.replace(good, min_rnr_timer=32).given())
