"""Our part opposite ucmatose: with -s its client, else its server.

On each connection the server sends its messages, the client answers with as many, and the server disconnects. The C
client answers out of the memory that it received in, so all its answers are our last message.
"""

from ends import PATIENCE, End, listener, options, pattern, resolved

from pyverbs_lite import cm


def serve(args):
    with listener(args) as waiting:
        ends = []
        for _ in range(args.connections):
            ends.append(End(waiting.get_request(timeout=PATIENCE), args.count, args.size))
            ends[-1].cmid.accept()
        for at, end in enumerate(ends):
            for number in range(args.count):
                end.send(1000 * at + number)
        for at, end in enumerate(ends):
            last = pattern(1000 * at + args.count - 1, args.size)
            answers = {data for _, data in end.receive()}
            assert answers == {last}, f"connection {at}: {len(answers - {last})} answers are not our last message"
        for end in ends:
            end.cmid.disconnect(timeout=PATIENCE)
            end.close()


def call(args):
    ends = []
    for _ in range(args.connections):
        ends.append(End(resolved(args), args.count, args.size))
        ends[-1].cmid.connect()
    for end in ends:
        end.receive()
    for end in ends:
        for number in range(args.count):
            end.send(number)
    for end in ends:
        end.cmid.expect(cm.CMEventType.DISCONNECTED, timeout=PATIENCE)
        end.cmid.disconnect()
        end.close()


if __name__ == "__main__":
    args = options("sbpcCS")
    call(args) if args.server else serve(args)
    print("all right", flush=True)
