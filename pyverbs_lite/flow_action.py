"""Flow actions: IPsec ESP done by the device to the packets that a rule catches."""

from __future__ import annotations

from dataclasses import dataclass, field

from ._base.args import check_flags, check_int
from ._base.check import check_ptr, check_rc
from ._base.resource import Resource
from .device import Context
from .enums import FlowActionESPFlags, FlowActionESPIVAlgo, FlowActionESPKeymat, FlowActionESPMask, FlowActionESPReplay
from .ffi import CData, ffi, lib

__all__ = ["AESGCM", "ESPAttr", "FlowActionESP", "FlowActionESPAttr"]

_MAX32, _MAX64 = (1 << 32) - 1, (1 << 64) - 1
_NO_FLAGS = FlowActionESPFlags(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AESGCM:
    """Key material of RFC 4106 (``struct ibv_flow_action_esp_keymat_aes_gcm``); never shown by ``repr``.

    Attributes:
        key: 16, 24 or 32 bytes.
        salt: 32 bits.
        iv: the first initialization vector, 64 bits.
        icv_len: length of the integrity check value, in bytes.
    """

    key: bytes = field(repr=False)
    salt: int = field(repr=False)
    iv: int = field(default=0, repr=False)
    icv_len: int = 16
    iv_algo: FlowActionESPIVAlgo = FlowActionESPIVAlgo.SEQ

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes):
            raise TypeError(f"key must be bytes, not {type(self.key).__name__}")
        if len(self.key) not in (16, 24, 32):
            raise ValueError(f"an AES key has 16, 24 or 32 bytes, and not {len(self.key)}")
        check_int("salt", self.salt, 0, _MAX32)
        check_int("iv", self.iv, 0, _MAX64)
        check_int("icv_len (bytes)", self.icv_len, 1, 16)

    def _fill(self) -> CData:
        raw = ffi.new("struct ibv_flow_action_esp_keymat_aes_gcm *")
        raw.iv, raw.salt, raw.icv_len, raw.key_len = self.iv, self.salt, self.icv_len, len(self.key)
        raw.iv_algo = FlowActionESPIVAlgo(self.iv_algo)
        ffi.memmove(raw.aes_key, self.key, len(self.key))
        return raw


@dataclass(frozen=True, slots=True, kw_only=True)
class ESPAttr:
    """How ESP is done (``struct ibv_flow_action_esp``); all but ``flags`` count in full offload only.

    Attributes:
        spi: security parameters index, 32 bits, host order.
        seq: the lower 32 bits of the first sequence number.
        tfc_pad: bytes of traffic flow confidentiality padding, 32 bits.
        hard_limit_pkts: packets after which the action drops the rest, 64 bits.
    """

    spi: int = 0
    seq: int = 0
    tfc_pad: int = 0
    flags: FlowActionESPFlags = _NO_FLAGS
    hard_limit_pkts: int = 0

    def __post_init__(self) -> None:
        for name in ("spi", "seq", "tfc_pad"):
            check_int(name, getattr(self, name), 0, _MAX32)
        check_int("hard_limit_pkts", self.hard_limit_pkts, 0, _MAX64)
        check_flags("flags", self.flags, FlowActionESPFlags)

    def _fill(self) -> CData:
        raw = ffi.new("struct ibv_flow_action_esp *")
        raw.spi, raw.seq, raw.tfc_pad, raw.flags = self.spi, self.seq, self.tfc_pad, int(self.flags)
        raw.hard_limit_pkts = self.hard_limit_pkts
        return raw


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowActionESPAttr:
    """An ESP action (``struct ibv_flow_action_esp_attr``); None: not given, and ``modify`` leaves it as it is.

    Attributes:
        esp_attr: how; needed at creation.
        keymat: the key; needed at creation.
        replay_size: packets in the window of replay protection, 32 bits; None: no protection.
        esn: the upper 32 bits of the extended sequence number.
    """

    esp_attr: ESPAttr | None = None
    keymat: AESGCM | None = None
    replay_size: int | None = None
    esn: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("esp_attr", ESPAttr), ("keymat", AESGCM)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be of class {kind.__name__}, not {type(value).__name__}")  # may be a key
        for name in ("replay_size", "esn"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, _MAX32)

    def _fill(self) -> tuple[CData, list[CData]]:
        """Return the C struct, and what it points to: that must be kept until the verb has returned."""
        raw, kept = ffi.new("struct ibv_flow_action_esp_attr *"), []
        if self.esp_attr is not None:
            kept.append(self.esp_attr._fill())
            raw.esp_attr = kept[-1]
        if self.keymat is not None:
            kept.append(self.keymat._fill())
            raw.keymat_proto = FlowActionESPKeymat.AES_GCM
            raw.keymat_ptr, raw.keymat_len = kept[-1], ffi.sizeof(kept[-1][0])
        if self.replay_size is not None:
            kept.append(ffi.new("struct ibv_flow_action_esp_replay_bmp *", {"size": self.replay_size}))
            raw.replay_proto = FlowActionESPReplay.BMP
            raw.replay_ptr, raw.replay_len = kept[-1], ffi.sizeof(kept[-1][0])
        if self.esn is not None:
            raw.comp_mask, raw.esn = FlowActionESPMask.ESN, self.esn
        return raw, kept


class FlowActionESP(Resource):
    """An ESP action, made by ``Context.create_flow_action_esp``; ``FlowSpecActionHandle`` puts it into rules.

    Verb: ibv_create_flow_action_esp
    """

    def __init__(self, context: Context, attr: FlowActionESPAttr) -> None:
        _check_attr(attr)
        if attr.esp_attr is None or attr.keymat is None:
            raise ValueError("an ESP action is created with esp_attr= and keymat=")
        raw, _kept = attr._fill()
        handle = lib.ibv_create_flow_action_esp(context._handle, raw)
        self.context = context
        handle = check_ptr("ibv_create_flow_action_esp", handle)
        self._own(handle, _destroy_action, context, label=f"FlowActionESP of {context.name}")

    def modify(self, attr: FlowActionESPAttr) -> None:
        """Change what is given; rules that use the action follow at once.

        Verb: ibv_modify_flow_action_esp
        """
        _check_attr(attr)
        raw, kept = attr._fill()
        if not kept and attr.esn is None:
            raise ValueError("nothing to modify was given")
        with self._owned.lock:  # nobody closes it meanwhile
            check_rc("ibv_modify_flow_action_esp", lib.ibv_modify_flow_action_esp(self._handle, raw))


def _check_attr(attr: FlowActionESPAttr) -> None:
    if not isinstance(attr, FlowActionESPAttr):
        raise TypeError(f"an ESP action takes a FlowActionESPAttr, not {type(attr).__name__}")


def _destroy_action(handle: CData) -> None:
    check_rc("ibv_destroy_flow_action", lib.ibv_destroy_flow_action(handle))
