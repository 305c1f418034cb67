"""An echo server and its clients, on asyncio and in one event loop."""

import asyncio

import pyverbs_lite as pvl


async def echo(conn: "pvl.aio.Connection") -> None:
    async with conn:
        async for message in conn:  # until the client closes
            await conn.send(message.upper(), imm=message.imm)


async def serve(listener: "pvl.aio.Listener") -> None:
    tasks = set()
    while True:
        task = asyncio.create_task(echo(await listener.accept()))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def client(host: str, port: int, words: list[str]) -> str:
    async with pvl.aio.connect(host, port) as conn:
        for number, word in enumerate(words):
            await conn.send(word.encode(), imm=number)
        answers = [await asyncio.wait_for(conn.recv(), 10) for _ in words]
        return " ".join(f"{bytes(answer).decode()} {answer.imm}" for answer in answers)


async def main() -> None:
    async with pvl.aio.listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(serve(listener))
        print(*await asyncio.gather(*(client("127.0.0.1", listener.port, [w, w * 2]) for w in "abc")), sep="\n")
        serving.cancel()


asyncio.run(main())
