"""An RC connection made by hand, and all that goes over it: the part that each library plays alike.

A script gives `play` its `Verbs`, and is run as SCRIPT DEVICE GID_INDEX TCP_PORT client|server. This needs nothing but
the standard library: one of the scripts runs on the system's Python, outside this project's environment.
"""

import json
import random
import socket
import sys
import time

PATIENCE = 20
#: Where what lies in the 64 KiB that each side registers, and how much of it travels: several packets, and odd.
SIZE, MTU = 65536, 1024
SOURCE, INBOX, TARGET, RESULT, WORD, OLD = 0, 8192, 16384, 24576, 32768, 32776
SENT, WRITTEN, NOTED, FETCHED = 5003, 6007, 701, 7001
START, STEP, SWAPPED = 0x1122334455667788, 0x0F0E0D0C0B0A, 0xFEDCBA9876543210
#: Different on the two sides, so that a swap shows.
PSN = {"client": 0x00ABCD, "server": 0xFEDC01}
IMM = {"client": 0xA1B2C3D4, "server": 0x0D15EA5E}


class Link:
    """A TCP connection that carries one JSON object a line."""

    def __init__(self, role, port):
        if role == "server":
            with socket.create_server(("127.0.0.1", port)) as listener:
                listener.settimeout(PATIENCE)
                self.sock, _ = listener.accept()
        else:
            self.sock = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.sock.settimeout(PATIENCE)
        self.lines = self.sock.makefile(encoding="ascii")

    def say(self, step, **what):
        self.sock.sendall(json.dumps({"step": step, **what}).encode() + b"\n")

    def hear(self, step):
        line = self.lines.readline()
        assert line, f"the peer hung up before {step!r}"
        said = json.loads(line)
        assert said.pop("step") == step, f"{line!r} instead of {step!r}"
        return said


def pattern(side, what, length):
    """Return the bytes that a side has for a step: both sides can tell what has to arrive."""
    return random.Random(f"{side} {what}").randbytes(length)


def done(verbs, kind, length=None, imm=None):
    """Wait for the one completion that has to come, and check it."""
    limit = time.monotonic() + PATIENCE
    while not (found := verbs.poll()):
        assert time.monotonic() < limit, f"no completion of {kind}"
        time.sleep(0.0005)
    assert found[0] == kind, f"a completion of {found} instead of {kind}"
    if length is not None:
        assert found[1:] == (length, imm), f"{kind} of {found[1:]} instead of {(length, imm)}"


def same(got, wanted, what):
    if bytes(got) != wanted:
        first = next(at for at, pair in enumerate(zip(got, wanted)) if pair[0] != pair[1])  # noqa: B905
        raise AssertionError(f"{what}: byte {first} of {len(wanted)} is {got[first]}, not {wanted[first]}")


def number(verbs, at):
    return int.from_bytes(verbs.read(at, 8), sys.byteorder)


def lead(verbs, link, me, remote):
    """Do one of each to the peer's memory, which `follow` watches."""
    link.hear("receive posted")
    verbs.write(SOURCE, pattern(me, "send", SENT))
    verbs.send(SOURCE, SENT, IMM[me])
    done(verbs, "send")
    link.say("sent")

    link.hear("receive posted")
    verbs.write(SOURCE, pattern(me, "write", WRITTEN))
    verbs.rdma("write", SOURCE, WRITTEN, remote["addr"] + TARGET, remote["rkey"])
    done(verbs, "write")
    verbs.write(SOURCE, pattern(me, "note", NOTED))
    verbs.rdma("write", SOURCE, NOTED, remote["addr"] + TARGET + 13, remote["rkey"], IMM[me] ^ 1)
    done(verbs, "write")
    link.say("written")

    link.hear("filled")
    verbs.rdma("read", RESULT, FETCHED, remote["addr"] + TARGET, remote["rkey"])
    done(verbs, "read")
    other = "server" if me == "client" else "client"
    same(verbs.read(RESULT, FETCHED), pattern(other, "read", FETCHED), "read")

    word = remote["addr"] + WORD, remote["rkey"]
    for name, compare_add, swap, before in (
        ("fetch_add", STEP, 0, START),
        ("compare_swap", START, 1, START + STEP),  # in vain
        ("compare_swap", START + STEP, SWAPPED, START + STEP),
    ):
        verbs.atomic(name, OLD, *word, compare_add, swap)
        done(verbs, name)
        assert number(verbs, OLD) == before, f"{name} found {number(verbs, OLD):#x}, not {before:#x}"
    link.say("swapped")
    link.hear("checked")


def follow(verbs, link, me):
    """Watch what the peer does to this side's memory."""
    other = "server" if me == "client" else "client"
    verbs.post_receive(INBOX, 8192)
    link.say("receive posted")
    link.hear("sent")
    done(verbs, "receive", SENT, IMM[other])
    same(verbs.read(INBOX, SENT), pattern(other, "send", SENT), "receive")

    verbs.post_receive(INBOX, 8192)
    link.say("receive posted")
    link.hear("written")
    done(verbs, "note", NOTED, IMM[other] ^ 1)
    wanted = bytearray(pattern(other, "write", WRITTEN))
    wanted[13 : 13 + NOTED] = pattern(other, "note", NOTED)
    same(verbs.read(TARGET, WRITTEN), bytes(wanted), "written")

    verbs.write(TARGET, pattern(me, "read", FETCHED))
    verbs.write(WORD, START.to_bytes(8, sys.byteorder))
    link.say("filled")
    link.hear("swapped")
    assert number(verbs, WORD) == SWAPPED, f"the atomics left {number(verbs, WORD):#x}"
    link.say("checked")


def play(make):
    """Connect by hand, lead and follow, and say so."""
    device, gid_index, port, role = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    link = Link(role, port)
    verbs = make(device, gid_index)
    mine = {"qpn": verbs.qpn, "psn": PSN[role], "gid": verbs.gid, "addr": verbs.addr, "rkey": verbs.rkey}
    link.say("hello", **mine)
    remote = link.hear("hello")
    verbs.connect(remote["gid"], remote["qpn"], remote["psn"], PSN[role])
    link.say("ready")
    link.hear("ready")
    if role == "client":
        lead(verbs, link, role, remote)
        follow(verbs, link, role)
    else:
        follow(verbs, link, role)
        lead(verbs, link, role, remote)
    link.say("bye")
    link.hear("bye")
    verbs.close()
    link.lines.close()
    link.sock.close()
    print("every byte and number is right", flush=True)
