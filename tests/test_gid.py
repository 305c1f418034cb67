"""The GID ranking, fed with tables: no device is needed."""

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyverbs_lite.enums import GIDType, LinkLayer
from pyverbs_lite.errors import GIDError
from pyverbs_lite.gid import GidEntry, Scope, choose, format_table, parse_gid

V1, V2, IB = GIDType.ROCE_V1, GIDType.ROCE_V2, GIDType.IB
ETHERNET = LinkLayer.ETHERNET


def row(index, gid, kind=V2, netdev="eth0", ifindex=2):
    return GidEntry(index, parse_gid(gid), kind, ifindex, netdev)


def pick(rows, **options):
    return choose(rows, **{"link_layer": ETHERNET, "device": "rxe0", **options}).gid_index


LINK_LOCAL = [row(0, "fe80::1", V1), row(1, "fe80::1", V2)]
IPV4 = [row(2, "10.0.0.2", V1), row(3, "10.0.0.2", V2)]
GLOBAL = [row(4, "2001:db8::2", V1), row(5, "2001:db8::2", V2)]
EMPTY = [row(index, "::") for index in range(6, 10)]
TABLE = LINK_LOCAL + IPV4 + GLOBAL + EMPTY


# What a row is


@pytest.mark.parametrize(
    ("text", "ipv4", "scope", "usable"),
    [
        ("::", None, Scope.GLOBAL, False),
        ("::ffff:10.0.0.2", "10.0.0.2", Scope.IPV4, True),
        ("::ffff:169.254.3.4", "169.254.3.4", Scope.LINK_LOCAL, True),
        ("::ffff:127.0.0.1", "127.0.0.1", Scope.LOOPBACK, True),
        ("::ffff:0.0.0.0", "0.0.0.0", Scope.IPV4, False),
        ("::ffff:224.0.0.1", "224.0.0.1", Scope.IPV4, False),
        ("::ffff:255.255.255.255", "255.255.255.255", Scope.IPV4, False),
        ("::1", None, Scope.LOOPBACK, True),
        ("fe80::1", None, Scope.LINK_LOCAL, True),
        ("febf::1", None, Scope.LINK_LOCAL, True),
        ("fd00::1", None, Scope.GLOBAL, True),
        ("2001:db8::1", None, Scope.GLOBAL, True),
        ("ff0e::1", None, Scope.GLOBAL, False),
    ],
)
def test_addresses(text, ipv4, scope, usable):
    entry = row(0, text)
    assert entry.ipv4 == (ipv4 and IPv4Address(ipv4))
    assert entry.scope is scope
    assert entry.link_local is (scope is Scope.LINK_LOCAL)
    assert entry.usable is usable
    assert entry.empty is (text == "::")


def test_a_row_is_a_plain_value():
    assert row(0, "fe80::1") == row(0, "fe80::1")
    assert len({row(0, "fe80::1"), row(0, "fe80::1")}) == 1
    with pytest.raises(AttributeError):
        row(0, "fe80::1").gid_index = 1
    assert str(row(0, "10.0.0.2")) == "::ffff:10.0.0.2"
    assert str(row(0, "2001:db8::2")) == "2001:db8::2"
    assert row(0, "fe80::1", netdev="", ifindex=0).interface_names == set()
    assert row(0, "fe80::1").interface_names == {"eth0", "2"}


# Reading GIDs


@pytest.mark.parametrize(
    ("given_gid", "expected"),
    [
        ("fe80:0000:0000:0000:5054:00ff:fe12:3456", "fe80::5054:ff:fe12:3456"),
        ("0000:0000:0000:0000:0000:ffff:0a00:0002", "::ffff:10.0.0.2"),
        ("10.0.0.2", "::ffff:10.0.0.2"),
        (IPv6Address("2001:db8::1"), "2001:db8::1"),
        (IPv4Address("10.0.0.2"), "::ffff:10.0.0.2"),
        (bytes(10) + b"\xff\xff\x0a\x00\x00\x02", "::ffff:10.0.0.2"),
        (bytearray(16), "::"),
        (memoryview(b"\xfe\x80" + bytes(13) + b"\x01"), "fe80::1"),
    ],
)
def test_parse_gid(given_gid, expected):
    assert parse_gid(given_gid) == IPv6Address(expected)


@given(st.binary(min_size=16, max_size=16))
def test_parse_gid_round_trips(raw):
    assert parse_gid(raw).packed == raw
    assert parse_gid(str(parse_gid(raw))) == parse_gid(raw)


@pytest.mark.parametrize(
    "bad", [b"", bytes(4), bytes(15), bytes(17), "", "eth0", "10.0.0", "fe80::1::2", "fe80::1%eth0"]
)
def test_parse_gid_refuses_values(bad):
    with pytest.raises(ValueError, match=r"GID|IPv6"):
        parse_gid(bad)


@pytest.mark.parametrize("bad", [1, True, 1.0, None, [0] * 16])
def test_parse_gid_refuses_types(bad):
    with pytest.raises(TypeError, match="GID"):
        parse_gid(bad)


# The automatic choice


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (TABLE, 3),
        (LINK_LOCAL + GLOBAL, 5),
        (LINK_LOCAL, 1),
        ([row(0, "fe80::1")], 0),
        (LINK_LOCAL[:1] + IPV4[:1] + GLOBAL[:1], 2),  # v1 alone: IPv4 first all the same
        (LINK_LOCAL + IPV4[:1], 1),  # v2 over v1, whatever the address
        ([row(8, "10.0.0.2"), row(7, "10.0.0.3")], 7),
        ([row(0, "::ffff:127.0.0.1"), row(1, "fe80::1")], 1),
        ([row(0, "::ffff:169.254.0.1"), row(1, "2001:db8::1")], 1),
        ([row(0, "::ffff:224.0.0.1"), row(1, "ff02::1"), row(2, "fe80::1", V1)], 2),
        ([row(0, "::5054", IB)], 0),  # iWARP
        ([row(256, "10.0.0.2"), row(255, "fe80::1", V1)], 255),
    ],
)
def test_order(rows, expected):
    assert pick(rows) == expected
    assert pick(reversed(rows)) == expected


TWO_PORTS = [
    row(0, "10.0.0.2", V1, "eth0", 2),
    row(1, "10.0.0.2", V2, "eth0", 2),
    row(2, "fe80::2", V2, "vlan7", 3),
    row(3, "192.168.7.2", V1, "vlan7", 3),
    row(4, "192.168.7.2", V2, "vlan7", 3),
    row(5, "fe80::2", V2, "eth0", 2),
    row(6, "2001:db8:7::2", V2, "vlan7", 3),
]


@pytest.mark.parametrize(
    ("local_address", "expected"),
    [
        ("192.168.7.2", 4),
        ("::ffff:192.168.7.2", 4),
        (IPv4Address("192.168.7.2"), 4),
        ("2001:db8:7::2", 6),
        ("fe80::2%vlan7", 2),
        ("fe80::2%3", 2),
        ("fe80::2%eth0", 5),
        ("fe80::2", 2),  # without a scope either will do
        ("10.0.0.2", 1),
        (None, 1),
        ("127.0.0.1", 1),
        ("::1", 1),
        ("0.0.0.0", 1),
        ("::", 1),
        ("", 1),
        ("/run/a.sock", 1),
        ("172.16.0.1", 1),
    ],
)
def test_the_row_that_reaches_the_tcp_peer(local_address, expected):
    assert pick(TWO_PORTS, local_address=local_address) == expected


def test_another_row_of_the_same_interface_is_next():
    # The exact row cannot be named, so the next best on that interface is taken, known by name or by number.
    beyond = row(300, "192.168.7.2", V2, "vlan7", 3)
    assert pick([TWO_PORTS[1], TWO_PORTS[2], beyond], local_address="192.168.7.2") == 2
    numbered = [row(1, "10.0.0.2", V2, "", 2), row(2, "fe80::2", V2, "", 3), row(300, "192.168.7.2", V2, "", 3)]
    assert pick(numbered, local_address="192.168.7.2") == 2
    unknown = [row(1, "10.0.0.2", V2, "", 0), row(2, "fe80::2", V2, "", 0), row(300, "192.168.7.2", V2, "", 0)]
    assert pick(unknown, local_address="192.168.7.2") == 1


def test_an_exact_row_wins_even_as_v1():
    assert pick([row(0, "192.168.7.2", V1), row(1, "10.0.0.2", V2)], local_address="192.168.7.2") == 0


@pytest.mark.parametrize(
    ("remote_gid", "expected"),
    [
        ("fe80::9", 1),
        ("2001:db8::9", 5),
        ("::ffff:10.0.0.9", 3),
        (parse_gid("fe80::9").packed, 1),
        ("::", 3),  # an InfiniBand peer without GRH: tells nothing
        (None, 3),
    ],
)
def test_the_two_gids_must_reach_each_other(remote_gid, expected):
    assert pick(TABLE, remote_gid=remote_gid) == expected
    # No route leads from one family to the other, so not even the socket's own address outranks it.
    assert pick(TABLE, remote_gid=remote_gid, local_address="10.0.0.2") == expected


def test_where_the_scope_cannot_fit_the_family_does():
    assert pick(LINK_LOCAL + IPV4, remote_gid="2001:db8::9") == 1
    assert pick(IPV4, remote_gid="2001:db8::9") == 3
    assert pick([row(0, "::ffff:169.254.0.1"), row(1, "2001:db8::1")], remote_gid="10.0.0.9") == 0


def test_infiniband_takes_the_default_gid():
    rows = [row(0, "fe80::1", IB), row(1, "fec0::1", IB), row(2, "::", IB)]
    for link_layer in (LinkLayer.INFINIBAND, LinkLayer.UNSPECIFIED):
        assert pick(rows, link_layer=link_layer, local_address="10.0.0.2", remote_gid="fec0::9") == 0
        assert pick(rows[1:], link_layer=link_layer) == 1
        assert pick(rows, link_layer=link_layer, gid_index=1) == 1
    with pytest.raises(GIDError, match="of a type that this link layer does not use"):
        pick(IPV4, link_layer=LinkLayer.INFINIBAND)
    with pytest.raises(GIDError, match="subnet manager"):
        pick([row(0, "::", IB)], link_layer=LinkLayer.INFINIBAND)


# None usable


@pytest.mark.parametrize("rows", [[], EMPTY])
def test_no_address_says_how_to_give_one(rows):
    with pytest.raises(GIDError) as caught:
        pick(rows, device="rxe0", port_num=1)
    text = str(caught.value)
    assert text.startswith("no usable GID on rxe0 port 1: give the netdev an IP address (ip addr add")
    assert "the GID table is empty" in text


def test_rows_beyond_eight_bits_are_named_but_not_chosen():
    with pytest.raises(GIDError, match=r"row 256, 300 would do.*8 bits(.|\n)*10\.0\.0\.2"):
        pick([row(256, "10.0.0.2"), row(300, "10.0.0.3"), row(0, "::")])
    with pytest.raises(GIDError, match="row 7 would do"):
        pick([row(7, "10.0.0.2")], gid_tbl_len=7)


def test_multicast_alone_is_not_usable():
    with pytest.raises(GIDError, match="multicast"):
        pick([row(0, "ff0e::1")])


def test_error_without_a_device_name():
    with pytest.raises(GIDError, match="on device port 2"):
        choose([], link_layer=ETHERNET, port_num=2)


# The explicit choice


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gid_index": 0}, 0),
        ({"gid_index": 2, "gid_tbl_len": 3}, 2),
        ({"gid_ip": "10.0.0.2"}, 3),
        ({"gid_ip": "::ffff:10.0.0.2"}, 3),
        ({"gid_ip": IPv4Address("10.0.0.2")}, 3),
        ({"gid_ip": IPv6Address("2001:db8::2")}, 5),
        ({"gid_ip": "fe80::1%eth0"}, 1),
        ({"gid_netdev": "eth0"}, 3),
        ({"gid_netdev": "eth0", "remote_gid": "fe80::9"}, 1),
        ({"gid_ip": "10.0.0.2", "gid_index": 2}, 2),
        ({"gid_ip": "10.0.0.2", "gid_index": 2, "gid_netdev": "eth0"}, 2),
        ({"gid_index": 0, "local_address": "10.0.0.2"}, 0),
    ],
)
def test_explicit(options, expected):
    assert pick(TABLE, **options) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"gid_index": 6},  # empty
        {"gid_index": 200},  # not even listed
        {"gid_ip": "10.0.0.9"},
        {"gid_ip": "fe80::1%eth9"},
        {"gid_netdev": "eth9"},
        {"gid_ip": "10.0.0.2", "gid_index": 0},
        {"gid_index": 3, "gid_netdev": "eth9"},
    ],
)
def test_explicit_that_nothing_fits(options):
    with pytest.raises(GIDError) as caught:
        pick(TABLE, **options)
    assert ", ".join(f"{name}={value}" for name, value in options.items() if name == "gid_index") in str(caught.value)
    assert "nothing fits" in str(caught.value)
    assert format_table(TABLE) in str(caught.value)


def test_a_scope_cannot_contradict_an_unknown_interface():
    assert pick([row(0, "fe80::1", V2, "", 0)], gid_ip="fe80::1%eth9") == 0


@pytest.mark.parametrize("index", [-1, 256, 257, 1023, 1 << 32, -(1 << 32)])
def test_index_out_of_range_never_wraps(index):
    rows = [*TABLE, row(1023, "10.0.0.7"), row(256, "10.0.0.7")]
    with pytest.raises(ValueError, match=r"out of range(.|\n)*::ffff:10\.0\.0\.7"):
        pick(rows, gid_index=index, gid_tbl_len=1024)


@pytest.mark.parametrize("length", [0, 3])
def test_index_beyond_the_table(length):
    with pytest.raises(ValueError, match=f"below {length}"):
        pick(TABLE, gid_index=3, gid_tbl_len=length)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"gid_index": True}, TypeError),
        ({"gid_index": "1"}, TypeError),
        ({"gid_index": 1.0}, TypeError),
        ({"gid_ip": 10}, TypeError),
        ({"gid_ip": b"\x0a\x00\x00\x02"}, TypeError),
        ({"gid_ip": "eth0"}, ValueError),
        ({"gid_ip": ""}, ValueError),
        ({"gid_netdev": 2}, TypeError),
        ({"gid_netdev": ""}, TypeError),
        ({"remote_gid": b"short"}, ValueError),
    ],
)
def test_explicit_of_the_wrong_kind(options, error):
    with pytest.raises(error):
        pick(TABLE, **options)


# The table


def test_table():
    rows = [
        row(10, "fe80::1", V1),
        row(3, "10.0.0.2", V2, "", 7),
        row(4, "::"),
        row(5, "2001:db8::2", IB, "", 0),
    ]
    assert format_table(rows) == (
        "index  GID              type     netdev\n"
        "    3  ::ffff:10.0.0.2  RoCE v2  ifindex 7\n"
        "    5  2001:db8::2      IB       -\n"
        "   10  fe80::1          RoCE v1  eth0"
    )
    assert format_table([]) == "the GID table is empty: every row is zero"


# Whatever the table

_gids = st.one_of(
    st.sampled_from(["::", "fe80::1", "fe80::2", "::ffff:10.0.0.2", "::ffff:127.0.0.1", "ff02::1", "2001:db8::1"]).map(
        parse_gid
    ),
    st.binary(min_size=16, max_size=16).map(parse_gid),
)
_rows = st.builds(
    GidEntry,
    st.one_of(st.integers(0, 6), st.integers(250, 1023)),
    _gids,
    st.sampled_from(GIDType),
    st.integers(0, 2),
    st.sampled_from(["", "eth0", "eth1"]),
)
_hints = st.fixed_dictionaries(
    {"link_layer": st.sampled_from(LinkLayer)},
    optional={
        "gid_tbl_len": st.integers(0, 1024),
        "local_address": st.sampled_from(["10.0.0.2", "fe80::1%eth1", "::1", "0.0.0.0", "junk"]),
        "remote_gid": _gids,
        "gid_ip": st.sampled_from(["10.0.0.2", "fe80::2%eth0"]),
        "gid_netdev": st.just("eth0"),
        "gid_index": st.integers(0, 6),
    },
)


def _outcome(rows, options):
    try:
        return choose(rows, **options)
    except GIDError:
        return None
    except ValueError:
        return "out of range"


@given(st.lists(_rows, max_size=8).flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(rows))), _hints)
def test_whatever_the_table(orders, options):
    first, second = (_outcome(rows, options) for rows in orders)
    if not isinstance(first, GidEntry):
        assert first == second
        assert first is None or options["gid_index"] >= options["gid_tbl_len"]
        return
    assert (first.gid_index, first.gid) == (second.gid_index, second.gid)
    assert first.usable
    assert not first.empty
    assert 0 <= first.gid_index < min(256, options.get("gid_tbl_len", 256))
    if "gid_index" in options:
        assert first.gid_index == options["gid_index"]
    if options["link_layer"] == LinkLayer.INFINIBAND:
        assert first.gid_type is GIDType.IB
