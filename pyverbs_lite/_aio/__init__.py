"""Connections and servers in event loops: what asyncio and anyio have in common, and asyncio's part."""
