"""Our part opposite rdma_server (with -s) or rdma_client: 16 bytes there, and 16 back; the tools' are zeros."""

from ends import PATIENCE, End, listener, options, resolved

SIZE = 16


def check(end):
    ((_, data),) = end.receive()
    assert data == bytes(SIZE), f"{data!r} instead of zeros"


if __name__ == "__main__":
    args = options("sbp")
    if args.server:
        end = End(resolved(args), 1, SIZE)
        end.cmid.connect()
        end.send(1)
        check(end)
    else:
        with listener(args) as waiting:
            end = End(waiting.get_request(timeout=PATIENCE), 1, SIZE)
        end.cmid.accept()
        check(end)
        end.send(2)
    end.cmid.disconnect(timeout=PATIENCE)
    end.close()
    print("all right", flush=True)
