"""The end that accepts in the life of a connection: run as ``python -m bench.life DEVICE``, as ``cmtime`` has its own.

Two ends in one process would wait for each other's turn at the interpreter, which is none of a connection's costs.
"""

from __future__ import annotations

import sys

import pyverbs_lite as pvl

#: The message that ends it.
ENOUGH = b"q"


def main() -> None:
    """Say the port, and take one message of each that connects."""
    with pvl.open_device(sys.argv[1]) as context, pvl.listen("127.0.0.1", 0, device=context) as listener:
        print(listener.port, flush=True)
        last = b""
        while last != ENOUGH:
            with listener.accept() as conn:
                last = bytes(conn.recv(timeout=20))


if __name__ == "__main__":
    main()
