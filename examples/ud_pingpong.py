"""Ping-pong with datagrams (UD); speaks with ibv_ud_pingpong.

    python examples/ud_pingpong.py                 the server
    python examples/ud_pingpong.py HOST            the client

A UD QP has no peer: each request says where it goes, by an address handle, a QP number and that QP's key. A message is
one packet, so it is no longer than the MTU. Each receive begins with 40 bytes for the header. Nothing is sent again.
"""

from __future__ import annotations

import pingpong_common as common

import pyverbs_lite as pvl

#: What both sides agree on beforehand: a QP takes only datagrams that carry its key.
QKEY = 0x11111111


def main() -> None:
    """Play."""
    args = common.options(__doc__, "pdisrnlegc", size=1024)
    with pvl.open_device(args.ib_dev) as context:
        mtu = context.query_port(args.ib_port).active_mtu.bytes
        if args.size > mtu:
            raise ValueError(f"a datagram of {args.size} bytes (-s) is longer than the port's MTU, {mtu}")
        pd = context.alloc_pd()
        cq = context.create_cq(args.rx_depth + 1, context.create_comp_channel() if args.events else None)
        cap = pvl.QPCap(max_send_wr=1, max_recv_wr=args.rx_depth, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        qp = pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, qp_type=pvl.QPType.UD))
        qp.to_init(port_num=args.ib_port, qkey=QKEY)

        room = pd.reg_mr(bytearray(b"\x7b" * (qp.grh_room + args.size)))
        message = room[qp.grh_room :]  # behind the header: what comes in goes out again from the same place
        common.prepare(args, message.view)
        where: dict[str, object] = {}

        def post_receives(count: int) -> None:
            qp.post_recv(*[pvl.RecvWR(sg_list=[room])] * count)

        def send() -> None:
            qp.post_send(pvl.SendWR(sg_list=[message], **where))  # type: ignore[arg-type]

        def connect(remote: list[common.Address]) -> None:
            (peer,) = remote
            qp.to_rtr()  # there is no peer to tell it of
            qp.to_rts(sq_psn=local.psn)
            ah = pd.create_ah(common.path_to(args, peer))
            where.update(ah=ah, remote_qpn=peer.qpn, remote_qkey=QKEY)

        def note(wc: pvl.WC) -> None:
            _header, payload = pvl.split_grh(room, wc)
            if len(payload) != args.size:
                raise ValueError(f"a datagram of {len(payload)} bytes came, not of {args.size}")

        post_receives(args.rx_depth)  # before the peer knows of us
        (local,) = common.local_addresses(context, args, [qp])
        common.swap(args, [local], connect)
        common.play(args, cq, {qp.qp_num: common.Player(send)}, post_receives, note)
        common.check(args, message.view)


if __name__ == "__main__":
    common.run(main)
