"""Certificates for the tests of TLS, made once and for nobody else."""

from __future__ import annotations

import functools
import ssl

import trustme


@functools.cache
def authority(name: str) -> trustme.CA:
    return trustme.CA(organization_name=name)


def serving(*, names: tuple[str, ...] = ("127.0.0.1", "localhost"), demand: bool = False) -> ssl.SSLContext:
    """Return the context of a side that accepts and is called so; ``demand`` wants to see the other's certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority("the right one").issue_cert(*names).configure_cert(context)
    if demand:
        context.verify_mode = ssl.CERT_REQUIRED
        authority("the right one").configure_trust(context)
    return context


def dialling(*, trust: str = "the right one", show: str | None = None) -> ssl.SSLContext:
    """Return the context of a side that connects, and trusts one authority; ``show`` issues its certificate."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    authority(trust).configure_trust(context)
    if show is not None:
        authority(show).issue_cert("client@example.org").configure_cert(context)
    return context
