"""The step loop: commands before steps, one message a step, nothing lost when it ends."""

from __future__ import annotations

import pytest

from firstdiff.engine.config import EngineConfig
from firstdiff.engine.core import CoreLoop
from firstdiff.engine.engine import Emit, EngineRequest, LLMEngine
from firstdiff.engine.messages import (
    Abort,
    Add,
    CoreFailed,
    FromCore,
    PrefixCacheReset,
    Ready,
    Rejected,
    ResetPrefixCache,
    Shutdown,
    StartFailed,
    StepOutput,
    ToCore,
)
from firstdiff.engine.sequence import RunnerOutput, SampledToken, ScheduledBatch
from firstdiff.tracing.clock import VirtualClock
from firstdiff.tracing.records import EngineRequestRow, Identity, LoadRow, Sampling, StepRow, TokenRow

IDENTITY = Identity(
    model="m", engine="e", engine_version="0", instance_id="i", weights_sha256="", config_sha256="",
    tokenizer_sha256="", chat_template_sha256=None, engine_config_sha256="", engine_config={}, dtype="fp32",
    device="none", vocab_size=9, max_model_len=64, versions={},
)  # fmt: skip


class ScriptedChannel:
    """Gives one batch of commands a step; None ends a batch. Orders a Shutdown when the script is over."""

    def __init__(self, *commands: ToCore | None) -> None:
        self.commands = list(commands)
        self.sent: list[FromCore] = []
        self.timeouts_s: list[float] = []

    def receive(self, timeout_s: float) -> ToCore | None:
        self.timeouts_s.append(timeout_s)
        return self.commands.pop(0) if self.commands else Shutdown()

    def send(self, message: FromCore) -> None:
        self.sent.append(message)


class SevenRunner:
    """Every next token is 7."""

    def execute(self, batch: ScheduledBatch) -> RunnerOutput:
        return RunnerOutput([[SampledToken(token_id=7)] if item.samples else [] for item in batch.items])


def add(request_id: str, *, max_tokens: int = 2, prompt: int = 3) -> Add:
    sampling = Sampling(temperature=0, top_k=0, top_p=1.0, seed=0, max_tokens=max_tokens)
    return Add(EngineRequest(request_id=request_id, prompt_token_ids=[1] * prompt, sampling=sampling))


def run(channel: ScriptedChannel, *, orphan_after: int = 10_000, broken: bool = False, **config: int) -> int:
    def build(emit: Emit) -> tuple[LLMEngine, Identity]:
        engine = LLMEngine(
            EngineConfig(model="m", **config),  # type: ignore[arg-type]
            runner=SevenRunner(),
            num_blocks=8,
            max_model_len=64,
            eos_token_ids=frozenset(),
            emit=emit,
            clock=VirtualClock(),
        )
        if broken:
            engine.scheduler.commit = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        return engine, IDENTITY

    rounds = iter(range(orphan_after))
    return CoreLoop(channel, is_orphan=lambda: next(rounds, None) is None).run(build)


def rows_of(channel: ScriptedChannel) -> list[list[str]]:
    names = {TokenRow: "token", EngineRequestRow: "end", StepRow: "step", LoadRow: "load"}
    return [[names[type(row)] for row in m.rows] for m in channel.sent if isinstance(m, StepOutput)]


def test_one_message_a_step_holds_all_its_rows() -> None:
    channel = ScriptedChannel(add("a"), add("b"), None, None, None)
    assert run(channel) == 0
    assert isinstance(channel.sent[0], Ready)
    assert rows_of(channel) == [["token", "token", "step"], ["token", "token", "end", "end", "step"]]


def test_the_loop_waits_only_without_work() -> None:
    channel = ScriptedChannel(None, add("a"), None, None, None)
    run(channel)
    waited = [timeout_s > 0 for timeout_s in channel.timeouts_s]
    # Idle, then idle again until the request came; never while it runs; idle at last.
    assert waited == [True, True, False, False, True, True]


def test_refusals_are_messages() -> None:
    channel = ScriptedChannel(add("a"), add("a"), add("big", prompt=64), add("b"), add("c"), None)
    run(channel, max_num_seqs=1, max_num_waiting=1)
    refused = [(m.request_id, m.cause) for m in channel.sent if isinstance(m, Rejected)]
    assert refused == [("a", "invalid"), ("big", "invalid"), ("c", "queue_full")]


def test_an_abort_sends_the_end_without_waiting_for_a_step() -> None:
    channel = ScriptedChannel(
        add("a", max_tokens=9), None, Abort("a", "stop"), Abort("a", "stop"), None, None
    )
    run(channel)
    assert rows_of(channel) == [["token", "step"], ["end", "load"]]
    (end,) = [
        row
        for m in channel.sent
        if isinstance(m, StepOutput)
        for row in m.rows
        if row.__class__ is EngineRequestRow
    ]
    assert end.finish_reason == "stop"


def test_a_reset_is_answered_with_the_number_of_blocks_that_were_known() -> None:
    channel = ScriptedChannel(
        add("a", prompt=40, max_tokens=1), None, ResetPrefixCache(), ResetPrefixCache(), None
    )
    run(channel)
    known, none = [m.num_blocks for m in channel.sent if isinstance(m, PrefixCacheReset)]
    assert known > 0
    assert none == 0


def test_a_shutdown_ends_every_request_with_a_row() -> None:
    channel = ScriptedChannel(add("a", max_tokens=9), add("b", max_tokens=9), None)
    assert run(channel) == 0
    assert rows_of(channel)[-1] == ["end", "load", "end", "load"]


def test_an_orphan_stops_by_itself() -> None:
    channel = ScriptedChannel(*[None] * 50)
    assert run(channel, orphan_after=3) == 0
    assert len(channel.timeouts_s) == 3


def test_a_broken_engine_says_so_last(caplog: pytest.LogCaptureFixture) -> None:
    channel = ScriptedChannel(add("a"), None, None)
    assert run(channel, broken=True) == 1
    assert channel.sent[-1] == CoreFailed(message="ZeroDivisionError('division by zero')")
    assert "the step loop ended" in caplog.text


def test_an_engine_that_cannot_be_built(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(emit: Emit) -> tuple[LLMEngine, Identity]:
        raise ValueError("expected a model, got none")

    def crashing(emit: Emit) -> tuple[LLMEngine, Identity]:
        raise MemoryError

    for build, is_usage in ((wrong, True), (crashing, False)):
        channel = ScriptedChannel()
        assert CoreLoop(channel, is_orphan=lambda: False).run(build) == 1
        (message,) = channel.sent
        assert isinstance(message, StartFailed)
        assert message.is_usage is is_usage
