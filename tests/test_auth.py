"""The proof of a key and the seals, as bytes between two channels: what holds, and what an attacker gets."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable

import pytest
from support import endpoint

from pyverbs_lite import wire
from pyverbs_lite._control.auth import Auth, Role, key_bytes
from pyverbs_lite.enums import AccessFlags
from pyverbs_lite.errors import AuthenticationError, HandshakeError, PeerClosedError, PeerProtocolError, StateError
from pyverbs_lite.remote import RemoteBuffer
from pyverbs_lite.wire import ChallengeReceived, Channel, HelloReceived, ProofReceived, ReadyReceived, Refused

KEY = b"only the two of us"
KV = RemoteBuffer(0x1000, 0xA1B2C3D4, 64, "kv", AccessFlags.REMOTE_READ)
PREFACE, HEADER, SEAL = 12, 8, 16


LEFT, RIGHT = endpoint(0x11), endpoint(0x22)


def keyed(role: Role, key: bytes | None = KEY, *, hello_first: bool = False) -> Channel:
    channel = Channel()
    if key is not None:
        channel.demand(Auth(key, role, hello_first=hello_first))
    return channel


class Pair:
    """A side that connects and one that accepts; ``tamper`` sees what either says, before the other does."""

    def __init__(
        self,
        left: bytes | None = KEY,
        right: bytes | None = KEY,
        *,
        tamper: Callable[[Role, bytes], bytes] = lambda _, data: data,
        hello_first: bool = False,
    ) -> None:
        self.left = keyed(Role.CONNECTS, left, hello_first=hello_first)
        self.right = keyed(Role.ACCEPTS, right, hello_first=hello_first)
        self.tamper = tamper
        self.said = b""

    def to_right(self) -> list[wire.Event]:
        return self._carry(self.left, self.right, Role.CONNECTS)

    def to_left(self) -> list[wire.Event]:
        return self._carry(self.right, self.left, Role.ACCEPTS)

    def _carry(self, source: Channel, target: Channel, role: Role) -> list[wire.Event]:
        data = self.tamper(role, source.data_to_send())
        self.said += data
        events = target.receive_data(data)
        if target.error is not None:
            raise target.error
        return events

    def prove(self) -> None:
        self.left.challenge()
        (challenge,) = self.to_right()
        assert isinstance(challenge, ChallengeReceived)
        self.right.challenge()
        assert isinstance(self.to_left()[0], ChallengeReceived)
        self.left.prove()
        assert isinstance(self.to_right()[0], ProofReceived)
        self.right.prove()
        assert isinstance(self.to_left()[0], ProofReceived)

    def greet(self) -> None:
        self.left.hello(LEFT)
        assert self.to_right() == [HelloReceived(LEFT)]
        self.right.hello(RIGHT)
        assert self.to_left() == [HelloReceived(RIGHT)]

    def talk(self) -> None:
        for side, carry in ((self.left, self.to_right), (self.right, self.to_left)):
            side.buffer(KV)
            side.ready()
            assert carry() == [wire.BufferAdded(KV), ReadyReceived()]
        self.left.goodbye()
        assert self.to_right() == [wire.GoodbyeReceived()]


# ------------------------------------------------------------ what holds


def test_both_prove_the_key_and_then_everything_is_as_without_one():
    pair = Pair()
    pair.prove()
    pair.greet()
    pair.talk()


def test_the_records_may_come_first_and_are_covered_by_the_proof():
    pair = Pair(hello_first=True)
    pair.greet()
    pair.prove()
    pair.talk()


def test_the_key_never_travels():
    pair = Pair()
    pair.prove()
    pair.greet()
    for text in (KEY, KEY[::-1], KEY.hex().encode(), hashlib.sha256(KEY).digest()):
        assert text not in pair.said


def test_no_two_conversations_have_a_proof_in_common():
    said = []
    for _ in range(3):
        pair = Pair()
        pair.prove()
        said.append({pair.said[at : at + 32] for at in range(len(pair.said) - 32)})
    assert not said[0] & said[1]
    assert not said[1] & said[2]


def test_the_bytes_are_the_documented_ones():
    """Computed here from docs/handshake.md alone."""
    pair = Pair()
    pair.left.challenge()
    first = pair.left.data_to_send()
    assert first[:PREFACE] == wire.preface()
    assert first[PREFACE:] == struct.pack("!BBHI BBH", 16, 0, 0, 36, 1, 1, 0) + first[-32:]
    pair.right.receive_data(first)
    pair.right.challenge()
    second = pair.right.data_to_send()
    assert second[PREFACE:-32] == struct.pack("!BBHI BBH", 16, 0, 0, 36, 1, 2, 0)
    pair.left.receive_data(second)
    agreed = hashlib.sha256(first).digest() + hashlib.sha256(second).digest()

    def mac(key: bytes, data: bytes) -> bytes:
        return hmac.new(key, data, hashlib.sha256).digest()

    pair.left.prove()
    proof = pair.left.data_to_send()
    assert proof == struct.pack("!BBHI", 17, 0, 0, 32) + mac(KEY, b"pyverbs_lite proof 1 " + agreed)
    pair.right.receive_data(proof)
    pair.right.prove()
    assert pair.right.data_to_send()[HEADER:] == mac(KEY, b"pyverbs_lite proof 2 " + agreed)
    pair.left.hello(LEFT)
    pair.left.buffer(KV)
    pair.left.ready()
    said, seal_key = pair.left.data_to_send(), mac(KEY, b"pyverbs_lite seal 1 " + agreed)
    for count in range(3):
        end = HEADER + struct.unpack_from("!I", said, 4)[0]
        frame, seal, said = said[:end], said[end : end + SEAL], said[end + SEAL :]
        assert seal == mac(seal_key, struct.pack("!Q", count) + frame)[:SEAL]
    assert not said


def test_one_byte_at_a_time_gives_the_same():
    pair = Pair()
    whole = pair._carry

    def dribble(source: Channel, target: Channel, role: Role) -> list[wire.Event]:
        data = source.data_to_send()
        return [event for byte in data for event in target.receive_data(bytes([byte]))]

    pair._carry = dribble  # type: ignore[method-assign]
    pair.prove()
    pair.greet()
    pair._carry = whole  # type: ignore[method-assign]
    pair.talk()


def test_a_frame_of_a_later_version_is_skipped_with_its_seal():
    pair = Pair()
    pair.prove()
    pair.greet()
    assert pair.left._auth is not None
    later = struct.pack("!BBHI", 200, wire.MAY_IGNORE, 0, 5) + b"later"
    pair.left._outbox += later + pair.left._auth.seal(later)
    pair.talk()


# ------------------------------------------------------------ other keys, or none


@pytest.mark.parametrize("hello_first", [False, True])
@pytest.mark.parametrize("other", [KEY[:-1], KEY + b"\n", b"something else"])
def test_another_key_is_told_to_both_and_tells_no_more(other: bytes, hello_first: bool):
    pair = Pair(right=other, hello_first=hello_first)
    if hello_first:
        pair.greet()
    with pytest.raises(AuthenticationError, match="different keys: check that authkey= is the same") as caught:
        pair.prove()
    assert pair.right.error is caught.value
    (refused,) = pair.left.receive_data(pair.right.data_to_send())
    assert refused == Refused(wire.RefuseCode.AUTHENTICATION, str(caught.value))
    assert not hello_first or pair.right.error


def test_what_is_told_does_not_depend_on_how_wrong_the_key_is():
    texts = set()
    for other in (b"x", KEY[:-1] + b"x", KEY + b"x"):
        pair = Pair(right=other)
        with pytest.raises(AuthenticationError) as caught:
            pair.prove()
        texts.add((str(caught.value), pair.right.data_to_send()))
    assert len(texts) == 1


def test_a_listener_with_a_key_refuses_who_has_none_before_it_believes_anything():
    pair = Pair(left=None)
    pair.left.hello(LEFT)
    with pytest.raises(AuthenticationError, match="only one of the two sides was given an authkey"):
        pair.to_right()
    (refused,) = pair.left.receive_data(pair.right.data_to_send())
    assert isinstance(refused, Refused)
    assert refused.code is wire.RefuseCode.AUTHENTICATION


def test_it_does_so_as_soon_as_the_header_is_there():
    right = keyed(Role.ACCEPTS)
    with pytest.raises(AuthenticationError, match="only one of the two sides"):
        right.receive_data(wire.preface() + wire.frame_header(wire.FrameType.HELLO, 52))


def test_a_listener_without_a_key_refuses_who_has_one():
    pair = Pair(right=None)
    pair.left.challenge()
    with pytest.raises(AuthenticationError, match="only one of the two sides was given an authkey"):
        pair.to_right()
    (refused,) = pair.left.receive_data(pair.right.data_to_send())
    assert isinstance(refused, Refused)
    assert refused.code is wire.RefuseCode.AUTHENTICATION


def test_after_the_records_too():
    pair = Pair(right=None, hello_first=True)
    pair.greet()
    pair.left.challenge()
    with pytest.raises(AuthenticationError, match="only one of the two sides"):
        pair.to_right()
    pair = Pair(left=None, hello_first=True)
    pair.greet()
    pair.left.buffer(KV)
    with pytest.raises(AuthenticationError, match="only one of the two sides"):
        pair.to_right()


# ------------------------------------------------------------ who stands between


def challenged() -> tuple[Pair, bytes]:
    """Return a pair whose left side has challenged, and what that said."""
    pair = Pair()
    pair.left.challenge()
    return pair, pair.left.data_to_send()


def test_a_challenge_that_comes_back_is_refused():
    pair, said = challenged()
    with pytest.raises(AuthenticationError, match="echo service"):
        pair.left.receive_data(said)


def test_so_is_its_nonce_in_the_other_role():
    pair, said = challenged()
    at = PREFACE + HEADER + 1
    with pytest.raises(AuthenticationError, match="echo service"):
        pair.left.receive_data(said[:at] + bytes([Role.ACCEPTS]) + said[at + 1 :])


def test_a_proof_that_comes_back_is_refused():
    pair, said = challenged()
    pair.right.receive_data(said)
    pair.right.challenge()
    pair.to_left()
    pair.left.prove()
    with pytest.raises(AuthenticationError, match="different keys"):
        pair.left.receive_data(pair.left.data_to_send())


def test_a_proof_from_another_conversation_is_refused():
    first = Pair()
    first.left.challenge()
    hello = first.left.data_to_send()
    first.right.receive_data(hello)
    first.right.challenge()
    first.to_left()
    first.left.prove()
    proof = first.left.data_to_send()
    again = keyed(Role.ACCEPTS)
    again.receive_data(hello)
    again.challenge()
    with pytest.raises(AuthenticationError, match="different keys"):
        again.receive_data(proof)


def test_a_proof_before_a_challenge_is_no_order():
    right = keyed(Role.ACCEPTS)
    with pytest.raises(PeerProtocolError, match="PROOF before CHALLENGE"):
        right.receive_data(wire.preface() + wire.frame_header(wire.FrameType.PROOF, 32) + bytes(32))
    with pytest.raises(PeerProtocolError, match="PROOF after HELLO"):
        pair = Pair(None, None)
        pair.greet()
        pair.right.receive_data(wire.frame_header(wire.FrameType.PROOF, 32) + bytes(32))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"mechanism": 2}, "mechanism is 2, outside 1"),
        ({"role": 0}, "role is 0, outside 1"),
        ({"role": 3}, "role is 3, outside 1"),
        ({"reserved": 1}, "reserved is 1"),
    ],
)
def test_a_challenge_is_judged_field_by_field(change: dict[str, int], error: str):
    fields = {"mechanism": 1, "role": 1, "reserved": 0, **change}
    payload = struct.pack("!BBH", *fields.values()) + bytes(32)
    with pytest.raises(PeerProtocolError, match=error):
        keyed(Role.ACCEPTS).receive_data(wire.preface() + wire.frame_header(wire.FrameType.CHALLENGE, 36) + payload)


def test_frames_that_are_dropped_doubled_or_exchanged_break_the_seals():
    def speak() -> tuple[Pair, list[bytes]]:
        pair = Pair()
        pair.prove()
        pair.greet()
        frames = []
        for name in ("a", "b"):
            pair.left.buffer(RemoteBuffer(0x1000, 7, 64, name, AccessFlags.REMOTE_READ))
            frames.append(pair.left.data_to_send())
        return pair, frames

    for order in ([1], [0, 0], [1, 0]):
        pair, frames = speak()
        with pytest.raises(AuthenticationError, match="changed on its way"):
            for index in order:
                pair.right.receive_data(frames[index])


def test_what_the_other_said_cannot_be_sent_back_to_it():
    pair = Pair()
    pair.prove()
    pair.left.hello(LEFT)
    with pytest.raises(AuthenticationError, match="changed on its way"):
        pair.left.receive_data(pair.left.data_to_send())


@pytest.mark.parametrize("hello_first", [False, True])
@pytest.mark.parametrize("which", range(8))
def test_no_bit_can_be_changed_unnoticed(which: int, hello_first: bool):
    """Whatever bit is turned, of any piece of either side's, nothing that was not said is believed."""

    def length_with(bit: int | None) -> int:
        pieces: list[bytes] = []

        def tamper(_: Role, said: bytes) -> bytes:
            pieces.append(said)
            if bit is None or len(pieces) - 1 != which:
                return said
            changed = bytearray(said)
            changed[bit // 8] ^= 1 << bit % 8
            return bytes(changed)

        pair = Pair(tamper=tamper, hello_first=hello_first)
        steps = (pair.greet, pair.prove) if hello_first else (pair.prove, pair.greet)
        for step in (*steps, pair.talk):
            step()
        return len(pieces[which])

    for bit in range(8 * length_with(None)):
        # A length may ask for more than comes, and a record that is not covered yet is only seen to differ.
        with pytest.raises((HandshakeError, AssertionError, ValueError, IndexError)):
            length_with(bit)


@pytest.mark.parametrize("piece", range(4), ids=["challenge", "its answer", "proof", "its answer too"])
def test_the_flag_of_what_proves_has_no_choice(piece: int):
    """A proof is in no seal, and not in what the proofs cover."""
    pieces = iter(range(9))

    def tamper(_: Role, said: bytes) -> bytes:
        changed = bytearray(said)
        changed[PREFACE + 1 if said.startswith(wire.MAGIC) else 1] ^= 1
        return bytes(changed) if next(pieces) == piece else said

    with pytest.raises(PeerProtocolError, match="flags is 1, outside 0..0"):
        Pair(tamper=tamper).prove()


def test_a_changed_record_before_the_proofs_is_noticed_by_them():
    def tamper(role: Role, said: bytes) -> bytes:
        return said.replace(LEFT.qp_num.to_bytes(4, "big"), (0x13).to_bytes(4, "big")) if role == 1 else said

    pair = Pair(tamper=tamper, hello_first=True)
    pair.left.hello(LEFT)
    assert pair.to_right() != [HelloReceived(LEFT)]
    pair.right.hello(RIGHT)
    pair.to_left()
    with pytest.raises(AuthenticationError, match="different keys"):
        pair.prove()


# ------------------------------------------------------------ the caller


def test_the_caller_keeps_the_order_too():
    pair = Pair()
    for early in (lambda: pair.left.hello(LEFT), pair.left.prove, pair.left.ready):
        with pytest.raises(StateError, match="before CHALLENGE, where CHALLENGE or REFUSE may come"):
            early()
    pair.prove()
    with pytest.raises(StateError, match="before HELLO"):
        pair.left.challenge()
    for call in (Channel().challenge, Channel().prove):
        with pytest.raises(StateError):
            call()


def test_a_refusal_is_still_possible_at_every_point():
    for rounds in range(3):
        pair = Pair()
        if rounds:
            pair.prove()
        if rounds == 2:
            pair.greet()
        pair.left.refuse(wire.RefuseCode.BUSY, "no")
        assert pair.to_right() == [Refused(wire.RefuseCode.BUSY, "no")]


def test_an_end_within_the_proofs_says_where():
    right = keyed(Role.ACCEPTS)
    with pytest.raises(PeerClosedError, match="before its CHALLENGE"):
        right.receive_eof()


@pytest.mark.parametrize("key", [b"k", bytearray(b"k"), "k"])
def test_a_key_is_bytes_or_text(key: bytes | str):
    assert key_bytes(key) == b"k"


@pytest.mark.parametrize(
    ("key", "error"),
    [(1, TypeError), (None, TypeError), (b"", ValueError), ("", ValueError), ("\udc80hush", ValueError)],
)
def test_what_is_no_key_is_refused_and_not_shown(key: object, error: type[Exception]):
    with pytest.raises(error, match="authkey") as caught:
        key_bytes(key)  # type: ignore[arg-type]
    assert "hush" not in str(caught.value)
