"""A request/reply server: a handler for each of many clients, and one table that all of them see."""

import json
import struct
import threading

import pyverbs_lite as pvl

PRICES = {"apple": 25, "pear": 40, "quince": 310}
sold = bytearray(8)  # clients add to it by atomics, without waking the server


def handler(conn: pvl.Connection) -> None:
    while True:  # until the client closes, which ends this without an error
        order = json.loads(conn.recv())
        conn.send(json.dumps({name: PRICES[name] * count for name, count in order.items()}).encode())


def client(port: int, number: int, answers: dict[int, int]) -> None:
    with pvl.connect("127.0.0.1", port) as conn:
        order = {"apple": number, "quince": 2}
        conn.send(json.dumps(order).encode())
        answers[number] = sum(json.loads(conn.recv(timeout=30)).values())
        conn.fetch_add(conn.remote["sold"], sum(order.values()))


with pvl.Server("127.0.0.1", 0, handler, buffers={"sold": sold}, max_message_size=4096) as server:
    server.start()
    answers: dict[int, int] = {}
    threads = [threading.Thread(target=client, args=(server.port, number, answers)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: 25 * number + 620 for number in range(1, 9)}
    print(
        f"{server.stats.accepted} clients, {sum(answers.values())} in all, {struct.unpack('=Q', sold)[0]} pieces sold"
    )
