"""Copy a file from another host by RDMA reads; its owner only waits until that is done.

python examples/file_copy.py serve FILE HOST [--cm]     prints its port; --cm: connect through librdmacm
python examples/file_copy.py HOST PORT FILE [--cm]
"""

import hashlib
import sys
from pathlib import Path

import pyverbs_lite as pvl

CHUNK = 1 << 20
VIA = pvl.cm if "--cm" in sys.argv else pvl


def serve(path: str, host: str) -> None:
    content = Path(path).read_bytes()
    with VIA.listen(host, 0, buffers={"file": content, "sha256": hashlib.sha256(content).digest()}) as listener:
        print(listener.port, flush=True)
        with listener.accept(60) as conn:
            assert conn.recv() == b"thank you"


def copy(host: str, port: str, path: str) -> None:
    with VIA.connect(host, int(port)) as conn, open(path, "wb") as file:
        source, digest = conn.remote["file"], hashlib.sha256()
        chunk = conn.register(bytearray(min(CHUNK, len(source))))
        for start in range(0, len(source), CHUNK):
            length = conn.read(source[start : min(start + CHUNK, len(source))], chunk)
            digest.update(chunk.view[:length])
            file.write(chunk.view[:length])
        assert digest.digest() == conn.read(conn.remote["sha256"])
        conn.send(b"thank you")
        print(f"{len(source)} bytes copied, SHA-256 {digest.hexdigest()[:16]}… on both sides")


words = [word for word in sys.argv[1:] if word != "--cm"]
serve(*words[1:]) if words[0] == "serve" else copy(*words)
