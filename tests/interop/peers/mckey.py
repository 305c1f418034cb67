"""Our part opposite mckey: `mckey.py send|receive -m GROUP -b ADDRESS`; a datagram carries its sender's QP number."""

import sys

from ends import End, options

import pyverbs_lite as pvl
from pyverbs_lite import cm

if __name__ == "__main__":
    part = sys.argv.pop(1)
    args = options("mbCS")
    cmid = cm.CMID(ps=cm.PortSpace.UDP)
    cmid.bind_addr((args.bind, 0))
    cmid.resolve_addr((args.group, 0))
    end = End(cmid, args.count, args.size, pvl.QPType.UD)
    with cmid.join_multicast((args.group, 0)) as group:
        print("joined", flush=True)
        if part == "send":
            with end.pd.create_ah(group.ud.ah_attr) as ah:
                to = {"ah": ah, "remote_qpn": group.ud.qp_num, "remote_qkey": group.ud.qkey}
                for number in range(args.count):
                    end.send(number, imm_data=end.qp.qp_num, **to)
        else:
            senders = {(wc.src_qp, wc.imm_data) for wc, _ in end.receive()}
            assert len(senders) == 1, f"datagrams of {senders}"
            assert len(set(*senders)) == 1, f"the immediate is not the sender's QP: {senders}"
    end.close()
    print("all right", flush=True)
