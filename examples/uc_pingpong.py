"""Ping-pong over an unreliable connection (UC); speaks with ibv_uc_pingpong.

    python examples/uc_pingpong.py                 the server
    python examples/uc_pingpong.py HOST            the client

UC keeps the order of messages, and tells nobody when one is lost. So this game would wait for ever where RC would try
again, or fail; it gives up after a while without any completion.
"""

from __future__ import annotations

import pingpong_common as common

import pyverbs_lite as pvl


def main() -> None:
    """Play."""
    args = common.options(__doc__, "pdismrnlegc")
    with pvl.open_device(args.ib_dev) as context:
        pd = context.alloc_pd()
        message = pd.reg_mr(bytearray(b"\x7b" * args.size))
        common.prepare(args, message.view)
        cq = context.create_cq(args.rx_depth + 1, context.create_comp_channel() if args.events else None)
        cap = pvl.QPCap(max_send_wr=1, max_recv_wr=args.rx_depth, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        qp = pd.create_qp(pvl.QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap, qp_type=pvl.QPType.UC))
        qp.to_init(port_num=args.ib_port)

        def post_receives(count: int) -> None:
            qp.post_recv(*[pvl.RecvWR(sg_list=[message])] * count)

        def send() -> None:
            qp.post_send(pvl.SendWR(sg_list=[message]))

        def connect(remote: list[common.Address]) -> None:
            (peer,) = remote
            path = common.path_to(args, peer)
            # Nothing is acknowledged, so there is no timeout, no retry, and nothing to read from the peer.
            qp.to_rtr(ah_attr=path, dest_qp_num=peer.qpn, rq_psn=peer.psn, path_mtu=args.mtu)
            qp.to_rts(sq_psn=local.psn)

        post_receives(args.rx_depth)  # before the peer knows of us
        (local,) = common.local_addresses(context, args, [qp])
        common.swap(args, [local], connect)
        common.play(args, cq, {qp.qp_num: common.Player(send)}, post_receives)
        common.check(args, message.view)


if __name__ == "__main__":
    common.run(main)
