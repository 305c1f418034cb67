"""The control connection: frames, keys, TLS, and what carries them."""
