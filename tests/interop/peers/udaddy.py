"""Our part opposite udaddy: with -s its client, else its server.

The client sends its datagrams, each with its QP's number as the immediate. The server answers with as many, where they
came from. The C server answers out of the memory that it received in, from its start: the 40 bytes in front of our last
message, and as much of that as there is room for.
"""

from ends import PATIENCE, End, listener, options, pattern, resolved

import pyverbs_lite as pvl
from pyverbs_lite import cm

PORT = 7174  # which the tool cannot be told
UD, UDP = pvl.QPType.UD, cm.PortSpace.UDP


def serve(args):
    with listener(args, UDP) as waiting:
        ends = []
        for _ in range(args.connections):
            end = End(waiting.get_request(timeout=PATIENCE), args.count, args.size, UD)
            end.cmid.accept()
            ends.append(end)
        for end in ends:
            found = end.receive()
            assert all(wc.imm_data == wc.src_qp for wc, _ in found), "an immediate is not the sender's QP"
            wc, data = found[0]
            qkey = end.qp.query().qkey
            with pvl.AH.from_wc(end.pd, wc, data[: end.qp.grh_room], end.cmid.port_num) as ah:
                for number in range(args.count):
                    end.send(number, ah=ah, remote_qpn=wc.imm_data, remote_qkey=qkey, imm_data=end.qp.qp_num)
        for end in ends:
            end.close()


def call(args):
    ends = []
    for at in range(args.connections):
        end = End(resolved(args, UDP), args.count, args.size, UD)
        to = end.cmid.connect().ud
        with end.pd.create_ah(to.ah_attr) as ah:
            for number in range(args.count):
                where = {"remote_qpn": to.qp_num, "remote_qkey": to.qkey, "imm_data": end.qp.qp_num}
                end.send(1000 * at + number, ah=ah, **where)
        ends.append((end, to.qp_num))
    for at, (end, qpn) in enumerate(ends):
        last = pattern(1000 * at + args.count - 1, args.size)
        for wc, data in end.receive():
            assert (wc.src_qp, wc.imm_data) == (qpn, qpn)
            room = end.qp.grh_room
            assert data[room:][room:] == last[:-room], "the answer is not our last message"
        end.close()


if __name__ == "__main__":
    args = options("sbcCS", port=PORT)
    call(args) if args.server else serve(args)
    print("all right", flush=True)
