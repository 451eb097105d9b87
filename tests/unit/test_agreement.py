"""Log, spans and metrics say the same, whatever happens; and where they do not, it is found."""

from __future__ import annotations

import json
import random

import pytest

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.engine import EngineRequest, LLMEngine
from firstdiff.engine.sequence import RunnerOutput, SampledToken
from firstdiff.engine.server_ledger import ServerLedger
from firstdiff.tracing.agreement import check_agreement
from firstdiff.tracing.clock import VirtualClock
from firstdiff.tracing.records import EngineRequestRow, HttpRow, Identity, Sampling
from firstdiff.tracing.token_log import ServerStamps
from firstdiff.tracing.trace_sampling import Sampler

IDENTITY = Identity(
    model="m",
    engine="firstdiff",
    engine_version="0",
    instance_id="i",
    weights_sha256="",
    config_sha256="",
    tokenizer_sha256="",
    chat_template_sha256=None,
    engine_config_sha256="",
    engine_config={"block_size": 2},
    dtype="fp32",
    device="none",
    vocab_size=9,
    max_model_len=40,
    versions={},
)


class Moody:
    """A model that says anything, fails alone now and then, and sometimes altogether."""

    def __init__(self, rng, clock):
        self.rng, self.clock = rng, clock

    def execute(self, batch):
        self.clock.advance(self.rng.randrange(1, 10**7))
        if self.rng.random() < 0.01:
            raise ValueError("altogether")
        tokens, failures = [], {}
        for index, item in enumerate(batch.items):
            if self.rng.random() < 0.01:
                failures[index] = "alone"
                tokens.append([])
            else:
                tokens.append([SampledToken(self.rng.randrange(9))] if item.samples else [])
        return RunnerOutput(tokens, {}, failures)


class Life:
    """A server's engine and ledger, with HTTP requests of up to three answers that come, end and are left."""

    def __init__(self, seed, folder, fraction=1.0):
        self.rng, self.clock = random.Random(seed), VirtualClock(start_ns=10**6)
        self.rows = []
        self.sampler = Sampler(fraction)
        self.ledger = ServerLedger(IDENTITY, model_name="m", log_dir=folder, otlp=None, sampler=self.sampler)
        self.engine = LLMEngine(
            EngineConfig(model="none", block_size=2, max_num_seqs=6, max_num_batched_tokens=8),
            runner=Moody(self.rng, self.clock),
            num_blocks=18,
            max_model_len=40,
            eos_token_ids=frozenset({0}),
            emit=self.rows.append,
            clock=self.clock,
        )
        self.open = {}
        self.stamps = {}
        self.num_preemptions = self.num_failed = self.num_aborted = 0

    def ask(self, number):
        received_ns = self.clock.now_ns()
        span_id, trace_id = f"{number + 1:016x}", f"{self.rng.getrandbits(128) | 1:032x}"
        answers = [f"r{number}-{index}" for index in range(self.rng.randrange(0, 4))]
        prompt = [self.rng.randrange(1, 9) for _ in range(self.rng.randrange(1, 16))]
        self.clock.advance(self.rng.randrange(1, 10**5))
        for request_id in answers:
            sampling = Sampling(
                temperature=1, top_k=0, top_p=1, seed=1, max_tokens=self.rng.randrange(1, 20), stop=["x"]
            )
            request = EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
            self.stamps[request_id] = ServerStamps(
                request_id=request_id,
                trace_id=trace_id,
                span_id=span_id,
                endpoint="/v1/completions",
                received_unix_ns=10**18 + received_ns,
                received_ns=received_ns,
                tokenized_ns=self.clock.now_ns(),
            )
            self.ledger.begin(request, trace_id=trace_id)
            self.engine.add(request)
        self.open[number] = (set(answers), answers, trace_id, span_id, received_ns)
        if not answers:
            self.end(number, error_type="400")

    def end(self, number, *, error_type=None):
        _, answers, trace_id, span_id, received_ns = self.open.pop(number)
        for request_id in answers:
            self.ledger.end(self.stamps[request_id], text="text", flushed_ns=self.clock.now_ns())
        self.ledger.end_http(
            HttpRow(
                request_id=f"r{number}",
                trace_id=trace_id,
                span_id=span_id,
                parent_span_id=None,
                sampled=self.sampler.head(trace_id, None),
                method="POST",
                route="/v1/completions",
                status=None if error_type == "cancelled" else 200,
                error_type=error_type,
                received_unix_ns=10**18 + received_ns,
                received_ns=received_ns,
                ended_ns=self.clock.now_ns(),
                num_answers=len(answers),
            )
        )

    def step(self):
        self.engine.step()
        self.deliver()

    def deliver(self):
        rows, self.rows[:] = self.rows[:], []
        self.ledger.feed(rows)
        for row in rows:
            if isinstance(row, EngineRequestRow):
                self.num_preemptions += row.num_preemptions
                self.num_failed += row.finish_reason == "error"
                for number, (waiting, *_) in list(self.open.items()):
                    waiting.discard(row.request_id)
                    if not waiting:
                        self.clock.advance(self.rng.randrange(1, 10**5))
                        self.end(number)

    def leave(self):
        """A client goes: its HTTP request ends at once, the rows of its answers come later."""
        number = self.rng.choice(list(self.open))
        answers = self.open[number][1]
        self.end(number, error_type="cancelled")
        for request_id in answers:
            self.num_aborted += self.engine.abort(request_id)
        self.deliver()

    def live(self, num_requests=40):
        for number in range(num_requests):
            self.ask(number)
            for _ in range(self.rng.randrange(4)):
                self.step()
            if self.open and self.rng.random() < 0.2:
                self.leave()
        while self.engine.has_work:
            self.step()
        assert self.ledger.num_kept == 0
        scrape = self.ledger.exposition("")[1].decode()
        self.ledger.close()
        return scrape


@pytest.mark.parametrize("seed", range(25))
def test_they_agree_through_aborts_errors_and_preemptions(seed, tmp_path, caplog):
    caplog.set_level("CRITICAL")
    life = Life(seed, tmp_path, fraction=[1.0, 0.5][seed % 2])
    scrape = life.live()
    assert life.num_preemptions > 0
    assert life.num_aborted > 0
    found = check_agreement(tmp_path, exposition=scrape)
    assert (found.disagreements, found.unknown) == ([], [])
    assert found.num_http == 40
    assert found.num_spans > 100
    assert found.num_samples > 300


def change_line(path, change):
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line + b"\n" for line in change(lines)))


def set_first(line, name, value):
    row = json.loads(line)
    row[name] = value(row[name])
    return json.dumps(row).encode()


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("spans.jsonl", lambda lines: lines[1:], "is in the log, and not among the spans"),
        ("spans.jsonl", lambda lines: [*lines, lines[0]], "are there twice"),
        ("spans.jsonl", lambda lines: [lines[0].replace(b"POST", b"PUT"), *lines[1:]], "by the log"),
        ("http.jsonl", lambda lines: lines[1:], "is not in the log"),
        ("http.jsonl", lambda lines: lines[:-1], "gen_ai_server_request_duration_seconds_count"),
        ("steps.jsonl", lambda lines: lines[1:], "firstdiff_engine_steps_total"),
        (
            "steps.jsonl",
            lambda lines: [set_first(lines[0], "num_prefill_tokens", lambda n: n + 1), *lines[1:]],
            "firstdiff_iteration_tokens_total",
        ),
        ("tokens.jsonl", lambda lines: lines[:-1], "firstdiff_generation_tokens_total"),
        (
            "tokens.jsonl",
            lambda lines: [*lines[:-1], set_first(lines[-1], "flushed_ns", lambda ns: ns + 10**9)],
            "firstdiff_e2e_request_latency_seconds",
        ),
        (
            "tokens.jsonl",
            lambda lines: [*lines[:-1], set_first(lines[-1], "flushed_ns", lambda ns: ns + 1)],
            "firstdiff.phase.stream.duration_ns",
        ),
    ],
)
def test_each_disagreement_is_found(tmp_path, caplog, file, change, words):
    caplog.set_level("CRITICAL")
    scrape = Life(3, tmp_path).live()
    assert check_agreement(tmp_path, exposition=scrape).disagreements == []
    change_line(tmp_path / file, change)
    found = check_agreement(tmp_path, exposition=scrape)
    assert any(words in sentence for sentence in found.disagreements), found.disagreements[:5]


def test_what_cannot_be_compared_is_said(tmp_path, caplog):
    caplog.set_level("CRITICAL")
    Life(1, tmp_path, fraction=0.0).live(3)
    found = check_agreement(tmp_path)
    assert found.disagreements == []
    assert any("metrics were not compared" in sentence for sentence in found.unknown)
    for text in ("", "# nothing\n", "up 1\n", "\ufffd{{{ 1\n", "firstdiff_x{a=\n"):
        with pytest.raises(ValueError, match="expected "):
            check_agreement(tmp_path, exposition=text)
    with pytest.raises(ValueError, match="expected a token log"):
        check_agreement(tmp_path / "none")
