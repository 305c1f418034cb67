"""Ping-pong over a reliable connection (RC); speaks with ibv_rc_pingpong.

python examples/rc_pingpong.py                 the server
python examples/rc_pingpong.py HOST            the client
"""

from __future__ import annotations

import argparse
import ctypes

import pingpong_common as common

import pyverbs_lite as pvl

A = pvl.AccessFlags


class Timestamps:
    """What ``-t`` tells: the time between receives, in the device's clock cycles."""

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.last: int | None = None
        self.deltas: list[int] = []

    def note(self, wc: pvl.WC) -> None:
        """Take note of one receive."""
        now = wc.completion_ts  # type: ignore[attr-defined]  # of a CQEx
        if self.last is not None:
            self.deltas.append(now - self.last & self.mask)  # the clock wraps
        self.last = now

    def report(self) -> None:
        """Print the extremes and the mean."""
        if self.deltas:
            print(f"Max receive completion clock cycles = {max(self.deltas)}")
            print(f"Min receive completion clock cycles = {min(self.deltas)}")
            print(f"Average receive completion clock cycles = {sum(self.deltas) / len(self.deltas):f}")


class Message:
    """The memory that goes to and fro, registered as the options say; refuses what the device has not."""

    def __init__(self, args: argparse.Namespace, pd: pvl.PD) -> None:
        self.buffer = bytearray(b"\x7b" * args.size)
        common.prepare(args, memoryview(self.buffer))
        self.dm: pvl.DM | None = None
        if args.dm:
            largest = pd.context.query_device_ex().max_dm_size
            if largest < args.size:
                raise ValueError(f"{pd.context.name} has {largest} bytes of device memory (-j), not {args.size}")
            self.dm = pd.context.alloc_dm(args.size)
            self.dm.copy_to(self.buffer)
            self.slice = pd.reg_dm_mr(self.dm)[0 : args.size]
        elif args.iodp:
            common.require_odp(pd.context, "rc_odp_caps", pvl.ODPTransportCaps.RECV, implicit=True)
            start = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
            self.slice = pd.reg_implicit_mr(A.LOCAL_WRITE)[start : start + args.size]
        else:
            if args.odp:
                common.require_odp(pd.context, "rc_odp_caps", pvl.ODPTransportCaps.RECV)
            self.slice = pd.reg_mr(self.buffer, A.LOCAL_WRITE | (A.ON_DEMAND if args.odp else 0))[:]
        if args.prefetch:
            pd.advise_mr(pvl.AdviseMRAdvice.PREFETCH_WRITE, [self.slice], flush=True)

    def read(self) -> memoryview:
        """Return what is in it now."""
        return memoryview(self.buffer if self.dm is None else self.dm.copy_from())


def create_cq(args: argparse.Namespace, context: pvl.Context) -> tuple[pvl.CQ, Timestamps | None]:
    """Make the CQ: one that sleeps for -e, and one that tells the time for -t."""
    channel = context.create_comp_channel() if args.events else None
    if not args.ts:
        return context.create_cq(args.rx_depth + 1, channel), None
    mask = context.query_device_ex().completion_timestamp_mask
    if not mask:
        raise ValueError(f"{context.name} gives its completions no timestamps (-t)")
    flags = pvl.CreateCQWCFlags.STANDARD_FLAGS | pvl.CreateCQWCFlags.WITH_COMPLETION_TIMESTAMP
    return context.create_cq_ex(args.rx_depth + 1, channel, wc_flags=flags), Timestamps(mask)


def main() -> None:
    """Play."""
    args = common.options(__doc__, "pdismrnlegoOPtcjN")
    if args.dm and (args.odp or args.iodp):
        raise ValueError("memory of the device (-j) cannot be on demand (-o, -O)")
    if args.prefetch and not (args.odp or args.iodp):
        raise ValueError("only an on-demand region (-o, -O) can be prefetched (-P)")
    with pvl.open_device(args.ib_dev) as context:
        pd = context.alloc_pd()
        message = Message(args, pd)
        cq, stamps = create_cq(args, context)
        cap = pvl.QPCap(max_send_wr=1, max_recv_wr=args.rx_depth, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        ops = pvl.SendOpsFlags.WITH_SEND if args.new_send else pvl.SendOpsFlags(0)
        qp = pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, qp_type=pvl.QPType.RC, send_ops_flags=ops))
        qp.to_init(port_num=args.ib_port)

        def post_receives(count: int) -> None:
            qp.post_recv(*[pvl.RecvWR(sg_list=[message.slice])] * count)

        def send() -> None:
            if args.new_send:
                with qp.wr_batch() as wr:
                    wr.send(sg_list=[message.slice])
            else:
                qp.post_send(pvl.SendWR(sg_list=[message.slice]))

        def connect(remote: list[common.Address]) -> None:
            (peer,) = remote
            path = common.path_to(args, peer)
            qp.to_rtr(ah_attr=path, dest_qp_num=peer.qpn, rq_psn=peer.psn, path_mtu=args.mtu)
            qp.to_rts(sq_psn=local.psn)

        post_receives(args.rx_depth)  # before the peer knows of us
        (local,) = common.local_addresses(context, args, [qp])
        common.swap(args, [local], connect)
        players = {qp.qp_num: common.Player(send)}
        if stamps is None:
            common.play(args, cq, players, post_receives)
        else:
            common.play(args, cq, players, post_receives, stamps.note)
            stamps.report()
        common.check(args, message.read())


if __name__ == "__main__":
    common.run(main)
