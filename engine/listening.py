"""The address that a server takes.

Owns: binding it before anything slow begins, how it is written as a URL. Refuses to know: what is served.
Invariants: a bound socket does not listen yet; an address that cannot be had is a ValueError that says why.

Usage: `listener = bind("127.0.0.1", 0); url = url_of("127.0.0.1", listener)`.
"""

from __future__ import annotations

import os
import socket


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to host and port, not listening yet; ValueError when that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ValueError(f"expected --host as an address of this machine, got {host!r}: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise port_error(host, port, error) from error
    return listener


def port_error(host: str, port: int, error: OSError) -> ValueError:
    """What a user is told whose address is taken."""
    return ValueError(
        f"expected a free --port, got {port} on {host}: {os.strerror(error.errno or 0)}: "
        "stop what uses it, choose another, or 0 for any"
    )


def url_of(host: str, listener: socket.socket) -> str:
    """Where `listener`, bound to `host`, is found."""
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
