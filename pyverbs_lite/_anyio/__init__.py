"""Connections and servers in every event loop that anyio knows: what differs from asyncio's."""
