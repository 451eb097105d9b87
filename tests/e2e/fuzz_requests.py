"""Strategies for requests of every kind: each route by its name, wrong methods, odd targets, hostile headers.

Usage: `share, strategy = requests(route_names(server.running.app))["GET /health"]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import web
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_wire import KEY, METHODS, Sent
from scripted_server import MODEL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
SCORE, SCORE_TOO, ABORT, RESET = "/score", "/v1/firstdiff/score", "/abort", "/reset_prefix_cache"
POSTS = (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE, SCORE, SCORE_TOO, ABORT, RESET)
MODEL_CARD = "/v1/models/{model}"
GETS = ("/health", "/ready", "/version", "/metrics", "/v1/models", MODEL_CARD, "/tokenizer_info",
        "/v1/firstdiff/identity")  # fmt: skip
ELSEWHERE = "elsewhere"
"""The requests that belong to no route."""

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(
        [-1, 0, 1, 2**63, -(2**63), 2**64, 10**30, 1e308, -0.0, 5e-324, "", "\0", "\ufffd", "🙂"]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
IDS = st.lists(st.integers(0, 2047), min_size=1, max_size=8)
TEXT = st.text(min_size=1, max_size=9)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2)
ROLES = st.sampled_from(["system", "user", "assistant"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXT | PARTS}), min_size=1, max_size=3)
PROMPT = TEXT | IDS | st.lists(TEXT, min_size=1, max_size=3) | st.lists(IDS, min_size=1, max_size=3)
TO_SCORE = {"prompt": TEXT | IDS, "target": TEXT | IDS | st.lists(TEXT, min_size=1, max_size=3)}
NEEDED: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    COMPLETIONS: {"prompt": PROMPT},
    CHAT: {"messages": MESSAGES},
    TOKENIZE: {"prompt": st.text(max_size=9)},
    DETOKENIZE: {"tokens": IDS | st.just([])},
    SCORE: TO_SCORE,
    SCORE_TOO: TO_SCORE,
    ABORT: {"request_id": TEXT},
    RESET: {},
}
GENERATION: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 6),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 3000),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_token_ids": IDS,
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "return_token_ids": st.booleans(),
    "user": st.text(max_size=5),
    "n": st.integers(1, 3),
    "min_p": st.floats(0, 1),
    "min_tokens": st.integers(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "logit_bias": st.dictionaries(st.integers(0, 2047).map(str), st.floats(-100, 100), max_size=3),
    "metadata": st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
    "cache_salt": TEXT,
    "use_prefix_cache": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "truncate_prompt_tokens": st.integers(1, 256),
    "logprobs_mode": st.sampled_from(["raw_logprobs", "processed_logprobs"]),
}
SCORING = {"top_logprobs": st.integers(0, 20), "use_prefix_cache": st.booleans(), "user": TEXT}
OPTIONAL: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    COMPLETIONS: GENERATION | {"logprobs": st.integers(0, 20), "echo": st.booleans()},
    CHAT: GENERATION
    | {"logprobs": st.booleans(), "max_completion_tokens": st.integers(1, 6), "tools": st.just([])},
    TOKENIZE: {"add_special_tokens": st.booleans()},
    DETOKENIZE: {},
    SCORE: SCORING,
    SCORE_TOO: SCORING,
    ABORT: {},
    RESET: {},
}
# Needs a second field to be right: hostile as often as not.
EXTRA = ["stream_options", "top_logprobs", "messages", "prompt", "tokens", "n", "best_of", "logit_bias",
         "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
         "guided_grammar", "tools", "tool_choice", "forced_token_ids", "prompt_logprobs", "priority",
         "stop", "target"]  # fmt: skip
NAMES = sorted({*EXTRA, *(name for fields in (*NEEDED.values(), *OPTIONAL.values()) for name in fields)})

ODD_TARGETS = [
    "/", "//", "/v1", "/v1/", "/health/", "/HEALTH", "//health", "/./health", "/v1/../health", "/v1/models/",
    "/%2e%2e/%2e%2e/etc/passwd", "/%00", "/%ff%fe", "/%ed%a0%80", "/%c0%af", "/%zz", "/%", "/health%00",
    "/v1/completions;x=1", "/v1/models/%2F", "/v1/models/a/b", "/v1/models/%0d%0aX:y", "/é", "/\u202e", "/:",
    "/v1/models/" + "m" * 7000, "/" + "a/" * 2000, "*", "http://elsewhere/health", "/health#x", "/?/health",
    "/v1/models/{model}", "/tokenizer_info/..", "/v1/chat/completions/", "/static", "/docs", "/favicon.ico",
]  # fmt: skip
QUERIES = ["?", "?a", "?&&&", "?=", "?a=%", "?%00=%ff", "?a[]=1&a[]=2", "?" + "a=1&" * 500, "?stream=true",
           "?a=é", "??", "?model=%00", "?" + "b" * 7000, "?a=1#b", "?%zz", "?+", "?__p__[x]=1"]  # fmt: skip
HEADERS: dict[str, list[str]] = {
    "Accept": ["", "*/*;q=x", "application/openmetrics-text;version=abc", "text/event-stream", ",;,"],
    "Accept-Encoding": ["gzip, deflate, br", "identity;q=0", "*;q=0", "x" * 300],
    "Connection": ["keep-alive", "close, keep-alive", "x", "Upgrade"],
    "Content-Encoding": ["identity", "gzip", "deflate", "nope", "gzip, gzip"],
    "Content-Type": ["", "text/plain", "application/json; charset=utf-16", "multipart/form-data", "é", ";="],
    "Cookie": ["a", "=", 'a="', "a=b; " * 200, "é=é", "$Version=1; a=b; $Path=/"],
    "Expect": ["100-continue", "", "miracles"],
    "Host": ["", "a:99999", "[::1", "é", "a" * 300],
    "If-Modified-Since": ["yesterday", "Thu, 01 Jan 1970 00:00:00 GMT"],
    "If-None-Match": ["*", 'W/"', "é"],
    "Origin": ["null", "http://elsewhere"],
    "Range": ["bytes=0-0", "bytes=-", "lines=1-9"],
    "TE": ["trailers", "gzip"],
    "Upgrade": ["websocket", "h2c", "TLS/1.0"],
    "User-Agent": ["", "x" * 4000, "\u202e"],
    "X-Forwarded-For": ["127.0.0.1", "x"],
    "X-HTTP-Method-Override": ["DELETE", "POST"],
    "X-Request-Id": ["", " ", "a", "a b", "x" * 129, "é", "%00", "fuzz-1"],
    "traceparent": ["", "00-0-0-0", "x" * 5000, "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "é"],
    "tracestate": ["", "a=b", "=" * 600, "a=1," * 40, "é=é"],
    "x" * 200: [""],
}  # fmt: skip
HEADER = st.sampled_from([(name, value) for name, values in HEADERS.items() for value in values])
ANY_VALUE = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=9)
ANY_HEADERS = st.lists(HEADER | st.tuples(st.sampled_from(sorted(HEADERS)), ANY_VALUE), max_size=3).map(
    lambda headers: tuple(dict(headers).items())
)
NO_HEADERS: st.SearchStrategy[tuple[tuple[str, str], ...]] = st.just(())
ODD_METHODS = ["get", "X" * 60, "CONNECT", "PRI"]
WRONG_KEYS = st.sampled_from([None, "", KEY + "x", KEY[:-1], "é", " ", "Bearer " + KEY])
SPOILERS = [
    lambda raw: raw[: len(raw) // 2],
    lambda raw: raw.replace(b"\r\n", b"\n"),
    lambda raw: raw.replace(b"HTTP/1.1", b"HTTP/9.9"),
    lambda raw: raw.replace(b"\r\n\r\n", b"\r\nno colon\r\n\r\n", 1),
    lambda raw: raw.replace(b"\r\n\r\n", b"\r\nX: \0\r\n\r\n", 1),
    lambda raw: raw.replace(b"\r\n\r\n", b"\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 1),
    lambda raw: raw.replace(b"\r\n\r\n", b"\r\n" + b"X: y\r\n" * 90 + b"\r\n", 1),
    lambda raw: raw.replace(b"\r\n\r\n", b"\r\nContent-Length: 7\r\nContent-Length: 8\r\n\r\n", 1),
    lambda raw: raw.replace(b"\r\n\r\n", b"\r\nContent-Length: -1\r\n\r\n", 1),
    lambda raw: raw.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 1),
    lambda raw: raw.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: gzip\r\n\r\n", 1),
    lambda raw: raw.replace(b" ", b"\t"),
    lambda raw: b"\0" + raw,
    lambda raw: b"\x16\x03\x01" + raw,
    lambda raw: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    lambda raw: raw + raw,
]  # fmt: skip


def route_names(app: web.Application) -> list[str]:
    """ "METHOD /path" of all that the application's own router knows, in its order."""
    names: list[str] = []
    for route in app.router.routes():
        assert route.resource is not None
        names.append(f"{route.method} {route.resource.canonical}")
    return names


def one_in(draw: st.DrawFn, count: int) -> bool:
    """True once in `count` times."""
    return draw(st.integers(0, count - 1)) == count - 1


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """Most bodies are right and get to the engine; some have a field that is anything."""
    model = {} if path in (ABORT, RESET) else {"model": st.just(MODEL)}
    body = draw(st.fixed_dictionaries(model | NEEDED[path], optional=OPTIONAL[path]))
    if path in (COMPLETIONS, CHAT) and draw(st.booleans()):
        body |= {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": draw(st.booleans())},
        }
    if draw(st.booleans()):
        body[draw(st.sampled_from(NAMES) | st.text(max_size=6))] = draw(JSON)
    if body and one_in(draw, 10):
        body.pop(draw(st.sampled_from(sorted(body))))
    return body


@st.composite
def posts(draw: st.DrawFn, path: str) -> Sent:
    """A body for `path`, now and then with a hostile query, headers or key."""
    query = draw(st.sampled_from(QUERIES)) if one_in(draw, 12) else ""
    headers = draw(ANY_HEADERS) if one_in(draw, 8) else ()
    key = draw(WRONG_KEYS) if one_in(draw, 24) else KEY
    body = json.dumps(draw(bodies(path))).encode()
    return Sent("POST", path + query, headers, body, key)


@st.composite
def gets(draw: st.DrawFn, path: str, method: str) -> Sent:
    """A read that must succeed unless what is hostile about it says otherwise."""
    statuses = {200}
    if path == MODEL_CARD:
        odd_model = TEXT | st.sampled_from(["a/b", "..", "\0", "m" * 5000])
        model = MODEL if draw(st.booleans()) else draw(odd_model)
        path = "/v1/models/" + quote(model, safe="/" if draw(st.booleans()) else "")
        statuses = {200} if model == MODEL else {404, 200 if model in ("..", ".") else 404}
    key = draw(WRONG_KEYS) if one_in(draw, 8) else KEY
    headers = draw(ANY_HEADERS if one_in(draw, 2) else NO_HEADERS)
    target = path + (draw(st.sampled_from(QUERIES)) if one_in(draw, 2) else "")
    if headers:
        statuses = set()
    return Sent(method, target, headers, None, key, frozenset(statuses))


@st.composite
def elsewhere(draw: st.DrawFn, names: tuple[str, ...]) -> Sent:
    """What no route is for: other methods, other paths, known paths spelled oddly, what is no HTTP."""
    known = [name.split(" ", 1)[1].replace("{model}", MODEL) for name in names]
    path = draw(st.sampled_from(known))
    kind = draw(st.sampled_from(["method", "path", "path", "spelling", "spoiled"]))
    key = draw(WRONG_KEYS) if one_in(draw, 4) else KEY
    if kind == "method":
        allowed = {name.split(" ", 1)[0] for name, its in zip(names, known, strict=True) if its == path}
        method = draw(st.sampled_from([method for method in METHODS + ODD_METHODS if method not in allowed]))
        body = draw(st.none() | st.just(b"{}"))
        refused = frozenset({405} if method in METHODS else {400, 401, 404, 405})
        return Sent(method, path, (), body, key, refused)
    if kind == "path":
        target = draw(st.sampled_from(ODD_TARGETS) | st.text(max_size=9).map(lambda text: "/x" + quote(text)))
        method = draw(st.sampled_from(METHODS))
        return Sent(method, target, draw(ANY_HEADERS), key=key, has_route=False)
    if kind == "spelling":
        index = draw(st.integers(1, len(path) - 1))
        spelled = f"{path[:index]}%{ord(path[index]):02x}{path[index + 1 :]}"
        return Sent(draw(st.sampled_from(["GET", "POST"])), spelled, key=key)
    body = draw(st.none() | st.binary(max_size=60))
    method = "GET" if body is None else "POST"
    return Sent(method, path, (), body, key, spoil=draw(st.sampled_from(SPOILERS)))


ROUTES: dict[str, st.SearchStrategy[Sent]] = (
    {f"POST {path}": posts(path) for path in POSTS}
    | {f"GET {path}": gets(path, "GET") for path in GETS}
    | {f"HEAD {path}": gets(path, "HEAD") for path in GETS}
)
_SHARES = {COMPLETIONS: 8, CHAT: 8, **dict.fromkeys(POSTS[2:], 4)}


def requests(names: list[str]) -> dict[str, tuple[float, st.SearchStrategy[Sent]]]:
    """(share of all requests, strategy) by route name, and by ELSEWHERE for what is no route's.

    `names` are the application's routes. LookupError when one of them has no strategy here.
    """
    if unknown := [name for name in names if name not in ROUTES]:
        raise LookupError(f"expected a strategy in ROUTES for each route of the application, none: {unknown}")
    if gone := ROUTES.keys() - set(names):
        raise LookupError(f"expected the application to have the routes of ROUTES, not there: {sorted(gone)}")
    parts = {name: _SHARES.get(name.split(" ", 1)[1], 2) for name in names} | {ELSEWHERE: 14}
    strategies = ROUTES | {ELSEWHERE: elsewhere(tuple(names))}
    return {name: (part / sum(parts.values()), strategies[name]) for name, part in parts.items()}
