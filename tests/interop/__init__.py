"""The tools and libraries of others as peers: each row of docs/interop.md is a test here."""
