"""The address that a server takes.

Owns: binding it before anything slow begins, how it is written as a URL. Refuses to know: what is served.
Invariants: a bound socket does not listen yet; an address that cannot be had is a ValueError that says why.

Usage: `listener = bind("127.0.0.1", 0); url = url_of("127.0.0.1", listener)`.
"""

from __future__ import annotations

import errno
import os
import socket

_EXPECTED_HOST = "expected --host as an address of this machine"
_ADVICE = "give one of its own, 127.0.0.1 for this machine alone, or 0.0.0.0 for all it has"


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to host and port, not listening yet; ValueError when that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no host name"
        raise ValueError(f"{_EXPECTED_HOST}, got {host!r}: {reason}: {_ADVICE}") from error
    try:
        listener = socket.socket(family, kind, protocol)
    except OSError as error:  # IPv6 where there is none
        raise port_error(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise port_error(host, port, error) from error
    return listener


def port_error(host: str, port: int, error: OSError) -> ValueError:
    """What a user is told whose address is another machine's, or taken."""
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return ValueError(f"{_EXPECTED_HOST}, got {host!r}, which is not: {_ADVICE}")
    return ValueError(
        f"expected a free --port, got {port} on {host}: {os.strerror(error.errno or 0)}: "
        "stop what uses it, choose another, or 0 for any"
    )


def url_of(host: str, listener: socket.socket) -> str:
    """Where `listener`, bound to `host`, is found."""
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
