"""Ping-pong over several RC QPs with one shared receive queue; speaks with ibv_srq_pingpong.

    python examples/srq_pingpong.py                 the server
    python examples/srq_pingpong.py HOST            the client

A server with many peers would need receives for each of them. With an SRQ it needs as many as arrive at a time, whoever
they are from: a message takes the next receive, and its completion says which QP it came by.
"""

from __future__ import annotations

import pingpong_common as common

import pyverbs_lite as pvl

#: How many addresses the C program always exchanges; one less is the most QPs that it uses.
RECORDS = 256


def main() -> None:
    """Play."""
    args = common.options(__doc__, "pdismqrnleogc")
    if not 0 < args.num_qp < RECORDS or args.num_qp > args.rx_depth:
        raise ValueError(f"num-qp (-q) is 1 to {RECORDS - 1}, and rx-depth (-r) has a receive at least for each QP")
    with pvl.open_device(args.ib_dev) as context:
        pd = context.alloc_pd()
        access = pvl.AccessFlags.LOCAL_WRITE
        if args.odp:
            common.require_odp(context, "rc_odp_caps", pvl.ODPTransportCaps.SRQ_RECV)
            access |= pvl.AccessFlags.ON_DEMAND
        message = pd.reg_mr(bytearray(args.size), access)
        common.prepare(args, message.view)
        cq = context.create_cq(args.rx_depth + args.num_qp, context.create_comp_channel() if args.events else None)
        srq = pd.create_srq(pvl.SRQInitAttr(max_wr=args.rx_depth, max_sge=1))
        cap = pvl.QPCap(max_send_wr=1, max_recv_wr=0, max_send_sge=1, max_recv_sge=0, max_inline_data=0)
        init = pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, qp_type=pvl.QPType.RC, srq=srq)
        qps = [pd.create_qp(init) for _ in range(args.num_qp)]
        for qp in qps:
            qp.to_init(port_num=args.ib_port)

        def post_receives(count: int) -> None:
            srq.post_recv(*[pvl.RecvWR(sg_list=[message])] * count)

        def player(qp: pvl.QP) -> common.Player:
            return common.Player(lambda: qp.post_send(pvl.SendWR(sg_list=[message])))

        def connect(remote: list[common.Address]) -> None:
            for qp, mine, peer in zip(qps, local, remote, strict=True):
                path = common.path_to(args, peer)
                qp.to_rtr(ah_attr=path, dest_qp_num=peer.qpn, rq_psn=peer.psn, path_mtu=args.mtu)
                qp.to_rts(sq_psn=mine.psn)

        post_receives(args.rx_depth)  # before the peer knows of us
        local = common.local_addresses(context, args, qps)
        common.swap(args, local, connect, RECORDS)
        common.play(args, cq, {qp.qp_num: player(qp) for qp in qps}, post_receives)
        common.check(args, message.view)


if __name__ == "__main__":
    common.run(main)
