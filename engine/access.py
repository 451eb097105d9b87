"""Who may ask: the API keys of a server.

Owns: which paths need a key and how one is compared. Refuses to know: routes, where keys come from.
Invariants: a comparison takes the same time whatever the key; with keys set, all but OPEN_PATHS need one
(vLLM guards /v1 alone, which leaves /abort, /score and /tokenize to anybody); a refusal names no key.

Usage: `web.Application(middlewares=[envelope_errors, require_key(keys)])`.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from firstdiff.engine.openai_fields import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
"""What probes and scrapers read; it tells nothing of prompts or answers."""

MAX_KEY_CHARS = 512

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def require_key(keys: Sequence[str]) -> Middleware:
    """A middleware that lets a request pass with `Authorization: Bearer KEY`; without keys, every one."""
    known = [key.encode() for key in keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if known and request.path not in OPEN_PATHS and not _is_known(request, known):
            raise ApiError(
                "expected a key of this server as 'Authorization: Bearer KEY', got another or none: send one",
                status=401,
                code="invalid_api_key",
            )
        return await handler(request)

    return check


def check_keys(keys: Sequence[str]) -> None:
    """ValueError unless every key can be sent in a header."""
    for key in keys:
        if not 0 < len(key) <= MAX_KEY_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError(
                f"expected --api-key as 1 to {MAX_KEY_CHARS} printable ASCII characters without blanks, got "
                f"one of {len(key)} characters: choose another"
            )


def exposure_warning(host: str, keys: Sequence[str]) -> str | None:
    """What to tell a user whose server others can reach without a key; None when all is well."""
    if keys or is_loopback(host):
        return None
    return (
        f"anybody who can reach {host} may use this server, without a key: set --api-key or "
        "FIRSTDIFF_API_KEY, or keep to the default --host 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _is_known(request: web.Request, known: Sequence[bytes]) -> bool:
    scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    given = key.strip().encode("utf-8", "surrogateescape")
    # Every key is compared, so that the time does not tell which one was near.
    matches = [hmac.compare_digest(given, key) for key in known]
    return scheme.lower() == "bearer" and any(matches)
