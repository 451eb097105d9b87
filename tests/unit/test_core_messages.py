"""The pair's messages survive the wire, each as exactly its own type."""

from __future__ import annotations

import msgspec
import pytest

from firstdiff.engine.engine import EngineRequest
from firstdiff.engine.messages import (
    Abort,
    Add,
    CoreFailed,
    PrefixCacheReset,
    Rejected,
    ResetPrefixCache,
    Shutdown,
    StartFailed,
    StepOutput,
    decode_from_core,
    decode_to_core,
    encode,
)
from firstdiff.tracing.records import EngineRequestRow, Sampling, StepRow, TokenRow

SAMPLING = Sampling(temperature=0.5, top_k=0, top_p=1.0, seed=2**63 - 1, max_tokens=3, stop=["é"])
STEP = StepRow(
    step_index=1, started_ns=1, ended_ns=2, schedule_ns=0, execute_ns=1, batch_size=1, num_prefill_tokens=0,
    num_decode_tokens=1, num_running=1, num_waiting=0, num_preemptions=0, num_used_blocks=1, num_blocks=8,
)  # fmt: skip
TOKEN = TokenRow(
    request_id="r", token_index=0, token_id=5, emitted_ns=1, step_index=1, batch_size=1, logprob=-0.1,
    top_logprobs=[(5, -0.1), (7, -2.5)],
)  # fmt: skip
END = EngineRequestRow(
    request_id="r", prompt_token_ids=[1], sampling=SAMPLING, arrived_ns=0, first_scheduled_ns=1,
    first_token_ns=1, finished_ns=2, finish_reason="stop", error=None, num_cached_tokens=0,
    num_output_tokens=1,
)  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        Add(request=EngineRequest(request_id="r", prompt_token_ids=[0, 2**31], sampling=SAMPLING)),
        Abort(request_id="r", reason="stop"),
        ResetPrefixCache(),
        Shutdown(),
    ],
)
def test_commands_survive_the_wire(message: Add | Abort | ResetPrefixCache | Shutdown) -> None:
    assert decode_to_core(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        StepOutput(rows=[TOKEN, END, STEP]),
        Rejected("r", "queue_full", "full"),
        StartFailed("no model", is_usage=True),
        PrefixCacheReset(num_blocks=7),
        CoreFailed("boom"),
    ],
)
def test_outputs_survive_the_wire(
    message: StepOutput | Rejected | StartFailed | PrefixCacheReset | CoreFailed,
) -> None:
    assert decode_from_core(encode(message)) == message


def test_a_wire_that_is_no_message_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_core(b"\x81\xa4type\xa5other")
