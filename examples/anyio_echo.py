"""The echo server and its clients on trio, by anyio: pip install 'pyverbs-lite[anyio]' trio."""

import anyio

import pyverbs_lite as pvl


async def echo(conn: "pvl.anyio.Connection") -> None:
    async with conn:
        async for message in conn:  # until the client closes
            await conn.send(message.upper(), imm=message.imm)


async def client(host: str, port: int, words: list[str], answers: dict[str, str]) -> None:
    async with pvl.anyio.connect(host, port) as conn:
        for number, word in enumerate(words):
            await conn.send(word.encode(), imm=number)
        with anyio.fail_after(10):
            for word in words:
                answer = await conn.recv()
                answers[word] = f"{bytes(answer).decode()} {answer.imm}"


async def main() -> None:
    answers: dict[str, str] = {}
    async with pvl.anyio.listen("127.0.0.1", 0) as listener, anyio.create_task_group() as group:
        for word in "abc":
            group.start_soon(client, "127.0.0.1", listener.port, [word, word * 2], answers)
            group.start_soon(echo, await listener.accept(10))
    assert answers == {word: f"{word.upper()} {len(word) - 1}" for word in ("a", "b", "c", "aa", "bb", "cc")}
    print(f"{len(answers)} answers, each to its question")


anyio.run(main, backend="trio")
