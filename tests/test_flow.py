"""Flow rules, their parts and actions, byte for byte as C would lay them out; no device."""

from __future__ import annotations

import copy
import pickle
import struct
from ipaddress import IPv4Address, IPv6Address
from types import SimpleNamespace

import pytest

import pyverbs_lite as pvl
import pyverbs_lite.flow
import pyverbs_lite.flow_action
from pyverbs_lite._base.resource import Resource
from pyverbs_lite.ffi import ffi, lib


def header(kind, size):
    return struct.pack("=IH", kind, size)


DST, SRC = "02:00:c0:00:02:01", "0A-1B-2C-3D-4E-5F"
V6 = "2001:db8::1:2:3"
#: part -> type, C struct, values and masks as they stand in memory, in the struct's order.
CASES = [
    (
        pvl.FlowSpecEth(dst_mac=DST, src_mac=SRC, ether_type=0x0806, vlan_tag=0x2A0B),
        0x20,
        "eth",
        bytes.fromhex("0200c0000201 0a1b2c3d4e5f 0806 2a0b"),
        b"\xff" * 16,
    ),
    (
        pvl.FlowSpecEth(dst_mac=b"\x01\x00\x5e\x7f\x01\x02", dst_mac_mask="ff:ff:ff:80:00:00", inner=True),
        0x120,
        "eth",
        bytes.fromhex("01005e000000") + bytes(10),
        bytes.fromhex("ffffff800000") + bytes(10),
    ),
    (
        pvl.FlowSpecIPv4(src_ip="192.0.2.1", dst_ip=IPv4Address("198.51.100.7")),
        0x30,
        "ipv4",
        bytes([192, 0, 2, 1, 198, 51, 100, 7]),
        b"\xff" * 8,
    ),
    (
        pvl.FlowSpecIPv4Ext(
            dst_ip="192.0.2.77", dst_ip_mask="255.255.255.0", proto=17, ttl=0x41, ttl_mask=0xF0, flags=2
        ),
        0x32,
        "ipv4_ext",
        bytes([0, 0, 0, 0, 192, 0, 2, 0, 17, 0, 0x40, 2]),
        bytes([0, 0, 0, 0, 255, 255, 255, 0, 255, 0, 0xF0, 255]),
    ),
    (
        pvl.FlowSpecIPv6(
            src_ip=V6, dst_ip=IPv6Address(7), flow_label=0xABCDE, next_hdr=6, traffic_class=0x1C, hop_limit=63
        ),
        0x31,
        "ipv6",
        IPv6Address(V6).packed + IPv6Address(7).packed + b"\x00\x0a\xbc\xde" + bytes([6, 0x1C, 63, 0]),
        b"\xff" * 32 + b"\x00\x0f\xff\xff" + b"\xff\xff\xff\x00",
    ),
    (pvl.FlowSpecTCP(dst_port=0x1234, src_port=80), 0x40, "tcp_udp", b"\x12\x34\x00\x50", b"\xff" * 4),
    (
        pvl.FlowSpecUDP(dst_port=4791, src_port=0xC0DE, src_port_mask=0xFF00, inner=True),
        0x141,
        "tcp_udp",
        b"\x12\xb7\xc0\x00",
        b"\xff\xff\xff\x00",
    ),
    (pvl.FlowSpecVXLAN(tunnel_id=0x00ABCDEF), 0x50, "tunnel", b"\x00\xab\xcd\xef", b"\x00\xff\xff\xff"),
    (
        pvl.FlowSpecGRE(c_ks_res0_ver=0x2001, c_ks_res0_ver_mask=0xB007, protocol=0x6558, key=0x01020304),
        0x51,
        "gre",
        b"\x20\x01\x65\x58\x01\x02\x03\x04",
        b"\xb0\x07\xff\xff\xff\xff\xff\xff",
    ),
    (pvl.FlowSpecMPLS(label=0x12345 << 12 | 5 << 9 | 1 << 8 | 64), 0x60, "mpls", b"\x12\x34\x5b\x40", b"\xff" * 4),
    (
        pvl.FlowSpecESP(spi=0xFEDCBA98, seq=1, seq_mask=0x0F),
        0x34,
        "esp",
        b"\xfe\xdc\xba\x98\x00\x00\x00\x01",
        b"\xff" * 4 + b"\x00\x00\x00\x0f",
    ),
    (pvl.FlowSpecEth(), 0x20, "eth", bytes(16), bytes(16)),
]
IDS = [f"{type(case[0]).__name__}-{i}" for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("spec", "kind", "name", "values", "masks"), CASES, ids=IDS)
def test_the_parts_that_match(spec, kind, name, values, masks):
    c_struct, c_filter = f"struct ibv_flow_spec_{name}", f"struct ibv_flow_{name}_filter"
    size, filter_size = ffi.sizeof(c_struct), ffi.sizeof(c_filter)
    packed = spec.pack()
    assert len(packed) == size
    assert packed[:6] == header(kind, size)
    raw = ffi.cast(f"{c_struct} *", ffi.from_buffer(packed))
    assert bytes(ffi.buffer(ffi.addressof(raw[0], "val"))) == values.ljust(filter_size, b"\0")
    assert bytes(ffi.buffer(ffi.addressof(raw[0], "mask"))) == masks.ljust(filter_size, b"\0")


@pytest.mark.parametrize(("spec", "kind", "name", "values", "masks"), CASES, ids=IDS)
def test_parts_are_values(spec, kind, name, values, masks):
    for twin in (pickle.loads(pickle.dumps(spec)), copy.copy(spec)):
        assert (twin, hash(twin), twin.pack()) == (spec, hash(spec), spec.pack())
    with pytest.raises(AttributeError):
        spec.inner = True


def test_every_type_of_the_verbs_has_its_class():
    classes = [getattr(pvl, name) for name in pvl.__all__ if name.startswith("FlowSpec") and name != "FlowSpec"]
    kinds = {cls._type.name for cls in classes}
    assert kinds == set(pyverbs_lite.enums.FlowSpecType.__members__) - {"INNER"}
    assert len(kinds) == len(classes)


@pytest.mark.parametrize(
    ("cls", "options", "error", "match"),
    [
        (pvl.FlowSpecEth, {"dst_mac": "02:00:c0:00:02"}, ValueError, "dst_mac '02:00:c0:00:02' is not a MAC"),
        (pvl.FlowSpecEth, {"dst_mac": "02:00:c0:00:02:0g"}, ValueError, "not a MAC"),
        (pvl.FlowSpecEth, {"dst_mac": "0:200:c0:00:02:01:"}, ValueError, "not a MAC"),
        (pvl.FlowSpecEth, {"src_mac": b"\x01" * 7}, ValueError, "src_mac"),
        (pvl.FlowSpecEth, {"src_mac": 0x0200C0000201}, TypeError, "src_mac must be a MAC"),
        (pvl.FlowSpecEth, {"src_mac": DST, "src_mac_mask": "ff"}, ValueError, "src_mac_mask"),
        (pvl.FlowSpecEth, {"src_mac_mask": DST}, ValueError, "src_mac_mask is given without src_mac"),
        (pvl.FlowSpecEth, {"ether_type": 0x10000}, ValueError, r"ether_type \(16 bits\)"),
        (pvl.FlowSpecEth, {"ether_type": -1}, ValueError, "ether_type"),
        (pvl.FlowSpecEth, {"ether_type": "ip"}, TypeError, "ether_type"),
        (pvl.FlowSpecEth, {"vlan_tag": True}, TypeError, "vlan_tag"),
        (pvl.FlowSpecIPv4, {"src_ip": "192.0.2.256"}, ValueError, "src_ip '192.0.2.256' is not an IPv4Address"),
        (pvl.FlowSpecIPv4, {"src_ip": V6}, ValueError, "src_ip"),
        (pvl.FlowSpecIPv4, {"dst_ip": 0xC0000201}, TypeError, "dst_ip must be an IPv4Address"),
        (pvl.FlowSpecIPv4, {"dst_ip": IPv6Address(V6)}, TypeError, "dst_ip"),
        (pvl.FlowSpecIPv4Ext, {"proto": 256}, ValueError, r"proto \(8 bits\)"),
        (pvl.FlowSpecIPv6, {"src_ip": "192.0.2.1"}, ValueError, "src_ip"),
        (pvl.FlowSpecIPv6, {"src_ip": "fe80::1%eth0"}, ValueError, "src_ip"),
        (pvl.FlowSpecIPv6, {"flow_label": 1 << 20}, ValueError, r"flow_label \(20 bits\)"),
        (pvl.FlowSpecTCP, {"dst_port": 65536}, ValueError, "dst_port"),
        (pvl.FlowSpecUDP, {"src_port": 1.0}, TypeError, "src_port"),
        (pvl.FlowSpecVXLAN, {"tunnel_id": 1 << 24}, ValueError, r"tunnel_id \(24 bits\)"),
        (pvl.FlowSpecGRE, {"key": 1 << 32}, ValueError, "key"),
        (pvl.FlowSpecMPLS, {"label": -5}, ValueError, "label"),
        (pvl.FlowSpecESP, {"spi": 1 << 32}, ValueError, "spi"),
        (pvl.FlowSpecActionTag, {"tag_id": 1 << 24}, ValueError, "tag_id"),
        (pvl.FlowSpecActionCount, {"counters": 3}, TypeError, "counters must be of class Counters"),
        (pvl.FlowSpecActionHandle, {"action": None}, TypeError, "action must be of class FlowActionESP"),
    ],
)
def test_what_cannot_be_right_is_refused_where_it_is_written(cls, options, error, match):
    with pytest.raises(error, match=match):
        cls(**options)


def test_a_misspelt_member_is_refused():
    with pytest.raises(TypeError, match="dest_mac"):
        pvl.FlowSpecEth(dest_mac=DST)


# ---------------------------------------------------------------- actions and whole rules


class Thing(Resource):
    """Something with a handle, and no device behind it."""

    def __init__(self, cdecl, **attributes):
        self.__dict__.update(attributes)
        self._own(ffi.new(cdecl), lambda _: None)


def thing(cls, cdecl, **attributes):
    made = cls.__new__(cls)
    Thing.__init__(made, cdecl, **attributes)
    return made


@pytest.fixture
def context():
    with Thing("char *", name="fake0") as made:
        yield made


@pytest.fixture
def qp(context):
    with Thing("struct ibv_qp *", context=context, qp_type=pvl.QPType.RAW_PACKET) as made:
        yield made


@pytest.fixture
def counters(context):
    with thing(pvl.Counters, "struct ibv_counters *", context=context) as made:
        yield made


@pytest.fixture
def action(context):
    with thing(pvl.FlowActionESP, "struct ibv_flow_action *", context=context) as made:
        yield made


def address(resource):
    return int(ffi.cast("uintptr_t", resource._handle))


def test_the_actions(counters, action):
    assert pvl.FlowSpecActionTag(0xABCDEF).pack() == header(0x1000, 12) + bytes(2) + struct.pack("=I", 0xABCDEF)
    assert pvl.FlowSpecActionDrop().pack() == header(0x1001, 8) + bytes(2)
    assert pvl.FlowSpecActionHandle(action).pack() == header(0x1002, 16) + bytes(2) + struct.pack("=Q", address(action))
    assert pvl.FlowSpecActionCount(counters).pack() == (
        header(0x1003, 16) + bytes(2) + struct.pack("=Q", address(counters))
    )


def test_a_rule_with_its_parts_behind_it(counters):
    specs = [
        pvl.FlowSpecEth(dst_mac=DST),
        pvl.FlowSpecIPv4(dst_ip="192.0.2.9"),
        pvl.FlowSpecActionTag(7),
        pvl.FlowSpecActionCount(counters),
    ]
    attr = pvl.FlowAttr(specs=specs, priority=0x0102, port=3, flags=pvl.FlowFlags.DONT_TRAP)
    parts = b"".join(spec.pack() for spec in specs)
    head = struct.pack("=IIHHBBxxI", 0, 0, 20 + len(parts), 0x0102, 4, 3, 2)
    assert attr.pack() == head + parts
    assert ffi.sizeof("struct ibv_flow_attr") == len(head)
    assert attr.specs == tuple(specs)


@pytest.mark.parametrize("kind", list(pvl.FlowAttrType))
def test_the_types_of_rules(kind):
    assert pvl.FlowAttr(type=kind).pack() == struct.pack("=IIHHBBxxI", 0, kind, 20, 0, 0, 1, 0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"specs": [DST]}, TypeError, "a flow rule is made of FlowSpec"),
        ({"specs": [pvl.FlowSpecEth()], "type": pvl.FlowAttrType.SNIFFER}, ValueError, "this one is SNIFFER"),
        ({"specs": [pvl.FlowSpecEth()] * 256}, ValueError, "number of parts"),
        ({"type": 0}, TypeError, "FlowAttrType"),
        ({"priority": 1 << 16}, ValueError, "priority"),
        ({"port": 0}, ValueError, "port"),
        ({"flags": 1}, ValueError, "flags"),
        ({"flags": pvl.WCFlags.GRH}, TypeError, "flags"),
    ],
)
def test_a_rule_that_cannot_be_right(options, error, match):
    with pytest.raises(error, match=match):
        pvl.FlowAttr(**options)


@pytest.fixture
def verbs(monkeypatch):
    """Stand in for the device: notes what the verbs got, and answers as told."""
    calls, answers = [], SimpleNamespace(flow=ffi.new("struct ibv_flow *"), rc=0)

    class FakeLib:
        def __getattr__(self, name):
            return getattr(lib, name)

        def ibv_create_flow(self, qp, attr):
            calls.append(("create", bytes(ffi.buffer(attr, attr.size)) if attr.size else b""))
            return answers.flow

        def ibv_destroy_flow(self, flow):
            calls.append(("destroy", flow == answers.flow))
            return answers.rc

    monkeypatch.setattr(pyverbs_lite.flow, "lib", FakeLib())
    return SimpleNamespace(calls=calls, answers=answers)


def test_what_the_verb_gets(qp, counters, action, verbs):
    attr = pvl.FlowAttr(
        specs=[pvl.FlowSpecESP(spi=5), pvl.FlowSpecActionHandle(action), pvl.FlowSpecActionCount(counters)]
    )
    flow = pvl.Flow(qp, attr)
    assert verbs.calls == [("create", attr.pack())]
    assert (flow.qp, flow.attr, flow.closed) == (qp, attr, False)
    flow.close()
    flow.close()
    assert verbs.calls[1:] == [("destroy", True)]


@pytest.mark.parametrize("first", ["qp", "counters", "action"])
def test_a_rule_goes_before_what_it_needs(qp, counters, action, verbs, first):
    attr = pvl.FlowAttr(specs=[pvl.FlowSpecActionHandle(action), pvl.FlowSpecActionCount(counters)])
    flow = pvl.Flow(qp, attr)
    {"qp": qp, "counters": counters, "action": action}[first].close()
    assert flow.closed
    assert verbs.calls[-1] == ("destroy", True)


def test_a_refused_destroy_leaves_the_rule(qp, verbs):
    flow = pvl.Flow(qp, pvl.FlowAttr())
    verbs.answers.rc = 16
    with pytest.raises(pvl.VerbsOSError, match="ibv_destroy_flow failed: EBUSY"):
        qp.close()
    assert not flow.closed
    assert not qp.closed
    verbs.answers.rc = 0
    qp.close()
    assert flow.closed


def test_a_refused_create_leaves_nothing(qp, verbs):
    verbs.answers.flow = ffi.NULL
    ffi.errno = 1
    with pytest.raises(pvl.VerbsOSError, match=r"EPERM.*CAP_NET_RAW"):
        pvl.Flow(qp, pvl.FlowAttr())
    assert qp._children == []


def test_a_flow_of_the_wrong_things(context, qp, counters, verbs):
    with pytest.raises(TypeError, match="a flow is made from a FlowAttr"):
        pvl.Flow(qp, [])
    with Thing("char *", name="other0") as other:
        qp.context = other
        with pytest.raises(ValueError, match="belongs to"):
            pvl.Flow(qp, pvl.FlowAttr(specs=[pvl.FlowSpecActionCount(counters)]))
    qp.qp_type = pvl.QPType.RC
    with pytest.raises(ValueError, match="RAW_PACKET and UD"):
        pvl.Flow(qp, pvl.FlowAttr())
    assert verbs.calls == []


def test_closed_counters_are_refused(qp, context, verbs):
    gone = thing(pvl.Counters, "struct ibv_counters *", context=context)
    attr = pvl.FlowAttr(specs=[pvl.FlowSpecActionCount(gone)])
    gone.close()
    with pytest.raises(pvl.ClosedError, match="Counters is closed"):
        pvl.Flow(qp, attr)
    assert verbs.calls == []


# ---------------------------------------------------------------- ESP


@pytest.fixture
def esp(monkeypatch):
    """Stand in for the device: reads what the pointers of the struct lead to, while the verb runs."""
    calls, answers = [], SimpleNamespace(action=ffi.new("struct ibv_flow_action *"), rc=0)

    def read(raw):
        def behind(pointer, size):
            return bytes(ffi.buffer(ffi.cast("char *", pointer), size)) if pointer else None

        return {
            "esp": behind(raw.esp_attr, ffi.sizeof("struct ibv_flow_action_esp")),
            "keymat": (raw.keymat_proto, behind(raw.keymat_ptr, raw.keymat_len)),
            "replay": (raw.replay_proto, behind(raw.replay_ptr, raw.replay_len)),
            "encap": behind(raw.esp_encap, 1),
            "esn": (raw.comp_mask, raw.esn),
        }

    class FakeLib:
        def __getattr__(self, name):
            return getattr(lib, name)

        def ibv_create_flow_action_esp(self, context, raw):
            calls.append(read(raw))
            return answers.action

        def ibv_modify_flow_action_esp(self, action, raw):
            calls.append(read(raw))
            return answers.rc

        def ibv_destroy_flow_action(self, action):
            calls.append("destroy")
            return 0

    monkeypatch.setattr(pyverbs_lite.flow_action, "lib", FakeLib())
    return SimpleNamespace(calls=calls, answers=answers)


KEY = bytes(range(1, 17))
E = pvl.FlowActionESPFlags
ATTR = pvl.FlowActionESPAttr(
    esp_attr=pvl.ESPAttr(spi=0x01020304, seq=5, tfc_pad=6, flags=E.FULL_OFFLOAD | E.ENCRYPT, hard_limit_pkts=7 << 32),
    keymat=pvl.AESGCM(key=KEY, salt=0x0A0B0C0D, iv=0x1122334455667788, icv_len=12),
    replay_size=64,
    esn=0x99,
)
KEYMAT = struct.pack("=QIIII", 0x1122334455667788, 0, 0x0A0B0C0D, 12, 16) + KEY + bytes(16)


def test_what_an_esp_action_is_made_from(context, esp):
    action = pvl.FlowActionESP(context, ATTR)
    assert esp.calls == [
        {
            "esp": struct.pack("=IIIIQ", 0x01020304, 5, 6, E.FULL_OFFLOAD | E.ENCRYPT, 7 << 32),
            "keymat": (0, KEYMAT),
            "replay": (1, struct.pack("=I", 64)),
            "encap": None,
            "esn": (1, 0x99),
        }
    ]
    action.close()
    assert esp.calls[-1] == "destroy"


def test_only_what_is_given_is_modified(context, esp):
    with pvl.FlowActionESP(context, ATTR) as action:
        action.modify(pvl.FlowActionESPAttr(esn=3))
        assert esp.calls[-1] == {"esp": None, "keymat": (0, None), "replay": (0, None), "encap": None, "esn": (1, 3)}
        action.modify(pvl.FlowActionESPAttr(esp_attr=pvl.ESPAttr(flags=E.ESN_NEW_WINDOW)))
        assert esp.calls[-1]["esp"] == struct.pack("=IIIIQ", 0, 0, 0, E.ESN_NEW_WINDOW, 0)
        assert esp.calls[-1]["esn"] == (0, 0)
        with pytest.raises(ValueError, match="nothing to modify"):
            action.modify(pvl.FlowActionESPAttr())
        esp.answers.rc = 95
        with pytest.raises(pvl.UnsupportedError, match="ibv_modify_flow_action_esp"):
            action.modify(ATTR)
    with pytest.raises(pvl.ClosedError):
        action.modify(ATTR)


def test_an_esp_action_that_cannot_be_right(context, esp):
    for attr in (pvl.FlowActionESPAttr(), pvl.FlowActionESPAttr(esp_attr=pvl.ESPAttr())):
        with pytest.raises(ValueError, match="created with esp_attr= and keymat="):
            pvl.FlowActionESP(context, attr)
    with pytest.raises(TypeError, match="FlowActionESPAttr"):
        pvl.FlowActionESP(context, ATTR.keymat)
    assert esp.calls == []


@pytest.mark.parametrize(
    ("cls", "options", "error", "match"),
    [
        (pvl.AESGCM, {"key": b"short", "salt": 1}, ValueError, "16, 24 or 32 bytes, and not 5"),
        (pvl.AESGCM, {"key": "k" * 16, "salt": 1}, TypeError, "key must be bytes"),
        (pvl.AESGCM, {"key": KEY, "salt": 1 << 32}, ValueError, "salt"),
        (pvl.AESGCM, {"key": KEY, "salt": 1, "icv_len": 128}, ValueError, r"icv_len \(bytes\)"),
        (pvl.ESPAttr, {"spi": 1 << 32}, ValueError, "spi"),
        (pvl.ESPAttr, {"flags": 1 << 9}, ValueError, "flags"),
        (pvl.ESPAttr, {"hard_limit_pkts": 1 << 64}, ValueError, "hard_limit_pkts"),
        (pvl.FlowActionESPAttr, {"keymat": KEY}, TypeError, "keymat must be of class AESGCM"),
        (pvl.FlowActionESPAttr, {"replay_size": -1}, ValueError, "replay_size"),
    ],
)
def test_esp_values_out_of_range(cls, options, error, match):
    with pytest.raises(error, match=match):
        cls(**options)


def test_keys_are_not_shown():
    with pytest.raises(TypeError) as caught:
        pvl.FlowActionESPAttr(keymat=KEY)
    shown = repr(ATTR) + str(caught.value)
    assert "icv_len=12" in shown
    for secret in (repr(KEY), str(0x0A0B0C0D), str(0x1122334455667788)):
        assert secret not in shown
