"""Volleys of random requests at the real engine: what a client does and what must come of it.

All that is random in a volley comes of its seed, and a failure names it.

Usage: `with shooting_range(folder) as place: volley(place, seed=3)`.
"""

from __future__ import annotations

import json
import math
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_answers import MAX_MODEL_LEN, Answer, Said, check_answer_to, read_answer
from fuzz_bodies import CHAT, COMPLETIONS, SCORE, Body, body_of, spoiled_body
from fuzz_wire import address_of, check_answer
from real_server import tool_model
from scripted_server import MODEL, ServerUnderTest, serving

from firstdiff.engine.build import build_engine
from firstdiff.engine.config import EngineConfig
from firstdiff.engine.core_client import InProcessCore
from firstdiff.engine.engine import Emit, LLMEngine
from firstdiff.engine.server import ServeSettings
from firstdiff.engine.tokenizer import Tokenizer
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import Identity

VOLLEY = 12
"""Requests at a time."""


@dataclass(frozen=True)
class Shot:
    """A request and what its client does: "read" all, "abort" it, "leave"; `bad` is a field to be refused."""

    path: str
    body: Body
    request_id: str
    deed: str
    after_s: float
    bad: str | None = None


@dataclass
class Range:
    server: ServerUnderTest
    engine: LLMEngine
    tokenizer: Tokenizer
    seen: Counter[tuple[str, str]]
    """(route and what the client did, status or finish reason)."""


def shot_of(rng: Random, request_id: str) -> Shot:
    path = rng.choices((COMPLETIONS, CHAT, SCORE), (5, 4, 2))[0]
    body = body_of(path, rng)
    deed = rng.choices(("read", "abort", "leave", "bad"), (70, 10, 8, 12))[0]
    bad = None
    if deed == "bad":
        bad, body = spoiled_body(path, body, rng)
    return Shot(path, body, request_id, deed, rng.random() * 0.03, bad)


def post(server: ServerUnderTest, shot: Shot) -> tuple[int, bytes]:
    status, headers, raw = server.request("POST", shot.path, shot.body, {"X-Request-Id": shot.request_id})
    check_answer(status, headers, raw)
    return status, raw


def leave(server: ServerUnderTest, shot: Shot) -> None:
    """Ask, and be gone before the answer has ended."""
    raw = json.dumps(shot.body).encode()
    head = f"POST {shot.path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(address_of(server), timeout=20) as connection:
        connection.sendall(head.encode() + raw)
        Event().wait(shot.after_s)


def fire(place: Range, shot: Shot) -> Answer | dict[str, Any] | None:
    """The answer, checked; None where there is none to look at."""
    if shot.deed == "leave":
        leave(place.server, shot)
        return None
    status, raw = post(place.server, shot)
    place.seen[f"{shot.path} {shot.deed}", str(status)] += 1
    if shot.bad is not None:
        assert status in (400, 404), (shot.bad, raw)
        return None
    if shot.path == SCORE and shot.deed == "abort" and status == 409:
        return None
    if b'"context_length_exceeded"' in raw:
        # A chat whose messages came out long.
        numbers = re.search(rb"got (\d+) prompt tokens and (\d+) to generate", raw)
        assert numbers is not None, raw
        assert status == 400
        assert int(numbers[1]) + int(numbers[2]) > MAX_MODEL_LEN
        return None
    assert status == 200, raw
    if shot.path == SCORE:
        return check_score(shot.body, json.loads(raw))
    answer = read_answer(shot.path, raw)
    check_answer_to(shot.path, shot.body, answer, place.tokenizer, may_abort=shot.deed == "abort")
    for said in answer.choices:
        place.seen[f"{shot.path} {shot.deed}", str(said.finish_reason)] += 1
    return answer


def check_score(body: Body, answer: dict[str, Any]) -> dict[str, Any]:
    for one in answer["data"]:
        assert len(one["logprobs"]) == len(one["token_ids"])
        assert max(one["logprobs"]) <= 0
        assert one["score"] == math.fsum(one["logprobs"])
        for token_id, own, entry in zip(
            one["token_ids"], one["logprobs"], one.get("top_logprobs", []), strict=False
        ):
            assert entry[str(token_id)]["logprob"] == own
            assert len(entry) in (body["top_logprobs"], body["top_logprobs"] + 1)
            ranked = [top["logprob"] for top in sorted(entry.values(), key=lambda top: top.get("rank", 99))]
            assert ranked == sorted(ranked, reverse=True)
    assert ("top_logprobs" in answer["data"][0]) == ("top_logprobs" in body)
    return answer


def again(place: Range, shot: Shot, first: Answer | dict[str, Any]) -> None:
    """Asked alone, streamed if it was not, cached if it was not: the same answer, bit for bit."""
    body = dict(shot.body)
    body["use_prefix_cache"] = not body.get("use_prefix_cache", True)
    if shot.path != SCORE and "prompt_logprobs" not in body:
        body.pop("stream_options", None)
        body["stream"] = not body.get("stream", False)
    second = fire(place, Shot(shot.path, body, shot.request_id, "read", 0))
    if isinstance(first, dict):
        assert isinstance(second, dict)
        for one in (*first["data"], *second["data"]):
            del one["num_cached_tokens"]
        assert first["data"] == second["data"]
        return
    assert isinstance(second, Answer)
    assert first.prompt_logprobs == second.prompt_logprobs
    if "seed" in body or body.get("temperature", 1) < 1e-5 or "forced_token_ids" in body:
        assert first.choices == second.choices
    if body.get("logprobs_mode", "raw_logprobs") == "raw_logprobs":
        for said in first.choices:
            score_what_was_said(place, said, use_prefix_cache=body["use_prefix_cache"])


def score_what_was_said(place: Range, said: Said, *, use_prefix_cache: bool) -> None:
    """What the decode path gave each token is what a prefill of the same tokens gives it, bit for bit."""
    if not said.ids or not said.prompt_ids or not said.logprobs:
        return
    fields = {"prompt": said.prompt_ids, "target": said.ids, "use_prefix_cache": use_prefix_cache}
    (score,) = place.server.post(SCORE, **fields)["data"]
    assert score["logprobs"] == [own for _, own, _ in said.logprobs[-len(said.ids) :]]
    place.seen["what was said", "scored"] += 1


def volley(place: Range, seed: int) -> None:
    """Some requests at a time, then each that was read to its end alone."""
    rng = Random(seed)
    shots = [shot_of(rng, f"fuzz-{seed}-{index}") for index in range(VOLLEY)]
    with ThreadPoolExecutor(VOLLEY) as pool:
        futures = [pool.submit(fire, place, shot) for shot in shots]
        for shot in shots:
            if shot.deed == "abort":
                Event().wait(shot.after_s / 4)
                place.server.request("POST", "/abort", {"request_id": shot.request_id})
        for shot, future in zip(shots, futures, strict=True):
            with named(seed, shot):
                future.result(60)
    for shot, future in zip(shots, futures, strict=True):
        answer = future.result()
        if shot.deed == "read" and answer is not None:
            with named(seed, shot):
                again(place, shot, answer)


@contextmanager
def named(seed: int, shot: Shot) -> Iterator[None]:
    """Say with a failure how to see it again."""
    try:
        yield
    except Exception as error:
        error.add_note(f"FIRSTDIFF_FUZZ_SEED={seed}: {shot}")
        raise


@contextmanager
def shooting_range(folder: Path, **engine: Any) -> Iterator[Range]:
    """A server with few blocks and small steps, so that prompts come in chunks and answers are preempted."""
    config = EngineConfig(
        model=str(tool_model(folder)),
        block_size=8,
        num_blocks=40,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        scheduling_policy="priority",
        **engine,
    )
    settings = ServeSettings(engine=config, port=0, served_model_name=MODEL, drain_timeout_s=0)
    tokenizer = Tokenizer.load(folder)
    engines: list[LLMEngine] = []

    def build(emit: Emit) -> tuple[LLMEngine, Identity]:
        built = build_engine(config, emit=emit, clock=SystemClock())
        engines.append(built[0])
        return built

    with serving(InProcessCore(build), settings, tokenizer=tokenizer) as server:
        yield Range(server, engines[0], tokenizer, Counter())
