"""What the four ping-pong examples share: the options, the exchange of addresses, and the game itself.

Options and TCP protocol are those of rdma-core's ibv_*_pingpong, so that either side may be the C program. Each side
tells the other where its QPs are, in a record of 52 bytes: LID, QP number, first PSN and GID in hexadecimal, colons
between, a NUL at the end. The client speaks first. The server answers once its QPs can receive, and the client, once it
has read that, says "done".
"""

from __future__ import annotations

import argparse
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address

import pyverbs_lite as pvl

#: Seconds without any completion after which something must be wrong.
PATIENCE = 20
PAGE = 4096


def number(text: str) -> int:
    """Read a number as C does: 0x… is hexadecimal."""
    return int(text, 0)


#: Letter -> the option's long name, how argparse reads it, and what it means.
OPTIONS: dict[str, tuple[str, dict[str, object], str]] = {
    "p": ("port", {"type": number, "default": 18515}, "listen on/connect to this TCP port"),
    "d": ("ib-dev", {}, "the device (default: the first with an active port)"),
    "i": ("ib-port", {"type": number, "default": 1}, "the device's port"),
    "s": ("size", {"type": number, "default": 4096}, "bytes of a message"),
    "m": ("mtu", {"type": number, "default": 1024, "choices": (256, 512, 1024, 2048, 4096)}, "path MTU"),
    "q": ("num-qp", {"type": number, "default": 16}, "QPs that share the receives"),
    "r": ("rx-depth", {"type": number, "default": 500}, "receives that are posted at a time"),
    "n": ("iters", {"type": number, "default": 1000}, "exchanges"),
    "l": ("sl", {"type": number, "default": 0}, "service level"),
    "e": ("events", {"action": "store_true"}, "sleep until there are completions (default: look again and again)"),
    "g": ("gid-idx", {"type": number, "default": -1}, "row of the GID table (default: none; on RoCE the best one)"),
    "o": ("odp", {"action": "store_true"}, "use on-demand paging"),
    "O": ("iodp", {"action": "store_true"}, "use implicit on-demand paging"),
    "P": ("prefetch", {"action": "store_true"}, "prefetch an on-demand region"),
    "t": ("ts", {"action": "store_true"}, "read the completions' timestamps"),
    "c": ("chk", {"action": "store_true"}, "check what was received"),
    "j": ("dm", {"action": "store_true"}, "use memory of the device"),
    "N": ("new_send", {"action": "store_true"}, "post sends with the work request API"),
}


def options(doc: str | None, letters: str, **defaults: int) -> argparse.Namespace:
    """Read the command line; ``letters`` are the options that this program has."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("servername", nargs="?", help="connect to a server there (default: be the server)")
    for letter in letters:
        name, how, meaning = OPTIONS[letter]
        parser.add_argument(f"-{letter}", f"--{name}", help=meaning, **how)  # type: ignore[arg-type]
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    if not 0 < args.port < 65536 or min(args.size, args.rx_depth, args.iters) < 1:
        parser.error("port, size, rx-depth and iters must be at least 1, and port at most 65535")
    return args


def run(program: Callable[[], None]) -> None:
    """Run a program; what goes wrong is said in one line."""
    try:
        program()
    except (OSError, ValueError, RuntimeError, LookupError) as error:
        sys.exit(f"{sys.argv[0]}: {error}")


# ---------------------------------------------------------------- where QPs are

NO_GID = IPv6Address(0)


@dataclass(frozen=True)
class Address:
    """Where a QP is: what each side has to know about the other's."""

    lid: int = 0
    qpn: int = 0
    psn: int = 0
    gid: IPv6Address = NO_GID

    def pack(self) -> bytes:
        """Write the record."""
        return b"%04x:%06x:%06x:%s\0" % (self.lid, self.qpn, self.psn, self.gid.packed.hex().encode())

    @classmethod
    def unpack(cls, record: bytes) -> Address:
        """Read a record."""
        try:
            lid, qpn, psn, gid = record.rstrip(b"\0").split(b":")
            return cls(int(lid, 16), int(qpn, 16), int(psn, 16), IPv6Address(bytes.fromhex(gid.decode())))
        except ValueError as error:
            raise ValueError(f"the peer's address is no such record: {record!r}") from error

    def __str__(self) -> str:
        gid = socket.inet_ntop(socket.AF_INET6, self.gid.packed)
        return f"LID 0x{self.lid:04x}, QPN 0x{self.qpn:06x}, PSN 0x{self.psn:06x}, GID {gid}"


RECORD = len(Address().pack())


def local_addresses(context: pvl.Context, args: argparse.Namespace, qps: Sequence[pvl.QP]) -> list[Address]:
    """Say where our QPs are; fills in ``args.gid_idx`` where the port needs a GID and none was asked for."""
    port = context.query_port(args.ib_port)
    table = context.gid_table(args.ib_port)
    if args.gid_idx < 0 and port.grh_required:
        args.gid_idx = pvl.gid.choose(table, link_layer=port.link_layer, device=context.name).gid_index
    gids = {-1: NO_GID} | {row.gid_index: row.gid for row in table}
    if args.gid_idx not in gids:
        raise ValueError(f"GID index {args.gid_idx} of {context.name} port {args.ib_port} is empty")
    found = [Address(port.lid, qp.qp_num, secrets.randbits(24), gids[args.gid_idx]) for qp in qps]
    for address in found:
        print(f"  local address:  {address}", flush=True)
    return found


def path_to(args: argparse.Namespace, remote: Address) -> pvl.AHAttr:
    """Return the path to a peer: by GID if it told one, else by LID."""
    if remote.gid == NO_GID:
        return pvl.AHAttr(port_num=args.ib_port, dlid=remote.lid, sl=args.sl)
    route = pvl.GlobalRoute(dgid=remote.gid, sgid_index=max(0, args.gid_idx))
    return pvl.AHAttr(port_num=args.ib_port, dlid=remote.lid, sl=args.sl, grh=route)


def require_odp(
    context: pvl.Context, transport: str, receives: pvl.ODPTransportCaps, *, implicit: bool = False
) -> None:
    """Raise unless the device can send and receive out of memory that it pages in on demand.

    Args:
        transport: the member of ``ODPCaps`` that tells.
        receives: the way of receiving that is needed.
    """
    caps = context.query_device_ex().odp_caps
    general = pvl.ODPGeneralCaps.SUPPORT | (pvl.ODPGeneralCaps.SUPPORT_IMPLICIT if implicit else 0)
    need = pvl.ODPTransportCaps.SEND | receives
    if caps.general_caps & general != general or getattr(caps, transport) & need != need:
        raise ValueError(f"{context.name} cannot do{' implicit' * implicit} on-demand paging here (-o, -O)")


# ---------------------------------------------------------------- over TCP


def read(sock: socket.socket, nbytes: int) -> bytes:
    """Read exactly so many bytes: TCP may bring them in pieces."""
    data = b""
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise ConnectionError(f"the peer hung up after {len(data)} of {nbytes} bytes")
        data += piece
    return data


def swap(
    args: argparse.Namespace, local: Sequence[Address], connect: Callable[[list[Address]], None], records: int = 1
) -> list[Address]:
    """Swap addresses with the peer, and bring our QPs to RTS by ``connect`` when it is our turn.

    Args:
        records: how many each side sends; those beyond its QPs are all zero.
    """
    ours = b"".join(address.pack() for address in [*local, *[Address()] * (records - len(local))])
    with dial(args) if args.servername else accept(args) as sock:
        if args.servername:
            sock.sendall(ours)
        data = read(sock, RECORD * records)
        remote = [Address.unpack(data[at : at + RECORD]) for at in range(0, len(data), RECORD)][: len(local)]
        for address in remote:
            print(f"  remote address: {address}", flush=True)
        connect(remote)
        if args.servername:
            sock.sendall(b"done\0")
        else:
            sock.sendall(ours)
            read(sock, len(b"done\0"))
    return remote


def dial(args: argparse.Namespace) -> socket.socket:
    """Connect to the server."""
    return socket.create_connection((args.servername, args.port), timeout=PATIENCE)


def accept(args: argparse.Namespace) -> socket.socket:
    """Wait for one client."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", args.port), family=family, dualstack_ipv6=both) as listener:
        sock, _ = listener.accept()
    sock.settimeout(PATIENCE)
    return sock


# ---------------------------------------------------------------- the game


@dataclass
class Player:
    """One QP: how it sends, and what it waits for before it sends again: its own send (False), a receive (True)."""

    send: Callable[[], None]
    waits_for: set[bool] = field(default_factory=lambda: {True})

    def serve(self) -> None:
        """Send, and wait for both."""
        self.send()
        self.waits_for = {True, False}


def play(
    args: argparse.Namespace,
    cq: pvl.CQ,
    players: dict[int, Player],
    post_receives: Callable[[int], None],
    note: Callable[[pvl.WC], None] = lambda wc: None,
) -> None:
    """Exchange ``args.iters`` messages, then say how long it took.

    Args:
        cq: where all complete; with a channel it sleeps, without one it looks again and again.
        players: by QP number; the client's serve.
        post_receives: posts so many more; ``args.rx_depth`` are there.
        note: called with each receive's completion.
    """
    sent = received = 0
    posted = args.rx_depth
    start = time.monotonic()
    if args.servername:
        for player in players.values():
            player.serve()
    while sent < args.iters or received < args.iters:
        for wc in cq.wait(PATIENCE):
            wc.raise_for_status()
            if wc.is_recv:
                received += 1
                posted -= 1
                if posted <= len(players):
                    post_receives(args.rx_depth - posted)
                    posted = args.rx_depth
                note(wc)
            else:
                sent += 1
            player = players[wc.qp_num]
            player.waits_for.discard(bool(wc.is_recv))
            if not player.waits_for and sent < args.iters:
                player.serve()
    seconds = time.monotonic() - start
    nbytes = args.size * args.iters * 2
    print(f"{nbytes} bytes in {seconds:.2f} seconds = {nbytes * 8 / seconds / 1e6:.2f} Mbit/sec")
    print(f"{args.iters} iters in {seconds:.2f} seconds = {seconds * 1e6 / args.iters:.2f} usec/iter", flush=True)


def prepare(args: argparse.Namespace, message: memoryview) -> None:
    """Let the client mark each page of what it sends, if that is to be checked."""
    if args.chk and args.servername:
        for at in range(0, args.size, PAGE):
            message[at] = 0


def check(args: argparse.Namespace, message: memoryview) -> None:
    """Let the server look for the marks in what it got."""
    if args.chk and not args.servername:
        wrong = [at // PAGE for at in range(0, args.size, PAGE) if message[at] != 0]
        if wrong:
            raise ValueError("\n".join(f"invalid data in page {page}" for page in wrong))
