"""What a connection is made of: handshake, engine, requests, messages."""
