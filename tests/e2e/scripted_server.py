"""A real server on loopback whose model is a script: the next token is a function of the sequence.

Usage: `with scripted_server(Script(next_token)) as server: requests to server.url`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.core_client import CoreClient, InProcessCore
from firstdiff.engine.engine import Emit, LLMEngine
from firstdiff.engine.listening import bind
from firstdiff.engine.model_store import resolve
from firstdiff.engine.sequence import RunnerOutput, SampledToken, ScheduledBatch, ScheduledSequence, Sequence
from firstdiff.engine.server import RunningServer, ServeSettings, running_server
from firstdiff.engine.tokenizer import Tokenizer
from firstdiff.tracing.clock import SystemClock
from firstdiff.tracing.records import Identity

MODEL = "tiny-random"
NUM_BLOCKS = 64
EOS = 2
TOKENIZER_PATH = resolve(MODEL).path
TOKENIZER = Tokenizer.load(TOKENIZER_PATH)


def spell(text: str) -> Callable[[Sequence], int]:
    """Say `text` over and over, whatever the prompt."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return lambda sequence: ids[sequence.num_output_tokens % len(ids)]


@dataclass
class Script:
    """The runner: `next_token` of each sequence; each step waits `step_s` and for `gate` to be open."""

    next_token: Callable[[Sequence], int]
    step_s: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    engine: LLMEngine | None = None
    is_waiting: bool = False
    """Whether a step waits for the gate."""

    def __post_init__(self) -> None:
        self.gate.set()

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        threading.Event().wait(self.step_s)
        self.is_waiting = not self.gate.is_set()
        assert self.gate.wait(20)
        self.is_waiting = False
        return RunnerOutput(
            [[self._sample(item.sequence)] if item.samples else [] for item in batch.items],
            {
                index: prompt_entries(item)
                for index, item in enumerate(batch.items)
                if item.sequence.sampling.prompt_logprobs is not None
            },
        )

    def _sample(self, sequence: Sequence) -> SampledToken:
        token_id = self.next_token(sequence)
        count = sequence.sampling.logprobs
        if count is None:
            return SampledToken(token_id=token_id)
        top = [(token_id + i, -0.5 - i) for i in range(count)] or [(token_id, -0.5)]
        return SampledToken(token_id=token_id, logprob=-0.5, top_logprobs=top)


def prompt_entries(item: ScheduledSequence) -> list[SampledToken]:
    """The prompt's log-probabilities that a step brings: of token t at position p, -(p + t / 8192)."""
    sequence = item.sequence
    count = sequence.sampling.prompt_logprobs
    assert count is not None
    end = min(item.start + item.num_scheduled_tokens + 1, sequence.num_prompt_tokens)
    entries = []
    for position in range(sequence.num_prompt_logprobs, end):
        token_id = sequence.prompt_token_ids[position]
        logprob = -(position + token_id / 8192)
        top = [(TOKENIZER.vocab_size - 1 - rank, -0.25 - rank / 8) for rank in range(count)]
        entries.append(SampledToken(token_id, logprob, [*top, (token_id, logprob)]))
    return entries


def scripted_core(script: Script, config: EngineConfig, *, max_model_len: int = 256) -> InProcessCore:
    """The engine's own scheduler and loop round a script."""

    def build(emit: Emit) -> tuple[LLMEngine, Identity]:
        engine = script.engine = LLMEngine(
            config,
            runner=script,
            num_blocks=config.num_blocks or NUM_BLOCKS,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            emit=emit,
            clock=SystemClock(),
        )
        return engine, scripted_identity(max_model_len)

    return InProcessCore(build)


def scripted_identity(max_model_len: int) -> Identity:
    return Identity(
        model=MODEL,
        engine="firstdiff",
        engine_version="0",
        instance_id="scripted",
        weights_sha256="0" * 64,
        config_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        chat_template_sha256=None,
        engine_config_sha256="0" * 64,
        engine_config={},
        dtype="fp32",
        device="none",
        vocab_size=TOKENIZER.vocab_size,
        max_model_len=max_model_len,
        versions={},
    )


@dataclass
class ServerUnderTest:
    """A running server and plain HTTP to it."""

    url: str
    running: RunningServer
    loop: asyncio.AbstractEventLoop

    def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers with lower-case names, body); bytes are sent as they are, the rest as JSON."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=20)
        try:
            connection.request(method, path, raw, headers or {})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, **body: object) -> dict[str, object]:
        """The JSON answer to a request that must succeed."""
        status, _, answer = self.request("POST", path, {"model": MODEL, **body})
        assert status == 200, answer
        return json.loads(answer)

    def events(self, path: str, **body: object) -> list[dict[str, object]]:
        """The parsed events of a stream that must end well, without the [DONE]."""
        raw = self.request("POST", path, {"model": MODEL, "stream": True, **body})[2]
        *events, done, rest = raw.split(b"\n\n")
        assert done == b"data: [DONE]"
        assert rest == b""
        return [json.loads(event.removeprefix(b"data: ")) for event in events]

    def refusal(self, path: str, body: object, **headers: str) -> tuple[int, dict[str, str | None]]:
        """(status, error) of a request that must be refused in the envelope."""
        status, _, answer = self.request("POST", path, body, headers)
        assert status >= 400, answer
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error


@contextmanager
def serving(
    core: CoreClient, settings: ServeSettings, *, tokenizer: Tokenizer = TOKENIZER
) -> Iterator[ServerUnderTest]:
    """Run a server in a thread with an event loop of its own."""
    listener = bind("127.0.0.1", 0)
    ready = threading.Event()
    box: list[tuple[ServerUnderTest, asyncio.Event]] = []

    async def run() -> None:
        server = running_server(
            settings,
            listener=listener,
            core=core,
            load_tokenizer=lambda: tokenizer,
            clock=SystemClock(),
            rng=Random(0),
        )
        async with server as running:
            under_test = ServerUnderTest(running.url, running, asyncio.get_running_loop())
            ended = asyncio.Event()
            box.append((under_test, ended))
            ready.set()
            await ended.wait()

    with ThreadPoolExecutor(1, thread_name_prefix="server-under-test") as pool, closing(listener):
        future = pool.submit(lambda: asyncio.run(run()))
        future.add_done_callback(lambda _: ready.set())
        # Where the kernels are compiled first, on a busy machine, a start takes a minute.
        assert ready.wait(180)
        if future.done():
            future.result()
        under_test, ended = box[0]
        try:
            yield under_test
        finally:
            under_test.loop.call_soon_threadsafe(ended.set)
            future.result(20)


@contextmanager
def scripted_server(
    script: Script,
    *,
    log_dir: Path | None = None,
    max_body_bytes: int = 1 << 20,
    body_timeout_s: float = 20.0,
    serve: dict[str, Any] | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    **engine: Any,
) -> Iterator[ServerUnderTest]:
    """`serving` round a script; `serve` are further ServeSettings fields, `engine` those of EngineConfig."""
    config = EngineConfig(model=MODEL, **engine)
    settings = ServeSettings(
        engine=config,
        port=0,
        log_dir=log_dir,
        max_body_bytes=max_body_bytes,
        body_timeout_s=body_timeout_s,
        **{"drain_timeout_s": 0.0} | (serve or {}),
    )
    with serving(scripted_core(script, config), settings, tokenizer=tokenizer) as server:
        yield server
