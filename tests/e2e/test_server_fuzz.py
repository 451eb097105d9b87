"""Every route of the application, whatever is asked of it: an answer in time, no 5xx, nothing left over."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_requests import ELSEWHERE, ROUTES, requests, route_names
from fuzz_wire import (
    KEY,
    Address,
    Held,
    Reply,
    Sent,
    address_of,
    ask,
    check_nothing_left,
    check_reply,
    resident_bytes,
)
from scripted_server import Script, ServerUnderTest, scripted_server, spell

from firstdiff.engine import access
from firstdiff.engine.app import Routes
from firstdiff.engine.block_pool import BlockPool
from firstdiff.engine.http_errors import json_response

NUM_REQUESTS = int(os.environ.get("FIRSTDIFF_FUZZ_REQUESTS", "800"))
"""CI asks for more."""
NUM_REPLAYED = 400
MEMORY_GROWTH_MAX_BYTES = 4 << 20
FIXED = settings(derandomize=True, database=None, phases=[Phase.generate], report_multiple_bugs=False)
"""The same requests every time, and no search for a simpler one that fails too."""
Seen = Counter[tuple[str, int]]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The HTTP parser logs a traceback for each request that it cannot read; pytest would keep them all."""
    caplog.set_level(logging.CRITICAL, logger="aiohttp.server")


def ask_all(
    strategy: SearchStrategy[Sent],
    num_requests: int,
    address: Address,
    *,
    timeout_s: float,
    profile: settings | None,
) -> tuple[list[Sent], list[Reply | None]]:
    """That many requests and their answers, each of them right; AssertionError for the first that is not."""
    asked: list[Sent] = []
    replies: list[Reply | None] = []

    @settings(
        profile or settings.default,
        max_examples=num_requests,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(sent=strategy)
    def check(sent: Sent) -> None:
        reply = ask(address, sent, timeout_s=timeout_s)
        check_reply(sent, reply)
        asked.append(sent)
        replies.append(reply)

    check()
    return asked, replies


def fuzz(
    server: ServerUnderTest,
    script: Script,
    num_requests: int,
    *,
    timeout_s: float = 20,
    patience_s: float = 20,
    profile: settings | None = None,
) -> Seen:
    """How often each route gave each status (0: none); AssertionError for the first wrong answer."""
    assert script.engine is not None
    address, before = address_of(server), Held.by(server)
    seen: Seen = Counter()
    asked: list[Sent] = []
    for name, (share, strategy) in requests(route_names(server.running.app)).items():
        sent_here, replies = ask_all(
            strategy, round(share * num_requests), address, timeout_s=timeout_s, profile=profile
        )
        asked += sent_here
        seen.update((name, 0 if reply is None else reply.status) for reply in replies)
    check_nothing_left(server, script.engine, before, patience_s=patience_s)
    # No memory either, by asking much of it again. (Hypothesis keeps more of its examples than the server
    # does of its requests, so its own run would tell nothing.)
    sizes = []
    for _ in range(3):
        for sent in asked[:: max(1, len(asked) // NUM_REPLAYED)]:
            ask(address, sent, timeout_s=timeout_s)
        sizes.append(resident_bytes())
    assert sizes[-1] - sizes[0] < MEMORY_GROWTH_MAX_BYTES, f"memory grew: {sizes}"
    check_nothing_left(server, script.engine, before, patience_s=patience_s)
    return seen


def summary(seen: Seen) -> str:
    statuses = sorted({status for _, status in seen})
    lines = [" " * 32 + "".join(f"{status or 'none':>6}" for status in statuses)]
    for name in [*ROUTES, ELSEWHERE]:
        lines.append(f"{name:32}" + "".join(f"{seen[name, status]:6}" for status in statuses))
    return "\n".join(lines)


@pytest.mark.timeout(600)
def test_any_request_gets_an_answer() -> None:
    script = Script(spell("one two é three "))
    with scripted_server(script, serve={"api_keys": (KEY,)}, max_body_bytes=100_000) as server:
        seen = fuzz(server, script, NUM_REQUESTS)
    print("\n" + summary(seen))
    assert seen.total() > 0.95 * NUM_REQUESTS
    # It is worth something only when the requests reach what is behind a route. (Hypothesis varies what went
    # before, so that few requests may well be alike.)
    for name in ROUTES:
        num_all = sum(count for (its, _), count in seen.items() if its == name)
        assert seen[name, 200] > num_all / 30, summary(seen)
        assert name.startswith(("GET", "HEAD")) or seen[name, 400] > num_all / 30, summary(seen)


async def _raises(_: Routes, request: web.Request) -> web.Response:
    if "a" in request.query:
        raise KeyError("a")
    return json_response({})


async def _hangs(_: Routes, request: web.Request) -> web.Response:
    if b"[]" in await request.read():
        await asyncio.Event().wait()
    return json_response({})


async def _refuses_in_its_own_words(_: Routes, request: web.Request) -> web.Response:
    is_refused = bool(request.query_string) and request.method == "GET"
    return web.json_response({"detail": "no"}, status=400 if is_refused else 200)


async def _leaves_a_task(_: Routes, request: web.Request) -> web.Response:
    kept.append(asyncio.create_task(asyncio.Event().wait()))
    return json_response({})


async def _keeps_memory(_: Routes, request: web.Request) -> web.Response:
    kept.append(bytearray(b"x" * (1 << 20)))
    return json_response({})


kept: list[Any] = []
"""What the planted handlers do not let go of."""


def _leaks_a_block(pool: BlockPool, blocks: list[int]) -> None:
    RELEASE(pool, blocks[:-1] if len(blocks) > 1 else blocks)


RELEASE = BlockPool.release


@pytest.mark.parametrize(
    ("owner", "name", "defect", "says"),
    [
        (Routes, "version", _raises, "status=500"),
        (Routes, "detokenize", _hangs, "no answer within 1 s"),
        (Routes, "version", _refuses_in_its_own_words, "'detail'"),
        (Routes, "ready", _leaves_a_task, "Held"),
        (Routes, "version", _keeps_memory, "memory grew"),
        (BlockPool, "release", _leaks_a_block, "references"),
        (access, "OPEN_PATHS", access.OPEN_PATHS | {"/v1/models"}, "status=200"),
    ],
)
def test_the_fuzzing_finds(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, defect: Callable[..., object], says: str
) -> None:
    monkeypatch.setattr(owner, name, defect)
    timeout_s = 1 if defect is _hangs else 20
    script = Script(spell("one two "))
    try:
        with (
            scripted_server(script, serve={"api_keys": (KEY,)}, max_body_bytes=100_000) as server,
            pytest.raises(AssertionError, match=says),
        ):
            fuzz(server, script, 250, timeout_s=timeout_s, patience_s=3, profile=FIXED)
    finally:
        kept.clear()


def test_a_route_without_a_strategy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Routes.app

    def app(routes: Routes) -> web.Application:
        made = make(routes)
        made.router.add_put("/added/{later}", routes.version)
        return made

    monkeypatch.setattr(Routes, "app", app)
    script = Script(spell("one two "))
    with scripted_server(script) as server, pytest.raises(LookupError, match=r"PUT /added/\{later\}"):
        fuzz(server, script, 1)
